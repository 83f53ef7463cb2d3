"""fold-figures: the paper's Figures 1, 2, 3, 5 and 6 from records and diagnostics, as PDF and PNG.

Figures 2, 5 and 6 come from records. Figures 1 and 3 come from what fold-diagnose leaves: ``latency.csv`` (context in
tokens, step "AR" or "SD", part, ms, and if there are several the method) and ``order.csv`` (the order probe). A figure
whose input is not there is not made.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.container import ErrorbarContainer
from matplotlib.figure import Figure

from analysis import paper
from analysis.command import Parser, run_command
from analysis.load import LoadError, load
from analysis.stats import Estimate
from analysis.style import GREYS, HATCHES, draw_line, look, save, styled
from analysis.tables import Data

LATENCY, PROBE = "latency.csv", "order.csv"
# Middle of each LBv2 bucket on a logarithmic axis, in tokens.
BUCKET_AT = dict(zip(paper.BUCKETS, (11_585, 23_170, 46_341, 92_682, 185_364), strict=True))


def figure1(latency: pd.DataFrame) -> Figure:
    """Shares of an AR step and of an SD round by context length; of several methods the original's, else the first."""
    if "method" in latency:
        methods = list(dict.fromkeys(latency.loc[latency["step"] == "SD", "method"]))
        shown = "original" if "original" in methods else next(iter(methods), "")
        latency = latency[(latency["step"] == "AR") | (latency["method"] == shown)]
    parts = list(dict.fromkeys(latency["part"]))
    with styled():
        figure = Figure(figsize=(6.4, 2.8), layout="constrained")
        for axes, step, title in zip(
            figure.subplots(1, 2, sharey=True), ("AR", "SD"), ("AR step", "SD round"), strict=True
        ):
            rows = latency[latency["step"] == step]
            table = rows.pivot_table(index="context", columns="part", values="ms", aggfunc="sum", fill_value=0.0)
            shares = 100 * table.reindex(columns=parts, fill_value=0.0).div(table.sum(axis=1), axis=0)
            base = np.zeros(len(shares))
            for place, part in enumerate(parts):
                fill: dict[str, Any] = {"color": GREYS[place % 7], "hatch": HATCHES[place % 7], "edgecolor": "black"}
                axes.bar(range(len(shares)), shares[part], 0.7, bottom=base, label=part, linewidth=0.4, **fill)
                base += shares[part].to_numpy()
            axes.set_xticks(range(len(shares)), [_tokens(context) for context in shares.index])
            axes.set(title=title, xlabel="context (tokens)", ylim=(0, 100))
        figure.axes[0].set_ylabel("share of latency (%)")
        handles, labels = figure.axes[1].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False)
        return figure


def figure2(data: Data) -> Figure:
    """Speedup of the original drafter on SPEED-Bench, LBv2 by length, and Retr.KV."""
    models = ["Llama-3.1-8B", "Gemma-4-12B"]
    with styled():
        figure = Figure(figsize=(6.0, 2.6), layout="constrained")
        for axes, model in zip(figure.subplots(1, 2), models, strict=True):
            source, buckets = data.of(model, "DFlash"), data.by_bucket(model)
            tiers = {
                1024 * int(tier[:-1]): source.task("original", "speedup", f"SPEED {tier}") for tier in paper.SPEED_TIERS
            }
            _line(axes, {x: draws.estimate() for x, draws in tiers.items()}, "SPEED-Bench", "original")
            lbv2 = {BUCKET_AT[b]: buckets.task("original", "speedup", "LBv2", bucket=b) for b in paper.BUCKETS}
            _line(axes, {x: draws.estimate() for x, draws in lbv2.items()}, "LongBench v2", "infllm")
            rows = source.means.used
            tokens = rows.loc[rows["task"] == "Retr.KV", "prompt_tokens"].mean()
            if not np.isnan(tokens):
                _line(axes, {float(tokens): source.task("original", "speedup", "Retr.KV").estimate()}, "Retr.KV", "cmr")
            _token_axis(axes)
            axes.set(title=model, xlabel="input length (tokens)")
            if axes.get_legend_handles_labels()[0]:
                axes.legend(frameon=False)
        figure.axes[0].set_ylabel("speedup over AR (×)")
        return figure


def figure3(probe: pd.DataFrame) -> Figure:
    """Order probe: mean accuracy over folds by separation, bands of one standard deviation; one dash a benchmark.

    probe: rows of order.csv (harness.diagnostics.order.probe with the input's benchmark).
    """
    probe = probe[probe["arm"].isin(["features", "embeddings"])].sort_values("low")
    bins = list(dict.fromkeys(zip(probe["low"], probe["high"], strict=True)))
    with styled():
        figure = Figure(figsize=(3.6, 2.8), layout="constrained")
        axes = figure.subplots()
        for line, (benchmark, of_set) in enumerate(probe.groupby("benchmark", sort=False)):
            for arm, color, marker in (("features", "#c00000", "o"), ("embeddings", "#444444", "s")):
                rows = of_set[of_set["arm"] == arm]
                right = (rows["accuracy"] * rows["pairs"]).groupby([rows["low"], rows["fold"]]).sum()
                folds = 100 * right / rows["pairs"].groupby([rows["low"], rows["fold"]]).sum()
                mean, spread = folds.groupby("low").mean(), folds.groupby("low").std(ddof=1)
                x = [place for place, (low, _) in enumerate(bins) if low in mean.index]
                dash: Any = ["-", (0, (4, 2)), (0, (1, 1))][line % 3]
                axes.plot(x, mean, color=color, linestyle=dash, marker=marker, label=f"{arm}, {benchmark}")
                axes.fill_between(x, mean - spread, mean + spread, color=color, alpha=0.15, linewidth=0)
        axes.axhline(50, color="#444444", linewidth=0.6, linestyle=(0, (1, 2)))
        axes.set_xticks(range(len(bins)), [f"{_tokens(low)}–{_tokens(high)}" for low, high in bins])
        axes.set(xlabel="separation (tokens)", ylabel="order accuracy (%)")
        axes.legend(frameon=False)
        return figure


def figure5(data: Data) -> Figure:
    """Speedup by input length."""
    return _by_length(data, "speedup", "speedup over AR (×)")


def figure6(data: Data) -> Figure:
    """Acceptance length by input length, on the requests of Figure 5."""
    return _by_length(data, "tau", "acceptance length τ")


def _by_length(data: Data, metric: str, label: str) -> Figure:
    """Top: LCA at its five lengths. Bottom: LBv2 by length group. One column a model."""
    with styled():
        figure = Figure(figsize=(7.2, 4.4), layout="constrained")
        grid = figure.subplots(2, len(paper.MAIN_MODELS))
        for column, model in enumerate(paper.MAIN_MODELS):
            source, buckets = data.of(model, "DFlash"), data.by_bucket(model)
            for place, (method, name) in enumerate(paper.METHODS.items()):
                shift = 0.4 * (place / (len(paper.METHODS) - 1) - 0.5)
                lca = [source.task(method, metric, f"LCA {length}").estimate() for length in paper.LCA_LENGTHS]
                lbv2 = [buckets.task(method, metric, "LBv2", bucket=bucket).estimate() for bucket in paper.BUCKETS]
                for axes, estimates in zip(grid[:, column], (lca, lbv2), strict=True):
                    draw_line(axes, [x + shift for x in range(len(estimates))], estimates, name, **look(method))
            grid[0, column].set_xticks(range(len(paper.LCA_LENGTHS)), paper.LCA_LENGTHS)
            grid[1, column].set_xticks(range(len(paper.BUCKETS)), paper.BUCKETS)
            grid[0, column].set_title(model)
            grid[1, column].set_xlabel("input length (tokens)")
            if model == "Llama-3.1-8B":  # its context ends at 128K
                for axes, ticks in zip(grid[:, column], (3, 4), strict=True):
                    axes.set_xlim(-0.5, ticks - 0.5)
            else:  # the 180K and 240K inputs are other examples, from LCA's huge-context split
                grid[0, column].axvline(2.5, color="#444444", linewidth=0.7, linestyle=(0, (1, 2)))
        grid[0, 0].set_ylabel(f"LCA: {label}")
        grid[1, 0].set_ylabel(f"LBv2: {label}")
        handles, labels = grid[0, -1].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=len(labels) or 1, frameon=False)
        return figure


def _line(axes: Axes, points: dict[float, Estimate] | dict[int, Estimate], label: str, style: str) -> None:
    known = {x: estimate for x, estimate in points.items() if not np.isnan(estimate.value)}
    if known:
        draw_line(axes, list(known), list(known.values()), label, **look(style))


def _token_axis(axes: Axes) -> None:
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda value, _: _tokens(value))


def _tokens(value: float) -> str:
    return f"{value / 1024:g}K" if value >= 1024 else f"{value:g}"


def make_figures(paths: Iterable[Path], numbers: Iterable[int] | None, out: Path) -> list[Path]:
    """Write the figures asked for, or every one whose input is there, as figureN.pdf and .png; return the files.

    Raises LoadError when a figure that was asked for has no input, or none has.
    """
    folders = list(paths)
    wanted = list(FIGURES if numbers is None else numbers)
    made: dict[int, Figure] = {}
    for number, (name, draw) in {1: (LATENCY, figure1), 3: (PROBE, figure3)}.items():
        files = [
            file for folder in folders for file in (folder / name, *sorted(folder.glob(f"*/{name}"))) if file.exists()
        ]
        if number in wanted and files:
            made[number] = draw(pd.concat([_read_csv(file) for file in files], ignore_index=True))
        elif number in wanted and numbers is not None:
            raise LoadError(f"figure {number} needs a {name} of fold-diagnose; give its folder")
    from_records = [number for number in wanted if number in (2, 5, 6)]
    if from_records and (numbers is not None or not made or any(_has_records(folder) for folder in folders)):
        data = Data(load([folder for folder in folders if _has_records(folder)] or folders))
        data.require_pairs()
        for number in from_records:
            figure = {2: figure2, 5: figure5, 6: figure6}[number](data)
            if _has_values(figure):
                made[number] = figure
            elif numbers is not None:
                raise LoadError(f"figure {number} would be empty: these runs hold nothing of what it shows")
    if not made:
        raise LoadError("no figure of the paper can be made from these runs")
    return [
        save(figure, out / f"figure{number}{suffix}")
        for number, figure in sorted(made.items())
        for suffix in (".pdf", ".png")
    ]


FIGURES = (1, 2, 3, 5, 6)


def _has_values(figure: Figure) -> bool:
    """Whether any line has a point: arms without a measured value are drawn too, for the legend."""
    bars = [bar for axes in figure.axes for bar in axes.containers if isinstance(bar, ErrorbarContainer)]
    return any(np.isfinite(np.asarray(bar.lines[0].get_ydata(), float)).any() for bar in bars)


def _has_records(folder: Path) -> bool:
    return any(folder.glob("records*.jsonl")) or any(folder.glob("*/records*.jsonl"))


def _read_csv(file: Path) -> pd.DataFrame:
    columns = {
        LATENCY: ["context", "step", "part", "ms"],
        PROBE: ["benchmark", "low", "high", "arm", "fold", "accuracy", "pairs"],
    }
    table = pd.read_csv(file)
    lacking = [name for name in columns[file.name] if name not in table]
    if lacking:
        raise LoadError(f"{file} lacks the columns {', '.join(lacking)}")
    return table


def main() -> int:
    """fold-figures."""
    return run_command("fold-figures", _main)


def _main(arguments: list[str]) -> int:
    parser = Parser("fold-figures", "The paper's figures from records, as PDF and PNG.")
    parser.add_argument("runs", nargs="+", type=Path, help="run directories, or folders of them")
    parser.add_argument(
        "--out", type=Path, default=Path("results/figures"), help="where to write (default: %(default)s)"
    )
    parser.add_argument(
        "--figures", type=parser.numbers(FIGURES), help="for example 5,6 (default: all that can be made)"
    )
    given = parser.parse_args(arguments)
    for file in make_figures(given.runs, given.figures, given.out):
        print(file)
    return 0
