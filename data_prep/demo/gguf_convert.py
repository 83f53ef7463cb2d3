"""SmolLM2-135M-Instruct from GGUF to a folder that ``transformers`` loads.

The tokenizer is rebuilt from the GGUF's vocabulary and merges: SmolLM splits digits one by one and then as GPT-2 does
(the pre-tokenizer that llama.cpp calls ``smollm``). The result is the Hub's ``tokenizer.json`` byte for byte, which
``target.py`` checks, so both sources encode every text the same way.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file

# Names of a llama.cpp layer's tensors and of the same in transformers.
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_CONTROL_TOKEN = 3  # gguf.TokenType.CONTROL


def convert_gguf(path: Path, folder: Path) -> str:
    """Write weights (bf16), config and tokenizer of the Llama-architecture GGUF at ``path`` into ``folder``.

    Returns:
        sha256 over the tensors' names, dtypes, shapes and bytes.
    """
    from gguf import GGUFReader
    from gguf.quants import dequantize

    reader = GGUFReader(path)
    meta = {key: field.contents() for key, field in reader.fields.items()}
    heads, kv_heads = int(meta["llama.attention.head_count"]), int(meta["llama.attention.head_count_kv"])
    tensors: dict[str, torch.Tensor] = {}
    for item in reader.tensors:
        values = dequantize(item.data, item.tensor_type).reshape([int(n) for n in reversed(item.shape)])
        name = _torch_name(item.name)
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            values = _halves_from_pairs(values, heads if ".q_proj." in name else kv_heads)
        tensors[name] = torch.from_numpy(np.array(values, dtype=np.float32, order="C")).to(torch.bfloat16)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    _write_json(
        folder / "config.json",
        {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "bos_token_id": int(meta["tokenizer.ggml.bos_token_id"]),
            "eos_token_id": int(meta["tokenizer.ggml.eos_token_id"]),
            "pad_token_id": int(meta["tokenizer.ggml.padding_token_id"]),
            "head_dim": int(meta["llama.rope.dimension_count"]),
            "hidden_act": "silu",
            "hidden_size": int(meta["llama.embedding_length"]),
            "initializer_range": 0.041666666666666664,
            "intermediate_size": int(meta["llama.feed_forward_length"]),
            "max_position_embeddings": int(meta["llama.context_length"]),
            "mlp_bias": False,
            "num_attention_heads": heads,
            "num_hidden_layers": int(meta["llama.block_count"]),
            "num_key_value_heads": kv_heads,
            # GGUF keeps a float32; the model's own config says 1e-05.
            "rms_norm_eps": float(f"{float(meta['llama.attention.layer_norm_rms_epsilon']):.6g}"),
            "rope_parameters": {"rope_theta": float(meta["llama.rope.freq_base"]), "rope_type": "default"},
            "tie_word_embeddings": "lm_head.weight" not in tensors,
            "dtype": "bfloat16",
            "use_cache": True,
            "vocab_size": int(meta["llama.vocab_size"]),
        },
    )
    _write_json(
        folder / "generation_config.json",
        {
            "bos_token_id": int(meta["tokenizer.ggml.bos_token_id"]),
            "eos_token_id": int(meta["tokenizer.ggml.eos_token_id"]),
            "pad_token_id": int(meta["tokenizer.ggml.padding_token_id"]),
        },
    )
    _write_tokenizer(folder, meta)
    return weights_digest(folder / "model.safetensors")


def weights_digest(path: Path) -> str:
    """sha256 over the tensors of a safetensors file in name order: name, dtype, shape, bytes."""
    digest = hashlib.sha256()
    with safe_open(path, framework="pt") as file:
        for name in sorted(file.keys()):
            tensor = file.get_tensor(name).contiguous()
            digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
            digest.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _torch_name(name: str) -> str:
    top = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
    if name in top:
        return top[name]
    if name == "output.weight":
        return "lm_head.weight"
    _, layer, part, _ = name.split(".")
    return f"model.layers.{layer}.{_LAYER_NAMES[part]}.weight"


def _halves_from_pairs(values: np.ndarray, heads: int) -> np.ndarray:
    """Reorder rows (heads * head_dim, in) from llama.cpp's rotary layout (neighbouring pairs) to the one of halves."""
    rows, columns = values.shape
    return values.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def _write_tokenizer(folder: Path, meta: dict[str, Any]) -> None:
    tokens, merges = meta["tokenizer.ggml.tokens"], meta["tokenizer.ggml.merges"]
    special = [i for i, kind in enumerate(meta["tokenizer.ggml.token_type"]) if int(kind) == _CONTROL_TOKEN]

    def added(i: int) -> dict[str, Any]:
        flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
        return {"id": i, "content": tokens[i], **flags}

    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    _write_json(
        folder / "tokenizer.json",
        {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [added(i) for i in special],
            "normalizer": None,
            "pre_tokenizer": {
                "type": "Sequence",
                "pretokenizers": [{"type": "Digits", "individual_digits": True}, byte_level],
            },
            "post_processor": None,
            "decoder": {**byte_level, "add_prefix_space": True},
            "model": {
                "type": "BPE",
                "dropout": None,
                "unk_token": None,
                "continuing_subword_prefix": None,
                "end_of_word_suffix": None,
                "fuse_unk": False,
                "byte_fallback": False,
                "ignore_merges": False,
                "vocab": {token: i for i, token in enumerate(tokens)},
                "merges": list(merges),
            },
        },
    )
    bos, eos, unk, pad = (
        tokens[int(meta[f"tokenizer.ggml.{kind}_token_id"])] for kind in ("bos", "eos", "unknown", "padding")
    )
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "GPT2Tokenizer",
            "add_prefix_space": False,
            "bos_token": bos,
            "eos_token": eos,
            "unk_token": unk,
            "pad_token": pad,
            "extra_special_tokens": [tokens[i] for i in special],
            "clean_up_tokenization_spaces": False,
            "model_max_length": int(meta["llama.context_length"]),
            "chat_template": meta["tokenizer.chat_template"],
        },
    )


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False), encoding="utf-8")
