"""Adapters beside LoRA and NdLinear-LoRA: DoRA, and sums of Kronecker products.

Each keeps a frozen `torch.nn.Linear` as ``base_layer``, changes nothing at the start, and has scale one.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ndlinear import NdLinearSum


class DoRA(nn.Module):
    """DoRA (Liu et al., 2024): the rows of W + B A, scaled to trained lengths m.

    y = (m / length of each row) * (W x + B A x) + bias. B is zero at the start and m holds the lengths of W's rows. As its
    authors suggest, no gradient goes through the lengths of W + B A. Formulas and start are those of peft 0.21.
    """

    def __init__(self, base: nn.Linear, rank: int):
        super().__init__()
        self.base_layer = base.requires_grad_(False)
        self.A = nn.Parameter(base.weight.new_empty(rank, base.in_features))
        nn.init.kaiming_uniform_(self.A, a=math.sqrt(5))  # as torch.nn.Linear draws its weight
        self.B = nn.Parameter(base.weight.new_zeros(base.out_features, rank))
        self.m = nn.Parameter(base.weight.norm(dim=1))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            lengths = torch.addmm(self.base_layer.weight, self.B, self.A).norm(dim=1)
        update = F.linear(F.linear(x, self.A), self.B)
        y = self.m / lengths * (F.linear(x, self.base_layer.weight) + update)
        return y if self.base_layer.bias is None else y + self.base_layer.bias


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
