"""fold: far memory with local order (section 3.3, Eqs. 1-4)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

from methods.reading import (
    Branch,
    LayerGeometry,
    Layers,
    Older,
    ReadPlan,
    Recent,
    RequestGeometry,
    SharedDistance,
    Sliding,
    SlidingGap,
    TrueDistance,
    as_trained,
    check_choice,
    check_count,
)


@dataclass(frozen=True)
class Fold:
    """The window N_p keeps true distances; every older entry shares the virtual position ``t - D``, ``D = W + B``, so
    block row r reads it at ``D + r``, with a softmax sharpened by ``alpha`` and a mass that grows as ``N ** (1 /
    alpha)``.

    ``window``: W in entries. ``alpha``: concentration, at least 1. ``layers``: "all" lets sliding layers read the far
    memory beside their native window. ``far_start`` says where a sliding layer's memory starts when its native window
    ends before D: "literal" at ``p - j >= D`` as F_p is printed (the entries between are read by neither part),
    "native" where its window ends. No entry is ever read twice: a native window wider than D also ends where the memory
    starts.
    """

    name: ClassVar[str] = "fold"
    window: int
    alpha: float = 2.0
    layers: Layers = "all"
    far_start: Literal["literal", "native"] = "literal"

    def __post_init__(self) -> None:
        check_count("method.window", self.window)
        if isinstance(self.alpha, bool) or not isinstance(self.alpha, int | float) or not 1 <= self.alpha < math.inf:
            raise ValueError(f"method.alpha is {self.alpha!r}: the concentration must be a finite number of at least 1")
        check_choice("method.layers", self.layers, ("all", "full_attention"))
        check_choice("method.far_start", self.far_start, ("literal", "native"))

    def plan(self, layer: LayerGeometry, request: RequestGeometry) -> ReadPlan:
        """The plan of one layer for one request."""
        native = layer.native_window
        if native is not None and self.layers == "full_attention":
            return as_trained(layer)
        distance = self.window + request.block
        near = Branch(Recent(self.window) if native is None else Sliding(native), TrueDistance(), block=True)
        from_native = native is not None and (self.far_start == "native" or native > distance)
        older = SlidingGap(native) if native is not None and from_native else Older(self.window)
        return ReadPlan((near, Branch(older, SharedDistance(distance, follows_block=True), sharpen=self.alpha)))
