"""A toy submission and a fake queue, shared by the tests of slurm/."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from harness.requests import request_path, write_requests
from slurm.status import View
from slurm.units import load
from tests.harness.helpers import toy_pair
from tests.harness.scripted import make_requests

ROOT = Path(__file__).resolve().parents[2]


def toy(folder: Path, count: int = 6, benchmarks: tuple[str, ...] = ("demo_code",)) -> list[str]:
    """Overrides of a run on a toy pair (tests/harness/helpers.py) with a request file per benchmark."""
    overrides = [text for text in toy_pair(folder, count) if not text.startswith("benchmark=")]
    data = folder / "data"
    for name in benchmarks:
        if name != "demo_code":
            requests = [replace(each, benchmark=name, task=name) for each in make_requests(count)]
            write_requests(request_path(data, name, "demo"), requests, {})
    parts = ",".join(f"['benchmark={name}']" for name in benchmarks)
    return [*overrides, f"parts=[{parts}]"]


def hooked(folder: Path, **options: Any) -> dict[str, str]:
    """Environment in which a job decodes with a scripted engine of these options; see hook.py."""
    hooks, settings = folder / "hooks", folder / "scripted.json"
    hooks.mkdir(parents=True, exist_ok=True)
    (hooks / "sitecustomize.py").write_text(
        (Path(__file__).parent / "hook.py")
        .read_text()
        .replace("Path(__file__).resolve().parents[2]", f"Path({str(ROOT)!r})")
    )
    settings.write_text(json.dumps(options))
    return {"PYTHONPATH": str(hooks), "FOLD_SCRIPTED": str(settings)}


def command(name: str, *arguments: str, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """fold-submit, fold-status or fold-collect in a process of its own."""
    code = f"import sys; from slurm.{name} import main; sys.exit(main())"
    path = os.pathsep.join(filter(None, [str(ROOT), env.pop("PYTHONPATH", ""), os.environ.get("PYTHONPATH")]))
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": path, "COLUMNS": "200", **env},
        capture_output=True,
        text=True,
        timeout=300,
    )


def states(folder: Path) -> dict[str, str]:
    """State by unit."""
    return {state.unit.id: state.state for state in View(load(folder)).read()}


def wait_for(condition: Any, seconds: float = 60) -> None:
    """Wait until `condition()` holds; an AssertionError says that it did not."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.2)
