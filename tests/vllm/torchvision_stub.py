"""A torchvision that can be imported and does nothing.

vLLM's Qwen3.5 module imports the vision models beside it, hence torchvision, which has no build for the CPU torch that
vLLM 0.28.0's CPU package is tested with. Text alone never calls it.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

_SOURCE = '''
import sys
import types

__version__ = "0"


class Anything:
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything()

    def __call__(self, *arguments, **named):
        return Anything()


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return Anything()


for inner in ("transforms", "transforms.functional", "transforms.v2", "transforms.v2.functional", "io", "ops"):
    module = types.ModuleType(f"torchvision.{inner}")
    module.__path__ = []
    module.__getattr__ = __getattr__
    sys.modules[module.__name__] = module
'''


@contextmanager
def torchvision_importable(folder: Path) -> Iterator[None]:
    """Within the block this process and its children can import torchvision; the real one if there is one."""
    if importlib.util.find_spec("torchvision") is not None:
        yield
        return
    (folder / "torchvision").mkdir(parents=True, exist_ok=True)
    (folder / "torchvision" / "__init__.py").write_text(_SOURCE)
    paths = os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))
    sys.path.insert(0, str(folder))
    try:
        with mock.patch.dict(os.environ, PYTHONPATH=paths):
            yield
    finally:
        sys.path.remove(str(folder))
