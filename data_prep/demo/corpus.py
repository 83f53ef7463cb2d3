"""Raw text for the demo drafter's training: sources and docstrings of installed third-party packages, and nothing else.

The demo benchmarks are made from the Python standard library, so no training text may come from it. Only files under
a ``site-packages`` (or ``dist-packages``) folder are listed, and ``read_text`` refuses any file of the standard
library again when it is opened, whatever list it came from. Every 16th file (by a hash of its path) is held out for
measuring.
"""

from __future__ import annotations

import ast
import hashlib
import sysconfig
from collections.abc import Iterable
from pathlib import Path

import numpy as np

# Large, well documented, and dependencies of this project, so they are there wherever it is installed.
PACKAGES = (
    "accelerate", "fsspec", "gguf", "huggingface_hub", "hydra", "jinja2", "matplotlib", "mpmath", "networkx", "numpy",
    "omegaconf", "pandas", "pip", "psutil", "pyarrow", "pygments", "requests", "rich", "safetensors", "scipy",
    "setuptools", "submitit", "sympy", "tokenizers", "torch", "tqdm", "transformers", "urllib3", "yaml",
)  # fmt: skip
HELD_OUT_EVERY = 16
_THIRD_PARTY = {"site-packages", "dist-packages"}


class ForbiddenText(ValueError):
    """A file of the standard library, or one outside the third-party folders, was about to become training text."""


def check_allowed(path: Path) -> None:
    """Raise ``ForbiddenText`` unless ``path`` is in a site-packages folder and not in the standard library proper."""
    resolved = path.resolve()
    roots = {Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "platstdlib")}
    for root in roots:
        if resolved.is_relative_to(root) and not _THIRD_PARTY & set(resolved.relative_to(root).parts[:1]):
            raise ForbiddenText(f"{path} belongs to the Python standard library, from which the benchmarks are made")
    if not _THIRD_PARTY & set(resolved.parts):
        raise ForbiddenText(f"{path} is not inside a site-packages folder: only installed packages may be trained on")


def read_text(path: Path) -> str:
    """The file's text; raises ``ForbiddenText`` if it may not be trained on, ``UnicodeDecodeError`` if not UTF-8."""
    check_allowed(path)
    return path.read_text(encoding="utf-8")


class Corpus:
    """Source files and long docstrings, drawn at random by a caller's generator.

    Args:
        held_out: draw from the files kept for measuring instead of those for training.
        roots: site-packages folders to list; default: this interpreter's.
    """

    def __init__(self, held_out: bool = False, roots: Iterable[Path] | None = None) -> None:
        own = sorted({Path(sysconfig.get_path(name)) for name in ("purelib", "platlib")})
        folders = list(roots) if roots is not None else own
        found: dict[str, Path] = {}
        for folder in folders:
            for package in PACKAGES:
                if not (folder / package).is_dir():
                    continue
                check_allowed(folder / package)  # once per package; each file again when it is read
                for path in sorted((folder / package).rglob("*.py")):
                    name = path.relative_to(folder).as_posix()
                    if 1500 <= path.stat().st_size <= 200_000 and _is_held_out(name) == held_out:
                        found.setdefault(name, path)
            for path in sorted(folder.glob("*.dist-info/METADATA")):
                name = path.relative_to(folder).as_posix()
                if path.stat().st_size >= 3000 and _is_held_out(name) == held_out:
                    found.setdefault(name, path)
        if not found:
            raise ForbiddenText(f"no installed package to draw training text from in {', '.join(map(str, folders))}")
        self.names = list(found)
        self._paths = found
        self._code = [name for name in self.names if name.endswith(".py")]
        self._readmes = [name for name in self.names if not name.endswith(".py")]
        # Drawing files evenly would make a few huge packages everything; evenly by package first keeps the text varied.
        self._by_package: dict[str, list[str]] = {}
        for name in self._code:
            self._by_package.setdefault(name.split("/")[0], []).append(name)
        sizes = np.array([len(v) for v in self._by_package.values()], dtype=float) ** 0.5
        self._package_weights = sizes / sizes.sum()

    def code(self, rng: np.random.Generator) -> tuple[str, str]:
        """A random source file: (path inside site-packages, text)."""
        while True:
            package = list(self._by_package)[int(rng.choice(len(self._by_package), p=self._package_weights))]
            name = self._by_package[package][int(rng.integers(len(self._by_package[package])))]
            try:
                return name, read_text(self._paths[name])
            except UnicodeDecodeError:
                continue

    def document(self, rng: np.random.Generator) -> str:
        """A random prose text of at least 700 characters: a docstring, now and then a package's README."""
        while True:
            if self._readmes and rng.random() < 0.1:
                text = read_text(self._paths[self._readmes[int(rng.integers(len(self._readmes)))]])
                body = text.partition("\n\n")[2]
                if len(body) >= 700:
                    start = int(rng.integers(max(1, len(body) - 3000)))
                    return body[start:].partition("\n")[2]
                continue
            _, text = self.code(rng)
            try:
                found = long_docstrings(text)
            except (SyntaxError, ValueError):
                continue
            if found:
                return found[int(rng.integers(len(found)))]


def long_docstrings(source: str, least: int = 700) -> list[str]:
    """All docstrings of a module's text with at least ``least`` characters. Raises ``SyntaxError`` on broken source."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, kinds)]
    return [text for node in nodes if (text := ast.get_docstring(node)) and len(text) >= least]


def _is_held_out(name: str) -> bool:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4]) % HELD_OUT_EVERY == 0
