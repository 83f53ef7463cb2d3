"""Request files: schema, integrity, determinism, atomic writes, the context rule."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest
import zstandard

from harness.requests import (
    Request,
    RequestFileError,
    load_manifest,
    manifest_path,
    prompt_sha256,
    read_requests,
    request_path,
    required_context,
    write_requests,
)


def make(name: str, **changes) -> Request:
    fields = {
        "id": name, "benchmark": "gov", "task": "gov", "prompt_ids": (1, 2, 49151), "max_new_tokens": 8,
        "stop_ids": (2,), "meta": {"length": 3, "level": "1K", "source_id": "ü\n\"x"},
    }  # fmt: skip
    return Request(**{**fields, **changes})


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return request_path(tmp_path, "gov", "llama")


def replace_lines(path: Path, edit) -> None:
    """Rewrite the file's lines and make the manifest's sha256 match, so that only the schema check can object."""
    lines = zstandard.ZstdDecompressor().decompressobj().decompress(path.read_bytes()).decode().splitlines()
    path.write_bytes(zstandard.ZstdCompressor().compress(("\n".join(edit(lines)) + "\n").encode()))
    manifest = json.loads(manifest_path(path).read_text())
    manifest["sha256"] = hashlib.sha256(path.read_bytes()).hexdigest()
    manifest_path(path).write_text(json.dumps(manifest))


def test_layout(path: Path, tmp_path: Path) -> None:
    assert path == tmp_path / "gov" / "llama.jsonl.zst"
    assert manifest_path(path) == tmp_path / "gov" / "llama.manifest.json"


def test_round_trip_keeps_everything(path: Path) -> None:
    requests = [make("007"), make("7", task="gov2", prompt_ids=(0, 2**32 - 1))]
    manifest = write_requests(path, iter(requests), {"dataset": "d"})
    assert list(read_requests(path)) == requests
    assert [r.id for r in read_requests(path)] == ["007", "7"]
    assert load_manifest(path) == manifest
    assert manifest["count"] == 2 and manifest["count_by_task"] == {"gov": 1, "gov2": 1}
    assert manifest["prompt_tokens"] == [2, 3] and manifest["dataset"] == "d"
    assert sorted(p.name for p in path.parent.iterdir()) == ["llama.jsonl.zst", "llama.manifest.json"]


def test_bytes_depend_on_the_requests_alone(tmp_path: Path) -> None:
    first, second = request_path(tmp_path / "a", "gov", "llama"), request_path(tmp_path / "b", "gov", "llama")
    write_requests(first, [make("a", meta={"x": 1, "a": 2}), make("b")], {})
    time.sleep(1.1)
    write_requests(second, [make("a", meta={"a": 2, "x": 1}), make("b")], {})
    assert first.read_bytes() == second.read_bytes()
    assert manifest_path(first).read_bytes() == manifest_path(second).read_bytes()


def test_duplicate_ids_are_refused_and_nothing_is_left(path: Path) -> None:
    with pytest.raises(RequestFileError, match="'a' appears twice"):
        write_requests(path, [make("a"), make("b"), make("a")], {})
    assert list(path.parent.iterdir()) == []


def test_a_failing_source_keeps_the_previous_file(path: Path) -> None:
    write_requests(path, [make("a")], {})

    def broken():
        yield make("b")
        raise OSError("disk on fire")

    with pytest.raises(OSError, match="disk on fire"):
        write_requests(path, broken(), {})
    assert [r.id for r in read_requests(path)] == ["a"]
    assert len(list(path.parent.iterdir())) == 2


def test_a_changed_byte_is_detected(path: Path) -> None:
    write_requests(path, [make("a")], {})
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(RequestFileError, match=r"llama.jsonl.zst has changed .*fold-prep benchmark=gov target=llama"):
        next(read_requests(path))


def test_missing_and_unfinished_files_say_how_to_prepare(path: Path) -> None:
    with pytest.raises(RequestFileError, match="does not exist; prepare it with: fold-prep benchmark=gov target=llama"):
        next(read_requests(path))
    write_requests(path, [make("a")], {})
    manifest_path(path).unlink()
    with pytest.raises(RequestFileError, match="did not finish"):
        next(read_requests(path))
    manifest_path(path).write_text("{")
    with pytest.raises(RequestFileError, match="is unreadable"):
        load_manifest(path)
    manifest_path(path).write_text('{"schema": "other"}')
    with pytest.raises(RequestFileError, match="schema 'other'"):
        load_manifest(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"id": 7}, "id must be a non-empty string"),
        ({"prompt_ids": []}, "prompt_ids is empty"),
        ({"prompt_ids": [1, -1]}, "token ids"),
        ({"prompt_ids": [1, True]}, "token ids"),
        ({"prompt_ids": [1.0]}, "token ids"),
        ({"prompt_ids": "12"}, "prompt_ids must be a list"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"meta": None}, "meta must be an object"),
        ({"extra": 1}, "'extra'"),
        ({"id": "a"}, "'a' appears twice"),
    ],
)
def test_wrong_lines_name_file_line_and_remedy(path: Path, change: dict, message: str) -> None:
    write_requests(path, [make("a"), make("b")], {})
    replace_lines(path, lambda lines: [lines[0], json.dumps({**json.loads(lines[1]), **change})])
    reader = read_requests(path)
    assert next(reader).id == "a"
    with pytest.raises(RequestFileError, match=rf"llama.jsonl.zst, line 2: .*{message}.*; prepare again: fold-prep"):
        next(reader)


def test_a_missing_line_is_noticed(path: Path) -> None:
    write_requests(path, [make("a"), make("b")], {})
    replace_lines(path, lambda lines: lines[:1])
    with pytest.raises(RequestFileError, match="holds 1 requests, its manifest says 2"):
        list(read_requests(path))


def test_prompt_hash_is_of_the_ids() -> None:
    assert prompt_sha256(make("a")) == hashlib.sha256(struct.pack("<3I", 1, 2, 49151)).hexdigest()
    assert prompt_sha256(make("a")) == prompt_sha256(make("b"))


@pytest.mark.parametrize(
    ("prompt", "limit", "need"),
    [(130495, 512, 131072), (130496, 512, 131328), (130879, 128, 131072), (130880, 128, 131328),
     (129807, 1200, 131072), (129808, 1200, 131328), (32191, 512, 32768), (32192, 512, 33024),
     (32575, 128, 32768), (32576, 128, 33024), (1, 1, 256), (191, 0, 256), (192, 0, 512)],
)  # fmt: skip
def test_required_context(prompt: int, limit: int, need: int) -> None:
    assert required_context(prompt, limit) == need


def test_kill_leaves_the_old_file_or_none(path: Path) -> None:
    """kill -9 while writing: what is left reads as complete (the old file), never as a shorter one."""
    write_requests(path, [make("old")], {})
    script = (
        "import sys; from pathlib import Path; from harness.requests import Request, write_requests\n"
        "def many():\n"
        "    for i in range(10**9):\n"
        "        if i == 2000: print('writing', flush=True)\n"
        "        yield Request(str(i), 'gov', 'gov', tuple(range(500)), 8, (2,), {})\n"
        "write_requests(Path(sys.argv[1]), many(), {})\n"
    )
    command, root = [sys.executable, "-c", script, str(path)], Path(__file__).parents[1]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, cwd=root)
    assert child.stdout is not None and child.stdout.readline()
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    assert [r.id for r in read_requests(path)] == ["old"]
    write_requests(path, [make("new")], {})
    assert [r.id for r in read_requests(path)] == ["new"]
