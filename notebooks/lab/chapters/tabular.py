"""Networks on tables: the arms of chapter 43 and a training loop for many seeds of a small network
at small batches.

At 32 rows a step, most of the time of `lab.fit` and `lab.stacked.fit` goes into starting
operations. Here the members of a stack go through batched products in a layout that needs no copy
between two modes, and one fused optimiser step follows; tests/lab/test_tabular.py compares losses,
gradients and whole trainings with `lab.fit`.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pandas as pd
import torch
from torch import Tensor, nn

from ndlinear import NdLinear

from .. import stats
from ..counts import count_macs
from ..modes import LabError
from ..stats import interval, summary
from ..train import stacked
from ..train.loop import Split, default_device
from ..train.scores import accuracy

Weights = dict[str, Tensor]


# ----------------------------------------------------------------------------------------- the arms
def folded(
    inputs: int, shape: tuple[int, int], hidden: tuple[int, int], outputs: int
) -> nn.Sequential:
    """The tabular NdLinear network with its features arranged as ``shape``, filled up with zeros at
    the end.

    ``shape=(inputs, 1)`` is the network of the paper, `lab.models.tabular`; any other has two axes
    longer than one.
    """
    missing = math.prod(shape) - inputs
    if missing < 0:
        raise LabError(
            f"{inputs} features do not fit into {shape}: it has {math.prod(shape)} places"
        )
    layers = [nn.ZeroPad1d((0, missing))] if missing else []
    layers += [
        nn.Unflatten(-1, shape),
        NdLinear(shape, hidden),
        nn.ReLU(),
        NdLinear(hidden, hidden),
        nn.ReLU(),
    ]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(math.prod(hidden), outputs))


def directions(weight: Tensor) -> int:
    """How many rows of a weight matrix point in different directions."""
    unit = nn.functional.normalize(weight)
    return len(torch.unique((unit * unit[:, :1].sign()).round(decimals=9), dim=0))


# ------------------------------------------------------------------ all members through one network
def _modes(x: Tensor, layer: NdLinear, weights: Weights, name: str) -> Tensor:
    """(S, D_1, B, D_2) -> (S, H_1, B, H_2), mode 1 and then mode 2: no axis has to move in
    between."""
    s, b = x.shape[0], x.shape[2]
    (w1, w2), (b1, b2) = [
        [weights[f"{name}.align_layers.{k}.{part}"] for k in (0, 1)] for part in ("weight", "bias")
    ]
    x = torch.baddbmm(b1[:, :, None], w1, x.flatten(2)).view(s, -1, x.shape[3])
    return torch.baddbmm(b2[:, None], x, w2.mT).view(s, -1, b, w2.shape[1])


def _read_out(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """A linear layer on the flattened modes, (S, H_1, B, H_2) -> (S, B, C)."""
    s, h, b, _ = x.shape
    parts = weight.unflatten(2, (h, -1)).permute(0, 2, 3, 1).flatten(0, 1)
    return torch.bmm(x.flatten(0, 1), parts).view(s, h, b, -1).sum(1) + bias[:, None]


def forward(network: nn.Sequential, weights: Weights, x: Tensor) -> Tensor:
    """Every member on its own rows: (S, B, D) -> (S, B, outputs). ``weights``: name -> (S, ...)."""
    for name, layer in network.named_children():
        if isinstance(layer, nn.Unflatten):
            x = layer(x).transpose(1, 2).contiguous()
        elif isinstance(layer, NdLinear):
            x = _modes(x, layer, weights, name)
        elif isinstance(layer, nn.Linear):
            weight, bias = weights[f"{name}.weight"], weights[f"{name}.bias"]
            x = (
                _read_out(x, weight, bias)
                if x.ndim == 4
                else torch.baddbmm(bias[:, None], x, weight.mT)
            )
        elif not isinstance(layer, nn.Flatten):  # ReLU, padding: entry by entry
            x = layer(x)
    return x


# ---------------------------------------------------------------- losses: (S, B, C), (S, B) -> (S,)
def cross_entropy(logits: Tensor, classes: Tensor) -> Tensor:
    """Mean cross-entropy of each member."""
    values = nn.functional.cross_entropy(logits.flatten(0, 1), classes.flatten(), reduction="none")
    return values.view(classes.shape).mean(1)


def squared_error(out: Tensor, target: Tensor) -> Tensor:
    """Mean squared error of each member; the last axis of ``out`` has one entry."""
    return (out[..., 0] - target).square().mean(1)


# ----------------------------------------------------------------------------------------- training
@dataclass
class Stack:
    """A finished training: weights of all members at their best epoch ("best") and at the last
    ("end"), and their curves."""

    network: nn.Sequential = field(repr=False)
    weights: dict[str, Weights] = field(repr=False)
    best: list[int]
    seconds: float
    curves: list[list[dict[str, float]]] = field(repr=False)

    def evaluate(
        self,
        parts: Sequence[tuple[Tensor, Tensor]],
        functions: dict[str, Callable],
        moment: str = "best",
    ):
        """Means over the rows of one part for each member: a list of dictionaries."""
        x, y = stacked.stack_parts(parts)
        return _means(self.network, self.weights[moment], x.to(_device(self.weights)), y, functions)

    def thin(self, i: int, points: int = 10) -> list[dict[str, float]]:
        """About ``points`` epochs of a member's curve, the last included."""
        step = math.ceil(len(self.curves[i]) / points)
        kept = self.curves[i][::-1][::step][::-1]
        return [{k: float(f"{v:.5g}") for k, v in point.items()} for point in kept]


def _device(weights: dict[str, Weights]) -> torch.device:
    return next(iter(weights["end"].values())).device


@torch.no_grad()
def _means(network, weights, x, y, functions, rows: int = 1024) -> list[dict[str, float]]:
    totals = {name: torch.zeros(len(x)) for name in functions}
    for inputs, target in zip(x.split(rows, 1), y.to(x.device).split(rows, 1)):
        out = forward(network, weights, inputs)
        for name, function in functions.items():
            totals[name] += function(out, target).cpu() * target.shape[1]
    return [
        {name: float(total[i]) / x.shape[1] for name, total in totals.items()}
        for i in range(len(x))
    ]


def fit(
    make: Callable[[], nn.Sequential],
    data: Sequence[Split],
    *,
    seeds: Sequence[int],
    loss: Callable,
    scores: dict[str, Callable] | None = None,
    epochs: int,
    lr: float,
    batch_size: int,
    weight_decay: float = 0.01,
    device: str | torch.device | None = None,
) -> Stack:
    """Train one network for each seed with AdamW, all in one go; the test parts are not looked at.

    Args:
        make: builds a sequence of `nn.Linear`, two-mode `NdLinear` with biases, ReLU, padding and
            reshaping; called once for each seed, right after seeding, so that a member starts as it
            would alone.
        data: one split for each seed, of equal sizes. seeds: also the order of the batches, as in
            `lab.fit`.
        loss, scores: (S, B, C) and (S, B) -> (S,); the best epoch of a member is that of its lowest
            validation loss.
        weight_decay: 0.01 is what `torch.optim.AdamW` takes if nothing is said.

    Raises:
        LabError: a loss is not finite, or the splits differ in size.
    """
    device = default_device(device)
    network, weights = stacked.members_of(make, seeds, device)
    member_forward = functools.partial(forward, network, weights)
    train_part, (x_val, y_val) = [
        [t.to(device) for t in stacked.stack_parts(parts)]
        for parts in ([s.train for s in data], [s.val for s in data])
    ]
    adam = torch.optim.AdamW(weights.values(), lr=lr, weight_decay=weight_decay, fused=True)
    orders = [torch.Generator().manual_seed(seed) for seed in seeds]
    kept = {name: value.detach().clone() for name, value in weights.items()}
    best = [0] * len(seeds)
    lowest = [math.inf] * len(seeds)
    curves = [[] for _ in seeds]
    began = time.perf_counter()
    for epoch in range(1, epochs + 1):
        losses = stacked.one_epoch(member_forward, train_part, loss, adam, orders, batch_size)
        train = losses.tolist()
        found = _means(network, weights, x_val, y_val, {"loss": loss, **(scores or {})})
        for i, point in enumerate(found):
            curves[i].append(
                {"epoch": epoch, "train_loss": train[i]} | {f"val_{k}": v for k, v in point.items()}
            )
            if not math.isfinite(train[i] + point["loss"]):
                raise LabError(
                    f"a loss of seed {seeds[i]} is not finite in epoch {epoch}: "
                    f"lower lr={lr} or check the data"
                )
            if point["loss"] < lowest[i]:
                lowest[i] = point["loss"]
                best[i] = epoch
                for name, value in weights.items():
                    kept[name][i] = value.detach()[i]
    end = {name: value.detach() for name, value in weights.items()}
    return Stack(network, {"best": kept, "end": end}, best, time.perf_counter() - began, curves)


# ----------------------------------------------------------------------------------- without layers
PEERS = ("constant", "linear", "boosting")


def peer(
    name: str, split: Split, classes: bool, seed: int, most: int = 1000
) -> tuple[object, dict]:
    """A model that is no network, fitted on the training part: its answers to the test part and its
    counts.

    "constant": the most frequent class, or the mean target. "linear": logistic or linear regression
    without a penalty. "boosting": scikit-learn's histogram gradient boosting as it comes, with as
    many trees, up to ``most``, as are best on the validation part.
    """
    (x, y), (x_val, y_val), (x_test, _) = [
        (a.numpy(), b.numpy()) for a, b in (split.train, split.val, split.test)
    ]
    if name == "constant":
        from sklearn import dummy

        model = dummy.DummyClassifier() if classes else dummy.DummyRegressor()
        return model.fit(x, y).predict(x_test), {"parameters": 1, "macs": 0}
    if name == "linear":
        from sklearn import linear_model

        linear = (
            linear_model.LogisticRegression(C=math.inf, max_iter=1000)
            if classes
            else linear_model.LinearRegression()
        )
        return linear.fit(x, y).predict(x_test), {"parameters": x.shape[1] + 1, "macs": x.shape[1]}
    if name != "boosting":
        raise LabError(f"no model {name!r}: {', '.join(PEERS)}")
    from sklearn import ensemble

    kind = (
        ensemble.HistGradientBoostingClassifier
        if classes
        else ensemble.HistGradientBoostingRegressor
    )
    model = kind(max_iter=most, early_stopping=False, random_state=seed).fit(x, y)
    losses = [
        _validation_loss(out, y_val, classes)
        for out in (model.staged_predict_proba if classes else model.staged_predict)(x_val)
    ]
    trees = losses.index(min(losses)) + 1
    stages = model.staged_predict(x_test)
    return [next(stages) for _ in range(trees)][-1], {"trees": trees}


def _validation_loss(out, y, classes: bool) -> float:
    """Cross-entropy of predicted probabilities, or mean squared error."""
    if classes:
        return float(-torch.from_numpy(out[range(len(y)), y]).clamp_min(1e-12).log().mean())
    return float(((out - y) ** 2).mean())


def runs(
    make, splits: Sequence[Split], units: Sequence[float], c: dict, seeds: Sequence[int]
) -> list[dict]:
    """Train and test one arm of chapter 43 on several seeds: what its record keeps of each.

    Args:
        units: factor of each split from its squared errors to the unit of the target; 1 for
            classes.
        c: "epochs", "lr" and "batch". The score is the accuracy where targets are classes, else the
            mean squared error.
    """
    classes = not splits[0].train[1].is_floating_point()
    score = {"score": accuracy if classes else squared_error}
    stack = fit(
        make,
        splits,
        seeds=seeds,
        loss=cross_entropy if classes else squared_error,
        scores=score,
        epochs=c["epochs"],
        lr=c["lr"],
        batch_size=c["batch"],
    )
    best, end = [
        stack.evaluate([s.test for s in splits], score, moment) for moment in ("best", "end")
    ]
    model = make()
    counts = {
        "parameters": sum(p.numel() for p in model.parameters()),
        "macs": count_macs(model, splits[0].test[0][:1]),
    }
    metrics = [
        {"score": unit * b["score"], "epoch": epoch, "score_last": unit * e["score"]}
        for unit, b, e, epoch in zip(units, best, end, stack.best)
    ]
    return [
        {"metrics": found, "curve": stack.thin(i, 20), **counts} for i, found in enumerate(metrics)
    ]


# ------------------------------------------------------------------------------------------- tables
NAMES = {  # arm: its name in figures, and whose colour and marker it has
    "dense": ("dense", "dense"),
    "NdLinear": ("NdLinear", "ndlinear"),
    "dense, equal parameters": ("dense, equal\nparameters", "dense-params"),
    "dense, equal directions": ("dense, equal\ndirections", "dense-width"),
    "NdLinear, two modes": ("NdLinear,\ntwo modes", "ndlinear-modes"),
    "linear": ("linear model", "linear"),
    "boosting": ("gradient\nboosting", "boosting"),
}


def differences(runs: pd.DataFrame, arm: str, over: str) -> pd.Series:
    """Score of one arm minus that of another, split by split, on the splits that both have."""
    both = set.intersection(*[set(runs[runs["arm"] == name]["seed"]) for name in (arm, over)])
    return stats.differences(runs[runs["seed"].isin(both)], "score", arm, over)


def overview(runs: pd.DataFrame, over: str = "NdLinear") -> pd.DataFrame:
    """One row per arm, by score: counts, number of seeds, mean score, difference to one of them;
    the last two with intervals."""
    table = (
        runs.groupby("arm")[["parameters", "macs"]]
        .first()
        .reset_index()
        .merge(summary(runs, "arm", "score"))
    )
    rows = [(arm, *interval(differences(runs, arm, over))) for arm in table["arm"] if arm != over]
    columns = ["arm", "difference", "difference_low", "difference_high"]
    return table.merge(pd.DataFrame(rows, columns=columns), how="left").sort_values("score")
