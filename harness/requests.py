"""Request files: what data_prep writes and every engine reads (the prompts of a benchmark as token ids).

A benchmark is tokenised once. All methods, all engines and the autoregressive baseline then read the same ids from
`<data>/<benchmark>/<target>.jsonl.zst` (one JSON object a line), beside which `<target>.manifest.json` says where the
ids come from and carries the file's sha256. Nothing downstream ever sees prompt text, so a second BOS or another chat
template cannot slip in between two arms.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import sys
import weakref
from array import array
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, cast

SCHEMA = "fold-bench-requests/1"
SUFFIX = ".jsonl.zst"
# Level and frame options are part of the format: byte-identical files on two machines need them fixed.
ZSTD_LEVEL = 3
# Paper, Appendix B.2: prompt + generation limit + 65 tokens, rounded up to a multiple of 256.
CONTEXT_MARGIN = 65
CONTEXT_MULTIPLE = 256


class RequestFileError(ValueError):
    """A request file or its manifest cannot be used. The message names the file, the line and the remedy."""


@dataclass(frozen=True)
class Request:
    """One prompt as an engine receives it.

    id: unique in its file, always a string ("007" stays "007"). benchmark, task: names of conf/benchmark and of the
    row of Table 7. prompt_ids: the whole input, special tokens included. max_new_tokens: generation limit.
    stop_ids: token ids that end the generation. meta: JSON values for the analysis (length, level, source_id, ...).
    Raises ValueError when a field has the wrong type or an impossible value.
    """

    id: str
    benchmark: str
    task: str
    prompt_ids: tuple[int, ...]
    max_new_tokens: int
    stop_ids: tuple[int, ...]
    meta: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("id", "benchmark", "task"):
            value = getattr(self, name)
            if not isinstance(value, str) or not value:
                raise ValueError(f"{name} must be a non-empty string, not {value!r}")
        if type(self.max_new_tokens) is not int or self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be a positive integer, not {self.max_new_tokens!r}")
        if not self.prompt_ids:
            raise ValueError("prompt_ids is empty")
        for name in ("prompt_ids", "stop_ids"):
            ids = getattr(self, name)
            # bool is an int for isinstance, so compare the type itself; set(map(...)) stays fast at 256K ids.
            integers = isinstance(ids, tuple) and not set(map(type, ids)) - {int}
            if not integers or (ids and not 0 <= min(ids) <= max(ids) < 2**32):
                raise ValueError(f"{name} must be token ids (integers from 0 to 2^32 - 1)")
        if not isinstance(self.meta, dict):
            raise ValueError(f"meta must be an object, not {self.meta!r}")


def required_context(prompt_tokens: int, max_new_tokens: int) -> int:
    """Context length a request needs: ceil((P + G + 65) / 256) * 256 (paper, Appendix B.2)."""
    total = prompt_tokens + max_new_tokens + CONTEXT_MARGIN
    return -(-total // CONTEXT_MULTIPLE) * CONTEXT_MULTIPLE


def prompt_sha256(request: Request) -> str:
    """sha256 of the prompt's token ids as little-endian uint32, for records: proof that an engine saw these ids."""
    ids = array("I", request.prompt_ids)
    if sys.byteorder == "big":
        ids.byteswap()
    return hashlib.sha256(ids.tobytes()).hexdigest()


def request_path(data_dir: Path | str, benchmark: str, target_name: str) -> Path:
    """Where the requests of `benchmark` for `target_name` lie: <data>/<benchmark>/<target>.jsonl.zst."""
    return Path(data_dir) / benchmark / f"{target_name}{SUFFIX}"


def manifest_path(path: Path) -> Path:
    """The sidecar of a request file. It carries the target's name because several targets share a folder."""
    if not path.name.endswith(SUFFIX):
        raise RequestFileError(f"{path}: a request file's name ends in {SUFFIX}")
    return path.with_name(path.name.removesuffix(SUFFIX) + ".manifest.json")


def prep_command(path: Path) -> str:
    """The command that (re)builds `path`, for error messages."""
    return f"fold-prep benchmark={path.parent.name} target={path.name.removesuffix(SUFFIX)}"


def write_requests(path: Path, requests: Iterable[Request], manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Stream `requests` to `path` and write the manifest beside it; return the completed manifest.

    Memory does not grow with the number of requests (only their ids are kept, to refuse duplicates). Both files appear
    complete or not at all: written under a temporary name, fsynced, renamed; the manifest last, so a file without one
    is unfinished. The bytes depend on the requests alone (sorted keys, fixed zstd parameters, no timestamps).
    Added to `manifest`: schema, file, count, counts by task, prompt token range, sha256 of the file, of its
    uncompressed content and of its ids. Raises RequestFileError on a duplicate id and ValueError where a meta value is
    not JSON.
    """
    import zstandard  # here, so that what only asks for a Request does without

    sidecar = manifest_path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.partial")
    seen: set[str] = set()
    by_task: dict[str, int] = {}
    lengths: list[int] = []
    ids_hash, content_hash, file_hash = hashlib.sha256(), hashlib.sha256(), _HashingWriter()
    try:
        with temporary.open("wb") as raw:
            file_hash.target = raw
            compressor = zstandard.ZstdCompressor(level=ZSTD_LEVEL, write_checksum=True, threads=0)
            with compressor.stream_writer(cast("IO[bytes]", file_hash), closefd=False) as stream:
                for request in requests:
                    if request.id in seen:
                        raise RequestFileError(f"{path}: request id {request.id!r} appears twice")
                    seen.add(request.id)
                    by_task[request.task] = by_task.get(request.task, 0) + 1
                    lengths.append(len(request.prompt_ids))
                    ids_hash.update(f"{request.id}\n".encode())
                    line = _encode(request)
                    content_hash.update(line)
                    stream.write(line)
            raw.flush()
            os.fsync(raw.fileno())
        complete = {
            **manifest,
            "schema": SCHEMA,
            "file": path.name,
            "count": len(seen),
            "count_by_task": by_task,
            "prompt_tokens": [min(lengths), max(lengths)] if lengths else [],
            "sha256": file_hash.digest.hexdigest(),
            "content_sha256": content_hash.hexdigest(),
            "ids_sha256": ids_hash.hexdigest(),
        }
        text = json.dumps(complete, indent=1, sort_keys=True, ensure_ascii=False, allow_nan=False) + "\n"
        # An old manifest must never stand beside new data: without one the file counts as not prepared.
        sidecar.unlink(missing_ok=True)
        os.replace(temporary, path)
        write_atomic(sidecar, text.encode())
    except BaseException:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    return complete


def load_manifest(path: Path) -> dict[str, Any]:
    """The manifest of the request file `path`. Raises RequestFileError when it is missing, damaged or foreign."""
    sidecar = manifest_path(path)
    try:
        manifest = json.loads(sidecar.read_bytes())
    except FileNotFoundError:
        what = "has no manifest (its preparation did not finish)" if path.exists() else "does not exist"
        raise RequestFileError(f"{path} {what}; prepare it with: {prep_command(path)}") from None
    except (OSError, ValueError) as error:
        raise RequestFileError(f"{sidecar} is unreadable ({error}); prepare again: {prep_command(path)}") from None
    if not isinstance(manifest, dict) or manifest.get("schema") != SCHEMA:
        found = manifest.get("schema") if isinstance(manifest, dict) else type(manifest).__name__
        raise RequestFileError(f"{sidecar} has schema {found!r}, not {SCHEMA!r}; prepare again: {prep_command(path)}")
    missing = {"count", "sha256", "ids_sha256"} - manifest.keys()
    if missing:
        raise RequestFileError(f"{sidecar} lacks {sorted(missing)}; prepare again: {prep_command(path)}")
    return manifest


def verify_file(path: Path) -> dict[str, Any]:
    """Check the file's sha256 against its manifest and return the manifest. Raises RequestFileError."""
    return RequestFile(path).manifest


class RequestFile:
    """A request file held open: every reading of it gives the content that was verified here.

    Another command may build other requests at the same path while a run lasts (other `benchmark` options); the run
    must not notice. Raises RequestFileError if the file does not match its manifest.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            # Before the manifest is read: should another process replace both in between, they do not match.
            self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            weakref.finalize(self, os.close, self._file)
            digest = hashlib.file_digest(_View(self._file), "sha256").hexdigest()
        except OSError as error:
            load_manifest(path)  # a file that was never prepared, or not to its end, is told as that
            raise RequestFileError(
                f"{path} cannot be read ({error.strerror}); prepare it: {prep_command(path)}"
            ) from None
        self.manifest = load_manifest(path)
        if digest != self.manifest["sha256"]:
            raise RequestFileError(
                f"{path} has changed since it was prepared (sha256 {digest[:16]}..., "
                f"manifest {str(self.manifest['sha256'])[:16]}...); prepare again: {prep_command(path)}"
            )

    def __iter__(self) -> Iterator[Request]:
        """The requests one at a time, in file order, each checked; ids and count are compared with the manifest."""
        yield from _read(self.path, _View(self._file), self.manifest)


class _View(io.RawIOBase):
    """A reading position of its own in an open file."""

    def __init__(self, file: int) -> None:
        self._file, self._place = file, 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = os.pread(self._file, len(buffer), self._place)
        buffer[: len(data)] = data
        self._place += len(data)
        return len(data)


def read_requests(path: Path) -> Iterator[Request]:
    """Yield the requests of `path` one at a time, in file order.

    The file's sha256 is verified before the first one is yielded; every line is checked against the schema, and ids and
    count against the manifest. Raises RequestFileError with file, line number and remedy.
    """
    yield from RequestFile(path)


def _read(path: Path, raw: io.RawIOBase, manifest: Mapping[str, Any]) -> Iterator[Request]:
    import zstandard

    seen: set[str] = set()
    ids_hash = hashlib.sha256()
    number = 0
    with zstandard.ZstdDecompressor().stream_reader(cast("IO[bytes]", raw)) as stream:
        lines = io.BufferedReader(stream, buffer_size=1 << 20)
        while True:
            number += 1
            try:
                line = lines.readline()
                if not line:
                    break
                request = _decode(line)
                if request.id in seen:
                    raise ValueError(f"request id {request.id!r} appears twice")
            except (ValueError, zstandard.ZstdError) as error:
                raise RequestFileError(f"{path}, line {number}: {error}; prepare again: {prep_command(path)}") from None
            seen.add(request.id)
            ids_hash.update(f"{request.id}\n".encode())
            yield request
    if len(seen) != manifest["count"] or ids_hash.hexdigest() != manifest["ids_sha256"]:
        raise RequestFileError(
            f"{path} holds {len(seen)} requests, its manifest says {manifest['count']} (or other ids); "
            f"prepare again: {prep_command(path)}"
        )


def write_atomic(path: Path, data: bytes) -> None:
    """Write `data` to `path` so that a reader, or a kill at any moment, sees the old file or the new one."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with temporary.open("wb") as raw:
            raw.write(data)
            raw.flush()
            os.fsync(raw.fileno())
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    # The rename itself must reach the disk too, or a power cut brings the old name back.
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


class _HashingWriter:
    """Passes bytes on to `target` and hashes them, so that the file is not read again for its checksum."""

    def __init__(self) -> None:
        self.digest = hashlib.sha256()
        self.target: io.BufferedWriter | None = None

    def write(self, data: bytes) -> int:
        assert self.target is not None
        self.digest.update(data)
        return self.target.write(data)


def _encode(request: Request) -> bytes:
    fields = {
        "id": request.id,
        "benchmark": request.benchmark,
        "task": request.task,
        "prompt_ids": request.prompt_ids,
        "max_new_tokens": request.max_new_tokens,
        "stop_ids": request.stop_ids,
        "meta": request.meta,
    }
    text = json.dumps(fields, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return f"{text}\n".encode()


def _decode(line: bytes) -> Request:
    fields = json.loads(line)
    if not isinstance(fields, dict):
        raise ValueError(f"a JSON object was expected, found {type(fields).__name__}")
    expected = set(Request.__dataclass_fields__)
    if fields.keys() != expected:
        wrong = sorted(expected ^ fields.keys())
        raise ValueError(f"fields {wrong} are missing or unknown")
    for name in ("prompt_ids", "stop_ids"):
        if not isinstance(fields[name], list):
            raise ValueError(f"{name} must be a list")
        fields[name] = tuple(fields[name])
    return Request(**fields)
