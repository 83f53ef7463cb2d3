"""How figures look and how they are saved: one place, so that every panel of every figure agrees.

Lines differ by colour, dash and marker, so that they can be told apart in grey. Fonts are embedded as TrueType (Type
42): publishers refuse matplotlib's default Type 3. Files carry no date, so that a rerun gives the same bytes.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, cast

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

STYLE: dict[str, Any] = {
    "pdf.fonttype": 42,
    "ps.fonttype": 42,
    "font.family": "DejaVu Sans",
    "font.size": 8,
    "axes.titlesize": 8,
    "axes.labelsize": 8,
    "legend.fontsize": 7,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.5,
    "lines.linewidth": 1.1,
    "lines.markersize": 3.8,
    "savefig.dpi": 200,
    # Outlines in SVG, and ids that do not change from run to run.
    "svg.fonttype": "path",
    "svg.hashsalt": "fold-bench",
    # A method's name is text, never mathematics: "a_b$" must print as it is.
    "text.parse_math": False,
}

# Colour, dash, marker: dark and solid for FOLD, and no two neighbours of the same lightness.
LOOKS: dict[str, tuple[str, Any, str]] = {
    "ar": ("#444444", (0, (1, 1)), ""),
    "original": ("#999999", (0, (4, 2)), "s"),
    "streamingllm": ("#56b4e9", (0, (3, 1, 1, 1)), "v"),
    "yarn": ("#cc79a7", (0, (5, 1)), "^"),
    "cmr": ("#e69f00", (0, (1, 1)), "D"),
    "rerope": ("#009e73", (0, (6, 1.5, 1.5, 1.5)), "P"),
    "infllm": ("#0072b2", (0, (2, 1)), "X"),
    "window": ("#7f5f3f", (0, (3, 2)), "<"),
    "engine_window": ("#b0a000", (0, (2, 3)), ">"),
    "fold": ("#c00000", "-", "o"),
}
_SPARE = [
    ("#5b3a8e", (0, (4, 1)), "h"),
    ("#2f4f4f", (0, (2, 2)), "p"),
    ("#8b4513", (0, (1, 2)), "*"),
    ("#000000", "-", "d"),
    ("#1f8a70", (0, (6, 2)), "H"),
    ("#b03060", (0, (3, 1, 1, 1, 1, 1)), "8"),
]

# Fills of stacked bars.
HATCHES = ["", "///", "...", "xxx", "\\\\\\", "++", "oo"]
GREYS = ["#404040", "#8c8c8c", "#bdbdbd", "#d9d9d9", "#f2f2f2", "#666666", "#a6a6a6"]


def styled() -> AbstractContextManager[None]:
    """Within it, figures are built and saved in this style."""
    return matplotlib.rc_context(cast("Any", STYLE))


def look(arm: str, place: int = 0) -> dict[str, Any]:
    """Line settings of an arm; an arm the paper does not have gets a spare look by its place."""
    color, dash, marker = LOOKS.get(arm) or _SPARE[place % len(_SPARE)]
    return {"color": color, "linestyle": dash, "marker": marker or None}


def draw_line(axes: Axes, x: list[float], estimates: list[Any], label: str, **settings: Any) -> None:
    """One arm's estimates over x, with their intervals; missing values leave a gap."""
    y = [estimate.value for estimate in estimates]
    below = [estimate.value - estimate.low if estimate.has_interval else 0.0 for estimate in estimates]
    above = [estimate.high - estimate.value if estimate.has_interval else 0.0 for estimate in estimates]
    axes.errorbar(x, y, yerr=[below, above], label=label, capsize=1.5, elinewidth=0.6, **settings)


def save(figure: Figure, path: Path) -> Path:
    """Write `figure` to `path` (.pdf or .png) without a date or a version, so that the bytes depend on the data
    alone.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    metadata: dict[str, Any] = {"Software": None}
    if path.suffix == ".pdf":
        metadata = {"CreationDate": None, "Creator": None, "Producer": None}
    with styled():
        figure.savefig(path, metadata=metadata)
    return path
