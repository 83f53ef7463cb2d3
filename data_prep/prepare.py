"""Build a benchmark's request file for one target: load, select, tokenise, apply the context rule, write."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any

from filelock import FileLock
from jinja2 import TemplateError

from data_prep import gov, infinitebench, lbv2, lca, repobench, speedbench, swebench
from data_prep.config import BenchmarkConfig
from data_prep.demo.benchmarks import PYTHON, demo_prompts
from data_prep.fetch import fetch
from data_prep.job import Job, Prompt
from data_prep.select import NoExamples, PrepError, read_exclude_list
from data_prep.tokens import TargetSpec, encode_chats, encode_pieces, raw_prefix, tokenizer_sha256
from harness.requests import (
    Request,
    RequestFileError,
    load_manifest,
    request_path,
    required_context,
    verify_file,
    write_requests,
)

# Raised when the same configuration would give other requests; files of an older number are built again.
BUILDER_VERSION = 1
# Prompts encoded together: enough for the tokenizer's threads; at 256K tokens each it is still little memory.
_BATCH = 8


def _demo(job: Job) -> Iterator[Prompt]:
    config = job.config
    job.options()
    job.facts["python"] = PYTHON
    if config.n is None:
        raise PrepError(f"{config.name}: benchmark.n must say how many examples per level to build")
    if not config.levels:
        raise PrepError(f"{config.name}: benchmark.levels is empty; give at least one, for example [1K]")
    yield from demo_prompts(config.name, config.levels, config.n, job.tokenizer, job.target)


LOADERS: dict[str, Callable[[Job], Iterator[Prompt]]] = {
    "demo": _demo,
    "gov": gov.prompts,
    "lbv2": lbv2.prompts,
    "infinitebench": infinitebench.prompts,
    "generated_kv": infinitebench.generated,
    "lca": lca.prompts,
    "repobench": repobench.prompts,
    "swebench": swebench.prompts,
    "speedbench": speedbench.prompts,
}


def prepare(
    benchmark: BenchmarkConfig,
    tokenizer: Any,
    target: TargetSpec,
    data_dir: Path | str,
    source: Path | None = None,
    on_request: Callable[[Request], None] | None = None,
    check_sources: bool = False,
) -> Path:
    """Return the benchmark's request file for `target`, building it unless a valid one of the same recipe exists.

    tokenizer: a fast `transformers` tokenizer. source: folder with the data set's files instead of the Hub.
    on_request: called with each request, for progress. check_sources: also look at the data set's files when the
    request file exists (they need not be there otherwise). Safe to call from several processes at once.
    Raises PrepError with one line for anything the user can mend; nothing half-written is left behind.
    """
    if benchmark.members:
        raise PrepError(f"benchmark {benchmark.name} is a group; prepare its members: {', '.join(benchmark.members)}")
    if benchmark.loader not in LOADERS:
        raise PrepError(f"benchmark {benchmark.name}: no loader {benchmark.loader!r}; there are {', '.join(LOADERS)}")
    if not tokenizer.is_fast:
        raise PrepError(
            f"target {target.name} has no fast tokenizer (tokenizer.json); give a copy with one: target.source="
        )
    _refuse_numbers(benchmark)
    path = request_path(data_dir, benchmark.name, target.name)
    recipe = _recipe(benchmark, tokenizer, target)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(path.with_name(f".{path.name}.lock")):
            current = _current_manifest(path, recipe)
            if current is not None and not (check_sources and _within_reach(current, source)):
                return path
            files = fetch(benchmark.name, benchmark.sources, source)
            if current is None or current["sources"] != [file.facts() for file in files]:
                _build(path, recipe, Job(benchmark, tokenizer, target, files, source), on_request)
    except OSError as error:
        where = error.filename or path
        raise PrepError(f"{where}: {error.strerror or error}; choose another data_dir or make room") from error
    return path


def _refuse_numbers(benchmark: BenchmarkConfig) -> None:
    """Numbers that would not fail, but select something else: a slice up to -1 keeps all but one."""
    for key, least in (("n", 1), ("min_prompt_tokens", 0)):
        value = getattr(benchmark, key)
        if value is not None and value < least:
            raise PrepError(f"benchmark.{key}={value} for {benchmark.name}: must be at least {least}")


def prepare_demo(
    benchmark: str,
    tokenizer: Any,
    target_name: str,
    data_dir: Path | str,
    n: int = 4,
    max_new_tokens: int = 64,
    max_context: int = 8192,
    stop_ids: tuple[int, ...] | None = None,
) -> Path:
    """Request file of one demo benchmark (demo_code, demo_docs, demo_kv, demo_copy) at 1K, 2K, 4K and 7K tokens.

    n: examples per level. stop_ids: the tokenizer's EOS unless given. See `prepare` for the errors.
    """
    config = BenchmarkConfig(
        name=benchmark,
        loader="demo",
        tasks=[benchmark],
        max_new_tokens=max_new_tokens,
        chat=benchmark in ("demo_docs", "demo_kv"),
        n=n,
        levels=["1K", "2K", "4K", "7K"],
    )
    stops = stop_ids if stop_ids is not None else (tokenizer.eos_token_id,)
    return prepare(config, tokenizer, TargetSpec(target_name, max_context, stops), data_dir)


def _recipe(benchmark: BenchmarkConfig, tokenizer: Any, target: TargetSpec) -> dict[str, Any]:
    """Everything that decides what the requests are, as JSON values; another recipe means building again."""
    recipe: dict[str, Any] = {
        "builder": BUILDER_VERSION,
        "benchmark": asdict(benchmark),
        "excluded_ids": sorted(read_exclude_list(benchmark.exclude)),
        "target": {
            "name": target.name,
            "max_context": target.max_context,
            "stop_ids": list(target.stop_ids),
            "chat_template_kwargs": dict(target.chat_template_kwargs),
            "tokenizer_revision": target.revision,
            "tokenizer_sha256": tokenizer_sha256(tokenizer),
        },
    }
    if benchmark.loader == "demo":
        recipe["python"] = PYTHON
    return recipe


def _current_manifest(path: Path, recipe: dict[str, Any]) -> dict[str, Any] | None:
    """The manifest of a valid request file of this recipe, else None."""
    try:
        manifest = load_manifest(path)
        if manifest.get("recipe") != recipe or not _complete(manifest):
            return None
        return verify_file(path)
    except RequestFileError:
        return None


def _complete(manifest: dict[str, Any]) -> bool:
    """Whether the manifest has what is read from it later; where an edited one has not, the file is built again."""
    sources, counts, lengths = (manifest.get(key) for key in ("sources", "counts", "prompt_tokens"))
    return (
        isinstance(sources, list)
        and all(isinstance(file, dict) and "revision" in file for file in sources)
        and isinstance(counts, dict)
        and isinstance(lengths, list)
    )


def _within_reach(manifest: dict[str, Any], source: Path | None) -> bool:
    """Whether the data set's files can be looked at again: those of a local copy only if it is given again."""
    return source is not None or all(file["revision"] != "local" for file in manifest["sources"])


def _build(path: Path, recipe: dict[str, Any], job: Job, on_request: Callable[[Request], None] | None) -> None:
    for leftover in path.parent.glob(f".{path.name}.*.partial"):
        leftover.unlink(missing_ok=True)  # of a killed preparation; the lock says that nobody is writing it
    manifest: dict[str, Any] = {
        "recipe": recipe,
        "benchmark": job.config.name,
        "target": job.target.name,
        "sources": [file.facts() for file in job.files],
    }

    def requests() -> Iterator[Request]:
        for request in _requests(job):
            if on_request is not None:
                on_request(request)
            yield request
        if not job.counts.as_dict():
            # Not NoExamples, which a group passes over: an empty file is a mistake.
            raise PrepError(
                f"{job.config.name}: no row of its data is used; {', '.join(str(file.path) for file in job.files)} "
                "holds none, or none of the tasks and levels asked for; fetch the data again or correct benchmark="
            )
        if unknown := sorted(set(job.config.tasks) - job.counts.as_dict().keys()):
            has = ", ".join(job.counts.as_dict())
            raise PrepError(f"benchmark.tasks: {job.config.name} has no row of {', '.join(unknown)}, only {has}")
        if not job.counts.kept:
            why = "; ".join(f"{task}: {rules['excluded']}" for task, rules in job.counts.as_dict().items())
            raise NoExamples(f"{job.config.name}: no example is left for {job.target.name} ({why or 'no rows'})")
        # Facts and counts are complete only now; write_requests reads the manifest after the last request.
        manifest.update(job.facts, counts=job.counts.as_dict())

    try:
        write_requests(path, requests(), manifest)
    except RequestFileError as error:
        raise PrepError(f"{error}; its data is damaged, or lies twice below source=: fetch it again") from None


def _requests(job: Job) -> Iterator[Request]:
    """Tokenise the loader's prompts in batches and apply the rules that need lengths."""
    config, target, counts = job.config, job.target, job.counts
    excluded = read_exclude_list(config.exclude)
    prompts = LOADERS[config.loader](job)
    while batch := list(islice(prompts, _BATCH)):
        # Some loaders have one task and do not look at what is asked for.
        if foreign := {prompt.task for prompt in batch} - set(config.tasks):
            asked = ",".join(config.tasks)
            raise PrepError(f"benchmark.tasks=[{asked}]: {config.name} has {', '.join(sorted(foreign))}")
        for prompt, ids in zip(batch, _encode(batch, job), strict=True):
            if prompt.id in excluded or prompt.meta.get("source_id") in excluded:
                counts.exclude(prompt.task, "exclude list")
            elif required_context(len(ids), config.max_new_tokens) > target.max_context:
                counts.exclude(prompt.task, f"needs more than {target.max_context} tokens of context")
            elif len(ids) < config.min_prompt_tokens:
                counts.exclude(prompt.task, f"shorter than {config.min_prompt_tokens} tokens")
            else:
                counts.keep(prompt.task)
                meta = {"length": len(ids), **prompt.meta}
                try:
                    request = Request(
                        prompt.id, config.name, prompt.task, ids, config.max_new_tokens, target.stop_ids, meta
                    )
                except ValueError as error:  # nothing to generate, or a template that yields nothing
                    raise PrepError(f"{config.name} for {target.name}, example {prompt.id}: {error}") from None
                yield request


def _encode(batch: list[Prompt], job: Job) -> list[tuple[int, ...]]:
    texts = [prompt.text for prompt in batch if prompt.text is not None]
    try:
        if job.config.chat:
            encoded = iter(encode_chats(job.tokenizer, texts, job.target.chat_template_kwargs))
        else:
            special = raw_prefix(job.tokenizer)
            encoded = ([*special, *ids] for ids in encode_pieces(job.tokenizer, texts))
    except (ValueError, TemplateError) as error:
        raise PrepError(f"{job.config.name} for {job.target.name}: {' '.join(str(error).split())}") from None
    return [prompt.ids if prompt.ids is not None else tuple(next(encoded)) for prompt in batch]
