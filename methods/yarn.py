"""yarn: the whole context under YaRN frequencies (Peng et al., 2024; Appendix B.3)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from methods.reading import (
    LayerGeometry,
    Layers,
    ReadPlan,
    RequestGeometry,
    YarnScaling,
    as_trained,
    check_count,
    check_switch,
)
from methods.rope import yarn_factor


@dataclass(frozen=True)
class Yarn:
    """Every entry at its true distance, frequencies scaled by one factor per request,
    ``max(1, ceil((P + G + Q) / 256) * 256 / reference)``.

    ``reference``: the length R the drafter was trained for, also YaRN's original length in the ramp. ``temperature``:
    multiply cos and sin by ``0.1 ln(factor) + 1``; the paper does not mention it, YaRN and vLLM do it. Full-attention
    layers only. A request of factor 1 is not scaled, so it reads as the original does, whatever scaling the checkpoint
    carries.
    """

    name: ClassVar[str] = "yarn"
    layers: ClassVar[Layers] = "full_attention"
    reference: int
    temperature: bool = True

    def __post_init__(self) -> None:
        check_count("method.reference", self.reference)
        check_switch("method.temperature", self.temperature)

    def plan(self, layer: LayerGeometry, request: RequestGeometry) -> ReadPlan:
        """The plan of one layer for one request."""
        factor = yarn_factor(request.prompt, request.limit, request.block, self.reference)
        if layer.native_window is not None or factor == 1.0:
            return as_trained(layer)
        return replace(as_trained(layer), rope=YarnScaling(factor, self.reference, self.temperature))
