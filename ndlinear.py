"""NdLinear: a linear layer for tensors. It multiplies every axis by its own small matrix.

    Y = X x_1 W_1 x_2 W_2 ... x_N W_N + beta
    vec(Y) = (W_1 kron ... kron W_N)^T vec(X) + vec(beta)

    X, Y   input (..., D_1, ..., D_N) and output (..., H_1, ..., H_N); all leading axes are batch
           axes, any number of them
    W_k    weight of mode k, (D_k, H_k) in formulas; stored transposed, (H_k, D_k), as in
           torch.nn.Linear
    b_k    bias of mode k, (H_k,), added right after mode k was multiplied (Algorithm 1)
    beta   what the b_k add up to, (H_1, ..., H_N); it depends on the order of the modes
    vec    row-major flattening, as torch.flatten does

Modes are counted 1..N in text, 0..N-1 in code. 1 multiply-add (MAC) is 2 FLOPs.

    Part 1   the layer: Algorithm 1, complete
    Part 2   exact algebra and costs: the dense equivalent, the nearest Kronecker product, counts
    Part 3   the engine, which computes the same function faster; skip it at first reading
    Checks   what every part asks of its arguments

Source: "NdLinear: Preserving Multi-Dimensional Structure for Parameter-Efficient Neural Networks",
arXiv:2503.17353. Checkpoints, seeded weights and values agree with its released package
`ndlinear` 1.0.0. Needs torch only. Adapters stand in `ndlinear_lora.py`, a second file. Without
part 3, which may be deleted, every call runs Algorithm 1.

Version 0.1.0 of the file `ndlinear.py` of the NdLinear book. Licence: Apache-2.0.

What it does not do: put activations between modes; keep the channels_last layout; record the order
of the biases in a checkpoint (load with the same `transform_outer`); torch.jit.script.
"""

from __future__ import annotations

import itertools
import math
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial, reduce
from operator import index
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor, fx, nn
from torch.autograd import forward_ad
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

if TYPE_CHECKING:
    from typing_extensions import Self

__version__ = "0.1.0"
__all__ = ["FlatNdLinear", "KroneckerFit", "NdLinear", "NdLinearSum", "cheapest_order"]
__all__ += ["count_macs", "count_parameters", "kronecker_weight", "mode_product", "ndlinear"]
__all__ += ["near_square", "nearest_kronecker", "rearrange", "to_linear", "total_bias"]

Shape = Sequence[int]
Sizes = tuple[int, ...]
Tensors = Sequence["Tensor | None"]


# ==== Part 1: the layer =========================================================================
def mode_product(x: Tensor, weight: Tensor, mode: int, bias: Tensor | None = None) -> Tensor:
    """Multiply one axis of a tensor by a matrix and add a bias along it: X x_k W + b.

    x (..., D, ...), weight (H, D) and bias (H,) or None give (..., H, ...), possibly a transposed
    view, at H multiply-adds per entry of x. `mode` is the axis of size D, a torch `dim`: 0 is the
    first axis of x, a batch axis if it has any. ValueError if the sizes do not fit.

    >>> mode_product(torch.zeros(7, 4, 5), torch.zeros(3, 4), mode=-2).shape
    torch.Size([7, 3, 5])
    """
    fits = -x.ndim <= mode < x.ndim and weight.shape[1:] == (x.shape[mode],)
    if not fits or (bias is not None and bias.shape != weight.shape[:1]):
        given = None if bias is None else tuple(bias.shape)
        raise ValueError(
            f"axis {mode} of input {tuple(x.shape)} does not fit weight {tuple(weight.shape)} "
            f"and bias {given}; give (H, axis size) and (H,)"
        )
    return F.linear(x.transpose(mode, -1), weight, bias).transpose(mode, -1)


def ndlinear(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Tensors | None = None,
    order: Shape | None = None,
) -> Tensor:
    """Algorithm 1: mode after mode, multiply by the weight and add the bias.

    x (..., D_1, ..., D_N), N weights (H_k, D_k) and N biases (H_k,) or None, or None for no biases,
    give (..., H_1, ..., H_N), at `count_macs(D, H, order)` MACs per sample. The modes 0..N-1 are
    executed in `order`, by default 0, 1, ..., N-1, which changes the result only through the
    biases. Errors as in `NdLinear`.

    >>> weights = [torch.ones(3, 4), torch.ones(2, 5)]
    >>> ndlinear(torch.ones(7, 4, 5), weights).shape
    torch.Size([7, 3, 2])
    """
    n = len(weights)
    biases = [None] * n if biases is None else biases
    if n == 0 or len(biases) != n or any(weight.ndim != 2 for weight in weights):
        raise ValueError(
            f"give a weight (H, D) and one bias per mode, not {n} weights and {len(biases)} biases"
        )
    _check_input(x, tuple(weight.shape[1] for weight in weights), weights)
    for k in _order(order, n):
        x = mode_product(x, weights[k], k - n, biases[k])
    return x.contiguous()


class NdLinear(nn.Module):
    """A linear layer that keeps the axes: (..., D_1, ..., D_N) -> (..., H_1, ..., H_N).

    Its parameters are `align_layers.{k}.weight` (H_k, D_k) and, with `bias`,
    `align_layers.{k}.bias` (H_k,). It costs what `plan` prints. Source: Algorithm 1 of the paper.

    Args:
        input_dims, hidden_size: (D_1, ..., D_N) and (H_1, ..., H_N), positive integers.
        transform_outer: True for Algorithm 1 in the order 1..N, False for N..1. The two differ in
            what the biases do.
        bias: whether each mode has a bias.
        init: "linear": each mode like torch.nn.Linear, as released; it turns unit variance into
            3^-N, of complex numbers (2/3)^N, plus biases. "paper": Xavier uniform per mode, biases
            zero. "unit": uniform of variance 1/D_k, which keeps that of the input, biases zero.
        execution: "planned": the fastest way known, see `plan`. "sequential": Algorithm 1 as it is.
            "recompute": planned; eager calls of real numbers keep only the input (checkpoint).
        device, dtype: of the parameters, as in torch.nn.Linear.

    `order` lists the modes in the order that defines what the biases do, `execution_order` in that
    of fewest multiply-adds; `approximation` is the `KroneckerFit` of `from_linear`, else None.
    ValueError or TypeError for what does not fit, AttributeError where sizes or order are set.

    >>> layer = NdLinear((4, 5), (3, 2))
    >>> layer(torch.randn(7, 4, 5)).shape
    torch.Size([7, 3, 2])
    >>> layer
    NdLinear((4, 5), (3, 2), transform_outer=True, bias=True, init='linear')
    """

    approximation: KroneckerFit | None = None
    _rank = 1  # of the sum whose term it is

    def __init__(
        self,
        input_dims: Shape,
        hidden_size: Shape,
        transform_outer: bool = True,
        bias: bool = True,
        *,
        init: str = "linear",
        execution: str = "planned",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        dims, hidden = _shapes(input_dims, hidden_size)
        self.input_dims, self.hidden_size = dims, hidden
        self.transform_outer = bool(transform_outer)
        self.execution = execution
        self.order = tuple(range(len(dims)))[:: 1 if transform_outer else -1]
        cheapest = self.order if execution == "sequential" else cheapest_order(dims, hidden)
        self.execution_order = min(self.order, cheapest, key=partial(count_macs, dims, hidden))
        modes = [nn.Linear(d, h, bias, device, dtype) for d, h in zip(dims, hidden)]
        self.align_layers = cast("list[nn.Linear]", nn.ModuleList(modes))
        self.init = init  # which calls _prepare
        if init != "linear":
            self.reset_parameters()

    def forward(self, x: Tensor) -> Tensor:
        """(..., D_1, ..., D_N) -> (..., H_1, ..., H_N)."""
        compiling = torch.compiler.is_compiling()
        weights, biases, as_made = _gather(self, compiling)
        if isinstance(x, fx.Proxy):
            return self._algorithm_1(x)
        # a mode may bring its numbers only when it is called: hooks move, cast and gather them
        _check_input(x, self.input_dims, weights if as_made else (), compiling)
        if not as_made or self.execution == "sequential":
            return self._algorithm_1(x)
        return self._planned(x, weights, biases, compiling)

    def _planned(self, x: Tensor, *_: Any) -> Tensor:
        """Part 3 puts its engine in this place, and what that needs in the next one."""
        return self._algorithm_1(x)

    def _plan_ahead(self) -> None:
        self._plans: dict[Call, Plan] = {}
        self._plans_for_any: list[Plan] = []

    def _algorithm_1(self, x: Tensor) -> Tensor:
        """Mode after mode through its module, whatever someone has made of it."""
        for k in self.order:
            axis = k - len(self.order)
            x = self.align_layers[k](x.transpose(axis, -1)).transpose(axis, -1)
        return x.contiguous()

    def reset_parameters(self) -> None:
        """Draw all parameters anew, as `init` says; each mode by itself is drawn so, too."""
        for mode in self.align_layers:
            mode.reset_parameters()

    @property
    def weights(self) -> list[Tensor]:
        """The weights of the modes, (H_k, D_k) each."""
        held = [mode.weight for mode in self.align_layers]
        return [weight() if callable(weight) else weight for weight in held]  # methods of torch.ao

    @property
    def biases(self) -> list[Tensor | None]:
        """The biases of the modes, (H_k,) each, or None."""
        held = [getattr(mode, "bias", None) for mode in self.align_layers]
        return [bias() if callable(bias) else bias for bias in held]

    @property
    def num_layers(self) -> int:
        """The number of modes, as the released package calls it."""
        return len(self.input_dims)

    @property
    def terms(self) -> list[NdLinear]:
        """This layer as a sum of one term: itself."""
        return [self]

    # ---- what follows is no part of Algorithm 1: making a layer from a dense one, and its upkeep
    @classmethod
    def from_linear(
        cls, linear: nn.Module, input_dims: Shape, hidden_size: Shape, rank: int = 1, **search: Any
    ) -> Self:
        """The layer nearest to a dense layer, with copies of its numbers.

        `linear` is a Linear(prod D, prod H) or the Conv1D of transformers; the other arguments are
        those of `nearest_kronecker`, with `rank` 1. The biases of the modes, which cannot reach
        every dense bias, are the least-squares fit. `approximation` holds both relative errors.
        ValueError or TypeError for sizes that do not fit or what is no dense layer.
        """
        return cast("Self", _nearest(cls, linear, input_dims, hidden_size, rank, search))

    def plan(
        self, batch: int = 256, needs_grad: bool = True, device: torch.device | str | None = None
    ) -> Plan:
        """How `batch` samples are computed, with or without gradients; print it. See part 3.

        Whatever compiles, exports, traces, transforms or casts runs that of float32. No modes are
        merged on CUDA, which need not be there, nor in float16, whose range products may leave.
        """
        own = next(self.parameters(), torch.empty(0))
        singly = own.dtype is torch.float16 or torch.device(device or own.device).type == "cuda"
        return _plan_for(self, (batch.bit_length(), needs_grad, singly, own.dtype.itemsize == 2))

    def _prepare(self) -> None:
        """What `forward` needs beside the parameters. It is made here: compilers then find it."""
        self._plan_ahead()
        for k, mode in enumerate(self.align_layers):
            drawn = isinstance(mode.__dict__.get("reset_parameters"), (partial, type(None)))
            if type(mode) is nn.Linear and drawn:
                over = math.sqrt(self._rank) if k == 0 else 1.0
                mode.__dict__["reset_parameters"] = _Draw(_draw, weakref.ref(mode), self.init, over)

    def __getstate__(self) -> dict[str, Any]:
        return {key: own for key, own in self.__dict__.items() if not key.startswith("_plans")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._prepare()

    def __setattr__(self, name: str, value: Any) -> None:
        fixed = ("input_dims", "hidden_size", "transform_outer", "order", "execution_order")
        if name in fixed and name in self.__dict__:
            raise AttributeError(
                f"{name} of an NdLinear is fixed: what it computes was planned for it; "
                "build a new layer and load the state_dict of this one"
            )
        if name == "execution" and value not in ("planned", "recompute", "sequential"):
            raise ValueError(f'execution is "planned", "recompute" or "sequential", not {value!r}')
        if name == "init" and value not in ("linear", "paper", "unit"):
            raise ValueError(f'init must be "linear", "paper" or "unit", got {value!r}')
        super().__setattr__(name, value)
        if name in ("init", "_rank"):  # by which the modes are drawn
            self._prepare()

    def __repr__(self) -> str:
        more = f"transform_outer={self.transform_outer}, bias={_has_bias(self)}, init={self.init!r}"
        if self.execution != "planned":
            more += f", execution={self.execution!r}"
        call = f"{type(self).__name__}({self.input_dims}, {self.hidden_size}, {more})"
        for k, layer in enumerate(self.align_layers):
            if type(layer) is not nn.Linear:
                inside = repr(layer).replace("\n", "\n#   ")
                call += f"\n#   align_layers.{k}: {inside}"
        return call


@torch.no_grad()
def _draw(held: Callable[[], nn.Linear], init: str, over: float = 1.0) -> None:
    """Draw the mode that is `held` weakly, so that it dies with its layer; divide it by `over`."""
    nn.Linear.reset_parameters(mode := held())
    if init != "linear":
        fan = sum(mode.weight.shape) / 2 if init == "paper" else mode.in_features
        parts = 1 + mode.weight.is_complex()  # real and imaginary, which share the variance 1 / fan
        bound = math.sqrt(3 / fan / parts)
        nn.init.uniform_(mode.weight, -bound, bound)
        if mode.bias is not None:
            nn.init.zeros_(mode.bias)
    mode.weight.div_(over)


class _Draw(partial):  # type: ignore[type-arg]
    """`_draw` as the reset of a mode. In the pickle of a mode alone, which is then read without
    this file, it becomes that of nn.Linear; a layer that is read puts it back."""

    def __reduce__(self) -> Any:
        return partial, (nn.Linear.reset_parameters, self.args[0]())


class FlatNdLinear(NdLinear):
    """An NdLinear in place of a torch.nn.Linear: (..., prod D) -> (..., prod H).

    All else is as in NdLinear. Code that reads `weight` and `bias`, as nn.TransformerEncoderLayer
    in evaluation and nn.MultiheadAttention do, gets those of the dense layer, made in each access;
    TypeError where someone writes to them, AttributeError where None or a tensor is assigned.

    >>> layer = FlatNdLinear((4, 5), (3, 2))
    >>> layer(torch.randn(7, 20)).shape, layer.in_features, layer.out_features
    (torch.Size([7, 6]), 20, 6)
    """

    def forward(self, x: Tensor) -> Tensor:
        """(..., prod D) -> (..., prod H)."""
        fits = isinstance(x, Tensor) and x.shape[-1:] == (self.in_features,)
        if not fits and not isinstance(x, fx.Proxy):
            _check_input(x, (self.in_features,), ())
        y = super().forward(x.reshape(x.shape[:-1] + self.input_dims))
        return y.flatten(-len(self.hidden_size))

    @property
    def in_features(self) -> int:
        """prod D."""
        return math.prod(self.input_dims)

    @property
    def out_features(self) -> int:
        """prod H."""
        return math.prod(self.hidden_size)

    @property
    def weight(self) -> Tensor:
        """The dense weight, (prod H, prod D); differentiable, read only."""
        return _read_only(kronecker_weight(self))

    @property
    def bias(self) -> Tensor | None:
        """The dense bias, (prod H,), or None; differentiable, read only."""
        return _read_only(total_bias(self).flatten()) if _has_bias(self) else None

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Refuses a dense weight or bias, also from torch.nn.utils.prune and its like."""
        if name.startswith(("weight", "bias")):
            raise TypeError(_WRITTEN)
        super().register_parameter(name, param)


_WRITTEN = (
    "the dense weight and bias are made in each access, so what is written to them is lost: change "
    "`align_layers`, for example prune each or zero the last, layer.align_layers[layer.order[-1]]; "
    "layer.reset_parameters() draws them anew, from_linear makes a layer of a dense one"
)


class _ReadOnly(Tensor):
    """A tensor made for reading, and its views: whatever would change them is refused."""

    refusal = _WRITTEN

    def _refused(self, *_: Any) -> Any:
        raise TypeError(self.refusal)

    # a TypeError of __torch_function__ in one of these would make Python try the one without "="
    __iadd__ = __isub__ = __imul__ = __itruediv__ = _refused
    __ifloordiv__ = __imod__ = __ipow__ = set_ = _refused  # type: ignore[assignment]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = func.__name__, kwargs or {}
        in_place = name.endswith("_") and not name.endswith("__")
        written = in_place or name in ("__setitem__", "__set__") or kwargs.get("out") is not None
        target = kwargs.get("out", next(iter([*args, *kwargs.values()]), None))
        targets = target if isinstance(target, (list, tuple)) else (target,)
        own = any(isinstance(one, cls) for one in targets)  # else it is only read
        if own and written:
            raise TypeError(cls.refusal)
        if name in ("__reduce_ex__", "__deepcopy__"):  # a copy is a plain tensor
            return func(args[0].as_subclass(Tensor), *args[1:])
        with torch._C.DisableTorchFunctionSubclass():
            y = func(*args, **kwargs)
        if not own or name == "as_subclass":
            return y

        def guarded(one: Any) -> Any:
            shared = isinstance(one, Tensor) and (one._is_view() or name in ("detach", "__get__"))
            return _read_only(one, cls) if shared else one

        return tuple(map(guarded, y)) if type(y) is tuple else guarded(y)


def _read_only(tensor: Tensor, kind: type[_ReadOnly] = _ReadOnly) -> Tensor:
    plain = type(tensor) is Tensor and not torch.compiler.is_compiling()
    return tensor.as_subclass(kind) if plain else tensor


# ==== Part 2: exact algebra and costs ===========================================================
class KroneckerFit(NamedTuple):
    """How well a layer made by `from_linear` fits: ||target - fit|| / ||target||.

    >>> NdLinear.from_linear(nn.Linear(20, 6), (4, 5), (3, 2)).approximation.weight_error < 1
    True
    """

    weight_error: float
    bias_error: float


def kronecker_weight(layer: NdLinear | NdLinearSum) -> Tensor:
    """The dense matrix of a layer, weight_1 kron ... kron weight_N, summed over its terms.

    (prod H, prod D), row-major, differentiable: vec(layer(x)) = it @ vec(x) + vec(layer(0)).

    >>> kronecker_weight(NdLinear((4, 5), (3, 2))).shape
    torch.Size([6, 20])
    """
    return reduce(torch.add, (reduce(_kron, [w for w, _ in _numbers(t)]) for t in layer.terms))


def _kron(a: Tensor, b: Tensor) -> Tensor:
    (h, d), (k, e) = a.shape, b.shape
    return (a.reshape(h, 1, d, 1) * b.reshape(k, 1, e)).reshape(h * k, d * e)


def total_bias(layer: NdLinear | NdLinearSum) -> Tensor:
    """All that a layer adds: layer(0), (H_1, ..., H_N); differentiable. Costs no more than that.

    >>> total_bias(NdLinear((4, 5), (3, 2))).shape
    torch.Size([3, 2])
    """
    weights, biases = zip(*_numbers(layer.terms[0]))
    if isinstance(layer, NdLinear):
        return _total_bias(weights, biases, layer.order)
    zeros = weights[0].new_zeros(layer.input_dims)
    with torch.autocast("cuda" if zeros.is_cuda else "cpu", enabled=False):
        return cast("Tensor", layer(zeros))


def _numbers(layer: NdLinear) -> list[tuple[Tensor, Tensor | None]]:
    """Weight and bias of each mode; of one that is no plain nn.Linear, as it computes them."""
    return [_affine(mode, d) for mode, d in zip(layer.align_layers, layer.input_dims)]


def _affine(mode: nn.Module, d: int) -> tuple[Tensor, Tensor | None]:
    """What a quantised, wrapped or offloaded mode does to a unit matrix and to zeros."""
    weight: Any = mode._parameters.get("weight")  # and not one that a hook will make anew
    plain = type(mode).forward is nn.Linear.forward and "forward" not in mode.__dict__
    if plain and isinstance(weight, Tensor) and type(weight).dequantize is Tensor.dequantize:
        if weight.dtype in _NO_ARITHMETIC:
            raise _unusable(weight)
        return weight, cast("Tensor | None", mode.bias)
    usable = (p for p in mode.parameters() if p.dtype in _REAL or p.is_complex())
    own = next(usable, torch.empty(0))
    unit = torch.eye(d, device="cpu" if own.is_meta else own.device, dtype=own.dtype)
    bias = mode(unit.new_zeros(1, d))  # torch.ao takes no single vector
    return (mode(unit) - bias).t(), bias.squeeze(0)


def _total_bias(weights: Sequence[Tensor], biases: Tensors, order: Shape) -> Tensor:
    """All biases as one tensor, for the orders 1..N and N..1, by Horner's rule: each mode
    multiplies what there is by the row sums of its weight and adds its own bias. O(prod H)."""
    own = [w.new_zeros(len(w)) if b is None else b for w, b in zip(weights, biases)]
    beta = own[order[0]]
    for k in order[1:]:  # its axis comes last
        beta = torch.addcmul(own[k], beta.unsqueeze(-1), weights[k].sum(1))
    return beta if order[0] == 0 else beta.permute(*order).contiguous()


def _has_bias(layer: NdLinear | NdLinearSum) -> bool:
    if isinstance(layer, NdLinear):  # a wrapped mode may have one inside
        return any(not hasattr(m, "bias") or m.bias is not None for m in layer.align_layers)
    return layer.bias is not None or any(_has_bias(term) for term in layer.terms)


@torch.no_grad()
def to_linear(layer: NdLinear | NdLinearSum) -> nn.Linear:
    """The same function on flattened axes as one torch.nn.Linear, with copies of the numbers.

    It costs prod D * prod H multiply-adds. An NdLinearLoRA gives its merged form. Hooks stay out.

    >>> to_linear(NdLinear((4, 5), (3, 2)))
    Linear(in_features=20, out_features=6, bias=True)
    """
    own: Any = layer
    bias: Tensor | None
    if hasattr(layer, "terms"):
        weight = kronecker_weight(layer)
        bias = total_bias(layer).flatten() if _has_bias(layer) else None
    else:  # an adapter has both
        weight, bias = own.weight, own.bias
    hidden, dims = weight.shape
    linear = nn.Linear(dims, hidden, False, "meta")  # draws nothing
    linear.weight = nn.Parameter(weight.contiguous().clone())
    linear.register_parameter("bias", None if bias is None else nn.Parameter(bias.clone()))
    return linear


class NdLinearSum(nn.Module):
    """A sum of `rank` NdLinear layers without biases, plus one full bias.

    With enough terms (N = 2: min(D_1 H_1, D_2 H_2)) it is any dense layer. Its parameters are
    `terms.{r}.align_layers.{k}.weight` and `bias` (H_1, ..., H_N); it costs `rank` times the
    multiply-adds of NdLinear. Drawn like NdLinear over sqrt(rank). All other arguments and errors
    are those of NdLinear. Source: the extension that the paper names as future work.

    >>> NdLinearSum((4, 5), (3, 2), rank=2)(torch.randn(7, 4, 5)).shape
    torch.Size([7, 3, 2])
    """

    approximation: KroneckerFit | None = None

    def __init__(
        self,
        input_dims: Shape,
        hidden_size: Shape,
        rank: int = 1,
        bias: bool = True,
        *,
        init: str = "linear",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        self.input_dims, self.hidden_size = _shapes(input_dims, hidden_size, rank)
        self.rank = index(rank)
        self.init = init
        make = partial(NdLinear, init=init, device=device, dtype=dtype)
        terms = [make(input_dims, hidden_size, bias=False) for _ in range(rank)]
        self.terms = cast("list[NdLinear]", nn.ModuleList(terms))
        own = torch.empty(self.hidden_size, device=device, dtype=dtype)
        self.bias = nn.Parameter(own) if bias else None
        self._draw_bias()
        for term in terms:
            term.weights[0].data.div_(math.sqrt(rank))
            term._rank = rank

    def _draw_bias(self) -> None:
        if self.bias is not None:
            bound = 1 / math.sqrt(math.prod(self.input_dims)) if self.init == "linear" else 0.0
            nn.init.uniform_(self.bias, -bound, bound)

    def reset_parameters(self) -> None:
        """Draw all parameters anew, as `init` says."""
        for term in self.terms:
            term.init = self.init
            term.reset_parameters()
        self._draw_bias()

    def forward(self, x: Tensor) -> Tensor:
        """(..., D_1, ..., D_N) -> (..., H_1, ..., H_N)."""
        y = self._summed(x)
        return y if self.bias is None else y + self.bias.to(y.dtype)

    def _summed(self, x: Tensor) -> Tensor:
        """Term by term; part 3 computes all terms of two modes at once, where it can."""
        return cast("Tensor", reduce(torch.add, [term(x) for term in self.terms]))

    @classmethod
    def from_linear(
        cls, linear: nn.Module, input_dims: Shape, hidden_size: Shape, rank: int = 1, **search: Any
    ) -> Self:
        """The sum of `rank` terms nearest to a dense layer, with its bias; else as in NdLinear."""
        return cast("Self", _nearest(cls, linear, input_dims, hidden_size, rank, search))

    def __repr__(self) -> str:
        options = f"rank={self.rank}, bias={self.bias is not None}, init={self.init!r}"
        return f"{type(self).__name__}({self.input_dims}, {self.hidden_size}, {options})"


def rearrange(matrix: Tensor, input_dims: Shape, hidden_size: Shape) -> Tensor:
    """The rearrangement of a matrix that groups the two indices of each mode.

    (prod H, prod D) becomes (H_1 D_1, ..., H_N D_N), and A_1 kron ... kron A_N the outer product of
    the flattened A_k. Errors as in `NdLinear`. Source: Van Loan and Pitsianis (1993).

    >>> rearrange(torch.eye(6), (2, 3), (2, 3)).shape
    torch.Size([4, 9])
    """
    dims, hidden = _shapes(input_dims, hidden_size)
    if tuple(matrix.shape) != (math.prod(hidden), math.prod(dims)):
        raise ValueError(
            f"a matrix {tuple(matrix.shape)} does not fold into hidden_size {hidden} x "
            f"input_dims {dims}; choose sizes whose products are its (outputs, inputs)"
        )
    n = len(dims)
    pairs = [axis for k in range(n) for axis in (k, k + n)]
    sizes = [h * d for h, d in zip(hidden, dims)]
    return matrix.reshape(*hidden, *dims).permute(pairs).reshape(sizes)


@torch.no_grad()
def nearest_kronecker(
    matrix: Tensor,
    input_dims: Shape,
    hidden_size: Shape,
    rank: int = 1,
    *,
    restarts: int = 0,
    seed: int = 0,
    sweeps: int = 500,
    tol: float = 1e-12,
) -> tuple[list[list[Tensor]], float]:
    """The sum of `rank` Kronecker products nearest to a matrix in the Frobenius norm.

    In float64 or complex128. N <= 2 is exact, by singular value decomposition of the rearrangement
    (Van Loan and Pitsianis, 1993). N > 2 gives a local optimum (the global one is NP-hard, and need
    not exist for rank > 1): the best of alternating least squares from the leading singular vectors
    of the unfoldings and from `restarts` random starts, drawn with `seed`; each takes `sweeps`
    rounds at most and ends with one that lowers the squared error by less than `tol`.

    A real or complex matrix (prod H, prod D) gives (terms, error): it is close to the sum over r of
    terms[r][0] kron ... kron terms[r][N-1], with terms[r][k] (H_k, D_k); error is ||matrix - sum||
    / ||matrix|| before they are rounded. ValueError or TypeError if sizes or rank do not fit.

    >>> product = torch.kron(torch.randn(3, 4), torch.randn(2, 5))
    >>> nearest_kronecker(product, (4, 5), (3, 2))[1] < 1e-6
    True
    """
    dims, hidden = _shapes(input_dims, hidden_size, rank)
    if not (matrix.is_floating_point() or matrix.is_complex()):
        raise TypeError(f"factors of {matrix.dtype} would be rounded: give matrix.double()")
    exact = torch.promote_types(matrix.dtype, torch.float64)
    tensor = rearrange(matrix.detach().to(exact), dims, hidden)
    if tensor.is_meta or not tensor.isfinite().all():
        raise ValueError("nothing is nearest to numbers on meta, or to some that are not finite")
    enough = tensor.numel() // max(tensor.shape)
    if rank > enough:
        raise ValueError(f"rank {rank} is too high: rank {enough} represents every matrix")
    if len(dims) == 1:
        factors = [tensor[:, None]]
    elif len(dims) == 2:
        u, s, vh = torch.linalg.svd(tensor, full_matrices=False)
        factors = [u[:, :rank] * s[:rank], vh[:rank].T]
    else:
        starts = _starts(tensor, rank, restarts, seed)
        found = [_least_squares(tensor, start, sweeps, tol) for start in starts]
        factors = min(found, key=lambda factors: _error(tensor, factors))
    error = _error(tensor, factors)
    norms = torch.stack([factor.norm(dim=0) for factor in factors])
    shared = norms.prod(0) ** (1 / len(dims))  # the size of a term, evenly among its factors
    scales = shared / norms.clamp_min(1e-300)
    scaled = [(factor * scale).to(matrix.dtype) for factor, scale in zip(factors, scales)]
    sized = list(zip(scaled, hidden, dims))
    return [[all_[:, r].reshape(h, d) for all_, h, d in sized] for r in range(rank)], error


def _starts(tensor: Tensor, rank: int, restarts: int, seed: int) -> list[list[Tensor]]:
    """Factors (n_k, rank) to begin with: singular vectors of the unfoldings, then random ones."""
    draw = partial(torch.randn, generator=torch.Generator().manual_seed(seed), device="cpu")
    starts = [[draw(n, rank).to(tensor) for n in tensor.shape] for _ in range(restarts + 1)]
    for k, factor in enumerate(starts[0]):
        unfolding = tensor.movedim(k, 0).flatten(1)
        vectors = torch.linalg.eigh(unfolding @ unfolding.mH)[1].flip(1)
        factor[:, : len(factor)] = vectors[:, :rank]
    return starts


def _least_squares(tensor: Tensor, factors: list[Tensor], sweeps: int, tol: float) -> list[Tensor]:
    """Lower the error of tensor[i_1..i_N] ~ sum_r prod_k factors[k][i_k, r], one factor a time."""
    last = math.inf
    for _ in range(sweeps):
        for k in range(tensor.ndim):
            factors = [F.normalize(factor, dim=0) for factor in factors]
            others = factors[:k] + factors[k + 1 :]
            gram = reduce(torch.mul, [factor.mH @ factor for factor in others]).conj()
            unfolding = tensor.movedim(k, 0).flatten(1)
            inverse = torch.linalg.pinv(gram, hermitian=True)
            factors[k] = unfolding @ _khatri_rao(others).conj() @ inverse
        squared = _error(tensor, factors) ** 2
        if last - squared < tol:
            break
        last = squared
    return factors


def _khatri_rao(factors: Sequence[Tensor]) -> Tensor:
    """(prod n_k, R) from (n_k, R): column r is the Kronecker product of the columns r."""
    return reduce(lambda a, b: (a[:, None] * b).flatten(0, 1), factors)


def _error(target: Tensor, factors: Sequence[Tensor]) -> float:
    """||target - sum of the terms|| / ||target||."""
    *others, last = (target.new_ones(1, factors[0].shape[1]), *factors)
    gap = target.reshape(-1, len(last)) - _khatri_rao(others) @ last.T
    return float(gap.norm() / target.norm().clamp_min(1e-300))


@torch.no_grad()
def _nearest(
    kind: Any, linear: Any, input_dims: Shape, hidden_size: Shape, rank: int, search: Any
) -> Any:
    """A layer like a dense one in dtype, device and bias, and as near to it as `rank` allows."""
    dims, hidden = _shapes(input_dims, hidden_size, rank)
    options: dict[str, Any] = {"rank": rank} if issubclass(kind, NdLinearSum) else {}
    if rank > 1 and not options:
        raise ValueError(
            f"an NdLinear is one term, got rank={rank}; a sum of {rank} terms is "
            f"NdLinearSum.from_linear(linear, {dims}, {hidden}, rank={rank})"
        )
    bias: Any = getattr(linear, "bias", None)
    if type(linear).__name__ == "Conv1D" and hasattr(linear, "nf"):  # of transformers: (D, H)
        weight: Any = linear.weight.t()
    elif isinstance(linear, nn.Linear):
        weight, bias = _affine(linear, math.prod(dims))
    else:
        raise TypeError(f"from_linear takes an nn.Linear or a Conv1D, got {type(linear).__name__}")
    terms, weight_error = nearest_kronecker(weight, dims, hidden, rank, **search)
    options |= {"bias": bias is not None, "device": "meta", "dtype": weight.dtype}  # draws nothing
    layer = kind(dims, hidden, **options).to_empty(device=weight.device)
    for term, values in zip(layer.terms, terms):
        for target, value in zip(term.weights, values):
            target.copy_(value)
    bias_error = 0.0
    if bias is not None and isinstance(layer, NdLinearSum):
        cast("Tensor", layer.bias).copy_(bias.reshape(hidden))
    elif bias is not None:
        nearest, bias_error = _nearest_biases(bias, layer.weights, layer.order)
        for target, value in zip(layer.biases, nearest):
            target.copy_(value)
    layer.approximation = KroneckerFit(weight_error, bias_error)
    return layer


def _nearest_biases(
    target: Tensor, weights: Sequence[Tensor], order: Shape
) -> tuple[list[Tensor], float]:
    """The biases (H_k,) whose total is nearest to a dense bias (prod H,); the relative error."""
    target = target.to(torch.promote_types(target.dtype, torch.float64))
    weights = [weight.to(target) for weight in weights]
    sizes = [len(weight) for weight in weights]
    units = torch.eye(sum(sizes), dtype=target.dtype, device=target.device)
    # the total is linear in the biases: the columns of the basis are the totals of unit vectors
    totals = [_total_bias(weights, unit.split(sizes), order).flatten() for unit in units]
    basis = torch.stack(totals, dim=1)
    solution = torch.linalg.pinv(basis) @ target
    return list(solution.split(sizes)), _error(target, [(basis @ solution)[:, None]])


def near_square(n: int) -> tuple[int, int]:
    """n = a * b with a <= b as close as possible; a prime gives (1, n).

    >>> near_square(14336)
    (112, 128)
    """
    a = max((a for a in range(1, math.isqrt(n) + 1) if n % a == 0), default=1)
    return a, n // a


def cheapest_order(input_dims: Shape, hidden_size: Shape) -> Sizes:
    """The order of the modes 0..N-1 with the fewest multiply-adds: ascending 1/D_k - 1/H_k.

    Swapping neighbours i, j changes the cost by a positive multiple of (1/D_i - 1/H_i) -
    (1/D_j - 1/H_j). Equal modes keep their order. Errors as in `NdLinear`.

    >>> cheapest_order((2800, 8), (768, 1))  # the mode that shrinks more, first
    (1, 0)
    """
    dims, hidden = _shapes(input_dims, hidden_size)
    common = math.lcm(*dims, *hidden)  # integers: rounding would see differences between equals
    return tuple(sorted(range(len(dims)), key=lambda k: common // dims[k] - common // hidden[k]))


def count_macs(input_dims: Shape, hidden_size: Shape, order: Shape | None = None) -> int:
    """Multiply-adds per sample: the sum over the modes of (size of the tensor before it) * H_k.

    In `order`, by default 0, 1, ..., N-1, without additions of biases. Errors as in `NdLinear`.

    >>> count_macs((32, 32, 32), (32, 32, 32)) == 3 * 32**4
    True
    """
    dims, hidden = _shapes(input_dims, hidden_size)
    size = list(dims)
    macs = 0
    for k in _order(order, len(size)):
        macs += math.prod(size) * hidden[k]
        size[k] = hidden[k]
    return macs


def count_parameters(
    input_dims: Shape, hidden_size: Shape, bias: bool = True, rank: int = 1
) -> int:
    """Numbers that a layer trains: rank * sum D_k H_k, and sum H_k for the biases of one term,
    prod H_k for that of an NdLinearSum of more. Errors as in `NdLinear`.

    >>> count_parameters((32, 32, 32), (32, 32, 32))  # a dense layer has 1,073,774,592
    3168
    """
    dims, hidden = _shapes(input_dims, hidden_size, rank)
    weights = rank * sum(d * h for d, h in zip(dims, hidden))
    biases = sum(hidden) if rank == 1 else math.prod(hidden)
    return weights + biases if bias else weights


# ==== Part 3: the engine, the same function faster; skip it at first reading ====================
# What a plan depends on beside the layer: bits of the number of samples, gradients, CUDA, 16 bits
Call = tuple[int, bool, bool, bool]


class Step(NamedTuple):
    """One product of a plan: data of `shape`, (batch * left, dim, right), times (hidden, dim), the
    Kronecker product of the weights of `modes`: neighbours, merged into one matrix if several."""

    modes: Sizes
    left: int
    dim: int
    hidden: int
    right: int
    shape: Sizes


@dataclass(frozen=True)
class Plan:
    """How a layer is computed; print it. Counts are per sample."""

    steps: tuple[Step, ...]  # the products, one after the other
    order: Sizes  # all modes in a row
    inline: bool  # each bias right after the product of its mode, else their total after the last
    literal: bool  # Algorithm 1 as it is written: each axis is moved to the end and back
    seconds: float  # the estimate for all samples

    @property
    def macs(self) -> int:
        """Multiply-adds."""
        return sum(s.left * s.dim * s.hidden * s.right for s in self.steps)

    @property
    def saved(self) -> int:
        """Numbers kept for backward."""
        return sum(s.left * s.dim * s.right for s in self.steps)

    def __str__(self) -> str:
        lines = []
        for modes, left, dim, hidden, right, _ in self.steps:
            names = "x".join(str(k + 1) for k in modes)
            lines.append(f"modes {names}: {dim} -> {hidden}, {left} left and {right} right of it")
        biases = "mode by mode" if self.inline else "added up and last"
        counts = f"{self.macs:,} multiply-adds, {self.saved:,} numbers kept for backward"
        lines.append(f"biases {biases}; {counts}")
        return "\n".join(lines)


class _Cost:
    """Seconds on a CPU, fitted by hand to times of single products, of the layers of the paper and
    of random layers in one thread of an AMD EPYC and an Intel Xeon (torch 2.13, November 2026).
    Where axes follow the mode, a product is one of many matrices (dim, right), unless it is thin.
    """

    LITERAL = 1.8e-5  # to start a mode of Algorithm 1 as it is written
    PLAN = 8e-6  # to begin anything else, and to add one bias to the total bias
    PRODUCT = 1e-5  # to start a product; of many matrices two, with gradients three
    MERGE = 1.5e-5  # to start what merges one more weight into a matrix
    MULTIPLY_ADD = 1.6e-11
    ROW = 2.5e-9  # one matrix: for each row,
    SINGLE = 1.2e-9  # and for one that makes one number of several
    MATRIX = 9e-8  # many matrices: for each one
    NUMBER = 1e-10  # for each number of both, but
    COPIED_NUMBER = 8e-10  # where it is copied, as those of a thin product are
    MERGED_NUMBER = 2e-9  # for each entry of a merged matrix
    WEIGHT_NUMBER = 6e-10  # with gradients: for each number of the weight of many matrices
    NARROW_NUMBER = 7e-10  # with gradients: for each result of 2 to 11 numbers
    BACKWARD_STARTS = 5  # forward and backward start as many times more operations
    BACKWARD_WORK = 3  # and do as many times more work
    HALF = 20  # a multiply-add of numbers of 16 bits costs as many times more
    GAIN = 0.9  # a plan must promise to take no more than this part of the time of the literal one
    GAIN_OF_MORE = 0.7  # with gradients and more multiply-adds, which is estimated worse, of this


@lru_cache(4096)
def _search(dims: Sizes, hidden: Sizes, order: Sizes, bias: bool, call: Call) -> Plan:
    """The fastest plan by estimate; on CUDA, that of fewest multiply-adds. Of neighbours merged in
    all ways (up to eight modes) that keep no more for backward than Algorithm 1, and Algorithm 1,
    by products of many matrices or as it is written."""
    n = len(dims)
    estimate = partial(_estimate, dims, hidden, bias, call)
    inline = estimate([(k,) for k in order], True)
    _, grad, cuda, _ = call
    if cuda:  # nothing was measured there
        least = estimate([(k,) for k in cheapest_order(dims, hidden)])
        return least if least.macs < inline.macs else inline
    plans = [inline]
    all_cuts = itertools.product((True, False), repeat=n - 1)
    for cuts in itertools.islice(all_cuts, 128 if n <= 8 else 1):
        edges = [0, *(k for k, cut in enumerate(cuts, 1) if cut), n]
        groups = [tuple(range(a, b)) for a, b in itertools.pairwise(edges)]
        groups.reverse()  # of equals the last comes first: then no axes follow it
        merged_dims = [math.prod(dims[k] for k in group) for group in groups]
        merged_hidden = [math.prod(hidden[k] for k in group) for group in groups]
        order = cheapest_order(merged_dims, merged_hidden)
        plans.append(estimate([groups[k] for k in order]))
    lean = [plan for plan in plans if plan.saved <= inline.saved]
    best = min(lean, key=lambda plan: plan.seconds)
    literal = estimate([(k,) for k in inline.order], True, True)
    gain = _Cost.GAIN_OF_MORE if grad and best.macs > literal.macs else _Cost.GAIN
    return best if best.seconds <= gain * literal.seconds else literal


def _plan_for(layer: NdLinear, call: Call) -> Plan:
    if call not in layer._plans:
        sizes = (layer.input_dims, layer.hidden_size, layer.order)
        layer._plans[call] = _search(*sizes, _has_bias(layer), call)
    return layer._plans[call]


def _estimate(
    dims: Sizes,
    hidden: Sizes,
    bias: bool,
    call: Call,
    groups: Sequence[Sizes],
    inline: bool = False,
    literal: bool = False,
) -> Plan:
    """The plan that runs these groups one after the other, and how long that should take."""
    cost = _Cost
    bits, grad, _, half = call
    samples = 0.75 * 2**bits
    sizes = list(dims)
    steps = []
    starts = 0.0 if literal else cost.PLAN * (1 + len(dims) * (bias and not inline))
    work = 0.0
    for group in groups:
        first, behind = group[0], group[-1] + 1
        d = math.prod(dims[first:behind])
        h = math.prod(hidden[first:behind])
        left = math.prod(sizes[:first])
        right = math.prod(sizes[behind:])
        batched = right > 1 and not literal
        copied = right > 1 and (literal or _is_thin(h, d, right, grad))
        moved = (cost.COPIED_NUMBER if copied else cost.NUMBER) * right * (d + h)
        moved += cost.MATRIX if batched else (cost.SINGLE if h == 1 < d else cost.ROW) * right
        if grad and right == 1 and 1 < d < 12:
            moved += cost.NARROW_NUMBER * h
        if grad and batched and not copied:  # each matrix has a gradient of the weight
            moved += cost.WEIGHT_NUMBER * d * h
        macs = d * h * right * (cost.HALF if half else 1)
        starts += cost.LITERAL if literal else cost.PRODUCT * (1 + batched * (1 + grad))
        starts += cost.MERGE * (len(group) - 1)
        work += samples * left * (cost.MULTIPLY_ADD * macs + moved)
        work += cost.MERGED_NUMBER * d * h * (len(group) > 1)
        shape = (-1, d) if right == 1 else (-1, d, right)
        steps.append(Step(group, left, d, h, right, shape))
        sizes[first:behind] = hidden[first:behind]
    seconds = (cost.BACKWARD_STARTS if grad else 1) * starts
    seconds += (cost.BACKWARD_WORK if grad else 1) * work
    order = tuple(itertools.chain(*groups))
    return Plan(tuple(steps), order, inline, literal, seconds)


def _planned(
    layer: NdLinear, x: Tensor, weights: Sequence[Tensor], biases: Tensors, compiling: bool
) -> Tensor:
    """Choose the plan for this call and run it."""
    batch = x.shape[: -len(weights)]
    if not compiling and _functorch_is_active() and batch.numel() == 1:
        return layer._algorithm_1(x)  # vmap over samples is slow with many matrices
    ordinary = not compiling and _is_ordinary(x)
    trains = ordinary and torch.is_grad_enabled() and _any_requires_grad(x, *weights, *biases)
    product = _product
    singly = x.is_cuda or x.dtype is torch.float16  # merged weights may leave its range
    if ordinary and not _any_autocast():
        bits = batch.numel().bit_length()
        plan = _plan_for(layer, (bits, trains, singly, x.dtype.itemsize == 2))
        product = _trained_product if trains else _fast_product
    else:
        plan = layer._plans_for_any[int(singly)]
    operands = _operands(layer, plan, weights, biases)
    run: Callable[..., Tensor] = _run
    if trains and layer.execution == "recompute":
        run = partial(checkpoint, _run, use_reentrant=False, preserve_rng_state=False)
    y = run(plan, product, x, *operands)
    if plan.literal:
        return y.contiguous()
    if trains and plan.steps[-1].right > 1:
        _gather_gradient(y)
    return y.reshape(*batch, *layer.hidden_size).contiguous()


def _gather_gradient(y: Any) -> None:
    """Put the gradient of y into one piece: with others, as of a sum, torch goes row by row."""
    y.register_hook(lambda g: None if g is None else g.contiguous())


_term_by_term = NdLinearSum._summed


def _summed(layer: NdLinearSum, x: Tensor) -> Tensor:
    """All terms of a sum of two modes together where each would run as planned: added up to one
    matrix if that is cheap, else stacked in one mode and side by side in the other."""
    plain = len(layer.input_dims) == 2 and not torch.compiler.is_compiling() and _is_ordinary(x)
    plain = plain and not (x.is_cuda or x.dtype is torch.float16 or _any_autocast())
    if not plain or not all(map(_is_bare, layer.terms)):
        return _term_by_term(layer, x)
    held = [_gather(term, False) for term in layer.terms]
    if not all(as_made and biases[0] is None for _, biases, as_made in held):
        return _term_by_term(layer, x)
    _check_input(x, layer.input_dims, [weight for weights, _, _ in held for weight in weights])
    first, second = (torch.stack(own) for own in zip(*(weights for weights, _, _ in held)))
    (rank, h, d), (_, k, e) = first.shape, second.shape
    samples = x.shape[:-2].numel()
    trains = torch.is_grad_enabled() and _any_requires_grad(x, first, second)
    product = _trained_product if trains else _fast_product
    first_mode_first = h * e * (d + k) <= d * k * (e + h)
    macs = rank * min(h * e * (d + k), d * k * (e + h))
    if h * k * d * e * (samples + rank) <= 1.5 * macs * samples:  # one product has more speed
        pairs = first.reshape(rank, -1).t() @ second.reshape(rank, -1)
        matrix = pairs.reshape(h, d, k, e).transpose(1, 2).reshape(h * k, d * e)
        y = product(x.reshape(-1, d * e), matrix)
    elif first_mode_first:
        y = product(x.reshape(-1, d, e), first.transpose(0, 1).reshape(h * rank, d))
        y = product(y.reshape(-1, rank * e), second.transpose(0, 1).reshape(k, rank * e))
    else:
        y = product(x.reshape(-1, e), second.reshape(rank * k, e))
        y = product(y.reshape(-1, d * rank, k), first.permute(1, 2, 0).reshape(h, -1))
        if trains:
            _gather_gradient(y)
    return y.reshape(*x.shape[:-2], h, k).contiguous()


def _is_bare(term: NdLinear) -> bool:
    """Whether nothing but the forward of a planned NdLinear happens when a term is called."""
    hooks = term._forward_hooks or term._forward_pre_hooks
    hooks = hooks or term._backward_hooks or term._backward_pre_hooks
    own = type(term) is NdLinear and "forward" not in term.__dict__
    return own and term.execution == "planned" and not hooks


def _any_requires_grad(*tensors: Tensor | None) -> bool:
    return any(t is not None and t.requires_grad for t in tensors)


def _operands(
    layer: NdLinear, plan: Plan, weights: Sequence[Tensor], biases: Tensors
) -> list[Tensor | None]:
    """What the steps of a plan take: a matrix each, then a bias each."""
    operands: list[Tensor | None]
    if plan.inline:
        operands = [weights[k] for k in plan.order]
        for step, k in zip(plan.steps, plan.order):
            bias = biases[k]
            if bias is not None and step.right > 1 and not plan.literal:
                bias = bias.unsqueeze(1)  # one number for each row of a matrix
            operands.append(bias)
        return operands
    operands = [reduce(_kron, [weights[k] for k in step.modes]) for step in plan.steps]
    operands += [None] * len(operands)
    if biases[0] is not None:
        last = plan.steps[-1]
        shape = [size for size in (last.left, last.right) if size > 1]
        shape.insert(last.left > 1, last.hidden)
        operands[-1] = _total_bias(weights, biases, layer.order).reshape(shape)
    return operands


def _run(plan: Plan, product: Callable[..., Tensor], x: Tensor, *operands: Tensor | None) -> Tensor:
    """The products of a plan: prod H numbers per sample, in some shape."""
    n = len(plan.steps)
    for step, matrix, bias in zip(plan.steps, operands, operands[n:]):
        if plan.literal:
            axis = step.modes[0] - n
            x = x.transpose(axis, -1)
            if product is not _product and _is_much(x, step.hidden):
                y = product(x.reshape(-1, step.dim), matrix, bias)
                y = y.reshape(*x.shape[:-1], step.hidden)
            else:
                y = F.linear(x, cast("Tensor", matrix), bias)
            x = y.transpose(axis, -1)
        elif bias is None or bias.ndim < len(step.shape):
            x = product(x.reshape(step.shape), matrix, bias)
        else:  # another bias for each of several matrices
            y = product(x.reshape(step.shape), matrix).reshape(-1, *bias.shape)
            x = y.add_(bias) if product is _fast_product else y + bias.to(y.dtype)
    return x


def _is_thin(h: int, d: int, right: int, grad: bool) -> bool:
    """Whether a product of many matrices (d, right) is done as one, of a copy with axes swapped: no
    gradient of the weight, (h, d) for each, is then far above the data, nor are many products tiny.
    """
    tiny = grad and (min(h, d) == 1 or h * d <= 16)
    return tiny or (right < h and (right < 16 or 4 * right * (h + d) < h * d))


def _product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """(L, D) -> (L, H) or (L, D, R) -> (L, H, R); bias (H,) or (H, R). All can transform it."""
    if x.ndim == 2:
        return F.linear(x, weight, bias)
    left, d, right = x.shape
    h = weight.shape[0]
    if left > 1 and _is_thin(h, d, right, torch.is_grad_enabled()):  # one product of a copy
        y = F.linear(x.transpose(1, 2).reshape(-1, d), weight).view(left, right, h).transpose(1, 2)
        return y if bias is None else y + bias.to(y.dtype)
    if not x.is_cuda and x.stride()[1:] != (right, 1):
        x = x.contiguous()  # matrices in several pieces would be multiplied one by one
    if x.is_cuda and torch.is_autocast_enabled("cuda"):  # it would cast all `left` copies
        weight = weight.to(torch.get_autocast_dtype("cuda"))
    weight = weight.expand(left, h, d)
    return torch.bmm(weight, x) if bias is None else torch.baddbmm(bias, weight, x)


def _fast_product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`_product` without gradients or watchers: oneDNN where there is much."""
    h, d = weight.shape
    if d == 1:
        column = weight.t() if x.ndim == 2 else weight
        return x * column if bias is None else torch.addcmul(bias, x, column)
    if x.ndim == 2 and _is_much(x, h):
        return cast("Tensor", _onednn_linear(x, weight.contiguous(), bias, "none", [], ""))
    return _product(x, weight, bias)


def _is_much(x: Tensor, h: int) -> bool:
    """Whether a product (L, D) -> (L, h) is large enough, and may be done, by oneDNN."""
    much = x.numel() * (h + 2) >= 2**25 and x.dtype is torch.float32 and x.is_cpu
    return much and _onednn_linear is not None and not _dispatch_modes()


class _Large(torch.autograd.Function):
    """`_product` of large matrices with gradients: all three products by what is fastest."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _fast_product(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (g,) = grad_outputs
        x, weight = ctx.saved_tensors
        wanted = ctx.needs_input_grad
        watched = torch.is_grad_enabled() or not _is_ordinary(g)
        product = _product if watched else _fast_product
        dx = product(g, weight.t()) if wanted[0] else None
        dweight = g.t() @ x if wanted[1] else None
        return dx, dweight, g.sum(0) if wanted[2] else None


def _trained_product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`_product` with gradients."""
    if x.ndim == 2 and _is_much(x, weight.shape[0]):
        large: Callable[..., Tensor] = _Large.apply
        return large(x, weight, bias)
    return _product(x, weight, bias)


def _is_ordinary(x: Tensor) -> bool:
    """Whether this is an ordinary call: real numbers, and nothing traces or transforms."""
    return (
        type(x) in _PLAIN
        and x.dtype in _REAL
        and not _functorch_is_active()
        and getattr(forward_ad, "_current_level", 0) < 0
        and _tracing_state() is None
    )


def _plan_ahead(layer: NdLinear) -> None:
    """What every call needs is made with the layer: compilers then find it."""
    layer._plans = {}
    keys = [(9, True, cuda, False) for cuda in (False, True)]
    layer._plans_for_any = [_plan_for(layer, key) for key in keys]


for _kind, _method in ((NdLinear, _planned), (NdLinear, _plan_ahead), (NdLinearSum, _summed)):
    setattr(_kind, _method.__name__, _method)


# ==== Checks: what every part asks of its arguments =============================================
def _shapes(input_dims: Shape, hidden_size: Shape, rank: int = 1) -> tuple[Sizes, Sizes]:
    given = f"input_dims={input_dims!r}, hidden_size={hidden_size!r}"
    try:
        given += "" if rank == 1 else f", rank={rank!r}"
        dims = tuple(map(index, input_dims))
        hidden = tuple(map(index, hidden_size))
        rank = index(rank)
    except TypeError:
        raise TypeError(f"{given} must be sequences of integers, as (8, 8) and (4, 4)") from None
    if not dims or len(dims) != len(hidden) or min(*dims, *hidden, rank) < 1:
        raise ValueError(f"{given}: give equally many positive sizes (size 1 lets an axis vanish)")
    return dims, hidden


def _order(order: Shape | None, n: int) -> Shape:
    order = tuple(range(n) if order is None else order)
    if sorted(order) != list(range(n)):
        raise ValueError(f"order {order} must list each of the modes {tuple(range(n))} once")
    return order


_NO_ARITHMETIC = frozenset(
    getattr(torch, name) for name in dir(torch) if name.startswith(("float8_", "float4_"))
)


def _check_input(x: Tensor, dims: Sizes, weights: Tensors, compiling: bool = False) -> None:
    """Refuse what does not fit; a weight that is None is the business of its module."""
    if not isinstance(x, Tensor):
        wanted = ", ".join(map(str, dims))
        raise TypeError(f"expected a torch.Tensor of shape (..., {wanted}), got {type(x).__name__}")
    dtype = x.dtype
    if not compiling and (x.layout is not torch.strided or x.is_nested or dtype in _NO_ARITHMETIC):
        raise _unusable(x)
    if x.shape[-len(dims) :] != dims:
        wanted = ", ".join(map(str, dims))
        raise ValueError(
            f"expected input of shape (..., {wanted}), got {tuple(x.shape)}; move or reshape its "
            f"axes so that it ends in {dims}; x.unflatten(-1, {dims}) if the last one is flat"
        )
    for weight in weights:
        if weight is not None and weight.dtype is not dtype:
            _check_mixed(x, weight)
    first = weights[0] if weights else None
    if first is not None and x.device != first.device:
        _check_mixed(x, first)


def _unusable(x: Tensor) -> TypeError:
    if x.is_nested:
        return TypeError("nested x does not work: use to_padded_tensor, or give values() of it")
    if x.layout is not torch.strided:
        return TypeError(f"input of layout {x.layout} does not work: give x.to_dense()")
    return TypeError(f"torch cannot multiply {x.dtype}: convert all with .to(torch.bfloat16)")


def _check_mixed(x: Tensor, weight: Tensor) -> None:
    """Different dtypes are fine where autocast will make them equal."""
    device = x.device.type
    castable = all(t.is_floating_point() and t.dtype.itemsize < 8 for t in (x, weight))
    autocast = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    if x.device != weight.device or not (castable and autocast):
        ours, theirs = (f"{tuple(t.shape)} {t.dtype} on {t.device}" for t in (x, weight))
        castable &= x.device == weight.device
        cure = ".to(), or use torch.autocast" if castable else ".to()"
        raise TypeError(f"input {ours} and weight {theirs} do not mix: convert one with {cure}")


def _gather(layer: NdLinear, compiling: bool) -> tuple[list[Tensor], Tensors, bool]:
    """The weights and biases of the modes, and whether the modes are what NdLinear made, not
    quantised, wrapped, pruned or hooked. As part of every call it reads the modules' own dicts."""
    weights: list[Any] = []
    biases: list[Tensor | None] = []
    as_made = compiling or not any(_GLOBAL_HOOKS) or not _is_watched()
    modes: Any = layer._modules["align_layers"]
    for mode, h, d in zip(modes._modules.values(), layer.hidden_size, layer.input_dims):
        parameters = mode._parameters
        weight = parameters.get("weight")
        bias = parameters.get("bias")
        weights.append(weight)
        biases.append(bias)
        if (
            type(mode) is not nn.Linear
            or mode._forward_hooks
            or mode._forward_pre_hooks
            or mode._backward_hooks
            or mode._backward_pre_hooks
            or "forward" in mode.__dict__
            or weight is None
            or not (compiling or type(weight) in _PLAIN)
            or (bias is None) != (biases[0] is None)
        ):
            as_made = False
        elif weight.shape != (h, d):
            raise ValueError(
                f"mode {len(weights)} of {layer.input_dims} -> {layer.hidden_size} needs a weight "
                f"{(h, d)}, got {tuple(weight.shape)}; build a new NdLinear for other sizes"
            )
    return weights, biases, as_made


def _is_watched() -> bool:
    """Whether hooks on all modules want to see the modes; those of torch's FLOP counter do not."""
    owners = [getattr(hook, "__self__", None) for hooks in _GLOBAL_HOOKS for hook in hooks.values()]
    return any(type(owner).__name__ != "ModuleTracker" for owner in owners)


# Private names of torch: where one is missing, its stand-in sends every call down the plain path.
_functorch_is_active = getattr(torch._C, "_are_functorch_transforms_active", lambda: True)
_tracing_state = getattr(torch._C, "_get_tracing_state", lambda: True)
_any_autocast = getattr(torch._C, "_is_any_autocast_enabled", lambda: True)
_dispatch_modes = getattr(torch._C, "_len_torch_dispatch_stack", lambda: True)
_onednn_linear: Any = getattr(torch.ops.mkldnn, "_linear_pointwise", None)
_GLOBAL_HOOKS: list[dict[int, Any]] = [
    getattr(nn.modules.module, f"_global_{kind}_hooks", {})
    for kind in ("forward", "forward_pre", "backward", "backward_pre")
]
_PLAIN = (Tensor, nn.Parameter)
_REAL = frozenset([torch.float16, torch.bfloat16, torch.float32, torch.float64])
