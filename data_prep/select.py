"""Which examples of a data set are used: the context rule, hash order, exclude lists, and counts by rule."""

from __future__ import annotations

import hashlib
import heapq
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")


class PrepError(ValueError):
    """Preparation cannot go on. The message is one line: what, where, what to do. Commands exit with code 2."""


def hash_key(example_id: str) -> str:
    """sha256 hex digest of the UTF-8 id. The paper fixes "a fixed hash order of their identifiers" but not the hash."""
    return hashlib.sha256(example_id.encode()).hexdigest()


def first_by_hash(items: Iterable[T], n: int | None, key: Callable[[T], str]) -> list[T]:
    """The first n of `items` in hash order of their ids (`key`); all of them, in their own order, for n None.

    Keeps at most n items in memory, so the stream may be larger than memory.
    """
    if n is None:
        return list(items)
    return heapq.nsmallest(n, items, key=lambda item: hash_key(key(item)))


def read_exclude_list(path: str | None) -> frozenset[str]:
    """Ids to leave out, one a line; empty lines and lines starting with # do not count. Raises PrepError."""
    if path is None:
        return frozenset()
    try:
        lines = Path(path).expanduser().read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise PrepError(f"exclude list {path} cannot be read ({error}); correct benchmark.exclude") from None
    return frozenset(line.strip() for line in lines if line.strip() and not line.startswith("#"))


class Counts:
    """How many examples of each task were seen, kept, and left out by which rule: what the manifest reports."""

    def __init__(self) -> None:
        self.seen: Counter[str] = Counter()
        self.kept: Counter[str] = Counter()
        self.excluded: dict[str, Counter[str]] = {}

    def exclude(self, task: str, reason: str, number: int = 1) -> None:
        """Count `number` examples of `task` as left out for `reason`."""
        if number:
            self.excluded.setdefault(task, Counter())[reason] += number

    def as_dict(self) -> dict[str, Any]:
        """{task: {in, kept, excluded: {reason: count}}}, the form in the manifest."""
        return {
            task: {
                "in": self.seen[task],
                "kept": self.kept[task],
                "excluded": dict(sorted(self.excluded.get(task, Counter()).items())),
            }
            for task in sorted({*self.seen, *self.kept, *self.excluded})
        }
