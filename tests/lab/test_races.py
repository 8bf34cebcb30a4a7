"""Chapter 64's test of the race: budgets of the cells, regret, ways of choosing."""

import math

import numpy as np
import pandas as pd
import pytest
import torch
from lab import guide
from lab.chapters import races
from lab.train import Split

CONFIGS = [{"limit": "parameters", "share": 1 / 8}, {"limit": "operations", "share": 1 / 4}]


def split(classes=3, inputs=12):
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(120, inputs, generator=draw)
    y = x[:, :classes].argmax(1)
    return Split(*[(x[part], y[part]) for part in (slice(80), slice(80, 100), slice(100, 120))])


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: c["limit"])
@pytest.mark.parametrize("shape", [(16, 16), (3, 8, 8), (23, 17)])
def test_every_kind_of_a_cell_keeps_its_budget(config, shape):
    model = races.network(math.prod(shape), 5)
    for kind in races.kinds_of(config, shape):
        net = guide.swap(model, races.PAIR, kind, **races.limits(config, shape))
        for dense, layer in ((model.first, net.first), (model.second, net.second)):
            most = config["share"] * dense.in_features * dense.out_features
            if kind == "narrow":  # both layers of the pair together
                continue
            weights = sum(weight.numel() for weight, _, _ in layer.matrices())
            cost = weights if config["limit"] == "parameters" else layer.multiply_adds()
            assert 0 < cost <= most, kind
        assert net(torch.randn(2, math.prod(shape))).shape == (2, 5)


def test_a_narrower_pair_keeps_the_budget_of_both():
    for shape in ((16, 16), (27, 61)):
        model, narrow = races.network(math.prod(shape), 5), races.limits(CONFIGS[0], shape)
        net = guide.swap(model, races.PAIR, "narrow", **narrow)
        weights = net.first.weight.numel() + net.second.weight.numel()
        dense = model.first.weight.numel() + model.second.weight.numel()
        assert 0.9 * dense / 8 < weights <= dense / 8


def test_ndlinear_is_told_the_axes_of_the_data():
    limits = races.limits(CONFIGS[0], (3, 8, 8))
    net = guide.swap(races.network(192, 2), races.PAIR, "ndlinear-axes", **limits)
    assert net.first.map.input_dims == (3, 8, 8)
    assert net.first.map.hidden_size == net.second.map.input_dims == (4, 8, 8)


def test_a_full_training_and_a_race_give_rows():
    config = {**CONFIGS[0], "kind": "low-rank", "lr": 1e-3, "steps": 20, "seed": 0}
    row = races.full(config, (3, 4), split())
    assert set(row["metrics"]) == {"val_loss", "test_loss"} and row["parameters"] > 0
    config = {**CONFIGS[0], "budget": 3, "rates": [1e-3], "steps": 20, "seed": 0}
    metrics = races.raced(config, (3, 4), split())["metrics"]
    assert races.KINDS[metrics["kind"]] in races.kinds_of(config, (3, 4))
    assert metrics["rate"] == 1e-3


def losses(**means):
    noise = np.array([-0.02, -0.01, 0.0, 0.01, 0.02])
    rows = {kind: mean + noise * (1 + i) for i, (kind, mean) in enumerate(means.items())}
    frame = pd.DataFrame(rows).T
    return frame.loc[frame.mean(axis=1).sort_values().index]


def test_regret():
    found = losses(monarch=1.0, blocks=1.015, ndlinear=1.3, blast=1.1)
    assert races.regret(found, "monarch") == {"regret": 0.0, "good": True, "close": True}
    assert races.regret(found, "blocks")["close"]
    far = races.regret(found, "ndlinear")
    assert far["regret"] == pytest.approx(0.3) and not far["good"] and not far["close"]
    noisy = losses(monarch=1.0, blocks=1.05)
    noisy.loc["blocks"] = [0.7, 1.4, 0.8, 1.3, 1.05]
    assert races.regret(noisy, "blocks")["good"] and not races.regret(noisy, "blocks")["close"]


def test_ways_of_choosing():
    cells = [("a", "small", "parameters", 0.125), ("b", "large", "operations", 0.25)]
    found = {
        cells[0]: losses(ndlinear=1.0, **{"low-rank": 1.5}),
        cells[1]: losses(**{"low-rank": 1.0}, monarch=1.2, ndlinear=2.0),
    }
    rows = [
        dict(zip(races.CELL, cell)) | {"budget": 3, "kind": races.KINDS.index(kind)}
        for cell, kind in zip(cells, ("ndlinear", "monarch"))
    ]
    chosen = races.choices(found, pd.DataFrame(rows))
    race = chosen[chosen["way"] == "race, 3"]
    assert race["regret"].tolist() == pytest.approx([0.0, 0.2])
    tree = chosen[chosen["way"] == "tree"]
    assert tree["kind"].tolist() == ["ndlinear", "monarch"]  # block-diagonal layers do not fit
    table = races.ways(chosen).set_index("way")
    assert set(table.index) == {"race, 3", "tree", "always low-rank", "always ndlinear"}
    assert table.loc["race, 3", "good"] == 0.5
    assert races.log_regret(chosen)["tree"] == pytest.approx(math.log(1.2) / 2)
    leads = races.leading(found)
    assert leads[leads["best"]]["kind"].tolist() == ["ndlinear", "low-rank"]
