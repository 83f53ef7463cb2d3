"""The one setting of the SGLang plugin: which method the drafter reads its context by, handed down in the environment.

SGLang starts its scheduler with ``spawn``, so nothing of the parent but its environment reaches the process that holds
the drafter. ``FOLD_BENCH_SGLANG='{"method": "fold", "options": {"window": 2048, "alpha": 2.0}}'`` works alike for this
harness and for ``python -m sglang.launch_server``; without it the plugin does nothing at all.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from harness.engines import TESTED, installed_version
from methods import make_method
from methods.reading import Method

VARIABLE = "FOLD_BENCH_SGLANG"
VERSION_VARIABLE = "FOLD_BENCH_SGLANG_VERSION"
# SGLang puts the models of this package over its own ones (sglang/srt/models/registry.py).
MODEL_PACKAGE_VARIABLE = "SGLANG_EXTERNAL_MODEL_PACKAGE"
MODEL_PACKAGE = "harness.engines.sglang.models"
PLUGIN, PLUGIN_GROUP = "fold_bench", "sglang.srt.plugins"


class SettingError(ValueError):
    """The plugin cannot do what the environment asks for. The message is one line."""


@dataclass(frozen=True)
class Setting:
    """``method`` and its ``options`` as :func:`methods.make_method` takes them."""

    method: str
    options: dict[str, Any] = field(default_factory=dict)

    def make(self) -> Method:
        """The method. Raises SettingError for a name, an option or a value that there is not."""
        try:
            return make_method(self.method, **self.options)
        except ValueError as error:
            raise SettingError(f"{VARIABLE}: {error}") from None

    def environment(self) -> dict[str, str]:
        """What a process must have in its environment for the plugin to set this method."""
        text = json.dumps({"method": self.method, "options": self.options})
        return {VARIABLE: text, MODEL_PACKAGE_VARIABLE: MODEL_PACKAGE}


def read_setting(environ: Mapping[str, str] = os.environ) -> Setting | None:
    """The setting of this process, None if there is none. Raises SettingError if it is not one."""
    text = environ.get(VARIABLE)
    if text is None:
        return None
    try:
        raw = json.loads(text)
    except ValueError as error:
        raise SettingError(f"{VARIABLE} is not JSON ({error}): {text!r}") from None
    if not isinstance(raw, dict) or not isinstance(raw.get("method"), str):
        raise SettingError(f'{VARIABLE} is {text!r}: give an object such as {{"method": "window", "options": {{...}}}}')
    if unknown := sorted(raw.keys() - {"method", "options"}):
        raise SettingError(f"{VARIABLE} has an unknown key {unknown[0]!r}; it has method and options")
    options = raw.get("options", {})
    if not isinstance(options, dict):
        raise SettingError(f"{VARIABLE}: options is {options!r}, not an object")
    return Setting(raw["method"], options)


def check_version(environ: Mapping[str, str] = os.environ) -> str:
    """The installed version of SGLang. Raises SettingError if it is not there, or another one than this was made for.

    The plugin overrides private classes, which change between versions without a word. ``FOLD_BENCH_SGLANG_VERSION``
    names another version to run (``engine.allow_version`` sets it); ``make sglang-test`` should pass with that one.
    """
    found, tested = installed_version("sglang"), TESTED["sglang"]
    if found is None:
        raise SettingError("sglang is not installed in this environment; make sglang-env makes one for its tests")
    if found not in (tested, environ.get(VERSION_VARIABLE)):
        raise SettingError(
            f"sglang {found} is installed, and this package builds on the insides of {tested}: install that one, or "
            f"try yours with {VERSION_VARIABLE}={found}"
        )
    return found
