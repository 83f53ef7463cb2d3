"""A target model as the reference engine needs it: prefill in chunks, decode a few rows, take some of them back."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from harness.engines.base import EngineError

if TYPE_CHECKING:
    from harness.engines.reference.fixed import Fixed, FixedPass
    from methods.paged import Attend


@dataclass(frozen=True)
class Step:
    """What one forward pass gives back.

    logits: [R, vocab] for the R rows fed, or [1, vocab] for the last one. features: [R, F * hidden], the outputs of
    the F tapped decoder layers side by side (``hidden_states[id + 1]`` in ``transformers``' counting), or None.
    """

    logits: Tensor
    features: Tensor | None


class Target(Protocol):
    """One sequence in a preallocated cache. Positions run from 0; ``length`` counts the entries held."""

    length: int
    layers: int
    max_positions: int
    vocab: int
    dtype: torch.dtype
    device: torch.device
    embedding: Tensor  # [vocab, hidden]
    head: Callable[[Tensor], Tensor]  # [R, hidden] -> [R, vocab]

    def reserve(self, capacity: int) -> None:
        """Empty the cache and make room for ``capacity`` positions."""

    def forward(self, ids: Sequence[int], *, taps: Sequence[int] = (), last_only: bool = False) -> Step:
        """Append ``ids`` after ``length`` and return their logits and the outputs of the decoder layers ``taps``."""

    def truncate(self, length: int) -> None:
        """Keep the first ``length`` positions; only rows of the latest forward pass may be dropped."""

    def mark(self) -> None:
        """Remember the present state (the end of the prompt)."""

    def rewind(self) -> None:
        """Return to the marked state."""

    def attention_of(self, row: int) -> Tensor:
        """Head-averaged attention weights [position + 1] float32 of a row of the latest pass in the last full layer."""

    def nbytes(self) -> dict[str, int]:
        """Bytes held: weights and cache."""

    def fix(self, rows: Collection[int], attend: Attend) -> None:
        """From now on passes of so many rows run as fixed steps (``harness.engines.reference.fixed``), replayed as
        CUDA graphs on a GPU, where this target can; ``attend`` reads the cache in them."""

    def has_fixed(self, rows: int) -> bool:
        """Whether passes of so many rows are fixed steps."""

    def fixed_pass(self, rows: int, taps: Sequence[int]) -> FixedPass:
        """The fixed step of so many rows."""

    def attention_alone(self, rows: int) -> Fixed[Tensor]:
        """All layers' attention of a fixed pass and nothing else, for timing."""

    def pretend(self, length: int) -> None:
        """Hold ``length`` entries of random keys and values: for timing, which depends on shapes alone."""

    def read_bytes(self, length: int) -> dict[str, int]:
        """Bytes that a pass over few rows must read behind ``length`` entries: "weights" (of the embedding table only
        what is also the head) and "attention" (keys and values that some row sees)."""


def open_target(folder: Path, dtype: torch.dtype, device: torch.device) -> Target:
    """Load the target in ``folder``: lean for Llama and Qwen3, ``transformers``' own modules otherwise."""
    from transformers import AutoConfig

    from harness.engines.reference.dense import CheckpointTensors, DenseTarget
    from harness.engines.reference.hf import TransformersTarget, load_model

    try:
        config = AutoConfig.from_pretrained(folder)
    except (OSError, ValueError) as error:
        first = str(error).splitlines()[0]
        raise EngineError(
            f"target {folder}: no usable config.json ({first}); give a folder saved by transformers"
        ) from None
    if DenseTarget.supports(config):
        return DenseTarget(CheckpointTensors(folder, dtype, device), config, dtype, device)
    return TransformersTarget(load_model(folder, dtype), dtype, device)


def random_target(architecture: Mapping[str, Any], dtype: torch.dtype, device: torch.device, seed: int = 0) -> Target:
    """A target of the shapes in ``architecture`` (``config.json``'s keys, ``model_type`` among them) with random
    weights. Raises EngineError for shapes that ``transformers`` does not know.
    """
    from harness.engines.reference.dense import DenseTarget, RandomTensors

    shapes = dict(architecture)
    plain = SimpleNamespace(**{"hidden_act": "silu", **shapes})  # what the lean path asks of a configuration
    if "model_type" in shapes and DenseTarget.supports(plain):
        return DenseTarget(RandomTensors(dtype, device, seed), plain, dtype, device)
    try:
        from transformers import AutoConfig
    except ImportError:
        raise EngineError(f"a {shapes.get('model_type')} target needs transformers, which is not installed") from None
    from harness.engines.reference.hf import TransformersTarget, random_model

    try:
        config = AutoConfig.for_model(shapes.pop("model_type", ""), **shapes)
    except (TypeError, ValueError) as error:
        first = str(error).strip().splitlines()[0]
        raise EngineError(f"target.architecture describes no model that transformers knows ({first})") from None
    return TransformersTarget(random_model(config, dtype, device, seed), dtype, device)
