"""NdLinear: a linear layer for tensors that multiplies every axis by its own small matrix instead of flattening.

    Y = X x_1 W_1 x_2 W_2 ... x_N W_N + beta        vec(Y) = (W_1 kron ... kron W_N)^T vec(X) + vec(beta)

    X, Y   input (..., D_1, ..., D_N) and output (..., H_1, ..., H_N); leading axes are batch axes, any number of them
    W_k    weight of mode k, (D_k, H_k) in formulas; stored transposed, (H_k, D_k), as in torch.nn.Linear
    b_k    bias of mode k, (H_k,), added right after mode k was multiplied (Algorithm 1)
    beta   what the b_k add up to, (H_1, ..., H_N); it depends on the order of the modes
    vec    row-major flattening, as torch.flatten does. Modes are counted 1..N in text and 0..N-1 in code

Source: "NdLinear: Preserving Multi-Dimensional Structure for Parameter-Efficient Neural Networks", arXiv:2503.17353.
Checkpoints, seeded weights and values agree with its released package `ndlinear` 1.0.0. Costs are parameters, and multiply-adds
(MACs; 1 MAC = 2 FLOPs) per sample. Needs torch only; `save_lora` and `load_lora` also need safetensors.

What it does not do: put activations between modes; make a bias-free stack richer than one layer; keep the channels_last layout
(the result is contiguous); record the order of the biases in a checkpoint (load with the same `transform_outer`); torch.jit.script.
"""

from __future__ import annotations

import importlib
import itertools
import json
import math
from collections import namedtuple
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from functools import lru_cache, reduce
from operator import index

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

__version__ = "0.1.0"
__all__ = [
    "KroneckerFit", "NdLinear", "NdLinearLoRA", "NdLinearSum", "apply_ndlinear_lora", "cheapest_order", "count_macs", "count_parameters",
    "kronecker_weight", "load_lora", "lora_state_dict", "mode_product", "ndlinear", "near_square", "nearest_kronecker", "rearrange",
    "save_lora", "to_linear", "total_bias",
]  # fmt: skip

Shape = Sequence[int]
KroneckerFit = namedtuple(
    "KroneckerFit", "weight_error bias_error"
)  # relative errors of a layer made by from_linear


# -------------------------------------------------------------------------------------------------------- Algorithm 1
def mode_product(x: Tensor, weight: Tensor, mode: int, bias: Tensor | None = None) -> Tensor:
    """Multiply axis `mode` of a tensor by a matrix and add a bias along it: X x_k W + b.
    x (..., D, ...), weight (H, D), bias (H,) or None -> (..., H, ...), possibly a transposed view. `mode` is a torch `dim`:
    -1 is the last axis whatever the number of batch axes; 0 is the first axis of `x`, a batch axis if it has any.
    Costs H multiply-adds per entry of `x`. Raises ValueError if there is no such axis or the sizes do not fit."""
    size = x.shape[mode] if -x.ndim <= mode < x.ndim else None
    if (
        size is None
        or weight.shape[1:] != (size,)
        or (bias is not None and bias.shape != weight.shape[:1])
    ):
        shapes = (
            f"weight {tuple(weight.shape)} and bias {bias if bias is None else tuple(bias.shape)}"
        )
        raise ValueError(
            f"axis {mode} of input {tuple(x.shape)} does not fit {shapes}; give (H, axis size) and (H,)"
        )
    return F.linear(x.movedim(mode, -1), weight, bias).movedim(-1, mode)


def ndlinear(
    x: Tensor, weights: Sequence[Tensor], biases=None, order: Shape | None = None
) -> Tensor:
    """Algorithm 1: mode after mode, multiply by the weight and add the bias.
    x (..., D_1, ..., D_N), weights[k] (H_k, D_k), biases[k] (H_k,) or None -> (..., H_1, ..., H_N). `order` lists the
    modes 0..N-1 as they are executed, by default 0, 1, ..., N-1; it changes the result only through the biases.
    Costs `count_macs(D, H, order)`. Raises ValueError or TypeError if anything does not fit."""
    n, biases = len(weights), [None] * len(weights) if biases is None else biases
    if n == 0 or len(biases) != n or any(w.ndim != 2 for w in weights):
        raise ValueError(
            f"give one weight (H, D) and one bias per mode, got {n} weights and {len(biases)} biases"
        )
    _check_input(x, tuple(w.shape[1] for w in weights), weights[0])
    for k in _order(order, n):
        x = mode_product(x, weights[k], k - n, biases[k])
    return x.contiguous()


# --------------------------------------------------------------------------------------------------------- the layers
@torch.no_grad()
def _from_linear(
    cls, linear: nn.Linear, input_dims: Shape, hidden_size: Shape, rank: int = 1, **search
):
    """The layer nearest to a dense Linear(prod D, prod H), by `nearest_kronecker(..., rank, **search)`.
    NdLinear.from_linear gives an NdLinear for rank 1; its per-mode biases cannot reach every bias: they are the least-squares fit.
    For rank > 1 it gives an NdLinearSum, as NdLinearSum.from_linear always does; that has the dense bias.
    `layer.fit` holds the relative errors (weight_error, bias_error). Raises ValueError or TypeError."""
    if not isinstance(linear, nn.Linear):
        raise TypeError(f"from_linear needs a torch.nn.Linear, got {type(linear).__name__}")
    terms, weight_error = nearest_kronecker(linear.weight, input_dims, hidden_size, rank, **search)
    options = {
        "bias": linear.bias is not None,
        "device": "meta",
        "dtype": linear.weight.dtype,
    }  # meta: draws nothing
    if rank > 1 or issubclass(cls, NdLinearSum):
        cls, options = NdLinearSum, options | {"rank": rank}
    layer, bias_error = (
        cls(input_dims, hidden_size, **options).to_empty(device=linear.weight.device),
        0.0,
    )
    for term, values in zip(layer.terms, terms):
        for weight, value in zip(term.weights, values):
            weight.copy_(value)
    if linear.bias is not None and cls is NdLinearSum:
        layer.bias.copy_(linear.bias.reshape(layer.hidden_size))
    elif (
        linear.bias is not None
    ):  # the total bias is linear in the biases: least squares with its Jacobian
        weights, target, sizes = (
            [w.double() for w in layer.weights],
            linear.bias.double(),
            layer.hidden_size,
        )
        jacobian = torch.func.jacfwd(
            lambda b: _total_bias(weights, b.split(sizes), layer.order).flatten()
        )
        basis = jacobian(torch.zeros(sum(sizes)).to(target))  # (prod H, sum H)
        solution = torch.linalg.pinv(basis) @ target
        bias_error = _error(target, [(basis @ solution)[:, None]])
        for bias, value in zip(layer.biases, solution.split(sizes)):
            bias.copy_(value)
    layer.fit = KroneckerFit(weight_error, bias_error)
    return layer


class NdLinear(nn.Module):
    """A linear layer that keeps the axes of its input: (..., D_1, ..., D_N) -> (..., H_1, ..., H_N).
    input_dims, hidden_size  (D_1, ..., D_N) and (H_1, ..., H_N), positive integers
    transform_outer          True: Algorithm 1 in the order 1..N; False: N..1. The two differ in what the biases do
    init                     "linear": each mode like torch.nn.Linear (as released; unit variance becomes 3^-N, plus biases)
                             "paper": Xavier uniform per mode, biases zero
                             "unit": uniform +-sqrt(3/D_k) per mode, which keeps the variance, biases zero
    execution                "planned": the same function the fastest way known, see `plan`
                             "recompute": so too under torch.utils.checkpoint: keeps only its input, runs once more in backward
                             "sequential": Algorithm 1 literally, the reference

    Parameters `align_layers.{k}.weight` (H_k, D_k) and, with `bias`, `.bias` (H_k,): sum D_k H_k + sum H_k numbers.
    `order` is the order that defines what the biases do, `execution_order` the one with the fewest multiply-adds.
    Raises ValueError or TypeError on sizes or input that do not fit. Source: Algorithm 1."""

    def __init__(
        self, input_dims, hidden_size, transform_outer=True, bias=True, *, init="linear", execution="planned", device=None, dtype=None
    ):  # fmt: skip
        super().__init__()
        self.input_dims, self.hidden_size = dims, hidden = _shapes(input_dims, hidden_size)
        if init not in ("linear", "paper", "unit"):
            raise ValueError(f'init must be "linear", "paper" or "unit", got {init!r}')
        if execution not in ("planned", "recompute", "sequential"):
            raise ValueError(
                f'execution must be "planned", "recompute" or "sequential", got {execution!r}'
            )
        self.transform_outer, self.init, self.execution, self.fit = (
            bool(transform_outer),
            init,
            execution,
            None,
        )
        self.order = tuple(range(len(dims)))[:: 1 if transform_outer else -1]
        orders = [self.order, cheapest_order(dims, hidden)][: 1 if execution == "sequential" else 2]
        self.execution_order = min(orders, key=lambda o: count_macs(dims, hidden, o))
        self._plans: dict = {}
        self.align_layers = nn.ModuleList(
            nn.Linear(d, h, bias, device, dtype) for d, h in zip(dims, hidden)
        )
        self._plans[None] = self.plan()  # made now: compilers find it, they do not trace the search
        if init != "linear":
            self.reset_parameters()

    weights = property(lambda self: [m.weight for m in self.align_layers], doc="(H_k, D_k) each.")
    biases = property(
        lambda self: [getattr(m, "bias", None) for m in self.align_layers],
        doc="(H_k,) each or None.",
    )
    terms = property(lambda self: [self], doc="A sum of one term: itself.")
    from_linear = classmethod(_from_linear)

    def reset_parameters(self) -> None:
        """Draw all parameters anew, as `init` says."""
        for layer in self.align_layers:
            layer.reset_parameters()
            if self.init != "linear":
                bound = math.sqrt(
                    6 / sum(layer.weight.shape) if self.init == "paper" else 3 / layer.in_features
                )
                nn.init.uniform_(layer.weight, -bound, bound)
                if layer.bias is not None:
                    nn.init.zeros_(layer.bias)

    def plan(self, batch: int = 256, needs_grad: bool = True) -> Plan:
        """How `batch` samples are computed, with or without gradients; print it. Made once per power of two, then kept.
        Whatever compiles, exports, traces, transforms or casts runs `plan()` for any batch: it sees one program."""
        key = (batch.bit_length(), needs_grad)
        if key not in self._plans:
            self._plans[key] = _search(
                self.input_dims, self.hidden_size, self.order, *key, _has_bias(self)
            )
        return self._plans[key]

    def forward(self, x: Tensor) -> Tensor:
        weights, biases, compiling = [], [], torch.compiler.is_compiling()
        plain = (
            self.execution != "sequential"
        )  # and nobody quantised, wrapped, pruned or hooked a mode
        for m in self._modules["align_layers"]._modules.values():
            weight, bias = m._parameters.get("weight"), m._parameters.get("bias")
            weights.append(weight)
            biases.append(bias)
            hooked = (
                m._forward_hooks
                or m._forward_pre_hooks
                or m._backward_hooks
                or m._backward_pre_hooks
            )
            known = (
                type(m) is nn.Linear
                and (compiling or type(weight) in _PLAIN)
                and "forward" not in m.__dict__
            )
            if hooked or not known or (bias is None) != (biases[0] is None):
                plain = False
        _check_input(x, self.input_dims, weights[0])
        if not plain:
            for axis in (k - len(self.order) for k in self.order):  # Algorithm 1
                x = self.align_layers[axis](x.movedim(axis, -1)).movedim(-1, axis)
            return x.contiguous()
        batch, eager = x.shape[: -len(weights)], not compiling and _is_eager(x)
        grad = eager and torch.is_grad_enabled()
        grad = grad and (
            x.requires_grad or any(p is not None and p.requires_grad for p in weights + biases)
        )
        plan = self.plan(batch.numel(), grad) if eager else self._plans[None]
        if plan.inline:
            matrices, added = [weights[k] for k in plan.order], [biases[k] for k in plan.order]
        else:
            matrices, added = (
                [reduce(_kron, [weights[k] for k in g]) for g in plan.groups],
                [None] * len(plan.groups),
            )
            added[-1] = (
                None
                if biases[0] is None
                else _total_bias(weights, biases, self.order).reshape(plan.total)
            )
        if grad and self.execution == "recompute":
            how = {"use_reentrant": False, "preserve_rng_state": False}
            x = checkpoint(
                _run, plan, _product, x, *matrices, *added, **how
            )  # in a row: it notices changes
        else:
            product = (
                (_Product.apply if plan.by_hand else _product)
                if grad
                else _fast_product
                if eager
                else _product
            )
            x = _run(plan, product, x, *matrices, *added)
        return x.reshape(*batch, *self.hidden_size)

    def __repr__(self) -> str:
        options = (
            f"transform_outer={self.transform_outer}, bias={_has_bias(self)}, init={self.init!r}"
        )
        options += "" if self.execution == "planned" else f", execution={self.execution!r}"
        return f"NdLinear({self.input_dims}, {self.hidden_size}, {options})"


class NdLinearSum(nn.Module):
    """A sum of `rank` bias-free NdLinear layers plus one full bias: (..., D_1, ..., D_N) -> (..., H_1, ..., H_N).
    Arguments as NdLinear. With enough terms (N = 2: min(D_1 H_1, D_2 H_2)) it is any dense layer. Parameters
    `terms.{r}.align_layers.{k}.weight` and `bias` (H_1, ..., H_N): rank * sum D_k H_k + prod H_k numbers; `rank` times
    the multiply-adds of NdLinear. Drawn like NdLinear over sqrt(rank), so that the output variance keeps its size.
    Raises like NdLinear. Source: the extension to higher rank that the paper names as future work."""

    def __init__(
        self, input_dims, hidden_size, rank=1, bias=True, *, init="linear", device=None, dtype=None
    ):
        super().__init__()
        self.input_dims, self.hidden_size = _shapes(input_dims, hidden_size, rank)
        self.rank, self.init, self.fit, like = rank, init, None, {"device": device, "dtype": dtype}
        terms = (
            NdLinear(input_dims, hidden_size, bias=False, init=init, **like) for _ in range(rank)
        )
        self.terms = nn.ModuleList(terms)
        self.bias = nn.Parameter(torch.empty(self.hidden_size, **like)) if bias else None
        if bias:
            bound = 1 / math.sqrt(math.prod(self.input_dims)) if init == "linear" else 0.0
            nn.init.uniform_(self.bias, -bound, bound)
        for term in self.terms:
            term.weights[0].data.div_(math.sqrt(rank))

    def forward(self, x: Tensor) -> Tensor:
        y = reduce(torch.add, [term(x) for term in self.terms])
        return y if self.bias is None else y + self.bias.to(y.dtype)

    from_linear = classmethod(_from_linear)

    def __repr__(self) -> str:
        options = f"rank={self.rank}, bias={self.bias is not None}, init={self.init!r}"
        return f"NdLinearSum({self.input_dims}, {self.hidden_size}, {options})"


def _total_bias(weights: Sequence[Tensor], biases: Sequence[Tensor], order: Shape) -> Tensor:
    """Horner's rule for beta = sum_k [1 on the modes before k] x b_k x [row sums of the weights on the modes after k]."""
    beta = biases[order[0]]
    for k in order[1:]:
        bias, rows, ones = biases[k], weights[k].sum(1), [1] * beta.ndim
        if k > order[0]:  # the axis of mode k comes last in the order 1..N, first in the order N..1
            beta = torch.addcmul(bias, beta.unsqueeze(-1), rows)
        else:
            beta = torch.addcmul(bias.reshape(-1, *ones), rows.reshape(-1, *ones), beta)
    return beta


# ---------------------------------------------------------------------------------------------------------- the engine
# One product: data seen as (batch * left, dim, right) times (hidden, dim), the Kronecker product of the weights of `modes`.
Step = namedtuple("Step", "modes left dim hidden right shape")


class Plan(namedtuple("Plan", "steps groups order inline total by_hand seconds")):
    """How a layer is computed; print it. Counts are per sample, `seconds` (an estimate) for all samples.
    steps      the products one after the other; groups: their modes, merged if several; order: all modes in a row
    inline     each bias right after the product of its mode; else the total bias, seen as `total`, after the last product
    by_hand    gradients by `_Product`; else by autograd's own, which take fewer steps in Python"""

    macs = property(lambda self: sum(math.prod(s[1:5]) for s in self.steps), doc="Multiply-adds.")
    bytes = property(
        lambda self: 4 * sum(s.left * s.right * (s.dim + s.hidden) for s in self.steps),
        doc="Moved.",
    )
    saved = property(
        lambda self: sum(s.left * s.right * s.dim for s in self.steps),
        doc="Numbers kept for backward.",
    )

    def __str__(self) -> str:
        rows = [("modes", "left", "dim", "hidden", "right", "multiply-adds")]
        rows += [
            ("x".join(str(k + 1) for k in s.modes), *s[1:5], f"{math.prod(s[1:5]):,}")
            for s in self.steps
        ]
        table = "\n".join(
            "".join(f"{value!s:>{8 + 6 * (i == 5)}}" for i, value in enumerate(row)) for row in rows
        )
        counts = f"{self.macs:,} multiply-adds, {self.bytes:,} bytes moved, {self.saved:,} numbers kept for backward"
        return f"{table}\nbiases {'mode by mode' if self.inline else 'added up and last'}; {counts}"


@lru_cache(4096)
def _search(dims: tuple, hidden: tuple, order: tuple, bits: int, grad: bool, bias: bool) -> Plan:
    """The fastest plan by estimate for about 2^bits samples. Candidates: Algorithm 1; and neighbours merged in all ways, in
    all orders if there are at most 4 groups, else in the cheapest. None keeps more for backward than Algorithm 1."""
    n, candidates = len(dims), [(True, [(k,) for k in order])]
    for cuts in itertools.product((True, False), repeat=n - 1) if n <= 8 else [(True,) * (n - 1)]:
        edges = [0, *(k for k, cut in enumerate(cuts, 1) if cut), n]
        groups = [tuple(range(a, b)) for a, b in itertools.pairwise(edges)]
        best = cheapest_order(
            *([math.prod(sizes[k] for k in g) for g in groups] for sizes in (dims, hidden))
        )
        orders = itertools.permutations(groups) if len(groups) <= 4 else [[groups[k] for k in best]]
        candidates += [(False, list(o)) for o in orders]
    plans = [
        _estimate(dims, hidden, *candidate, 0.75 * 2**bits, grad, bias) for candidate in candidates
    ]
    return min((p for p in plans if p.saved <= plans[0].saved), key=lambda p: p.seconds)


def _estimate(dims, hidden, inline, groups, samples, grad, bias) -> Plan:
    """Seconds by constants fitted to two CPU cores: 10 us a product, 5 more for a batch of matrices and 5 more if they are thin,
    7 us a bias, 10 us a merged factor; 16 ps a multiply-add, some 0.1 ns a number moved. Backward: 5 times the calls."""
    sizes, steps, calls, work, many = (
        list(dims),
        [],
        7e-6 * len(dims) * (bias and not inline),
        0.0,
        0.0,
    )
    for g in groups:
        a, b = g[0], g[-1] + 1
        d, h, left, right = (math.prod(s) for s in (dims[a:b], hidden[a:b], sizes[:a], sizes[b:]))
        moved, thin = 3e-9 + 1.2e-10 * (d + h), 1 < right < min(h, 16)
        if right > 1:
            moved = 6e-8 + right * (d + h) * (1e-9 if thin else 6e-11)
            moved += right * h * (2e-10 if grad else 1e-11) * (bias and inline)
            many += (
                5e-10 * samples * left * d * h
            )  # autograd's gradients of the weight, one for each matrix
        calls += 1e-5 * len(g) + 5e-6 * ((right > 1) + thin)
        work += samples * left * (1.6e-11 * d * h * right + moved) + 1e-9 * d * h * (len(g) > 1)
        steps.append(Step(g, left, d, h, right, (-1, d) if right == 1 else (-1, d, right)))
        sizes[a:b] = hidden[a:b]
    work += (
        samples
        * math.prod(hidden)
        * (5e-11 * (left > 1) + 3e-11 * (right > 1))
        * (bias and not inline)
    )
    order, total = (
        tuple(k for g in groups for k in g),
        (left,) * (left > 1) + (h,) + (right,) * (right > 1),
    )
    seconds = 6 * calls + 3 * work if grad else calls + work
    return Plan((*steps,), (*groups,), order, inline, total, calls + work + many > 3e-4, seconds)


_PLAIN, _ONEDNN = (Tensor, nn.Parameter), torch.backends.mkldnn.is_available()


def _is_eager(x: Tensor) -> bool:
    """Whether this is an ordinary call: real numbers, and nothing traces, transforms or casts."""
    transformed = (
        torch._C._are_functorch_transforms_active() or torch.autograd.forward_ad._current_level >= 0
    )
    traced = torch._C._get_tracing_state() is not None or torch._C._is_any_autocast_enabled()
    return type(x) in _PLAIN and x.dtype.is_floating_point and not transformed and not traced


def _kron(a: Tensor, b: Tensor) -> Tensor:
    (h, d), (k, e) = a.shape, b.shape
    return (a.reshape(h, 1, d, 1) * b.reshape(k, 1, e)).reshape(h * k, d * e)


def _run(plan: Plan, product, x: Tensor, *tensors: Tensor | None) -> Tensor:
    """The products of a plan: prod H numbers per sample in some shape. `tensors`: a matrix per step, then a bias per step."""
    for step, matrix, bias in zip(plan.steps, tensors, tensors[len(plan.steps) :]):
        x = product(x.reshape(*step.shape), matrix, bias)
    return x


def _product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """(L, D) -> (L, H) or (L, D, R) -> (L, H, R), nothing copied; anything can differentiate, trace, transform it.
    The bias is (H,), (H, R), or a row of these if there is one for each of several matrices."""
    if bias is not None and bias.ndim == x.ndim:
        y = _product(x, weight)
        return y.reshape(-1, *bias.shape) + bias.to(y.dtype)
    if x.ndim == 2:
        return F.linear(x, weight, bias)
    (left, d, right), h, whole = x.shape, weight.shape[0], bias is not None and bias.ndim == 2
    if right < min(h, 16):  # many thin matrices: one product of a copy
        y = F.linear(x.transpose(1, 2).reshape(-1, d), weight, None if whole else bias)
        y = y.view(left, right, h).transpose(1, 2)
        return (y + bias.to(y.dtype) if whole else y).contiguous()
    weight = weight.expand(left, h, d)
    if bias is None:
        return torch.bmm(weight, x)
    return torch.baddbmm(bias if whole else bias.unsqueeze(1), weight, x)


def _fast_product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`_product` where nothing watches: outer products, sums in place, and oneDNN, which beats BLAS where there is much to do."""
    if bias is not None and bias.ndim == x.ndim:
        y = _fast_product(x, weight)
        y.view(-1, *bias.shape).add_(bias)
        return y
    if x.ndim == 3:
        return _product(x, weight, bias)
    if weight.shape[1] == 1:
        return x * weight.t() if bias is None else torch.addcmul(bias, x, weight.t())
    much = x.numel() * (len(weight) + 2) >= 2**25 and x.dtype is torch.float32 and x.is_cpu
    if (
        much and _ONEDNN and not torch._C._len_torch_dispatch_stack()
    ):  # tools that count operations do not know it
        return torch.ops.mkldnn._linear_pointwise(x, weight.contiguous(), bias, "none", [], "")
    return F.linear(x, weight, bias)


class _Product(torch.autograd.Function):
    """`_product` with gradients by hand: autograd makes the gradient of the weight for each of the L matrices, then adds up."""

    @staticmethod
    def forward(ctx, x, weight, bias):
        ctx.bias = bias if bias is None else bias.shape
        ctx.save_for_backward(x, weight)
        return _fast_product(x, weight, bias)

    @staticmethod
    def backward(ctx, g):
        (x, weight), (need_x, need_weight, need_bias) = ctx.saved_tensors, ctx.needs_input_grad
        watched, dbias = (
            torch.is_grad_enabled() or torch._C._are_functorch_transforms_active(),
            None,
        )
        dx = (_product if watched else _fast_product)(g, weight.t()) if need_x else None
        dweight = _weight_gradient(x, g) if need_weight else None
        if need_bias:
            dbias = g.sum((0, 2)) if len(ctx.bias) < g.ndim - 1 else g.reshape(-1, *ctx.bias).sum(0)
        return dx, dweight, dbias


def _weight_gradient(x: Tensor, g: Tensor) -> Tensor:
    """(H, D), from the input (L, D[, R]) and the gradient (L, H[, R]) of a product. BLAS wants few rows and many columns."""
    d, h, right = x.shape[1], g.shape[1], x.shape[-1]
    if x.ndim == 2:
        return g.t() @ x if h <= d or d >= 16 else (x.t() @ g).t().contiguous()
    if h * d > right * (
        h + d
    ):  # the L terms of the sum are larger than their factors: one product of copies
        return g.transpose(0, 1).reshape(h, -1) @ x.transpose(0, 1).reshape(d, -1).t()
    return torch.bmm(g, x.mT).sum(0) if h <= d else torch.bmm(x, g.mT).sum(0).t().contiguous()


# ------------------------------------------------------------------------------------------------------ exact algebra
def kronecker_weight(layer: NdLinear | NdLinearSum) -> Tensor:
    """The dense matrix of a layer, weight_1 kron ... kron weight_N (summed over terms): (prod H, prod D), row-major.
    vec(layer(x)) = kronecker_weight(layer) @ vec(x) + vec(total_bias(layer)). Differentiable. prod D * prod H numbers."""
    return reduce(torch.add, [reduce(torch.kron, term.weights) for term in layer.terms])


def total_bias(layer: NdLinear | NdLinearSum) -> Tensor:
    """All that a layer adds, layer(0): shape `hidden_size`, zeros if it has no bias. Differentiable, O(prod H)."""
    if not _has_bias(layer):
        return layer.terms[0].weights[0].new_zeros(layer.hidden_size)
    return (
        layer.bias
        if isinstance(layer, NdLinearSum)
        else _total_bias(layer.weights, layer.biases, layer.order)
    )


@torch.no_grad()
def to_linear(layer: NdLinear | NdLinearSum | NdLinearLoRA) -> nn.Linear:
    """The same function on flattened axes as one torch.nn.Linear(prod D, prod H), with copies of the numbers.
    to_linear(layer)(x.flatten(-N)) = layer(x).flatten(-N). An NdLinearLoRA gives its merged form."""
    adapted, has_bias = isinstance(layer, NdLinearLoRA), _has_bias(layer)
    weight = layer.weight if adapted else kronecker_weight(layer)
    linear = nn.Linear(*weight.shape[::-1], has_bias, "meta", weight.dtype).to_empty(
        device=weight.device
    )
    linear.weight.copy_(weight)
    if has_bias:
        linear.bias.copy_(layer.bias if adapted else total_bias(layer).flatten())
    return linear


def rearrange(matrix: Tensor, input_dims: Shape, hidden_size: Shape) -> Tensor:
    """The rearrangement (prod H, prod D) -> (H_1 D_1, ..., H_N D_N) that groups the two indices of each mode.
    It turns A_1 kron ... kron A_N into the outer product of the flattened A_k and keeps the Frobenius norm, so that the
    nearest Kronecker product is the nearest tensor of rank one. Source: Van Loan and Pitsianis (1993). Raises ValueError."""
    dims, hidden = _shapes(input_dims, hidden_size)
    if tuple(matrix.shape) != (math.prod(hidden), math.prod(dims)):
        what = f"a matrix {tuple(matrix.shape)} does not fold into hidden_size {hidden} x input_dims {dims}"
        raise ValueError(f"{what}; choose sizes whose products are its (outputs, inputs)")
    pairs = [axis for k in range(len(dims)) for axis in (k, k + len(dims))]
    return (
        matrix.reshape(*hidden, *dims).permute(pairs).reshape([h * d for h, d in zip(hidden, dims)])
    )


@torch.no_grad()
def nearest_kronecker(
    matrix, input_dims, hidden_size, rank=1, *, restarts=0, seed=0, sweeps=500, tol=1e-12
):
    """The sum of `rank` Kronecker products nearest to a matrix (prod H, prod D) in the Frobenius norm.
    Returns (terms, error): matrix ~ sum over r of terms[r][0] kron ... kron terms[r][N-1] with terms[r][k] (H_k, D_k), and
    error = ||matrix - sum|| / ||matrix||. Works in float64. N <= 2 is exact, by singular value decomposition of the rearrangement.
    N > 2 gives a local optimum (the global one is NP-hard, and need not exist for rank > 1): the best of alternating least squares
    from the leading singular vectors of the unfoldings and from `restarts` random starts, at most `sweeps` rounds each, or until
    a round lowers the squared error by less than `tol`. Raises ValueError if the sizes do not fit or fewer terms are enough."""
    dims, hidden = _shapes(input_dims, hidden_size, rank)
    tensor = rearrange(matrix.detach().double(), dims, hidden)
    enough = tensor.numel() // max(tensor.shape)
    if rank > enough:
        raise ValueError(
            f"rank {rank} is too high for {dims} -> {hidden}: rank {enough} represents every matrix"
        )
    if len(dims) == 1:
        factors = [tensor[:, None]]
    elif len(dims) == 2:
        u, s, vh = torch.linalg.svd(tensor, full_matrices=False)
        factors = [u[:, :rank] * s[:rank], vh[:rank].T]
    else:
        noise = torch.Generator().manual_seed(seed)
        starts = [
            [torch.randn(n, rank, generator=noise).to(tensor) for n in tensor.shape]
            for _ in range(restarts + 1)
        ]
        for k, start in enumerate(starts[0]):
            unfolding = tensor.movedim(k, 0).flatten(1)
            start[:, : len(start)] = torch.linalg.eigh(unfolding @ unfolding.T)[1].flip(1)[:, :rank]
        factors = min(
            (_least_squares(tensor, start, sweeps, tol) for start in starts),
            key=lambda f: _error(tensor, f),
        )
    norms = torch.stack(
        [f.norm(dim=0) for f in factors]
    )  # share the size of a term evenly among its factors
    factors = [
        f * scale
        for f, scale in zip(factors, norms.prod(0) ** (1 / len(dims)) / norms.clamp_min(1e-300))
    ]
    terms = [
        [f[:, r].reshape(h, d).to(matrix.dtype) for f, h, d in zip(factors, hidden, dims)]
        for r in range(rank)
    ]
    return terms, _error(tensor, factors)


def _least_squares(tensor: Tensor, factors: list[Tensor], sweeps: int, tol: float) -> list[Tensor]:
    """Lower the error of tensor[i_1..i_N] ~ sum_r prod_k factors[k][i_k, r] in one factor after the other."""
    last = math.inf
    for _ in range(sweeps):
        for k in range(tensor.ndim):
            factors = [f if j == k else F.normalize(f, dim=0) for j, f in enumerate(factors)]
            others = factors[:k] + factors[k + 1 :]
            gram = reduce(torch.mul, [f.T @ f for f in others])
            factors[k] = (
                tensor.movedim(k, 0).flatten(1)
                @ _khatri_rao(others)
                @ torch.linalg.pinv(gram, hermitian=True)
            )
        last, previous = _error(tensor, factors) ** 2, last
        if previous - last < tol:
            break
    return factors


def _khatri_rao(factors: Sequence[Tensor]) -> Tensor:
    return reduce(
        lambda a, b: (a[:, None] * b).flatten(0, 1), factors
    )  # column r: Kronecker product of the columns r


def _error(target: Tensor, factors: Sequence[Tensor]) -> float:
    return (
        (target.flatten() - _khatri_rao(factors).sum(1)).norm() / target.norm().clamp_min(1e-300)
    ).item()


def _has_bias(layer: NdLinear | NdLinearSum | NdLinearLoRA) -> bool:
    return (layer.biases[0] if isinstance(layer, NdLinear) else layer.bias) is not None


# -------------------------------------------------------------------------------------------------------------- costs
def cheapest_order(input_dims: Shape, hidden_size: Shape) -> tuple[int, ...]:
    """The order of the modes 0..N-1 with the fewest multiply-adds: ascending 1/D_k - 1/H_k, equals in their order.
    Swapping neighbours i, j changes the cost of an order by a positive multiple of (1/D_i - 1/H_i) - (1/D_j - 1/H_j)."""
    dims, hidden = _shapes(input_dims, hidden_size)
    common = math.lcm(
        *dims, *hidden
    )  # compare integers: rounding would see differences between equals
    return tuple(sorted(range(len(dims)), key=lambda k: common // dims[k] - common // hidden[k]))


def count_macs(input_dims: Shape, hidden_size: Shape, order: Shape | None = None) -> int:
    """Multiply-adds per sample, modes in the given order (default 0, 1, ..., N-1); additions of biases not counted."""
    (size, hidden), macs = map(list, _shapes(input_dims, hidden_size)), 0
    for k in _order(order, len(size)):
        macs += math.prod(size) * hidden[k]
        size[k] = hidden[k]
    return macs


def count_parameters(
    input_dims: Shape, hidden_size: Shape, bias: bool = True, rank: int = 1
) -> int:
    """NdLinear: sum D_k H_k, with bias + sum H_k. NdLinearSum, rank > 1: rank * sum D_k H_k, with bias + prod H_k."""
    dims, hidden = _shapes(input_dims, hidden_size, rank)
    weights = rank * sum(d * h for d, h in zip(dims, hidden))
    return weights + bool(bias) * (sum(hidden) if rank == 1 else math.prod(hidden))


# ------------------------------------------------------------------------------------------------------- LoRA adapters
def near_square(n: int) -> tuple[int, int]:
    """n = a * b with a <= b as close as possible, e.g. 14336 -> (112, 128); a prime gives (1, n)."""
    return max(((a, n // a) for a in range(1, math.isqrt(n) + 1) if n % a == 0), default=(1, n))


class NdLinearLoRA(nn.Module):
    """A frozen torch.nn.Linear plus a trainable NdLinear update: y = base(x) + alpha * vec(NdLinear(fold(x))).
    base_layer               the Linear(prod D, prod H) to adapt; kept, its parameters are frozen
    input_dims, hidden_size  how its two sizes fold; by default into two near-square factors each
    alpha, dropout           factor of the update; probability of dropout on the input of the update, in training
    bias                     per-mode biases in the update (the paper's counts have none)
    options                  of the NdLinear `adapter`: transform_outer, init, dtype (by default that of the base layer)

    x (..., prod D) -> (..., prod H). Trains count_parameters(input_dims, hidden_size, bias) numbers. The update is zero at
    start: the mode executed last (in the defined order) is zero, the others are drawn. Without biases it is KronA, or LoKr
    with two full factors. While merged, the adapter gets no gradient. Raises ValueError or TypeError. Source: NdLinear-LoRA."""

    def __init__(
        self,
        base_layer,
        input_dims=None,
        hidden_size=None,
        *,
        alpha=1.0,
        dropout=0.0,
        bias=False,
        **options,
    ):
        super().__init__()
        if not isinstance(base_layer, nn.Linear):
            raise TypeError(
                f"NdLinearLoRA adapts a torch.nn.Linear, got {type(base_layer).__name__}"
            )
        self.in_features, self.out_features = sizes = (
            base_layer.in_features,
            base_layer.out_features,
        )
        default = near_square(sizes[0]), near_square(sizes[1])
        dims, hidden = _shapes(
            *(d if g is None else g for d, g in zip(default, (input_dims, hidden_size)))
        )
        if (math.prod(dims), math.prod(hidden)) != sizes:
            what = f"input_dims {dims} and hidden_size {hidden} do not multiply to the wrapped layer's {sizes}"
            raise ValueError(f"{what}; choose for example {default[0]} and {default[1]}")
        self.base_layer, like = base_layer.requires_grad_(False), base_layer.weight
        self.adapter = NdLinear(
            dims, hidden, bias=bias, **{"device": like.device, "dtype": like.dtype, **options}
        )
        for parameter in self.adapter.align_layers[self.adapter.order[-1]].parameters():
            nn.init.zeros_(parameter)
        self.alpha, self.dropout, self.merged = float(alpha), nn.Dropout(dropout), False
        self.register_buffer("merged_weight", None, persistent=False)
        self.register_buffer("merged_bias", None, persistent=False)

    @property
    def config(self) -> dict:
        """What rebuilds the function of this adapter on its base layer: NdLinearLoRA(base, **config)."""
        a = self.adapter
        config = {
            "input_dims": list(a.input_dims),
            "hidden_size": list(a.hidden_size),
            "alpha": self.alpha,
        }
        return config | {"bias": _has_bias(a), "transform_outer": a.transform_outer}

    @property
    def weight(self) -> Tensor:
        """The weight in effect, (prod H, prod D): what code that reads weights instead of calling layers should see."""
        return (self.base_layer.weight + self.alpha * kronecker_weight(self.adapter)).to(
            self.base_layer.weight.dtype
        )

    @property
    def bias(self) -> Tensor | None:
        """The bias in effect, (prod H,), or None."""
        base, update = self.base_layer.bias, self.alpha * total_bias(self.adapter).flatten()
        total = update if base is None else base + update
        return total.to(self.base_layer.weight.dtype) if _has_bias(self.adapter) else base

    def merge(self) -> None:
        """Compute with one dense matrix from now on. It is a copy: the base layer is not touched, `unmerge` is exact."""
        linear = to_linear(self)
        self.merged, self.merged_weight, self.merged_bias = (
            True,
            linear.weight.data,
            getattr(linear.bias, "data", None),
        )

    def unmerge(self) -> None:
        """Undo `merge`; loading a state_dict does it too. A state_dict never holds merged weights."""
        self.merged, self.merged_weight, self.merged_bias = False, None, None

    def _load_from_state_dict(self, *args, **kwargs) -> None:
        self.unmerge()
        super()._load_from_state_dict(*args, **kwargs)

    def forward(self, x: Tensor) -> Tensor:
        if self.merged:
            return F.linear(x, self.merged_weight, self.merged_bias)
        y, a = self.base_layer(x), self.adapter
        update = a(self.dropout(x).to(a.weights[0].dtype).unflatten(-1, a.input_dims)).flatten(
            -len(a.hidden_size)
        )
        return y + (self.alpha * update).to(y.dtype)

    def extra_repr(self) -> str:
        return f"alpha={self.alpha}, merged={self.merged}"


def apply_ndlinear_lora(
    model: nn.Module, target_modules: str | Iterable[str], *, freeze=True, **options
) -> nn.Module:
    """Put an NdLinearLoRA(linear, **options) in place of each nn.Linear of a model whose name matches; returns the model.
    target_modules: one or more patterns with shell wildcards for a whole dotted name or its last parts: "q_proj",
    "layers.[01].*". freeze: also freeze everything outside the adapters. Raises ValueError, and changes nothing, if no
    name matches or a layer cannot be adapted."""
    patterns = [target_modules] if isinstance(target_modules, str) else list(target_modules)
    taken = {
        part
        for m in model.modules()
        if isinstance(m, (NdLinear, NdLinearLoRA))
        for part in m.modules()
    } | {model}
    named = model.named_modules(remove_duplicate=False)
    linears = {name: m for name, m in named if isinstance(m, nn.Linear) and m not in taken}
    found = [
        m for name, m in linears.items() if any(fnmatchcase(f".{name}", f"*.{p}") for p in patterns)
    ]
    if not found:
        raise ValueError(
            f"target_modules {patterns} match none of the nn.Linear layers: {list(linears)[:20]}"
        )
    _swap(model, {layer: NdLinearLoRA(layer, **options) for layer in dict.fromkeys(found)})
    if freeze:
        model.requires_grad_(False)
    for layer in _adapters(model).values():
        layer.adapter.requires_grad_(True)
    return model


def _swap(model: nn.Module, new: dict[nn.Module, nn.Module]) -> None:
    for parent in list(model.modules()):
        for name, child in parent._modules.items():
            if child in new:  # under all its names
                setattr(parent, name, new[child])


def _adapters(model: nn.Module) -> dict[str, NdLinearLoRA]:
    found = {name: m for name, m in model.named_modules() if isinstance(m, NdLinearLoRA)}
    if not found:
        raise ValueError(
            "this model has no NdLinearLoRA; call apply_ndlinear_lora(model, target_modules) first"
        )
    return found


def lora_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """The parameters of the adapters alone, under their names in `model.state_dict()`. ValueError if there are none."""
    starts = tuple(f"{name}.adapter.".removeprefix(".") for name in _adapters(model))
    return {name: value for name, value in model.state_dict().items() if name.startswith(starts)}


def save_lora(model: nn.Module, path) -> None:
    """Write the adapters alone to a safetensors file: their parameters, and in its metadata how to rebuild them."""
    configs = json.dumps({name: layer.config for name, layer in _adapters(model).items()})
    tensors = {name: value.contiguous() for name, value in lora_state_dict(model).items()}
    _safetensors().save_file(tensors, path, {"ndlinear_lora": configs})


def load_lora(model: nn.Module, path) -> nn.Module:
    """Read a file of `save_lora` into a model, in place; layers not adapted yet become NdLinearLoRA. Raises ValueError."""
    with _safetensors().safe_open(path, "pt") as file:
        configs = json.loads((file.metadata() or {}).get("ndlinear_lora", "{}"))
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    modules = dict(model.named_modules(remove_duplicate=False))
    plain = [name for name in configs if name and isinstance(modules.get(name), nn.Linear)]
    wrong = [
        k
        for k in configs
        if k not in plain and getattr(modules.get(k), "config", None) != configs[k]
    ]
    if wrong or not configs:
        raise ValueError(
            f"{path} adapts {configs}; this model does not fit in {wrong}: is it the right file?"
        )
    _swap(model, {modules[name]: NdLinearLoRA(modules[name], **configs[name]) for name in plain})
    model.load_state_dict(tensors, strict=False)
    return model


def _safetensors():
    try:
        return importlib.import_module("safetensors.torch")
    except ImportError as error:
        raise ImportError(
            "save_lora and load_lora need safetensors: pip install safetensors"
        ) from error


# ------------------------------------------------------------------------------------------------------------- checks
def _shapes(
    input_dims: Shape, hidden_size: Shape, rank: int = 1
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    given = f"input_dims={input_dims!r}, hidden_size={hidden_size!r}" + (
        "" if rank == 1 else f", rank={rank!r}"
    )
    try:
        dims, hidden, rank = (
            tuple(map(index, input_dims)),
            tuple(map(index, hidden_size)),
            index(rank),
        )
    except TypeError:
        raise TypeError(
            f"{given} must be (sequences of) integers; write for example (8, 8) and (4, 4)"
        ) from None
    if not dims or len(dims) != len(hidden) or min(*dims, *hidden, rank) < 1:
        raise ValueError(
            f"{given} must be positive and equally many sizes (an axis that is to vanish gets size 1)"
        )
    return dims, hidden


def _order(order: Shape | None, n: int) -> Shape:
    if order is not None and sorted(order) != list(range(n)):
        raise ValueError(f"order {tuple(order)} must list each of the modes {tuple(range(n))} once")
    return range(n) if order is None else order


def _check_input(x: Tensor, dims: tuple[int, ...], weight: Tensor) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(
            f"expected a torch.Tensor of shape (..., {', '.join(map(str, dims))}), got {type(x).__name__}"
        )
    if x.shape[-len(dims) :] != dims:
        cure = f"move or reshape its axes so that it ends in {dims}; x.unflatten(-1, {dims}) if the last one is flat"
        raise ValueError(
            f"expected input of shape (..., {', '.join(map(str, dims))}), got {tuple(x.shape)}; {cure}"
        )
    if not isinstance(weight, Tensor) or (
        x.dtype == weight.dtype and x.device == weight.device
    ):  # not: quantised
        return
    device, floats = x.device.type, x.is_floating_point() or x.is_complex()
    autocast = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    if x.device != weight.device or not (floats and autocast):
        ours, theirs = (f"{tuple(t.shape)} {t.dtype} on {t.device}" for t in (x, weight))
        raise TypeError(
            f"input {ours} and weight {theirs} do not mix: convert one with .to(), or use torch.autocast"
        )
