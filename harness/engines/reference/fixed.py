"""Steps of fixed shape: on a GPU captured once as a CUDA graph and replayed, elsewhere simply called.

A round at batch size one is hundreds of small kernels, and starting them from Python takes longer than running them. So
everything that changes from round to round (token ids, positions, the context's length) lies in device memory, every
shape is fixed, and one graph serves all lengths. On a CPU the same functions run as they are, which is how the tests
hold them against the engine's ordinary path.

A drafting method has three such steps: the draft, the draft while no entry is far yet (*length dispatch*, Appendix B.4:
a window-only graph while the sequence is no longer than W), and the commit of verified features. The target has one for
a single row and one for a block (:class:`FixedPass`). InfLLM and CMR choose entries on the host, so their draft runs
as it is, on the same kernels.

Storage, all the engine's own: unrotated keys and values once for all methods (``methods.cache``), and for a method what
it reads rotated: all keys where it reads them all at true distances, else a ring of pages as long as its window.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar, cast

import torch
from torch import Tensor

from harness.drafters import Drafter
from harness.engines.base import EngineError
from harness.engines.reference.target import Step
from methods.cache import ContextCache, DrafterGeometry
from methods.paged import (
    Attend,
    Fused,
    Merge,
    PagedLayer,
    PagedReader,
    Rotate,
    torch_attend,
    torch_merge,
    torch_rotate,
)
from methods.reading import (
    All,
    Branch,
    Kept,
    Last,
    LayerGeometry,
    Layers,
    Method,
    Older,
    ReadPlan,
    Recent,
    RequestGeometry,
    Retrieved,
    Sliding,
    SlidingGap,
)

T = TypeVar("T")
PAGE = 64  # entries of a page; a context's storage is a whole number of pages
PIECE = 1024  # entries rotated at once after a prefill
WARM_UPS = 2  # runs of a step before its capture: kernels are compiled and workspaces made


class Fixed(Generic[T]):
    """``step()`` on fixed buffers; its result's tensors are overwritten by the next call."""

    _pool: ClassVar[Any] = None  # one memory pool for all graphs, which never run at the same time

    def __init__(self, step: Callable[[], T], device: torch.device) -> None:
        self._step, self._device = step, device
        self._graph: torch.cuda.CUDAGraph | None = None
        self._result: T | None = None

    @torch.inference_mode()
    def capture(self) -> bool:
        """On a GPU, capture the step if it is not yet; returns whether that was done now. The step then ran a few times
        with what its buffers hold."""
        if self._device.type != "cuda" or self._graph is not None:
            return False
        stream = torch.cuda.Stream(self._device)
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            for _ in range(WARM_UPS):
                self._step()
        torch.cuda.current_stream(self._device).wait_stream(stream)
        if Fixed._pool is None:
            Fixed._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=Fixed._pool):
            self._result = self._step()
        self._graph = graph
        return True

    @torch.inference_mode()
    def __call__(self) -> T:
        if self._device.type != "cuda":
            return self._step()
        self.capture()
        assert self._graph is not None
        self._graph.replay()
        return cast(T, self._result)


class FixedPass:
    """A target's pass of R rows with fixed shapes. ``compute(self)`` does the work with what the buffers hold: token
    ``ids`` [R] that follow ``start`` [1] entries held."""

    def __init__(self, rows: int, device: torch.device, compute: Callable[[FixedPass], tuple[Step, Tensor]]) -> None:
        self.ids = torch.zeros(rows, dtype=torch.int64, device=device)
        self.start = torch.zeros(1, dtype=torch.int32, device=device)
        self._row = torch.arange(rows, device=device)
        self.step = Fixed(lambda: compute(self), device)

    @property
    def places(self) -> Tensor:
        """Positions of the rows, int64 [R]."""
        return self.start + self._row

    @property
    def stop(self) -> Tensor:
        """Entries held with these rows, int32 [1]."""
        return self.start + len(self._row)

    def __call__(self, ids: Sequence[int], start: int) -> tuple[Step, Tensor]:
        """Logits and features of ``ids`` at positions ``start``.. and the watched layer's queries; the next call
        overwrites all of it."""
        self.ids.copy_(torch.tensor(ids))
        self.start.fill_(start)
        return self.step()

    def ready(self, start: int) -> None:
        """On a GPU, capture the step; what that writes lies behind the ``start`` entries held."""
        self.start.fill_(start)
        self.step.capture()


@dataclass(frozen=True)
class Executors:
    """What reads a cache on a device: attention, query rotation, merge, and all in one (``methods.paged``)."""

    attend: Attend = torch_attend
    rotate: Rotate = torch_rotate
    merge: Merge = torch_merge
    fused: Fused | None = None


def triton_executors(longest: int) -> Executors:
    """The Triton kernels, for reads of up to ``longest`` keys. Raises EngineError, one line, where they cannot run."""
    from methods.kernels import executors

    try:
        return Executors(**executors(longest))
    except RuntimeError as error:
        raise EngineError(f"CUDA graphs need the Triton kernels: {error}; engine.graphs=false runs without") from None


@dataclass(frozen=True)
class NearOnly:
    """A method while none of its far entries exists yet: only the branch that reads the block (Appendix B.4)."""

    method: Method
    name: ClassVar[str] = "near_only"

    @property
    def layers(self) -> Layers:
        """Those of the method."""
        return self.method.layers

    def plan(self, layer: LayerGeometry, request: RequestGeometry) -> ReadPlan:
        """The method's plan without its far branches."""
        plan = self.method.plan(layer, request)
        return ReadPlan(tuple(b for b in plan.branches if b.block), plan.rope, plan.query_scale)


def far_from(method: Method, geometry: DrafterGeometry) -> int | None:
    """The smallest context length at which the method reads a far entry in any layer; None if it never does."""
    request, rows = RequestGeometry(1, 1, geometry.block), geometry.block
    starts = [
        # the last row reads entry 0 from here on
        branch.entries.window + 1 if isinstance(branch.entries, Older) else max(1, branch.entries.size - rows + 1)
        for layer in geometry.layers
        for branch in method.plan(layer, request).branches
        if isinstance(branch.entries, Older | SlidingGap)
    ]
    return min(starts, default=None)


class FixedReader:
    """A method's reads of a request's cache with fixed shapes: a :class:`methods.reader.Reader` for one drafter, many
    requests, over one :class:`~methods.cache.ContextCache` whose storage stays where it is.

    ``host_driven``: the method chooses entries on the host, so that its reads cannot be captured. Raises ValueError for
    a cache that is no whole number of pages.
    """

    def __init__(self, method: Method, cache: ContextCache, executors: Executors) -> None:
        geometry = cache.geometry
        self.cache, self.geometry, self.rows = cache, geometry, geometry.block
        dtype, self.device = cache.keys.dtype, cache.keys.device
        self._rotate = executors.rotate
        made = {"max_context": cache.capacity, "dtype": dtype, "device": self.device, **vars(executors)}
        self.paged = PagedReader(method, geometry, **made)
        self.host_driven = self.paged.host_driven
        self.far_from = far_from(method, geometry)
        self.near = PagedReader(NearOnly(method), geometry, **made) if self.far_from is not None else self.paged
        self.active = self.paged
        self.length = torch.zeros(1, dtype=torch.int32, device=self.device)  # N
        self._held = self._marked = 0
        entries = cache.keys.shape[2]
        if entries % PAGE:
            raise ValueError(f"a cache of {entries} rows is no whole number of pages of {PAGE}")
        self._whole_table = torch.arange(entries // PAGE, dtype=torch.int32, device=self.device)
        self._row = torch.arange(self.rows, device=self.device)
        plans = [method.plan(layer, RequestGeometry(1, 1, self.rows)) for layer in geometry.layers]
        spans: dict[tuple[int, int, bool], list[int]] = {}
        for index, plan in enumerate(plans):
            pinned, span = _reach(next(b for b in plan.branches if b.block), self.rows, entries)
            spans.setdefault((pinned, span, plan.rope is not None), []).append(index)
        self.stores = [_Rotated(cache, layers, pinned, span) for (pinned, span, _), layers in spans.items()]
        self._store = {layer: store for store in self.stores for layer in store.layers}
        raw = {"raw_values": None, "raw_table": self._whole_table}
        self.pages: list[PagedLayer] = []
        for layer in range(len(geometry.layers)):
            keys, values, table = self._store[layer].pages(layer)
            raw["raw_values"] = _paged(cache.values[layer])
            self.pages.append(PagedLayer(keys, _paged(cache.keys[layer]), values, table, **raw))

    def begin(self, request: RequestGeometry) -> None:
        """A new request, or another decode of one: its prompt is in the cache, nothing of it is rotated yet."""
        for reader in {id(r): r for r in (self.paged, self.near)}.values():
            reader.begin(request)
        self._held = 0
        self.rounds_near = 0

    @torch.inference_mode()
    def prepare(self) -> None:
        """After prefill, untimed: rotate what the method reads rotated of the context in the cache."""
        self._held = end = self.cache.length
        self.length.fill_(end)
        for store in self.stores:
            for first, last in store.present(end):
                for start in range(first, last, PIECE):
                    places = torch.arange(start, min(last, start + PIECE), device=self.device)
                    part = (store.layers, slice(None), slice(start, start + len(places)))
                    self._write(store, places, self.cache.keys[part], self.cache.values[part])
        self.paged.committed(end, self.pages)

    def choose(self) -> bool:
        """Take the window-only read while nothing is far (length dispatch); returns whether it is taken."""
        short = self.far_from is not None and self._held < self.far_from
        self.active = self.near if short else self.paged
        return short

    def read(self, layer: int, q: Tensor, kb: Tensor, vb: Tensor) -> Tensor:
        """As :meth:`methods.reader.Reader.read`: the block's keys are rotated and laid behind the context's first."""
        places = self.length + self._row
        turned = self._turn(kb, self.length, layer)
        self._store[layer].put(layer, places, turned.transpose(0, 1), vb.transpose(0, 1))
        return self.active.read(layer, q, self.pages[layer], self.length)

    def append(self, keys: Tensor, values: Tensor) -> None:
        """A fixed step: lay n entries ``[L, n, Hkv, d]`` at N..N+n-1; N itself moves with :meth:`committed`."""
        places = self.length + torch.arange(keys.shape[1], device=self.device)
        raw, held = keys.transpose(1, 2), values.transpose(1, 2)
        self.cache.keys.index_copy_(2, places, raw)
        self.cache.values.index_copy_(2, places, held)
        for store in self.stores:
            self._write(store, places, raw[store.layers], held[store.layers])

    def committed(self, start: int, end: int) -> None:
        """Of the entries just appended, ``start..end-1`` count. Raises ValueError if ``start`` is not N."""
        if start != self._held:
            raise ValueError(f"committed({start}, {end}): the reader holds {self._held} entries")
        self._held = self.cache.length = end
        self.length.fill_(end)
        self.paged.committed(end, self.pages)

    def round_done(self) -> None:
        """All layers of a draft block have been read."""
        self.rounds_near += self.active is not self.paged

    def wants_target_attention(self) -> bool:
        """Ask before a verification: must it yield the target's attention (CMR)?"""
        return self.paged.wants_target_attention()

    def target_attention(self, weights: Tensor) -> None:
        """``weights [N]`` of position t - 1 over the context, averaged over heads."""
        self.paged.target_attention(weights)

    def extra_bytes(self) -> int:
        """Bytes held beyond the shared cache."""
        state, packed = self.paged.state, self.paged.packed
        chosen = 0 if packed is None else packed.keys.nbytes + packed.values.nbytes
        return sum(store.nbytes for store in self.stores) + chosen + (0 if state is None else state.nbytes())

    def activity(self) -> dict[str, int]:
        """Counters of both reads, and how many rounds took the window-only one."""
        counted = dict(self.paged.activity())
        if self.near is not self.paged:
            for name, value in self.near.activity().items():
                counted[name] += value
            counted["window_only_rounds"] = self.rounds_near
        return counted

    def _write(self, store: _Rotated, places: Tensor, raw: Tensor, values: Tensor) -> None:
        """Rotate ``raw [Lg, Hkv, n, d]`` of a store's layers to ``places [n]`` and lay it there."""
        layers, heads, count, dim = raw.shape
        # one launch for all layers: they are so many more heads
        flat = raw.permute(2, 0, 1, 3).reshape(count, layers * heads, dim)
        turned = self._turn(flat, places[:1].to(torch.int32), store.layers[0])
        store.put_all(places, turned.unflatten(1, (layers, heads)).permute(1, 2, 0, 3), values)

    def _turn(self, keys: Tensor, start: Tensor, layer: int) -> Tensor:
        """``keys [n, H, d]`` rotated to ``start``, ``start + 1``, ... by the layer's embedding."""
        return self._rotate(keys, start, self.paged.ropes[layer], far=None, scaling=None)[0]


class _Rotated:
    """Rotated keys, and the values beside them, of some layers: everything, or the first ``pinned`` and the last
    ``span`` entries in a ring of pages. Whole storage shares the cache's values; a ring has a copy of its window's."""

    def __init__(self, cache: ContextCache, layers: list[int], pinned: int, span: int) -> None:
        geometry, entries = cache.geometry, cache.keys.shape[2]
        self.layers, self._slot = layers, {layer: slot for slot, layer in enumerate(layers)}
        self._pinned = -(-pinned // PAGE)
        # The block is laid while all of the window is still needed, and a commit lays rejected rows too.
        ring = -(-(span + 2 * (geometry.block + 1)) // PAGE) + 1
        count = entries // PAGE
        self.whole = self._pinned + ring >= count
        held = count if self.whole else self._pinned + ring
        self._span = entries if self.whole else span
        page = torch.arange(count, dtype=torch.int32, device=cache.keys.device)
        if not self.whole:
            page = torch.where(page < self._pinned, page, self._pinned + (page - self._pinned) % ring)
        self.table = page
        shape = (len(layers), geometry.kv_heads, held * PAGE)
        # zeros: a page that was never written must hold numbers, since masked products touch it
        self.keys = cache.keys.new_zeros((*shape, geometry.head_dim))
        self._shared = cache.values if self.whole else None
        self.values = cache.values[:0] if self.whole else cache.values.new_zeros((*shape, geometry.value_dim))

    def present(self, end: int) -> list[tuple[int, int]]:
        """Which of ``end`` entries are held, as ranges."""
        first = max(0, end - self._span)
        pinned = min(self._pinned * PAGE, first)
        return [(0, pinned), (first, end)]

    def pages(self, layer: int) -> tuple[Tensor, Tensor, Tensor]:
        """Keys ``[pages, PAGE, Hkv, d]``, values and table of one layer."""
        values = self.values[self._slot[layer]] if self._shared is None else self._shared[layer]
        return _paged(self.keys[self._slot[layer]]), _paged(values), self.table

    def put(self, layer: int, places: Tensor, keys: Tensor, values: Tensor) -> None:
        """``[Hkv, n, d]`` of one layer at ``places [n]``."""
        slots = self._slots(places)
        self.keys[self._slot[layer]].index_copy_(1, slots, keys)
        if self._shared is None:
            self.values[self._slot[layer]].index_copy_(1, slots, values)
        else:
            self._shared[layer].index_copy_(1, places, values)

    def put_all(self, places: Tensor, keys: Tensor, values: Tensor) -> None:
        """``[Lg, Hkv, n, d]`` of all layers; whole storage has the values already."""
        slots = self._slots(places)
        self.keys.index_copy_(2, slots, keys)
        if self._shared is None:
            self.values.index_copy_(2, slots, values)

    @property
    def nbytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes

    def _slots(self, places: Tensor) -> Tensor:
        return self.table[places // PAGE].long() * PAGE + places % PAGE


def _paged(held: Tensor) -> Tensor:
    """``[Hkv, rows, d]`` as ``[pages, PAGE, Hkv, d]``, no copy."""
    return held.unflatten(1, (-1, PAGE)).permute(1, 2, 0, 3)


def _reach(branch: Branch, rows: int, entries: int) -> tuple[int, int]:
    """Which rotated entries a near branch reads: the first so many, and the last so many before the block."""
    match branch.entries:
        case Recent(window):
            return 0, window + rows
        case Sliding(size):
            return 0, size
        case Last(count):
            return 0, count
        case Kept(sinks, recent):
            return sinks, recent
        case All():
            return 0, entries
        case Retrieved():  # read where they lie unrotated; the block alone is laid here
            return 0, 0
    raise AssertionError(branch.entries)


class FixedDrafting:
    """The rounds of one method as fixed steps. ``commit_rows``: K + 1, the rows of a verification."""

    def __init__(self, drafter: Drafter, method: Method, cache: ContextCache, executors: Executors) -> None:
        self.reader = FixedReader(method, cache, executors)
        self._drafter, self._cache = drafter, cache
        rows, width = drafter.config.proposals + 1, len(drafter.config.target_layer_ids) * drafter.config.hidden
        self.anchor = torch.zeros(1, dtype=torch.int64, device=drafter.device)
        self.features = torch.zeros(rows, width, dtype=drafter.dtype, device=drafter.device)
        drafted_on = torch.device("cpu") if self.reader.host_driven else drafter.device  # there, nothing is captured
        self._draft = {
            short: Fixed(lambda: self._drafter.propose(self.anchor, self.reader)[0], drafted_on)
            for short in (False, True)
        }
        self._commit = Fixed(lambda: self.reader.append(*self._drafter.context_kv(self.features)), drafter.device)

    def begin(self, request: RequestGeometry) -> None:
        """Start a decode of the prompt in the cache; on a GPU, capture what it will need, untimed."""
        reader = self.reader
        reader.begin(request)
        reader.prepare()
        captured, bound, last = self._commit.capture(), reader.far_from, request.prompt + request.limit
        for short, step in self._draft.items():
            if (bound is not None and request.prompt < bound) if short else (bound is None or last >= bound):
                reader.active = reader.near if short else reader.paged
                captured |= step.capture()
        if captured:
            reader.begin(request)  # those runs were counted
            reader.prepare()

    def draft(self, anchor: int) -> list[int]:
        """The K tokens drafted after ``anchor``."""
        self.anchor.fill_(anchor)
        tokens = self._draft[self.reader.choose()]()
        self.reader.round_done()
        return tokens.tolist()

    def replay(self) -> None:
        """A draft and a commit of what the buffers hold, with no word from or to the host: for timing."""
        self._draft[self.reader.choose()]()
        self._commit()

    def attention_alone(self) -> Fixed[Tensor]:
        """All layers' reads, the rotation of query and block keys among them, as a step of its own."""
        geometry, reader = self.reader.geometry, self.reader
        reader.choose()
        made = [
            torch.randn(geometry.block, heads, dim, dtype=torch.float32, device=reader.device).to(self.features.dtype)
            for heads, dim in (
                (geometry.q_heads, geometry.head_dim),
                (geometry.kv_heads, geometry.head_dim),
                (geometry.kv_heads, geometry.value_dim),
            )
        ]
        layers = range(len(geometry.layers))
        return Fixed(lambda: [reader.read(layer, *made) for layer in layers][-1], reader.device)

    def commit(self, features: Tensor, start: int, end: int) -> None:
        """The features ``[K + 1, F * H]`` of a verification, of which ``end - start`` rows are committed."""
        self.features.copy_(features)
        self._commit()
        self.reader.committed(start, end)
