"""The process of one arm: vLLM with its engine core inside, commanded over a socket by ``engine.py``.

``open`` loads the models and says what really runs, ``decode`` and ``gaps`` answer a request.
"""

from __future__ import annotations

import dataclasses
import enum
import os
import re
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.engines.child import serve

if TYPE_CHECKING:
    from vllm import LLM
    from vllm.config import VllmConfig

    from harness.engines.vllm.scheduler import Rounds

# Prompt tokens a step while an output is judged: the judge needs the logits of every row of a step, which for a
# vocabulary of 248,000 and steps of 8,192 would be 8 GB in float32 beside a full KV cache.
JUDGE_CHUNK = 1024

# Resolved settings that two arms need not share. What follows from drafting 1 + K tokens a round, or holds the
# speculation block itself:
_SPECULATION = (
    "speculative_config",
    "additional_config",
    "compilation_config.cudagraph_capture_sizes",  # batches of one row, or of 1 + K
    "compilation_config.max_cudagraph_capture_size",
    "compilation_config.compile_ranges_endpoints",
    "cache_config.num_gpu_blocks",  # a drafter and its graphs leave less memory
    "cache_config.num_cpu_blocks",
    "cache_config.kv_cache_size_tokens",
    "cache_config.kv_cache_max_concurrency",
)
# Identities and bookkeeping of one process:
_IDENTITY = (
    "instance_id",
    "compilation_config.cache_dir",
    "compilation_config.local_cache_dir",
    "compilation_config.static_forward_context",
    "compilation_config.static_all_moe_layers",
    "compilation_config.traced_files",
    "compilation_config.enabled_custom_ops",
    "compilation_config.disabled_custom_ops",
    "compilation_config.compilation_time",
    "compilation_config.encoder_compilation_time",
    "model_config.hf_config",  # the target's folder, the same for all arms
    "model_config.hf_text_config",
    "model_config.hf_image_processor_config",
    "model_config.model_arch_config",
    "load_config.model_loader_extra_config",
    "parallel_config.data_parallel_master_port",
    "parallel_config.placement_group",
)


def resolved_settings(config: VllmConfig) -> dict[str, Any]:
    """Every value of vLLM's resolved configuration outside speculation, by dotted name, as JSON values."""
    return dict(_walk(config, ""))


def _walk(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    if name in _SPECULATION or name in _IDENTITY:
        return
    if dataclasses.is_dataclass(value):
        for entry in dataclasses.fields(value):
            if not entry.name.startswith("_"):
                inner = f"{name}.{entry.name}" if name else entry.name
                yield from _walk(getattr(value, entry.name, None), inner)
    elif value is not None:
        yield name, _json(value)


def _json(value: Any) -> Any:
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {str(key): _json(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        items = [_json(item) for item in value]
        return sorted(items, key=str) if isinstance(value, set | frozenset) else items
    if isinstance(value, type) or callable(value):
        return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', type(value).__qualname__)}"
    return str(value)


def _attention_backends(config: VllmConfig) -> list[str]:
    """Names of the backends that the target's attention layers use; a drafter's layers are numbered after them."""
    layers = config.model_config.get_total_num_hidden_layers()
    found = set()
    for name, layer in config.compilation_config.static_forward_context.items():
        number = re.search(r"\.(\d+)\.", name)
        if number and int(number.group(1)) < layers and hasattr(layer, "get_attn_backend"):
            found.add(layer.get_attn_backend().get_name())
    return sorted(found)


def engine_arguments(spec: dict[str, Any], *, dtype: str, cpu: bool) -> dict[str, Any]:
    """What ``LLM`` gets in every arm."""
    scheduler = "RecordedScheduler" if cpu else "RecordedAsyncScheduler"
    return {
        "model": spec["target"],
        "skip_tokenizer_init": True,
        "language_model_only": True,
        "generation_config": "vllm",
        "dtype": dtype,
        "seed": 0,
        "max_model_len": spec["context"],
        "max_num_seqs": 1,
        # The scheduler keeps slots for a drafter's queries free in each step, in that arm only, which would read
        # prompts in smaller chunks than the other (v1/core/sched/scheduler.py:496-567).
        "max_num_scheduled_tokens": spec["prefill_chunk"],
        "max_num_batched_tokens": spec["prefill_chunk"] + spec["proposals"],
        "enable_chunked_prefill": True,
        "enable_prefix_caching": False,
        # Asynchronous scheduling with a drafter switches it off by itself, in that arm only.
        "disable_cascade_attn": True,
        "enforce_eager": cpu or not spec["graphs"],
        "disable_log_stats": False,
        "scheduler_cls": f"harness.engines.vllm.scheduler.{scheduler}",
        "kv_cache_memory_bytes": spec["kv_cache_bytes"],
        "gpu_memory_utilization": spec["gpu_memory"],
    }


def effective_prefill_chunk(config: VllmConfig) -> int:
    """Most prompt tokens of a step, as vLLM's scheduler computes it for one request."""
    limits, drafter = config.scheduler_config, config.speculative_config
    slots = 0 if drafter is None else drafter.max_num_new_slots_for_drafting
    scheduled = limits.max_num_scheduled_tokens or limits.max_num_batched_tokens
    return int(min(scheduled, limits.max_num_batched_tokens - slots))


def speculation(spec: dict[str, Any], arguments: Mapping[str, Any], *, cpu: bool) -> dict[str, Any]:
    """What a method's arm gets besides. Fixes the runner of this process to the autoregressive arm's, which a drafter
    would otherwise choose for its own arm."""
    from vllm.engine.arg_utils import EngineArgs

    from harness.engines.vllm.drafter_copy import copy_drafter, speculative_config

    runner_v2 = not cpu and EngineArgs(**arguments).create_engine_config().use_v2_model_runner
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = str(int(runner_v2))
    folder = Path(tempfile.mkdtemp(prefix="drafter-"))
    copy_drafter(Path(spec["drafter"]), folder, context=spec["context"], runner_v2=runner_v2)
    more: dict[str, Any] = {"speculative_config": speculative_config(folder, runner_v2=runner_v2)}
    if spec["additional_config"] is not None:
        more["additional_config"] = spec["additional_config"]
    return more


class Worker:
    """One loaded arm. ``spec``: what ``VllmEngine`` sends to ``open``."""

    def __init__(self, spec: dict[str, Any]) -> None:
        import torch
        import vllm
        from vllm.platforms import current_platform

        from harness.engines.device import device_uuid, pick_dtype

        if not current_platform.device_type:
            raise ValueError(
                "the vLLM installed here is built for a GPU and finds none; make vllm-env installs its build for a CPU"
            )
        from vllm import LLM  # not before: its modules ask for the device while they load

        device = torch.device(current_platform.device_type)
        if spec["device"] not in ("auto", device.type):
            raise ValueError(f"engine.device={spec['device']}, but the vLLM installed here is built for {device.type}")
        if spec["threads"] is not None and device.type == "cpu":
            torch.set_num_threads(spec["threads"])
        self.method: str | None = spec["method"]
        self.plugged: bool = spec["additional_config"] is not None
        if spec["plugin"]:  # in the autoregressive arm too: it should not run for hours before the first method fails
            _require_plugin()
        cpu = device.type == "cpu"
        dtype = str(pick_dtype(spec["dtype"], device)).removeprefix("torch.")
        arguments = engine_arguments(spec, dtype=dtype, cpu=cpu)
        if spec["drafter"] is not None:
            arguments |= speculation(spec, arguments, cpu=cpu)
        self.llm: LLM = LLM(**arguments)
        core = self.llm.llm_engine.engine_core.engine_core
        self.scheduler = core.scheduler
        config = self.llm.llm_engine.vllm_config
        self.info = {
            "name": "vllm",
            "version": vllm.__version__,
            "device": str(device),
            "device_uuid": device_uuid(device),
            "dtype": dtype,
            "settings": resolved_settings(config)
            | {
                "model_runner": "V2" if config.use_v2_model_runner else "V1",
                "effective_prefill_chunk": effective_prefill_chunk(config),
                "attention_backends": _attention_backends(config),
                "threads": torch.get_num_threads() if cpu else None,
            },
            "drafter": self._drafter(config),
        }

    def _drafter(self, config: VllmConfig) -> dict[str, Any]:
        block = config.speculative_config
        if block is None:
            return {}
        found = {
            "proposals": block.num_speculative_tokens,
            "speculative_method": block.method,
            "architectures": list(block.draft_model_config.architectures),
            "max_model_len": block.draft_model_config.max_model_len,
        }
        if not self.plugged:
            return found
        report = self._report()
        return found | {key: report[key] for key in ("method", "plan", "side_cache_bytes_per_token") if key in report}

    def decode(self, prompt_ids: list[int], max_new_tokens: int, stop_ids: list[int]) -> dict[str, Any]:
        """Decode one request greedily; the fields of ``Generation``."""
        from vllm import SamplingParams

        from harness.engines.vllm import scheduler

        scheduler.begin()
        params = SamplingParams(
            temperature=0, max_tokens=max_new_tokens, stop_token_ids=stop_ids, ignore_eos=True, detokenize=False
        )
        output = self.llm.generate([{"prompt_token_ids": prompt_ids}], params, use_tqdm=False)[0]
        answer, seen, stats = output.outputs[0], scheduler.rounds(), output.metrics
        ids = list(answer.token_ids)
        if ids != seen.delivered:
            raise RuntimeError(f"vLLM returned {len(ids)} tokens, its scheduler delivered {len(seen.delivered)} others")
        if stats is None or not stats.first_token_ts:
            raise RuntimeError("vLLM returned no times of the engine core")
        method = self.method is not None
        proposals = seen.proposals if method else []
        if not method and any(seen.proposals):
            raise RuntimeError("vLLM drafted tokens in an autoregressive arm")
        return {
            "output_ids": ids,
            "finish": answer.finish_reason,
            "n_first": seen.n_first,
            "commits": seen.commits,
            "overrun": seen.overrun,
            "proposals": proposals,
            "skipped_rounds": proposals.count(0),
            "prefill_s": stats.first_token_ts - stats.scheduled_ts,
            "first_token_s": stats.first_token_ts,
            "last_token_s": stats.last_token_ts,
            "cached_tokens": output.num_cached_tokens or 0,
            "activity": self._activity(seen),
        }

    def gaps(self, prompt_ids: list[int], output_ids: list[int]) -> list[float]:
        """For each output token, the largest log-probability at its place minus its own (= the gap in logits)."""
        from vllm import SamplingParams

        from harness.engines.vllm import scheduler

        scheduler.begin()
        params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1, ignore_eos=True, detokenize=False)
        config = self.scheduler.scheduler_config
        before, config.long_prefill_token_threshold = config.long_prefill_token_threshold, JUDGE_CHUNK
        try:
            ids = [*prompt_ids, *output_ids]
            output = self.llm.generate([{"prompt_token_ids": ids}], params, use_tqdm=False)[0]
        finally:
            config.long_prefill_token_threshold = before
        rows = output.prompt_logprobs
        if rows is None or len(rows) != len(ids):
            raise RuntimeError(f"vLLM judged {len(rows or [])} of {len(ids)} tokens")
        places = range(len(prompt_ids), len(ids))
        return [
            max(entry.logprob for entry in rows[place].values()) - rows[place][ids[place]].logprob for place in places
        ]

    def _activity(self, seen: Rounds) -> dict[str, Any]:
        """Proof of what was active in a request. An arm without our plugin has only its name to give."""
        if self.method is None or not self.plugged:
            return {"method": self.method} if self.method else {}
        report = self._report()
        if report.pop("request", None) != seen.request_id:
            raise RuntimeError("vLLM's plugin did not see this request")
        # Under asynchronous scheduling vLLM verifies placeholders where it has run no drafter, and nobody can tell them
        # from drafts afterwards.
        drafted = len(seen.proposals) - seen.proposals.count(0)
        if report["rounds"] < drafted:
            raise RuntimeError(f"the drafter ran {report['rounds']} times for {drafted} rounds")
        return report

    def _report(self) -> dict[str, Any]:
        from harness.engines.vllm import activity

        report = activity.report()
        if not report or report.get("method") != self.method:
            found = (report or {}).get("method") or "nothing"
            raise RuntimeError(f"vLLM's plugin says that {found} is active, not {self.method}")
        return report


def _require_plugin() -> None:
    """vLLM logs a plugin that fails to load and goes on without it; stop here instead, with the reason."""
    from importlib.metadata import entry_points

    found = [entry for entry in entry_points(group="vllm.general_plugins") if entry.name == "fold_bench"]
    if not found:
        raise RuntimeError(
            "the plugin fold_bench is not installed in this environment: run pip install --no-deps -e . with it"
        )
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and "fold_bench" not in allowed.split(","):
        raise RuntimeError(f"VLLM_PLUGINS={allowed} keeps the plugin fold_bench from loading; add it or unset that")
    try:
        found[0].load()
    except Exception as error:
        raise RuntimeError(f"the plugin fold_bench does not load: {type(error).__name__}: {error}") from None


if __name__ == "__main__":
    serve(Worker, "vllm")
