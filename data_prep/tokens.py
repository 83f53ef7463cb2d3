"""From text to token ids: once per request, with the special tokens that the target itself would see and no others."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from data_prep.select import PrepError


@dataclass(frozen=True)
class TargetSpec:
    """What preparation needs to know of a target besides its tokenizer.

    name: the file name in conf/target. max_context: most positions the target may use, in tokens.
    stop_ids: token ids that end a generation. chat_template_kwargs: variables for the chat template
    (`enable_thinking: False` for Qwen, paper B.2). revision: where the tokenizer comes from, for the manifest.
    """

    name: str
    max_context: int
    stop_ids: tuple[int, ...]
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    revision: str = ""


def encode_pieces(tokenizer: Any, texts: Sequence[str]) -> list[list[int]]:
    """Token ids of each text without any special token; a fast tokenizer encodes the whole batch in parallel."""
    if not texts:
        return []
    return tokenizer(list(texts), add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"]


def raw_prefix(tokenizer: Any) -> list[int]:
    """The ids that this tokenizer puts before plain text: one BOS for Llama and Gemma, nothing for Qwen and SmolLM2.

    Raises PrepError for a tokenizer that also appends something: a completion would then start after an end token.
    """
    bare = encode_pieces(tokenizer, ["a"])[0]
    full = tokenizer("a")["input_ids"]
    if full[len(full) - len(bare) :] != bare:
        raise PrepError("this tokenizer appends special tokens to plain text, so no raw text can be completed with it")
    return full[: len(full) - len(bare)]


def encode_chats(tokenizer: Any, texts: Sequence[str], template_kwargs: Mapping[str, Any]) -> list[list[int]]:
    """Ids of each text as a single user turn, up to and including the header of the assistant's turn.

    The template itself writes the BOS, so it is rendered and tokenised in one step: tokenising the rendered string
    would add a second one. Raises PrepError if ids still start with two, ValueError if there is no chat template.
    """
    if not texts:
        return []
    batch = tokenizer.apply_chat_template(
        [[{"role": "user", "content": text}] for text in texts],
        tokenize=True,
        add_generation_prompt=True,
        return_dict=False,
        tokenizer_kwargs={"verbose": False},
        **template_kwargs,
    )
    bos = tokenizer.bos_token_id
    if bos is not None and any(list(ids[:2]) == [bos, bos] for ids in batch):
        raise PrepError("the chat template of this tokenizer yields two BOS tokens")
    return [list(ids) for ids in batch]


def encode_chat(tokenizer: Any, text: str, template_kwargs: Mapping[str, Any]) -> list[int]:
    """`encode_chats` of one text."""
    return encode_chats(tokenizer, [text], template_kwargs)[0]


def stop_ids_of(folder: Path, tokenizer: Any) -> tuple[int, ...]:
    """End-of-turn ids, sorted: `eos_token_id` of generation_config.json (one id or a list) and the tokenizer's EOS."""
    stops = set() if tokenizer.eos_token_id is None else {int(tokenizer.eos_token_id)}
    file = folder / "generation_config.json"
    if file.is_file():
        listed = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id")
        stops.update([listed] if isinstance(listed, int) else listed or [])
    return tuple(sorted(stops))


def tokenizer_sha256(tokenizer: Any) -> str:
    """Hash of the fast tokenizer's definition and of the chat template: what the ids depend on besides the text."""
    # A tokenizer.json may set these; every encoding here turns them off, so they must not decide the hash.
    tokenizer.backend_tokenizer.no_truncation()
    tokenizer.backend_tokenizer.no_padding()
    definition = tokenizer.backend_tokenizer.to_str()
    return hashlib.sha256(f"{definition}\n{tokenizer.chat_template}".encode()).hexdigest()
