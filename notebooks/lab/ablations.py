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

from . import bump, models
from .data import load, official
from .modes import LabError
from .stacked import Stack
from .stats import interval
from .training import Split, count_macs, fit, seed_everything

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


def squared_error(out: Tensor, target: Tensor) -> Tensor:
    """Mean squared error of one member's answers."""
    return (out - target).square().mean()


def accuracy(logits: Tensor, classes: Tensor) -> Tensor:
    """Share of samples whose class has the largest logit."""
    return (logits.argmax(-1) == classes).float().mean()


def top_five(logits: Tensor, classes: Tensor) -> Tensor:
    """Share of samples whose class is among the five largest logits: the paper's Acc@5."""
    return (logits.topk(5, dim=-1).indices == classes[..., None]).any(-1).float().mean()


def rays(cells: int = 1000, nodes: int = 60) -> tuple[Tensor, Tensor, Tensor]:
    """A uniform input of Radius Bump by its direction and its length, as a quadrature rule.

    A direction meets the surface of the cube at a distance R, where one coordinate is +-1 and the other nine are uniform:
    R^2 is one plus nine squares. Along it (r / R)^10 is uniform on [0, 1].

    Returns:
        Probabilities p of R (n,), lengths r on each ray (n, nodes), and their weights w (nodes,): E f = p @ (f(r) @ w).
    """
    square = np.diff(np.sqrt(np.linspace(0, 1, cells + 1)))  # P(x^2 in a cell)
    p = functools.reduce(fftconvolve, [square] * (bump.INPUTS - 1)).clip(0)
    reach = np.sqrt(1 + (np.arange(len(p)) + (bump.INPUTS - 1) / 2) / cells)
    t, w = np.polynomial.legendre.leggauss(nodes)
    t, w = (t + 1) / 2, w / 2
    arrays = p / p.sum(), reach[:, None] * t, bump.INPUTS * t ** (bump.INPUTS - 1) * w
    return tuple(map(torch.from_numpy, arrays))


def judge(*parts: bool | None) -> bool | None:
    """All of several parts: False if one is false, else None if one is undecided."""
    return False if False in parts else None if None in parts else True


def within(low: float, high: float, least: float, most: float) -> bool | None:
    """Whether an interval lies inside a range: True, False if it lies wholly outside, None if it lies across an end."""
    return True if least <= low and high <= most else False if high < least or low > most else None


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


def paired(
    runs: pd.DataFrame,
    metric: str,
    arm: str,
    baseline: str,
    *,
    by: str = "arm",
    level: float = 0.95,
):
    """Mean and t interval of ``arm`` minus ``baseline``, paired by seed."""
    wide = runs.pivot(index="seed", columns=by, values=metric)
    lacking = {arm, baseline} - set(wide)
    if lacking or wide[[arm, baseline]].isna().any().any():
        raise LabError(
            f"{by}: {arm!r} and {baseline!r} need the same seeds; there are {', '.join(map(str, wide))}"
        )
    return interval(wide[arm] - wide[baseline], level=level)


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
