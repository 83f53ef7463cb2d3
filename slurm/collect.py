"""fold-collect: one run directory per run out of the units of a submission, checked first.

What would make numbers wrong (a request measured twice by an arm on a device, units of different configurations or
settings, a damaged line) stops it and nothing is written. What makes them incomplete (missing requests, unpaired
records, failed units, mixed code) is listed and makes the exit code 1.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

from harness.bench import AR
from harness.config import UserError
from harness.engines.base import EngineInfo
from harness.guards import differing_settings, settings
from harness.provenance import RUN_FILE
from harness.records import AR_AGAIN, RECORDS
from harness.requests import write_atomic
from slurm.status import DONE, Parser, UnitState, View, newest, read_line
from slurm.units import Submission, load

AGREEMENT = "agreement.jsonl"


def main() -> int:
    """Merge and check. Exit code 0: complete; 1: merged, but incomplete; 2: nothing written."""
    try:
        return _main(sys.argv[1:])
    except UserError as error:
        print(f"fold-collect: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"fold-collect: {error.filename or 'file'}: {error.strerror or error}", file=sys.stderr)
        return 2


def _main(arguments: list[str]) -> int:
    parser = Parser("fold-collect", "Merge the units of a submission into one run directory per run.")
    parser.add_argument("folder", type=Path, nargs="?", help="a folder of fold-submit; the newest below results/runs")
    parser.add_argument("--out", type=Path, help="where to write; <folder>/collected")
    given = parser.parse_args(arguments)
    submission = load(given.folder or newest())
    out = (given.out or submission.folder / "collected").absolute()
    problems = collect(submission, out)
    for problem in problems:
        print(f"PROBLEM {problem}", file=sys.stderr)
    print(f"collected into {out}: fold-tables {out}")
    return 1 if problems else 0


def collect(submission: Submission, out: Path) -> list[str]:
    """Write the merged runs below `out` and return what is incomplete. Raises UserError for what must not be merged."""
    view = View(submission)
    runs: dict[str, list[UnitState]] = {}
    problems: list[str] = []
    for state in view.read():
        if state.tally.cells or state.tally.error or state.tally.damage:
            runs.setdefault(state.unit.work.run, []).append(state)
        if state.state != DONE:
            missing = f"{state.missing} of {state.unit.requests} requests missing"
            problems.append(f"{state.unit.id} is {state.state} ({missing}){': ' if state.note else ''}{state.note}")
    if not runs:
        raise UserError(f"{submission.folder} holds no records yet")
    merged = {run: _run_file(submission, states) for run, states in runs.items()}
    codes = set().union(*(known for _, known in merged.values()))
    if len(codes) > 1:
        problems.append(f"units ran on {len(codes)} versions of the code (run.json, starts)")
    for run in merged:
        problems += _write(submission, runs[run], out / run)
    # Only now does any run appear: a problem of one must not leave the others behind as if all were well.
    for run, (content, _) in merged.items():
        for name in (RECORDS, AGREEMENT):
            (out / run / f".{name}.partial").rename(out / run / name)
        write_atomic(out / run / RUN_FILE, (json.dumps(content, indent=1, ensure_ascii=False) + "\n").encode())
    return problems


def _run_file(submission: Submission, states: list[UnitState]) -> tuple[dict[str, Any], set[str]]:
    """run.json of a whole run, from its units': they must be of one configuration, one input and one engine's settings.

    Also returns the checksums of the code that all starts ran on.
    """
    whole: dict[str, Any] = {}
    codes: set[str] = set()
    for state in states:
        path = submission.run_dir(state.unit) / RUN_FILE
        try:
            mine = json.loads(path.read_bytes())
        except (OSError, ValueError) as error:
            raise UserError(f"{path} cannot be read ({error}); run that unit again") from None
        try:
            codes |= {start["begin"]["code"]["sha256"] for start in mine["starts"]}
            _merge_run_file(whole, mine, state, path)
        except (AttributeError, KeyError, TypeError) as error:
            raise UserError(f"{path} is damaged ({error!r}); run that unit again") from None
    with suppress(KeyError):
        if any(state.state != DONE for state in states) and whole["status"] == "complete":
            whole["status"] = "incomplete"
    return whole, codes


def _merge_run_file(whole: dict[str, Any], mine: dict[str, Any], state: UnitState, path: Path) -> None:
    """Take one unit's run.json into the whole run's. Raises UserError where they differ in what must be the same."""
    if mine["config_hash"] != state.unit.work.hash:
        raise UserError(f"{path} is of another configuration than was planned; remove that unit's folder")
    if not whole:
        whole.update(mine)
        return
    for name, facts in mine["requests"].items():
        if whole["requests"].setdefault(name, facts)["sha256"] != facts["sha256"]:
            raise UserError(f"{path}: the unit read other requests of {name} than the others did")
    for arm, info in mine["arms"].items():
        known = whole["arms"].setdefault(arm, info)
        if differing := differing_settings(settings(EngineInfo(**known)), settings(EngineInfo(**info))):
            raise UserError(f"{path}: {arm} ran under other settings than in the other units ({differing[0]})")
    whole["starts"] += mine["starts"]
    if mine["status"] != "complete":
        whole["status"] = mine["status"]


def _write(submission: Submission, states: list[UnitState], out: Path) -> list[str]:
    """Copy the lines of a run's units into one partial file each; returns unpaired records."""
    out.mkdir(parents=True, exist_ok=True)
    partial = out / f".{RECORDS}.partial"
    problems: list[str] = []
    with partial.open("wb") as records, (out / f".{AGREEMENT}.partial").open("wb") as agreement:
        for state in states:
            run_dir = submission.run_dir(state.unit)
            good: Counter[tuple[str, str, str]] = Counter()
            with (run_dir / RECORDS).open("rb") as lines:
                for number, line in enumerate(lines, 1):
                    if not line.endswith(b"\n"):
                        break
                    try:
                        found = read_line(line)
                    except (ValueError, KeyError):
                        raise UserError(f"{run_dir / RECORDS}, line {number} is damaged; restore it") from None
                    if not found.warmup and not found.error:
                        good[found.request, found.arm, found.device] += 1
                    records.write(line)
            if twice := next((cell for cell, count in good.items() if count > 1), None):
                request, arm, device = twice
                raise UserError(
                    f"{run_dir / RECORDS}: {request} by {arm} was measured twice on {device}; remove one of the records"
                )
            problems += _unpaired(state, good)
            with suppress(FileNotFoundError):
                said = (run_dir / AGREEMENT).read_bytes()
                # Without the half line of a unit that was killed, which would run into the next unit's.
                agreement.write(said[: said.rfind(b"\n") + 1])
    return problems


def _unpaired(state: UnitState, good: Counter[tuple[str, str, str]]) -> list[str]:
    """Records of a method without an autoregressive one of the same request on any device that both saw."""
    paired = {(request, arm) for request, arm, device in good if (request, AR, device) in good}
    alone = sorted({(request, arm) for request, arm, _ in good if arm != AR_AGAIN} - paired)
    if not alone:
        return []
    request, arm = alone[0]
    return [f"{state.unit.id}: {len(alone)} records without AR on the same device, the first {request} by {arm}"]
