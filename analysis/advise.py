"""fold-advise: which method, at which settings, for a pair of one's own, from a small run of ``benchmark=probe``.

    fold-bench +model=MINE engine=reference benchmark=probe methods=all
    fold-bench +model=MINE engine=reference benchmark=probe -m method=fold method.alpha=1,4
    fold-advise results/runs/RUN results/runs/RUN ...

Choosing the best of many arms and quoting its speedup from the same requests flatters it, so requests are split in two
halves: one chooses, the other judges. Documents are split, not requests: the same document at four lengths is on one
side. The answer is a method, "no difference" with all arms that cannot be told from the chosen one, or "ar".
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
from rich.console import Console
from rich.table import Table
from rich.text import Text

from analysis.command import Parser, run_command
from analysis.load import LoadError, Runs, load
from analysis.stats import Draws, Estimate, Resampler, average, ratio
from analysis.summary import count_lines
from harness.records import AR

NO_DIFFERENCE = "no difference"


@dataclass(frozen=True)
class Choice:
    """One arm: its speedup on the half that chose, on the half that judges, and there over the chosen arm's."""

    arm: str
    calibration: float
    tau: Estimate
    speedup: Estimate
    against_chosen: Estimate
    tied: bool


@dataclass(frozen=True)
class Advice:
    """The answer for one pair in one engine.

    answer: an arm, "ar" or "no difference". chosen: the arm that was fastest on the calibration half. choices: all
    arms, the chosen one first, then by their speedup there. n: requests in the two halves. notes: what to read
    beside the answer.
    """

    pair: str
    engine: str
    answer: str
    chosen: str
    choices: list[Choice]
    n: tuple[int, int]
    notes: list[str]

    @property
    def candidates(self) -> list[str]:
        """The arms that the judgement half does not tell from the chosen one, itself included."""
        return [choice.arm for choice in self.choices if choice.tied]

    def sentence(self) -> str:
        """The answer in words."""
        best = next(choice for choice in self.choices if choice.arm == self.chosen)
        if self.answer == AR:
            return "Answer: ar. No method is faster than decoding without a drafter."
        if self.answer == NO_DIFFERENCE:
            simplest = "; ar needs no drafter" if AR in self.candidates else ""
            return f"Answer: no difference between {', '.join(self.candidates)} on these requests{simplest}."
        return f"Answer: {self.answer}, {best.speedup.text(2, '×')} over ar on requests that did not choose it."

    def table(self) -> Table:
        """The arms for a terminal."""
        table = Table(title=f"{self.pair} in {self.engine}")
        for name in ("method", "speedup (chose)", "tau", "speedup [95%]", "over the chosen [95%]"):
            table.add_column(name)
        for choice in self.choices:
            own = choice.arm == self.chosen
            cells = [
                choice.arm + ("" if own or not choice.tied else " ~"),
                f"{choice.calibration:.2f}×",
                choice.tau.text(2),
                choice.speedup.text(2, "×"),
                "–" if own else choice.against_chosen.text(3),
            ]
            table.add_row(*(Text(cell) for cell in cells), style="bold" if own else "")
        return table


def halves(used: pd.DataFrame) -> pd.Series:
    """True for rows of the calibration half.

    Documents of a task (a request id up to its last "@") are dealt out in turn in the order of their sha256, so that
    both halves have as many, whatever their names.
    """
    document = used["request"].astype("str").str.rsplit("@", n=1).str[0]
    task = used["benchmark"].astype("str") + "\0" + used["task"].astype("str")
    calibration = pd.Series(False, index=used.index)
    for _, names in document.groupby(task):
        ordered = sorted(set(names), key=lambda name: hashlib.sha256(name.encode()).digest())
        calibration[names.index] = names.isin(ordered[::2])
    return calibration


def advise(runs: Runs) -> list[Advice]:
    """One answer per pair and engine. Raises LoadError when a half has too few requests to choose or to judge."""
    found = []
    for (pair, engine), rows in runs.used.groupby(["pair", "engine"], observed=True):
        found.append(_advise(str(pair), str(engine), rows))
    if not found:
        raise LoadError(f"no request was completed by every arm; {count_lines(runs)[0]}")
    return found


def _advise(pair: str, engine: str, rows: pd.DataFrame) -> Advice:
    mine = halves(rows)
    choosing, judging = _means(rows[mine]), _means(rows[~mine])
    arms = [arm for arm in dict.fromkeys(rows["arm"].astype(str)) if not _missing(choosing, arm)]
    if len(arms) < 2:
        raise LoadError(
            f"{pair} in {engine}: there is nothing to choose from; run fold-bench benchmark=probe methods=all"
        )
    if any(_missing(judging, arm) or _overall(judging, arm, "speedup").thinnest < 2 for arm in arms):
        raise LoadError(
            f"{pair} in {engine}: too few requests for two halves; each task needs at least four requests of two "
            "documents, for example benchmark=probe"
        )
    calibration = {arm: float(_overall(choosing, arm, "speedup").values[0]) for arm in arms}
    ranked = sorted(arms, key=lambda arm: (-calibration[arm], arm != AR))
    chosen = ranked[0]
    speedups = {arm: _overall(judging, arm, "speedup") for arm in ranked}
    choices, better = [], []
    for arm in ranked:
        against = ratio(speedups[arm], speedups[chosen])
        estimate = against.estimate()
        # Without an interval nothing varies: the same arm, or the same times.
        low, high = (estimate.low, estimate.high) if estimate.has_interval else (round(estimate.value, 9),) * 2
        if low > 1:
            better.append(arm)
        tau = _overall(judging, arm, "tau").estimate()
        choices.append(
            Choice(arm, calibration[arm], tau, speedups[arm].estimate(), estimate, arm == chosen or bool(high >= 1))
        )
    tied = [choice.arm for choice in choices if choice.tied]
    notes = [
        f"{_requests(rows[mine])} requests chose, {_requests(rows[~mine])} others judged; no document is in both.",
        "~: not told from the chosen one: the (pointwise) interval of the ratio of their speedups reaches 1.",
    ]
    notes += [
        f"{arm} was faster on the half that judged: the halves disagree, more requests would help." for arm in better
    ]
    return Advice(
        pair,
        engine,
        chosen if len(tied) == 1 else NO_DIFFERENCE,
        chosen,
        choices,
        (_requests(rows[mine]), _requests(rows[~mine])),
        notes,
    )


def _means(rows: pd.DataFrame) -> Resampler:
    return Resampler(rows, ["benchmark", "task"], ["speedup", "tau"])


def _overall(means: Resampler, arm: str, metric: str) -> Draws:
    """Tasks weigh equally, as benchmarks do in the paper's averages (section 4.1)."""
    return average([means.mean(arm, metric, [key]) for key in means.strata()])


def _missing(means: Resampler, arm: str) -> bool:
    return bool(np.isnan(_overall(means, arm, "speedup").values[0]))


def _requests(rows: pd.DataFrame) -> int:
    return len(rows.drop_duplicates(["benchmark", "task", "request"]))


def advise_runs(paths: Iterable[Path | str]) -> list[Advice]:
    """Advice from run directories. Raises LoadError."""
    return advise(load(paths))


def command(arguments: Sequence[str]) -> int:
    """fold-advise: print the answer. Exit code 0, whatever it is."""
    parser = Parser("fold-advise", __doc__ or "")
    parser.add_argument("run", nargs="+", type=Path, help="run directories of one pair that share their requests")
    for advice in advise_runs(parser.parse_args(list(arguments)).run):
        Console().print(advice.table())
        print("\n".join([advice.sentence(), *advice.notes]))
    return 0


def main() -> int:
    """Entry point."""
    return run_command("fold-advise", command)
