"""The layer computes Algorithm 1: against one einsum and a closed form of the bias."""

import itertools

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
    shapes,
)
from torch.utils.flop_counter import FlopCounterMode

import ndlinear as nd

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


@pytest.mark.parametrize("size", [2, 256, 4096])
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


def test_total_bias_by_hand():
    """Order 1, 2: b_1 meets the row sums of W_2; order 2, 1: b_2 meets those of W_1."""
    weights = [torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0], [4.0]])]
    biases = [torch.tensor([10.0]), torch.tensor([100.0, 200.0])]
    for outer, want in ((True, [[130.0, 240.0]]), (False, [[310.0, 610.0]])):
        layer = nd.NdLinear((2, 1), (1, 2), outer)
        for mode, weight, bias in zip(layer.align_layers, weights, biases):
            mode.load_state_dict({"weight": weight, "bias": bias})
        assert bias_by_formula(weights, biases, list(layer.order)).tolist() == want
        assert nd.total_bias(layer).tolist() == want
        assert layer(torch.zeros(2, 1)).tolist() == want


CALLS = [
    "NdLinear((4, 5), (3, 2), transform_outer=True, bias=True, init='linear')",
    "NdLinear((4, 5), (3, 2), transform_outer=False, bias=False, init='unit')",
    "FlatNdLinear((4,), (3,), transform_outer=True, bias=True, init='paper', execution='sequential')",
    "NdLinearSum((4, 5), (3, 2), rank=3, bias=False, init='paper')",
]


@pytest.mark.parametrize("call", CALLS)
def test_repr_gives_the_call_back(call):
    layer = eval(call, vars(nd))
    assert repr(layer) == call and call in repr(torch.nn.Sequential(layer))
    given = [name for name in ("transform_outer", "execution", "rank", "init") if name in call]
    assert all(f"{name}={getattr(layer, name)!r}" in call for name in given)
