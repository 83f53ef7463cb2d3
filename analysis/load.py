"""Run directories -> one tidy table of paired requests, the only thing that statistics, tables and figures read.

A run directory holds ``records*.jsonl`` (one line per request and arm), ``run.json`` and ``agreement*.jsonl``
(design.md sections 4 and 5). Three decisions are taken here and nowhere else: which record of a request counts (the
last good attempt), which autoregressive record it is paired with (same run, same request, same device), and which
requests are left out. A request that failed, is missing or cannot be timed in one arm is left out of every arm of its
cell, so that all numbers of a cell describe the same requests (paper, Appendix B.2: the one Gemma RepoBench request
without TPOT "is excluded for all methods").
"""

from __future__ import annotations

import json
import math
import multiprocessing
import os
from array import array
from bisect import bisect
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from harness.guards import LOOP, repetition
from harness.records import AR, AR_AGAIN, RANDOM_WEIGHTS, Record, RecordError, read_lines, read_records, tau, tpot

# A cell is what a table prints: one task (at one length level) of one pair in one engine.
CELL = ["pair", "engine", "benchmark", "task", "level"]
REQUEST = [*CELL, "request"]
# Below this, starting processes costs more than they save.
PARALLEL_BYTES = 64 << 20
# Length buckets of LBv2 in Table 11, continued downwards; inputs of a level that the request file names keep that name.
BUCKETS = [0, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072]


class LoadError(ValueError):
    """The records cannot be used as given. The message is one line: where, what, what to do."""


@dataclass
class Runs:
    """All records of one or more run directories.

    used: one row per counted request and arm, autoregressive arm included. Columns: the five of CELL, request, arm,
        method, config (JSON text of the method's settings), run, device, order, prompt_tokens, n_out, finish,
        miscounted (more or fewer tokens committed than delivered: tau is in doubt), tau and tau_unclipped (tokens per
        verification round), committed and rounds (tokens, rounds: their sums give the pooled tau), round_ms, tpot_ms,
        tpot_ar_ms, speedup (TPOT_AR / TPOT of the same request, run and device), prefill_s,
        output (hash of the ids), same (output ids equal to the autoregressive ones), n_out_ar, finish_ar,
        repetition and repetition_ar (share of repeated n-grams; 0 where too few drafts are accepted to matter), round_s
        (seconds by part, summed over rounds), commits and proposals (bytes, one a round).
    excluded: one row per left-out request of a cell: CELL, request, arm (the one to blame), reason.
    unusable: arms that have not a single good record in a cell: CELL, arm, reason, n (records). They are missing there
        and do not cost the other arms their requests.
    again: the second autoregressive pass over some requests: REQUEST, arm, order, tpot_ms, tpot_ar_ms, same.
    warmups: rows as they were recorded, never counted.
    agreement: rows of agreement*.jsonl, as written by the harness's output gate.
    provenance: run.json by run id.
    """

    used: pd.DataFrame
    excluded: pd.DataFrame
    unusable: pd.DataFrame
    again: pd.DataFrame
    warmups: pd.DataFrame
    agreement: list[dict[str, Any]] = field(default_factory=list)
    provenance: dict[str, dict[str, Any]] = field(default_factory=dict)

    def arms(self) -> list[str]:
        """Arms in order of first appearance, the autoregressive arm first."""
        found = list(dict.fromkeys(self.used["arm"])) if len(self.used) else []
        return sorted(found, key=lambda arm: arm != AR)

    @property
    def synthetic(self) -> bool:
        """Whether random weights decoded these runs: times are real, tau and speedup are missing."""
        return any(str(engine).endswith(RANDOM_WEIGHTS) for engine in self.used["engine"].unique())


def load(paths: Path | str | Iterable[Path | str], synthetic: bool = False) -> Runs:
    """Read the run directories `paths` (one, or several). Raises LoadError when there is nothing to read or it
    clashes, and for a run of random weights unless `synthetic`: what it accepted means nothing.
    """
    given = [Path(paths)] if isinstance(paths, str | Path) else [Path(path) for path in paths]
    # A run that is given twice, or once more by its parent, is one run.
    folders = list({folder.resolve(): folder for path in given for folder in _run_dirs(path)}.values())
    jobs: list[tuple[Path, str]] = []
    agreement: list[dict[str, Any]] = []
    files_of: dict[Path, dict[str, Any]] = {}
    for folder in folders:
        files = sorted(folder.glob("records*.jsonl"))
        run = _read_json(folder / "run.json")
        try:
            pair = run.get("config", {}).get("drafter", {}).get("name") or ""
        except AttributeError:
            raise LoadError(
                f"{folder / 'run.json'} is not one that fold-bench wrote; restore it or remove it"
            ) from None
        for file in files:
            jobs.append((file, pair))
            files_of[file] = run
        try:
            for log in sorted(folder.glob("agreement*.jsonl")):
                agreement.extend(value for _, value in read_lines(log))
        except RecordError as error:
            raise LoadError(str(error)) from None
    rows: list[dict[str, Any]] = []
    provenance: dict[str, dict[str, Any]] = {}
    for (file, _), found in zip(jobs, _read_all(jobs), strict=True):
        rows.extend(found)
        for name in {row["run"] for row in found}:
            provenance.setdefault(name, files_of[file])
    made_up = next((row["run"] for row in rows if row["engine"].endswith(RANDOM_WEIGHTS)), None)
    if made_up is not None and not synthetic:
        raise LoadError(f"run {made_up} has random weights, so no acceptance and no speedup; leave it out")
    table = _tidy(rows)
    warm = table["warmup"]
    paired = _pair(table[~warm].drop(columns="warmup"))
    return Runs(warmups=table[warm], agreement=agreement, provenance=provenance, **paired)


def length_bucket(tokens: int) -> str:
    """Name of the length bucket of a prompt of `tokens` tokens, as in Table 11 ("16–32K", "≥128K")."""
    place = bisect(BUCKETS, tokens)
    if place == 1:
        return "<1K"
    low = BUCKETS[place - 1] // 1024
    return f"≥{low}K" if place == len(BUCKETS) else f"{low}–{BUCKETS[place] // 1024}K"


# -------------------------------------------------------------------------------------------------------------- reading


def _run_dirs(path: Path) -> list[Path]:
    """The folder itself if it holds records, else the run directories right below it."""
    found = [path] if any(path.glob("records*.jsonl")) else sorted({f.parent for f in path.glob("*/records*.jsonl")})
    if not found:
        what = "holds no records*.jsonl" if path.is_dir() else "is not a folder"
        raise LoadError(f"{path} {what}; give a run directory that fold-bench wrote")
    return found


def _read_all(jobs: list[tuple[Path, str]]) -> list[list[dict[str, Any]]]:
    """Rows of each file; large inputs are read by several processes, since most of the time goes into parsing JSON."""
    workers = min(len(jobs), len(os.sched_getaffinity(0)))
    if workers < 2 or sum(file.stat().st_size for file, _ in jobs) < PARALLEL_BYTES:
        return [_read(job) for job in jobs]
    # Forked, not spawned: a child only parses, and a spawned one would import the caller's script again.
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("fork")) as pool:
        return list(pool.map(_read, jobs))


def _read(job: tuple[Path, str]) -> list[dict[str, Any]]:
    file, pair = job
    rows: list[dict[str, Any]] = []
    try:
        for record in read_records(file):
            if (broken := _impossible(record)) is not None:
                raise ValueError(broken)
            rows.append(_row(record, pair or record.unit.rsplit("/", 3)[0]))
    except RecordError as error:
        raise LoadError(str(error)) from None
    except (TypeError, ValueError, AttributeError) as error:
        # Every line is a record, so the rows read so far give its number.
        where = f"{file}, line {len(rows) + 1} is damaged"
        raise LoadError(f"{where} ({error}); restore it or remove that line") from None
    return rows


def _impossible(record: Record) -> str | None:
    """What would turn into a wrong number, or None: the invariants of the writer (harness.records) that need no K, in
    a form that costs next to nothing, since a file may have been edited or written by another tool.
    """
    for name in ("run", "request_id", "benchmark", "task", "method", "error"):
        if not isinstance(getattr(record, name), str):
            return f"{name} is {getattr(record, name)!r}, not text"
    if not isinstance(record.method_config, dict) or not isinstance(record.round_s, dict):
        return "method_config or round_s is not an object"
    if not isinstance(record.output_ids, list) or not isinstance(record.prompt_tokens, int):
        return "output_ids or prompt_tokens is missing"
    if record.error:
        return None
    cap = max(record.proposals, default=254) + 1
    if record.commits and not 1 <= min(record.commits) <= max(record.commits) <= cap:
        return f"a round committed fewer than 1 or more than {cap} tokens"
    if not 0 <= record.last_token_s - record.first_token_s < math.inf:
        return f"first token at {record.first_token_s} s, last at {record.last_token_s} s"
    return None


def _row(record: Record, pair: str) -> dict[str, Any]:
    """One record as a flat row. Token ids are hashed and dropped: they are most of a record and are only compared."""
    committed, rounds = sum(record.commits), len(record.commits)
    mean, seconds = tau(record), tpot(record)
    if record.synthetic and not record.autoregressive:
        mean = None
    # Counting n-grams of every output would double the time to load; a loop that makes an arm look fast is one whose
    # drafts are mostly accepted.
    suspect = mean and mean >= 0.5 * (max(record.proposals, default=0) + 1) and not record.autoregressive
    return {
        "run": record.run,
        "pair": pair,
        "engine": record.engine,
        "device": record.device_uuid,
        "benchmark": record.benchmark,
        "task": record.task,
        "level": record.level or length_bucket(record.prompt_tokens),
        "request": record.request_id,
        "arm": record.method,
        "config": json.dumps(record.method_config, sort_keys=True) if record.method_config else "{}",
        "order": record.order,
        "prompt_tokens": record.prompt_tokens,
        "n_out": len(record.output_ids),
        "finish": record.finish,
        "miscounted": record.n_first + committed != len(record.output_ids) and not record.error,
        "committed": committed,
        "rounds": rounds,
        "tau": np.nan if mean is None else mean,
        "tau_unclipped": np.nan if mean is None else (committed + record.overrun) / rounds,
        "round_ms": 1e3 * (record.last_token_s - record.first_token_s) / rounds if rounds else np.nan,
        "tpot_ms": 1e3 * seconds if seconds else np.nan,
        "prefill_s": record.prefill_s,
        "output": hash(tuple(record.output_ids)),
        "repetition": repetition(record.output_ids) if suspect else 0.0,
        "base_ids": array("I", record.output_ids).tobytes() if record.method == AR else b"",
        "round_s": record.round_s,
        "skipped_rounds": record.skipped_rounds,
        "commits": b"" if record.autoregressive else bytes(record.commits),
        "proposals": bytes(record.proposals),
        "attempt": record.attempt,
        "warmup": record.warmup,
        "error": record.error,
    }


def _read_json(file: Path) -> dict[str, Any]:
    try:
        return json.loads(file.read_bytes())
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise LoadError(f"{file} is not JSON ({error})") from None


# -------------------------------------------------------------------------------------------------------------- pairing


def _tidy(rows: list[dict[str, Any]]) -> pd.DataFrame:
    table = pd.DataFrame(rows)
    if len(table) == 0:
        raise LoadError("the run directories hold no records yet")
    for name in ("run", "pair", "engine", "device", "benchmark", "task", "level", "config", "finish"):
        table[name] = table[name].astype("category")
    # Plain objects: pandas' own string type is many times slower to iterate over.
    table = table.astype({"request": object, "error": object, "arm": object, "warmup": bool})
    table["method"] = pd.Categorical([arm.split("#")[0] for arm in table["arm"]])
    table["arm"] = _arm_names(table)
    return table


def _arm_names(table: pd.DataFrame) -> pd.Series:
    """The method's name, with the settings that tell its arms apart when a pair has it in several ("fold alpha=4").

    Arms of one method that differ in nothing (the A/A control "ar#2") keep the name that the harness gave them.
    """
    names: dict[tuple[str, str, str, str], str] = {}
    known = table[["run", "pair", "method", "arm", "config"]].drop_duplicates()
    for (pair, method), group in known.astype(object).groupby(["pair", "method"]):
        configs = {text: json.loads(text) for text in group["config"]}
        differing = [
            key
            for key in sorted({key for config in configs.values() for key in config})
            if len({json.dumps(config.get(key)) for config in configs.values()}) > 1
        ]
        counted: Counter[tuple[str, str]] = Counter()
        for run, arm, text in sorted(zip(group["run"], group["arm"], group["config"], strict=True)):
            settings = [f"{key}={configs[text].get(key)}" for key in differing]
            counted[run, text] += 1
            # A setting that one run measures twice (the A/A control within a sweep) is two arms.
            again = f"#{counted[run, text]}" if counted[run, text] > 1 else ""
            names[run, str(pair), arm, text] = " ".join([str(method), *settings]) + again if settings else arm
    keys = zip(table["run"], table["pair"], table["arm"], table["config"], strict=True)
    return pd.Series([names[key] for key in keys], index=table.index, dtype=object)


def _pair(table: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Choose the record that counts for each request and arm, pair it, and drop unusable requests from every arm."""
    table = table.reset_index(drop=True)
    table["reason"] = [
        f"failed: {error.splitlines()[0][:80]}"
        if error
        else "drafter skipped"
        if skipped
        else "no TPOT"
        if untimed
        else ""
        for error, skipped, untimed in zip(
            table["error"], table["skipped_rounds"] > 0, table["tpot_ms"].isna(), strict=True
        )
    ]
    # Cells and requests as numbers: comparing six columns for every question would take most of the time.
    table["cell"] = table.groupby(CELL, observed=True).ngroup()
    table["key"] = table.groupby(REQUEST, observed=True).ngroup()
    where = ["run", "key", "device"]
    # Last good attempt, else the last attempt: a retry replaces what failed, a good record is never replaced by a
    # failure.
    table["good"] = table["reason"] == ""
    table = (
        table.sort_values(["good", "attempt"], kind="stable").drop_duplicates([*where, "arm"], keep="last").sort_index()
    )
    pairs = table.loc[
        (table["arm"] == AR) & table["good"], [*where, "tpot_ms", "output", "n_out", "finish", "base_ids"]
    ]
    of_ar = {"tpot_ms": "tpot_ar_ms", "output": "output_ar", "n_out": "n_out_ar", "finish": "finish_ar"}
    table = table.drop(columns="base_ids").merge(pairs.rename(columns=of_ar), on=where, how="left")
    loops = (table["repetition"] > LOOP) & table["tpot_ar_ms"].notna()
    table["repetition_ar"] = 0.0
    table.loc[loops, "repetition_ar"] = [repetition(array("I", ids)) for ids in table.loc[loops, "base_ids"]]
    table["same"] = table["output"] == table["output_ar"]
    table["speedup"] = table["tpot_ar_ms"] / table["tpot_ms"]
    made_up = table["engine"].astype(str).str.endswith(RANDOM_WEIGHTS) & ~table["method"].isin([AR, AR_AGAIN])
    table.loc[made_up, "speedup"] = np.nan
    unpaired = table["good"] & table["tpot_ar_ms"].isna()
    table.loc[unpaired, "reason"] = "no autoregressive record on the same device"
    table["good"] &= ~unpaired
    # After a move to another device both arms are measured there again: the last device that has a pair counts.
    table = table.sort_values("good", kind="stable").drop_duplicates(["run", "key", "arm"], keep="last").sort_index()
    _refuse_clashes(table)
    again = table[(table["arm"] == AR_AGAIN) & table["good"]]
    table = table[table["arm"] != AR_AGAIN].drop_duplicates(["key", "arm"])
    unusable, table = _unusable(table)
    excluded = _exclusions(table)
    used = table[~table["key"].isin(excluded["key"])]
    used = used.drop(
        columns=["error", "reason", "good", "output_ar", "base_ids", "skipped_rounds", "attempt", "cell", "key"]
    )
    return {"used": used, "excluded": excluded.drop(columns="key"), "unusable": unusable, "again": again}


def _refuse_clashes(table: pd.DataFrame) -> None:
    """The same arm and request in two runs would count twice; only the autoregressive passes are expected in each."""
    rows = table[~table["method"].isin([AR, AR_AGAIN])]
    twice = rows[rows.duplicated(["key", "arm"], keep=False)]
    if len(twice):
        first = twice.iloc[0]
        runs = ", ".join(sorted(set(twice["run"].astype(str))))
        raise LoadError(f"request {first['request']} of {first['arm']} is in several runs ({runs}); give one of them")


def _unusable(table: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Arms with nothing good in a cell whose baseline is good, and the table without them."""
    measured = table.loc[(table["arm"] == AR) & table["good"], "cell"]
    works = table.groupby(["cell", "arm"])["good"].transform("any")
    gone = table["cell"].isin(measured) & ~works
    lost = table[gone].groupby([*CELL, "arm"], observed=True)["reason"].agg(["first", "size"]).reset_index()
    return lost.rename(columns={"first": "reason", "size": "n"}), table[~gone]


def _exclusions(table: pd.DataFrame) -> pd.DataFrame:
    """One row per request of a cell that some arm of that cell lacks or could not finish, with the first reason
    found.
    """
    bad = table.loc[~table["good"], [*REQUEST, "key", "arm", "reason"]]
    arms = table.groupby("cell")["arm"].unique()
    present = table.groupby("key")["arm"].size()
    short = table.drop_duplicates("key")
    short = short[short["key"].map(present) < short["cell"].map(arms.map(len))]
    have = table[table["key"].isin(short["key"])].groupby("key")["arm"].agg(set)
    lacking = [
        {**{name: row[name] for name in [*REQUEST, "key"]}, "arm": arm, "reason": "missing"}
        for row in short.to_dict("records")
        for arm in arms[row["cell"]]
        if arm not in have[row["key"]]
    ]
    # The autoregressive arm's own trouble explains the unpaired rows of the others, so it is named first.
    both = pd.concat([bad, pd.DataFrame(lacking, columns=bad.columns)], ignore_index=True)
    both["rank"] = (both["arm"] != AR).astype(int)
    return both.sort_values("rank", kind="stable").drop_duplicates("key").drop(columns="rank").reset_index(drop=True)
