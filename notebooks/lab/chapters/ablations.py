"""What the ablations share: small parts of networks and of tables, and features of CIFAR-100 pictures.

Frozen features are a cheap design, not the paper's: every arm gets the same numbers, and what differs between two arms is the
head on top of them alone.
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
from ..train.loop import Split, fit, seed_everything
from ..train.stacked import Stack

COORDINATES = 10  # of the inputs of Radius Bump
EXACT = 20_000  # pictures of the part "train_exact" in the form of CIFAR-100 that has one


def numbers(text: str) -> tuple[int, ...]:
    """Sizes or modes that a configuration writes as text: "8x4x2" or "1,3,2"."""
    return tuple(int(n) for n in text.replace("x", ",").split(","))


class Fold(nn.Module):
    """(B, ...) -> (B, D_1, ..., D_N), then the axes of the data in another order: axis ``axes[k]``, counted from 1, comes k-th."""

    def __init__(self, D: tuple[int, ...], axes: tuple[int, ...]):
        super().__init__()
        self.D, self.axes = tuple(D), tuple(axes)
        self.sizes = tuple(self.D[a - 1] for a in self.axes)

    def forward(self, x: Tensor) -> Tensor:
        return x.reshape(-1, *self.D).permute(0, *self.axes)


def rays(cells: int = 1000, nodes: int = 60) -> tuple[Tensor, Tensor, Tensor]:
    """A uniform input of Radius Bump by its direction and its length, as a quadrature rule.

    A direction meets the surface of the cube at a distance R, where one coordinate is +-1 and the other nine are uniform:
    R^2 is one plus nine squares. Along it (r / R)^10 is uniform on [0, 1].

    Returns:
        Probabilities p of R (n,), lengths r on each ray (n, nodes), and their weights w (nodes,): E f = p @ (f(r) @ w).
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
    """What a record keeps of each member of a stack: its metrics, thinned curve, parameters and multiply-adds."""
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
    """The runs of each arm (columns ``key``) at the learning rate with its best mean ``metric`` over seeds."""
    means = runs.groupby([*key, "lr"])[metric].transform("mean")
    order = means.sort_values(ascending=False, kind="stable").index
    return runs.loc[order].drop_duplicates([*key, "seed"]).sort_index()


def pictures(images: int, seed: int = 0) -> Split:
    """CIFAR-100, channels centred and scaled: the first ``images`` training pictures, equally many of each class, a tenth of
    them for validation, and the official test part. Pictures kept exactly are taken, where the data set names them."""
    data = load("cifar100")
    exact = images <= EXACT and "train_exact" in data.splits
    (x, y), (x_test, y_test) = data.part("train_exact" if exact else "train"), data.part("test")
    of_each = max(images // len(data.names), 1)
    chosen = np.sort(
        np.concatenate([np.flatnonzero(y == c)[:of_each] for c in range(len(data.names))])
    )
    x, y = np.concatenate([x[chosen], x_test]), np.concatenate([y[chosen], y_test])
    parts = {"train": slice(0, len(chosen)), "test": slice(len(chosen), len(y))}
    small = dataclasses.replace(data, x=x, y=y, splits=parts)
    return official(small, seed=seed, val=0.1 if of_each >= 10 else 0.5, standardise="channel")


@functools.lru_cache(maxsize=1)
def features(images: int, epochs: int, seed: int = 0) -> Split:
    """The features (64, 8, 8) of `pictures`, by the convolutions of the paper's CNN.

    They are trained once, for ``epochs`` epochs under a bare linear classifier, and then frozen, with all arms of an
    experiment on top of the same features. Validation chose the epoch; no test picture is used in training.
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
    body = trained.model[0].eval()
    device = next(body.parameters()).device

    @torch.no_grad()
    def see(x: Tensor) -> Tensor:
        return torch.cat([body(part.to(device)).cpu() for part in x.split(256)])

    return Split(*[(see(x), y) for x, y in (split.train, split.val, split.test)])
