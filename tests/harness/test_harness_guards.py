"""Every scripted cheat is caught, and the honest engine is not."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.bench import Options
from harness.guards import first_difference, judge, near_tie_bound, repetition, work_flags
from tests.harness import scripted
from tests.harness.helpers import agreement, records, run_toy


@pytest.mark.parametrize("engine", [scripted.Scripted, scripted.ArmAfterArm])
def test_the_honest_engine_passes_everything(tmp_path: Path, engine: type[scripted.Scripted]) -> None:
    report = run_toy(tmp_path, engine())
    assert report.ok and not report.flags and report.cells == report.decoded == 18
    assert report.exact == {"original": (6, 6), "fold": (6, 6)}
    assert report.skipped_rounds == 0


REFUSED = {
    scripted.CachedPrefix: "32 prompt tokens came from a cache",
    scripted.Truncated: "the output was cut: 10 of 12 tokens",
    scripted.Dropping: "no output (a dropped request)",
    scripted.HiddenSkip: "0 skipped rounds reported, 1 proposed nothing",
    scripted.WrongMethod: "the engine says that original was active, not fold",
    scripted.SilentMethod: "the engine says that no method was active, not fold",
    scripted.BeyondCap: "a round committed 11 tokens, not 1 to 8",
    scripted.BackwardsClock: "the clock runs backwards",
    scripted.EngineTau: "1 first + 12 committed tokens, but 12 delivered",
    scripted.PastTheStop: "the output goes on after the stop token",
}


@pytest.mark.parametrize(("engine", "reason"), REFUSED.items(), ids=lambda value: getattr(value, "__name__", ""))
def test_an_impossible_answer_is_refused_and_named(
    tmp_path: Path, engine: type[scripted.Scripted], reason: str
) -> None:
    report = run_toy(tmp_path, engine(), arms=("fold",))
    assert not report.ok
    assert report.failed and all(reason in text for text in report.failed.values())
    kept = {(record.request_id, record.method) for record in records(tmp_path) if not record.error}
    assert not kept & {tuple(cell.split(" by ")) for cell in report.failed}
    for record in records(tmp_path):
        assert not (record.error and record.output_ids)


@pytest.mark.parametrize("engine", [scripted.Looping, scripted.Shuffled])
def test_another_text_fails_the_gate(tmp_path: Path, engine: type[scripted.Scripted]) -> None:
    report = run_toy(tmp_path, engine(), arms=("fold",))
    assert not report.ok and any("by fold: logit gap 5" in gate for gate in report.gates)
    assert not any("by ar" in gate for gate in report.gates)


def test_the_wrong_text_in_all_arms_fails_the_gate(tmp_path: Path) -> None:
    """No output differs from the autoregressive one, so only the target itself can tell."""
    report = run_toy(tmp_path, scripted.ShuffledEverywhere(), arms=("fold",))
    assert report.exact == {"fold": (6, 6)}
    assert not report.ok and any("by ar: logit gap 5" in gate for gate in report.gates)


def test_a_repetition_loop_is_flagged(tmp_path: Path) -> None:
    report = run_toy(tmp_path, scripted.Looping(), arms=("fold",), limit=64)
    assert "fold: 6 of 6 outputs loop where the autoregressive one does not" in report.flags
    assert any("end for another reason" in flag for flag in report.flags)


def test_arms_under_other_settings_are_not_paired(tmp_path: Path) -> None:
    engine = scripted.OtherScheduler()
    report = run_toy(tmp_path, engine)
    assert not report.ok and len(report.refused) == 2
    assert "fold runs under other settings than ar (async_scheduling: True, False)" in report.refused
    assert {record.method for record in records(tmp_path)} == {"ar", "ar@end"}


def test_skipped_rounds_are_reported_apart(tmp_path: Path) -> None:
    report = run_toy(tmp_path, scripted.SkippedDrafter(), arms=("fold",))
    assert report.ok and report.skipped_rounds > 0
    assert sum(record.skipped_rounds for record in records(tmp_path)) == report.skipped_rounds


def test_a_near_tie_passes_with_a_note_and_a_large_gap_fails(tmp_path: Path) -> None:
    near = run_toy(tmp_path / "near", scripted.NearTie(0.01), options=Options(max_gap=0.5))
    assert near.ok and near.exact["fold"] == (5, 6)
    line = next(line for line in agreement(tmp_path / "near") if line["arm"] == "fold")
    assert (line["request_id"], line["divergence"], line["max_gap_at"]) == ("r002", 5, 5)
    assert line["passed"] and line["gap_there"] == line["max_gap"] == 0.01 and not line["equal"]

    far = run_toy(tmp_path / "far", scripted.NearTie(3.0), options=Options(max_gap=0.5))
    assert not far.ok
    assert "r002 by fold: logit gap 3 at token 5, allowed 0.5" in far.gates
    again = run_toy(tmp_path / "far", scripted.NearTie(3.0), options=Options(max_gap=0.5))
    assert again.gates == far.gates and again.decoded == 0  # a failed gate does not pass by starting again


def test_the_same_other_output_is_judged_once(tmp_path: Path) -> None:
    engine = scripted.NearTie(0.01)
    run_toy(tmp_path, engine, options=Options(max_gap=0.5), arms=("original", "window", "fold"))
    assert engine.judged.count("r002") == 2  # AR's output and the one that three methods share


def test_an_engine_that_cannot_judge_does_not_pass(tmp_path: Path) -> None:
    report = run_toy(tmp_path, scripted.NoJudge(0.01), options=Options(max_gap=0.5))
    assert not report.ok and any("cannot score a given text" in gate for gate in report.gates)


def test_the_allowed_gap_follows_the_dtype() -> None:
    assert near_tie_bound("float32") == 1e-3 < near_tie_bound("float16") < near_tie_bound("torch.bfloat16") == 0.5
    with pytest.raises(ValueError, match="int8; set max_gap="):
        near_tie_bound("int8")


@pytest.mark.parametrize("gaps", [[0.0], [0.0, float("nan")], [0.0, -1.0], [0.0, float("inf")]])
def test_gaps_that_are_none_fail(gaps: list[float]) -> None:
    assert not judge(lambda: gaps, 2, None, 100.0)["passed"]


def test_first_difference() -> None:
    assert first_difference([1, 2], [1, 2]) is None
    assert first_difference([1, 3], [1, 2]) == 1
    assert first_difference([1], [1, 2]) == first_difference([1, 2], [1]) == 1


def test_repetition() -> None:
    assert repetition(range(100)) == 0 and repetition([1, 2, 3] * 30) > 0.9 and repetition([1]) == 0


def test_no_flags_without_pairs() -> None:
    assert work_flags("fold", []) == []
