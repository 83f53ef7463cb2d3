"""Drafting on vLLM's V1 runner, which serves CPUs and hybrid targets: DFlash, and DSpark as well.

vLLM's V1 runner knows DFlash's layout of ``1 + K`` queries only. A DeepSpec drafter drafts from its anchor: K = B
queries, a token from each, left to right through the Markov head. It is served there with speculative method "dflash"
(see ``plugin.ARCHITECTURES``).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.v1.spec_decode.dflash import DFlashProposer

from harness.engines.vllm import activity, plugin
from harness.engines.vllm.attention import DrafterReads
from harness.engines.vllm.models import drafter_config
from harness.engines.vllm.target import TargetAttention
from methods.cmr import CMR


class PlannedProposer(DFlashProposer):
    """vLLM's proposer, and around each draft: which request it is for, how long its context is, what was drafted.

    Without the plugin's setting, and for a DFlash drafter, the drafts are vLLM's own.
    """

    num_speculative_tokens: int

    def __init__(self, vllm_config: VllmConfig, device: torch.device, runner: Any = None):
        super().__init__(vllm_config, device, runner)
        self.runner = runner
        served = self.speculative_config.draft_model_config
        self._anchored = False  # drafts from the anchor on, as DeepSpec's drafters do
        if plugin.settings(vllm_config.additional_config) is not None:
            self._anchored = drafter_config(served.model, served.revision).family != "dflash"
        self._attention: TargetAttention | None = None
        self._request, self._context = "", 0
        self._weights: Tensor | None = None

    def load_model(self, target_model: torch.nn.Module) -> None:
        super().load_model(target_model)
        reads = self.reads
        if reads is not None and isinstance(reads.method, CMR):
            names, rows = self._draft_attn_layer_names, reads.block + 1
            self._attention = TargetAttention(self.vllm_config, names, rows, self.device)

    @property
    def reads(self) -> DrafterReads | None:
        """None without the plugin's setting."""
        return getattr(self.model, "reads", None)

    def set_inputs_first_pass(self, *args: Any, **named: Any) -> Any:
        if not self._anchored:
            return super().set_inputs_first_pass(*args, **named)
        # vLLM lays out 1 + K queries; here the anchor is one of K.
        proposals = self.num_speculative_tokens
        self.num_speculative_tokens = proposals - 1
        try:
            total, _, metadata = super().set_inputs_first_pass(*args, **named)
        finally:
            self.num_speculative_tokens = proposals
        return total, torch.arange(total, dtype=torch.int64, device=self.device), metadata

    def propose(
        self,
        num_speculative_tokens: int,
        target_token_ids: Tensor,
        target_positions: Tensor,
        target_hidden_states: Tensor,
        next_token_ids: Tensor,
        token_indices_to_sample: Tensor | None,
        common_attn_metadata: Any,
        sampling_metadata: Any,
        mm_embed_inputs: Any = None,
        num_rejected_tokens_gpu: Tensor | None = None,
        slot_mappings: Any = None,
    ) -> Tensor:
        reads, tracing = self.reads, activity.traces()
        if reads is not None and reads.single:
            rejected = 0
            if (reads.host_driven or tracing) and num_rejected_tokens_gpu is not None:
                rejected = int(num_rejected_tokens_gpu[0])
            self._enter(reads, common_attn_metadata, rejected)
        drafts = super().propose(
            num_speculative_tokens,
            target_token_ids,
            target_positions,
            target_hidden_states,
            next_token_ids,
            token_indices_to_sample,
            common_attn_metadata,
            sampling_metadata,
            mm_embed_inputs,
            num_rejected_tokens_gpu,
            slot_mappings,
        )
        if reads is not None and reads.single and reads.reading and tracing:
            activity.drafted(self._context, int(next_token_ids[0]), drafts[0].tolist())
        return drafts

    def _enter(self, reads: DrafterReads, metadata: Any, rejected: int) -> None:
        """Bring the reads to the running request and to what its last step committed."""
        batch = self.runner.input_batch
        request_id, prompt = batch.req_ids[0], int(batch.num_prompt_tokens[0])
        upper = int(metadata.seq_lens_cpu_upper_bound[0])
        if request_id != self._request:
            self._request = request_id
            limit = self.runner.requests[request_id].sampling_params.max_tokens
            reads.begin(request_id, prompt, limit)
            reads.reading = False
        wanted = reads.reading and reads.reader.wants_target_attention()
        reads.reading = upper >= prompt
        self._context = upper - rejected
        self._weights = None
        if not reads.host_driven:
            return
        if self._attention is not None and wanted:
            fed = int(metadata.query_start_loc_cpu[1])
            group = self._attention.group(self.runner.kv_cache_config)
            table = self.runner.input_batch.block_table[group].get_device_tensor(1)[0]
            self._weights = self._attention.weights(fed - rejected - 1, table, self._context)
        reads.storing(self._context, metadata.block_table_tensor[0], self._weights)

    def _sample_draft_tokens(self, hidden_states: Tensor, sampling_metadata: Any) -> tuple[Tensor, Tensor | None]:
        if not self._anchored:
            return super()._sample_draft_tokens(hidden_states, sampling_metadata)
        proposals, model = self.num_speculative_tokens, self.model
        logits = model.compute_draft_logits(hidden_states).unflatten(0, (-1, proposals))
        token = self.input_ids[: len(logits) * proposals : proposals].long()
        drafted = []
        for step in range(proposals):
            bias = model.markov_bias(model.markov_embed(token))
            token = model.map_draft_to_target((logits[:, step] + bias).argmax(-1))
            drafted.append(token)
        return torch.stack(drafted, 1).flatten(), None
