"""Algorithm 1 against one einsum and a closed form of its biases; its dense equivalents, nearest Kronecker products, counts, orders."""

import copy
import functools
import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ndlinear_cases import (
    QUICK,
    Conv1D,
    batches,
    bias_by_formula,
    by_einsum,
    layers,
    randomise,
    reference,
    shapes,
    sums,
)
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import ndlinear as nd
import ndlinear_lora

close = {"atol": 1e-10, "rtol": 1e-10}


def dense(rows, columns, bias=True, dtype=torch.float64):
    torch.manual_seed(0)
    return randomise(nn.Linear(columns, rows, bias, dtype=dtype))


# -------------------------------------------------------------------------------------- Algorithm 1 and its dense equivalents
@QUICK
@given(st.one_of(layers(), sums()), batches)
def test_the_dense_equivalent_of_a_layer_or_a_sum(layer, batch):
    """Its weight is the derivative of the formula by the input, its bias the value at zero; both with their gradients, or copied."""
    d, h = math.prod(layer.input_dims), math.prod(layer.hidden_size)
    x = torch.randn(*batch, *layer.input_dims, dtype=torch.float64)
    y = layer(x)
    assert y.is_contiguous()
    torch.testing.assert_close(y, reference(layer, x), **close)
    units = torch.eye(d, dtype=torch.float64).reshape(d, *layer.input_dims)
    at_zero = reference(layer, 0 * units[0])
    columns = (reference(layer, units) - at_zero).reshape(d, h)
    weight, bias = nd.kronecker_weight(layer), nd.total_bias(layer)
    torch.testing.assert_close(weight, columns.T, **close)
    torch.testing.assert_close(bias, at_zero, **close)
    losses = (
        weight.square().sum() + bias.square().sum(),
        columns.square().sum() + at_zero.square().sum(),
    )
    parameters = [*layer.parameters()]
    found, wanted = (torch.autograd.grad(loss, parameters, allow_unused=True) for loss in losses)
    for ours, theirs in zip(found, wanted):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)
    before, linear = copy.deepcopy(layer.state_dict()), nd.to_linear(layer)
    has_bias = any(name.endswith("bias") for name in before)
    assert type(linear) is nn.Linear and (linear.bias is not None) == has_bias
    assert (linear.in_features, linear.out_features) == (d, h) and linear.weight.requires_grad
    rows = reference(layer, units).reshape(d, h)
    torch.testing.assert_close(linear(units.reshape(d, d)), rows, **close)
    nn.init.zeros_(linear.weight)
    assert all(torch.equal(value, before[name]) for name, value in layer.state_dict().items())
    if isinstance(layer, nd.NdLinear):
        count = sum(value.numel() for value in before.values())
        assert count == nd.count_parameters(layer.input_dims, layer.hidden_size, has_bias)


@QUICK
@given(shapes(4), batches, st.randoms(use_true_random=False))
def test_function_follows_any_order(shape, batch, random):
    dims, hidden = shape
    weights = [torch.randn(h, d, dtype=torch.float64) for d, h in zip(dims, hidden)]
    biases = [torch.randn(h, dtype=torch.float64) for h in hidden]
    some = [b if random.random() < 0.7 else None for b in biases]
    zeros = [torch.zeros_like(b) if own is None else b for b, own in zip(biases, some)]
    order = random.sample(range(len(dims)), len(dims))
    x = torch.randn(*batch, *dims, dtype=torch.float64)
    y, product = nd.ndlinear(x, weights, some, order), by_einsum(x, weights)
    assert y.is_contiguous()
    torch.testing.assert_close(y, product + bias_by_formula(weights, zeros, order), **close)
    torch.testing.assert_close(nd.ndlinear(x, weights, None, order), product, **close)


@pytest.mark.parametrize("mode", range(-4, 4))
@pytest.mark.parametrize("bias", [False, True])
def test_mode_product_counts_axes_like_torch(mode, bias):
    x = torch.randn(2, 3, 4, 5, dtype=torch.float64)
    weight = torch.randn(6, x.shape[mode], dtype=torch.float64)
    b = torch.randn(6, dtype=torch.float64) if bias else None
    y = torch.tensordot(x, weight, dims=([mode], [1]))
    want = (y + b if bias else y).movedim(-1, mode)
    torch.testing.assert_close(nd.mode_product(x, weight, mode, b), want, **close)


# ---------------------------------------------------------------------------------------------------- nearest Kronecker
def kron_sum(terms):
    return sum(functools.reduce(torch.kron, term) for term in terms)


def blocks(matrix, dims, hidden):
    """The rearrangement for N = 2 written with blocks: row (h_1, d_1) is the flattened block (h_1, d_1) of the matrix."""
    (d1, d2), (h1, h2) = dims, hidden
    rows = [
        matrix[i * h2 : (i + 1) * h2, j * d2 : (j + 1) * d2].flatten()
        for i in range(h1)
        for j in range(d1)
    ]
    return torch.stack(rows)


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
@pytest.mark.parametrize("dims, hidden", [((4, 5), (3, 2)), ((5, 1), (2, 3)), ((1, 4), (1, 3))])
def test_two_modes_are_solved_exactly(dims, hidden, dtype):
    matrix = torch.randn(math.prod(hidden), math.prod(dims), dtype=dtype)
    values = torch.linalg.svdvals(blocks(matrix, dims, hidden))
    for rank in range(1, len(values) + 1):
        terms, error = nd.nearest_kronecker(matrix, dims, hidden, rank)
        assert len(terms) == rank
        assert all(f.shape == (h, d) for term in terms for f, h, d in zip(term, hidden, dims))
        assert error == pytest.approx((values[rank:].norm() / matrix.norm()).item(), abs=1e-12)
        apart = (matrix - kron_sum(terms)).norm() / matrix.norm()
        assert error == pytest.approx(apart.item(), abs=1e-12)
    assert error < 1e-12, "that many terms represent every matrix"
    half = matrix.to(torch.bfloat16).requires_grad_()
    if dtype is torch.float64:  # computed in double, and the matrix is left alone
        before = half.detach().clone()
        (term,), error = nd.nearest_kronecker(half, dims, hidden)
        assert {(f.dtype, f.requires_grad) for f in term} == {(torch.bfloat16, False)}
        values = torch.linalg.svdvals(blocks(before.double(), dims, hidden))
        assert error == pytest.approx((values[1:].norm() / values.norm()).item(), rel=1e-9)
        assert torch.equal(half.detach(), before)
    words = f"rank {len(values) + 1} .* rank {len(values)} represents every matrix"
    with pytest.raises(ValueError, match=words):
        nd.nearest_kronecker(matrix, dims, hidden, len(values) + 1)


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
def test_three_modes_end_where_no_factor_can_be_better(dtype):
    torch.manual_seed(0)
    matrix = torch.randn(12, 12, dtype=dtype)
    (term,), error = nd.nearest_kronecker(matrix, (2, 3, 2), (3, 2, 2), sweeps=5000, tol=1e-16)
    free = [f.clone().requires_grad_() for f in term]
    distance = (matrix - functools.reduce(torch.kron, free)).norm() / matrix.norm()
    assert distance.item() == pytest.approx(error)
    assert all(g.abs().max() < 1e-5 for g in torch.autograd.grad(distance, free)), "stationary"


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64, torch.complex128])
@pytest.mark.parametrize(
    "dims, hidden, rank",
    [
        ((3,), (4,), 1),
        ((4, 5), (3, 2), 1),
        ((2, 1, 3, 2), (2, 2, 1, 3), 1),
        ((3, 2, 3), (2, 3, 2), 2),
        ((2, 3, 2), (3, 2, 2), 0),
    ],
)
def test_an_exact_sum_of_products_is_found(dims, hidden, rank, dtype):
    """One product to the last digit, two of three modes by many sweeps, and the zero matrix."""
    torch.manual_seed(0)
    tol = 1e-4 if rank == 2 else 1e-6 if dtype is torch.complex64 else 1e-12
    matrix = torch.zeros(math.prod(hidden), math.prod(dims), dtype=dtype)
    for _ in range(rank):
        factors = [torch.randn(h, d, dtype=dtype) for h, d in zip(hidden, dims)]
        matrix = matrix + functools.reduce(torch.kron, factors)
    search = {"restarts": 5, "sweeps": 3000, "tol": 1e-18} if rank == 2 else {}
    terms, error = nd.nearest_kronecker(matrix, dims, hidden, max(rank, 1), **search)
    apart = (matrix - kron_sum(terms)).norm()
    assert error < tol and apart <= 100 * tol * matrix.norm()
    assert rank < 2 or nd.nearest_kronecker(matrix, dims, hidden)[1] > 0.1
    for term in terms:
        assert all(factor.dtype == dtype and (rank or not factor.any()) for factor in term)
        norms = [factor.norm().item() for factor in term]
        assert norms == pytest.approx([norms[0]] * len(norms)), "all factors have the same norm"


def test_restarts_never_hurt_and_are_seeded():
    """On matrices where the singular vectors lead to a poor local optimum; more sweeps do not hurt either."""
    gains = []
    for seed in (3, 11, 16):
        torch.manual_seed(seed)
        matrix = torch.randn(27, 8, dtype=torch.float64)
        find = functools.partial(nd.nearest_kronecker, matrix, (2, 2, 2), (3, 3, 3), tol=1e-8)
        one, many = find()[1], find(restarts=6)[1]
        assert many <= one < find(sweeps=1)[1] and many == find(restarts=6)[1]
        gains.append(one - many)
    assert max(gains) > 1e-3


# --------------------------------------------------------------------------------------------------------- from_linear
@pytest.mark.filterwarnings("ignore:Complex modules are a new feature")
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
@pytest.mark.parametrize("dims, hidden", [((4, 5), (3, 4)), ((2, 3, 2), (2, 3, 2))])
def test_rank_one_bias_is_the_least_squares_fit(dims, hidden, dtype):
    linear = dense(math.prod(hidden), math.prod(dims), dtype=dtype)
    layer = nd.NdLinear.from_linear(linear, dims, hidden)
    unit = torch.eye(sum(hidden), dtype=dtype)
    columns = [
        bias_by_formula(layer.weights, row.split(hidden), range(len(dims))).flatten()
        for row in unit
    ]
    basis, target = torch.stack(columns, 1).detach().numpy(), linear.bias.detach().numpy()
    best = basis @ np.linalg.lstsq(basis, target, rcond=None)[0]
    np.testing.assert_allclose(nd.total_bias(layer).detach().flatten().numpy(), best, atol=1e-10)
    error = np.linalg.norm(target - best) / np.linalg.norm(target)
    assert layer.approximation.bias_error == pytest.approx(error) and 0.01 < error < 1


@pytest.mark.filterwarnings("ignore:Complex modules are a new feature")
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
@pytest.mark.parametrize("rank", [1, 5, 12])
@pytest.mark.parametrize(("kind", "bias"), [(nn.Linear, True), (nn.Linear, False), (Conv1D, True)])
def test_more_terms_and_the_full_bias(rank, kind, bias, dtype):
    class Mine(nd.NdLinearSum):
        pass

    given = linear = dense(12, 20, bias, dtype)
    if kind is Conv1D:  # GPT-2's dense layer: its weight is (inputs, outputs)
        given = Conv1D(12, 20).to(dtype)
        given.load_state_dict({"weight": linear.weight.t(), "bias": linear.bias})
    layer = Mine.from_linear(given, (4, 5), (3, 4), rank)
    values = torch.linalg.svdvals(blocks(linear.weight, (4, 5), (3, 4)))
    error = (values[rank:].norm() / values.norm()).item()
    assert layer.approximation.weight_error == pytest.approx(error, abs=1e-12)
    assert layer.approximation.bias_error == 0 and layer.rank == len(layer.terms) == rank
    assert type(layer) is Mine and repr(layer).startswith("Mine((4, 5), (3, 4), ")
    x = torch.randn(7, 20, dtype=dtype)
    gap = (layer(x.unflatten(1, (4, 5))).flatten(1) - linear(x)).abs().max()
    assert gap < 1e-10 if rank == 12 else gap > 1e-2
    if bias:
        assert torch.equal(layer.bias.flatten(), linear.bias)
    if rank > 1:
        count = sum(value.numel() for value in layer.parameters())
        assert count == nd.count_parameters((4, 5), (3, 4), bias, rank)
        cure = rf"NdLinearSum.from_linear\(linear, \(4, 5\), \(3, 4\), rank={rank}\)"
        with pytest.raises(ValueError, match=cure):
            nd.NdLinear.from_linear(linear, (4, 5), (3, 4), rank)


def test_fits_pass_the_search_on_and_neither_they_nor_dense_equivalents_draw_random_numbers():
    linear = nn.Linear(12, 8, dtype=torch.bfloat16)
    layer, adapter = nd.NdLinear((2, 3), (3, 2)), ndlinear_lora.NdLinearLoRA(nn.Linear(4, 6))
    state = torch.get_rng_state()
    nd.to_linear(layer)
    adapter.merge()
    nd.NdLinearSum.from_linear(linear, (3, 4), (2, 4), rank=2)
    sizes = ((2, 3, 2), (2, 2, 2))
    rough = nd.NdLinear.from_linear(linear, *sizes, sweeps=1)
    fine = nd.NdLinear.from_linear(linear, *sizes, restarts=20)
    assert torch.equal(torch.get_rng_state(), state)
    assert 0 < fine.approximation.weight_error < rough.approximation.weight_error < 1
    assert all(p.dtype == torch.bfloat16 and p.requires_grad for p in fine.parameters())
    assert layer.approximation is None


# ---------------------------------------------------------------------------------------------------- orders and counts
@QUICK
@given(shapes())
def test_cheapest_order_by_trying_all(shape):
    dims, hidden = shape
    costs = {}
    for order in itertools.permutations(range(len(dims))):
        size, macs = list(dims), 0
        for k in order:  # every output entry of a mode product costs D_k multiply-adds
            size[k] = hidden[k]
            macs += math.prod(size) * dims[k]
        costs[order] = macs
        assert nd.count_macs(dims, hidden, order) == macs
    least = min(costs.values())
    assert costs[nd.cheapest_order(dims, hidden)] == least
    assert nd.count_macs(dims, hidden) == costs[tuple(range(len(dims)))]
    for outer in (True, False):
        layer = nd.NdLinear(dims, hidden, outer)
        assert layer.order == tuple(sorted(range(len(dims)), reverse=not outer))
        assert costs[layer.execution_order] == least
        assert (layer.execution_order == layer.order) == (costs[layer.order] == least)


@pytest.mark.parametrize("size", [2, 256])
@pytest.mark.parametrize(
    "dims, hidden", [((7, 2), (2, 7)), ((3, 4, 5), (5, 4, 3)), ((64, 8, 8), (64, 8, 8))]
)
def test_multiply_adds_are_what_torch_counts(dims, hidden, size):
    """Torch counts operations by their names: a product under another name would be left out."""
    for outer, training in itertools.product((True, False), (True, False)):
        layer, x = nd.NdLinear(dims, hidden, outer), torch.randn(size, *dims)
        with FlopCounterMode(display=False) as counter, torch.set_grad_enabled(training):
            layer(x)
        assert counter.get_total_flops() == 2 * size * layer.plan(size, training).macs
        with FlopCounterMode(display=False) as counter:
            nd.ndlinear(x[:2], layer.weights, order=layer.order)
        assert counter.get_total_flops() == 2 * 2 * nd.count_macs(dims, hidden, layer.order)


def test_ties_keep_their_place():
    """1/6 - 1/3 = 1/12 - 1/4 exactly, not in floats."""
    assert nd.cheapest_order((6, 12, 7), (3, 4, 7)) == (0, 1, 2)
    assert nd.cheapest_order((12, 6, 7), (4, 3, 7)) == (0, 1, 2)


def test_near_square_by_trying_all():
    for n in range(1, 300):
        a, b = nd.near_square(n)
        assert a * b == n and a <= b
        assert all(n % c or c <= a or c > b for c in range(a + 1, b))
    assert nd.near_square(14336) == (112, 128) and nd.near_square(0) == (1, 0)
