"""run.json: what was run, with what, on what, and when; written before the first token and completed at the end.

Nothing here may make a run fail: what cannot be found out is recorded as null. The file is always replaced as a whole.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import socket
import subprocess
import sys
from contextlib import suppress
from datetime import UTC, datetime
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from harness.requests import write_atomic

SCHEMA = "fold-bench-run/1"
RUN_FILE = "run.json"
PACKAGES = [
    "fold-bench", "torch", "triton", "transformers", "safetensors", "tokenizers", "huggingface_hub", "numpy",
    "hydra-core", "omegaconf", "vllm", "sglang", "flash-attn", "flashinfer-python",
]  # fmt: skip
# Variables that change what is computed, how fast, or where it is read from.
_RELEVANT = re.compile(
    r"^(FOLD_|CUDA_|NVIDIA_|NCCL_|TORCH|PYTORCH_|TRITON_|VLLM_|SGLANG_|SGL_|HF_|TRANSFORMERS_|TOKENIZERS_|OMP_|MKL_|OPENBLAS_|"
    r"KMP_|GOMP_|DNNL_|ONEDNN_|MALLOC_|LD_PRELOAD$|SLURM_JOB_ID$|SLURM_JOB_NODELIST$|SLURM_RESTART_COUNT$|PYTHONHASHSEED$)"
)
_SECRET = re.compile(r"TOKEN|KEY|SECRET|PASSWORD|PASSWD|CREDENTIAL|AUTH", re.IGNORECASE)
_GPU_FIELDS = [
    "name", "uuid", "driver_version", "vbios_version", "power.limit", "power.default_limit", "power.draw", "clocks.sm",
    "clocks.mem", "clocks.max.sm", "clocks.max.mem", "clocks.applications.graphics", "temperature.gpu",
    "persistence_mode", "ecc.mode.current", "ecc.errors.uncorrected.volatile.total", "mig.mode.current", "memory.total",
    "clocks_throttle_reasons.active",
]  # fmt: skip
PACKAGE_ROOT = Path(__file__).resolve().parents[1]
CODE = ("conf", "harness", "methods", "data_prep", "analysis", "slurm")
# Beside the packages in a copy of them: what code() said where they were copied.
SNAPSHOT = "snapshot.json"


def now() -> str:
    """UTC, ISO 8601, to the millisecond."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def machine() -> dict[str, Any]:
    """What the numbers depend on besides the configuration, as it is now: code, packages, machine, environment."""
    return {
        "time": now(),
        "code": code(),
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "packages": packages(),
        "host": socket.gethostname(),
        "platform": platform.platform(),
        "cpu": cpu(),
        "gpus": gpus(),
        "cuda": _cuda(),
        "environment": environment(),
    }


def load_now() -> dict[str, Any]:
    """The part of :func:`machine` that changes during a run: clocks, heat, throttling, load."""
    return {"time": now(), "gpus": gpus(), "cpu_mhz": _mhz(), "load_average": _load()}


@cache
def code() -> dict[str, Any]:
    """sha256 of all Python and YAML files of the packages; in a checkout also git commit, dirty flag and diff hash."""
    digest = hashlib.sha256()
    for path in sorted(p for name in CODE for p in (PACKAGE_ROOT / name).rglob("*") if p.suffix in (".py", ".yaml")):
        digest.update(f"{path.relative_to(PACKAGE_ROOT)}\0".encode() + path.read_bytes())
    found: dict[str, Any] = {"sha256": digest.hexdigest(), "commit": None, "dirty": None, "diff_sha256": None}
    with suppress(OSError, ValueError):  # a job imports a copy of the code, which says what it was copied from
        return json.loads((PACKAGE_ROOT / SNAPSHOT).read_bytes()) | {"sha256": digest.hexdigest()}
    # A wheel installed below somebody else's repository must not report that repository's commit.
    top = _git("rev-parse", "--show-toplevel")
    if top is not None and Path(top.strip()).resolve() == PACKAGE_ROOT:
        status, diff = _git("status", "--porcelain"), _git("diff", "HEAD")
        found["commit"] = (_git("rev-parse", "HEAD") or "").strip() or None
        found["dirty"] = None if status is None else bool(status.strip())
        found["diff_sha256"] = hashlib.sha256(diff.encode()).hexdigest() if diff else None
    return found


def packages() -> dict[str, str]:
    """Versions of the installed packages that decide results or speed."""
    found = {}
    for name in PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def cpu() -> dict[str, Any]:
    """Model, cores that this process may use, governor, thread settings and memory of this machine."""
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None
    return {
        "model": _cpu_model(),
        "cores": os.cpu_count(),
        "cores_usable": affinity,
        "mhz": _mhz(),
        "governor": _read("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor"),
        "turbo_off": _read("/sys/devices/system/cpu/intel_pstate/no_turbo"),
        "threads": sys.modules["torch"].get_num_threads() if "torch" in sys.modules else None,
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "load_average": _load(),
    }


def cpu_uuid() -> str:
    """A stable id of this machine's CPU for records: the same after a restart, another on another machine."""
    identity = _read("/etc/machine-id") or _read("/var/lib/dbus/machine-id") or socket.gethostname()
    return "cpu-" + hashlib.sha256(f"{identity}\0{_cpu_model()}\0{os.cpu_count()}".encode()).hexdigest()[:16]


def gpus() -> list[dict[str, str]]:
    """One dictionary per GPU that nvidia-smi shows, plus the processes on it; empty without one."""
    names = list(_GPU_FIELDS)
    while names:
        try:
            done = subprocess.run(
                ["nvidia-smi", f"--query-gpu={','.join(names)}", "--format=csv,noheader"],
                capture_output=True,
                text=True,
                timeout=30,
            )
        except (OSError, subprocess.TimeoutExpired):
            return []
        refused = re.search(r'Field "([^"]+)" is not a valid field', done.stdout + done.stderr)
        if refused and refused.group(1) in names:  # fields come and go with driver versions
            names.remove(refused.group(1))
            continue
        if done.returncode:
            return []
        rows = [
            dict(zip(names, (v.strip() for v in line.split(",")), strict=False)) for line in done.stdout.splitlines()
        ]
        busy = _gpu_processes()
        return [row | {"processes": " ".join(busy.get(row.get("uuid", ""), []))} for row in rows if row]
    return []


def environment() -> dict[str, str]:
    """Environment variables that matter, the values of secrets hidden."""
    return {
        name: "(hidden)" if _SECRET.search(name) else value
        for name, value in sorted(os.environ.items())
        if _RELEVANT.match(name)
    }


def folder_facts(source: str, revision: str | None, folder: Path) -> dict[str, Any]:
    """What identifies a checkpoint: where it comes from, the commit it resolved to, and the sha256 of its small files.

    Weights are identified by name, size and, for a Hub snapshot, by the blob's own name, which is its sha256.
    """
    facts: dict[str, Any] = {"source": source, "revision": revision, "commit": None, "files": {}}
    if folder.parent.name == "snapshots":
        facts["commit"] = folder.name
    for path in sorted(folder.iterdir()) if folder.is_dir() else []:
        if not path.is_file():
            continue
        entry: dict[str, Any] = {"bytes": path.stat().st_size}
        if path.is_symlink() and len(path.resolve().name) == 64:
            entry["sha256"] = path.resolve().name
        elif entry["bytes"] < 1 << 28:
            with path.open("rb") as content:
                entry["sha256"] = hashlib.file_digest(content, "sha256").hexdigest()
        facts["files"][path.name] = entry
    return facts


class RunFile:
    """run.json of a run directory. `starts` holds one entry per process that worked on the run."""

    def __init__(self, run_dir: Path, run: str, config: dict[str, Any], config_hash: str, argv: list[str]) -> None:
        self.path = run_dir / RUN_FILE
        self.content: dict[str, Any] = {
            "schema": SCHEMA,
            "run": run,
            "config": config,
            "config_hash": config_hash,
            "requests": {},
            "arms": {},
            "models": {},
            "starts": [],
            "status": "running",
        }
        # A file that is damaged is written anew: records carry the configuration's hash themselves.
        with suppress(FileNotFoundError, ValueError, TypeError, AttributeError, KeyError):
            earlier = json.loads(self.path.read_bytes())
            if earlier.get("schema") == SCHEMA and earlier.get("config_hash") == config_hash:
                kept = {key: earlier[key] | {} for key in ("requests", "arms", "models")}
                self.content |= kept | {"starts": [*earlier["starts"]]}
        self.content["starts"].append({"argv": argv, "pid": os.getpid(), "begin": machine(), "end": None})

    @property
    def start(self) -> dict[str, Any]:
        """This process's own entry."""
        return self.content["starts"][-1]

    def write(self) -> None:
        """Replace the file. Raises RecordError if that is impossible; the earlier one then stays."""
        text = json.dumps(self.content, indent=1, ensure_ascii=False, default=str) + "\n"
        from harness.records import RecordError

        try:
            write_atomic(self.path, text.encode())
        except OSError as error:
            raise RecordError(
                f"{self.path} cannot be written ({error.strerror}); make room and start the same command again"
            ) from None

    def finish(self, status: str, **facts: Any) -> None:
        """Complete this process's entry with `facts` and the machine's state, and set the run's status."""
        self.start["end"] = load_now()
        self.start.update(facts)
        self.content["status"] = status
        self.write()


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", *arguments], cwd=PACKAGE_ROOT, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def _gpu_processes() -> dict[str, list[str]]:
    try:
        done = subprocess.run(
            ["nvidia-smi", "--query-compute-apps=gpu_uuid,pid,used_memory", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=30,
        )
    except (OSError, subprocess.TimeoutExpired):
        return {}
    found: dict[str, list[str]] = {}
    for line in done.stdout.splitlines() if done.returncode == 0 else []:
        uuid, _, rest = line.partition(",")
        found.setdefault(uuid.strip(), []).append(rest.strip().replace(", ", ":"))
    return found


def _cuda() -> str | None:
    torch = sys.modules.get("torch")
    return None if torch is None else torch.version.cuda


def _cpu_model() -> str:
    text = _read("/proc/cpuinfo") or ""
    found = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return found.group(1).strip() if found else platform.processor() or platform.machine()


def _mhz() -> float | None:
    with suppress(Exception):  # some virtual machines have no frequency, and psutil then raises various errors
        import psutil

        frequency = psutil.cpu_freq()
        return frequency.current if frequency else None
    return None


def _load() -> list[float]:
    return [round(value, 2) for value in os.getloadavg()]


def _read(path: str) -> str | None:
    try:
        return Path(path).read_text(encoding="utf-8").strip()
    except OSError:
        return None
