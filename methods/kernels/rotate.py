"""A block's queries turned for both of their reads, in one launch. Importing this module needs Triton."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from methods.paged import DeviceRope, Place, Tally
from methods.reading import LogQueryScale

FLOATS = (torch.bfloat16, torch.float16, torch.float32)


@triton.jit
def _cos_sin(place, freq, mscale):
    """Of an angle in float64 turns, cut to half a turn before it is rounded: as exact at position 1,000,000 as at 0."""
    turns = place.to(tl.float64) * freq * 0.15915494309189535
    part = (turns - tl.floor(turns + 0.5)).to(tl.float32) * 6.283185307179586
    return tl.cos(part) * mscale, tl.sin(part) * mscale


@triton.jit
def _put(out, x1, x2, cos, sin, at, pair, PAIRS: tl.constexpr, mask):
    kind = out.dtype.element_ty
    tl.store(out + at + pair, (x1 * cos - x2 * sin).to(kind), mask=mask)
    tl.store(out + at + PAIRS + pair, (x2 * cos + x1 * sin).to(kind), mask=mask)


@triton.jit
def _rotate_kernel(
    q_ptr, near_ptr, far_ptr, length_ptr, freq_ptr, mscale_ptr, terms_ptr, counted_ptr,
    q_row, q_head, heads, distance, log_reference, term_row,
    FAR: tl.constexpr, CAPPED: tl.constexpr, FOLLOWS: tl.constexpr, RAW: tl.constexpr, SCALED: tl.constexpr,
    TALLY: tl.constexpr, D: tl.constexpr, PAIRS: tl.constexpr, PAIRS_PAD: tl.constexpr,
    REST_PAD: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """Grid ``[B, ceil(Hq / HEADS)]``; outputs ``[B, Hq, D]`` dense."""
    row = tl.program_id(0)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    length = tl.load(length_ptr)
    pair = tl.arange(0, PAIRS_PAD)
    freq = tl.load(freq_ptr + pair, mask=pair < PAIRS, other=0.0)
    mscale = tl.load(mscale_ptr).to(tl.float32)
    mask = (head < heads)[:, None] & (pair < PAIRS)[None, :]
    source = q_ptr + row * q_row + head[:, None] * q_head
    x1 = tl.load(source + pair[None, :], mask=mask, other=0.0).to(tl.float32)
    x2 = tl.load(source + PAIRS + pair[None, :], mask=mask, other=0.0).to(tl.float32)
    factor = 1.0
    if SCALED:
        factor = tl.maximum(tl.log((length + row + 1).to(tl.float32)) / log_reference, 1.0)
        x1, x2 = x1 * factor, x2 * factor
    at = (row * heads + head[:, None]) * D
    cos, sin = _cos_sin(length + row, freq, mscale)
    _put(near_ptr, x1, x2, cos[None, :], sin[None, :], at, pair[None, :], PAIRS, mask)
    if FAR:
        place = length * 0 + distance
        if CAPPED:
            place = tl.minimum(place, length)
        if FOLLOWS:
            place += row
        far_mscale = mscale
        if RAW:  # raw keys lack the factor that turning gives a key
            far_mscale = mscale * mscale
        cos, sin = _cos_sin(place, freq, far_mscale)
        _put(far_ptr, x1, x2, cos[None, :], sin[None, :], at, pair[None, :], PAIRS, mask)
    if 2 * PAIRS < D:  # dims that do not turn
        rest = 2 * PAIRS + tl.arange(0, REST_PAD)
        mask = (head < heads)[:, None] & (rest < D)[None, :]
        x = tl.load(source + rest[None, :], mask=mask, other=0.0).to(tl.float32)
        if SCALED:
            x = x * factor
        tl.store(near_ptr + at + rest[None, :], x.to(near_ptr.dtype.element_ty), mask=mask)
        if FAR:
            tl.store(far_ptr + at + rest[None, :], x.to(far_ptr.dtype.element_ty), mask=mask)
    if TALLY:  # noqa: SIM102 (decided when the kernel is compiled)
        if (row == 0) & (tl.program_id(1) == 0):
            which = tl.arange(0, 8)
            there = which < 5
            offset = tl.load(terms_ptr + which, mask=there, other=0)
            times = tl.load(terms_ptr + term_row + which, mask=there, other=0)
            most = tl.load(terms_ptr + 2 * term_row + which, mask=there, other=0)
            seen = tl.minimum(tl.maximum((length - offset) * times, 0), most)
            before = tl.load(counted_ptr + which, mask=there, other=0)
            tl.store(counted_ptr + which, before + seen, mask=there)


def rotate(
    q: Tensor,
    length: Tensor,
    rope: DeviceRope,
    *,
    far: Place | None,
    scaling: LogQueryScale | None,
    tally: Tally | None = None,
) -> tuple[Tensor, Tensor | None]:
    """:class:`methods.paged.Rotate` in Triton: bfloat16, float16 or float32. Raises ValueError for another dtype."""
    rows, heads, dim = q.shape
    if q.dtype not in FLOATS or q.stride(-1) != 1:
        raise ValueError(f"the Triton rotation takes dense bfloat16, float16 or float32 queries, got {q.dtype}")
    pairs = len(rope.freq)
    per_program = max(1, min(16, triton.next_power_of_2(heads), 4096 // triton.next_power_of_2(dim)))
    near = torch.empty(rows, heads, dim, dtype=q.dtype, device=q.device)
    second = torch.empty_like(near) if far is not None else None
    _rotate_kernel[rows, triton.cdiv(heads, per_program)](
        q, near, near if second is None else second, length, rope.freq, rope.mscale,
        length if tally is None else tally.terms, length if tally is None else tally.counted,
        q.stride(0), q.stride(1), heads,
        0 if far is None else far.distance,
        1.0 if scaling is None else math.log(scaling.reference),
        0 if tally is None else tally.terms.stride(0),
        FAR=far is not None, CAPPED=far is not None and far.capped, FOLLOWS=far is not None and far.follows_block,
        RAW=far is not None and far.raw, SCALED=scaling is not None, TALLY=tally is not None,
        D=dim, PAIRS=pairs, PAIRS_PAD=triton.next_power_of_2(pairs),
        REST_PAD=triton.next_power_of_2(max(1, dim - 2 * pairs)), HEADS=per_program, num_warps=4,
    )  # fmt: skip
    return near, second
