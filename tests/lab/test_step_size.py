"""Chapter 15: what a row keeps of a training, its data, and which rates and answers are read from rows."""

import itertools
import math

import lab
import pandas as pd
import pytest
import torch
from lab.chapters import step_size
from lab.train import loop, many
from torch import nn

from ndlinear import NdLinear
from ndlinear_guide.rates import lr_groups


def regression(seed, count=40):
    g = torch.Generator().manual_seed(seed)
    x = torch.rand(3 * count, 4, 3, generator=g)
    y = x.square().sum((1, 2))
    return lab.Split(*[(x[i : i + count], y[i : i + count]) for i in (0, count, 2 * count)])


def small():
    layers = NdLinear((4, 3), (4, 2)), nn.ReLU(), NdLinear((4, 2), (1, 1)), nn.Flatten(0)
    return nn.Sequential(*layers)


def test_a_row_has_the_scores_of_the_best_epoch_and_says_who_diverged():
    """Seed 4 gets inputs that overflow, seed 3 a validation part that gets worse and worse; the plain loop has the best epoch."""

    def data(seed):
        s = regression(seed)
        if seed == 4:
            return lab.Split((s.train[0] * 1e30, s.train[1]), s.val, s.test)
        return lab.Split(s.train, (s.val[0], s.val[1] * 0), s.test)

    plan = many.Plan(epochs=4, batch=16, lr=step_size.by_rule(0.02))
    configs = [{"seed": 3}, {"seed": 4}]
    good, bad = step_size.outcomes(configs, small, data, plan, step_size.squared_error)
    assert bad["metrics"]["diverged"] == 1 and bad["metrics"]["train_loss"] == step_size.WORST
    torch.manual_seed(3)
    model, part = small(), data(3)
    steps, order = torch.optim.Adam(lr_groups(model, 0.02)), torch.Generator().manual_seed(3)
    by_epoch = []
    for _ in range(4):
        for _loss in loop.epoch(model, part.train, step_size.squared_error, steps, order, 16):
            pass
        with torch.no_grad():
            pairs = part.val, part.test
            by_epoch.append([step_size.squared_error(model(x), y).item() for x, y in pairs])
    best = min(range(4), key=lambda e: by_epoch[e][0])
    found = good["metrics"]
    assert best < 3 and found["best_epoch"] == best + 1 and found["diverged"] == 0
    assert [found["val_loss"], found["test_loss"]] == pytest.approx(by_epoch[best], rel=1e-3)
    assert good["parameters"] == 4 * 4 + 2 * 3 + 4 + 2 + 4 + 2 + 2 and good["macs"] > 0


def test_percent_is_of_the_geometric_mean_and_paired():
    a = pd.DataFrame({"seed": [0, 1, 2], "loss": [1.1, 2.2, 4.4]})
    b = pd.DataFrame({"seed": [2, 1, 0], "loss": [4.0, 2.0, 1.0]})
    assert step_size.percent(a, b, "loss") == pytest.approx((10, 10, 10))


def test_base_answers_pair_by_seed_at_each_base_rate_and_at_the_best_of_each():
    made_up = {  # arm, rates, base rate -> training loss, accuracies of two seeds
        ("dense", "one rate", 1.0): (5.0, 0.50, 0.40),
        ("dense", "one rate", 3.0): (4.0, 0.60, 0.50),
        ("ndlinear", "rule", 1.0): (2.0, 0.70, 0.61),
        ("ndlinear", "rule", 3.0): (9.0, 0.55, 0.47),
        ("ndlinear", "one rate", 1.0): (9.0, 0.40, 0.50),
    }
    rows = [
        ("A", *key, seed, loss, value)
        for key, (loss, *values) in made_up.items()
        for seed, value in enumerate(values)
    ]
    names = ["data", "arm", "rates", "lr", "seed", "train_loss", "test_accuracy"]
    runs = pd.DataFrame(rows, columns=names)
    found = step_size.base_answers(runs, {"A": "test_accuracy"}, (1.0, 3.0))
    found = found.set_index(["rates", "base"])
    rule = itertools.product(["rule"], [1.0, 3.0, "best"])
    assert set(found.index) == {*rule, ("one rate", 1.0)}  # one base rate has no best
    at = found["mean"]
    assert at["rule", 1.0] == pytest.approx(20.5) and at["rule", 3.0] == pytest.approx(-4.0)
    assert at["rule", "best"] == pytest.approx(10.5)  # 1 by the rule against 3
    half = 0.5 * 12.7062  # half the difference of two values, times the t quantile of one degree
    assert found["high"]["rule", 1.0] == pytest.approx(20.5 + half, rel=1e-4)
    assert (found["answer"]["rule", 1.0], found["answer"]["one rate", 1.0]) == ("higher", "open")


def test_rates_serve_where_the_best_ones_are_neighbours_inside_the_grid():
    best = {  # network, width -> the base rate of the lowest loss, of 1, 2, 4, 8, 16
        ("dense", "small"): 2,
        ("dense", "large"): 4,
        ("N = 2", "small"): 8,
        ("N = 2", "large"): 16,
    }
    rows = [
        ("rule", "digits", *cell, lr, abs(math.log2(lr / at)))
        for cell, at in best.items()
        for lr in (1, 2, 4, 8, 16)
    ]
    names = ["rates", "task", "network", "width", "lr", "train_loss"]
    found = step_size.served(pd.DataFrame(rows, columns=names))
    counts = found.groupby("kind")["served"].agg(["sum", "count"])
    # widths: 2 and 4, but 8 and an end; modes: 2 and 8, 4 and an end
    assert counts.loc["width"].tolist() == [1, 2] and counts.loc["modes"].tolist() == [0, 2]
