"""Every benchmark of the paper from files with the published schemas: rules, traps, and errors in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from prep_fixtures import (
    LCA,
    PLACEHOLDER,
    REPOBENCH,
    SPEED,
    SWE_COLUMNS,
    TEXT,
    gov_row,
    infinite_row,
    install_prompts,
    lbv2_row,
    lca_row,
    repobench_row,
    speed_row,
    write_gov,
    write_lines,
    write_parquet,
)

from data_prep.config import BenchmarkConfig, SourceConfig
from data_prep.infinitebench import REASONING, with_reasoning
from data_prep.prepare import prepare
from data_prep.select import NoExamples, PrepError, first_by_hash, hash_key
from data_prep.tokens import TargetSpec, encode_chat, raw_prefix
from harness.requests import Request, load_manifest, read_requests


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FOLD_BENCH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    install_prompts(monkeypatch, tmp_path / "cache")
    return tmp_path / "cache"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    folder.mkdir()
    return folder


@pytest.fixture
def build(tmp_path: Path, source: Path, tokenizer, target):
    def run(config: BenchmarkConfig, **changes: Any) -> tuple[list[Request], dict[str, Any]]:
        spec = TargetSpec(**{**target.__dict__, **changes})
        path = prepare(config, tokenizer, spec, tmp_path / "data", source=source, check_sources=True)
        return list(read_requests(path)), load_manifest(path)

    return run


def config(name: str, loader: str, files: list[str], key: str = "", **changes: Any) -> BenchmarkConfig:
    fields = {"name": name, "loader": loader, "tasks": [name], "max_new_tokens": 128}
    return BenchmarkConfig(
        **{**fields, "sources": [SourceConfig(key=key, repo=f"org/{name}-set", files=files)], **changes}
    )


def text_of(tokenizer, request: Request) -> str:
    """The user turn, or the raw text, of a request; the rest of its ids must be the template's, with one BOS."""
    text = tokenizer.decode(request.prompt_ids)
    head, tail = "<s><|user|>", "<|end|><|assistant|><think></think>"
    if text.startswith(head):
        assert text.endswith(tail)
        return text[len(head) : -len(tail)]
    assert text.startswith("<s>")
    return text[len("<s>") :]


# --------------------------------------------------------------------------------------------------- GovReport, LBv2

GOV = config("gov", "gov", ["data.zip"], max_new_tokens=512)
LBV2 = config("lbv2", "lbv2", ["data.json"])


def test_gov_reads_the_right_member_of_the_archive(build, source, tokenizer) -> None:
    write_gov(source, [gov_row("007"), gov_row("b" * 48, dataset="gov_report_e")])
    requests, manifest = build(GOV)
    assert [r.id for r in requests] == ["007", "b" * 48]
    assert text_of(tokenizer, requests[0]) == f"Report follows.\n{'Report {body}. ' * 40}\nShorten it."
    assert manifest["sources"][0]["name"] == "data.zip" and manifest["prompts"]["gov"]["path"].endswith("prompt.json")
    assert {r.max_new_tokens for r in requests} == {512} and {r.stop_ids for r in requests} == {(1, 4)}


def test_gov_reads_parquet_with_a_null_column_and_jsonl(build, source, tokenizer) -> None:
    schema = pa.schema([("_id", TEXT), ("context", TEXT), ("all_classes", pa.null())])
    write_parquet(source / "gov_report_e" / "test" / "0000.parquet", [gov_row("a"), gov_row("b")], schema)
    parquet = config("gov", "gov", ["data.zip"])
    parquet.sources[0].local = ["gov_report_e/test/*.parquet"]
    first, _ = build(parquet)
    write_lines(source / "gov_report_e.jsonl", [gov_row("a"), gov_row("b")])
    parquet.sources[0].local = ["gov_report_e.jsonl"]
    assert build(parquet)[0] == first and len(first) == 2


def test_lbv2_is_a_top_level_array_of_any_size(build, source, tokenizer) -> None:
    rows = [lbv2_row(f"{i:02}", context=f'  T{i} \u2028 é \\ " ] }} ' + "x" * (i * 1000)) for i in range(8)]
    (source / "data.json").write_text(json.dumps(rows, indent=2, ensure_ascii=False))
    requests, _ = build(LBV2)
    assert [r.id for r in requests] == [f"{i:02}" for i in range(8)]
    inner = rows[3]["context"].strip()
    expected = f"<t>\n{inner}\n</t>\nAsk: Why?\n(A) a\n(B) b\n(C) c\n(D) d"
    assert text_of(tokenizer, requests[3]) == expected


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_array_is_decoded_across_chunk_borders(chunk: int, source, monkeypatch) -> None:
    from data_prep import rows

    monkeypatch.setattr(rows, "_CHUNK", chunk)
    values = [{"a": 'é\\"]}', "n": i, "list": [1, {"b": None}]} for i in range(20)]
    path = source / "x.json"
    path.write_text("\n" + json.dumps(values, ensure_ascii=False) + "\n")
    assert list(rows.read_rows(path, [])) == list(enumerate(values))
    path.write_text("[]")
    assert list(rows.read_rows(path, [])) == []
    path.write_text(json.dumps(values)[:-30])
    with pytest.raises(PrepError, match=r"x.json, row 19: "):
        list(rows.read_rows(path, []))
    path.write_text(json.dumps({"a": 1}))
    with pytest.raises(PrepError, match=r"x.json, row 0: a JSON array was expected"):
        list(rows.read_rows(path, []))


def test_a_placeholder_inside_a_document_stays_text(build, source, tokenizer) -> None:
    (source / "data.json").write_text(json.dumps([lbv2_row("a", "see $Q$ and $C_A$"), lbv2_row("b", choice_A="$C_B$")]))
    requests, manifest = build(LBV2)
    assert "<t>\nsee $Q$ and $C_A$\n</t>\nAsk: Why?" in text_of(tokenizer, requests[0])
    assert "(A) $C_B$\n(B) b" in text_of(tokenizer, requests[1])
    assert manifest["choices"]["placeholders"] == "filled in one pass; 2 rows contain one of them as text"


# ------------------------------------------------------------------------------------------------------ InfiniteBench


def infinite(task: str, upstream: str, **changes: Any) -> BenchmarkConfig:
    return config(task, "infinitebench", [f"{upstream}.jsonl"], **changes)


@pytest.mark.parametrize(
    ("task", "upstream", "expected"),
    [
        (
            "retr_kv", "kv_retrieval",
            'Look up.\n\nJSON data:\n{"k": "v"}\n\n\nKey: "k"\nThe value associated with the specified key is: ',
        ),
        ("en_sum", "longbook_sum_eng", "Sum up.\n\nBook {1}."),
        ("en_qa", "longbook_qa_eng", f"Read on.\n\nBook.\n\nQuestion: Who?\n\n{REASONING}"),
        (
            "en_mc", "longbook_choice_eng",
            f"Read on.\n\nBook.\n\nQuestion: Which?\n\n{REASONING}\nA. w\nB. x\nC. y\nD. z",
        ),
        (
            "en_dia", "longdialogue_qa_eng",
            f'One name is "$$MASK$$". Who?\n\nACE: hi\n$$MASK$$: no\n\nWho is "$$MASK$$"? {REASONING}',
        ),
    ],
)  # fmt: skip
def test_infinitebench_prompts(task: str, upstream: str, expected: str, build, source, tokenizer) -> None:
    # Both answer shapes, options absent, null, empty or filled: rows of one file may differ.
    rows = [infinite_row(0, upstream), infinite_row(7, upstream, answer="bare string")]
    if task != "en_mc":
        rows += [infinite_row(8, upstream, options=None), infinite_row(9, upstream)]
        del rows[-1]["options"]
    write_lines(source / f"{upstream}.jsonl", rows)
    requests, manifest = build(infinite(task, upstream))
    assert [r.id for r in requests] == ["0", "7", "8", "9"][: len(rows)]
    assert {text_of(tokenizer, r) for r in requests} == {expected}
    assert ("answer-format instruction" in manifest.get("choices", {})) == (REASONING in expected)
    if task != "en_sum":
        assert requests[1].meta["answer"] == ["bare string"]


def test_reasoning_replaces_only_the_known_forms() -> None:
    with pytest.raises(PrepError, match="unexpected form"):
        with_reasoning("longbook_choice_eng", "{context} {question} options")
    with pytest.raises(PrepError, match="unexpected form"):
        with_reasoning("longbook_qa_eng", "{context}{question}")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"options": ["w", "x"]}, "row 1: 4 options were expected, found 2"),
        ({"options": None}, "row 1: 4 options were expected, found 0"),
        ({"answer": 3}, "row 1: column 'answer' is 3"),
        ({"context": None}, "row 1: column 'context' is None, not a string"),
        ({"id": None}, "row 1: column 'id' is None"),
    ],
)
def test_broken_rows_name_file_row_and_remedy(changes: dict, message: str, build, source) -> None:
    rows = [infinite_row(0, "longbook_choice_eng"), infinite_row(1, "longbook_choice_eng", **changes)]
    write_lines(source / "longbook_choice_eng.jsonl", rows)
    with pytest.raises(
        PrepError, match=rf"longbook_choice_eng.jsonl, {message}.*; the file is not the published one.*source="
    ):
        build(infinite("en_mc", "longbook_choice_eng"))


def test_lines_are_split_at_newlines_only(build, source, tokenizer) -> None:
    row = infinite_row(0, "longbook_sum_eng", context="a\u2028b\x85c")
    (source / "longbook_sum_eng.jsonl").write_text(json.dumps(row, ensure_ascii=False) + "\n\n")
    assert text_of(tokenizer, build(infinite("en_sum", "longbook_sum_eng"))[0][0]) == "Sum up.\n\na\u2028b\x85c"
    (source / "longbook_sum_eng.jsonl").write_text(json.dumps(row) + "\n{torn")
    with pytest.raises(PrepError, match="has changed since it was first used"):
        build(infinite("en_sum", "longbook_sum_eng"))


def test_generated_kv_needs_no_files(build, tokenizer) -> None:
    generated = BenchmarkConfig(
        "kv", loader="generated_kv", tasks=["kv"], max_new_tokens=128, n=3, options={"pairs": 30}
    )
    requests, manifest = build(generated)
    assert [r.id for r in requests] == ["0", "1", "2"] and manifest["sources"] == []
    for request in requests:
        assert request.meta["answer"][0] in text_of(tokenizer, request)
    assert "no option 'pair'" in failure(build, BenchmarkConfig("kv", loader="generated_kv", n=1, options={"pair": 1}))


# ---------------------------------------------------------------------------------------------------------------- LCA

SNAPSHOT: dict[str, str | None] = {
    "pkg/a/near.py": "def helper(x):\n    return x\n", "pkg/far.py": "def far(): pass\n" * 60,
    "README.md": "# r\n" * 200, "logo.png": None, "pkg/empty.py": "", "pkg/a/new.py": "an older version of the file\n",
}  # fmt: skip


def lca(**changes: Any) -> BenchmarkConfig:
    fields: dict[str, Any] = {
        "tasks": ["S", "M", "X"], "max_new_tokens": 256, "chat": False,
        "options": {"lengths": {"S": 500, "M": 700, "X": 8000}},
    }  # fmt: skip
    return config("lca", "lca", ["data/large_context/*.parquet"], **{**fields, **changes})


def test_lca_cuts_at_the_raw_line_and_gives_exact_lengths(build, source, tokenizer) -> None:
    rows = [
        lca_row("u__r", sampled=[62, 7], raw=[62, 60, 7], snapshot=SNAPSHOT),
        lca_row("u__late", sampled=[], raw=[7, 49], snapshot=SNAPSHOT),
        lca_row("u__small", sampled=[60], raw=[60, 900], snapshot={"pkg/a/near.py": "x = 1\n"}),
    ]
    write_parquet(source / "data" / "large_context" / "test-00000-of-00001.parquet", rows, LCA)
    requests, manifest = build(lca())
    assert [(r.task, len(r.prompt_ids)) for r in requests] == [("S", 500), ("M", 700)]
    assert requests[0].id == f"u__r@{'0' * 40}:pkg/a/new.py@S"
    for request in requests:
        text = text_of(tokenizer, request)
        assert text.endswith("x59 = 59\n") and "y = helper" not in text
        assert "# pkg/a/near.py\ndef helper(x):\n    return x\n# pkg/a/new.py\nimport os\n" in text
        assert "older version" not in text and "# r\n" not in text and "empty.py" not in text
    counts = manifest["counts"]
    assert counts["S"] == {
        "in": 3, "kept": 1, "excluded": {"no line to cut before": 1, "repository shorter than the input": 1},
    }  # fmt: skip
    assert counts["X"]["excluded"] == {"needs more than 8192 tokens of context": 3}
    sampled, _ = build(lca(options={"lengths": {"S": 500, "M": 700, "X": 8000}, "lines": "sampled"}))
    assert text_of(tokenizer, sampled[0]).endswith("z = 1\n") and sampled[0].meta["cut_line"] == 62


def test_lca_huge_takes_the_first_eligible_and_stops_reading(build, source) -> None:
    rows = [lca_row(f"u__{i}", sampled=[], raw=[60] if i % 2 else [7], snapshot=SNAPSHOT) for i in range(9)]
    write_parquet(source / "data" / "large_context" / "test-0.parquet", rows, LCA)
    requests, manifest = build(lca(tasks=["S"], n=2))
    assert [r.id.split("@")[0] for r in requests] == ["u__1", "u__3"]
    assert manifest["counts"]["S"]["in"] == 4


def test_lca_without_a_fitting_length_says_so(build, source) -> None:
    write_parquet(source / "data" / "large_context" / "t.parquet", [lca_row("u", [], [60], SNAPSHOT)], LCA)
    with pytest.raises(NoExamples, match="lca: no length fits the 8192 tokens of tiny; leave it out"):
        build(lca(tasks=["X"]))


def test_lca_errors_name_the_row(build, source) -> None:
    path = source / "data" / "large_context" / "t.parquet"
    bad = lca_row("u", [], [60], SNAPSHOT)
    bad["repo_snapshot"]["content"].pop()
    write_parquet(path, [lca_row("v", [], [60], SNAPSHOT), bad], LCA)
    assert "t.parquet, row 1: repo_snapshot has 6 names and 5 contents" in failure(build, lca())
    write_parquet(source / "data" / "large_context" / "t2.parquet", [bad], LCA.remove(5))
    path.unlink()
    assert "t2.parquet has no column 'completion_lines_raw.inproject'" in failure(build, lca())
    bad["completion_file"] = None
    write_parquet(source / "data" / "large_context" / "t1.parquet", [bad], LCA)
    assert "t1.parquet, row 0: unexpected shape" in failure(build, lca())


# ---------------------------------------------------------------------------------- RepoBench, SWE-bench, SPEED-Bench


RB = ["repobench_python", "repobench_java"]


def repobench(**changes: Any) -> BenchmarkConfig:
    sources = [SourceConfig(key=t, repo=f"o/{t}", files=["data/cross_file_first-*.parquet"]) for t in RB]
    fields: dict[str, Any] = {
        "tasks": RB, "levels": ["32k", "64k"], "chat": False, "sources": sources,
        "options": {"sample": {"repobench_java": 2}},
    }  # fmt: skip
    return config("repobench", "repobench", [], **{**fields, **changes})


def test_repobench_layout_levels_one_per_file_and_java_sample(build, source, tokenizer) -> None:
    python = [
        repobench_row("a.py", "32k"), repobench_row("a.py", "64k", code="second"), repobench_row("b.py", "2k"),
        repobench_row("a.py", "32k", repo="v/s"), repobench_row("c.py", "64k"),
    ]  # fmt: skip
    java = [repobench_row(f"F{i}.java", "32k" if i < 5 else "64k") for i in range(8)]
    write_parquet(source / "repobench_python" / "data" / "cross_file_first-00000-of-00001.parquet", python, REPOBENCH)
    write_parquet(source / "repobench_java" / "cross_file_first-00000-of-00001.parquet", java, REPOBENCH)
    requests, manifest = build(repobench())
    assert [r.id for r in requests if r.task == "repobench_python"] == [
        f"{RB[0]}/{n}" for n in ("u/r/a.py", "v/s/a.py", "u/r/c.py")
    ]
    text = text_of(tokenizer, requests[0])
    assert text == (
        "# Repo Name: u/r\n# Path: b.py\ndef f(): pass\n\n# Path: c.py\ng = 1\n\n# Path: a.py\nfrom b import f\n"
        "x = 1\n\ny = 2\n"
    )
    sampled = [r.meta["source_id"] for r in requests if r.task == "repobench_java"]
    levels = [[f"u/r/F{i}.java" for i in part] for part in (range(5), range(5, 8))]
    expected = [name for names in levels for name in sorted(names, key=hash_key)[:2]]
    assert sorted(sampled) == sorted(expected) and sampled == sorted(sampled)
    assert text_of(tokenizer, requests[-1]).startswith("// Repo Name: u/r\n// Path: b.py\n")
    assert manifest["counts"]["repobench_python"]["excluded"] == {"another example of the same file": 1}
    assert manifest["counts"]["repobench_java"]["excluded"] == {"not in the sample": 4}


def test_repobench_notices_the_other_languages_file(build, source) -> None:
    write_parquet(source / "data" / "cross_file_first-0.parquet", [repobench_row("a.py", "32k")], REPOBENCH)
    assert "cross_file_first-0.parquet, row 0: file_path 'a.py' is not a .java file" in failure(build, repobench())


def swebench(n: int | None) -> BenchmarkConfig:
    return config("swebench", "swebench", ["data/test-*.parquet"], n=n, max_new_tokens=512)


def test_swebench_takes_text_verbatim_by_hash_order(build, source, tokenizer) -> None:
    rows = [{column: f" <{column} {i}>\n\n" for column in SWE_COLUMNS} | {"instance_id": f"r-{i}"} for i in range(9)]
    schema = pa.schema([(column, TEXT) for column in SWE_COLUMNS])
    write_parquet(source / "test-00000-of-00001-b8fa8348bb47ebf6.parquet", rows, schema)
    requests, manifest = build(swebench(4))
    expected = sorted((f"r-{i}" for i in range(9)), key=hash_key)[:4]
    assert sorted(r.id for r in requests) == sorted(expected) and [r.id for r in requests] == sorted(
        r.id for r in requests
    )
    assert text_of(tokenizer, requests[0]) == f" <text {requests[0].id[2:]}>\n\n"
    assert manifest["counts"]["swebench"] == {"in": 9, "kept": 4, "excluded": {"not in the sample": 5}}
    assert {r.id for r in requests} <= {r.id for r in build(swebench(6))[0]}


def test_plain_swebench_has_no_text(build, source) -> None:
    write_parquet(source / "data" / "test-0.parquet", [{"instance_id": "a"}], pa.schema([("instance_id", TEXT)]))
    assert "test-0.parquet has no column 'text' (it has instance_id); it is another data set" in failure(
        build, swebench(1)
    )


def speed(**changes: Any) -> BenchmarkConfig:
    source = SourceConfig(key="1K", repo="o/speed", files=["*throughput_1k/*.parquet"], local=["*throughput_1k*"])
    return config("speed", "speedbench", [], **{"tasks": ["1K"], "sources": [source], "n": 2, **changes})


def test_speedbench_placeholders_stop_or_are_skipped(build, source, tokenizer) -> None:
    rows = [speed_row(i, [f"Sort {i}.", "Again."]) for i in range(4)] + [speed_row(9, [PLACEHOLDER])]
    write_parquet(
        source / "speed_throughput_1k.parquet",
        rows,
        SPEED,
        {b"huggingface": b'{"info": {"features": {"x": {"_type": "List"}}}}'},
    )
    message = failure(build, speed())
    assert "speed_throughput_1k.parquet: 1 of 5 prompts are placeholders; resolve the whole data set" in message
    requests, manifest = build(speed(options={"unresolved": "skip"}))
    chosen = sorted((f"{i:032x}" for i in range(4)), key=hash_key)[:2]
    assert sorted(r.meta["source_id"] for r in requests) == sorted(chosen)
    assert text_of(tokenizer, requests[0]) == f"Sort {int(requests[0].meta['source_id'], 16)}."
    assert manifest["counts"]["1K"]["excluded"] == {"not in the sample": 2, "unresolved placeholder": 1}
    assert "unresolved=maybe: choose stop or skip" in failure(build, speed(options={"unresolved": "maybe"}))


def test_speedbench_reads_prepared_messages(build, source, tokenizer) -> None:
    rows = [{**speed_row(i, []), "messages": [{"role": "user", "content": f"Sort {i}."}]} for i in range(2)]
    for row in rows:
        del row["turns"]
    write_lines(source / "throughput_1k.jsonl", rows)
    assert [text_of(tokenizer, r) for r in build(speed())[0]] == ["Sort 0.", "Sort 1."]
    rows[1]["messages"] = []
    write_lines(source / "throughput_1k.jsonl", rows)


# ----------------------------------------------------------------------------------------------- rules for all of them


def failure(build, configuration: BenchmarkConfig, **changes: Any) -> str:
    with pytest.raises(PrepError) as caught:
        build(configuration, **changes)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_exactly_one_bos_and_thinking_off(tokenizer, plain_tokenizer) -> None:
    assert raw_prefix(tokenizer) == [tokenizer.bos_token_id] and raw_prefix(plain_tokenizer) == []
    ids = encode_chat(tokenizer, "hello", {"enable_thinking": False})
    assert ids.count(tokenizer.bos_token_id) == 1 and ids[0] == tokenizer.bos_token_id
    assert tokenizer.decode(ids).endswith("<|assistant|><think></think>")
    # Tokenising the rendered template the usual way is what adds the second one.
    rendered = tokenizer.apply_chat_template([{"role": "user", "content": "hello"}], tokenize=False)
    assert tokenizer(rendered)["input_ids"][:2] == [tokenizer.bos_token_id] * 2


def test_two_bos_from_the_template_are_refused(build, source, tokenizer, monkeypatch) -> None:
    write_gov(source, [gov_row("a")])
    monkeypatch.setattr(tokenizer, "chat_template", "{{ bos_token }}" + tokenizer.chat_template)
    assert "gov for tiny: the chat template of this tokenizer yields two BOS tokens" in failure(build, GOV)


def test_no_chat_template_is_one_line(build, source, tokenizer, monkeypatch) -> None:
    write_gov(source, [gov_row("a")])
    monkeypatch.setattr(tokenizer, "chat_template", None)
    assert failure(build, GOV).startswith("gov for tiny: ")


@pytest.mark.parametrize(
    ("limit", "context"), [(512, 131072), (128, 131072), (1200, 131072), (512, 32768), (128, 32768)]
)
def test_the_context_rule_at_its_boundary(limit: int, context: int, build, source, tokenizer, monkeypatch) -> None:
    """The longest prompt that fits is kept, one token more is left out, and neither is truncated."""
    from data_prep import prepare as module

    longest = context - 65 - limit
    lengths = {"fits": longest, "one more": longest + 1}
    write_gov(source, [gov_row("fits"), gov_row("one more")])
    monkeypatch.setattr(
        module, "encode_chats", lambda tokenizer, texts, kwargs: [[5] * length for length in lengths.values()]
    )
    requests, manifest = build(config("gov", "gov", ["data.zip"], max_new_tokens=limit), max_context=context)
    assert [(r.id, len(r.prompt_ids)) for r in requests] == [("fits", longest)]
    assert manifest["counts"]["gov"]["excluded"] == {f"needs more than {context} tokens of context": 1}


def test_short_inputs_and_listed_ids_are_left_out_and_counted(build, source, tmp_path) -> None:
    write_gov(source, [gov_row("long", 200), gov_row("short", 2), gov_row("seen", 200)])
    (tmp_path / "seen.txt").write_text("# used in development\n\nseen\n")
    requests, manifest = build(
        config("gov", "gov", ["data.zip"], min_prompt_tokens=300, exclude=str(tmp_path / "seen.txt"))
    )
    assert [r.id for r in requests] == ["long"]
    assert manifest["counts"]["gov"] == {
        "in": 3, "kept": 1, "excluded": {"exclude list": 1, "shorter than 300 tokens": 1},
    }  # fmt: skip
    assert "exclude list /no/such" in failure(build, config("gov", "gov", ["data.zip"], exclude="/no/such"))
    assert "no example is left for tiny (gov: {'shorter than 9999 tokens': 3})" in failure(
        build, config("gov", "gov", ["data.zip"], min_prompt_tokens=9999)
    )


def test_hash_order_is_sha256_of_the_utf8_id() -> None:
    assert hash_key("é") == "4a99557e4033c3539de2eb65472017cad5f9557f7a0625a09f1c3f6e2ba69c4c"
    assert first_by_hash(["a", "b", "c"], None) == {"a", "b", "c"}
    with pytest.raises(PrepError, match="id 'a' occurs twice"):
        first_by_hash(["a", "b", "a"], 1)


def test_duplicate_ids_are_refused(build, source) -> None:
    write_gov(source, [gov_row("a"), gov_row("a")])
    assert "request id 'a' appears twice" in failure(build, GOV)


def test_groups_and_unknown_loaders_are_one_line(build) -> None:
    assert "is a group; prepare its members: a, b" in failure(build, BenchmarkConfig("g", members=["a", "b"]))
    assert "no loader 'x'; there are demo, gov" in failure(build, BenchmarkConfig("g", loader="x"))
    assert "benchmark.levels is empty" in failure(build, BenchmarkConfig("demo_code", loader="demo", n=1))
