"""Official prompts, read from their upstream files at pinned commits; no prompt text lives in this repository.

A file is fetched once, cached below the cache root, and the prompt taken from it is checked against its sha256 on every
use: a changed file, cache or parser stops the preparation.
"""

from __future__ import annotations

import ast
import hashlib
import http.client
import json
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from data_prep.demo.target import default_cache_dir
from data_prep.select import PrepError
from harness.requests import write_atomic

_RAW = "https://raw.githubusercontent.com/{repo}/{commit}/{path}"
_TIMEOUT_S = 60


@dataclass(frozen=True)
class UpstreamPrompt:
    """Where a prompt stands: file `path` of GitHub `repo` at `commit`; sha256 of the prompt (UTF-8) taken from it."""

    repo: str
    commit: str
    path: str
    sha256: str
    extract: Callable[[str], str]

    def facts(self) -> dict[str, str]:
        """What the manifest says of it."""
        return {"repo": self.repo, "commit": self.commit, "path": self.path, "sha256": self.sha256}


def _json_key(key: str) -> Callable[[str], str]:
    return lambda text: json.loads(text)[key]


def _dict_key(variable: str, key: str) -> Callable[[str], str]:
    """The string under `key` in the dict literal assigned to `variable` in a Python file; parsed, never run."""

    def extract(text: str) -> str:
        for node in ast.parse(text).body:
            if isinstance(node, ast.Assign) and [getattr(t, "id", None) for t in node.targets] == [variable]:
                assert isinstance(node.value, ast.Dict)
                for name, value in zip(node.value.keys, node.value.values, strict=True):
                    # Only this entry: others of the file are expressions.
                    if isinstance(name, ast.Constant) and name.value == key:
                        return ast.literal_eval(value)
        raise KeyError(key)

    return extract


_LONGBENCH = "THUDM/LongBench"
_INFINITEBENCH = ("OpenBMB/InfiniteBench", "753b69f2b0d4a03d866c1c4ab2f673635971ee35", "src/prompt.py")

# InfiniteBench has a family of prompts per model; gpt4_templates is the one with the explicit answer formats that the
# paper replaces.
PROMPTS = {
    "gov": UpstreamPrompt(
        _LONGBENCH,
        "f6227eb7a25cacbd96310aea2c59af003f8d8925",
        "config/dataset2prompt.json",
        "91c25d585b189ced91c9280efcb4ecb5dcff9548cd4e3bfae66c68025b569e95",
        _json_key("gov_report"),
    ),
    "lbv2": UpstreamPrompt(
        _LONGBENCH,
        "072a5a739b05ab3c98ff1ea922c5293ebe317b75",
        "prompts/0shot.txt",
        "68a162252bc9ff71d5d7abca3d69bb31aac3c35f832d657a2866f2018b8a6950",
        lambda text: text,
    ),
    "kv_retrieval": UpstreamPrompt(
        *_INFINITEBENCH,
        "afa97419dd69cd749842c629df9555857891cab7f7d794fe1c5c904da23d2515",
        _dict_key("gpt4_templates", "kv_retrieval"),
    ),
    "longbook_sum_eng": UpstreamPrompt(
        *_INFINITEBENCH,
        "73463436d5d11a9a73af4f1c08551b2641c51018f1077c9716cd2499bbb2efb5",
        _dict_key("gpt4_templates", "longbook_sum_eng"),
    ),
    "longbook_qa_eng": UpstreamPrompt(
        *_INFINITEBENCH,
        "3d0b2296b8712aaa5cae7cf466c26a97e150fc127e56bd681ccf3284978577bb",
        _dict_key("gpt4_templates", "longbook_qa_eng"),
    ),
    "longbook_choice_eng": UpstreamPrompt(
        *_INFINITEBENCH,
        "7df117e8c610080b33e372b84964300d4b1c208c934fa9c7ba95194c19330716",
        _dict_key("gpt4_templates", "longbook_choice_eng"),
    ),
    "longdialogue_qa_eng": UpstreamPrompt(
        *_INFINITEBENCH,
        "f6dadd7709f11572ba0338b7cd9de636a7094fe9aeef902ceb3d5c869089185f",
        _dict_key("gpt4_templates", "longdialogue_qa_eng"),
    ),
}


def load_prompt(name: str, local: Path | None = None) -> str:
    """The official prompt `name`. local: folder in which a copy of the upstream file is looked for first.

    Raises PrepError when the file cannot be had or does not contain the pinned text.
    """
    prompt = PROMPTS[name]
    file = _upstream_file(prompt, local)
    try:
        text = prompt.extract(file.read_bytes().decode())
        digest = hashlib.sha256(text.encode()).hexdigest()
    except (OSError, ValueError, SyntaxError, KeyError, AssertionError) as error:
        raise PrepError(f"{file}: prompt {name} cannot be read from it ({error}); delete it and run again") from None
    if digest != prompt.sha256:
        raise PrepError(
            f"{file}: prompt {name} has sha256 {digest[:16]}..., pinned is {prompt.sha256[:16]}...; delete the file "
            "and run again"
        )
    return text


def _upstream_file(prompt: UpstreamPrompt, local: Path | None) -> Path:
    if local is not None and local.is_dir():
        name = prompt.repo.rpartition("/")[2]
        flat = prompt.path.rpartition("/")[2]
        for place in (f"prompts/{name}/{prompt.path}", f"{name}/{prompt.path}", f"prompts/{flat}", flat):
            if (local / place).is_file():
                return local / place
    cached = default_cache_dir() / "prompts" / prompt.repo / prompt.commit / prompt.path
    if cached.is_file():
        return cached
    url = _RAW.format(repo=prompt.repo, commit=prompt.commit, path=prompt.path)
    try:
        with urllib.request.urlopen(url, timeout=_TIMEOUT_S) as reply:
            content = reply.read()
        cached.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(cached, content)
    except (OSError, http.client.HTTPException) as error:  # URLError and HTTPError are OSErrors
        raise PrepError(
            f"the official prompt cannot be fetched from {url} ({error}); put the file at {cached}, or into prompts/ "
            "below the source folder"
        ) from None
    return cached
