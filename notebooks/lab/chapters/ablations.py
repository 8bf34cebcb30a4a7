"""What the ablations share: small parts of networks and of tables, and features of CIFAR-100
pictures.

Frozen features are a cheap design, not the paper's: every arm gets the same numbers, and what
differs between two arms is the head on top of them alone.
"""

from __future__ import annotations

import dataclasses
import functools

import numpy as np
import pandas as pd
import torch
from scipy.signal import fftconvolve
from torch import Tensor, nn

from .. import models
from ..counts import count_macs
from ..data import load, official
from ..data.splits import some_of_each
from ..page import figures
from ..stats import paired
from ..train.loop import Split, fit, predict, seed_everything
from ..train.stacked import Stack

COORDINATES = 10  # of the inputs of Radius Bump


class Fold(nn.Module):
    """(B, ...) -> (B, D_1, ..., D_N), then the axes of the data in another order: axis ``axes[k]``,
    counted from 1, comes k-th."""

    def __init__(self, D: tuple[int, ...], axes: tuple[int, ...]):
        super().__init__()
        self.D, self.axes = tuple(D), tuple(axes)
        self.sizes = tuple(self.D[a - 1] for a in self.axes)

    def forward(self, x: Tensor) -> Tensor:
        return x.reshape(-1, *self.D).permute(0, *self.axes)


def rays(cells: int = 1000, nodes: int = 60) -> tuple[Tensor, Tensor, Tensor]:
    """A uniform input of Radius Bump by its direction and its length, as a quadrature rule.

    A direction meets the surface of the cube at a distance R, where one coordinate is +-1 and the
    other nine are uniform: R^2 is one plus nine squares. Along it (r / R)^10 is uniform on [0, 1].

    Returns:
        Probabilities p of R (n,), lengths r on each ray (n, nodes), and their weights w (nodes,): E
        f = p @ (f(r) @ w).
    """
    square = np.diff(np.sqrt(np.linspace(0, 1, cells + 1)))  # P(x^2 in a cell)
    p = functools.reduce(fftconvolve, [square] * (COORDINATES - 1)).clip(0)
    reach = np.sqrt(1 + (np.arange(len(p)) + (COORDINATES - 1) / 2) / cells)
    t, w = np.polynomial.legendre.leggauss(nodes)
    t, w = (t + 1) / 2, w / 2
    arrays = p / p.sum(), reach[:, None] * t, COORDINATES * t ** (COORDINATES - 1) * w
    return tuple(map(torch.from_numpy, arrays))


def results(
    stack: Stack, metrics: list[dict], sample: Tensor, moment: str = "best", points: int = 15
) -> list[dict]:
    """What a record keeps of each member of a stack: its metrics, thinned curve, parameters and
    multiply-adds."""
    model = stack.model(0, moment)
    counts = {
        "parameters": sum(p.numel() for p in model.parameters()),
        "macs": count_macs(model, sample),
    }
    return [
        {"metrics": found, "curve": stack.thin(i, points), **counts}
        for i, found in enumerate(metrics)
    ]


def span(counts: pd.Series) -> str:
    """A count as text, or its range where the runs of an arm differ in it."""
    return " to ".join(f"{n:,}" for n in sorted({counts.min(), counts.max()}))


def tuned(runs: pd.DataFrame, key: list[str], metric: str = "val_accuracy") -> pd.DataFrame:
    """The runs of each arm (columns ``key``) at the learning rate with its best mean ``metric``
    over seeds."""
    means = runs.groupby([*key, "lr"])[metric].transform("mean")
    order = means.sort_values(ascending=False, kind="stable").index
    return runs.loc[order].drop_duplicates([*key, "seed"]).sort_index()


def pictures(images: int, seed: int = 0) -> Split:
    """CIFAR-100, channels centred and scaled: the first ``images`` training pictures, equally many
    of each class, a tenth of them for validation, and the official test part."""
    data = load("cifar100")
    x, y = some_of_each(data, images)
    x_test, y_test = data.part("test")
    parts = {"train": slice(0, len(y)), "test": slice(len(y), len(y) + len(y_test))}
    small = dataclasses.replace(
        data, x=np.concatenate([x, x_test]), y=np.concatenate([y, y_test]), splits=parts
    )
    few = len(y) < 10 * len(data.names)
    return official(small, seed=seed, val=0.5 if few else 0.1, standardise="channel")


@functools.lru_cache(maxsize=1)
def features(images: int, epochs: int, seed: int = 0) -> Split:
    """The features (64, 8, 8) of `pictures`, by the convolutions of the paper's CNN.

    They are trained once, for ``epochs`` epochs under a bare linear classifier, and then frozen,
    with all arms of an experiment on top of the same features. Validation chose the epoch; no test
    picture is used in training.
    """
    split = pictures(images, seed)
    seed_everything(seed)
    network = models.cnn("affine", classes=100)
    trained = fit(
        network,
        split,
        loss=nn.functional.cross_entropy,
        epochs=epochs,
        lr=1e-3,
        batch_size=128,
        seed=seed,
    )
    body = trained.model[0]
    parts = (split.train, split.val, split.test)
    return Split(*[(predict(body, x, batch=256), y) for x, y in parts])


# --------------------------------------------------------------------------------------------- tables and figures
def words(span, form: str = "{:+.1f}") -> str:
    """A value, or a mean with its interval, as text; nothing for None."""
    if span is None:
        return ""
    return (
        f"{form} [{form}, {form}]".format(*span) if isinstance(span, tuple) else form.format(span)
    )


ORDERS = {
    o: (o.replace(",", " "), o, "1,2,3") for o in ("1,3,2", "2,1,3", "2,3,1", "3,1,2", "3,2,1")
}
LAYOUTS = {
    name: (name.replace(" ", "\n").replace("order", "modes"), name, "original")
    for name in ("reverse order", "random order", "reverse axes", "random axes")
}


def draw_gains(
    axis, runs: pd.DataFrame, changes: dict[str, tuple[str, str, str]], level: float = 0.95
) -> None:
    """Points of test accuracy that a change brings, paired by seed: mean and interval.

    changes: any key -> what the axis calls it, the arm, and the arm without the change.
    """
    points = runs.assign(points=100 * runs["test_accuracy"])
    gains = [paired(points, "points", *arms, level=level) for _, *arms in changes.values()]
    figures.intervals(axis, range(len(gains)), gains, "ndlinear", upright=True)
    axis.axhline(0, color="0.5", lw=1)
    axis.set_xticks(range(len(changes)), [name for name, *_ in changes.values()], fontsize=8)


def draw_bias_gains(axis, runs: pd.DataFrame) -> None:
    """Change of the test error in percent of that without biases at every width: with biases, and with their parameters spent on width."""
    widths = sorted(runs["width"].unique())
    for shift, arm, look in ((-0.12, "per-mode bias", "ndlinear"), (0.12, "wider, no bias", "trl")):
        for place, width in enumerate(widths):
            at = runs[runs["width"] == width]
            without = at[at["arm"] == "no bias"]["mse"].mean()
            change = 100 * np.array(paired(at, "mse", arm, "no bias")) / without
            label = None if place else arm
            figures.intervals(axis, place + shift, change, look, upright=True, label=label)
    axis.axhline(0, color="0.5", lw=1)
    axis.set_xticks(range(len(widths)), widths)
    axis.set(xlabel="width", ylim=(-21, 27))
    axis.legend(fontsize=8, loc="upper left")
