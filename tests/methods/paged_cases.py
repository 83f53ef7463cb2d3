"""A context laid into pages as an engine does it, for the tests of paged readers and kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from methods.paged import PagedLayer
from methods.rope import Rope, rotate

JUNK = float("nan")  # what no read may touch


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
