"""What a submission consists of: works (one pair, engine and benchmark with its arms) cut into units (shards).

A submission is a folder: submission.json (the plan, frozen at the first submit), code/<sha> (the code that its jobs
import), units/<unit> (one run directory per unit, as fold-bench writes it), jobs.jsonl (which job has which unit),
jobs/ (submitit's files and the jobs' output). A unit's run directory has one writer by its own lock, and analysis reads
units/ like any folder of runs.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path

from harness.bench import arms_of
from harness.config import Plan, SlurmConfig, UserError
from harness.records import AR
from harness.requests import write_atomic
from slurm import estimate

SCHEMA = "fold-bench-submission/1"


@dataclass(frozen=True)
class Work:
    """One benchmark of one pair in one engine, by all arms that are wanted of it.

    run, hash: id and configuration hash of its runs (all shards are one run). overrides: what fold-bench composes it
    from. arms: AR included. requests: of the request file, or estimated. shards: how many units. hours: estimated GPU
    hours of all units together.
    """

    run: str
    hash: str
    pair: str
    engine: str
    benchmark: str
    arms: tuple[str, ...]
    overrides: tuple[str, ...]
    requests: int
    shards: int
    hours: float

    @property
    def options(self) -> str:
        """The method options of its command line ("alpha=4"), which tell it from works of the same arms."""
        found = (re.match(r"[+~]*method\.(.+)", text) for text in self.overrides)
        return " ".join(match[1] for match in found if match)


@dataclass(frozen=True)
class Unit:
    """One shard of a work: what one job does."""

    work: Work
    shard: int

    @property
    def id(self) -> str:
        """Name of the unit and of its run directory."""
        return f"{self.work.run}-{self.shard}of{self.work.shards}"

    @property
    def requests(self) -> int:
        return len(range(self.shard, self.work.requests, self.work.shards))


@dataclass(frozen=True)
class Submission:
    """The frozen plan in its folder. code: name of the snapshot below code/ that jobs of the next submit import."""

    folder: Path
    works: tuple[Work, ...]
    code: str

    @cached_property
    def units(self) -> dict[str, Unit]:
        """All units by id, in the order of the plan."""
        return {unit.id: unit for work in self.works for unit in (Unit(work, shard) for shard in range(work.shards))}

    @property
    def job_name(self) -> str:
        """The same for all jobs of this folder and for no other's: how the queue is asked for them."""
        return f"fold-{hashlib.sha256(str(self.folder).encode()).hexdigest()[:10]}"

    def run_dir(self, unit: Unit) -> Path:
        return self.folder / "units" / unit.id

    def save(self) -> None:
        value = {"schema": SCHEMA, "code": self.code, "works": [asdict(work) for work in self.works]}
        write_atomic(self.folder / "submission.json", (json.dumps(value, indent=1) + "\n").encode())


def load(folder: Path) -> Submission:
    """Read a submission. Raises UserError if `folder` is none."""
    try:
        value = json.loads((folder / "submission.json").read_bytes())
        if value["schema"] != SCHEMA:
            raise ValueError(f"schema {value['schema']!r}")
        works = tuple(Work(**w | {name: tuple(w[name]) for name in ("arms", "overrides")}) for w in value["works"])
        return Submission(folder.absolute(), works, value["code"])
    except FileNotFoundError:
        raise UserError(f"{folder} is no submission of fold-submit (no submission.json in it)") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{folder / 'submission.json'} is damaged ({error}); restore it") from None


# ------------------------------------------------------------------------------------------------------------ planning


@dataclass
class _Draft:
    """A work in the making. options: the method options of its command line, which hold for all its arms."""

    plan: Plan
    options: tuple[str, ...]


def merge(plans: Iterable[Plan]) -> list[Plan]:
    """One plan per benchmark and pair with the arms that any of `plans` wants of it, each arm once.

    Table 4's arms on LCA are among Table 2's, so that everything is less than the sum of the tables. Arms with
    options from the command line (Table 5's α) stay in a run of their own, since such an option holds for a whole run.
    """
    drafts: dict[str, list[_Draft]] = {}
    for plan in plans:
        options = tuple(sorted(text for text in plan.overrides if re.match(r"[+~]*method\.", text)))
        for benchmark in plan.benchmarks:
            mine = replace(plan, config=replace(plan.config, benchmark=benchmark), benchmarks=(benchmark,))
            of_base = drafts.setdefault(json.dumps(replace(mine, arms=()).resolved(), sort_keys=True), [])
            if len({arm.name for arm in plan.arms}) < len(plan.arms):  # an A/A control is a run of its own
                of_base.append(_Draft(mine, ("repeated",)))
                continue
            measured = [arm for draft in of_base for arm in draft.plan.arms]
            new = [arm for arm in plan.arms if arm.name != AR and arm not in measured]
            home = next((draft for draft in of_base if draft.options == options), None)
            if home is not None:
                home.plan = replace(home.plan, arms=(*home.plan.arms, *new))
            elif new or not of_base:
                of_base.append(_Draft(replace(mine, arms=tuple(new) or plan.arms), options))
    return [_finished(draft.plan) for of_base in drafts.values() for draft in of_base]


def _finished(plan: Plan) -> Plan:
    """The plan with overrides that compose exactly it: one benchmark, its arms by name."""
    kept = [text for text in plan.overrides if not re.match(r"[+~]*(method|methods|benchmark|slurm|run_dir)[=@]", text)]
    kept = [text for text in kept if not re.match(r"[+~]*slurm\.", text)]
    names = ",".join(arm.name for arm in plan.arms)
    # Hydra takes groups before the options inside them only if they come in this order.
    chosen = [f"benchmark={plan.config.benchmark.name}", f"methods=[{names}]"]
    return replace(plan, overrides=(*chosen, *kept), config=replace(plan.config, method={}))


def plan_work(plan: Plan, slurm: SlurmConfig, requests: int | None) -> Work:
    """Cut a merged plan into shards. requests: of its request file; None: estimated."""
    (benchmark,) = plan.benchmarks
    count = requests if requests is not None else estimate.request_count(plan, benchmark)
    hours = estimate.hours(plan, benchmark)
    wanted = slurm.shards if slurm.shards is not None else math.ceil(hours / slurm.unit_hours)
    shards = max(1, min(wanted, count))
    return Work(
        run=plan.run,
        hash=plan.hash,
        pair=plan.config.drafter.name,
        engine=plan.config.engine.name,
        benchmark=benchmark.name,
        arms=tuple(arm.name for arm in arms_of([(arm.name, None, arm.options) for arm in plan.arms])),
        overrides=plan.overrides,
        requests=count,
        shards=shards,
        hours=round(hours + shards * estimate.start_hours(plan), 4),
    )
