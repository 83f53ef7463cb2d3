"""What the GPU path relies on, compared with the installed vLLM: classes, signatures, attributes, order of calls.

No GPU runs here. vLLM's CPU package holds the same Python files as the CUDA one, so that what was read can be checked:
if a test fails, that part of vLLM is not what the plugin was written for. The V2 runner itself runs in
``test_runner_v2.py``; CUDA graphs and FlashAttention's kernels have not run anywhere.
"""

from __future__ import annotations

import ast
import inspect
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm
from vllm.config import VllmConfig
from vllm.config.compilation import CUDAGraphMode
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.models import gemma4_dspark, qwen3_dflash, qwen3_dspark
from vllm.model_executor.models.registry import ModelRegistry
from vllm.v1.attention.backend import AttentionBackend, AttentionImpl, AttentionMetadataBuilder
from vllm.v1.attention.backends import cpu_attn, fa_utils, flash_attn
from vllm.v1.core.sched.output import NewRequestData
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer
from vllm.v1.worker import gpu_model_runner
from vllm.v1.worker.gpu import input_batch, model_runner
from vllm.v1.worker.gpu.model_states import interface
from vllm.v1.worker.gpu.spec_decode import init_speculator
from vllm.v1.worker.gpu.spec_decode import speculator as base

from harness.engines.vllm import attention, models, plugin, proposer, side_cache, speculator
from methods import make_method
from methods.cache import DrafterGeometry
from methods.kernels.flash import FlashAttend
from methods.paged import PagedLayer, PagedReader
from methods.reading import LayerGeometry
from methods.rope import build_rope


def _names(function: Any) -> list[str]:
    return list(inspect.signature(function).parameters)


# ------------------------------------------------------------------------------------------------- classes we override


@pytest.mark.parametrize(
    ("ours", "theirs", "methods"),
    [
        (proposer.PlannedProposer, SpecDecodeBaseProposer, ["propose", "load_model", "_sample_draft_tokens"]),
        (attention.PlannedCPUImpl, cpu_attn.CPUAttentionBackendImpl, ["forward", "do_kv_cache_update"]),
        (attention.PlannedFlashImpl, flash_attn.FlashAttentionImpl, ["forward"]),
        (side_cache.SideBackend, AttentionBackend, ["get_kv_cache_shape", "get_name"]),
        (side_cache._NoMetadata, AttentionMetadataBuilder, ["__init__", "build"]),
        (side_cache.SideLayer, Attention, ["get_kv_cache_spec", "get_attn_backend"]),
        (speculator.PlannedDFlashSpeculator, base.DraftModelSpeculator, ["load_model"]),
        (speculator.PlannedDFlashSpeculator, base.BaseSpeculator, ["propose", "init_cudagraph_manager", "capture"]),
    ],
)
def test_overridden_methods_take_the_same_arguments(ours: type, theirs: type, methods: list[str]) -> None:
    for name in methods:
        assert _names(getattr(ours, name)) == _names(getattr(theirs, name)), f"{theirs.__name__}.{name}"


def test_the_models_offer_what_context_keys_are_computed_with() -> None:
    model = qwen3_dflash.DFlashQwen3Model
    for name in ("_build_fused_kv_buffers", "_project_context_kv", "_normalize_context_k"):
        assert callable(getattr(model, name))
    ours = _names(models.PlannedDFlash.precompute_and_store_context_kv)
    assert ours == _names(qwen3_dflash.DFlashQwen3ForCausalLM.precompute_and_store_context_kv)
    assert _names(model._project_context_kv) == _names(gemma4_dspark.Gemma4DSparkModel._project_context_kv)
    built = inspect.getsource(model._build_fused_kv_buffers)
    for name in ("_num_attn_layers", "_num_kv_heads", "_head_dim", "_attn_layers"):
        assert f"self.{name} =" in built
        assert f"self.{name} =" in inspect.getsource(gemma4_dspark.Gemma4DSparkModel._build_fused_kv_buffers)
    for source in (qwen3_dflash.DFlashQwen3Attention.forward, gemma4_dspark.Gemma4DSparkAttention.forward):
        assert "q, k = self.rotary_emb(positions, q, k)" in inspect.getsource(source)
        assert "self.attn(q, k, v)" in inspect.getsource(source)


def test_a_drafter_without_a_markov_head_answers_all_that_vllm_asks_it() -> None:
    real, ours = _markov_methods(), models.NoMarkovHead
    for name, names in real.items():
        assert _names(getattr(ours, name)) == names
    embed = ours().embed(torch.tensor([3, 4]))
    logits = torch.randn(2, 5)
    assert torch.equal(logits + ours().bias(embed, None), logits)
    chosen = torch.tensor([[1, 3], [0, 2]])
    kept = ours().apply_bias_gathered(embed, torch.full((2, 5), -torch.inf), logits.gather(1, chosen), chosen)
    assert torch.equal(kept.gather(1, chosen), logits.gather(1, chosen))
    assert int(kept.isfinite().sum()) == 4


def _markov_methods() -> dict[str, list[str]]:
    real = models.DSparkMarkovHead
    return {name: _names(getattr(real, name)) for name in ("embed", "bias", "apply_bias_gathered")}


# --------------------------------------------------------------------------------------------------- where we are used


def test_vllm_looks_our_classes_up_where_they_are_put() -> None:
    plugin.register()
    plugin.register()  # every process may do so more than once
    assert gpu_model_runner.DFlashProposer is proposer.PlannedProposer
    assert "self.drafter = DFlashProposer(self.vllm_config, self.device, self)" in inspect.getsource(
        gpu_model_runner.GPUModelRunner.__init__
    )
    for name in plugin.ARCHITECTURES:
        assert name in ModelRegistry.get_supported_archs()
        assert ModelRegistry.models[name].module_name == "harness.engines.vllm.models"
    source = inspect.getsource(init_speculator)
    assert "dflash.speculator import (\n            DFlashSpeculator," in source
    assert "dspark.speculator import (\n            DSparkSpeculator," in source
    assert qwen3_dspark.DSparkMarkovHead is gemma4_dspark.DSparkMarkovHead is models._markov_head


def test_the_v2_speculators_are_put_where_vllm_imports_them_from(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speculator.dflash, "DFlashSpeculator", speculator.dflash.DFlashSpeculator)
    monkeypatch.setattr(speculator.dspark, "DSparkSpeculator", speculator.dspark.DSparkSpeculator)
    speculator.install()
    assert speculator.dflash.DFlashSpeculator is speculator.PlannedDFlashSpeculator
    assert speculator.dspark.DSparkSpeculator is speculator.PlannedDSparkSpeculator


def test_vllm_gives_the_speculator_what_it_looks_at() -> None:
    fields = input_batch.InputBatch.__dataclass_fields__
    for name in ("req_ids", "num_scheduled_tokens", "num_computed_prefill_tokens_np", "prefill_len_np", "seq_lens"):
        assert name in fields
    assert "seq_lens_cpu_upper_bound" in fields
    assert _names(interface.ModelState.add_request)[1:] == ["req_index", "new_req_data"]
    assert "self.model_state.add_request(req_index, new_req_data)" in inspect.getsource(
        model_runner.GPUModelRunner.add_requests
    )
    for name in ("req_id", "prompt_token_ids", "sampling_params"):
        assert name in NewRequestData.__dataclass_fields__
    propose = inspect.getsource(speculator.PlannedDFlashSpeculator.__mro__[2].propose)
    assert propose.index("precompute_and_store_context_kv(\n            self.hidden_states[:num_target_tokens],") > 0
    assert propose.rindex("precompute_and_store_context_kv(") < propose.index("run_fullgraph(batch_desc)")
    assert "self.query_cudagraph_manager" in propose


def test_vllm_runs_the_draft_once_before_it_captures_it() -> None:
    """The reads choose their splits when they first run, which a capture does not allow."""
    source = inspect.getsource(speculator.dflash.DFlashCudaGraphManager.__mro__[1].capture)
    assert source.index("forward_fn(CUDAGraphMode.NONE)") < source.index("with torch.cuda.graph(graph, self.pool)")


def test_the_additional_config_reaches_the_models() -> None:
    assert "additional_config" in VllmConfig.__dataclass_fields__


# ----------------------------------------------------------------------------------------------- caches and attention


def test_pages_hold_keys_then_values() -> None:
    shape = (7, 2, 32, 2 * 64)
    assert flash_attn.FlashAttentionBackend.get_kv_cache_shape(7, 32, 2, 64) == shape
    assert cpu_attn.CPUAttentionBackend.get_kv_cache_shape(7, 32, 2, 64) == shape
    assert side_cache.SideBackend.get_kv_cache_shape(7, 32, 2, 64) == shape
    assert "kv_cache.transpose(1, 2).split(self.head_size, dim=-1)" in inspect.getsource(
        flash_attn.FlashAttentionImpl.forward
    )
    cache = torch.arange(7 * 2 * 32 * 128).view(shape)
    keys, values = attention.split_pages(cache, 64)
    assert keys[3, 5, 1].tolist() == cache[3, 1, 5, :64].tolist()
    assert values[3, 5, 1].tolist() == cache[3, 1, 5, 64:].tolist()


def test_half_a_head_is_half_a_page() -> None:
    whole = FullAttentionSpec(block_size=32, num_kv_heads=2, head_size=64, dtype=torch.bfloat16)
    half = FullAttentionSpec(block_size=32, num_kv_heads=2, head_size=32, dtype=torch.bfloat16)
    assert half.page_size_bytes * 2 == whole.page_size_bytes == 32 * 2 * 64 * 2 * 2


def test_metadata_has_what_a_read_needs() -> None:
    for metadata in (flash_attn.FlashAttentionMetadata, cpu_attn.CPUAttentionMetadata):
        assert {"seq_lens", "block_table", "query_start_loc"} <= set(metadata.__dataclass_fields__)
    for implementation in (flash_attn.FlashAttentionImpl, cpu_attn.CPUAttentionBackendImpl):
        wanted = ["num_heads", "head_size", "scale", "num_kv_heads", "alibi_slopes", "sliding_window", "kv_cache_dtype"]
        wanted += ["logits_soft_cap", "attn_type", "kv_sharing_target_layer_name"]
        assert _names(implementation.__init__)[1 : 1 + len(wanted)] == wanted
    assert issubclass(attention.PlannedFlashImpl, AttentionImpl)
    assert attention.PlannedFlashBackend.get_name() == "FLASH_ATTN"
    assert attention.PlannedFlashBackend.get_builder_cls() is flash_attn.FlashAttentionBackend.get_builder_cls()


def test_the_kernel_that_writes_the_side_cache_takes_our_arguments() -> None:
    from vllm import _custom_ops

    names = ["key", "value", "key_cache", "value_cache", "slot_mapping", "kv_cache_dtype", "k_scale", "v_scale"]
    assert _names(_custom_ops.reshape_and_cache_flash) == names


def test_flash_attention_takes_our_arguments() -> None:
    # The module cannot be imported without CUDA's extensions.
    path = Path(vllm.__file__).parent / "vllm_flash_attn" / "flash_attn_interface.py"
    tree = ast.parse(path.read_text())
    (function,) = [
        node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "flash_attn_varlen_func"
    ]
    names = [argument.arg for argument in function.args.args]
    wanted = {"q", "k", "v", "cu_seqlens_q", "max_seqlen_q", "cu_seqlens_k", "seqused_k", "max_seqlen_k", "causal"}
    wanted |= {"softmax_scale", "window_size", "block_table", "return_softmax_lse", "num_splits", "fa_version"}
    assert wanted <= set(names)
    assert names[:3] == ["q", "k", "v"]
    says = " ".join((ast.get_docstring(function) or "").split())
    assert "aligned to the bottom right corner" in says
    assert "softmax_lse [optional, if return_softmax_lse=True]: (nheads, total_q_seqlen)" in says

    def same(q: Any, k: Any, v: Any, **named: Any) -> Any: ...

    parameters = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in names]
    same.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    assert FlashAttend(same, 512, fa_version=3).varlen
    assert "head_size" in _names(fa_utils.get_flash_attn_version)
    assert "    flash_attn_varlen_func,\n" in inspect.getsource(fa_utils)  # imported there on CUDA


# --------------------------------------------------------------------------------------- decisions of the V2 speculator


class _Vllm:
    """Stands where vLLM's speculator does, and notes what it is asked."""

    model: Any
    query_cudagraph_manager: Any = None

    def __init__(self, reads: Any) -> None:
        self.model = SimpleNamespace(reads=reads)
        self.modes: list[CUDAGraphMode] = []
        self.captured: list[tuple[int, bool]] = []
        self.drafted: list[tuple[int, bool]] = []
        self.device = torch.device("cpu")

    def load_model(self, target_model: Any) -> None:
        pass

    def set_attn(self, model_state: Any, kv_cache_config: Any, *rest: Any) -> None:
        self.kv_cache_config = kv_cache_config

    def init_cudagraph_manager(self, cudagraph_mode: CUDAGraphMode) -> None:
        self.modes.append(cudagraph_mode)
        self.query_cudagraph_manager = len(self.modes)  # a manager of its own

    def capture(self) -> None:
        self.captured.append((self.query_cudagraph_manager, self.model.reads.near_only))

    def propose(self, *rest: Any) -> torch.Tensor:
        self.drafted.append((self.query_cudagraph_manager, self.model.reads.near_only))
        self.model.reads.stored()
        return torch.zeros(1, 7, dtype=torch.long)


class _Speculator(speculator._Planned, _Vllm):
    pass


class _Reads:
    """Stands where ``DrafterReads`` does, and notes what it is told."""

    def __init__(self, method: str, near_limit: int | None, host_driven: bool = False, single: bool = True) -> None:
        self.method, self.near_limit, self.host_driven = SimpleNamespace(name=method), near_limit, host_driven
        self.single, self.block, self.max_context = single, 8, 512
        self.attentions = [SimpleNamespace(layer_name="draft.0.attn")]
        self.sides = [SimpleNamespace(layer_name="draft.0.side")]
        self.reading, self.near_only, self.split = True, False, False
        self.reader = SimpleNamespace(wants_target_attention=lambda: False)
        self.told: list[Any] = []

    def split_near(self) -> None:
        self.split = True

    def begin(self, request: str, prompt: int, limit: int) -> None:
        self.told.append(("begin", request, prompt, limit))

    def prompt_stored(self) -> None:
        self.told.append("prompt")

    def storing(self, length: int, table: torch.Tensor, weights: Any) -> None:
        self.told.append(("storing", length, table.tolist(), weights))

    def stored(self) -> None:
        if self.host_driven and self.reading:
            self.told.append("stored")


def _opened(reads: _Reads) -> _Speculator:
    made = _Speculator(reads)
    made.load_model(None)
    group = SimpleNamespace(layer_names=["target.0", "draft.0.attn", "draft.0.side"])
    added: list[Any] = []
    state = SimpleNamespace(add_request=lambda index, request: added.append((index, request.req_id)))
    made.set_attn(state, SimpleNamespace(kv_cache_groups=[group]), None, None, None)
    made.init_cudagraph_manager(CUDAGraphMode.FULL)
    parameters = SimpleNamespace(max_tokens=40)
    for name, prompt in (("a", 300), ("b", 20)):
        state.add_request(0, SimpleNamespace(req_id=name, prompt_token_ids=[1] * prompt, sampling_params=parameters))
        if name == "a":
            _decode(made, "a", [(0, 128), (128, 128), (256, 44), (300, 8)], prompt=300)
        else:
            _decode(made, "b", [(0, 20), (20, 8), (60, 8)], prompt=20)
    assert added == [(0, "a"), (0, "b")]
    return made


def _decode(made: _Speculator, name: str, steps: list[tuple[int, int]], prompt: int) -> None:
    """Steps of ``(computed tokens, tokens fed)``; a verification rejects two."""
    for computed, fed in steps:
        made.block_tables = SimpleNamespace(input_block_tables=[torch.tensor([[4, 5]])])  # type: ignore[attr-defined]
        made.draft_kv_cache_group_id = 0  # type: ignore[attr-defined]
        batch = SimpleNamespace(
            req_ids=[name],
            num_scheduled_tokens=[fed],
            num_computed_prefill_tokens_np=[min(computed, prompt)],
            prefill_len_np=[prompt],
            seq_lens=torch.tensor([computed + fed]),
            seq_lens_cpu_upper_bound=torch.tensor([computed + fed + 3]),
        )
        rejected = torch.tensor([2 if computed >= prompt else 0])
        nothing: Any = None
        made.propose(batch, {}, {}, nothing, nothing, nothing, rejected, nothing, nothing, nothing, nothing)


def test_a_method_with_far_memory_has_two_graphs_and_takes_the_one_that_fits() -> None:
    reads = _Reads("fold", near_limit=64)
    made = _opened(reads)
    made.capture()
    assert reads.split and made.modes == [CUDAGraphMode.FULL] * 2
    assert made.captured == [(1, False), (2, True)]
    full, window = (1, False), (2, True)
    assert made.drafted == [full, full, full, full, window, window, full]  # 23, 31 and 71 entries at most
    assert not reads.near_only  # as after a capture


def test_a_request_begins_once_and_counts_from_its_whole_prompt_on() -> None:
    reads = _Reads("window", near_limit=None)
    made = _opened(reads)
    assert made.modes == [CUDAGraphMode.FULL]
    assert reads.told == [("begin", "a", 300, 40), "prompt", ("begin", "b", 20, 40), "prompt"]


def test_a_method_that_chooses_on_the_host_runs_without_graphs_and_knows_the_exact_length() -> None:
    reads = _Reads("infllm", near_limit=None, host_driven=True)
    made = _opened(reads)
    assert made.modes == [CUDAGraphMode.NONE]
    lengths = [entry[1] for entry in reads.told if entry[0] == "storing"]
    assert lengths == [300, 306, 20, 26, 66]
    assert reads.told.count("stored") == len(lengths)


def test_layers_in_several_groups_are_refused() -> None:
    made = _Speculator(_Reads("fold", near_limit=64))
    made.load_model(None)
    groups = [SimpleNamespace(layer_names=["draft.0.attn"]), SimpleNamespace(layer_names=["draft.0.side"])]
    with pytest.raises(ValueError, match="several KV-cache groups"):
        made.set_attn(SimpleNamespace(), SimpleNamespace(kv_cache_groups=groups), None, None, None)


@pytest.mark.parametrize(
    ("name", "options", "limit"),
    [
        ("fold", {"window": 64}, 64),
        ("rerope", {"window": 64}, 64),
        ("window", {"window": 64}, None),
        ("original", {}, None),
        ("cmr", {}, None),
        ("infllm", {"window": 64}, None),
    ],
)
def test_the_short_graph_is_for_contexts_without_far_entries(name: str, options: dict[str, Any], limit: Any) -> None:
    method = make_method(name, **options)
    geometry = DrafterGeometry((LayerGeometry(),), 4, 2, 16, 16, 0.25, build_rope({"rope_theta": 1e4}, 16), 8)
    opened: dict[str, Any] = {"max_context": 512, "dtype": torch.float64, "device": "cpu"}
    whole, near = PagedReader(method, geometry, **opened), PagedReader(attention.NearOnly(method), geometry, **opened)
    assert attention._near_limit(whole, 8) == limit
    if limit is None:
        return
    made = torch.Generator().manual_seed(1)
    keys, raw, values = torch.randn(3, 8, 32, 2, 16, generator=made, dtype=torch.float64)
    pages = PagedLayer(keys, raw, values, torch.arange(8, dtype=torch.int32))
    query = torch.randn(8, 4, 16, generator=made, dtype=torch.float64)
    for length, same in ((limit, True), (limit + 1, False)):
        at = torch.tensor([length], dtype=torch.int32)
        assert torch.allclose(whole.read(0, query, pages, at), near.read(0, query, pages, at)) == same
