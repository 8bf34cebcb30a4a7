"""DoRA against peft, where it is installed; sums of products against written-out matrices."""

import copy
import functools

import pytest
import torch
from lab import adapters, models
from lab.chapters import lora
from torch import nn

X = torch.linspace(-1, 1, 5 * 24).reshape(5, 24).double().cos()
NAMES = {"A": "lora_A.default", "B": "lora_B.default", "m": "lora_magnitude_vector.default"}


@pytest.fixture
def base():
    return nn.Sequential(nn.Linear(24, 48), nn.Tanh(), nn.Linear(48, 24, bias=False)).double()


def maps(model):
    return {name: model.get_submodule(name) for name in ("0", "2")}


def test_outputs_gradients_and_starts_of_dora_are_those_of_peft(base):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["0", "2"], r=3, lora_alpha=3, use_dora=True)
    theirs = peft.get_peft_model(copy.deepcopy(base), config).base_model.model.double()
    ours = copy.deepcopy(base)
    lora.attach(ours, maps(ours), functools.partial(adapters.DoRA, rank=3))
    pairs = [
        (ours[place].get_parameter(mine), theirs[place].get_parameter(f"{name}.weight"))
        for place in (0, 2)
        for mine, name in NAMES.items()
    ]
    for mine, wanted in pairs:
        assert mine.abs().max().item() == pytest.approx(wanted.abs().max().item(), rel=0.1)
        mine.data += 0.3 * torch.randn_like(mine)
        wanted.data.copy_(mine)
    assert torch.allclose(theirs(X), ours(X), atol=1e-12)
    theirs(X).square().sum().backward()
    ours(X).square().sum().backward()
    for mine, wanted in pairs:
        assert torch.allclose(mine.grad, wanted.grad, atol=1e-10)


@pytest.mark.parametrize("fold", [lora.square, functools.partial(lora.crossed, k=4)])
def test_a_sum_of_products_is_the_sum_of_their_matrices_and_starts_at_zero(base, fold):
    model = lora.attach(copy.deepcopy(base), maps(base), lora.terms(3, fold))
    assert torch.allclose(model(X), base(X), atol=1e-12)
    layer = model[2]
    assert models.size(layer) == 3 * sum(d * h for d, h in zip(*fold(48, 24)))
    products = []
    for term in layer.update.terms:
        nn.init.normal_(term.weights[1])
        products.append(torch.kron(*term.weights))
    x = torch.randn(5, 48).double()
    assert torch.allclose(layer(x), x @ (layer.base_layer.weight + sum(products)).T)
    with torch.autocast("cpu", torch.bfloat16):
        update = layer(x).double() - layer.base_layer(x).double()
    assert torch.allclose(update, x @ sum(products).T, atol=0.05)
