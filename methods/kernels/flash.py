"""FlashAttention as the executor of an attention call, by whichever of its functions the engine has installed.

Bounds, causality and the alignment to the bottom right are FlashAttention's own; lengths stay on the device. Known
forms, told apart by their arguments: ``flash_attn_varlen_func`` with ``seqused_k`` and ``block_table`` (vLLM's fork, FA
2, 3 and 4), and ``flash_attn_with_kvcache`` with ``cache_seqlens`` and ``page_table`` (SGLang, FA 3 and 4) or
``block_table`` (the ``flash_attn`` package). Heads of 512 need FA 4; which version runs is the caller's to say
(``fa_version=`` or ``ver=`` among the fixed arguments).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from methods.kernels.splits import SPLITS, choose
from methods.paged import Call


class FlashAttend:
    """:class:`methods.paged.Attend` by a function of FlashAttention.

    ``function``: one of the forms above; ``longest``: most keys a read can have; ``splits``: its number of splits, None
    for the fastest of {1, 8, 16, 32, 64} on the actual shapes (Appendix B.4; the forms without splits take 1).
    ``fixed``: arguments for every call. Raises ValueError for a function of no known form.

    A row that reads nothing keeps the lse that FlashAttention gives it, -inf or (FA 2) +inf: the merges take both.
    """

    def __init__(self, function: Callable[..., Any], longest: int, *, splits: int | None = None, **fixed: Any):
        names = inspect.signature(function).parameters
        self.varlen = {"seqused_k", "block_table", "cu_seqlens_q"} <= set(names)
        self.table = "page_table" if "page_table" in names else "block_table"
        if not self.varlen and not {"cache_seqlens", self.table} <= set(names):
            raise ValueError(
                f"{getattr(function, '__name__', function)} is not a FlashAttention function this adapter knows: give "
                "flash_attn_varlen_func (with seqused_k and block_table) or flash_attn_with_kvcache"
            )
        self.function = function
        self.longest = longest
        self.splits = splits
        self.fixed = fixed
        self._starts: dict[int, Tensor] = {}

    def __call__(
        self,
        q: Tensor,
        keys: Tensor,
        values: Tensor,
        table: Tensor | None,
        length: Tensor,
        *,
        left: int | None,
        right: int | None,
        scale: float,
    ) -> tuple[Tensor, Tensor]:
        """One attention call; see :class:`methods.paged.Attend`. ``lse`` is a view of FlashAttention's layout."""
        call = Call(q, keys, values, table, length, scale, left=left, right=right)
        splits = self.splits
        if splits is None:
            unfit = (NotImplementedError,)  # FA 2 in vLLM has no splits
            splits = choose([call], self.longest, SPLITS, self._launch, untimed=1, unfit=unfit)
        return self._launch([call], splits)

    def _launch(self, calls: Sequence[Call], splits: int) -> tuple[Tensor, Tensor]:
        (call,) = calls
        arguments = {
            "softmax_scale": call.scale,
            "causal": call.right == 0,
            "window_size": [-1 if bound is None else bound for bound in (call.left, call.right)],
            "num_splits": splits,
            "return_softmax_lse": True,
            **self.fixed,
        }
        if self.varlen:
            out, lse = self._by_lengths(call, arguments)  # lse [Hq, R]
        else:
            out, lse = self._by_cache(call, arguments)
        return out, lse.transpose(0, 1)

    def _by_lengths(self, call: Call, arguments: dict[str, Any]) -> tuple[Tensor, Tensor]:
        keys, values, rows = call.keys, call.values, call.query.shape[0]
        if rows not in self._starts:
            self._starts[rows] = torch.tensor([0, rows], dtype=torch.int32, device=call.query.device)
        if call.table is None:  # contiguous keys have a start and an end
            end = torch.nn.functional.pad(call.length, (1, 0))
            keys, values = keys[0], values[0]
            arguments |= {"cu_seqlens_k": end, "max_seqlen_k": len(keys)}
        else:
            most = min(len(call.table) * keys.shape[1], self.longest + 2 * rows)
            arguments |= {"seqused_k": call.length, "block_table": call.table[None], "max_seqlen_k": most}
        out, lse, *_ = self.function(
            call.query.contiguous(),
            _plain(keys),
            _plain(values),
            max_seqlen_q=rows,
            cu_seqlens_q=self._starts[rows],
            **arguments,
        )
        return out, lse

    def _by_cache(self, call: Call, arguments: dict[str, Any]) -> tuple[Tensor, Tensor]:
        if call.table is not None:
            arguments |= {self.table: call.table[None]}
        arguments |= {"window_size": tuple(arguments["window_size"]), "cache_seqlens": call.length}
        out, lse, *_ = self.function(
            call.query.contiguous()[None], _plain(call.keys), _plain(call.values), **arguments
        )
        return out[0], lse[0]


def _plain(stored: Tensor) -> Tensor:
    """The same tensor with the strides that a dense one would have in dims of size one (one key head: Gemma-4): the
    copies of newer kernels check them."""
    strides, dense = list(stored.stride()), 1
    for dim in range(stored.dim() - 1, -1, -1):
        if stored.shape[dim] == 1:
            strides[dim] = dense
        dense = strides[dim] * stored.shape[dim]
    return stored.as_strided(stored.shape, strides)
