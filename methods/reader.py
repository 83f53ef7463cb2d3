"""Readers: a method's plan executed round by round against a request's cache, as the torch engine uses it.

:class:`CachedReader` is the fast one. It holds the keys that a plan reads at true distances already turned (all of them
only where the plan reads all of them so; otherwise the window), reads far entries as they lie in the shared cache with
a turned query (section 3.3), and merges the parts by their masses. :class:`DenseReader` executes the definition on the
same cache and is what the fast one is tested against.

Rounds: ``prepare`` once after prefill; then for every draft block ``read`` per layer and ``round_done``; after the
verification the engine appends what was committed to the cache and calls ``committed``, then ``target_attention`` if
``wants_target_attention()`` was true before the verification.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from methods.attention import dense_read, query_factors
from methods.cache import ContextCache, DrafterGeometry
from methods.parts import attend_folded, fold_rows, merge_parts, unfold_rows
from methods.reading import (
    Branch,
    Entries,
    Kept,
    Last,
    Method,
    Older,
    ReadPlan,
    Recent,
    RequestGeometry,
    Retrieved,
    SharedDistance,
    Sliding,
    SlidingGap,
)
from methods.rope import Rope, compute_dtype, tables, turn
from methods.turned import PackedEntries, TurnedWindow

__all__ = ["CachedReader", "ContextCache", "DenseReader", "DrafterGeometry", "Reader", "open_reader"]


class Reader(Protocol):
    """What an engine calls; the module says when."""

    def prepare(self) -> None: ...

    def committed(self, start: int, end: int) -> None: ...

    def wants_target_attention(self) -> bool: ...

    def target_attention(self, weights: Tensor) -> None: ...

    def read(self, layer: int, q: Tensor, kb: Tensor, vb: Tensor) -> Tensor: ...

    def round_done(self) -> None: ...

    def extra_bytes(self) -> int: ...

    def activity(self) -> dict[str, int]: ...


def open_reader(
    method: Method, geometry: DrafterGeometry, request: RequestGeometry, cache: ContextCache
) -> CachedReader:
    """The reader of one method for one request; the cache holds the request's context and is shared by its methods.

    Raises ValueError if the block sizes of drafter and request differ or the cache is another drafter's.
    """
    return CachedReader(method, geometry, request, cache)


class _RequestReader:
    """What both readers share: the plans, the method's state and the bookkeeping of rounds."""

    def __init__(self, method: Method, geometry: DrafterGeometry, request: RequestGeometry, cache: ContextCache):
        if request.block != geometry.block:
            raise ValueError(f"the request drafts {request.block} positions a round, the drafter {geometry.block}")
        shape = (len(geometry.layers), geometry.kv_heads, cache.capacity + geometry.block)
        if cache.keys.shape != (*shape, geometry.head_dim) or cache.values.shape != (*shape, geometry.value_dim):
            raise ValueError("the context cache was opened for another drafter geometry")
        self.method = method
        self.geometry = geometry
        self.cache = cache
        self.plans = [method.plan(layer, request) for layer in geometry.layers]
        new_state = getattr(method, "new_state", None)
        self.state = None if new_state is None else new_state(geometry, cache, request)
        self.counts = {"rounds": 0}

    def prepare(self) -> None:
        """After prefill, untimed: build what the method needs of the context now in the cache."""
        self.length = self.cache.length
        if self.state is not None:
            self.state.prepare()

    def committed(self, start: int, end: int) -> None:
        """Entries ``start..end-1`` were appended to the cache. Raises ValueError if that is not what happened."""
        if (start, end) != (self.length, self.cache.length):
            raise ValueError(
                f"committed({start}, {end}): the reader saw {self.length} entries, the cache holds {self.cache.length}"
            )
        self.length = end
        if self.state is not None:
            self.state.committed(end)

    def wants_target_attention(self) -> bool:
        """Ask before a verification: must it yield the target's attention for :meth:`target_attention`?"""
        return self.state is not None and self.state.wants_target_attention()

    def target_attention(self, weights: Tensor) -> None:
        """``weights [N]`` of position t - 1 over the context, averaged over heads, in the target's last full layer."""
        if self.state is None:
            raise RuntimeError(f"{self.method.name} does not use the target's attention")
        self.state.target_attention(weights)

    def round_done(self) -> None:
        """All layers of a draft block have been read."""
        self.counts["rounds"] += 1

    def extra_bytes(self) -> int:
        """Bytes held beyond the shared cache."""
        return 0 if self.state is None else self.state.nbytes()

    def activity(self) -> dict[str, int]:
        """What was really done, summed over layers and rounds: proof that the method is active."""
        return {**self.counts, **({} if self.state is None else self.state.activity())}


class DenseReader(_RequestReader):
    """The definition: :func:`methods.attention.dense_read` over the whole cache in every read."""

    def read(self, layer: int, q: Tensor, kb: Tensor, vb: Tensor) -> Tensor:
        """``q [B, Hq, d]``, ``kb [B, Hkv, d]``, ``vb [B, Hkv, dv]`` not rotated; returns ``[B, Hq, dv]`` in q's
        dtype.
        """
        length, plan = self.length, self.plans[layer]
        retrieves = any(isinstance(branch.entries, Retrieved) for branch in plan.branches)
        observes = retrieves and self.state is not None and self.state.observes
        read = dense_read(
            plan,
            q,
            self.cache.keys[layer, :, :length].transpose(0, 1),
            self.cache.values[layer, :, :length].transpose(0, 1),
            kb,
            vb,
            rope=self.geometry.rope,
            scale=self.geometry.scale,
            block_causal=self.geometry.layers[layer].block_causal,
            retrieved=self.state.positions(layer, q) if retrieves and self.state is not None else None,
            with_weights=observes,
        )
        if observes and self.state is not None and read.weights is not None:
            near = plan.branches[0].entries
            assert isinstance(near, Recent)
            rows = torch.arange(q.shape[0], device=q.device)[:, None, None]
            distance = length + rows - torch.arange(length, device=q.device)
            inside = read.weights.masked_fill(distance >= near.window + q.shape[0], 0.0)
            self.state.observe(layer, 0, inside.sum(0))
        return read.out


class _Part(NamedTuple):
    """One attention call: the block's rows against some entries. Heads of a group and rows are folded, row-major, so
    that each key is read once: ``query [Hkv, B * G, d]``, ``keys [Hkv, n, d]``, ``values [Hkv, n, dv]``, additive
    ``mask [B * G, n]``. ``some_empty``: a row may read nothing here."""

    query: Tensor
    keys: Tensor
    values: Tensor
    mask: Tensor | None = None
    sharpen: float = 1.0
    some_empty: bool = False


class CachedReader(_RequestReader):
    """The fast reader: turned windows, raw far reads, one attention call per part, merged by mass."""

    def __init__(self, method: Method, geometry: DrafterGeometry, request: RequestGeometry, cache: ContextCache):
        super().__init__(method, geometry, request, cache)
        self.rows = geometry.block
        self.group = geometry.q_heads // geometry.kv_heads
        self.dtype, self.device = cache.keys.dtype, cache.keys.device
        self.counts |= {"entries_in_context": 0, "entries_read": 0, "far_entries_read": 0}
        # Layers that read at true distances with the same rotary embedding over the same span share a turned window.
        windows: dict[tuple[int, bool], list[int]] = {}
        packed = False
        for index, plan in enumerate(self.plans):
            near = next(branch for branch in plan.branches if branch.block)
            if isinstance(near.entries, Retrieved):
                packed = True
            else:
                span = _span(near.entries, self.rows, cache.capacity)
                windows.setdefault((span, plan.rope is not None), []).append(index)
        self.windows: dict[int, TurnedWindow] = {}
        for (span, _), layers in windows.items():
            window = TurnedWindow(cache, layers, _rope_of(self.plans[layers[0]], geometry.rope), span)
            self.windows |= dict.fromkeys(layers, window)
        self.packed = PackedEntries(cache, geometry.rope) if packed else None
        # Raw keys lack the factor that turning gives a key, so the far query carries it twice.
        twice = replace(geometry.rope, mscale=geometry.rope.mscale**2)
        self.far_tables = {
            branch.placement: self._tables(_far_positions(branch.placement, self.rows), twice)
            for plan in self.plans
            for branch in plan.branches
            if isinstance(branch.placement, SharedDistance)
        }
        self.masks: dict[tuple[str, int, bool], Tensor] = {}

    def prepare(self) -> None:
        """After prefill, untimed: turn the keys that the plan reads at true distances."""
        super().prepare()
        self._follow()

    def committed(self, start: int, end: int) -> None:
        """Entries ``start..end-1`` were appended to the cache: turn those, and no others."""
        super().committed(start, end)
        self._follow()

    def read(self, layer: int, q: Tensor, kb: Tensor, vb: Tensor) -> Tensor:
        """``q [B, Hq, d]``, ``kb [B, Hkv, d]``, ``vb [B, Hkv, dv]`` not rotated; returns ``[B, Hq, dv]`` in q's
        dtype.
        """
        if q.shape[0] != self.rows or q.dtype != self.dtype:
            raise ValueError(f"this reader reads {self.rows} {self.dtype} rows, got {q.shape[0]} of {q.dtype}")
        plan = self.plans[layer]
        self.counts["entries_in_context"] += self.length
        query = q
        if plan.query_scale is not None:
            query = q.to(compute_dtype(self.dtype)) * self.factors[plan.query_scale][:, None, None]
        parts: list[_Part] = []
        for branch in plan.branches:
            if isinstance(branch.placement, SharedDistance):
                parts += self._far(layer, branch, q, query)
            elif isinstance(branch.entries, Retrieved):
                parts += self._packed(layer, q, kb, vb)
            else:
                parts += self._near(layer, branch, query, kb, vb)
        outs, masses = [], []
        for part in parts:
            out, lse = _attend(part, self.geometry.scale)
            outs.append(out)
            masses.append(lse / part.sharpen)  # Eq. 3
        out = merge_parts(outs, masses)
        if self.state is not None and self.state.observes and len(plan.branches) > 1:
            self._observe(layer, parts[0], torch.logsumexp(torch.stack(masses), 0))
        return unfold_rows(out, self.rows)

    def extra_bytes(self) -> int:
        """Bytes held beyond the shared cache: turned keys, retrieved entries, the method's state, masks."""
        held = {id(window): window.keys.nbytes for window in self.windows.values()}
        packed = 0 if self.packed is None else self.packed.keys.nbytes + self.packed.values.nbytes
        masks = sum(mask.nbytes for mask in self.masks.values())
        return super().extra_bytes() + sum(held.values()) + packed + masks

    # ---------------------------------------------------------------------------------------- the parts of a read

    def _near(self, layer: int, branch: Branch, query: Tensor, kb: Tensor, vb: Tensor) -> list[_Part]:
        """Entries at true distances and the block: turned keys, query turned to its own position."""
        entries, length, rows = branch.entries, self.length, self.rows
        window = self.windows[layer]
        turned = self._fold(turn(query, *window.block_tables))
        span, sinks, cut = _span(entries, rows, self.cache.capacity), 0, False
        count = min(length, span)
        if isinstance(entries, Recent | Sliding):
            count = min(length, span - 1)  # what the first row reads, and it reads most
            cut = length + rows > span
        elif isinstance(entries, Kept) and length > entries.sinks + entries.recent:
            # Renumbering leaves the recent entries at their true distances from the block and moves the sinks alone.
            sinks, count = entries.sinks, entries.recent
        start, end = length - count, length + rows
        window.block(layer)[:] = turn(kb, *window.block_tables).transpose(0, 1)
        self.cache.values[layer, :, length:end] = vb.transpose(0, 1)
        keys, values = window.view(layer, start, end), self.cache.values[layer, :, start:end]
        self._count(count + sinks, moved=sinks)

        if cut:
            mask = self._near_mask(span, self.geometry.layers[layer].block_causal)[:, -(count + rows) :]
            parts = [_Part(turned, keys, values, mask)]
        else:
            parts = self._context_and_block(turned, keys, values, layer)
        if sinks:
            places = torch.arange(length - count - sinks, length - count, device=self.device)
            first = turn(self.cache.keys[layer, :, :sinks].transpose(0, 1), *self._tables(places, window.rope))
            parts.append(_Part(turned, first.transpose(0, 1), self.cache.values[layer, :, :sinks]))
        return parts

    def _far(self, layer: int, branch: Branch, q: Tensor, query: Tensor) -> list[_Part]:
        """Entries at one shared distance: keys as they lie in the cache, query turned by that distance."""
        entries, length, rows = branch.entries, self.length, self.rows
        assert isinstance(branch.placement, SharedDistance)
        turned = self._fold(turn(query, *self.far_tables[branch.placement]))
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        if isinstance(entries, Retrieved):
            assert entries.beyond is not None and self.state is not None
            chosen = self.state.positions(layer, q)
            chosen = chosen[chosen < length + rows - entries.beyond]  # what the last row reads, and it reads most
            self._count(len(chosen), moved=len(chosen))
            if not len(chosen):
                return []
            last = length - entries.beyond + torch.arange(rows, device=self.device)
            mask = torch.zeros(rows, len(chosen), dtype=self.dtype, device=self.device)
            mask.masked_fill_(chosen > last[:, None], -math.inf)
            mask = mask.repeat_interleave(self.group, 0)
            return [_Part(turned, keys[:, chosen], values[:, chosen], mask, branch.sharpen, some_empty=True)]

        assert isinstance(entries, Older | SlidingGap)
        beyond = entries.window + rows if isinstance(entries, Older) else entries.size
        bound = length + rows - beyond  # the last row reads entries before it, each earlier row one fewer
        end = min(length, bound)
        if end <= 0:
            return []
        self._count(end, moved=end)
        mask = self._far_mask()[:, -bound:][:, :end]
        return [_Part(turned, keys[:, :end], values[:, :end], mask, branch.sharpen, some_empty=bound < rows)]

    def _packed(self, layer: int, q: Tensor, kb: Tensor, vb: Tensor) -> list[_Part]:
        """Retrieved entries renumbered from 0, the block after them."""
        assert self.packed is not None and self.state is not None
        packed = self.packed
        packed.hold(self.state.positions(layer, q))
        count = packed.count
        self._count(count, moved=count if count < self.length else 0)
        packed.keys[layer, :, count : count + self.rows] = turn(kb, *packed.block_tables).transpose(0, 1)
        packed.values[layer, :, count : count + self.rows] = vb.transpose(0, 1)
        turned = self._fold(turn(q, *packed.block_tables))
        return self._context_and_block(
            turned, packed.keys[layer, :, : count + self.rows], packed.values[layer, :, : count + self.rows], layer
        )

    def _observe(self, layer: int, near: _Part, lse: Tensor) -> None:
        """Hand the state the weights of the window's entries: their logits again, over the total mass."""
        assert self.state is not None
        count = min(self.length, _span(self.plans[layer].branches[0].entries, self.rows, self.cache.capacity) - 1)
        exact = compute_dtype(self.dtype)
        logits = near.query.to(exact) @ near.keys[:, :count].to(exact).transpose(1, 2) * self.geometry.scale
        if near.mask is not None:
            logits = logits + near.mask[:, :count]
        weights = torch.exp(logits - lse[..., None]).unflatten(1, (self.rows, self.group)).sum(1)
        self.state.observe(layer, self.length - count, weights.flatten(0, 1))

    # ------------------------------------------------------------------------------------------- masks and tables

    def _context_and_block(self, turned: Tensor, keys: Tensor, values: Tensor, layer: int) -> list[_Part]:
        """Context entries that every row reads, and the block, which alone may need a mask."""
        count = keys.shape[1] - self.rows
        if not self.geometry.layers[layer].block_causal:
            return [_Part(turned, keys, values)]
        block = _Part(turned, keys[:, count:], values[:, count:], self._near_mask(1, causal=True))
        return [_Part(turned, keys[:, :count], values[:, :count]), block] if count else [block]

    def _near_mask(self, size: int, causal: bool) -> Tensor:
        """``[B * G, size - 1 + B]``: the ``size - 1`` entries before the block, of which row r reads ``p - j < size``,
        and the block. Its last columns are the mask of a shorter context."""
        if ("near", size, causal) not in self.masks:
            row = torch.arange(self.rows, device=self.device)[:, None]
            column = torch.arange(size - 1 + self.rows, device=self.device)
            hidden = (column < row) & (column < size - 1)
            if causal:
                hidden |= column - (size - 1) > row
            self.masks["near", size, causal] = self._additive(hidden)
        return self.masks["near", size, causal]

    def _far_mask(self) -> Tensor:
        """``[B * G, capacity + B]``: row r reads all but the last ``B - 1 - r`` entries. Its last columns are the mask
        of a shorter memory."""
        if ("far", 0, False) not in self.masks:
            row = torch.arange(self.rows, device=self.device)[:, None]
            column = torch.arange(self.cache.capacity + self.rows, device=self.device)
            self.masks["far", 0, False] = self._additive(column > self.cache.capacity + row)
        return self.masks["far", 0, False]

    def _additive(self, hidden: Tensor) -> Tensor:
        mask = torch.zeros(hidden.shape, dtype=self.dtype, device=self.device).masked_fill_(hidden, -math.inf)
        return mask.repeat_interleave(self.group, 0)

    def _tables(self, positions: Tensor, rope: Rope) -> tuple[Tensor, Tensor]:
        return tables(positions, rope, self.dtype, self.device)

    def _fold(self, query: Tensor) -> Tensor:
        """``[B, Hq, d]`` to ``[Hkv, B * G, d]`` in the cache's dtype."""
        return fold_rows(query.to(self.dtype), self.geometry.kv_heads)

    def _follow(self) -> None:
        """Bring what depends on the context's length up to it."""
        for window in set(self.windows.values()):
            window.follow()
        self.factors = {
            plan.query_scale: query_factors(
                plan.query_scale, self.length, self.rows, compute_dtype(self.dtype), self.device
            )
            for plan in self.plans
            if plan.query_scale is not None
        }

    def _count(self, entries: int, moved: int) -> None:
        self.counts["entries_read"] += entries
        self.counts["far_entries_read"] += moved


def _span(entries: Entries, rows: int, capacity: int) -> int:
    """How far before the block a branch at true distances reaches, in entries."""
    match entries:
        case Recent(window):
            return window + rows
        case Sliding(size):
            return size
        case Last(count):
            return count
        case Kept(sinks, recent):
            return sinks + recent
        case _:
            return capacity


def _rope_of(plan: ReadPlan, rope: Rope) -> Rope:
    return rope if plan.rope is None else rope.yarn(plan.rope)


def _far_positions(placement: SharedDistance, rows: int) -> Tensor:
    row = torch.arange(rows)
    return placement.distance + (row if placement.follows_block else torch.zeros_like(row))


def _attend(part: _Part, scale: float) -> tuple[Tensor, Tensor]:
    """``out [Hkv, B * G, dv]`` of one part and ``lse [Hkv, B * G]`` of its sharpened logits."""
    return attend_folded(
        part.query, part.keys, part.values, part.mask, scale * part.sharpen, some_empty=part.some_empty
    )
