"""Chapter 33: what the runs of its ablations say, beside what is printed."""

from __future__ import annotations

import pandas as pd

from ..page.facts import fact
from ..stats import interval, paired


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


def retention(runs: pd.DataFrame, arm: str) -> tuple[float, float, float]:
    """Test accuracy in percent of that of the original order, paired by seed: mean and interval."""
    wide = runs.pivot(index="seed", columns="arm", values="test_accuracy").clip(lower=1e-3)
    return interval(100 * wide[arm] / wide["original"])
