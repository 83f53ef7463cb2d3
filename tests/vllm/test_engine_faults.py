"""What goes wrong with vLLM ends in one line, leaves no process behind, and is made good by the next start."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from safetensors.torch import load_file, save_file

from harness.config import EngineConfig
from harness.engines.base import EngineError
from harness.engines.vllm import activity
from harness.engines.vllm.drafter_copy import CONFIG, copy_drafter, main
from harness.engines.vllm.engine import VllmEngine
from harness.records import RECORDS, read_records
from harness.requests import Request
from methods import make_method
from tests.harness.helpers import ROOT
from tests.vllm.pairs import Pair, dflash, save_pair

CONTEXT, BLOCK = 512, 8
FOLD = make_method("fold", window=32)
PROMPT = tuple(3 + place * 7 % 200 for place in range(100))


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return save_pair(tmp_path_factory.mktemp("tiny"), "llama", dflash(block=BLOCK), context=CONTEXT)


@pytest.fixture
def engine(pair: Pair) -> Iterator[VllmEngine]:
    opened = open_engine(pair)
    yield opened
    opened.close()


def open_engine(pair: Pair, drafter: Path | None = None, **changes: Any) -> VllmEngine:
    settings = {"dtype": "float32", "threads": 1, "kv_cache_gib": 0.25, "prefill_chunk": 64} | changes
    return VllmEngine(
        pair.target, drafter or pair.drafter, EngineConfig(name="vllm", **settings), context=CONTEXT, block=BLOCK
    )


def request(limit: int = 8) -> Request:
    return Request("r1", "toy", "toy", PROMPT, limit, ())


def workers(parent: int) -> list[psutil.Process]:
    found = []
    for process in psutil.Process(parent).children(recursive=True):
        with suppress(psutil.Error):  # it is just ending
            if "harness.engines.vllm.worker" in process.cmdline():
                found.append(process)
    return found


def the_worker() -> psutil.Process:
    (found,) = workers(os.getpid())
    return found


def refusal(engine: VllmEngine, method: Any = None) -> str:
    """Start an arm that cannot start. Returns the one line; no process is left."""
    with pytest.raises(EngineError) as caught:
        engine.describe(method)
    assert workers(os.getpid()) == []
    engine.close()
    said = str(caught.value)
    assert "\n" not in said
    log = Path(said.rpartition("its log is ")[2])
    assert log.stat().st_size > 0  # kept for whoever wants the details
    shutil.rmtree(log.parent)
    return said


# --------------------------------------------------------------------------------------------------------- processes


def test_one_process_an_arm_a_new_one_after_a_kill_and_none_after_the_end(engine: VllmEngine) -> None:
    engine.decode(request(), None)
    first = the_worker()
    before = engine.decode(request(), FOLD)
    assert not first.is_running()
    killed = the_worker()
    threading.Timer(0.5, killed.kill).start()
    with pytest.raises(EngineError, match=r"vLLM \(fold\) could not decode: its process was killed by SIGKILL"):
        for _ in range(1000):
            engine.decode(request(300), FOLD)
    assert not killed.is_running() and workers(os.getpid()) == []
    after = engine.decode(request(), FOLD)
    assert (after.output_ids, after.commits) == (before.output_ids, before.commits)
    assert the_worker().pid not in (first.pid, killed.pid)

    scratch = engine._scratch
    engine._keep_logs = False  # of the failure that was wanted
    engine.close()
    assert workers(os.getpid()) == [] and not scratch.exists()


def test_a_killed_harness_takes_its_engine_with_it(pair: Pair, tmp_path: Path) -> None:
    script = tmp_path / "run.py"
    script.write_text(
        "import sys, pathlib\n"
        "from tests.vllm.test_engine_faults import *\n"
        f"folder = pathlib.Path({str(pair.target.parent)!r})\n"
        "engine = open_engine(Pair(folder / 'target', folder / 'drafter', folder / 'served', None))\n"
        "engine.decode(request(), None)\n"
        "print('ready', flush=True)\n"
        "while True:\n"
        "    engine.decode(request(300), None)\n"
    )
    harness = subprocess.Popen(
        [sys.executable, str(script)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)},
    )
    try:
        assert harness.stdout is not None and harness.stdout.readline() == "ready\n"
        (worker,) = workers(harness.pid)
        group = [worker, *worker.children(recursive=True)]
    finally:
        harness.send_signal(signal.SIGKILL)
        harness.wait()
    gone, alive = psutil.wait_procs(group, timeout=20)
    assert not alive and worker in gone


# ------------------------------------------------------------------------------------------------------------- starts


def test_too_little_memory_for_the_cache_is_one_line(pair: Pair) -> None:
    said = refusal(open_engine(pair, kv_cache_gib=100_000))
    assert said.startswith("vLLM (ar) could not start: ValueError: Available memory on node")
    assert "less than requested memory for kv" in said


def test_vllm_for_a_gpu_on_a_machine_without_one_is_one_line(
    engine: VllmEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    import vllm.platforms
    from vllm import LLM  # noqa: F401  # what it imports keeps the platform that it finds, for later tests too
    from vllm.engine.arg_utils import EngineArgs  # noqa: F401
    from vllm.platforms.interface import UnspecifiedPlatform

    from harness.engines.vllm import worker

    monkeypatch.setattr(vllm.platforms, "_current_platform", UnspecifiedPlatform())
    with pytest.raises(ValueError, match="built for a GPU and finds none"):
        worker.Worker(engine._spec(None))


def test_a_chunk_that_cannot_hold_a_verification_is_refused(pair: Pair) -> None:
    """vLLM would cut the drafts of every round, without a word."""
    with pytest.raises(EngineError, match=r"^engine.prefill_chunk=7: a verification feeds 8 tokens .* at least 8$"):
        open_engine(pair, prefill_chunk=BLOCK - 1)


@pytest.mark.parametrize("chunk", [BLOCK, 64])
def test_arms_read_prompts_in_equal_chunks_and_verify_all_drafts(
    chunk: int, pair: Pair, engine: VllmEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM keeps a drafter's slots free in each step; measured at the scheduler, in this process."""
    from harness.engines.vllm import worker
    from tests.vllm.running import ENVIRONMENT  # loads vLLM, which writes into the output of a script of this module's

    for name, value in (ENVIRONMENT | {"VLLM_USE_V2_MODEL_RUNNER": "0"}).items():
        monkeypatch.setenv(name, value)
    steps = {}
    for method in (None, FOLD):
        arm = worker.Worker(engine._spec(method) | {"prefill_chunk": chunk})
        fed: list[int] = []
        schedule = arm.scheduler.schedule

        def watched(*rest: Any, schedule: Any = schedule, fed: list[int] = fed, **named: Any) -> Any:
            step = schedule(*rest, **named)
            fed += step.num_scheduled_tokens.values()
            return step

        arm.scheduler.schedule = watched
        found = arm.decode(list(PROMPT), 4, [])
        steps[method] = fed[: len(fed) - len(found["commits"])]
        assert arm.info["settings"]["effective_prefill_chunk"] == chunk
        assert set(found["proposals"]) == (set() if method is None else {BLOCK - 1})
        activity.closed()
        arm.llm.llm_engine.engine_core.shutdown()
    whole, rest = divmod(len(PROMPT), chunk)
    assert steps[None] == steps[FOLD] == [chunk] * whole + [rest]


def test_a_device_that_vllm_was_not_built_for_is_refused(pair: Pair) -> None:
    said = refusal(open_engine(pair, device="cuda"))
    assert "engine.device=cuda, but the vLLM installed here is built for cpu" in said


def fake_plugin(folder: Path, entry: str) -> None:
    """A distribution that comes before the installed fold-bench and declares another entry point."""
    info = folder / "fold_bench-9.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: fold-bench\nVersion: 9\n")
    (info / "entry_points.txt").write_text(entry)


@pytest.mark.parametrize(
    ("entry", "module", "reason"),
    [
        ("", "", "the plugin fold_bench is not installed in this environment"),
        (
            "[vllm.general_plugins]\nfold_bench = broken_plugin:register\n",
            "import a_package_that_is_missing",
            "the plugin fold_bench does not load: ModuleNotFoundError: No module named 'a_package_that_is_missing'",
        ),
        (
            "[vllm.general_plugins]\nfold_bench = idle_plugin:register\n",
            "def register():\n    pass\n",
            "vLLM's plugin says that nothing is active, not fold",
        ),
    ],
    ids=["not installed", "does not load", "does nothing"],
)
def test_a_plugin_that_is_not_there_is_noticed(
    entry: str, module: str, reason: str, pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM itself logs it and goes on with its own drafter, or with none of our methods."""
    fake_plugin(tmp_path, entry)
    (tmp_path / "broken_plugin.py").write_text(module)
    (tmp_path / "idle_plugin.py").write_text(module)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    assert reason in refusal(open_engine(pair), FOLD)


def test_a_plugin_that_is_shut_out_is_noticed_before_the_autoregressive_arm_runs(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", "others")
    assert "VLLM_PLUGINS=others keeps the plugin fold_bench from loading" in refusal(open_engine(pair))


# ------------------------------------------------------------------------------------------------------------ drafters


def changed_drafter(pair: Pair, folder: Path, **config: Any) -> Path:
    shutil.copytree(pair.drafter, folder)
    raw = json.loads((folder / CONFIG).read_text()) | config
    (folder / CONFIG).write_text(json.dumps(raw))
    return folder


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"num_key_value_heads": 4}, "k_proj"),
        ({"num_hidden_layers": 3, "layer_types": ["full_attention"] * 3}, "layers.2"),
        ({"block_size": 5}, "block size 8 was asked for, but the checkpoint's block_size is 5"),
    ],
)
def test_a_drafter_that_contradicts_its_config_is_refused_before_anything_starts(
    config: dict[str, Any], reason: str, pair: Pair, tmp_path: Path
) -> None:
    with pytest.raises(EngineError) as caught:
        open_engine(pair, changed_drafter(pair, tmp_path / "drafter", **config))
    assert reason in str(caught.value) and "\n" not in str(caught.value)
    assert workers(os.getpid()) == []


def test_a_drafter_is_run_beyond_the_context_it_declares(pair: Pair, tmp_path: Path) -> None:
    """Stock vLLM stops drafting there without a word: every round would commit one token."""
    short = changed_drafter(pair, tmp_path / "drafter", max_position_embeddings=64)
    engine = open_engine(pair, short)
    try:
        long = engine.decode(request(24), FOLD)
        assert long.skipped_rounds == 0 and long.activity["rounds"] >= len(long.commits) == len(long.proposals)
        assert set(long.proposals) == {BLOCK - 1}
        assert engine.describe(FOLD).drafter["max_model_len"] == CONTEXT
    finally:
        engine.close()


def test_the_copy_of_a_drafter(pair: Pair, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sliding = changed_drafter(
        pair,
        tmp_path / "drafter",
        layer_types=["sliding_attention", "full_attention"],
        sliding_window=16,
        use_sliding_window=True,
        max_position_embeddings=64,
    )
    folder = copy_drafter(sliding, tmp_path / "served", context=1000, runner_v2=False)
    raw = json.loads((folder / CONFIG).read_text())
    assert raw["max_position_embeddings"] == 1000 + BLOCK + 1 and raw["is_causal"] is False
    assert raw["layer_types"] == ["full_attention"] * 2 and "sliding_window" not in raw
    assert raw["fold_bench_original_config"] == json.loads((sliding / CONFIG).read_text())
    assert (folder / "model.safetensors").resolve() == sliding / "model.safetensors"
    assert load_file(folder / "model.safetensors").keys() == load_file(sliding / "model.safetensors").keys()

    again = tmp_path / "again"  # a copy of a copy is the copy of the original
    assert main([str(folder), str(again), "--context", "1000", "--runner", "v1"]) == 0
    assert json.loads((again / CONFIG).read_text()) == raw
    assert json.loads(capsys.readouterr().out) == {
        "method": "dflash",
        "model": str(again),
        "num_speculative_tokens": BLOCK - 1,
    }
    assert main([str(folder), str(again), "--context", "1000"]) == 2
    assert capsys.readouterr().err == f"drafter_copy: {again} is not empty\n"
    assert main([str(tmp_path), str(tmp_path / "new"), "--context", "9"]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
    (tmp_path / CONFIG).write_text("[1, 2]")
    assert main([str(tmp_path), str(tmp_path / "new"), "--context", "9"]) == 2
    assert capsys.readouterr().err == f"drafter_copy: {tmp_path / CONFIG} is not a JSON object\n"


def test_weights_that_are_no_safetensors_are_refused(pair: Pair, tmp_path: Path) -> None:
    folder = changed_drafter(pair, tmp_path / "drafter")
    tensors = load_file(folder / "model.safetensors")
    tensors.pop("norm.weight")
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(EngineError, match=r"norm\.weight"):
        open_engine(pair, folder)
    (folder / "model.safetensors").write_bytes(b"not a tensor")
    with pytest.raises(EngineError, match="not a readable safetensors file"):
        open_engine(pair, folder)


# ----------------------------------------------------------------------------------------------- the command as a whole


def fold_bench(run_dir: Path, *more: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "harness.cli", "engine=vllm", "benchmark=demo_code", "benchmark.n=1"]
    command += ["benchmark.levels=[1K]", "benchmark.max_new_tokens=32", "warmup_tokens=0", "drift_requests=0"]
    command += ["engine.threads=1", "engine.kv_cache_gib=0.5", f"run_dir={run_dir}", *more]
    scratch = {**os.environ, "TMPDIR": str(run_dir.parent)}
    return subprocess.Popen(command, cwd=ROOT, env=scratch, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.slow
def test_a_killed_engine_costs_one_cell_which_the_next_start_redoes(demo_target: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    first = fold_bench(run_dir, "methods=[original]")
    seen: list[int] = []
    deadline = time.time() + 600
    while len(seen) < 2:  # the autoregressive arm's process, and the next arm's
        assert first.poll() is None and time.time() < deadline
        time.sleep(0.05)
        seen += [worker.pid for worker in workers(first.pid) if worker.pid not in seen]
    os.kill(seen[1], signal.SIGKILL)
    out, err = first.communicate(timeout=600)
    assert first.returncode == 1, err
    good = [record for record in read_records(run_dir / RECORDS) if not record.error]
    assert "ar" in {record.method for record in good}
    assert "killed by SIGKILL" in err and "Traceback" not in err

    second = fold_bench(run_dir, "methods=[original]")
    out, err = second.communicate(timeout=600)
    assert second.returncode == 0, err
    assert "original" in out
    kept = [record for record in read_records(run_dir / RECORDS) if not record.error]
    assert [record.method for record in kept] == ["ar", "original"] and kept[0] == good[0]
