"""Figures and the comparison, from records built to hold the paper's numbers."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import paper_records
import pytest
from analysis_fixtures import record, write_run

from analysis.compare import INSIDE, OUTSIDE, _verdict, compare
from analysis.compare import _main as compare_main
from analysis.figures import _main, figure2, figure5, figure6, make_figures
from analysis.load import LoadError, load
from analysis.paper import published
from analysis.stats import Estimate
from analysis.tables import Data


@pytest.fixture(scope="module")
def run_dirs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return paper_records.main_tables(tmp_path_factory.mktemp("main"))


def diagnostics(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    rows = [
        ("Llama-3.1-8B", context, step, part, (1 + place) * context / 1024)
        for context in (1024, 8192, 131072)
        for step in ("AR", "SD")
        for place, part in enumerate(["target attention", "target other", "drafter attention", "sampling"])
        if step == "SD" or "drafter" not in part
    ]
    pd.DataFrame(rows, columns=["model", "context", "step", "part", "ms"]).to_csv(folder / "latency.csv", index=False)
    probe = [
        (benchmark, low, 4 * low, arm, fold, 0.5 + place / 10 * np.log2(low) / 16 + fold / 500, 100)
        for benchmark in ("speed_32k", "lbv2")
        for place, arm in enumerate(["embeddings", "features", "shuffled, order processed"])
        for low in (64, 512, 4096, 16384)
        for fold in range(5)
    ]
    columns = ["benchmark", "low", "high", "arm", "fold", "accuracy", "pairs"]
    pd.DataFrame(probe, columns=columns).to_csv(folder / "order.csv", index=False)
    return folder


def test_all_figures_are_reproducible_with_truetype_fonts(run_dirs: list[Path], tmp_path: Path) -> None:
    folders = [*run_dirs, diagnostics(tmp_path / "diagnostics")]
    one, two = (make_figures(folders, [1, 2, 3], tmp_path / name) for name in "12")
    assert [path.name for path in one] == [f"figure{n}{suffix}" for n in (1, 2, 3) for suffix in (".pdf", ".png")]
    for a, b in zip(one, two, strict=True):
        content = a.read_bytes()
        assert content == b.read_bytes()
        if a.suffix == ".pdf":
            assert b"/Type3" not in content and b"/CIDFontType2" in content and b"CreationDate" not in content


def test_figures_from_records_alone(run_dirs: list[Path], tmp_path: Path) -> None:
    names = [path.name for path in make_figures(run_dirs, None, tmp_path)]
    assert names == [f"figure{n}{suffix}" for n in (2, 5, 6) for suffix in (".pdf", ".png")]


def test_figures_show_the_values_of_the_records(run_dirs: list[Path]) -> None:
    data = Data(load(run_dirs))
    llama = figure2(data).axes[0]
    speed = next(c for c in llama.containers if c.get_label() == "SPEED-Bench")
    assert speed.lines[0].get_xdata().tolist() == [8192, 16384, 32768]
    assert speed.lines[0].get_ydata().tolist() == pytest.approx([2.84, 2.52, 2.07])
    for figure, metric in ((figure5(data), "speedup"), (figure6(data), "tau")):
        lines = {c.get_label(): c.lines[0].get_ydata() for c in figure.axes[1].containers}
        printed = published(2).query("group == 'Qwen3.5-9B' and column == 'LCA'")
        printed = printed[printed["metric"] == metric]
        for row in printed.to_dict("records"):
            assert list(lines[row["row"]][:3]) == pytest.approx([row["value"]] * 3, abs=0.005)
            assert np.isnan(np.asarray(lines[row["row"]][3:], float)).all()


def test_figures_without_input_say_so(tmp_path: Path) -> None:
    demo = write_run(tmp_path / "demo", [record("a"), record("a", "fold", commits=[3])])
    for arguments, words in (
        ([str(demo)], "paper's pairs"),
        ([str(demo), "--figures", "1"], "latency.csv"),
        ([str(demo), "--figures", "4"], "list of numbers"),
    ):
        with pytest.raises(LoadError, match=re.escape(words)):
            _main([*arguments, "--out", str(tmp_path / "out")])
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "latency.csv").write_text("context,ms\n1,2\n")
    with pytest.raises(LoadError, match="lacks the columns step, part"):
        make_figures([tmp_path / "d"], [1], tmp_path)


def test_a_figure_of_nothing_is_not_made(tmp_path: Path) -> None:
    lines = paper_records.ar_records("Gov", "llama", 2) + paper_records.arm_records("Gov", "llama", "fold", [2, 3], 2.0)
    gov = write_run(tmp_path / "llama", lines, {"config": {"drafter": {"name": "llama"}}})
    with pytest.raises(LoadError, match="no figure of the paper can be made"):
        make_figures([gov], None, tmp_path / "out")
    with pytest.raises(LoadError, match="figure 5 would be empty"):
        make_figures([gov], [5], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_comparison_finds_the_paper_inside(
    run_dirs: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    comparison = compare(load(run_dirs), [2, 8])
    assert len(comparison.cells) == 336 + 126 and set(comparison.cells["verdict"]) == {INSIDE}
    assert comparison.summary()[0].startswith("Table 2: 336 of 336 cells measured, 336 inside; ratio 1.000")
    some = [path for path in run_dirs if path.name == "qwen3"]
    assert compare_main([str(some[0]), "--out", str(tmp_path)]) == 0
    assert "Table 9: 28 of 28 cells measured, 28 inside" in capsys.readouterr().out
    text = (tmp_path / "compare.md").read_text()
    assert "published" in text and "| Qwen3-8B | FOLD | LBv2 | speedup | 4.00× | 4.00 | inside | 1.000 |" in text


@pytest.mark.parametrize(
    ("number", "build"),
    [
        (4, paper_records.lca_changes),
        (5, lambda folder: paper_records.alpha(folder, 5, 36)),
        (10, paper_records.sglang),
        (11, paper_records.lbv2_buckets),
        (12, lambda folder: paper_records.alpha(folder, 12, 36)),
    ],
)
def test_comparison_of_every_other_table_of_records(number: int, build: Callable, tmp_path: Path) -> None:
    cells = compare(load(build(tmp_path)), [number]).cells
    if number in (5, 12):  # the counts of requests are scaled down
        cells = cells[cells["metric"] != "n"]
    assert len(cells) > 15 and len(cells) == (published(number)["metric"] != ("n" if number in (5, 12) else "")).sum()
    assert set(cells["verdict"]) == {INSIDE}, cells[cells["verdict"] != INSIDE]
    assert ((cells["ratio"].dropna() - 1).abs() < 0.02).all() or number in (4, 11)  # changes of τ may be near 0


def test_verdicts() -> None:
    nan = float("nan")
    assert _verdict(Estimate(3.0, 2.9, 3.1, 9), "tau", "3.05", 3.05) == (INSIDE, pytest.approx(3 / 3.05))
    assert _verdict(Estimate(3.0, 2.9, 3.1, 9), "tau", "3.2", 3.2)[0] == OUTSIDE
    # 3.00 may have been 3.0049 before it was printed.
    assert _verdict(Estimate(3.004, 3.003, 3.005, 9), "tau", "3.00", 3.0)[0] == INSIDE
    assert _verdict(Estimate(3.007, 3.006, 3.008, 9), "tau", "3.00", 3.0)[0] == OUTSIDE
    assert _verdict(Estimate(3.004, nan, nan, 9), "tau", "3.00", 3.0)[0] == INSIDE
    assert _verdict(Estimate(3.006, nan, nan, 1), "tau", "3.00", 3.0)[0] == OUTSIDE
    assert _verdict("10", "", "10", 10.0)[0] == INSIDE and _verdict(None, "tau", "1", 1.0)[0] == "not measured"
