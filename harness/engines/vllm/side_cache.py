"""The drafter's unrotated keys, paged by vLLM itself: extra KV-cache layers beside the drafter's own.

A branch that moves entries to another distance reads keys that are not rotated (section 3.3 of the paper). They are
stored once more, unrotated, in layers that vLLM's KV-cache manager sizes, allocates, profiles and pages like any other:
same group as the drafter's layers, hence the same block table and the same slots. Values are not stored again: the
drafter's own cache has them, and the same table finds them. That is half of the paper's side cache, which holds both.

A KV-cache layer of vLLM holds two vectors a token and head, so one side layer keeps the keys of *two* drafter layers,
one in the key's place and one in the value's. Its pages then equal the drafter's pages, which hybrid targets (several
KV-cache groups, all with pages of one size) need. The last of an odd number of layers has half a page where the target
is not hybrid, and a whole one where it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm import _custom_ops as ops
from vllm.config import VllmConfig
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
)
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheSpec


class _NoMetadata(AttentionMetadataBuilder[CommonAttentionMetadata]):
    """Side layers are never attended to as such, so no metadata is built for them."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.ALWAYS

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> CommonAttentionMetadata:
        return common_attn_metadata


class SideBackend(AttentionBackend):
    """Tells vLLM how a side layer's pages are laid out: ``[pages, Hkv, page_size, 2 * head_size]``."""

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type:
        raise NotImplementedError("side layers hold keys; nothing attends to them")

    @staticmethod
    def get_builder_cls() -> type[_NoMetadata]:
        return _NoMetadata

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        return num_blocks, num_kv_heads, block_size, 2 * head_size


class SideLayer(AttentionLayerBase):
    """Unrotated keys of one or two drafter layers. ``attention``: vLLM's own layer of the first, whose pages it
    follows; ``layers``: their indices in the drafter."""

    def __init__(self, attention: Attention, layers: Sequence[int], forward_context: dict[str, Any]):
        self.attention = attention
        self.layers = tuple(layers)
        self.layer_name = attention.layer_name.removesuffix(".attn") + ".side"
        self.impl = attention.impl
        self.num_heads = attention.num_heads
        self.kv_cache = torch.tensor([])
        self._context = forward_context
        forward_context[self.layer_name] = self

    def get_attn_backend(self) -> type[AttentionBackend]:
        return SideBackend

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> KVCacheSpec | None:
        spec = self.attention.get_kv_cache_spec(vllm_config)
        if not isinstance(spec, FullAttentionSpec):
            raise ValueError(
                f"drafter layer {self.attention.layer_name} would drop entries that left its window; serve a copy of "
                "the drafter made by served_config, whose layers all keep their whole context"
            )
        if len(self.layers) == 2 or self._hybrid(vllm_config):
            return spec
        return replace(spec, head_size=spec.head_size // 2, head_size_v=spec.head_size_v // 2)

    def write(self, raw: Tensor, slots: Tensor) -> None:
        """Store the layers' keys, ``raw [L, n, Hkv, d]`` of all drafter layers, at ``slots [n]``; -1 is no slot."""
        rows = raw[self.layers[0]] if len(self.layers) == 1 else torch.cat([raw[i] for i in self.layers], -1)
        scatter(self.kv_cache[..., : rows.shape[-1]], rows, slots)

    def keys(self, layer: int) -> Tensor:
        """``[pages, page_size, Hkv, d]``, a view."""
        place, size = self.layers.index(layer), self.attention.head_size
        return self.kv_cache.transpose(1, 2)[..., place * size : (place + 1) * size]

    @property
    def bytes_per_token(self) -> int:
        """Bytes of a token slot, from the tensor that vLLM bound."""
        return self.kv_cache.nbytes // (self.kv_cache.shape[0] * self.kv_cache.shape[2])

    def _hybrid(self, vllm_config: VllmConfig) -> bool:
        """Whether some layer of the model keeps anything but its whole context: vLLM then wants pages of one size."""
        others = [layer for layer in self._context.values() if isinstance(layer, AttentionLayerBase)]
        specs = [layer.get_kv_cache_spec(vllm_config) for layer in others if not isinstance(layer, SideLayer)]
        return any(spec is not None and not isinstance(spec, FullAttentionSpec) for spec in specs)


def scatter(cache: Tensor, rows: Tensor, slots: Tensor) -> None:
    """Write ``rows [n, Hkv, c]`` into pages ``cache [pages, Hkv, page_size, c]`` (any strides) at ``slots [n]``; a slot
    of -1 is skipped. On a GPU nothing is asked of the device."""
    if cache.device.type != "cpu":
        # vLLM's own kernel writes a key and a value a slot; here they are the two halves of a row.
        half = rows.shape[-1] // 2
        pages, one = cache.transpose(1, 2), torch.ones((), device=cache.device)
        ops.reshape_and_cache_flash(
            rows[..., :half], rows[..., half:], pages[..., :half], pages[..., half:], slots, "auto", one, one
        )
        return
    real = slots >= 0
    where = slots[real].long()
    size = cache.shape[2]
    cache.transpose(1, 2)[where // size, where % size] = rows[real].to(cache.dtype)


def side_layers(layers: Sequence[int], attentions: Sequence[Attention], context: dict[str, Any]) -> list[SideLayer]:
    """Side layers for the drafter layers ``layers`` that read unrotated keys, two a side layer."""
    pairs = [layers[i : i + 2] for i in range(0, len(layers), 2)]
    return [SideLayer(attentions[pair[0]], pair, context) for pair in pairs]
