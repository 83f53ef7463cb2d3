"""The choice of a read's splits: what is timed, what is shared, and when it is refused."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from paged_cases import tensor

from methods.kernels import splits
from methods.paged import Call


def call(device="cpu", rows=3, **bounds):
    query = SimpleNamespace(device=torch.device(device), shape=(rows, 4, 8), dtype=torch.float32)
    kv = torch.zeros(6, 16, 2, 8)
    return Call(query, kv, kv, torch.zeros(6, dtype=torch.int32), tensor(40), 1.0, **bounds)


@pytest.fixture
def cuda(monkeypatch):
    """A device that times launches by the number of their cut."""
    monkeypatch.setattr(splits, "_chosen", {})
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "Some GPU")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch, "Generator", lambda device: torch.default_generator)
    monkeypatch.setattr(splits, "_synthetic", lambda call, longest, chance: call)
    monkeypatch.setattr(splits, "_time", lambda runs: runs[0]())


def choose(calls, launch, cuts=(1, 8, 16), longest=4096):
    return splits.choose(calls, longest, cuts, launch, untimed=99, unfit=(ArithmeticError,))


def test_the_fastest_is_chosen_once_for_a_shape(cuda):
    timed = []

    def launch(calls, cut):
        timed.append(cut)
        return {1: 3.0, 8: 1.0, 16: 2.0}[cut]

    assert choose([call("cuda", left=20)], launch) == 8 and timed == [1, 8, 16]
    again = replace(call("cuda", left=20), shift=-5, length=tensor(9), sharpen=2.0, scale=0.1)
    assert choose([again], launch) == 8 and len(timed) == 3  # methods with the same read share it
    for other in (call("cuda", left=21), call("cuda", left=20, right=0), call("cuda", rows=4, left=20)):
        choose([other], launch)
    choose([call("cuda", left=20)] * 2, launch)
    choose([call("cuda", left=20)], launch, longest=8192)
    assert len(timed) == 3 * 6
    assert len(splits.chosen()) == 6 and all(name.startswith("Some GPU") for name in splits.chosen())


def test_a_cut_that_does_not_fit_is_left_out(cuda):
    def launch(calls, cut):
        if cut != 16:
            raise ArithmeticError
        return 1.0

    assert choose([call("cuda")], launch) == 16
    with pytest.raises(RuntimeError, match="no cut of a read fits Some GPU: tried 1, 8"):
        choose([call("cuda", left=1)], launch, cuts=(1, 8))


def test_nothing_is_timed_while_a_graph_is_captured(cuda, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="read once before"):
        choose([call("cuda")], lambda calls, cut: 1.0)


def test_nothing_is_timed_where_times_mean_nothing():
    assert choose([call("cpu")], lambda calls, cut: 1 / 0) == 99


@pytest.mark.parametrize("left", [None, 20])
def test_synthetic_keys_are_as_many_as_a_read_touches(left):
    """In shuffled pages of their own that hold no part of the engine's."""
    chance = torch.Generator().manual_seed(0)
    made = splits._synthetic(call(left=left, shift=7), 100, chance)
    count = 100 if left is None else 23
    assert made.length.tolist() == [count] and made.shift == 0
    assert made.query.shape == (3, 4, 8) and made.keys.shape == made.values.shape == (-(-count // 16), 16, 2, 8)
    assert sorted(made.table.tolist()) == list(range(-(-count // 16))) and made.table.dtype == torch.int32
    flat = splits._synthetic(replace(call(left=left), table=None), 100, chance)
    assert flat.table is None and flat.keys.shape == (1, count, 2, 8)
