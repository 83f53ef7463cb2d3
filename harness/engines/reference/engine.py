"""The reference engine: greedy block verification in torch, one request at a time, on a CPU or one GPU.

One prefill per request is shared by the autoregressive arm and every method: the target's cache is rewound to the end
of the prompt and the drafter's context cache cropped to it, so arms can alternate request by request on identical
states.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from harness.drafters import Drafter
from harness.engines.base import EngineError, EngineInfo, Finish, Generation
from harness.engines.reference.fixed import PAGE, Executors, FixedDrafting
from harness.engines.reference.target import Target
from harness.requests import Request
from methods.reader import ContextCache, Reader, open_reader
from methods.reading import Method, RequestGeometry

LEAST_ROOM = 64  # positions kept free after a prompt, so that a short warm-up's prefill also serves the real decode
STORAGE = 4096  # positions by which storage grows that captured steps have the addresses of


@dataclass
class _Prompt:
    """The prompt that is in the caches. room: positions to decode into. context: the drafter's entries, if there is
    one.
    """

    ids: tuple[int, ...]
    room: int
    first_logits: Tensor
    prefill_s: float
    context: ContextCache | None


class Drafting(Protocol):
    """The drafter's side of a decode by one method."""

    @property
    def reader(self) -> Reader: ...

    def draft(self, anchor: int) -> list[int]:
        """K tokens after ``anchor``."""

    def commit(self, features: Tensor, start: int, end: int) -> None:
        """Target features ``[K + 1, F * H]`` of a verification at ``start``; rows of ``start..end-1`` are committed."""


class EagerDrafting:
    """Rounds whose shapes follow the context: on a CPU nothing is computed that is not needed."""

    def __init__(self, drafter: Drafter, method: Method, context: ContextCache, request: RequestGeometry) -> None:
        self._drafter, self._context = drafter, context
        self.reader: Reader = open_reader(method, context.geometry, request, context)
        self.reader.prepare()

    def draft(self, anchor: int) -> list[int]:
        """See :class:`Drafting`."""
        drafts = self._drafter.draft(anchor, self.reader).tokens
        self.reader.round_done()
        return drafts

    def commit(self, features: Tensor, start: int, end: int) -> None:
        """See :class:`Drafting`."""
        self._context.append(*self._drafter.context_kv(features[: end - start]))
        self.reader.committed(start, end)


class ReferenceEngine:
    """An :class:`~harness.engines.base.Engine`. ``drafter`` may be None if only the autoregressive arm will run.

    prefill_chunk: prompt tokens per forward pass of the target. executors: if given, steps, drafts and verifications
    have fixed shapes and run on these, on a GPU as CUDA graphs. Left out of the graphs are the drafts of InfLLM and
    CMR, which choose entries on the host, and targets with recurrent layers (Qwen3.5).
    """

    interleaved = True

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None,
        *,
        prefill_chunk: int,
        info: EngineInfo,
        executors: Executors | None = None,
    ) -> None:
        self._target, self._drafter = target, drafter
        self._prefill_chunk, self._info = prefill_chunk, info
        self._executors = executors
        self._storage: ContextCache | None = None  # kept from request to request where steps are fixed
        self._fixed: dict[str, tuple[Method, FixedDrafting]] = {}  # one a method's name, for that storage
        self._taps: tuple[int, ...] = ()
        rows = [1]
        if drafter is not None:
            drafter.bind(target.embedding, target.head)
            self._taps = tuple(drafter.config.target_layer_ids)
            rows.append(drafter.config.proposals + 1)
        if executors is not None:
            target.fix(rows, executors.attend)
        self._prompt: _Prompt | None = None

    @property
    def pair(self) -> tuple[Target, Drafter | None]:
        """The models themselves, bound to each other, for diagnostics that look inside a round."""
        return self._target, self._drafter

    def describe(self, method: Method | None) -> EngineInfo:
        """The resolved configuration of one arm; the drafter's part is empty for the autoregressive one."""
        drafter = {} if method is None else self._info.drafter
        return EngineInfo(**{**vars(self._info), "drafter": drafter})

    def decode(self, request: Request, method: Method | None) -> Generation:
        """Decode greedily after prefilling the prompt, unless the last call did so for the same request."""
        prompt = self._prefill(request)
        if method is None:
            return self._autoregressive(request, prompt)
        if self._drafter is None or prompt.context is None:
            raise EngineError(f"method {method.name} needs a drafter, and none is loaded")
        return self._speculative(request, prompt, method, self._drafter, prompt.context)

    @torch.inference_mode()
    def logit_gaps(self, request: Request, output_ids: list[int]) -> list[float]:
        """Teacher-force ``output_ids`` after the prompt; per token, the target's top logit minus that token's."""
        prompt = self._prefill(request)
        self._target.rewind()
        logits = [prompt.first_logits]
        if len(output_ids) > 1:
            logits.append(self._target.forward(output_ids[:-1]).logits)
        rows = torch.cat(logits).float()
        chosen = rows.gather(1, torch.tensor(output_ids, device=rows.device)[:, None])[:, 0]
        return (rows.max(-1).values - chosen).tolist()

    @torch.inference_mode()
    def pretend(self, length: int, room: int, method: Method | None) -> Drafting | None:
        """Lay a made-up context of ``length`` entries, random keys and values, with room for ``room`` tokens, and open
        a method's rounds on it: for timing, which depends on shapes alone, without a prefill. None for no method.

        Raises EngineError if the target has fewer positions than ``length``; ``room`` may go beyond them.
        """
        target, drafter = self._target, self._drafter
        self._prompt = None
        block = 0 if drafter is None else drafter.config.proposals + 1
        capacity = length + room + block
        if not 0 < length <= target.max_positions:
            raise EngineError(f"a context of {length} entries: the target has positions 1 to {target.max_positions}")
        target.reserve(capacity)
        target.pretend(length)
        if method is None:
            self._ready(1, ())
            return None
        if drafter is None:
            raise EngineError(f"method {method.name} needs a drafter, and none is loaded")
        context = self._open_context(drafter, capacity)
        context.keys.normal_()
        context.values.normal_()
        context.length = length
        self._ready(drafter.config.proposals + 1, self._taps)
        return self._open_drafting(method, drafter, context, RequestGeometry(length, room, drafter.config.block))

    @torch.inference_mode()
    def step(self, token: int) -> int:
        """One autoregressive step: the token after ``token``."""
        return self.sample(self._target.forward([token]).logits)[0]

    @torch.inference_mode()
    def round(self, anchor: int, drafting: Drafting) -> list[int]:
        """One round after ``anchor``: what it committed."""
        return self._verify(anchor, drafting.draft(anchor), drafting)

    def sample(self, logits: Tensor) -> list[int]:
        """Greedy tokens of [R, vocab] logits, handed to the host."""
        # max, because bf16 argmax takes six times as long on a CPU
        return logits.max(-1).indices.tolist()

    def close(self) -> None:
        """Nothing outlives the object."""
        self._prompt = self._storage = None
        self._fixed.clear()

    @torch.inference_mode()
    def _prefill(self, request: Request) -> _Prompt:
        held = self._prompt
        if held is not None and held.room >= request.max_new_tokens and held.ids == request.prompt_ids:
            return held
        self._prompt = held = None  # before the caches are overwritten
        target, drafter = self._target, self._drafter
        ids, limit = request.prompt_ids, request.max_new_tokens
        block = 0 if drafter is None else drafter.config.proposals + 1
        needed = len(ids) + limit + block
        if needed > target.max_positions:
            raise EngineError(
                f"request {request.id}: {len(ids)} prompt tokens, {limit} to generate and {block} of a block "
                f"exceed the target's {target.max_positions} positions; prepare shorter requests"
            )
        started = time.perf_counter()
        room = max(limit, LEAST_ROOM)
        capacity = min(len(ids) + room + block, target.max_positions)
        if self._executors is not None:
            capacity = min(-(-capacity // STORAGE) * STORAGE, target.max_positions)
        target.reserve(capacity)
        context = None if drafter is None else self._open_context(drafter, capacity)
        logits = torch.empty(0)
        for start in range(0, len(ids), self._prefill_chunk):
            step = target.forward(ids[start : start + self._prefill_chunk], taps=self._taps, last_only=True)
            logits = step.logits
            if drafter is not None and context is not None and step.features is not None:
                context.append(*drafter.context_kv(step.features))
        target.mark()
        self._prompt = _Prompt(ids, capacity - len(ids) - block, logits, time.perf_counter() - started, context)
        return self._prompt

    def _open_context(self, drafter: Drafter, capacity: int) -> ContextCache:
        """An empty context: a new one, or where steps are fixed the one whose addresses they have if it is large
        enough."""
        geometry = drafter.config.geometry()
        if self._executors is None:
            return ContextCache(geometry, capacity, drafter.dtype, drafter.device)
        if self._storage is None or self._storage.capacity < capacity:
            self._fixed.clear()
            self._storage = None  # free the old one before taking the new
            rows = -(-(capacity + geometry.block) // PAGE) * PAGE
            self._storage = ContextCache(geometry, rows - geometry.block, drafter.dtype, drafter.device)
        self._storage.crop(0)
        return self._storage

    def _ready(self, rows: int, taps: tuple[int, ...]) -> None:
        """Capture the target's fixed step before a clock runs."""
        if self._target.has_fixed(rows):
            self._target.fixed_pass(rows, taps).ready(self._target.length)

    def _open_drafting(
        self, method: Method, drafter: Drafter, context: ContextCache, request: RequestGeometry
    ) -> Drafting:
        if self._executors is None:
            return EagerDrafting(drafter, method, context, request)
        held, drafting = self._fixed.pop(method.name, (None, None))
        if drafting is None or held != method:
            drafting = None  # free its storage first
            drafting = FixedDrafting(drafter, method, context, self._executors)
        self._fixed[method.name] = method, drafting
        drafting.begin(request)
        return drafting

    @torch.inference_mode()
    def _autoregressive(self, request: Request, prompt: _Prompt) -> Generation:
        target = self._target
        target.rewind()
        self._ready(1, ())
        output = self.sample(prompt.first_logits)
        first_s = last_s = time.perf_counter()
        while (finish := _finished(output, request)) is None:
            output += self.sample(target.forward(output[-1:]).logits)
            last_s = time.perf_counter()
        return Generation(
            output_ids=output,
            finish=finish,
            n_first=1,
            commits=[1] * (len(output) - 1),
            overrun=0,
            proposals=[],
            skipped_rounds=0,
            prefill_s=prompt.prefill_s,
            first_token_s=first_s,
            last_token_s=last_s,
        )

    @torch.inference_mode()
    def _speculative(
        self, request: Request, prompt: _Prompt, method: Method, drafter: Drafter, context: ContextCache
    ) -> Generation:
        target = self._target
        target.rewind()
        context.crop(len(request.prompt_ids))
        geometry = RequestGeometry(len(request.prompt_ids), request.max_new_tokens, drafter.config.block)
        self._ready(drafter.config.proposals + 1, self._taps)
        drafting = self._open_drafting(method, drafter, context, geometry)
        output = self.sample(prompt.first_logits)
        commits: list[int] = []
        proposals: list[int] = []
        overrun, draft_s, verify_s = 0, 0.0, 0.0
        first_s = last_s = time.perf_counter()
        while (finish := _finished(output, request)) is None:
            began = time.perf_counter()
            drafts = drafting.draft(output[-1])
            drafted = time.perf_counter()
            committed = self._verify(output[-1], drafts, drafting)
            delivered = _clip(committed, request, room=request.max_new_tokens - len(output))
            output += delivered
            commits.append(len(delivered))
            proposals.append(len(drafts))
            overrun = len(committed) - len(delivered)
            last_s = time.perf_counter()
            draft_s, verify_s = draft_s + drafted - began, verify_s + last_s - drafted
        reader = drafting.reader
        activity = {"method": method.name, **reader.activity(), "extra_bytes": reader.extra_bytes()}
        return Generation(
            output_ids=output,
            finish=finish,
            n_first=1,
            commits=commits,
            overrun=overrun,
            proposals=proposals,
            skipped_rounds=0,
            prefill_s=prompt.prefill_s,
            first_token_s=first_s,
            last_token_s=last_s,
            activity=activity,
            round_s={"draft": draft_s, "verify": verify_s},
        )

    def _verify(self, anchor: int, drafts: list[int], drafting: Drafting) -> list[int]:
        """Verify a block: the accepted drafts and the target's own next token (paper, section 3.1).

        Leaves both caches with what is committed except the returned last token, the next anchor.
        """
        target, start, reader = self._target, self._target.length, drafting.reader
        wants_attention = reader.wants_target_attention()
        step = target.forward([anchor, *drafts], taps=self._taps)
        answers = self.sample(step.logits)
        accepted = 0
        while accepted < len(drafts) and drafts[accepted] == answers[accepted]:
            accepted += 1
        weights = target.attention_of(accepted) if wants_attention else None
        end = start + accepted + 1
        target.truncate(end)
        assert step.features is not None
        drafting.commit(step.features, start, end)
        if weights is not None:
            reader.target_attention(weights)
        return [*drafts[:accepted], answers[accepted]]


def _finished(output: Sequence[int], request: Request) -> Finish | None:
    if output[-1] in request.stop_ids:
        return "stop"
    return "length" if len(output) >= request.max_new_tokens else None


def _clip(committed: list[int], request: Request, room: int) -> list[int]:
    """The part of a round that is delivered: up to the first stop token, and no more than the limit leaves room for."""
    for index, token in enumerate(committed[:room]):
        if token in request.stop_ids:
            return committed[: index + 1]
    return committed[:room]
