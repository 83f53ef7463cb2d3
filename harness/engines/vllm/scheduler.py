"""vLLM's own schedulers, remembering what each verification round of the running request proposed and committed.

vLLM 0.28.0 counts acceptance over all requests, and counts drafts beyond the stop token or the limit too
(``Scheduler.make_spec_decoding_stats`` is called before the output is cut, v1/core/sched/scheduler.py:1849). Here one
step is seen from both sides of the cut: what the target committed, and what of it was delivered.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler


@dataclass
class Rounds:
    """What one request did so far. delivered: output tokens. n_first: tokens delivered by prefill. proposals, commits:
    per verification round, as in ``harness.engines.base.Generation``; overrun: committed but not delivered, last round.
    """

    request_id: str = ""
    delivered: list[int] = field(default_factory=list)
    n_first: int = 0
    proposals: list[int] = field(default_factory=list)
    commits: list[int] = field(default_factory=list)
    overrun: int = 0


# The engine core runs in this process (worker.py), one request at a time.
_rounds = Rounds()


def begin() -> None:
    """Forget the last request; call it before a request is handed to the engine."""
    global _rounds
    _rounds = Rounds()


def rounds() -> Rounds:
    """What the request since :func:`begin` did."""
    return _rounds


def _note(request_id: str, committed: int, delivered: list[int], drafts: int) -> None:
    seen = _rounds
    if seen.request_id not in ("", request_id):
        raise RuntimeError(f"request {request_id} runs beside {seen.request_id}; this scheduler records one at a time")
    if not seen.delivered:
        seen.request_id, seen.n_first = request_id, len(delivered)
    else:
        seen.proposals.append(drafts)
        seen.commits.append(len(delivered))
        seen.overrun = committed - len(delivered)
    seen.delivered += delivered


class _Recorded:
    """What is added to either scheduler: the two places where a step's drafts and its output can be seen."""

    _drafts: dict[str, list[int]]

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        self._drafts = scheduler_output.scheduled_spec_decode_tokens
        return super().update_from_output(scheduler_output, model_runner_output)  # type: ignore[misc]

    def _update_request_with_output(
        self, request: Any, new_token_ids: list[int], is_stale: bool = False
    ) -> tuple[list[int], bool]:
        committed = len(new_token_ids)  # the list is cut in place
        delivered, stopped = super()._update_request_with_output(request, new_token_ids, is_stale)  # type: ignore[misc]
        _note(request.request_id, committed, delivered, len(self._drafts.get(request.request_id, ())))
        return delivered, stopped


class RecordedScheduler(_Recorded, Scheduler):
    """For a CPU, where vLLM does not schedule ahead."""


class RecordedAsyncScheduler(_Recorded, AsyncScheduler):
    """For a GPU. Any subclass of ``Scheduler`` alone would silently turn asynchronous scheduling off."""
