"""GovReport of LongBench-E (Bai et al., 2024): 300 reports, summarised with the official prompt.

Columns used: `_id`, `context` (`input` is empty for this task; `dataset` reads gov_report or gov_report_e, so nothing
depends on it). The prompt is that of `gov_report`: upstream's pred.py looks it up without the `_e`.
"""

from __future__ import annotations

from collections.abc import Iterator

from data_prep.job import Job, Prompt


def prompts(job: Job) -> Iterator[Prompt]:
    """One prompt per report."""
    job.options()
    template = job.official_prompt("gov")
    for row in job.rows(["_id", "context"], member="gov_report_e.jsonl"):
        name = row.key("_id")
        yield Prompt(name, "gov", {"source_id": name}, text=template.format(context=row.text("context")))
