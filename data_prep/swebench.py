"""SWE-bench with BM25 context of the 40K-token setting (Jimenez et al., 2024): write the patch that resolves an issue.

`text` is the complete prompt (premise, issue, numbered files, example, instruction) and is used verbatim as one user
turn; plain SWE-bench has no such column. The sample is by sha256 order of instance_id.
"""

from __future__ import annotations

from collections.abc import Iterator

from data_prep.job import Job, Prompt
from data_prep.select import first_by_hash


def prompts(job: Job) -> Iterator[Prompt]:
    """The sampled test instances in data set order."""
    job.options()
    names = [row.key("instance_id") for row in job.rows(["instance_id"])]
    chosen = first_by_hash(names, job.config.n)
    job.counts.exclude("swebench", "not in the sample", len(names) - len(chosen))
    for row in job.rows(["instance_id", "text"]):
        name = row.text("instance_id")
        if name in chosen:
            yield Prompt(name, "swebench", {"source_id": name}, text=row.text("text"))
