"""One process per arm of a serving engine, commanded over a socket: what every such engine shares.

:class:`ProcessEngine` starts ``python -m MODULE FD``, which calls :func:`serve`. Both speak JSON, one message a call:
``open`` makes the worker and says what really runs, every other call is one of its methods. An exception is answered
with its text and ends the process; so does the other end of the socket, which disappears with the parent however that
dies. The process leads its own process group, which it takes with it.
"""

from __future__ import annotations

import json
import os
import queue
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from harness.drafters import DrafterConfig, DrafterError, read_config
from harness.drafters.checkpoint import open_weights
from harness.engines.base import EngineError, EngineInfo, Generation
from harness.requests import Request

if TYPE_CHECKING:
    from harness.config import EngineConfig

DOING = {"open": "start", "decode": "decode", "gaps": "judge an output"}


class ArmProcess:
    """A worker in a process group of its own. Every failure is an EngineError of one line that names the log."""

    info: Mapping[str, Any]

    def __init__(
        self,
        module: str,
        name: str,
        log: Path,
        environment: Mapping[str, str],
        explain: Callable[[str], str | None],
    ) -> None:
        """module: run with ``python -m``. name: of the engine and arm, in messages. log: takes its output. explain: the
        reason that the log's end gives for a failure, None if it gives none."""
        self._name, self._log, self._explain = name, log, explain
        mine, its = socket.socketpair()
        # -P: what lies in the current folder, a checkout's metadata say, must not stand for what is installed.
        command = [sys.executable, "-P", "-m", module, str(its.fileno())]
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
        """Make the worker by ``spec``; ``info`` is what it says of itself."""
        self.info = self.ask("open", {"spec": spec})

    def ask(self, call: str, arguments: Mapping[str, Any]) -> Any:
        """One call and its answer. Raises EngineError if the worker failed, or its process died."""
        try:
            self._connection.send_bytes(json.dumps({"call": call, "with": arguments}).encode())
            answer = json.loads(self._connection.recv_bytes())
        except (EOFError, OSError):
            reason = self._death()
        else:
            if "error" not in answer:
                return answer["answer"]
            reason = self._explain(self._end_of_log()) or answer["error"]
        raise EngineError(f"{self._name} could not {DOING.get(call, call)}: {reason}; its log is {self._log}")

    def _death(self) -> str:
        try:
            code = self._child.wait(timeout=10)
        except subprocess.TimeoutExpired:
            return "its process stopped answering"
        if reason := self._explain(self._end_of_log()):
            return reason
        if code >= 0:
            return f"its process ended with exit code {code}"
        hint = " (out of memory, if nobody did it)" if -code == signal.SIGKILL else ""
        return f"its process was killed by {signal.Signals(-code).name}{hint}"

    def _end_of_log(self) -> str:
        with suppress(OSError), self._log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - (1 << 18)))
            return file.read().decode(errors="replace")
        return ""

    def end(self) -> None:
        """Kill the whole group and wait until it is gone: device memory is free then."""
        self._connection.close()
        with suppress(ProcessLookupError):
            os.killpg(self._child.pid, signal.SIGKILL)
        self._child.wait()


class ProcessEngine:
    """An :class:`~harness.engines.base.Engine` that runs each arm in a process of its own, one at a time.

    target, drafter: local folders. context: tokens served. Raises EngineError for a drafter that cannot be loaded; the
    engine itself starts with the first arm that is described or decoded.
    """

    interleaved = False
    module: ClassVar[str]
    """Run with ``python -m`` in an arm's process."""
    title: ClassVar[str]
    """The engine's name in messages."""
    blocks: ClassVar[int] = 1
    """Draft blocks that must fit behind a request's last token, so that it is drafted for to its end."""

    def __init__(self, target: Path, drafter: Path, config: EngineConfig, *, context: int, block: int) -> None:
        self._target, self._source, self._config, self._context = target, drafter, config, context
        try:
            self._drafter: DrafterConfig = read_config(drafter, block=block)
            with open_weights(drafter, self._drafter):
                pass
        except DrafterError as error:
            raise EngineError(f"drafter {drafter}: {error}") from None
        self._scratch = Path(tempfile.mkdtemp(prefix=f"fold-bench-{self.title.lower()}-"))
        self._keep_logs = False
        self._process: ArmProcess | None = None
        self._running: dict[str, Any] | None = None
        self._starts = 0

    def describe(self, method: Any | None) -> EngineInfo:
        """Start the arm if it is not the running one, and return what the engine says it resolved its settings to."""
        info = self._arm(method).info
        drafter = info["drafter"]
        if method is not None:
            drafter = {"source": str(self._source), "block": self._drafter.block, **drafter}
        return EngineInfo(**{**info, "drafter": drafter})

    def decode(self, request: Request, method: Any | None) -> Generation:
        """Decode greedily in the arm's process, started first if need be."""
        room = self.blocks * (self._drafter.proposals + 1)
        if len(request.prompt_ids) + request.max_new_tokens + room > self._context:
            raise EngineError(
                f"request {request.id}: {len(request.prompt_ids)} prompt tokens, {request.max_new_tokens} to generate "
                f"and {room} of draft blocks exceed the {self._context} served (target.max_context); prepare shorter "
                "requests"
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

    def _spec(self, method: Any | None) -> dict[str, Any]:
        """What an arm's process is opened with, as JSON values; arms of equal specs share a process."""
        raise NotImplementedError

    def _environment(self, method: Any | None) -> dict[str, str]:
        """The environment of an arm's process."""
        raise NotImplementedError

    def _explain(self, log: str) -> str | None:
        """The reason that a log's end gives for a failure; None: what the worker answered."""
        return None

    def _ask(self, method: Any | None, call: str, **arguments: Any) -> Any:
        process = self._arm(method)
        try:
            return process.ask(call, arguments)
        except EngineError:
            self._keep_logs = True
            self._end()  # whatever state it is in; the next call starts a new one
            raise

    def _arm(self, method: Any | None) -> ArmProcess:
        wanted = self._spec(method)
        if self._process is None or self._running != wanted:
            self._end()
            self._starts += 1
            name = "ar" if method is None else method.name
            log = self._scratch / f"{self._starts}-{name}.log"
            environment = self._environment(method)
            self._process = ArmProcess(self.module, f"{self.title} ({name})", log, environment, self._explain)
            try:
                self._process.open(wanted)
            except BaseException as error:
                self._keep_logs = self._keep_logs or isinstance(error, EngineError)
                self._end()
                raise
            self._running = wanted
        return self._process

    def _end(self) -> None:
        process, self._process, self._running = self._process, None, None
        if process is not None:
            process.end()


def serve(make: Callable[..., Any], engine: str) -> None:
    """The child's main: answer calls until the parent is gone. make: makes the worker of a ``spec``, whose ``info`` is
    what it says of itself and whose methods are the calls."""
    if os.getpgid(0) != os.getpid():
        raise SystemExit(f"this is a part of engine={engine} and is not started by hand")
    descriptor = int(sys.argv[1])
    os.set_inheritable(descriptor, False)  # or a grandchild would keep the parent waiting after this process is dead
    connection = Connection(descriptor)
    inbox: queue.Queue[bytes] = queue.Queue()
    threading.Thread(target=_receive, args=(connection, inbox), daemon=True).start()
    worker: Any = None
    while True:
        message = json.loads(inbox.get())
        operation, arguments = message["call"], message["with"]
        try:
            answer: Any
            if operation == "open":
                worker = make(**arguments)
                answer = worker.info
            else:
                answer = getattr(worker, operation)(**arguments)
        except BaseException as error:
            import traceback

            traceback.print_exc()
            sys.stderr.flush()
            _send(connection, {"error": _one_line(error)})
            raise
        _send(connection, {"answer": answer})


def _send(connection: Connection, value: dict[str, Any]) -> None:
    connection.send_bytes(json.dumps(value, default=str).encode())


def _receive(connection: Connection, inbox: queue.Queue[bytes]) -> None:
    try:
        while True:
            inbox.put(connection.recv_bytes())
    except (EOFError, OSError):  # the parent has closed its end, or is dead
        os.killpg(os.getpgid(0), signal.SIGKILL)


def _one_line(error: BaseException) -> str:
    """The innermost cause, which says what went wrong; engines wrap it in general advice."""
    while (inner := error.__cause__) is not None:
        error = inner
    return f"{type(error).__name__}: {' '.join(str(error).split())[:600] or 'no message'}"
