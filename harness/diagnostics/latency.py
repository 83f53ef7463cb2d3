"""Where the time of a step and of a round goes, at any context length (Figure 1), beside what memory alone allows.

The context is made up: random keys and values of the length asked for, since time depends on shapes alone. Parts of an
AR step are the target's attention over its KV cache, its other work, and sampling; of an SD round also the drafter's
attention over its context (rotations and merge included) and its other work (the commit of verified features included).
State-space layers of hybrid targets count as other work.

How parts are told apart: on a CPU by ranges of ``torch.profiler``; on a GPU eager passes by CUDA events around each
attention call, and steps that are CUDA graphs by capturing their attention alone as one more graph. The time of the
whole step or round is measured without any of that; what is left of it is the target's other work, the waiting of the
device for the host included.

The bound of a part is the bytes it must read (each once) over the bandwidth of a large copy on the same device, bytes
read and written counted. Nothing here needs more than torch and the reference engine.
"""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import torch

from harness.drafters import Drafter, tensor_shapes
from harness.engines.base import EngineError
from harness.engines.reference.dense import DenseTarget
from harness.engines.reference.engine import Drafting, ReferenceEngine
from harness.engines.reference.fixed import FixedDrafting
from harness.engines.reference.hf import around_attention
from methods.reading import Method

AR, SD = "AR", "SD"
TARGET_ATTENTION, TARGET_OTHER = "target attention", "other target work"
DRAFTER_ATTENTION, DRAFTER_OTHER, SAMPLING = "drafter attention", "drafter other", "sampling"
PARTS = (TARGET_ATTENTION, TARGET_OTHER, DRAFTER_ATTENTION, DRAFTER_OTHER, SAMPLING)
WARM_UPS = 2


@dataclass(frozen=True)
class Part:
    """One part of a step ("AR") or round ("SD") at a context length in tokens. bytes: what it must read; bound_ms: how
    long that takes at the copy's bandwidth; NaN where no bound is meant (sampling)."""

    context: int
    step: str
    method: str
    part: str
    ms: float
    bytes: float
    bound_ms: float


@dataclass(frozen=True)
class Reads:
    """Bytes that the parts of a step or a round must read."""

    context: int
    step: str
    method: str
    parts: dict[str, float]

    def bound_ms(self, bandwidth: float) -> float:
        """Of all parts together, at so many bytes per second."""
        return 1e3 * sum(self.parts.values()) / bandwidth

    def line(self, bandwidth: float) -> str:
        """For the log, before anything is measured."""
        told = " + ".join(f"{part} {size / 1e9:.3f} GB" for part, size in self.parts.items())
        name = self.step if self.step == AR else f"{self.step} {self.method}"
        return f"{self.context} {name}: must read {told}, at least {self.bound_ms(bandwidth):.3f} ms"


def measure(
    engine: ReferenceEngine,
    contexts: list[int],
    methods: dict[str, Method],
    *,
    repeats: int,
    bandwidth: float,
    say: Callable[[str], None],
) -> Iterator[list[Part]]:
    """Parts of a step and of each method's round, context by context; the bytes are said before the times.

    Raises EngineError if a context does not fit the target.
    """
    for context in contexts:
        room = (repeats + WARM_UPS) * 16 * 3
        engine.pretend(context, room, None)
        reads = ar_reads(engine, context)
        say(reads.line(bandwidth))
        parts = _parts(reads, bandwidth, *_ar(engine, repeats))
        say(_measured(parts))
        yield parts
        for name, method in methods.items():
            drafting = engine.pretend(context, room, method)
            assert drafting is not None
            reads = sd_reads(engine, drafting, name, context)
            say(reads.line(bandwidth))
            parts = _parts(reads, bandwidth, *_sd(engine, drafting, repeats))
            say(_measured(parts))
            yield parts


def copy_bandwidth(device: torch.device, size: int | None = None) -> float:
    """Bytes per second, read and written ones, of a copy too large for any cache: the best of several."""
    if size is None:
        size = 4 << 30 if device.type == "cuda" else 256 << 20
    source = torch.ones(size // 4, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    best = min(clock(lambda: target.copy_(source), device, 5))
    return 2 * source.nbytes / (best / 1e3)


def clock(step: Callable[[], Any], device: torch.device, repeats: int) -> list[float]:
    """Milliseconds of each call after two warm-ups, the device idle before and after."""
    for _ in range(WARM_UPS):
        step()
    found = []
    for _ in range(repeats):
        _settle(device)
        started = time.perf_counter()
        step()
        _settle(device)
        found.append(1e3 * (time.perf_counter() - started))
    return found


def replays(step: Callable[[], Any], device: torch.device, repeats: int) -> float:
    """Milliseconds of one call, many queued behind each other on a GPU so that starting them costs nothing."""
    for _ in range(WARM_UPS):
        step()
    _settle(device)
    started = time.perf_counter()
    for _ in range(repeats):
        step()
    _settle(device)
    return 1e3 * (time.perf_counter() - started) / repeats


# --------------------------------------------------------------------------------------------------------- what is read


def ar_reads(engine: ReferenceEngine, context: int) -> Reads:
    """Of one step: weights and keys and values of the context."""
    target, _ = engine.pair
    found = target.read_bytes(context)
    return Reads(context, AR, "ar", {TARGET_ATTENTION: found["attention"], TARGET_OTHER: found["weights"]})


def sd_reads(engine: ReferenceEngine, drafting: Drafting, method: str, context: int) -> Reads:
    """Of one round: the target's once for all its rows, the drafter's weights (its vocabulary head too), and the
    context entries that the method reads, as its reader counts them in one round."""
    target, drafter = engine.pair
    assert drafter is not None
    before = drafting.reader.activity()
    engine.round(0, drafting)
    now = drafting.reader.activity()
    entries = now["entries_read"] - before["entries_read"]
    config = drafter.config
    entry = config.kv_heads * (config.head_dim + config.value_dim) * drafter.dtype.itemsize
    found = target.read_bytes(context)
    return Reads(
        context,
        SD,
        method,
        {
            TARGET_ATTENTION: found["attention"],
            TARGET_OTHER: found["weights"],
            DRAFTER_ATTENTION: entries * entry,
            DRAFTER_OTHER: drafter_weight_bytes(drafter, target.vocab),
        },
    )


def drafter_weight_bytes(drafter: Drafter, vocab: int) -> int:
    """What a draft and a commit must read of a drafter's weights; the target's head where it borrows that."""
    config = drafter.config
    shapes = tensor_shapes(config)
    unread = {"embed_tokens.weight", "markov_head.markov_w1.weight", "confidence_head.proj.weight"}
    count = sum(math.prod(shape) for name, shape in shapes.items() if name not in unread)
    # the commit multiplies with the key and value weights once more
    count += sum(
        math.prod(shape) for name, shape in shapes.items() if name.endswith(("k_proj.weight", "v_proj.weight"))
    )
    if not config.ships_head:
        count += vocab * config.hidden
    return count * drafter.dtype.itemsize


# ----------------------------------------------------------------------------------------------------- what is measured


def _ar(engine: ReferenceEngine, repeats: int) -> tuple[float, dict[str, float]]:
    """Milliseconds of a step, and of the parts that were told apart."""
    target, _ = engine.pair
    device = target.device
    total = statistics.median(clock(lambda: engine.step(1), device, repeats))
    if target.has_fixed(1):
        logits = torch.randn(1, target.vocab, device=device).to(target.dtype)
        alone = replays(target.attention_alone(1), device, repeats)
        return total, {TARGET_ATTENTION: alone, SAMPLING: _sampling_alone(engine, logits, device, repeats)}
    with _ranges(device) as ranges, _wrapped(engine, None, ranges):
        for _ in range(repeats):
            with ranges.within(_WHOLE):
                engine.step(1)
    return total, ranges.scaled(total, (TARGET_ATTENTION, SAMPLING))


def _sd(engine: ReferenceEngine, drafting: Drafting, repeats: int) -> tuple[float, dict[str, float]]:
    """Milliseconds of a round, and of the parts that were told apart."""
    target, drafter = engine.pair
    assert drafter is not None
    device = target.device
    total = statistics.median(clock(lambda: engine.round(1, drafting), device, repeats))
    if isinstance(drafting, FixedDrafting):
        return total, _sd_by_isolation(engine, drafting, total, repeats)
    with _ranges(device) as ranges, _wrapped(engine, drafting, ranges):
        for _ in range(repeats):
            with ranges.within(_WHOLE):
                engine.round(1, drafting)
    found = ranges.scaled(total, (TARGET_ATTENTION, DRAFTER_ATTENTION, SAMPLING, _DRAFTER, _DRAFTER_SAMPLING))
    drafting_ms, choosing = found.pop(_DRAFTER), found.pop(_DRAFTER_SAMPLING)
    found[SAMPLING] += choosing
    found[DRAFTER_OTHER] = drafting_ms - found[DRAFTER_ATTENTION] - choosing
    return total, found


def _sd_by_isolation(
    engine: ReferenceEngine, drafting: FixedDrafting, total: float, repeats: int
) -> dict[str, float]:
    target, drafter = engine.pair
    assert drafter is not None
    device, rows = target.device, drafter.config.proposals + 1
    logits = torch.randn(rows, target.vocab, device=device).to(target.dtype)
    found = {SAMPLING: _sampling_alone(engine, logits, device, repeats)}
    drafter_ms = replays(lambda: drafting.replay(), device, repeats)
    found[DRAFTER_ATTENTION] = replays(drafting.attention_alone(), device, repeats)
    found[DRAFTER_OTHER] = max(0.0, drafter_ms - found[DRAFTER_ATTENTION])
    if target.has_fixed(rows):
        found[TARGET_ATTENTION] = replays(target.attention_alone(rows), device, repeats)
        return found
    with _ranges(device) as ranges, _wrapped(engine, None, ranges):
        for _ in range(repeats):
            with ranges.within(_WHOLE):
                engine.round(1, drafting)
    return found | ranges.scaled(total, (TARGET_ATTENTION,))


def _sampling_alone(engine: ReferenceEngine, logits: torch.Tensor, device: torch.device, repeats: int) -> float:
    return statistics.median(clock(lambda: engine.sample(logits), device, repeats))


def _parts(reads: Reads, bandwidth: float, total: float, told: dict[str, float]) -> list[Part]:
    """The target's other work is what remains of the whole."""
    told = told | {TARGET_OTHER: max(0.0, total - sum(told.values()))}
    return [
        Part(
            reads.context,
            reads.step,
            reads.method,
            part,
            told[part],
            reads.parts.get(part, math.nan),
            1e3 * reads.parts.get(part, math.nan) / bandwidth,
        )
        for part in PARTS
        if part in told
    ]


def _measured(parts: list[Part]) -> str:
    total = sum(part.ms for part in parts)
    told = ", ".join(f"{part.part} {part.ms:.3f} ms ({100 * part.ms / total:.0f}%)" for part in parts)
    name = parts[0].step if parts[0].step == AR else f"{parts[0].step} {parts[0].method}"
    return f"{parts[0].context} {name}: {total:.3f} ms: {told}"


_WHOLE, _DRAFTER, _DRAFTER_SAMPLING = "whole", "drafter", "drafter sampling"


class _Ranges:
    """Named stretches of time: ranges of the profiler on a CPU, pairs of CUDA events on a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {}
        self._profile: torch.profiler.profile | None = None
        self.ms: dict[str, float] = {}

    @contextmanager
    def within(self, name: str) -> Iterator[None]:
        if self._device.type == "cuda":
            pair = (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
            pair[0].record()
            yield
            pair[1].record()
            self._events.setdefault(name, []).append(pair)
        else:
            with torch.profiler.record_function(name):
                yield

    def close(self) -> None:
        if self._device.type == "cuda":
            _settle(self._device)
            self.ms = {name: sum(a.elapsed_time(b) for a, b in pairs) for name, pairs in self._events.items()}
        elif self._profile is not None:
            self.ms = {entry.key: entry.cpu_time_total / 1e3 for entry in self._profile.key_averages()}

    def scaled(self, total: float, names: tuple[str, ...]) -> dict[str, float]:
        """The share of each of the whole, times the whole's time without profiling."""
        whole = self.ms[_WHOLE]
        return {name: total * self.ms.get(name, 0.0) / whole for name in names}


@contextmanager
def _ranges(device: torch.device) -> Iterator[_Ranges]:
    ranges = _Ranges(device)
    if device.type == "cuda":
        profiling: AbstractContextManager[Any] = nullcontext()
    else:
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # it announces every start and stop
        profiling = ranges._profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
    with profiling:
        yield ranges
    ranges.close()


@contextmanager
def _wrapped(engine: ReferenceEngine, drafting: Drafting | None, ranges: _Ranges) -> Iterator[None]:
    """Put ranges around the parts, for as long as this lasts."""
    target, drafter = engine.pair
    replaced: list[tuple[Any, str]] = []

    def around(owner: Any, name: str, within: str) -> None:
        inner = getattr(owner, name)

        def ranged(*args: Any, **kwargs: Any) -> Any:
            with ranges.within(within):
                return inner(*args, **kwargs)

        setattr(owner, name, ranged)
        replaced.append((owner, name))

    around(engine, "sample", SAMPLING)
    if isinstance(target, DenseTarget):
        around(target, "attend", TARGET_ATTENTION)
    if drafting is not None and drafter is not None:
        around(drafting, "draft", _DRAFTER)
        around(drafting, "commit", _DRAFTER)
        around(drafting.reader, "read", DRAFTER_ATTENTION)
        if not drafter.config.markov_rank:  # a Markov head is work of the drafter between one token and the next
            around(drafter, "choose", _DRAFTER_SAMPLING)
    try:
        with around_attention(lambda: ranges.within(TARGET_ATTENTION)):
            yield
    finally:
        for owner, name in replaced:
            delattr(owner, name)  # the method of its class again


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def as_rows(parts: list[Part]) -> list[dict[str, Any]]:
    """Rows of latency.csv."""
    return [asdict(part) for part in parts]


def default_contexts(longest: int) -> list[int]:
    """1K, 2K, ... up to 128K (Figure 1), as far as ``longest`` positions hold them. Raises EngineError if none."""
    found = [1024 << power for power in range(8) if 1024 << power <= longest]
    if not found:
        raise EngineError(f"no context of 1,024 tokens or more fits {longest} positions: diagnostic.contexts=[...]")
    return found


__all__ = [
    "AR",
    "PARTS",
    "SD",
    "Part",
    "Reads",
    "ar_reads",
    "as_rows",
    "clock",
    "copy_bandwidth",
    "default_contexts",
    "drafter_weight_bytes",
    "measure",
    "replays",
    "sd_reads",
]
