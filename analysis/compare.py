"""fold-compare: our tables beside the paper's, cell by cell.

A published number is called inside when it lies in our 95% interval, give or take half of its last printed digit, and
outside otherwise; where we have no interval (one request, a constant) it must agree to the printed digit. An interval
of ours covers the choice of requests only: a difference in device, engine version or drafter revision shows as outside.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from analysis import paper
from analysis.command import Parser, run_command
from analysis.load import Runs, load
from analysis.stats import Estimate
from analysis.tables import FORMATS, TABLES, Sheet, footer_lines, make_tables

INSIDE, OUTSIDE, MISSING = "inside", "outside", "not measured"


@dataclass
class Comparison:
    """cells: KEYS, ours (as printed, with its interval), paper (as printed), verdict, ratio (ours / paper's, NaN for
    text)."""

    cells: pd.DataFrame
    notes: list[str]

    def summary(self) -> list[str]:
        """One line a table: cells measured, inside, and how far the ratios reach."""
        lines = []
        for table, cells in self.cells.groupby("table", sort=False):
            measured = cells[cells["verdict"] != MISSING]
            inside = int((measured["verdict"] == INSIDE).sum())
            ratios = measured["ratio"].dropna()
            reach = (
                f"; ratio {ratios.median():.3f} (from {ratios.min():.3f} to {ratios.max():.3f})" if len(ratios) else ""
            )
            lines.append(f"Table {table}: {len(measured)} of {len(cells)} cells measured, {inside} inside{reach}.")
        return lines

    def markdown(self) -> str:
        """Measured cells as a Markdown table under the summary."""
        lines = ["**Ours against the paper's published numbers**", "", *(f"- {line}" for line in self.summary()), ""]
        lines += [
            "| table | group | row | column | metric | ours | paper's | | ratio |",
            "|---|---|---|---|---|---|---|---|---|",
        ]
        for cell in self.cells[self.cells["verdict"] != MISSING].to_dict("records"):
            ratio = "" if np.isnan(cell["ratio"]) else f"{cell['ratio']:.3f}"
            shown = [*(str(cell[key]) for key in paper.KEYS), cell["ours"], cell["paper"], cell["verdict"], ratio]
            lines.append(f"| {' | '.join(shown)} |")
        return "\n".join([*lines, "", *self.notes, ""])


def compare(runs: Runs, numbers: Iterable[int] | None = None) -> Comparison:
    """Compare the tables asked for (default: all with a measured cell). Raises LoadError as make_tables does."""
    rows = [row for sheet in make_tables(runs, numbers) for row in _cells(sheet)]
    columns = [*paper.KEYS, "ours", "paper", "verdict", "ratio"]
    notes = ["The column paper holds the paper's published numbers; everything else was measured in these runs."]
    return Comparison(pd.DataFrame(rows, columns=columns), [*notes, *footer_lines(runs)])


def _cells(sheet: Sheet) -> list[list[object]]:
    rows: list[list[object]] = []
    for cell in paper.published(sheet.number).to_dict("records"):
        key = (cell["group"], cell["row"], cell["column"], cell["metric"])
        ours = sheet.cells.get(key)
        verdict, ratio = _verdict(ours, cell["metric"], cell["printed"], cell["value"])
        shown = "–" if ours is None else sheet.printed(key, intervals=True)
        rows.append([sheet.number, *key, shown, cell["printed"] + cell["mark"], verdict, ratio])
    return rows


def _verdict(ours: Estimate | str | None, metric: str, printed: str, value: float) -> tuple[str, float]:
    if isinstance(ours, str):
        return (INSIDE if ours == printed else OUTSIDE), np.nan
    if ours is None or np.isnan(ours.value):
        return MISSING, np.nan
    ratio = ours.value / value if value else np.nan
    # The printed number stands for all that round to it.
    half = 0.5 * 10.0 ** -FORMATS[metric][0] + 1e-9
    if ours.has_interval:
        return (INSIDE if ours.low - half <= value <= ours.high + half else OUTSIDE), ratio
    return (INSIDE if abs(ours.value - value) <= half else OUTSIDE), ratio


def main() -> int:
    """fold-compare."""
    return run_command("fold-compare", _main)


def _main(arguments: list[str]) -> int:
    parser = Parser("fold-compare", "Our numbers against the paper's, cell by cell.")
    parser.add_argument("runs", nargs="+", type=Path, help="run directories, or folders of them")
    parser.add_argument(
        "--out", type=Path, default=Path("results/compare"), help="where to write (default: %(default)s)"
    )
    parser.add_argument(
        "--tables", type=parser.numbers(TABLES), help="for example 2,4 (default: all with a measured cell)"
    )
    given = parser.parse_args(arguments)
    comparison = compare(load(given.runs), given.tables)
    given.out.mkdir(parents=True, exist_ok=True)
    (given.out / "compare.md").write_text(comparison.markdown(), encoding="utf-8")
    comparison.cells.to_csv(given.out / "compare.csv", index=False)
    print("\n".join([*comparison.summary(), f"Every cell: {given.out / 'compare.md'}"]))
    return 0
