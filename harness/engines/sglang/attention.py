"""The draft worker's attention backend: SGLang calls it where it would call FlashAttention, and it reads by the method.

SGLang knows attention backends by name and falls back silently from a name that it does not know, so this one keeps
FlashAttention's: :func:`backend_factory` stands in ``ATTENTION_BACKENDS["fa3"]`` and returns it for draft runners only.

No GPU has run this: on a CPU its calls go to torch (``tests/sglang_engine``); graphs and kernels have not been seen.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend, SharedReadEnds
from sglang.srt.model_executor.runner_utils.capture_mode import get_capture_dsa_variant
from torch import Tensor

from harness.engines.sglang.session import DraftSession, PluginError, current
from harness.engines.sglang.target_attention import TargetQueries
from methods.kernels.flash import FlashAttend

# What SGLang calls the two graphs of its length dispatch (model_executor/runner/decode_cuda_graph_runner.py).
SHORT, LONG = "dense", "sparse"


def executors(device: torch.device, longest: int) -> dict[str, Any]:
    """What runs the parts of a read, as arguments of :class:`methods.paged.PagedReader`: on a GPU SGLang's
    FlashAttention 3, with queries turned and parts merged by our Triton kernels; on a CPU, where only tests run, torch.

    longest: most keys of a read.
    """
    if device.type == "cpu":
        return {}
    from sglang.kernels.ops.attention.flash_attention import flash_attn_with_kvcache

    from methods.kernels.merge import merge
    from methods.kernels.rotate import rotate

    return {"attend": FlashAttend(flash_attn_with_kvcache, longest, ver=3), "rotate": rotate, "merge": merge}


class MethodBackend(AttentionBackend):
    """Reads of one request's context through a token-slot table (one entry to a page).

    What a CUDA graph reads of a request lies in ``table [width]`` int32, pool rows of the context's entries and of the
    block after them, and ``length [1]`` int32, the context's entries; both are filled before a graph is replayed.
    """

    needs_cpu_seq_lens = False

    def __init__(self, runner: Any, session: DraftSession):
        super().__init__()
        self.session = session
        self.req_to_token_pool = runner.req_to_token_pool
        self.token_to_kv_pool = runner.token_to_kv_pool
        self.forward_metadata = None
        slots = runner.req_to_token_pool.req_to_token
        self.table = torch.zeros(slots.shape[1], dtype=torch.int32, device=slots.device)
        self.length = torch.ones(1, dtype=torch.int32, device=slots.device)
        self._short = False

    def load_table(self, req_pool_indices: Tensor) -> None:
        """Take over the request's row of SGLang's table."""
        rows = self.req_to_token_pool.req_to_token.index_select(0, req_pool_indices[:1].to(torch.int64))
        self.table.copy_(rows[0])

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Before each draft, outside of its graph."""
        if forward_batch.batch_size != 1:
            raise PluginError(
                f"{forward_batch.batch_size} requests at once: start SGLang with --max-running-requests 1"
            )
        self.load_table(forward_batch.req_pool_indices)
        self.length.copy_(forward_batch.seq_lens[:1])
        bound = forward_batch.seq_lens_cpu
        dispatches = self.session.short is not None and bound is not None
        self._short = dispatches and not in_capture and int(bound[0]) <= self.session.window

    def shared_read_ends(self, fm: Any) -> SharedReadEnds:
        """SGLang's table is copied before the graph is replayed, and not looked at afterwards."""
        return SharedReadEnds.PRE_REPLAY

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Nothing more to allocate; only a batch of one request is ever captured."""
        if max_bs != 1:
            raise PluginError(f"draft graphs of {max_bs} requests: start SGLang with --cuda-graph-bs-decode 1")

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """A capture reads a context of one entry, in the pool's padding row."""
        return 1

    def forward_extend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> Tensor:
        """``q [B, Hq * d]`` not rotated, ``k`` rotated and ``v [B, Hkv, d]`` of the block. Returns ``[B, Hq * dv]``."""
        if kwargs or not save_kv_cache:
            raise PluginError(f"SGLang asks the draft attention for {sorted(kwargs) or 'a read without a write'}")
        self.token_to_kv_pool.set_kv_buffer(layer, forward_batch.out_cache_loc, k, v, layer.k_scale, layer.v_scale)
        variant = get_capture_dsa_variant()
        short = self._short if variant is None else variant == SHORT
        query = q.reshape(-1, layer.tp_q_head_num, layer.head_dim)
        out = self.session.read(layer.layer_id, query, self.length, short=short)
        return out.reshape(out.shape[0], -1)

    def forward_decode(self, *args: Any, **kwargs: Any) -> Tensor:
        """A block drafter never decodes row by row."""
        raise PluginError("SGLang asked the draft worker for a plain decode step")


def backend_factory(stock: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """What stands in SGLang's registry: ``stock`` for the target, the method's backend for the drafter."""

    def make(runner: Any) -> Any:
        session = current()
        if not runner.is_draft_worker:
            backend = stock(runner)
            if session.reader is not None and session.reader.host_driven:
                session.queries = TargetQueries(runner, session.worker.speculative_num_draft_tokens)
                session.queries.watch(backend)
            return backend
        if session.worker is None:
            raise PluginError("the draft worker is not the plugin's: its hook did not apply")
        if session.stock:
            return stock(runner)
        session.backend = MethodBackend(runner, session)
        return session.backend

    return make


def short_graphs(original: Callable[..., Any], runner: Any, *args: Any, **kwargs: Any) -> Any:
    """Around ``DecodeCudaGraphRunner.capture``: capture the drafter twice, for contexts within the window and beyond.

    SGLang can hold two graphs per batch size and pick one by the batch's longest context; it does so for DeepSeek's
    sparse attention, on AMD only. The bound it compares is never below the context's length.
    """
    session = current()
    if runner.model_runner.is_draft_worker and session.short is not None:
        runner.dsa_dual_graph = True
        runner.dsa_index_topk = session.window
    return original(runner, *args, **kwargs)
