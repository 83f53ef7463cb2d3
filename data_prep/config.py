"""The schema of conf/benchmark/*.yaml. harness/config.py embeds it, so an unknown or ill-typed key is refused there."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Optional


@dataclass
class SourceConfig:
    """Where (a part of) a benchmark's data lies on the Hugging Face Hub.

    key: which part, where a benchmark has several; the loader knows the names. repo: data set id. revision: commit, or
    a branch name whose commit is then recorded at the first download. files: patterns of paths in the data set. local:
    further names that are accepted in a local copy, with ./ only directly in its folder. sha256: known hashes by file
    name; the others are recorded when a file is first used and verified from then on. licence, size, gated: what
    `fold-prep --list` shows.
    """

    key: str = ""
    repo: str = ""
    revision: str = "main"
    files: list[str] = field(default_factory=list)
    local: list[str] = field(default_factory=list)
    sha256: dict[str, str] = field(default_factory=dict)
    licence: str = ""
    size: str = ""
    gated: str = ""


@dataclass
class BenchmarkConfig:
    """One benchmark, or a group of them.

    name: folder of its request files. members: for a group, the names it stands for; every other field is then unused.
    loader: key of data_prep.prepare.LOADERS. tasks: its parts, the rows of the paper's Table 7. max_new_tokens:
    generation limit (Table 7). chat: chat template (general tasks, SWE-bench, SPEED-Bench) or raw text (code).
    n: examples to keep per task (and level where there are levels), by hash order of their ids; null keeps all.
    levels: RepoBench's own levels, or the demo's lengths. min_prompt_tokens: drop shorter inputs (the paper's DSpark
    runs keep those of at least 16K tokens). exclude: text file with one id a line to leave out. options: what only one
    loader understands, checked by it.
    """

    name: str = ""
    members: list[str] = field(default_factory=list)
    loader: str = ""
    tasks: list[str] = field(default_factory=list)
    max_new_tokens: int = 0
    chat: bool = True
    n: Optional[int] = None  # noqa: UP045 (omegaconf 2.3 reads the schema and wants typing.Optional)
    levels: list[str] = field(default_factory=list)
    min_prompt_tokens: int = 0
    exclude: Optional[str] = None  # noqa: UP045
    sources: list[SourceConfig] = field(default_factory=list)
    options: dict[str, Any] = field(default_factory=dict)
