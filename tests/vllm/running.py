"""A real engine in this process, the method switched in place, drafts replaced by partly right ones."""

from __future__ import annotations

import os
import random
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch

from harness.engines.vllm import activity, attention
from harness.engines.vllm.plugin import Settings
from harness.engines.vllm.target import TargetAttention
from methods.cmr import CMR
from methods.reading import Method
from tests.vllm.pairs import VOCAB, Pair
from tests.vllm.replay import States

# The engine core in this process, so that tests see inside; no look at the Hub, no threads bound to cores.
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",
}


@dataclass
class Run:
    """One request: its output, what the plugin reported, and the drafts of its rounds."""

    output: list[int]
    report: dict[str, Any]
    cached: int = 0  # prompt tokens that vLLM had from an earlier request

    @property
    def drafts(self) -> list[dict[str, Any]]:
        return self.report["drafts"]


class Running:
    """vLLM with the pair, opened with a method that keeps all unrotated keys so that any method can follow.

    chunk: prompt tokens a step. context: ``max_model_len``. ``states``: of the latest request, as its drafter got them
    (V1 runner).
    """

    def __init__(self, pair: Pair, method: str, options: dict[str, Any], *, context: int, chunk: int, **more: Any):
        arguments = {
            "skip_tokenizer_init": True,
            "enforce_eager": True,
            "max_model_len": context,
            "max_num_seqs": 1,
            "max_num_batched_tokens": chunk,
            "enable_prefix_caching": False,
            "block_size": 32,
            "seed": 0,
            "kv_cache_memory_bytes": 96 << 20,
            "additional_config": {"fold_bench": {"method": method, "options": options, "trace": True}},
        }
        environment = ENVIRONMENT | {"VLLM_USE_V2_MODEL_RUNNER": str(int(pair.runner_v2))}
        with mock.patch.dict(os.environ, environment):
            from vllm import LLM

            self.llm = LLM(**pair.engine_arguments() | arguments | more)
        self.pair = pair
        core = self.llm.llm_engine.engine_core.engine_core
        self.runner = core.model_executor.driver_worker.worker.model_runner
        self.drafter = self.runner.speculator if pair.runner_v2 else self.runner.drafter

    @property
    def reads(self) -> Any:
        return self.drafter.model.reads

    def use(self, method: Method, kernels: str | None = None) -> None:
        """From the next request on, read by another method. The side cache stays as the engine allocated it."""
        from vllm.config import CUDAGraphMode, set_current_vllm_config

        old, model, config = self.reads, self.drafter.model, self.runner.vllm_config
        new = attention.DrafterReads(Settings(method, True, kernels), old.config, config, torch.device("cpu"))
        new.stock = False  # the pages are laid out for the reader
        new.attentions, new.sides = old.attentions, old.sides
        for layer in new.attentions:
            layer.impl.reads = new
        with set_current_vllm_config(config):
            attention.give_rotaries(new, [layer.self_attn for layer in model.model.layers])
        model.reads = new
        attention.open_activity(new, type(model).__name__, trace=True)
        if self.pair.runner_v2:
            self.drafter.reads = new
            self.drafter.init_cudagraph_manager(CUDAGraphMode.NONE)
        if isinstance(method, CMR) and self.drafter._attention is None:
            names = {layer.layer_name for layer in [*new.attentions, *new.sides]}
            self.drafter._attention = TargetAttention(config, names, new.block + 1, torch.device("cpu"))

    def generate(self, prompt: list[int], limit: int, guide: Guide | None = None) -> Run:
        """Decode greedily. With a ``guide`` its drafts are verified instead of the drafter's own, which are traced all
        the same."""
        from vllm import SamplingParams

        own = self.drafter.propose
        features: dict[int, torch.Tensor] = {}
        weights: dict[int, torch.Tensor] = {}

        def watched(*arguments: Any, **named: Any) -> torch.Tensor:
            before = self._traced()
            if not self.pair.runner_v2:
                rows = named["target_positions"], named["target_hidden_states"]
                for position, row in zip(*rows, strict=True):
                    features[int(position)] = row.clone()
            drafts = own(*arguments, **named)
            if self._traced() in (before, (self._traced()[0], 0)):  # a piece of the prompt
                return drafts
            context = activity.report()["drafts"][-1]["context"]
            if not self.pair.runner_v2 and self.drafter._weights is not None:
                weights[context] = self.drafter._weights
            return drafts if guide is None else guide(drafts, context)

        self.drafter.propose = watched
        self.states = States(
            lambda start, end: torch.stack([features[i] for i in range(start, end)]), lambda length: weights[length]
        )
        try:
            parameters = SamplingParams(temperature=0, max_tokens=limit, ignore_eos=True, detokenize=False)
            done = self.llm.generate([{"prompt_token_ids": prompt}], parameters, use_tqdm=False)[0]
        finally:
            self.drafter.propose = own
        return Run(list(done.outputs[0].token_ids), activity.report(), done.num_cached_tokens or 0)

    def _traced(self) -> tuple[str, int]:
        """The running request, and how many of its rounds were traced."""
        report = activity.report()
        return report.get("request", ""), len(report.get("drafts", []))

    def close(self) -> None:
        activity.closed()
        self.llm.llm_engine.engine_core.shutdown()
        del self.llm, self.runner, self.drafter


class Guide:
    """Drafts that are right up to a slot, and wrong there: every slot from 0 to K once before any comes again."""

    def __init__(self, sequence: list[int], seed: int):
        """``sequence``: prompt and the continuation the target will take."""
        self.sequence, self.random = sequence, random.Random(seed)
        self.left: list[int] = []

    def __call__(self, drafts: torch.Tensor, context: int) -> torch.Tensor:
        count = drafts.shape[1]
        right = self.sequence[context + 1 : context + 1 + count]
        right += [0] * (count - len(right))
        if not self.left:
            self.left = self.random.sample(range(count + 1), count + 1)
        keep = self.left.pop()
        wrong = [(token + 1) % VOCAB for token in right[keep:]]
        return torch.tensor([right[:keep] + wrong], dtype=drafts.dtype)


def prompt(length: int, seed: int) -> list[int]:
    """Random tokens that are no special ones."""
    draw = random.Random(seed)
    return [draw.randrange(3, VOCAB - 1) for _ in range(length)]
