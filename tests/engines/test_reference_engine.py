"""The reference engine: rounds, outputs and drafts, against recomputation from scratch."""

from __future__ import annotations

from dataclasses import replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from harness.drafters import Drafter
from harness.engines.base import EngineError, Generation
from harness.engines.reference import engine as engine_module
from harness.engines.reference.engine import ReferenceEngine
from harness.engines.reference.target import Target
from harness.requests import Request
from methods import METHODS, make_method
from methods.original import Original
from methods.reader import ContextCache, DenseReader
from methods.reading import RequestGeometry
from tests.engines.tiny import ARCHITECTURES, INFO, VOCAB, Guided, open_pair, request, save_target

WINDOW = 16  # block < window < prompt, and generation crosses chunk and block borders of the retrieval methods
OPTIONS: dict[str, dict[str, Any]] = {
    "original": {},
    "window": {"window": WINDOW},
    "fold": {"window": WINDOW},
    "rerope": {"window": WINDOW, "reference": 8},
    "yarn": {"reference": 32},
    "streamingllm": {"sinks": 2, "recent": 14},
    "infllm": {"window": WINDOW, "block": 4, "initial": 3, "topk": 2, "representative": 2},
    "cmr": {"chunk": 4, "topk": 4, "refresh": 3},
    "engine_window": {"window": WINDOW},
}


def guided(engine_parts: tuple[ReferenceEngine, Target, Drafter], asked: Request) -> tuple[ReferenceEngine, Guided]:
    """The same pair with drafts that are partly right, and the autoregressive output they are right about."""
    plain, target, drafter = engine_parts
    output = plain.decode(asked, None).output_ids
    long = replace(asked, id="long", max_new_tokens=asked.max_new_tokens + 8, stop_ids=())
    output = plain.decode(long, None).output_ids if not asked.stop_ids else output
    guide = Guided(drafter, output, len(asked.prompt_ids), seed=3)
    return ReferenceEngine(target, guide, prefill_chunk=7, info=INFO), guide  # type: ignore[arg-type]


def check(generation: Generation, asked: Request) -> None:
    assert generation.n_first + sum(generation.commits) == len(generation.output_ids)
    assert len(generation.proposals) in (0, len(generation.commits))
    assert generation.first_token_s <= generation.last_token_s
    assert len(generation.output_ids) <= asked.max_new_tokens


def test_every_method_is_covered() -> None:
    assert set(OPTIONS) == set(METHODS)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("name", ["fold", "cmr", "infllm"])
def test_outputs_equal_autoregressive_decoding_on_every_architecture(
    architecture: str, name: str, tmp_path: Path
) -> None:
    save_target(architecture, tmp_path)
    asked = request()
    engine, guide = guided(open_pair(tmp_path), asked)
    expected = engine.decode(asked, None)
    got = engine.decode(asked, make_method(name, **OPTIONS[name]))
    check(got, asked)
    assert got.output_ids == expected.output_ids
    assert {min(5, c) for c in got.commits} >= {1, 3, 5}  # from nothing to everything accepted
    assert expected.commits == [1] * (len(expected.output_ids) - 1)
    assert got.activity["method"] == name
    assert got.activity["rounds"] == len(got.commits) == len(guide.drafted)


@pytest.mark.parametrize("name", sorted(OPTIONS))
def test_drafts_of_every_round_equal_a_recomputation_from_scratch(name: str, tmp_path: Path) -> None:
    save_target("llama", tmp_path)
    asked = request()
    parts = open_pair(tmp_path)
    engine, guide = guided(parts, asked)
    method = make_method(name, **OPTIONS[name])
    engine.decode(request(30, 12, seed=9), method)  # an earlier request must leave nothing behind
    guide.drafted.clear()
    got = engine.decode(asked, method)
    check(got, asked)
    _, target, drafter = parts
    sequence = [*asked.prompt_ids, *got.output_ids]
    geometry = RequestGeometry(len(asked.prompt_ids), asked.max_new_tokens, drafter.config.block)
    lengths = [length for length, _, _ in guide.drafted]
    # a method with state is replayed round by round; the others must not depend on how they got there
    stateful = name in ("infllm", "cmr")
    reader: DenseReader | None = None
    context: ContextCache | None = None
    for index, (length, anchor, drafts) in enumerate(guide.drafted):
        assert sequence[length] == anchor
        target.reserve(len(sequence) + 8)
        step = target.forward(sequence[:length], taps=drafter.config.target_layer_ids)
        assert step.features is not None
        keys, values = drafter.context_kv(step.features)
        if reader is None or context is None or not stateful:
            context = ContextCache(drafter.config.geometry(), len(sequence) + 8, torch.float64)
            context.append(keys, values)
            reader = DenseReader(method, context.geometry, geometry, context)
            reader.prepare()
        else:
            before = lengths[index - 1]
            wanted = reader.wants_target_attention()
            context.append(keys[:, before:], values[:, before:])
            reader.committed(before, length)
            if wanted:
                reader.target_attention(target.attention_of(length - 1))
        assert drafter.draft(anchor, reader).tokens == drafts, f"round {index}, {length} entries"
        reader.round_done()


@pytest.mark.parametrize("name", ["original", "window", "fold", "rerope"])
def test_short_contexts_give_the_original_rounds(name: str, tmp_path: Path) -> None:
    save_target("llama", tmp_path)
    asked = request(20, 20)
    options = {"window": 64} | ({"log_scale": False} if name == "rerope" else {}) if name != "original" else {}
    engine, guide = guided(open_pair(tmp_path), asked)
    original = engine.decode(asked, make_method("original"))
    drafts = list(guide.drafted)
    guide._random.seed(3)
    guide.drafted.clear()
    got = engine.decode(asked, make_method(name, **options))
    assert (got.output_ids, got.commits) == (original.output_ids, original.commits)
    assert guide.drafted == drafts


def test_a_stop_token_inside_an_accepted_block_ends_the_output_there(tmp_path: Path) -> None:
    save_target("llama", tmp_path)
    parts = open_pair(tmp_path)
    free = request()
    output = parts[0].decode(free, None).output_ids
    index = next(i for i in range(6, 40) if output[i] not in output[:i])
    asked = replace(free, stop_ids=(output[index],))
    guide = Guided(parts[2], output, len(asked.prompt_ids), seed=5)
    engine = ReferenceEngine(parts[1], guide, prefill_chunk=7, info=INFO)  # type: ignore[arg-type]
    baseline = engine.decode(asked, None)
    assert (baseline.output_ids, baseline.finish) == (output[: index + 1], "stop")
    seen_overrun = False
    for seed in range(12):
        guide._random.seed(seed)
        got = engine.decode(asked, make_method("original"))
        check(got, asked)
        assert (got.output_ids, got.finish) == (output[: index + 1], "stop")
        # The caches hold what was committed, the last token aside: overrun is what of it was not delivered.
        assert parts[1].length == len(asked.prompt_ids) + len(got.output_ids) + got.overrun - 1
        seen_overrun |= got.overrun > 0
    assert seen_overrun
    both = replace(asked, max_new_tokens=index + 1)
    assert {engine.decode(both, m).finish for m in (None, make_method("original"))} == {"stop"}


def test_the_limit_clips_the_last_round(tmp_path: Path) -> None:
    save_target("llama", tmp_path)
    for limit in (1, 2, 7, 11):
        asked = request(limit=limit)
        engine, _ = guided(open_pair(tmp_path), asked)
        baseline = engine.decode(asked, None)
        got = engine.decode(asked, make_method("fold", window=WINDOW))
        check(got, asked)
        assert got.output_ids == baseline.output_ids
        assert got.finish == "length" and len(got.output_ids) == limit


def test_gaps_are_zero_for_the_targets_own_output_and_positive_elsewhere(tmp_path: Path) -> None:
    save_target("llama", tmp_path)
    engine, _, _ = open_pair(tmp_path)
    asked = request(limit=12)
    output = engine.decode(asked, None).output_ids
    assert max(engine.logit_gaps(asked, output)) < 1e-9
    assert engine.logit_gaps(asked, output[:1])[0] < 1e-9
    wrong = [*output[:5], (output[5] + 1) % VOCAB, *output[6:]]
    gaps = engine.logit_gaps(asked, wrong)
    assert max(gaps[:5]) < 1e-9 < 1e-3 < gaps[5]


def test_a_request_beyond_the_targets_positions_is_refused(tmp_path: Path) -> None:
    save_target("llama", tmp_path)
    engine, _, _ = open_pair(tmp_path)
    with pytest.raises(EngineError, match="exceed the target's 512 positions"):
        engine.decode(request(500, 48), None)
    with pytest.raises(EngineError, match="507 prompt tokens, 1 to generate and 5 of a block exceed"):
        engine.decode(request(507, 1), None)
    assert len(engine.decode(request(506, 1), None).output_ids) == 1  # 512 exactly


def test_every_second_goes_to_the_phase_that_took_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a clock that ticks once a look: a round is a tick of drafting, one of verification and one between rounds."""
    save_target("llama", tmp_path)
    asked = request(limit=12)
    engine, _ = guided(open_pair(tmp_path), asked)
    ticks = count()
    monkeypatch.setattr(engine_module, "time", SimpleNamespace(perf_counter=lambda: float(next(ticks))))
    plain = engine.decode(replace(asked, max_new_tokens=70), None)  # more than was prefilled for: a new prefill
    assert plain.prefill_s == 1.0
    assert plain.last_token_s - plain.first_token_s == 69.0
    got = engine.decode(asked, make_method("original"))
    rounds = len(got.commits)
    assert got.round_s == {"draft": rounds, "verify": rounds}
    assert got.last_token_s - got.first_token_s == 3 * rounds


def test_a_method_is_told_the_requests_lengths_and_an_arm_its_own_description(tmp_path: Path) -> None:
    save_target("llama", tmp_path)
    _, target, drafter = open_pair(tmp_path)
    info = replace(INFO, drafter={"block": 5})
    engine = ReferenceEngine(target, drafter, prefill_chunk=7, info=info)
    asked, told = request(limit=3), []

    class Told(Original):
        def plan(self, layer: Any, geometry: RequestGeometry) -> Any:
            told.append(geometry)
            return super().plan(layer, geometry)

    engine.decode(asked, Told())
    assert told == [RequestGeometry(prompt=40, limit=3, block=5)] * 2  # once a layer
    assert engine.describe(None).drafter == {} and engine.describe(Told()).drafter == {"block": 5}
    assert replace(engine.describe(None), drafter=info.drafter) == info == engine.describe(Told())


def test_a_prompt_is_prefilled_once_for_all_arms_and_a_shorter_warm_up(tmp_path: Path) -> None:
    save_target("llama", tmp_path)
    engine, target, _ = open_pair(tmp_path)
    fed: list[int] = []
    forward = target.forward

    def counting(ids: Any, **kwargs: Any) -> Any:
        fed.append(len(ids) if kwargs.get("last_only") else 0)
        return forward(ids, **kwargs)

    target.forward = counting  # type: ignore[method-assign]
    asked = request()
    for limit, name in ((4, None), (4, "fold"), (48, None), (48, "original"), (48, "fold")):
        method = None if name is None else make_method(name, **OPTIONS[name])
        engine.decode(replace(asked, max_new_tokens=limit), method)
    every = tuple(range(VOCAB))  # ends the output at once
    engine.decode(replace(asked, max_new_tokens=64, stop_ids=every), None)  # as many as room is kept for
    assert sum(fed) == len(asked.prompt_ids)
    engine.decode(replace(asked, max_new_tokens=65, stop_ids=every), None)  # a block behind them would not fit
    engine.decode(replace(asked, max_new_tokens=200), None)
    engine.decode(request(seed=1), None)
    assert sum(fed) == 4 * len(asked.prompt_ids)
