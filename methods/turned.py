"""Keys that a reader holds already turned to positions: a window of the context, or retrieved entries side by side.

Both leave room behind the context's keys for those of the draft block, so that one attention call reads both.
"""

from __future__ import annotations

import torch
from torch import Tensor

from methods.cache import ContextCache
from methods.rope import Rope, tables, turn

SLACK = 256  # entries that arrive before a full buffer is moved or grown again
PIECE = 1024  # entries turned at once: turning works in float32, and a whole context of it would not be small


class TurnedWindow:
    """Keys of some layers turned to their true positions: the last ``span`` context entries, then room for the
    block's own keys."""

    def __init__(self, cache: ContextCache, layers: list[int], rope: Rope, span: int):
        self.cache = cache
        self.slot = {layer: index for index, layer in enumerate(layers)}
        self.layers = layers
        self.rope = rope
        self.span = min(span, cache.capacity)
        self.block_rows = cache.geometry.block
        self.room = min(cache.capacity, self.span + SLACK)
        shape = (len(layers), cache.geometry.kv_heads, self.room + self.block_rows, cache.geometry.head_dim)
        self.keys = torch.empty(shape, dtype=cache.keys.dtype, device=cache.keys.device)
        self.first = self.end = 0  # the context entries held

    def follow(self) -> None:
        """Turn the entries that the cache has and this window has not, once each."""
        end = self.cache.length
        if end - self.first > self.room:
            first = max(self.first, end - self.span)
            kept = max(0, self.end - first)
            self.keys[:, :, :kept] = self.keys[:, :, self.end - self.first - kept : self.end - self.first].clone()
            self.first, self.end = first, max(first, self.end)
        for start in range(self.end, end, PIECE):
            stop = min(end, start + PIECE)
            raw = self.cache.keys[self.layers, :, start:stop].transpose(1, 2)
            places = torch.arange(start, stop, device=raw.device)
            turned = turn(raw, *tables(places, self.rope, raw.dtype, raw.device))
            self.keys[:, :, start - self.first : stop - self.first] = turned.transpose(1, 2)
        self.end = end
        places = torch.arange(end, end + self.block_rows, device=self.keys.device)
        self.block_tables = tables(places, self.rope, self.keys.dtype, self.keys.device)

    def view(self, layer: int, start: int, end: int) -> Tensor:
        """``[Hkv, end - start, d]`` turned keys of positions ``start..end-1``; the block's follow the context's."""
        return self.keys[self.slot[layer], :, start - self.first : end - self.first]

    def block(self, layer: int) -> Tensor:
        """``[Hkv, B, d]`` where the block's turned keys go."""
        return self.view(layer, self.end, self.end + self.block_rows)


class PackedEntries:
    """Retrieved entries side by side, the same in all layers: keys turned to 0..M-1, then room for the block."""

    def __init__(self, cache: ContextCache, rope: Rope):
        self.cache = cache
        self.rope = rope
        self.held = torch.empty(0, dtype=torch.long, device=cache.keys.device)
        self.keys = cache.keys.new_empty((*cache.keys.shape[:2], 0, cache.keys.shape[3]))
        self.values = cache.values.new_empty((*cache.values.shape[:2], 0, cache.values.shape[3]))

    @property
    def count(self) -> int:
        """Entries held, M."""
        return len(self.held)

    def hold(self, positions: Tensor) -> None:
        """Hold these ascending context positions; what already lies in its place is not fetched again."""
        if positions is self.held:
            return
        count, rows = len(positions), self.cache.geometry.block
        both = min(count, len(self.held))
        moved = (positions[:both] != self.held[:both]).nonzero()
        same = int(moved[0]) if len(moved) else both
        if count + rows > self.keys.shape[2]:
            self.keys = _grown(self.keys, count + rows + SLACK)
            self.values = _grown(self.values, count + rows + SLACK)
        fresh = positions[same:]
        raw = self.cache.keys[:, :, fresh].transpose(1, 2)
        device = raw.device
        turned = turn(raw, *tables(torch.arange(same, count, device=device), self.rope, raw.dtype, device))
        self.keys[:, :, same:count] = turned.transpose(1, 2)
        self.values[:, :, same:count] = self.cache.values[:, :, fresh]
        self.held = positions
        places = torch.arange(count, count + rows, device=device)
        self.block_tables = tables(places, self.rope, raw.dtype, device)


def _grown(held: Tensor, rows: int) -> Tensor:
    larger = held.new_empty((*held.shape[:2], rows, held.shape[3]))
    larger[:, :, : held.shape[2]] = held
    return larger
