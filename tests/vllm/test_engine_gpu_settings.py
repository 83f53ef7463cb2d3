"""How vLLM configures both arms on a GPU, which no machine here has: its own resolution, with an H100's answers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from tests.harness.helpers import ROOT
from tests.vllm.pairs import deepspec_gemma4, deepspec_qwen3, dflash, mixed_dflash, save_pair
from tests.vllm.torchvision_stub import torchvision_importable

# target, drafter, runner, what vLLM calls the drafter, K
PAIRS: dict[str, tuple[str, dict[str, Any], str, str, int]] = {
    "llama": ("llama", dflash(block=10), "V2", "dflash", 9),
    "qwen3": ("qwen3", deepspec_qwen3(0), "V2", "dspark", 7),
    "qwen3_dspark": ("qwen3", deepspec_qwen3(8), "V2", "dspark", 7),
    "gemma4": ("gemma4", deepspec_gemma4(0), "V2", "dspark", 7),
    "qwen35": ("qwen3_5", mixed_dflash(), "V1", "dflash", 7),
}


@pytest.fixture(scope="module")
def resolved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    folder, arguments = tmp_path_factory.mktemp("pairs"), []
    for name, (target, drafter, *_) in PAIRS.items():
        pair = save_pair(folder / name, target, drafter, context=512, dtype="bfloat16")
        arguments += [name, str(pair.target), str(pair.drafter)]
    with torchvision_importable(folder / "stub"):
        path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        done = subprocess.run(
            [sys.executable, "-m", "tests.vllm.simulated_gpu", *arguments],
            env={**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": path},
            capture_output=True,
            text=True,
            timeout=600,
        )
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"pair"')]
    assert len(lines) == len(PAIRS) + 1, done.stderr[-3000:]
    return {line["pair"]: line for line in lines}


@pytest.mark.parametrize("name", PAIRS)
def test_arms_differ_in_nothing_but_speculation_on_a_gpu(name: str, resolved: dict[str, dict[str, Any]]) -> None:
    found, (_, _, runner, method, proposals) = resolved[name], PAIRS[name]
    assert found["differing"] == []
    assert found["runners"] == [runner, runner]
    assert found["async_scheduling"] and found["async_scheduler"]
    assert (found["graphs"], found["chunks"], found["reach"]) == ("FULL_AND_PIECEWISE", [8192, 8192], 2048)
    assert found["speculation"] == [method, proposals]


def test_a_setting_that_vllm_changes_for_drafters_only_is_seen(resolved: dict[str, dict[str, Any]]) -> None:
    """Without our own setting of it, vLLM switches cascade attention off in the drafter's arm alone."""
    assert resolved["cascade"]["differing"] == ["model_config.disable_cascade_attn: False, True"]
