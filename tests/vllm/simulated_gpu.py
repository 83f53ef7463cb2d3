"""vLLM's own configuration of both arms as it resolves on an H100, on a machine without a GPU.

``python -m tests.vllm.simulated_gpu NAME TARGET DRAFTER ...`` prints one JSON object a pair: the settings in which the
arms differ, and what matters of the autoregressive arm's. The platform is vLLM's class for CUDA with the answers of an
H100; nothing is allocated and no model is built.
"""

from __future__ import annotations

import json
import os
import sys
import types
from typing import Any


def hopper() -> Any:
    """Make every module of vLLM believe in an H100."""
    sys.modules["vllm._C_stable_libtorch"] = types.ModuleType("vllm._C_stable_libtorch")  # not in a build for a CPU
    import vllm.config.vllm
    import vllm.platforms
    from vllm import LLM  # noqa: F401  (everything that reads the platform is imported before it changes)
    from vllm.platforms.cuda import CudaPlatformBase
    from vllm.platforms.interface import DeviceCapability
    from vllm.plugins import load_general_plugins

    class Hopper(CudaPlatformBase):
        get_device_capability = classmethod(lambda cls, device_id=0: DeviceCapability(9, 0))
        get_device_total_memory = classmethod(lambda cls, device_id=0: 80 << 30)
        get_device_name = classmethod(lambda cls, device_id=0: "NVIDIA H100 80GB HBM3")
        get_cuda_runtime_major = classmethod(lambda cls: 13)
        is_fully_connected = classmethod(lambda cls, device_ids: True)
        is_integrated_gpu = classmethod(lambda cls, device_id=0: False)
        num_compute_units = classmethod(lambda cls, device_id=0: 132)
        device_count = classmethod(lambda cls: 1)
        import_kernels = classmethod(lambda cls: None)
        log_warnings = classmethod(lambda cls: None)

    load_general_plugins()
    platform = Hopper()
    vllm.platforms._current_platform = platform
    for module in list(sys.modules.values()):
        if module.__name__.startswith("vllm") and "current_platform" in vars(module):
            module.current_platform = platform
    vllm.config.vllm.HAS_TRITON = True
    return platform


def compare(target: str, drafter: str, **changes: Any) -> dict[str, Any]:
    """The arms' resolved settings: ``differing``, and some of the autoregressive arm's."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler

    from harness.drafters import read_config
    from harness.engines.vllm.worker import (
        effective_prefill_chunk,
        engine_arguments,
        resolved_settings,
        speculation,
    )
    from harness.guards import differing_settings

    spec = {"target": target, "drafter": drafter, "context": 2048, "prefill_chunk": 8192, "graphs": True}
    spec |= {"kv_cache_bytes": None, "gpu_memory": 0.92, "proposals": read_config(drafter).proposals}
    spec |= {"additional_config": {"fold_bench": {"method": "fold", "options": {"window": 64}}}}
    os.environ.pop("VLLM_USE_V2_MODEL_RUNNER", None)
    arguments = engine_arguments(spec, dtype="bfloat16", cpu=False) | changes
    base = EngineArgs(**arguments).create_engine_config()
    runner = base.use_v2_model_runner
    arm = EngineArgs(**arguments, **speculation(spec, arguments, cpu=False)).create_engine_config()
    return {
        "differing": differing_settings(resolved_settings(base), resolved_settings(arm)),
        "runners": ["V2" if runner else "V1", "V2" if arm.use_v2_model_runner else "V1"],
        "async_scheduling": base.scheduler_config.async_scheduling,
        "async_scheduler": issubclass(base.scheduler_config.get_scheduler_cls(), AsyncScheduler),
        "graphs": base.compilation_config.cudagraph_mode.name,
        "chunks": [effective_prefill_chunk(base), effective_prefill_chunk(arm)],
        "speculation": [arm.speculative_config.method, arm.speculative_config.num_speculative_tokens],
        "reach": arm.speculative_config.draft_model_config.max_model_len,
    }


def main() -> None:
    hopper()
    asked = sys.argv[1:]
    for name, target, drafter in zip(asked[::3], asked[1::3], asked[2::3], strict=True):
        print(json.dumps({"pair": name} | compare(target, drafter)), flush=True)
    print(json.dumps({"pair": "cascade"} | compare(asked[1], asked[2], disable_cascade_attn=False)), flush=True)


if __name__ == "__main__":
    main()
