"""Tiny random target-drafter pairs at the real architectures, with heads that vLLM's CPU kernels know, on disk."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from harness.drafters import DrafterConfig, parse_config, random_tensors, read_config, save_drafter
from harness.engines.vllm.drafter_copy import copy_drafter, speculative_config

VOCAB, HIDDEN, INNER, LAYERS, POSITIONS = 256, 64, 96, 6, 2048


@dataclass(frozen=True)
class Pair:
    """Folders of a target, its drafter as trained, and the drafter's copy for vLLM; the drafter's config."""

    target: Path
    drafter: Path
    served: Path
    config: DrafterConfig
    dtype: str = "float32"
    runner_v2: bool = False

    def engine_arguments(self) -> dict[str, Any]:
        """``LLM(...)`` arguments that serve the pair."""
        speculative = speculative_config(self.served, runner_v2=self.runner_v2)
        return {"model": str(self.target), "dtype": self.dtype, "speculative_config": speculative}


def save_pair(
    folder: Path,
    target: str,
    drafter: dict[str, Any],
    *,
    context: int,
    dtype: str = "float32",
    runner_v2: bool = False,
) -> Pair:
    """Write a random pair. ``target``: llama, qwen3, gemma4 or qwen3_5; ``drafter``: its config.json; ``runner_v2``:
    which of vLLM's runners the drafter's copy is for."""
    config = parse_config(drafter)
    _save_target(target, folder / "target", getattr(torch, dtype))
    tensors = {name: tensor.to(getattr(torch, dtype)) for name, tensor in random_tensors(config, 1).items()}
    if "embed_tokens.weight" in tensors:
        # Else Gemma's scale would make the token itself all that counts, whatever a layer reads.
        tensors["embed_tokens.weight"] /= 2 * config.embed_scale
    save_drafter(folder / "drafter", config, tensors)
    copy_drafter(folder / "drafter", folder / "served", context=context, runner_v2=runner_v2)
    config = read_config(folder / "drafter")
    return Pair(folder / "target", folder / "drafter", folder / "served", config, dtype, runner_v2)


def dflash(layers: int = 2, block: int = 8, **changes: Any) -> dict[str, Any]:
    """A z-lab DFlash drafter of the tiny targets."""
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "block_size": block,
        "dflash_config": {"mask_token_id": 1, "target_layer_ids": [1, 3]},
        "num_target_layers": LAYERS,
        "num_hidden_layers": layers,
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "layer_types": ["full_attention"] * layers,
        "max_position_embeddings": 256,
        "vocab_size": VOCAB,
        **changes,
    }


def deepspec_qwen3(rank: int, layers: int = 2, block: int = 7, **changes: Any) -> dict[str, Any]:
    """DSpark for Qwen3, or DeepSpec's DFlash if ``rank`` is 0."""
    raw = dflash(layers, block)
    del raw["dflash_config"]
    return raw | {
        "architectures": ["Qwen3DSparkModel"],
        "mask_token_id": 1,
        "target_layer_ids": [1, 3],
        "markov_rank": rank,
        "markov_head_type": "vanilla",
        "enable_confidence_head": rank > 0,
        "confidence_head_with_markov": rank > 0,
        **changes,
    }


def deepspec_gemma4(rank: int, layers: int = 3, block: int = 7) -> dict[str, Any]:
    """DSpark or DeepSpec's DFlash for Gemma-4: one key head of 512 that is its own value, proportional RoPE."""
    return deepspec_qwen3(rank, layers, block) | {
        "architectures": ["Gemma4DSparkModel"],
        "model_type": "gemma4_text",
        "head_dim": 64,
        "global_head_dim": 512,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_act": None,
        "enable_moe_block": False,
        "hidden_size_per_layer_input": 0,
        "final_logit_softcapping": 30.0,
        "rope_theta": None,
        "rope_parameters": {
            "full_attention": {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25}
        },
    }


def _save_target(architecture: str, folder: Path, dtype: torch.dtype) -> None:
    model = _model(architecture)
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(0.0, 0.3, generator=generator)
    model.to(dtype).save_pretrained(folder)


def _model(architecture: str) -> Any:
    shape: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": POSITIONS,
    }
    if architecture == "llama":
        from transformers import LlamaConfig, LlamaForCausalLM

        return LlamaForCausalLM(LlamaConfig(**shape, tie_word_embeddings=False))
    if architecture == "qwen3":
        from transformers import Qwen3Config, Qwen3ForCausalLM

        return Qwen3ForCausalLM(Qwen3Config(**shape))
    if architecture == "gemma4":
        from transformers.models.gemma4 import Gemma4TextConfig
        from transformers.models.gemma4.modeling_gemma4 import Gemma4ForCausalLM

        sizes = {"head_dim": 64, "global_head_dim": 512, "num_global_key_value_heads": 1, "attention_k_eq_v": True}
        return Gemma4ForCausalLM(
            Gemma4TextConfig(
                **shape | sizes,
                layer_types=["sliding_attention"] * 5 + ["full_attention"],
                sliding_window=64,
                hidden_size_per_layer_input=0,
                num_kv_shared_layers=0,
            )
        )
    if architecture == "qwen3_5":
        from transformers.models.qwen3_5 import Qwen3_5TextConfig
        from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5ForCausalLM

        return Qwen3_5ForCausalLM(
            Qwen3_5TextConfig(
                **shape | {"num_hidden_layers": 16},
                layer_types=(["linear_attention"] * 3 + ["full_attention"]) * 4,
                linear_num_key_heads=2,
                linear_num_value_heads=4,
                linear_key_head_dim=64,
                linear_value_head_dim=64,
            )
        )
    raise ValueError(f"no tiny target of architecture {architecture!r}")


def mixed_dflash() -> dict[str, Any]:
    """As Qwen3.5's: five sliding layers, causal in the block, and a full one."""
    kinds = ["sliding_attention"] * 5 + ["full_attention"]
    window = {"sliding_window": 48, "use_sliding_window": True, "max_window_layers": 0}
    return dflash(6, layer_types=kinds, num_target_layers=16, **window)
