"""What each method's context read costs per draft round, beside the original's, in one run.

    python benchmarks/read_methods.py                       the demo drafter at 4K of context
    python benchmarks/read_methods.py --context 8000 --threads 2

One context, all methods on it, round by round in rotated order, so that a slow moment of the machine hits all of them.
A round reads every layer and then takes in the committed entries. Prints per round: wall time (first decile, since
other work on the machine only adds to it), CPU time of this process (median; what the ratio is made of), and the bytes
held beyond the shared cache.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch

from methods import make_method
from methods.reader import ContextCache, DrafterGeometry, open_reader
from methods.reading import LayerGeometry, RequestGeometry
from methods.rope import build_rope

WARM_UP = 5  # rounds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, value in (
        ("context", 4096), ("window", 256), ("layers", 3), ("block", 8), ("q-heads", 9), ("kv-heads", 3),
        ("head-dim", 64), ("rounds", 100), ("threads", 1),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    a = parser.parse_args()
    torch.set_num_threads(a.threads)
    dtype = getattr(torch, a.dtype)
    drafter = DrafterGeometry(
        (LayerGeometry(),) * a.layers, a.q_heads, a.kv_heads, a.head_dim, a.head_dim, a.head_dim**-0.5,
        build_rope({"rope_theta": 1e5}, a.head_dim), a.block,
    )  # fmt: skip
    methods = [
        make_method("original"),
        make_method("window", window=a.window),
        make_method("fold", window=a.window),
        make_method("rerope", window=a.window),
        make_method("yarn", reference=512),
        make_method("streamingllm"),
        make_method("engine_window", window=a.window),
        make_method("infllm", window=a.window),
        make_method("cmr"),
    ]
    committed = 3
    cache = ContextCache(drafter, a.context + committed * (a.rounds + 5), dtype)

    def append(count: int) -> tuple[int, int]:
        start = cache.length
        entries = (torch.randn(a.layers, count, a.kv_heads, a.head_dim).to(dtype) for _ in range(2))
        cache.append(*entries)
        return start, cache.length

    append(a.context)
    request = RequestGeometry(a.context, 128, a.block)
    readers = [open_reader(method, drafter, request, cache) for method in methods]
    for reader in readers:
        reader.prepare()
    wall_ms: list[list[float]] = [[] for _ in methods]
    cpu_ms: list[list[float]] = [[] for _ in methods]
    for number in range(a.rounds + WARM_UP):
        q = torch.randn(a.block, a.q_heads, a.head_dim).to(dtype)
        kb, vb = (torch.randn(a.block, a.kv_heads, a.head_dim).to(dtype) for _ in range(2))
        order = [(number + i) % len(methods) for i in range(len(methods))]
        wants = [reader.wants_target_attention() for reader in readers]
        weights = torch.softmax(torch.randn(cache.length + committed), 0)
        for i in order:
            wall, cpu = time.perf_counter(), time.process_time()
            for layer in range(a.layers):
                readers[i].read(layer, q, kb, vb)
            readers[i].round_done()
            wall_ms[i].append(1000 * (time.perf_counter() - wall))
            cpu_ms[i].append(1000 * (time.process_time() - cpu))
        start, end = append(committed)
        for i in order:
            wall, cpu = time.perf_counter(), time.process_time()
            readers[i].committed(start, end)
            if wants[i]:
                readers[i].target_attention(weights)
            wall_ms[i][-1] += 1000 * (time.perf_counter() - wall)
            cpu_ms[i][-1] += 1000 * (time.process_time() - cpu)

    print(
        f"context {a.context}, W {a.window}, {a.layers} layers, B {a.block}, {a.q_heads}/{a.kv_heads} heads, "
        f"dim {a.head_dim}, {a.dtype}, {a.threads} thread(s), {a.rounds} rounds"
    )
    print(f"{'method':14}{'wall ms':>9}{'cpu ms':>9}{'cpu/original':>14}{'cpu - original':>16}{'extra/cache':>13}")
    cpu_of = [statistics.median(times[WARM_UP:]) for times in cpu_ms]
    for i, method in enumerate(methods):
        wall = statistics.quantiles(wall_ms[i][WARM_UP:], n=10)[0]
        print(
            f"{method.name:14}{wall:9.2f}{cpu_of[i]:9.2f}{cpu_of[i] / cpu_of[0]:14.2f}{cpu_of[i] - cpu_of[0]:16.2f}"
            f"{readers[i].extra_bytes() / cache.nbytes:13.0%}"
        )


if __name__ == "__main__":
    main()
