"""What FOLD's read costs in memory, computed from allocated tensors (without storage behind them)."""

from __future__ import annotations

from importlib.resources import files
from typing import Any

import pytest
import torch
import yaml

from harness.cli import main
from harness.drafters import DrafterConfig, parse_config
from harness.engines.reference.fixed import PAGE, Executors, FixedReader
from harness.memory import GIB, memory_lines, paper_pairs
from methods import make_method
from methods.cache import ContextCache
from methods.paged import PagedReader
from methods.reader import open_reader
from methods.reading import RequestGeometry

CONTEXT = 128 * 1024


def drafter(name: str) -> DrafterConfig:
    return parse_config(yaml.safe_load(files("conf").joinpath("drafter", f"{name}.yaml").read_text())["architecture"])


def cache(config: DrafterConfig, context: int) -> ContextCache:
    rows = -(-(context + config.block) // PAGE) * PAGE
    return ContextCache(config.geometry(), rows - config.block, torch.bfloat16, "meta")


def test_the_reference_engine_holds_a_window_of_extra_keys_at_128k() -> None:
    config = drafter("llama")
    held = cache(config, CONTEXT)
    assert held.nbytes == pytest.approx(2.5 * GIB, rel=1e-3)  # unrotated keys, and the values they share, once
    request = RequestGeometry(CONTEXT - 64, 64, config.block)
    fold = make_method("fold", window=2048)
    reader = open_reader(fold, config.geometry(), request, held)
    reader._far_mask()  # what a read makes on the way
    reader._near_mask(2048 + config.block, causal=False)
    assert 0 < reader.extra_bytes() <= 0.1 * GIB
    assert 0 < FixedReader(fold, held, Executors()).extra_bytes() <= 0.1 * GIB
    # The same bound is no truism: the original drafter's keys are all rotated.
    assert FixedReader(make_method("original"), held, Executors()).extra_bytes() > 1.2 * GIB


def test_a_serving_engine_holds_unrotated_keys_and_no_more() -> None:
    config = drafter("llama")
    reader = PagedReader(
        make_method("fold", window=2048), config.geometry(), max_context=CONTEXT, dtype=torch.bfloat16, device="cpu"
    )
    page = 16
    side = [
        torch.empty(CONTEXT // page, page, config.kv_heads, config.head_dim, dtype=torch.bfloat16, device="meta")
        for _ in reader.raw_layers
    ]
    assert len(side) == 5 and sum(keys.nbytes for keys in side) == 1.25 * GIB


def test_the_printed_sizes_are_the_papers_halved() -> None:
    pairs = {pair.name: pair for pair in paper_pairs() if not isinstance(pair, str)}
    assert {name: pair.paper_gib for name, pair in pairs.items()} == {
        "llama": 2.5, "gemma": 2.5, "gemma_dspark": 2.5, "qwen3": 0.63, "qwen3_dspark": 0.63, "qwen35": 6.0,
    }  # fmt: skip
    for pair in pairs.values():
        assert pair.paper_side_cache / GIB == pytest.approx(pair.paper_gib, abs=0.006)  # the paper's number, recomputed
        assert pair.side_cache * 2 == pair.paper_side_cache
        assert pair.window < 0.1 * GIB
    assert pairs["llama"].key_bytes == 5 * 8 * 128 * 2


def test_shapes_of_no_use_are_told_and_do_not_stop_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    from harness import memory

    whole = memory.pair_memory

    def broken(drafter: Any, target: Any, paper: float | None) -> Any:
        if drafter["name"] == "llama":
            raise ValueError("conf/drafter/llama.yaml: num_hidden_layers is 0,\nexpected at least 1")
        return whole(drafter, target, paper)

    monkeypatch.setattr(memory, "pair_memory", broken)
    lines = memory_lines("qwen3")
    assert "#   llama.yaml: conf/drafter/llama.yaml: num_hidden_layers is 0, expected at least 1" in lines
    assert any(line.startswith("# > qwen3 ") for line in lines) and len(lines) == 9


@pytest.mark.parametrize("option", [["--cfg", "job"], ["-c", "all"], ["--cfg=job"]])
def test_the_configuration_is_printed_with_the_memory_and_stays_yaml(
    option: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["+model=llama", *option]) == 0
    said = capsys.readouterr().out
    parsed: Any = yaml.safe_load(said)
    assert parsed["target"]["name"] == "llama" and parsed["weights"] == "checkpoint"
    assert [line for line in said.splitlines() if line.startswith("# > llama")]
    assert "paper: its side cache" in said


@pytest.mark.parametrize("option", [["--cfg", "job", "-p", "drafter"], ["--cfg", "hydra"]])
def test_a_part_of_the_configuration_is_printed_alone(option: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["method=fold", *option]) == 0
    assert "Extra memory" not in capsys.readouterr().out


def test_a_part_that_is_not_there_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--cfg", "job", "-p", "drafters"]) == 2
    assert "fold-bench: package 'drafters' not found in config; see" in capsys.readouterr().err


def test_every_line_is_a_comment_of_readable_width() -> None:
    assert all(line.startswith("#") and len(line) <= 120 for line in memory_lines("qwen35"))
