"""Sweeps through another launcher of Hydra: each combination is a job of its own (tests/slurm has the one on SLURM)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from analysis.load import load
from harness.cli import main
from tests.harness.helpers import ROOT, toy_pair
from tests.slurm.slurm_fixtures import hooked

LOCAL = "hydra/launcher=submitit_local"


def sweep(folder: Path, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(filter(None, [str(ROOT), env.pop("PYTHONPATH", ""), os.environ.get("PYTHONPATH")]))
    return subprocess.run(
        [sys.executable, "-m", "harness.cli", *arguments],
        cwd=folder,
        env={**os.environ, **env, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=600,
    )


@pytest.fixture
def pair(tmp_path: Path) -> list[str]:
    return toy_pair(tmp_path / "pair", 4)


def test_a_launcher_runs_each_combination_in_a_job_of_its_own(pair: list[str], tmp_path: Path) -> None:
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher")
    done = sweep(tmp_path, *pair, "-m", "method=fold,window", "method.window=32", LOCAL, **hooked(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "this command waits" in done.stderr
    runs = sorted((tmp_path / "results" / "runs").iterdir())
    assert [set(load(run).used["arm"]) for run in runs] == [{"ar", "fold"}, {"ar", "window"}]
    assert len(list(tmp_path.glob("multirun/*/*/.submitit/*/*_result.pkl"))) == 2


def test_a_failed_cell_in_a_job_is_exit_code_1(pair: list[str], tmp_path: Path) -> None:
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher")
    env = hooked(tmp_path, **{"class": "OutOfMemory"})
    done = sweep(tmp_path, *pair, "-m", "method=fold,window", LOCAL, **env)
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("FAILED ") and "method=fold" in last and "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-m", "method=window,fold", "method.alpha=nan"], "method.alpha is nan"),
        (["method=fold"], "a launcher starts the runs of a sweep: add -m"),
    ],
)
def test_a_mistake_in_any_combination_starts_no_job(
    arguments: list[str],
    message: str,
    pair: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([*pair, *arguments, LOCAL]) == 2
    assert message in capsys.readouterr().err and not (tmp_path / "multirun").exists()


def test_a_launcher_that_is_not_installed_says_which_package_it_is(
    pair: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([*pair, "-m", "method=fold", "hydra/launcher=submitit_nowhere"]) == 2
    assert "pip install hydra-submitit-launcher, or use fold-submit" in capsys.readouterr().err
