"""How long fold-submit plans 10,000 units, and fold-status takes for them with 1,000,000 records, and in what memory.

python benchmarks/slurm_status.py [UNITS] [RECORDS]. Units and records are made up in a temporary folder; a record is as
long as one of 128 output tokens. Reading is measured twice: --watch skips the files that did not change.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

from harness.config import SlurmConfig
from harness.records import RECORDS, Record
from slurm.status import View, details, overview
from slurm.units import Submission, Work, load

ARMS = ("ar", "original", "window", "fold", "rerope")


def main() -> None:
    units, records = (int(text) for text in (sys.argv[1:] + ["10000", "1000000"][len(sys.argv) - 1 :])[:2])
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        make(folder, units, records // units)
        size = sum(path.stat().st_size for path in folder.glob(f"units/*/{RECORDS}"))
        print(f"{units:,} units, {records:,} records, {size / 2**30:.2f} GiB")
        # In a process of its own, so that its peak memory is its own.
        subprocess.run([sys.executable, __file__, "--read", str(folder)], check=True)
    started = time.perf_counter()
    planned(units)
    print(f"planning {units:,} units (composition included): {time.perf_counter() - started:.2f} s")


def make(folder: Path, units: int, each: int) -> None:
    requests = each // len(ARMS)
    works = [
        Work(f"run{n}", "h", f"pair{n}", "e", "b", ARMS, (), requests * units // 10, units // 10, 1.0)
        for n in range(10)
    ]
    submission = Submission(folder, tuple(works), "")
    submission.save()
    record = Record(
        run="run", unit="UNIT", order=1, request_id="REQUEST", benchmark="b", task="t", prompt_tokens=100000,
        prompt_sha256="0" * 64, method="ARM", engine="e", device_uuid="GPU-0", host="n1",
        started_at="2026-01-01T00:00:00.000+00:00", output_ids=[100000 + place for place in range(128)],
        finish="length", n_first=1, commits=[4] * 31 + [3], proposals=[7] * 32,
    )  # fmt: skip
    line = json.dumps(asdict(record), separators=(",", ":")) + "\n"
    requests_of = [line.replace("ARM", arm).replace("REQUEST", f"request-{n}") for n in range(requests) for arm in ARMS]
    text = "".join(requests_of)
    for unit in submission.units.values():
        run_dir = submission.run_dir(unit)
        run_dir.mkdir(parents=True)
        (run_dir / RECORDS).write_text(text.replace("UNIT", unit.id))
        start = {"argv": [], "begin": {"environment": {f"V{n}": "x" * 100 for n in range(60)}}}
        (run_dir / "run.json").write_text(json.dumps({"starts": [start], "status": "complete"}, indent=1) + "\n")


def read(folder: Path) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    started = time.perf_counter()
    view = View(load(folder))
    states = view.read()
    overview(states)
    details(states)
    took = time.perf_counter() - started
    cpu = time.process_time()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    readers = resource.getrusage(resource.RUSAGE_CHILDREN)
    readers_s = readers.ru_utime + readers.ru_stime
    print(f"fold-status: {took:.2f} s (processor time: {cpu:.2f} s of this process, {readers_s:.2f} s of its readers)")
    print(f"peak memory {peak / 1024:.0f} MiB, {before / 1024:.0f} MiB of it before reading")
    started = time.perf_counter()
    states = view.read()
    done = sum(state.state == "done" for state in states)
    print(f"again, as --watch does: {time.perf_counter() - started:.2f} s; {done:,} done")


def planned(units: int) -> None:
    from harness.cli import compose_plans
    from slurm.units import merge, plan_work

    (plan,) = merge(compose_plans(["+model=llama", "method=fold", "benchmark=lbv2"]) or [])
    work = plan_work(plan, SlurmConfig(shards=units), 5 * units)
    assert len(Submission(Path(), (work,), "").units) == units


if __name__ == "__main__":
    if sys.argv[1:2] == ["--read"]:
        read(Path(sys.argv[2]))
    else:
        main()
