"""Records built so that the paper's tables must come out of them again.

Every printed value stands for an interval of half a unit in its last digit, so values are moved inside it where the
paper's own averages need it. What is not reproduced: the intervals, which depend on requests that were never
published, and the daggers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from analysis_fixtures import record, write_run

from analysis import paper

AR_MS = 20.0
METHOD_OF = {name: method for method, name in {**paper.SGLANG_METHODS, **paper.METHODS}.items()} | {
    "DSpark": "original"
}
PAIR_OF = {pair: name for name, pair in paper.PAIRS.items()}


def commits_for(total: int, rounds: int) -> list[int]:
    """`rounds` commits that sum to `total`, as equal as possible."""
    return [total // rounds + (place < total % rounds) for place in range(rounds)]


def arm_records(
    task: str, pair: str, method: str, tau: list[float], speedup: float, rounds: int = 100, **more: Any
) -> list[dict[str, Any]]:
    """One arm on one task: a request per value of `tau`; the mean of what is recorded follows their mean."""
    lines, owed = [], 0.0
    for place, value in enumerate(tau):
        owed += value * rounds
        total = round(owed)
        owed -= total
        lines.append(
            record(
                f"{task}-{place}", method, commits=commits_for(total, rounds), tpot_ms=AR_MS / speedup, benchmark=task,
                task=task, run=pair, unit=f"{pair}/vllm/{task}/0of1", engine=more.get("engine", "vllm"),
                prompt_tokens=more.get("prompt_tokens", 20_000), method_config=more.get("config", {}),
                proposals=[15] * rounds,
            )
        )  # fmt: skip
    return lines


def ar_records(task: str, pair: str, n: int, **more: Any) -> list[dict[str, Any]]:
    return [
        record(
            f"{task}-{place}", commits=[1] * 5, tpot_ms=AR_MS, benchmark=task, task=task, run=pair,
            unit=f"{pair}/vllm/{task}/0of1", engine=more.get("engine", "vllm"),
            prompt_tokens=more.get("prompt_tokens", 20_000),
        )
        for place in range(n)
    ]  # fmt: skip


def spread(value: float, n: int = 2) -> list[float]:
    """n values around `value`: a task in which every request were the same would have no interval."""
    return [value + 0.2 * (1 if place % 2 else -1) * (place < n - n % 2) for place in range(n)]


def _values(table: int) -> dict[tuple[str, str, str, str], float]:
    cells = paper.published(table)
    return {tuple(row[:4]): row[4] for row in cells[["group", "row", "column", "metric", "value"]].values.tolist()}


def main_tables(folder: Path) -> list[Path]:
    """Tables 2, 3, 8 and 9: the same value in every task of a column."""
    wanted: dict[tuple[str, str, str], dict[str, float]] = {}  # (pair, task, method): tau and speedup

    def put(pair: str, tasks: list[str], method: str, metric: str, value: float) -> None:
        for task in tasks:
            wanted.setdefault((pair, task, METHOD_OF[method]), {})[metric] = value

    two = _values(2)
    for model, method, column, metric in two:
        if column == "Avg.":
            printed = [two[model, method, name, metric] for name in paper.COLUMNS]
            # The printed average is of unrounded values: all seven move together, each within its rounding.
            shift = float(np.clip(two[model, method, "Avg.", metric] - np.mean(printed), -0.0025, 0.0025))
            for name, value in zip(paper.COLUMNS, printed, strict=True):
                put(PAIR_OF[paper.Pair(model, "DFlash")], paper.COLUMNS[name], method, metric, value + shift)
    for (model, method, column, metric), value in _values(3).items():
        members = {"Code": paper.CODE, "General": paper.GENERAL if model != "Qwen3-8B" else ["Gov", "LBv2"]}[column]
        tasks = [task for name in members for task in paper.COLUMNS[name]]
        put(PAIR_OF[paper.Pair(model, "DSpark")], tasks, method, metric, value)
    for (model, method, column, metric), value in {**_values(8), **_values(9)}.items():
        tasks = [f"SPEED {column}"] if column in paper.SPEED_TIERS else [column]
        put(PAIR_OF[paper.Pair(model, "DFlash")], tasks, method, metric, value)
    lines: dict[str, list[dict[str, Any]]] = {}
    for (pair, task, method), values in wanted.items():
        lines.setdefault(pair, []).extend(
            arm_records(task, pair, method, spread(values["tau"]), values["speedup"], 200)
        )
    for pair, task in dict.fromkeys((pair, task) for pair, task, _ in wanted):
        lines[pair] += ar_records(task, pair, 2)
    return [write_run(folder / pair, some) for pair, some in lines.items()]


def lca_changes(folder: Path) -> list[Path]:
    """Table 4."""
    values, out = _values(4), []
    for model in paper.MAIN_MODELS:
        pair, lines = PAIR_OF[paper.Pair(model, "DFlash")], []
        for length in ("32K", "64K", "122K"):
            window = 3.0 + values[model, "DFlash → Window", length, "tau change"]
            fold = window + values[model, "Window → FOLD", length, "tau change"]
            task = f"LCA {length}"
            lines += ar_records(task, pair, 4)
            for method, tau in (("original", 3.0), ("window", window), ("fold", fold)):
                lines += arm_records(task, pair, method, spread(tau, 4), 2.0)
        out.append(write_run(folder / pair, lines))
    return out


def lbv2_buckets(folder: Path) -> list[Path]:
    """Table 11, with its numbers of requests."""
    values, out = _values(11), []
    middle = dict(zip(paper.BUCKETS, (12_000, 24_000, 48_000, 96_000, 150_000), strict=True))
    for model in ("Llama-3.1-8B", "Qwen3-8B", "Qwen3.5-9B", "Gemma-4-12B"):
        pair, lines = PAIR_OF[paper.Pair(model, "DFlash")], []
        for bucket in [bucket for group, bucket, column, _ in values if group == model and column == "n"]:
            d, f = values[model, bucket, "DFlash", "tau"], values[model, bucket, "FOLD", "tau"]
            first, second = (values[model, bucket, c, "tau change"] for c in ("DFlash → Window", "Window → FOLD"))
            # The four printed numbers may miss each other by a rounding, which is shared out.
            quarter = (f - d - first - second) / 4
            d, f = d + quarter, f - quarter
            n, more = int(values[model, bucket, "n", "n"]), {"prompt_tokens": middle[bucket]}
            mine = ar_records("LBv2", pair, n, **more)
            for method, tau in (("original", d), ("window", d + first + quarter), ("fold", f)):
                mine += arm_records("LBv2", pair, method, spread(tau, n), 2.0, 25, **more)
            lines += [{**line, "request_id": f"{bucket} {line['request_id']}"} for line in mine]
        out.append(write_run(folder / pair, lines))
    return out


def sglang(folder: Path) -> list[Path]:
    """Table 10, with 210 requests of which 94 differ from AR in some method."""
    values, pair, lines = _values(10), "llama", []
    share = dict(zip(paper.SEVEN_GENERAL_TASKS, (14, 14, 14, 13, 13, 13, 13), strict=True))
    names = dict.fromkeys(row for _, row, _, _ in values)
    more = {"engine": "sglang"}
    seen = 0
    for task, k in share.items():
        lines += ar_records(task, pair, 30, **more)
        for name in names:
            whole, common = (
                {m: values["Llama-3.1-8B", name, c, m] for m in ("tau", "speedup")}
                for c in ("All requests", "Common set")
            )
            odd = {metric: (30 * whole[metric] - (30 - k) * common[metric]) / k for metric in whole}
            mine = arm_records(task, pair, METHOD_OF[name], [odd["tau"]] * k + [common["tau"]] * (30 - k), 1.0, **more)
            count = int(values["Llama-3.1-8B", name, "All requests", "differs from AR"])
            base = {line["request_id"]: line["output_ids"] for line in lines if line["method"] == "ar"}
            for place, line in enumerate(mine):
                # The first `count` of the 94 differ in most methods, the last `count` in one, so that all 94 differ
                # somewhere.
                number = seen + place
                inside = number < count if name != "YaRN" and name != "FOLD" else number >= 94 - count
                tokens = sum(line["commits"])
                speed = odd["speedup"] if place < k else common["speedup"]
                line["last_token_s"] = line["first_token_s"] + AR_MS / 1e3 / speed * tokens
                if not (place < k and inside):
                    line["output_ids"] = base[line["request_id"]]
                    line["last_token_s"] = line["first_token_s"] + AR_MS / 1e3 / speed * (len(line["output_ids"]) - 1)
            lines += mine
        seen += k
    return [write_run(folder / pair, lines)]


def alpha(folder: Path, table: int, limit: int) -> list[Path]:
    """Tables 5 and 12: FOLD with α of 1, 2 and 4; at most `limit` requests a group."""
    values, out = _values(table), []
    whole = {**paper.ALPHA_GROUPS, "SPEED": ["SPEED 8K", "SPEED 16K", "SPEED 32K"]}
    for model in ("Llama-3.1-8B", "Qwen3-8B", "Qwen3.5-9B", "Gemma-4-12B"):
        pair, lines = PAIR_OF[paper.Pair(model, "DFlash")], []
        for group in dict.fromkeys(row for name, row, _, _ in values if name == model):
            members = whole[group]
            if model == "Qwen3-8B":
                members = ["SPEED 8K", "SPEED 16K"] if group == "SPEED" else ["Gov", "LBv2"]
            n = min(int(values.get((model, group, "n", "n"), limit)), limit)
            sizes = [n // len(members) + (place < n % len(members)) for place in range(len(members))]
            tau = values[model, group, "α=2", "tau"]
            up, on = (values[model, group, column, "tau ratio"] for column in ("α=2 vs. 1", "α=4 vs. 2"))
            owed = {1: 0.0, 4: 0.0}
            for task, size in zip(members, sizes, strict=True):
                lines += ar_records(task, pair, size)
                two = arm_records(task, pair, "fold", spread(tau, size), 2.0, 20, config={"alpha": 2.0})
                lines += two
                for a, wanted in ((1, up), (4, on)):
                    arm = arm_records(task, pair, "fold", [1.0] * size, 2.0, 200, config={"alpha": float(a)})
                    for line, base in zip(arm, two, strict=True):
                        mine = sum(base["commits"]) / 20
                        # One step of a total changes a ratio by a fraction of a percent; the error is carried on.
                        target = wanted + owed[a]
                        total = round(200 * (mine / target if a == 1 else mine * target))
                        line["commits"] = commits_for(total, 200)
                        line["output_ids"] = [place % 10 for place in range(1 + total)]
                        owed[a] = target - (mine / (total / 200) if a == 1 else total / 200 / mine)
                    lines += arm
        out.append(write_run(folder / pair, lines))
    return out
