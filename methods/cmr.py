"""cmr: cross-model retrieval, chunks that the target attends to (SpecExtend, Cha et al., 2026; Appendix B.3)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from methods.cache import ContextCache, DrafterGeometry
from methods.reading import (
    Branch,
    LayerGeometry,
    Layers,
    ReadPlan,
    Renumbered,
    RequestGeometry,
    Retrieved,
    check_count,
)


@dataclass(frozen=True)
class CMR:
    """Every layer reads the ``topk`` chunks of ``chunk`` entries with the highest mean target attention, renumbered.

    The first draft reads the most recent chunks. Draft ``first_refresh`` and every ``refresh``-th after it read a new
    selection, made from the attention of position t - 1 in the preceding verification (the official code: drafts 1, 9,
    17, ...). Source: jycha98/SpecExtend cnets.py, without its four defects: a selected chunk always ends where the
    context or the chunk does, nothing survives a request, sums are float32, and chunks are summed one by one.
    """

    name: ClassVar[str] = "cmr"
    layers: ClassVar[Layers] = "all"
    chunk: int = 32
    topk: int = 64
    refresh: int = 8
    first_refresh: int = 1

    def __post_init__(self) -> None:
        for option in ("chunk", "topk", "refresh", "first_refresh"):
            check_count(f"method.{option}", getattr(self, option))

    def plan(self, layer: LayerGeometry, request: RequestGeometry) -> ReadPlan:
        """The plan of one layer for one request."""
        return ReadPlan((Branch(Retrieved(), Renumbered(), block=True),))

    def new_state(self, geometry: DrafterGeometry, cache: ContextCache, request: RequestGeometry) -> CMRState:
        """The selection of one request."""
        return CMRState(self, cache)


class CMRState:
    """Which chunks are selected, round by round. Implements :class:`methods.reading.RetrievalState`."""

    observes = False

    def __init__(self, method: CMR, cache: ContextCache):
        self.method = method
        self.cache = cache
        self.length = 0
        self.draft = 0  # the next draft block of the request, counted from 0
        self.chunks: list[int] = []
        self.started: list[int] = []  # chunks that the last commit started
        self.owed = False  # a refresh whose target attention has not arrived
        self.refreshes = 0
        self.selected = torch.empty(0, dtype=torch.long)

    def prepare(self) -> None:
        """After prefill: the most recent chunks."""
        self.length = self.cache.length
        count = self._chunks_of(self.length)
        self.chunks = list(range(max(0, count - self.method.topk), count))
        self._select()

    def wants_target_attention(self) -> bool:
        """True if the draft after the coming verification reads a new selection."""
        since = self.draft + 1 - self.method.first_refresh
        return since >= 0 and since % self.method.refresh == 0

    def committed(self, length: int) -> None:
        """The context grew to ``length``: a chunk it starts joins the selection, a selected chunk grows with it."""
        self.owed = self.wants_target_attention()
        self.draft += 1
        self.started = list(range(self._chunks_of(self.length), self._chunks_of(length)))
        self.length = length
        self.chunks += self.started
        self._select()

    def target_attention(self, weights: Tensor) -> None:
        """Select anew by ``weights [N]``: attention of position t - 1 over the context, mean over heads, last full
        layer.
        """
        if weights.shape != (self.length,):
            raise ValueError(f"cmr wants target attention over {self.length} entries, got shape {tuple(weights.shape)}")
        size = self.method.chunk
        padded = torch.zeros(self._chunks_of(self.length) * size, dtype=torch.float32)
        padded[: self.length] = weights.to(device="cpu", dtype=torch.float32)
        sizes = torch.full((len(padded) // size,), float(size))
        sizes[-1] = self.length - size * (len(sizes) - 1)  # a short last chunk is averaged over its own length
        means = padded.view(-1, size).sum(1) / sizes
        best = torch.sort(means, descending=True, stable=True).indices[: self.method.topk]
        self.chunks = sorted({*best.tolist(), *self.started})
        self.owed = False
        self.refreshes += 1
        self._select()

    def positions(self, layer: int, q: Tensor) -> Tensor:
        """Ascending context positions that every layer reads."""
        if self.owed:
            raise RuntimeError("cmr refreshes its selection this round: call target_attention before reading")
        return self.selected

    def observe(self, layer: int, first: int, weights: Tensor) -> None:
        """CMR scores on the target's side; the drafter's weights are not used."""

    def nbytes(self) -> int:
        """Bytes of the position list."""
        return self.selected.nbytes

    def activity(self) -> dict[str, int]:
        """How often the selection was made anew, and how large it is."""
        return {"refreshes": self.refreshes, "selected_chunks": len(self.chunks)}

    def _chunks_of(self, length: int) -> int:
        return -(-length // self.method.chunk)

    def _select(self) -> None:
        starts = torch.tensor(self.chunks, dtype=torch.long)[:, None] * self.method.chunk
        inside = (starts + torch.arange(self.method.chunk)).flatten()
        self.selected = inside[inside < self.length].to(self.cache.keys.device)
