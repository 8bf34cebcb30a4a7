"""Chapter 24's helpers: gains against brute force, solvers against optimality conditions."""

import itertools

import numpy as np
import pytest
import torch
from lab.chapters import generalisation as axes


def test_axis_gain_is_the_quotient_over_all_signs():
    x = np.random.default_rng(3).standard_normal((8, 3, 5))
    signs = np.array(list(itertools.product((-1.0, 1.0), repeat=8)))
    sums = np.einsum("sm,mij->sij", signs, x - x.mean(0))
    exact = np.linalg.norm(sums, axis=(1, 2)).mean() / np.linalg.norm(sums, 2, axis=(1, 2)).mean()
    assert axes.axis_gain(x, draws=20_000) == pytest.approx(exact, rel=5e-3)
    turned = 3 * x @ np.linalg.qr(np.random.default_rng(5).standard_normal((5, 5)))[0] + 7
    assert axes.axis_gain(turned, draws=50) == pytest.approx(axes.axis_gain(x, draws=50))


@pytest.fixture
def planted():
    rng = np.random.default_rng(10)
    x = rng.standard_normal((60, 5, 4))
    return x, np.einsum("mij,i,j->m", x, rng.standard_normal(5), rng.standard_normal(4))


def test_ridge_path_solves_the_normal_equations(planted):
    x, y = planted
    flat = x.reshape(60, -1)
    for penalty, K in zip((1.0, 0.1), axes.ridge_path(x, y, (1.0, 0.1))):
        expected = np.linalg.solve(flat.T @ flat / 60 + penalty * np.eye(20), flat.T @ y / 60)
        assert np.allclose(K.ravel(), expected)


def test_nuclear_path_meets_its_optimality_conditions(planted):
    x, y = planted
    flat = x.reshape(60, -1)
    for penalty, K in zip((1.0, 0.1), axes.nuclear_path(x, y, (1.0, 0.1), steps=2000)):
        slope = (flat.T @ (flat @ K.ravel() - y) / 60).reshape(K.shape)
        assert np.linalg.norm(slope, 2) <= penalty * (1 + 1e-6)
        assert -(slope * K).sum() == pytest.approx(penalty * np.linalg.norm(K, "nuc"), rel=1e-6)


def test_nuclear_softmax_meets_its_optimality_conditions():
    rng = np.random.default_rng(11)
    x, y, penalty = rng.standard_normal((80, 4, 3)), rng.integers(0, 3, 80), 0.05
    K, bias = axes.nuclear_softmax(x, y, penalty, steps=4000)
    scores = torch.tensor(x.reshape(80, -1) @ K.reshape(3, -1).T + bias)
    off = (scores.softmax(1) - torch.nn.functional.one_hot(torch.tensor(y), 3)).numpy() / 80
    slope = np.einsum("mc,mij->cij", off, x).reshape(12, 3)
    assert np.abs(off.sum(0)).max() < 1e-7 and np.linalg.norm(slope, 2) <= penalty * (1 + 1e-5)
    assert -(slope * K).sum() == pytest.approx(penalty * np.linalg.norm(K, "nuc"), rel=1e-5)
