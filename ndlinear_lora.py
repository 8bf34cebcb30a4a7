"""NdLinear-LoRA: a frozen torch.nn.Linear plus a trained NdLinear, for use without PEFT.

    y = base(x) + alpha * vec(NdLinear(fold(x)))

`apply_ndlinear_lora` puts it on the layers of a model; `save_lora` and `load_lora` write and read
what was trained. Needs torch and `ndlinear.py` beside it; files also need safetensors. With PEFT,
take `ndlinear_peft.py` instead. Source: NdLinear-LoRA in arXiv:2503.17353.

Version 0.1.0 of the file `ndlinear_lora.py` of the NdLinear book. Licence: Apache-2.0.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import re
from collections.abc import Iterable, Sequence, Sized
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import ndlinear

__version__ = "0.1.0"
if (_met := getattr(ndlinear, "__version__", "unknown")) != __version__:
    raise ImportError(
        f"this ndlinear_lora.py is of version {__version__}, {ndlinear.__file__} of version "
        f"{_met}: copy both from one release, side by side"
    )
from ndlinear import (
    NdLinear,
    _read_only,
    _ReadOnly,
    kronecker_weight,
    near_square,
    to_linear,
    total_bias,
)

__all__ = [
    "NdLinearLoRA",
    "apply_ndlinear_lora",
    "load_lora",
    "lora_state_dict",
    "merge_lora",
    "save_lora",
]

Shape = Sequence[int]
MOST_MODES = 63  # a tensor of torch has at most 64 axes
WRAPPERS = {"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"}  # parts of names
NO_VALUE = {"dropout", "init", "execution", "dtype"}  # what changes no value of a trained adapter
CONFIG = NO_VALUE | {"input_dims", "hidden_size", "alpha", "bias", "transform_outer"}
HABITS = {  # what is typed by habit, and what to write here
    "r": "leave it out: the folds set the size, there is no rank",
    "rank": "leave it out: the folds set the size, there is no rank",
    "lora_alpha": "alpha=lora_alpha / r: alpha multiplies the update itself here",
    "lora_dropout": "dropout=",
    "use_rslora": "leave it out: alpha multiplies the update itself",
    "task_type": "leave it out, and name the head in modules_to_save",
    "exclude_modules": "leave those out of the patterns: re.compile(r'(?!.*vision).*q_proj')",
    "layers_to_transform": "name them in the patterns: 'layers.[01].*q_proj'",
    "alpha_pattern": "call apply_ndlinear_lora once for each alpha, with its patterns",
}


class NdLinearLoRA(nn.Module):
    """A frozen torch.nn.Linear plus a trainable update: y = base(x) + alpha * vec(NdLinear(x)).

    (..., prod D) -> (..., prod H); x is folded into (..., D_1, ..., D_N) for the update. It trains
    count_parameters(input_dims, hidden_size, bias) numbers and costs the multiply-adds of its
    `adapter`, an NdLinear, on top of the dense layer's; merged, those of the dense layer alone. The
    update is zero at start: the mode executed last (in the defined order) is zero, the others are
    drawn. Without biases it is KronA, or LoKr with two full factors. While merged, the adapter gets
    no gradient.

    Args:
        base_layer: the Linear(prod D, prod H) to adapt, a Conv1D of transformers, or a convolution
            of kernel 1; also one that torchao or bitsandbytes quantised, which remains an
            nn.Linear, but none of torch.ao.quantization. It is kept and its parameters are frozen.
        input_dims: how prod D folds; by default into two near-square factors.
        hidden_size: how prod H folds; by default into two near-square factors.
        alpha: factor of the update.
        dropout: probability of dropout on the input of the update, in training.
        bias: per-mode biases in the update; the paper's counts have none.
        dtype: of the adapter; by default that of the base layer, float32 if that one is quantised.
        options: of the NdLinear `adapter`: transform_outer, init.

    Raises:
        ValueError, TypeError: sizes that do not fit, numbers that are not finite, another kind of
            layer, or one whose weight is spread over several processes.

    >>> layer = NdLinearLoRA(nn.Linear(20, 6), alpha=2.0)
    >>> layer(torch.randn(7, 20)).shape
    torch.Size([7, 6])
    >>> layer.adapter
    NdLinear((4, 5), (2, 3), transform_outer=True, bias=False, init='linear')
    """

    def __init__(
        self,
        base_layer: nn.Module,
        input_dims: Shape | None = None,
        hidden_size: Shape | None = None,
        *,
        alpha: float = 1.0,
        dropout: float = 0.0,
        bias: bool = False,
        dtype: torch.dtype | str | None = None,
        **options,
    ):
        super().__init__()
        if not adaptable(base_layer) and not is_pointwise(base_layer):
            raise TypeError(
                f"NdLinearLoRA adapts a torch.nn.Linear or a convolution of kernel 1, not "
                f"{kind_of(base_layer)}"
            )
        refuse_sharded(base_layer)
        for name in options.keys() & HABITS.keys():
            raise TypeError(f"NdLinear-LoRA has no {name}: {HABITS[name]}")
        if not isinstance(bias, bool):
            raise TypeError(
                f"bias is {bias!r}, not True or False: whether the update has biases; name base "
                "layers whose own are to be trained in modules_to_save"
            )
        if not math.isfinite(alpha) or not math.isfinite(dropout):
            raise ValueError(f"alpha={alpha} and dropout={dropout} must be finite numbers")
        sizes = features(base_layer)
        folded = (near_square(sizes[0]), near_square(sizes[1]))
        dims = folded[0] if input_dims is None else input_dims
        hidden = folded[1] if hidden_size is None else hidden_size
        for shape in (dims, hidden):
            if isinstance(shape, Sized) and len(shape) > MOST_MODES:
                raise ValueError(
                    f"{len(shape)} modes are more than the {MOST_MODES} of torch's axes"
                )
        checked = NdLinear(dims, hidden, device="meta")  # draws nothing
        dims, hidden = checked.input_dims, checked.hidden_size
        if (math.prod(dims), math.prod(hidden)) != sizes:
            raise ValueError(
                f"input_dims {dims} and hidden_size {hidden} do not multiply to the wrapped "
                f"layer's {sizes}; choose for example {folded[0]} and {folded[1]}"
            )
        like = {"device": base_layer.weight.device, "dtype": chosen_dtype(base_layer, dtype)}
        self.in_features, self.out_features = sizes
        self.base_layer = base_layer
        self.adapter = NdLinear(dims, hidden, bias=bias, **(like | options))
        self.alpha = float(alpha)
        self.dropout = nn.Dropout(dropout)
        self.merged = False
        self.register_buffer("merged_weight", None, persistent=False)
        self.register_buffer("merged_bias", None, persistent=False)
        self._zero()
        self.train(base_layer.training)
        base_layer.requires_grad_(False)  # last: whatever fails before leaves it as it was

    def _zero(self) -> None:
        for parameter in self.adapter.align_layers[self.adapter.order[-1]].parameters():
            nn.init.zeros_(parameter)

    def reset_parameters(self) -> None:
        """Draw the adapter anew, with an update of zero; the base layer keeps its weights."""
        self.unmerge()
        self.adapter.reset_parameters()
        self._zero()

    def forward(self, x: Tensor) -> Tensor:
        """(..., prod D) -> (..., prod H)."""
        rows = _rows(self.base_layer, x)
        if self.merged:
            y = F.linear(rows, self.merged_weight, self.merged_bias)
            y = _unrows(self.base_layer, y)
            return y.contiguous() if x.is_contiguous() else y  # as a convolution leaves it
        y = self.base_layer(x)
        adapter = self.adapter
        folded = self.dropout(rows).to(adapter.weights[0].dtype).unflatten(-1, adapter.input_dims)
        update = self.alpha * adapter(folded).flatten(-len(adapter.hidden_size))
        return y + _unrows(self.base_layer, update.to(y.dtype))

    @property
    def has_bias(self) -> bool:
        """Whether the update has biases."""
        return any(bias is not None for bias in self.adapter.biases)

    @property
    def config(self) -> dict:
        """What rebuilds this adapter: NdLinearLoRA(base, **config)."""
        return {
            "input_dims": list(self.adapter.input_dims),
            "hidden_size": list(self.adapter.hidden_size),
            "alpha": float(self.alpha),
            "bias": self.has_bias,
            "transform_outer": self.adapter.transform_outer,
            "dropout": self.dropout.p,
            "init": self.adapter.init,
            "execution": self.adapter.execution,
            "dtype": str(self.adapter.weights[0].dtype).removeprefix("torch."),
        }

    @property
    def weight(self) -> Tensor:
        """The weight in effect, (prod H, prod D), made in each access; it cannot be written to."""
        base = dense_weight(self.base_layer)
        total = base + self.alpha * kronecker_weight(self.adapter)
        return _read_only(total.to(base.dtype), _ToRead)

    @property
    def bias(self) -> Tensor | None:
        """The bias in effect, (prod H,), or None; that of the base layer if the update has none."""
        base = self.base_layer.bias
        if not self.has_bias:
            return base
        update = self.alpha * total_bias(self.adapter).flatten()
        total = update if base is None else base + update
        return _read_only(total.to(self.base_layer.weight.dtype), _ToRead)

    @weight.setter
    def weight(self, value) -> None:
        raise TypeError(WRITTEN)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """TypeError for a weight or bias, also from torch.nn.utils.prune and its like."""
        if name.startswith(("weight", "bias")):
            raise TypeError(WRITTEN)
        super().register_parameter(name, param)

    def merge(self) -> None:
        """Compute with one dense matrix from now on.

        It is a copy of what there is now: what is changed in the adapter or in the base layer acts
        from `unmerge` on, which is exact. TypeError if the base layer is quantised, or computes
        something else than its weight and bias say.
        """
        refuse_other_map(self.base_layer)
        linear = to_linear(self)
        self.merged = True
        self.merged_weight = linear.weight.data
        self.merged_bias = None if linear.bias is None else linear.bias.data

    def unmerge(self) -> None:
        """Undo `merge`; loading a state_dict does it too, and none holds merged weights."""
        self.merged = False
        self.merged_weight = None
        self.merged_bias = None

    def _load_from_state_dict(self, *args, **kwargs) -> None:
        self.unmerge()
        super()._load_from_state_dict(*args, **kwargs)

    def extra_repr(self) -> str:
        return f"alpha={self.alpha}, merged={self.merged}"


WRITTEN = (
    "the weight of an NdLinearLoRA is made of two others in each access, and what is written to it "
    "would be lost: write to base_layer.weight, or to adapter.weights"
)


class _ToRead(_ReadOnly):
    refusal = WRITTEN


def adaptable(module: nn.Module) -> bool:
    """Whether a module is a torch.nn.Linear or a Conv1D of transformers."""
    return isinstance(module, nn.Linear) or _is_conv1d(module)


def is_pointwise(module: nn.Module) -> bool:
    """Whether a module is a convolution that maps the channels of each place alone."""
    return (
        isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d))
        and set(module.kernel_size) == {1}
        and module.groups == 1
        and not any(module.padding if isinstance(module.padding, tuple) else ())
    )


def _rows(layer: nn.Module, x: Tensor) -> Tensor:
    """What a layer multiplies, in the last axis: of a convolution the channels, at its strides."""
    if not is_pointwise(layer):
        return x
    places = tuple(slice(None, None, step) for step in layer.stride)
    return x[(..., *places)].movedim(-1 - len(places), -1)


def _unrows(layer: nn.Module, y: Tensor) -> Tensor:
    """The last axis back to where a layer has its outputs."""
    return y.movedim(-1, -1 - len(layer.stride)) if is_pointwise(layer) else y


def refuse_sharded(layer: nn.Module) -> None:
    """ValueError if a weight is a DTensor: each process would draw and train its own adapter; or
    if accelerate has offloaded it: the adapter would be where the weight is, nowhere."""
    if hasattr(layer, "_hf_hook") and layer.weight.is_meta:
        raise ValueError(
            "the weight of this layer is offloaded: put the adapters on first, then call "
            "accelerate.cpu_offload or dispatch_model"
        )
    if any(hasattr(parameter, "device_mesh") for parameter in layer.parameters()):
        raise ValueError(
            "the weights are spread over several processes already, and each would train another "
            "adapter: put the adapters on first, then call fully_shard or parallelize_module"
        )


def _refuse_wrapped(model: nn.Module) -> None:
    """The same where other wrappers have taken stock of the parameters."""
    for module in model.modules():
        if type(module).__name__ in ("DistributedDataParallel", "FullyShardedDataParallel"):
            raise ValueError(
                f"parameters that are added inside {type(module).__name__} are not kept alike "
                "between processes: put the adapters on first, then wrap the model"
            )


def kind_of(thing) -> str:
    """Where its class is from and what it is called: both torch and torch.ao have a Linear."""
    return f"{type(thing).__module__}.{type(thing).__qualname__}"


def chosen_dtype(layer: nn.Module, dtype: torch.dtype | str | None) -> torch.dtype:
    """That of a layer's adapter."""
    if dtype is None:
        return adapter_dtype(layer)
    chosen = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not isinstance(chosen, torch.dtype):
        raise ValueError(f"torch has no dtype {dtype!r}: give one such as 'bfloat16'")
    if not _computes(chosen) or layer.weight.is_complex() != chosen.is_complex:
        raise ValueError(
            f"an adapter of {chosen} cannot compute beside a layer of {layer.weight.dtype}: give "
            f"dtype={adapter_dtype(layer)}"
        )
    return chosen


def _is_conv1d(module: nn.Module) -> bool:
    """A linear map of transformers, as in GPT-2, whose weight is (inputs, outputs)."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf")


def features(layer: nn.Module) -> tuple[int, int]:
    if nn.parameter.is_lazy(layer.weight):
        raise ValueError("a lazy layer has no sizes yet: run one batch through the model first")
    if _is_conv1d(layer):
        return tuple(layer.weight.shape)
    if is_pointwise(layer):
        return layer.in_channels, layer.out_channels
    return layer.in_features, layer.out_features


def adapter_dtype(layer: nn.Module) -> torch.dtype:
    """That of a layer's weight, or float32 where torch multiplies no matrices of it."""
    held = layer.weight.dtype
    return held if _computes(held) else torch.float32


def _computes(dtype: torch.dtype) -> bool:
    """Not integers, not the 8-bit floats."""
    return dtype.is_complex or (dtype.is_floating_point and dtype.itemsize > 1)


def dense_weight(layer: nn.Module) -> Tensor:
    """The weight (outputs, inputs) of a layer, a view of it; TypeError if it is quantised."""
    weight = layer.weight
    quantised = type(weight).__module__.startswith(("torchao", "bitsandbytes"))
    if (
        quantised
        or not _computes(weight.dtype)
        or weight.shape.numel() != math.prod(features(layer))
    ):
        raise TypeError(
            f"the base layer holds a {kind_of(weight)} of {weight.dtype}, "
            f"{tuple(weight.shape)}: an update cannot be merged into quantised weights; "
            "dequantise the base layer first, or keep the adapter beside it"
        )
    if is_pointwise(layer):
        return weight.reshape(features(layer)[::-1])
    return weight.T if _is_conv1d(layer) else weight


@torch.no_grad()
def refuse_other_map(layer: nn.Module) -> None:
    """TypeError if a layer computes something else than its weight and its bias say."""
    weight = dense_weight(layer)
    if weight.is_meta:
        raise TypeError("the weight is on the meta device, perhaps offloaded: load it first")
    if hasattr(layer, "_hf_hook"):  # of accelerate: it takes the weight away again after a call
        return
    x = 1 + torch.arange(weight.shape[1], device=weight.device).cos().to(weight.dtype)
    places = [1] * len(layer.stride) if is_pointwise(layer) else []
    wanted = F.linear(x, weight, layer.bias)
    gap = layer(x.reshape(1, -1, *places)).flatten() - wanted
    size = torch.maximum((x * weight).norm(dim=1).max(), wanted.abs().max())
    if gap.abs().max() > 0.02 * size:
        raise TypeError(
            f"this {kind_of(layer)} computes something else than its weight and bias say, by hooks "
            "or a forward of its own, and a merged weight would not: keep the adapter beside it"
        )


def weight_to_write(layer: nn.Module) -> Tensor:
    """The weight (outputs, inputs) of a layer, a view of it; TypeError if a change were lost."""
    refuse_other_map(layer)
    if layer._parameters.get("weight") is None:
        raise TypeError(
            "the weight of the base layer is made of others in each call: end that first, with "
            "torch.nn.utils.parametrize.remove_parametrizations or torch.nn.utils.prune.remove"
        )
    return dense_weight(layer)


def apply_ndlinear_lora(
    model: nn.Module,
    target_modules: str | re.Pattern | Iterable[str | re.Pattern],
    *,
    modules_to_save: str | Iterable[str] = (),
    freeze: bool = True,
    **options,
) -> nn.Module:
    """Put an NdLinearLoRA in place of each nn.Linear, or Conv1D, of a model whose name matches.

    Args:
        model: changed in place; torch.compile or DataParallel may stand around it, but none of the
            wrappers that spread a model over processes: those come after it.
        target_modules: "all-linear" for all but the output layer of a language model, or one or
            more patterns: with shell wildcards, for a whole dotted name or its last parts
            ("q_proj", "layers.[01].*"), or compiled regular expressions, for a whole dotted name.
            What is adapted already is left alone.
        modules_to_save: patterns of modules that are trained as they are and written by
            `save_lora`, such as a new classifier; none of their layers is adapted.
        freeze: also freeze everything outside the adapters.
        options: of each NdLinearLoRA.

    Returns:
        The model.

    Raises:
        ValueError, TypeError: a pattern matches no name, nothing is left to adapt, or a layer
            cannot be adapted. Nothing is changed.

    >>> model = nn.Sequential(nn.Linear(20, 6), nn.ReLU(), nn.Linear(6, 4))
    >>> model = apply_ndlinear_lora(model, "0", alpha=2.0)
    >>> [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    ['0.adapter.align_layers.0.weight', '0.adapter.align_layers.1.weight']
    """
    bare = unwrapped(model)
    whole = _whole_modules(bare, modules_to_save)
    found = _targets(bare, target_modules, whole)
    adapt(model, dict.fromkeys(found, options))
    _choose_trained(bare, whole, freeze)
    return model


def adapt(model: nn.Module, options: dict[nn.Module, dict]) -> dict[nn.Module, NdLinearLoRA]:
    """Put adapters with their options on layers; if one is refused, nothing is changed."""
    if options:
        _refuse_wrapped(model)
    saved = {part for module in _saved(model).values() for part in module.modules()}
    if not saved.isdisjoint(options):
        raise ValueError("a layer to adapt stands in modules_to_save already: leave it out")
    for layer, given in options.items():
        _rehearse(layer, given)
    _refuse_tied(unwrapped(model), list(options))
    new = {layer: NdLinearLoRA(layer, **given) for layer, given in options.items()}
    replace_layers(model, new)
    return new


def _choose_trained(model: nn.Module, whole: list[nn.Module], freeze: bool) -> None:
    """Let adapters and the modules that are trained as they are be trained, and perhaps no more."""
    for module in whole:
        module.ndlinear_saved = True
    if freeze:
        model.requires_grad_(False)
    for layer in _adapters(model).values():
        layer.adapter.requires_grad_(True)
    for module in _saved(model).values():
        module.requires_grad_(True)


def _patterns(given) -> list:
    return [given] if isinstance(given, (str, re.Pattern)) else list(given)


def _matches(name: str, pattern: str | re.Pattern) -> bool:
    if isinstance(pattern, re.Pattern):
        return pattern.fullmatch(name) is not None
    return fnmatchcase(f".{name}", f"*.{pattern}")


def _whole_modules(model: nn.Module, patterns) -> list[nn.Module]:
    """The modules that are trained as they are."""
    whole: list[nn.Module] = []
    for pattern in _patterns(patterns):
        named = ((bare_name(name), module) for name, module in model.named_modules())
        found = [module for name, module in named if name and _matches(name, pattern)]
        if not found:
            raise ValueError(f"modules_to_save {pattern!r} matches no module of this model")
        _refuse_unsaved(model, found, pattern)
        whole += found
    return whole


def _refuse_unsaved(model: nn.Module, whole: list[nn.Module], named) -> None:
    """ValueError if modules cannot be trained as they are, or would not be found in a file."""
    adapters = [layer for layer in model.modules() if isinstance(layer, NdLinearLoRA)]
    parts = {part for layer in adapters for part in layer.modules()}
    for module in whole:
        if not parts.isdisjoint(module.modules()):
            raise ValueError(
                f"modules_to_save {named!r} names a layer that has an adapter: merge_lora(model) "
                "folds that one in"
            )
        held = [*module.state_dict().values(), *module.parameters()]
        if not all(isinstance(value, Tensor) for value in held):
            raise ValueError(f"modules_to_save {named!r}: a file holds tensors, no extra state")
        if not all(
            value.is_floating_point() or value.is_complex() for value in module.parameters()
        ):
            raise ValueError(f"modules_to_save {named!r} holds whole numbers: dequantise it first")


def _targets(model: nn.Module, target_modules, whole: list[nn.Module]) -> list[nn.Module]:
    """The layers to adapt, each once, in the order of the model."""
    if adaptable(model):
        raise ValueError(f"the model is itself a {kind_of(model)}: take NdLinearLoRA(model)")
    linears = {
        name: layer
        for name, layer in layers_of(model).items()
        if adaptable(layer) or isinstance(layer, NdLinearLoRA)
    }
    output = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    patterns = _patterns(target_modules)
    found = {pattern: _matching(linears, pattern, output) for pattern in patterns}
    missing = [pattern for pattern in patterns if not found[pattern]]
    if missing or not patterns:
        raise ValueError(
            f"target_modules {missing} match none of the nn.Linear layers: {list(linears)[:20]}; "
            "give a regular expression as re.compile(...)"
        )
    named = set().union(*found.values())
    whole = [*whole, *_saved(model).values()]
    done = {part for module in whole for part in module.modules()}
    layers = [layer for layer in dict.fromkeys(linears.values()) if layer in named - done]
    layers = [layer for layer in layers if not isinstance(layer, NdLinearLoRA)]
    if not layers:
        raise ValueError(
            f"target_modules {patterns} name only layers that are adapted already or stand in "
            "modules_to_save"
        )
    return layers


def layers_of(model: nn.Module) -> dict[str, nn.Module]:
    """All modules, but the parts of NdLinear layers and of adapters, under all their names."""
    inside = set()
    for module in model.modules():
        if isinstance(module, (NdLinear, NdLinearLoRA)):
            inside.update(part for part in module.modules() if part is not module)
    return {
        bare_name(name): module
        for name, module in model.named_modules(remove_duplicate=False)
        if module not in inside
    }


def bare_name(name: str) -> str:
    """A module's name without what torch.compile and recomputation put into it."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def _matching(linears: dict[str, nn.Module], pattern, output: nn.Module | None) -> set[nn.Module]:
    if pattern == "all-linear":
        return set(linears.values()) - {output}
    return {layer for name, layer in linears.items() if _matches(name, pattern)}


def _refuse_tied(model: nn.Module, layers: list[nn.Module]) -> None:
    """Transformers ties weights by name, which fails once the layer has an adapter."""
    if not hasattr(model, "tie_weights"):
        return
    owners = _owners(model)
    for layer in layers:
        names = sorted(owners.get(layer.weight, ()))
        if len(names) > 1:
            raise ValueError(
                f"{names} share one weight, and an adapter would untie them: leave the layer out, "
                "or give it a weight of its own first"
            )


def _owners(model: nn.Module) -> dict[nn.Parameter, list[str]]:
    """The modules that hold each parameter itself."""
    owners: dict[nn.Parameter, list[str]] = {}
    for name, module in model.named_modules():
        for parameter in dict.fromkeys(module._parameters.values()):
            if parameter is not None:
                owners.setdefault(parameter, []).append(name)
    return owners


def _rehearse(layer: nn.Module, options: dict) -> NdLinearLoRA:
    """The adapter of a layer without its numbers; raises what the real one would raise."""
    refuse_sharded(layer)
    like = nn.Linear(*features(layer), device="meta", dtype=adapter_dtype(layer))
    return NdLinearLoRA(like, **(options | {"device": "meta"}))


def replace_layers(model: nn.Module, new: dict[nn.Module, nn.Module]) -> None:
    """Put other modules in place of some, under all their names."""
    for parent in list(model.modules()):
        for name, child in parent._modules.items():
            if child in new:
                setattr(parent, name, new[child])


def _adapters(model: nn.Module) -> dict[str, NdLinearLoRA]:
    named = model.named_modules()
    found = {bare_name(name): m for name, m in named if isinstance(m, NdLinearLoRA)}
    if not found:
        raise ValueError(
            "this model has no NdLinearLoRA; call apply_ndlinear_lora(model, target_modules) first"
        )
    return found


def _saved(model: nn.Module) -> dict[str, nn.Module]:
    """The modules that are trained as they are."""
    named = model.named_modules()
    return {bare_name(name): m for name, m in named if getattr(m, "ndlinear_saved", False)}


def lora_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """What was trained, under its names in `model.state_dict()`: adapters and modules_to_save.

    What torch.compile and other wrappers put into names is left out. Sharded parameters remain so.

    Raises:
        ValueError: the model has no adapters.

    >>> model = apply_ndlinear_lora(nn.Sequential(nn.Linear(20, 6)), "0")
    >>> {name: tuple(value.shape) for name, value in lora_state_dict(model).items()}
    {'0.adapter.align_layers.0.weight': (2, 4), '0.adapter.align_layers.1.weight': (3, 5)}
    """
    model = unwrapped(model)
    held = {f"{name}.adapter".removeprefix("."): m.adapter for name, m in _adapters(model).items()}
    held |= _saved(model)
    return {
        f"{start}.{bare_name(name)}": value
        for start, module in held.items()
        for name, value in module.state_dict().items()
    }


def save_lora(model: nn.Module, path) -> None:
    """Write what was trained to a safetensors file, with how to rebuild it in its metadata.

    Around the model may stand torch.compile or DataParallel; names are those without it. Parameters
    that `fully_shard` has spread are gathered: call this in every process, the first one writes.
    An older file of this name is replaced once the new one is whole. What training changes in other
    places is not in it, such as the statistics of a BatchNorm: name that in modules_to_save.

    Raises:
        ValueError: the model has no adapters, or FullyShardedDataParallel has taken them apart.
        ImportError: safetensors is not installed.

    >>> model = apply_ndlinear_lora(nn.Sequential(nn.Linear(20, 6)), "0")
    >>> save_lora(model, "adapter.safetensors")  # doctest: +SKIP
    """
    model = unwrapped(model)
    adapters = _adapters(model)
    for name, layer in adapters.items():
        _refuse_flattened(name, layer)
    configs = {name: layer.config for name, layer in adapters.items()}
    about = {
        "ndlinear_lora": json.dumps(configs),
        "modules_to_save": json.dumps(list(_saved(model))),
    }
    state = lora_state_dict(model)
    sharded = any(hasattr(value, "full_tensor") for value in state.values())
    tensors = {name: gathered(value) for name, value in state.items()}
    if not sharded or torch.distributed.get_rank() == 0:
        write_file(tensors, path, about)


def gathered(tensor: Tensor) -> Tensor:
    """A copy in one piece of a tensor that may be spread over processes or share its memory."""
    whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return whole.detach().clone(memory_format=torch.contiguous_format)


def _refuse_flattened(name: str, layer: NdLinearLoRA) -> None:
    adapter = layer.adapter
    shapes = [tuple(weight.shape) for weight in adapter.weights]
    whole = list(zip(adapter.hidden_size, adapter.input_dims))
    if shapes != whole or not list(adapter.parameters()):
        raise ValueError(
            f"FullyShardedDataParallel has taken the weights of {name} apart: save inside of "
            "FullyShardedDataParallel.summon_full_params(model)"
        )


def write_file(tensors: dict[str, Tensor], path, about: dict[str, str]) -> None:
    """A safetensors file, written beside its place and moved there when it is whole."""
    path = os.path.realpath(path)
    beside = f"{path}.{os.getpid()}.part"
    os.stat(os.path.dirname(path))  # the usual errors if there is no such folder, which is named,
    open(beside, "wb").close()  # or nothing may be written there
    try:
        _safetensors().save_file(tensors, beside, about)
        os.replace(beside, path)
    finally:
        if os.path.exists(beside):
            os.remove(beside)


def read_file(path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors and the metadata of a safetensors file."""
    safetensors = _safetensors()
    open(path, "rb").close()  # the usual errors if it is not there
    try:
        with safetensors.safe_open(path, "pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            return tensors, file.metadata() or {}
    except Exception as error:  # of its own kind, which older versions do not name
        raise ValueError(f"{path} cannot be read as a safetensors file: {error}") from error


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside torch.compile and DataParallel."""
    while True:
        if hasattr(model, "_orig_mod"):
            model = model._orig_mod
        elif isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
            model = model.module
        else:
            return model


@torch.no_grad()
def merge_lora(model: nn.Module) -> nn.Module:
    """Add all updates to the weights of their layers for good; the adapters go.

    The layers stay frozen. In half precision the sums are rounded. A weight that other modules
    hold, too, is left to them: the layer gets one of its own.

    Returns:
        The model.

    Raises:
        ValueError, TypeError: the model has no adapters, is one itself, or a layer is quantised,
            computes something else than its weight and bias say, or would hold numbers that are
            not finite. Nothing is changed.

    >>> model = apply_ndlinear_lora(nn.Sequential(nn.Linear(20, 6)), "0")
    >>> merge_lora(model)
    Sequential(
      (0): Linear(in_features=20, out_features=6, bias=True)
    )
    """
    bare = unwrapped(model)
    adapters = _adapters(bare)
    if "" in adapters:
        raise ValueError("the model is itself an NdLinearLoRA: take to_linear(model)")
    for layer in adapters.values():
        weight_to_write(layer.base_layer)
    dense = {layer: (layer.weight, layer.bias) for layer in adapters.values()}
    for name, layer in adapters.items():
        if not all(torch.isfinite(part).all() for part in dense[layer] if part is not None):
            raise ValueError(f"{name} would hold numbers that are not finite: it is left as it is")
    owners = _owners(bare)
    for layer, (weight, bias) in dense.items():
        base = layer.base_layer
        for key, own in list(base.named_parameters(recurse=False)):
            if len(owners[own]) > 1:
                setattr(base, key, nn.Parameter(own.detach().clone(), requires_grad=False))
        if base.bias is None and bias is not None:
            base.bias = nn.Parameter(bias.as_subclass(Tensor), requires_grad=False)
        elif bias is not None:
            base.bias.copy_(bias)
        dense_weight(base).copy_(weight)
    replace_layers(bare, {layer: layer.base_layer for layer in dense})
    return model


def load_lora(model: nn.Module, path, *, freeze: bool = True) -> nn.Module:
    """Read a file of `save_lora` into a model, in place, also into one on the meta device.

    Layers that are not adapted yet become NdLinearLoRA; those that are keep their parameters.
    Further training moves what `save_lora` writes, as after `apply_ndlinear_lora`.

    Args:
        freeze: also freeze everything outside the adapters and modules_to_save.

    Returns:
        The model.

    Raises:
        ValueError: the file does not fit the model, or holds anything but the parameters of the
            adapters and modules that it names. Nothing is changed.
        ImportError: safetensors is not installed.

    >>> model = nn.Sequential(nn.Linear(20, 6))
    >>> model = load_lora(model, "adapter.safetensors")  # doctest: +SKIP
    """
    tensors, about = read_file(path)
    configs, whole = _described(path, about)
    bare = unwrapped(model)
    modules = {bare_name(n): m for n, m in bare.named_modules(remove_duplicate=False)}
    new = [name for name in configs if name and _can_adapt(modules.get(name))]
    wrong = [name for name in configs if name not in new and not _fits(modules, name, configs)]
    wrong += [name for name in whole if name not in modules]
    if wrong:
        raise ValueError(
            f"{path} adapts {configs}; this model does not fit in {wrong}: is it the right file?"
        )
    _refuse_joined(path, modules, [*configs, *whole])
    _refuse_unsaved(bare, [modules[name] for name in whole], whole)
    wanted = _wanted(path, modules, configs, new, whole)
    _compare(path, wanted, tensors)
    _refuse_infinite(path, tensors, configs, wanted)
    adapt(model, {modules[name]: configs[name] for name in new})
    _choose_trained(bare, [modules[name] for name in whole], freeze)
    _copy(bare, tensors)
    return model


def _described(path, about: dict[str, str]) -> tuple[dict[str, dict], list[str]]:
    """The adapters of a file and the names of its whole modules."""
    try:
        configs = json.loads(about.get("ndlinear_lora", "{}")) or None
        whole = json.loads(about.get("modules_to_save", "[]"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the metadata of {path} is no JSON; write it with save_lora") from error
    if (
        not isinstance(configs, dict)
        or not all(isinstance(config, dict) for config in configs.values())
        or not isinstance(whole, list)
        or not all(isinstance(name, str) for name in whole)
    ):
        raise ValueError(f"the metadata of {path} describes no adapters; write it with save_lora")
    return configs, whole


def _can_adapt(module: nn.Module | None) -> bool:
    return module is not None and (adaptable(module) or is_pointwise(module))


def _fits(modules: dict[str, nn.Module], name: str, configs: dict) -> bool:
    """Whether an adapted layer computes what a file says."""
    has = getattr(modules.get(name), "config", None)
    return isinstance(has, dict) and all(
        has.get(key) == value for key, value in configs[name].items() if key not in NO_VALUE
    )


def _refuse_joined(path, modules: dict, names: list[str]) -> None:
    """ValueError if one module would be given the numbers of several."""
    first: dict[nn.Module, str] = {}
    for name in names:
        if (other := first.setdefault(modules[name], name)) != name:
            raise ValueError(
                f"{path} has numbers for {other} and others for {name}, which are one layer in "
                "this model: make them two"
            )


def _wanted(path, modules: dict, configs: dict, new: list[str], whole: list[str]) -> dict:
    """Tensors like all those that a file must hold."""
    wanted = {}
    for name in configs:
        layer = modules[name]
        if name in new:
            layer = _rehearsed(path, name, layer, configs[name])
        for key, value in layer.adapter.state_dict().items():
            wanted[f"{name}.adapter.{key}".removeprefix(".")] = value
    for name in whole:
        for key, value in modules[name].state_dict().items():
            wanted[f"{name}.{bare_name(key)}"] = value
    return wanted


def _rehearsed(path, name: str, layer: nn.Module, config: dict) -> NdLinearLoRA:
    try:
        if foreign := sorted(config.keys() - CONFIG):
            raise TypeError(f"there is no {foreign}")
        return _rehearse(layer, config)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise ValueError(f"{path} does not fit layer {name}: {error}") from error


def _kind(tensor: Tensor) -> tuple:
    return (*tensor.shape, "complex") if tensor.is_complex() else tuple(tensor.shape)


def _compare(path, like: dict[str, Tensor], tensors: dict[str, Tensor]) -> None:
    wanted = {name: _kind(value) for name, value in like.items()}
    held = {name: _kind(value) for name, value in tensors.items()}
    if held == wanted:
        return
    missing = sorted(wanted.keys() - held.keys())
    foreign = sorted(held.keys() - wanted.keys())
    common = wanted.keys() & held.keys()
    sizes = [f"{k} {held[k]}, not {wanted[k]}" for k in sorted(common) if held[k] != wanted[k]]
    raise ValueError(
        f"{path} is not a file of its adapters alone: missing {missing}, foreign {foreign}, "
        f"of other sizes {sizes}; write it with save_lora"
    )


def _refuse_infinite(path, tensors: dict, configs: dict, wanted: dict) -> None:
    starts = tuple(f"{name}.adapter.".removeprefix(".") for name in configs)
    for name, value in tensors.items():
        if not name.startswith(starts):
            continue
        if not torch.isfinite(value.to(torch.complex128)).all():
            raise ValueError(
                f"{name} of {path} holds numbers that are not finite: its training diverged, or "
                "the file is damaged"
            )
        dtype = wanted[name].dtype
        if not torch.isfinite(value.to(dtype)).all():
            raise ValueError(
                f"{name} of {path} holds numbers too large for this model's {dtype}: give the "
                "adapter another dtype"
            )


def _copy(model: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Into the parameters that there are; one on the meta device becomes the tensor itself."""
    state = model.state_dict()
    named = {
        name: _spread(tensors[bare_name(name)], held)
        for name, held in state.items()
        if bare_name(name) in tensors
    }
    for empty in (False, True):
        part = {name: value for name, value in named.items() if state[name].is_meta == empty}
        if part:
            model.load_state_dict(part, strict=False, assign=empty)


def _spread(tensor: Tensor, held: Tensor) -> Tensor:
    """A tensor over the processes as one of a model is; itself where that one is in one piece."""
    if not hasattr(held, "device_mesh"):
        return tensor
    from torch.distributed.tensor import distribute_tensor

    tensor = tensor.to(device=held.device, dtype=held.dtype)
    return distribute_tensor(tensor, held.device_mesh, held.placements)


def _safetensors():
    try:
        return importlib.import_module("safetensors.torch")
    except ImportError as error:
        raise ImportError(
            "save_lora and load_lora need safetensors: pip install safetensors"
        ) from error
