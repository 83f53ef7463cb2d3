"""Bar F of data preparation: 1,000 requests of 128K tokens written, read back and validated.

    python benchmarks/prep_write.py [--requests 1000] [--tokens 131072]

Prints seconds and peak memory for the whole and for a tenth of it: memory must not grow with the number of requests.
The yardstick is decoding: the paper's fastest round takes 12 ms, so one request of 128 new tokens costs seconds.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from harness.requests import Request, read_requests, request_path, write_requests


def requests(number: int, tokens: int) -> Iterator[Request]:
    """Random ids with the skewed frequencies of text, so that compression has a realistic task."""
    random = np.random.default_rng(0)
    for index in range(number):
        ids = np.minimum(random.zipf(1.1, tokens), 128_000).tolist()
        yield Request(f"{index:05}", "bench", "bench", tuple(ids), 128, (2,), {"length": tokens})


def measure(number: int, tokens: int, results: multiprocessing.Queue) -> None:
    """One process per size, so that peak memory is this size's own."""
    with tempfile.TemporaryDirectory() as folder:
        path = request_path(folder, "bench", "bench")
        begin = clocks()
        for _ in requests(number, tokens):
            pass
        made = clocks()
        write_requests(path, requests(number, tokens), {})
        written = clocks()
        count = sum(1 for _ in read_requests(path))
        read = clocks()
        size = path.stat().st_size
    # What making the requests costs, measured by itself, is taken off the writing.
    write_s = [w - 2 * m + b for w, m, b in zip(written, made, begin, strict=True)]
    read_s = [r - w for r, w in zip(read, written, strict=True)]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    results.put((count, write_s, read_s, size / 2**20, peak))


def clocks() -> tuple[float, float]:
    """Wall time and CPU time of this process, in seconds; on a shared machine only the second is the code's own."""
    return time.perf_counter(), time.process_time()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--tokens", type=int, default=131072)
    options = parser.parse_args()
    for number in (max(options.requests // 10, 1), options.requests):
        results: multiprocessing.Queue = multiprocessing.get_context("spawn").Queue()
        process = multiprocessing.get_context("spawn").Process(target=measure, args=(number, options.tokens, results))
        process.start()
        count, write, read, size, peak = results.get()
        process.join()
        parts = [
            f"{what} {wall:.1f} s ({cpu:.1f} s CPU, {count * options.tokens / cpu / 1e6:.1f} M tokens a CPU second)"
            for what, (wall, cpu) in (("write", write), ("read and validate", read))
        ]
        print(
            f"{count} requests of {options.tokens:,} tokens: {'; '.join(parts)}; file {size:.0f} MiB, "
            f"peak memory {peak:.0f} MiB",
            flush=True,
        )


if __name__ == "__main__":
    main()
