"""The benchmark: sizes by formula, samples, rates that grow, and its answers against code of its own on rows made up here."""

import math

import numpy as np
import pandas as pd
import pytest
import torch
from lab.benchmark import models, protocol, reading
from lab.benchmark.models import NONE, QUARTER, SMALL, Shape
from lab.data import with_axes
from lab.modes import LabError

from ndlinear import NdLinearSum
from ndlinear_guide.rates import rates

BUILT = [(k, b) for b, kinds in models.LAYERS.items() for k in kinds if k != "constant"]


# --------------------------------------------------------------------------------------------------------------- models
def test_budgets_are_those_of_ndlinear_and_of_a_quarter_of_dense():
    shape = Shape((16, 48), 10)
    ndlinear = 16 * 16 + 16 + 48 * 16 + 16 + 2 * (16 * 16 + 16) + 2570
    dense = 768 * 256 + 256 + 256 * 256 + 256 + 2570
    assert models.allowed(shape, SMALL) == int(1.05 * ndlinear)
    assert models.allowed(shape, QUARTER) == dense // 4
    assert models.layer_budgets(shape, QUARTER) == (769 * 256 // 4, 257 * 256 // 4)


@pytest.mark.parametrize(
    ("kind", "budget"), [b for b in BUILT if b[1] != NONE and b[0] != "ndlinear"]
)
def test_a_network_keeps_to_its_budget_and_no_larger_one_of_its_kind_would(kind, budget):
    """One step more of a layer's size, at the bias that was chosen, would break the budget."""
    shape = protocol.shape_of("digits")
    net, most = models.network(kind, shape, budget), models.allowed(shape, budget)
    if net is None:
        assert kind == "monarch" and budget == SMALL
        return
    assert models.size_of(net) <= most and net(torch.randn(3, 64)).shape == (3, 10)
    if kind in ("narrow", "convolution"):
        steps = {"narrow": lambda w: 65 * w + (w + 1) * w + (w + 1) * 10}
        steps["convolution"] = lambda w: 9 * w + w + 9 * w * w + w + 160 * w + 10
        width = net[0].out_features if kind == "narrow" else len(net.first.weight)
        assert models.size_of(net) == steps[kind](width) and steps[kind](width + 1) > most
        return
    left, hidden = most - models.size_of(net), models.HIDDEN[2]
    for part, axes in ((net[0], shape.axes), (net[2], hidden)):
        own = sum(w.numel() for w, *_ in getattr(part, "layer", part).matrices())
        larger = [s.weights for s in models.sizes(kind, axes, hidden) if s.weights > own]
        assert not larger or larger[0] - own > left


def test_the_sum_is_that_of_ndlinear_terms():
    own = models.KroneckerSum((3, 5), (4, 2), 6)
    other = NdLinearSum((3, 5), (4, 2), 6, bias=False)
    with torch.no_grad():
        for term, left, right in zip(other.terms, own.left, own.right):
            term.weights[0].copy_(left)
            term.weights[1].copy_(right)
        own.bias.zero_()
    x = torch.randn(7, 15)
    assert torch.allclose(own(x), other(x.view(7, 3, 5)).flatten(1), atol=1e-5)
    factors = rates(torch.nn.Sequential(own), 1.0)
    assert factors == {"0.left": 15 / (3 * 2), "0.right": 15 / (5 * 6 * 2), "0.bias": 1.0}


def test_the_layer_of_someone_else_is_refused_where_it_is_too_large_or_answers_in_another_shape():
    shape = protocol.shape_of("digits")

    def dense(axes, hidden, most):
        made = torch.nn.Linear(math.prod(axes), math.prod(hidden))
        return torch.nn.Sequential(torch.nn.Flatten(), made)

    assert models.network(dense, shape, SMALL) is None
    assert models.network(dense, shape, NONE)(torch.randn(2, 64)).shape == (2, 10)
    assert models.network(lambda *_: None, shape, NONE) is None
    with pytest.raises(LabError, match="in place of 256"):
        models.network(lambda axes, *_: torch.nn.Flatten(), shape, SMALL)


# ------------------------------------------------------------------------------------------------------------- protocol
TABLE = with_axes.Table(np.random.default_rng(0).standard_normal((400, 8, 8)), np.arange(400) % 10)


def test_a_turned_table_keeps_all_inner_products():
    one, other = (t.x.reshape(400, -1) for t in (TABLE, with_axes.turned(TABLE, 3)))
    assert np.allclose(one @ one.T, other @ other.T, atol=1e-4)
    assert not np.allclose(one, other, atol=0.1)


def test_cuts_draw_the_same_test_cases_for_both_sizes_and_orders_and_none_twice():
    parts = {s: protocol.parts_of(400, s) for s in protocol.SIZES}
    assert parts == {"small": (60, 30, 80), "large": (240, 80, 80)}
    assert protocol.parts_of(6000, "small") == (125, 62, 1000)
    large, small, moved = (
        protocol.sample(TABLE, size, order, 3)
        for size, order in (("large", "in place"), ("small", "in place"), ("large", "permuted"))
    )
    assert torch.equal(large.test[1], small.test[1]) and torch.equal(large.test[1], moved.test[1])
    assert not torch.equal(large.test[0], moved.test[0])
    assert torch.equal(large.test[0].sort(1).values, moved.test[0].sort(1).values)
    x = torch.cat([part[0] for part in (large.train, large.val, large.test)])
    assert len(torch.unique(x, dim=0)) == 400
    mean, deviation = large.train[0].mean(0), large.train[0].std(0, correction=0)
    assert mean.abs().max() < 1e-5 and (deviation - 1).abs().max() < 1e-5
    other = protocol.sample(TABLE, "large", "in place", 4)
    assert not torch.equal(other.test[1], large.test[1])


@pytest.mark.parametrize(
    ("best", "extra"), [(1e-3, []), (1e-2, [0.03]), (0.1, [0.03, 0.1, 0.3]), (3e-5, [3e-5, 1e-5])]
)
def test_rates_grow_at_the_end_where_the_best_one_lies_and_no_further(best, extra):
    def record(grid):
        rows = []
        for config in grid:
            losses = [1 + abs(math.log(lr / best)) for lr in config["rates"]]
            named = {f"val_loss_{i + 1}": loss for i, loss in enumerate(losses)}
            rows.append(config | named | {"curve": [{"step": 500} | named], "parameters": 1})
        return pd.DataFrame(rows)

    cell = dict(zip(protocol.CELL, ("digits", "small", "narrow", SMALL, "in place")))
    found = protocol.tried(record, [cell])
    assert sorted(found["lr"].unique()) == sorted([*protocol.RATES, *extra])
    grid = protocol.tested([cell], found)
    assert [c["lr"] for c in grid] == [best] * 10 and [c["seed"] for c in grid] == list(range(10))


# -------------------------------------------------------------------------------------------------------------- reading
def test_a_set_a_cut_or_a_layer_cannot_be_left_out():
    rows = reading.rows_on_disk()
    for gone, value in (("data", "japanesevowels"), ("seed", 9), ("layer", "blocks")):
        with pytest.raises(LabError, match=r"missing e\.g\."):
            reading.Rows(rows.tried, rows.ran[rows.ran[gone] != value])
    for more in (rows.ran[:1], rows.ran[:1].assign(data="a set of my own")):
        with pytest.raises(LabError, match="1 that do not belong"):
            reading.Rows(rows.tried, pd.concat([rows.ran, more]))


@pytest.mark.parametrize(("name", "factor"), [("turned", 2.0), ("teacher 1", 1e-3)])
def test_controls_agree_only_if_a_product_is_seen_and_turned_teachers_are_not(name, factor):
    rows = reading.rows_on_disk()
    moved = (rows.ran["data"] == name) & (rows.ran["order"] == "permuted")
    other = rows.ran.assign(test_loss=rows.ran["test_loss"] * np.where(moved, factor, 1))
    assert reading.controls_agree(rows)
    assert not reading.controls_agree(reading.Rows(rows.tried, other))


def test_a_race_looks_up_what_shorter_trainings_would_have_shown():
    curves = {
        ("a", 1e-3): [3, 3, 1],
        ("a", 3e-3): [4, 4, 4],
        ("b", 1e-3): [2, 2, 2],
        ("b", 3e-3): [5, 5, 5],
    }
    steps = (10, 40, 500)
    rows = pd.DataFrame(
        {"layer": k, "lr": lr, "curve": list(zip(steps, losses))}
        for (k, lr), losses in curves.items()
    )
    # four contestants, then two, then one: with one training the rounds take 42, 83 and 167 steps, with nine 375, 500 and 500
    assert reading.race(rows, 1) == "b"
    assert reading.race(rows, 9) == "a"
