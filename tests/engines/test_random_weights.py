"""weights=random: the published shapes without a checkpoint; times are reported, acceptance never is."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from importlib.resources import files
from pathlib import Path

import pandas as pd
import pytest
import torch
import yaml

from analysis.load import LoadError, load
from analysis.summary import summarise
from harness.cli import main
from harness.drafters import parse_config, tensor_shapes
from harness.engines.reference.target import random_target
from harness.progress import describe
from harness.records import RECORDS, read_records
from tests.engines.tiny import VOCAB

DRAFTERS = {  # Table 1's pairs, and how many parameters the published checkpoints have where that is known
    "llama": ("llama", 1_048_626_432),
    "qwen35": ("qwen35", 1_291_904_512),
    "gemma": ("gemma", None),
    "gemma_dspark": ("gemma", None),
    "qwen3": ("qwen3", None),
    "qwen3_dspark": ("qwen3", None),
}
BILLIONS = {"llama": 8.03, "qwen3": 8.19, "qwen35": 8.95, "gemma": 11.91}

# A Llama small enough for a test, whose drafter has B = 4.
SMALL = [
    "+model=llama",
    "engine=reference",
    "engine.device=cpu",
    "engine.dtype=float32",
    "weights=random",
    "benchmark=random",
    *(f"target.architecture.{key}={value}" for key, value in {
        "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    }.items()),
    *(f"drafter.architecture.{key}={value}" for key, value in {
        "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "block_size": 4, "num_target_layers": 4,
        "dflash_config.mask_token_id": 1, "dflash_config.target_layer_ids": "[0,2]",
    }.items()),
    "drafter.block=4",
    "drafter.window=16",
]  # fmt: skip


def shapes_of(kind: str, name: str) -> dict[str, object]:
    return yaml.safe_load(files("conf").joinpath(kind, f"{name}.yaml").read_text())["architecture"]


@pytest.mark.parametrize("name", DRAFTERS)
def test_a_drafters_shapes_are_those_of_the_published_checkpoint(name: str) -> None:
    target, parameters = DRAFTERS[name]
    config = parse_config(shapes_of("drafter", name))
    shapes = shapes_of("target", target)
    layers, hidden, vocab = (shapes[key] for key in ("num_hidden_layers", "hidden_size", "vocab_size"))
    config.check_target(layers, hidden, vocab)  # type: ignore[arg-type]
    if parameters is not None:
        assert sum(math.prod(shape) for shape in tensor_shapes(config).values()) == parameters


@pytest.mark.parametrize("name", BILLIONS)
def test_a_targets_shapes_give_its_number_of_parameters(name: str) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    shapes = dict(shapes_of("target", name))
    config = AutoConfig.for_model(shapes.pop("model_type"), **shapes)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert sum(p.numel() for p in model.parameters()) / 1e9 == pytest.approx(BILLIONS[name], abs=0.005)


@pytest.mark.parametrize("name", BILLIONS)
def test_every_target_runs_at_a_small_size_of_its_architecture(name: str) -> None:
    small = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 6}
    small |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    if name == "gemma":
        small |= {"global_head_dim": 32, "sliding_window": 8}
    if name == "qwen35":
        small |= {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "num_hidden_layers": 8}
        small |= {"linear_key_head_dim": 16, "linear_value_head_dim": 16}
    target, again = (
        random_target(shapes_of("target", name) | small, torch.float32, torch.device("cpu"), seed=3) for _ in range(2)
    )
    for each in (target, again):
        each.reserve(32)
    logits = target.forward(range(2, 22)).logits
    assert logits.shape == (20, 96) and 0.01 < logits.std() < 100
    assert torch.equal(logits, again.forward(range(2, 22)).logits)  # the seed decides the weights
    assert target.nbytes()["weights"] > 0


def test_a_run_reports_times_and_no_acceptance(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = [*SMALL, "methods=[original,fold]", "benchmark.levels=[64,96,200K]", "benchmark.n=1"]
    command += [f"run_dir={tmp_path / 'run'}", f"data_dir={tmp_path / 'data'}", "benchmark.max_new_tokens=12"]
    assert main(command) == 0
    said = capsys.readouterr()
    assert "RANDOM WEIGHTS" in said.err and "Random weights" in said.out
    records = list(read_records(tmp_path / "run" / RECORDS))
    assert {record.synthetic for record in records} == {True}
    drafted_one = next(record for record in records if record.method == "fold")
    assert "ms/round" in describe(drafted_one) and not {"tau", "ms/token"} & set(describe(drafted_one).split())
    assert "tau" in describe(replace(drafted_one, engine="reference"))
    assert {record.level for record in records} == {"64", "96"}  # 200K tokens are more than the target can hold
    told = json.loads((tmp_path / "run" / "run.json").read_text())
    assert told["config"]["weights"] == told["arms"]["fold"]["settings"]["weights"] == "random"
    assert told["models"]["target"]["weights"] == "random"
    rows = load(tmp_path / "run", synthetic=True).used
    drafted = rows["method"] != "ar"
    assert rows.loc[drafted, ["tau", "tau_unclipped", "speedup"]].isna().all(axis=None)
    assert rows["round_ms"].gt(0).all() and isinstance(rows, pd.DataFrame)
    table = summarise(tmp_path / "run").markdown()
    assert all("| — |" in line or "**—**" in line for line in table.splitlines() if line.startswith("| random"))
    with pytest.raises(LoadError, match="has random weights, so no acceptance"):
        load(tmp_path / "run")
    assert main(command) == 0  # resumes: nothing is decoded again
    assert len(list(read_records(tmp_path / "run" / RECORDS))) == len(records)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["weights=random"], "weights=random has no tokenizer and decodes random token ids: add benchmark=random"),
        (["weights=random", "benchmark=random"], "target demo has no target.architecture; choose a pair with +model="),
        (["benchmark=random"], "it needs weights=random"),
        (["weights=none"], "weights=none: choose one of checkpoint, random"),
        ([*SMALL, "engine=vllm"], "weights=random runs in the reference engine, not in vllm"),
        ([*SMALL, "benchmark.levels=[long]"], "level 'long' is no length"),
        ([*SMALL, "benchmark.levels=[128K]"], "none fits target llama's 131072 tokens"),
        ([*SMALL, "target.architecture.model_type=unheard"], "target.architecture describes no model"),
    ],
)
def test_mistakes_are_told_in_one_line(
    arguments: list[str], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [text for text in arguments if text != "engine=reference" or "engine=vllm" not in arguments]
    if "engine=vllm" in arguments:
        arguments = [text for text in arguments if not text.startswith(("engine.d",))]
    assert main([*arguments, f"run_dir={tmp_path / 'run'}", f"data_dir={tmp_path / 'data'}"]) == 2
    said = capsys.readouterr().err.strip().splitlines()
    assert told in said[-1] and not any("Traceback" in line for line in said)
