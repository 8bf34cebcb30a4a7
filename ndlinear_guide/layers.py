"""Structured linear layers to hold beside NdLinear, all in plain torch: low rank, block-diagonal, block tensor trains. `build` makes
the largest one of a kind that a budget allows.

A layer maps (..., D) to (..., H). It has the attributes `in_features` and `out_features`, one bias of H numbers
or none, the number `steps` of matrices that a number passes one after the other, and `matrices`, which says for
each of its weights how many numbers it reads and writes: the start and the learning rate of a structured layer
follow from them (chapters 15 and 64). Every weight starts normal, with the deviation
in^-1/2 min(1, (out/in)^1/2) of Qiu et al. (2024), arXiv:2406.06248.

Names. A *block tensor train* (BTT) of rank r is two block-diagonal matrices with a transposition between them; of
rank one it is a *Monarch* matrix. With all blocks of a step shared it is a sum of r Kronecker products, that is,
NdLinear with two modes.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ndlinear import (
    NdLinear,
    NdLinearSum,
    cheapest_order,
    count_macs,
    count_parameters,
    near_square,
)

Matrices = list[tuple[nn.Parameter, int, int]]  # a weight, how many numbers it reads and writes
Shape = tuple[int, ...]
Folding = tuple[Shape, Shape]  # input_dims and hidden_size


class Structured(nn.Module):
    """What the layers here have in common: sizes, a bias, and a start."""

    steps = 1

    def __init__(self, inputs: int, outputs: int, bias: bool):
        super().__init__()
        self.in_features = inputs
        self.out_features = outputs
        self.bias = nn.Parameter(torch.zeros(outputs)) if bias else None

    def matrices(self) -> Matrices:
        """Each weight with the numbers that it reads and writes."""
        raise NotImplementedError

    def multiply_adds(self) -> int:
        """For one sample. A weight that is not shared is used once."""
        return sum(weight.numel() for weight, _, _ in self.matrices())

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw the weights; the bias is zero."""
        for weight, inputs, outputs in self.matrices():
            weight.normal_(0, min(1.0, math.sqrt(outputs / inputs)) / math.sqrt(inputs))
        if self.bias is not None:
            self.bias.zero_()

    def _shifted(self, y: Tensor) -> Tensor:
        return y if self.bias is None else y + self.bias

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, bias={self.bias is not None}"


class Dense(Structured):
    """One matrix."""

    def __init__(self, inputs: int, outputs: int, bias: bool = True):
        super().__init__(inputs, outputs, bias)
        self.weight = nn.Parameter(torch.empty(outputs, inputs))
        self.reset_parameters()

    def matrices(self) -> Matrices:
        return [(self.weight, self.in_features, self.out_features)]

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class LowRank(Structured):
    """Two dense matrices with ``rank`` numbers between them: rank (D + H) weights."""

    steps = 2

    def __init__(self, inputs: int, outputs: int, rank: int, bias: bool = True):
        super().__init__(inputs, outputs, bias)
        self.down = nn.Parameter(torch.empty(rank, inputs))
        self.up = nn.Parameter(torch.empty(outputs, rank))
        self.reset_parameters()

    def matrices(self) -> Matrices:
        rank = len(self.down)
        return [(self.down, self.in_features, rank), (self.up, rank, self.out_features)]

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(F.linear(x, self.down), self.up, self.bias)


class Bottleneck(LowRank):
    """A low-rank layer with SiLU on the numbers between its matrices, as in CoLA (Liu et al. 2025, arXiv:2502.10940)."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(F.silu(F.linear(x, self.down)), self.up, self.bias)


class Blast(Structured):
    """Blocks of one rank that share their sides: block (i, j) is U_i diag(s_ij) V_j, with r (D + H + blocks^2) weights, each used
    once (BLAST, Lee et al. 2024, arXiv:2410.21262)."""

    steps = 3

    def __init__(self, inputs: int, outputs: int, rank: int, blocks: int, bias: bool = True):
        super().__init__(inputs, outputs, bias)
        if inputs % blocks or outputs % blocks:
            raise ValueError(f"{blocks} blocks do not divide {inputs} inputs and {outputs} outputs")
        self.right = nn.Parameter(torch.empty(blocks, inputs // blocks, rank))
        self.scales = nn.Parameter(torch.empty(blocks, blocks, rank))
        self.left = nn.Parameter(torch.empty(blocks, rank, outputs // blocks))
        self.reset_parameters()

    def matrices(self) -> Matrices:
        """Each of the ``rank`` scales is a matrix of its own, from the blocks of the input to those of the output."""
        (blocks, reads, rank), writes = self.right.shape, self.left.shape[2]
        return [
            (self.right, reads, rank),
            (self.scales, blocks, blocks),
            (self.left, rank, writes),
        ]

    def forward(self, x: Tensor) -> Tensor:
        split = x.unflatten(-1, self.right.shape[:2])
        inner = torch.einsum("...jq,jqr->...jr", split, self.right)
        mixed = torch.einsum("...jr,jir->...ir", inner, self.scales)
        return self._shifted(torch.einsum("...ir,irp->...ip", mixed, self.left).flatten(-2))


class BlockDiagonal(Structured):
    """``blocks`` small matrices side by side: D H / blocks weights. The outputs are dealt out, one of each block in turn, so that
    a second layer of this kind mixes what the first one kept apart."""

    def __init__(self, inputs: int, outputs: int, blocks: int, bias: bool = True):
        super().__init__(inputs, outputs, bias)
        if inputs % blocks or outputs % blocks:
            raise ValueError(f"{blocks} blocks do not divide {inputs} inputs and {outputs} outputs")
        self.weight = nn.Parameter(torch.empty(blocks, inputs // blocks, outputs // blocks))
        self.reset_parameters()

    def matrices(self) -> Matrices:
        return [(self.weight, *self.weight.shape[1:])]

    def forward(self, x: Tensor) -> Tensor:
        split = x.unflatten(-1, self.weight.shape[:2])
        return self._shifted(torch.einsum("...kn,knc->...ck", split, self.weight).flatten(-2))


class BlockTensorTrain(Structured):
    """A block tensor train: the input is a table (m, n), the output a table (a, c).

    Step 1 multiplies row p of the input, n numbers, by a matrix of its own and gives a * rank numbers. Step 2 gathers for each
    x < a the m * rank numbers that carry this x, multiplies them by a matrix of its own and gives c numbers.

    Args:
        input_dims, hidden_size: (m, n) and (a, c).
        rank: 1 for a Monarch matrix.
        groups: how many different matrices a step has, each shared by neighbours; it must divide m and a. None: no sharing.
            With one group the layer is a sum of ``rank`` Kronecker products whose output table is transposed.

    The weights are groups * rank * (n a + m c) numbers, the multiply-adds rank * m a (n + c) whatever is shared.
    """

    steps = 2

    def __init__(
        self,
        input_dims: Sequence[int],
        hidden_size: Sequence[int],
        rank: int = 1,
        groups: int | None = None,
        bias: bool = True,
    ):
        (m, n), (a, c) = input_dims, hidden_size
        super().__init__(m * n, a * c, bias)
        first, second = (m, a) if groups is None else (groups, groups)
        if m % first or a % second:
            raise ValueError(f"{groups} groups do not divide {m} rows and {a} rows")
        self.input_dims = (m, n)
        self.hidden_size = (a, c)
        self.rank = rank
        self.first = nn.Parameter(torch.empty(first, n, a * rank))
        self.second = nn.Parameter(torch.empty(second, m * rank, c))
        self.reset_parameters()

    def matrices(self) -> Matrices:
        return [(weight, *weight.shape[1:]) for weight in (self.first, self.second)]

    def multiply_adds(self) -> int:
        (m, n), (a, c) = self.input_dims, self.hidden_size
        return self.rank * m * a * (n + c)

    def forward(self, x: Tensor) -> Tensor:
        (m, n), (a, _) = self.input_dims, self.hidden_size
        groups = len(self.first)
        x = x.unflatten(-1, (groups, m // groups, n))
        y = torch.einsum("...gpq,gqx->...gpx", x, self.first)
        y = y.reshape(*x.shape[:-3], m, a, self.rank).transpose(-3, -2).flatten(-2)  # a, m rank
        groups = len(self.second)
        y = y.unflatten(-2, (groups, a // groups))
        z = torch.einsum("...hxp,hpy->...hxy", y, self.second)
        return self._shifted(z.flatten(-3))


class Kronecker(Structured):
    """NdLinear, or a sum of ``terms`` of them, on a flat vector: the axes are made on the way in and removed on the way out.

    Its bias has H numbers, as those of the other layers here, in place of one for each index of each mode.
    """

    def __init__(
        self,
        input_dims: Sequence[int],
        hidden_size: Sequence[int],
        terms: int = 1,
        bias: bool = True,
    ):
        super().__init__(math.prod(input_dims), math.prod(hidden_size), bias)
        self.map = (
            NdLinear(input_dims, hidden_size, bias=False)
            if terms == 1
            else NdLinearSum(input_dims, hidden_size, terms, bias=False)
        )
        self.steps = len(self.map.input_dims)
        self.reset_parameters()

    def matrices(self) -> Matrices:
        """Of the matrices of a sum, the last mode's are read as one that has all terms before it."""
        found = []
        for term in self.map.terms:
            *others, last = term.weights
            found += [(w, w.shape[1], w.shape[0]) for w in others]
            found.append((last, last.shape[1] * len(self.map.terms), last.shape[0]))
        return found

    def multiply_adds(self) -> int:
        """In the cheapest order of the modes; where merged modes take less time the layer spends more (chapter 12)."""
        sizes = self.map.input_dims, self.map.hidden_size
        return len(self.map.terms) * count_macs(*sizes, cheapest_order(*sizes))

    def forward(self, x: Tensor) -> Tensor:
        y = self.map(x.unflatten(-1, self.map.input_dims))
        return self._shifted(y.flatten(-len(self.map.hidden_size)))


def dense_matrix(layer: nn.Module) -> Tensor:
    """The (H, D) matrix of a linear layer, one column for each unit vector; its bias is taken off."""
    like = next(layer.parameters())
    unit = torch.eye(layer.in_features, dtype=like.dtype, device=like.device)
    return (layer(unit) - layer(torch.zeros_like(unit[:1]))).T


def count_weights(layer: Structured) -> int:
    """Weights of a layer without its bias."""
    return sum(weight.numel() for weight, _, _ in layer.matrices())


# ------------------------------------------------------------------------------------------------- sizes of tables
def divisors(n: int) -> list[int]:
    """Divisors of n other than 1 and n."""
    return [d for d in range(2, n // 2 + 1) if n % d == 0]


@functools.cache
def spread(n: int, modes: int) -> Shape:
    """So many factors of n, ascending, with the smallest sum."""
    if modes <= 2:
        return (n,) if modes == 1 else near_square(n)
    each = [tuple(sorted((a, *spread(n // a, modes - 1)))) for a in [1, *divisors(n)]]
    return min(each, key=sum)


def folding(inputs: int, outputs: int) -> Folding | None:
    """Two modes, nearly square, paired so that the weights are fewest; None where one would have length one."""
    dims, hidden = near_square(inputs), near_square(outputs)[::-1]
    return None if 1 in (*dims, *hidden) else (dims, hidden)


# ------------------------------------------------------------------------------------------------- a layer of a given size
KINDS = (
    "dense",
    "low-rank",
    "bottleneck",
    "blocks",
    "monarch",
    "blast",
    "ndlinear",
    "ndlinear-sum",
)


def build(
    kind: str,
    inputs: int,
    outputs: int,
    most: int,
    *,
    bias: bool = True,
    folding: Folding | None = None,
) -> Structured | None:
    """The largest layer of a kind within a number of parameters; None where there is none.

    Args:
        kind: one of `KINDS`. "ndlinear-sum" has two terms at least, and at most as many as take no more multiply-adds than
            the dense layer. inputs, outputs: D and H.
        most: numbers that are trained, the H of the bias among them.
        folding: (input_dims, hidden_size) of "ndlinear" and "ndlinear-sum"; without it two modes, nearly square.

    Raises:
        ValueError: the kind is unknown, or the folding has other sizes.
    """
    if kind not in KINDS:
        raise ValueError(f"kind must be one of {', '.join(map(repr, KINDS))}, got {kind!r}")
    if folding and tuple(map(math.prod, folding)) != (inputs, outputs):
        raise ValueError(f"folding {folding} has other sizes than {inputs} -> {outputs}")
    every = _sizes(kind, inputs, outputs, folding)
    fits = [size for size in every if size.weights <= most - bias * outputs]
    if not fits:
        return None
    _, make, sizes = max(fits, key=lambda size: size.weights)
    return make(*sizes, bias=bias)


class Size(NamedTuple):
    """Weights of a layer, and what makes it."""

    weights: int
    make: type[Structured]
    sizes: tuple


def _sizes(kind: str, inputs: int, outputs: int, folded: Folding | None) -> Iterator[Size]:
    """All sizes of a kind of layer."""
    dense, both, least = inputs * outputs, inputs + outputs, min(inputs, outputs)
    common = divisors(math.gcd(inputs, outputs))
    if kind == "dense":
        yield Size(dense, Dense, (inputs, outputs))
    elif kind in ("low-rank", "bottleneck"):
        make = LowRank if kind == "low-rank" else Bottleneck
        for rank in range(1, least + 1):
            yield Size(rank * both, make, (inputs, outputs, rank))
    elif kind == "blocks":
        for blocks in common:
            yield Size(dense // blocks, BlockDiagonal, (inputs, outputs, blocks))
    elif kind == "blast":
        for blocks in [b for b in common if b <= 4][-1:]:
            for rank in range(1, least + 1):
                yield Size(rank * (both + blocks**2), Blast, (inputs, outputs, rank, blocks))
    elif kind == "monarch":
        for m, a in itertools.product(divisors(inputs), divisors(outputs)):
            n, c = inputs // m, outputs // a
            yield Size(m * a * (n + c), BlockTensorTrain, ((m, n), (a, c)))
    elif folded := folded or folding(inputs, outputs):
        one = count_parameters(*folded, bias=False)
        enough = dense // max(d * h for d, h in zip(*folded))  # so many terms are every matrix
        as_dear = dense // count_macs(*folded, cheapest_order(*folded))
        terms = [1] if kind == "ndlinear" else range(2, min(enough, as_dear) + 1)
        yield from (Size(n * one, Kronecker, (*folded, n)) for n in terms)
