"""vLLM as an engine of the harness: one process per arm, commanded over a socket.

The process runs vLLM with its engine core inside (worker.py), so that committed tokens and the plugin's proof of
activity are read where they arise and a killed process leaves nothing behind. Arms differ in nothing but the
speculation block: the resolved configuration is collected inside each process and compared by the harness.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data_prep.demo.target import default_cache_dir
from harness.drafters import DrafterError
from harness.drafters.checkpoint import fetch
from harness.engines.base import EngineError
from harness.engines.child import ProcessEngine
from methods.reading import Method

if TYPE_CHECKING:
    from harness.config import EngineConfig, RunConfig

GIB = 1 << 30
# vLLM would take a share of all memory and fill it with zeros. Where this is too little, vLLM says how much it needs.
CPU_KV_CACHE_GIB = 1.0


@dataclass(frozen=True)
class Stock:
    """In place of a method: vLLM's own drafter without our plugin, to compare ours with (benchmarks/engine_vllm.py)."""

    name = "stock"


class VllmEngine(ProcessEngine):
    """An :class:`~harness.engines.base.Engine`. trace: let the plugin report the draft tokens of every round in
    ``Generation.activity``."""

    module = "harness.engines.vllm.worker"
    title = "vLLM"
    blocks = 2  # the V1 runner drafts only where the block being verified and the next one both fit

    def __init__(
        self, target: Path, drafter: Path, config: EngineConfig, *, context: int, block: int, trace: bool = False
    ) -> None:
        super().__init__(target, drafter, config, context=context, block=block)
        rows = self._drafter.proposals + 1
        if config.prefill_chunk < rows:  # vLLM would verify fewer drafts a round without a word
            self.close()
            raise EngineError(
                f"engine.prefill_chunk={config.prefill_chunk}: a verification feeds {rows} tokens (1 + K) in one step; "
                f"set it to at least {rows}"
            )
        self._trace = trace

    def _spec(self, method: Method | Stock | None) -> dict[str, Any]:
        config, additional = self._config, None
        gib = config.kv_cache_gib or (CPU_KV_CACHE_GIB if cpu_build() else None)
        if method is not None and not isinstance(method, Stock):
            ours: dict[str, Any] = {"method": method.name, "options": asdict(method)}  # type: ignore[call-overload]
            additional = {"fold_bench": ours | ({"trace": True} if self._trace else {})}
        return {
            "target": str(self._target),
            "drafter": None if method is None else str(self._source),
            "method": None if method is None else method.name,
            "device": config.device,
            "dtype": config.dtype,
            "threads": config.threads,
            "context": self._context,
            "prefill_chunk": config.prefill_chunk,
            "proposals": self._drafter.proposals,
            "graphs": config.graphs,
            "kv_cache_bytes": None if gib is None else round(gib * GIB),
            "gpu_memory": config.gpu_memory,
            "additional_config": additional,
            "plugin": not isinstance(method, Stock),
        }

    def _environment(self, method: Method | Stock | None) -> dict[str, str]:
        """The user's environment with what this engine relies on. README.md explains each entry."""
        ours = {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            "TMPDIR": str(self._scratch),
            # Its default is below TMPDIR, so that each run would compile everything anew.
            "TORCHINDUCTOR_CACHE_DIR": os.environ.get("TORCHINDUCTOR_CACHE_DIR", str(default_cache_dir() / "inductor")),
        }
        if isinstance(method, Stock):
            ours["VLLM_PLUGINS"] = ""
        if cpu_build():
            ours["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
            if self._config.threads is not None:
                ours["OMP_NUM_THREADS"] = str(self._config.threads)
            openmp = Path(sys.prefix, "lib", "libiomp5.so")
            if openmp.exists() and "LD_PRELOAD" not in os.environ:
                ours["LD_PRELOAD"] = str(openmp)
        return {**os.environ, **ours}


def cpu_build() -> bool:
    """Whether the vLLM installed here is built for a CPU, found out without importing it."""
    with suppress(metadata.PackageNotFoundError):
        return "cpu" in metadata.version("vllm")
    with suppress(metadata.PackageNotFoundError):
        return bool(metadata.version("vllm-cpu"))
    return False


def open_vllm(config: RunConfig) -> VllmEngine:
    """The engine for a run's pair, whose sources are local folders or Hub ids. Raises EngineError, one line."""
    try:
        drafter = fetch(config.drafter.folder_or_id, revision=config.drafter.revision)
    except DrafterError as error:
        raise EngineError(f"drafter {config.drafter.name}: {error}") from None
    target = Path(config.target.source)
    return VllmEngine(target, drafter, config.engine, context=config.target.max_context, block=config.drafter.block)
