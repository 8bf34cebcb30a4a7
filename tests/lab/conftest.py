"""What tests of the lab share: how networks must start, and that no figure stays open."""

import math
import sys

import pytest
import torch
from lab import data
from torch import nn


@pytest.fixture(autouse=True)
def figures_are_closed():
    yield
    if plt := sys.modules.get("matplotlib.pyplot"):
        plt.close("all")


def bounds(module: nn.Module) -> dict[str, float]:
    """By the documentation of torch: each of a module's own parameters is uniform on [-bound, bound], or zero (bound 0).

    The weights of a norm are one; 1 stands for that here.
    """
    if isinstance(module, nn.MultiheadAttention):
        width = module.embed_dim
        whole = math.sqrt(6 / (width + 3 * width))
        return {"in_proj_weight": whole, "in_proj_bias": 0, "out_proj.bias": 0}
    if isinstance(module, nn.RNN):
        return {name: 1 / math.sqrt(module.hidden_size) for name, _ in module.named_parameters()}
    if isinstance(module, (nn.Linear, nn.Conv2d)):
        bound = 1 / math.sqrt(math.prod(module.weight.shape[1:]))
        return {name: bound for name, _ in module.named_parameters()}
    return {}


@pytest.fixture
def starts_as_torch_does():
    """A check that every parameter of a network starts as torch documents it for the layer it belongs to."""

    def check(net: nn.Module) -> None:
        expected: dict[str, float] = {}
        for name, module in net.named_modules():
            prefix = f"{name}." if name else ""
            for own, bound in bounds(module).items():
                expected.setdefault(prefix + own, bound)  # an attention comes before its last map
        norms = (nn.LayerNorm, nn.BatchNorm2d)
        for module in net.modules():
            if isinstance(module, norms):
                assert torch.all(module.weight == 1) and not torch.any(module.bias)
        within_norms = {
            f"{name}.{own}"
            for name, module in net.named_modules()
            if isinstance(module, norms)
            for own in ("weight", "bias")
        }
        assert set(expected) | within_norms == {name for name, _ in net.named_parameters()}
        for name, bound in expected.items():
            values = net.get_parameter(name).detach()
            largest = values.abs().max().item()
            assert largest <= bound * (1 + 1e-6), f"{name}: {largest} beyond {bound}"
            # of n even draws the largest comes this close but for one case in 20,000
            assert largest >= bound * (1 - 10 / values.numel()), f"{name}: {largest}, not {bound}"

    return check


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty data folder, in replay: nothing that was loaded before is known."""
    monkeypatch.setenv("NDL_DATA", str(tmp_path))
    monkeypatch.setenv("NDL_MODE", "replay")
    data._load.cache_clear()
    yield tmp_path
    data._load.cache_clear()
