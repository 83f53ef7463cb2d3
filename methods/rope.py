"""Rotary position embeddings: the frequency tables of the drafters, and the rotation of a vector to a position.

A rotation acts on pairs ``(i, i + n)`` of the first ``2n`` dims (the layout called rotate_half or NeoX); dims from
``2n`` on pass through. A query rotated to position ``x`` meets a key rotated to position ``y`` at distance ``x - y``,
so a query rotated to ``D + r`` meets *unrotated* keys at distance ``D + r``: the read of FOLD's far memory (section
3.3).

Angles are computed in float64 and only their cosines and sines are rounded, so position 1,000,000 is as exact as 0. (A
float32 angle is off by about 3e-3 rad at position 131K.)
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from methods.reading import YarnScaling

ROPE_TYPES = ("default", "llama3", "proportional", "yarn")


@dataclass(frozen=True, eq=False)
class Rope:
    """Frequencies of a rotary embedding.

    ``inv_freq``: float64 ``[n]`` on the CPU, radians per position of pair ``(i, i + n)``; zero for a pair that never
    turns. ``mscale``: multiplies cos and sin of queries and of keys (YaRN's attention factor), hence logits by ``mscale
    ** 2``. ``theta``, ``dim``, ``rotated``: base, exponent denominator and number of turning pairs, from which
    :meth:`yarn` starts.
    """

    inv_freq: Tensor
    mscale: float = 1.0
    theta: float | None = None
    dim: int | None = None
    rotated: int | None = None

    def yarn(self, scaling: YarnScaling) -> Rope:
        """The same embedding under YaRN (Appendix B.3) with one static factor.

        Starts from the base frequencies ``theta ** (-2i / dim)``: a drafter that carries llama3 scaling has it
        *replaced*, as when an engine overrides ``rope_type``; the paper does not say. Of a proportional embedding only
        the turning pairs are scaled, and the temperature acts on the whole head, since one cos/sin table covers it.
        Source: jquesnelle/yarn LlamaYaRNScaledRotaryEmbedding.py; transformers modeling_rope_utils.py.
        """
        if self.theta is None or self.dim is None:
            raise ValueError("Rope.yarn: this Rope does not know its theta and dim; make it with build_rope")
        if scaling.factor < 1 or scaling.reference < 1:
            raise ValueError(
                f"YaRN needs factor >= 1 and reference >= 1, got factor {scaling.factor}, reference {scaling.reference}"
            )
        pairs = len(self.inv_freq)
        turning = pairs if self.rotated is None else self.rotated
        freq = _yarn_frequencies(self.theta, self.dim, turning, scaling.factor, scaling.reference)
        mscale = _yarn_mscale(scaling.factor) if scaling.temperature else 1.0
        return Rope(_still_tail(freq, pairs), mscale, self.theta, self.dim, self.rotated)


def build_rope(params: Mapping[str, Any], head_dim: int) -> Rope:
    """The embedding that a checkpoint's rope parameters describe.

    ``params``: as in a Hugging Face config's ``rope_parameters``: ``rope_theta``, ``rope_type`` (default, llama3,
    proportional or yarn) with that type's own keys, ``partial_rotary_factor``. ``head_dim``: dims of one head.

    ``partial_rotary_factor`` has two meanings, and the type decides: *prefix* (default, llama3, yarn) turns the first
    ``int(head_dim * factor)`` dims as if they were the whole head; *proportional* (Gemma-4) keeps the whole head's
    exponents and pairs and turns the first ``int(factor * head_dim // 2)`` pairs.
    Raises ValueError for an unknown type, a missing key or a rotary size that is not even.
    Source: transformers 5.24 modeling_rope_utils.py.
    """
    kind = params.get("rope_type") or params.get("type") or "default"
    if kind not in ROPE_TYPES:
        raise ValueError(f"rope_type {kind!r} is not supported; use one of {', '.join(ROPE_TYPES)}")
    theta = float(_needed(params, "rope_theta", kind))
    given = params.get("partial_rotary_factor")
    fraction = 1.0 if given is None else float(given)
    if not 0 < fraction <= 1:
        raise ValueError(f"partial_rotary_factor is {fraction}: must be in (0, 1]")

    if kind == "proportional":
        turning = int(fraction * head_dim // 2)
        freq = _frequencies(theta, head_dim, turning) / float(params.get("factor") or 1.0)
        return Rope(_still_tail(freq, head_dim // 2), 1.0, theta, head_dim, turning)

    dim = int(head_dim * fraction)
    if dim < 2 or dim % 2:
        raise ValueError(f"rotary size {dim} of head_dim {head_dim} must be even; check partial_rotary_factor")
    if kind == "llama3":
        freq = _llama3_frequencies(
            _frequencies(theta, dim, dim // 2),
            factor=float(_needed(params, "factor", kind)),
            low=float(_needed(params, "low_freq_factor", kind)),
            high=float(_needed(params, "high_freq_factor", kind)),
            original=float(_needed(params, "original_max_position_embeddings", kind)),
        )
        return Rope(freq, 1.0, theta, dim)
    if kind == "yarn":
        factor = float(_needed(params, "factor", kind))
        freq = _yarn_frequencies(
            theta,
            dim,
            dim // 2,
            factor,
            float(_needed(params, "original_max_position_embeddings", kind)),
            beta_fast=float(params.get("beta_fast") or 32.0),
            beta_slow=float(params.get("beta_slow") or 1.0),
            truncate=bool(params.get("truncate", True)),
        )
        return Rope(freq, _checkpoint_mscale(params, factor), theta, dim)
    return Rope(_frequencies(theta, dim, dim // 2), 1.0, theta, dim)


def yarn_factor(P: int, G: int, Q: int, R: int) -> float:
    """YaRN's factor of a request, ``max(1, ceil((P + G + Q) / 256) * 256 / R)`` (Appendix B.3).

    P: prompt tokens, G: generation limit, Q: block positions, R: reference length of the drafter.
    """
    return max(1.0, math.ceil((P + G + Q) / 256) * 256 / R)


def tables(
    positions: Tensor | Sequence[float], rope: Rope, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Cosines and signed sines ``[n_pos, 1, 2n]`` of the positions, for :func:`turn`; float64 for float64, else
    float32."""
    where = torch.as_tensor(positions, dtype=torch.float64, device=device)
    angle = where[:, None, None] * rope.inv_freq.to(device)
    cos, sin = torch.cos(angle) * rope.mscale, torch.sin(angle) * rope.mscale
    exact = compute_dtype(dtype)
    return torch.cat((cos, cos), -1).to(exact), torch.cat((-sin, sin), -1).to(exact)


def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """``x [..., n_pos, H, d]`` rotated by :func:`tables`; computed in the tables' dtype, returned in x's."""
    width = cos.shape[-1]
    if width < x.shape[-1]:
        return torch.cat((turn(x[..., :width], cos, sin), x[..., width:]), -1)
    exact = x.to(cos.dtype)
    swapped = exact.roll(width // 2, -1)  # the other of each pair
    return torch.addcmul(exact * cos, swapped, sin).to(x.dtype)


def rotate(x: Tensor, positions: Tensor | Sequence[float], rope: Rope) -> Tensor:
    """``x [..., n_pos, H, d]`` rotated to ``positions [n_pos]`` (integers or float64); any float dtype, returned in
    it.
    """
    return turn(x, *tables(positions, rope, x.dtype, x.device))


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype that sums are held in: float64 for float64, float32 for everything shorter."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _frequencies(theta: float, dim: int, pairs: int) -> Tensor:
    return theta ** (-2.0 * torch.arange(pairs, dtype=torch.float64) / dim)


def _still_tail(freq: Tensor, pairs: int) -> Tensor:
    return torch.cat((freq, freq.new_zeros(pairs - len(freq))))


def _llama3_frequencies(freq: Tensor, *, factor: float, low: float, high: float, original: float) -> Tensor:
    """Llama 3.1's scaling: slow pairs divided by ``factor``, fast ones kept, a linear blend in ``original /
    wavelength``.
    """
    turns = original * freq / (2 * math.pi)
    keep = ((turns - low) / (high - low)).clamp(0, 1)
    return keep * freq + (1 - keep) * freq / factor


def _yarn_frequencies(
    theta: float,
    dim: int,
    pairs: int,
    factor: float,
    original: float,
    beta_fast: float = 32.0,
    beta_slow: float = 1.0,
    truncate: bool = True,
) -> Tensor:
    """Pairs with more than ``beta_fast`` turns in ``original`` positions are kept, those with fewer than ``beta_slow``
    are divided by ``factor``, and a ramp linear in the pair index joins them."""

    def pair_at(turns: float) -> float:
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = pair_at(beta_fast), pair_at(beta_slow)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    freq = _frequencies(theta, dim, pairs)
    ramp = ((torch.arange(pairs, dtype=torch.float64) - low) / (high - low)).clamp(0, 1)
    return freq / factor * ramp + freq * (1 - ramp)


def _yarn_mscale(factor: float, weight: float = 1.0) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def _checkpoint_mscale(params: Mapping[str, Any], factor: float) -> float:
    """A checkpoint's own attention factor wins; DeepSeek's pair mscale / mscale_all_dim comes next; else YaRN's
    formula.
    """
    if params.get("attention_factor") is not None:
        return float(params["attention_factor"])
    if params.get("mscale") and params.get("mscale_all_dim"):
        return _yarn_mscale(factor, float(params["mscale"])) / _yarn_mscale(factor, float(params["mscale_all_dim"]))
    return _yarn_mscale(factor)


def _needed(params: Mapping[str, Any], key: str, kind: str) -> Any:
    if params.get(key) is None:
        raise ValueError(f"rope parameters of type {kind!r} lack {key!r}; add it to the drafter's config")
    return params[key]
