"""Means, paired differences and intervals. One rule everywhere: 95 %, Student's t over seeds."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import pandas as pd
import scipy.optimize
from scipy.special import stdtr, stdtrit

from .modes import LabError


def interval(values, *, level: float = 0.95) -> tuple[float, float, float]:
    """Mean of ``values`` with its interval by Student's t: (mean, low, high).

    The interval of fewer than two values is (-inf, inf): one run decides nothing.
    """
    if not 0 < level < 1:
        raise LabError(f"level={level} must lie between 0 and 1, such as 0.95")
    values = np.asarray(values, dtype=float)
    if values.ndim != 1 or values.size == 0 or not np.isfinite(values).all():
        raise LabError(f"an interval needs a non-empty list of finite numbers, got {values!r}")
    mean = float(values.mean())
    if values.size < 2:
        return mean, -np.inf, np.inf
    half = float(
        stdtrit(values.size - 1, 0.5 + level / 2) * values.std(ddof=1) / np.sqrt(values.size)
    )
    return mean, mean - half, mean + half


def over_cuts(
    values, *, trained_on: int, tested_on: int, level: float = 0.95
) -> tuple[float, float, float]:
    """Mean and interval (mean, low, high) of one value for each of several random cuts of the same cases.

    Cuts share most of their cases, so their values are correlated and `interval` would be too short. Nadeau and Bengio
    (Machine Learning 52, 2003) put 1/J + tested_on/trained_on in the place of 1/J for J cuts.

    Args:
        trained_on, tested_on: numbers of cases in the two parts of a cut.
    """
    if not (trained_on > 0 and tested_on > 0):
        raise LabError(f"both parts of a cut need cases, got {trained_on} and {tested_on}")
    mean, low, high = interval(values, level=level)
    wider = np.sqrt(1 + len(values) * tested_on / trained_on)
    return mean, mean - wider * (mean - low), mean + wider * (high - mean)


def _columns(runs: pd.DataFrame, names) -> None:
    missing = [n for n in names if n not in runs]
    if missing:
        raise LabError(
            f"the runs have no column {', '.join(missing)}; they have: {', '.join(map(str, runs.columns))}"
        )


def summary(runs: pd.DataFrame, by: str | list[str], metrics: str | list[str]) -> pd.DataFrame:
    """Mean and interval over seeds: one row per group (in order of appearance) with ``<metric>``, ``_low``, ``_high`` and ``n``."""
    by = [by] if isinstance(by, str) else list(by)
    metrics = [metrics] if isinstance(metrics, str) else list(metrics)
    _columns(runs, by + metrics)
    rows = []
    for key, group in runs.groupby(by, sort=False):
        row = dict(zip(by, key)) | {"n": len(group)}
        for metric in metrics:
            names = (metric, f"{metric}_low", f"{metric}_high")
            row |= dict(zip(names, interval(group[metric])))
        rows.append(row)
    return pd.DataFrame(rows)


def differences(
    runs: pd.DataFrame, metric: str, arm: str, baseline: str, *, by: str = "arm"
) -> pd.Series:
    """Metric of ``arm`` minus that of ``baseline``, one value for each seed; both need exactly one run for each."""
    _columns(runs, [metric, by, "seed"])
    two = runs[runs[by].isin([arm, baseline])]
    if two.duplicated([by, "seed"]).any():
        raise LabError(f"several runs share {by} and seed: leave one configuration of each {by}")
    wide = two.pivot(index="seed", columns=by, values=metric)
    if {arm, baseline} - set(wide) or wide.isna().any().any():
        there = ", ".join(map(str, sorted(runs[by].unique())))
        raise LabError(
            f"{by}: {arm!r} and {baseline!r} need the same seeds; there are {there}: finish the grid first"
        )
    return wide[arm] - wide[baseline]


def compare(
    runs: pd.DataFrame, metric: str, *, by: str = "model", baseline: str = "dense"
) -> pd.DataFrame:
    """`differences` to a baseline: one row per other arm with their mean ``difference``, ``low``, ``high``, ``n``."""
    _columns(runs, [by])
    arms = [arm for arm in runs[by].unique() if arm != baseline]
    found = [(arm, differences(runs, metric, arm, baseline, by=by)) for arm in arms]
    rows = [(arm, *interval(values), len(values)) for arm, values in found]
    return pd.DataFrame(rows, columns=[by, "difference", "low", "high", "n"])


def paired(
    runs: pd.DataFrame,
    metric: str,
    arm: str,
    baseline: str,
    *,
    by: str = "arm",
    level: float = 0.95,
) -> tuple[float, float, float]:
    """Mean and t interval (mean, low, high) of `differences`."""
    return interval(differences(runs, metric, arm, baseline, by=by), level=level)


# ------------------------------------------------------------------------------------------------------ many data sets
class Pooled(NamedTuple):
    """A mean over data sets with its interval, the deviation between sets, and where a new set is expected."""

    mean: float
    low: float
    high: float
    between: float
    new_low: float
    new_high: float


def pooled(values, errors) -> Pooled:
    """Random effects of a mean for each set with its standard error: restricted maximum likelihood for the variance between sets,
    Hartung and Knapp's interval at 95 %."""
    values, own = np.asarray(values, float), np.square(np.asarray(errors, float))

    def loss(between):
        weight = 1 / (own + between)
        mean = weight @ values / weight.sum()
        spread = weight @ np.square(values - mean)
        return (np.log(own + between).sum() + math.log(weight.sum()) + spread) / 2

    most = 10 * values.var(ddof=1) + 1e-12
    between = float(scipy.optimize.minimize_scalar(loss, bounds=(0, most), method="bounded").x)
    if loss(0.0) <= loss(between):
        between = 0.0
    weight = 1 / (own + between)
    mean = float(weight @ values / weight.sum())
    sets = len(values)
    error = math.sqrt(weight @ np.square(values - mean) / (sets - 1) / weight.sum())
    half = float(stdtrit(sets - 1, 0.975)) * error
    reach = float(stdtrit(sets - 2, 0.975)) * math.sqrt(between + error**2)
    return Pooled(mean, mean - half, mean + half, math.sqrt(between), mean - reach, mean + reach)


def outside(values, errors) -> float:
    """The share of sets whose mean lies outside the prediction interval of all others, each left out in turn; four sets at least."""
    values, errors = np.asarray(values, float), np.asarray(errors, float)
    found = []
    for i, value in enumerate(values):
        others = pooled(np.delete(values, i), np.delete(errors, i))
        found.append(not others.new_low <= value <= others.new_high)
    return float(np.mean(found))


# --------------------------------------------------------------------------------------------------- several comparisons
def best_rates(runs: pd.DataFrame, by: list[str], metric: str) -> pd.DataFrame:
    """For each group the learning rate ``lr`` with the lowest mean of a metric.

    Returns:
        Columns ``lr``, the metric's mean, and ``edge``: whether the rate is the least or the largest that was tried at all.
    """
    means = runs.groupby([*by, "lr"])[metric].mean().reset_index()
    best = means.loc[means.groupby(by)[metric].idxmin()]
    ends = means["lr"].min(), means["lr"].max()
    return best.set_index(by if len(by) > 1 else by[0]).assign(edge=best["lr"].isin(ends).values)


def at_best_rates(runs: pd.DataFrame, by: list[str], metric: str) -> pd.DataFrame:
    """The runs of each group at its rate of `best_rates`."""
    best = best_rates(runs, by, metric).reset_index()
    return runs.merge(best[[*by, "lr"]], on=[*by, "lr"])


def p_below(values, bound: float = 0.0) -> float:
    """p-value of the two-sided t test where the mean of ``values`` lies below ``bound``; 1 where it does not."""
    values = np.asarray(values, dtype=float)
    mean = interval(values)[0]
    if mean >= bound or values.size < 2:
        return 1.0
    if values.std() == 0:
        return 0.0
    t = (values.mean() - bound) / (values.std(ddof=1) / np.sqrt(values.size))
    return float(2 * stdtr(values.size - 1, -abs(t)))


def holm(p_values) -> list[float]:
    """p-values adjusted for their number by Holm's procedure: what is at most 0.05 is refuted at 5 % for the whole family."""
    p_values = np.asarray(list(p_values), dtype=float)
    order = np.argsort(p_values)
    steps = p_values[order] * np.arange(p_values.size, 0, -1)
    adjusted = np.empty_like(p_values)
    adjusted[order] = np.maximum.accumulate(steps).clip(max=1)
    return adjusted.tolist()


def of_family(shown: bool | None, p_values, level: float = 0.05) -> bool | None:
    """Whether a statement about several comparisons holds.

    True if ``shown``, that is, each comparison by its own interval; False if Holm's procedure refutes one of them, whose
    ``p_values`` these are; None otherwise.
    """
    if shown is True:
        return True
    return False if min(holm(p_values)) <= level else None


# ------------------------------------------------------------------------------------- answers: True, False or undecided
def above(interval, bound: float = 0.0) -> bool | None:
    """Whether a quantity lies above a bound: True, False, or None where its interval holds the bound.

    ``interval`` is (mean, low, high) as `interval` gives it, or (low, high); so for all answers below.
    """
    low, high = tuple(interval)[-2:]
    if low > bound:
        return True
    return False if high < bound else None


def below(interval, bound: float = 0.0) -> bool | None:
    """Whether a quantity lies below a bound: True, False, or None where its interval holds the bound."""
    low, high = tuple(interval)[-2:]
    return above((-high, -low), -bound)


def at_least(interval, bound: float = 0.0) -> bool | None:
    """Whether a quantity is at least a bound: as `above`, but an interval that begins at the bound is enough."""
    low, high = tuple(interval)[-2:]
    if low >= bound:
        return True
    return False if high < bound else None


def inside(interval, least: float, most: float) -> bool | None:
    """Whether an interval lies inside a range: False if it lies wholly outside, None if it lies across an end."""
    low, high = tuple(interval)[-2:]
    if least <= low and high <= most:
        return True
    return False if high < least or low > most else None


def all_of(*answers: bool | None) -> bool | None:
    """Whether all parts hold: False if one is false, else None if one is undecided."""
    if False in answers:
        return False
    return None if None in answers else True


def any_of(*answers: bool | None) -> bool | None:
    """Whether one part holds: True if one is true, else None if one is undecided."""
    if True in answers:
        return True
    return None if None in answers else False
