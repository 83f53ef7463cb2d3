"""fold-bench: compose, check, prepare, run, report.

Hydra composes the configurations, several of them with -m. They are only collected while Hydra runs; every one of
them is checked before the first one starts, so a mistake in the last combination of a sweep costs nothing. Hydra
keeps its folders to itself: what a run leaves behind is in its run directory.
"""

from __future__ import annotations

import io
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError  # type: ignore[import-untyped]

from harness.config import Plan, UserError, check, expand, resolve, unknown_option

# Hydra's options that print something and run nothing.
_INFORMS = re.compile(r"(-h|--help|--hydra-help|--version|-c|--cfg|-i|--info|-sc|--shell-completion)")

OK, FAILED, MISTAKE, INTERRUPTED = 0, 1, 2, 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run fold-bench and return its exit code: 0 all measured, 1 something failed or is missing, 2 a user mistake."""
    try:
        return _main(list(sys.argv[1:] if arguments is None else arguments))
    except UserError as error:
        return _stop(str(error), MISTAKE)
    except KeyboardInterrupt:
        return _stop("interrupted; the same command continues the run", INTERRUPTED)


def _main(arguments: list[str]) -> int:
    if any(re.match(r"[+~]*slurm[=.@]", text) for text in arguments):
        raise UserError("slurm= is an option of fold-submit, which runs the same units as jobs; fold-bench runs here")
    if any(text.startswith("hydra/launcher=") and text != "hydra/launcher=basic" for text in arguments):
        return _launch(arguments)
    plans = compose_plans(arguments)
    if plans is None:
        if _prints_configuration(arguments):
            from harness.memory import memory_lines

            chosen = [text.partition("=")[2] for text in arguments if re.match(r"[+]*(model|drafter)=", text)]
            print("\n".join(memory_lines(chosen[-1] if chosen else None)))
        return OK
    for plan in plans:
        check(plan)
    # Importing torch and transformers takes seconds, which --help and a mistyped option need not wait for.
    from harness.run import execute, prepare

    jobs = [prepare(plan) for plan in plans]
    return max(execute(job, arguments) for job in jobs)


def _launch(arguments: list[str]) -> int:
    """A sweep whose runs another launcher of Hydra starts (hydra/launcher=submitit_slurm), each in a job of its own.

    Every combination is checked before the launcher gets it, except for what only the job's machine can tell.
    """
    for plan in compose_plans([text for text in arguments if not re.match(r"[+~]*hydra[/.]", text)]) or []:
        check(plan, here=False)
    if not any(text in ("-m", "--multirun") for text in arguments):
        raise UserError("a launcher starts the runs of a sweep: add -m")
    print("note: this command waits until the launcher's jobs end; fold-submit does not", file=sys.stderr)
    try:
        _hydra(arguments, run_job)
    except RuntimeError as error:  # submitit's errors for jobs that failed or vanished
        said = [line.strip() for line in str(error).splitlines() if re.match(r"\s*[\w.]+(Error|Exception):", line)]
        print(f"FAILED {said[-1] if said else str(error).splitlines()[0]}", file=sys.stderr)
        return FAILED
    return OK


def run_job(cfg: DictConfig) -> None:
    """What a launcher calls in a job: the runs of one combination. Raises if one ends with anything but 0."""
    overrides = [str(text) for text in HydraConfig.get().overrides.task]
    plans = [resolve(each, its, _compose, _note) for each, its in expand(cfg, overrides, _compose)]
    for plan in plans:
        check(plan)
    from harness.run import execute, prepare

    if max(execute(prepare(plan), overrides) for plan in plans):
        raise RuntimeError(f"{' '.join(overrides)}: failed, missing or unconfirmed cells; the job's output names them")


def _prints_configuration(arguments: Sequence[str]) -> bool:
    """Whether the whole job configuration was asked for, not a part of it (-p) and not Hydra's."""
    words = " ".join(arguments)
    whole = re.search(r"(^| )(--cfg|-c)[ =](job|all)( |$)", words) is not None
    return whole and not any(text in ("-p", "--package") or text.startswith("--package=") for text in arguments)


def _stop(text: str, code: int) -> int:
    print(f"fold-bench: {' '.join(text.split())}", file=sys.stderr)
    return code


# ------------------------------------------------------------------------------------------------------- Hydra's part


def compose_plans(arguments: list[str]) -> list[Plan] | None:
    """The plans that a command line stands for, equal ones once; None if it only asked for information (--cfg, --help).

    Raises UserError for whatever Hydra or the schema refuse.
    """
    plans: list[Plan] = []
    troubles: list[UserError] = []
    sweep = any(text in ("-m", "--multirun") for text in arguments)

    def collect(cfg: DictConfig) -> None:
        overrides = [str(text) for text in HydraConfig.get().overrides.task]
        try:
            runs = expand(cfg, overrides, _compose)
            if not runs:
                raise UserError("the experiment has no part of that model")
            plans.extend(resolve(each, its, _compose, _note if sweep else None) for each, its in runs)
        except UserError as error:
            troubles.append(UserError(f"{' '.join(overrides)}: {error}") if sweep else error)

    _hydra(arguments, collect)
    if troubles:
        raise troubles[0]
    if not plans:
        if any(_INFORMS.match(text) for text in arguments):
            return None
        raise UserError("no run came out of this command")
    return list({plan.hash: plan for plan in plans}.values())


def _hydra(arguments: list[str], task: Callable[[DictConfig], None]) -> None:
    """Let Hydra call `task` with every configuration that `arguments` stand for. Raises UserError."""
    with _hydra_as_library(arguments) as full, _one_line_errors():
        before, sys.argv = sys.argv, ["fold-bench", *full]
        try:
            hydra.main(version_base="1.3", config_path="pkg://conf", config_name="config")(task)()
        finally:
            sys.argv = before


def _compose(overrides: list[str]) -> DictConfig:
    return hydra.compose("config", overrides=overrides)


def _note(text: str) -> None:
    print(f"note: {text}", file=sys.stderr)


@contextmanager
def _hydra_as_library(arguments: list[str]) -> Iterator[list[str]]:
    """Arguments for Hydra, with what users mean spelled the way it wants, and its sweep folder out of the way."""
    launched = any(text.startswith("hydra/launcher=") for text in arguments)
    for text in arguments:
        if re.match(r"[+~]*hydra\.(run|sweep)\.", text) and not launched:
            raise UserError(f"{text} has no effect here: give run_dir= to say where a run is written")
    # `model` and `experiment` are not in the defaults list, so that a run without one is the demo; the plus is easily
    # forgotten.
    full = [re.sub(r"^(model|experiment)=", r"+\1=", text) for text in arguments]
    # An option that only some methods have must reach the schema, which knows who has it, instead of stopping Hydra.
    # The same for an option of a benchmark group, whose members have it.
    full = [re.sub(r"^\+{0,2}(method|benchmark)\.", r"++\1.", text) for text in full]
    # argparse wants all overrides in one place; people write `benchmark=demo_kv -m method=fold,yarn`.
    full.sort(key=lambda text: "=" in text and not text.startswith("-"))
    if launched or not any(text in ("-m", "--multirun") for text in full):
        yield full  # a launcher keeps its jobs' files in Hydra's folder
        return
    with tempfile.TemporaryDirectory(prefix="fold-bench-") as scratch:
        yield [*full, f"hydra.sweep.dir='{scratch}'"]


@contextmanager
def _one_line_errors() -> Iterator[None]:
    """Let Hydra's exceptions through and turn them into UserError."""
    before = os.environ.get("HYDRA_FULL_ERROR")
    os.environ["HYDRA_FULL_ERROR"] = "1"  # otherwise Hydra prints several lines and exits by itself
    said = io.StringIO()
    try:
        with redirect_stderr(said):
            yield
    except SystemExit as error:  # argparse, after several lines of usage
        if error.code in (0, None):
            raise
        raise UserError(f"{said.getvalue().splitlines()[-1].rpartition('error: ')[2]}; see fold-bench --help") from None
    except UserError:
        raise
    except (HydraException, OmegaConfBaseException, ValueError, YAMLError) as error:
        raise UserError(hydra_error(error)) from None
    except OSError as error:
        raise UserError(f"{error.filename or 'a configuration file'}: {error.strerror or error}") from None
    else:
        sys.stderr.write(said.getvalue())
    finally:
        if before is None:
            del os.environ["HYDRA_FULL_ERROR"]
        else:
            os.environ["HYDRA_FULL_ERROR"] = before


def hydra_error(error: Exception) -> str:
    """Hydra's message in one line: choices after a colon, advice that would not help here left out."""
    text = str(error)
    if unknown := re.search(r"Could not override '([^']+)'", text):
        return unknown_option(unknown.group(1))
    if missing := re.search(r"Could not find '([^']+)'", text):
        group, _, choice = missing.group(1).rpartition("/")
        listed = ", ".join(re.findall(r"^\t(\S+)$", text.partition("Config search path")[0], re.MULTILINE))
        if group == "hydra/launcher" and choice.startswith("submitit_"):
            return f"{choice} is a package of its own: pip install hydra-submitit-launcher, or use fold-submit"
        return f"no {group or 'configuration'} is called {choice!r}" + (f"; choose from {listed}" if listed else "")
    if several := re.search(r"Ambiguous value for argument '(\w+)=([^']*)'", text):
        key, value = several.groups()
        instead = f"methods=[{value}] for one run of all of them, or " if key == "method" else ""
        return f"{key}={value} names several: use {instead}-m for one run each"
    cause = str(error.__cause__) if error.__cause__ is not None and str(error.__cause__) not in text else ""
    lines = [
        line
        for line in f"{text}\n{cause}".splitlines()
        if not line.lstrip().startswith(("See http", "full_key", "object_type"))
    ]
    return " ".join(" ".join(lines).split())


if __name__ == "__main__":
    sys.exit(main())
