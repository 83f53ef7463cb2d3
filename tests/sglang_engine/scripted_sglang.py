"""SGLang's answers without SGLang: chunks of a stream, and an offline engine that gives them."""

from __future__ import annotations

import sys
from itertools import chain
from typing import Any

# What a Python process runs first that is to import this engine in place of SGLang.
SITE = """
import sys, types
import torch
torch.cuda.is_available = lambda: True
import harness.engines.device as device
device.device_uuid = lambda found: "GPU-scripted"
device.pick_dtype = lambda name, found: torch.bfloat16
from scripted_sglang import Scripted, Broken
sys.modules["sglang"] = types.SimpleNamespace(Engine={engine})
"""


def sglang_run(
    commits: list[int], *, limit: int = 1000, stop: int | None = None, extra: int = 0, merged: int = 0
) -> tuple[list[tuple[float, dict[str, Any]]], dict[str, Any], list[int]]:
    """Chunks and report as SGLang and the plugin give them for rounds that commit so much, and the output: a chunk per
    round, cut at the stop token (at index ``stop``) or the limit; ``extra`` rounds after the end; the first ``merged +
    1`` chunks in one.
    """
    ids = list(range(100, 101 + sum(commits)))
    end = min(limit, len(ids) if stop is None else stop + 1)
    parts, at = [ids[:1]], 1
    for count in commits:
        if at < end:
            parts.append(ids[at : min(at + count, end)])
        at += count
    rounds = len(parts) - 1
    if merged:
        parts = [[*chain(*parts[: merged + 1])], *parts[merged + 1 :]]
    reason = {"type": "stop", "matched": ids[end - 1]} if stop is not None and stop < limit else {"type": "length"}
    meta = {
        "finish_reason": reason,
        "cached_tokens": 0,
        "spec_accept_length": end / max(rounds, 1),
    }
    if rounds:
        meta |= {"spec_verify_ct": rounds, "spec_num_correct_drafts": sum(commits[:rounds]) - rounds}
    chunks = [(float(i), {"output_ids": part, "meta_info": {}}) for i, part in enumerate(parts, 1)]
    chunks[-1][1]["meta_info"] = meta
    counted = commits[:rounds] + [3] * extra
    request = {"rid": "r", "commits": counted, "activity": {"rounds": rounds + extra}}
    return chunks, {"request": request, "draft_graph": True, "engine_read": False, "raw_key_bytes": 7}, ids[:end]


class Scripted:
    """An ``sgl.Engine`` of one process that answers as SGLang does, without a GPU."""

    def __init__(self, **arguments: Any) -> None:
        self.arguments, self.rid = arguments, ""

    def generate(self, **call: Any) -> Any:
        if call.get("stream"):
            self.rid, limit = call["rid"], call["sampling_params"]["max_new_tokens"]
            return iter(chunk for _, chunk in sglang_run([2, 3, 5], limit=limit)[0])
        prompt = call["logprob_start_len"]
        own = [(None, 0, None), *[(-2.0, token, None) for token in call["input_ids"][prompt + 1 :]]]
        return {"meta_info": {"input_token_logprobs": own, "input_top_logprobs": [[(-1.5, 3, None)]] * len(own)}}

    def get_server_info(self) -> dict[str, Any]:
        from harness.engines.sglang.setting import read_setting

        state = {**self.arguments, "memory_usage": {"token_capacity": 100}}
        if (setting := read_setting()) is not None:
            rounds = {"rid": self.rid, "commits": [2, 3, 5], "activity": {"rounds": 3}}
            state["fold_bench"] = {
                "method": setting.method, "options": setting.options, "bound": True, "algorithm": "DFLASH",
                "worker": "harness.engines.sglang.workers.DFlashWorker", "in_graph": True, "draft_graph": True,
                "model": "harness.engines.sglang.models.drafters.DFlashDraftModel", "raw_key_bytes": 0,
                "backend": "harness.engines.sglang.attention.MethodBackend", "engine_read": False, "request": rounds,
            }  # fmt: skip
        return {"internal_states": [state]}


class Broken(Scripted):
    def __init__(self, **arguments: Any) -> None:
        print(
            "Traceback (most recent call last):\nharness.engines.sglang.session.PluginError: page size is 16: start",
            file=sys.stderr,
        )
        raise RuntimeError("Initialization failed. Please see the error messages above.")
