"""From rows of a diagnostic to estimates, a page, a plot and the raw numbers, all in one folder.

Each diagnostic leaves ``<name>.csv`` (one row per input and arm), ``<name>.json`` (estimates), ``<name>.md``,
``<name>.png`` and ``<name>.pdf``. Intervals are paired bootstraps over inputs (analysis.stats). Nothing carries a date,
so the same states give the same bytes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from analysis.stats import Draws, Estimate, Resampler, difference
from analysis.style import draw_line, look, save, styled
from harness.requests import write_atomic

ALL = "all"


@dataclass
class Page:
    """What a diagnostic says: findings as sentences, tables as (title, header, rows), estimates for machines."""

    name: str
    title: str
    findings: list[str]
    tables: list[tuple[str, list[str], list[list[str]]]]
    estimates: list[dict[str, Any]]
    figure: Figure

    def write(self, out: Path, rows: pd.DataFrame, footer: Sequence[str]) -> list[Path]:
        """Write the five files below ``out``; returns their paths."""
        lines = [f"# {self.title}", "", *(f"- {text}" for text in self.findings), ""]
        for title, header, cells in self.tables:
            lines += [f"## {title}", "", _line(header), _line(["---"] * len(header)), *map(_line, cells), ""]
        lines += [f"![{self.title}]({self.name}.png)", "", "---", "", *(f"- {text}" for text in footer), ""]
        data = {"title": self.title, "findings": self.findings, "estimates": self.estimates, "footer": list(footer)}
        out.mkdir(parents=True, exist_ok=True)
        files = {
            ".csv": rows.to_csv(index=False, lineterminator="\n"),
            ".json": json.dumps(data, indent=1, ensure_ascii=False) + "\n",
            ".md": "\n".join(lines),
        }
        for suffix, text in files.items():
            write_atomic(out / f"{self.name}{suffix}", text.encode())
        plots = [save(self.figure, out / f"{self.name}{suffix}") for suffix in (".png", ".pdf")]
        return [*(out / f"{self.name}{suffix}" for suffix in files), *plots]


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def levels_of(rows: pd.DataFrame) -> list[str]:
    """Length levels in order of their inputs' length."""
    length = rows.groupby(rows["level"].astype("str"))["prompt_tokens"].median()
    return [str(level) for level in length.sort_values(kind="stable").index]


def strata_by_level(means: Resampler, levels: Sequence[str]) -> dict[str, list[tuple[str, ...]]]:
    """The stratum of each level, and of all of them together where there are several."""
    found: dict[str, list[tuple[str, ...]]] = {level: [(level,)] for level in levels}
    return {**found, ALL: list(means.strata())} if len(levels) > 1 else found


def as_json(estimate: Estimate, **where: Any) -> dict[str, Any]:
    """An estimate as JSON; a bound that does not exist is null."""
    low, high = (round(b, 6) if estimate.has_interval else None for b in (estimate.low, estimate.high))
    return {**where, "value": round(estimate.value, 6), "low": low, "high": high, "n": estimate.n}


def sentences(changes: dict[str, Estimate], what: str) -> list[str]:
    """Sentences that sort changes by where their intervals lie."""
    sides: dict[str, list[str]] = {}
    for name, change in changes.items():
        side = "above zero" if change.low > 0 else "below zero" if change.high < 0 else "not distinguishable from zero"
        sides.setdefault(side, []).append(f"{name} {change.text(3, sign=True)}")
    return [f"{what}, {side}: {'; '.join(names)}." for side, names in sides.items()]


# ------------------------------------------------------------------------------------------------- offline acceptance


def acceptance_page(rows: pd.DataFrame) -> Page:
    """rows: arm, tau, first_1..first_K, positions beside the columns of an input (command.py)."""
    levels, arms = levels_of(rows), list(dict.fromkeys(rows["arm"]))
    firsts = [name for name in rows.columns if name.startswith("first_")]
    means = Resampler(rows, ["level"], ["tau", *firsts])
    strata = strata_by_level(means, levels)
    taus = {(level, arm): means.mean(arm, "tau", keys) for level, keys in strata.items() for arm in arms}

    def change(level: str, a: str, b: str) -> Estimate:
        return difference(taus[level, a], taus[level, b]).estimate()

    estimates = [as_json(draws.estimate(), level=level, arm=arm) for (level, arm), draws in taus.items()]
    estimates += [
        as_json(change(level, a, b), level=level, arm=a, minus=b)
        for level in strata
        for i, a in enumerate(arms)
        for b in arms[:i]
    ]
    bases = [arm for arm in ("original", "window") if arm in arms]
    by_level = []
    for (level, arm), draws in taus.items():
        changes = ["–" if arm == base else change(level, arm, base).text(3, sign=True) for base in bases]
        by_level.append([level, str(draws.n), arm, draws.estimate().text(3), *changes])
    cells = rows.groupby(["benchmark", "level", "arm"], sort=False, observed=True)["tau"].mean()
    pivot = [
        [benchmark, level, *(f"{cells.get((benchmark, level, arm), np.nan):.2f}" for arm in arms)]
        for benchmark in dict.fromkeys(rows["benchmark"])
        for level in levels
        if (benchmark, level, arms[0]) in cells.index
    ]
    last = list(strata)[-1]
    slots = [[arm, *(f"{means.mean(arm, f, strata[last]).values[0]:.3f}" for f in firsts)] for arm in arms]
    findings = []
    for base in bases:
        others = {arm: change(last, arm, base) for arm in arms if arm != base}
        findings += sentences(others, f"Change in τ_fs from {base} ({last})")
    with styled():
        figure = Figure(figsize=(4.6, 3.4), layout="constrained")
        axes = figure.subplots()
        for place, arm in enumerate(arms):
            x = [i + 0.5 * (place - (len(arms) - 1) / 2) / len(arms) for i in range(len(levels))]
            draw_line(axes, x, [taus[level, arm].estimate() for level in levels], arm, **look(arm, place))
        axes.set_xticks(range(len(levels)), levels)
        axes.set(xlabel="input length (tokens)", ylabel="offline acceptance length τ_fs")
        figure.legend(loc="outside lower center", ncols=min(len(arms), 5), frameon=False)
    header = ["length", "n", "method", "τ_fs", *(f"− {base}" for base in bases)]
    tables = [
        ("By length", header, by_level),
        ("By benchmark", ["benchmark", "length", *arms], pivot),
        (
            f"Share of positions whose first k drafts all match ({last}; τ_fs is one plus their sum)",
            ["method", *(f.removeprefix("first_") for f in firsts)],
            slots,
        ),
    ]
    title = "Offline acceptance on identical states (Appendix A)"
    return Page("acceptance", title, findings, tables, estimates, figure)


# --------------------------------------------------------------------------------------------------- distance control


def distance_page(rows: pd.DataFrame) -> Page:
    """rows: arm, shift, fraction beside the columns of an input."""
    levels, shifts = levels_of(rows), sorted(set(rows["shift"]))
    means = Resampler(rows, ["level"], ["fraction"])
    strata = strata_by_level(means, levels)
    cells, estimates = [], []
    fractions: dict[tuple[str, int], Draws] = {}
    changes: dict[str, Estimate] = {}
    for level, keys in strata.items():
        for shift in shifts:
            fractions[level, shift] = draws = means.mean(f"+{shift}", "fraction", keys)
            change = difference(draws, fractions[level, 0]).estimate()
            estimates.append(as_json(draws.estimate(), level=level, shift=shift))
            text = "–" if shift == 0 else change.text(3, sign=True)
            if shift:
                estimates.append(as_json(change, level=level, shift=shift, minus=0))
                changes[f"+{shift:,}"] = change  # of the last stratum: all levels, or the only one
            cells.append([level, str(draws.n), f"{shift:,}", draws.estimate().text(3), text])
    last = list(strata)[-1]
    with styled():
        figure = Figure(figsize=(4.0, 3.0), layout="constrained")
        axes = figure.subplots()
        for place, level in enumerate(strata):
            of_level = [fractions[level, shift].estimate() for shift in shifts]
            draw_line(axes, list(range(len(shifts))), of_level, level, **look(f"level {level}", place))
        axes.set_xticks(range(len(shifts)), [f"{shift:,}" for shift in shifts])
        axes.set(xlabel="shift of the draft block (positions)", ylabel="accepted fraction a = min(L, K) / K")
        axes.set_ylim(bottom=0)
        axes.legend(frameon=False, title="input length")
    header = ["length", "n", "shift", "a", "change from no shift"]
    findings = sentences(changes, f"Change in the accepted fraction ({last})")
    title = "Distance control: the draft block moved away from its context (Finding 1)"
    return Page("distance", title, findings, [("By length and shift", header, cells)], estimates, figure)


# ------------------------------------------------------------------------------------------------------- order probe


def order_page(rows: pd.DataFrame) -> Page:
    """rows: low, high, arm, fold, accuracy, pairs beside the columns of an input."""
    rows = rows.assign(bin=[f"{_short(a)}–{_short(b)}" for a, b in zip(rows["low"], rows["high"], strict=True)])
    bins, arms = list(dict.fromkeys(rows["bin"])), list(dict.fromkeys(rows["arm"]))
    means = Resampler(rows, ["bin"], ["accuracy"])
    cells, estimates, findings = [], [], []
    bands: dict[tuple[str, str], Estimate] = {}
    for name in bins:
        row = [name]
        for arm in arms:
            here = rows[(rows["bin"] == name) & (rows["arm"] == arm)]
            of_fold = here.groupby("fold").apply(_weighted, include_groups=False)
            mean, spread = float(of_fold.mean()), float(of_fold.std(ddof=1))
            over = means.mean(arm, "accuracy", [(name,)]).estimate()
            bands[name, arm] = Estimate(mean, mean - spread, mean + spread, over.n)
            whole = as_json(over, bin=name, arm=arm)
            estimates.append({**whole, "fold_mean": round(mean, 6), "fold_std": round(spread, 6)})
            bounds = f" [{over.low:.3f}, {over.high:.3f}]" if over.has_interval else ""
            row.append(f"{mean:.3f} ± {spread:.3f}{bounds}")
        cells.append([row[0], str(bands[name, arms[0]].n), *row[1:]])
        draws = {arm: means.mean(arm, "accuracy", [(name,)]) for arm in arms}
        chance = {arm: _minus_chance(each) for arm, each in draws.items()}
        findings += sentences(chance, f"{name} tokens apart, accuracy minus one half")
        change = difference(draws[arms[0]], draws[arms[1]]).estimate()
        findings += sentences({f"{arms[0]} − {arms[1]}": change}, f"{name} tokens apart, accuracy")
    with styled():
        figure = Figure(figsize=(4.4, 3.4), layout="constrained")
        axes = figure.subplots()
        for place, arm in enumerate(arms):
            draw_line(axes, list(range(len(bins))), [bands[name, arm] for name in bins], arm, **look(arm, place))
        axes.axhline(0.5, color="#444444", linewidth=0.7, linestyle=":")
        axes.set_xticks(range(len(bins)), bins)
        axes.set(xlabel="separation of the two entries (tokens)", ylabel="accuracy (mean ± std over folds)")
        figure.legend(loc="outside lower center", ncols=2, frameon=False)
    tables = [("Accuracy: mean ± std over folds [95% interval over inputs]", ["separation", "n", *arms], cells)]
    title = "Order probe: which of two entries came first (Finding 2)"
    return Page("order", title, findings, tables, estimates, figure)


def _weighted(part: pd.DataFrame) -> float:
    return float(np.average(part["accuracy"], weights=part["pairs"]))


def _minus_chance(draws: Draws) -> Estimate:
    return replace(draws, values=draws.values - 0.5).estimate()


def _short(tokens: int) -> str:
    return f"{tokens // 1024}K" if tokens >= 1024 else str(tokens)


# ------------------------------------------------------------------------------------------------------------- latency


def latency_page(rows: pd.DataFrame) -> Page:
    """rows: context, step, method, part, ms, bytes, bound_ms (harness.diagnostics.latency.Part)."""
    from analysis.figures import figure1

    cells, findings, estimates = [], [], []
    parts = list(dict.fromkeys(rows["part"]))
    for key, here in rows.groupby(["context", "step", "method"], sort=False):
        context, step, method = (str(part) for part in key)
        total, bound = here["ms"].sum(), here["bound_ms"].sum()
        name = step if step == "AR" else f"{step} {method}"
        shares = {row["part"]: 100 * row["ms"] / total for row in here.to_dict("records")}
        row = [_short(int(context)), name, f"{total:.3f}", f"{bound:.3f}", f"{total / bound:.2f}"]
        cells.append([*row, *(f"{shares[part]:.1f}%" if part in shares else "" for part in parts)])
        whole = {"context": int(context), "step": step, "method": method, "ms": round(float(total), 6)}
        estimates.append({**whole, "bound_ms": round(float(bound), 6)})
    attention = rows[rows["part"] == "target attention"].set_index(["step", "method", "context"])["ms"]
    totals = rows.groupby(["step", "method", "context"])["ms"].sum()
    share = 100 * attention / totals
    for step, method in dict.fromkeys(zip(rows["step"], rows["method"], strict=True)):
        of = share[step, method]
        name = "an AR step" if step == "AR" else f"a round of {method}"
        shortest, longest = of.index.min(), of.index.max()
        findings.append(
            f"Target attention takes {of[shortest]:.1f}% of {name} at {_short(shortest)} and {of[longest]:.1f}% at "
            f"{_short(longest)}."
        )
    header = ["context", "step", "ms", "bound ms", "ms / bound", *parts]
    tables = [("Time of a step or round, the bound that its reads set, and shares", header, cells)]
    title = "Latency of an AR step and of an SD round (Figure 1)"
    return Page("latency", title, findings, tables, estimates, figure1(rows))


PAGES: dict[str, Callable[[pd.DataFrame], Page]] = {
    "acceptance": acceptance_page,
    "distance": distance_page,
    "order": order_page,
}
