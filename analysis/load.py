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
import re
from bisect import bisect
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from harness.guards import LOOP, repetition
from harness.records import AR, AR_AGAIN, RANDOM_WEIGHTS, SCHEMA, Record, RecordError, read_lines, read_records

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
    columns: Columns = {name: [] for name in COLUMNS}
    provenance: dict[str, dict[str, Any]] = {}
    made_up: str | None = None
    for (file, _), found in zip(jobs, _read_all(jobs), strict=True):
        for name, values in found.items():
            columns[name] += values
        for run, engine in dict.fromkeys(zip(found.get("run", []), found.get("engine", []), strict=True)):
            provenance.setdefault(run, files_of[file])
            made_up = made_up or (run if engine.endswith(RANDOM_WEIGHTS) else None)
    if made_up is not None and not synthetic:
        raise LoadError(f"run {made_up} has random weights, so no acceptance and no speedup; leave it out")
    table = _tidy(columns)
    columns.clear()  # a full reproduction has a hundred thousand of each
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


Columns = dict[str, list[Any]]


def _read_all(jobs: list[tuple[Path, str]]) -> Iterator[Columns]:
    """Columns of each file; large inputs are read by several processes, since most of the time goes into parsing."""
    workers = min(len(jobs), len(os.sched_getaffinity(0)))
    if workers < 2 or sum(file.stat().st_size for file, _ in jobs) < PARALLEL_BYTES:
        yield from (_read(*job) for job in jobs)
        return
    # Forked, not spawned: a child only parses, and a spawned one would import the caller's script again.
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("fork")) as pool:
        yield from pool.map(_read, *zip(*jobs, strict=True))


def _read(file: Path, pair: str) -> Columns:
    rows: list[tuple[Any, ...]] = []
    # Names are repeated in every record: one object for each keeps memory, and what a reader sends back, small.
    shared: dict[str, str] = {}
    try:
        with file.open("rb") as lines:
            for line in lines:
                if not line.endswith(b"\n"):
                    break
                rows.append(_row(*_parse(line), pair, shared))
    except (TypeError, ValueError, AttributeError, KeyError) as error:
        try:
            for _ in read_records(file):  # which says it better where the line is no record at all
                pass
        except RecordError as damage:
            raise LoadError(str(damage)) from None
        # Every line is a record, so the rows read so far give its number.
        where = f"{file}, line {len(rows) + 1} is damaged"
        raise LoadError(f"{where} ({error}); restore it or remove that line") from None
    return dict(zip(COLUMNS, map(list, zip(*rows, strict=True)), strict=True)) if rows else {}


_IDS = re.compile(rb'"output_ids": ?\[([\d, ]*)\]')
_FIELDS = {entry.name for entry in fields(Record)}


def _parse(line: bytes) -> tuple[dict[str, Any], bytes]:
    """A record's fields without its output ids, and those as text ("5,7,7").

    Token ids are most of a record and are only counted and compared, so they are not made into numbers. Raises
    ValueError for what is no record.
    """
    ids = b""
    if (found := _IDS.search(line)) is not None:
        ids = found[1].replace(b", ", b",")
        line = line[: found.start(1)] + line[found.end(1) :]
        if b",," in ids or b",0" in ids or b" " in ids or ids[:1] in (b"0", b",") or ids[-1:] == b",":
            ids = ",".join(map(str, json.loads(b"[" + ids + b"]"))).encode()  # the unusual, in the usual form
    value = json.loads(line.decode())
    if not isinstance(value, dict) or value.keys() != _FIELDS or value["schema"] != SCHEMA:
        raise ValueError("no record")
    if value["output_ids"] != [] or type(value["prompt_tokens"]) is not int:
        raise ValueError("output_ids or prompt_tokens is missing")
    return value, ids


def _row(value: dict[str, Any], ids: bytes, pair: str, shared: dict[str, str]) -> tuple[Any, ...]:
    """A record as a row of COLUMNS. Raises ValueError for what would turn into a wrong number: the invariants of the
    writer (harness.records) that need no K, since a file may have been edited or written by another tool.
    """
    for name in ("run", "request_id", "benchmark", "task", "method", "error"):
        if not isinstance(value[name], str):
            raise ValueError(f"{name} is {value[name]!r}, not text")
    config, round_s, commits, proposals = (value[name] for name in ("method_config", "round_s", "commits", "proposals"))
    if not isinstance(config, dict) or not isinstance(round_s, dict):
        raise ValueError("method_config or round_s is not an object")
    error, arm, first, n_out = value["error"], value["method"], value["n_first"], ids.count(b",") + bool(ids)
    committed, rounds = sum(commits), len(commits)
    most = max(proposals, default=0)
    seconds = value["last_token_s"] - value["first_token_s"]
    if not error:
        cap = most + 1 if proposals else 255
        if commits and not 1 <= min(commits) <= max(commits) <= cap:
            raise ValueError(f"a round committed fewer than 1 or more than {cap} tokens")
        if not 0 <= seconds < math.inf:
            raise ValueError(f"first token at {value['first_token_s']} s, last at {value['last_token_s']} s")
    autoregressive = arm.split("#")[0].split("@")[0] == AR
    made_up = value["engine"].endswith(RANDOM_WEIGHTS) and not autoregressive
    mean = committed / rounds if rounds and not made_up else math.nan
    # Counting n-grams of every output would double the time to load; a loop that makes an arm look fast is one whose
    # drafts are mostly accepted.
    suspect = not autoregressive and mean >= 0.5 * (most + 1)
    names = (
        value["run"],
        pair or value["unit"].rsplit("/", 3)[0],
        value["engine"],
        value["device_uuid"],
        value["benchmark"],
        value["task"],
        value["level"] or length_bucket(value["prompt_tokens"]),
        arm,
        json.dumps(config, sort_keys=True) if config else "{}",
        value["finish"],
    )
    return (
        *map(shared.setdefault, names, names),
        value["request_id"],
        value["order"],
        value["prompt_tokens"],
        n_out,
        first + committed != n_out and not error,
        committed,
        rounds,
        mean,
        mean + value["overrun"] / rounds if rounds else math.nan,
        1e3 * seconds / rounds if rounds else math.nan,
        1e3 * (seconds / (n_out - first)) if n_out > first and seconds and not error else math.nan,
        value["prefill_s"],
        hash(ids),
        repetition(_numbers(ids)) if suspect else 0.0,
        ids if arm == AR else b"",
        round_s,
        value["skipped_rounds"],
        b"" if autoregressive else bytes(commits),
        bytes(proposals),
        value["attempt"],
        value["warmup"],
        error,
    )


# What _row returns, in its order.
NAMES = ("run", "pair", "engine", "device", "benchmark", "task", "level", "arm", "config", "finish")
COLUMNS = (
    *NAMES, "request", "order", "prompt_tokens", "n_out", "miscounted", "committed", "rounds", "tau", "tau_unclipped",
    "round_ms", "tpot_ms", "prefill_s", "output", "repetition", "base_ids", "round_s", "skipped_rounds", "commits",
    "proposals", "attempt", "warmup", "error",
)  # fmt: skip


def _numbers(ids: bytes) -> list[int]:
    return [int(text) for text in ids.split(b",")] if ids else []


def _read_json(file: Path) -> dict[str, Any]:
    try:
        return json.loads(file.read_bytes())
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise LoadError(f"{file} is not JSON ({error})") from None


# -------------------------------------------------------------------------------------------------------------- pairing


def _tidy(columns: Columns) -> pd.DataFrame:
    if not columns["run"]:
        raise LoadError("the run directories hold no records yet")
    # Plain objects: pandas' own string type is many times slower to iterate over.
    given = {name: pd.Series(values, dtype=_TYPES.get(name)) for name, values in columns.items()}
    table = pd.DataFrame(given)
    for name in NAMES:
        table[name] = _categories(columns[name])
    table["method"] = _categories([arm.split("#")[0] for arm in columns["arm"]])
    table["arm"] = _arm_names(table)
    return table


_OBJECTS = (*NAMES, "request", "error", "base_ids", "round_s", "commits", "proposals")
_TYPES: dict[str, Any] = {**dict.fromkeys(_OBJECTS, object), "warmup": bool}


def _categories(values: list[str]) -> pd.Categorical:
    return pd.Categorical(values, categories=pd.Index(sorted(set(values)), dtype=object))


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
    table.loc[loops, "repetition_ar"] = [repetition(_numbers(ids)) for ids in table.loc[loops, "base_ids"]]
    table["same"] = table["output"] == table["output_ar"]
    table["speedup"] = table["tpot_ar_ms"] / table["tpot_ms"]
    engines = [name for name in table["engine"].cat.categories if name.endswith(RANDOM_WEIGHTS)]
    made_up = table["engine"].isin(engines) & ~table["method"].isin([AR, AR_AGAIN])
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
