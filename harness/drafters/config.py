"""What a drafter checkpoint says about itself: ``config.json`` of the two published formats, read and checked.

The file is read as plain JSON on purpose. Through ``transformers``' ``Qwen3Config`` it would lose ``sliding_window``
and ``layer_types`` whenever ``use_sliding_window`` is not set, and would gain defaults (a rope theta, a head size)
nobody wrote.

Formats (facts/drafters.md 1.5 and 2.6): z-lab's ``DFlashDraftModel``, whose drafting keys live in ``dflash_config``
or at the top level, and DeepSpec's ``Qwen3DSparkModel`` and ``Gemma4DSparkModel``, where they are all at the top
level. DeepSpec's own ``dflash_*_block7`` checkpoints are the latter with ``markov_rank`` 0.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

from harness.drafters.errors import DrafterError
from methods.reader import DrafterGeometry
from methods.reading import LayerGeometry
from methods.rope import build_rope

Family = Literal["dflash", "dspark_qwen3", "dspark_gemma4"]

FAMILIES: dict[str, Family] = {
    "DFlashDraftModel": "dflash",
    "Qwen3DSparkModel": "dspark_qwen3",
    "Gemma4DSparkModel": "dspark_gemma4",
}


@dataclass(frozen=True)
class DrafterConfig:
    """A drafter's dimensions and conventions, every default resolved. Sizes count elements; nothing here has a dtype.

    ``value_dim`` equals ``head_dim`` in all released families. ``rope`` is the Hugging Face rope dictionary
    (``rope_type``, ``rope_theta``, ...). ``scale`` is the softmax scale. ``num_target_layers`` is None if the
    checkpoint does not say. ``confidence_inputs`` is the input width of DeepSpec's confidence head (0: none); fixed
    blocks never evaluate it, so its tensors are checked and left alone.
    """

    family: Family
    block: int
    layers: tuple[LayerGeometry, ...]
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    k_eq_v: bool
    rope: Mapping[str, Any]
    eps: float
    scale: float
    target_layer_ids: tuple[int, ...]
    num_target_layers: int | None
    mask_token_id: int
    vocab: int
    max_positions: int
    markov_rank: int = 0
    confidence_inputs: int = 0
    softcap: float | None = None
    embed_scale: float = 1.0
    output_multiplier: float = 1.0

    @property
    def proposals(self) -> int:
        """K, the tokens proposed a round: z-lab scores B - 1 same-position labels, DeepSpec B next-token labels."""
        return self.block - 1 if self.family == "dflash" else self.block

    @property
    def ships_head(self) -> bool:
        """Whether the format stores its own embedding and vocabulary head (DeepSpec) or borrows the target's
        (z-lab)."""
        return self.family != "dflash"

    def geometry(self) -> DrafterGeometry:
        """What a reader needs to know of this drafter."""
        return DrafterGeometry(
            layers=self.layers,
            q_heads=self.heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            value_dim=self.value_dim,
            scale=self.scale,
            rope=build_rope(self.rope, self.head_dim),
            block=self.block,
        )

    def check_target(self, layers: int, hidden: int, vocab: int) -> None:
        """Raise ``DrafterError`` unless a target with so many layers, hidden units and tokens can feed this
        drafter."""
        if layers != (self.num_target_layers or layers):
            raise DrafterError(f"the drafter needs a target of {self.num_target_layers} layers, this one has {layers}")
        if max(self.target_layer_ids) >= layers:
            raise DrafterError(f"the drafter reads layer {max(self.target_layer_ids)} of a target of {layers} layers")
        if hidden != self.hidden:
            raise DrafterError(f"the drafter's hidden size is {self.hidden}, the target's is {hidden}")
        if self.mask_token_id >= vocab:
            raise DrafterError(f"the drafter's mask token {self.mask_token_id} is outside the target's {vocab} tokens")
        # z-lab drafters never use their own vocab_size, so only a checkpoint with its own head can disagree about it.
        if self.ships_head and vocab != self.vocab:
            raise DrafterError(f"the drafter's vocabulary has {self.vocab} tokens, the target's {vocab}")


def build_target_layer_ids(num_target_layers: int, features: int) -> tuple[int, ...]:
    """The target layers whose outputs z-lab's drafters read when the checkpoint does not list them.

    Evenly spaced from layer 1 to the fourth from the end, with Python's rounding (halves to even); one feature takes
    the middle layer. Source: facts/drafters.md 1.1.
    """
    if features == 1:
        return (num_target_layers // 2,)
    return tuple(round(1 + i * (num_target_layers - 4) / (features - 1)) for i in range(features))


class _Json:
    """``config.json`` with errors that name the file and the key, and both homes of z-lab's drafting keys."""

    def __init__(self, raw: Mapping[str, Any], where: str):
        self.raw, self.where = raw, where
        nested = raw.get("dflash_config") or {}
        if not isinstance(nested, Mapping):
            raise self.error(f"dflash_config is {nested!r}, not an object")
        self.nested: Mapping[str, Any] = nested

    def error(self, text: str) -> DrafterError:
        return DrafterError(f"{self.where}: {text}")

    def get(self, key: str, default: Any = None) -> Any:
        """The value at the top level or in ``dflash_config``; both must agree. ``null`` counts as absent."""
        top, nested = self.raw.get(key), self.nested.get(key)
        if top is not None and nested is not None and top != nested:
            raise self.error(f"{key} is {top!r} at the top level but {nested!r} in dflash_config")
        value = top if top is not None else nested
        return default if value is None else value

    def integer(self, key: str, least: int = 1, default: int | None = None) -> int:
        value = self.get(key, default)
        if value is None:
            raise self.error(f"{key} is missing")
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise self.error(f"{key} is {value!r}, expected an integer of at least {least}")
        return value

    def positive(self, key: str, default: float | None = None) -> float:
        value = self.get(key, default)
        if value is None:
            raise self.error(f"{key} is missing")
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise self.error(f"{key} is {value!r}, expected a positive number")
        return float(value)

    def refuse(self, key: str, *accepted: Any) -> None:
        """Stop at a setting that would change the computation in a way this package does not have."""
        value = self.get(key)
        if value is not None and value not in accepted:
            raise self.error(f"{key} is {value!r}, only {' or '.join(repr(a) for a in accepted)} is supported")


def parse_config(raw: Mapping[str, Any], *, where: str = "config.json", block: int | None = None) -> DrafterConfig:
    """Read a parsed ``config.json`` of any supported family; ``where`` prefixes error messages.

    ``block`` is what the user believes the block size to be: a checkpoint only works at the block size it was trained
    for, so it is compared, never applied. Raises ``DrafterError``.
    """
    names = raw.get("architectures") or []
    known = [name for name in names if name in FAMILIES] if isinstance(names, list) else []
    if not known:
        listed = ", ".join(FAMILIES)
        raise DrafterError(f"{where}: architectures is {names!r}, which is no supported drafter ({listed})")
    family = FAMILIES[known[0]]
    json = _Json(raw, where)
    gemma = family == "dspark_gemma4"

    block_size = json.integer("block_size", least=2 if family == "dflash" else 1)
    if block is not None and block != block_size:
        raise json.error(f"block size {block} was asked for, but the checkpoint's block_size is {block_size}")

    json.refuse("attention_bias", False)
    json.refuse("mlp_bias", False)
    json.refuse("fc_norm", False)
    # z-lab labels are same-position; a checkpoint that says otherwise would lose nearly all acceptance (vllm#49614).
    json.refuse("sample_from_anchor", family != "dflash")
    json.refuse("hidden_activation" if gemma else "hidden_act", "gelu_pytorch_tanh" if gemma else "silu")
    hidden, heads = json.integer("hidden_size"), json.integer("num_attention_heads")
    json.refuse("target_hidden_size", hidden)
    vocab = json.integer("vocab_size")
    json.refuse("draft_vocab_size", vocab)

    k_eq_v = gemma and bool(json.get("attention_k_eq_v", False))
    if gemma:
        json.refuse("enable_moe_block", False)
        json.refuse("hidden_size_per_layer_input", 0)
        head_dim = json.integer("global_head_dim")
        kv_heads = json.integer("num_global_key_value_heads" if k_eq_v else "num_key_value_heads")
    else:
        head_dim = json.integer("head_dim", default=hidden // heads)
        kv_heads = json.integer("num_key_value_heads")
    if heads % kv_heads:
        raise json.error(f"{heads} query heads cannot share {kv_heads} key-value heads")

    mask_token_id = json.integer("mask_token_id", least=0)
    # z-lab's own code stopped reading this key, so that its newer checkpoints may come without it.
    known_target = family != "dflash" or json.get("num_target_layers") is not None
    num_target_layers = json.integer("num_target_layers") if known_target else None
    layers = _layers(json, gemma)
    markov_rank, confidence_inputs = (0, 0) if family == "dflash" else _heads(json, hidden)
    if family != "dflash" and mask_token_id >= vocab:
        raise json.error(f"mask_token_id {mask_token_id} is outside the vocabulary of {vocab}")

    # 0 is z-lab's way to say none.
    softcap = json.positive("final_logit_softcapping") if json.get("final_logit_softcapping") else None
    return DrafterConfig(
        family=family,
        block=block_size,
        layers=layers,
        hidden=hidden,
        intermediate=json.integer("intermediate_size"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        value_dim=head_dim,
        k_eq_v=k_eq_v,
        rope=_rope(json, gemma, head_dim),
        eps=json.positive("rms_norm_eps"),
        scale=1.0 if gemma else head_dim**-0.5,
        target_layer_ids=_target_layer_ids(json, family, num_target_layers, len(layers)),
        num_target_layers=num_target_layers,
        mask_token_id=mask_token_id,
        vocab=vocab,
        max_positions=json.integer("max_position_embeddings"),
        markov_rank=markov_rank,
        confidence_inputs=confidence_inputs,
        softcap=softcap,
        embed_scale=hidden**0.5 if gemma else json.positive("input_embedding_scale", 1.0),
        output_multiplier=json.positive("output_multiplier", 1.0),
    )


def _layers(json: _Json, gemma: bool) -> tuple[LayerGeometry, ...]:
    """Kind, window and in-block causality of each layer (facts/drafters.md 1.2)."""
    count = json.integer("num_hidden_layers")
    kinds = json.get("layer_types")
    if kinds is None:
        if json.get("use_sliding_window") or json.get("use_swa"):
            raise json.error("a sliding window is switched on, but layer_types does not say which layers have it")
        kinds = ["full_attention"] * count
    if not isinstance(kinds, list) or len(kinds) != count:
        size = len(kinds) if isinstance(kinds, list) else repr(kinds)
        raise json.error(f"layer_types has {size} entries for num_hidden_layers {count}")
    for kind in kinds:
        if kind not in ("full_attention", "sliding_attention"):
            raise json.error(f"layer_types holds {kind!r}, expected full_attention or sliding_attention")

    sliding = "sliding_attention" in kinds
    window: int | None = None
    if sliding:
        if gemma:
            raise json.error("sliding_attention layers are not supported in a Gemma-4 drafter")
        if json.get("use_sliding_window") is False:
            raise json.error("layer_types has sliding_attention layers, but use_sliding_window is false")
        window = json.integer("sliding_window", default=json.get("swa_window_size"))
        json.refuse("swa_window_size", window)
    elif json.get("use_swa"):
        raise json.error("use_swa is true, but layer_types has no sliding_attention layer")

    # The top level wins over dflash_config.causal; without either, the engines that trained and serve these
    # checkpoints mask later block positions in sliding layers only.
    causal = json.get("is_causal", json.get("causal"))
    if causal is not None and not isinstance(causal, bool):
        raise json.error(f"is_causal is {causal!r}, expected true or false")
    return tuple(
        LayerGeometry(
            kind=kind,
            native_window=window if kind == "sliding_attention" else None,
            block_causal=kind == "sliding_attention" if causal is None else causal,
        )
        for kind in kinds
    )


def _target_layer_ids(json: _Json, family: Family, num_target_layers: int | None, layers: int) -> tuple[int, ...]:
    """The 0-based target layers whose outputs are the features; not necessarily as many as the drafter has layers."""
    ids = json.get("target_layer_ids")
    if ids is None and family == "dflash" and num_target_layers is not None:
        ids = list(build_target_layer_ids(num_target_layers, layers))
    if not isinstance(ids, list) or not ids or not all(type(i) is int for i in ids):
        raise json.error(f"target_layer_ids is {ids!r}, expected a list of layer numbers")
    for i in ids:
        if i < 0 or (num_target_layers is not None and i >= num_target_layers):
            layers_known = "" if num_target_layers is None else f" to {num_target_layers - 1}"
            raise json.error(f"target_layer_ids holds {i}, but a target's layers are numbered from 0{layers_known}")
    if family != "dflash" and any(a >= b for a, b in pairwise(ids)):
        raise json.error(f"target_layer_ids {ids} must increase")
    return tuple(ids)


def _heads(json: _Json, hidden: int) -> tuple[int, int]:
    """DeepSpec's Markov rank and the input width of its confidence head (0: none)."""
    rank = json.integer("markov_rank", least=0)
    if rank:
        json.refuse("markov_head_type", "vanilla")
    if not json.get("enable_confidence_head", False):
        return rank, 0
    with_markov = bool(json.get("confidence_head_with_markov", False))
    if with_markov and not rank:
        raise json.error("confidence_head_with_markov is true, but markov_rank is 0")
    return rank, hidden + (rank if with_markov else 0)


def _rope(json: _Json, gemma: bool, head_dim: int) -> dict[str, Any]:
    """One Hugging Face rope dictionary out of ``rope_parameters``, or the older ``rope_theta`` and
    ``rope_scaling``."""
    rope: dict[str, Any] = {}
    for key in ("rope_parameters", "rope_scaling"):
        found = json.get(key) or {}
        if not isinstance(found, Mapping):
            raise json.error(f"{key} is {found!r}, not an object")
        if any(isinstance(value, Mapping) for value in found.values()):  # one dictionary a layer kind (Gemma)
            kinds = {kind: found[kind] for kind in found if kind in (json.get("layer_types") or ["full_attention"])}
            if not kinds or any(value != next(iter(kinds.values())) for value in kinds.values()):
                raise json.error(f"{key} must give all the drafter's layers one RoPE, not {dict(found)}")
            found = next(iter(kinds.values()))
        for name, value in found.items():
            name = "rope_type" if name == "type" else name
            if value is None:
                continue
            if rope.setdefault(name, value) != value:
                raise json.error(f"{key} says {name} {value!r}, another entry {rope[name]!r}")
    theta = json.get("rope_theta")
    if theta is not None and rope.setdefault("rope_theta", theta) != theta:
        raise json.error(f"rope_theta is {theta!r} at the top level but {rope['rope_theta']!r} in rope_parameters")
    # Guessing a theta would only show as a low acceptance length, so there is no default.
    if not isinstance(rope.get("rope_theta"), int | float) or not rope["rope_theta"] > 0:
        raise json.error(f"rope_theta is {rope.get('rope_theta')!r}; the file must give a positive one")
    rope.setdefault("rope_type", "default")
    if not gemma and rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise json.error(f"partial_rotary_factor is {rope['partial_rotary_factor']!r}; this family rotates whole heads")
    if rope["rope_type"] == "yarn":
        rope.setdefault("original_max_position_embeddings", json.integer("max_position_embeddings"))
    try:
        build_rope(rope, head_dim)
    except (TypeError, ValueError) as error:
        raise json.error(f"its RoPE cannot be built: {error}") from error
    return rope


def as_json(config: DrafterConfig) -> dict[str, Any]:
    """``config.json`` of a config, such that ``parse_config`` returns it again and stock loaders of the format accept
    it."""
    gemma, zlab = config.family == "dspark_gemma4", config.family == "dflash"
    windows = {layer.native_window for layer in config.layers if layer.native_window is not None}
    raw: dict[str, Any] = {
        "architectures": [next(name for name, family in FAMILIES.items() if family == config.family)],
        "model_type": "gemma4_text" if gemma else "qwen3",
        "num_hidden_layers": len(config.layers),
        "num_target_layers": config.num_target_layers,
        "block_size": config.block,
        "hidden_size": config.hidden,
        "intermediate_size": config.intermediate,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "attention_bias": False,
        "rms_norm_eps": config.eps,
        "layer_types": [layer.kind for layer in config.layers],
        "max_position_embeddings": config.max_positions,
        "vocab_size": config.vocab,
        "tie_word_embeddings": False,
        "final_logit_softcapping": config.softcap,
        "dtype": "bfloat16",
    }
    if any(layer.block_causal != (layer.kind == "sliding_attention") for layer in config.layers):
        raw["is_causal"] = config.layers[0].block_causal
    if windows:
        # max_window_layers 0 and use_sliding_window make Qwen3Config keep what it would silently drop.
        raw |= {"sliding_window": windows.pop(), "use_sliding_window": True, "max_window_layers": 0}
    drafting = {"mask_token_id": config.mask_token_id, "target_layer_ids": list(config.target_layer_ids)}
    if zlab:
        scales = {"input_embedding_scale": config.embed_scale, "output_multiplier": config.output_multiplier}
        raw["dflash_config"] = drafting | {key: value for key, value in scales.items() if value != 1.0}
    else:
        raw |= drafting | {
            "markov_rank": config.markov_rank,
            "markov_head_type": "vanilla",
            "enable_confidence_head": config.confidence_inputs > 0,
            "confidence_head_with_markov": config.confidence_inputs > config.hidden,
        }
    if gemma:
        raw |= {
            "hidden_activation": "gelu_pytorch_tanh",
            "global_head_dim": config.head_dim,
            "num_global_key_value_heads": config.kv_heads,
            "attention_k_eq_v": config.k_eq_v,
            "enable_moe_block": False,
            "hidden_size_per_layer_input": 0,
            "rope_parameters": {"full_attention": dict(config.rope)},
        }
    else:
        # Readers from before transformers 5 look for rope_theta only.
        raw |= {"hidden_act": "silu", "rope_theta": config.rope["rope_theta"], "rope_parameters": dict(config.rope)}
    return {key: value for key, value in raw.items() if value is not None}


def tensor_shapes(config: DrafterConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor that a checkpoint of this config holds (facts/drafters.md 1.4 and 2.5)."""
    hidden, inner = config.hidden, config.intermediate
    queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
    gemma = config.family == "dspark_gemma4"
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, len(config.target_layer_ids) * hidden),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    for i in range(len(config.layers)):
        layer: dict[str, tuple[int, ...]] = {
            "input_layernorm.weight": (hidden,),
            "post_attention_layernorm.weight": (hidden,),
            "self_attn.q_proj.weight": (queries, hidden),
            "self_attn.k_proj.weight": (keys, hidden),
            "self_attn.v_proj.weight": (keys, hidden),
            "self_attn.o_proj.weight": (hidden, queries),
            "self_attn.q_norm.weight": (config.head_dim,),
            "self_attn.k_norm.weight": (config.head_dim,),
            "mlp.gate_proj.weight": (inner, hidden),
            "mlp.up_proj.weight": (inner, hidden),
            "mlp.down_proj.weight": (hidden, inner),
        }
        if config.k_eq_v:
            del layer["self_attn.v_proj.weight"]
        if gemma:
            norms = ("pre_feedforward_layernorm.weight", "post_feedforward_layernorm.weight")
            layer |= dict.fromkeys(norms, (hidden,)) | {"layer_scalar": (1,)}
        shapes |= {f"layers.{i}.{name}": shape for name, shape in layer.items()}
    if config.ships_head:
        shapes |= dict.fromkeys(HEAD_TENSORS, (config.vocab, hidden))
    if config.markov_rank:
        markov = (config.vocab, config.markov_rank)
        shapes |= {"markov_head.markov_w1.weight": markov, "markov_head.markov_w2.weight": markov}
    if config.confidence_inputs:
        shapes |= {"confidence_head.proj.weight": (1, config.confidence_inputs), "confidence_head.proj.bias": (1,)}
    return shapes


HEAD_TENSORS = ("embed_tokens.weight", "lm_head.weight")
"""The vocabulary tensors: DeepSpec checkpoints must hold them, z-lab ones may, and then use them, not the target's."""
