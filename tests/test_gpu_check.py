"""The prepared GPU check, as far as a machine without a GPU can try it: its dry run, its cuts, its summary."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import yaml

from benchmarks import gpu_check
from benchmarks.gpu_check import PARTS, Check, main, read_yaml, summary
from harness.diagnostics import latency as latency_module
from harness.diagnostics.latency import Part
from harness.engines.reference.engine import ReferenceEngine

ROOT = Path(__file__).resolve().parents[1]
CPU = torch.device("cpu")
# What the machine of the check may lack. Importing any of them fails there.
ABSENT = [
    "hydra", "omegaconf", "zstandard", "gguf", "submitit", "transformers", "huggingface_hub", "safetensors", "psutil",
    "filelock", "yaml", "pandas", "pyarrow", "matplotlib", "rich", "scipy", "vllm", "sglang", "datasets", "accelerate",
]  # fmt: skip
BARE = f"""
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {ABSENT!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}")
sys.meta_path.insert(0, Absent())
import importlib.util as util
found = util.find_spec
util.find_spec = lambda name, package=None: None if name.partition(".")[0] in {ABSENT!r} else found(name, package)
from benchmarks.gpu_check import main
sys.exit(main(sys.argv[1:]))
"""


def rows_of(folder: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (folder / "check.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("file", sorted((ROOT / "conf").glob("[td]*r*/*.yaml")), ids=lambda file: file.stem)
def test_our_configuration_is_read_without_pyyaml(file: Path) -> None:
    assert file.parent.name in ("target", "drafter")
    assert read_yaml(file.read_text()) == yaml.safe_load(file.read_text())


def test_a_machine_without_a_gpu_gets_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    assert main(["--out", str(tmp_path / "out")]) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.count("\n") == 1 and "torch sees no GPU" in said.err
    assert not (tmp_path / "out").exists()


def test_a_python_without_torch_gets_one_line() -> None:
    absent = "import sys; sys.modules['torch'] = None; import benchmarks.gpu_check"
    done = subprocess.run([sys.executable, "-c", absent], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "this Python has no torch" in done.stderr


def test_an_unknown_part_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["--dry-run", "--parts", "kernel"])
    assert left.value.code == 2 and "no part 'kernel'; there are start, kernels" in capsys.readouterr().err


@pytest.mark.slow
def test_the_dry_run_executes_every_part_with_torch_and_triton_alone(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", BARE, "--dry-run", "--out", str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    rows = rows_of(tmp_path)
    assert {row["part"] for row in rows} == {*PARTS, "drafts"}
    assert all(row["dry_run"] for row in rows) and not any("error" in row for row in rows)
    keys = {row["key"] for row in rows if row["part"] == "rounds"}
    assert keys >= {f"llama {method} 200" for method in ("ar", *gpu_check.METHODS)}
    assert keys >= {f"qwen3 {method} 64" for method in ("ar", *gpu_check.METHODS)}
    # Gemma's and Qwen3.5's targets are transformers' modules: without it their drafters are timed alone.
    drafts = {row["key"] for row in rows if row["part"] == "drafts"}
    assert drafts >= {"gemma fold 200", "qwen35 original 64"}
    assert (tmp_path / "latency.csv").read_text().startswith("context,step,method,part,ms")
    assert "every time in it is meaningless" in (tmp_path / "summary.md").read_text()
    assert json.loads((tmp_path / "fingerprint.json").read_text())["code"]["sha256"]


@pytest.mark.parametrize("target", ["gemma", "qwen35"])
def test_rounds_of_targets_that_are_modules_of_transformers(
    target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_check, "METHODS", ("original", "fold", "cmr"))
    check = Check(tmp_path, CPU, 10, dry=True)
    gpu_check._rounds_of(check, target, target, until=0)
    assert {row["key"] for row in check.select("rounds")} == {
        f"{target} {method} {context}" for method in ("ar", "original", "fold", "cmr") for context in (64, 200)
    }


def test_a_context_that_does_not_fit_leaves_the_shorter_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend = ReferenceEngine.pretend

    def small(self: ReferenceEngine, length: int, *rest: object) -> object:
        if length > 100:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 43.00 GiB")
        return pretend(self, length, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(ReferenceEngine, "pretend", small)
    monkeypatch.setattr(gpu_check, "METHODS", ("original",))
    check = Check(tmp_path, CPU, 10, dry=True)
    gpu_check._rounds_of(check, "llama", "llama", until=0)
    assert [row["key"] for row in check.select("rounds")] == ["llama ar 64", "llama original 64"]
    assert check.left_out == [
        f"rounds of llama {method} 200: the device's memory does not hold it" for method in ("ar", "original")
    ]


def test_a_cut_costs_the_result_in_flight_and_no_more(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_check, "PAIRS", ("llama",))
    assert main(["--dry-run", "--parts", "reads", "--out", str(tmp_path)]) == 0
    before = rows_of(tmp_path)
    path = tmp_path / "check.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:-1]) + lines[-1][:20])  # killed while it wrote
    capsys.readouterr()
    assert main(["--dry-run", "--parts", "reads", "--out", str(tmp_path)]) == 0
    assert "reads    llama window 200" in capsys.readouterr().out
    after = rows_of(tmp_path)
    assert [row["key"] for row in after if row["part"] == "reads"] == [
        row["key"] for row in before if row["part"] == "reads"
    ]
    assert sum(row["key"] == "copy" for row in after) == 1
    assert [row["key"] for row in after].count("machine") == 2


def test_results_of_other_code_are_measured_again(tmp_path: Path) -> None:
    first = Check(tmp_path, CPU, 10, dry=True)
    first.add("reads", "llama fold 64", ms=1.0)
    assert Check(tmp_path, CPU, 10, dry=True).has("reads", "llama fold 64")
    text = (tmp_path / "check.jsonl").read_text()
    (tmp_path / "check.jsonl").write_text(text.replace('"code": "', '"code": "0'))
    assert not Check(tmp_path, CPU, 10, dry=True).has("reads", "llama fold 64")


def test_a_dry_run_or_another_device_measures_nothing_for_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dry = Check(tmp_path, CPU, 10, dry=True)
    dry.add("start", "copy", bytes_per_s=1e9)
    dry.add("engine", "fold float32", equal=True)
    assert Check(tmp_path, CPU, 10, dry=True).has("start", "copy")
    first = Check(tmp_path, CPU, 10, dry=False)
    assert not first.has("start", "copy") and not first.has("engine", "fold float32")
    first.add("start", "copy", bytes_per_s=4e12)
    assert Check(tmp_path, CPU, 10, dry=False).bandwidth == 4e12
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "another")
    assert not Check(tmp_path, torch.device("cuda", 0), 10, dry=False).has("start", "copy")


def test_a_context_measured_again_is_in_latency_csv_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def parts(engine: object, contexts: list[int], *rest: object, **named: object) -> Iterator[list[Part]]:
        for context in contexts:
            for step, method in (("AR", "ar"), ("SD", "original"), ("SD", "fold")):
                yield [Part(context, step, method, "target attention", 2.0, 1.0, 0.5)]

    monkeypatch.setattr(gpu_check, "full_engine", lambda *arguments: None)
    monkeypatch.setattr(latency_module, "measure", parts)
    check = Check(tmp_path, CPU, 10, dry=True)
    check.add("start", "copy", bytes_per_s=1e9)
    cut = {"context": 64, "step": "AR", "method": "ar", "part": "target attention"}
    check.add("latency", "AR ar 64", rows=[cut | {"ms": 9.0, "bytes": 1.0, "bound_ms": 0.5}])
    gpu_check.latency(check)
    with (tmp_path / "latency.csv").open() as file:
        found = [(row["context"], row["method"], row["ms"]) for row in csv.DictReader(file)]
    assert found == [(c, method, "2.0") for c in ("64", "200") for method in ("ar", "original", "fold")]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--minutes", "nan"], "'nan' is no number above 0"),
        (["--minutes", "-3"], "'-3' is no number above 0"),
        (["--minutes", "ten"], "'ten' is no number above 0"),
    ],
)
def test_minutes_are_a_positive_number(options: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["--dry-run", "--parts", "start", *options])
    assert left.value.code == 2 and says in capsys.readouterr().err


def test_a_place_that_cannot_be_written_gets_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    for out in (tmp_path / "file", tmp_path / "file" / "below"):
        assert main(["--dry-run", "--parts", "start", "--out", str(out)]) == 2
        said = capsys.readouterr()
        assert said.out == "" and said.err.count("\n") == 1 and "cannot be written" in said.err


def test_a_damaged_file_of_results_is_told_and_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for text in ("<<<<<<< HEAD\n", "[1]\n", '{"part": "start"}\n'):
        (tmp_path / "check.jsonl").write_text(text)
        assert main(["--dry-run", "--parts", "start", "--out", str(tmp_path)]) == 2
        assert "check.jsonl:1 is no result" in capsys.readouterr().err
        assert (tmp_path / "check.jsonl").read_text() == text


def test_an_interrupt_leaves_a_summary(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(check: Check) -> None:
        check.add("reads", "llama fold 64", ms=1.0, of_copy=0.5)
        raise KeyboardInterrupt

    monkeypatch.setitem(gpu_check.RUN, "reads", interrupted)
    assert main(["--dry-run", "--parts", "reads", "--out", str(tmp_path)]) == 130
    assert "interrupted in reads; the same command" in capsys.readouterr().err
    assert (tmp_path / "summary.md").exists() and rows_of(tmp_path)[-1]["key"] == "llama fold 64"


def test_a_part_that_fails_says_why_and_the_next_one_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(check: Check) -> None:
        raise RuntimeError("no such\ninstruction")

    ran: list[str] = []
    monkeypatch.setitem(gpu_check.RUN, "kernels", broken)
    monkeypatch.setitem(gpu_check.RUN, "latency", lambda check: ran.append("latency"))
    assert main(["--dry-run", "--parts", "kernels,latency", "--out", str(tmp_path)]) == 1
    assert ran == ["latency"]
    assert rows_of(tmp_path)[-1]["error"] == "RuntimeError: no such instruction"
    assert "Failed: kernels all" in capsys.readouterr().out


def test_what_there_is_no_time_for_is_left_out_and_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    check = Check(tmp_path, CPU, 0, dry=False)
    check.add("start", "copy", bytes_per_s=1e12)
    for part in ("rounds", "train"):
        check.begin(part)
        gpu_check.RUN[part](check)
    assert len(check.left_out) == 2 and not check.failed
    assert capsys.readouterr().out.count("left out from here on: no time") == 2
    page = "\n".join(summary(check))
    assert "Left out for want of time: rounds from llama on; train from demo drafter on" in page
    assert "not measured" in page


def test_an_error_beyond_the_tolerance_fails(tmp_path: Path) -> None:
    check = Check(tmp_path, CPU, 1, dry=True)
    gpu_check._verdict(check, "kernels", "near", 1e-3, 2e-3)
    gpu_check._verdict(check, "kernels", "far", 3e-3, 2e-3)
    gpu_check._verdict(check, "kernels", "nan", gpu_check._error(torch.tensor([float("nan")]), torch.ones(1)), 2e-3)
    assert check.failed == ["kernels far", "kernels nan"]


def test_the_bars_are_judged_from_what_was_measured(tmp_path: Path) -> None:
    check = Check(tmp_path, CPU, 1, dry=False)
    check.add("start", "copy", bytes_per_s=4e12)
    for context, share in ((32768, 0.5), (65536, 0.86), (131072, 0.9)):
        check.add("reads", f"llama fold {context}", of_copy=share)
    for context, fold in ((32768, 12.3), (131072, 12.36)):
        check.add("rounds", f"llama original {context}", round_ms=12.0)
        check.add("rounds", f"llama fold {context}", round_ms=fold)
    page = "\n".join(summary(check))
    assert "from 64K on: holds (least 86.0%, llama fold 65536; 2 of 12 reads measured)" in page
    assert "Llama's shape: holds (32K 1.025, 128K 1.030)" in page
    assert "| llama | fold | 12.300 | 12.360 |" in page and "| pair | method | 32K | 128K |" in page
    check.add("reads", "gemma fold 262144", of_copy=0.84)
    check.add("rounds", "llama original 65536", round_ms=12.0)
    check.add("rounds", "llama fold 65536", round_ms=12.4)
    page = "\n".join(summary(check))
    assert "from 64K on: does NOT hold (least 84.0%, gemma fold 262144; 3 of 12 reads measured)" in page
    assert "Llama's shape: does NOT hold" in page


def test_nothing_of_a_gpu_is_claimed_before_one_was_there() -> None:
    folders = [path for path in (ROOT / "results" / "gpu").iterdir() if path.is_dir()]
    said = (ROOT / "results" / "gpu" / "README.md").read_text()
    assert bool(folders) != ("Nothing has been measured yet" in said)


@pytest.mark.parametrize(
    ("option", "says", "code"), [(["--dry-run"], "in it is meaningless", 0), ([], "", 2)], ids=["dry", "real"]
)
def test_the_make_target_knows_the_dry_run(option: list[str], says: str, code: int, tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    arguments = [f"PYTHON={sys.executable}", f"ARGS=--parts start --out {tmp_path / 'out'}"]
    done = subprocess.run(["make", "gpu-check", *option, *arguments], cwd=ROOT, capture_output=True, text=True)
    assert says in done.stdout and done.returncode == code
    assert (tmp_path / "out").exists() == (code == 0)
