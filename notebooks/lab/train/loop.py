"""One training loop for all experiments: seeded, best epoch chosen on validation, test looked at
once.

`fit` is that loop. Its parts serve the loops that differ from it in one point each: `step` and
`epoch` also train without a validation part (`train_epochs`), by a number of steps
(`lab.chapters.dial`).
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor, nn

from ..modes import LabError


def seed_everything(seed: int) -> None:
    """Seed Python, NumPy and torch, and ask cuDNN for the same algorithm every time."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False


def default_device(device: str | torch.device | None = None) -> torch.device:
    """The device asked for, else the GPU where there is one, else the processor."""
    return torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))


@dataclass(frozen=True)
class Split:
    """Three parts of a data set, each a pair (inputs, targets) of tensors with equal first axes."""

    train: tuple[Tensor, Tensor]
    val: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]

    def __post_init__(self) -> None:
        for name in ("train", "val", "test"):
            x, y = getattr(self, name)
            if len(x) != len(y) or len(x) == 0:
                raise LabError(
                    f"{name}: {len(x)} inputs and {len(y)} targets; "
                    "both must be the same, positive number"
                )

    def to(self, device) -> Split:
        """The same split on another device."""
        return Split(
            *[tuple(t.to(device) for t in getattr(self, name)) for name in ("train", "val", "test")]
        )


@dataclass
class Fit:
    """A finished training: the model at its best epoch, its metrics, and the curve of every
    epoch."""

    model: nn.Module
    metrics: dict[str, float]
    best_epoch: int
    epochs: int
    curve: list[dict[str, float]] = field(repr=False, default_factory=list)

    def thin(self, points: int = 30) -> list[dict[str, float]]:
        """At most so many points of the curve: for a record."""
        return thin(self.curve, points)


def thin(curve: list[dict[str, float]], points: int) -> list[dict[str, float]]:
    """At most ``points`` points of a curve, evenly spaced, the last included."""
    at = sorted({round(i) for i in np.linspace(0, len(curve) - 1, min(points, len(curve)))})
    return [{k: float(f"{v:.5g}") for k, v in curve[i].items()} for i in at]


@torch.no_grad()
def evaluate(
    model: nn.Module,
    part: tuple[Tensor, Tensor],
    loss: Callable,
    scores: dict[str, Callable],
    batch: int = 4096,
    forward: Callable | None = None,
) -> dict[str, float]:
    """Loss and scores of a model, each a mean over samples, in evaluation mode and in batches.

    ``forward``: inputs -> outputs of the model, where that is not just the model.
    """
    model.eval()
    forward = forward or model
    x, y = part
    totals = dict.fromkeys(["loss", *scores], 0.0)
    for i in range(0, len(x), batch):
        out = forward(x[i : i + batch])
        target = y[i : i + batch]
        for name, function in {"loss": loss, **scores}.items():
            totals[name] += float(function(out, target)) * len(target)
    return {name: total / len(x) for name, total in totals.items()}


@torch.no_grad()
def predict(model: nn.Module, x: Tensor, batch: int = 2048) -> Tensor:
    """The model's outputs in evaluation mode, computed in batches where its weights lie."""
    model.eval()
    device = next((weight.device for weight in model.parameters()), x.device)
    return torch.cat([model(part.to(device)).cpu() for part in x.split(batch)])


# ------------------------------------------------------------------------------ parts of a training
def batches(count: int, batch_size: int, order: torch.Generator) -> tuple[Tensor, ...]:
    """The samples of one epoch in random order, as the indices of each batch; size 0: all at
    once."""
    return torch.randperm(count, generator=order).split(batch_size or count)


def step(
    forward: Callable, x: Tensor, y: Tensor, loss: Callable, optimiser: torch.optim.Optimizer
) -> Tensor:
    """One step of the optimiser on one batch; returns the loss before it.

    Args:
        forward: inputs -> outputs.
        loss: (outputs, targets) -> the batch's mean loss, or one for each member of a stack:
            members share no weights, so the gradient of the sum of their losses holds each one's
            own.
    """
    optimiser.zero_grad(set_to_none=True)
    value = loss(forward(x), y)
    value.sum().backward()
    optimiser.step()
    return value.detach()


def epoch(
    forward: Callable,
    data: tuple[Tensor, Tensor],
    loss: Callable,
    optimiser: torch.optim.Optimizer,
    order: torch.Generator,
    batch_size: int,
) -> Iterator[tuple[Tensor, int]]:
    """Go once through the data in a random order; yields the loss and the size of each batch."""
    x, y = data
    for index in batches(len(x), batch_size, order):
        index = index.to(x.device)
        yield step(forward, x[index], y[index], loss, optimiser), len(index)


class Best:
    """The weights with the lowest validation loss so far, and when that was."""

    def __init__(self) -> None:
        self.loss = float("inf")
        self.when = 0
        self.weights: dict[str, Tensor] | None = None

    def offer(self, loss: float, when: int, model: nn.Module) -> None:
        """Keep the model's weights if the loss is the lowest so far."""
        if loss < self.loss:
            self.loss = loss
            self.when = when
            self.weights = copy.deepcopy(model.state_dict())

    def restore(self, model: nn.Module) -> None:
        """Put the kept weights into the model."""
        if self.weights is None:
            raise LabError("the validation loss was never finite: lower lr or check the data")
        model.load_state_dict(self.weights)


def check_finite(loss: float, now: int, lr: float) -> None:
    """Raise if a training loss is not a finite number."""
    if not np.isfinite(loss):
        raise LabError(
            f"the training loss is {loss} in epoch or step {now}: lower lr={lr} or check the data"
        )


# ---------------------------------------------------------------------------------- whole trainings
def fit(
    model: nn.Module,
    data: Split,
    *,
    loss: Callable,
    scores: dict[str, Callable] | None = None,
    epochs: int,
    lr: float,
    batch_size: int,
    seed: int,
    optimiser: type[torch.optim.Optimizer] = torch.optim.Adam,
    patience: int = 0,
    device: str | torch.device | None = None,
) -> Fit:
    """Train, keep the epoch with the lowest validation loss, and evaluate its weights once on the
    test part.

    Args:
        data: training, validation and test part.
        loss: (output, target) -> mean loss of the batch; ``scores``: further such functions by
            name.
        batch_size: samples per step; the last batch of an epoch may be smaller. 0 means full batch.
        seed: order of the batches. The caller seeds the initial weights.
        patience: so many epochs without a lower validation loss end the training; 0: none do.

    Raises:
        LabError: the loss is not finite, or there are no epochs.
    """
    if epochs < 1 or batch_size < 0:
        raise LabError(f"epochs={epochs} must be at least 1, batch_size={batch_size} at least 0")
    scores, device = scores or {}, default_device(device)
    model, data = model.to(device), data.to(device)
    updates = optimiser(model.parameters(), lr=lr)
    order = torch.Generator().manual_seed(seed)
    best = Best()
    curve: list[dict[str, float]] = []
    for now in range(1, epochs + 1):
        model.train()
        batch_losses = epoch(model, data.train, loss, updates, order, batch_size)
        total = sum(value * size for value, size in batch_losses)
        train_loss = float(total) / len(data.train[0])
        check_finite(train_loss, now, lr)
        found = evaluate(model, data.val, loss, scores)
        point = {"epoch": now, "train_loss": train_loss}
        curve.append(point | {f"val_{name}": value for name, value in found.items()})
        best.offer(found["loss"], now, model)
        if patience and now - best.when >= patience:
            break
    best.restore(model)
    metrics = {name: value for name, value in curve[best.when - 1].items() if name != "epoch"}
    tested = evaluate(model, data.test, loss, scores)
    metrics |= {f"test_{name}": value for name, value in tested.items()}
    return Fit(model, metrics, best.when, len(curve), curve)


def train_epochs(
    model: nn.Module,
    data: tuple[Tensor, Tensor],
    *,
    loss: Callable,
    epochs: int,
    lr: float,
    batch_size: int,
    seed: int,
    forward: Callable | None = None,
) -> list[dict[str, float]]:
    """Train with Adam for a fixed number of epochs, no part held out; the last weights stay in the
    model.

    Args:
        seed: order of the batches, as in `fit`. The caller seeds the initial weights.
        forward: inputs -> outputs of the model, where that is not just the model.

    Returns:
        The training loss of every epoch.
    """
    device = next(model.parameters()).device
    x, y = (part.to(device) for part in data)
    adam = torch.optim.Adam(model.train().parameters(), lr=lr)
    order = torch.Generator().manual_seed(seed)
    curve = []
    for now in range(1, epochs + 1):
        total = 0.0
        for value, size in epoch(forward or model, (x, y), loss, adam, order, batch_size):
            total += float(value) * size
        check_finite(total, now, lr)
        curve.append({"epoch": now, "train_loss": total / len(x)})
    return curve


def fine_tune(
    model: nn.Module,
    batches: Iterable,
    loss: Callable,
    *,
    steps: int,
    lr: float,
) -> list[float]:
    """Train what is trainable for a fixed number of steps; the last weights stay in the model.

    AdamW with torch's decay of 0.01, gradients cut to norm 1, a rate that rises over the first
    twentieth of the steps and then falls to zero.

    Args:
        batches: as many as there are steps, or more. loss: batch -> its mean loss.

    Returns:
        The loss before each step.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    adam = torch.optim.AdamW(trained, lr=lr, weight_decay=0.01)
    warm = max(1, steps // 20)
    rate = torch.optim.lr_scheduler.LambdaLR(
        adam, lambda now: min((now + 1) / warm, (steps - now) / steps)
    )
    losses = []
    model.train()
    for now, batch in zip(range(1, steps + 1), batches):
        adam.zero_grad(set_to_none=True)
        value = loss(batch)
        value.backward()
        nn.utils.clip_grad_norm_(trained, 1.0)
        adam.step()
        rate.step()
        losses.append(float(value.detach()))
        check_finite(losses[-1], now, lr)
    return losses
