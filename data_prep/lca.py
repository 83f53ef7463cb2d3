"""Project-level code completion as the paper builds it from Long Code Arena (Appendix B.2).

A Python file is cut before the first line that uses a function or class from its repository and has at least 50 lines
before it. The other Python files stand before the prefix, each headed by a comment with its path, the nearest in the
directory tree last; files are added from the nearest until the input has exactly N tokens, so the farthest loses its
start. `repository_input` is the only implementation: the demo builds its inputs over the standard library with it.

Choices the paper leaves open, also written to every manifest (CHOICES): the header is "# <path>", the prefix has one
too, a BOS counts among the N tokens, ties in distance are broken by path, the truncation may eat the farthest header.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from data_prep.job import Job, Prompt, Row, at
from data_prep.rows import read_parquet
from data_prep.select import NoExamples, PrepError
from data_prep.tokens import encode_pieces, raw_prefix
from harness.requests import required_context

MIN_LINES_BEFORE_CUT = 50
CHOICES = {
    "file header": "# <path>, also above the prefix of the cut file",
    "special tokens": "the tokenizer's own prefix (a BOS or nothing) counts among the N tokens",
    "ties in distance": "by path",
    "truncation": "token-exact from the start of the farthest added file, its header included",
    "prefix longer than N": "not eligible",
}
# Files are encoded in batches of this many characters: enough to keep the tokenizer's threads busy, little memory.
_BATCH_CHARS = 400_000


def first_cut(uses: Iterable[int], n_lines: int) -> int | None:
    """The 0-based line to cut before: the first of `uses` with at least 50 lines before it, None if there is none.

    Line n has exactly n lines before it (`text.split("\\n")`, as lca-baselines' datapoint_base.py counts), so n >= 50.
    """
    return min((n for n in uses if MIN_LINES_BEFORE_CUT <= n < n_lines), default=None)


def tree_distance(path: str, other: str) -> int:
    """Steps between two files in the directory tree: the parts of both paths beyond their shared leading folders.

    Same measure as lca-baselines' path_distance_composer.py, which subtracts a constant: files of one folder are 2
    apart, a file one folder up is 3 away.
    """
    a, b = path.split("/"), other.split("/")
    shared = 0
    while shared < min(len(a), len(b)) - 1 and a[shared] == b[shared]:
        shared += 1
    return len(a) + len(b) - 2 * shared


def repository_input(
    tokenizer: Any, path: str, text: str, cut: int, others: Iterable[tuple[str, str]], lengths: Sequence[int]
) -> dict[int, tuple[int, ...] | str]:
    """Build the inputs of one example at several lengths.

    path, text, cut: the file to complete and the 0-based line before which it is cut. others: (path, content) of the
    repository's files; only .py files with content other than `path` itself are used. lengths: tokens wanted.
    Returns for each length the ids, exactly that many, or the reason why the example is not eligible.
    Every length is a tail of the same sequence, because the farthest file is the one that is cut, from its start.
    """
    special = raw_prefix(tokenizer)
    prefix = "".join(f"{line}\n" for line in text.split("\n")[:cut])
    prefix_ids = encode_pieces(tokenizer, [_with_header(path, prefix)])[0]
    usable = [
        (name, content)
        for name, content in others
        if name.endswith(".py") and name != path and content and content.strip()
    ]
    usable.sort(key=lambda file: (tree_distance(path, file[0]), file[0]))

    wanted = max(lengths) - len(special)
    pieces, total, position = [prefix_ids], len(prefix_ids), 0
    while total < wanted and position < len(usable):
        batch: list[str] = []
        enough = min(_BATCH_CHARS, 3 * (wanted - total))  # a token of code has more than 3 characters, mostly
        while position < len(usable) and (not batch or sum(map(len, batch)) < enough):
            batch.append(_with_header(*usable[position]))
            position += 1
        for ids in encode_pieces(tokenizer, batch):
            pieces.append(ids)
            total += len(ids)
    whole = [token for ids in reversed(pieces) for token in ids]

    results: dict[int, tuple[int, ...] | str] = {}
    for length in lengths:
        room = length - len(special)
        if len(prefix_ids) >= room:
            results[length] = "prefix fills the whole input"
        elif total < room:
            results[length] = "repository shorter than the input"
        else:
            results[length] = (*special, *whole[total - room :])
    return results


def prompts(job: Job) -> Iterator[Prompt]:
    """Every eligible example at every length, in the order of the data set; the first n of each length if n is set.

    options.lengths: tokens of each task. options.lines: "raw" cuts at completion_lines_raw, "sampled" at
    completion_lines, which holds a sample of at most about ten lines a category and so gives later cuts.
    Peak memory is that of one example: rows are streamed one by one from files of gigabytes.
    """
    options = job.options(lengths={}, lines="raw")
    config, limit = job.config, job.target.max_context
    lengths: dict[str, int] = options["lengths"]
    well_formed = isinstance(lengths, dict) and all(type(n) is int and n > 0 for n in lengths.values())
    if options["lines"] not in ("raw", "sampled") or not well_formed or set(config.tasks) - lengths.keys():
        raise PrepError(
            f"benchmark {config.name}: options.lines is raw or sampled, options.lengths gives the tokens of every task"
        )
    fitting = [task for task in config.tasks if required_context(lengths[task], config.max_new_tokens) <= limit]
    if not fitting:
        raise NoExamples(f"{config.name}: no length fits the {limit} tokens of {job.target.name}; leave it out")
    job.facts["choices"] = {**CHOICES, "cut": f"first {options['lines']} inproject line with index >= 50"}
    lines = "completion_lines_raw" if options["lines"] == "raw" else "completion_lines"
    columns = ["repo", "commit_hash", "completion_file", f"{lines}.inproject", "repo_snapshot"]

    taken: Counter[str] = Counter()
    for file in job.files:
        for number, values in read_parquet(file.path, columns, batch_size=1):
            wanted = [task for task in fitting if config.n is None or taken[task] < config.n]
            if not wanted:
                return
            for task in set(config.tasks) - set(fitting):
                job.counts.exclude(task, f"needs more than {limit} tokens of context")
            for prompt in _example(job, Row(values, file.path, number), lines, {t: lengths[t] for t in wanted}):
                taken[prompt.task] += 1
                yield prompt


def _example(job: Job, row: Row, lines: str, lengths: dict[str, int]) -> Iterator[Prompt]:
    with at(row):
        path, text = row.values["completion_file"]["filename"], row.values["completion_file"]["content"]
        uses = row.values[lines]["inproject"] or []
        names, contents = row.values["repo_snapshot"]["filename"], row.values["repo_snapshot"]["content"]
        name = f"{row.text('repo')}@{row.text('commit_hash')}:{path}"
        if not isinstance(path, str) or not path or not isinstance(text, str):
            raise row.error("completion_file has no name or no content")
        if len(names) != len(contents):
            raise row.error(f"repo_snapshot has {len(names)} names and {len(contents)} contents")
        if not all(isinstance(file, str) for file in names):
            raise row.error("repo_snapshot has a file without a name")
        if not all(content is None or isinstance(content, str) for content in contents):
            raise row.error("repo_snapshot has a content that is not text")
        cut = first_cut(uses, len(text.split("\n")))
    if cut is None:
        for task in lengths:
            job.counts.exclude(task, "no line to cut before")
        return
    others = zip(names, contents, strict=True)
    built = repository_input(job.tokenizer, path, text, cut, others, list(lengths.values()))
    for task, length in lengths.items():
        ids = built[length]
        if isinstance(ids, str):
            job.counts.exclude(task, ids)
        else:
            meta = {"source_id": name, "level": f"{length // 1024}K", "cut_line": cut}
            yield Prompt(f"{name}@{task}", task, meta, ids=ids)


def _with_header(path: str, content: str) -> str:
    # The piece ends with a newline so that pieces can be tokenised one by one: no tokenizer merges across "\n" + "#".
    return f"# {path}\n{content}" + ("" if content.endswith("\n") else "\n")
