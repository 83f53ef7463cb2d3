"""Unrotated keys beside SGLang's KV pool: the same rows, one more key in each.

SGLang stores a drafter's keys rotated to their absolute positions. A far read meets keys at another distance, so it
needs them as they were before (after the k norm). Values carry no position and are read from SGLang's own pool, which
halves what the paper's second copy takes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class RawKeys:
    """One tensor ``[slots, Hkv, d]`` per layer that reads unrotated keys, row for row beside the pool's."""

    def __init__(self, like: Tensor, layers: Sequence[int]):
        """``like``: a key buffer of the pool. Takes ``nbytes`` of memory at once."""
        self._rows = {layer: torch.zeros_like(like) for layer in layers}

    def store(self, model: Any, hidden: Tensor, slots: Tensor) -> None:
        """The keys of context features ``hidden [n, H]``, as SGLang's per-layer path makes them, into ``slots [n]``."""
        slots = slots.to(device=hidden.device, dtype=torch.int64)
        for layer, rows in self._rows.items():
            module = model.layers[layer]
            attention = module.self_attn
            keys, _ = attention.kv_proj_only(model.prepare_context_hidden_for_kv(module, hidden))
            normed = attention.apply_k_norm(keys)
            rows.index_copy_(0, slots, normed.reshape(-1, *rows.shape[1:]).to(rows.dtype))

    def rows(self, layer: int) -> Tensor | None:
        """``[slots, Hkv, d]`` of one layer, None if it reads none."""
        return self._rows.get(layer)

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(rows.nbytes for rows in self._rows.values())

    @property
    def nbytes_per_token(self) -> int:
        """Bytes per context entry."""
        return sum(rows[0].nbytes for rows in self._rows.values())
