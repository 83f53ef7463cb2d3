"""Causal grouped-query attention of a few new rows over a preallocated cache.

The shapes of speculative decoding are lopsided: 1 to B new rows (or a prefill chunk) against thousands of keys, with
G query heads per KV head. Folding the G heads and the rows into one matrix reads every key once per product. On a CPU
plain matrix products over slices beat PyTorch's fused kernel about twofold at these shapes
(``benchmarks/engine_cpu.py``); logits are held in the cache's dtype and the softmax is taken in float32, as in
``transformers``' eager attention.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

FEW_ROWS = 32  # rows * group up to about a hundred fit the caches as one product
BLOCK_ROWS = 128  # prefill rows per product: logits of one block stay in the second-level cache
SPARE = 8  # a cache that is at least 7/8 full is multiplied whole: a batched product would copy a part of it first


def attend(q: Tensor, keys: Tensor, values: Tensor, length: int, scale: float) -> Tensor:
    """Bottom-right causal attention.

    q: [Hq, R, d] rotated queries of the R newest positions, Hq = G * Hkv. keys: [Hkv, capacity, d] and values: [Hkv,
    capacity, dv], of which the first ``length`` are held, the R newest included, and the rest is finite; row r sees
    keys 0..length-R+r. Returns [Hq, R, dv] in q's dtype.
    """
    if q.device.type != "cpu":
        return _fused(q, keys[:, :length], values[:, :length], scale)
    if q.shape[1] <= FEW_ROWS:
        return _few_rows(q, keys, values, length, scale)
    return _many_rows(q, keys[:, :length], values[:, :length], scale)


def row_weights(q: Tensor, keys: Tensor, scale: float) -> Tensor:
    """Attention weights of one position averaged over heads: q [Hq, d], keys [Hkv, N, d] -> [N] float32 (CMR's
    score).
    """
    grouped = q.unflatten(0, (keys.shape[0], -1))
    logits = (grouped @ keys.transpose(1, 2)).float() * scale
    return torch.softmax(logits, -1).mean((0, 1))


def _few_rows(q: Tensor, keys: Tensor, values: Tensor, length: int, scale: float) -> Tensor:
    heads, rows, dim = q.shape
    kv_heads, capacity, _ = keys.shape
    used = capacity if SPARE * (capacity - length) <= capacity else length
    folded = (q * scale).reshape(kv_heads, -1, dim)
    logits = torch.bmm(folded, keys[:, :used].transpose(1, 2))
    logits[..., length:] = float("-inf")
    if rows > 1:
        edge = logits.view(kv_heads, -1, rows, used)[..., length - rows : length]
        edge += _causal_edge(rows, logits)
    return torch.bmm(torch.softmax(logits, -1), values[:, :used]).reshape(heads, rows, -1)


def _many_rows(q: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    heads, rows, _ = q.shape
    group = heads // keys.shape[0]
    before = keys.shape[1] - rows
    out = q.new_empty(heads, rows, values.shape[-1])
    scaled = q * scale
    for start in range(0, rows, BLOCK_ROWS):
        stop = min(start + BLOCK_ROWS, rows)
        edge = _causal_edge(stop - start, q)
        for head in range(heads):
            seen_keys = keys[head // group, : before + stop]
            logits = torch.mm(scaled[head, start:stop], seen_keys.t())
            logits[:, before + start :] += edge
            torch.mm(torch.softmax(logits, -1), values[head // group, : before + stop], out=out[head, start:stop])
    return out


def _fused(q: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    rows, length = q.shape[1], keys.shape[1]
    # The bias is a word, not a matrix: a mask would keep the flash kernel away and be a gigabyte long at 128K.
    seen = causal_lower_right(rows, length) if rows > 1 else None
    return F.scaled_dot_product_attention(
        q[None], keys[None], values[None], attn_mask=seen, scale=scale, enable_gqa=True
    )[0]


def _causal_edge(rows: int, like: Tensor) -> Tensor:
    """[rows, rows]: -inf above the diagonal, 0 elsewhere, in like's dtype and device."""
    return torch.full((rows, rows), float("-inf"), dtype=like.dtype, device=like.device).triu(1)
