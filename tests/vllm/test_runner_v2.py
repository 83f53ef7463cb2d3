"""Our speculators on vLLM's V2 runner, which is the one that GPUs use: drafts equal the reference drafter's.

On a CPU, with Triton interpreted (``v2_session``): everything but CUDA graphs and FlashAttention.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from harness.drafters import read_config
from methods import make_method
from tests.vllm.pairs import Pair, deepspec_qwen3, dflash
from tests.vllm.replay import Reference
from tests.vllm.running import Run, prompt
from tests.vllm.test_plugin_methods import METHODS

pytest.importorskip("triton", reason="the V2 runner's kernels need Triton's interpreter")

LIMIT = 20
LONG, CROSSING = prompt(280, 1), prompt(54, 2)
DFLASH = ["original", "window", "streamingllm", "yarn", "rerope", "infllm", "cmr"]
SESSIONS: dict[str, tuple[str, dict[str, Any], list[dict[str, Any]]]] = {
    "dflash": (
        "llama",
        dflash(3),
        [
            # A context that grows out of the window is first read by the near reader alone.
            {"method": "fold", "prompt": CROSSING},
            {"method": "fold", "prompt": LONG},
            *({"method": name, "prompt": LONG} for name in DFLASH),
        ],
    ),
    "dspark": ("qwen3", deepspec_qwen3(rank=16), [{"method": "fold", "prompt": CROSSING}]),
    "deepspec dflash": ("qwen3", deepspec_qwen3(rank=0), [{"method": "fold", "prompt": CROSSING}]),
}


@pytest.mark.parametrize("name", SESSIONS)
def test_drafts_equal_the_reference_drafters(name: str, tmp_path: Path) -> None:
    target, drafter, requests = SESSIONS[name]
    asked = [{"limit": LIMIT, "options": METHODS[request["method"]]} | request for request in requests]
    session = tmp_path / "session.json"
    session.write_text(
        json.dumps({"target": target, "drafter": drafter, "folder": str(tmp_path / "pair"), "requests": asked})
    )
    command = [sys.executable, "-m", "tests.vllm.v2_session", str(session)]
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(command, cwd=root, env=os.environ | {"PYTHONPATH": str(root)}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]

    folder = tmp_path / "pair"
    pair = Pair(folder / "target", folder / "drafter", folder / "served", read_config(folder / "drafter"))
    reference = Reference(pair)
    answers = json.loads(session.with_name("session.json.out").read_text())
    for request, answer in zip(asked, answers, strict=True):
        method = make_method(request["method"], **request["options"])
        assert answer["output"] == answer["expected"]
        run = Run(answer["output"], answer["report"])
        found = reference.compare(method, request["prompt"], LIMIT, run)
        found.check(tie=0.01)
        assert found.rounds == run.report["rounds"]
        assert run.report["method"] == method.name
