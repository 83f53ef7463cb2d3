"""The plugin's setting: what it is, what it refuses in one line, and that nothing happens without it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from harness.engines.vllm import plugin
from methods.fold import Fold
from tests.vllm.pairs import Pair, dflash, mixed_dflash, save_pair
from tests.vllm.replay import Reference
from tests.vllm.running import Running, prompt


def test_the_setting_makes_the_method() -> None:
    raw = {"fold_bench": {"method": "fold", "options": {"window": 32, "alpha": 1.5}, "trace": True}, "other": 1}
    assert plugin.settings(raw) == plugin.Settings(Fold(window=32, alpha=1.5), trace=True)


@pytest.mark.parametrize("absent", [{}, None, {"other": {"method": "fold"}}])
def test_without_the_setting_there_is_none(absent: Any) -> None:
    assert plugin.settings(absent) is None


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ({"method": "folded"}, "unknown method 'folded'"),
        ({"method": "fold", "options": {"windows": 3}}, "no option 'windows'"),
        ({"method": "fold"}, "needs window"),
        ({"method": "fold", "option": {}}, "no key 'option'"),
        ({"options": {}}, "give {'method'"),
        ("fold", "give {'method'"),
        ({"method": "original", "trace": "yes"}, "trace true or false"),
        ({"method": "original", "options": 3}, "options must be an object"),
    ],
)
def test_a_wrong_setting_is_one_line(setting: Any, says: str) -> None:
    with pytest.raises(ValueError, match=re.escape(says)) as error:
        plugin.settings({"fold_bench": setting})
    assert "\n" not in str(error.value)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return save_pair(tmp_path_factory.mktemp("llama"), "llama", dflash(), context=256)


def _open(pair: Pair, method: str = "original", options: dict[str, Any] | None = None, **more: Any) -> Running:
    return Running(pair, method, options or {}, context=256, chunk=64, **more)


def test_original_reads_by_vllms_own_kernel_and_is_counted(pair: Pair) -> None:
    running = _open(pair)
    ids = prompt(150, 1)
    run = running.generate(ids, 24)
    found = Reference(pair).compare(running.reads.method, ids, 24, run)
    found.check(tie=0.01)
    contexts = [round_["context"] for round_ in run.drafts]
    assert run.report["read"] == "vllm"
    assert run.report["rounds"] == found.rounds == len(contexts)
    assert run.report["entries_read"] == run.report["entries_in_context"] == 2 * sum(contexts)
    assert run.report["side_cache_bytes_per_token"] == 0
    running.close()


def test_without_the_setting_vllm_drafts_by_itself_and_nothing_is_reported(pair: Pair) -> None:
    running = _open(pair, additional_config={})
    assert running.reads is None
    assert running.generate(prompt(150, 1), 8).report == {}
    running.close()


def test_what_does_not_fit_is_refused_in_one_line(pair: Pair, tmp_path: Path) -> None:
    speculative = pair.engine_arguments()["speculative_config"]
    mixed = save_pair(tmp_path / "mixed", "llama", mixed_dflash() | {"num_target_layers": 6}, context=256)
    sliding = dflash(2, layer_types=["sliding_attention"] * 2, sliding_window=16, use_sliding_window=True)
    other = save_pair(tmp_path / "other", "llama", dflash() | {"num_target_layers": 9}, context=256)
    bare = save_pair(tmp_path / "bare", "llama", sliding | {"max_position_embeddings": 4096}, context=256)
    ngram = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}
    fold, yarn = ("fold", {"window": 64}), ("yarn", {"reference": 64})
    cases: list[tuple[Pair, tuple[str, dict[str, Any]], dict[str, Any], str]] = [
        (pair, fold, {"speculative_config": speculative | {"num_speculative_tokens": 3}}, "proposes 7; set it to 7"),
        (pair, yarn, {"max_num_seqs": 2}, "serves one request at a time; set max_num_seqs=1"),
        (pair, yarn, {"enable_prefix_caching": True}, "set enable_prefix_caching=False"),
        (pair, ("cmr", {}), {"max_num_seqs": 2}, "serves one request at a time"),
        (other, fold, {}, "the drafter needs a target of 9 layers, this one has 6"),
        (pair, fold, {"speculative_config": None}, "there is no speculative_config"),
        (pair, fold, {"speculative_config": ngram}, "speculative_config.method is ngram: it takes a dflash or dspark"),
        (bare, fold, {"speculative_config": speculative | {"model": str(bare.drafter)}}, "would drop entries"),
        (mixed, fold, {"speculative_config": speculative | {"model": str(pair.drafter)}, "max_model_len": 512}, "256"),
    ]
    for case, (method, options), more, says in cases:
        with pytest.raises(ValueError, match=re.escape(says)) as error:
            _open(case, method, options, **more)
        assert "\n" not in str(error.value)
