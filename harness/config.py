"""The typed configuration: what Hydra composed from conf/, checked before any model loads.

A run is one target-drafter pair, one engine, one benchmark or group of them, and several arms. ``resolve`` turns a
composed configuration into a :class:`Plan`; ``check`` looks at what the plan needs from this machine. Both raise
:class:`UserError`.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, Optional

from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from data_prep.config import BenchmarkConfig
from harness.records import AR
from harness.synthetic import RANDOM, length_in_tokens

PACKAGED = "pkg://"
ENGINES = ("reference", "vllm", "sglang")
# DeepSpec's drafters label each block position with the next token, z-lab's with the same one (paper, section 3.1).
FAMILIES: dict[str, Callable[[int], int]] = {"zlab": lambda block: block - 1, "deepspec": lambda block: block}


class UserError(ValueError):
    """A mistake the user can mend, in one line: what was wrong, where, what to do. Commands exit with code 2."""


# omegaconf 2.3 reads these classes as the schema: it wants typing.Optional and mutable dataclasses.


@dataclass
class TargetConfig:
    """source: Hub id or local folder ("demo": the embedded one). max_context: positions it may use, in tokens.
    architecture: what of its config.json decides shapes, for weights=random."""

    name: str = MISSING
    source: str = MISSING
    revision: Optional[str] = None  # noqa: UP045
    max_context: int = MISSING
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    needs_gpu: bool = False
    architecture: dict[str, Any] = field(default_factory=dict)


@dataclass
class DrafterConfig:
    """source: Hub id, local folder, or pkg://package/folder. target: the target it was trained for. block: B,
    positions of a
    draft block. window: W of Table 1, in entries. train_length: longest training sequence in tokens, YaRN's R.
    architecture: what of its config.json decides shapes, for weights=random."""

    name: str = MISSING
    target: str = MISSING
    source: str = MISSING
    revision: Optional[str] = None  # noqa: UP045
    family: str = MISSING
    block: int = MISSING
    window: int = MISSING
    train_length: int = MISSING
    architecture: dict[str, Any] = field(default_factory=dict)

    @property
    def proposals(self) -> int:
        """K, the tokens proposed a round: B - 1 for z-lab's drafters, B for DeepSpec's."""
        return FAMILIES[self.family](self.block)

    @property
    def folder_or_id(self) -> str:
        """`source` with a packaged folder turned into its path."""
        if not self.source.startswith(PACKAGED):
            return self.source
        package, _, rest = self.source.removeprefix(PACKAGED).partition("/")
        try:
            return str(files(package).joinpath(rest))
        except (ModuleNotFoundError, TypeError, ValueError):  # unknown, a module without folder, an empty name
            raise UserError(f"drafter.source={self.source}: there is no package {package!r}") from None


@dataclass
class EngineConfig:
    """device: auto, cpu, cuda. dtype: auto, float32, bfloat16, float16. prefill_chunk: tokens. threads: of the CPU.
    graphs: the reference engine replays steps as CUDA graphs on a GPU. Of the serving engines: gpu_memory, the share of
    the GPU's memory they take; kv_cache_gib, of the KV cache instead; allow_version, one other than the tested."""

    name: str = MISSING
    device: str = "auto"
    dtype: str = "auto"
    prefill_chunk: int = 8192
    threads: Optional[int] = None  # noqa: UP045
    graphs: bool = True
    gpu_memory: float = 0.92
    kv_cache_gib: Optional[float] = None  # noqa: UP045
    allow_version: Optional[str] = None  # noqa: UP045


@dataclass
class SlurmConfig:
    """Where fold-submit runs units and how (conf/slurm); nothing here changes what is measured.

    local: run the units on this machine, one at a time per visible GPU, instead of queueing them. shards: parts of each
    request file; null: as many as make a unit about `unit_hours` long. time_min: the job's limit in minutes, above 10.
    signal_delay_s: how long before the limit a job is told to save and requeue itself. parallel: jobs of one submission
    that run at the same time. gres, partition, account, qos, constraint, cpus_per_task, mem, exclusive: as sbatch knows
    them. sbatch: further options of sbatch. srun: further arguments of srun, for example a container's. setup: shell
    lines before the job, for example "module load cuda". env: variables of the job; $NAMES in them are expanded there.
    python: the interpreter, if it is not this one's path (in a container).
    """

    local: bool = False
    shards: Optional[int] = None  # noqa: UP045
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


@dataclass
class RunConfig:
    """The root; conf/config.yaml explains each key."""

    target: TargetConfig = field(default_factory=TargetConfig)
    drafter: DrafterConfig = field(default_factory=DrafterConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    benchmark: BenchmarkConfig = field(default_factory=BenchmarkConfig)
    weights: str = "checkpoint"
    method: dict[str, Any] = field(default_factory=dict)
    methods: Any = field(default_factory=list)
    run_dir: Optional[str] = None  # noqa: UP045
    data_dir: Optional[str] = None  # noqa: UP045
    source_dir: Optional[str] = None  # noqa: UP045
    warmup_tokens: int = 16
    drift_requests: int = 3
    max_gap: Optional[float] = None  # noqa: UP045
    parts: list[Any] = field(default_factory=list)
    instead: str = ""
    slurm: SlurmConfig = field(default_factory=SlurmConfig)


@dataclass(frozen=True)
class ArmSpec:
    """A method by name with its resolved options; "ar" has none."""

    name: str
    options: dict[str, Any]


@dataclass(frozen=True)
class Plan:
    """A typed run. arms: as asked for, so AR, which always runs, need not be there. benchmarks: groups expanded.

    overrides: what Hydra composed it from. shard: (k, n) for the k-th of n parts of each request file; the parts are
    one run, so it decides nothing of what is measured.
    """

    config: RunConfig
    arms: tuple[ArmSpec, ...]
    benchmarks: tuple[BenchmarkConfig, ...]
    overrides: tuple[str, ...] = ()
    shard: tuple[int, int] = (0, 1)

    def resolved(self) -> dict[str, Any]:
        """All that decides what is measured, as JSON values: where it is written and read from is left out."""
        config = asdict(self.config)
        for key in ("run_dir", "data_dir", "source_dir", "method", "methods", "benchmark", "parts", "instead", "slurm"):
            del config[key]
        config["arms"] = [asdict(arm) for arm in self.arms]
        config["benchmarks"] = [asdict(benchmark) for benchmark in self.benchmarks]
        return config

    @property
    def hash(self) -> str:
        """sha256 of :meth:`resolved`, in hex."""
        return hashlib.sha256(json.dumps(self.resolved(), sort_keys=True).encode()).hexdigest()

    @property
    def run(self) -> str:
        """Name of the run, the same for the same configuration: two different ones never share a directory."""
        methods = "+".join(arm.name for arm in self.arms) if len(self.arms) <= 4 else f"{len(self.arms)}methods"
        parts = [self.config.drafter.name, self.config.engine.name, self.config.benchmark.name, methods, self.hash[:8]]
        return re.sub(r"[^A-Za-z0-9_.+-]", "_", "-".join(parts))

    @property
    def run_dir(self) -> Path:
        """Where records and run.json are written, absolute."""
        chosen = self.config.run_dir
        return (Path(chosen).expanduser() if chosen else Path("results", "runs", self.run)).absolute()


# ------------------------------------------------------------------------------------------------ from Hydra to a plan

Compose = Callable[[list[str]], DictConfig]
# Where a second composition puts the files of all methods and benchmarks of a run.
_ARMS, _MEMBERS = "arms_of_run", "benchmarks_of_run"


def resolve(
    cfg: DictConfig, overrides: Sequence[str], compose: Compose, note: Callable[[str], None] | None = None
) -> Plan:
    """Type the composed configuration and load every arm and benchmark it names.

    overrides: the command line's, as Hydra recorded them. compose: composes the root with other overrides.
    note: where to say that an option of a sweep does not apply to a method (single runs refuse instead).
    """
    from methods import METHODS

    config = typed(cfg)
    names = _method_names(config, overrides, list(METHODS))
    known = {name: [option.name for option in fields(METHODS[name])] for name in names if name != AR}
    options = _options(overrides, "method")
    for key, value in options.items():
        if not any(key in its for its in known.values()):
            told = f"method.{key}={value}: no option {key!r} in {', '.join(dict.fromkeys(names))}"
            if note is None:
                has = "; ".join(f"{name} has {', '.join(its) or 'none'}" for name, its in known.items())
                raise UserError(f"{told} ({has})")
            note(f"{told}, so it is left out")

    # One composition for the files of all arms and benchmarks: each costs a tenth of a second.
    more = [text for text in overrides if not re.match(r"[+~]*(method|methods|benchmark)[=.@]", text)]
    for name, its in known.items():
        more.append(f"+method@{_ARMS}.{name}={name}")
        more += [f"++{_ARMS}.{name}.{key}={value}" for key, value in options.items() if key in its]
    composed, members = cfg, list(config.benchmark.members)
    while known or members:
        composed = compose([*more, *_member_overrides(members, overrides)])
        files = {name: composed[_MEMBERS][name] for name in members}
        expanded = dict.fromkeys(each for name in members for each in files[name].get("members") or [name])
        if list(expanded) == members:
            break
        members = list(expanded)
    arms = tuple(ArmSpec(name, {} if name == AR else _method_options(composed, name)) for name in names)
    benchmarks = tuple(_member(composed, name) for name in members) or (config.benchmark,)
    if not all(benchmark.name for benchmark in benchmarks):
        raise UserError("no benchmark is chosen; give benchmark=<name>, fold-bench --help lists them")
    return Plan(config, arms, benchmarks, tuple(overrides))


def expand(cfg: DictConfig, overrides: Sequence[str], compose: Compose) -> list[tuple[DictConfig, list[str]]]:
    """The runs that a configuration stands for, each with its overrides: itself, or what an experiment's parts compose.

    A part is a list of overrides (conf/experiment/*.yaml), which may name another experiment. The command line's own
    are added to each part and win; a model on the command line keeps only the parts of that model.
    """
    if instead := OmegaConf.select(cfg, "instead"):
        raise UserError(f"no run makes this one: {instead}")
    parts = [[str(text) for text in part] for part in OmegaConf.to_container(cfg).get("parts") or []]  # type: ignore[union-attr]
    if not parts:
        return [(cfg, list(overrides))]
    mine = [text for text in overrides if not re.match(r"[+]*(experiment|model|parts)=", text)]
    chosen = [text for text in overrides if re.match(r"[+]*model=", text)]
    models = {text.partition("=")[2] for text in chosen}
    runs: list[tuple[DictConfig, list[str]]] = []
    for part in parts:
        nested = any(text.startswith("+experiment=") for text in part)
        of = {text.partition("=")[2] for text in part if text.startswith("+model=")}
        if nested or not models or models == of:
            # Hydra takes a group once only, and method= and methods= choose the same thing.
            given = {_chosen(text) for text in mine}
            its = [*(text for text in part if _chosen(text) not in given), *(chosen if nested else []), *mine]
            runs += expand(compose(its), its, compose)
    return runs


def _chosen(override: str) -> str:
    key = override.partition("=")[0].lstrip("+")
    return "methods" if key == "method" else key


def _member_overrides(members: Iterable[str], overrides: Sequence[str]) -> list[str]:
    """What composes the members of a benchmark group, each with the command line's benchmark options."""
    options = _options(overrides, "benchmark")
    more = []
    for name in members:
        more.append(f"+benchmark@{_MEMBERS}.{name}={name}")
        more += [f"++{_MEMBERS}.{name}.{key}={value}" for key, value in options.items()]
    return more


def _method_options(composed: DictConfig, name: str) -> dict[str, Any]:
    """The options of one method's file, interpolations resolved, its name left out."""
    try:
        options = OmegaConf.to_container(composed[_ARMS][name], resolve=True)
    except OmegaConfBaseException as error:
        raise UserError(f"method {name}: {str(error).splitlines()[0]}") from None
    assert isinstance(options, dict)
    return {str(key): value for key, value in options.items() if key != "name"}


def _member(composed: DictConfig, name: str) -> BenchmarkConfig:
    """One benchmark of a group."""
    parts = {key: composed[key] for key in ("target", "drafter", "engine")} | {"benchmark": composed[_MEMBERS][name]}
    return typed(OmegaConf.create(parts)).benchmark


def typed(cfg: DictConfig) -> RunConfig:
    """The configuration as :class:`RunConfig`. Raises UserError for an unknown, ill-typed or missing key."""
    try:
        merged = OmegaConf.merge(OmegaConf.structured(RunConfig), cfg)
        if missing := sorted(OmegaConf.missing_keys(merged)):
            raise UserError(
                f"no value for {', '.join(missing)}; give it on the command line or in its file below conf/"
            )
        OmegaConf.resolve(merged)
        return OmegaConf.to_object(merged)  # type: ignore[return-value]
    except OmegaConfBaseException as error:
        raise UserError(_schema_error(error, cfg)) from None


def _schema_error(error: OmegaConfBaseException, cfg: DictConfig) -> str:
    where = str(error.full_key or error.key or "")
    text = str(error.msg or error).splitlines()[0]
    if text.startswith("Key '"):
        return unknown_option(where)
    value = OmegaConf.select(cfg, where, default=None) if where else None
    return f"{where}={value}: {text[0].lower()}{text[1:]}" if where else text


def unknown_option(key: str) -> str:
    """The message for a key that the configuration does not have, with the names that are there."""
    group, _, name = key.partition(".")
    part = next((entry.default_factory for entry in fields(RunConfig) if entry.name == group and name), None)
    schema = part() if callable(part) and is_dataclass(part) else None
    if schema is None:
        return f"unknown option {key!r}; the configuration has {', '.join(entry.name for entry in fields(RunConfig))}"
    known = [entry.name for entry in fields(schema)]
    if name in known:
        return f"{key} is no option of the chosen {group}, whose file below conf/{group}/ lists what it has"
    return f"unknown option {key!r}; {group} has {', '.join(known)}"


def _options(overrides: Sequence[str], group: str) -> dict[str, str]:
    """The "group.key=value" overrides among `overrides`; a later one wins."""
    found = (re.match(rf"[+~]*{group}\.([\w.]+)=(.*)", text, re.DOTALL) for text in overrides)
    return {match.group(1): match.group(2) for match in found if match}


def _method_names(config: RunConfig, overrides: Sequence[str], valid: list[str]) -> list[str]:
    chosen = config.method.get("name")
    if chosen is not None:
        if any(re.match(r"[+~]*methods=", text) for text in overrides):
            raise UserError("both method= and methods= are given; use method= for one and methods=[a,b] for several")
        names = [chosen]
    elif config.methods == "all":
        names = valid
    elif isinstance(config.methods, list) and config.methods:
        names = [str(name) for name in config.methods]
    else:
        raise UserError(f"methods={config.methods!r}: give a list, for example methods=[original,fold], or methods=all")
    if unknown := [name for name in names if name not in (AR, *valid)]:
        raise UserError(f"unknown method {unknown[0]!r}; choose from {', '.join((AR, *valid))}")
    return names


# ------------------------------------------------------------------------------------------------- what this machine
# has


def check(plan: Plan, here: bool = True) -> None:
    """Refuse, before any model loads, what cannot run: options, engine, device, a block size the drafter lacks.

    here: whether it is this machine that will run it; a login node has neither the GPU nor, maybe, the engine.
    """
    config = plan.config
    target, drafter, engine = config.target, config.drafter, config.engine
    _positive(
        {
            "drafter.block": drafter.block,
            "drafter.window": drafter.window,
            "drafter.train_length": drafter.train_length,
            "target.max_context": target.max_context,
            "engine.prefill_chunk": engine.prefill_chunk,
            "engine.threads": engine.threads,
        }
    )
    for benchmark in plan.benchmarks:
        _positive({"benchmark.n": benchmark.n, "benchmark.max_new_tokens": benchmark.max_new_tokens})
    for key, value in {"warmup_tokens": config.warmup_tokens, "drift_requests": config.drift_requests}.items():
        if value < 0:
            raise UserError(f"{key}={value}: must not be negative")
    if config.max_gap is not None and not 0 <= config.max_gap < math.inf:
        raise UserError(f"max_gap={config.max_gap}: must not be negative, nor infinite")
    if not 0 < engine.gpu_memory <= 1:
        raise UserError(f"engine.gpu_memory={engine.gpu_memory}: must be a share above 0, at most 1")
    if engine.kv_cache_gib is not None and not 0 < engine.kv_cache_gib < math.inf:
        raise UserError(f"engine.kv_cache_gib={engine.kv_cache_gib}: must be above 0")
    _one_of("engine.name", engine.name, ENGINES)
    _one_of("engine.device", engine.device, ("auto", "cpu", "cuda"))
    _one_of("engine.dtype", engine.dtype, ("auto", "float32", "bfloat16", "float16"))
    _one_of("drafter.family", drafter.family, tuple(FAMILIES))
    _one_of("weights", config.weights, ("checkpoint", RANDOM))
    if drafter.target != target.name:
        raise UserError(f"drafter {drafter.name} was trained for target {drafter.target}, not {target.name}; set both")
    make_arms(plan.arms)
    _check_weights(plan)
    if here:
        _check_engine(engine, target)
    _check_block(drafter, config.weights)


def make_arms(arms: Iterable[ArmSpec]) -> list[tuple[str, Any | None, dict[str, Any]]]:
    """(name, method object, options) of each arm; None for AR. Raises UserError for an option out of range."""
    from methods import make_method

    made: list[tuple[str, Any | None, dict[str, Any]]] = []
    for arm in arms:
        try:
            method = None if arm.name == AR else make_method(arm.name, **arm.options)
        except ValueError as error:
            raise UserError(str(error)) from None
        made.append((arm.name, method, arm.options))
    return made


def _check_engine(engine: EngineConfig, target: TargetConfig) -> None:
    if engine.name != "reference":
        _check_version(engine)
    import torch

    gpu = torch.cuda.is_available()
    if engine.device == "cuda" and not gpu:
        raise UserError(
            "engine.device=cuda: torch sees no GPU on this machine; use engine.device=cpu or a machine with one"
        )
    if engine.name == "sglang" and not gpu:
        raise UserError(
            "engine sglang needs a GPU and torch sees none on this machine; use engine=reference or engine=vllm"
        )
    if target.needs_gpu and not gpu and engine.device != "cpu":
        raise UserError(
            f"target {target.name} needs a GPU and torch sees none on this machine; run it on one, or drop +model= for "
            "the demo pair (engine.device=cpu runs it on the CPU all the same, very slowly)"
        )


def _check_version(engine: EngineConfig) -> None:
    from harness.engines import TESTED, installed_version

    found, tested = installed_version(engine.name), TESTED[engine.name]
    if found is None:
        raise UserError(
            f"engine {engine.name} is not installed: pip install -e '.[{engine.name}]' in the checkout, with a virtual "
            "environment of its own, or use engine=reference"
        )
    if found not in (tested, engine.allow_version):
        raise UserError(
            f"engine {engine.name} is version {found}, and this package builds on the insides of {tested}: pip install "
            f"{engine.name}=={tested}, or try the one you have with engine.allow_version={found}"
        )


def _check_weights(plan: Plan) -> None:
    """Random weights decode random token ids in the reference engine, and nothing else decodes those."""
    config, made = plan.config, [benchmark.loader == RANDOM for benchmark in plan.benchmarks]
    if config.weights != RANDOM:
        if any(made):
            raise UserError("benchmark=random is token ids without meaning: it needs weights=random")
        return
    if not all(made):
        raise UserError("weights=random has no tokenizer and decodes random token ids: add benchmark=random")
    if config.engine.name != "reference":
        raise UserError(f"weights=random runs in the reference engine, not in {config.engine.name}: engine=reference")
    for kind, name, shapes in (
        ("target", config.target.name, config.target.architecture),
        ("drafter", config.drafter.name, config.drafter.architecture),
    ):
        if not shapes:
            raise UserError(f"weights=random: {kind} {name} has no {kind}.architecture; choose a pair with +model=")
    for benchmark in plan.benchmarks:
        for level in benchmark.levels:
            try:
                length_in_tokens(level)
            except ValueError as error:
                raise UserError(f"benchmark.levels: {error}") from None


def _check_block(drafter: DrafterConfig, weights: str) -> None:
    from harness.drafters import DrafterError, parse_config, read_config

    try:
        if weights == RANDOM:
            found = parse_config(drafter.architecture, where="drafter.architecture", block=drafter.block)
        else:
            found = read_config(drafter.folder_or_id, revision=drafter.revision, block=drafter.block)
    except DrafterError as error:
        raise UserError(f"drafter {drafter.name}: {error}") from None
    if found.proposals != drafter.proposals:
        raise UserError(
            f"drafter.family={drafter.family} means {drafter.proposals} proposals for B = {drafter.block}, but the "
            f"checkpoint is of a family that makes {found.proposals}; the families are {', '.join(FAMILIES)}"
        )


def _positive(values: dict[str, int | None]) -> None:
    for key, value in values.items():
        if value is not None and value < 1:
            raise UserError(f"{key}={value}: must be at least 1")


def _one_of(key: str, value: str, valid: Sequence[str]) -> None:
    if value not in valid:
        raise UserError(f"{key}={value}: choose one of {', '.join(valid)}")
