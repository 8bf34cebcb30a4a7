"""How the benchmark trains: samples, cuts, rates, one training of many, and the grid of all cells.

A *cell* is a set, a sample size, a layer and a budget. Its trials (record `benchmark-rates`) say which rate it gets, its runs
(record `benchmark`) are tested, once.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import pandas as pd
import torch
from torch import nn
from torch.nn import functional as F

from ndlinear_guide.rates import rates as rates_by_rule

from ..data.with_axes import CONTROLS, SENTENCES, SETS, Table, clipped, scaling, tables, turned
from ..modes import LabError
from ..stats import best_rates as lowest_rates
from ..train import Split
from ..train.many import Adam, Fitted, Plan, fit
from ..train.scores import accuracy
from . import models
from .models import Shape

SIZES = ("small", "large")
MOST = 2000  # training cases of the large sample
CUTS, TRIAL_CUTS = range(10), range(5)
RATES = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2)  # of a dense layer; those of other layers follow by rule
STEPS, BATCH = 500, 32
LOOKS = (5, 7, 15, 23, 40, 55, 71, 100, 130, 166, 210, 280, 350, 420, 500)  # at the validation part
LEAST, WORST = 1e-9, 1e9  # a loss that is smaller; one that is larger or no number
IN_PLACE, PERMUTED = "in place", "permuted"


# -------------------------------------------------------------------------------------------------------------- samples
def parts_of(count: int, size: str) -> tuple[int, int, int]:
    """Training, validation and test cases of a sample drawn from ``count`` cases.

    The large sample trains on 60 % of them, at most 2,000; the small one on a sixteenth of 2,000, or where there are fewer, on a
    quarter of the large one. Half as many validate, at most 500; at most 1,000 test.
    """
    large = min(MOST, int(0.6 * count))
    train = large if size == "large" else large // (16 if large == MOST else 4)
    return train, min(500, count // 5, train // 2), min(1000, count // 5)


def sample(table: Table, size: str, order: str, cut: int) -> Split:
    """The parts of a cut, flat, entries standardised by the training part; real targets likewise.

    A cut draws the same cases in both orders, and the same test cases for both sizes. "permuted": one permutation of all entries,
    another one for each cut.
    """
    train, val, test = parts_of(len(table.x), size)
    drawn = np.random.default_rng(64_500 + cut).permutation(len(table.x))
    chosen = drawn[test : test + train], drawn[test + train : test + train + val], drawn[:test]
    x, y = table.x.reshape(len(table.x), -1), table.y
    if order == PERMUTED:
        x = x[:, np.random.default_rng(65_500 + cut).permutation(x.shape[1])]
    scale = scaling(x[chosen[0]])
    if y.ndim == 2:
        rescale = scaling(y[chosen[0]])
        return Split(*[(clipped(scale(x[i])), clipped(rescale(y[i]))) for i in chosen])
    y = torch.from_numpy(np.unique(y, return_inverse=True)[1]).long()
    return Split(*[(clipped(scale(x[i])), y[i]) for i in chosen])


EVERY = SETS | CONTROLS


def shape_of(name: str) -> Shape:
    """What a network for a set must fit."""
    return Shape(EVERY[name].axes, EVERY[name].outputs, EVERY[name].neighbours)


class Tables:
    """The table of each set by name, read once. ``sentences``: name -> table of a set of sentences, which needs an encoder."""

    def __init__(self, sentences: Callable[[str], Table]):
        self.sentences, self.read = sentences, {}

    def __getstate__(self) -> dict:
        return self.__dict__ | {"read": {}}  # a worker reads by itself

    def __call__(self, name: str, cut: int = 0) -> Table:
        if name == "turned":
            return turned(self("teacher 0"), cut)
        if name not in self.read:
            found = (self.sentences if name in SENTENCES else tables)(name)
            if name in EVERY and found.x.shape[1:] != EVERY[name].axes:
                raise LabError(f"cases of {name} are {found.x.shape[1:]}, not {EVERY[name].axes}")
            self.read[name] = found
        return self.read[name]


# ------------------------------------------------------------------------------------------------------------- training
class Trainer:
    """Trains the cells of the benchmark: `trials` and `runs` are what `lab.record` calls.

    Args:
        read: the tables. foreign: name -> a layer that is none of `models.NAMES`.
    """

    def __init__(self, read: Tables, foreign: dict[str, Callable] | None = None):
        self.read, self.foreign = read, foreign or {}

    def make(self, config: dict) -> nn.Module:
        """The network of a cell, freshly drawn."""
        kind = self.foreign.get(config["layer"], config["layer"])
        net = models.network(kind, shape_of(config["data"]), config["budget"])
        if net is None:
            raise LabError(
                f"{config['layer']} does not fit {config['data']} at {config['budget']!r}"
            )
        return net

    def splits(self, configs: list[dict]) -> list[Split]:
        """The sample of each cut."""
        how = [(c["data"], c["size"], c["order"], c["seed"]) for c in configs]
        return [sample(self.read(name, cut), *rest, cut) for name, *rest, cut in how]

    def fit(self, configs: list[dict], splits: list[Split], lrs: Sequence[float], starts: int):
        """One training of a network for each cut and rate, those of a cut side by side."""
        plan = Plan(
            steps=configs[0]["steps"],
            batch=BATCH,
            lr=functools.partial(rates_by_rule, lr=1.0),
            optimiser=Adam,
            each=tuple(lrs) * len(configs),
            looks=LOOKS,
            finite=False,
        )
        parts = {"train": [s.train for s in splits for _ in lrs]}
        parts["val"] = [s.val for s in splits for _ in lrs]
        seeds = [starts + c["seed"] for c in configs for _ in lrs]
        make = functools.partial(self.make, configs[0])
        return fit(make, parts, plan, seeds=seeds, loss=loss_of(configs[0]["data"]))

    def trials(self, configs: list[dict]) -> list[dict]:
        """For each cut the lowest validation loss at each of the rates of a configuration; the test part is not looked at.

        The curve holds what a race looks up: the validation losses at `LOOKS`, a column for each rate in their order.
        """
        lrs, found = configs[0]["rates"], []
        fitted = self.fit(configs, self.splits(configs), lrs, starts=100)
        for i in range(len(configs)):
            own = {f"val_loss_{k + 1}": i * len(lrs) + k for k in range(len(lrs))}
            curve = [{"step": point["step"]} for point in fitted.curves[0]]
            for (name, k), (at, point) in itertools.product(own.items(), enumerate(curve)):
                point[name] = float(f"{_finite(fitted.curves[k][at]['val_loss']):.4g}")
            metrics = {name: _finite(fitted.lowest[k]) for name, k in own.items()}
            found.append({"metrics": metrics, "curve": curve})
        return self._rows(configs, found, fitted)

    def runs(self, configs: list[dict]) -> list[dict]:
        """For each cut the test at the rate of a configuration, at the look with the lowest validation loss."""
        splits, name = self.splits(configs), configs[0]["data"]
        if configs[0]["layer"] == "constant":
            return self._rows(configs, [{"metrics": constant(split)} for split in splits])
        fitted = self.fit(configs, splits, [configs[0]["lr"]], starts=0)
        scores = {"test_loss": loss_of(name)}
        if not splits[0].test[1].is_floating_point():
            scores["test_accuracy"] = accuracy
        tested = fitted.score([split.test for split in splits], scores, "best")
        found = []
        for i, each in enumerate(tested):
            metrics = {"val_loss": _finite(fitted.lowest[i]), "best_step": fitted.when["best"][i]}
            metrics |= {score: _finite(value) for score, value in each.items()}
            found.append({"metrics": metrics})
        return self._rows(configs, found, fitted)

    def _rows(self, configs, found: list[dict], fitted: Fitted | None = None) -> list[dict]:
        """What came out, with the number of parameters and the sizes of the parts."""
        name, size = configs[0]["data"], configs[0]["size"]
        pool = len(self.read(name).x)
        parts = dict(zip(("samples", "validated", "tested"), parts_of(pool, size))) | {"pool": pool}
        count = models.size_of(fitted.members.first) if fitted else 0
        return [row | {"metrics": row["metrics"] | parts, "parameters": count} for row in found]


def data_of(config: dict) -> tuple[str, ...]:
    """The data set of a cell; a control has none."""
    return (EVERY[config["data"]].data,) if EVERY[config["data"]].data else ()


def loss_of(name: str) -> Callable:
    """The loss of a set: mean squared error of real targets, cross-entropy of classes."""
    real = EVERY[name].kind in ("forecasts", "control")
    return F.mse_loss if real else F.cross_entropy


def _finite(value: float) -> float:
    return min(max(value, LEAST), WORST) if math.isfinite(value) else WORST


def constant(split: Split) -> dict[str, float]:
    """Losses of the best answer that looks at nothing: the mean, or the shares of the classes, one case added to each."""
    y = split.train[1]
    if y.is_floating_point():
        answer, loss = y.mean(0), F.mse_loss
    else:
        classes = 1 + max(int(part[1].max()) for part in (split.train, split.val, split.test))
        answer = ((torch.bincount(y, minlength=classes) + 1) / (len(y) + classes)).log()
        loss = F.cross_entropy
    parts = {"val_loss": split.val[1], "test_loss": split.test[1]}
    return {name: float(loss(answer.expand(len(y), -1), y)) for name, y in parts.items()}


# ------------------------------------------------------------------------------------------------------------- the grid
CELL = ["data", "size", "layer", "budget", "order"]
LADDER = [float(f"{m}e{k}") for k in range(-7, 1) for m in (1, 3)]  # rates, by which the five grow


@functools.cache
def fits(kind: str, name: str, budget: str) -> bool:
    """Whether a layer stands beside others on a set: small enough, and a convolution only where neighbours are alike."""
    with torch.random.fork_rng(devices=[]):
        return kind == "constant" or models.network(kind, shape_of(name), budget) is not None


def cells(sets: Iterable[str], size: str) -> list[dict]:
    """All cells of a sample size: every layer at its budgets on all sets, one layer after the other.

    NdLinear and the sum of its terms stand there twice, with the entries of the cases in place and permuted.
    """
    found = []
    for budget, kinds in models.LAYERS.items():
        for kind in kinds:
            orders = (IN_PLACE, PERMUTED) if kind == models.OURS.get(budget) else (IN_PLACE,)
            for order, name in itertools.product(orders, sets):
                if fits(kind, name, budget):
                    found.append(dict(zip(CELL, (name, size, kind, budget, order))))
    return found


def tried(record: Callable, cells: list[dict], rounds: int = len(LADDER)) -> pd.DataFrame:
    """The trials of some cells, a row for each cell, cut and rate (columns ``lr``, ``val_loss``).

    Five rates first. Where the lowest mean log loss lies at an end of what a cell has tried, the next rate is tried too, until it
    does not.

    Args:
        record: (grid) -> rows of `Trainer.trials`. rounds: at most so often.
    """
    asked = [cell | {"rates": list(RATES)} for cell in cells if cell["layer"] != "constant"]
    found = []
    while asked:
        grid = [c | {"steps": STEPS, "seed": cut} for c in asked for cut in TRIAL_CUTS]
        found.append(by_rate(record(grid)))
        asked = grown(pd.concat(found)) if len(found) <= rounds else []
    return pd.concat(found, ignore_index=True)


def by_rate(rows: pd.DataFrame) -> pd.DataFrame:
    """A row for each rate of recorded trials."""
    each = []
    for row in rows.to_dict("records"):
        about = {name: row[name] for name in (*CELL, "seed", "parameters")}
        for at, lr in enumerate(row["rates"], 1):
            name = f"val_loss_{at}"
            curve = [(point["step"], point[name]) for point in row["curve"]]
            each.append(about | {"lr": lr, "val_loss": row[name], "curve": curve})
    return pd.DataFrame(each)


def best_rates(found: pd.DataFrame) -> pd.DataFrame:
    """For each cell the rate with the lowest mean log validation loss over the cuts, and the least and the largest that was tried."""
    best = lowest_rates(found.assign(loss=np.log(found["val_loss"])), CELL, "loss")
    return best[["lr"]].join(found.groupby(CELL)["lr"].agg(least="min", largest="max"))


def grown(found: pd.DataFrame) -> list[dict]:
    """The next rate of each cell whose best one lies at an end."""
    asked = []
    for key, (lr, least, largest) in best_rates(found).iterrows():
        step = -1 if lr == least else 1 if lr == largest else 0
        at = LADDER.index(lr) + step
        if step and 0 <= at < len(LADDER):
            asked.append(dict(zip(CELL, key)) | {"rates": [LADDER[at]]})
    return asked


def tested(cells: list[dict], found: pd.DataFrame) -> list[dict]:
    """The grid of the runs: each cell at its best rate, in each cut."""
    rates = best_rates(found)["lr"].to_dict()
    grid = []
    for cell in cells:
        lr = rates.get(tuple(cell[name] for name in CELL), 0.0)  # a constant has none
        grid += [cell | {"lr": lr, "steps": STEPS, "seed": cut} for cut in CUTS]
    return grid
