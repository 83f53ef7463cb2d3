"""The table that ends fold-bench."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from analysis_fixtures import record, write_run
from rich.console import Console

from analysis.summary import plot_run, summarise


def lines(n: int = 12, fold_ms: float = 5.0) -> list[dict]:
    rng = np.random.default_rng(3)
    out = []
    for level, tokens in (("1K", 1000), ("4K", 4000)):
        for i in range(n):
            common = {"prompt_tokens": tokens, "level": level}
            out.append(record(f"{level}-{i}", tpot_ms=float(rng.uniform(9, 11)), **common))
            for method, ms in (("fold", fold_ms), ("original", 7.0)):
                commits = [int(c) for c in rng.integers(1, 5, 8)]
                out.append(
                    record(f"{level}-{i}", method, commits=commits, tpot_ms=ms * float(rng.uniform(0.9, 1.1)), **common)
                )
    return out


def render(summary: object, width: int = 140) -> str:
    console = Console(width=width, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(summary)
    return console.export_text()


def test_ranked_by_level(tmp_path: Path) -> None:
    summary = summarise(write_run(tmp_path, lines()))
    assert [(row.level, row.rank, row.arm) for row in summary.rows] == [
        ("1K", 1, "fold"), ("1K", 2, "original"), ("1K", 3, "ar"),
        ("4K", 1, "fold"), ("4K", 2, "original"), ("4K", 3, "ar"),
    ]  # fmt: skip
    text = render(summary.table())
    assert "demo_code" in text and "1.00×" in text and "Requests used: 24" in text
    markdown = summary.markdown()
    assert markdown.count("\n| ") >= 6 and "**fold" in markdown


def test_ar_can_win(tmp_path: Path) -> None:
    first = summarise(write_run(tmp_path, lines(fold_ms=30.0))).rows
    slow = [line for line in lines(fold_ms=30.0) if line["method"] != "original"]
    rows = summarise(write_run(tmp_path / "2", slow)).rows
    assert rows[0].arm == "ar" and rows[0].rank == 1
    assert first[0].arm == "original"


def test_cheats_are_flagged(tmp_path: Path) -> None:
    records = lines()
    for line in records:
        if line["method"] == "fold":
            line["commits"] = [10] * 10
            line["proposals"] = [9] * 10
            line["output_ids"] = [1, 2] * 50 + [3]
    flags = next(row.flags for row in summarise(write_run(tmp_path, records)).rows if row.arm == "fold")
    assert any("loop" in flag for flag in flags) and any("long" in flag for flag in flags)


def test_drift_and_failures(tmp_path: Path) -> None:
    records = lines()
    records += [{**line, "method": "ar@end"} for line in records if line["method"] == "ar"]
    records[1]["error"] = "boom"
    summary = summarise(write_run(tmp_path, records))
    assert summary.failures == 1 and "1 failed: boom in fold" in summary.counts[0]
    assert any("first pass over second pass: 1.000" in note for note in summary.notes)


def test_an_arm_that_never_works_is_told_and_counts_as_failures(tmp_path: Path) -> None:
    records = lines()
    for line in records:
        if line["method"] == "original":
            line["error"] = "no memory"
    summary = summarise(write_run(tmp_path, records))
    assert summary.failures == 24 and {row.arm for row in summary.rows} == {"fold", "ar"}
    assert "original has no usable record in demo_code 1K (12 tried; failed: no memory)." in summary.counts


def test_several_pairs_are_told_apart(tmp_path: Path) -> None:
    one = write_run(tmp_path / "1", lines(3))
    two = write_run(tmp_path / "2", [{**line, "run": "run1", "unit": "other/reference/x/0of1"} for line in lines(3)])
    summary = summarise([one, two])
    assert "other in reference: demo_code" in render(summary.table()) and "other in reference" in summary.markdown()


def test_odd_names_one_request_and_all_failed(tmp_path: Path) -> None:
    odd = [record("[b]", benchmark="a_b%&#|$"), record("[b]", "[red]x|", benchmark="a_b%&#|$", commits=[3])]
    summary = summarise(write_run(tmp_path / "1", odd))
    assert "[red]x|" in render(summary.table()) and "n=1" in summary.markdown() and "\\|" in summary.markdown()
    plot_run(tmp_path / "1", tmp_path / "odd.pdf")
    bad = [{**line, "error": "x"} for line in odd]
    empty = summarise(write_run(tmp_path / "2", bad))
    assert empty.rows == [] and empty.failures == 1
    assert "left out of every arm: 1" in render(empty.table())
    plot_run(tmp_path / "2", tmp_path / "empty.png")


def test_plot_is_reproducible(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "r", lines())
    for suffix in (".pdf", ".png"):
        one, two = (plot_run(folder, tmp_path / f"{name}{suffix}").read_bytes() for name in "12")
        assert one == two and b"/Type3" not in one
