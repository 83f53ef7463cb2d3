"""Records: one JSON line per request and arm, the only thing that leaves a run and the only thing that analysis reads.

A record is appended in one write, flushed and fsynced before the next request starts, so that a kill at any moment
loses at most the request in flight. A run directory has one writer at a time (a lock held by the process, released by
the kernel when the process dies). On opening, an unfinished last line is cut off and its request is redone; any other
damage stops with file and line number, because a file that was edited or mixed up must not be continued silently.

Derived and never stored: :func:`tau` and :func:`tpot`.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

SCHEMA = "fold-bench-record/1"
RECORDS = "records.jsonl"

AR = "ar"
# How the engine of a record is called when the weights were random (harness/synthetic.py): no acceptance, no speedup.
RANDOM_WEIGHTS = "+random-weights"
# The second autoregressive pass over a few requests at the end of a unit: it bounds the drift and is no row of a table.
AR_AGAIN = "ar@end"


class RecordError(RuntimeError):
    """Records cannot be written or read. The message is one line: what, where, what to do."""


@dataclass(frozen=True)
class Record:
    """One decoded request, or one failed attempt at it (``error`` set, outputs empty).

    run: id of the run directory; it contains the configuration's hash. unit: pair/engine/benchmark/shard. order:
    place in the run's sequence of decodes, warm-ups included. level: length level of the request file, None where
    there are none. method: the arm, "ar" or a method's name; "#2" is appended to the second arm of the same method,
    "ar@end" is the autoregressive pass that is repeated at the end. method_config: the method's resolved options.
    engine: the engine's name. device_uuid, host: where it ran; only records of one device are paired. attempt: 1 for
    the first, counted per request, arm and device. started_at: UTC, ISO 8601. The other fields are those of
    ``harness.engines.base.Generation``; seconds are of one monotonic clock.
    """

    run: str
    unit: str
    order: int
    request_id: str
    benchmark: str
    task: str
    prompt_tokens: int
    prompt_sha256: str
    method: str
    engine: str
    device_uuid: str
    host: str
    started_at: str
    level: str | None = None
    method_config: dict[str, Any] = field(default_factory=dict)
    output_ids: list[int] = field(default_factory=list)
    finish: str = ""
    n_first: int = 0
    commits: list[int] = field(default_factory=list)
    overrun: int = 0
    skipped_rounds: int = 0
    proposals: list[int] = field(default_factory=list)
    prefill_s: float = 0.0
    first_token_s: float = 0.0
    last_token_s: float = 0.0
    cached_tokens: int = 0
    activity: dict[str, Any] = field(default_factory=dict)
    round_s: dict[str, float] = field(default_factory=dict)
    warmup: bool = False
    attempt: int = 1
    error: str = ""
    schema: str = SCHEMA

    @property
    def synthetic(self) -> bool:
        """Whether random weights decoded it: its times are real, its acceptance means nothing."""
        return self.engine.endswith(RANDOM_WEIGHTS)

    @property
    def autoregressive(self) -> bool:
        """Whether the arm drafts nothing ("ar", "ar#2", "ar@end")."""
        return self.method.split("#")[0].split("@")[0] == AR


def tau(record: Record) -> float | None:
    """Tokens committed per verification round, the target's own included; 1 for AR, None without rounds."""
    return sum(record.commits) / len(record.commits) if record.commits else None


def tpot(record: Record) -> float | None:
    """Seconds per output token after those of prefill; None for a failed record or if there are no others."""
    timed = len(record.output_ids) - record.n_first
    return (record.last_token_s - record.first_token_s) / timed if timed > 0 and not record.error else None


def broken_invariant(record: Record, proposals: int) -> str | None:
    """What is impossible about a record, or None. ``proposals`` is K, the draft tokens of a full round."""
    if record.error:
        return None
    r, n, cap = record, len(record.output_ids), 1 if record.autoregressive else proposals + 1
    checks = [
        (n > 0, "no output tokens (a dropped request)"),
        (1 <= r.n_first <= max(n, 1), f"n_first is {r.n_first} of {n} output tokens"),
        (r.n_first + sum(r.commits) == n, f"{r.n_first} first + {sum(r.commits)} committed tokens, but {n} delivered"),
        (all(1 <= c <= cap for c in r.commits), f"a round committed {_outside(r.commits, cap)} tokens, not 1 to {cap}"),
        (r.overrun >= 0 and (r.commits or [0])[-1] + r.overrun <= cap, f"overrun {r.overrun} beyond the cap of {cap}"),
        (r.finish in ("stop", "length"), f"finish is {r.finish!r}, possible are 'stop' and 'length'"),
        (r.cached_tokens == 0, f"{r.cached_tokens} prompt tokens came from a cache (prefix caching must be off)"),
        (all(math.isfinite(s) and s >= 0 for s in r.round_s.values()), f"round_s is {r.round_s}"),
        (math.isfinite(r.prefill_s) and r.prefill_s >= 0, f"prefill_s is {r.prefill_s}"),
        (
            math.isfinite(r.first_token_s) and math.isfinite(r.last_token_s) and r.last_token_s >= r.first_token_s,
            f"the clock runs backwards: first token at {r.first_token_s}, last at {r.last_token_s}",
        ),
        (n == r.n_first or r.last_token_s != r.first_token_s, "several rounds took no time at all"),
    ]
    if r.autoregressive:
        checks += [
            (not r.proposals and r.skipped_rounds == r.overrun == 0, "an autoregressive arm reports draft tokens"),
        ]
    else:
        skipped = r.proposals.count(0)
        checks += [
            (len(r.proposals) == len(r.commits), f"{len(r.proposals)} rounds of proposals, {len(r.commits)} committed"),
            (all(0 <= p <= proposals for p in r.proposals), f"a round proposed more than K = {proposals} tokens"),
            (
                all(c <= p + 1 for c, p in zip(r.commits, r.proposals, strict=False)),
                "a round committed more than it had proposed plus one",
            ),
            (skipped == r.skipped_rounds, f"{r.skipped_rounds} skipped rounds reported, {skipped} proposed nothing"),
        ]
    return next((message for holds, message in checks if not holds), None)


def _outside(commits: list[int], cap: int) -> int:
    return next((c for c in commits if not 1 <= c <= cap), 0)


# ------------------------------------------------------------------------------------------------------------ writing


class JsonLines:
    """A file of JSON lines that survives kills and full disks; use it under the run directory's lock."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            new = not path.exists()
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            if new:
                fsync_folder(path.parent)
            self.torn_bytes = self._cut_torn_line()
        except OSError as error:
            raise RecordError(f"{path} cannot be opened for writing ({error.strerror})") from None

    def append(self, value: Mapping[str, Any]) -> None:
        """Write one line durably, or leave the file as it was (full disk, quota) and raise RecordError."""
        line = (json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False) + "\n").encode()
        start = os.lseek(self._file, 0, os.SEEK_END)
        try:
            written = 0
            while written < len(line):
                written += os.write(self._file, line[written:])
            os.fsync(self._file)
        except OSError as error:
            # Part of the line may have reached the disk. Should even this fail, the next start cuts it off.
            with suppress(OSError):
                os.ftruncate(self._file, start)
                os.fsync(self._file)
            raise RecordError(
                f"{self.path} cannot be written ({error.strerror}); make room and start the same command again"
            ) from None

    def close(self) -> None:
        os.close(self._file)

    def _cut_torn_line(self) -> int:
        size = os.fstat(self._file).st_size
        if size == 0:
            return 0
        with mmap.mmap(self._file, size, access=mmap.ACCESS_READ) as content:
            keep = content.rfind(b"\n") + 1
        if keep < size:
            os.ftruncate(self._file, keep)
            os.fsync(self._file)
        return size - keep


class RecordWriter:
    """The single writer of a run directory: holds its lock, knows the records already there, appends new ones.

    run: the id every record of the directory must carry. proposals: K of the pair, for the invariants. Raises
    RecordError when another process writes, when the records belong to another configuration, or when they are
    damaged.
    """

    def __init__(self, run_dir: Path, run: str, proposals: int) -> None:
        from filelock import FileLock, Timeout  # here: what only names a record does without

        self.run, self.proposals = run, proposals
        self.path = run_dir / RECORDS
        self._owner = run_dir / ".writer"
        self._lock = FileLock(run_dir / ".lock")
        try:
            run_dir.mkdir(parents=True, exist_ok=True)
            self._lock.acquire(timeout=0)
        except Timeout:
            who = "another process"
            with suppress(OSError):
                who = self._owner.read_text(encoding="utf-8").strip() or who
            raise RecordError(f"{run_dir} is being written by {who}; wait for it, or choose another run_dir=") from None
        except OSError as error:
            raise RecordError(f"{run_dir} cannot be written ({error.strerror}); choose another run_dir=") from None
        try:
            with suppress(OSError):  # only a courtesy to the process that is refused
                self._owner.write_text(f"process {os.getpid()} on {socket.gethostname()}\n", encoding="utf-8")
            self._log = JsonLines(self.path)
            numbered = list(_numbered(self.path))
            self.existing = [record for _, record in numbered]
            foreign = next((record.run for record in self.existing if record.run != run), None)
            if foreign is not None:
                raise RecordError(
                    f"{self.path} holds records of another configuration ({foreign}, this one is {run}); "
                    "choose another run_dir= or remove it"
                )
            for number, record in numbered:
                self._refuse_broken(number, record)
        except BaseException:
            self._lock.release()
            raise

    def _refuse_broken(self, number: int, record: Record) -> None:
        """An edited line must not be continued: what could not have been written here is damage."""
        try:
            broken = broken_invariant(record, self.proposals)
        except (TypeError, AttributeError) as error:
            broken = str(error)
        if broken is not None:
            raise RecordError(f"{self.path}, line {number} is damaged ({broken}); restore it or remove that line")

    @property
    def torn_bytes(self) -> int:
        """Length of the unfinished last line that was cut off on opening, in bytes; 0 for none."""
        return self._log.torn_bytes

    def append(self, record: Record) -> None:
        """Check the invariants and write. Raises ValueError for an impossible record, RecordError for a full disk."""
        if record.run != self.run:
            raise ValueError(f"record of run {record.run} in the directory of {self.run}")
        if (broken := broken_invariant(record, self.proposals)) is not None:
            raise ValueError(broken)
        self._log.append(asdict(record))

    def close(self) -> None:
        self._log.close()
        self._owner.unlink(missing_ok=True)
        self._lock.release()

    def __enter__(self) -> RecordWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def fsync_folder(folder: Path) -> None:
    """Make a new or renamed entry of `folder` survive a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# ------------------------------------------------------------------------------------------------------------ reading


def read_lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Line number and object of each line but an unfinished last one. Raises RecordError for any other damage."""
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.endswith(b"\n"):
                return
            try:
                value = json.loads(line)
            except ValueError:
                value = None
            if not isinstance(value, dict):
                raise RecordError(f"{path}, line {number} is damaged (no JSON object); restore it or remove that line")
            yield number, value


def read_records(path: Path) -> Iterator[Record]:
    """The records of a file in file order. Raises RecordError with the line number for a damaged or foreign line."""
    for _, record in _numbered(path):
        yield record


def _numbered(path: Path) -> Iterator[tuple[int, Record]]:
    known = {entry.name for entry in fields(Record)}
    for number, value in read_lines(path):
        if value.get("schema") != SCHEMA or value.keys() != known:
            wrong = sorted(known ^ value.keys()) or [f"schema {value.get('schema')!r}"]
            raise RecordError(f"{path}, line {number} is not a record of {SCHEMA} ({', '.join(wrong)})")
        yield number, Record(**value)
