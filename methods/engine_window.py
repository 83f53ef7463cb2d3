"""engine_window: the draft window built into SGLang (Appendix C.3, "SGLang window")."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from methods.reading import (
    Branch,
    Last,
    LayerGeometry,
    Layers,
    ReadPlan,
    RequestGeometry,
    TrueDistance,
    as_trained,
    check_count,
)


@dataclass(frozen=True)
class EngineWindow:
    """Every block position reads the same last ``window`` entries at true distances.

    Not :class:`methods.window.Window`, whose bound is per position: the two agree only at the last one. A sliding layer
    with a window no wider than this one is not affected. Source: sglang ``--speculative-draft-window-size``.
    """

    name: ClassVar[str] = "engine_window"
    layers: ClassVar[Layers] = "all"
    window: int

    def __post_init__(self) -> None:
        check_count("method.window", self.window)

    def plan(self, layer: LayerGeometry, request: RequestGeometry) -> ReadPlan:
        """The plan of one layer for one request."""
        native = layer.native_window
        if native is not None and native <= self.window:
            return as_trained(layer)
        if native is not None and native < self.window + request.block:
            raise ValueError(
                f"method.window is {self.window}: a sliding layer of {native} entries would cut it for some block "
                f"positions only; use {native} or more, or at most {native - request.block}"
            )
        return ReadPlan((Branch(Last(self.window), TrueDistance(), block=True),))
