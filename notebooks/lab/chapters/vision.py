"""Chapter 40: pictures, heads that the paper compares NdLinear with, and their training in mixed
precision.

The networks of the paper are in `lab.models`; here are further heads on the same features (64, 8,
8), and the maps of its comparison applied without multiplying out the matrix that they stand for.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ndlinear import NdLinear

from .. import memory
from ..counts import count_macs
from ..data import load
from ..data.splits import some_of_each
from ..machine import require
from ..models import CPLinear, TTLinear, cnn_features, size
from ..modes import LabError
from ..page.facts import fact
from ..stats import differences
from ..train import loop
from ..train.scores import accuracy, top_five

SHAPE = (64, 8, 8)  # the features in front of every head
FLAT = math.prod(SHAPE)


# ------------------------------------------------------------------------------------- the pictures
@functools.lru_cache(maxsize=1)
def pictures(
    name: str, images: int, seed: int
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """``images`` training pictures that the seed draws, equally many of each class, and the
    official test part.

    Args:
        name: "cifar10" or "cifar100". Pictures kept exactly are drawn from, where the data set
            names them and has enough.

    Returns:
        Two pairs: float32 (n, 3, 32, 32), each channel centred and scaled by the drawn pictures,
            and int64 classes.
    """
    data = load(name)
    x, y = some_of_each(data, images, seed)
    x_test, y_test = data.part("test")
    x = x.astype(np.float32)
    mean = x.mean((0, 2, 3), keepdims=True)
    deviation = x.std((0, 2, 3), keepdims=True)

    def pair(part, classes) -> tuple[Tensor, Tensor]:
        scaled = ((part - mean) / deviation).astype(np.float32)
        return torch.from_numpy(scaled), torch.tensor(classes)

    return pair(x, y), pair(x_test, y_test)


def held_out(
    part: tuple[Tensor, Tensor], images: int
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Pictures and classes of `pictures` without the last ``images`` of them, equally many of each class, and these."""
    x, y = part
    each = images // len(y.unique())
    if not 0 < each < len(y) // len(y.unique()):
        raise LabError(f"{images:,} of {len(y):,} pictures cannot be held out class by class")
    last = torch.zeros(len(y), dtype=torch.bool)
    for k in y.unique():
        last[torch.nonzero(y == k).flatten()[-each:]] = True
    return (x[~last], y[~last]), (x[last], y[last])


# ---------------------------------------------------------------------------------------- the heads
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


def scaled(head: nn.Sequential, factor: float) -> nn.Sequential:
    """The head, the weight of its structured map multiplied by ``factor``, in equal parts by each of its factors."""
    layer = next(part for part in head if isinstance(part, NdLinear | CPLinear | TTLinear))
    factors = [p for p in layer.parameters() if p.ndim > 1]
    with torch.no_grad():
        for each in factors:
            each.mul_(factor ** (1 / len(factors)))
    return head


def tcl() -> nn.Module:
    """The tensor contraction layer of tensorly-torch, (64, 8, 8) -> (64, 8, 8), without biases as
    there by default."""
    return require("tltorch").TCL(SHAPE, rank=SHAPE, bias=False)


def trl(classes: int, rank: tuple[int, ...] = (32, 4, 4)) -> nn.Module:
    """The tensor regression layer of tensorly-torch from (64, 8, 8) to the classes, its weight in
    Tucker form.

    Args:
        rank: of the three feature axes; the axis of the classes keeps its size. The library's start
            has entries of deviation 1 and saturates the softmax; here the weight starts with that
            of a linear layer, 1 / sqrt(3 * 4096).
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
    """A linear map with its matrix multiplied out once and kept beside it: fast to apply, and D x H
    numbers larger."""

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


# ------------------------------------------------------------------------------------- the training
def forward(model: nn.Module, images: Tensor) -> Tensor:
    """Logits in float32, computed under autocast to bfloat16 from images in the memory format
    channels_last."""
    images = images.contiguous(memory_format=torch.channels_last)
    with torch.autocast(images.device.type, torch.bfloat16):
        out = model(images)
    return out.float()


def evaluate(model: nn.Module, data: tuple[Tensor, Tensor], batch: int = 500) -> dict[str, float]:
    """Accuracy, share with the class among the five largest logits (Acc@5) and loss, in the precision of `forward`."""
    device = next(model.parameters()).device
    part = tuple(tensor.to(device) for tensor in data)
    functions = {"accuracy": accuracy, "top_five": top_five}
    logits = functools.partial(forward, model)
    return loop.evaluate(model, part, F.cross_entropy, functions, batch, logits)


def quick_network(head: nn.Module) -> nn.Sequential:
    """The function of `network`, from the same start: each pooling stands in front of its ReLU.

    The largest of the positive parts is the positive part of the largest, and a ReLU behind the
    pooling has a quarter of the numbers.
    """
    layers = list(cnn_features())
    blocks = [layers[at : at + 5] for at in range(0, len(layers), 5)]
    swapped = [
        layer
        for convolution, norm, relu, pool, drop in blocks
        for layer in (convolution, norm, pool, relu, drop)
    ]
    return nn.Sequential(nn.Sequential(*swapped), head)


def in_memory(
    data: tuple[Tensor, Tensor], device: str | torch.device | None = None
) -> tuple[Tensor, Tensor]:
    """Pictures (n, 32, 32, 3) in bfloat16, channels last, and classes, on the device.

    `forward` rounds each batch to bfloat16 and reorders it; here that is done once.
    """
    images, classes = data
    place = loop.default_device(device)
    rounded = images.to(torch.bfloat16).permute(0, 2, 3, 1).contiguous()
    return rounded.to(place), classes.to(place)


def train_quickly(
    model: nn.Module,
    data: tuple[Tensor, Tensor],
    *,
    epochs: int,
    lr: float,
    batch_size: int,
    seed: int,
) -> list[dict[str, float]]:
    """Train in place with Adam and cross-entropy in the precision of `forward`, on pictures of `in_memory`.

    Returns the training loss of every epoch. The caller seeds the initial weights; ``seed`` gives the order of the batches.
    """
    images, classes = data
    model.to(images.device, memory_format=torch.channels_last).train()
    adam = torch.optim.Adam(model.parameters(), lr=lr, fused=True)
    order = torch.Generator().manual_seed(seed)

    def logits(batch: Tensor) -> Tensor:
        return forward(model, batch.permute(0, 3, 1, 2))

    curve = []
    for now in range(1, epochs + 1):
        steps = loop.epoch(logits, (images, classes), F.cross_entropy, adam, order, batch_size)
        mean_loss = float(sum(value * size for value, size in steps)) / len(images)
        loop.check_finite(mean_loss, now, lr)
        curve.append({"epoch": now, "train_loss": mean_loss})
    return curve


def run_quickly(
    make_head: Callable[[], nn.Module],
    part: tuple[Tensor, Tensor],
    test: tuple[Tensor, Tensor],
    *,
    epochs: int,
    lr: float,
    batch_size: int,
    seed: int,
) -> dict:
    """One row of a record: `quick_network` with this head, trained on ``part`` by `train_quickly` and tested on ``test``.

    Args:
        part, test: pictures and classes, as `pictures` and `held_out` give them.
        seed: the initial weights, those of the head first, and the order of the batches.

    Returns:
        ``metrics`` (`evaluate` with test_ in front of each name, and the last training loss),
            ``curve``, ``parameters`` and ``macs`` of one picture.
    """
    loop.seed_everything(seed)
    model = quick_network(make_head())
    curve = train_quickly(
        model, in_memory(part), epochs=epochs, lr=lr, batch_size=batch_size, seed=seed
    )
    found = {f"test_{name}": value for name, value in evaluate(model, test).items()}
    one = test[0][:1].to(next(model.parameters()).device)
    return {
        "metrics": found | {"train_loss": curve[-1]["train_loss"]},
        "curve": curve,
        "parameters": size(model),
        "macs": count_macs(model, one),
    }


class FromMemory(nn.Module):
    """A network that takes pictures of `in_memory`, (B, 32, 32, 3), in the precision of `forward`: for `lab.fit`."""

    def __init__(self, net: nn.Module):
        super().__init__()
        self.net = net.to(memory_format=torch.channels_last)

    def forward(self, images: Tensor) -> Tensor:
        return forward(self.net, images.permute(0, 3, 1, 2))


# ----------------------------------------------------------------------------------------- the cost
@torch.no_grad()
def tensor_bytes(model: nn.Module, batch: int = 128) -> int:
    """Bytes of tensors at the peak of a forward pass without gradients: parameters, buffers,
    pictures, and what is allocated."""
    x = torch.zeros(batch, 3, 32, 32)
    fixed = [x, *model.parameters(), *model.buffers()]
    return sum(t.nbytes for t in fixed) + memory.peak_bytes(lambda: model.eval()(x))


# ------------------------------------------------------------------------------ what is printed, and the difference of two heads
METRIC = {"cifar10": "accuracy", "cifar100": "top_five"}  # what the paper prints of each set
PRINTED = {"cifar10": ("CIFAR-10", "acc_at_1"), "cifar100": ("CIFAR-100", "acc_at_5")}


def stated(data: str, arm: str) -> float:
    """The printed accuracy in percent of the dense head or of NdLinear."""
    dataset, metric = PRINTED[data]
    method = {"dense": "Linear", "ndlinear": "NdLinear"}[arm]
    return 100 * fact("cnn_image_classify", dataset=dataset, method=method, metric=metric)


def points(runs: pd.DataFrame, data: str, arm: str, baseline: str = "dense") -> pd.Series:
    """Accuracy of one head minus that of another in points, seed by seed."""
    part = runs[runs["data"] == data]
    return 100 * differences(part, f"test_{METRIC[data]}", arm, baseline)
