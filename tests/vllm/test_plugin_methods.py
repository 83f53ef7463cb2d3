"""Every method inside the real engine drafts what the reference drafter drafts on the same states, round by round."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from methods import make_method
from tests.vllm.pairs import Pair, dflash, save_pair
from tests.vllm.replay import Reference
from tests.vllm.running import Guide, Running, prompt

WINDOW, LIMIT = 64, 48
METHODS: dict[str, dict[str, Any]] = {
    "original": {},
    "window": {"window": WINDOW},
    "streamingllm": {"sinks": 4, "recent": 60},
    "yarn": {"reference": 128},
    "rerope": {"window": WINDOW, "reference": 128},
    "infllm": {"window": WINDOW, "block": 16, "initial": 16, "topk": 3},
    "cmr": {"chunk": 8, "topk": 6, "refresh": 3},
    "fold": {"window": WINDOW, "alpha": 2.0},
    "engine_window": {"window": WINDOW},
}
# Three prefill chunks of 128 with a long memory; and a context that grows out of the window while decoding.
LONG, CROSSING = prompt(300, 1), prompt(40, 2)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return save_pair(tmp_path_factory.mktemp("llama"), "llama", dflash(layers=3), context=512)


@pytest.fixture(scope="module")
def reference(pair: Pair) -> Reference:
    return Reference(pair)


@pytest.fixture(scope="module")
def running(pair: Pair) -> Iterator[Running]:
    engine = Running(pair, "fold", METHODS["fold"], context=512, chunk=128)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def outputs(running: Running) -> list[list[int]]:
    """What the target says after the two prompts."""
    return [running.generate(ids, LIMIT).output for ids in (LONG, CROSSING)]


@pytest.mark.parametrize("name", METHODS)
def test_drafts_equal_the_reference_drafters_at_every_acceptance(
    name: str, running: Running, reference: Reference, outputs: list[list[int]]
) -> None:
    method = make_method(name, **METHODS[name])
    running.use(method)
    accepted: set[int] = set()
    for index, ids in enumerate((LONG, CROSSING)):
        run = running.generate(ids, LIMIT, Guide(ids + outputs[index], seed=index))
        assert run.output == outputs[index]
        found = reference.compare(method, ids, LIMIT, run)
        found.check(tie=0.01)
        assert found.rounds + found.beyond == run.report["rounds"]
        accepted.update(found.accepted)
    assert accepted == set(range(8))  # 0 to K accepted drafts all occurred


@pytest.mark.parametrize("name", [name for name in METHODS if name not in ("infllm", "cmr")])
def test_counters_are_those_of_the_reference_reader(
    name: str, running: Running, reference: Reference, outputs: list[list[int]]
) -> None:
    method = make_method(name, **METHODS[name])
    running.use(method)
    run = running.generate(CROSSING, LIMIT, Guide(CROSSING + outputs[1], seed=3))
    seen: dict[str, int] = {}

    def remembered(*arguments: Any) -> Any:
        from methods.reader import open_reader

        seen["reader"] = open_reader(*arguments)
        return seen["reader"]

    reference.compare(method, CROSSING, LIMIT, run, reader_of=remembered)
    counts = seen["reader"].activity()  # type: ignore[attr-defined]
    assert {name: run.report[name] for name in counts} == counts
    assert run.report["method"] == name


def test_the_side_cache_of_an_odd_number_of_layers_wastes_nothing(running: Running) -> None:
    planned = running.runner.kv_cache_config
    sides = {side.layer_name for side in running.reads.sides}
    drafter = running.drafter._draft_attn_layer_names - sides
    tokens = planned.num_blocks * 32

    def per_token(names: set[str]) -> int:
        return sum(tensor.size for tensor in planned.kv_cache_tensors if set(tensor.shared_by) <= names) // tokens

    keys = 3 * 2 * 32 * 4  # layers, key heads, head size, float32
    assert per_token(sides) == keys == running.reads.side_cache_bytes()
    assert per_token(drafter) == 2 * keys  # what the paper's side cache would take: keys and values
