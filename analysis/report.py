"""fold-report: one self-contained HTML page about a run, readable offline, on a desk and on a phone.

No script, no network: style and pictures are inside the file. The page says first who won where, then shows why
(acceptance by length and by position, time per round), then what should be doubted (agreement with AR, flags, what
was left out), then what was run on what.
"""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Callable, Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from analysis.command import Parser, run_command
from analysis.load import CELL, LoadError, Runs, load
from analysis.stats import Resampler
from analysis.style import GREYS, HATCHES, draw_line, look, styled
from analysis.summary import Row, Summary, summarise_runs
from analysis.tables import provenance_lines
from harness.records import AR

SHOWN_EXCLUSIONS = 50
REST = "unattributed"

CSS = """ :root{color-scheme:light dark;--ink:#1b1b1b;--soft:#606060;--line:#d8d8d8;--back:#fff;--best:#fbeaea}
@media(prefers-color-scheme:dark){:root{--ink:#e8e8e8;--soft:#a8a8a8;--line:#444;--back:#161616;--best:#3a2020}}
*{box-sizing:border-box}body{margin:0 auto;max-width:1080px;padding:1rem;font:16px/1.5
system-ui,sans-serif;color:var(--ink); background:var(--back)}h1{font-size:1.5rem;margin:.2rem
0}h3{font-size:1rem;margin:.6rem 0 .2rem}h2{font-size:1.15rem;margin:2rem 0 .5rem;border-bottom:1px solid
var(--line)}p,li{overflow-wrap:anywhere}.soft{color:var(--soft);font-size:.9rem}.verdict{font-size:1.1rem}.wide{overflow-x:auto}
table{border-collapse:collapse;font-size:.9rem;width:100%;font-variant-numeric:tabular-nums}th,td{padding:.25rem
.6rem; text-align:left;white-space:nowrap;border-bottom:1px solid var(--line)}td.n,th.n{text-align:right}tr.best
td{background:var(--best);
font-weight:600}.charts{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,430px),1fr));gap:.8rem}
@media(max-width:480px){table{font-size:.8rem}th,td{padding:.2rem .22rem}
.charts th,.charts td{white-space:normal}}.charts figure{max-width:560px}figure{margin:0}figure
img{width:100%;height:auto;background:#fff;border-radius:4px}figcaption{font-size:.85rem;color:var(--soft)}
pre{overflow-x:auto;font-size:.8rem;border:1px solid var(--line);padding:.6rem}.bad{color:#c00000;font-weight:600}
@media(prefers-color-scheme:dark){.bad{color:#ff8080}}
"""


def report(runs: Runs) -> str:
    """The page as HTML text. Raises LoadError when not a single request can be used."""
    summary = summarise_runs(runs)
    title = summary.title or "no usable request"
    body = [
        f"<h1>{escape(title)}</h1>",
        *_head(runs, summary),
        *_section("Ranking", _ranking(summary.rows)),
        *_section("By input length", _by_length(summary.rows)),
        *_section("Acceptance by position", _positions(runs)),
        *_section("Time per round", _round_time(runs)),
        *_section("Agreement with autoregressive decoding", _agreement(runs)),
        *_section("What to doubt", _doubts(runs, summary)),
        *_section("Provenance", _provenance(runs)),
    ]
    head = (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>fold-bench: {escape(title)}</title><style>{CSS}</style></head>"
    )
    return head + "<body>" + "\n".join(body) + "</body></html>\n"


def _section(title: str, content: list[str]) -> list[str]:
    return [f"<section><h2>{escape(title)}</h2>", *content, "</section>"] if content else []


def _head(runs: Runs, summary: Summary) -> list[str]:
    compared = {_group(row) for row in summary.rows if row.rank == 2}  # a group of AR alone compares nothing
    places = [row for row in summary.rows if row.rank == 1 and _group(row) in compared]
    wins = pd.Series([row.arm for row in places]).value_counts() if places else pd.Series(dtype=int)
    lines = [f"{arm} is fastest in {n} of {len(places)} groups" for arm, n in wins.items()]
    verdict = "; ".join(lines) + "." if lines else "Nothing can be compared: no request was completed by two arms."
    if AR in wins:
        verdict += " Where ar ranks first, speculative decoding does not pay."
    status = {str(run.get("status")) for run in runs.provenance.values() if run.get("status")}
    failed = f'<span class="bad">Failed or missing: {summary.failures}.</span> ' if summary.failures else ""
    state = f"Status: {escape(', '.join(sorted(status)))}. " if status else ""
    return [
        f'<p class="verdict">{escape(verdict)}</p>',
        f'<p class="soft">{failed}{state}{escape(summary.counts[0])}</p>',
    ]


def _group(row: Row) -> tuple[str, str, str, str]:
    """The arms of one pair, engine, benchmark and level are ranked against each other."""
    return row.pair, row.engine, row.benchmark, row.level


def _table(header: Sequence[tuple[str, bool]], rows: Iterable[tuple[Sequence[str], bool]]) -> list[str]:
    """Header cells as (text, is a number); rows as (cells, is the best)."""
    heads = "".join(f"<th{' class=n' if number else ''}>{escape(text)}</th>" for text, number in header)
    lines = ['<div class="wide"><table>', f"<thead><tr>{heads}</tr></thead><tbody>"]
    for cells, best in rows:
        tds = "".join(f"<td{' class=n' if n else ''}>{escape(c)}</td>" for c, (_, n) in zip(cells, header, strict=True))
        lines.append(f"<tr{' class=best' if best else ''}>{tds}</tr>")
    return [*lines, "</tbody></table></div>"]


def _ranking(rows: list[Row]) -> list[str]:
    """One table a benchmark and length, narrow enough that a phone shows the speedup without scrolling."""
    content = []
    header = [("#", True), ("method", False), ("speedup [95%]", False), ("tau", True), ("TPOT ms", True)]
    for group in dict.fromkeys((row.pair, row.engine, row.benchmark, row.level) for row in rows):
        mine = [row for row in rows if (row.pair, row.engine, row.benchmark, row.level) == group]
        cells = [row.cells() for row in mine]
        shown = [([place, arm, speedup, tau, tpot], place == "1") for _, _, place, arm, tau, tpot, speedup in cells]
        title = f"{group[2]}, {group[3]} (n = {mine[0].speedup.n})"
        content.append("".join([f"<div><h3>{escape(title)}</h3>", *_table(header, shown), "</div>"]))
    if not content:
        return []
    return [f'<div class="charts">{"".join(content)}</div>', f'<p class="soft">{escape(Summary.CAPTION)}</p>']


# --------------------------------------------------------------------------------------------------------------- charts


def _picture(draw: Callable[[Figure], None], size: tuple[float, float], alt: str) -> str:
    """A figure as inline SVG, its text as outlines so that it looks the same everywhere."""
    with styled():
        figure = Figure(figsize=size, layout="constrained")
        draw(figure)
        buffer = io.BytesIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    data = base64.b64encode(buffer.getvalue()).decode()
    image = f'<img alt="{escape(alt)}" src="data:image/svg+xml;base64,{data}">'
    return f"<figure>{image}<figcaption>{escape(alt)}</figcaption></figure>"


def _by_length(rows: list[Row]) -> list[str]:
    pictures = []
    for benchmark in dict.fromkeys((row.pair, row.engine, row.benchmark) for row in rows):
        here = [row for row in rows if (row.pair, row.engine, row.benchmark) == benchmark]
        for metric, label in (("speedup", "speedup over AR (×)"), ("tau", "acceptance length τ")):
            if metric == "tau" and all(row.arm == AR for row in here):
                continue

            def draw(figure: Figure, here: list[Row] = here, metric: str = metric, label: str = label) -> None:
                axes = figure.subplots()
                levels = list(dict.fromkeys(row.level for row in here))
                arms = [arm for arm in dict.fromkeys(row.arm for row in here) if metric == "speedup" or arm != AR]
                for place, arm in enumerate(arms):
                    mine = sorted((row for row in here if row.arm == arm), key=lambda row: levels.index(row.level))
                    shift = 0.3 * (place - (len(arms) - 1) / 2) / len(arms)
                    x = [levels.index(row.level) + shift for row in mine]
                    draw_line(axes, x, [getattr(row, metric) for row in mine], arm, **look(arm, place))
                axes.set_xticks(range(len(levels)), levels)
                axes.set(xlabel="input length (tokens)", ylabel=label)
                figure.legend(loc="outside lower center", ncols=4, frameon=False)

            pictures.append(_picture(draw, (3.9, 3.2), f"{benchmark[2]}: {label}, with 95% intervals"))
    return [f'<div class="charts">{"".join(pictures)}</div>'] if pictures else []


def positions(rows: pd.DataFrame) -> pd.DataFrame:
    """Acceptance by draft position: columns proposed, accepted (rounds); index 1..K.

    A position counts as proposed only up to where the output ended: in a round that a stop token or the limit cut
    short, the drafts beyond it were neither delivered nor refused. A round commits the accepted drafts and one token
    of the target.
    """
    commits = np.frombuffer(b"".join(rows["commits"]), np.uint8).astype(int)
    proposals = np.frombuffer(b"".join(rows["proposals"]), np.uint8).astype(int)
    cut = np.zeros(len(commits), bool)
    ends = np.cumsum(rows["rounds"].to_numpy()) - 1
    cut[ends[rows["tau_unclipped"].to_numpy() > rows["tau"].to_numpy()]] = True
    accepted = np.where(cut, commits, commits - 1)
    offered = np.where(cut, commits, proposals)
    k = np.arange(1, int(proposals.max(initial=0)) + 1)
    reached = (offered[None, :] >= k[:, None]).sum(axis=1)
    taken = (accepted[None, :] >= k[:, None]).sum(axis=1)
    return pd.DataFrame({"proposed": reached, "accepted": taken}, index=k)


def _positions(runs: Runs) -> list[str]:
    pictures = []
    for benchmark, rows in runs.used.groupby("benchmark", observed=True, sort=False):
        tables = {arm: positions(rows[rows["arm"] == arm]) for arm in runs.arms() if (rows["arm"] == arm).any()}
        tables = {arm: table for arm, table in tables.items() if len(table)}

        def draw(figure: Figure, tables: dict[str, pd.DataFrame] = tables) -> None:
            axes = figure.subplots()
            for place, (arm, table) in enumerate(tables.items()):
                share = 100 * table["accepted"] / table["proposed"].replace(0, np.nan)
                axes.plot(table.index, share, label=arm, **look(arm, place))
            axes.set_xticks(range(1, 1 + max(len(table) for table in tables.values())))
            axes.set(xlabel="position in the draft", ylabel="drafts accepted (%)", ylim=(0, 100))
            figure.legend(loc="outside lower center", ncols=4, frameon=False)

        if tables:
            alt = f"{benchmark}: share of rounds in which the draft is accepted up to this position"
            pictures.append(_picture(draw, (3.9, 3.0), alt))
    return [f'<div class="charts">{"".join(pictures)}</div>'] if pictures else []


def round_ms(rows: pd.DataFrame) -> dict[str, float]:
    """Mean milliseconds of a round by part, over all rounds; what the engine did not attribute is REST."""
    rounds = float(rows["rounds"].sum())
    total = float((rows["tpot_ms"] * rows["committed"]).sum()) / rounds
    parts: dict[str, float] = {}
    for seconds in rows["round_s"]:
        for part, value in seconds.items():
            parts[part] = parts.get(part, 0.0) + 1e3 * value / rounds
    rest = total - sum(parts.values())
    return {**parts, REST: max(rest, 0.0)} if rest > 0.005 * total or not parts else parts


def _round_time(runs: Runs) -> list[str]:
    if len(runs.used) == 0:
        return []
    times = {arm: round_ms(runs.used[runs.used["arm"] == arm]) for arm in runs.arms()}
    parts = sorted(dict.fromkeys(part for values in times.values() for part in values), key=lambda part: part == REST)

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        left = np.zeros(len(times))
        for place, part in enumerate(parts):
            width = np.array([values.get(part, 0.0) for values in times.values()])
            fill: dict[str, Any] = {"color": GREYS[place % 7], "hatch": HATCHES[place % 7], "edgecolor": "black"}
            axes.barh(range(len(times)), width, 0.7, left=left, label=part, linewidth=0.4, **fill)
            left += width
        axes.set_yticks(range(len(times)), [f"{arm} (a step)" if arm == AR else arm for arm in times])
        axes.invert_yaxis()
        axes.set_xlabel("ms per round")
        figure.legend(loc="outside lower center", ncols=4, frameon=False)

    header = [("method", False), *((part, True) for part in parts), ("together, ms", True)]
    rows = [
        ([arm, *(f"{values.get(part, 0.0):.2f}" for part in parts), f"{sum(values.values()):.2f}"], False)
        for arm, values in times.items()
    ]
    alt = "Mean time of a verification round by part, over all counted requests"
    return [_picture(draw, (7.0, 0.8 + 0.32 * len(times)), alt), *_table(header, rows)]


# --------------------------------------------------------------------------------------------------- doubts, provenance


def _agreement(runs: Runs) -> list[str]:
    arms = [arm for arm in runs.arms() if arm != AR]
    if not arms:
        return []
    used = runs.used
    requests = list(zip(*(used[name].astype(str) for name in (*CELL, "request")), strict=True))
    odd = {request for request, same in zip(requests, used["same"], strict=True) if not same}
    common = used[[request not in odd for request in requests]]
    whole, part = Resampler(used, CELL, ["speedup"]), Resampler(common, CELL, ["speedup"])
    judged = pd.DataFrame([line for line in runs.agreement if not line["equal"]], columns=["arm", "max_gap", "passed"])
    rows = []
    for arm in arms:
        mine, said = used[used["arm"] == arm], judged[judged["arm"] == arm]
        gap = f"{said['max_gap'].max():.3g}" if said["max_gap"].notna().any() else "–"
        refused = int((~said["passed"].astype(bool)).sum())
        speed = [means.mean(arm, "speedup", means.strata()).estimate().text(2, "×") for means in (whole, part)]
        rows.append(([arm, f"{int(mine['same'].sum())} of {len(mine)}", gap, str(refused), *speed], False))
    header = [("method", False), ("identical", True), ("largest logit gap", True), ("not confirmed", True)]
    n = len(used.drop_duplicates([*CELL, "request"]))
    counted = len(common.drop_duplicates([*CELL, "request"]))
    header += [(f"speedup, all {n}", False), (f"speedup, common set {counted}", False)]
    note = (
        "Where an output differs, the target is asked: each delivered token must be its best or nearly tied with it. "
        "Not confirmed: outputs with a larger gap. The common set leaves out every request that differs in any arm. "
        "Both speedups are over all requests together, whatever their benchmark."
    )
    return [*_table(header, rows), f'<p class="soft">{escape(note)}</p>']


def _doubts(runs: Runs, summary: Summary) -> list[str]:
    lines = [f"<li>{escape(line)}</li>" for line in [*summary.counts, *summary.notes]]
    means = Resampler(runs.used, CELL)
    for arm in [arm for arm in runs.arms() if arm != AR]:
        keys = means.strata()
        mean, other = means.mean(arm, "speedup", keys).estimate(), means.speedup_of_means(arm, keys).estimate()
        if not np.isnan(other.value):
            pooled = means.pooled_tau(arm, keys).estimate()
            text = (
                f"{arm}, all requests: mean of ratios {mean.text(2, '×')}, ratio of mean TPOTs {other.text(2, '×')}, "
            )
            lines.append(f"<li>{escape(text + f'pooled τ (tokens over rounds) {pooled.text(2)}')}.</li>")
    shown = runs.excluded.head(SHOWN_EXCLUSIONS)
    content = [f"<ul>{''.join(lines)}</ul>"]
    if len(shown):
        fields = ("benchmark", "level", "request", "arm", "reason")
        rows = [([str(row[name]) for name in fields], False) for row in shown.to_dict("records")]
        header = [(name, False) for name in ("benchmark", "length", "request", "first seen in", "reason")]
        rest = len(runs.excluded) - len(shown)
        more = f" (the first {SHOWN_EXCLUSIONS}; {rest} more)" if rest else ""
        content += [f"<p>Left out of every arm{more}:</p>", *_table(header, rows)]
    return content


def _provenance(runs: Runs) -> list[str]:
    content = [f"<p>{escape(line)}</p>" for line in provenance_lines(runs)]
    for name, run in runs.provenance.items():
        if run:
            text = json.dumps(run, indent=1, ensure_ascii=False)
            content.append(f"<details><summary>run.json of {escape(name)}</summary><pre>{escape(text)}</pre></details>")
    return content


def main() -> int:
    """fold-report."""
    return run_command("fold-report", _main)


def _main(arguments: list[str]) -> int:
    parser = Parser("fold-report", "One HTML page about a run: ranking, acceptance, times, agreement, provenance.")
    parser.add_argument("runs", nargs="+", type=Path, help="run directories, or folders of them")
    parser.add_argument("--out", type=Path, help="the file to write (default: report.html in the first run directory)")
    given = parser.parse_args(arguments)
    page = report(load(given.runs))
    out = given.out or given.runs[0] / "report.html"
    if out.is_dir():
        raise LoadError(f"{out} is a folder; give a file name")
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(page, encoding="utf-8")
    print(out)
    return 0
