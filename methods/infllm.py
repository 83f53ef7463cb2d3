"""infllm: blocks of distant context retrieved by their representative keys (Xiao et al., 2024a; Appendix B.3)."""

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
    Recent,
    RequestGeometry,
    Retrieved,
    SharedDistance,
    TrueDistance,
    as_trained,
    check_count,
    check_switch,
)
from methods.rope import compute_dtype, rotate


@dataclass(frozen=True)
class InfLLM:
    """The window N_p at true distances; initial entries, the ``topk`` best blocks and the entries not yet grouped into
    one at the largest local distance ``D - 1``; one softmax.

    ``window``: W in entries. ``block``, ``initial``: entries of a block and of the kept beginning. ``representative``:
    entries whose mean key stands for a block. ``rotate_query``: select with the query turned to D - 1, as it reads the
    blocks (the official code). Scores are summed over heads, one selection per layer and round. Full-attention layers
    only. Source: thunlp/InfLLM context_manager.py, with disjoint sets (its exec blocks read boundary keys twice).
    """

    name: ClassVar[str] = "infllm"
    layers: ClassVar[Layers] = "full_attention"
    window: int
    block: int = 128
    initial: int = 128
    topk: int = 16
    representative: int = 4
    rotate_query: bool = True

    def __post_init__(self) -> None:
        for option in ("window", "block", "topk", "representative"):
            check_count(f"method.{option}", getattr(self, option))
        check_count("method.initial", self.initial, least=0)
        check_switch("method.rotate_query", self.rotate_query)

    def plan(self, layer: LayerGeometry, request: RequestGeometry) -> ReadPlan:
        """The plan of one layer for one request."""
        if layer.native_window is not None:
            return as_trained(layer)
        distance = self.window + request.block
        near = Branch(Recent(self.window), TrueDistance(), block=True)
        far = Branch(Retrieved(beyond=distance), SharedDistance(distance - 1, follows_block=False))
        return ReadPlan((near, far))

    def new_state(self, geometry: DrafterGeometry, cache: ContextCache, request: RequestGeometry) -> InfLLMState:
        """Blocks and representations of one request."""
        return InfLLMState(self, geometry, cache, request)


class InfLLMState:
    """Blocks, their representations and the attention that entries received while inside the window.

    Implements :class:`methods.reading.RetrievalState`. An entry has left the window for good once no later row can
    reach it: ``N - D`` of them have. A block is made of entries that left, and its representation never changes
    afterwards.
    """

    observes = True

    def __init__(self, method: InfLLM, geometry: DrafterGeometry, cache: ContextCache, request: RequestGeometry):
        self.method = method
        self.geometry = geometry
        self.cache = cache
        self.distance = method.window + geometry.block
        self.length = 0
        self.blocks = 0
        exact = compute_dtype(cache.keys.dtype)
        # Sliding layers do not retrieve, so nothing is held for them.
        self.layers = [index for index, layer in enumerate(geometry.layers) if layer.native_window is None]
        layers, heads = len(self.layers), geometry.q_heads
        most = max(0, cache.capacity - self.distance - method.initial) // method.block
        self.keys = torch.zeros(layers, most, heads, geometry.head_dim, dtype=exact, device=cache.keys.device)
        # Attention received so far, of the entries from `watched` on: older ones were outside the window from the
        # start.
        self.watched = 0
        self.received = torch.empty(layers, heads, 0, dtype=exact, device=cache.keys.device)

    def prepare(self) -> None:
        """After prefill: group what lies outside the window; none of it was ever inside, so means stand for the
        blocks.
        """
        self.watched = max(0, self.cache.length - self.distance)
        shape = (*self.received.shape[:2], self.cache.capacity - self.watched)
        self.received = torch.zeros(shape, dtype=self.received.dtype, device=self.received.device)
        self.committed(self.cache.length)

    def committed(self, length: int) -> None:
        """The context grew to ``length``: group whole blocks of entries that left the window."""
        self.length = length
        grouped = max(0, length - self.distance - self.method.initial) // self.method.block
        for block in range(self.blocks, grouped):
            self.keys[:, block] = self._representation(self._start(block))
        self.blocks = grouped

    def wants_target_attention(self) -> bool:
        """InfLLM scores with the drafter's own attention."""
        return False

    def target_attention(self, weights: Tensor) -> None:
        """Never asked for."""
        raise RuntimeError("infllm does not use the target's attention")

    def positions(self, layer: int, q: Tensor) -> Tensor:
        """Ascending context positions read at D - 1 by this layer: initial, the blocks selected by ``q [B, Hq, d]``,
        ungrouped.

        The ungrouped tail runs to the end of the context; each row takes from it what is beyond its own window.
        """
        device = self.cache.keys.device
        left = max(0, self.length - self.distance)
        initial = min(self.method.initial, left)
        starts = torch.tensor([self._start(b) for b in self.select(layer, q)], dtype=torch.long, device=device)
        inside = (starts[:, None] + torch.arange(self.method.block, device=device)).flatten()
        tail = torch.arange(initial + self.blocks * self.method.block, self.length, device=device)
        return torch.cat((torch.arange(initial, device=device), inside, tail))

    def select(self, layer: int, q: Tensor) -> list[int]:
        """The ``topk`` blocks whose representations have the largest inner product with the mean query, ascending."""
        if self.blocks <= self.method.topk:
            return list(range(self.blocks))
        query = q.to(self.keys.dtype)
        if self.method.rotate_query:
            query = rotate(query, [self.distance - 1] * q.shape[0], self.geometry.rope)
        scores = self.keys[self.layers.index(layer), : self.blocks].flatten(1) @ query.mean(0).flatten()
        return sorted(torch.sort(scores, descending=True, stable=True).indices[: self.method.topk].tolist())

    def observe(self, layer: int, first: int, weights: Tensor) -> None:
        """Add the attention ``weights [Hq, n]`` that entries ``first..first+n-1`` received inside the window this
        round, summed over the block's rows. Every round counts, whatever the target accepts of it."""
        skipped = max(0, self.watched - first)
        start = first + skipped - self.watched
        self.received[self.layers.index(layer), :, start : start + weights.shape[1] - skipped] += weights[:, skipped:]

    def nbytes(self) -> int:
        """Bytes of representations and received attention."""
        return self.keys.nbytes + self.received.nbytes

    def activity(self) -> dict[str, int]:
        """How many blocks the context holds."""
        return {"blocks": self.blocks}

    def _start(self, block: int) -> int:
        return self.method.initial + block * self.method.block

    def _representation(self, start: int) -> Tensor:
        """``[L, Hq, d]``: mean key of the entries that received most attention; of all entries for a head that gave
        none.
        """
        end = start + self.method.block
        group = self.geometry.q_heads // self.geometry.kv_heads
        keys = self.cache.keys[self.layers, :, start:end].to(self.keys.dtype).repeat_interleave(group, 1)
        got = torch.zeros(keys.shape[:3], dtype=keys.dtype, device=keys.device)
        if end > self.watched:
            inside = max(0, self.watched - start)
            got[:, :, inside:] = self.received[:, :, start + inside - self.watched : end - self.watched]
        best = torch.sort(got, dim=-1, descending=True, stable=True).indices[..., : self.method.representative]
        mean_of_best = keys.gather(2, best[..., None].expand(-1, -1, -1, keys.shape[-1])).mean(2)
        return torch.where(got.sum(-1, keepdim=True) > 0, mean_of_best, keys.mean(2))
