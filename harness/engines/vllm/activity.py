"""What the plugin did for the latest request, kept in the process that runs the engine core and the model.

The counters are the reader's own (``methods.paged.PagedReader.activity``): they move when a drafter layer's attention
is executed, inside CUDA graphs too, so a record of them is proof of which read was active. An engine fetches
:func:`report` after every request, in-process or by ``LLM.collective_rpc(activity.report)``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_static: dict[str, Any] = {}
_counters: Callable[[], dict[str, Any]] | None = None
_request: str = ""
_trace: list[dict[str, Any]] | None = None


def opened(static: dict[str, Any], counters: Callable[[], dict[str, Any]], *, trace: bool) -> None:
    """The plugin has loaded a drafter: ``static`` says what is the same for all requests (method, plan, bytes),
    ``counters()`` what was counted since the running request began. ``trace`` keeps every round's drafts."""
    global _static, _counters, _request, _trace
    _static, _counters, _request = static, counters, ""
    _trace = [] if trace else None


def closed() -> None:
    """The drafter is gone: nothing is reported any more."""
    global _static, _counters, _request, _trace
    _static, _counters, _request, _trace = {}, None, "", None


def start(request_id: str) -> None:
    """A request begins: its trace is empty. The plugin calls this, just before it resets the counters."""
    global _request
    _request = request_id
    if _trace is not None:
        _trace.clear()


def traces() -> bool:
    """Whether the drafts of every round are to be kept."""
    return _trace is not None


def drafted(context: int, anchor: int, tokens: list[int]) -> None:
    """Keep one round: ``context`` committed entries, the anchor after them, and the tokens drafted from it."""
    if _trace is not None:
        _trace.append({"context": context, "anchor": anchor, "drafts": tokens})


def report(worker: Any = None) -> dict[str, Any]:
    """What happened since the latest request began: plain values, so that it can be sent between processes.

    ``method``, ``plan`` (one line a layer kind), ``request``, ``side_cache_bytes_per_token``, the reader's counters
    (``rounds``, ``entries_in_context``, ``entries_read``, ``far_entries_read``, ...) and, if tracing, ``drafts``. Empty
    if the plugin is not active in this process. ``worker`` is what ``collective_rpc`` passes, and not used.
    """
    if _counters is None:
        return {}
    found = {**_static, "request": _request, **_counters()}
    if _trace is not None:
        found["drafts"] = [dict(entry) for entry in _trace]
    return found
