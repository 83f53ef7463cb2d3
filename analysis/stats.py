"""Means with paired bootstrap intervals (paper, section 4.1 and Appendix B.5).

Estimators: acceptance length tau is the mean over requests of each request's tokens per verification round; speedup
is the mean over requests of TPOT_AR / TPOT. A benchmark with several tasks (LCA's lengths, RepoBench's languages) is
the mean over all of its requests, En. and Avg. weigh their members equally. Intervals: percentile bootstrap, 2,000
resamples, fixed seed, requests drawn with replacement within each stratum (task, or length group).

Why not ``scipy.stats.bootstrap`` itself: it resamples for one statistic a call, and cannot pair arms within a task
while drawing tasks separately. Here the requests of a stratum are drawn once, and every arm and metric is averaged
over that same draw, so a difference, a ratio or an average of any of them is arithmetic on the draws and is paired by
construction. The draws are the ones scipy makes from the same generator (tests/analysis/test_stats.py compares the
two to the last digit).

The intervals cover the choice of requests only, not run-to-run or device-to-device noise.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import pandas as pd
from scipy.stats import norm, t

from harness.records import AR

RESAMPLES = 2000
SEED = 20260
CONFIDENCE = 95
METRICS = ["tau", "tau_unclipped", "speedup", "tpot_ms", "tpot_ar_ms", "committed", "rounds"]


@dataclass(frozen=True)
class Estimate:
    """A number with its 95% interval; low and high are NaN when there is none (n of 1, a constant, a missing value)."""

    value: float
    low: float
    high: float
    n: int

    @property
    def has_interval(self) -> bool:
        return not np.isnan(self.low)

    def text(self, digits: int = 2, unit: str = "", sign: bool = False) -> str:
        """ "3.40× [3.31, 3.49]"; the interval is left out when there is none, a missing value is a dash."""
        if np.isnan(self.value):
            return "–"
        form = f"{'+' if sign else ''}.{digits}f"
        number = f"{self.value:{form}}{unit}"
        if self.has_interval:
            return f"{number} [{self.low:{form}}, {self.high:{form}}]"
        return f"{number} (n=1)" if self.n == 1 else number


@dataclass(frozen=True)
class Draws:
    """A mean over requests: [0] is the estimate, [1:] the same over each resample. Shape (1 + RESAMPLES,).

    n, strata: requests behind it, and strata they were drawn in. thinnest: requests of the smallest stratum; an
    interval needs 2 everywhere.
    """

    values: np.ndarray
    n: int
    strata: int
    thinnest: int

    def estimate(self) -> Estimate:
        """Value and percentile interval. None where a stratum has one request or nothing varies (AR against itself)."""
        value, resampled = float(self.values[0]), self.values[1:]
        low = high = np.nan
        if self.thinnest > 1 and np.ptp(resampled) > 1e-12 * abs(value):
            tail = tail_percent(self.n, self.strata)
            low, high = (float(edge) for edge in np.percentile(resampled, [tail, 100 - tail]))
        return Estimate(value, low, high, self.n)


@cache
def tail_percent(n: int, strata: int) -> float:
    """Percentage of resamples beyond either end of the interval of a mean over n requests in so many strata.

    2.5 for many requests. A dozen requests vary less among themselves than their source does, and 2.5 would then cover
    too little (87% at n = 8, benchmarks/stats_coverage.py); the tail is moved out as Student's t is wider than the
    normal: the expanded percentile interval of Hesterberg (2015), "What Teachers Should Know About the Bootstrap".
    """
    free = n - strata
    beyond = np.sqrt(n / free) * t.ppf(0.5 + CONFIDENCE / 200, free)
    return float(100 * norm.cdf(-beyond))


MISSING = Draws(np.full(1 + RESAMPLES, np.nan), 0, 0, 0)


def average(parts: Sequence[Draws]) -> Draws:
    """Equal-weight mean of `parts` (Avg. over benchmarks, En. over its four tasks). Missing when any part is."""
    if not parts:
        return MISSING
    return _combined(np.mean([part.values for part in parts], axis=0), parts)


def difference(a: Draws, b: Draws) -> Draws:
    """a - b, paired: both come from the same resampled requests."""
    return _combined(a.values - b.values, [a, b], shared=True)


def ratio(a: Draws, b: Draws) -> Draws:
    """a / b, paired: both come from the same resampled requests."""
    return _combined(a.values / b.values, [a, b], shared=True)


def _combined(values: np.ndarray, parts: Sequence[Draws], shared: bool = False) -> Draws:
    counted = parts[:1] if shared else parts
    n, strata = sum(part.n for part in counted), sum(part.strata for part in counted)
    return Draws(values, n, strata, min(part.thinnest for part in parts))


class Resampler:
    """Draws the requests of every stratum once and answers for any arm, metric and union of strata.

    used: rows of ``Runs.used`` (more metric columns may have been added). by: columns that name a stratum. metrics:
    columns to average. Rows are joined by request id, never by position; an arm that lacks requests of a stratum is
    missing there. Raises ValueError naming the request when it counts twice or a metric is not a number.
    """

    def __init__(self, used: pd.DataFrame, by: Sequence[str], metrics: Iterable[str] = METRICS) -> None:
        self.by = list(by)
        self.metrics = list(metrics)
        self.used = used
        self._rows: dict[tuple[str, ...], list[int]] = {}
        for place, key in enumerate(zip(*(map(str, used[name].to_numpy(object)) for name in self.by), strict=True)):
            self._rows.setdefault(key, []).append(place)
        identity = zip(*(used[name].to_numpy(object) for name in ("benchmark", "task", "request")), strict=True)
        self._ids = np.array(["\0".join(map(str, parts)) for parts in identity], dtype=object)
        self._arms = used["arm"].to_numpy(object)
        self._values = used[self.metrics].to_numpy(float)
        self._done: dict[tuple[str, ...], tuple[int, dict[tuple[str, str], np.ndarray]]] = {}

    def _stratum(self, key: tuple[str, ...]) -> tuple[int, dict[tuple[str, str], np.ndarray]]:
        """Requests of a stratum and, by arm and metric, the draws of the mean; drawn when first asked for."""
        if key not in self._done:
            self._done[key] = self._resample(key)
        return self._done[key]

    def _resample(self, key: tuple[str, ...]) -> tuple[int, dict[tuple[str, str], np.ndarray]]:
        rows = np.array(self._rows[key])
        # Sorted by id: the order of lines in the records, or of arms, must not change a digit.
        ids, codes = np.unique(self._ids[rows], return_inverse=True)
        names, which = np.unique(self._arms[rows], return_inverse=True)
        n = len(ids)
        count = np.zeros((n, len(names)), int)
        np.add.at(count, (codes, which), 1)
        if (count > 1).any():
            raise ValueError(
                f"request {self._request(ids[(count > 1).any(axis=1)][0])} counts twice in {' / '.join(key)}"
            )
        cube = np.full((n, len(names), len(self.metrics)), np.nan)
        cube[codes, which] = self._values[rows]
        # An arm that was not run on all of these requests cannot be compared on them: it is missing here.
        whole = count.all(axis=0)
        cube, names = cube[:, whole], names[whole]
        for request, arm, metric in np.argwhere(np.isnan(cube)):
            where = f"request {self._request(ids[request])} of {names[arm]} in {' / '.join(key)}"
            raise ValueError(f"{where} has no {self.metrics[metric]}; it must be left out of every arm")
        columns = cube.reshape(n, -1)
        means = np.concatenate([columns.mean(axis=0)[None], resampled_means(columns, key)])
        columns_of = [(str(arm), metric) for arm in names for metric in self.metrics]
        return n, dict(zip(columns_of, means.T, strict=True))

    @staticmethod
    def _request(identity: str) -> str:
        return identity.rsplit("\0", 1)[-1]

    def strata(self, **where: Any) -> list[tuple[str, ...]]:
        """Keys of the strata whose `by` columns have these values (a value, or a collection of allowed ones)."""
        allowed = {name: {value} if isinstance(value, str) else set(value) for name, value in where.items()}
        return [
            key for key in self._rows if all(key[self.by.index(name)] in values for name, values in allowed.items())
        ]

    def arms(self, keys: Iterable[tuple[str, ...]]) -> list[str]:
        """Arms that at least one of these strata has; the autoregressive arm first."""
        found = {arm for key in keys for arm, _ in self._stratum(key)[1]}
        return sorted(found, key=lambda arm: (arm != AR, arm))

    def mean(self, arm: str, metric: str, keys: Sequence[tuple[str, ...]]) -> Draws:
        """Mean over all requests of the strata `keys` together. MISSING when there are none or one lacks the arm."""
        parts = [(n, draws[arm, metric]) for n, draws in map(self._stratum, keys) if (arm, metric) in draws]
        if not parts or len(parts) < len(keys):
            return MISSING
        total = sum(n for n, _ in parts)
        values = sum((n * draws for n, draws in parts), np.zeros(1 + RESAMPLES)) / total
        return Draws(values, total, len(parts), min(n for n, _ in parts))

    def pooled_tau(self, arm: str, keys: Sequence[tuple[str, ...]]) -> Draws:
        """Tokens over rounds of all requests together: the paper's "ratio of the overall tau", never the headline
        tau.
        """
        return ratio(self.mean(arm, "committed", keys), self.mean(arm, "rounds", keys))

    def speedup_of_means(self, arm: str, keys: Sequence[tuple[str, ...]]) -> Draws:
        """Mean TPOT_AR over mean TPOT: printed beside the headline speedup as a check on the choice of estimator."""
        return ratio(self.mean(arm, "tpot_ar_ms", keys), self.mean(arm, "tpot_ms", keys))


def resampled_means(columns: np.ndarray, key: tuple[str, ...]) -> np.ndarray:
    """Means of `columns` (n requests, C) over RESAMPLES draws of n requests with replacement: (RESAMPLES, C).

    The generator is seeded by the stratum's name, so that strata are independent and adding one changes no other.
    """
    n = len(columns)
    rng = np.random.default_rng([SEED, zlib.crc32("\0".join(key).encode())])
    batch = max(1, 4_000_000 // n)
    means = np.empty((RESAMPLES, columns.shape[1]))
    for start in range(0, RESAMPLES, batch):
        rows = min(batch, RESAMPLES - start)
        # How often each request is drawn, as one matrix: all columns then cost one matrix product.
        drawn = rng.integers(0, n, (rows, n)) + n * np.arange(rows)[:, None]
        counts = np.bincount(drawn.ravel(), minlength=rows * n).reshape(rows, n)
        means[start : start + rows] = counts.astype(float) @ columns / n
    return means
