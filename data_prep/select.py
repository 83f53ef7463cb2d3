"""Which examples of a data set are used: the context rule, hash order, exclude lists, and counts by rule."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any


class PrepError(ValueError):
    """Preparation cannot go on. The message is one line: what, where, what to do. Commands exit with code 2."""


class NoExamples(PrepError):
    """A benchmark has nothing for this target, for example inputs of 180K tokens for a limit of 128K."""


def hash_key(example_id: str) -> str:
    """sha256 hex digest of the UTF-8 id. The paper fixes "a fixed hash order of their identifiers" but not the hash."""
    return hashlib.sha256(example_id.encode()).hexdigest()


def first_by_hash(ids: Iterable[str], n: int | None) -> set[str]:
    """The first n of `ids` in hash order; all of them for n None. Raises PrepError if an id occurs twice."""
    every = list(ids)
    if len(set(every)) != len(every):
        twice = next(example for example, times in Counter(every).items() if times > 1)
        raise PrepError(f"id {twice!r} occurs twice in the data set; it is damaged, fetch it again")
    return set(every if n is None else sorted(every, key=hash_key)[:n])


def read_exclude_list(path: str | None) -> frozenset[str]:
    """Ids to leave out, one a line; empty lines and lines starting with # do not count. Raises PrepError."""
    if path is None:
        return frozenset()
    try:
        lines = Path(path).expanduser().read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise PrepError(f"exclude list {path} cannot be read ({error}); correct benchmark.exclude") from None
    return frozenset(line.strip() for line in lines if line.strip() and not line.startswith("#"))


class Counts:
    """How many examples of each task were kept, and left out by which rule: what the manifest reports."""

    def __init__(self) -> None:
        self.kept: Counter[str] = Counter()
        self.excluded: dict[str, Counter[str]] = {}

    def keep(self, task: str) -> None:
        """Count one example of `task` as used."""
        self.kept[task] += 1

    def exclude(self, task: str, reason: str, number: int = 1) -> None:
        """Count `number` examples of `task` as left out for `reason`."""
        if number:
            self.excluded.setdefault(task, Counter())[reason] += number

    def as_dict(self) -> dict[str, Any]:
        """{task: {in, kept, excluded: {reason: count}}}, the form in the manifest."""
        report = {}
        for task in sorted({*self.kept, *self.excluded}):
            excluded = dict(sorted(self.excluded.get(task, Counter()).items()))
            kept = self.kept[task]
            report[task] = {"in": kept + sum(excluded.values()), "kept": kept, "excluded": excluded}
        return report
