"""LoKr files of LyCORIS, ai-toolkit and PEFT: as NdLinear adapters, as plain LoRA, and back.

A LoKr update of a linear map is scale * (W_1 kron W_2), stored as `lokr_w1` and `lokr_w2`, or as
the products `lokr_w1_a @ lokr_w1_b` and `lokr_w2_a @ lokr_w2_b`, with an `alpha`. In files of
LyCORIS and ai-toolkit the scale is alpha / rank, with the columns of `_a` as rank, and 1 where both
factors are full, whatever `alpha` says. PEFT's files have no alpha; give alpha / r of its
`adapter_config.json` as `scale`, which it applies to full factors too.

Functions take and return what `safetensors.torch.load_file` reads and `save_file` writes. Needs
`ndlinear.py` and `ndlinear_lora.py` beside it. Source: LoKr in arXiv:2309.14859.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ndlinear import near_square, nearest_kronecker
from ndlinear_lora import NdLinearLoRA, replace_layers

__all__ = ["Update", "load_lokr", "lokr_tensors", "lokr_to_lora", "lora_to_lokr", "read_lokr"]

PARTS = ("lokr_w1", "lokr_w1_a", "lokr_w1_b", "lokr_w2", "lokr_w2_a", "lokr_w2_b", "alpha")
LORA = (("lora_A.weight", "lora_B.weight"), ("lora_down.weight", "lora_up.weight"))


class Update(NamedTuple):
    """scale * (first kron second), (H_1 H_2, D_1 D_2)."""

    first: Tensor  # (H_1, D_1)
    second: Tensor  # (H_2, D_2)
    scale: float


def read_lokr(tensors: Mapping[str, Tensor], scale: float | None = None) -> dict[str, Update]:
    """The updates of a LoKr file, each under the name of its layer in the file.

    Args:
        tensors: of the file.
        scale: of all updates, in place of the file's own.

    Raises:
        ValueError: a tensor is not of a LoKr adapter of a linear map, or one is missing.

    >>> half = {"q.lokr_w1": torch.ones(2, 2), "q.lokr_w2_a": torch.ones(3, 1)}
    >>> half |= {"q.lokr_w2_b": torch.ones(1, 4), "q.alpha": torch.tensor(0.5)}
    >>> read_lokr(half)["q"].second.shape, read_lokr(half)["q"].scale
    (torch.Size([3, 4]), 0.5)
    """
    layers = _by_layer(tensors, PARTS)
    if not layers:
        raise ValueError("there is no LoKr adapter: no tensor ends in .lokr_w1 or .lokr_w1_a")
    return {name: _update(name, parts, scale) for name, parts in layers.items()}


def _by_layer(tensors: Mapping[str, Tensor], ends) -> dict[str, dict[str, Tensor]]:
    layers: dict[str, dict[str, Tensor]] = {}
    for key, value in tensors.items():
        end = next((end for end in ends if key.endswith(f".{end}")), None)
        if end is None:
            raise ValueError(
                f"{key} is none of {', '.join(ends)} of a layer: leave out tensors of other "
                "adapters and of convolutions (lokr_t2); DoRA (dora_scale) cannot be converted"
            )
        layers.setdefault(key.removesuffix(f".{end}"), {})[end] = value
    return layers


def _update(name: str, parts: dict[str, Tensor], scale: float | None) -> Update:
    factors = []
    found = 1.0
    for key in ("lokr_w1", "lokr_w2"):
        if key in parts:
            factor = parts[key]
        elif f"{key}_a" in parts and f"{key}_b" in parts:
            left = parts[f"{key}_a"]
            factor = left @ parts[f"{key}_b"]
            found = float(parts.get("alpha", left.shape[1])) / left.shape[1]
        else:
            raise ValueError(f"{name} lacks {key}, and {key}_a with {key}_b, too")
        if factor.ndim != 2:
            raise ValueError(f"{name} adapts a convolution; only linear maps can be converted")
        factors.append(factor)
    return Update(*factors, found if scale is None else scale)


def load_lokr(
    model: nn.Module,
    tensors: Mapping[str, Tensor],
    *,
    scale: float | None = None,
    prefix: str | None = None,
    **options,
) -> nn.Module:
    """Put the updates of a LoKr file on a model, in place, as NdLinearLoRA with two modes.

    A factor that is stored as a product of two is multiplied out: further training may raise its
    rank.

    Args:
        model: whose nn.Linear layers have the names of the file, with dots or underscores between
            their parts, behind a prefix of whole words that all share. A layer that stands in
            several places is adapted in all.
        tensors, scale: as in `read_lokr`.
        prefix: of the layers to read, such as "lora_unet_"; by default all are read.
        options: of each NdLinearLoRA, such as dtype and dropout, but for alpha and the folds.

    Returns:
        The model, all else of it as it was; `ndlinear_lora.save_lora` writes its adapters.

    Raises:
        ValueError, TypeError: as `read_lokr`; or names or sizes do not fit, a name may mean several
            layers, or an option is the file's to say. Nothing is changed.

    >>> model, factors = nn.Sequential(nn.Linear(6, 8)), (torch.ones(2, 3), torch.ones(4, 2))
    >>> file = {"lycoris_0.lokr_w1": factors[0], "lycoris_0.lokr_w2": factors[1]}
    >>> load_lokr(model, file)[0].adapter
    NdLinear((3, 2), (2, 4), transform_outer=True, bias=False, init='linear')
    """
    if fixed := sorted(options.keys() & {"alpha", "input_dims", "hidden_size"}):
        raise TypeError(f"leave out {fixed}: the file says it; scale= takes the place of its alpha")
    places = _places(model, read_lokr(tensors, scale), prefix)
    for name, update in places.items():
        linear = model.get_submodule(name)
        sizes = [a * b for a, b in zip(update.first.shape, update.second.shape)]
        if sizes != [linear.out_features, linear.in_features]:
            raise ValueError(
                f"the update of {name} is {tuple(sizes)}, its layer "
                f"({linear.out_features}, {linear.in_features}): is it a file for this model?"
            )
    linears = {model.get_submodule(name): update for name, update in places.items()}
    replace_layers(model, {layer: _adapted(layer, linears[layer], options) for layer in linears})
    return model


def _adapted(linear: nn.Linear, update: Update, options: dict) -> NdLinearLoRA:
    """A layer with an update beside it."""
    factors = (update.first, update.second)
    hidden, dims = zip(*(factor.shape for factor in factors))
    layer = NdLinearLoRA(linear, dims, hidden, alpha=update.scale, **options)
    with torch.no_grad():
        for weight, factor in zip(layer.adapter.weights, factors):
            weight.copy_(factor)
    return layer


def _places(model: nn.Module, updates: dict[str, Update], prefix: str | None) -> dict[str, Update]:
    """The updates under the names of the model's layers."""
    linears: dict[str, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if name and isinstance(module, nn.Linear):
            linears.setdefault(name.replace(".", "_"), []).append(name)
    for start in _starts(next(iter(updates))) if prefix is None else [prefix]:
        asked = [name for name in updates if prefix is None or name.startswith(start)]
        found = [_meant(name, start, linears) for name in asked]
        if not found or not all(found):
            continue
        if unclear := {of: names for of, names in zip(asked, found) if len(names) > 1}:
            raise ValueError(
                f"a name of the file fits several layers: {unclear}; rename its tensors"
            )
        names = [name for (name,) in found]
        if len({model.get_submodule(name) for name in names}) < len(names):
            raise ValueError(f"two of {asked} are one layer of this model: leave one of them out")
        return {name: updates[of] for name, of in zip(names, asked)}
    known = [name for names in linears.values() for name in names]
    raise ValueError(
        f"no prefix makes {list(updates)[:5]} names of nn.Linear layers of this model, which has "
        f"{known[:5]}: rename the tensors, or give the prefix of those to read"
    )


def _starts(name: str) -> list[str]:
    """What may stand before the name of a layer: nothing, or whole words."""
    return ["", *(name[: cut + 1] for cut, letter in enumerate(name) if letter in "_.")]


def _meant(name: str, start: str, linears: dict[str, list[str]]) -> list[str]:
    """The layers that a name of the file may mean, the one of just this name alone if it is there."""
    if not name.startswith(start):
        return []
    rest = name.removeprefix(start)
    names = linears.get(rest.replace(".", "_"), [])
    return [rest] if rest in names else names


def lokr_tensors(model: nn.Module, prefix: str = "") -> dict[str, Tensor]:
    """The adapters of a model as a LoKr file with full factors, which hold the scale.

    Args:
        model: with NdLinearLoRA layers of two modes without biases.
        prefix: before the names of the layers. One that ends in "_", such as LyCORIS's "lycoris_",
            takes underscores in place of the names' dots. "base_model.model." is PEFT's.

    Raises:
        ValueError: the model has no adapters, or one is no LoKr.

    >>> model = nn.Sequential(NdLinearLoRA(nn.Linear(6, 8), (3, 2), (2, 4)))
    >>> sorted(lokr_tensors(model, "lycoris_"))
    ['lycoris_0.alpha', 'lycoris_0.lokr_w1', 'lycoris_0.lokr_w2']
    """
    tensors = {}
    for name, layer in model.named_modules():
        if not isinstance(layer, NdLinearLoRA):
            continue
        if layer.has_bias or len(layer.adapter.weights) != 2:
            raise ValueError(f"{name} is no LoKr, which has two modes and no biases")
        first, second = (weight.detach() for weight in layer.adapter.weights)
        start = prefix + (name.replace(".", "_") if prefix.endswith("_") else name)
        tensors[f"{start}.lokr_w1"] = layer.alpha * first
        tensors[f"{start}.lokr_w2"] = second.contiguous()
        tensors[f"{start}.alpha"] = torch.tensor(1.0)
    if not tensors:
        raise ValueError("this model has no NdLinearLoRA")
    return tensors


@torch.no_grad()
def lokr_to_lora(
    tensors: Mapping[str, Tensor],
    rank: int,
    *,
    scale: float | None = None,
    names: tuple[str, str] = LORA[0],
) -> tuple[dict[str, Tensor], dict[str, float]]:
    """The nearest LoRA of a rank to each update, from the singular values of the two factors.

    Args:
        tensors, scale: as in `read_lokr`.
        rank: of the LoRA; exact from rank(W_1) * rank(W_2) on.
        names: what the keys of its two matrices end in: PEFT's, or ("lora_down.weight",
            "lora_up.weight") for kohya's scripts.

    Returns:
        (tensors, errors): matrices (rank, D) and (H, rank) whose product is the update, to be used
        with the scale 1, in PEFT lora_alpha = r; and ||rest|| / ||update|| of each layer, in the
        Frobenius norm.

    Raises:
        ValueError: as `read_lokr`, or the rank is not positive.

    >>> file = {"q.lokr_w1": torch.eye(2), "q.lokr_w2": torch.eye(3)}
    >>> {key: tuple(value.shape) for key, value in lokr_to_lora(file, 3)[0].items()}
    {'q.lora_A.weight': (3, 6), 'q.lora_B.weight': (6, 3)}
    >>> round(lokr_to_lora(file, 3)[1]["q"], 3), lokr_to_lora(file, 6)[1]["q"]
    (0.707, 0.0)
    """
    if rank < 1:
        raise ValueError(f"the rank of a LoRA is at least 1, not {rank}")
    found, errors = {}, {}
    for name, (first, second, factor) in read_lokr(tensors, scale).items():
        u1, s1, v1 = torch.linalg.svd(first.double(), full_matrices=False)
        u2, s2, v2 = torch.linalg.svd(second.double(), full_matrices=False)
        values = torch.outer(s1, s2).flatten()
        order = values.argsort(descending=True)
        kept, rest = order[:rank], order[rank:]
        i, j = kept // len(s2), kept % len(s2)
        root = (abs(factor) * values[kept]).sqrt()
        down = root[:, None] * (v1[i, :, None] * v2[j, None, :]).flatten(1)
        up = math.copysign(1, factor) * root * (u1[:, None, i] * u2[None, :, j]).flatten(0, 1)
        more = rank - len(kept)  # columns of zeros, so that all layers have one rank
        down = nn.functional.pad(down, (0, 0, 0, more))
        up = nn.functional.pad(up, (0, more))
        found[f"{name}.{names[0]}"] = down.to(first.dtype)
        found[f"{name}.{names[1]}"] = up.to(first.dtype)
        errors[name] = (values[rest].norm() / values.norm().clamp_min(1e-300)).item()
    return found, errors


def lora_to_lokr(
    tensors: Mapping[str, Tensor], scale: float | None = None
) -> tuple[dict[str, Tensor], dict[str, float]]:
    """The nearest near-square Kronecker product to each update of a LoRA file.

    Forms each update as a matrix (H, D) and takes a singular value decomposition of as many
    numbers. A LoRA of rank 1 or more is rarely near to one Kronecker product: read the errors.

    Args:
        tensors: lora_A.weight and lora_B.weight, or lora_down.weight and lora_up.weight, and alpha,
            of each layer.
        scale: of all updates; by default alpha / rank, and 1 for layers without alpha. PEFT's files
            have none: give lora_alpha / r.

    Returns:
        (tensors, errors): lokr_w1, lokr_w2 and alpha for each layer, for `load_lokr` and LyCORIS;
        and ||rest|| / ||update|| of each layer, in the Frobenius norm.

    Raises:
        ValueError: a tensor is not of a LoRA of a linear map, or one is missing.

    >>> file = {"q.lora_A.weight": torch.ones(1, 6), "q.lora_B.weight": torch.ones(8, 1)}
    >>> new, errors = lora_to_lokr(file)
    >>> new["q.lokr_w1"].shape, new["q.lokr_w2"].shape, errors["q"] < 1e-6
    (torch.Size([2, 2]), torch.Size([4, 3]), True)
    """
    found, errors = {}, {}
    for name, parts in _by_layer(tensors, (*LORA[0], *LORA[1], "alpha")).items():
        pair = next((pair for pair in LORA if all(end in parts for end in pair)), None)
        if pair is None or parts[pair[0]].ndim != 2:
            raise ValueError(f"{name} has not the two matrices of a LoRA of a linear map")
        down, up = (parts[end] for end in pair)
        rank = len(down)
        if scale is None:
            factor = float(parts.get("alpha", rank)) / rank
        else:
            factor = scale
        update = factor * (up.double() @ down.double())
        dims, hidden = near_square(update.shape[1]), near_square(update.shape[0])
        ((first, second),), errors[name] = nearest_kronecker(update, dims, hidden)
        found[f"{name}.lokr_w1"] = first.to(down.dtype)
        found[f"{name}.lokr_w2"] = second.to(down.dtype).contiguous()
        found[f"{name}.alpha"] = torch.tensor(1.0)
    return found, errors
