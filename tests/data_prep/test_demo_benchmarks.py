"""Demo benchmarks over the running interpreter's standard library and over a small fake one."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from data_prep.config import BenchmarkConfig
from data_prep.demo import benchmarks as demo
from data_prep.infinitebench import generated_kv
from data_prep.prepare import prepare, prepare_demo
from data_prep.select import PrepError
from data_prep.tokens import TargetSpec
from harness.requests import load_manifest, manifest_path, read_requests, required_context

LENGTH = {"1K": 1024, "2K": 2048, "4K": 4096, "7K": 7168}


@pytest.mark.parametrize("benchmark", ["demo_code", "demo_docs", "demo_kv", "demo_copy"])
def test_levels_lengths_and_determinism(benchmark: str, tokenizer, tmp_path: Path) -> None:
    path = prepare_demo(benchmark, tokenizer, "tiny", tmp_path / "a", n=2)
    requests = list(read_requests(path))
    assert [r.meta["level"] for r in requests] == ["1K", "1K", "2K", "2K", "4K", "4K", "7K", "7K"]
    bos = tokenizer.bos_token_id
    for request in requests:
        length = LENGTH[request.meta["level"]]
        assert request.prompt_ids[0] == bos and request.prompt_ids[1] != bos
        assert request.meta["length"] == len(request.prompt_ids)
        assert required_context(len(request.prompt_ids), request.max_new_tokens) <= 8192
        assert request.max_new_tokens == 64 and request.stop_ids == (tokenizer.eos_token_id,)
        if benchmark in ("demo_code", "demo_copy"):
            assert len(request.prompt_ids) == length
        else:
            assert length * 0.85 <= len(request.prompt_ids) <= length
            assert tokenizer.decode(request.prompt_ids[-1:]) == "<|assistant|>"
    # The same examples at every level: a curve over levels compares like with like.
    by_level = {level: [r.meta["source_id"] for r in requests if r.meta["level"] == level] for level in LENGTH}
    assert len({tuple(ids) for ids in by_level.values()}) == 1 and len(set(by_level["1K"])) == 2
    manifest = load_manifest(path)
    assert manifest["python"] == demo.PYTHON and manifest["counts"][benchmark]["kept"] == 8
    again = prepare_demo(benchmark, tokenizer, "tiny", tmp_path / "b", n=2)
    assert again.read_bytes() == path.read_bytes()
    assert manifest_path(again).read_bytes() == manifest_path(path).read_bytes()


def test_a_larger_n_keeps_the_smaller_ones_examples(tokenizer, tmp_path: Path) -> None:
    few = {r.id for r in read_requests(prepare_demo("demo_code", tokenizer, "tiny", tmp_path, n=2))}
    many = {r.id for r in read_requests(prepare_demo("demo_code", tokenizer, "tiny", tmp_path, n=6))}
    assert few < many and len(many) == 24


@pytest.mark.parametrize(
    ("tasks", "message"),
    [
        (["foo"], r"benchmark.tasks=\[foo\]: demo_code has demo_code"),
        ([], r"benchmark.tasks=\[\]: demo_code has demo_code"),
        (["demo_code", "foo"], "demo_code has no row of foo, only demo_code"),
    ],
)
def test_a_task_that_is_none_is_one_line(tasks: list[str], message: str, tokenizer, tmp_path: Path) -> None:
    config = BenchmarkConfig("demo_code", loader="demo", tasks=tasks, max_new_tokens=8, chat=False, n=1, levels=["1K"])
    with pytest.raises(PrepError, match=message):
        prepare(config, tokenizer, TargetSpec("demo", 8192, (0,)), tmp_path)
    assert not list(tmp_path.glob("*/*.zst"))


def test_a_valid_file_is_reused_and_a_changed_one_rebuilt(tokenizer, tmp_path: Path) -> None:
    path = prepare_demo("demo_kv", tokenizer, "tiny", tmp_path, n=1)
    data, stamp = path.read_bytes(), path.stat().st_mtime_ns
    assert prepare_demo("demo_kv", tokenizer, "tiny", tmp_path, n=1).stat().st_mtime_ns == stamp
    path.write_bytes(data[:-1])
    assert prepare_demo("demo_kv", tokenizer, "tiny", tmp_path, n=1).read_bytes() == data
    prepare_demo("demo_kv", tokenizer, "tiny", tmp_path, n=1, max_new_tokens=8)
    assert {r.max_new_tokens for r in read_requests(path)} == {8}


def test_two_preparations_at_once_build_one_file(tokenizer, target, tmp_path: Path) -> None:
    config = BenchmarkConfig("demo_kv", loader="demo", tasks=["demo_kv"], max_new_tokens=8, n=3, levels=["1K"])
    built: list[str] = []

    def run(_: int) -> Path:
        return prepare(config, tokenizer, target, tmp_path, on_request=lambda request: built.append(request.id))

    with ThreadPoolExecutor(2) as pool:
        assert len(set(pool.map(run, range(2)))) == 1
    assert built == ["kv/0@1K", "kv/1@1K", "kv/2@1K"]


def test_copied_passage_lies_far_back_and_occurs_once(tokenizer, tmp_path: Path) -> None:
    for request in read_requests(prepare_demo("demo_copy", tokenizer, "tiny", tmp_path, n=3)):
        ids, start, size = request.prompt_ids, request.meta["passage_start"], request.meta["passage_tokens"]
        assert ids[start : start + size] == ids[-size:]
        assert len(ids) - start > 0.6 * len(ids)
        matches = [i for i in range(len(ids) - size + 1) if ids[i : i + size] == ids[-size:]]
        assert matches == [start, len(ids) - size]
        assert tokenizer.decode(ids[start - 1 : start]).endswith("\n")


def test_code_is_cut_where_the_package_is_used(tokenizer, tmp_path: Path) -> None:
    for request in read_requests(prepare_demo("demo_code", tokenizer, "tiny", tmp_path, n=4)):
        name, cut = request.meta["source_id"].rsplit(":", 1)
        files = demo.package_files(name.split("/")[0])
        assert request.meta["cut_line"] == int(cut) >= 50
        prefix = "\n".join(files[name].split("\n")[: int(cut)])
        assert tokenizer.decode(request.prompt_ids).endswith(f"# {name}\n{prefix}\n")
        assert int(cut) in demo.uses_of_package(name, files)
        assert "test" not in name.split("/") and "site-packages" not in name


def test_uses_resolve_imports() -> None:
    main = (
        "import os, p.tool\nimport p.sub.deep as d\nfrom . import tool\nfrom .tool import helper as h, Thing\n"
        "from p.sub.deep import *\nfrom other import helper\n"
        "helper()\n"  # 6: another package's
        "h()\n"  # 7
        "x = [\n    Thing\n]\n"  # 9
        "tool.helper\n"  # 11
        "p.tool.Thing\n"  # 12
        "d.dig()\n"  # 13
        "dig()\n"  # 14
        "tool.CONSTANT\n"  # 15: no function or class
        "os.helper\n"  # 16: not this package's module
        "def mine(): pass\nmine()\n"  # 18: its own
        "d = Thing  # rebinding is a use too\n"  # 19
    )
    files = {
        "p/__init__.py": "",
        "p/main.py": main,
        "p/tool.py": "CONSTANT = 1\nif CONSTANT:\n    def helper(): pass\nclass Thing: pass\n",
        "p/sub/__init__.py": "",
        "p/sub/deep.py": "def dig(): pass\ndef mine(): pass\n",
        "p/broken.py": "def (",
    }
    assert demo.uses_of_package("p/main.py", files) == [7, 9, 11, 12, 13, 14, 19]
    assert demo.uses_of_package("p/broken.py", files) == []
    # Relative imports from a package's __init__ and from a level up.
    files = {
        "p/__init__.py": "from .a import f\nf()\n",
        "p/a.py": "def f(): pass\n",
        "p/s/__init__.py": "",
        "p/s/b.py": "from ..a import f\nfrom .. import a\nf(); a.f()\n",
    }
    assert demo.uses_of_package("p/__init__.py", files) == [1]
    assert demo.uses_of_package("p/s/b.py", files) == [2]


def test_generated_kv_has_the_benchmarks_form() -> None:
    text, answer = generated_kv("kv/0", 40)
    data = json.loads(text.split("JSON data:\n")[1].split("\n")[0])
    key = text.split('Key: "')[1].split('"')[0]
    assert len(data) == 40 and data[key] == answer
    assert text.endswith(f'\n\nKey: "{key}"\nThe value associated with the specified key is: ')
    assert generated_kv("kv/0", 40) == (text, answer) != generated_kv("kv/1", 40)


def test_a_stripped_library_is_an_error_not_a_shorter_list(tokenizer, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(demo, "_packages", lambda: ("json",))
    with pytest.raises(PrepError, match=r"demo_code: 40 examples were asked for, .* gives \d+; lower benchmark.n"):
        prepare_demo("demo_code", tokenizer, "tiny", tmp_path, n=40)
    assert [p.name for p in (tmp_path / "demo_code").iterdir() if not p.name.endswith(".lock")] == []
    with pytest.raises(PrepError, match="no demo benchmark 'demo_x'"):
        prepare_demo("demo_x", tokenizer, "tiny", tmp_path)
