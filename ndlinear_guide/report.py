"""Where in your own model a structured layer could stand: `report(model, inputs)`, one row for each linear layer.

    found = report(model, torch.randn(32, 3, 224, 224))    # a data frame

A linear layer is an nn.Linear or a Conv1D of Hugging Face, which holds its weight as (D, H); the modes of an NdLinear are none.
Counts are weights, and multiply-adds (1 = 2 FLOPs) per row of the layer's input. What a layer is worth only training tells: `compare`.
"""

from __future__ import annotations

import contextlib
import importlib.util
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd
import torch
from scipy.sparse.linalg import svds
from torch import Tensor, nn

from ndlinear import cheapest_order, count_macs, count_parameters, rearrange

from .layers import Folding, Shape, folding, spread

EXACT = 256  # up to this side a singular value is computed exactly, beyond by iteration
TOLERANCE = 1e-3  # of the iteration
MANY = 2**22  # entries of a weight from which on it is shuffled once
SEPARABLE = 0.5  # share of its squared size that one Kronecker term must hold for a conversion to be worth a try


# ------------------------------------------------------------------------------------------------ watching a model run
@dataclass
class Seen:
    """A linear layer of a model and what a run of the model did with it."""

    names: list[str]
    module: nn.Module
    layer: nn.Linear  # on the same numbers
    calls: int = 0
    shape: Shape = ()  # of the input of the last call
    flattened: Shape = ()  # what nn.Flatten made this input of
    notes: list[str] = field(default_factory=list)


def is_linear(module: nn.Module) -> bool:
    """Whether a module is an nn.Linear, or the Conv1D of Hugging Face's GPT-2, which is one with a transposed weight."""
    conv = type(module).__name__ == "Conv1D" and hasattr(module, "nf")
    return isinstance(module, nn.Linear) or conv


def as_linear(module: nn.Module) -> nn.Linear:
    """An nn.Linear on the numbers of a linear layer."""
    weight = module.weight.detach()
    weight = weight if isinstance(module, nn.Linear) else weight.T
    linear = nn.Linear(*weight.shape[::-1], bias=module.bias is not None, device="meta")
    linear.weight = nn.Parameter(weight, requires_grad=False)
    if module.bias is not None:  # no parameter where it is pruned
        linear.bias = nn.Parameter(module.bias.detach(), requires_grad=False)
    return linear.train(module.training)


def linear_layers(model: nn.Module) -> list[Seen]:
    """Each linear layer of a model once, with all its names; notes say which weights are used elsewhere as well."""
    found: dict[nn.Module, Seen] = {}
    holders: dict[int, set[str]] = {}
    modes = {mode for module in model.modules() for mode in getattr(module, "align_layers", ())}
    for name, module in model.named_modules(remove_duplicate=False):
        if is_linear(module) and module not in modes:
            seen = found.setdefault(module, Seen([], module, as_linear(module)))
            seen.names.append(name or "(the model)")
        for key, weight in module.named_parameters(recurse=False):
            holders.setdefault(id(weight), set()).add(f"{name}.{key}" if name else key)
    for seen in found.values():
        own = {f"{name}.weight" for name in seen.names} | {"weight"}
        others = sorted(holders.get(id(seen.module.weight), set()) - own)
        if others:
            seen.notes.append(f"weight shared with {', '.join(others)}")
    return list(found.values())


def watch(model: nn.Module, inputs: Any) -> list[Seen]:
    """Run the model once, `untouched`, and note what its linear layers get."""
    layers = linear_layers(model)
    by_layer = {seen.module: seen for seen in layers}
    # outputs of nn.Flatten, kept so that no id is used twice
    made: dict[int, tuple[Tensor, Shape]] = {}

    def note(module, args, named, out):
        x, *_ = *args, *named.values()
        if isinstance(module, nn.Flatten):
            axes = tuple(x.shape[out.ndim - 1 :])
            made[id(out)] = out, axes if math.prod(axes) == out.shape[-1] else ()
        if isinstance(module, nn.MultiheadAttention):  # uses its last map without a call
            module, x = module.out_proj, out[0]
        if seen := by_layer.get(module):
            seen.calls += 1
            seen.shape = tuple(x.shape)
            _, seen.flattened = made.get(id(x), (x, seen.flattened))

    others = [m for m in model.modules() if isinstance(m, (nn.Flatten, nn.MultiheadAttention))]
    hooks = [m.register_forward_hook(note, with_kwargs=True) for m in (*by_layer, *others)]
    try:
        with untouched(model):
            _call(model, inputs)
    finally:
        for hook in hooks:
            hook.remove()
    return layers


@contextlib.contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients; afterwards modes, buffers and generators are as before, and weights are checked."""
    before = {module: (module.training, dict(module._buffers)) for module in model.modules()}
    values = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    versions = {name: p._version for name, p in model.named_parameters()}
    fast = torch.backends.mha.get_fastpath_enabled()
    devices = sorted({p.device.index for p in model.parameters() if p.device.type == "cuda"})
    torch.backends.mha.set_fastpath_enabled(False)  # it would use layers without calling them
    try:
        with torch.random.fork_rng(devices=devices), torch.no_grad():
            model.eval()
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
        for module, (training, buffers) in before.items():
            module.training = training
            for name, buffer in buffers.items():
                module._buffers[name] = buffer
        with torch.no_grad():
            for buffer, value in values:
                buffer.copy_(value)
    changed = [n for n, p in model.named_parameters() if p._version != versions.get(n)]
    if changed:
        raise RuntimeError(
            f"the model changes its own parameters when it runs: {', '.join(changed)}"
        )


def _call(model: nn.Module, inputs: Any) -> None:
    try:
        if isinstance(inputs, Mapping):
            model(**inputs)
        elif isinstance(inputs, (tuple, list)):
            model(*inputs)
        else:
            model(inputs)
    except Exception as error:
        raise ValueError(
            f"the model does not run on these inputs ({type(error).__name__}: {error}); give a tensor, a tuple of "
            "the arguments, or a dictionary of keyword arguments, on the model's device"
        ) from error


def check(model: Any, numbers: bool = True) -> None:
    """Refuse what cannot be reported on, in words that say what to do; on the meta device, weights have no ``numbers``."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if isinstance(weight, nn.UninitializedParameter):
            raise ValueError(f"{name} is lazy and has no size yet: run the model once, then ask")
        if "quantized" in type(module).__module__ and hasattr(module, "in_features"):
            raise ValueError(f"{name} is quantised: report on the model before its quantisation")
        if is_linear(module) and not weight.is_floating_point():
            raise ValueError(
                f"{name} has weights of type {weight.dtype}, quantised perhaps: report on the model before that"
            )
        if numbers and is_linear(module) and weight.is_meta:
            raise ValueError(f"{name} has no numbers (meta device): load the weights first")
        if numbers and is_linear(module) and not weight.float().isfinite().all():
            raise ValueError(f"{name} has weights that are not finite")
    if linear_layers(model):
        return
    own = [n or "itself" for n, m in model.named_modules() if hasattr(m, "align_layers")]
    if own:
        raise ValueError(
            f"nothing is left to exchange: every linear layer of this model is NdLinear already ({', '.join(own)}); "
            "`ndlinear.to_linear` makes one dense again"
        )
    kinds = sorted({type(m).__name__ for m in model.modules() if not list(m.children())})
    raise ValueError(f"this model has no nn.Linear; its layers are {', '.join(kinds)}")


# ------------------------------------------------------------------------------------------------ measures of one layer
def first_term(weight: Tensor, dims: Shape, hidden: Shape) -> float:
    """Share of the squared Frobenius norm of a weight (H, D) that its best Kronecker product holds: 1 - error^2 of
    `ndlinear.nearest_kronecker` with one term.

    With more than two modes this is an upper bound: the modes are joined to two, in the way that holds least. Up to a side of
    `EXACT` of the rearranged weight it is exact; beyond, Lanczos iteration in float32 finds it to a relative error of `TOLERANCE`,
    in half a second for 4,096 × 4,096 entries.
    """

    def joined(sizes: Shape, cut: int) -> Shape:
        return math.prod(sizes[:cut]), math.prod(sizes[cut:])

    cuts = range(1, len(dims))
    tables = (rearrange(weight.detach(), joined(dims, k), joined(hidden, k)) for k in cuts)
    return min(map(_largest, tables))


def _largest(table: Tensor) -> float:
    """The largest squared singular value of a matrix over the sum of all."""
    table = table if table.shape[0] <= table.shape[1] else table.T
    side = len(table)
    table = table.to(torch.float64 if side <= EXACT else torch.float32)
    total = float(table.square().sum())
    if side <= EXACT or not total:
        return float(torch.linalg.eigvalsh(table @ table.T)[-1]) / max(total, 1e-300)
    start = np.random.default_rng(0).standard_normal(side).astype(np.float32)
    how = {"k": 1, "tol": math.sqrt(TOLERANCE), "v0": start, "return_singular_vectors": False}
    return float(svds(table.cpu().numpy(), **how)[0]) ** 2 / total


def by_chance(weight: Tensor, dims: Shape, hidden: Shape) -> float:
    """The largest `first_term` of three random matrices of the same size and with the same entries in another order; of one if
    there are more than `MANY` entries."""
    order = torch.Generator().manual_seed(0)
    entries = weight.detach().flatten()
    found = []
    for _ in range(3 if len(entries) <= MANY else 1):
        mixed = entries[torch.randperm(len(entries), generator=order).to(entries.device)]
        found.append(first_term(mixed.view(weight.shape), dims, hidden))
    return max(found)


# ----------------------------------------------------------------------------------------------------------- the report
def report(
    model: nn.Module, inputs: Any, *, axes: Mapping[str, Shape] | None = None
) -> pd.DataFrame:
    """One row for each linear layer of a model: what could stand in its place, what it would cost, and what to do.

    Args:
        model: any torch.nn.Module that holds numbers. inputs: a tensor, a tuple of arguments or a dictionary of keyword
            arguments, on the model's device.
        axes: name of a layer -> the axes of its input that mean something, such as {"head": (64, 8, 8)}. What an
            nn.Flatten made a layer's input of is found without.
            The folding is that on the axes, where there are any, with hidden axes as equal as possible, else the most nearly
            square one. The book's calculator lists those of a budget.

    Returns:
        A data frame; an empty cell is a question that does not arise. ``folding`` is what `convert` takes.

    Raises:
        TypeError, ValueError: no module, no linear layer, weights without numbers, or inputs that do not fit.
    """
    check(model)
    found = watch(model, inputs)
    given = lengths(axes or {}, {name: seen.layer for seen in found for name in seen.names})
    own = [_axes(seen, given) for seen in found]
    pairs = bar(list(zip(found, own)), "report")
    return pd.DataFrame([_row(seen, each) for seen, each in pairs])


def bar(items: list, label: str) -> Iterable:
    """The items; where tqdm is installed and there are more than one, with a progress bar, which TQDM_DISABLE=1 switches off."""
    if len(items) < 2 or importlib.util.find_spec("tqdm") is None:
        return items
    return importlib.import_module("tqdm.auto").tqdm(items, desc=label)


def lengths(axes: Mapping[str, Shape], layers: Mapping[str, nn.Linear]) -> dict[str, Shape]:
    """The axes of each layer's input without those of length one; refuses other names than the layers' and other sizes."""
    for name, own in axes.items():
        if name not in layers:
            raise ValueError(f"axes names {name!r}; the linear layers are {sorted(layers)}")
        if math.prod(own) != layers[name].in_features:
            raise ValueError(
                f"axes of {name}: {tuple(own)} has {math.prod(own)} entries, the layer reads {layers[name].in_features}"
            )
    return {name: tuple(n for n in own if n > 1) for name, own in axes.items()}


def _axes(seen: Seen, given: Mapping[str, Shape]) -> Shape:
    """The axes of a layer's input that mean something and are longer than one; () if there are not two."""
    named = next((given[name] for name in seen.names if name in given), seen.flattened)
    found = tuple(n for n in named if n > 1)
    return found if len(found) > 1 else ()


def _chosen(layer: nn.Linear, axes: Shape) -> Folding | None:
    """The folding to be shown for a layer."""
    if not axes:
        return folding(layer.in_features, layer.out_features)
    hidden = spread(layer.out_features, len(axes))
    return None if 1 in hidden else (axes, hidden)


def _row(seen: Seen, axes: Shape) -> dict:
    layer = seen.layer
    inputs, outputs = layer.in_features, layer.out_features
    row = {
        "layer": " = ".join(seen.names),
        "inputs": inputs,
        "outputs": outputs,
        "calls": seen.calls,
        "rows": math.prod(seen.shape[:-1]) if seen.calls else 0,
        "axes": "×".join(map(str, axes)),
        "dense parameters": sum(p.numel() for p in layer.parameters(recurse=False)),
        "dense macs": inputs * outputs,
    }
    shapes = _chosen(layer, axes)
    if shapes is not None:
        row |= _structured(layer, *shapes)
    return row | {"advice": _advice(seen, axes, row)}


def _advice(seen: Seen, axes: Shape, row: dict) -> str:
    """What to do with a layer, in a sentence."""
    if seen.notes:
        return f"keep it: {', '.join(seen.notes)}"
    if not seen.calls:
        return "keep it: nothing calls it on these inputs"
    if "folding" not in row:
        sizes = f"{row['inputs']:,} inputs or {row['outputs']:,} outputs"
        return f"keep it: {sizes} are no product of {len(axes) or 2} numbers above one"
    if row["separable"] > max(SEPARABLE, 2 * row["by chance"]):
        return "convert it: one Kronecker product holds most of its weight"
    if axes:
        return "do not convert it; compare new layers, which can use its axes"
    return "do not convert it; no axes are known, so compare a narrower layer too"


def _structured(layer: nn.Linear, dims: Shape, hidden: Shape) -> dict:
    """Costs of the layer of one folding, and how separable the weight is."""
    return {
        "folding": (dims, hidden),
        "ndlinear parameters": count_parameters(dims, hidden, bias=layer.bias is not None),
        "ndlinear macs": count_macs(dims, hidden, cheapest_order(dims, hidden)),
        "separable": first_term(layer.weight, dims, hidden),
        "by chance": by_chance(layer.weight, dims, hidden),
    }
