"""A method's plan as a few paged attention calls: how a serving engine reads a context that lies in pages.

An engine stores a drafter layer's keys rotated to their absolute positions, page by page, and the values beside them.
:class:`PagedReader` reads that as it lies. Every branch becomes calls in FlashAttention's geometry (:class:`Attend`):
bounds that move with the row, aligned to the bottom right. With ``D = W + B`` and N committed entries,

* the window N_p is a call over the ``N + B`` rotated keys with ``left = D - 1``;
* FOLD's and ReRoPE's far memory is a call over the first ``N - W`` *unrotated* keys with ``right = 0``, its query
  turned to ``D + r`` or ``D``: the bound drops the last ``B - 1 - r`` keys of row r, which are still in its window;
* a set that all rows share (StreamingLLM, SGLang's window) is a call of one row, into which the block's rows are folded
  as heads; StreamingLLM's sinks are read where they lie by a query turned to ``min(N, kept) + r``, which puts them at
  their renumbered distance.

So no entry is copied and no key turned twice. What depends on a request is read from device memory and all shapes are
fixed: one CUDA graph serves every length. InfLLM and CMR choose entries on the host (``host_driven``): they run outside
of graphs, and gather what they chose.

The parts are merged by mass (section 3.3, Eqs. 2-4). The judge is :func:`methods.attention.dense_read`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from methods.cache import ContextCache, DrafterGeometry
from methods.parts import attend_folded, fold_rows, unfold_rows
from methods.reading import (
    All,
    Branch,
    Kept,
    Last,
    LogQueryScale,
    Method,
    Older,
    ReadPlan,
    Recent,
    RequestGeometry,
    RetrievalState,
    Retrieved,
    SharedDistance,
    Sliding,
    SlidingGap,
)
from methods.rope import Rope, compute_dtype, turn
from methods.turned import PackedEntries

__all__ = [
    "Attend", "Call", "DeviceRope", "Fused", "Merge", "PagedLayer", "PagedReader", "Place", "Rotate", "Tally",
    "torch_attend", "torch_merge", "torch_rotate",
]  # fmt: skip

UNBOUNDED = 2**62


@dataclass(frozen=True, eq=False)
class PagedLayer:
    """Where one drafter layer's context lies; any strides, one dtype.

    ``keys [pages, page_size, Hkv, d]`` rotated to absolute positions, ``raw_keys`` the same not rotated (after the k
    norm; None where the method reads none), ``values [pages, page_size, Hkv, dv]``. ``table [max_pages]`` int32 or
    int64: entry j lies in page ``table[j // page_size]``, row ``j % page_size``. Entries ``0..N-1`` are the context,
    and the draft block's own rotated keys and values stand at entries ``N..N+B-1`` before the read.

    ``raw_values`` and ``raw_table``, given together, say where ``raw_keys`` and the values beside them lie if not in
    those pages: an engine that owns its storage rotates a window only, and then has no rotated page for most entries.
    """

    keys: Tensor
    raw_keys: Tensor | None
    values: Tensor
    table: Tensor
    raw_values: Tensor | None = None
    raw_table: Tensor | None = None


@dataclass(frozen=True, eq=False)
class DeviceRope:
    """A rotary embedding in device memory, where a request may change it in place: ``freq [n]`` float64 radians per
    position of each pair, ``mscale [1]`` float64 (see :class:`methods.rope.Rope`)."""

    freq: Tensor
    mscale: Tensor


@dataclass(frozen=True)
class Place:
    """Where a second copy of the query is turned to: ``distance``, or ``min(N, distance)`` if ``capped``; plus r if it
    ``follows_block``. ``raw``: it meets unrotated keys, so it carries the embedding's mscale for both."""

    distance: int
    follows_block: bool
    capped: bool = False
    raw: bool = True


class Attend(Protocol):
    """One attention call over paged or contiguous keys.

    ``q [R, Hq, d]``, already rotated; ``keys [pages, page_size, Hkv, d]`` and ``values [pages, page_size, Hkv, dv]``
    with ``table [max_pages]``, or ``[1, n, Hkv, d]`` and ``[1, n, Hkv, dv]`` with ``table=None``; ``length`` int32
    ``[1]`` on the device, the keys there are. Bottom-right aligned: row r reads keys j with ``diag - left <= j <= diag
    + right``, ``diag = length - R + r``; None is no bound. Query head h reads key head ``h // (Hq // Hkv)``.

    Returns ``out [R, Hq, dv]`` in q's dtype and natural ``lse [R, Hq]``, float64 for float64 queries, else float32; a
    row that reads nothing has out 0 and lse -inf (or +inf, as FlashAttention 2 says: a merge takes both).
    """

    def __call__(
        self,
        q: Tensor,
        keys: Tensor,
        values: Tensor,
        table: Tensor | None,
        length: Tensor,
        *,
        left: int | None,
        right: int | None,
        scale: float,
    ) -> tuple[Tensor, Tensor]: ...


@dataclass(frozen=True, eq=False)
class Call:
    """One attention call of a read, as :class:`Attend` takes it: over ``min(max(0, length + shift), most)`` keys, with
    logits of ``scale * sharpen``."""

    query: Tensor
    keys: Tensor
    values: Tensor
    table: Tensor | None
    length: Tensor
    scale: float
    shift: int = 0
    most: int | None = None
    left: int | None = None
    right: int | None = None
    sharpen: float = 1.0


class Fused(Protocol):
    """Calls whose queries have one shape, executed and merged at once: ``out [R, Hq, dv]`` and log mass ``[R, Hq]``."""

    def __call__(self, calls: Sequence[Call]) -> tuple[Tensor, Tensor]: ...


@dataclass(frozen=True, eq=False)
class Tally:
    """What a read adds to the counts of a request, in device memory: ``counted [n] += min(max(0, (N - terms[0]) *
    terms[1]), terms[2])``, int64, ``terms [3, n]``. Counted by the read itself, it proves that the read ran, in a CUDA
    graph too."""

    terms: Tensor
    counted: Tensor


class Rotate(Protocol):
    """The query turned for its reads: ``q [B, Hq, d]`` to positions ``N + r`` and, if ``far``, to that place.

    ``length`` int32 ``[1]`` on the device: N. ``scaling``: the factor of each row that both copies carry. ``tally``:
    counts to bring up to date on the way.
    """

    def __call__(
        self,
        q: Tensor,
        length: Tensor,
        rope: DeviceRope,
        *,
        far: Place | None,
        scaling: LogQueryScale | None,
        tally: Tally | None = None,
    ) -> tuple[Tensor, Tensor | None]: ...


class Merge(Protocol):
    """Parts merged by mass (Eq. 4): ``outs`` of ``[B, Hq, dv]`` and ``lses`` of ``[B, Hq]`` over logits sharpened by
    ``sharpen``; an empty row's lse is -inf or +inf. Returns the read and its log mass."""

    def __call__(
        self, outs: Sequence[Tensor], lses: Sequence[Tensor], sharpen: Sequence[float]
    ) -> tuple[Tensor, Tensor]: ...


# ------------------------------------------------------------------------------------------------- the torch executor


def torch_attend(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    table: Tensor | None,
    length: Tensor,
    *,
    left: int | None,
    right: int | None,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """:class:`Attend` in torch, any float dtype. On a CPU it touches only what the rows read; elsewhere every key of
    the table, so that nothing is asked of the device."""
    rows, heads, kv_heads = q.shape[0], q.shape[1], keys.shape[2]
    capacity = keys.shape[1] * (keys.shape[0] if table is None else len(table))
    first, end, tight = _touched(rows, length, left, capacity)
    exact = compute_dtype(q.dtype)
    if first >= end:
        empty = torch.full((rows, heads), -math.inf, dtype=exact, device=q.device)
        return q.new_zeros(rows, heads, values.shape[-1]), empty
    read_keys, read_values, mask = _span(keys, table, first, end), _span(values, table, first, end), None
    if left is not None or right is not None or not tight:
        place = torch.arange(first, end, device=q.device)
        diagonal = length - rows + torch.arange(rows, device=q.device)[:, None]
        hidden = (place >= length).expand(rows, -1)
        if left is not None:
            hidden = hidden | (place < diagonal - left)
        if right is not None:
            hidden = hidden | (place > diagonal + right)
        mask = torch.zeros(hidden.shape, dtype=q.dtype, device=q.device).masked_fill_(hidden, -math.inf)
        mask = mask.repeat_interleave(heads // kv_heads, 0)
        if not tight:  # what no row reads may be anything, NaN too
            unread = hidden.all(0)[:, None, None]
            read_keys, read_values = read_keys.masked_fill(unread, 0.0), read_values.masked_fill(unread, 0.0)
    out, lse = attend_folded(
        fold_rows(q, kv_heads), read_keys.transpose(0, 1), read_values.transpose(0, 1), mask, scale, some_empty=True
    )
    return unfold_rows(out, rows).to(q.dtype), unfold_rows(lse, rows).to(exact)


def _touched(rows: int, length: Tensor, left: int | None, capacity: int) -> tuple[int, int, bool]:
    """The span of keys to look at, and whether it is only what the rows read: on a CPU, where a length costs nothing
    to ask."""
    if length.device.type != "cpu":
        return 0, capacity, False
    end = int(length)
    if end > capacity:
        raise ValueError(f"attention over {end} keys, but the table has room for {capacity}")
    return (0 if left is None else max(0, end - rows - left)), end, True


def torch_rotate(
    q: Tensor,
    length: Tensor,
    rope: DeviceRope,
    *,
    far: Place | None,
    scaling: LogQueryScale | None,
    tally: Tally | None = None,
) -> tuple[Tensor, Tensor | None]:
    """:class:`Rotate` in torch: float64 angles, cosines and sines rounded."""
    if tally is not None:
        offset, times, most = tally.terms
        tally.counted.add_(((length - offset) * times).clamp(min=0).minimum(most))
    exact = compute_dtype(q.dtype)
    row = torch.arange(q.shape[0], device=q.device)
    query = q.to(exact)
    if scaling is not None:
        place = (length + row + 1).to(torch.float64)
        factor = (torch.log(place) / math.log(scaling.reference)).clamp(min=1.0)
        query = query * factor.to(exact)[:, None, None]
    near = _turn(query, length + row, rope, rope.mscale).to(q.dtype)
    if far is None:
        return near, None
    start = length.clamp(max=far.distance) if far.capped else torch.full_like(length, far.distance)
    place = start + (row if far.follows_block else torch.zeros_like(row))
    return near, _turn(query, place, rope, rope.mscale**2 if far.raw else rope.mscale).to(q.dtype)


def torch_merge(
    outs: Sequence[Tensor], lses: Sequence[Tensor], sharpen: Sequence[float]
) -> tuple[Tensor, Tensor]:
    """:class:`Merge` in torch."""
    # An empty row's +inf must go before the division, or its part would win (facts of FlashAttention 2).
    masses = torch.stack(
        [lse.masked_fill(lse == math.inf, -math.inf) / alpha for lse, alpha in zip(lses, sharpen, strict=True)]
    )
    total = torch.logsumexp(masses, 0)
    share = torch.exp(masses - total.masked_fill(total == -math.inf, 0.0))[..., None]
    stacked = torch.stack(list(outs)).to(share.dtype).masked_fill(share == 0, 0.0)
    return (stacked * share).sum(0).to(outs[0].dtype), total


# --------------------------------------------------------------------------------------------------------- the reader


class PagedReader:
    """One method's reads of all drafter layers of an engine process, one request at a time (batch size 1).

    Per request: ``begin``; then for every draft block ``read`` of layer 0, 1, ... and, for a ``host_driven`` method,
    ``committed`` whenever entries were committed (after prefill too, before the first read), then ``target_attention``
    if ``wants_target_attention()`` was true before the verification. Before the first ``begin`` reads work with the
    drafter's own embedding, so that graphs can be captured; addresses never change afterwards.
    """

    def __init__(
        self,
        method: Method,
        geometry: DrafterGeometry,
        *,
        max_context: int,
        dtype: torch.dtype,
        device: torch.device | str,
        attend: Attend = torch_attend,
        rotate: Rotate = torch_rotate,
        merge: Merge = torch_merge,
        fused: Fused | None = None,
    ):
        """``max_context``: most context entries a request can reach; ``dtype`` of queries, keys and values. ``fused``
        takes all calls that it can, ``attend`` and ``merge`` the others."""
        self.method = method
        self.geometry = geometry
        self.rows = geometry.block
        self.capacity = max_context
        self.dtype, self.device = dtype, torch.device(device)
        self.attend, self.rotate, self.merge, self.fused = attend, rotate, merge, fused
        self.state: RetrievalState | None = None
        self.packed: PackedEntries | None = None
        self.context: _PagedContext | None = None

        request = RequestGeometry(1, 1, geometry.block)
        self.plans = [method.plan(layer, request) for layer in geometry.layers]
        self.ropes = [self._device_rope(geometry.rope) for _ in geometry.layers]
        self.host_driven = any(isinstance(b.entries, Retrieved) for plan in self.plans for b in plan.branches)
        """True: the method chooses entries on the host, so reads must run outside of a CUDA graph."""
        self.raw_layers = tuple(index for index, plan in enumerate(self.plans) if _reads_raw(plan))
        """Layers whose ``raw_keys`` are read: those an engine must keep unrotated keys of."""

        self.block_length = torch.tensor([self.rows], dtype=torch.int32, device=self.device)
        terms = [_terms(plan, self.rows, first=index == 0) for index, plan in enumerate(self.plans)]
        self.counted = torch.zeros(len(terms[0]), dtype=torch.int64, device=self.device)
        self.tallies = [
            Tally(torch.tensor(list(zip(*layer, strict=True)), dtype=torch.int64, device=self.device), self.counted)
            for layer in terms
        ]
        self.retrieved = [0, 0]  # entries that the host chose: read, and of them read out of their place

    @property
    def needs_raw_keys(self) -> bool:
        """True if any layer's ``raw_keys`` are read."""
        return bool(self.raw_layers)

    def begin(self, request: RequestGeometry) -> None:
        """A new request: nothing survives the last one. Raises ValueError for another block size, or if the request
        does not fit ``max_context``."""
        if request.block != self.rows:
            raise ValueError(f"the request drafts {request.block} positions a round, the drafter {self.rows}")
        if request.prompt + request.limit > self.capacity:
            raise ValueError(
                f"a request of {request.prompt} + {request.limit} tokens, but this reader was opened for "
                f"{self.capacity} context entries"
            )
        for index, held in enumerate(self.ropes):
            rope = self.rope(index, request)
            held.freq.copy_(rope.inv_freq)
            held.mscale.fill_(rope.mscale)
        self.counted.zero_()
        self.retrieved = [0, 0]
        self.state = self.packed = self.context = None
        if self.host_driven:
            self.context = _PagedContext(self.geometry, self.capacity, self.dtype, self.device)
            context = cast(ContextCache, self.context)
            new_state: Any = self.method
            self.state = new_state.new_state(self.geometry, context, request)
            if any(isinstance(branch.entries, Retrieved) and branch.block for branch in self.plans[0].branches):
                self.packed = PackedEntries(context, self.geometry.rope)

    def rope(self, layer: int, request: RequestGeometry) -> Rope:
        """The embedding that the engine must rotate this layer's keys with, in this request (YaRN scales it)."""
        plan = self.method.plan(self.geometry.layers[layer], request)
        return self.geometry.rope if plan.rope is None else self.geometry.rope.yarn(plan.rope)

    def committed(self, length: int, layers: Sequence[PagedLayer]) -> None:
        """The context has ``length`` entries and they all lie in ``layers``: after prefill, then after every round.
        Methods that are not ``host_driven`` need no word of it."""
        if self.state is None or self.context is None:
            return
        if not self.context.layers:
            self.context.lay(length, layers)
            self.state.prepare()
        elif length < self.context.length:
            raise ValueError(f"committed({length}): the reader saw {self.context.length} entries of this request")
        else:
            self.context.lay(length, layers)
            self.state.committed(length)

    def wants_target_attention(self) -> bool:
        """Ask before a verification: must it yield the target's attention for :meth:`target_attention`?"""
        return self.state is not None and self.state.wants_target_attention()

    def target_attention(self, weights: Tensor) -> None:
        """``weights [N]`` of position t - 1 over the context, averaged over heads, in the target's last full layer."""
        if self.state is None:
            raise RuntimeError(f"{self.method.name} does not use the target's attention")
        self.state.target_attention(weights)

    def activity(self) -> dict[str, int]:
        """What was really done for this request, counted by the reads themselves (in a CUDA graph too) and summed over
        layers and rounds; asks the device."""
        rounds, context, near, far, moved = self.counted.tolist()
        return {
            "rounds": rounds,
            "entries_in_context": context,
            "entries_read": near + far + self.retrieved[0],
            "far_entries_read": far + moved + self.retrieved[1],
            **({} if self.state is None else self.state.activity()),
        }

    def read(self, layer: int, q: Tensor, pages: PagedLayer, length: Tensor) -> Tensor:
        """``q [B, Hq, d]`` not rotated, ``length`` int32 ``[1]`` on the device: N. Returns ``[B, Hq, dv]``.

        Raises ValueError for other rows or dtypes, for a layer that lacks ``raw_keys``, and if a ``host_driven``
        method was not told of the context that is there.
        """
        drafter = self.geometry
        if q.shape != (self.rows, drafter.q_heads, drafter.head_dim) or q.dtype != self.dtype:
            raise ValueError(
                f"this reader reads queries [{self.rows}, {drafter.q_heads}, {drafter.head_dim}] of {self.dtype}, got "
                f"{list(q.shape)} of {q.dtype}"
            )
        if layer in self.raw_layers and pages.raw_keys is None:
            raise ValueError(f"{self.method.name} reads unrotated keys of layer {layer}, and there are none")
        if self.host_driven:
            self._check_told(int(length))
        plan, rope = self.plans[layer], self.ropes[layer]
        near, far = _near_and_far(plan)
        turned, second = self.rotate(
            q, length, rope, far=_second_place(near, far), scaling=plan.query_scale, tally=self.tallies[layer]
        )
        parts = self._near(layer, near, q, turned, second, pages, length)
        if far is not None:
            assert second is not None and pages.raw_keys is not None
            parts += self._far(layer, far, q, second, pages, length)
        out, mass = self._execute(parts)
        if self.observes and far is not None:
            self._observe(layer, turned, pages, mass)
        return out

    @property
    def observes(self) -> bool:
        """True if the method's state wants the weights of each read (InfLLM)."""
        return self.state is not None and self.state.observes

    # ------------------------------------------------------------------------------------------ the parts of a read

    def _near(
        self,
        layer: int,
        branch: Branch,
        q: Tensor,
        turned: Tensor,
        second: Tensor | None,
        pages: PagedLayer,
        length: Tensor,
    ) -> list[Call | _Part]:
        """The block, and the entries that its branch reads: at true distances, or renumbered."""
        causal, rows = self.geometry.layers[layer].block_causal, self.rows
        right = 0 if causal else None
        match branch.entries:
            case All():
                return [self._rotated(turned, pages, length, shift=rows, right=right)]
            case Recent(window):
                return [self._rotated(turned, pages, length, shift=rows, left=window + rows - 1, right=right)]
            case Sliding(size) if size >= rows:
                return [self._rotated(turned, pages, length, shift=rows, left=size - 1, right=right)]
            case Sliding(size):
                return [self._narrow(turned, pages, length, size, causal)]
            case Last(count):
                return self._shared(turned, pages, length, count, causal)
            case Kept(sinks, recent):
                parts = self._shared(turned, pages, length, recent, causal)
                if sinks:
                    assert second is not None
                    parts.append(self._rotated(self._as_one_row(second), pages, length, shift=-recent, most=sinks))
                return parts
            case Retrieved():
                return self._packed(layer, q, turned, pages, length)
        raise AssertionError(branch.entries)

    def _far(
        self, layer: int, branch: Branch, q: Tensor, second: Tensor, pages: PagedLayer, length: Tensor
    ) -> list[Call | _Part]:
        """Entries at one shared distance: unrotated keys, met by the second query."""
        rows, scale, sharpen = self.rows, self.geometry.scale, branch.sharpen
        raw, values, table = _unrotated(pages)
        match branch.entries:
            case Older(window):
                shift, right = -window, 0
            case SlidingGap(size):
                # A window narrower than the block leaves entries that even row 0 is beyond.
                shift, right = min(0, rows - size), max(0, rows - size)
            case Retrieved(beyond):
                assert beyond is not None and self.state is not None
                chosen = self.state.positions(layer, q)
                # What the last row reads, and it reads most. The last of them lie side by side up to its bound, so
                # that each earlier row reads one fewer.
                chosen = chosen[chosen < int(length) + rows - beyond]
                self.retrieved[0] += len(chosen)
                self.retrieved[1] += len(chosen)
                if not len(chosen):
                    return []
                keys, values = _at(raw, table, chosen)[None], _at(values, table, chosen)[None]
                count = torch.tensor([len(chosen)], dtype=torch.int32, device=self.device)
                return [Call(second, keys, values, None, count, scale, right=0, sharpen=sharpen)]
            case _:
                raise AssertionError(branch.entries)
        return [Call(second, raw, values, table, length, scale, shift, right=right, sharpen=sharpen)]

    def _rotated(
        self,
        query: Tensor,
        pages: PagedLayer,
        length: Tensor,
        *,
        shift: int = 0,
        most: int | None = None,
        left: int | None = None,
        right: int | None = None,
    ) -> Call:
        """A call over the rotated keys as they lie."""
        scale = self.geometry.scale
        return Call(query, pages.keys, pages.values, pages.table, length, scale, shift, most, left, right)

    def _as_one_row(self, query: Tensor) -> Tensor:
        """``[B, Hq, d]`` to ``[1, Hkv * B * G, d]``: the block's rows as heads, so that one bound serves them all."""
        return fold_rows(query, self.geometry.kv_heads).flatten(0, 1)[None]

    def _shared(
        self, turned: Tensor, pages: PagedLayer, length: Tensor, count: int, causal: bool
    ) -> list[Call | _Part]:
        """The last ``count`` entries for all rows, and the block."""
        one = self._as_one_row(turned)
        if not causal:
            return [self._rotated(one, pages, length, shift=self.rows, left=count + self.rows - 1)]
        return [self._rotated(one, pages, length, left=count - 1), self._block_alone(turned, pages, length, causal)]

    def _block_alone(self, turned: Tensor, pages: PagedLayer, length: Tensor, causal: bool) -> Call:
        keys, values = self._gathered(pages, length + torch.arange(self.rows, device=self.device))
        right = 0 if causal else None
        return Call(turned, keys[None], values[None], None, self.block_length, self.geometry.scale, right=right)

    def _gathered(self, pages: PagedLayer, at: Tensor) -> tuple[Tensor, Tensor]:
        """Copies of the rotated keys and the values ``[n, Hkv, d]`` of entries ``at [n]``."""
        return _at(pages.keys, pages.table, at), _at(pages.values, pages.table, at)

    def _narrow(self, turned: Tensor, pages: PagedLayer, length: Tensor, size: int, causal: bool) -> _Part:
        """A sliding window narrower than the block, all of which is read: no bound along the diagonal says that."""
        row = torch.arange(self.rows, device=self.device)[:, None]
        column = torch.arange(size - 1 + self.rows, device=self.device)
        at = length - (size - 1) + column
        hidden = ((column < row) & (column < size - 1)) | (at < 0)
        if causal:
            hidden |= column - (size - 1) > row
        mask = torch.zeros(hidden.shape, dtype=self.dtype, device=self.device).masked_fill_(hidden, -math.inf)
        group = self.geometry.q_heads // self.geometry.kv_heads
        keys, values = self._gathered(pages, at.clamp(min=0))
        query = fold_rows(turned, self.geometry.kv_heads)
        out, lse = attend_folded(
            query, keys.transpose(0, 1), values.transpose(0, 1), mask.repeat_interleave(group, 0), self.geometry.scale
        )
        return _Part(unfold_rows(out, self.rows).to(self.dtype), unfold_rows(lse, self.rows))

    def _packed(
        self, layer: int, q: Tensor, turned: Tensor, pages: PagedLayer, length: Tensor
    ) -> list[Call | _Part]:
        """Retrieved entries renumbered from 0, read by a query at M + r, and the block by one at N + r."""
        assert self.packed is not None and self.state is not None
        packed = self.packed
        packed.hold(self.state.positions(layer, q))
        block = self._block_alone(turned, pages, length, self.geometry.layers[layer].block_causal)
        if not packed.count:
            return [block]
        self.retrieved[0] += packed.count
        self.retrieved[1] += packed.count if packed.count < int(length) else 0
        count = torch.tensor([packed.count], dtype=torch.int32, device=self.device)
        query, _ = self.rotate(q, count, self.ropes[layer], far=None, scaling=None)
        keys, values = packed.keys[layer].transpose(0, 1)[None], packed.values[layer].transpose(0, 1)[None]
        return [block, Call(query, keys, values, None, count, self.geometry.scale)]

    # --------------------------------------------------------------------------------------------------- execution

    def _execute(self, parts: list[Call | _Part]) -> tuple[Tensor, Tensor]:
        """All parts, merged: ``out [B, Hq, dv]`` and log mass ``[B, Hq]``."""
        calls = [part for part in parts if isinstance(part, Call)]
        done = [part for part in parts if isinstance(part, _Part)]
        while calls:
            mates = [call for call in calls if call.query.shape == calls[0].query.shape]
            if self.fused is None:
                done.append(self._call(calls.pop(0)))
            else:
                out, lse = self.fused(mates)
                calls = [call for call in calls if not any(call is mate for mate in mates)]
                done.append(_Part(out, lse))
        done = [self._as_block(part) for part in done]
        if len(done) == 1 and done[0].sharpen == 1.0:
            return done[0].out, done[0].lse
        return self.merge([p.out for p in done], [p.lse for p in done], [p.sharpen for p in done])

    def _call(self, call: Call) -> _Part:
        keys = call.length
        if call.shift or call.most is not None:
            keys = (keys + call.shift).clamp(min=0, max=call.most)
        out, lse = self.attend(
            call.query, call.keys, call.values, call.table, keys,
            left=call.left, right=call.right, scale=call.scale * call.sharpen,
        )  # fmt: skip
        return _Part(out, lse, call.sharpen)

    def _as_block(self, part: _Part) -> _Part:
        """A part whose rows were read as heads, row by row again."""
        if part.out.shape[0] == self.rows and part.out.shape[1] == self.geometry.q_heads:
            return part
        shape = (self.geometry.kv_heads, -1)
        return _Part(
            unfold_rows(part.out[0].unflatten(0, shape), self.rows),
            unfold_rows(part.lse[0].unflatten(0, shape), self.rows),
            part.sharpen,
        )

    def _observe(self, layer: int, turned: Tensor, pages: PagedLayer, mass: Tensor) -> None:
        """Hand the state the weights of the window's entries: their logits again, over the total mass."""
        assert self.state is not None and self.context is not None
        near = self.plans[layer].branches[0].entries
        assert isinstance(near, Recent)
        length, reach = self.context.length, near.window + self.rows
        first = max(0, length - (reach - 1))
        at = torch.arange(first, length, device=self.device)
        exact = compute_dtype(self.dtype)
        keys = self._gathered(pages, at)[0].to(exact).transpose(0, 1)
        logits = fold_rows(turned, self.geometry.kv_heads).to(exact) @ keys.transpose(1, 2) * self.geometry.scale
        logits = unfold_rows(logits, self.rows)
        row = torch.arange(self.rows, device=self.device)[:, None]
        logits = logits.masked_fill((length + row - at >= reach)[:, None], -math.inf)
        self.state.observe(layer, first, torch.exp(logits - mass.to(exact)[..., None]).sum(0))

    def _check_told(self, length: int) -> None:
        told = None if self.context is None or not self.context.layers else self.context.length
        if told != length:
            seen = "was not told of any context" if told is None else f"was told of {told} entries"
            raise ValueError(f"{self.method.name} reads {length} context entries but {seen}: call committed() first")

    def _device_rope(self, rope: Rope) -> DeviceRope:
        return DeviceRope(
            rope.inv_freq.to(self.device).clone(),
            torch.tensor([rope.mscale], dtype=torch.float64, device=self.device),
        )


@dataclass(frozen=True, eq=False)
class _Part:
    """``out [B, Hq, dv]`` and ``lse [B, Hq]`` of one call's sharpened logits."""

    out: Tensor
    lse: Tensor
    sharpen: float = 1.0


class _PagedContext:
    """Pages as the :class:`methods.cache.ContextCache` that the states of InfLLM and CMR look entries up in."""

    def __init__(self, geometry: DrafterGeometry, capacity: int, dtype: torch.dtype, device: torch.device):
        self.geometry = geometry
        self.capacity = capacity
        self.length = 0
        self.layers: Sequence[PagedLayer] = ()
        shape = (len(geometry.layers), geometry.kv_heads, capacity + geometry.block)
        self.keys = _Lookup(self, True, (*shape, geometry.head_dim), dtype, device)
        self.values = _Lookup(self, False, (*shape, geometry.value_dim), dtype, device)

    def lay(self, length: int, layers: Sequence[PagedLayer]) -> None:
        """The context now has ``length`` entries, in ``layers``."""
        if len(layers) != len(self.geometry.layers):
            raise ValueError(f"the drafter has {len(self.geometry.layers)} layers, got pages of {len(layers)}")
        self.length = length
        self.layers = layers


@dataclass(frozen=True, eq=False)
class _Lookup:
    """``tensor[layers, :, entries]`` over pages: what the states use of a cache's ``[L, Hkv, capacity + B, d]``."""

    context: _PagedContext
    keys: bool  # or values
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def __getitem__(self, where: tuple[slice | list[int], slice, slice | Tensor]) -> Tensor:
        """``[layers, Hkv, n, d]``: a copy."""
        chosen, _, entries = where
        layers = range(self.shape[0])[chosen] if isinstance(chosen, slice) else chosen
        if isinstance(entries, slice):
            entries = torch.arange(self.shape[2], device=self.device)[entries]
        found = []
        for layer in layers:
            keys, values, table = _unrotated(self.context.layers[layer])
            found.append(_at(keys if self.keys else values, table, entries).transpose(0, 1))
        return torch.stack(found)

    def new_empty(self, shape: tuple[int, ...]) -> Tensor:
        """As a tensor's."""
        return torch.empty(shape, dtype=self.dtype, device=self.device)


def _near_and_far(plan: ReadPlan) -> tuple[Branch, Branch | None]:
    """The branch that reads the block, and the one at a shared distance if there is one."""
    (near,) = [branch for branch in plan.branches if branch.block]
    others = [branch for branch in plan.branches if not branch.block]
    if len(others) > 1 or any(not isinstance(branch.placement, SharedDistance) for branch in others):
        raise ValueError("a paged read is one branch with the block and at most one more at a shared distance")
    return near, others[0] if others else None


def _second_place(near: Branch, far: Branch | None) -> Place | None:
    """Where the second query of a layer is turned to."""
    if far is not None:
        assert isinstance(far.placement, SharedDistance)
        return Place(far.placement.distance, far.placement.follows_block)
    if isinstance(near.entries, Kept) and near.entries.sinks:
        return Place(near.entries.sinks + near.entries.recent, follows_block=True, capped=True, raw=False)
    return None


def _reads_raw(plan: ReadPlan) -> bool:
    return any(
        isinstance(branch.placement, SharedDistance) or isinstance(branch.entries, Retrieved)
        for branch in plan.branches
    )


def _terms(plan: ReadPlan, rows: int, first: bool) -> list[tuple[int, int, int]]:
    """What a read of N entries counts, each as ``min(max(0, (N - offset) * factor), most)``: the round (at the first
    layer), entries in the context, read near, read far, and read near but out of their place."""
    near, far = _near_and_far(plan)
    nothing, near_most, moved = (0, 0, 0), 0, (0, 0, 0)
    match near.entries:
        case All():
            near_most = UNBOUNDED
        case Recent(window):
            near_most = window + rows - 1
        case Sliding(size):
            near_most = size - 1
        case Last(count):
            near_most = count
        case Kept(sinks, recent):
            near_most = sinks + recent
            moved = (near_most, sinks, sinks)
    far_term = nothing
    if far is not None:
        match far.entries:
            case Older(window):
                far_term = (window, 1, UNBOUNDED)
            case SlidingGap(size):
                far_term = (max(0, size - rows), 1, UNBOUNDED)
    return [(-1, 1, 1 if first else 0), (0, 1, UNBOUNDED), (0, 1, near_most), far_term, moved]


def _unrotated(pages: PagedLayer) -> tuple[Tensor, Tensor, Tensor]:
    """Unrotated keys, the values beside them, and their table."""
    assert pages.raw_keys is not None
    values = pages.values if pages.raw_values is None else pages.raw_values
    return pages.raw_keys, values, pages.table if pages.raw_table is None else pages.raw_table


def _at(stored: Tensor, table: Tensor, entries: Tensor) -> Tensor:
    """``[n, Hkv, d]``: the entries at these positions, copied from their pages."""
    size = stored.shape[1]
    return stored[table[entries // size], entries % size]


def _span(stored: Tensor, table: Tensor | None, first: int, end: int) -> Tensor:
    """``[end - first, Hkv, d]``: entries ``first..end-1``, page by page."""
    if table is None:
        return stored[0, first:end]
    size = stored.shape[1]
    pages = table[first // size : -(-end // size)].clamp(0, stored.shape[0] - 1)
    start = first - first // size * size
    return stored[pages].flatten(0, 1)[start : start + end - first]


def _turn(query: Tensor, places: Tensor, rope: DeviceRope, scale: Tensor) -> Tensor:
    angle = places.to(torch.float64)[:, None, None] * rope.freq
    cos, sin = torch.cos(angle) * scale, torch.sin(angle) * scale
    return turn(query, torch.cat((cos, cos), -1).to(query.dtype), torch.cat((-sin, sin), -1).to(query.dtype))
