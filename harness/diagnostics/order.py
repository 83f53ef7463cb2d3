"""Finding 2, the order probe: which of two context entries came first, read from their features (Appendix A).

Pairs lie outside the most recent entries, at separations of one of five bins. A logistic regression on the
standardised difference of two context features, or of two token embeddings, predicts whether i < j; documents are
held out in five folds. The control shuffles the older context in chunks before the target processes it and puts the
features back to their tokens: a probe that then finds the order of processing, not the order in the document, shows
that the target writes the position.

Where the paper is silent: pairs of a bin are drawn uniformly with replacement; the control uses the same pairs, at
their separation in the document, and a probe of its own is trained for each of the two orders; a last chunk shorter
than the others stays where it is and is not drawn from; standard deviations over folds have n - 1 in the denominator.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from harness.diagnostics.states import Pair
from harness.requests import Request

BINS = ((64, 256), (256, 1024), (1024, 4096), (4096, 16384), (16384, 65536))
CHUNK = 64
FOLDS, STEPS, RATE = 5, 600, 1e-3
# What is probed for what; the last two are the shuffled control.
PROBES = ("features", "embeddings", "shuffled, order processed", "shuffled, order in document")


@dataclass
class Pairs:
    """Drawn pairs of one input, and the document that it was made from.

    By bin, the differences [n, H] of each kind of entry and the labels [n] of each order. Kinds: features, embeddings,
    shuffled. Labels (1 where the first of the two entries comes first): document, processed. Differences are float16
    to keep many inputs in memory: an entry of a normalised feature is about 1.
    """

    request: str
    document: str
    differences: dict[tuple[int, str], Tensor] = field(default_factory=dict)
    labels: dict[tuple[int, str], Tensor] = field(default_factory=dict)


@torch.inference_mode()
def collect(pair: Pair, request: Request, features: Tensor, recent: int, count: int) -> Pairs:
    """Draw ``count`` pairs a bin outside the most recent ``recent`` entries and take their differences.

    features: context features c_j [N, H] of the prompt as it is (``replay`` keeps them). The target processes the
    shuffled prompt here. Bins that the input is too short for are left out, all of them if nothing older is left.
    """
    found = Pairs(request.id, request.id)
    ids = list(request.prompt_ids)
    older = max(0, len(ids) - recent) // CHUNK * CHUNK
    seed = int.from_bytes(hashlib.sha256(request.id.encode()).digest()[:8], "big")
    draw = np.random.default_rng(seed)
    order = shuffled_order(older, len(ids), draw)
    bins = [number for number, (low, _) in enumerate(BINS) if low < older]
    if not bins:
        return found
    processed_at = torch.empty_like(order)
    processed_at[order] = torch.arange(len(ids))
    shuffled = context_features(pair, [ids[i] for i in order.tolist()])[processed_at]
    rows = pair.target.embedding[torch.tensor(ids, device=pair.target.embedding.device)].float()
    kinds = {"features": features, "embeddings": rows, "shuffled": shuffled}
    for number in bins:
        first, second = sample_pairs(older, *BINS[number], count, draw)
        for kind, values in kinds.items():
            found.differences[number, kind] = (values[first] - values[second]).half().cpu()
        found.labels[number, "document"] = first < second
        found.labels[number, "processed"] = processed_at[first] < processed_at[second]
    return found


def context_features(pair: Pair, ids: Sequence[int]) -> Tensor:
    """Context features c_j [N, H] float32 of a prompt, processed from scratch."""
    target, drafter = pair.target, pair.drafter
    target.reserve(len(ids))
    taps, parts = tuple(drafter.config.target_layer_ids), []
    for start in range(0, len(ids), pair.chunk):
        step = target.forward(ids[start : start + pair.chunk], taps=taps, last_only=True)
        assert step.features is not None
        parts.append(drafter.context_features(step.features).float())
    return torch.cat(parts)


def shuffled_order(older: int, length: int, draw: np.random.Generator) -> Tensor:
    """Positions [length] in the order of processing: the first ``older``, a multiple of 64, permuted in chunks."""
    chunks = torch.from_numpy(draw.permutation(older // CHUNK))
    permuted = (chunks[:, None] * CHUNK + torch.arange(CHUNK)).flatten()
    return torch.cat((permuted, torch.arange(older, length)))


def sample_pairs(older: int, low: int, high: int, count: int, draw: np.random.Generator) -> tuple[Tensor, Tensor]:
    """Two positions [count] each, ``low`` to ``high - 1`` apart and below ``older``, in random order.

    Uniform over all such pairs, with replacement. Needs low < older.
    """
    apart = np.arange(low, min(high, older))
    room = older - apart  # places for the earlier entry
    separation = draw.choice(apart, count, p=room / room.sum())
    early = (draw.random(count) * (older - separation)).astype(np.int64)
    late = early + separation
    swap = draw.random(count) < 0.5
    return torch.from_numpy(np.where(swap, late, early)), torch.from_numpy(np.where(swap, early, late))


# ----------------------------------------------------------------------------------------------------------- the probe


def folds_of(documents: Sequence[str]) -> dict[str, int]:
    """Fold of each document: in hash order, dealt out in turn. Inputs of one document are never on both sides."""
    ordered = sorted(set(documents), key=lambda name: hashlib.sha256(name.encode()).digest())
    return {name: place % FOLDS for place, name in enumerate(ordered)}


def train_probes(x: Tensor, y: Tensor, fold: Tensor) -> Tensor:
    """Whether each pair is ordered rightly by the probe that has not seen its fold: bool [n].

    x [n, H] differences, y [n] bool, fold [n] in 0..FOLDS-1. One logistic regression per fold, all at once: full
    batch, Adam (beta 0.9, 0.999), from zero, on x standardised by the training pairs' mean and deviation.
    """
    x, target = x.float(), y.float()[:, None]
    train = torch.stack([fold != k for k in range(FOLDS)], 1).float()
    share = train / train.sum(0).clamp(min=1)
    mean = share.T @ x
    deviation = (share.T @ x.square() - mean.square()).clamp(min=0).sqrt().clamp(min=1e-6)  # [FOLDS, H]
    weight, bias = torch.zeros_like(mean), torch.zeros(FOLDS)
    state = [torch.zeros_like(p) for p in (weight, bias) for _ in range(2)]

    def logits() -> Tensor:
        # Standardising the weights instead of the data: the data are read by all folds at once.
        scaled = weight / deviation
        return x @ scaled.T + (bias - (scaled * mean).sum(1))

    for step in range(1, STEPS + 1):
        error = (torch.sigmoid(logits()) - target) * share
        total = error.sum(0)
        gradients = ((error.T @ x - total[:, None] * mean) / deviation, total)
        for place, (value, gradient) in enumerate(zip((weight, bias), gradients, strict=True)):
            first, second = state[2 * place : 2 * place + 2]
            first.lerp_(gradient, 0.1)
            second.lerp_(gradient.square(), 0.001)
            value -= RATE * (first / (1 - 0.9**step)) / ((second / (1 - 0.999**step)).sqrt() + 1e-8)
    said = (logits() > 0).gather(1, fold[:, None])[:, 0]
    return said == y


def probe(inputs: Sequence[Pairs]) -> list[dict[str, Any]]:
    """One row per bin, probe and input: low, high (separation), arm, request, fold, accuracy, pairs.

    Bins with inputs of fewer documents than folds are left out: a fold would have nothing to test.
    """
    rows: list[dict[str, Any]] = []
    for number, (low, high) in enumerate(BINS):
        here = [each for each in inputs if (number, "document") in each.labels]
        folds = folds_of([each.document for each in here])
        if len(folds) < FOLDS:
            continue
        owner = torch.cat([torch.full((len(e.labels[number, "document"]),), i) for i, e in enumerate(here)])
        fold = torch.tensor([folds[each.document] for each in here])[owner]
        for arm, kind, label in zip(
            PROBES,
            ("features", "embeddings", "shuffled", "shuffled"),
            ("document", "document", "processed", "document"),
            strict=True,
        ):
            x = torch.cat([each.differences[number, kind] for each in here])
            right = train_probes(x, torch.cat([each.labels[number, label] for each in here]), fold).float()
            for place, each in enumerate(here):
                mine = right[owner == place]
                where = {"low": low, "high": high, "arm": arm, "request": each.request, "fold": folds[each.document]}
                rows.append({**where, "accuracy": float(mine.mean()), "pairs": len(mine)})
    return rows
