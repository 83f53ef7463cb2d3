"""The nine methods as a user makes them: names, options, which layers they change, and what they reduce to."""

from __future__ import annotations

import ast
import dataclasses
from pathlib import Path

import pytest
import torch
from read_cases import OPTIONS, WINDOW, Spec, gap, make, oracle, product_rope

import methods
from methods import METHODS, make_method
from methods.attention import dense_read
from methods.reading import (
    All,
    Branch,
    LayerGeometry,
    Older,
    ReadPlan,
    Recent,
    Renumbered,
    RequestGeometry,
    Retrieved,
    SharedDistance,
    Sliding,
    SlidingGap,
    TrueDistance,
)

NINE = ["original", "window", "streamingllm", "yarn", "rerope", "infllm", "cmr", "fold", "engine_window"]
FULL, SLIDING = LayerGeometry(), LayerGeometry("sliding_attention", 4096, True)
REQUEST = RequestGeometry(prompt=100_000, limit=512, block=16)
TRAINED = ReadPlan((Branch(Sliding(4096), TrueDistance(), block=True),))


def test_there_are_nine():
    assert list(METHODS) == NINE
    for name, kind in METHODS.items():
        assert kind.name == name
        assert dataclasses.is_dataclass(kind)


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        ("folds", {}, "original, window, streamingllm, yarn, rerope, infllm, cmr, fold, engine_window"),
        ("fold", {"window": 8, "beta": 1}, "window, alpha, layers, far_start"),
        ("fold", {}, "window=2048"),
        ("yarn", {}, "reference"),
        ("fold", {"window": 8, "alpha": 0.5}, "alpha is 0.5"),
        ("fold", {"window": 8, "alpha": float("nan")}, "alpha is nan"),
        ("fold", {"window": 8, "alpha": float("inf")}, "alpha is inf"),
        ("fold", {"window": 8, "alpha": "2"}, "alpha is '2'"),
        ("fold", {"window": -1}, "window is -1"),
        ("fold", {"window": 8.0}, "window is 8.0"),
        ("fold", {"window": True}, "window is True"),
        ("fold", {"window": 8, "layers": "sliding"}, "all, full_attention"),
        ("fold", {"window": 8, "far_start": "late"}, "literal, native"),
        ("window", {"window": 0}, "window is 0"),
        ("window", {"window": 8, "layers": None}, "all, full_attention"),
        ("rerope", {"window": 0}, "window is 0"),
        ("rerope", {"window": 8, "reference": 1}, "reference is 1"),
        ("rerope", {"window": 8, "log_scale": "no"}, "true or false"),
        ("yarn", {"reference": 0}, "reference is 0"),
        ("yarn", {"reference": 512, "temperature": 1}, "true or false"),
        ("streamingllm", {"sinks": -1}, "sinks is -1"),
        ("streamingllm", {"recent": 0}, "recent is 0"),
        ("engine_window", {"window": 0}, "window is 0"),
        ("cmr", {"chunk": 0}, "chunk is 0"),
        ("cmr", {"topk": 0}, "topk is 0"),
        ("cmr", {"refresh": 0}, "refresh is 0"),
        ("cmr", {"first_refresh": 0}, "first_refresh is 0"),
        ("infllm", {"window": 0}, "window is 0"),
        ("infllm", {"window": 8, "block": 0}, "block is 0"),
        ("infllm", {"window": 8, "topk": 0}, "topk is 0"),
        ("infllm", {"window": 8, "initial": -1}, "initial is -1"),
        ("infllm", {"window": 8, "representative": 0}, "representative is 0"),
        ("infllm", {"window": 8, "rotate_query": 0}, "true or false"),
    ],
)
def test_mistakes_end_in_one_line(name, options, says):
    with pytest.raises(ValueError, match=says) as error:
        make_method(name, **options)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("make_it", "says"),
    [
        (lambda: RequestGeometry(0, 1, 1), "prompt is 0"),
        (lambda: RequestGeometry(1, 0, 1), "limit is 0"),
        (lambda: RequestGeometry(1, 1, 0), "block is 0"),
        (lambda: LayerGeometry("local_attention"), "full_attention, sliding_attention"),
        (lambda: LayerGeometry("sliding_attention"), "native_window None"),
        (lambda: LayerGeometry("full_attention", 64), "native_window 64"),
        (lambda: LayerGeometry("sliding_attention", 0), "native_window is 0"),
        (
            lambda: make_method("engine_window", window=4090).plan(SLIDING, REQUEST),
            "use 4096 or more, or at most 4080",
        ),
    ],
)
def test_impossible_geometry_ends_in_one_line(make_it, says):
    with pytest.raises(ValueError, match=says):
        make_it()


def test_defaults_are_the_papers():
    assert make_method("fold", window=2048) == METHODS["fold"](2048, 2.0, "all", "literal")
    assert make_method("streamingllm") == METHODS["streamingllm"](4, 2044)
    assert make_method("cmr") == METHODS["cmr"](32, 64, 8, 1)
    assert make_method("infllm", window=2048) == METHODS["infllm"](2048, 128, 128, 16, 4, True)
    assert make_method("rerope", window=2048) == METHODS["rerope"](2048, 4096, True)
    assert make_method("window", window=2048) == METHODS["window"](2048, "full_attention")
    assert make_method("rerope", window=1, reference=2).reference == 2  # the least that has a logarithm to divide by
    assert make_method("infllm", window=1, initial=0).initial == 0


def test_layers_of_a_mixed_drafter():
    """Appendix B.3: FOLD, ReRoPE and CMR change all six layers of the Qwen3.5 drafter, the others its full layer
    alone.
    """
    changed = {
        name: make_method(name, **({"window": 2048} if "window" in [f.name for f in dataclasses.fields(kind)] else {}))
        if name != "yarn"
        else make_method("yarn", reference=40_000)
        for name, kind in METHODS.items()
    }
    untouched = {name for name, method in changed.items() if method.plan(SLIDING, REQUEST) == TRAINED}
    assert untouched == {"original", "window", "streamingllm", "yarn", "infllm"}
    for name, method in changed.items():
        assert method.layers == ("full_attention" if name in untouched - {"original"} else "all"), name
    assert make_method("fold", window=4096, layers="full_attention").plan(SLIDING, REQUEST) == TRAINED


def test_plans_of_the_qwen35_drafter():
    near = Branch(Sliding(4096), TrueDistance(), block=True)
    literal = make_method("fold", window=4096).plan(SLIDING, REQUEST)
    assert literal.branches == (near, Branch(Older(4096), SharedDistance(4112, True), sharpen=2.0))
    native = make_method("fold", window=4096, far_start="native").plan(SLIDING, REQUEST)
    assert native.branches == (near, Branch(SlidingGap(4096), SharedDistance(4112, True), sharpen=2.0))
    full = make_method("fold", window=4096).plan(FULL, REQUEST)
    assert full.branches[0] == Branch(Recent(4096), TrueDistance(), block=True)
    assert make_method("yarn", reference=40_000).plan(FULL, REQUEST).rope.factor == 100_608 / 40_000
    assert make_method("yarn", reference=200_000).plan(FULL, REQUEST).rope is None
    assert make_method("original").plan(FULL, REQUEST).branches == (Branch(All(), TrueDistance(), block=True),)
    cmr = make_method("cmr").plan(SLIDING, REQUEST)
    assert cmr.branches == (Branch(Retrieved(), Renumbered(), block=True),)


def read(spec: Spec, plan=None):
    return dense_read(
        plan or make(spec).plan(spec.layer, spec.request),
        *spec.tensors(),
        rope=product_rope(spec.rope),
        scale=spec.scale,
        block_causal=spec.causal,
        retrieved=torch.arange(spec.N),
    )


@pytest.mark.parametrize("N", [0, 1, WINDOW - 1, WINDOW])
def test_a_context_within_the_window_is_read_as_trained(N):
    original = read(Spec("original", {}, N, 7, (8, 2), "default"))
    short = {
        "window": {"window": WINDOW},
        "fold": {"window": WINDOW, "alpha": 3.0},
        "rerope": {"window": WINDOW, "reference": 4096},
        "infllm": {"window": WINDOW},
        "engine_window": {"window": WINDOW},
        "streamingllm": {"sinks": 4, "recent": WINDOW - 4},
        "cmr": {},
        "yarn": {"reference": 512},
    }
    for name, options in short.items():
        ours = read(Spec(name, options, N, 7, (8, 2), "default"))
        torch.testing.assert_close(ours.out, original.out, atol=1e-13, rtol=0)
        torch.testing.assert_close(ours.lse, original.lse, atol=1e-13, rtol=0)
    beyond = Spec("fold", {"window": WINDOW}, WINDOW + 1, 7, (8, 2), "default")
    trained = read(dataclasses.replace(beyond, method="original", options={}))
    assert float((read(beyond).out - trained.out).abs().max()) > 1e-4


def test_fold_without_concentration_is_one_softmax_over_mapped_distances():
    spec = Spec("fold", {"window": WINDOW, "alpha": 1.0}, 3 * WINDOW, 7, (8, 2), "prefix")
    case, D = oracle.Case.of(*spec.tensors()), WINDOW + 7

    def mapped(r):
        context = [("c", j, spec.N + r - j if spec.N + r - j < D else D + r) for j in range(spec.N)]
        return context + [("b", i, r - i) for i in range(7)]

    one = oracle._single_softmax(case, oracle.rope_default(10000.0, 8), spec.scale, mapped)
    assert gap(read(spec).out, one.out) < 1e-12
    assert gap(read(spec).lse, one.lse) < 1e-12


def test_fold_mass_of_equal_entries_grows_as_the_alpha_root():
    spec = Spec("fold", {"window": WINDOW, "alpha": 2.0}, 60, 7, (2, 2), "default")
    q, k, v, kb, vb = spec.tensors()
    plan = make(spec).plan(spec.layer, spec.request)
    far = ReadPlan((dataclasses.replace(plan.branches[1]),))
    flat = dense_read(far, q, torch.zeros_like(k), v, kb, vb, rope=product_rope("default"), scale=0.25)
    count = torch.tensor([60 - WINDOW - (6 - r) for r in range(7)], dtype=torch.float64)
    torch.testing.assert_close(flat.lse[:, 0], 0.5 * torch.log(count))


def test_rerope_scales_the_query_by_position():
    spec = Spec("rerope", {"window": WINDOW, "reference": 16}, 40, 7, (2, 2), "default")
    q, *rest = spec.tensors()
    factor = torch.tensor([oracle.rerope_query_factor(40 + r, 16) for r in range(7)], dtype=torch.float64)
    plain = make_method("rerope", window=WINDOW, log_scale=False).plan(FULL, spec.request)
    by_hand = dense_read(plain, q * factor[:, None, None], *rest, rope=product_rope("default"), scale=0.25)
    torch.testing.assert_close(read(spec).out, by_hand.out, atol=1e-13, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_short_dtypes_sum_in_float32(dtype):
    for name, options in OPTIONS.items():
        if name in ("infllm", "cmr"):
            continue
        spec = Spec(name, options[0], 3 * WINDOW, 7, (8, 2), "default")
        tensors = [x.to(dtype) for x in spec.tensors()]
        plan = make(spec).plan(spec.layer, spec.request)
        ours = dense_read(plan, *tensors, rope=product_rope("default"), scale=0.25)
        exact = dense_read(plan, *(x.double() for x in tensors), rope=product_rope("default"), scale=0.25)
        assert ours.out.dtype == dtype and ours.lse.dtype == torch.float32
        assert float((ours.lse.double() - exact.lse).abs().max()) < 1e-5
        assert float((ours.out.double() - exact.out).abs().max()) < max(1e-5, 2 * torch.finfo(dtype).eps)


def test_value_dim_may_differ_and_the_scale_is_the_callers():
    spec = Spec("fold", {"window": WINDOW}, 30, 7, (8, 2), "default", scale=1.0)
    q, k, v, kb, vb = spec.tensors()
    plan = make(spec).plan(spec.layer, spec.request)
    whole = dense_read(plan, q, k, v, kb, vb, rope=product_rope("default"), scale=1.0)
    part = dense_read(plan, q, k, v[..., :5], kb, vb[..., :5], rope=product_rope("default"), scale=1.0)
    torch.testing.assert_close(part.out, whole.out[..., :5])


def test_what_does_not_fit_is_said():
    spec = Spec("cmr", {}, 30, 7, (8, 2), "default")
    q, k, v, kb, vb = spec.tensors()
    plan = make(spec).plan(spec.layer, spec.request)
    rope = product_rope("default")
    with pytest.raises(ValueError, match="retrieved"):
        dense_read(plan, q, k, v, kb, vb, rope=rope, scale=1.0)
    for wrong in (
        (q[:3], k, v, kb, vb),
        (q, k[..., :8], v, kb, vb),
        (q, k, v[:4], kb, vb),
        (q[:, :7], k, v, kb, vb),
        (q, k, v, kb[:, :1], vb[:, :1]),
        (q, k, v, kb, vb[..., :8]),
        (q[:, 0], k[:, 0], v[:, 0], kb[:, 0], vb[:, 0]),
    ):
        with pytest.raises(ValueError, match="dense_read wants"):
            dense_read(plan, *wrong, rope=rope, scale=1.0)
    shared = ReadPlan((Branch(All(), SharedDistance(5, True), block=True),))
    with pytest.raises(ValueError, match="block's own keys"):
        dense_read(shared, q, k, v, kb, vb, rope=rope, scale=1.0)


def test_methods_imports_nothing_else_of_the_project():
    folder = Path(methods.__file__).parent
    others = {"harness", "analysis", "data_prep", "slurm", "conf", "tests"}
    for file in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not {name.partition(".")[0] for name in names} & others, file


def test_every_method_has_a_configuration_file():
    conf = Path(methods.__file__).parent.parent / "conf" / "method"
    omegaconf = pytest.importorskip("omegaconf").OmegaConf
    for name, kind in METHODS.items():
        drafter = omegaconf.create({"drafter": {"window": 256, "train_length": 512}, "method": {}})
        drafter.method = omegaconf.load(conf / f"{name}.yaml")
        options = omegaconf.to_container(drafter, resolve=True)["method"]
        assert options.pop("name") == name
        assert set(options) == {field.name for field in dataclasses.fields(kind)}, name
        needed = [f.name for f in dataclasses.fields(kind) if f.default is dataclasses.MISSING]
        given = {option: options[option] for option in needed}
        assert make_method(name, **options) == make_method(name, **given)
    assert {file.stem for file in conf.glob("*.yaml")} == set(METHODS)
