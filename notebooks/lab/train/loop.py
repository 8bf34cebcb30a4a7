"""One training loop for all experiments: seeded, best epoch chosen on the validation split, test looked at once."""

from __future__ import annotations

import copy
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor, nn

from ..modes import LabError

OPTIMISERS = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}
RULES = ("metric", "below", "patience", "min_delta")


def seed_everything(seed: int) -> None:
    """Seed Python, NumPy and torch, and ask cuDNN for the same algorithm every time."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False


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
                    f"{name}: {len(x)} inputs and {len(y)} targets; both must be the same, positive number"
                )

    def to(self, device) -> Split:
        """The same split on another device."""
        return Split(
            *[tuple(t.to(device) for t in getattr(self, name)) for name in ("train", "val", "test")]
        )


@dataclass
class Fit:
    """A finished training: the model at its best epoch, its metrics, and the curve of every epoch."""

    model: nn.Module
    metrics: dict[str, float]
    best_epoch: int
    epochs: int
    seconds: float
    curve: list[dict[str, float]] = field(repr=False, default_factory=list)

    def thin(self, points: int = 30) -> list[dict[str, float]]:
        """At most ``points`` epochs of the curve, evenly spaced, the last included: what goes into a record."""
        at = sorted(
            {round(i) for i in np.linspace(0, len(self.curve) - 1, min(points, len(self.curve)))}
        )
        return [{k: float(f"{v:.5g}") for k, v in self.curve[i].items()} for i in at]


@torch.no_grad()
def evaluate(
    model: nn.Module,
    part: tuple[Tensor, Tensor],
    loss: Callable,
    scores: dict[str, Callable],
    batch: int = 4096,
) -> dict[str, float]:
    """Loss and scores of a model, each a mean over samples, in evaluation mode and in batches."""
    model.eval()
    x, y = part
    totals = dict.fromkeys(["loss", *scores], 0.0)
    for i in range(0, len(x), batch):
        out, target = model(x[i : i + batch]), y[i : i + batch]
        for name, function in {"loss": loss, **scores}.items():
            totals[name] += float(function(out, target)) * len(target)
    return {name: total / len(x) for name, total in totals.items()}


def _check_stop(stop: dict | None) -> dict:
    stop = dict(stop or {})
    unknown = set(stop) - set(RULES)
    if unknown or (stop and not {"below", "patience"} & set(stop)):
        raise LabError(
            f"stopping rule {stop}: give 'metric' with 'below' or 'patience' (and 'min_delta'); unknown: {sorted(unknown)}"
        )
    return {"metric": "val_loss", "min_delta": 0.0} | stop


def _should_stop(stop: dict, curve: list[dict[str, float]]) -> bool:
    """Whether the stopping rule, given as data, says stop after the last epoch of the curve."""
    values = [point[stop["metric"]] for point in curve]
    if "below" in stop and values[-1] < stop["below"]:
        return True
    patience = stop.get("patience")
    return (
        patience is not None
        and len(values) > patience
        and min(values[-patience:]) > min(values[:-patience]) - stop["min_delta"]
    )


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
    optimiser: str = "adam",
    weight_decay: float = 0.0,
    stop: dict | None = None,
    device: str | torch.device | None = None,
) -> Fit:
    """Train a model and return it at the epoch with the lowest validation loss.

    Args:
        model: maps a batch of inputs to what ``loss`` takes; trained in place.
        data: training, validation and test part; the test part is evaluated once, with the chosen epoch's weights.
        loss: (output, target) -> mean loss of the batch; ``scores``: further such functions by name.
        batch_size: samples per step; the last batch of an epoch may be smaller. 0 means full batch.
        seed: order of the batches. The caller seeds the initial weights.
        stop: rule as data, e.g. ``{"metric": "val_loss", "patience": 20}`` or ``{"metric": "train_loss", "below": 1e-4}``.

    Raises:
        LabError: the loss is not finite, or an argument is out of range.
    """
    if optimiser not in OPTIMISERS or epochs < 1 or batch_size < 0:
        raise LabError(
            f"optimiser={optimiser!r}, epochs={epochs}, batch_size={batch_size}: optimiser is one of {', '.join(OPTIMISERS)}, "
            "epochs at least 1, batch_size at least 0"
        )
    stop, scores = _check_stop(stop), scores or {}
    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    model, data = model.to(device), data.to(device)
    steps = OPTIMISERS[optimiser](model.parameters(), lr=lr, weight_decay=weight_decay)
    order, (x, y) = torch.Generator().manual_seed(seed), data.train
    curve, best, best_state, began = [], float("inf"), None, time.perf_counter()
    for epoch in range(epochs):
        model.train()
        total = 0.0
        for index in torch.randperm(len(x), generator=order).to(device).split(batch_size or len(x)):
            steps.zero_grad(set_to_none=True)
            value = loss(model(x[index]), y[index])
            value.backward()
            steps.step()
            total += value.detach() * len(index)
        curve.append(
            {"epoch": epoch + 1, "train_loss": float(total) / len(x)}
            | {f"val_{k}": v for k, v in evaluate(model, data.val, loss, scores).items()}
        )
        if not np.isfinite(curve[-1]["train_loss"]):
            raise LabError(
                f"the training loss is {curve[-1]['train_loss']} in epoch {epoch + 1}: lower lr={lr} or check the data"
            )
        if curve[-1]["val_loss"] < best:
            best, best_state = curve[-1]["val_loss"], (epoch, copy.deepcopy(model.state_dict()))
        if _should_stop(stop, curve):
            break
    seconds = time.perf_counter() - began
    if best_state is None:
        raise LabError("the validation loss was never finite: lower lr or check the data")
    model.load_state_dict(best_state[1])
    metrics = {k: v for k, v in curve[best_state[0]].items() if k != "epoch"}
    metrics |= {f"test_{k}": v for k, v in evaluate(model, data.test, loss, scores).items()}
    return Fit(model, metrics, best_state[0] + 1, len(curve), seconds, curve)
