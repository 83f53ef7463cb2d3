"""Configurations and checkpoints: the published ones as facts/drafters.md quotes them, round trips, every mistake."""

from __future__ import annotations

import json
import math
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from drafter_cases import CASES, DSPARK, GEMMA, HIDDEN, QWEN35_LAYERS, VOCAB, ZLAB, changed, qwen35
from safetensors.torch import load_file, save_file
from torch import Tensor

from harness.drafters import (
    Drafter,
    DrafterError,
    as_json,
    build_target_layer_ids,
    load_drafter,
    parse_config,
    random_tensors,
    read_config,
    save_drafter,
    tensor_shapes,
)
from methods.original import Original
from methods.reader import ContextCache, DenseReader
from methods.reading import RequestGeometry

# -------------------------------------------------------------------------------------------- published checkpoints

EIGHT_B = {
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-6,
}
LLAMA = changed(
    ZLAB,
    **EIGHT_B,
    block_size=10,
    dflash_config={"mask_token_id": 128002, "target_layer_ids": [1, 8, 15, 22, 29]},
    num_target_layers=32,
    num_hidden_layers=5,
    layer_types=["full_attention"] * 5,
    rope_theta=500000.0,
    vocab_size=128256,
)
QWEN35 = changed(
    ZLAB,
    **EIGHT_B,
    block_size=16,
    dflash_config={"mask_token_id": 248077, "target_layer_ids": [1, 5, 9, 13, 17, 21, 25, 29]},
    num_target_layers=32,
    num_hidden_layers=6,
    layer_types=QWEN35_LAYERS,
    sliding_window=4096,
    use_sliding_window=True,
    rope_theta=None,
    rope_parameters={"rope_theta": 1e7, "rope_type": "default"},
    max_position_embeddings=262144,
    vocab_size=248320,
)
GEMMA_12B = changed(
    GEMMA,
    attention_bias=False,
    block_size=7,
    enable_moe_block=False,
    final_logit_softcapping=30.0,
    global_head_dim=512,
    head_dim=256,
    hidden_size=3840,
    hidden_size_per_layer_input=0,
    intermediate_size=15360,
    layer_types=["full_attention"] * 5,
    markov_rank=256,
    enable_confidence_head=True,
    confidence_head_with_markov=True,
    mask_token_id=4,
    max_position_embeddings=262144,
    num_attention_heads=16,
    num_global_key_value_heads=1,
    num_key_value_heads=8,
    num_hidden_layers=5,
    num_target_layers=48,
    sliding_window=1024,
    target_layer_ids=[5, 17, 29, 41, 46],
    vocab_size=262144,
)


def parameters(raw: dict[str, Any]) -> int:
    return sum(math.prod(shape) for shape in tensor_shapes(parse_config(raw)).values())


def test_published_sizes() -> None:
    """Tensor and parameter counts of the released files (facts/drafters.md 1.4 and 1.6)."""
    assert (len(tensor_shapes(parse_config(LLAMA))), parameters(LLAMA)) == (58, 1_048_626_432)
    assert (len(tensor_shapes(parse_config(QWEN35))), parameters(QWEN35)) == (69, 1_291_904_512)


def test_llama_config() -> None:
    config = parse_config(LLAMA, block=10)
    assert (config.family, config.block, config.proposals, config.scale) == ("dflash", 10, 9, 128**-0.5)
    assert all(layer.kind == "full_attention" and not layer.block_causal for layer in config.layers)
    config.check_target(layers=32, hidden=4096, vocab=128256)


def test_qwen35_config() -> None:
    config = parse_config(QWEN35)
    assert (config.block, config.proposals, config.rope["rope_theta"]) == (16, 15, 1e7)
    assert [layer.kind for layer in config.layers] == QWEN35_LAYERS
    assert [layer.native_window for layer in config.layers] == [4096] * 5 + [None]
    assert [layer.block_causal for layer in config.layers] == [True] * 5 + [False]
    assert len(config.target_layer_ids) == 8


def test_gemma_config() -> None:
    config = parse_config(GEMMA_12B)
    assert (config.family, config.block, config.proposals) == ("dspark_gemma4", 7, 7)
    assert (config.head_dim, config.heads, config.kv_heads, config.k_eq_v) == (512, 16, 1, True)
    assert (config.scale, config.softcap, config.markov_rank) == (1.0, 30.0, 256)
    assert config.confidence_inputs == 3840 + 256
    assert config.geometry().rope.rotated == 64
    assert torch.tensor(config.embed_scale, dtype=torch.bfloat16).item() == 62.0
    names = tensor_shapes(config)
    assert not any("v_proj" in name or "v_norm" in name for name in names)
    assert names["layers.0.layer_scalar"] == (1,)


def test_qwen3_block7_config() -> None:
    raw = changed(DSPARK, **EIGHT_B, block_size=7, target_layer_ids=[1, 9, 17, 25, 33], num_target_layers=36)
    config = parse_config(changed(raw, mask_token_id=151669, vocab_size=151936, rope_theta=1e6))
    assert (config.family, config.block, config.proposals, config.markov_rank) == ("dspark_qwen3", 7, 7, 0)
    assert not any("markov" in name or "confidence" in name for name in tensor_shapes(config))


@pytest.mark.parametrize(
    "layers,features,ids",
    [
        (32, 5, (1, 8, 15, 22, 29)),
        (32, 8, (1, 5, 9, 13, 17, 21, 25, 29)),
        (36, 5, (1, 9, 17, 25, 33)),
        (30, 5, (1, 8, 14, 20, 27)),
        (30, 4, (1, 10, 18, 27)),
        (30, 3, (1, 14, 27)),
        (48, 5, (1, 12, 23, 34, 45)),
        (24, 1, (12,)),
    ],
)
def test_build_target_layer_ids(layers: int, features: int, ids: tuple[int, ...]) -> None:
    assert build_target_layer_ids(layers, features) == ids


def test_zlab_layer_ids_default_to_the_formula() -> None:
    raw = changed(LLAMA, dflash_config={"target_layer_ids": None})
    assert parse_config(raw).target_layer_ids == (1, 8, 15, 22, 29)


# ---------------------------------------------------------------------------------------- reading the configuration


def test_drafting_keys_may_live_at_the_top_level_or_in_dflash_config() -> None:
    nested = changed(ZLAB, block_size=None, dflash_config={"block_size": 5, "num_target_layers": 9})
    flat = changed(ZLAB, dflash_config=None, mask_token_id=60, target_layer_ids=[1, 4, 6])
    assert parse_config(nested) == parse_config(flat) == parse_config(ZLAB)


def test_a_head_is_an_even_share_of_the_hidden_units_unless_the_file_says() -> None:
    assert parse_config(changed(ZLAB, head_dim=None)).head_dim == HIDDEN // 4


def test_the_rope_may_be_written_in_the_old_or_the_new_way() -> None:
    new = changed(ZLAB, rope_theta=None, rope_parameters={"rope_theta": 10000.0, "rope_type": "default"})
    by_kind = changed(new, rope_parameters={"full_attention": new["rope_parameters"]})
    assert parse_config(new) == parse_config(by_kind) == parse_config(ZLAB)
    old = changed(ZLAB, rope_scaling={"type": "yarn", "factor": 2.0})
    assert parse_config(old).rope == {
        "rope_theta": 10000.0,
        "rope_type": "yarn",
        "factor": 2.0,
        "original_max_position_embeddings": 512,
    }


def test_a_zlab_softcap_of_zero_is_none() -> None:
    assert parse_config(changed(ZLAB, final_logit_softcapping=0.0)).softcap is None


def test_loaded_weights_outlive_their_file(tmp_path: Path) -> None:
    """No tensor stays a view of the mapped file, which a training run may be about to replace."""
    config = parse_config(ZLAB)
    save_drafter(tmp_path, config, random_tensors(config, 5))
    drafter = load_drafter(tmp_path, dtype=torch.float32, device="cpu")
    assert drafter.dtype == torch.float32
    maps = Path("/proc/self/maps")
    assert not maps.exists() or str(tmp_path) not in maps.read_text()


def test_the_window_survives_what_transformers_would_drop() -> None:
    """Qwen3Config forgets sliding_window unless use_sliding_window is set (model-serving-minefield#107); we do not."""
    raw = qwen35(use_sliding_window=None)
    assert [layer.native_window for layer in parse_config(raw).layers] == [7] * 5 + [None]
    transformers = pytest.importorskip("transformers")
    kept = {key: raw[key] for key in ("sliding_window", "layer_types", "num_hidden_layers")}
    assert transformers.Qwen3Config(**kept).sliding_window is None


@pytest.mark.parametrize(
    "values,causal",
    [
        ({}, [True] * 5 + [False]),
        ({"is_causal": False}, [False] * 6),
        ({"is_causal": True}, [True] * 6),
        ({"dflash_config": {"causal": False}}, [False] * 6),
        ({"is_causal": True, "dflash_config": {"causal": False}}, [True] * 6),
    ],
)
def test_causality_in_the_block(values: dict[str, Any], causal: list[bool]) -> None:
    assert [layer.block_causal for layer in parse_config(qwen35(**values)).layers] == causal


CONFIG_MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "unknown architecture": (changed(ZLAB, architectures=["DFlash2"]), "architectures is ['DFlash2']"),
    "no architecture": (changed(ZLAB, architectures=None), "architectures is []"),
    "no block size": (changed(ZLAB, block_size=None), "block_size is missing"),
    "block size of one": (changed(ZLAB, block_size=1), "block_size is 1, expected an integer of at least 2"),
    "two block sizes": (
        changed(ZLAB, dflash_config={"block_size": 8}),
        "block_size is 5 at the top level but 8 in dflash_config",
    ),
    "no mask token": (changed(DSPARK, mask_token_id=None), "mask_token_id is missing"),
    "mask outside vocabulary": (changed(DSPARK, mask_token_id=61), "mask_token_id 61 is outside the vocabulary of 61"),
    "layer_types length": (changed(ZLAB, num_hidden_layers=3), "layer_types has 2 entries for num_hidden_layers 3"),
    "layer kind": (
        changed(ZLAB, layer_types=["full_attention", "linear_attention"]),
        "layer_types holds 'linear_attention'",
    ),
    "sliding without a window": (qwen35(sliding_window=None), "sliding_window is missing"),
    "sliding switched off": (qwen35(use_sliding_window=False), "but use_sliding_window is false"),
    "two windows": (qwen35(dflash_config={"swa_window_size": 9}), "swa_window_size is 9, only 7 is supported"),
    "window without sliding layers": (changed(ZLAB, dflash_config={"use_swa": True}), "use_swa is true, but"),
    "window without layer_types": (
        changed(ZLAB, layer_types=None, use_sliding_window=True),
        "layer_types does not say which layers have it",
    ),
    "gemma sliding": (
        changed(GEMMA, layer_types=["sliding_attention", "full_attention"]),
        "sliding_attention layers are not supported in a Gemma-4 drafter",
    ),
    "causality": (changed(ZLAB, is_causal="yes"), "is_causal is 'yes', expected true or false"),
    "layer id beyond the target": (
        changed(ZLAB, dflash_config={"target_layer_ids": [1, 9]}),
        "target_layer_ids holds 9, but a target's layers are numbered from 0 to 8",
    ),
    "negative layer id": (changed(DSPARK, target_layer_ids=[-1, 3]), "target_layer_ids holds -1"),
    "unordered layer ids": (changed(DSPARK, target_layer_ids=[4, 1]), "target_layer_ids [4, 1] must increase"),
    "no layer ids": (changed(DSPARK, target_layer_ids=None), "target_layer_ids is None, expected a list"),
    "layer ids of another type": (changed(DSPARK, target_layer_ids="1,2"), "is '1,2', expected a list"),
    "no target layers": (changed(DSPARK, num_target_layers=None), "num_target_layers is missing"),
    "no way to know the layer ids": (
        changed(ZLAB, num_target_layers=None, dflash_config={"target_layer_ids": None}),
        "target_layer_ids is None, expected a list",
    ),
    "no theta": (changed(ZLAB, rope_theta=None), "rope_theta is None; the file must give a positive one"),
    "two thetas": (
        changed(ZLAB, rope_parameters={"rope_theta": 5.0}),
        "rope_theta is 10000.0 at the top level but 5.0 in rope_parameters",
    ),
    "two rope types": (
        changed(ZLAB, rope_parameters={"rope_type": "default"}, rope_scaling={"rope_type": "yarn", "factor": 2.0}),
        "rope_scaling says rope_type 'yarn', another entry 'default'",
    ),
    "rope by layer kind": (
        qwen35(rope_parameters={"full_attention": {"rope_theta": 1.0}, "sliding_attention": {"rope_theta": 2.0}}),
        "rope_parameters must give all the drafter's layers one RoPE",
    ),
    "partial rotary": (changed(ZLAB, rope_parameters={"partial_rotary_factor": 0.25}), "partial_rotary_factor is 0.25"),
    "activation": (changed(ZLAB, hidden_act="gelu"), "hidden_act is 'gelu', only 'silu' is supported"),
    "bias": (changed(ZLAB, attention_bias=True), "attention_bias is True, only False is supported"),
    "next-token labels": (changed(ZLAB, sample_from_anchor=True), "sample_from_anchor is True"),
    "grouping": (changed(ZLAB, num_key_value_heads=3), "4 query heads cannot share 3 key-value heads"),
    "markov kind": (changed(DSPARK, markov_rank=4, markov_head_type="rnn"), "markov_head_type is 'rnn'"),
    "no markov rank": (changed(DSPARK, markov_rank=None), "markov_rank is missing"),
    "confidence without markov": (
        changed(DSPARK, enable_confidence_head=True, confidence_head_with_markov=True),
        "confidence_head_with_markov is true, but markov_rank is 0",
    ),
    "mixture of experts": (changed(GEMMA, enable_moe_block=True), "enable_moe_block is True"),
    "softcap": (changed(GEMMA, final_logit_softcapping=-1.0), "final_logit_softcapping is -1.0, expected a positive"),
    "text for a number": (changed(ZLAB, hidden_size="4096"), "hidden_size is '4096', expected an integer"),
    "reduced vocabulary": (changed(ZLAB, draft_vocab_size=32), "draft_vocab_size is 32, only 61 is supported"),
}


@pytest.mark.parametrize("name", CONFIG_MISTAKES)
def test_a_contradicting_config_is_one_clear_line(name: str) -> None:
    raw, expected = CONFIG_MISTAKES[name]
    with pytest.raises(DrafterError) as caught:
        parse_config(raw, where="drafter: config.json")
    line = str(caught.value)
    assert expected in line
    assert "\n" not in line
    assert line.startswith("drafter: config.json: ")


def test_the_users_block_must_be_the_checkpoints() -> None:
    assert parse_config(ZLAB, block=5).block == 5
    with pytest.raises(DrafterError, match=r"block size 4 was asked for, but the checkpoint's block_size is 5$"):
        parse_config(ZLAB, block=4)


def test_the_target_must_be_the_drafters() -> None:
    zlab, deepspec = parse_config(ZLAB), parse_config(DSPARK)
    zlab.check_target(layers=9, hidden=HIDDEN, vocab=VOCAB + 1)  # z-lab borrows the head, whatever its size
    unsaid = parse_config(changed(ZLAB, num_target_layers=None))
    unsaid.check_target(layers=7, hidden=HIDDEN, vocab=VOCAB)
    for check, line in [
        (lambda: unsaid.check_target(6, HIDDEN, VOCAB), "the drafter reads layer 6 of a target of 6 layers"),
        (lambda: zlab.check_target(8, HIDDEN, VOCAB), "the drafter needs a target of 9 layers, this one has 8"),
        (lambda: zlab.check_target(9, 32, VOCAB), "the drafter's hidden size is 24, the target's is 32"),
        (lambda: zlab.check_target(9, HIDDEN, 60), "the drafter's mask token 60 is outside the target's 60 tokens"),
        (lambda: deepspec.check_target(9, HIDDEN, 62), "the drafter's vocabulary has 61 tokens, the target's 62"),
    ]:
        with pytest.raises(DrafterError) as caught:
            check()
        assert str(caught.value) == line


# ----------------------------------------------------------------------------------------------------------- files


def logits(drafter: Drafter, embed: Tensor) -> Tensor:
    """What the drafter proposes from, with ``embed`` [V, H] as the target's embedding and head."""
    drafter.bind(embed, embed)
    config, generator = drafter.config, torch.Generator().manual_seed(0)
    features = torch.randn(6, len(config.target_layer_ids) * HIDDEN, generator=generator, dtype=torch.float64)
    geometry = config.geometry()
    cache = ContextCache(geometry, 8, torch.float64)
    cache.append(*drafter.context_kv(features))
    reader = DenseReader(Original(), geometry, RequestGeometry(6, 2, config.block), cache)
    reader.prepare()
    return drafter.draft(3, reader).logits


@pytest.mark.parametrize("name", CASES)
def test_a_saved_drafter_loads_as_it_was(name: str, tmp_path: Path) -> None:
    config = parse_config(CASES[name])
    assert parse_config(as_json(config)) == config
    tensors = random_tensors(config, 5)
    save_drafter(tmp_path, config, tensors)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "model.safetensors"]
    assert read_config(tmp_path) == config
    loaded = load_drafter(tmp_path, dtype=torch.float64, device="cpu")
    embed = torch.randn(VOCAB, HIDDEN, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    original = Drafter(config, tensors.get, dtype=torch.float64, device="cpu")
    assert torch.equal(logits(loaded, embed), logits(original, embed))


def test_saved_zlab_configs_survive_qwen3config() -> None:
    """Stock engines read our files through Qwen3Config, which must keep the window, the layer kinds and the theta."""
    transformers = pytest.importorskip("transformers")
    raw = as_json(parse_config(qwen35()))
    read = transformers.Qwen3Config(**{key: value for key, value in raw.items() if key != "model_type"})
    assert (read.sliding_window, read.layer_types, read.head_dim) == (7, QWEN35_LAYERS, 8)
    assert read.rope_parameters["rope_theta"] == 10000.0


def test_bfloat16_weights_keep_their_dtype_on_disk(tmp_path: Path) -> None:
    config = parse_config(ZLAB)
    tensors = {name: tensor.to(torch.bfloat16) for name, tensor in random_tensors(config, 5).items()}
    save_drafter(tmp_path, config, tensors)
    assert load_file(tmp_path / "model.safetensors")["fc.weight"].dtype == torch.bfloat16
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"
    assert load_drafter(tmp_path, dtype=torch.bfloat16, device="cpu").dtype == torch.bfloat16


def test_sharded_checkpoints(tmp_path: Path) -> None:
    config = parse_config(ZLAB)
    tensors = random_tensors(config, 5)
    save_drafter(tmp_path, config, tensors)
    (tmp_path / "model.safetensors").unlink()
    names, parts = sorted(tensors), ["model-1.safetensors", "model-2.safetensors"]
    index = {name: parts[i % 2] for i, name in enumerate(names)}
    for part in parts:
        save_file({name: tensors[name] for name in names if index[name] == part}, tmp_path / part)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    embed = torch.randn(VOCAB, HIDDEN, dtype=torch.float64)
    whole = Drafter(config, tensors.get, dtype=torch.float64, device="cpu")
    assert torch.equal(logits(load_drafter(tmp_path, dtype=torch.float64, device="cpu"), embed), logits(whole, embed))
    (tmp_path / parts[1]).unlink()
    refused(tmp_path, "missing weight file model-2.safetensors")
    outside = {"weight_map": dict.fromkeys(names, "../other.safetensors")}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(outside))
    save_file(tensors, tmp_path.parent / "other.safetensors")
    refused(tmp_path, "missing weight file other.safetensors")


def test_a_zlab_checkpoint_may_ship_its_own_head(tmp_path: Path) -> None:
    config = parse_config(ZLAB)
    own = {name: torch.randn(VOCAB, HIDDEN) for name in ("embed_tokens.weight", "lm_head.weight")}
    save_drafter(tmp_path, config, random_tensors(config, 5) | own)
    drafter = load_drafter(tmp_path, dtype=torch.float64, device="cpu")
    one, other = torch.randn(2, VOCAB, HIDDEN, dtype=torch.float64)
    assert torch.equal(logits(drafter, one), logits(drafter, other))


def refused(folder: Path, expected: str) -> None:
    with pytest.raises(DrafterError) as caught:
        load_drafter(folder, dtype=torch.float32, device="cpu")
    line = str(caught.value)
    assert expected in line
    assert "\n" not in line
    assert str(folder) in line


def rewritten(change: Callable[[dict[str, Tensor]], None]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors")

    return damage


def _reshape(tensors: dict[str, Tensor]) -> None:
    tensors["layers.1.mlp.up_proj.weight"] = torch.zeros(40, HIDDEN - 1)


def _pickle_instead(folder: Path) -> None:
    """A pickle that would leave a mark if anything opened it."""
    (folder / "model.safetensors").unlink()

    class Mark:
        def __reduce__(self) -> Any:
            return (Path.touch, (folder / "opened",))

    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Mark()))


FILE_MISTAKES: dict[str, tuple[Callable[[Path], None], str]] = {
    "missing tensor": (rewritten(lambda t: t.pop("fc.weight")), "missing tensor fc.weight"),
    "missing tensors": (
        rewritten(lambda t: [t.pop(name) for name in list(t) if name.startswith("layers.1.")]),  # type: ignore[arg-type,return-value]
        "missing tensor layers.1.input_layernorm.weight and 10 more",
    ),
    "unexpected tensor": (
        rewritten(lambda t: t.update({"candidate_selector.weight": torch.zeros(1)})),
        "unexpected tensor candidate_selector.weight",
    ),
    "another layer": (
        rewritten(lambda t: t.update({"layers.2.input_layernorm.weight": torch.zeros(HIDDEN)})),
        "unexpected tensor layers.2.input_layernorm.weight",
    ),
    "shape": (
        rewritten(_reshape),
        "tensor layers.1.mlp.up_proj.weight has shape [40, 23], config.json asks for [40, 24]",
    ),
    "truncated": (
        lambda folder: (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:-100]),
        "not a readable safetensors file",
    ),
    "empty": (lambda folder: (folder / "model.safetensors").write_bytes(b""), "not a readable safetensors file"),
    "twice": (
        lambda folder: (folder / "b.safetensors").write_bytes((folder / "model.safetensors").read_bytes()),
        "is in two weight files",
    ),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), "no safetensors file"),
    "pickle": (_pickle_instead, "only pickled weights (pytorch_model.bin), which are never loaded"),
    "no config": (lambda folder: (folder / "config.json").unlink(), "config.json: not found"),
    "broken config": (lambda folder: (folder / "config.json").write_text("{"), "config.json: not readable as JSON"),
    "config of another kind": (lambda folder: (folder / "config.json").write_text("[]"), "not a JSON object"),
    "rope of another kind": (
        lambda folder: (folder / "config.json").write_text(json.dumps(changed(ZLAB, rope_scaling={"type": "ntk"}))),
        "config.json: its RoPE cannot be built: rope_type 'ntk' is not supported",
    ),
}


@pytest.mark.parametrize("name", FILE_MISTAKES)
def test_a_damaged_checkpoint_is_one_clear_line(name: str, tmp_path: Path) -> None:
    config = parse_config(ZLAB)
    save_drafter(tmp_path, config, random_tensors(config, 5))
    damage, expected = FILE_MISTAKES[name]
    damage(tmp_path)
    refused(tmp_path, expected)
    assert not (tmp_path / "opened").exists()


def test_saving_checks_the_tensors_first(tmp_path: Path) -> None:
    config = parse_config(ZLAB)
    tensors = random_tensors(config, 5)
    del tensors["norm.weight"]
    with pytest.raises(DrafterError, match=r"missing tensor norm\.weight$"):
        save_drafter(tmp_path / "new", config, tensors)
    assert not (tmp_path / "new").exists()


def test_sources_that_are_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for source in (tmp_path / "none", str(tmp_path / "none"), "./none", "none"):
        with pytest.raises(DrafterError, match=r": no such folder, and not a Hub id of the form owner/name$"):
            read_config(source)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    with pytest.raises(DrafterError) as caught:
        read_config("fold-bench/none", revision="abc", offline=True)
    line = str(caught.value)
    assert line.startswith("fold-bench/none at revision abc: not readable in the local Hub cache (offline); ")
    assert "\n" not in line


def test_a_hub_id_fetches_the_config_first_and_no_pickles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    config = parse_config(ZLAB)
    save_drafter(tmp_path, config, random_tensors(config, 5))
    asked: list[dict[str, Any]] = []

    def file(source: str, **options: Any) -> str:
        asked.append({"source": source, **options})
        return str(tmp_path / options["filename"])

    def snapshot(source: str, **options: Any) -> str:
        asked.append({"source": source, **options})
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", file)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    load_drafter("owner/name", revision="abc", block=5, dtype=torch.float32, device="cpu", offline=True)
    pinned = {"source": "owner/name", "revision": "abc", "local_files_only": True}
    wanted = ["config.json", "*.safetensors", "model.safetensors.index.json"]
    assert asked == [pinned | {"filename": "config.json"}, pinned | {"allow_patterns": wanted}]
    asked.clear()
    with pytest.raises(DrafterError, match="block size 4 was asked for"):
        load_drafter("owner/name", block=4, dtype=torch.float32, device="cpu")
    assert len(asked) == 1  # the contradiction is found before the weights are fetched
