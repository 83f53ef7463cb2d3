"""What the harness asks of an engine, and what it gets back.

An engine decodes one request at a time, autoregressively (``method=None``) or with the pair's drafter reading its
context by a method. The harness never looks inside: it checks what comes back (``harness.records``,
``harness.guards``).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from harness.requests import Request

Finish = Literal["stop", "length"]


class EngineError(RuntimeError):
    """The engine cannot run as configured, or failed while running. The message is one line."""


@dataclass(frozen=True)
class EngineInfo:
    """What really runs, as the engine itself reports it.

    ``settings`` is the resolved engine configuration outside the speculation block: arms that differ in it are not
    paired. ``drafter`` describes the speculation block (block size B, proposals K, checkpoint), empty for an
    autoregressive arm.
    """

    name: str
    version: str
    device: str
    device_uuid: str
    dtype: str
    settings: dict[str, Any]
    drafter: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Generation:
    """One decoded request.

    output_ids: delivered tokens, the first from prefill; a stop token that ended it is included.
    finish: "stop" at a stop token, "length" at the limit.
    n_first: tokens delivered by prefill (1).
    commits: tokens delivered per verification round (accepted drafts + the target's own), clipped at the stop token
        or the limit; for an autoregressive run every entry is 1. ``n_first + sum(commits) == len(output_ids)``.
    overrun: tokens that the last round committed beyond the stop token or the limit.
    proposals: draft tokens verified per round (0 for a round whose drafter was skipped; empty for autoregressive).
    skipped_rounds: rounds in which the drafter did not run.
    prefill_s: seconds of prefill; shared prefill is reported as measured once.
    first_token_s, last_token_s: seconds on one monotonic clock; TPOT = (last - first) / (len(output_ids) - n_first).
    cached_tokens: prompt tokens served from a cache of another request; must be 0.
    activity: counters from inside the engine that prove which read was active ({"method": name, ...}); {} for
    autoregressive.
    round_s: optional seconds by part of a round ("draft", "verify", "other"), summed over rounds.
    """

    output_ids: list[int]
    finish: Finish
    n_first: int
    commits: list[int]
    overrun: int
    proposals: list[int]
    skipped_rounds: int
    prefill_s: float
    first_token_s: float
    last_token_s: float
    cached_tokens: int = 0
    activity: dict[str, Any] = field(default_factory=dict)
    round_s: dict[str, float] = field(default_factory=dict)


class Engine(Protocol):
    """An open engine for one target-drafter pair.

    interleaved: arms may alternate request by request (the reference engine shares one prefill per request between
        them); otherwise the harness runs arm after arm and the engine restarts itself when the arm changes.
    """

    interleaved: bool

    def describe(self, method: Any | None) -> EngineInfo:
        """The resolved configuration of one arm; ``None`` is the autoregressive arm."""

    def decode(self, request: Request, method: Any | None) -> Generation:
        """Decode one request greedily up to ``request.max_new_tokens`` or a stop id. Raises :class:`EngineError`."""

    def logit_gaps(self, request: Request, output_ids: list[int]) -> list[float]:
        """Teacher-force ``output_ids``: for each token, the target's largest logit minus that token's logit (>= 0)."""

    def close(self) -> None:
        """Release memory and child processes."""
