"""What a loader is given, and what it gives back: the two types between data_prep.prepare and the benchmarks' files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from data_prep.config import BenchmarkConfig
from data_prep.fetch import SourceFile
from data_prep.prompts import PROMPTS, load_prompt
from data_prep.rows import RowError, located, read_rows
from data_prep.select import Counts, PrepError
from data_prep.tokens import TargetSpec


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


@dataclass
class Job:
    """One preparation. facts: the loader's own entries of the manifest (choices, prompt sources, versions)."""

    config: BenchmarkConfig
    tokenizer: Any
    target: TargetSpec
    files: Sequence[SourceFile]
    source: Path | None
    counts: Counts = field(default_factory=Counts)
    facts: dict[str, Any] = field(default_factory=dict)

    def official_prompt(self, name: str) -> str:
        """The upstream prompt `name`, noted in the manifest."""
        text = load_prompt(name, self.source)
        self.facts.setdefault("prompts", {})[name] = PROMPTS[name].facts()
        return text

    def options(self, **defaults: Any) -> dict[str, Any]:
        """benchmark.options over `defaults`. Raises PrepError for an option the loader does not have."""
        if unknown := sorted(self.config.options.keys() - defaults.keys()):
            has = ", ".join(sorted(defaults)) or "none"
            raise PrepError(f"benchmark {self.config.name} has no option {unknown[0]!r}; its options: {has}")
        return {**defaults, **self.config.options}

    def rows(self, columns: Sequence[str], key: str = "", member: str = "") -> Iterator[Row]:
        """Rows of the files of one source (`key`), in order."""
        for file in self.files:
            if file.key == key:
                for number, values in read_rows(file.path, columns, member):
                    yield Row(values, file.path, number)


@dataclass(frozen=True)
class Row:
    """A row with its place, for errors."""

    values: dict[str, Any]
    path: Path
    number: int

    def text(self, name: str) -> str:
        """A column that must be a string. Raises PrepError with file and row."""
        value = self.values.get(name)
        if not isinstance(value, str):
            what = "missing" if name not in self.values else f"{value!r:.60}, not a string"
            raise self.error(f"column {name!r} is {what}")
        return self.unicode(name, value)

    def key(self, name: str) -> str:
        """A column that identifies the row: a string that is not empty."""
        value = self.text(name)
        if not value:
            raise self.error(f"column {name!r} is empty")
        return value

    def unicode(self, name: str, value: str) -> str:
        """`value` of column `name`, which must be text: JSON can escape half a surrogate pair, tokenizers refuse it."""
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise self.error(f"column {name!r} holds half a surrogate pair at character {error.start}") from None
        return value

    def error(self, what: str) -> PrepError:
        """An error that names this row."""
        return located(self.path, self.number, RowError(what))


@contextmanager
def at(row: Row) -> Iterator[None]:
    """Turn a surprise inside a row's nested values into an error that names the row."""
    try:
        yield
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        raise row.error(f"unexpected shape ({type(error).__name__}: {error})") from None
