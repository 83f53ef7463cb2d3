"""Which device and dtype an engine runs on, and the device's stable id for records."""

from __future__ import annotations

import os

import torch

from harness.engines.base import EngineError
from harness.provenance import cpu_uuid, gpus


def pick_device(name: str) -> torch.device:
    """The device for ``engine.device``; ``auto`` is a GPU if torch sees one. Raises EngineError for a GPU without."""
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise EngineError("engine.device=cuda: torch sees no GPU on this machine; use engine.device=cpu")
    return torch.device("cuda", 0)


def device_uuid(device: torch.device) -> str:
    """The id by which records are paired: nvidia-smi's uuid of a GPU, or of this machine's CPU."""
    if device.type == "cpu":
        return cpu_uuid()
    torch.cuda.init()
    uuid = str(getattr(torch.cuda.get_device_properties(0), "uuid", ""))
    known = [gpu.get("uuid", "") for gpu in gpus()]
    return next((full for full in known if uuid and uuid in full), uuid or "cuda:0")


def pick_dtype(name: str, device: torch.device) -> torch.dtype:
    """The dtype for ``engine.dtype``; ``auto`` is bfloat16 where the device multiplies in it, else float32."""
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
