"""The structured layers: each against the matrix that its formula gives entry by entry, and its counts against that matrix."""

import functools
import itertools
import math

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from ndlinear_guide import layers
from ndlinear_guide.convert import fit_kronecker

LAYERS = {
    "dense": lambda **o: layers.Dense(12, 10, **o),
    "low-rank": lambda **o: layers.LowRank(12, 10, 3, **o),
    "blocks": lambda **o: layers.BlockDiagonal(12, 8, 4, **o),
    "blast": lambda **o: layers.Blast(12, 8, 3, 4, **o),
    "btt": lambda **o: layers.BlockTensorTrain((4, 3), (2, 5), rank=2, **o),
    "tied": lambda **o: layers.BlockTensorTrain((4, 3), (2, 5), groups=2, **o),
    "kronecker": lambda **o: layers.Kronecker((4, 3), (2, 5), **o),
    "sum": lambda **o: layers.Kronecker((2, 3, 2), (2, 5, 1), terms=2, **o),
}


@pytest.fixture(params=LAYERS)
def layer(request):
    torch.manual_seed(0)
    made = LAYERS[request.param]().double()
    made.bias.data.normal_()
    return made


def written_out(layer) -> torch.Tensor:
    """The weight (H, D) by loops over the indices of the definition."""
    found = torch.zeros(layer.out_features, layer.in_features, dtype=torch.float64)
    kind = type(layer).__name__
    if kind == "Dense":
        return layer.weight
    if kind == "LowRank":
        return layer.up @ layer.down
    if kind == "Kronecker":
        return sum(functools.reduce(torch.kron, term.weights) for term in layer.map.terms)
    if kind == "Blast":
        left, scales, right = layer.left, layer.scales, layer.right
        blocks = [[right[j] * scales[j, i] @ left[i] for i in range(4)] for j in range(4)]
        return torch.cat([torch.cat(row, 1) for row in blocks]).T
    if kind == "BlockDiagonal":
        blocks, n, c = layer.weight.shape
        for k, i, j in itertools.product(range(blocks), range(n), range(c)):
            found[j * blocks + k, k * n + i] = layer.weight[k, i, j]
        return found
    (m, n), (a, c), rank = layer.input_dims, layer.hidden_size, layer.rank
    for p, x, r in itertools.product(range(m), range(a), range(rank)):
        first = layer.first[p * len(layer.first) // m]
        second = layer.second[x * len(layer.second) // a]
        block = torch.outer(second[p * rank + r], first[:, x * rank + r])  # c, n
        found[x * c : (x + 1) * c, p * n : (p + 1) * n] += block
    return found


def test_a_layer_is_the_matrix_of_its_definition(layer):
    x = torch.randn(3, 5, layer.in_features, dtype=torch.float64)
    weight = written_out(layer)
    assert torch.allclose(layers.dense_matrix(layer), weight, atol=1e-12)
    assert torch.allclose(layer(x), x @ weight.T + layer.bias, atol=1e-12)
    layer.bias = None
    assert torch.allclose(layer(x), x @ weight.T, atol=1e-12) and "bias=False" in repr(layer)


def test_counts(layer):
    weights = sum(p.numel() for p in layer.parameters()) - len(layer.bias)
    assert layers.count_weights(layer) == weights
    if isinstance(layer, layers.Kronecker):
        if layer.steps == 2:  # (4, 3) to (2, 5), either axis first
            assert layer.multiply_adds() == min(4 * 3 * 2 + 2 * 3 * 5, 4 * 3 * 5 + 4 * 2 * 5)
        return
    with FlopCounterMode(display=False) as counter:
        layer(torch.zeros(1, layer.in_features, dtype=torch.float64))
    assert layer.multiply_adds() == counter.get_total_flops() // 2


# ---------------------------------------------------------------------------------------------------------- a given size
SIZES = [(144, 144, 5300), (64, 256, 9000), (96, 60, 700), (30, 42, 1000), (7, 11, 40)]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", layers.KINDS)
def test_a_layer_keeps_its_budget_and_is_the_largest(kind, bias):
    """With one number less to spend it is smaller, and what more can buy would not have fitted."""

    def size(layer):
        return sum(p.numel() for p in layer.parameters())

    made = 0
    for inputs, outputs, most in SIZES:
        build = functools.partial(layers.build, kind, inputs, outputs, bias=bias)
        layer = build(most)
        if layer is None:
            continue
        made += 1
        assert layer(torch.randn(2, 3, inputs)).shape == (2, 3, outputs)
        own = size(layer)
        assert 0 < own <= most
        less = build(own - 1)
        assert less is None or size(less) < own
        for more in range(most + 1, 2 * most, most // 9):
            larger = size(build(more))
            assert larger == own or larger > most
    assert made or kind == "dense"


def test_a_folding_is_that_of_the_axes():
    axes = ((3, 32), (4, 16))
    for kind in ("ndlinear", "ndlinear-sum"):
        layer = layers.build(kind, 96, 64, 1500, folding=axes)
        assert (layer.map.input_dims, layer.map.hidden_size) == axes
    # 12 entries of the smaller factor would make every matrix, and no more than three terms are cheaper than the dense layer
    assert layers.build("ndlinear-sum", 96, 64, 10**6, folding=axes).map.rank == 1 + 2
    with pytest.raises(ValueError, match="other sizes than 96 -> 63"):
        layers.build("ndlinear", 96, 63, 1500, folding=axes)
    with pytest.raises(ValueError, match="kind must be one of 'dense'"):
        layers.build("tucker", 96, 64, 1500)


def test_factors_have_the_smallest_sum():
    for n, modes in itertools.product((1, 7, 24, 64, 360), (1, 2, 3, 4)):
        divisors = [d for d in range(1, n + 1) if n % d == 0]
        ways = itertools.combinations_with_replacement(divisors, modes)
        least = min(sum(way) for way in ways if math.prod(way) == n)
        found = layers.spread(n, modes)
        assert (sum(found), math.prod(found), len(found)) == (least, n, modes)


def test_a_bottleneck_has_silu_between_its_matrices():
    x, layer = torch.randn(4, 12), layers.Bottleneck(12, 8, 3)
    assert torch.allclose(layer(x), torch.nn.functional.silu(x @ layer.down.T) @ layer.up.T)


def test_sizes_that_do_not_divide_are_refused():
    with pytest.raises(ValueError, match="5 blocks do not divide 12 inputs"):
        layers.BlockDiagonal(12, 10, 5)
    with pytest.raises(ValueError, match="3 groups do not divide 4 rows"):
        layers.BlockTensorTrain((4, 3), (3, 5), groups=3)


def lost(table: torch.Tensor, rank: int) -> float:
    """Relative error of the best matrix of a rank."""
    s = torch.linalg.svdvals(table.detach())
    return (s[rank:].norm() / s.norm()).item()


@pytest.mark.parametrize("share", [0.25, 0.6])
def test_a_fitted_sum_is_the_best_of_all_foldings_within_the_budget(share):
    torch.manual_seed(1)
    linear = torch.nn.Linear(24, 36).double()
    layer, error = fit_kronecker(linear, share)
    assert sum(p.numel() for p in layer.parameters()) <= share * 25 * 36
    errors = []
    for k in (2, 3, 4, 6, 12):  # common divisors; with 24 the second axis would have length one
        a, b = 36 // k, 24 // k
        table = linear.weight.reshape(k, a, k, b).transpose(1, 2).reshape(k * k, a * b)
        one_order = min(k * k * b + k * a * b, k * k * a + k * a * b)
        terms = min((share * 25 * 36 - 36) // (k * k + a * b), 24 * 36 // one_order, k * k)
        errors += [lost(table, int(terms))] if terms >= 1 else []
    assert error == pytest.approx(min(errors))
