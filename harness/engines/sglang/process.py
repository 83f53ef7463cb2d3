"""The process of one arm: SGLang's offline engine, commanded by ``engine.py``.

``open`` starts SGLang and says what really runs, ``decode`` and ``gaps`` answer a request. The proof that a method is
active comes from SGLang's scheduler process, where the plugin adds its report to what the scheduler says of itself.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Mapping
from importlib import metadata
from typing import Any

from harness.engines.child import serve
from harness.engines.sglang.plugin import REPORT
from harness.engines.sglang.setting import MODEL_PACKAGE, PLUGIN, PLUGIN_GROUP, check_version

# What a scheduler says of itself that two arms need not share: measurements and identities of one process.
APART = ("memory_usage", "startup_time", "last_gen_throughput", "avg_spec_accept_length", "step_time_dict",
         "dspark_info_record", "port", "nccl_port", "dist_init_addr", "grpc_port", REPORT)  # fmt: skip


class Arm:
    """One loaded arm. ``spec``: what ``SglangEngine`` sends to ``open``."""

    def __init__(self, spec: dict[str, Any]) -> None:
        import sglang
        import torch

        from harness.engines.device import device_uuid, pick_device, pick_dtype

        version = check_version()
        require_plugin()  # in the autoregressive arm too: it should not run for hours before the first method fails
        device = pick_device("cuda")
        dtype = str(pick_dtype(spec["dtype"], device)).removeprefix("torch.")
        self.method: str | None = spec["method"]
        self.options: dict[str, Any] = spec["options"]
        self.proposals: int = spec["proposals"]
        self.count = 0
        self.engine = sglang.Engine(**spec["server"], dtype=dtype)
        state = self._state()
        check_capacity(state, spec["server"]["context_length"])
        report = check_report(state, self.method, self.options, graphs=spec["graphs"])
        drafter = {"proposals": self.proposals} if self.method else {}
        proof = (
            "algorithm",
            "worker",
            "model",
            "backend",
            "engine_read",
            "draft_graph",
            "raw_key_bytes_per_token",
            "splits",
        )
        self.info = {
            "name": "sglang",
            "version": version,
            "device": str(device),
            "device_uuid": device_uuid(device),
            "dtype": dtype,
            "settings": shared_settings(state) | {"torch": torch.__version__},
            "drafter": drafter | {key: report[key] for key in proof if key in report},
        }

    def decode(self, prompt_ids: list[int], max_new_tokens: int, stop_ids: list[int]) -> dict[str, Any]:
        """Decode one request greedily; the fields of ``Generation``."""
        self.count += 1
        rid = f"fold-bench-{self.count}"
        params = {
            "temperature": 0,
            "max_new_tokens": max_new_tokens,
            "stop_token_ids": stop_ids,
            "ignore_eos": not stop_ids,
        }
        started = time.perf_counter()
        chunks = timed(self.engine.generate(input_ids=prompt_ids, sampling_params=params, stream=True, rid=rid))
        report = self._state().get(REPORT, {}) if self.method else {}
        return generation(chunks, started, stop_ids, report, rid, self.method, self.proposals)

    def gaps(self, prompt_ids: list[int], output_ids: list[int]) -> list[float]:
        """For each output token, the largest log-probability at its place minus its own (= the gap in logits)."""
        answer = self.engine.generate(
            input_ids=[*prompt_ids, *output_ids],
            sampling_params={"temperature": 0, "max_new_tokens": 1, "ignore_eos": True},
            return_logprob=True,
            logprob_start_len=len(prompt_ids) - 1,
            top_logprobs_num=1,
        )
        return gaps_of(answer["meta_info"], output_ids)

    def _state(self) -> dict[str, Any]:
        (state,) = self.engine.get_server_info()["internal_states"]
        return dict(state)


def require_plugin() -> None:
    """Raise RuntimeError unless SGLang will find the plugin and can load it: it would log that and go on without."""
    found = [entry for entry in metadata.entry_points(group=PLUGIN_GROUP) if entry.name == PLUGIN]
    if not found:
        raise RuntimeError(
            f"the plugin {PLUGIN} is not installed in this environment: run pip install --no-deps -e . with it"
        )
    try:
        found[0].load()
    except Exception as error:
        raise RuntimeError(f"the plugin {PLUGIN} does not load: {type(error).__name__}: {error}") from None


def timed(stream: Iterable[Mapping[str, Any]]) -> list[tuple[float, Mapping[str, Any]]]:
    """The chunks of a stream with the time at which each arrived."""
    return [(time.perf_counter(), chunk) for chunk in stream]


def shared_settings(state: Mapping[str, Any]) -> dict[str, Any]:
    """What a scheduler resolved its settings to outside of speculation, as JSON values."""
    kept = {key: value for key, value in state.items() if not key.startswith("speculative_") and key not in APART}
    return dict(json.loads(json.dumps(kept, sort_keys=True, default=str)))


def check_capacity(state: Mapping[str, Any], context: int) -> None:
    """Raise RuntimeError unless the KV cache holds a request of the whole context: SGLang makes a smaller one, with a
    warning, where memory is short."""
    capacity = int((state.get("memory_usage") or {}).get("token_capacity") or 0)
    if capacity < context:
        raise RuntimeError(
            f"the GPU's memory leaves a KV cache of {capacity} tokens for the {context} served: raise "
            "engine.gpu_memory or lower target.max_context"
        )


def check_report(
    state: Mapping[str, Any], method: str | None, options: Mapping[str, Any], *, graphs: bool
) -> dict[str, Any]:
    """The plugin's report from the scheduler. Raises RuntimeError unless it proves that the method is what runs (for an
    autoregressive arm: that nothing does)."""
    report = state.get(REPORT)
    algorithm = state.get("speculative_algorithm")
    if method is None:
        if report is not None or algorithm:
            raise RuntimeError(f"SGLang runs {algorithm or 'a method'} in the autoregressive arm")
        return {}
    if report is None:
        raise RuntimeError(
            "the plugin fold_bench is not active in SGLang's scheduler: is fold-bench installed in its environment?"
        )
    if report["method"] != method or report["options"] != dict(options):
        raise RuntimeError(f"SGLang's plugin says that {report['method']} is active, not {method} as asked for")
    if not report["bound"]:
        raise RuntimeError("SGLang's draft worker is not the plugin's: its hook did not apply")
    ours = "harness.engines.sglang."
    stands = report["worker"].startswith(ours) and report["model"].startswith(MODEL_PACKAGE)
    if not stands or report["backend"].startswith(ours) == report["engine_read"]:
        raise RuntimeError(
            f"SGLang runs worker {report['worker']}, drafter {report['model']} and draft attention "
            f"{report['backend']}, which is not {method} by the plugin"
        )
    if report["draft_graph"] != (graphs and report["in_graph"]):
        raise RuntimeError(
            f"the drafter runs {'in' if report['draft_graph'] else 'without'} a CUDA graph, expected otherwise; "
            "SGLang's log says why"
        )
    return dict(report)


def generation(
    chunks: list[tuple[float, Mapping[str, Any]]],
    started: float,
    stop_ids: list[int],
    report: Mapping[str, Any],
    rid: str,
    method: str | None,
    proposals: int,
) -> dict[str, Any]:
    """The fields of ``Generation`` from a stream's chunks and the plugin's report. Raises RuntimeError where SGLang's
    own counts contradict them.

    The tokens committed per round come from the worker (``accept_lens`` of each verification). SGLang's
    ``spec_accept_length`` counts the token of prefill and is cut at the end of the output, so it is not used; its
    counts of rounds and accepted drafts are compared.
    """
    times = [(at, list(chunk["output_ids"])) for at, chunk in chunks if chunk.get("output_ids")]
    if not times:
        raise RuntimeError(f"SGLang returned no tokens ({_finish_text(chunks)})")
    meta = chunks[-1][1]["meta_info"]
    ids = [token for _, part in times for token in part]
    reason = meta.get("finish_reason") or {}
    if reason.get("type") not in ("stop", "length"):
        raise RuntimeError(f"SGLang ended the request with {_finish_text(chunks)}")
    if reason["type"] == "stop" and ids[-1] not in stop_ids:
        raise RuntimeError(
            f"SGLang stopped at its model's own end token {ids[-1]}, which is not among the request's stop ids"
        )
    n_first, commits, overrun = len(times[0][1]), [1] * (len(ids) - len(times[0][1])), 0
    activity: dict[str, Any] = {}
    if method is None:
        if meta.get("spec_verify_ct"):
            raise RuntimeError("SGLang drafted tokens in the autoregressive arm")
    else:
        n_first, commits, overrun = _rounds(meta, report, rid, len(ids), n_first)
        activity = {
            "method": method,
            **report["request"]["activity"],
            **{key: report[key] for key in ("draft_graph", "engine_read", "raw_key_bytes")},
        }
    return {
        "output_ids": ids,
        "finish": reason["type"],
        "n_first": n_first,
        "commits": commits,
        "overrun": overrun,
        "proposals": [proposals] * len(commits) if method else [],
        "skipped_rounds": 0,
        "prefill_s": times[0][0] - started,
        "first_token_s": times[0][0],
        "last_token_s": times[-1][0],
        "cached_tokens": meta.get("cached_tokens") or 0,
        "activity": activity,
    }


def _rounds(
    meta: Mapping[str, Any], report: Mapping[str, Any], rid: str, tokens: int, first: int
) -> tuple[int, list[int], int]:
    """``n_first``, commits and overrun of a request. A first chunk that holds rounds beside the token of prefill stands
    for all of them, because they have one time."""
    request = report.get("request", {})
    if request.get("rid") != rid:
        raise RuntimeError(f"SGLang's plugin saw request {request.get('rid')!r}, not {rid!r}")
    verified = int(meta.get("spec_verify_ct") or 0)
    # With overlapping schedules one more round runs before the request's end is seen.
    commits = [int(count) for count in request["commits"][:verified]]
    if len(commits) != verified or sum(commits) - verified != int(meta.get("spec_num_correct_drafts") or 0):
        raise RuntimeError(
            f"the worker committed {sum(commits)} tokens in {len(commits)} rounds, SGLang counts "
            f"{meta.get('spec_num_correct_drafts')} accepted drafts in {verified}"
        )
    overrun = 1 + sum(commits) - tokens
    if overrun < 0 or (overrun and commits[-1] <= overrun):
        raise RuntimeError(f"{verified} rounds committed {sum(commits)} tokens, but {tokens} were delivered")
    if overrun:
        commits[-1] -= overrun
    rest = first - 1
    while rest > 0 and commits:
        rest -= commits.pop(0)
    if rest:
        raise RuntimeError("SGLang's first chunk ends within a round")
    return first, commits, overrun


def gaps_of(meta: Mapping[str, Any], output_ids: list[int]) -> list[float]:
    """Gaps from the log-probabilities of a prompt's last token (which has none) and the output after it. Raises
    RuntimeError unless they are of these tokens."""
    own, best = meta.get("input_token_logprobs") or [], meta.get("input_top_logprobs") or []
    if len(own) != len(output_ids) + 1 or len(best) != len(own):
        raise RuntimeError(f"SGLang judged {max(0, len(own) - 1)} of {len(output_ids)} tokens")
    if [entry[1] for entry in own[1:]] != list(output_ids):
        raise RuntimeError("SGLang judged other tokens than it was given")
    return [max(0.0, top[0][0] - entry[0]) for entry, top in zip(own[1:], best[1:], strict=True)]


def _finish_text(chunks: list[tuple[float, Mapping[str, Any]]]) -> str:
    reason = chunks[-1][1].get("meta_info", {}).get("finish_reason") if chunks else None
    return " ".join(str((reason or {}).get("message") or reason or "no reason").split())[:300]


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    serve(Arm, "sglang")
