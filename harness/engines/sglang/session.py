"""What the plugin holds in SGLang's scheduler process: the method's reader and what it reads, for one drafter.

The parts that SGLang calls (workers, model, attention backend) find it by :func:`current`. In the order of SGLang's
start: the worker is made and hands itself over (:meth:`DraftSession.bind`), the memory pools are allocated
(``open_pools``), the attention backend is made (``open_backend``), CUDA graphs are captured. Then, request by request:
``prefill`` before each chunk of a prompt, and ``before_round`` and ``after_round`` around each draft and its
verification.

Nothing here imports SGLang, so that the module can be imported, and the method checked, before it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from harness.drafters import DrafterConfig, read_config
from harness.engines.sglang.rotary import OwnRotary
from harness.engines.sglang.setting import Setting
from harness.engines.sglang.side_cache import RawKeys
from methods import make_method
from methods.cache import DrafterGeometry
from methods.kernels.splits import chosen
from methods.paged import PagedLayer, PagedReader
from methods.reading import (
    LayerGeometry,
    Older,
    ReadPlan,
    Recent,
    RequestGeometry,
    SharedDistance,
    TrueDistance,
)

DFLASH, DSPARK = "DFLASH", "DSPARK"
BACKEND = "fa3"  # FlashAttention's name in SGLang's registry of attention backends
GRAPH_RUNNER = "DecodeCudaGraphRunner"
# Rounds of a request whose commits are remembered on the device; far beyond any generation limit of the paper.
MOST_ROUNDS = 1 << 17

_session: DraftSession | None = None


class PluginError(RuntimeError):
    """The drafter cannot be read by the method. The message is one line; it stops the scheduler process."""


def open_session(setting: Setting) -> DraftSession:
    """Make the session of this process. Raises SettingError."""
    global _session
    _session = DraftSession(setting)
    return _session


def current() -> DraftSession:
    """The session of this process. Raises PluginError if there is none."""
    if _session is None:
        raise PluginError("the SGLang plugin has no session: its parts were loaded without its entry point")
    return _session


class DraftSession:
    """One drafter, one method, one request at a time."""

    def __init__(self, setting: Setting):
        self.setting = setting
        self.method = setting.make()
        self.algorithm = ""
        self.stock = False  # the engine's own read, counted but not changed
        self.reader: PagedReader | None = None
        self.short: PagedReader | None = None  # what the method reads while nothing lies beyond its window
        self.raw: RawKeys | None = None
        self.rotary: OwnRotary | None = None
        self.backend: Any = None
        self.queries: Any = None
        self.worker: Any = None
        self.request: RequestGeometry | None = None
        self.rid = ""
        self.rounds = 0
        self.commits = torch.zeros(0, dtype=torch.int32)
        self.length = 0  # context entries that a host-driven method was told of
        self.wants_attention = False

    # ------------------------------------------------------------------------------------------------- SGLang's start

    def bind(self, worker: Any, algorithm: str, block: int) -> None:
        """``worker``: SGLang's, its drafter loaded; ``block``: positions of a draft block.

        Raises PluginError if the drafter, its checkpoint and the method do not fit, or the worker was started with
        options under which they would not be read as said.
        """
        self.worker, self.algorithm = worker, algorithm
        args = worker.server_args
        window = getattr(args, "speculative_draft_window_size", None)
        built_in = self.method.name == "engine_window" and algorithm == DFLASH
        self.stock = built_in or self.method.name == "original"
        if built_in and window != self.setting.options.get("window"):
            raise PluginError(
                f"engine_window of {self.setting.options.get('window')} entries is SGLang's own draft window, which is "
                f"{window}: start it with --speculative-draft-window-size {self.setting.options.get('window')}"
            )
        if not built_in and window is not None:
            raise PluginError(
                f"--speculative-draft-window-size {window} cuts the context of method {self.method.name}: leave it out"
            )
        planner = getattr(worker, "_verify_planner", None)
        if getattr(planner, "is_compact_mode", False):
            raise PluginError("SGLANG_RAGGED_VERIFY_MODE=compact commits inside a graph: leave it at static")
        if worker.page_size != 1:
            raise PluginError(f"page size is {worker.page_size}: start SGLang with --page-size 1")
        self.config = self._checkpoint(args, block)
        self.geometry = self.config.geometry()
        if self.stock:
            return
        self._check_model(worker.draft_model)
        first = worker.draft_model.layers[0].self_attn
        self.rotary = OwnRotary(first.rotary_emb, self.geometry.rope)
        for layer in worker.draft_model.layers:
            if layer.self_attn.rotary_emb is not first.rotary_emb:
                raise PluginError("the draft layers have several rotary embeddings, and SGLang stores keys by one")

    def open_pools(self, *, max_context: int, executors: Mapping[str, Any]) -> None:
        """The drafter's KV pool is there: open the reader and the pool of unrotated keys beside it.

        ``max_context``: most context entries of a request. ``executors``: what of :class:`PagedReader` does not run in
        torch. Raises PluginError for a pool of another layout.
        """
        if self.stock:
            return
        pool = self.worker.draft_model_runner.token_to_kv_pool
        keys = pool.get_key_buffer(0)
        shape = (self.geometry.kv_heads, self.geometry.head_dim)
        if type(pool).__name__ != "MHATokenToKVPool" or tuple(keys.shape[1:]) != shape:
            raise PluginError(
                f"the drafter's KV pool is a {type(pool).__name__} of rows {list(keys.shape[1:])}, needed is an "
                f"MHATokenToKVPool of rows {list(shape)}"
            )
        dtype = next(self.worker.draft_model.parameters()).dtype
        if keys.dtype != dtype:
            raise PluginError(f"the drafter's KV pool holds {keys.dtype}, the drafter computes in {dtype}")

        def reader(method: Any) -> PagedReader:
            return PagedReader(
                method,
                self.geometry,
                max_context=max_context,
                dtype=dtype,
                device=keys.device,
                **executors,
            )

        self.reader = reader(self.method)
        if self.dispatches:
            self.short = reader(make_method("original"))
        if self.reader.needs_raw_keys:
            self.raw = RawKeys(keys, self.reader.raw_layers)
        self._pool = pool

    def open_rounds(self, device: torch.device | str) -> None:
        """Room for the commits of a request's rounds, which stay on the device until they are asked for."""
        self.commits = torch.zeros(MOST_ROUNDS, dtype=torch.int32, device=device)

    def check_backend(self, runner: Any) -> None:
        """The draft runner's attention backend was made. Raises PluginError if it is not the one that was asked for."""
        name, made = str(runner.draft_attention_backend), runner.attn_backend
        if name != BACKEND or (not self.stock and made is not self.backend):
            raise PluginError(
                f"SGLang made the draft attention backend {_path(type(made))} ({name}): start it with "
                f"--speculative-draft-attention-backend {BACKEND}"
            )

    @property
    def dispatches(self) -> bool:
        """Whether the method reads as the original does while the context fits its window, so that a second, cheaper
        graph can serve such contexts."""
        request = RequestGeometry(1, 1, self.geometry.block)
        plans = [self.method.plan(layer, request) for layer in self.geometry.layers]
        return all(_window_and_older(plan, layer) for plan, layer in zip(plans, self.geometry.layers, strict=True))

    @property
    def window(self) -> int:
        """W of a method that dispatches by length."""
        return int(self.setting.options["window"])

    @property
    def in_graph(self) -> bool:
        """Whether the drafter's reads may be captured in a CUDA graph."""
        return self.stock or (self.reader is not None and not self.reader.host_driven)

    # -------------------------------------------------------------------------------------------------- the request

    def prefill(self, batch: Any) -> None:
        """Before a chunk of a prompt is processed: at the first one, a new request begins."""
        req = _only(batch)
        start = int(batch.prefix_lens[0])
        if start == 0:
            limit = int(req.sampling_params.max_new_tokens)
            self._begin(str(req.rid), RequestGeometry(len(req.origin_input_ids), max(1, limit), self.geometry.block))
        elif str(req.rid) != self.rid:
            raise PluginError(
                f"request {req.rid} starts with {start} tokens of another one's cache: start SGLang with "
                "--disable-radix-cache"
            )
        self.length = start + int(batch.extend_lens[0])

    def _begin(self, rid: str, request: RequestGeometry) -> None:
        self.rid, self.request = rid, request
        self.rounds = 0
        if self.reader is None:
            return
        self.reader.begin(request)
        if self.short is not None:
            self.short.begin(request)
        assert self.rotary is not None
        ropes = [self.reader.rope(layer, request) for layer in range(len(self.geometry.layers))]
        if any(rope is not ropes[0] and not torch.equal(rope.inv_freq, ropes[0].inv_freq) for rope in ropes):
            raise PluginError(
                f"{self.method.name} scales some draft layers only, and SGLang stores keys by one embedding"
            )
        self.rotary.set(ropes[0])

    def store(self, model: Any, slots: Tensor) -> None:
        """SGLang has stored the context features that ``model`` remembers as rotated keys and values, in pool rows
        ``slots [n]``: keep their unrotated keys. A row that is not committed is written again before it is read."""
        features, model.fold_bench_features = model.fold_bench_features, None
        if self.raw is not None and features is not None:
            with torch.inference_mode():
                self.raw.store(model, features, slots.reshape(-1))

    def before_round(self, batch: Any) -> None:
        """Before a block is drafted and verified."""
        req = _only(batch)
        if self.request is None or str(req.rid) != self.rid:
            raise PluginError(f"request {req.rid} decodes, but the one that was prefilled last is {self.rid or 'none'}")
        self.wants_attention = False
        if self.reader is not None and self.reader.host_driven:
            self.backend.load_table(batch.req_pool_indices)
            if self.rounds == 0:
                self.reader.committed(self.length, self.pages())
            self.wants_attention = self.reader.wants_target_attention()

    def after_round(self, accepted: Tensor) -> None:
        """After the verification: ``accepted [1]`` tokens were committed, the target's own included."""
        if self.rounds >= MOST_ROUNDS:
            raise PluginError(f"a request of more than {MOST_ROUNDS} rounds")
        self.commits[self.rounds : self.rounds + 1].copy_(accepted[:1])
        self.rounds += 1
        if self.reader is None or not self.reader.host_driven:
            return
        count = int(accepted[0])
        self.length += count
        self.reader.committed(self.length, self.pages())
        if self.wants_attention:
            weights = self.queries.weights(count - 1, self.backend.table, self.length)
            self.reader.target_attention(weights)

    # ------------------------------------------------------------------------------------------------- the read itself

    def pages(self) -> list[PagedLayer]:
        """Where the layers' contexts lie; one entry to a page."""
        return [self.page(layer) for layer in range(len(self.geometry.layers))]

    def page(self, layer: int) -> PagedLayer:
        """Where one layer's context lies."""
        raw = None if self.raw is None else self.raw.rows(layer)
        keys, values = self._pool.get_key_buffer(layer), self._pool.get_value_buffer(layer)
        return PagedLayer(
            keys.unsqueeze(1), None if raw is None else raw.unsqueeze(1), values.unsqueeze(1), self.backend.table
        )

    def read(self, layer: int, q: Tensor, length: Tensor, *, short: bool) -> Tensor:
        """``q [B, Hq, d]`` not rotated, ``length`` int32 ``[1]``: N; ``short``: known to fit the window. Returns ``[B,
        Hq, dv]``."""
        reader = self.short if short and self.short is not None else self.reader
        assert reader is not None
        return reader.read(layer, q, self.page(layer), length)

    # ------------------------------------------------------------------------------------------------------- the proof

    def report(self) -> dict[str, Any]:
        """What really runs, and what was done for the last request: asked for by the engine's parent process."""
        worker = self.worker
        proof: dict[str, Any] = {"method": self.method.name, "options": dict(self.setting.options), "bound": False}
        if worker is None:
            return proof
        runner = worker.draft_model_runner
        proof |= {
            "bound": True,
            "algorithm": self.algorithm,
            "worker": _path(type(worker)),
            "model": _path(type(worker.draft_model)),
            "backend": _path(type(runner.attn_backend)),
            "backend_name": str(getattr(runner, "draft_attention_backend", "")),
            "engine_read": self.stock,
            "in_graph": self.in_graph,
            # Without graphs SGLang puts its eager runner in the same place.
            "draft_graph": type(runner.decode_cuda_graph_runner).__name__ == GRAPH_RUNNER,
            "block": self.geometry.block,
            "splits": chosen(),
            "raw_key_bytes": 0 if self.raw is None else self.raw.nbytes,
            "raw_key_bytes_per_token": 0 if self.raw is None else self.raw.nbytes_per_token,
        }
        if self.commits.is_cuda:
            torch.cuda.synchronize(self.commits.device)  # rounds run on a stream of SGLang's own
        activity: dict[str, Any] = {}
        if self.reader is not None:
            activity = self.reader.activity()
            if self.short is not None:
                short = self.short.activity()
                activity = {key: value + short.get(key, 0) for key, value in activity.items()}
                activity["short_rounds"] = short["rounds"]
        commits = self.commits[: self.rounds].tolist() if self.rounds else []
        return proof | {"request": {"rid": self.rid, "commits": commits, "activity": activity}}

    def _checkpoint(self, args: Any, block: int) -> DrafterConfig:
        path = args.speculative_draft_model_path
        revision = getattr(args, "speculative_draft_model_revision", None)
        try:
            config = read_config(Path(path) if Path(path).is_dir() else path, revision=revision)
        except ValueError as error:
            raise PluginError(f"drafter: {error}") from None
        if config.block != block:
            raise PluginError(f"SGLang drafts {block} positions a round, the drafter's block is {config.block}")
        wanted = {"dflash": DFLASH, "dspark_qwen3": DSPARK}.get(config.family)
        if wanted != self.algorithm:
            served = "is not served by SGLang" if wanted is None else f"runs as {wanted}"
            raise PluginError(f"the drafter is of family {config.family}, which {served}, not as {self.algorithm}")
        scale = float(getattr(self.worker, "_noise_embed_scale", 1.0))
        if config.embed_scale != scale:
            raise PluginError(
                f"the drafter scales its input embeddings by {config.embed_scale}, SGLang's worker by {scale}"
            )
        return config

    def _check_model(self, model: Any) -> None:
        """Compare SGLang's idea of the drafter with its checkpoint: a difference would only show as lost acceptance."""
        if not getattr(model, "fold_bench_reads", False):
            raise PluginError(
                f"SGLang built the drafter as {_path(type(model))}, not by this plugin's model package: is "
                "SGLANG_EXTERNAL_MODEL_PACKAGE set before SGLang starts?"
            )
        drafter = self.geometry
        if len(model.layers) != len(drafter.layers):
            raise PluginError(
                f"SGLang built {len(model.layers)} draft layers, the checkpoint has {len(drafter.layers)}"
            )
        for index, (layer, wanted) in enumerate(zip(model.layers, drafter.layers, strict=True)):
            attention = layer.self_attn
            window = attention.sliding_window_size
            found = (
                attention.num_heads,
                attention.num_kv_heads,
                attention.head_dim,
                round(float(attention.scaling), 9),
                None if window is None or window < 0 else window + 1,
                attention.attn_type.value == "decoder",
            )
            expected = (
                drafter.q_heads,
                drafter.kv_heads,
                drafter.head_dim,
                round(drafter.scale, 9),
                wanted.native_window,
                wanted.block_causal,
            )
            if found != expected:
                raise PluginError(
                    f"draft layer {index} is (heads, kv heads, dim, scale, window, causal) {found} in SGLang, "
                    f"{expected} in its checkpoint"
                )


def _window_and_older(plan: ReadPlan, layer: LayerGeometry) -> bool:
    """FOLD's shape on a full-attention layer: with nothing beyond the window it is the plain read."""
    match [(branch.entries, branch.placement) for branch in plan.branches]:
        case [(Recent(), TrueDistance()), (Older(), SharedDistance())]:
            return plan.rope is None and plan.query_scale is None and layer.native_window is None
    return False


def _only(batch: Any) -> Any:
    if len(batch.reqs) != 1:
        raise PluginError(f"{len(batch.reqs)} requests at once: start SGLang with --max-running-requests 1")
    return batch.reqs[0]


def _path(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


__all__ = ["DFLASH", "DSPARK", "DraftSession", "DrafterGeometry", "PluginError", "current", "open_session"]
