"""Engines that decode requests: the reference engine in torch, and stock serving engines with a plugin."""

from __future__ import annotations

from typing import TYPE_CHECKING

from harness.engines.base import Engine, EngineError

if TYPE_CHECKING:
    from harness.config import RunConfig

__all__ = ["Engine", "EngineError", "open_engine"]


def open_engine(config: RunConfig) -> Engine:
    """Open the engine that ``config.engine`` names for its target and drafter, whose sources are local folders or Hub
    ids.

    Raises EngineError, one line, for what cannot run here.
    """
    if config.engine.name == "reference":
        from harness.engines.reference import open_reference

        return open_reference(config)
    raise EngineError(
        f"engine {config.engine.name} is not part of this version; use engine=reference, which runs every method"
    )
