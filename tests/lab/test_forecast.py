"""Forecasting: protocols without and with leak against plain loops, the Transformer as a formula, what is judged."""

import math

import numpy as np
import pandas as pd
import pytest
import torch
from lab.chapters import forecast
from lab.modes import LabError
from lab.train import Split, seed_everything
from scipy import stats as scipy_stats
from torch.nn import functional as F

STARTS = ["dense", "ndlinear", "text"]


@pytest.fixture
def table():
    return np.random.default_rng(0).normal(size=(400, 7)).cumsum(0)


def test_too_few_rows_and_unknown_names_are_refused(table):
    with pytest.raises(LabError, match="35 rows"):
        forecast.windows(table[:35])
    with pytest.raises(LabError, match="no protocol"):
        forecast.split("random", table, 0, 1)
    with pytest.raises(LabError, match="not one of"):
        forecast.without_network("oracle", forecast.split("shuffled", table, 0, 1))


@pytest.mark.parametrize("training", [True, False])
def test_the_transformer_is_the_formula_with_dropout_of_a_tenth(training):
    net, x = forecast.transformer("dense-width").train(training), torch.randn(3, 24, 6)
    dropout = lambda t: F.dropout(t, 0.1, training)  # noqa: E731
    torch.manual_seed(1)
    found = net(x)
    torch.manual_seed(1)
    embedded, layer = x @ net.embed.weight.T + net.embed.bias, net.layer
    # in training the dropout of all positions is drawn otherwise
    asks = embedded[:, -1:] if training else embedded
    layer.attention.dropout = 0.1  # of the attention's weights, in training
    attended = layer.attention(asks, embedded, embedded)[0].contiguous()
    after = layer.norms[0](asks + dropout(attended))
    inner = layer.block[0](after)
    inner = dropout(inner * (1 + torch.erf(inner / math.sqrt(2))) / 2)
    expected = net.out(layer.norms[1](after + dropout(layer.block[-1](inner)))[:, -1])
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_shuffled_is_this_permutation_of_the_windows(table):
    scaled = (table - table.min(0)) / (table.max(0) - table.min(0))
    starts = range(0, 400 - 36, 2)  # the last window is left out
    x = torch.tensor(np.stack([scaled[i : i + 24, :6] for i in starts]), dtype=torch.float32)
    y = torch.tensor(np.stack([scaled[i + 24 : i + 36, 6] for i in starts]), dtype=torch.float32)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(5))
    half = len(x) // 2
    data = forecast.split("shuffled", table, 5, 2)
    assert data.val is data.test
    for part, rows in ((data.train, order[:half]), (data.val, order[half:])):
        assert torch.allclose(part[0], x[rows]) and torch.allclose(part[1], y[rows])


@pytest.mark.parametrize(("every", "every_test"), [(1, 1), (8, 2)])
def test_chronological_parts_are_scaled_by_the_first_and_in_order(table, every, every_test):
    low, high = table[:240].min(0), table[:240].max(0)
    scaled = (table - low) / (high - low)
    data = forecast.split("chronological", table, 5, every)
    ends = {"train": (0, 240, every), "val": (240, 320, every), "test": (320, 400, every_test)}
    for name, (begin, end, step) in ends.items():
        x, y = getattr(data, name)
        starts = range(begin, end - 35, step)
        assert np.allclose(x, np.stack([scaled[i : i + 24, :6] for i in starts]), atol=1e-6)
        assert np.allclose(y, np.stack([scaled[i + 24 : i + 36, 6] for i in starts]), atol=1e-6)


def test_a_low_shared_bias_switches_all_units_off():
    x = torch.rand(50, 24, 6)
    dead = {seed for seed in range(12) if forecast.starts_dead("ndlinear", seed, x)}
    assert 0 < len(dead) < 12
    for seed in range(12):
        seed_everything(seed)
        net = forecast.recurrent("ndlinear").eval()
        states = net.rnn(x)[0][:, -1]
        (W, w), (b, c) = net.head[1].weights, net.head[1].biases
        assert bool((((states @ W.T + b) * w + c) <= 0).all()) == (seed in dead)


def test_ridge_is_least_squares_with_rows_for_the_penalty():
    x, y = torch.randn(200, 24, 6).double() + 2, torch.randn(200, 12).double() + 3
    data = Split(*[(x.float(), y.float())] * 3)
    flat = x.flatten(1)
    rows = torch.cat([flat - flat.mean(0), 70**0.5 * torch.eye(144).double()])
    targets = torch.cat([y - y.mean(0), torch.zeros(144, 12).double()])
    expected = (flat - flat.mean(0)) @ torch.linalg.lstsq(rows, targets).solution + y.mean(0)
    assert torch.allclose(forecast.ridge(data, penalties=(70.0,)).double(), expected, atol=1e-4)


@pytest.fixture
def runs():
    """Errors of three arms on four seeds, and their logarithms."""
    logs = pd.DataFrame(np.random.default_rng(0).normal(0, 0.3, (4, 3)), columns=STARTS)
    long = logs.rename_axis("seed").reset_index().melt("seed", var_name="model", value_name="mse")
    return long.assign(mse=np.exp(long["mse"])), logs


def test_a_reduction_is_the_mean_of_paired_ratios(runs):
    frame, logs = runs
    share, low, high = forecast.reduction(frame, "mse", level=0.9)
    gaps = logs["ndlinear"] - logs["dense"]
    found = scipy_stats.ttest_1samp(gaps, 0).confidence_interval(0.9)
    ends = [gaps.mean(), found.high, found.low]
    assert [share, low, high] == pytest.approx([1 - math.exp(end) for end in ends])
    with pytest.raises(LabError, match="need the same seeds"):
        forecast.reduction(frame[1:], "mse")


def test_a_p_value_is_the_largest_over_the_ways_and_one_on_the_other_side(runs):
    frame, logs = runs
    found = {}
    for arm in STARTS[1:]:
        test = scipy_stats.ttest_1samp(logs["dense"] - logs[arm], -np.log(1 - 0.3))
        found[arm] = test.pvalue if test.statistic < 0 else 1
        assert forecast.p_value(frame, "mse", [arm], 0.3) == pytest.approx(found[arm])
    both = forecast.p_value(frame, "mse", STARTS[1:], 0.3)
    assert both == pytest.approx(max(found.values()))
    assert forecast.p_value(frame, "mse", ["text"], -9.0) == 1  # it is not that much worse
