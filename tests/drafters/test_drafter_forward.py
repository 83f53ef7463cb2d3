"""One round of drafting, against a second implementation, against transformers' layers, and against the conventions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from drafter_cases import CASES, DSPARK, GEMMA, HIDDEN, VOCAB, ZLAB, changed, qwen35, reference_round
from torch import Tensor

from harness.drafters import (
    Drafter,
    DrafterConfig,
    DrafterError,
    features_from_hidden_states,
    parse_config,
    random_drafter,
    random_tensors,
)
from methods.original import Original
from methods.reader import CachedReader, ContextCache, DenseReader
from methods.reading import RequestGeometry

F64 = torch.float64


def noise(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


EMBED, HEAD = noise(VOCAB, HIDDEN, seed=2), noise(VOCAB, HIDDEN, seed=3) / HIDDEN**0.5


def made(raw: dict[str, Any], dtype: torch.dtype = F64) -> tuple[DrafterConfig, Drafter, dict[str, Tensor]]:
    config = parse_config(raw)
    drafter = random_drafter(config, dtype=dtype, device="cpu", seed=7)
    drafter.bind(EMBED.to(dtype), HEAD.to(dtype))
    return config, drafter, {name: tensor.to(F64) for name, tensor in random_tensors(config, 7).items()}


def original(
    config: DrafterConfig, k: Tensor, v: Tensor, reader: type[DenseReader] | type[CachedReader] = DenseReader
) -> DenseReader | CachedReader:
    """A reader of a context as the drafter was trained to read it."""
    geometry = config.geometry()
    cache = ContextCache(geometry, k.shape[1] + 1, k.dtype)
    cache.append(k, v)
    opened = reader(Original(), geometry, RequestGeometry(k.shape[1] + 1, 1, config.block), cache)
    opened.prepare()
    return opened


def features_for(config: DrafterConfig, n: int) -> Tensor:
    return noise(n, len(config.target_layer_ids) * config.hidden, seed=n)


def close(a: Tensor, b: Tensor, tolerance: float = 1e-10) -> bool:
    return torch.allclose(a, b, rtol=0, atol=tolerance)


@pytest.mark.parametrize("context", [0, 1, 19])
@pytest.mark.parametrize("name", CASES)
def test_a_round_equals_the_reference(name: str, context: int) -> None:
    raw = CASES[name]
    config, drafter, tensors = made(raw)
    features = features_for(config, context)
    tokens, logits = reference_round(raw, tensors, features, 11, EMBED, HEAD)
    assert len(tokens) == config.proposals
    for reader in (DenseReader, CachedReader):
        proposal = drafter.draft(11, original(config, *drafter.context_kv(features), reader))
        assert proposal.tokens == tokens
        assert close(proposal.logits, logits)


@pytest.mark.parametrize("dtype,tolerance", [(torch.float32, 1e-4), (torch.bfloat16, 0.25)])
@pytest.mark.parametrize("name", ["dflash", "dflash_qwen35", "dspark_rank4", "gemma_rank4"])
def test_shorter_dtypes_compute_the_same(name: str, dtype: torch.dtype, tolerance: float) -> None:
    config, exact, _ = made(CASES[name])
    _, short, _ = made(CASES[name], dtype)
    features = features_for(config, 19)
    k, v = short.context_kv(features.to(dtype))
    assert k.dtype == v.dtype == dtype
    # The backbone, not the tokens: a near tie may fall either way.
    got = short.hidden(11, original(config, k, v)).to(F64)
    assert close(got, exact.hidden(11, original(config, *exact.context_kv(features))), tolerance)
    assert short.draft(11, original(config, k, v)).logits.dtype == dtype


@pytest.mark.parametrize("name", CASES)
def test_context_keys_and_values_do_not_depend_on_the_chunks(name: str) -> None:
    config, drafter, _ = made(CASES[name])
    features = features_for(config, 19)
    k, v = drafter.context_kv(features)
    assert k.shape == (len(config.layers), 19, config.kv_heads, config.head_dim)
    assert v.shape == (len(config.layers), 19, config.kv_heads, config.value_dim)
    for sizes in ([1] * 19, [8, 8, 3], [18, 1]):
        parts = [drafter.context_kv(chunk) for chunk in features.split(sizes)]
        assert close(torch.cat([part[0] for part in parts], 1), k)
        assert close(torch.cat([part[1] for part in parts], 1), v)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, F64])
@pytest.mark.parametrize("name", ["dflash", "gemma_rank4", "gemma_separate_values"])
def test_an_empty_context_gives_empty_keys(name: str, dtype: torch.dtype) -> None:
    config, drafter, _ = made(CASES[name], dtype)
    k, v = drafter.context_kv(features_for(config, 0).to(dtype))
    assert k.shape == v.shape == (len(config.layers), 0, config.kv_heads, config.head_dim)


def silent_layers(raw: dict[str, Any], **tensors: Tensor) -> Drafter:
    """A drafter whose layers add nothing, so that slot k's output is its own normalised input embedding."""
    config = parse_config(raw)
    weights = random_tensors(config, 0)
    for name, tensor in weights.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor.zero_()
        elif name.endswith("norm.weight") or name.endswith("layer_scalar"):
            tensor.fill_(1.0)
    drafter = Drafter(config, (weights | tensors).get, dtype=F64, device="cpu")
    drafter.bind(EMBED, EMBED)
    return drafter


def test_zlab_drops_the_anchor_slot_and_fills_the_rest_with_masks() -> None:
    drafter = silent_layers(ZLAB)
    reader = original(drafter.config, *drafter.context_kv(features_for(drafter.config, 3)))
    assert nearest(drafter.hidden(11, reader)) == [11, 60, 60, 60, 60]
    assert drafter.draft(11, reader).tokens == [60, 60, 60, 60]
    assert (drafter.config.block, drafter.config.proposals) == (5, 4)


def test_deepspec_proposes_from_every_slot() -> None:
    drafter = silent_layers(DSPARK, **{"embed_tokens.weight": EMBED, "lm_head.weight": EMBED})
    reader = original(drafter.config, *drafter.context_kv(features_for(drafter.config, 3)))
    assert nearest(drafter.hidden(11, reader)) == [11, 60, 60, 60]
    assert drafter.draft(11, reader).tokens == [11, 60, 60, 60]
    assert (drafter.config.block, drafter.config.proposals) == (4, 4)


def nearest(rows: Tensor) -> list[int]:
    """The tokens whose normalised embeddings the rows are."""
    table = EMBED / EMBED.pow(2).mean(-1, keepdim=True).sqrt()
    return torch.cdist(rows, table).argmin(-1).tolist()


def test_the_markov_head_starts_at_the_anchor_and_runs_left_to_right() -> None:
    raw = changed(DSPARK, markov_rank=4)
    weights = random_tensors(parse_config(raw), 0)
    w1, w2 = torch.zeros(VOCAB, 4), torch.zeros(VOCAB, 4)
    for place, (before, after) in enumerate([(11, 5), (5, 23), (23, 42), (42, 11)]):
        w1[before, place], w2[after, place] = 1.0, 1e4  # far above any base logit
    weights |= {"markov_head.markov_w1.weight": w1, "markov_head.markov_w2.weight": w2}
    drafter = Drafter(parse_config(raw), weights.get, dtype=F64, device="cpu")
    reader = original(drafter.config, *drafter.context_kv(features_for(drafter.config, 3)))
    assert drafter.draft(11, reader).tokens == [5, 23, 42, 11]
    assert drafter.draft(23, reader).tokens == [42, 11, 5, 23]


def test_gemma_caps_the_base_logits_before_the_markov_bias() -> None:
    raw = changed(GEMMA, markov_rank=4)
    weights = random_tensors(parse_config(raw), 0)
    weights["lm_head.weight"] *= 100.0
    weights["markov_head.markov_w2.weight"] *= 10.0
    drafter = Drafter(parse_config(raw), weights.get, dtype=F64, device="cpu")
    reader = original(drafter.config, *drafter.context_kv(features_for(drafter.config, 3)))
    assert drafter.draft(11, reader).logits.abs().max() > 3.0  # the cap is 3: only a bias added after it can pass


def test_gemma_holds_its_embedding_scale_in_the_weights_dtype() -> None:
    raw = changed(GEMMA, hidden_size=60, num_attention_heads=1, num_hidden_layers=1, layer_types=["full_attention"])
    config = parse_config(raw)
    assert config.embed_scale == 60**0.5
    weights = random_tensors(config, 0)
    drafter = Drafter(config, weights.get, dtype=torch.bfloat16, device="cpu")
    rows = weights["embed_tokens.weight"][60].to(torch.bfloat16)
    assert torch.equal(drafter._block[1], rows * torch.tensor(7.75, dtype=torch.bfloat16))  # 7.746 in bf16


def test_a_checkpoints_own_head_survives_binding_a_target() -> None:
    config, drafter, _ = made(DSPARK)
    reader = original(config, *drafter.context_kv(features_for(config, 5)))
    before = drafter.draft(11, reader).logits
    drafter.bind(EMBED + 1, HEAD + 1)
    assert torch.equal(drafter.draft(11, reader).logits, before)


def test_a_borrowed_head_is_used_as_given() -> None:
    config, drafter, _ = made(ZLAB)
    reader = original(config, *drafter.context_kv(features_for(config, 5)))
    before = drafter.draft(11, reader).logits
    drafter.bind(EMBED, lambda rows: rows @ HEAD.T)
    assert close(drafter.draft(11, reader).logits, before)


def test_zlab_needs_a_target() -> None:
    config = parse_config(ZLAB)
    drafter = random_drafter(config, dtype=F64, device="cpu")
    with pytest.raises(DrafterError, match=r"^this drafter has no vocabulary head of its own: bind the target's first"):
        drafter.draft(11, original(config, *drafter.context_kv(features_for(config, 5))))
    with pytest.raises(DrafterError, match=r"^the target's embedding is \[61, 23\], the drafter needs \[V, 24\]$"):
        drafter.bind(EMBED[:, 1:], HEAD)
    with pytest.raises(DrafterError, match=r"^the drafter's mask token 60 is outside embedding \[60, 24\]$"):
        drafter.bind(EMBED[1:], HEAD)


def test_features_are_layer_outputs_and_never_the_normalised_last_one() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=32, num_hidden_layers=5, num_attention_heads=4
    )
    torch.manual_seed(0)
    model = transformers.LlamaModel(config).eval()
    outputs: list[Tensor] = []
    for layer in model.layers:
        layer.register_forward_hook(lambda _m, _i, out: outputs.append(out if isinstance(out, Tensor) else out[0]))
    with torch.no_grad():
        states = model(torch.arange(6)[None], output_hidden_states=True).hidden_states
    assert torch.equal(features_from_hidden_states(states, [0, 2, 3]), torch.cat([outputs[i] for i in (0, 2, 3)], -1))
    assert not torch.allclose(states[-1], outputs[4], atol=1e-3)  # the trap
    for wrong in (4, 5, -1):
        message = rf"^hidden_states holds the raw outputs of layers 0 to 3 only, not of layer {wrong}$"
        with pytest.raises(DrafterError, match=message):
            features_from_hidden_states(states, [1, wrong])


def layer_alone(drafter: Drafter) -> tuple[Tensor, Tensor]:
    """The block that enters the first layer and the drafter's output without context."""
    k, v = drafter.context_kv(torch.zeros(0, len(drafter.config.target_layer_ids) * HIDDEN, dtype=F64))
    return drafter._block.clone(), drafter.hidden(60, original(drafter.config, k, v))


def test_without_context_a_layer_is_transformers_qwen3_layer() -> None:
    from transformers.models.qwen3.modeling_qwen3 import Qwen3Config, Qwen3DecoderLayer, Qwen3RotaryEmbedding

    raw = changed(ZLAB, num_hidden_layers=1, layer_types=["full_attention"])
    _, drafter, tensors = made(raw)
    config = Qwen3Config(**{k: v for k, v in raw.items() if k not in ("architectures", "model_type")})
    config._attn_implementation = "eager"
    layer = Qwen3DecoderLayer(config, 0).double().eval()
    prefix = "layers.0."
    state = {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}
    layer.load_state_dict(state)
    block, got = layer_alone(drafter)
    tables = Qwen3RotaryEmbedding(config)(block[None], torch.arange(len(block))[None])
    with torch.no_grad():
        out = layer(block[None], position_embeddings=tables, attention_mask=None)
    expected = torch.nn.functional.rms_norm(_first(out)[0], (HIDDEN,), tensors["norm.weight"], 1e-6)
    assert close(got, expected, 1e-5)  # transformers normalises in float32


def test_without_context_a_layer_is_transformers_gemma4_layer() -> None:
    from transformers.models.gemma4.configuration_gemma4 import Gemma4TextConfig
    from transformers.models.gemma4.modeling_gemma4 import Gemma4TextDecoderLayer, Gemma4TextRotaryEmbedding

    raw = changed(GEMMA, num_hidden_layers=1, layer_types=["full_attention"])
    _, drafter, tensors = made(raw)
    skip = ("architectures", "model_type", "num_target_layers", "target_layer_ids")
    config = Gemma4TextConfig(**{k: v for k, v in raw.items() if k not in skip}, hidden_size_per_layer_input=0)
    config._attn_implementation = "eager"
    layer = Gemma4TextDecoderLayer(config, 0).double().eval()
    prefix = "layers.0."
    layer.load_state_dict({name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)})
    block, got = layer_alone(drafter)
    rotary = Gemma4TextRotaryEmbedding(config)
    tables = rotary(block[None], torch.arange(len(block))[None], "full_attention")
    with torch.no_grad():
        out = layer(block[None], position_embeddings=tables, attention_mask=None, shared_kv_states={})
    expected = torch.nn.functional.rms_norm(_first(out)[0], (HIDDEN,), tensors["norm.weight"], 1e-6)
    assert close(got, expected, 1e-5)


def _first(out: Any) -> Tensor:
    return out if isinstance(out, Tensor) else out[0]


def test_sliding_layers_are_causal_in_the_block_unless_the_config_says_otherwise() -> None:
    """A later mask slot may change an earlier slot's output only through layers that are bidirectional in the block."""
    for causal, changes in [(True, False), (False, True)]:
        raw = qwen35(is_causal=causal)
        config, drafter, _ = made(raw)
        k, v = drafter.context_kv(features_for(config, 9))
        before = drafter.hidden(11, original(config, k, v))
        drafter._block[-1] += 1.0
        after = drafter.hidden(11, original(config, k, v))
        assert torch.equal(before[:-1], after[:-1]) is not changes
