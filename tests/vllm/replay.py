"""What vLLM drafted, held against the reference drafter on the same committed states, round by round."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from harness.drafters import Drafter, load_drafter
from harness.engines.reference.target import Target, open_target
from methods.reader import ContextCache, Reader, open_reader
from methods.reading import Method, RequestGeometry
from tests.vllm.pairs import Pair


@dataclass
class Comparison:
    """rounds: drafted by vLLM. ties: rounds that differ from the reference first at a token whose logit is within
    ``tolerance`` of the largest. wrong: the others that differ, as (context, vLLM's drafts, the reference's).
    accepted: drafts accepted in each round, without the last one.
    """

    rounds: int = 0
    ties: int = 0
    wrong: list[tuple[int, list[int], list[int]]] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)


class Reference:
    """The pair in torch."""

    def __init__(self, pair: Pair):
        dtype = getattr(torch, pair.dtype)
        self.target: Target = open_target(pair.target, dtype, torch.device("cpu"))
        self.drafter: Drafter = load_drafter(pair.drafter, dtype=dtype, device="cpu")
        self.drafter.bind(self.target.embedding, self.target.head)

    @torch.inference_mode()
    def compare(
        self,
        method: Method,
        prompt: list[int],
        limit: int,
        output: list[int],
        drafts: list[dict[str, Any]],
        tolerance: float,
        reader_of: Any = open_reader,
    ) -> Comparison:
        """Follow the rounds that vLLM reports (``activity``'s trace) and draft each with the reference.

        What a round committed is where the next one's context ends; its tokens are those of ``output``.
        """
        target, drafter = self.target, self.drafter
        taps = tuple(drafter.config.target_layer_ids)
        capacity = len(prompt) + limit + 2 * drafter.config.block + 2
        target.reserve(capacity)
        context = ContextCache(drafter.config.geometry(), capacity, drafter.dtype, drafter.device)
        for start in range(0, len(prompt), 64):
            step = target.forward(prompt[start : start + 64], taps=taps, last_only=True)
            assert step.features is not None
            context.append(*drafter.context_kv(step.features))
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
                first = next(i for i, pair in enumerate(zip(proposal.tokens, theirs, strict=True)) if len({*pair}) > 1)
                row = proposal.logits[first].float()
                if float(row.max() - row[theirs[first]]) <= tolerance:
                    found.ties += 1
                else:
                    found.wrong.append((length, theirs, proposal.tokens))
            if index + 1 == len(drafts):
                break
            kept = drafts[index + 1]["context"] - length
            found.accepted.append(kept - 1)
            wants = reader.wants_target_attention()
            step = target.forward(sequence[length : length + kept], taps=taps)
            weights = target.attention_of(kept - 1) if wants else None
            assert step.features is not None
            context.append(*drafter.context_kv(step.features))
            reader.committed(length, length + kept)
            if weights is not None:
                reader.target_attention(weights)
        return found
