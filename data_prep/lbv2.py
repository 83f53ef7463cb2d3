"""LongBench v2 (Bai et al., 2025): 503 multiple-choice questions with the official zero-shot prompt.

The placeholders are filled in one pass. Upstream's pred.py replaces them one after the other, document first, so a
document that contains "$Q$" (a formula, say) would get the question pasted into it; such documents are counted in the
manifest. Values are stripped, as upstream does. `length` is a label in words, not used.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from data_prep.job import Job, Prompt

_COLUMNS = {
    "$DOC$": "context",
    "$Q$": "question",
    "$C_A$": "choice_A",
    "$C_B$": "choice_B",
    "$C_C$": "choice_C",
    "$C_D$": "choice_D",
}
_PLACEHOLDER = re.compile("|".join(map(re.escape, _COLUMNS)))


def prompts(job: Job) -> Iterator[Prompt]:
    """One prompt per question."""
    job.options()
    template = job.official_prompt("lbv2")
    clashes = 0
    for row in job.rows(["_id", *_COLUMNS.values()]):
        values = {placeholder: row.text(column).strip() for placeholder, column in _COLUMNS.items()}
        clashes += any(_PLACEHOLDER.search(value) for value in values.values())
        text = _PLACEHOLDER.sub(lambda match, values=values: values[match.group()], template)  # type: ignore[misc]
        name = row.key("_id")
        yield Prompt(name, "lbv2", {"source_id": name}, text=text)
    job.facts["choices"] = {"placeholders": f"filled in one pass; {clashes} rows contain one of them as text"}
