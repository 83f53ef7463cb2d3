"""``make gpu-check``: what only a GPU can show, in one command of at most ten minutes.

    python -m benchmarks.gpu_check [--out FOLDER] [--minutes 10] [--parts kernels,reads,...] [--dry-run]

Needs torch, Triton and a GPU: no network, no checkpoint, no other package (weights are random at the published shapes,
so nothing here says anything of acceptance). Targets that are ``transformers``' modules (Gemma-4, Qwen3.5) are left out
where that is missing, and their drafters timed alone. The parts, in order:

* ``start``: the machine, and the bandwidth of a large copy (bytes read and written), which all else is compared with;
* ``kernels``: every fixed method's read of every pair's shapes against the dense definition in float64;
* ``engine``: a small model decoded with CUDA graphs and without, which must give the same tokens;
* ``reads``: effective bandwidth of each read at 4K to 256K entries;
* ``rounds``: draft and round of every method at 1K to 128K, and FOLD's round over the original's;
* ``latency``: Figure 1 for the Llama shape (``latency.csv``, which fold-figures reads);
* ``train``: if time is left and the demo target lies in the cache, the training of the demo drafter.

Each result is printed and appended to ``check.jsonl`` (flushed and synced) as soon as it is there, and a part that
fails says why in one line and lets the next one run. The same command again measures what is missing. ``--dry-run``
executes on a CPU, at toy sizes and with Triton's interpreter, every path that needs no GPU; its times mean nothing and
are written to a temporary folder. Exit code 0: all parts did what they should; 1: one failed; 2: no GPU, or a mistake;
130: interrupted.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import math
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

if "--dry-run" in sys.argv:  # before Triton is imported anywhere
    os.environ.setdefault("TRITON_INTERPRET", "1")

try:
    import torch
except ImportError:
    print("gpu-check: this Python has no torch; name one that has: make gpu-check PYTHON=...", file=sys.stderr)
    raise SystemExit(2) from None

if TYPE_CHECKING:
    from harness.drafters import DrafterConfig
    from harness.engines.reference.engine import ReferenceEngine
    from harness.engines.reference.fixed import Executors, FixedReader
    from methods.reading import Method

ROOT = Path(__file__).resolve().parents[1]
PAIRS = ("llama", "qwen35", "gemma", "qwen3", "gemma_dspark", "qwen3_dspark")
TARGETS = {"llama": "llama", "qwen35": "qwen35", "gemma": "gemma", "qwen3": "qwen3"}  # pairs whose rounds are timed
METHODS = ("original", "fold", "window", "rerope", "yarn", "streamingllm", "engine_window", "infllm", "cmr")
ON_THE_HOST = ("infllm", "cmr")  # they choose entries at run time, so that no read alone shows what they do
PARTS = ("start", "kernels", "engine", "reads", "rounds", "latency", "train")
# Largest relative error norm of a read against float64 with the same rounded inputs.
TOLERANCE = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 2e-3}
HOLDS_READ, HOLDS_FROM, HOLDS_ROUND = 0.85, 65536, 1.03  # of the copy's bandwidth; FOLD's round over the original's
ROUND_CONTEXTS = [1024 << power for power in range(8)]
READ_CONTEXTS = [4096 << power for power in range(7)]
# Seconds of ten minutes that a part may take; what it has not measured by then is left out, and said.
SECONDS = {"kernels": 120.0, "engine": 45.0, "reads": 100.0, "rounds": 230.0, "latency": 70.0}
# A demo drafter is trained in what time is left, if that is enough to see it learn.
TRAIN_LEAST_S, TRAIN_SPARE_S = 75.0, 20.0


class Check:
    """One run: where results go, what is there already, and how much time is left."""

    def __init__(self, out: Path, device: torch.device, minutes: float, dry: bool) -> None:
        from harness.provenance import code, machine

        self.device, self.dry, self.out = device, dry, out
        self._ends = time.monotonic() + 60 * minutes
        self._share = minutes / 10
        self._part_ends = self._ends
        self.failed: list[str] = []
        self.left_out: list[str] = []
        out.mkdir(parents=True, exist_ok=True)
        self._path = out / "check.jsonl"
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
        same = {"code": code()["sha256"], "device": name}
        self.rows = self._earlier(same)
        self._file = self._path.open("a", encoding="utf-8")
        fingerprint = machine()
        (out / "fingerprint.json").write_text(json.dumps(fingerprint, indent=1, default=str) + "\n")
        self.add("start", "machine", **same, commit=code()["commit"], torch=torch.__version__)

    def _earlier(self, same: dict[str, str]) -> list[dict[str, Any]]:
        """Rows of earlier starts of the same code on the same device, dry runs apart; an unfinished last line is
        dropped. Raises ValueError for a file that is not one of ours."""
        with suppress(FileNotFoundError):
            content = self._path.read_bytes()
            keep = content.rfind(b"\n") + 1
            if keep < len(content):
                self._path.write_bytes(content[:keep])
            current, found = False, []
            for number, line in enumerate(content[:keep].splitlines(), 1):
                try:
                    row = json.loads(line)
                    if (row["part"], row["key"]) == ("start", "machine"):
                        current = all(row.get(name) == value for name, value in same.items())
                except (ValueError, KeyError, TypeError):
                    raise ValueError(f"{self._path}:{number} is no result; move the file away") from None
                if current and "error" not in row and row.get("dry_run", False) == self.dry:
                    found.append(row)
            return found
        return []

    def begin(self, part: str) -> None:
        """A part's time begins to run."""
        self._part_ends = min(self._ends, time.monotonic() + SECONDS.get(part, math.inf) * self._share)

    def left(self) -> float:
        """Seconds until the part must end."""
        return self._part_ends - time.monotonic()

    def over(self, part: str, key: str, before: float = 0.0) -> bool:
        """Whether the part's time is over (or less than ``before`` seconds of it are left), so that ``key`` and what
        follows is left out; says so once. A dry run has all the time."""
        if self.dry or self.left() > before:
            return False
        self.left_out.append(f"{part} from {key} on")
        print(f"{part:8} {key:36} left out from here on: no time (the same command again measures it)", flush=True)
        return True

    def has(self, part: str, key: str) -> bool:
        """Whether an earlier start has measured this."""
        return any(row["part"] == part and row["key"] == key for row in self.rows)

    def add(self, part: str, key: str, **values: Any) -> None:
        """Print a result and make it survive."""
        row = {"part": part, "key": key, **values, **({"dry_run": True} if self.dry else {})}
        self.rows.append(row)
        self._file.write(json.dumps(row, allow_nan=False) + "\n")
        self._file.flush()
        os.fsync(self._file.fileno())
        told = "  ".join(f"{name} {_short(value)}" for name, value in values.items() if not isinstance(value, list))
        print(f"{part:8} {key:36} {told}", flush=True)

    def fail(self, part: str, key: str, error: str) -> None:
        """A result that is none, in one line."""
        self.failed.append(f"{part} {key}")
        self.add(part, key, error=" ".join(error.split())[:300])

    def select(self, part: str) -> list[dict[str, Any]]:
        """Results of a part."""
        return [row for row in self.rows if row["part"] == part and "error" not in row]

    @property
    def bandwidth(self) -> float:
        """Bytes per second of the copy."""
        return next(row["bytes_per_s"] for row in reversed(self.select("start")) if row["key"] == "copy")


def _short(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return value[:12] if isinstance(value, str) and len(value) == 64 else str(value)


# ------------------------------------------------------------------------------------------------------ shapes and data


def configured(kind: str, name: str) -> dict[str, Any]:
    """conf/<kind>/<name>.yaml as plain data."""
    return read_yaml((ROOT / "conf" / kind / f"{name}.yaml").read_text(encoding="utf-8"))


def read_yaml(text: str) -> dict[str, Any]:
    """The YAML of our own configuration files, where PyYAML may be missing: nested mappings, lists of scalars, both in
    braces or indented, comments. The tests hold it against PyYAML on every file it is used for."""
    root: dict[str, Any] = {}
    open_at: list[tuple[int, Any]] = [(-1, root)]
    last: tuple[dict[str, Any], str] = (root, "")
    for line in text.splitlines():
        line = re.sub(r"(^|\s)#.*", "", line).rstrip()
        if not line:
            continue
        indent = len(line) - len(line.lstrip())
        while indent <= open_at[-1][0]:
            open_at.pop()
        where, (key, found, value) = open_at[-1][1], line.strip().partition(":")
        if line.lstrip().startswith("- "):
            holder, name = last
            holder[name] = [*(holder[name] or []), _scalar(line.strip()[2:])]
        elif found and not value.strip():
            where[key] = {}
            open_at.append((indent, where[key]))
            last = (where, key)
        else:
            where[key] = _scalar(value.strip())
    return root


def _scalar(text: str) -> Any:
    """A YAML scalar, or a list or mapping in brackets, whose words JSON wants quoted."""
    quoted = re.sub(r"(?<![\w.\"-])([A-Za-z_][\w./-]*)", r'"\1"', text)
    for word in ("true", "false", "null"):
        quoted = quoted.replace(f'"{word}"', word)
    try:
        return json.loads(quoted)
    except ValueError:
        return text


def architecture(kind: str, name: str, dry: bool) -> dict[str, Any]:
    """The published shapes, or toy ones of the same kind."""
    shapes = dict(configured(kind, name)["architecture"])
    if not dry:
        return shapes
    small = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}
    small |= {"num_key_value_heads": 2, "head_dim": 16, "global_head_dim": 32, "sliding_window": 24, "markov_rank": 8}
    small |= {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16}
    small |= {"linear_value_head_dim": 16, "max_position_embeddings": 4096}
    shapes |= {key: value for key, value in small.items() if shapes.get(key)}
    if kind == "target":
        return shapes | {"num_hidden_layers": 8 if name == "qwen35" else 6}
    shapes |= {"num_hidden_layers": 2, "num_target_layers": 8 if name == "qwen35" else 6}
    if "layer_types" in shapes:
        shapes["layer_types"] = ["sliding_attention", "full_attention"]
    ids = {"mask_token_id": 1, "target_layer_ids": [1, 3]}
    return shapes | ({"dflash_config": ids} if "dflash_config" in shapes else ids)


def drafter_config(name: str, dry: bool) -> DrafterConfig:
    """A pair's drafter."""
    from harness.drafters import parse_config

    return parse_config(architecture("drafter", name, dry), where=f"conf/drafter/{name}.yaml")


def methods_of(name: str, dry: bool) -> dict[str, Method]:
    """Every method with a pair's options (Appendix B.3)."""
    from methods import make_method

    pair = configured("drafter", name)
    window, train = (16, 64) if dry else (pair["window"], pair["train_length"])
    windowed: dict[str, Any] = {"window": window}
    options: dict[str, dict[str, Any]] = {
        "original": {},
        "fold": windowed,
        "window": windowed,
        "rerope": windowed,
        "yarn": {"reference": train},
        "streamingllm": {"sinks": 4, "recent": 12} if dry else {},
        "engine_window": {"window": 8 if dry else 2048},
        "infllm": windowed | ({"block": 8, "initial": 4, "topk": 2, "representative": 2} if dry else {}),
        "cmr": {"chunk": 4, "topk": 4} if dry else {},
    }
    return {method: make_method(method, **options[method]) for method in METHODS}


def executors_for(check: Check, longest: int) -> Executors:
    """The Triton kernels on a GPU; torch's own where times mean nothing."""
    from harness.engines.reference.fixed import Executors, triton_executors

    return Executors() if check.dry else triton_executors(longest)


def filled_reader(
    config: DrafterConfig, method: Method, context: int, dtype: torch.dtype, device: torch.device, executors: Executors
) -> FixedReader:
    """A method's fixed reader over a made-up context."""
    from harness.engines.reference.fixed import PAGE, FixedReader
    from methods.cache import ContextCache
    from methods.reading import RequestGeometry

    rows = -(-(context + 2 * config.block) // PAGE) * PAGE
    cache = ContextCache(config.geometry(), rows - config.block, dtype, device)
    cache.keys.normal_()
    cache.values.normal_()
    cache.length = context
    reader = FixedReader(method, cache, executors)
    reader.begin(RequestGeometry(context, 1, config.block))
    reader.prepare()
    return reader


def block_of(config: DrafterConfig, dtype: torch.dtype, device: torch.device) -> list[torch.Tensor]:
    """A block's query, keys and values, not rotated."""
    shapes = ((config.heads, config.head_dim), (config.kv_heads, config.head_dim), (config.kv_heads, config.value_dim))
    return [torch.randn(config.block, *shape, device=device).to(dtype) for shape in shapes]


def release() -> None:
    """Give memory back before the next model."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


# ----------------------------------------------------------------------------------------------------------- the parts


def start(check: Check) -> None:
    """The bandwidth of a copy."""
    from harness.diagnostics.latency import copy_bandwidth

    if not check.has("start", "copy"):
        size = 1 << 24 if check.dry else None
        check.add("start", "copy", bytes_per_s=copy_bandwidth(check.device, size))


@torch.inference_mode()
def kernels(check: Check) -> None:
    """Reads against :func:`methods.attention.dense_read` in float64, on the same rounded inputs."""
    from harness.engines.reference.fixed import triton_executors
    from methods.attention import dense_read
    from methods.kernels import unavailable

    if (reason := unavailable()) is not None:
        raise RuntimeError(reason)
    dtypes = (torch.float32,) if check.dry else (torch.bfloat16, torch.float16)
    executors = triton_executors(1 << 18)
    _target_kernel(check, dtypes, executors)
    # FOLD's read of every shape first. Compiling takes most of the time, and pairs of one target have one shape.
    order = [(method, name) for method in METHODS[1:] + METHODS[:1] for name in PAIRS[:4]]
    if check.dry:
        order = [(method, name) for method in ("fold", "streamingllm") for name in ("llama", "gemma")]
    for dtype in dtypes:
        for method_name, name in order:
            config, method = drafter_config(name, check.dry), methods_of(name, check.dry)[method_name]
            key = f"{name} {method_name} {str(dtype).removeprefix('torch.')}"
            if method_name in ON_THE_HOST or check.has("kernels", key):
                continue
            if check.over("kernels", key):
                return
            window = configured("drafter", name)["window"]
            worst = 0.0
            for context in (40,) if check.dry else (1, window, window + 1, window + 5000):
                reader = filled_reader(config, method, context, dtype, check.device, executors)
                block = block_of(config, dtype, check.device)
                reader.choose()
                cache = reader.cache
                for layer in {0, len(config.layers) - 1}:
                    got = reader.read(layer, *block)
                    k, v = (x[layer, :, :context].transpose(0, 1).double() for x in (cache.keys, cache.values))
                    query, keys, values = (x.double() for x in block)
                    want = dense_read(
                        method.plan(config.layers[layer], _request(context, config)),
                        query, k, v, keys, values,
                        rope=config.geometry().rope, scale=config.scale,
                        block_causal=config.layers[layer].block_causal,
                    )  # fmt: skip
                    worst = max(worst, _error(got, want.out))
            _verdict(check, "kernels", key, worst, TOLERANCE[dtype])
            release()


def _request(context: int, config: DrafterConfig) -> Any:
    from methods.reading import RequestGeometry

    return RequestGeometry(context, 1, config.block)


def _target_kernel(check: Check, dtypes: Sequence[torch.dtype], executors: Executors) -> None:
    """The target's causal read of a step and of a block, in shuffled pages and as it lies."""
    from methods.paged import torch_attend

    heads, kv_heads, dim, page = (4, 2, 16, 4) if check.dry else (32, 8, 128, 16)
    for dtype in dtypes:
        for rows, context in ((1, 37), (5, 64)) if check.dry else ((1, 5000), (10, 5000), (16, 40_000)):
            key = f"target {rows} rows {context} {str(dtype).removeprefix('torch.')}"
            if check.has("kernels", key):
                continue
            pages = -(-context // page)
            q = torch.randn(rows, heads, dim, device=check.device).to(dtype)
            keys, values = (torch.randn(pages, page, kv_heads, dim, device=check.device).to(dtype) for _ in range(2))
            table = torch.randperm(pages, device=check.device).to(torch.int32)
            length = torch.tensor([context], dtype=torch.int32, device=check.device)
            scale = dim**-0.5
            want, _ = torch_attend(
                q.double(), keys.double(), values.double(), table, length, left=None, right=0, scale=scale
            )
            attend = executors.attend
            paged, _ = attend(q, keys, values, table, length, left=None, right=0, scale=scale)
            k, v = (x[table.long()].flatten(0, 1)[None] for x in (keys, values))
            flat, _ = attend(q, k, v, None, length, left=None, right=0, scale=scale)
            _verdict(check, "kernels", key, max(_error(paged, want), _error(flat, want)), TOLERANCE[dtype])


def _error(got: torch.Tensor, want: torch.Tensor) -> float:
    """The norm of the difference over the norm; NaN is the largest."""
    error = float((got.double() - want).norm() / want.norm())
    return math.inf if math.isnan(error) else error


def _verdict(check: Check, part: str, key: str, error: float, allowed: float) -> None:
    if error <= allowed:
        check.add(part, key, relative_error=error, allowed=allowed)
    else:
        check.fail(part, key, f"relative error {error:.3g}, allowed {allowed:g}")


def engine(check: Check) -> None:
    """Tokens of fixed steps (CUDA graphs on a GPU) against those of the ordinary path, across the window's border."""
    from harness.requests import Request

    config = drafter_config("qwen35", dry=True)
    # float32 on both sides: equal tokens are then to be expected, ties aside
    dtype = torch.float32
    ids = tuple(int(i) for i in torch.randint(2, 128, (12,), generator=torch.Generator().manual_seed(0)))
    request = Request("toy", "toy", "toy", ids, 12 if check.dry else 48, (), {})
    # A step of a toy model takes a minute in the interpreter: the dry run has torch's executors here.
    executors = executors_for(check, 4096)
    plain, fixed = (toy_engine(config, "llama", dtype, check.device, each) for each in (None, executors))
    for name, method in methods_of("qwen35", dry=True).items():
        key = f"{name} float32"
        if check.has("engine", key):
            continue
        if check.over("engine", key):
            return
        want, got = plain.decode(request, method), fixed.decode(request, method)
        if got.output_ids == want.output_ids:
            counted = {"rounds": got.activity["rounds"], "window_only": got.activity.get("window_only_rounds", 0)}
            check.add("engine", key, equal=True, **counted)
        else:
            first = next(i for i, (a, b) in enumerate(zip(got.output_ids, want.output_ids, strict=False)) if a != b)
            check.fail("engine", key, f"fixed steps give another token at {first} of {len(want.output_ids)}")


def toy_engine(
    config: DrafterConfig, target: str, dtype: torch.dtype, device: torch.device, executors: Executors | None
) -> ReferenceEngine:
    """A small target with a drafter of ``config``, random weights."""
    from harness.drafters import random_drafter
    from harness.engines.base import EngineInfo
    from harness.engines.reference.engine import ReferenceEngine
    from harness.engines.reference.target import random_target

    shapes = architecture("target", target, dry=True) | {"num_hidden_layers": config.num_target_layers}
    made = random_target(shapes, dtype, device, seed=2)
    info = EngineInfo("reference", "check", str(device), "", str(dtype), {})
    drafter = random_drafter(config, dtype=dtype, device=device, seed=3)
    return ReferenceEngine(made, drafter, prefill_chunk=64, info=info, executors=executors)


@torch.inference_mode()
def reads(check: Check) -> None:
    """Bytes that a read must move over its time, all layers of a drafter in one graph so that no cache holds them."""
    from harness.diagnostics.latency import replays
    from harness.engines.reference.fixed import Fixed

    dtype = torch.float32 if check.dry else torch.bfloat16
    executors = executors_for(check, max(READ_CONTEXTS) + 64)  # splits are chosen once, for the longest
    for context in (64, 200) if check.dry else READ_CONTEXTS[::-1]:  # the long ones matter most
        for name in PAIRS[:4]:
            config = drafter_config(name, check.dry)
            methods = methods_of(name, check.dry)
            for method_name in ("fold", "original", "window"):
                key = f"{name} {method_name} {context}"
                if check.has("reads", key):
                    continue
                if check.over("reads", key):
                    return
                reader = filled_reader(config, methods[method_name], context, dtype, check.device, executors)
                block = block_of(config, dtype, check.device)
                reader.choose()
                layers = range(len(config.layers))
                step = Fixed(lambda: [reader.read(layer, *block) for layer in layers][-1], check.device)  # noqa: B023
                step()
                reader.begin(_request(context, config))
                reader.prepare()
                step()
                entries = reader.activity()["entries_read"]
                size = entries * config.kv_heads * (config.head_dim + config.value_dim) * dtype.itemsize
                ms = replays(step, check.device, 2 if check.dry else 50)
                rate = size / (ms / 1e3)
                check.add("reads", key, ms=ms, bytes=size, bytes_per_s=rate, of_copy=rate / check.bandwidth)
                release()


def rounds(check: Check) -> None:
    """A round of every method; the Llama shape first, FOLD beside the original."""
    for place, (name, target) in enumerate(TARGETS.items()):
        # Half of the time for the first pair, then equal parts of what is left.
        share = check.left() / (2 if place == 0 else len(TARGETS) - place)
        if check.over("rounds", name, before=10):
            return
        until = check.left() - share
        try:
            _rounds_of(check, name, target, until)
        except Exception as error:  # the next pair may still work
            if target_needs_transformers(target) and importlib.util.find_spec("transformers") is None:
                check.left_out.append(f"rounds of {name}: {error}; drafts alone instead")
                _drafts_of(check, name, until)
            else:
                check.fail("rounds", name, f"{type(error).__name__}: {error}")
        release()


def target_needs_transformers(name: str) -> bool:
    """Whether the reference engine has no path of its own for a target."""
    return configured("target", name)["architecture"]["model_type"] not in ("llama", "qwen3")


@torch.inference_mode()
def _drafts_of(check: Check, name: str, until: float) -> None:
    """Drafts and commits without a target: an embedding and a head of random numbers stand in for its own."""
    from harness.diagnostics.latency import replays
    from harness.drafters import random_drafter
    from harness.engines.reference.fixed import PAGE, FixedDrafting
    from methods.cache import ContextCache

    dtype, config = torch.float32 if check.dry else torch.bfloat16, drafter_config(name, check.dry)
    drafter = random_drafter(config, dtype=dtype, device=check.device)
    embedding = torch.randn(config.vocab, config.hidden, device=check.device).to(dtype)
    drafter.bind(embedding, embedding)
    contexts = [64, 200] if check.dry else ROUND_CONTEXTS
    rows = -(-(contexts[-1] + 2 * (config.proposals + 1)) // PAGE) * PAGE
    cache = ContextCache(config.geometry(), rows - config.block, dtype, check.device)
    for held in (cache.keys, cache.values):
        held.normal_()
    executors = executors_for(check, cache.capacity + config.block)
    for method_name, method in methods_of(name, check.dry).items():
        if method_name in ON_THE_HOST:
            continue
        drafting = FixedDrafting(drafter, method, cache, executors)
        for context in contexts[::-1]:
            key = f"{name} {method_name} {context}"
            if check.has("drafts", key):
                continue
            if check.over("drafts", key, before=until):
                return
            cache.length = context
            drafting.begin(_request(context, config))
            check.add("drafts", key, draft_and_commit_ms=replays(drafting.replay, check.device, 2 if check.dry else 20))
        del drafting
        release()


def full_engine(check: Check, name: str, target: str) -> ReferenceEngine:
    """A pair at the published shapes with random weights."""
    from harness.drafters import random_drafter
    from harness.engines.base import EngineInfo
    from harness.engines.reference.engine import ReferenceEngine
    from harness.engines.reference.target import random_target

    dtype = torch.float32 if check.dry else torch.bfloat16
    made = random_target(architecture("target", target, check.dry), dtype, check.device)
    config = drafter_config(name, check.dry)
    drafter = random_drafter(config, dtype=dtype, device=check.device)
    drafter.config.check_target(made.layers, made.embedding.shape[1], made.vocab)
    info = EngineInfo("reference", "check", str(check.device), "", str(dtype), {"graphs": not check.dry})
    executors = executors_for(check, min(made.max_positions, 1 << 18) + 64)
    return ReferenceEngine(made, drafter, prefill_chunk=1024, info=info, executors=executors)


def _rounds_of(check: Check, name: str, target: str, until: float) -> None:
    from harness.diagnostics.latency import clock

    pair = full_engine(check, name, target)
    model, drafter = pair.pair
    assert drafter is not None
    repeats = 2 if check.dry else 10
    room = (repeats + 2) * 48
    contexts = [64, 200] if check.dry else [c for c in ROUND_CONTEXTS if c <= model.max_positions]
    methods = methods_of(name, check.dry)
    for context in contexts[::-1]:  # long contexts first: a cut then costs the least
        for method_name, method in {"ar": None, **methods}.items():
            key = f"{name} {method_name} {context}"
            if check.has("rounds", key):
                continue
            if check.over("rounds", key, before=until):
                return
            try:
                drafting = pair.pretend(context, room, method)
            except torch.OutOfMemoryError:
                check.left_out.append(f"rounds of {key}: the device's memory does not hold it")
                pair.close()
                release()
                continue
            if drafting is None:
                check.add("rounds", key, step_ms=statistics.median(clock(partial(pair.step, 1), check.device, repeats)))
                continue
            times = clock(partial(pair.round, 1, drafting), check.device, repeats)
            extra = drafting.reader.extra_bytes()
            check.add("rounds", key, round_ms=statistics.median(times), extra_bytes=extra)


def latency(check: Check) -> None:
    """Figure 1: shares of a step and of a round, Llama's shape, the original drafter and FOLD."""
    import csv
    from dataclasses import asdict

    from harness.diagnostics.latency import measure

    pair = full_engine(check, "llama", "llama")
    methods = {name: method for name, method in methods_of("llama", check.dry).items() if name in ("original", "fold")}
    contexts = [64, 200] if check.dry else [c for c in ROUND_CONTEXTS if not check.has("latency", f"SD fold {c}")]
    for parts in measure(
        pair, contexts, methods, repeats=2 if check.dry else 10, bandwidth=check.bandwidth, say=lambda text: None
    ):
        first = parts[0]
        rows = [
            {name: None if value != value else value for name, value in asdict(part).items()}  # NaN is no JSON
            for part in parts
        ]
        shares = {part.part: part.ms for part in parts}
        check.add("latency", f"{first.step} {first.method} {first.context}", **shares, rows=rows)
        # A context that an earlier start was cut in is measured from its beginning again.
        newest = {entry["key"]: entry for entry in check.select("latency")}
        every = [row for entry in newest.values() for row in entry["rows"]]
        with (check.out / "latency.csv").open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(every[0]))
            writer.writeheader()
            writer.writerows(every)
        if first.method == "fold" and check.over("latency", f"beyond {first.context}", before=5):
            return


def train(check: Check) -> None:
    """The demo drafter's training for the seconds that are left, if its target is in the cache."""
    seconds = check.left() - TRAIN_SPARE_S
    if check.over("train", "demo drafter", before=TRAIN_LEAST_S + TRAIN_SPARE_S):
        return
    try:
        from data_prep.demo.target import ensure_target

        target = ensure_target(offline=True)
    except Exception as error:  # no copy of it, or not the packages that would read it
        check.add("train", "demo drafter", left_out=" ".join(str(error).split())[:160])
        return
    if check.dry:
        check.add("train", "demo drafter", left_out="the dry run does not train")
        return
    with tempfile.TemporaryDirectory(prefix="gpu-check-train-") as work:
        command = [sys.executable, "-m", "data_prep.demo.train", "--offline", "--target", str(target)]
        command += ["--minutes", f"{seconds / 60:.2f}", "--work", work, "--export", f"{work}/drafter"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds + 60)
    if done.returncode:
        raise RuntimeError((done.stderr.strip().splitlines() or ["training failed without a word"])[-1])
    check.add("train", "demo drafter", seconds=seconds, said=(done.stdout.strip().splitlines() or [""])[-1][:200])


# --------------------------------------------------------------------------------------------------------- the summary


def summary(check: Check) -> list[str]:
    """The page that stands beside the results: what was measured, and which bars hold."""
    lines = ["# GPU check", ""]
    if check.dry:
        lines += ["**Dry run on a CPU at toy sizes: every time in it is meaningless.**", ""]
    name = torch.cuda.get_device_name(check.device) if check.device.type == "cuda" else "CPU"
    lines += [f"- Device: {name}; torch {torch.__version__}; weights are random, contexts made up"]
    if any(row["key"] == "copy" for row in check.select("start")):
        lines += [f"- Copy: {check.bandwidth / 1e9:.0f} GB/s (bytes read and written)"]
    errors = [row["relative_error"] for row in check.select("kernels")]
    lines += [f"- Kernels: {len(errors)} reads against float64, largest relative error {max(errors, default=0.0):.2g}"]
    lines += [f"- Failed: {'; '.join(check.failed) or 'nothing'}"]
    lines += [f"- Left out for want of time: {'; '.join(check.left_out) or 'nothing'}"]
    lines += _bar_reads(check) + _bar_rounds(check) + _round_table(check)
    return lines


def _bar_reads(check: Check) -> list[str]:
    """Bar C, first half."""
    long = [row for row in check.select("reads") if " fold " in row["key"] and _context(row) >= HOLDS_FROM]
    if not long:
        return [f"- Far read at {HOLDS_READ:.0%} of the copy from {HOLDS_FROM // 1024}K on: not measured"]
    worst = min(long, key=lambda row: row["of_copy"])
    holds = "holds" if worst["of_copy"] >= HOLDS_READ else "does NOT hold"
    count = len(TARGETS) * sum(context >= HOLDS_FROM for context in READ_CONTEXTS)
    return [
        f"- FOLD's read at {HOLDS_READ:.0%} of the copy from {HOLDS_FROM // 1024}K on: {holds} "
        f"(least {worst['of_copy']:.1%}, {worst['key']}; {len(long)} of {count} reads measured)"
    ]


def _bar_rounds(check: Check) -> list[str]:
    """Bar C, second half."""
    found = {row["key"]: row["round_ms"] for row in check.select("rounds") if "round_ms" in row}
    ratios = {
        context: found[f"llama fold {context}"] / found[f"llama original {context}"]
        for context in (32768, 65536, 131072)
        if {f"llama fold {context}", f"llama original {context}"} <= found.keys()
    }
    if not ratios:
        return [f"- FOLD's round over the original's ≤ {HOLDS_ROUND}, Llama's shape at 32K to 128K: not measured", ""]
    worst = max(ratios.values())
    told = ", ".join(f"{context // 1024}K {ratio:.3f}" for context, ratio in sorted(ratios.items()))
    holds = "holds" if worst <= HOLDS_ROUND else "does NOT hold"
    return [f"- FOLD's round over the original's ≤ {HOLDS_ROUND}, Llama's shape: {holds} ({told})", ""]


def _round_table(check: Check) -> list[str]:
    rows = check.select("rounds")
    if not rows:
        return []
    found = {row["key"]: row.get("round_ms", row.get("step_ms")) for row in rows}
    contexts = sorted({_context(row) for row in rows})
    header = ["pair", "method", *(f"{context / 1024:g}K" for context in contexts)]
    lines = ["Milliseconds of a round (ar: of a step)", "", f"| {' | '.join(header)} |", "|---" * len(header) + "|"]
    for name in TARGETS:
        for method in ("ar", *METHODS):
            cells = [found.get(f"{name} {method} {context}") for context in contexts]
            if any(cell is not None for cell in cells):
                told = " | ".join("" if cell is None else f"{cell:.3f}" for cell in cells)
                lines.append(f"| {name} | {method} | {told} |")
    return [*lines, ""]


def _context(row: dict[str, Any]) -> int:
    return int(row["key"].rsplit(" ", 1)[1])


# ---------------------------------------------------------------------------------------------------------- the command

RUN: dict[str, Callable[[Check], None]] = {
    "start": start,
    "kernels": kernels,
    "engine": engine,
    "reads": reads,
    "rounds": rounds,
    "latency": latency,
    "train": train,
}


def parts_of(text: str) -> Iterator[str]:
    """The parts asked for, in their order, the start always."""
    asked = text.split(",")
    if unknown := [part for part in asked if part not in PARTS]:
        raise argparse.ArgumentTypeError(f"no part {unknown[0]!r}; there are {', '.join(PARTS)}")
    return (part for part in PARTS if part in asked or part == "start")


def minutes_of(text: str) -> float:
    """A positive number of minutes."""
    with suppress(ValueError):
        if 0 < (value := float(text)) < math.inf:
            return value
    raise argparse.ArgumentTypeError(f"{text!r} is no number above 0")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the check; see the module."""
    parser = argparse.ArgumentParser("gpu-check", description="What only a GPU can show, in ten minutes.")
    parser.add_argument("--out", type=Path, help="where to write (default: results/gpu/<device>)")
    parser.add_argument("--minutes", type=minutes_of, default=10.0, help="all parts together (default: %(default)s)")
    parser.add_argument("--parts", type=parts_of, default=iter(PARTS), help=f"of {','.join(PARTS)} (default: all)")
    parser.add_argument("--dry-run", action="store_true", help="toy sizes on the CPU; times mean nothing")
    given = parser.parse_args(arguments)
    if not given.dry_run and not torch.cuda.is_available():
        print("gpu-check: torch sees no GPU on this machine; --dry-run executes here what needs none", file=sys.stderr)
        return 2
    device = torch.device("cpu") if given.dry_run else torch.device("cuda", 0)
    out = given.out
    if out is None and given.dry_run:
        out = Path(tempfile.mkdtemp(prefix="gpu-check-dry-"))
    elif out is None:
        name = torch.cuda.get_device_name(device).lower().replace(" ", "-")
        out = ROOT / "results" / "gpu" / name
    try:
        check = Check(out, device, given.minutes, given.dry_run)
    except OSError as error:
        print(f"gpu-check: {out} cannot be written ({error.strerror}); give another folder: --out", file=sys.stderr)
        return 2
    except ValueError as error:
        print(f"gpu-check: {error}", file=sys.stderr)
        return 2
    for part in given.parts:
        check.begin(part)
        try:
            RUN[part](check)
        except Exception as error:  # what comes after it can still be measured
            check.fail(part, "all", f"{type(error).__name__}: {error}")
            if part == "start":
                break
        except KeyboardInterrupt:
            print(f"gpu-check: interrupted in {part}; the same command measures what is missing", file=sys.stderr)
            return 130
        finally:
            (out / "summary.md").write_text("\n".join(summary(check)), encoding="utf-8")
        release()
    print("\n".join(summary(check)))
    print(f"written: {out}")
    return 1 if check.failed else 0


if __name__ == "__main__":
    sys.exit(main())
