"""The data sets' files: downloaded once at a pinned revision, or found in a local copy, and verified every time.

A download is `huggingface_hub`'s: resumable, shared with other programs through its cache, offline once complete. What
is pinned in conf/benchmark is checked against that. For a file without a published hash, the first use records its
sha256 (and the commit, where only a branch name is known) in the ledger below the cache root; every later use must
match, so a file that changed between two runs stops the preparation instead of changing the requests silently.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import Any

from filelock import FileLock

from data_prep.config import SourceConfig
from data_prep.demo.target import default_cache_dir
from data_prep.select import PrepError
from harness.requests import write_atomic


@dataclass(frozen=True)
class SourceFile:
    """A verified file. key: the source's key in the benchmark's configuration. name: path within the data set."""

    key: str
    name: str
    path: Path
    repo: str
    revision: str
    sha256: str
    size: int

    def facts(self) -> dict[str, Any]:
        """What the manifest says of it; no path, which differs between machines."""
        return {
            "repo": self.repo,
            "revision": self.revision,
            "name": self.name,
            "sha256": self.sha256,
            "bytes": self.size,
        }


def fetch(benchmark: str, sources: Iterable[SourceConfig], local: Path | None = None) -> list[SourceFile]:
    """All files of `sources`, in the order of the sources and of their names.

    local: a folder to read instead of the Hub (or one file, for a benchmark with a single one). Raises PrepError when a
    file is missing, cannot be downloaded, or is not the one that is pinned or was used before.
    """
    found: list[SourceFile] = []
    sources = list(sources)
    if local is not None and local.is_file() and len(sources) > 1:
        wanted = ", ".join(source.key for source in sources)
        raise PrepError(f"source={local} is one file, {benchmark} needs one for each of {wanted}; give their folder")
    for source in sources:
        found += _local_files(benchmark, source, local) if local is not None else _hub_files(source)
    return found


def _local_files(benchmark: str, source: SourceConfig, local: Path) -> list[SourceFile]:
    if not local.exists():
        raise PrepError(f"source={local} does not exist; give the folder with the files of {source.repo}")
    if local.is_file():
        return [_verified(source, local.name, local, "local", f"file:{local.resolve()}")]
    # A copy of several data sets keeps each in a folder of its own; the nearest name wins.
    names = [f"{benchmark}/{source.key}", source.key, source.repo.rpartition("/")[2], benchmark]
    folder = next((local / name for name in names if name and (local / name).is_dir()), local)
    every = sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())
    for matches in (_at_its_place, _by_file_name):
        for pattern in [*source.files, *source.local]:
            if names := [name for name in every if matches(name, pattern)]:
                ledger = f"folder:{folder.resolve()}"
                return [_verified(source, name, folder / name, "local", ledger) for name in names]
    wanted = " or ".join([*source.files, *source.local])
    raise PrepError(
        f"{folder} holds no file {wanted} of {source.repo}; put it there, or into {benchmark}/ or "
        f"{source.repo.rpartition('/')[2]}/ below the source folder"
    )


def _at_its_place(name: str, pattern: str) -> bool:
    if pattern.startswith("./"):
        return "/" not in name and fnmatchcase(name, pattern[2:])
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"*/{pattern}")


def _by_file_name(name: str, pattern: str) -> bool:
    """For a copy without the data set's folders: not where only they tell a file from those of another part."""
    wanted = PurePosixPath(pattern).name
    if pattern.startswith("./") or wanted.startswith("*."):
        return False
    return fnmatchcase(PurePosixPath(name).name, wanted)


def _hub_files(source: SourceConfig) -> list[SourceFile]:
    from huggingface_hub import HfApi, hf_hub_download
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    ledger = f"hub:{source.repo}@{source.revision}"
    known = _read_ledger(ledger)
    try:
        commit = known.get("commit")
        names = sorted(known.get("names", {}).get("|".join(source.files), []))
        if not commit or not names:
            info = HfApi().dataset_info(source.repo, revision=source.revision)
            commit = commit or info.sha
            listed = [entry.rfilename for entry in info.siblings or []]
            if commit != info.sha:  # the branch has moved on since the first use; stay where we were
                info = HfApi().dataset_info(source.repo, revision=commit)
                listed = [entry.rfilename for entry in info.siblings or []]
            names = sorted({name for name in listed for pattern in source.files if fnmatchcase(name, pattern)})
            if not names:
                raise PrepError(f"{source.repo} at {commit} has no file {' or '.join(source.files)}; {_remedy(source)}")

            def note(record: dict[str, Any]) -> None:
                if record.setdefault("commit", commit) == commit:
                    record.setdefault("names", {})["|".join(source.files)] = names

            if _update_ledger(ledger, note)["commit"] != commit:
                return _hub_files(source)  # another preparation was first, and the branch moved in between
        paths = [_download(hf_hub_download, source, name, commit) for name in names]
    except PrepError:
        raise
    except GatedRepoError:
        raise PrepError(
            f"{source.repo} is gated: accept its terms on its page and log in with `hf auth login`, then run again"
        ) from None
    except (RepositoryNotFoundError, RevisionNotFoundError) as error:
        raise PrepError(f"{source.repo} at {source.revision}: {_first_line(error)}; {_remedy(source)}") from None
    except Exception as error:  # httpx's, the client's and the system's errors alike: the user needs one line
        raise PrepError(
            f"{source.repo} at {source.revision} cannot be fetched ({_first_line(error)}); {_remedy(source)}"
        ) from None
    return [_verified(source, name, path, commit, ledger) for name, path in zip(names, paths, strict=True)]


def _download(download: Any, source: SourceConfig, name: str, commit: str) -> Path:
    from huggingface_hub.errors import LocalEntryNotFoundError

    arguments = {"repo_id": source.repo, "filename": name, "revision": commit, "repo_type": "dataset"}
    try:
        return Path(download(**arguments, local_files_only=True))  # complete in the cache: no network needed
    except LocalEntryNotFoundError:
        return Path(download(**arguments))


def _verified(source: SourceConfig, name: str, path: Path, revision: str, ledger: str) -> SourceFile:
    try:
        with path.open("rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
        size = path.stat().st_size
    except OSError as error:
        raise PrepError(f"{path} cannot be read ({error.strerror}); {_remedy(source)}") from None
    pinned = source.sha256.get(name) or source.sha256.get(PurePosixPath(name).name)
    if pinned and digest != pinned:
        raise PrepError(
            f"{path} is not the pinned {name} of {source.repo} (sha256 {digest[:16]}..., expected {pinned[:16]}...); "
            "delete it and run again"
        )
    first = _read_ledger(ledger).get("sha256", {}).get(name)
    if first is None:

        def note(record: dict[str, Any]) -> None:
            record.setdefault("sha256", {}).setdefault(name, digest)

        first = _update_ledger(ledger, note)["sha256"][name]
    if first != digest:
        raise PrepError(
            f"{path} has changed since it was first used (sha256 {digest[:16]}..., then {first[:16]}...); "
            f"restore it, or delete {_ledger_path(ledger)} to accept the new content"
        )
    return SourceFile(source.key, name, path, source.repo, revision, digest, size)


def _ledger_path(key: str) -> Path:
    return default_cache_dir() / "sources" / f"{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"


def _read_ledger(key: str) -> dict[str, Any]:
    path = _ledger_path(key)
    try:
        return json.loads(path.read_bytes())
    except FileNotFoundError:
        return {"key": key}
    except (OSError, ValueError) as error:
        raise PrepError(f"{path}, the record of hashes of {key}, is unreadable ({error}); delete it") from None


def _update_ledger(key: str, change: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Apply `change` to the ledger and return it; one process at a time, or one's hashes would overwrite another's."""
    path = _ledger_path(key)
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(path.parent.with_name(".sources.lock")):
        content = _read_ledger(key)
        change(content)
        write_atomic(path, (json.dumps(content, indent=1, sort_keys=True) + os.linesep).encode())
    return content


def _remedy(source: SourceConfig) -> str:
    gated = f" ({source.gated})" if source.gated else ""
    return f"connect to the Hub, or give a local copy of {source.repo}{gated} with source=<folder>"


def _first_line(error: Exception) -> str:
    return " ".join(str(error).split())[:160] or type(error).__name__
