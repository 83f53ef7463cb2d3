"""The FlashAttention adapter against stand-ins with the arguments, layouts and empty rows of its known forms."""

from __future__ import annotations

import importlib.util
import math
import subprocess
import sys

import pytest
import torch
from paged_cases import judged_read, tensor
from read_cases import OPTIONS, WINDOW, Spec

from methods import METHODS, kernels
from methods.kernels.flash import FlashAttend
from methods.paged import torch_attend


def by_definition(q, keys, values, table, length, causal, window_size, softmax_scale, empty):
    """FlashAttention's rules: causal bounds the right side by 0, -1 is no bound, aligned to the bottom right."""
    left, right = (None if bound < 0 else bound for bound in window_size)
    if causal:
        right = 0
    out, lse = torch_attend(q, keys, values, table, length, left=left, right=right, scale=softmax_scale)
    return out, lse.masked_fill(lse == -math.inf, empty).transpose(0, 1).contiguous()


class Recorder:
    """Stand-ins of the engines' functions; ``seen`` holds what they were given beside tensors."""

    def __init__(self, empty: float = math.inf, no_splits: bool = False):
        self.empty, self.no_splits, self.seen = empty, no_splits, []

    def flash_attn_varlen_func(
        self, q, k, v, max_seqlen_q, cu_seqlens_q, max_seqlen_k, cu_seqlens_k=None, seqused_k=None, softmax_scale=None,
        causal=False, window_size=None, block_table=None, return_softmax_lse=False, num_splits=0, fa_version=2,
    ):  # fmt: skip
        assert return_softmax_lse and (cu_seqlens_k is None) != (seqused_k is None)
        assert cu_seqlens_q.tolist() == [0, len(q)] and max_seqlen_q == len(q)
        if self.no_splits and num_splits > 1:
            raise NotImplementedError("FA2 does not support num_splits > 1")
        self.seen.append((num_splits, fa_version))
        if block_table is None:
            start, end = cu_seqlens_k.tolist()
            assert start == 0 and end <= max_seqlen_k == len(k)
            k, v, seqused_k = k[None], v[None], cu_seqlens_k[1:]
            return by_definition(q, k, v, None, seqused_k, causal, window_size, softmax_scale, self.empty)
        assert block_table.shape[0] == 1 and int(seqused_k) <= max_seqlen_k
        return by_definition(q, k, v, block_table[0], seqused_k, causal, window_size, softmax_scale, self.empty)

    def by_cache(self, q, k, v, table, lengths, causal, window_size, softmax_scale, num_splits):
        assert q.dim() == 4 and q.shape[0] == 1
        self.seen.append((num_splits, None))
        table = None if table is None else table[0]
        out, lse = by_definition(q[0], k, v, table, lengths, causal, window_size, softmax_scale, self.empty)
        return out[None], lse[None]

    def with_block_table(
        self, q, k_cache, v_cache, cache_seqlens=None, block_table=None, softmax_scale=None, causal=False,
        window_size=(-1, -1), num_splits=0, return_softmax_lse=False,
    ):  # fmt: skip
        assert return_softmax_lse
        return self.by_cache(
            q, k_cache, v_cache, block_table, cache_seqlens, causal, window_size, softmax_scale, num_splits
        )

    def with_page_table(
        self, q, k_cache, v_cache, cache_seqlens=None, page_table=None, softmax_scale=None, causal=False,
        window_size=(-1, -1), num_splits=0, return_softmax_lse=False, ver=3,
    ):  # fmt: skip
        assert return_softmax_lse and ver == 4
        return (*self.by_cache(
            q, k_cache, v_cache, page_table, cache_seqlens, causal, window_size, softmax_scale, num_splits
        ), None)  # fmt: skip


def forms():
    two, three = Recorder(math.inf), Recorder(-math.inf)
    return {
        "vllm": FlashAttend(two.flash_attn_varlen_func, 4096, splits=1, fa_version=3),
        "flash_attn": FlashAttend(two.with_block_table, 4096),
        "sglang": FlashAttend(three.with_page_table, 4096, splits=16, ver=4),
    }


@pytest.mark.parametrize("form", forms())
@pytest.mark.parametrize("method", METHODS)
def test_reads_by_flash_attention_equal_the_definition(method, form):
    """Around W, where rows of the far read are empty, and far beyond; both signs of an empty row's lse."""
    for N in (0, 3, WINDOW, WINDOW + 3, WINDOW + 7, 3 * WINDOW):
        for causal in (False, True):
            spec = Spec(method, OPTIONS[method][0], N, 7, (4, 2), "default", causal=causal, seed=N)
            ours, theirs = judged_read(spec, 16, attend=forms()[form])
            assert float((ours - theirs).abs().max()) < 1e-10, (N, causal)


def test_fixed_arguments_and_splits_reach_the_function():
    seen = Recorder()
    q, kv = torch.zeros(2, 2, 8), torch.zeros(3, 4, 1, 8)
    chosen = {"left": None, "right": 0, "scale": 1.0}
    FlashAttend(seen.flash_attn_varlen_func, 64, splits=32, fa_version=4)(
        q, kv, kv, tensor(2, 0, 1), tensor(9), **chosen
    )
    FlashAttend(seen.flash_attn_varlen_func, 64)(q, kv, kv, tensor(2, 0, 1), tensor(9), **chosen)
    assert seen.seen == [(32, 4), (1, 2)]


def test_an_empty_rows_lse_is_either_infinity():
    """-inf of FlashAttention 3, +inf of FlashAttention 2: no mass in either case."""
    q, kv = torch.zeros(3, 2, 8), torch.zeros(1, 4, 1, 8)
    for empty in (math.inf, -math.inf):
        attend = FlashAttend(Recorder(empty).flash_attn_varlen_func, 64, splits=1)
        _, lse = attend(q, kv, kv, None, tensor(2), left=None, right=0, scale=1.0)
        assert lse.shape == (3, 2) and (lse[0] == empty).all() and lse[1:].isfinite().all()


def test_one_key_head_has_the_strides_of_a_dense_tensor():
    """Kernels that copy by tensor maps check the stride of a dim of size one too."""
    stored = torch.zeros(5, 4, 2, 8)[:, :, :1]

    class Strides(Recorder):
        def flash_attn_varlen_func(self, q, k, v, max_seqlen_q, cu_seqlens_q, **rest):
            assert k.shape == (5, 4, 1, 8) and k.stride() == (64, 16, 8, 1)
            return super().flash_attn_varlen_func(q, k, v, max_seqlen_q, cu_seqlens_q, **rest)

    attend = FlashAttend(Recorder().flash_attn_varlen_func, 64, splits=1)
    attend.function = Strides().flash_attn_varlen_func
    attend(torch.zeros(2, 2, 8), stored, stored, tensor(0, 1, 2, 3, 4), tensor(9), left=None, right=0, scale=1.0)


def test_a_function_of_no_known_form_is_refused():
    def flash_attn_func(q, k, v, causal=False): ...

    with pytest.raises(ValueError, match="flash_attn_func is not"):
        FlashAttend(flash_attn_func, 64)


def test_a_machine_without_triton_is_told_so_in_one_line(monkeypatch):
    """FlashAttention's adapter needs no Triton; asking for the kernels says what to do."""
    monkeypatch.setitem(sys.modules, "triton", None)
    assert "pip install triton" in str(kernels.unavailable())
    with pytest.raises(RuntimeError, match="pip install triton"):
        kernels.executors(100)
    code = "import sys; sys.modules['triton'] = None; import methods.kernels.flash, methods.kernels.splits"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_machine_without_a_gpu_is_told_of_the_interpreter(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert "TRITON_INTERPRET=1" in str(kernels.unavailable())
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert kernels.unavailable() is None
