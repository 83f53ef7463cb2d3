"""Tiny drafters of every family, and one round of drafting written again from facts/drafters.md, slowly, in float64.

Nothing here uses the package under test: the reference reads the raw ``config.json`` dictionary and tensors by their
checkpoint names.
"""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from torch import Tensor

HIDDEN, VOCAB = 24, 61

ZLAB: dict[str, Any] = {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "block_size": 5,
    "dflash_config": {"mask_token_id": 60, "target_layer_ids": [1, 4, 6]},
    "num_target_layers": 9,
    "num_hidden_layers": 2,
    "hidden_size": HIDDEN,
    "intermediate_size": 40,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 512,
    "vocab_size": VOCAB,
    "layer_types": ["full_attention"] * 2,
}
QWEN35_LAYERS = ["sliding_attention"] * 5 + ["full_attention"]
DSPARK: dict[str, Any] = {
    **{key: value for key, value in ZLAB.items() if key != "dflash_config"},
    "architectures": ["Qwen3DSparkModel"],
    "block_size": 4,
    "mask_token_id": 60,
    "target_layer_ids": [1, 4, 6],
    "markov_rank": 0,
    "markov_head_type": "vanilla",
    "enable_confidence_head": False,
}
GEMMA: dict[str, Any] = {
    **{key: value for key, value in DSPARK.items() if key not in ("rope_theta", "model_type")},
    "architectures": ["Gemma4DSparkModel"],
    "model_type": "gemma4_text",
    "head_dim": 8,
    "global_head_dim": 16,
    "num_key_value_heads": 2,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "hidden_activation": "gelu_pytorch_tanh",
    "final_logit_softcapping": 3.0,
    "sliding_window": 8,
    "rope_parameters": {
        "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1e6, "rope_type": "proportional"},
        "sliding_attention": {"rope_theta": 1e4, "rope_type": "default"},
    },
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def changed(base: dict[str, Any], **values: Any) -> dict[str, Any]:
    """A deep copy of ``base`` with top-level keys replaced; ``dflash_config`` is merged, ``None`` removes a key."""
    raw = copy.deepcopy(base)
    for key, value in values.items():
        if key == "dflash_config" and value is not None:
            raw[key] = {**raw.get(key, {}), **value}
        else:
            raw[key] = value
    return {key: value for key, value in raw.items() if value is not None}


def qwen35(**values: Any) -> dict[str, Any]:
    """The layout of the current Qwen3.5-9B drafter: five sliding layers and a full one, eight features."""
    layout = {
        "num_hidden_layers": 6,
        "layer_types": QWEN35_LAYERS,
        "sliding_window": 7,
        "use_sliding_window": True,
        "num_target_layers": 16,
        "dflash_config": {"target_layer_ids": [1, 3, 4, 6, 8, 10, 11, 13]},
    }
    return changed(ZLAB, **(layout | values))


CASES: dict[str, dict[str, Any]] = {
    "dflash": ZLAB,
    "dflash_scaled": changed(
        ZLAB,
        rope_scaling=LLAMA3_ROPE,
        dflash_config={"input_embedding_scale": 1.5, "output_multiplier": 0.7, "final_logit_softcapping": 2.0},
    ),
    "dflash_qwen35": qwen35(),
    "dflash_qwen35_bidirectional": qwen35(is_causal=False),
    "dflash_qwen35_all_causal": qwen35(dflash_config={"causal": True, "target_layer_ids": [0, 1, 3, 5, 7, 9, 11, 14]}),
    "dspark_rank0": DSPARK,
    "dspark_rank4": changed(DSPARK, markov_rank=4, enable_confidence_head=True, confidence_head_with_markov=True),
    "gemma_rank0": GEMMA,
    "gemma_rank4": changed(GEMMA, markov_rank=4, enable_confidence_head=True, confidence_head_with_markov=True),
    "gemma_separate_values": changed(GEMMA, attention_k_eq_v=False),
}


def _setting(raw: dict[str, Any], key: str, default: Any = None) -> Any:
    return raw.get(key, raw.get("dflash_config", {}).get(key, default))


def _angles(raw: dict[str, Any], head_dim: int) -> list[float]:
    """Radians per position of each rotated pair (i, i + n)."""
    if raw["architectures"] == ["Gemma4DSparkModel"]:
        rope = raw["rope_parameters"]["full_attention"]
        turning = int(rope["partial_rotary_factor"] * head_dim // 2)
        return [rope["rope_theta"] ** (-2 * i / head_dim) if i < turning else 0.0 for i in range(head_dim // 2)]
    angles = [raw["rope_theta"] ** (-2 * i / head_dim) for i in range(head_dim // 2)]
    scaling = raw.get("rope_scaling")
    if scaling is None:
        return angles
    slowed = []
    for angle in angles:
        wavelength = 2 * math.pi / angle
        ratio = scaling["original_max_position_embeddings"] / wavelength
        smooth = (ratio - scaling["low_freq_factor"]) / (scaling["high_freq_factor"] - scaling["low_freq_factor"])
        smooth = min(1.0, max(0.0, smooth))
        slowed.append((1 - smooth) * angle / scaling["factor"] + smooth * angle)
    return slowed


def _norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    x = x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt()
    return x if weight is None else x * weight


def _turned(vector: Tensor, position: int, angles: list[float]) -> Tensor:
    out, n = vector.clone(), len(angles)
    for i, angle in enumerate(angles):
        c, s = math.cos(position * angle), math.sin(position * angle)
        out[i] = vector[i] * c - vector[i + n] * s
        out[i + n] = vector[i + n] * c + vector[i] * s
    return out


def reference_round(
    raw: dict[str, Any], w: dict[str, Tensor], features: Tensor, anchor: int, embed: Tensor, head: Tensor
) -> tuple[list[int], Tensor]:
    """Tokens and logits [K, V] of one round after ``features`` [N, F * H]; ``embed`` and ``head`` are the target's."""
    kind = raw["architectures"][0]
    zlab, gemma = kind == "DFlashDraftModel", kind == "Gemma4DSparkModel"
    eps, block, heads = raw["rms_norm_eps"], raw["block_size"], raw["num_attention_heads"]
    k_eq_v = gemma and raw["attention_k_eq_v"]
    width = raw["global_head_dim"] if gemma else raw["head_dim"]
    kv_heads = raw["num_global_key_value_heads"] if k_eq_v else raw["num_key_value_heads"]
    if not zlab:
        embed, head = w["embed_tokens.weight"], w["lm_head.weight"]
    angles, n = _angles(raw, width), len(features)

    context = _norm(features @ w["fc.weight"].T, w["hidden_norm.weight"], eps)
    ids = [anchor] + [_setting(raw, "mask_token_id")] * (block - 1)
    x = embed[ids] * (math.sqrt(raw["hidden_size"]) if gemma else _setting(raw, "input_embedding_scale", 1.0))
    for layer, layer_type in enumerate(raw["layer_types"]):
        p = f"layers.{layer}."
        sliding = layer_type == "sliding_attention"
        causal = _setting(raw, "is_causal", _setting(raw, "causal", sliding))
        h = _norm(x, w[p + "input_layernorm.weight"], eps)
        source = torch.cat([context, h])
        q = (h @ w[p + "self_attn.q_proj.weight"].T).view(block, heads, width)
        k = (source @ w[p + "self_attn.k_proj.weight"].T).view(n + block, kv_heads, width)
        v = k if k_eq_v else (source @ w[p + "self_attn.v_proj.weight"].T).view(n + block, kv_heads, width)
        q, k = _norm(q, w[p + "self_attn.q_norm.weight"], eps), _norm(k, w[p + "self_attn.k_norm.weight"], eps)
        v = _norm(v, None, eps) if gemma else v
        read = torch.zeros(block, heads, width, dtype=torch.float64)
        for r in range(block):
            keys = [j for j in range(n + block) if not (causal and j > n + r)]
            if sliding:
                keys = [j for j in keys if n + r - j < raw["sliding_window"]]
            for a in range(heads):
                g = a // (heads // kv_heads)
                query = _turned(q[r, a], n + r, angles)
                logits = torch.stack([query @ _turned(k[j, g], j, angles) for j in keys])
                weights = torch.softmax(logits * (1.0 if gemma else width**-0.5), 0)
                read[r, a] = sum(weights[i] * v[j, g] for i, j in enumerate(keys))
        out = read.reshape(block, -1) @ w[p + "self_attn.o_proj.weight"].T
        after = w[p + "post_attention_layernorm.weight"]
        x = x + (_norm(out, after, eps) if gemma else out)
        h = _norm(x, w[p + "pre_feedforward_layernorm.weight"] if gemma else after, eps)
        gate, up = h @ w[p + "mlp.gate_proj.weight"].T, h @ w[p + "mlp.up_proj.weight"].T
        cubic = math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)
        active = 0.5 * gate * (1 + torch.tanh(cubic)) if gemma else gate / (1 + torch.exp(-gate))
        out = (active * up) @ w[p + "mlp.down_proj.weight"].T
        x = x + (_norm(out, w[p + "post_feedforward_layernorm.weight"], eps) if gemma else out)
        if gemma:
            x = x * w[p + "layer_scalar"]
    logits = _norm(x, w["norm.weight"], eps) @ head.T
    logits = (logits[1:] if zlab else logits) * _setting(raw, "output_multiplier", 1.0)
    cap = _setting(raw, "final_logit_softcapping")
    logits = cap * torch.tanh(logits / cap) if cap else logits
    tokens: list[int] = []
    for row in logits:
        if raw.get("markov_rank"):
            before = tokens[-1] if tokens else anchor
            row += w["markov_head.markov_w2.weight"] @ w["markov_head.markov_w1.weight"][before]
        tokens.append(int(row.argmax()))
    return tokens, logits
