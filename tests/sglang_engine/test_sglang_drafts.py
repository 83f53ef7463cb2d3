"""What SGLang's own workers and drafters draft by each method, against the reference drafter and reader.

The worker, the model, the KV pool, the attention registry's backend and their order of calls are SGLang's; only the
target is scripted and CUDA kernels are in torch (``simulated.py``).
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from sglang.kernels.ops.attention.flash_attention import flash_attn_with_kvcache
from simulated import WIDTH, Pair, Reference, Simulated, raw_config, save_pair

from harness.engines.sglang import workers
from harness.engines.sglang.session import PluginError
from harness.engines.sglang.setting import Setting
from methods.kernels.flash import FlashAttend

WINDOW = 12
OPTIONS: dict[str, dict[str, Any]] = {
    "original": {},
    "window": {"window": WINDOW},
    "engine_window": {"window": WINDOW},
    "streamingllm": {"sinks": 4, "recent": 8},
    "yarn": {"reference": 16},
    "rerope": {"window": WINDOW, "reference": 16},
    "infllm": {"window": WINDOW, "block": 4, "initial": 3, "topk": 2, "representative": 2},
    "cmr": {"chunk": 4, "topk": 3, "refresh": 3},
    "fold": {"window": WINDOW, "alpha": 2.0},
}
FAMILIES = ("dflash", "dspark")
CLOSE = 5e-6  # float32 on both sides, sums in another order
SCRIPT = (0, 4, 2, 1, 3, 4, 4, 0, 2, 4, 4, 4)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Pair]:
    return {family: save_pair(tmp_path_factory.mktemp(family), raw_config(family)) for family in FAMILIES}


def open_engine(pair: Pair, name: str, monkeypatch: pytest.MonkeyPatch, **options: Any) -> Simulated:
    setting = Setting(name, {**OPTIONS[name], **options})
    built_in = name == "engine_window" and pair.config.family == "dflash"
    return Simulated(pair, setting, monkeypatch, window=setting.options["window"] if built_in else None)


def follow(engine: Simulated, script: tuple[int, ...] = SCRIPT) -> float:
    """Drafts of every round equal the reference's; returns the largest difference of the backbones' outputs."""
    reference, worst = Reference(engine), 0.0
    for accept in script:
        accept = min(accept, engine.pair.config.proposals)
        tokens, hidden = reference.draft(engine.answer)
        assert engine.round(accept) == tokens
        worst = max(worst, float((engine.draft_runner.hidden[-1] - hidden).abs().max()))
        reference.commit(accept)
    return worst


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", OPTIONS)
def test_drafts_of_requests_in_a_row_are_those_of_the_reference(
    pairs: dict[str, Pair], family: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = open_engine(pairs[family], name, monkeypatch)
    for prompt in (43, 1, 9, 61, 14):
        engine.start(prompt, 64, seed=prompt)
        assert follow(engine) < CLOSE
        proof = engine.session.report()["request"]
        assert proof["commits"] == [min(a, engine.pair.config.proposals) + 1 for a in SCRIPT]
        if not engine.session.stock:
            assert proof["activity"]["rounds"] == len(SCRIPT)


@pytest.mark.parametrize("name", OPTIONS)
def test_drafts_by_calls_of_sglangs_flash_attention_are_those_of_the_reference(
    pairs: dict[str, Pair], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a GPU runs, with SGLang's function and our adapter; only its kernel is in torch."""
    calls = []

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(kwargs)
        return flash_attn_with_kvcache(*args, **kwargs)

    functools.update_wrapper(counted, flash_attn_with_kvcache)
    by_flash = {"attend": FlashAttend(counted, WIDTH, ver=3)}
    monkeypatch.setattr(workers, "executors", lambda device, longest: by_flash)
    engine = open_engine(pairs["dflash"], name, monkeypatch)
    for prompt in (43, 9):
        engine.start(prompt, 64, seed=prompt)
        assert follow(engine) < CLOSE
    assert bool(calls) is not engine.session.stock


@pytest.mark.parametrize("name", [name for name in OPTIONS if name not in ("original", "yarn")])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_context_within_the_window_is_read_as_the_original_does(
    pairs: dict[str, Pair], family: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    hidden = []
    options = {"reference": 4096} if name == "rerope" else {}
    for method in ("original", name):
        engine = open_engine(pairs[family], method, monkeypatch, **(options if method == name else {}))
        engine.start(WINDOW - 5, 20)
        engine.round(2)
        engine.round(1)  # the context is W entries now
        engine.round(0)
        assert engine.length == WINDOW - 5 + 3 + 2 + 1
        hidden.append(torch.stack(engine.draft_runner.hidden))
    assert float((hidden[0] - hidden[1]).abs().max()) < CLOSE


def test_a_far_entry_changes_what_fold_drafts_and_not_what_the_window_does(
    pairs: dict[str, Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, differs in (("fold", True), ("window", False)):
        outputs = []
        for noise in (0.0, 1.0):
            engine = open_engine(pairs["dflash"], name, monkeypatch)
            engine.start(40, 20)
            if noise:  # write the first entries again, from other features
                changed = torch.randn(5, engine.features.shape[1], generator=torch.Generator().manual_seed(99))
                engine.worker._append_target_hidden_to_draft_kv_by_loc(
                    target_hidden=changed, cache_loc=engine.table[:5], positions=torch.arange(5)
                )
            engine.round(0)
            outputs.append(engine.draft_runner.hidden[-1])
        assert bool((outputs[0] - outputs[1]).abs().max() > 1e-4) is differs


@pytest.mark.parametrize("family", FAMILIES)
def test_the_window_is_what_sglang_itself_reads_with_sliding_layers_of_w_plus_b(
    pairs: dict[str, Pair], family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cross-check without code of ours: the drafter's config says sliding layers of W + B, not causal."""
    block = pairs[family].config.block
    raw = raw_config(
        family,
        layer_types=["sliding_attention"] * 2,
        sliding_window=WINDOW + block,
        use_sliding_window=True,
        max_window_layers=0,
        is_causal=False,
    )
    outputs = []
    for name, pair in (("window", pairs[family]), ("original", save_pair(tmp_path, raw))):
        engine = open_engine(pair, name, monkeypatch)
        assert engine.session.stock is (name == "original")
        for prompt in (9, 43):
            engine.start(prompt, 64, seed=prompt)
            drafts = [engine.round(min(accept, pair.config.proposals)) for accept in SCRIPT]
        outputs.append((drafts, torch.stack(engine.draft_runner.hidden)))
    assert outputs[0][0] == outputs[1][0]
    assert float((outputs[0][1] - outputs[1][1]).abs().max()) < CLOSE


@pytest.mark.parametrize("causal", [None, False, True])
@pytest.mark.parametrize("name", ["original", "window", "fold", "rerope", "streamingllm", "infllm", "cmr"])
def test_sliding_layers_keep_their_own_window(
    name: str, causal: bool | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes: dict[str, Any] = {} if causal is None else {"is_causal": causal}
    raw = raw_config(
        layer_types=["sliding_attention", "full_attention"],
        sliding_window=7,
        use_sliding_window=True,
        max_window_layers=0,
        **changes,
    )
    engine = open_engine(save_pair(tmp_path, raw), name, monkeypatch)
    assert engine.session.short is None  # two graphs are for drafters whose every layer attends to everything
    for prompt in (30, 5):
        engine.start(prompt, 64, seed=prompt)
        assert follow(engine) < CLOSE


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


@pytest.mark.parametrize("name", ["original", "fold", "streamingllm", "yarn", "cmr"])
@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("dflash", {"block": 2, "num_key_value_heads": 1, "num_hidden_layers": 1, "layer_types": ["full_attention"]}),
        ("dflash", {"block": 16, "num_key_value_heads": 4, "rope_scaling": LLAMA3}),
        ("dspark", {"block": 1, "head_dim": 32}),
        (
            "dspark",
            {"block": 7, "num_hidden_layers": 3, "layer_types": ["full_attention"] * 3, "num_key_value_heads": 1},
        ),
    ],
)
def test_other_shapes_of_drafters_and_embeddings(
    name: str, family: str, changes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = open_engine(save_pair(tmp_path, raw_config(family, **changes)), name, monkeypatch)
    for prompt in (33, 8):
        engine.start(prompt, 64, seed=prompt)
        assert follow(engine, (0, 9, 3, 1, 16)) < CLOSE


def test_yarn_is_refused_where_it_scales_some_layers_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = raw_config(
        layer_types=["sliding_attention", "full_attention"],
        sliding_window=7,
        use_sliding_window=True,
        max_window_layers=0,
    )
    engine = open_engine(save_pair(tmp_path, raw), "yarn", monkeypatch)
    with pytest.raises(PluginError, match="scales some draft layers only"):
        engine.start(30, 64)


def test_yarn_leaves_the_targets_rotary_table_and_the_next_request_alone(
    pairs: dict[str, Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    from sglang.srt.models.dflash import DFlashDraftModel
    from sglang.srt.utils.hf_transformers_utils import get_config

    # SGLang's own model gets what a target of equal settings would: the one object of these settings.
    plain_model = DFlashDraftModel(get_config(str(pairs["dflash"].folder), trust_remote_code=False))
    shared = plain_model.layers[0].self_attn.rotary_emb
    assert shared is DFlashDraftModel(plain_model.config).layers[1].self_attn.rotary_emb
    before = shared.cos_sin_cache.clone()
    engine = open_engine(pairs["dflash"], "yarn", monkeypatch, reference=256)
    own = engine.worker.draft_model.layers[0].self_attn.rotary_emb
    assert own is not shared and own is engine.worker.draft_model.layers[1].self_attn.rotary_emb
    plain = own.cos_sin_cache.clone()
    address = own.cos_sin_cache.data_ptr()
    engine.start(100, 60)  # within 256 positions: not scaled
    assert torch.equal(own.cos_sin_cache, plain)
    engine.start(300, 40)
    assert not torch.equal(own.cos_sin_cache, plain)
    engine.start(20, 60)
    assert torch.equal(own.cos_sin_cache, plain) and own.cos_sin_cache.data_ptr() == address
    assert torch.equal(shared.cos_sin_cache, before)


def test_rotary_tables_of_the_drafter_are_exact(pairs: dict[str, Pair], monkeypatch: pytest.MonkeyPatch) -> None:
    engine = open_engine(pairs["dflash"], "window", monkeypatch)
    table = engine.worker.draft_model.layers[0].self_attn.rotary_emb.cos_sin_cache
    place = torch.arange(len(table), dtype=torch.float64)[:, None]
    angle = place * 10000.0 ** (-2 * torch.arange(8, dtype=torch.float64) / 16)
    assert torch.equal(table, torch.cat((angle.cos(), angle.sin()), -1).float())


def test_short_contexts_are_read_by_the_cheaper_reader(pairs: dict[str, Pair], monkeypatch: pytest.MonkeyPatch) -> None:
    engine = open_engine(pairs["dflash"], "fold", monkeypatch)
    engine.start(WINDOW - engine.pair.config.block, 40)
    assert follow(engine, (0, 4, 4, 4)) < CLOSE
    activity = engine.session.report()["request"]["activity"]
    assert activity["short_rounds"] == 1  # the host's bound, N + B, is within W in the first round only
    assert activity["rounds"] == 4


def test_only_methods_that_choose_on_the_host_draft_outside_of_graphs(
    pairs: dict[str, Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in OPTIONS:
        engine = open_engine(pairs["dflash"], name, monkeypatch)
        assert engine.session.in_graph is (name not in ("infllm", "cmr"))
        if not engine.session.in_graph:
            engine.worker.init_cuda_graphs()
            assert engine.draft_worker.captured == [False]


def test_unrotated_keys_are_kept_for_those_who_read_them(
    pairs: dict[str, Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    per_entry = 2 * 2 * 16 * 4  # layers, heads, dims, bytes: keys only
    for name in OPTIONS:
        proof = open_engine(pairs["dflash"], name, monkeypatch).session.report()
        expected = per_entry if name in ("fold", "rerope", "infllm", "cmr") else 0
        assert proof["raw_key_bytes_per_token"] == expected, name
