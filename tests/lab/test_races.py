"""Chapter 64's test of the race: budgets of the cells, regret, ways of choosing."""

import math

import pandas as pd
import pytest
import torch
from lab.chapters import races
from lab.train import Split

import ndlinear_guide as guide

LIMITS = {"limit": "parameters", "share": 1 / 8}


@pytest.mark.parametrize("shape", [(16, 16), (27, 61)])
def test_a_narrower_pair_keeps_the_budget_of_both(shape):
    model, narrow = races.network(math.prod(shape), 5), races.limits(LIMITS, shape)
    net = guide.swap(model, races.PAIR, "narrow", **narrow)
    weights = net.first.weight.numel() + net.second.weight.numel()
    dense = model.first.weight.numel() + model.second.weight.numel()
    assert 0.9 * dense / 8 < weights <= dense / 8


def test_ndlinear_is_told_the_axes_of_the_data():
    limits = races.limits(LIMITS, (3, 8, 8))
    net = guide.swap(races.network(192, 2), races.PAIR, "ndlinear-axes", **limits)
    assert net.first.map.input_dims == (3, 8, 8)
    assert net.first.map.hidden_size == net.second.map.input_dims == (4, 8, 8)


def test_a_full_training_and_a_race_give_rows():
    x = torch.randn(120, 12)
    y = x[:, :3].argmax(1)
    parts = Split(*[(x[part], y[part]) for part in (slice(80), slice(80, 100), slice(100, 120))])
    common = {**LIMITS, "steps": 20, "seed": 0}
    row = races.full({**common, "kind": "low-rank", "lr": 1e-3}, (3, 4), parts)
    assert row["metrics"]["val_loss"] != row["metrics"]["test_loss"] and row["parameters"] > 0
    metrics = races.raced({**common, "budget": 3, "rates": [1e-3]}, (3, 4), parts)["metrics"]
    assert races.KINDS[metrics["kind"]] in races.kinds_of(LIMITS, (3, 4))
    assert metrics["rate"] == 1e-3


def losses(**means):
    noise = [-0.02, -0.01, 0.0, 0.01, 0.02]
    rows = {
        kind: [mean + n * (1 + i) for n in noise] for i, (kind, mean) in enumerate(means.items())
    }
    frame = pd.DataFrame(rows).T
    return frame.loc[frame.mean(axis=1).sort_values().index]


def test_regret():
    found = losses(monarch=1.0, blocks=1.015, ndlinear=1.3)
    assert races.regret(found, "monarch") == {"regret": 0.0, "good": True, "close": True}
    assert races.regret(found, "blocks")["close"]
    far = races.regret(found, "ndlinear")
    assert far == {"regret": pytest.approx(0.3), "good": False, "close": False}
    noisy = losses(monarch=1.0, blocks=1.05)
    noisy.loc["blocks"] = [0.7, 1.4, 0.8, 1.3, 1.05]
    assert races.regret(noisy, "blocks")["good"] and not races.regret(noisy, "blocks")["close"]


def test_ways_of_choosing():
    """Two cells of one set of data and one of another; block-diagonal layers, which the tree names for operations, do not fit."""
    cells = [("a", "small", "parameters", 0.125), ("b", "large", "operations", 0.25)]
    cells.append(("b", "small", "operations", 0.25))
    second = losses(**{"low-rank": 1.0}, monarch=1.2, ndlinear=2.0)
    found = dict(zip(cells, (losses(ndlinear=1.0, **{"low-rank": 1.5}), second, second)))
    rows = [
        dict(zip(races.CELL, cell)) | {"budget": 3, "kind": races.KINDS.index(kind)}
        for cell, kind in zip(cells, ("ndlinear", "monarch", "monarch"))
    ]
    chosen = races.choices(found, pd.DataFrame(rows))
    race = chosen[chosen["way"] == "race, 3"]
    assert race["regret"].tolist() == pytest.approx([0.0, 0.2, 0.2])
    tree = chosen[chosen["way"] == "tree"]
    assert tree["kind"].tolist() == ["ndlinear", "monarch", "monarch"]
    table = races.ways(chosen).set_index("way")
    assert set(table.index) == {"race, 3", "tree", "always low-rank", "always ndlinear"}
    assert table.loc["race, 3", "good"] == pytest.approx(1 / 3)
    low, high = table.loc["race, 3", ["good_low", "good_high"]]
    assert (low, high) == (0, 1)  # of two means, zero and one
    assert races.log_regret(chosen)["tree"] == pytest.approx(2 * math.log(1.2) / 3)
    leads = races.leading(chosen)
    assert leads[leads["best"]]["kind"].tolist() == ["ndlinear", "low-rank", "low-rank"]
