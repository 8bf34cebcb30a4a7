"""Many seeds in one training of a number of steps, with a rate for each parameter and a schedule that ends with the training."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from ndlinear_guide import schedule

from . import stacked

WORST = 1e6  # what is recorded in place of a loss that is larger or not a number


def _batches(count: int, size: int, steps: int, orders: Sequence[torch.Generator]):
    """Indices (members, size) of every step: each member goes through its samples in an order of its own, again and again."""
    size = min(size, count)
    left = torch.empty(len(orders), 0, dtype=torch.long)
    for _ in range(steps):
        if left.shape[1] < size:
            left = torch.stack([torch.randperm(count, generator=order) for order in orders])
        yield left[:, :size]
        left = left[:, size:]


def fit(
    make: Callable[[], nn.Module],
    parts: dict[str, tuple[Tensor, Tensor]],
    *,
    seeds: Sequence[int],
    rate: Callable[[nn.Module], dict[str, float]],
    loss: Callable,
    scores: dict[str, Callable],
    steps: int,
    batch: int,
    checks: int = 0,
) -> list[dict[str, float]]:
    """Train one model for each seed, all at once, with Adam for a number of steps; the scores of each on the test part.

    Args:
        parts: "train", "test" and, with ``checks``, "val": inputs and targets, (members, n, ...) each.
        checks: how often to look at the validation part, evenly spaced, the end included; the weights with the lowest loss
            there are tested. 0: the last weights are.

    Returns:
        For each seed the loss and scores on the test part, the lowest validation loss, and whether the loss left the numbers.
    """
    skeleton, weights = stacked.members_of(make, seeds, "cpu")
    each = rate(make())
    adam = torch.optim.Adam([{"params": [w], "lr": each[n]} for n, w in weights.items()])
    bases = [group["lr"] for group in adam.param_groups]
    orders = [torch.Generator().manual_seed(seed) for seed in seeds]
    x, y = parts["train"]
    row = torch.arange(len(seeds))[:, None]
    look_at = {round(steps * (i + 1) / checks) for i in range(checks)}
    kept = _Lowest(weights)
    for now, index in enumerate(_batches(x.shape[1], batch, steps, orders)):
        for group, base in zip(adam.param_groups, bases):
            group["lr"] = base * schedule(now, steps)
        adam.zero_grad(set_to_none=True)
        out = stacked.forward(skeleton, weights, x[row, index])
        torch.func.vmap(loss)(out, y[row, index]).sum().backward()
        adam.step()
        if now + 1 in look_at:
            kept.offer(_means(skeleton, weights, parts["val"], {"loss": loss})["loss"], weights)
    tested = _means(
        skeleton, kept.weights if checks else weights, parts["test"], {"loss": loss, **scores}
    )
    found = {f"test_{name}": values for name, values in tested.items()}
    if checks:
        found["val_loss"] = kept.loss
    found["diverged"] = 1 - tested["loss"].isfinite().float()
    columns = {n: v.nan_to_num(WORST, WORST).clamp_max(WORST).tolist() for n, v in found.items()}
    return [{name: columns[name][i] for name in columns} for i in range(len(seeds))]


class _Lowest:
    """Of each member the weights with the lowest validation loss so far."""

    def __init__(self, weights: dict[str, Tensor]):
        self.weights = {name: value.detach().clone() for name, value in weights.items()}
        self.loss = torch.full((len(next(iter(weights.values()))),), math.inf)

    def offer(self, losses: Tensor, weights: dict[str, Tensor]) -> None:
        better = losses < self.loss
        self.loss = torch.where(better, losses, self.loss)
        for name, value in weights.items():
            self.weights[name][better] = value.detach()[better]


@torch.no_grad()
def _means(skeleton, weights, part, functions, rows: int = 1024) -> dict[str, Tensor]:
    """Mean over the samples of functions (output, target) -> mean of a batch, for each member."""
    x, y = part
    totals = {name: torch.zeros(len(x)) for name in functions}
    for inputs, targets in zip(x.split(rows, 1), y.split(rows, 1)):
        outputs = stacked.forward(skeleton, weights, inputs)
        for name, function in functions.items():
            totals[name] += torch.func.vmap(function)(outputs, targets) * targets.shape[1]
    return {name: total / x.shape[1] for name, total in totals.items()}
