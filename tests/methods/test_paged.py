"""The paged reader against the dense definition: every method's plan as attention calls over shuffled pages."""

from __future__ import annotations

import math
import random

import pytest
import torch
from paged_cases import into_pages, judged_read, lay, open_paged, shuffled_table, tensor
from read_cases import HEAD_DIM, OPTIONS, ROPES, WINDOW, Spec, matrix, product_rope

from methods import METHODS, make_method, paged
from methods.attention import dense_read
from methods.paged import PagedLayer, PagedReader, torch_attend, torch_merge
from methods.reader import ContextCache, DenseReader, DrafterGeometry
from methods.reading import LayerGeometry, RequestGeometry
from methods.rope import build_rope

PAGE_SIZES = (1, 16, 32)
LAYERS = (
    LayerGeometry(),
    LayerGeometry("sliding_attention", WINDOW, True),
    LayerGeometry("full_attention", None, True),
    LayerGeometry("sliding_attention", WINDOW + 40),
)


@pytest.mark.parametrize("method", METHODS)
def test_paged_read_equals_the_definition(method):
    for index, spec in enumerate(matrix(method)):
        page_size = PAGE_SIZES[index % 3]
        ours, theirs = judged_read(spec, page_size, strided=index % 2 == 1)
        assert ours.shape == theirs.shape and ours.dtype == torch.float64
        assert float((ours - theirs).abs().max()) < 1e-10, (spec, page_size)


CASES = [(method, i) for method in METHODS for i in range(len(OPTIONS[method]))]


@pytest.mark.parametrize(("method", "option"), CASES)
@pytest.mark.parametrize("prompt", [1, WINDOW - 2, 45])
def test_paged_reader_equals_the_definition_through_a_request(method, option, prompt):
    """Round by round, with the method's state, refreshes and layers of every kind."""
    chance = random.Random(f"{method} {option} {prompt}")
    B = {1: 16, WINDOW - 2: 7, 45: 10}[prompt] if option % 2 else {1: 7, WINDOW - 2: 1, 45: 16}[prompt]
    heads = chance.choice(((2, 2), (8, 2), (4, 1)))
    layers = LAYERS[:3] if method == "engine_window" else LAYERS
    dims = HEAD_DIM, chance.choice((HEAD_DIM, 10))
    geometry = DrafterGeometry(layers, *heads, *dims, 0.25, product_rope(chance.choice(list(ROPES))), B)
    made = make_method(method, **OPTIONS[method][option])
    accepted = [1, B + 1, 1, B, *(chance.randint(1, B + 1) for _ in range(6))]
    request = RequestGeometry(prompt, sum(accepted), B)
    cache = ContextCache(geometry, prompt + sum(accepted), torch.float64)
    generator = torch.Generator().manual_seed(1)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    def grow(count):
        cache.append(
            normal(len(layers), count, heads[1], dims[0]), normal(len(layers), count, heads[1], dims[1])
        )

    def in_pages(kb, vb):
        laid = []
        for layer in range(len(layers)):
            k, v = (x[layer, :, : cache.length].transpose(0, 1) for x in (cache.keys, cache.values))
            raw = layer in reader.raw_layers
            rope = reader.rope(layer, request)
            laid.append(lay(k, v, kb, vb, rope, chance.choice(PAGE_SIZES), generator, raw=raw))
        return laid

    judge = DenseReader(made, geometry, request, cache)
    reader = open_paged(made, geometry, cache.capacity)
    reader.begin(request)
    grow(prompt)
    judge.prepare()
    reader.committed(prompt, in_pages(normal(B, heads[1], dims[0]), normal(B, heads[1], dims[1])))
    for number, committed in enumerate(accepted):
        kb, vb = normal(B, heads[1], dims[0]), normal(B, heads[1], dims[1])
        pages = in_pages(kb, vb)
        for layer in range(len(layers)):
            q = 3 * normal(B, heads[0], dims[0])
            ours = reader.read(layer, q, pages[layer], tensor(cache.length))
            theirs = judge.read(layer, q, kb, vb)
            assert ours.shape == (B, heads[0], dims[1])
            assert float((ours - theirs).abs().max()) < 1e-10, (number, layer)
        wanted = reader.wants_target_attention()
        assert wanted == judge.wants_target_attention()
        start = cache.length
        grow(committed)
        judge.committed(start, cache.length)
        reader.committed(cache.length, in_pages(kb, vb))
        if wanted:
            weights = torch.rand(cache.length, generator=generator)
            judge.target_attention(weights)
            reader.target_attention(weights)
    assert reader.activity()["rounds"] == len(accepted)


@pytest.mark.parametrize("method", METHODS)
def test_gemma_reads_with_head_dim_512_at_scale_1(method):
    """One key head of 512 dims, a quarter of its pairs turning, logits not scaled."""
    rope = build_rope({"rope_theta": 1e6, "rope_type": "proportional", "partial_rotary_factor": 0.25}, 512)
    B, N = 7, 60
    geometry = DrafterGeometry((LayerGeometry(),), 4, 1, 512, 512, 1.0, rope, B)
    generator = torch.Generator().manual_seed(2)
    shapes = ((B, 4), (N, 1), (N, 1), (B, 1), (B, 1))
    q, k, v, kb, vb = (torch.randn(*s, 512, generator=generator, dtype=torch.float64) for s in shapes)
    q *= 0.1
    made, request = make_method(method, **OPTIONS[method][0]), RequestGeometry(N, 10, B)
    cache = ContextCache(geometry, N + 10, torch.float64)
    cache.append(k[None], v[None])
    judge = DenseReader(made, geometry, request, cache)
    judge.prepare()
    reader = open_paged(made, geometry, N + 10)
    reader.begin(request)
    pages = lay(k, v, kb, vb, reader.rope(0, request), 16, generator)
    reader.committed(N, [pages])
    ours, theirs = reader.read(0, q, pages, tensor(N)), judge.read(0, q, kb, vb)
    assert float((ours - theirs).abs().max()) < 1e-10


@pytest.mark.parametrize("method", ["window", "fold", "rerope", "infllm", "streamingllm", "engine_window"])
@pytest.mark.parametrize("causal", [False, True])
def test_rows_leave_the_window_one_by_one(method, causal):
    """Every length around W and W + B: some rows have something beyond their window and others do not."""
    for N in range(WINDOW - 5, WINDOW + 8):
        point = Spec(method, OPTIONS[method][0], N, 4, (4, 2), "default", causal=causal, seed=N)
        ours, theirs = judged_read(point, 16)
        assert float((ours - theirs).abs().max()) < 1e-10, N


@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 2e-5), (torch.bfloat16, 0.05), (torch.float16, 0.01)])
@pytest.mark.parametrize("method", METHODS)
def test_paged_reads_in_the_dtypes_of_engines(method, dtype, most):
    spec = Spec(method, OPTIONS[method][0], 3 * WINDOW, 7, (8, 2), "default", seed=1)
    ours, theirs = judged_read(spec, 16, dtype)
    assert ours.dtype == dtype
    assert float((ours - theirs).float().abs().max()) < most


def test_within_the_window_methods_are_the_original_to_the_bit():
    """An empty far part leaves no trace in the merge, so that ties fall the same way."""
    outs = {}
    for method, options in {"original": {}, "window": {"window": 40}, "fold": {"window": 40}}.items():
        point = Spec(method, options, 30, 7, (8, 2), "default", seed=3)
        outs[method] = judged_read(point, 16, torch.bfloat16)[0]
    assert torch.equal(outs["window"], outs["original"])
    assert torch.equal(outs["fold"], outs["original"])


def test_a_request_leaves_nothing_behind():
    """YaRN's frequencies, counts and retrieved blocks are of one request alone."""
    geometry = DrafterGeometry((LayerGeometry(),), 4, 2, HEAD_DIM, HEAD_DIM, 0.25, product_rope("default"), 4)
    for method in METHODS:
        made = make_method(method, **OPTIONS[method][0])

        def second(before, made=made):
            reader = open_paged(made, geometry, 400)
            generator = torch.Generator().manual_seed(5)
            for prompt in (300, 50) if before else (50,):
                draw = torch.Generator().manual_seed(prompt)
                shapes = ((4, 4), (prompt, 2), (prompt, 2), (4, 2), (4, 2))
                q, k, v, kb, vb = (torch.randn(*s, HEAD_DIM, generator=draw, dtype=torch.float64) for s in shapes)
                request = RequestGeometry(prompt, 10, 4)
                reader.begin(request)
                pages = lay(k, v, kb, vb, reader.rope(0, request), 16, generator)
                reader.committed(prompt, [pages])
                out = reader.read(0, q, pages, tensor(prompt))
            return out, reader.activity()

        (after, same), (alone, activity) = second(True), second(False)
        assert torch.equal(after, alone) and same == activity, method


def test_reads_before_the_first_request_are_of_an_unscaled_one():
    """Graphs are captured before any request is known."""
    geometry = DrafterGeometry((LayerGeometry(),), 4, 2, HEAD_DIM, HEAD_DIM, 0.25, product_rope("default"), 4)
    made = make_method("yarn", reference=16)
    generator = torch.Generator().manual_seed(5)
    shapes = ((4, 4), (40, 2), (40, 2), (4, 2), (4, 2))
    q, k, v, kb, vb = (torch.randn(*s, HEAD_DIM, generator=generator, dtype=torch.float64) for s in shapes)
    reader = open_paged(made, geometry, 100)
    pages = lay(k, v, kb, vb, geometry.rope, 16, generator, raw=False)
    plan = make_method("original").plan(LayerGeometry(), RequestGeometry(1, 1, 4))
    theirs = dense_read(plan, q, k, v, kb, vb, rope=geometry.rope, scale=0.25).out
    assert float((reader.read(0, q, pages, tensor(40)) - theirs).abs().max()) < 1e-10


@pytest.mark.parametrize("method", [m for m in METHODS if m not in ("infllm", "cmr")])
def test_reads_ask_nothing_of_the_device(method):
    """On a device without values, where asking for one fails: so a CUDA graph can hold the read, at any length."""
    layers = (*LAYERS[:3], LayerGeometry("sliding_attention", 3))
    geometry = DrafterGeometry(layers, 4, 2, HEAD_DIM, 10, 0.25, product_rope("default"), 7)
    for option in OPTIONS[method]:
        made = make_method(method, **option)
        reader = PagedReader(made, geometry, max_context=100, dtype=torch.bfloat16, device="meta")
        reader.begin(RequestGeometry(50, 10, 7))
        keys, values = (torch.empty(9, 16, 2, dim, dtype=torch.bfloat16, device="meta") for dim in (HEAD_DIM, 10))
        pages = PagedLayer(keys, keys, values, torch.empty(7, dtype=torch.int32, device="meta"))
        length = torch.empty(1, dtype=torch.int32, device="meta")
        for layer in range(len(layers)):
            q = torch.empty(7, 4, HEAD_DIM, dtype=torch.bfloat16, device="meta")
            out = reader.read(layer, q, pages, length)
            assert out.shape == (7, 4, 10) and out.dtype == torch.bfloat16


def test_unrotated_keys_may_lie_in_pages_of_their_own():
    """An engine that rotates a window only has other pages, of another size, for its far and gathered entries."""
    for method in ("fold", "rerope", "infllm", "cmr"):
        spec = Spec(method, OPTIONS[method][0], 3 * WINDOW, 7, (8, 2), "default", seed=1)
        ours, theirs = judged_read(spec, 16, raw_page_size=8)
        assert float((ours - theirs).abs().max()) < 1e-10, method


def test_only_methods_that_read_raw_keys_need_them():
    geometry = DrafterGeometry(LAYERS[:3], 4, 2, HEAD_DIM, HEAD_DIM, 0.25, product_rope("default"), 4)
    needed = {}
    for method in METHODS:
        reader = open_paged(make_method(method, **OPTIONS[method][0]), geometry, 100)
        needed[method] = reader.raw_layers
        assert reader.needs_raw_keys == bool(reader.raw_layers)
        assert reader.host_driven == (method in ("infllm", "cmr"))
    assert needed == {
        "original": (), "window": (), "streamingllm": (), "yarn": (), "engine_window": (),
        "rerope": (0, 1, 2), "fold": (0, 1, 2), "cmr": (0, 1, 2), "infllm": (0, 2),
    }  # fmt: skip
    full_only = make_method("fold", window=WINDOW, layers="full_attention")
    assert open_paged(full_only, geometry, 100).raw_layers == (0, 2)


@pytest.mark.parametrize("method", METHODS)
def test_activity_is_that_of_the_dense_cache_reader(method):
    """The same counts by the same names as the reference engine's fast reader."""
    from methods.reader import CachedReader

    layers = (LayerGeometry(), LayerGeometry("sliding_attention", 20))
    layers = layers[:1] if method == "engine_window" else layers
    geometry = DrafterGeometry(layers, 4, 2, HEAD_DIM, HEAD_DIM, 0.25, product_rope("default"), 4)
    made = make_method(method, **OPTIONS[method][0])
    for prompt in (0, 5, 11, 13, 60):
        request = RequestGeometry(max(1, prompt), 40, 4)
        cache = ContextCache(geometry, prompt + 41, torch.float64)
        generator = torch.Generator().manual_seed(3)
        shapes = ((prompt, 2), (prompt, 2), (4, 4), (4, 2), (4, 2))
        k, v, q, kb, vb = (torch.randn(*s, HEAD_DIM, generator=generator, dtype=torch.float64) for s in shapes)
        cache.append(k.expand(len(layers), -1, -1, -1), v.expand(len(layers), -1, -1, -1))
        fast = CachedReader(made, geometry, request, cache)
        fast.prepare()
        reader = open_paged(made, geometry, prompt + 41)
        reader.begin(request)
        pages = [lay(k, v, kb, vb, reader.rope(i, request), 16, generator) for i in range(len(layers))]
        reader.committed(prompt, pages)
        for layer in range(len(layers)):
            fast.read(layer, q, kb, vb)
            reader.read(layer, q, pages[layer], tensor(prompt))
        fast.round_done()
        assert reader.activity() == fast.activity(), prompt


# -------------------------------------------------------------------------------------------- the torch executor alone


@pytest.mark.parametrize("tight", [True, False])
@pytest.mark.parametrize(("left", "right"), [(None, None), (None, 0), (4, None), (4, 0), (0, 2), (0, 0)])
def test_attend_bounds_every_row_from_the_bottom_right(left, right, tight, monkeypatch):
    """On a CPU, and as on a device that is not asked for the length: there unread pages hold anything."""
    if not tight:
        monkeypatch.setattr(paged, "_touched", lambda rows, length, left, capacity: (0, capacity, False))
    rows, heads, kv_heads = 3, 4, 2
    generator = torch.Generator().manual_seed(7)
    for length in (0, 1, 2, 3, 4, 9, 20):
        q = torch.randn(rows, heads, 8, generator=generator, dtype=torch.float64)
        k, v = (torch.randn(length, kv_heads, 8, generator=generator, dtype=torch.float64) for _ in range(2))
        table, pool = shuffled_table(max(1, -(-length // 4)), 2, generator)
        keys, values = into_pages(k, table, pool, 4), into_pages(v, table, pool, 4)
        out, lse = torch_attend(q, keys, values, table, tensor(length), left=left, right=right, scale=0.5)
        for r in range(rows):
            diagonal = length - rows + r
            low = 0 if left is None else max(0, diagonal - left)
            high = length if right is None else min(length, diagonal + right + 1)
            for h in range(heads):
                seen = range(low, high)
                scores = [0.5 * float(q[r, h] @ k[j, h // 2]) for j in seen]
                if not scores:
                    assert lse[r, h] == -math.inf and not out[r, h].any()
                    continue
                mass = math.log(sum(math.exp(s) for s in scores))
                wanted = sum(math.exp(s - mass) * v[j, h // 2] for s, j in zip(scores, seen, strict=True))
                assert abs(float(lse[r, h]) - mass) < 1e-12
                assert float((out[r, h] - wanted).abs().max()) < 1e-12


def test_merge_takes_either_sign_of_infinity_for_an_empty_row():
    """FlashAttention 2 says +inf for a row that saw nothing; divided by alpha it would win."""
    outs = [torch.ones(2, 1, 3), torch.full((2, 1, 3), torch.nan)]
    for sign in (1, -1):
        lses = [torch.zeros(2, 1), torch.full((2, 1), sign * math.inf)]
        out, mass = torch_merge(outs, lses, [1.0, 2.0])
        assert torch.equal(out, outs[0]) and torch.equal(mass, lses[0])
    nothing = torch.full((2, 1), -math.inf)
    out, mass = torch_merge(outs, [nothing, -nothing], [1.0, 2.0])
    assert torch.equal(out, torch.zeros(2, 1, 3)) and torch.equal(mass, nothing)


def test_wrong_use_is_said_in_one_line():
    geometry = DrafterGeometry((LayerGeometry(),), 4, 2, HEAD_DIM, HEAD_DIM, 0.25, product_rope("default"), 4)
    fold = open_paged(make_method("fold", window=WINDOW), geometry, 30)
    with pytest.raises(ValueError, match="drafts 5 positions"):
        fold.begin(RequestGeometry(10, 5, 5))
    with pytest.raises(ValueError, match="10 \\+ 21 tokens"):
        fold.begin(RequestGeometry(10, 21, 4))
    q = torch.zeros(4, 4, HEAD_DIM, dtype=torch.float64)
    stored = torch.zeros(3, 16, 2, HEAD_DIM, dtype=torch.float64)
    pages = PagedLayer(stored, None, stored, tensor(0, 1, 2))
    with pytest.raises(ValueError, match="unrotated keys of layer 0"):
        fold.read(0, q, pages, tensor(20))
    with pytest.raises(ValueError, match=r"reads queries \[4, 4, 16\]"):
        fold.read(0, q[:3], pages, tensor(20))
    with pytest.raises(ValueError, match=r"reads queries \[4, 4, 16\]"):
        fold.read(0, q.float(), pages, tensor(20))
    with pytest.raises(RuntimeError, match="fold does not use"):
        fold.target_attention(torch.ones(20))
    cmr = open_paged(make_method("cmr"), geometry, 30)
    held = PagedLayer(stored, stored, stored, tensor(0, 1, 2))
    with pytest.raises(ValueError, match="was not told of any context"):
        cmr.read(0, q, held, tensor(20))
    cmr.begin(RequestGeometry(20, 5, 4))
    with pytest.raises(ValueError, match="pages of 2"):
        cmr.committed(20, [held, held])
    cmr.committed(20, [held])
    with pytest.raises(ValueError, match="told of 20 entries"):
        cmr.read(0, q, held, tensor(21))
    with pytest.raises(ValueError, match="saw 20 entries"):
        cmr.committed(19, [held])
    with pytest.raises(ValueError, match="room for 48"):
        torch_attend(q, stored, stored, tensor(0, 1, 2), tensor(49), left=None, right=None, scale=1.0)
