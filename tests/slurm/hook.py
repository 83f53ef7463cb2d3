"""Put into a job's sitecustomize by the tests: the engine of a job is a scripted one that FOLD_SCRIPTED describes.

FOLD_SCRIPTED: JSON of {"sleep": seconds per decode, "device": id, "class": of tests/harness/scripted.py}, or the path
of a file that holds it, read at every start, so that a test can change what the next start finds. With "gate" (a path)
and "after" (a number) a start waits after that many decodes until there is no such file any more: a test can then do
something to a unit that is in the middle of its work, however slow the machine is.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[2]))


def install() -> None:
    import harness.engines
    from tests.harness import scripted

    text = os.environ["FOLD_SCRIPTED"]
    options = json.loads(text if text.startswith("{") else Path(text).read_text())
    gate, after = options.pop("gate", None), options.pop("after", 0)
    kind = getattr(scripted, options.pop("class", "Scripted"))

    class Gated(kind):  # type: ignore[valid-type, misc]
        def decode(self, *arguments: Any) -> Any:
            while gate and len(self.calls) >= after and Path(gate).exists():
                time.sleep(0.05)
            return super().decode(*arguments)

    harness.engines.open_engine = lambda config: Gated(**options)  # type: ignore[assignment]


if os.environ.get("FOLD_SCRIPTED"):
    install()
