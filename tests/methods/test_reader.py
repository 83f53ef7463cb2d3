"""The fast reader against the dense definition, round by round, and what it may hold and must forget."""

from __future__ import annotations

import random

import pytest
import torch
from read_cases import HEAD_DIM, OPTIONS, ROPES, WINDOW, product_rope

from methods import METHODS, make_method, turned
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


def open_request(kinds, method, drafter, prompt, room, dtype=torch.float64, seed=0):
    """One cache with a prompt in it and a prepared reader of each kind."""
    generator = torch.Generator().manual_seed(seed)
    cache = ContextCache(drafter, prompt + room, dtype)
    append(cache, prompt, generator)
    request = RequestGeometry(prompt, room, drafter.block)
    readers = [kind(method, drafter, request, cache) for kind in kinds]
    for reader in readers:
        reader.prepare()
    return readers, cache, generator


@pytest.mark.parametrize(("method", "option"), CASES)
@pytest.mark.parametrize("prompt", [1, WINDOW - 2, 45, 330])
def test_fast_reader_equals_the_definition_through_a_request(method, option, prompt):
    chance = random.Random(f"{method} {option} {prompt}")
    B = {1: 16, WINDOW - 2: 7, 45: 10, 330: 1}[prompt] if option % 2 else {1: 7, WINDOW - 2: 1, 45: 16, 330: 10}[prompt]
    heads = chance.choice(((2, 2), (8, 2), (4, 1)))
    layers = LAYERS[:3] if method == "engine_window" else LAYERS
    drafter = geometry(B, heads, chance.choice(list(ROPES)), layers, value_dim=chance.choice((HEAD_DIM, HEAD_DIM, 10)))
    accepted = [1, B + 1, 1, B, *(chance.randint(1, B + 1) for _ in range(12))]
    made = make_method(method, **OPTIONS[method][option])
    readers, cache, generator = open_request((CachedReader, DenseReader), made, drafter, prompt, sum(accepted))
    for number, (fast, dense) in enumerate(decode(readers, cache, accepted, generator, gain=3.0)):
        for layer, (ours, theirs) in enumerate(zip(fast, dense, strict=True)):
            assert ours.shape == (B, heads[0], drafter.value_dim) and ours.dtype == torch.float64
            assert float((ours - theirs).abs().max()) < 1e-10, (number, layer)


@pytest.mark.parametrize("method", ["original", "window", "streamingllm", "engine_window", "fold", "cmr"])
@pytest.mark.parametrize("prompt", [1, 40])
def test_buffers_that_fill_up_keep_what_they_hold(method, prompt, monkeypatch):
    """Windows move, packed entries grow and a prompt is turned in pieces; no read changes by it."""
    monkeypatch.setattr(turned, "SLACK", 3)
    monkeypatch.setattr(turned, "PIECE", 5)
    drafter = geometry(4, (4, 2), layers=LAYERS[:2])
    accepted = [1] * 12 + [5, 2, 4, 3, 1, 5]  # single steps meet every fill of the buffers, the last one included
    made = make_method(method, **OPTIONS[method][0])
    readers, cache, generator = open_request((CachedReader, DenseReader), made, drafter, prompt, sum(accepted))
    for number, (fast, dense) in enumerate(decode(readers, cache, accepted, generator)):
        for ours, theirs in zip(fast, dense, strict=True):
            assert float((ours - theirs).abs().max()) < 1e-10, number


@pytest.mark.parametrize("method", ["window", "infllm", "fold", "rerope"])
def test_rows_leave_the_window_one_by_one(method):
    """At every length around W and W + B, where some rows have nothing beyond their window and others do."""
    drafter = geometry(4, (4, 2), layers=(LayerGeometry(),))
    made = make_method(method, **OPTIONS[method][0])
    readers, cache, generator = open_request((CachedReader, DenseReader), made, drafter, WINDOW - 1, 8)
    for number, (fast, dense) in enumerate(decode(readers, cache, [1] * 8, generator)):
        assert float((fast[0] - dense[0]).abs().max()) < 1e-10, number


def test_yarn_leaves_a_sliding_layer_as_wide_as_the_cache_as_trained():
    """Such a layer reaches as far as the full one, whose scaled embedding it must not share."""
    drafter = geometry(7, layers=(LayerGeometry(), LayerGeometry("sliding_attention", 60)))
    readers, cache, generator = open_request(
        (CachedReader, DenseReader), make_method("yarn", reference=16), drafter, 40, 20
    )
    for fast, dense in decode(readers, cache, [3], generator):
        for ours, theirs in zip(fast, dense, strict=True):
            assert float((ours - theirs).abs().max()) < 1e-10


@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 2e-5), (torch.bfloat16, 0.05)])
@pytest.mark.parametrize("method", METHODS)
def test_fast_reader_in_the_dtypes_of_engines(method, dtype, most):
    """Long positions too: a window's turned keys are as exact at 9,000 as at 0."""
    drafter = geometry(8, (9, 3), layers=(LayerGeometry(), LAYERS[1]))
    made = make_method(method, **OPTIONS[method][0])
    prompt = 300 if method in ("original", "yarn", "cmr") else 9000
    readers, cache, generator = open_request((CachedReader, DenseReader), made, drafter, prompt, 40, dtype)
    for fast, dense in decode(readers, cache, [3, 9, 1, 8], generator):
        for ours, theirs in zip(fast, dense, strict=True):
            assert ours.dtype == dtype
            assert float((ours - theirs).float().abs().max()) < most


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_within_the_window_methods_are_the_original_to_the_bit(dtype):
    """So that they commit identical rounds, ties included (bar C)."""
    W, B = 64, 8
    drafter = geometry(B, (9, 3), layers=(LayerGeometry(), LayerGeometry("sliding_attention", 20, True)))
    accepted = [8, 1, 9, 5, 8, 8]
    options = {
        "original": {},
        "fold": {"window": W, "far_start": "native", "layers": "full_attention"},
        "window": {"window": W},
        "rerope": {"window": W},
        "infllm": {"window": W},
        "streamingllm": {},
        "cmr": {},
        "yarn": {"reference": 512},
        "engine_window": {"window": W},
    }
    assert set(options) == set(METHODS)
    reads = {}
    for name, chosen in options.items():
        (reader,), cache, generator = open_request((CachedReader,), make_method(name, **chosen), drafter, 24, 40, dtype)
        layers = slice(0, 1) if name in ("rerope", "cmr") else slice(None)  # these change sliding layers at any length
        reads[name] = [outs[0][layers] for outs in decode([reader], cache, accepted, generator)]
        assert cache.length <= W
        if name not in ("cmr", "rerope"):
            assert reader.activity()["far_entries_read"] == 0
    for name, rounds in reads.items():
        if name == "cmr":
            continue  # draws its weights from the same generator: compared below
        for ours, theirs in zip(rounds, reads["original"], strict=True):
            assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=False)), name
    assert torch.equal(reads["cmr"][0][0], reads["original"][0][0])


@pytest.mark.parametrize("method", METHODS)
def test_two_requests_in_a_row_are_independent(method):
    """The second request reads the same whether another one came before it or not, on the same cache as well."""
    drafter = geometry(7, (4, 2), layers=LAYERS[:3])
    made = make_method(method, **OPTIONS[method][0])
    accepted = [3, 8, 1, 7, 5, 2, 8, 8]

    def second(before):
        cache = ContextCache(drafter, 200, torch.float64)
        if before:
            generator = torch.Generator().manual_seed(1)
            append(cache, 90, generator)
            first = open_reader(made, drafter, RequestGeometry(90, 60, 7), cache)
            first.prepare()
            list(decode([first], cache, accepted, generator))
            cache.crop(0)
        generator = torch.Generator().manual_seed(2)
        append(cache, 41, generator)
        reader = open_reader(made, drafter, RequestGeometry(41, 60, 7), cache)
        reader.prepare()
        return [outs[0] for outs in decode([reader], cache, accepted, generator)], reader.activity()

    alone, activity = second(before=False)
    after, same_activity = second(before=True)
    assert activity == same_activity
    for ours, theirs in zip(after, alone, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_methods_share_one_cache_in_turn():
    """Each method of a request starts from the prompt; what the one before appended or laid beside it leaves no
    trace.
    """
    drafter = geometry(7, (4, 2), layers=LAYERS[:3])
    accepted = [3, 8, 1, 7]
    shared = ContextCache(drafter, 120, torch.float64)
    append(shared, 60, torch.Generator().manual_seed(3))
    for method in METHODS:
        made = make_method(method, **OPTIONS[method][0])
        shared.crop(60)
        reader = open_reader(made, drafter, RequestGeometry(60, 60, 7), shared)
        reader.prepare()
        ours = [outs[0] for outs in decode([reader], shared, accepted, torch.Generator().manual_seed(4))]
        (alone,), cache, _ = open_request((CachedReader,), made, drafter, 60, 60, seed=3)
        theirs = [outs[0] for outs in decode([alone], cache, accepted, torch.Generator().manual_seed(4))]
        for a, b in zip(ours, theirs, strict=True):
            assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True)), method


@pytest.mark.parametrize("method", ["original", "yarn", "window", "streamingllm", "engine_window"])
def test_turned_keys_are_turned_once(method):
    """Raw keys that were taken in are not read again: spoiling them changes nothing. (FOLD, ReRoPE and InfLLM read them
    raw.)
    """
    drafter = geometry(7, (4, 2), layers=LAYERS[:2])
    made = make_method(method, **OPTIONS[method][0])
    (reader, _), cache, generator = open_request((CachedReader, DenseReader), made, drafter, 400, 400)
    sinks = 4 if method == "streamingllm" else 0
    for committed in [8] * 45:  # the window's room is used up once on the way
        for outs in decode([reader], cache, [committed], generator):
            assert all(torch.isfinite(out).all() for out in outs[0])
        cache.keys[:, :, sinks : cache.length] = torch.nan


def test_bytes_beyond_the_cache():
    """FOLD, Window, ReRoPE and InfLLM hold a window of turned keys, however long the context; Original turns all
    keys.
    """
    drafter = geometry(7, (4, 2), layers=(LayerGeometry(),) * 2)

    def extra(name, prompt):
        made = make_method(name, **(OPTIONS[name][0] if name != "infllm" else {"window": WINDOW}))
        (reader,), cache, generator = open_request((CachedReader,), made, drafter, prompt, 20)
        list(decode([reader], cache, [8, 1], generator))
        return reader.extra_bytes(), cache.keys.nbytes

    for name in ("fold", "window", "rerope", "engine_window", "infllm", "streamingllm"):
        held, of_keys = extra(name, 6000)
        more, _ = extra(name, 12_000)
        assert held < of_keys / 2, name
        if name in ("window", "engine_window", "streamingllm"):
            assert more == held
    held, of_keys = extra("original", 6000)
    assert held == of_keys


def test_bytes_count_every_part_once():
    """Turned windows, retrieved entries, masks and the method's state; layers that share a window hold one."""
    rows, entry = 7, 2 * 2 * HEAD_DIM * 8  # one position's keys: two layers, two heads, float64
    room = WINDOW + rows + turned.SLACK

    def opened(name, **options):
        drafter = geometry(rows, (4, 2), layers=(LayerGeometry(),) * 2)
        return open_request((CachedReader,), make_method(name, **options), drafter, 6000, 20)

    (fold,), cache, generator = opened("fold", window=WINDOW)
    assert fold.extra_bytes() == (room + rows) * entry
    list(decode([fold], cache, [1], generator))
    masks = 2 * rows * ((WINDOW + rows - 1 + rows) + (6020 + rows)) * 8  # near and far, for both heads of a group
    assert fold.extra_bytes() == (room + rows) * entry + masks
    assert cache.nbytes == 2 * (6020 + rows) * entry

    (cmr,), cache, generator = opened("cmr", chunk=4, topk=3)
    assert cmr.extra_bytes() == 12 * 8  # the position list
    cmr.read(0, *(normal(generator, rows, heads, HEAD_DIM) for heads in (4, 2, 2)))
    assert cmr.extra_bytes() == 12 * 8 + 2 * (12 + rows + turned.SLACK) * entry  # keys and values

    (infllm,), _, _ = opened("infllm", window=WINDOW)
    blocks = (6020 - WINDOW - rows - 128) // 128
    watched = 20 + WINDOW + rows  # entries that can still receive attention inside the window
    state = 2 * 4 * (blocks * HEAD_DIM + watched) * 8
    assert infllm.extra_bytes() == (room + rows) * entry + state


def test_activity_proves_what_was_read():
    def activity(name, **options):
        drafter = geometry(7, (4, 2), layers=(LayerGeometry(),) * 2)
        (reader,), cache, generator = open_request((CachedReader,), make_method(name, **options), drafter, 100, 20)
        list(decode([reader], cache, [5, 1], generator))
        return reader.activity()

    context = 2 * (100 + 105)
    assert activity("original") == {
        "rounds": 2, "entries_in_context": context, "entries_read": context, "far_entries_read": 0
    }  # fmt: skip
    window = activity("window", window=WINDOW)
    assert (window["entries_read"], window["far_entries_read"]) == (4 * (WINDOW + 6), 0)
    fold = activity("fold", window=WINDOW)
    assert fold["far_entries_read"] == 2 * (100 + 105 - 2 * WINDOW)
    assert activity("streamingllm", sinks=4, recent=8)["entries_read"] == 4 * 12
    assert activity("streamingllm", sinks=4, recent=8)["far_entries_read"] == 4 * 4
    assert activity("engine_window", window=WINDOW)["entries_read"] == 4 * WINDOW
    cmr = activity("cmr", chunk=4, topk=3)
    assert cmr["refreshes"] == 1 and 0 < cmr["far_entries_read"] < context
    infllm = activity("infllm", window=WINDOW, block=4, initial=4, topk=2)
    # initial, two blocks, and the tail up to what the last row reads: 80..87 of 100 entries, 84..92 of 105
    assert infllm["far_entries_read"] == 2 * (4 + 8 + 8) + 2 * (4 + 8 + 9) and infllm["blocks"] == 20
    assert activity("cmr")["far_entries_read"] == 0  # every chunk is selected: nothing is out of its place
    # 100 entries are exactly what is kept; 105 move the sinks
    assert activity("streamingllm", sinks=4, recent=96)["far_entries_read"] == 2 * 4


def test_wrong_use_is_said_in_one_line():
    drafter = geometry(7, (4, 2))
    fold = make_method("fold", window=WINDOW)
    cache = ContextCache(drafter, 20, torch.float64)
    with pytest.raises(ValueError, match="drafts 8 positions"):
        open_reader(fold, drafter, RequestGeometry(5, 5, 8), cache)
    with pytest.raises(ValueError, match="another drafter"):
        open_reader(fold, geometry(7, (4, 4)), RequestGeometry(5, 5, 7), cache)
    with pytest.raises(ValueError, match="another drafter"):
        open_reader(fold, geometry(7, (4, 2), value_dim=8), RequestGeometry(5, 5, 7), cache)
    with pytest.raises(ValueError, match="holds nothing"):
        ContextCache(drafter, 0, torch.float64)
    with pytest.raises(ValueError, match="do not fit"):
        append(cache, 21, torch.Generator())
    with pytest.raises(ValueError, match="append wants"):
        cache.append(torch.zeros(4, 2, 3, HEAD_DIM), torch.zeros(4, 2, 3, HEAD_DIM))
    with pytest.raises(ValueError, match="append wants"):
        cache.append(torch.zeros(4, 2, 2, HEAD_DIM), torch.zeros(4, 3, 2, HEAD_DIM))
    with pytest.raises(ValueError, match="crop"):
        cache.crop(1)
    with pytest.raises(ValueError, match="crop"):
        cache.crop(-1)
    append(cache, 5, torch.Generator())
    reader = open_reader(fold, drafter, RequestGeometry(5, 5, 7), cache)
    reader.prepare()
    append(cache, 2, torch.Generator())
    with pytest.raises(ValueError, match="saw 5 entries, the cache holds 7"):
        reader.committed(5, 8)
    with pytest.raises(ValueError, match="saw 5"):
        reader.committed(4, 7)
    reader.committed(5, 7)
    q = torch.zeros(6, 4, HEAD_DIM, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"7 torch\.float64 rows"):
        reader.read(0, q, q, q)
    with pytest.raises(ValueError, match=r"7 torch\.float64 rows"):
        reader.read(0, torch.zeros(7, 4, HEAD_DIM), q, q)
    assert not reader.wants_target_attention()
    with pytest.raises(RuntimeError, match="fold does not use"):
        reader.target_attention(torch.ones(7))
    with pytest.raises(ValueError, match="share"):
        geometry(7, (3, 2))
    with pytest.raises(ValueError, match="turns 16 dims"):
        geometry(7, (4, 2), head_dim=8)
    with pytest.raises(ValueError, match="at least one"):
        geometry(7, (4, 2), layers=())
    with pytest.raises(ValueError, match="at least one"):
        geometry(0)
