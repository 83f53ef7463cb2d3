"""Drafters: DFlash (z-lab and DeepSpec) and DSpark, loaded from a folder or the Hub into plain torch.

    drafter = load_drafter("z-lab/...", revision="...", dtype=torch.bfloat16, device="cpu")
    drafter.bind(target_embedding, target_head)
    keys, values = drafter.context_kv(features)      # once for each committed position
    proposal = drafter.draft(anchor, reader)         # once a round
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from harness.drafters.checkpoint import fetch, open_weights, random_tensor, random_tensors, read_config, save_drafter
from harness.drafters.config import DrafterConfig, as_json, build_target_layer_ids, parse_config, tensor_shapes
from harness.drafters.drafter import Drafter, Proposal, features_from_hidden_states
from harness.drafters.errors import DrafterError

__all__ = [
    "Drafter",
    "DrafterConfig",
    "DrafterError",
    "Proposal",
    "as_json",
    "build_target_layer_ids",
    "features_from_hidden_states",
    "load_drafter",
    "parse_config",
    "random_drafter",
    "random_tensors",
    "read_config",
    "save_drafter",
    "tensor_shapes",
]


def load_drafter(
    source: str | Path,
    *,
    revision: str | None = None,
    block: int | None = None,
    dtype: torch.dtype,
    device: torch.device | str,
    offline: bool = False,
) -> Drafter:
    """Load a drafter from a local folder or a Hub id, of whichever format its ``config.json`` names.

    ``revision`` pins a Hub repository (ignored for a folder); ``block``, if given, must be the checkpoint's block size.
    Weights are converted to ``dtype`` on ``device``. Raises ``DrafterError``, always one line, for anything that is
    missing, unexpected, misshapen, contradictory or pickled.
    """
    config = read_config(source, revision=revision, block=block, offline=offline)
    with open_weights(fetch(source, revision=revision, offline=offline), config) as take:
        return Drafter(config, take, dtype=dtype, device=device)


def random_drafter(config: DrafterConfig, *, dtype: torch.dtype, device: torch.device | str, seed: int = 0) -> Drafter:
    """A drafter of ``config`` with random weights: for tests and for timing without a checkpoint."""
    shapes = tensor_shapes(config)

    def take(name: str) -> Tensor | None:
        return random_tensor(name, shapes[name], seed, device) if name in shapes else None

    return Drafter(config, take, dtype=dtype, device=device)
