"""The exact algebra: dense equivalents, nearest Kronecker products, sums of terms, counts and orders."""

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
    batches,
    bias_by_formula,
    by_einsum,
    expected,
    layers,
    randomise,
    shapes,
)
from torch import nn

import ndlinear as nd
import ndlinear_lora

close = {"atol": 1e-10, "rtol": 1e-10}


def dense(rows, columns, bias=True, seed=0):
    torch.manual_seed(seed)
    return randomise(nn.Linear(columns, rows, bias, dtype=torch.float64))


# ---------------------------------------------------------------------------------------------------- dense equivalents
@QUICK
@given(layers())
def test_kronecker_weight_and_total_bias(layer):
    weight, bias = nd.kronecker_weight(layer), nd.total_bias(layer)
    assert weight.shape == (math.prod(layer.hidden_size), math.prod(layer.input_dims))
    want = functools.reduce(np.kron, [w.detach().numpy() for w in layer.weights])
    np.testing.assert_allclose(weight.detach().numpy(), want, rtol=1e-12)
    zero = torch.zeros(layer.input_dims, dtype=torch.float64)
    assert bias.shape == layer.hidden_size
    torch.testing.assert_close(bias, expected(layer, zero), **close)
    jacobian = torch.func.jacrev(lambda x: layer(x.reshape(layer.input_dims)).flatten())(
        zero.flatten()
    )
    torch.testing.assert_close(weight, jacobian, **close)


def test_dense_equivalents_are_differentiable():
    layer = randomise(nd.NdLinear((2, 3), (3, 2), False, dtype=torch.float64))
    names = [name for name, _ in layer.named_parameters()]
    for read in (nd.kronecker_weight, nd.total_bias):

        def f(*values, read=read):
            module = nd.NdLinear((2, 3), (3, 2), False, dtype=torch.float64)
            for name, value in zip(names, values):
                mode, kind = name.split(".")[1:]
                delattr(module.align_layers[int(mode)], kind)
                setattr(module.align_layers[int(mode)], kind, value)
            return read(module)

        assert torch.autograd.gradcheck(f, tuple(layer.parameters()))


@QUICK
@given(layers(), batches)
def test_to_linear_is_the_same_function(layer, batch):
    n, x = len(layer.input_dims), torch.randn(*batch, *layer.input_dims, dtype=torch.float64)
    linear = nd.to_linear(layer)
    assert type(linear) is nn.Linear and (linear.bias is None) == (layer.biases[0] is None)
    assert linear.in_features == math.prod(layer.input_dims)
    assert linear.out_features == math.prod(layer.hidden_size)
    torch.testing.assert_close(linear(x.flatten(-n)), layer(x).flatten(-n), **close)


def test_to_linear_copies():
    for layer in (
        nd.NdLinear((4,), (3,)),
        nd.NdLinearSum((2, 2), (3, 1), 2),
        ndlinear_lora.NdLinearLoRA(nn.Linear(4, 6)),
    ):
        linear = nd.to_linear(layer)
        before = layer(torch.ones(*getattr(layer, "input_dims", (4,))))
        with torch.no_grad():
            linear.weight.fill_(9)
            linear.bias.fill_(9)
        assert torch.equal(layer(torch.ones(*getattr(layer, "input_dims", (4,)))), before)
        assert linear.weight.requires_grad and linear.bias.requires_grad
    assert (
        nd.to_linear(nd.NdLinear((4, 1), (3, 2), dtype=torch.float16)).weight.dtype == torch.float16
    )


# -------------------------------------------------------------------------------------------------------- rearrangement
@QUICK
@given(shapes(4, entries=600))
def test_rearrange_groups_the_indices_of_each_mode(shape):
    dims, hidden = shape
    matrix = torch.randn(math.prod(hidden), math.prod(dims), dtype=torch.float64)
    tensor = nd.rearrange(matrix, dims, hidden)
    assert tensor.shape == tuple(h * d for h, d in zip(hidden, dims))
    assert tensor.norm().item() == pytest.approx(matrix.norm().item())
    rows, columns = (list(itertools.product(*map(range, sizes))) for sizes in (hidden, dims))
    for (i, row), (j, column) in itertools.islice(
        itertools.product(enumerate(rows), enumerate(columns)), 200
    ):
        assert tensor[tuple(h * d + c for h, d, c in zip(row, dims, column))] == matrix[i, j]


@QUICK
@given(layers(4, bias=False))
def test_the_rearranged_kronecker_weight_has_rank_one(layer):
    tensor = nd.rearrange(nd.kronecker_weight(layer), layer.input_dims, layer.hidden_size)
    outer = functools.reduce(lambda a, b: a[..., None] * b, [w.flatten() for w in layer.weights])
    torch.testing.assert_close(tensor, outer, **close)


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


@pytest.mark.parametrize(
    "dims, hidden", [((4, 5), (3, 2)), ((2, 3), (6, 4)), ((5, 1), (2, 3)), ((1, 4), (1, 3))]
)
def test_two_modes_are_solved_exactly(dims, hidden):
    matrix = torch.randn(math.prod(hidden), math.prod(dims), dtype=torch.float64)
    values = torch.linalg.svdvals(blocks(matrix, dims, hidden))
    for rank in range(1, len(values) + 1):
        terms, error = nd.nearest_kronecker(matrix, dims, hidden, rank)
        assert len(terms) == rank
        assert all(f.shape == (h, d) for term in terms for f, h, d in zip(term, hidden, dims))
        assert error == pytest.approx((values[rank:].norm() / matrix.norm()).item(), abs=1e-12)
        assert error == pytest.approx(
            ((matrix - kron_sum(terms)).norm() / matrix.norm()).item(), abs=1e-12
        )
    assert error < 1e-12, "that many terms represent every matrix"
    with pytest.raises(
        ValueError, match=f"rank {len(values) + 1} .* rank {len(values)} represents every matrix"
    ):
        nd.nearest_kronecker(matrix, dims, hidden, len(values) + 1)


def test_nearest_is_nearer_than_anything_nearby():
    torch.manual_seed(0)
    for dims, hidden in (((4, 5), (3, 2)), ((2, 3, 2), (3, 2, 2))):
        matrix = torch.randn(math.prod(hidden), math.prod(dims), dtype=torch.float64)
        (term,), error = nd.nearest_kronecker(matrix, dims, hidden, sweeps=5000, tol=1e-16)
        free = [f.clone().requires_grad_() for f in term]
        distance = (matrix - functools.reduce(torch.kron, free)).norm() / matrix.norm()
        assert all(g.abs().max() < 1e-5 for g in torch.autograd.grad(distance, free)), "stationary"
        for _ in range(200):
            near = [f + 0.02 * torch.randn_like(f) for f in term]
            assert (matrix - functools.reduce(torch.kron, near)).norm() / matrix.norm() >= error


@pytest.mark.parametrize(
    "dims, hidden", [((3,), (4,)), ((2, 3, 2), (3, 2, 2)), ((2, 1, 3, 2), (2, 2, 1, 3))]
)
def test_an_exact_kronecker_product_is_found(dims, hidden):
    factors = [torch.randn(h, d, dtype=torch.float64) for h, d in zip(hidden, dims)]
    matrix = functools.reduce(torch.kron, factors)
    (term,), error = nd.nearest_kronecker(matrix, dims, hidden)
    assert error < 1e-12
    torch.testing.assert_close(functools.reduce(torch.kron, term), matrix, **close)
    norms = [f.norm().item() for f in term]
    assert norms == pytest.approx([norms[0]] * len(norms)), (
        "all factors of a term have the same norm"
    )


def test_three_modes_and_more_terms():
    torch.manual_seed(0)
    dims, hidden = (3, 2, 3), (2, 3, 2)
    factors = [
        [torch.randn(h, d, dtype=torch.float64) for h, d in zip(hidden, dims)] for _ in range(2)
    ]
    matrix = kron_sum(factors)
    terms, error = nd.nearest_kronecker(matrix, dims, hidden, 2, restarts=5, sweeps=3000, tol=1e-18)
    assert error < 1e-4
    assert (matrix - kron_sum(terms)).norm() / matrix.norm() == pytest.approx(error, abs=1e-12)
    assert nd.nearest_kronecker(matrix, dims, hidden, 1)[1] > 0.1


def test_restarts_never_hurt_and_are_seeded():
    gains = []
    for seed in (
        3,
        11,
        16,
        22,
        25,
        38,
    ):  # matrices on which the singular vectors lead to a poor local optimum
        torch.manual_seed(seed)
        matrix = torch.randn(27, 8, dtype=torch.float64)
        find = functools.partial(nd.nearest_kronecker, matrix, (2, 2, 2), (3, 3, 3), tol=1e-8)
        one, many = find()[1], find(restarts=6)[1]
        assert many <= one and many == find(restarts=6)[1]
        gains.append(one - many)
    assert max(gains) > 1e-3


def test_more_sweeps_never_raise_the_error():
    matrix = torch.randn(8, 27, dtype=torch.float64)
    errors = [
        nd.nearest_kronecker(matrix, (3, 3, 3), (2, 2, 2), 3, sweeps=n, tol=0)[1]
        for n in (1, 2, 5, 20, 100)
    ]
    assert all(b <= a + 1e-12 for a, b in itertools.pairwise(errors)) and errors[-1] < errors[0]


@pytest.mark.parametrize("dims, hidden", [((3,), (4,)), ((2, 3), (3, 2)), ((2, 3, 2), (3, 2, 2))])
def test_the_zero_matrix(dims, hidden):
    (term,), error = nd.nearest_kronecker(
        torch.zeros(math.prod(hidden), math.prod(dims)), dims, hidden
    )
    assert error == 0 and all((f == 0).all() and f.dtype == torch.float32 for f in term)


def test_nearest_works_in_double_and_leaves_the_matrix_alone():
    matrix = torch.randn(6, 6, dtype=torch.bfloat16, requires_grad=True)
    before = matrix.detach().clone()
    (term,), error = nd.nearest_kronecker(matrix, (2, 3), (3, 2))
    assert term[0].dtype == torch.bfloat16
    assert not term[0].requires_grad
    assert torch.equal(matrix.detach(), before)
    values = torch.linalg.svdvals(blocks(before.double(), (2, 3), (3, 2)))
    assert error == pytest.approx((values[1:].norm() / values.norm()).item(), rel=1e-9)


@pytest.mark.parametrize("dims, hidden", [((6,), (4,)), ((4, 5), (3, 2)), ((2, 3, 2), (3, 2, 2))])
@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_complex_matrices(dims, hidden, dtype):
    """The error is that of the terms, an exact product is found, and rank 1 of two modes is the SVD's."""
    tol = 1e-6 if dtype is torch.complex64 else 1e-12
    factors = [torch.randn(h, d, dtype=torch.complex128) for h, d in zip(hidden, dims)]
    exact = functools.reduce(torch.kron, factors)
    (term,), error = nd.nearest_kronecker(exact.to(dtype), dims, hidden)
    assert error < tol and all(factor.dtype == dtype for factor in term)
    torch.testing.assert_close(kron_sum([term]), exact.to(dtype), atol=100 * tol, rtol=100 * tol)
    matrix = torch.randn(*exact.shape, dtype=torch.complex128)
    terms, error = nd.nearest_kronecker(matrix, dims, hidden, 1)
    true = (matrix - kron_sum(terms)).norm() / matrix.norm()
    assert error == pytest.approx(true.item(), abs=1e-12)
    if len(dims) == 2:
        values = torch.linalg.svdvals(blocks(matrix, dims, hidden))
        assert error == pytest.approx((values[1:].norm() / values.norm()).item(), abs=1e-12)


def test_complex_least_squares_ends_where_no_factor_can_be_better():
    torch.manual_seed(0)
    matrix = torch.randn(12, 12, dtype=torch.complex128)
    (term,), error = nd.nearest_kronecker(matrix, (2, 3, 2), (3, 2, 2), sweeps=5000, tol=1e-16)
    free = [f.clone().requires_grad_() for f in term]
    distance = (matrix - functools.reduce(torch.kron, free)).norm() / matrix.norm()
    assert distance.item() == pytest.approx(error)
    assert all(g.abs().max() < 1e-5 for g in torch.autograd.grad(distance, free)), "stationary"


@pytest.mark.filterwarnings("ignore:Complex modules are a new feature")
def test_from_linear_of_a_complex_layer():
    source = randomise(nd.NdLinear((4, 5), (3, 2), dtype=torch.complex128))
    linear = nd.to_linear(source)
    layer = nd.NdLinear.from_linear(linear, (4, 5), (3, 2))
    assert layer.approximation.weight_error < 1e-12 and layer.approximation.bias_error < 1e-12
    x = torch.randn(7, 4, 5, dtype=torch.complex128)
    torch.testing.assert_close(layer(x), source(x), **close)
    total = nd.NdLinearSum.from_linear(linear, (4, 5), (3, 2), 2)
    torch.testing.assert_close(total(x), source(x), **close)


# --------------------------------------------------------------------------------------------------------- from_linear
@QUICK
@given(layers(4))
def test_a_layer_survives_the_way_through_a_dense_layer(layer):
    linear = nd.to_linear(layer)
    back = nd.NdLinear.from_linear(linear, layer.input_dims, layer.hidden_size)
    assert type(back) is nd.NdLinear
    assert back.transform_outer
    assert back.approximation.weight_error < 1e-6
    torch.testing.assert_close(nd.kronecker_weight(back), linear.weight, atol=1e-6, rtol=1e-6)
    if layer.transform_outer and linear.bias is not None:
        assert back.approximation.bias_error < 1e-6
        torch.testing.assert_close(nd.total_bias(back).flatten(), linear.bias, atol=1e-5, rtol=1e-5)
    assert (back.biases[0] is None) == (linear.bias is None)


@pytest.mark.parametrize("dims, hidden", [((4, 5), (3, 4)), ((2, 3, 2), (2, 3, 2))])
def test_rank_one_bias_is_the_least_squares_fit(dims, hidden):
    linear = dense(math.prod(hidden), math.prod(dims))
    layer = nd.NdLinear.from_linear(linear, dims, hidden)
    unit = torch.eye(sum(hidden), dtype=torch.float64)
    columns = [
        bias_by_formula(layer.weights, row.split(hidden), range(len(dims))).flatten()
        for row in unit
    ]
    basis, target = torch.stack(columns, 1).detach().numpy(), linear.bias.detach().numpy()
    best = basis @ np.linalg.lstsq(basis, target, rcond=None)[0]
    np.testing.assert_allclose(nd.total_bias(layer).detach().flatten().numpy(), best, atol=1e-10)
    assert layer.approximation.bias_error == pytest.approx(
        np.linalg.norm(target - best) / np.linalg.norm(target)
    )
    assert 0.01 < layer.approximation.bias_error < 1


@pytest.mark.parametrize("rank", [1, 2, 5, 12])
@pytest.mark.parametrize("bias", [True, False])
def test_more_terms_and_the_full_bias(rank, bias):
    linear = dense(12, 20, bias)
    layer = nd.NdLinearSum.from_linear(linear, (4, 5), (3, 4), rank)
    values = torch.linalg.svdvals(blocks(linear.weight, (4, 5), (3, 4)))
    assert layer.approximation.weight_error == pytest.approx(
        (values[rank:].norm() / values.norm()).item(), abs=1e-12
    )
    assert layer.approximation.bias_error == 0 and layer.rank == len(layer.terms) == rank
    x = torch.randn(7, 20, dtype=torch.float64)
    gap = (layer(x.unflatten(1, (4, 5))).flatten(1) - linear(x)).abs().max()
    assert gap < 1e-10 if rank == 12 else gap > 1e-2
    if bias:
        assert torch.equal(layer.bias.flatten(), linear.bias)
    if rank > 1:
        cure = (
            rf"rank={rank}; .* NdLinearSum.from_linear\(linear, \(4, 5\), \(3, 4\), rank={rank}\)"
        )
        with pytest.raises(ValueError, match=cure):
            nd.NdLinear.from_linear(linear, (4, 5), (3, 4), rank)


@pytest.mark.parametrize("kind", [nd.NdLinear, nd.NdLinearSum])
def test_from_linear_of_a_class_returns_that_class(kind):
    class Mine(kind):
        pass

    layer = Mine.from_linear(dense(6, 20), (4, 5), (3, 2))
    assert type(layer) is Mine and layer.approximation.weight_error > 0
    assert repr(layer).startswith("Mine((4, 5), (3, 2), ")


def test_dense_equivalents_and_fits_draw_no_random_numbers():
    linear, layer, adapter = (
        nn.Linear(12, 8),
        nd.NdLinear((2, 3), (3, 2)),
        ndlinear_lora.NdLinearLoRA(nn.Linear(4, 6)),
    )
    state = torch.get_rng_state()
    nd.to_linear(layer)
    adapter.merge()
    nd.NdLinear.from_linear(linear, (2, 3, 2), (2, 2, 2), restarts=3)
    nd.NdLinearSum.from_linear(linear, (3, 4), (2, 4), rank=2)
    assert torch.equal(torch.get_rng_state(), state)


def test_from_linear_keeps_the_dtype_trains_and_passes_the_search_on():
    linear = nn.Linear(12, 8, dtype=torch.bfloat16)
    layer = nd.NdLinear.from_linear(linear, (2, 3, 2), (2, 2, 2), restarts=2, sweeps=3)
    assert all(p.dtype == torch.bfloat16 and p.requires_grad for p in layer.parameters())
    assert 0 < layer.approximation.weight_error < 1
    assert nd.NdLinear((2, 3), (3, 2)).approximation is None
    rough = nd.NdLinear.from_linear(
        dense(8, 12), (2, 3, 2), (2, 2, 2), sweeps=1
    ).approximation.weight_error
    fine = nd.NdLinear.from_linear(
        dense(8, 12), (2, 3, 2), (2, 2, 2), restarts=20
    ).approximation.weight_error
    assert fine < rough


# ------------------------------------------------------------------------------------------------------- sums of terms
@QUICK
@given(shapes(4), st.integers(1, 3), st.booleans(), batches)
def test_sum_layer(shape, rank, bias, batch):
    dims, hidden = shape
    layer = randomise(nd.NdLinearSum(dims, hidden, rank, bias, dtype=torch.float64))
    x = torch.randn(*batch, *dims, dtype=torch.float64)
    want = sum(by_einsum(x, term.weights) for term in layer.terms)
    torch.testing.assert_close(layer(x), want + layer.bias if bias else want, **close)
    n = len(dims)
    torch.testing.assert_close(nd.to_linear(layer)(x.flatten(-n)), layer(x).flatten(-n), **close)
    assert nd.kronecker_weight(layer).shape == (math.prod(hidden), math.prod(dims))
    assert torch.equal(
        nd.total_bias(layer), layer.bias if bias else torch.zeros(hidden, dtype=torch.float64)
    )
    numbers = sum(p.numel() for p in layer.parameters())
    assert numbers == rank * sum(d * h for d, h in zip(dims, hidden)) + bias * math.prod(hidden)
    if rank > 1:
        assert numbers == nd.count_parameters(dims, hidden, bias, rank)


@pytest.mark.parametrize(
    "init, want", [("linear", 1 / 9), ("unit", 1.0), ("paper", 4 * 12 * 20 / (36 * 28))]
)
def test_output_variance_of_a_sum_does_not_depend_on_its_rank(init, want):
    torch.manual_seed(0)
    for rank in (1, 4):
        layers = (nd.NdLinearSum((12, 20), (24, 8), rank, False, init=init) for _ in range(60))
        squares = torch.stack([layer(torch.randn(8, 12, 20)).square().mean() for layer in layers])
        assert squares.mean().item() == pytest.approx(want, rel=0.12)


def test_bias_of_a_sum_starts_like_that_of_a_dense_layer():
    torch.manual_seed(0)
    bias = nd.NdLinearSum((4, 4), (30, 30), 2).bias
    assert 0.99 * 0.25 < bias.abs().max() <= 0.25
    assert not nd.NdLinearSum((4, 4), (3, 3), 2, init="unit").bias.any()


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
    assert costs[nd.cheapest_order(dims, hidden)] == min(costs.values())
    assert nd.count_macs(dims, hidden) == costs[tuple(range(len(dims)))]


def test_ties_keep_their_place():
    assert nd.cheapest_order((6, 12, 7), (3, 4, 7)) == (
        0,
        1,
        2,
    )  # 1/6 - 1/3 = 1/12 - 1/4 exactly, not in floats
    assert nd.cheapest_order((12, 6, 7), (4, 3, 7)) == (0, 1, 2)
    assert nd.cheapest_order((2, 4), (4, 2)) == (1, 0)


def test_counts_of_the_example_in_the_paper():
    cube = (32, 32, 32)
    assert nd.count_macs(cube, cube) == 3 * 32**4
    assert nd.count_parameters(cube, cube, bias=False) == 3072
    assert nd.count_parameters(cube, cube, False, rank=3) == 9216
    assert nd.count_parameters(cube, cube, True, rank=3) == 9216 + 32**3
    assert nd.count_macs((2800, 8), (768, 1)) == 17209344


def test_near_square_by_trying_all():
    for n in range(1, 300):
        a, b = nd.near_square(n)
        assert a * b == n and a <= b
        assert all(n % c or c <= a or c > b for c in range(a + 1, b))
    assert nd.near_square(14336) == (112, 128) and nd.near_square(0) == (1, 0)


def test_a_layer_without_inputs_is_refused_by_an_adapter():
    with pytest.raises(ValueError, match=r"input_dims=\(1, 0\)"):
        ndlinear_lora.NdLinearLoRA(nn.Linear(0, 6, device="meta"))
