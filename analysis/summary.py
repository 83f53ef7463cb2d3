"""What a run found: the table that ends ``fold-bench`` and the plot beside it.

Per benchmark and length level the arms are ranked by speedup over autoregressive decoding, the autoregressive arm
among them: where it ranks first, speculation does not pay. Absolute TPOT stands beside every speedup (facts/peers.md
C.2).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from rich.table import Table
from rich.text import Text

from analysis.load import CELL, REQUEST, Runs, load
from analysis.stats import METRICS, Estimate, Resampler, ratio
from analysis.style import draw_line, look, save, styled
from harness.guards import Work, work_flags
from harness.records import AR

_MISSING = Estimate(float("nan"), float("nan"), float("nan"), 0)
SYNTHETIC = (
    "Random weights at the published shapes: times are measured, but no draft means anything, so there is no tau and "
    "no speedup. The time is that of a round (AR: of a step), and arms are ranked by it."
)


@dataclass(frozen=True)
class Row:
    """One arm on one benchmark at one length level. tpot_ms is an absolute time; rank 1 is the fastest.

    synthetic: random weights; tau and speedup are then missing, and arms are ranked by round_ms.
    """

    pair: str
    engine: str
    benchmark: str
    level: str
    rank: int
    arm: str
    tau: Estimate
    tpot_ms: Estimate
    speedup: Estimate
    tied: bool
    flags: tuple[str, ...]
    round_ms: Estimate
    synthetic: bool = False

    def cells(self, with_pair: bool = False) -> list[str]:
        """Printed values from benchmark to speedup; "!" marks an arm with flags."""
        benchmark = f"{self.pair} in {self.engine}: {self.benchmark}" if with_pair else self.benchmark
        place = f"{self.rank}{'~' if self.tied and self.rank > 1 else ''}"
        arm = self.arm + (" !" if self.flags else "")
        if self.synthetic:
            numbers = ["—", f"{self.round_ms.value:.2f} a round", "—"]
        else:
            numbers = [f"{self.tau.value:.2f}", f"{self.tpot_ms.value:.2f}", self.speedup.text(2, "×")]
        return [benchmark, self.level, place, arm, *numbers]


@dataclass
class Summary:
    """Rows in printing order, and what must be read beside them.

    counts: lines on requests used and left out, by reason. notes: drift, agreement with the autoregressive output,
    flags. failures: requests that failed or are missing in some arm; any makes a run incomplete (exit code non-zero).
    """

    rows: list[Row]
    counts: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    failures: int = 0

    CAPTION = (
        "tau: mean over requests of tokens per round. Speedup: mean over requests of TPOT(AR)/TPOT [95% interval, "
        "paired bootstrap over requests]. ~: not distinguishable from the first (the interval of their ratio holds 1)."
    )
    HEADER = ("benchmark", "length", "#", "method", "tau", "TPOT ms", "speedup [95%]")

    def table(self) -> Table:
        """The table for a terminal (rich)."""
        below = Text("\n".join([self.CAPTION, *self.counts, *self.notes]))
        table = Table(title=Text(self.title), caption=below, caption_justify="left")
        for name in self.HEADER:
            table.add_column(name, justify="right" if name in ("#", "tau", "TPOT ms") else "left")
        for previous, row in zip([None, *self.rows], self.rows, strict=False):
            new = previous is None or previous.cells(True)[:2] != row.cells(True)[:2]
            if new and previous is not None:
                table.add_section()
            cells = row.cells(self._several)
            shown = cells if new else ["", "", *cells[2:]]
            # Text, not str: a name with brackets is not markup.
            table.add_row(*(Text(cell) for cell in shown), style="bold" if row.rank == 1 else "")
        return table

    def markdown(self) -> str:
        """The same as a Markdown table with the notes as a list."""
        header = self.HEADER
        lines = [f"| {' | '.join(header)} |", f"|{'|'.join('---' for _ in header)}|"]
        for row in self.rows:
            cells = [cell.replace("|", "\\|") for cell in row.cells(self._several)]
            lines.append("| " + " | ".join(f"**{cell}**" if row.rank == 1 and cell else cell for cell in cells) + " |")
        return "\n".join([*lines, "", *(f"- {line}" for line in [self.CAPTION, *self.counts, *self.notes]), ""])

    @property
    def _several(self) -> bool:
        return len({(row.pair, row.engine) for row in self.rows}) > 1

    @property
    def title(self) -> str:
        return "; ".join(dict.fromkeys(f"{row.pair} in {row.engine}" for row in self.rows))


def summarise(run_dir: Path | str | Iterable[Path | str]) -> Summary:
    """Summarise one or several run directories. Raises analysis.load.LoadError when there are no records."""
    return summarise_runs(load(run_dir, synthetic=True))


def summarise_runs(runs: Runs) -> Summary:
    """Summarise loaded records."""
    groups = ["pair", "engine", "benchmark", "level"]
    metrics = ("tpot_ms", "round_ms") if runs.synthetic else (*METRICS, "round_ms")
    means = Resampler(runs.used, CELL, metrics)
    rows: list[Row] = []
    for keys in _levels(runs.used, groups):
        strata = means.strata(**dict(zip(groups, keys, strict=True)))
        of_group = runs.used[(runs.used[groups].astype("str") == list(keys)).all(axis=1)]
        rows.extend(_rank(means, strata, keys, of_group))
    flags = [f"! {row.benchmark} {row.level}: {flag}" for row in rows for flag in row.flags]
    made_up = [SYNTHETIC] if runs.synthetic else []
    return Summary(rows, count_lines(runs), [*made_up, *_drift(runs), *_agreement(runs), *flags], _failures(runs))


def _levels(used: pd.DataFrame, groups: list[str]) -> list[tuple[str, ...]]:
    """Groups in printing order: pair, engine and benchmark as recorded, levels by their requests' length."""
    if len(used) == 0:
        return []
    length = used.groupby(groups, observed=True)["prompt_tokens"].median().reset_index()
    seen = {name: place for place, name in enumerate(dict.fromkeys(used["benchmark"]))}
    length["place"] = length["benchmark"].map(seen).astype(int)
    ordered = length.sort_values(["pair", "engine", "place", "prompt_tokens"])
    return [tuple(str(part) for part in row) for row in ordered[groups].to_numpy()]


def _rank(means: Resampler, strata: list[tuple[str, ...]], keys: tuple[str, ...], of_group: pd.DataFrame) -> list[Row]:
    arms = means.arms(strata)
    rounds = {arm: means.mean(arm, "round_ms", strata) for arm in arms}
    synthetic = "speedup" not in means.metrics
    if synthetic:
        speeds = {arm: ratio(rounds[arms[0]], rounds[arm]) for arm in arms}
    else:
        speeds = {arm: means.mean(arm, "speedup", strata) for arm in arms}
    ranked = sorted(speeds, key=lambda arm: -np.nan_to_num(speeds[arm].values[0], nan=-1.0))
    rows = []
    for rank, arm in enumerate(ranked, 1):
        against_best = ratio(speeds[arm], speeds[ranked[0]]).estimate()
        rows.append(
            Row(
                pair=keys[0],
                engine=keys[1],
                benchmark=keys[2],
                level=keys[3],
                rank=rank,
                arm=arm,
                tau=_MISSING if synthetic else means.mean(arm, "tau", strata).estimate(),
                tpot_ms=means.mean(arm, "tpot_ms", strata).estimate(),
                speedup=_MISSING if synthetic else speeds[arm].estimate(),
                tied=against_best.has_interval and against_best.low <= 1 <= against_best.high,
                flags=() if synthetic else _flags(arm, of_group[of_group["arm"] == arm]),
                round_ms=rounds[arm].estimate(),
                synthetic=synthetic,
            )
        )
    return rows


def _flags(arm: str, rows: pd.DataFrame) -> tuple[str, ...]:
    """Signs that an arm's outputs are not the work that the baseline did (harness.guards)."""
    mine = zip(rows["n_out"], rows["finish"], rows["repetition"], strict=True)
    base = zip(rows["n_out_ar"], rows["finish_ar"], rows["repetition_ar"], strict=True)
    return tuple(work_flags(arm, [(Work(*a), Work(*b)) for a, b in zip(mine, base, strict=True)]))


def count_lines(runs: Runs) -> list[str]:
    used = runs.used[REQUEST].drop_duplicates()
    line = f"Requests used: {len(used)}; left out of every arm: {len(runs.excluded)}"
    reasons = Counter(zip(runs.excluded["reason"], runs.excluded["arm"], strict=True)).most_common()
    told = f" ({'; '.join(f'{n} {reason} in {arm}' for (reason, arm), n in reasons)})" if reasons else ""
    return [f"{line}{told}.", *unusable_lines(runs)]


def unusable_lines(runs: Runs) -> list[str]:
    """Arms that did not work at all somewhere, one line each, and records whose tokens do not add up."""
    lines = [
        f"{row['arm']} has no usable record in {row['benchmark']} {row['level']} ({row['n']} tried; {row['reason']})."
        for row in runs.unusable.to_dict("records")
    ]
    odd = runs.used[runs.used["miscounted"]]
    if len(odd):
        first = f"the first is request {odd['request'].iloc[0]} of {odd['arm'].iloc[0]}"
        lines.append(f"{len(odd)} records committed more or fewer tokens than they delivered ({first}): doubt their τ.")
    return lines


def _failures(runs: Runs) -> int:
    # A request without TPOT stopped after its first token: that is a property of the request, not a failure.
    return int((runs.excluded["reason"] != "no TPOT").sum() + runs.unusable["n"].sum())


def _drift(runs: Runs) -> list[str]:
    """The second autoregressive pass against the first: what the speedups would show if nothing had changed."""
    if len(runs.again) == 0:
        return []
    # Runs that are read together repeat the same requests.
    several = runs.again["run"].nunique() > 1
    means = Resampler(runs.again, ["pair", "engine", *(["run"] if several else [])], ["speedup"])
    lines = []
    for pair, engine in dict.fromkeys(key[:2] for key in means.strata()):
        keys = means.strata(pair=pair, engine=engine)
        estimate = means.mean(runs.again["arm"].iloc[0], "speedup", keys).estimate()
        lines.append(f"AR against itself, first pass over second pass: {estimate.text(3)} on {estimate.n} requests.")
    return lines


def _agreement(runs: Runs) -> list[str]:
    """Outputs identical to the autoregressive ones, and what the target says of the others (agreement.jsonl)."""
    arms = [arm for arm in runs.arms() if arm != AR]
    if not arms:
        return []
    same = {arm: runs.used.loc[runs.used["arm"] == arm, "same"] for arm in arms}
    counts = ", ".join(f"{arm} {int(rows.sum())}/{len(rows)}" for arm, rows in same.items())
    lines = [f"Outputs identical to AR: {counts}."]
    judged = [line for line in runs.agreement if not line["equal"]]
    failed = [line for line in judged if not line["passed"]]
    if judged:
        worst = max((line["max_gap"] or 0.0 for line in judged), default=0.0)
        verdict = f"{len(failed)} NOT CONFIRMED by the target" if failed else "all near ties of the target"
        lines.append(f"Outputs that differ: {len(judged)} judged, {verdict} (largest logit gap {worst:.3g}).")
    return lines


def plot_run(run_dir: Path | str | Iterable[Path | str], out: Path | str) -> Path:
    """tau (top) and speedup (bottom) over input length, one column per benchmark, with 95% intervals; .png or .pdf by
    `out`.
    """
    runs = load(run_dir)
    return save(figure_by_length(summarise_runs(runs).rows), Path(out))


def figure_by_length(rows: list[Row]) -> Figure:
    """The figure behind plot_run; levels are categories in order of length."""
    benchmarks = list(dict.fromkeys(row.benchmark for row in rows))
    arms = sorted(dict.fromkeys(row.arm for row in rows), key=lambda arm: (arm == "fold", arm != AR))
    with styled():
        figure = Figure(figsize=(max(2.6 * len(benchmarks), 3.6), 4.4), layout="constrained")
        grid = figure.subplots(2, max(len(benchmarks), 1), squeeze=False, sharey="row")
        for column, benchmark in enumerate(benchmarks):
            here = [row for row in rows if row.benchmark == benchmark]
            levels = list(dict.fromkeys(row.level for row in here))
            for axes, metric in zip(grid[:, column], ("tau", "speedup"), strict=True):
                for place, arm in enumerate(arms):
                    if arm == AR and metric == "tau":
                        continue
                    mine = [row for row in here if row.arm == arm]
                    # Arms stand side by side at a level so that their intervals can be read.
                    shift = 0.35 * (place - (len(arms) - 1) / 2) / max(len(arms), 1)
                    x = [levels.index(row.level) + shift for row in mine]
                    draw_line(axes, x, [getattr(row, metric) for row in mine], arm, **look(arm, place))
                axes.set_xticks(range(len(levels)), levels)
            grid[0, column].set_title(benchmark)
            grid[1, column].set_xlabel("input length (tokens)")
        grid[0, 0].set_ylabel("acceptance length τ")
        grid[1, 0].set_ylabel("speedup over AR (×)")
        handles, labels = grid[1, 0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=min(len(labels), 5) or 1, frameon=False)
        return figure
