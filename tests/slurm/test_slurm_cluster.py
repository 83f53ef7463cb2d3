"""A real SLURM on this machine (cluster.sh): the demo as arrays, and everything that goes wrong on clusters."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from analysis.load import load as load_runs
from harness.records import AR_AGAIN, RECORDS, read_records
from slurm.status import DONE, FAILED, RUNNING, View
from slurm.units import load
from tests.slurm.slurm_fixtures import ROOT, command, hooked, states, toy, wait_for

pytestmark = pytest.mark.slow
SCRIPT = Path(__file__).parent / "cluster.sh"
MAX_ARRAY = 5
# What the test cluster has: two slots that look like GPUs.
ON_CLUSTER = ["slurm.cpus_per_task=1", "slurm.mem=null", "slurm.time_min=30", "slurm.signal_delay_s=5", "slurm.env={}"]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    if not os.environ.get("FOLD_BENCH_SLURM"):
        pytest.skip("starts a SLURM cluster of its own: set FOLD_BENCH_SLURM=1 where slurm-wlm and munge are installed")
    folder = tmp_path_factory.mktemp("cluster")
    started = subprocess.run([SCRIPT, "start", folder, str(MAX_ARRAY)], capture_output=True, text=True, timeout=120)
    if started.returncode:
        subprocess.run([SCRIPT, "stop", folder], capture_output=True)
        pytest.skip((started.stderr.strip().splitlines() or ["cluster.sh failed"])[-1])
    os.environ["SLURM_CONF"] = str(folder / "slurm.conf")
    yield folder
    subprocess.run(["scancel", "--user=root"], capture_output=True)
    time.sleep(1)
    subprocess.run([SCRIPT, "stop", folder], capture_output=True)
    del os.environ["SLURM_CONF"]


def submit(folder: Path, overrides: list[str], *more: str, **env: str) -> subprocess.CompletedProcess[str]:
    return command("submit", "--yes", f"run_dir={folder}", *ON_CLUSTER, *overrides, *more, cwd=folder.parent, **env)


def ended(folder: Path) -> bool:
    return not {"running", "pending"} & set(states(folder).values())


def good(folder: Path) -> Counter[tuple[str, str, str, str]]:
    """How often each (unit, request, arm, device) has a good record."""
    found: Counter[tuple[str, str, str, str]] = Counter()
    for path in (folder / "units").glob(f"*/{RECORDS}"):
        for record in read_records(path):
            if not record.warmup and not record.error:
                found[path.parent.name, record.request_id, record.method, record.device_uuid] += 1
    return found


def process_of(unit: str) -> psutil.Process:
    """The job step's Python that decodes a unit: the one that holds its lock."""
    (path,) = Path("/").glob(f"{unit.lstrip('/')}/.writer")
    return psutil.Process(int(path.read_text().split()[1]))


def test_preemption_cancellation_kills_and_two_submits_lose_and_double_nothing(cluster: Path, tmp_path: Path) -> None:
    folder = tmp_path / "submission"
    env = hooked(tmp_path, sleep=0.4, device="gpu-a")
    overrides = [*toy(tmp_path / "pair", 16, ("demo_code", "demo_docs", "demo_kv")), "methods=[original,fold]"]
    overrides.append("slurm.shards=2")

    # Two submits at once: the six units are queued once. Six are more than an array may hold here.
    both: list[subprocess.CompletedProcess[str]] = []
    threads = [threading.Thread(target=lambda: both.append(submit(folder, overrides, **env))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted("submitted 6 units" in done.stdout for done in both) == [False, True], [d.stderr for d in both]
    loser = next(done for done in both if "submitted" not in done.stdout)
    assert "another fold-submit works on" in loser.stderr or "nothing to submit" in loser.stdout
    view = View(load(folder))
    jobs = {state.unit.id: state.job for state in view.read()}
    assert len(set(jobs.values())) == 6 and len({job.partition("_")[0] for job in jobs.values()}) == 2

    # Each fault hits a unit that has measured something and has more left than it can do between SIGTERM and SIGKILL.
    faults = iter(("preempt", "cancel", "kill"))
    hit: dict[str, str] = {}
    end = time.monotonic() + 240
    while not ended(folder):
        assert time.monotonic() < end, states(folder)
        for state in view.read():
            fresh = state.state == RUNNING and state.unit.id not in hit and 3 <= state.tally.cells < 8
            if fresh and (fault := next(faults, None)) is not None:
                hit[state.unit.id] = fault
                if fault == "kill":
                    process_of(str(folder / "units" / state.unit.id)).send_signal(signal.SIGKILL)
                elif fault == "cancel":
                    subprocess.run(["scancel", state.job], check=True)
                else:
                    # The job gets it and requeues itself; scancel then finds it "in transition" and signals again.
                    subprocess.run(["timeout", "2", "scancel", "--signal=USR2", state.job])
        time.sleep(0.3)
    assert sorted(hit.values()) == ["cancel", "kill", "preempt"]
    now = states(folder)
    assert {hit.get(unit): state for unit, state in now.items() if unit in hit} == {
        "preempt": DONE,  # requeued by itself
        "cancel": FAILED,
        "kill": FAILED,
    }
    assert all(state == DONE for unit, state in now.items() if unit not in hit)
    status = command("status", str(folder), cwd=tmp_path)
    assert status.returncode == 1 and "CANCELLED" in status.stdout
    incomplete = command("collect", str(folder), cwd=tmp_path)
    assert incomplete.returncode == 1 and "PROBLEM" in incomplete.stderr and "requests missing" in incomplete.stderr

    # The rest, on another device: what has no partner there is measured again, nothing else.
    env = hooked(tmp_path, sleep=0, device="gpu-b")
    again = submit(folder, overrides, **env)
    assert "submitted 2 units" in again.stdout, again.stderr
    wait_for(lambda: ended(folder), 90)
    assert set(states(folder).values()) == {DONE}
    counts = good(folder)
    assert set(counts.values()) == {1}
    requests = {(unit, request) for unit, request, _, _ in counts}
    assert len(requests) == 48
    for unit, request in requests:
        pairs = [
            {arm for u, r, arm, d in counts if (u, r, d) == (unit, request, device)} for device in ("gpu-a", "gpu-b")
        ]
        assert any({"ar", "original", "fold"} <= arms for arms in pairs)
    assert "nothing to submit" in submit(folder, overrides, **env).stdout
    assert command("status", str(folder), cwd=tmp_path).returncode == 0
    whole = command("collect", str(folder), cwd=tmp_path)
    assert whole.returncode == 0, whole.stderr
    runs = load_runs(folder / "collected")
    assert len(runs.used) == 48 * 3 and len(runs.excluded) == 0
    assert AR_AGAIN in set(runs.again["arm"])


def test_a_dead_slurmd_and_a_full_disk(cluster: Path, tmp_path: Path) -> None:
    folder = tmp_path / "submission"
    env = hooked(tmp_path, sleep=0.02)
    overrides = [*toy(tmp_path / "pair", 120), "methods=[original,fold]", "slurm.shards=2"]
    # A limit on the size of a file stands for the full disk: the write in the middle of a run fails.
    full = submit(folder, overrides, "slurm.setup=['ulimit -f 48']", **env)
    assert "submitted 2 units" in full.stdout, full.stderr
    wait_for(lambda: ended(folder), 60)
    assert set(states(folder).values()) == {FAILED}
    status = command("status", str(folder), cwd=tmp_path)
    assert status.returncode == 1 and "0 done" not in status.stdout
    before = sum(good(folder).values())
    assert before > 0

    env = hooked(tmp_path, sleep=0.08)
    assert "submitted 2 units" in submit(folder, overrides, **env).stdout
    wait_for(lambda: sum(good(folder).values()) > before + 6, 60)
    daemon = int((cluster / "slurmd.pid").read_text())
    os.kill(daemon, signal.SIGKILL)
    time.sleep(3)
    subprocess.run(["slurmd", "-N", "fold"], check=True, capture_output=True, env={**os.environ, "PATH": PATH})
    wait_for(lambda: ended(folder), 120)
    if set(states(folder).values()) != {DONE}:
        submit(folder, overrides, **hooked(tmp_path, sleep=0))
        wait_for(lambda: ended(folder), 90)
    assert set(states(folder).values()) == {DONE}
    assert set(good(folder).values()) == {1}
    assert command("collect", str(folder), cwd=tmp_path).returncode == 0


PATH = f"{os.environ.get('PATH', '')}:/usr/sbin"


def test_the_demo_as_arrays_accepts_what_the_local_run_accepts(cluster: Path, tmp_path: Path) -> None:
    drafter = random_drafter(tmp_path / "drafter")
    overrides = [f"drafter.source={drafter}", "drafter.block=5", "benchmark.levels=[1K]", "benchmark.n=2"]
    overrides += ["benchmark.max_new_tokens=8", f"data_dir={tmp_path / 'data'}", "drift_requests=0", "warmup_tokens=0"]
    folder = tmp_path / "submission"
    given = ["+experiment=demo", "methods=[original,fold]", *overrides, "slurm.shards=2"]
    done = submit(folder, given, OMP_NUM_THREADS="1")
    assert done.returncode == 0 and "submitted 6 units" in done.stdout, done.stderr
    local = subprocess.run(
        [sys.executable, "-m", "harness.cli", "benchmark=demo", "methods=[original,fold]", *overrides, "run_dir=local"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert local.returncode == 0, local.stderr
    wait_for(lambda: ended(folder), 540)
    assert command("collect", str(folder), cwd=tmp_path).returncode == 0
    tables = []
    for runs in (load_runs(tmp_path / "local"), load_runs(folder / "collected")):
        rows = runs.used[["benchmark", "request", "arm", "tau", "n_out", "rounds"]].astype("str")
        tables.append(sorted(rows.itertuples(index=False, name=None)))
    assert tables[0] == tables[1] and len(tables[0]) == 6 * 3
    assert {row[0] for row in tables[0]} == {"demo_code", "demo_docs", "demo_kv"}


def random_drafter(folder: Path) -> Path:
    """A drafter for the demo target with random weights: acceptance is near 1, and the same everywhere."""
    from data_prep.demo.target import ensure_target
    from harness.drafters import read_config
    from harness.drafters.checkpoint import random_tensors, save_drafter

    target = json.loads((ensure_target() / "config.json").read_text())
    folder.mkdir()
    raw = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "block_size": 5,
        "dflash_config": {"mask_token_id": 60, "target_layer_ids": [1, 14]},
        "num_target_layers": target["num_hidden_layers"],
        "num_hidden_layers": 1,
        "hidden_size": target["hidden_size"],
        "intermediate_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": 8192,
        "vocab_size": target["vocab_size"],
    }
    (folder / "config.json").write_text(json.dumps(raw))
    config = read_config(folder)
    save_drafter(folder, config, random_tensors(config, seed=1))
    return folder
