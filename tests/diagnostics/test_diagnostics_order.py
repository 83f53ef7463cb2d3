"""The order probe on planted signals, and its shuffled control on a target that writes what we tell it to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from harness.diagnostics import order
from harness.diagnostics.order import BINS, FOLDS, Pairs, collect, context_features, folds_of, probe, sample_pairs
from harness.diagnostics.states import Pair
from harness.engines.reference.target import Step
from harness.requests import Request

WIDTH = 12


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(order, "RATE", 5e-3)  # small and few differences: fewer, larger steps do
    monkeypatch.setattr(order, "STEPS", 200)


class Written:
    """A target whose tapped feature of a position is `write(ids, positions)`, and the drafter that passes it on."""

    def __init__(self, write: Callable[[Tensor, Tensor], Tensor]) -> None:
        self._write, self.length = write, 0
        self.embedding = torch.randn(50, WIDTH, generator=torch.Generator().manual_seed(1))
        self.config = type("Config", (), {"target_layer_ids": [0]})
        self.fed: list[int] = []

    def reserve(self, capacity: int) -> None:
        self.length, self.fed = 0, []

    def forward(self, ids: Sequence[int], *, taps: Sequence[int] = (), last_only: bool = False) -> Step:
        positions = torch.arange(self.length, self.length + len(ids))
        self.length += len(ids)
        self.fed += ids
        return Step(torch.zeros(1, 50), self._write(torch.tensor(list(ids)), positions))

    def context_features(self, features: Tensor) -> Tensor:
        return features


def written(write: Callable[[Tensor, Tensor], Tensor]) -> Pair:
    both: Any = Written(write)
    return Pair(both, both, 100)


def prompt(number: int, length: int = 1400) -> Request:
    ids = torch.randint(0, 50, (length,), generator=torch.Generator().manual_seed(number)).tolist()
    return Request(f"r{number}@1K", "b", "t", tuple(ids), 8, (), {"source_id": f"r{number}"})


def probed(pair: Pair, count: int = 30) -> dict[tuple[int, str], float]:
    """Mean accuracy by bin and probe."""
    inputs = []
    for number in range(count):
        asked = prompt(number)
        inputs.append(collect(pair, asked, context_features(pair, asked.prompt_ids), recent=100, count=60))
    rows = probe(inputs)
    cells: dict[tuple[int, str], list[float]] = {}
    for row in rows:
        cells.setdefault((row["low"], row["arm"]), []).append(row["accuracy"])
    assert {len(values) for values in cells.values()} == {count}
    return {key: float(np.mean(values)) for key, values in cells.items()}


def position_and_noise(ids: Tensor, positions: Tensor) -> Tensor:
    noise = torch.randn(len(ids), WIDTH, generator=torch.Generator().manual_seed(int(positions[0])))
    noise[:, 3] = positions / 5
    return noise


def only_the_token(ids: Tensor, positions: Tensor) -> Tensor:
    return torch.randn(50, WIDTH, generator=torch.Generator().manual_seed(2))[ids]


def test_a_planted_order_is_found_and_the_control_finds_the_order_of_processing() -> None:
    found = probed(written(position_and_noise))
    for low in (64, 256, 1024):
        assert found[low, "features"] > 0.95
        assert 0.44 < found[low, "embeddings"] < 0.56
        assert found[low, "shuffled, order processed"] > 0.9  # some pairs are processed close together
        assert 0.4 < found[low, "shuffled, order in document"] < 0.6
    assert (4096, "features") not in found  # no input is that long


def test_features_without_a_position_stay_at_chance() -> None:
    found = probed(written(only_the_token))
    assert all(0.44 < accuracy < 0.56 for accuracy in found.values())


def test_shuffled_features_are_put_back_to_their_tokens() -> None:
    pair = written(only_the_token)
    asked = prompt(0)
    features = context_features(pair, asked.prompt_ids)
    found = collect(pair, asked, features, recent=100, count=200)
    assert sorted(pair.target.fed) == sorted(asked.prompt_ids)  # type: ignore[attr-defined]
    assert pair.target.fed != list(asked.prompt_ids)  # type: ignore[attr-defined]
    assert pair.target.fed[1280:] == list(asked.prompt_ids[1280:])  # type: ignore[attr-defined]  # 20 whole chunks
    for number in range(3):
        assert torch.equal(found.differences[number, "shuffled"], found.differences[number, "features"])
        assert not torch.equal(found.labels[number, "document"], found.labels[number, "processed"])


@pytest.mark.parametrize(("low", "high"), BINS[:3])
def test_pairs_lie_where_they_should(low: int, high: int) -> None:
    first, second = sample_pairs(1300, low, high, 4000, np.random.default_rng(0))
    apart = (first - second).abs()
    assert int(apart.min()) >= low and int(apart.max()) < high
    assert int(torch.minimum(first, second).min()) >= 0 and int(torch.maximum(first, second).max()) < 1300
    assert 0.46 < (first < second).float().mean() < 0.54
    # Uniform over pairs: a separation s has 1300 - s of them.
    separations = np.arange(low, min(high, 1300))
    expected = (separations * (1300 - separations)).sum() / (1300 - separations).sum()
    assert apart.float().mean() == pytest.approx(expected, rel=0.05)


def test_a_document_is_in_one_fold_and_folds_are_even() -> None:
    folds = folds_of([*(f"d{i}" for i in range(20)), "d3", "d3"])
    assert sorted(folds.values()) == sorted(list(range(FOLDS)) * 4)
    inputs = []
    for number in range(8):  # four documents only
        labels = torch.rand(30, generator=torch.Generator().manual_seed(number)) < 0.5
        both = {(0, "document"): labels, (0, "processed"): labels}
        inputs.append(Pairs(f"r{number}", f"d{number % 4}", {}, both))
    assert probe(inputs) == []


def test_a_short_input_has_no_pairs() -> None:
    pair = written(only_the_token)
    asked = prompt(0, length=160)
    assert collect(pair, asked, torch.zeros(160, WIDTH), recent=100, count=10).labels == {}


def test_an_accuracy_is_that_of_the_probe_which_has_not_seen_the_fold() -> None:
    """A signal with the opposite sign in one fold: its probe learned the other sign and must fail there."""
    draw = torch.Generator().manual_seed(0)
    labels = torch.rand(1000, generator=draw) < 0.5
    fold = torch.arange(1000) % FOLDS
    sign = torch.where(fold == 2, -1.0, 1.0) * torch.where(labels, 1.0, -1.0)
    x = torch.stack([sign, torch.randn(1000, generator=draw)], 1)
    right = order.train_probes(x, labels, fold)
    assert right[fold == 2].float().mean() < 0.05 and right[fold != 2].float().mean() > 0.95


def test_the_probe_is_torchs_adam_on_standardised_differences() -> None:
    draw = torch.Generator().manual_seed(0)
    x = 3 + torch.randn(300, 4, generator=draw) * torch.tensor([0.1, 1.0, 10.0, 5.0])
    labels = (x[:, 1] - 3 + 0.5 * torch.randn(300, generator=draw)) > 0
    fold = torch.arange(300) % FOLDS
    said = []
    for k in range(FOLDS):
        seen = fold != k
        mean, deviation = x[seen].mean(0), x[seen].std(0, correction=0)
        weight, bias = torch.zeros(4, requires_grad=True), torch.zeros(1, requires_grad=True)
        adam = torch.optim.Adam([weight, bias], lr=order.RATE)
        for _ in range(order.STEPS):
            adam.zero_grad()
            logits = (x[seen] - mean) / deviation @ weight + bias
            torch.nn.functional.binary_cross_entropy_with_logits(logits, labels[seen].float()).backward()
            adam.step()
        with torch.no_grad():
            said.append(((x - mean) / deviation @ weight + bias > 0) == labels)
    expected = torch.stack(said, 1).gather(1, fold[:, None])[:, 0]
    ours = order.train_probes(x, labels, fold)
    assert (ours != expected).sum() <= 1  # a pair on the very edge may round to the other side
