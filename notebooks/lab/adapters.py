"""Adapters beside LoRA and NdLinear-LoRA: DoRA, VeRA, LoKr with a second factor of low rank, and sums of Kronecker products.

Each keeps a frozen `torch.nn.Linear` as ``base_layer``, changes nothing at the start, and has scale one. Starts and
formulas are those of peft 0.21, which tests compare where it is installed.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ndlinear import NdLinearSum


def _drawn(rows: int, columns: int, base: nn.Linear) -> nn.Parameter:
    """A matrix as torch.nn.Linear draws its weight."""
    matrix = nn.Parameter(base.weight.new_empty(rows, columns))
    nn.init.kaiming_uniform_(matrix, a=math.sqrt(5))
    return matrix


class DoRA(nn.Module):
    """DoRA (Liu et al., 2024): the rows of W + B A, scaled to trained lengths m.

    y = (m / length of each row) * (W x + B A x) + bias. B is zero at the start and m holds the lengths of W's rows. As its
    authors suggest, no gradient goes through the lengths of W + B A.
    """

    def __init__(self, base: nn.Linear, rank: int):
        super().__init__()
        self.base_layer = base.requires_grad_(False)
        self.A = _drawn(rank, base.in_features, base)
        self.B = nn.Parameter(base.weight.new_zeros(base.out_features, rank))
        self.m = nn.Parameter(base.weight.norm(dim=1))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            lengths = torch.addmm(self.base_layer.weight, self.B, self.A).norm(dim=1)
        update = F.linear(F.linear(x, self.A), self.B)
        y = self.m / lengths * (F.linear(x, self.base_layer.weight) + update)
        return y if self.base_layer.bias is None else y + self.base_layer.bias


def vera_matrices(maps: list[nn.Linear], rank: int) -> tuple[Tensor, Tensor]:
    """The two frozen matrices that all VeRA adapters of a model share: (rank, most inputs) and (most outputs, rank)."""
    weight = maps[0].weight
    first = weight.new_empty(rank, max(m.in_features for m in maps))
    second = weight.new_empty(max(m.out_features for m in maps), rank)
    for matrix in (first, second):
        nn.init.kaiming_uniform_(matrix)
    return first, second


class VeRA(nn.Module):
    """VeRA (Kopiczko et al., 2024): y = base(x) + b * B (d * A x) with A and B frozen, random and shared by all maps.

    Trained are the vectors d, at first 0.1, and b, at first 0. A map with fewer inputs or outputs than the largest takes
    the first columns of A or the first rows of B.
    """

    def __init__(self, base: nn.Linear, matrices: tuple[Tensor, Tensor]):
        super().__init__()
        self.base_layer = base.requires_grad_(False)
        first, second = matrices
        self.register_buffer("A", first[:, : base.in_features], persistent=False)
        self.register_buffer("B", second[: base.out_features], persistent=False)
        self.d = nn.Parameter(first.new_full((len(first),), 0.1))
        self.b = nn.Parameter(second.new_zeros(base.out_features))

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + self.b * F.linear(self.d * F.linear(x, self.A), self.B)


class LoKr(nn.Module):
    """LoKr (Yeh et al., 2024) whose second factor is a product of two: the update W_1 (x) (U V) with r columns in U.

    W_1 has ``factor`` rows and columns and is zero at the start. x is folded into (factor, D / factor), and the factors
    are applied one after the other; peft forms their Kronecker product.
    """

    def __init__(self, base: nn.Linear, factor: int, rank: int):
        super().__init__()
        self.base_layer = base.requires_grad_(False)
        self.factor = factor
        self.first = nn.Parameter(base.weight.new_zeros(factor, factor))
        self.U = _drawn(base.out_features // factor, rank, base)
        self.V = _drawn(rank, base.in_features // factor, base)

    def forward(self, x: Tensor) -> Tensor:
        inner = self.first @ F.linear(x.unflatten(-1, (self.factor, -1)), self.V)
        return self.base_layer(x) + F.linear(inner, self.U).flatten(-2)


class KroneckerTerms(nn.Module):
    """A sum of Kronecker products as the update: y = base(x) + sum over r of (A_r (x) B_r) x.

    The second factor of each term is zero at the start. The sum is computed in the base's precision, under autocast too.

    Args:
        base: the frozen linear map. input_dims, hidden_size: how its inputs and outputs are folded. count: of the terms.
    """

    def __init__(self, base: nn.Linear, input_dims: tuple, hidden_size: tuple, count: int):
        super().__init__()
        self.base_layer = base.requires_grad_(False)
        dtype = base.weight.dtype
        self.update = NdLinearSum(input_dims, hidden_size, rank=count, bias=False, dtype=dtype)
        for term in self.update.terms:
            nn.init.zeros_(term.weights[-1])

    def forward(self, x: Tensor) -> Tensor:
        y = self.base_layer(x)
        folded = x.to(self.base_layer.weight.dtype).unflatten(-1, self.update.input_dims)
        with torch.autocast(x.device.type, enabled=False):
            update = self.update(folded).flatten(-2)
        return y + update.to(y.dtype)
