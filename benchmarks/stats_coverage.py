"""Whether the 95% intervals cover: simulated paired data with a known truth, 1,000 repetitions.

Bar: between 93% and 97% of the intervals hold the truth, for a mean, a paired difference, a paired ratio and an
equal-weight average over tasks of unequal size. The simulated requests look like real ones: a request's difficulty
moves all arms together, speedups are skewed, tasks differ in level and size (Table 7's smallest and typical). Groups
as small as the demo's are printed too, without a bar: at n = 8 a skewed distribution costs about two points of
coverage. Run: python benchmarks/stats_coverage.py
"""

from __future__ import annotations

import sys
import time
from collections import Counter

import numpy as np
import pandas as pd

from analysis.stats import Draws, Resampler, average, difference, ratio

REPETITIONS = 1000
SIZES = {"Gov": 280, "LBv2": 320, "En.Sum": 48, "LCA 122K": 129}
SMALL = {"8": 8, "16": 16, "32": 32}
ARMS = {"fold": 0.35, "rerope": 0.30}
NOISE, DIFFICULTY = 0.12, 0.35


def truth(task: int, arm: str) -> float:
    """Expected speedup of a request: the mean of exp(level + difficulty + noise)."""
    return float(np.exp(ARMS[arm] + 0.3 * task + (DIFFICULTY**2 + NOISE**2) / 2))


def simulate(sizes: dict[str, int], rng: np.random.Generator) -> pd.DataFrame:
    """One run: lognormal speedups, both arms sharing each request's difficulty."""
    parts = []
    for place, (task, n) in enumerate(sizes.items()):
        shared = rng.normal(0, DIFFICULTY, n)
        for arm, level in ARMS.items():
            value = np.exp(level + 0.3 * place + shared + rng.normal(0, NOISE, n))
            ids = [str(i) for i in range(n)]
            parts.append(pd.DataFrame({"benchmark": task, "task": task, "request": ids, "arm": arm, "speedup": value}))
    return pd.concat(parts, ignore_index=True)


def questions(sizes: dict[str, int], means: Resampler) -> dict[str, tuple[Draws, float]]:
    """What is asked of a run, with the true answer."""
    tasks = list(sizes)
    of = {arm: [means.mean(arm, "speedup", means.strata(task=task)) for task in tasks] for arm in ARMS}
    true = {arm: [truth(place, arm) for place in range(len(tasks))] for arm in ARMS}
    found = {f"mean, n={n}": (of["fold"][i], true["fold"][i]) for i, n in enumerate(sizes.values())}
    for i, n in enumerate(sizes.values()):
        gap = true["fold"][i] - true["rerope"][i]
        found[f"paired difference, n={n}"] = (difference(of["fold"][i], of["rerope"][i]), gap)
        found[f"paired ratio, n={n}"] = (ratio(of["fold"][i], of["rerope"][i]), true["fold"][i] / true["rerope"][i])
    averages = {arm: (average(of[arm]), float(np.mean(true[arm]))) for arm in ARMS}
    found["average over tasks"] = averages["fold"]
    found["difference of averages"] = (
        difference(averages["fold"][0], averages["rerope"][0]),
        averages["fold"][1] - averages["rerope"][1],
    )
    return found


def coverage(sizes: dict[str, int]) -> dict[str, float]:
    """Share of intervals that hold the truth, by question."""
    hits: Counter[str] = Counter()
    for repetition in range(REPETITIONS):
        # The resampling seed is fixed, as in the product; only the data change.
        means = Resampler(simulate(sizes, np.random.default_rng([7, repetition])), ["task"], ["speedup"])
        for name, (draws, true) in questions(sizes, means).items():
            estimate = draws.estimate()
            hits[name] += estimate.low <= true <= estimate.high
    return {name: hits[name] / REPETITIONS for name in hits}


def main() -> int:
    begin = time.perf_counter()
    judged = coverage(SIZES)
    for name, share in judged.items():
        print(f"{name:32} {share:.1%}{'' if 0.93 <= share <= 0.97 else '  OUTSIDE 93-97%'}")
    print("small groups, for information:")
    for name, share in coverage(SMALL).items():
        print(f"{name:32} {share:.1%}")
    print(f"{REPETITIONS} repetitions each, {time.perf_counter() - begin:.0f} s")
    return int(any(not 0.93 <= share <= 0.97 for share in judged.values()))


if __name__ == "__main__":
    sys.exit(main())
