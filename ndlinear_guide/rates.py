"""Learning rates for models with NdLinear layers: `optimiser(lr_groups(model, lr))`. One file, torch only, copyable.

The rule. A step of rate lr changes the output of a dense layer D -> H by an amount that grows with D under Adam. An NdLinear
layer has N small matrices D_k -> H_k in its place, and each moves the output by an amount that grows with D_k alone. Every
one of them gets the rate at which its step changes the output by at most 1/N of what the step of the dense layer can:

    rate_k = lr * r(D_k, H_k) / (N * r(D, H)),     r = 1 / D          Adam and all whose entries move by about the rate
                                                       H / D          SGD
                                                       min(1, H/D)^½  Muon, as torch.optim.Muon scales its steps

A bias is a matrix with one input: D_k = D = 1. The factor d_in / d_in(factor) / number of factors for Adam is that of Qiu et al.
(2024), arXiv:2406.06248. Chapter 15 of the book derives the rest and measures what it is worth. It is an upper bound on
steps and no optimum: gradients that point in many directions leave room for a larger rate.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import nn

Shape = tuple[int, int]  # inputs, outputs of a matrix
SIZE = {  # r: a rate that gives a matrix with so many inputs and outputs steps of one size
    "adam": lambda inputs, outputs: 1 / inputs,
    "sgd": lambda inputs, outputs: outputs / inputs,
    "muon": lambda inputs, outputs: math.sqrt(min(1.0, outputs / inputs)),
}


def lr_groups(
    model: nn.Module,
    lr: float,
    *,
    optimiser: str = "adam",
    tuned_at: Mapping[str, Shape] | None = None,
    weight_decay: float | None = None,
) -> list[dict]:
    """Parameter groups for a torch optimiser, with the rule's rate for every NdLinear layer of a model and lr for the rest.

    Args:
        model: layers are found by what they consist of (`align_layers`, and `terms` of a sum), so NdLinear of the book and of
            the released package, NdLinearSum and NdLinearLoRA are all known. A sum of R terms counts as R * N factors, its
            own bias as a dense layer's. A layer that says itself what each of its ``matrices()`` reads and writes, as those of
            `ndlinear_guide.layers`, gets the rule's rates too. All other parameters get lr, among
            them those of which a parametrisation makes the weight of a mode; frozen ones are left out. A parameter that stands
            in several places gets the smallest of their rates.
        lr: the rate of the dense layers that the NdLinear layers stand for.
        optimiser: "adam" (also AdamW, NAdam, RMSprop, Lion), "sgd" or "muon". torch.optim.Muon takes matrices only: no
            group mixes them with other parameters, so choose groups by `group["params"][0].ndim == 2`.
        tuned_at: name of a layer -> (inputs, outputs) of the dense layer for which lr was tuned, where it is another than
            the layer's own, e.g. `layer_shapes(small_model)`; nn.Linear and convolutions named here are scaled as well.
        weight_decay: also give each group a decay, such that with decoupled decay (AdamW, or SGD's) the Kronecker
            matrix of a layer shrinks per step by the factor by which lr and this decay would shrink a dense one.

    Returns:
        Groups {"params", "lr"} and, if asked for, "weight_decay"; each trainable parameter in exactly one.

    Raises:
        TypeError, ValueError: an argument is out of range, a name is unknown, or nothing is to be trained.
    """
    _check(model, lr, optimiser, tuned_at or {}, weight_decay)
    chosen = _chosen(model, SIZE[optimiser], tuned_at or {})
    groups: dict[tuple, dict] = {}
    for parameter, (factor, modes) in chosen.items():
        group = {"lr": lr * factor}
        if weight_decay is not None:
            group["weight_decay"] = weight_decay / (factor * modes)
        key = (*group.values(), parameter.ndim == 2)
        groups.setdefault(key, {"params": []} | group)["params"].append(parameter)
    if not groups:
        raise ValueError(
            "no parameter of this model requires a gradient, so there is nothing to train"
        )
    return list(groups.values())


def rates(model: nn.Module, lr: float, **options) -> dict[str, float]:
    """The rule's rate of each trainable parameter by name; options as in `lr_groups`."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    return {
        names[parameter]: group["lr"]
        for group in lr_groups(model, lr, **options)
        for parameter in group["params"]
    }


def factor_rates(
    lr: float, dense: Shape, factors: Sequence[Shape], optimiser: str = "adam"
) -> list[float]:
    """The rule itself: rates of matrices (D_k, H_k) whose product stands for a dense layer (D, H) of rate lr.

    Holds for any layer that is a product of matrices with unit gain; a low-rank layer is [(D, r), (r, H)].
    """
    size = SIZE[optimiser]
    return [lr * size(*factor) / (len(factors) * size(*dense)) for factor in factors]


def layer_shapes(model: nn.Module) -> dict[str, Shape]:
    """Inputs and outputs of every NdLinear, linear and convolutional layer by name, for `tuned_at`."""
    return {name: _shape(layer) for name, layer in _layers(model)}


# ------------------------------------------------------------------------------------------------------ finding layers
def _modes(module: nn.Module) -> list[nn.Linear] | None:
    """The matrices of an NdLinear layer, or None."""
    modes = getattr(module, "align_layers", None)
    known = isinstance(modes, nn.ModuleList) and all(isinstance(m, nn.Linear) for m in modes)
    return list(modes) if known and len(modes) else None


def _terms(module: nn.Module) -> list[nn.Module] | None:
    """The NdLinear layers of an NdLinearSum, or None."""
    terms = getattr(module, "terms", None)
    known = isinstance(terms, nn.ModuleList) and all(_modes(term) for term in terms)
    return list(terms) if known and len(terms) else None


def _lists(module: nn.Module) -> bool:
    """Whether a layer says itself what each of its matrices reads and writes."""
    return callable(getattr(module, "matrices", None)) and hasattr(module, "steps")


def _known(module: nn.Module) -> bool:
    """Whether the rule knows a layer without its being named: NdLinear, a sum, or one that lists its matrices."""
    return bool(_lists(module) or _terms(module) or _modes(module))


def _layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Sums, NdLinear layers, linear layers and convolutions, outermost first and never a part of one found before."""
    parts: set[nn.Module] = set()
    for name, module in model.named_modules(remove_duplicate=False):
        if module in parts:
            continue
        if _known(module):
            parts.update(part for part in module.modules() if part is not module)
            yield name, module
        elif isinstance(module, (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)):
            yield name, module


def _shape(layer: nn.Module) -> Shape:
    """Inputs and outputs of the dense layer that a layer stands for."""
    if _lists(layer):
        return layer.in_features, layer.out_features
    if terms := _terms(layer):
        return _shape(terms[0])
    if modes := _modes(layer):
        return tuple(
            math.prod(getattr(m, key) for m in modes) for key in ("in_features", "out_features")
        )
    return layer.weight[0].numel(), layer.weight.shape[0]


# ------------------------------------------------------------------------------------------------------------ the rule
def _factors(layer: nn.Module, size, dense: Shape) -> Iterator[tuple[nn.Parameter, float, int]]:
    """(parameter, factor on lr, number of modes) for the parameters of one layer."""
    if _lists(layer):
        for weight, *shape in layer.matrices():
            yield weight, size(*shape) / (layer.steps * size(*dense)), layer.steps
        if layer.bias is not None:
            yield layer.bias, size(1, layer.out_features) / size(1, dense[1]), 1
        return
    terms = _terms(layer) or [layer]
    modes = [_modes(term) or [term] for term in terms]
    count = sum(len(each) for each in modes)
    for part in (part for each in modes for part in each):
        yield part.weight, size(*_shape(part)) / (count * size(*dense)), len(modes[0])
        if part.bias is not None:
            bias = size(1, _shape(part)[1]) / (count * size(1, dense[1]))
            yield part.bias, bias, len(modes[0])
    if _terms(layer) and isinstance(getattr(layer, "bias", None), nn.Parameter):
        yield layer.bias, size(1, _shape(layer)[1]) / size(1, dense[1]), 1


def _chosen(model: nn.Module, size, tuned_at) -> dict[nn.Parameter, tuple[float, int]]:
    """Factor on lr and number of modes for each trainable parameter, in the order of `model.parameters()`."""
    found: dict[int, list[tuple[float, int]]] = {}
    inside: set[nn.Module] = set()
    for name, layer in _layers(model):
        if not _known(layer) and name not in tuned_at:
            continue
        inside.update(layer.modules())
        for parameter, *role in _factors(layer, size, tuned_at.get(name, _shape(layer))):
            found.setdefault(id(parameter), []).append(tuple(role))
    for module in set(model.modules()) - inside:
        for parameter in module.parameters(recurse=False):
            found.setdefault(id(parameter), []).append((1.0, 1))
    trained = (p for p in model.parameters() if p.requires_grad)
    return {p: min(found.get(id(p), [(1.0, 1)])) for p in trained}


def _check(model, lr, optimiser, tuned_at, weight_decay) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    if isinstance(lr, (bool, torch.Tensor)) or not isinstance(lr, (int, float)):
        raise TypeError(f"lr must be a number, the rate of a dense layer, got {type(lr).__name__}")
    if not 0 < lr < math.inf:
        raise ValueError(f"lr must be positive and finite, got {lr}")
    if not 0 <= (weight_decay or 0) < math.inf:
        raise ValueError(f"weight_decay must be finite and not negative, got {weight_decay}")
    if optimiser not in SIZE:
        raise ValueError(
            f"optimiser must be one of {', '.join(map(repr, SIZE))}, got {optimiser!r}"
        )
    names = {name for name, _ in _layers(model)}
    if unknown := sorted(set(tuned_at) - names):
        raise ValueError(f"tuned_at names {unknown}; the layers of this model are {sorted(names)}")
    for name, shape in tuned_at.items():
        if len(shape) != 2 or not all(isinstance(n, int) and n > 0 for n in shape):
            raise ValueError(f"tuned_at[{name!r}] must be two positive integers, got {shape!r}")
