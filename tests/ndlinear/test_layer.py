"""The layer computes Algorithm 1: against one einsum, a closed form of the bias, tensordot and finite differences."""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ndlinear_cases import (
    QUICK,
    batches,
    bias_by_formula,
    by_einsum,
    by_steps,
    expected,
    layers,
    randomise,
    shapes,
)
from torch.utils.flop_counter import FlopCounterMode

import ndlinear as nd
import ndlinear_lora

close = {"atol": 1e-10, "rtol": 1e-10}


@QUICK
@given(layers(), batches)
def test_layer_is_one_einsum_plus_the_bias_of_its_order(layer, batch):
    x = torch.randn(*batch, *layer.input_dims, dtype=torch.float64)
    y = layer(x)
    assert y.shape == (*batch, *layer.hidden_size)
    assert y.is_contiguous()
    torch.testing.assert_close(y, expected(layer, x), **close)


@QUICK
@given(shapes(4), batches, st.randoms(use_true_random=False), st.booleans())
def test_function_follows_any_order(shape, batch, random, bias):
    dims, hidden = shape
    weights = [torch.randn(h, d, dtype=torch.float64) for d, h in zip(dims, hidden)]
    biases = (
        [torch.randn(h, dtype=torch.float64) if random.random() < 0.7 else None for h in hidden]
        if bias
        else None
    )
    order = random.sample(range(len(dims)), len(dims))
    x = torch.randn(*batch, *dims, dtype=torch.float64)
    torch.testing.assert_close(
        nd.ndlinear(x, weights, biases, order), by_steps(x, weights, biases, order), **close
    )
    torch.testing.assert_close(nd.ndlinear(x, weights, None, order), by_einsum(x, weights), **close)


def test_function_executes_the_modes_in_the_order_asked_for(monkeypatch):
    seen, mode_product = [], nd.mode_product
    monkeypatch.setattr(
        nd, "mode_product", lambda x, w, mode, b: seen.append(mode) or mode_product(x, w, mode, b)
    )
    nd.ndlinear(torch.randn(2, 3, 4, 5), [torch.randn(2, d) for d in (3, 4, 5)], order=(2, 0, 1))
    nd.ndlinear(torch.randn(2, 3, 4, 5), [torch.randn(2, d) for d in (3, 4, 5)])
    assert seen == [-1, -3, -2, -3, -2, -1]


def test_biases_of_two_orders_differ():
    layer = randomise(nd.NdLinear((4, 5), (3, 2), dtype=torch.float64))
    x = torch.randn(7, 4, 5, dtype=torch.float64)
    swapped = nd.ndlinear(x, layer.weights, layer.biases, (1, 0))
    assert (layer(x) - swapped).abs().max() > 0.1
    other = nd.NdLinear((4, 5), (3, 2), False, dtype=torch.float64)
    other.load_state_dict(layer.state_dict())
    torch.testing.assert_close(other(x), swapped, **close)


@pytest.mark.parametrize("mode", range(-4, 4))
@pytest.mark.parametrize("bias", [False, True])
def test_mode_product_counts_axes_like_torch(mode, bias):
    x = torch.randn(2, 3, 4, 5, dtype=torch.float64)
    weight = torch.randn(6, x.shape[mode], dtype=torch.float64)
    b = torch.randn(6, dtype=torch.float64) if bias else None
    y = torch.tensordot(x, weight, dims=([mode], [1]))
    want = (y + b if bias else y).movedim(-1, mode)
    torch.testing.assert_close(nd.mode_product(x, weight, mode, b), want, **close)


@pytest.mark.parametrize(
    "dims, hidden", [((3,), (2,)), ((2, 3), (3, 2)), ((3, 2), (2, 3)), ((2, 3, 2), (1, 2, 3))]
)
@pytest.mark.parametrize("outer", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_gradients_by_finite_differences(dims, hidden, outer, bias):
    layer = randomise(nd.NdLinear(dims, hidden, outer, bias, dtype=torch.float64))
    names = [name for name, _ in layer.named_parameters()]

    def f(x, *values):
        return torch.func.functional_call(layer, dict(zip(names, values)), (x,))

    inputs = (torch.randn(2, *dims, dtype=torch.float64, requires_grad=True), *layer.parameters())
    assert torch.autograd.gradcheck(f, inputs)
    assert torch.autograd.gradgradcheck(f, inputs)


@QUICK
@given(shapes())
def test_executes_the_cheapest_order_and_keeps_the_defined_one_when_nothing_is_gained(shape):
    dims, hidden = shape
    for outer in (True, False):
        layer = nd.NdLinear(dims, hidden, outer)
        assert layer.order == tuple(sorted(range(len(dims)), reverse=not outer))
        costs = {
            order: nd.count_macs(dims, hidden, order)
            for order in itertools.permutations(range(len(dims)))
        }
        assert costs[layer.execution_order] == min(costs.values())
        assert (layer.execution_order == layer.order) == (costs[layer.order] == min(costs.values()))


@pytest.mark.parametrize(
    "dims, hidden", [((7, 2), (2, 7)), ((2, 7), (7, 2)), ((3, 4, 5), (5, 4, 3)), ((6,), (4,))]
)
@pytest.mark.parametrize("outer", [True, False])
def test_multiply_adds_are_what_torch_counts(dims, hidden, outer):
    layer = nd.NdLinear(dims, hidden, outer)
    with FlopCounterMode(display=False) as counter:
        layer(torch.randn(11, *dims))
    assert counter.get_total_flops() == 2 * 11 * layer.plan(11, True).macs
    with FlopCounterMode(display=False) as counter:
        nd.ndlinear(torch.randn(11, *dims), layer.weights, order=layer.order)
    assert counter.get_total_flops() == 2 * 11 * nd.count_macs(dims, hidden, layer.order)


@pytest.mark.parametrize("bias", [True, False])
def test_parameters_and_names(bias):
    layer = nd.NdLinear((32, 32, 32), (32, 32, 32), bias=bias)
    assert sum(p.numel() for p in layer.parameters()) == (3168 if bias else 3072)
    assert nd.count_parameters((32, 32, 32), (32, 32, 32), bias) == (3168 if bias else 3072)
    kinds = ["weight", "bias"] if bias else ["weight"]
    assert list(layer.state_dict()) == [
        f"align_layers.{k}.{kind}" for k in range(3) for kind in kinds
    ]
    assert layer.weights[1].shape == (32, 32)


def test_one_mode_is_a_linear_layer():
    layer = nd.NdLinear((5,), (3,), dtype=torch.float64)
    linear = torch.nn.Linear(5, 3, dtype=torch.float64)
    layer.align_layers[0].load_state_dict(linear.state_dict())
    x = torch.randn(2, 4, 5, dtype=torch.float64)
    torch.testing.assert_close(layer(x), linear(x), **close)


def test_a_singleton_mode_makes_a_dense_layer():
    """(D, 1) -> (H, 1) is Linear(D, H) with weight w_2 W_1 and bias w_2 b_1 + b_2."""
    layer = randomise(nd.NdLinear((5, 1), (3, 1), dtype=torch.float64))
    (w1, w2), (b1, b2) = layer.weights, layer.biases
    x = torch.randn(4, 5, dtype=torch.float64)
    want = torch.nn.functional.linear(x, w2.item() * w1, w2.item() * b1 + b2)
    torch.testing.assert_close(layer(x[..., None])[..., 0], want, **close)


def test_total_bias_by_hand():
    """Order 1, 2: b_1 meets the row sums of W_2; order 2, 1: b_2 meets those of W_1."""
    weights = [torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0], [4.0]])]
    biases = [torch.tensor([10.0]), torch.tensor([100.0, 200.0])]
    assert bias_by_formula(weights, biases, [0, 1]).tolist() == [[130.0, 240.0]]
    assert bias_by_formula(weights, biases, [1, 0]).tolist() == [[310.0, 610.0]]
    for outer, want in ((True, [[130.0, 240.0]]), (False, [[310.0, 610.0]])):
        layer = nd.NdLinear((2, 1), (1, 2), outer)
        layer.load_state_dict(
            {f"align_layers.{k}.weight": w for k, w in enumerate(weights)}, strict=False
        )
        layer.load_state_dict(
            {f"align_layers.{k}.bias": b for k, b in enumerate(biases)}, strict=False
        )
        assert nd.total_bias(layer).tolist() == want
        assert layer(torch.zeros(2, 1)).tolist() == want


# ------------------------------------------------------------------------------------------------------ initial values
def test_paper_init_is_xavier_uniform_with_zero_biases():
    torch.manual_seed(0)
    dims, hidden = (30, 50), (90, 20)
    layer = nd.NdLinear(dims, hidden, init="paper")
    for d, h, weight, bias in zip(dims, hidden, layer.weights, layer.biases):
        bound = math.sqrt(6 / (d + h))
        assert 0.98 * bound < weight.abs().max() <= bound
        assert weight.var().item() == pytest.approx(bound**2 / 3, rel=0.1)
        assert not bias.any()


def test_unit_init_keeps_the_variance_whatever_the_number_of_modes():
    torch.manual_seed(0)
    layer = nd.NdLinear((30, 50), (90, 20), init="unit")
    for d, weight, bias in zip((30, 50), layer.weights, layer.biases):
        assert 0.98 * math.sqrt(3 / d) < weight.abs().max() <= math.sqrt(3 / d)
        assert not bias.any()
    for dims, hidden in (((24,), (40,)), ((12, 20), (24, 8)), ((8, 8, 8), (8, 16, 4))):
        squares = [
            nd.NdLinear(dims, hidden, init="unit")(torch.randn(8, *dims)).square().mean()
            for _ in range(60)
        ]
        assert torch.stack(squares).mean().item() == pytest.approx(1, abs=0.12)


def test_linear_init_shrinks_the_variance_by_three_per_mode():
    torch.manual_seed(0)
    for dims in ((16,), (16, 16), (12, 12, 12)):
        layer = (
            nd.NdLinear(dims, dims, bias=False)(torch.randn(8, *dims)).square().mean()
            for _ in range(60)
        )
        assert torch.stack(list(layer)).mean().item() == pytest.approx(3.0 ** -len(dims), rel=0.15)


@pytest.mark.parametrize("init", ["linear", "paper", "unit"])
@pytest.mark.parametrize("bias", [True, False])
def test_reset_parameters_draws_what_a_new_layer_draws(init, bias):
    layer = nd.NdLinear((4, 5), (3, 2), bias=bias, init=init)
    randomise(layer)
    torch.manual_seed(7)
    layer.reset_parameters()
    scale = [w.abs().max().item() for w in layer.weights]
    bounds = {
        "linear": (4**-0.5, 5**-0.5),
        "paper": ((6 / 7) ** 0.5, (6 / 7) ** 0.5),
        "unit": (0.75**0.5, 0.6**0.5),
    }[init]
    assert all(s <= b for s, b in zip(scale, bounds))
    again = nd.NdLinear((4, 5), (3, 2), bias=bias, init=init)
    torch.manual_seed(7)
    again.reset_parameters()
    assert all(torch.equal(a, b) for a, b in zip(layer.parameters(), again.parameters()))


# ---------------------------------------------------------------------------------------------------------------- repr
@pytest.mark.parametrize("outer", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("init", ["linear", "unit"])
def test_repr_gives_the_call_back(outer, bias, init):
    layer = nd.NdLinear([4, 5], torch.Size([3, 2]), outer, bias, init=init)
    again = eval(repr(layer), vars(nd))
    assert repr(again) == repr(layer)
    assert f"NdLinear((4, 5), (3, 2), transform_outer={outer}" in repr(layer)
    for name in (
        "input_dims",
        "hidden_size",
        "order",
        "execution_order",
        "init",
        "transform_outer",
    ):
        assert getattr(again, name) == getattr(layer, name)
    assert (again.biases[0] is None) == (not bias)
    assert "NdLinear((4, 5)" in repr(torch.nn.Sequential(layer))


def test_repr_of_a_sum_gives_the_call_back():
    layer = nd.NdLinearSum((4, 5), (3, 2), 3, bias=False, init="paper")
    again = eval(repr(layer), vars(nd))
    assert repr(again) == repr(layer) and len(again.terms) == 3 and again.bias is None


def test_public_names_are_documented():
    assert nd.__all__ == sorted(nd.__all__)
    for name in nd.__all__:
        assert getattr(nd, name).__doc__, name
    for cls in (nd.NdLinear, nd.NdLinearSum, ndlinear_lora.NdLinearLoRA):
        own = [
            v
            for n, v in vars(cls).items()
            if not n.startswith("_") and n not in ("forward", "extra_repr")
        ]
        assert all(
            member.__doc__ for member in own if callable(member) or isinstance(member, property)
        )
