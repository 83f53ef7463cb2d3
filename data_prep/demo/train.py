"""``fold-train-drafter``: train the demo's DFlash drafter on text the target generated, at most 512 tokens a sequence.

Generation and training alternate in one process: every ``--steps-per-shard`` steps one more shard of sequences is
made (see ``generate.py``), so training starts within minutes and meets new text until ``--shards`` of them exist.
Everything random comes from ``--seed``; with a budget in steps a killed and resumed run ends with the same weights as
an undisturbed one on the same machine. With ``--minutes`` the learning rate follows the clock instead.

The working folder holds ``plan.json`` (what must not change between resumes), ``shards/``, ``held_out.safetensors``,
``checkpoint.pt`` and ``train.log``. Training text comes from installed third-party packages only, never from the
standard library (see ``corpus.py``).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from filelock import FileLock, Timeout
from safetensors import SafetensorError
from safetensors.torch import load_file

from data_prep.demo.corpus import Corpus, ForbiddenText
from data_prep.demo.draft_model import DraftConfig, Drafter, config_dict, draft_labels, export
from data_prep.demo.generate import (
    HELD_OUT_SHAPE,
    KINDS,
    SHAPES,
    BatchTarget,
    PromptMaker,
    Shard,
    make_shard,
)
from data_prep.demo.target import TargetUnavailable, default_cache_dir, ensure_target, target_fingerprint

HELD_OUT_NUMBER = 1_000_000
_EMA = 0.998
_LABEL_DECAY = 4.0  # slot k weighs exp(-(k - 1) / 4), as for B = 8 in the DFlash paper
_FREQUENT, _RANDOM = 6144, 1536  # the sampled vocabulary of the loss, next to the labels themselves
_FIRST_ANCHOR = 8


class TrainError(RuntimeError):
    """A mistake of the user's; the message is one line."""


@dataclass
class Options:
    """What the command line asks for."""

    work: Path
    target: Path
    export: Path | None = None
    steps: int | None = None
    minutes: float | None = None
    shards: int = 14
    rows: int = 128
    first_shards: int = 2
    steps_per_shard: int = 250
    sequences: int = 4
    anchors: int = 32
    lr: float = 1.4e-3
    layers: int = 4
    block: int = 5
    layer_ids: tuple[int, ...] = (1, 8, 15, 22, 28)
    mask_token_id: int = 16
    held_out_rows: int = 48
    seed: int = 0
    device: str = "cpu"
    precision: str = "auto"
    checkpoint_every: int = 100
    evaluate_minutes: float = 10.0
    short_blocks: float = 0.0  # share of the budget with blocks of half the size
    soft_labels: float = 0.5  # weight of the target's distribution beside its choice
    shapes: tuple[tuple[int, int], ...] = SHAPES
    held_out_shape: tuple[int, int] = HELD_OUT_SHAPE
    corpus_roots: tuple[Path, ...] | None = None

    def plan(self) -> dict[str, Any]:
        """What a resumed run must share with the one it goes on from."""
        names = ["rows", "first_shards", "steps_per_shard", "sequences", "anchors", "layers", "block"]
        names += ["layer_ids", "mask_token_id", "seed", "short_blocks", "soft_labels", "shapes"]
        names += ["held_out_shape", "held_out_rows"]
        plan = {name: getattr(self, name) for name in names}
        plan["target"] = target_fingerprint(self.target).get("weights_sha256")
        return json.loads(json.dumps(plan))


@dataclass
class Pool:
    """All shards so far: their small tensors and the labels of every anchor; features are read from the files."""

    block: int
    shards: list[Shard] = field(default_factory=list)
    labels: list[torch.Tensor] = field(default_factory=list)  # (rows, S, B-1) int32
    valid: list[torch.Tensor] = field(default_factory=list)  # (rows, S, B-1) bool
    index: list[tuple[int, int]] = field(default_factory=list)
    visits: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))

    def add(self, shard: Shard) -> None:
        """Take a shard in; its rows start unvisited."""
        pairs = [
            draft_labels(shard.tokens[r], shard.argmax[r], int(shard.lengths[r]), self.block)
            for r in range(len(shard.tokens))
        ]
        self.labels.append(torch.stack([p[0] for p in pairs]).int())
        self.valid.append(torch.stack([p[1] for p in pairs]))
        self.index += [(len(self.shards), row) for row in range(len(shard.tokens))]
        self.shards.append(shard)
        self.visits = np.concatenate([self.visits, np.zeros(len(shard.tokens), dtype=np.int64)])

    @property
    def tokens(self) -> int:
        """Tokens in all sequences, prefixes included."""
        return sum(int(shard.lengths.sum()) for shard in self.shards)

    def anchor_weights(self, shard: int, row: int) -> np.ndarray:
        """Weight of every position as an anchor: its valid labels, half as much again in the target's own text."""
        weights = self.valid[shard][row].sum(-1).numpy().astype(np.float64)
        weights[self.shards[shard].prefix - 1 :] *= 1.5
        weights[:_FIRST_ANCHOR] = 0
        return weights


@dataclass
class Batch:
    """One step's input: features (b, S, F*H), anchors (b, N), anchor tokens (b, N), labels and valid (b, N, B-1)."""

    features: torch.Tensor
    anchors: torch.Tensor
    first: torch.Tensor
    labels: torch.Tensor
    valid: torch.Tensor

    def shortened(self, block: int) -> Batch:
        """The same anchors with the first ``block`` slots only."""
        return replace(self, labels=self.labels[..., : block - 1], valid=self.valid[..., : block - 1])


def draw_batch(pool: Pool, sequences: int, anchors: int, rng: np.random.Generator) -> Batch:
    """Draw sequences (rather those visited least) and anchors in them (in proportion to their valid labels)."""
    odds = 1.0 / (1.0 + pool.visits) ** 2
    chosen = rng.choice(len(pool.index), size=min(sequences, len(pool.index)), replace=False, p=odds / odds.sum())
    rows = []
    for which in chosen:
        pool.visits[which] += 1
        shard, row = pool.index[which]
        weights = pool.anchor_weights(shard, row)
        usable = int((weights > 0).sum())
        if usable == 0:
            continue
        at = np.sort(rng.choice(len(weights), size=anchors, replace=usable < anchors, p=weights / weights.sum()))
        rows.append((shard, row, torch.from_numpy(at)))
    if not rows:
        return draw_batch(pool, sequences, anchors, rng)
    return gather(pool, rows)


def gather(pool: Pool, rows: list[tuple[int, int, torch.Tensor]]) -> Batch:
    """The batch of given (shard, row, anchors).

    The drafter reads no feature at or after an anchor; those of the last block serve the target's distributions.
    """
    width = max(int(at.max()) for _, _, at in rows) + pool.block - 1
    features = []
    for shard, row, _ in rows:
        seen = pool.shards[shard].features(row)[:width]
        features.append(F.pad(seen, (0, 0, 0, width - len(seen))))
    return Batch(
        torch.stack(features),
        torch.stack([at for _, _, at in rows]),
        torch.stack([pool.shards[s].tokens[r][at].long() for s, r, at in rows]),
        torch.stack([pool.labels[s][r][at].long() for s, r, at in rows]),
        torch.stack([pool.valid[s][r][at] for s, r, at in rows]),
    )


class Trainer:
    """Owns the drafter, the optimiser, the pool and the files of a run."""

    def __init__(self, options: Options, log: Log) -> None:
        o = self.options = options
        self.log = log
        self.device = torch.device(o.device)
        self.bf16 = o.precision == "bf16" or (o.precision == "auto" and _fast_bf16(self.device))
        self.work = o.work
        (self.work / "shards").mkdir(parents=True, exist_ok=True)
        for stale in (self.work / "shards").glob(".*"):  # a killed run's unfinished shards, ours and safetensors' own
            stale.unlink()
        self._check_plan()
        settings = json.loads((o.target / "config.json").read_text(encoding="utf-8"))
        rope = settings.get("rope_parameters") or settings
        self.config = DraftConfig(
            hidden_size=settings["hidden_size"],
            intermediate_size=settings["intermediate_size"],
            num_heads=settings["num_attention_heads"],
            num_kv_heads=settings["num_key_value_heads"],
            head_dim=settings.get("head_dim") or settings["hidden_size"] // settings["num_attention_heads"],
            num_layers=o.layers,
            block_size=o.block,
            target_layer_ids=tuple(o.layer_ids),
            num_target_layers=settings["num_hidden_layers"],
            vocab_size=settings["vocab_size"],
            mask_token_id=o.mask_token_id,
            rope_theta=float(rope["rope_theta"]),
            rms_norm_eps=settings["rms_norm_eps"],
            max_position_embeddings=settings["max_position_embeddings"],
        )
        if o.soft_labels and self.config.target_layer_ids[-1] != self.config.num_target_layers - 2:
            raise TrainError("--soft-labels needs the output of the target's last but one layer as the last feature")
        state = load_file(o.target / "model.safetensors")
        dtype = torch.bfloat16 if self.bf16 else torch.float32
        self.embed = state["model.embed_tokens.weight"].to(self.device, dtype)
        self.head = state.get("lm_head.weight", state["model.embed_tokens.weight"]).to(self.device, dtype)
        self._target_state = state
        self._target: BatchTarget | None = None
        self._makers: dict[bool, PromptMaker] = {}

        self.pool = Pool(o.block)
        self.held_out = Pool(o.block)
        self.step = 0
        self.elapsed = 0.0
        self.generating = 0.0
        self.rng = np.random.default_rng([o.seed, 7])
        self._grow_pool()
        self.held_out.add(self._shard(self.work / "held_out.safetensors", HELD_OUT_NUMBER, held_out=True))

        self.drafter = Drafter(self.config)
        self.drafter.init_from_target(state, self._feature_scale(), o.seed)
        self.drafter.to(self.device)
        self._target_state = {}
        self.parameters = dict(self.drafter.named_parameters())
        self.average = {n: p.detach().clone() for n, p in self.parameters.items()}
        matrices = [p for p in self.parameters.values() if p.ndim > 1]
        vectors = [p for p in self.parameters.values() if p.ndim == 1]
        self.optimizer = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": 0.02}, {"params": vectors, "weight_decay": 0.0}],
            lr=o.lr, betas=(0.9, 0.95), fused=True,
        )  # fmt: skip
        self.frequent = self._frequent()
        self._resume()

    # --- data -------------------------------------------------------------------------------------------------------

    def _check_plan(self) -> None:
        path, plan = self.work / "plan.json", self.options.plan()
        if path.exists():
            old = json.loads(path.read_text(encoding="utf-8"))
            changed = sorted(name for name in plan if plan[name] != old.get(name))
            if changed:
                what = ", ".join(changed)
                raise TrainError(f"{self.work} belongs to a run with another {what}: choose another --work folder")
        else:
            _write_text(path, json.dumps(plan, indent=2) + "\n")

    def _shards_due(self) -> int:
        o = self.options
        return min(o.shards, o.first_shards + self.step // o.steps_per_shard)

    def _grow_pool(self, rows: int = 0) -> None:
        """Take in the shards that are due, and as many more as hold ``rows`` sequences (of the run that is resumed)."""
        while len(self.pool.shards) < self._shards_due() or len(self.pool.index) < rows:
            number = len(self.pool.shards)
            self.pool.add(self._shard(self.work / "shards" / f"{number:05d}.safetensors", number))

    def _shard(self, path: Path, number: int, held_out: bool = False) -> Shard:
        """Open a shard, making it first if it is missing or damaged."""
        if path.exists():
            try:
                return Shard.open(path)
            except (SafetensorError, ValueError, KeyError, TypeError, OSError):
                self.log.line(f"{path.name} is damaged and is made again")
                path.unlink()
        o, begin = self.options, time.monotonic()
        target = self._open_target()
        if held_out not in self._makers:
            from transformers import AutoTokenizer

            tokenizer = AutoTokenizer.from_pretrained(o.target)
            self._makers[held_out] = PromptMaker(tokenizer, Corpus(held_out, o.corpus_roots))
        prefix, new = o.held_out_shape if held_out else o.shapes[number % len(o.shapes)]
        rows = o.held_out_rows if held_out else o.rows
        # Held out: 3/8 code, 3/8 documents, 2/8 repeats.
        kinds = tuple(KINDS[min(2, 8 * r // (3 * rows))] for r in range(rows)) if held_out else None
        make_shard(path, target, self._makers[held_out], o.seed, number, rows, prefix, new, kinds)
        shard = Shard.open(path)
        took = time.monotonic() - begin
        self.generating += took
        tokens = int(shard.lengths.sum())
        self.log.line(f"shard {number}: {rows} sequences of {prefix}+{new}, {tokens} tokens, {took:.0f} s")
        return shard

    def _open_target(self) -> BatchTarget:
        if self._target is None:
            dtype = torch.bfloat16 if self.bf16 else torch.float32
            self._target = BatchTarget(self.options.target, tuple(self.options.layer_ids), self.options.device, dtype)
        return self._target

    def _feature_scale(self) -> torch.Tensor:
        """Root mean square of every feature dimension over the first shard, without the first tokens' huge values."""
        shard = self.pool.shards[0]
        rows = range(min(32, len(shard.tokens)))
        seen = torch.cat([shard.features(r)[4 : int(shard.lengths[r])].float() for r in rows])
        return seen.square().mean(0).sqrt().clamp(min=1e-4)

    def _frequent(self) -> torch.Tensor:
        """The most frequent labels of the first shards, filled up with low ids, which are a BPE's early merges."""
        shards = self.pool.shards[: self.options.first_shards]
        counts = torch.zeros(self.config.vocab_size)
        for shard in shards:
            for row, length in zip(shard.argmax, shard.lengths, strict=True):
                counts += torch.bincount(row[: int(length)].long(), minlength=self.config.vocab_size)
        counts += torch.linspace(1e-3, 0, self.config.vocab_size)
        return counts.topk(min(_FREQUENT, self.config.vocab_size)).indices.sort().values

    # --- training ---------------------------------------------------------------------------------------------------

    def progress(self) -> float:
        """Share of the budget used, 0 to 1, by steps or by minutes."""
        o = self.options
        if o.steps is not None:
            return min(1.0, self.step / max(1, o.steps))
        return min(1.0, self.elapsed / (60 * (o.minutes or 1e9)))

    def _learning_rate(self) -> float:
        warmup = min(1.0, (self.step + 1) / 60)
        return self.options.lr * warmup * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * self.progress())))

    def _autocast(self):
        return torch.autocast(self.device.type, torch.bfloat16) if self.bf16 else nullcontext()

    def _block(self) -> int:
        """Slots per block now: half of B at first, since the first slots are what everything else builds on."""
        size = self.config.block_size
        return max(2, size // 2) if self.progress() < self.options.short_blocks else size

    def states(self, batch: Batch) -> torch.Tensor:
        """Draft states (b, N, B-1, H) of the mask slots, for blocks of the batch's size."""
        size = batch.labels.shape[-1] + 1
        ids = torch.full((*batch.first.shape, size), self.config.mask_token_id, dtype=torch.int64, device=self.device)
        ids[..., 0] = batch.first.to(self.device)
        features = batch.features.to(self.device, self.embed.dtype)
        with self._autocast():
            return self.drafter(features, batch.anchors.to(self.device), self.embed[ids])[:, :, 1:]

    def train_step(self) -> dict[str, float]:
        """One optimiser step; returns the loss, and τ over the blocks with all labels exact (sampled vocabulary)."""
        size = self._block()
        anchors = self.options.anchors * self.config.block_size // size  # as many slots in all
        batch = draw_batch(self.pool, self.options.sequences, anchors, self.rng).shortened(size)
        random = torch.from_numpy(self.rng.integers(0, self.config.vocab_size, _RANDOM))
        labels, valid = batch.labels.to(self.device), batch.valid.to(self.device)
        soft = self.options.soft_labels
        vocabulary = torch.unique(torch.cat([labels.cpu().flatten(), self.frequent, random])).to(self.device)
        states = self.states(batch)
        with self._autocast():
            logits = F.linear(states.reshape(-1, states.shape[-1]), self.head[vocabulary]).float()
        wanted = torch.searchsorted(vocabulary, labels.flatten().contiguous())
        losses = F.cross_entropy(logits, wanted, reduction="none").view(labels.shape)
        if soft:
            odds = torch.softmax(F.linear(self._choosers(batch), self.head[vocabulary]).float(), dim=-1)
            softly = F.cross_entropy(logits, odds, reduction="none").view(labels.shape)
            losses = (1 - soft) * losses + soft * softly
        decay = torch.exp(-torch.arange(labels.shape[-1], device=self.device) / _LABEL_DECAY)
        weights = valid * decay
        loss = (losses * weights).sum() / weights.sum()
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(list(self.parameters.values()), 1.0)
        for group in self.optimizer.param_groups:
            group["lr"] = self._learning_rate()
        self.optimizer.step()
        self.step += 1
        keep = min(_EMA, self.step / (10 + self.step))
        with torch.no_grad():
            torch._foreach_lerp_(list(self.average.values()), list(self.parameters.values()), 1 - keep)
            right = (logits.argmax(-1) == wanted).view(labels.shape)
            whole = valid.all(-1)
            lead = right[whole].long().cumprod(-1).sum(-1).float()
        return {"loss": loss.item(), "tau": 1 + lead.mean().item() if len(lead) else float("nan")}

    @torch.no_grad()
    def _choosers(self, batch: Batch) -> torch.Tensor:
        """The target's final hidden states (b * N * (B-1), H) that chose the labels: slot k's is at anchor + k - 1."""
        target = self._open_target()
        final = target.finish(batch.features[..., -self.config.hidden_size :])
        slots = batch.anchors[:, :, None] + torch.arange(batch.labels.shape[-1])
        slots = slots.clamp(max=final.shape[1] - 1).flatten(1).to(self.device)
        return torch.gather(final, 1, slots[..., None].expand(-1, -1, final.shape[-1])).flatten(0, 1)

    @torch.no_grad()
    def evaluate(self, weights: dict[str, torch.Tensor] | None = None) -> dict[str, Any]:
        """Held-out τ_fs (1 + leading matches) and match rate by position in the target's own text, per kind.

        Args:
            weights: parameters to measure instead of the current ones.
        """
        if weights is not None:
            own = {n: p.detach().clone() for n, p in self.parameters.items()}
            self._load(weights)
        hits: dict[str, list[torch.Tensor]] = {}
        pool = self.held_out
        for shard, row in pool.index:
            data = pool.shards[shard]
            at = torch.arange(data.prefix, int(data.lengths[row]) - self.config.block_size + 1, 4)
            at = at[pool.valid[shard][row][at].all(-1)]
            if not len(at):
                continue
            batch = gather(pool, [(shard, row, at)])
            with self._autocast():
                # In two dimensions: on a CPU a product with a sliced tensor of four is fifty times as slow.
                states = self.states(batch)
                guess = F.linear(states.reshape(-1, states.shape[-1]), self.head).max(-1).indices.cpu()
            right = guess.view(batch.labels.shape) == batch.labels
            hits.setdefault(KINDS[int(data.kinds[row])], []).append(right[0])
        if weights is not None:
            self._load(own)
        result: dict[str, Any] = {}
        for kind, rows in hits.items():
            # The mean over sequences of each one's mean, as τ is reported everywhere.
            per_row = [1 + h.long().cumprod(-1).sum(-1).float().mean().item() for h in rows]
            result[kind] = {
                "tau": sum(per_row) / len(per_row),
                "match": torch.cat(rows).float().mean(0).tolist(),
                "sequences": len(rows),
                "anchors": sum(len(h) for h in rows),
            }
        result["tau"] = sum(r["tau"] for r in result.values()) / len(result) if result else float("nan")
        return result

    def _load(self, weights: dict[str, torch.Tensor]) -> None:
        for name, parameter in self.parameters.items():
            parameter.data.copy_(weights[name])

    def report(self, folder: Path | None) -> dict[str, Any]:
        """Measure both sets of weights, write the better one to ``folder`` with ``progress.json`` beside it."""
        begin = time.monotonic()
        measured = {"raw": self.evaluate(), "average": self.evaluate(self.average)}
        best = max(measured, key=lambda name: measured[name]["tau"])
        result = {
            "step": self.step,
            "minutes": round(self.elapsed / 60, 2),
            "minutes_generating": round(self.generating / 60, 2),
            "sequences": len(self.pool.index),
            "tokens": self.pool.tokens,
            "visits": int(self.pool.visits.sum()),
            "weights": best,
            "held_out": measured[best],
            "other": {name: m["tau"] for name, m in measured.items() if name != best},
            "config": config_dict(self.config),
            "target": target_fingerprint(self.options.target),
        }
        for kind, found in measured[best].items():
            if isinstance(found, dict):
                by_slot = " ".join(f"{m:.2f}" for m in found["match"])
                count = found["sequences"]
                self.log.line(f"  held out {kind}: τ {found['tau']:.3f}, {count} sequences, match {by_slot}")
        others = ", ".join(f"{name} {m['tau']:.3f}" for name, m in measured.items())
        self.log.line(f"step {self.step}: held-out τ {others} ({time.monotonic() - begin:.0f} s)")
        if folder is not None:
            export(self.drafter, folder, self.average if best == "average" else None)
            _write_text(folder / "progress.json", json.dumps(result, indent=2) + "\n")
            self.log.line(f"exported to {folder}")
        return result

    # --- files ------------------------------------------------------------------------------------------------------

    def save(self) -> None:
        """Write the checkpoint in one rename."""
        path = self.work / "checkpoint.pt"
        partial = path.with_name(".checkpoint.pt.partial")
        state = {
            "step": self.step,
            "elapsed": self.elapsed,
            "generating": self.generating,
            "weights": self.drafter.state_dict(),
            "average": self.average,
            "optimizer": self.optimizer.state_dict(),
            "rng": json.dumps(self.rng.bit_generator.state),
            "visits": torch.from_numpy(self.pool.visits),
            "frequent": self.frequent,
        }
        with partial.open("wb") as handle:
            torch.save(state, handle)
            handle.flush()
            os.fsync(handle.fileno())
        os.replace(partial, path)

    def _resume(self) -> None:
        path = self.work / "checkpoint.pt"
        if not path.exists():
            return
        state = torch.load(path, map_location=self.device, weights_only=True)
        self.step, self.elapsed, self.generating = state["step"], state["elapsed"], state["generating"]
        visits = state["visits"].cpu().numpy()
        self._grow_pool(len(visits))
        self.drafter.load_state_dict(state["weights"])
        self.average = state["average"]
        self.optimizer.load_state_dict(state["optimizer"])
        self.rng.bit_generator.state = json.loads(state["rng"])
        self.pool.visits[: len(visits)] = visits
        self.frequent = state["frequent"].cpu()
        self.log.line(f"resumed at step {self.step} after {self.elapsed / 60:.1f} minutes")

    def run(self) -> dict[str, Any]:
        """Train until the budget is used; returns the last report."""
        o = self.options
        last = time.monotonic()
        measured = self.elapsed
        losses: list[dict[str, float]] = []
        while self.progress() < 1:
            self._grow_pool()
            losses.append(self.train_step())
            now = time.monotonic()
            self.elapsed += now - last
            last = now
            self.log.tick(self.progress(), self.step, losses[-1])
            if self.step % 25 == 0:
                loss = sum(x["loss"] for x in losses) / len(losses)
                tau = float(np.nanmean([x["tau"] for x in losses]))
                used = self.progress()
                left = (1 - used) * self.elapsed / 60 / max(used, 1e-6)
                self.log.line(
                    f"step {self.step} loss {loss:.3f} τ~{tau:.2f} lr {self._learning_rate():.2e} "
                    f"tokens {self.pool.tokens} sequences {len(self.pool.index)} "
                    f"elapsed {self.elapsed / 60:.1f} min, left {left:.0f} min"
                )
                losses = []
            if self.elapsed - measured >= 60 * o.evaluate_minutes and self.progress() < 1:
                self.report(o.export)
                measured = self.elapsed
            if self.step % o.checkpoint_every == 0:
                self.save()
        self.save()
        return self.report(o.export)


class Log:
    """Plain lines into ``train.log`` and onto the screen; on a terminal a progress bar below them.

    Args:
        path: the log file, appended to.
        bar: whether standard error is a terminal that can show a bar.
    """

    def __init__(self, path: Path, bar: bool) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a", encoding="utf-8")
        self._progress: Any = None
        self._task: Any = None
        if bar:
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

            text = TextColumn("training the drafter"), BarColumn(), TextColumn("{task.percentage:.0f}%")
            more = TextColumn("{task.description}"), TimeElapsedColumn(), TimeRemainingColumn()
            self._progress = Progress(*text, *more, console=Console(stderr=True))
            self._task = self._progress.add_task("", total=1.0)

    def line(self, text: str) -> None:
        """One line, with the time of day in the file."""
        self._file.write(f"{time.strftime('%H:%M:%S')} {text}\n")
        self._file.flush()
        if self._progress is not None:
            self._progress.console.print(text, highlight=False, markup=False)
        else:
            print(text, file=sys.stderr, flush=True)

    def tick(self, done: float, step: int, last: dict[str, float]) -> None:
        """Move the bar to ``done`` (0 to 1)."""
        if self._progress is not None:
            self._progress.update(self._task, completed=done, description=f"step {step} loss {last['loss']:.2f}")

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Keep the bar on the screen inside the block."""
        with self._progress or nullcontext():
            yield


def _fast_bf16(device: torch.device) -> bool:
    """Whether the device multiplies bf16 natively; emulated bf16 would be slower than float32."""
    if device.type != "cpu":
        return True
    probes = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return any(bool(getattr(torch.cpu, probe, bool)()) for probe in probes)


def _write_text(path: Path, text: str) -> None:
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="fold-train-drafter",
        description="Train the demo's DFlash drafter on text that the demo's target generates. "
        "The same command resumes a stopped run.",
    )
    budget = parser.add_mutually_exclusive_group(required=True)
    budget.add_argument("--minutes", type=float, help="stop after this many minutes in all, generation included")
    budget.add_argument("--steps", type=int, help="stop after this many optimiser steps (reproducible)")
    parser.add_argument("--work", type=Path, help="working folder (default: train-drafter in the cache folder)")
    parser.add_argument("--export", type=Path, help="folder for the checkpoint in the z-lab format")
    parser.add_argument("--target", type=Path, help="target folder (default: the demo's, fetched when missing)")
    parser.add_argument("--offline", action="store_true", help="never touch the network for the target")
    parser.add_argument("--device", default="auto", help="cpu, cuda, cuda:1, ... (default: a GPU if there is one)")
    parser.add_argument("--precision", choices=("auto", "bf16", "fp32"), default="auto", help="of the matrix products")
    parser.add_argument("--threads", type=int, help="CPU threads")
    defaults = Options(Path(), Path())
    for name, text in (
        ("shards", "how many shards of sequences to generate"),
        ("rows", "sequences per shard"),
        ("first_shards", "shards made before the first step"),
        ("steps_per_shard", "steps between two further shards"),
        ("sequences", "sequences per step"),
        ("anchors", "blocks per sequence and step"),
        ("layers", "drafter layers"),
        ("block", "slots of a block, the anchor included"),
        ("seed", "of everything random"),
        ("checkpoint_every", "steps between checkpoints"),
    ):
        default = getattr(defaults, name)
        flag = f"--{name.replace('_', '-')}"
        parser.add_argument(flag, type=int, default=default, help=f"{text} (default: {default})")
    for flag, default, text in (
        ("--evaluate-minutes", defaults.evaluate_minutes, "minutes between held-out measurements, with an export each"),
        ("--soft-labels", defaults.soft_labels, "weight (0 to 1) of the target's distribution beside its choice"),
        ("--short-blocks", defaults.short_blocks, "share of the budget spent first on blocks of half the size"),
    ):
        parser.add_argument(flag, type=float, default=default, help=f"{text} (default: {default})")
    parser.add_argument("--lr", type=float, default=defaults.lr, help=f"peak learning rate (default: {defaults.lr})")
    return parser


def _options(args: argparse.Namespace) -> Options:
    positive = ("minutes", "steps", "shards", "rows", "first_shards", "steps_per_shard", "sequences", "anchors")
    for name in (*positive, "layers", "checkpoint_every", "evaluate_minutes", "lr"):
        if getattr(args, name) is not None and getattr(args, name) <= 0:
            raise TrainError(f"--{name.replace('_', '-')} must be positive")
    if args.block < 2:
        raise TrainError("--block must be at least 2: the anchor and one draft")
    device = args.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise TrainError(f"device {device!r} is not available here: leave --device out or use cpu") from error
    if args.target is not None and not (args.target / "model.safetensors").is_file():
        raise TrainError(f"{args.target} holds no model.safetensors: --target wants a folder from ensure_target")
    target = args.target or ensure_target(offline=args.offline)
    work = args.work or default_cache_dir() / "train-drafter"
    names = ["shards", "rows", "first_shards", "steps_per_shard", "sequences", "anchors", "layers", "block"]
    names += ["seed", "lr", "checkpoint_every", "evaluate_minutes", "short_blocks", "soft_labels", "precision"]
    more = {name: getattr(args, name) for name in names}
    return Options(work, target, export=args.export, steps=args.steps, minutes=args.minutes, device=device, **more)


def main(argv: list[str] | None = None) -> int:
    """Entry point of ``fold-train-drafter``; returns the exit status (2 for a user's mistake, 130 when interrupted)."""
    args = _parser().parse_args(argv)
    if args.threads:
        torch.set_num_threads(args.threads)
    try:
        options = _options(args)
        options.work.mkdir(parents=True, exist_ok=True)
        with FileLock(options.work / ".lock", timeout=0):
            log = Log(options.work / "train.log", bar=sys.stderr.isatty())
            with log.shown():
                Trainer(options, log).run()
    except Timeout:
        print(f"fold-train-drafter: another run is using {options.work}", file=sys.stderr)
        return 2
    except (TrainError, TargetUnavailable, ForbiddenText) as error:
        print(f"fold-train-drafter: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"fold-train-drafter: {error.filename or options.work}: {error.strerror or error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("fold-train-drafter: stopped; the same command goes on from the last checkpoint", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
