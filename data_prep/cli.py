"""fold-prep: build request files, list the benchmarks, compare what was built with the paper's Table 7.

fold-prep +model=llama benchmark=lbv2      one benchmark, or a group: all, general, code, speed, demo
fold-prep target=llama benchmark=all       the same files: they depend on the target, not on the drafter
fold-prep ... source=DIR                   data set files from a folder instead of the Hub: those in
                                           DIR/<benchmark>/ or DIR/<data set's name>/, else anywhere in DIR;
                                           upstream prompt files in DIR/prompts/
fold-prep ... data_dir=DIR                 where request files go
fold-prep --list                           benchmarks, tasks, licences, sizes
fold-prep --check [target=llama]           counts and lengths of the request files beside the paper's
"""

from __future__ import annotations

import argparse
import csv
import re
import sys
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any, NoReturn

import hydra
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from data_prep.config import BenchmarkConfig
from data_prep.demo.target import TargetUnavailable, default_cache_dir, ensure_target
from data_prep.select import NoExamples, PrepError
from harness.cli import hydra_error
from harness.config import RunConfig, TargetConfig, UserError, typed
from harness.requests import RequestFileError, load_manifest, request_path

OK, FAILED, MISTAKE, INTERRUPTED = 0, 1, 2, 130
# What tokenisation needs of a checkpoint; the weights stay where they are.
_TOKENIZER_FILES = ["tokenizer*", "*.jinja", "vocab*", "merges*", "special_tokens_map.json", "*config.json"]
_TABLE7 = Path(__file__).parents[1] / "results" / "paper" / "table7.csv"
# Columns of Table 7, by the target's name in conf/target.
_MODELS = {"llama": "Llama-3.1-8B", "qwen35": "Qwen3.5-9B", "gemma": "Gemma-4-12B"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run fold-prep and return its exit code: 0 done, 1 part of a group could not be prepared, 2 a user mistake."""
    try:
        return _main(list(sys.argv[1:] if arguments is None else arguments))
    except (UserError, PrepError, TargetUnavailable, RequestFileError) as error:
        _say(str(error))
        return MISTAKE
    except KeyboardInterrupt:
        _say("interrupted; the same command starts the unfinished benchmark again")
        return INTERRUPTED


def _main(arguments: list[str]) -> int:
    parser = _Parser(prog="fold-prep", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="list the benchmarks and stop")
    parser.add_argument("--check", action="store_true", help="compare the request files with the paper's Table 7")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="as for fold-bench: target=, benchmark=, ...")
    options = parser.parse_intermixed_args(arguments)
    overrides = [_spelled(text) for text in options.overrides]
    with hydra.initialize_config_module("conf", version_base="1.3"):
        if options.list:
            return _list()
        config = _compose(overrides)
        if options.check:
            return _check(config)
        return _prepare(config, benchmarks_of(config, overrides))


class _Parser(argparse.ArgumentParser):
    """Mistakes in one line, like all others, and not as argparse's usage."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; see fold-prep --help")


def _say(text: str) -> None:
    print(f"fold-prep: {' '.join(text.split())}", file=sys.stderr)


# ------------------------------------------------------------------------------------------------------ configuration


def _spelled(text: str) -> str:
    """Overrides as users write them, in the configuration's spelling."""
    if "=" not in text:
        raise UserError(f"{text!r} is not key=value; see fold-prep --help")
    text = re.sub(r"^source=", "source_dir=", text)
    return re.sub(r"^model=", "+model=", text)


def _compose(overrides: list[str]) -> RunConfig:
    try:
        return typed(hydra.compose("config", overrides=overrides))
    except (HydraException, OmegaConfBaseException) as error:
        raise UserError(hydra_error(error)) from None


def benchmarks_of(config: RunConfig, overrides: list[str]) -> list[BenchmarkConfig]:
    """The benchmark, or the members of a group, their members and so on, each with the command line's options."""
    if not config.benchmark.members:
        return [config.benchmark]
    others = [text for text in overrides if not re.match(r"[+~]*benchmark=", text)]
    found: list[BenchmarkConfig] = []
    for name in config.benchmark.members:
        choice = [*others, f"benchmark={name}"]
        found += benchmarks_of(_compose(choice), choice)
    return found


# ---------------------------------------------------------------------------------------------------------- preparing


def _prepare(config: RunConfig, benchmarks: list[BenchmarkConfig]) -> int:
    # A mistake in the configuration should not wait for transformers to be imported.
    from huggingface_hub.utils import logging as hub_logging
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
    from transformers import AutoTokenizer

    from data_prep.prepare import prepare
    from data_prep.tokens import TargetSpec, stop_ids_of

    hub_logging.set_verbosity_error()  # its retries, each in a line of its own; the outcome is told in one
    target = config.target
    folder = _tokenizer_folder(target)
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError) as error:
        raise UserError(f"{folder} holds no usable tokenizer ({error}); correct target.source") from None
    spec = TargetSpec(
        target.name, target.max_context, stop_ids_of(folder, tokenizer), target.chat_template_kwargs,
        target.revision or "",
    )  # fmt: skip
    source = Path(config.source_dir).expanduser() if config.source_dir else None
    data_dir = _data_dir(config)
    failed = 0
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        for benchmark in benchmarks:
            bar = progress.add_task(f"{benchmark.name} for {target.name}", total=None)

            def count(_: Any, bar: Any = bar) -> None:
                progress.advance(bar)

            try:
                path = prepare(benchmark, tokenizer, spec, data_dir, source, count, check_sources=True)
                progress.console.print(_summary(path), highlight=False, soft_wrap=True)
            except NoExamples as nothing:
                if len(benchmarks) == 1:
                    raise
                # In a group this is expected: inputs of 180K tokens and a limit of 128K.
                progress.console.print(f"{benchmark.name}: left out, {nothing}", highlight=False, soft_wrap=True)
            except PrepError as error:
                if len(benchmarks) == 1:
                    raise
                failed += 1
                progress.console.print(f"{benchmark.name}: {error}", highlight=False, soft_wrap=True)
            progress.remove_task(bar)
    if failed:
        _say(f"{failed} of {len(benchmarks)} benchmarks could not be prepared")
    return FAILED if failed else OK


def _data_dir(config: RunConfig) -> Path:
    return Path(config.data_dir).expanduser() if config.data_dir else default_cache_dir() / "requests"


def _tokenizer_folder(target: TargetConfig) -> Path:
    """A local folder with the target's tokenizer and generation configuration, fetched without the weights."""
    if target.source == "demo":
        return ensure_target()
    if (local := Path(target.source).expanduser()).is_dir():
        return local
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(target.source, revision=target.revision, allow_patterns=_TOKENIZER_FILES))
    except Exception as error:  # httpx's, the client's and the system's errors alike: the user needs one line
        reason = " ".join(str(error).split())[:160] or type(error).__name__
        raise UserError(
            f"the tokenizer of {target.source} at {target.revision} cannot be fetched ({reason}); give a local copy "
            "with target.source=<folder>, or accept its licence and log in to the Hub"
        ) from None


def _summary(path: Path) -> str:
    manifest = load_manifest(path)
    low, high = manifest["prompt_tokens"]
    lines = [f"{manifest['benchmark']}: {manifest['count']} requests of {low:,} to {high:,} tokens in {path}"]
    for task, counts in manifest["counts"].items():
        for reason, number in counts["excluded"].items():
            lines.append(f"  {task}: {number} of {counts['in']} left out: {reason}")
    return "\n".join(lines)


# -------------------------------------------------------------------------------------------------- listing, checking


def _list() -> int:
    for name in _names():
        benchmark = _published_form(name)
        if benchmark.members:
            print(f"{name:20} group: {', '.join(benchmark.members)}")
            continue
        sources = benchmark.sources
        origin = "; ".join(dict.fromkeys(f"{s.repo}@{s.revision[:8]}" for s in sources)) or "made on this machine"
        facts = [f"up to {benchmark.max_new_tokens} new tokens", "chat" if benchmark.chat else "raw text", origin]
        facts += dict.fromkeys(text for s in sources for text in (s.licence, s.size, s.gated) if text)
        print(f"{name:20} {', '.join(benchmark.tasks)}: {'; '.join(facts)}")
    return OK


def _published_form(name: str) -> BenchmarkConfig:
    """conf/benchmark/<name>.yaml alone, without anybody's overrides."""
    composed = hydra.compose(f"benchmark/{name}").benchmark
    return OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(BenchmarkConfig), composed))  # type: ignore[return-value]


def _names() -> list[str]:
    """Benchmarks first, groups last."""
    folder = files("conf").joinpath("benchmark")
    names = sorted(file.name.removesuffix(".yaml") for file in folder.iterdir() if file.name.endswith(".yaml"))
    return sorted(names, key=lambda name: "members:" in folder.joinpath(f"{name}.yaml").read_text(encoding="utf-8"))


def _check(config: RunConfig) -> int:
    """Ours beside the paper's: requests and shortest to longest input, for every prepared task of the target."""
    model = _MODELS.get(config.target.name, "")
    published = _published(model)
    prepared = 0
    for name in _names():
        benchmark = _published_form(name)
        path = request_path(_data_dir(config), name, config.target.name)
        if benchmark.members or not path.exists():
            continue
        if not prepared:
            print(f"{'task':18} {'ours':>6} {'paper':>6}  {'input length':22} {'paper':14} left out")
        prepared += 1
        manifest = load_manifest(path)
        ranges = _ranges(path)
        for task, counts in manifest["counts"].items():
            paper = published.get(_row_key(task), {})
            ours = ranges.get(task)
            span = f"{ours[0]:,} to {ours[1]:,}" if ours else "-"
            left = "; ".join(f"{number} {reason}" for reason, number in counts["excluded"].items())
            print(
                f"{task:18} {counts['kept']:>6} {paper.get('n', '-'):>6}  {span:22} "
                f"{paper.get('Input length', '-'):14} {left}"
            )
    if not prepared:
        target = config.target.name
        raise UserError(
            f"no request file for {target} in {_data_dir(config)}; run fold-prep target={target} benchmark=all"
        )
    if not model:
        print(f"the paper has no column for {config.target.name}; it has {', '.join(_MODELS)}")
    else:
        print(
            "The paper also leaves out requests used in development, without naming them: its n can be lower than ours."
        )
    return OK


def _ranges(path: Path) -> dict[str, tuple[int, int]]:
    from harness.requests import read_requests

    found: dict[str, tuple[int, int]] = {}
    for request in read_requests(path):
        size = len(request.prompt_ids)
        low, high = found.get(request.task, (size, size))
        found[request.task] = (min(low, size), max(high, size))
    return found


def _published(model: str) -> dict[str, dict[str, str]]:
    """{row of Table 7: {column: value as printed}} for one model."""
    try:
        with _TABLE7.open(encoding="utf-8", newline="") as stream:
            cells = [row for row in csv.DictReader(stream) if row["group"] == model]
    except OSError as error:
        raise UserError(
            f"{_TABLE7}: {error.strerror}; fold-prep --check needs the repository's results folder"
        ) from None
    rows: dict[str, dict[str, str]] = {}
    for cell in cells:
        rows.setdefault(_row_key(cell["row"]), {})[cell["column"]] = cell["value"] + cell["mark"]
    return rows


def _row_key(name: str) -> str:
    """ "LCA 32K" and "lca_32k" are the same row."""
    return re.sub(r"[^a-z0-9]", "", name.casefold())


if __name__ == "__main__":
    sys.exit(main())
