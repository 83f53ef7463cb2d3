"""What vLLM drafted, held against the reference drafter on the same committed states, round by round."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from harness.drafters import Drafter, load_drafter
from harness.engines.reference.target import Target, open_target
from methods.reader import ContextCache, Reader, open_reader
from methods.reading import Method, RequestGeometry
from tests.vllm.pairs import Pair

if TYPE_CHECKING:
    from tests.vllm.running import Run


@dataclass
class Comparison:
    """rounds: drafted by vLLM. wrong: those that differ from the reference, as (context, vLLM's drafts, the
    reference's, gap): how much smaller the reference's logit of the first differing token is than its largest.
    accepted: drafts accepted in each round, without the last one. beyond: rounds whose context runs past the output,
    which nobody can follow (the last round may commit more than was asked for).
    """

    rounds: int = 0
    beyond: int = 0
    wrong: list[tuple[int, list[int], list[int], float]] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)

    def check(self, tie: float, most: float = 0.2) -> None:
        """Every round is equal, except where the reference's two logits are within ``tie`` of each other: at most
        ``most`` of the rounds."""
        apart = [difference for difference in self.wrong if difference[3] > tie]
        assert not apart, apart[:3]
        assert len(self.wrong) <= most * self.rounds, f"{len(self.wrong)} of {self.rounds} rounds are ties"


class States:
    """The committed states of a request: features of each position, and the target's attention where a round wants it.

    From the engine itself (``running.Running.states``), or from :class:`Reference`'s target.
    """

    def __init__(self, features: Callable[[int, int], Tensor], weights: Callable[[int], Tensor]):
        self.features, self.weights = features, weights


class Reference:
    """The pair in torch, in float32 or, for targets that vLLM runs in bfloat16 alone, the drafter of the pair in it."""

    def __init__(self, pair: Pair):
        dtype = getattr(torch, pair.dtype)
        self.target: Target = open_target(pair.target, dtype, torch.device("cpu"))
        self.drafter: Drafter = load_drafter(pair.drafter, dtype=dtype, device="cpu")
        self.drafter.bind(self.target.embedding, self.target.head)

    @torch.inference_mode()
    def states(self, prompt: list[int], output: list[int]) -> States:
        """What this target says of the whole sequence, fed in the pieces that are asked for."""
        target, taps = self.target, tuple(self.drafter.config.target_layer_ids)
        sequence = [*prompt, *output]
        target.reserve(len(sequence))

        rows = 0

        def features(start: int, end: int) -> Tensor:
            nonlocal rows
            found = []
            for first in range(start, end, 64):
                fed = sequence[first : min(first + 64, end)]
                step = target.forward(fed, taps=taps)
                assert step.features is not None
                found.append(step.features)
                rows = len(fed)
            return torch.cat(found)

        return States(features, lambda length: target.attention_of(rows - 1))

    @torch.inference_mode()
    def compare(
        self,
        method: Method,
        prompt: list[int],
        limit: int,
        run: Run,
        states: States | None = None,
        reader_of: Any = open_reader,
    ) -> Comparison:
        """Follow the rounds that vLLM reports (``activity``'s trace) and draft each with the reference.

        What a round committed is where the next one's context ends; its tokens are those of the output.
        """
        drafter, output, drafts = self.drafter, run.output, run.drafts
        states = self.states(prompt, output) if states is None else states
        capacity = len(prompt) + limit + 2 * drafter.config.block + 2
        context = ContextCache(drafter.config.geometry(), capacity, drafter.dtype, drafter.device)
        context.append(*drafter.context_kv(states.features(0, len(prompt))))
        geometry = RequestGeometry(len(prompt), limit, drafter.config.block)
        reader: Reader = reader_of(method, context.geometry, geometry, context)
        reader.prepare()
        sequence = [*prompt, *output]
        found = Comparison()
        for index, round_ in enumerate(drafts):
            length, anchor, theirs = round_["context"], round_["anchor"], round_["drafts"]
            assert length == context.length, f"round {index} starts at {length}, the reference is at {context.length}"
            if length < len(sequence):
                assert anchor == sequence[length], f"the anchor at {length} is no token of the output"
            proposal = drafter.draft(anchor, reader)
            reader.round_done()
            found.rounds += 1
            if proposal.tokens != theirs:
                pairs = zip(proposal.tokens, theirs, strict=True)
                first = next(i for i, (ours, other) in enumerate(pairs) if ours != other)
                row = proposal.logits[first].float()
                gap = float(row.max() - row[theirs[first]])
                found.wrong.append((length, theirs, proposal.tokens, gap))
            if index + 1 == len(drafts):
                break
            end = drafts[index + 1]["context"]
            if end > len(sequence):
                found.beyond = len(drafts) - index - 1
                break
            found.accepted.append(end - length - 1)
            wants = reader.wants_target_attention()
            context.append(*drafter.context_kv(states.features(length, end)))
            reader.committed(length, end)
            if wants:
                reader.target_attention(states.weights(end))
        return found
