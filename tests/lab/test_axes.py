"""Chapter 34: tables, samples and orders; the wide kernel, the flow and the terms of sums against independent formulas."""

import math

import lab
import numpy as np
import pandas as pd
import pytest
import scipy.integrate
import scipy.stats
import torch
from lab.chapters import axes

TABLE = axes.Table(np.random.default_rng(0).standard_normal((200, 4, 6)), np.arange(200) % 3)


@pytest.mark.parametrize("shape", [(8, 8), (16, 16), (5, 5), (3, 4), (3, 8, 8)])
def test_a_refolded_table_has_every_entry_once_and_other_neighbours(shape):
    index = axes.refold(shape)
    assert sorted(index) == list(range(math.prod(shape)))
    assert not np.array_equal(index, np.arange(len(index)))
    if shape in ((8, 8), (16, 16)):  # a transposed square has the same neighbours
        assert not np.array_equal(index.reshape(shape).T.flatten(), np.arange(len(index)))


def test_the_same_seed_draws_the_same_cases_in_each_order_scaled_by_the_training_part():
    kept, moved = (axes.sample(TABLE, "large", order, 5) for order in ("in place", "permuted"))
    index = axes.places((4, 6), "permuted", 5)
    assert torch.equal(kept.train[0][:, index], moved.train[0])
    assert torch.equal(kept.test[0][:, index], moved.test[0])
    assert torch.equal(kept.test[1], moved.test[1])
    assert not torch.equal(kept.train[0], moved.train[0])
    x = kept.train[0]
    assert x.mean(0).abs().max() < 1e-5 and (x.std(0, correction=0) - 1).abs().max() < 1e-5
    rare = axes.Table(99.0 * (np.arange(200) % 100 == 0)[:, None, None] * TABLE.x, TABLE.y)
    assert axes.sample(rare, "large", "in place", 5).train[0].abs().max() == axes.CLIP


def test_sizes_and_parts_do_not_exceed_the_cases():
    for count in (204, 303, 1797, 3000, 6000):
        sizes = [axes.parts_of(count, size) for size in axes.SIZES]
        assert all(sum(parts) <= count for parts in sizes)
        assert sizes[0][0] < sizes[1][0] < sizes[2][0] <= axes.MOST


@pytest.mark.parametrize("shape", [(5, 6), (3, 8, 8)])
def test_networks_answer_and_the_narrow_one_is_no_larger(shape):
    count = {}
    for arm in ("ndlinear", "monarch", "low-rank", "dense", "dense-params"):
        model = axes.network(arm, shape, 4)
        assert model(torch.randn(7, math.prod(shape))).shape == (7, 4)
        count[arm] = axes.size_of(model)
    wider = axes.narrow(shape, 4) + 1
    more = (math.prod(shape) + 1) * wider + (wider + 1) * wider + (wider + 1) * 4
    assert count["dense-params"] <= count["ndlinear"] < more


def test_a_turned_table_keeps_all_inner_products():
    found = axes.turned(TABLE, 3)
    one, other = (t.x.reshape(200, -1) for t in (TABLE, found))
    assert np.allclose(one @ one.T, other @ other.T, atol=1e-4)
    assert not np.allclose(one, other, atol=0.1)


# ------------------------------------------------------------------------------------------------------- what is judged
def test_the_rate_is_chosen_by_validation_and_the_gain_is_a_logarithm():
    rows = [
        ("in place", "ndlinear", 0.1, 1.0, 2.0),
        ("in place", "ndlinear", 0.2, 0.5, 3.0),
        ("permuted", "ndlinear", 0.1, 0.4, 6.0),
        ("permuted", "ndlinear", 0.2, 0.9, 1.0),
        ("in place", "dense", 0.1, 0.4, 1.5),
    ]
    found = pd.DataFrame(rows, columns=["order", "arm", "lr", "val_loss", "test_loss"])
    found = found.assign(data="d", size="large", samples=10, tested=20, pool=100)
    found = pd.concat([found.assign(seed=s, test_loss=found["test_loss"] * 2**s) for s in range(3)])
    chosen = axes.at_best_rate(found)
    assert np.allclose(axes.gains(chosen)["gain"], math.log(2))
    assert np.allclose(axes.ratios(chosen, "dense")["gain"], math.log(0.5))
    each = axes.gains(chosen).assign(gain=[0.1, 0.2, 0.6])
    row = axes.effects(each).iloc[0]
    half = scipy.stats.t.ppf(0.975, 2) * row["error"]
    wider = math.sqrt(np.var([0.1, 0.2, 0.6], ddof=1) * (1 / 3 + 20 / 80))  # Nadeau and Bengio
    assert row["gain"] == pytest.approx(0.3) and row["error"] == pytest.approx(wider)
    assert (row["low"], row["high"]) == pytest.approx((0.3 - half, 0.3 + half))


def test_pooled_against_a_grid_search_and_the_formula():
    values, errors = np.array([0.1, 0.5, -0.2, 0.3, 0.8]), np.array([0.1, 0.2, 0.1, 0.15, 0.1])

    def likelihood(between):  # restricted, by the multivariate normal of the contrasts
        contrast = np.linalg.svd(np.ones((1, 5)))[2][1:]
        covariance = contrast @ np.diag(errors**2 + between) @ contrast.T
        return scipy.stats.multivariate_normal(np.zeros(4), covariance).logpdf(contrast @ values)

    grid = np.linspace(0, 0.5, 501)
    between = grid[np.argmax([likelihood(b) for b in grid])]
    found = axes.pooled(values, errors)
    assert abs(found.between**2 - between) < 1e-3
    weight = 1 / (errors**2 + found.between**2)
    mean = (weight * values).sum() / weight.sum()
    spread = (weight * (values - mean) ** 2).sum() / 4 / weight.sum()
    half = scipy.stats.t.ppf(0.975, 4) * math.sqrt(spread)
    assert np.allclose(found[:3], (mean, mean - half, mean + half))
    assert found.new_low < found.low < found.high < found.new_high
    assert axes.pooled([0.1, 0.11, 0.09], [0.2, 0.2, 0.2]).between == 0


def test_rank_correlation_against_scipy_and_by_hand():
    a, b = [1, 2, 3, 4, 5, 6, 7], [2, 1, 3, 5, 4, 7, 6]
    found, p = axes.rank_correlation(a, b)
    assert abs(found - scipy.stats.spearmanr(a, b).statistic) < 1e-12 and 1 / 5040 < p < 0.01
    assert axes.rank_correlation(a, a[::-1]) == (pytest.approx(-1), 1)
    assert axes.rank_correlation(range(12), range(12))[1] < 1e-3


# --------------------------------------------------------------------------------------------------------------- kernel
def test_the_error_of_left_out_cases_against_leaving_them_out():
    torch.manual_seed(0)
    x, y = torch.randn(6, 3, 4).double(), torch.randn(6, 2).double()
    kernel = axes.axis_kernel(x, x, 50)
    scale = torch.linalg.eigvalsh(kernel).clamp_min(0).mean()
    found = []
    for ridge in torch.logspace(-5, 5, 11).double():
        error = 0.0
        for i in range(6):
            rest = [j for j in range(6) if j != i]
            system = kernel[rest][:, rest] + ridge * scale * torch.eye(5).double()
            error += (kernel[i, rest] @ torch.linalg.solve(system, y[rest]) - y[i]).square().mean()
        found.append(error.item() / 6)
    assert abs(axes.left_out_error(kernel, y) - min(found)) < 1e-8


def test_the_kernel_of_vectors_against_an_integral():
    a, b = torch.tensor([[1.0, 0.0]]).double(), torch.tensor([[0.6, 1.1]]).double()

    def inner(angle):
        v = np.array([math.cos(angle), math.sin(angle)])
        return max(0, v[0]) * max(0, v @ b[0].numpy())

    # E over a Gaussian plane: mean of r^2 is 2
    value = 2 * scipy.integrate.quad(inner, -math.pi, math.pi, limit=200)[0] / (2 * math.pi)
    assert abs(axes.relu_kernel(a, b).item() - value) < 1e-6


def test_the_kernel_sees_a_target_on_the_axes():
    torch.manual_seed(0)
    x = torch.randn(150, 6, 6).double()
    y = (x[:, 0, 0] * x[:, 0, 1] + x[:, 2, 3])[:, None]
    y = y - y.mean()
    moved = x.flatten(1)[:, torch.randperm(36)].view_as(x)
    assert axes.share_gain(x, x, y) == pytest.approx(0)
    assert abs(axes.kernel_gain(x, x, y, 8)) < 1e-9
    assert axes.share_gain(x, moved, y) != 0


# ------------------------------------------------------------------------------------------------------------------ flow
@pytest.mark.parametrize("start", [(0.2, 0.3, 0.5), (-0.2, 0.3, 0.5), (0.3, 0.3, 0.3, 0.3)])
def test_the_time_of_explosion_against_the_flow_itself(start):
    def flow(_, x):
        return [0.7 * np.prod(np.delete(x, k)) for k in range(len(x))]

    def large(_, x):
        return np.abs(x).max() - 1e4

    large.terminal = True
    found = scipy.integrate.solve_ivp(flow, (0, 1e3), start, events=large, rtol=1e-9, atol=1e-12)
    assert abs(found.t[-1] - axes.blow_up(0.7, start)) < 1e-3 * found.t[-1]


def test_the_loss_of_an_outer_product_is_half_the_squared_distance():
    sigma, weights = torch.tensor([1.0, 0.6]).double(), torch.randn(4, 3, 2).double()
    made = torch.einsum("ni,nj,nk->nijk", *weights.unbind(1))
    target = torch.einsum("r,ri,rj,rk->ijk", sigma, *[torch.eye(2).double()] * 3)
    loss = (made - target).square().flatten(1).sum(1) / 2
    assert torch.allclose(axes.outer_loss(sigma, weights), loss)


# ----------------------------------------------------------------------------------------------------------------- terms
def test_kruskals_rank():
    eye = torch.eye(4).double()
    assert (axes.k_rank(eye[:, :3]), axes.k_rank(eye[:, [0, 0, 1]])) == (3, 1)
    assert axes.k_rank(torch.cat([torch.eye(2), torch.ones(2, 1)], 1).double()) == 2
    assert axes.k_rank(torch.zeros(4, 2).double()) == 0


# ------------------------------------------------------------------------------------------------------------------ data
def test_tables_of_sensors_and_of_letters(monkeypatch):
    monkeypatch.setenv("NDL_MODE", "smoke")
    found = axes.tables("japanesevowels")
    assert found.x.shape == (640, 25, 12) and len(found.y) == 640
    counts = np.expm1(axes.letters(novels=2, length=100).x)
    assert np.allclose(counts.sum((1, 2)), 99)


def test_patches_hold_the_pixels_of_their_place(monkeypatch):
    monkeypatch.setenv("NDL_MODE", "smoke")
    data = lab.load("cifar10")
    found = axes.pictures("cifar10", "patches", count=5).x
    x = data.part("train")[0][:5].reshape(5, 3, 16, 2, 16, 2).mean((3, 5)) / 255
    assert np.allclose(found[2, 4 * 1 + 3].reshape(3, 4, 4), x[2, :, 4:8, 12:16], atol=1e-6)


def test_the_predictor_that_orders_the_gains_comes_first():
    sets = list("abcde")
    looks = pd.DataFrame({"data": sets * 2} | {n: [3, 1, 2, 5, 4] * 2 for n in axes.PREDICTORS})
    looks["share_gain"] = [0.9, 2.1, 3, 4, 5, 1.1, 1.9, 3, 4, 5]
    measured = pd.DataFrame({"data": sets, "gain": [0.1, 0.2, 0.3, 0.4, 0.5]})
    table = axes.ranked(looks, measured)
    assert table["predictor"][0] == "share_gain" and np.isclose(table["correlation"][0], 1)
    assert np.isclose(table["p"][0], 1 / 120)
