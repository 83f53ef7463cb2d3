"""fold-advise on scripted records: what it answers, and that what chose does not judge."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest

from analysis.advise import NO_DIFFERENCE, Advice, advise_runs, command, halves
from analysis.load import LoadError, load
from tests.analysis.analysis_fixtures import record, write_run

LEVELS = ("1K", "4K")


def run(folder: Path, speeds: dict[str, float], documents: int = 8, noise: float = 0.05, **its: Any) -> Path:
    """A run of two tasks: AR takes 10 ms a token, each arm is `speeds` times as fast, with some noise per request."""
    draw = random.Random(0)
    lines = []
    for task in ("demo_code", "demo_docs"):
        for document in range(documents):
            for level in LEVELS:
                where = {"benchmark": task, "task": task, "level": level, "run": its.get("run", "run0")}
                name = f"{task}/{document}@{level}"
                lines.append(record(name, **where))
                for arm, speed in speeds.items():
                    tpot = 10 / speed * (1 + noise * draw.gauss(0, 1))
                    lines.append(record(name, arm, commits=[4, 4, 4], tpot_ms=tpot, **{**where, **its}))
    return write_run(folder, lines)


def only(*paths: Path) -> Advice:
    (advice,) = advise_runs(paths)
    return advice


def test_the_two_halves_share_no_document_and_are_even(tmp_path: Path) -> None:
    used = load(run(tmp_path, {"fold": 2.0}, documents=9)).used
    mine = halves(used)
    documents = used["request"].str.rsplit("@", n=1).str[0]
    assert not set(documents[mine]) & set(documents[~mine])
    assert set(documents[mine]) | set(documents[~mine]) == set(documents)
    for task in ("demo_code", "demo_docs"):
        here = used["task"].astype(str) == task
        assert documents[here & mine].nunique() == 5 and documents[here & ~mine].nunique() == 4
        assert used[here & mine]["level"].value_counts().nunique() == 1  # as many of each length
    shuffled = used.sample(frac=1, random_state=0)
    assert (halves(shuffled).sort_index() == mine.sort_index()).all()


def test_it_names_the_fastest_method_and_judges_it_by_the_other_half(tmp_path: Path) -> None:
    path = run(tmp_path, {"original": 1.2, "fold": 2.0, "window": 1.6})
    advice = only(path)
    assert (advice.answer, advice.candidates, advice.n) == ("fold", ["fold"], (16, 16))
    assert [choice.arm for choice in advice.choices] == ["fold", "window", "original", "ar"]
    used = load(path).used
    judged = used[~halves(used) & (used["arm"] == "fold")]["speedup"]
    best = advice.choices[0]
    assert best.speedup.value == pytest.approx(judged.mean()) and best.speedup.n == 16
    assert best.speedup.low > 1.8 and "on requests that did not choose it" in advice.sentence()
    assert advice.choices[1].against_chosen.high < 1


def test_what_chose_has_no_say_in_the_verdict(tmp_path: Path) -> None:
    """An arm that is fast on the calibration half alone is chosen, and its judged speedup does not show it."""
    path = run(tmp_path, {"fold": 1.5, "yarn": 1.0})
    used = load(path).used
    lucky = set(used.loc[halves(used), "request"])
    lines = []
    for task in ("demo_code", "demo_docs"):
        for name in [f"{task}/{d}@{level}" for d in range(8) for level in LEVELS]:
            where = {"benchmark": task, "task": task, "level": name.split("@")[1]}
            fast = 1.0 if name in lucky else 12.0
            lines += [record(name, **where), record(name, "fold", tpot_ms=5.0, commits=[4, 4, 4], **where)]
            lines += [record(name, "yarn", tpot_ms=fast, commits=[4, 4, 4], **where)]
    advice = only(write_run(tmp_path / "lucky", lines))
    assert advice.chosen == "yarn" and advice.choices[0].calibration == pytest.approx(10.0)
    assert advice.choices[0].speedup.value == pytest.approx(10 / 12)
    assert advice.answer == NO_DIFFERENCE and advice.candidates == ["yarn", "fold", "ar"]
    assert any("the halves disagree" in note for note in advice.notes)


def test_it_says_ar_when_every_method_is_slower(tmp_path: Path) -> None:
    advice = only(run(tmp_path, {"original": 0.7, "fold": 0.9}, noise=0.02))
    assert (advice.answer, advice.candidates) == ("ar", ["ar"])
    assert advice.sentence().startswith("Answer: ar.")


def test_it_says_no_difference_when_there_is_none(tmp_path: Path) -> None:
    advice = only(run(tmp_path / "noisy", {"original": 1.2, "fold": 2.0, "rerope": 2.0}, noise=0.1))
    assert advice.answer == NO_DIFFERENCE and sorted(advice.candidates) == ["fold", "rerope"]
    same = only(run(tmp_path / "same", {"fold": 1.0, "window": 1.0}, noise=0.0))
    assert same.answer == NO_DIFFERENCE and same.candidates == ["ar", "fold", "window"]
    assert "ar needs no drafter" in same.sentence()


def test_settings_of_a_sweep_are_arms(tmp_path: Path) -> None:
    runs = [run(tmp_path / "all", {"original": 1.2, "window": 1.5}, run="run0")]
    for alpha, speed in ((1.0, 1.6), (4.0, 2.2)):
        path = tmp_path / f"alpha{alpha}"
        run(path, {"fold": speed}, run=f"alpha{alpha}", method_config={"window": 256, "alpha": alpha})
        runs.append(path)
    advice = only(*runs)
    assert advice.answer == "fold alpha=4.0"
    assert {choice.arm for choice in advice.choices} == {"ar", "original", "window", "fold alpha=1.0", "fold alpha=4.0"}


def test_the_command_prints_the_answer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command([str(run(tmp_path, {"fold": 2.0, "original": 1.1}))]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert re.search(r"Answer: fold, [12]\.[90]\d×", said) and "16 requests chose, 16 others judged" in said


@pytest.mark.parametrize(("documents", "speeds"), [(1, {"fold": 2.0}), (8, {})])
def test_too_little_to_choose_or_judge_is_one_line(tmp_path: Path, documents: int, speeds: dict[str, float]) -> None:
    with pytest.raises(LoadError) as caught:
        advise_runs([run(tmp_path, speeds, documents=documents)])
    assert "\n" not in str(caught.value) and "benchmark=probe" in str(caught.value)


def test_a_sweep_whose_runs_each_end_with_a_second_ar_pass(tmp_path: Path) -> None:
    for name, arm, config, speed in (("1", "fold", {"alpha": 1.0}, 1.2), ("2", "fold", {"alpha": 4.0}, 2.0)):
        folder = run(tmp_path / name, {arm: speed}, run=name, method_config=config)
        with (folder / "records.jsonl").open("a") as file:
            last = record("demo_code/0@1K", "ar@end", benchmark="demo_code", task="demo_code", level="1K", run=name)
            file.write(json.dumps(last) + "\n")
    assert only(tmp_path / "1", tmp_path / "2").answer == "fold alpha=4.0"


def test_nothing_usable_is_one_line(tmp_path: Path) -> None:
    failed = {"error": "boom", "output_ids": [], "commits": [], "n_first": 0, "proposals": []}
    lines = [{**record(name, arm), **failed} for name in "ab" for arm in ("ar", "fold")]
    with pytest.raises(LoadError, match=r"no request was completed.*2 failed: boom in ar"):
        advise_runs([write_run(tmp_path, lines)])
