"""Running the toy unit of tests/harness/scripted.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from harness.bench import Options, Report, run_unit
from harness.engines.base import Engine
from harness.records import RECORDS, JsonLines, Record, RecordWriter, read_lines, read_records
from tests.harness.scripted import PROPOSALS, make_arms, make_requests, make_unit

RUN = "toy-0123456789ab"


class Quiet:
    """Collects what a run says."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def begin(self, unit: Any, cells: int, done: int) -> None:
        pass

    def cell(self, record: Record) -> None:
        pass

    def note(self, text: str) -> None:
        self.notes.append(text)


def run_toy(
    run_dir: Path,
    engine: Engine,
    *,
    count: int = 6,
    arms: tuple[str, ...] = ("original", "fold"),
    options: Options | None = None,
    run: str = RUN,
    limit: int = 12,
) -> Report:
    """One start of the toy unit in `run_dir`: resumes what is there."""
    with RecordWriter(run_dir, run, PROPOSALS) as writer:
        path = run_dir / "agreement.jsonl"
        log = JsonLines(path)
        judged = [line for _, line in read_lines(path)]
        unit = make_unit(make_requests(count, limit=limit))
        options = options or Options(warmup_tokens=4)
        return run_unit(engine, unit, make_arms(*arms), writer, log, judged, Quiet(), options)


def records(run_dir: Path) -> list[Record]:
    """The counted records: no warm-ups."""
    return [record for record in read_records(run_dir / RECORDS) if not record.warmup]


def agreement(run_dir: Path) -> list[dict[str, Any]]:
    return [line for _, line in read_lines(run_dir / "agreement.jsonl")]
