"""Bar of issue 4: peak memory and throughput of preparing Long Code Arena's large split, from a file of a gigabyte.

    python benchmarks/prep_lca.py [--gigabytes 1.0] [--rows 270] [--tokenizer FOLDER] [--keep FILE]

Generates a parquet file with the published schema in one row group (as the published file has; a reader that loads row
groups would take it all), prepares it at 32K, 64K and 122K tokens, and prints seconds, throughput and the peak memory
of the preparing process. The tokenizer is the demo target's unless another folder is given.
"""

from __future__ import annotations

import argparse
import random
import resource
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import pyarrow as pa
import pyarrow.parquet as pq

TEXT = pa.string()
LINES = pa.struct([("inproject", pa.list_(pa.int64()))])
SCHEMA = pa.schema(
    [
        ("repo", TEXT),
        ("commit_hash", TEXT),
        ("completion_file", pa.struct([("filename", TEXT), ("content", TEXT)])),
        ("repo_snapshot", pa.struct([("filename", pa.list_(TEXT)), ("content", pa.list_(TEXT))])),
        ("completion_lines_raw", LINES),
    ]
)
_RATIO = 1.8  # bytes of such text per byte of file
LENGTHS = {"lca_32k": 32768, "lca_64k": 65536, "lca_122k": 124928}


def rows(number: int, total_bytes: float) -> Iterator[dict[str, object]]:
    """Repositories of standard-library lines in random order; incompressible enough to make a large file."""
    lines: list[str] = []
    for file in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        lines += file.read_text(encoding="utf-8", errors="replace").splitlines()
    chance = random.Random(0)
    for row in range(number):
        names, contents, size = [], [], 0
        while size < total_bytes / number:
            # Two thirds python, the rest other text, which is read but never used; a few files have no content.
            suffix = chance.choice([".py", ".py", ".txt"])
            body = "\n".join(chance.choices(lines, k=chance.randrange(40, 800)))
            names.append(f"p{chance.randrange(6)}/q{chance.randrange(6)}/f{len(names)}{suffix}")
            contents.append(body if len(names) % 50 else None)
            size += len(body)
        code = "\n".join(chance.choices(lines, k=300))
        yield {
            "repo": f"u__{row}",
            "commit_hash": f"{row:040x}",
            "completion_file": {"filename": "p1/q1/new.py", "content": code},
            "repo_snapshot": {"filename": names, "content": contents},
            "completion_lines_raw": {"inproject": [7, 60, 80]},
        }


def generate(path: Path, number: int, total_bytes: float) -> None:
    """Write `total_bytes` of text as one row group (this process holds all of it; the measured one must not)."""
    with pq.ParquetWriter(path, SCHEMA, compression="snappy") as writer:
        writer.write_table(
            pa.concat_tables(pa.Table.from_pylist([row], schema=SCHEMA) for row in rows(number, total_bytes))
        )


def prepare(path: Path, tokenizer_folder: str) -> None:
    """The measured process."""
    from transformers import AutoTokenizer

    from data_prep.config import BenchmarkConfig, SourceConfig
    from data_prep.demo.target import ensure_target
    from data_prep.prepare import prepare as prepare_requests
    from data_prep.tokens import TargetSpec

    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder or ensure_target())
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    config = BenchmarkConfig(
        name="lca",
        loader="lca",
        tasks=list(LENGTHS),
        max_new_tokens=256,
        chat=False,
        options={"lengths": LENGTHS},
        sources=[SourceConfig(repo="bench/lca", files=["*.parquet"])],
    )
    tokens = 0

    def count(request) -> None:  # type: ignore[no-untyped-def]
        nonlocal tokens
        tokens += len(request.prompt_ids)

    with tempfile.TemporaryDirectory() as folder:
        begin, cpu = time.perf_counter(), time.process_time()
        result = prepare_requests(config, tokenizer, TargetSpec("bench", 131072, (2,)), folder, path, count)
        wall, cpu = time.perf_counter() - begin, time.process_time() - cpu
        size = result.stat().st_size / 2**20
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    gigabytes = path.stat().st_size / 1e9
    print(
        f"{gigabytes:.2f} GB of parquet: {wall:.0f} s ({cpu:.0f} s of CPU; {gigabytes * 1e3 / cpu:.0f} MB and "
        f"{tokens / cpu / 1e6:.2f} M prompt tokens per CPU second), {tokens / 1e6:.1f} M tokens in a request file of "
        f"{size:.0f} MiB, peak memory {peak:.0f} MiB (of which {before:.0f} MiB before preparing)"
    )
    if peak > 2048:
        sys.exit("peak memory is above 2 GiB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=1.05)
    parser.add_argument("--rows", type=int, default=270)
    parser.add_argument("--tokenizer", default="")
    parser.add_argument("--keep", default="", help="generate the file here, or use it if it exists")
    parser.add_argument("--step", choices=("generate", "measure"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.step == "generate":
        return generate(Path(options.keep), options.rows, options.gigabytes * 1e9 * _RATIO)
    if options.step == "measure":
        return prepare(Path(options.keep), options.tokenizer)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(options.keep or Path(folder) / "test-00000-of-00001.parquet")
        # Each step is a process of its own, and this one stays small: a child's peak memory starts at its parent's.
        again = [sys.executable, __file__, *sys.argv[1:], "--keep", str(path)]
        if not path.exists():
            subprocess.run([*again, "--step", "generate"], check=True)
        sys.exit(subprocess.run([*again, "--step", "measure"], check=False).returncode)


if __name__ == "__main__":
    main()
