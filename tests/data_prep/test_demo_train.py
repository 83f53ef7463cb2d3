"""Training the demo's drafter: labels, masks, generation, export, and a run that is killed again and again."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from test_demo_tiny import HEAD_DIM, HEADS, HIDDEN, KV_HEADS, LAYERS, tiny_model, vocabulary, write_gguf
from transformers import AutoModelForCausalLM, AutoTokenizer

from data_prep.demo import corpus as demo_corpus
from data_prep.demo.corpus import Corpus, ForbiddenText, check_allowed, long_docstrings
from data_prep.demo.draft_model import DraftConfig, Drafter, draft_labels, export
from data_prep.demo.generate import BatchTarget, Prompt, PromptMaker, Shard, loop_start
from data_prep.demo.gguf_convert import convert_gguf
from data_prep.demo.train import Log, Options, Pool, Trainer, TrainError, draw_batch, gather, main

IDS = (0, 2)


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Path:
    """The tiny Llama as a target folder."""
    folder = tmp_path_factory.mktemp("target")
    write_gguf(folder / "tiny.gguf", tiny_model())
    (folder / "model").mkdir()
    weights = convert_gguf(folder / "tiny.gguf", folder / "model")
    (folder / "model" / "source.json").write_text(json.dumps({"weights_sha256": weights, "files": {}}))
    return folder / "model"


@pytest.fixture(scope="module")
def packages(tmp_path_factory) -> Path:
    """A site-packages folder with one package of random sources."""
    root = tmp_path_factory.mktemp("lib") / "site-packages"
    (root / "numpy").mkdir(parents=True)
    words = random.Random(0)
    for i in range(40):
        text = "Text of words. " * 60
        lines = [f'def f{j}(self):\n    """{text}"""\n    return {words.random()}\n' for j in range(6)]
        (root / "numpy" / f"m{i}.py").write_text("\n".join(lines))
    return root


# --- corpus ---------------------------------------------------------------------------------------------------------


def test_standard_library_is_refused_wherever_it_is_named(tmp_path, monkeypatch):
    stdlib = Path(sysconfig.get_path("stdlib"))
    for path in (Path(os.__file__), stdlib / "json" / "decoder.py", Path(random.__file__)):
        with pytest.raises(ForbiddenText):
            check_allowed(path)
        with pytest.raises(ForbiddenText):
            demo_corpus.read_text(path)
    link = tmp_path / "site-packages" / "numpy"
    link.parent.mkdir()
    link.symlink_to(stdlib / "json")
    with pytest.raises(ForbiddenText):
        check_allowed(link / "decoder.py")
    (tmp_path / "own.py").write_text("x = 1\n")
    with pytest.raises(ForbiddenText, match="site-packages"):
        check_allowed(tmp_path / "own.py")
    check_allowed(Path(np.__file__))


def test_corpus_of_the_standard_library_cannot_be_made(monkeypatch):
    monkeypatch.setattr(demo_corpus, "PACKAGES", ("json", "email"))
    with pytest.raises(ForbiddenText):
        Corpus(roots=[Path(sysconfig.get_path("stdlib"))])


def test_installed_corpus_holds_no_standard_library_file_and_splits_files():
    kept, held = Corpus(), Corpus(held_out=True)
    stdlib = Path(sysconfig.get_path("stdlib")).resolve()
    for corpus in (kept, held):
        for name in corpus.names[::29]:
            path = corpus._paths[name].resolve()
            assert not path.is_relative_to(stdlib) or "site-packages" in path.relative_to(stdlib).parts[:1]
    assert not set(kept.names) & set(held.names)
    assert 0.03 < len(held.names) / (len(kept.names) + len(held.names)) < 0.1


def test_long_docstrings_are_found_at_every_level():
    text = "x" * 700
    source = f'"""{text}1"""\nclass A:\n    """{text}2"""\n    def f(self):\n        """{text}3"""\n        "{text}4"\n'
    assert [found[-1] for found in long_docstrings(source)] == ["1", "2", "3"]


def test_prompts_have_the_asked_length_and_every_kind(target, packages):
    maker = PromptMaker(AutoTokenizer.from_pretrained(target), Corpus(roots=[packages]))
    rng = np.random.default_rng(0)
    for kind in ("code", "docs", "repeat", "sampled"):
        for _ in range(12):
            prompt = maker.make(160, rng, kind)
            assert len(prompt.ids) == 160 and prompt.kind == kind and prompt.sampled == (kind == "sampled")


# --- generation -----------------------------------------------------------------------------------------------------


def random_prompts(rows: int, length: int) -> list[Prompt]:
    generator = torch.Generator().manual_seed(0)
    return [Prompt(torch.randint(3, 260, (length,), generator=generator).tolist(), "code") for _ in range(rows)]


def test_batch_target_equals_transformers(target):
    own = BatchTarget(target, IDS, dtype=torch.float32)
    reference = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    prompts = random_prompts(5, 33)
    tokens, argmax, features, lengths = own.generate(prompts, 24, seed=0, chunk=2)
    for row, prompt in enumerate(prompts):
        ids = torch.tensor([prompt.ids])
        with torch.no_grad():
            expected = reference.generate(ids, max_new_tokens=24, do_sample=False)[0]
            n = int(lengths[row])
            assert tokens[row, :n].tolist() == expected.tolist()
            out = reference(expected[None], output_hidden_states=True)
        # The last token is not run when the budget ends there, so it may have no features and no choice.
        assert argmax[row, : n - 1].tolist() == out.logits[0, : n - 1].argmax(-1).tolist()
        both = torch.cat([out.hidden_states[i + 1][0] for i in IDS], dim=-1)
        torch.testing.assert_close(features[row, : n - 1], both[: n - 1], rtol=1e-4, atol=1e-4)
        assert not features[row, n:].any() and not tokens[row, n:].any()


def test_rows_that_end_do_not_disturb_the_others(target, monkeypatch):
    """Ends are made frequent by calling a common byte the end token; every row must equal its own lonely run."""
    own = BatchTarget(target, IDS, dtype=torch.float32)
    prompts = random_prompts(12, 20)
    plain = own.generate(prompts, 40, seed=0)[0][:, 20:]
    own.eos = int(plain[:, 5:20].flatten().bincount().argmax())
    together = own.generate(prompts, 40, seed=0)
    assert len(set(together[3].tolist())) > 1, "no row ended early: the test tests nothing"
    for row, prompt in enumerate(prompts):
        alone = own.generate([prompt], 40, seed=0)
        n = int(alone[3][0])
        assert int(together[3][row]) == n
        assert together[0][row, :n].tolist() == alone[0][0, :n].tolist()
        torch.testing.assert_close(together[2][row, : n - 1], alone[2][0, : n - 1], rtol=1e-4, atol=1e-4)


def slow_loop_start(tokens: list[int], begin: int, longest: int, least: int) -> int | None:
    for period in range(1, longest + 1):
        start = len(tokens) - period
        while start - 1 >= begin and tokens[start - 1] == tokens[start - 1 + period]:
            start -= 1
        if len(tokens) - start >= max(least, 3 * period):
            return start
    return None


def test_loop_start_equals_a_slow_search():
    rng = np.random.default_rng(0)
    for _ in range(200):
        tokens = rng.integers(0, 3, int(rng.integers(8, 30)))
        cycle = rng.integers(0, 3, int(rng.integers(1, 5)))
        tokens = np.concatenate([tokens, np.tile(cycle, int(rng.integers(0, 12)))])
        assert loop_start(tokens, 4, 6, 12) == slow_loop_start(tokens.tolist(), 4, 6, 12)


# --- labels and masks -----------------------------------------------------------------------------------------------


def test_labels_equal_a_slow_loop():
    generator = torch.Generator().manual_seed(0)
    for trial in range(30):
        s, block = 24, 5
        length = s if trial % 2 else 19
        tokens = torch.randint(0, 2, (s,), generator=generator)
        argmax = torch.randint(0, 2, (s,), generator=generator)
        labels, valid = draft_labels(tokens, argmax, length, block)
        for t in range(s):
            exact = True
            for k in range(1, block):
                # Slot k stands for position t + k; the tokens t+1 .. t+k-1 before it must be the target's own.
                if k > 1 and t + k - 1 < s:
                    exact = exact and bool(tokens[t + k - 1] == argmax[t + k - 2])
                inside = t + k < length
                assert bool(valid[t, k - 1]) == (exact and inside), (t, k)
                if exact and inside:
                    assert labels[t, k - 1] == argmax[t + k - 1]


def tiny_drafter(layers: int = 2, seed: int = 0) -> Drafter:
    torch.manual_seed(seed)
    config = DraftConfig(
        hidden_size=HIDDEN, intermediate_size=96, num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM,
        num_layers=layers, block_size=4, target_layer_ids=IDS, num_target_layers=LAYERS,
        vocab_size=len(vocabulary()[0]), mask_token_id=0, rope_theta=1e4,
    )  # fmt: skip
    drafter = Drafter(config)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.copy_(torch.randn(parameter.shape) * 0.3 + (1.0 if parameter.ndim == 1 else 0.0))
        drafter.feature_scale.copy_(torch.rand(drafter.feature_scale.shape) + 0.5)
    return drafter.double()


def slow_block(weights: dict[str, torch.Tensor], config: DraftConfig, features, anchor: int, x) -> torch.Tensor:
    """One block by loops over queries, heads and keys; ``weights`` are the exported ones (fc holds the scale)."""

    def norm(v, w):
        return w * v / (v.square().mean(-1, keepdim=True) + config.rms_norm_eps).sqrt()

    def rope(v, position):
        half = config.head_dim // 2
        out = v.clone()
        for i in range(half):
            a = torch.tensor(position / config.rope_theta ** (2 * i / config.head_dim), dtype=torch.float64)
            out[i] = v[i] * a.cos() - v[i + half] * a.sin()
            out[i + half] = v[i + half] * a.cos() + v[i] * a.sin()
        return out

    d, group = config.head_dim, config.num_heads // config.num_kv_heads
    context = norm(features[:anchor] @ weights["fc.weight"].T, weights["hidden_norm.weight"])
    for i in range(config.num_layers):
        w = {n.removeprefix(f"layers.{i}."): v for n, v in weights.items() if n.startswith(f"layers.{i}.")}
        h = norm(x, w["input_layernorm.weight"])
        sources = [(j, context[j]) for j in range(anchor)] + [(anchor + r, h[r]) for r in range(len(x))]
        rows = []
        for r in range(len(x)):
            heads = []
            for head in range(config.num_heads):
                kv = head // group
                q = (w["self_attn.q_proj.weight"] @ h[r])[head * d : (head + 1) * d]
                q = rope(norm(q, w["self_attn.q_norm.weight"]), anchor + r)
                scores, values = [], []
                for position, source in sources:
                    k = (w["self_attn.k_proj.weight"] @ source)[kv * d : (kv + 1) * d]
                    k = rope(norm(k, w["self_attn.k_norm.weight"]), position)
                    scores.append(q @ k * d**-0.5)
                    values.append((w["self_attn.v_proj.weight"] @ source)[kv * d : (kv + 1) * d])
                heads.append(torch.softmax(torch.stack(scores), 0) @ torch.stack(values))
            rows.append(w["self_attn.o_proj.weight"] @ torch.cat(heads))
        x = x + torch.stack(rows)
        h = norm(x, w["post_attention_layernorm.weight"])
        gate = h @ w["mlp.gate_proj.weight"].T
        x = x + (gate * torch.sigmoid(gate) * (h @ w["mlp.up_proj.weight"].T)) @ w["mlp.down_proj.weight"].T
    return norm(x, weights["norm.weight"])


def test_forward_equals_a_slow_loop_for_every_block():
    drafter = tiny_drafter()
    config = drafter.config
    weights = {n: p.detach() for n, p in drafter.named_parameters()}
    weights["fc.weight"] = weights["fc.weight"] / drafter.feature_scale
    features = torch.randn(2, 11, len(IDS) * HIDDEN, dtype=torch.float64)
    anchors = torch.tensor([[1, 5, 11], [3, 5, 5]])
    block = torch.randn(2, 3, config.block_size, HIDDEN, dtype=torch.float64)
    with torch.no_grad():
        got = drafter(features, anchors, block)
        for b in range(2):
            for n in range(3):
                expected = slow_block(weights, config, features[b], int(anchors[b, n]), block[b, n])
                # Norms and softmax run in float32 in the module.
                torch.testing.assert_close(got[b, n], expected, rtol=1e-3, atol=1e-3)


def test_a_block_reads_strictly_before_its_anchor_and_only_itself():
    drafter = tiny_drafter()
    features = torch.randn(1, 12, len(IDS) * HIDDEN, dtype=torch.float64)
    anchors = torch.tensor([[4, 8]])
    block = torch.randn(1, 2, 4, HIDDEN, dtype=torch.float64)
    with torch.no_grad():
        base = drafter(features, anchors, block)
        for position in range(12):
            changed = features.clone()
            changed[0, position] += 1.0
            moved = (drafter(changed, anchors, block) - base).abs().amax((0, 2, 3)) > 0
            assert moved.tolist() == [position < 4, position < 8], position
        for slot in range(4):
            changed = block.clone()
            changed[0, 0, slot] += 1.0
            moved = (drafter(features, anchors, changed) - base).abs().amax((0, 3)) > 0
            assert moved[0].all(), "all slots of a block see each other, in both directions"
            assert not moved[1].any(), "another block is not seen"


# --- export ---------------------------------------------------------------------------------------------------------


def test_export_has_the_format_and_computes_the_same(tmp_path):
    drafter = tiny_drafter()
    export(drafter, tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    parts = ["q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm"]
    names = {"fc.weight", "hidden_norm.weight", "norm.weight"}
    for i in range(2):
        names |= {f"layers.{i}.self_attn.{part}.weight" for part in parts}
        names |= {f"layers.{i}.mlp.{part}.weight" for part in ("gate_proj", "up_proj", "down_proj")}
        names |= {f"layers.{i}.{part}.weight" for part in ("input_layernorm", "post_attention_layernorm")}
    assert set(state) == names and all(t.dtype == torch.bfloat16 for t in state.values())
    assert config["architectures"] == ["DFlashDraftModel"] and config["model_type"] == "qwen3"
    assert config["dflash_config"] == {"block_size": 4, "mask_token_id": 0, "target_layer_ids": list(IDS)}
    assert config["block_size"] == 4 and config["layer_types"] == ["full_attention"] * 2
    assert config["num_target_layers"] == LAYERS and config["num_hidden_layers"] == 2

    again = tiny_drafter(seed=1)
    again.load_state_dict({**{n: t.double() for n, t in state.items()}, "feature_scale": again.feature_scale})
    again.feature_scale.fill_(1.0)
    features = torch.randn(1, 9, len(IDS) * HIDDEN, dtype=torch.float64)
    block = torch.randn(1, 1, 4, HIDDEN, dtype=torch.float64)
    with torch.no_grad():
        first, second = (m(features, torch.tensor([[9]]), block) for m in (drafter, again))
    assert torch.nn.functional.cosine_similarity(first.flatten(), second.flatten(), dim=0) > 0.999
    assert [p.name for p in tmp_path.iterdir() if "partial" in p.name] == []


class PlainReader:
    """All context at its true distance, one softmax, in float64: what a block of the trainer reads."""

    def __init__(self, drafter, features: torch.Tensor, theta: float) -> None:
        self.keys, self.values = drafter.context_kv(features)
        self.theta = theta

    def turned(self, x: torch.Tensor, start: int) -> torch.Tensor:
        """x (n, heads, d) rotated as positions start, start + 1, ..."""
        half = x.shape[-1] // 2
        steps = self.theta ** (-torch.arange(half, dtype=torch.float64) / half)
        angles = (start + torch.arange(len(x)))[:, None, None] * steps
        pairs = torch.complex(x[..., :half].double(), x[..., half:].double())
        pairs = pairs * torch.polar(torch.ones_like(angles), angles)
        return torch.cat([pairs.real, pairs.imag], dim=-1)

    def read(self, layer, query, key, value):
        anchor = self.keys.shape[1]
        keys = torch.cat([self.turned(self.keys[layer], 0), self.turned(key, anchor)])
        values = torch.cat([self.values[layer], value]).double()
        group = query.shape[1] // keys.shape[1]
        keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
        scores = torch.einsum("qhd,khd->hqk", self.turned(query, anchor), keys) * query.shape[-1] ** -0.5
        return torch.einsum("hqk,khd->qhd", torch.softmax(scores, -1), values).to(query.dtype)


def test_the_harness_drafts_what_the_trainer_does(tmp_path):
    """The exported checkpoint, read by the benchmark's own loader and forward pass."""
    from harness.drafters import load_drafter

    drafter = tiny_drafter().float()
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.copy_(parameter.bfloat16())
        drafter.feature_scale.fill_(1.0)
    export(drafter, tmp_path)
    loaded = load_drafter(tmp_path, dtype=torch.float32, device="cpu")
    table = torch.randn(len(vocabulary()[0]), HIDDEN)
    loaded.bind(table, table)
    features = torch.randn(13, len(IDS) * HIDDEN)
    ids = torch.tensor([77, 0, 0, 0])
    with torch.no_grad():
        expected = drafter(features[None], torch.tensor([[13]]), table[ids][None, None])[0, 0]
        got = loaded.hidden(77, PlainReader(loaded, features, 1e4))
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
    tokens = loaded.draft(77, PlainReader(loaded, features, 1e4)).tokens
    assert tokens == (expected[1:] @ table.T).argmax(-1).tolist()


# --- the run --------------------------------------------------------------------------------------------------------


def run_options(work: Path, target: Path, packages: Path, steps: int = 24) -> Options:
    return Options(
        work, target, export=work / "out", steps=steps, shards=4, rows=8, first_shards=2, steps_per_shard=6,
        sequences=2, anchors=4, layers=2, block=4, layer_ids=IDS, mask_token_id=0, held_out_rows=4, precision="fp32",
        short_blocks=0.35,
        checkpoint_every=4, evaluate_minutes=0.01, shapes=((160, 32), (120, 48)), held_out_shape=(160, 32),
        corpus_roots=(packages,),
    )  # fmt: skip


def run(work: Path, target: Path, packages: Path, steps: int = 24) -> None:
    """One run from start to end in this process (the child of the kill test)."""
    torch.set_num_threads(1)
    Trainer(run_options(work, target, packages, steps), Log(work / "train.log", bar=False)).run()


def shards_of(work: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in sorted((work / "shards").iterdir())}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, target, packages) -> Path:
    work = tmp_path_factory.mktemp("undisturbed")
    threads = torch.get_num_threads()
    run(work, target, packages)
    torch.set_num_threads(threads)
    return work


def test_run_writes_its_shards_checkpoint_export_and_log(undisturbed):
    work = undisturbed
    assert list(shards_of(work)) == [f"{i:05d}.safetensors" for i in range(4)]
    report = json.loads((work / "out" / "progress.json").read_text())
    assert report["step"] == 24 and report["visits"] == 48 and report["sequences"] == 32
    assert 1.0 <= report["held_out"]["tau"] <= 4.0
    assert len(report["held_out"]["code"]["match"]) == 3
    assert load_file(work / "out" / "model.safetensors")["fc.weight"].shape == (HIDDEN, len(IDS) * HIDDEN)
    log = (work / "train.log").read_text()
    assert "held-out τ" in log and "exported to" in log and "shard 3" in log


# Imports once, then forks a run, kills it at a random moment and forks the next, until one comes to its end. The
# moments grow, so that some kills fall into the making of shards, some between checkpoints and some into the export.
KILLER = """
import os, random, signal, sys, time
from pathlib import Path
import torch
torch.set_num_threads(1)
sys.path[:0] = sys.argv[1].split(os.pathsep)
from test_demo_train import run
import transformers.models.gpt2.tokenization_gpt2
work, target, packages = map(Path, sys.argv[2:5])
moments, kills = random.Random(3), 0
def saved():
    path = work / "checkpoint.pt"
    return path.stat().st_mtime_ns if path.exists() else 0
for attempt in range(60):
    child = os.fork()
    if child == 0:
        run(work, target, packages)
        os._exit(0)
    # Twice just after a checkpoint, so that there is one to resume from however fast the machine is; then anywhere.
    after_checkpoint = attempt < 2
    before = saved()
    end = time.monotonic() + (60 if after_checkpoint else moments.uniform(0.02, 0.25 + 0.12 * (attempt // 4)))
    done = 0
    while not done and time.monotonic() < end and not (after_checkpoint and saved() != before):
        done, status = os.waitpid(child, os.WNOHANG)
        time.sleep(0.002)
    if done:
        print(kills, "kills, exit status", status)
        break
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    kills += 1
"""


def test_killed_and_resumed_run_ends_with_the_same_weights(undisturbed, tmp_path, target, packages):
    paths = os.pathsep.join([str(Path(__file__).parent), str(Path(__file__).parents[2])])
    command = [sys.executable, "-c", KILLER, paths, *map(str, (tmp_path, target, packages))]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    kills, _, status = done.stdout.partition(" kills, exit status ")
    assert status.strip() == "0", done.stderr[-2000:]
    assert int(kills) >= 4
    assert (tmp_path / "train.log").read_text().count("resumed at step") >= 2
    whole = undisturbed
    assert shards_of(tmp_path) == shards_of(whole)
    states = [torch.load(w / "checkpoint.pt", weights_only=True) for w in (whole, tmp_path)]
    assert states[0]["step"] == states[1]["step"] == 24
    assert torch.equal(states[0]["visits"], states[1]["visits"])
    for part in ("weights", "average"):
        for name, value in states[0][part].items():
            assert torch.equal(value, states[1][part][name]), f"{part} {name} differs after resuming"


def test_damaged_shard_is_made_again_bit_for_bit(undisturbed, tmp_path, target, packages):
    whole = undisturbed
    work = tmp_path / "work"
    shutil.copytree(whole, work)
    path = work / "shards" / "00001.safetensors"
    good = path.read_bytes()
    path.write_bytes(good[: len(good) // 2])
    (work / "shards" / ".00002.safetensors.partial").write_bytes(b"torn")
    run(work, target, packages)
    assert path.read_bytes() == good
    assert "00001.safetensors is damaged" in (work / "train.log").read_text()


def test_resuming_with_other_settings_is_refused(undisturbed, target, packages):
    whole = undisturbed
    options = run_options(whole, target, packages)
    options.anchors = 5
    with pytest.raises(TrainError, match="another anchors"):
        Trainer(options, Log(whole / "train.log", bar=False))


def test_batches_hold_the_rows_they_name(undisturbed):
    whole = undisturbed
    pool = Pool(4)
    for path in sorted((whole / "shards").iterdir()):
        if not path.name.startswith("."):
            pool.add(Shard.open(path))
    batch = draw_batch(pool, 3, 5, np.random.default_rng(0))
    assert batch.anchors.shape == (3, 5) and batch.labels.shape == (3, 5, 3)
    assert int(batch.anchors.min()) >= 8 and batch.valid[..., 0].all()
    at = torch.tensor([20, 90, 150])
    batch = gather(pool, [(1, 2, at)])
    shard = pool.shards[1]
    assert batch.features.shape[1] == 150 + 3
    torch.testing.assert_close(batch.features[0], shard.features(2)[:153], rtol=0, atol=0)
    assert batch.first[0].tolist() == shard.tokens[2][at].tolist()
    assert batch.labels[0, :, 0].tolist() == shard.argmax[2][at].tolist()


def test_soft_labels_are_the_distributions_that_chose_the_hard_ones(undisturbed, tmp_path, target, packages):
    work = tmp_path / "work"
    shutil.copytree(undisturbed, work)
    trainer = Trainer(run_options(work, target, packages), Log(work / "train.log", bar=False))
    batch = draw_batch(trainer.pool, 6, 9, np.random.default_rng(1))
    logits = trainer._choosers(batch).view(*batch.labels.shape, -1) @ trainer.head.T
    assert batch.valid.any()
    assert torch.equal(logits.argmax(-1)[batch.valid], batch.labels[batch.valid])


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--steps", "0"], "--steps must be positive"),
        (["--minutes", "-1"], "--minutes must be positive"),
        (["--steps", "1", "--device", "cuda:99"], "device 'cuda:99' is not available"),
        (["--steps", "1", "--target", "nowhere"], "nowhere holds no model.safetensors"),
    ],
)
def test_mistakes_are_one_line(arguments, expected, capsys, tmp_path):
    assert main([*arguments, "--work", str(tmp_path)]) == 2
    error = capsys.readouterr().err.strip()
    assert expected in error and "\n" not in error
