"""One part of a read in torch: an attention call over folded rows with its mass, and the merge of parts by mass.

The rows of a block and the query heads that share a key head are folded together, so that each key is read once.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from methods.rope import compute_dtype


def fold_rows(query: Tensor, kv_heads: int) -> Tensor:
    """``[B, Hq, d]`` to ``[Hkv, B * G, d]``, row-major: the ``G = Hq // Hkv`` heads of a group side by side."""
    return query.unflatten(1, (kv_heads, -1)).transpose(0, 1).flatten(1, 2)


def unfold_rows(folded: Tensor, rows: int) -> Tensor:
    """``[Hkv, B * G, ...]`` back to ``[B, Hq, ...]``."""
    return folded.unflatten(1, (rows, -1)).transpose(0, 1).flatten(1, 2)


def attend_folded(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float, *, some_empty: bool = False
) -> tuple[Tensor, Tensor]:
    """``out [Hkv, B * G, dv]`` and natural ``lse [Hkv, B * G]`` of softmax(scale * q k + mask), -inf for a row that
    reads nothing.

    ``query [Hkv, B * G, d]``, ``keys [Hkv, n, d]``, ``values [Hkv, n, dv]``, additive ``mask [B * G, n]`` of zeros and
    -inf. ``some_empty``: a row may read nothing here.
    """
    if query.device.type == "cpu" and keys.shape[-1] == values.shape[-1]:
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query[None], keys[None], values[None], attn_mask=mask, scale=scale
        )
        out, lse = out[0], lse[0]
        if some_empty and mask is not None:  # the kernel says 0 for such a row
            lse = lse.masked_fill((mask == -math.inf).all(-1), -math.inf)
        return out, lse
    exact = compute_dtype(query.dtype)
    logits = query.to(exact) @ keys.to(exact).transpose(1, 2) * scale
    if mask is not None:
        logits = logits + mask
    lse = torch.logsumexp(logits, -1)
    weights = torch.exp(logits - lse.masked_fill(lse == -math.inf, 0.0)[..., None])
    return weights @ values.to(exact), lse


def merge_parts(outs: list[Tensor], masses: list[Tensor]) -> Tensor:
    """Parts ``[..., dv]`` weighed by their log masses ``[...]`` (Eq. 4), in the first part's dtype."""
    if len(outs) == 1:
        return outs[0]
    share = torch.softmax(torch.stack(masses), 0)[..., None]
    return (torch.stack(outs) * share).sum(0).to(outs[0].dtype)
