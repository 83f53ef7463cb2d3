"""What the plugin and the engine rely on inside the installed SGLang: hook targets, signatures, registries, orders."""

from __future__ import annotations

import dataclasses
import inspect
import pkgutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.layers.attention import attention_registry
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend, SharedReadEnds
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from sglang.srt.model_executor.runner.decode_cuda_graph_runner import DecodeCudaGraphRunner
from sglang.srt.model_executor.runner.shape_key import ShapeKey
from sglang.srt.model_executor.runner_utils import capture_mode
from sglang.srt.models import dflash, dspark
from sglang.srt.models.registry import import_model_classes
from sglang.srt.plugins import GENERAL_PLUGINS_GROUP, hook_registry
from sglang.srt.speculative import draft_worker_common
from sglang.srt.speculative.dflash_worker_v2 import DFlashWorkerV2
from sglang.srt.speculative.dspark_components.dspark_worker_v2 import DSparkWorkerV2
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from simulated import HIDDEN, VOCAB, Simulated, raw_config, save_pair

from harness.config import EngineConfig
from harness.engines import TESTED, installed_version
from harness.engines.sglang import attention, plugin, session, workers
from harness.engines.sglang.engine import SglangEngine
from harness.engines.sglang.models import drafters
from harness.engines.sglang.process import shared_settings
from harness.engines.sglang.setting import MODEL_PACKAGE, PLUGIN_GROUP, Setting
from methods import make_method


def names(function: Any) -> list[str]:
    return list(inspect.signature(function).parameters)


def test_the_tested_version_is_installed() -> None:
    assert installed_version("sglang") == TESTED["sglang"]


@pytest.mark.parametrize("target", [*plugin.WORKERS, plugin.GRAPHS, plugin.STATE])
def test_every_hook_target_exists(target: str) -> None:
    assert callable(pkgutil.resolve_name(target))


def test_the_hook_registry_works_as_it_is_used() -> None:
    assert names(hook_registry.HookRegistry.register) == ["target", "hook", "hook_type", "source"]
    assert isinstance(hook_registry.HookRegistry._patched, set)
    assert {"REPLACE", "AROUND", "AFTER"} <= set(hook_registry.HookType.__members__)
    assert hook_registry.HookSource._fields == ("plugin_name", "dist_name")
    assert GENERAL_PLUGINS_GROUP == PLUGIN_GROUP


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        (DFlashWorkerV2, workers.DFlashWorker),
        (DSparkWorkerV2, workers.DSparkWorker),
        (dflash.DFlashAttention, drafters.MethodAttention),
        (dflash.DFlashDraftModel, drafters.DFlashDraftModel),
        (dspark.Qwen3DSparkModel, drafters.Qwen3DSparkModel),
        (dspark.DSparkDraftModel, drafters.DSparkDraftModel),
        (AttentionBackend, attention.MethodBackend),
    ],
)
def test_what_is_overridden_exists_and_takes_the_same_arguments(theirs: type, ours: type) -> None:
    mine = [cls for cls in ours.__mro__ if cls.__module__.startswith("harness.")]
    overridden = {
        name: member
        for cls in mine
        for name, member in vars(cls).items()
        if inspect.isfunction(member) and hasattr(theirs, name) and not name.startswith("__")
    }
    assert overridden
    for name, member in overridden.items():
        wanted = inspect.signature(getattr(theirs, name)).parameters
        given = inspect.signature(member).parameters
        if any(p.kind is p.VAR_POSITIONAL for p in given.values()):
            continue  # hands on whatever it gets
        assert list(given) == list(wanted) or set(wanted) - set(given) == set(), (name, list(wanted), list(given))
        for key, parameter in wanted.items():
            if parameter.kind is not parameter.VAR_KEYWORD:
                assert given[key].kind == parameter.kind, (name, key)


def test_nothing_new_would_have_to_be_overridden_to_read_a_block() -> None:
    """An attribute of ours that SGLang does not have would never be called; these are our own, by name."""
    own = {"load_table"}
    for name, member in vars(attention.MethodBackend).items():
        if inspect.isfunction(member) and not name.startswith("_"):
            assert hasattr(AttentionBackend, name) or name in own, name


def test_the_model_package_gives_the_classes_that_sglang_looks_up() -> None:
    found = import_model_classes(MODEL_PACKAGE, strict=True)
    assert found == {cls.__name__: cls for cls in drafters.EntryClass}
    assert {"DFlashDraftModel", "Qwen3DSparkModel", "DSparkDraftModel"} == set(found)
    for name, cls in found.items():
        assert issubclass(cls, getattr(dflash, name, None) or getattr(dspark, name))
        assert cls.decoder_layer_cls.attention_cls is drafters.MethodAttention


def test_the_draft_backends_name_is_one_that_sglang_lets_pass() -> None:
    assert session.BACKEND in attention_registry.ATTENTION_BACKENDS
    assert session.BACKEND in draft_worker_common._SUPPORTED_DRAFT_BACKENDS
    args = SimpleNamespace(speculative_draft_attention_backend=session.BACKEND)
    resolve = draft_worker_common._resolve_draft_attention_backend_fallback
    assert resolve(server_args=args, algo_label="DFLASH") == session.BACKEND
    args.speculative_draft_attention_backend = "flash_attention_3"  # what nobody knows becomes something else, silently
    assert resolve(server_args=args, algo_label="DFLASH") == "flashinfer"


def test_workers_are_made_by_classes_that_are_looked_up_when_they_are_needed() -> None:
    assert issubclass(SpeculativeAlgorithm.DFLASH.create_worker(None), DFlashWorkerV2)
    assert issubclass(SpeculativeAlgorithm.DSPARK.create_worker(None), DSparkWorkerV2)


def test_a_scheduler_starts_in_the_order_that_the_session_follows() -> None:
    model = inspect.getsource(Scheduler.init_model_worker)
    steps = ["init_tp_model_worker()", "maybe_init_draft_worker()", "init_memory_pools()",
             "init_all_attention_backends()", "init_all_cuda_graphs()"]  # fmt: skip
    places = [model.index(step) for step in steps]
    assert places == sorted(places)
    pools = inspect.getsource(Scheduler.init_memory_pools)
    assert pools.index("init_target_memory_pool()") < pools.index("draft_worker.alloc_memory_pool(")
    for method, target, draft in (
        (Scheduler.init_all_attention_backends, "tp_worker.init_attention", "draft_worker.init_attention"),
        (Scheduler.init_all_cuda_graphs, "tp_worker.init_cuda", "draft_worker.init_cuda"),
    ):
        source = inspect.getsource(method)
        assert source.index(target) < source.index(draft)


def test_a_scheduler_answers_with_a_state_that_can_be_added_to() -> None:
    from sglang.srt.managers.io_struct import GetInternalStateReqOutput

    answer = GetInternalStateReqOutput(internal_state={"speculative_algorithm": "DFLASH"})
    session.open_session(Setting("fold", {"window": 12}))
    assert plugin.add_report(answer, None, None).internal_state["fold_bench"] == {
        "method": "fold",
        "options": {"window": 12},
        "bound": False,
    }


def test_batches_and_results_have_the_fields_that_are_read() -> None:
    fields = {field.name for field in dataclasses.fields(ForwardBatch)}
    assert {"batch_size", "req_pool_indices", "seq_lens", "seq_lens_cpu", "out_cache_loc", "positions"} <= fields
    assert {"accept_lens", "next_draft_input"} <= {field.name for field in dataclasses.fields(GenerationBatchResult)}
    assert ForwardMode.TARGET_VERIFY.is_target_verify() and not ForwardMode.DECODE.is_extend()
    assert SharedReadEnds.PRE_REPLAY


# ------------------------------------------------------------------------------------------------------- two graphs


class _Runner:
    """A graph runner's dispatch without a GPU: what it captures, and which graph it would replay."""

    def __init__(self, draft: bool) -> None:
        self.model_runner = SimpleNamespace(
            is_draft_worker=draft, model=SimpleNamespace(forward=None), tp_group=None, device="cpu", gpu_id=0
        )
        self.capture_bs, self.compile_bs, self.captured_req_width = [1], [], 5
        self.dsa_dual_graph, self.dsa_index_topk = False, None
        self.captured: list[tuple[str | None, str | None]] = []

    def capture(self) -> None:
        DecodeCudaGraphRunner._capture_one_stream(self)

    def capture_one_shape(self, bs: int, forward: Any, stream: Any, label: Any, variant: str | None = None) -> None:
        self.captured.append((variant, capture_mode.get_capture_dsa_variant()))

    def variant(self, bound: int) -> str | None:
        batch = SimpleNamespace(seq_lens_cpu=torch.tensor([bound]), seq_lens=None)
        return DecodeCudaGraphRunner._resolve_dsa_variant(self, batch)


@pytest.mark.parametrize(("draft", "dispatches"), [(True, True), (True, False), (False, True)])
def test_the_drafter_is_captured_for_short_and_long_contexts(
    draft: bool, dispatches: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sglang.srt.model_executor.runner import decode_cuda_graph_runner as module

    monkeypatch.setattr(module, "get_available_gpu_memory", lambda *args, **kwargs: 1.0)
    current = session.open_session(Setting("fold", {"window": 12}))
    current.short = object() if dispatches else None  # type: ignore[assignment]
    runner = _Runner(draft)
    attention.short_graphs(_Runner.capture, runner)
    if draft and dispatches:
        assert runner.captured == [(attention.SHORT, attention.SHORT), (attention.LONG, attention.LONG)]
        assert [runner.variant(n) for n in (1, 12, 13)] == [attention.SHORT, attention.SHORT, attention.LONG]
    else:
        assert runner.captured == [(None, None)]
        assert runner.variant(1) is None
    assert capture_mode.get_capture_dsa_variant() is None
    assert ShapeKey(size=1, dsa_variant=attention.SHORT) != ShapeKey(size=1, dsa_variant=attention.LONG)


def test_a_draft_graph_is_told_from_the_runner_that_stands_in_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sglang.srt.model_executor.model_runner_components import cuda_graph_setup
    from sglang.srt.model_executor.runner.eager_runner import EagerRunner

    assert "runner=eager_runner" in inspect.getsource(cuda_graph_setup.capture_cuda_graphs)
    engine = Simulated(save_pair(tmp_path, raw_config()), Setting("fold", {"window": 12}), monkeypatch)
    for runner, captured in ((EagerRunner, False), (DecodeCudaGraphRunner, True)):
        engine.draft_runner.decode_cuda_graph_runner = object.__new__(runner)
        assert engine.session.report()["draft_graph"] is captured


def test_graphs_of_several_requests_are_refused() -> None:
    with pytest.raises(session.PluginError, match="--cuda-graph-bs-decode 1"):
        attention.MethodBackend.init_cuda_graph_state(object(), 2, 10)  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------------------- the engine


@pytest.fixture
def target(tmp_path: Path) -> Path:
    from transformers import LlamaConfig

    LlamaConfig(
        architectures=["LlamaForCausalLM"], vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=40,
        num_hidden_layers=9, num_attention_heads=4, num_key_value_heads=2, head_dim=16, max_position_embeddings=512,
    ).save_pretrained(tmp_path / "target")  # fmt: skip
    return tmp_path / "target"


@pytest.mark.parametrize("family", ["dflash", "dspark"])
@pytest.mark.parametrize("graphs", [True, False])
def test_sglang_takes_the_engines_arguments_and_resolves_all_arms_alike(
    family: str, graphs: bool, target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sglang.srt import server_args

    monkeypatch.setattr(server_args, "get_device_memory_capacity", lambda *args, **kwargs: 80 * 1024)
    monkeypatch.setenv("SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN", "1")
    pair = save_pair(tmp_path / "drafter", raw_config(family))
    config = EngineConfig(name="sglang", graphs=graphs, gpu_memory=0.85)
    engine = SglangEngine(target, pair.folder, config, context=512, block=pair.config.block)
    methods = [None, make_method("original"), make_method("fold", window=12), make_method("engine_window", window=12)]
    found = []
    for method in methods:
        spec = engine._spec(method)
        args = server_args.ServerArgs(**spec["server"], dtype="bfloat16")
        state = {field.name: getattr(args, field.name) for field in dataclasses.fields(args)}
        found.append(shared_settings(state))
        if method is not None:
            assert args.speculative_algorithm == engine.algorithm
            assert args.speculative_num_draft_tokens == pair.config.proposals + 1
            assert args.speculative_draft_attention_backend == session.BACKEND
            built_in = method.name == "engine_window" and family == "dflash"
            assert args.speculative_draft_window_size == (12 if built_in else None)
    engine.close()
    assert all(settings == found[0] for settings in found[1:])
    kept = found[0]
    assert kept["page_size"] == 1 and kept["max_running_requests"] == 1 and kept["disable_radix_cache"] is True
    assert kept["attention_backend"] == session.BACKEND and kept["stream_interval"] == 1
    assert kept["chunked_prefill_size"] == 8192 and kept["context_length"] == 512
    assert not any(key.startswith("speculative_") for key in kept)


def test_a_draft_window_smaller_than_the_block_is_refused_by_sglang_itself(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sglang.srt import server_args

    monkeypatch.setattr(server_args, "get_device_memory_capacity", lambda *args, **kwargs: 80 * 1024)
    pair = save_pair(tmp_path / "drafter", raw_config())
    engine = SglangEngine(target, pair.folder, EngineConfig(name="sglang"), context=512, block=5)
    spec = engine._spec(make_method("engine_window", window=4))
    engine.close()
    with pytest.raises(ValueError, match="must be >="):
        server_args.ServerArgs(**spec["server"], dtype="bfloat16")


def test_the_offline_engine_takes_what_it_is_given() -> None:
    from sglang.srt.entrypoints.engine import Engine
    from sglang.srt.managers.tokenizer_manager import TokenizerManager
    from sglang.srt.sampling.sampling_params import SamplingParams

    wanted = {
        "input_ids",
        "sampling_params",
        "stream",
        "rid",
        "return_logprob",
        "logprob_start_len",
        "top_logprobs_num",
    }
    assert wanted <= set(names(Engine.generate))
    params = SamplingParams(temperature=0, max_new_tokens=3, stop_token_ids=[1, 2], ignore_eos=False)
    params.normalize(None)
    assert params.top_k == 1 and params.stop_token_ids == {1, 2}
    assert '"internal_states": internal_states' in inspect.getsource(Engine.get_server_info)
    assert 'meta_info["spec_verify_ct"]' in inspect.getsource(TokenizerManager._calculate_spec_decoding_metrics)


def test_log_probabilities_of_a_prompt_start_with_a_token_that_has_none() -> None:
    from sglang.srt.managers.scheduler_components.logprob_result_processor import SchedulerLogprobResultProcessor

    source = inspect.getsource(SchedulerLogprobResultProcessor._process_input_token_logprobs)
    assert "[None] + input_token_logprobs[:-1]" in source
    assert "req.origin_input_ids[req.logprob_start_len :]" in source


def test_the_stop_token_is_part_of_the_output_and_eos_ids_stop_beside_the_requests() -> None:
    from sglang.srt.managers.schedule_batch import Req

    source = inspect.getsource(Req._check_token_based_finish)
    assert "self.finished_len = matched_pos + 1" in source
    assert source.index("ignore_eos") < source.index("stop_token_ids")
    assert "self.eos_token_ids" in source
