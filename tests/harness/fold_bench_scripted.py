"""fold-bench with a scripted engine in place of the configured one: the driver of end-to-end tests in a subprocess.

python -m tests.harness.fold_bench_scripted CLASS OVERRIDE...; CLASS is a class of tests/harness/scripted.py.
"""

from __future__ import annotations

import sys

import harness.engines
from harness.cli import main
from tests.harness import scripted

if __name__ == "__main__":
    engine = getattr(scripted, sys.argv[1])
    harness.engines.open_engine = lambda config: engine()
    sys.exit(main(sys.argv[2:]))
