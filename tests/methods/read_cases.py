"""Inputs, geometries and expected reads shared by the tests of ``methods``.

The expected read of every method comes from ``tests/oracles``: loops in float64 that share no code with the product.
"""

from __future__ import annotations

import itertools
import math
import random
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "oracles"))
import drafter_oracles as oracle

from methods import make_method
from methods.reading import LayerGeometry, RequestGeometry
from methods.rope import Rope, build_rope

WINDOW = 12
HEAD_DIM = 16
THETA = 10000.0
REFERENCE = 64  # YaRN's
LIMIT = 8
SINKS, RECENT = 4, 8
INFLLM = {"block": 4, "initial": 3, "topk": 2, "representative": 2}
CMR = {"chunk": 4, "topk": 3, "refresh": 3}

LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}
ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_theta": THETA},
    "llama3": {"rope_theta": THETA, "rope_type": "llama3", **LLAMA3},
    "prefix": {"rope_theta": THETA, "partial_rotary_factor": 0.5},
    "proportional": {"rope_theta": THETA, "rope_type": "proportional", "partial_rotary_factor": 0.5},
    "yarn": {"rope_theta": THETA, "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256},
}


def llama3_by_hand() -> oracle.Rope:
    """Llama 3.1's rule as published: by wavelength, three cases."""
    scaled = []
    for f in oracle.rope_default(THETA, HEAD_DIM).inv_freq:
        wavelength = 2 * math.pi / f
        if wavelength < 256 / 4.0:
            scaled.append(f)
        elif wavelength > 256 / 1.0:
            scaled.append(f / 8.0)
        else:
            smooth = (256 / wavelength - 1.0) / (4.0 - 1.0)
            scaled.append((1 - smooth) * f / 8.0 + smooth * f)
    return oracle.Rope(tuple(scaled))


ORACLE_ROPES = {
    "default": oracle.rope_default(THETA, HEAD_DIM),
    "llama3": llama3_by_hand(),
    "prefix": oracle.rope_default(THETA, HEAD_DIM // 2),
    "proportional": oracle.rope_proportional(THETA, HEAD_DIM, 0.5),
    "yarn": oracle.rope_yarn(THETA, HEAD_DIM, 4.0, 256),
}


def product_rope(form: str) -> Rope:
    return build_rope(ROPES[form], HEAD_DIM)


def oracle_yarn_rope(form: str, factor: float, temperature: bool = True) -> oracle.Rope:
    """What YaRN makes of each form: the base frequencies scaled, whatever scaling the form had."""
    mscale = None if temperature else 1.0
    if form == "proportional":
        return oracle.rope_yarn(
            THETA, HEAD_DIM, factor, REFERENCE, mscale=mscale, rotated_pairs=HEAD_DIM // 4, total_pairs=HEAD_DIM // 2
        )
    return oracle.rope_yarn(THETA, HEAD_DIM // 2 if form == "prefix" else HEAD_DIM, factor, REFERENCE, mscale=mscale)


@dataclass(frozen=True)
class Spec:
    """One point of the test matrix."""

    method: str
    options: dict[str, Any]
    N: int
    B: int
    heads: tuple[int, int]
    rope: str
    gain: float = 1.0
    scale: float = 0.25
    native: int | None = None
    causal: bool = False
    seed: int = 0

    @property
    def layer(self) -> LayerGeometry:
        kind = "full_attention" if self.native is None else "sliding_attention"
        return LayerGeometry(kind, self.native, self.causal)

    @property
    def request(self) -> RequestGeometry:
        return RequestGeometry(prompt=max(1, self.N), limit=LIMIT, block=self.B)

    def tensors(self) -> tuple[Tensor, ...]:
        """q, k, v, kb, vb in float64; ``gain`` multiplies the query, hence the logits."""
        generator = torch.Generator().manual_seed(self.seed)
        hq, hkv = self.heads
        shapes = ((self.B, hq), (self.N, hkv), (self.N, hkv), (self.B, hkv), (self.B, hkv))
        q, *rest = (torch.randn(*s, HEAD_DIM, generator=generator, dtype=torch.float64) for s in shapes)
        return (q * self.gain, *rest)


def expected(spec: Spec, case: oracle.Case, retrieved: Any = None) -> oracle.Read:
    """The oracle's read of a method, written out from the paper's Appendix B.3 for full and sliding layers."""
    rope, scale, options = ORACLE_ROPES[spec.rope], spec.scale, spec.options
    causal, native, D = spec.causal, spec.native, WINDOW + spec.B
    trained = {"block_causal": causal, "sliding_window": native}
    match spec.method:
        case "original":
            return oracle.dflash(case, rope, scale, **trained)
        case "window":
            if native is None:
                return oracle.window(case, rope, scale, WINDOW, block_causal=causal)
            if options.get("layers", "full_attention") == "full_attention":
                return oracle.dflash(case, rope, scale, **trained)
            return oracle.dflash(case, rope, scale, block_causal=causal, sliding_window=min(native, D))
        case "streamingllm":
            if native is not None:
                return oracle.dflash(case, rope, scale, **trained)
            return oracle.streamingllm(case, rope, scale, sinks=options["sinks"], recent=RECENT, block_causal=causal)
        case "yarn":
            factor = oracle.yarn_request_factor(max(1, spec.N), LIMIT, spec.B, options["reference"])
            if native is not None or factor == 1.0:
                return oracle.dflash(case, rope, scale, **trained)
            scaled = oracle_yarn_rope(spec.rope, factor, options.get("temperature", True))
            return oracle.yarn(case, scaled, scale, block_causal=causal)
        case "rerope":
            return oracle.rerope(
                case,
                rope,
                scale,
                WINDOW,
                train_len=options["reference"],
                log_scale=options.get("log_scale", True),
                block_causal=causal,
                native_window=native,
            )
        case "fold":
            if native is not None and options.get("layers", "all") == "full_attention":
                return oracle.dflash(case, rope, scale, **trained)
            start = None
            if native is not None and (options.get("far_start") == "native" or native > D):
                start = native
            return oracle.fold(
                case,
                rope,
                scale,
                WINDOW,
                options.get("alpha", 2.0),
                block_causal=causal,
                native_window=native,
                far_min_distance=start,
            )
        case "infllm":
            if native is not None:
                return oracle.dflash(case, rope, scale, **trained)
            layout, selected = retrieved
            return oracle.infllm(case, rope, scale, WINDOW, layout=layout, selected=selected, block_causal=causal)
        case "cmr":
            return oracle.cmr(case, rope, scale, retrieved, block_causal=causal)
        case "engine_window":
            if native is not None and native <= WINDOW:
                return oracle.dflash(case, rope, scale, **trained)
            return oracle.shared_window(case, rope, scale, WINDOW, block_causal=causal)
    raise AssertionError(spec.method)


def infllm_choice(spec: Spec, case: oracle.Case) -> tuple[tuple[Any, list[int]], list[int]]:
    """Layout and selection by the oracle, and the context positions they amount to."""
    D = WINDOW + spec.B
    layout = oracle.infllm_layout(spec.N, D, n_init=INFLLM["initial"], block=INFLLM["block"])
    representations = oracle.infllm_repr(case, layout)
    selected, _ = oracle.infllm_select(case, ORACLE_ROPES[spec.rope], representations, D, topk=INFLLM["topk"])
    positions = [*layout.init, *(j for b in selected for j in range(*layout.blocks[b])), *layout.tail]
    return (layout, selected), positions


def cmr_choice(spec: Spec) -> list[int]:
    """A selection that leaves a hole: first chunk and last two, as a refresh can make it."""
    chunk, last = CMR["chunk"], -(-spec.N // CMR["chunk"])
    kept = sorted({0, *range(max(0, last - 2), last)} & set(range(last)))
    return [j for c in kept for j in range(c * chunk, min((c + 1) * chunk, spec.N))]


def gap(ours: Tensor, theirs: list) -> float:
    """Largest absolute difference; infinite if anything is not a number."""
    difference = (ours.double() - torch.tensor(theirs, dtype=torch.float64)).abs()
    return math.inf if difference.isnan().any() else float(difference.max())


OPTIONS: dict[str, list[dict[str, Any]]] = {
    "original": [{}],
    "window": [{"window": WINDOW}, {"window": WINDOW, "layers": "all"}],
    "streamingllm": [{"sinks": SINKS, "recent": RECENT}, {"sinks": 0, "recent": RECENT}],
    "yarn": [{"reference": REFERENCE}, {"reference": REFERENCE, "temperature": False}, {"reference": 512}],
    "rerope": [
        {"window": WINDOW, "reference": 16},
        {"window": WINDOW, "reference": 16, "log_scale": False},
        {"window": WINDOW, "reference": 4096},
    ],
    "infllm": [{"window": WINDOW, **INFLLM}],
    "cmr": [CMR],
    "fold": [
        {"window": WINDOW, "alpha": 1},
        {"window": WINDOW, "alpha": 1.5, "far_start": "native"},
        {"window": WINDOW, "alpha": 2.0},
        {"window": WINDOW, "alpha": 4.0, "far_start": "literal"},
        {"window": WINDOW, "alpha": 2.0, "layers": "full_attention"},
    ],
    "engine_window": [{"window": WINDOW}],
}
LENGTHS = (0, 1, WINDOW - 1, WINDOW, WINDOW + 1, "W+B-1", "W+B", "W+B+1", 3 * WINDOW)
BLOCKS = (1, 7, 10, 16)
HEADS = ((2, 2), (8, 2))


def matrix(method: str) -> list[Spec]:
    """Every length with every block size and both head layouts. The other axes are dealt pairwise: of forty random
    deals each point takes the one with most pairs of values not met before, so that nearly all pairs meet
    (test_dense_read checks)."""
    chance = random.Random(method)
    met: set[tuple] = set()
    specs = []
    grid = [*itertools.product(LENGTHS, BLOCKS, HEADS), *itertools.product(LENGTHS[-2:], BLOCKS, HEADS)]
    for index, (length, B, heads) in enumerate(grid):
        N = length if isinstance(length, int) else WINDOW + B + {"W+B-1": -1, "W+B": 0, "W+B+1": 1}[length]
        wide = WINDOW + B + (0 if method == "engine_window" else 3)
        deals = []
        for _ in range(40):
            dealt = {
                "option": chance.randrange(len(OPTIONS[method])),
                "rope": chance.choice(list(ROPES)),
                "gain": chance.choice((1.0, 30.0)),
                "scale": chance.choice((0.25, 1.0)),
                "native": chance.choice((None, None, WINDOW, wide, 5)),
                "causal": chance.choice((False, True)),
            }
            # What a pair of values does shows beyond the window; shorter contexts are dealt for themselves.
            beyond, full = N > WINDOW + B, dealt["native"] is None
            place = {"length": length, "B": B, "heads": heads, **dealt}
            place["native"] = "wide" if dealt["native"] == wide else dealt["native"]
            new = {(beyond, *pair) for pair in itertools.combinations(place.items(), 2)} - met
            main = {(beyond, full, *item) for item in dealt.items()} - met
            deals.append((len(new) + 5 * len(main), len(deals), dealt, new | main))
        _, _, best, new = max(deals, key=lambda deal: deal[:2])
        met |= new
        options = OPTIONS[method][best.pop("option")]
        specs.append(Spec(method, options, N, B, heads, **best, seed=index))
    return specs


def make(spec: Spec) -> Any:
    return make_method(spec.method, **spec.options)
