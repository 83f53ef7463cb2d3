"""The kernels compile for the GPU they are written for, and keep their sums in registers."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed: pip install triton")
def test_kernels_compile_for_a_hopper_gpu(tmp_path):
    """For heads of 128 and 512 and every tile that may be chosen: the kernels fit 227 KiB of shared memory, use tensor
    cores, fetch keys and values 16 bytes at a time ahead of their use, and spill nothing (``stack`` of the rotation is
    the C library's, for angles that its own reduction rules out)."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, HERE / "compile_for_hopper.py"],
        env=env | {"TRITON_CACHE_DIR": str(tmp_path)}, capture_output=True, text=True,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-2000:]
    made = [json.loads(line) for line in run.stdout.splitlines()]
    assert {(m["shape"], m["kernel"]) for m in made} == {
        (shape, kernel)
        for shape in ("llama", "gemma")
        for kernel in ("_split_kernel", "_combine_kernel", "_rotate_kernel", "_merge_kernel")
    }
    for kernel in made:
        assert kernel["shared"] <= 227 * 1024, kernel
        assert kernel["stack"] <= (64 if kernel["kernel"] == "_rotate_kernel" else 0), kernel
        if kernel["kernel"] == "_split_kernel":
            assert kernel["tensor_cores"] and 16 in kernel["async_bytes"], kernel
