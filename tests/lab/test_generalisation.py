"""Chapter 24's helpers: norms and gains against brute force, solvers against optimality conditions, the bound against hand counts."""

import itertools
import math

import numpy as np
import pytest
import torch
from lab.chapters import generalisation as axes
from torch import nn

from ndlinear import NdLinear


# ------------------------------------------------------------------------------------------------------------------- norms
def test_spectral_norm_of_matrices_is_the_largest_singular_value():
    matrices = np.random.default_rng(0).standard_normal((5, 4, 7))
    expected = np.linalg.norm(matrices, 2, axis=(1, 2))
    for shape in ((5, 4, 7), (5, 1, 4, 7), (5, 4, 1, 7, 1)):  # axes of length one change nothing
        lower, upper = axes.spectral(matrices.reshape(shape))
        assert np.allclose(lower, expected) and np.allclose(upper, expected)
    lower, upper = axes.spectral(matrices.reshape(5, 28))
    assert np.allclose(lower, np.linalg.norm(matrices, axis=(1, 2))) and np.allclose(upper, lower)


def test_bounds_of_three_axes_enclose_the_norm():
    tensor = np.random.default_rng(2).standard_normal((1, 2, 2, 2))
    angles = np.linspace(0, np.pi, 181)
    units = np.stack([np.cos(angles), np.sin(angles)])
    best = np.abs(np.einsum("ijk,ia,jb,kc->abc", tensor[0], units, units, units)).max()
    lower, upper = axes.spectral(tensor)
    assert lower[0] <= best * 1.001 and best <= upper[0] * (1 + 1e-12)
    turns = [np.linalg.qr(np.random.default_rng(n).standard_normal((n, 3)))[0] for n in (3, 4, 5)]
    lower, upper = axes.spectral(np.einsum("r,ir,jr,kr->ijk", [3.0, 2.0, 0.5], *turns)[None])
    assert (lower[0], upper[0]) == pytest.approx((3, 3))  # a sum of orthogonal terms


# ------------------------------------------------------------------------------------------------------------------- gains


def test_axis_gain_is_the_quotient_over_all_signs():
    x = np.random.default_rng(3).standard_normal((8, 3, 5))
    signs = np.array(list(itertools.product((-1.0, 1.0), repeat=8)))
    sums = np.einsum("sm,mij->sij", signs, x - x.mean(0))
    exact = np.linalg.norm(sums, axis=(1, 2)).mean() / np.linalg.norm(sums, 2, axis=(1, 2)).mean()
    gain = axes.axis_gain(x, draws=20_000)
    assert gain.low < exact < gain.high and gain.high - gain.low < 0.02
    turned = 3 * x @ np.linalg.qr(np.random.default_rng(5).standard_normal((5, 5)))[0] + 7
    assert axes.axis_gain(turned, draws=50).gain == pytest.approx(axes.axis_gain(x, draws=50).gain)
    common = np.einsum("mi,j->mij", x[:, 0], x[0, 0])  # outer products with one common side
    gain = axes.axis_gain(common, draws=50)
    assert (gain.gain, gain.ceiling) == (pytest.approx(1), pytest.approx(1))
    gain = axes.axis_gain(np.random.default_rng(6).standard_normal((30, 4, 4, 4)), draws=50)
    assert gain.low < gain.gain < gain.high and math.isnan(gain.ceiling)
    assert gain.gain <= 4 + 1e-9  # sqrt(64 / 4)


def test_ceiling_is_the_share_of_the_leading_direction():
    x = np.zeros((4, 2, 3))
    x[:2, 0, 0], x[2:, 1, 1] = (3, -3), (1, -1)  # rows: 9 to 1 of the energy; columns: two alike
    assert axes.ceiling(x) == pytest.approx(1 / math.sqrt(0.9))


def test_whitened_axes_have_flat_covariances():
    x = np.random.default_rng(7).standard_normal((4000, 4, 3)) * np.array([1, 2, 3, 4])[:, None]
    for covariance in axes.covariances(axes.whiten(x - x.mean(0), floor=0.0)):
        size = len(covariance)
        assert np.allclose(covariance / covariance.trace() * size, np.eye(size), atol=0.08)


def test_label_gain_rises_for_rank_one_targets_and_not_for_noise():
    rng = np.random.default_rng(8)
    x = rng.standard_normal((300, 12, 12))
    planted = np.einsum("mij,i,j->m", x, *rng.standard_normal((2, 12)))
    assert axes.label_gain(x, np.sign(planted)).gain > 1.2
    noise = [axes.label_gain(x, rng.standard_normal(300)).gain for _ in range(20)]
    assert abs(np.mean(noise) - 1) < 0.05
    scaled = axes.label_gain(x, 5 * planted + 2, draws=20).gain
    assert scaled == pytest.approx(axes.label_gain(x, planted, draws=20).gain)


# ----------------------------------------------------------------------------------------------------------------- solvers


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
    off = (scores.softmax(1) - nn.functional.one_hot(torch.tensor(y), 3)).numpy() / 80
    slope = np.einsum("mc,mij->cij", off, x).reshape(12, 3)
    assert np.abs(off.sum(0)).max() < 1e-7 and np.linalg.norm(slope, 2) <= penalty * (1 + 1e-5)
    assert -(slope * K).sum() == pytest.approx(penalty * np.linalg.norm(K, "nuc"), rel=1e-5)


# --------------------------------------------------------------------------------------------------------------- the bound
def test_steps_of_a_network_are_its_matrices_in_order():
    model = nn.Sequential(
        NdLinear((3, 4), (5, 2), transform_outer=False), nn.ReLU(), nn.Flatten(), nn.Linear(10, 2)
    )
    one, two, last = axes.network_steps(model)
    inner, outer = model[0].align_layers[1], model[0].align_layers[0]
    assert one.weight == pytest.approx(np.linalg.norm(inner.weight.detach().numpy(), 2), rel=1e-5)
    assert one.bias == pytest.approx(math.sqrt(3) * inner.bias.norm().item(), rel=1e-5)
    assert two.bias == pytest.approx(math.sqrt(2) * outer.bias.norm().item(), rel=1e-5)
    assert (one.numbers, two.numbers, last.numbers) == (4 * 2 + 2, 3 * 5 + 5, 22)
    with pytest.raises(TypeError, match="BatchNorm1d"):
        axes.network_steps(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)))


def test_covering_bound_of_one_matrix_by_hand():
    """One matrix of norm 2 and no bias: P = 6, Lambda = 2 * 4 = 8, l = 1, m = 10,000."""
    bound = axes.covering_bound([axes.Step(2.0, 0.0, 6)], radius=4.0, samples=10_000, lipschitz=1.0)
    nats = math.log(3 * 1 * 8 * 1 * 100)
    price = math.log(4 * 2) + math.log(4 * 1) + math.log(20)
    assert bound["nats"] == pytest.approx(nats)
    assert axes.output_radius([axes.Step(2.0, 1.0, 6), axes.Step(3.0, 0.5, 1)], 4.0) == 27.5
    assert bound["bound"] == pytest.approx(0.02 + math.sqrt((6 * nats + price) / 20_000))
    assert bound["least"] == pytest.approx(math.sqrt(6 * math.log(300) / 20_000))


def test_prices_of_all_powers_of_two_sum_to_less_than_one():
    assert sum(math.exp(-axes.power_of_two(2.0**i)[1]) for i in range(-1000, 1001)) < 1
    assert axes.power_of_two(5.0)[0] == 8 and axes.power_of_two(8.0)[0] == 8


def test_neighbour_stays_within_delta():
    torch.manual_seed(1)
    model, other = axes.small_network(True), axes.small_network(True)
    axes.neighbour(model, other, 0.1)
    for p, q in zip(model.parameters(), other.parameters()):
        moved = torch.linalg.norm(p - q, 2).item()
        assert moved == pytest.approx(0.1 * torch.linalg.norm(p, 2).item())


# -------------------------------------------------------------------------------------------------------- tasks and records
def test_tasks_are_centred_scaled_and_disjoint():
    (x, y), (v, _), (t, _) = axes.task("made up, smooth, 2 terms", "own", 100, seed=0)
    assert np.abs(x.mean(0)).max() < 1e-12 and np.square(x).sum((1, 2)).mean() == pytest.approx(1)
    assert set(np.unique(y)) == {-1.0, 1.0} and (len(x), len(v), len(t)) == (100, 100, 1000)
    assert not {row.tobytes() for row in x} & {row.tobytes() for row in (*v, *t)}


def test_shuffling_moves_entries_alike_in_all_samples():
    orders = ("own", "shuffled")
    own, moved = (axes.task("digits, even", o, 60, seed=3)[0][0].reshape(60, -1) for o in orders)
    assert not np.allclose(own, moved) and np.allclose(own @ own.T, moved @ moved.T)
