"""Compile the kernels for a Hopper GPU without one: prints, per kernel and shape, what the machine code needs.

Run by test_kernels_compile.py in a process of its own, where Triton compiles instead of interpreting.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

os.environ.pop("TRITON_INTERPRET", None)
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from methods.kernels import merge, rotate, split_read
from methods.paged import Call, DeviceRope, Place, Tally
from methods.reading import LogQueryScale

SHAPES = {"llama": (10, 32, 8, 128), "gemma": (7, 16, 1, 512)}  # B, Hq, Hkv, d of drafters of the paper


class NoDevice:
    """What the compiler asks of a driver."""

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device=None):
        return 0


def watch(kernel, name):
    """Compile where a launch would compile and run, and print what came of it."""
    run = kernel.run

    def compiled(*args, grid, warmup, **options):
        made = run(*args, grid=grid, warmup=True, **options)
        print(json.dumps({"kernel": name, "shape": SHAPE, **needs(made)}), flush=True)
        return made

    kernel.run = compiled


def needs(made):
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        shown = subprocess.run([tools / "cuobjdump", "-res-usage", file.name], capture_output=True, text=True).stdout
    registers, stack = re.search(r"REG:(\d+) STACK:(\d+)", shown).groups()
    code = made.asm["ptx"]
    copies = re.findall(r"cp\.async\.c[ag]\.shared\.global +\[[^\]]*\], *\[[^\]]*\], *(0x\w+)", code)
    return {
        "registers": int(registers),
        "stack": int(stack),
        "shared": made.metadata.shared,
        "tensor_cores": "wgmma.mma_async" in code or "mma.sync" in code,
        "async_bytes": sorted({int(size, 16) for size in copies}),
    }


driver.set_active(NoDevice())
KERNELS = {"_split_kernel": split_read, "_combine_kernel": split_read, "_rotate_kernel": rotate, "_merge_kernel": merge}
for name, module in KERNELS.items():
    watch(getattr(module, name), name)

for shape, (rows, heads, kv_heads, dim) in SHAPES.items():
    SHAPE = shape
    q = torch.zeros(rows, heads, dim, dtype=torch.bfloat16)
    pages, table = torch.zeros(4, 16, kv_heads, dim, dtype=torch.bfloat16), torch.zeros(4, dtype=torch.int32)
    length = torch.zeros(1, dtype=torch.int32)
    near = Call(q, pages, pages, table, length, 1.0, shift=rows, left=2048 + rows - 1)
    far = Call(q, pages, pages, table, length, 1.0, shift=-2048, right=0, sharpen=2.0)
    for tile in split_read.tiles_for(near):
        split_read.launch([near, far], (32, tile))
    if shape == "llama":
        split_read.launch([near], (1, tile))
    rope = DeviceRope(torch.zeros(dim // 2, dtype=torch.float64), torch.ones(1, dtype=torch.float64))
    tally = Tally(torch.zeros(3, 5, dtype=torch.int64), torch.zeros(5, dtype=torch.int64))
    rotate.rotate(q, length, rope, far=Place(2058, True), scaling=LogQueryScale(4096), tally=tally)
    merge.merge([q, q], [torch.zeros(rows, heads)] * 2, [1.0, 2.0])
