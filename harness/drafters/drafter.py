"""A block-parallel drafter in torch: DFlash (z-lab and DeepSpec) and DSpark, on the Qwen3 and Gemma-4 layer designs.

One round (facts/drafters.md 1.2, 2.1 and 2.7): the committed positions before the anchor are known to the drafter
only through target features, from which every layer derives its context keys and values once (``context_kv``). A
block of the anchor token and B - 1 mask tokens then passes through the layers together; each layer's read of the
context is the benchmark's subject and belongs to the ``Reader``. Rotation, masks and the softmax are the reader's, so
all keys here are unrotated.

The forward pass is plain functions on fused weights: at eight rows a module's call overhead and every further small
kernel cost as much as the arithmetic.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import gelu, rms_norm, silu

from harness.drafters.checkpoint import Take
from harness.drafters.config import DrafterConfig
from harness.drafters.errors import DrafterError
from harness.linear import Linear, pack
from methods.reader import Reader


@dataclass(frozen=True)
class Proposal:
    """What a drafter proposes for one round: ``tokens``, K ids, and the ``logits`` [K, V] they are the argmax of."""

    tokens: list[int]
    logits: Tensor


@dataclass(frozen=True, slots=True)
class _Layer:
    """One layer's weights. ``qk_norm`` [Hq + Hkv, d] holds the per-head query and key norms, one row a head."""

    input_norm: Tensor
    qkv: Linear
    qk_norm: Tensor
    out: Linear
    attention_norm: Tensor | None
    mlp_norm: Tensor
    gate_up: Linear
    down: Linear
    output_norm: Tensor | None
    scalar: float | None


class Drafter:
    """A drafter with its weights in ``dtype`` on ``device``. Made by ``load_drafter`` or ``random_drafter``."""

    def __init__(self, config: DrafterConfig, take: Take, *, dtype: torch.dtype, device: torch.device | str):
        """``take`` gives checkpoint tensors by name, already checked against ``config``."""
        self.config, self.dtype, self.device = config, dtype, torch.device(device)

        def optional(name: str) -> Tensor | None:
            # Copied: a tensor of an open safetensors file is a view of the mapped file, which someone may replace.
            tensor = take(name)
            return None if tensor is None else tensor.to(device=self.device, dtype=dtype, copy=True)

        def weight(name: str) -> Tensor:
            tensor = optional(name)
            if tensor is None:
                raise DrafterError(f"missing tensor {name}")
            return tensor

        self._eps = config.eps
        self._gemma = gemma = config.family == "dspark_gemma4"
        # Gemma holds sqrt(H) in the weights' dtype: 62.0 for bf16 and H 3840, not 61.97.
        self._embed_scale = torch.tensor(config.embed_scale, device=self.device, dtype=dtype)
        self._fc = pack(weight("fc.weight"))
        self._hidden_norm, self._norm = weight("hidden_norm.weight"), weight("norm.weight")
        self._layers: list[_Layer] = []
        context_keys, context_values, key_norms = [], [], []
        for i in range(len(config.layers)):
            attention, mlp = f"layers.{i}.self_attn.", f"layers.{i}.mlp."
            q, k = weight(attention + "q_proj.weight"), weight(attention + "k_proj.weight")
            v = [] if config.k_eq_v else [weight(attention + "v_proj.weight")]
            query_norm, key_norm = weight(attention + "q_norm.weight"), weight(attention + "k_norm.weight")
            context_keys.append(k)
            context_values.extend(v)
            key_norms.append(key_norm)
            after = weight(f"layers.{i}.post_attention_layernorm.weight")
            self._layers.append(
                _Layer(
                    input_norm=weight(f"layers.{i}.input_layernorm.weight"),
                    qkv=pack(torch.cat([q, k, *v])),
                    qk_norm=torch.cat([query_norm.expand(config.heads, -1), key_norm.expand(config.kv_heads, -1)]),
                    out=pack(weight(attention + "o_proj.weight")),
                    # Its place differs: the MLP's input in Qwen3, the attention's output in Gemma-4.
                    attention_norm=after if gemma else None,
                    mlp_norm=weight(f"layers.{i}.pre_feedforward_layernorm.weight") if gemma else after,
                    gate_up=pack(torch.cat([weight(mlp + "gate_proj.weight"), weight(mlp + "up_proj.weight")])),
                    down=pack(weight(mlp + "down_proj.weight")),
                    output_norm=weight(f"layers.{i}.post_feedforward_layernorm.weight") if gemma else None,
                    scalar=float(weight(f"layers.{i}.layer_scalar")) if gemma else None,
                )
            )
        # One product for all layers' context keys, then all their values. It holds the K and V weights a second time
        # (4% of a drafter for an 8B target): the block needs them fused with Q, the context across layers.
        self._context = pack(torch.cat(context_keys + context_values))
        self._key_norms = torch.stack(key_norms)[:, None, None]  # [L, 1, 1, d]

        self._markov: tuple[Tensor, Linear] | None = None
        if config.markov_rank:
            self._markov = weight("markov_head.markov_w1.weight"), pack(weight("markov_head.markov_w2.weight"))
        self._head: Linear | None = None
        self._embed: Tensor | None = None
        self._block = torch.empty(0)
        # A checkpoint's own embedding and head are never replaced by the target's: that lost nearly all acceptance in
        # vllm-ascend#11374, because the copy may differ from the target's in use.
        embed, head = optional("embed_tokens.weight"), optional("lm_head.weight")
        self._own_embed, self._own_head = embed is not None, head is not None
        if embed is not None:
            self._set_embed(embed)
        if head is not None:
            self._head = pack(head)

    def bind(self, embed: Tensor, lm_head: Linear | Tensor) -> None:
        """Borrow the target's embedding [V, H] and vocabulary head, for what the checkpoint does not ship itself.

        ``embed`` is the raw table, without a Gemma target's scale; ``lm_head`` its raw projection, [n, H] to [n, V]
        without softcap, as a callable or as the weight [V, H]. Raises ``DrafterError`` if the table does not fit the
        drafter.
        """
        if not self._own_embed:
            shape, config = list(embed.shape), self.config
            if embed.dim() != 2 or shape[1] != config.hidden:
                raise DrafterError(f"the target's embedding is {shape}, the drafter needs [V, {config.hidden}]")
            if shape[0] <= config.mask_token_id:
                raise DrafterError(f"the drafter's mask token {config.mask_token_id} is outside embedding {shape}")
            self._set_embed(embed)
        if not self._own_head:
            self._head = pack(lm_head) if isinstance(lm_head, Tensor) else lm_head

    def context_kv(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """Context keys and values of ``n`` committed positions, from their target features [n, F * H].

        Returns ``k`` [L, n, Hkv, d], after k_norm and unrotated, and ``v`` [L, n, Hkv, dv], both in the drafter's
        dtype. Every position is computed alone, so a prompt may come in chunks of any size. Order of the F features:
        that of ``config.target_layer_ids``.
        """
        config, n, layers = self.config, len(features), len(self._layers)
        groups = layers if config.k_eq_v else 2 * layers
        context = self.context_features(features)
        heads = self._context(context).view(n, groups, config.kv_heads, config.head_dim).transpose(0, 1)
        keys = rms_norm(heads[:layers], (config.head_dim,), None, self._eps)
        if config.k_eq_v:
            return keys * self._key_norms, keys
        values = heads[layers:]
        if self._gemma:
            values = rms_norm(values, (config.head_dim,), None, self._eps)
        return keys * self._key_norms, values

    def context_features(self, features: Tensor) -> Tensor:
        """The paper's context features c_j [n, H] of ``n`` positions (section 3.1), from target features [n, F * H]."""
        return rms_norm(self._fc(features), self._hidden_norm.shape, self._hidden_norm, self._eps)

    def draft(self, anchor: int, reader: Reader) -> Proposal:
        """Propose K tokens after ``anchor``, the last committed token, greedily.

        ``reader`` reads the committed positions before it; one pass of the backbone calls it once a layer. Raises
        ``DrafterError`` if the drafter borrows the target's embedding or head and ``bind`` was not called.
        """
        tokens, logits = self.propose(torch.tensor([anchor], device=self.device), reader)
        return Proposal(tokens.tolist(), logits)

    def propose(self, anchor: Tensor, reader: Reader) -> tuple[Tensor, Tensor]:
        """:meth:`draft` without a word from or to the host, so that it can be captured as a CUDA graph.

        ``anchor`` [1] int64 on the drafter's device. Returns tokens [K] int64 and the logits [K, V] they are the argmax
        of.
        """
        return self.choose(anchor, self.logits(anchor, reader))

    def logits(self, anchor: Tensor, reader: Reader) -> Tensor:
        """Logits [K, V] of the K slots, for a Markov drafter without the bias of each slot's predecessor."""
        if self._head is None:
            raise DrafterError("this drafter has no vocabulary head of its own: bind the target's first")
        hidden = self.hidden(anchor, reader)
        # A z-lab slot proposes the token at its own position, so slot 0 (the anchor) has nothing to say; a DeepSpec
        # slot proposes the next token.
        logits = self._head(hidden[1:] if self.config.family == "dflash" else hidden)
        if self.config.output_multiplier != 1.0:
            logits = logits * self.config.output_multiplier
        if self.config.softcap is not None:
            logits = torch.tanh(logits / self.config.softcap) * self.config.softcap
        return logits

    def choose(self, anchor: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
        """The greedy tokens [K] of :meth:`logits`, left to right where a Markov head adds its bias (then in place)."""
        if self._markov is None:
            # max, not argmax: on a CPU torch's bf16 argmax takes six times as long.
            return logits.max(-1).indices, logits
        predecessors, successors = self._markov
        tokens = [anchor]
        for row in logits:
            row += successors(predecessors.index_select(0, tokens[-1]))[0]
            tokens.append(row.max(-1, keepdim=True).indices)
        return torch.cat(tokens[1:]), logits

    def hidden(self, anchor: int | Tensor, reader: Reader) -> Tensor:
        """The backbone's normalised output [B, H] for the block that starts with ``anchor`` (a tensor: [1]). Errors
        as ``draft``."""
        if self._embed is None:
            raise DrafterError("this drafter has no embedding of its own: bind the target's first")
        config, eps, heads, width = self.config, self._eps, self.config.heads, self.config.head_dim
        normed = heads + config.kv_heads
        x = self._block  # never written to below, but for the anchor's row here
        first = anchor if isinstance(anchor, Tensor) else torch.tensor([anchor], device=self._embed.device)
        x[:1] = self._embed_rows(self._embed.index_select(0, first))
        for index, layer in enumerate(self._layers):
            h = rms_norm(x, (config.hidden,), layer.input_norm, eps)
            rows = layer.qkv(h).view(config.block, -1, width)
            unscaled = rms_norm(rows[:, :normed], (width,), None, eps)
            qk = unscaled * layer.qk_norm
            if config.k_eq_v:
                values = unscaled[:, heads:]
            elif self._gemma:
                values = rms_norm(rows[:, normed:], (width,), None, eps)
            else:
                values = rows[:, normed:]
            h = layer.out(reader.read(index, qk[:, :heads], qk[:, heads:], values).reshape(config.block, -1))
            if layer.attention_norm is not None:
                h = rms_norm(h, (config.hidden,), layer.attention_norm, eps)
            x = x + h
            gate, up = layer.gate_up(rms_norm(x, (config.hidden,), layer.mlp_norm, eps)).chunk(2, dim=-1)
            h = layer.down((gelu(gate, approximate="tanh") if self._gemma else silu(gate)) * up)
            if layer.output_norm is not None:
                h = rms_norm(h, (config.hidden,), layer.output_norm, eps)
            x = x + h
            if layer.scalar is not None:
                x = x * layer.scalar
        return rms_norm(x, (config.hidden,), self._norm, eps)

    def _set_embed(self, table: Tensor) -> None:
        self._embed = table
        # Only the anchor's row changes from round to round.
        self._block = self._embed_rows(table[self.config.mask_token_id]).expand(self.config.block, -1).contiguous()

    def _embed_rows(self, rows: Tensor) -> Tensor:
        rows = rows.to(device=self.device, dtype=self.dtype)
        return rows if self.config.embed_scale == 1.0 else rows * self._embed_scale


def features_from_hidden_states(hidden_states: Sequence[Tensor], target_layer_ids: Sequence[int]) -> Tensor:
    """The drafter's input [..., F * H], taken from ``transformers``' ``hidden_states``, each [..., H].

    Layer ``id``'s output is entry ``id + 1``: entry 0 is the embedding. The last entry is *normalised*, so the last
    layer's output is not in there and asking for it raises ``DrafterError`` (capture it with a hook instead).
    Source: facts/drafters.md 1.1.
    """
    last = len(hidden_states) - 2
    for i in target_layer_ids:
        if not 0 <= i < last:
            raise DrafterError(f"hidden_states holds the raw outputs of layers 0 to {last - 1} only, not of layer {i}")
    return torch.cat([hidden_states[i + 1] for i in target_layer_ids], dim=-1)
