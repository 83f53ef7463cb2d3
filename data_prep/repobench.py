"""RepoBench v1.1 (Liu et al., 2024), cross-file-first, Python and Java: raw completion with the official layout.

The layout is that of Leolty/repobench, data/utils.py, construct_prompt (CC BY 4.0), written anew: the repository's
name, every snippet under its path, then path, imports and preceding lines of the file to complete; four and more
newlines become two. It only truncates when it is given a tokenizer; the paper mentions no truncation. Levels and
token_num are labels of another tokenizer and not the length of the prompt.

The paper keeps one example per file without saying which: here the first in the order of the data set.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from data_prep.job import Job, Prompt, Row, at
from data_prep.select import PrepError, first_by_hash

_COMMENT = {"repobench_python": "#", "repobench_java": "//"}
_SUFFIX = {"repobench_python": ".py", "repobench_java": ".java"}
CHOICES = {
    "one example per file": "first in data set order, over the chosen levels",
    "sample": "by level, sha256 order of <repository>/<path>",
    "truncation": "none",
}


def prompts(job: Job) -> Iterator[Prompt]:
    """Python, then Java; each in the order of its data set. options.sample: {task: files per level}."""
    sample: dict[str, int] = job.options(sample={})["sample"]
    if not isinstance(sample, dict) or not all(
        task in _COMMENT and type(n) is int and n > 0 for task, n in sample.items()
    ):
        raise PrepError(
            f"benchmark {job.config.name}: options.sample={sample} is not {{task: files per level}} with tasks of "
            f"{', '.join(_COMMENT)}"
        )
    if unknown := set(job.config.tasks) - _COMMENT.keys():
        raise PrepError(f"benchmark {job.config.name}: no task {sorted(unknown)}; there are {', '.join(_COMMENT)}")
    job.facts["choices"] = CHOICES
    for task in job.config.tasks:
        # Two passes over the file: the first reads three small columns, so nothing large is ever held.
        chosen = _select(job, task, sample.get(task, job.config.n))
        for row in job.rows(
            ["repo_name", "file_path", "level", "context", "import_statement", "cropped_code"], key=task
        ):
            name = _file_id(row)
            if chosen.get(name) == (row.path, row.number):
                meta = {"source_id": name, "level": row.text("level")}
                with at(row):
                    text = layout(row, _COMMENT[task])
                yield Prompt(f"{task}/{name}", task, meta, text=text)


def layout(row: Row, comment: str) -> str:
    """The official prompt of one row; `comment` starts a comment in its language."""
    values: dict[str, Any] = row.values
    text = f"{comment} Repo Name: {row.text('repo_name')}\n"
    for snippet in values["context"]:
        if not isinstance(snippet["path"], str) or not isinstance(snippet["snippet"], str):
            raise row.error("column 'context' has a snippet without path or text")
        text += f"{comment} Path: {snippet['path']}\n{snippet['snippet']}\n\n"
    code = row.text("cropped_code").rstrip()
    text += f"{comment} Path: {row.text('file_path')}\n{row.text('import_statement')}\n{code}\n"
    return re.sub(r"\n{4,}", "\n\n", text)


def _select(job: Job, task: str, per_level: int | None) -> dict[str, tuple[Path, int]]:
    """{file: place of its row} for the examples to use; row numbers start again in every part of the data set."""
    first: dict[str, tuple[Path, int]] = {}
    levels: dict[str, list[str]] = {level: [] for level in job.config.levels}
    for row in job.rows(["repo_name", "file_path", "level"], key=task):
        level = row.text("level")
        if not row.text("file_path").endswith(_SUFFIX[task]):
            raise row.error(f"file_path {row.text('file_path')!r} is not a {_SUFFIX[task]} file")
        if level not in levels:
            continue
        name = _file_id(row)
        if name in first:
            job.counts.exclude(task, "another example of the same file")
            continue
        first[name] = row.path, row.number
        levels[level].append(name)
    chosen = set()
    for names in levels.values():
        kept = first_by_hash(names, per_level)
        job.counts.exclude(task, "not in the sample", len(names) - len(kept))
        chosen |= kept
    return {name: first[name] for name in chosen}


def _file_id(row: Row) -> str:
    return f"{row.text('repo_name')}/{row.text('file_path')}"
