"""What a method's read costs in memory: bytes per token, and at a pair's maximum context.

The paper keeps a second, unrotated copy of the drafter's keys and values, its side cache (Appendix B.4). Values carry
no position, so here a serving engine holds unrotated *keys* only, and the reference engine, whose storage is its own,
holds no second copy at all beyond a rotated window. ``tests/harness/test_memory.py`` computes all three from allocated
tensors.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

import yaml  # type: ignore[import-untyped]

BF16 = 2  # bytes
GIB = 1 << 30
# The paper's names of the targets whose drafters' side cache it gives.
_IN_PAPER = {"llama": "Llama-3.1-8B", "gemma": "Gemma-4-12B", "qwen3": "Qwen3-8B", "qwen35": "Qwen3.5-9B"}


@dataclass(frozen=True)
class PairMemory:
    """A pair's drafter in bfloat16.

    key_bytes, value_bytes: of all layers' context entries, per token. context: the target's maximum, in tokens. window:
    bytes that the reference engine holds beside them for FOLD. paper_gib: the paper's side cache, None where it gives
    none.
    """

    name: str
    context: int
    key_bytes: int
    value_bytes: int
    window: int
    paper_gib: float | None

    @property
    def side_cache(self) -> int:
        """Bytes of unrotated keys at the maximum context: what FOLD adds in a serving engine."""
        return self.key_bytes * self.context

    @property
    def paper_side_cache(self) -> int:
        """Bytes of the paper's side cache, keys and values, at the same context, by our arithmetic."""
        return (self.key_bytes + self.value_bytes) * self.context


def pair_memory(drafter: Mapping[str, Any], target: Mapping[str, Any], paper_gib: float | None) -> PairMemory:
    """From the contents of conf/drafter/*.yaml and conf/target/*.yaml, both with an ``architecture``."""
    # torch comes with the first two: seconds that --help must not wait for
    from harness.drafters import parse_config
    from methods import make_method

    config = parse_config(drafter["architecture"], where=f"conf/drafter/{drafter['name']}.yaml")
    entry = len(config.layers) * config.kv_heads * BF16
    fold = make_method("fold", window=drafter["window"])
    window = reference_bytes(config.geometry(), fold, target["max_context"])
    context = target["max_context"]
    return PairMemory(
        drafter["name"], context, entry * config.head_dim, entry * config.value_dim, window, paper_gib
    )


def reference_bytes(geometry: Any, method: Any, context: int) -> int:
    """Bytes that the reference engine's GPU path holds for a method beyond unrotated keys and values, of tensors that
    are allocated without memory."""
    import torch

    from harness.engines.reference.fixed import PAGE, Executors, FixedReader
    from methods.cache import ContextCache

    rows = -(-(context + geometry.block) // PAGE) * PAGE
    cache = ContextCache(geometry, rows - geometry.block, torch.bfloat16, "meta")
    return FixedReader(method, cache, Executors()).extra_bytes()


def paper_pairs() -> Iterator[PairMemory | str]:
    """The pairs of conf/drafter that say their shapes (the six of Table 1), with the published numbers; or, in one
    line, why a pair's shapes are of no use."""
    published = {}
    with files("results.paper").joinpath("text.csv").open(encoding="utf-8") as lines:
        for row in csv.DictReader(lines):
            if row["metric"] == "side cache GiB" and row["row"] == "FOLD":
                published[row["group"]] = float(row["value"])
    for file in sorted(files("conf").joinpath("drafter").iterdir(), key=lambda file: file.name):
        if not file.name.endswith(".yaml"):
            continue
        drafter = yaml.safe_load(file.read_text(encoding="utf-8"))
        if "architecture" in drafter:
            try:
                source = files("conf").joinpath("target", f"{drafter['target']}.yaml").read_text("utf-8")
                published_gib = published.get(_IN_PAPER.get(drafter["target"], ""))
                yield pair_memory(drafter, yaml.safe_load(source), published_gib)
            except (ValueError, KeyError, TypeError, OSError) as error:
                yield f"{file.name}: {' '.join(str(error).split())}"


def memory_lines(chosen: str | None = None) -> list[str]:
    """The table that ``fold-bench --cfg`` prints, as YAML comments; ``chosen`` is the drafter to point at."""
    head = f"#   {'pair':<13} {'max context':>11} {'B/token':>8} {'serving':>9} {'reference':>10} {'paper':>9}"
    lines = [
        "# Extra memory of FOLD in bfloat16. serving: unrotated keys, a token and at the maximum context. reference:",
        "# the rotated window of the reference engine on a GPU. paper: its side cache of keys and values (App. B.4).",
        head,
    ]
    for pair in paper_pairs():
        if isinstance(pair, str):
            lines.append(f"#   {pair}")
            continue
        paper = "" if pair.paper_gib is None else f"{pair.paper_gib:g} GiB"
        mark = ">" if pair.name == chosen else " "
        lines.append(
            f"# {mark} {pair.name:<13} {pair.context:>11} {pair.key_bytes:>8} {pair.side_cache / GIB:>5.2f} GiB "
            f"{pair.window / GIB:>6.3f} GiB {paper:>9}"
        )
    return lines
