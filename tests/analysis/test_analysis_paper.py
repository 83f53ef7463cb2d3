"""The transcription of the paper's numbers, checked by the paper's own arithmetic.

A printed number stands for an interval of half a unit in its last digit on either side; a check fails only when no
values inside those intervals satisfy it."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from analysis.paper import BUCKETS, COLUMNS, KEYS, MAIN_MODELS, METHODS, published, stated

HALF = 0.005 + 1e-9
# Table 7: requests of LCA 32K, 64K and 122K.
LCA_N = {"Llama-3.1-8B": [236, 222, 129], "Qwen3.5-9B": [236, 224, 154], "Gemma-4-12B": [236, 232, 176]}


def wide(table: int, columns: str | list[str] = "column") -> pd.DataFrame:
    return published(table).pivot_table(index=["group", "row", "metric"], columns=columns, values="value", sort=False)


@pytest.mark.parametrize(
    ("table", "cells"), [(2, 336), (3, 42), (4, 18), (5, 21), (8, 126), (9, 28), (10, 40), (11, 80), (12, 44)]
)
def test_every_cell_is_there_once(table: int, cells: int) -> None:
    typed = published(table)
    assert len(typed) == cells and not typed.duplicated(KEYS).any() and typed["value"].notna().all()
    with_interval = typed.dropna(subset="low")
    assert (with_interval["low"] <= with_interval["value"]).all()
    assert (with_interval["value"] <= with_interval["high"]).all()


def test_table_2_averages() -> None:
    table = wide(2)
    # The mean of seven rounded numbers, against one rounded number.
    off = (table[list(COLUMNS)].mean(axis=1) - table["Avg."]).abs()
    assert list(off[off > 2 * HALF].index) == []


def test_table_4_gives_the_lca_column_of_table_2() -> None:
    changes, main = published(4), wide(2)
    for model, n in LCA_N.items():
        total = changes[changes["group"] == model].groupby("column", sort=False)["value"].sum()
        printed = main.loc[(model, "FOLD", "tau"), "LCA"] - main.loc[(model, "DFlash", "tau"), "LCA"]
        # Requests of the three lengths weigh the same (COLUMNS); equal weight per length misses by more than rounding.
        assert abs(np.average(total, weights=n) - printed) <= 4 * HALF
        assert abs(np.average(total, weights=n) - printed) < abs(total.mean() - printed)


def test_table_11_changes_sum_to_fold_minus_dflash() -> None:
    table = published(11).pivot_table(index=["group", "row"], columns="column", values="value", sort=False)
    off = table["FOLD"] - table["DFlash"] - table["DFlash → Window"] - table["Window → FOLD"]
    assert list(off[off.abs() > 4 * HALF].index) == []


def test_table_11_buckets_give_the_lbv2_columns() -> None:
    table = published(11).pivot_table(index=["group", "row"], columns="column", values="value", sort=False)
    main = pd.concat([wide(2), wide(9)])
    requests = {"Llama-3.1-8B": 320, "Qwen3-8B": 79, "Qwen3.5-9B": 379, "Gemma-4-12B": 378}
    for model, n in requests.items():
        rows = table.loc[model]
        assert rows["n"].sum() == n and set(rows.index) <= set(BUCKETS)
        for method in ("DFlash", "FOLD"):
            pooled = np.average(rows[method], weights=rows["n"])
            assert abs(pooled - main.loc[(model, method, "tau"), "LBv2"]) <= 2 * HALF


def test_table_12_groups_give_table_5() -> None:
    five, twelve = published(5), published(12)
    for model in five["group"].unique():
        rows = twelve[twelve["group"] == model].pivot_table(index="row", columns="column", values="value")
        rows = rows.loc[[row for row in ("Natural", "QA/MC/Dia") if row in rows.index]]
        for column, half in (("α=2", 0.005), ("α=2 vs. 1", 0.0005), ("α=4 vs. 2", 0.0005)):
            (printed,) = five.query("group == @model and row == 'General' and column == @column")["value"]
            assert abs(np.average(rows[column], weights=rows["n"]) - printed) <= 2 * half + 1e-9


def test_marks_are_those_of_the_captions() -> None:
    marked = {
        table: [tuple(row) for row in published(table).query("mark == '†'")[["group", "row"]].values]
        for table in (5, 12)
    }
    assert marked[5] == [("Llama-3.1-8B", "General"), ("Qwen3-8B", "General"), ("Gemma-4-12B", "General")]
    assert marked[12] == [("Llama-3.1-8B", "Natural"), ("Qwen3-8B", "Natural"), ("Gemma-4-12B", "Natural")]


def best(table: int, group: str, column: str, metric: str = "speedup") -> list[str]:
    cells = published(table)
    cells = cells[(cells["group"] == group) & (cells["column"] == column) & (cells["metric"] == metric)]
    return cells.loc[cells["value"] == cells["value"].max(), "row"].tolist()


def test_orders_stated_in_the_text() -> None:
    for model in MAIN_MODELS:
        assert best(2, model, "Avg.") == best(2, model, "Avg.", "tau") == best(2, model, "Retr.KV") == ["FOLD"]
        averages = published(2).query("group == @model and column == 'Avg.' and metric == 'speedup'")
        assert averages.nlargest(2, "value")["row"].tolist() == ["FOLD", "ReRoPE"]
    assert best(2, "Qwen3.5-9B", "Retr.KV", "tau") == ["CMR"]
    assert best(3, "Qwen3-8B", "General") == best(3, "Gemma-4-12B", "General") == ["FOLD"]
    assert best(3, "Gemma-4-12B", "Code") == ["ReRoPE", "FOLD"]
    # C.1
    assert [best(8, "Qwen3.5-9B", tier) for tier in ("8K", "16K", "32K")] == [["ReRoPE"], ["ReRoPE"], ["FOLD"]]
    assert [best(8, "Gemma-4-12B", tier) for tier in ("8K", "16K", "32K")] == [
        ["DFlash"],
        ["DFlash"],
        ["ReRoPE", "FOLD"],
    ]
    assert all(best(8, "Qwen3.5-9B", tier, "tau") == ["CMR"] for tier in ("8K", "16K", "32K"))
    # C.2 and C.3
    assert best(9, "Qwen3-8B", "Gov") == ["FOLD"] and best(9, "Qwen3-8B", "LBv2") == ["StreamingLLM"]
    ten = (
        published(10)
        .query("metric == 'speedup'")
        .pivot_table(index="row", columns="column", values="value", sort=False)
    )
    orders = [ten[column].sort_values(ascending=False, kind="stable").index.tolist() for column in ten]
    assert orders[0] == orders[1] and orders[0][:2] == ["FOLD", "ReRoPE"]


def test_common_set_of_table_10() -> None:
    ten = wide(10, ["column"])
    all_, common = "All requests", "Common set"
    both = ten.dropna()
    assert ((both[all_] - both[common]).abs() < 0.01 + 2 * HALF).all()
    differs = published(10).query("metric == 'differs from AR'")["value"]
    assert (differs.min(), differs.max()) == (79, 84) and 1531 - 94 == 1437


def test_text_agrees_with_the_tables() -> None:
    text = stated()
    assert len(text) == 128 and text["value"].notna().all()
    tables = pd.concat([published(n) for n in (2, 3, 4, 5, 8, 9, 11, 12)])
    tables["column"] = np.where(tables["table"] == "8", "SPEED " + tables["column"], tables["column"])
    tables["column"] = np.where(tables["table"] == "4", "LCA " + tables["column"], tables["column"])
    exact = text[text["relation"] == "="].merge(
        tables, on=["group", "row", "column", "metric"], suffixes=("", "_table")
    )
    assert len(exact) >= 20
    wrong = exact[exact["value"] != exact["value_table"]]
    assert wrong[["sentence", "value", "value_table"]].values.tolist() == []


def test_ranges_stated_in_the_text() -> None:
    changes = published(4)
    memory = changes[changes["row"] == "Window → FOLD"]["value"]
    window = changes[changes["row"] == "DFlash → Window"].set_index("group")["value"]
    assert (memory.min(), memory.max()) == (0.15, 1.29)
    assert (window["Llama-3.1-8B"].min(), window["Llama-3.1-8B"].max()) == (1.07, 1.53)
    tau = wide(2)[list(COLUMNS)]
    gains = {m: (tau.loc[(m, "FOLD", "tau")] - tau.loc[(m, "DFlash", "tau")]).round(2) for m in MAIN_MODELS}
    assert (gains["Llama-3.1-8B"].min(), gains["Llama-3.1-8B"].max()) == (0.86, 2.28)
    assert gains["Gemma-4-12B"].max() == 0.75 and (gains["Qwen3.5-9B"] > 0).all()
    average = wide(2)["Avg."]
    relative = [average[m, "FOLD", "speedup"] / average[m, "DFlash", "speedup"] - 1 for m in MAIN_MODELS]
    assert (round(min(relative), 2), round(max(relative), 2)) == (0.09, 0.61)
    # C.2: Window on LBv2 is not in a table, but its changes in Table 11 are.
    rows = published(11).query("group == 'Qwen3-8B'").pivot_table(index="row", columns="column", values="value")
    alone = np.average(rows["DFlash"] + rows["DFlash → Window"], weights=rows["n"])
    assert abs(alone - 5.25) <= 3 * HALF


def test_tables_of_names() -> None:
    assert published(1).pivot(index="row", columns="column", values="printed").loc["Gemma-4-12B", "W"] == "4096"
    assert published(6)["printed"].str.contains("/").sum() == 6
    assert list(METHODS.values()) == published(2)["row"].unique().tolist()
