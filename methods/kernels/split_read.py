"""One read of a draft block in two launches: all its parts over all splits of their keys, then the merge.

A read has one or two parts (near and far: two sets of keys, two turned queries). The keys of all parts are cut into
``splits`` pieces and every piece is one program per key head; the programs are dealt to the parts by how many keys each
part has at the moment, from lengths in device memory. The second launch merges the pieces of a part by their log sums
and the parts by their masses (section 3.3, Eqs. 2-4). So FOLD costs as many launches as the original read, and a graph
captured once serves every length.

The rows of a block and the query heads of a group are folded into one tile of query rows, so that a key is read from
memory once however many rows read it. Sums are float32. Importing this module needs Triton.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime.errors import OutOfResources

from methods.kernels.merge import merge
from methods.kernels.splits import SPLITS, choose
from methods.paged import Call

LOG2E = 1.4426950408889634
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # as Triton decides when it is imported
# Numbers whose values a compiled kernel must not depend on, so that methods and shapes share it.
RUNTIME = [name + part for name in ("shift", "most", "left", "right") for part in "12"] + ["rows", "group", "heads"]
UNBOUNDED = 2**29  # no bound: farther than any key, and far from the end of int32


@dataclass(frozen=True)
class Tile:
    """How a program works: query rows and keys of a tile, warps, and how many tiles of keys are on their way."""

    rows: int
    keys: int
    warps: int
    stages: int


@triton.jit
def _keys(length, shift, most):
    """How many keys there are."""
    return tl.minimum(tl.maximum(tl.load(length) + shift, 0), most)


@triton.jit
def _seen(keys, row, rows, left, right):
    """First key that ``row`` reads and the one after its last, ``keys`` there being; empty if end <= first."""
    diagonal = keys - rows + row
    return tl.maximum(diagonal - left, 0), tl.minimum(diagonal + right + 1, keys)


@triton.jit
def _tiles_of(keys, rows, left, right, KEYS: tl.constexpr):
    """Tiles that the rows of the block read together."""
    first, _ = _seen(keys, 0, rows, left, right)
    _, end = _seen(keys, rows - 1, rows, left, right)
    return tl.maximum(tl.cdiv(tl.maximum(end, 0), KEYS) - first // KEYS, 0)


@triton.jit
def _near_splits(near_tiles, far_tiles, splits):
    """How many of the splits go to the first part: in proportion, and one at least for each that has keys."""
    share = tl.cdiv(splits * near_tiles, tl.maximum(near_tiles + far_tiles, 1))
    return tl.where(far_tiles > 0, tl.minimum(share, splits - 1), splits)


@triton.jit
def _aligned(x, ALIGNED: tl.constexpr):
    """What was chosen at run time is as aligned as both choices."""
    if ALIGNED:
        x = tl.multiple_of(x, 16)
    return x


@triton.jit(do_not_specialize=RUNTIME)
def _split_kernel(
    q1, k1, v1, table1, length1, shift1, most1, left1, right1, scale1,
    q1_row, q1_head, k1_page, k1_slot, k1_head, v1_page, v1_slot, v1_head,
    q2, k2, v2, table2, length2, shift2, most2, left2, right2, scale2,
    q2_row, q2_head, k2_page, k2_slot, k2_head, v2_page, v2_slot, v2_head,
    out_ptr, lse_ptr, out_slot, out_row, out_head, lse_slot, rows, group, heads, row_tiles,
    TWO: tl.constexpr, PAGED: tl.constexpr, PAGE: tl.constexpr, ALIGNED: tl.constexpr, EXACT: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, D_PAD: tl.constexpr, DV_PAD: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Grid ``[Hkv * row tiles, splits]``: row tiles of a key head side by side, so that one finds the other's keys in
    the cache. One loop serves both parts: a program takes its part's pointers first."""
    row_tile, kv_head = tl.program_id(0) % row_tiles, (tl.program_id(0) // row_tiles).to(tl.int64)
    slot, splits = tl.program_id(1), tl.num_programs(1)
    keys = _keys(length1, shift1, most1)
    split = slot
    if TWO:
        keys2 = _keys(length2, shift2, most2)
        near = _near_splits(
            _tiles_of(keys, rows, left1, right1, KEYS), _tiles_of(keys2, rows, left2, right2, KEYS), splits
        )
        second = slot >= near
        split, splits = tl.where(second, slot - near, slot), tl.where(second, splits - near, near)
        keys, scale1 = tl.where(second, keys2, keys), tl.where(second, scale2, scale1)
        left1, right1 = tl.where(second, left2, left1), tl.where(second, right2, right1)
        q1, table1 = _aligned(tl.where(second, q2, q1), ALIGNED), tl.where(second, table2, table1)
        k1, v1 = _aligned(tl.where(second, k2, k1), ALIGNED), _aligned(tl.where(second, v2, v1), ALIGNED)
        q1_row = _aligned(tl.where(second, q2_row, q1_row), ALIGNED)
        q1_head = _aligned(tl.where(second, q2_head, q1_head), ALIGNED)
        k1_page = _aligned(tl.where(second, k2_page, k1_page), ALIGNED)
        k1_slot = _aligned(tl.where(second, k2_slot, k1_slot), ALIGNED)
        k1_head = _aligned(tl.where(second, k2_head, k1_head), ALIGNED)
        v1_page = _aligned(tl.where(second, v2_page, v1_page), ALIGNED)
        v1_slot = _aligned(tl.where(second, v2_slot, v1_slot), ALIGNED)
        v1_head = _aligned(tl.where(second, v2_head, v1_head), ALIGNED)

    at = row_tile * ROWS + tl.arange(0, ROWS)
    row, head = at // group, kv_head * group + at % group
    live = at < rows * group
    dim, value_dim = tl.arange(0, D_PAD), tl.arange(0, DV_PAD)
    q = tl.load(
        q1 + row[:, None] * q1_row + head[:, None] * q1_head + dim[None, :],
        mask=live[:, None] & (dim[None, :] < D),
        other=0.0,
    )

    # What this tile's rows read together, cut into whole tiles of keys counted from key 0.
    first, _ = _seen(keys, row_tile * ROWS // group, rows, left1, right1)
    _, end = _seen(keys, tl.minimum(((row_tile + 1) * ROWS - 1) // group, rows - 1), rows, left1, right1)
    tile = first // KEYS
    each = tl.cdiv(tl.maximum(tl.cdiv(tl.maximum(end, 0), KEYS) - tile, 0), splits)
    begin = (tile + split * each) * KEYS
    stop = tl.minimum(begin + each * KEYS, end)
    row_first, row_end = _seen(keys, row, rows, left1, right1)

    largest = tl.full([ROWS], float("-inf"), tl.float32)  # in base 2, as all of the loop
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, DV_PAD], tl.float32)
    for start in tl.range(begin, stop, KEYS, num_stages=STAGES):
        key = start + tl.arange(0, KEYS)
        # Pages outside of what is read may be another's, or hold anything.
        inside = (key >= first) & (key < end)
        if PAGED:
            page = tl.load(table1 + key // PAGE, mask=inside, other=0).to(tl.int64)
            k_at, v_at = page * k1_page + key % PAGE * k1_slot, page * v1_page + key % PAGE * v1_slot
        else:
            k_at, v_at = key.to(tl.int64) * k1_slot, key.to(tl.int64) * v1_slot
        k = tl.load(
            k1 + kv_head * k1_head + k_at[None, :] + dim[:, None],
            mask=inside[None, :] & (dim[:, None] < D),
            other=0.0,
        )
        if EXACT:
            logits = tl.dot(q, k, input_precision="ieee") * scale1
        else:
            logits = tl.dot(q, k) * scale1
        seen = (key[None, :] >= row_first[:, None]) & (key[None, :] < row_end[:, None])
        logits = tl.where(seen, logits, float("-inf"))
        grown = tl.maximum(largest, tl.max(logits, 1))
        base = tl.where(grown == float("-inf"), 0.0, grown)
        weights = tl.exp2(logits - base[:, None])
        kept = tl.exp2(largest - base)
        total = total * kept + tl.sum(weights, 1)
        v = tl.load(
            v1 + kv_head * v1_head + v_at[:, None] + value_dim[None, :],
            mask=inside[:, None] & (value_dim[None, :] < DV),
            other=0.0,
        )
        if EXACT:
            acc = tl.dot(weights, v, acc * kept[:, None], input_precision="ieee")
        else:
            acc = tl.dot(weights.to(v.dtype), v, acc * kept[:, None])
        largest = grown

    some = total > 0
    acc = acc / tl.where(some, total, 1.0)[:, None]
    lse = tl.where(some, (largest + tl.log2(tl.where(some, total, 1.0))) * 0.6931471805599453, float("-inf"))
    tl.store(
        out_ptr + slot.to(tl.int64) * out_slot + row[:, None] * out_row + head[:, None] * out_head + value_dim[None, :],
        acc.to(out_ptr.dtype.element_ty),
        mask=live[:, None] & (value_dim[None, :] < DV),
    )
    tl.store(lse_ptr + slot.to(tl.int64) * lse_slot + row * heads + head, lse, mask=live)


@triton.jit
def _log_sum(lse):
    """Natural log of the sum of exponentials of each row; -inf if all are, never NaN."""
    largest = tl.max(lse, 1)
    base = tl.where(largest == float("-inf"), 0.0, largest)
    total = tl.sum(tl.exp(lse - base[:, None]), 1)
    return tl.where(total > 0, base + tl.log(tl.where(total > 0, total, 1.0)), float("-inf"))


@triton.jit(do_not_specialize=RUNTIME)
def _combine_kernel(
    parts_ptr, lses_ptr, out_ptr, mass_ptr,
    length1, shift1, most1, left1, right1, length2, shift2, most2, left2, right2,
    rows, heads, splits, sharpen1, sharpen2,
    TWO: tl.constexpr, KEYS: tl.constexpr, DV: tl.constexpr, DIMS: tl.constexpr, SPLITS_PAD: tl.constexpr,
    PLACES: tl.constexpr,
):  # fmt: skip
    """Grid ``[ceil(B * Hq / PLACES), ceil(dv / DIMS)]``: the pieces of some rows and heads. All tensors dense."""
    place = tl.program_id(0) * PLACES + tl.arange(0, PLACES)
    there = place < rows * heads
    dim = tl.program_id(1) * DIMS + tl.arange(0, DIMS)
    slot = tl.arange(0, SPLITS_PAD)[None, :]
    at = slot * rows * heads + place[:, None]
    lse = tl.load(lses_ptr + at, mask=(slot < splits) & there[:, None], other=float("-inf"))
    if TWO:
        # The same lengths and tiles as in the first launch give the same deal.
        near = _near_splits(
            _tiles_of(_keys(length1, shift1, most1), rows, left1, right1, KEYS),
            _tiles_of(_keys(length2, shift2, most2), rows, left2, right2, KEYS),
            splits,
        )
        first = slot < near
        sum1 = _log_sum(tl.where(first, lse, float("-inf")))
        sum2 = _log_sum(tl.where(first, float("-inf"), lse))
        mass1, mass2 = sum1 / sharpen1, sum2 / sharpen2
        largest = tl.maximum(mass1, mass2)
        base = tl.where(largest == float("-inf"), 0.0, largest)
        both = tl.exp(mass1 - base) + tl.exp(mass2 - base)
        mass = tl.where(both > 0, base + tl.log(tl.where(both > 0, both, 1.0)), float("-inf"))
        # A piece's share of its part, and the part's of the read.
        shift = tl.where(first, (mass1 - sum1 - mass)[:, None], (mass2 - sum2 - mass)[:, None])
    else:
        total = _log_sum(lse)
        mass = total / sharpen1
        shift = -total[:, None]
    weight = tl.where(lse == float("-inf"), 0.0, tl.exp(lse + shift))
    piece = tl.load(
        parts_ptr + at[:, :, None] * DV + dim[None, None, :],
        mask=(weight > 0)[:, :, None] & (dim < DV)[None, None, :],
        other=0.0,
    )
    out = tl.sum(piece * weight[:, :, None], 1)
    tl.store(
        out_ptr + place[:, None] * DV + dim[None, :],
        out.to(out_ptr.dtype.element_ty),
        mask=there[:, None] & (dim < DV)[None, :],
    )
    tl.store(mass_ptr + place, mass, mask=there & (place * 0 + tl.program_id(1) == 0))


class SplitRead:
    """:class:`methods.paged.Attend` and :class:`methods.paged.Fused` in Triton: bfloat16, float16 or float32.

    ``longest``: keys that the slowest read of the engine has; the microbenchmark that chooses the splits of a shape
    (Appendix B.4) runs there, once per device and shape. ``splits`` and ``tile`` set them by hand.
    """

    def __init__(self, longest: int, *, splits: int | None = None, tile: Tile | None = None):
        if longest < 1 or (splits is not None and splits < 1):
            raise ValueError(f"SplitRead of {longest} keys in {splits} splits: both must be at least 1")
        self.longest = longest
        self.splits = splits
        self.tile = tile

    def __call__(
        self,
        q: Tensor,
        keys: Tensor,
        values: Tensor,
        table: Tensor | None,
        length: Tensor,
        *,
        left: int | None,
        right: int | None,
        scale: float,
    ) -> tuple[Tensor, Tensor]:
        """One attention call; see :class:`methods.paged.Attend`."""
        return self.fused([Call(q, keys, values, table, length, scale, left=left, right=right)])

    def fused(self, calls: Sequence[Call]) -> tuple[Tensor, Tensor]:
        """Calls whose queries have one shape, merged: ``out [R, Hq, dv]`` and log mass ``[R, Hq]`` float32.

        Two calls whose keys are stored alike (pages of one size, or none) are one read. Raises ValueError for other
        dtypes, shapes that do not fit, or vectors that do not lie dense.
        """
        for call in calls:
            _check(call)
        if any(call.query.shape != calls[0].query.shape for call in calls):
            raise ValueError("only calls of one query shape can be fused")
        outs, masses, waiting = [], [], list(calls)
        while waiting:
            together = waiting[: 2 if len(waiting) > 1 and _stored_alike(*waiting[:2]) else 1]
            del waiting[: len(together)]
            out, mass = launch(together, self._cut(together))
            outs.append(out)
            masses.append(mass)
        return (outs[0], masses[0]) if len(outs) == 1 else merge(outs, masses, [1.0] * len(outs))

    def _cut(self, calls: Sequence[Call]) -> tuple[int, Tile]:
        tiles = tiles_for(calls[0]) if self.tile is None else (self.tile,)
        splits = SPLITS if self.splits is None else (self.splits,)
        if len(tiles) == len(splits) == 1:
            return splits[0], tiles[0]
        cuts = [(count, tile) for tile in tiles for count in splits]
        untimed = splits[len(splits) // 2], tiles[0]
        return choose(calls, self.longest, cuts, launch, untimed=untimed, unfit=(OutOfResources,))


def tiles_for(call: Call) -> tuple[Tile, ...]:
    """Tiles worth trying for a call, the likeliest first.

    The query and the tiles of keys and values on their way must fit 227 KiB of shared memory, the float32 sums of a
    tile of rows the registers. Of three stages one waits for the table, one for keys and values, one computes;
    five give each of the first two twice the time.
    """
    folded = call.query.shape[0] * call.query.shape[1] // call.keys.shape[2]
    widest = max(call.keys.shape[3], call.values.shape[3])
    rows = 16
    while rows < folded and rows < (128 if widest <= 128 else 64):
        rows *= 2
    warps = 4 if rows <= 64 and widest <= 256 else 8
    if call.query.dtype == torch.float32:  # for exactness, not for speed: no tensor cores, twice the bytes
        return (Tile(min(rows, 32), 32 if widest <= 128 else 16, 4, 1),)
    if widest <= 64:
        return Tile(rows, 128, warps, 3), Tile(rows, 64, warps, 5)
    if widest <= 128:
        return Tile(rows, 64, warps, 3), Tile(rows, 64, warps, 5), Tile(rows, 128, 8, 3)
    if widest <= 256:
        return Tile(rows, 32, warps, 3), Tile(rows, 32, warps, 5), Tile(rows, 64, warps, 3)
    return Tile(rows, 16, warps, 3), Tile(rows, 16, warps, 5), Tile(min(rows, 32), 32, warps, 3)


def launch(calls: Sequence[Call], cut: tuple[int, Tile]) -> tuple[Tensor, Tensor]:
    """The two launches of a read in so many splits, but two at least for two parts, and such tiles."""
    splits, tile = cut
    near, two = calls[0], len(calls) == 2
    far = calls[1] if two else near
    rows, heads, dim = near.query.shape
    kv_heads, value_dim = near.keys.shape[2], near.values.shape[3]
    group = heads // kv_heads
    splits = max(splits, 2) if two else splits
    row_tiles = triton.cdiv(rows * group, tile.rows)
    device = near.query.device
    out = torch.empty(rows, heads, value_dim, dtype=near.query.dtype, device=device)
    mass = torch.empty(rows, heads, dtype=torch.float32, device=device)
    alone = splits == 1 and near.sharpen == 1.0  # the only piece is the read
    parts = out[None] if alone else torch.empty(splits, rows, heads, value_dim, dtype=torch.float32, device=device)
    lses = mass[None] if alone else torch.empty(splits, rows, heads, dtype=torch.float32, device=device)
    _split_kernel[row_tiles * kv_heads, splits](
        *_of(near), *_of(far), parts, lses, parts.stride(0), parts.stride(1), parts.stride(2), lses.stride(0),
        rows, group, heads, row_tiles,
        TWO=two, PAGED=near.table is not None, PAGE=1 if near.table is None else near.keys.shape[1],
        ALIGNED=all(map(_is_aligned, calls)),
        EXACT=near.query.dtype == torch.float32,
        D=dim, DV=value_dim, D_PAD=_padded(dim), DV_PAD=_padded(value_dim),
        ROWS=tile.rows, KEYS=tile.keys, STAGES=tile.stages, num_warps=tile.warps,
    )  # fmt: skip
    if not alone:
        dims, padded = min(128, _padded(value_dim)), triton.next_power_of_2(splits)
        places = 64 if INTERPRETED else max(1, 16 // padded)  # few programs suit the interpreter
        _combine_kernel[triton.cdiv(rows * heads, places), triton.cdiv(value_dim, dims)](
            parts, lses, out, mass, *_keys_of(near), *_keys_of(far), rows, heads, splits, near.sharpen, far.sharpen,
            TWO=two, KEYS=tile.keys, DV=value_dim, DIMS=dims, SPLITS_PAD=padded, PLACES=places, num_warps=4,
        )  # fmt: skip
    return out, mass


def _of(call: Call) -> tuple[Tensor | int | float, ...]:
    """A call's arguments of the first launch, in its order."""
    q, k, v = call.query, call.keys, call.values
    table = call.length if call.table is None else call.table  # any pointer, never read
    return (
        q, k, v, table, *_keys_of(call), call.scale * call.sharpen * LOG2E, q.stride(0), q.stride(1),
        k.stride(0), k.stride(1), k.stride(2), v.stride(0), v.stride(1), v.stride(2),
    )  # fmt: skip


def _keys_of(call: Call) -> tuple[Tensor | int, ...]:
    """How many keys a call has and which of them a row reads: length, shift, most, left, right."""
    bounds = (UNBOUNDED if bound is None else bound for bound in (call.left, call.right))
    return call.length, call.shift, 2**31 - 1 if call.most is None else call.most, *bounds


def _stored_alike(call: Call, other: Call) -> bool:
    pages = [None if x.table is None else x.keys.shape[1] for x in (call, other)]
    dims = [(*x.keys.shape[2:], x.values.shape[3]) for x in (call, other)]
    return pages[0] == pages[1] and dims[0] == dims[1]


def _is_aligned(call: Call) -> bool:
    tensors = call.query, call.keys, call.values
    return all(x.data_ptr() % 16 == 0 and all(s % 16 == 0 for s in x.stride()[:-1]) for x in tensors)


def _padded(dim: int) -> int:
    return max(16, triton.next_power_of_2(dim))


def _check(call: Call) -> None:
    q, k, v = call.query, call.keys, call.values
    if q.dtype not in DTYPES or k.dtype != q.dtype or v.dtype != q.dtype:
        raise ValueError(
            f"the Triton read takes bfloat16, float16 or float32 throughout, got {q.dtype}, {k.dtype} and {v.dtype}"
        )
    fits = (
        q.dim() == 3
        and k.dim() == v.dim() == 4
        and k.shape[1:] == (*v.shape[1:3], q.shape[2])
        and q.shape[1] % k.shape[2] == 0
    )
    if not fits:
        shapes = ", ".join(str(tuple(x.shape)) for x in (q, k, v))
        raise ValueError(
            "the Triton read wants q [R,Hq,d], keys [P,S,Hkv,d], values [P,S,Hkv,dv], Hq a multiple of Hkv; "
            f"got {shapes}"
        )
    if any(x.shape[-1] > 1 and x.stride(-1) != 1 for x in (q, k, v)):
        raise ValueError("the Triton read wants the dims of a vector side by side in memory (last stride 1)")
    if call.table is None and (k.shape[0] != 1 or v.shape[0] != 1):
        raise ValueError(f"keys of {k.shape[0]} pages without a table: only one page can be read as it lies")
