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
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__version__ = "0.1.0"
__all__ = [
    "KroneckerFit", "NdLinear", "NdLinearLoRA", "NdLinearSum", "apply_ndlinear_lora", "cheapest_order", "count_macs", "count_parameters",
    "kronecker_weight", "load_lora", "lora_state_dict", "mode_product", "ndlinear", "near_square", "nearest_kronecker", "rearrange",
    "save_lora", "to_linear", "total_bias",
]  # fmt: skip

Shape = Sequence[int]
KroneckerFit = namedtuple("KroneckerFit", "weight_error bias_error")  # relative errors of a layer made by from_linear


# -------------------------------------------------------------------------------------------------------- Algorithm 1
def mode_product(x: Tensor, weight: Tensor, mode: int, bias: Tensor | None = None) -> Tensor:
    """Multiply axis `mode` of a tensor by a matrix and add a bias along it: X x_k W + b.
    x (..., D, ...), weight (H, D), bias (H,) or None -> (..., H, ...), possibly a transposed view. `mode` is a torch `dim`:
    -1 is the last axis whatever the number of batch axes; 0 is the first axis of `x`, a batch axis if it has any.
    Costs H multiply-adds per entry of `x`. Raises ValueError if there is no such axis or the sizes do not fit."""
    size = x.shape[mode] if -x.ndim <= mode < x.ndim else None
    if size is None or weight.shape[1:] != (size,) or (bias is not None and bias.shape != weight.shape[:1]):
        shapes = f"weight {tuple(weight.shape)} and bias {bias if bias is None else tuple(bias.shape)}"
        raise ValueError(f"axis {mode} of input {tuple(x.shape)} does not fit {shapes}; give (H, axis size) and (H,)")
    return F.linear(x.movedim(mode, -1), weight, bias).movedim(-1, mode)


def ndlinear(x: Tensor, weights: Sequence[Tensor], biases=None, order: Shape | None = None) -> Tensor:
    """Algorithm 1: mode after mode, multiply by the weight and add the bias.
    x (..., D_1, ..., D_N), weights[k] (H_k, D_k), biases[k] (H_k,) or None -> (..., H_1, ..., H_N). `order` lists the
    modes 0..N-1 as they are executed, by default 0, 1, ..., N-1; it changes the result only through the biases.
    Costs `count_macs(D, H, order)`. Raises ValueError or TypeError if anything does not fit."""
    n, biases = len(weights), [None] * len(weights) if biases is None else biases
    if n == 0 or len(biases) != n or any(w.ndim != 2 for w in weights):
        raise ValueError(f"give one weight (H, D) and one bias per mode, got {n} weights and {len(biases)} biases")
    _check_input(x, tuple(w.shape[1] for w in weights), weights[0])
    for k in _order(order, n):
        x = mode_product(x, weights[k], k - n, biases[k])
    return x.contiguous()


# --------------------------------------------------------------------------------------------------------- the layers
@torch.no_grad()
def _from_linear(cls, linear: nn.Linear, input_dims: Shape, hidden_size: Shape, rank: int = 1, **search):
    """The layer nearest to a dense Linear(prod D, prod H), by `nearest_kronecker(..., rank, **search)`.
    NdLinear.from_linear gives an NdLinear for rank 1; its per-mode biases cannot reach every bias: they are the least-squares fit.
    For rank > 1 it gives an NdLinearSum, as NdLinearSum.from_linear always does; that has the dense bias.
    `layer.fit` holds the relative errors (weight_error, bias_error). Raises ValueError or TypeError."""
    if not isinstance(linear, nn.Linear):
        raise TypeError(f"from_linear needs a torch.nn.Linear, got {type(linear).__name__}")
    terms, weight_error = nearest_kronecker(linear.weight, input_dims, hidden_size, rank, **search)
    options = {"bias": linear.bias is not None, "device": "meta", "dtype": linear.weight.dtype}  # meta: draws nothing
    if rank > 1 or issubclass(cls, NdLinearSum):
        cls, options = NdLinearSum, options | {"rank": rank}
    layer, bias_error = cls(input_dims, hidden_size, **options).to_empty(device=linear.weight.device), 0.0
    for term, values in zip(layer.terms, terms):
        for weight, value in zip(term.weights, values):
            weight.copy_(value)
    if linear.bias is not None and cls is NdLinearSum:
        layer.bias.copy_(linear.bias.reshape(layer.hidden_size))
    elif linear.bias is not None:  # the total bias is linear in the biases: least squares with its Jacobian
        weights, target, sizes = [w.double() for w in layer.weights], linear.bias.double(), layer.hidden_size
        jacobian = torch.func.jacfwd(lambda b: _total_bias(weights, b.split(sizes), layer.order))
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
    execution                "planned": the same function by the fastest way known, `plan()`; keeps the inputs of its steps for backward
                             "recompute": the same, but keeps the input only and computes the others once more in backward
                             "sequential": Algorithm 1 literally, the reference

    Parameters `align_layers.{k}.weight` (H_k, D_k) and, with `bias`, `.bias` (H_k,): sum D_k H_k + sum H_k numbers.
    `order` is the order that defines what the biases do, `execution_order` the one with the fewest multiply-adds.
    Raises ValueError or TypeError on sizes or input that do not fit. Source: Algorithm 1."""

    def __init__(self, input_dims, hidden_size, transform_outer=True, bias=True, *, init="linear", execution="planned", device=None, dtype=None):  # fmt: skip
        super().__init__()
        self.input_dims, self.hidden_size = dims, hidden = _shapes(input_dims, hidden_size)
        if init not in ("linear", "paper", "unit"):
            raise ValueError(f'init must be "linear", "paper" or "unit", got {init!r}')
        if execution not in ("planned", "recompute", "sequential"):
            raise ValueError(f'execution must be "planned", "recompute" or "sequential", got {execution!r}')
        self.transform_outer, self.init, self.execution, self.fit = bool(transform_outer), init, execution, None
        self.order = tuple(range(len(dims)))[:: 1 if transform_outer else -1]
        orders = (self.order,) if execution == "sequential" else (self.order, cheapest_order(dims, hidden))
        self.execution_order = min(orders, key=lambda o: count_macs(dims, hidden, o))
        self._plans, self._entries = {}, math.prod(dims)
        self.align_layers = nn.ModuleList(nn.Linear(d, h, bias, device, dtype) for d, h in zip(dims, hidden))
        self.plan()  # now: a compiler should find it, not trace the search
        if init != "linear":
            self.reset_parameters()

    weights = property(lambda self: [m.weight for m in self.align_layers], doc="(H_k, D_k) each.")
    biases = property(lambda self: [getattr(m, "bias", None) for m in self.align_layers], doc="(H_k,) each or None.")
    terms = property(lambda self: [self], doc="A sum of one term: itself.")
    from_linear = classmethod(_from_linear)

    def reset_parameters(self) -> None:
        """Draw all parameters anew, as `init` says."""
        for layer in self.align_layers:
            layer.reset_parameters()
            if self.init != "linear":
                bound = math.sqrt(6 / sum(layer.weight.shape) if self.init == "paper" else 3 / layer.in_features)
                nn.init.uniform_(layer.weight, -bound, bound)
                if layer.bias is not None:
                    nn.init.zeros_(layer.bias)

    def plan(self, batch: int = 256, needs_grad: bool = True) -> Plan:
        """What runs for `batch` samples, with or without gradients; print it. Traced programs always run `plan()`."""
        key = (batch.bit_length(), needs_grad)
        if key not in self._plans:
            self._plans[key] = _search(self.input_dims, self.hidden_size, self.order, *key, _has_bias(self))
        return self._plans[key]

    def forward(self, x: Tensor) -> Tensor:
        modes = self._modules["align_layers"]._modules.values()
        weights, biases, plain = [], [], self.execution != "sequential"
        for mode in modes:  # plain: nobody quantised, wrapped, pruned or hooked a mode; its parameters say it all
            weights.append(mode._parameters.get("weight"))
            biases.append(mode._parameters.get("bias"))
            plain = plain and type(mode) is nn.Linear and not (mode._forward_hooks or mode._forward_pre_hooks)
        _check_input(x, self.input_dims, weights[0])
        if not plain or any(w is None for w in weights) or any((b is None) != (biases[0] is None) for b in biases):
            for axis in (k - len(self.order) for k in self.order):  # Algorithm 1
                x = self.align_layers[axis](x.movedim(axis, -1)).movedim(-1, axis)
            return x.contiguous()
        eager = _is_eager(x)
        grad = eager and torch.is_grad_enabled()
        plan = self.plan(x.numel() // self._entries, grad) if eager else self._plans[9, True]
        if plan.inline:
            tensors = [*[weights[k] for k in plan.order], *[biases[k] for k in plan.order]]
        else:
            beta = None if biases[0] is None else _total_bias(weights, biases, self.order)
            tensors = [reduce(_kron, [weights[k] for k in modes]) for modes in plan.groups]
            tensors += [None] * (len(tensors) - 1) + [beta]
        if grad:
            y = _Chain.apply(plan, self.execution == "recompute", x, *tensors)
        else:
            y = _eager(plan, x, tensors) if eager else _traced(plan, x, tensors)
        return y.view(x.shape[: -len(self.order)] + self.hidden_size)

    def __repr__(self) -> str:
        options = f"transform_outer={self.transform_outer}, bias={_has_bias(self)}, init={self.init!r}, execution={self.execution!r}"
        return f"NdLinear({self.input_dims}, {self.hidden_size}, {options})"


class NdLinearSum(nn.Module):
    """A sum of `rank` bias-free NdLinear layers plus one full bias: (..., D_1, ..., D_N) -> (..., H_1, ..., H_N).
    Arguments as NdLinear. With enough terms (N = 2: min(D_1 H_1, D_2 H_2)) it is any dense layer. Parameters
    `terms.{r}.align_layers.{k}.weight` and `bias` (H_1, ..., H_N): rank * sum D_k H_k + prod H_k numbers; `rank` times
    the multiply-adds of NdLinear. Drawn like NdLinear over sqrt(rank), so that the output variance keeps its size.
    Raises like NdLinear. Source: the extension to higher rank that the paper names as future work."""

    def __init__(self, input_dims, hidden_size, rank=1, bias=True, *, init="linear", device=None, dtype=None):
        super().__init__()
        self.input_dims, self.hidden_size = _shapes(input_dims, hidden_size, rank)
        self.rank, self.init, self.fit, like = rank, init, None, {"device": device, "dtype": dtype}
        terms = (NdLinear(input_dims, hidden_size, bias=False, init=init, **like) for _ in range(rank))
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
    first, *later = order
    beta = biases[first]
    for k in later:  # the axis of mode k comes last in the order 1..N and first in the order N..1
        rows, bias = weights[k].sum(1), biases[k]
        factors = (beta.reshape(-1, 1), rows[None]) if k > first else (rows[:, None], beta.reshape(1, -1))
        beta = torch.addmm(bias if k > first else bias[:, None], *factors)
    return beta.flatten()


# ---------------------------------------------------------------------------------------------------------- the engine
class Step(NamedTuple):
    """One product: the data as (batch * left, dim, right) times the Kronecker product of the weights of `modes`, (hidden, dim).
    `sizes` and `move`, if given: first bring the axes (of the groups, in their present order) into the order `move`."""

    modes: tuple[int, ...]
    left: int
    dim: int
    hidden: int
    right: int
    sizes: tuple[int, ...] | None
    move: tuple[int, ...] | None


class Plan(NamedTuple):
    """How a layer is executed; `print` shows it. Costs are per sample; bytes are read and written, for float32."""

    steps: tuple[Step, ...]
    sizes: tuple[int, ...] | None  # axes after the last step, if they
    move: tuple[int, ...] | None  # have to be moved back
    inline: bool  # biases added mode by mode, else their sum at the end
    seconds: float  # estimate
    order: tuple[int, ...]  # modes as executed
    groups: tuple[tuple[int, ...], ...]  # modes that run as one
    entries: int  # prod D
    size: int  # prod H
    block: int  # samples that run together

    macs = property(lambda self: sum(math.prod(s[1:5]) for s in self.steps), doc="Multiply-adds.")
    bytes = property(
        lambda self: sum(4 * s.left * s.right * (s.dim + s.hidden) for s in self.steps), doc="Moved by products."
    )
    saved = property(lambda self: sum(s.left * s.right * s.dim for s in self.steps), doc="Numbers kept for backward.")

    def __str__(self) -> str:
        rows = [("modes", "left", "dim", "hidden", "right", "as", "multiply-adds")]
        for s in self.steps:
            how = "matrix product" if s.right == 1 else "batched product"
            rows.append(
                (
                    "x".join(str(k + 1) for k in s.modes),
                    *map(str, s[1:5]),
                    "move, " * bool(s.move) + how,
                    f"{math.prod(s[1:5]):,}",
                )
            )
        widths = [max(map(len, column)) for column in zip(*rows)]
        table = "\n".join("  ".join(v.rjust(w) for v, w in zip(row, widths)) for row in rows)
        return f"{table}\nbiases {'mode by mode' if self.inline else 'folded'}; {self.macs:,} multiply-adds, {self.bytes:,} bytes, {self.saved:,} numbers kept per sample"


@lru_cache(4096)
def _search(dims, hidden, order, bits, grad, bias) -> Plan:
    """The fastest plan by estimate: all groupings of neighbours, all orders; the plain loop if nothing is gained."""
    n, passes, batch = len(dims), 3 if grad else 1, 1 << bits
    plans = []
    for cuts in itertools.product((0, 1), repeat=n - 1):
        edges = [0, *(k + 1 for k in range(n - 1) if cuts[k]), n]
        groups = [tuple(range(a, b)) for a, b in zip(edges, edges[1:])]
        d, h = ([math.prod(s[k] for k in g) for g in groups] for s in (dims, hidden))
        if any(
            len(g) > 1 and a * b > max(4096, 4 * max(dims[k] * hidden[k] for k in g)) and a * b > batch * (a + b)
            for g, a, b in zip(groups, d, h)
        ):
            continue
        fixed = sum(2e-5 * (len(g) - 1) + 2e-10 * a * b for g, a, b in zip(groups, d, h))
        if bias:
            fixed += 1e-5 * n + 1e-10 * batch * math.prod(hidden)

        @lru_cache(None)
        def rest(layout, todo, groups=groups, d=d, h=h):
            sizes = [d[g] if g in todo else h[g] for g in layout]
            if not todo:
                home = layout == tuple(range(len(groups)))
                return (
                    (0.0, (), None, None)
                    if home
                    else (
                        5e-6 + 6e-10 * batch * math.prod(sizes),
                        (),
                        tuple(sizes),
                        (0, *(layout.index(g) + 1 for g in range(len(groups)))),
                    )
                )
            options = []
            for g in todo if n <= 5 else sorted(todo)[:1]:
                p = layout.index(g)
                for move in (False, True) if p + 1 < len(layout) and n <= 5 else (False,):
                    after = (*layout[:p], *layout[p + 1 :], g) if move else layout
                    left, right = math.prod(sizes[:p]), math.prod(sizes[p + 1 :])
                    cost = 0.0
                    if move:
                        cost, left, right = 5e-6 + 6e-10 * batch * math.prod(sizes), left * right, 1
                    more, steps, *end = rest(after, todo - {g})
                    axes = (0, *(layout.index(q) + 1 for q in after))
                    step = Step(
                        groups[g], left, d[g], h[g], right, tuple(sizes) if move else None, axes if move else None
                    )
                    options.append((cost + _seconds(batch * left, d[g], h[g], right) + more, (step, *steps), *end))
            return min(options, key=lambda o: o[0])

        cost, steps, *end = rest(tuple(range(len(groups))), frozenset(range(len(groups))))
        plans.append(_made(steps, *end, False, passes * (cost + fixed)))
    sizes, steps, cost = list(dims), [], 0.0
    for k in order:  # biases inline: one product per mode, in the defined order
        left, right = math.prod(sizes[:k]), math.prod(sizes[k + 1 :])
        steps.append(Step((k,), left, dims[k], hidden[k], right, None, None))
        cost += passes * (
            _seconds(batch * left, dims[k], hidden[k], right)
            + bias * (1e-10 if right == 1 else 2e-10) * batch * left * hidden[k] * right
        )
        sizes[k] = hidden[k]
    plans.append(_made(tuple(steps), None, None, True, cost))
    return min(plans, key=lambda p: p.seconds)


def _made(steps, sizes, move, inline, seconds):
    widest = max(s.left * s.right * max(s.dim, s.hidden) for s in steps)
    busy = max(4 * s.dim * s.hidden // ((s.dim + s.hidden) * s.left * s.right) for s in steps)  # data outweigh matrices
    block = max(2**18 // widest, busy, 1) if len(steps) > 1 else 1 << 62
    order, groups = tuple(k for s in steps for k in s.modes), tuple(s.modes for s in steps)
    entries, size = steps[0].left * steps[0].dim * steps[0].right, math.prod(s.hidden for s in steps)
    return Plan(steps, sizes, move, inline, seconds, order, groups, entries, size, block)


def _seconds(left, dim, hidden, right) -> float:
    """Time of one product on two CPU cores."""
    rows, width = (left, hidden) if right == 1 else (left * hidden, right)
    thin = rows * (6e-9 + 2e-10 * dim) if 1 < width < 16 else 6e-10 * rows if width == 1 else 0.0
    if right > 1:
        thin = thin * 2 + left * 1e-7
    return 5e-6 + 9e-12 * left * dim * hidden * right + 7.5e-11 * left * right * (dim + hidden) + thin


def _kron(a: Tensor, b: Tensor) -> Tensor:
    return (a[:, None, :, None] * b[:, None]).reshape(a.shape[0] * b.shape[0], a.shape[1] * b.shape[1])


def _is_eager(x: Tensor) -> bool:
    """Whether this is an ordinary call: nothing compiles, traces, transforms or casts."""
    return not (
        torch.compiler.is_compiling()
        or type(x) not in _PLAIN
        or torch._C._are_functorch_transforms_active()
        or torch._C._get_tracing_state() is not None
        or torch._C._is_any_autocast_enabled()
        or torch.autograd.forward_ad._current_level >= 0
    )


_PLAIN, _MKLDNN = (Tensor, nn.Parameter), torch.backends.mkldnn.is_available()


def _gemm(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """F.linear of a matrix, eager: oneDNN beats BLAS at many rows and adds the bias for nothing; one column is an outer product."""
    if weight.shape[1] == 1:
        row = weight.view(1, -1)
        return x * row if bias is None else torch.addcmul(bias, x, row)
    if _MKLDNN and x.shape[0] >= 2048 and x.dtype is torch.float32 and x.is_cpu:
        return torch.ops.mkldnn._linear_pointwise(x, weight.contiguous(), bias, "none", [], "")
    return F.linear(x, weight, bias)


def _products(plan: Plan, x: Tensor, tensors: Sequence, gemm=F.linear, keep: list | None = None) -> Tensor:
    """All products of a plan; appends the inputs of all but the first to `keep`. tensors: matrices, then biases of the steps."""
    n, z = len(plan.steps), x
    for i, (_, _, dim, hidden, right, sizes, move) in enumerate(plan.steps):
        matrix, bias = tensors[i], tensors[n + i]
        if move:
            z = z.reshape(-1, *sizes).permute(move)
        z = z.reshape(-1, dim) if right == 1 else z.reshape(-1, dim, right)
        if keep is not None and i:
            keep.append(z)
        if bias is not None and bias.shape[0] != hidden:
            bias = None  # the total of all modes, (prod H,), comes at the end
        if right == 1:
            z = gemm(z, matrix, bias)
        elif bias is None:
            z = torch.bmm(matrix.expand(z.shape[0], hidden, dim), z)
        else:
            z = torch.baddbmm(bias[:, None], matrix.expand(z.shape[0], hidden, dim), z)
    if plan.move:
        z = z.reshape(-1, *plan.sizes).permute(plan.move).clone(memory_format=torch.contiguous_format)
    return z


def _traced(plan: Plan, x: Tensor, tensors: Sequence) -> Tensor:
    """The plan in operations that anything can trace, transform or differentiate."""
    y, bias = _products(plan, x, tensors), tensors[-1]
    return y if bias is None or bias.shape[0] == plan.steps[-1].hidden else y.reshape(-1, plan.size) + bias.to(y.dtype)


def _eager(plan: Plan, x: Tensor, tensors: Sequence, keep: list | None = None) -> Tensor:
    """The same without a graph, in blocks of samples that stay in the cache."""
    bias, rows = tensors[-1], x.numel() // plan.entries
    if bias is not None and bias.shape[0] == plan.steps[-1].hidden:
        bias = None  # has been added
    if rows <= plan.block or not x.is_cpu:
        y = _products(plan, x, tensors, _gemm, keep)
        if bias is not None:
            y.view(-1, plan.size).add_(bias)
        return y
    y = x.new_empty(rows, plan.size)
    for part, out in zip(x.reshape(rows, -1).split(plan.block), y.split(plan.block)):
        z = _products(plan, part, tensors, _gemm, keep).view(out.shape)
        out.copy_(z) if bias is None else torch.add(z, bias, out=out)
    return y


class _Chain(torch.autograd.Function):
    """`_eager` with its gradients in as few passes over memory."""

    @staticmethod
    def forward(ctx, plan, recompute, x, *tensors):
        keep = None if recompute else []
        y = _eager(plan, x, tensors, keep)
        ctx.plan = plan
        ctx.save_for_backward(x, *tensors[: len(plan.steps)], *(keep or ()))
        return y

    @staticmethod
    def backward(ctx, g):
        plan, need = ctx.plan, ctx.needs_input_grad[2:]
        n = len(plan.steps)
        x, *rest = ctx.saved_tensors
        matrices, kept = rest[:n], rest[n:]
        if torch.is_grad_enabled() or torch._C._are_functorch_transforms_active():
            return None, None, *_gradients_traced(plan, x, matrices, need, g)
        grads, rows = [None] * (2 * n + 1), x.numel() // plan.entries
        if rows <= plan.block or not x.is_cpu:
            dx = _gradients(plan, matrices, need, x, kept, g.contiguous(), grads)
            grads[0] = dx.reshape(x.shape) if need[0] else None
            return None, None, *grads
        if need[0]:
            grads[0] = x.new_empty(x.shape)
        out = grads[0].view(rows, -1).split(plan.block) if need[0] else [None] * rows
        parts = zip(x.reshape(rows, -1).split(plan.block), g.reshape(rows, -1).split(plan.block), out)
        for i, (part, gradient, into) in enumerate(parts):
            dx = _gradients(plan, matrices, need, part, kept[i * (n - 1) : (i + 1) * (n - 1)], gradient, grads)
            if need[0]:
                into.copy_(dx.reshape(into.shape))
        return None, None, *grads


def _gradients(plan, matrices, need, x, kept, g, grads) -> Tensor:
    """Adds the gradients of matrices and biases to `grads`; returns that of x. `kept`: inputs of the other steps, or nothing."""
    n = len(plan.steps)
    if len(kept) < n - 1:
        _products(plan, x, [*matrices, *[None] * n], _gemm, kept := [])

    def add(i, value):
        grads[i] = value() if grads[i] is None else grads[i].add_(value())

    if need[2 * n] and not plan.inline:
        add(2 * n, lambda: g.reshape(-1, plan.size).sum(0))
    if plan.move:
        g = _unmove(g, plan.sizes, plan.move)
    for i in reversed(range(n)):
        _, _, dim, hidden, right, sizes, move = plan.steps[i]
        z, matrix, deeper = kept[i - 1] if i else x, matrices[i], i > 0 or need[0]
        if i == 0 and move:
            z = z.reshape(-1, *sizes).permute(move)
        z, g = (t.reshape(-1, k) if right == 1 else t.reshape(-1, k, right) for t, k in ((z, dim), (g, hidden)))
        if need[1 + i]:
            add(1 + i, lambda: _outer(g, z, hidden, dim, right))
        if plan.inline and need[1 + n + i]:
            add(1 + n + i, lambda: g.sum(0 if right == 1 else (0, 2)))
        if deeper:
            g = _gemm(g, matrix.t()) if right == 1 else torch.bmm(matrix.t().expand(g.shape[0], dim, hidden), g)
            if move:
                g = _unmove(g, sizes, move)
    return g


def _outer(g, z, hidden, dim, right):
    """The gradient (hidden, dim) of the matrix of a step: sum over all but the axis of the step. MKL likes few rows."""
    if right == 1:
        return g.t() @ z if hidden <= dim or dim >= 16 else (z.t() @ g).t().contiguous()
    if right < 16:
        return g.transpose(0, 1).reshape(hidden, -1) @ z.transpose(0, 1).reshape(dim, -1).t()
    if hidden <= dim:
        return torch.bmm(g, z.transpose(1, 2)).sum(0)
    return torch.bmm(z, g.transpose(1, 2)).sum(0).t().contiguous()


def _unmove(g, sizes, move):
    return g.reshape(-1, *[sizes[a - 1] for a in move[1:]]).permute([move.index(a) for a in range(len(move))])


def _gradients_traced(plan, x, matrices, need, g):
    """The gradients by autograd, so that they have gradients themselves. They do not depend on the biases: zeros will do."""
    n = len(matrices)
    lengths = [s.hidden for s in plan.steps] if plan.inline else [plan.size] * n
    with torch.enable_grad():
        biases = [g.new_zeros(k, requires_grad=True) if w else None for k, w in zip(lengths, need[1 + n :])]
        inputs = [
            t.view_as(t) for t in (x, *matrices)
        ] + biases  # views: what depends on what else is not ours to follow
        y = _traced(plan, inputs[0], inputs[1:])
        found = iter(
            torch.autograd.grad(y, [t for t, w in zip(inputs, need) if w], g.reshape(y.shape), create_graph=True)
        )
    return [next(found) if w else None for w in need]


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
        else _total_bias(layer.weights, layer.biases, layer.order).view(layer.hidden_size)
    )


@torch.no_grad()
def to_linear(layer: NdLinear | NdLinearSum | NdLinearLoRA) -> nn.Linear:
    """The same function on flattened axes as one torch.nn.Linear(prod D, prod H), with copies of the numbers.
    to_linear(layer)(x.flatten(-N)) = layer(x).flatten(-N). An NdLinearLoRA gives its merged form."""
    adapted, has_bias = isinstance(layer, NdLinearLoRA), _has_bias(layer)
    weight = layer.weight if adapted else kronecker_weight(layer)
    linear = nn.Linear(*weight.shape[::-1], has_bias, "meta", weight.dtype).to_empty(device=weight.device)
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
    return matrix.reshape(*hidden, *dims).permute(pairs).reshape([h * d for h, d in zip(hidden, dims)])


@torch.no_grad()
def nearest_kronecker(matrix, input_dims, hidden_size, rank=1, *, restarts=0, seed=0, sweeps=500, tol=1e-12):
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
        raise ValueError(f"rank {rank} is too high for {dims} -> {hidden}: rank {enough} represents every matrix")
    if len(dims) == 1:
        factors = [tensor[:, None]]
    elif len(dims) == 2:
        u, s, vh = torch.linalg.svd(tensor, full_matrices=False)
        factors = [u[:, :rank] * s[:rank], vh[:rank].T]
    else:
        noise = torch.Generator().manual_seed(seed)
        starts = [[torch.randn(n, rank, generator=noise).to(tensor) for n in tensor.shape] for _ in range(restarts + 1)]
        for k, start in enumerate(starts[0]):
            unfolding = tensor.movedim(k, 0).flatten(1)
            start[:, : len(start)] = torch.linalg.eigh(unfolding @ unfolding.T)[1].flip(1)[:, :rank]
        factors = min((_least_squares(tensor, start, sweeps, tol) for start in starts), key=lambda f: _error(tensor, f))
    norms = torch.stack([f.norm(dim=0) for f in factors])  # share the size of a term evenly among its factors
    factors = [f * scale for f, scale in zip(factors, norms.prod(0) ** (1 / len(dims)) / norms.clamp_min(1e-300))]
    terms = [[f[:, r].reshape(h, d).to(matrix.dtype) for f, h, d in zip(factors, hidden, dims)] for r in range(rank)]
    return terms, _error(tensor, factors)


def _least_squares(tensor: Tensor, factors: list[Tensor], sweeps: int, tol: float) -> list[Tensor]:
    """Lower the error of tensor[i_1..i_N] ~ sum_r prod_k factors[k][i_k, r] in one factor after the other."""
    last = math.inf
    for _ in range(sweeps):
        for k in range(tensor.ndim):
            factors = [f if j == k else F.normalize(f, dim=0) for j, f in enumerate(factors)]
            others = factors[:k] + factors[k + 1 :]
            gram = reduce(torch.mul, [f.T @ f for f in others])
            factors[k] = tensor.movedim(k, 0).flatten(1) @ _khatri_rao(others) @ torch.linalg.pinv(gram, hermitian=True)
        last, previous = _error(tensor, factors) ** 2, last
        if previous - last < tol:
            break
    return factors


def _khatri_rao(factors: Sequence[Tensor]) -> Tensor:
    return reduce(lambda a, b: (a[:, None] * b).flatten(0, 1), factors)  # column r: Kronecker product of the columns r


def _error(target: Tensor, factors: Sequence[Tensor]) -> float:
    return ((target.flatten() - _khatri_rao(factors).sum(1)).norm() / target.norm().clamp_min(1e-300)).item()


def _has_bias(layer: NdLinear | NdLinearSum | NdLinearLoRA) -> bool:
    return (layer.biases[0] if isinstance(layer, NdLinear) else layer.bias) is not None


# -------------------------------------------------------------------------------------------------------------- costs
def cheapest_order(input_dims: Shape, hidden_size: Shape) -> tuple[int, ...]:
    """The order of the modes 0..N-1 with the fewest multiply-adds: ascending 1/D_k - 1/H_k, equals in their order.
    Swapping neighbours i, j changes the cost of an order by a positive multiple of (1/D_i - 1/H_i) - (1/D_j - 1/H_j)."""
    dims, hidden = _shapes(input_dims, hidden_size)
    common = math.lcm(*dims, *hidden)  # compare integers: rounding would see differences between equals
    return tuple(sorted(range(len(dims)), key=lambda k: common // dims[k] - common // hidden[k]))


def count_macs(input_dims: Shape, hidden_size: Shape, order: Shape | None = None) -> int:
    """Multiply-adds per sample, modes in the given order (default 0, 1, ..., N-1); additions of biases not counted."""
    (size, hidden), macs = map(list, _shapes(input_dims, hidden_size)), 0
    for k in _order(order, len(size)):
        macs += math.prod(size) * hidden[k]
        size[k] = hidden[k]
    return macs


def count_parameters(input_dims: Shape, hidden_size: Shape, bias: bool = True, rank: int = 1) -> int:
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

    def __init__(self, base_layer, input_dims=None, hidden_size=None, *, alpha=1.0, dropout=0.0, bias=False, **options):
        super().__init__()
        if not isinstance(base_layer, nn.Linear):
            raise TypeError(f"NdLinearLoRA adapts a torch.nn.Linear, got {type(base_layer).__name__}")
        self.in_features, self.out_features = sizes = base_layer.in_features, base_layer.out_features
        default = near_square(sizes[0]), near_square(sizes[1])
        dims, hidden = _shapes(*(d if g is None else g for d, g in zip(default, (input_dims, hidden_size))))
        if (math.prod(dims), math.prod(hidden)) != sizes:
            what = f"input_dims {dims} and hidden_size {hidden} do not multiply to the wrapped layer's {sizes}"
            raise ValueError(f"{what}; choose for example {default[0]} and {default[1]}")
        self.base_layer, like = base_layer.requires_grad_(False), base_layer.weight
        self.adapter = NdLinear(dims, hidden, bias=bias, **{"device": like.device, "dtype": like.dtype, **options})
        for parameter in self.adapter.align_layers[self.adapter.order[-1]].parameters():
            nn.init.zeros_(parameter)
        self.alpha, self.dropout, self.merged = float(alpha), nn.Dropout(dropout), False
        self.register_buffer("merged_weight", None, persistent=False)
        self.register_buffer("merged_bias", None, persistent=False)

    @property
    def config(self) -> dict:
        """What rebuilds the function of this adapter on its base layer: NdLinearLoRA(base, **config)."""
        a = self.adapter
        config = {"input_dims": list(a.input_dims), "hidden_size": list(a.hidden_size), "alpha": self.alpha}
        return config | {"bias": _has_bias(a), "transform_outer": a.transform_outer}

    @property
    def weight(self) -> Tensor:
        """The weight in effect, (prod H, prod D): what code that reads weights instead of calling layers should see."""
        return (self.base_layer.weight + self.alpha * kronecker_weight(self.adapter)).to(self.base_layer.weight.dtype)

    @property
    def bias(self) -> Tensor | None:
        """The bias in effect, (prod H,), or None."""
        base, update = self.base_layer.bias, self.alpha * total_bias(self.adapter).flatten()
        total = update if base is None else base + update
        return total.to(self.base_layer.weight.dtype) if _has_bias(self.adapter) else base

    def merge(self) -> None:
        """Compute with one dense matrix from now on. It is a copy: the base layer is not touched, `unmerge` is exact."""
        linear = to_linear(self)
        self.merged, self.merged_weight, self.merged_bias = True, linear.weight.data, getattr(linear.bias, "data", None)

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
        update = a(self.dropout(x).to(a.weights[0].dtype).unflatten(-1, a.input_dims)).flatten(-len(a.hidden_size))
        return y + (self.alpha * update).to(y.dtype)

    def extra_repr(self) -> str:
        return f"alpha={self.alpha}, merged={self.merged}"


def apply_ndlinear_lora(model: nn.Module, target_modules: str | Iterable[str], *, freeze=True, **options) -> nn.Module:
    """Put an NdLinearLoRA(linear, **options) in place of each nn.Linear of a model whose name matches; returns the model.
    target_modules: one or more patterns with shell wildcards for a whole dotted name or its last parts: "q_proj",
    "layers.[01].*". freeze: also freeze everything outside the adapters. Raises ValueError, and changes nothing, if no
    name matches or a layer cannot be adapted."""
    patterns = [target_modules] if isinstance(target_modules, str) else list(target_modules)
    taken = {part for m in model.modules() if isinstance(m, (NdLinear, NdLinearLoRA)) for part in m.modules()} | {model}
    named = model.named_modules(remove_duplicate=False)
    linears = {name: m for name, m in named if isinstance(m, nn.Linear) and m not in taken}
    found = [m for name, m in linears.items() if any(fnmatchcase(f".{name}", f"*.{p}") for p in patterns)]
    if not found:
        raise ValueError(f"target_modules {patterns} match none of the nn.Linear layers: {list(linears)[:20]}")
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
        raise ValueError("this model has no NdLinearLoRA; call apply_ndlinear_lora(model, target_modules) first")
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
    wrong = [k for k in configs if k not in plain and getattr(modules.get(k), "config", None) != configs[k]]
    if wrong or not configs:
        raise ValueError(f"{path} adapts {configs}; this model does not fit in {wrong}: is it the right file?")
    _swap(model, {modules[name]: NdLinearLoRA(modules[name], **configs[name]) for name in plain})
    model.load_state_dict(tensors, strict=False)
    return model


def _safetensors():
    try:
        return importlib.import_module("safetensors.torch")
    except ImportError as error:
        raise ImportError("save_lora and load_lora need safetensors: pip install safetensors") from error


# ------------------------------------------------------------------------------------------------------------- checks
def _shapes(input_dims: Shape, hidden_size: Shape, rank: int = 1) -> tuple[tuple[int, ...], tuple[int, ...]]:
    given = f"input_dims={input_dims!r}, hidden_size={hidden_size!r}" + ("" if rank == 1 else f", rank={rank!r}")
    try:
        dims, hidden, rank = tuple(map(index, input_dims)), tuple(map(index, hidden_size)), index(rank)
    except TypeError:
        raise TypeError(f"{given} must be (sequences of) integers; write for example (8, 8) and (4, 4)") from None
    if not dims or len(dims) != len(hidden) or min(*dims, *hidden, rank) < 1:
        raise ValueError(f"{given} must be positive and equally many sizes (an axis that is to vanish gets size 1)")
    return dims, hidden


def _order(order: Shape | None, n: int) -> Shape:
    if order is not None and sorted(order) != list(range(n)):
        raise ValueError(f"order {tuple(order)} must list each of the modes {tuple(range(n))} once")
    return range(n) if order is None else order


def _check_input(x: Tensor, dims: tuple[int, ...], weight: Tensor) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"expected a torch.Tensor of shape (..., {', '.join(map(str, dims))}), got {type(x).__name__}")
    if tuple(x.shape[max(x.ndim - len(dims), 0) :]) != dims:
        cure = f"move or reshape its axes so that it ends in {dims}; x.unflatten(-1, {dims}) if the last one is flat"
        raise ValueError(f"expected input of shape (..., {', '.join(map(str, dims))}), got {tuple(x.shape)}; {cure}")
    if not isinstance(weight, Tensor) or (x.device == weight.device and x.dtype == weight.dtype):  # not: quantised
        return
    device, floats = x.device.type, x.is_floating_point() or x.is_complex()
    autocast = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    if x.device != weight.device or not (floats and autocast):
        ours, theirs = (f"{tuple(t.shape)} {t.dtype} on {t.device}" for t in (x, weight))
        raise TypeError(f"input {ours} and weight {theirs} do not mix: convert one with .to(), or use torch.autocast")
