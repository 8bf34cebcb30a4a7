"""Forecasting: protocols without and with leak against plain loops, the Transformer as a formula, what is judged."""

import math

import numpy as np
import pandas as pd
import pytest
import torch
from lab.chapters import forecast
from scipy import stats as scipy_stats
from torch.nn import functional as F


@pytest.fixture
def table():
    return np.random.default_rng(0).normal(size=(400, 7)).cumsum(0)


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


def windows(scaled, starts):
    """Inputs and targets by hand."""
    x, y = ([scaled[i + a : i + b] for i in starts] for a, b in ((0, 24), (24, 36)))
    return np.stack(x)[..., :6], np.stack(y)[..., 6]


def test_shuffled_is_this_permutation_of_the_windows(table):
    scaled = (table - table.min(0)) / (table.max(0) - table.min(0))
    x, y = windows(scaled, range(0, 400 - 36, 2))  # the last window is left out
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(5)).numpy()
    half = len(x) // 2
    data = forecast.split("shuffled", table, 5, 2)
    assert data.val is data.test
    for part, rows in ((data.train, order[:half]), (data.val, order[half:])):
        assert np.allclose(part[0], x[rows], atol=1e-6)
        assert np.allclose(part[1], y[rows], atol=1e-6)


@pytest.mark.parametrize(("every", "every_test"), [(1, 1), (8, 2)])
def test_chronological_parts_are_scaled_by_the_first_and_in_order(table, every, every_test):
    low, high = table[:240].min(0), table[:240].max(0)
    data = forecast.split("chronological", table, 5, every)
    ends = {"train": (0, 240, every), "val": (240, 320, every), "test": (320, 400, every_test)}
    for name, (begin, end, step) in ends.items():
        wanted = windows((table - low) / (high - low), range(begin, end - 35, step))
        for found, by_hand in zip(getattr(data, name), wanted, strict=True):
            assert np.allclose(found, by_hand, atol=1e-6)


def test_a_reduction_is_the_mean_of_paired_ratios_and_its_p_value_the_largest_of_the_ways():
    arms = ["dense", "ndlinear", "text"]
    logs = pd.DataFrame(np.random.default_rng(0).normal(0, 0.3, (4, 3)), columns=arms)
    long = logs.rename_axis("seed").reset_index().melt("seed", var_name="model", value_name="mse")
    runs = long.assign(mse=np.exp(long["mse"]))
    share, low, high = forecast.reduction(runs, "mse", level=0.9)
    gaps = logs["ndlinear"] - logs["dense"]
    found = scipy_stats.ttest_1samp(gaps, 0).confidence_interval(0.9)
    ends = [gaps.mean(), found.high, found.low]
    assert [share, low, high] == pytest.approx([1 - math.exp(end) for end in ends])
    tests = [scipy_stats.ttest_1samp(logs["dense"] - logs[arm], -np.log(0.7)) for arm in arms[1:]]
    each = [test.pvalue if test.statistic < 0 else 1 for test in tests]
    assert forecast.p_value(runs, "mse", arms[1:], 0.3) == pytest.approx(max(each)) != min(each)
    assert forecast.p_value(runs, "mse", ["text"], -9.0) == 1  # it is not that much worse
