"""rerope: the window at true distances, everything older at one distance, one softmax (Su, 2023; Appendix B.3)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from methods.reading import (
    Branch,
    LayerGeometry,
    Layers,
    LogQueryScale,
    Older,
    ReadPlan,
    Recent,
    RequestGeometry,
    SharedDistance,
    Sliding,
    SlidingGap,
    TrueDistance,
    check_count,
    check_switch,
)


@dataclass(frozen=True)
class ReRoPE:
    """Entries outside the window N_p are read at distance ``D = W + B`` by every block position, and every query of
    every layer is scaled by ``max(1, log(p + 1) / log(reference))``.

    ``window``: W in entries. ``reference``: 4096 for every model. ``log_scale=False`` drops the query factor. All
    layers: a sliding layer keeps its native window and reads all older entries at D. Source: bojone/rerope
    rerope_patch.py.
    """

    name: ClassVar[str] = "rerope"
    layers: ClassVar[Layers] = "all"
    window: int
    reference: int = 4096
    log_scale: bool = True

    def __post_init__(self) -> None:
        check_count("method.window", self.window)
        check_count("method.reference", self.reference, least=2)
        check_switch("method.log_scale", self.log_scale)

    def plan(self, layer: LayerGeometry, request: RequestGeometry) -> ReadPlan:
        """The plan of one layer for one request."""
        native = layer.native_window
        far = SharedDistance(self.window + request.block, follows_block=False)
        near = Branch(Recent(self.window) if native is None else Sliding(native), TrueDistance(), block=True)
        older = Branch(Older(self.window) if native is None else SlidingGap(native), far)
        return ReadPlan((near, older), query_scale=LogQueryScale(self.reference) if self.log_scale else None)
