"""Steps of fixed shape, replayed eagerly on a CPU: the same tokens and drafts as the engine's ordinary path.

On a GPU the very same functions are captured as CUDA graphs; what is tested here is everything but the capture.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
import yaml
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from harness.drafters import Drafter, parse_config, random_drafter, tensor_shapes
from harness.engines.base import EngineError, Generation
from harness.engines.reference import fixed as fixed_module
from harness.engines.reference.dense import DenseTarget
from harness.engines.reference.engine import ReferenceEngine
from harness.engines.reference.fixed import (
    PAGE,
    Executors,
    Fixed,
    FixedDrafting,
    FixedReader,
    far_from,
    triton_executors,
)
from harness.engines.reference.hf import TransformersTarget, random_model
from harness.engines.reference.target import open_target
from methods import make_method
from methods.cache import ContextCache, DrafterGeometry
from methods.paged import torch_attend
from methods.reader import DenseReader
from methods.reading import LayerGeometry, RequestGeometry
from methods.rope import build_rope
from tests.engines.test_reference_engine import OPTIONS
from tests.engines.tiny import ARCHITECTURES, INFO, VOCAB, drafter_config, request, save_target

ROOT = Path(__file__).resolve().parents[2]
FIXED = sorted(set(OPTIONS) - {"infllm", "cmr"})


def engines(
    folder: Path, dtype: torch.dtype = torch.float64, drafter: Any = None, executors: Executors | None = None
) -> list[ReferenceEngine]:
    """The ordinary engine and the one of fixed steps, over targets and drafters of the same weights."""
    return [
        ReferenceEngine(
            open_target(folder, dtype, torch.device("cpu")),
            random_drafter(drafter or drafter_config(), dtype=dtype, device="cpu", seed=1),
            prefill_chunk=7,
            info=INFO,
            executors=each,
        )
        for each in (None, executors or Executors())
    ]


class Guide:
    """Turns real drafts into ones that are right as often as one likes, the same for both engines."""

    def __init__(self, prompt: int, continuation: list[int]) -> None:
        self.prompt, self.continuation = prompt, continuation
        self.drafted: list[tuple[int, list[int]]] = []

    def __call__(self, length: int, real: list[int]) -> list[int]:
        done = length - self.prompt + 1
        keep = (7 * len(self.drafted) + 3) % (len(real) + 1)
        self.drafted.append((length, real))
        right = self.continuation[done : done + len(real)]
        guided = right[:keep] + [(token + 1) % VOCAB for token in right[keep:]]
        return guided + [0] * (len(real) - len(guided))


def guided(engine: ReferenceEngine, guide: Guide, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = engine._open_drafting

    def opening(*arguments: Any) -> Any:
        drafting = opened(*arguments)
        draft = type(drafting).draft.__get__(drafting)
        drafting.draft = lambda anchor: guide(engine._target.length, draft(anchor))  # type: ignore[method-assign]
        return drafting

    monkeypatch.setattr(engine, "_open_drafting", opening)


def both(
    folder: Path, name: str, monkeypatch: pytest.MonkeyPatch, prompt: int = 150, limit: int = 60, **options: Any
) -> tuple[list[Generation], list[Guide], list[ReferenceEngine]]:
    """A request decoded by both engines with guided drafts."""
    asked, pair = request(prompt, limit), engines(folder)
    method = make_method(name, **(OPTIONS[name] | options))
    known = pair[0].decode(replace(asked, max_new_tokens=limit + 8), None).output_ids
    guides = [Guide(prompt, known) for _ in pair]
    for engine, guide in zip(pair, guides, strict=True):
        guided(engine, guide, monkeypatch)
    return [engine.decode(asked, method) for engine in pair], guides, pair


@pytest.mark.parametrize("name", sorted(OPTIONS))
def test_a_method_drafts_and_commits_the_same(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_target("llama", tmp_path)
    (plain, fixed), guides, pair = both(tmp_path, name, monkeypatch)
    assert (fixed.output_ids, fixed.commits) == (plain.output_ids, plain.commits)
    assert guides[0].drafted == guides[1].drafted
    assert {1, 5} <= set(plain.commits)
    for key in ("rounds", "entries_in_context", "far_entries_read"):
        assert fixed.activity[key] == plain.activity[key], key
    assert pair[1]._fixed[name][1].reader.host_driven == (name in ("infllm", "cmr"))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_target_verifies_the_same(
    architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_target(architecture, tmp_path)
    (plain, fixed), guides, pair = both(tmp_path, "fold", monkeypatch, prompt=40, limit=30)
    assert (fixed.output_ids, fixed.commits) == (plain.output_ids, plain.commits)
    assert guides[0].drafted == guides[1].drafted
    for rows in (1, 5):  # a recurrent state has no place of its own
        assert pair[1]._target.has_fixed(rows) == (architecture != "qwen3_5")
    asked = request(40, 30)
    assert pair[1].decode(asked, None).output_ids == pair[0].decode(asked, None).output_ids == plain.output_ids


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_short_dtypes_run_through_fixed_steps(dtype: torch.dtype, tmp_path: Path) -> None:
    save_target("llama", tmp_path)
    plain, fixed = engines(tmp_path, dtype)
    asked = request(100, 24)
    method = make_method("fold", **OPTIONS["fold"])
    want, got = plain.decode(asked, method), fixed.decode(asked, method)
    if dtype == torch.float32:  # bfloat16 rounds logits so coarsely that ties fall either way
        assert got.output_ids == want.output_ids and got.commits == want.commits
    assert len(got.output_ids) == 24 and got.activity["far_entries_read"] > 0


def test_requests_and_methods_follow_each_other_on_one_storage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_target("llama", tmp_path)
    plain, fixed = engines(tmp_path)
    storage = None
    for seed, length, limit in ((0, 110, 10), (2, 20, 12), (0, 110, 10)):
        asked = request(length, limit, seed=seed)
        for name in ("fold", "yarn", "original", "streamingllm"):
            method = make_method(name, **OPTIONS[name])
            want, got = plain.decode(asked, method), fixed.decode(asked, method)
            assert (got.output_ids, got.commits) == (want.output_ids, want.commits), (seed, name)
            assert got.activity["far_entries_read"] == want.activity["far_entries_read"]
        storage = storage or fixed._storage
        assert fixed._storage is storage
    # Other options are another method: the storage of the first goes.
    held = fixed._fixed["fold"][1]
    fixed.decode(asked, make_method("fold", window=8))
    assert fixed._fixed["fold"][1] is not held


def test_length_dispatch_takes_the_window_alone_until_something_is_far(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_target("llama", tmp_path)
    window = 60
    (plain, fixed), guides, _ = both(tmp_path, "fold", monkeypatch, prompt=40, limit=60, window=window)
    assert guides[0].drafted == guides[1].drafted
    assert (fixed.output_ids, fixed.commits) == (plain.output_ids, plain.commits)
    short = [length for length, _ in guides[1].drafted if length <= window]
    assert 0 < len(short) < len(guides[1].drafted)
    assert fixed.activity["window_only_rounds"] == len(short)
    assert fixed.activity["rounds"] == plain.activity["rounds"] == len(guides[1].drafted)
    # Within the window the drafts are the original drafter's.
    (_, original), theirs, _ = both(tmp_path, "original", monkeypatch, prompt=40, limit=60)
    assert theirs[1].drafted[: len(short)] == guides[1].drafted[: len(short)]
    assert original.output_ids == fixed.output_ids


@pytest.mark.parametrize(
    ("name", "options", "first"),
    [("fold", {"window": 60}, 61), ("rerope", {"window": 60}, 61), ("window", {"window": 60}, None), ("cmr", {}, None)],
)
def test_the_first_length_with_a_far_entry(name: str, options: dict[str, Any], first: int | None) -> None:
    geometry = drafter_config().geometry()
    method = make_method(name, **(options or OPTIONS[name]))
    assert far_from(method, geometry) == first
    if first is not None:
        far = next(b for b in method.plan(geometry.layers[0], RequestGeometry(1, 1, 5)).branches if not b.block)
        from methods.attention import entries_read

        for context, some in ((first - 1, False), (first, True)):
            assert bool(entries_read(far.entries, context, 5, torch.device("cpu"))[1].any()) == some


def test_a_sliding_layers_gap_counts_too() -> None:
    layers = (LayerGeometry("sliding_attention", 12, block_causal=True), LayerGeometry())
    geometry = DrafterGeometry(layers, 4, 2, 16, 16, 0.25, build_rope({"rope_theta": 1e4}, 16), 5)
    assert far_from(make_method("fold", window=20, far_start="native"), geometry) == 8  # 12 - 5 + 1
    assert far_from(make_method("fold", window=20), geometry) == 21


def test_a_cache_that_is_no_whole_number_of_pages_is_refused() -> None:
    geometry = drafter_config().geometry()
    with pytest.raises(ValueError, match="no whole number of pages"):
        odd = ContextCache(geometry, 100, torch.float64)
        FixedReader(make_method("fold", window=8), odd, Executors())


# a drafter of Qwen3.5's kind: sliding layers that mask later block keys, and a full one
MIXED = {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "block_size": 5,
    "dflash_config": {"mask_token_id": 1, "target_layer_ids": [1, 3]},
    "num_target_layers": 6,
    "num_hidden_layers": 3,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "sliding_window": 24,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 512,
    "vocab_size": VOCAB,
}


@pytest.mark.parametrize("name", FIXED)
@pytest.mark.parametrize("prompt", [3, 17, 230])
def test_a_ring_of_pages_reads_what_the_definition_reads(name: str, prompt: int) -> None:
    """Round after round, across the ring's wrap-around, on a drafter with sliding and full layers."""
    config = parse_config(MIXED)
    geometry = config.geometry()
    torch.manual_seed(0)
    request_geometry = RequestGeometry(prompt, 400, geometry.block)
    caches = [ContextCache(geometry, 16 * PAGE - geometry.block, torch.float64) for _ in range(2)]
    method = make_method(name, **OPTIONS[name])
    fixed = FixedReader(method, caches[0], Executors())
    k, v = (torch.randn(3, prompt, 2, 16, dtype=torch.float64) for _ in range(2))
    for cache in caches:
        cache.append(k, v)
    fixed.begin(request_geometry)
    fixed.prepare()
    dense = DenseReader(method, geometry, request_geometry, caches[1])
    dense.prepare()
    ringed = [store for store in fixed.stores if not store.whole]
    # StreamingLLM leaves sliding layers alone, the original reads all: every method has a ring somewhere here.
    assert ringed
    for place in range(60):
        fixed.choose()
        for layer in range(3):
            q = torch.randn(5, 4, 16, dtype=torch.float64)
            kb, vb = (torch.randn(5, 2, 16, dtype=torch.float64) for _ in range(2))
            got, want = fixed.read(layer, q, kb, vb), dense.read(layer, q, kb, vb)
            assert torch.allclose(got, want, atol=1e-9), (place, layer)
        for reader in (fixed, dense):
            reader.round_done()
        k, v = (torch.randn(3, 5, 2, 16, dtype=torch.float64) for _ in range(2))
        accepted, start = 1 + (3 * place) % 5, caches[1].length
        fixed.append(k, v)  # the rejected rows too
        fixed.committed(start, start + accepted)
        caches[1].append(k[:, :accepted], v[:, :accepted])
        dense.committed(start, start + accepted)
    assert caches[0].length == caches[1].length > prompt + 150
    assert torch.equal(caches[0].keys[:, :, : caches[0].length], caches[1].keys[:, :, : caches[1].length])
    with pytest.raises(ValueError, match="the reader holds"):
        fixed.committed(0, 1)


def test_a_step_is_called_as_it_is_where_there_is_no_gpu() -> None:
    called: list[int] = []
    step = Fixed(lambda: called.append(1), torch.device("cpu"))
    step.capture()
    assert not called
    step()
    step()
    assert called == [1, 1]


def test_dspark_drafts_the_same(tmp_path: Path) -> None:
    save_target("qwen3", tmp_path)
    others = ("dflash_config", "layer_types", "sliding_window")
    shared = {key: value for key, value in MIXED.items() if key not in others}
    config = parse_config(
        shared
        | {"architectures": ["Qwen3DSparkModel"], "mask_token_id": 1, "target_layer_ids": [1, 3]}
        | {"markov_rank": 8, "markov_head_type": "vanilla"}
    )
    plain, fixed = engines(tmp_path, drafter=config)
    asked = request(70, 24)
    method = make_method("fold", **OPTIONS["fold"])
    want, got = plain.decode(asked, method), fixed.decode(asked, method)
    assert (got.output_ids, got.commits, got.proposals) == (want.output_ids, want.commits, want.proposals)
    assert set(got.proposals) == {5}
    assert isinstance(fixed._fixed["fold"][1], FixedDrafting)


INTERPRETED = """
import sys
from pathlib import Path
import torch
from harness.engines.reference.fixed import triton_executors
from tests.engines.test_fixed_steps import engines
from methods import make_method
from tests.engines.tiny import request

plain, _ = engines(Path(sys.argv[1]), torch.float32)
_, fixed = engines(Path(sys.argv[1]), torch.float32, executors=triton_executors(512))
asked = request(40, 4)
chosen = {"window": 16, "block": 4, "initial": 3, "topk": 2, "representative": 2}
for name, options in (("fold", {"window": 16}), ("streamingllm", {"sinks": 2, "recent": 14}), ("infllm", chosen)):
    method = make_method(name, **options)
    want, got = plain.decode(asked, method), fixed.decode(asked, method)
    assert (got.output_ids, got.commits) == (want.output_ids, want.commits), name
    assert got.activity["far_entries_read"] == want.activity["far_entries_read"], name
print("equal")
"""


@pytest.mark.slow
def test_the_triton_kernels_decode_the_same_in_the_interpreter(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    save_target("llama", tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", INTERPRETED, str(tmp_path)],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert (done.returncode, done.stdout.strip()) == (0, "equal"), done.stderr[-2000:]


def test_graphs_without_triton_are_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("methods.kernels.unavailable", lambda: "Triton is not installed: pip install triton")
    with pytest.raises(EngineError, match=r"Triton is not installed.*engine.graphs=false runs without"):
        triton_executors(512)


class NothingFromTheHost(TorchDispatchMode):
    """Refuses what a CUDA graph cannot hold: reading a value, and bringing one from the CPU."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = [x for x in tree_leaves((args, kwargs or {})) if isinstance(x, torch.Tensor)]
        assert not any(x.device.type == "cpu" for x in tensors), f"{func} takes something from the host"
        return func(*args, **(kwargs or {}))


class Shapeless:
    """Weights of any shape, without storage."""

    nbytes = 0

    def take(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.bfloat16, device="meta")


def published(kind: str, name: str) -> dict[str, Any]:
    return yaml.safe_load((ROOT / "conf" / kind / f"{name}.yaml").read_text())["architecture"]


@pytest.mark.parametrize("name", ["llama", "qwen35", "qwen3_dspark"])
@pytest.mark.parametrize("method", FIXED)
def test_a_draft_and_a_commit_ask_nothing_of_the_device(name: str, method: str) -> None:
    """On tensors that have no values, at the published shapes and 128K: what a capture would refuse fails here."""
    config = parse_config(published("drafter", name))
    shapes = tensor_shapes(config)
    drafter = Drafter(
        config,
        lambda name: torch.empty(shapes[name], device="meta") if name in shapes else None,
        dtype=torch.bfloat16,
        device="meta",
    )
    vocabulary = torch.empty(config.vocab, config.hidden, dtype=torch.bfloat16, device="meta")
    drafter.bind(vocabulary, vocabulary)
    entries = 131072 + PAGE
    cache = ContextCache(config.geometry(), entries - config.block, torch.bfloat16, "meta")
    cache.length = 131000
    windowed: dict[str, Any] = {"window": 2048 if name != "qwen35" else 4096}
    options = dict.fromkeys(("fold", "rerope", "window", "engine_window"), windowed) | {"yarn": {"reference": 3072}}
    drafting = FixedDrafting(drafter, make_method(method, **options.get(method, {})), cache, Executors())
    drafting.begin(RequestGeometry(131000, 64, config.block))
    for length in (100, 131000):  # both of length dispatch
        drafting.reader._held = length
        drafting.reader.choose()
        with NothingFromTheHost():
            tokens, _ = drafter.propose(drafting.anchor, drafting.reader)
            drafting.reader.append(*drafter.context_kv(drafting.features))
        assert tokens.shape == (config.proposals,)


@pytest.mark.parametrize("name", ["llama", "qwen3"])
@pytest.mark.parametrize("rows", [1, 8])
def test_a_pass_of_the_target_asks_nothing_of_the_device(name: str, rows: int) -> None:
    shapes = published("target", name) | {"num_hidden_layers": 4}
    target = DenseTarget(
        Shapeless(), SimpleNamespace(**shapes), torch.bfloat16, torch.device("meta")  # type: ignore[arg-type]
    )
    target.fix({1, 8}, torch_attend)
    target.reserve(4096)
    step = target.fixed_pass(rows, (1, 3))
    with NothingFromTheHost():
        made, query = step.step()
    assert made.logits.shape == (rows, target.vocab) and query.shape[1] == rows
    assert made.features is not None and made.features.shape == (rows, 2 * 4096)


@pytest.mark.parametrize("rows", [1, 8])
def test_a_pass_of_transformers_modules_asks_nothing_of_the_device(rows: int) -> None:
    from transformers import AutoConfig

    shapes = published("target", "gemma") | {"num_hidden_layers": 6}
    config = AutoConfig.for_model(shapes.pop("model_type"), **shapes)
    meta = torch.device("meta")
    target = TransformersTarget(random_model(config, torch.bfloat16, meta, 0), torch.bfloat16, meta)
    target.fix({1, 8}, torch_attend)
    target.reserve(4096)
    target.forward(range(40), last_only=True)
    step = target.fixed_pass(rows, (1, 3))
    with NothingFromTheHost():
        made, query = step.step()
    assert made.logits.shape == (rows, target.vocab) and query.shape[1] == rows
    assert made.features is not None and made.features.shape == (rows, 2 * 3840)
    alone = target.attention_alone(rows)
    with NothingFromTheHost():
        alone()


def test_storage_of_modules_serves_shorter_requests_and_grows_for_longer_ones(tmp_path: Path) -> None:
    save_target("gemma4", tmp_path)
    plain, fixed = engines(tmp_path)
    held = []
    for length in (60, 20, 60):
        asked = request(length, 10)
        assert fixed.decode(asked, None).output_ids == plain.decode(asked, None).output_ids
        target: Any = fixed._target
        held.append(target._cache)
    assert held[0] is held[1] is held[2]
    target.reserve(target._capacity + 1)
    assert target._cache is not held[0] and not target._fixed
    # Storage that was never laid out in full (memory ran out on the way) is not kept.
    laid = target._cache
    target.reserve(64)
    assert target._cache is not laid


class Recorded(Fixed[Any]):
    """What a CUDA graph is, on a CPU: the operations of the first call, done again on the same tensors by every later
    one. Python does not run again, so that a number it had baked in would stay what it was."""

    made: ClassVar[list[Recorded]] = []

    def __init__(self, step: Any, device: torch.device) -> None:
        super().__init__(step, device)
        self.operations: list[tuple[Any, Any, Any, Any]] = []
        self.result: Any = None
        self.replays = 0
        Recorded.made.append(self)

    @torch.inference_mode()
    def capture(self) -> bool:
        if self.operations:
            return False
        self._step()  # a warm-up
        recorder = Recorder(self.operations)
        with recorder:
            self.result = self._step()
        return True

    @torch.inference_mode()
    def __call__(self) -> Any:
        self.capture()
        self.replays += 1
        for operation, args, kwargs, before in self.operations:
            now = operation(*args, **kwargs)
            for old, new in zip(tree_leaves(before), tree_leaves(now), strict=True):
                if isinstance(old, torch.Tensor) and old.untyped_storage()._cdata != new.untyped_storage()._cdata:
                    old.copy_(new)
        return self.result


class Recorder(TorchDispatchMode):
    """Keeps every operation with the very tensors it took and gave."""

    def __init__(self, operations: list[tuple[Any, Any, Any, Any]]) -> None:
        super().__init__()
        self.operations = operations

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert "local_scalar" not in str(func) and "nonzero" not in str(func), f"{func} reads a value"
        out = func(*args, **(kwargs or {}))
        self.operations.append((func, args, kwargs or {}, out))
        return out


def masked_attend(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, table: torch.Tensor | None, length: torch.Tensor,
    *, left: int | None, right: int | None, scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """The definition of a paged call over all keys there are, with no look at the length."""
    k, v = (x[0] if table is None else x[table.long()].flatten(0, 1) for x in (keys, values))
    rows, group = q.shape[0], q.shape[1] // k.shape[1]
    place, diagonal = torch.arange(len(k)), length - rows + torch.arange(rows)[:, None]
    hidden = (place >= length).expand(rows, -1)
    hidden = hidden | (place < diagonal - left) if left is not None else hidden
    hidden = hidden | (place > diagonal + right) if right is not None else hidden
    logits = torch.einsum("rhd,nhd->rhn", q, k.repeat_interleave(group, 1)) * scale
    logits = logits.masked_fill(hidden[:, None], -torch.inf)
    lse = torch.logsumexp(logits, -1)
    weights = torch.exp(logits - lse.masked_fill(lse == -torch.inf, 0.0)[..., None])
    return torch.einsum("rhn,nhd->rhd", weights, v.repeat_interleave(group, 1)), lse


@pytest.mark.parametrize(("architecture", "names"), [("llama", FIXED), ("gemma4", ["fold"])])
def test_steps_that_are_recorded_once_serve_every_round_and_request(
    architecture: str, names: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_target(architecture, tmp_path)
    monkeypatch.setattr(fixed_module, "Fixed", Recorded)
    Recorded.made.clear()
    plain, recorded = engines(tmp_path, executors=Executors(attend=masked_attend))
    for name in names:
        options = OPTIONS[name] | ({"window": 40} if name == "fold" else {})  # within and beyond it, in one request
        method = make_method(name, **options)
        for seed, length, limit in ((0, 90, 6), (1, 25, 30)):  # YaRN's factor differs between them
            asked = request(length, limit, seed=seed)
            want, got = plain.decode(asked, method), recorded.decode(asked, method)
            assert (got.output_ids, got.commits) == (want.output_ids, want.commits), (name, length)
            assert got.activity["far_entries_read"] == want.activity["far_entries_read"], (name, length)
            assert recorded.decode(asked, None).output_ids == want.output_ids
    steps = [step for step in Recorded.made if step.replays]
    # verification, AR step; for each method draft and commit; FOLD's window-only draft
    assert len(steps) == 2 + 2 * len(names) + 1
    assert sum(step.replays for step in steps) > 3 * len(steps)
