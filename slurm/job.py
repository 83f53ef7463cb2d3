"""One unit in one process: what a SLURM job runs and what `slurm=local` starts, the same call in both.

It is fold-bench on the unit's overrides, one shard of its request file, in the unit's run directory, so a start of a
unit that was stopped continues it.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import submitit

from harness.cli import compose_plans
from harness.config import UserError, check
from slurm.units import load


class UnitFailedError(RuntimeError):
    """A unit ended with failed, missing or unconfirmed cells: the job must not look completed to SLURM."""


class UnitTask(submitit.helpers.Checkpointable):
    """What submitit pickles. Its checkpoint is the same call again: everything else is in the records."""

    def __call__(self, submission: str, unit: str) -> None:
        """Run a unit to its end. Raises UnitFailedError, or UserError where this machine cannot run it."""
        if run_unit(Path(submission), unit):
            raise UnitFailedError(f"{unit} has failed, missing or unconfirmed cells; its output above names them")


def run_unit(submission: Path, name: str) -> int:
    """Run or continue one unit of a submission; 0 if every cell is measured and confirmed, else 1."""
    plan = load(submission)
    unit = plan.units[name]
    (composed,) = compose_plans(list(unit.work.overrides)) or []
    if composed.hash != unit.work.hash:
        raise UserError(
            f"{unit.work.run} no longer composes to the configuration that was planned: the code of this submission "
            "has changed; use another run_dir="
        )
    config = replace(composed.config, run_dir=str(plan.run_dir(unit)))
    mine = replace(composed, config=config, shard=(unit.shard, unit.work.shards))
    check(mine)
    # Importing torch takes seconds, which a mistake in the configuration need not wait for.
    from harness.run import execute, prepare

    return execute(prepare(mine), unit.work.overrides)


def main() -> int:
    """python -m slurm.job SUBMISSION UNIT"""
    try:
        return run_unit(Path(sys.argv[1]), sys.argv[2])
    except UserError as error:
        print(f"fold-submit: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
