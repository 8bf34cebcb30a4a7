"""LoKr files of LyCORIS, ai-toolkit and PEFT: as NdLinear adapters, as plain LoRA, and back.

A LoKr update of a linear map is scale * (W_1 kron W_2), stored as `lokr_w1` and `lokr_w2`, or as
the products `lokr_w1_a @ lokr_w1_b` and `lokr_w2_a @ lokr_w2_b`, with an `alpha`. In files of
LyCORIS and ai-toolkit the scale is alpha / rank, with the columns of `_a` as rank, and 1 where both
factors are full, whatever `alpha` says; a warning names the layer where the metadata of the file
contradict that. PEFT's files have no alpha: the scale of each layer stands in the
`adapter_config.json` beside them, which is read where a path is given.

Functions take a path, or what `safetensors.torch.load_file` reads, and return what `save_file`
writes. Without Python:

    python ndlinear_lokr.py in.safetensors out.safetensors --to lora --rank 32

Needs `ndlinear.py` and `ndlinear_lora.py` beside it. Source: LoKr in arXiv:2309.14859.

Version 0.1.0 of the file `ndlinear_lokr.py` of the NdLinear book. Licence: Apache-2.0.
"""

from __future__ import annotations

import argparse
import json
import math
import operator
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

import ndlinear_lora

__version__ = "0.1.0"
if (_met := getattr(ndlinear_lora, "__version__", "unknown")) != __version__:
    raise ImportError(
        f"this ndlinear_lokr.py is of version {__version__}, {ndlinear_lora.__file__} of version "
        f"{_met}: copy both from one release, side by side"
    )
from ndlinear import near_square
from ndlinear_lora import (
    NdLinearLoRA,
    adapt,
    adaptable,
    bare_name,
    chosen_dtype,
    features,
    gathered,
    is_pointwise,
    kind_of,
    layers_of,
    read_file,
    unwrapped,
    write_file,
)

__all__ = ["Update", "load_lokr", "lokr_tensors", "lokr_to_lora", "lora_to_lokr", "read_lokr"]

Tensors: TypeAlias = "Mapping[str, Tensor] | str | os.PathLike"
Scale: TypeAlias = "float | Mapping | None"
PARTS = ("lokr_w1", "lokr_w1_a", "lokr_w1_b", "lokr_w2", "lokr_w2_a", "lokr_w2_b", "alpha")
LORA = (("lora_A.weight", "lora_B.weight"), ("lora_down.weight", "lora_up.weight"))
PEFT = "base_model.model."  # before the names in PEFT's files
FLOATS = {torch.float64, torch.float32, torch.bfloat16, torch.float16}
FLOATS |= {torch.float8_e4m3fn, torch.float8_e5m2}
MOST = 2**31  # numbers that a file may ask to multiply out


class Update(NamedTuple):
    """scale * (first kron second), (H_1 H_2, D_1 D_2)."""

    first: Tensor  # (H_1, D_1)
    second: Tensor  # (H_2, D_2)
    scale: float


class _Layer(NamedTuple):
    """The factors of an update as they are stored, each one matrix or two to be multiplied."""

    first: list[Tensor]
    second: list[Tensor]
    scale: float
    kernel: tuple[int, ...]  # of a convolution: W_2 is (H_2, D_2 * prod kernel)
    dtype: torch.dtype  # of the file, for what is written again

    @property
    def sizes(self) -> tuple[int, int]:
        """Outputs and inputs, times prod kernel."""
        (h1, d1), (h2, d2) = _product_shape(self.first), _product_shape(self.second)
        return h1 * h2, d1 * d2


# ---- reading ------------------------------------------------------------------------------------
def read_lokr(
    tensors: Tensors, scale: Scale = None, *, left_out: dict[str, str] | None = None
) -> dict[str, Update]:
    """The updates of a LoKr file, each under the name of its layer in the file, in float32 or 64.

    Args:
        tensors: of the file, or its path, or the path of a folder of PEFT.
        scale: in place of the file's own: one number for all layers; numbers under the layers'
            names; or PEFT's `adapter_config.json` as a dict, whose alpha, r, alpha_pattern and
            rank_pattern give that of each layer. A path finds this file itself.
        left_out: a dict to which layers that cannot be read are written, each with the reason,
            instead of the ValueError that names them.

    Raises:
        ValueError: a layer cannot be read, none can, or they are too large to be multiplied out.

    >>> half = {"q.lokr_w1": torch.ones(2, 2), "q.lokr_w2_a": torch.ones(3, 1)}
    >>> half |= {"q.lokr_w2_b": torch.ones(1, 4), "q.alpha": torch.tensor(0.5)}
    >>> read_lokr(half)["q"].second.shape, read_lokr(half)["q"].scale
    (torch.Size([3, 4]), 0.5)
    """
    layers, reasons = _read(*_opened(tensors, scale), _lokr_layer, PARTS)
    for name, layer in list(layers.items()):
        if layer.kernel and math.prod(layer.kernel) > 1:
            reasons[name] = f"it adapts a convolution of kernel {layer.kernel}, no linear map"
            del layers[name]
    asked = sum(math.prod(_product_shape(f)) for layer in layers.values() for f in layer[:2])
    if asked > MOST:
        raise ValueError(
            f"multiplied out, the factors of this file have {asked:,} numbers: is it damaged? "
            "load_lokr compares with a model first, and lokr_to_lora multiplies nothing out"
        )
    updates = _each(_update, layers, reasons)
    _settle(updates, reasons, left_out)
    return updates


def _opened(
    tensors: Tensors, scale: Scale, prefix: str | None = None
) -> tuple[Mapping[str, Tensor], Scale]:
    """The tensors of layers with a prefix, and the scale that a configuration beside them gives."""
    if not isinstance(tensors, (str, os.PathLike)):
        if not isinstance(tensors, Mapping):
            raise TypeError(f"give a path, or a dict of tensors, not a {kind_of(tensors)}")
        if odd := [key for key in tensors if not isinstance(key, str)]:
            raise TypeError(f"the names of tensors are text, not {odd[:3]}")
        return tensors if prefix is None else _starting(tensors, prefix), scale
    path = Path(tensors)
    path = path / "adapter_model.safetensors" if path.is_dir() else path
    beside = path.with_name("adapter_config.json")
    if scale is None and path.name == "adapter_model.safetensors" and beside.is_file():
        try:
            scale = json.loads(beside.read_text(encoding="utf-8"))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{beside} is no JSON: {error}; give scale=") from error
    held, about = read_file(path)
    held = held if prefix is None else _starting(held, prefix)
    if scale is None and about.get("ss_network_dim", "").isdecimal():
        _doubt_alphas(held, int(about["ss_network_dim"]))
    return held, scale


def _doubt_alphas(tensors: Mapping[str, Tensor], rank: int) -> None:
    """Warn of full factors of a linear map with an alpha below the rank, which LyCORIS writes."""
    low = {}
    for name in (key.removesuffix(".lokr_w1") for key in tensors if key.endswith(".lokr_w1")):
        second, alpha = (tensors.get(f"{name}.{part}") for part in ("lokr_w2", "alpha"))
        if second is None or second.shape[2:].numel() > 1 or alpha is None:
            continue
        if not alpha.is_complex() and alpha.numel() == 1 and 0 < alpha.item() < rank:
            low[name] = alpha.item()
    if low:
        name, alpha = next(iter(low.items()))
        warnings.warn(
            f"{name}, the first of {len(low)} such layers, has two full factors, read with the scale "
            f"1, and alpha {alpha:g} in a file of rank {rank}: if its program multiplied by alpha / "
            f"rank, give scale={alpha:g} / {rank}",
            stacklevel=4,
        )


def _read(
    tensors: Mapping[str, Tensor], scale: Scale, read: Callable, ends: tuple[str, ...]
) -> tuple[dict[str, _Layer], dict[str, str]]:
    """The layers of a file that can be read, and the reasons why the others cannot."""
    parts, reasons = _by_layer(tensors, ends)
    _check_scale(scale, parts)
    layers = _each(lambda name, held: read(name, held, scale), parts, reasons)
    return layers, reasons


def _by_layer(
    tensors: Mapping[str, Tensor], ends: tuple[str, ...]
) -> tuple[dict[str, dict[str, Tensor]], dict[str, str]]:
    """The tensors of each layer, but of those that have others, which are the reasons."""
    layers: dict[str, dict[str, Tensor]] = {}
    others = []
    for key, value in tensors.items():
        end = next((end for end in ends if key.endswith(f".{end}")), None)
        if end is None:
            others.append(key)
        else:
            layers.setdefault(key.removesuffix(f".{end}"), {})[end] = value
    reasons = {}
    for key in others:
        why = f"it has {key}{_known(key)}; read are {', '.join(ends)}"
        reasons[_owner(key, layers)] = f"no name of a layer before {key}" if key in ends else why
    for name, held in layers.items():
        if held.keys() == {"alpha"}:
            reasons.setdefault(name, "it has an alpha alone")
    return {name: held for name, held in layers.items() if name not in reasons}, reasons


def _owner(key: str, layers: Mapping) -> str:
    """The layer that a tensor changes: the longest known name before it."""
    name = key
    while "." in name:
        name = name.rpartition(".")[0]
        if name in layers:
            return name
    return key.rpartition(".")[0] or key


def _known(key: str) -> str:
    """What a tensor that is not read belongs to."""
    kinds = {
        "dora_scale": "DoRA",
        "lora_magnitude": "DoRA",
        "lokr_t": "a convolution in Tucker's form",
        "lora_mid": "a convolution in Tucker's form",
        "hada_": "LoHa",
        "lora_": "LoRA",
        "lokr_": "LoKr",
        "_norm": "a normalisation",
    }
    kind = next((kind for word, kind in kinds.items() if word in key.rpartition(".")[2]), None)
    kind = kind or next((kind for word, kind in kinds.items() if f".{word}" in key), None)
    reader = {"LoRA": "lora_to_lokr", "LoKr": "lokr_to_lora"}.get(kind or "")
    if reader:
        return f", {kind}, which {reader} reads"
    return f", {kind}, which cannot be converted here" if kind else ""


def _each(read: Callable, held: Mapping, reasons: dict[str, str]) -> dict:
    """What `read` makes of each; the reasons where it cannot."""
    found = {}
    for name, value in held.items():
        try:
            found[name] = read(name, value)
        except ValueError as error:
            reasons[name] = str(error)
    return found


def _settle(found: Mapping, reasons: dict[str, str], left_out: dict[str, str] | None) -> None:
    """Write the reasons down; ValueError if nobody asked for that, or nothing is found."""
    listed = "".join(f"\n  {name}: {why}" for name, why in list(reasons.items())[:20])
    listed += f"\n  and {len(reasons) - 20} more" if len(reasons) > 20 else ""
    if not found:
        raise ValueError(f"there is no adapter here that can be read{listed and ':' + listed}")
    if reasons and left_out is None:
        raise ValueError(
            f"{len(reasons)} of {len(found) + len(reasons)} layers cannot be read; to go on "
            f"without them, give left_out={{}}, which then names them (or --skip):{listed}"
        )
    if left_out is not None:
        left_out.update(reasons)


# ---- one layer ----------------------------------------------------------------------------------
def _lokr_layer(name: str, parts: dict[str, Tensor], scale: Scale) -> _Layer:
    factors, rank, kernel = [], None, ()
    for key in ("lokr_w1", "lokr_w2"):
        pair = [f"{key}_a", f"{key}_b"]
        if key in parts:
            factor = [_real(key, parts[key])]
            if key == "lokr_w2" and factor[0].ndim > 2:
                kernel = tuple(factor[0].shape[2:])
                factor = [factor[0].flatten(1)]
        elif all(part in parts for part in pair):
            factor = [_real(part, parts[part]) for part in pair]
            rank = factor[0].shape[1] if factor[0].ndim == 2 else None
        else:
            raise ValueError(f"it lacks {key}, and {key}_a with {key}_b, too")
        _check_factor(key, factor)
        factors.append(factor)
    found = _scale_of(name, parts, scale, rank, "alpha")
    dtype = next(part.dtype for key, part in parts.items() if key != "alpha")
    return _Layer(*factors, found, kernel, dtype)


def _lora_layer(name: str, parts: dict[str, Tensor], scale: Scale) -> tuple:
    """down (rank, D * prod kernel), up (H, rank), scale, kernel, dtype."""
    pair = next((pair for pair in LORA if all(end in parts for end in pair)), None)
    if pair is None:
        raise ValueError(f"it has {sorted(parts)}, not the two matrices of a LoRA")
    down, up = (_real(end, parts[end]) for end in pair)
    kernel = tuple(down.shape[2:])
    if down.ndim < 2 or up.ndim < 2 or math.prod(up.shape[2:]) != 1:
        raise ValueError(
            f"{pair[0]} {tuple(down.shape)} and {pair[1]} {tuple(up.shape)} are no LoRA"
        )
    down, up = down.flatten(1), up.flatten(1)
    _check_factor(f"the LoRA of {' and '.join(pair)}", [up, down])
    found = _scale_of(name, parts, scale, len(down), "lora_alpha")
    return down, up, found, kernel, parts[pair[0]].dtype


def _real(key: str, tensor: Tensor) -> Tensor:
    """A tensor of a file in float32, or float64 if it is that; ValueError if it is no such one."""
    if not isinstance(tensor, Tensor):
        raise ValueError(
            f"{key} is a {kind_of(tensor)}, not a tensor: read the file with safetensors"
        )
    if tensor.dtype not in FLOATS:
        raise ValueError(f"{key} holds {tensor.dtype}, not real numbers: dequantise it first")
    if tensor.layout != torch.strided or tensor.is_meta:
        raise ValueError(f"{key} is {tensor.layout} on {tensor.device}: make it an ordinary tensor")
    values = tensor.detach().to(_wide(tensor.dtype))
    if not torch.isfinite(values).all():
        raise ValueError(f"{key} holds numbers that are not finite")
    return values


def _wide(dtype: torch.dtype) -> torch.dtype:
    """The type to compute in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _check_factor(key: str, factor: list[Tensor]) -> None:
    shapes = " times ".join(str(tuple(matrix.shape)) for matrix in factor)
    if any(matrix.ndim != 2 for matrix in factor):
        raise ValueError(f"{key} is {shapes}, and not made of matrices")
    if any(matrix.numel() == 0 for matrix in factor):
        raise ValueError(f"{key} is {shapes}, and empty")
    if len(factor) == 2 and factor[0].shape[1] != factor[1].shape[0]:
        raise ValueError(f"{key} is {shapes}, and these cannot be multiplied")


def _product_shape(factor: list[Tensor]) -> tuple[int, int]:
    return factor[0].shape[0], factor[-1].shape[1]


def _update(name: str, layer: _Layer) -> Update:
    """An update with its factors multiplied out."""
    first, second = (
        factor[0] @ factor[1] if len(factor) == 2 else factor[0] for factor in layer[:2]
    )
    if not (torch.isfinite(first).all() and torch.isfinite(second).all()):
        raise ValueError("its factors are too large to be multiplied in float32: give float64")
    return Update(first, second, layer.scale)


# ---- scales -------------------------------------------------------------------------------------
def _check_scale(scale: Scale, names: Iterable[str]) -> None:
    """Of the whole file: whether the scale that was given is one."""
    if isinstance(scale, Mapping) and "peft_type" in scale:
        if str(scale["peft_type"]).rpartition(".")[2] not in ("LOKR", "LORA"):
            raise ValueError(f"the configuration is of {scale['peft_type']}, not of LOKR or LORA")
        start = str(scale.get("init_lora_weights"))
        if start.startswith(("pissa", "olora", "corda", "loftq", "lora_ga")):
            raise ValueError(
                f"the start {start!r} changed the base weights, too, and the adapter alone is not the "
                "update: save it with path_initial_model_for_weight_conversion of PEFT"
            )
    elif isinstance(scale, Mapping):
        if missing := [name for name in names if name not in scale]:
            raise ValueError(f"scale has no number for {missing[:5]}: give one for each layer")
    elif scale is not None and not isinstance(scale, (int, float)):
        raise TypeError(
            f"scale is a {kind_of(scale)}: give a number, numbers by layer, or a config"
        )


def _scale_of(
    name: str, parts: dict[str, Tensor], scale: Scale, rank: int | None, alpha: str
) -> float:
    """The scale of one layer: the one given, PEFT's, or alpha / rank."""
    if isinstance(scale, Mapping) and "peft_type" in scale:
        found = _scale_by_peft(name.removeprefix(PEFT), scale, alpha)
    elif isinstance(scale, Mapping):
        found = scale[name]
    elif scale is not None:
        found = scale
    elif "alpha" not in parts and name.startswith(PEFT):
        raise ValueError(
            "it has no alpha, and PEFT's scale stands in adapter_config.json: give the path of the "
            "file, with that one beside it, or scale="
        )
    elif "alpha" not in parts or rank is None:
        found = 1.0
    else:
        found = _number("alpha", parts["alpha"]) / rank
        if found == 0:
            raise ValueError(
                "alpha is 0, which LyCORIS reads as the rank and others as off: scale="
            )
    return _number("the scale", found)


def _number(what: str, value) -> float:
    if isinstance(value, Tensor) and value.numel() != 1:
        raise ValueError(f"{what} is {value.numel()} numbers, not one")
    try:
        found = float(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{what} is {value!r}, not a number") from error
    if not math.isfinite(found):
        raise ValueError(f"{what} is {found}")
    return found


def _scale_by_peft(name: str, config: Mapping, alpha: str) -> float:
    """alpha / r of a layer, as PEFT finds them: by the first pattern that its name ends in."""
    values = []
    for key, pattern in ((alpha, "alpha_pattern"), ("r", "rank_pattern")):
        patterns = config.get(pattern) or {}
        if not isinstance(patterns, Mapping):
            raise ValueError(f"{pattern} in adapter_config.json is no table of names")
        try:
            named = [part for part in patterns if re.match(rf"(.*\.)?({part})$", name)]
        except (re.error, TypeError) as error:
            raise ValueError(f"{pattern} in adapter_config.json: {error}") from error
        key_found = next(iter(named), None)
        value = config.get(key) if key_found is None else patterns[key_found]
        values.append(_number(f"{key} in adapter_config.json", value))
    if values[1] <= 0:
        raise ValueError(f"r in adapter_config.json is {values[1]}")
    return values[0] / (math.sqrt(values[1]) if config.get("use_rslora") else values[1])


# ---- on a model ---------------------------------------------------------------------------------
def load_lokr(
    model: nn.Module,
    tensors: Tensors,
    *,
    scale: Scale = None,
    prefix: str | None = None,
    left_out: dict[str, str] | None = None,
    **options,
) -> nn.Module:
    """Put the updates of a LoKr file on a model, in place, as NdLinearLoRA with two modes.

    A factor that is stored as a product of two is multiplied out: further training may raise its
    rank.

    Args:
        model: whose layers have the names of the file, with dots or underscores between their
            parts, behind a prefix of whole words that all share: nn.Linear, Conv1D of transformers
            and convolutions of kernel 1. A layer that stands in several places is adapted in all.
            Around the model may stand torch.compile or DataParallel.
        tensors, scale: as in `read_lokr`.
        prefix: of the layers to read, such as "lora_unet_"; all else is not looked at. By default
            all layers are read.
        left_out: a dict to which layers that cannot be read, or that the model does not have, are
            written, each with the reason, instead of the ValueError that names them; needs prefix.
        options: of each NdLinearLoRA, such as dtype and dropout, but for alpha and the folds.

    Returns:
        The model, all else of it as it was; `ndlinear_lora.save_lora` writes its adapters.

    Raises:
        ValueError, TypeError: a layer cannot be read or is not in the model, a name may mean
            several, one has an adapter already, or an option is the file's to say. Nothing is
            changed.

    >>> model, factors = nn.Sequential(nn.Linear(6, 8)), (torch.ones(2, 3), torch.ones(4, 2))
    >>> file = {"lycoris_0.lokr_w1": factors[0], "lycoris_0.lokr_w2": factors[1]}
    >>> load_lokr(model, file)[0].adapter
    NdLinear((3, 2), (2, 4), transform_outer=True, bias=False, init='linear')
    """
    if fixed := sorted(options.keys() & {"alpha", "input_dims", "hidden_size", "bias"}):
        raise TypeError(f"leave out {fixed}: the file says it; scale= takes the place of its alpha")
    held, scale = _opened(tensors, scale, prefix)
    layers, reasons = _read(held, scale, _lokr_layer, PARTS)
    modules = layers_of(unwrapped(model))
    places = _places(modules, layers, prefix, reasons)
    targets = {of: modules[place] for of, place in places.items()}

    def fitted(of: str, target: nn.Module) -> Update:
        _check_fit(layers[of], target)
        return _for_dtype(_update(of, layers[of]), chosen_dtype(target, options.get("dtype")))

    updates = _each(fitted, targets, reasons)
    _settle(updates, reasons, left_out)
    wanted = {targets[of]: _options(update, options) for of, update in updates.items()}
    if len(wanted) < len(updates):
        raise ValueError(
            f"two of {list(updates)} are one layer of this model: leave one of them out"
        )
    new = adapt(model, wanted)
    for of, update in updates.items():
        _fill(new[targets[of]], update)
    return model


def _starting(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The tensors of layers with a prefix."""
    found = {key: value for key, value in tensors.items() if key.startswith(prefix)}
    if not found:
        starts = sorted({key.partition(".")[0] for key in tensors})[:5]
        raise ValueError(f"no name begins with {prefix!r}; there are {starts}")
    joints = {key[len(prefix) : len(prefix) + 1] for key in found}
    if joints in ({"_"}, {"."}) and prefix and prefix[-1] not in "_.":
        (joint,) = joints
        raise ValueError(
            f"all names that begin with {prefix!r} go on with {joint!r}, which is part of the "
            f"prefix: give prefix={prefix + joint!r}"
        )
    return found


def _places(
    modules: dict[str, nn.Module],
    layers: Mapping[str, _Layer],
    prefix: str | None,
    reasons: dict[str, str],
) -> dict[str, str]:
    """The name in the model of each layer of the file; the reasons where it has none."""
    short: dict[str, list[str]] = {}
    for name, module in modules.items():
        if name and _has_weight(module):
            short.setdefault(name.replace(".", "_"), []).append(name)
    best: dict[str, list[str]] = {of: [] for of in layers}
    for start in _starts(next(iter(layers), "")) if prefix is None else [prefix]:
        found = {of: _meant(of, start, short) for of in layers}
        if all(found.values()):
            best = found
            break
        best = max(best, found, key=lambda names: sum(map(bool, names.values())))
    missing = [of for of in layers if not best[of]]
    if missing and (prefix is None or len(missing) == len(layers)):
        known = [name for name, module in modules.items() if _can_adapt(module)]
        raise ValueError(
            f"no prefix makes {list(layers)[:5]} names of layers of this model, which has "
            f"{known[:5]}; {len(missing)} are missing, the first {missing[0]}: rename the tensors, "
            "or give the prefix of those to read; fused layers, such as qkv, are not split"
        )
    for of, names in best.items():
        if not names:
            reasons[of] = "this model has no layer of this name; fused ones are not split"
        elif len(names) > 1:
            reasons[of] = f"its name fits several layers: {names}; rename its tensors"
    return {of: names[0] for of, names in best.items() if len(names) == 1}


def _starts(name: str) -> list[str]:
    """What may stand before the name of a layer: nothing, or whole words."""
    return ["", *(name[: cut + 1] for cut, letter in enumerate(name) if letter in "_.")]


def _meant(name: str, start: str, short: dict[str, list[str]]) -> list[str]:
    """The layers that a name of the file may mean; if one has just this name, that one alone."""
    if not name.startswith(start):
        return []
    rest = name.removeprefix(start)
    names = short.get(rest.replace(".", "_"), [])
    return [rest] if rest in names else names


def _can_adapt(module: nn.Module) -> bool:
    return adaptable(module) or is_pointwise(module)


def _has_weight(module: nn.Module) -> bool:
    return (
        _can_adapt(module)
        or isinstance(module, NdLinearLoRA)
        or module._parameters.get("weight") is not None
    )


def _check_fit(layer: _Layer, module: nn.Module) -> None:
    """ValueError if an update is not one of a layer of the model."""
    if isinstance(module, NdLinearLoRA):
        raise ValueError(
            "its layer has an adapter already: ndlinear_lora.merge_lora(model) folds that one in"
        )
    if not _can_adapt(module):
        kind = kind_of(module)
        raise ValueError(f"its layer is a {kind}, no linear map and no convolution of kernel 1")
    if math.prod(layer.kernel) > 1:
        raise ValueError(f"it adapts a convolution of kernel {layer.kernel}, its layer is none")
    wanted = features(module)[::-1]
    if layer.sizes != wanted:
        raise ValueError(
            f"the update is {layer.sizes}, its layer {wanted}: is it a file for this model?"
        )


def _options(update: Update, options: dict) -> dict:
    hidden, dims = zip(*(factor.shape for factor in update[:2]))
    return {**options, "input_dims": dims, "hidden_size": hidden, "alpha": update.scale}


@torch.no_grad()
def _fill(layer: NdLinearLoRA, update: Update) -> None:
    """Write an update into its adapter, also into one on the meta device."""
    for mode, factor in zip(layer.adapter.align_layers, update[:2]):
        if mode.weight.is_meta:
            mode.weight = nn.Parameter(factor.clone())
        else:
            mode.weight.copy_(factor)


def _for_dtype(update: Update, dtype: torch.dtype) -> Update:
    """The same update in another type; in 16 bits with factors of alike size.

    By powers of two, so that no digit changes, and numbers too large for float16 find room.
    """
    first, second, scale = update
    most = [factor.abs().max().item() for factor in (first, second)]
    if dtype.itemsize < 4 and min(most) > 0:
        shift = round(math.log2(most[0] / most[1]) / 2)
        first, second = first * 2.0**-shift, second * 2.0**shift
    first, second = first.to(dtype), second.to(dtype)
    finite = torch.isfinite(first).all() and torch.isfinite(second).all()
    if not finite or most[0] * most[1] > torch.finfo(dtype).max:
        raise ValueError(f"its factors are too large for {dtype}: give dtype=torch.float32")
    return Update(first, second, scale)


@torch.no_grad()
def lokr_tensors(model: nn.Module, prefix: str = "") -> dict[str, Tensor]:
    """The adapters of a model as a LoKr file with full factors, which hold the scale.

    Not what was trained in modules_to_save, for which such files have no place.

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
    for name, layer in unwrapped(model).named_modules():
        if not isinstance(layer, NdLinearLoRA):
            continue
        if not name:
            raise ValueError("a layer of a file has a name: put the NdLinearLoRA into a model")
        name = bare_name(name)
        weights = [gathered(weight) for weight in layer.adapter.weights]
        if layer.has_bias or len(weights) != 2:
            raise ValueError(f"{name} is no LoKr, which has two modes and no biases")
        if weights[0].is_complex():
            raise ValueError(
                f"{name} holds complex numbers, which no program reads from a LoKr file"
            )
        start = prefix + (name.replace(".", "_") if prefix.endswith("_") else name)
        dtype = weights[0].dtype
        first, second = (weight.to(_wide(dtype)) for weight in weights)
        first, second, _ = _for_dtype(Update(layer.alpha * first, second, 1.0), dtype)
        kernel = getattr(layer.base_layer, "kernel_size", ())
        if f"{start}.lokr_w1" in tensors:
            raise ValueError(
                f"two layers would have the name {start}, the second is {name}: give a prefix that "
                "does not end in '_', which leaves the dots"
            )
        tensors[f"{start}.lokr_w1"] = first
        tensors[f"{start}.lokr_w2"] = second.reshape(*second.shape, *kernel)
        tensors[f"{start}.alpha"] = torch.tensor(1.0)
    if not tensors:
        raise ValueError("this model has no NdLinearLoRA")
    return tensors


# ---- LoRA, both ways ----------------------------------------------------------------------------
@torch.no_grad()
def lokr_to_lora(
    tensors: Tensors,
    rank: int,
    *,
    scale: Scale = None,
    names: tuple[str, str] = LORA[0],
    left_out: dict[str, str] | None = None,
) -> tuple[dict[str, Tensor], dict[str, float]]:
    """The nearest LoRA of a rank to each update, from the singular values of the two factors.

    Products are not multiplied out. Convolutions whose second factor is stored with its kernel
    become convolutions; one that is stored as two matrices looks like a linear map, and its LoRA
    is that of the weight flattened to (H, D * prod kernel).

    Args:
        tensors, scale, left_out: as in `read_lokr`.
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
    if operator.index(rank) < 1:
        raise ValueError(f"the rank of a LoRA is at least 1, not {rank}")
    layers, reasons = _read(*_opened(tensors, scale), _lokr_layer, PARTS)
    made = _each(lambda _, layer: _nearest_lora(layer, rank), layers, reasons)
    _settle(made, reasons, left_out)
    found = {}
    for name, (down, up, _) in made.items():
        found |= {f"{name}.{names[0]}": down, f"{name}.{names[1]}": up}
    return found, {name: error for name, (_, _, error) in made.items()}


def _nearest_lora(layer: _Layer, rank: int) -> tuple[Tensor, Tensor, float]:
    """down, up, and what they miss of the update."""
    (u1, s1, v1), (u2, s2, v2) = _svd(layer.first), _svd(layer.second)
    values = torch.outer(s1, s2).flatten()
    order = values.argsort(descending=True)
    kept, rest = order[:rank], order[rank:]
    i, j = kept // len(s2), kept % len(s2)
    root = (abs(layer.scale) * values[kept]).sqrt()
    down = root[:, None] * (v1[i, :, None] * v2[j, None, :]).flatten(1)
    up = math.copysign(1, layer.scale) * root * (u1[:, None, i] * u2[None, :, j]).flatten(0, 1)
    more = rank - len(kept)  # columns of zeros, so that all layers have one rank
    down, up = nn.functional.pad(down, (0, 0, 0, more)), nn.functional.pad(up, (0, more))
    error = (values[rest].norm() / values.norm().clamp_min(1e-300)).item()
    down = down.reshape(rank, -1, *layer.kernel)
    up = up.reshape(-1, rank, *(1 for _ in layer.kernel))
    return _stored(down, layer.dtype), _stored(up, layer.dtype), error


def _svd(factor: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Of a matrix, or of the product of two without forming it, in float64."""
    if len(factor) == 1:
        return torch.linalg.svd(factor[0].double(), full_matrices=False)
    left, r_left = torch.linalg.qr(factor[0].double())
    right, r_right = torch.linalg.qr(factor[1].double().T)
    u, s, v = torch.linalg.svd(r_left @ r_right.T, full_matrices=False)
    return left @ u, s, v @ right.T


def _stored(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """As it is written: in the type of the file, in float32 if that has 8 bits."""
    made = tensor.to(dtype if dtype.itemsize > 1 else torch.float32).contiguous()
    if not torch.isfinite(made).all():
        raise ValueError(f"what it becomes is too large for {made.dtype}")
    return made


@torch.no_grad()
def lora_to_lokr(
    tensors: Tensors, scale: Scale = None, *, left_out: dict[str, str] | None = None
) -> tuple[dict[str, Tensor], dict[str, float]]:
    """The nearest near-square Kronecker product to each update of a LoRA file.

    From the two matrices, which are not multiplied out: 0.2 s for 3072 x 3072 and rank 16. A LoRA
    of rank 1 or more is rarely near to one Kronecker product: read the errors.

    Args:
        tensors: lora_A.weight and lora_B.weight, or lora_down.weight and lora_up.weight, and alpha,
            of each layer, also of convolutions; or a path, as in `read_lokr`.
        scale: as in `read_lokr`; by default alpha / rank, and 1 for layers without alpha.
        left_out: as in `read_lokr`.

    Returns:
        (tensors, errors): lokr_w1, lokr_w2 and alpha for each layer, for `load_lokr` and LyCORIS;
        and ||rest|| / ||update|| of each layer, in the Frobenius norm.

    Raises:
        ValueError: a tensor is not of a LoRA, or one is missing.

    >>> file = {"q.lora_A.weight": torch.ones(1, 6), "q.lora_B.weight": torch.ones(8, 1)}
    >>> new, errors = lora_to_lokr(file)
    >>> new["q.lokr_w1"].shape, new["q.lokr_w2"].shape, errors["q"] < 1e-6
    (torch.Size([2, 2]), torch.Size([4, 3]), True)
    """
    ends = (*LORA[0], *LORA[1], "alpha")
    layers, reasons = _read(*_opened(tensors, scale), _lora_layer, ends)
    made = _each(lambda _, layer: _nearest_lokr(*layer), layers, reasons)
    _settle(made, reasons, left_out)
    found = {}
    for name, (first, second, _) in made.items():
        found |= {f"{name}.lokr_w1": first, f"{name}.lokr_w2": second}
        found[f"{name}.alpha"] = torch.tensor(1.0)
    return found, {name: error for name, (_, _, error) in made.items()}


def _nearest_lokr(
    down: Tensor, up: Tensor, scale: float, kernel: tuple[int, ...], dtype: torch.dtype
) -> tuple[Tensor, Tensor, float]:
    """W_1, W_2, and what they miss of the update."""
    down, up = down.double(), scale * up.double()
    d1, d2 = near_square(down.shape[1] // math.prod(kernel))
    h1, h2 = near_square(len(up))
    ups = up.T.reshape(-1, h1, h2)
    downs = down.reshape(len(down), d1, d2 * math.prod(kernel))
    first, second = _top_pair(ups, downs)
    norm = ((up.T @ up) * (down @ down.T)).sum().clamp_min(0).sqrt()
    kept = first.norm() * second.norm()
    error = (
        (1 - (kept / norm.clamp_min(1e-300)) ** 2).clamp(0, 1).sqrt().item() if norm > 0 else 0.0
    )
    second = second.reshape(h2, d2, *kernel)
    return _stored(first, dtype), _stored(second, dtype), error


def _top_pair(ups: Tensor, downs: Tensor) -> tuple[Tensor, Tensor]:
    """first (h1, d1) and second (h2, d2), whose product first kron second is nearest to the update.

    Rearranged, the update maps X (h2, d2) to Y = sum_k ups[k] X downs[k]^T (h1, d1), and the two
    are its largest singular pair. Lanczos' method finds it in a few dozen products.

    Args:
        ups: (rank, h1, h2). downs: (rank, d1, d2).
    """
    (rank, h1, h2), (_, d1, d2) = ups.shape, downs.shape
    left = ups.permute(1, 0, 2).reshape(h1, rank * h2)
    right = downs.permute(2, 0, 1).reshape(d2, rank * d1)

    def image(x: Tensor) -> Tensor:
        parts = (x.view(h2, d2) @ right).view(h2, rank, d1).transpose(0, 1)
        return left @ parts.reshape(rank * h2, d1)

    def squared(x: Tensor) -> Tensor:  # the map, then its transpose
        parts = (left.T @ image(x)).view(rank, h2, d1).transpose(0, 1)
        return (parts.reshape(h2, rank * d1) @ right.T).flatten()

    start = torch.randn(h2 * d2, generator=torch.Generator().manual_seed(0), dtype=ups.dtype)
    x = _largest_eigenvector(squared, start.to(ups.device))
    y = image(x)
    root = y.norm().sqrt()
    return y / root.clamp_min(1e-150), x.view(h2, d2) * root


def _largest_eigenvector(product: Callable, start: Tensor) -> Tensor:
    """Of a symmetric matrix without negative eigenvalues, to a residual of 1e-6; by Lanczos."""
    basis = (start / start.norm())[None]
    diagonal, beside = [], []
    for step in range(1, 400):
        new = product(basis[-1])
        diagonal.append(basis[-1] @ new)
        for _ in range(2):  # twice against rounding
            new = new - (basis @ new) @ basis
        beside.append(new.norm())
        ended = beside[-1] <= 1e-13 * max(diagonal)
        if ended or step % 4 == 0:
            small = torch.diag(torch.stack(diagonal))
            if beside[:-1]:
                edge = torch.diag(torch.stack(beside[:-1]), 1)
                small = small + edge + edge.T
            values, vectors = torch.linalg.eigh(small)
            best = vectors[:, -1]
            if ended or beside[-1] * abs(best[-1]) <= 1e-6 * values[-1]:
                break
        basis = torch.cat([basis, (new / beside[-1])[None]])
    return best @ basis[: len(best)]


# ---- the command --------------------------------------------------------------------------------
def main(arguments: list[str] | None = None) -> None:
    """Convert a file; see --help."""
    parser = argparse.ArgumentParser(
        prog="ndlinear_lokr.py",
        description="Convert an adapter from LoKr to the nearest LoRA, or the other way round.",
    )
    parser.add_argument("source", help="a safetensors file, or a folder that PEFT wrote")
    parser.add_argument("target", help="the safetensors file to write")
    parser.add_argument("--to", choices=("lora", "lokr"), required=True, help="what to make of it")
    parser.add_argument("--rank", type=int, help="of the LoRA")
    parser.add_argument("--scale", type=float, help="of all updates, in place of the file's own")
    parser.add_argument("--prefix", help="convert layers with this prefix alone")
    parser.add_argument(
        "--names",
        choices=("peft", "kohya"),
        help="of the LoRA's tensors: lora_A and lora_B, or lora_down and lora_up; by default the "
        "first if the names of the layers have dots",
    )
    parser.add_argument(
        "--skip", action="store_true", help="leave out, and name, what cannot be converted"
    )
    given = parser.parse_args(arguments)
    if (given.to == "lora") != (given.rank is not None):
        parser.error("--to lora needs --rank, and --to lokr has none")
    if os.path.realpath(given.source) == os.path.realpath(given.target):
        parser.error("the target is the source: give it another name")
    left_out: dict[str, str] = {}
    try:
        tensors, errors = _converted(given, left_out if given.skip else None)
        write_file(tensors, given.target, {"format": "pt"})
    except (ValueError, OSError, ImportError) as error:
        sys.exit(f"{parser.prog}: {error}")
    _report(given, errors, left_out)


def _converted(given: argparse.Namespace, left_out: dict[str, str] | None) -> tuple[dict, dict]:
    tensors, scale = _opened(given.source, given.scale, given.prefix)
    if given.to == "lokr":
        return lora_to_lokr(tensors, scale, left_out=left_out)
    dotted = any("." in name for name in _by_layer(tensors, PARTS)[0])
    names = LORA[0] if (given.names or ("peft" if dotted else "kohya")) == "peft" else LORA[1]
    return lokr_to_lora(tensors, given.rank, scale=scale, names=names, left_out=left_out)


def _report(given: argparse.Namespace, errors: dict[str, float], left_out: dict[str, str]) -> None:
    """What was lost in the layers that lost most, and what was left out."""
    worst = sorted(errors, key=lambda name: -errors[name])
    print(f"{given.target}: {len(errors)} layers. Lost of the update, by its Frobenius norm:")
    for name in worst[:10]:
        print(f"  {errors[name]:8.3%}  {name}")
    if worst[10:]:
        print(f"  {errors[worst[10]]:8.3%}  or less in {len(worst) - 10} more")
    if given.to == "lora":
        print(f"Use it with the scale 1; in PEFT that is lora_alpha = r = {given.rank}.")
    for name, why in left_out.items():
        print(f"Left out: {name}: {why}")


if __name__ == "__main__":
    main()
