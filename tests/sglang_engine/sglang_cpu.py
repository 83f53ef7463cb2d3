"""SGLang's own classes on a CPU: what must be there before they can be imported and run without a GPU.

SGLang's wheels bring CUDA kernels only. Where one is called, the few that its DFlash and DSpark code needs are written
here in torch, from what their callers expect.
"""

from __future__ import annotations

import sys
import tempfile
import types
import warnings
from pathlib import Path
from typing import Any

import torch

SERVER_ARGS: list[Any] = []  # what this process was started with
_KEPT: list[Any] = []  # a torch.library.Library must outlive what it defines


def start_sglang() -> None:
    """Make ``import sglang.srt...`` work, and set up one process's worth of its global state. Called once."""
    if _KEPT:
        return
    warnings.filterwarnings("ignore")
    if not hasattr(torch.ops.torchvision, "nms"):
        # torchvision from the index is built for CUDA; on a CPU torch its operators are not there when it is imported.
        library = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _KEPT.append(library)
    _kernels()

    import sglang.srt.layers.rotary_embedding.base as rotary

    rotary._is_cpu = True  # its torch path, instead of a kernel of vLLM
    from sglang.srt import runtime_context
    from sglang.srt.distributed import parallel_state
    from sglang.srt.server_args import ServerArgs

    file = Path(tempfile.mkdtemp(prefix="fold-bench-sglang-")) / "rendezvous"
    parallel_state.init_distributed_environment(
        world_size=1, rank=0, local_rank=0, distributed_init_method=f"file://{file}", backend="gloo"
    )
    parallel_state.initialize_model_parallel(1)
    args = ServerArgs(
        model_path="none",
        device="cpu",
        skip_tokenizer_init=True,
        page_size=1,
        disable_cuda_graph=True,
        attention_backend="torch_native",
    )
    SERVER_ARGS.append(args)
    runtime_context.publish(args, role="scheduler")
    parallel = runtime_context.get_parallel().override(tp_size=1, tp_rank=0)
    parallel.__enter__()
    _KEPT.append(parallel)


def _kernels() -> None:
    """``sgl_kernel``, as far as it is imported by what is tested."""

    def absent(name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            raise RuntimeError(f"{name} is a CUDA kernel")

        return call

    package, flash = types.ModuleType("sgl_kernel"), types.ModuleType("sgl_kernel.flash_attn")
    package.__path__ = []  # type: ignore[attr-defined]
    package.merge_state_v2 = absent("merge_state_v2")  # type: ignore[attr-defined]
    for name in ("flash_attn_varlen_func", "flash_attn_with_kvcache", "get_scheduler_metadata"):
        setattr(flash, name, absent(name))
    package.flash_attn = flash  # type: ignore[attr-defined]
    sys.modules |= {"sgl_kernel": package, "sgl_kernel.flash_attn": flash}
