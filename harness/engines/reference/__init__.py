"""The reference engine, opened from a configuration."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from harness.drafters import DrafterError, load_drafter, parse_config, random_drafter
from harness.engines.base import EngineError, EngineInfo
from harness.engines.device import device_uuid, pick_device, pick_dtype
from harness.engines.reference.engine import ReferenceEngine
from harness.engines.reference.fixed import triton_executors
from harness.engines.reference.target import open_target, random_target
from harness.synthetic import RANDOM, SEED

if TYPE_CHECKING:
    from harness.config import EngineConfig, RunConfig


def open_reference(config: RunConfig) -> ReferenceEngine:
    """Load the pair and fix threads, device and dtype. Raises EngineError, one line."""
    engine = config.engine
    if engine.threads is not None:
        torch.set_num_threads(engine.threads)
    device = pick_device(engine.device)
    dtype = pick_dtype(engine.dtype, device)
    synthetic = config.weights == RANDOM
    try:
        if synthetic:
            shapes = parse_config(config.drafter.architecture, where="drafter.architecture", block=config.drafter.block)
            drafter = random_drafter(shapes, dtype=dtype, device=device, seed=SEED)
        else:
            drafter = load_drafter(
                config.drafter.folder_or_id,
                revision=config.drafter.revision,
                block=config.drafter.block,
                dtype=dtype,
                device=device,
            )
    except DrafterError as error:
        raise EngineError(f"drafter {config.drafter.name}: {error}") from None
    if synthetic:
        target = random_target(config.target.architecture, dtype, device, SEED)
    else:
        target = open_target(Path(config.target.source), dtype, device)
    try:
        drafter.config.check_target(target.layers, target.embedding.shape[1], target.vocab)
    except DrafterError as error:
        names = f"drafter {config.drafter.name} and target {config.target.name}"
        raise EngineError(f"{names} are no pair: {error}") from None
    info = EngineInfo(
        name="reference",
        version=f"torch {torch.__version__}",
        device=str(device),
        device_uuid=device_uuid(device),
        dtype=str(dtype).removeprefix("torch."),
        settings={**_settings(engine, device, dtype), "weights": config.weights},
        drafter={
            "source": "random weights" if synthetic else config.drafter.source,
            "block": drafter.config.block,
            "proposals": drafter.config.proposals,
            "layers": len(drafter.config.layers),
            "dtype": str(dtype).removeprefix("torch."),
        },
    )
    graphs = engine.graphs and device.type == "cuda"
    executors = triton_executors(target.max_positions) if graphs else None
    return ReferenceEngine(target, drafter, prefill_chunk=engine.prefill_chunk, info=info, executors=executors)


def _settings(engine: EngineConfig, device: torch.device, dtype: torch.dtype) -> dict[str, object]:
    """What every arm of a run shares."""
    return {
        "batch_size": 1,
        "dtype": str(dtype).removeprefix("torch."),
        "prefill_chunk": engine.prefill_chunk,
        "threads": torch.get_num_threads() if device.type == "cpu" else None,
        "sampling": "greedy",
        "graphs": engine.graphs and device.type == "cuda",
        "prefix_caching": False,
    }
