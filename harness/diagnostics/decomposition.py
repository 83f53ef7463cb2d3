"""What the window and the memory each contribute, and what alpha does, from the records of any pair's runs.

Tables 4, 11, 5 and 12 for pairs, benchmarks and lengths that the paper does not have (analysis.tables prints its own):
the change in tau from the released drafter to Window and from Window to FOLD, paired by request, which sum to the whole
change; and the per-request ratio of tau between two settings of alpha on requests longer than the window.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from analysis.load import LoadError, Runs
from analysis.stats import Estimate, Resampler, difference
from analysis.style import draw_line, look, styled
from analysis.tables import Source
from harness.diagnostics.report import ALL, Page, as_json, levels_of, sentences, strata_by_level

STEPS = {"original → window": ("window", "original"), "window → fold": ("fold", "window")}
WHOLE = {"original → fold": ("fold", "original")}
CELL = ["pair", "engine", "benchmark", "level"]


def decomposition_page(runs: Runs) -> Page:
    """The page of all pairs in `runs`. Raises LoadError if neither the three arms nor two alphas are there."""
    parts: list[list[str]] = []
    ratios: list[list[str]] = []
    estimates: list[dict[str, Any]] = []
    findings: list[str] = []
    curves: dict[str, dict[str, Estimate]] = {}
    for (pair, engine), rows in runs.used.groupby(["pair", "engine"], observed=True):
        name = f"{pair} in {engine}"
        parts += _changes(name, rows, estimates, findings, curves)
        ratios += _ratios(name, rows, estimates, findings)
    if not parts and not ratios:
        raise LoadError(
            "the runs hold neither original, window and fold on shared requests nor fold at two values of alpha; "
            "run fold-bench methods=[original,window,fold], or -m method=fold method.alpha=1,2,4"
        )
    tables = []
    if parts:
        header = ["pair", "benchmark", "length", "n", "τ original", "τ fold", *STEPS, *WHOLE]
        tables.append(("Change in τ, paired by request", header, parts))
    if ratios:
        header = ["pair", "length", "n", "alpha", "ratio of τ"]
        tables.append(("Ratio of τ between settings of alpha, requests longer than the window", header, ratios))
    title = "Window, memory and alpha (Tables 4, 5, 11, 12)"
    return Page("decomposition", title, findings, tables, estimates, _figure(curves))


def _changes(
    name: str,
    rows: pd.DataFrame,
    estimates: list[dict[str, Any]],
    findings: list[str],
    curves: dict[str, dict[str, Estimate]],
) -> list[list[str]]:
    source = Source(Resampler(rows, ["benchmark", "level"], ["tau", "committed", "rounds"]))
    found = {method: source.arm(method) for method in ("original", "window", "fold")}
    if None in found.values():
        return []
    arms = {method: str(arm) for method, arm in found.items()}
    means, cells = source.means, []
    length = rows.groupby(["benchmark", "level"], observed=True, sort=False)["prompt_tokens"].median()
    groups = {key: [key] for key in sorted(length.index, key=lambda key: (str(key[0]), length[key]))}
    for (benchmark, level), keys in {**groups, (ALL, ALL): list(groups)}.items():
        taus = {method: means.mean(arm, "tau", keys) for method, arm in arms.items()}
        if taus["original"].n == 0:
            continue
        where = {"pair": name, "benchmark": str(benchmark), "level": str(level)}
        changes = {step: difference(taus[a], taus[b]).estimate() for step, (a, b) in {**STEPS, **WHOLE}.items()}
        estimates += [as_json(change, **where, change=step) for step, change in changes.items()]
        whole = [taus[method].estimate().text() for method in ("original", "fold")]
        texts = [change.text(3, sign=True) for change in changes.values()]
        cells.append([name, where["benchmark"], where["level"], str(taus["fold"].n), *whole, *texts])
        if benchmark == ALL:
            findings += sentences(changes, f"Change in τ of {name} over all requests")
        else:
            for step in STEPS:
                curves.setdefault(step, {})[f"{benchmark}\n{level}"] = changes[step]
    return cells


def _ratios(name: str, rows: pd.DataFrame, estimates: list[dict[str, Any]], findings: list[str]) -> list[list[str]]:
    rows = rows[rows["method"] == "fold"]
    configs = {text: json.loads(text) for text in set(rows["config"].astype(str))}
    configs = {text: config for text, config in configs.items() if {"alpha", "window"} <= config.keys()}
    rows = rows[rows["config"].isin(list(configs))]
    rows = rows.assign(
        alpha=[float(configs[text]["alpha"]) for text in rows["config"]],
        window=[configs[text]["window"] for text in rows["config"]],
        others=[json.dumps({**configs[text], "alpha": None}, sort_keys=True) for text in rows["config"]],
    )
    rows = rows[rows["prompt_tokens"] > rows["window"]]
    cells = []
    identity = ["benchmark", "task", "level", "request"]
    for others, same in rows.groupby("others"):
        window = json.loads(str(others))["window"]
        alphas = sorted(set(same["alpha"]))
        for low, high in pairwise(alphas):
            both = same[same["alpha"] == high].merge(
                same.loc[same["alpha"] == low, [*identity, "tau"]], on=identity, suffixes=("", "_low")
            )
            if not len(both):
                continue
            what = f"{high:g} vs. {low:g} (W = {window})"
            both = both.assign(arm=what, ratio=both["tau"] / both["tau_low"])
            means = Resampler(both, ["level"], ["ratio"])
            for level, keys in strata_by_level(means, levels_of(both)).items():
                estimate = means.mean(what, "ratio", keys).estimate()
                estimates.append(as_json(estimate, pair=name, level=level, alpha=what))
                cells.append([name, level, str(estimate.n), what, estimate.text(3)])
            findings.append(f"Ratio of τ of {name}, alpha {what}, {level}: {estimate.text(3)}.")
    return cells


def _figure(curves: dict[str, dict[str, Estimate]]) -> Figure:
    with styled():
        places = list(dict.fromkeys(place for curve in curves.values() for place in curve))
        figure = Figure(figsize=(max(3.6, 0.55 * len(places) + 1), 3.0), layout="constrained")
        axes = figure.subplots()
        for number, (step, curve) in enumerate(curves.items()):
            x = [places.index(place) + 0.15 * (2 * number - 1) for place in curve]
            settings = {**look(STEPS[step][0]), "linestyle": "none"}
            draw_line(axes, x, list(curve.values()), step, **settings)
        axes.axhline(0, color="#444444", linewidth=0.7)
        axes.set_xticks(range(len(places)), places, fontsize=5)
        axes.set_ylabel("change in τ")
        if curves:
            axes.legend(frameon=False)
        return figure


def used_rows(runs: Runs) -> pd.DataFrame:
    """The rows behind the page, for its CSV."""
    columns: Sequence[str] = [*CELL, "task", "request", "arm", "config", "run", "prompt_tokens", "tau", "speedup"]
    return runs.used.loc[runs.used["method"].isin(["original", "window", "fold"]), list(columns)]
