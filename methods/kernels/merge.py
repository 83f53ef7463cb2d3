"""Parts of a read merged by mass, in one launch a pair. Importing this module needs Triton."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _mass(lse_ptr, at, there, sharpen):
    """Log mass of a part (Eq. 3). FlashAttention 2 says +inf for a row that read nothing: that is no mass, and must go
    before it is divided, or the empty part would win."""
    lse = tl.load(lse_ptr + at, mask=there, other=float("-inf")).to(tl.float32)
    return tl.where(lse == float("inf"), float("-inf"), lse) / sharpen


@triton.jit
def _merge_kernel(
    out1, out2, lse1, lse2, out_ptr, mass_ptr, sharpen1, sharpen2, rows, heads,
    out1_row, out1_head, out2_row, out2_head, lse1_row, lse1_head, lse2_row, lse2_head,
    DV: tl.constexpr, DIMS: tl.constexpr, PLACES: tl.constexpr,
):  # fmt: skip
    """Grid ``[ceil(B * Hq / PLACES)]``; outputs dense."""
    place = tl.program_id(0) * PLACES + tl.arange(0, PLACES)
    there = place < rows * heads
    row, head = place // heads, place % heads
    mass1 = _mass(lse1, row * lse1_row + head * lse1_head, there, sharpen1)
    mass2 = _mass(lse2, row * lse2_row + head * lse2_head, there, sharpen2)
    largest = tl.maximum(mass1, mass2)
    base = tl.where(largest == float("-inf"), 0.0, largest)
    weight1, weight2 = tl.exp(mass1 - base), tl.exp(mass2 - base)
    both = weight1 + weight2
    some = tl.where(both > 0, both, 1.0)
    dim = tl.arange(0, DIMS)[None, :]
    # What an empty part holds does not count, whatever it is.
    at1, at2 = row * out1_row + head * out1_head, row * out2_row + head * out2_head
    x1 = tl.load(out1 + at1[:, None] + dim, mask=(dim < DV) & (weight1 > 0)[:, None], other=0.0).to(tl.float32)
    x2 = tl.load(out2 + at2[:, None] + dim, mask=(dim < DV) & (weight2 > 0)[:, None], other=0.0).to(tl.float32)
    merged = x1 * (weight1 / some)[:, None] + x2 * (weight2 / some)[:, None]
    tl.store(out_ptr + place[:, None] * DV + dim, merged.to(out_ptr.dtype.element_ty), mask=there[:, None] & (dim < DV))
    tl.store(mass_ptr + place, tl.where(both > 0, base + tl.log(some), float("-inf")), mask=there)


def merge(outs: Sequence[Tensor], lses: Sequence[Tensor], sharpen: Sequence[float]) -> tuple[Tensor, Tensor]:
    """:class:`methods.paged.Merge` in Triton. ``lses [B, Hq]`` may be views of another layout (FlashAttention's is
    ``[Hq, B]``).
    """
    if len(outs) == 1:
        raise ValueError("one part needs no merge")
    out, lse, alpha = outs[0], lses[0], sharpen[0]
    rows, heads, dim = out.shape
    for number, (other, other_lse, other_alpha) in enumerate(zip(outs[1:], lses[1:], sharpen[1:], strict=True), 2):
        last = number == len(outs)
        merged = torch.empty(rows, heads, dim, dtype=outs[0].dtype if last else torch.float32, device=out.device)
        mass = torch.empty(rows, heads, dtype=torch.float32, device=out.device)
        places = max(1, 1024 // triton.next_power_of_2(dim))
        _merge_kernel[(triton.cdiv(rows * heads, places),)](
            out, other, lse, other_lse, merged, mass, alpha, other_alpha, rows, heads,
            out.stride(0), out.stride(1), other.stride(0), other.stride(1),
            lse.stride(0), lse.stride(1), other_lse.stride(0), other_lse.stride(1),
            DV=dim, DIMS=triton.next_power_of_2(dim), PLACES=places, num_warps=4,
        )  # fmt: skip
        out, lse, alpha = merged, mass, 1.0
    return out, lse
