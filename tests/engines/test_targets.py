"""Targets: the cache, the taps and going back, against one plain forward of transformers over the whole sequence."""

from __future__ import annotations

import json
import random
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from harness.engines.base import EngineError
from harness.engines.reference.attention import _fused, attend, row_weights
from harness.engines.reference.dense import DenseTarget
from harness.engines.reference.target import open_target
from tests.engines.tiny import ARCHITECTURES, VOCAB, save_target

CPU = torch.device("cpu")
TAPS = (1, 3)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_chunks_partial_blocks_and_a_rewind_equal_one_forward(architecture: str, tmp_path: Path) -> None:
    model = save_target(architecture, tmp_path)
    draw = random.Random(0)
    ids = [draw.randrange(VOCAB) for _ in range(60)]
    with torch.no_grad():
        whole = model(torch.tensor([ids]), output_hidden_states=True)
    logits, features = whole.logits[0], torch.cat([whole.hidden_states[i + 1] for i in TAPS], -1)[0]
    target = open_target(tmp_path, torch.float32, CPU)
    target.reserve(80)
    steps = [target.forward(ids[:17], taps=TAPS), target.forward(ids[17:30], taps=TAPS)]
    got, tapped = [step.logits for step in steps], [step.features for step in steps]
    target.mark()
    position = 30
    while position < 60:
        rows = min(8, 60 - position)
        keep = draw.randint(1, rows)
        step = target.forward(ids[position : position + keep] + [5] * (rows - keep), taps=TAPS)
        weights = target.attention_of(keep - 1)
        assert len(weights) == position + keep
        torch.testing.assert_close(weights.sum(), torch.tensor(1.0))
        target.truncate(position + keep)
        assert step.features is not None
        got.append(step.logits[:keep])
        tapped.append(step.features[:keep])
        position += keep
    torch.testing.assert_close(torch.cat(got), logits, rtol=1e-3, atol=2e-3)
    torch.testing.assert_close(torch.cat(tapped), features, rtol=1e-3, atol=1e-2)
    target.rewind()
    again = target.forward(ids[30:40]).logits
    torch.testing.assert_close(again, logits[30:40], rtol=1e-3, atol=2e-3)


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gemma4"])
def test_a_rows_attention_is_the_models_own(architecture: str, tmp_path: Path) -> None:
    model = save_target(architecture, tmp_path)
    ids = list(range(2, 32))
    model.set_attn_implementation("eager")
    with torch.no_grad():
        weights = model(torch.tensor([ids]), output_attentions=True).attentions[-1][0]
    target = open_target(tmp_path, torch.float32, CPU)
    target.reserve(40)
    target.forward(ids[:20])
    target.forward(ids[20:])
    for row in (0, 3, 9):
        expected = weights[:, 20 + row, : 21 + row].mean(0)
        torch.testing.assert_close(target.attention_of(row), expected, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("rows", [1, 8, 32, 33, 300])
@pytest.mark.parametrize("before", [0, 5, 200])
def test_attention_equals_a_masked_softmax(rows: int, before: int) -> None:
    generator = torch.Generator().manual_seed(rows + before)
    q = torch.randn(6, rows, 16, generator=generator, dtype=torch.float64)
    keys = torch.randn(2, before + rows, 16, generator=generator, dtype=torch.float64)
    values = torch.randn(2, before + rows, 24, generator=generator, dtype=torch.float64)
    wide_keys, wide_values = keys.repeat_interleave(3, 0), values.repeat_interleave(3, 0)
    logits = q @ wide_keys.transpose(1, 2) * 0.3
    hidden = torch.ones(rows, before + rows, dtype=torch.bool).tril(before).logical_not()
    weights = torch.softmax(logits.masked_fill(hidden, float("-inf")), -1)
    for spare in (0, 3, 500):
        held_keys, held_values = (F.pad(held, (0, 0, 0, spare), value=7.0) for held in (keys, values))
        got = attend(q, held_keys, held_values, before + rows, 0.3)
        torch.testing.assert_close(got, weights @ wide_values)
    torch.testing.assert_close(_fused(q, keys, values, 0.3), weights @ wide_values)  # what a GPU runs
    expected = weights[:, -1].mean(0).float()
    torch.testing.assert_close(row_weights(q[:, -1], keys, 0.3), expected, rtol=1e-4, atol=1e-6)


def test_a_targets_own_yarn_scales_its_logits_too(tmp_path: Path) -> None:
    from transformers import LlamaForCausalLM

    save_target("llama", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["rope_parameters"] = {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "attention_factor": 1.3,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    ids = list(range(2, 42))
    with torch.no_grad():
        expected = LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()(torch.tensor([ids])).logits[0]
    target = open_target(tmp_path, torch.float32, CPU)
    assert isinstance(target, DenseTarget)
    target.reserve(40)
    torch.testing.assert_close(target.forward(ids).logits, expected, rtol=1e-3, atol=2e-3)


def test_only_plain_llama_and_qwen3_blocks_run_on_the_lean_path() -> None:
    """Anything else is computed by transformers' own modules, never by a block that lacks a part of it."""
    assert DenseTarget.supports(SimpleNamespace(model_type="llama", hidden_act="silu"))
    assert DenseTarget.supports(SimpleNamespace(model_type="qwen3", hidden_act="silu", use_sliding_window=False))
    for changed in (
        {"model_type": "mistral"},
        {"use_sliding_window": True},
        {"hidden_act": "gelu"},
        {"attention_bias": True},
        {"mlp_bias": True},
    ):
        assert not DenseTarget.supports(SimpleNamespace(**{"model_type": "llama", "hidden_act": "silu", **changed}))


@pytest.mark.parametrize("architecture", ["llama", "llama3"])  # a tied head and one of its own
def test_bytes_held_are_the_checkpoints_and_the_caches(architecture: str, tmp_path: Path) -> None:
    model = save_target(architecture, tmp_path)
    target = open_target(tmp_path, torch.float64, CPU)
    target.reserve(30)
    target.forward([1, 2, 3])
    target.reserve(20)  # fits the block that is there, and starts anew in it
    assert target.length == 0
    cache = 2 * 6 * 2 * 30 * 16 * 8  # keys and values, layers, heads, positions, dims, float64
    assert target.nbytes() == {"weights": 8 * sum(p.numel() for p in model.parameters()), "cache": cache}


def test_what_does_not_load_says_why_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"no usable config\.json"):
        open_target(tmp_path, torch.float32, CPU)
    save_target("llama", tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.rename(tmp_path / "model.bin")
    with pytest.raises(EngineError, match=r"no \.safetensors file"):
        open_target(tmp_path, torch.float32, CPU)
    (tmp_path / "model.bin").rename(weights)
    config = (tmp_path / "config.json").read_text()
    (tmp_path / "config.json").write_text(config.replace('"tie_word_embeddings": true', '"tie_word_embeddings": false'))
    with pytest.raises(EngineError, match=r"tensor lm_head\.weight is missing; the checkpoint is incomplete"):
        open_target(tmp_path, torch.float32, CPU)
    (tmp_path / "config.json").write_text(config.replace('"intermediate_size": 96', '"intermediate_size": 80'))
    with pytest.raises(EngineError, match=r"gate_proj\.weight is \(96, 64\), but its config\.json asks for \(80, 64\)"):
        open_target(tmp_path, torch.float32, CPU)


def test_the_cache_refuses_more_than_was_reserved(tmp_path: Path) -> None:
    save_target("llama", tmp_path)
    target = open_target(tmp_path, torch.float32, CPU)
    target.reserve(4)
    with pytest.raises(EngineError, match="5 positions do not fit the reserved 4"):
        target.forward([1, 2, 3, 4, 5])


@pytest.mark.parametrize(("rows", "length"), [(1, 1), (1, 90), (7, 7), (7, 90), (40, 90)])
def test_attention_beyond_a_cpu_reads_the_same_keys(rows: int, length: int) -> None:
    """What a GPU prefills with, run here on the CPU."""
    from harness.engines.reference.attention import _fused, attend

    torch.manual_seed(0)
    q = torch.randn(4, rows, 16, dtype=torch.float64)
    keys, values = (torch.randn(2, length + 5, 16, dtype=torch.float64) for _ in range(2))
    want = attend(q, keys, values, length, 0.3)
    got = _fused(q, keys[:, :length], values[:, :length], 0.3)
    assert torch.allclose(got, want, atol=1e-12)
