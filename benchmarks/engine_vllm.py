"""vLLM as the harness runs it, as ratios inside one run on the demo pair: our ``original`` over stock DFlash, methods
over ``original``, and the reference engine's autoregressive step over vLLM's.

    .venv-vllm/bin/python benchmarks/engine_vllm.py [--contexts 512 4096 7168] [--json results/bench/engine_vllm.json]

Run it on an otherwise idle machine, with vLLM installed. Every arm has its process, loaded once; requests go to one arm
after the other in a rotated order, so that a slow spell hits all of them. Each figure is a median over repeats, and
each ratio the median of the repeats' own ratios, with the smallest and the largest.

Stock vLLM 0.28.0 normalises the context keys of all drafter layers by the first layer's weights on a CPU
(ops.rms_norm takes no weight per layer there), and so drafts otherwise than the drafter was trained to. A drafter whose
layers share that weight is read alike by stock vLLM and by us, so that is what is compared.
"""

from __future__ import annotations

import argparse
import inspect
import json
import statistics
import tempfile
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from data_prep.demo.target import ensure_target
from harness.config import DrafterConfig, EngineConfig, RunConfig, TargetConfig
from harness.engines.base import Engine, Generation
from harness.engines.reference import open_reference
from harness.engines.vllm.engine import Stock, VllmEngine
from harness.provenance import machine
from harness.requests import Request
from methods import make_method

DRAFTER = Path(__file__).resolve().parents[1] / "data_prep" / "demo" / "drafter"
BLOCK, WINDOW, ROOM = 5, 256, 128


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contexts", type=int, nargs="+", default=[512, 4096, 7168])
    parser.add_argument("--tokens", type=int, default=32, help="decoded per request")
    parser.add_argument("--repeats", type=int, default=6)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    target = ensure_target()
    context = max(asked.contexts) + asked.tokens + ROOM
    settings = EngineConfig(name="vllm", dtype=asked.dtype, threads=asked.threads, kv_cache_gib=0.5)
    methods = {
        "ar": None,
        "stock": Stock(),
        "original": make_method("original"),
        "window": make_method("window", window=WINDOW),
        "fold": make_method("fold", window=WINDOW),
    }
    rows: list[dict[str, Any]] = []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        drafter = equal_key_norms(DRAFTER, folder / "drafter")
        arms: dict[str, tuple[Engine, Any]] = {"reference ar": (reference(target, drafter, asked), None)}
        for name, method in methods.items():
            engine = VllmEngine(target, drafter, settings, context=context, block=BLOCK)
            stack.callback(engine.close)
            engine.describe(method)
            arms[name] = (engine, method)
        for length in asked.contexts:
            rows.append(measure(arms, request(target, length, asked.tokens), asked.repeats))
            print(json.dumps(rows[-1]), flush=True)
            if asked.json:  # after every context: a run that is cut keeps what it has
                asked.json.parent.mkdir(parents=True, exist_ok=True)
                asked.json.write_text(json.dumps({"machine": machine(), "rows": rows}, indent=1) + "\n")


def equal_key_norms(source: Path, into: Path) -> Path:
    """The drafter of folder ``source`` with the key norm of its first layer in every layer, as a new folder."""
    tensors = load_file(source / "model.safetensors")
    for name in tensors:
        if name.endswith("k_norm.weight"):
            tensors[name] = tensors["layers.0.self_attn.k_norm.weight"].clone()
    into.mkdir()
    save_file(tensors, into / "model.safetensors", {"format": "pt"})
    (into / "config.json").write_bytes((source / "config.json").read_bytes())
    return into


def reference(target: Path, drafter: Path, asked: argparse.Namespace) -> Engine:
    """The reference engine on the same pair and dtype."""
    config = RunConfig(
        target=TargetConfig(name="demo", source=str(target), max_context=8192),
        drafter=DrafterConfig(name="demo", source=str(drafter), block=BLOCK, family="zlab"),
        engine=EngineConfig(name="reference", device="cpu", dtype=asked.dtype, threads=asked.threads),
    )
    return open_reference(config)


def request(target: Path, length: int, tokens: int) -> Request:
    """Code of the standard library, so that some drafts are accepted."""
    text = inspect.getsource(argparse)
    ids = Tokenizer.from_file(str(target / "tokenizer.json")).encode(text).ids
    if len(ids) < length:
        raise SystemExit(f"the text has {len(ids)} tokens, a prompt of {length} was asked for")
    return Request(f"argparse@{length}", "bench", "bench", tuple(ids[:length]), tokens, ())


def measure(arms: dict[str, tuple[Engine, Any]], asked: Request, repeats: int) -> dict[str, Any]:
    """Milliseconds per token of every arm, the ratios, and whether stock and original made the same rounds."""
    names = list(arms)
    done: dict[str, list[Generation]] = {name: [] for name in names}
    for repeat in range(repeats + 1):
        for name in names[repeat % len(names) :] + names[: repeat % len(names)]:
            engine, method = arms[name]
            found = engine.decode(asked, method)
            if repeat:  # the first warms up
                done[name].append(found)
    token = {name: [milliseconds(each) for each in found] for name, found in done.items()}
    first = {name: found[0] for name, found in done.items()}
    stock, ours = first["stock"], first["original"]
    row: dict[str, Any] = {"context": len(asked.prompt_ids), "tokens": asked.max_new_tokens, "repeats": repeats}
    row |= {f"ms_per_token {name}": statistics.median(times) for name, times in token.items()}
    row |= {f"tau {name}": statistics.mean(g.commits) for name, g in first.items()}
    row["equal_rounds stock original"] = (stock.output_ids, stock.commits) == (ours.output_ids, ours.commits)
    row |= ratio("original over stock", token["original"], token["stock"])
    row |= ratio("reference ar over ar", token["reference ar"], token["ar"])
    for name in ("window", "fold"):
        rounds = {arm: [ms * row[f"tau {arm}"] for ms in token[arm]] for arm in (name, "original")}
        row |= ratio(f"round {name} over original", rounds[name], rounds["original"])
    return row


def milliseconds(done: Generation) -> float:
    """Per output token after the first."""
    return (done.last_token_s - done.first_token_s) / (len(done.output_ids) - done.n_first) * 1e3


def ratio(name: str, over: Iterable[float], under: Iterable[float]) -> dict[str, Any]:
    each = sorted(a / b for a, b in zip(over, under, strict=True))
    return {name: statistics.median(each), f"{name} range": [each[0], each[-1]]}


if __name__ == "__main__":
    main()
