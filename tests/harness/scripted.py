"""Scripted engines: a tiny deterministic "model" whose rounds and times are known, and engines that cheat in one way
each.

The honest engine stands for an engine plus its target: the target's next token is a hash of the request and the
place, and `logit_gaps` is 0 for exactly that token. Nothing here is importable from the product.
"""

from __future__ import annotations

import itertools
import time
import zlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from harness.bench import Arm, Unit, arms_of
from harness.engines.base import EngineError, EngineInfo, Generation
from harness.requests import Request

BLOCK = 8
PROPOSALS = 7
STOP = 2
KILLED_REQUESTS = 40


@dataclass(frozen=True)
class Method:
    """Stands in for a method object: only its name is used."""

    name: str


def make_requests(count: int, prompt_tokens: int = 40, limit: int = 12) -> list[Request]:
    return [
        Request(
            id=f"r{place:03d}",
            benchmark="toy",
            task="toy",
            prompt_ids=tuple(range(100 + place, 100 + place + prompt_tokens)),
            max_new_tokens=limit,
            stop_ids=(STOP,),
            meta={"level": ("1K", "2K")[place % 2]},
        )
        for place in range(count)
    ]


def make_unit(requests: list[Request], **changes: Any) -> Unit:
    return replace(Unit("pair", "scripted", "toy", lambda: list(requests), len(requests)), **changes)


def make_arms(*names: str) -> list[Arm]:
    return arms_of([(name, None if name == "ar" else Method(name), {}) for name in names])


class Scripted:
    """Honest. Every round of a method commits `commit` tokens; one AR step takes `step_s` seconds, a round `round_s`.

    Seconds are of a simulated clock unless `sleep` is set, so tests know the exact TPOT and take no time.
    """

    interleaved = True

    def __init__(
        self,
        device: str = "device-a",
        commit: int = 4,
        step_s: float = 0.01,
        round_s: float = 0.02,
        sleep: float = 0,
        chunk: int = 8192,
    ) -> None:
        self.device, self.commit, self.step_s, self.round_s, self.sleep = device, commit, step_s, round_s, sleep
        self.settings = {"prefill_chunk": chunk, "async_scheduling": True}
        self.calls: list[tuple[str, str | None]] = []
        self.judged: list[str] = []

    def describe(self, method: Any | None) -> EngineInfo:
        drafter = {} if method is None else {"block": BLOCK, "proposals": PROPOSALS}
        return EngineInfo("scripted", "1", "toy", self.device, "float32", dict(self.settings), drafter)

    def output(self, request: Request) -> list[int]:
        """The target's greedy answer: ids from 1000 on; every third request stops early."""
        place = zlib.crc32(request.id.encode())
        length = request.max_new_tokens if place % 3 else max(2, request.max_new_tokens - 3)
        ids = [1000 + zlib.crc32(f"{request.id}/{i}".encode()) % 5000 for i in range(length)]
        return ids if length == request.max_new_tokens else [*ids[:-1], STOP]

    def decode(self, request: Request, method: Any | None) -> Generation:
        self.calls.append((request.id, getattr(method, "name", None)))
        if self.sleep:
            time.sleep(self.sleep)
        return self.generation(request, method, self.output(request))

    def generation(self, request: Request, method: Any | None, ids: list[int]) -> Generation:
        """The record of delivering `ids` in rounds as scripted."""
        left = len(ids) - 1
        if method is None:
            commits, proposals, overrun, per_round = [1] * left, [], 0, self.step_s
        else:
            commits = [self.commit] * (left // self.commit) + ([left % self.commit] if left % self.commit else [])
            proposals, per_round = [PROPOSALS] * len(commits), self.round_s
            overrun = self.commit - commits[-1] if commits else 0
        return Generation(
            output_ids=ids,
            finish="stop" if ids[-1] == STOP else "length",
            n_first=1,
            commits=commits,
            overrun=overrun,
            proposals=proposals,
            skipped_rounds=0,
            prefill_s=0.5,
            first_token_s=100.0,
            last_token_s=100.0 + per_round * len(commits),
            activity={} if method is None else {"method": method.name, "rounds": len(commits)},
        )

    def logit_gaps(self, request: Request, output_ids: list[int]) -> list[float]:
        self.judged.append(request.id)
        truth = itertools.chain(self.output(request), itertools.repeat(-1))
        return [0.0 if token == right else 5.0 for token, right in zip(output_ids, truth, strict=False)]

    def close(self) -> None:
        pass


class Slow(Scripted):
    """Slow enough that two processes overlap."""

    def __init__(self) -> None:
        super().__init__(sleep=0.4)


class ArmAfterArm(Scripted):
    """Restarts itself when the arm changes, as vLLM and SGLang do."""

    interleaved = False


# ------------------------------------------------------------------------------------------------------------ the
# cheats


class Looping(Scripted):
    """A method that repeats one phrase: every draft is accepted, so it looks fastest."""

    def decode(self, request: Request, method: Any | None) -> Generation:
        honest = super().decode(request, method)
        if method is None:
            return honest
        phrase = honest.output_ids[:3]
        ids = (phrase * request.max_new_tokens)[: request.max_new_tokens]
        return self.generation(request, method, ids)


class CachedPrefix(Scripted):
    def decode(self, request: Request, method: Any | None) -> Generation:
        honest = super().decode(request, method)
        return honest if method is None else replace(honest, cached_tokens=32)


class Truncated(Scripted):
    """Stops two tokens early and calls it the limit."""

    def decode(self, request: Request, method: Any | None) -> Generation:
        honest = super().decode(request, method)
        return honest if method is None else self.generation(request, method, honest.output_ids[:-2])


class Dropping(Scripted):
    """Returns nothing for one request."""

    def decode(self, request: Request, method: Any | None) -> Generation:
        honest = super().decode(request, method)
        if method is None or request.id != "r001":
            return honest
        return replace(honest, output_ids=[], commits=[], proposals=[], n_first=0, overrun=0)


class Shuffled(Scripted):
    """Answers come in another order: a request gets the previous one's output."""

    methods_only = True

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.last: dict[str | None, list[int]] = {}

    def decode(self, request: Request, method: Any | None) -> Generation:
        honest = super().decode(request, method)
        if method is None and self.methods_only:
            return honest
        key = getattr(method, "name", None)
        previous = self.last.get(key, honest.output_ids)
        self.last[key] = honest.output_ids
        return self.generation(request, method, previous)


class ShuffledEverywhere(Shuffled):
    """The same in all arms, so that no output differs from the autoregressive one."""

    methods_only = False

    def decode(self, request: Request, method: Any | None) -> Generation:
        self.calls.append((request.id, getattr(method, "name", None)))
        other = make_requests(1)[0] if request.id != "r000" else make_requests(2)[1]
        return self.generation(request, method, self.output(replace(other, max_new_tokens=request.max_new_tokens)))


class SkippedDrafter(Scripted):
    """The drafter does not run in the second round, and says so."""

    honest_count = True

    def decode(self, request: Request, method: Any | None) -> Generation:
        honest = super().decode(request, method)
        if method is None or len(honest.commits) < 3:
            return honest
        commits = [*honest.commits[:1], 1, *honest.commits[2:]]
        ids = honest.output_ids
        commits.append(len(ids) - 1 - sum(commits))
        proposals = [PROPOSALS, 0, *[PROPOSALS] * (len(commits) - 2)]
        skipped = 1 if self.honest_count else 0
        return replace(honest, commits=commits, proposals=proposals, skipped_rounds=skipped, overrun=0)


class HiddenSkip(SkippedDrafter):
    """The same, counted as if nothing had been accepted."""

    honest_count = False


class OtherScheduler(Scripted):
    """Speculative arms silently run without asynchronous scheduling (vllm#58065)."""

    def describe(self, method: Any | None) -> EngineInfo:
        info = super().describe(method)
        return info if method is None else replace(info, settings=info.settings | {"async_scheduling": False})


class WrongMethod(Scripted):
    """The plugin did not load: the stock drafter read is active whatever was asked for."""

    def decode(self, request: Request, method: Any | None) -> Generation:
        honest = super().decode(request, method)
        return honest if method is None else replace(honest, activity={"method": "original"})


class SilentMethod(Scripted):
    """Proves nothing about which method was active."""

    def decode(self, request: Request, method: Any | None) -> Generation:
        return replace(super().decode(request, method), activity={})


class BeyondCap(Scripted):
    def decode(self, request: Request, method: Any | None) -> Generation:
        honest = super().decode(request, method)
        if method is None:
            return honest
        left = len(honest.output_ids) - 1
        return replace(honest, commits=[left], proposals=[PROPOSALS], overrun=0)


class BackwardsClock(Scripted):
    def decode(self, request: Request, method: Any | None) -> Generation:
        honest = super().decode(request, method)
        return honest if method is None else replace(honest, last_token_s=honest.first_token_s - 1)


class EngineTau(Scripted):
    """Counts the drafts accepted beyond the stop token (vllm#56101): more is committed than was delivered."""

    def decode(self, request: Request, method: Any | None) -> Generation:
        honest = super().decode(request, method)
        if method is None or not honest.overrun:
            return honest
        return replace(honest, commits=[*honest.commits[:-1], honest.commits[-1] + honest.overrun], overrun=0)


class PastTheStop(Scripted):
    """Delivers text after the stop token."""

    def decode(self, request: Request, method: Any | None) -> Generation:
        honest = super().decode(request, method)
        if method is None or honest.finish != "stop":
            return honest
        return self.generation(request, method, [*honest.output_ids, 1234])


class OutOfMemory(Scripted):
    """Cannot decode one request with one method; `heals` after so many attempts."""

    def __init__(self, heals: int = 10**9, **options: Any) -> None:
        super().__init__(**options)
        self.heals = heals

    def decode(self, request: Request, method: Any | None) -> Generation:
        honest = super().decode(request, method)
        if request.id == "r001" and getattr(method, "name", None) == "fold":
            self.heals -= 1
            if self.heals >= 0:
                raise EngineError("out of memory: 3 GiB more were needed for 122880 tokens")
        return honest


class Dead(Scripted):
    """Dies after the first answer and fails ever after."""

    def decode(self, request: Request, method: Any | None) -> Generation:
        if self.calls:
            self.calls.append((request.id, None))
            raise EngineError("the engine process has died")
        return super().decode(request, method)


class NearTie(Scripted):
    """Methods differ in one token, within `gap` of the target's best."""

    def __init__(self, gap: float, **options: Any) -> None:
        super().__init__(**options)
        self.gap = gap

    def decode(self, request: Request, method: Any | None) -> Generation:
        honest = super().decode(request, method)
        if method is None or request.id != "r002":
            return honest
        ids = list(honest.output_ids)
        ids[5] += 1
        return self.generation(request, method, ids)

    def logit_gaps(self, request: Request, output_ids: list[int]) -> list[float]:
        return [min(gap, self.gap) for gap in super().logit_gaps(request, output_ids)]


class NoJudge(NearTie):
    def logit_gaps(self, request: Request, output_ids: list[int]) -> list[float]:
        raise EngineError("this engine cannot score a given text")


# ------------------------------------------------------------------------------------- a driver for the kill -9 trials


def main() -> None:
    """python -m tests.harness.scripted RUN_DIR DEVICE: the toy unit with tiny sleeps, so that a parent can kill it."""
    import sys

    from tests.harness.helpers import run_toy

    report = run_toy(Path(sys.argv[1]), Scripted(device=sys.argv[2], sleep=0.004), count=KILLED_REQUESTS)
    print("done", report.decoded, report.ok, flush=True)


if __name__ == "__main__":
    main()
