"""Every method on tiny random pairs at the architectures of the paper: drafts equal the reference drafter's.

Llama and z-lab's DFlash are in ``test_plugin_methods.py``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from methods import make_method
from tests.vllm.pairs import deepspec_gemma4, deepspec_qwen3, dflash, mixed_dflash, save_pair
from tests.vllm.replay import Reference
from tests.vllm.running import Guide, Running, prompt
from tests.vllm.test_plugin_methods import METHODS
from tests.vllm.torchvision_stub import torchvision_importable

PAIRS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3 dflash": ("qwen3", dflash()),
    "qwen3 deepspec dflash": ("qwen3", deepspec_qwen3(rank=0)),
    "qwen3 dspark": ("qwen3", deepspec_qwen3(rank=16)),
    "gemma4 deepspec dflash": ("gemma4", deepspec_gemma4(rank=0)),
    "gemma4 dspark": ("gemma4", deepspec_gemma4(rank=16)),
    "qwen3_5 dflash, five layers sliding": ("qwen3_5", mixed_dflash()),
}
LIMIT = 24
# Two logits are tied if they are within a few rounding steps of each other: bfloat16's is 1/8 from 16 on.
TIE = {"float32": 0.01, "bfloat16": 0.2}
LONG, CROSSING = prompt(280, 1), prompt(50, 2)


@pytest.fixture(scope="module", params=PAIRS)
def opened(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Running, Reference, list[list[int]]]]:
    target, drafter = PAIRS[request.param]
    folder = tmp_path_factory.mktemp(target)
    # vLLM's linear attention on a CPU is bfloat16 alone.
    half = target == "qwen3_5"
    pair = save_pair(folder, target, drafter, context=512, dtype="bfloat16" if half else "float32")
    more = {"mamba_ssm_cache_dtype": "float32"} if half else {}
    with torchvision_importable(folder / "stub"):
        running = Running(pair, "fold", METHODS["fold"] | {"layers": "all"}, context=512, chunk=128, **more)
        outputs = [running.generate(ids, LIMIT).output for ids in (LONG, CROSSING)]
        yield running, Reference(pair), outputs
        running.close()


@pytest.mark.parametrize("name", METHODS)
def test_drafts_equal_the_reference_drafters(
    name: str, opened: tuple[Running, Reference, list[list[int]]]
) -> None:
    running, reference, outputs = opened
    method = make_method(name, **METHODS[name])
    running.use(method)
    for index, ids in enumerate((LONG, CROSSING)):
        run = running.generate(ids, LIMIT, Guide(ids + outputs[index], seed=index))
        assert run.output == outputs[index]
        half = running.pair.dtype == "bfloat16"
        found = reference.compare(method, ids, LIMIT, run, running.states if half else None)
        # One near tie can return in a few rounds: the block slides over the same text.
        found.check(tie=TIE[running.pair.dtype], most=0.5 if half else 0.4)
        assert found.rounds + found.beyond == run.report["rounds"]


def test_another_methods_drafts_are_told_apart(opened: tuple[Running, Reference, list[list[int]]]) -> None:
    running, reference, outputs = opened
    fold, window = (make_method(name, **METHODS[name]) for name in ("fold", "window"))
    running.use(fold)
    run = running.generate(LONG, LIMIT, Guide(LONG + outputs[0], seed=5))
    found = reference.compare(window, LONG, LIMIT, run, running.states if running.pair.dtype == "bfloat16" else None)
    assert any(gap > TIE[running.pair.dtype] for *_, gap in found.wrong)


def test_the_side_cache_takes_half_of_the_papers_bytes(opened: tuple[Running, Reference, list[list[int]]]) -> None:
    running, _, _ = opened
    config, itemsize = running.pair.config, 2 if running.pair.dtype == "bfloat16" else 4
    layers, key = len(config.layers), config.kv_heads * config.head_dim * itemsize
    hybrid = len(running.runner.kv_cache_config.kv_cache_groups) > 1
    held = layers + layers % 2 if hybrid else layers  # hybrid targets want pages of one size, two layers' keys in each
    running.use(make_method("fold", **METHODS["fold"]))
    assert running.generate(CROSSING, 2).report["side_cache_bytes_per_token"] == held * key
