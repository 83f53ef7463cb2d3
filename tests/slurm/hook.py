"""Put into a job's sitecustomize by the tests: the engine of a job is a scripted one that FOLD_SCRIPTED describes.

FOLD_SCRIPTED: JSON of {"sleep": seconds per decode, "device": id, "class": of tests/harness/scripted.py}, or the path
of a file that holds it, read at every start, so that a test can change what the next start finds.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2]))


def install() -> None:
    import harness.engines
    from tests.harness import scripted

    text = os.environ["FOLD_SCRIPTED"]
    options = json.loads(text if text.startswith("{") else Path(text).read_text())
    engine = getattr(scripted, options.pop("class", "Scripted"))
    harness.engines.open_engine = lambda config: engine(**options)  # type: ignore[assignment]


if os.environ.get("FOLD_SCRIPTED"):
    install()
