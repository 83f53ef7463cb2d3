"""streamingllm: attention sinks and a recent window, renumbered (Xiao et al., 2024b; Appendix B.3)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from methods.reading import (
    Branch,
    Kept,
    LayerGeometry,
    Layers,
    ReadPlan,
    Renumbered,
    RequestGeometry,
    as_trained,
    check_count,
)


@dataclass(frozen=True)
class StreamingLLM:
    """The first ``sinks`` and the last ``recent`` context entries sit at 0, 1, 2, ... and the block follows them.

    Every block position reads the same set, and the block takes no room from it. Full-attention layers only: sliding
    layers never exceed their trained distances. Source: mit-han-lab/streaming-llm kv_cache.py, modify_llama.py
    (positions are cache indices, applied when a key is read).
    """

    name: ClassVar[str] = "streamingllm"
    layers: ClassVar[Layers] = "full_attention"
    sinks: int = 4
    recent: int = 2044

    def __post_init__(self) -> None:
        check_count("method.sinks", self.sinks, least=0)
        check_count("method.recent", self.recent)

    def plan(self, layer: LayerGeometry, request: RequestGeometry) -> ReadPlan:
        """The plan of one layer for one request."""
        if layer.native_window is not None:
            return as_trained(layer)
        return ReadPlan((Branch(Kept(self.sinks, self.recent), Renumbered(), block=True),))
