"""One run: request files, engine, the units of its benchmarks, run.json, and the table at the end."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from data_prep.config import BenchmarkConfig
from data_prep.demo.target import TargetUnavailable, default_cache_dir, ensure_target, target_fingerprint
from harness.bench import Arm, Options, Report, Unit, arms_of, run_unit
from harness.config import Plan, RunConfig, TargetConfig, UserError, make_arms
from harness.drafters import DrafterError, read_config
from harness.engines.base import EngineError, EngineInfo
from harness.guards import Agreement, describe_error, differing_settings, settings
from harness.progress import open_progress
from harness.provenance import RunFile, folder_facts
from harness.records import RANDOM_WEIGHTS, JsonLines, RecordError, RecordWriter, read_lines
from harness.requests import (
    RequestFile,
    RequestFileError,
    manifest_path,
    request_path,
    required_context,
    write_atomic,
)
from harness.synthetic import RANDOM, synthetic_facts, synthetic_requests

if TYPE_CHECKING:
    from analysis.summary import Summary

AGREEMENT = "agreement.jsonl"
SUMMARY, PLOT = "summary.md", "by_length.png"
# How often a request file that other commands are just building is looked at again.
_TRIES = 5
# What an engine loads of a Hub repository; never pickles, never remote code.
_MODEL_FILES = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model"]


@dataclass(frozen=True)
class Job:
    """A plan with everything found that it needs. config: the plan's, its sources replaced by local folders."""

    plan: Plan
    config: RunConfig
    arms: tuple[Arm, ...]
    units: tuple[Unit, ...]
    files: dict[str, RequestFile]


# ------------------------------------------------------------------------------------------------------------ preparing


def prepare(plan: Plan) -> Job:
    """Find or build what the plan reads. Raises UserError; writes nothing but the cache and missing request files."""
    config = plan.config
    data_dir = Path(config.data_dir).expanduser().absolute() if config.data_dir else default_cache_dir() / "requests"
    _check_writable("run_dir", plan.run_dir)
    if config.weights == RANDOM:
        return _prepare_synthetic(plan, data_dir)
    folder = target_folder(config.target)
    vocab = _check_pair(config, folder)
    files = {each.name: _request_file(each, plan, folder, data_dir) for each in plan.benchmarks}
    units = []
    for name, file in files.items():
        count = _check_requests(file, config.target, vocab)
        units.append(Unit(config.drafter.name, config.engine.name, name, file.__iter__, count, *plan.shard))
    local = replace(
        config,
        target=replace(config.target, source=str(folder)),
        drafter=replace(config.drafter, source=config.drafter.folder_or_id),
    )
    return Job(plan, local, tuple(arms_of(make_arms(plan.arms))), tuple(units), files)


def _prepare_synthetic(plan: Plan, data_dir: Path) -> Job:
    """Nothing is fetched: the models are their shapes, the requests random token ids."""
    config, files = plan.config, {}
    for benchmark in plan.benchmarks:
        _check_writable("data_dir", request_path(data_dir, benchmark.name, config.target.name).parent)
        try:
            files[benchmark.name] = synthetic_requests(benchmark, config.target, data_dir)
        except ValueError as error:
            raise UserError(str(error)) from None
        except OSError as error:
            raise UserError(f"{error.filename or data_dir}: {error.strerror or error}") from None
    engine = config.engine.name + RANDOM_WEIGHTS
    units = [
        Unit(config.drafter.name, engine, name, file.__iter__, file.manifest["count"], *plan.shard)
        for name, file in files.items()
    ]
    return Job(plan, config, tuple(arms_of(make_arms(plan.arms))), tuple(units), files)


def target_folder(target: TargetConfig) -> Path:
    """The local folder of a target's checkpoint, fetched first if need be. Raises UserError."""
    if target.source == "demo":
        try:
            return ensure_target()
        except TargetUnavailable as error:
            raise UserError(str(error)) from None
    if (local := Path(target.source).expanduser()).is_dir():
        return local
    if target.source.count("/") != 1 or target.source.startswith((".", "~", "/")):
        raise UserError(f"target.source={target.source}: no such folder, and no Hub id of the form owner/name")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(target.source, revision=target.revision, allow_patterns=_MODEL_FILES))
    except Exception as error:  # the client's, httpx's and the system's errors alike: the user needs one line
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise UserError(
            f"target {target.name}: {target.source} at {target.revision} cannot be fetched ({reason}); "
            "give a local copy with target.source=<folder>, or accept its licence and log in to the Hub"
        ) from None


def _check_writable(key: str, folder: Path) -> None:
    """Refuse a folder that cannot be made or written, without making it."""
    parent = next(path for path in (folder, *folder.parents) if path.exists())
    if not parent.is_dir():
        raise UserError(f"{folder} cannot be written ({parent} is not a folder); choose another {key}=")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise UserError(f"{folder} cannot be written (no permission in {parent}); choose another {key}=")


def _check_pair(config: RunConfig, folder: Path) -> int | None:
    """Compare the target's config.json with what is configured and with what its drafter was made for. Returns the
    size of the target's vocabulary, None if the file does not say."""
    target, drafter = config.target, config.drafter
    try:
        declared = json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError) as error:
        raise UserError(
            f"{folder / 'config.json'} is unreadable ({error}); target.source must be a model folder"
        ) from None
    text = declared.get("text_config", declared)
    positions = text.get("max_position_embeddings")
    if isinstance(positions, int) and target.max_context > positions:
        raise UserError(f"target.max_context={target.max_context}: the checkpoint has {positions} positions")
    if {"num_hidden_layers", "hidden_size", "vocab_size"} <= text.keys():
        try:
            made_for = read_config(drafter.folder_or_id, revision=drafter.revision)
            made_for.check_target(text["num_hidden_layers"], text["hidden_size"], text["vocab_size"])
        except DrafterError as error:
            raise UserError(f"drafter {drafter.name} does not fit target {target.name}: {error}") from None
    vocab = text.get("vocab_size")
    return vocab if isinstance(vocab, int) else None


def _request_file(benchmark: BenchmarkConfig, plan: Plan, folder: Path, data_dir: Path) -> RequestFile:
    """The request file of one benchmark, held open; built if there is none, or one of another recipe."""
    from data_prep.prepare import prepare as prepare_requests
    from data_prep.select import PrepError
    from data_prep.tokens import TargetSpec, stop_ids_of

    target = plan.config.target
    path = request_path(data_dir, benchmark.name, target.name)
    try:
        # A damaged file stops here; building it anew could hide that the numbers so far came from another one.
        if path.exists():
            held = _hold(path)
            if "recipe" not in held.manifest:
                return held  # not made by data_prep: taken as it is
        else:
            _check_writable("data_dir", path)
        tokenizer = _tokenizer(folder)
        revision = target.revision or ""
        stops = stop_ids_of(folder, tokenizer)
        spec = TargetSpec(target.name, target.max_context, stops, target.chat_template_kwargs, revision)
        source = Path(plan.config.source_dir).expanduser() if plan.config.source_dir else None
        if not path.exists():
            print(f"preparing {benchmark.name} for {target.name} (once)", file=sys.stderr, flush=True)
        for _ in range(_TRIES):
            held = _hold(prepare_requests(benchmark, tokenizer, spec, data_dir, source=source))
            if held.manifest["recipe"]["benchmark"] == asdict(benchmark):
                return held
        raise UserError(f"other commands keep preparing {path} with other options: use a data_dir= of your own")
    except (RequestFileError, PrepError) as error:
        raise UserError(str(error)) from None
    except OSError as error:
        raise UserError(f"{error.filename or path}: {error.strerror or error}") from None


def _hold(path: Path) -> RequestFile:
    """Open a request file; one that another process is just replacing is given the moment that takes."""
    for _ in range(_TRIES - 1):
        with suppress(RequestFileError):
            return RequestFile(path)
        time.sleep(0.1)
    return RequestFile(path)


def _tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder)
    except Exception as error:  # transformers raises whatever its file formats raise
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"{folder} has no usable tokenizer ({reason}); target.source must be a model folder") from None


def _check_requests(file: RequestFile, target: TargetConfig, vocab: int | None) -> int:
    """Read the whole file once, before any model loads. Returns how many requests it holds."""
    count = 0
    try:
        for request in file:
            count += 1
            need = required_context(len(request.prompt_ids), request.max_new_tokens)
            if need > target.max_context:
                raise UserError(
                    f"{file.path}: request {request.id} needs {need} tokens of context, target {target.name} has "
                    f"{target.max_context}; leave it out (benchmark.exclude) or choose shorter levels"
                )
            if vocab is not None and (largest := max(request.prompt_ids)) >= vocab:
                raise UserError(
                    f"{file.path}: request {request.id} has token id {largest}, target {target.name} has ids below "
                    f"{vocab}; prepare the requests with the target's own tokenizer"
                )
    except RequestFileError as error:
        raise UserError(str(error)) from None
    except OSError as error:
        raise UserError(f"{file.path} cannot be read ({error.strerror})") from None
    if not count:
        raise UserError(f"{file.path} holds no request")
    return count


# ------------------------------------------------------------------------------------------------------------ running


def execute(job: Job, argv: Sequence[str]) -> int:
    """Run a job and print its table. Returns 0 if every cell was measured and confirmed, else 1."""
    plan, started = job.plan, time.perf_counter()
    try:
        writer = RecordWriter(plan.run_dir, plan.run, plan.config.drafter.proposals)
    except RecordError as error:
        raise UserError(str(error)) from None
    with writer:
        run_file = RunFile(plan.run_dir, plan.run, plan.resolved(), plan.hash, list(argv))
        try:
            _register(run_file, job)
            run_file.write()
            log = JsonLines(plan.run_dir / AGREEMENT)
            judged = _verdicts(log.path)
        except OSError as error:
            raise UserError(f"{error.filename or plan.run_dir}: {error.strerror}; choose another run_dir=") from None
        except RecordError as error:
            raise UserError(str(error)) from None
        _announce(job)
        reports: list[Report] = []
        status, engine_s, unfinished = "failed", 0.0, ""
        try:
            engine_s, reports = _run_units(job, writer, log, judged, run_file)
            status = "complete" if all(report.ok for report in reports) else "incomplete"
        except RecordError as error:
            print(f"fold-bench: {error}", file=sys.stderr)
            return 1
        except (KeyboardInterrupt, SystemExit):  # the latter is how a preempted job leaves
            status = "interrupted"
            raise
        finally:
            log.close()
            wall = time.perf_counter() - started
            try:
                run_file.finish(
                    status,
                    reports=[asdict(report) for report in reports],
                    wall_s=round(wall, 3),
                    engine_s=round(engine_s, 3),
                    harness_share=round(1 - engine_s / wall, 4),
                )
            except RecordError as error:  # what has stopped the run already, mostly: it is told once
                unfinished = str(error)
    if unfinished:
        print(f"fold-bench: {unfinished}", file=sys.stderr)
        return 1
    return _conclude(job, reports)


def _verdicts(path: Path) -> list[dict[str, Any]]:
    """The lines of agreement.jsonl. Raises RecordError for one that is no verdict."""
    known, found = {entry.name for entry in fields(Agreement)}, []
    for number, line in read_lines(path):
        if line.keys() != known:
            raise RecordError(f"{path}, line {number} is no verdict of the output gate; restore it or remove that line")
        found.append(line)
    return found


def _announce(job: Job) -> None:
    """Say where the run is written, the sizes that are easily confused, and what the context rule has left out."""
    drafter, out = job.config.drafter, [f"run: {job.plan.run_dir}"]
    sizes = f"B = {drafter.block} block positions, K = {drafter.proposals} proposals, W = {drafter.window} entries"
    out.append(f"pair: {job.config.target.name} with {drafter.name} ({sizes})")
    if job.config.weights == RANDOM:
        out.append("RANDOM WEIGHTS at the published shapes: times and memory are real, acceptance is not reported")
    for name, file in job.files.items():
        for task, count in file.manifest.get("counts", {}).items():
            gone = ", ".join(f"{number} {reason}" for reason, number in count["excluded"].items())
            if gone:
                out.append(f"{name}: {count['kept']} of {count['in']} examples of {task} used; excluded: {gone}")
    print("\n".join(out), file=sys.stderr, flush=True)


def _run_units(
    job: Job, writer: RecordWriter, log: JsonLines, judged: list[dict[str, Any]], run_file: RunFile
) -> tuple[float, list[Report]]:
    """Seconds inside the engine, and a report per unit."""
    from harness.engines import open_engine

    def on_arm(arm: Arm, info: EngineInfo) -> str | None:
        mine = asdict(info)
        earlier = run_file.content["arms"].setdefault(arm.name, mine)
        run_file.write()
        changed = differing_settings(settings(EngineInfo(**earlier)), settings(info))
        return f"has changed since this run began ({'; '.join(changed)}): use another run_dir=" if changed else None

    config = job.config
    options = Options(config.warmup_tokens, config.drift_requests, config.max_gap)
    opened = time.perf_counter()
    try:
        engine = open_engine(config)
    except EngineError as error:
        raise UserError(str(error)) from None
    engine_s, reports = time.perf_counter() - opened, []
    progress = open_progress()
    try:
        for unit in job.units:
            report = run_unit(engine, unit, job.arms, writer, log, judged, progress, options, on_arm)
            engine_s += report.engine_s
            reports.append(report)
    finally:
        progress.close()
        closing = time.perf_counter()
        engine.close()
        engine_s += time.perf_counter() - closing
    return engine_s, reports


def _register(run_file: RunFile, job: Job) -> None:
    """Write down which inputs the run reads; other ones than at its first start would mix two experiments."""
    requests = run_file.content["requests"]
    for name, file in job.files.items():
        manifest = file.manifest
        mine = {"file": str(file.path), "sha256": manifest["sha256"], "count": manifest["count"], "manifest": manifest}
        if requests.setdefault(name, mine)["sha256"] != mine["sha256"]:
            raise UserError(
                f"the requests of {name} ({manifest_path(file.path)}) changed since this run began: "
                "use another run_dir="
            )
    target, drafter = job.plan.config.target, job.plan.config.drafter
    if job.plan.config.weights == RANDOM:
        shapes = {"target": target.architecture, "drafter": drafter.architecture}
        run_file.content["models"] = {kind: synthetic_facts(facts) for kind, facts in shapes.items()}
        return
    folder = Path(job.config.target.source)
    facts = (
        target_fingerprint(folder) if target.source == "demo" else folder_facts(target.source, target.revision, folder)
    )
    run_file.content["models"] = {
        "target": facts,
        "drafter": folder_facts(drafter.source, drafter.revision, Path(job.config.drafter.source)),
    }


def _leave(run_dir: Path, summary: Summary) -> list[str]:
    """Write the table and its plot into the run directory. Returns what could not be written: records are complete
    without either, and fold-report draws them again.
    """
    from analysis.style import save
    from analysis.summary import figure_by_length

    troubles: list[str] = []
    if any(row.synthetic for row in summary.rows):
        with suppress(OSError):
            write_atomic(run_dir / SUMMARY, summary.markdown().encode())
        return troubles
    picture = run_dir / f".{os.getpid()}.partial.png"
    try:
        write_atomic(run_dir / SUMMARY, summary.markdown().encode())
    except OSError as error:
        troubles.append(f"{run_dir / SUMMARY} cannot be written ({error.strerror})")
    try:
        save(figure_by_length(summary.rows), picture)
        os.replace(picture, run_dir / PLOT)
    except Exception as error:  # matplotlib raises whatever its fonts, backends and files raise
        troubles.append(f"{run_dir / PLOT} cannot be drawn ({describe_error(error)})")
    with suppress(OSError):
        picture.unlink(missing_ok=True)
    return troubles


def _conclude(job: Job, reports: list[Report]) -> int:
    from analysis.load import LoadError
    from analysis.summary import summarise

    lines = []
    try:
        summary = summarise(job.plan.run_dir)
        failures = summary.failures
        Console().print(summary.table())
        lines += [f"note: {text}" for text in _leave(job.plan.run_dir, summary)]
    except LoadError as error:  # not one record: what follows says why
        failures = 1
        lines.append(f"FAILED {error}")
    for report in reports:
        lines += [f"FAILED {cell}: {reason}" for cell, reason in report.failed.items()]
        lines += [f"REFUSED {arm}" for arm in report.refused]
        lines += [f"GATE {output}" for output in report.gates]
        lines += [f"MISSING {report.missing} cells of {report.unit}"] if report.missing else []
        lines += [f"note: {flag} ({report.unit})" for flag in report.flags]
        skipped = f"note: the drafter did not run in {report.skipped_rounds} rounds of {report.unit}"
        lines += [skipped] if report.skipped_rounds else []
    for line in lines:
        print(line, file=sys.stderr)
    return 0 if all(report.ok for report in reports) and not failures else 1
