"""What SLURM says: which of a submission's jobs are queued or running, and how the others ended."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import dataclass

# States of a job that will still do something. REQUEUE_HOLD and the like wait for a person, but are in the queue.
WAITING = {"PENDING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "SPECIAL_EXIT", "RESIZING", "SUSPENDED", "STOPPED"}
RUNNING = {"RUNNING", "CONFIGURING", "COMPLETING", "SIGNALING", "STAGE_OUT"}


class QueueError(RuntimeError):
    """SLURM did not answer. The message is one line."""


@dataclass(frozen=True)
class JobState:
    """state: SLURM's word for it. node: where it runs or ran, "" before. reason: why it waits."""

    state: str
    node: str
    reason: str

    @property
    def alive(self) -> bool:
        return self.state in WAITING or self.state in RUNNING


def available() -> bool:
    """Whether this machine can submit jobs."""
    return shutil.which("sbatch") is not None and shutil.which("srun") is not None


def job_states(job_name: str) -> dict[str, JobState]:
    """State by job id ("12_3" for an array's element) of the jobs of that name that SLURM still remembers.

    Raises QueueError when the controller does not answer: nothing may be concluded from silence.
    """
    format_ = "%i|%T|%N|%r"
    text = _ask(["squeue", "--noheader", "--array", "--states=all", f"--name={job_name}", f"--format={format_}"])
    rows = (line.split("|", 3) for line in text.splitlines() if line.count("|") >= 3)
    return {job.strip(): JobState(state, node, reason) for job, state, node, reason in rows}


def past_states(job_ids: list[str]) -> dict[str, JobState]:
    """How jobs ended that squeue has forgotten, where the cluster keeps accounts; empty elsewhere."""
    main = sorted({job.partition("_")[0] for job in job_ids})
    if not main or shutil.which("sacct") is None:
        return {}
    found: dict[str, JobState] = {}
    for start in range(0, len(main), 200):  # a command line has a limit
        jobs = ",".join(main[start : start + 200])
        try:
            text = _ask(["sacct", "--noheader", "--parsable2", "-X", "-o", "JobID,State,NodeList,ExitCode", "-j", jobs])
        except QueueError:
            return {}
        rows = (line.split("|") for line in text.splitlines() if line.count("|") == 3)
        found |= {job: JobState(state.partition(" ")[0], node, f"exit {code}") for job, state, node, code in rows}
    return found


def max_array_size() -> int:
    """Largest number of tasks in one array. Raises QueueError."""
    found = re.search(r"^MaxArraySize\s*=\s*(\d+)", _ask(["scontrol", "show", "config"]), re.MULTILINE)
    return int(found.group(1)) if found else 1001


def _ask(command: list[str]) -> str:
    try:
        # Durations and states in English, whatever the user's locale.
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, env={**os.environ, "LC_ALL": "C"})
    except (OSError, subprocess.TimeoutExpired) as error:
        raise QueueError(f"{command[0]} did not answer ({error})") from None
    if done.returncode:
        said = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise QueueError(f"{command[0]} failed: {said}")
    return done.stdout
