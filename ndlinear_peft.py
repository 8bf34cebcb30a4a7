"""NdLinear as an adapter of PEFT: `NdLinearConfig` in place of `LoraConfig`.

    model = get_peft_model(model, NdLinearConfig(target_modules=["q_proj", "v_proj"]))
    model.save_pretrained(folder)
    model = load(base, folder)                    # not PeftModel.from_pretrained
    load(model, folder, adapter_name="second")    # beside the first one

Each adapted nn.Linear or Conv1D gets a trained NdLinear without biases on near-square folds beside
it; its update is zero at the start and multiplied by lora_alpha. PEFT does the rest: several
adapters, also mixed in a batch, disable, merge, modules_to_save, low-memory loading; but adapters
are not added up to one (add_weighted_adapter), for a sum of Kronecker products is none. Needs peft
0.19 or later, and `ndlinear.py` and `ndlinear_lora.py` beside it.

PEFT reads the type of an adapter from its file as LoRA. So that it cannot load such a file without
this module and give the base model, the file names a start that PEFT does not know, and PEFT stops
with the sentence in `START`.

Version 0.1.0 of the file `ndlinear_peft.py` of the NdLinear book. Licence: Apache-2.0.
"""

from __future__ import annotations

import dataclasses
import math
import sys
import warnings

import torch
from peft import LoraConfig, PeftConfig, PeftModel
from peft.tuners.lora.layer import LoraLayer
from peft.tuners.tuners_utils import check_adapters_to_merge
from torch import Tensor, nn

import ndlinear_lora

__version__ = "0.1.0"
if (_met := getattr(ndlinear_lora, "__version__", "unknown")) != __version__:
    raise ImportError(
        f"this ndlinear_peft.py is of version {__version__}, {ndlinear_lora.__file__} of version "
        f"{_met}: copy both from one release, side by side"
    )
from ndlinear import NdLinear, _read_only, kronecker_weight, near_square
from ndlinear_lora import (
    _is_conv1d,
    _ToRead,
    adaptable,
    adapter_dtype,
    dense_weight,
    kind_of,
    refuse_sharded,
    weight_to_write,
)

__all__ = ["NdLinearConfig", "NdLinearLora", "load"]

KIND = "an NdLinear adapter"
START = (
    f"{KIND}: load it with ndlinear_peft.load(model, folder); it cannot stand on a layer that has "
    "a LoRA already"
)
SUPPORTED = {field.name for field in dataclasses.fields(PeftConfig)} | {  # whatever the rank
    "r",
    "init_lora_weights",
    "target_modules",
    "exclude_modules",
    "layers_to_transform",
    "layers_pattern",
    "layer_replication",
    "modules_to_save",
    "trainable_token_indices",
    "ensure_weight_tying",
    "bias",
    "lora_alpha",
    "alpha_pattern",
    "lora_dropout",
}


@dataclasses.dataclass
class NdLinearConfig(LoraConfig):
    """LoraConfig for NdLinear adapters; what low rank alone has is refused.

    The fields in `SUPPORTED` mean what they mean there; any other one must keep its default.
    lora_alpha multiplies the update; there is no rank.
    """

    r: int = 1
    lora_alpha: float = 1.0

    def __post_init__(self):
        if _is_ours(self):  # a copy, as dataclasses.replace makes it
            if _inside_of("add_weighted_adapter"):
                raise ValueError(
                    "a sum of NdLinear adapters is none: no add_weighted_adapter; make several "
                    "active with model.base_model.set_adapter([...])"
                )
            self.init_lora_weights = True
        if self.r != 1:
            raise ValueError(f"an NdLinear adapter has no rank: leave r={self.r} out")
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name not in SUPPORTED and value and value != _default(field):
                raise ValueError(f"an NdLinear adapter has no {field.name}: leave it out")
        if self.init_lora_weights is not True:
            raise ValueError(
                f"an NdLinear adapter starts at zero, not as {self.init_lora_weights!r}"
            )
        super().__post_init__()
        self.init_lora_weights = START
        self._register_custom_module({nn.Module: NdLinearLora})


def _is_ours(config: PeftConfig) -> bool:
    return str(getattr(config, "init_lora_weights", "")).startswith(KIND)


def _inside_of(function: str) -> bool:
    """Whether a function of this name is running; PEFT gives no other sign of what it is about."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_name != function:
        frame = frame.f_back
    return frame is not None


def _default(field: dataclasses.Field):
    if field.default_factory is dataclasses.MISSING:
        return field.default
    return field.default_factory()


class NdLinearLora(nn.Module, LoraLayer):
    """An nn.Linear with NdLinear adapters: y = base(x) + sum of scale * NdLinear(x)."""

    adapter_layer_names = ("lora_first", "lora_second")  # PEFT cuts `.name.weight` from keys
    other_param_names = ("r", "lora_alpha", "scaling", "lora_dropout", "layers")

    def __init__(self, base_layer: nn.Module, adapter_name: str, config=None, **options):
        super().__init__()
        inner = getattr(base_layer, "base_layer", base_layer)
        if not adaptable(inner):
            raise TypeError(
                f"an NdLinear adapter needs a torch.nn.Linear, not {kind_of(inner)}: leave it out"
            )
        refuse_sharded(inner)
        LoraLayer.__init__(self, base_layer)
        self.lora_first, self.lora_second = nn.ModuleDict(), nn.ModuleDict()
        self.layers: dict[str, NdLinear] = {}  # of these two factors; not a submodule itself
        self.added: dict[str, tuple[float, list[Tensor]]] = {}  # scale and factors, as merged
        self._active_adapter = adapter_name
        self.train(base_layer.training)
        alpha = options.get("lora_alpha", 1.0)
        self.update_layer(adapter_name, 1, alpha, config=config)

    def update_layer(self, adapter_name: str, r: int, lora_alpha: float, config=None, **options):
        """Add an adapter."""
        dropout = getattr(config, "lora_dropout", options.get("lora_dropout", 0.0))
        if config is not None and not isinstance(config, NdLinearConfig):
            raise TypeError(
                "this layer has NdLinear adapters: load another one with ndlinear_peft.load, or "
                "give NdLinearConfig"
            )
        if not math.isfinite(lora_alpha):
            raise ValueError(f"lora_alpha of adapter {adapter_name} is {lora_alpha}")
        self.r[adapter_name] = r
        self.lora_alpha[adapter_name] = lora_alpha
        self.scaling[adapter_name] = float(lora_alpha)
        drop = nn.Dropout(dropout) if dropout else nn.Identity()
        self.lora_dropout[adapter_name] = drop.train(self.training)
        dims, hidden = near_square(self.in_features), near_square(self.out_features)
        adapter = NdLinear(dims, hidden, bias=False).to(adapter_dtype(self.get_base_layer()))
        nn.init.zeros_(adapter.weights[-1])
        self.layers[adapter_name] = adapter
        self.lora_first[adapter_name], self.lora_second[adapter_name] = adapter.align_layers
        self._move_adapter_to_device_of_base_layer(adapter_name)
        self.set_adapter(
            self.active_adapters, inference_mode=getattr(config, "inference_mode", False)
        )

    def get_delta_weight(self, adapter_name: str) -> Tensor:
        """The update as a matrix, (outputs, inputs)."""
        return self.scaling[adapter_name] * kronecker_weight(self.layers[adapter_name])

    @property
    def weight(self) -> Tensor:
        """The base weight; with what adapters add to it where torch and others read it, not call.

        So do nn.MultiheadAttention and, in evaluation, nn.TransformerEncoderLayer. A quantised one
        is given as it is.
        """
        layer = self.get_base_layer()
        total = layer.weight
        names = [] if self.disable_adapters else self._acting()
        try:
            dense_weight(layer)
        except TypeError:
            return total
        for name in names:
            part = self._missing(name) * kronecker_weight(self.layers[name])
            total = total + (part.T if _is_conv1d(layer) else part).to(total)
        return _read_only(total, _ToRead) if names else total

    @property
    def lora_A(self) -> nn.ModuleDict:
        """Where PEFT looks for the names of the adapters."""
        return self.lora_first

    @torch.no_grad()
    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Add updates to the base weight; TypeError if that one is quantised."""
        weight = weight_to_write(self.get_base_layer()).data
        stale = [name for name in self.added if self._missing(name)]
        for name in stale:
            self._take_out(name)
        for name in dict.fromkeys([*stale, *(check_adapters_to_merge(self, adapter_names) or ())]):
            if name not in self.layers:
                continue
            merged = weight + self.get_delta_weight(name).to(weight)
            if safe_merge and not torch.isfinite(merged).all():
                raise ValueError(
                    f"NaNs detected in the merged weights. The adapter {name} seems to be broken"
                )
            weight.copy_(merged)
            factors = [factor.detach().clone() for factor in self.layers[name].weights]
            self.added[name] = self.scaling[name], factors
            self.merged_adapters.append(name)

    def unmerge(self) -> None:
        """Take the updates out of the base weight, as they were merged, up to rounding."""
        if not self.merged:
            warnings.warn("Already unmerged. Nothing to do.", stacklevel=2)
        for name in reversed(list(self.added)):
            self._take_out(name)

    @torch.no_grad()
    def _take_out(self, name: str) -> None:
        scale, (first, second) = self.added.pop(name)
        weight = dense_weight(self.get_base_layer()).data
        weight -= (scale * torch.kron(first, second)).to(weight)
        self.merged_adapters.remove(name)

    def _missing(self, name: str) -> float:
        """The part of an adapter's scale that is not in the base weight."""
        merged = self.added[name][0] if name in self.added else 0.0
        return self.scaling.get(name, merged) - merged  # a deleted one has no scale of its own

    def _acting(self) -> list[str]:
        """The active adapters that are not in the base weight as they are."""
        own = [name for name in self.active_adapters if name in self.layers]
        return [name for name in own if name not in self.added or self._missing(name)]

    def scale_layer(self, scale: float) -> None:
        """Multiply the scales of the active adapters."""
        for name in self.active_adapters:
            if name in self.layers:
                self.scaling[name] *= scale

    def unscale_layer(self, scale: float | None = None) -> None:
        """Divide the scales of the active adapters, or set them back to lora_alpha."""
        for name in self.active_adapters:
            if name in self.layers:
                start = float(self.lora_alpha[name])
                self.scaling[name] = start if scale is None else self.scaling[name] / scale

    def _update(self, adapter_name: str, x: Tensor) -> Tensor:
        adapter = self.layers[adapter_name]
        x = self._cast_input_dtype(self.lora_dropout[adapter_name](x), adapter.weights[0].dtype)
        return adapter(x.unflatten(-1, adapter.input_dims)).flatten(-2)

    def forward(self, x: Tensor, *args, **kwargs) -> Tensor:
        """(..., inputs) -> (..., outputs)."""
        self._check_forward_args(x, *args, **kwargs)
        mixed = kwargs.pop("adapter_names", None)
        if self.disable_adapters and self.merged:
            self.unmerge()
        y = self.base_layer(x, *args, **kwargs)
        if self.disable_adapters:
            return y
        result = y
        if mixed is not None:
            for name in {*mixed} & self.layers.keys():
                rows = torch.tensor([name == other for other in mixed], device=x.device)
                update = self.scaling[name] * self._update(name, x[rows])
                result = result.index_add(0, rows.nonzero().flatten(), update.to(y.dtype))
            return result
        for name in self._acting():
            result = result + self._missing(name) * self._update(name, x)
        return result.to(y.dtype)

    def __repr__(self) -> str:
        return "lora." + super().__repr__()


def load(
    model: nn.Module, folder, adapter_name: str = "default", is_trainable: bool = False, **options
) -> PeftModel:
    """Read what `save_pretrained` wrote into a model, or beside the adapters of a PeftModel.

    Args:
        model: the base model, or one that `get_peft_model` or `load` returned. folder: the
            adapter's. options: of PeftModel.from_pretrained or PeftModel.load_adapter.

    Returns:
        The PeftModel.

    Raises:
        ValueError: the folder holds none, or the model has one of this name that is merged, has
            other scales or stands on other layers.
    """
    places = ("subfolder", "revision", "cache_dir", "token")
    place = {name: options[name] for name in places if name in options}
    found = PeftConfig.from_pretrained(folder, **place)
    if not _is_ours(found):
        raise ValueError(f"{folder} holds no NdLinear adapter; load it with PeftModel")
    known = {field.name for field in dataclasses.fields(NdLinearConfig) if field.init}
    known.remove("init_lora_weights")
    config = NdLinearConfig(**{k: v for k, v in vars(found).items() if k in known})
    config.inference_mode = not is_trainable
    if isinstance(model, PeftModel):
        if adapter_name not in model.peft_config:
            both = ("low_cpu_mem_usage", "autocast_adapter_dtype")
            shared = {name: options[name] for name in both if name in options}
            model.add_adapter(adapter_name, config, **shared)
        _refuse_another(model, adapter_name, config)
        read = model.load_adapter(folder, adapter_name, is_trainable=is_trainable, **options)
        if read.unexpected_keys:
            raise ValueError(
                f"{folder} is not of adapter {adapter_name} as this model has it: "
                f"{read.unexpected_keys[:5]} were not read"
            )
        return model
    return PeftModel.from_pretrained(
        model, folder, adapter_name, is_trainable=is_trainable, config=config, **options
    )


def _refuse_another(model: PeftModel, name: str, config: NdLinearConfig) -> None:
    """ValueError if new numbers in an adapter that there is would not give what was saved."""
    own = model.peft_config[name]
    scales = [(one.lora_alpha, one.alpha_pattern) for one in (own, config)]
    if scales[0] != scales[1]:
        raise ValueError(
            f"adapter {name} of this model has lora_alpha and alpha_pattern {scales[0]}, the one in "
            f"the folder {scales[1]}: give another adapter_name, or delete_adapter({name!r}) first"
        )
    layers = (layer for layer in model.modules() if isinstance(layer, NdLinearLora))
    if any(name in layer.merged_adapters for layer in layers):
        raise ValueError(f"adapter {name} is merged: call unmerge_adapter() first")
