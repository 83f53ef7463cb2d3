"""SGLang's two block-drafting workers, with the method told of every request, round and committed entry."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.speculative.dflash_worker_v2 import DFlashWorkerV2
from sglang.srt.speculative.dspark_components.dspark_worker_v2 import DSparkWorkerV2
from torch import Tensor

from harness.engines.sglang.attention import executors
from harness.engines.sglang.session import DFLASH, DSPARK, DraftSession, current


class _Told:
    """What both workers tell the session; goes before SGLang's class."""

    fold_bench: DraftSession
    draft_model_runner: Any
    model_runner: Any
    _draft_worker: Any

    def alloc_memory_pool(self, *args: Any, **kwargs: Any) -> None:
        """After SGLang's pools, those of the method."""
        super().alloc_memory_pool(*args, **kwargs)  # type: ignore[misc]
        self.fold_bench.open_rounds(self.model_runner.device)
        longest = int(self.model_runner.req_to_token_pool.req_to_token.shape[1])
        device = torch.device(self.model_runner.device)
        self.fold_bench.open_pools(max_context=longest, executors=executors(device, longest))

    def init_attention_backends(self) -> None:
        """SGLang falls back from a backend's name without a word: see what it has really made."""
        super().init_attention_backends()  # type: ignore[misc]
        self.fold_bench.check_backend(self.draft_model_runner)

    def init_cuda_graphs(self) -> None:
        """A method that chooses entries on the host is read outside of graphs."""
        if self.fold_bench.in_graph:
            super().init_cuda_graphs()  # type: ignore[misc]
        else:
            self._draft_worker.init_cuda_graphs(capture_decode_cuda_graph=False)

    def forward_batch_generation(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """One step of SGLang: a chunk of a prompt, or a draft with its verification and commit."""
        if batch.forward_mode.is_idle():
            return super().forward_batch_generation(batch, *args, **kwargs)  # type: ignore[misc]
        if batch.forward_mode.is_extend() or batch.is_extend_in_batch:
            self.fold_bench.prefill(batch)
            return super().forward_batch_generation(batch, *args, **kwargs)  # type: ignore[misc]
        self.fold_bench.before_round(batch)
        result = super().forward_batch_generation(batch, *args, **kwargs)  # type: ignore[misc]
        self.fold_bench.after_round(result.accept_lens)
        return result


class DFlashWorker(_Told, DFlashWorkerV2):
    """DFLASH."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.fold_bench = current()
        self.fold_bench.bind(self, DFLASH, int(self.block_size))

    def _append_target_hidden_to_draft_kv_by_loc(
        self,
        *,
        target_hidden: Tensor,
        cache_loc: Tensor,
        positions: Tensor,
        cache_loc_2d: Tensor | None = None,
        commit_lens: Tensor | None = None,
    ) -> None:
        super()._append_target_hidden_to_draft_kv_by_loc(
            target_hidden=target_hidden,
            cache_loc=cache_loc,
            positions=positions,
            cache_loc_2d=cache_loc_2d,
            commit_lens=commit_lens,
        )
        self.fold_bench.store(self.draft_model, cache_loc)


class DSparkWorker(_Told, DSparkWorkerV2):
    """DSPARK. Its entries are stored by the model (``models/drafters.py``)."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.fold_bench = current()
        self.fold_bench.bind(self, DSPARK, int(self.gamma))
