"""fold-tables: the paper's tables from records, as Markdown, CSV and LaTeX.

A table is data (Sheet): rows and columns that name cells by the keys of results/paper, and the cells. One function a
table computes its cells, one renderer a format prints any of them. Cells that the records do not give are printed as
a dash.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Any, cast

import numpy as np
import pandas as pd
from omegaconf import OmegaConf

from analysis import paper
from analysis.command import Parser, run_command
from analysis.load import CELL, LoadError, Runs, length_bucket, load
from analysis.stats import MISSING, Draws, Estimate, Resampler, average, difference, ratio
from analysis.summary import count_lines, unusable_lines

Key = tuple[str, str, str, str]  # group, row, column, metric
Selector = dict[str, str]

# Decimals, unit and sign of each metric as the paper prints it.
FORMATS: dict[str, tuple[int, str, bool]] = {
    "tau": (2, "", False),
    "speedup": (2, "×", False),
    "tau change": (2, "", True),
    "tau ratio": (3, "", False),
    "n": (0, "", False),
    "differs from AR": (0, "", False),
}
HEADS = {"tau": "τ", "speedup": "Spd.", "n": "n", "differs from AR": "Diff. (AR)"}


@dataclass
class Sheet:
    """One table. rows: (section, label, selector); columns: (top, sub, selector); the two selectors name a cell.

    cells: estimates, or text where a table holds names. marks: cells with a dagger. best: how many ranks a column marks
    (2: bold and italics, 1: bold). intervals: always printed where True, else on request.
    """

    number: int
    caption: str
    rows: list[tuple[str, str, Selector]]
    columns: list[tuple[str, str, Selector]]
    cells: dict[Key, Estimate | str]
    marks: set[Key] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)
    best: int = 0
    intervals: bool = False

    def key(self, row: Selector, column: Selector) -> Key:
        """The key of the cell where a row and a column meet."""
        both = {"group": "", "row": "", "column": "", "metric": "", **row, **column}
        return both["group"], both["row"], both["column"], both["metric"]

    def known(self) -> int:
        """Cells that have a value."""
        return sum(isinstance(cell, str) or not np.isnan(cell.value) for cell in self.cells.values())

    def printed(self, key: Key, intervals: bool) -> str:
        """A cell as text: "3.40×", with the interval if asked for or if the table always shows it."""
        cell = self.cells.get(key)
        if cell is None or (isinstance(cell, Estimate) and np.isnan(cell.value)):
            return "–"
        if isinstance(cell, str):
            return cell
        digits, unit, sign = FORMATS[key[3]]
        if not (intervals or self.intervals):
            cell = Estimate(cell.value, np.nan, np.nan, 0)
        number, _, interval = cell.text(digits, unit, sign).partition(" ")
        return " ".join(part for part in (number + "†" * (key in self.marks), interval) if part)

    def ranks(self) -> dict[Key, int]:
        """1 for the best cell of a column within its group, 2 for the second; printed ties share a rank."""
        found: dict[Key, int] = {}
        if not self.best:
            return found
        for section in dict.fromkeys(section for section, _, _ in self.rows):
            for _, _, column in self.columns:
                if column.get("metric") not in ("tau", "speedup"):
                    continue
                keys = [self.key(row, column) for name, _, row in self.rows if name == section]
                values = {key: float(text.rstrip("×")) for key in keys if (text := self._plain(key)) != "–"}
                levels = sorted(set(values.values()), reverse=True)[: self.best]
                if len(values) > 1:
                    found |= {key: levels.index(value) + 1 for key, value in values.items() if value in levels}
        return found

    def _plain(self, key: Key) -> str:
        cell = self.cells.get(key)
        return (
            "–" if not isinstance(cell, Estimate) else Estimate(cell.value, np.nan, np.nan, 0).text(FORMATS[key[3]][0])
        )


# -------------------------------------------------------------------------------------------------------------- records


class Data:
    """Records in the paper's terms: rows of its pairs only, tasks under the names of Table 7, one engine a pair."""

    def __init__(self, runs: Runs) -> None:
        self.runs = runs
        names = {paper.task_key(task): task for task in paper.TASKS}
        used = runs.used.copy()
        known = {task: names.get(paper.task_key(task), task) for task in used["task"].unique()}
        # Plain objects, as in analysis.load.
        used["task"] = pd.Series([known[task] for task in used["task"]], used.index, object)
        used["bucket"] = pd.Series([length_bucket(tokens) for tokens in used["prompt_tokens"]], used.index, object)
        self.used = used
        self._sources: dict[str, Source] = {}

    def models(self) -> list[str]:
        """The paper's targets that these records hold, in the paper's order."""
        here = {paper.PAIRS[pair].model for pair in self.used["pair"].unique() if pair in paper.PAIRS}
        return [model for model in paper.WINDOW if model in here]

    def require_pairs(self) -> None:
        """Raises LoadError, which says what these runs hold instead, when no usable request is of a paper's pair."""
        if not len(self.used):
            raise LoadError(f"no request was completed by every arm; {count_lines(self.runs)[0]}")
        if not self.models():
            pairs = ", ".join(sorted(set(self.used["pair"].astype(str))))
            raise LoadError(
                f"these runs hold {pairs}, none of the paper's pairs ({', '.join(paper.PAIRS)}); see fold-report"
            )

    def rows(self, model: str, drafter: str, sglang: bool = False) -> pd.DataFrame:
        """Rows of one pair in one engine: SGLang if asked for, else vLLM or the only other one. Raises LoadError."""
        pairs = [name for name, pair in paper.PAIRS.items() if pair == paper.Pair(model, drafter)]
        rows = self.used[self.used["pair"].isin(pairs)]
        engines = sorted(rows["engine"].unique())
        wanted = [e for e in engines if (e == "sglang") == sglang]
        if "vllm" in wanted:
            wanted = ["vllm"]
        if len(wanted) > 1:
            raise LoadError(f"{model} was run in {' and '.join(wanted)}; give the runs of one engine")
        return rows[rows["engine"].isin(wanted)]

    def source(self, name: str, rows: Callable[[], pd.DataFrame], by: Sequence[str] = ("task",)) -> Source:
        """Means over `rows`, with `by` as strata; kept under `name`, so that several tables draw them once."""
        if name not in self._sources:
            self._sources[name] = Source(Resampler(rows(), by))
        return self._sources[name]

    def of(self, model: str, drafter: str, sglang: bool = False) -> Source:
        """All requests of a pair, resampled within tasks."""
        return self.source(f"{model}/{drafter}/{sglang}", lambda: self.rows(model, drafter, sglang))

    def by_bucket(self, model: str) -> Source:
        """All requests of a DFlash pair, resampled within tasks and length buckets (Table 11)."""
        return self.source(f"buckets {model}", partial(self.rows, model, "DFlash"), ("task", "bucket"))


class Source:
    """Means of one pair's arms by task."""

    def __init__(self, means: Resampler) -> None:
        self.means = means
        self._arms: dict[str, list[str]] = {}
        for method, arm, config in means.used[["method", "arm", "config"]].drop_duplicates().itertuples(index=False):
            if json.loads(config).get("alpha", 2) == 2 and "#" not in arm:
                self._arms.setdefault(method, []).append(arm)

    def arm(self, method: str) -> str | None:
        """The arm that a method's row shows: FOLD with the paper's α of 2. Raises LoadError when several would do."""
        arms = self._arms.get(method, [])
        if len(arms) > 1:
            raise LoadError(f"{method} was run with several settings ({', '.join(arms)}); give the runs of one of them")
        return arms[0] if arms else None

    def task(self, method: str, metric: str, *tasks: str, **where: str) -> Draws:
        """Mean over all requests of `tasks` together; missing unless every one of them is there."""
        arm = self.arm(method)
        keys = [self.means.strata(task=task, **where) for task in tasks]
        if arm is None or not all(keys):
            return MISSING
        return self.means.mean(arm, metric, [key for found in keys for key in found])

    def column(self, method: str, metric: str, column: str) -> Draws:
        """A column of Table 2: the mean over its requests, or over its tasks where they weigh equally (En.)."""
        tasks = paper.COLUMNS[column]
        if column in paper.EQUAL_WEIGHT:
            return average([self.task(method, metric, task) for task in tasks])
        return self.task(method, metric, *tasks)


# --------------------------------------------------------------------------------------------------------------- tables


def _method_rows(methods: dict[str, str], drafter: str, **group: str) -> list[tuple[str, str, Selector]]:
    section = group.get("group", "")
    rows = []
    for name in methods.values():
        name = drafter if name == "DFlash" else name
        rows.append((section, "FOLD (ours)" if name == "FOLD" else name, {**group, "row": name}))
    return rows


def _metric_columns(columns: Iterable[str]) -> list[tuple[str, str, Selector]]:
    return [(c, HEADS[m], {"column": c, "metric": m}) for c in columns for m in ("tau", "speedup")]


def table2(data: Data) -> Sheet:
    """Main results with DFlash drafters."""
    cells: dict[Key, Estimate | str] = {}
    for model in paper.MAIN_MODELS:
        source = data.of(model, "DFlash")
        for method, name in paper.METHODS.items():
            for metric in ("tau", "speedup"):
                parts = {column: source.column(method, metric, column) for column in paper.COLUMNS}
                for column, draws in {**parts, "Avg.": average(list(parts.values()))}.items():
                    cells[model, name, column, metric] = draws.estimate()
    rows = [row for model in paper.MAIN_MODELS for row in _method_rows(paper.METHODS, "DFlash", group=model)]
    caption = "Main results with DFlash drafters: acceptance length τ and speedup over AR decoding."
    return Sheet(2, caption, rows, _metric_columns([*paper.COLUMNS, "Avg."]), cells, best=2)


def _long_inputs(data: Data, model: str) -> pd.DataFrame:
    rows = data.rows(model, "DSpark")
    return rows[rows["prompt_tokens"] >= 16384]


def table3(data: Data) -> Sheet:
    """DSpark drafters; the general tasks count inputs of at least 16K tokens only."""
    cells: dict[Key, Estimate | str] = {}
    places = [
        ("Qwen3-8B", "General", ["Gov", "LBv2"]),
        ("Gemma-4-12B", "General", paper.GENERAL),
        ("Gemma-4-12B", "Code", paper.CODE),
    ]
    for model, group, members in places:
        source = (
            data.source(f"long {model}", partial(_long_inputs, data, model))
            if group == "General"
            else data.of(model, "DSpark")
        )
        for method, name in paper.METHODS.items():
            for metric in ("tau", "speedup"):
                parts = [source.column(method, metric, column) for column in members]
                cells[model, "DSpark" if name == "DFlash" else name, group, metric] = average(parts).estimate()
    columns = [
        (f"{model} {group}", HEADS[m], {"group": model, "column": group, "metric": m})
        for model, group, _ in places
        for m in ("tau", "speedup")
    ]
    caption = (
        "Results with DSpark drafters: acceptance length τ and speedup over AR decoding. General counts inputs of at "
        "least 16K tokens and, for Qwen3-8B, Gov and LBv2 only."
    )
    return Sheet(3, caption, _method_rows(paper.METHODS, "DSpark"), columns, cells, best=2)


CHANGES = {"DFlash → Window": ("window", "original"), "Window → FOLD": ("fold", "window")}


def table4(data: Data) -> Sheet:
    """Window minus DFlash and FOLD minus Window on LCA."""
    cells: dict[Key, Estimate | str] = {}
    lengths = paper.LCA_LENGTHS[:3]
    for model in paper.MAIN_MODELS:
        source = data.of(model, "DFlash")
        for change, (after, before) in CHANGES.items():
            for length in lengths:
                parts = [source.task(method, "tau", f"LCA {length}") for method in (after, before)]
                cells[model, change, length, "tau change"] = difference(*parts).estimate()
    columns = [
        (change, length, {"row": change, "column": length, "metric": "tau change"})
        for change in CHANGES
        for length in lengths
    ]
    rows = [("", model, {"group": model}) for model in paper.MAIN_MODELS]
    return Sheet(4, "Decomposition of the difference in τ between FOLD and DFlash on LCA.", rows, columns, cells)


def table5(data: Data) -> Sheet:
    """Effect of α on requests longer than the window."""
    sheet = _alpha_sheet(data, 5, ["General", "Code"], with_n=False)
    sheet.rows = [row for row in sheet.rows if row[2] != {"group": "Qwen3-8B", "row": "Code"}]
    return sheet


def table12(data: Data) -> Sheet:
    """Table 5's general tasks in two parts, and SPEED-Bench."""
    sheet = _alpha_sheet(data, 12, ["Natural", "SPEED", "QA/MC/Dia"], with_n=True)
    sheet.rows = [row for row in sheet.rows if row[2] != {"group": "Qwen3-8B", "row": "QA/MC/Dia"}]
    return sheet


def _alpha_sheet(data: Data, number: int, groups: list[str], with_n: bool) -> Sheet:
    cells: dict[Key, Estimate | str] = {}
    marks: set[Key] = set()
    models = ["Llama-3.1-8B", "Qwen3-8B", "Qwen3.5-9B", "Gemma-4-12B"]
    for model in models:
        means = _alpha_means(data, model)
        for group in groups:
            keys = _alpha_strata(means, model, group)
            tau = means.mean("2", "tau", keys)
            cells[model, group, "α=2", "tau"] = tau.estimate()
            cells[model, group, "n", "n"] = Estimate(float(tau.n) if tau.n else np.nan, np.nan, np.nan, tau.n)
            for high, low in (("2", "1"), ("4", "2")):
                key = (model, group, f"α={high} vs. {low}", "tau ratio")
                # Without the lower setting there is no ratio, whatever stands in its column.
                known = means.mean(low, "tau", keys).n > 0
                mean = (means.mean(high, f"over {low}", keys) if known else MISSING).estimate()
                pooled = ratio(means.pooled_tau(high, keys), means.pooled_tau(low, keys)).estimate()
                cells[key] = mean
                if _conclusion(mean) != _conclusion(pooled):
                    marks.add(key)
    columns = [("", "n", {"column": "n", "metric": "n"})] if with_n else []
    columns += [("", "τ (α=2)", {"column": "α=2", "metric": "tau"})]
    columns += [("", c, {"column": c, "metric": "tau ratio"}) for c in ("α=2 vs. 1", "α=4 vs. 2")]
    rows = [(model, group, {"group": model, "row": group}) for model in models for group in groups]
    caption = "Effect of the concentration factor α on requests longer than the window: mean per-request ratios of τ."
    dagger = (
        "†: the ratio of the overall τ of all requests (total tokens over total rounds) leads to another conclusion."
    )
    sheet = Sheet(number, caption, rows, columns, cells, marks, [dagger] if marks else [])
    sheet.intervals = True
    return sheet


def _conclusion(estimate: Estimate) -> int:
    """1 for a ratio above 1, -1 below, 0 when its interval holds 1 or there is none."""
    return int(estimate.low > 1) - int(estimate.high < 1)


def _alpha_means(data: Data, model: str) -> Resampler:
    """FOLD's arms of a pair named by α, each request with the ratio of its τ to that of the other settings."""
    rows = data.rows(model, "DFlash")
    rows = rows[(rows["method"] == "fold") & (rows["prompt_tokens"] > paper.WINDOW[model])]
    rows = rows[~rows["arm"].str.contains("#", regex=False).astype(bool)].copy()
    alphas = {text: f"{json.loads(text).get('alpha', 2):g}" for text in rows["config"].unique()}
    rows["arm"] = pd.Series([alphas[text] for text in rows["config"]], rows.index, object)
    identity = ["benchmark", "task", "request"]
    twice = rows.loc[rows.duplicated([*identity, "arm"]), "arm"]
    if len(twice):
        raise LoadError(
            f"fold was run on {model} with several settings of alpha={twice.iloc[0]}; give the runs of one of them"
        )
    for low in ("1", "2"):
        base = rows.loc[rows["arm"] == low, [*identity, "tau"]].rename(columns={"tau": "base"})
        rows = rows.merge(base, on=identity, how="left")
        # Rows that have no counterpart are never asked for: the other arm is missing for their whole task.
        rows[f"over {low}"] = (rows["tau"] / rows.pop("base")).fillna(1.0)
    return Resampler(rows, ["task"], ["tau", "committed", "rounds", "over 1", "over 2"])


def _alpha_strata(means: Resampler, model: str, group: str) -> list[tuple[str, ...]]:
    """Strata of a task group, none unless all of its tasks are there. Short SPEED tiers may lie within the window."""
    tasks = paper.ALPHA_GROUPS[group]
    if model == "Qwen3-8B":  # "General covers only Gov and LBv2"; inputs are limited to 32K
        tasks = [task for task in tasks if task in ("Gov", "LBv2") or task.startswith("SPEED")]
    keys = [means.strata(task=task) for task in tasks]
    optional = [task in ("SPEED 1K", "SPEED 2K") or (model == "Qwen3-8B" and task == "SPEED 32K") for task in tasks]
    whole = all(found or may_lack for found, may_lack in zip(keys, optional, strict=True))
    return [key for found in keys for key in found] if whole else []


def table8(data: Data) -> Sheet:
    """SPEED-Bench by tier."""
    tiers = paper.SPEED_TIERS[2:]
    cells: dict[Key, Estimate | str] = {
        (model, name, tier, metric): data.of(model, "DFlash").task(method, metric, f"SPEED {tier}").estimate()
        for model in paper.MAIN_MODELS
        for method, name in paper.METHODS.items()
        for tier in tiers
        for metric in ("tau", "speedup")
    }
    rows = [row for model in paper.MAIN_MODELS for row in _method_rows(paper.METHODS, "DFlash", group=model)]
    caption = "Results on SPEED-Bench: acceptance length τ and speedup over AR decoding."
    return Sheet(8, caption, rows, _metric_columns(tiers), cells, best=2)


def table9(data: Data) -> Sheet:
    """Qwen3-8B with DFlash."""
    source = data.of("Qwen3-8B", "DFlash")
    cells: dict[Key, Estimate | str] = {
        ("Qwen3-8B", name, column, metric): source.column(method, metric, column).estimate()
        for method, name in paper.METHODS.items()
        for column in ("Gov", "LBv2")
        for metric in ("tau", "speedup")
    }
    rows = _method_rows(paper.METHODS, "DFlash", group="Qwen3-8B")
    caption = "Results for Qwen3-8B with its DFlash drafter: acceptance length τ and speedup over AR decoding."
    return Sheet(9, caption, rows, _metric_columns(["Gov", "LBv2"]), cells, best=2)


def table10(data: Data) -> Sheet:
    """Llama-3.1-8B in SGLang, over all requests and over those whose outputs equal AR's in every method shown."""
    model = "Llama-3.1-8B"
    rows = data.rows(model, "DFlash", sglang=True)
    rows = rows[rows["task"].isin(paper.SEVEN_GENERAL_TASKS)]
    of_all = Source(Resampler(rows, ["task"]))
    # What another arm in the records does must not shrink the common set.
    rows = rows[rows["arm"].isin([of_all.arm(method) for method in paper.SGLANG_METHODS])]
    identity = pd.MultiIndex.from_arrays([rows["benchmark"].astype(object), rows["task"], rows["request"]])
    differing = identity[(~rows["same"]).to_numpy()].unique()
    common = rows[~identity.isin(differing)]
    counts = {"All requests": identity.nunique(), "Common set": identity.nunique() - len(differing)}
    cells: dict[Key, Estimate | str] = {}
    for column, source in (("All requests", of_all), ("Common set", Source(Resampler(common, ["task"])))):
        for method, name in paper.SGLANG_METHODS.items():
            for metric in ("tau", "speedup"):
                parts = [source.task(method, metric, task) for task in paper.SEVEN_GENERAL_TASKS]
                cells[model, name, column, metric] = average(parts).estimate()
            arm = source.arm(method)
            if column == "All requests" and arm is not None:
                differ = int((~rows.loc[rows["arm"] == arm, "same"]).sum())
                cells[model, name, column, "differs from AR"] = Estimate(float(differ), np.nan, np.nan, 0)
    columns = [
        (f"{column} ({counts[column]:,})" if counts[column] else column, HEADS[m], {"column": column, "metric": m})
        for column, metrics in (
            ("All requests", ["tau", "speedup", "differs from AR"]),
            ("Common set", ["tau", "speedup"]),
        )
        for m in metrics
    ]
    caption = "Llama-3.1-8B in SGLang: averages over the seven general tasks with equal weight."
    return Sheet(10, caption, _method_rows(paper.SGLANG_METHODS, "DFlash", group=model), columns, cells, best=1)


def table11(data: Data) -> Sheet:
    """The decomposition of Table 4 on LBv2 by input length."""
    cells: dict[Key, Estimate | str] = {}
    rows: list[tuple[str, str, Selector]] = []
    for model in ("Llama-3.1-8B", "Qwen3-8B", "Qwen3.5-9B", "Gemma-4-12B"):
        source = data.by_bucket(model)
        for bucket in paper.BUCKETS:
            tau = {
                method: source.task(method, "tau", "LBv2", bucket=bucket) for method in ("original", "window", "fold")
            }
            if tau["original"].n == 0 and len(source.means.used):
                continue
            rows.append((model, bucket, {"group": model, "row": bucket}))
            n = tau["original"].n
            cells[model, bucket, "n", "n"] = Estimate(float(n) if n else np.nan, np.nan, np.nan, n)
            for column, method in (("DFlash", "original"), ("FOLD", "fold")):
                value = tau[method].estimate()
                cells[model, bucket, column, "tau"] = Estimate(value.value, np.nan, np.nan, value.n)
            for change, (after, before) in CHANGES.items():
                cells[model, bucket, change, "tau change"] = difference(tau[after], tau[before]).estimate()
    columns: list[tuple[str, str, Selector]] = [("", "n", {"column": "n", "metric": "n"})]
    columns += [("", f"τ {column}", {"column": column, "metric": "tau"}) for column in ("DFlash", "FOLD")]
    columns += [("", change, {"column": change, "metric": "tau change"}) for change in CHANGES]
    caption = "Decomposition of the difference in τ on LBv2 by input length, paired by request."
    return Sheet(11, caption, rows, columns, cells, intervals=True)


def table1(data: Data | None = None) -> Sheet:
    """Drafters, from conf/."""
    drafters = _conf("drafter")
    cells: dict[Key, Estimate | str] = {}
    for model in paper.WINDOW:
        mine = {kind: drafters[n] for n, (m, kind) in _pair_names().items() if m == model and n in drafters}
        if not mine:
            continue
        first = next(iter(mine.values()))
        cells["", model, "Drafter", ""] = ", ".join(mine)
        cells["", model, "B", ""] = str(first["block"])
        cells["", model, "Attention layers", ""] = _layers(first["architecture"])
        cells["", model, "Train", ""] = _thousands(first["train_length"])
        cells["", model, "W", ""] = f"{first['window']}"
    columns = [("", name, {"column": name}) for name in ("Drafter", "B", "Attention layers", "Train", "W")]
    rows = [("", model, {"row": model}) for model in ("Llama-3.1-8B", "Qwen3.5-9B", "Gemma-4-12B", "Qwen3-8B")]
    caption = (
        "Drafters: block size B, attention layers (SW: sliding window), training length and FOLD's window W, as "
        "configured."
    )
    return Sheet(1, caption, rows, columns, cells)


def _layers(architecture: dict[str, Any]) -> str:
    """A drafter's attention layers as the paper prints them: "5 SW (4K) + 1 full"."""
    kinds = architecture.get("layer_types") or ["full_attention"] * architecture["num_hidden_layers"]
    sliding = kinds.count("sliding_attention")
    parts = [f"{sliding} SW ({architecture['sliding_window'] // 1024}K)"] if sliding else []
    parts += [f"{len(kinds) - sliding} full"] if len(kinds) > sliding else []
    rope = (architecture.get("rope_parameters") or {}).get("full_attention") or {}
    return " + ".join(parts) + (", partial RoPE" if rope.get("partial_rotary_factor", 1) < 1 else "")


def table6(data: Data | None = None) -> Sheet:
    """Checkpoints, from conf/."""
    drafters, targets = _conf("drafter"), _conf("target")
    cells: dict[Key, Estimate | str] = {}
    for name, (_, kind) in _pair_names().items():
        if name in drafters and drafters[name]["target"] in targets:
            cells["", targets[drafters[name]["target"]]["source"], kind, ""] = drafters[name]["source"]
    rows = [("", target, {"row": target}) for target in dict.fromkeys(key[1] for key in cells)]
    columns = [("", kind, {"column": kind}) for kind in ("DFlash", "DSpark")]
    return Sheet(6, "Checkpoints, as configured.", rows, columns, cells)


def table7(data: Data) -> Sheet:
    """Requests and input lengths as measured."""
    cells: dict[Key, Estimate | str] = {}
    limits = {
        paper.task_key(task): benchmark.get("max_new_tokens")
        for run in data.runs.provenance.values()
        for benchmark in run.get("config", {}).get("benchmarks", [])
        for task in benchmark.get("tasks", [])
    }
    for model in paper.MAIN_MODELS:
        rows = data.rows(model, "DFlash").drop_duplicates([*CELL, "request"])
        for task, part in rows.groupby("task"):
            low, high = (_thousands(int(part["prompt_tokens"].agg(edge))) for edge in ("min", "max"))
            cells[model, str(task), "n", ""] = str(len(part))
            cells[model, str(task), "Input length", ""] = low if low == high else f"{low}–{high}"
            if limit := limits.get(paper.task_key(str(task))):
                cells["", str(task), "Gen. limit", ""] = str(limit)
    columns: list[tuple[str, str, Selector]] = [("", "Gen. limit", {"group": "", "column": "Gen. limit"})]
    columns += [(model, c, {"group": model, "column": c}) for model in paper.MAIN_MODELS for c in ("n", "Input length")]
    rows_ = [("", task, {"row": task}) for task in paper.TASKS]
    return Sheet(
        7, "Evaluation data: requests counted in these runs and their input lengths in tokens.", rows_, columns, cells
    )


def _pair_names() -> dict[str, tuple[str, str]]:
    return {name: (pair.model, pair.drafter) for name, pair in paper.PAIRS.items()}


def _conf(group: str) -> dict[str, dict[str, Any]]:
    """The YAML files of conf/<group> by name."""
    folder = resources.files("conf").joinpath(group)
    files = [file for file in folder.iterdir() if file.name.endswith(".yaml")] if folder.is_dir() else []
    found = {file.name.removesuffix(".yaml"): OmegaConf.create(file.read_text(encoding="utf-8")) for file in files}
    return {name: cast("dict[str, Any]", OmegaConf.to_container(values)) for name, values in found.items()}


def _thousands(tokens: int) -> str:
    """Tokens as the paper prints them: 40,000 is 40K, 3,072 is 3K, 1,843 is 1.8K."""
    if tokens % 1000 == 0:
        return f"{tokens // 1000}K"
    return f"{tokens / 1024:.1f}K".replace(".0K", "K") if tokens < 10 * 1024 else f"{tokens / 1024:.0f}K"


TABLES: dict[int, Callable[[Data], Sheet]] = {
    1: table1, 2: table2, 3: table3, 4: table4, 5: table5, 6: table6, 7: table7, 8: table8, 9: table9, 10: table10,
    11: table11, 12: table12,
}  # fmt: skip
# What the configuration says and no run decides.
OF_CONF: dict[int, Callable[[], Sheet]] = {1: table1, 6: table6}


def make_tables(runs: Runs, numbers: Iterable[int] | None = None) -> list[Sheet]:
    """The tables asked for, or every one that has a measured cell. Raises LoadError when no pair is the paper's."""
    data = Data(runs)
    data.require_pairs()
    sheets = [TABLES[number](data) for number in (sorted(TABLES) if numbers is None else numbers)]
    footer = footer_lines(runs)
    for sheet in sheets:
        sheet.notes += footer
    return [sheet for sheet in sheets if numbers is not None or sheet.known()]


def footer_lines(runs: Runs) -> list[str]:
    """What must stand under every table: estimator, requests used and left out, device, versions, runs."""
    estimator = (
        "τ: mean over requests of tokens per round; speedup: mean over requests of TPOT(AR)/TPOT, paired on the same "
        "device. Intervals: 95%, 2,000 paired bootstrap resamples within tasks; they cover the choice of requests, not "
        "run-to-run noise."
    )
    used = len(runs.used[[*CELL, "request"]].drop_duplicates())
    reasons = Counter(runs.excluded["reason"]).most_common()
    left = f" ({'; '.join(f'{n} {reason}' for reason, n in reasons)})" if reasons else ""
    lines = [estimator, f"Requests used: {used:,}; left out of every method: {len(runs.excluded):,}{left}."]
    return [*lines, *unusable_lines(runs), *provenance_lines(runs)]


def provenance_lines(runs: Runs) -> list[str]:
    """Devices, versions and run ids, from run.json and the records."""
    devices, versions = [], []
    for run in runs.provenance.values():
        begin = (run.get("starts") or [{}])[-1].get("begin", {})
        gpus = [gpu.get("name", "?") for gpu in begin.get("gpus") or []]
        devices.append(" + ".join(gpus) or begin.get("cpu", {}).get("model") or "unknown device")
        packages = begin.get("packages") or {}
        wanted = [f"{name} {packages[name]}" for name in ("fold-bench", "torch", "vllm", "sglang") if name in packages]
        commit = (begin.get("code") or {}).get("commit")
        versions.append(", ".join([*wanted, *([f"commit {commit[:10]}"] if commit else [])]))
    names = ", ".join(dict.fromkeys(runs.provenance))
    engines = ", ".join(runs.used["engine"].unique())
    lines = [f"Engine: {engines}. Device: {'; '.join(dict.fromkeys(devices))}."]
    if any(versions):
        lines.append(f"Versions: {'; '.join(dict.fromkeys(v for v in versions if v))}.")
    return [*lines, f"Runs: {names}."]


# -------------------------------------------------------------------------------------------------------------- formats


def to_csv(sheet: Sheet) -> str:
    """Cells with the keys of results/paper, full precision, intervals and n."""
    rows = []
    for (group, row, column, metric), cell in sheet.cells.items():
        mark = "†" if (group, row, column, metric) in sheet.marks else ""
        numbers = [cell, "", "", ""] if isinstance(cell, str) else [cell.value, cell.low, cell.high, cell.n or ""]
        rows.append([sheet.number, group, row, column, metric, *numbers, mark])
    return pd.DataFrame(rows, columns=[*paper.KEYS, "value", "low", "high", "n", "mark"]).to_csv(
        index=False, lineterminator="\n"
    )


def to_markdown(sheet: Sheet, intervals: bool = False) -> str:
    """A Markdown table: bold best, italic second best, notes below."""
    ranks = sheet.ranks()
    heads = [" ".join(part for part in (top, sub) if part) for top, sub, _ in sheet.columns]
    lines = [f"**Table {sheet.number}.** {sheet.caption}", ""]
    lines += [f"| {' | '.join(['', *heads])} |", f"|{'|'.join(['---', *('---:' for _ in heads)])}|"]
    section = ""
    for name, label, row in sheet.rows:
        if name != section:
            lines.append(f"| **{_escape_markdown(name)}** |{' |' * len(heads)}")
            section = name
        keys = [sheet.key(row, column) for _, _, column in sheet.columns]
        texts = [_escape_markdown(sheet.printed(key, intervals)) for key in keys]
        wrapped = [{1: f"**{t}**", 2: f"*{t}*"}.get(ranks.get(key, 0), t) for key, t in zip(keys, texts, strict=True)]
        lines.append(f"| {' | '.join([_escape_markdown(label), *wrapped])} |")
    return "\n".join([*lines, "", *(f"{_escape_markdown(note)}\n" for note in sheet.notes)])


def _escape_markdown(text: str) -> str:
    return text.replace("\\", "\\\\").replace("|", "\\|").replace("*", "\\*").replace("_", "\\_")


def to_latex(sheet: Sheet, intervals: bool = False) -> str:
    """A booktabs table in a table* environment: needs only the package booktabs."""
    ranks = sheet.ranks()
    width = len(sheet.columns) + 1
    lines = [r"\begin{table*}", r"\centering\small", rf"\begin{{tabular}}{{l{'r' * (width - 1)}}}", r"\toprule"]
    tops = _runs_of([top for top, _, _ in sheet.columns])
    if any(top for top, _, _ in tops):
        spans = [rf"\multicolumn{{{n}}}{{c}}{{{escape_latex(top)}}}" for top, _, n in tops]
        lines.append(" & ".join(["", *spans]) + r" \\")
        lines.append(" ".join(rf"\cmidrule(lr){{{start + 2}-{start + n + 1}}}" for top, start, n in tops if top))
    lines += [" & ".join(["", *(escape_latex(sub) for _, sub, _ in sheet.columns)]) + r" \\", r"\midrule"]
    section = ""
    for name, label, row in sheet.rows:
        if name != section:
            lines += [r"\midrule"] if section else []
            lines.append(rf"\multicolumn{{{width}}}{{l}}{{\textit{{{escape_latex(name)}}}}} \\")
            section = name
        cells = []
        for _, _, column in sheet.columns:
            key = sheet.key(row, column)
            text = escape_latex(sheet.printed(key, intervals))
            cells.append({1: rf"\textbf{{{text}}}", 2: rf"\textit{{{text}}}"}.get(ranks.get(key, 0), text))
        lines.append(" & ".join([escape_latex(label), *cells]) + r" \\")
    caption = " ".join(escape_latex(text) for text in [sheet.caption, *sheet.notes])
    lines += [
        r"\bottomrule",
        r"\end{tabular}",
        rf"\caption{{{caption}}}",
        rf"\label{{tab:fold-{sheet.number}}}",
        r"\end{table*}",
    ]
    return "\n".join(lines) + "\n"


_LATEX = {
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{", "}": r"\}",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": r"\textless{}", ">": r"\textgreater{}",
    "|": r"\textbar{}", "τ": r"$\tau$", "×": r"$\times$", "→": r"$\rightarrow$", "≥": r"$\geq$", "α": r"$\alpha$",
    "†": r"$^\dagger$", "–": "--",
}  # fmt: skip


def escape_latex(text: str) -> str:
    """Text as LaTeX prints it literally; the few symbols of our tables become mathematics."""
    return "".join(_LATEX.get(letter, letter) for letter in text)


def _runs_of(names: list[str]) -> list[tuple[str, int, int]]:
    """Equal neighbours as (name, start, length)."""
    found: list[tuple[str, int, int]] = []
    for place, name in enumerate(names):
        if found and found[-1][0] == name:
            found[-1] = (name, found[-1][1], found[-1][2] + 1)
        else:
            found.append((name, place, 1))
    return found


def main() -> int:
    """fold-tables."""
    return run_command("fold-tables", _main)


def _main(arguments: list[str]) -> int:
    parser = Parser("fold-tables", "The paper's tables from records: Markdown, CSV and LaTeX.")
    parser.add_argument("runs", nargs="*", type=Path, help="run directories, or folders of them")
    parser.add_argument(
        "--out", type=Path, default=Path("results/tables"), help="where to write (default: %(default)s)"
    )
    parser.add_argument(
        "--tables", type=parser.numbers(TABLES), help="for example 2,4 (default: all that have a measured cell)"
    )
    parser.add_argument("--intervals", action="store_true", help="print the 95%% interval in every cell")
    parser.add_argument("--against", metavar="ARM", help="of any runs: ARM against every other arm, paired by request")
    parser.add_argument("--where", nargs="+", default=[], help="with --against: a selection, for example level=4K,7K")
    given = parser.parse_args(arguments)
    if given.where and not given.against:
        raise LoadError("--where belongs to --against")
    if given.against:
        return _against(given.runs, given.against, given.where, given.out)
    if given.runs:
        sheets = make_tables(load(given.runs), given.tables)
    elif given.tables and set(given.tables) <= OF_CONF.keys():
        sheets = [OF_CONF[number]() for number in given.tables]
    else:
        raise LoadError("give run directories; without any, only --tables 1,6 can be made, from the configuration")
    given.out.mkdir(parents=True, exist_ok=True)
    for sheet in sheets:
        base = given.out / f"table{sheet.number}"
        markdown = to_markdown(sheet, given.intervals)
        for suffix, text in ((".md", markdown), (".csv", to_csv(sheet)), (".tex", to_latex(sheet, given.intervals))):
            base.with_suffix(suffix).write_text(text, encoding="utf-8")
        print(markdown)
    print(f"{len(sheets)} tables written to {given.out}")
    return 0


def _against(folders: Sequence[Path], arm: str, where: Sequence[str], out: Path) -> int:
    from analysis import differences

    if not folders:
        raise LoadError("give run directories")
    chosen = differences.parse_where(where)
    runs = load(folders)
    text = differences.to_markdown(runs, arm, differences.differences(runs, arm, chosen))
    out.mkdir(parents=True, exist_ok=True)
    (out / "differences.md").write_text(text, encoding="utf-8")
    print(text)
    return 0
