"""vLLM as an engine of the harness: one process per arm, commanded over a socket.

The process runs vLLM with its engine core inside (worker.py), so that committed tokens and the plugin's proof of
activity are read where they arise and a killed process leaves nothing behind. Arms differ in nothing but the
speculation block: the resolved configuration is collected inside each process and compared by the harness.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib import metadata
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data_prep.demo.target import default_cache_dir
from harness.drafters import DrafterConfig, DrafterError, read_config
from harness.drafters.checkpoint import fetch, open_weights
from harness.engines.base import EngineError, EngineInfo, Generation
from harness.requests import Request
from methods.reading import Method

if TYPE_CHECKING:
    from harness.config import EngineConfig, RunConfig

GIB = 1 << 30
# vLLM would take a share of all memory, which is meant for a machine of its own.
CPU_KV_CACHE_GIB = 4.0


@dataclass(frozen=True)
class Stock:
    """In place of a method: vLLM's own drafter without our plugin, to compare ours with (benchmarks/engine_vllm.py)."""

    name = "stock"


class VllmEngine:
    """An :class:`~harness.engines.base.Engine`. target, drafter: local folders. context: tokens served.

    trace: let the plugin report the draft tokens of every round in ``Generation.activity``. Raises EngineError for a
    drafter that cannot be loaded; vLLM itself starts with the first arm that is described or decoded.
    """

    interleaved = False

    def __init__(
        self, target: Path, drafter: Path, config: EngineConfig, *, context: int, block: int, trace: bool = False
    ) -> None:
        self._target, self._source, self._config, self._context = target, drafter, config, context
        self._trace = trace
        try:
            self._drafter: DrafterConfig = read_config(drafter, block=block)
            with open_weights(drafter, self._drafter):
                pass
        except DrafterError as error:
            raise EngineError(f"drafter {drafter}: {error}") from None
        self._scratch = Path(tempfile.mkdtemp(prefix="fold-bench-vllm-"))
        self._keep_logs = False
        self._process: _Process | None = None
        self._running: dict[str, Any] | None = None
        self._starts = 0

    def describe(self, method: Method | Stock | None) -> EngineInfo:
        """Start the arm if it is not the running one, and return what vLLM says it resolved its settings to."""
        info = self._arm(method).info
        drafter = info["drafter"]
        if method is not None:
            drafter = {"source": str(self._source), "block": self._drafter.block, **drafter}
        return EngineInfo(**{**info, "drafter": drafter})

    def decode(self, request: Request, method: Method | Stock | None) -> Generation:
        """Decode greedily in the arm's process, started first if need be."""
        needed = len(request.prompt_ids) + request.max_new_tokens + self._drafter.proposals + 1
        if needed > self._context:
            raise EngineError(
                f"request {request.id}: {len(request.prompt_ids)} prompt tokens, {request.max_new_tokens} to generate "
                f"and {self._drafter.proposals + 1} of a block exceed the {self._context} served "
                "(target.max_context); prepare shorter requests"
            )
        found = self._ask(
            method,
            "decode",
            prompt_ids=request.prompt_ids,
            max_new_tokens=request.max_new_tokens,
            stop_ids=request.stop_ids,
        )
        return Generation(**found)

    def logit_gaps(self, request: Request, output_ids: list[int]) -> list[float]:
        """Teacher-force ``output_ids`` in the autoregressive arm; the gap is that of log-probabilities."""
        gaps: list[float] = self._ask(None, "gaps", prompt_ids=request.prompt_ids, output_ids=output_ids)
        return gaps

    def close(self) -> None:
        """End the process and its children; logs stay if something failed."""
        self._end()
        if not self._keep_logs:
            shutil.rmtree(self._scratch, ignore_errors=True)

    # ------------------------------------------------------------------------------------------------------ processes

    def _ask(self, method: Method | Stock | None, call: str, **arguments: Any) -> Any:
        process = self._arm(method)
        try:
            return process.ask(call, arguments)
        except EngineError:
            self._keep_logs = True
            self._end()  # whatever state it is in; the next call starts a new one
            raise

    def _arm(self, method: Method | Stock | None) -> _Process:
        wanted = self._spec(method)
        if self._process is None or self._running != wanted:
            self._end()
            self._starts += 1
            name = "ar" if method is None else method.name
            log = self._scratch / f"{self._starts}-{name}.log"
            self._process = _Process(name, log, self._environment(method))
            try:
                self._process.open(wanted)
            except BaseException:
                self._keep_logs = True
                self._end()
                raise
            self._running = wanted
        return self._process

    def _end(self) -> None:
        process, self._process, self._running = self._process, None, None
        if process is not None:
            process.end()

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


class _Process:
    """A worker in a process group of its own. Every failure is an EngineError of one line that names the log."""

    info: Mapping[str, Any]

    def __init__(self, name: str, log: Path, environment: Mapping[str, str]) -> None:
        self._name, self._log = name, log
        mine, its = socket.socketpair()
        command = [sys.executable, "-m", "harness.engines.vllm.worker", str(its.fileno())]
        with log.open("wb") as output:
            self._child = subprocess.Popen(
                command,
                env=dict(environment),
                pass_fds=[its.fileno()],
                start_new_session=True,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )
        its.close()
        self._connection = Connection(mine.detach())

    @property
    def pid(self) -> int:
        return self._child.pid

    def open(self, spec: Mapping[str, Any]) -> None:
        self.info = self.ask("open", {"spec": spec})

    def ask(self, call: str, arguments: Mapping[str, Any]) -> Any:
        doing = "start" if call == "open" else "decode" if call == "decode" else "judge an output"
        try:
            self._connection.send_bytes(json.dumps({"call": call, "with": arguments}).encode())
            answer = json.loads(self._connection.recv_bytes())
        except (EOFError, OSError):
            reason = self._death()
        else:
            if "error" not in answer:
                return answer["answer"]
            reason = answer["error"]
        raise EngineError(f"vLLM ({self._name}) could not {doing}: {reason}; its log is {self._log}")

    def _death(self) -> str:
        try:
            code = self._child.wait(timeout=10)
        except subprocess.TimeoutExpired:
            return "its process stopped answering"
        if code >= 0:
            return f"its process ended with exit code {code}"
        hint = " (out of memory, if nobody did it)" if -code == signal.SIGKILL else ""
        return f"its process was killed by {signal.Signals(-code).name}{hint}"

    def end(self) -> None:
        """Kill the whole group and wait until it is gone: device memory is free then."""
        self._connection.close()
        with suppress(ProcessLookupError):
            os.killpg(self._child.pid, signal.SIGKILL)
        self._child.wait()


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
