"""The experiment of Table 10, as the engine would run it on a GPU."""

from __future__ import annotations

import pytest

from harness.cli import compose_plans
from harness.config import UserError, check, make_arms
from harness.engines.sglang.engine import SglangEngine
from methods import make_method


def test_table_10_is_one_run_of_its_methods_in_this_engine() -> None:
    plans = compose_plans(["+experiment=table10"])
    assert plans is not None
    (plan,) = plans
    engine, drafter = plan.config.engine, plan.config.drafter
    assert (engine.name, engine.prefill_chunk, engine.kv_cache_gib) == ("sglang", 8192, None)
    assert (drafter.name, drafter.block, drafter.window, plan.config.target.name) == ("llama", 10, 2048, "llama")
    arms = {name: options for name, _, options in make_arms(plan.arms)}
    assert list(arms) == ["original", "engine_window", "streamingllm", "cmr", "rerope", "infllm", "window", "fold"]
    assert arms["engine_window"]["window"] == arms["window"]["window"] == arms["fold"]["window"] == 2048
    with pytest.raises(UserError, match="engine sglang needs a GPU and torch sees none"):
        check(plan)


@pytest.mark.parametrize("name", ["original", "engine_window", "fold"])
def test_what_sglang_would_be_started_with(name: str, tmp_path: object) -> None:
    plans = compose_plans(["+experiment=table10"])
    assert plans is not None
    (plan,) = plans
    options = {arm.name: arm.options for arm in plan.arms}[name]
    engine = object.__new__(SglangEngine)
    engine._config, engine._context = plan.config.engine, plan.config.target.max_context
    engine._target = engine._source = tmp_path  # type: ignore[assignment]
    engine._drafter = type("Drafter", (), {"family": "dflash", "proposals": plan.config.drafter.proposals})()  # type: ignore[assignment]
    server = engine._spec(make_method(name, **options))["server"]
    assert server["speculative_num_draft_tokens"] == 10 and server["speculative_algorithm"] == "DFLASH"
    assert server.get("speculative_draft_window_size") == (2048 if name == "engine_window" else None)
    assert server["context_length"] == plan.config.target.max_context
