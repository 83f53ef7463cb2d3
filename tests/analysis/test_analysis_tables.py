"""The paper's tables out of records that were built to hold the paper's numbers, and the formats they are printed
in."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import numpy as np
import paper_records
import pytest
from analysis_fixtures import record, write_run

from analysis import paper
from analysis.load import LoadError, load
from analysis.stats import Estimate
from analysis.tables import (
    FORMATS,
    Sheet,
    _conclusion,
    _main,
    escape_latex,
    make_tables,
    table1,
    to_csv,
    to_latex,
    to_markdown,
)


def assert_prints_the_paper(sheet: Sheet, but: tuple[str, ...] = ()) -> None:
    """Every published cell comes back to its last printed digit."""
    cells = paper.published(sheet.number)
    wrong = []
    for cell in cells.itertuples():
        key = (cell.group, cell.row, cell.column, cell.metric)
        if cell.metric in but:
            continue
        ours = sheet.cells[key]
        assert isinstance(ours, Estimate)
        digits, _, sign = FORMATS[cell.metric]
        text = Estimate(ours.value, np.nan, np.nan, 0).text(digits, "", sign)
        if text.replace("-0.00", "+0.00") != cell.printed:
            wrong.append((*key, cell.printed, text))
    assert wrong == [] and len(cells) > 0


@pytest.fixture(scope="module")
def main_sheets(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Sheet]:
    runs = load(paper_records.main_tables(tmp_path_factory.mktemp("main")))
    return {sheet.number: sheet for sheet in make_tables(runs)}


@pytest.mark.parametrize("number", [2, 3, 8, 9])
def test_main_tables_come_back(main_sheets: dict[int, Sheet], number: int) -> None:
    assert_prints_the_paper(main_sheets[number])


def test_table_4_comes_back(tmp_path: Path) -> None:
    (sheet,) = make_tables(load(paper_records.lca_changes(tmp_path)), [4])
    assert_prints_the_paper(sheet)


def test_table_11_comes_back(tmp_path: Path) -> None:
    (sheet,) = make_tables(load(paper_records.lbv2_buckets(tmp_path)), [11])
    assert_prints_the_paper(sheet)
    assert "[" in to_markdown(sheet)


def test_table_10_comes_back(tmp_path: Path) -> None:
    (sheet,) = make_tables(load(paper_records.sglang(tmp_path)), [10])
    assert_prints_the_paper(sheet)
    assert "Common set (116)" in to_markdown(sheet)


def test_the_common_set_of_table_10_is_that_of_the_arms_it_shows(tmp_path: Path) -> None:
    (folder,) = paper_records.sglang(tmp_path)
    lines = [json.loads(line) for line in (folder / "records.jsonl").read_text().splitlines()]
    # YaRN is not in Table 10; here it differs from AR in every request.
    yarn = [{**line, "method": "yarn", "output_ids": [7] * len(line["output_ids"])} for line in lines]
    write_run(folder, [*lines, *(line for line, own in zip(yarn, lines, strict=True) if own["method"] == "fold")])
    runs = load([folder])
    assert "yarn" in runs.arms()
    (sheet,) = make_tables(runs, [10])
    assert_prints_the_paper(sheet)
    assert "Common set (116)" in to_markdown(sheet)


@pytest.mark.parametrize("number", [5, 12])
def test_alpha_tables_come_back(tmp_path: Path, number: int) -> None:
    (sheet,) = make_tables(load(paper_records.alpha(tmp_path, number, 36)), [number])
    # The numbers of requests are scaled down, the ratios and τ are not.
    assert_prints_the_paper(sheet, but=("n",))


def test_dagger_when_the_pooled_ratio_concludes_otherwise(tmp_path: Path) -> None:
    assert _conclusion(Estimate(1.018, 1.014, 1.022, 9)) != _conclusion(Estimate(0.995, 0.993, 0.997, 9))
    assert _conclusion(Estimate(1.001, 0.998, 1.004, 9)) == 0
    lines = []
    for task in ("Gov", "LBv2"):
        for i in range(12):
            long = i % 4 == 0
            common = {
                "task": task,
                "benchmark": task,
                "prompt_tokens": 9000,
                "unit": "qwen3/vllm/x/0of1",
                "engine": "vllm",
            }
            lines.append(record(f"{task}{i}", **common))
            for alpha, tau in ((1.0, [3]), (2.0, [3]), (4.0, [2] if long else [4])):
                rounds = 400 + i if long else 10 + i
                lines.append(
                    record(f"{task}{i}", "fold", commits=tau * rounds, method_config={"alpha": alpha}, **common)
                )
    (sheet,) = make_tables(load(write_run(tmp_path, lines)), [5])
    assert sheet.marks == {("Qwen3-8B", "General", "α=4 vs. 2", "tau ratio")}
    assert "† [" in to_markdown(sheet) and r"$^\dagger$" in to_latex(sheet)


@pytest.mark.parametrize("alphas", [(2.0,), (1.0, 4.0)])
def test_a_ratio_needs_both_settings_of_alpha(tmp_path: Path, alphas: tuple[float, ...]) -> None:
    lines = []
    for task in paper.SEVEN_GENERAL_TASKS:
        for i in range(3):
            where = {"benchmark": task, "task": task, "prompt_tokens": 20000, "unit": "llama/vllm/x/0of1"}
            lines.append(record(f"{task}{i}", **where))
            for alpha in alphas:
                lines.append(record(f"{task}{i}", "fold", commits=[3, 4 + i], method_config={"alpha": alpha}, **where))
    (sheet,) = make_tables(load(write_run(tmp_path, lines)), [5])
    assert all(np.isnan(cell.value) for key, cell in sheet.cells.items() if key[3] == "tau ratio")
    tau = sheet.cells["Llama-3.1-8B", "General", "α=2", "tau"].value
    assert tau == pytest.approx(4.0) if 2.0 in alphas else np.isnan(tau)


def test_two_settings_of_one_alpha_are_one_line(tmp_path: Path) -> None:
    where = {"task": "Gov", "prompt_tokens": 20000, "unit": "llama/vllm/x/0of1"}
    lines = [record("a", **where)]
    for window in (256, 512):
        config = {"alpha": 4.0, "window": window}
        lines.append(record("a", "fold", commits=[4], method_config=config, **where))
    with pytest.raises(LoadError, match="several settings of alpha=4"):
        make_tables(load(write_run(tmp_path, lines)), [12])


def test_best_and_second_best_share_printed_ties(main_sheets: dict[int, Sheet]) -> None:
    ranks = main_sheets[2].ranks()
    gemma = ("Gemma-4-12B", "En.", "speedup")
    first = {
        row for (group, row, column, metric), rank in ranks.items() if (group, column, metric) == gemma and rank == 1
    }
    assert first == {"ReRoPE", "FOLD"}
    latex, markdown = to_latex(main_sheets[2]), to_markdown(main_sheets[2])
    assert r"\textbf{3.40$\times$}" in latex and r"\textit{3.32$\times$}" in latex
    assert "**3.40×**" in markdown and "*3.32×*" in markdown


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("pdflatex") is None, reason="needs texlive-latex-base and texlive-latex-recommended")
def test_latex_compiles_with_booktabs_alone(main_sheets: dict[int, Sheet], tmp_path: Path) -> None:
    for sheet in main_sheets.values():
        named = replace(sheet, caption=sheet.caption + " a_b%&#$~^{}\\<>|")
        tables = "\\clearpage\n".join(to_latex(named, intervals) for intervals in (False, True))
        text = rf"\documentclass{{article}}\usepackage{{booktabs}}\begin{{document}}{tables}\end{{document}}"
        (tmp_path / "table.tex").write_text(text, encoding="utf-8")
        command = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "table.tex"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, errors="replace")
        assert done.returncode == 0, done.stdout[-1000:]
        assert "Missing character" not in (tmp_path / "table.log").read_text(errors="replace")


def test_latex_is_well_formed(main_sheets: dict[int, Sheet]) -> None:
    for sheet in main_sheets.values():
        text = to_latex(sheet, intervals=True)
        assert text.count("{") - text.count("}") == text.count(r"\{") - text.count(r"\}")
        for line in text.splitlines():
            if line.endswith(r"\\") and not line.startswith(r"\multicolumn") and r"\multicolumn" not in line:
                assert len(re.findall(r"(?<!\\)&", line)) == len(sheet.columns)
        assert text.isascii(), {letter for letter in text if not letter.isascii()}


def test_partial_runs_show_missing_cells(tmp_path: Path) -> None:
    lines = []
    for i in range(3):
        common = {"task": "Gov", "benchmark": "gov", "unit": "llama/vllm/gov/0of1", "engine": "vllm"}
        lines += [
            record(f"{i}", **common),
            record(f"{i}", "fold", commits=[2 + i], method_config={"alpha": 2.0}, **common),
        ]
    runs = load(write_run(tmp_path, lines))
    sheets = {sheet.number: sheet for sheet in make_tables(runs)}
    assert 2 in sheets and 4 not in sheets and 8 not in sheets
    text = to_markdown(sheets[2])
    row = next(line for line in text.splitlines() if line.startswith("| FOLD (ours) | 3.00"))
    assert row.count("–") == 14
    assert "Requests used: 3; left out of every method: 0" in text
    (four,) = make_tables(runs, [4])
    assert four.known() == 0 and "–" in to_markdown(four)


def test_one_engine_and_one_setting_a_pair(tmp_path: Path) -> None:
    lines = []
    for engine in ("reference", "other"):
        common = {"task": "Gov", "benchmark": "gov", "unit": f"llama/{engine}/gov/0of1", "engine": engine}
        lines += [record("a", **common), record("a", "fold", commits=[3], **common)]
    with pytest.raises(LoadError, match="one engine"):
        make_tables(load(write_run(tmp_path / "1", lines)))
    common = {"task": "Gov", "benchmark": "gov", "unit": "llama/vllm/gov/0of1", "engine": "vllm"}
    lines = [record("a", **common)]
    lines += [record("a", "fold", commits=[3], method_config={"alpha": 2.0, "window": w}, **common) for w in (1, 2)]
    with pytest.raises(LoadError, match="several settings"):
        make_tables(load(write_run(tmp_path / "2", lines)))


def test_special_characters_are_escaped() -> None:
    assert escape_latex("a_b%&#") == r"a\_b\%\&\#"
    cells = {("", "a_b%&#|*", "x", "tau"): Estimate(2.0, np.nan, np.nan, 4)}
    sheet = Sheet(
        2, "c_%", [("", "a_b%&#|*", {"row": "a_b%&#|*"})], [("", "τ", {"column": "x", "metric": "tau"})], cells
    )
    assert r"a\_b\%\&\#\textbar{}*" in to_latex(sheet) and r"a\_b%&#\|\*" in to_markdown(sheet)
    assert "a_b%&#|*" in to_csv(sheet)


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = paper_records.lca_changes(tmp_path / "runs")[0]
    assert _main([str(folder), "--out", str(tmp_path / "out"), "--tables", "1,4,6,7", "--intervals"]) == 0
    assert sorted(path.name for path in (tmp_path / "out").iterdir())[:3] == ["table1.csv", "table1.md", "table1.tex"]
    assert "2,048" not in capsys.readouterr().out
    for wrong in (["--tables", "13"], ["--tables", "x"], ["--nonsense"]):
        with pytest.raises(LoadError) as caught:
            _main([str(folder), *wrong])
        assert "\n" not in str(caught.value)
    demo = write_run(tmp_path / "demo", [record("a"), record("a", "fold", commits=[3])])
    with pytest.raises(LoadError, match="none of the paper's pairs"):
        _main([str(demo)])


def test_runs_without_a_usable_request_say_why(tmp_path: Path) -> None:
    run = {"config": {"drafter": {"name": "llama"}}}
    failed = [record(name, arm, commits=[], error="out of memory") for name in "ab" for arm in ("ar", "fold")]
    nothing = write_run(tmp_path / "nothing", failed, run)
    for arguments in ([], ["--against", "fold"]):
        with pytest.raises(LoadError, match=r"no request was completed by every arm; .*2 failed: out of memory in ar"):
            _main([str(nothing), *arguments])
    some = write_run(tmp_path / "some", [record("a"), record("b"), *failed[1::2]], run)
    with pytest.raises(LoadError, match=r"^fold has no usable record .*2 tried; failed: out of memory"):
        _main([str(some), "--against", "fold"])


def test_table_1_is_the_papers(tmp_path: Path) -> None:
    published = paper.published(1)
    cells = {(row["row"], row["column"]): row["printed"] for row in published.to_dict("records")}
    assert {(row, column): text for (_, row, column, _), text in table1().cells.items()} == cells


def test_tables_of_the_configuration_need_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _main(["--tables", "1,6", "--out", str(tmp_path)]) == 0
    assert "| Llama-3.1-8B | DFlash | 10 | 5 full | 3K | 2048 |" in capsys.readouterr().out
    assert sorted(file.name for file in tmp_path.iterdir()) == [
        f"table{number}.{suffix}" for number in (1, 6) for suffix in ("csv", "md", "tex")
    ]
    for arguments in ([], ["--tables", "1,2"]):
        with pytest.raises(LoadError, match="only --tables 1,6 can be made"):
            _main([*arguments, "--out", str(tmp_path)])
