"""Radius Bump: ten uniform coordinates, a target that depends on their length alone, and networks of two kinds."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable

import numpy as np
import pandas as pd
import torch
from scipy.signal import fftconvolve
from scipy.stats import rankdata
from torch import Tensor, nn

from ndlinear import cheapest_order, count_macs, count_parameters

from .. import models
from ..modes import LabError
from ..page.facts import facts
from ..page.figures import colour, intervals
from ..stats import below, interval, paired

INPUTS = 10
DIMS = (2, 5)
RADIUS = 0.8
SIGMAS = (0.1, 0.2, 0.3)  # the difficulties of the paper
POOL = 2000  # samples that a seed may draw from
TEST_SEED = 1_000_000  # of the test set that all runs share


def inputs(count: int, seed: int) -> Tensor:
    """(count, 10) coordinates, uniform on [-1, 1]."""
    return 2 * torch.rand(count, INPUTS, generator=torch.Generator().manual_seed(seed)) - 1


def target(x: Tensor, sigma: float) -> Tensor:
    """(..., 10) -> (...): the bump around the sphere of radius 0.8."""
    return torch.exp(-((x.norm(dim=-1) - RADIUS) ** 2) / (2 * sigma**2))


def draw(seed: int, train: int, test: int) -> tuple[Tensor, Tensor]:
    """The training and the small test inputs of a seed. A smaller training set is the beginning of a larger one."""
    if train + test > POOL:
        raise LabError(f"{train} + {test} samples; a seed has {POOL}")
    x = inputs(POOL, seed)
    return x[:train], x[POOL - test :]


def network(arm: str, size: int | tuple[int, ...], depth: int, bias: bool = True) -> nn.Sequential:
    """`lab.models.radius_mlp` with one number as answer, (n, 10) -> (n,).

    ``size``: units of each hidden layer ("dense"); the hidden shape, or four times its length ("ndlinear").
    """
    method = {"dense": "dense", "ndlinear": "NdLinear"}[arm]
    layers = models.radius_mlp(method, size, depth, bias)
    kept = [layer for layer in layers if not isinstance(layer, nn.Flatten)]
    return nn.Sequential(*kept, nn.Flatten(0))  # one at the end, not two


@functools.cache
def rays(cells: int = 4000, nodes: int = 60) -> tuple[Tensor, Tensor, Tensor]:
    """A uniform input of Radius Bump by its direction and its length, as a quadrature rule.

    A direction meets the surface of the cube at a distance R, where one coordinate is +-1 and the
    other nine are uniform: R^2 is one plus nine squares. Along it (r / R)^10 is uniform on [0, 1].

    Returns probabilities p of R (n,), lengths r on each ray (n, nodes), and their weights w (nodes,): E f = p @ (f(r) @ w).
    """
    one = np.diff(np.sqrt(np.linspace(0, 1, cells + 1)))  # P(x^2 in a cell)
    p = functools.reduce(fftconvolve, [one] * (INPUTS - 1)).clip(0)
    centre = (np.arange(cells) + 0.5) / cells
    shift = 1 / 3 - one @ centre  # the mean of x^2 is a third: corrects for the cells' centres
    squares = (np.arange(len(p)) / cells) + (INPUTS - 1) * (0.5 / cells + shift)
    t, w = np.polynomial.legendre.leggauss(nodes)
    t, w = (t + 1) / 2, w / 2
    arrays = p / p.sum(), np.sqrt(1 + squares)[:, None] * t, INPUTS * t ** (INPUTS - 1) * w
    return tuple(map(torch.from_numpy, arrays))


def population(sigma: float, f: Callable[[Tensor], Tensor]) -> float:
    """Mean of a function of the target over all inputs."""
    p, r, w = rays()
    return float(p @ (f(target(r[..., None], sigma)) @ w))


def constant_errors(sigma: float) -> dict[str, float]:
    """Population mean squared error of the answers "always zero" and "always the mean", and the mean itself."""
    mean, square = population(sigma, lambda y: y), population(sigma, torch.square)
    return {"zero": square, "mean": square - mean**2, "mean of the target": mean}


def along_rays(sigma: float) -> tuple[float, float]:
    """The bound of Theorem 33.1 on the error of networks without biases, and the error of always zero."""
    p, r, w = rays()
    y = target(r[..., None], sigma)
    bound = y**2 @ w - (r * y @ w) ** 2 / (r**2 @ w)
    return float(p @ bound), population(sigma, torch.square)


def costs(arm: str, size: int | tuple[int, ...], depth: int) -> dict[str, int]:
    """Parameters of `network` and its multiply-adds per sample (1 = 2 FLOPs), each layer in its "cheapest" order."""
    if arm == "dense":
        sizes = [INPUTS, *[size] * (depth - 1), 1]
        layers = [((a,), (b,)) for a, b in itertools.pairwise(sizes)]
    else:
        layers = list(itertools.pairwise([DIMS, *[tuple(size)] * (depth - 1), (1,) * len(size)]))
    return {
        "parameters": sum(count_parameters(d, h) for d, h in layers),
        "cheapest": sum(count_macs(d, h, cheapest_order(d, h)) for d, h in layers),
    }


def equal_dense(width: int, depth: int) -> dict[str, int]:
    """Dense widths to compare NdLinear with hidden shape (width/4, width/4) with, by what they have in common.

    The printed pair; the nearest count of parameters or of multiply-adds (cheapest order, which favours NdLinear); as many hidden
    units. 256 stands in where the nearest width is 257.
    """
    modewise = costs("ndlinear", (width // 4,) * 2, depth)
    found = {"label": width}
    for name, key in (("parameters", "parameters"), ("multiply-adds", "cheapest")):
        counts = {w: costs("dense", w, depth)[key] for w in range(1, 400)}
        best = min(counts, key=lambda w: abs(counts[w] - modewise[key]))
        found[name] = 256 if best == 257 else best
    return found | {"units": (width // 4) ** 2}


def spread_of_zero(sigma: float, samples: int) -> float:
    """Standard deviation of the error of "always zero" over test sets of a size: what their draw alone does."""
    fourth, square = population(sigma, lambda y: y**4), population(sigma, torch.square)
    return math.sqrt((fourth - square**2) / samples)


def constants() -> pd.DataFrame:
    """By difficulty: how rare a target above one tenth is, the constants' errors, and how that of zero varies between test sets."""
    rows = {}
    for sigma in SIGMAS:
        often = population(sigma, lambda y: (y > 0.1).double())
        errors = constant_errors(sigma)
        rows[sigma] = often, errors["zero"], errors["mean"], spread_of_zero(sigma, 200)
    columns = ["P(y > 0.1)", "always zero", "always the mean", "sd of zero, 200 samples"]
    return pd.DataFrame(rows, index=columns).T.rename_axis("sigma")


# ------------------------------------------------------------------------------ reading the records
GROUP = ["sigma", "arm", "width", "depth"]


def printed(metric: str) -> pd.DataFrame:
    """A column of the paper's three tables: ``value`` and ``std`` by difficulty, width, depth and arm."""
    tables = [facts(f"radius_0{s}", metric=metric) for s in (10, 20, 30)]
    found = pd.concat(tables).astype({"width": int, "depth": int, "sigma": float})
    found["arm"] = found["method"].map({"dense": "dense", "NdLinear": "ndlinear"})
    return found.set_index(["sigma", "width", "depth", "arm"])[["value", "std"]].sort_index()


def against(
    runs: pd.DataFrame,
    cell: tuple[float, int, int],
    opponent: int,
    metric: str = "end_test",
    level: float = 0.95,
) -> tuple[float, float, float, float] | None:
    """NdLinear minus the dense network of width ``opponent`` in a cell (sigma, width, depth): mean, low, high, and the dense mean.

    Paired by the seeds that both have; None where there are fewer than two.
    """
    sigma, width, depth = cell
    some = runs[(runs["sigma"] == sigma) & (runs["depth"] == depth)]
    dense = some[(some["arm"] == "dense") & (some["width"] == opponent)]
    modewise = some[(some["arm"] == "ndlinear") & (some["width"] == width)]
    seeds = set(dense["seed"]) & set(modewise["seed"])
    if len(seeds) < 2:
        return None
    both = pd.concat([dense, modewise]).query("seed in @seeds")
    mean = both[both["arm"] == "dense"][metric].mean()
    return (*paired(both, metric, "ndlinear", "dense", level=level), mean)


def by_pair(runs: pd.DataFrame, metric: str, level: float = 0.95) -> pd.DataFrame:
    """`against` the dense network of the same label: a row for each difficulty, width and depth."""
    cells = runs.groupby(["sigma", "width", "depth"]).groups
    rows = {cell: against(runs, cell, cell[1], metric, level) for cell in cells}
    frame = pd.DataFrame(rows, index=["difference", "low", "high", "dense"]).T
    return frame.rename_axis(["sigma", "width", "depth"])


def rank_correlation(
    runs: pd.DataFrame, x: str, y: str, level: float = 0.95
) -> tuple[float, float, float]:
    """Spearman's correlation over the seeds of a group, averaged over the groups that have all seeds: (mean, low, high).

    The interval is the wider of two: t over the groups, and a jackknife over the seeds, which the groups share. A group in which one
    of the two does not vary counts as 0.
    """
    seeds = runs["seed"].unique()
    full = runs.groupby(GROUP).filter(lambda group: len(group) == len(seeds))
    wide = [full.pivot(index=GROUP, columns="seed", values=v).to_numpy() for v in (x, y)]

    def over_groups(kept: np.ndarray) -> np.ndarray:
        a, b = (rankdata(values[:, kept], axis=1) for values in wide)
        a, b = (ranks - ranks.mean(axis=1, keepdims=True) for ranks in (a, b))
        spread = np.sqrt((a**2).sum(axis=1) * (b**2).sum(axis=1))
        return np.divide((a * b).sum(axis=1), spread, out=np.zeros(len(a)), where=spread > 0)

    n = len(seeds)
    everyone = np.arange(n)
    each = over_groups(everyone)
    left = [over_groups(np.delete(everyone, k)).mean() for k in everyone]
    values = each, [n * each.mean() - (n - 1) * v for v in left]
    found = [interval(v, level=level) for v in values]
    widest = max(high - low for _, low, high in found) / 2
    return float(each.mean()), float(each.mean() - widest), float(each.mean() + widest)


def tally(
    runs: pd.DataFrame, fair: dict[tuple[int, int], dict[str, int]], level: float = 0.95
) -> pd.DataFrame:
    """In how many cells NdLinear has the lower or the higher error than each kind of opponent, or neither is certain."""
    words = {True: "lower", False: "higher", None: "open"}
    counts = {name: dict.fromkeys(words.values(), 0) for name in next(iter(fair.values()))}
    for sigma, ((width, depth), widths) in itertools.product(runs["sigma"].unique(), fair.items()):
        for name, opponent in widths.items():
            found = against(runs, (sigma, width, depth), opponent, level=level)
            if found:
                counts[name][words[below(found[:3])]] += 1
    return pd.DataFrame(counts).T.rename_axis("equal")


# ----------------------------------------------------------------------------------------------------------- figures
def draw_gaps(axes, runs: pd.DataFrame, opponents: dict[str, str]) -> None:
    """Test error of dense networks minus that of NdLinear in percent of theirs, mean and 95 % interval, an axis for each difficulty.

    opponents: what a dense network shares with NdLinear, see `equal_dense` -> the method whose colour and marker it takes.
    """
    widths, depths = (16, 32, 64, 128), (2, 3)
    for (place, width), depth in itertools.product(enumerate(widths), depths):
        dense = equal_dense(width, depth)
        for k, (common, look) in enumerate(opponents.items()):
            y = place + 0.36 * k + 0.16 * (depth - 2) - 0.26
            fill = colour(look) if depth == 2 else "none"
            for axis, sigma in zip(axes, SIGMAS):
                mean, low, high, of = against(runs, (sigma, width, depth), dense[common])
                ends = [-100 * value / of for value in (mean, high, low)]
                intervals(axis, y, ends, look, mfc=fill, ms=5)
    for axis, sigma in zip(axes, SIGMAS):
        axis.axvline(0, color=colour("constant"), lw=1)
        axis.set_title(f"σ = {sigma}", fontsize=10)
    axes[0].set_yticks(range(len(widths)), [f"({w // 4}, {w // 4})" for w in widths])
    axes[0].set(ylabel="hidden shape of NdLinear")
    axes[0].invert_yaxis()
    axes[1].set(xlabel="dense − NdLinear, percent (right: NdLinear is better)")
