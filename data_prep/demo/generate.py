"""Training sequences for the demo drafter: raw prefixes that the target continues, with its features and its argmax.

A sequence is at most 512 tokens: a prefix (code, a chat about a document, or text that repeats itself) and the
target's own continuation, greedy for most. Stored per position: the token, the target's argmax for the *next* token,
and the hidden states that the drafter reads. The argmax makes every position usable: a draft label is exact as long
as the tokens before it in the block are the target's own choice, in raw text too.

A shard is one file, named by its number and made from (seed, number) alone: it can be made again bit for bit, and it
appears by one rename, so a killed run leaves none half written.
"""

from __future__ import annotations

import json
import os
import string
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from data_prep.demo.corpus import Corpus

KINDS = ("code", "docs", "repeat", "sampled")
TEMPERATURE = 0.7
MAX_TOKENS = 512

_INSTRUCTIONS = (
    "Summarize the text above.",
    "Summarize the document above in a few sentences.",
    "Write a short summary of this documentation.",
    "What is the text above about?",
    "Explain what is described above to a beginner.",
    "List the main points of the document.",
    "What are the parameters described above, and what do they do?",
    "Give an example of how to use what is described above.",
    "Answer with quotes from the text: what does it do?",
)
_REPEATS = (
    "Repeat the text above word for word.",
    "Copy the document above exactly.",
    "Write out the text again without any change.",
    "Quote the first paragraph of the text above exactly.",
)


# (prefix, new) tokens of successive shards: all rows of a shard share one length, so that nothing is padded.
SHAPES = ((192, 128), (320, 128), (96, 160), (384, 112), (256, 128), (352, 128), (144, 144), (288, 128))
HELD_OUT_SHAPE = (320, 112)


@dataclass(frozen=True)
class Prompt:
    """Exactly as many token ids as its batch asks for, the kind of text, and whether the target samples (T = 0.7)."""

    ids: list[int]
    kind: str
    sampled: bool = False


class PromptMaker:
    """Makes prompts of an exact length from a corpus.

    Args:
        tokenizer: the target's tokenizer, with its chat template.
        corpus: where raw text comes from.
    """

    def __init__(self, tokenizer, corpus: Corpus) -> None:
        self.tokenizer = tokenizer
        self.corpus = corpus
        marker = "\x00"
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": marker}], tokenize=False, add_generation_prompt=True
        )
        self._chat_head, self._chat_tail = text.split(marker)

    def make(self, length: int, rng: np.random.Generator, kind: str | None = None) -> Prompt:
        """A prompt of exactly ``length`` tokens; the mixture is 36% code, 34% docs, 25% repeats, 5% sampled."""
        if kind is None:
            kind = str(rng.choice(KINDS, p=(0.36, 0.34, 0.25, 0.05)))
        sampled = kind == "sampled"
        source = str(rng.choice(("code", "docs"))) if sampled else kind
        for _ in range(100):
            ids = getattr(self, f"_{source}")(length, rng)
            if ids is not None:
                return Prompt(ids, kind, sampled)
        raise RuntimeError(f"no text of {length} tokens found for {kind}")

    def _encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)

    def _code_text(self, length: int, rng: np.random.Generator) -> tuple[str, str]:
        """A stretch of a source file that begins at a line and is longer than ``length`` tokens for sure."""
        name, text = self.corpus.code(rng)
        room = max(0, len(text) - length * 5)
        start = int(rng.integers(room + 1))
        start = text.rfind("\n", 0, start) + 1
        return name, text[start : start + length * 8]

    def _code(self, length: int, rng: np.random.Generator) -> list[int] | None:
        name, text = self._code_text(length, rng)
        if rng.random() < 0.5:
            text = f"# {name}\n{text}"
        ids = self._encode(text)
        return ids[:length] if len(ids) >= length else None

    def _chat(self, body: list[int], instruction: str, length: int, first: bool) -> list[int] | None:
        """The chat template around a document cut to fit, with the instruction before or after it."""
        head = self._encode(self._chat_head + (f"{instruction}\n\n" if first else ""))
        tail = self._encode(self._chat_tail if first else f"\n\n{instruction}{self._chat_tail}")
        room = length - len(head) - len(tail)
        if room < 24 or len(body) < room:
            return None
        return head + body[:room] + tail

    def _docs(self, length: int, rng: np.random.Generator) -> list[int] | None:
        text = self.corpus.document(rng) if rng.random() < 0.8 else self._code_text(length, rng)[1]
        instruction = _INSTRUCTIONS[int(rng.integers(len(_INSTRUCTIONS)))]
        return self._chat(self._encode(text[: length * 8]), instruction, length, bool(rng.random() < 0.3))

    def _repeat(self, length: int, rng: np.random.Generator) -> list[int] | None:
        style = rng.random()
        if style < 0.15:
            instruction = _REPEATS[int(rng.integers(len(_REPEATS)))]
            return self._chat(self._encode(self.corpus.document(rng)[: length * 8]), instruction, length, False)
        if style < 0.30:
            return self._key_values(length, rng)
        # [A][other text][the beginning of A again]: the target goes on copying A from 60 to 400 tokens back.
        piece = self._piece(length, rng)
        if len(piece) < 80:
            return None
        # Half of the copies are mostly raw: the target often loses the thread of its own, and raw text keeps it on it.
        begin = int(rng.integers(8, max(9, min(len(piece) - 48, length // 2 if rng.random() < 0.5 else length // 4))))
        most = min(len(piece), length - begin - 8)
        size = int(rng.integers(begin + 40, most + 1)) if most > begin + 40 else most
        if size <= begin:
            return None
        filler = self._piece(length, rng)[: length - size - begin]
        ids = piece[:size] + filler + piece[:begin]
        return ids if len(ids) == length else None

    def _piece(self, length: int, rng: np.random.Generator) -> list[int]:
        if rng.random() < 0.4:
            return self._encode(self.corpus.document(rng)[: length * 6])
        _, text = self._code_text(length, rng)
        starts = [i for i in (text.find("\ndef "), text.find("\nclass "), text.find("\n    def ")) if i >= 0]
        return self._encode(text[min(starts) :] if starts else text)

    def _key_values(self, length: int, rng: np.random.Generator) -> list[int] | None:
        """JSON of random keys and values whose entries come back, in a chat that asks for one, or going on raw."""
        letters = np.array(list(string.ascii_lowercase + string.digits))

        def word() -> str:
            if rng.random() < 0.5:
                return "-".join("".join(rng.choice(letters, 4)) for _ in range(int(rng.integers(1, 4))))
            return self.corpus.code(rng)[0].split("/")[-1].removesuffix(".py")

        pairs = [(word(), word()) for _ in range(6 + length // 40)]
        lines = [f'"{k}": "{v}"' for k, v in pairs]
        if rng.random() < 0.5:
            body = "{" + ",\n ".join(lines) + "}\n{" + ",\n ".join(lines * 4)
            ids = self._encode(body)
            return ids[:length] if len(ids) >= length else None
        key = pairs[int(rng.integers(len(pairs)))][0]
        filler = self._encode("{" + ",\n ".join(lines) + "}\n" + self.corpus.document(rng)[: length * 6])
        question = f'What is the value of "{key}" in the JSON data? Write the data again, then the value.'
        return self._chat(filler, question, length, bool(rng.random() < 0.5))


class BatchTarget:
    """The Llama target for batches of equal length: preallocated KV cache, features captured on the way, no autograd.

    Args:
        folder: from ``ensure_target``; any Llama folder with one ``model.safetensors`` works.
        layer_ids: 0-based layers whose outputs are the drafter's features (``hidden_states[id + 1]`` in transformers).
        device, dtype: where and in what to compute.
    """

    def __init__(self, folder: Path, layer_ids: tuple[int, ...], device: str = "cpu", dtype=torch.bfloat16) -> None:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        state = {k: v.to(device, dtype) for k, v in load_file(folder / "model.safetensors").items()}
        self.layer_ids, self.device, self.dtype = layer_ids, torch.device(device), dtype
        self.hidden = int(config["hidden_size"])
        self.heads, self.kv_heads = int(config["num_attention_heads"]), int(config["num_key_value_heads"])
        self.head_dim = int(config.get("head_dim") or self.hidden // self.heads)
        self.eps = float(config["rms_norm_eps"])
        self.eos = int(config["eos_token_id"])
        rope = config.get("rope_parameters") or {}
        self.theta = float(rope.get("rope_theta") or config["rope_theta"])
        self.embed = state["model.embed_tokens.weight"]
        self.head = state.get("lm_head.weight", self.embed)
        self.norm = state["model.norm.weight"]
        self.layers = []
        for i in range(int(config["num_hidden_layers"])):
            get = lambda name, i=i: state[f"model.layers.{i}.{name}.weight"]  # noqa: E731
            self.layers.append(
                (
                    get("input_layernorm"),
                    torch.cat([get("self_attn.q_proj"), get("self_attn.k_proj"), get("self_attn.v_proj")]),
                    get("self_attn.o_proj"),
                    get("post_attention_layernorm"),
                    torch.cat([get("mlp.gate_proj"), get("mlp.up_proj")]),
                    get("mlp.down_proj"),
                )
            )
        if any(not 0 <= i < len(self.layers) for i in layer_ids):
            raise ValueError(f"feature layers {layer_ids} do not exist in a target of {len(self.layers)} layers")
        angles = torch.arange(2 * MAX_TOKENS)[:, None] / self.theta ** (
            torch.arange(0, self.head_dim, 2, dtype=torch.float32) / self.head_dim
        )
        angles = torch.cat([angles, angles], dim=-1)
        self.cos, self.sin = angles.cos().to(device, dtype), angles.sin().to(device, dtype)

    def new_cache(self, rows: int, length: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Per layer keys and values (rows, kv_heads, length, head_dim), uninitialised."""
        both = (2, rows, self.kv_heads, length, self.head_dim)
        layers = (torch.empty(both, device=self.device, dtype=self.dtype) for _ in self.layers)
        return [(keys, values) for keys, values in layers]

    @torch.inference_mode()
    def forward(
        self, ids: torch.Tensor, start: int, cache: list[tuple[torch.Tensor, torch.Tensor]]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run ids (rows, n) at positions start..start+n-1; n is 1, or start is 0.

        Returns:
            final hidden states after the last norm (rows, n, hidden) and features (rows, n, len(layer_ids) * hidden).
        """
        rows, n = ids.shape
        x = self.embed[ids]
        features = torch.empty(rows, n, len(self.layer_ids), self.hidden, dtype=self.dtype, device=self.device)
        for i in range(len(self.layers)):
            x = self._layer(i, x, start, cache[i])
            if i in self.layer_ids:
                features[:, :, self.layer_ids.index(i)] = x
        return _rms(x, self.norm, self.eps), features.flatten(2)

    def _layer(self, i: int, x: torch.Tensor, start: int, cache: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """Layer ``i`` on x (rows, n, hidden) at positions start..start+n-1; its keys and values go into ``cache``."""
        norm1, qkv, out, norm2, gate_up, down = self.layers[i]
        keys, values = cache
        rows, n, _ = x.shape
        end = start + n
        repeat = self.heads // self.kv_heads
        cos, sin = self.cos[start:end], self.sin[start:end]
        mixed = F.linear(_rms(x, norm1, self.eps), qkv).view(rows, n, self.heads + 2 * self.kv_heads, self.head_dim)
        mixed = mixed.transpose(1, 2)
        rotated = mixed[:, : self.heads + self.kv_heads]
        rotated = rotated * cos + _rotate_half(rotated) * sin
        keys[:, :, start:end] = rotated[:, self.heads :]
        values[:, :, start:end] = mixed[:, self.heads + self.kv_heads :]
        query = rotated[:, : self.heads]
        if n == 1:
            # One matrix product per KV head for its group of query heads; on a CPU keys @ query is three times as fast
            # as query @ keys for a slice of the cache, since neither side is then copied.
            grouped = query.reshape(rows * self.kv_heads, repeat, self.head_dim)
            seen_keys = keys.view(rows * self.kv_heads, -1, self.head_dim)[:, :end]
            seen_values = values.view(rows * self.kv_heads, -1, self.head_dim)[:, :end]
            scores = torch.bmm(seen_keys, grouped.transpose(1, 2)).transpose(1, 2).float() * self.head_dim**-0.5
            read = torch.bmm(torch.softmax(scores, dim=-1).to(self.dtype), seen_values)
            read = read.reshape(rows, 1, self.heads * self.head_dim)
        else:
            read = F.scaled_dot_product_attention(
                query, keys[:, :, :end], values[:, :, :end], is_causal=True, enable_gqa=True
            )
            read = read.transpose(1, 2).reshape(rows, n, self.heads * self.head_dim)
        x = x + F.linear(read, out)
        gate, up = F.linear(_rms(x, norm2, self.eps), gate_up).chunk(2, dim=-1)
        return x + F.linear(F.silu(gate) * up, down)

    @torch.no_grad()
    def finish(self, x: torch.Tensor) -> torch.Tensor:
        """Final normed hidden states (rows, n, hidden) from x, the last but one layer's outputs at positions 0..n-1.

        So the target's distribution can be had again from a stored feature for the price of one layer.
        """
        last = len(self.layers) - 1
        shape = (len(x), self.kv_heads, x.shape[1], self.head_dim)
        cache = tuple(torch.empty(shape, device=self.device, dtype=self.dtype) for _ in range(2))
        return _rms(self._layer(last, x.to(self.device, self.dtype), 0, (cache[0], cache[1])), self.norm, self.eps)

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Next-token logits (..., vocabulary) of normed hidden states."""
        return F.linear(hidden, self.head)

    @torch.inference_mode()
    def generate(
        self, prompts: list[Prompt], new_tokens: int, seed: int, chunk: int = 16
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Continue prompts of one common length by up to ``new_tokens`` tokens; a row stops after the end token.

        Returns:
            tokens (rows, total) int32, argmax (rows, total) int32: the target's choice for position + 1,
            features (rows, total, F * hidden), lengths (rows) int32. What lies beyond a row's length is zero.
        """
        rows, prefix = len(prompts), len(prompts[0].ids)
        total = prefix + new_tokens
        width = len(self.layer_ids) * self.hidden
        tokens = torch.zeros(rows, total, dtype=torch.int64, device=self.device)
        tokens[:, :prefix] = torch.tensor([p.ids for p in prompts], device=self.device)
        argmax = torch.zeros_like(tokens)
        features = torch.zeros(rows, total, width, dtype=self.dtype)
        lengths = torch.full((rows,), total, dtype=torch.int64)
        cache = self.new_cache(rows, total)
        last = torch.empty(rows, self.hidden, dtype=self.dtype, device=self.device)
        for lo in range(0, rows, chunk):
            part = slice(lo, min(rows, lo + chunk))
            hidden, seen = self.forward(tokens[part, :prefix], 0, [(k[part], v[part]) for k, v in cache])
            features[part, :prefix] = seen.cpu()
            for row in range(part.start, part.stop):
                argmax[row, :prefix] = self.logits(hidden[row - lo]).max(-1).indices  # three times as fast as argmax
            last[part] = hidden[:, -1]
        generator = torch.Generator().manual_seed(seed)
        alive, done = torch.arange(rows), torch.zeros(rows, dtype=torch.bool)
        sampled = torch.tensor([p.sampled for p in prompts])
        for position in range(prefix, total):
            logits = self.logits(last)
            choice = logits.max(-1).indices
            argmax[alive, position - 1] = choice
            if bool((hot := sampled[alive]).any()):
                odds = torch.softmax(logits[hot].float().cpu() / TEMPERATURE, dim=-1)
                choice[hot] = torch.multinomial(odds, 1, generator=generator)[:, 0].to(choice.device)
            tokens[alive, position] = choice
            ending = alive[(choice == self.eos).cpu() & ~done[alive]]
            lengths[ending] = position + 1
            done[ending] = True
            if bool(done.all()):
                break
            # Moving the cache costs about two steps, so ended rows are only dropped once there are many of them.
            keep = (~done[alive]).nonzero()[:, 0]
            if len(keep) * 8 <= len(alive) * 7:
                alive, choice = alive[keep], choice[keep]
                cache = [(k[keep], v[keep]) for k, v in cache]
            hidden, seen = self.forward(choice[:, None], position, cache)
            features[alive, position] = seen[:, 0].cpu()
            last = hidden[:, 0]
        for row in range(rows):
            for filled in (tokens, argmax, features):
                filled[row, lengths[row] :] = 0
        return tokens.int().cpu(), argmax.int().cpu(), features, lengths.int()


def loop_start(tokens: np.ndarray, begin: int, longest_period: int = 16, least: int = 48) -> int | None:
    """Where ``tokens[begin:]`` of a sequence (n,) falls into a short cycle that lasts to the end, or None."""
    for period in range(1, longest_period + 1):
        same = tokens[begin + period :] == tokens[begin:-period]
        run = len(same) - (int(np.flatnonzero(~same)[-1]) + 1 if (~same).any() else 0)
        if run + period >= max(least, 3 * period):
            return int(len(tokens) - run - period)
    return None


def make_shard(
    path: Path,
    target: BatchTarget,
    maker: PromptMaker,
    seed: int,
    number: int,
    rows: int,
    prefix: int,
    new_tokens: int,
    kinds: tuple[str, ...] | None = None,
) -> None:
    """Write shard ``number`` to ``path`` in one rename.

    Args:
        rows, prefix, new_tokens: the batch's size, its prompts' tokens, and how many the target adds at most.
        kinds: one kind per row; drawn from the mixture if not given.
    """
    if prefix + new_tokens > MAX_TOKENS:
        raise ValueError(f"{prefix} + {new_tokens} tokens exceed the training length of {MAX_TOKENS}")
    rng = np.random.default_rng([seed, number])
    prompts = [maker.make(prefix, rng, kinds[row] if kinds else None) for row in range(rows)]
    tokens, argmax, features, lengths = target.generate(prompts, new_tokens, seed=seed * 1_000_003 + number)
    lengths = lengths.clone()  # made in inference mode, where it cannot be changed
    for row in range(rows):
        # A short cycle teaches nothing after its first rounds, and greedy decoding of a small model is full of them.
        start = loop_start(tokens[row, : lengths[row]].numpy(), prefix)
        if start is not None:
            lengths[row] = min(int(lengths[row]), start + 40)
    partial = path.with_name(f".{path.name}.partial")
    save_file(
        {
            "tokens": tokens,
            "argmax": argmax,
            "features": features,
            "lengths": lengths,
            "kinds": torch.tensor([KINDS.index(p.kind) for p in prompts], dtype=torch.int32),
        },
        partial,
        metadata={"prefix": str(prefix)},  # one entry alone: safetensors writes several in random order
    )
    with partial.open("rb") as handle:
        os.fsync(handle.fileno())
    os.replace(partial, path)


@dataclass(frozen=True)
class Shard:
    """A shard's small tensors in memory; features stay in the file (see ``features``)."""

    path: Path
    tokens: torch.Tensor
    argmax: torch.Tensor
    lengths: torch.Tensor
    kinds: torch.Tensor
    prefix: int

    @classmethod
    def open(cls, path: Path) -> Shard:
        """Raises ``ValueError`` or safetensors' own error if the file is damaged."""
        with safe_open(path, framework="pt") as file:
            small = {name: file.get_tensor(name) for name in ("tokens", "argmax", "lengths", "kinds")}
            return cls(path, prefix=int(file.metadata()["prefix"]), **small)

    def features(self, row: int) -> torch.Tensor:
        """Features (tokens, F * hidden) of one row, padding included."""
        with safe_open(self.path, framework="pt") as file:
            return file.get_slice("features")[row : row + 1][0]


def _rms(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)


def _rotate_half(x: torch.Tensor) -> torch.Tensor:
    low, high = x.chunk(2, dim=-1)
    return torch.cat((-high, low), dim=-1)
