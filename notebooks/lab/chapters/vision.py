"""Small image classifiers: pictures, heads that the paper compares NdLinear with, and a training loop in mixed precision.

The networks of the paper are in `lab.models`; here are further heads on the same features (64, 8, 8), and the maps of its
comparison applied without multiplying out the matrix that they stand for.
"""

from __future__ import annotations

import copy
import functools
import math
import warnings
from collections.abc import Callable

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .. import memory, timing
from ..counts import count_macs, operations
from ..data import load
from ..machine import require
from ..models import CPLinear, TTLinear, cnn_features, size
from ..modes import LabError
from ..page import figures
from ..stats import interval, summary
from ..train import loop
from ..train.scores import accuracy, top_five

EXACT = 20_000  # pictures of the part "train_exact" in the form of CIFAR-100 that has one
SHAPE = (64, 8, 8)  # the features in front of every head
FLAT = math.prod(SHAPE)


# ----------------------------------------------------------------------------------------------------------- the pictures
@functools.lru_cache(maxsize=1)
def pictures(
    name: str, images: int, seed: int
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """``images`` training pictures that the seed draws, equally many of each class, and the official test part.

    Args:
        name: "cifar10" or "cifar100". Pictures kept exactly are drawn from, where the data set names them and has enough.

    Returns:
        Two pairs: float32 (n, 3, 32, 32), each channel centred and scaled by the drawn pictures, and int64 classes.
    """
    data = load(name)
    exact = images <= EXACT and "train_exact" in data.splits
    (x, y), (x_test, y_test) = data.part("train_exact" if exact else "train"), data.part("test")
    each, draw, classes = (
        max(1, images // len(data.names)),
        np.random.default_rng(seed),
        range(len(data.names)),
    )
    of = [np.flatnonzero(y == c) for c in classes]
    if min(map(len, of)) < each:
        raise LabError(
            f"{name} has {len(y):,} training pictures here, too few for {images:,} equally many of each class"
        )
    chosen = np.sort(np.concatenate([draw.permutation(found)[:each] for found in of]))
    x = x[chosen].astype(np.float32)
    mean, deviation = x.mean((0, 2, 3), keepdims=True), x.std((0, 2, 3), keepdims=True)
    parts = [
        ((part - mean) / deviation, classes) for part, classes in ((x, y[chosen]), (x_test, y_test))
    ]
    return tuple(
        (torch.from_numpy(part.astype(np.float32)), torch.tensor(classes))
        for part, classes in parts
    )


# -------------------------------------------------------------------------------------------------------------- the heads
class CPFactors(CPLinear):
    """The same map factor by factor: rank (D + H) multiply-adds a sample, and no D x H matrix."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(F.linear(x, self.right.T) * self.weights, self.left, self.bias)


class TTCores(TTLinear):
    """The same map core by core, the last axis of the input first, and no D x H matrix."""

    def forward(self, x: Tensor) -> Tensor:
        z, sizes, done = x[..., None], [c.shape[1] for c in self.cores], 1
        outputs = next(k for k in range(len(sizes)) if math.prod(sizes[:k]) == len(self.bias) and k)
        for core in reversed(self.cores[outputs:]):  # z: (B, what is left of the input, rank)
            z = F.linear(z.reshape(len(x), -1, core.shape[1] * core.shape[2]), core.flatten(1))
        for core in reversed(self.cores[:outputs]):  # z: (B, what is made of the output, rank)
            z = F.linear(z, core.flatten(0, 1)).unflatten(-1, core.shape[:2])
            done *= core.shape[1]
            z = z.permute(0, 3, 1, 2).reshape(len(x), done, core.shape[0])
        return z.flatten(1) + self.bias


def spread(layer: TTLinear, outputs: int) -> TTLinear:
    """Scale the first ``outputs`` cores, those of the output axes, so that the map keeps the variance of its input."""
    with torch.no_grad():
        for core in layer.cores[:outputs]:
            core.mul_(math.sqrt(core.shape[1]))
    return layer


def tcl() -> nn.Module:
    """The tensor contraction layer of tensorly-torch, (64, 8, 8) -> (64, 8, 8), without biases as there by default."""
    return require("tltorch").TCL(SHAPE, rank=SHAPE, bias=False)


def trl(classes: int, rank: tuple[int, ...] = (32, 4, 4)) -> nn.Module:
    """The tensor regression layer of tensorly-torch from (64, 8, 8) to the classes, its weight in Tucker form.

    Args:
        rank: of the three feature axes; the axis of the classes keeps its size. The library's start has entries of
            deviation 1 and saturates the softmax; here the weight starts with that of a linear layer, 1 / sqrt(3 * 4096).
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        make = require("tltorch").TRL
        layer = make(
            SHAPE, (classes,), rank=(*rank, classes), factorization="tucker", bias=True, verbose=0
        )
    with torch.no_grad():
        layer.weight.normal_(0, 1 / math.sqrt(3 * FLAT))
        layer.bias.zero_()
    return layer


class Kept(nn.Module):
    """A linear map with its matrix multiplied out once and kept beside it: fast to apply, and D x H numbers larger."""

    def __init__(self, layer: nn.Module, inputs: int = FLAT):
        super().__init__()
        self.layer = layer
        with torch.no_grad():
            matrix = layer(torch.eye(inputs)).sub_(layer.bias)
        self.register_buffer("matrix", matrix.T.contiguous())

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.matrix, self.layer.bias)


def network(head: nn.Module) -> nn.Sequential:
    """The convolutions of the paper's CNN with this head on top."""
    return nn.Sequential(cnn_features(), head)


def width_of_equal_size(classes: int, parameters: int, bias: bool = False) -> int:
    """Largest width w with which 4096 -> w -> classes has at most ``parameters``; ``bias``: the first map has biases, too."""
    return (parameters - classes) // (FLAT + classes + bias)


# ----------------------------------------------------------------------------------------------------------- the training
def forward(model: nn.Module, images: Tensor) -> Tensor:
    """Logits in float32, computed under autocast to bfloat16 from images in the memory format channels_last."""
    images = images.contiguous(memory_format=torch.channels_last)
    with torch.autocast(images.device.type, torch.bfloat16):
        out = model(images)
    return out.float()


def train(
    model: nn.Module,
    data: tuple[Tensor, Tensor],
    *,
    epochs: int,
    lr: float,
    batch_size: int,
    seed: int,
    device: str | torch.device | None = None,
) -> list[dict[str, float]]:
    """Train with Adam and cross-entropy in the precision of `forward`, in place: `lab.train.loop.train_epochs`.

    Returns the training loss of every epoch. The caller seeds the initial weights; ``seed`` gives the order of the
    batches.
    """
    model.to(loop.default_device(device), memory_format=torch.channels_last)
    return loop.train_epochs(
        model,
        data,
        loss=F.cross_entropy,
        epochs=epochs,
        lr=lr,
        batch_size=batch_size,
        seed=seed,
        forward=functools.partial(forward, model),
    )


def evaluate(model: nn.Module, data: tuple[Tensor, Tensor], batch: int = 500) -> dict[str, float]:
    """Accuracy, share with the class among the five largest logits (Acc@5) and loss, as in `train`."""
    device = next(model.parameters()).device
    part = tuple(tensor.to(device) for tensor in data)
    functions = {"accuracy": accuracy, "top_five": top_five}
    logits = functools.partial(forward, model)
    return loop.evaluate(model, part, F.cross_entropy, functions, batch, logits)


# --------------------------------------------------------------------------------------------------------------- the cost
@torch.no_grad()
def tensor_bytes(model: nn.Module, batch: int = 128) -> int:
    """Bytes of tensors at the peak of a forward pass without gradients: parameters, buffers, pictures, and what is allocated."""
    x = torch.zeros(batch, 3, 32, 32)
    fixed = [x, *model.parameters(), *model.buffers()]
    return sum(t.nbytes for t in fixed) + memory.peak_bytes(lambda: model.eval()(x))


def counts(net: nn.Module, batch: int = 128) -> dict[str, float]:
    """Parameters, multiply-adds of one picture and of a batch, and the latter with five operations for each number that enters a
    batch norm, in thousands of millions; nothing is computed."""
    net, images = copy.deepcopy(net).to("meta"), torch.zeros(batch, 3, 32, 32, device="meta")
    giga = {
        "G macs, batch": count_macs(net, images) / 1e9,
        "with batch norm": operations(net, images) / 1e9,
    }
    return {"parameters": size(net), "macs": count_macs(net, images[:1])} | giga


def times(timed: pd.DataFrame, baseline: str, what: str, batch: int) -> pd.DataFrame:
    """Times over that of ``baseline``, by network: median ``times`` of the ratios within rounds, ``times_low``, ``times_high``."""
    part = timed[(timed["what"] == what) & (timed["batch"] == batch)]
    ratios = timing.ratios(part, baseline, by=("what", "batch")).set_index("peer")
    found = 1 / ratios[["ratio", "ratio_high", "ratio_low"]]
    return found.set_axis(["times", "times_low", "times_high"], axis=1)


def both_ways(out: bool | None, piece: bool | None) -> dict[str, bool | None]:
    """Arguments of `lab.verdict`: the claim holds if it does against maps multiplied out and piece by piece, holds under the
    condition that they are multiplied out if only then, and else is what it is against maps multiplied out."""
    if out is not True:
        return {"holds": out}
    return {"holds": False, "under": True} if piece is False else {"holds": piece}


def accuracies(
    runs: pd.DataFrame, metric: str, stated: Callable, against: Callable
) -> pd.DataFrame:
    """A table of heads: parameters, seeds, ``percent`` with its interval (from three seeds on), training loss,
    ``printed``, difference to the dense head.

    Args:
        runs: rows of one data set with "arm" and "test_<metric>". stated: arm -> printed percent or None.
        against: arm -> (mean, low, high) of its difference to "dense" in points; asked for where both have the same seeds.
    """
    runs = runs.assign(percent=100 * runs[f"test_{metric}"], training_loss=runs["train_loss"])
    table = summary(runs, ["arm", "parameters"], ["percent", "training_loss"]).rename(
        columns={"n": "seeds"}
    )
    ends = zip(
        table["percent"], table.pop("percent_low"), table.pop("percent_high"), table["seeds"]
    )
    table["percent"] = [
        f"{m:.1f}" + (f" [{low:.1f}, {high:.1f}]" if n > 2 else "") for m, low, high, n in ends
    ]
    table["printed"] = [stated(arm) for arm in table["arm"]]
    seeds = {arm: set(part["seed"]) for arm, part in runs.groupby("arm")}
    alike = [
        arm != "dense" and seeds[arm] == seeds.get("dense") and len(seeds[arm]) > 1
        for arm in table["arm"]
    ]
    differences = [against(arm) if ask else None for arm, ask in zip(table["arm"], alike)]
    table["minus dense"] = [
        "{:+.1f} [{:+.1f}, {:+.1f}]".format(*d) if d else "" for d in differences
    ]
    return table.drop(columns=["training_loss_low", "training_loss_high"])


def dots(
    axis, place: float, values, look: str, stated: float | None = None, aside: float = -0.3
) -> None:
    """Every seed of one arm with mean and interval (from three seeds on), and the printed value as a star."""
    low, high = interval(values)[1:] if len(values) > 2 else (None, None)
    figures.seeds(axis, place, values, look, low=low, high=high)
    if stated:
        axis.plot(
            place + aside,
            stated,
            figures.marker("paper"),
            markersize=9,
            color=figures.colour("paper"),
        )
