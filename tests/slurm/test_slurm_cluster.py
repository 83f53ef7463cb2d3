"""A real SLURM on this machine (cluster.sh): the demo as arrays, and everything that goes wrong on clusters."""

from __future__ import annotations

import getpass
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
from typing import Any

import psutil
import pytest

from analysis.load import load as load_runs
from harness.provenance import RUN_FILE
from harness.records import AR_AGAIN, RECORDS, read_records
from slurm import queue
from slurm.status import DONE, FAILED, RUNNING, UnitState, View
from slurm.units import load
from tests.harness.helpers import toy_pair
from tests.slurm.slurm_fixtures import ROOT, command, hooked, states, toy, wait_for

pytestmark = pytest.mark.slow
SCRIPT = Path(__file__).parent / "cluster.sh"
MAX_ARRAY = 5
# What the test cluster has: two slots that look like GPUs.
ON_CLUSTER = ["slurm.cpus_per_task=1", "slurm.mem=null", "slurm.time_min=30", "slurm.signal_delay_s=5", "slurm.env={}"]
# Nothing below is a matter of speed: a wait ends with its condition, and this only bounds a hang on a slow machine.
PATIENCE = 600


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    if not os.environ.get("FOLD_BENCH_SLURM"):
        pytest.skip("starts a SLURM cluster of its own: set FOLD_BENCH_SLURM=1 where slurm-wlm and munge are installed")
    folder = tmp_path_factory.mktemp("cluster")
    try:
        started = subprocess.run([SCRIPT, "start", folder, str(MAX_ARRAY)], capture_output=True, text=True, timeout=180)
        # It was asked for: tests that are left out would look like tests that pass.
        assert started.returncode == 0, started.stderr
        os.environ["SLURM_CONF"] = str(folder / "slurm.conf")
        yield folder
    finally:
        if os.environ.pop("SLURM_CONF", None):
            conf = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
            subprocess.run(["scancel", f"--user={getpass.getuser()}"], capture_output=True, env=conf)
            time.sleep(2)
        subprocess.run([SCRIPT, "stop", folder], capture_output=True)


def submit(folder: Path, overrides: list[str], *more: str, **env: str) -> subprocess.CompletedProcess[str]:
    return command("submit", "--yes", f"run_dir={folder}", *ON_CLUSTER, *overrides, *more, cwd=folder.parent, **env)


def ended(folder: Path) -> bool:
    return not {"running", "pending"} & set(states(folder).values())


def at_the_gate(folder: Path, cells: int) -> dict[str, UnitState]:
    """Running units that have measured so many cells and wait."""
    found = {state.unit.id: state for state in View(load(folder)).read()}
    return {unit: state for unit, state in found.items() if state.state == RUNNING and state.tally.cells == cells}


def good(folder: Path) -> Counter[tuple[str, str, str, str]]:
    """How often each (unit, request, arm, device) has a good record."""
    found: Counter[tuple[str, str, str, str]] = Counter()
    for path in (folder / "units").glob(f"*/{RECORDS}"):
        for record in read_records(path):
            if not record.warmup and not record.error:
                found[path.parent.name, record.request_id, record.method, record.device_uuid] += 1
    return found


def starts(folder: Path, unit: str) -> list[dict[str, Any]]:
    return json.loads((folder / "units" / unit / RUN_FILE).read_bytes())["starts"]


def process_of(run_dir: Path) -> psutil.Process:
    """The job step's Python that decodes a unit: the one that holds its lock."""
    return psutil.Process(int((run_dir / ".writer").read_text().split()[1]))


def test_preemption_cancellation_kills_and_two_submits_lose_and_double_nothing(cluster: Path, tmp_path: Path) -> None:
    folder, gate = tmp_path / "submission", tmp_path / "gate"
    gate.touch()
    # Eight decodes: a warm-up of each of the three arms, and five cells of a unit's 24.
    env = hooked(tmp_path, device="gpu-a", gate=str(gate), after=8)
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
    jobs = {state.unit.id: state.job for state in View(load(folder)).read()}
    assert len(set(jobs.values())) == 6 and len({job.partition("_")[0] for job in jobs.values()}) == 2

    # Two run at a time, and wait. Each fault hits one in the middle of its work.
    wait_for(lambda: len(at_the_gate(folder, 5)) == 2, PATIENCE)
    preempted, cancelled = at_the_gate(folder, 5)
    # The job gets it and requeues itself; scancel then finds it "in transition" and signals again.
    subprocess.run(["timeout", "2", "scancel", "--signal=USR2", jobs[preempted]])
    subprocess.run(["scancel", jobs[cancelled]], check=True)
    wait_for(lambda: set(at_the_gate(folder, 5)) - {preempted, cancelled}, PATIENCE)
    killed = next(iter(set(at_the_gate(folder, 5)) - {preempted, cancelled}))
    process_of(folder / "units" / killed).send_signal(signal.SIGKILL)
    wait_for(lambda: states(folder)[killed] == states(folder)[cancelled] == FAILED, PATIENCE)
    told = command("status", str(folder), cwd=tmp_path)
    assert told.returncode == 1 and "2 failed" in told.stdout and "pending" in told.stdout
    gate.unlink()
    wait_for(lambda: ended(folder), PATIENCE)
    now = states(folder)
    assert [unit for unit, state in now.items() if state == FAILED] == [u for u in now if u in (cancelled, killed)]
    assert list(now.values()).count(DONE) == 4
    assert [len(starts(folder, unit)) for unit in (preempted, cancelled, killed)] == [2, 1, 1]  # requeued by itself
    status = command("status", str(folder), cwd=tmp_path)
    assert status.returncode == 1 and "CANCELLED" in status.stdout and "34 of 48 requests measured" in status.stdout
    incomplete = command("collect", str(folder), cwd=tmp_path)
    assert incomplete.returncode == 1 and "PROBLEM" in incomplete.stderr and "requests missing" in incomplete.stderr

    # The rest, on another device: what has no partner there is measured again, nothing else.
    env = hooked(tmp_path, device="gpu-b")
    again = submit(folder, overrides, **env)
    assert "submitted 2 units" in again.stdout, again.stderr
    wait_for(lambda: ended(folder), PATIENCE)
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
    # Five cells are one whole request and two of another: only that one has records on both devices.
    moved = {(u, r) for u, r, _, d in counts if d == "gpu-a"} & {(u, r) for u, r, _, d in counts if d == "gpu-b"}
    assert {unit for unit, _ in moved} == {cancelled, killed}
    assert "nothing to submit" in submit(folder, overrides, **env).stdout
    assert command("status", str(folder), cwd=tmp_path).returncode == 0
    whole = command("collect", str(folder), cwd=tmp_path)
    assert whole.returncode == 0, whole.stderr
    runs = load_runs(folder / "collected")
    assert len(runs.used) == 48 * 3 and len(runs.excluded) == 0
    assert AR_AGAIN in set(runs.again["arm"])


def test_a_full_disk_stops_the_units_and_room_lets_them_go_on(cluster: Path, tmp_path: Path) -> None:
    folder = tmp_path / "submission"
    (folder / "units").mkdir(parents=True)
    overrides = [*toy(tmp_path / "pair", 120), "methods=[original,fold]", "slurm.shards=2"]
    env = hooked(tmp_path)
    # A file system of its own that fills up; where that cannot be had, a limit on the size of a file stands for it.
    disk = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=128k", "none", folder / "units"], capture_output=True)
    small = [] if disk.returncode == 0 else ["slurm.setup=['ulimit -f 48']"]
    try:
        full = submit(folder, overrides, *small, **env)
        assert "submitted 2 units" in full.stdout, full.stderr
        wait_for(lambda: ended(folder), PATIENCE)
        assert set(states(folder).values()) == {FAILED}
        status = command("status", str(folder), cwd=tmp_path)
        assert status.returncode == 1 and "2 failed" in status.stdout
        told = [state.note for state in View(load(folder)).read()]
        # A unit that starts when the other has filled the disk cannot write its run.json either.
        full_disk = ("No space left on device", "File too large")
        assert all(any(reason in note for reason in full_disk) for note in told), "\n".join(told)
        assert any("records.jsonl cannot be written (" in note and "make room" in note for note in told), told
        before = good(folder)
        assert 0 < sum(before.values()) < 360 and set(before.values()) == {1}
        if disk.returncode == 0:
            subprocess.run(["mount", "-o", "remount,size=64m", folder / "units"], check=True)
        assert "submitted 2 units" in submit(folder, overrides, **env).stdout
        wait_for(lambda: ended(folder), PATIENCE)
        assert set(states(folder).values()) == {DONE}
        after = good(folder)
        assert len({key for key in after if key[2] != AR_AGAIN}) == 360 and set(after.values()) == {1}
        assert before <= after
        assert command("collect", str(folder), cwd=tmp_path).returncode == 0
    finally:
        if disk.returncode == 0:
            subprocess.run(["umount", "--lazy", folder / "units"], capture_output=True)


def test_a_dead_slurmd_loses_and_doubles_nothing(cluster: Path, tmp_path: Path) -> None:
    folder, gate = tmp_path / "submission", tmp_path / "gate"
    gate.touch()
    overrides = [*toy(tmp_path / "pair", 16), "methods=[original,fold]", "slurm.shards=2"]
    assert "submitted 2 units" in submit(folder, overrides, **hooked(tmp_path, gate=str(gate), after=8)).stdout
    wait_for(lambda: len(at_the_gate(folder, 5)) == 2, PATIENCE)
    daemon = psutil.Process(int((cluster / "slurmd.pid").read_text()))
    daemon.kill()
    daemon.wait(PATIENCE)
    # The controller gives the node up and requeues its jobs, whose processes live on: the worst it can do.
    wait_for(lambda: "running" not in queue_states(folder), PATIENCE)
    assert not {DONE, FAILED} & set(states(folder).values())
    subprocess.run([SCRIPT, "node", cluster], check=True, capture_output=True)
    gate.unlink()
    wait_for(lambda: ended(folder), PATIENCE)
    # A requeued job that met the old process at work was refused by the run directory's lock.
    if set(states(folder).values()) != {DONE}:
        assert "submitted" in submit(folder, overrides, **hooked(tmp_path)).stdout
        wait_for(lambda: ended(folder), PATIENCE)
    assert set(states(folder).values()) == {DONE}
    counts = good(folder)
    assert set(counts.values()) == {1} and len({key[:2] for key in counts}) == 16
    assert command("collect", str(folder), cwd=tmp_path).returncode == 0


def queue_states(folder: Path) -> set[str]:
    return {state.state.lower() for state in queue.job_states(load(folder).job_name).values()}


def test_hydras_own_launcher_sends_a_sweep_to_slurm(cluster: Path, tmp_path: Path) -> None:
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher")
    env = hooked(tmp_path)
    path = os.pathsep.join([str(ROOT), env.pop("PYTHONPATH"), os.environ.get("PYTHONPATH", "")])
    launcher = ["hydra/launcher=submitit_slurm", "hydra.launcher.gres=gpu:1", "hydra.launcher.timeout_min=30"]
    launcher += ["hydra.launcher.max_num_timeout=100", "hydra.launcher.cpus_per_task=1"]
    done = subprocess.run(
        [sys.executable, "-m", "harness.cli", *toy_pair(tmp_path / "pair", 4), "-m", "method=fold,window", *launcher],
        cwd=tmp_path,
        env={**os.environ, **env, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stderr
    runs = load_runs(sorted((tmp_path / "results" / "runs").iterdir()))
    assert set(runs.used["arm"]) == {"ar", "fold", "window"} and len(runs.excluded) == 0


def test_the_demo_as_arrays_accepts_what_the_local_run_accepts(cluster: Path, tmp_path: Path) -> None:
    overrides = ["benchmark.levels=[1K]", "benchmark.n=2", "benchmark.max_new_tokens=16", "drift_requests=0"]
    overrides += [f"data_dir={tmp_path / 'data'}", "warmup_tokens=0", "engine.threads=1"]
    folder = tmp_path / "submission"
    given = ["+experiment=demo", "methods=[original,fold]", *overrides, "slurm.shards=2"]
    done = submit(folder, given, OMP_NUM_THREADS="1")
    assert done.returncode == 0 and "submitted 6 units" in done.stdout, done.stderr
    local = subprocess.run(
        [sys.executable, "-m", "harness.cli", "benchmark=demo", "methods=[original,fold]", *overrides, "run_dir=local"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])},
        capture_output=True,
        text=True,
    )
    assert local.returncode == 0, local.stderr
    wait_for(lambda: ended(folder), 2 * PATIENCE)
    assert command("collect", str(folder), cwd=tmp_path).returncode == 0
    tables = []
    for runs in (load_runs(tmp_path / "local"), load_runs(folder / "collected")):
        rows = runs.used[["benchmark", "request", "arm", "tau", "n_out", "rounds"]].astype("str")
        tables.append(sorted(rows.itertuples(index=False, name=None)))
    assert tables[0] == tables[1] and len(tables[0]) == 6 * 3
    assert {row[0] for row in tables[0]} == {"demo_code", "demo_docs", "demo_kv"}
    assert len({row[3] for row in tables[0]}) > 3  # the drafter really drafts: τ differs from request to request
