"""How a drafter reads its long context: nine methods as data, their dense definition, and fast readers.

``make_method("fold", window=2048, alpha=2.0)`` makes one; ``method.plan(layer, request)`` says what a layer reads;
``methods.attention.dense_read`` executes that by definition and ``methods.reader.open_reader`` against a request's
cache. This package imports nothing else of the project.
"""

from __future__ import annotations

from dataclasses import MISSING, fields
from typing import Any

from methods.cmr import CMR
from methods.engine_window import EngineWindow
from methods.fold import Fold
from methods.infllm import InfLLM
from methods.original import Original
from methods.reading import Method
from methods.rerope import ReRoPE
from methods.streamingllm import StreamingLLM
from methods.window import Window
from methods.yarn import Yarn

METHODS: dict[str, type] = {
    method.name: method
    for method in (Original, Window, StreamingLLM, Yarn, ReRoPE, InfLLM, CMR, Fold, EngineWindow)
}


def make_method(name: str, **options: Any) -> Method:
    """The method called ``name`` with its options; defaults are the paper's (section 4.1, Appendix B.3).

    Raises ValueError, in one line, for an unknown name or option, a missing option or a value out of range.
    """
    if name not in METHODS:
        raise ValueError(f"unknown method {name!r}; choose one of {', '.join(METHODS)}")
    known = fields(METHODS[name])
    names = [option.name for option in known]
    for option in options:
        if option not in names:
            raise ValueError(f"method {name} has no option {option!r}; it has {', '.join(names) or 'none'}")
    missing = [option.name for option in known if option.default is MISSING and option.name not in options]
    if missing:
        raise ValueError(f"method {name} needs {', '.join(missing)}, for example {missing[0]}=2048")
    method: Method = METHODS[name](**options)
    return method
