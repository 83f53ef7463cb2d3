"""The schema of conf/slurm/*.yaml. harness/config.py embeds it, so an unknown or ill-typed key is refused there."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Optional


@dataclass
class SlurmConfig:
    """Where units run and how; nothing here changes what is measured.

    local: run the units on this machine, one at a time per visible GPU, instead of queueing them. shards: parts of each
    request file; null: as many as make a unit about `unit_hours` long. time_min: the job's limit in minutes, above 10.
    signal_delay_s: how long before the limit a job is told to save and requeue itself. parallel: jobs of one submission
    that run at the same time. gres, partition, account, qos, constraint, cpus_per_task, mem, exclusive: as sbatch knows
    them. sbatch: further options of sbatch. srun: further arguments of srun, for example a container's. setup: shell
    lines before the job, for example "module load cuda". env: variables of the job; $NAMES in them are expanded there.
    python: the interpreter, if it is not this one's path (in a container).
    """

    local: bool = False
    shards: Optional[int] = None  # noqa: UP045 (omegaconf 2.3 reads the schema and wants typing.Optional)
    unit_hours: float = 2.0
    time_min: int = 240
    signal_delay_s: int = 180
    parallel: int = 64
    partition: Optional[str] = None  # noqa: UP045
    account: Optional[str] = None  # noqa: UP045
    qos: Optional[str] = None  # noqa: UP045
    constraint: Optional[str] = None  # noqa: UP045
    gres: Optional[str] = None  # noqa: UP045
    cpus_per_task: Optional[int] = None  # noqa: UP045
    mem: Optional[str] = None  # noqa: UP045
    exclusive: bool = False
    sbatch: dict[str, Any] = field(default_factory=dict)
    srun: list[str] = field(default_factory=list)
    setup: list[str] = field(default_factory=list)
    env: dict[str, str] = field(default_factory=dict)
    python: Optional[str] = None  # noqa: UP045
