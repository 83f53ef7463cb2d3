"""Scripted records with known answers, written as fold-bench writes them."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from harness.records import Record


def record(
    request: str,
    method: str = "ar",
    *,
    commits: list[int] | None = None,
    tpot_ms: float = 10.0,
    n_out: int | None = None,
    **changes: Any,
) -> dict[str, Any]:
    """One record. An autoregressive one commits one token a round; `n_out` fixes its length (default 13)."""
    if commits is None:
        commits = [1] * ((n_out or 13) - 1)
    total = 1 + sum(commits)
    base = Record(
        run="run0",
        unit="demo/reference/demo_code/0of1",
        order=0,
        request_id=request,
        benchmark="demo_code",
        task="demo_code",
        prompt_tokens=1000,
        prompt_sha256="0" * 64,
        method=method,
        engine="reference",
        device_uuid="cpu-0",
        host="h",
        started_at="2026-11-29T23:14:48+00:00",
        output_ids=[place % 10 for place in range(total)],
        finish="length",
        n_first=1,
        commits=commits,
        proposals=[] if method.startswith("ar") else [9] * len(commits),
        prefill_s=0.5,
        first_token_s=100.0,
        last_token_s=100.0 + tpot_ms / 1e3 * sum(commits),
    )
    return {**asdict(base), **changes}


def write_run(folder: Path, records: list[dict[str, Any]], run: dict[str, Any] | None = None) -> Path:
    """A run directory with these records."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "records.jsonl").write_text("".join(json.dumps(line) + "\n" for line in records))
    (folder / "run.json").write_text(json.dumps(run or {}))
    return folder
