"""A scheduler's steps over SGLang's real workers and drafters: the target alone is scripted.

Prompts arrive in chunks, verifications accept as many drafts as the script says, pool rows lie scattered, and whatever
was never written is not a number. The target's features of a rejected position are noise, so that reading one shows.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from sglang.kernels.ops.attention import flash_attention_v3
from sglang.srt.configs.model_config import AttentionArch
from sglang.srt.distributed.parallel_state_wrapper import ParallelState
from sglang.srt.layers.attention import flashattention_backend
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
from sglang.srt.speculative import dflash_worker_v2
from sglang.srt.speculative.dflash_info import DFlashVerifyInput
from sglang.srt.speculative.draft_worker_common import DraftWorkerBundle
from sglang.srt.speculative.dspark_components import dspark_planner, dspark_worker_v2
from sglang.srt.utils.hf_transformers_utils import get_config
from sglang_cpu import SERVER_ARGS
from torch import Tensor, nn
from transformers import LlamaConfig

from harness.drafters import Drafter, DrafterConfig, load_drafter, parse_config, random_tensors, save_drafter
from harness.engines.sglang import attention, session, workers
from harness.engines.sglang.models import drafters
from harness.engines.sglang.setting import Setting
from methods import make_method
from methods.reader import ContextCache, open_reader
from methods.reading import RequestGeometry

VOCAB, HIDDEN, FEATURES, SLOTS, WIDTH = 61, 32, 3, 600, 400
CHUNK = 7


def raw_config(family: str = "dflash", block: int = 5, **changes: Any) -> dict[str, Any]:
    """``config.json`` of a tiny drafter."""
    drafting = {"mask_token_id": VOCAB - 1, "target_layer_ids": [1, 4, 6]}
    raw: dict[str, Any] = {
        "model_type": "qwen3",
        "block_size": block,
        "num_target_layers": 9,
        "num_hidden_layers": 2,
        "hidden_size": HIDDEN,
        "intermediate_size": 40,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": 512,
        "vocab_size": VOCAB,
        "layer_types": ["full_attention"] * 2,
        "tie_word_embeddings": False,
    }
    if family == "dflash":
        raw |= {"architectures": ["DFlashDraftModel"], "dflash_config": drafting}
    else:
        raw |= {"architectures": ["Qwen3DSparkModel"], "markov_rank": 4, "markov_head_type": "vanilla", **drafting}
    return raw | changes


@dataclass(frozen=True)
class Pair:
    """A drafter's checkpoint in a folder and what it borrows of a target."""

    folder: Path
    config: DrafterConfig
    embed: Tensor
    head: Tensor

    def reference(self) -> Drafter:
        drafter = load_drafter(self.folder, dtype=torch.float32, device="cpu")
        drafter.bind(self.embed, self.head)
        return drafter


def save_pair(folder: Path, raw: dict[str, Any], seed: int = 0) -> Pair:
    """A random checkpoint of ``raw``; a DeepSpec one holds the target's vocabulary tensors, as released ones do."""
    config = parse_config(raw)
    generator = torch.Generator().manual_seed(seed)
    embed = torch.randn(VOCAB, HIDDEN, generator=generator)
    head = torch.randn(VOCAB, HIDDEN, generator=generator) / HIDDEN**0.5
    tensors = random_tensors(config, seed)
    if config.ships_head:
        tensors |= {"embed_tokens.weight": embed, "lm_head.weight": head}
    save_drafter(folder, config, tensors)
    return Pair(folder, config, embed, head)


class _Head(nn.Module):
    """What DFLASH and DSPARK use of a target's vocabulary head."""

    def __init__(self, weight: Tensor):
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.org_vocab_size = weight.shape[0]


class _TargetModel(nn.Module):
    """A target without layers but for two attentions, whose queries the script makes up."""

    def __init__(self, pair: Pair):
        super().__init__()
        self.embed = nn.Embedding.from_pretrained(pair.embed)
        self.lm_head = _Head(pair.head)
        self.windowed = RadixAttention(4, 16, 0.25, 2, layer_id=3, sliding_window_size=8)
        self.full = RadixAttention(4, 16, 0.25, 2, layer_id=2)

    def get_input_embeddings(self) -> nn.Module:
        return self.embed


class _TargetBackend:
    needs_cpu_seq_lens = False

    def __init__(self) -> None:
        self.seen = 0

    def forward_extend(self, q: Tensor, k: Any, v: Any, layer: Any, forward_batch: Any, *args: Any) -> Tensor:
        self.seen += 1
        return q


def _flash(runner: Any, block: int) -> Any:
    """SGLang's own FlashAttention backend over the runner's pools; its kernel is :func:`flash_in_torch`."""
    config = runner.model_config
    parts = SimpleNamespace(
        sliding_window_size=None,
        model_config=SimpleNamespace(
            is_encoder_decoder=False,
            context_len=WIDTH,
            attention_arch=AttentionArch.MHA,
            is_local_attention_model=False,
            head_dim=config.hf_config.head_dim,
            hf_text_config=config.hf_config,
            get_num_kv_heads=lambda tp_size: config.hf_config.num_key_value_heads,
        ),
        device="cpu",
        req_to_token_pool=runner.req_to_token_pool,
        token_to_kv_pool=runner.token_to_kv_pool,
        token_to_kv_pool_allocator=None,
        kv_cache_dtype=torch.float32,
        kv_cache_dtype_str="auto",
        page_size=1,
        ps=SimpleNamespace(attn_cp_size=1, tp_size=1),
        is_draft_worker=True,
    )
    backend = flashattention_backend.FlashAttentionBackend(parts)
    backend.speculative_num_draft_tokens = block  # as its constructor resolves it from the published settings
    return backend


def flash_in_torch(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: None = None,
    v: None = None,
    qv: None = None,
    rotary_cos: None = None,
    rotary_sin: None = None,
    cache_seqlens: Tensor | None = None,
    cache_batch_idx: None = None,
    cache_leftpad: None = None,
    page_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    max_seqlen_q: int | None = None,
    rotary_seqlens: None = None,
    q_descale: None = None,
    k_descale: None = None,
    v_descale: None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: None = None,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: None = None,
    num_splits: int = 0,
    pack_gqa: None = None,
    return_softmax_lse: bool = False,
    **kwargs: Any,
) -> Any:
    """FlashAttention 3 over the cache of one request, from its documentation: masks are aligned to the bottom right,
    ``window_size`` is inclusive on both sides and -1 is no bound.

    Rows ``[T, H, d]`` with ``cu_seqlens_q``, else a batch ``[1, T, H, d]``; the lse is ``[H, T]`` or ``[1, H, T]``.
    """
    assert cache_seqlens is not None and softmax_scale is not None and k is None and softcap == 0.0
    batched = q.dim() == 4
    assert batched == (cu_seqlens_q is None)
    queries = q[0] if batched else q
    rows, keys = queries.shape[0], int(cache_seqlens[0])
    left, right = window_size
    right = 0 if causal else right

    def entries(cache: Tensor) -> Tensor:
        assert cache.stride(-1) == 1
        lie = cache[0, :keys] if page_table is None else cache[page_table[0, :keys].long(), 0]
        return lie.double().repeat_interleave(queries.shape[1] // cache.shape[2], 1)

    diagonal = torch.arange(rows)[:, None] + keys - rows
    place = torch.arange(keys)
    hidden = torch.zeros(rows, keys, dtype=torch.bool)
    hidden |= (place < diagonal - left) if left >= 0 else False
    hidden |= (place > diagonal + right) if right >= 0 else False
    logits = torch.einsum("rhd,nhd->rhn", queries.double(), entries(k_cache)) * softmax_scale
    logits = logits.masked_fill(hidden[:, None], -torch.inf)
    lse = torch.logsumexp(logits, -1)
    weights = torch.exp(logits - lse.masked_fill(lse == -torch.inf, 0.0)[..., None])
    out = torch.einsum("rhn,nhd->rhd", weights, entries(v_cache)).to(q.dtype).contiguous()
    lse = lse.float().T.contiguous()
    if not return_softmax_lse:
        return out[None] if batched else out
    return (out[None], lse[None]) if batched else (out, lse)


class _DraftRunner:
    """A ModelRunner's part in a draft: its pools and its forward pass, without a graph."""

    is_draft_worker = True
    draft_attention_backend = session.BACKEND
    decode_cuda_graph_runner = None

    def __init__(self, model: Any, hf_config: Any, pool: Any, req_to_token_pool: Any):
        self.model, self.device = model, torch.device("cpu")
        self.model_config = SimpleNamespace(hf_config=hf_config, vocab_size=VOCAB)
        self.token_to_kv_pool, self.req_to_token_pool = pool, req_to_token_pool
        self.capture_tail_hooks: list[Any] = []
        self.attn_backend: Any = None
        self.hidden: list[Tensor] = []

    def forward(self, forward_batch: Any) -> Any:
        with forward_context(ForwardContext(attn_backend=self.attn_backend)):
            self.attn_backend.init_forward_metadata(forward_batch)
            embeds = {} if hasattr(self.model, "forward_embed") else {"input_embeds": forward_batch.input_embeds}
            out = self.model.forward(forward_batch.input_ids, forward_batch.positions, forward_batch, **embeds)
        self.hidden.append(out.hidden_states.clone())
        return SimpleNamespace(logits_output=out, can_run_graph=False)


class _DraftWorker:
    """A TpModelWorker around the draft runner."""

    def __init__(self, runner: _DraftRunner, factory: Any):
        self.model_runner, self.factory = runner, factory
        self.captured: list[bool] = []

    def alloc_memory_pool(
        self, memory_pool_config: Any, req_to_token_pool: Any, token_to_kv_pool_allocator: Any
    ) -> None:
        if req_to_token_pool is None:  # SGLang's draft window keeps a table of its own
            self.model_runner.req_to_token_pool = ReqToTokenPool(4, WIDTH, "cpu", False)

    def init_attention_backends(self) -> None:
        self.model_runner.attn_backend = self.factory(self.model_runner)

    def init_cuda_graphs(self, capture_decode_cuda_graph: bool) -> None:
        self.captured.append(capture_decode_cuda_graph)


class Simulated:
    """One engine process: a worker of SGLang with its drafter, set to a method."""

    def __init__(self, pair: Pair, setting: Setting, monkeypatch: Any, *, window: int | None = None):
        self.pair, self.setting = pair, setting
        self.dspark = pair.config.family != "dflash"
        self.session = session.open_session(setting)
        self._patch(monkeypatch)
        config = get_config(str(pair.folder), trust_remote_code=False)
        architecture = config.architectures[0]
        model = getattr(drafters, architecture)(config)
        model.load_weights(iter(random_tensors(pair.config, 0).items()))
        tables = ReqToTokenPool(4, WIDTH, "cpu", False)
        heads = {
            "head_num": pair.config.kv_heads,
            "head_dim": pair.config.head_dim,
            "layer_num": len(pair.config.layers),
            "device": "cpu",
            "enable_memory_saver": False,
        }
        pool = MHATokenToKVPool(size=SLOTS, page_size=1, dtype=torch.float32, **heads)
        self.draft_runner = _DraftRunner(model, config, pool, tables)

        def stock(runner: Any) -> Any:
            return _flash(runner, pair.config.block) if runner.is_draft_worker else _TargetBackend()

        factory = attention.backend_factory(stock)
        self.draft_worker = _DraftWorker(self.draft_runner, factory)
        bundle = SimpleNamespace(
            draft_worker=self.draft_worker,
            draft_model_runner=self.draft_runner,
            draft_model=model,
            resolved_attention_backend=session.BACKEND,
        )
        for module in (dflash_worker_v2, dspark_worker_v2):
            monkeypatch.setattr(module, "build_draft_tp_worker", lambda **kwargs: bundle)

        self.target = self._target(tables)
        args = copy.copy(SERVER_ARGS[0])
        for name, value in {
            "speculative_draft_model_path": str(pair.folder),
            "speculative_draft_window_size": window,
            "speculative_num_draft_tokens": pair.config.block + self.dspark,
        }.items():
            object.__setattr__(args, name, value)
        worker = workers.DSparkWorker if self.dspark else workers.DFlashWorker
        self.worker = worker(args, 0, ParallelState.trivial(gpu_id=0), 0, self.target)
        for buffer in (*pool.k_buffer, *pool.v_buffer):
            buffer.fill_(torch.nan)
        self.worker.alloc_memory_pool(None, tables, None)
        if self.session.raw is not None:
            for layer in range(len(pair.config.layers)):
                rows = self.session.raw.rows(layer)
                if rows is not None:
                    rows.fill_(torch.nan)
        self.target.model_runner.attn_backend = factory(self.target.model_runner)
        self.worker.init_attention_backends()
        self.tables, self.requests = tables, 0

    def _target(self, tables: Any) -> Any:
        runner = SimpleNamespace(
            model=_TargetModel(self.pair),
            device=torch.device("cpu"),
            is_draft_worker=False,
            req_to_token_pool=tables,
            token_to_kv_pool=MHATokenToKVPool(
                size=SLOTS,
                page_size=1,
                dtype=torch.float32,
                head_num=2,
                head_dim=16,
                layer_num=4,
                device="cpu",
                enable_memory_saver=False,
            ),
            model_config=SimpleNamespace(
                vocab_size=VOCAB,
                context_len=WIDTH,
                linear_attn_registry_result=None,
                hf_text_config=LlamaConfig(),
                hf_config=LlamaConfig(architectures=["LlamaForCausalLM"]),
            ),
            prefill_attention_backend_str="torch_native",
            attn_backend=None,
            decode_cuda_graph_runner=None,
            capture_tail_hooks=[],
        )
        return SimpleNamespace(model_runner=runner, device=torch.device("cpu"), forward_batch_generation=self._forward)

    def _patch(self, monkeypatch: Any) -> None:
        """What SGLang does with CUDA kernels only."""
        for module in (dflash_worker_v2, dspark_planner):
            monkeypatch.setattr(module, "assign_extend_cache_locs_func", _cache_locs)
        monkeypatch.setattr(dflash_worker_v2, "assign_req_to_token_pool_func", _write_rows)
        monkeypatch.setattr(flash_attention_v3, "_is_fa3_supported", lambda: True)
        monkeypatch.setattr(
            flash_attention_v3, "_load_fa3_kernels", lambda: {"flash_attn_with_kvcache": flash_in_torch}
        )
        monkeypatch.setattr(torch.Tensor, "record_stream", lambda self, stream: None)

        def prepare(verify: Any, batch: Any, target_worker: Any) -> Any:
            batch.spec_info = verify
            return SimpleNamespace(draft_token=verify.draft_token, forward_mode=ForwardMode.TARGET_VERIFY), False

        monkeypatch.setattr(DFlashVerifyInput, "prepare_for_verify", prepare)

    # ------------------------------------------------------------------------------------------------ a request

    def start(self, prompt: int, limit: int, seed: int = 0, rid: str | None = None) -> None:
        """Prefill a prompt of random features in chunks."""
        self.requests += 1
        self.generator = torch.Generator().manual_seed(seed)
        total = prompt + limit + 40
        self.features = torch.randn(total, FEATURES * HIDDEN, generator=self.generator)
        self.queries = torch.randn(total, 4, 16, generator=self.generator)
        self.keys = torch.randn(total, 2, 16, generator=self.generator)
        self.prompt, self.limit, self.length = prompt, limit, 0
        rows = random.Random(seed).sample(range(1, SLOTS + 1), WIDTH)
        self.tables.req_to_token[1 + self.requests % 3] = torch.tensor(rows, dtype=torch.int32)
        self.table = torch.tensor(rows)
        self.req = SimpleNamespace(
            rid=rid or f"r{self.requests}",
            origin_input_ids=list(range(prompt)),
            sampling_params=SimpleNamespace(max_new_tokens=limit),
        )
        self.answer = int(torch.randint(0, VOCAB - 1, (1,), generator=self.generator))
        while self.length < prompt:
            self._chunk(min(CHUNK, prompt - self.length))

    def _chunk(self, count: int) -> None:
        start, end = self.length, self.length + count
        batch = self._batch(ForwardMode.EXTEND)
        batch.prefix_lens, batch.extend_lens = [start], [count]
        batch.out_cache_loc, batch.seq_lens = self.table[start:end], torch.tensor([end])
        self._write_target(start, end)
        self.length = end
        result = self.worker.forward_batch_generation(batch)
        self.draft_input = result.next_draft_input

    def round(self, accept: int) -> list[int]:
        """One draft and its verification, which accepts ``accept`` drafts. Returns the drafts."""
        batch = self._batch(ForwardMode.DECODE)
        batch.seq_lens, batch.spec_info = torch.tensor([self.length]), self.draft_input
        batch.seq_lens_cpu = torch.tensor([self.length])
        self.accept = accept
        result = self.worker.forward_batch_generation(batch)
        assert result.accept_lens.tolist() == [accept + 1]
        self.draft_input = result.next_draft_input
        self.length += accept + 1
        self.answer = int(result.next_draft_input.bonus_tokens[0])
        return self.drafts

    def _batch(self, mode: ForwardMode) -> SimpleNamespace:
        return SimpleNamespace(
            forward_mode=mode,
            is_extend_in_batch=False,
            reqs=[self.req],
            req_pool_indices=torch.tensor([1 + self.requests % 3]),
            sampling_info=None,
            has_grammar=False,
            return_logprob=False,
            seq_lens_cpu=None,
            seq_lens_sum=None,
            spec_info=None,
            global_num_tokens=None,
            can_run_dp_cuda_graph=False,
            forward_iter=0,
            spec_verify_tier_num_tokens=0,
            mamba_track_indices=None,
            mamba_lazy_spec_plan=None,
        )

    def _write_target(self, start: int, end: int) -> None:
        self.target.model_runner.token_to_kv_pool.k_buffer[2][self.table[start:end]] = self.keys[start:end]

    def _forward(self, batch: Any = None, forward_batch: Any = None, **kwargs: Any) -> Any:
        """The target: a chunk of a prompt, or a verification that accepts what the script says."""
        if forward_batch is None:
            count = batch.extend_lens[0]
            hidden = self.features[self.length - count : self.length]
            logits = LogitsProcessorOutput(next_token_logits=None, hidden_states=hidden.clone())
            return GenerationBatchResult(logits_output=logits, next_token_ids=torch.tensor([self.answer]))
        tokens = forward_batch.draft_token.reshape(-1)
        self.drafts = tokens[1:].tolist()
        rows, committed = len(tokens), self.accept + 1
        hidden = torch.randn(rows, FEATURES * HIDDEN, generator=self.generator) * 5
        hidden[:committed] = self.features[self.length : self.length + committed]
        queries = torch.randn(rows, 4, 16, generator=self.generator)
        queries[:committed] = self.queries[self.length : self.length + committed]
        self._write_target(self.length, self.length + rows)
        runner = self.target.model_runner
        for layer, q in ((runner.model.full, queries), (runner.model.windowed, queries * 2)):
            runner.attn_backend.forward_extend(q.flatten(1), None, None, layer, forward_batch)
        best = [*self.drafts[: self.accept], None]
        logits = torch.zeros(rows, VOCAB)
        for row, token in enumerate(best):
            wrong = 7 if row >= len(self.drafts) else (self.drafts[row] + 1) % VOCAB
            logits[row, wrong if token is None else token] = 1.0
        out = LogitsProcessorOutput(next_token_logits=logits, hidden_states=hidden)
        return GenerationBatchResult(logits_output=out, next_token_ids=None, can_run_cuda_graph=False)


class Reference:
    """The reference drafter over the same features: what must be drafted."""

    def __init__(self, simulated: Simulated, dtype: torch.dtype = torch.float32):
        pair, self.simulated = simulated.pair, simulated
        self.drafter = pair.reference()
        geometry = pair.config.geometry()
        prompt, limit = simulated.prompt, simulated.limit
        self.cache = ContextCache(geometry, prompt + limit + 40, dtype)
        self.cache.append(*self.drafter.context_kv(simulated.features[:prompt]))
        method = make_method(simulated.setting.method, **simulated.setting.options)
        self.reader = open_reader(method, geometry, RequestGeometry(prompt, limit, pair.config.block), self.cache)
        self.reader.prepare()

    def draft(self, anchor: int) -> tuple[list[int], Tensor]:
        """Drafts and the backbone's output ``[B, H]``."""
        hidden = self.drafter.hidden(anchor, self.reader)
        tokens = self.drafter.draft(anchor, self.reader).tokens
        self.reader.round_done()
        return tokens, hidden

    def commit(self, accept: int) -> None:
        simulated, start = self.simulated, self.cache.length
        end = start + accept + 1
        wants = self.reader.wants_target_attention()
        self.cache.append(*self.drafter.context_kv(simulated.features[start:end]))
        self.reader.committed(start, end)
        if wants:
            query = simulated.queries[end - 1].double()
            keys = simulated.keys[:end].double().repeat_interleave(2, 1)
            weights = torch.softmax(torch.einsum("hd,nhd->hn", query, keys) * 0.25, -1).mean(0)
            self.reader.target_attention(weights.float())


def _cache_locs(
    req_pool_indices: Tensor, req_to_token: Tensor, start_offset: Tensor, end_offset: Tensor, **kwargs: Any
) -> Tensor:
    rows: Sequence[Tensor] = [
        req_to_token[int(req), int(start) : int(end)]
        for req, start, end in zip(req_pool_indices, start_offset, end_offset, strict=True)
    ]
    return torch.cat(list(rows)).to(torch.int64)


def _write_rows(
    req_pool_indices: Tensor, req_to_token: Tensor, start: Tensor, end: Tensor, slots: Tensor, batch_size: int
) -> None:
    assert batch_size == 1
    req_to_token[int(req_pool_indices[0]), int(start[0]) : int(end[0])] = slots.to(req_to_token.dtype)


__all__ = ["DraftWorkerBundle", "Pair", "Reference", "Simulated", "raw_config", "replace", "save_pair"]
