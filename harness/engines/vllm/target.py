"""What CMR asks of the target: how its last full-attention layer attended from the last committed position.

FlashAttention never returns weights, so the layer's queries are kept as they pass and the weights are computed from the
target's own paged keys when a refresh wants them (every eighth round).
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from vllm.config import VllmConfig, get_layers_from_vllm_config
from vllm.model_executor.layers.attention import Attention
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl

from harness.engines.reference.attention import row_weights


class TargetAttention:
    """Queries and keys of the target's last full-attention layer.

    ``drafter_layers``: names of layers that are not the target's. ``rows``: most rows of a verification. Raises
    ValueError if the target has no full-attention layer.
    """

    def __init__(self, vllm_config: VllmConfig, drafter_layers: set[str], rows: int, device: torch.device):
        layers = get_layers_from_vllm_config(vllm_config, Attention)
        full = [
            layer for name, layer in layers.items() if name not in drafter_layers and layer.sliding_window is None
        ]
        if not full:
            raise ValueError("this target has no full-attention layer, so CMR has nothing to score with")
        self.layer = full[-1]
        self.kernel: Any = self.layer.impl
        # A fixed buffer: a captured graph of the verification keeps writing the same memory.
        shape = (rows, self.layer.num_heads, self.layer.head_size)
        self.queries = torch.zeros(shape, dtype=vllm_config.model_config.dtype, device=device)
        self._forward = self.kernel.forward
        self.kernel.forward = self._kept

    def _kept(self, layer: Any, query: Tensor, *rest: Any, **named: Any) -> Tensor:
        if len(query) <= len(self.queries):  # a verification, not a piece of a prompt
            self.queries[: len(query)].copy_(query)
        return self._forward(layer, query, *rest, **named)

    def group(self, kv_cache_config: Any) -> int:
        """The index of the KV-cache group that the layer is in."""
        for index, group in enumerate(kv_cache_config.kv_cache_groups):
            if self.layer.layer_name in group.layer_names:
                return index
        raise AssertionError(f"{self.layer.layer_name} is in no KV-cache group")

    def weights(self, row: int, table: Tensor, length: int) -> Tensor:
        """``[length]`` float32: weights of a row of the latest verification over entries ``0..length-1``, averaged over
        heads. ``table [max_pages]``: the layer's block table."""
        keys = self._keys(table, length)
        return row_weights(self.queries[row], keys.transpose(0, 1), float(self.kernel.scale))

    def _keys(self, table: Tensor, length: int) -> Tensor:
        """``[length, Hkv, d]`` out of the paged cache."""
        cache, dim = self.layer.kv_cache, self.layer.head_size
        size = cache.shape[2]
        pages = cache[table[: -(-length // size)].long()]  # [p, Hkv, page_size, 2 d]
        if isinstance(self.kernel, CPUAttentionBackendImpl):
            # vLLM's CPU kernels store a page's keys first, in an order of their own.
            where = _key_order(self.kernel.isa, size, dim, cache.dtype).to(cache.device)
            keys = pages.flatten(2)[..., where]
        else:
            keys = pages[..., :dim]
        return keys.transpose(1, 2).flatten(0, 1)[:length]


@lru_cache(maxsize=4)
def _key_order(isa: str, page_size: int, dim: int, dtype: torch.dtype) -> Tensor:
    """``[page_size, dim]``: where in a flat page of keys and values vLLM's CPU kernel puts each number of a key.

    Found by storing each number's own address, eight bits at a time, which every dtype holds exactly.
    """
    from vllm import _custom_ops as ops

    address = torch.arange(page_size * dim).view(page_size, 1, dim)
    found = torch.zeros(2 * page_size * dim, dtype=torch.long)
    written = torch.zeros(2 * page_size * dim, dtype=torch.bool)
    for shift in (0, 8, 16):
        page = torch.full((1, 1, 2 * page_size, dim), -1.0, dtype=dtype)
        digits = ((address >> shift) & 255).to(dtype)
        keys, values = page.chunk(2, dim=2)
        slots = torch.arange(page_size, dtype=torch.int64)
        ops.cpu_attn_reshape_and_cache(
            digits, torch.full_like(digits, -2.0), keys, values, slots, isa,
            k_scale=1.0, v_scale=1.0, kv_cache_dtype="auto",
        )  # fmt: skip
        flat = page.flatten()
        written = flat >= 0
        found += torch.where(written, flat.long() << shift, 0)
    places = written.nonzero()[:, 0]
    order = torch.empty(page_size * dim, dtype=torch.long)
    order[found[places]] = places
    return order.view(page_size, dim)
