"""``weights=random``: the published shapes without their weights, to measure time and memory where no checkpoint is.

A target and a drafter are built from the ``architecture`` of their configuration with random weights, and decode random
token ids. What depends on shapes alone (time of a step and of a round, bytes held and read) is then real; what depends
on the models' words (acceptance, speedup, outputs) means nothing and is reported nowhere. Runs carry the mark in
``run.json``, in the engine's settings and in every record.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.records import RANDOM_WEIGHTS

if TYPE_CHECKING:
    from data_prep.config import BenchmarkConfig
    from harness.config import TargetConfig
    from harness.requests import Request, RequestFile

RANDOM = "random"  # the value of weights= and the name of the benchmark's loader
SEED = 0
__all__ = ["RANDOM", "RANDOM_WEIGHTS", "SEED", "length_in_tokens", "synthetic_facts", "synthetic_requests"]


def length_in_tokens(level: str) -> int:
    """ "4K" is 4096 tokens, "512" is 512. Raises ValueError for anything else."""
    number = level.removesuffix("K")
    if not number.isdecimal() or not int(number):
        raise ValueError(f"level {level!r} is no length; write 512 or 4K")
    return int(number) * (1024 if level.endswith("K") else 1)


def synthetic_facts(architecture: Mapping[str, Any]) -> dict[str, Any]:
    """What run.json says of a model that has no checkpoint."""
    return {"weights": RANDOM, "seed": SEED, "architecture": dict(architecture)}


def synthetic_requests(benchmark: BenchmarkConfig, target: TargetConfig, data_dir: Path) -> RequestFile:
    """The request file of random token ids: ``benchmark.n`` prompts at each of ``benchmark.levels`` that the target
    can hold. The same ids on every machine. Raises ValueError if no level fits, OSError if it cannot be written."""
    from harness.requests import RequestFile, request_path, required_context, write_requests

    fits = [
        level
        for level in benchmark.levels
        if required_context(length_in_tokens(level), benchmark.max_new_tokens) <= target.max_context
    ]
    if not fits:
        raise ValueError(
            f"benchmark.levels={benchmark.levels}: none fits target {target.name}'s {target.max_context} tokens"
        )
    path = request_path(data_dir, benchmark.name, target.name)
    left_out = {"longer than the target's context": len(benchmark.levels) - len(fits)}
    counts = {"in": len(benchmark.levels), "kept": len(fits), "excluded": left_out if left_out else {}}
    prompts = _prompts(benchmark, fits, int(target.architecture["vocab_size"]))
    write_requests(path, prompts, {"weights": RANDOM, "seed": SEED, "counts": {f"{RANDOM} levels": counts}})
    return RequestFile(path)


def _prompts(benchmark: BenchmarkConfig, levels: list[str], vocab: int) -> Iterator[Request]:
    from harness.requests import Request

    for level in levels:
        for number in range(benchmark.n or 1):
            draw = random.Random(f"{SEED}/{level}/{number}")
            ids = tuple(draw.randrange(vocab) for _ in range(length_in_tokens(level)))
            name = f"{RANDOM}-{level}-{number}"
            # No stop token: every request then runs to its limit, and none ends in its first round.
            yield Request(name, benchmark.name, RANDOM, ids, benchmark.max_new_tokens, (), {"level": level})
