"""One prompt on its way from a loader to the request file."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Prompt:
    """An example before tokenisation (text) or after it (ids), exactly one of the two.

    id: unique within the benchmark. task: the row of Table 7. text: the user turn, or the raw text to continue.
    ids: the whole input, for loaders that build token-exact inputs.
    """

    id: str
    task: str
    meta: dict[str, Any] = field(default_factory=dict)
    text: str | None = None
    ids: tuple[int, ...] | None = None
