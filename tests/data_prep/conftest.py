"""A small tokenizer, trained here, that behaves like the targets': BOS for plain text and from the template."""

from __future__ import annotations

import inspect
import json
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from data_prep.tokens import TargetSpec

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% if enable_thinking is defined and not enable_thinking %}"
    "<think></think>{% endif %}{% endif %}"
)


def make_tokenizer(vocab_size: int = 1500, bos_for_text: bool = True) -> Any:
    """Byte-level BPE. bos_for_text: plain text gets a BOS (as for Llama and Gemma) or not (Qwen, SmolLM2)."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    specials = ["<s>", "</s>", "<|user|>", "<|assistant|>", "<|end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=specials,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = [inspect.getsource(module) for module in (json, json.decoder, json.encoder, inspect)]
    tokenizer.train_from_iterator(texts, trainer)
    if bos_for_text:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", chat_template=TEMPLATE, model_max_length=8192
    )


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    return make_tokenizer()


@pytest.fixture(scope="session")
def plain_tokenizer() -> Any:
    return make_tokenizer(vocab_size=700, bos_for_text=False)


@pytest.fixture
def target() -> TargetSpec:
    return TargetSpec("tiny", 8192, (1, 4), {"enable_thinking": False}, "rev0")
