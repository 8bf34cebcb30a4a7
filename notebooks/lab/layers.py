"""Structured linear layers to hold beside NdLinear, all in plain torch: low rank, block-diagonal, block tensor trains.

A layer maps (..., D) to (..., H). It has the attributes `in_features` and `out_features`, one bias of H numbers
or none, the number `steps` of matrices that a number passes one after the other, and `matrices`, which says for
each of its weights how many numbers it reads and writes: the start and the learning rate of a structured layer
follow from them (chapters 14, 15 and 64). Every weight starts normal, with the deviation
in^-1/2 min(1, (out/in)^1/2) of Qiu et al. (2024), arXiv:2406.06248.

Names. A *block tensor train* (BTT) of rank r is two block-diagonal matrices with a transposition between them; of
rank one it is a *Monarch* matrix. With all blocks of a step shared it is a sum of r Kronecker products, that is,
NdLinear with two modes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ndlinear import (
    NdLinear,
    NdLinearSum,
    cheapest_order,
    count_macs,
    count_parameters,
    rearrange,
)

Matrices = list[
    tuple[nn.Parameter, int, int]
]  # a weight, how many numbers it reads, how many it writes


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

    def last(self) -> list[nn.Parameter]:
        """The weights of the last step: with zeros in them the layer answers its bias."""
        return [self.matrices()[-1][0]]

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

    def last(self) -> list[nn.Parameter]:
        return [term.weights[-1] for term in self.map.terms]

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


# ---------------------------------------------------------------------------------------- layers fitted to a trained one
def fit_low_rank(linear: nn.Linear, share: float) -> tuple[nn.Sequential, float]:
    """The low-rank layer nearest to a dense one, by singular value decomposition, as two torch.nn.Linear.

    Args:
        linear: the trained layer; its bias is copied.
        share: at most this part of the dense layer's parameters.

    Returns:
        The layer and its relative error in the Frobenius norm.

    Raises:
        ValueError: not even rank one fits into the share.
    """
    outputs, inputs = linear.weight.shape
    rank = min(_budget(linear, share) // (inputs + outputs), inputs, outputs)
    if rank < 1:
        raise ValueError(f"rank one of {linear} takes more than {share:g} of its parameters")
    u, s, v = torch.linalg.svd(linear.weight.detach().double(), full_matrices=False)
    root = s[:rank].sqrt()
    down = nn.Linear(inputs, rank, bias=False)
    up = nn.Linear(rank, outputs, bias=linear.bias is not None)
    pair = nn.Sequential(down, up).to(linear.weight)
    with torch.no_grad():
        down.weight.copy_(root[:, None] * v[:rank])
        up.weight.copy_(u[:, :rank] * root)
        if linear.bias is not None:
            up.bias.copy_(linear.bias)
    return pair, float((s[rank:].square().sum() / s.square().sum()).sqrt())


def fit_kronecker(
    linear: nn.Linear, share: float, folding: tuple[Sequence[int], Sequence[int]] | None = None
) -> tuple[nn.Sequential, float]:
    """The sum of NdLinear terms nearest to a dense layer, on a folding, or on the best one (k, D/k) -> (k, H/k).

    Small k is close to a dense layer with shared blocks, large k has many small terms. As many terms are taken as fit into
    the share, and into the multiply-adds of the dense layer; the k with the smallest error is kept. Exact for two modes: a
    singular value decomposition of the rearranged weight. For more a local optimum.

    Args:
        linear: the trained layer; its bias is copied.
        share: at most this part of the dense layer's parameters.
        folding: (input_dims, hidden_size).

    Returns:
        An NdLinearSum between the folding and its reverse, and its relative error in the Frobenius norm.

    Raises:
        ValueError: no folding fits, for example because the sizes have no common divisor.
    """
    outputs, inputs = linear.weight.shape
    found = []
    for dims, hidden in [folding] if folding else _shared(inputs, outputs):
        size = count_parameters(dims, hidden, bias=False)
        macs = count_macs(dims, hidden, cheapest_order(dims, hidden))
        terms = min(_budget(linear, share) // size, inputs * outputs // macs)
        if terms >= 1:
            found.append((dims, hidden, terms))
    if not found:
        raise ValueError(
            f"no folding {folding or '(k, D/k) -> (k, H/k)'} of {linear} fits into {share:g} of its parameters"
        )
    # a decomposition is dear: one folding needs no comparison
    weight = linear.weight.detach().double()
    dims, hidden, terms = (
        min(found, key=lambda each: _lost(weight, *each)) if found[1:] else found[0]
    )
    layer = NdLinearSum.from_linear(linear, dims, hidden, terms)
    fitted = nn.Sequential(nn.Unflatten(-1, tuple(dims)), layer, nn.Flatten(-len(hidden)))
    return fitted, layer.approximation.weight_error


def _shared(inputs: int, outputs: int) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """The foldings (k, D/k) -> (k, H/k) without an axis of length one."""
    both = [k for k in range(2, min(inputs, outputs)) if math.gcd(inputs, outputs) % k == 0]
    return [((k, inputs // k), (k, outputs // k)) for k in both]


def _budget(linear: nn.Linear, share: float) -> int:
    """Weights that a layer may have beside its bias."""
    size = sum(p.numel() for p in linear.parameters())
    return int(share * size) - (0 if linear.bias is None else len(linear.bias))


def _lost(weight: Tensor, dims: Sequence[int], hidden: Sequence[int], terms: int) -> float:
    """Relative error of the best sum of Kronecker terms, without forming it."""
    table = rearrange(weight, dims, hidden)
    table = table if table.shape[0] <= table.shape[1] else table.T
    energy = torch.linalg.eigvalsh(table @ table.T).flip(0).clamp_min(0)
    return float((energy[terms:].sum() / energy.sum()).sqrt())
