"""fold-diagnose from command line to files on a tiny pair, and what it refuses."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest

from harness.diagnostics.command import default_shifts, document, longest_of_each_document, main, parse
from harness.drafters import random_tensors, save_drafter
from harness.requests import Request, request_path, write_requests
from tests.analysis.analysis_fixtures import record, write_run
from tests.engines.tiny import VOCAB, drafter_config, save_target

INPUTS, PROMPT = 6, 200


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Overrides of a tiny random pair with a request file of six documents at one level."""
    folder = tmp_path_factory.mktemp("pair")
    save_target("llama3", folder / "target")
    config = drafter_config()
    save_drafter(folder / "drafter", config, random_tensors(config, 1))
    draw = random.Random(0)
    requests = [
        Request(
            f"d{i}@1K",
            "demo_code",
            "demo_code",
            tuple(draw.randrange(2, VOCAB) for _ in range(PROMPT)),
            16,
            (),
            {"level": "1K", "source_id": f"d{i}"},
        )
        for i in range(INPUTS)
    ]
    write_requests(request_path(folder / "data", "demo_code", "demo"), requests, {})
    return [
        f"target.source={folder / 'target'}",
        "target.max_context=512",
        f"drafter.source={folder / 'drafter'}",
        "drafter.block=5",
        "drafter.window=16",
        f"data_dir={folder / 'data'}",
        "benchmark=demo_code",
        "engine.dtype=float32",
    ]


def test_all_three_in_one_pass(pair: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wanted = ["diagnostic=all", "diagnostic.pairs=40", "diagnostic.shifts=[8,64]", f"run_dir={tmp_path / 'out'}"]
    assert main([*pair, *wanted, "methods=[original,fold,cmr]"]) == 0
    printed = capsys.readouterr().out.split()
    names = [f"{name}{end}" for name in ("acceptance", "distance", "order") for end in (".csv", ".json", ".md", ".png")]
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == sorted(
        [*names, "acceptance.pdf", "distance.pdf", "order.pdf"]
    )
    assert sorted(printed) == sorted(str(p) for p in (tmp_path / "out").iterdir())

    rows = pd.read_csv(tmp_path / "out" / "acceptance.csv")
    assert len(rows) == 3 * INPUTS and set(rows["arm"]) == {"original", "fold", "cmr"}
    data = json.loads((tmp_path / "out" / "acceptance.json").read_text())
    of_fold = next(e for e in data["estimates"] if e["arm"] == "fold" and "minus" not in e)
    assert of_fold["value"] == pytest.approx(rows.loc[rows["arm"] == "fold", "tau"].mean(), abs=1e-5)
    assert of_fold["n"] == INPUTS
    changes = {(e["arm"], e["minus"]) for e in data["estimates"] if "minus" in e}
    assert changes == {("fold", "original"), ("cmr", "original"), ("cmr", "fold")}
    shifts = pd.read_csv(tmp_path / "out" / "distance.csv")
    assert sorted(set(shifts["shift"])) == [0, 8, 64] and len(shifts) == 3 * INPUTS
    order = pd.read_csv(tmp_path / "out" / "order.csv")
    assert set(order["low"]) == {64} and set(order.groupby("arm").size()) == {INPUTS}
    for name in ("acceptance", "distance", "order"):
        page = (tmp_path / "out" / f"{name}.md").read_text()
        for text in ("Pair: target demo", "Inputs: 6 of demo_code", "torch 2.", "Versions: fold-bench"):
            assert text in page
        assert b"/Type3" not in (tmp_path / "out" / f"{name}.pdf").read_bytes()


def test_again_gives_the_same_bytes(pair: list[str], tmp_path: Path) -> None:
    for name in ("a", "b"):
        assert main([*pair, "diagnostic=distance", "diagnostic.inputs=2", f"run_dir={tmp_path / name}"]) == 0
    for file in (tmp_path / "a").iterdir():
        assert file.read_bytes() == (tmp_path / "b" / file.name).read_bytes(), file.name


def test_the_decomposition_sums_and_takes_the_ratios_of_alpha(tmp_path: Path) -> None:
    lines = []
    for i in range(6):
        for level, tokens in (("1K", 1000), ("4K", 4000)):
            where = {"level": level, "prompt_tokens": tokens}
            name = f"r{i}@{level}"
            lines.append(record(name, **where))
            lines.append(record(name, "original", commits=[2] * 6, **where))
            lines.append(record(name, "window", commits=[3] * 4 if i % 2 else [4] * 3, **where))
            for arm, alpha, commits in (("fold", 2.0, [4] * 3), ("fold#2", 4.0, [6] * 2)):
                config = {"window": 256, "alpha": alpha}
                lines.append(record(name, arm, commits=commits, method_config=config, **where))
    runs = write_run(tmp_path / "run", lines)
    out = tmp_path / "out"
    assert main(["diagnostic=decomposition", f"diagnostic.runs=[{runs}]", f"run_dir={out}"]) == 0
    estimates = json.loads((out / "decomposition.json").read_text())["estimates"]
    found = {(e["level"], e["change"]): e["value"] for e in estimates if "change" in e}
    for level in ("1K", "4K", "all"):
        assert found[level, "original → window"] == pytest.approx(1.5)
        assert found[level, "window → fold"] == pytest.approx(0.5)
        assert found[level, "original → fold"] == pytest.approx(2.0)
    ratios = {e["level"]: (e["alpha"], e["value"], e["n"]) for e in estimates if "alpha" in e}
    assert ratios["all"] == ("4 vs. 2 (W = 256)", 1.5, 12)


def test_records_without_settings_have_no_alpha(tmp_path: Path) -> None:
    lines = [record(name, arm, commits=[2, 2]) for name in "ab" for arm in ("ar", "original", "window", "fold")]
    runs = write_run(tmp_path / "run", lines)
    assert main(["diagnostic=decomposition", f"diagnostic.runs=[{runs}]", f"run_dir={tmp_path / 'out'}"]) == 0


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["diagnostic=x"], "diagnostic=x: choose one of acceptance, distance, order, all, latency, decomposition"),
        (["diagnostic.stide=2"], "unknown option 'diagnostic.stide=2'; diagnostic has inputs, tokens, stride"),
        (["diagnostic.stride=two"], "diagnostic.stride"),
        (["diagnostic.stride=0"], "diagnostic.stride=0: must be at least 1"),
        (["diagnostic.positions=0"], "diagnostic.positions=0: must be at least 1"),
        (["diagnostic.shifts=[]"], "give one or more positive distances"),
        (["diagnostic.shifts=[-1]"], "give one or more positive distances"),
        (["diagnostic=decomposition"], "diagnostic.runs=[DIR,...] go together"),
        (["diagnostic=decomposition", "diagnostic.runs=[nowhere]"], "nowhere is not a folder"),
        (["diagnostic=order", "engine=vllm"], "engine=vllm: diagnostics look inside the reference engine only"),
        (["-m", "method=fold", "method.alpha=1,2"], "one diagnostic at a time"),
        (["benchmark=demo_cod"], "no benchmark is called 'demo_cod'"),
    ],
)
def test_a_mistake_is_one_line_and_code_2(
    arguments: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    said = capsys.readouterr()
    assert says in said.err and said.err.count("\n") == 1 and said.out == ""
    assert not list(tmp_path.iterdir())


def test_an_order_probe_without_five_documents_says_so(
    pair: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*pair, "diagnostic=order", "diagnostic.inputs=4", f"run_dir={tmp_path / 'out'}"]) == 2
    assert "fold-diagnose: order: no separation with inputs of at least five documents" in capsys.readouterr().err


def test_the_order_probe_takes_the_longest_input_of_each_document() -> None:
    asked = [
        Request(f"{name}@{size}", benchmark, "t", (1,) * size, 8, (), {"source_id": name})
        for size in (10, 30, 20)
        for benchmark, name in (("a", "x"), ("a", "y"), ("b", "x"))
    ]
    longest = longest_of_each_document(asked)
    assert [(r.benchmark, r.id) for r in longest] == [("a", "x@30"), ("a", "y@30"), ("b", "x@30")]
    assert len({document(r) for r in longest}) == 3
    alone = replace(asked[0], meta={})
    assert document(alone) == "a/x@10"


def test_defaults() -> None:
    options, rest = parse(["+model=llama", "diagnostic=order"])
    assert options.wants("order") and not options.wants("distance")
    assert rest == ["+model=llama", "engine=reference"]  # the preset names vLLM
    assert parse([])[0].name == "acceptance"
    assert default_shifts(3072) == [8192, 32768, 131072]
    assert default_shifts(512) == [256, 1024, 8192, 32768, 131072]


def test_help_names_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    said = capsys.readouterr().out
    for option in ("inputs", "tokens", "stride", "shifts", "positions", "recent", "pairs", "runs"):
        assert f"diagnostic.{option}=" in said
