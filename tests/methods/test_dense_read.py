"""Every method's dense read against the brute-force definitions, over the lengths where off-by-ones show."""

from __future__ import annotations

import math

import pytest
import torch
from read_cases import (
    BLOCKS,
    HEADS,
    LENGTHS,
    OPTIONS,
    ORACLE_ROPES,
    ROPES,
    SINKS,
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
    assert {(s.N, s.B, s.heads) for s in specs} >= {
        (n, b, h) for n in LENGTHS if isinstance(n, int) for b in BLOCKS for h in HEADS
    }
    assert {s.rope for s in specs} == set(ROPES)
    assert [o for o in OPTIONS[method] if not any(s.options == o for s in specs)] == []
    for axis in ("gain", "scale", "causal"):
        assert len({getattr(s, axis) for s in specs}) == 2
    long = [s for s in specs if s.N > WINDOW + s.B]
    for rope in ROPES:
        assert {s.native is None for s in long if s.rope == rope} == {True, False}
    assert {(s.native is None, s.causal) for s in long} == {(a, b) for a in (True, False) for b in (True, False)}


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
