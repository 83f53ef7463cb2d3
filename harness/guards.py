"""Guards: what must hold before two arms may be compared. Pure functions over what an engine says and delivers.

Each answers one known way of being fooled (facts/peers.md C.2, C.3 and D): arms that ran under other settings, a
method that was not active, text beyond a stop token, a truncated or a degenerate output, an output that belongs to
another request.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from harness.engines.base import EngineInfo, Generation
from harness.requests import Request

# The largest logit gap that still counts as a near tie, by dtype of the target. Between a block of rows and a single
# row only
# the order of additions differs. In float32 this moves a logit of size 20 by about 1e-4. In bfloat16 neighbouring
# numbers at
# size 16 to 32 are 0.125 apart and both competitors are rounded after dozens of rounded layers, so a few steps are
# noise; a
# wrong read or another request's text costs several units at once. float16 has eight times finer steps than bfloat16.
NEAR_TIE = {"float32": 1e-3, "float16": 0.1, "bfloat16": 0.5}
# n-grams of 8 tokens: short enough to see a loop within a few lines, long enough that ordinary text does not repeat
# them.
NGRAM = 8
LOOP = 0.5
# Shares of requests, and relative lengths, beyond which an arm did not do the same work as the baseline.
SHIFT = 0.05


def differing_settings(base: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """ "key: this, that" for each setting in which two arms differ; both come from :func:`settings`."""
    keys = sorted({*base, *other})
    return [f"{key}: {base.get(key)!r}, {other.get(key)!r}" for key in keys if base.get(key) != other.get(key)]


def settings(info: EngineInfo) -> dict[str, Any]:
    """All that two paired arms must share: the engine outside its speculation block. The device is paired by uuid."""
    shared = {"engine": info.name, "version": info.version, "dtype": info.dtype}
    return shared | dict(info.settings)


def wrong_output(request: Request, method: str | None, generation: Generation) -> str | None:
    """What shows that a generation is not an answer to `request` by `method` (None: autoregressive), or None."""
    ids, limit, stops = generation.output_ids, request.max_new_tokens, set(request.stop_ids)
    active = generation.activity.get("method")
    if active != method:
        return f"the engine says that {active or 'no method'} was active, not {method or 'autoregressive decoding'}"
    if not ids:
        return "the engine returned no output (a dropped request)"
    early = next((place for place, token in enumerate(ids[:-1]) if token in stops), None)
    if early is not None:
        return f"the output goes on after the stop token at position {early}"
    if len(ids) > limit:
        return f"the output has {len(ids)} tokens, the limit is {limit}"
    finish = "stop" if ids[-1] in stops else "length"
    if generation.finish != finish:
        return f"finish is {generation.finish!r}, but the output ends by {finish!r}"
    if finish == "length" and len(ids) < limit:
        return f"the output was cut: {len(ids)} of {limit} tokens and no stop token"
    return None


# ------------------------------------------------------------------------------------------------------- output
# agreement


@dataclass(frozen=True)
class Agreement:
    """How an arm's output compares with the autoregressive one, a line of agreement.jsonl.

    divergence: index of the first differing token, None for equal outputs. gap_there: by how much the target's best
    logit exceeds the delivered token's at that index; max_gap, max_gap_at: the largest gap over the output and its
    index. allowed: the near-tie bound. passed: whether every gap is within it. error: why the target could not judge.
    """

    unit: str
    request_id: str
    arm: str
    device_uuid: str
    equal: bool
    divergence: int | None
    gap_there: float | None
    max_gap: float | None
    max_gap_at: int | None
    allowed: float
    passed: bool
    error: str = ""


def near_tie_bound(dtype: str) -> float:
    """Allowed logit gap for a target dtype ("bfloat16", "torch.bfloat16"). Raises ValueError for an unknown one."""
    name = dtype.removeprefix("torch.")
    if name not in NEAR_TIE:
        raise ValueError(f"no near-tie bound is known for {dtype}; set max_gap= (known: {', '.join(NEAR_TIE)})")
    return NEAR_TIE[name]


def first_difference(output: Sequence[int], reference: Sequence[int]) -> int | None:
    """Index of the first token in which two outputs differ, None if equal; a shorter one differs at its end."""
    if list(output) == list(reference):
        return None
    pairs = enumerate(zip(output, reference, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(output), len(reference)))


def judge(gaps: Callable[[], list[float]], length: int, divergence: int | None, allowed: float) -> dict[str, Any]:
    """The gate's verdict on one output of `length` tokens: the fields of :class:`Agreement` from gap_there to error.

    gaps: teacher-forces the output through the target; its failure is a failed gate, never a pass.
    """
    verdict: dict[str, Any] = {"gap_there": None, "max_gap": None, "max_gap_at": None, "allowed": allowed}
    try:
        found = gaps()
    except Exception as error:
        return verdict | {"passed": False, "error": f"the target could not judge: {describe_error(error)}"}
    if len(found) != length or not all(math.isfinite(gap) and gap >= 0 for gap in found):
        return verdict | {
            "passed": False,
            "error": f"the target judged {len(found)} of {length} tokens, or not by numbers",
        }
    worst = max(found, default=0.0)
    return verdict | {
        "gap_there": found[divergence] if divergence is not None and divergence < length else None,
        "max_gap": worst,
        "max_gap_at": found.index(worst) if found else None,
        "passed": worst <= allowed,
        "error": "",
    }


def describe_error(error: BaseException) -> str:
    """An exception as one line: its type unless the message stands alone, the message, and where it came from."""
    text = " ".join(str(error).split()) or "no message"
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    where = f" ({trace.tb_frame.f_code.co_filename.rsplit('/', 1)[-1]}:{trace.tb_lineno})" if trace is not None else ""
    return f"{type(error).__name__}: {text[:500]}{where}"


# ------------------------------------------------------------------------------------------------------------------
# flags


@dataclass(frozen=True)
class Work:
    """What is compared between an arm and the baseline: output tokens, finish reason, share of repeated n-grams."""

    tokens: int
    finish: str
    repetition: float


def repetition(ids: Sequence[int]) -> float:
    """Share of the output's n-grams that occurred before in it, 0 to 1; near 1 is a loop."""
    grams = len(ids) - NGRAM + 1
    return 1 - len({tuple(ids[place : place + NGRAM]) for place in range(grams)}) / grams if grams > 0 else 0.0


def work_flags(arm: str, pairs: Sequence[tuple[Work, Work]]) -> list[str]:
    """Signs that an arm did other work than the baseline, from (arm, baseline) of the same requests; no failures."""
    if not pairs:
        return []
    n, flags = len(pairs), []
    loops = sum(mine.repetition > LOOP >= base.repetition for mine, base in pairs)
    if loops:
        flags.append(f"{arm}: {loops} of {n} outputs loop where the autoregressive one does not")
    finish = sum(mine.finish != base.finish for mine, base in pairs)
    if finish > SHIFT * n:
        flags.append(f"{arm}: {finish} of {n} outputs end for another reason than the autoregressive one")
    longer = sum(mine.tokens for mine, _ in pairs) / max(sum(base.tokens for _, base in pairs), 1) - 1
    if abs(longer) > SHIFT:
        flags.append(f"{arm}: outputs are {longer:+.0%} long against the autoregressive ones")
    return flags
