"""original: the drafter as released (section 3.1), printed under the drafter's own name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from methods.reading import LayerGeometry, Layers, ReadPlan, RequestGeometry, as_trained


@dataclass(frozen=True)
class Original:
    """Every context entry at its true distance; sliding layers keep their own window."""

    name: ClassVar[str] = "original"
    layers: ClassVar[Layers] = "all"

    def plan(self, layer: LayerGeometry, request: RequestGeometry) -> ReadPlan:
        """The plan of one layer for one request."""
        return as_trained(layer)
