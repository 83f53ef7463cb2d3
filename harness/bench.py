"""The paired run of one unit of work: every request autoregressively and by every method, on one device.

A unit is (pair, engine, benchmark, shard). An engine that can alternate between arms decodes each request by all of
them, in an order that rotates within each length level, so that no arm always comes first (a base-first order alone
biases an A/A control by several percent, facts/peers.md C.2). Another engine runs arm after arm. Either way a few
requests are decoded autoregressively once more at the end, which bounds the drift of the machine.

Resuming is the same call: a cell (request, arm, device) that has a good record is not decoded again. Records of
different devices are never paired, so a request that is incomplete on another device is measured anew on this one.
"""

from __future__ import annotations

import socket
import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import UTC, datetime
from functools import partial
from itertools import islice
from typing import Any, Protocol, TypeVar

from harness.engines.base import Engine, EngineInfo, Generation
from harness.guards import (
    Agreement,
    Work,
    describe_error,
    differing_settings,
    first_difference,
    judge,
    near_tie_bound,
    repetition,
    settings,
    work_flags,
    wrong_output,
)
from harness.records import AR, AR_AGAIN, JsonLines, Record, RecordWriter, broken_invariant
from harness.requests import Request, prompt_sha256

T = TypeVar("T")

# An arm that fails this often without a success in between is given up: the engine has died, or the method cannot run
# here.
FAILURES_IN_A_ROW = 3
# Autoregressive outputs judged by the target although no arm differs: an engine could be wrong in all arms alike.
CHECKED_BASELINES = 2


@dataclass(frozen=True)
class Arm:
    """One way to decode. method: what the engine receives, None for autoregressive. options: what is recorded of it."""

    name: str
    method: Any | None = None
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Unit:
    """What one job does. requests: opens the unit's request file anew (memory does not grow with its length)."""

    pair: str
    engine: str
    benchmark: str
    requests: Callable[[], Iterable[Request]]
    count: int
    shard: int = 0
    shards: int = 1

    @property
    def name(self) -> str:
        return f"{self.pair}/{self.engine}/{self.benchmark}/{self.shard}of{self.shards}"

    def __iter__(self) -> Iterator[Request]:
        return islice(iter(self.requests()), self.shard, None, self.shards)

    def __len__(self) -> int:
        return len(range(self.shard, self.count, self.shards))


@dataclass(frozen=True)
class Options:
    """warmup_tokens: limit of a warm-up decode (0: none). drift_requests: decoded autoregressively again at the end.
    max_gap: near-tie bound of the output gate in logits, None for the one of the target's dtype."""

    warmup_tokens: int = 16
    drift_requests: int = 3
    max_gap: float | None = None


@dataclass
class Report:
    """What a unit came to, whatever earlier starts of it had done already.

    cells: requests x arms. decoded: cells decoded by this start. failed: reason by "request by arm". missing: cells
    without a record that did not fail now. refused: arms that must not be paired. gates: outputs that the target does
    not stand behind. flags: signs to be read beside the numbers. skipped_rounds: rounds without a drafter. exact:
    outputs equal to the autoregressive ones, and all, by arm. engine_s, wall_s: seconds inside the engine, and of the
    whole call.
    """

    unit: str
    cells: int = 0
    decoded: int = 0
    failed: dict[str, str] = field(default_factory=dict)
    missing: int = 0
    refused: list[str] = field(default_factory=list)
    gates: list[str] = field(default_factory=list)
    flags: list[str] = field(default_factory=list)
    skipped_rounds: int = 0
    exact: dict[str, tuple[int, int]] = field(default_factory=dict)
    engine_s: float = 0.0
    wall_s: float = 0.0

    @property
    def ok(self) -> bool:
        """Whether nothing failed, is missing or was refused; flags alone do not make a run fail."""
        return not (self.failed or self.missing or self.refused or self.gates)


class Progress(Protocol):
    """Where a unit reports: a terminal, a log, or nothing."""

    def begin(self, unit: Unit, cells: int, done: int) -> None: ...
    def cell(self, record: Record) -> None: ...
    def note(self, text: str) -> None: ...


def arms_of(methods: Sequence[tuple[str, Any | None, dict[str, Any]]]) -> list[Arm]:
    """Arms of a run from (name, method, options): AR is always the first, a name that occurs again gets "#2".

    AR given twice is the A/A control: "ar" and "ar#2" are the same work, so their speedup must be 1 within its
    interval.
    """
    seen: Counter[str] = Counter()
    arms = []
    for name, method, options in [*([] if any(m[0] == AR for m in methods) else [(AR, None, {})]), *methods]:
        seen[name] += 1
        arms.append(Arm(name if seen[name] == 1 else f"{name}#{seen[name]}", method, options))
    return sorted(arms, key=lambda arm: arm.name != AR)


def run_unit(
    engine: Engine,
    unit: Unit,
    arms: Sequence[Arm],
    writer: RecordWriter,
    agreement: JsonLines,
    judged: Iterable[dict[str, Any]],
    progress: Progress,
    options: Options,
    on_arm: Callable[[Arm, EngineInfo], str | None] = lambda arm, info: None,
) -> Report:
    """Decode what is missing of a unit and return the report.

    judged: lines that agreement.jsonl already holds. on_arm: called with what really runs before an arm's first
    token; a text it returns refuses the arm. Raises RecordError when nothing more can be written.
    """
    mine = [line for line in judged if line["unit"] == unit.name]
    return _UnitRun(engine, unit, arms, writer, agreement, mine, progress, options, on_arm).run()


def bucket(request: Request) -> str:
    """What shares a warm-up and a rotation: the request file's level, else a power of two of the prompt's length."""
    level = request.meta.get("level")
    return f"2^{len(request.prompt_ids).bit_length()}" if level is None else str(level)


@dataclass(frozen=True)
class _Output:
    ids: array[int]
    finish: str

    def work(self) -> Work:
        return Work(len(self.ids), self.finish, repetition(self.ids))


class _UnitRun:
    """The state of one call of run_unit."""

    def __init__(
        self,
        engine: Engine,
        unit: Unit,
        arms: Sequence[Arm],
        writer: RecordWriter,
        agreement: JsonLines,
        judged: Iterable[dict[str, Any]],
        progress: Progress,
        options: Options,
        on_arm: Callable[[Arm, EngineInfo], str | None],
    ) -> None:
        self.engine, self.unit, self.arms, self.writer, self.log = engine, unit, list(arms), writer, agreement
        self.progress, self.options, self.on_arm = progress, options, on_arm
        self.report = Report(unit.name)
        self.host = socket.gethostname()
        self.baseline: dict[str, Any] | None = None
        self.device = ""
        self.allowed = 0.0
        self.judged = {(line["request_id"], line["arm"], line["device_uuid"]): line for line in judged}
        self.failures: Counter[str] = Counter()
        self.warm: set[tuple[str, str]] = set()
        self.checked = 0
        # Good outputs by request, device and arm. The gate and the flags need nothing else of a record, and arrays
        # are compact.
        self.good: dict[str, dict[str, dict[str, _Output]]] = {}
        self.attempts: Counter[tuple[str, str, str]] = Counter()
        self.order = 1 + max((record.order for record in writer.existing), default=-1)
        for record in writer.existing:
            if record.unit == unit.name and not record.warmup:
                self._remember(record)

    def run(self) -> Report:
        started = time.perf_counter()
        self.report.cells = len(self.unit) * len(self.arms)
        self.progress.begin(self.unit, self.report.cells, self._measured())
        if self.engine.interleaved:
            arms = [arm for arm in self.arms if self._admit(arm)]
            for request, turn in self._turns():
                first = turn % max(len(arms), 1)
                self._decode_missing(request, [*arms[first:], *arms[:first]])
                self._judge(request)
            self._again()
        else:
            for arm in self.arms:
                # Starting an arm costs a minute on a GPU; the first one says which device this is.
                if (self.baseline is None or self._lacking(arm)) and self._admit(arm):
                    for request in self.unit:
                        self._decode_missing(request, [arm])
            self._again()
            for request in self.unit:
                self._judge(request)
        self._conclude()
        self.report.wall_s = time.perf_counter() - started
        return self.report

    # ----------------------------------------------------------------------------------------------------------
    # decoding

    def _admit(self, arm: Arm) -> bool:
        """Ask the engine what it really runs for an arm. False if that may not be paired with the other arms."""
        try:
            info = self._timed(lambda: self.engine.describe(arm.method))
        except Exception as error:
            self.report.refused.append(f"{arm.name}: {describe_error(error)}")
            return False
        mine = settings(info)
        if self.baseline is None:
            self.baseline, self.device = mine, info.device_uuid
            self.allowed = near_tie_bound(info.dtype) if self.options.max_gap is None else self.options.max_gap
        differing = differing_settings(self.baseline, mine)
        if info.device_uuid != self.device:
            differing.append(f"device: {self.device}, {info.device_uuid}")
        trouble = f"runs under other settings than {self.arms[0].name} ({'; '.join(differing)})" if differing else None
        trouble = trouble or self.on_arm(arm, info)
        if trouble:
            self.report.refused.append(f"{arm.name} {trouble}")
        return not trouble

    def _lacking(self, arm: Arm) -> bool:
        """Whether an arm has anything left to decode on this device."""
        return any(arm.name not in self._here(each.id) and not self._paired_elsewhere(each) for each in self.unit)

    def _turns(self) -> Iterator[tuple[Request, int]]:
        """Requests with their rotation, counted within a level: else one arm might always come first at one length."""
        turns: Counter[str] = Counter()
        for request in self.unit:
            yield request, turns[bucket(request)]
            turns[bucket(request)] += 1

    def _decode_missing(self, request: Request, arms: Sequence[Arm]) -> None:
        if self._paired_elsewhere(request):
            return
        have = self._here(request.id)
        for arm in arms:
            if arm.name not in have and self.failures[arm.name] < FAILURES_IN_A_ROW:
                for each in arms:
                    self._warm_up(request, each)
                self._decode(request, arm)

    def _measured(self) -> int:
        """Cells that earlier starts have measured, on whichever device holds most of a request."""
        names = {arm.name for arm in self.arms}
        return sum(max(len(names & outputs.keys()) for outputs in devices.values()) for devices in self.good.values())

    def _paired_elsewhere(self, request: Request) -> bool:
        names = {arm.name for arm in self.arms}
        devices = self.good.get(request.id, {})
        return any(names <= outputs.keys() for device, outputs in devices.items() if device != self.device)

    def _here(self, request_id: str) -> dict[str, _Output]:
        return self.good.setdefault(request_id, {}).setdefault(self.device, {})

    def _warm_up(self, request: Request, arm: Arm) -> None:
        """The first decode of an arm at a length pays for compilation and first touches of memory: not counted."""
        key = (bucket(request), arm.name)
        if key not in self.warm and self.options.warmup_tokens:
            self.warm.add(key)
            limit = min(self.options.warmup_tokens, request.max_new_tokens)
            self._decode(replace(request, max_new_tokens=limit), arm, warmup=True)

    def _decode(self, request: Request, arm: Arm, warmup: bool = False) -> None:
        key = (request.id, arm.name, self.device)
        level = request.meta.get("level")
        blank = Record(
            run=self.writer.run,
            unit=self.unit.name,
            order=self.order,
            request_id=request.id,
            benchmark=request.benchmark,
            task=request.task,
            level=None if level is None else str(level),
            prompt_tokens=len(request.prompt_ids),
            prompt_sha256=prompt_sha256(request),
            method=arm.name,
            method_config=arm.options,
            engine=self.unit.engine,
            device_uuid=self.device,
            host=self.host,
            started_at=datetime.now(UTC).isoformat(timespec="milliseconds"),
            warmup=warmup,
            attempt=1 if warmup else self.attempts[key] + 1,
        )
        try:
            generation = self._timed(lambda: self.engine.decode(request, arm.method))
        except Exception as error:  # one cell dies with a named reason, the others go on (facts/peers.md D4)
            record = replace(blank, error=describe_error(error))
        else:
            record = self._checked_record(blank, request, arm, generation)
        self.writer.append(record)
        self.order += 1
        if not warmup:
            self._remember(record)
            if record.error:
                self.failures[arm.name] += 1
                self.report.failed[f"{request.id} by {arm.name}"] = record.error
                if self.failures[arm.name] == FAILURES_IN_A_ROW:
                    self.progress.note(
                        f"{arm.name} failed {FAILURES_IN_A_ROW} times in a row and is given up for this unit"
                    )
            else:
                self.failures[arm.name] = 0
                self.report.decoded += arm.name != AR_AGAIN
        self.progress.cell(record)

    def _checked_record(self, blank: Record, request: Request, arm: Arm, generation: Generation) -> Record:
        name = None if arm.method is None else str(arm.method.name)
        if (trouble := wrong_output(request, name, generation)) is None:
            record = replace(blank, **{key: getattr(generation, key) for key in _DELIVERED})
            trouble = broken_invariant(record, self.writer.proposals)
            if trouble is None:
                return record
        return replace(blank, error=f"refused: {trouble}")

    def _remember(self, record: Record) -> None:
        key = (record.request_id, record.method, record.device_uuid)
        self.attempts[key] += 1
        if not record.error:
            self.report.skipped_rounds += record.skipped_rounds
            devices = self.good.setdefault(record.request_id, {})
            output = _Output(array("I", record.output_ids), record.finish)
            devices.setdefault(record.device_uuid, {})[record.method] = output

    def _timed(self, call: Callable[[], T]) -> T:
        started = time.perf_counter()
        try:
            return call()
        finally:
            self.report.engine_s += time.perf_counter() - started

    # ------------------------------------------------------------------------------------------------ after the decodes

    def _again(self) -> None:
        """Decode the first requests autoregressively once more; measured first and last, they show the drift."""
        again = replace(self.arms[0], name=AR_AGAIN)
        if self.failures[AR] >= FAILURES_IN_A_ROW or self.arms[0].name != AR:
            return
        for request in islice(self.unit, self.options.drift_requests):
            have = self._here(request.id)
            if AR in have and AR_AGAIN not in have:
                if not self.engine.interleaved:  # it has just been restarted
                    self._warm_up(request, again)
                self._decode(request, again)

    def _judge(self, request: Request) -> None:
        """The output gate for one request: each output that differs from the autoregressive one, and that one."""
        have = self._here(request.id)
        if AR not in have:
            return
        base = have[AR].ids
        differing: dict[str, int | None] = {
            arm.name: divergence
            for arm in self.arms
            if arm.name in have and (divergence := first_difference(have[arm.name].ids, base)) is not None
        }
        verdicts: dict[bytes, dict[str, Any]] = {}
        if self.checked < CHECKED_BASELINES or differing:
            self.checked += 1
            own: dict[str, int | None] = {AR: None}
            differing = own | differing
        for arm, divergence in differing.items():
            line = self.judged.get((request.id, arm, self.device))
            if line is None or line["divergence"] != divergence:  # none yet, or of an output whose record is gone
                ids = have[arm].ids
                # Arms often deliver the same other output; the target judges it once.
                found = verdicts.get(ids.tobytes()) or judge(
                    partial(self._gaps, request, ids), len(ids), divergence, self.allowed
                )
                verdicts[ids.tobytes()] = found
                line = asdict(Agreement(self.unit.name, request.id, arm, self.device, ids == base, divergence, **found))
                self.log.append(line)
                self.judged[request.id, arm, self.device] = line
            if not line["passed"]:
                self.report.gates.append(f"{request.id} by {arm}: {line['error'] or _gap_text(line)}")

    def _gaps(self, request: Request, ids: array[int]) -> list[float]:
        return self._timed(lambda: self.engine.logit_gaps(request, ids.tolist()))

    def _conclude(self) -> None:
        """Count what is missing, and compare each arm's outputs with the autoregressive ones over all requests."""
        names = [arm.name for arm in self.arms]
        pairs: dict[str, list[tuple[Work, Work]]] = {name: [] for name in names if name != AR}
        equal: Counter[str] = Counter()
        for request in self.unit:
            if self._paired_elsewhere(request):
                continue
            have = self._here(request.id)
            gone = [name for name in names if name not in have]
            self.report.missing += sum(f"{request.id} by {name}" not in self.report.failed for name in gone)
            for name in pairs:
                if AR in have and name in have:
                    pairs[name].append((have[name].work(), have[AR].work()))
                    equal[name] += have[name].ids == have[AR].ids
        for name, works in pairs.items():
            self.report.flags += work_flags(name, works)
            self.report.exact[name] = (equal[name], len(works))


def _gap_text(line: dict[str, Any]) -> str:
    return f"logit gap {line['max_gap']:.3g} at token {line['max_gap_at']}, allowed {line['allowed']:.3g}"


_DELIVERED = [entry.name for entry in fields(Generation)]
