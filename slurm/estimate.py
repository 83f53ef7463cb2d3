"""GPU hours of a unit before it runs, from the paper's Table 7 and what bounds a GPU: a formula, and its assumptions.

For a request of L input tokens that generates G tokens (the limit: an upper bound), with a target of P parameters:

    prefill  = (2 P L + 2 A L²) / (0.5 x 989 TFLOP/s)          A: query heads x head size, summed over full layers
    AR step  = (2 bytes x P + KV(L)) / (0.7 x 3.35 TB/s)         KV(L): bytes of keys and values that L tokens take
    hours    = sum over arms of (prefill + G x AR step / speedup) + (arms + 1) x two minutes to start the engine

0.7 is what the paper's own numbers say: an SD round of 12.3 ms times speedup / tau of Table 2 is an AR step of 11.3 ms
for Llama-3.1-8B at the mean length of those requests. speedup is 1 for AR and 2.5 for a method, about Table 2's mean.
L is the middle of Table 7's range. An engine that shares one prefill between arms (reference) pays it once.
"""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass
from functools import cache

from analysis.load import LoadError
from analysis.paper import PAIRS, published, task_key
from data_prep.config import BenchmarkConfig
from harness.config import Plan
from harness.records import AR

FLOPS = 0.5 * 989e12
BYTES_PER_S = 0.7 * 3.35e12
SPEEDUP = 2.5
START_S = 120.0


@dataclass(frozen=True)
class Target:
    """parameters; kv_bytes: of one token's keys and values in BF16 over the full layers; attention: A above."""

    parameters: float
    kv_bytes: int
    attention: int


# From the targets' published configurations; sliding and linear layers do not grow with the input.
TARGETS = {
    "llama": Target(8.03e9, 131072, 32 * 4096),
    "qwen3": Target(8.19e9, 147456, 36 * 4096),
    "qwen35": Target(9.0e9, 32768, 8 * 4096),
    "gemma": Target(12.0e9, 16384, 8 * 8192),
}
# Appendix B.2 gives the counts that Table 7 lacks: (n, about the mean input length in tokens).
STATED = {
    "qwen3": {"Gov": (283, 14000), "LBv2": (79, 20000), **{f"SPEED {k}K": (256, 1024 * k) for k in (1, 2, 8)}}
    | {f"SPEED {k}K": (768, 1024 * k) for k in (16, 32)},
    "qwen3_dspark": {"Gov": (31, 20000), "LBv2": (63, 23000)},
    "gemma_dspark": {
        "Gov": (32, 20000), "LBv2": (356, 110000), "Retr.KV": (478, 174000), "En.Sum": (72, 157000),
        "En.QA": (281, 164000), "En.MC": (181, 164000), "En.Dia": (200, 98000),
    },
}  # fmt: skip
# The demo on one core of a laptop, measured: seconds per input and per output token.
DEMO_PREFILL_S, DEMO_TOKEN_S, DEMO_START_S = 0.004, 0.06, 20.0


@dataclass(frozen=True)
class Load:
    """n requests of `length` input and `limit` generated tokens."""

    n: int
    length: float
    limit: int


def loads(plan: Plan, benchmark: BenchmarkConfig) -> list[Load]:
    """What a benchmark asks of a pair, one load per task: the paper's counts, else the configuration's own."""
    rows = _published(plan.config.drafter.name)
    found = [rows[key] for task in benchmark.tasks if (key := task_key(task)) in rows]
    if found and len(found) == len(benchmark.tasks):
        return [Load(min(row.n, benchmark.n or row.n), row.length, benchmark.max_new_tokens) for row in found]
    levels = [_tokens(level) for level in benchmark.levels] or [plan.config.target.max_context / 2]
    return [Load(benchmark.n or 100, length, benchmark.max_new_tokens) for _ in benchmark.tasks for length in levels]


def request_count(plan: Plan, benchmark: BenchmarkConfig) -> int:
    """About how many requests a benchmark has for a target, when no request file says so."""
    return sum(load.n for load in loads(plan, benchmark))


def hours(plan: Plan, benchmark: BenchmarkConfig) -> float:
    """GPU hours of all requests of a benchmark by all arms of a plan, starts of the engine left out."""
    arms = [arm.name for arm in plan.arms]
    methods, baselines = len([name for name in arms if name != AR]), max(arms.count(AR), 1)
    prefills = 1 if plan.config.engine.name == "reference" else methods + baselines
    seconds = 0.0
    for load in loads(plan, benchmark):
        prefill, step = _costs(plan.config.target.name, load.length)
        decode = load.limit * step * (baselines + methods / SPEEDUP)
        seconds += load.n * (prefills * prefill + decode)
    return seconds / 3600


def start_hours(plan: Plan) -> float:
    """GPU hours that a unit spends on starting its engine: once, or once an arm and again for the drift."""
    if plan.config.target.name not in TARGETS:
        return DEMO_START_S / 3600
    return START_S * (1 if plan.config.engine.name == "reference" else len(plan.arms) + 2) / 3600


def _costs(target: str, length: float) -> tuple[float, float]:
    """Seconds of a prefill and of an autoregressive step."""
    if target not in TARGETS:
        return DEMO_PREFILL_S * length, DEMO_TOKEN_S
    known = TARGETS[target]
    prefill = (2 * known.parameters * length + 2 * known.attention * length**2) / FLOPS
    return prefill, (2 * known.parameters + known.kv_bytes * length) / BYTES_PER_S


_COLUMNS = ["row", "column", "printed"]


@cache
def _published(drafter: str) -> dict[str, Load]:
    """A pair's loads by task key; empty for other pairs, and where the paper's numbers are not installed."""
    if drafter not in PAIRS:
        return {}
    with suppress(LoadError):
        cells = published(7)
        mine = cells[cells["group"] == PAIRS[drafter].model]
        texts = {(str(row), str(column)): str(text) for row, column, text in mine[_COLUMNS].to_numpy()}
        rows = {}
        for (row, column), text in texts.items():
            if column == "n":
                length = texts.get((row, "Input length"), row.split()[-1])  # SPEED-Bench's tier is its length
                rows[task_key(row)] = Load(int(text), _middle(length), 0)
        stated = {task_key(row): Load(n, length, 0) for row, (n, length) in STATED.get(drafter, {}).items()}
        return rows | stated
    return {}


def _middle(text: str) -> float:
    ends = [_tokens(part) for part in text.split("–")]
    return sum(ends) / len(ends)


def _tokens(text: str) -> float:
    """ "1.8K" as 1843.2."""
    match = re.match(r"([\d.]+)\s*[Kk]?", text)
    return float(match.group(1)) * (1024 if text[-1:] in "Kk" else 1) if match else 0.0
