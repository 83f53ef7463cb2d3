"""Progress of a run: one bar per unit on a terminal, plain lines in a log."""

from __future__ import annotations

import sys
import time
from typing import TextIO

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from harness.bench import Unit
from harness.records import AR_AGAIN, Record, tau, tpot

# Seconds between two lines of a log.
LOG_EVERY = 30.0


def open_progress() -> Terminal | Log:
    """A bar if stderr is a terminal, else lines."""
    stream = sys.stderr
    return Terminal(Console(file=stream)) if stream.isatty() else Log(stream)


def describe(record: Record) -> str:
    """One record in a few words: request, arm, acceptance length, milliseconds per token, or what went wrong; of random
    weights, whose acceptance means nothing, milliseconds per round."""
    if record.error:
        return f"{record.request_id} {record.method}: {record.error}"
    accepted, seconds = tau(record), tpot(record)
    if record.synthetic and not record.autoregressive:
        span = record.last_token_s - record.first_token_s
        shown = [f"{1e3 * span / len(record.commits):.1f} ms/round"] if record.commits else []
    else:
        shown = [] if accepted is None or record.autoregressive else [f"tau {accepted:.2f}"]
        shown += [] if seconds is None else [f"{1e3 * seconds:.1f} ms/token"]
    return f"{record.request_id} {record.method} {', '.join(shown)}".rstrip()


class Log:
    """Lines for a file or a pipe: at most one per LOG_EVERY seconds, and every failure."""

    def __init__(self, stream: TextIO) -> None:
        self.stream, self.unit, self.done, self.cells = stream, "", 0, 0
        self.started = self.spoke = time.monotonic()

    def begin(self, unit: Unit, cells: int, done: int) -> None:
        self.unit, self.done, self.cells = unit.benchmark, done, cells
        self.started = self.spoke = time.monotonic()
        self.first = done
        self.note(f"{unit.name}: {cells} cells" + (f", {done} of them already measured" if done else ""))

    def cell(self, record: Record) -> None:
        if not record.warmup and not record.error and record.method != AR_AGAIN:
            self.done += 1
        now = time.monotonic()
        if record.error or now - self.spoke >= LOG_EVERY:
            self.spoke = now
            rest = (now - self.started) / max(self.done - self.first, 1) * (self.cells - self.done)
            self.note(f"{self.unit} {self.done}/{self.cells}, about {rest / 60:.0f} min left; {describe(record)}")

    def note(self, text: str) -> None:
        print(text, file=self.stream, flush=True)

    def close(self) -> None:
        """Nothing is left open."""


class Terminal:
    """A live bar with the last record beside it."""

    def __init__(self, console: Console) -> None:
        self.bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[last]}", markup=False),
            console=console,
        )
        self.bar.start()
        self.task: TaskID | None = None

    def begin(self, unit: Unit, cells: int, done: int) -> None:
        self.task = self.bar.add_task(unit.benchmark, total=cells, completed=done, last="")

    def cell(self, record: Record) -> None:
        counted = not record.warmup and not record.error and record.method != AR_AGAIN
        if self.task is not None:
            last = describe(record) + (" (warm-up)" if record.warmup else "")
            self.bar.update(self.task, advance=int(counted), last=last[:60])
        if record.error:
            self.note(describe(record))

    def note(self, text: str) -> None:
        self.bar.console.print(text, markup=False, highlight=False)

    def close(self) -> None:
        self.bar.stop()
