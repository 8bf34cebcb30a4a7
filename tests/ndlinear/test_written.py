"""The dense weight and bias of a FlatNdLinear and of an adapter: made for reading; a write, which would go nowhere, is refused."""

import copy
import operator

import pytest
import torch
from ndlinear_cases import randomise
from torch import nn
from torch.nn.utils import prune

import ndlinear as nd
import ndlinear_lora

DENSE = {  # a layer, how its dense weight is made, what a write to it says
    "flat": (
        lambda: nd.FlatNdLinear((4, 6), (3, 5)),
        nd.kronecker_weight,
        "is lost: change `align",
    ),
    "adapter": (
        lambda: ndlinear_lora.NdLinearLoRA(nn.Linear(24, 15), bias=True),
        lambda layer: layer.base_layer.weight + nd.kronecker_weight(layer.adapter),
        r"lost: write to base_layer\.weight, or to adapter",
    ),
}
WRITES = {
    "init": lambda layer: nn.init.kaiming_uniform_(layer.weight),
    "data": lambda layer: layer.weight.data.normal_(0, 0.02),
    "a part": lambda layer: layer.weight[:3].fill_(0),
    "an item": lambda layer: layer.weight.__setitem__(0, 1.0),
    "chunk": lambda layer: layer.weight.chunk(3)[0].zero_(),
    "unbind": lambda layer: layer.weight.detach().unbind(0)[0].zero_(),
    "foreach": lambda layer: torch._foreach_zero_([layer.weight]),
    "add_": lambda layer: layer.bias.add_(1),
    "new data": lambda layer: setattr(layer.weight, "data", torch.zeros(15, 24)),
    "out": lambda layer: torch.mul(torch.ones(15, 24), 2, out=layer.weight),
    "a parameter": lambda layer: setattr(layer, "weight", nn.Parameter(torch.zeros(15, 24))),
    "no bias": lambda layer: setattr(layer, "bias", nn.Parameter(torch.zeros(15))),
    "prune": lambda layer: prune.l1_unstructured(layer, "weight", 0.5),
    "set_": lambda layer: layer.weight.set_(torch.zeros(15, 24)),
}
for name in ("iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow"):
    write = getattr(operator, name)  # also of layer.bias += 2, which would set the bias afterwards
    WRITES[f"{name} to data"] = lambda layer, write=write: write(layer.weight.data, 2)
    WRITES[f"{name} to a bias"] = lambda layer, write=write: write(layer.bias, 2)
dense = pytest.mark.parametrize("make, by_formula, words", DENSE.values(), ids=DENSE)


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
@dense
def test_a_write_to_the_dense_weight_is_refused_with_what_to_do(make, by_formula, words, write):
    layer = randomise(make())
    before = copy.deepcopy(layer.state_dict())
    for context in (torch.no_grad(), torch.enable_grad()):
        with context, pytest.raises(TypeError, match=words):
            write(layer)
    assert all(torch.equal(value, before[name]) for name, value in layer.state_dict().items())
    with pytest.raises((AttributeError, TypeError)):
        layer.weight = torch.zeros(15, 24)


@dense
def test_the_dense_weight_is_a_plain_tensor_in_all_that_reads_it(make, by_formula, words, tmp_path):
    layer, linear, x = randomise(make()).double(), nn.Linear(24, 15).double(), torch.randn(7, 24)
    weight, x = layer.weight, x.double()
    torch.testing.assert_close(x @ weight.t() + layer.bias, layer(x))
    read = (weight * 2, weight.clone(), weight.float(), weight.t() @ weight, weight.clone().zero_())
    assert {type(result) for result in (*read, copy.deepcopy(weight.detach()))} == {torch.Tensor}
    torch.save({"weight": weight.detach()}, tmp_path / "dense.pt")
    stored = torch.load(tmp_path / "dense.pt", weights_only=True)["weight"]
    assert type(stored) is torch.Tensor and torch.equal(stored, by_formula(layer))
    parameters = [p for name, p in layer.named_parameters() if name.endswith("layers.0.weight")]
    (grad,) = torch.autograd.grad(weight.square().sum(), parameters)
    assert torch.equal(grad, torch.autograd.grad(by_formula(layer).square().sum(), parameters)[0])
    with torch.no_grad():
        linear.weight.copy_(weight)
        assert torch.equal(linear.weight, weight)
        linear.weight[:] = 2 * weight
        linear.weight.sub_(weight)
    torch.testing.assert_close(linear.weight, weight.clone())
    linear.load_state_dict({"weight": weight, "bias": layer.bias})
    torch.testing.assert_close(linear(x), layer(x))
    torch.mm(weight.detach(), weight.detach().T, out=torch.empty(15, 15).double())
    with pytest.raises(TypeError, match=words):
        torch.mm(linear.weight.detach(), torch.eye(24).double(), out=layer.weight)
    assert weight.numpy(force=True).shape == (15, 24)
