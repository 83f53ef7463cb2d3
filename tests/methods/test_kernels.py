"""The Triton kernels against the dense definition and against the torch executor in float64.

On a CPU they run in Triton's interpreter (float32 and float16); on a GPU the same tests run them as they are.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from paged_cases import into_pages, judged_read, lay, open_paged, shuffled_table, tensor
from read_cases import HEAD_DIM, OPTIONS, WINDOW, Spec, matrix, product_rope

from methods import METHODS, kernels, make_method
from methods.paged import Call, DeviceRope, Place, Tally, torch_attend, torch_merge, torch_rotate
from methods.reader import ContextCache, DenseReader, DrafterGeometry
from methods.reading import LayerGeometry, LogQueryScale, RequestGeometry
from methods.rope import Rope, build_rope

reason = kernels.unavailable()
if reason is not None:
    pytest.skip(f"the kernels are not tested: {reason}", allow_module_level=True)

from methods.kernels.merge import merge  # noqa: E402
from methods.kernels.rotate import rotate  # noqa: E402
from methods.kernels.split_read import SplitRead, Tile, tiles_for  # noqa: E402
from methods.kernels.splits import SPLITS  # noqa: E402

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
SMALL = Tile(16, 16, 4, 2)  # so that few keys are many tiles
FLOAT_BARS = [(torch.float32, 1e-5), (torch.float16, 2e-3)] + ([(torch.bfloat16, 2e-2)] if GPU else [])

# Masses of parts that read nothing are infinities on purpose.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")


def executors(splits, tile=SMALL):
    read = SplitRead(64, splits=splits, tile=tile)
    return {"attend": read, "fused": read.fused, "rotate": rotate, "merge": merge}


def normal(generator, *shape):
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def call_of(q, k, v, page_size, generator, *, length, strided=False, **bounds):
    """A call over pages (or contiguous keys, ``page_size`` None) that hold junk wherever there is no key."""
    if page_size is None:
        room = 7
        keys, values = (torch.cat((x, torch.full((room, *x.shape[1:]), torch.nan).to(x)))[None] for x in (k, v))
        table = None
    else:
        table, pool = shuffled_table(max(1, -(-len(k) // page_size)), 3, generator)
        keys, values = (into_pages(x, table, pool, page_size, strided) for x in (k, v))
        table = table.to(DEVICE)
    return Call(q.to(DEVICE), keys.to(DEVICE), values.to(DEVICE), table, tensor(length).to(DEVICE), **bounds)


def exact(calls):
    """The same calls in torch and float64, merged."""
    outs, lses = [], []
    for call in calls:
        there = int((call.length + call.shift).clamp(min=0, max=call.most))
        size = call.keys.shape[1]
        table = torch.zeros(1, dtype=torch.int32) if call.table is None else call.table.cpu()
        at = torch.arange(there)
        keys, values = (
            x.cpu()[table[at // size].long(), at % size][None].double() for x in (call.keys, call.values)
        )
        out, lse = torch_attend(
            call.query.cpu().double(), keys, values, None, tensor(there),
            left=call.left, right=call.right, scale=call.scale * call.sharpen,
        )  # fmt: skip
        outs.append(out)
        lses.append(lse)
    return torch_merge(outs, lses, [call.sharpen for call in calls])


def gap(ours, theirs):
    """Largest difference, infinities of one sign being equal."""
    ours, theirs = ours.cpu().double(), theirs.double()
    assert ours.shape == theirs.shape and not ours.isnan().any()
    return float((ours - theirs).masked_fill((ours == theirs) | (ours.isinf() & theirs.isinf()), 0.0).abs().max())


def check(calls, splits, most, tile=SMALL):
    out, mass = SplitRead(64, splits=splits, tile=tile).fused(calls)
    wanted, wanted_mass = exact(calls)
    assert out.dtype == calls[0].query.dtype and mass.dtype == torch.float32
    assert ((mass.cpu() == -math.inf) == (wanted_mass == -math.inf)).all()
    assert gap(out, wanted) < most and gap(mass, wanted_mass) < 10 * most
    return out, mass


# ------------------------------------------------------------------------------------------------ every method's reads


@pytest.mark.parametrize("method", METHODS)
def test_kernels_equal_the_definition(method):
    """A twelfth of the matrix of the dense read, so that each length, block, head layout and mask is met, in shuffled
    pages. Logits of a gain of 30 carry 30 times the rounding."""
    points = matrix(method)
    for number, spec in enumerate(points[list(METHODS).index(method) :: 12]):
        splits, page_size = (1, 8, 3)[number % 3], (16, 1, 32)[number % 3]
        ours, theirs = judged_read(
            spec, page_size, torch.float32, strided=number % 2 == 1, device=DEVICE, judge_dtype=torch.float64,
            **executors(splits),
        )  # fmt: skip
        bar = 1e-5 * spec.gain
        assert gap(ours, theirs) < bar, (spec, splits)


@pytest.mark.parametrize(("dtype", "most"), FLOAT_BARS)
@pytest.mark.parametrize("method", METHODS)
def test_kernels_in_each_dtype(method, dtype, most):
    """Beyond the window, where every part has entries."""
    spec = Spec(method, OPTIONS[method][0], 3 * WINDOW, 7, (8, 2), "default", seed=1)
    ours, theirs = judged_read(spec, 16, dtype, device=DEVICE, **executors(8))
    assert ours.dtype == dtype and gap(ours, theirs) < most


@pytest.mark.parametrize("method", ["fold", "infllm", "cmr"])
def test_kernels_through_a_request(method):
    """Round by round, with the method's state and layers of two kinds."""
    B, layers = 4, (LayerGeometry(), LayerGeometry("sliding_attention", WINDOW, True))
    geometry = DrafterGeometry(layers, 4, 2, HEAD_DIM, HEAD_DIM, 0.25, product_rope("default"), B)
    made, accepted = make_method(method, **OPTIONS[method][0]), [1, 5, 3, 4]
    request = RequestGeometry(25, sum(accepted), B)
    cache = ContextCache(geometry, 25 + sum(accepted), torch.float64)
    generator = torch.Generator().manual_seed(1)
    reader = open_paged(made, geometry, cache.capacity, torch.float32, **executors(8))
    reader.device = torch.device("cpu")
    judge = DenseReader(made, geometry, request, cache)
    reader.begin(request)

    def grow(count):
        new = [normal(generator, 2, count, 2, HEAD_DIM).float().double() for _ in range(2)]
        cache.append(*new)

    def paged(kb, vb):
        kept = [(x[:, :, : cache.length].transpose(1, 2)).float() for x in (cache.keys, cache.values)]
        return [
            lay(kept[0][i], kept[1][i], kb.float(), vb.float(), reader.rope(i, request), 16, generator)
            for i in range(2)
        ]

    grow(25)
    judge.prepare()
    kb, vb = (normal(generator, B, 2, HEAD_DIM).float().double() for _ in range(2))
    reader.committed(25, paged(kb, vb))
    for number, committed in enumerate(accepted):
        kb, vb = (normal(generator, B, 2, HEAD_DIM).float().double() for _ in range(2))
        pages = paged(kb, vb)
        for layer in range(2):
            q = normal(generator, B, 4, HEAD_DIM).float()
            ours = reader.read(layer, q, pages[layer], tensor(cache.length))
            assert gap(ours, judge.read(layer, q.double(), kb, vb)) < 1e-5, (number, layer)
        wanted = judge.wants_target_attention()
        start = cache.length
        grow(committed)
        judge.committed(start, cache.length)
        reader.committed(cache.length, paged(kb, vb))
        if wanted:
            weights = torch.rand(cache.length, generator=generator)
            judge.target_attention(weights)
            reader.target_attention(weights)
    counts = reader.activity()
    assert counts["rounds"] == len(accepted) and counts["far_entries_read"] > 0


# ------------------------------------------------------------------------------------------------------ one split read


@pytest.mark.parametrize("splits", [1, 8])
@pytest.mark.parametrize(("left", "right"), [(None, None), (None, 0), (9, None), (9, 0), (0, 3), (0, 0)])
def test_bounds_at_every_edge_of_a_tile(left, right, splits):
    """Lengths around the block, the bounds and the tiles of 16 keys; more splits than keys among them."""
    generator = torch.Generator().manual_seed(3)
    rows = 5
    for length in (0, 1, 4, 5, 6, 16, 17, 33, 50) if splits == 1 else (0, 4, 17, 50):
        q, k, v = (normal(generator, *s, 16).float() for s in ((rows, 4), (length, 2), (length, 2)))
        check([call_of(q, k, v, 16, generator, length=length, scale=0.3, left=left, right=right)], splits, 1e-5)


@pytest.mark.parametrize("splits", SPLITS)
def test_any_number_of_splits(splits):
    """From one to more than there are keys, some of them empty."""
    generator = torch.Generator().manual_seed(18)
    q, k, v = (normal(generator, *s, 16).float() for s in ((2, 2), (50, 1), (50, 1)))
    for length in (3, 50):
        check([call_of(q, k, v, 16, generator, length=length, scale=0.3, right=0)], splits, 1e-5)


@pytest.mark.parametrize("page_size", [1, 4, 16, 24, 64, None])
def test_pages_of_any_size_and_order(page_size):
    """Pages smaller than a tile, as large, larger, not a power of two, and none at all."""
    generator = torch.Generator().manual_seed(4)
    q, k, v = (normal(generator, *s, 16).float() for s in ((3, 4), (70, 2), (70, 2)))
    for strided in (False, True):
        call = call_of(q, k, v, page_size, generator, length=70, strided=strided, scale=0.3, left=40, right=0)
        check([call], 8, 1e-5)


@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (256, 256), (512, 512), (48, 10), (16, 128)])
def test_head_dims(dims):
    """Those of the drafters, and some that are no power of two or differ between keys and values."""
    generator = torch.Generator().manual_seed(5)
    q, k = normal(generator, 3, 2, dims[0]).float(), normal(generator, 20, 1, dims[0]).float()
    v = normal(generator, 20, 1, dims[1]).float()
    call = call_of(q, k, v, 16, generator, length=20, scale=dims[0] ** -0.5, right=0)
    check([call], 8, 1e-5)
    # Vectors that lie in wider ones: what follows them is not theirs.
    wider = [torch.cat((x, torch.full_like(x, torch.nan)), -1) for x in (call.query, call.keys, call.values)]
    parts = [x[..., :dim] for x, dim in zip(wider, (dims[0], *dims), strict=True)]
    check([replace(call, query=parts[0], keys=parts[1], values=parts[2])], 1, 1e-5)


@pytest.mark.parametrize(("rows", "heads"), [(1, (1, 1)), (1, (8, 1)), (10, (32, 8)), (16, (4, 1)), (7, (16, 1))])
def test_rows_and_heads_fold_into_tiles(rows, heads):
    """One query row, a tile that is not full, and more rows than one tile holds."""
    generator = torch.Generator().manual_seed(6)
    q, k, v = (normal(generator, *s, 16).float() for s in ((rows, heads[0]), (40, heads[1]), (40, heads[1])))
    check([call_of(q, k, v, 16, generator, length=40, scale=0.3, left=rows + 3, right=0)], 1, 1e-5)


@pytest.mark.parametrize("tile", [Tile(32, 64, 4, 3), Tile(64, 32, 4, 3), Tile(128, 128, 8, 2)])
def test_tiles_of_any_size_read_the_same(tile):
    generator = torch.Generator().manual_seed(7)
    q, k, v = (normal(generator, *s, 16).float() for s in ((10, 8), (150, 2), (150, 2)))
    near = call_of(q, k, v, 16, generator, length=150, scale=0.3, left=60)
    far = call_of(q, k, v, 16, generator, length=150, scale=0.3, shift=-50, right=0, sharpen=2.0)
    check([near, far], 8, 1e-5, tile)


@pytest.mark.parametrize("splits", [1, 8, 64])
def test_near_and_far_in_one_launch(splits):
    """Every length from none to beyond W + B: the far part empty, empty for some rows, and larger than the near."""
    generator = torch.Generator().manual_seed(8)
    W, B = 6, 4
    for length in {1: (0, 60), 8: [*range(W - 1, W + B + 2), 60], 64: (W + 1,)}[splits]:
        q1, q2 = (normal(generator, B, 2, 16).float() for _ in range(2))
        k, raw, v = (normal(generator, length + B, 1, 16).float() for _ in range(3))
        near = call_of(q1, k, v, 16, generator, length=length, scale=0.3, shift=B, left=W + B - 1)
        far = call_of(q2, raw, v, 16, generator, length=length, scale=0.3, shift=-W, right=0, sharpen=2.0)
        out, mass = check([near, far], splits, 1e-5)
        alone, alone_mass = check([near], splits, 1e-5)
        if length <= W and splits > 1:
            assert torch.equal(out, alone) and torch.equal(mass, alone_mass)  # an empty part leaves no trace


@pytest.mark.parametrize("splits", [2, 4])
def test_the_smaller_part_keeps_a_split(splits):
    """A part that is one tile of many still has a program of its own, near or far."""
    generator = torch.Generator().manual_seed(19)
    q1, q2, k, raw, v = (normal(generator, *s, 16).float() for s in ((2, 2), (2, 2), *[(130, 1)] * 3))
    wide, narrow = {"left": 120}, {"left": 10}
    for bounds, shift in ((wide, -125), (narrow, -2)):
        near = call_of(q1, k, v, 16, generator, length=130, scale=0.3, **bounds)
        far = call_of(q2, raw, v, 16, generator, length=130, scale=0.3, shift=shift, right=0, sharpen=2.0)
        check([near, far], splits, 1e-5)


def test_a_far_part_without_keys_takes_no_split():
    """Within W the read is cut as the original's, so it is the original's to the bit."""
    generator = torch.Generator().manual_seed(20)
    q1, q2, k, raw, v = (normal(generator, *s, 16).float() for s in ((2, 2), (2, 2), *[(90, 1)] * 3))
    near = call_of(q1, k, v, 16, generator, length=88, scale=0.3, shift=2, left=101)
    far = call_of(q2, raw, v, 16, generator, length=88, scale=0.3, shift=-100, right=0, sharpen=2.0)
    read = SplitRead(64, splits=3, tile=SMALL)
    for ours, theirs in zip(read.fused([near, far]), read.fused([near]), strict=True):
        assert torch.equal(ours, theirs)


def test_a_sharpened_call_alone_has_the_mass_of_its_root():
    generator = torch.Generator().manual_seed(9)
    q, k, v = (normal(generator, *s, 16).float() for s in ((2, 2), (30, 1), (30, 1)))
    for splits in (1, 8):
        check([call_of(q, k, v, 16, generator, length=30, scale=0.3, sharpen=3.0)], splits, 1e-5)
    both = [call_of(q, k, v, 16, generator, length=30, scale=0.3, sharpen=alpha) for alpha in (3.0, 1.5)]
    check(both, 2, 1e-5)


def test_a_read_of_nothing_is_zero_without_mass():
    generator = torch.Generator().manual_seed(24)
    q, k = normal(generator, 2, 2, 16).float(), normal(generator, 4, 1, 16).float()
    empty = call_of(q, k, k, 16, generator, length=0, scale=0.3)
    for calls, splits in (([empty], 1), ([empty], 3), ([empty, replace(empty, sharpen=2.0)], 3)):
        out, mass = check(calls, splits, 1e-5)
        assert not out.any() and (mass == -math.inf).all()


def test_lengths_are_shifted_and_capped_on_the_device():
    generator = torch.Generator().manual_seed(10)
    q, k, v = (normal(generator, *s, 16).float() for s in ((2, 2), (30, 1), (30, 1)))
    for length, shift, most in ((25, -30, None), (25, -20, 4), (25, -23, 4), (25, 5, 28)):
        check([call_of(q, k, v, 16, generator, length=length, scale=0.3, shift=shift, most=most)], 8, 1e-5)


def test_calls_stored_differently_are_merged_after_their_launches():
    """InfLLM's far read gathers its entries; its near read is paged. A window's pages may have another size."""
    generator = torch.Generator().manual_seed(11)
    q1, q2, k, v = (normal(generator, *s, 16).float() for s in ((3, 2), (3, 2), (30, 1), (30, 1)))
    paged = call_of(q1, k, v, 16, generator, length=30, scale=0.3, left=8)
    for other in (None, 4):
        far = call_of(q2, k, v, other, generator, length=22, scale=0.3, right=0, sharpen=2.0)
        check([paged, far], 8, 1e-5)
        check([paged, far, replace(paged, right=0)], 8, 1e-5)


def test_each_part_has_its_own_strides():
    """Queries out of wider projections, heads outermost in memory or not, in either part."""
    generator = torch.Generator().manual_seed(21)
    wide = normal(generator, 3, 9, 16).float()
    q1, q2 = wide[:, 2:6], normal(generator, 4, 3, 16).float().transpose(0, 1)
    k, raw, v = (normal(generator, 60, 2, 16).float() for _ in range(3))
    for first in (False, True):
        near = call_of(q1, k, v, 16, generator, length=60, strided=first, scale=0.3, left=20)
        bounds = {"shift": -18, "right": 0, "sharpen": 2.0}
        far = call_of(q2, raw, v, 16, generator, length=60, strided=not first, scale=0.3, **bounds)
        check([near, replace(far, values=far.values.contiguous())], 3, 1e-5)
        check([replace(near, values=near.values.contiguous()), far], 3, 1e-5)


def test_what_left_the_window_may_hold_anything():
    """Engines give pages before a sliding window to others; a tile that begins before the window must not see them."""
    generator = torch.Generator().manual_seed(22)
    q, k, v = (normal(generator, *s, 16).float() for s in ((3, 2), (60, 1), (60, 1)))
    clean = call_of(q, k, v, None, generator, length=60, scale=0.3, left=20)
    spoiled = replace(clean, keys=clean.keys.clone(), values=clean.values.clone())
    spoiled.keys[:, : 60 - 3 - 20] = spoiled.values[:, : 60 - 3 - 20] = torch.nan
    read = SplitRead(64, splits=1, tile=SMALL)
    for ours, theirs in zip(read.fused([spoiled]), read.fused([clean]), strict=True):
        assert torch.equal(ours, theirs)


def test_keys_and_values_without_pages_have_their_own_strides():
    generator = torch.Generator().manual_seed(23)
    q, k, v = (normal(generator, *s).float() for s in ((3, 2, 16), (30, 2, 16), (30, 2, 32)))
    check([call_of(q, k, v, None, generator, length=30, scale=0.3, right=0)], 1, 1e-5)


def test_large_logits_do_not_overflow():
    generator = torch.Generator().manual_seed(12)
    q, k, v = (normal(generator, *s, 16).float() for s in ((2, 2), (40, 1), (40, 1)))
    near = call_of(100 * q, k, v, 16, generator, length=40, scale=1.0)
    far = call_of(-100 * q, k, v, 16, generator, length=40, scale=1.0, sharpen=2.0)
    wanted, wanted_mass = exact([near, far])
    assert float(wanted_mass.max()) > 500
    out, mass = SplitRead(64, splits=8, tile=SMALL).fused([near, far])
    assert gap(out, wanted) < 1e-3 and gap(mass, wanted_mass) < 1e-3


@pytest.mark.parametrize(("dtype", "most"), FLOAT_BARS)
def test_split_read_in_each_dtype(dtype, most):
    generator = torch.Generator().manual_seed(13)
    q, k, v = (normal(generator, *s, 64).to(dtype) for s in ((7, 8), (90, 2), (90, 2)))
    near = call_of(q, k, v, 16, generator, length=90, scale=0.125, left=30)
    far = call_of(q, k, v, 16, generator, length=90, scale=0.125, shift=-24, right=0, sharpen=2.0)
    for splits in (1, 8):  # several tiles a program, and one
        check([near, far], splits, most)


@pytest.mark.parametrize("width", [16, 64, 128, 256, 512])
def test_tiles_fit_the_shared_memory_of_a_hopper(width):
    """Query, and keys and values of one tile fewer than half the stages, in 227 KiB."""
    for rows, heads, dtype in ((16, 4, torch.bfloat16), (10, 32, torch.bfloat16), (7, 16, torch.float32)):
        q, kv = torch.zeros(rows, heads, width, dtype=dtype), torch.zeros(1, 4, 1, width, dtype=dtype)
        for tile in tiles_for(Call(q, kv, kv, None, tensor(4), 1.0)):
            held = tile.rows + 2 * tile.keys * ((tile.stages + 1) // 2)
            assert held * width * dtype.itemsize <= 227 * 1024


# --------------------------------------------------------------------------------------------------- query rotation


ROPES = {
    "llama": build_rope({"rope_theta": 5e5}, 16),
    "prefix": build_rope({"rope_theta": 1e7, "partial_rotary_factor": 0.25}, 32),
    "gemma": build_rope({"rope_theta": 1e6, "rope_type": "proportional", "partial_rotary_factor": 0.25}, 32),
    "six": build_rope({"rope_theta": 1e4}, 12),  # a number of pairs that is no power of two
    "odd": build_rope({"rope_theta": 1e4, "partial_rotary_factor": 0.5}, 24),  # six pairs, twelve dims at rest
}
PLACES = {
    "none": None,
    "fold": Place(2058, follows_block=True),
    "rerope": Place(2058, follows_block=False),
    "sinks": Place(40, follows_block=True, capped=True, raw=False),
}


def on_device(rope: Rope) -> DeviceRope:
    return DeviceRope(rope.inv_freq.to(DEVICE), torch.tensor([rope.mscale], dtype=torch.float64, device=DEVICE))


@pytest.mark.parametrize("form", ROPES)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("scaling", [None, LogQueryScale(16)])
def test_rotation_is_that_of_float64_angles(form, place, scaling):
    """At position 250,000 as at 0, where a float32 angle is off by 7e-3."""
    rope = replace(ROPES[form], mscale=1.37)
    dim = {"llama": 16, "prefix": 32, "gemma": 32, "six": 12, "odd": 24}[form]
    q = normal(torch.Generator().manual_seed(14), 3, 5, dim)
    for length in (0, 39, 250_000):
        wanted = torch_rotate(q, tensor(length), on_cpu(rope), far=PLACES[place], scaling=scaling)
        ours = rotate(
            q.float().to(DEVICE), tensor(length).to(DEVICE), on_device(rope), far=PLACES[place], scaling=scaling
        )
        assert (ours[1] is None) == (place == "none")
        for mine, theirs in zip(ours, wanted, strict=True):
            if theirs is not None and mine is not None:
                assert gap(mine, theirs) < 1e-6 * max(5.0, float(theirs.abs().max())) and mine.dtype == torch.float32


def on_cpu(rope: Rope) -> DeviceRope:
    return DeviceRope(rope.inv_freq, torch.tensor([rope.mscale], dtype=torch.float64))


def test_rotation_of_many_heads_and_a_strided_query():
    """More heads than one program turns, read out of a packed projection."""
    packed = normal(torch.Generator().manual_seed(15), 2, 37, 16).float().to(DEVICE)
    q = packed[:, 3:36]
    rope = ROPES["llama"]
    ours = rotate(q, tensor(7).to(DEVICE), on_device(rope), far=PLACES["fold"], scaling=None)
    wanted = torch_rotate(q.cpu().double(), tensor(7), on_cpu(rope), far=PLACES["fold"], scaling=None)
    for mine, theirs in zip(ours, wanted, strict=True):
        assert mine is not None and theirs is not None and gap(mine, theirs) < 5e-6


def test_rotation_counts_a_read_once():
    """However many programs turn the heads; in int64."""
    terms = torch.tensor([[-1, 0, 12, 12, 40], [1, 1, 1, 4, 0], [1, 2**62, 2**62, 4, 0]])
    counted = torch.tensor([10, 2**40, 0, 0, 5])
    tally = Tally(terms.to(DEVICE), counted.clone().to(DEVICE))
    q, rope = torch.zeros(3, 37, 16, device=DEVICE), on_device(ROPES["llama"])
    for length in (0, 13, 100):
        rotate(q, tensor(length).to(DEVICE), rope, far=None, scaling=None, tally=tally)
    assert tally.counted.tolist() == [13, 2**40 + 113, 1 + 88, 8, 5]
    mine = Tally(terms, counted.clone())
    for length in (0, 13, 100):
        torch_rotate(q.cpu(), tensor(length), on_cpu(ROPES["llama"]), far=None, scaling=None, tally=mine)
    assert mine.counted.tolist() == tally.counted.tolist()


# --------------------------------------------------------------------------------------------------------- branch merge


def test_merge_weighs_parts_by_their_masses():
    """Two parts and three, with their own sharpening, from a layout of heads first, as FlashAttention's."""
    generator = torch.Generator().manual_seed(16)
    outs = [normal(generator, 5, 6, 24).float() for _ in range(3)]
    lses = [(20 * normal(generator, 6, 5)).float().T for _ in range(3)]
    for count in (2, 3):
        alphas = [1.0, 2.0, 1.5][:count]
        some, sums = outs[:count], lses[:count]
        wanted, wanted_mass = torch_merge([o.double() for o in some], [x.double() for x in sums], alphas)
        ours, mass = merge([o.to(DEVICE) for o in some], [x.to(DEVICE) for x in sums], alphas)
        assert ours.dtype == torch.float32 and gap(ours, wanted) < 1e-5 and gap(mass, wanted_mass) < 1e-5


@pytest.mark.parametrize("sign", [1, -1])
def test_merge_takes_either_sign_of_infinity_for_an_empty_row(sign):
    """FlashAttention 2 says +inf, FlashAttention 3 -inf; what lies in such a row's output does not count."""
    full, empty = torch.ones(4, 3, 16), torch.full((4, 3, 16), torch.nan)
    lse, none = torch.full((4, 3), 5.0), torch.full((4, 3), sign * math.inf)
    for outs, lses, alphas in (((full, empty), (lse, none), [1.0, 2.0]), ((empty, full), (none, lse), [2.0, 1.0])):
        ours, mass = merge([o.to(DEVICE) for o in outs], [x.to(DEVICE) for x in lses], alphas)
        assert torch.equal(ours.cpu(), full) and torch.equal(mass.cpu(), lse)
    ours, mass = merge([empty.to(DEVICE)] * 2, [none.to(DEVICE)] * 2, [1.0, 2.0])
    assert torch.equal(ours.cpu(), torch.zeros(4, 3, 16)) and torch.equal(mass.cpu(), torch.full((4, 3), -math.inf))


@pytest.mark.parametrize(("dtype", "most"), FLOAT_BARS)
def test_merge_in_each_dtype(dtype, most):
    generator = torch.Generator().manual_seed(17)
    outs = [normal(generator, 2, 3, 64).to(dtype) for _ in range(3)]
    lses = [normal(generator, 2, 3).float() for _ in range(3)]
    wanted, _ = torch_merge([o.double() for o in outs], [x.double() for x in lses], [1.0, 2.0, 1.0])
    ours, _ = merge([o.to(DEVICE) for o in outs], [x.to(DEVICE) for x in lses], [1.0, 2.0, 1.0])
    assert ours.dtype == dtype and gap(ours, wanted) < most


# ----------------------------------------------------------------------------------------------------------- wrong use


def test_wrong_use_is_said_in_one_line():
    q, kv = torch.zeros(2, 4, 16, device=DEVICE), torch.zeros(3, 16, 2, 16, device=DEVICE)
    table, length = tensor(0, 1, 2).to(DEVICE), tensor(20).to(DEVICE)
    read = SplitRead(64, splits=1)
    call = Call(q, kv, kv, table, length, 1.0)
    with pytest.raises(ValueError, match="bfloat16, float16 or float32"):
        read.fused([replace(call, query=q.double())])
    with pytest.raises(ValueError, match="bfloat16, float16 or float32"):
        read.fused([replace(call, values=kv.half())])
    with pytest.raises(ValueError, match="a multiple of Hkv"):
        read.fused([replace(call, query=q[:, :3])])
    with pytest.raises(ValueError, match="a multiple of Hkv"):
        read.fused([replace(call, keys=kv[..., :8])])
    with pytest.raises(ValueError, match="last stride 1"):
        read.fused([replace(call, keys=torch.zeros(3, 16, 16, 2, device=DEVICE).transpose(2, 3))])
    with pytest.raises(ValueError, match="without a table"):
        read.fused([replace(call, table=None)])
    with pytest.raises(ValueError, match="one query shape"):
        read.fused([call, replace(call, query=q[:1])])
    with pytest.raises(ValueError, match="at least 1"):
        SplitRead(0)
    with pytest.raises(ValueError, match="at least 1"):
        SplitRead(10, splits=0)
    rope = on_device(ROPES["llama"])
    with pytest.raises(ValueError, match="the Triton rotation takes"):
        rotate(q.double(), length, rope, far=None, scaling=None)
    with pytest.raises(ValueError, match="one part needs no merge"):
        merge([q], [q[..., 0]], [1.0])
