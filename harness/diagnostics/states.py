"""The states that all diagnostics share: a prompt, the target's greedy continuation, and the features of both.

Appendix A: "we take the greedy continuation of T [...] and obtain the context features c_j at all positions from a
single forward pass of T over the input and the continuation", so that everything is compared on identical states. The
prompt part of that pass is the prefill, in chunks; the continuation part is one pass over the whole continuation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from harness.drafters import Drafter
from harness.engines.base import EngineError
from harness.engines.reference.target import Target
from harness.requests import Request
from methods.reader import ContextCache
from methods.reading import RequestGeometry


@dataclass(frozen=True)
class Pair:
    """A target and its drafter, bound. chunk: tokens per forward pass of a prefill."""

    target: Target
    drafter: Drafter
    chunk: int


@dataclass(eq=False)
class States:
    """One input as every drafting diagnostic sees it.

    continuation: G greedy tokens of the target, the first one predicted by the prompt. cache: the drafter's context
    entries, those of the prompt and of as much of the continuation as was committed. keys, values: those of the
    continuation's first G - 1 tokens [L, G - 1, Hkv, d]. near_ties: positions whose token the one pass would not have
    chosen, because it rounds otherwise than the token-by-token pass that generated it. features: see ``replay``.
    """

    pair: Pair
    request: Request
    continuation: list[int]
    cache: ContextCache
    keys: Tensor
    values: Tensor
    near_ties: int
    features: Tensor | None = field(default=None, repr=False)

    @property
    def prompt(self) -> int:
        """Prompt tokens N."""
        return len(self.request.prompt_ids)

    @property
    def geometry(self) -> RequestGeometry:
        """What a method's plan is made for."""
        return RequestGeometry(self.prompt, self.request.max_new_tokens, self.pair.drafter.config.block)

    def offsets(self) -> range:
        """Places in the continuation that can be the anchor: those followed by at least K known tokens."""
        return range(max(0, len(self.continuation) - self.pair.drafter.config.proposals))

    @torch.inference_mode()
    def commit(self, offset: int) -> tuple[int, int]:
        """Let the context be the prompt and the continuation before ``offset``, as rounds do; entries (start, end)."""
        start, end = self.cache.length, self.prompt + offset
        if end <= start:
            self.cache.crop(end)
        else:
            part = slice(start - self.prompt, offset)
            self.cache.append(self.keys[:, part], self.values[:, part])
        return start, end

    def matches(self, drafts: Sequence[int], offset: int) -> int:
        """Leading drafts after the anchor at ``offset`` that equal the continuation."""
        known = self.continuation[offset + 1 : offset + 1 + len(drafts)]
        wrong = (place for place, (a, b) in enumerate(zip(drafts, known, strict=True)) if a != b)
        return next(wrong, len(known))


@torch.inference_mode()
def replay(pair: Pair, request: Request, tokens: int | None = None, keep_features: bool = False) -> States:
    """Prefill the prompt, generate greedily up to ``tokens`` (default: the request's limit), pass over the whole.

    ``keep_features`` also keeps the prompt's context features c_j [N, H] (float32), which the order probe reads.
    Raises EngineError if prompt, continuation and a block exceed the target's positions.
    """
    target, drafter = pair.target, pair.drafter
    taps = tuple(drafter.config.target_layer_ids)
    ids, limit = request.prompt_ids, min(tokens or request.max_new_tokens, request.max_new_tokens)
    capacity = len(ids) + limit + drafter.config.proposals + 1
    if capacity > target.max_positions:
        raise EngineError(
            f"request {request.id}: {capacity} positions exceed the target's {target.max_positions}; lower "
            "diagnostic.tokens or prepare shorter requests"
        )
    target.reserve(capacity)
    cache = ContextCache(drafter.config.geometry(), capacity, drafter.dtype, drafter.device)
    kept: list[Tensor] = []
    logits = torch.empty(0)
    for start in range(0, len(ids), pair.chunk):
        step = target.forward(ids[start : start + pair.chunk], taps=taps, last_only=True)
        assert step.features is not None
        cache.append(*drafter.context_kv(step.features))
        logits = step.logits
        if keep_features:
            kept.append(drafter.context_features(step.features).float())
    target.mark()
    output = logits.max(-1).indices.tolist()
    while len(output) < limit and output[-1] not in request.stop_ids:
        output += target.forward(output[-1:]).logits.max(-1).indices.tolist()
    target.rewind()
    features = torch.cat(kept) if kept else None
    if len(output) < 2:
        none = cache.keys[:, :, :0].transpose(1, 2)
        return States(pair, request, output, cache, none, none, 0, features)
    # The last token's successor is not known, so its features are not needed.
    step = target.forward(output[:-1], taps=taps)
    assert step.features is not None
    chosen = step.logits.max(-1).indices.tolist()
    near_ties = sum(a != b for a, b in zip(chosen, output[1:], strict=True))
    keys, values = drafter.context_kv(step.features)
    return States(pair, request, output, cache, keys, values, near_ties, features)
