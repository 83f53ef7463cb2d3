"""How long a full reproduction takes to analyse: 100,000 records are loaded and every table is made with intervals.

Bar: at most 10 s on 2 cores and 1 GiB for the process. The records are synthetic, of the paper's pairs, tasks and
request counts (Table 7) and lengths; nothing but the time and the memory means anything. Run: python
benchmarks/stats_load.py"""

from __future__ import annotations

import json
import os
import resource
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

import numpy as np

from analysis.load import load
from analysis.paper import METHODS, PAIRS
from analysis.tables import make_tables
from harness.records import Record

RECORDS = 100_000
# Requests per task of a pair, about Table 7's.
TASKS = {
    "Gov": 280, "LBv2": 360, "Retr.KV": 480, "En.Sum": 64, "En.QA": 225, "En.MC": 147, "En.Dia": 200,
    "LCA 32K": 236, "LCA 64K": 226, "LCA 122K": 153, "RepoBench Python": 393, "RepoBench Java": 402, "SWE-bench": 288,
    "SPEED 8K": 256, "SPEED 16K": 756, "SPEED 32K": 765,
}  # fmt: skip
TOKENS = 256


def write(folder: Path, rng: np.random.Generator) -> int:
    """Write run directories, one a pair, until RECORDS are there; return how many were written."""
    written = 0
    arms = ["ar", *METHODS, "window"]
    for pair in PAIRS:
        run_dir = folder / pair
        run_dir.mkdir()
        with (run_dir / "records.jsonl").open("w") as out:
            for task, n in TASKS.items():
                for i in range(n):
                    ids = rng.integers(0, 128_000, TOKENS).tolist()
                    prompt = int(rng.integers(8_000, 200_000))
                    for arm in arms:
                        commits, rest = [1] * (TOKENS - 1), TOKENS - 1
                        if arm != "ar":
                            commits = []
                            while rest:
                                commits.append(min(int(rng.integers(1, 9)), rest))
                                rest -= commits[-1]
                        record = Record(
                            run=pair,
                            unit=f"{pair}/vllm/{task}/0of1",
                            order=written,
                            request_id=f"{task}-{i}",
                            benchmark=task,
                            task=task,
                            prompt_tokens=prompt,
                            prompt_sha256="0" * 64,
                            method=arm,
                            engine="vllm",
                            device_uuid="GPU-0",
                            host="h",
                            started_at="2026-11-29T00:00:00+00:00",
                            output_ids=ids,
                            finish="length",
                            n_first=1,
                            commits=commits,
                            proposals=[] if arm == "ar" else [9] * len(commits),
                            prefill_s=1.0,
                            first_token_s=10.0,
                            last_token_s=10.0 + float(rng.uniform(1, 2)),
                        )
                        out.write(json.dumps(asdict(record), separators=(",", ":")) + "\n")
                        written += 1
                        if written == RECORDS:
                            return written
    return written


def main() -> int:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        count = write(folder, np.random.default_rng(0))
        runs_dirs = [path for path in sorted(folder.iterdir()) if (path / "records.jsonl").exists()]
        size = sum((path / "records.jsonl").stat().st_size for path in runs_dirs) / 1e6
        begin, cpu = time.perf_counter(), time.process_time()
        runs = load(runs_dirs)
        loaded = time.perf_counter()
        tables = make_tables(runs)
        done, cpu = time.perf_counter(), time.process_time() - cpu
    usage = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    children = usage[1].ru_utime + usage[1].ru_stime
    # Readers run at the same time as this process: their peaks add up.
    workers = min(len(runs_dirs), len(os.sched_getaffinity(0)))
    peak = (usage[0].ru_maxrss + (workers * usage[1].ru_maxrss if workers > 1 else 0)) / 2**20
    print(
        f"{count} records, {size:.0f} MB: load {loaded - begin:.1f} s, {len(tables)} tables "
        f"{done - loaded:.1f} s, together {done - begin:.1f} s of wall clock, {cpu:.1f} s of CPU in this process and "
        f"{children:.1f} s in readers "
        f"(bar: 10 s on 2 idle cores); peak memory {peak:.2f} GiB (bar: 1)"
    )
    return int(done - begin > 10 or peak > 1)


if __name__ == "__main__":
    sys.exit(main())
