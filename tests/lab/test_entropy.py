"""Von Neumann entropy: every option against an independent formula, bounds, additivity, and the module hooks."""

import math

import pytest
import torch
from lab import LabError
from lab import entropy as E
from torch import nn

from ndlinear import NdLinear, kronecker_weight


def by_singular_values(z, centre=True, unit_rows=False):
    """The definition, by another route."""
    z = z.reshape(len(z), -1).double()
    z = z - z.mean(0) if centre else z
    z = z / z.norm(dim=1, keepdim=True) if unit_rows else z
    p = torch.linalg.svdvals(z).square()
    p = (p / p.sum()).clamp_min(1e-300)
    return float(-(p * p.log()).sum())


@pytest.fixture
def z():
    return torch.randn(30, 4, 3, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("centre", [True, False])
@pytest.mark.parametrize("unit_rows", [True, False])
def test_entropy_is_that_of_the_squared_singular_values(z, centre, unit_rows):
    for part in (z, z[:5]):
        value = E.entropy(part, centre=centre, unit_rows=unit_rows)
        assert value == pytest.approx(by_singular_values(part, centre, unit_rows), abs=1e-9)


def test_known_spectra():
    assert E.entropy(torch.eye(5), centre=False) == pytest.approx(math.log(5))
    assert E.entropy(torch.eye(5)) == pytest.approx(
        math.log(4)
    )  # centring takes one direction away
    assert E.entropy(torch.eye(5), centre=False, base=5) == pytest.approx(1)
    assert E.entropy(torch.tensor([[1.0, 0], [0, math.sqrt(3)]]), centre=False) == pytest.approx(
        -0.25 * math.log(0.25) - 0.75 * math.log(0.75)
    )
    assert E.entropy(torch.randn(9, 1, 1)) == pytest.approx(
        0, abs=1e-12
    )  # a scalar output has one direction
    assert E.entropy(torch.ones(9, 4)) == 0  # nothing varies


def test_normalisers_divide_by_the_logarithm_they_name(z):
    plain, few = E.entropy(z), E.entropy(z[:5])
    assert E.entropy(z, normaliser="log-width") == pytest.approx(plain / math.log(12))
    assert E.entropy(z, normaliser="log-samples") == pytest.approx(plain / math.log(30))
    assert E.entropy(z, normaliser="log-min") == pytest.approx(plain / math.log(12))
    assert E.entropy(z[:5], normaliser="log-min") == pytest.approx(few / math.log(5))
    assert E.entropy(z[:5], normaliser="log-rank") == pytest.approx(
        few / math.log(4)
    )  # five centred rows
    assert E.entropy(z, normaliser="log-min", base=2) == pytest.approx(
        E.entropy(z, normaliser="log-min")
    )
    assert E.entropy(torch.randn(9, 1), normaliser="log-width") == 0


def test_bounds_and_invariances(z):
    flat = z.flatten(1).double()
    rotation = torch.linalg.qr(torch.randn(12, 12, dtype=torch.float64)).Q
    value = E.entropy(flat)
    assert 0 <= value <= math.log(12)
    for same in (
        3 * flat,
        flat + 5,
        flat @ rotation,
        flat[torch.randperm(30)],
        torch.cat([flat, flat]),
    ):
        assert E.entropy(same) == pytest.approx(value)
    assert E.shares(flat).sum() == pytest.approx(1) and (E.shares(flat).diff() <= 0).all()


def test_kronecker_entropy_is_the_entropy_of_the_kronecker_product():
    layer = NdLinear((3, 2, 4), (2, 5, 4), bias=False, dtype=torch.float64)
    whole = kronecker_weight(layer).T  # rows are the columns of a white input: the identity
    assert E.kronecker_entropy(layer.weights) == pytest.approx(E.entropy(whole, centre=False))
    assert E.kronecker_entropy(layer.weights, base=2) == pytest.approx(
        E.entropy(whole, centre=False, base=2)
    )


def test_typical_value_and_gap():
    noise = torch.Generator().manual_seed(0)
    for rows, columns in ((60, 60), (40, 80), (80, 40)):
        draws = [
            E.entropy(torch.randn(rows, columns, generator=noise), centre=False) for _ in range(5)
        ]
        assert sum(draws) / 5 == pytest.approx(E.typical(rows, columns), abs=0.03)
    assert E.typical_gap((9, 9, 9), (9, 9, 9)) == pytest.approx(1.0)
    assert E.typical_gap((7,), (3,)) == pytest.approx(0)


def test_layer_entropies_name_the_layers_in_order_and_leave_no_hook():
    model = nn.Sequential(
        nn.Unflatten(1, (2, 5)), NdLinear((2, 5), (4, 4)), nn.ReLU(), NdLinear((4, 4), (1, 1))
    )
    x = torch.randn(50, 10)
    kinds = (nn.Linear, NdLinear, nn.ReLU)
    found = E.layer_entropies(model, x, kinds, unit_rows=True, normaliser="log-min")
    assert list(found) == ["1", "2", "3"]  # not the nn.Linear inside an NdLinear
    assert found["1"] == pytest.approx(
        E.entropy(model[:2](x), unit_rows=True, normaliser="log-min")
    )
    assert found["3"] == 0
    assert not any(module._forward_hooks for module in model.modules())


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: E.entropy(torch.ones(3, 2), normaliser="log"), "log-width"),
        (lambda: E.entropy(torch.empty(0, 2)), "at least one entry"),
        (lambda: E.entropy(torch.tensor(1.0)), "samples"),
        (lambda: E.entropy(torch.full((3, 2), float("nan"))), "finite"),
    ],
)
def test_errors_say_what_is_wrong(call, message):
    with pytest.raises(LabError, match=message):
        call()
