"""The demo pair inside the real engine: a trained drafter's drafts equal the reference drafter's, round by round.

Weights and activations are float32, so that the two implementations differ by rounding alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.drafters import read_config
from harness.engines.vllm.drafter_copy import copy_drafter
from methods import make_method
from tests.vllm.pairs import Pair
from tests.vllm.replay import Reference, States
from tests.vllm.running import Running

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
WINDOW, LIMIT = 128, 16
METHODS: dict[str, dict[str, Any]] = {
    "original": {},
    "window": {"window": WINDOW},
    "streamingllm": {"sinks": 4, "recent": 124},
    "yarn": {"reference": 256},
    "rerope": {"window": WINDOW, "reference": 256},
    "infllm": {"window": WINDOW, "block": 32, "initial": 32, "topk": 2},
    "cmr": {"chunk": 16, "topk": 8},
    "fold": {"window": WINDOW, "alpha": 2.0},
}
# Three prefill chunks of 128 with a long memory; and a context that grows out of the window while decoding.
LENGTHS = (290, 122)


@pytest.fixture(scope="module")
def pair(demo_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    drafter = ROOT / "data_prep" / "demo" / "drafter"
    served = tmp_path_factory.mktemp("demo") / "served"
    copy_drafter(drafter, served, context=512, runner_v2=False)
    return Pair(Path(demo_target), drafter, served, read_config(drafter))


@pytest.fixture(scope="module")
def prompts(demo_target: Path) -> list[list[int]]:
    """The beginning of the project's own description."""
    from transformers import AutoTokenizer

    ids = AutoTokenizer.from_pretrained(demo_target)((ROOT / "README.md").read_text()).input_ids
    return [list(ids[:length]) for length in LENGTHS]


@pytest.fixture(scope="module")
def reference(pair: Pair) -> Reference:
    return Reference(pair)


@pytest.fixture(scope="module")
def running(pair: Pair) -> Iterator[Running]:
    engine = Running(pair, "fold", METHODS["fold"], context=512, chunk=128, kv_cache_memory_bytes=256 << 20)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def known(running: Running, reference: Reference, prompts: list[list[int]]) -> list[tuple[list[int], torch.Tensor]]:
    """What the target says after each prompt, and its features of the whole sequence."""
    found = []
    for ids in prompts:
        output = running.generate(ids, LIMIT).output
        found.append((output, reference.states(ids, output).features(0, len(ids) + len(output))))
    return found


@pytest.mark.parametrize("name", METHODS)
def test_drafts_equal_the_reference_drafters(
    name: str,
    running: Running,
    reference: Reference,
    prompts: list[list[int]],
    known: list[tuple[list[int], torch.Tensor]],
) -> None:
    method = make_method(name, **METHODS[name])
    running.use(method)
    accepted: list[int] = []
    for ids, (output, features) in zip(prompts, known, strict=True):
        run = running.generate(ids, LIMIT)
        assert run.output == output
        # The target's attention is asked for as the rounds go; its features are the same for all methods.
        shared = States(lambda start, end, all_=features: all_[start:end], lambda length: torch.empty(0))
        found = reference.compare(method, ids, LIMIT, run, None if name == "cmr" else shared)
        found.check(tie=1e-3)
        assert found.rounds + found.beyond == run.report["rounds"]
        accepted += found.accepted
    assert 0 in accepted and max(accepted) > 0
