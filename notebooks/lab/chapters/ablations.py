"""Chapter 33: data with their axes in another order, and what the runs of its ablations say."""

from __future__ import annotations

import pandas as pd
from torch import Tensor, nn

from ..counts import count_macs
from ..models import size
from ..page.facts import fact
from ..stats import interval, paired
from ..train.many import Fitted


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
    fitted: Fitted, metrics: list[dict], sample: Tensor, moment: str = "best", points: int = 15
) -> list[dict]:
    """What a record keeps of each member of a training: its metrics, thinned curve, parameters and
    multiply-adds."""
    model = fitted.model(0, moment)
    counts = {
        "parameters": size(model),
        "macs": count_macs(model, sample),
    }
    return [
        {"metrics": found, "curve": fitted.thin(i, points), **counts}
        for i, found in enumerate(metrics)
    ]


def span(counts: pd.Series) -> str:
    """A count as text, or its range where the runs of an arm differ in it."""
    return " to ".join(f"{n:,}" for n in sorted({counts.min(), counts.max()}))


# --------------------------------------------------------------------------------------------- tables and figures
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


def points(
    runs: pd.DataFrame, metric: str, arm: str, baseline: str, level: float = 0.95
) -> tuple[float, float, float]:
    """A share of an arm minus that of another, in points, paired by seed: mean and interval."""
    return tuple(100 * value for value in paired(runs, metric, arm, baseline, level=level))


def retention(runs: pd.DataFrame, arm: str) -> tuple[float, float, float]:
    """Test accuracy in percent of that of the original order, paired by seed: mean and interval."""
    wide = runs.pivot(index="seed", columns="arm", values="test_accuracy").clip(lower=1e-3)
    return interval(100 * wide[arm] / wide["original"])
