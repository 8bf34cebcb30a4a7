"""Tables with axes, and means over data sets against independent formulas; evidence 34 checks the theorems of chapter 34."""

import math

import numpy as np
import scipy.stats
from lab import stats
from lab.data import with_axes

TABLE = with_axes.Table(np.random.default_rng(0).standard_normal((200, 4, 6)), np.arange(200) % 3)


def test_a_turned_table_keeps_all_inner_products():
    found = with_axes.turned(TABLE, 3)
    one, other = (t.x.reshape(200, -1) for t in (TABLE, found))
    assert np.allclose(one @ one.T, other @ other.T, atol=1e-4)
    assert not np.allclose(one, other, atol=0.1)


def test_pooled_against_a_grid_search_and_the_formula():
    values, errors = np.array([0.1, 0.5, -0.2, 0.3, 0.8]), np.array([0.1, 0.2, 0.1, 0.15, 0.1])

    def likelihood(between):  # restricted, by the multivariate normal of the contrasts
        contrast = np.linalg.svd(np.ones((1, 5)))[2][1:]
        covariance = contrast @ np.diag(errors**2 + between) @ contrast.T
        return scipy.stats.multivariate_normal(np.zeros(4), covariance).logpdf(contrast @ values)

    grid = np.linspace(0, 0.5, 501)
    between = grid[np.argmax([likelihood(b) for b in grid])]
    found = stats.pooled(values, errors)
    assert abs(found.between**2 - between) < 1e-3
    weight = 1 / (errors**2 + found.between**2)
    mean = (weight * values).sum() / weight.sum()
    spread = (weight * (values - mean) ** 2).sum() / 4 / weight.sum()
    half = scipy.stats.t.ppf(0.975, 4) * math.sqrt(spread)
    assert np.allclose(found[:3], (mean, mean - half, mean + half))
    assert found.new_low < found.low < found.high < found.new_high
    assert stats.pooled([0.1, 0.11, 0.09], [0.2, 0.2, 0.2]).between == 0
