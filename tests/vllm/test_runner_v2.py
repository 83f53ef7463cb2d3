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

ROOT = str(Path(__file__).resolve().parents[2])
LIMIT = 14
LONG, CROSSING = prompt(280, 1), prompt(58, 2)
DFLASH = ["original", "window", "streamingllm", "yarn", "rerope", "infllm", "cmr"]
SESSIONS: dict[str, tuple[str, dict[str, Any], list[dict[str, Any]]]] = {
    "dflash": (
        "llama",
        dflash(3),
        [
            # A context that grows out of the window is first read by the near reader alone.
            {"method": "fold", "prompt": CROSSING},
            {"method": "fold", "prompt": LONG},
            {"method": "fold", "prompt": CROSSING, "kernels": "triton", "limit": 5},  # interpreted reads are slow
            *({"method": name, "prompt": LONG} for name in DFLASH),
        ],
    ),
    "dspark": ("qwen3", deepspec_qwen3(rank=16), [{"method": "fold", "prompt": CROSSING}]),
    "deepspec dflash": ("qwen3", deepspec_qwen3(rank=0), [{"method": "fold", "prompt": CROSSING}]),
}


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Pair, list[tuple[dict[str, Any], Any]]]]:
    """Each pair, and what became of its requests."""
    folder = tmp_path_factory.mktemp("v2")
    asked = [
        {
            "target": target,
            "drafter": drafter,
            "folder": str(folder / name),
            "requests": [{"limit": LIMIT, "options": METHODS[each["method"]]} | each for each in requests],
        }
        for name, (target, drafter, requests) in SESSIONS.items()
    ]
    session = folder / "session.json"
    session.write_text(json.dumps(asked))
    command = [sys.executable, "-m", "tests.vllm.v2_session", str(session)]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | {"PYTHONPATH": ROOT}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    written = json.loads(session.with_name("session.json.out").read_text())
    found = {}
    for name, pair, given in zip(SESSIONS, asked, written, strict=True):
        where = folder / name
        made = Pair(where / "target", where / "drafter", where / "served", read_config(where / "drafter"))
        found[name] = made, list(zip(pair["requests"], given, strict=True))
    return found


@pytest.mark.parametrize("name", SESSIONS)
def test_drafts_equal_the_reference_drafters(name: str, answers: Any) -> None:
    pair, requests = answers[name]
    reference = Reference(pair)
    for request, answer in requests:
        method = make_method(request["method"], **request["options"])
        assert answer["output"] == answer["expected"][: request["limit"]]
        run = Run(answer["expected"], answer["report"])  # the last round may commit more than was asked for
        found = reference.compare(method, request["prompt"], request["limit"], run)
        found.check(tie=0.01)
        assert found.rounds + found.beyond == run.report["rounds"]
        assert run.report["method"] == method.name
