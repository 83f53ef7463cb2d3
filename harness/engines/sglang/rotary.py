"""The drafter's own cos/sin table in SGLang, exact, and rewritten in place for a request that scales it (YaRN).

SGLang caches rotary embeddings by their settings and hands the same object to every layer, and to the target if its
settings are equal: a table changed for the drafter would change the target's positions too. So the drafter gets a copy
of its own, before anything takes a pointer to it (:func:`own_copy`). The table's storage then never changes, because
CUDA graphs and SGLang's fused kernels hold its address.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import torch

from methods.rope import Rope

PIECE = 16384  # positions computed at once: float64 angles of a long table would not be small


def own_copy(layers: Iterable[Any]) -> None:
    """Give draft layers, which share a rotary embedding, one that nobody else holds."""
    copies: dict[int, Any] = {}
    for layer in layers:
        attention = layer.self_attn
        shared = attention.rotary_emb
        if id(shared) not in copies:
            copies[id(shared)] = copy.deepcopy(shared)
        attention.rotary_emb = copies[id(shared)]


class OwnRotary:
    """Writes an embedding into a rotary object's table, where queries' own tables are exact too."""

    def __init__(self, rotary: Any, rope: Rope):
        """Raises ValueError for a table of another width or layout than the embedding's."""
        table = rotary.cos_sin_cache
        if not getattr(rotary, "is_neox_style", False) or table.shape[1] != 2 * len(rope.inv_freq):
            raise ValueError(
                f"the drafter's rotary table is {list(table.shape)}, needed are {2 * len(rope.inv_freq)} columns in "
                "the half-split layout"
            )
        self._module = rotary
        self._address = table.data_ptr()
        self._held: tuple[list[float], float] | None = None
        self.set(rope)

    def set(self, rope: Rope) -> None:
        """Rotate keys by ``rope`` from here on; nothing is done if they already are.

        Raises RuntimeError if SGLang has put another table in the place of the one that was written.
        """
        table = self._module.cos_sin_cache
        if table.data_ptr() != self._address:
            raise RuntimeError("SGLang replaced the drafter's rotary table after it was set; its keys would be wrong")
        wanted = (rope.inv_freq.tolist(), rope.mscale)
        if wanted == self._held:
            return
        freq = rope.inv_freq.to(table.device)
        for start in range(0, len(table), PIECE):
            rows = table[start : start + PIECE]
            places = torch.arange(start, start + len(rows), dtype=torch.float64, device=table.device)
            angle = places[:, None] * freq
            rows.copy_(torch.cat((torch.cos(angle), torch.sin(angle)), -1) * rope.mscale)
        self._held = wanted
