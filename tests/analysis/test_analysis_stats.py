"""Estimators and intervals against hand-made answers and against scipy."""

from __future__ import annotations

import random
import zlib
from pathlib import Path

import numpy as np
import pytest
from analysis_fixtures import record, write_run
from scipy.stats import bootstrap

from analysis.load import CELL, load
from analysis.stats import MISSING, SEED, Resampler, average, difference, ratio, resampled_means, tail_percent


def scripted(n: int = 30, task: str = "t", seed: int = 0, methods: tuple[str, ...] = ("fold", "window")) -> list[dict]:
    rng = np.random.default_rng(seed)
    lines = []
    for i in range(n):
        lines.append(record(f"{task}{i}", task=task, tpot_ms=float(rng.uniform(20, 30))))
        for method in methods:
            commits = [int(c) for c in rng.integers(1, 9, 12)]
            lines.append(record(f"{task}{i}", method, task=task, commits=commits, tpot_ms=float(rng.uniform(5, 15))))
    return lines


def resampler(folder: Path, lines: list[dict]) -> Resampler:
    return Resampler(load(write_run(folder, lines)).used, CELL)


def test_tau_counts_rounds_and_not_the_prefill_token(tmp_path: Path) -> None:
    means = resampler(tmp_path, [record("a"), record("a", "fold", commits=[4, 4, 4])])
    keys = means.strata()
    assert means.mean("fold", "tau", keys).values[0] == 4.0
    assert means.mean("ar", "tau", keys).values[0] == 1.0
    assert means.mean("ar", "speedup", keys).estimate().text() == "1.00 (n=1)"


def test_per_request_mean_is_not_the_pooled_mean(tmp_path: Path) -> None:
    lines = [record("a"), record("b")]
    lines += [record("a", "fold", commits=[8]), record("b", "fold", commits=[2] * 99)]
    means = resampler(tmp_path, lines)
    keys = means.strata()
    assert means.mean("fold", "tau", keys).values[0] == 5.0
    assert means.pooled_tau("fold", keys).values[0] == pytest.approx(2.06)


def test_speedup_is_the_mean_of_ratios(tmp_path: Path) -> None:
    lines = [record("a", tpot_ms=10), record("b", tpot_ms=100)]
    lines += [record("a", "fold", commits=[4], tpot_ms=2), record("b", "fold", commits=[4], tpot_ms=100)]
    means = resampler(tmp_path, lines)
    keys = means.strata()
    assert means.mean("fold", "speedup", keys).values[0] == pytest.approx(3.0)
    assert means.speedup_of_means("fold", keys).values[0] == pytest.approx(110 / 102)


def test_shuffling_changes_nothing(tmp_path: Path) -> None:
    lines = scripted()
    one = resampler(tmp_path / "1", lines)
    random.Random(1).shuffle(lines)
    two = resampler(tmp_path / "2", lines)
    for arm in ("fold", "window"):
        assert np.array_equal(one.mean(arm, "tau", one.strata()).values, two.mean(arm, "tau", two.strata()).values)


def test_adding_an_arm_or_a_task_changes_no_interval(tmp_path: Path) -> None:
    few = resampler(tmp_path / "1", scripted())
    extra = [{**line, "method": "yarn"} for line in scripted() if line["method"] == "window"]
    many = resampler(tmp_path / "2", [*scripted(), *extra, *scripted(task="u", seed=5)])
    keys = few.strata(task="t")
    assert few.mean("fold", "tau", keys).estimate() == many.mean("fold", "tau", keys).estimate()


def test_equal_weight_average_is_not_the_pooled_average(tmp_path: Path) -> None:
    lines = [record(f"s{i}", m, task="s", commits=c) for i in range(3) for m, c in (("ar", None), ("fold", [2]))]
    lines += [record(f"l{i}", m, task="l", commits=c) for i in range(9) for m, c in (("ar", None), ("fold", [6]))]
    means = resampler(tmp_path, lines)
    parts = [means.mean("fold", "tau", means.strata(task=task)) for task in ("s", "l")]
    assert average(parts).values[0] == 4.0
    assert means.mean("fold", "tau", means.strata()).values[0] == 5.0
    assert average(parts).n == 12


def test_interval_equals_scipy_on_one_task(tmp_path: Path) -> None:
    runs = load(write_run(tmp_path, scripted(n=40)))
    means = Resampler(runs.used, CELL)
    (key,) = means.strata()
    fold = runs.used[runs.used["arm"] == "fold"].set_index("request").sort_index()
    window = runs.used[runs.used["arm"] == "window"].set_index("request").sort_index()

    def scipy_interval(values: np.ndarray) -> tuple[float, float]:
        rng = np.random.default_rng([SEED, zlib.crc32("\0".join(key).encode())])
        result = bootstrap(
            (values,),
            np.mean,
            n_resamples=2000,
            method="percentile",
            rng=rng,
            confidence_level=1 - 0.02 * tail_percent(40, 1),
        )
        return result.confidence_interval.low, result.confidence_interval.high

    for metric in ("tau", "speedup"):
        ours = means.mean("fold", metric, [key]).estimate()
        assert (ours.low, ours.high) == pytest.approx(scipy_interval(fold[metric].to_numpy()), rel=1e-12)
        ours = difference(means.mean("fold", metric, [key]), means.mean("window", metric, [key])).estimate()
        assert (ours.low, ours.high) == pytest.approx(
            scipy_interval(fold[metric].to_numpy() - window[metric].to_numpy()), rel=1e-9
        )


def test_stratified_interval_agrees_with_scipy(tmp_path: Path) -> None:
    runs = load(write_run(tmp_path, [*scripted(n=60), *scripted(n=15, task="u", seed=9)]))
    means = Resampler(runs.used, CELL)
    ours = average([means.mean("fold", "tau", means.strata(task=task)) for task in ("t", "u")]).estimate()
    fold = runs.used[runs.used["arm"] == "fold"]
    samples = [fold.loc[fold["task"] == task, "tau"].to_numpy() for task in ("t", "u")]

    def mean_of_means(*parts: np.ndarray, axis: int) -> np.ndarray:
        return np.mean([part.mean(axis=axis) for part in parts], axis=0)

    result = bootstrap(
        samples,
        mean_of_means,
        n_resamples=20000,
        method="percentile",
        rng=1,
        confidence_level=1 - 0.02 * tail_percent(75, 2),
    ).confidence_interval
    width = result.high - result.low
    assert abs(ours.low - result.low) < 0.05 * width and abs(ours.high - result.high) < 0.05 * width


def test_batches_do_not_change_the_draws() -> None:
    columns = np.random.default_rng(0).normal(size=(5001, 2))
    rng = np.random.default_rng([SEED, zlib.crc32(b"k")])
    expected = columns[:, 0][rng.integers(0, 5001, (2000, 5001))].mean(axis=1)
    assert resampled_means(columns, ("k",))[:, 0] == pytest.approx(expected, rel=1e-9)


def test_no_interval_for_constants_one_request_and_missing(tmp_path: Path) -> None:
    means = resampler(tmp_path, scripted())
    keys = means.strata()
    assert not means.mean("ar", "speedup", keys).estimate().has_interval
    assert means.mean("ar", "speedup", keys).estimate().text(2, "×") == "1.00×"
    assert means.mean("yarn", "tau", keys) is MISSING
    assert MISSING.estimate().text() == "–" and np.isnan(average([MISSING]).values[0])
    assert np.isnan(average([means.mean("fold", "tau", keys), MISSING]).values[0])


def test_tail_is_the_paper_s_for_many_requests_and_further_out_for_few() -> None:
    assert tail_percent(100_000, 1) == pytest.approx(2.5, abs=0.001) and tail_percent(300, 1) > 2.35
    assert tail_percent(8, 1) < 1 and tail_percent(2, 1) == pytest.approx(0, abs=1e-9)


def test_not_a_number_names_the_request(tmp_path: Path) -> None:
    used = load(write_run(tmp_path, scripted(n=3))).used
    used.loc[used["arm"] == "fold", "tau"] = [1.0, np.nan, 2.0]
    with pytest.raises(ValueError, match="request t1 of fold"):
        means = Resampler(used, CELL)
        means.mean("fold", "tau", means.strata())


def test_ratio_is_paired(tmp_path: Path) -> None:
    lines = []
    for i in range(20):
        lines += [record(f"{i}"), record(f"{i}", "fold", commits=[2 + i % 4] * 4)]
        lines += [record(f"{i}", "window", commits=[(2 + i % 4) * 2] * 4)]
    means = resampler(tmp_path, lines)
    keys = means.strata()
    exact = ratio(means.mean("window", "tau", keys), means.mean("fold", "tau", keys)).estimate()
    # The arms differ by a factor in every request: a paired ratio does not vary at all.
    assert exact.value == pytest.approx(2) and not exact.has_interval
