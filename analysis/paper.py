"""The paper's vocabulary and its published numbers: which pairs, methods, tasks and groups its tables speak of.

``results/paper/*.csv`` hold Tables 1 to 12 and the values stated in the text, copied by hand; every number read from
here is the paper's and is labelled so wherever it is printed. Our own numbers use the same (table, group, row,
column, metric) keys, so that a comparison is a join.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from analysis.load import LoadError

KEYS = ["table", "group", "row", "column", "metric"]
RESULTS = Path(__file__).resolve().parent.parent / "results" / "paper"


@dataclass(frozen=True)
class Pair:
    """A target-drafter pair of Table 1; drafter is the name the tables print for the original method."""

    model: str
    drafter: str


# By the drafter's name in conf/drafter, which belongs to one target.
PAIRS = {
    "llama": Pair("Llama-3.1-8B", "DFlash"),
    "qwen35": Pair("Qwen3.5-9B", "DFlash"),
    "gemma": Pair("Gemma-4-12B", "DFlash"),
    "qwen3": Pair("Qwen3-8B", "DFlash"),
    "gemma_dspark": Pair("Gemma-4-12B", "DSpark"),
    "qwen3_dspark": Pair("Qwen3-8B", "DSpark"),
}
MAIN_MODELS = ["Llama-3.1-8B", "Qwen3.5-9B", "Gemma-4-12B"]
# The window W of FOLD (Table 1): Tables 5 and 12 count only requests longer than it.
WINDOW = {"Llama-3.1-8B": 2048, "Qwen3.5-9B": 4096, "Gemma-4-12B": 4096, "Qwen3-8B": 2048}

# Rows of Tables 2, 3, 8 and 9 in their order, by the method's name in conf/method.
METHODS = {
    "original": "DFlash",
    "streamingllm": "StreamingLLM",
    "yarn": "YaRN",
    "cmr": "CMR",
    "rerope": "ReRoPE",
    "infllm": "InfLLM",
    "fold": "FOLD",
}
SGLANG_METHODS = {
    "original": "DFlash",
    "engine_window": "SGLang window",
    "streamingllm": "StreamingLLM",
    "cmr": "CMR",
    "rerope": "ReRoPE",
    "infllm": "InfLLM",
    "window": "Window",
    "fold": "FOLD",
}

# Columns of Table 2 and the rows of Table 7 behind each. A column with several tasks is the mean over all their
# requests: only so do Tables 4 and 7 give Table 2's LCA (2.28 on Llama-3.1-8B; an equal weight per length would give
# 2.31).
COLUMNS = {
    "Gov": ["Gov"],
    "LBv2": ["LBv2"],
    "Retr.KV": ["Retr.KV"],
    "En.": ["En.Sum", "En.QA", "En.MC", "En.Dia"],
    "LCA": ["LCA 32K", "LCA 64K", "LCA 122K"],
    "RepoBench": ["RepoBench Python", "RepoBench Java"],
    "SWE-bench": ["SWE-bench"],
}
# The exception: En. weighs its four tasks equally (Appendix B.5).
EQUAL_WEIGHT = {"En."}
GENERAL = ["Gov", "LBv2", "Retr.KV", "En."]
CODE = ["LCA", "RepoBench", "SWE-bench"]
SEVEN_GENERAL_TASKS = ["Gov", "LBv2", "Retr.KV", "En.Sum", "En.QA", "En.MC", "En.Dia"]
LCA_LENGTHS = ["32K", "64K", "122K", "180K", "240K"]
SPEED_TIERS = ["1K", "2K", "8K", "16K", "32K"]
BUCKETS = ["8–16K", "16–32K", "32–64K", "64–128K", "≥128K"]
# The rows of Table 7.
TASKS = [
    *SEVEN_GENERAL_TASKS,
    *(f"LCA {length}" for length in LCA_LENGTHS),
    *COLUMNS["RepoBench"],
    *COLUMNS["SWE-bench"],
    *(f"SPEED {tier}" for tier in SPEED_TIERS),
]
# Groups of Tables 5 and 12.
ALPHA_GROUPS = {
    "General": SEVEN_GENERAL_TASKS,
    "Code": [task for column in CODE for task in COLUMNS[column]],
    "Natural": ["Gov", "LBv2", "Retr.KV", "En.Sum"],
    "SPEED": [f"SPEED {tier}" for tier in SPEED_TIERS],
    "QA/MC/Dia": ["En.QA", "En.MC", "En.Dia"],
}


def task_key(name: str) -> str:
    """A task's name without case, blanks and punctuation: "LCA 32K" and "lca_32k" are the same row of Table 7."""
    return "".join(letter for letter in name.casefold() if letter.isalnum())


def published(table: int | str, folder: Path = RESULTS) -> pd.DataFrame:
    """The paper's own cells of one table: KEYS, value, low, high (floats, NaN for none), mark, printed (as typed).

    Raises LoadError when they are not there (an installation without the repository's results/).
    """
    cells = _read(folder / f"table{table}.csv")
    cells["printed"] = cells["value"]
    for name in ("value", "low", "high"):
        cells[name] = pd.to_numeric(cells[name], errors="coerce")
    return cells


def stated(folder: Path = RESULTS) -> pd.DataFrame:
    """Values stated in the text: section, group, row, column, metric, relation, value, low, high, sentence."""
    cells = _read(folder / "text.csv")
    for name in ("value", "low", "high"):
        cells[name] = pd.to_numeric(cells[name], errors="coerce")
    return cells


def _read(file: Path) -> pd.DataFrame:
    try:
        return pd.read_csv(file, dtype=str, keep_default_na=False)
    except FileNotFoundError:
        raise LoadError(f"the paper's numbers ({file.name}) are not installed; run this in a checkout") from None
