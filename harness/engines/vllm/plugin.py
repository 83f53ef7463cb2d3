"""The entry point of vLLM's ``vllm.general_plugins`` group: drafters that read their context by a method.

One setting chooses the method, in every way vLLM is started:

    LLM(..., additional_config={"fold_bench": {"method": "fold", "options": {"window": 2048, "alpha": 2.0}}})
    vllm serve ... --additional-config '{"fold_bench": {"method": "fold", "options": {"window": 2048, "alpha": 2.0}}}'

Without it the classes registered here behave as vLLM's own. vLLM calls :func:`register` in every process, so it may run
several times and loads nothing heavy that a process would not load anyway.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from methods import make_method
from methods.reading import Method

KEY = "fold_bench"
VERSION = "0.28.0"

_MODELS = "harness.engines.vllm.models"
# Architectures as the registry is asked for them. With speculative method "dflash" vLLM puts "DFlash" before names that
# lack it, which is how a DeepSpec drafter is served by the V1 runner.
ARCHITECTURES = {
    "DFlashDraftModel": f"{_MODELS}:PlannedDFlash",
    "Qwen3DSparkModel": f"{_MODELS}:PlannedQwen3DSpark",
    "DFlashQwen3DSparkModel": f"{_MODELS}:PlannedQwen3DSpark",
    "Gemma4DSparkModel": f"{_MODELS}:PlannedGemma4DSpark",
    "DFlashGemma4DSparkModel": f"{_MODELS}:PlannedGemma4DSpark",
}


@dataclass(frozen=True)
class Settings:
    """The plugin's setting: the method, whether the drafts of every round are kept (for tests and diagnostics), and on
    CUDA what reads: "flash_attention" (unless said otherwise) or "triton"."""

    method: Method
    trace: bool = False
    kernels: str | None = None


def settings(additional_config: Any) -> Settings | None:
    """The setting in vLLM's ``additional_config``; None if it is absent.

    Raises ValueError, one line, for an unknown key, method or option.
    """
    if not isinstance(additional_config, Mapping) or KEY not in additional_config:
        return None
    raw = additional_config[KEY]
    if not isinstance(raw, Mapping) or not isinstance(raw.get("method"), str):
        raise ValueError(f"additional_config.{KEY} is {raw!r}: give {{'method': name, 'options': {{...}}}}")
    if unknown := sorted(set(raw) - {"method", "options", "trace", "kernels"}):
        known = "method, options, trace and kernels"
        raise ValueError(f"additional_config.{KEY} has no key {unknown[0]!r}; it has {known}")
    options, trace, kernels = raw.get("options") or {}, raw.get("trace", False), raw.get("kernels")
    if kernels not in (None, "flash_attention", "triton"):
        raise ValueError(f"additional_config.{KEY}.kernels is {kernels!r}: must be flash_attention or triton")
    if not isinstance(options, Mapping) or not isinstance(trace, bool):
        raise ValueError(f"additional_config.{KEY}: options must be an object and trace true or false, got {raw!r}")
    return Settings(make_method(raw["method"], **options), trace, kernels)


def check_drafter(config: Any) -> None:
    """Raises ValueError, one line, if vLLM's ``config`` has the setting but nothing that could read by it: vLLM would
    serve without a drafter, or with another kind, and never build our classes."""
    if settings(config.additional_config) is None:
        return
    drafter = config.speculative_config
    if drafter is None or drafter.method not in ("dflash", "dspark"):
        found = "there is no speculative_config"
        if drafter is not None:
            found = f"speculative_config.method is {drafter.method}"
        raise ValueError(
            f"additional_config.{KEY} is set, but {found}: it takes a dflash or dspark drafter; "
            "python -m harness.engines.vllm.drafter_copy prints the setting for one"
        )


def register() -> None:
    """Register the drafter models and proposers with vLLM. Called by vLLM, in every process."""
    from vllm import ModelRegistry
    from vllm.engine.arg_utils import EngineArgs
    from vllm.platforms import current_platform
    from vllm.v1.worker import gpu_model_runner

    for name, target in ARCHITECTURES.items():
        ModelRegistry.register_model(name, target)

    create = EngineArgs.create_engine_config
    create = getattr(create, "unchecked", create)  # registered before, in this process

    def create_engine_config(self: Any, *rest: Any, **named: Any) -> Any:
        config = create(self, *rest, **named)
        check_drafter(config)
        return config

    create_engine_config.unchecked = create  # type: ignore[attr-defined]
    EngineArgs.create_engine_config = create_engine_config

    from harness.engines.vllm.proposer import PlannedProposer

    gpu_model_runner.DFlashProposer = PlannedProposer
    if not current_platform.is_cpu():  # the V2 runner needs Triton, which vLLM has no CPU build of
        from harness.engines.vllm.speculator import install

        install()
