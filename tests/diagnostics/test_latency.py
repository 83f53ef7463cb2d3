"""Figure 1: the shares of a step and of a round add up, and their bytes are those of the shapes."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pandas as pd
import pytest
import torch

from analysis.figures import figure1, make_figures
from harness.diagnostics import latency
from harness.diagnostics.command import main
from harness.diagnostics.latency import AR, PARTS, SD, ar_reads, drafter_weight_bytes, measure, sd_reads
from harness.drafters import random_drafter
from harness.engines.base import EngineError
from harness.engines.reference.engine import ReferenceEngine
from harness.engines.reference.fixed import Executors
from harness.engines.reference.target import open_target
from methods import make_method
from tests.engines.test_random_weights import SMALL
from tests.engines.tiny import INFO, drafter_config, save_target

METHODS = {"original": make_method("original"), "fold": make_method("fold", window=16)}


def engine(folder: Path, executors: Executors | None = None, dtype: torch.dtype = torch.float32) -> ReferenceEngine:
    target = open_target(folder, dtype, torch.device("cpu"))
    drafter = random_drafter(drafter_config(), dtype=dtype, device="cpu")
    return ReferenceEngine(target, drafter, prefill_chunk=64, info=INFO, executors=executors)


@pytest.mark.parametrize("executors", [None, Executors()], ids=["ranges", "isolation"])
@pytest.mark.parametrize("architecture", ["llama", "gemma4", "qwen3_5"])
def test_the_parts_of_a_step_and_of_a_round(
    architecture: str, executors: Executors | None, tmp_path: Path
) -> None:
    save_target(architecture, tmp_path)
    said: list[str] = []
    measured = measure(engine(tmp_path, executors), [64, 200], METHODS, repeats=3, bandwidth=1e10, say=said.append)
    found = list(measured)
    assert [(parts[0].context, parts[0].step, parts[0].method) for parts in found] == [
        (context, step, method)
        for context in (64, 200)
        for step, method in ((AR, "ar"), (SD, "original"), (SD, "fold"))
    ]
    for parts in found:
        names = [part.part for part in parts]
        expected = PARTS if parts[0].step == SD else ("target attention", "other target work", "sampling")
        assert names == [name for name in PARTS if name in expected]
        assert all(part.ms >= 0 for part in parts) and sum(part.ms for part in parts) > 0
        of = {part.part: part for part in parts}
        assert of["target attention"].ms > 0 and math.isnan(of["sampling"].bytes)
        if parts[0].step == SD:
            assert of["drafter attention"].ms > 0 and of["drafter other"].ms > 0
        for part in parts:
            assert math.isnan(part.bytes) or part.bound_ms == pytest.approx(1e3 * part.bytes / 1e10)
    # What must be read is said before what was measured, context by context.
    assert [("must read" in text) for text in said] == [True, False] * 6


def test_the_bytes_of_a_step_are_weights_and_keys_and_values(tmp_path: Path) -> None:
    save_target("qwen3", tmp_path)  # its embedding is not its head
    pair = engine(tmp_path)
    target, _ = pair.pair
    weights = sum(path.stat().st_size for path in tmp_path.glob("*.safetensors"))
    pair.pretend(100, 8, None)
    parts = ar_reads(pair, 100).parts
    assert parts["target attention"] == 100 * 6 * 2 * 2 * 16 * 4  # entries, layers, K and V, heads, dims, bytes
    embedding = 128 * 64 * 4
    assert parts["other target work"] == target.nbytes()["weights"] - embedding
    assert parts["other target work"] == pytest.approx(weights - embedding, rel=0.01)


def test_a_sliding_layer_reads_its_window_only(tmp_path: Path) -> None:
    save_target("gemma4", tmp_path)  # four sliding layers of 8 entries and two full ones with a single head of 32
    pair = engine(tmp_path)
    pair.pretend(100, 8, None)
    sliding, full = 8 * 4 * 2 * 2 * 16, 100 * 2 * 2 * 1 * 32
    assert ar_reads(pair, 100).parts["target attention"] == 4 * (sliding + full)


def test_the_bytes_of_a_round_follow_what_the_method_reads(tmp_path: Path) -> None:
    save_target("llama", tmp_path)
    pair = engine(tmp_path)
    read = {}
    for name, method in METHODS.items():
        drafting = pair.pretend(200, 40, method)
        assert drafting is not None
        read[name] = sd_reads(pair, drafting, name, 200).parts
    entry = 2 * (16 + 16) * 4
    assert read["original"]["drafter attention"] == 200 * 2 * entry  # two layers
    assert 200 * 2 * entry <= read["fold"]["drafter attention"] <= 206 * 2 * entry  # rows' windows overlap the memory
    window = make_method("window", window=16)
    drafting = pair.pretend(200, 40, window)
    assert drafting is not None
    assert sd_reads(pair, drafting, "window", 200).parts["drafter attention"] == 20 * 2 * entry


def test_a_drafters_weights_are_counted_with_the_head_it_borrows(tmp_path: Path) -> None:
    drafter = random_drafter(drafter_config(), dtype=torch.bfloat16, device="cpu")
    own = 2 * 64 * 64 + 64 + 64  # fc and two norms
    layer = 64 * 64 * 2 + 2 * 64 * 32 + 3 * 64 * 96 + 2 * 64 + 2 * 16
    again = 2 * 64 * 32  # keys and values once more, for the commit
    assert drafter_weight_bytes(drafter, 128) == 2 * (own + 2 * (layer + again) + 128 * 64)


def test_profiling_leaves_the_engine_as_it_was(tmp_path: Path) -> None:
    save_target("llama", tmp_path)
    pair = engine(tmp_path)
    before = {**vars(pair)}, {**vars(pair.pair[0])}.keys(), {**vars(pair.pair[1])}.keys()
    list(measure(pair, [64], METHODS, repeats=1, bandwidth=1e10, say=lambda text: None))
    assert vars(pair).keys() == before[0].keys()
    assert vars(pair.pair[0]).keys() == before[1] and vars(pair.pair[1]).keys() == before[2]


def test_a_context_beyond_the_target_is_refused(tmp_path: Path) -> None:
    save_target("llama", tmp_path)
    with pytest.raises(EngineError, match="a context of 600 entries: the target has positions 1 to 512"):
        list(measure(engine(tmp_path), [600], METHODS, repeats=1, bandwidth=1e10, say=lambda text: None))
    with pytest.raises(EngineError, match="no context of 1,024 tokens or more fits 512"):
        latency.default_contexts(512)
    assert latency.default_contexts(131072) == [1024 * 2**power for power in range(8)]
    assert latency.default_contexts(32768)[-1] == 32768


def test_the_bandwidth_of_a_copy_counts_what_is_read_and_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latency, "clock", lambda step, device, repeats: [3.0, 2.0, 4.0])
    assert latency.copy_bandwidth(torch.device("cpu"), 1 << 20) == 2 * (1 << 20) / 2e-3


def test_the_command_leaves_what_figure_1_reads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pair = [text for text in SMALL if not text.startswith("benchmark=")]
    options = ["diagnostic.contexts=[64,128]", "diagnostic.repeats=2", "methods=[fold,original]"]
    assert main(["diagnostic=latency", *options, *pair, f"run_dir={tmp_path}"]) == 0
    said = capsys.readouterr().err
    assert said.index("64 AR: must read") < said.index("64 AR: ", said.index("64 AR: must read") + 5)
    table = pd.read_csv(tmp_path / "latency.csv")
    assert {"context", "step", "part", "ms", "bytes", "bound_ms", "method"} <= set(table)
    assert table["context"].unique().tolist() == [64, 128]
    told = json.loads((tmp_path / "latency.json").read_text())
    assert any("random weights" in line for line in told["footer"])
    assert len(told["estimates"]) == 6 and all(row["ms"] > 0 < row["bound_ms"] for row in told["estimates"])
    made = make_figures([tmp_path], [1], tmp_path / "figures")
    assert [file.name for file in made] == ["figure1.pdf", "figure1.png"]
    # Of two methods the figure shows the original drafter's rounds.
    axes = figure1(table).axes[1]
    heights = {round(bar.get_height(), 6) for bar in axes.patches}
    of = table[(table["step"] == SD) & (table["method"] == "original") & (table["context"] == 64)]
    share = 100 * of["ms"] / of["ms"].sum()
    assert set(share.round(6)) <= heights


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["diagnostic.contexts=[0]"], "diagnostic.contexts=[0]: give one or more positive lengths"),
        (["diagnostic.repeats=0"], "diagnostic.repeats=0: must be at least 1"),
        (["methods=[ar]"], "no method to measure"),
        (["diagnostic.contexts=[999999]"], "a context of 999999 entries: the target has positions 1 to 131072"),
    ],
)
def test_mistakes_are_told_in_one_line(
    arguments: list[str], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["diagnostic=latency", *SMALL, *arguments, f"run_dir={tmp_path / 'out'}"]) == 2
    assert told in capsys.readouterr().err.strip().splitlines()[-1]
    assert not (tmp_path / "out").exists()
