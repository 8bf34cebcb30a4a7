"""Rates by rule: known values, and decays that were carried out; the evidence of chapter 15 asserts the rule itself."""

import math

import pytest
import torch
from torch import nn

from ndlinear import NdLinear, NdLinearSum, kronecker_weight
from ndlinear_guide import layers
from ndlinear_guide.rates import layer_shapes, lr_groups, rates
from ndlinear_lora import NdLinearLoRA

RATE = 1e-3


def weights(found):
    return [rate for name, rate in found.items() if not name.endswith("bias")]


# ---------------------------------------------------------------------------------------------------------- known values
def other(**parts):
    """A layer of another class is known by its parts."""
    module = nn.Module()
    for name, part in parts.items():
        setattr(module, name, part)
    return module


def twice():
    """A layer that stands in two places counts once."""
    layer = NdLinear((8, 8), (8, 8))
    return nn.Sequential(layer, nn.ReLU(), layer)


HALF = [1 / 2, 1 / 2]
KNOWN = [  # optimiser, layer, factors on the rate of its weights and of its biases
    ("adam", NdLinear((8, 8), (8, 8)), [4, 4], HALF),
    ("adam", NdLinear((16, 8, 8), (16, 8, 8)), [64 / 3, 128 / 3, 128 / 3], [1 / 3] * 3),
    # sizes that change: dense 24 -> 24
    ("adam", NdLinear((6, 4), (3, 8)), [24 / 12, 24 / 8], HALF),
    ("sgd", NdLinear((6, 4), (3, 8)), [1 / 4, 1], [1 / 16, 1 / 6]),
    ("muon", NdLinear((6, 4), (3, 8)), [math.sqrt(1 / 2) / 2, 1 / 2], HALF),
    # all factors of a sum count, its bias is a dense one; of an adapter the map below is not trained
    ("adam", NdLinearSum((8, 8), (8, 8), rank=3), [64 / 8 / 6] * 6, [1]),
    ("adam", NdLinearLoRA(nn.Linear(64, 36)), [64 / 8 / 2] * 2, []),
    (
        "adam",
        other(align_layers=nn.ModuleList([nn.Linear(4, 2), nn.Linear(5, 3)])),
        [20 / 8, 2],
        HALF,
    ),
    ("adam", other(terms=nn.ModuleList([NdLinear((8, 8), (8, 8))])), [4, 4], HALF),
    ("adam", other(matrices=nn.ParameterList([torch.ones(2, 2)])), [1], []),
    ("adam", twice(), [4, 4], HALF),
    # all others keep the rate
    ("adam", nn.Sequential(nn.Conv2d(3, 4, 3), NdLinear((8, 8), (8, 8))), [1, 4, 4], [1, *HALF]),
    ("adam", nn.Sequential(nn.BatchNorm2d(4), nn.Linear(18, 2)), [1, 1], [1, 1]),
    # layers that say what their matrices read and write
    ("adam", layers.LowRank(16, 24, 9), [1 / 2, 16 / 18], [1]),
    ("adam", layers.Kronecker((6, 4), (3, 8)), [24 / 12, 24 / 8], [1]),
]


@pytest.mark.parametrize(("optimiser", "model", "factors", "biases"), KNOWN)
def test_rates_of_a_layer(optimiser, model, factors, biases):
    found = rates(model, RATE, optimiser=optimiser)
    assert set(found) == {name for name, p in model.named_parameters() if p.requires_grad}
    groups = lr_groups(model, RATE, optimiser=optimiser)
    assert sum(len(group["params"]) for group in groups) == len(found), "each in one group"
    assert weights(found) == pytest.approx([RATE * f for f in factors])
    others = [rate for name, rate in found.items() if name.endswith("bias")]
    assert others == pytest.approx([RATE * f for f in biases])


# ----------------------------------------------------------------------------------------------------------- any model


def test_frozen_parameters_are_left_out():
    model = nn.Sequential(NdLinear((4, 4), (4, 4)), nn.Flatten(), nn.Linear(16, 2))
    model[0].align_layers[0].requires_grad_(False)
    assert not any(name.startswith("0.align_layers.0") for name in rates(model, RATE))
    with pytest.raises(ValueError, match="nothing to train"):
        lr_groups(model.requires_grad_(False), RATE)


def test_a_shared_matrix_gets_the_smaller_rate():
    tied = nn.Sequential(NdLinear((8, 8), (8, 8)), NdLinear((8, 2), (8, 2)))
    tied[1].align_layers[0].weight = tied[0].align_layers[0].weight  # 4 there, 1 here
    read_out = nn.Sequential(NdLinear((8, 8), (8, 8)), nn.Linear(8, 8))
    read_out[1].weight = read_out[0].align_layers[0].weight
    for model in (tied, read_out):
        assert rates(model, RATE)["0.align_layers.0.weight"] == RATE


def test_a_parameter_that_a_layer_was_given_keeps_the_rate():
    layer = NdLinear((8, 8), (8, 8))
    layer.scale = nn.Parameter(torch.ones(()))
    assert rates(layer, RATE)["scale"] == RATE


def test_muon_can_be_given_the_matrices_alone():
    model = nn.Sequential(NdLinear((4, 4), (4, 4)), nn.Flatten(), nn.Linear(16, 1))
    kinds = [{p.ndim == 2 for p in g["params"]} for g in lr_groups(model, RATE, optimiser="muon")]
    assert all(len(kind) == 1 for kind in kinds) and {True} in kinds and {False} in kinds


# --------------------------------------------------------------------------------------------- other widths, weight decay
def test_with_the_shapes_of_a_small_model_rates_no_longer_depend_on_the_width():
    def net(side):
        parts = NdLinear((4, 4), (side, side)), nn.ReLU(), NdLinear((side, side), (side, side))
        return nn.Sequential(*parts, nn.Flatten(), nn.Linear(side**2, 3))

    small = layer_shapes(net(4))
    assert small == {"0": (16, 16), "2": (16, 16), "4": (16, 3)}
    assert rates(net(4), RATE) == rates(net(4), RATE, tuned_at=small)
    wide = rates(net(32), RATE, tuned_at=small)
    assert wide["4.weight"] == pytest.approx(RATE * 16 / 1024)
    assert wide["2.align_layers.0.weight"] == pytest.approx(RATE * 16 / (2 * 32))
    assert wide["2.align_layers.0.bias"] == pytest.approx(RATE / 2)
    assert wide["4.bias"] == pytest.approx(RATE)
    model = nn.Sequential(nn.Conv1d(8, 6, 5))  # a convolution can be named too
    assert layer_shapes(model) == {"0": (40, 6)}
    assert rates(model, RATE, tuned_at={"0": (20, 6)})["0.weight"] == pytest.approx(RATE / 2)


@pytest.mark.parametrize("optimiser", ["adam", "sgd"])
def test_decay_shrinks_the_kronecker_matrix_as_lr_and_decay_shrink_a_dense_one(optimiser):
    sums = NdLinearSum((4, 6), (3, 5), rank=3, dtype=torch.float64)
    for layer in (NdLinear((4, 6, 2), (3, 5, 2), dtype=torch.float64), sums):
        before, decay = kronecker_weight(layer).detach(), 0.1
        groups = lr_groups(layer, RATE, optimiser=optimiser, weight_decay=decay)
        steps = (torch.optim.AdamW if optimiser == "adam" else torch.optim.SGD)(groups)
        for p in layer.parameters():
            p.grad = torch.zeros_like(p)
        steps.step()
        shrunk = (kronecker_weight(layer).detach() / before).flatten()
        assert torch.allclose(shrunk, torch.full_like(shrunk, 1 - RATE * decay), atol=1e-8)
    # without one it is left to the optimiser
    assert all(set(g) == {"params", "lr"} for g in lr_groups(NdLinear((2, 2), (2, 2)), RATE))


# --------------------------------------------------------------------------------------------------------------- errors
@pytest.mark.parametrize(
    ("error", "words", "arguments"),
    [
        (TypeError, "torch.nn.Module", {"model": [torch.zeros(2)]}),
        (TypeError, "must be a number", {"lr": True}),
        (ValueError, "positive and finite", {"lr": math.inf}),
        (ValueError, "positive and finite", {"lr": math.nan}),
        (ValueError, "finite and not negative", {"weight_decay": -1.0}),
        (ValueError, "finite and not negative", {"weight_decay": math.nan}),
        (ValueError, "'adam', 'sgd', 'muon'", {"optimiser": "adagrad"}),
        (ValueError, "layers of this model", {"tuned_at": {"1": (4, 4)}}),
        (ValueError, "two positive integers", {"tuned_at": {"0": (4, 0)}}),
    ],
)
def test_bad_arguments_are_named(error, words, arguments):
    good = {"model": nn.Sequential(NdLinear((2, 2), (2, 2))), "lr": RATE}
    with pytest.raises(error, match=words):
        lr_groups(**(good | arguments))
