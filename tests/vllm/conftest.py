"""These tests start vLLM, which has a virtual environment of its own: ``make vllm-test`` makes it and runs them."""

from __future__ import annotations

from typing import Any

import pytest

from harness.engines import TESTED, installed_version

FOUND = installed_version("vllm")
if TESTED["vllm"] != FOUND:
    collect_ignore_glob = ["test_*.py"]


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if TESTED["vllm"] != FOUND:
        what = "is not installed" if FOUND is None else f"is version {FOUND}, not {TESTED['vllm']},"
        terminalreporter.write_line(f"tests/vllm left out: vLLM {what} in this environment; make vllm-test runs them")


@pytest.fixture(scope="session")
def demo_target() -> Any:
    """The folder of the embedded target, fetched once."""
    from data_prep.demo.target import ensure_target

    return ensure_target()
