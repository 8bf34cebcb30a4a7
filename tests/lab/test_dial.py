"""Dial-a-bias: the components are what their docstrings say, and the statistics find what was put in."""

import itertools
import math

import numpy as np
import pandas as pd
import pytest
import torch
from lab.chapters import dial
from torch import nn


@pytest.mark.parametrize("where", ["aligned", "scrambled", "local"])
def test_components_have_mean_0_variance_1_and_are_uncorrelated(where):
    parts = torch.stack(list(dial.components(dial.inputs(8000, 5), where).values())).double()
    second = parts @ parts.T / parts.shape[1]
    assert parts.mean(1).abs().max() < 5 / math.sqrt(8000)
    assert (second - torch.eye(6)).abs().max() < 0.06


def test_components_against_plain_loops():
    x = dial.inputs(1, 3, side=4)
    X, c, h = x[0].double().numpy(), [1, 0, -1, 0], [1, 1, -1, -1]
    found = {name: float(v) for name, v in dial.components(x).items()}
    rows = sum(c[i] * X[i].mean() for i in range(4))
    assert found["row means"] == pytest.approx(rows / math.sqrt(2 / (12 * 4)), abs=1e-5)
    columns = sum(c[j] * X[:, j].var() for j in range(4))
    spread = np.var(dial.inputs(50_000, 1, 4)[:, 0].double().numpy(), axis=1).var()
    assert found["column variances"] == pytest.approx(columns / math.sqrt(2 * spread), rel=0.02)
    places = list(itertools.product(range(4), range(4)))
    checker = sum((-1) ** (i + j) * X[i, j] for i, j in places)
    assert found["checkerboard"] == pytest.approx(checker / math.sqrt(16 / 12), abs=1e-5)
    upper, left = (h @ X.sum(axis) > 0 for axis in (1, 0))
    assert found["xor"] == (1 if upper != left else -1)
    bits = X > 0.5
    differ = [bits[i, j] != bits[(i + 1) % 4, (j + 1) % 4] for i, j in places]  # neighbours
    wanted = sum(1 if d else -1 for d in differ) / 4
    assert float(dial.components(x, "local")["xor"]) == pytest.approx(wanted)


def test_scrambling_permutes_the_places_of_the_entangled_masks_only():
    aligned, scrambled = dial.masks("aligned"), dial.masks("scrambled")
    for name in aligned:
        assert torch.equal(aligned[name].flatten().sort()[0], scrambled[name].flatten().sort()[0])
        assert torch.equal(aligned[name], scrambled[name]) == name.endswith("means")


def test_fit_is_the_loop_written_out_with_torchs_adam():
    data = dial.draw("linear", 0.5, 100, 0, tests=10)  # 80 samples for training: 32, 32 and 16
    x, y = data.train
    torch.manual_seed(3)
    plain = nn.Sequential(nn.Flatten(), nn.Linear(1024, 1))
    adam = torch.optim.Adam(plain.parameters(), lr=2e-3)
    draw, errors = torch.Generator().manual_seed(4), []
    orders = [torch.randperm(80, generator=draw) for _ in range(3)]
    queue = [part for order in orders for part in (order[64:], order[32:64], order[:32])]
    for step, rows in enumerate(queue[:8]):
        adam.param_groups[0]["lr"] = 2e-3 * math.cos(math.pi / 2 * step / 8) ** 2
        error = ((plain(x[rows]) - y[rows]) ** 2).mean()
        adam.zero_grad()
        error.backward()
        adam.step()
        errors.append(error.item())
    torch.manual_seed(3)
    model, how = nn.Sequential(nn.Flatten(), nn.Linear(1024, 1)), {"lr": 2e-3, "batch_size": 32}
    curve, _ = dial.fit(model, data, schedule="cosine", steps=8, seed=4, checks=2, **how)
    sizes = [len(rows) for rows in queue]
    means = [np.average(errors[at : at + 4], weights=sizes[at : at + 4]) for at in (0, 4)]
    assert [p["train_mse"] for p in curve] == pytest.approx(means, rel=1e-5)
    val = ((plain(data.val[0]) - data.val[1]) ** 2).mean().item()
    assert curve[-1]["val_mse"] == pytest.approx(val, rel=1e-5)


def test_crossing_covers_the_truth_and_says_when_there_is_none():
    noise, at = np.random.default_rng(0).normal(0, 0.01, (5, 11)), np.linspace(0, 1, 11)
    found = dial.crossing(pd.DataFrame(at - 0.45 + noise, columns=at))
    assert found["low"] < found["alpha"] < found["high"]
    assert abs(found["alpha"] - 0.45) < 0.03 and found["once"] == 1
    assert dial.crossing(pd.DataFrame([[-1.0, 3.0]] * 3, columns=[0, 2]))["alpha"] == 0.5
    for other in (-1 + noise, 0.45 - at + 0 * noise):  # never, and downwards
        found = dial.crossing(pd.DataFrame(other, columns=at))
        assert math.isnan(found["alpha"]) and math.isnan(found["low"]) and found["once"] == 0


def test_reach_is_where_the_error_stays_below_the_goal():
    sizes = [100, 1000, 10_000]
    for goal, samples in ((0.1, 1000), (10**-0.5, 10**2.5), (1e-3, math.inf), (2, 100)):
        assert dial.reach(sizes, [1, 0.1, 0.01], goal) == pytest.approx(samples)
    again = dial.reach([*sizes, 100_000], [1, 0.01, 1, 0.01], 0.1)  # it must stay below
    assert again == pytest.approx(10**4.5)


def test_factors_between_models_whose_errors_are_known():
    """Errors fall as 100 / samples for one model and 400 / samples for the other; a third never gets anywhere."""
    rows = []
    for seed, n in itertools.product(range(5), (100, 1000, 10_000)):
        for model, error in (("ndlinear", 100 / n), ("dense", 400 / n), ("stuck", 0.9)):
            rows.append((model, 0.1, seed, n, error * (1 + 0.01 * seed)))
    runs = pd.DataFrame(rows, columns=["model", "alpha", "seed", "samples", "relative"])
    for more, than, ratio, bound in (
        ("dense", "ndlinear", 4, False),
        ("stuck", "ndlinear", 10_000 / 1020, True),
        ("ndlinear", "stuck", 1020 / 10_000, False),
    ):
        found = dial.factors(runs, more, than, 0.1, (0.1,))[0.1]
        assert found["ratio"] == pytest.approx(ratio, rel=0.01) and found["bound"] == bound
        assert found["low"] <= found["ratio"] <= found["high"]
    assert math.isnan(dial.factors(runs, "stuck", "stuck", 0.1, (0.1,))[0.1]["ratio"])
