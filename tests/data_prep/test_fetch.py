"""Sources: pinning, the ledger of first-use hashes, offline use, local copies; official prompts and their checksums."""

from __future__ import annotations

import hashlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import huggingface_hub
import pytest
from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError
from prep_fixtures import FAKE_PROMPTS, install_prompts

from data_prep.config import SourceConfig
from data_prep.fetch import fetch
from data_prep.prompts import PROMPTS, load_prompt
from data_prep.select import PrepError


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FOLD_BENCH_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


class Hub:
    """A data set repository with a moving branch, and a download cache like the client's."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.head = "c1"
        self.trees = {"c1": {"data/test-0.parquet": b"zero", "data/test-1.parquet": b"one", "README.md": b"r"}}
        self.online = True
        self.downloads: list[str] = []
        self.refusal: Exception | None = None

    def dataset_info(self, repo: str, revision: str) -> Any:
        self._reach()
        commit = self.head if revision == "main" else revision
        return SimpleNamespace(sha=commit, siblings=[SimpleNamespace(rfilename=name) for name in self.trees[commit]])

    def download(
        self, repo_id: str, filename: str, revision: str, repo_type: str, local_files_only: bool = False
    ) -> str:
        path = self.folder / revision / filename
        if not path.exists():
            if local_files_only:
                raise LocalEntryNotFoundError("not cached")
            self._reach()
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(self.trees[revision][filename])
            self.downloads.append(filename)
        return str(path)

    def _reach(self) -> None:
        if self.refusal:
            raise self.refusal
        if not self.online:
            raise ConnectionError("Name or service not known")


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    made = Hub(tmp_path / "hub")
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: made)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", made.download)
    return made


SOURCE = SourceConfig(repo="org/set", files=["data/test-*.parquet"])


def error(*arguments: Any) -> str:
    with pytest.raises(PrepError) as caught:
        fetch(*arguments)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_files_are_downloaded_once_and_work_offline(hub: Hub) -> None:
    first = fetch("b", [SOURCE])
    assert [(f.name, f.revision, f.size) for f in first] == [
        ("data/test-0.parquet", "c1", 4),
        ("data/test-1.parquet", "c1", 3),
    ]
    assert first[0].facts() == {
        "repo": "org/set", "revision": "c1", "name": "data/test-0.parquet", "bytes": 4,
        "sha256": hashlib.sha256(b"zero").hexdigest(),
    }  # fmt: skip
    hub.online = False
    assert fetch("b", [SOURCE]) == first and hub.downloads == ["data/test-0.parquet", "data/test-1.parquet"]


def test_an_interrupted_download_is_completed(hub: Hub) -> None:
    fetch("b", [SOURCE])
    (hub.folder / "c1" / "data" / "test-1.parquet").unlink()
    assert len(fetch("b", [SOURCE])) == 2 and hub.downloads[-1] == "data/test-1.parquet"


def test_a_branch_stays_where_it_was_first_used(hub: Hub) -> None:
    fetch("b", [SOURCE])
    hub.head = "c2"
    hub.trees["c2"] = {"data/test-0.parquet": b"new"}
    assert {f.revision for f in fetch("b", [SOURCE])} == {"c1"}
    other = SourceConfig(repo="org/set", files=["README.md"])  # another benchmark of the same repository
    assert [(f.name, f.revision) for f in fetch("c", [other])] == [("README.md", "c1")]


def test_a_changed_byte_in_the_cache_is_detected(hub: Hub) -> None:
    (file, _) = fetch("b", [SOURCE])
    file.path.write_bytes(b"zerO")
    assert "test-0.parquet has changed since it was first used" in error("b", [SOURCE])
    file.path.write_bytes(b"zero")
    assert fetch("b", [SOURCE])[0] == file


def test_a_pinned_hash_is_enforced_on_the_first_use(hub: Hub) -> None:
    pinned = SourceConfig(repo="org/set", files=["data/test-0.parquet"], sha256={"data/test-0.parquet": "0" * 64})
    assert "is not the pinned data/test-0.parquet of org/set" in error("b", [pinned])
    pinned.sha256 = {"data/test-0.parquet": hashlib.sha256(b"zero").hexdigest()}
    assert len(fetch("b", [pinned])) == 1


def test_what_the_hub_refuses_is_one_line_with_a_remedy(hub: Hub) -> None:
    hub.online = False
    message = error("b", [SOURCE])
    assert message == (
        "org/set at main cannot be fetched (Name or service not known); connect to the Hub, or give a local copy of "
        "org/set with source=<folder>"
    )
    reply = MagicMock()
    hub.refusal = GatedRepoError("Access is restricted.\nSee the page.", response=reply)
    assert "org/set is gated: accept its terms on its page and log in with `hf auth login`" in error("b", [SOURCE])
    hub.refusal = RepositoryNotFoundError("404", response=reply)
    assert "org/set at main: 404; connect to the Hub" in error("b", [SOURCE])
    hub.refusal, hub.online = None, True
    wrong = SourceConfig(repo="org/set", files=["nothing.zip"], gated="needs a licence")
    assert "org/set at c1 has no file nothing.zip" in error("b", [wrong])


def test_local_copies_by_place_by_name_and_alone(tmp_path: Path) -> None:
    source = SourceConfig(key="part", repo="org/set-name", files=["data/test-*.parquet"], local=["other*.parquet"])
    copy = tmp_path / "copy"
    for place in ("other-1.parquet", "deep/test-0.parquet", "x/data/test-9.parquet", "set-name/data/test-0.parquet"):
        (copy / place).parent.mkdir(parents=True, exist_ok=True)
        (copy / place).write_bytes(place.encode())

    def names() -> list[str]:
        return [f.path.relative_to(copy).as_posix() for f in fetch("bench", [source], copy)]

    assert names() == ["set-name/data/test-0.parquet"]  # a folder of the data set's name wins
    (copy / "set-name" / "data" / "test-0.parquet").unlink()
    assert "holds no file data/test-*.parquet or other*.parquet of org/set-name" in error("bench", [source], copy)
    (copy / "set-name" / "data").rmdir()
    (copy / "set-name").rmdir()
    assert names() == ["x/data/test-9.parquet"]
    (copy / "x" / "data" / "test-9.parquet").unlink()
    assert names() == ["other-1.parquet"]
    (copy / "other-1.parquet").unlink()
    assert names() == ["deep/test-0.parquet"]
    assert [f.path for f in fetch("bench", [source], copy / "deep" / "test-0.parquet")] == [
        copy / "deep" / "test-0.parquet"
    ]
    (copy / "deep" / "test-0.parquet").write_bytes(b"changed")
    assert "has changed since it was first used" in error("bench", [source], copy)
    assert "does not exist; give the folder with the files of org/set-name" in error("bench", [source], copy / "no")


def test_a_damaged_ledger_is_named(hub: Hub, cache: Path) -> None:
    fetch("b", [SOURCE])
    (ledger,) = (cache / "sources").iterdir()
    ledger.write_text("{")
    assert f"{ledger}, the record of hashes of hub:org/set@main, is unreadable" in error("b", [SOURCE])


# ------------------------------------------------------------------------------------------------------------- prompts


def test_prompts_come_from_the_cached_upstream_files(monkeypatch, cache: Path) -> None:
    install_prompts(monkeypatch, cache)
    assert {name: load_prompt(name) for name in PROMPTS} == FAKE_PROMPTS


def test_a_changed_prompt_stops(monkeypatch, cache: Path) -> None:
    install_prompts(monkeypatch, cache)
    prompt = PROMPTS["lbv2"]
    file = cache / "prompts" / prompt.repo / prompt.commit / prompt.path
    file.write_text(FAKE_PROMPTS["lbv2"] + "\n")
    with pytest.raises(PrepError, match=rf"{file}: prompt lbv2 has sha256 .*; delete the file and run again"):
        load_prompt("lbv2")
    kv = PROMPTS["kv_retrieval"]
    file = cache / "prompts" / kv.repo / kv.commit / kv.path
    for content in ("gpt4_templates = {}", "gpt4_templates = 3", "x =", 'gpt4_templates = {"kv_retrieval": "a" + b}'):
        file.write_text(content)
        with pytest.raises(PrepError, match="prompt kv_retrieval cannot be read from it"):
            load_prompt("kv_retrieval")


def test_prompts_are_fetched_once_and_local_copies_win(monkeypatch, cache: Path, tmp_path: Path) -> None:
    install_prompts(monkeypatch, cache)
    prompt = PROMPTS["lbv2"]
    cached = cache / "prompts" / prompt.repo / prompt.commit / prompt.path
    content = cached.read_bytes()
    cached.unlink()
    asked = []

    def urlopen(url: str, timeout: float) -> Any:
        asked.append(url)
        if len(asked) == 1:
            raise OSError("no route to host")
        return (tmp_path / "reply").open("rb")

    (tmp_path / "reply").write_bytes(content)
    monkeypatch.setattr("urllib.request.urlopen", urlopen)
    with pytest.raises(
        PrepError, match=rf"cannot be fetched from https://.*0shot.txt \(no route to host\); put the file at {cached}"
    ):
        load_prompt("lbv2")
    assert load_prompt("lbv2") == load_prompt("lbv2") == FAKE_PROMPTS["lbv2"]
    assert len(asked) == 2 and prompt.commit in asked[0]
    (tmp_path / "copy" / "prompts").mkdir(parents=True)
    (tmp_path / "copy" / "prompts" / "0shot.txt").write_text("other")
    with pytest.raises(PrepError, match=r"copy/prompts/0shot.txt: prompt lbv2 has sha256"):
        load_prompt("lbv2", tmp_path / "copy")
