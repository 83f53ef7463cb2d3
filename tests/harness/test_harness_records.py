"""Records: invariants, derived quantities, and what survives kills, damage, a second writer and a full disk."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from harness.records import RECORDS, SCHEMA, Record, RecordError, RecordWriter, read_records, tau, tpot
from tests.harness.helpers import ROOT, RUN

K = 7
GOOD = Record(
    run=RUN,
    unit="pair/scripted/toy/0of1",
    order=0,
    request_id="007",
    benchmark="toy",
    task="toy",
    prompt_tokens=40,
    prompt_sha256="00",
    method="fold",
    engine="scripted",
    device_uuid="device-a",
    host="here",
    started_at="2026-01-01T00:00:00.000+00:00",
    output_ids=list(range(13)),
    finish="length",
    n_first=1,
    commits=[4, 4, 4],
    overrun=0,
    proposals=[K, K, K],
    prefill_s=0.5,
    first_token_s=10.0,
    last_token_s=10.06,
)
AR = replace(GOOD, method="ar", commits=[1] * 12, proposals=[], last_token_s=10.12)


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[RecordWriter]:
    with RecordWriter(tmp_path, RUN, K) as writer:
        yield writer


def test_tau_counts_the_bonus_token_and_not_the_first_one() -> None:
    assert tau(GOOD) == 4.0  # not 13/3, not 3
    assert tau(replace(GOOD, commits=[1] * 12, proposals=[K] * 12)) == 1.0
    assert tau(AR) == 1.0
    assert tau(replace(GOOD, output_ids=[5], commits=[], proposals=[])) is None


def test_tpot_leaves_out_what_prefill_delivered() -> None:
    assert tpot(GOOD) == pytest.approx(0.005)
    assert tpot(AR) == pytest.approx(0.01)
    three_first = replace(GOOD, output_ids=list(range(15)), n_first=3)
    assert tpot(three_first) == pytest.approx(0.005)
    assert tpot(replace(GOOD, output_ids=[5], commits=[], proposals=[])) is None
    assert tpot(replace(GOOD, error="out of memory")) is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"output_ids": list(range(12))}, "committed tokens, but 12 delivered"),
        ({"commits": [4, 4, 5], "output_ids": list(range(14)), "proposals": [K, K, 3]}, "more than it had proposed"),
        ({"commits": [3, 0, 9]}, "committed 0 tokens, not 1 to 8"),
        ({"commits": [2, 1, 9]}, "committed 9 tokens, not 1 to 8"),
        ({"overrun": 5}, "overrun 5 beyond the cap of 8"),
        ({"overrun": -1}, "overrun -1"),
        ({"proposals": [K, K]}, "2 rounds of proposals, 3 committed"),
        ({"proposals": [K, 8, K]}, "more than K = 7"),
        ({"commits": [4, 1, 7], "proposals": [K, 0, K]}, "0 skipped rounds reported, 1 proposed nothing"),
        ({"cached_tokens": 16}, "16 prompt tokens came from a cache"),
        ({"last_token_s": 9.0}, "clock runs backwards"),
        ({"last_token_s": float("nan")}, "clock runs backwards"),
        ({"last_token_s": 10.0}, "took no time"),
        ({"prefill_s": float("inf")}, "prefill_s is inf"),
        ({"round_s": {"draft": -0.1}}, "round_s"),
        ({"output_ids": [], "commits": [], "proposals": [], "n_first": 0}, "no output tokens"),
        ({"n_first": 0, "commits": [5, 4, 4]}, "n_first is 0"),
        ({"finish": "abort"}, "finish is 'abort'"),
        ({"method": "ar"}, "committed 4 tokens, not 1 to 1"),
        ({"method": "ar#2"}, "committed 4 tokens, not 1 to 1"),
        ({"method": "ar@end"}, "committed 4 tokens, not 1 to 1"),
        ({"method": "ar", "commits": [1] * 12}, "an autoregressive arm reports draft tokens"),
        ({"run": "other"}, "record of run other"),
    ],
)
def test_an_impossible_record_is_not_written(writer: RecordWriter, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        writer.append(replace(GOOD, **change))
    assert list(read_records(writer.path)) == []


def test_records_come_back_as_written(writer: RecordWriter) -> None:
    failed = replace(GOOD, error="out of memory", output_ids=[], commits=[], proposals=[], n_first=0, finish="")
    for record in (GOOD, AR, failed):
        writer.append(record)
    assert list(read_records(writer.path)) == [GOOD, AR, failed]
    assert next(read_records(writer.path)).request_id == "007"
    line = json.loads(writer.path.read_text().splitlines()[0])
    assert line["schema"] == SCHEMA and "tau" not in line and "tpot" not in line


@pytest.mark.parametrize("keep", [1, 200, -2, -1])
def test_a_torn_last_line_is_cut_off_and_nothing_else(tmp_path: Path, keep: int) -> None:
    with RecordWriter(tmp_path, RUN, K) as writer:
        writer.append(GOOD)
    path = tmp_path / RECORDS
    whole = path.read_bytes()
    path.write_bytes(whole + whole[:keep])  # -1: only the newline is missing
    assert list(read_records(path)) == [GOOD]
    with RecordWriter(tmp_path, RUN, K) as writer:
        assert writer.torn_bytes == len(whole[:keep])
        assert writer.existing == [GOOD]
        writer.append(AR)
    assert list(read_records(path)) == [GOOD, AR]


def test_a_file_that_is_one_torn_line_becomes_empty(tmp_path: Path) -> None:
    (tmp_path / RECORDS).write_bytes(b"\0" * 5000)
    with RecordWriter(tmp_path, RUN, K) as writer:
        assert writer.existing == []
        writer.append(GOOD)
    assert list(read_records(tmp_path / RECORDS)) == [GOOD]


def edited(**changes: object) -> bytes:
    return json.dumps({**asdict(GOOD), **changes}).encode() + b"\n"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (b'{"schema":"fold-be\n', "line 2 is damaged"),
        (b"\0\0\0\n", "line 2 is damaged"),
        (b"[1]\n", "line 2 is damaged"),
        (b"\n", "line 2 is damaged"),
        (b'{"a":1}{"a":2}\n', "line 2 is damaged"),
        (b'{"schema":"fold-bench-record/1"}\n', "line 2 is not a record"),
        (json.dumps({**asdict(GOOD), "schema": "other/9"}).encode() + b"\n", "line 2 is not a record .*other/9"),
        (json.dumps({**asdict(GOOD), "extra": 1}).encode() + b"\n", r"line 2 is not a record .*\(extra\)"),
        (edited(output_ids=GOOD.output_ids[:-1]), r"line 2 is damaged \(.* but .* delivered\)"),
        (edited(last_token_s=GOOD.first_token_s - 1), r"line 2 is damaged \(the clock runs backwards"),
        (edited(commits="4"), "line 2 is damaged"),
    ],
)
def test_other_damage_stops_with_file_and_line(tmp_path: Path, damage: bytes, message: str) -> None:
    with RecordWriter(tmp_path, RUN, K) as writer:
        writer.append(GOOD)
        writer.append(AR)
    lines = (tmp_path / RECORDS).read_bytes().splitlines(keepends=True)
    content = lines[0] + damage + lines[1]
    (tmp_path / RECORDS).write_bytes(content)
    with pytest.raises(RecordError, match=f"records.jsonl, {message}"):
        RecordWriter(tmp_path, RUN, K)
    assert (tmp_path / RECORDS).read_bytes() == content
    with pytest.raises(RecordError):  # and the lock was given back: the same error, not "is being written"
        RecordWriter(tmp_path, RUN, K)


def test_records_of_another_configuration_are_refused(tmp_path: Path) -> None:
    with RecordWriter(tmp_path, RUN, K) as writer:
        writer.append(GOOD)
    with pytest.raises(RecordError, match=r"another configuration \(toy-0123456789ab, this one is toy-ffff\)"):
        RecordWriter(tmp_path, "toy-ffff", K)


def test_a_second_writer_is_refused_and_told_who_writes(tmp_path: Path) -> None:
    with RecordWriter(tmp_path, RUN, K) as writer:
        writer.append(GOOD)
        script = (
            "import sys; from pathlib import Path; from harness.records import RecordWriter, RecordError\n"
            "try: RecordWriter(Path(sys.argv[1]), sys.argv[2], 7)\n"
            "except RecordError as error: print(error); sys.exit(3)\n"
        )
        other = subprocess.run(
            [sys.executable, "-c", script, str(tmp_path), RUN], cwd=ROOT, capture_output=True, text=True
        )
        assert other.returncode == 3
        assert f"is being written by process {os.getpid()} on " in other.stdout
        assert len(other.stdout.splitlines()) == 1
    RecordWriter(tmp_path, RUN, K).close()


def test_a_full_disk_leaves_the_file_as_it_was_and_can_be_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with RecordWriter(tmp_path, RUN, K) as writer:
        writer.append(GOOD)
        before = writer.path.read_bytes()
        real, calls = os.write, 0

        def full(handle: int, data: bytes) -> int:
            nonlocal calls
            calls += 1
            if calls == 1:
                return real(handle, data[:50])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(os, "write", full)
        with pytest.raises(
            RecordError, match=r"records.jsonl cannot be written \(No space left on device\); make room"
        ):
            writer.append(AR)
        monkeypatch.undo()
        assert writer.path.read_bytes() == before
        writer.append(AR)
    assert list(read_records(tmp_path / RECORDS)) == [GOOD, AR]


def test_a_failing_fsync_takes_the_record_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Network file systems report a full disk only here."""
    with RecordWriter(tmp_path, RUN, K) as writer:
        writer.append(GOOD)
        real, calls = os.fsync, 0

        def failing(handle: int) -> None:
            nonlocal calls
            calls += 1
            if calls == 1:
                raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))
            real(handle)

        monkeypatch.setattr(os, "fsync", failing)
        with pytest.raises(RecordError, match="cannot be written"):
            writer.append(AR)
    assert list(read_records(tmp_path / RECORDS)) == [GOOD]


def test_a_real_file_size_limit_is_one_line(tmp_path: Path) -> None:
    """The kernel refuses in the middle of a line (as on a full disk); afterwards the same run goes on."""
    script = (
        "import resource, sys; from dataclasses import replace; from pathlib import Path\n"
        "from harness.records import RecordWriter, RecordError\n"
        "from tests.harness.test_harness_records import GOOD, RUN\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))\n"
        "with RecordWriter(Path(sys.argv[1]), RUN, 7) as writer:\n"
        "    try:\n"
        "        for order in range(100): writer.append(replace(GOOD, order=order))\n"
        "    except RecordError as error: print(error); sys.exit(1)\n"
    )
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1 and "File too large" in done.stdout and not done.stderr
    kept = list(read_records(tmp_path / RECORDS))
    assert 1 < len(kept) < 100 and [record.order for record in kept] == list(range(len(kept)))
    assert (tmp_path / RECORDS).read_bytes().endswith(b"\n")
    with RecordWriter(tmp_path, RUN, K) as writer:
        writer.append(replace(GOOD, order=len(kept)))


def test_a_run_directory_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RecordError, match=r"file/run cannot be written .*choose another run_dir="):
        RecordWriter(tmp_path / "file" / "run", RUN, K)
