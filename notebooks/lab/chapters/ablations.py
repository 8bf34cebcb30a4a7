"""What the ablations share: small parts of networks, of tables and figures, and CIFAR-100 pictures."""

from __future__ import annotations

import dataclasses

import numpy as np
import pandas as pd
from torch import Tensor, nn

from ..counts import count_macs
from ..data import load, official
from ..data.splits import some_of_each
from ..page.facts import fact
from ..stats import interval, paired
from ..train.loop import Split
from ..train.stacked import Stack


class Fold(nn.Module):
    """(B, ...) -> (B, D_1, ..., D_N), then the axes of the data in another order: axis ``axes[k]``,
    counted from 1, comes k-th."""

    def __init__(self, D: tuple[int, ...], axes: tuple[int, ...]):
        super().__init__()
        self.D, self.axes = tuple(D), tuple(axes)
        self.sizes = tuple(self.D[a - 1] for a in self.axes)

    def forward(self, x: Tensor) -> Tensor:
        return x.reshape(-1, *self.D).permute(0, *self.axes)


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


# --------------------------------------------------------------------------------------------- tables and figures
def words(span, form: str = "{:+.1f}") -> str:
    """A value, or a mean with its interval, as text; nothing for None."""
    if span is None:
        return ""
    return (
        f"{form} [{form}, {form}]".format(*span) if isinstance(span, tuple) else form.format(span)
    )


LAYOUTS = ("reverse order", "random order", "reverse axes", "random axes")


def printed_errors(width: int) -> list[float]:
    """The printed mean test errors on Radius Bump without and with biases."""
    return [fact("app_bias", width=width, bias=b, metric="test_mse") for b in ("false", "true")]


def printed_change(width: int) -> float:
    """The printed change of the test error by biases, in percent of that without."""
    without, biases = printed_errors(width)
    return 100 * (biases / without - 1)


def change(
    runs: pd.DataFrame, width: int, arm: str = "per-mode bias"
) -> tuple[float, float, float]:
    """Test error of an arm minus that without biases, in percent of the latter: mean and interval."""
    at = runs[runs["width"] == width]
    without = at[at["arm"] == "no bias"]["mse"].mean()
    return tuple(100 * value / without for value in paired(at, "mse", arm, "no bias"))


def bias_effects(runs: pd.DataFrame, arms: list[str]) -> pd.DataFrame:
    """By width the printed change of the test error, and that of each arm as `change` finds it."""
    widths = sorted(runs["width"].unique())
    found = pd.DataFrame({arm: {w: change(runs, w, arm) for w in widths} for arm in arms})
    found.insert(0, "printed", [printed_change(w) for w in widths])
    return found


def points(
    runs: pd.DataFrame, metric: str, arm: str, baseline: str, level: float = 0.95
) -> tuple[float, float, float]:
    """A share of an arm minus that of another, in points, paired by seed: mean and interval."""
    return tuple(100 * value for value in paired(runs, metric, arm, baseline, level=level))


def retention(runs: pd.DataFrame, arm: str) -> tuple[float, float, float]:
    """Test accuracy in percent of that of the original order, paired by seed: mean and interval."""
    wide = runs.pivot(index="seed", columns="arm", values="test_accuracy").clip(lower=1e-3)
    return interval(100 * wide[arm] / wide["original"])
