"""vLLM's drafter models with reads by a method: DFlash (z-lab) and DSpark or DeepSpec DFlash on Qwen3 and Gemma-4.

The classes are vLLM's own; without the plugin's setting they behave as such. With it, ``attention.install`` changes how
the attention layers read, and context keys are computed here so that they can be kept unrotated too and, for YaRN on a
drafter that mixes layer kinds, be rotated layer by layer. DeepSpec's ``dflash_*`` checkpoints are DSpark without a
Markov head (rank 0), which vLLM 0.28.0 builds from an embedding of width 0; :class:`NoMarkovHead` stands in for it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.model_executor.models import gemma4_dspark, qwen3_dspark
from vllm.model_executor.models.gemma4_dspark import Gemma4DSparkForCausalLM
from vllm.model_executor.models.qwen3_dflash import DFlashQwen3ForCausalLM
from vllm.model_executor.models.qwen3_dspark import DSparkMarkovHead, Qwen3DSparkForCausalLM

from harness.drafters import DrafterConfig, DrafterError, parse_config, read_config
from harness.engines.vllm import attention, plugin
from harness.engines.vllm.drafter_copy import CONFIG, ORIGINAL


def drafter_config(source: str, revision: str | None = None) -> DrafterConfig:
    """The drafter as it was trained, which a copy made for vLLM (``drafter_copy``) carries with it.

    Raises DrafterError, one line.
    """
    path = Path(source) / CONFIG
    if path.is_file():
        try:
            raw = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise DrafterError(f"{path} is unreadable ({error})") from None
        if isinstance(raw, dict) and ORIGINAL in raw:
            return parse_config(raw[ORIGINAL], where=str(path))
    return read_config(source, revision=revision)


class _Planned:
    """What the three drafter classes share. ``reads`` is None without the plugin's setting."""

    reads: attention.DrafterReads | None
    model: Any

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)  # type: ignore[call-arg]
        settings = plugin.settings(vllm_config.additional_config)
        self.reads = None
        if settings is not None:
            served = vllm_config.speculative_config.draft_model_config
            config = drafter_config(served.model, served.revision)
            self.reads = attention.install(self, settings, config, vllm_config)

    def precompute_and_store_context_kv(
        self,
        context_states: Tensor,
        context_positions: Tensor,
        context_slot_mapping: Tensor | list[Tensor | None] | None = None,
    ) -> None:
        """Keys and values of committed positions into the paged caches, and keys into the side cache before they turn.

        ``context_states [n, H]`` are the fused features, ``context_positions [n]``; slots of all layers or one tensor a
        layer, None in a dry run. As vLLM's own (``qwen3_dflash.py``), whose projections it calls.
        """
        reads = self.reads
        cpu = context_states.device.type == "cpu"
        if reads is None or (reads.stock and not cpu):
            super().precompute_and_store_context_kv(  # type: ignore[misc]
                context_states, context_positions, context_slot_mapping
            )
            return
        inner, count = self.model, len(context_states)
        if not hasattr(inner, "_num_attn_layers"):
            inner._build_fused_kv_buffers()
        layers = inner._num_attn_layers
        keys, values = inner._project_context_kv(context_states, count, layers, inner._num_kv_heads, inner._head_dim)
        if cpu:
            # vLLM 0.28.0's rms_norm on a CPU takes the first layer's weights for all layers.
            modules = [layer.self_attn for layer in inner.layers]
            raw = torch.stack([module.k_norm(keys[index]) for index, module in enumerate(modules)])
        else:
            raw = inner._normalize_context_k(keys)  # [L, n, Hkv, d]
        if len({id(rotary) for rotary in reads.rotaries}) == 1:  # one launch for all layers
            flat = raw.reshape(layers * count, -1).clone()
            turned = reads.rotaries[0](context_positions.repeat(layers), flat)[0].view(raw.shape)
        else:
            flats = [keys_of_layer.reshape(count, -1).clone() for keys_of_layer in raw]
            pairs = zip(reads.rotaries, flats, strict=True)
            turned = torch.stack([rotary(context_positions, flat)[0] for rotary, flat in pairs]).view(raw.shape)
        if context_slot_mapping is None:
            return
        slots = (
            list(context_slot_mapping)
            if isinstance(context_slot_mapping, list | tuple)
            else [context_slot_mapping] * layers
        )
        for index, where in enumerate(slots):
            if where is not None:
                layer = inner._attn_layers[index]
                layer.impl.do_kv_cache_update(layer, turned[index], values[index], layer.kv_cache, where)
        reads.write_raw(raw, slots)
        reads.stored()


class PlannedDFlash(_Planned, DFlashQwen3ForCausalLM):
    """z-lab's DFlash."""


class PlannedQwen3DSpark(_Planned, Qwen3DSparkForCausalLM):
    """DSpark and DeepSpec's DFlash for Qwen3 targets."""


class PlannedGemma4DSpark(_Planned, Gemma4DSparkForCausalLM):
    """DSpark and DeepSpec's DFlash for Gemma-4 targets."""

    # The checkpoint has both. vLLM's V1 runner asks, and would give it the target's.
    has_own_embed_tokens = True
    has_own_lm_head = True

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        # vLLM counts this drafter's layers from 0, where a text-only target has layers of the same names.
        super().__init__(vllm_config=vllm_config, prefix=prefix or "drafter")


class NoMarkovHead(nn.Module):
    """The Markov head of rank 0: no bias."""

    def embed(self, token_ids: Tensor) -> Tensor:
        """``[n]`` to ``[n, 0]``."""
        return torch.empty(len(token_ids), 0, device=token_ids.device)

    def bias(self, markov_embed: Tensor, logits_processor: Any) -> Tensor:
        """Nothing to add: ``[n, 1]`` zeros, for every logit of a row."""
        return markov_embed.new_zeros(len(markov_embed), 1)

    def apply_bias_gathered(
        self, markov_embed: Tensor, logits: Tensor, values: Tensor, index: Tensor, scale: float = 1.0
    ) -> Tensor:
        """The chosen ``values`` as they are, at ``index`` of ``logits``."""
        return logits.scatter_(1, index, values)


def _markov_head(vocab_size: int, draft_vocab_size: int, markov_rank: int, *rest: Any, **named: Any) -> nn.Module:
    if markov_rank == 0:
        return NoMarkovHead()
    return DSparkMarkovHead(vocab_size, draft_vocab_size, markov_rank, *rest, **named)


# The two modules look the class up by name when they build a model.
qwen3_dspark.DSparkMarkovHead = _markov_head
gemma4_dspark.DSparkMarkovHead = _markov_head
