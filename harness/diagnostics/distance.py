"""Finding 1, the distance control: the draft block moved away from a context that stays as it is (Appendix A).

"At each position, we shift the position IDs of the entire draft block forward [...] while leaving those of the
committed entries unchanged": the distance to every context entry grows by the shift, content and distances inside the
block do not change. Which entries a sliding layer reads does not change either, since that is no matter of content.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from harness.diagnostics.states import States
from methods.cache import ContextCache, DrafterGeometry
from methods.original import Original
from methods.reader import DenseReader
from methods.reading import RequestGeometry
from methods.rope import compute_dtype, rotate


class ShiftedReader(DenseReader):
    """The drafter's own read, densely, with block queries and block keys ``shift`` positions further on."""

    def __init__(self, geometry: DrafterGeometry, request: RequestGeometry, cache: ContextCache, shift: int) -> None:
        super().__init__(Original(), geometry, request, cache)
        self.shift = shift
        self.prepare()

    def read(self, layer: int, q: Tensor, kb: Tensor, vb: Tensor) -> Tensor:
        """``q [B, Hq, d]``, ``kb [B, Hkv, d]``, ``vb [B, Hkv, dv]`` not rotated; returns ``[B, Hq, dv]``."""
        exact, shape, rope = compute_dtype(q.dtype), self.geometry.layers[layer], self.geometry.rope
        length, rows = self.length, q.shape[0]
        context = torch.arange(length, device=q.device)
        block = length + torch.arange(rows, device=q.device)
        keys = self.cache.keys[layer, :, :length].transpose(0, 1).to(exact)
        keys = torch.cat((rotate(keys, context, rope), rotate(kb.to(exact), block + self.shift, rope)))
        values = torch.cat((self.cache.values[layer, :, :length].transpose(0, 1), vb)).to(exact)
        query = rotate(q.to(exact), block + self.shift, rope).unflatten(1, (kb.shape[1], -1))

        hidden = torch.zeros(rows, length + rows, dtype=torch.bool, device=q.device)
        if shape.native_window is not None:
            hidden[:, :length] = block[:, None] - context >= shape.native_window
        if shape.block_causal:
            hidden[:, length:] = torch.ones(rows, rows, dtype=torch.bool, device=q.device).triu(1)
        logits = torch.einsum("bkgd,nkd->bkgn", query, keys) * self.geometry.scale
        weights = torch.softmax(logits.masked_fill(hidden[:, None, None], float("-inf")), -1)
        return torch.einsum("bkgn,nkd->bkgd", weights, values).flatten(1, 2).to(q.dtype)


@torch.inference_mode()
def distance(states: States, shifts: Sequence[int], positions: int = 2) -> list[dict[str, Any]]:
    """One row per shift, 0 first: arm ("+0", "+8192"), shift, positions, fraction.

    fraction: a = min(L, K) / K with L leading matches of K drafts, averaged over ``positions`` places of the
    continuation, evenly spread (the paper: two; it does not say which). Empty if the continuation is too short.
    """
    offsets, drafter = states.offsets(), states.pair.drafter
    places = sorted({int((2 * i + 1) * len(offsets) / (2 * positions)) for i in range(positions)}) if offsets else []
    found: dict[int, list[float]] = {shift: [] for shift in [0, *(s for s in shifts if s)]}
    for place in places:
        states.commit(place)
        for shift, fractions in found.items():
            reader = ShiftedReader(states.cache.geometry, states.geometry, states.cache, shift)
            drafts = drafter.draft(states.continuation[place], reader).tokens
            fractions.append(states.matches(drafts, place) / len(drafts))
    return [
        {"arm": f"+{shift}", "shift": shift, "positions": len(fractions), "fraction": sum(fractions) / len(fractions)}
        for shift, fractions in found.items()
        if fractions
    ]
