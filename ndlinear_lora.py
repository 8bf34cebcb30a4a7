"""NdLinear-LoRA: a frozen torch.nn.Linear plus a trained NdLinear, for use without PEFT.

    y = base(x) + alpha * vec(NdLinear(fold(x)))

`apply_ndlinear_lora` puts it on the layers of a model; `save_lora` and `load_lora` write and read
what was trained. Needs torch and `ndlinear.py` beside it; files also need safetensors. With PEFT,
take `ndlinear_peft.py` instead. Source: NdLinear-LoRA in arXiv:2503.17353.
"""

from __future__ import annotations

import importlib
import json
import math
import re
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ndlinear import NdLinear, kronecker_weight, near_square, to_linear, total_bias

__all__ = [
    "NdLinearLoRA",
    "apply_ndlinear_lora",
    "load_lora",
    "lora_state_dict",
    "save_lora",
]

Shape = Sequence[int]
NO_VALUE = {"dropout", "init", "execution", "dtype"}  # what changes no value of a trained adapter
HABITS = {  # what is typed by habit, and what to write here
    "r": "leave it out: the folds set the size, there is no rank",
    "rank": "leave it out: the folds set the size, there is no rank",
    "lora_alpha": "alpha=lora_alpha / r: alpha multiplies the update itself here",
    "lora_dropout": "dropout=",
    "use_rslora": "leave it out: alpha multiplies the update itself",
    "task_type": "leave it out, and name the head in modules_to_save",
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
        base_layer: the Linear(prod D, prod H) to adapt, or a Conv1D of transformers; also one that
            torchao or bitsandbytes quantised, which remains an nn.Linear, but none of
            torch.ao.quantization. It is kept and its parameters are frozen.
        input_dims: how prod D folds; by default into two near-square factors.
        hidden_size: how prod H folds; by default into two near-square factors.
        alpha: factor of the update.
        dropout: probability of dropout on the input of the update, in training.
        bias: per-mode biases in the update; the paper's counts have none.
        dtype: of the adapter; by default that of the base layer, float32 if that one is quantised.
        options: of the NdLinear `adapter`: transform_outer, init.

    Raises:
        ValueError, TypeError: sizes that do not fit, or another kind of layer.

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
        if not adaptable(base_layer):
            raise TypeError(f"NdLinearLoRA adapts a torch.nn.Linear, not {kind_of(base_layer)}")
        for name in options.keys() & HABITS.keys():
            raise TypeError(f"NdLinear-LoRA has no {name}: {HABITS[name]}")
        sizes = _features(base_layer)
        folded = (near_square(sizes[0]), near_square(sizes[1]))
        dims = folded[0] if input_dims is None else input_dims
        hidden = folded[1] if hidden_size is None else hidden_size
        checked = NdLinear(dims, hidden, device="meta")  # draws nothing
        dims, hidden = checked.input_dims, checked.hidden_size
        if (math.prod(dims), math.prod(hidden)) != sizes:
            raise ValueError(
                f"input_dims {dims} and hidden_size {hidden} do not multiply to the wrapped "
                f"layer's {sizes}; choose for example {folded[0]} and {folded[1]}"
            )
        if isinstance(dtype, str):
            dtype = _dtype_named(dtype)
        default = adapter_dtype(base_layer)
        like = {"device": base_layer.weight.device, "dtype": dtype or default}
        self.in_features, self.out_features = sizes
        self.base_layer = base_layer
        self.adapter = NdLinear(dims, hidden, bias=bias, **(like | options))
        self.alpha = float(alpha)
        self.dropout = nn.Dropout(dropout)
        self.merged = False
        self.register_buffer("merged_weight", None, persistent=False)
        self.register_buffer("merged_bias", None, persistent=False)
        self._zero()
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
        if self.merged:
            return F.linear(x, self.merged_weight, self.merged_bias)
        y = self.base_layer(x)
        adapter = self.adapter
        folded = self.dropout(x).to(adapter.weights[0].dtype).unflatten(-1, adapter.input_dims)
        update = adapter(folded).flatten(-len(adapter.hidden_size))
        return y + (self.alpha * update).to(y.dtype)

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
            "alpha": self.alpha,
            "bias": self.has_bias,
            "transform_outer": self.adapter.transform_outer,
            "dropout": self.dropout.p,
            "init": self.adapter.init,
            "execution": self.adapter.execution,
            "dtype": str(self.adapter.weights[0].dtype).removeprefix("torch."),
        }

    @property
    def weight(self) -> Tensor:
        """The weight in effect, (prod H, prod D), for code that reads weights."""
        base = dense_weight(self.base_layer)
        return (base + self.alpha * kronecker_weight(self.adapter)).to(base.dtype)

    @property
    def bias(self) -> Tensor | None:
        """The bias in effect, (prod H,), or None."""
        base = self.base_layer.bias
        if not self.has_bias:
            return base
        update = self.alpha * total_bias(self.adapter).flatten()
        total = update if base is None else base + update
        return total.to(self.base_layer.weight.dtype)

    def merge(self) -> None:
        """Compute with one dense matrix from now on.

        It is a copy: the base layer is not touched, and `unmerge` is exact. TypeError if the base
        layer is quantised.
        """
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


def adaptable(module: nn.Module) -> bool:
    """Whether a module is a torch.nn.Linear or a Conv1D of transformers."""
    return isinstance(module, nn.Linear) or _is_conv1d(module)


def kind_of(thing) -> str:
    """Where its class is from and what it is called: both torch and torch.ao have a Linear."""
    return f"{type(thing).__module__}.{type(thing).__qualname__}"


def _dtype_named(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"torch has no dtype {name!r}: give one such as 'bfloat16'")
    return dtype


def _is_conv1d(module: nn.Module) -> bool:
    """A linear map of transformers, as in GPT-2, whose weight is (inputs, outputs)."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf")


def _features(layer: nn.Module) -> tuple[int, int]:
    if _is_conv1d(layer):
        return tuple(layer.weight.shape)
    return layer.in_features, layer.out_features


def adapter_dtype(layer: nn.Module) -> torch.dtype:
    """That of a layer's weight, or float32 where torch multiplies no matrices of it."""
    held = layer.weight.dtype
    return held if _computes(held) else torch.float32


def _computes(dtype: torch.dtype) -> bool:
    """Not integers, not the 8-bit floats."""
    return dtype.is_floating_point and dtype.itemsize > 1


def dense_weight(layer: nn.Module) -> Tensor:
    """The weight (outputs, inputs) of an adaptable layer; TypeError if it is quantised."""
    weight = layer.weight
    quantised = type(weight).__module__.startswith(("torchao", "bitsandbytes"))
    if (
        quantised
        or not _computes(weight.dtype)
        or weight.shape.numel() != math.prod(_features(layer))
    ):
        raise TypeError(
            f"the base layer holds a {kind_of(weight)} of {weight.dtype}, "
            f"{tuple(weight.shape)}: an update cannot be merged into quantised weights; "
            "dequantise the base layer first, or keep the adapter beside it"
        )
    return weight.T if _is_conv1d(layer) else weight


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
        model: changed in place.
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
    whole = _whole_modules(model, modules_to_save)
    found = _targets(model, target_modules, whole)
    for layer in found:
        _rehearse(layer, options)
    _refuse_tied(model, found)
    replace_layers(model, {layer: NdLinearLoRA(layer, **options) for layer in found})
    _choose_trained(model, whole, freeze)
    return model


def _choose_trained(model: nn.Module, whole: list[nn.Module], freeze: bool) -> None:
    """Let adapters and the modules that are trained as they are be trained, and perhaps no more."""
    for module in whole:
        module.ndlinear_saved = True
    if freeze:
        model.requires_grad_(False)
    for layer in _adapters(model).values():
        layer.adapter.requires_grad_(True)
    for name in _saved(model):
        model.get_submodule(name).requires_grad_(True)


def _patterns(given) -> list:
    return [given] if isinstance(given, (str, re.Pattern)) else list(given)


def _matches(name: str, pattern: str | re.Pattern) -> bool:
    if isinstance(pattern, re.Pattern):
        return pattern.fullmatch(name) is not None
    return fnmatchcase(f".{name}", f"*.{pattern}")


def _whole_modules(model: nn.Module, patterns) -> list[nn.Module]:
    """The modules that are trained as they are."""
    whole = []
    for pattern in _patterns(patterns):
        found = [m for name, m in model.named_modules() if name and _matches(name, pattern)]
        if not found:
            raise ValueError(f"modules_to_save {pattern!r} matches no module of this model")
        whole += found
    return whole


def _targets(model: nn.Module, target_modules, whole: list[nn.Module]) -> list[nn.Module]:
    """The layers to adapt, each once, in the order of the model."""
    if adaptable(model):
        raise ValueError(f"the model is itself a {kind_of(model)}: take NdLinearLoRA(model)")
    linears = _linears(model)
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
    done = {part for module in whole for part in module.modules()}
    layers = [layer for layer in dict.fromkeys(linears.values()) if layer in named - done]
    layers = [layer for layer in layers if not isinstance(layer, NdLinearLoRA)]
    if not layers:
        raise ValueError(
            f"target_modules {patterns} name only layers that are adapted already or stand in "
            "modules_to_save"
        )
    return layers


def _linears(model: nn.Module) -> dict[str, nn.Module]:
    """All layers that can be adapted or are, under all their names."""
    inside = set()
    for module in model.modules():
        if isinstance(module, (NdLinear, NdLinearLoRA)):
            inside.update(part for part in module.modules() if part is not module)
    return {
        name: module
        for name, module in model.named_modules(remove_duplicate=False)
        if module not in inside and (adaptable(module) or isinstance(module, NdLinearLoRA))
    }


def _matching(linears: dict[str, nn.Module], pattern, output: nn.Module | None) -> set[nn.Module]:
    if pattern == "all-linear":
        return set(linears.values()) - {output}
    return {layer for name, layer in linears.items() if _matches(name, pattern)}


def _refuse_tied(model: nn.Module, layers: list[nn.Module]) -> None:
    """Transformers ties weights by name, which fails once the layer has an adapter."""
    if not hasattr(model, "tie_weights"):
        return
    owners: dict[int, set[str]] = {}
    for name, module in model.named_modules():
        for parameter in module._parameters.values():
            owners.setdefault(id(parameter), set()).add(name)
    for layer in layers:
        names = sorted(owners[id(layer.weight)])
        if len(names) > 1:
            raise ValueError(
                f"{names} share one weight, and an adapter would untie them: leave the layer out, "
                "or give it a weight of its own first"
            )


def _rehearse(layer: nn.Module, options: dict) -> NdLinearLoRA:
    """The adapter of a layer without its numbers; raises what the real one would raise."""
    like = nn.Linear(*_features(layer), device="meta", dtype=adapter_dtype(layer))
    return NdLinearLoRA(like, **(options | {"device": "meta"}))


def replace_layers(model: nn.Module, new: dict[nn.Module, nn.Module]) -> None:
    """Put other modules in place of some, under all their names."""
    for parent in list(model.modules()):
        for name, child in parent._modules.items():
            if child in new:
                setattr(parent, name, new[child])


def _adapters(model: nn.Module) -> dict[str, NdLinearLoRA]:
    found = {name: m for name, m in model.named_modules() if isinstance(m, NdLinearLoRA)}
    if not found:
        raise ValueError(
            "this model has no NdLinearLoRA; call apply_ndlinear_lora(model, target_modules) first"
        )
    return found


def _saved(model: nn.Module) -> list[str]:
    """Names of the modules that are trained as they are."""
    return [name for name, m in model.named_modules() if getattr(m, "ndlinear_saved", False)]


def lora_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """What was trained, under its names in `model.state_dict()`: adapters and modules_to_save.

    Raises:
        ValueError: the model has no adapters.

    >>> model = apply_ndlinear_lora(nn.Sequential(nn.Linear(20, 6)), "0")
    >>> {name: tuple(value.shape) for name, value in lora_state_dict(model).items()}
    {'0.adapter.align_layers.0.weight': (2, 4), '0.adapter.align_layers.1.weight': (3, 5)}
    """
    starts = [f"{name}.adapter.".removeprefix(".") for name in _adapters(model)]
    starts += [f"{name}." for name in _saved(model)]
    state = model.state_dict()
    return {name: value for name, value in state.items() if name.startswith(tuple(starts))}


def save_lora(model: nn.Module, path) -> None:
    """Write what was trained to a safetensors file, with how to rebuild it in its metadata.

    Around the model may stand torch.compile or DataParallel; names are those without it.

    Raises:
        ValueError: the model has no adapters.
        ImportError: safetensors is not installed.

    >>> model = apply_ndlinear_lora(nn.Sequential(nn.Linear(20, 6)), "0")
    >>> save_lora(model, "adapter.safetensors")  # doctest: +SKIP
    """
    model = _unwrapped(model)
    configs = {name: layer.config for name, layer in _adapters(model).items()}
    about = {"ndlinear_lora": json.dumps(configs), "modules_to_save": json.dumps(_saved(model))}
    tensors = {}
    for name, value in lora_state_dict(model).items():  # copied, for tied weights share memory
        tensors[name] = value.clone(memory_format=torch.contiguous_format)
    _safetensors().save_file(tensors, path, about)


def _unwrapped(model: nn.Module) -> nn.Module:
    """The model inside torch.compile and DataParallel."""
    while True:
        if hasattr(model, "_orig_mod"):
            model = model._orig_mod
        elif isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
            model = model.module
        else:
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
    with _safetensors().safe_open(path, "pt") as file:
        about = file.metadata() or {}
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    configs = json.loads(about.get("ndlinear_lora", "{}"))
    whole = json.loads(about.get("modules_to_save", "[]"))
    bare = _unwrapped(model)
    modules = dict(bare.named_modules(remove_duplicate=False))
    new = [name for name in configs if name and adaptable(modules.get(name))]
    wrong = [name for name in configs if name not in new and not _fits(modules, name, configs)]
    wrong += [name for name in whole if name not in modules]
    if wrong or not configs:
        raise ValueError(
            f"{path} adapts {configs}; this model does not fit in {wrong}: is it the right file?"
        )
    _compare(path, _sizes(path, modules, configs, new, whole), tensors)
    replace_layers(bare, {modules[n]: NdLinearLoRA(modules[n], **configs[n]) for n in new})
    _choose_trained(bare, [modules[name] for name in whole], freeze)
    _copy(bare, tensors)
    return model


def _fits(modules: dict[str, nn.Module], name: str, configs: dict) -> bool:
    """Whether an adapted layer computes what a file says."""
    has = getattr(modules.get(name), "config", None)
    return isinstance(has, dict) and all(
        has.get(key) == value for key, value in configs[name].items() if key not in NO_VALUE
    )


def _sizes(path, modules: dict, configs: dict, new: list[str], whole: list[str]) -> dict:
    """The sizes of all tensors that a file must hold."""
    wanted = {}
    for name in configs:
        layer = modules[name]
        if name in new:
            try:
                layer = _rehearse(layer, configs[name])
            except (TypeError, ValueError) as error:
                raise ValueError(f"{path} does not fit layer {name}: {error}") from error
        for key, value in layer.adapter.state_dict().items():
            wanted[f"{name}.adapter.{key}".removeprefix(".")] = tuple(value.shape)
    for name in whole:
        for key, value in modules[name].state_dict().items():
            wanted[f"{name}.{key}"] = tuple(value.shape)
    return wanted


def _compare(path, wanted: dict, tensors: dict[str, Tensor]) -> None:
    held = {name: tuple(value.shape) for name, value in tensors.items()}
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


def _copy(model: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Into the parameters that there are; one on the meta device becomes the tensor itself."""
    state = model.state_dict()
    for empty in (False, True):
        part = {name: value for name, value in tensors.items() if state[name].is_meta == empty}
        if part:
            model.load_state_dict(part, strict=False, assign=empty)


def _safetensors():
    try:
        return importlib.import_module("safetensors.torch")
    except ImportError as error:
        raise ImportError(
            "save_lora and load_lora need safetensors: pip install safetensors"
        ) from error
