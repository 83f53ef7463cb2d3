"""How a read is cut: by a microbenchmark on its actual shapes, once per device and shape (Appendix B.4).

The choice depends on shapes, bounds and dtype alone, so methods with the same read share it: FOLD and ReRoPE theirs,
Window and the local read of InfLLM theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch

from methods.paged import Call

SPLITS = (1, 8, 16, 32, 64)  # Appendix B.4
REPEATS = 32
CACHE = 2**28  # bytes, several times the largest device cache

Cut = TypeVar("Cut")
_chosen: dict[tuple[Any, ...], Any] = {}


def choose(
    calls: Sequence[Call],
    longest: int,
    cuts: Sequence[Cut],
    launch: Callable[[Sequence[Call], Cut], object],
    *,
    untimed: Cut,
    unfit: tuple[type[Exception], ...],
) -> Cut:
    """The fastest of ``cuts`` for calls shaped as these over ``longest`` keys.

    Measured on synthetic keys, outside of graphs: raises RuntimeError if a graph is being captured and the shape is not
    known yet. ``untimed``: the choice where nothing can be timed (the interpreter on a CPU). A cut whose launch raises
    one of ``unfit`` does not fit the device and is left out; RuntimeError if none fits.
    """
    device = calls[0].query.device
    if device.type != "cuda":
        return untimed
    key = (torch.cuda.get_device_name(device), longest, tuple(cuts), *(_shape(call) for call in calls))
    if key not in _chosen:
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError("a read's splits are not chosen yet: read once before a graph is captured")
        _chosen[key] = _fastest(calls, longest, cuts, launch, unfit)
        torch.cuda.empty_cache()  # the synthetic keys are as large as a context
    found: Cut = _chosen[key]
    return found


def chosen() -> dict[str, str]:
    """What was chosen in this process so far, by device and shape, in words: for a run's records."""
    return {" ".join(map(str, (*key[:2], *key[3:]))): str(value) for key, value in _chosen.items()}


def _shape(call: Call) -> tuple[Any, ...]:
    paged = None if call.table is None else call.keys.shape[1]
    dims = tuple(call.query.shape), call.keys.shape[2], call.values.shape[3]
    return (*dims, call.query.dtype, call.left, call.right, paged)


def _fastest(
    calls: Sequence[Call],
    longest: int,
    cuts: Sequence[Cut],
    launch: Callable[[Sequence[Call], Cut], object],
    unfit: tuple[type[Exception], ...],
) -> Cut:
    chance = torch.Generator(calls[0].query.device).manual_seed(0)  # the engine's own numbers must not change
    made = [[_synthetic(call, longest, chance) for call in calls]]
    # A drafter's other work pushes a read's keys out of the cache, so no copy is read twice in a row.
    held = sum(x.nbytes for call in made[0] for x in (call.keys, call.values))
    made += [[_synthetic(call, longest, chance) for call in calls] for _ in range(min(REPEATS - 1, CACHE // held))]
    times: list[tuple[float, int]] = []
    for number, cut in enumerate(cuts):
        try:
            times.append((_time([partial(launch, read, cut) for read in made]), number))
        except unfit:
            continue
    if not times:
        raise RuntimeError(f"no cut of a read fits {torch.cuda.get_device_name()}: tried {', '.join(map(str, cuts))}")
    return cuts[min(times)[1]]


def _synthetic(call: Call, longest: int, chance: torch.Generator) -> Call:
    """The call over ``longest`` keys, or those that its bound reads, of its own device memory; in shuffled pages if it
    is paged."""
    device, kind = call.query.device, call.keys.dtype
    count = longest if call.left is None else min(longest, call.left + call.query.shape[0])
    size = count if call.table is None else call.keys.shape[1]
    pages = -(-count // size)
    query = torch.randn(call.query.shape, dtype=kind, device=device, generator=chance)
    keys, values = (
        torch.randn(pages, size, *x.shape[2:], dtype=kind, device=device, generator=chance)
        for x in (call.keys, call.values)
    )
    table = None
    if call.table is not None:
        table = torch.randperm(pages, device=device, generator=chance).to(call.table.dtype)
    length = torch.tensor([count], dtype=torch.int32, device=device)
    return replace(call, query=query, keys=keys, values=values, table=table, length=length, shift=0, most=None)


def _time(runs: Sequence[Callable[[], object]]) -> float:
    """Milliseconds of a run, replayed from a graph so that the host's launches do not count."""
    runs[0]()  # compile
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for number in range(REPEATS):
            runs[number % len(runs)]()
    graph.replay()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / REPEATS
