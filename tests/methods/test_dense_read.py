"""Every method's dense read against the brute-force definitions, over the lengths where off-by-ones show."""

from __future__ import annotations

import itertools

import pytest
import torch
from read_cases import (
    BLOCKS,
    HEADS,
    LENGTHS,
    OPTIONS,
    ROPES,
    WINDOW,
    Spec,
    cmr_choice,
    expected,
    gap,
    infllm_choice,
    make,
    matrix,
    oracle,
    product_rope,
)

from methods import METHODS
from methods.attention import Read, dense_read

TOLERANCE = 1e-10


def read(spec: Spec, **changes) -> tuple[Read, oracle.Read]:
    """Our read and the oracle's."""
    tensors = spec.tensors()
    case = oracle.Case.of(*tensors)
    choice, positions = None, None
    if spec.method == "infllm":
        choice, positions = infllm_choice(spec, case)
    elif spec.method == "cmr":
        choice = positions = cmr_choice(spec)
    ours = dense_read(
        make(spec).plan(spec.layer, spec.request),
        *tensors,
        rope=product_rope(spec.rope),
        scale=spec.scale,
        block_causal=spec.layer.block_causal,
        retrieved=None if positions is None else torch.tensor(positions, dtype=torch.long),
        **changes,
    )
    return ours, expected(spec, case, choice)


@pytest.mark.parametrize("method", METHODS)
def test_dense_read_is_the_definition(method):
    for spec in matrix(method):
        ours, theirs = read(spec)
        assert gap(ours.out, theirs.out) < TOLERANCE, spec
        assert gap(ours.lse, theirs.lse) < TOLERANCE, spec


@pytest.mark.parametrize("method", METHODS)
def test_matrix_holds_every_value_of_every_axis(method):
    specs = matrix(method)
    short = [n for n in LENGTHS if isinstance(n, int)]
    assert {(s.N, s.B, s.heads) for s in specs} >= set(itertools.product(short, BLOCKS, HEADS))
    assert {(s.N - WINDOW - s.B, s.B) for s in specs} >= set(itertools.product((-1, 0, 1), BLOCKS))
    for group in (specs, [s for s in specs if s.N > WINDOW + s.B]):
        options = [OPTIONS[method].index(s.options) for s in group]
        assert set(options) == set(range(len(OPTIONS[method])))
        assert {(s.rope, s.native is None) for s in group} == set(itertools.product(ROPES, (True, False)))
        assert {(s.native is None, s.causal) for s in group} == set(itertools.product((True, False), repeat=2))
        assert {(s.gain, s.scale) for s in group} == set(itertools.product((1.0, 30.0), (0.25, 1.0)))
        assert {(i, s.native is None) for i, s in zip(options, group, strict=True)} == set(
            itertools.product(range(len(OPTIONS[method])), (True, False))
        )
        assert {s.native for s in group} >= {None, 5, WINDOW} and any((s.native or 0) >= WINDOW + s.B for s in group)


def test_weights_are_the_shares_of_the_output():
    for method in ("fold", "rerope", "streamingllm"):
        spec = Spec(method, OPTIONS[method][0], 3 * WINDOW, 7, (8, 2), "default")
        with_weights, _ = read(spec, with_weights=True)
        q, k, v, kb, vb = spec.tensors()
        ones, zeros = torch.ones_like(v), torch.zeros_like(vb)
        context_only = dense_read(
            make(spec).plan(spec.layer, spec.request),
            q, k, ones, kb, zeros, rope=product_rope("default"), scale=spec.scale,
        )  # fmt: skip
        assert with_weights.weights.shape == (7, 8, spec.N)
        torch.testing.assert_close(with_weights.weights.sum(-1), context_only.out[..., 0], atol=1e-12, rtol=0)
        mixed = torch.einsum("bhn,nhd->bhd", with_weights.weights, v.repeat_interleave(4, 1))
        assert float((mixed - with_weights.out).abs().max()) > 1e-3  # the block holds the rest
    assert read(spec)[0].weights is None
