"""How the drafter's attention layers read: a method's plan executed on vLLM's paged caches, inside vLLM's own op.

:func:`install` gives a loaded drafter its own rotary embedding, which turns keys alone, and each attention layer an
implementation that hands the unturned queries to ``methods.paged.PagedReader``. The implementation runs inside vLLM's
opaque attention op, so ``torch.compile`` and CUDA graphs see no difference. ``original`` on a drafter whose layers all
read everything keeps vLLM's own read and is only counted.

On a CPU the reader's torch executor runs, on pages laid out plainly. On CUDA vLLM's FlashAttention executes the calls
(``methods.kernels.flash``), Triton turns the query and merges the parts; ``kernels: triton`` in the setting reads in
Triton altogether. No GPU has run that: it was written from the installed source, its parts are tested on the CPU, and
``tests/vllm/test_contract_gpu.py`` checks what it relies on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.model_executor.layers.rotary_embedding import RotaryEmbedding
from vllm.v1.attention.backend import AttentionBackend
from vllm.v1.attention.backends import fa_utils
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, CPUAttentionBackendImpl
from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend, FlashAttentionImpl

from harness.drafters import DrafterConfig
from harness.engines.vllm import activity
from harness.engines.vllm.plugin import Settings
from harness.engines.vllm.side_cache import SideLayer, scatter, side_layers
from methods.kernels import executors
from methods.kernels.flash import FlashAttend
from methods.paged import PagedLayer, PagedReader
from methods.reading import (
    All,
    LayerGeometry,
    Layers,
    Method,
    Older,
    ReadPlan,
    RequestGeometry,
    Retrieved,
    SlidingGap,
    TrueDistance,
)
from methods.rope import Rope

logger = init_logger("vllm.fold_bench")


class DrafterReads:
    """The reads of all attention layers of one drafter: method, reader, and where the layers' entries lie.

    ``config``: the drafter as it was trained. ``max_context``: most positions of a request, prompt and output. Stateful
    methods serve one request at a time (``single``); the others serve any number, and are then counted together.
    """

    def __init__(self, settings: Settings, config: DrafterConfig, vllm_config: VllmConfig, device: torch.device):
        self.method, self.config = settings.method, config
        self.geometry = config.geometry()
        self.block = self.geometry.block
        self.max_context = vllm_config.model_config.max_model_len
        self.single = vllm_config.scheduler_config.max_num_seqs == 1
        self.stock = _reads_as_stock(self.method, config)
        self._open = {
            "max_context": self.max_context,
            "dtype": vllm_config.model_config.dtype,
            "device": device,
            **_executors(settings.kernels, self, device),
        }
        self.reader = PagedReader(self.method, self.geometry, **self._open)
        # Most entries of a context of which no row has any beyond its window, and the reader for those: a graph of its
        # own is shorter (Appendix B.4's length dispatch). None: the method has no far memory, or chooses on the host.
        self.near_limit = _near_limit(self.reader, self.block)
        self.near_reader: PagedReader | None = None
        self.near_only = False
        self.attentions: list[Any] = []  # vLLM's attention layers, in order
        self.sides: list[SideLayer] = []
        self.rotaries: list[Any] = []  # each layer's rotary embedding; layers with the same one share it
        self.reading = True  # False while a prompt is incomplete: its drafts are discarded, so nothing is read
        self._counted = torch.zeros(2, dtype=torch.int64, device=device)  # stock reads: rounds, entries in the context
        self._request: RequestGeometry | None = None
        self._stored: tuple[int, Tensor, Tensor | None] | None = None

    def split_near(self) -> None:
        """Open a second reader for contexts up to ``near_limit``; ``near_only`` says which of the two reads."""
        self.near_reader = PagedReader(NearOnly(self.method), self.geometry, **self._open)

    @property
    def host_driven(self) -> bool:
        """The method chooses entries on the host, so its reads cannot be in a CUDA graph."""
        return self.reader.host_driven

    def plans(self) -> list[str]:
        """One line for each kind of plan: which layers, and what they read."""
        lines: dict[str, list[int]] = {}
        for index, plan in enumerate(self.reader.plans):
            lines.setdefault(str(plan), []).append(index)
        return [f"layers {','.join(map(str, layers))}: {plan}" for plan, layers in lines.items()]

    # ------------------------------------------------------------------------------------------------ a request's life

    def begin(self, request_id: str, prompt: int, limit: int) -> None:
        """A new request of ``prompt`` tokens that may generate ``limit``: nothing survives the last one."""
        if not self.single:
            if self._request is not None:
                return
            prompt, limit = 1, self.max_context - 1
        activity.start(request_id)
        self._request = RequestGeometry(prompt, max(1, min(limit, self.max_context - prompt)), self.block)
        self.prompt_stored()
        if not self.stock:
            for rotary in dict.fromkeys(self.rotaries):
                rotary.fill(self.reader.rope(self.rotaries.index(rotary), self._request))

    def prompt_stored(self) -> None:
        """Counting starts here: a graph that a prompt's earlier chunks replayed has read for nothing."""
        assert self._request is not None
        self._counted.zero_()
        self._stored = None
        self.reader.begin(self._request)
        if self.near_reader is not None:
            self.near_reader.begin(self._request)

    def storing(self, length: int, table: Tensor, weights: Tensor | None) -> None:
        """The drafter is about to store what was committed: its context will have ``length`` entries, found by ``table
        [max_pages]``. ``weights``: what the method wanted of the target's attention."""
        self._stored = length, table, weights

    def stored(self) -> None:
        """The context's entries are in the caches."""
        if self._stored is None or not self.host_driven or not self.reading:
            return
        length, table, weights = self._stored
        self.reader.committed(length, [self.pages(i, table) for i in range(len(self.attentions))])
        if weights is not None:
            self.reader.target_attention(weights)
        self._stored = None

    def counters(self) -> dict[str, Any]:
        """What was read since the running request began; asks the device."""
        if not self.stock:
            found = dict(self.reader.activity())
            near = {} if self.near_reader is None else self.near_reader.activity()
            return found | {name: found[name] + count for name, count in near.items()}
        rounds, context = self._counted.tolist()
        return {"rounds": rounds, "entries_in_context": context, "entries_read": context, "far_entries_read": 0}

    def side_cache_bytes(self) -> int:
        """Bytes a token that the side layers add, as vLLM allocated them."""
        return sum(side.bytes_per_token for side in self.sides)

    # ------------------------------------------------------------------------------------------------------- the reads

    def pages(self, layer: int, table: Tensor) -> PagedLayer:
        """Where the entries of a layer lie."""
        keys, values = split_pages(self.attentions[layer].kv_cache, self.geometry.head_dim)
        side = next((side for side in self.sides if layer in side.layers), None)
        return PagedLayer(keys, None if side is None else side.keys(layer), values, table)

    def read(self, layer: int, query: Tensor, metadata: Any, output: Tensor) -> Tensor:
        """``query`` and ``output [tokens, Hq, d]``: B rows a request, then padding."""
        if metadata is None or not self.reading:  # memory profiling, or drafts that nobody will use
            return output.zero_()
        rows = self.block
        reader = self.near_reader if self.near_only and self.near_reader is not None else self.reader
        for request in range(metadata.seq_lens.shape[0]):
            block = slice(request * rows, (request + 1) * rows)
            length = metadata.seq_lens[request : request + 1] - rows
            pages = self.pages(layer, metadata.block_table[request])
            output[block] = reader.read(layer, query[block], pages, length)
        return output

    def count_stock(self, layer: int, metadata: Any) -> None:
        """vLLM's own read is about to run for a layer."""
        if metadata is not None and self.reading:
            contexts = metadata.seq_lens - self.block
            self._counted[0] += len(contexts) if layer == 0 else 0
            self._counted[1] += contexts.sum()

    def write_raw(self, raw: Tensor, slots: Sequence[Tensor | None]) -> None:
        """Store unrotated keys ``raw [L, n, Hkv, d]`` at each layer's ``slots``."""
        for side in self.sides:
            where = slots[side.layers[0]]
            if where is not None:
                side.write(raw, where)


@dataclass(frozen=True)
class NearOnly:
    """A method without its far branches: the same read, while no entry is far."""

    method: Method
    name: ClassVar[str] = "near part"

    @property
    def layers(self) -> Layers:
        return self.method.layers

    def plan(self, layer: LayerGeometry, request: RequestGeometry) -> ReadPlan:
        """The method's plan, its block's branch alone."""
        plan = self.method.plan(layer, request)
        return replace(plan, branches=tuple(branch for branch in plan.branches if branch.block))


def _near_limit(reader: PagedReader, block: int) -> int | None:
    limits = []
    for plan in reader.plans:
        for branch in plan.branches:
            match branch.entries:
                case Older(window):
                    limits.append(window)
                case SlidingGap(size):
                    limits.append(size - block)
                case Retrieved():
                    return None
    return min(limits, default=None)


def _executors(kernels: str | None, reads: DrafterReads, device: torch.device) -> dict[str, Any]:
    """What executes the reader's calls on this device. Raises ValueError, one line, if it cannot."""
    if device.type == "cpu" and kernels is None:
        return {}
    try:
        found = executors(reads.max_context + 2 * reads.block)
    except RuntimeError as error:
        raise ValueError(f"additional_config.fold_bench.kernels: {error}") from None
    if kernels == "triton":
        return found
    version = fa_utils.get_flash_attn_version(head_size=reads.geometry.head_dim)
    if version is None:
        raise ValueError(f"no FlashAttention here takes heads of {reads.geometry.head_dim}; set kernels to triton")
    function = fa_utils.flash_attn_varlen_func
    longest = reads.max_context + reads.block
    return {
        "attend": FlashAttend(function, longest, fa_version=version),
        "rotate": found["rotate"],
        "merge": found["merge"],
    }


def install(model: Any, settings: Settings, config: DrafterConfig, vllm_config: VllmConfig) -> DrafterReads:
    """Make a drafter of vLLM's read by the setting's method. Called while the model is being built.

    Raises ValueError, one line, for what does not fit together or cannot be served.
    """
    attention_modules = [layer.self_attn for layer in model.model.layers]
    device = attention_modules[0].q_norm.weight.device
    reads = DrafterReads(settings, config, vllm_config, device)
    _check(reads, attention_modules, vllm_config)
    reads.attentions = [module.attn for module in attention_modules]
    if reads.stock:
        reads.rotaries = [module.rotary_emb for module in attention_modules]
        for index, attention in enumerate(reads.attentions):
            attention.impl.forward = _counting(attention.impl.forward, reads, index)
    else:
        backend = PlannedCPUBackend if device.type == "cpu" else PlannedFlashBackend
        for index, attention in enumerate(reads.attentions):
            _replace_impl(attention, backend, reads, index)
        give_rotaries(reads, attention_modules)
        context = vllm_config.compilation_config.static_forward_context
        reads.sides = side_layers(reads.reader.raw_layers, reads.attentions, context)
    open_activity(reads, type(model).__name__, trace=settings.trace)
    logger.info("fold_bench: method %s reads the drafter's context (%s)", reads.method.name, "; ".join(reads.plans()))
    return reads


def give_rotaries(reads: DrafterReads, modules: Sequence[Any]) -> None:
    """Give every attention module a rotary embedding of the drafter's own; layers that YaRN scales share another."""
    made: dict[bool, KeyRotary] = {}
    weight = modules[0].q_norm.weight
    for layer, module in zip(reads.geometry.layers, modules, strict=True):
        scaled = reads.method.plan(layer, _longest(reads)).rope is not None
        if scaled not in made:
            positions = reads.max_context + 2 * reads.block
            dim = reads.geometry.head_dim
            made[scaled] = KeyRotary(reads.geometry.rope, dim, positions, weight.dtype, weight.device)
        module.rotary_emb = made[scaled]
    reads.rotaries = [module.rotary_emb for module in modules]


def open_activity(reads: DrafterReads, drafter: str, *, trace: bool) -> None:
    """From now on this process reports what ``reads`` does."""
    static = {
        "method": reads.method.name,
        "plan": reads.plans(),
        "read": "vllm" if reads.stock else f"paged, {reads.reader.device.type}",
        "drafter": drafter,
    }
    activity.opened(
        static,
        lambda: {"side_cache_bytes_per_token": reads.side_cache_bytes(), **reads.counters()},
        trace=trace,
    )


def _check(reads: DrafterReads, modules: Sequence[Any], vllm_config: VllmConfig) -> None:
    """Refuse what would run but not mean what it says."""
    speculative, config = vllm_config.speculative_config, reads.config
    name = reads.method.name
    proposals = config.proposals
    if speculative.num_speculative_tokens != proposals:
        raise ValueError(
            f"num_speculative_tokens is {speculative.num_speculative_tokens}, but this drafter of block size "
            f"{config.block} proposes {proposals}; set it to {proposals}"
        )
    parallel = vllm_config.parallel_config
    if parallel.world_size > 1 or parallel.decode_context_parallel_size > 1:
        raise ValueError(f"method {name} runs on one device; {parallel.world_size} were asked for")
    reach, served = speculative.draft_model_config.max_model_len, vllm_config.model_config.max_model_len
    if reach < served:
        raise ValueError(
            f"this drafter's positions end at {reach}, but {served} are served; serve a copy: "
            f"python -m harness.engines.vllm.drafter_copy DRAFTER FOLDER --context {served}"
        )
    target = vllm_config.model_config
    config.check_target(target.get_total_num_hidden_layers(), target.get_hidden_size(), target.get_vocab_size())
    zlab = config.family == "dflash"
    if zlab and (config.softcap is not None or config.output_multiplier != 1.0):
        raise ValueError("this drafter scales or caps its logits, which vLLM's DFlash does not; use engine=reference")
    if zlab and config.embed_scale != 1.0:
        raise ValueError("this drafter scales its embeddings, which vLLM's DFlash does not; use engine=reference")
    shape = (reads.geometry.q_heads, reads.geometry.kv_heads, reads.geometry.head_dim)
    for module in modules:
        attention = module.attn
        if (attention.num_heads, attention.num_kv_heads, attention.head_size) != shape:
            raise ValueError(f"vLLM built {attention.layer_name} with other heads than the drafter's config.json says")
        if attention.sliding_window is not None:
            raise ValueError(
                f"drafter layer {attention.layer_name} would drop entries that left its window; serve a copy of the "
                "drafter whose layers keep their whole context (python -m harness.engines.vllm.drafter_copy)"
            )
        if attention.kv_cache_dtype.startswith(("fp8", "nvfp4", "int")):
            raise ValueError(f"method {name} reads unquantized keys; kv_cache_dtype is {attention.kv_cache_dtype}")
    short, long = RequestGeometry(1, 1, reads.block), _longest(reads)
    per_request = any(reads.method.plan(x, short) != reads.method.plan(x, long) for x in reads.geometry.layers)
    if not reads.single and (reads.host_driven or per_request):
        raise ValueError(f"method {name} serves one request at a time; set max_num_seqs=1")
    if per_request and vllm_config.cache_config.enable_prefix_caching:
        raise ValueError(f"method {name} rotates keys by the request; set enable_prefix_caching=False")


def _longest(reads: DrafterReads) -> RequestGeometry:
    return RequestGeometry(max(1, reads.max_context - 1), 1, reads.block)


def _reads_as_stock(method: Method, config: DrafterConfig) -> bool:
    """Whether vLLM's own non-causal read of everything is what every layer of the method does, for every request."""
    request = RequestGeometry(1, 1, config.block)
    if method.name != "original":
        return False
    plans = [method.plan(layer, request) for layer in config.layers]
    whole = all(isinstance(b.entries, All) and isinstance(b.placement, TrueDistance) for p in plans for b in p.branches)
    return whole and not any(layer.block_causal for layer in config.layers)


def _counting(forward: Any, reads: DrafterReads, index: int) -> Any:
    def counted(
        layer: Any, query: Any, key: Any, value: Any, kv_cache: Any, attn_metadata: Any, *rest: Any, **named: Any
    ) -> Any:
        reads.count_stock(index, attn_metadata)
        return forward(layer, query, key, value, kv_cache, attn_metadata, *rest, **named)

    return counted


def _replace_impl(attention: Any, backend: type[AttentionBackend], reads: DrafterReads, index: int) -> None:
    impl: Any = backend.get_impl_cls()(
        attention.num_heads,
        attention.head_size,
        attention.impl.scale,
        attention.num_kv_heads,
        None,
        None,
        attention.kv_cache_dtype,
        None,
        attention.attn_type,
        None,
    )
    impl.reads, impl.layer_index = reads, index
    attention.impl, attention.attn_backend = impl, backend


# ------------------------------------------------------------------------------------------------- keys and their pages


class KeyRotary(nn.Module):
    """The drafter's own rotary embedding, in place of the one vLLM shares with the target: it turns keys and leaves
    queries to the reader, which turns them to wherever a branch reads from.

    ``positions``: rows of its table, which :meth:`fill` overwrites in place, so that CUDA graphs see a request's YaRN.
    """

    def __init__(self, rope: Rope, head_dim: int, positions: int, dtype: torch.dtype, device: torch.device):
        super().__init__()
        pairs = len(rope.inv_freq)
        self.rotary = RotaryEmbedding(head_dim, 2 * pairs, positions, 1.0, True, dtype, init_cache=False)
        table = torch.empty(positions, 2 * pairs, dtype=dtype, device=device)
        self.rotary.register_buffer("cos_sin_cache", table, persistent=False)
        self.head_size = head_dim
        self.is_neox_style = True
        self._held: Rope | None = None
        self.fill(rope)

    @property
    def cos_sin_cache(self) -> Tensor:
        """``[positions, 2n]``: cosines, then sines."""
        return self.rotary.cos_sin_cache

    def fill(self, rope: Rope) -> None:
        """Overwrite the table: float64 angles, cosines and sines rounded to its dtype."""
        held = self._held
        if held is not None and held.mscale == rope.mscale and torch.equal(held.inv_freq, rope.inv_freq):
            return
        self._held = rope
        table = self.cos_sin_cache
        freq = rope.inv_freq.to(table.device)
        for start in range(0, len(table), 16384):
            rows = torch.arange(start, min(start + 16384, len(table)), dtype=torch.float64, device=table.device)
            angle = rows[:, None] * freq
            table[start : start + len(rows)] = torch.cat((angle.cos(), angle.sin()), -1) * rope.mscale

    def forward(self, positions: Tensor, query: Tensor, key: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """As vLLM calls its own: with a block's queries and keys, or with context keys alone in the query's place.
        Keys ``[n, Hkv * d]`` are turned to ``positions [n]``, maybe in place."""
        if key is None:
            return self.rotary(positions, query)
        return query, self.rotary(positions, key)[0]


def split_pages(kv_cache: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
    """Keys and values ``[pages, page_size, Hkv, d]`` of vLLM's ``[pages, Hkv, page_size, 2 * d]``, views."""
    both = kv_cache.transpose(1, 2)
    return both[..., :head_dim], both[..., head_dim : 2 * head_dim]


# ------------------------------------------------------------------------------------------------------ CPU and CUDA


class PlannedCPUImpl(CPUAttentionBackendImpl):
    """Stores keys and values plainly (vLLM's CPU kernels use an order of their own) and reads by the plan."""

    reads: DrafterReads
    layer_index: int

    def do_kv_cache_update(
        self, layer: nn.Module, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        scatter(kv_cache, torch.cat((key, value), -1), slot_mapping[: len(key)])

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: Any,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        return self.reads.read(self.layer_index, query, attn_metadata, output)


class PlannedCPUBackend(CPUAttentionBackend):
    """vLLM's CPU backend with the planned implementation."""

    @staticmethod
    def get_impl_cls() -> type[PlannedCPUImpl]:
        return PlannedCPUImpl


class PlannedFlashImpl(FlashAttentionImpl):
    """FlashAttention's cache and metadata, read by the plan. Not run on a GPU yet."""

    reads: DrafterReads
    layer_index: int

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: Any,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        return self.reads.read(self.layer_index, query, attn_metadata, output)


class PlannedFlashBackend(FlashAttentionBackend):
    """vLLM's FlashAttention backend with the planned implementation."""

    @staticmethod
    def get_impl_cls() -> type[PlannedFlashImpl]:
        return PlannedFlashImpl
