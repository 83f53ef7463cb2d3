"""The paired run: order, warm-ups, drift, resuming after a kill, failures, devices."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from analysis.summary import summarise
from harness.bench import FAILURES_IN_A_ROW, Options, arms_of
from harness.engines.base import EngineInfo
from harness.records import AR_AGAIN, RECORDS, Record, RecordError, read_records, tau, tpot
from tests.harness import scripted
from tests.harness.helpers import ROOT, agreement, records, run_toy
from tests.harness.scripted import make_arms


def cells(run_dir: Path) -> Counter[tuple[str, str]]:
    """Good records per (request, arm)."""
    return Counter((record.request_id, record.method) for record in records(run_dir) if not record.error)


def expected(count: int, *arms: str) -> dict[tuple[str, str], int]:
    again = {(f"r{place:03d}", AR_AGAIN): 1 for place in range(min(count, 3))}
    return {(f"r{place:03d}", arm): 1 for place in range(count) for arm in arms} | again


def test_arms() -> None:
    names = [arm.name for arm in make_arms("original", "fold")]
    assert names == ["ar", "original", "fold"]  # AR is always run, and is the baseline
    assert [arm.name for arm in make_arms("fold", "ar")] == ["ar", "fold"]
    assert [arm.name for arm in make_arms("ar", "ar", "fold", "fold")] == ["ar", "ar#2", "fold", "fold#2"]
    assert [arm.method for arm in arms_of([("ar", None, {})])] == [None]


def test_known_rounds_give_known_numbers(tmp_path: Path) -> None:
    run_toy(tmp_path, scripted.Scripted(commit=4, step_s=0.01, round_s=0.02), arms=("fold",))
    by_cell = {(record.request_id, record.method): record for record in records(tmp_path)}
    fold, ar = by_cell["r000", "fold"], by_cell["r000", "ar"]
    assert fold.commits == [4, 4, 3] and fold.overrun == 1  # 12 tokens, the first one from prefill, the limit cuts
    assert tau(fold) == pytest.approx(11 / 3) and tpot(fold) == pytest.approx(0.06 / 11)
    assert tau(ar) == 1 and tpot(ar) == pytest.approx(0.01)
    assert fold.level == "1K" and fold.prompt_tokens == 40 and len(fold.prompt_sha256) == 64


def test_every_arm_comes_first_equally_often_at_each_length(tmp_path: Path) -> None:
    engine = scripted.Scripted()
    run_toy(tmp_path, engine, count=12, options=Options(warmup_tokens=0, drift_requests=0))
    first: dict[str, Counter[str]] = {"1K": Counter(), "2K": Counter()}
    seen: set[str] = set()
    for record in sorted(records(tmp_path), key=lambda record: record.order):
        if record.request_id not in seen:
            seen.add(record.request_id)
            first[record.level or ""][record.method] += 1
    assert first == {level: {"ar": 2, "original": 2, "fold": 2} for level in ("1K", "2K")}
    # One request is finished before the next begins, so that they share a prefill.
    order = [request for request, _ in engine.calls]
    assert order == sorted(order)


def test_an_engine_that_restarts_runs_arm_after_arm(tmp_path: Path) -> None:
    engine = scripted.ArmAfterArm()
    run_toy(tmp_path, engine, options=Options(warmup_tokens=0, drift_requests=2))
    assert [method for _, method in engine.calls] == [None] * 6 + ["original"] * 6 + ["fold"] * 6 + [None] * 2


def test_an_engine_that_restarts_does_not_start_an_arm_that_has_nothing_left(tmp_path: Path) -> None:
    class Starts(scripted.ArmAfterArm):
        def __init__(self) -> None:
            super().__init__()
            self.started: list[str | None] = []

        def describe(self, method: Any | None) -> EngineInfo:
            self.started.append(getattr(method, "name", None))
            return super().describe(method)

    run_toy(tmp_path, Starts(), arms=("original",))
    engine = Starts()
    run_toy(tmp_path, engine, arms=("original", "fold"))
    assert engine.started == [None, "fold"]
    engine = Starts()
    report = run_toy(tmp_path, engine, arms=("original", "fold"))
    assert engine.started == [None] and report.ok and report.decoded == 0


@pytest.mark.parametrize("engine", [scripted.Scripted, scripted.ArmAfterArm])
def test_warm_ups_per_length_and_arm_are_stored_and_not_counted(
    tmp_path: Path, engine: type[scripted.Scripted]
) -> None:
    run_toy(tmp_path, engine(), arms=("fold",))
    warm = [record for record in read_records(tmp_path / RECORDS) if record.warmup]
    kinds = Counter((record.level, record.method) for record in warm)
    wanted = [(level, arm) for level in ("1K", "2K") for arm in ("ar", "fold")]
    # A restarted engine is cold again when AR is repeated at the end.
    wanted += [("1K", AR_AGAIN), ("2K", AR_AGAIN)] if engine is scripted.ArmAfterArm else []
    assert kinds == Counter(wanted)
    assert all(len(record.output_ids) <= 4 for record in warm)
    for record in warm:  # before the first counted record of its arm and length
        timed = [r.order for r in records(tmp_path) if (r.level, r.method) == (record.level, record.method)]
        assert record.order < min(timed)
    orders = [record.order for record in read_records(tmp_path / RECORDS)]
    assert orders == list(range(len(orders)))


def test_ar_against_itself_is_one(tmp_path: Path) -> None:
    """The A/A control: two autoregressive arms and the repeated pass at the end."""
    report = run_toy(tmp_path, scripted.Scripted(), arms=("ar", "ar"), count=8)
    assert report.ok and cells(tmp_path) == expected(8, "ar", "ar#2")
    rows = {(row.level, row.arm): row for row in summarise(tmp_path).rows}
    for level in ("1K", "2K"):
        control = rows[level, "ar#2"].speedup
        assert control.value == pytest.approx(1.0)
        assert not control.has_interval or control.low <= 1 <= control.high


def test_starting_a_finished_unit_again_does_nothing(tmp_path: Path) -> None:
    run_toy(tmp_path, scripted.Scripted())
    before = (tmp_path / RECORDS).read_bytes()
    engine = scripted.Scripted()
    report = run_toy(tmp_path, engine)
    assert report.ok and report.decoded == 0 and not engine.calls and not engine.judged
    assert report.exact == {"original": (6, 6), "fold": (6, 6)}
    assert (tmp_path / RECORDS).read_bytes() == before


def numbers(run_dir: Path) -> dict[tuple[str, str], tuple[float | None, float | None, list[int]]]:
    return {(r.request_id, r.method): (tau(r), tpot(r), r.output_ids) for r in records(run_dir)}


def test_kill_9_at_twenty_moments_loses_and_doubles_nothing(tmp_path: Path) -> None:
    """kill -9 twenty times, then start again: every (request, arm) once, and the numbers of an undisturbed run."""
    run_dir, chance = tmp_path / "killed", random.Random(7)
    command = [sys.executable, "-m", "tests.harness.scripted", str(run_dir), "device-a"]

    def size() -> int:
        return (run_dir / RECORDS).stat().st_size if (run_dir / RECORDS).exists() else 0

    for _ in range(20):
        child = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE)
        before = size()
        while child.poll() is None and size() == before:
            time.sleep(0.002)
        time.sleep(chance.random() * 0.03)  # a decode takes 4 ms, so any stage of writing and decoding may be hit
        assert child.poll() is None, "the run must still be going on for the kill to mean something"
        child.kill()
        child.wait()
    finished = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert finished.returncode == 0 and "True" in finished.stdout, finished.stdout + finished.stderr
    assert cells(run_dir) == expected(scripted.KILLED_REQUESTS, "ar", "original", "fold")
    undisturbed = tmp_path / "undisturbed"
    run_toy(undisturbed, scripted.Scripted(), count=scripted.KILLED_REQUESTS)
    assert numbers(run_dir) == numbers(undisturbed)
    orders = [record.order for record in read_records(run_dir / RECORDS)]
    assert len(set(orders)) == len(orders)
    assert len({line["request_id"] + line["arm"] for line in agreement(run_dir)}) == len(agreement(run_dir)) == 2


def test_a_verdict_is_not_taken_over_by_another_output(tmp_path: Path) -> None:
    """Records were removed by hand and the verdicts stayed: the new outputs are judged themselves."""
    assert not run_toy(tmp_path, scripted.NearTie(gap=0.0005), arms=("fold",)).gates
    (tmp_path / RECORDS).unlink()
    gates = run_toy(tmp_path, scripted.Looping(), arms=("fold",)).gates
    assert len(gates) == 6 and any("r002 by fold: logit gap 5" in gate for gate in gates)


def test_a_torn_line_is_redone(tmp_path: Path) -> None:
    run_toy(tmp_path, scripted.Scripted(), options=Options(drift_requests=0))
    path = tmp_path / RECORDS
    path.write_bytes(path.read_bytes()[:-10])
    report = run_toy(tmp_path, scripted.Scripted(), options=Options(drift_requests=0))
    assert report.decoded == 1
    assert set(cells(tmp_path).values()) == {1} and len(cells(tmp_path)) == 18


def test_a_failure_is_one_cell_and_is_tried_again_at_the_next_start(tmp_path: Path) -> None:
    report = run_toy(tmp_path, scripted.OutOfMemory())
    assert not report.ok and report.missing == 0
    assert list(report.failed) == ["r001 by fold"] and "out of memory: 3 GiB more" in report.failed["r001 by fold"]
    assert sum(cells(tmp_path).values()) == 17 + 3
    summary = summarise(tmp_path)
    assert summary.failures and any("left out of every arm: 1" in line for line in summary.counts)

    engine = scripted.OutOfMemory(heals=0)
    healed = run_toy(tmp_path, engine)
    assert healed.ok and [call for call in engine.calls if call[0] == "r001"].count(("r001", "fold")) >= 1
    assert cells(tmp_path) == expected(6, "ar", "original", "fold")
    tries = [r for r in records(tmp_path) if (r.request_id, r.method) == ("r001", "fold")]
    assert [(r.attempt, bool(r.error)) for r in tries] == [(1, True), (2, False)]
    assert not summarise(tmp_path).failures


def test_a_dead_engine_is_given_up_and_says_what_is_missing(tmp_path: Path) -> None:
    engine = scripted.Dead()
    report = run_toy(tmp_path, engine, count=50)
    assert not report.ok and report.missing == 50 * 3 - len(report.failed)
    assert len(report.failed) == 3 * FAILURES_IN_A_ROW
    assert len(engine.calls) < 20
    assert run_toy(tmp_path, scripted.Scripted(), count=50).ok


def test_a_failing_description_refuses_the_arm(tmp_path: Path) -> None:
    class Undescribed(scripted.Scripted):
        def describe(self, method):  # type: ignore[no-untyped-def]
            if method is not None and method.name == "fold":
                raise RuntimeError("plugin not loaded")
            return super().describe(method)

    report = run_toy(tmp_path, Undescribed())
    assert not report.ok and "plugin not loaded" in report.refused[0] and report.missing == 6


def test_another_device_measures_unpaired_requests_anew(tmp_path: Path) -> None:
    class Interrupted(scripted.Scripted):
        def decode(self, request, method):  # type: ignore[no-untyped-def]
            if len(self.calls) == 14:
                raise KeyboardInterrupt
            return super().decode(request, method)

    with pytest.raises(KeyboardInterrupt):
        run_toy(tmp_path, Interrupted(device="device-a"))
    first = {(r.request_id, r.method) for r in records(tmp_path)}
    whole = {request for request, _ in first if len({m for r, m in first if r == request}) == 3}
    partial = {request for request, _ in first} - whole
    assert whole and partial

    report = run_toy(tmp_path, scripted.Scripted(device="device-b"))
    assert report.ok
    later = {(r.request_id, r.method) for r in records(tmp_path) if r.device_uuid == "device-b"}
    assert not {request for request, _ in later} & whole
    assert all((request, arm) in later for request in partial for arm in ("ar", "original", "fold"))
    used = summarise(tmp_path)
    assert not used.failures
    for request in (f"r{place:03d}" for place in range(6)):
        by_device: dict[str, set[str]] = {}
        for record in records(tmp_path):
            if record.request_id == request:
                by_device.setdefault(record.device_uuid, set()).add(record.method)
        assert any({"ar", "original", "fold"} <= arms for arms in by_device.values())
    # And once more on the first device: everything is paired somewhere, so nothing is left to do.
    assert run_toy(tmp_path, scripted.Scripted(device="device-a")).decoded == 0


def test_records_of_another_configuration_are_not_continued(tmp_path: Path) -> None:
    run_toy(tmp_path, scripted.Scripted())
    with pytest.raises(RecordError, match="another configuration"):
        run_toy(tmp_path, scripted.Scripted(), run="toy-ffffffffffff")


def test_a_full_disk_in_the_middle_of_a_unit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from harness.records import RecordWriter

    real, written = RecordWriter.append, 0

    def full(self: RecordWriter, record: Record) -> None:
        nonlocal written
        written += 1
        if written == 9:
            raise RecordError("no space")
        real(self, record)

    monkeypatch.setattr(RecordWriter, "append", full)
    with pytest.raises(RecordError):
        run_toy(tmp_path, scripted.Scripted())
    monkeypatch.undo()
    assert run_toy(tmp_path, scripted.Scripted()).ok
    assert cells(tmp_path) == expected(6, "ar", "original", "fold")


def test_shards_partition_the_requests(tmp_path: Path) -> None:
    unit = scripted.make_unit(scripted.make_requests(7), shard=1, shards=3)
    assert [request.id for request in unit] == ["r001", "r004"] and len(unit) == 2
    assert unit.name == "pair/scripted/toy/1of3"
