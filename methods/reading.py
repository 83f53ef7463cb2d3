"""The vocabulary of a context read: what a block query reads, where it places it, how the parts are weighed.

Every long-context method of the paper (section 3.3 and Appendix B.3) is a :class:`ReadPlan`: a few branches, each a set
of context entries with a placement, merged by their masses. A plan is data; ``methods.attention`` executes it densely
(the definition), ``methods.reader`` executes it against a request's cache, and the engines translate it to their own
kernels.

Notation (0-indexed): context entries ``j = 0..N-1``, anchor position ``t = N``, block row ``r = 0..B-1`` at ``p = N +
r``, ``D = W + B``. ``p - j`` is the true distance of a pair.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol

from torch import Tensor

# -------------------------------------------------------------------------------------------- which entries a row reads


@dataclass(frozen=True)
class All:
    """Every context entry."""


@dataclass(frozen=True)
class Recent:
    """The paper's N_p without the block: entries with ``p - j < W + B`` (a bound per row, section 3.3)."""

    window: int


@dataclass(frozen=True)
class Older:
    """The complement of :class:`Recent`, the far memory F_p: entries with ``p - j >= W + B``."""

    window: int


@dataclass(frozen=True)
class Sliding:
    """A drafter layer's own sliding window: entries with ``p - j < size`` (the query itself counts as one)."""

    size: int


@dataclass(frozen=True)
class SlidingGap:
    """Entries that a sliding layer's window has left: ``p - j >= size`` (the other reading of Appendix B.3's far
    start).
    """

    size: int


@dataclass(frozen=True)
class Last:
    """One shared window: the last ``count`` context entries, the same for every row (SGLang's draft window)."""

    count: int


@dataclass(frozen=True)
class Kept:
    """Attention sinks and a recent window, the same for every row: the first ``sinks`` and the last ``recent``
    entries.
    """

    sinks: int
    recent: int


@dataclass(frozen=True)
class Retrieved:
    """Entries chosen at run time by the method's state (InfLLM, CMR), the same for every row.

    With ``beyond`` set, row r reads only those of them with ``p - j >= beyond`` (disjoint from a :class:`Recent`
    branch).
    """

    beyond: int | None = None


Entries = All | Recent | Older | Sliding | SlidingGap | Last | Kept | Retrieved

# ------------------------------------------------------------------------------------------------- where it places them


@dataclass(frozen=True)
class TrueDistance:
    """Entry j is read at ``p - j``; block key i at ``r - i``."""


@dataclass(frozen=True)
class Renumbered:
    """The branch's M entries sit at 0..M-1 in order, block row and key r at ``M + r``."""


@dataclass(frozen=True)
class SharedDistance:
    """Every entry is read at one distance: ``distance + r`` if it follows the block (FOLD, Eq. 1), else
    ``distance``.
    """

    distance: int
    follows_block: bool


Placement = TrueDistance | Renumbered | SharedDistance

# ------------------------------------------------------------------------------------------------------------- the plan


@dataclass(frozen=True)
class Branch:
    """One part of a read.

    ``sharpen`` is the concentration factor alpha >= 1: the branch's softmax uses ``alpha * logit`` and its mass is
    ``(sum exp(alpha * logit)) ** (1 / alpha)`` (Eqs. 2, 3). ``block=True`` on the one branch that also reads the draft
    block's own keys.
    """

    entries: Entries
    placement: Placement
    sharpen: float = 1.0
    block: bool = False


@dataclass(frozen=True)
class YarnScaling:
    """YaRN frequencies with one static factor for the request; ``temperature`` applies 0.1 ln(factor) + 1 to cos and
    sin.
    """

    factor: float
    reference: int
    temperature: bool = True


@dataclass(frozen=True)
class LogQueryScale:
    """ReRoPE's query factor ``max(1, log(p + 1) / log(reference))``, p the 0-indexed absolute position."""

    reference: int


@dataclass(frozen=True)
class ReadPlan:
    """How one drafter layer reads its context; branches are merged by mass (Eq. 4). All alpha = 1 is a single
    softmax.
    """

    branches: tuple[Branch, ...]
    rope: YarnScaling | None = None
    query_scale: LogQueryScale | None = None


# --------------------------------------------------------------------------------------- what a plan is made for and of


@dataclass(frozen=True)
class LayerGeometry:
    """One drafter layer. ``native_window`` is set for sliding layers; ``block_causal`` masks later block keys in the
    block.
    """

    kind: Literal["full_attention", "sliding_attention"] = "full_attention"
    native_window: int | None = None
    block_causal: bool = False

    def __post_init__(self) -> None:
        check_choice("LayerGeometry.kind", self.kind, ("full_attention", "sliding_attention"))
        if (self.kind == "sliding_attention") != (self.native_window is not None):
            raise ValueError(f"{self.kind} with native_window {self.native_window!r}: sliding layers alone have one")
        if self.native_window is not None:
            check_count("LayerGeometry.native_window", self.native_window)


@dataclass(frozen=True)
class RequestGeometry:
    """Lengths fixed for a request: prompt tokens P, generation limit G, block positions B (YaRN's Q)."""

    prompt: int
    limit: int
    block: int

    def __post_init__(self) -> None:
        check_count("RequestGeometry.prompt", self.prompt)
        check_count("RequestGeometry.limit", self.limit)
        check_count("RequestGeometry.block", self.block)


# ----------------------------------------------------------------------------------------------------- what a method is


class Method(Protocol):
    """A way for a drafter to read its context: a frozen dataclass of options that makes one plan per layer and request.

    ``layers`` names the layers it changes; a sliding layer that it leaves alone keeps the read it was trained with. A
    method whose plan retrieves entries also has ``new_state(geometry, cache, request) -> RetrievalState``.
    """

    name: ClassVar[str]

    @property
    def layers(self) -> Layers: ...

    def plan(self, layer: LayerGeometry, request: RequestGeometry) -> ReadPlan: ...


class RetrievalState(Protocol):
    """What a retrieving method remembers within one request (InfLLM's representations, CMR's selection).

    Called by a reader in this order: ``prepare`` once after prefill; each round ``positions`` per layer, ``observe``
    per layer if ``observes``, ``committed``, and ``target_attention`` if ``wants_target_attention()`` said so before
    the verification.
    """

    observes: bool  # wants the attention weights of each read

    def prepare(self) -> None: ...

    def committed(self, length: int) -> None: ...

    def wants_target_attention(self) -> bool: ...

    def target_attention(self, weights: Tensor) -> None: ...

    def positions(self, layer: int, q: Tensor) -> Tensor: ...

    def observe(self, layer: int, first: int, weights: Tensor) -> None: ...

    def nbytes(self) -> int: ...

    def activity(self) -> dict[str, int]: ...


Layers = Literal["all", "full_attention"]


def as_trained(layer: LayerGeometry) -> ReadPlan:
    """The read the drafter was trained with: the whole context, or a sliding layer's own window, at true distances."""
    entries = All() if layer.native_window is None else Sliding(layer.native_window)
    return ReadPlan((Branch(entries, TrueDistance(), block=True),))


def check_count(where: str, value: object, least: int = 1) -> None:
    """One-line ValueError unless ``value`` is an integer of at least ``least``. ``where`` names the option."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{where} is {value!r}: must be an integer of at least {least}")


def check_switch(where: str, value: object) -> None:
    """One-line ValueError unless ``value`` is true or false. ``where`` names the option."""
    if not isinstance(value, bool):
        raise ValueError(f"{where} is {value!r}: must be true or false")


def check_choice(where: str, value: object, choices: tuple[object, ...]) -> None:
    """One-line ValueError unless ``value`` is one of ``choices``. ``where`` names the option."""
    if value not in choices:
        raise ValueError(f"{where} is {value!r}: must be one of {', '.join(map(str, choices))}")
