"""A context laid into pages as an engine does it, for the tests of paged readers and kernels."""

from __future__ import annotations

import torch
from read_cases import HEAD_DIM, Spec, make, product_rope
from torch import Tensor

from methods.paged import PagedLayer, PagedReader
from methods.reader import ContextCache, DenseReader, DrafterGeometry
from methods.rope import Rope, rotate

JUNK = float("nan")  # what no read may touch


def tensor(*values):
    return torch.tensor(values, dtype=torch.int32)


def open_paged(method, geometry, capacity, dtype=torch.float64, **executors):
    return PagedReader(method, geometry, max_context=capacity, dtype=dtype, device="cpu", **executors)


def judged_read(
    spec: Spec, page_size: int, dtype: torch.dtype = torch.float64, *, strided: bool = False, device: str = "cpu",
    judge_dtype: torch.dtype | None = None, raw_page_size: int | None = None, **executors,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """One read of a matrix point by both: ``(paged, dense)``, both on the CPU. The judge computes in ``judge_dtype`` on
    what ``dtype`` holds of the inputs."""
    tensors = tuple(x.to(dtype) for x in spec.tensors())
    exact = dtype if judge_dtype is None else judge_dtype
    geometry = DrafterGeometry(
        (spec.layer,), *spec.heads, HEAD_DIM, HEAD_DIM, spec.scale, product_rope(spec.rope), spec.B
    )
    method, request = make(spec), spec.request
    q, k, v, kb, vb = (x.to(exact) for x in tensors)
    cache = ContextCache(geometry, spec.N + 20, exact)
    cache.append(k[None], v[None])
    judge = DenseReader(method, geometry, request, cache)
    judge.prepare()
    theirs = judge.read(0, q, kb, vb)

    q, k, v, kb, vb = tensors
    reader = PagedReader(method, geometry, max_context=spec.N + 20, dtype=dtype, device=device, **executors)
    reader.begin(request)
    generator = torch.Generator().manual_seed(spec.seed)
    pages = lay(
        k, v, kb, vb, reader.rope(0, request), page_size, generator, raw=reader.needs_raw_keys, strided=strided
    )
    if raw_page_size is not None:  # the keys beside which the values of entries beyond the window are laid
        other = lay(k, v, kb, vb, reader.rope(0, request), raw_page_size, generator)
        pages = PagedLayer(pages.keys, other.raw_keys, pages.values, pages.table, other.values, other.table)
        reader.committed(spec.N, [pages])
        return reader.read(0, q, pages, tensor(spec.N)), theirs
    raw = None if pages.raw_keys is None else pages.raw_keys.to(device)
    pages = PagedLayer(pages.keys.to(device), raw, pages.values.to(device), pages.table.to(device))
    reader.committed(spec.N, [pages])
    return reader.read(0, q.to(device), pages, tensor(spec.N).to(device)).cpu(), theirs


def shuffled_table(pages: int, spare: int, generator: torch.Generator) -> tuple[Tensor, int]:
    """A table of ``pages`` pages in random order, ``spare`` entries that no context reaches, and the pages of the
    pool."""
    pool = pages + 3
    order = torch.randperm(pool, generator=generator)[:pages]
    beyond = torch.randint(0, pool, (spare,), generator=generator)
    return torch.cat((order, beyond)).to(torch.int32), pool


def into_pages(entries: Tensor, table: Tensor, pool: int, page_size: int, strided: bool = False) -> Tensor:
    """``entries [n, Hkv, d]`` in ``[pool, page_size, Hkv, d]``, junk everywhere else. ``strided``: with the heads
    outermost in memory, as some engines store them."""
    n, heads, dim = entries.shape
    shape = (heads, pool, page_size, dim) if strided else (pool, page_size, heads, dim)
    stored = torch.full(shape, JUNK, dtype=entries.dtype)
    if strided:
        stored = stored.permute(1, 2, 0, 3)
    at = torch.arange(n)
    stored[table[at // page_size].long(), at % page_size] = entries
    return stored


def lay(
    k: Tensor,
    v: Tensor,
    kb: Tensor,
    vb: Tensor,
    rope: Rope,
    page_size: int,
    generator: torch.Generator,
    *,
    raw: bool = True,
    strided: bool = False,
) -> PagedLayer:
    """Unrotated context ``k [N, Hkv, d]``, ``v`` and block ``kb [B, Hkv, d]``, ``vb`` as one layer's pages."""
    context, rows = k.shape[0], kb.shape[0]
    keys = rotate(torch.cat((k, kb)), torch.arange(context + rows), rope)
    table, pool = shuffled_table(-(-(context + rows) // page_size), 5, generator)
    return PagedLayer(
        into_pages(keys, table, pool, page_size, strided),
        into_pages(k, table, pool, page_size, strided) if raw else None,
        into_pages(torch.cat((v, vb)), table, pool, page_size, strided),
        table,
    )
