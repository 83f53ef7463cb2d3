"""The entry point ``fold_bench`` of group ``sglang.srt.plugins``: sets the drafter's method in SGLang's processes.

SGLang calls :func:`register` in the process that makes the engine and in the scheduler, before any model is built. It
logs and forgets an exception of a plugin, and a hook that does not apply, and would then serve the drafter's own read
under the method's name. So every failure here ends the process (``SystemExit``, which SGLang does not catch).
"""

from __future__ import annotations

import os
from typing import Any

from harness.engines.sglang.setting import (
    MODEL_PACKAGE,
    MODEL_PACKAGE_VARIABLE,
    PLUGIN,
    SettingError,
    check_version,
    read_setting,
)

WORKERS = {
    "sglang.srt.speculative.dflash_worker_v2.DFlashWorkerV2": "DFlashWorker",
    "sglang.srt.speculative.dspark_components.dspark_worker_v2.DSparkWorkerV2": "DSparkWorker",
}
GRAPHS = "sglang.srt.model_executor.runner.decode_cuda_graph_runner.DecodeCudaGraphRunner.capture"
STATE = "sglang.srt.managers.scheduler.Scheduler.get_internal_state"
REPORT = "fold_bench"  # the key of the report in a scheduler's internal state


def register() -> None:
    """Set the method that the environment names; without one do nothing. Ends the process if that cannot be done."""
    try:
        setting = read_setting()
        if setting is None:
            return
        check_version()
        if (package := os.environ.get(MODEL_PACKAGE_VARIABLE)) != MODEL_PACKAGE:
            raise SettingError(
                f"{MODEL_PACKAGE_VARIABLE} is {package!r}: set it to {MODEL_PACKAGE} before SGLang starts"
            )

        from harness.engines.sglang.session import open_session

        open_session(setting)
        _hook()
    except Exception as error:
        text = " ".join(str(error).split()) or type(error).__name__
        raise SystemExit(f"fold-bench: the SGLang plugin cannot run: {text}") from error


def _hook() -> None:
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
    from sglang.srt.plugins.hook_registry import HookRegistry, HookSource, HookType

    from harness.engines.sglang import attention, workers
    from harness.engines.sglang.session import BACKEND

    ATTENTION_BACKENDS[BACKEND] = attention.backend_factory(ATTENTION_BACKENDS[BACKEND])
    source = HookSource(plugin_name=PLUGIN, dist_name="fold-bench")
    for target, name in WORKERS.items():
        HookRegistry.register(target, getattr(workers, name), HookType.REPLACE, source=source)
    HookRegistry.register(GRAPHS, attention.short_graphs, HookType.AROUND, source=source)
    HookRegistry.register(STATE, add_report, HookType.AFTER, source=source)
    # Applied here, and not when SGLang does it after all plugins, because only here can a failure be noticed.
    HookRegistry.apply_hooks()
    missing = [target for target in (*WORKERS, GRAPHS, STATE) if target not in HookRegistry._patched]
    if missing:
        raise SettingError(f"SGLang did not apply the hook on {missing[0]}; its log says why")


def add_report(result: Any, *args: Any, **kwargs: Any) -> Any:
    """After a scheduler has said what it is: what the method has done."""
    from harness.engines.sglang.session import current

    result.internal_state[REPORT] = current().report()
    return result
