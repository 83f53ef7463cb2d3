"""Which records count, and which requests are left out."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pandas as pd
import pytest
from analysis_fixtures import record, write_run

import analysis.load
from analysis.load import LoadError, length_bucket, load
from analysis.summary import summarise_runs


def test_pairs_on_the_same_device_only(tmp_path: Path) -> None:
    lines = [
        record("a", device_uuid="gpu-1", tpot_ms=10),
        record("a", device_uuid="gpu-2", tpot_ms=20),
        record("a", "fold", commits=[4, 4, 4], device_uuid="gpu-2", tpot_ms=5),
    ]
    runs = load(write_run(tmp_path, lines))
    fold = runs.used[runs.used["arm"] == "fold"].iloc[0]
    assert fold["tpot_ar_ms"] == pytest.approx(20) and fold["speedup"] == pytest.approx(4)


def test_unpaired_device_is_left_out_everywhere(tmp_path: Path) -> None:
    lines = [
        record("a", device_uuid="gpu-1"),
        record("a", "fold", commits=[4], device_uuid="gpu-2"),
        record("a", "window", commits=[4], device_uuid="gpu-1"),
        *[record("b", method, commits=commits) for method, commits in (("ar", None), ("fold", [4]), ("window", [3]))],
    ]
    runs = load(write_run(tmp_path, lines))
    assert set(runs.used["request"]) == {"b"}
    assert runs.excluded[["request", "arm", "reason"]].values.tolist() == [
        ["a", "fold", "no autoregressive record on the same device"]
    ]


def test_missing_and_failed_rows_drop_the_request_from_every_arm(tmp_path: Path) -> None:
    lines = [record(name, method, commits=[2, 2]) for name in "abc" for method in ("ar", "fold", "window")]
    lines = [line for line in lines if (line["request_id"], line["method"]) != ("b", "window")]
    lines[-1] |= {"error": "out of memory\ntraceback", "output_ids": [], "commits": [], "n_first": 0}
    runs = load(write_run(tmp_path, lines))
    assert sorted(set(runs.used["request"])) == ["a"] and len(runs.used) == 3
    assert dict(zip(runs.excluded["request"], runs.excluded["reason"], strict=True)) == {
        "b": "missing",
        "c": "failed: out of memory",
    }


def test_one_output_token_has_no_tpot(tmp_path: Path) -> None:
    lines = [record("a"), record("a", "fold", commits=[4]), record("b", commits=[]), record("b", "fold", commits=[4])]
    runs = load(write_run(tmp_path, lines))
    assert set(runs.used["request"]) == {"a"}
    assert runs.excluded[["request", "arm", "reason"]].values.tolist() == [["b", "ar", "no TPOT"]]


def test_an_arm_that_never_works_does_not_cost_the_others(tmp_path: Path) -> None:
    lines = [record(name, method, commits=[2, 2]) for name in "abc" for method in ("ar", "fold", "window")]
    for line in lines:
        if line["method"] == "window":
            line |= {"error": "out of memory", "output_ids": [], "commits": [], "n_first": 0}
    runs = load(write_run(tmp_path / "1", lines))
    assert runs.arms() == ["ar", "fold"] and len(runs.excluded) == 0 and len(runs.used) == 6
    assert runs.unusable[["arm", "reason", "n"]].values.tolist() == [["window", "failed: out of memory", 3]]
    for line in lines:
        if line["method"] == "ar":
            line |= {"error": "out of memory", "output_ids": [], "commits": [], "n_first": 0}
    runs = load(write_run(tmp_path / "2", lines))
    assert len(runs.used) == 0 and set(runs.excluded["arm"]) == {"ar"} and len(runs.excluded) == 3


def test_retry_replaces_a_failure_but_not_a_good_record(tmp_path: Path) -> None:
    good = record("a", "fold", commits=[4])
    lines = [
        record("a"),
        {**good, "error": "boom", "attempt": 1},
        {**good, "attempt": 2},
        {**good, "error": "late boom", "attempt": 3},
    ]
    runs = load(write_run(tmp_path, lines))
    assert len(runs.used) == 2 and len(runs.excluded) == 0


def test_warmups_and_second_ar_pass_are_kept_apart(tmp_path: Path) -> None:
    lines = [record("w", warmup=True), record("a"), record("a", "fold", commits=[4]), record("a", "ar@end", tpot_ms=20)]
    runs = load(write_run(tmp_path, lines))
    assert runs.arms() == ["ar", "fold"]
    assert len(runs.warmups) == 1 and runs.again["speedup"].tolist() == pytest.approx([0.5])


def test_torn_last_line_is_dropped_and_other_damage_is_not(tmp_path: Path) -> None:
    folder = write_run(tmp_path, [record("007")])
    file = folder / "records.jsonl"
    whole = file.read_text()
    file.write_text(whole + whole[:50])
    assert load(folder).used["request"].tolist() == ["007"]
    file.write_text(whole[:50] + "\n" + whole)
    with pytest.raises(LoadError, match="line 1"):
        load(folder)


def test_same_arm_in_two_runs_clashes_and_other_arms_join(tmp_path: Path) -> None:
    one = write_run(tmp_path / "1", [record("a", run="r1"), record("a", "fold", commits=[4], run="r1")])
    two = write_run(tmp_path / "2", [record("a", run="r2"), record("a", "rerope", commits=[3], run="r2")])
    assert load([one, two]).arms() == ["ar", "fold", "rerope"]
    three = write_run(tmp_path / "3", [record("a", run="r3"), record("a", "fold", commits=[4], run="r3")])
    with pytest.raises(LoadError, match="several runs"):
        load([one, three])


def test_arms_of_one_method_are_named_by_what_differs(tmp_path: Path) -> None:
    lines = [record("a")]
    lines += [record("a", "fold", commits=[3], method_config={"alpha": alpha, "window": 256}) for alpha in (1.0, 2.0)]
    assert load(write_run(tmp_path, lines)).arms() == ["ar", "fold alpha=1.0", "fold alpha=2.0"]


def test_second_arm_of_equal_settings_keeps_its_name(tmp_path: Path) -> None:
    lines = [record("a", tpot_ms=10), record("a", "ar#2", tpot_ms=20)]
    runs = load(write_run(tmp_path, lines))
    assert runs.arms() == ["ar", "ar#2"]
    assert runs.used.set_index("arm").loc["ar#2", "speedup"] == pytest.approx(0.5)


def test_a_setting_measured_twice_in_a_sweep_is_two_arms(tmp_path: Path) -> None:
    arms = (("fold", 3, 1.0), ("fold#2", 5, 1.0), ("fold#3", 4, 2.0))
    lines = [record("a")] + [record("a", m, commits=[c], method_config={"alpha": alpha}) for m, c, alpha in arms]
    runs = load(write_run(tmp_path, lines))
    assert dict(zip(runs.used["arm"], runs.used["tau"], strict=True)) == {
        "ar": 1.0, "fold alpha=1.0": 3.0, "fold alpha=1.0#2": 5.0, "fold alpha=2.0": 4.0,
    }  # fmt: skip


def test_runs_read_together_may_each_end_with_a_second_ar_pass(tmp_path: Path) -> None:
    folders = []
    for run, method, again_ms in (("r1", "fold", 20), ("r2", "rerope", 40)):
        lines = [record("a", run=run), record("a", method, commits=[4], run=run)]
        folders.append(write_run(tmp_path / run, [*lines, record("a", "ar@end", tpot_ms=again_ms, run=run)]))
    runs = load(folders)
    assert runs.arms() == ["ar", "fold", "rerope"]
    assert sorted(runs.again["speedup"]) == pytest.approx([0.25, 0.5])
    assert any("AR against itself" in note and "0.375" in note for note in summarise_runs(runs).notes)


def test_a_run_given_twice_is_one_run(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "r", [record("a"), record("a", "fold", commits=[4])])
    (folder / "agreement.jsonl").write_text('{"arm": "fold", "equal": false, "passed": true, "max_gap": 0.1}\n')
    runs = load([folder, tmp_path, folder])
    assert len(runs.used) == 2 and len(runs.agreement) == 1


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        ({"commits": [12], "output_ids": list(range(13))}, "more than 10"),  # K is 9
        ({"commits": [0, 4]}, "fewer than 1"),
        ({"commits": None}, "NoneType"),
        ({"last_token_s": 1.0}, "last at 1.0"),
        ({"last_token_s": float("inf")}, "last at inf"),
        ({"error": None}, "error is None"),
        ({"request_id": 7}, "request_id is 7"),
        ({"output_ids": None}, "output_ids"),
        ({"method_config": "x"}, "method_config"),
    ],
)
def test_an_impossible_record_is_named_and_not_averaged(tmp_path: Path, damage: dict, told: str) -> None:
    lines = [record("a"), record("a", "fold", commits=[4]), {**record("b", "fold", commits=[4]), **damage}]
    with pytest.raises(LoadError, match=f"line 3 is damaged.*{told}"):
        load(write_run(tmp_path, lines))


@pytest.mark.parametrize(
    "ids", ["[1,,2]", "[,1]", "[1,]", "[007]", "[1,02]", "[1 2]", "[1.5]", "[true]", '["1"]', "[[1]]", "[1", "{}", "7"]
)
def test_output_ids_that_are_none_are_damage(tmp_path: Path, ids: str) -> None:
    folder = write_run(tmp_path, [record("a"), record("a", "fold", commits=[4])])
    first, second = (folder / "records.jsonl").read_text().splitlines()
    second = re.sub(r'("output_ids": )\[[^]]*\]', lambda found: found[1] + ids, second)
    (folder / "records.jsonl").write_text(f"{first}\n{second}\n")
    with pytest.raises(LoadError, match=r"records.jsonl, line 2 is damaged"):
        load(folder)


def test_ids_are_the_same_however_they_are_spaced_and_names_may_look_like_them(tmp_path: Path) -> None:
    name = 'x","output_ids":[1],"y'
    lines = [record(name), record(name, "fold", commits=[4, 4, 4])]
    lines[1]["output_ids"] = lines[0]["output_ids"] = [0, 10, 0, *range(10)]
    folder = write_run(tmp_path, lines)
    texts = [json.dumps(lines[0]), json.dumps(lines[1], separators=(",", ":"))]
    (folder / "records.jsonl").write_text("".join(text + "\n" for text in texts))
    runs = load(folder)
    assert runs.used["same"].all() and list(runs.used["n_out"]) == [13, 13] and set(runs.used["request"]) == {name}


def test_a_foreign_line_is_named(tmp_path: Path) -> None:
    folder = write_run(tmp_path, [record("a"), {**record("b"), "schema": "other/1"}])
    with pytest.raises(LoadError, match=r"line 2 is not a record of fold-bench-record/1 \(schema 'other/1'\)"):
        load(folder)
    write_run(folder, [record("a"), {"run": "x"}])
    with pytest.raises(LoadError, match=r"line 2 is not a record"):
        load(folder)


def test_several_readers_give_what_one_gives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders = [
        write_run(tmp_path / run, [record("a", run=run), record("a", method, commits=[4, 3], run=run)])
        for run, method in (("r1", "fold"), ("r2", "rerope"))
    ]
    alone = load(folders).used
    monkeypatch.setattr(analysis.load, "PARALLEL_BYTES", 0)
    monkeypatch.setattr(analysis.load.os, "sched_getaffinity", lambda pid: {0, 1})
    pd.testing.assert_frame_equal(load(folders).used, alone)


def test_tokens_that_do_not_add_up_are_told(tmp_path: Path) -> None:
    runs = load(write_run(tmp_path, [record("a"), {**record("a", "fold", commits=[4]), "commits": [6]}]))
    (line,) = [line for line in summarise_runs(runs).counts if "doubt" in line]
    assert line.startswith("1 records") and "request a of fold" in line


@pytest.mark.parametrize("text", ["[]", "null", '{"config": null}', '{"config": {"drafter": null}}'])
def test_a_foreign_run_json_is_one_line(tmp_path: Path, text: str) -> None:
    folder = write_run(tmp_path, [record("a")])
    (folder / "run.json").write_text(text)
    with pytest.raises(LoadError, match="not one that fold-bench wrote"):
        load(folder)


def test_nothing_to_read_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match=r"holds no records"):
        load(tmp_path)
    with pytest.raises(LoadError, match=r"is not a folder"):
        load(tmp_path / "gone")


def test_buckets() -> None:
    names = [length_bucket(n) for n in (10, 1024, 9800, 16384, 131071, 131072, 250000)]
    assert names == ["<1K", "1–2K", "8–16K", "16–32K", "64–128K", "≥128K", "≥128K"]
