"""The start survives what frameworks do to a model: reset loops after `to_empty`, copies, pickles and shards."""

import copy
import math
import pickle

import pytest
import torch
from torch import nn

import ndlinear as nd


def reset_all(model):
    """As after `to_empty`, for example by FSDP2's users: parents first, then their children."""
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()


COPIES = {
    "itself": lambda model, request: model,
    "deepcopy": lambda model, request: copy.deepcopy(model),
    "pickle": lambda model, request: pickle.loads(pickle.dumps(model)),
    "sharded": lambda model, request: request.getfixturevalue("fully_shard")(model),
}
STARTS = {
    "layer": lambda: nd.NdLinear((16, 16), (16, 16), init="unit"),
    "complex": lambda: nd.NdLinear((16, 16), (16, 16), init="unit", dtype=torch.complex64),
    "sum": lambda: nd.NdLinearSum((16, 16), (16, 16), 9, init="unit"),
}


@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("reset", [reset_all, lambda layer: layer.reset_parameters()])
@pytest.mark.parametrize("make", STARTS.values(), ids=STARTS)
def test_unit_variance_after_a_reset_from_the_meta_device(make, reset, how, request):
    """Whatever the number of terms; the memory held anything before, and FSDP2's users shard it first."""
    torch.manual_seed(0)
    with torch.device("meta"):
        layer = make()
    layer = COPIES[how](layer, request).to_empty(device="cpu")
    for parameter in layer.parameters():
        parameter.data.fill_(math.nan)
    reset(layer)
    with torch.no_grad():
        x = torch.randn(200, 16, 16, dtype=next(layer.parameters()).dtype)
        assert 0.8 < layer(x).std() < 1.25
    assert not any(p.any() for name, p in layer.named_parameters() if name.endswith("bias"))


@pytest.mark.parametrize("init", ["linear", "paper", "unit"])
@pytest.mark.parametrize("first", ["linear", "paper", "unit"])
def test_a_loop_draws_what_the_constructor_draws_from(first, init):
    """The largest number of many draws lies just below the bound of the init; only "linear" draws biases."""
    layer = nd.NdLinear((40, 50), (30, 20), init=first)
    total = nd.NdLinearSum((4, 4), (30, 30), 2, init=first)
    layer.init = total.init = init
    resets = [reset_all, lambda model: model.reset_parameters()]
    for again in [lambda model: None] * (first == init) + resets:
        again(layer)
        for d, h, weight, bias in zip((40, 50), (30, 20), layer.weights, layer.biases):
            bound = {"linear": d**-0.5, "paper": (6 / (d + h)) ** 0.5, "unit": (3 / d) ** 0.5}[init]
            assert 0.97 * bound < weight.abs().max() <= bound
            assert weight.var().item() == pytest.approx(bound**2 / 3, rel=0.1)
            assert bias.any() == (init == "linear")
        again(total)
        low, high = (0.2475, 0.25) if init == "linear" else (-1.0, 0.0)  # as of a dense layer
        assert low < total.bias.abs().max() <= high
        bound = {"linear": 0.5, "paper": (6 / 34) ** 0.5, "unit": 0.75**0.5}[init]
        for term in total.terms:  # so that the variance of their sum is that of one term
            first, second = (weight.abs().max() for weight in term.weights)
            assert 0.9 * bound < first * 2**0.5 <= 1.0001 * bound and 0.9 * bound < second <= bound
        nn.init.ones_(layer.weights[0])
        nn.init.ones_(total.terms[0].weights[0])
        total.bias.data.fill_(math.nan)
    other, before = copy.deepcopy(layer), [weight.clone() for weight in layer.weights]
    other.align_layers[0].reset_parameters()
    assert not torch.equal(other.weights[0], before[0]), "a copy draws its own numbers"
    assert all(map(torch.equal, layer.weights, before))
