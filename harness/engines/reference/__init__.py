"""The reference engine, opened from a configuration."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from harness.drafters import DrafterError, load_drafter
from harness.engines.base import EngineError, EngineInfo
from harness.engines.reference.engine import ReferenceEngine
from harness.engines.reference.target import open_target
from harness.provenance import cpu_uuid, gpus

if TYPE_CHECKING:
    from harness.config import EngineConfig, RunConfig


def open_reference(config: RunConfig) -> ReferenceEngine:
    """Load the pair and fix threads, device and dtype. Raises EngineError, one line."""
    engine = config.engine
    if engine.threads is not None:
        torch.set_num_threads(engine.threads)
    device, uuid = _device(engine.device)
    dtype = _dtype(engine.dtype, device)
    try:
        drafter = load_drafter(
            config.drafter.folder_or_id,
            revision=config.drafter.revision,
            block=config.drafter.block,
            dtype=dtype,
            device=device,
        )
    except DrafterError as error:
        raise EngineError(f"drafter {config.drafter.name}: {error}") from None
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
        device_uuid=uuid,
        dtype=str(dtype).removeprefix("torch."),
        settings=_settings(engine, device, dtype),
        drafter={
            "source": config.drafter.source,
            "block": drafter.config.block,
            "proposals": drafter.config.proposals,
            "layers": len(drafter.config.layers),
            "dtype": str(dtype).removeprefix("torch."),
        },
    )
    return ReferenceEngine(target, drafter, prefill_chunk=engine.prefill_chunk, info=info)


def _device(name: str) -> tuple[torch.device, str]:
    """The device and its stable id; ``auto`` is a GPU if torch sees one."""
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu"), cpu_uuid()
    if not torch.cuda.is_available():
        raise EngineError("engine.device=cuda: torch sees no GPU on this machine; use engine.device=cpu")
    torch.cuda.init()
    uuid = str(getattr(torch.cuda.get_device_properties(0), "uuid", ""))
    known = [gpu.get("uuid", "") for gpu in gpus()]
    return torch.device("cuda", 0), next((full for full in known if uuid and uuid in full), uuid or "cuda:0")


def _dtype(name: str, device: torch.device) -> torch.dtype:
    """``auto`` is bfloat16 where the device multiplies in it, else float32."""
    if name != "auto":
        return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[name]
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16
    native = getattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)()
    return torch.bfloat16 if native or _arm_bf16() else torch.float32


def _arm_bf16() -> bool:
    try:
        with open("/proc/cpuinfo") as file:
            return os.uname().machine == "aarch64" and " bf16" in file.read()
    except OSError:
        return False


def _settings(engine: EngineConfig, device: torch.device, dtype: torch.dtype) -> dict[str, object]:
    """What every arm of a run shares."""
    return {
        "batch_size": 1,
        "dtype": str(dtype).removeprefix("torch."),
        "prefill_chunk": engine.prefill_chunk,
        "threads": torch.get_num_threads() if device.type == "cpu" else None,
        "sampling": "greedy",
        "prefix_caching": False,
    }
