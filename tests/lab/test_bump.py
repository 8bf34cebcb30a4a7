"""Radius Bump: target, constant answers, rank correlations."""

import itertools
import math

import numpy as np
import pandas as pd
import pytest
import torch
from lab.chapters import bump
from scipy import stats


def test_target_depends_on_the_length_alone():
    x = bump.inputs(50, 0)
    turned = x @ torch.linalg.qr(torch.randn(10, 10)).Q
    torch.testing.assert_close(bump.target(x, 0.2), bump.target(turned, 0.2), rtol=1e-3, atol=1e-7)
    at = torch.zeros(3, 10)
    at[:, 4] = torch.tensor([0.8, 1.0, 0.5])
    expected = [1.0, math.exp(-0.5), math.exp(-0.09 / 0.08)]
    assert bump.target(at, 0.2).tolist() == pytest.approx(expected, rel=1e-5)


def test_rays_are_the_uniform_inputs_of_radius_bump():
    p, r, w = bump.rays()
    mean = lambda f: float(p @ (f(r) @ w))  # noqa: E731
    assert mean(torch.ones_like) == pytest.approx(1, abs=1e-12)
    assert mean(torch.square) == pytest.approx(10 / 3, rel=1e-6), "E |x|^2"
    assert mean(lambda r: r**4) == pytest.approx(12, rel=1e-3), "E |x|^4 = 10 / 5 + 90 / 9"


def test_constant_errors_agree_with_a_sample():
    y = bump.target(bump.inputs(400_000, 5), 0.3).double()
    found, error = bump.constant_errors(0.3), 4 / math.sqrt(len(y))
    assert found["zero"] == pytest.approx((y**2).mean().item(), abs=error * (y**2).std().item())
    mean = found["mean of the target"]
    assert mean == pytest.approx(y.mean().item(), abs=error * y.std().item())
    assert found["mean"] == pytest.approx(found["zero"] - mean**2)
    spread = y.reshape(-1, 200).square().mean(1).std().item()  # over drawn test sets
    assert bump.spread_of_zero(0.3, 200) == pytest.approx(spread, rel=0.05)
    often = (y > 0.1).double().mean().item()
    assert bump.constants()["P(y > 0.1)"][0.3] == pytest.approx(often, rel=0.03)


def test_rank_correlation_is_the_mean_over_groups_of_equal_seeds():
    """Errors that rise with the entropy and know nothing of the noise; one group lacks a seed and does not count."""
    random = np.random.default_rng(0)
    groups = itertools.product((0.1, 0.3), (("dense", 16), ("ndlinear", 16), ("dense", 4)), (2, 3))
    rows = [
        (sigma, arm, width, depth, seed, *random.random(2))
        for sigma, (arm, width), depth in groups
        for seed in range(6)
        if (width, seed) != (4, 5)
    ]
    runs = pd.DataFrame(rows, columns=[*bump.GROUP, "seed", "entropy", "noise"])
    runs["error"] = 2 + 0.01 * runs["entropy"]
    assert bump.rank_correlation(runs, "entropy", "error") == pytest.approx((1, 1, 1))
    mean, low, high = bump.rank_correlation(runs, "noise", "error")
    whole = runs[runs["width"] == 16].groupby(bump.GROUP)
    by_scipy = [stats.spearmanr(own["noise"], own["error"]).statistic for _, own in whole]
    assert mean == pytest.approx(np.mean(by_scipy))
    assert low < 0 < high and high - low > 0.1
    assert bump.rank_correlation(runs.assign(noise=1.0), "noise", "error") == (0, 0, 0)
