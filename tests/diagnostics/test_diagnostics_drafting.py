"""Offline acceptance and the distance control on tiny random pairs, against recomputation and the oracle."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.diagnostics.acceptance import acceptance
from harness.diagnostics.distance import ShiftedReader, distance
from harness.diagnostics.states import Pair, States, replay
from harness.drafters import Proposal
from harness.engines.base import EngineError
from methods import METHODS, make_method
from methods.cache import ContextCache, DrafterGeometry
from methods.reader import DenseReader
from methods.reading import LayerGeometry, RequestGeometry
from methods.rope import build_rope
from tests.engines.test_reference_engine import OPTIONS
from tests.engines.tiny import VOCAB, open_pair, request, save_target

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "oracles"))
import drafter_oracles as oracle


class Told:
    """A drafter that really drafts and then says what it is told of the continuation."""

    def __init__(self, drafter: Any, say: Callable[[list[int]], list[int]]) -> None:
        self._drafter, self._say = drafter, say
        self.continuation: list[int] = []
        self.prompt = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._drafter, name)

    def draft(self, anchor: int, reader: Any) -> Proposal:
        real = self._drafter.draft(anchor, reader)
        done = reader.length - self.prompt + 1
        return Proposal(self._say(self.continuation[done : done + len(real.tokens)]), real.logits)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("target")
    save_target("llama3", path)
    return path


def open_states(folder: Path, say: Callable[[list[int]], list[int]] | None = None, **asked: Any) -> States:
    _, target, drafter = open_pair(folder)
    told = None if say is None else Told(drafter, say)
    states = replay(Pair(target, told or drafter, 7), request(**asked))  # type: ignore[arg-type]
    if told is not None:
        told.continuation, told.prompt = states.continuation, states.prompt
    return states


def made() -> dict[str, Any]:
    return {name: make_method(name, **options) for name, options in OPTIONS.items()}


def test_a_drafter_that_is_always_right_accepts_all_and_one_that_never_is_accepts_none(folder: Path) -> None:
    right = acceptance(open_states(folder, lambda known: known), made())
    assert [row["arm"] for row in right] == list(OPTIONS)
    assert {row["tau"] for row in right} == {5.0}  # K + 1, K = 4
    assert {row["positions"] for row in right} == {48 - 4}
    never = acceptance(open_states(folder, lambda known: [(known[0] + 1) % VOCAB, *known[1:]]), made())
    assert {row["tau"] for row in never} == {1.0}
    half = acceptance(open_states(folder, lambda known: [*known[:2], (known[2] + 1) % VOCAB, known[3]]), made())
    assert {row["tau"] for row in half} == {3.0}
    assert all((r["first_1"], r["first_2"], r["first_3"], r["first_4"]) == (1, 1, 0, 0) for r in half)


@pytest.mark.parametrize("architecture", ["qwen3", "gemma4", "qwen3_5"])
def test_other_targets_give_states_too(architecture: str, tmp_path: Path) -> None:
    save_target(architecture, tmp_path)
    states = open_states(tmp_path, lambda known: known, limit=16)
    rows = acceptance(states, {name: make_method(name, **OPTIONS[name]) for name in ("original", "infllm", "cmr")})
    assert {row["tau"] for row in rows} == {5.0} and states.near_ties == 0
    assert {row["fraction"] for row in distance(states, [64])} == {1.0}


def test_the_states_are_those_of_one_pass_over_prompt_and_continuation(folder: Path) -> None:
    states = open_states(folder)
    engine, target, drafter = open_pair(folder, chunk=1000)
    assert states.continuation == engine.decode(states.request, None).output_ids
    assert states.near_ties == 0
    target.reserve(200)
    ids = [*states.request.prompt_ids, *states.continuation[:-1]]
    step = target.forward(ids, taps=drafter.config.target_layer_ids)
    assert step.features is not None
    keys, values = drafter.context_kv(step.features)
    n = states.prompt
    torch.testing.assert_close(states.keys, keys[:, n:], rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(states.values, values[:, n:], rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(states.cache.keys[:, :, :n].transpose(1, 2), keys[:, :n], rtol=1e-9, atol=1e-9)


@torch.inference_mode()
@pytest.mark.parametrize("stride", [1, 3])
@pytest.mark.parametrize("name", list(METHODS))
def test_every_method_drafts_as_its_definition_does_on_the_same_states(folder: Path, name: str, stride: int) -> None:
    """The definition: for a method without memory a dense read at each position alone, else of the same walk."""
    drafts: list[list[int]] = []
    states = open_states(folder)
    drafter, method = states.pair.drafter, make_method(name, **OPTIONS[name])
    plain = drafter.draft

    def noted(anchor: int, reader: Any) -> Proposal:
        proposal = plain(anchor, reader)
        drafts.append(proposal.tokens)
        return proposal

    drafter.draft = noted  # type: ignore[method-assign]
    (row,) = acceptance(states, {name: method}, stride)
    drafter.draft = plain  # type: ignore[method-assign]
    memory = hasattr(method, "new_state")
    expected: list[list[int]] = []
    reader: DenseReader | None = None
    for offset in states.offsets()[::stride]:
        if reader is None or not memory:
            states.commit(offset)
            reader = DenseReader(method, states.cache.geometry, states.geometry, states.cache)
            reader.prepare()
        else:
            wanted = reader.wants_target_attention()
            reader.committed(*states.commit(offset))
            if wanted:
                reader.target_attention(states.pair.target.attention_of(offset - 1))
        expected.append(drafter.draft(states.continuation[offset], reader).tokens)
        reader.round_done()
    assert drafts == expected
    matched = [
        states.matches(tokens, offset) for tokens, offset in zip(drafts, states.offsets()[::stride], strict=True)
    ]
    assert row["tau"] == pytest.approx(1 + sum(matched) / len(matched))
    assert row["tau"] == pytest.approx(1 + sum(row[f"first_{k}"] for k in range(1, 5)))


def test_a_short_continuation_gives_no_rows_and_a_long_prompt_one_line(folder: Path) -> None:
    states = open_states(folder, limit=4)
    assert acceptance(states, made()) == [] and distance(states, [8]) == []
    assert replay(states.pair, request(limit=1)).continuation == states.continuation[:1]
    first = states.continuation[0]
    stopped = replay(states.pair, request(stop_ids=(first,)))
    assert stopped.continuation == [first] and not stopped.offsets()
    with pytest.raises(EngineError, match=r"exceed the target's 512; lower diagnostic\.tokens"):
        replay(states.pair, request(length=500))


# --------------------------------------------------------------------------------------------------- distance control


@torch.inference_mode()
def test_no_shift_is_the_drafters_own_read(folder: Path) -> None:
    states = open_states(folder)
    (original,) = acceptance(states, {"original": make_method("original")})
    rows = distance(states, [0, 8, 100], positions=len(states.offsets()))
    assert [row["arm"] for row in rows] == ["+0", "+8", "+100"]
    assert rows[0]["fraction"] == pytest.approx((original["tau"] - 1) / 4)
    states.commit(5)
    drafter, anchor = states.pair.drafter, states.continuation[5]
    dense = DenseReader(make_method("original"), states.cache.geometry, states.geometry, states.cache)
    dense.prepare()
    logits = [
        drafter.draft(anchor, reader).logits
        for reader in (
            dense,
            *(ShiftedReader(states.cache.geometry, states.geometry, states.cache, s) for s in (0, 64)),
        )
    ]
    torch.testing.assert_close(logits[0], logits[1], rtol=1e-9, atol=1e-9)
    assert (logits[0] - logits[2]).abs().max() > 1e-3


def test_positions_are_spread_over_the_continuation(folder: Path) -> None:
    places: list[int] = []
    states = open_states(folder)
    plain = states.commit

    def noted(offset: int) -> tuple[int, int]:
        places.append(offset)
        return plain(offset)

    states.commit = noted  # type: ignore[method-assign]
    (row, _) = distance(states, [8])
    assert places == [11, 33] and row["positions"] == 2  # one and three quarters of 44


@pytest.mark.parametrize("shift", [0, 1, 8192, 131072])
@pytest.mark.parametrize(
    "layer", [LayerGeometry(), LayerGeometry("sliding_attention", 6), LayerGeometry(block_causal=True)]
)
def test_a_shifted_read_is_the_oracles(shift: int, layer: LayerGeometry) -> None:
    rope = build_rope({"rope_theta": 10000.0}, 8)
    geometry = DrafterGeometry((layer,), 4, 2, 8, 8, 8**-0.5, rope, 3)
    draw = torch.Generator().manual_seed(shift)
    q, kb, vb, k, v = (
        torch.randn(n, heads, 8, generator=draw, dtype=torch.float64)
        for n, heads in ((3, 4), (3, 2), (3, 2), (11, 2), (11, 2))
    )
    cache = ContextCache(geometry, 20, torch.float64)
    cache.append(k[None], v[None])
    ours = ShiftedReader(geometry, RequestGeometry(11, 4, 3), cache, shift).read(0, q, kb, vb)
    theirs = oracle.dflash(
        oracle.Case.of(q, k, v, kb, vb),
        oracle.Rope(tuple(rope.inv_freq.tolist())),
        8**-0.5,
        block_causal=layer.block_causal,
        block_shift=shift,
        sliding_window=layer.native_window,
    )
    torch.testing.assert_close(ours, torch.tensor(theirs.out, dtype=torch.float64), rtol=1e-9, atol=1e-9)


def test_a_request_may_be_replayed_after_another(folder: Path) -> None:
    states = open_states(folder)
    first = acceptance(states, made())
    again = replay(states.pair, replace(states.request, id="again"))
    assert acceptance(again, made()) == first
