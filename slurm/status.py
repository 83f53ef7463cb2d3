"""fold-status: how far every unit of a submission is, from its records and from SLURM.

The records are the truth about what is measured; SLURM only says which jobs are still alive. A record is not parsed as
a whole: what counts stands at the beginning and at the end of its line, token ids in between. Memory is a few numbers
per unit, however many records there are.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import re
import socket
import sys
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from harness.config import UserError
from harness.provenance import RUN_FILE
from harness.records import RECORDS, SCHEMA, RecordError, read_lines
from slurm import queue
from slurm.units import Submission, Unit, load

# Records in whose time the rate of a unit is measured.
RECENT = 24
REFRESH_S = 10.0
# The job of a unit that runs on this machine.
LOCAL = "local"
SHOWN = 40

_TEXT, _KEPT = '"[^"]*"', '"([^"]*)"'
# A good record in the order in which harness.records.Record writes its fields; another order is only slower to read.
# Token ids, most of it, are passed over.
_RECORD = re.compile(
    rf'^\{{"run":{_TEXT},"unit":{_TEXT},"order":\d+,"request_id":{_KEPT},"benchmark":{_TEXT},"task":{_TEXT},'
    rf'"prompt_tokens":\d+,"prompt_sha256":{_TEXT},"method":{_KEPT},"engine":{_TEXT},"device_uuid":{_KEPT},'
    rf'"host":{_KEPT},"started_at":{_KEPT},".*,"warmup":(?:false|(true)),"attempt":\d+,"error":"()",'
    rf'"schema":"{SCHEMA}"\}}\n',
    re.MULTILINE,
)
# Bytes of a record file that are looked at in one go.
BLOCK = 1 << 18
# Below this, starting processes costs more than they save.
PARALLEL_BYTES = 64 << 20
_ERROR = re.compile(r"[\w.]*(Error|Exception|Interrupt)\b.*:|FAILED|REFUSED|GATE|MISSING|slurmstepd: error|fold-")
# The reason stands above it.
_POINTER = "slurm.job.UnitFailedError:"
_STATUS = re.compile(rb'"status": "(\w+)"\s*\}\s*\Z')


class Line(NamedTuple):
    """What counts of a record. error: "" for a good one."""

    request: str
    arm: str
    device: str
    host: str
    started_at: str
    warmup: bool
    error: str


def read_line(line: bytes) -> Line:
    """The fields of one line of a record file that counting needs. Raises ValueError for a damaged line."""
    if found := _usual(line):
        request, arm, device, host, started, warm, error = found[0]
        return Line(request, arm, device, host, started, bool(warm), error)
    value = json.loads(line)
    if not isinstance(value, dict) or value.get("schema") != SCHEMA:
        raise ValueError("not a record")
    names = ("request_id", "method", "device_uuid", "host", "started_at", "warmup", "error")
    return Line(*(value[name] for name in names))


def _usual(block: bytes) -> list[Any] | None:
    """The fields of whole lines, in the order of Line, if all of them are good records without an escaped character."""
    if b"\\" in block:
        return None
    try:
        found = _RECORD.findall(block.decode())
    except UnicodeDecodeError:
        return None
    return found if len(found) == block.count(b"\n") else None


def read_file(path: Path) -> Iterator[Line]:
    """read_line of every line but an unfinished last one; memory does not grow with the file."""
    rest = b""
    with path.open("rb") as file:
        while chunk := file.read(BLOCK):
            whole, end, rest = (rest + chunk).rpartition(b"\n")
            yield from _usual(whole + end) or map(read_line, (whole + end).splitlines(keepends=True))


@dataclass
class Tally:
    """A unit's records in numbers. complete: requests that every arm has decoded on one device. cells: good (request,
    arm) pairs on the device that has most of a request. host, device: of the last record. rate: cells per second of
    late. error: the last failure, "" if a later record of that request and arm is good. damage: why the file cannot be
    read."""

    complete: int = 0
    cells: int = 0
    host: str = ""
    device: str = ""
    rate: float = 0.0
    last: str = ""
    error: str = ""
    damage: str = ""


def tally(path: Path, arms: Iterable[str]) -> Tally:
    """Count the records of one unit. A missing file counts nothing; an unfinished last line is left out."""
    result, place = Tally(), {arm: 1 << number for number, arm in enumerate(arms)}
    everything = (1 << len(place)) - 1
    found: dict[str, dict[str, int]] = {}
    recent: deque[str] = deque(maxlen=RECENT)
    failed: dict[tuple[str, str], str] = {}
    line, number = None, 1
    try:
        for line in read_file(path):
            request, arm, device, _, started, warmup, error = line
            number += 1
            if warmup:
                continue
            if error:
                failed[request, arm] = f"{request} by {arm}: {error}"
            elif arm in place:
                devices = found.setdefault(request, {})
                devices[device] = devices.get(device, 0) | place[arm]
                recent.append(started)
                if failed:
                    failed.pop((request, arm), None)
    except FileNotFoundError:
        return result
    except (ValueError, KeyError):
        result.damage = f"{path}, line {number} is damaged; restore it or remove that line"
    except OSError as error_:
        result.damage = f"{path} cannot be read ({error_.strerror})"
    for devices in found.values():
        result.complete += any(bits == everything for bits in devices.values())
        result.cells += max(bits.bit_count() for bits in devices.values())
    if line is not None:
        _, _, result.device, result.host, result.last, *_ = line
    if len(recent) > 1:
        took = (datetime.fromisoformat(recent[-1]) - datetime.fromisoformat(recent[0])).total_seconds()
        result.rate = (len(recent) - 1) / took if took > 0 else 0.0
    result.error = next(reversed(failed.values()), "").split("\n")[0]
    return result


def tally_all(files: Sequence[tuple[Path, tuple[str, ...]]], size: int) -> list[Tally]:
    """tally of each (path, arms), `size` bytes together; many are counted by several processes."""
    workers = min(len(files), len(os.sched_getaffinity(0)))
    if workers < 2 or size < PARALLEL_BYTES:
        return [tally(*file) for file in files]
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("fork")) as pool:
        return list(pool.map(tally, *zip(*files, strict=True), chunksize=1 + len(files) // (8 * workers)))


def run_status(run_dir: Path) -> str:
    """What run.json says of the unit's last start: running, complete, incomplete, failed, interrupted; "" without it.

    It is the last key of the file, so only its end is read: a submission has thousands of them.
    """
    try:
        with (run_dir / RUN_FILE).open("rb") as file:
            file.seek(max(os.fstat(file.fileno()).st_size - 80, 0))
            found = _STATUS.search(file.read())
        if found:
            return found.group(1).decode()
        return str(json.loads((run_dir / RUN_FILE).read_bytes()).get("status") or "")
    except (OSError, ValueError, AttributeError):
        return ""


def trouble(run_dir: Path) -> str:
    """The first thing that the unit's last start found wrong, from run.json; "" if it says none."""
    with suppress(OSError, ValueError, KeyError, IndexError, TypeError, AttributeError):
        reports = json.loads((run_dir / RUN_FILE).read_bytes())["starts"][-1].get("reports") or []
        for report in reports:
            found = [f"{cell}: {reason}" for cell, reason in report["failed"].items()]
            found += [f"refused: {text}" for text in report["refused"]]
            found += [f"not confirmed by the target: {text}" for text in report["gates"]]
            if found:
                return found[0]
    return ""


# ------------------------------------------------------------------------------------------------------ states of units

DONE, RUNNING, PENDING, FAILED, PLANNED = "done", "running", "pending", "failed", "planned"
# It was queued, is not done, and SLURM does not answer.
UNKNOWN = "unknown"
STATES = (DONE, RUNNING, PENDING, FAILED, PLANNED, UNKNOWN)


@dataclass
class UnitState:
    """Where a unit stands. node: where its job is, else where its last record was made. note: the last error line of a
    failed unit, the reason of a pending one. ended: SLURM's word for how its job ended, "" if nobody knows."""

    unit: Unit
    state: str
    tally: Tally
    node: str = ""
    note: str = ""
    job: str = ""
    ended: str = ""

    @property
    def missing(self) -> int:
        """Requests that not every arm has decoded on one device."""
        return self.unit.requests - self.tally.complete

    @property
    def eta_s(self) -> float | None:
        """Seconds until a running unit is done, at its recent rate."""
        left = self.unit.requests * len(self.unit.work.arms) - self.tally.cells
        return left / self.tally.rate if self.state == RUNNING and self.tally.rate else None


@dataclass
class View:
    """Reads a submission again and again; files that did not change are not read twice.

    ask: whether to ask SLURM even if no job was ever queued. silent: why SLURM could not be asked, "" if it could or
    need not be. strangers: jobs of this submission that jobs.jsonl does not know (a fold-submit that was killed before
    it wrote them down).
    """

    submission: Submission
    ask: bool = False
    silent: str = ""
    strangers: list[str] = field(default_factory=list)
    _known: dict[str, tuple[tuple[int, int], Tally]] = field(default_factory=dict)

    def read(self) -> list[UnitState]:
        """The state of every unit, in the order of the plan. Raises UserError for damaged bookkeeping."""
        jobs = self._jobs()
        alive = self._queue(jobs)
        self._count()
        states = [self._state(unit, jobs.get(unit.id, ""), alive) for unit in self.submission.units.values()]
        forgotten = {state.job: state for state in states if state.state == FAILED and state.job and not state.ended}
        if forgotten and not self.silent:
            for job, past in queue.past_states([job for job in forgotten if job != LOCAL]).items():
                if job in forgotten:
                    forgotten[job].ended = past.state
        for state in states:
            if state.state == FAILED and not state.note:
                how = f"job {state.job} ended as {state.ended}" if state.ended else ""
                state.note = ": ".join(filter(None, [how, self._last_words(state)]))
        return states

    def _jobs(self) -> dict[str, str]:
        """The last job of each unit."""
        path = self.submission.folder / "jobs.jsonl"
        jobs: dict[str, str] = {}
        try:
            for _, value in read_lines(path) if path.exists() else []:
                jobs |= value["jobs"]
            return jobs
        except (RecordError, OSError) as error:
            raise UserError(str(error)) from None
        except (KeyError, TypeError, ValueError):
            raise UserError(f"{path} is damaged: a line names no jobs; restore it or remove that line") from None

    def _queue(self, jobs: dict[str, str]) -> dict[str, queue.JobState]:
        self.silent, self.strangers = "", []
        if not self.ask and not set(jobs.values()) - {LOCAL}:
            return {}
        if not queue.available():
            self.silent = "there is no SLURM on this machine"
            return {}
        try:
            found = queue.job_states(self.submission.job_name)
        except queue.QueueError as error:
            self.silent = str(error)
            return {}
        mine = set(jobs.values())
        self.strangers = sorted(job for job, state in found.items() if state.alive and job not in mine)
        return found

    def _state(self, unit: Unit, job: str, alive: dict[str, queue.JobState]) -> UnitState:
        run_dir = self.submission.run_dir(unit)
        counted = self._known[unit.id][1] if unit.id in self._known else Tally()
        known = alive.get(job)
        state = UnitState(unit, PLANNED, counted, counted.host, "", job)
        if known is not None and known.alive:
            state.state = RUNNING if known.state in queue.RUNNING else PENDING
            state.node = known.node or state.node
            state.note = "" if state.state == RUNNING or known.reason == "None" else known.reason
        elif writer_alive(run_dir):
            state.state = RUNNING
        elif counted.damage:
            state.state, state.note = FAILED, counted.damage
        elif counted.complete >= unit.requests and (said := run_status(run_dir)) == "complete":
            state.state = DONE
        elif self.silent and job not in ("", LOCAL):
            state.state = UNKNOWN
        elif job or counted.cells or run_dir.exists():
            state.state = FAILED
            state.note = trouble(run_dir) or counted.error
            state.ended = known.state if known is not None else ""
            if counted.complete >= unit.requests and not state.note:
                state.note = f"measured, but its last start did not end well ({said or 'no run.json'})"
        return state

    def _count(self) -> None:
        """Count the records of the units whose files changed since the last time."""
        stamps: dict[str, tuple[int, int]] = {}
        changed: list[tuple[Path, tuple[str, ...]]] = []
        for unit in self.submission.units.values():
            path = self.submission.run_dir(unit) / RECORDS
            try:
                now = path.stat()
            except OSError:
                self._known.pop(unit.id, None)
                continue
            stamp = (now.st_size, now.st_mtime_ns)
            if unit.id not in self._known or self._known[unit.id][0] != stamp:
                stamps[unit.id] = stamp
                changed.append((path, unit.work.arms))
        size = sum(size for size, _ in stamps.values())
        for name, counted in zip(stamps, tally_all(changed, size), strict=True):
            self._known[name] = (stamps[name], counted)

    def _last_words(self, state: UnitState) -> str:
        """The last line that the unit's job wrote: of those that speak of an error, of those that say which."""
        folder = self.submission.folder / "jobs"
        for path in (folder / f"{state.unit.id}.log", folder / f"{state.job}_0_log.out"):
            with suppress(OSError), path.open("rb") as file:
                file.seek(max(os.fstat(file.fileno()).st_size - 8192, 0))
                lines = [line.strip() for line in file.read().decode(errors="replace").splitlines() if line.strip()]
                errors = [line for line in lines if _ERROR.match(line)]
                telling = [line for line in errors if not line.startswith(_POINTER)]
                if lines:
                    return (telling or errors or lines)[-1]
        return "" if state.ended else "stopped, and left no output"


def writer_alive(run_dir: Path) -> bool:
    """Whether the process that said it is writing a run directory still does, as far as this machine can tell.

    The lock itself is not touched: asking for it could take it from a unit that is just starting.
    """
    try:
        told = re.fullmatch(r"process (\d+) on (\S+)\s*", (run_dir / ".writer").read_text(encoding="utf-8"))
    except OSError:
        return False
    if told is None or told.group(2) != socket.gethostname():
        return False
    return Path("/proc", told.group(1)).exists()


# ------------------------------------------------------------------------------------------------------------- printing


def duration(seconds: float | None) -> str:
    if seconds is None:
        return ""
    minutes = round(seconds / 60)
    return f"{minutes // 60} h {minutes % 60:02d} min" if minutes >= 60 else f"{minutes} min"


def overview(states: list[UnitState]) -> Table:
    """One row per work: units by state, requests done, requests missing, rate and time left."""
    table = Table(title="units and requests")
    for name in ("pair", "engine", "benchmark", *STATES, "requests", "missing", "cells/h", "left"):
        table.add_column(name, justify="left" if name in ("pair", "engine", "benchmark") else "right")
    works: dict[str, list[UnitState]] = {}
    for state in states:
        works.setdefault(state.unit.work.run, []).append(state)
    for mine in works.values():
        work, counts = mine[0].unit.work, Counter(state.state for state in mine)
        rate = sum(state.tally.rate for state in mine if state.state == RUNNING)
        left = sum(s.unit.requests * len(work.arms) - s.tally.cells for s in mine if s.state in (RUNNING, PENDING))
        done = sum(state.tally.complete for state in mine)
        table.add_row(
            work.pair,
            work.engine,
            f"{work.benchmark} {work.options}".strip(),
            *(str(counts[name]) if counts[name] else "" for name in STATES),
            f"{done}/{work.requests}",
            str(work.requests - done or ""),
            f"{3600 * rate:.0f}" if rate else "",
            duration(left / rate if rate else None),
            style="red" if counts[FAILED] else None,
        )
    return table


def details(states: list[UnitState], limit: int | None = SHOWN) -> Table | None:
    """The units that fail, run or wait, those that need a person first; None if all are done or planned."""
    order = {FAILED: 0, UNKNOWN: 1, RUNNING: 2, PENDING: 3}
    rows = sorted((s for s in states if s.state in order), key=lambda state: order[state.state])
    if not rows:
        return None
    table = Table(title="units that are not done")
    for name in ("unit", "state", "requests", "job", "node", "device", "left", "last line"):
        table.add_column(name, overflow="fold")
    for state in rows[:limit]:
        requests = f"{state.tally.complete}/{state.unit.requests}"
        cells = [state.unit.id, state.state, requests, state.job, state.node, state.tally.device, duration(state.eta_s)]
        table.add_row(*(Text(cell) for cell in [*cells, state.note[:200]]))  # Text: a bracket is not markup
    if limit is not None and len(rows) > limit:
        table.caption = f"and {len(rows) - limit} more; --all shows them"
    return table


def main() -> int:
    """Print how far a submission is: exit code 1 if a unit failed, 2 for a mistake, else 0."""
    try:
        return _main(sys.argv[1:])
    except UserError as error:
        print(f"fold-status: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _main(arguments: list[str]) -> int:
    parser = Parser("fold-status", "How far the units of a submission are.")
    parser.add_argument("folder", type=Path, nargs="?", help="a folder of fold-submit; the newest below results/runs")
    parser.add_argument("--watch", action="store_true", help=f"print again every {REFRESH_S:.0f} s until nothing runs")
    parser.add_argument("--all", action="store_true", help="list all units that are not done")
    given = parser.parse_args(arguments)
    view = View(load(given.folder or newest()))
    console = Console()
    if not given.watch or not console.is_terminal:
        while True:
            states = view.read()
            _show(console, view, states, given.all)
            if not given.watch or not _moving(states):
                break
            time.sleep(REFRESH_S)
    else:
        with Live(console=console, auto_refresh=False) as live:
            while True:
                states = view.read()
                live.update(overview(states), refresh=True)
                if not _moving(states):
                    break
                time.sleep(REFRESH_S)
        _show(console, view, states, given.all)
    return 1 if any(state.state == FAILED for state in states) else 0


def _moving(states: list[UnitState]) -> bool:
    return any(state.state in (RUNNING, PENDING) for state in states)


def _show(console: Console, view: View, states: list[UnitState], everything: bool) -> None:
    console.print(overview(states))
    if (table := details(states, None if everything else SHOWN)) is not None:
        console.print(table)
    counts = Counter(state.state for state in states)
    total = sum(state.unit.requests for state in states)
    done = sum(state.tally.complete for state in states)
    said = ", ".join(f"{counts[name]} {name}" for name in STATES if counts[name])
    console.print(f"{len(states)} units: {said}; {done} of {total} requests measured.", highlight=False)
    if view.silent:
        console.print(f"note: {view.silent}; what runs or waits cannot be seen", highlight=False)
    if view.strangers:
        jobs = " ".join(view.strangers[:20])
        console.print(f"note: an interrupted fold-submit left jobs that nothing knows: scancel {jobs}", highlight=False)


def newest() -> Path:
    """The last submission below results/runs. Raises UserError if there is none."""
    found = sorted(Path("results", "runs").glob("*/submission.json"), key=lambda path: path.stat().st_mtime)
    if not found:
        raise UserError("no submission below results/runs; give a folder that fold-submit wrote")
    return found[-1].parent


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line."""

    def __init__(self, name: str, description: str) -> None:
        super().__init__(prog=name, description=description)

    def error(self, message: str) -> None:  # type: ignore[override]
        raise UserError(f"{message}; {self.prog} --help shows how to call it")
