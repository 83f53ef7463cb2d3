"""What the README shows is what the committed records say."""

from __future__ import annotations

import re
from pathlib import Path

import pandas as pd

from analysis.advise import advise
from analysis.differences import differences, parse_where, to_markdown
from analysis.load import load
from analysis.summary import summarise
from harness.diagnostics.decomposition import decomposition_page
from harness.diagnostics.report import PAGES
from methods import METHODS

ROOT = Path(__file__).resolve().parents[1]
DEMO = ROOT / "results" / "demo"


def test_the_committed_summary_and_the_readmes_come_from_the_committed_records() -> None:
    table = summarise(ROOT / "results" / "demo" / "run").markdown()
    assert (ROOT / "results" / "demo" / "summary.md").read_text() == table
    assert table.strip() in (ROOT / "results" / "demo" / "README.md").read_text()
    rows = set(table.splitlines())
    readme = (ROOT / "README.md").read_text().splitlines()
    shown = [line for line in readme if line.startswith(("| demo_", "| **demo_"))]
    assert len(shown) > 20 and set(shown) <= rows


def test_the_differences_come_from_the_records_and_the_readme_quotes_them() -> None:
    runs = load(DEMO / "run")
    where = parse_where(["benchmark=demo_code,demo_docs", "level=4K,7K"])
    text = to_markdown(runs, "fold", differences(runs, "fold", where))
    assert (DEMO / "differences.md").read_text() == text
    readme = (DEMO / "README.md").read_text()
    quoted = re.findall(r"[+-]\d\.\d\d \[[+-]\d\.\d\d, [+-]\d\.\d\d\]", readme)
    assert len(quoted) >= 5 and all(f"| {number} |" in text for number in quoted)


def test_the_decomposition_comes_from_the_records_and_the_readme_quotes_it() -> None:
    page = decomposition_page(load([DEMO / "run", DEMO / "alpha4"]))
    text, readme = (DEMO / "diagnose" / "decomposition.md").read_text(), (DEMO / "README.md").read_text()
    assert len(page.findings) == 3 and all(f"- {finding}" in text for finding in page.findings)
    for change in ("original → window", "window → fold"):
        (found,) = re.findall(rf"{change} ([^;\]]*\])", " ".join(page.findings))
        assert found in readme
    assert "0.998 [0.991, 1.004]" in readme and "0.998 [0.991, 1.004]" in page.findings[2]


def test_the_readme_quotes_the_offline_acceptance() -> None:
    rows = pd.read_csv(DEMO / "diagnose" / "acceptance.csv", dtype={"level": str})
    page = PAGES["acceptance"](rows)
    text, readme = (DEMO / "diagnose" / "acceptance.md").read_text(), (DEMO / "README.md").read_text()
    assert all(f"- {finding}" in text for finding in page.findings)
    changes = {}
    for sentence in page.findings:
        if "from original" in sentence:
            changes |= dict(re.findall(r"(\w+) ([+-]\d\.\d{3} \[[+-]\d\.\d{3}, [+-]\d\.\d{3}\])", sentence))
    assert set(changes) == {*METHODS} - {"original"} and all(change in readme for change in changes.values())


def test_the_readme_quotes_the_advice() -> None:
    (advice,) = advise(load(DEMO / "run"))
    readme = " ".join((DEMO / "README.md").read_text().split())
    assert advice.sentence().removeprefix("Answer: ").removesuffix(".") in readme
    for choice in advice.choices:
        if choice.arm == advice.chosen:
            assert f"{choice.calibration:.2f}×" in readme and choice.speedup.text(2, "×") in readme
        elif choice.arm in ("streamingllm", "fold", "rerope"):
            assert choice.against_chosen.text(3) in readme
