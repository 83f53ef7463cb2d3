"""What the engine makes of SGLang's chunks and counts: commits per round, times, gaps; and one process per arm."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import pytest
from scripted_sglang import SITE, sglang_run
from simulated import raw_config, save_pair

from harness.config import EngineConfig
from harness.engines.base import EngineError, Generation
from harness.engines.sglang.engine import SglangEngine
from harness.engines.sglang.process import gaps_of, generation
from harness.guards import wrong_output
from harness.records import Record, broken_invariant
from harness.requests import Request
from methods import make_method

K = 4


def made(chunks: Any, report: Any, stops: list[int], method: str | None = "fold") -> Generation:
    return Generation(**generation(chunks, 0.5, stops, report, "r", method, K))


def check(found: Generation, method: str | None, limit: int, stops: list[int]) -> None:
    """The harness's own guards."""
    request = Request("r", "b", "t", (1, 2), limit, tuple(stops), {})
    assert wrong_output(request, method, found) is None
    fields = {key: getattr(found, key) for key in Generation.__dataclass_fields__}
    record = Record("run", "unit", 0, "r", "b", "t", 2, "", method or "ar", "sglang", "", "", "", **fields)
    assert broken_invariant(record, K) is None


def test_commits_are_those_of_the_rounds_and_not_sglangs_accept_length() -> None:
    chunks, report, ids = sglang_run([1, 5, 3], limit=10)
    found = made(chunks, report, [])
    assert (found.output_ids, found.n_first, found.commits, found.overrun) == (ids, 1, [1, 5, 3], 0)
    assert sum(found.commits) / len(found.commits) == 3.0  # SGLang's accept length says 10 / 3
    assert found.proposals == [K] * 3 and found.finish == "length"
    assert (found.prefill_s, found.first_token_s, found.last_token_s) == (0.5, 1.0, 4.0)
    assert found.activity == {
        "method": "fold", "rounds": 3, "draft_graph": True, "engine_read": False, "raw_key_bytes": 7
    }  # fmt: skip
    check(found, "fold", 10, [])


def test_a_round_beyond_the_limit_is_clipped_and_its_rest_is_overrun() -> None:
    chunks, report, _ = sglang_run([4, 5], limit=7)
    found = made(chunks, report, [])
    assert (found.commits, found.overrun, len(found.output_ids)) == ([4, 2], 3, 7)
    check(found, "fold", 7, [])


def test_a_round_beyond_a_stop_token_is_clipped_there() -> None:
    chunks, report, ids = sglang_run([2, 5, 5], stop=4)
    found = made(chunks, report, [ids[-1]])
    assert (found.commits, found.overrun, found.finish, found.output_ids[-1]) == ([2, 2], 3, "stop", ids[-1])
    check(found, "fold", 1000, [ids[-1]])


def test_rounds_that_overlapping_schedules_run_after_the_end_do_not_count() -> None:
    chunks, report, _ = sglang_run([2, 3], limit=6, extra=2)
    assert made(chunks, report, []).commits == [2, 3]


def test_a_single_token_has_no_rounds() -> None:
    for extra in (0, 1):
        chunks, report, _ = sglang_run([], limit=1, extra=extra)
        found = made(chunks, report, [])
        assert (found.commits, found.n_first, found.first_token_s) == ([], 1, found.last_token_s)
        check(found, "fold", 1, [])


def test_rounds_that_arrive_with_the_first_token_are_timed_with_it() -> None:
    chunks, report, ids = sglang_run([2, 3, 4], limit=10, merged=2)
    found = made(chunks, report, [])
    assert (found.n_first, found.commits, found.output_ids) == (6, [4], ids)
    check(found, "fold", 10, [])


def test_random_runs_keep_the_harnesss_invariants() -> None:
    draw = random.Random(0)
    for _ in range(300):
        commits = [draw.randint(1, K + 1) for _ in range(draw.randint(0, 9))]
        length = 1 + sum(commits)
        limit = draw.randint(1, length)
        stop = draw.choice([None, draw.randrange(length)])
        end = min(limit, length if stop is None else stop + 1)
        if end < length and stop is None and limit < length:
            stop = None
        chunks, report, ids = sglang_run(commits, limit=limit, stop=stop, extra=draw.randint(0, 2))
        stops = [ids[-1]] if chunks[-1][1]["meta_info"]["finish_reason"]["type"] == "stop" else []
        found = made(chunks, report, stops)
        assert found.output_ids == ids
        assert found.n_first + sum(found.commits) == len(ids)
        assert [*found.commits[:-1], (found.commits or [0])[-1] + found.overrun] == (
            commits[: len(found.commits)] or [0]
        )
        check(found, "fold", limit, stops)


def test_an_autoregressive_run_commits_one_token_a_step() -> None:
    chunks, _, ids = sglang_run([1, 1, 1], limit=4)
    for key in ("spec_verify_ct", "spec_num_correct_drafts"):
        del chunks[-1][1]["meta_info"][key]
    found = made(chunks, {}, [], None)
    assert (found.commits, found.proposals, found.activity, found.output_ids) == ([1, 1, 1], [], {}, ids)
    check(found, None, 4, [])


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda meta, report: report["request"].update(rid="other"), "saw request 'other'"),
        (lambda meta, report: report["request"]["commits"].pop(), "in 2 rounds, SGLang counts"),
        (lambda meta, report: meta.update(spec_num_correct_drafts=99), "SGLang counts 99 accepted drafts"),
        (lambda meta, report: meta.pop("spec_verify_ct"), "SGLang counts 6 accepted drafts in 0"),
        (lambda meta, report: meta.update(finish_reason={"type": "abort", "message": "too\nlong"}), "with too long"),
        (lambda meta, report: meta.update(finish_reason={"type": "stop", "matched": 5}), "its model's own end token"),
        (lambda meta, report: report.clear(), "saw request None"),
    ],
)
def test_counts_that_contradict_each_other_are_refused(change: Any, reason: str) -> None:
    chunks, report, _ = sglang_run([1, 5, 3], limit=10)
    change(chunks[-1][1]["meta_info"], report)
    with pytest.raises(RuntimeError, match=reason):
        made(chunks, report, [])


def test_more_delivered_than_committed_is_refused() -> None:
    chunks, report, _ = sglang_run([1, 5, 3], limit=10)
    chunks[1][1]["output_ids"] = [1, 2, 3]
    with pytest.raises(RuntimeError, match="rounds committed 9 tokens, but 12 were delivered"):
        made(chunks, report, [])


def test_no_output_is_refused_with_sglangs_reason() -> None:
    with pytest.raises(RuntimeError, match=r"no tokens \(the prompt is too long\)"):
        made([(1.0, {"meta_info": {"finish_reason": {"type": "abort", "message": "the prompt is too long"}}})], {}, [])


def test_gaps_are_differences_of_log_probabilities() -> None:
    meta = {
        "input_token_logprobs": [(None, 9, None), (-1.5, 4, None), (-0.25, 7, None)],
        "input_top_logprobs": [None, [(-0.5, 3, None)], [(-0.25, 7, None)]],
    }
    assert gaps_of(meta, [4, 7]) == [1.0, 0.0]
    with pytest.raises(RuntimeError, match="other tokens"):
        gaps_of(meta, [4, 8])
    with pytest.raises(RuntimeError, match="judged 2 of 3"):
        gaps_of(meta, [4, 7, 7])


# ------------------------------------------------------------------------------------------------------ processes


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes an engine whose processes import a scripted SGLang."""
    engines: list[SglangEngine] = []
    pair = save_pair(tmp_path / "drafter", raw_config())

    def open_engine(scripted: str = "Scripted", **config: Any) -> SglangEngine:
        site = tmp_path / scripted
        site.mkdir(exist_ok=True)
        (site / "sitecustomize.py").write_text(SITE.format(engine=scripted))
        here = str(Path(__file__).parent)
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(site), here, os.environ.get("PYTHONPATH", "")]))
        settings = EngineConfig(name="sglang", gpu_memory=0.85, **config)
        engines.append(SglangEngine(tmp_path / "target", pair.folder, settings, context=100, block=5))
        return engines[-1]

    yield open_engine
    for engine in engines:
        engine._keep_logs = False
        engine.close()


def request(limit: int = 8) -> Request:
    return Request("r0", "tiny", "tiny", (1, 2, 3), limit, (), {})


def test_arms_run_in_processes_of_their_own_under_the_same_settings(start: Any) -> None:
    engine, fold = start(), make_method("fold", window=12)
    ar = engine.describe(None)
    assert ar.device_uuid == "GPU-scripted" and ar.dtype == "bfloat16" and ar.drafter == {}
    first = engine._process.pid
    assert engine.logit_gaps(request(), [5, 6]) == [0.5, 0.5]
    assert engine._process.pid == first
    arm = engine.describe(fold)
    assert engine._process.pid != first and arm.settings == ar.settings
    assert arm.drafter["proposals"] == K and arm.drafter["block"] == 5 and arm.drafter["algorithm"] == "DFLASH"
    found = engine.decode(request(), fold)
    assert (found.commits, found.overrun, found.activity["method"]) == ([2, 3, 2], 3, "fold")


def test_a_failure_inside_sglang_is_one_line_with_its_reason(start: Any) -> None:
    with pytest.raises(EngineError) as caught:
        start("Broken").describe(make_method("fold", window=12))
    text = str(caught.value)
    assert text.startswith("SGLang (fold) could not start: PluginError: page size is 16: start; its log is ")
    assert "\n" not in text


def test_a_request_beyond_what_is_served_is_refused_before_anything_starts(start: Any) -> None:
    engine = start()
    with pytest.raises(EngineError, match=r"exceed the 100 served \(target.max_context\)"):
        engine.decode(request(limit=96), None)
    assert engine._process is None


def test_settings_that_mean_nothing_here_are_refused(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(EngineError, match="kv_cache_gib"):
        start(kv_cache_gib=4.0)
    monkeypatch.setenv("SGLANG_SIMULATE_ACC_LEN", "3")
    with pytest.raises(EngineError, match="SGLANG_SIMULATE_ACC_LEN is set"):
        start()


def test_drafters_that_sglang_does_not_serve_are_refused(tmp_path: Path) -> None:
    pair = save_pair(tmp_path / "rank0", raw_config("dspark", markov_rank=0))
    with pytest.raises(EngineError, match="SGLang serves DSpark for Qwen3 with a Markov head"):
        SglangEngine(tmp_path, pair.folder, EngineConfig(name="sglang"), context=100, block=5)


def test_the_environment_of_an_arm_sets_its_method_and_no_other(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOLD_BENCH_SGLANG", '{"method": "window"}')
    monkeypatch.setenv("SGLANG_EXTERNAL_MODEL_PACKAGE", "somebody.elses")
    engine = start(allow_version="0.5.19")
    bare = engine._environment(None)
    assert "FOLD_BENCH_SGLANG" not in bare and "SGLANG_EXTERNAL_MODEL_PACKAGE" not in bare
    assert bare["SGLANG_PLUGINS"] == "fold_bench" and bare["FOLD_BENCH_SGLANG_VERSION"] == "0.5.19"
    full = engine._environment(make_method("original"))
    assert full.items() - bare.items() == {
        ("FOLD_BENCH_SGLANG", '{"method": "original", "options": {}}'),
        ("SGLANG_EXTERNAL_MODEL_PACKAGE", "harness.engines.sglang.models"),
    }


def test_the_engine_is_what_a_configuration_opens(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from harness.config import DrafterConfig, RunConfig, TargetConfig
    from harness.engines import open_engine

    pair = save_pair(tmp_path / "drafter", raw_config())
    config = RunConfig(
        target=TargetConfig("t", str(tmp_path), None, 512),
        drafter=DrafterConfig("d", "t", str(pair.folder), None, "zlab", 5, 12, 64),
        engine=EngineConfig(name="sglang"),
    )
    engine = open_engine(config)
    assert isinstance(engine, SglangEngine) and not engine.interleaved
    engine.close()
    assert not engine._scratch.exists()
