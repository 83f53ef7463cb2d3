"""One arm against every other, paired by request: fold-tables RUN --against fold.

For any pair and benchmark (the paper's own tables are analysis.tables): the difference of τ and the ratio of speedups
over all requests, by benchmark, by length, and over a selection. Requests weigh equally; intervals are paired
bootstraps within benchmark, task and length (analysis.stats).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from analysis.load import CELL, LoadError, Runs
from analysis.stats import Estimate, Resampler, difference, ratio
from analysis.summary import count_lines
from harness.records import AR

Where = Mapping[str, Sequence[str]]
FIELDS = ("benchmark", "task", "level")


@dataclass(frozen=True)
class Difference:
    """`other` over one group of requests. tau, speedup: its own; change: τ of the arm minus its; gain: speedup of the
    arm over its."""

    pair: str
    group: str
    other: str
    tau: Estimate
    speedup: Estimate
    change: Estimate
    gain: Estimate


def parse_where(texts: Sequence[str]) -> dict[str, list[str]]:
    """ "level=4K,7K" as {"level": ["4K", "7K"]}. Raises LoadError."""
    found = {}
    for text in texts:
        name, _, values = text.partition("=")
        if name not in FIELDS or not values:
            raise LoadError(f"--where {text}: give {' or '.join(f'{field}=A,B' for field in FIELDS)}")
        found[name] = values.split(",")
    return found


def differences(runs: Runs, arm: str, where: Where | None = None) -> list[Difference]:
    """All groups of all pairs. Raises LoadError where there is no such arm, or nothing is selected."""
    if not len(runs.used):
        raise LoadError(f"no request was completed by every arm; {count_lines(runs)[0]}")
    if arm not in runs.arms():
        gone = [line for line in count_lines(runs)[1:] if line.startswith(f"{arm} has no usable record")]
        raise LoadError(gone[0] if gone else f"no arm is called {arm!r}; these runs have {', '.join(runs.arms())}")
    found = []
    for (pair, engine), rows in runs.used.groupby(["pair", "engine"], observed=True):
        means = Resampler(rows, CELL, ["tau", "speedup"])
        groups: dict[str, Where] = {"all requests": {}}
        lengths = rows.groupby("level", observed=True)["prompt_tokens"].median().sort_values()
        groups |= {str(name): {"benchmark": [str(name)]} for name in rows["benchmark"].unique()}
        groups |= {str(name): {"level": [str(name)]} for name in lengths.index}
        if where:
            groups["; ".join(f"{name} {', '.join(values)}" for name, values in where.items())] = where
        for group, chosen in groups.items():
            keys = means.strata(**chosen)
            if not keys:
                raise LoadError(f"--where selects no request of {pair} in {engine}")
            mine = {metric: means.mean(arm, metric, keys) for metric in ("tau", "speedup")}
            for other in (name for name in runs.arms() if name != arm):
                its = {metric: means.mean(other, metric, keys) for metric in mine}
                if its["tau"].n == mine["tau"].n > 0:
                    found.append(
                        Difference(
                            f"{pair} in {engine}",
                            group,
                            other,
                            its["tau"].estimate(),
                            its["speedup"].estimate(),
                            difference(mine["tau"], its["tau"]).estimate(),
                            ratio(mine["speedup"], its["speedup"]).estimate(),
                        )
                    )
    return found


def to_markdown(runs: Runs, arm: str, rows: Sequence[Difference]) -> str:
    """A table for each pair, with what must be read beside it below."""
    lines: list[str] = []
    for pair in dict.fromkeys(row.pair for row in rows):
        header = ["requests", "n", "method", "τ", "speedup", f"τ of {arm} − τ", f"speedup of {arm} / speedup"]
        lines += [f"**{arm} against the other methods, {pair}**", ""]
        lines += [f"| {' | '.join(header)} |", f"|{'---|' * len(header)}"]
        for row in (row for row in rows if row.pair == pair):
            own = "1.00" if row.other == AR else row.tau.text(2)
            cells = [row.group, str(row.change.n), row.other, own, row.speedup.text(2, "×")]
            lines.append(f"| {' | '.join([*cells, row.change.text(2, sign=True), row.gain.text(3)])} |")
        lines.append("")
    what = "Means over requests; intervals: 95%, 2,000 paired bootstrap resamples within benchmark, task and length."
    return "\n".join([*lines, f"- {what}", *(f"- {line}" for line in count_lines(runs)), ""])
