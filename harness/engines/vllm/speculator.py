"""Drafting on vLLM's V2 runner, which serves dense targets on CUDA: FULL graphs, dispatched by the context's length.

No GPU has run this module. It was written from the installed source (vLLM 0.28.0), which
``tests/vllm/test_contract_gpu.py`` compares it with; its decisions are executed there on the CPU.

vLLM captures the whole draft in one graph for a batch. What a read needs of a request (its length, its pages, the
rotary table) it reads from device memory, so that graph serves every length. A method with a far memory gets a second
graph without it for contexts that end inside the window. Methods that choose entries on the host run eagerly.
Lengths near ``max_model_len`` are clamped by vLLM: leave a block of room there.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.worker.gpu.spec_decode.dflash import speculator as dflash
from vllm.v1.worker.gpu.spec_decode.dspark import speculator as dspark

from harness.engines.vllm import activity
from harness.engines.vllm.attention import DrafterReads
from harness.engines.vllm.target import TargetAttention
from methods.cmr import CMR


class _Planned:
    """What the two speculators share. Without the plugin's setting they are vLLM's own."""

    model: nn.Module
    reads: DrafterReads | None = None
    query_cudagraph_manager: Any

    def load_model(self, target_model: nn.Module) -> None:
        super().load_model(target_model)  # type: ignore[misc]
        self.reads = getattr(self.model, "reads", None)
        self._request = ""
        self._geometry: dict[str, tuple[int, int]] = {}  # prompt and limit of the requests that were added
        self._complete = False
        self._attention: TargetAttention | None = None
        reads: Any = self.reads
        if reads is not None and isinstance(reads.method, CMR):
            own: Any = self
            self._attention = TargetAttention(
                own.vllm_config, own.draft_attn_layer_names, reads.block + 1, own.device
            )

    def set_attn(self, model_state: Any, kv_cache_config: Any, *rest: Any, **named: Any) -> None:
        super().set_attn(model_state, kv_cache_config, *rest, **named)  # type: ignore[misc]
        if self.reads is None:
            return
        groups = [set(group.layer_names) for group in kv_cache_config.kv_cache_groups]
        own = {attention.layer_name for attention in self.reads.attentions}
        own |= {side.layer_name for side in self.reads.sides}
        if not any(own <= group for group in groups):
            # The pages of a side layer are found by the block table of its drafter layer.
            raise ValueError("vLLM spread the drafter's layers over several KV-cache groups; this target needs the V1")
        add = model_state.add_request

        def add_request(index: int, request: Any) -> None:
            parameters = request.sampling_params
            limit = parameters.max_tokens if parameters is not None else None
            prompt = len(request.prompt_token_ids)
            self._geometry = {request.req_id: (prompt, limit or self.reads.max_context - prompt)}  # type: ignore[union-attr]
            add(index, request)

        model_state.add_request = add_request

    def init_cudagraph_manager(self, cudagraph_mode: CUDAGraphMode) -> None:
        reads = self.reads
        if reads is not None and reads.host_driven:
            cudagraph_mode = CUDAGraphMode.NONE
        super().init_cudagraph_manager(cudagraph_mode)  # type: ignore[misc]
        self._managers = {False: self.query_cudagraph_manager}
        if reads is not None and reads.near_limit is not None and reads.near_limit > 0 and reads.single:
            reads.split_near()
            super().init_cudagraph_manager(cudagraph_mode)  # type: ignore[misc]
            self._managers[True] = self.query_cudagraph_manager
            self._read_near(False)

    def capture(self) -> None:
        for near in list(self._managers):
            self._read_near(near)
            super().capture()  # type: ignore[misc]
        self._read_near(False)

    def _read_near(self, near: bool) -> None:
        """Read the window alone, by its own graph; or everything."""
        self.query_cudagraph_manager = self._managers[near]
        if self.reads is not None:
            self.reads.near_only = near

    def propose(
        self,
        input_batch: Any,
        attn_metadata: dict[str, Any],
        slot_mappings: dict[str, Tensor],
        last_hidden_states: Tensor,
        aux_hidden_states: list[Tensor] | None,
        num_sampled: Tensor,
        num_rejected: Tensor,
        last_sampled: Tensor,
        next_prefill_tokens: Tensor,
        temperature: Tensor,
        seeds: Tensor,
        num_tokens_across_dp: Tensor | None = None,
        dummy_run: bool = False,
        skip_attn_for_dummy_run: bool = False,
        mm_inputs: Any = None,
        is_profile: bool = False,
    ) -> Tensor:
        reads = self.reads
        live = reads is not None and not dummy_run and not is_profile
        exact: int | None = None
        if live and reads is not None and reads.single:
            exact = self._enter(reads, input_batch, num_rejected)
        drafts = super().propose(  # type: ignore[misc]
            input_batch,
            attn_metadata,
            slot_mappings,
            last_hidden_states,
            aux_hidden_states,
            num_sampled,
            num_rejected,
            last_sampled,
            next_prefill_tokens,
            temperature,
            seeds,
            num_tokens_across_dp,
            dummy_run,
            skip_attn_for_dummy_run,
            mm_inputs,
            is_profile,
        )
        if exact is not None and reads is not None and reads.reading and activity.traces():
            own: Any = self
            activity.drafted(exact, int(own.input_buffers.input_ids[0]), drafts[0].tolist())
        return drafts

    def _enter(self, reads: DrafterReads, batch: Any, num_rejected: Tensor) -> int | None:
        """Bring the reads to the running request and to what its last step committed. Returns the context's length if
        the host must know it, which asks the device."""
        own: Any = self
        request_id = batch.req_ids[0]
        if request_id != self._request:
            self._request, self._complete = request_id, False
            reads.begin(request_id, *self._geometry[request_id])
            reads.reading = False
        wanted = reads.reading and reads.reader.wants_target_attention()
        fed = int(batch.num_scheduled_tokens[0])
        complete = int(batch.num_computed_prefill_tokens_np[0]) + fed >= int(batch.prefill_len_np[0])
        if complete and not self._complete:
            reads.prompt_stored()
        self._complete = reads.reading = complete
        upper = int(batch.seq_lens_cpu_upper_bound[0])  # rejected drafts of this step may be in it
        if True in self._managers:
            assert reads.near_limit is not None
            self._read_near(upper <= reads.near_limit)
        if not complete or not (reads.host_driven or activity.traces()):
            return None
        rejected = int(num_rejected[0])
        length = int(batch.seq_lens[0]) - rejected
        if reads.host_driven:
            tables, weights = own.block_tables.input_block_tables, None
            if self._attention is not None and wanted:
                table = tables[self._attention.group(own.kv_cache_config)][0]
                weights = self._attention.weights(fed - rejected - 1, table, length)
            reads.storing(length, tables[own.draft_kv_cache_group_id][0], weights)
        return length


class PlannedDFlashSpeculator(_Planned, dflash.DFlashSpeculator):
    """vLLM's DFlash on the V2 runner."""


class PlannedDSparkSpeculator(_Planned, dspark.DSparkSpeculator):
    """vLLM's DSpark on the V2 runner; DeepSpec's DFlash too."""


def install() -> None:
    """Make vLLM's V2 runner draft with these."""
    dflash.DFlashSpeculator = PlannedDFlashSpeculator
    dspark.DSparkSpeculator = PlannedDSparkSpeculator
