"""What the README shows is what the committed records say."""

from __future__ import annotations

from pathlib import Path

from analysis.summary import summarise

ROOT = Path(__file__).resolve().parents[1]


def test_the_committed_summary_and_the_readmes_come_from_the_committed_records() -> None:
    table = summarise(ROOT / "results" / "demo" / "run").markdown()
    assert (ROOT / "results" / "demo" / "summary.md").read_text() == table
    assert table.strip() in (ROOT / "results" / "demo" / "README.md").read_text()
    rows = set(table.splitlines())
    readme = (ROOT / "README.md").read_text().splitlines()
    shown = [line for line in readme if line.startswith(("| demo_", "| **demo_"))]
    assert len(shown) > 20 and set(shown) <= rows
