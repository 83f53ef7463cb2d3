"""`fold-bench engine=vllm` as a user runs it: every method of the paper on the demo pair, judged and recorded."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from harness.engines.base import EngineInfo
from harness.guards import differing_settings, settings
from harness.records import AR, AR_AGAIN, RECORDS, read_records, tpot
from harness.run import AGREEMENT
from tests.harness.helpers import ROOT

METHODS = ("original", "window", "streamingllm", "yarn", "rerope", "infllm", "cmr", "fold")


def fold_bench(run_dir: Path, *more: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "harness.cli", "engine=vllm", "benchmark=demo_code", "benchmark.n=1"]
    command += ["benchmark.levels=[1K]", "benchmark.max_new_tokens=24", "warmup_tokens=4", "drift_requests=1"]
    command += ["engine.threads=1", "engine.kv_cache_gib=0.5", f"run_dir={run_dir}", *more]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1800)


@pytest.mark.slow
def test_every_method_runs_and_proves_itself(demo_target: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    # Three chunks, and a context far beyond W.
    methods = f"methods=[{','.join(METHODS)}]"
    done = fold_bench(run_dir, methods, "engine.prefill_chunk=384", "method.window=128")
    assert done.returncode == 0, done.stderr
    records = list(read_records(run_dir / RECORDS))
    assert not [record.error for record in records if record.error]
    counted = {record.method: record for record in records if not record.warmup}
    assert set(counted) == {AR, AR_AGAIN, *METHODS}
    assert {record.method for record in records if record.warmup} == set(counted)

    prompt = counted[AR].prompt_tokens
    assert prompt > 2 * 384
    for name, record in counted.items():
        assert record.prompt_sha256 == counted[AR].prompt_sha256 and record.engine == "vllm"
        assert len(record.output_ids) == 24 and (tpot(record) or 0) > 0 and record.prefill_s > 0
        if record.autoregressive:
            assert record.activity == {}
            continue
        assert record.activity["method"] == name and record.activity["rounds"] >= len(record.commits)
        assert set(record.proposals) == {4} and record.skipped_rounds == 0
    far = {name: record.activity["far_entries_read"] for name, record in counted.items() if not record.autoregressive}
    assert far["window"] == far["original"] == far["yarn"] == 0
    assert min(far["fold"], far["rerope"], far["infllm"]) > 0
    extra = {name: record.activity["side_cache_bytes_per_token"] for name, record in counted.items() if name in far}
    # Keys only, of 4 layers with 3 heads of 64, 2 or 4 bytes each: half of the paper's side cache.
    assert extra["window"] == extra["original"] == 0 < extra["fold"]
    assert extra["fold"] in (4 * 3 * 64 * 2, 4 * 3 * 64 * 4)

    content = json.loads((run_dir / "run.json").read_text())
    arms = {name: EngineInfo(**info) for name, info in content["arms"].items()}
    assert set(arms) == {AR, *METHODS}
    for info in arms.values():
        assert differing_settings(settings(arms[AR]), settings(info)) == []
    assert "ReadPlan" in str(arms["fold"].drafter["plan"])
    verdicts = [json.loads(line) for line in (run_dir / AGREEMENT).read_text().splitlines()]
    assert verdicts and all(verdict["passed"] for verdict in verdicts)
