"""fold-diagnose: the paper's diagnostics on the reference engine, with fold-bench's own configuration.

    fold-diagnose diagnostic=distance benchmark=demo_docs

``diagnostic`` and ``diagnostic.<option>`` are read here; every other argument goes to the tree in conf/ as it does for
fold-bench, so pairs, request files and method options mean the same in both.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Optional

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from harness.cli import INTERRUPTED, MISTAKE, OK, compose_plans
from harness.config import Plan, UserError, check

if TYPE_CHECKING:
    from harness.diagnostics.order import Pairs
    from harness.diagnostics.states import Pair
    from harness.engines.base import EngineInfo
    from harness.requests import Request
    from harness.run import Job

NAMES = ("acceptance", "distance", "order")
PAPER_SHIFTS = (8192, 32768, 131072)  # Appendix A
# A drafter trained on a few hundred tokens is out of its range long before 8K.
SHORT_SHIFTS, SHORT_TRAINING = (256, 1024), 1024

HELP = """\
fold-diagnose [diagnostic=NAME] [diagnostic.OPTION=VALUE ...] [fold-bench's own options ...]

  diagnostic=acceptance   offline acceptance length of every method on identical states (default)
  diagnostic=distance     the draft block moved away from its context (Finding 1)
  diagnostic=order        which of two context entries came first, read from their features (Finding 2)
  diagnostic=all          the three in one pass over the inputs
  diagnostic=latency      shares of an AR step and of an SD round by context length (Figure 1); needs no inputs
  diagnostic=decomposition diagnostic.runs=[DIR,...]   window, memory and alpha from the records of fold-bench runs

  diagnostic.inputs=N     at most N inputs per benchmark, task and length (null: all)
  diagnostic.tokens=N     generate at most N tokens per input (null: the benchmark's limit)
  diagnostic.stride=N     acceptance: draft at every N-th position of the continuation (1)
  diagnostic.shifts=[..]  distance: shifts in positions (null: 8192, 32768, 131072; also 256, 1024 for short training)
  diagnostic.positions=N  distance: places in the continuation per input (2)
  diagnostic.recent=N     order: leave out the N most recent entries (null: the drafter's window)
  diagnostic.pairs=N      order: pairs per input and separation (1500)
  diagnostic.contexts=[..] latency: context lengths in tokens (null: 1024, 2048, ... 131072 as far as the target goes)
  diagnostic.repeats=N    latency: steps and rounds measured at each length (10)
  run_dir=DIR             where to write (null: results/diagnose/<pair>-<benchmark>)

Everything else is fold-bench's: +model=, benchmark=, methods=, method.window=, ... (fold-bench --help).
Exit code 0: done; 2: a mistake in the command.
"""


@dataclass
class Options:
    """The options of HELP. name: which diagnostic."""

    name: str = "acceptance"
    inputs: Optional[int] = None  # noqa: UP045 (omegaconf 2.3 wants typing.Optional)
    tokens: Optional[int] = None  # noqa: UP045
    stride: int = 1
    shifts: Optional[list[int]] = None  # noqa: UP045
    positions: int = 2
    recent: Optional[int] = None  # noqa: UP045
    pairs: int = 1500
    contexts: Optional[list[int]] = None  # noqa: UP045
    repeats: int = 10
    runs: list[str] = field(default_factory=list)

    def wants(self, name: str) -> bool:
        """Whether this diagnostic is asked for."""
        return self.name in (name, "all")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run fold-diagnose and return its exit code: 0 done, 2 a user mistake."""
    from analysis.load import LoadError
    from harness.engines.base import EngineError

    given = list(sys.argv[1:] if arguments is None else arguments)
    if any(text in ("-h", "--help") for text in given):
        print(HELP, end="")
        return OK
    try:
        return _main(given)
    except (UserError, LoadError, EngineError) as error:
        return _stop(str(error), MISTAKE)
    except OSError as error:
        return _stop(f"{error.filename or 'file'}: {error.strerror or error}", MISTAKE)
    except KeyboardInterrupt:
        return _stop("interrupted; nothing was written", INTERRUPTED)


def _stop(text: str, code: int) -> int:
    print(f"fold-diagnose: {' '.join(text.split())}", file=sys.stderr)
    return code


def parse(arguments: Sequence[str]) -> tuple[Options, list[str]]:
    """The diagnostic's options and the arguments that are fold-bench's. Raises UserError."""
    mine = [text for text in arguments if text.split("=")[0].split(".")[0] == "diagnostic"]
    rest = [text for text in arguments if text not in mine]
    known = [entry.name for entry in fields(Options) if entry.name != "name"]
    dotted = []
    for text in mine:
        key, found, value = text.partition("=")
        option = key.removeprefix("diagnostic").removeprefix(".")
        if not found or (option and option not in known):
            raise UserError(f"unknown option {text!r}; diagnostic has {', '.join(known)}")
        dotted.append(f"{option or 'name'}={value}")
    try:
        merged = OmegaConf.merge(OmegaConf.structured(Options), OmegaConf.from_dotlist(dotted))
        options = OmegaConf.to_object(merged)
    except OmegaConfBaseException as error:
        raise UserError(f"diagnostic.{error.full_key or error.key}: {str(error).splitlines()[0]}") from None
    assert isinstance(options, Options)
    known = [*NAMES, "all", "latency", "decomposition"]
    if options.name not in known:
        raise UserError(f"diagnostic={options.name}: choose one of {', '.join(known)}")
    for key in ("inputs", "tokens", "stride", "positions", "pairs", "repeats"):
        number = getattr(options, key)
        if number is not None and number < 1:
            raise UserError(f"diagnostic.{key}={number}: must be at least 1")
    if options.recent is not None and options.recent < 0:
        raise UserError(f"diagnostic.recent={options.recent}: must not be negative")
    if options.shifts is not None and (not options.shifts or min(options.shifts) < 1):
        raise UserError(f"diagnostic.shifts={options.shifts}: give one or more positive distances")
    if options.contexts is not None and (not options.contexts or min(options.contexts) < 1):
        raise UserError(f"diagnostic.contexts={options.contexts}: give one or more positive lengths")
    if bool(options.runs) != (options.name == "decomposition"):
        raise UserError("diagnostic=decomposition and diagnostic.runs=[DIR,...] go together")
    # A paper pair's preset names vLLM; Appendix A's diagnostics "use a PyTorch reference implementation".
    return options, rest if any(text.startswith("engine=") for text in rest) else [*rest, "engine=reference"]


def _main(arguments: list[str]) -> int:
    options, rest = parse(arguments)
    if options.name == "latency" and not any(text.startswith("benchmark=") for text in rest):
        # It reads no benchmark, and random weights have no other than theirs.
        made_up = any(text.lstrip("+") == "weights=random" for text in rest)
        rest = [*rest, *(["benchmark=random"] if made_up else [])]
    plans = compose_plans(rest)
    if plans is None:
        return OK
    if len(plans) > 1:
        raise UserError("one diagnostic at a time: leave -m out")
    plan = plans[0]
    if plan.config.engine.name != "reference":
        raise UserError(f"engine={plan.config.engine.name}: diagnostics look inside the reference engine only")
    name = f"{plan.config.drafter.name}-{plan.config.benchmark.name}"
    out = Path(plan.config.run_dir or Path("results", "diagnose", name)).expanduser()
    if options.name == "decomposition":
        written = _decompose(options.runs, out)
    elif options.name == "latency":
        out = out if plan.config.run_dir else out.with_name(f"{plan.config.drafter.name}-latency")
        written = _latency(options, plan, out)
    else:
        written = _diagnose(options, plan, out)
    for path in written:
        print(path)
    return OK


def _decompose(folders: Sequence[str], out: Path) -> list[Path]:
    from analysis.load import load
    from harness.diagnostics.decomposition import decomposition_page, used_rows

    runs = load([Path(folder).expanduser() for folder in folders])
    requests = runs.used.drop_duplicates(["benchmark", "task", "request"])
    footer = [
        f"Runs: {', '.join(sorted(runs.provenance))}",
        f"Requests: {len(requests)} used, {len(runs.excluded)} left out of every arm",
        "Intervals: 95%, paired bootstrap over requests within each length, 2,000 resamples",
    ]
    return decomposition_page(runs).write(out, used_rows(runs), footer)


def _latency(options: Options, plan: Plan, out: Path) -> list[Path]:
    """Measure, context by context; a run that is cut leaves the contexts measured so far."""
    from dataclasses import asdict

    import pandas as pd
    import torch

    from harness.config import make_arms
    from harness.diagnostics.latency import Part, copy_bandwidth, default_contexts, measure
    from harness.diagnostics.report import latency_page
    from harness.engines.reference import open_reference
    from harness.run import target_folder
    from harness.synthetic import RANDOM

    check(plan)
    methods = {name: method for name, method, _ in make_arms(plan.arms) if method is not None}
    if not methods:
        raise UserError("no method to measure; give method= or methods=")
    config = plan.config
    random_weights = config.weights == RANDOM
    if not random_weights:
        folder = str(target_folder(config.target))
        drafter = replace(config.drafter, source=config.drafter.folder_or_id)
        config = replace(config, target=replace(config.target, source=folder), drafter=drafter)
    engine = open_reference(config)
    target, _ = engine.pair
    contexts = sorted(options.contexts or default_contexts(min(target.max_positions, config.target.max_context)))
    info = engine.describe(next(iter(methods.values())))
    bandwidth = copy_bandwidth(target.device)

    def say(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    say(f"copy bandwidth {bandwidth / 1e9:.1f} GB/s (read and written bytes)")
    weights = "random weights at the published shapes" if random_weights else f"weights of {plan.config.target.source}"
    footer = [
        f"Pair: target {config.target.name} with drafter {config.drafter.name}, {weights}",
        f"Reference engine, {info.device}, {info.dtype}, {_device_name(target.device)}; "
        f"{'CUDA graphs' if info.settings['graphs'] else 'eager'}; {torch.get_num_threads()} CPU threads",
        f"A made-up context of random keys and values; medians of {options.repeats} steps and rounds",
        f"Bound: bytes that must be read, each once, over the {bandwidth / 1e9:.1f} GB/s of a large copy "
        "(bytes read and written) on the same device",
    ]
    measured: list[Part] = []
    written: list[Path] = []
    for parts in measure(engine, contexts, methods, repeats=options.repeats, bandwidth=bandwidth, say=say):
        measured += parts
        table = pd.DataFrame([asdict(part) for part in measured])
        written = latency_page(table).write(out, table, footer)
    return written


def _device_name(device: Any) -> str:
    import torch

    from harness.provenance import cpu

    return torch.cuda.get_device_name(device) if device.type == "cuda" else str(cpu()["model"])


def _diagnose(options: Options, plan: Plan, out: Path) -> list[Path]:
    check(plan)
    # Importing torch and transformers takes seconds, which a mistyped option need not wait for.
    import pandas as pd

    from harness.diagnostics.order import probe
    from harness.diagnostics.report import PAGES
    from harness.diagnostics.states import Pair
    from harness.engines.reference import open_reference
    from harness.run import prepare

    job = prepare(plan)
    engine = open_reference(job.config)
    target, drafter = engine.pair
    assert drafter is not None
    pair = Pair(target, drafter, job.config.engine.prefill_chunk)
    inputs = list(chosen(job, options.inputs))
    rows, pairs, notes = visit(pair, job, options, inputs)
    if options.wants("order"):
        of_input = {row["request"]: row for row in rows.pop("inputs")}
        rows["order"] = [{**of_input[row["request"]], **row} for row in probe(pairs)]
        if not rows["order"]:
            notes.append("order: no separation with inputs of at least five documents; give longer or more inputs")
    written = []
    footer = [*_facts(job, engine.describe(None), len(inputs)), *notes]
    for name in NAMES:
        if not options.wants(name):
            continue
        if not rows[name]:
            trouble = next((note for note in notes if note.startswith(name)), f"{name}: no input could be used")
            if options.name == name:
                raise UserError(trouble)
            print(f"note: {trouble}", file=sys.stderr)
            continue
        table = pd.DataFrame(rows[name])
        written += PAGES[name](table).write(out, table, [*footer, _settings(name, options, plan)])
    return written


def chosen(job: Job, limit: int | None) -> Iterator[Request]:
    """The requests of a job, at most ``limit`` for each benchmark, task and level, in the order of their files."""
    seen: Counter[tuple[str, str, Any]] = Counter()
    for unit in job.units:
        for request in unit:
            group = (request.benchmark, request.task, request.meta.get("level"))
            seen[group] += 1
            if limit is None or seen[group] <= limit:
                yield request


def document(request: Request) -> str:
    """What a request is made from: requests of several lengths may be made from one document."""
    return f"{request.benchmark}/{request.meta.get('source_id', request.id)}"


def longest_of_each_document(inputs: Sequence[Request]) -> list[Request]:
    """One request per document, as in Appendix A: the longest, in order of appearance."""
    found: dict[str, Request] = {}
    for request in inputs:
        known = found.get(document(request))
        if known is None or len(request.prompt_ids) > len(known.prompt_ids):
            found[document(request)] = request
    return list(found.values())


def visit(
    pair: Pair, job: Job, options: Options, inputs: Sequence[Request]
) -> tuple[dict[str, list[dict[str, Any]]], list[Pairs], list[str]]:
    """Run the wanted diagnostics over the inputs, each prefilled once (once more, shuffled, for the order probe).

    Returns rows by diagnostic ("inputs": what the order probe's rows are joined with), the order probe's pairs, and
    what must be said about the inputs.
    """
    from analysis.load import length_bucket
    from harness.diagnostics.acceptance import acceptance
    from harness.diagnostics.distance import distance
    from harness.diagnostics.order import collect
    from harness.diagnostics.states import replay

    methods = {arm.name: arm.method for arm in job.arms if arm.method is not None}
    if options.wants("acceptance") and not methods:
        raise UserError("no method to measure; give method= or methods=")
    rows: dict[str, list[dict[str, Any]]] = {"acceptance": [], "distance": [], "order": [], "inputs": []}
    pairs: list[Pairs] = []
    short = ties = known = 0
    longest = longest_of_each_document(inputs) if options.wants("order") else []
    if options.name == "order":
        inputs = longest
    # The order probe alone needs no continuation.
    tokens = options.tokens if options.wants("acceptance") or options.wants("distance") else 1
    for place, request in enumerate(inputs, 1):
        started = time.perf_counter()
        where: dict[str, Any] = {
            "benchmark": request.benchmark,
            "task": request.task,
            "level": str(request.meta.get("level") or length_bucket(len(request.prompt_ids))),
            "request": f"{request.benchmark}/{request.id}",
            "prompt_tokens": len(request.prompt_ids),
        }
        probed = request in longest
        states = replay(pair, request, tokens, keep_features=probed)
        ties, known = ties + states.near_ties, known + len(states.continuation) - 1
        short += tokens != 1 and not states.offsets()
        if options.wants("acceptance"):
            rows["acceptance"] += [{**where, **row} for row in acceptance(states, methods, options.stride)]
        if options.wants("distance"):
            shifts = options.shifts or default_shifts(job.config.drafter.train_length)
            rows["distance"] += [{**where, **row} for row in distance(states, shifts, options.positions)]
        if probed and states.features is not None:
            recent = job.config.drafter.window if options.recent is None else options.recent
            drawn = collect(pair, request, states.features, recent, options.pairs)
            pairs.append(replace(drawn, request=where["request"], document=document(request)))
            rows["inputs"].append(where)
        seconds = time.perf_counter() - started
        print(f"{place}/{len(inputs)} {where['request']} {seconds:.1f} s", file=sys.stderr, flush=True)
    notes = [f"acceptance, distance: {short} inputs left out, their continuations are too short"] if short else []
    if known:
        notes.append(f"Of {known} continuation tokens, the one pass would have chosen {ties} otherwise (rounding)")
    return rows, pairs, notes


def default_shifts(train_length: int) -> list[int]:
    """The paper's shifts, preceded by small ones for a drafter trained on short sequences."""
    return [*(SHORT_SHIFTS if train_length <= SHORT_TRAINING else ()), *PAPER_SHIFTS]


def _facts(job: Job, info: EngineInfo, inputs: int) -> list[str]:
    """Where the numbers come from: pair, inputs, machine-independent settings, versions."""
    from harness.provenance import code, folder_facts, packages

    config = job.config
    weights = [
        entry.get("sha256", "")[:12]
        for name, entry in folder_facts("", None, Path(config.drafter.source))["files"].items()
        if name.endswith(".safetensors")
    ]
    versions = packages()
    named = ", ".join(f"{name} {versions.get(name)}" for name in ("fold-bench", "torch", "transformers"))
    plan = job.plan.config
    return [
        f"Pair: target {config.target.name} ({plan.target.source}), drafter {config.drafter.name} "
        f"({plan.drafter.source}, weights sha256 {' '.join(weights) or 'unknown'})",
        f"Inputs: {inputs} of {', '.join(unit.benchmark for unit in job.units)}",
        f"Reference engine, {info.device}, {info.dtype}; intervals: 95%, paired bootstrap over inputs, 2,000 resamples",
        f"Versions: {named}; commit {(code()['commit'] or 'unknown')[:12]}",
    ]


def _settings(name: str, options: Options, plan: Plan) -> str:
    drafter = plan.config.drafter
    if name == "acceptance":
        arms = "; ".join(
            f"{arm.name} ({', '.join(f'{key}={value}' for key, value in arm.options.items()) or 'as released'})"
            for arm in plan.arms
        )
        return f"Stride of positions: {options.stride}; {arms}"
    if name == "distance":
        return f"{options.positions} positions per input, evenly spread over its continuation"
    recent = drafter.window if options.recent is None else options.recent
    return (
        f"The longest input of each document; {options.pairs} pairs per input and separation outside the most recent "
        f"{recent} entries; five folds by document; chunks of 64 tokens in the shuffled control"
    )
