"""Networks on tables: the arms of chapter 43, what is recorded of their training, and models without layers."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pandas as pd
import torch
from torch import Tensor, nn

from ndlinear import NdLinear

from .. import stats
from ..modes import LabError
from ..train.loop import Split
from ..train.many import Plan, fit, parts_of
from ..train.scores import accuracy


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
        places = math.prod(shape)
        raise LabError(f"{inputs} features do not fit into {shape}: it has {places} places")
    layers = [nn.ZeroPad1d((0, missing))] if missing else []
    layers += [nn.Unflatten(-1, shape), NdLinear(shape, hidden), nn.ReLU()]
    layers += [NdLinear(hidden, hidden), nn.ReLU(), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(math.prod(hidden), outputs))


def directions(weight: Tensor) -> int:
    """How many rows of a weight matrix point in different directions."""
    unit = nn.functional.normalize(weight)
    return len(torch.unique((unit * unit[:, :1].sign()).round(decimals=9), dim=0))


# ----------------------------------------------------------------------------------- without layers
PEERS = ("constant", "linear", "boosting")
MOST_TREES = 1000


def peer(name: str, split: Split, classes: bool, seed: int) -> tuple[object, dict]:
    """A model of `PEERS`, fitted on the training part: its answers to the test part and its counts.

    "constant": the most frequent class, or the mean target. "linear": logistic or linear regression without a penalty. "boosting":
    scikit-learn's histogram gradient boosting as it comes, with as many trees, up to a thousand, as are best on the validation part.
    """
    from sklearn import dummy, ensemble, linear_model

    (x, y), (x_val, y_val), (x_test, _) = [
        (a.numpy(), b.numpy()) for a, b in (split.train, split.val, split.test)
    ]
    if name == "constant":
        model = dummy.DummyClassifier() if classes else dummy.DummyRegressor()
        return model.fit(x, y).predict(x_test), {"parameters": 1, "macs": 0}
    if name == "linear":
        linear = linear_model.LinearRegression()
        if classes:
            linear = linear_model.LogisticRegression(C=math.inf, max_iter=1000)
        return linear.fit(x, y).predict(x_test), {"parameters": x.shape[1] + 1, "macs": x.shape[1]}
    boosting = getattr(ensemble, f"HistGradientBoosting{'Classifier' if classes else 'Regressor'}")
    model = boosting(max_iter=MOST_TREES, early_stopping=False, random_state=seed).fit(x, y)
    staged = model.staged_predict_proba if classes else model.staged_predict
    losses = [_validation_loss(out, y_val, classes) for out in staged(x_val)]
    trees = losses.index(min(losses)) + 1
    stages = model.staged_predict(x_test)
    return [next(stages) for _ in range(trees)][-1], {"trees": trees}


def _validation_loss(out, y, classes: bool) -> float:
    """Cross-entropy of predicted probabilities, or mean squared error."""
    if classes:
        return float(-torch.from_numpy(out[range(len(y)), y]).clamp_min(1e-12).log().mean())
    return float(((out - y) ** 2).mean())


def squared_error(out: Tensor, target: Tensor) -> Tensor:
    """Mean squared error; the last axis of ``out`` has one entry."""
    return (out[..., 0] - target).square().mean()


def runs(make, splits: Sequence[Split], units: Sequence[float], c: dict, seeds) -> list[dict]:
    """Train and test one arm of chapter 43 on several seeds: what its record keeps of each.

    Args:
        units: factor of each split from its squared errors to the unit of the target; 1 for
            classes.
        c: "epochs", "lr" and "batch". The score is the accuracy where targets are classes, else the
            mean squared error.
    """
    classes = not splits[0].train[1].is_floating_point()
    score = {"score": accuracy if classes else squared_error}
    parts = parts_of(splits)
    adam = {"weight_decay": 0.01, "fused": True}  # what AdamW takes if nothing is said
    how = {name: c[name] for name in ("epochs", "batch", "lr")}
    plan = Plan(**how, optimiser=torch.optim.AdamW, options=adam)
    loss = nn.functional.cross_entropy if classes else squared_error
    found = fit(make, parts, plan, seeds=seeds, loss=loss, scores=score)
    best, end = (found.score(parts["test"], score, moment) for moment in ("best", "end"))
    metrics = [
        {"score": unit * best[i]["score"], "score_last": unit * end[i]["score"], "epoch": epoch}
        for i, (unit, epoch) in enumerate(zip(units, found.when["best"]))
    ]
    return found.rows(metrics, splits[0].test[0][:1], 20)


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
