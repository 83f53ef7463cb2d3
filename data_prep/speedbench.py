"""SPEED-Bench (Abramovich et al., 2026): first turns of its throughput tiers and of its qualitative split.

The published files are not complete: the turns of many rows are a placeholder, to be filled from some 14 other data
sets by NVIDIA's preparation script, whose exit code does not say whether it succeeded. Both of its output forms are
read: parquet with `turns`, and JSON lines with `messages`. Preparation stops at a placeholder unless
options.unresolved=skip; for 16K and 32K the paper uses 768 of 1,536 prompts, which skipping could explain.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from data_prep.job import Job, Prompt, Row
from data_prep.rows import read_rows
from data_prep.select import PrepError, first_by_hash

_PLACEHOLDER = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE"
_REMEDY = (
    "resolve the whole data set with NVIDIA's specdec_bench prepare_data.py (Model-Optimizer) or NeMo-Skills' "
    "speed-bench/prepare.py and give its folder with source=, or leave them out with benchmark.options.unresolved=skip"
)


def prompts(job: Job) -> Iterator[Prompt]:
    """First turns, task by task, n of each by hash order of question_id."""
    unresolved = job.options(unresolved="stop")["unresolved"]
    if unresolved not in ("stop", "skip"):
        raise PrepError(f"benchmark.options.unresolved={unresolved}: choose stop or skip")
    job.facts["choices"] = {
        "sample": "sha256 order of question_id among the resolved prompts",
        "unresolved prompts": unresolved,
    }
    for task in job.config.tasks:
        names, placeholders, file = [], 0, None
        for row in _rows(job, task):
            file = row.path
            if _first_turn(row).startswith(_PLACEHOLDER):
                placeholders += 1
            else:
                names.append(row.key("question_id"))
        if placeholders and unresolved == "stop":
            total = placeholders + len(names)
            raise PrepError(f"{file}: {placeholders} of {total} prompts are placeholders; {_REMEDY}")
        chosen = first_by_hash(names, job.config.n)
        job.counts.exclude(task, "unresolved placeholder", placeholders)
        job.counts.exclude(task, "not in the sample", len(names) - len(chosen))
        for row in _rows(job, task):
            name = row.text("question_id")
            if name in chosen and not _first_turn(row).startswith(_PLACEHOLDER):
                category = row.values.get("category")
                meta = {"source_id": name, "category": row.text("category") if category is not None else None}
                yield Prompt(f"{task}/{name}", task, meta, text=_first_turn(row))


def _rows(job: Job, task: str) -> Iterator[Row]:
    for file in job.files:
        if file.key == task:
            columns = ["question_id", "category", _turns_column(file.path)]
            for number, values in read_rows(file.path, columns):
                yield Row(values, file.path, number)


def _turns_column(path: Path) -> str:
    if path.suffix != ".parquet":
        return "messages"
    import pyarrow.parquet as pq

    return "messages" if "messages" in pq.read_schema(path).names else "turns"


def _first_turn(row: Row) -> str:
    turns = row.values.get("turns") or row.values.get("messages")
    first = turns[0] if isinstance(turns, list) and turns else None
    if isinstance(first, dict):
        if first.get("role", "user") != "user":
            raise row.error(f"the first of 'messages' is the {first['role']}'s, not the user's")
        first = first.get("content")
    if not isinstance(first, str) or not first:
        raise row.error("no first turn in column 'turns' or 'messages'")
    return row.unicode("turns", first)
