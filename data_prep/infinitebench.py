"""InfiniteBench (Zhang et al., 2024): Retr.KV, En.Sum, En.QA, En.MC, En.Dia, and generated key-value retrieval.

Rows: id (int), context, input, answer (a string in older files, a list in newer ones), options (absent, null or empty
but for multiple choice). For En.QA, En.MC and En.Dia the paper replaces the answer-format instruction of the official
prompt by one to reason step by step before stating the final answer (Appendix B.2); it does not give the wording, so
REASONING is ours, and `with_reasoning` finds the instruction by its place in the official prompt.
"""

from __future__ import annotations

import hashlib
import json
import uuid
from collections.abc import Iterator
from typing import Any

from data_prep.job import Job, Prompt, Row
from data_prep.select import PrepError

REASONING = "Reason step by step before stating the final answer."
# Task of Table 7: (name of the file and of the prompt upstream, whether the instruction is replaced).
_TASKS = {
    "retr_kv": ("kv_retrieval", False),
    "en_sum": ("longbook_sum_eng", False),
    "en_qa": ("longbook_qa_eng", True),
    "en_mc": ("longbook_choice_eng", True),
    "en_dia": ("longdialogue_qa_eng", True),
}
# Our own wording: the official prompt is read from its upstream file, which a generated benchmark does not need.
_KV_REQUEST = "The JSON object below maps keys to values. Find the key that is named after it and write down its value."


def prompts(job: Job) -> Iterator[Prompt]:
    """One prompt per row of the configuration's one task."""
    job.options()
    task = "+".join(job.config.tasks)  # one file holds one task
    if task not in _TASKS:
        raise PrepError(
            f"benchmark {job.config.name}: no task {task!r} in InfiniteBench; there are {', '.join(_TASKS)}"
        )
    upstream, replaced = _TASKS[task]
    template = job.official_prompt(upstream)
    if replaced:
        template = with_reasoning(upstream, template)
        job.facts["choices"] = {"answer-format instruction": f"replaced by {REASONING!r}"}
    for row in job.rows(["id", "context", "input", "answer"]):
        number = row.values.get("id")
        if not isinstance(number, int | str) or isinstance(number, bool) or number == "":
            raise row.error(f"column 'id' is {number!r:.40}")
        name = row.unicode("id", str(number))
        values = {"context": row.text("context"), "input": row.text("input"), "question": row.text("input")}
        if task == "en_mc":
            options = _strings(row, "options")
            if len(options) != 4:
                raise row.error(f"4 options were expected, found {len(options)}")
            values |= {f"OPTION_{letter}": option for letter, option in zip("ABCD", options, strict=True)}
        meta: dict[str, Any] = {"source_id": name}
        if task != "en_sum":  # a summary is long and nobody scores it here
            meta["answer"] = _strings(row, "answer")
        yield Prompt(name, task, meta, text=template.format(**values))


def generated(job: Job) -> Iterator[Prompt]:
    """Key-value retrieval at the full length of Retr.KV, made without any download: 2,500 pairs a prompt."""
    pairs = job.options(pairs=2500)["pairs"]
    if type(pairs) is not int or pairs < 1:
        raise PrepError(f"benchmark.options.pairs={pairs}: must be a positive integer")
    if job.config.n is None:
        raise PrepError(f"{job.config.name}: benchmark.n must say how many prompts to make")
    for number in range(job.config.n):
        text, answer = generated_kv(f"retr_kv/{number}", pairs)
        yield Prompt(str(number), job.config.tasks[0], {"source_id": str(number), "answer": [answer]}, text=text)


def generated_kv(name: str, pairs: int) -> tuple[str, str]:
    """A key-value retrieval prompt of InfiniteBench's form with `pairs` UUID pairs: the user turn and the answer.

    The same layout as its kv_retrieval rows (construct_synthetic_dataset.py, build_kv_retrieval): `JSON data:`, one
    object of UUID pairs, the key, and an open sentence. Keys, values and the place of the answer follow from `name`.
    """

    def identifier(kind: str, index: int) -> str:
        return str(uuid.UUID(bytes=hashlib.sha256(f"{name}/{kind}/{index}".encode()).digest()[:16], version=4))

    data = {identifier("key", i): identifier("value", i) for i in range(pairs)}
    place = int.from_bytes(hashlib.sha256(f"{name}/place".encode()).digest()[:4], "big") * pairs >> 32
    key = identifier("key", place)
    text = (
        f"{_KV_REQUEST}\n\nJSON data:\n{json.dumps(data)}\n\n"
        f'Key: "{key}"\nThe value associated with the specified key is: '
    )
    return text, data[key]


def with_reasoning(upstream: str, template: str) -> str:
    """The official template with its answer-format instruction replaced by REASONING.

    The instruction is the last paragraph (QA), the line before the options (multiple choice), what follows the last
    question (dialogue). Raises PrepError if the template does not have that form.
    """
    if upstream == "longbook_qa_eng":
        head, found, _ = template.rpartition("\n\n")
        result = f"{head}\n\n{REASONING}"
    elif upstream == "longbook_choice_eng":
        head, found, options = template.partition("\nA. {OPTION_A}")
        before = head.rpartition("\n")[0]
        result = f"{before}\n{REASONING}{found}{options}"
    else:
        head, found, _ = template.rpartition("? ")
        result = f"{head}? {REASONING}"
    if not found or "{context}" not in result or (upstream != "longdialogue_qa_eng" and "{question}" not in result):
        raise PrepError(f"the official prompt {upstream} has an unexpected form; its answer instruction was not found")
    return result


def _strings(row: Row, name: str) -> list[str]:
    """A column that is a string, a list of strings, null or absent, as a list."""
    value = row.values.get(name)
    if isinstance(value, str):
        value = [value]
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise row.error(f"column {name!r} is {value!r:.60}, not text or a list of texts")
    return [row.unicode(name, item) for item in value]
