"""The demo's benchmarks: long inputs that every machine with Python already has.

demo_code: repository completion over the standard library, built by data_prep.lca exactly as the paper builds its Long
Code Arena inputs; a line counts as a use if it names a function or class that another file of the package defines.
demo_docs: the standard library's documentation with a request for a summary or for quotations, chat template.
demo_kv: key-value retrieval of InfiniteBench's form, chat template. demo_copy: a document, then the first tokens of a
passage that lies far back in it, raw: the greedy continuation goes on copying, so distant context matters.

One example gives one request per level, so a curve over levels compares like with like. Nothing is random: ids name
the content, and examples are taken in hash order of their ids. The contents depend on the running interpreter, whose
version is in the manifest. The shipped drafter was trained on site-packages only, never on these texts.
"""

from __future__ import annotations

import ast
import platform
import sysconfig
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import accumulate, count, islice
from pathlib import Path
from typing import Any

from data_prep.infinitebench import generated_kv
from data_prep.job import Prompt
from data_prep.lca import first_cut, repository_input
from data_prep.select import PrepError, hash_key
from data_prep.tokens import TargetSpec, encode_chat, encode_pieces, raw_prefix

LEVELS = {"1K": 1024, "2K": 2048, "4K": 4096, "7K": 7168}
PYTHON = f"{platform.python_implementation()} {platform.python_version()}"
# Tests repeat themselves, tables are not code, pydoc_data is the text of demo_docs, newer Pythons lack distutils.
_SKIPPED = {
    "__phello__", "__pycache__", "_bundled", "distutils", "encodings", "ensurepip", "idle_test", "lib2to3",
    "pydoc_data", "site-packages", "dist-packages", "test", "tests", "turtledemo",
}  # fmt: skip
# Length of the repeated beginning in demo_copy, in tokens. With 24 the demo target leaves the copy after a few tokens,
# with 64 it follows it (teacher-forced, 30 to 32 of the next 32 tokens at 1K and 2K).
_COPIED = 64


def demo_prompts(benchmark: str, levels: Sequence[str], n: int, tokenizer: Any, target: TargetSpec) -> Iterator[Prompt]:
    """The prompts of one demo benchmark: n examples at each level, level by level.

    Raises PrepError for an unknown benchmark or level, and where this Python lacks the sources (a stripped
    installation), because a shorter list would silently be another benchmark.
    """
    if benchmark not in _BUILDERS:
        raise PrepError(f"no demo benchmark {benchmark!r}; there are {', '.join(_BUILDERS)}")
    if unknown := set(levels) - LEVELS.keys():
        raise PrepError(f"{benchmark}: no level {sorted(unknown)}; there are {', '.join(LEVELS)}")
    wanted = [LEVELS[level] for level in levels]
    by_level: dict[str, list[Prompt]] = {level: [] for level in levels}
    found = 0
    for example, inputs in islice(_BUILDERS[benchmark](tokenizer, target, wanted), n):
        found += 1
        for level, (ids, facts) in zip(levels, inputs, strict=True):
            meta = {"level": level, "source_id": example, "python": PYTHON, **facts}
            by_level[level].append(Prompt(f"{example}@{level}", benchmark, meta, ids=ids))
    if found < n:
        raise PrepError(
            f"{benchmark}: {n} examples were asked for, {PYTHON} in {_library()} gives {found}; "
            "lower benchmark.n or use a Python with its full standard library"
        )
    for level in levels:
        yield from by_level[level]


Inputs = list[tuple[tuple[int, ...], dict[str, Any]]]


def _code(tokenizer: Any, target: TargetSpec, lengths: Sequence[int]) -> Iterator[tuple[str, Inputs]]:
    # One file of every package before a second one of any: a large package would fill a small sample.
    queues = [_code_of(package, tokenizer, lengths) for package in sorted(_packages(), key=hash_key)]
    while queues:
        for queue in list(queues):
            example = next(queue, None)
            if example is None:
                queues.remove(queue)
            else:
                yield example


def _code_of(package: str, tokenizer: Any, lengths: Sequence[int]) -> Iterator[tuple[str, Inputs]]:
    files = package_files(package)
    for path in sorted(files, key=hash_key):
        cut = first_cut(uses_of_package(path, files), len(files[path].split("\n")))
        if cut is None:
            continue
        built = repository_input(tokenizer, path, files[path], cut, files.items(), lengths)
        inputs = [(ids, {"cut_line": cut}) for ids in built.values() if not isinstance(ids, str)]
        if len(inputs) == len(lengths):
            yield f"{path}:{cut}", inputs


def _docs(tokenizer: Any, target: TargetSpec, lengths: Sequence[int]) -> Iterator[tuple[str, Inputs]]:
    names = document_names()
    for name in sorted(names, key=hash_key):
        if not document_text(name):
            continue
        kind, title = name.split("/", 1)
        if int(hash_key(name), 16) % 2:
            form, request = "summary", "Write a detailed summary of the documentation above, section by section."
        else:
            form = "quote"
            request = f"What does the documentation above say about {title}? Quote its sentences word for word."
        # Lines of this text and of those that follow it, in order, as many as the longest input could take.
        lines: list[str] = []
        start = names.index(name)
        for other in names[start:] + names[:start]:
            if other.startswith(f"{kind}/") and (text := document_text(other)):
                lines += [*text.splitlines(keepends=True), "\n"]
            if sum(map(len, lines)) > 6 * max(lengths):
                break
        sizes = [len(ids) for ids in encode_pieces(tokenizer, lines)]
        yield name, [(_fit_chat(tokenizer, target, lines, sizes, request, size), {"form": form}) for size in lengths]


def _kv(tokenizer: Any, target: TargetSpec, lengths: Sequence[int]) -> Iterator[tuple[str, Inputs]]:
    for number in count():
        name = f"kv/{number}"
        # A pair is always 78 characters, so what one more costs varies little: guess from two sizes, then step down.
        few, more = (len(_kv_ids(tokenizer, target, name, pairs)) for pairs in (2, 22))
        inputs: Inputs = []
        for length in lengths:
            pairs = 2 + int((length - few) * 20 / (more - few) * 1.02)
            while len(ids := _kv_ids(tokenizer, target, name, pairs)) > length:
                pairs -= 1
            inputs.append((ids, {"pairs": pairs, "answer": generated_kv(name, pairs)[1]}))
        yield name, inputs


def _kv_ids(tokenizer: Any, target: TargetSpec, name: str, pairs: int) -> tuple[int, ...]:
    return tuple(encode_chat(tokenizer, generated_kv(name, pairs)[0], target.chat_template_kwargs))


def _copy(tokenizer: Any, target: TargetSpec, lengths: Sequence[int]) -> Iterator[tuple[str, Inputs]]:
    special = raw_prefix(tokenizer)
    documents = {path: text for package in _packages() for path, text in package_files(package).items()}
    documents |= {name: document_text(name) for name in document_names() if name.startswith("topics/")}
    names = [name for name, text in sorted(documents.items()) if len(text) > 4000]
    for name in sorted(names, key=hash_key):
        start = names.index(name)
        text = ""
        for other in names[start:] + names[:start]:
            text += documents[other].rstrip("\n") + "\n\n"
            if len(text) > 6 * max(lengths):
                break
        lines = encode_pieces(tokenizer, text.splitlines(keepends=True))
        inputs: Inputs = []
        for length in lengths:
            body, starts = _tokens_of_lines(lines, length - len(special) - _COPIED)
            passage = _unique_passage(body, starts)
            if passage is None:
                break
            ids = (*special, *body, *body[passage : passage + _COPIED])
            inputs.append((ids, {"passage_start": len(special) + passage, "passage_tokens": _COPIED}))
        if len(inputs) == len(lengths):
            yield f"copy/{name}", inputs


_BUILDERS = {"demo_code": _code, "demo_docs": _docs, "demo_kv": _kv, "demo_copy": _copy}


def _tokens_of_lines(lines: list[list[int]], total: int) -> tuple[list[int], list[int]]:
    """The first `total` tokens of the lines, ending with a whole line, and where each line starts among them.

    The end is a line end, so it is the first line that loses tokens where the sizes do not fit.
    """
    body: list[int] = []
    starts: list[int] = []
    for ids in lines:
        starts.append(len(body))
        body += ids
        if len(body) >= total:
            break
    surplus = len(body) - total
    return body[surplus:], [start - surplus for start in starts if start >= surplus]


def _unique_passage(body: list[int], starts: list[int]) -> int | None:
    """Start of the line whose first tokens occur once, in the first third: its repetition at the end has one source."""
    text = tuple(body)
    windows: dict[tuple[int, ...], int] = {}
    for i in range(len(text) - _COPIED + 1):
        window = text[i : i + _COPIED]
        windows[window] = windows.get(window, 0) + 1
    usable = [
        start
        for start in starts
        if len(body) // 20 < start < len(body) // 3
        and windows[text[start : start + _COPIED]] == 1
        and len(set(text[start : start + _COPIED])) > _COPIED // 2
    ]
    return min(usable, key=lambda start: hash_key(repr(text[start : start + _COPIED])), default=None)


def _fit_chat(
    tokenizer: Any, target: TargetSpec, lines: list[str], sizes: list[int], request: str, length: int
) -> tuple[int, ...]:
    """Ids of as many of the lines (`sizes` tokens each) as fit into `length` tokens with request and chat template."""
    room = length - len(encode_chat(tokenizer, f"\n\n{request}", target.chat_template_kwargs))
    used = bisect_right(list(accumulate(sizes)), room)
    while True:
        text = "".join(lines[:used]).rstrip() + f"\n\n{request}"
        ids = encode_chat(tokenizer, text, target.chat_template_kwargs)
        # Tokens may merge or split where lines meet, so the sum is a close guess.
        if len(ids) <= length:
            return tuple(ids)
        used -= 1


def _library() -> Path:
    return Path(sysconfig.get_path("stdlib"))


@cache
def _packages() -> tuple[str, ...]:
    """Packages of the standard library with at least two source files."""
    folders = [p for p in sorted(_library().iterdir()) if p.name not in _SKIPPED and (p / "__init__.py").is_file()]
    return tuple(folder.name for folder in folders if len(package_files(folder.name)) > 1)


@cache
def package_files(package: str) -> dict[str, str]:
    """{path from the library's root: text} of a package's .py files, tests left out."""
    files = {}
    for file in sorted((_library() / package).rglob("*.py")):
        path = file.relative_to(_library())
        if _SKIPPED.isdisjoint(path.parts):
            try:
                files[path.as_posix()] = file.read_text(encoding="utf-8")
            except UnicodeDecodeError:
                continue  # a few old modules are Latin-1; they are no loss
    return files


def uses_of_package(path: str, files: dict[str, str]) -> list[int]:
    """0-based lines of files[path] that use a function or class which another file of the package defines.

    Imports are resolved (relative and absolute, of names and of modules), so a local variable that happens to have
    such a name does not count; the import statements themselves are no use. Empty for a file that does not parse.
    """
    try:
        tree = ast.parse(files[path])
    except (SyntaxError, ValueError):
        return []
    defined = _definitions(tuple(files.items()))
    elsewhere = frozenset().union(*(names for other, names in defined.items() if other != path))
    elsewhere -= defined.get(path, frozenset())
    modules = {_module(other) for other in files}
    package_of = path.split("/")[:-1]

    names: set[str] = set()
    aliases: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name in modules:
                    aliases[alias.asname or alias.name.split(".")[0]] = (
                        alias.name if alias.asname else alias.name.split(".")[0]
                    )
        elif isinstance(node, ast.ImportFrom):
            anchor = package_of[: len(package_of) - node.level + 1] if node.level else []
            base = ".".join([*anchor, *([node.module] if node.module else [])])
            if base not in modules:
                continue
            for alias in node.names:
                if alias.name == "*":
                    # A package's __init__ passes on what its modules define; a module gives its own.
                    given = defined.get(f"{base.replace('.', '/')}.py", elsewhere)
                    names |= {name for name in elsewhere & given if not name.startswith("_")}
                elif f"{base}.{alias.name}" in modules:
                    aliases[alias.asname or alias.name] = f"{base}.{alias.name}"
                elif alias.name in elsewhere:
                    names.add(alias.asname or alias.name)

    lines = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id in names:
            lines.append(node.lineno - 1)
        elif isinstance(node, ast.Attribute) and node.attr in elsewhere and node.end_lineno is not None:
            root, *rest = _dotted(node.value) or [""]
            if root in aliases and ".".join([aliases[root], *rest]) in modules:
                lines.append(node.end_lineno - 1)
    return sorted(set(lines))


@cache
def _definitions(files: tuple[tuple[str, str], ...]) -> dict[str, frozenset[str]]:
    """Functions and classes at the top level of each file, also inside `if` and `try` there."""
    defined = {}
    for path, text in files:
        names = set()
        try:
            stack: list[ast.AST] = [ast.parse(text)]
        except (SyntaxError, ValueError):
            continue
        while stack:
            for node in ast.iter_child_nodes(stack.pop()):
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                    names.add(node.name)
                elif isinstance(node, ast.If | ast.Try | ast.ExceptHandler):
                    stack.append(node)
        defined[path] = frozenset(names)
    return defined


def _module(path: str) -> str:
    return ".".join(path.removesuffix(".py").removesuffix("/__init__").split("/"))


def _dotted(node: ast.expr) -> list[str] | None:
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.insert(0, node.attr)
        node = node.value
    return [node.id, *parts] if isinstance(node, ast.Name) else None


@cache
def _topics() -> dict[str, str]:
    """Texts of the language reference that `help()` shows; none where the installation lacks them."""
    try:
        from pydoc_data import topics
    except ImportError:
        return {}
    return dict(topics.topics)


@cache
def document_names() -> list[str]:
    """Sorted names of the documentation texts: "topics/<name>" of the language reference, "modules/<name>"."""
    modules = [_module(file.name) for file in _library().glob("*.py")]
    modules += [_module(path) for package in _packages() for path in package_files(package)]
    return sorted([*(f"topics/{name}" for name in _topics()), *(f"modules/{module}" for module in modules)])


@cache
def document_text(name: str) -> str:
    """A topic's text, or a module's docstrings under headings; "" if it is too short to be a document."""
    kind, title = name.split("/", 1)
    if kind == "topics":
        text = _topics()[title]
    else:
        file = _library().joinpath(*title.split("."))
        file = file / "__init__.py" if file.is_dir() else file.with_suffix(".py")
        try:
            text = _docstrings(title, file.read_text(encoding="utf-8"))
        except UnicodeDecodeError:
            return ""
    return text if len(text) > 1500 else ""


def _docstrings(module: str, text: str) -> str:
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return ""
    parts = []
    if module_doc := ast.get_docstring(tree):
        parts.append(f"{module}\n{'=' * len(module)}\n\n{module_doc}")
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and (doc := ast.get_docstring(node)):
            name = f"{module}.{node.name}"
            parts.append(f"{name}\n{'-' * len(name)}\n\n{doc}")
            for inner in node.body if isinstance(node, ast.ClassDef) else []:
                if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef) and (doc := ast.get_docstring(inner)):
                    parts.append(f"{node.name}.{inner.name}: {doc}")
    return "\n\n".join(parts)
