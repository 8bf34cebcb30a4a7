"""Chapter 15: training many seeds at once when parameters have rates of their own, and reading which rate is best."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn

from .. import chunked, stacked
from ..records import read
from ..stats import interval
from ..training import Split, seed_everything

WORST = 1e6  # what is recorded in place of a loss that is larger or not a number


# ------------------------------------------------------------------------------------------------------------- training
def named_options(model: nn.Module, groups: Sequence[Mapping]) -> dict[str, dict[str, float]]:
    """What parameter groups say about each parameter of a model (its rate, its decay), by name."""
    said = {id(p): group for group in groups for p in group["params"]}
    return {
        name: {k: v for k, v in said[id(p)].items() if k != "params"}
        for name, p in model.named_parameters()
    }


def _regrouped(
    weights: Mapping[str, Tensor], options: Mapping[str, Mapping[str, float]]
) -> list[dict]:
    """Stacked weights in the groups of the parameters that they stack."""
    groups: dict[tuple, dict] = {}
    for name, value in weights.items():
        key = tuple(sorted(options[name].items()))
        groups.setdefault(key, {"params": []} | dict(key))["params"].append(value)
    return list(groups.values())


def fit(
    make: Callable[[], nn.Module],
    data,
    *,
    seeds: Sequence[int],
    groups: Callable[[nn.Module], Sequence[Mapping]],
    loss: Callable,
    epochs: int,
    batch_size: int,
    optimiser=torch.optim.Adam,
) -> tuple[stacked.Stack, list[dict[str, float]]]:
    """Train one model for each seed, all at once, as `lab.stacked.fit` does, with the parameter groups
    that ``groups(model)`` says.

    A member whose loss leaves the numbers goes on and is reported as diverged; the others do not notice.

    Returns:
        The stack (moments "best" by validation loss and "end"), and for each member its training loss in the last epoch,
        its lowest validation loss, and whether it diverged.
    """
    device = torch.device("cpu")
    skeleton, weights = stacked._members(make, seeds, device, dropout=False)
    (x, y), (x_val, y_val) = stacked._data(data, len(seeds), device)
    model = make()
    steps = optimiser(_regrouped(weights, named_options(model, groups(model))))
    orders = [torch.Generator().manual_seed(seed) for seed in seeds]
    kept = {name: value.detach().clone() for name, value in weights.items()}
    lowest, best = torch.full((len(seeds),), math.inf), [0] * len(seeds)
    curves: list[list[dict[str, float]]] = [[] for _ in seeds]
    for now in range(1, epochs + 1):
        train = stacked._one_epoch(skeleton.train(), weights, x, y, loss, steps, orders, batch_size)
        val = _validate(skeleton.eval(), weights, x_val, y_val, loss)
        better = val < lowest
        lowest = torch.where(better, val, lowest)
        stacked._keep(kept, weights, better, best, now)
        for curve, *point in zip(curves, _numbers(train), _numbers(val)):
            curve.append(dict(zip(("epoch", "train_loss", "val_loss"), (now, *point))))
    end = {name: value.detach() for name, value in weights.items()}
    epoch = {"best": best, "end": [epochs] * len(seeds)}
    halted = [False] * len(seeds)
    stack = stacked.Stack(
        list(seeds), skeleton, {"best": kept, "end": end}, epoch, halted, 0.0, curves
    )
    found = zip(_numbers(train), _numbers(lowest), _numbers(val))
    return stack, [
        {"train_loss": a, "val_loss": b, "diverged": float(max(a, c) >= WORST)} for a, b, c in found
    ]


@torch.no_grad()
def _validate(skeleton, weights, x: Tensor, y: Tensor, loss: Callable) -> Tensor:
    found = stacked._means(skeleton, weights, x, y, {"loss": loss})
    return torch.tensor([point["loss"] for point in found])


def _numbers(values: Tensor) -> list[float]:
    """Losses as numbers that JSON knows."""
    return values.detach().nan_to_num(WORST, WORST).clamp_max(WORST).tolist()


def fit_whole(
    make: Callable[[], nn.Sequential],
    data: Sequence[tuple[Tensor, Tensor]],
    *,
    seeds: Sequence[int],
    epochs: int,
    groups: Callable[[nn.Module], Sequence[Mapping]],
) -> list[nn.Module]:
    """Full batches and Adam on the mean squared error, as `lab.chunked.fit`, with parameter groups: the trained models."""
    models = []
    for seed in seeds:
        seed_everything(seed)
        models.append(make())
    maps, count = chunked._maps(models[0], len(seeds)), len(data[0][1])
    weights = {
        name: torch.stack([model.state_dict()[name] for model in models]).requires_grad_()
        for name in models[0].state_dict()
    }
    x = torch.stack([x.reshape(count, -1).T for x, _ in data])  # members, inputs, samples
    y = torch.stack([y for _, y in data])
    widest = len(seeds) * max(p * h * q for layer in maps for p, _, h, q in layer.modes)
    chunk = chunked._chunk(count, widest)
    for layer in maps:
        layer.allocate(chunk)
    free = [torch.empty(widest * chunk) for _ in range(2)]
    parts = [
        (a.contiguous(), b.contiguous())
        for a, b in zip(x.split(chunk, dim=2), y.split(chunk, dim=1))
    ]
    options = named_options(models[0], groups(models[0]))
    adam = torch.optim.Adam(_regrouped(weights, options), fused=True)
    for _ in range(epochs):
        for layer in maps:
            layer.prepare(weights)
        with torch.no_grad():
            for part in parts:
                chunked._gradients(maps, *part, free, count)
        adam.zero_grad(set_to_none=True)
        torch.autograd.backward(*zip(*[pair for layer in maps for pair in layer.hand_back()]))
        adam.step()
    for i, model in enumerate(models):
        model.load_state_dict({name: value.detach()[i] for name, value in weights.items()})
    return models


# ----------------------------------------------------------------------------------------------------------------- data
def forecasts(table: np.ndarray, steps: int, horizon: int, every: int) -> Split:
    """Windows of a multivariate series and the last channel's next values, 60 / 20 / 20 % in the order of time.

    Scaled by the first part. Parts share no reading.
    """
    cuts = [0, *(round(share * len(table)) for share in (0.6, 0.8, 1.0))]
    seen = table[: cuts[1]]
    table = (table - seen.mean(0)) / seen.std(0)
    parts = []
    for first, last in itertools.pairwise(cuts):
        starts = range(first, last - steps - horizon + 1, every)
        x = np.stack([table[i : i + steps] for i in starts]).astype(np.float32)
        y = np.stack([table[i + steps : i + steps + horizon, -1] for i in starts])
        parts.append((torch.from_numpy(x), torch.from_numpy(y.astype(np.float32))))
    return Split(*parts)


# ------------------------------------------------------------------------------------------------------ reading records
def rows(name: str, **where) -> pd.DataFrame:
    """The newest finished rows of another chapter's records that agree with ``where``; values may be lists to choose from."""
    newest = {row["key"]: row for row in read(name) if row["status"] == "ok"}
    frame = pd.DataFrame([row["config"] | row["metrics"] for row in newest.values()])
    for column, wanted in where.items() if len(frame) else ():
        frame = frame[frame[column].isin(wanted if isinstance(wanted, list) else [wanted])]
    return frame.reset_index(drop=True)


def best_rates(runs: pd.DataFrame, by: list[str], metric: str) -> pd.DataFrame:
    """For each group the rate with the lowest mean of a metric, that mean, and whether the rate lies at the grid's edge."""
    means = runs.groupby([*by, "lr"])[metric].mean().reset_index()
    best = means.loc[means.groupby(by)[metric].idxmin()].set_index(by)
    ends = means["lr"].min(), means["lr"].max()
    best["edge"] = best["lr"].isin(ends)
    return best


def steps_apart(a: float, b: float, grid: Sequence[float]) -> int:
    """How many places apart two rates stand in the grid."""
    places = {rate: i for i, rate in enumerate(sorted(grid))}
    return abs(places[a] - places[b])


def percent(a: pd.DataFrame, b: pd.DataFrame, metric: str) -> tuple[float, float, float]:
    """How much higher a metric is in ``a`` than in ``b``, in percent of the geometric mean, paired by seed, with 95 % interval."""
    logs = np.log(a.set_index("seed")[metric]) - np.log(b.set_index("seed")[metric])
    return tuple(100 * (np.exp(v) - 1) for v in interval(logs.dropna()))
