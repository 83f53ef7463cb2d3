"""Rotary embeddings: frequencies of every form, the rotation, and long positions."""

from __future__ import annotations

import math

import pytest
import torch
from read_cases import HEAD_DIM, ORACLE_ROPES, REFERENCE, ROPES, gap, oracle, oracle_yarn_rope, product_rope

from methods.reading import YarnScaling
from methods.rope import Rope, build_rope, rotate, yarn_factor


@pytest.mark.parametrize("form", ROPES)
def test_frequencies_and_factor(form):
    ours, theirs = product_rope(form), ORACLE_ROPES[form]
    assert ours.inv_freq.dtype == torch.float64
    assert ours.inv_freq.tolist() == pytest.approx(theirs.inv_freq, rel=1e-14)
    assert ours.mscale == pytest.approx(theirs.mscale, rel=1e-15)


@pytest.mark.parametrize("form", ROPES)
def test_rotation_places_a_pair_at_its_distance(form):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2, 5, 3, HEAD_DIM, generator=generator, dtype=torch.float64)
    places = [0, 1, 17, 1000.5, -4]
    turned = rotate(x, torch.tensor(places, dtype=torch.float64), product_rope(form))
    by_hand = [
        [[oracle.rotate(v, at, ORACLE_ROPES[form]) for v in heads] for heads, at in zip(rows, places, strict=True)]
        for rows in x.tolist()
    ]
    assert gap(turned, by_hand) < 1e-12
    q, k = x[0, :1], x[1, :1]
    dots = (rotate(q, [29], product_rope(form)) * rotate(k, [12], product_rope(form))).sum(-1)[0]
    for head in range(3):
        wanted = oracle.logit(q[0, head].tolist(), k[0, head].tolist(), 17, ORACLE_ROPES[form], 1.0)
        assert float(dots[head]) == pytest.approx(wanted, abs=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_far_position_is_as_exact_as_a_near_one(dtype):
    x = torch.randn(1, 2, HEAD_DIM, generator=torch.Generator().manual_seed(2)).to(dtype)
    exact = rotate(x.double(), [1_000_003], product_rope("default"))
    ours = rotate(x, torch.tensor([1_000_003]), product_rope("default"))
    assert ours.dtype == dtype
    unit = torch.finfo(dtype).eps
    assert float((ours.double() - exact).abs().max()) < 4 * unit


@pytest.mark.parametrize("form", [f for f in ROPES if f != "yarn"])
@pytest.mark.parametrize("factor", [1.0, 2.5, 40.0])
@pytest.mark.parametrize("temperature", [True, False])
def test_yarn_of_every_form(form, factor, temperature):
    ours = product_rope(form).yarn(YarnScaling(factor, REFERENCE, temperature))
    theirs = oracle_yarn_rope(form, factor, temperature)
    assert ours.inv_freq.tolist() == pytest.approx(theirs.inv_freq, rel=1e-14)
    assert ours.mscale == pytest.approx(theirs.mscale, rel=1e-15)


def test_yarn_ramp_of_the_paper_models():
    """Pairs that the ramp touches: 13..31 of 64 for Llama (theta 5e5, R 3072); Gemma turns only the first 64 of 256."""
    llama = build_rope({"rope_theta": 5e5}, 128)
    scaled = llama.yarn(YarnScaling(39.83, 3072))
    ratio = scaled.inv_freq / llama.inv_freq
    assert [i for i in range(64) if ratio[i] == 1.0] == list(range(14))
    assert [i for i in range(64) if ratio[i] == pytest.approx(1 / 39.83)] == list(range(31, 64))
    gemma = build_rope({"rope_theta": 1e6, "rope_type": "proportional", "partial_rotary_factor": 0.25}, 512)
    assert len(gemma.inv_freq) == 256 and int((gemma.inv_freq > 0).sum()) == 64
    moved = gemma.yarn(YarnScaling(41.6, 4096)).inv_freq / gemma.inv_freq
    assert [i for i in range(64) if moved[i] != 1.0] == list(range(56, 64))


def test_yarn_factor_is_the_papers():
    assert yarn_factor(122000, 128, 10, 3072) == 122368 / 3072
    assert yarn_factor(1000, 128, 10, 3072) == 1.0
    assert yarn_factor(3000, 62, 10, 3072) == 1.0
    assert yarn_factor(3000, 63, 10, 3072) == 3328 / 3072  # one token over a multiple of 256


@pytest.mark.parametrize(
    "extra",
    [
        {"attention_factor": 1.25},
        {"mscale": 0.8, "mscale_all_dim": 0.4},
        {"beta_fast": 16.0, "beta_slow": 2.0},
        {"truncate": False},
        {"beta_fast": 4.0, "beta_slow": 4.0, "truncate": False},  # a ramp of no width
        {"rope_theta": 4.0},  # no pair is slow enough to end the ramp: the last dim does
        {"mscale": 0.8},  # half a pair does not count
        {"mscale_all_dim": 0.8},
        {},
    ],
)
def test_a_checkpoints_own_yarn(extra):
    params = {"rope_theta": 1e4, "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256, **extra}
    ours = build_rope(params, 64)
    factor = extra.get("attention_factor")
    if {"mscale", "mscale_all_dim"} <= set(extra):
        factor = (0.08 * math.log(4) + 1) / (0.04 * math.log(4) + 1)
    shape = {k: extra[k] for k in ("beta_fast", "beta_slow", "truncate") if k in extra}
    theirs = oracle.rope_yarn(params["rope_theta"], 64, 4.0, 256, mscale=factor, **shape)
    assert ours.inv_freq.tolist() == pytest.approx(theirs.inv_freq, rel=1e-14)
    assert ours.mscale == pytest.approx(theirs.mscale, rel=1e-15)


@pytest.mark.parametrize("form", ROPES)
def test_same_frequencies_as_transformers(form):
    """An independent reading of the parameters; its tables are float32."""
    transformers = pytest.importorskip("transformers")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    params = {"rope_type": "default", "partial_rotary_factor": 1.0, **ROPES[form]}
    config = transformers.LlamaConfig(
        hidden_size=4 * HEAD_DIM, num_attention_heads=4, head_dim=HEAD_DIM, rope_parameters=params,
        max_position_embeddings=4096,
    )  # fmt: skip
    if params["rope_type"] == "default":
        dim = int(HEAD_DIM * params["partial_rotary_factor"])
        freq, factor = 1.0 / (params["rope_theta"] ** (torch.arange(0, dim, 2).float() / dim)), 1.0
    else:
        freq, factor = ROPE_INIT_FUNCTIONS[params["rope_type"]](config, "cpu")
    ours = build_rope(params, HEAD_DIM)
    torch.testing.assert_close(ours.inv_freq.float(), freq, rtol=1e-6, atol=0)
    assert ours.mscale == pytest.approx(factor)


def test_the_older_name_of_the_rope_type_is_read():
    older = {"type" if key == "rope_type" else key: value for key, value in ROPES["llama3"].items()}
    assert torch.equal(build_rope(older, HEAD_DIM).inv_freq, product_rope("llama3").inv_freq)


def test_proportional_factor_divides_the_frequencies():
    plain = build_rope(ROPES["proportional"], HEAD_DIM)
    slow = build_rope({**ROPES["proportional"], "factor": 8.0}, HEAD_DIM)
    torch.testing.assert_close(slow.inv_freq * 8, plain.inv_freq)


@pytest.mark.parametrize(
    ("params", "says"),
    [
        ({"rope_theta": 1e4, "rope_type": "dynamic"}, "default, llama3, proportional, yarn"),
        ({}, "rope_theta"),
        ({"rope_theta": 1e4, "rope_type": "llama3", "factor": 8.0}, "low_freq_factor"),
        ({"rope_theta": 1e4, "rope_type": "yarn", "factor": 8.0}, "original_max_position_embeddings"),
        ({"rope_theta": 1e4, "partial_rotary_factor": 1.5}, "partial_rotary_factor"),
        ({"rope_theta": 1e4, "partial_rotary_factor": 0.2}, "even"),
    ],
)
def test_wrong_parameters_end_in_one_line(params, says):
    with pytest.raises(ValueError, match=says) as error:
        build_rope(params, HEAD_DIM)
    assert "\n" not in str(error.value)


def test_yarn_needs_a_factor_and_a_base():
    with pytest.raises(ValueError, match="factor"):
        product_rope("default").yarn(YarnScaling(0.5, 64))
    with pytest.raises(ValueError, match="reference 0"):
        product_rope("default").yarn(YarnScaling(2.0, 0))
    with pytest.raises(ValueError, match="build_rope"):
        Rope(product_rope("default").inv_freq).yarn(YarnScaling(2.0, 64))
