"""Running the toy unit of tests/harness/scripted.py, and the whole command on a toy pair."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from harness.bench import Options, Report, run_unit
from harness.engines.base import Engine
from harness.records import RECORDS, JsonLines, Record, RecordWriter, read_lines, read_records
from harness.requests import request_path, write_requests
from tests.harness.scripted import BLOCK, PROPOSALS, make_arms, make_requests, make_unit

RUN = "toy-0123456789ab"


class Quiet:
    """Collects what a run says."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def begin(self, unit: Any, cells: int, done: int) -> None:
        pass

    def cell(self, record: Record) -> None:
        pass

    def note(self, text: str) -> None:
        self.notes.append(text)


def run_toy(
    run_dir: Path,
    engine: Engine,
    *,
    count: int = 6,
    arms: tuple[str, ...] = ("original", "fold"),
    options: Options | None = None,
    run: str = RUN,
    limit: int = 12,
) -> Report:
    """One start of the toy unit in `run_dir`: resumes what is there."""
    with RecordWriter(run_dir, run, PROPOSALS) as writer:
        path = run_dir / "agreement.jsonl"
        log = JsonLines(path)
        judged = [line for _, line in read_lines(path)]
        unit = make_unit(make_requests(count, limit=limit))
        options = options or Options(warmup_tokens=4)
        return run_unit(engine, unit, make_arms(*arms), writer, log, judged, Quiet(), options)


def records(run_dir: Path) -> list[Record]:
    """The counted records: no warm-ups."""
    return [record for record in read_records(run_dir / RECORDS) if not record.warmup]


def agreement(run_dir: Path) -> list[dict[str, Any]]:
    return [line for _, line in read_lines(run_dir / "agreement.jsonl")]


# ------------------------------------------------------------------------------------------- the command, end to end

ROOT = Path(__file__).resolve().parents[2]
DRAFTER = {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "block_size": BLOCK,
    "dflash_config": {"mask_token_id": 60, "target_layer_ids": [1, 2]},
    "num_target_layers": 9,
    "num_hidden_layers": 2,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 512,
    "vocab_size": 61,
}


def toy_pair(folder: Path, count: int = 4) -> list[str]:
    """A target and a drafter that are just their config.json, and a request file: the overrides that point there."""
    for name, config in {"target": {"max_position_embeddings": 8192}, "drafter": DRAFTER}.items():
        (folder / name).mkdir(parents=True)
        (folder / name / "config.json").write_text(json.dumps(config))
    requests = [replace(request, benchmark="demo_code", task="demo_code") for request in make_requests(count)]
    write_requests(request_path(folder / "data", "demo_code", "demo"), requests, {})
    return [
        f"target.source={folder / 'target'}",
        f"drafter.source={folder / 'drafter'}",
        f"drafter.block={BLOCK}",
        "drafter.window=256",
        f"data_dir={folder / 'data'}",
        "benchmark=demo_code",
    ]


def fold_bench(
    *arguments: str, cwd: Path, engine: str = "Scripted", env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run the command in a subprocess with a scripted engine, as a user would, from `cwd`."""
    return subprocess.run(
        [sys.executable, "-m", "tests.harness.fold_bench_scripted", engine, *arguments],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT), **(env or {})},
        capture_output=True,
        text=True,
        timeout=120,
    )
