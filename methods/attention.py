"""The dense execution of a read plan: the definition that every faster executor is tested against.

One branch at a time, every logit of every context entry is formed, entries that a row does not read are masked, and the
branches are merged by their masses (Eqs. 2-4). Nothing is cached and nothing is skipped.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from methods.reading import (
    All,
    Branch,
    Entries,
    Kept,
    Last,
    LogQueryScale,
    Older,
    ReadPlan,
    Recent,
    Renumbered,
    Retrieved,
    SharedDistance,
    Sliding,
    SlidingGap,
    TrueDistance,
)
from methods.rope import Rope, compute_dtype, rotate


@dataclass(frozen=True, eq=False)
class Read:
    """What a block query read.

    ``out [B, Hq, dv]`` in the query's dtype; ``lse [B, Hq]`` natural log of the total mass ``Z_N + Z_F``; ``weights
    [B, Hq, N]`` the share of ``out`` that each context entry contributed (the rest went to the block), if asked for.
    ``lse`` and ``weights`` are float64 for float64 inputs, else float32.
    """

    out: Tensor
    lse: Tensor
    weights: Tensor | None = None


def dense_read(
    plan: ReadPlan,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kb: Tensor,
    vb: Tensor,
    *,
    rope: Rope,
    scale: float,
    block_causal: bool = False,
    retrieved: Tensor | None = None,
    with_weights: bool = False,
) -> Read:
    """Read the context and the draft block by ``plan`` (section 3.3; Appendix B.3).

    ``q [B, Hq, d]``, context ``k [N, Hkv, d]``, ``v [N, Hkv, dv]``, block ``kb [B, Hkv, d]``, ``vb [B, Hkv, dv]``:
    after the q and k norms, not rotated; one floating dtype and device for all. Context entry j stands at position j,
    block row r at ``N + r``. Query head h reads key head ``h // (Hq // Hkv)``. Sums are float64 for float64 inputs,
    else float32.

    ``rope``: the drafter's embedding; a plan with YaRN scales it. ``scale``: softmax scale (1/sqrt(d), or 1.0 for
    Gemma-4). ``block_causal``: row r reads block keys 0..r only. ``retrieved [M]``: ascending context positions for a
    plan that retrieves. Raises ValueError for shapes that do not fit, or when a retrieving plan gets no positions.
    """
    _check_shapes(q, k, v, kb, vb)
    exact = compute_dtype(q.dtype)
    rope = rope if plan.rope is None else rope.yarn(plan.rope)
    rows, heads, kv_heads = q.shape[0], q.shape[1], kb.shape[1]
    context = k.shape[0]
    query, keys, values, block_keys, block_values = (x.to(exact) for x in (q, k, v, kb, vb))
    if plan.query_scale is not None:
        query = query * query_factors(plan.query_scale, context, rows, exact, q.device)[:, None, None]

    outs, masses, shares = [], [], []
    for branch in plan.branches:
        chosen, allowed = entries_read(branch.entries, context, rows, q.device, retrieved)
        query_at, keys_at = _positions(branch, chosen, context, rows)
        logits = _logits(rotate(query, query_at, rope), rotate(keys[chosen], keys_at, rope), scale)
        logits = logits.masked_fill(~allowed[:, None], -math.inf)
        branch_values = values[chosen]
        if branch.block:
            turned = rotate(block_keys, query_at, rope)
            block_logits = _logits(rotate(query, query_at, rope), turned, scale)
            if block_causal:
                later = torch.ones(rows, rows, dtype=torch.bool, device=q.device).triu(1)
                block_logits = block_logits.masked_fill(later[:, None], -math.inf)
            logits = torch.cat((logits, block_logits), -1)
            branch_values = torch.cat((branch_values, block_values))

        sharpened = branch.sharpen * logits
        total = torch.logsumexp(sharpened, -1)  # -inf for a row that reads nothing here
        weights = torch.exp(sharpened - total.masked_fill(total == -math.inf, 0.0)[..., None])
        grouped = weights.unflatten(1, (kv_heads, heads // kv_heads))
        outs.append(torch.einsum("bkgn,nkd->bkgd", grouped, branch_values).flatten(1, 2))  # Eq. 2
        masses.append(total / branch.sharpen)  # Eq. 3
        shares.append(weights.new_zeros(rows, heads, context).index_copy_(2, chosen, weights[..., : len(chosen)]))

    mass = torch.stack(masses)
    part = torch.softmax(mass, 0)[..., None]  # Eq. 4
    out = (torch.stack(outs) * part).sum(0).to(q.dtype)
    entry_weights = (torch.stack(shares) * part).sum(0) if with_weights else None
    return Read(out, torch.logsumexp(mass, 0), entry_weights)


def entries_read(
    entries: Entries, context: int, rows: int, device: torch.device, retrieved: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Context positions ``[M]`` that any row of the block may read, ascending, and which row reads which, bool ``[B,
    M]``.

    Raises ValueError if ``entries`` are retrieved at run time and no positions are given.
    """
    if isinstance(entries, Retrieved):
        if retrieved is None:
            raise ValueError("this plan retrieves entries at run time; pass their positions as `retrieved`")
        chosen = retrieved.to(device=device, dtype=torch.long)
    elif isinstance(entries, Kept):
        chosen = torch.arange(context, device=device)
        if context > entries.sinks + entries.recent:
            chosen = torch.cat((chosen[: entries.sinks], chosen[context - entries.recent :]))
    elif isinstance(entries, Last):
        chosen = torch.arange(max(0, context - entries.count), context, device=device)
    else:
        chosen = torch.arange(context, device=device)
    distance = context + torch.arange(rows, device=device)[:, None] - chosen
    if isinstance(entries, Recent):
        allowed = distance < entries.window + rows
    elif isinstance(entries, Older):
        allowed = distance >= entries.window + rows
    elif isinstance(entries, Sliding):
        allowed = distance < entries.size
    elif isinstance(entries, SlidingGap):
        allowed = distance >= entries.size
    elif isinstance(entries, Retrieved) and entries.beyond is not None:
        allowed = distance >= entries.beyond
    else:
        assert isinstance(entries, All | Last | Kept | Retrieved)
        allowed = torch.ones_like(distance, dtype=torch.bool)
    return chosen, allowed


def query_factors(
    scaling: LogQueryScale, context: int, rows: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """ReRoPE's ``max(1, log(p + 1) / log(reference))`` of each block row ``[B]``, ``p = N + r`` counted from 0."""
    place = torch.arange(context + 1, context + 1 + rows, dtype=torch.float64, device=device)
    return (torch.log(place) / math.log(scaling.reference)).clamp(min=1.0).to(dtype)


def _positions(branch: Branch, chosen: Tensor, context: int, rows: int) -> tuple[Tensor, Tensor]:
    """Positions of the query rows (and of the block's keys) ``[B]`` and of the chosen entries ``[M]``; their
    differences are the branch's distances."""
    row = torch.arange(rows, device=chosen.device)
    match branch.placement:
        case TrueDistance():
            return context + row, chosen
        case Renumbered():
            return len(chosen) + row, torch.arange(len(chosen), device=chosen.device)
        case SharedDistance(distance, follows_block):
            if branch.block:
                raise ValueError("a branch that reads at a shared distance cannot also read the block's own keys")
            return distance + (row if follows_block else torch.zeros_like(row)), torch.zeros_like(chosen)


def _logits(query: Tensor, keys: Tensor, scale: float) -> Tensor:
    """``[B, Hq, M]`` from ``query [B, Hq, d]`` and ``keys [M, Hkv, d]``, query heads grouped by key head."""
    grouped = query.unflatten(1, (keys.shape[1], -1))
    return torch.einsum("bkgd,nkd->bkgn", grouped, keys).flatten(1, 2) * scale


def _check_shapes(q: Tensor, k: Tensor, v: Tensor, kb: Tensor, vb: Tensor) -> None:
    fits = (
        q.dim() == k.dim() == v.dim() == kb.dim() == vb.dim() == 3
        and kb.shape == (q.shape[0], k.shape[1], q.shape[2])
        and k.shape[2] == q.shape[2]
        and v.shape[:2] == k.shape[:2]
        and vb.shape == (*kb.shape[:2], v.shape[2])
        and q.shape[1] % kb.shape[1] == 0
    )
    if not fits:
        shapes = ", ".join(str(tuple(x.shape)) for x in (q, k, v, kb, vb))
        raise ValueError(
            "dense_read wants q [B,Hq,d], k [N,Hkv,d], v [N,Hkv,dv], kb [B,Hkv,d], vb [B,Hkv,dv], "
            f"Hq a multiple of Hkv; got {shapes}"
        )
