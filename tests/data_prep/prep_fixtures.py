"""Small files with the published schemas of the data sets, and stand-ins for the upstream prompt files.

Schemas: the data sets' cards, as collected in the project's notes; nothing here is taken from the data. The prompt
texts are made up, with the placeholders and the layout of the official ones.
"""

from __future__ import annotations

import hashlib
import json
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data_prep import prompts

TEXT = pa.string()
PLACEHOLDER = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE USING SPECDEC_BENCH"

FAKE_PROMPTS = {
    "gov": "Report follows.\n{context}\nShorten it.",
    "lbv2": "<t>\n$DOC$\n</t>\nAsk: $Q$\n(A) $C_A$\n(B) $C_B$\n(C) $C_C$\n(D) $C_D$",
    "kv_retrieval": "Look up.\n\n{context}\n\n{input}",
    "longbook_sum_eng": "Sum up.\n\n{context}",
    "longbook_qa_eng": "Read on.\n\n{context}\n\nQuestion: {question}\n\nShort please.",
    "longbook_choice_eng": (
        "Read on.\n\n{context}\n\nQuestion: {question}\n\nPick a letter. Nothing else.\n"
        "A. {OPTION_A}\nB. {OPTION_B}\nC. {OPTION_C}\nD. {OPTION_D}"
    ),
    "longdialogue_qa_eng": 'One name is "$$MASK$$". Who?\n\n{context}\n\nWho is "$$MASK$$"? Only the name.',
}


def install_prompts(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    """Put stand-in upstream files into the cache and pin their prompts, so that nothing asks the network."""
    files: dict[Path, str] = {}
    for name, prompt in list(prompts.PROMPTS.items()):
        path = cache / "prompts" / prompt.repo / prompt.commit / prompt.path
        own = FAKE_PROMPTS[name]
        monkeypatch.setitem(prompts.PROMPTS, name, replace(prompt, sha256=hashlib.sha256(own.encode()).hexdigest()))
        if name == "gov":
            files[path] = json.dumps({"gov_report": own, "other": "x"})
        elif name == "lbv2":
            files[path] = own
        else:
            entries = "".join(f"    {key!r}: {text!r},  # noqa\n" for key, text in FAKE_PROMPTS.items())
            files[path] = (
                'other = {"kv_retrieval": "wrong" + "one"}\n'
                f'gpt4_templates = {{\n    "sum": "a" + "b",\n{entries}}}\n'
                "raise SystemExit('an upstream file must be parsed, never run')\n"
            )
    for path, content in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)


def gov_row(name: str, words: int = 40, dataset: str = "gov_report") -> dict[str, Any]:
    return {
        "input": "", "context": "Report {body}. " * words, "answers": ["Short."], "length": words, "dataset": dataset,
        "language": "en", "all_classes": None, "_id": name,
    }  # fmt: skip


def write_gov(folder: Path, rows: list[dict[str, Any]]) -> None:
    with zipfile.ZipFile(folder / "data.zip", "w") as archive:
        archive.writestr("data/gov_report.jsonl", "not this one\n")
        archive.writestr("data/gov_report_e.jsonl", "".join(json.dumps(row) + "\n" for row in rows))


def lbv2_row(name: str, context: str = "Text.", **changes: Any) -> dict[str, Any]:
    row = {
        "_id": name, "domain": "d", "sub_domain": "s", "difficulty": "easy", "length": "short", "question": " Why? ",
        "choice_A": "a", "choice_B": "b", "choice_C": "c", "choice_D": "d", "answer": "D", "context": context,
    }  # fmt: skip
    return {**row, **changes}


def infinite_row(number: int, task: str, **changes: Any) -> dict[str, Any]:
    rows = {
        "kv_retrieval": {
            "context": 'JSON data:\n{"k": "v"}',
            "input": '\nKey: "k"\nThe value associated with the specified key is: ',
            "answer": ["v"],
            "options": [],
        },
        "longbook_sum_eng": {"context": "Book {1}.", "input": "", "answer": ["Sum."], "options": []},
        "longbook_qa_eng": {"context": "Book.", "input": "Who?", "answer": ["A", "B"], "options": []},
        "longbook_choice_eng": {
            "context": "Book.", "input": "Which?", "answer": ["w"], "options": ["w", "x", "y", "z"],
        },
        "longdialogue_qa_eng": {
            "context": "ACE: hi\n$$MASK$$: no", "input": "Which character is $$MASK$$ ?", "answer": ["ACE"],
            "options": [],
        },
    }  # fmt: skip
    return {"id": number, **rows[task], **changes}


def write_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def _lines(keys: str, kind: pa.DataType) -> pa.DataType:
    return pa.struct([(key, pa.list_(kind)) for key in keys.split()])


LCA = pa.schema(
    [
        ("repo", TEXT),
        ("commit_hash", TEXT),
        ("completion_file", pa.struct([("filename", TEXT), ("content", TEXT)])),
        ("completion_lines", _lines("infile inproject common commited non_informative random", pa.int32())),
        ("repo_snapshot", pa.struct([("filename", pa.list_(TEXT)), ("content", pa.list_(TEXT))])),
        ("completion_lines_raw", _lines("commited common infile inproject non_informative other", pa.int64())),
    ]
)


def lca_row(repo: str, sampled: list[int], raw: list[int], snapshot: dict[str, str | None]) -> dict[str, Any]:
    code = "\n".join(["import os", *(f"x{i} = {i}" for i in range(1, 60)), "y = helper(1)", "z = 1", "z = helper(2)"])
    empty: dict[str, list[int]] = {"infile": [], "common": [], "commited": [55], "non_informative": [0]}
    return {
        "repo": repo,
        "commit_hash": "0" * 40,
        "completion_file": {"filename": "pkg/a/new.py", "content": code},
        "completion_lines": {**empty, "inproject": sampled, "random": [5]},
        "repo_snapshot": {"filename": list(snapshot), "content": list(snapshot.values())},
        "completion_lines_raw": {**empty, "inproject": raw, "other": [5]},
    }


REPOBENCH = pa.schema(
    [
        ("repo_name", TEXT),
        ("file_path", TEXT),
        ("context", pa.list_(pa.struct([("identifier", TEXT), ("path", TEXT), ("snippet", TEXT)]))),
        ("import_statement", TEXT),
        ("token_num", pa.int64()),
        ("cropped_code", TEXT),
        ("all_code", TEXT),
        ("next_line", TEXT),
        ("gold_snippet_index", pa.int64()),
        ("created_at", TEXT),
        ("level", TEXT),
    ]
)


def repobench_row(path: str, level: str, code: str = "x = 1\n\n\n\n\ny = 2\n\n", repo: str = "u/r") -> dict[str, Any]:
    return {
        "repo_name": repo, "file_path": path, "import_statement": "from b import f", "token_num": 30000,
        "context": [
            {"identifier": "f", "path": "b.py", "snippet": "def f(): pass"},
            {"identifier": "g", "path": "c.py", "snippet": "g = 1"},
        ],
        "cropped_code": code, "all_code": "from b import f\nx = 1\nf()\n", "next_line": "f()", "gold_snippet_index": 0,
        "created_at": "2023-12-01 00:00:00+00:00", "level": level,
    }  # fmt: skip


SWE_COLUMNS = [
    "instance_id", "text", "repo", "base_commit", "problem_statement", "hints_text", "created_at", "patch",
    "test_patch", "version", "FAIL_TO_PASS", "PASS_TO_PASS", "environment_setup_commit",
]  # fmt: skip
SPEED = pa.schema(
    [
        ("question_id", TEXT),
        ("category", TEXT),
        ("sub_category", TEXT),
        ("turns", pa.list_(TEXT)),
        ("source", TEXT),
        ("src_id", TEXT),
        ("difficulty", TEXT),
        ("multiturn", pa.bool_()),
    ]
)


def speed_row(number: int, turns: list[str]) -> dict[str, Any]:
    return {
        "question_id": f"{number:032x}", "category": "low_entropy", "sub_category": "code", "turns": turns,
        "source": "s", "src_id": "1", "difficulty": None, "multiturn": len(turns) > 1,
    }  # fmt: skip


def write_parquet(
    path: Path, rows: list[dict[str, Any]], schema: pa.Schema, metadata: dict[bytes, bytes] | None = None
) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows, schema=schema.with_metadata(metadata)), path)
