"""Every other target, through ``transformers``' own modules: Gemma-4, Qwen3.5 (hybrid), and whatever comes next.

Three things are added around the model's forward: attention layers write into preallocated keys and values and hand
back views (no concatenation per step; sliding layers keep all entries, so that rejected rows can be taken back), the
tapped layers' outputs are caught by hooks, and the recurrent state of linear-attention layers is saved before a pass
and restored when rows of it are dropped: the kept rows are then fed again, since a recurrence cannot be cut.

Models without recurrent layers also run passes of fixed shape (``fixed.py``): the same modules, with the rows laid at
places that device memory names and attention bounded by it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from harness.engines.base import EngineError
from harness.engines.reference.attention import row_weights
from harness.engines.reference.fixed import Fixed, FixedPass
from harness.engines.reference.target import Step
from methods.paged import Attend

_ATTENTION = "fold_bench_watched"


class TransformersTarget:
    """A :class:`~harness.engines.reference.target.Target` around ``AutoModelForCausalLM``."""

    def __init__(self, model: Any, dtype: torch.dtype, device: torch.device) -> None:
        """``model``: from :func:`load_model` or :func:`random_model`."""
        from transformers.cache_utils import DynamicCache

        self._model = model.to(device).eval().requires_grad_(False)
        text = model.config.get_text_config()
        self.dtype, self.device = dtype, device
        self.layers, self.vocab, self.max_positions = (
            text.num_hidden_layers,
            text.vocab_size,
            text.max_position_embeddings,
        )
        self.embedding = model.get_input_embeddings().weight
        self.head: Callable[[Tensor], Tensor] = model.get_output_embeddings()
        self._decoder_layers = _decoder_layers(model, self.layers)
        self._new_cache: Callable[[], Any] = lambda: DynamicCache(config=model.config)
        accepted = inspect.signature(type(model).forward).parameters
        self._cache_name = "cache" if "cache" in accepted else "past_key_values"
        self._watched = _last_full_layer(text)
        kinds = getattr(text, "layer_types", None) or ["full_attention"] * self.layers
        self._windows = [text.sliding_window if kind == "sliding_attention" else None for kind in kinds]
        self._cache: Any = None
        self._capacity = 0
        self.length = self._marked = 0
        self._fed: list[int] = []
        self._before: list[Any] | None = None  # recurrent states before the latest pass
        self._prompt_state: list[Any] | None = None
        self._query = torch.empty(0)
        self._attend: Attend | None = None
        self._fixed: dict[tuple[int, tuple[int, ...]], FixedPass] = {}
        self._fixed_rows: frozenset[int] = frozenset()

    def fix(self, rows: Collection[int], attend: Attend) -> None:
        """See :class:`~harness.engines.reference.target.Target`: for models without recurrent layers, whose state
        moves from one place to another."""
        if not any(_recurrent(layer) for layer in self._new_cache().layers):
            self._attend, self._fixed_rows = attend, frozenset(rows)
        self._fixed.clear()

    def has_fixed(self, rows: int) -> bool:
        return rows in self._fixed_rows

    def fixed_pass(self, rows: int, taps: Sequence[int]) -> FixedPass:
        key = (rows, tuple(sorted(taps)))
        if key not in self._fixed:
            self._fixed[key] = FixedPass(rows, self.device, partial(self._compute_fixed, taps=key[1]))
        return self._fixed[key]

    @torch.inference_mode()
    def attention_alone(self, rows: int) -> Fixed[Tensor]:
        held = self.fixed_pass(rows, ())
        held.start.fill_(self.length - rows)
        calls: list[_Call] = []
        with _fixed_attention(held, self._attend, calls):
            self._pass(held.ids, held.places, (), 0)  # to learn what each layer asks for
        stop = held.stop
        assert self._attend is not None
        attend = self._attend
        return Fixed(lambda: [call.again(attend, stop) for call in calls][-1], self.device)

    @torch.inference_mode()
    def _compute_fixed(self, at: FixedPass, *, taps: tuple[int, ...]) -> tuple[Step, Tensor]:
        with _fixed_attention(at, self._attend):
            step = self._pass(at.ids, at.places, taps, 0)
        self._scale = _WATCH["query"][1]
        return step, _WATCH["query"][0]

    def reserve(self, capacity: int) -> None:
        kept = self._fixed_rows and self._cache is not None and capacity <= self._capacity
        if kept and all(layer.is_initialized for layer in self._cache.layers):
            self._set_length(0)  # fixed steps have its addresses
            self._marked, self._fed = 0, []
            return
        self._fixed.clear()
        self._cache = self._new_cache()
        self._cache.layers = [
            layer if _recurrent(layer) else _preallocated(layer, capacity) for layer in self._cache.layers
        ]
        self._capacity = capacity
        self.length = self._marked = 0
        self._fed, self._before, self._prompt_state = [], None, None

    @torch.inference_mode()
    def forward(self, ids: Sequence[int], *, taps: Sequence[int] = (), last_only: bool = False) -> Step:
        if self.length + len(ids) > self._capacity:
            raise EngineError(f"{self.length + len(ids)} positions do not fit the reserved {self._capacity}")
        self._before = self._recurrent_states()
        self._fed = list(ids)
        if len(ids) in self._fixed_rows and not last_only:
            step, self._query = self.fixed_pass(len(ids), taps)(ids, self.length)
            self._set_length(self.length + len(ids))
            return step
        places = torch.arange(self.length, self.length + len(ids), device=self.device)
        step = self._pass(torch.tensor(list(ids), device=self.device), places, taps, 1 if last_only else 0)
        if _WATCH["query"] is not None:
            self._query, self._scale = _WATCH["query"]
        self.length += len(ids)
        return step

    def _pass(self, ids: Tensor, places: Tensor, taps: Sequence[int], keep: int) -> Step:
        """The model over ``ids`` [R] at ``places`` [R]; logits of the last ``keep`` rows, 0 for all."""
        tapped: dict[int, Tensor] = {}
        hooks = [self._decoder_layers[i].register_forward_hook(_catch(tapped, i)) for i in sorted(taps)]
        _WATCH.update(layer=self._watched, query=None)
        try:
            out = self._model(
                input_ids=ids[None],
                position_ids=places[None],
                use_cache=True,
                logits_to_keep=keep,
                **{self._cache_name: self._cache},
            )
        finally:
            for hook in hooks:
                hook.remove()
        features = torch.cat([tapped[i] for i in sorted(taps)], -1) if taps else None
        return Step(out.logits[0], features)

    def truncate(self, length: int) -> None:
        start = self.length - len(self._fed)
        if length == self.length:
            return
        if not start <= length < self.length:
            raise EngineError(f"cannot go back to {length}: the latest pass covered {start}..{self.length}")
        kept = self._fed[: length - start]
        self._set_length(start if self._before else length)
        if self._before:
            self._restore(self._before)
            if kept:
                query = self._query
                self.forward(kept)
                self._query = query[:, : len(kept)]

    def mark(self) -> None:
        self._marked, self._prompt_state = self.length, self._recurrent_states()

    def rewind(self) -> None:
        self._set_length(self._marked)
        if self._prompt_state:
            self._restore(self._prompt_state)
        self._fed = []

    def attention_of(self, row: int) -> Tensor:
        if self._watched is None:
            raise EngineError("this target has no full-attention layer, so CMR has nothing to score with")
        position = self.length - self._query.shape[1] + row
        keys = self._cache.layers[self._watched].storage(0)[0, :, : position + 1]
        return row_weights(self._query[:, row], keys, self._scale)

    @torch.inference_mode()
    def pretend(self, length: int) -> None:
        self.forward([0], last_only=True)  # lays out every layer's storage and state
        for layer in self._cache.layers:
            if not _recurrent(layer):
                for which in (0, 1):
                    layer.storage(which)[:, :, :length].normal_()
        self._set_length(length)
        self._fed, self._before = [], None
        self.mark()

    def read_bytes(self, length: int) -> dict[str, int]:
        unread = 0 if self._model.get_output_embeddings().weight is self.embedding else self.embedding.nbytes
        weights = sum(p.nbytes for p in self._model.parameters()) - unread
        attention = 0
        for layer, window in zip(self._cache.layers, self._windows, strict=True):
            if not _recurrent(layer):
                entries = length if window is None else min(length, window)
                attention += sum(layer.storage(i)[:, :, :1].nbytes for i in (0, 1)) * entries
        return {"weights": weights, "attention": attention}

    def nbytes(self) -> dict[str, int]:
        weights = sum(p.nbytes for p in self._model.parameters())
        cache = 0 if self._cache is None else sum(_layer_bytes(layer) for layer in self._cache.layers)
        return {"weights": weights, "cache": cache}

    def _set_length(self, length: int) -> None:
        for layer in self._cache.layers:
            if not _recurrent(layer):
                layer.keep(length)
        self.length = length

    def _recurrent_states(self) -> list[Any] | None:
        """Copies of the linear-attention layers' states; None if the model has no such layer."""
        layers = [layer for layer in self._cache.layers if _recurrent(layer)]
        if not layers:
            return None
        return [
            {
                name: {
                    i: value.clone() if isinstance(value, Tensor) else value
                    for i, value in getattr(layer, name).items()
                }
                for name in _STATE
            }
            for layer in layers
        ]

    def _restore(self, states: list[Any]) -> None:
        layers = [layer for layer in self._cache.layers if _recurrent(layer)]
        for layer, state in zip(layers, states, strict=True):
            for name in _STATE:
                restored = {i: v.clone() if isinstance(v, Tensor) else v for i, v in state[name].items()}
                getattr(layer, name).update(restored)


def load_model(folder: Path, dtype: torch.dtype) -> Any:
    """The checkpoint in ``folder`` as ``transformers``' module. Raises EngineError, one line."""
    from transformers import AutoModelForCausalLM

    _register_attention()
    try:
        return AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, use_safetensors=True, trust_remote_code=False, attn_implementation=_ATTENTION
        )
    except (OSError, ValueError, RuntimeError) as error:
        first = str(error).strip().splitlines()[0]
        raise EngineError(f"target {folder} does not load: {first}") from None


def random_model(config: Any, dtype: torch.dtype, device: torch.device, seed: int) -> Any:
    """``transformers``' module of ``config`` with its own random initialisation, made on the device."""
    from transformers import AutoModelForCausalLM

    _register_attention()
    with torch.random.fork_rng(), torch.device(device):
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=_ATTENTION)


# what a linear-attention cache layer of transformers >= 5.20 carries from one pass to the next
_STATE = (
    "conv_states",
    "recurrent_states",
    "is_conv_states_initialized",
    "is_recurrent_states_initialized",
    "has_previous_state",
)


def _recurrent(layer: Any) -> bool:
    from transformers.cache_utils import LinearAttentionCacheLayerMixin

    return isinstance(layer, LinearAttentionCacheLayerMixin)


def _preallocated(layer: Any, capacity: int) -> Any:
    """A cache layer that writes into a block of ``capacity`` positions and returns views of it."""
    from transformers.cache_utils import DynamicLayer

    class Preallocated(DynamicLayer):
        def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
            self.device, self.dtype = key_states.device, key_states.dtype
            # Finite: a fixed pass may weigh what lies behind the held positions by 0, and 0 times NaN is NaN.
            self._blocks = [
                state.new_zeros(*state.shape[:2], capacity, state.shape[3]) for state in (key_states, value_states)
            ]
            self._held = 0
            self.is_initialized = True

        def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
            if not self.is_initialized:
                self.lazy_initialization(key_states, value_states)
            if (fixed := _WATCH["fixed"]) is not None:
                for block, states in zip(self._blocks, (key_states, value_states), strict=True):
                    block.index_copy_(2, fixed.places, states)
                return self._blocks[0], self._blocks[1]
            stop = self._held + key_states.shape[2]
            for block, states in zip(self._blocks, (key_states, value_states), strict=True):
                block[:, :, self._held : stop] = states
            self.keep(stop)
            return self.keys, self.values

        def keep(self, length: int) -> None:
            """Hold the first ``length`` positions."""
            if self.is_initialized:
                self._held = length
                self.keys, self.values = (block[:, :, :length] for block in self._blocks)

        def storage(self, which: int) -> Tensor:
            return self._blocks[which]

    return Preallocated()


def _layer_bytes(layer: Any) -> int:
    if _recurrent(layer):
        states = [*layer.conv_states.values(), *layer.recurrent_states.values()]
        return sum(state.nbytes for state in states if isinstance(state, Tensor))
    return sum(layer.storage(i).nbytes for i in (0, 1)) if layer.is_initialized else 0


# transformers calls attention through a registry of functions; this one remembers the queries of one layer (CMR's
# score)
_WATCH: dict[str, Any] = {"layer": None, "query": None, "range": nullcontext, "fixed": None}


@dataclass(frozen=True)
class _Call:
    """An attention call of a fixed pass: ``query`` [R, Hq, d], ``keys`` and ``values`` [1, capacity, Hkv, d]."""

    query: Tensor
    keys: Tensor
    values: Tensor
    scale: float
    window: int | None

    def again(self, attend: Attend, stop: Tensor) -> Tensor:
        """[R, Hq, dv] over the first ``stop`` entries, or those of the window (the row itself counts as one)."""
        left = None if self.window is None else self.window - 1
        return attend(self.query, self.keys, self.values, None, stop, left=left, right=0, scale=self.scale)[0]


@contextmanager
def _fixed_attention(at: FixedPass, attend: Attend | None, calls: list[_Call] | None = None) -> Iterator[None]:
    """Cache layers lay rows at the pass's places, and attention reads what lies before its stop."""
    _WATCH.update(fixed=at, attend=attend, calls=calls)
    try:
        yield
    finally:
        _WATCH["fixed"] = None


def _mask(*args: Any, **kwargs: Any) -> Tensor | None:
    """No mask for a fixed pass, whose attention has bounds of its own."""
    from transformers.masking_utils import sdpa_mask

    return None if _WATCH["fixed"] is not None else sdpa_mask(*args, **kwargs)


@contextmanager
def around_attention(within: Callable[[], AbstractContextManager[Any]]) -> Iterator[None]:
    """Open ``within()`` around every attention call of such targets: how a profile finds them."""
    _WATCH["range"] = within
    try:
        yield
    finally:
        _WATCH["range"] = nullcontext


def _watched_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **kwargs: Any
) -> Any:
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    scale = kwargs.get("scaling")
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    if getattr(module, "layer_idx", None) == _WATCH["layer"]:
        _WATCH["query"] = (query[0], scale)
    if (fixed := _WATCH["fixed"]) is not None:
        window = kwargs.get("sliding_window")
        rows, keys, values = (x[0].transpose(0, 1) for x in (query, key, value))
        call = _Call(rows, keys[None], values[None], scale, window)
        if (calls := _WATCH["calls"]) is not None:
            calls.append(call)
        return call.again(_WATCH["attend"], fixed.stop)[None], None
    with _WATCH["range"]():
        return sdpa_attention_forward(module, query, key, value, mask, **kwargs)


def _register_attention() -> None:
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(_ATTENTION, _watched_attention)
    AttentionMaskInterface.register(_ATTENTION, _mask)


def _catch(into: dict[int, Tensor], index: int) -> Callable[..., None]:
    def hook(module: Any, inputs: Any, output: Any) -> None:
        into[index] = (output[0] if isinstance(output, tuple) else output)[0]

    return hook


def _decoder_layers(model: Any, count: int) -> Any:
    """The text decoder's layer list, wherever the architecture keeps it."""
    lists = [m for name, m in model.named_modules() if name.endswith("layers") and hasattr(m, "__len__")]
    found = [m for m in lists if len(m) == count]
    if len(found) != 1:
        raise EngineError(
            f"{type(model).__name__}: {len(found)} lists of {count} decoder layers; this target is not known"
        )
    return found[0]


def _last_full_layer(config: Any) -> int | None:
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    full = [i for i, kind in enumerate(kinds) if kind == "full_attention"]
    return full[-1] if full else None
