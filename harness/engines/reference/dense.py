"""Llama and Qwen3 targets, lean: the same arithmetic as ``transformers``, without a module call per operation.

At batch size one a decoding step of a small model is mostly overhead and memory traffic. Here a layer is eight
products on weights laid out once (``harness.linear``), the keys and values live in one preallocated block, and
nothing is copied per step. ``tests/engines/test_targets.py`` holds it against ``transformers``' forward.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from harness.engines.base import EngineError
from harness.engines.reference.attention import attend, row_weights
from harness.engines.reference.fixed import Fixed, FixedPass
from harness.engines.reference.target import Step
from harness.linear import Linear, pack
from methods.paged import Attend
from methods.rope import build_rope


@dataclass(frozen=True)
class _Layer:
    input_norm: Tensor
    qkv: Linear
    q_norm: Tensor | None
    k_norm: Tensor | None
    out: Linear
    post_norm: Tensor
    gate_up: Linear
    down: Linear


class DenseTarget:
    """A :class:`~harness.engines.reference.target.Target` for full-attention Llama and Qwen3 checkpoints.

    Keys and values are [layers, kv heads, capacity, head_dim] in ``dtype``; keys are stored rotated.
    """

    @staticmethod
    def supports(config: Any) -> bool:
        """Whether every layer is the plain block this class computes."""
        if config.model_type not in ("llama", "qwen3") or getattr(config, "use_sliding_window", False):
            return False
        plain = config.hidden_act == "silu" and not getattr(config, "attention_bias", False)
        return plain and not getattr(config, "mlp_bias", False)

    def __init__(
        self, tensors: CheckpointTensors | RandomTensors, config: Any, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.dtype, self.device = dtype, device
        self.layers = config.num_hidden_layers
        self.max_positions, self.vocab = config.max_position_embeddings, config.vocab_size
        self._hidden, self._eps = config.hidden_size, config.rms_norm_eps
        self._heads, self._kv_heads = config.num_attention_heads, config.num_key_value_heads
        self._dim = getattr(config, "head_dim", None) or self._hidden // self._heads
        self._scale = self._dim**-0.5
        self._rope = build_rope(dict(config.rope_parameters), self._dim)
        self.embedding = tensors.take("model.embed_tokens.weight", (self.vocab, self._hidden))
        self._tied = config.tie_word_embeddings
        own = None if self._tied else tensors.take("lm_head.weight", (self.vocab, self._hidden))
        self.head = self._pack(self.embedding if own is None else own)
        self._norm = tensors.take("model.norm.weight", (self._hidden,))
        self._layers = [self._load_layer(tensors, f"model.layers.{i}.", config) for i in range(self.layers)]
        self._weights = tensors.nbytes
        self._keys = self._values = torch.empty(0)
        self._cos = self._sin = torch.empty(0)
        self._capacity = self.length = self._marked = 0
        self._last_query = torch.empty(0)
        self._attend: Attend | None = None
        self._fixed: dict[tuple[int, tuple[int, ...]], FixedPass] = {}
        self._fixed_rows: frozenset[int] = frozenset()

    def fix(self, rows: Collection[int], attend: Attend) -> None:
        """From now on passes of so many rows run as fixed steps (``harness.engines.reference.fixed``), replayed as
        CUDA graphs on a GPU; ``attend`` reads the cache in them."""
        self._attend, self._fixed_rows = attend, frozenset(rows)
        self._fixed.clear()

    def _load_layer(self, tensors: CheckpointTensors | RandomTensors, prefix: str, config: Any) -> _Layer:
        hidden, dim, inner = self._hidden, self._dim, config.intermediate_size
        heads, kv_heads = self._heads * dim, self._kv_heads * dim
        attention, mlp = prefix + "self_attn.", prefix + "mlp."
        qk_norm = config.model_type == "qwen3"
        return _Layer(
            input_norm=tensors.take(prefix + "input_layernorm.weight", (hidden,)),
            qkv=self._pack(
                tensors.take(attention + "q_proj.weight", (heads, hidden)),
                tensors.take(attention + "k_proj.weight", (kv_heads, hidden)),
                tensors.take(attention + "v_proj.weight", (kv_heads, hidden)),
            ),
            q_norm=tensors.take(attention + "q_norm.weight", (dim,)) if qk_norm else None,
            k_norm=tensors.take(attention + "k_norm.weight", (dim,)) if qk_norm else None,
            out=self._pack(tensors.take(attention + "o_proj.weight", (hidden, heads))),
            post_norm=tensors.take(prefix + "post_attention_layernorm.weight", (hidden,)),
            gate_up=self._pack(
                tensors.take(mlp + "gate_proj.weight", (inner, hidden)),
                tensors.take(mlp + "up_proj.weight", (inner, hidden)),
            ),
            down=self._pack(tensors.take(mlp + "down_proj.weight", (hidden, inner))),
        )

    @staticmethod
    def _pack(*weights: Tensor) -> Linear:
        return pack(weights[0] if len(weights) == 1 else torch.cat(weights))

    def reserve(self, capacity: int) -> None:
        if capacity > self._capacity:
            shape = (len(self._layers), self._kv_heads, capacity, self._dim)
            self._keys = self._values = torch.empty(0)  # free the old block before taking the new one
            self._keys = torch.zeros(shape, dtype=self.dtype, device=self.device)
            self._values = torch.zeros(shape, dtype=self.dtype, device=self.device)
            angles = torch.outer(torch.arange(capacity, dtype=torch.float64), self._rope.inv_freq.cpu())
            table = torch.float64 if self.dtype == torch.float64 else torch.float32
            self._cos = (angles.cos() * self._rope.mscale).to(table).to(self.device)
            self._sin = (angles.sin() * self._rope.mscale).to(table).to(self.device)
            self._capacity = capacity
            self._fixed.clear()  # they have the old block's addresses
        self.length = self._marked = 0

    @torch.inference_mode()
    def forward(self, ids: Sequence[int], *, taps: Sequence[int] = (), last_only: bool = False) -> Step:
        start, rows = self.length, len(ids)
        stop = start + rows
        if stop > self._capacity:
            raise EngineError(f"{stop} positions do not fit the reserved {self._capacity}")
        if rows in self._fixed_rows and not last_only:
            step, self._last_query = self.fixed_pass(rows, taps)(ids, start)
            self.length = stop
            return step
        cos, sin = self._cos[start:stop, None], self._sin[start:stop, None]

        def read(index: int, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            self._keys[index, :, start:stop] = keys
            self._values[index, :, start:stop] = values
            return self.attend(q, self._keys[index], self._values[index], stop, self._scale)

        step, self._last_query = self._through(torch.tensor(ids, device=self.device), cos, sin, read, taps, last_only)
        self.length = stop
        return step

    def has_fixed(self, rows: int) -> bool:
        """Whether passes of so many rows are fixed steps."""
        return rows in self._fixed_rows

    def fixed_pass(self, rows: int, taps: Sequence[int]) -> FixedPass:
        """The fixed step of so many rows; made, and on a GPU captured, when first asked for."""
        key = (rows, tuple(taps))
        if key not in self._fixed:
            self._fixed[key] = FixedPass(rows, self.device, partial(self._compute_fixed, taps=key[1]))
        return self._fixed[key]

    @torch.inference_mode()
    def attention_alone(self, rows: int) -> Fixed[Tensor]:
        """All layers' attention and nothing else, as a step of its own: how long it takes is its share of a pass."""
        held = self.fixed_pass(rows, ())
        held.start.fill_(self.length - rows)
        shape = (self._heads, rows, self._dim)
        q = torch.randn(shape, dtype=torch.float32, device=self.device).to(self.dtype)
        return Fixed(lambda: [self._attend_fixed(i, q, held.stop) for i in range(self.layers)][-1], self.device)

    def _compute_fixed(self, at: FixedPass, *, taps: tuple[int, ...]) -> tuple[Step, Tensor]:
        places, stop = at.places, at.stop

        def read(index: int, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            self._keys[index].index_copy_(1, places, keys)
            self._values[index].index_copy_(1, places, values)
            return self._attend_fixed(index, q, stop)

        cos, sin = (table.index_select(0, places)[:, None] for table in (self._cos, self._sin))
        return self._through(at.ids, cos, sin, read, taps, last_only=False)

    def _attend_fixed(self, index: int, q: Tensor, stop: Tensor) -> Tensor:
        """``q`` [Hq, R, d] against the first ``stop`` entries of a layer, the R rows' own among them."""
        assert self._attend is not None
        keys, values = (held[index].transpose(0, 1)[None] for held in (self._keys, self._values))
        out, _ = self._attend(q.transpose(0, 1), keys, values, None, stop, left=None, right=0, scale=self._scale)
        return out.transpose(0, 1)

    def attend(self, q: Tensor, keys: Tensor, values: Tensor, length: int, scale: float) -> Tensor:
        """The read of a layer's cache: an attribute of the target, so that a profile can put a range around it."""
        return attend(q, keys, values, length, scale)

    def _through(
        self,
        ids: Tensor,
        cos: Tensor,
        sin: Tensor,
        read: Callable[[int, Tensor, Tensor, Tensor], Tensor],
        taps: Sequence[int],
        last_only: bool,
    ) -> tuple[Step, Tensor]:
        """All layers over ``ids`` [R]; ``read(layer, q [Hq, R, d], keys, values [Hkv, R, d])`` stores a layer's keys
        and values and attends [Hq, R, d]. Returns the step and the last layer's queries."""
        x = F.embedding(ids, self.embedding)
        tapped: list[Tensor] = []
        for index, layer in enumerate(self._layers):
            q, keys, values = self._project(
                layer, F.rms_norm(x, (self._hidden,), layer.input_norm, self._eps), cos, sin
            )
            mixed = read(index, q, keys, values)
            x = x + layer.out(mixed.transpose(0, 1).reshape(len(ids), -1))
            gate, up = layer.gate_up(F.rms_norm(x, (self._hidden,), layer.post_norm, self._eps)).chunk(2, -1)
            x = x + layer.down(F.silu(gate) * up)
            if index in taps:
                tapped.append(x)
        final = F.rms_norm(x[-1:] if last_only else x, (self._hidden,), self._norm, self._eps)
        return Step(self.head(final), torch.cat(tapped, -1) if taps else None), q

    def _project(self, layer: _Layer, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Project, normalise and rotate: queries [Hq, R, d], keys and values [Hkv, R, d]."""
        split = self._heads + self._kv_heads
        qkv = layer.qkv(x).view(len(x), split + self._kv_heads, self._dim)
        qk, value = qkv[:, :split], qkv[:, split:]
        if layer.q_norm is not None and layer.k_norm is not None:
            q = F.rms_norm(qk[:, : self._heads], (self._dim,), layer.q_norm, self._eps)
            k = F.rms_norm(qk[:, self._heads :], (self._dim,), layer.k_norm, self._eps)
            qk = torch.cat((q, k), 1)
        half = cos.shape[-1]
        a, b = qk[..., :half], qk[..., half:]
        rotated = torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(self.dtype).transpose(0, 1)
        return rotated[: self._heads], rotated[self._heads :], value.transpose(0, 1)

    def truncate(self, length: int) -> None:
        self.length = length

    def mark(self) -> None:
        self._marked = self.length

    def rewind(self) -> None:
        self.length = self._marked

    def attention_of(self, row: int) -> Tensor:
        position = self.length - self._last_query.shape[1] + row
        return row_weights(self._last_query[:, row], self._keys[-1, :, : position + 1], self._scale)

    def pretend(self, length: int) -> None:
        for held in (self._keys, self._values):
            held[:, :, :length].normal_()
        self.length = self._marked = length

    def read_bytes(self, length: int) -> dict[str, int]:
        per_entry = 2 * self.layers * self._kv_heads * self._dim * self._keys.element_size()
        unread = 0 if self._tied else self.embedding.nbytes
        return {"weights": self._weights - unread, "attention": per_entry * length}

    def nbytes(self) -> dict[str, int]:
        return {"weights": self._weights, "cache": self._keys.nbytes + self._values.nbytes}


class RandomTensors:
    """Random weights of whatever shape is asked for, made on the device; activations keep the order of one."""

    def __init__(self, dtype: torch.dtype, device: torch.device, seed: int) -> None:
        self._dtype, self._device = dtype, device
        self._generator = torch.Generator(device).manual_seed(seed)
        self.nbytes = 0  # of what was taken

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        tensor = torch.empty(shape, dtype=self._dtype, device=self._device)
        if len(shape) == 1:
            tensor.normal_(1.0, 0.1, generator=self._generator)
        else:
            tensor.normal_(0.0, shape[-1] ** -0.5, generator=self._generator)
        self.nbytes += tensor.nbytes
        return tensor


class CheckpointTensors:
    """The tensors of a safetensors checkpoint, sharded or not, checked for shape as they are taken."""

    def __init__(self, folder: Path, dtype: torch.dtype, device: torch.device) -> None:
        self._folder, self._dtype, self._device = folder, dtype, device
        self.nbytes = 0  # of what was taken, in the dtype asked for
        self._files: dict[str, Path] = {}
        from safetensors import safe_open  # random weights do without

        self._open = safe_open
        for path in sorted(folder.glob("*.safetensors")):
            with self._open(path, framework="pt") as file:
                self._files.update(dict.fromkeys(file.keys(), path))
        if not self._files:
            raise EngineError(f"target {folder}: no .safetensors file; convert the checkpoint to safetensors")

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        if name not in self._files:
            raise EngineError(f"target {self._folder}: tensor {name} is missing; the checkpoint is incomplete")
        with self._open(self._files[name], framework="pt") as file:
            tensor = file.get_tensor(name)
        if tuple(tensor.shape) != shape:
            raise EngineError(
                f"target {self._folder}: {name} is {tuple(tensor.shape)}, but its config.json asks for {shape}"
            )
        tensor = tensor.to(device=self._device, dtype=self._dtype)
        self.nbytes += tensor.nbytes
        return tensor
