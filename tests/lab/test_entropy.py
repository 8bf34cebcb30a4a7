"""Von Neumann entropy: every option against an independent formula, and the module hooks."""

import math

import pytest
import torch
from lab import entropy as E
from torch import nn

from ndlinear import NdLinear


def by_singular_values(z, centre, unit_rows):
    """The definition, by another route."""
    z = z.reshape(len(z), -1).double()
    z = z - z.mean(0) if centre else z
    z = z / z.norm(dim=1, keepdim=True) if unit_rows else z
    p = torch.linalg.svdvals(z).square()
    p = (p / p.sum()).clamp_min(1e-300)
    return float(-(p * p.log()).sum())


@pytest.mark.parametrize("centre", [True, False])
@pytest.mark.parametrize("unit_rows", [True, False])
@pytest.mark.parametrize("samples", [30, 5])
def test_entropy_is_that_of_the_squared_singular_values(samples, centre, unit_rows):
    z, how = torch.randn(samples, 4, 3), {"centre": centre, "unit_rows": unit_rows}
    wanted = by_singular_values(z, **how)
    assert E.entropy(z, **how) == pytest.approx(wanted, abs=1e-9)
    for name, n in {"log-width": 12, "log-min": min(samples, 12)}.items():
        for base in (math.e, 2):
            found = E.entropy(z, normaliser=name, base=base, **how)
            assert found == pytest.approx(wanted / math.log(n), abs=1e-9)


def test_another_base_one_direction_and_none():
    assert E.entropy(torch.eye(5), centre=False, base=5) == pytest.approx(1)
    assert E.entropy(torch.randn(9, 1, 1)) == pytest.approx(0, abs=1e-12)  # one direction
    assert E.entropy(torch.ones(9, 4)) == 0  # nothing varies
    assert E.entropy(torch.randn(9, 1), normaliser="log-width") == 0


def test_layer_entropies_name_the_layers_in_order_and_leave_no_hook():
    first, last = NdLinear((2, 5), (4, 4)), NdLinear((4, 4), (1, 1))
    model = nn.Sequential(first, nn.ReLU(), last)
    x, how = torch.randn(50, 2, 5), {"unit_rows": True, "normaliser": "log-min"}
    found = E.layer_entropies(model, x, (nn.Linear, NdLinear, nn.ReLU), **how)
    assert list(found) == ["0", "1", "2"]  # not the nn.Linear inside an NdLinear
    assert found["0"] == pytest.approx(E.entropy(first(x), **how)) and found["2"] == 0
    assert not any(module._forward_hooks for module in model.modules())
