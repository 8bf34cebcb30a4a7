"""Chapter 15: a step by rule beside the largest dense one, the data of its trainings, and what is kept of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn

from ndlinear import NdLinear
from ndlinear_guide.rates import layer_shapes, lr_groups

from .. import models
from ..counts import count_macs
from ..stats import above, best_rates, interval
from ..train import Split, many

WORST = 1e6  # what is recorded in place of a loss that is larger or not a number
WORDS = {True: "higher", False: "lower", None: "open"}

# a layer, an input, the gradient of the loss with respect to the output
Case = tuple[NdLinear, Tensor, Tensor]


# ------------------------------------------------------------------------------------------------------------- one step
def aligned(D: Sequence[int], H: Sequence[int]) -> Case:
    """The largest step: matrices whose rows copy entries of the input, an input and a gradient of ones, biases zero."""
    layer = NdLinear(D, H)
    for mode, d, h in zip(layer.align_layers, D, H):
        places = torch.cat([torch.randperm(d) for _ in range(h // d + 1)])[:h]
        mode.weight.data = torch.eye(d)[places]
        mode.bias.data.zero_()
    return layer, torch.ones(1, *D), torch.ones(1, *H)


def scattered(D: Sequence[int], H: Sequence[int]) -> Case:
    """For no mode that shrinks: matrices whose gain is one for every input; random input and gradient, biases zero."""
    layer = NdLinear(D, H)
    for mode, d, h in zip(layer.align_layers, D, H):
        nn.init.orthogonal_(mode.weight, gain=math.sqrt(h / d))
        mode.bias.data.zero_()
    return layer, torch.randn(1, *D), torch.randn(1, *H)


def against_dense(case: Callable[..., Case], D, H, optimiser: str, lr: float = 1e-7) -> float:
    """Change of the output (rms) by one step by rule, over the most that a dense layer's step can change it."""
    layer, x, slope = case(D, H)
    groups = lr_groups(layer, lr, optimiser=optimiser)
    before = layer(x).detach()
    (layer(x) * slope).sum().backward()
    if optimiser == "muon":
        _muon(groups)
    elif optimiser == "adam":
        torch.optim.Adam(groups, eps=0).step()
    else:
        torch.optim.SGD(groups).step()
    return _rms(layer(x) - before) / (lr * largest_dense_step(x, slope, optimiser))


def largest_dense_step(x: Tensor, slope: Tensor, optimiser: str) -> float:
    """Most that one step of rate 1 changes the output (rms) of a dense layer with bias, for one input and gradient of these rms."""
    inputs, outputs = x.numel(), slope.numel()
    return {
        "adam": inputs * _rms(x) + 1,
        "sgd": (inputs * _rms(x) ** 2 + 1) * _rms(slope),
        "muon": _rms(x) * math.sqrt(max(1, inputs / outputs)) + 1,
    }[optimiser]


def _rms(x: Tensor) -> float:
    return x.square().mean().sqrt().item()


@torch.no_grad()
def _muon(groups: Sequence[Mapping]) -> None:
    """One step of exact Muon without momentum: the nearest orthogonal matrix, scaled as torch.optim.Muon does.

    A bias is a matrix with one input.
    """
    for p, lr in ((p, group["lr"]) for group in groups for p in group["params"]):
        u, s, v = torch.linalg.svd(p.grad.view(len(p), -1), full_matrices=False)
        scale = math.sqrt(max(1, len(p) ** 2 / p.numel()))
        p -= lr * scale * ((u * (s > 1e-9 * s.max())) @ v).view_as(p)


# ------------------------------------------------------------------------------------------------------------- training
def by_rule(lr: float, like: nn.Module | None = None, **options) -> Callable:
    """network -> rate, and decay if asked for, of each parameter by name: `lr_groups`, as `many.Plan` takes them.

    Args:
        like: a network for whose layers lr was tuned, in the same order.
    """

    def rates(model: nn.Module) -> dict[str, dict[str, float]]:
        tuned = like and dict(zip(layer_shapes(model), layer_shapes(like).values(), strict=True))
        groups = lr_groups(model, lr, tuned_at=tuned, **options)
        said = {id(p): group for group in groups for p in group["params"]}
        return {
            name: {k: v for k, v in said[id(p)].items() if k != "params"}
            for name, p in model.named_parameters()
        }

    return rates


def outcomes(
    configs: Sequence[Mapping],
    make: Callable[[], nn.Module],
    data: Callable[[int], Split],
    plan: many.Plan,
    loss: Callable,
    scores: Mapping[str, Callable] | None = None,
) -> list[dict]:
    """Train a network for each configuration, which differ in their seeds: what a record keeps of each.

    It is tested at the epoch of lowest validation loss, by ``scores``, else by the loss. One whose loss leaves the numbers goes
    on and is kept as diverged, with `WORST` for what is no number.
    """
    seeds = [c["seed"] for c in configs]
    splits = [data(seed) for seed in seeds]
    parts = {name: [getattr(s, name) for s in splits] for name in ("train", "val", "test")}
    fitted = many.fit(make, parts, replace(plan, finite=False), seeds=seeds, loss=loss)
    model, found = make(), []
    counts = {"parameters": models.size(model), "macs": count_macs(model, splits[0].test[0][:1])}
    for i, tested in enumerate(fitted.score(parts["test"], scores or {"test_loss": loss})):
        last = fitted.curves[i][-1]
        finite = math.isfinite(last["train_loss"]) and math.isfinite(last["val_loss"])
        metrics = {"train_loss": last["train_loss"], "val_loss": fitted.lowest[i]} | tested
        metrics |= {"best_epoch": fitted.when["best"][i], "diverged": not finite}
        found.append({"metrics": {name: number(v) for name, v in metrics.items()}, **counts})
    return found


def number(value: float) -> float:
    """A metric as a number that JSON knows: `WORST` where it is none, or larger."""
    return min(float(value), WORST) if math.isfinite(value) else WORST


def squared_error(out: Tensor, target: Tensor) -> Tensor:
    """Mean squared error of outputs that have the target's shape or one axis of length one more."""
    return (out.reshape(target.shape) - target).square().mean()


# ----------------------------------------------------------------------------------------------------------------- data
def teacher(seed: int) -> Split:
    """2,048 Gaussian inputs of 64 numbers to train, 512 to validate and to test; the answers of one random ReLU network."""
    fixed, own = torch.Generator().manual_seed(1000), torch.Generator().manual_seed(seed)
    shapes = (128, 64), (128, 128), (1, 128)
    first, second, last = [torch.randn(*s, generator=fixed) * math.sqrt(2 / s[1]) for s in shapes]
    x = [torch.randn(n, 64, generator=own) for n in (2048, 512, 512)]
    y = [(((part @ first.T).relu() @ second.T).relu() @ last.T)[:, 0] for part in x]
    mean, deviation = y[0].mean(), y[0].std()
    return Split(*[(a, (b - mean) / deviation) for a, b in zip(x, y)])


def standardised(part: Split) -> tuple[Split, float]:
    """Real targets in units of the training part's deviation, and the factor from its squared errors to the target's."""
    mean, deviation = part.train[1].mean(), part.train[1].std()
    pairs = [(x, (y - mean) / deviation) for x, y in (part.train, part.val, part.test)]
    return Split(*pairs), float(deviation) ** 2


# ------------------------------------------------------------------------------------------------------ reading records
def percent(a: pd.DataFrame, b: pd.DataFrame, metric: str) -> tuple[float, float, float]:
    """How much higher a metric is in ``a`` than in ``b``, in percent of the geometric mean, paired by seed, with 95 % interval."""
    logs = np.log(a.set_index("seed")[metric]) - np.log(b.set_index("seed")[metric])
    return tuple(100 * (np.exp(v) - 1) for v in interval(logs.dropna()))


def base_answers(
    runs: pd.DataFrame, metrics: Mapping[str, str], bases: Sequence[float]
) -> pd.DataFrame:
    """NdLinear minus the dense network at one rate, in points of a share with 95 % interval, paired by seed: at each common
    base rate, and, where both were run at all ``bases``, each at that with the lowest training loss (base "best").

    Args:
        runs: columns data, arm ("ndlinear", "dense"), rates, lr, seed, train_loss and the metrics.
        metrics: of each data set.
    """
    best = best_rates(runs, ["data", "arm", "rates"], "train_loss")["lr"]
    found = []
    ndlinear = runs[runs["arm"] == "ndlinear"]
    for (data, rates), ours in ndlinear.groupby(["data", "rates"], sort=False):
        dense = runs[(runs["data"] == data) & (runs["arm"] == "dense")]
        pairs = {lr: (lr, lr) for lr in ours["lr"].unique() if lr in set(dense["lr"])}
        if set(bases) <= set(pairs):
            pairs["best"] = best[data, "ndlinear", rates], best[data, "dense", "one rate"]
        for base, (a, b) in pairs.items():
            scores = [
                some[some["lr"] == lr].set_index("seed")[metrics[data]]
                for some, lr in ((ours, a), (dense, b))
            ]
            value = interval(100 * (scores[0] - scores[1]).dropna())
            found.append((data, rates, base, *value, WORDS[above(value)]))
    return pd.DataFrame(found, columns=["data", "rates", "base", "mean", "low", "high", "answer"])


def served(runs: pd.DataFrame) -> pd.DataFrame:
    """Whether a rate that is best in one cell of chapter 15's first experiment is best in another, up to one grid step.

    Returns:
        One row for each comparison, "width" (small against large, for each task and network) or "modes" (NdLinear against dense,
        for each task, width and network): rates, kind and ``served``.
    """
    steps = sorted(runs["lr"].unique())
    best = best_rates(runs, ["rates", "task", "network", "width"], "train_loss")

    def near(here, there) -> bool:
        a, b = best.loc[here], best.loc[there]
        return abs(steps.index(a["lr"]) - steps.index(b["lr"])) <= 1 and not (
            a["edge"] or b["edge"]
        )

    found = []
    for rates, task_, network, width in best.index:
        here = (rates, task_, network, width)
        if width == "large":
            found.append((rates, "width", near(here, (rates, task_, network, "small"))))
        if network != "dense":
            found.append((rates, "modes", near(here, (rates, task_, "dense", width))))
    return pd.DataFrame(found, columns=["rates", "kind", "served"])
