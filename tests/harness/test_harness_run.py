"""The command from start to table with a scripted engine: run.json, exit codes, resuming, installation."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

import harness.engines
import harness.run
from harness import provenance
from harness.cli import main
from harness.engines.base import EngineError
from harness.records import RECORDS, RecordError, RecordWriter, read_records
from harness.requests import request_path, write_requests
from tests.harness import scripted
from tests.harness.helpers import ROOT, fold_bench, records, toy_pair


@pytest.fixture
def pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.chdir(tmp_path)
    return toy_pair(tmp_path / "pair")


def use(monkeypatch: pytest.MonkeyPatch, engine: Any) -> None:
    monkeypatch.setattr(harness.engines, "open_engine", lambda config: engine)


def run_dir(tmp_path: Path) -> Path:
    (only,) = (tmp_path / "results" / "runs").iterdir()
    return only


def run_json(tmp_path: Path) -> dict[str, Any]:
    return json.loads((run_dir(tmp_path) / "run.json").read_text())


def test_a_run_writes_records_run_json_and_a_table(
    pair: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    written_first: list[dict[str, Any]] = []

    class Watching(scripted.Scripted):
        def decode(self, request, method):  # type: ignore[no-untyped-def]
            if not written_first:
                written_first.append(run_json(tmp_path))
            return super().decode(request, method)

    monkeypatch.setenv("HF_TOKEN", "hf_verysecret")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    use(monkeypatch, Watching())
    assert main(pair) == 0
    said = capsys.readouterr()
    for text in ("demo_code", "original", "window", "fold", "ar", "1.00×"):
        assert text in said.out
    assert f"run: {run_dir(tmp_path)}" in said.err
    assert "B = 8 block positions, K = 7 proposals, W = 256 entries" in said.err
    assert len(records(run_dir(tmp_path))) == 4 * 4 + 3

    begun, ended = written_first[0], run_json(tmp_path)
    assert begun["status"] == "running" and begun["starts"][0]["end"] is None
    assert set(begun["arms"]) == {"ar", "original", "window", "fold"}
    assert begun["arms"]["ar"]["drafter"] == {} and begun["arms"]["fold"]["drafter"]["proposals"] == 7
    assert begun["arms"]["fold"]["settings"]["async_scheduling"] is True
    assert begun["config"]["arms"][2] == {
        "name": "fold",
        "options": {"window": 256, "alpha": 2.0, "layers": "all", "far_start": "literal"},
    }
    assert begun["requests"]["demo_code"]["sha256"] and begun["requests"]["demo_code"]["count"] == 4
    assert begun["models"]["drafter"]["files"]["config.json"]["sha256"]
    machine = begun["starts"][0]["begin"]
    for key in ("time", "code", "python", "packages", "host", "cpu", "gpus", "environment"):
        assert key in machine
    assert machine["environment"]["HF_TOKEN"] == "(hidden)" and machine["environment"]["OMP_NUM_THREADS"] == "1"
    assert "hf_verysecret" not in json.dumps(ended)
    assert ended["status"] == "complete" and ended["starts"][0]["end"]["time"]
    assert ended["starts"][0]["reports"][0]["exact"] == {name: [4, 4] for name in ("original", "window", "fold")}
    assert ended["run"] == next(iter(records(run_dir(tmp_path)))).run == run_dir(tmp_path).name


def test_starting_again_continues_and_keeps_both_starts(
    pair: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Interrupted(scripted.Scripted):
        def decode(self, request, method):  # type: ignore[no-untyped-def]
            if len(self.calls) == 9:
                raise KeyboardInterrupt
            return super().decode(request, method)

    use(monkeypatch, Interrupted())
    assert main(pair) == 130
    assert capsys.readouterr().err.splitlines()[-1].startswith("fold-bench: interrupted; the same command continues")
    assert run_json(tmp_path)["status"] == "interrupted"
    use(monkeypatch, scripted.Scripted())
    assert main(pair) == 0
    assert run_json(tmp_path)["status"] == "complete" and len(run_json(tmp_path)["starts"]) == 2
    assert len({(r.request_id, r.method) for r in records(run_dir(tmp_path))}) == len(records(run_dir(tmp_path))) == 19
    # The machine's settings are part of the experiment: a resumed run must not change them half way.
    (run_dir(tmp_path) / RECORDS).unlink()
    use(monkeypatch, scripted.Scripted(chunk=512))
    assert main(pair) == 1
    said = capsys.readouterr().err
    assert "ar has changed since this run began (prefill_chunk: 8192, 512): use another run_dir=" in said


@pytest.mark.parametrize(
    ("engine", "line"),
    [
        (scripted.OutOfMemory, "FAILED r001 by fold: EngineError: out of memory"),
        (scripted.OtherScheduler, "REFUSED fold runs under other settings than ar"),
        (scripted.Looping, "GATE r000 by fold: logit gap 5"),
        (scripted.WrongMethod, "FAILED r000 by fold: refused: the engine says that original was active"),
    ],
)
def test_what_is_not_measured_or_not_confirmed_ends_in_exit_code_1(
    pair: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    engine: type[scripted.Scripted],
    line: str,
) -> None:
    use(monkeypatch, engine())
    assert main([*pair, "method=fold"]) == 1
    assert line in capsys.readouterr().err
    assert run_json(tmp_path)["status"] == "incomplete"


def test_skipped_rounds_are_named(
    pair: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    use(monkeypatch, scripted.SkippedDrafter())
    main([*pair, "method=fold"])
    assert "the drafter did not run in" in capsys.readouterr().err


def test_an_engine_that_does_not_open_is_one_line(
    pair: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(config: Any) -> Any:
        raise EngineError("the drafter needs 9 GiB and 4 are free; use engine.device=cpu")

    monkeypatch.setattr(harness.engines, "open_engine", fail)
    assert main(pair) == 2
    assert capsys.readouterr().err.splitlines()[-1] == (
        "fold-bench: the drafter needs 9 GiB and 4 are free; use engine.device=cpu"
    )


def test_changed_requests_are_not_mixed_into_a_run(
    pair: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    use(monkeypatch, scripted.Scripted())
    assert main(pair) == 0
    shutil.rmtree(tmp_path / "pair")
    toy_pair(tmp_path / "pair", count=5)
    assert main(pair) == 2
    assert "changed since this run began: use another run_dir=" in capsys.readouterr().err


def test_requests_built_anew_while_a_run_lasts_do_not_reach_it(
    pair: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another command with other benchmark options (or the next one of a sweep) replaces the file at the same path."""

    class Replaced(scripted.Scripted):
        def decode(self, request, method):  # type: ignore[no-untyped-def]
            if not self.calls:
                shutil.rmtree(tmp_path / "pair")
                toy_pair(tmp_path / "pair", count=1)
            return super().decode(request, method)

    use(monkeypatch, Replaced())
    assert main(pair) == 0
    assert len(records(run_dir(tmp_path))) == 19 and run_json(tmp_path)["requests"]["demo_code"]["count"] == 4


def test_each_run_of_a_sweep_reads_the_requests_of_its_own_options(
    pair: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All are prepared before the first one runs, at one path."""

    def build(benchmark, tokenizer, target, data_dir, source=None):  # type: ignore[no-untyped-def]
        path = request_path(data_dir, benchmark.name, target.name)
        write_requests(path, scripted.make_requests(benchmark.n), {"recipe": {"benchmark": asdict(benchmark)}})
        return path

    shutil.rmtree(tmp_path / "pair" / "data")
    monkeypatch.setattr("data_prep.prepare.prepare", build)
    monkeypatch.setattr("data_prep.tokens.stop_ids_of", lambda folder, tokenizer: (scripted.STOP,))
    monkeypatch.setattr(harness.run, "_tokenizer", lambda folder: None)
    use(monkeypatch, scripted.Scripted())
    assert main(["-m", *pair, "method=fold", "benchmark.n=3,2", "drift_requests=0"]) == 0
    for run in (tmp_path / "results" / "runs").iterdir():
        started = json.loads((run / "run.json").read_text())
        n = started["config"]["benchmarks"][0]["n"]
        assert started["requests"]["demo_code"]["count"] == n
        assert len({record.request_id for record in records(run)}) == n


def test_a_run_leaves_its_table_and_plot(
    pair: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    use(monkeypatch, scripted.Scripted())
    assert main([*pair, "method=fold"]) == 0
    text = (run_dir(tmp_path) / "summary.md").read_text(encoding="utf-8")
    assert text.startswith("| benchmark | length |") and "| **demo_code** | **1K** | **1** | **fold** |" in text
    assert (run_dir(tmp_path) / "by_length.png").read_bytes().startswith(b"\x89PNG")
    assert not list(run_dir(tmp_path).glob("*.partial*")) + list(run_dir(tmp_path).glob(".*.partial*"))


def test_a_plot_that_cannot_be_made_does_not_fail_the_run(
    pair: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(figure: Any, path: Path) -> None:
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("analysis.style.save", fail)
    use(monkeypatch, scripted.Scripted())
    assert main([*pair, "method=fold"]) == 0
    assert "note: " in (said := capsys.readouterr().err) and "by_length.png cannot be drawn" in said
    assert (run_dir(tmp_path) / "summary.md").exists() and not list(run_dir(tmp_path).glob("*.png"))
    assert not list(run_dir(tmp_path).glob(".*.png"))


def test_another_configuration_in_the_same_folder_is_refused(
    pair: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    use(monkeypatch, scripted.Scripted())
    assert main([*pair, "run_dir=here", "method=fold"]) == 0
    assert main([*pair, "run_dir=here", "method=fold", "method.alpha=4"]) == 2
    assert "holds records of another configuration" in capsys.readouterr().err.splitlines()[-1]


def test_a_second_process_is_refused(
    pair: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    use(monkeypatch, scripted.Scripted())
    assert main(pair) == 0
    before = (run_dir(tmp_path) / "run.json").read_bytes()
    with RecordWriter(run_dir(tmp_path), run_dir(tmp_path).name, 7):
        assert main(pair) == 2
    assert f"is being written by process {os.getpid()}" in capsys.readouterr().err.splitlines()[-1]
    assert (run_dir(tmp_path) / "run.json").read_bytes() == before


def test_a_full_disk_is_one_line_and_the_run_goes_on_later(
    pair: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    use(monkeypatch, scripted.Scripted())
    real, written = RecordWriter.append, 0

    def full(self: RecordWriter, record: Any) -> None:
        nonlocal written
        written += 1
        if written == 7:
            raise RecordError("records.jsonl cannot be written (No space left on device); make room")
        real(self, record)

    monkeypatch.setattr(RecordWriter, "append", full)
    assert main(pair) == 1
    assert capsys.readouterr().err.splitlines()[-1].endswith("cannot be written (No space left on device); make room")
    assert main(pair) == 0
    assert len(records(run_dir(tmp_path))) == 19


def test_a_disk_that_is_full_for_every_file_is_one_line(
    pair: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """run.json cannot be completed either; that must not replace the message by a traceback."""
    use(monkeypatch, scripted.Scripted())
    real, write, written = RecordWriter.append, provenance.write_atomic, 0

    def full(self: RecordWriter, record: Any) -> None:
        nonlocal written
        written += 1
        if written >= 7:
            raise RecordError("records.jsonl cannot be written (No space left on device); make room")
        real(self, record)

    def full_too(path: Path, data: bytes) -> None:
        if written >= 7:
            raise OSError(28, "No space left on device")
        write(path, data)

    monkeypatch.setattr(RecordWriter, "append", full)
    monkeypatch.setattr(provenance, "write_atomic", full_too)
    assert main(pair) == 1
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("fold-bench:")]
    assert said == ["fold-bench: records.jsonl cannot be written (No space left on device); make room"]
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    use(monkeypatch, scripted.Scripted())
    assert main(pair) == 0
    assert len(records(run_dir(tmp_path))) == 19 and run_json(tmp_path)["status"] == "complete"


@pytest.mark.parametrize("content", [b"[1]", b"{", b'{"schema": "fold-bench-run/1"}', b'{"requests": 3}'])
def test_a_damaged_run_json_is_written_anew(
    pair: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes
) -> None:
    use(monkeypatch, scripted.Scripted())
    assert main([*pair, "method=fold"]) == 0
    file = run_dir(tmp_path) / "run.json"
    hash_of_run = run_json(tmp_path)["config_hash"].encode()
    file.write_bytes(content.replace(b"}", b', "config_hash": "' + hash_of_run + b'"}'))
    assert main([*pair, "method=fold"]) == 0
    assert run_json(tmp_path)["status"] == "complete" and run_json(tmp_path)["requests"]


def test_an_edited_verdict_stops_with_its_line(
    pair: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    use(monkeypatch, scripted.Scripted())
    assert main([*pair, "method=fold"]) == 0
    file = run_dir(tmp_path) / "agreement.jsonl"
    file.write_bytes(file.read_bytes() + b'{"unit": "x"}\n')
    number = len(file.read_bytes().splitlines())
    assert main([*pair, "method=fold"]) == 2
    assert f"agreement.jsonl, line {number} is no verdict" in capsys.readouterr().err.splitlines()[-1]


def test_a_disk_too_full_for_run_json(
    pair: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    use(monkeypatch, scripted.Scripted())

    def full(path: Path, data: bytes) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(provenance, "write_atomic", full)
    assert main(pair) == 2
    assert "No space left on device" in capsys.readouterr().err.splitlines()[-1]


def test_a_sweep_runs_all_cells_and_reports_the_worst(
    pair: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    use(monkeypatch, scripted.OutOfMemory())
    assert main(["-m", *pair, "method=fold,yarn", "method.alpha=2,4"]) == 1
    runs = sorted((tmp_path / "results" / "runs").iterdir())
    assert len(runs) == 3
    status = [json.loads((run / "run.json").read_text())["status"] for run in runs]
    assert sorted(status) == ["complete", "incomplete", "incomplete"]
    assert "method.alpha=2: no option 'alpha' in yarn" in capsys.readouterr().err


def test_the_harness_takes_a_small_part_of_a_run(
    pair: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A decode here takes 0.2 s; a real one takes seconds, so the share there is smaller still."""
    use(monkeypatch, scripted.Scripted(sleep=0.2))
    assert main(pair) == 0
    (start,) = run_json(tmp_path)["starts"]
    assert start["wall_s"] >= start["engine_s"] > 0
    assert start["harness_share"] < 0.2, start


def test_from_a_shell(tmp_path: Path) -> None:
    """One true subprocess: exit codes, streams and working folder are as a user sees them."""
    arguments = toy_pair(tmp_path / "pair")
    done = fold_bench(*arguments, cwd=tmp_path)
    assert done.returncode == 0 and "fold" in done.stdout, done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["pair", "results"]
    wrong = fold_bench(*arguments, "method.alpha=0.5", cwd=tmp_path)
    assert wrong.returncode == 2 and len(wrong.stderr.splitlines()) == 1 and "Traceback" not in wrong.stderr


@pytest.mark.slow
def test_two_starts_in_one_second(tmp_path: Path) -> None:
    """Different configurations write side by side; of two equal ones, one is refused in one line."""
    arguments = [sys.executable, "-m", "tests.harness.fold_bench_scripted", "Slow", *toy_pair(tmp_path / "pair")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    runs = [
        subprocess.Popen([*arguments, method], cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True)
        for method in ("method=fold", "method=yarn", "method=fold")
    ]
    said = [run.communicate(timeout=120)[1] for run in runs]
    codes = [run.returncode for run in runs]
    assert codes[1] == 0 and sorted((codes[0], codes[2])) == [0, 2], said
    assert any("is being written by process" in text for text in said)
    for run in (tmp_path / "results" / "runs").iterdir():
        kept = [(r.request_id, r.method) for r in read_records(run / RECORDS) if not r.warmup]
        assert len(set(kept)) == len(kept) == 4 * 2 + 3


# ------------------------------------------------------------------------------------------------------- provenance


def test_code_identity_without_git(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    here = provenance.code()
    assert len(here["sha256"]) == 64 and here["commit"] and len(here["commit"]) == 40
    # An installation below another repository must not report that repository's commit.
    package = tmp_path / "other" / "lib"
    (package / "conf").mkdir(parents=True)
    subprocess.run(["git", "init", "-q", str(tmp_path / "other")], check=True)
    monkeypatch.setattr(provenance, "PACKAGE_ROOT", package)
    provenance.code.cache_clear()
    assert provenance.code()["commit"] is None
    provenance.code.cache_clear()


def test_gpu_facts_come_from_nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for nvidia-smi of a driver that has renamed one field."""
    tool = tmp_path / "nvidia-smi"
    tool.write_text(
        "#!/bin/sh\n"
        'case "$1" in\n'
        '*compute-apps*) echo "GPU-1, 4242, 512 MiB";;\n'
        "*clocks_throttle_reasons.active*) "
        "echo 'Field \"clocks_throttle_reasons.active\" is not a valid field to query.'; exit 2;;\n"
        '*) echo "NVIDIA H100, GPU-1, 580.1, $(yes x, | head -n 14 | tr -d "\\n") 85899345920";;\n'
        "esac\n"
    )
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    (gpu,) = provenance.gpus()
    assert (gpu["name"], gpu["uuid"], gpu["driver_version"]) == ("NVIDIA H100", "GPU-1", "580.1")
    assert gpu["processes"] == "4242:512 MiB" and "clocks_throttle_reasons.active" not in gpu


def test_no_gpu_and_no_tool(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert provenance.gpus() == []
    assert provenance.cpu_uuid() == provenance.cpu_uuid() and provenance.cpu_uuid().startswith("cpu-")


def test_a_hub_snapshot_is_named_by_its_commit(tmp_path: Path) -> None:
    blob = tmp_path / "blobs" / ("ab" * 32)
    folder = tmp_path / "snapshots" / ("c" * 40)
    blob.parent.mkdir()
    folder.mkdir(parents=True)
    blob.write_text("weights")
    (folder / "model.safetensors").symlink_to(blob)
    (folder / "config.json").write_text("{}")
    facts = provenance.folder_facts("owner/name", "main", folder)
    assert facts["commit"] == "c" * 40 and facts["files"]["model.safetensors"]["sha256"] == "ab" * 32
    assert facts["files"]["config.json"]["bytes"] == 2


# ------------------------------------------------------------------------------------------------------ installation


@pytest.mark.slow
def test_a_wheel_has_the_whole_tree_and_works_from_anywhere(tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(
        ROOT, source, ignore=shutil.ignore_patterns(".git", "results", "tests", "*.egg-info", "build", ".*")
    )
    for name in ("README.md", "LICENSE"):
        (source / name).touch()
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    subprocess.run(
        [*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(tmp_path), str(source)], check=True
    )
    (wheel,) = tmp_path.glob("*.whl")
    subprocess.run([*pip, "install", "--no-deps", "--target", str(tmp_path / "site"), str(wheel)], check=True)
    shutil.rmtree(source)
    script = "import sys; from harness.cli import main; sys.exit(main())"
    for arguments, code, text in (
        (["--cfg", "job"], 0, "max_context: 8192"),
        (["-c", "job", "--resolve", "+model=llama", "method=fold"], 0, "window: 2048"),
        (["--help"], 0, "gemma_dspark"),
        (["+model=lama"], 2, "choose from gemma"),
        (["-m", "method=fold,yarn", "method.alpha=0,2"], 2, "method.alpha is 0"),
    ):
        started = time.monotonic()
        done = subprocess.run(
            [sys.executable, "-c", script, *arguments],
            cwd="/",
            env={**os.environ, "PYTHONPATH": str(tmp_path / "site"), "HOME": str(tmp_path)},
            capture_output=True,
            text=True,
        )
        assert done.returncode == code and text in done.stdout + done.stderr, (arguments, done.stdout, done.stderr)
        assert time.monotonic() - started < 120
