"""SGLang's DFlash and DSpark drafters with two differences: queries reach the attention backend unrotated, so that the
method can turn them as each of its reads needs, and the drafter owns its rotary table.

With a method that is the engine's own read (original, and the built-in window), both are exactly SGLang's.
"""

from __future__ import annotations

from typing import Any

from sglang.srt.models import dflash, dspark
from sglang.srt.models.utils import apply_qk_norm
from torch import Tensor

from harness.engines.sglang.rotary import own_copy
from harness.engines.sglang.session import current


class MethodAttention(dflash.DFlashAttention):
    """A draft layer's attention, its query not rotated."""

    def forward(self, positions: Tensor, hidden_states: Tensor, forward_batch: Any) -> Tensor:
        """``hidden_states [B, H]`` of the block at ``positions [B]``; returns the layer's attention output."""
        if current().stock:
            return super().forward(positions, hidden_states, forward_batch)
        qkv, _ = self.qkv_proj(hidden_states)
        q, k, v = qkv.split([self.q_size, self.kv_size, self.kv_size], dim=-1)
        q, k = apply_qk_norm(q, k, self.q_norm, self.k_norm, self.head_dim)
        k = self.apply_k_rope(positions, k.contiguous())
        read = self.attn(q, k, v, forward_batch)
        output, _ = self.o_proj(self.apply_attention_output(read, hidden_states))
        return output


class MethodLayer(dflash.DFlashDecoderLayer):
    """A draft layer."""

    attention_cls = MethodAttention


class _Reads:
    """What both drafters add; goes before SGLang's class."""

    fold_bench_reads = True
    decoder_layer_cls = MethodLayer
    fold_bench_features: Tensor | None = None

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        own_copy(self.layers)  # type: ignore[attr-defined]

    def project_target_hidden(self, target_hidden: Tensor) -> Tensor:
        """The context features; remembered for the unrotated keys, which the same call's caller stores next."""
        features = super().project_target_hidden(target_hidden)  # type: ignore[misc]
        if current().raw is not None:
            self.fold_bench_features = features
        return features


class DFlashDraftModel(_Reads, dflash.DFlashDraftModel):
    """z-lab's DFlash."""


class _DSpark(_Reads):
    def write_target_hidden_kv(
        self,
        *,
        target_hidden: Tensor,
        pool: Any,
        positions: Tensor,
        cache_loc: Tensor,
        cache_loc_2d: Tensor | None = None,
        commit_lens: Tensor | None = None,
    ) -> None:
        """Store the context entries of a chunk or a round, as SGLang does, and their unrotated keys."""
        super().write_target_hidden_kv(  # type: ignore[misc]
            target_hidden=target_hidden,
            pool=pool,
            positions=positions,
            cache_loc=cache_loc,
            cache_loc_2d=cache_loc_2d,
            commit_lens=commit_lens,
        )
        current().store(self, cache_loc)


class DSparkDraftModel(_DSpark, dspark.DSparkDraftModel):
    """DSpark on a z-lab style configuration."""


class Qwen3DSparkModel(_DSpark, dspark.Qwen3DSparkModel):
    """DeepSpec's DSpark for Qwen3 targets."""


EntryClass = [DFlashDraftModel, DSparkDraftModel, Qwen3DSparkModel]
