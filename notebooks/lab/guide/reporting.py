"""Where in your own model a structured layer could stand: `report(model, inputs)`, one row for each nn.Linear.

    from lab import guide
    guide.report(model, torch.randn(32, 3, 224, 224))            # a data frame
    guide.report(model, tokens, parameters=0.1)                  # with foldings of at most a tenth of the parameters
    guide.foldings(768, 3072, parameters=20_000)                 # the sizes that a layer could have
    smaller, fits = guide.convert(model, ["fc1"], share=0.25)    # a copy with fitted layers, to be trained a little

Nothing is trained and nothing is changed: for a report the model runs once, in evaluation mode and without gradients, and comes back bit
for bit as it was. Needs torch and what the lab itself needs; counts are weights, and multiply-adds (1 = 2 FLOPs) per row of
the layer's input. Chapter 72 explains the columns. Which layer to train only training tells: `lab.guide.race`.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn

from ndlinear import (
    NdLinear,
    cheapest_order,
    count_macs,
    count_parameters,
    near_square,
    rearrange,
)

from .. import timing
from ..layers import BlockTensorTrain, LowRank, fit_kronecker, fit_low_rank

Shape = tuple[int, ...]
EXACT = 1024  # up to this side a singular value is computed exactly, beyond by iteration
SEPARABLE = 0.5  # share of its squared size that one Kronecker term must hold for a conversion to be worth a try


# ------------------------------------------------------------------------------------------------------------- foldings
def foldings(
    inputs: int, outputs: int, *, parameters: float | None = None, macs: float | None = None
) -> pd.DataFrame:
    """The NdLinear layers with two modes, none of length one, that could stand for a dense one: the fewest weights first.

    Args:
        inputs, outputs: of the dense layer.
        parameters, macs: at most so many, biases included; below 1, a share of the dense layer's. Only foldings within
            both are given.

    Returns:
        Columns ``input_dims``, ``hidden_size``, ``parameters``, ``macs``; no rows if nothing fits.
    """
    rows = []
    for a, c in itertools.product(divisors(inputs), divisors(outputs)):
        dims, hidden = (a, inputs // a), (c, outputs // c)
        order = cheapest_order(dims, hidden)
        rows.append((dims, hidden, count_parameters(dims, hidden), count_macs(dims, hidden, order)))
    columns = ["input_dims", "hidden_size", "parameters", "macs"]
    found = pd.DataFrame(rows, columns=columns).sort_values(["parameters", "macs"], kind="stable")
    for name, limit, dense in (
        ("parameters", parameters, (inputs + 1) * outputs),
        ("macs", macs, inputs * outputs),
    ):
        if limit is not None:
            found = found[found[name] <= (limit * dense if limit < 1 else limit)]
    return found.reset_index(drop=True)


def divisors(n: int) -> list[int]:
    """Divisors of n other than 1 and n."""
    return [d for d in range(2, n // 2 + 1) if n % d == 0]


def folding(inputs: int, outputs: int) -> tuple[Shape, Shape] | None:
    """Two modes as nearly square as possible, paired so that the weights are fewest; None if a size is prime or one."""
    small, large = near_square(inputs)
    few, many = near_square(outputs)
    if small == 1 or few == 1:
        return None
    return (small, large), (many, few)


# ------------------------------------------------------------------------------------------------ watching a model run
@dataclass
class Seen:
    """A linear layer of a model and what a run of the model did with it."""

    names: list[str]
    layer: nn.Linear
    calls: int = 0
    shape: Shape = ()  # of the input of the last call
    flattened: Shape = ()  # what nn.Flatten made this input of
    notes: list[str] = field(default_factory=list)

    @property
    def rows(self) -> int:
        return math.prod(self.shape[:-1])


def linear_layers(model: nn.Module) -> list[Seen]:
    """Each nn.Linear of a model once, with all its names; notes say which weights are used elsewhere as well."""
    found: dict[nn.Module, Seen] = {}
    holders: dict[int, set[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, nn.Linear):
            found.setdefault(module, Seen([], module)).names.append(name or "(the model)")
        for key, weight in module.named_parameters(recurse=False):
            holders.setdefault(id(weight), set()).add(f"{name}.{key}" if name else key)
    for seen in found.values():
        own = {f"{name}.weight" for name in seen.names} | {"weight"}
        others = sorted(holders.get(id(seen.layer.weight), set()) - own)
        if others:
            seen.notes.append(f"weight shared with {', '.join(others)}")
    return list(found.values())


def watch(model: nn.Module, inputs: Any) -> list[Seen]:
    """Run the model once and note what its linear layers get. The model is left as it was."""
    layers = linear_layers(model)
    by_layer = {seen.layer: seen for seen in layers}
    made: dict[
        int, tuple[Tensor, Shape]
    ] = {}  # outputs of nn.Flatten, kept so that no id is used twice
    hooks = []
    for module in model.modules():
        if module in by_layer:
            hooks.append(module.register_forward_pre_hook(_note(by_layer[module], made)))
        elif isinstance(module, nn.Flatten):
            hooks.append(module.register_forward_hook(_note_flatten(made)))
        elif isinstance(module, nn.MultiheadAttention) and module.out_proj in by_layer:
            seen = by_layer[module.out_proj]
            hooks.append(module.register_forward_hook(_note_attention(seen)))
    try:
        with untouched(model):
            _call(model, inputs)
    finally:
        for hook in hooks:
            hook.remove()
    return layers


def _note(seen: Seen, made: dict):
    def hook(_, args):
        seen.calls += 1
        seen.shape = tuple(args[0].shape)
        if id(args[0]) in made:
            seen.flattened = made[id(args[0])][1]

    return hook


def _note_flatten(made: dict):
    def hook(_, args, out):
        made[id(out)] = out, tuple(args[0].shape[1:])

    return hook


def _note_attention(seen: Seen):
    """The last map of an attention is used without being called."""

    def hook(_, args, out):
        seen.calls += 1
        seen.shape = tuple(out[0].shape)

    return hook


@contextlib.contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients; afterwards modes, buffers and generators are as before, and weights are checked."""
    modes = {module: module.training for module in model.modules()}
    buffers = {id(b): (b, b.detach().clone()) for b in model.buffers()}
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
        for module, training in modes.items():
            module.training = training
        with torch.no_grad():
            for buffer, value in buffers.values():
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


def check(model: Any) -> None:
    """Refuse what cannot be reported on, in words that say what to do."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if isinstance(weight, nn.UninitializedParameter):
            raise ValueError(f"{name} is lazy and has no size yet: run the model once, then ask")
        if "quantized" in type(module).__module__ and hasattr(module, "in_features"):
            raise ValueError(f"{name} is quantised: report on the model before its quantisation")
        if isinstance(module, nn.Linear) and not weight.is_floating_point():
            raise ValueError(
                f"{name} has weights of type {weight.dtype}, quantised perhaps: report on the model before that"
            )
        if isinstance(module, nn.Linear) and weight.is_meta:
            raise ValueError(f"{name} has no numbers (meta device): load the weights first")
    if not any(isinstance(module, nn.Linear) for module in model.modules()):
        kinds = sorted({type(m).__name__ for m in model.modules() if not list(m.children())})
        raise ValueError(f"this model has no nn.Linear; its layers are {', '.join(kinds)}")


# ------------------------------------------------------------------------------------------------ measures of one layer
def first_term(weight: Tensor, dims: Shape, hidden: Shape) -> float:
    """Share of the squared Frobenius norm of a weight (H, D) that its best Kronecker product holds: 1 - error^2 of
    `ndlinear.nearest_kronecker` with one term."""
    table = rearrange(weight.detach().to(torch.float64), dims, hidden)
    table = table if table.shape[0] <= table.shape[1] else table.T
    if len(table) <= EXACT:
        largest = torch.linalg.eigvalsh(table @ table.T)[-1]
    else:
        largest = torch.svd_lowrank(table, q=8, niter=12)[1][0] ** 2
    return float(largest / table.square().sum().clamp_min(1e-300))


def by_chance(weight: Tensor, dims: Shape, hidden: Shape, draws: int = 3, seed: int = 0) -> float:
    """The largest `first_term` of some random matrices of the same size and with the same entries, in another order."""
    order = torch.Generator().manual_seed(seed)
    entries = weight.detach().flatten()
    shuffled = [
        entries[torch.randperm(len(entries), generator=order).to(entries.device)]
        for _ in range(draws)
    ]
    return max(first_term(s.view_as(weight), dims, hidden) for s in shuffled)


@torch.no_grad()
def times(seen: Seen, dims: Shape, hidden: Shape, rounds: int) -> dict[str, float]:
    """Median microseconds of a forward pass at the batch, device and type of the run: the dense layer, a low-rank one with at
    most as many multiply-adds as NdLinear, a Monarch layer, and NdLinear."""
    layer = seen.layer
    like = {"device": layer.weight.device, "dtype": layer.weight.dtype}
    macs = count_macs(dims, hidden, cheapest_order(dims, hidden))
    rank = max(1, macs // (layer.in_features + layer.out_features))
    with torch.random.fork_rng(devices=[]):
        x = torch.randn(seen.shape, **like)
        low_rank = LowRank(layer.in_features, layer.out_features, rank).to(**like)
        monarch = BlockTensorTrain(dims, hidden).to(**like)
        structured = NdLinear(dims, hidden, **like)
    dense = torch.nn.functional.linear
    tensor = x.unflatten(-1, dims)
    calls = {
        "dense": lambda: dense(x, layer.weight, layer.bias),
        "low-rank": lambda: low_rank(x),
        "monarch": lambda: monarch(x),
        "ndlinear": lambda: structured(tensor),
    }
    found = timing.rounds(calls, rounds, device=str(x.device))
    return {name: 1e6 * float(np.median(values)) for name, values in found.items()}


# ----------------------------------------------------------------------------------------------------------- the report
def report(
    model: nn.Module,
    inputs: Any,
    *,
    parameters: float | None = None,
    macs: float | None = None,
    axes: Mapping[str, Shape] | None = None,
    rounds: int = 7,
) -> pd.DataFrame:
    """One row for each nn.Linear of a model: what could stand in its place, and what it would cost.

    Args:
        model: any torch.nn.Module that holds numbers. inputs: a tensor, a tuple of arguments or a dictionary of keyword
            arguments; times are measured at this batch, on the device where the layer lies.
        parameters, macs: budgets of each layer, see `foldings`. The folding with the fewest weights within them is
            shown; with none, the most nearly square one.
        axes: name of a layer -> the axes of its input that mean something, such as {"head": (64, 8, 8)}. What an
            nn.Flatten made a layer's input of is found without.
        rounds: of the measurement of time; 0 measures nothing.

    Returns:
        A data frame; an empty cell is a question that does not arise.

    Raises:
        TypeError, ValueError: no module, no nn.Linear, weights without numbers, or inputs that do not fit.
    """
    check(model)
    found = watch(model, inputs)
    names = {name for seen in found for name in seen.names}
    if unknown := sorted(set(axes or {}) - names):
        raise ValueError(f"axes names {unknown}; the linear layers are {sorted(names)}")
    return pd.DataFrame(
        [
            _row(seen, _axes(seen, axes or {}), {"parameters": parameters, "macs": macs}, rounds)
            for seen in found
        ]
    )  # fmt: skip


def _axes(seen: Seen, given: Mapping[str, Shape]) -> Shape:
    """The axes of a layer's input that mean something, or ()."""
    for name in seen.names:
        if name in given:
            named = tuple(given[name])
            if math.prod(named) != seen.layer.in_features:
                raise ValueError(
                    f"axes[{name!r}] = {named} has {math.prod(named)} entries, the layer reads {seen.layer.in_features}"
                )
            return named
    return tuple(n for n in seen.flattened if n > 1)


def _chosen(layer: nn.Linear, budget: dict) -> tuple[Shape, Shape] | None:
    """The folding to be shown for a layer."""
    square = folding(layer.in_features, layer.out_features)
    if square is None or all(limit is None for limit in budget.values()):
        return square
    fitting = foldings(layer.in_features, layer.out_features, **budget)
    if fitting.empty:
        return None
    return fitting["input_dims"][0], fitting["hidden_size"][0]


def _row(seen: Seen, axes: Shape, budget: dict, rounds: int) -> dict:
    layer = seen.layer
    inputs, outputs = layer.in_features, layer.out_features
    row = {
        "layer": " = ".join(seen.names),
        "inputs": inputs,
        "outputs": outputs,
        "calls": seen.calls,
        "rows": seen.rows if seen.calls else 0,
        "axes": "×".join(map(str, axes)) if len(axes) > 1 else "",
        "dense parameters": sum(p.numel() for p in layer.parameters(recurse=False)),
        "dense macs": inputs * outputs,
    }
    shapes = _chosen(layer, budget)
    if not seen.calls:
        seen.notes.append("these inputs do not reach it")
    if folding(inputs, outputs) is None:
        seen.notes.append("a prime number of inputs or outputs leaves an axis of length one")
    elif shapes is None:
        seen.notes.append("no folding within the budget")
    if shapes is not None:
        row |= _structured(layer, *shapes)
        if seen.calls and rounds:
            row |= {f"{name} µs": value for name, value in times(seen, *shapes, rounds).items()}
    if row.get("separable", 0) > max(SEPARABLE, 2 * row.get("by chance", 1)):
        seen.notes.append("one Kronecker term holds most of the trained weight: try from_linear")
    return row | {"notes": "; ".join(seen.notes)}


def _structured(layer: nn.Linear, dims: Shape, hidden: Shape) -> dict:
    """Costs of the layers of one folding, how separable the weight is, and what rank a low-rank layer of that size has."""
    (m, n), (a, c) = dims, hidden
    biased = layer.bias is not None
    size = count_parameters(dims, hidden, bias=biased)
    macs = count_macs(dims, hidden, cheapest_order(dims, hidden))
    both = layer.in_features + layer.out_features
    monarch = m * a * (n + c)
    return {
        "folding": f"{m}×{n} → {a}×{c}",
        "ndlinear parameters": size,
        "ndlinear macs": macs,
        "monarch parameters": monarch + biased * layer.out_features,
        "monarch macs": monarch,
        "low rank of as many macs": max(1, macs // both),
        "low rank of as many parameters": max(
            1, count_parameters(dims, hidden, bias=False) // both
        ),
        "full rank": min(layer.in_features, layer.out_features),
        "separable": first_term(layer.weight, dims, hidden),
        "by chance": by_chance(layer.weight, dims, hidden),
    }


# -------------------------------------------------------------------------------------------------------- conversion
FITS = {"ndlinear": fit_kronecker, "low-rank": fit_low_rank}


def replaceable(model: nn.Module, names: Iterable[str]) -> dict[str, Seen]:
    """The linear layers of a model that are named, each checked: another layer may take its place.

    Raises:
        TypeError, ValueError: no module, a name that is no nn.Linear of it, or a weight that is used elsewhere as well.
    """
    check(model)
    by_name = {name: seen for seen in linear_layers(model) for name in seen.names}
    found = {}
    for name in names:
        if name not in by_name:
            raise ValueError(
                f"{name!r} is not a linear layer of this model; they are {sorted(by_name)}"
            )
        seen = by_name[name]
        if len(seen.names) > 1 or seen.notes:
            raise ValueError(f"{name} shares its weight: {', '.join(seen.names[1:] + seen.notes)}")
        if isinstance(model.get_submodule(name.rpartition(".")[0]), nn.MultiheadAttention):
            raise ValueError(
                f"{name} is read by nn.MultiheadAttention itself and must stay nn.Linear"
            )
        found[name] = seen
    return found


def convert(
    model: nn.Module, layers: Iterable[str], *, share: float = 0.25, kind: str = "ndlinear"
) -> tuple[nn.Module, pd.DataFrame]:
    """A copy of a trained model in which some nn.Linear are replaced by structured layers fitted to their weights.

    The fit is to the weights alone, so train the copy a little before you judge it: chapter 72 has an example. In evaluation
    torch's nn.TransformerEncoderLayer reads the weights of its layers itself; with some of them replaced, call
    `torch.backends.mha.set_fastpath_enabled(False)` first.

    Args:
        model: is not changed. layers: names of its nn.Linear, as in the column ``layer`` of `report`.
        share: of the dense layer's parameters that a replacement may have, at most.
        kind: "ndlinear", a sum of two-mode terms with no more multiply-adds than the dense layer (`fit_kronecker`), or
            "low-rank" (`fit_low_rank`).

    Returns:
        The copy, and a data frame with a row for each replaced layer: ``layer``, ``built``, ``dense parameters``,
        ``parameters``, ``dense macs``, ``macs`` and ``error``, relative in the Frobenius norm.

    Raises:
        TypeError, ValueError: no module, a name that is no nn.Linear of it, a weight that is used elsewhere as well, an
            unknown kind, or a share into which nothing fits.
    """
    check(model)
    if kind not in FITS:
        raise ValueError(f"kind must be one of {', '.join(map(repr, FITS))}, got {kind!r}")
    copied = copy.deepcopy(model)
    rows = []
    for name, seen in replaceable(model, dict.fromkeys(layers)).items():
        layer, error = FITS[kind](seen.layer, share)
        layer.train(seen.layer.training)
        if name == "(the model)":
            copied = layer
        else:
            copied.set_submodule(name, layer)
        rows.append(
            {
                "layer": name,
                "built": _built(layer),
                "dense parameters": sum(p.numel() for p in seen.layer.parameters()),
                "parameters": sum(p.numel() for p in layer.parameters()),
                "dense macs": seen.layer.in_features * seen.layer.out_features,
                "macs": layer.multiply_adds(),
                "error": error,
            }
        )
    return copied, pd.DataFrame(rows)


def _built(layer: nn.Module) -> str:
    """What a fitted layer is, in a few words."""
    if isinstance(layer, LowRank):
        return f"rank {len(layer.down)}"
    (m, n), (a, c) = layer.map.input_dims, layer.map.hidden_size
    terms = len(layer.map.terms)
    return f"{m}×{n} → {a}×{c}, {terms} term" + "s" * (terms > 1)


__all__ = [
    "convert",
    "first_term",
    "folding",
    "foldings",
    "report",
    "watch",
]
