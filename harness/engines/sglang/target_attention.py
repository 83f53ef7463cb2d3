"""What CMR selects by: the target's attention in its last full-attention layer, over the context.

No attention backend of SGLang returns weights. So the query of that layer is copied while a draft is verified, and
afterwards the row of the last committed draft is multiplied with the target's keys, which lie rotated in the pool.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from harness.engines.sglang.session import PluginError


class TargetQueries:
    """The queries of one layer of the target, from the verification before."""

    def __init__(self, runner: Any, rows: int):
        """``runner``: the target's, loaded. ``rows``: verified at once. Raises PluginError if no layer of it attends to
        everything."""
        self.layer = last_full_layer(runner.model)
        self._pool = runner.token_to_kv_pool
        some = next(runner.model.parameters())
        shape = (rows, self.layer.tp_q_head_num, self.layer.head_dim)
        self._held = torch.zeros(shape, dtype=some.dtype, device=some.device)
        self._seen = False

    def watch(self, backend: Any) -> None:
        """Copy the layer's queries on their way into ``backend``; the copy is captured with the target's graph."""
        inner = backend.forward_extend

        def forward_extend(q: Tensor, k: Any, v: Any, layer: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
            if layer is self.layer and forward_batch.forward_mode.is_target_verify():
                self._seen = True
                self._held.copy_(q.reshape(-1, layer.tp_q_head_num, layer.head_dim))
            return inner(q, k, v, layer, forward_batch, *args, **kwargs)

        backend.forward_extend = forward_extend

    def weights(self, row: int, table: Tensor, length: int) -> Tensor:
        """Attention ``[length]`` of the verified row ``row`` over entries ``0..length-1``, mean over heads, float32.

        The row stands at position ``length - 1``: it sees the context and itself. ``table``: pool rows of the entries.
        """
        if not self._seen:
            raise PluginError("no query of the target was seen in a verification: CMR has nothing to select by")
        keys = self._pool.get_key_buffer(self.layer.layer_id)[table[:length].to(torch.int64)].float()
        query = self._held[row].float().unflatten(0, (keys.shape[1], -1))  # [Hkv, G, d]
        logits = torch.einsum("kgd,nkd->kgn", query, keys) * self.layer.scaling
        return torch.softmax(logits, -1).flatten(0, 1).mean(0)


def last_full_layer(model: Any) -> Any:
    """The last attention layer of a target without a sliding window. Raises PluginError if there is none."""
    found = [
        module
        for module in model.modules()
        if type(module).__name__ == "RadixAttention" and (module.sliding_window_size or -1) < 0
    ]
    if not found:
        raise PluginError(f"no full-attention layer in {type(model).__name__}: CMR cannot select by its attention")
    last = max(found, key=lambda module: module.layer_id)
    if last.logit_cap:
        raise PluginError(f"the target caps its attention logits at {last.logit_cap}: CMR's weights would be others")
    return last
