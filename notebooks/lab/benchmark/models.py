"""The networks of the benchmark: two hidden layers of one kind with ReLU and a dense read-out, as large as a budget allows.

Budgets count all numbers that are trained, biases and read-out included. "as NdLinear": at most five per cent more than the
network of NdLinear layers. "a quarter": at most a quarter of that of dense layers. "none": dense layers of equal width, and models
that have no size to choose.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ndlinear import NdLinear
from ndlinear_guide import layers

from ..models import size as size_of
from ..modes import LabError

WIDTH = 256
HIDDEN = {2: (16, 16), 3: (4, 8, 8)}  # axes of a case -> axes of both hidden layers
MORE = 1.05  # "as NdLinear" is at most so much more
SMALL, QUARTER, NONE = "as NdLinear", "a quarter", "none"
NAMES = {
    "ndlinear": "NdLinear",
    "ndlinear-sum": "sum of NdLinear terms",
    "narrow": "dense, narrowed",
    "low-rank": "low rank",
    "bottleneck": "low rank with SiLU",
    "blocks": "blocks with a shuffle",
    "monarch": "Monarch",
    "blast": "BLAST",
    "convolution": "convolution",
    "dense": "dense of equal width",
    "linear": "logistic or linear regression",
    "constant": "a constant",
}
LAYERS = {  # budget -> the kinds of layers that stand in it
    SMALL: (
        *("ndlinear", "narrow", "low-rank", "bottleneck", "blocks", "monarch", "blast"),
        "convolution",
    ),
    QUARTER: ("ndlinear-sum", "narrow", "low-rank", "bottleneck", "blocks", "monarch", "blast"),
    NONE: ("dense", "linear", "constant"),
}
OURS = {SMALL: "ndlinear", QUARTER: "ndlinear-sum"}


class Shape(NamedTuple):
    """What a network must fit: axes of a case, outputs, and along how many axes neighbours are alike."""

    axes: tuple[int, ...]
    outputs: int
    neighbours: int = 0

    @property
    def inputs(self) -> int:
        return math.prod(self.axes)


# --------------------------------------------------------------------------------------------------------------- layers
class KroneckerSum(layers.Structured):
    """A sum of NdLinear terms on tables of two axes, given flat: the terms' matrices are added up, then applied as one.

    For the many terms of a quarter of a dense layer that takes less time than one term after the other. One bias of H numbers.
    """

    steps = 2

    def __init__(self, dims: Sequence[int], hidden: Sequence[int], terms: int, bias: bool = True):
        super().__init__(math.prod(dims), math.prod(hidden), bias)
        self.left = nn.Parameter(torch.empty(terms, hidden[0], dims[0]))
        self.right = nn.Parameter(torch.empty(terms, hidden[1], dims[1]))
        self.reset_parameters()

    def matrices(self) -> layers.Matrices:
        """As for `layers.Kronecker`: the last axis' are read as one that has all terms before it."""
        terms, outputs, inputs = self.right.shape
        return [
            (self.left, self.left.shape[2], self.left.shape[1]),
            (self.right, inputs * terms, outputs),
        ]

    def forward(self, x: Tensor) -> Tensor:
        (_, a, d), (_, b, e) = self.left.shape, self.right.shape
        weight = (self.left.flatten(1).T @ self.right.flatten(1)).view(a, d, b, e)
        return F.linear(x, weight.transpose(1, 2).reshape(a * b, d * e), self.bias)


class Padded(nn.Module):
    """A layer that needs a multiple of its blocks: zeros stand behind the inputs."""

    def __init__(self, layer: layers.Structured, inputs: int):
        super().__init__()
        self.layer, self.zeros = layer, layer.in_features - inputs

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(F.pad(x, (0, self.zeros)) if self.zeros else x)


class Convolution(nn.Module):
    """Two convolutions of width ``width``, kernels of three, the first one at every second place, and a read-out on the means of eight,
    or four by four, places.

    Args:
        axes: (times, channels) for neighbours along one axis; (rows, columns) or (channels, rows, columns) along two.
    """

    def __init__(self, shape: Shape, width: int):
        super().__init__()
        self.shape, one = shape, shape.neighbours == 1
        convolution = nn.Conv1d if one else nn.Conv2d
        self.first = convolution(_channels(shape), width, 3, stride=2, padding=1)
        self.second = convolution(width, width, 3, padding=1)
        self.read_out = layers.Dense(width * _places(shape), shape.outputs)

    def forward(self, x: Tensor) -> Tensor:
        one, axes = self.shape.neighbours == 1, self.shape.axes
        x = x.unflatten(-1, axes)
        x = x.mT if one else x.unflatten(1, (-1, *axes[:1])) if len(axes) == 2 else x
        x = self.second(self.first(x).relu()).relu()
        pool = F.adaptive_avg_pool1d if one else F.adaptive_avg_pool2d
        return self.read_out(pool(x, 8 if one else 4).flatten(1))


def _channels(shape: Shape) -> int:
    return shape.axes[1] if shape.neighbours == 1 else shape.axes[-3] if shape.axes[2:] else 1


def _places(shape: Shape) -> int:
    return 8 if shape.neighbours == 1 else 16


# ------------------------------------------------------------------------------------------------- how large they can be made
class Size(NamedTuple):
    """Weights of a layer, and what makes it: (bias) -> layer on flat inputs."""

    weights: int
    make: Callable[[bool], nn.Module]


POWERS = [2**k for k in range(1, 8)]


def sizes(kind: str, axes: Sequence[int], hidden: Sequence[int]) -> list[Size]:
    """All sizes of a kind of layer between two tables, the smallest first."""
    found = sorted(_every(kind, axes, math.prod(hidden)), key=lambda each: each[0])
    inputs = math.prod(axes)
    return [
        Size(count, functools.partial(_made, make, args, inputs)) for count, make, args in found
    ]


def _every(kind: str, axes: Sequence[int], outputs: int) -> Iterator[tuple[int, type, tuple]]:
    """Weights, class and arguments of each size; where blocks must divide the inputs, these are padded to the next multiple."""
    inputs = math.prod(axes)
    ranks = range(1, min(inputs, outputs) + 1)

    def up(multiple):
        return -(-inputs // multiple) * multiple

    if kind == "dense":
        yield inputs * outputs, layers.Dense, (inputs, outputs)
    elif kind in ("low-rank", "bottleneck"):
        make = {"low-rank": layers.LowRank, "bottleneck": layers.Bottleneck}[kind]
        for rank in ranks:
            yield rank * (inputs + outputs), make, (inputs, outputs, rank)
    elif kind == "ndlinear-sum":
        two = [(part[0], math.prod(part[1:])) for part in (axes, (16, 16))]
        (d, e), (a, b) = two
        for terms in range(2, min(a * d, b * e) + 1):
            yield terms * (a * d + b * e), KroneckerSum, (*two, terms)
    elif kind == "blocks":
        for blocks in [*POWERS, outputs]:
            args = up(blocks), outputs, blocks
            yield up(blocks) * outputs // blocks, layers.BlockDiagonal, args
    elif kind == "blast":
        for rank in ranks:
            yield rank * (up(4) + outputs + 16), layers.Blast, (up(4), outputs, rank, 4)
    elif kind == "monarch":
        for m, a in itertools.product(POWERS, POWERS):
            n, c = up(m) // m, outputs // a
            if n > 1:
                yield m * a * (n + c), layers.BlockTensorTrain, ((m, n), (a, c))
    else:
        raise LabError(f"no kind of layer {kind!r}; there are {', '.join(NAMES)}")


def _made(make: Callable, args: tuple, inputs: int, bias: bool) -> nn.Module:
    layer = make(*args, bias=bias)
    return layer if layer.in_features == inputs else Padded(layer, inputs)


# ------------------------------------------------------------------------------------------------------------- networks
def _stack(first: nn.Module, second: nn.Module, width: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), layers.Dense(width, outputs))


def _ndlinear(shape: Shape) -> nn.Sequential:
    hidden = HIDDEN[len(shape.axes)]
    parts = [
        nn.Sequential(
            nn.Unflatten(-1, axes), NdLinear(axes, hidden, init="unit"), nn.Flatten(-len(hidden))
        )
        for axes in (shape.axes, hidden)
    ]
    return _stack(*parts, WIDTH, shape.outputs)


@functools.cache
def allowed(shape: Shape, budget: str) -> int:
    """How many numbers a network may have."""
    if budget == SMALL:
        with torch.random.fork_rng(devices=[]):
            return int(MORE * size_of(_ndlinear(shape)))
    dense = (shape.inputs + 1 + WIDTH + 1) * WIDTH + (WIDTH + 1) * shape.outputs
    return dense // 4 if budget == QUARTER else dense


def _largest(found: list[Size], most: float) -> Size:
    """The largest of some sizes with at most so many weights, or the smallest of all."""
    return found[max(bisect.bisect_right(found, most, key=lambda size: size.weights) - 1, 0)]


@functools.cache
def _chosen(kind: str, shape: Shape, most: int) -> tuple[Size, Size, bool] | None:
    """The largest two layers of a kind: both with the same share of their dense layer's weights, then the second and the first as much
    larger as there is room.

    Without a bias where not even the smallest ones fit with one; None where they do not fit at all.
    """
    hidden = HIDDEN[len(shape.axes)]
    each = [sizes(kind, shape.axes, hidden), sizes(kind, hidden, hidden)]
    dense = [shape.inputs * WIDTH, WIDTH * WIDTH]
    shares = sorted({s.weights / d for found, d in zip(each, dense) for s in found}, reverse=True)
    for bias in (True, False):
        left = most - (WIDTH + 1) * shape.outputs - 2 * WIDTH * bias
        for share in shares:
            first, second = (
                _largest(found, share * d * (1 + 1e-9)) for found, d in zip(each, dense)
            )
            if first.weights + second.weights <= left:
                second = _largest(each[1], left - first.weights)
                return _largest(each[0], left - second.weights), second, bias
    return None


def convolution_width(shape: Shape, most: int) -> int:
    """The width of the largest `Convolution` with at most so many numbers; 0 where there is none."""
    kernel = 3**shape.neighbours
    linear = kernel * _channels(shape) + 2 + _places(shape) * shape.outputs
    root = math.sqrt(linear**2 + 4 * kernel * (most - shape.outputs))
    return max(0, int((root - linear) / (2 * kernel) + 1e-9))


Factory = Callable[[tuple[int, ...], tuple[int, ...], int], "nn.Module | None"]


def _narrow(shape: Shape, most: int) -> int:
    """The largest width of a dense network of two hidden layers of at most so many parameters; 0 where there is none.

    Of width w it has (D + 1) w + (w + 1) w + (w + 1) H parameters.
    """
    linear, left = shape.inputs + shape.outputs + 2, most - shape.outputs
    return (math.isqrt(linear**2 + 4 * left) - linear) // 2 if left >= 0 else 0


def network(kind: str | Factory, shape: Shape, budget: str) -> nn.Module | None:
    """The network of a kind of layer at a budget, on flat cases; None where it cannot be made so small, or does not apply.

    Args:
        kind: one of `NAMES`, or a function (axes before, axes behind, numbers) -> layer of at most so many numbers.
    """
    most = allowed(shape, budget)
    if callable(kind):
        return _foreign(kind, shape, budget)
    if kind == "linear":
        return layers.Dense(shape.inputs, shape.outputs)
    if kind == "ndlinear":
        return _ndlinear(shape)
    if kind == "narrow":
        width = _narrow(shape, most)
        parts = layers.Dense(shape.inputs, width or 1), layers.Dense(width or 1, width or 1)
        return _stack(*parts, width, shape.outputs) if width else None
    if kind == "convolution":
        width = convolution_width(shape, most) if shape.neighbours else 0
        return Convolution(shape, width) if width else None
    chosen = _chosen(kind, shape, most)
    if chosen is None:
        return None
    first, second, bias = chosen
    return _stack(first.make(bias), second.make(bias), WIDTH, shape.outputs)


def layer_budgets(shape: Shape, budget: str) -> tuple[int, int]:
    """How many numbers each of the two hidden layers may have."""
    if budget == SMALL:
        with torch.random.fork_rng(devices=[]):
            net = _ndlinear(shape)
        return int(MORE * size_of(net[0])), int(MORE * size_of(net[2]))
    share = 4 if budget == QUARTER else 1
    return (shape.inputs + 1) * WIDTH // share, (WIDTH + 1) * WIDTH // share


def _foreign(factory: Factory, shape: Shape, budget: str) -> nn.Module | None:
    """A network with the layers of someone else; a layer that is too large counts as one that cannot be made so small."""
    hidden, parts = HIDDEN[len(shape.axes)], []
    for axes, most in zip((shape.axes, hidden), layer_budgets(shape, budget)):
        layer = factory(axes, hidden, most)
        if layer is None or size_of(layer) > most:
            return None
        answer = tuple(layer(torch.zeros(2, *axes)).shape)
        if answer[0] != 2 or math.prod(answer[1:]) != WIDTH:
            raise LabError(
                f"the layer turns two cases {axes} into {answer} in place of {WIDTH} numbers each"
            )
        parts.append(nn.Sequential(nn.Unflatten(-1, axes), layer, nn.Flatten()))
    return _stack(*parts, WIDTH, shape.outputs)
