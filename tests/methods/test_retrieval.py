"""InfLLM's and CMR's state through requests, against the definitions: which entries, from which scores, at which
round.
"""

from __future__ import annotations

import random

import pytest
import torch
from read_cases import HEAD_DIM, ORACLE_ROPES, WINDOW, gap, oracle, product_rope

from methods import make_method
from methods.reader import CachedReader, ContextCache, DenseReader, DrafterGeometry
from methods.reading import LayerGeometry, RequestGeometry

B, HEADS, LAYERS = 5, (4, 2), 2
D = WINDOW + B
BLOCK, INITIAL, TOPK, TOP = 4, 3, 2, 2


def open_request(method, prompt, kind=CachedReader, layers=LAYERS, rope="prefix", room=100):
    drafter = DrafterGeometry(
        (LayerGeometry(),) * layers, *HEADS, HEAD_DIM, HEAD_DIM, 0.25, product_rope(rope), B
    )
    cache = ContextCache(drafter, prompt + room, torch.float64)
    generator = torch.Generator().manual_seed(prompt)
    reader = kind(method, drafter, RequestGeometry(prompt, 100, B), cache)
    return reader, cache, generator


def entries(generator, cache, count):
    start = cache.length
    shape = (len(cache.geometry.layers), count, HEADS[1], HEAD_DIM)
    cache.append(*(torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2)))
    return start, cache.length


def block(generator):
    shapes = ((B, HEADS[0]), (B, HEADS[1]), (B, HEADS[1]))
    return [torch.randn(*s, HEAD_DIM, generator=generator, dtype=torch.float64) * 2 for s in shapes]


class InfLLMByHand:
    """The definition of one layer through a request: representations frozen when a block forms, attention summed over
    every round's rows."""

    def __init__(self, rope, rotate_query=True):
        self.rope, self.rotate_query = rope, rotate_query
        self.representations, self.received = [], []

    def form_blocks(self, case, layout):
        self.received += [[0.0] * HEADS[0] for _ in range(case.N - len(self.received))]
        formed = oracle.infllm_repr(case, layout, self.received, top=TOP)
        self.representations += formed[len(self.representations) :]

    def read(self, case):
        layout = oracle.infllm_layout(case.N, D, n_init=INITIAL, block=BLOCK)
        selected, _ = oracle.infllm_select(
            case, self.rope, self.representations, D, topk=TOPK, rotate_query=self.rotate_query
        )
        read = oracle.infllm(case, self.rope, 0.25, WINDOW, layout=layout, selected=selected)
        got = oracle.received_attention(case, self.rope, 0.25, read)
        for j in range(case.N):
            self.received[j] = [a + b for a, b in zip(self.received[j], got[j], strict=True)]
        return selected, read


@pytest.mark.parametrize("kind", [CachedReader, DenseReader])
@pytest.mark.parametrize(("prompt", "rotate_query"), [(2, True), (WINDOW, True), (41, True), (42, False)])
def test_infllm_through_a_request(kind, prompt, rotate_query):
    method = make_method(
        "infllm", window=WINDOW, block=BLOCK, initial=INITIAL, topk=TOPK, representative=TOP, rotate_query=rotate_query
    )
    reader, cache, generator = open_request(method, prompt, kind)
    by_hand = [InfLLMByHand(ORACLE_ROPES["prefix"], rotate_query) for _ in range(LAYERS)]
    entries(generator, cache, prompt)
    reader.prepare()
    chance = random.Random(prompt)
    means_differ = 0
    for committed in (1, B + 1, B + 1, 1, *(chance.randint(1, B + 1) for _ in range(14))):
        N = cache.length
        for layer in range(LAYERS):
            q, kb, vb = block(generator)
            context = [x[layer, :, :N].transpose(0, 1) for x in (cache.keys, cache.values)]
            case = oracle.Case.of(q, *context, kb, vb)
            layout = oracle.infllm_layout(N, D, n_init=INITIAL, block=BLOCK)
            hand = by_hand[layer]
            hand.form_blocks(case, layout)
            assert reader.state.select(layer, q) == oracle.infllm_select(
                case, hand.rope, hand.representations, D, topk=TOPK, rotate_query=rotate_query
            )[0]
            ours = reader.read(layer, q, kb, vb)
            _, theirs = hand.read(case)
            assert gap(ours, theirs.out) < 1e-10
            held = reader.state.keys[layer, : reader.state.blocks]
            assert held.shape[0] == len(layout.blocks) == len(hand.representations)
            if layout.blocks:
                assert gap(held, hand.representations) < 1e-10
                plain = oracle.infllm_repr(case, layout)
                means_differ += gap(held, plain) > 1e-3
        reader.round_done()
        reader.committed(*entries(generator, cache, committed))
    assert len(layout.blocks) > TOPK  # selection had a choice
    assert means_differ > 0  # received attention mattered
    assert reader.activity()["blocks"] >= len(layout.blocks)


def test_infllm_layers_do_not_mix_and_sliding_layers_hold_nothing():
    method = make_method("infllm", window=WINDOW, block=BLOCK, initial=INITIAL, topk=TOPK)
    layers = (LayerGeometry("sliding_attention", 8), LayerGeometry())
    geometry = DrafterGeometry(layers, *HEADS, HEAD_DIM, HEAD_DIM, 0.25, product_rope("default"), B)
    cache = ContextCache(geometry, 80, torch.float64)
    state = method.new_state(geometry, cache, RequestGeometry(60, 10, B))
    entries(torch.Generator().manual_seed(0), cache, 60)
    state.prepare()
    assert state.keys.shape[0] == 1  # the full-attention layer alone
    assert state.positions(1, torch.randn(B, *HEADS[:1], HEAD_DIM, dtype=torch.float64)).tolist()[-1] == 59


@pytest.mark.parametrize("first_refresh", [1, 3])
@pytest.mark.parametrize("prompt", [1, 4, 18, 61])
def test_cmr_through_a_request(prompt, first_refresh):
    refresh, chunk, topk = 3, 4, 3
    method = make_method("cmr", chunk=chunk, topk=topk, refresh=refresh, first_refresh=first_refresh)
    reader, cache, generator = open_request(method, prompt)
    by_hand = oracle.CMRSelection(chunk, topk, refresh)
    entries(generator, cache, prompt)
    reader.prepare()
    theirs = by_hand.start(prompt)
    by_hand.round += (1 - first_refresh) % refresh  # the oracle counts refreshes from its round 0
    chance = random.Random(prompt)
    wanted = []
    for draft in range(18):
        N = cache.length
        for layer in range(LAYERS):
            q, kb, vb = block(generator)
            case = oracle.Case.of(q, *(x[layer, :, :N].transpose(0, 1) for x in (cache.keys, cache.values)), kb, vb)
            ours = reader.read(layer, q, kb, vb)
            assert reader.state.positions(layer, q).tolist() == theirs
            assert gap(ours, oracle.cmr(case, ORACLE_ROPES["prefix"], 0.25, theirs).out) < 1e-10
        reader.round_done()
        wants = reader.wants_target_attention()
        wanted += [draft + 1] * wants
        assert wants == (by_hand.wants_attention() and draft + 1 >= first_refresh)
        start, end = entries(generator, cache, (1, B + 1, chance.randint(1, B + 1))[min(draft, 2)])
        reader.committed(start, end)
        weights = torch.rand(end, generator=generator)
        if wants:
            with pytest.raises(RuntimeError, match="target_attention"):
                reader.read(0, q, kb, vb)
            reader.target_attention(weights)
        theirs = by_hand.advance(end, weights if wants else None)
    assert wanted == list(range(first_refresh, 19, refresh))
    assert reader.activity()["refreshes"] == len(wanted)


@pytest.mark.parametrize(
    ("options", "refreshed"),
    [
        ({}, [1, 9, 17, 25]),  # the official code
        ({"refresh": 4, "first_refresh": 9}, [9, 13, 17, 21, 25]),  # nothing before the first, whole periods included
    ],
)
def test_cmr_refreshes_at_the_first_draft_asked_for_and_periodically_after(options, refreshed):
    reader, cache, generator = open_request(make_method("cmr", **options), 3, layers=1)
    entries(generator, cache, 3)
    reader.prepare()
    drafts = []
    for draft in range(1, 26):
        wants = reader.wants_target_attention()
        reader.committed(*entries(generator, cache, 1))
        if wants:
            drafts.append(draft)
            reader.target_attention(torch.ones(cache.length))
    assert drafts == refreshed


def test_cmr_selected_chunk_keeps_growing_when_it_fills_in_the_step_that_starts_the_next():
    """The official code keeps the old end of such a chunk, and up to 31 recent entries vanish until the next
    refresh.
    """
    reader, cache, generator = open_request(make_method("cmr", chunk=4, topk=2, refresh=100), 6, layers=1)
    entries(generator, cache, 6)
    reader.prepare()
    reader.committed(*entries(generator, cache, 1))
    reader.target_attention(torch.tensor([0.0, 0, 0, 0, 1, 1, 1]))
    reader.committed(*entries(generator, cache, 3))  # fills chunk 1 and starts chunk 2
    assert reader.state.positions(0, None).tolist() == list(range(10))


def test_cmr_sums_are_float32_per_chunk():
    """In 16 bits the means of neighbouring chunks at 16K tokens are no longer distinct."""
    reader, cache, generator = open_request(make_method("cmr", topk=4), 1, layers=1, room=16_400)
    cache.length = 16_383
    reader.prepare()
    reader.committed(*entries(generator, cache, 1))
    weights = torch.full((16_384,), 1 / 16_384)
    for rank, chunk in enumerate((7, 300, 200, 100)):
        weights[chunk * 32 + 3] *= 1.002 - rank * 0.0004
    reader.target_attention(weights)
    assert reader.state.chunks == [7, 100, 200, 300]


def test_cmr_says_what_is_wrong_with_the_weights():
    reader, cache, generator = open_request(make_method("cmr"), 5, layers=1)
    entries(generator, cache, 5)
    reader.prepare()
    reader.committed(*entries(generator, cache, 1))
    with pytest.raises(ValueError, match="6 entries"):
        reader.target_attention(torch.ones(5))
