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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

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
    plans = compose_plans(arguments)
    if plans is None:
        return OK
    for plan in plans:
        check(plan)
    # Importing torch and transformers takes seconds, which --help and a mistyped option need not wait for.
    from harness.run import execute, prepare

    jobs = [prepare(plan) for plan in plans]
    return max(execute(job, arguments) for job in jobs)


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

    with _hydra_as_library(arguments) as full, _one_line_errors():
        before, sys.argv = sys.argv, ["fold-bench", *full]
        try:
            hydra.main(version_base="1.3", config_path="pkg://conf", config_name="config")(collect)()
        finally:
            sys.argv = before
    if troubles:
        raise troubles[0]
    if not plans:
        if any(_INFORMS.match(text) for text in arguments):
            return None
        raise UserError("no run came out of this command; fold-bench sweeps with Hydra's own launcher only")
    return list({plan.hash: plan for plan in plans}.values())


def _compose(overrides: list[str]) -> DictConfig:
    return hydra.compose("config", overrides=overrides)


def _note(text: str) -> None:
    print(f"note: {text}", file=sys.stderr)


@contextmanager
def _hydra_as_library(arguments: list[str]) -> Iterator[list[str]]:
    """Arguments for Hydra, with what users mean spelled the way it wants, and its sweep folder out of the way."""
    for text in arguments:
        if re.match(r"[+~]*hydra\.(run|sweep)\.", text):
            raise UserError(f"{text} has no effect here: give run_dir= to say where a run is written")
    # `model` and `experiment` are not in the defaults list, so that a run without one is the demo; the plus is easily
    # forgotten.
    full = [re.sub(r"^(model|experiment)=", r"+\1=", text) for text in arguments]
    # An option that only some methods have must reach the schema, which knows who has it, instead of stopping Hydra.
    # The same for an option of a benchmark group, whose members have it.
    full = [re.sub(r"^\+{0,2}(method|benchmark)\.", r"++\1.", text) for text in full]
    # argparse wants all overrides in one place; people write `benchmark=demo_kv -m method=fold,yarn`.
    full.sort(key=lambda text: "=" in text and not text.startswith("-"))
    with tempfile.TemporaryDirectory(prefix="fold-bench-") as scratch:
        yield [*full, f"hydra.sweep.dir='{scratch}'"] if any(t in ("-m", "--multirun") for t in full) else full


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
        raise UserError(f"{said.getvalue().splitlines()[-1].partition('error: ')[2]}; see fold-bench --help") from None
    except UserError:
        raise
    except (HydraException, OmegaConfBaseException, ValueError) as error:
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
