"""fold-prep as a command: one benchmark, groups, listing, checking; determinism, and what a kill leaves."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import make_tokenizer
from prep_fixtures import (
    LCA,
    gov_row,
    infinite_row,
    install_prompts,
    lbv2_row,
    lca_row,
    write_gov,
    write_lines,
    write_parquet,
)

from data_prep import cli
from harness.requests import load_manifest, read_requests, request_path

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    make_tokenizer().save_pretrained(folder)
    (folder / "generation_config.json").write_text('{"eos_token_id": [4, 1]}')
    return folder


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FOLD_BENCH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    install_prompts(monkeypatch, tmp_path / "cache")
    folder = tmp_path / "source"
    folder.mkdir()
    return folder


@pytest.fixture
def prep(tmp_path: Path, target_folder: Path, source: Path, capsys):
    def run(*overrides: str) -> tuple[int, str, str]:
        capsys.readouterr()
        base = [f"target.source={target_folder}", f"data_dir={tmp_path / 'data'}", f"source={source}"]
        code = cli.main(["target=llama", *base, *overrides])
        out, err = capsys.readouterr()
        return code, out, err

    return run


def one_line(result: tuple[int, str, str], code: int = 2) -> str:
    assert result[0] == code and result[1] == ""
    lines = [line for line in result[2].splitlines() if line.strip()]
    assert len(lines) == 1 and lines[0].startswith("fold-prep: ")
    return lines[0]


def test_one_benchmark_from_a_folder(prep, source: Path, tmp_path: Path) -> None:
    (source / "data.json").write_text(json.dumps([lbv2_row("a"), lbv2_row("b")]))
    code, _, err = prep("benchmark=lbv2")
    assert code == 0 and "lbv2: 2 requests of" in err
    path = request_path(tmp_path / "data", "lbv2", "llama")
    requests = list(read_requests(path))
    assert (
        [r.id for r in requests] == ["a", "b"] and requests[0].stop_ids == (1, 4) and requests[0].max_new_tokens == 128
    )
    stamp = path.stat().st_mtime_ns
    assert prep("benchmark=lbv2")[0] == 0 and path.stat().st_mtime_ns == stamp
    (source / "data.json").write_text(json.dumps([lbv2_row("a"), lbv2_row("c")]))
    assert "data.json has changed since it was first used" in one_line(prep("benchmark=lbv2"))
    assert prep("benchmark=lbv2", "source=null")[0] == 0  # a valid file does not need its sources
    (target,) = [load_manifest(path)["recipe"]["target"]]
    assert target["name"] == "llama" and target["max_context"] == 131072


def test_a_group_goes_on_and_reports_what_is_missing(prep, source: Path, tmp_path: Path) -> None:
    write_gov(source, [gov_row("a")])
    code, _, err = prep("benchmark=short")
    assert code == 1 and "gov: 1 requests" in err and "holds no file data.json" in err
    assert "1 of 2 benchmarks could not be prepared" in err
    assert request_path(tmp_path / "data", "gov", "llama").exists()


def test_the_dspark_variant_keeps_long_inputs_only(prep, source: Path, tmp_path: Path) -> None:
    write_gov(source, [gov_row("short", 20), gov_row("long", 9000)])
    assert prep("benchmark=gov_16k")[0] == 0
    assert [r.id for r in read_requests(request_path(tmp_path / "data", "gov_16k", "llama"))] == ["long"]


def test_mistakes_end_in_one_line(prep, source: Path, tmp_path: Path) -> None:
    assert "no benchmark is called 'lbv3'; choose from all" in one_line(prep("benchmark=lbv3"))
    assert "unknown option 'benchmark.typo'" in one_line(prep("benchmark=gov", "benchmark.typo=1"))
    assert "'gov' is not key=value" in one_line(prep("gov"))
    assert "--lsit" in one_line(prep("--lsit"))
    assert "holds no file data.zip" in one_line(prep("benchmark=gov"))
    write_gov(source, [gov_row("a")])
    assert "holds no usable tokenizer" in one_line(prep("benchmark=gov", f"target.source={source}"))
    (tmp_path / "file").write_text("")
    assert "choose another data_dir" in one_line(prep("benchmark=gov", f"data_dir={tmp_path / 'file'}"))
    assert "no request file for llama" in one_line(prep("--check", f"data_dir={tmp_path / 'none'}"))


def test_list_names_every_benchmark_with_licence_and_gating(capsys) -> None:
    assert cli.main(["--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    names = [line.split()[0] for line in lines]
    assert set(names) >= {
        "gov", "lbv2", "retr_kv", "en_sum", "en_qa", "en_mc", "en_dia", "lca", "lca_huge", "repobench", "swebench",
        "speed_short", "speed_long", "speed_qualitative", "retr_kv_generated", "demo_code", "demo_docs", "demo_kv",
        "demo_copy", "general", "code", "all", "speed", "demo",
    }  # fmt: skip
    (speed,) = [line for line in lines if line.startswith("speed_long")]
    assert "NVIDIA Evaluation Dataset License" in speed and "gated" in speed
    (lbv2,) = [line for line in lines if line.startswith("lbv2 ")]
    assert "THUDM/LongBench-v2@2b48e494" in lbv2 and "Apache-2.0" in lbv2 and "465 MB" in lbv2


def test_check_prints_ours_beside_the_papers(prep, source: Path) -> None:
    write_gov(source, [gov_row("a"), gov_row("b", 100_000)])
    write_lines(source / "longbook_qa_eng.jsonl", [infinite_row(0, "longbook_qa_eng")])
    assert prep("benchmark=gov")[0] == prep("benchmark=en_qa")[0] == 0
    code, out, _ = prep("--check")
    assert code == 0
    (gov,) = [line for line in out.splitlines() if line.startswith("gov ")]
    assert gov.split()[1:3] == ["1", "284"] and "1.8K–27K" in gov and "1 needs more than 131072 tokens" in gov
    (qa,) = [line for line in out.splitlines() if line.startswith("en_qa ")]
    assert qa.split()[1:3] == ["1", "112"] and "64K–128K†" in qa


CHILD = """
import json, sys
from pathlib import Path
from transformers import AutoTokenizer
from data_prep.config import BenchmarkConfig, SourceConfig
from data_prep.prepare import prepare
from data_prep.tokens import TargetSpec
folder, data, source = map(Path, sys.argv[1:4])
config = BenchmarkConfig("lca", loader="lca", tasks=["lca_s"], max_new_tokens=8, chat=False,
    options={"lengths": {"lca_s": 1500}}, sources=[SourceConfig(repo="o/lca", files=["*.parquet"])])
def tell(request): print(request.id, flush=True)
print(prepare(config, AutoTokenizer.from_pretrained(folder), TargetSpec("t", 8192, (1,)), data, source, tell))
"""


def child(target_folder: Path, data: Path, source: Path, seed: str) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "PYTHONHASHSEED": seed, "TOKENIZERS_PARALLELISM": "false"}
    command = [sys.executable, "-c", CHILD, str(target_folder), str(data), str(source)]
    return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def test_two_machines_agree_and_a_kill_leaves_nothing_half_written(
    target_folder: Path, source: Path, tmp_path: Path
) -> None:
    snapshot: dict[str, str | None] = {f"d{i}/f.py": f"def f{i}(): return {i}\n" * 50 for i in range(9)}
    rows = [lca_row(f"u__{i}", [], [60], snapshot) for i in range(300)]
    write_parquet(source / "lca.parquet", rows, LCA)
    killed = child(target_folder, tmp_path / "a", source, "1")
    assert killed.stdout is not None and killed.stdout.readline()
    os.kill(killed.pid, signal.SIGKILL)
    assert killed.wait() == -signal.SIGKILL
    path = request_path(tmp_path / "a", "lca", "t")
    assert not path.exists() and any(p.name.endswith(".partial") for p in path.parent.iterdir())

    for name, seed in (("a", "2"), ("b", "3")):
        done = child(target_folder, tmp_path / name, source, seed)
        _, said = done.communicate()
        assert done.returncode == 0, said.decode()
    other = request_path(tmp_path / "b", "lca", "t")
    assert path.read_bytes() == other.read_bytes() and len(list(read_requests(path))) == 300
    assert load_manifest(path) == load_manifest(other)
    assert not any(p.name.endswith(".partial") for p in path.parent.iterdir())  # the killed one's is gone
