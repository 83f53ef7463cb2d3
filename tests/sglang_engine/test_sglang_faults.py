"""What SGLang would pass over in silence: a plugin that fails, a hook that does not apply, a backend that is another.

Each of them stops the process with one line, or is noticed by the proof that the engine asks for before it decodes.
"""

from __future__ import annotations

import inspect
import os
import pkgutil
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.plugins import hook_registry
from sglang.srt.plugins.hook_registry import HookRegistry
from simulated import Simulated, raw_config, save_pair

from harness.drafters import read_config
from harness.engines.sglang import attention, plugin, session
from harness.engines.sglang.process import check_capacity, check_report, require_plugin
from harness.engines.sglang.setting import (
    MODEL_PACKAGE_VARIABLE,
    PLUGIN,
    PLUGIN_GROUP,
    VARIABLE,
    VERSION_VARIABLE,
    Setting,
    SettingError,
    check_version,
    read_setting,
)

FOLD = Setting("fold", {"window": 12})


@pytest.fixture
def hooks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Registries as a fresh process has them, restored afterwards."""
    monkeypatch.setattr(HookRegistry, "_hooks", type(HookRegistry._hooks)(list))
    monkeypatch.setattr(HookRegistry, "_patched", set())
    # Not into modules that have imported a target: they would keep it after the test.
    monkeypatch.setattr(hook_registry, "_propagate_patch", lambda *args: 0)
    for target in (*plugin.WORKERS, plugin.GRAPHS, plugin.STATE):
        owner, _, name = target.rpartition(".")
        holder = pkgutil.resolve_name(owner)
        monkeypatch.setattr(holder, name, getattr(holder, name))
    before = ATTENTION_BACKENDS[session.BACKEND]
    yield
    ATTENTION_BACKENDS[session.BACKEND] = before
    session._session = None


def stopped(monkeypatch: pytest.MonkeyPatch, environment: dict[str, str]) -> str:
    for name in (VARIABLE, MODEL_PACKAGE_VARIABLE):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as caught:
        plugin.register()
    text = str(caught.value.code)
    assert text.startswith("fold-bench: the SGLang plugin cannot run: ") and "\n" not in text
    return text


# --------------------------------------------------------------------------------------------------- the setting


def test_without_a_setting_the_plugin_does_nothing(hooks: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    before = ATTENTION_BACKENDS[session.BACKEND]
    plugin.register()
    assert ATTENTION_BACKENDS[session.BACKEND] is before and not HookRegistry._hooks


def test_with_a_setting_all_hooks_are_applied(hooks: None, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in FOLD.environment().items():
        monkeypatch.setenv(name, value)
    plugin.register()
    assert {*plugin.WORKERS, plugin.GRAPHS, plugin.STATE} <= HookRegistry._patched
    assert session.current().setting == FOLD


def test_a_setting_survives_the_environment() -> None:
    for setting in (FOLD, Setting("original"), Setting("yarn", {"reference": 3072, "temperature": False})):
        assert read_setting(setting.environment()) == setting


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("fold", "is not JSON"),
        ('["fold"]', "give an object such as"),
        ('{"options": {}}', "give an object such as"),
        ('{"method": "fold", "option": {}}', "unknown key 'option'"),
        ('{"method": "fold", "options": 3}', "options is 3, not an object"),
        ('{"method": "foldd"}', "unknown method 'foldd'"),
        ('{"method": "fold"}', "method fold needs window"),
        ('{"method": "fold", "options": {"window": 0}}', "method.window is 0"),
        ('{"method": "fold", "options": {"size": 1}}', "has no option 'size'"),
    ],
)
def test_a_bad_setting_stops_the_process(text: str, reason: str, hooks: None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert reason in stopped(monkeypatch, {**FOLD.environment(), VARIABLE: text})


def test_a_model_package_that_is_not_set_stops_the_process(hooks: None, monkeypatch: pytest.MonkeyPatch) -> None:
    environment = {VARIABLE: FOLD.environment()[VARIABLE]}
    assert "SGLANG_EXTERNAL_MODEL_PACKAGE is None" in stopped(monkeypatch, environment)


def test_another_version_of_sglang_stops_the_process_unless_it_is_named(
    hooks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("harness.engines.sglang.setting.installed_version", lambda engine: "0.5.19")
    assert "sglang 0.5.19 is installed" in stopped(monkeypatch, FOLD.environment())
    with pytest.raises(SettingError, match=f"{VERSION_VARIABLE}=0.5.19"):
        check_version({VERSION_VARIABLE: "0.5.20"})
    assert check_version({VERSION_VARIABLE: "0.5.19"}) == "0.5.19"
    monkeypatch.setattr("harness.engines.sglang.setting.installed_version", lambda engine: None)
    with pytest.raises(SettingError, match="not installed"):
        check_version({})


def test_a_plugin_that_raises_stops_the_process(hooks: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise RuntimeError("two\nlines")

    monkeypatch.setattr(plugin, "_hook", broken)
    assert stopped(monkeypatch, FOLD.environment()).endswith("two lines")


@pytest.mark.parametrize(
    "target", ["sglang.srt.managers.scheduler.Scheduler.no_such_method", "sglang.srt.no_such_module.function"]
)
def test_a_hook_that_does_not_apply_stops_the_process(
    target: str, hooks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plugin, "STATE", target)
    assert f"did not apply the hook on {target}" in stopped(monkeypatch, FOLD.environment())


@pytest.mark.slow
def test_sglang_itself_lets_neither_pass(tmp_path: Path) -> None:
    """In a process of its own, by SGLang's own loader, which catches what a plugin raises."""
    code = (
        "import sglang_cpu; sglang_cpu.start_sglang()\n"
        "from sglang.srt.plugins import load_plugins; load_plugins(); print('on')"
    )
    here = str(Path(__file__).parent)

    def run(environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
        full = {**os.environ, "PYTHONPATH": os.pathsep.join([here, *filter(None, [os.environ.get("PYTHONPATH")])])}
        command = [sys.executable, "-c", code]
        return subprocess.run(command, env={**full, **environment}, capture_output=True, text=True, cwd=tmp_path)

    good = run(FOLD.environment())
    assert good.returncode == 0 and good.stdout.strip() == "on", good.stderr
    bad = run({**FOLD.environment(), VARIABLE: '{"method": "foldd"}'})
    assert bad.returncode == 1 and "on" not in bad.stdout
    assert bad.stderr.strip().splitlines()[-1].startswith("fold-bench: the SGLang plugin cannot run: ")


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (None, "is not installed in this environment"),
        ("harness.engines.sglang.no_such_module:register", "does not load: ModuleNotFoundError"),
        ("harness.engines.sglang.plugin:no_such_function", "does not load: AttributeError"),
    ],
)
def test_a_plugin_that_is_not_there_is_noticed_in_every_arm(
    value: str | None, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    entries = [] if value is None else [metadata.EntryPoint(PLUGIN, value, PLUGIN_GROUP)]
    require_plugin()  # as installed here
    monkeypatch.setattr(metadata, "entry_points", lambda group: entries)
    with pytest.raises(RuntimeError, match=reason):
        require_plugin()


# ---------------------------------------------------------------------------------------- a worker that is set up wrong


def refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, setting: Setting, **changes: Any) -> str:
    """The one line with which an engine of this setting refuses to start."""
    window = changes.pop("window", None)
    pair = save_pair(tmp_path, raw_config(**changes))
    with pytest.raises(session.PluginError) as caught:
        Simulated(pair, setting, monkeypatch, window=window)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_sglangs_draft_window_and_the_method_must_agree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = refused(tmp_path, monkeypatch, Setting("engine_window", {"window": 12}))
    assert "--speculative-draft-window-size 12" in text
    text = refused(tmp_path, monkeypatch, Setting("engine_window", {"window": 12}), window=16)
    assert "which is 16" in text
    text = refused(tmp_path, monkeypatch, FOLD, window=16)
    assert "cuts the context of method fold" in text


def test_another_block_size_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = save_pair(tmp_path, raw_config())
    changed = read_config(pair.folder)
    monkeypatch.setattr(session, "read_config", lambda *args, **kwargs: type(changed)(**{**vars(changed), "block": 6}))
    with pytest.raises(session.PluginError, match="SGLang drafts 5 positions a round, the drafter's block is 6"):
        Simulated(pair, FOLD, monkeypatch)


def test_a_drafter_that_scales_its_embeddings_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drafting = {"mask_token_id": 60, "target_layer_ids": [1, 4, 6], "input_embedding_scale": 1.5}
    assert "scales its input embeddings by 1.5" in refused(tmp_path, monkeypatch, FOLD, dflash_config=drafting)


def test_a_model_that_the_package_did_not_give_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from harness.engines.sglang.models import drafters

    monkeypatch.setattr(drafters.DFlashDraftModel, "fold_bench_reads", False)
    assert "not by this plugin's model package" in refused(tmp_path, monkeypatch, FOLD)


def test_layers_that_sglang_reads_differently_than_the_checkpoint_says_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from harness.engines.sglang.models import drafters

    class Scaled(drafters.MethodAttention):
        def __init__(self, *args: Any, **kwargs: Any):
            super().__init__(*args, **kwargs)
            self.scaling = 1.0

    monkeypatch.setattr(drafters.MethodLayer, "attention_cls", Scaled)
    assert "draft layer 0 is (heads, kv heads, dim, scale, window, causal)" in refused(tmp_path, monkeypatch, FOLD)


def test_another_attention_backend_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang falls back from a name that it does not know, and would read our unrotated queries by that."""
    pair = save_pair(tmp_path, raw_config())
    engine = Simulated(pair, FOLD, monkeypatch)
    engine.draft_runner.draft_attention_backend = "flashinfer"
    with pytest.raises(session.PluginError, match="--speculative-draft-attention-backend fa3"):
        engine.worker.init_attention_backends()
    engine.draft_runner.draft_attention_backend = session.BACKEND
    engine.draft_worker.factory = lambda runner: object()
    with pytest.raises(session.PluginError, match=r"SGLang made the draft attention backend builtins\.object"):
        engine.worker.init_attention_backends()


def test_a_worker_whose_hook_did_not_apply_gets_no_backend() -> None:
    session.open_session(FOLD)
    with pytest.raises(session.PluginError, match="its hook did not apply"):
        attention.backend_factory(lambda runner: None)(SimpleNamespace(is_draft_worker=True))


def test_several_requests_at_once_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Simulated(save_pair(tmp_path, raw_config()), FOLD, monkeypatch)
    engine.start(20, 20)
    batch = engine._batch(ForwardMode.DECODE)
    batch.reqs = [engine.req, engine.req]
    with pytest.raises(session.PluginError, match="--max-running-requests 1"):
        engine.worker.forward_batch_generation(batch)


def test_a_prompt_from_another_requests_cache_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Simulated(save_pair(tmp_path, raw_config()), FOLD, monkeypatch)
    engine.start(20, 20)
    engine.req.rid = "another"
    with pytest.raises(session.PluginError, match="--disable-radix-cache"):
        engine._chunk(3)
    with pytest.raises(session.PluginError, match="request another decodes"):
        engine.round(0)


def test_a_rotary_table_that_sglang_replaces_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Simulated(save_pair(tmp_path, raw_config()), FOLD, monkeypatch)
    engine.start(20, 20)
    rotary = engine.worker.draft_model.layers[0].self_attn.rotary_emb
    rotary._ensure_cos_sin_cache_length(len(rotary.cos_sin_cache) + 1)  # as SGLang grows it
    with pytest.raises(RuntimeError, match="SGLang replaced the drafter's rotary table"):
        engine.start(20, 20)


# ------------------------------------------------------------------------------------------------------------ the proof


def state(**changes: Any) -> dict[str, Any]:
    """What a scheduler says with FOLD active."""
    report = {
        "method": "fold", "options": {"window": 12}, "bound": True, "algorithm": "DFLASH", "in_graph": True,
        "worker": "harness.engines.sglang.workers.DFlashWorker",
        "model": "harness.engines.sglang.models.drafters.DFlashDraftModel",
        "backend": "harness.engines.sglang.attention.MethodBackend", "engine_read": False, "draft_graph": True,
    }  # fmt: skip
    return {"speculative_algorithm": "DFLASH", "fold_bench": report | changes}


def test_the_proof_of_a_set_up_engine_is_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for setting in (FOLD, Setting("original"), Setting("cmr")):
        engine = Simulated(save_pair(tmp_path / setting.method, raw_config()), setting, monkeypatch)
        report = engine.session.report()
        graphs = setting.method == "cmr"  # which runs without, on a GPU too; a CPU has none anyway
        check_report({"fold_bench": report}, setting.method, setting.options, graphs=graphs)
    check_report(state(), "fold", {"window": 12}, graphs=True)
    check_report({"speculative_algorithm": None}, None, {}, graphs=True)


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        ({"speculative_algorithm": "DFLASH"}, "not active in SGLang's scheduler"),
        (state(bound=False), "its hook did not apply"),
        (state(method="window"), "says that window is active, not fold"),
        (state(options={"window": 13}), "not fold as asked for"),
        (state(worker="sglang.srt.speculative.dflash_worker_v2.DFlashWorkerV2"), "which is not fold by the plugin"),
        (state(model="sglang.srt.models.dflash.DFlashDraftModel"), "which is not fold by the plugin"),
        (
            state(backend="sglang.srt.layers.attention.flashinfer_backend.FlashInferAttnBackend"),
            "not fold by the plugin",
        ),
        (state(engine_read=True), "not fold by the plugin"),
        (state(draft_graph=False), "without a CUDA graph"),
        (state(in_graph=False), "in a CUDA graph"),
    ],
)
def test_a_proof_that_does_not_hold_stops_the_arm(found: dict[str, Any], reason: str) -> None:
    with pytest.raises(RuntimeError, match=reason):
        check_report(found, "fold", {"window": 12}, graphs=True)


def test_a_kv_cache_that_memory_cut_short_stops_the_arm() -> None:
    from sglang.srt.managers.scheduler_components.memory_usage import build_memory_usage

    assert "token_capacity" in inspect.signature(build_memory_usage).parameters
    check_capacity({"memory_usage": {"token_capacity": 1024}}, 1024)
    for found in ({"memory_usage": {"token_capacity": 1023}}, {}):
        with pytest.raises(RuntimeError, match=r"for the 1024 served: raise engine\.gpu_memory"):
            check_capacity(found, 1024)


@pytest.mark.parametrize("found", [state(), {"speculative_algorithm": "DFLASH"}])
def test_an_autoregressive_arm_that_drafts_is_stopped(found: dict[str, Any]) -> None:
    with pytest.raises(RuntimeError, match="in the autoregressive arm"):
        check_report(found, None, {}, graphs=True)
