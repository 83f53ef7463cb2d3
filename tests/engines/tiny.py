"""Tiny random target-drafter pairs at the real architectures, and a drafter whose drafts are right as often as one
likes.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch

from harness.drafters import Drafter, DrafterConfig, Proposal, parse_config, random_drafter
from harness.engines.base import EngineInfo
from harness.engines.reference.engine import ReferenceEngine
from harness.engines.reference.target import Target, open_target
from harness.requests import Request

VOCAB, HIDDEN, LAYERS = 128, 64, 6
_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 96,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
}
ARCHITECTURES = ("llama", "llama3", "qwen3", "gemma4", "qwen3_5")


def save_target(architecture: str, folder: Path) -> Any:
    """Save a random target of an architecture with logits of a usable spread; returns the model in float32."""
    model = _model(architecture)
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(0.0, 0.3, generator=generator)
    model.save_pretrained(folder)
    return model.eval()


def _model(architecture: str) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

    if architecture == "llama":
        return LlamaForCausalLM(LlamaConfig(**_SHAPE, tie_word_embeddings=True))
    if architecture == "llama3":
        rope = {
            "rope_type": "llama3",
            "rope_theta": 500.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        }
        return LlamaForCausalLM(LlamaConfig(**_SHAPE, rope_parameters=rope, tie_word_embeddings=False))
    if architecture == "qwen3":
        return Qwen3ForCausalLM(Qwen3Config(**_SHAPE))
    if architecture == "gemma4":
        from transformers.models.gemma4 import Gemma4TextConfig
        from transformers.models.gemma4.modeling_gemma4 import Gemma4ForCausalLM

        kinds = ["sliding_attention", "sliding_attention", "full_attention"] * 2
        return Gemma4ForCausalLM(
            Gemma4TextConfig(
                **_SHAPE,
                layer_types=kinds,
                sliding_window=8,
                global_head_dim=32,
                num_global_key_value_heads=1,
                attention_k_eq_v=True,
                hidden_size_per_layer_input=0,
                num_kv_shared_layers=0,
            )
        )
    from transformers.models.qwen3_5 import Qwen3_5TextConfig
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5ForCausalLM

    return Qwen3_5ForCausalLM(
        Qwen3_5TextConfig(
            **_SHAPE,
            layer_types=["linear_attention", "linear_attention", "full_attention"] * 2,
            linear_num_key_heads=2,
            linear_num_value_heads=4,
            linear_key_head_dim=16,
            linear_value_head_dim=16,
        )
    )


def drafter_config(block: int = 5, layers: int = 2) -> DrafterConfig:
    """A z-lab DFlash drafter for the tiny target: B = ``block``, features of layers 1 and 3."""
    return parse_config(
        {
            "architectures": ["DFlashDraftModel"],
            "model_type": "qwen3",
            "block_size": block,
            "dflash_config": {"mask_token_id": 1, "target_layer_ids": [1, 3]},
            "num_target_layers": LAYERS,
            "num_hidden_layers": layers,
            "hidden_size": HIDDEN,
            "intermediate_size": 96,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "rms_norm_eps": 1e-6,
            "rope_theta": 10000.0,
            "layer_types": ["full_attention"] * layers,
            "max_position_embeddings": 512,
            "vocab_size": VOCAB,
        }
    )


class Guided:
    """A drafter that drafts for real and then proposes the known continuation, wrong from a random slot on.

    Its true drafts are kept in ``drafted`` with the context length they were made at.
    """

    def __init__(self, drafter: Drafter, continuation: list[int], prompt: int, seed: int) -> None:
        self._drafter, self._continuation, self._prompt = drafter, continuation, prompt
        self._random = random.Random(seed)
        self.drafted: list[tuple[int, int, list[int]]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._drafter, name)

    def draft(self, anchor: int, reader: Any) -> Proposal:
        real = self._drafter.draft(anchor, reader)
        self.drafted.append((reader.length, anchor, real.tokens))
        done = reader.length - self._prompt + 1
        right = self._continuation[done : done + len(real.tokens)]
        keep = self._random.randint(0, len(real.tokens))
        wrong = [(token + 1) % VOCAB for token in right[keep:]]
        tokens = right[:keep] + wrong
        return Proposal(tokens + [0] * (len(real.tokens) - len(tokens)), real.logits)


INFO = EngineInfo("reference", "test", "cpu", "cpu-test", "float64", {})


def open_pair(
    folder: Path, dtype: torch.dtype = torch.float64, chunk: int = 7, block: int = 5
) -> tuple[ReferenceEngine, Target, Drafter]:
    """The engine with a random drafter over the target saved in ``folder``."""
    target = open_target(folder, dtype, torch.device("cpu"))
    drafter = random_drafter(drafter_config(block), dtype=dtype, device="cpu", seed=1)
    return ReferenceEngine(target, drafter, prefill_chunk=chunk, info=INFO), target, drafter


def request(length: int = 40, limit: int = 48, stop_ids: tuple[int, ...] = (), seed: int = 0) -> Request:
    """A random prompt."""
    draw = random.Random(seed)
    ids = tuple(draw.randrange(2, VOCAB) for _ in range(length))
    return Request(f"r{seed}", "tiny", "tiny", ids, limit, stop_ids, {})
