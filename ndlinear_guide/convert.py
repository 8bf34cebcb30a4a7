"""Fitted layers in a trained model: `convert(model, names)` gives a copy with them, to be trained a little.

smaller, fits = convert(model, ["fc1"], share=0.25)
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Iterable, Mapping, Sequence

import pandas as pd
import torch
from torch import Tensor, nn

from ndlinear import NdLinearSum, cheapest_order, count_macs, count_parameters, rearrange

from .layers import Folding
from .report import Seen, bar, check, linear_layers

PLANS = {"rank"}, {"rank", "input_dims", "hidden_size"}  # the keys of a layer that `rebuild` makes


def replaceable(model: nn.Module, names: Iterable[str], numbers: bool = True) -> dict[str, Seen]:
    """The linear layers of a model that are named, each checked: another layer may take its place.

    Raises:
        TypeError, ValueError: no module, a name that is no nn.Linear of it, or a weight that is used elsewhere as well.
    """
    check(model, numbers)
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
        if "weight" in vars(seen.module):
            raise ValueError(f"a hook makes the weight of {name}: call its remove first")
        if isinstance(model.get_submodule(name.rpartition(".")[0]), nn.MultiheadAttention):
            raise ValueError(
                f"{name} is read by nn.MultiheadAttention itself and must stay nn.Linear"
            )
        found[name] = seen
    return found


def convert(
    model: nn.Module,
    layers: Iterable[str] | Mapping[str, Folding],
    *,
    share: float = 0.25,
    kind: str = "ndlinear",
) -> tuple[nn.Module, pd.DataFrame]:
    """A copy of a trained model in which some linear layers are replaced by structured layers fitted to their weights.

    The new layers are made of torch's and of `ndlinear`'s, so a pickle of the copy is read without this book.

    The fit is to the weights alone, so train the copy a little before you judge it. In evaluation
    torch's nn.TransformerEncoderLayer reads the weights of its layers itself; with some of them replaced, call
    `torch.backends.mha.set_fastpath_enabled(False)` first. New layers are trainable, whether the old ones were frozen or not.

    Args:
        model: is not changed. layers: names of its linear layers, as in the column ``layer`` of `report`; or name -> folding,
            such as {"fc1": ((24, 24), (48, 32))}, as in its column ``folding``.
        share: of the dense layer's parameters that a replacement may have, at most.
        kind: "ndlinear", the nearest sum of as many NdLinear terms as fit into the share and into the multiply-adds of the dense
            layer, on the folding given or else on the best one (k, D/k) -> (k, H/k): exact for two modes, a local optimum for
            more. Or "low-rank", the nearest pair of nn.Linear, by singular value decomposition. Biases are copied.

    Returns:
        The copy, and a data frame with a row for each replaced layer: ``layer``, ``built`` as `rebuild` takes it,
        ``dense parameters``, ``parameters``, ``dense macs``, ``macs`` and ``error``, relative in the Frobenius norm.

    Raises:
        TypeError, ValueError: no module, a name that is no linear layer of it, a weight that is used elsewhere as well, an
            unknown kind, or a share into which nothing fits.
    """
    if kind not in ("ndlinear", "low-rank"):
        raise ValueError(f"kind must be 'ndlinear' or 'low-rank', got {kind!r}")
    if not 0 < share <= 1:
        raise ValueError(f"share must be above zero and at most one, got {share}")
    given = layers if isinstance(layers, Mapping) else dict.fromkeys(layers)
    named = list(replaceable(model, given).items())
    new, rows = {}, []
    for name, seen in bar(named, "convert"):
        dense = seen.layer
        low_rank = kind == "low-rank"
        fit = fit_low_rank if low_rank else functools.partial(fit_kronecker, folding=given[name])
        new[name], error = fit(dense, share)
        built, macs = _built(new[name])
        rows.append(
            {
                "layer": name,
                "built": built,
                "dense parameters": sum(p.numel() for p in dense.parameters()),
                "parameters": sum(p.numel() for p in new[name].parameters()),
                "dense macs": dense.in_features * dense.out_features,
                "macs": macs,
                "error": error,
            }
        )
    return exchange(copy.deepcopy(model), new), pd.DataFrame(rows)


def rebuild(model: nn.Module, plan: Mapping[str, Mapping]) -> nn.Module:
    """The model itself, with layers of the form that `convert` built and fresh numbers in place of its dense ones.

    For `load_state_dict` of a converted model, or at the end of ``__init__`` of a class whose `from_pretrained` loads it.

    Args:
        plan: name of a layer -> {"rank"} of a low-rank layer or {"input_dims", "hidden_size", "rank"} of a sum of NdLinear
            terms; it may come from JSON.

    Raises:
        TypeError, ValueError: as `convert`, or a plan whose sizes are not those of the layer.
    """
    found = replaceable(model, plan, numbers=False)
    return exchange(model, {name: _fresh(seen.layer, plan[name]) for name, seen in found.items()})


def exchange(model: nn.Module, new: Mapping[str, nn.Module]) -> nn.Module:
    """The model itself with layers replaced by name; trainable, with the mode, the type and the device of the old ones."""
    for name, layer in new.items():
        if name == "(the model)":
            old, whole = model, layer
        else:
            old, whole = model.get_submodule(name), model
            model.set_submodule(name, layer)
        layer.to(old.weight).train(old.training)
        model = whole
    return model


def _fresh(linear: nn.Linear, built: Mapping) -> nn.Sequential:
    """An unfitted layer in place of a dense one, of modules of torch and of `ndlinear` alone."""
    inputs, outputs, biased = linear.in_features, linear.out_features, linear.bias is not None
    if {*built} not in PLANS or built["rank"] < 1:
        raise ValueError(f"{built} is no plan: give a rank of at least 1, and both sizes or none")
    if "input_dims" not in built:
        down = nn.Linear(inputs, built["rank"], bias=False)
        return nn.Sequential(down, nn.Linear(built["rank"], outputs, bias=biased))
    dims, hidden = tuple(built["input_dims"]), tuple(built["hidden_size"])
    if (math.prod(dims), math.prod(hidden)) != (inputs, outputs):
        raise ValueError(f"{dims} -> {hidden} has other sizes than {inputs} -> {outputs}")
    return _on_flat(NdLinearSum(dims, hidden, built["rank"], bias=biased))


def _on_flat(layer: NdLinearSum) -> nn.Sequential:
    """A sum of terms that reads and writes flat vectors."""
    axes = len(layer.hidden_size)
    return nn.Sequential(nn.Unflatten(-1, layer.input_dims), layer, nn.Flatten(-axes))


def _built(layer: nn.Sequential) -> tuple[dict, int]:
    """What a fitted layer is, as `rebuild` takes it, and its multiply-adds."""
    if len(layer) == 2:  # low rank
        return {"rank": layer[0].out_features}, sum(part.weight.numel() for part in layer)
    dims, hidden, rank = layer[1].input_dims, layer[1].hidden_size, layer[1].rank
    macs = rank * count_macs(dims, hidden, cheapest_order(dims, hidden))
    return {"input_dims": dims, "hidden_size": hidden, "rank": rank}, macs


# ---------------------------------------------------------------------------------------- layers fitted to a trained one
def fit_low_rank(linear: nn.Linear, share: float) -> tuple[nn.Sequential, float]:
    """The low-rank layer nearest to a dense one as two torch.nn.Linear, and its relative error in the Frobenius norm."""
    outputs, inputs = linear.weight.shape
    rank = min(_budget(linear, share) // (inputs + outputs), inputs, outputs)
    if rank < 1:
        raise ValueError(f"rank one of {linear} takes more than {share:g} of its parameters")
    u, s, v = torch.linalg.svd(linear.weight.detach().double(), full_matrices=False)
    root = s[:rank].sqrt()
    pair = _fresh(linear, {"rank": rank}).to(linear.weight)
    down, up = pair
    with torch.no_grad():
        down.weight.copy_(root[:, None] * v[:rank])
        up.weight.copy_(u[:, :rank] * root)
        if linear.bias is not None:
            up.bias.copy_(linear.bias)
    return pair, float(s[rank:].norm() / s.norm().clamp_min(1e-300))


def fit_kronecker(
    linear: nn.Linear, share: float, folding: tuple[Sequence[int], Sequence[int]] | None = None
) -> tuple[nn.Sequential, float]:
    """The sum of NdLinear terms nearest to a dense layer, between a folding and its reverse, and its relative error.

    Without a folding it is the one (k, D/k) -> (k, H/k) with the smallest error: small k is close to a dense layer with shared
    blocks, large k has many small terms.
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
    return _on_flat(layer), layer.approximation.weight_error


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
