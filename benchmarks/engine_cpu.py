"""The reference engine on a CPU, as ratios inside one run: against transformers, verification, methods, memory.

    python benchmarks/engine_cpu.py [--contexts 512 4096 7168] [--json results/bench/engine_cpu.json]

Run it on an otherwise idle machine. Steps of the two sides alternate in small groups, so that a slow spell of the
machine hits both; every figure is a median.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import torch

from data_prep.demo.target import ensure_target
from harness.drafters import Drafter, load_drafter
from harness.engines.base import EngineInfo
from harness.engines.reference.engine import ReferenceEngine
from harness.engines.reference.target import Target, open_target
from harness.provenance import machine
from harness.requests import Request
from methods import make_method

DRAFTER = Path(__file__).resolve().parents[1] / "data_prep" / "demo" / "drafter"
WINDOW, STEPS, GROUPS = 256, 8, 6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contexts", type=int, nargs="+", default=[512, 4096, 7168])
    parser.add_argument("--drafter", type=Path, default=DRAFTER)
    parser.add_argument("--skip-transformers", action="store_true")
    parser.add_argument("--memory-of", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    if asked.memory_of:
        print(json.dumps(measure_memory(asked.memory_of, asked.drafter)))
        return
    dtype = torch.bfloat16
    target = open_target(ensure_target(), dtype, torch.device("cpu"))
    drafter = load_drafter(asked.drafter, dtype=dtype, device="cpu")
    rows: list[dict[str, Any]] = []
    for context in asked.contexts:
        row = {"context": context, "threads": torch.get_num_threads(), **measure_target(target, drafter, context)}
        if not asked.skip_transformers:
            row |= measure_transformers(target, context)
        row |= measure_methods(target, drafter, context)
        rows.append(row)
        print(json.dumps(row), flush=True)
    command = [sys.executable, __file__, "--memory-of", str(max(asked.contexts)), "--drafter", str(asked.drafter)]
    memory = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    print(json.dumps(memory))
    if asked.json:
        asked.json.parent.mkdir(parents=True, exist_ok=True)
        found = {"machine": machine(), "rows": rows, "memory": memory}
        asked.json.write_text(json.dumps(found, indent=1) + "\n")


def prompt(context: int) -> list[int]:
    """Token ids without meaning: time does not depend on them."""
    return torch.randint(100, 40000, (context,), generator=torch.Generator().manual_seed(0)).tolist()


def prefill(target: Target, ids: list[int]) -> float:
    """Seconds to prefill ``ids`` in chunks of 1,024."""
    started = time.perf_counter()
    target.reserve(len(ids) + 256)
    for start in range(0, len(ids), 1024):
        target.forward(ids[start : start + 1024], last_only=True)
    target.mark()
    return time.perf_counter() - started


def alternate(*sides: Callable[[], Any]) -> list[float]:
    """Median milliseconds of each side, STEPS calls at a time in turn."""
    times: list[list[float]] = [[] for _ in sides]
    for group in range(GROUPS + 1):
        for side, call in enumerate(sides):
            for _ in range(STEPS):
                started = time.perf_counter()
                call()
                if group:  # the first group warms up
                    times[side].append((time.perf_counter() - started) * 1e3)
    return [statistics.median(each) for each in times]


def measure_target(target: Target, drafter: Drafter, context: int) -> dict[str, float]:
    """Prefill rate, an autoregressive step, a verification of B rows."""
    ids = prompt(context)
    seconds = prefill(target, ids)
    taps = tuple(drafter.config.target_layer_ids)

    def step() -> None:
        target.forward([5]).logits.max(-1).indices.tolist()
        target.truncate(context)

    def verify() -> None:
        target.forward(ids[: drafter.config.proposals + 1], taps=taps).logits.max(-1).indices.tolist()
        target.truncate(context)

    step_ms, verify_ms = alternate(step, verify)
    return {
        "prefill_tokens_per_s": context / seconds,
        "ar_ms": step_ms,
        "verify_ms": verify_ms,
        "verify_over_ar": verify_ms / step_ms,
    }


def measure_transformers(target: Target, context: int) -> dict[str, float]:
    """Our autoregressive step over transformers' with a static cache, same weights and context."""
    from transformers import AutoModelForCausalLM, StaticCache

    model = AutoModelForCausalLM.from_pretrained(ensure_target(), dtype=torch.bfloat16).eval()
    cache = StaticCache(config=model.config, max_cache_len=context + 256)
    ids = torch.tensor([prompt(context)])
    with torch.inference_mode():
        for start in range(0, context, 1024):
            model(ids[:, start : start + 1024], past_key_values=cache, logits_to_keep=1)
        position = [context]

        def theirs() -> None:
            where = torch.tensor([[position[0]]])
            out = model(torch.tensor([[5]]), position_ids=where, past_key_values=cache, logits_to_keep=1)
            out.logits[0].max(-1).indices.tolist()
            position[0] += 1

        def ours() -> None:
            target.forward([5]).logits.max(-1).indices.tolist()
            target.truncate(context)

        target.rewind()
        ours_ms, theirs_ms = alternate(ours, theirs)
    return {"transformers_static_ms": theirs_ms, "ar_over_transformers": ours_ms / theirs_ms}


def measure_methods(target: Target, drafter: Drafter, context: int) -> dict[str, float]:
    """Milliseconds of a whole round of each method, and over the original's."""
    engine = ReferenceEngine(target, drafter, prefill_chunk=1024, info=EngineInfo("reference", "", "", "", "", {}))
    request = Request("bench", "bench", "bench", tuple(prompt(context)), 12, (), {})
    methods = {
        "original": make_method("original"),
        "window": make_method("window", window=WINDOW),
        "fold": make_method("fold", window=WINDOW),
        "rerope": make_method("rerope", window=WINDOW),
        "yarn": make_method("yarn", reference=512),
        "streamingllm": make_method("streamingllm", sinks=4, recent=252),
        "infllm": make_method("infllm", window=WINDOW),
        "cmr": make_method("cmr"),
    }
    rounds: dict[str, list[float]] = {name: [] for name in methods}
    drafts: dict[str, list[float]] = {name: [] for name in methods}
    for repeat in range(4):
        for name, method in methods.items():
            done = engine.decode(request, method)
            if repeat:
                count = len(done.commits)
                rounds[name].append((done.last_token_s - done.first_token_s) / count * 1e3)
                drafts[name].append(done.round_s["draft"] / count * 1e3)
    found = {f"round_ms_{name}": statistics.median(times) for name, times in rounds.items()}
    found |= {f"draft_ms_{name}": statistics.median(times) for name, times in drafts.items()}
    base = found["round_ms_original"]
    return found | {f"round_{name}_over_original": found[f"round_ms_{name}"] / base for name in methods}


def measure_memory(context: int, folder: Path) -> dict[str, float]:
    """Peak memory of opening the pair and one FOLD run, over what it must hold; the interpreter and libraries apart."""
    from transformers import AutoConfig

    process = psutil.Process()
    AutoConfig.from_pretrained(ensure_target())
    torch.ones(64, 64, dtype=torch.bfloat16) @ torch.ones(64, 64, dtype=torch.bfloat16)
    before, peak, stop = process.memory_info().rss, [0], threading.Event()

    def watch() -> None:
        while not stop.wait(0.005):
            peak[0] = max(peak[0], process.memory_info().rss)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    target = open_target(ensure_target(), torch.bfloat16, torch.device("cpu"))
    drafter = load_drafter(folder, dtype=torch.bfloat16, device="cpu")
    engine = ReferenceEngine(target, drafter, prefill_chunk=1024, info=EngineInfo("reference", "", "", "", "", {}))
    request = Request("memory", "memory", "memory", tuple(prompt(context)), 32, (), {})
    engine.decode(replace(request, max_new_tokens=8), None)
    engine.decode(replace(request, max_new_tokens=8), make_method("fold", window=WINDOW))
    stop.set()
    watcher.join()
    held = target.nbytes()
    drafter_bytes = (folder / "model.safetensors").stat().st_size
    features = context * len(drafter.config.target_layer_ids) * drafter.config.hidden * 2
    must = held["weights"] + held["cache"] + drafter_bytes + features
    used = max(peak[0], process.memory_info().rss) - before
    return {"context": context, "peak_mib": used / 2**20, "must_hold_mib": must / 2**20, "peak_over_must": used / must}


if __name__ == "__main__":
    main()
