"""Offline acceptance length tau_fs of every method on identical states (Appendix A).

At a position t of the continuation a method drafts a block from the entries before t; tau_fs is one plus the leading
drafts that equal the continuation, averaged over positions and then over inputs.

The paper does not say what a method with a memory (InfLLM, CMR) has seen by then. Here every method starts after the
prompt and walks through the continuation as if every round committed ``stride`` tokens: with a stride of 1 it drafts
at every position, InfLLM has seen the attention of all drafts before, and CMR is due for a refresh every so many
positions. Methods without a memory give the same drafts whatever the walk.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from harness.diagnostics.states import States
from methods.reader import open_reader
from methods.reading import Method


@torch.inference_mode()
def acceptance(states: States, methods: Mapping[str, Method], stride: int = 1) -> list[dict[str, Any]]:
    """One row per method, in the given order: arm, positions, tau, and first_1..first_K.

    first_k: share of positions whose first k drafts all match, so that tau = 1 + their sum. ``stride``: tokens
    between two positions. Empty if the continuation is shorter than an anchor and its K drafts.
    """
    offsets = states.offsets()[::stride]
    if not offsets:
        return []
    rows = []
    for arm, method in methods.items():
        matches = _walk(states, method, list(offsets))
        share = [sum(m >= k for m in matches) / len(matches) for k in range(1, _proposals(states) + 1)]
        firsts = {f"first_{k}": value for k, value in enumerate(share, 1)}
        rows.append({"arm": arm, "positions": len(matches), "tau": 1 + sum(matches) / len(matches), **firsts})
    return rows


def _proposals(states: States) -> int:
    return states.pair.drafter.config.proposals


def _walk(states: States, method: Method, offsets: list[int]) -> list[int]:
    """Leading matches at every offset, in the order of a reader's rounds (methods/reader.py)."""
    drafter, target, cache = states.pair.drafter, states.pair.target, states.cache
    states.commit(0)
    reader = open_reader(method, cache.geometry, states.geometry, cache)
    reader.prepare()
    matches = []
    for here, following in zip(offsets, [*offsets[1:], None], strict=True):
        drafts = drafter.draft(states.continuation[here], reader).tokens
        reader.round_done()
        matches.append(states.matches(drafts, here))
        if following is None:
            break
        wanted = reader.wants_target_attention()
        reader.committed(*states.commit(following))
        if wanted:
            # The target's latest pass is the one over the continuation; its row i stands at position N + i.
            reader.target_attention(target.attention_of(following - 1))
    return matches
