"""fold-submit: plan the units of a configuration, show their cost, and queue (or, slurm=local, run) what is missing.

submitit writes the job arrays and requeues a job that is preempted or runs into its time limit, until the unit is done.
Jobs import a copy of the code, made at the first submit of a folder, so that later edits do not touch them.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from filelock import FileLock, Timeout
from rich.console import Console
from rich.table import Table

from data_prep.demo.target import default_cache_dir
from harness.cli import FAILED as EXIT_FAILED
from harness.cli import INTERRUPTED, MISTAKE, OK, compose_plans
from harness.config import Plan, SlurmConfig, UserError, check, make_arms
from harness.provenance import CODE, PACKAGE_ROOT, SNAPSHOT, code, gpus
from harness.records import JsonLines, RecordError
from harness.requests import load_manifest, request_path, write_atomic
from slurm import queue
from slurm.job import UnitTask
from slurm.status import DONE, FAILED, LOCAL, PENDING, PLANNED, RUNNING, UNKNOWN, UnitState, View
from slurm.units import Submission, Unit, Work, load, merge, plan_work

# A unit goes on from its records, so no number of requeues is too many.
REQUEUES = 10_000
# submitit takes a signal in the last ten minutes of the limit for a time-out, which is all of a limit this short.
SHORTEST_MIN = 10
FLAGS = ("--yes", "--dry-run", "--new-code")

HELP = """fold-submit [--yes] [--dry-run] [--new-code] OVERRIDE...

fold-submit +experiment=table2                        everything a table needs, as SLURM job arrays
fold-submit +model=llama methods=[fold] benchmark=all   a run of fold-bench, cut into units
fold-submit +experiment=demo slurm=local              the same units on this machine, one at a time per visible GPU
fold-submit +experiment=paper slurm.partition=gpu slurm.gres=gpu:h100:1 slurm.account=me

--dry-run  print the plan, the GPU hours and the batch script; submit nothing, download nothing
--yes      submit without asking
--new-code let what is missing run on the code as it is now (fold-collect will say that code was mixed)

The same command again submits only what is missing. Overrides are fold-bench's (fold-bench --help); conf/slurm holds
the options of the cluster. fold-status shows how far it is, fold-collect merges what is done.
Exit code 0: submitted, or nothing to do; 1: units of slurm=local failed; 2: a mistake in the command."""


def main() -> int:
    """Submit, and return the exit code."""
    try:
        return _main(sys.argv[1:])
    except (UserError, RecordError) as error:
        print(f"fold-submit: {' '.join(str(error).split())}", file=sys.stderr)
        return MISTAKE
    except KeyboardInterrupt:
        print("fold-submit: interrupted; the same command goes on", file=sys.stderr)
        return INTERRUPTED


def _main(arguments: list[str]) -> int:
    if any(text in ("-h", "--help") for text in arguments):
        print(HELP)
        return OK
    flags = {text for text in arguments if text in FLAGS}
    overrides = [text for text in arguments if text not in FLAGS]
    if wrong := next((text for text in overrides if text.startswith("-") and text not in ("-m", "--multirun")), None):
        raise UserError(f"unknown option {wrong}; fold-submit --help shows how to call it")
    dry = "--dry-run" in flags
    plans = compose_plans(overrides) or []
    slurm = plans[0].config.slurm
    _check_slurm(slurm, dry)
    plans = [_absolute(plan) for plan in plans]
    merged = merge(plans)
    if dry:
        for plan in merged:
            make_arms(plan.arms)
        works = tuple(plan_work(plan, slurm, _count(plan)) for plan in merged)
        submission = Submission(_folder(plans, overrides), works, "")
        _print_plan(submission, slurm)
        return OK
    for plan in merged:
        check(plan, here=slurm.local)
    return _submit(plans, merged, overrides, slurm, flags)


def _submit(plans: list[Plan], merged: list[Plan], overrides: list[str], slurm: SlurmConfig, flags: set[str]) -> int:
    folder = _folder(plans, overrides)
    with _only_submit(folder):
        works = _works(folder, merged, slurm)
        submission = _opened(folder, works, "--new-code" in flags)
        view = View(submission, ask=not slurm.local)
        states = view.read()
        if view.silent:
            raise UserError(
                f"what is queued already cannot be known ({view.silent}); try again when SLURM answers, or "
                "add slurm=local to run the units here"
            )
        if view.strangers:
            raise UserError(
                f"an interrupted fold-submit left jobs that nothing knows: scancel {' '.join(view.strangers[:20])}"
            )
        todo = [state.unit for state in states if state.state in (PLANNED, FAILED)]
        _print_plan(submission, slurm, states)
        if not todo:
            print("nothing to submit: every unit is done, running or waiting")
            return OK
        if "--yes" not in flags and not _agreed(len(todo), sum(_hours(unit) for unit in todo)):
            print("nothing submitted")
            return OK
        if slurm.local:
            return _run_here(submission, todo, slurm)
        _queue(submission, todo, slurm)
    print(f"submitted {len(todo)} units; fold-status {_shown(folder)} shows how far they are")
    return OK


# ----------------------------------------------------------------------------------------------------------- before it


def _check_slurm(slurm: SlurmConfig, dry: bool) -> None:
    if slurm.shards is not None and slurm.shards < 1:
        raise UserError(f"slurm.shards={slurm.shards}: must be at least 1")
    if not slurm.unit_hours > 0:
        raise UserError(f"slurm.unit_hours={slurm.unit_hours}: must be above 0")
    if slurm.local:
        return
    for key in ("parallel", "signal_delay_s"):
        if getattr(slurm, key) < 1:
            raise UserError(f"slurm.{key}={getattr(slurm, key)}: must be at least 1")
    if slurm.time_min <= SHORTEST_MIN:
        raise UserError(
            f"slurm.time_min={slurm.time_min}: must be above {SHORTEST_MIN}, since submitit takes any signal in the "
            "last ten minutes of a job for a time-out"
        )
    if slurm.signal_delay_s >= 60 * slurm.time_min:
        raise UserError(f"slurm.signal_delay_s={slurm.signal_delay_s}: must be below the time limit")
    if not dry and not queue.available():
        raise UserError(
            "there is no SLURM on this machine (sbatch or srun is not on the PATH); add slurm=local to run the same "
            "units here"
        )


def _absolute(plan: Plan) -> Plan:
    """The plan with folders that mean the same wherever a job starts, in its overrides too."""
    config = plan.config
    data = Path(config.data_dir).expanduser().absolute() if config.data_dir else default_cache_dir() / "requests"
    source = str(Path(config.source_dir).expanduser().absolute()) if config.source_dir else None
    folders = {"data_dir": str(data)} | ({"source_dir": source} if source else {})
    more = [f"{key}={_quoted(value)}" for key, value in folders.items()]
    overrides = [text for text in plan.overrides if text.partition("=")[0].lstrip("+") not in folders]
    config = replace(config, data_dir=str(data), source_dir=source)
    return replace(plan, config=config, overrides=(*overrides, *more))


def _quoted(value: str) -> str:
    """A value as Hydra's grammar wants it, whatever characters a path has."""
    return "'" + value.replace("\\", "\\\\").replace("'", "\\'") + "'"


def _folder(plans: Sequence[Plan], overrides: Sequence[str]) -> Path:
    """Where the submission lives: run_dir=, else results/runs/<experiment or run>-<hash of all plans>."""
    if chosen := plans[0].config.run_dir:
        return Path(chosen).expanduser().absolute()
    named = next((m.group(1) for text in overrides if (m := re.match(r"\+?experiment=(\w+)$", text))), None)
    if named is None and len(plans) == 1:
        return Path("results", "runs", f"{plans[0].run}-units").absolute()
    digest = hashlib.sha256("".join(sorted(plan.hash for plan in plans)).encode()).hexdigest()[:8]
    return Path("results", "runs", f"{named or 'sweep'}-{digest}-units").absolute()


def _count(plan: Plan) -> int | None:
    """Requests of the plan's benchmark if its file is there, else None."""
    (benchmark,) = plan.benchmarks
    path = request_path(Path(str(plan.config.data_dir)), benchmark.name, plan.config.target.name)
    try:
        return int(load_manifest(path)["count"])
    except (ValueError, KeyError, OSError):
        return None


def _works(folder: Path, merged: list[Plan], slurm: SlurmConfig) -> tuple[Work, ...]:
    """The frozen plan of the folder, or a new one; request files are prepared, so that no job has to."""
    if (folder / "submission.json").exists():
        works = load(folder).works
        if {work.hash for work in works} != {plan.hash for plan in merged}:
            raise UserError(f"{folder} was planned for another configuration; use another run_dir=")
        if slurm.shards is not None and any(work.shards != min(slurm.shards, work.requests) for work in works):
            raise UserError(f"{folder} was planned with other slurm.shards; leave them out or use another run_dir=")
        return works
    from harness.run import prepare

    works_: list[Work] = []
    for plan in merged:
        job = prepare(replace(plan, config=replace(plan.config, run_dir=str(folder))))
        works_.append(plan_work(plan, slurm, sum(unit.count for unit in job.units)))
    return tuple(works_)


@contextmanager
def _only_submit(folder: Path) -> Iterator[None]:
    """One fold-submit per folder at a time: a second one would queue the same units again."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / ".submit.lock", timeout=0):
            yield
    except Timeout:
        raise UserError(f"another fold-submit works on {folder}; wait for it") from None
    except OSError as error:
        raise UserError(f"{error.filename or folder}: {error.strerror or error}; choose another run_dir=") from None


def _opened(folder: Path, works: tuple[Work, ...], new_code: bool) -> Submission:
    """The submission on disk with a copy of the code that its jobs import."""
    name = code()["sha256"][:12]
    known = load(folder).code if (folder / "submission.json").exists() else ""
    if known and known != name and not new_code:
        print("note: the code has changed since the first submit; the rest runs on that copy (--new-code: on this one)")
        name = known
    copy = folder / "code" / name
    if not copy.exists():
        partial = folder / "code" / f".{name}.partial"
        shutil.rmtree(partial, ignore_errors=True)
        for package in CODE:
            source = PACKAGE_ROOT / package
            if source.is_dir():
                shutil.copytree(source, partial / package, ignore=shutil.ignore_patterns("__pycache__"))
        write_atomic(partial / SNAPSHOT, (json.dumps(code()) + "\n").encode())
        partial.rename(copy)
    submission = Submission(folder, works, name)
    submission.save()
    return submission


def _agreed(units: int, hours: float) -> bool:
    if not sys.stdin.isatty():
        raise UserError("nobody can be asked here: give --yes to submit, or --dry-run to see the plan only")
    return input(f"submit {units} units, about {hours:.1f} GPU hours? [y/N] ").strip().lower() in ("y", "yes")


# --------------------------------------------------------------------------------------------------------- in the queue


def sbatch_parameters(submission: Submission, slurm: SlurmConfig, units: int, chunks: int = 1) -> dict[str, Any]:
    """What submitit's SlurmExecutor is given; `chunks` arrays share the limit of jobs at a time."""
    parameters: dict[str, Any] = {
        "job_name": submission.job_name,
        "time": slurm.time_min,
        "nodes": 1,
        "ntasks_per_node": 1,
        "signal_delay_s": slurm.signal_delay_s,
        "array_parallelism": max(1, slurm.parallel // chunks),
        "stderr_to_stdout": True,
        "setup": _setup(submission, slurm),
        # Steps inherit no CPUs of the job (SLURM 22.05), and a binding to one core must not reach the engine's threads.
        "srun_args": ["--cpu-bind=none", *slurm.srun],
        "additional_parameters": {"requeue": True, **slurm.sbatch},
    }
    for key in ("partition", "account", "qos", "constraint", "gres", "cpus_per_task", "mem"):
        if (value := getattr(slurm, key)) is not None:
            parameters[key] = value
    if slurm.exclusive:
        parameters["exclusive"] = True
    return parameters


def _setup(submission: Submission, slurm: SlurmConfig) -> list[str]:
    copy = submission.folder / "code" / submission.code
    lines = [*slurm.setup, 'export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"' if slurm.cpus_per_task else ""]
    lines += [f'export {name}="{value}"' for name, value in slurm.env.items()]
    # What the user's own PYTHONPATH adds comes after the copy, so that it cannot put other code in its place.
    lines.append(f'export PYTHONPATH={shlex.quote(str(copy))}"${{PYTHONPATH:+:$PYTHONPATH}}"')
    return [line for line in lines if line]


def _queue(submission: Submission, units: list[Unit], slurm: SlurmConfig) -> None:
    """Submit the units as arrays no longer than the cluster allows, and write down which job has which unit."""
    import submitit

    try:
        size = queue.max_array_size()
    except queue.QueueError as error:
        raise UserError(f"{error}; nothing was submitted") from None
    chunks = [units[start : start + size] for start in range(0, len(units), size)]
    executor = submitit.SlurmExecutor(submission.folder / "jobs", max_num_timeout=REQUEUES, python=slurm.python)
    executor.update_parameters(**sbatch_parameters(submission, slurm, len(units), len(chunks)))
    log = JsonLines(submission.folder / "jobs.jsonl")
    done = 0
    try:
        for chunk in chunks:
            names = [unit.id for unit in chunk]
            jobs = executor.map_array(UnitTask(), [str(submission.folder)] * len(names), names)
            log.append({"jobs": {name: job.job_id for name, job in zip(names, jobs, strict=True)}})
            done += len(chunk)
    except submitit.core.utils.FailedJobError as error:
        said = [line for line in str(error).splitlines() if "error" in line.lower()] or str(error).splitlines()
        raise UserError(f"sbatch refused after {done} of {len(units)} units: {said[-1] if said else error}") from None
    finally:
        log.close()


# ------------------------------------------------------------------------------------------------------ on this machine


def _run_here(submission: Submission, units: list[Unit], slurm: SlurmConfig) -> int:
    """Run the units in processes of their own, one at a time per visible GPU; 1 if any failed."""
    (submission.folder / "jobs").mkdir(exist_ok=True)
    waiting: SimpleQueue[Unit] = SimpleQueue()
    for unit in units:
        waiting.put(unit)
    failed: list[str] = []
    stopped = threading.Event()
    processes: dict[int, subprocess.Popen[bytes]] = {}

    def work(place: int, device: dict[str, str]) -> None:
        while not stopped.is_set():
            try:
                unit = waiting.get_nowait()
            except Empty:
                return
            with (submission.folder / "jobs" / f"{unit.id}.log").open("ab") as output:
                processes[place] = process = subprocess.Popen(
                    [slurm.python or sys.executable, "-m", "slurm.job", str(submission.folder), unit.id],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    env=_environment(submission, slurm) | device,
                )
                ended = process.wait()
            if ended:
                failed.append(unit.id)
            told = f"FAILED (exit code {ended}), see {output.name}" if ended else "done"
            print(f"{unit.id}: {told}", flush=True)

    log = JsonLines(submission.folder / "jobs.jsonl")
    log.append({"jobs": {unit.id: LOCAL for unit in units}})
    log.close()
    threads = [threading.Thread(target=work, args=each, daemon=True) for each in enumerate(visible_devices())]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        stopped.set()
        for process in processes.values():
            if process.poll() is None:
                process.terminate()
    print(f"{len(units) - len(failed)} of {len(units)} units done; fold-status {_shown(submission.folder)} shows more")
    return EXIT_FAILED if failed else OK


def visible_devices() -> list[dict[str, str]]:
    """The environment that shows a process one GPU, for each GPU visible here; one empty one on a machine without."""
    if (chosen := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        names = [name.strip() for name in chosen.split(",") if name.strip()]
    else:
        names = [gpu["uuid"] for gpu in gpus() if gpu.get("uuid")]
    return [{"CUDA_VISIBLE_DEVICES": name} for name in names] or [{}]


def _environment(submission: Submission, slurm: SlurmConfig) -> dict[str, str]:
    copy = submission.folder / "code" / submission.code
    path = os.pathsep.join([str(copy), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, **{name: os.path.expandvars(value) for name, value in slurm.env.items()}, "PYTHONPATH": path}


# ------------------------------------------------------------------------------------------------------------- printing


def _hours(unit: Unit) -> float:
    return unit.work.hours * unit.requests / max(unit.work.requests, 1)


def _print_plan(submission: Submission, slurm: SlurmConfig, states: Sequence[UnitState] = ()) -> None:
    console = Console()
    table = Table(title="units, at most one GPU each; GPU hours are estimates (slurm/estimate.py)")
    for name in ("pair", "engine", "benchmark", "arms"):
        table.add_column(name)
    for name in ("requests", "units", "GPU hours"):
        table.add_column(name, justify="right")
    for work in submission.works:
        arms = " ".join([*work.arms, work.options]).strip()
        cells = [work.pair, work.engine, work.benchmark, arms, str(work.requests), str(work.shards)]
        table.add_row(*cells, f"{work.hours:.1f}")
    console.print(table)
    hours, requests = sum(work.hours for work in submission.works), sum(work.requests for work in submission.works)
    console.print(f"{len(submission.units)} units, {requests} requests, about {hours:.1f} GPU hours", highlight=False)
    console.print(f"folder: {submission.folder}", highlight=False, soft_wrap=True)
    if states:
        counts = {name: sum(s.state == name for s in states) for name in (DONE, RUNNING, PENDING, FAILED, UNKNOWN)}
        told = ", ".join(f"{count} {name}" for name, count in counts.items() if count)
        console.print(f"of them {told or 'none submitted yet'}", highlight=False)
    elif not slurm.local:
        from submitit.slurm.slurm import _make_sbatch_string

        units = len(submission.units)
        size = math.inf
        if queue.available():
            try:
                size = queue.max_array_size()
            except queue.QueueError as error:
                console.print(f"note: {error}", highlight=False)
        chunks = max(1, math.ceil(units / size)) if size != math.inf else 1
        count = int(min(units, size))
        parameters = sbatch_parameters(replace(submission, code="<copy of the code>"), slurm, units, chunks)
        command = f"{slurm.python or sys.executable} -u -m submitit.core._submit {submission.folder / 'jobs'}"
        script = _make_sbatch_string(command=command, folder=submission.folder / "jobs", map_count=count, **parameters)
        console.print(f"{chunks} job arrays of at most {count} units, each submitted as", highlight=False)
        print(script)


def _shown(folder: Path) -> str:
    """A folder as short as it can be typed from here."""
    return str(folder.relative_to(Path.cwd())) if folder.is_relative_to(Path.cwd()) else str(folder)
