"""SGLang as an engine of the harness: one process per arm, in it SGLang's offline engine with its own processes.

Arms differ in nothing but the speculation block and the plugin's setting in the environment: what SGLang resolved its
settings to is collected from its scheduler in every arm and compared by the harness. It needs a GPU, and no GPU has run
it: tests drive it with a scripted SGLang, and SGLang's own argument checks.
"""

from __future__ import annotations

import os
import re
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.drafters import DrafterError
from harness.drafters.checkpoint import fetch
from harness.engines.base import EngineError
from harness.engines.child import ProcessEngine
from harness.engines.sglang.setting import MODEL_PACKAGE_VARIABLE, PLUGIN, VARIABLE, VERSION_VARIABLE, Setting
from methods.reading import Method

if TYPE_CHECKING:
    from harness.config import EngineConfig, RunConfig

BACKEND = "fa3"  # the plugin's draft backend stands in for FlashAttention, so the target reads by it too
# Pool rows beyond the context: two blocks that SGLang reserves ahead, and its own slack when it admits a request.
SLACK = 1024
# What makes SGLang commit tokens that nobody verified.
SIMULATED = ("SGLANG_SIMULATE_ACC_LEN", "SGLANG_SIMULATE_ACC_METHOD", "SGLANG_SIMULATE_ACC_TOKEN_MODE")


class SglangEngine(ProcessEngine):
    """An :class:`~harness.engines.base.Engine`. Raises EngineError for a drafter that SGLang does not serve."""

    module = "harness.engines.sglang.process"
    title = "SGLang"

    def __init__(self, target: Path, drafter: Path, config: EngineConfig, *, context: int, block: int) -> None:
        super().__init__(target, drafter, config, context=context, block=block)
        if self._drafter.family == "dspark_gemma4" or (
            self._drafter.family == "dspark_qwen3" and not self._drafter.markov_rank
        ):
            self.close()
            raise EngineError(
                f"drafter {drafter}: SGLang serves DSpark for Qwen3 with a Markov head, not "
                f"{self._drafter.family} of Markov rank {self._drafter.markov_rank}; use engine=vllm or reference"
            )
        if config.kv_cache_gib is not None:
            self.close()
            raise EngineError(
                "engine.kv_cache_gib: SGLang's KV cache is made for one request of target.max_context; leave it null"
            )
        if found := [name for name in SIMULATED if os.environ.get(name)]:
            self.close()
            raise EngineError(f"{found[0]} is set: SGLang would accept drafts without the target; unset it")

    @property
    def algorithm(self) -> str:
        """SGLang's name for the drafter's family."""
        return "DFLASH" if self._drafter.family == "dflash" else "DSPARK"

    def _spec(self, method: Method | None) -> dict[str, Any]:
        config = self._config
        verified = self._drafter.proposals + 1
        server: dict[str, Any] = {
            "model_path": str(self._target),
            "skip_tokenizer_init": True,
            "trust_remote_code": False,
            "device": "cuda",
            "context_length": self._context,
            "chunked_prefill_size": config.prefill_chunk,
            "max_running_requests": 1,
            # The most one request can take, and the same in every arm: a drafter's pools must not shrink the target's.
            "max_total_tokens": self._context + SLACK,
            "mem_fraction_static": config.gpu_memory,
            "page_size": 1,
            "attention_backend": BACKEND,
            "disable_radix_cache": True,
            "cuda_graph_bs_decode": [1],
            "disable_cuda_graph": not config.graphs,
            # A chunk per round, so that its time is true (SGLang's default sends every 50th token of a plain request).
            "stream_interval": 1,
            "incremental_streaming_output": True,
            "random_seed": 0,
            "log_level": "warning",
        }
        if method is not None:
            server |= {
                "speculative_algorithm": self.algorithm,
                "speculative_draft_model_path": str(self._source),
                "speculative_num_draft_tokens": verified,
                "speculative_draft_attention_backend": BACKEND,
            }
            if method.name == "engine_window" and self.algorithm == "DFLASH":
                server["speculative_draft_window_size"] = asdict(method)["window"]  # type: ignore[call-overload]
        return {
            "server": server,
            "dtype": config.dtype,
            "graphs": config.graphs,
            "proposals": self._drafter.proposals,
            "method": None if method is None else method.name,
            "options": {} if method is None else asdict(method),  # type: ignore[call-overload]
        }

    def _environment(self, method: Method | None) -> dict[str, str]:
        """The user's environment with what this engine relies on. README.md explains each entry."""
        ours = {
            "SGLANG_PLUGINS": PLUGIN,
            # A drafter is trained on shorter contexts than its target serves; the harness checks the target's itself.
            "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",
            "SGLANG_RAGGED_VERIFY_MODE": "static",
            "SGLANG_ENABLE_POST_CAPTURE_KV_SIZING": "0",
            "HF_HUB_OFFLINE": "1",
            "TMPDIR": str(self._scratch),
        }
        inherited = {key: value for key, value in os.environ.items() if key not in (VARIABLE, MODEL_PACKAGE_VARIABLE)}
        if self._config.allow_version is not None:
            ours[VERSION_VARIABLE] = self._config.allow_version
        if method is not None:
            ours |= Setting(method.name, asdict(method)).environment()  # type: ignore[call-overload]
        return inherited | ours

    def _explain(self, log: str) -> str | None:
        """The last thing that the plugin, or else Python, said before SGLang ended its processes."""
        for pattern in (r"(?:fold-bench|PluginError|SettingError): .*", r"^\w*(?:Error|Exception): .*"):
            if found := re.findall(pattern, log, re.MULTILINE):
                return " ".join(found[-1].split())[:600]
        return None


def open_sglang(config: RunConfig) -> SglangEngine:
    """The engine for a run's pair, whose sources are local folders or Hub ids. Raises EngineError, one line."""
    try:
        drafter = fetch(config.drafter.folder_or_id, revision=config.drafter.revision)
    except DrafterError as error:
        raise EngineError(f"drafter {config.drafter.name}: {error}") from None
    target = Path(config.target.source)
    return SglangEngine(target, drafter, config.engine, context=config.target.max_context, block=config.drafter.block)
