"""The demo's DFlash drafter as a trainable module, its labels, and its export in the z-lab checkpoint format.

One forward pass drafts many blocks of a sequence at once: block n sits at anchor a_n, its slot 0 is the anchor's
token and slots 1..B-1 are the mask token, slot k at position a_n + k predicts that position's token. A query reads
the features of positions strictly before its anchor and the keys of its own block in both directions
(DFlash, arXiv 2602.06036, section 3 and appendix A.1).
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import cast

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import nn


@dataclass(frozen=True)
class DraftConfig:
    """Sizes of the drafter; the defaults are those of the shipped one for SmolLM2-135M-Instruct."""

    hidden_size: int = 576
    intermediate_size: int = 1536
    num_heads: int = 9
    num_kv_heads: int = 3
    head_dim: int = 64
    num_layers: int = 4
    block_size: int = 5
    target_layer_ids: tuple[int, ...] = (1, 8, 15, 22, 28)
    num_target_layers: int = 30
    vocab_size: int = 49152
    # <empty_output>: one of the tokenizer's reserved ids, which no text of ours contains.
    mask_token_id: int = 16
    rope_theta: float = 1e5
    rms_norm_eps: float = 1e-5
    max_position_embeddings: int = 8192


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dimension, computed in float32."""

    def __init__(self, size: int, eps: float, scale: float = 1.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((size,), scale))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        return (self.weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps))).to(x.dtype)


class Attention(nn.Module):
    """Block queries over context features (strictly before the anchor) and their own block."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        c = config
        self.config = c
        self.q_proj = nn.Linear(c.hidden_size, c.num_heads * c.head_dim, bias=False)
        self.k_proj = nn.Linear(c.hidden_size, c.num_kv_heads * c.head_dim, bias=False)
        self.v_proj = nn.Linear(c.hidden_size, c.num_kv_heads * c.head_dim, bias=False)
        self.o_proj = nn.Linear(c.num_heads * c.head_dim, c.hidden_size, bias=False)
        self.q_norm = RMSNorm(c.head_dim, c.rms_norm_eps)
        self.k_norm = RMSNorm(c.head_dim, c.rms_norm_eps)

    def forward(
        self,
        x: torch.Tensor,
        context: torch.Tensor,
        block_rope: tuple[torch.Tensor, torch.Tensor],
        context_rope: tuple[torch.Tensor, torch.Tensor],
        hidden: torch.Tensor,
    ) -> torch.Tensor:
        """x (b, N, B, H) normed block states; context (b, S, H); hidden (b, N, S) is True where it may not be read."""
        c = self.config
        b, n, size, _ = x.shape
        s = context.shape[1]
        group = c.num_heads // c.num_kv_heads
        q = _rotate(self.q_norm(self.q_proj(x).unflatten(-1, (c.num_heads, c.head_dim))), *block_rope)
        k_block = _rotate(self.k_norm(self.k_proj(x).unflatten(-1, (c.num_kv_heads, c.head_dim))), *block_rope)
        v_block = self.v_proj(x).unflatten(-1, (c.num_kv_heads, c.head_dim))
        k_far = _rotate(self.k_norm(self.k_proj(context).unflatten(-1, (c.num_kv_heads, c.head_dim))), *context_rope)
        v_far = self.v_proj(context).unflatten(-1, (c.num_kv_heads, c.head_dim))
        # (b, kv, N, group, B, d): the query heads of a KV head and the slots of a block are the rows of one product.
        q = (q * c.head_dim**-0.5).unflatten(3, (c.num_kv_heads, group)).permute(0, 3, 1, 4, 2, 5)
        k_far, v_far = k_far.transpose(1, 2), v_far.transpose(1, 2)
        k_block, v_block = k_block.permute(0, 3, 1, 2, 4), v_block.permute(0, 3, 1, 2, 4)
        far = (q.reshape(b, c.num_kv_heads, n * group * size, c.head_dim) @ k_far.transpose(-1, -2)).float()
        far = far.view(b, c.num_kv_heads, n, group * size, s).masked_fill(hidden[:, None, :, None], float("-inf"))
        near = (q.reshape(b, c.num_kv_heads, n, group * size, c.head_dim) @ k_block.transpose(-1, -2)).float()
        odds = torch.softmax(torch.cat([far, near], dim=-1), dim=-1).to(v_far.dtype)
        read = odds[..., :s].reshape(b, c.num_kv_heads, n * group * size, s) @ v_far
        read = read.view(b, c.num_kv_heads, n, group * size, c.head_dim) + odds[..., s:] @ v_block
        read = read.view(b, c.num_kv_heads, n, group, size, c.head_dim).permute(0, 2, 4, 1, 3, 5)
        return self.o_proj(read.reshape(b, n, size, c.num_heads * c.head_dim))


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """Pre-norm attention and MLP; the context enters as keys and values only and has no norm of its own here."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x, context, block_rope, context_rope, hidden):
        x = x + self.self_attn(self.input_layernorm(x), context, block_rope, context_rope, hidden)
        return x + self.mlp(self.post_attention_layernorm(x))


class Drafter(nn.Module):
    """The trained part of the drafter. Embedding and head belong to the target and are passed in.

    ``feature_scale`` (F * H) divides the features before ``fc``, so that all of them train at the same rate; export
    folds it into fc.
    """

    feature_scale: torch.Tensor

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.config = config
        width = len(config.target_layer_ids) * config.hidden_size
        self.fc = nn.Linear(width, config.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.register_buffer("feature_scale", torch.ones(width))

    def forward(self, features: torch.Tensor, anchors: torch.Tensor, block: torch.Tensor) -> torch.Tensor:
        """Draft states after the final norm.

        Args:
            features: (b, S, F * H) of positions 0..S-1.
            anchors: (b, N) positions of the anchors; entries at or after an anchor are not read by its block.
            block: (b, N, B, H) embeddings of [anchor token, mask, ..., mask].
        """
        c = self.config
        b, s, _ = features.shape
        size = block.shape[2]
        context = self.hidden_norm(self.fc(features / self.feature_scale.to(features.dtype)))
        where = torch.arange(s, device=features.device)
        hidden = where[None, None] >= anchors[:, :, None]
        slots = anchors[:, :, None] + torch.arange(size, device=features.device)
        context_rope = _angles(where.expand(b, s), c)
        block_rope = _angles(slots, c)
        x = block
        for layer in self.layers:
            x = layer(x, context, block_rope, context_rope, hidden)
        return self.norm(x)

    @torch.no_grad()
    def init_from_target(self, target: dict[str, torch.Tensor], scale: torch.Tensor, seed: int) -> None:
        """Start as the target's last layers reading its last feature.

        Args:
            target: the target's state dict (transformers names); layers of the same shapes as the drafter's.
            scale: (F * H) root mean square of every feature dimension.
            seed: of the small random weights on the other features.
        """
        c = self.config
        first = c.num_target_layers - c.num_layers
        norms = []
        for i, layer in enumerate(self.layers):
            prefix = f"model.layers.{first + i}."
            for name, parameter in layer.named_parameters():
                if f"{prefix}{name}" in target:
                    parameter.copy_(target[f"{prefix}{name}"].float())
            norms.append(target[f"{prefix}input_layernorm.weight"].float())
            # The target has no q/k norm, and normalised heads have logits of at most head_dim**0.5: sharper is closer.
            attention = cast(Layer, layer).self_attn
            attention.q_norm.weight.fill_(1.5)
        # The context skips the layers' own input norms, so their mean stands in for them.
        self.hidden_norm.weight.copy_(torch.stack(norms).mean(0))
        self.norm.weight.copy_(target["model.norm.weight"].float())
        self.feature_scale.copy_(scale)
        noise = torch.randn(self.fc.weight.shape, generator=torch.Generator().manual_seed(seed))
        self.fc.weight.copy_(0.01 * noise)
        last = scale[-c.hidden_size :]
        self.fc.weight[:, -c.hidden_size :] = torch.diag(last / last.mean())


def draft_labels(
    tokens: torch.Tensor, argmax: torch.Tensor, length: int, block: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Same-position labels of every possible anchor of one sequence.

    Slot k of anchor t stands for token t + k, which the target chooses at t + k - 1; that choice is exact only while
    the tokens before it in the block (t+1 .. t+k-1) are the target's choices too.

    Args:
        tokens: (S,) ids. argmax: (S,) the target's choice for position + 1. length: tokens that count. block: B.

    Returns:
        labels (S, B-1) and valid (S, B-1), a prefix of True in every row; a label's position is below ``length``.
    """
    s = len(tokens)
    at = torch.arange(s)
    labels = torch.zeros(s, block - 1, dtype=torch.int64)
    valid = torch.zeros(s, block - 1, dtype=torch.bool)
    follows = torch.ones(s, dtype=torch.bool)
    for k in range(1, block):
        source = (at + k - 1).clamp(max=s - 1)
        labels[:, k - 1] = argmax[source]
        follows = follows & (at + k < length)
        valid[:, k - 1] = follows
        chosen = torch.zeros(s, dtype=torch.bool)
        inside = at + k < s
        chosen[inside] = tokens[(at + k)[inside]] == argmax[source[inside]]
        follows = follows & chosen
    return labels, valid


def export(drafter: Drafter, folder: Path, weights: dict[str, torch.Tensor] | None = None) -> None:
    """Write the z-lab checkpoint: ``config.json`` and ``model.safetensors`` (bf16). Each file appears by one rename.

    Args:
        weights: parameters to write instead of the module's own (an average, say), by parameter name.
    """
    c = drafter.config
    state = {n: p.detach().float() for n, p in (weights or dict(drafter.named_parameters())).items()}
    state["fc.weight"] = state["fc.weight"] / drafter.feature_scale.float()
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / ".model.safetensors.partial"
    save_file(
        {n: t.to(torch.bfloat16).contiguous().cpu() for n, t in state.items()}, partial, metadata={"format": "pt"}
    )
    os.replace(partial, folder / "model.safetensors")
    config = {
        "architectures": ["DFlashDraftModel"],
        "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
        "model_type": "qwen3",
        "block_size": c.block_size,
        "dflash_config": {
            "block_size": c.block_size,
            "mask_token_id": c.mask_token_id,
            "target_layer_ids": list(c.target_layer_ids),
        },
        "num_target_layers": c.num_target_layers,
        "num_hidden_layers": c.num_layers,
        "hidden_size": c.hidden_size,
        "intermediate_size": c.intermediate_size,
        "num_attention_heads": c.num_heads,
        "num_key_value_heads": c.num_kv_heads,
        "head_dim": c.head_dim,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "rms_norm_eps": c.rms_norm_eps,
        "rope_theta": c.rope_theta,
        "rope_scaling": None,
        "layer_types": ["full_attention"] * c.num_layers,
        "max_window_layers": c.num_layers,
        "sliding_window": None,
        "use_sliding_window": False,
        "max_position_embeddings": c.max_position_embeddings,
        "vocab_size": c.vocab_size,
        "tie_word_embeddings": True,
        "use_cache": True,
        "dtype": "bfloat16",
    }
    partial = folder / ".config.json.partial"
    partial.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    os.replace(partial, folder / "config.json")


def config_dict(config: DraftConfig) -> dict:
    """The configuration as plain JSON-ready values."""
    return {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(config).items()}


def _angles(positions: torch.Tensor, config: DraftConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin (..., 1, d) of integer positions (...), for tensors of (..., heads, d)."""
    steps = torch.arange(0, config.head_dim, 2, dtype=torch.float32, device=positions.device) / config.head_dim
    angles = positions[..., None].float() / config.rope_theta**steps
    angles = torch.cat([angles, angles], dim=-1).unsqueeze(-2)
    return angles.cos(), angles.sin()


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    low, high = x.chunk(2, dim=-1)
    return (x * cos + torch.cat((-high, low), dim=-1) * sin).to(x.dtype)
