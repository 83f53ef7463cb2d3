"""What a damaged, foreign or merely unusual file gives: the right requests, or one line with file, row and remedy."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import make_tokenizer
from prep_fixtures import (
    LCA,
    REPOBENCH,
    SPEED,
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
from transformers import AutoTokenizer

from data_prep import cli, fetch
from data_prep.config import BenchmarkConfig, SourceConfig
from data_prep.prepare import prepare
from data_prep.select import NoExamples, PrepError, read_exclude_list
from data_prep.tokens import encode_pieces, tokenizer_sha256
from harness.requests import Request, manifest_path, read_requests

SAME_FILE = "; the file is not the published one, fetch it again or give another with source="


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
def build(tmp_path: Path, source: Path, tokenizer, target) -> Callable[..., list[Request]]:
    def run(config: BenchmarkConfig, tokenizer: Any = tokenizer) -> list[Request]:
        return list(read_requests(prepare(config, tokenizer, target, tmp_path / "data", source=source)))

    return run


def failure(build, config: BenchmarkConfig, **changes: Any) -> str:
    with pytest.raises(PrepError) as caught:
        build(config, **changes)
    assert "\n" not in str(caught.value) and not isinstance(caught.value, NoExamples)
    return str(caught.value)


def shipped(name: str, **changes: Any) -> BenchmarkConfig:
    """conf/benchmark/<name>.yaml, as fold-prep reads it."""
    import hydra

    with hydra.initialize_config_module("conf", version_base="1.3"):
        found = cli._published_form(name)
    for key, value in changes.items():
        setattr(found, key, value)
    return found


# ----------------------------------------------------------------------------------------------------- text and JSON


@pytest.mark.parametrize("escaped", [True, False])
def test_half_a_surrogate_pair_is_told_with_its_row(escaped: bool, build, source) -> None:
    rows = [infinite_row(0, "longbook_sum_eng"), infinite_row(1, "longbook_sum_eng", context="a\ud800b")]
    text = "".join(json.dumps(row, ensure_ascii=escaped) + "\n" for row in rows)
    (source / "longbook_sum_eng.jsonl").write_bytes(text.encode("utf-8", "surrogatepass"))
    message = failure(build, shipped("en_sum"))
    told = "row 1: column 'context' holds half a surrogate pair at character 1"
    assert message == f"{source}/longbook_sum_eng.jsonl, {told}{SAME_FILE}"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"answer": ["v", "\udc00"]}, "column 'answer' holds half a surrogate pair at character 0"),
        ({"id": "\udc00"}, "column 'id' holds half a surrogate pair at character 0"),
        ({"id": ""}, "column 'id' is ''"),
    ],
)
def test_ids_and_answers_are_text(changes: dict, message: str, build, source) -> None:
    write_lines(source / "kv_retrieval.jsonl", [infinite_row(0, "kv_retrieval", **changes)])
    assert failure(build, shipped("retr_kv")) == f"{source}/kv_retrieval.jsonl, row 0: {message}{SAME_FILE}"


def test_an_empty_id_is_told_with_its_row(build, source) -> None:
    (source / "data.json").write_text(json.dumps([lbv2_row("a"), lbv2_row("")]))
    assert "data.json, row 1: column '_id' is empty; " in failure(build, shipped("lbv2"))
    write_gov(source, [gov_row("")])
    assert "data.zip, row 0: column '_id' is empty; " in failure(build, shipped("gov"))


def test_nul_and_a_byte_order_mark_do_no_harm(build, source, tokenizer) -> None:
    row = infinite_row(0, "longbook_sum_eng", context="a\0b")
    (source / "longbook_sum_eng.jsonl").write_bytes(b"\xef\xbb\xbf" + json.dumps(row).encode() + b"\r\n\r\n")
    (request,) = build(shipped("en_sum"))
    assert "<|user|>Sum up.\n\na\0b<|end|>" in tokenizer.decode(request.prompt_ids)
    (source / "data.json").write_bytes(b"\xef\xbb\xbf" + json.dumps([lbv2_row("a")]).encode())
    assert [r.id for r in build(shipped("lbv2"))] == ["a"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (json.dumps([lbv2_row("a")]).encode().replace(b"Text", b"T\xff"), "row 0: 'utf-8' codec can't decode byte"),
        (json.dumps([lbv2_row("a")]).encode("utf-16"), "row 0: 'utf-8' codec can't decode byte"),
        (json.dumps([lbv2_row("a")]).encode() * 2, "row 0: text follows the end of the array"),
        (b"[] x", "row 0: text follows the end of the array"),
        (b'[{"_id":' + b"[" * 100_000, "row 0: maximum recursion depth exceeded"),
    ],
)
def test_damaged_arrays_are_told_with_their_row(content: bytes, message: str, build, source) -> None:
    (source / "data.json").write_bytes(content)
    assert f"{source}/data.json, {message}" in failure(build, shipped("lbv2"))


def test_an_empty_file_is_a_mistake_in_a_group_too(build, source) -> None:
    (source / "longbook_sum_eng.jsonl").write_bytes(b"")
    assert f"en_sum: no row of its data is used; {source}/longbook_sum_eng.jsonl holds none" in failure(
        build, shipped("en_sum")
    )


def test_archives_from_a_mac_and_damaged_ones(build, source) -> None:
    def archive(member: str = "", spoil: Callable[[bytearray], None] | None = None) -> None:
        with zipfile.ZipFile(source / "data.zip", "w", zipfile.ZIP_DEFLATED) as made:
            if member:
                made.writestr(member, b"\0\5\x16\7")
            made.writestr("data/gov_report_e.jsonl", json.dumps(gov_row("a", 40)) + "\n")
        if spoil is not None:
            content = bytearray((source / "data.zip").read_bytes())
            spoil(content)
            (source / "data.zip").write_bytes(content)

    def encrypt(content: bytearray) -> None:
        content[content.index(b"PK\1\2") + 8] |= 1
        content[content.index(b"PK\3\4") + 6] |= 1

    def flip(content: bytearray) -> None:
        place = content.index(b"gov_report_e.jsonl") + len(b"gov_report_e.jsonl")
        content[place : place + 8] = b"\xff" * 8

    for spoil in (encrypt, flip):
        archive(spoil=spoil)
        assert f"{source}/data.zip is not a readable zip file (" in failure(build, shipped("gov"))
        for ledger in (source.parent / "cache" / "sources").iterdir():
            ledger.unlink()
    archive("__MACOSX/data/._gov_report_e.jsonl")
    assert [r.id for r in build(shipped("gov"))] == ["a"]


# ------------------------------------------------------------------------------------------------------------ parquet

SNAPSHOT: dict[str, str | None] = {"pkg/a/near.py": "near = 1\n", "pkg/far.py": "far = 1\n" * 200, "logo.png": None}


def lca(**changes: Any) -> BenchmarkConfig:
    fields = {"tasks": ["lca_32k"], "options": {"lengths": {"lca_32k": 500}}, **changes}
    return shipped("lca", **fields)


def test_other_physical_layouts_give_the_same_requests(build, source) -> None:
    """large_string and large_list, dictionary pages, one row a group, a further column."""
    rows = [lca_row(f"u__{i}", [60], [62, 60], SNAPSHOT) for i in range(3)]
    path = source / "data" / "large_context" / "test-00000-of-00001.parquet"
    write_parquet(path, rows, LCA)
    expected = build(lca())
    large, numbers = pa.large_string(), pa.large_list(pa.int64())
    schema = pa.schema(
        [
            ("extra", pa.int8()),
            ("repo", pa.string_view()),
            ("commit_hash", large),
            ("completion_file", pa.struct([("filename", large), ("content", large)])),
            ("repo_snapshot", pa.struct([("filename", pa.large_list(large)), ("content", pa.large_list(large))])),
            ("completion_lines_raw", pa.struct([("other", numbers), ("inproject", numbers)])),
        ]
    )
    table = pa.Table.from_pylist(rows, schema=schema)
    table = table.set_column(2, "commit_hash", pa.array([row["commit_hash"] for row in rows]).dictionary_encode())
    other = source / "lca" / "data" / "large_context" / "test-00000-of-00001.parquet"
    other.parent.mkdir(parents=True)
    pq.write_table(table, other, row_group_size=1, data_page_version="2.0", compression="zstd")
    changed = lca(min_prompt_tokens=1)  # another recipe, so that it is built again
    assert build(changed) == expected and len(expected) == 3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"completion_lines_raw": {"inproject": [None, 60]}}, "unexpected shape (TypeError: "),
        ({"repo_snapshot": {"filename": None, "content": None}}, "unexpected shape (TypeError: "),
        ({"repo_snapshot": {"filename": ["a.py", None], "content": ["x", "y"]}}, "repo_snapshot has a file without a"),
        ({"completion_file": {"filename": "", "content": "x"}}, "completion_file has no name or no content"),
    ],
)
def test_nulls_inside_a_snapshot_are_told_with_their_row(changes: dict, message: str, build, source) -> None:
    rows = [lca_row("v__w", [60], [60], SNAPSHOT), {**lca_row("u__r", [60], [60], SNAPSHOT), **changes}]
    write_parquet(source / "data" / "large_context" / "t.parquet", rows, LCA)
    assert f"t.parquet, row 1: {message}" in failure(build, lca())


def test_contents_that_are_no_text_are_told(build, source) -> None:
    path = source / "data" / "large_context" / "t.parquet"
    binary = pa.struct([("filename", pa.list_(TEXT)), ("content", pa.list_(pa.binary()))])
    row = {**lca_row("u__r", [60], [60], {}), "repo_snapshot": {"filename": ["a.py"], "content": [b"x"]}}
    write_parquet(path, [row], LCA.set(4, pa.field("repo_snapshot", binary)))
    assert "t.parquet, row 0: repo_snapshot has a content that is not text" in failure(build, lca())
    path.unlink()
    path = path.with_name("u.parquet")
    row = lca_row("u\u00e9QQQ__r", [60], [60], SNAPSHOT)
    pq.write_table(
        pa.Table.from_pylist([row], schema=LCA), path, compression="none", use_dictionary=False, write_statistics=False
    )
    path.write_bytes(path.read_bytes().replace("\u00e9QQQ".encode(), b"\xff\xfeQQQ"))
    assert "u.parquet is not a readable parquet file ('utf-8' codec can't decode" in failure(build, lca())


def test_repobench_rows_are_told_apart_across_the_parts_of_a_data_set(build, source, tokenizer) -> None:
    """Row numbers start again in every part: row 0 of the second one is another example of the same file."""
    folder = source / "repobench_python" / "data"
    parts = [
        [repobench_row("a.py", "32k", code="first"), repobench_row("b.py", "32k")],
        [repobench_row("a.py", "32k", code="second"), repobench_row("c.py", "64k")],
    ]
    for number, rows in enumerate(parts):
        write_parquet(folder / f"cross_file_first-{number:05}-of-00002.parquet", rows, REPOBENCH)
    java = source / "repobench_java" / "data" / "cross_file_first-00000-of-00001.parquet"
    write_parquet(java, [repobench_row("F.java", "32k")], REPOBENCH)
    requests = build(shipped("repobench"))
    assert [r.meta["source_id"] for r in requests] == ["u/r/a.py", "u/r/b.py", "u/r/c.py", "u/r/F.java"]
    assert tokenizer.decode(requests[0].prompt_ids).endswith("first\n")


def test_repobench_refuses_a_snippet_that_is_null(build, source) -> None:
    row = repobench_row("a.py", "32k")
    row["context"][1]["snippet"] = None
    for language, rows in (("python", [row]), ("java", [repobench_row("F.java", "32k")])):
        write_parquet(source / f"repobench_{language}" / "cross_file_first-0.parquet", rows, REPOBENCH)
    assert "row 0: column 'context' has a snippet without path or text" in failure(build, shipped("repobench"))


def test_speedbench_first_messages_are_the_users(build, source) -> None:
    config = shipped("speed_qualitative")
    for messages, message in (
        ([{"role": "system", "content": "s"}], "the first of 'messages' is the system's, not the user's"),
        ([{"role": "user", "content": "\ud800"}], "column 'turns' holds half a surrogate pair"),
    ):
        path = source / f"qualitative_{messages[0]['role']}.jsonl"
        write_lines(path, [{"question_id": "a", "category": "math", "messages": messages}])
        assert f"{path}, row 0: {message}" in failure(build, config)
        path.unlink()


# ---------------------------------------------------------------------------------------------------- the right files


def test_a_part_of_a_data_set_never_stands_in_for_another(build, source) -> None:
    """The part is told by its folder: no file of another split or tier may be taken because of its suffix."""
    write_parquet(source / "throughput_16k" / "test.parquet", [speed_row(1, ["x"])], SPEED)
    assert f"{source} holds no file *throughput_1k/*.parquet" in failure(build, shipped("speed_short"))
    rows = [lca_row("u__r", [60], [60], SNAPSHOT)]
    write_parquet(source / "data" / "huge_context" / "test-00000-of-00001.parquet", rows, LCA)
    assert f"{source} holds no file data/large_context/*.parquet" in failure(build, lca())
    (source / "data" / "huge_context").rename(source / "data" / "large_context")
    lengths = {"lengths": {"lca_180k": 500}}
    assert f"{source} holds no file data/huge_context/*.parquet" in failure(
        build, shipped("lca_huge", tasks=["lca_180k"], options=lengths)
    )
    # In a folder of the benchmark's own, plain names will do.
    (source / "lca_huge").mkdir()
    write_parquet(source / "lca_huge" / "test-00000-of-00001.parquet", rows, LCA)
    assert len(build(shipped("lca_huge", tasks=["lca_180k"], options=lengths))) == 1


def test_one_file_cannot_be_several_tiers(tmp_path: Path, source, tokenizer, target) -> None:
    path = source / "throughput_1k.parquet"
    write_parquet(path, [speed_row(1, ["x"])], SPEED)
    with pytest.raises(PrepError, match="is one file, speed_short needs one for each of speed_1k, speed_2k, speed_8k"):
        prepare(shipped("speed_short"), tokenizer, target, tmp_path / "data", source=path)


def test_an_exclude_list_may_start_with_a_byte_order_mark(tmp_path: Path) -> None:
    (tmp_path / "seen.txt").write_bytes(b"\xef\xbb\xbfa\r\n b \r\n")
    assert read_exclude_list(str(tmp_path / "seen.txt")) == {"a", "b"}


def _note(number: int, gate: Any) -> None:
    gate.wait()
    for turn in range(20):
        fetch._update_ledger(
            "k", lambda record, name=f"{number}/{turn}": record.setdefault("sha256", {}).update({name: "x"})
        )


def test_preparations_at_once_keep_each_others_hashes(cache: Path) -> None:
    """A hash that is lost would be recorded again at the next use, whatever the file is by then."""
    context = get_context("fork")
    gate = context.Barrier(3)
    others = [context.Process(target=_note, args=(number, gate)) for number in range(3)]
    for process in others:
        process.start()
    for process in others:
        process.join()
        assert process.exitcode == 0
    assert len(fetch._read_ledger("k")["sha256"]) == 60


@pytest.mark.parametrize("changes", [{"sources": None}, {"sources": [{}]}, {"sources": [5]}, {"counts": None}])
def test_an_edited_manifest_is_built_again(changes: dict, tmp_path: Path, source, tokenizer, target) -> None:
    write_gov(source, [gov_row("a")])
    arguments = (shipped("gov"), tokenizer, target, tmp_path / "data", source)
    sidecar = manifest_path(prepare(*arguments))
    built = sidecar.read_text()
    sidecar.write_text(json.dumps({**json.loads(built), **changes}))
    prepare(*arguments, check_sources=True)
    assert sidecar.read_text() == built


# --------------------------------------------------------------------------------------------- numbers and tokenizers


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("swebench", {"n": -1}, "benchmark.n=-1 for swebench: must be at least 1"),
        ("swebench", {"n": 0}, "benchmark.n=0 for swebench: must be at least 1"),
        ("gov", {"min_prompt_tokens": -1}, "benchmark.min_prompt_tokens=-1 for gov: must be at least 0"),
        ("gov", {"max_new_tokens": 0}, "gov for tiny, example a: max_new_tokens must be a positive integer, not 0"),
        ("lca", {"options": {"lengths": {"lca_32k": "500"}}}, "options.lengths gives the tokens of every task"),
        ("lca", {"options": {"lengths": [500]}}, "options.lengths gives the tokens of every task"),
        ("repobench", {"options": {"sample": {"repobench_java": -1}}}, "is not {task: files per level} with tasks of"),
        ("repobench", {"options": {"sample": {"java": 134}}}, "is not {task: files per level} with tasks of"),
        ("en_qa", {"tasks": ["en_qa", "en_mc"]}, "no task 'en_qa+en_mc' in InfiniteBench"),
    ],
)
def test_options_that_would_select_something_else_are_refused(name, changes, message, build, source) -> None:
    write_gov(source, [gov_row("a")])
    write_lines(source / "longbook_qa_eng.jsonl", [infinite_row(0, "longbook_qa_eng")])
    write_parquet(source / "data" / "large_context" / "t.parquet", [lca_row("u", [60], [60], SNAPSHOT)], LCA)
    for language, row in (("python", "a.py"), ("java", "F.java")):
        path = source / f"repobench_{language}" / "cross_file_first-0.parquet"
        write_parquet(path, [repobench_row(row, "32k")], REPOBENCH)
    assert message in failure(build, shipped(name, **changes))


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% for %}", "gov for tiny: Expected an expression"),
        ("{{ raise_exception('no users here') }}", "gov for tiny: no users here"),
        ("{{ messages[3].content.x }}", "gov for tiny: "),
        ("", "gov for tiny, example a: prompt_ids is empty"),
    ],
)
def test_a_chat_template_that_fails_is_one_line(
    template: str, message: str, build, source, tokenizer, monkeypatch
) -> None:
    write_gov(source, [gov_row("a")])
    monkeypatch.setattr(tokenizer, "chat_template", template)
    assert failure(build, shipped("gov")).startswith(message)


def test_truncation_and_padding_of_a_tokenizer_file_have_no_say(tmp_path: Path) -> None:
    made = make_tokenizer()
    made.save_pretrained(tmp_path / "plain")
    made.backend_tokenizer.enable_truncation(50)
    made.backend_tokenizer.enable_padding(length=64, pad_id=1, pad_token="</s>")
    made.save_pretrained(tmp_path / "limited")
    plain, loaded = (AutoTokenizer.from_pretrained(tmp_path / name) for name in ("plain", "limited"))
    assert tokenizer_sha256(loaded) == tokenizer_sha256(plain)
    assert [len(ids) for ids in encode_pieces(loaded, ["x = 1\n" * 500, "a"])] == [
        len(ids) for ids in encode_pieces(plain, ["x = 1\n" * 500, "a"])
    ]


def test_sources_keep_the_places_of_shipped_configurations() -> None:
    """A local pattern without a name of its own would match every file of that kind."""
    for name in ("gov", "lbv2", "lca", "lca_huge", "swebench", "repobench", "speed_short", "speed_long"):
        for part in shipped(name).sources:
            assert isinstance(part, SourceConfig) and not any(pattern.startswith("*.") for pattern in part.local)
