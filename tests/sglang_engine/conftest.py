"""These tests drive SGLang's own classes on a CPU; without SGLang (its own virtual environment, make sglang-env) they
are left out, with one reason."""

from __future__ import annotations

import importlib.util

import pytest

MISSING = importlib.util.find_spec("sglang") is None
collect_ignore_glob = ["test_*.py"] if MISSING else []


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if MISSING:
        terminalreporter.write_line("tests/sglang_engine: left out, sglang is not installed here (make sglang-test)")


if not MISSING:
    from sglang_cpu import start_sglang

    start_sglang()
