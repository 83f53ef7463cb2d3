"""The engine wrapper on the demo pair, on a CPU: arms, rounds, proof of activity, the judge."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from benchmarks.engine_vllm import equal_key_norms
from harness.config import EngineConfig
from harness.engines.base import EngineError, EngineInfo, Generation
from harness.engines.vllm.engine import Stock, VllmEngine
from harness.guards import NEAR_TIE, differing_settings, settings, wrong_output
from harness.records import Record, broken_invariant
from harness.requests import Request
from methods import make_method

WINDOW, CHUNK, CONTEXT, PROPOSALS = 64, 48, 512, 4
ARMS = {
    "ar": None,
    "stock": Stock(),
    "original": make_method("original"),
    "fold": make_method("fold", window=WINDOW),
}
TEXT = '''def fibonacci(n):
    """The n-th Fibonacci number."""
    if n < 2:
        return n
    return fibonacci(n - 1) + fibonacci(n - 2)


def fibonacci_loop(n):
    """The same without recursion."""
'''


@dataclass
class Runs:
    """What every arm said and delivered, and the engine, which stands at the last arm."""

    engine: VllmEngine
    requests: dict[str, Request]
    info: dict[str, EngineInfo] = field(default_factory=dict)
    outputs: dict[tuple[str, str], Generation] = field(default_factory=dict)


def of(name: str, prompt: list[int], limit: int, stops: tuple[int, ...] = ()) -> Request:
    return Request(name, "code", "code", tuple(prompt), limit, stops)


@pytest.fixture(scope="module")
def runs(demo_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    """Each arm decodes a prompt of three chunks, one that crosses W + B while decoding, and the first again."""
    ids = Tokenizer.from_file(str(demo_target / "tokenizer.json")).encode(TEXT).ids
    requests = {
        "chunks": of("chunks", (ids * 3)[: 2 * CHUNK + 30], 40),
        "crossing": of("crossing", ids[: WINDOW - 8], 40),
        "single": of("single", ids, 1),
        "again": of("again", (ids * 3)[: 2 * CHUNK + 30], 40),
    }
    config = EngineConfig(name="vllm", dtype="float32", prefill_chunk=CHUNK, threads=1, kv_cache_gib=0.5)
    demo = Path(__file__).parents[2] / "data_prep" / "demo" / "drafter"
    drafter = equal_key_norms(demo, tmp_path_factory.mktemp("pair") / "drafter")
    engine = VllmEngine(demo_target, drafter, config, context=CONTEXT, block=5)
    found = Runs(engine, requests)
    try:
        for arm, method in ARMS.items():
            found.info[arm] = engine.describe(method)
            for request in requests.values():
                found.outputs[arm, request.id] = engine.decode(request, method)
            if arm == "ar":  # every token of the output as a stop token, so that some end a round in its middle
                output = found.outputs["ar", "chunks"].output_ids
                for token in dict.fromkeys(output[2:20]):
                    requests[f"stop {token}"] = replace(requests["chunks"], id=f"stop {token}", stop_ids=(token,))
                    found.outputs["ar", f"stop {token}"] = engine.decode(requests[f"stop {token}"], None)
        yield found
    finally:
        engine.close()


def test_arms_differ_in_nothing_but_speculation(runs: Runs) -> None:
    base = settings(runs.info["ar"])
    for arm, info in runs.info.items():
        assert differing_settings(base, settings(info)) == [], arm
    assert base["effective_prefill_chunk"] == CHUNK and base["model_config.max_model_len"] == CONTEXT
    assert base["cache_config.enable_prefix_caching"] is False and base["scheduler_config.max_num_seqs"] == 1
    assert base["attention_backends"] == ["CPU_ATTN"] and base["model_runner"] == "V1" and base["threads"] == 1
    assert (runs.info["ar"].version, runs.info["ar"].dtype, runs.info["ar"].drafter) == ("0.28.0", "float32", {})
    for arm in ("stock", "original", "fold"):
        drafter = runs.info[arm].drafter
        assert (drafter["block"], drafter["proposals"], drafter["max_model_len"]) == (5, PROPOSALS, CONTEXT)


def test_other_settings_are_seen(runs: Runs) -> None:
    info = runs.info["ar"]
    other = replace(info, settings={**info.settings, "scheduler_config.async_scheduling": True})
    assert differing_settings(settings(info), settings(other)) == ["scheduler_config.async_scheduling: False, True"]


def test_every_generation_can_be_recorded(runs: Runs) -> None:
    delivered = [entry.name for entry in fields(Generation)]
    for (arm, name), generation in runs.outputs.items():
        request, method = runs.requests[name], None if arm == "ar" else arm
        assert wrong_output(request, method, generation) is None, (arm, name)
        blank = Record("r", "u", 0, name, "code", "code", 1, "", arm, "vllm", "cpu", "here", "now")
        record = replace(blank, **{key: getattr(generation, key) for key in delivered})
        assert broken_invariant(record, PROPOSALS) is None, (arm, name)
        assert generation.skipped_rounds == 0 and generation.cached_tokens == 0
        assert generation.prefill_s > 0


def test_outputs_are_the_autoregressive_ones(runs: Runs) -> None:
    for (arm, name), generation in runs.outputs.items():
        expected = runs.outputs["ar", name].output_ids
        if generation.output_ids != expected:  # then only by near ties
            gaps = runs.engine.logit_gaps(runs.requests[name], generation.output_ids)
            assert max(gaps) <= NEAR_TIE["float32"], (arm, name)


def test_a_request_leaves_nothing_to_the_next(runs: Runs) -> None:
    for arm in ARMS:
        first, again = runs.outputs[arm, "chunks"], runs.outputs[arm, "again"]
        assert (first.output_ids, first.commits) == (again.output_ids, again.commits), arm
        assert first.activity == again.activity, arm


def test_rounds_accept_none_some_and_all_drafts(runs: Runs) -> None:
    for arm in ("stock", "original", "fold"):
        commits = [c for name in ("chunks", "crossing") for c in runs.outputs[arm, name].commits]
        assert {1, PROPOSALS + 1} <= set(commits) and len(set(commits)) >= 4, arm
    assert set(runs.outputs["ar", "chunks"].commits) == {1}


def test_stock_vllm_and_our_original_make_the_same_rounds(runs: Runs) -> None:
    for name in runs.requests:
        if not name.startswith("stop"):
            stock, ours = runs.outputs["stock", name], runs.outputs["original", name]
            assert (stock.commits, stock.proposals, stock.output_ids) == (ours.commits, ours.proposals, ours.output_ids)


def test_a_method_proves_that_it_was_active(runs: Runs) -> None:
    for name in ("chunks", "crossing"):
        original, fold = runs.outputs["original", name].activity, runs.outputs["fold", name].activity
        assert (original["method"], fold["method"]) == ("original", "fold")
        assert original["far_entries_read"] == 0 < fold["far_entries_read"]
        assert fold["rounds"] >= len(runs.outputs["fold", name].commits)
        assert "Older(window=64)" in str(fold["plan"]) and "Older" not in str(original["plan"])
    crossing = runs.outputs["fold", "crossing"].activity  # only the rounds behind W + B read far entries
    assert crossing["far_entries_read"] < crossing["entries_in_context"] / 2
    assert runs.outputs["ar", "chunks"].activity == {}
    assert runs.outputs["stock", "chunks"].activity == {"method": "stock"}


def test_the_first_token_alone_needs_no_round(runs: Runs) -> None:
    for arm in ARMS:
        one = runs.outputs[arm, "single"]
        assert (len(one.output_ids), one.n_first, one.commits, one.proposals) == (1, 1, [], [])
        assert one.first_token_s == one.last_token_s and one.finish == "length"


def test_a_stop_token_inside_a_round_cuts_it(runs: Runs) -> None:
    """vLLM itself counts the drafts behind a stop token as accepted."""
    cut = 0
    for name, request in runs.requests.items():
        if name.startswith("stop"):
            found = runs.outputs["fold", name]
            assert found.finish == "stop" and found.output_ids[-1] == request.stop_ids[0]
            assert found.output_ids == runs.outputs["ar", name].output_ids
            assert found.n_first + sum(found.commits) == len(found.output_ids)
            assert found.overrun == 0 or found.commits[-1] + found.overrun <= PROPOSALS + 1
            cut += found.overrun > 0
    assert cut, "no stop token was followed by accepted drafts"


def test_a_request_is_drafted_for_to_the_end_of_what_is_served_or_refused(runs: Runs) -> None:
    """Closer to the end vLLM verifies zeros in place of drafts, and does not say so."""
    room = 2 * (PROPOSALS + 1)
    full = runs.engine.decode(of("fits", [5] * (CONTEXT - 40 - room), 40), ARMS["fold"])
    assert len(full.output_ids) == 40 and set(full.proposals) == {PROPOSALS}
    assert full.activity["rounds"] >= len(full.commits)
    with pytest.raises(EngineError, match="463 prompt tokens, 40 to generate and 10 of draft blocks exceed"):
        runs.engine.decode(of("long", [5] * (CONTEXT - 40 - room + 1), 40), ARMS["fold"])


def test_the_target_judges_an_output(runs: Runs) -> None:
    """Last, because it needs the autoregressive arm again."""
    request = runs.requests["chunks"]
    output = runs.outputs["ar", "chunks"].output_ids
    gaps = runs.engine.logit_gaps(request, output)
    assert len(gaps) == len(output) and all(0 <= gap <= NEAR_TIE["float32"] for gap in gaps)
    wrong = [*output[:5], (output[5] + 1) % 1000, *output[6:]]
    judged = runs.engine.logit_gaps(request, wrong)
    assert judged[:5] == pytest.approx(gaps[:5], abs=1e-4) and judged[5] > 0.5
    assert len(judged) == len(wrong) and all(math.isfinite(gap) for gap in judged)
