"""Q7 of the benchmark: how long a training step of every model takes, side by side, on the middle set of each kind of data."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from ..data.with_axes import SETS
from ..timing import rounds
from . import models, protocol
from .models import Shape

FREE = ("constant",)  # nothing of it is trained


def middle() -> list[str]:
    """Of each kind of data the set with the middle number of inputs; of two middle ones the smaller."""
    found = []
    for kind in dict.fromkeys(each.kind for each in SETS.values()):
        own = [name for name, each in SETS.items() if each.kind == kind]
        own.sort(key=lambda name: protocol.shape_of(name).inputs)
        found.append(own[(len(own) - 1) // 2])
    return found


def networks(shape: Shape) -> dict[str, torch.nn.Module]:
    """Every model that fits at each budget, by "layer, budget"; a training of one network, no stack of them."""
    found = {}
    for budget, kinds in models.LAYERS.items():
        for kind in (kind for kind in kinds if kind not in FREE):
            net = models.network(kind, shape, budget)
            if net is not None:
                found[f"{kind}, {budget}"] = net
    return found


def step_of(net: torch.nn.Module, x: torch.Tensor, y: torch.Tensor, loss: Callable) -> Callable:
    """A training step: outputs, loss, gradients and Adam."""
    adam = torch.optim.Adam(net.parameters())

    def step() -> None:
        adam.zero_grad()
        loss(net(x), y).backward()
        adam.step()

    return step


def time_steps(config: dict) -> dict:
    """Microseconds of a step of every model on a set: data, rounds, seed."""
    shape, loss = protocol.shape_of(config["data"]), protocol.loss_of(config["data"])
    torch.manual_seed(config["seed"])
    x = torch.randn(protocol.BATCH, shape.inputs)
    real = loss is torch.nn.functional.mse_loss
    y = torch.randn(len(x), shape.outputs) if real else torch.arange(len(x)) % shape.outputs
    calls = {name: step_of(net, x, y, loss) for name, net in networks(shape).items()}
    times = rounds(calls, config["rounds"], seed=config["seed"])
    curve = {name: [float(f"{1e6 * t:.4g}") for t in own] for name, own in times.items()}
    return {"metrics": {name: float(np.median(own)) for name, own in curve.items()}, "curve": curve}
