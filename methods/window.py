"""window: FOLD without its far memory (Appendix B.3, the ablation of Table 4)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from methods.reading import (
    Branch,
    LayerGeometry,
    Layers,
    ReadPlan,
    Recent,
    RequestGeometry,
    Sliding,
    TrueDistance,
    as_trained,
    check_choice,
    check_count,
)


@dataclass(frozen=True)
class Window:
    """Only the window N_p: context entries with ``p - j < D``, ``D = W + B``, and the block.

    ``window``: W in entries. ``layers``: Table 4 restricts the full-attention layers alone; "all" also cuts sliding
    layers to the smaller of the two windows.
    """

    name: ClassVar[str] = "window"
    window: int
    layers: Layers = "full_attention"

    def __post_init__(self) -> None:
        check_count("method.window", self.window)
        check_choice("method.layers", self.layers, ("all", "full_attention"))

    def plan(self, layer: LayerGeometry, request: RequestGeometry) -> ReadPlan:
        """The plan of one layer for one request."""
        if layer.native_window is None:
            return ReadPlan((Branch(Recent(self.window), TrueDistance(), block=True),))
        if self.layers == "full_attention":
            return as_trained(layer)
        narrower = min(layer.native_window, self.window + request.block)
        return ReadPlan((Branch(Sliding(narrower), TrueDistance(), block=True),))
