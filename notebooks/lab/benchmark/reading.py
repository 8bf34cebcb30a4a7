"""What the rows of the benchmark answer, by the rule of evidence 64: comparisons of two models, pooled over sets, counts over all.

Everything starts from `Rows`, which refuses rows that are not those of all sets, sizes, layers and cuts. Differences are those of
logarithms of test losses, below zero where the first model is better.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd
from scipy.special import stdtrit

from ..data.with_axes import CONTROLS, SETS
from ..modes import LabError
from ..page.scale import recorded
from ..stats import interval, outside, over_cuts, pooled
from . import models, protocol
from .models import NONE, OURS
from .protocol import CELL, CUTS, IN_PLACE, PERMUTED, SIZES, TRIAL_CUTS

BETTER, WORSE, OPEN = "better", "worse", "not told apart"
WORDS = (BETTER, WORSE, OPEN)
RACED = (3e-4, 1e-3, 3e-3)  # the rates of a race
TRAININGS = (1, 3, 9)


class Key(NamedTuple):
    """A cell, as in `protocol.CELL`."""

    data: str
    size: str
    layer: str
    budget: str
    order: str = IN_PLACE


class Rows:
    """All rows of both records.

    Args:
        tried: of the trials, as `protocol.by_rate` gives them. ran: of the runs.

    Raises:
        LabError: a set, size, layer or cut is missing, or one is there twice: nothing is judged by a part.
    """

    def __init__(self, tried: pd.DataFrame, ran: pd.DataFrame):
        self.tried, self.ran = tried, ran
        wanted = {
            (*cell.values(), cut)
            for size in SIZES
            for cell in protocol.cells(protocol.EVERY, size)
            for cut in CUTS
        }
        there = list(ran[[*CELL, "seed"]].itertuples(index=False, name=None))
        missing, more = wanted - set(there), len(there) - len(set(there)) + len(set(there) - wanted)
        if missing or more:
            raise LabError(
                f"the benchmark has {len(wanted) - len(missing)} of {len(wanted)} runs and {more} that do not belong to it"
                f"{f', missing e.g. {sorted(missing)[0]}' if missing else ''}: a part of it judges nothing"
            )
        self.parameters = ran.groupby(CELL)["parameters"].first().to_dict()
        parts = ["samples", "validated", "tested", "pool"]
        self.parts = ran.groupby(["data", "size"])[parts].first().to_dict("index")

    @functools.cached_property
    def tested(self) -> dict[tuple, np.ndarray]:
        """Logarithms of the test losses of each cell, cut by cut."""
        wide = np.log(self.ran.pivot(index=CELL, columns="seed", values="test_loss"))
        return dict(zip(wide.index, wide.to_numpy()))

    @functools.cached_property
    def validated(self) -> dict[tuple, float]:
        """The mean logarithm of the validation losses of each cell."""
        logs = np.log(self.ran["val_loss"])
        return logs.groupby([self.ran[name] for name in CELL]).mean().to_dict()

    def has(self, key: Key) -> bool:
        return key in self.tested

    def left(self, name: str, size: str) -> int:
        """The cases that a cut leaves to train on, by the rule for cuts that share cases."""
        part = self.parts[name, size]
        return int(part["pool"] - part["tested"] - part["validated"])

    def over_cuts(self, name: str, size: str, values: np.ndarray) -> tuple[float, float, float]:
        """Mean and interval of a value for each cut of a set."""
        tested_on = int(self.parts[name, size]["tested"])
        return over_cuts(values, trained_on=self.left(name, size), tested_on=tested_on)


# --------------------------------------------------------------------------------------------------------- two models
def compare(rows: Rows, one: Callable, other: Callable, sets: Sequence[str]) -> pd.DataFrame:
    """Two models on each set, by `across`.

    Args:
        one, other: (set, size) -> `Key`. Where the rows have no such model, it does not fit there, and there is nothing to compare.
    """

    def values(name: str, size: str) -> np.ndarray | None:
        keys = one(name, size), other(name, size)
        if not all(map(rows.has, keys)):
            return None
        return rows.tested[keys[0]] - rows.tested[keys[1]]

    return across(rows, values, sets)


def across(rows: Rows, values: Callable, sets: Sequence[str]) -> pd.DataFrame:
    """Differences (set, size) -> one for each cut, or None, as a row for each set and size, "both" sizes and large minus small.

    Returns:
        Columns data, size (small, large, both, growth), mean, low, high, error, result.
    """
    found = []
    for name in sets:
        each = {size: values(name, size) for size in SIZES}
        if any(own is None for own in each.values()):
            continue
        each["both"] = (each["small"] + each["large"]) / 2
        each["growth"] = each["large"] - each["small"]
        widest = max(SIZES, key=lambda s: rows.parts[name, s]["tested"] / rows.left(name, s))
        for size, own in each.items():
            mean, low, high = rows.over_cuts(name, size if size in SIZES else widest, own)
            error = (high - mean) / float(stdtrit(len(own) - 1, 0.975))
            result = BETTER if high < 0 else WORSE if low > 0 else OPEN
            row = {"data": name, "size": size, "mean": mean, "low": low, "high": high}
            found.append(row | {"error": error, "result": result})
    return pd.DataFrame(found)


def counts(compared: pd.DataFrame) -> dict[str, int]:
    """In how many cells, sets times sizes, the first model is better, worse, not told apart."""
    results = compared.loc[compared["size"].isin(SIZES), "result"]
    return {word: int((results == word).sum()) for word in WORDS}


def answer(compared: pd.DataFrame, size: str = "both") -> dict:
    """One row of an answer: the pooled ratio with its intervals, over all sets and without CIFAR, the share of sets outside, and the
    counts over all cells. Of fewer than four sets nothing is pooled."""
    own = compared[compared["size"] == size]
    row = {"sets": len(own)}
    rest = own[~own["data"].str.startswith("cifar")]
    for name, part in {"": own, "without CIFAR ": rest}.items():
        if len(part) >= 4:
            found = pooled(part["mean"], part["error"])
            ends = zip(("ratio", "low", "high"), found[:3])
            row |= {f"{name}{end}": math.exp(value) for end, value in ends}
            if not name:
                row |= {"new low": math.exp(found.new_low), "new high": math.exp(found.new_high)}
                row["outside"] = outside(own["mean"], own["error"])
    return row | counts(compared)


def model(layer: str, budget: str, order: str = IN_PLACE) -> Callable[[str, str], Key]:
    """(set, size) -> the cell of a model."""
    return lambda name, size: Key(name, size, layer, budget, order)


# -------------------------------------------------------------------------------------------------------- the questions
def rivals(rows: Rows, name: str, size: str, budget: str) -> list[Key]:
    """All models beside NdLinear, or the sum, that are no larger than a budget."""
    most = models.allowed(protocol.shape_of(name), budget)
    found = [Key(name, size, layer, budget) for layer in models.LAYERS[budget]]
    found += [Key(name, size, layer, NONE) for layer in models.LAYERS[NONE]]
    return [
        key
        for key in found
        if key.layer != OURS[budget] and rows.has(key) and rows.parameters[key] <= most
    ]


def best_rival(rows: Rows, budget: str) -> Callable[[str, str], Key]:
    """(set, size) -> the rival with the lowest mean log validation loss."""
    return lambda name, size: min(
        rivals(rows, name, size, budget), key=lambda key: rows.validated[key]
    )


def against_best(rows: Rows, budget: str) -> pd.DataFrame:
    """Q1: NdLinear, or the sum, against the best other model of at most its budget."""
    return compare(rows, model(OURS[budget], budget), best_rival(rows, budget), list(SETS))


def against(rows: Rows, budget: str, layer: str, theirs: str = "") -> pd.DataFrame:
    """Q2, and with ``theirs`` = `models.NONE` Q3: against another layer."""
    ours = model(OURS[budget], budget)
    return compare(rows, ours, model(layer, theirs or budget), list(SETS))


def by_axes(rows: Rows, budget: str, sets: Sequence[str] = tuple(SETS)) -> pd.DataFrame:
    """Q4: entries permuted against in place, above zero where axes help; "growth" says how much more in the large sample."""
    pair = [model(OURS[budget], budget, order) for order in (PERMUTED, IN_PLACE)]
    return compare(rows, *pair, list(sets))


def controls_agree(rows: Rows) -> bool:
    """Whether the benchmark can see axes: the large sample of one Kronecker product is worse permuted, turned ones are the same."""
    found = by_axes(rows, models.SMALL, list(CONTROLS)).set_index(["data", "size"])["result"]
    turned = [found["turned", size] for size in (*SIZES, "both")]
    return found["teacher 1", "large"] == WORSE and set(turned) == {OPEN}


def leaders(rows: Rows, budget: str) -> pd.DataFrame:
    """Q5: for each model of a budget the share of cells in which it is best, and not told worse than the best, with intervals."""
    found = []
    for name, size in itertools.product(SETS, SIZES):
        keys = [Key(name, size, OURS[budget], budget), *rivals(rows, name, size, budget)]
        tests = {key.layer: rows.tested[key] for key in keys}
        best = min(tests, key=lambda layer: tests[layer].mean())
        for layer, losses in tests.items():
            near = rows.over_cuts(name, size, losses - tests[best])[1] <= 0
            found.append({"data": name, "layer": layer, "best": layer == best, "near": near})
    return _shares(pd.DataFrame(found))


def _shares(found: pd.DataFrame) -> pd.DataFrame:
    """Shares of cells with Student's interval over the sets; where a model does not fit it is neither best nor near."""
    each = []
    for layer, own in found.groupby("layer", sort=False):
        row = {"layer": layer, "cells": len(own)}
        for column in ("best", "near"):
            means = own.groupby("data")[column].sum().reindex(list(SETS), fill_value=0) / len(SIZES)
            mean, low, high = interval(means)
            row |= {column: mean, f"{column}_low": max(0.0, low), f"{column}_high": min(1.0, high)}
        each.append(row)
    return pd.DataFrame(each).sort_values("best", ascending=False, ignore_index=True)


# ------------------------------------------------------------------------------------------------------------- the race
def race(tried: pd.DataFrame, trainings: float) -> str:
    """The layer that a race on one cut chooses, looked up in its trials: rows of one set, size, budget and cut.

    Successive halving (Jamieson & Talwalkar 2016, arXiv:1502.07943) by thirds: each of three rounds trains all who are left, a layer
    with a rate, for a third of ``trainings`` full ones together. A third goes on, at first at most two of one layer, then one.
    """
    curves = {(row.layer, row.lr): row.curve for row in tried.itertuples()}
    steps = max(step for step, _ in tried["curve"].iloc[0])
    left = list(curves)
    for of_one_layer in (2, 1, 1):
        length = max(1, min(steps, round(trainings * steps / (3 * len(left)))))
        losses = {one: _lowest(curves[one], length) for one in left}
        count, left = math.ceil(len(left) / 3), []
        for one in sorted(losses, key=losses.get):
            same = sum(layer == one[0] for layer, _ in left)
            if len(left) < count and same < of_one_layer and math.isfinite(losses[one]):
                left.append(one)
    return left[0][0]


def _lowest(curve: list[tuple[int, float]], steps: int) -> float:
    """The lowest loss that a training of so many steps would have seen; of one shorter than to the first look, that look."""
    return min([loss for step, loss in curve if step <= steps] or [curve[0][1]])


def races(rows: Rows, budget: str, trainings: float) -> pd.DataFrame:
    """Q6: the layer that a race chooses against always narrowing the dense one, by `across`.

    The cuts are those of the trials. Where no dense network is narrow enough, there is nothing to compare with.
    """
    kinds = [layer for layer in models.LAYERS[budget] if layer != "convolution"]
    every = rows.tried
    may = (every["budget"] == budget) & (every["order"] == IN_PLACE)
    may &= every["layer"].isin(kinds) & every["lr"].isin(RACED)
    raced = dict(list(every[may].groupby(["data", "size", "seed"])))

    def values(name: str, size: str) -> np.ndarray | None:
        narrow = Key(name, size, "narrow", budget)
        if not rows.has(narrow):
            return None
        chosen = [
            Key(name, size, race(raced[name, size, cut], trainings), budget) for cut in TRIAL_CUTS
        ]
        pairs = zip(chosen, TRIAL_CUTS)
        return np.array([rows.tested[k][c] - rows.tested[narrow][c] for k, c in pairs])

    return across(rows, values, list(SETS))


def pays(raced: pd.DataFrame) -> tuple[float, float, float]:
    """The ratio of a race's loss to that of the narrowed dense layer, plain mean of logarithms over the sets with Student's interval."""
    own = raced.loc[raced["size"] == "both", "mean"]
    return tuple(math.exp(value) for value in interval(own))


# ------------------------------------------------------------------------------------------------- what the pages print
TOLD = {  # what the pages say of the counts; values: `said`
    models.SMALL: "NdLinear is better than the best other model of its size in {} of {} cells and worse in {}",
    models.QUARTER: "the sum of its terms is better in {} of {} and worse in {}",
}


def said(compared: pd.DataFrame) -> tuple[int, int, int]:
    """In how many cells the first model of a comparison is better, of how many, and in how many worse: the values of `TOLD`."""
    found = counts(compared)
    return found[BETTER], sum(found.values()), found[WORSE]


@functools.lru_cache(maxsize=1)
def rows_on_disk() -> Rows:
    """The rows of both records, for a page; a `LabError` says what is missing."""
    tried, ran = (recorded(name) for name in ("benchmark-rates", "benchmark"))
    return Rows(protocol.by_rate(tried), ran)


@functools.lru_cache(maxsize=1)
def printed() -> dict[str, tuple[int, int, int]]:
    """What the front page, README, report and chapters 34, 64 and 72 print: budget -> what is `said` of Q1."""
    rows = rows_on_disk()
    return {budget: said(against_best(rows, budget)) for budget in OURS}


def told() -> list[tuple]:
    """The sentences of `TOLD` with their values, as the tests of pages look them up."""
    return [(phrase, *printed()[budget]) for budget, phrase in TOLD.items()]


def standings(ran: pd.DataFrame, budget: str) -> pd.DataFrame:
    """The layers of a budget by their test losses: ratio to the narrowed dense layer, geometric mean over the sets that both have.

    Means without an interval, for a table; what is better or worse `compare` says.
    """
    own = ran[(ran["budget"] == budget) & (ran["order"] == IN_PLACE)]
    logs = np.log(own.pivot(index=["data", "size", "seed"], columns="layer", values="test_loss"))
    each = logs.sub(logs["narrow"], axis=0).groupby("data").mean()
    found = pd.DataFrame({"sets": each.count(), "ratio": np.exp(each.mean())})
    found["parameters"] = own.groupby("layer")["parameters"].median()
    return found.rename_axis("layer").reset_index().sort_values("ratio", ignore_index=True)
