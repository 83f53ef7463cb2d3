"""The fast reader against the dense definition, round by round, and what it may hold and must forget."""

from __future__ import annotations

import random

import pytest
import torch
from read_cases import CMR, HEAD_DIM, INFLLM, OPTIONS, ROPES, WINDOW, product_rope

from methods import METHODS, make_method
from methods.reader import CachedReader, ContextCache, DenseReader, DrafterGeometry, open_reader
from methods.reading import LayerGeometry, RequestGeometry

LAYERS = (
    LayerGeometry(),
    LayerGeometry("sliding_attention", WINDOW, True),
    LayerGeometry("full_attention", None, True),
    LayerGeometry("sliding_attention", WINDOW + 40),
)


def geometry(B=7, heads=(4, 2), rope="default", layers=LAYERS, value_dim=HEAD_DIM, head_dim=HEAD_DIM):
    return DrafterGeometry(layers, *heads, head_dim, value_dim, 0.25, product_rope(rope), B)


def normal(generator, *shape, dtype=torch.float64):
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


def append(cache, count, generator):
    drafter, dtype = cache.geometry, cache.keys.dtype
    layers, heads = len(drafter.layers), drafter.kv_heads
    start = cache.length
    cache.append(
        normal(generator, layers, count, heads, drafter.head_dim, dtype=dtype),
        normal(generator, layers, count, heads, drafter.value_dim, dtype=dtype),
    )
    return start, cache.length


def decode(readers, cache, accepted, generator, gain=1.0):
    """Run rounds; yields per round the outputs of each reader, one tensor per layer."""
    drafter, dtype = cache.geometry, cache.keys.dtype
    for committed in accepted:
        outs = [[] for _ in readers]
        for layer in range(len(drafter.layers)):
            q = normal(generator, drafter.block, drafter.q_heads, drafter.head_dim, dtype=dtype) * gain
            kb = normal(generator, drafter.block, drafter.kv_heads, drafter.head_dim, dtype=dtype)
            vb = normal(generator, drafter.block, drafter.kv_heads, drafter.value_dim, dtype=dtype)
            for out, reader in zip(outs, readers, strict=True):
                out.append(reader.read(layer, q, kb, vb))
        for reader in readers:
            reader.round_done()
        yield outs
        wanted = [reader.wants_target_attention() for reader in readers]
        assert len(set(wanted)) == 1
        start, end = append(cache, committed, generator)
        for reader in readers:
            reader.committed(start, end)
        if wanted[0]:
            weights = torch.rand(end, generator=generator)
            for reader in readers:
                reader.target_attention(weights / weights.sum())


CASES = [(method, i) for method in METHODS for i in range(len(OPTIONS[method]))]


@pytest.mark.parametrize(("method", "option"), CASES)
@pytest.mark.parametrize("prompt", [1, WINDOW - 2, 45, 330])
def test_fast_reader_equals_the_definition_through_a_request(method, option, prompt):
    chance = random.Random(f"{method} {option} {prompt}")
    B = chance.choice((1, 7, 10, 16))
    heads = chance.choice(((2, 2), (8, 2), (4, 1)))
    drafter = geometry(B, heads, chance.choice(list(ROPES)))
    if method == "engine_window":
        drafter = geometry(B, heads, layers=(LAYERS[0], LAYERS[1], LAYERS[2]))
    accepted = [1, B + 1, 1, B, *(chance.randint(1, B + 1) for _ in range(16))]
    request = RequestGeometry(prompt, 400, B)
    generator = torch.Generator().manual_seed(prompt)
    cache = ContextCache(drafter, prompt + sum(accepted), torch.float64)
    append(cache, prompt, generator)
    readers = [
        kind(make_method(method, **OPTIONS[method][option]), drafter, request, cache)
        for kind in (CachedReader, DenseReader)
    ]
    for reader in readers:
        reader.prepare()
    for number, (fast, dense) in enumerate(decode(readers, cache, accepted, generator, gain=3.0)):
        for layer, (ours, theirs) in enumerate(zip(fast, dense, strict=True)):
            torch.testing.assert_close(ours, theirs, atol=1e-10, rtol=0, msg=lambda m: f"{number} {layer}: {m}")
