"""NdLinear: a linear layer for tensors that multiplies every axis by its own small matrix instead of flattening.

    Y = X x_1 W_1 x_2 W_2 ... x_N W_N  (+ bias)        vec(Y) = (W_1^T kron ... kron W_N^T) vec(X) + vec(beta)

    X       input, shape (..., D_1, ..., D_N); the leading axes are batch axes, any number of them
    Y       output, shape (..., H_1, ..., H_N)
    W_k     weight of mode k. The formulas write it (D_k, H_k); the code stores its transpose, shape (H_k, D_k), as
            torch.nn.Linear does, so that `kronecker_weight` is weight_1 kron ... kron weight_N
    b_k     bias of mode k, shape (H_k,), added right after mode k was multiplied (Algorithm 1)
    beta    what all the b_k add up to, shape (H_1, ..., H_N); it depends on the order of the modes
    vec     row-major flattening, as torch.flatten does; modes are counted 1..N in text and 0..N-1 in code

Source: "NdLinear: Preserving Multi-Dimensional Structure for Parameter-Efficient Neural Networks", arXiv:2503.17353.
Names and numbers agree with its released package `ndlinear` 1.0.0: same state_dict, same seeded weights, same values.
Costs are given in parameters and in multiply-adds (1 multiply-add = 2 FLOPs) per sample. Needs torch, nothing else;
`save_lora` and `load_lora` need safetensors.

What it does not do: it has no activation between modes; without biases a stack of layers is one layer (no gain in
expressiveness from depth alone); the result is always contiguous (channels_last is accepted, not kept); torch.jit.script
is not supported; a checkpoint does not record the order of the modes, so load it with the same `transform_outer`.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from functools import reduce
from operator import index
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__version__ = "0.1.0"
__all__ = [
    "KroneckerFit", "NdLinear", "NdLinearLoRA", "NdLinearSum", "apply_ndlinear_lora", "cheapest_order", "count_macs",
    "count_parameters", "kronecker_weight", "load_lora", "lora_state_dict", "mode_product", "ndlinear",
    "near_square", "nearest_kronecker", "rearrange", "save_lora", "to_linear", "total_bias",
]  # fmt: skip


# ---------------------------------------------------------------------------------------------------------- the layer
def mode_product(x: Tensor, weight: Tensor, mode: int, bias: Tensor | None = None) -> Tensor:
    """Multiply axis `mode` of `x` by a matrix: the mode product X x_k W, plus a bias along that axis.

    x (..., D, ...), weight (H, D), bias (H,) or None -> (..., H, ...). `mode` is a torch `dim`: -1 is the last axis
    whatever the number of batch axes, and 0 is the first axis of `x`, batch axes included.
    Costs H multiply-adds per entry of `x`. Raises ValueError if sizes do not fit, IndexError if there is no such axis.
    """
    if not -x.ndim <= mode < x.ndim:
        raise IndexError(f"mode {mode} does not exist in a tensor of shape {tuple(x.shape)}; use -{x.ndim}..{x.ndim - 1}")
    if weight.ndim != 2 or weight.shape[1] != x.shape[mode] or (bias is not None and bias.shape != weight.shape[:1]):
        raise ValueError(
            f"axis {mode} of an input of shape {tuple(x.shape)} has size {x.shape[mode]} and needs a weight (H, "
            f"{x.shape[mode]}) and a bias (H,) or None, got weight {tuple(weight.shape)} and bias "
            f"{None if bias is None else tuple(bias.shape)}; weights are stored (H, D) as in torch.nn.Linear"
        )
    return _mode_product(x, weight, mode % x.ndim, bias)


def _mode_product(x: Tensor, weight: Tensor, axis: int, bias: Tensor | None) -> Tensor:
    height, depth = weight.shape
    before, after = x.shape[:axis], x.shape[axis + 1 :]
    rest = math.prod(after)
    if rest * (height + depth) < max(height * depth, 256):  # few entries behind the axis: move it last, one matrix product
        return F.linear(x.movedim(axis, -1), weight, bias).movedim(-1, axis).contiguous()
    x = x.reshape(math.prod(before), depth, rest)  # else multiply where it stands, one product per leading index
    weight = weight.expand(x.shape[0], height, depth)
    y = torch.bmm(weight, x) if bias is None else torch.baddbmm(bias[:, None], weight, x)
    return y.reshape(*before, height, *after)


def ndlinear(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None] | None = None, order: Sequence[int] | None = None
) -> Tensor:
    """Algorithm 1: multiply mode after mode, adding each bias right after its mode.

    x (..., D_1, ..., D_N), weights[k] (H_k, D_k), biases None or one (H_k,) or None per mode -> (..., H_1, ..., H_N).
    `order` lists the modes 0..N-1 as they are executed (default 0, 1, ..., N-1); it changes the result only through the
    biases. Costs `count_macs(D, H, order)` per sample. Raises ValueError or TypeError if anything does not fit.
    """
    weights, biases = list(weights), [None] * len(weights) if biases is None else list(biases)
    for k, (w, b) in enumerate(itertools.zip_longest(weights, biases)):
        if len(weights) != len(biases) or w.ndim != 2 or (b is not None and b.shape != w.shape[:1]):
            shapes = [[None if t is None else tuple(t.shape) for t in ts] for ts in (weights, biases)]
            raise ValueError(f"mode {k}: weights {shapes[0]} and biases {shapes[1]} do not fit; give (H_k, D_k) and (H_k,)")
    order = _order(order, len(weights))
    _check_input(x, tuple(w.shape[1] for w in weights), weights[0])
    return _algorithm_1(x, weights, biases, order)


def _algorithm_1(x: Tensor, weights: list[Tensor], biases: Sequence[Tensor | None], order: Sequence[int]) -> Tensor:
    first = x.ndim - len(weights)  # the axes before it are batch axes
    for k in order:
        x = _mode_product(x, weights[k], first + k, biases[k])
    return x


class NdLinear(nn.Module):
    """A linear layer that keeps the axes of its input: mode k is multiplied by its own matrix W_k.

    input (..., D_1, ..., D_N) -> output (..., H_1, ..., H_N), with any number of batch axes, also none or empty ones.

    input_dims       (D_1, ..., D_N), positive integers
    hidden_size      (H_1, ..., H_N), as many
    transform_outer  True: the biases are those of the order 1..N; False: of the order N..1, as in the released package
    bias             one bias per mode, added after that mode; False: none
    init             "linear": each mode like torch.nn.Linear (the released package, same numbers for the same seed;
                     the output variance of unit input is 3^-N), "paper": Xavier uniform for each mode, zero biases;
                     "unit": uniform with bound sqrt(3/D_k), zero biases, which keeps the variance

    Parameters `align_layers.{k}.weight` (H_k, D_k) and `.bias` (H_k,): sum D_k H_k + sum H_k numbers. The modes are
    executed in the cheapest order, with `count_macs(input_dims, hidden_size, layer.execution_order)` multiply-adds,
    and the biases are those of the order defined above, exactly. Raises ValueError or TypeError on bad sizes or input.
    Source: Algorithm 1.
    """

    def __init__(self, input_dims, hidden_size, transform_outer=True, bias=True, *, init="linear", device=None, dtype=None):
        super().__init__()
        self.input_dims, self.hidden_size = _shapes(input_dims, hidden_size)
        self.transform_outer = bool(transform_outer)
        self.init = _check_init(init)
        modes = tuple(range(len(self.input_dims)))
        self.order = modes if transform_outer else modes[::-1]  # as defined: where the biases are added
        self.execution_order = self.order  # as computed
        cheapest = cheapest_order(self.input_dims, self.hidden_size)
        if self.count_macs(cheapest) < self.count_macs(self.order):
            self.execution_order = cheapest
        self.align_layers = nn.ModuleList(
            nn.Linear(d, h, bias=bias, device=device, dtype=dtype) for d, h in zip(self.input_dims, self.hidden_size)
        )
        if init != "linear":
            self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw all parameters anew, as `init` says."""
        for layer in self.align_layers:
            if self.init == "linear":
                layer.reset_parameters()
                continue
            fan_out, fan_in = layer.weight.shape
            bound = math.sqrt(6 / (fan_in + fan_out) if self.init == "paper" else 3 / fan_in)
            nn.init.uniform_(layer.weight, -bound, bound)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)

    @property
    def weights(self) -> list[Tensor]:
        """[(H_k, D_k)], one per mode."""
        return [layer.weight for layer in self.align_layers]

    @property
    def biases(self) -> list[Tensor | None]:
        """[(H_k,)], one per mode; None where there is none."""
        return [layer.bias for layer in self.align_layers]

    def count_macs(self, order: Sequence[int] | None = None) -> int:
        """Multiply-adds per sample, by default in the order that is executed."""
        return count_macs(self.input_dims, self.hidden_size, self.execution_order if order is None else order)

    def forward(self, x: Tensor) -> Tensor:
        if not all(map(_is_plain, self.align_layers)):  # somebody quantised, pruned, adapted or hooked a mode: call it
            _check_input(x, self.input_dims)
            for k in self.order:
                axis = k - len(self.order)
                x = self.align_layers[k](x.movedim(axis, -1)).movedim(-1, axis)
            return x.contiguous()
        weights, biases = self.weights, self.biases
        _check_input(x, self.input_dims, weights[0])
        if biases[0] is None or self.execution_order == self.order:
            return _algorithm_1(x, weights, biases, self.execution_order)
        y = _algorithm_1(x, weights, [None] * len(weights), self.execution_order)
        return y + _total_bias(weights, biases, self.order).to(y.dtype)

    @classmethod
    def from_linear(cls, linear: nn.Linear, input_dims, hidden_size, rank: int = 1, **search) -> NdLinear | NdLinearSum:
        """The layer nearest to a dense one, in the sense of `nearest_kronecker`; `search` goes there.

        linear: Linear(prod D, prod H). rank = 1 gives an NdLinear. Its per-mode biases cannot take any value: they are
        the least-squares fit of `linear.bias`. rank > 1 gives an NdLinearSum, whose full bias is copied; so does
        `NdLinearSum.from_linear(..., rank=1)`. `layer.fit` holds the relative errors (weight_error, bias_error).
        Raises ValueError if the sizes do not multiply to those of `linear`.
        """
        if rank != 1:
            return NdLinearSum.from_linear(linear, input_dims, hidden_size, rank, **search)
        terms, weight_error = _fit(linear, input_dims, hidden_size, rank, search)
        layer = cls(input_dims, hidden_size, True, linear.bias is not None, device=linear.weight.device,
                    dtype=linear.weight.dtype)  # fmt: skip
        bias_error = 0.0
        with torch.no_grad():
            for target, value in zip(layer.weights, terms[0]):
                target.copy_(value)
            if linear.bias is not None:
                basis = _bias_basis([w.double() for w in layer.weights], layer.order)
                solution = torch.linalg.pinv(basis) @ linear.bias.double()
                bias_error = _relative_error(linear.bias.double(), basis @ solution)
                for target, value in zip(layer.biases, solution.split(layer.hidden_size)):
                    target.copy_(value)
        layer.fit = KroneckerFit(weight_error, bias_error)
        return layer

    fit: KroneckerFit | None = None

    def __repr__(self) -> str:
        bias = self.align_layers[0].bias is not None
        return _repr(self, transform_outer=(self.transform_outer, True), bias=(bias, True), init=(self.init, "linear"))


def _repr(layer: NdLinear | NdLinearSum, **options: tuple) -> str:
    """The call that makes such a layer; options are name = (value, default)."""
    rest = "".join(f", {name}={value!r}" for name, (value, default) in options.items() if value != default)
    return f"{type(layer).__name__}({layer.input_dims}, {layer.hidden_size}{rest})"


def _is_plain(layer: nn.Module) -> bool:
    return type(layer) is nn.Linear and not (
        layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks or layer._backward_pre_hooks
    )


def _total_bias(weights: Sequence[Tensor], biases: Sequence[Tensor], order: Sequence[int]) -> Tensor:
    """beta = sum over modes of (ones on modes done before) x b_k x (row sums of the modes to come), by Horner's rule."""
    beta = None
    for k in order:
        along = [1] * len(weights)
        along[k] = -1
        b = biases[k].reshape(along)
        beta = b if beta is None else beta * weights[k].sum(1).reshape(along) + b
    return beta


class NdLinearSum(nn.Module):
    """A sum of `rank` bias-free NdLinear layers plus one full bias: rank-R Kronecker weight.

    input (..., D_1, ..., D_N) -> output (..., H_1, ..., H_N). Arguments as NdLinear. With enough terms it is any dense
    layer (N = 2: min(D_1 H_1, D_2 H_2) terms). Parameters `terms.{r}.align_layers.{k}.weight` and `bias` (H_1, ..., H_N):
    rank * sum D_k H_k + prod H_k numbers; costs rank times the multiply-adds of an NdLinear. Initial weights are those of
    `rank` NdLinear layers over sqrt(rank) (on their first mode), so that the output variance does not depend on the rank.
    Source: the extension to higher rank that the paper names as future work.
    """

    def __init__(self, input_dims, hidden_size, rank=1, bias=True, *, init="linear", device=None, dtype=None):
        super().__init__()
        self.input_dims, self.hidden_size = _shapes(input_dims, hidden_size)
        self.rank = _check_rank(rank)
        self.init = _check_init(init)
        kwargs = {"device": device, "dtype": dtype}
        self.terms = nn.ModuleList(NdLinear(input_dims, hidden_size, bias=False, init=init, **kwargs) for _ in range(rank))
        self.bias = nn.Parameter(torch.empty(self.hidden_size, **kwargs)) if bias else None
        self._rescale()

    def reset_parameters(self) -> None:
        """Draw all parameters anew, as `init` says."""
        for term in self.terms:
            term.reset_parameters()
        self._rescale()

    def _rescale(self) -> None:
        with torch.no_grad():
            for term in self.terms:
                term.weights[0].div_(math.sqrt(self.rank))
        if self.bias is not None:
            bound = 1 / math.sqrt(math.prod(self.input_dims)) if self.init == "linear" else 0.0
            nn.init.uniform_(self.bias, -bound, bound)

    def count_macs(self) -> int:
        """Multiply-adds per sample, in the order that is executed."""
        return sum(term.count_macs() for term in self.terms)

    def forward(self, x: Tensor) -> Tensor:
        y = reduce(torch.add, [term(x) for term in self.terms])
        return y if self.bias is None else y + self.bias.to(y.dtype)

    @classmethod
    def from_linear(cls, linear: nn.Linear, input_dims, hidden_size, rank: int = 1, **search) -> NdLinearSum:
        """The sum of `rank` Kronecker terms nearest to a dense layer, with its bias; see `NdLinear.from_linear`."""
        terms, weight_error = _fit(linear, input_dims, hidden_size, rank, search)
        layer = cls(input_dims, hidden_size, rank, linear.bias is not None, device=linear.weight.device,
                    dtype=linear.weight.dtype)  # fmt: skip
        with torch.no_grad():
            for term, values in zip(layer.terms, terms):
                for target, value in zip(term.weights, values):
                    target.copy_(value)
            if linear.bias is not None:
                layer.bias.copy_(linear.bias.reshape(layer.hidden_size))
        layer.fit = KroneckerFit(weight_error, 0.0)
        return layer

    fit: KroneckerFit | None = None

    def __repr__(self) -> str:
        return _repr(self, rank=(self.rank, 1), bias=(self.bias is not None, True), init=(self.init, "linear"))


# ------------------------------------------------------------------------------------------------------ exact algebra
def kronecker_weight(layer: NdLinear | NdLinearSum) -> Tensor:
    """The dense matrix of a layer: weight_1 kron ... kron weight_N, summed over terms; shape (prod H, prod D), row-major.

    vec(layer(x)) = kronecker_weight(layer) @ vec(x) + vec(total_bias(layer)). Differentiable. prod D * prod H numbers.
    """
    terms = layer.terms if isinstance(layer, NdLinearSum) else [layer]
    return reduce(torch.add, [reduce(torch.kron, term.weights) for term in terms])


def total_bias(layer: NdLinear | NdLinearSum) -> Tensor:
    """Everything a layer adds: layer(0), shape `hidden_size`; zeros if it has no bias. Differentiable. O(prod H)."""
    if isinstance(layer, NdLinearSum):
        weight, bias = layer.terms[0].weights[0], layer.bias
        return weight.new_zeros(layer.hidden_size) if bias is None else bias
    if layer.biases[0] is None:
        return layer.weights[0].new_zeros(layer.hidden_size)
    return _total_bias(layer.weights, layer.biases, layer.order)


@torch.no_grad()
def to_linear(layer: NdLinear | NdLinearSum | NdLinearLoRA) -> nn.Linear:
    """The same function as one torch.nn.Linear(prod D, prod H) on flattened axes; parameters are copies.

    to_linear(layer)(x.flatten(-N)) = layer(x).flatten(-N). An adapted layer gives its merged form (no dropout).
    """
    if isinstance(layer, NdLinearLoRA):
        weight, bias = layer.weight, layer.bias
    else:
        weight, bias = kronecker_weight(layer), total_bias(layer).flatten()
        bias = bias if (layer.bias if isinstance(layer, NdLinearSum) else layer.biases[0]) is not None else None
    linear = nn.Linear(*weight.shape[::-1], bias=bias is not None, device="meta", dtype=weight.dtype)
    linear.weight = nn.Parameter(weight.detach().clone())
    linear.bias = None if bias is None else nn.Parameter(bias.detach().clone())
    return linear


def rearrange(matrix: Tensor, input_dims: Sequence[int], hidden_size: Sequence[int]) -> Tensor:
    """Van Loan and Pitsianis' rearrangement: (prod H, prod D) -> (H_1 D_1, ..., H_N D_N), the same numbers in new places.

    It turns A_1 kron ... kron A_N into the outer product of the flattened A_k, and it keeps the Frobenius norm: the
    nearest Kronecker product of a matrix is the nearest rank-one tensor of its rearrangement.
    Source: Van Loan and Pitsianis, "Approximation with Kronecker products", 1993.
    """
    dims, hidden = _shapes(input_dims, hidden_size)
    if tuple(matrix.shape) != (math.prod(hidden), math.prod(dims)):
        raise ValueError(
            f"input_dims {dims} and hidden_size {hidden} describe a matrix ({math.prod(hidden)}, {math.prod(dims)}), "
            f"got {tuple(matrix.shape)}; choose sizes whose products are its (rows, columns) = (outputs, inputs)"
        )
    pairs = itertools.chain.from_iterable((k, k + len(dims)) for k in range(len(dims)))
    return matrix.reshape(*hidden, *dims).permute(*pairs).reshape([h * d for h, d in zip(hidden, dims)])


@torch.no_grad()
def nearest_kronecker(
    matrix: Tensor, input_dims: Sequence[int], hidden_size: Sequence[int], rank: int = 1,
    *, restarts: int = 0, seed: int = 0, sweeps: int = 500, tol: float = 1e-12,
) -> tuple[list[list[Tensor]], float]:  # fmt: skip
    """The sum of `rank` Kronecker products nearest to a matrix (prod H, prod D) in the Frobenius norm.

    Returns (terms, error): terms[r][k] has shape (H_k, D_k), matrix ~ sum_r terms[r][0] kron ... kron terms[r][N-1], and
    error = ||matrix - sum|| / ||matrix||. Computed in float64. N <= 2: exact, by one singular value decomposition of the
    rearrangement. N > 2: alternating least squares from the leading singular vectors of each unfolding, and from
    `restarts` random starts (generator `seed`); each start takes at most `sweeps` rounds, or stops when a round lowers the
    squared relative error by less than `tol`; the best start is kept. It finds a local optimum: the global one is
    NP-hard, and for rank > 1 it need not exist. Raises ValueError if the sizes do not fit or the rank is more than enough.
    """
    dims, hidden = _shapes(input_dims, hidden_size)
    tensor = rearrange(matrix.detach().double(), dims, hidden)
    enough = tensor.numel() // max(tensor.shape)
    if _check_rank(rank) > enough:
        raise ValueError(f"rank {rank} for input_dims {dims} and hidden_size {hidden}: {enough} terms give any matrix")
    if tensor.ndim == 1:
        factors = [tensor[:, None]]
    elif tensor.ndim == 2:
        u, s, vh = torch.linalg.svd(tensor, full_matrices=False)
        factors = [u[:, :rank] * s[:rank], vh[:rank].T]
    else:
        noise = torch.Generator().manual_seed(seed)
        starts = [_leading_vectors(tensor, rank, noise)]
        starts += [[torch.randn(n, rank, generator=noise).to(tensor) for n in tensor.shape] for _ in range(restarts)]
        factors = min((_als(tensor, start, sweeps, tol) for start in starts), key=lambda f: _cp_error(tensor, f))
    norms = torch.stack([f.norm(dim=0) for f in factors])  # (N, rank): share the size of a term evenly among its factors
    scale = norms.prod(0) ** (1 / len(factors)) / norms.clamp_min(torch.finfo(torch.float64).tiny)
    terms = [
        [(f[:, r] * c[r]).reshape(h, d).to(matrix.dtype) for f, c, h, d in zip(factors, scale, hidden, dims)]
        for r in range(rank)
    ]
    return terms, _cp_error(tensor, factors)


def _khatri_rao(factors: Sequence[Tensor]) -> Tensor:
    return reduce(lambda a, b: (a[:, None] * b[None]).flatten(0, 1), factors)  # column r: kron of the columns r


def _cp_error(tensor: Tensor, factors: Sequence[Tensor]) -> float:
    return _relative_error(tensor, _khatri_rao(factors).sum(1).reshape(tensor.shape))


def _relative_error(target: Tensor, value: Tensor) -> float:
    return ((target - value).norm() / target.norm().clamp_min(torch.finfo(target.dtype).tiny)).item()


def _leading_vectors(tensor: Tensor, rank: int, noise: torch.Generator) -> list[Tensor]:
    factors = []
    for k, n in enumerate(tensor.shape):
        unfolding = tensor.movedim(k, 0).flatten(1)
        leading = torch.linalg.eigh(unfolding @ unfolding.T).eigenvectors.flip(1)[:, :rank]
        extra = torch.randn(n, max(rank - n, 0), generator=noise).to(tensor)
        factors.append(torch.cat([leading, extra], 1))
    return factors


def _als(tensor: Tensor, factors: list[Tensor], sweeps: int, tol: float) -> list[Tensor]:
    """Alternating least squares for tensor[i..] ~ sum_r prod_k factors[k][i_k, r]; each step can only lower the error."""
    last = math.inf
    for _ in range(sweeps):
        for k in range(tensor.ndim):
            others = [f / f.norm(dim=0).clamp_min(1e-300) for j, f in enumerate(factors) if j != k]
            gram = reduce(torch.mul, [f.T @ f for f in others])
            factors[k] = tensor.movedim(k, 0).flatten(1) @ _khatri_rao(others) @ torch.linalg.pinv(gram, hermitian=True)
        factors[:-1] = others  # unit columns; the last factor, solved for them, carries the size
        error = _cp_error(tensor, factors) ** 2
        if last - error < tol:
            break
        last = error
    return factors


def _fit(linear: nn.Linear, input_dims, hidden_size, rank: int, search: dict) -> tuple[list[list[Tensor]], float]:
    if not isinstance(linear, nn.Linear):
        raise TypeError(f"expected a torch.nn.Linear, got {type(linear).__name__}")
    return nearest_kronecker(linear.weight, input_dims, hidden_size, rank, **search)


def _bias_basis(weights: Sequence[Tensor], order: Sequence[int]) -> Tensor:
    """(prod H, sum H): vec(total bias) = basis @ cat(biases)."""
    blocks = []
    for k in range(len(weights)):
        after = order[order.index(k) + 1 :]
        columns = [w.sum(1, keepdim=True) if j in after else torch.ones_like(w[:, :1]) for j, w in enumerate(weights)]
        columns[k] = torch.eye(weights[k].shape[0]).to(weights[k])
        blocks.append(reduce(torch.kron, columns))
    return torch.cat(blocks, 1)


class KroneckerFit(NamedTuple):
    """Relative errors ||dense - layer|| / ||dense|| of a layer made by `from_linear`."""

    weight_error: float
    bias_error: float


# -------------------------------------------------------------------------------------------------------------- costs
def cheapest_order(input_dims: Sequence[int], hidden_size: Sequence[int]) -> tuple[int, ...]:
    """The order of modes (0..N-1) with the fewest multiply-adds: ascending 1/D_k - 1/H_k; ties keep their place.

    Swapping two neighbours i, j of an order changes its cost by a positive multiple of (1/D_i - 1/H_i) - (1/D_j - 1/H_j),
    so an order is cheapest exactly if it is sorted: modes that compress come first.
    """
    dims, hidden = _shapes(input_dims, hidden_size)
    unit = math.lcm(*dims, *hidden)  # exact integers: floats would see gains in ties
    return tuple(sorted(range(len(dims)), key=lambda k: unit // dims[k] - unit // hidden[k]))


def count_macs(input_dims: Sequence[int], hidden_size: Sequence[int], order: Sequence[int] | None = None) -> int:
    """Multiply-adds per sample in the given order of modes, by default 0, 1, ..., N-1; additions of biases not counted."""
    dims, hidden = _shapes(input_dims, hidden_size)
    macs, size = 0, list(dims)
    for k in _order(order, len(dims)):
        macs += math.prod(size) * hidden[k]
        size[k] = hidden[k]
    return macs


def count_parameters(input_dims: Sequence[int], hidden_size: Sequence[int], bias: bool = True, rank: int = 1) -> int:
    """Parameters of NdLinear: sum D_k H_k, plus sum H_k with bias; of NdLinearSum (rank > 1): rank times, plus prod H."""
    dims, hidden = _shapes(input_dims, hidden_size)
    weights = _check_rank(rank) * sum(d * h for d, h in zip(dims, hidden))
    return weights + bool(bias) * (sum(hidden) if rank == 1 else math.prod(hidden))


# ------------------------------------------------------------------------------------------------------- LoRA adapters
def near_square(n: int) -> tuple[int, int]:
    """n = a * b with a <= b as close as possible, e.g. 14336 -> (112, 128); a prime gives (1, n)."""
    a = next(a for a in range(math.isqrt(_sizes("n", (n,))[0]), 0, -1) if n % a == 0)
    return a, n // a


class NdLinearLoRA(nn.Module):
    """A frozen torch.nn.Linear plus a trainable NdLinear update: y = base(x) + alpha * vec(NdLinear(x as a tensor)).

    input (..., prod D) -> output (..., prod H).

    base_layer               the nn.Linear(prod D, prod H) to adapt; it is kept and its parameters are frozen
    input_dims, hidden_size  how to fold its two sizes; default: two near-square factors of each
    alpha                    factor of the update
    dropout                  probability, on the input of the update, in training
    bias                     per-mode biases in the update (off, as in the paper's counts)

    Trains `count_parameters(input_dims, hidden_size, bias)` numbers, `adapter.align_layers.{k}.*`. The update is zero at
    start: weight and bias of the mode executed last (in the defined order) are zero, the other modes are drawn as in
    NdLinear, so the first step moves the last mode and the following ones all modes. Without biases the update is KronA,
    that is LoKr with two full factors. Raises ValueError or TypeError if the sizes do not fit. Source: NdLinear-LoRA.
    """

    def __init__(
        self, base_layer, input_dims=None, hidden_size=None, *, alpha=1.0, dropout=0.0, bias=False, transform_outer=True,
        init="linear", dtype=None,
    ):  # fmt: skip
        super().__init__()
        if not isinstance(base_layer, nn.Linear):
            raise TypeError(f"expected a torch.nn.Linear to adapt, got {type(base_layer).__name__}")
        self.in_features, self.out_features = base_layer.in_features, base_layer.out_features
        dims = near_square(self.in_features) if input_dims is None else _sizes("input_dims", input_dims)
        hidden = near_square(self.out_features) if hidden_size is None else _sizes("hidden_size", hidden_size)
        if (math.prod(dims), math.prod(hidden)) != (self.in_features, self.out_features):
            raise ValueError(
                f"input_dims {dims} and hidden_size {hidden} multiply to {math.prod(dims)} and {math.prod(hidden)}, but the "
                f"wrapped layer is Linear({self.in_features}, {self.out_features}); choose for example "
                f"{near_square(self.in_features)} and {near_square(self.out_features)}"
            )
        self.base_layer = base_layer.requires_grad_(False)
        weight = base_layer.weight
        self.adapter = NdLinear(dims, hidden, transform_outer, bias, init=init, device=weight.device, dtype=dtype or weight.dtype)
        self.dropout = nn.Dropout(dropout)
        self.alpha = float(alpha)
        self.register_buffer("merged_weight", None, persistent=False)
        self.register_buffer("merged_bias", None, persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the adapter anew; its update is zero."""
        self.adapter.reset_parameters()
        last = self.adapter.align_layers[self.adapter.order[-1]]
        for parameter in last.parameters():
            nn.init.zeros_(parameter)

    @property
    def config(self) -> dict:
        """Keyword arguments that rebuild this adapter around the same base layer."""
        a = self.adapter
        return {"input_dims": a.input_dims, "hidden_size": a.hidden_size, "alpha": self.alpha,
                "bias": a.biases[0] is not None, "transform_outer": a.transform_outer}  # fmt: skip

    @property
    def merged(self) -> bool:
        """Whether `merge` was called and not yet undone."""
        return self.merged_weight is not None

    @property
    def weight(self) -> Tensor:
        """The weight in effect, base and update, (out_features, in_features): what code that bypasses forward should see."""
        base = self.base_layer.weight
        return self.merged_weight if self.merged else (base + self.alpha * kronecker_weight(self.adapter)).to(base.dtype)

    @property
    def bias(self) -> Tensor | None:
        """The bias in effect, (out_features,), or None if neither the base layer nor the update has one."""
        base, weight = self.base_layer.bias, self.base_layer.weight
        if self.merged or self.adapter.biases[0] is None:
            return self.merged_bias if self.merged else base
        update = self.alpha * total_bias(self.adapter).flatten()
        return (update if base is None else base + update).to(weight.dtype)

    @torch.no_grad()
    def merge(self) -> None:
        """Compute base and update as one dense layer from now on: no extra cost per call, no gradient to the adapter.

        The base layer is not touched: `unmerge` restores everything bit by bit, `state_dict` stays as it was, and the
        price is one more copy of the weight while merged. `to_linear(layer)` gives the merged layer as a plain nn.Linear.
        """
        if not self.merged:
            bias, self.merged_weight = self.bias, self.weight.clone()
            self.merged_bias = None if bias is None else bias.clone()

    def unmerge(self) -> None:
        """Undo `merge`."""
        self.merged_weight = self.merged_bias = None

    def _load_from_state_dict(self, *args, **kwargs) -> None:
        self.unmerge()  # what was merged is no longer what the parameters say
        super()._load_from_state_dict(*args, **kwargs)

    def forward(self, x: Tensor) -> Tensor:
        if self.merged:
            return F.linear(x, self.merged_weight, self.merged_bias)
        y = self.base_layer(x)
        a = self.adapter
        update = a(self.dropout(x).to(a.weights[0].dtype).unflatten(-1, a.input_dims)).flatten(-len(a.hidden_size))
        return y + (self.alpha * update).to(y.dtype)

    def extra_repr(self) -> str:
        return f"alpha={self.alpha}, merged={self.merged}"


def apply_ndlinear_lora(model: nn.Module, target_modules: str | Iterable[str], *, freeze: bool = True, **options) -> nn.Module:
    """Replace, in place, the nn.Linear layers of a model whose names match by NdLinearLoRA; returns the model.

    target_modules: one pattern or several; "q_proj" matches the last parts of a dotted name, "layers.[01].*" (shell
    wildcards) the whole. freeze: also freeze all parameters outside adapters. options: those of NdLinearLoRA.
    Raises ValueError if nothing matches; the model is changed only if every match can be adapted.
    """
    patterns = [target_modules] if isinstance(target_modules, str) else list(target_modules)
    inside = tuple(f"{name}." for name, module in model.named_modules() if isinstance(module, (NdLinear, NdLinearLoRA)))
    linears = {
        name: module
        for name, module in model.named_modules(remove_duplicate=False)
        if name and isinstance(module, nn.Linear) and not name.startswith(inside)
    }
    found = [name for name in linears if any(fnmatchcase(name, p) or fnmatchcase(name, f"*.{p}") for p in patterns)]
    if not found:
        known = ", ".join(itertools.islice(linears, 12)) or "none; a lone nn.Linear is adapted with NdLinearLoRA(linear)"
        raise ValueError(f"target_modules {patterns} match no nn.Linear of this model; its linear layers are: {known}")
    adapted = {module: NdLinearLoRA(module, **options) for module in dict.fromkeys(linears[name] for name in found)}
    for name in found:
        _replace(model, name, adapted[linears[name]])
    if freeze:
        keep = {id(p) for m in model.modules() if isinstance(m, NdLinearLoRA) for p in m.adapter.parameters()}
        for parameter in model.parameters():
            parameter.requires_grad_(id(parameter) in keep)
    return model


def _adapters(model: nn.Module) -> dict[str, NdLinearLoRA]:
    found = {name: module for name, module in model.named_modules() if isinstance(module, NdLinearLoRA)}
    if not found:
        raise ValueError("this model has no NdLinearLoRA layer; call apply_ndlinear_lora(model, target_modules) first")
    return found


def lora_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """The adapter parameters alone, with their names in `model.state_dict()`."""
    starts = tuple(f"{name}.adapter.".removeprefix(".") for name in _adapters(model))
    return {name: value for name, value in model.state_dict().items() if name.startswith(starts)}


def save_lora(model: nn.Module, path) -> None:
    """Save the adapters alone as a safetensors file: parameters, and in its metadata the shapes and factors."""
    configs = {name: module.config for name, module in _adapters(model).items()}
    tensors = {name: value.contiguous() for name, value in lora_state_dict(model).items()}
    _safetensors().torch.save_file(tensors, path, metadata={"ndlinear_lora": json.dumps(configs)})


def load_lora(model: nn.Module, path) -> nn.Module:
    """Load a file of `save_lora` into a model, in place; layers that are still plain nn.Linear are adapted first."""
    with _safetensors().safe_open(path, "pt") as file:
        configs = json.loads((file.metadata() or {}).get("ndlinear_lora", "null"))
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    if configs is None:
        raise ValueError(f"{path} was not written by save_lora: its metadata lack ndlinear_lora")
    modules = dict(model.named_modules(remove_duplicate=False))
    for name, config in configs.items():
        module = modules.get(name)
        if isinstance(module, NdLinearLoRA):
            present = json.loads(json.dumps(module.config))
            if present != config:
                raise ValueError(f"adapter {name!r} was saved as {config}, the model has {present}; load into the bare model")
        elif isinstance(module, nn.Linear) and name:
            _replace(model, name, NdLinearLoRA(module, **config))
        else:
            raise ValueError(f"{path} adapts {name!r}, which this model has not as a torch.nn.Linear; is it the same model?")
    model.load_state_dict(tensors, strict=False)
    return model


def _replace(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, module)


def _safetensors():
    try:
        import safetensors
        import safetensors.torch
    except ImportError as error:
        raise ImportError("save_lora and load_lora need safetensors: pip install safetensors") from error
    return safetensors


# ------------------------------------------------------------------------------------------------------------- checks
def _sizes(name: str, sizes: Sequence[int]) -> tuple[int, ...]:
    """A non-empty tuple of positive integers, or an error that says what to write instead."""
    try:
        values = tuple(sizes)
        if any(isinstance(v, (bool, str)) for v in values):
            raise TypeError
        values = tuple(map(index, values))
    except TypeError:
        raise TypeError(f"{name} must be a sequence of positive integers such as (8, 8), got {sizes!r}") from None
    if not values or min(values) < 1:
        raise ValueError(f"{name} must have at least one axis and only positive sizes, such as (8, 8), got {values}")
    return values


def _shapes(input_dims: Sequence[int], hidden_size: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    both = f" (input_dims={input_dims!r}, hidden_size={hidden_size!r})"
    try:
        dims, hidden = _sizes("input_dims", input_dims), _sizes("hidden_size", hidden_size)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{error}{both}") from None
    if len(dims) != len(hidden):
        raise ValueError(
            f"input_dims {dims} has {len(dims)} axes and hidden_size {hidden} has {len(hidden)}; give one output size per "
            "input axis (an axis that is to vanish gets size 1)"
        )
    return dims, hidden


def _order(order: Sequence[int] | None, n: int) -> tuple[int, ...]:
    order = tuple(range(n)) if order is None else tuple(order)
    if sorted(order) != list(range(n)):
        raise ValueError(f"order {order} must list each of the {n} modes once, 0-based, such as {tuple(range(n))}")
    return order


def _check_input(x: Tensor, dims: tuple[int, ...], weight: Tensor | None = None) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"expected a torch.Tensor of shape (..., {', '.join(map(str, dims))}), got {type(x).__name__}")
    if tuple(x.shape[max(x.ndim - len(dims), 0) :]) != dims:
        raise ValueError(
            f"expected input of shape (..., {', '.join(map(str, dims))}), got {tuple(x.shape)}; move or reshape the axes so "
            f"that the last {len(dims)} are {dims}, for example x.unflatten(-1, {dims}) for a flat last axis"
        )
    if weight is None:
        return
    if not (x.is_floating_point() or x.is_complex()):
        raise TypeError(f"input of shape {tuple(x.shape)} has dtype {x.dtype}; convert it with x.to({weight.dtype})")
    if x.device != weight.device:
        raise ValueError(f"input is on {x.device}, the weights {tuple(weight.shape)}... on {weight.device}; move one of them")
    if x.dtype != weight.dtype and not torch.is_autocast_enabled(x.device.type):
        raise TypeError(
            f"input of shape {tuple(x.shape)} has dtype {x.dtype}, the weights have {weight.dtype}; convert one of them "
            f"with .to(), or run under torch.autocast"
        )


def _check_init(init: str) -> str:
    if init not in ("linear", "paper", "unit"):
        raise ValueError(f'init must be "linear", "paper" or "unit", got {init!r}')
    return init


def _check_rank(rank: int) -> int:
    return _sizes("rank", (rank,))[0]
