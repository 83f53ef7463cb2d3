"""Configuration: what composes, what is refused and how, without a model, a GPU or a network."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.cli import compose_plans, main
from harness.config import Plan, UserError, check, make_arms
from harness.engines import TESTED
from tests.harness.helpers import ROOT, toy_pair

PAIRS = {  # Table 1: target, B, W; the drafters propose B - 1 (z-lab) or B (DeepSpec); Train is YaRN's reference
    "llama": ("llama", 10, 9, 2048, 3072),
    "qwen35": ("qwen35", 16, 15, 4096, 40000),
    "gemma": ("gemma", 7, 7, 4096, 4096),
    "gemma_dspark": ("gemma", 7, 7, 4096, 4096),
    "qwen3": ("qwen3", 7, 7, 2048, 4096),
    "qwen3_dspark": ("qwen3", 7, 7, 2048, 4096),
}


def plan(*arguments: str) -> Plan:
    plans = compose_plans(list(arguments))
    assert plans is not None and len(plans) == 1
    return plans[0]


def names(plan: Plan) -> list[str]:
    return [arm.name for arm in plan.arms]


@pytest.fixture
def pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Overrides of a toy pair; no engine can be opened, because no test here may get that far."""

    def never(config: Any) -> Any:
        raise AssertionError("an engine was opened")

    monkeypatch.setattr("harness.engines.open_engine", never)
    monkeypatch.chdir(tmp_path)
    return toy_pair(tmp_path / "pair")


# ------------------------------------------------------------------------------------------------------ what composes


def test_the_default_is_the_demo() -> None:
    demo = plan()
    assert names(demo) == ["original", "window", "fold"]
    assert [benchmark.name for benchmark in demo.benchmarks] == ["demo_code", "demo_docs", "demo_kv"]
    assert (demo.config.target.name, demo.config.drafter.name, demo.config.engine.name) == ("demo", "demo", "reference")


@pytest.mark.parametrize("name", PAIRS)
def test_presets_of_table_1(name: str) -> None:
    target, block, proposals, window, train = PAIRS[name]
    plus = "" if name == "qwen3" else "+"  # both spellings work
    preset = plan(f"{plus}model={name}", "methods=[fold,yarn,streamingllm,rerope]")
    drafter = preset.config.drafter
    assert (preset.config.target.name, drafter.block, drafter.proposals) == (target, block, proposals)
    assert (drafter.target, drafter.name, preset.config.engine.name) == (target, name, "vllm")
    fold, yarn, streaming, rerope = (arm.options for arm in preset.arms)
    assert fold["window"] == rerope["window"] == window and fold["alpha"] == 2 and yarn["reference"] == train
    assert rerope["reference"] == 4096 and streaming == {"sinks": 4, "recent": 2044}  # the same for every model
    for source in (preset.config.target, drafter):
        assert source.revision is not None and len(source.revision) == 40 and source.source.count("/") == 1


def test_one_method_or_several_or_all() -> None:
    assert names(plan("method=rerope")) == ["rerope"]
    assert names(plan("methods=[fold,infllm,cmr]")) == ["fold", "infllm", "cmr"]
    assert names(plan("methods=[ar,ar]")) == ["ar", "ar"]
    every = plan("methods=all")
    assert len(every.arms) == 9 and len(make_arms(every.arms)) == 9


def test_options_reach_the_methods_that_have_them() -> None:
    arms = {arm.name: arm.options for arm in plan("methods=[original,fold,window,yarn]", "method.window=99").arms}
    assert arms["fold"]["window"] == arms["window"]["window"] == 99
    assert arms["original"] == {} and "window" not in arms["yarn"]
    arms = {arm.name: arm.options for arm in plan("drafter.window=77", "drafter.train_length=300", "methods=all").arms}
    assert arms["infllm"]["window"] == 77 and arms["yarn"]["reference"] == 300


def test_options_reach_the_members_of_a_group() -> None:
    assert {benchmark.n for benchmark in plan("benchmark.n=1").benchmarks} == {1}
    assert [benchmark.levels for benchmark in plan("benchmark=demo_kv", "benchmark.levels=[1K]").benchmarks] == [["1K"]]


def test_a_sweep_runs_each_combination_once(capsys: pytest.CaptureFixture[str]) -> None:
    plans = compose_plans(["-m", "method=fold,yarn", "method.alpha=2,4"])
    assert plans is not None
    assert [(arm.name, arm.options.get("alpha")) for each in plans for arm in each.arms] == [
        ("fold", 2),
        ("fold", 4),
        ("yarn", None),
    ]
    assert "no option 'alpha' in yarn, so it is left out" in capsys.readouterr().err
    assert len({each.run_dir for each in plans}) == 3
    swept = compose_plans(["benchmark=demo_kv", "-m", "drafter.window=64,128"])
    assert swept is not None and len(swept) == 2


def test_the_run_directory_is_a_function_of_the_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert plan().run_dir == plan().run_dir == plan("data_dir=elsewhere").run_dir
    assert plan().run_dir.parent == tmp_path / "results" / "runs"
    assert plan("warmup_tokens=3").run_dir != plan().run_dir
    assert plan("method=fold", "method.alpha=4").run_dir != plan("method=fold").run_dir
    assert plan("run_dir=here/r1").run_dir == tmp_path / "here" / "r1"
    assert not list(tmp_path.iterdir())  # composing leaves nothing behind, nor does Hydra


def test_a_configuration_folder_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "drafter").mkdir()
    (tmp_path / "drafter" / "mine.yaml").write_text(
        "name: mine\ntarget: demo\nsource: me/mine\nfamily: deepspec\nblock: 5\nwindow: 64\ntrain_length: 256\n"
    )
    mine = plan("--config-dir", str(tmp_path), "drafter=mine", "method=fold")
    assert mine.config.drafter.proposals == 5 and mine.arms[0].options["window"] == 64


@pytest.mark.parametrize("arguments", [["--cfg", "job"], ["-c", "job", "--resolve"], ["--help"]])
def test_information_needs_no_model(
    arguments: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    try:
        assert main(arguments) == 0
    except SystemExit as stop:
        assert not stop.code
    shown = capsys.readouterr().out
    assert "demo" in shown
    assert not list(tmp_path.iterdir())


def test_help_shows_how_and_which(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    shown = capsys.readouterr().out
    for text in ("+model=llama", "method: cmr, engine_window, fold", "Exit code", "gemma_dspark", "benchmark: all, "):
        assert text in shown


# -------------------------------------------------------------------------------------------------- what is refused

MISTAKES = {
    "+model=lama": "no model is called 'lama'; choose from gemma, gemma_dspark, llama, qwen3, qwen35, qwen3_dspark",
    "model=lama": "no model is called 'lama'",
    "method=flod": "no method is called 'flod'; choose from cmr, engine_window, fold",
    "methods=[flod]": "unknown method 'flod'; choose from ar, original, window",
    "methods=[]": "give a list, for example methods=[original,fold], or methods=all",
    "methods=fold": "give a list, for example methods=[original,fold], or methods=all",
    "method=fold methods=[yarn]": "both method= and methods= are given",
    "method=fold,yarn": "use methods=[fold,yarn] for one run of all of them, or -m for one run each",
    "benchmark=gvo": "no benchmark is called 'gvo'; choose from all, ",
    "engine=trt": "no engine is called 'trt'; choose from reference, sglang, vllm",
    "+typo=1": "unknown option 'typo'; the configuration has target, drafter, engine",
    "typo=1": "unknown option 'typo'",
    "+drafter.windw=1": "unknown option 'drafter.windw'; drafter has name, target, source",
    "drafter.windw=1": "unknown option 'drafter.windw'; drafter has name, target, source",
    "method.alpha=0.5": "method.alpha is 0.5",
    "method=fold method.alpha=x": "method.alpha is 'x'",
    "method.window=-1": "method.window is -1: must be an integer of at least 1",
    "method=yarn method.alpha=2": "no option 'alpha' in yarn (yarn has reference, temperature)",
    "method=fold method.alhpa=2": "no option 'alhpa' in fold (fold has window, alpha",
    "engine.threads=two": "engine.threads=two: value 'two' of type 'str' could not be converted to Integer",
    "engine.threads=0": "engine.threads=0: must be at least 1",
    "engine.dtype=int8": "engine.dtype=int8: choose one of auto, float32",
    "engine.gpu_memory=0.5": "engine.gpu_memory is no option of the chosen engine",
    "engine=vllm engine.gpu_memory=1.5": "engine.gpu_memory=1.5: must be a share above 0, at most 1",
    "engine=vllm engine.kv_cache_gib=0": "engine.kv_cache_gib=0.0: must be above 0",
    "engine.device=tpu": "engine.device=tpu: choose one of auto, cpu, cuda",
    "warmup_tokens=-1": "warmup_tokens=-1: must not be negative",
    "max_gap=-1": "max_gap=-1.0: must not be negative",
    "max_gap=inf": "max_gap=inf: must not be negative, nor infinite",
    "benchmark.n=-3": "benchmark.n=-3: must be at least 1",
    "benchmark.max_new_tokens=0": "benchmark.max_new_tokens=0: must be at least 1",
    "drafter.source=pkg://nowhere/x": "drafter.source=pkg://nowhere/x: there is no package 'nowhere'",
    "drafter.window=0": "drafter.window=0: must be at least 1",
    "drafter.family=zlba": "drafter.family=zlba: choose one of zlab, deepspec",
    "drafter.block=???": "no value for drafter.block",
    "drafter.block=7": "block size 7 was asked for, but the checkpoint",
    "drafter.family=deepspec": "drafter.family=deepspec means 8 proposals for B = 8, but the checkpoint",
    "drafter.source=nowhere": "nowhere: no such folder, and not a Hub id of the form owner/name",
    "drafter=llama": "drafter llama was trained for target llama, not demo",
    "target.source=nowhere": "target.source=nowhere: no such folder",
    "target.max_context=9000": "target.max_context=9000: the checkpoint has 8192 positions",
    "target.max_context=200": "request r000 needs 256 tokens of context, target demo has 200",
    "hydra.run.dir=x": "hydra.run.dir=x has no effect here: give run_dir=",
    "engine=3": "Config group override must be a string",
    "fold": "Error parsing override 'fold'",
    "--fold": "unrecognized arguments: --fold; see fold-bench --help",
    "-m method=fold method.alpha=2,0.5": "method.alpha is 0.5",
    "-m method=fold,flod": "no method is called 'flod'",
    "-m method=original,yarn method.alpha=2 +typo=1": "unknown option 'typo'",
    "run_dir=/dev/null/x": "/dev/null/x cannot be written (/dev/null is not a folder); choose another run_dir=",
    "run_dir=/proc/x": "/proc/x cannot be written",
    "data_dir=/dev/null/x": "(/dev/null is not a folder); choose another data_dir=",
    "data_dir=elsewhere": "has no usable tokenizer",
}


def one_line(capsys: pytest.CaptureFixture[str]) -> str:
    """What was said, which must be one line, on stderr, from fold-bench, and no traceback."""
    said = capsys.readouterr()
    lines = [line for line in said.err.splitlines() if not line.startswith("note: ")]
    assert len(lines) == 1 and lines[0].startswith("fold-bench: ") and not said.out, said.err
    return lines[0]


@pytest.mark.parametrize(("mistake", "message"), MISTAKES.items(), ids=MISTAKES)
def test_a_mistake_is_one_line_and_exit_code_2(
    mistake: str, message: str, pair: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = mistake.split(" ")
    keys = {text.partition("=")[0] for text in given}
    assert main([*(text for text in pair if text.partition("=")[0] not in keys), *given]) == 2
    assert message in one_line(capsys)
    assert [path.name for path in tmp_path.iterdir()] == ["pair"], "a mistake must leave nothing behind"


@pytest.mark.parametrize("name", ["vllm", "sglang"])
def test_a_missing_engine_says_what_to_install(
    name: str, pair: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("harness.engines.installed_version", lambda engine: None)
    assert main([*pair, f"engine={name}"]) == 2
    assert f"pip install -e '.[{name}]'" in (said := one_line(capsys)) and "engine=reference" in said


@pytest.mark.parametrize(("name", "tested"), [("vllm", "0.28.0"), ("sglang", "0.5.18")])
def test_another_version_of_an_engine_is_refused_unless_it_is_allowed(
    name: str, tested: str, pair: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("harness.engines.installed_version", lambda engine: "0.99.1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert main([*pair, f"engine={name}"]) == 2
    said = one_line(capsys)
    assert "is version 0.99.1" in said and f"pip install {name}=={tested}" in said
    assert "engine.allow_version=0.99.1" in said
    assert main([*pair, f"engine={name}", "engine.allow_version=0.99.2"]) == 2
    assert "is version 0.99.1" in one_line(capsys)
    with pytest.raises(AssertionError, match="an engine was opened"):
        main([*pair, f"engine={name}", "engine.allow_version=0.99.1"])


def test_presets_on_a_machine_without_gpu(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("harness.engines.installed_version", lambda engine: None)
    for preset in PAIRS:
        assert main([f"+model={preset}", "method=fold"]) == 2
        assert "engine vllm is not installed" in one_line(capsys)
    assert main(["+model=llama", "engine=reference"]) == 2
    assert "target llama needs a GPU and torch sees none on this machine" in one_line(capsys)
    monkeypatch.setattr("harness.engines.installed_version", lambda engine: TESTED[engine])
    assert main(["+model=gemma", "method=fold"]) == 2  # installed, but still no GPU
    assert "target gemma needs a GPU" in one_line(capsys)
    assert main(["engine=sglang"]) == 2
    assert "engine sglang needs a GPU" in one_line(capsys)
    assert main(["engine.device=cuda"]) == 2
    assert "engine.device=cuda: torch sees no GPU" in one_line(capsys)


def test_an_unreadable_request_file(pair: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "pair" / "data" / "demo_code" / "demo.jsonl.zst"
    good = file.read_bytes()
    for damage in (b"", b"garbage", good[:-5]):
        file.write_bytes(damage)
        assert main(pair) == 2
        assert "has changed since it was prepared" in one_line(capsys)
        assert file.read_bytes() == damage
    file.write_bytes(good)
    file.with_name("demo.manifest.json").write_text("{")
    assert main(pair) == 2
    assert "demo.manifest.json is unreadable" in one_line(capsys)
    file.unlink()
    file.mkdir()
    assert main(pair) == 2
    one_line(capsys)
    assert not (tmp_path / "results").exists()


def test_requests_made_with_another_tokenizer(
    pair: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A token id beyond the target's vocabulary would be a failed cell for every arm, long after the models loaded."""
    config = tmp_path / "pair" / "target" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"vocab_size": 5}))
    assert main(pair) == 2
    said = one_line(capsys)
    assert "request r000 has token id" in said and "target demo has ids below 5" in said
    assert not (tmp_path / "results").exists()


def test_a_target_folder_without_configuration(
    pair: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "pair" / "target" / "config.json").unlink()
    assert main(pair) == 2
    assert "config.json is unreadable" in one_line(capsys)


def test_a_target_that_the_drafter_was_not_made_for(
    pair: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = {"max_position_embeddings": 8192, "num_hidden_layers": 12, "hidden_size": 24, "vocab_size": 61}
    (tmp_path / "pair" / "target" / "config.json").write_text(json.dumps(other))
    assert main(pair) == 2
    said = one_line(capsys)
    assert "drafter demo does not fit target demo: the drafter " in said and "9 layers, this one has 12" in said


def test_a_hub_that_cannot_be_reached(
    pair: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub

    def unreachable(*_: Any, **__: Any) -> str:
        raise OSError("no route\nto host")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", unreachable)
    rest = [text for text in pair if "target.source" not in text]
    assert main([*rest, "target.source=owner/gated", "target.revision=abc"]) == 2
    said = one_line(capsys)
    assert "owner/gated at abc cannot be fetched (no route to host)" in said and "target.source=<folder>" in said


def test_check_accepts_the_toy_pair(pair: list[str]) -> None:
    assert check(plan(*pair)) is None
    with pytest.raises(UserError):
        check(plan(*(text for text in pair if "block" not in text), "drafter.block=9"))


def test_all_names_of_the_tree_are_their_files() -> None:
    for group in ("target", "drafter", "engine", "method", "benchmark"):
        for file in (ROOT / "conf" / group).glob("*.yaml"):
            assert f"\nname: {file.stem}\n" in "\n" + file.read_text(), file
