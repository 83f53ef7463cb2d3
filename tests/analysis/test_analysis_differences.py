"""One arm against the others, paired by request."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from analysis_fixtures import record, write_run

from analysis.differences import Difference, differences, parse_where
from analysis.load import LoadError, load
from analysis.tables import _main

LEVELS = {"1K": 1000, "4K": 4000}


def run(folder: Path) -> Path:
    """fold commits one token a round more than window at 4K and as many at 1K, and is twice as fast everywhere."""
    lines = []
    for level, tokens in LEVELS.items():
        for place in range(4):
            more = {"level": level, "prompt_tokens": tokens}
            rounds = [2 + place] * 3
            lines.append(record(f"{level}-{place}", tpot_ms=12 + place, **more))
            lines.append(record(f"{level}-{place}", "window", commits=rounds, tpot_ms=8 + place, **more))
            up = [count + (level == "4K") for count in rounds]
            lines.append(record(f"{level}-{place}", "fold", commits=up, tpot_ms=(8 + place) / 2, **more))
    random.Random(0).shuffle(lines)
    return write_run(folder, lines)


def test_differences_are_paired_and_by_group(tmp_path: Path) -> None:
    rows = differences(load(run(tmp_path)), "fold", {"level": ["4K"], "benchmark": ["demo_code"]})
    of: dict[tuple[str, str], Difference] = {(row.group, row.other): row for row in rows}
    assert [group for group, other in of if other == "window"] == [
        "all requests", "demo_code", "1K", "4K", "level 4K; benchmark demo_code",
    ]  # fmt: skip
    assert of["all requests", "window"].change.value == pytest.approx(0.5)
    # Pairing takes out what differs between requests: nothing is left to vary, so there is no interval.
    change = of["4K", "window"].change
    assert change.value == pytest.approx(1) and change.n == 4 and not change.has_interval
    assert of["level 4K; benchmark demo_code", "window"].change.value == pytest.approx(1)
    assert of["1K", "window"].gain.value == pytest.approx(2)
    assert of["4K", "window"].tau.value == pytest.approx(3.5) and of["4K", "window"].tau.has_interval
    assert of["1K", "ar"].change.value == pytest.approx(2.5) and of["1K", "ar"].speedup.value == 1


def test_the_command_writes_what_it_prints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = run(tmp_path / "run")
    assert _main([str(folder), "--against", "fold", "--where", "level=4K", "--out", str(tmp_path / "out")]) == 0
    text = (tmp_path / "out" / "differences.md").read_text()
    assert text.strip() == capsys.readouterr().out.strip()
    assert "| level 4K | 4 | window |" in text and "| +1.00 | 2.000 |" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--against", "rerope"], "no arm is called 'rerope'; these runs have ar, fold, window"),
        (["--against", "fold", "--where", "length=4K"], "--where length=4K: give benchmark=A,B or task=A,B or level"),
        (["--against", "fold", "--where", "level=9K"], "--where selects no request"),
        (["--where", "level=4K"], "--where belongs to --against"),
    ],
)
def test_mistakes_are_one_line(tmp_path: Path, arguments: list[str], message: str) -> None:
    with pytest.raises(LoadError, match=message):
        _main([str(run(tmp_path)), *arguments])


def test_where() -> None:
    assert parse_where(["level=4K,7K", "task=a"]) == {"level": ["4K", "7K"], "task": ["a"]}
