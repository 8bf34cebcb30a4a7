"""Chapter 64's race: does a short race on the data at hand find the structured layer that full trainings would?

A cell is a data set with a sample size and a budget of cost. The data are tables of chapter 34, on which no choice among
structured layers was tuned. The model has two hidden layers of 256 numbers, and the race may exchange both.
"""

from __future__ import annotations

import collections
import functools
import math
from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import ndlinear_guide as guide

from .. import stats
from ..data import load
from ..machine import require
from ..page import figures
from ..train.loop import Split

WIDTH = 256
PAIR = [("first", "second")]
CELL = ["data", "size", "limit", "share"]
NAMES = {
    "low-rank": "low rank",
    "bottleneck": "low rank with SiLU between (CoLA)",
    "blocks": "block-diagonal",
    "monarch": "Monarch",
    "blast": "BLAST",
    "ndlinear": "NdLinear, two modes",
    "ndlinear-fold": "NdLinear, other folding",
    "ndlinear-3": "NdLinear, three modes",
    "ndlinear-sum": "NdLinear, sum of terms",
    "ndlinear-axes": "NdLinear, axes of the data",
    "narrow": "narrower dense",
}
KINDS = tuple(NAMES)
TREE = {"parameters": "ndlinear", "operations": "blocks"}  # the decision tree of chapter 64
LOOKS = {  # way of choosing -> a name of the figure style for its colour, and its line
    "race, 3": ("tcl", "-"),
    "race, 1": ("tcl", "--"),
    "always narrow": ("dense-params", "-."),
    "always low-rank": ("low-rank", "-."),
    "always ndlinear": ("ndlinear", "-."),
    "tree": ("", ":"),
}
CLOSE = 0.02  # a choice within two per cent of the lowest loss counts as good


# ------------------------------------------------------------------------------------------------------------ trainings
def network(inputs: int, outputs: int) -> nn.Sequential:
    """Two hidden layers and a read-out; the first two are the pair that is exchanged."""
    parts = {
        "first": nn.Linear(inputs, WIDTH),
        "relu": nn.ReLU(),
        "second": nn.Linear(WIDTH, WIDTH),
        "relu_too": nn.ReLU(),
        "out": nn.Linear(WIDTH, outputs),
    }
    return nn.Sequential(collections.OrderedDict(parts))


def outputs_of(split: Split) -> int:
    """Classes, or targets of a regression."""
    y = split.train[1]
    if y.is_floating_point():
        return y.shape[1]
    return 1 + max(int(part[1].max()) for part in (split.train, split.val, split.test))


def limits(config: Mapping, shape: Sequence[int]) -> dict:
    """What a layer may cost, and the axes: those of the data, and as many in the hidden layer."""
    axes = {"first": tuple(shape), "second": guide.layers.spread(WIDTH, len(shape))}
    return {"share": config["share"], "limit": config["limit"], "axes": axes}


def kinds_of(config: Mapping, shape: Sequence[int]) -> list[str]:
    """The kinds of layers that fit into a cell's budget."""
    model = network(math.prod(shape), 2)
    return [k for k in KINDS if guide.swap(model, PAIR, k, **limits(config, shape)) is not None]


def full(config: Mapping, shape: Sequence[int], split: Split) -> dict:
    """A full training of one kind at one rate; the test loss is that at the lowest validation loss."""
    model = network(math.prod(shape), outputs_of(split))
    make = functools.partial(guide.swap, model, PAIR, config["kind"], **limits(config, shape))
    ended = guide.training(
        make,
        config["lr"],
        split.train,
        split.val,
        config["steps"],
        config["seed"],
        test=split.test,
    )
    if not math.isfinite(ended.loss):
        raise ValueError("the loss is not finite")
    metrics = {"val_loss": ended.loss, "test_loss": ended.test}
    return {"metrics": metrics, "parameters": sum(p.numel() for p in make().parameters())}


def raced(config: Mapping, shape: Sequence[int], split: Split) -> dict:
    """A race on the training and the validation part: the number of the kind in `KINDS` that it chooses, and the rate."""
    torch.manual_seed(config["seed"])
    found = guide.race(
        network(math.prod(shape), outputs_of(split)),
        split.train,
        split.val,
        PAIR,
        kinds=KINDS,
        rates=config["rates"],
        steps=config["steps"],
        budget=config["budget"],
        seeds=(config["seed"],),
        progress=False,
        **limits(config, shape),
    )
    loss = float(np.mean(found.rounds[-1].losses[found.choice]))
    kind, rate = found.choice
    return {"metrics": {"kind": KINDS.index(kind), "rate": rate, "val_loss": loss}}


# ---------------------------------------------------------------------------------------------------- a library's model
def vit() -> nn.Module:
    """A small vision Transformer of the transformers library, for pictures of CIFAR-10: four blocks of 64 numbers, 256 inside."""
    transformers = require("transformers")
    config = transformers.ViTConfig(
        image_size=32,
        patch_size=4,
        hidden_size=64,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_labels=10,
    )
    return transformers.ViTForImageClassification(config)


def of_pictures(net: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """The loss of a model of transformers on a batch."""
    pictures, labels = batch
    return F.cross_entropy(net(pixel_values=pictures).logits, labels)


def pictures(count: int) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """A training and a validation part of CIFAR-10, a sixth of ``count`` pictures for validation."""
    x, y = load("cifar10").part("train")
    x = torch.from_numpy(x[:count] / np.float32(127.5) - 1)
    y = torch.tensor(y[:count]).long()
    cut = count - count // 6
    return (x[:cut], y[:cut]), (x[cut:], y[cut:])


def race_of_vit(config: Mapping) -> dict:
    """A race for the feed-forward blocks of `vit`: how far each kind came, and with which loss."""
    torch.manual_seed(config["seed"])
    model, (train, validation) = vit(), pictures(config["pictures"])
    found = guide.race(
        model,
        train,
        validation,
        guide.feed_forward(model),
        share=config["share"],
        steps=config["steps"],
        budget=config["budget"],
        seeds=(config["seed"],),
        loss=of_pictures,
        progress=False,
    )
    metrics = {"kind": KINDS.index(found.choice.kind), "rate": found.choice.rate}
    raced = found.table[found.table["kind"].isin(KINDS)]  # recorded without the model as it is
    for row in raced.to_dict("records"):
        kind = row["kind"]
        metrics |= {f"round {kind}": row["round"], f"loss {kind}": row["loss"]}
        metrics |= {f"parameters {kind}": row["parameters"]}
    return {"metrics": metrics}


# ------------------------------------------------------------------------------------------------------------- judgement
def truth(runs: pd.DataFrame) -> dict[tuple, pd.DataFrame]:
    """The test losses of each cell: a row for each kind, a column for each seed, the best kind first."""
    found = {}
    for cell, own in runs.groupby(CELL, sort=False):
        losses = own.pivot(index="kind", columns="seed", values="test_loss")
        found[cell] = losses.loc[losses.mean(axis=1).sort_values().index]
    return found


def regret(losses: pd.DataFrame, kind: str) -> dict:
    """What a choice costs in a cell: its mean loss over the lowest, minus one, and whether that is good.

    Good: at most two per cent above, or a difference whose 95 % t interval, paired by seed, holds zero.
    """
    lost = float(losses.loc[kind].mean() / losses.iloc[0].mean() - 1)
    more = (losses.loc[kind] - losses.iloc[0]).to_numpy()
    same = kind == losses.index[0] or stats.above(stats.interval(more)) is not True
    return {"regret": lost, "good": lost <= CLOSE or same, "close": lost <= CLOSE}


def choices(found: dict[tuple, pd.DataFrame], races: pd.DataFrame) -> pd.DataFrame:
    """A row for each cell and way of choosing: race of each budget, tree, always the same kind; with its regret."""
    rows = []
    for cell, losses in found.items():
        named = dict(zip(CELL, cell))
        own = races[(races[CELL] == list(cell)).all(axis=1)]
        chosen = {f"race, {b:g}": KINDS[int(k)] for b, k in zip(own["budget"], own["kind"])}
        # where the layer that the tree names does not fit, Monarch, or else low rank
        advised = (TREE[named["limit"]], "monarch", "low-rank")
        chosen["tree"] = next(kind for kind in advised if kind in losses.index)
        chosen |= {f"always {kind}": kind for kind in losses.index}
        for way, kind in chosen.items():
            rows.append({**named, "way": way, "kind": kind, **regret(losses, kind)})
    return pd.DataFrame(rows)


def _everywhere(chosen: pd.DataFrame) -> pd.DataFrame:
    """The ways of choosing that have an answer in every cell."""
    cells = chosen.groupby("way")["way"].transform("size")
    return chosen[cells == cells.max()]


def ways(chosen: pd.DataFrame) -> pd.DataFrame:
    """Each way of choosing that has an answer in every cell: share of good and of close choices, and the loss that it costs.

    The interval of the share is a t interval over the means of the data sets, since cells of one set are alike.
    """
    rows = []
    for way, own in _everywhere(chosen).groupby("way", sort=False):
        _, low, high = stats.interval(own.groupby("data")["good"].mean().to_numpy())
        row = {"way": way, "good": own["good"].mean()}
        row |= {"good_low": max(0.0, low), "good_high": min(1.0, high)}
        rows.append(row | {"close": own["close"].mean(), "median_regret": own["regret"].median()})
    return pd.DataFrame(rows).sort_values("good", ascending=False, ignore_index=True)


def leading(chosen: pd.DataFrame) -> pd.DataFrame:
    """Each kind in each cell: whether it has the lowest loss (`best`), and whether it is not clearly worse (`good`)."""
    own = chosen[chosen["way"].str.startswith("always")]
    return own.assign(best=own["regret"] == 0)


def log_regret(chosen: pd.DataFrame) -> pd.Series:
    """Mean of ln(1 + regret) of each way of choosing that has an answer in every cell."""
    own = _everywhere(chosen)
    return np.log1p(own["regret"]).groupby(own["way"]).mean().sort_values()


def draw_regret(axis, chosen: pd.DataFrame, names: Mapping[str, str]) -> None:
    """For each way of choosing the share of the cells in which it costs at most so much, both in percent."""
    for way, name in names.items():
        lost = 100 * np.sort([0.0, *chosen.loc[chosen["way"] == way, "regret"]])
        look, line = LOOKS[way]
        how = {"color": figures.colour(look) if look else "0.5", "where": "post", "label": name}
        axis.step(lost, np.linspace(0, 100, len(lost)), line, **how)
