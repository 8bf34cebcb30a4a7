"""Chapter 15: training many seeds at once when parameters have rates of their own, and reading which rate is best."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import pandas as pd
import torch
from torch import Tensor, nn

from .. import stacked
from ..modes import LabError
from ..stats import interval

WORST = 1e6  # what is recorded in place of a loss that is larger or not a number


# ------------------------------------------------------------------------------------------------------------- training
def named_rates(model: nn.Module, groups: Sequence[Mapping]) -> dict[str, float]:
    """Rate of each parameter of a model by name, from parameter groups."""
    rates = {id(p): group["lr"] for group in groups for p in group["params"]}
    return {name: rates[id(p)] for name, p in model.named_parameters()}


def fit(
    make: Callable[[], nn.Module],
    data,
    *,
    seeds: Sequence[int],
    rates: Callable[[nn.Module], Sequence[Mapping]],
    loss: Callable,
    epochs: int,
    batch_size: int,
    optimiser=torch.optim.Adam,
) -> tuple[stacked.Stack, list[dict[str, float]]]:
    """Train one model for each seed, all at once, as `lab.stacked.fit` does, with the rates that ``rates(model)`` groups.

    A member whose loss leaves the numbers goes on and is reported as diverged; the others do not notice.

    Returns:
        The stack (moments "best" by validation loss and "end"), and for each member its training loss in the last epoch,
        its lowest validation loss, and whether it diverged.
    """
    device = torch.device("cpu")
    skeleton, weights = stacked._members(make, seeds, device, dropout=False)
    (x, y), (x_val, y_val) = stacked._data(data, len(seeds), device)
    steps = optimiser(_grouped(weights, named_rates(made := make(), rates(made))))
    orders = [torch.Generator().manual_seed(seed) for seed in seeds]
    kept = {name: value.detach().clone() for name, value in weights.items()}
    lowest, best = torch.full((len(seeds),), math.inf), [0] * len(seeds)
    curves: list[list[dict[str, float]]] = [[] for _ in seeds]
    for now in range(1, epochs + 1):
        train = stacked._one_epoch(skeleton.train(), weights, x, y, loss, steps, orders, batch_size)
        val = _validate(skeleton.eval(), weights, x_val, y_val, loss)
        better = val < lowest
        lowest = torch.where(better, val, lowest)
        stacked._keep(kept, weights, better, best, now)
        for curve, *point in zip(curves, _numbers(train), _numbers(val)):
            curve.append(dict(zip(("epoch", "train_loss", "val_loss"), (now, *point))))
    end = {name: value.detach() for name, value in weights.items()}
    epoch = {"best": best, "end": [epochs] * len(seeds)}
    halted = [False] * len(seeds)
    stack = stacked.Stack(
        list(seeds), skeleton, {"best": kept, "end": end}, epoch, halted, 0.0, curves
    )
    found = zip(_numbers(train), _numbers(lowest), _numbers(val))
    return stack, [
        {"train_loss": a, "val_loss": b, "diverged": float(max(a, c) >= WORST)} for a, b, c in found
    ]


def _grouped(weights: Mapping[str, Tensor], rates: Mapping[str, float]) -> list[dict]:
    """The stacked weights in groups of one rate each."""
    groups: dict[float, list[Tensor]] = {}
    for name, value in weights.items():
        groups.setdefault(rates[name], []).append(value)
    return [{"params": values, "lr": rate} for rate, values in groups.items()]


@torch.no_grad()
def _validate(skeleton, weights, x: Tensor, y: Tensor, loss: Callable) -> Tensor:
    found = stacked._means(skeleton, weights, x, y, {"loss": loss})
    return torch.tensor([point["loss"] for point in found])


def _numbers(values: Tensor) -> list[float]:
    """Losses as numbers that JSON knows."""
    return values.detach().nan_to_num(WORST, WORST).clamp_max(WORST).tolist()
