"""The start survives what frameworks do to a model: reset loops after `to_empty`, copies and pickles."""

import copy
import math
import pickle

import pytest
import torch
from torch import nn

import ndlinear as nd
import ndlinear_lora


def reset_all(model):
    """As after `to_empty`, for example by FSDP2's users: parents first, then their children."""
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()


def emptied(make):
    """A model made on the meta device, then given memory that holds anything."""
    with torch.device("meta"):
        model = make()
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        parameter.data.fill_(math.nan)
    return model


def deviation(layer, dims) -> float:
    with torch.no_grad():
        return layer(torch.randn(200, *dims)).std().item()


def test_a_start_on_the_meta_device_then_sharded(one_process):
    """As FSDP2's users start a large model: shapes first, then shards of memory, then the values."""
    fsdp = pytest.importorskip("torch.distributed.fsdp")
    if not hasattr(fsdp, "fully_shard"):
        pytest.skip("this torch has no fully_shard")
    torch.manual_seed(0)
    sizes = ((16, 16), (16, 16))
    with torch.device("meta"):
        model = nn.Sequential(
            nd.NdLinear(*sizes, init="unit"), nd.NdLinearSum(*sizes, 3, init="unit")
        )
    for layer in model:
        fsdp.fully_shard(layer)
    fsdp.fully_shard(model).to_empty(device="cpu")
    reset_all(model)
    assert not any(parameter.is_meta for parameter in model.parameters())
    for layer in model:
        assert 0.8 < deviation(layer, (16, 16)) < 1.25


COPIES = {
    "itself": lambda model: model,
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
}


STARTS = {
    "layer": lambda: nd.NdLinear((16, 16), (16, 16), init="unit"),
    "sum": lambda: nd.NdLinearSum((16, 16), (16, 16), 9, init="unit"),
}


@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("reset", [reset_all, lambda layer: layer.reset_parameters()])
@pytest.mark.parametrize("make", STARTS.values(), ids=STARTS)
def test_unit_variance_after_a_reset(make, reset, how):
    """Whatever the number of terms."""
    torch.manual_seed(0)
    layer = COPIES[how](emptied(make))
    reset(layer)
    assert 0.8 < deviation(layer, (16, 16)) < 1.25
    assert not any(p.any() for name, p in layer.named_parameters() if name.endswith("bias"))


def test_the_bias_of_a_sum_is_drawn():
    """Like that of a dense layer."""
    layer = nd.NdLinearSum((4, 4), (30, 30), 2)
    for again in (lambda layer: None, reset_all):
        again(layer)
        assert 0.99 * 0.25 < layer.bias.abs().max() <= 0.25
        layer.bias.data.fill_(math.nan)


def test_a_copy_draws_its_own_numbers():
    layer = nd.NdLinear((4, 6), (3, 5), init="unit")
    other = copy.deepcopy(layer)
    before = [w.clone() for w in layer.weights]
    other.align_layers[0].reset_parameters()
    assert not torch.equal(other.weights[0], before[0])
    assert all(torch.equal(a, b) for a, b in zip(layer.weights, before))


@pytest.mark.parametrize("how", COPIES)
def test_an_adapter_that_is_reset_starts_at_zero(how):
    """A loop over all modules would draw the adapter's modes, and the base layer, after it."""
    layer = COPIES[how](ndlinear_lora.NdLinearLoRA(nn.Linear(24, 20)))
    base = layer.base_layer.weight.clone()
    for parameter in layer.adapter.parameters():
        parameter.data.fill_(1.0)
    layer.merge()
    layer.reset_parameters()
    x = torch.randn(5, 24)
    assert torch.equal(layer(x), layer.base_layer(x)) and torch.equal(layer.base_layer.weight, base)
    assert layer.adapter.weights[layer.adapter.order[0]].unique().numel() > 2


@pytest.mark.parametrize("init", ["linear", "paper", "unit"])
def test_a_loop_draws_what_the_constructor_draws_from(init):
    """The largest number of many draws lies just below the bound of the init; only "linear" draws biases."""
    layer = nd.NdLinear((40, 50), (30, 20), init=init)
    for again in (lambda model: None, reset_all, nd.NdLinear.reset_parameters):
        again(layer)
        for d, h, weight, bias in zip((40, 50), (30, 20), layer.weights, layer.biases):
            bound = {"linear": d**-0.5, "paper": (6 / (d + h)) ** 0.5, "unit": (3 / d) ** 0.5}[init]
            assert 0.97 * bound < weight.abs().max() <= bound
            assert weight.var().item() == pytest.approx(bound**2 / 3, rel=0.1)
            assert bias.any() == (init == "linear")
        nn.init.ones_(layer.weights[0])
