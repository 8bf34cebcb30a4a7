"""The files beside this one, written by LyCORIS itself (lycoris-lora 4.1.3): python tests/ndlinear/lycoris/make.py

Each case is a network on a linear map `q`, a convolution `point` of kernel 1 and one `square` of kernel 3, with all its
numbers drawn. `wanted.safetensors` holds the updates of q and point as LyCORIS computes with them.
"""

import pathlib

import torch
from torch import nn

HERE = pathlib.Path(__file__).parent
CASES = {
    "rank": {"linear_dim": 2, "linear_alpha": 1.0},
    "full": {"linear_dim": 100, "linear_alpha": 1.0},
    "both": {"linear_dim": 2, "linear_alpha": 3.0, "decompose_both": True, "factor": 8},
    "rs-lora": {"linear_dim": 2, "linear_alpha": 1.0, "rs_lora": True},
    "scalar": {"linear_dim": 2, "linear_alpha": 1.0, "use_scalar": True},
    "tucker": {"linear_dim": 2, "linear_alpha": 1.0, "use_tucker": True},
    "dora": {"linear_dim": 2, "linear_alpha": 1.0, "dora_wd": True},
}


def network():
    torch.manual_seed(0)
    layers = {"q": nn.Linear(12, 18), "point": nn.Conv2d(4, 6, 1), "square": nn.Conv2d(4, 6, 3)}
    return nn.ModuleDict(layers)


def make(name, options):
    """Write one file; the updates."""
    from lycoris import LycorisNetwork, create_lycoris

    named = {"target_module": [], "target_name": ["q", "point", "square"]}
    LycorisNetwork.apply_preset({"enable_conv": True, "lora_prefix": "lycoris", **named})
    options = {"factor": 2, "conv_dim": 1, "conv_alpha": 0.5} | options
    bare, model = network(), network()
    adapters = create_lycoris(model, 1.0, algo="lokr", **options)
    adapters.apply_to()
    torch.manual_seed(1)
    for key, parameter in adapters.named_parameters():
        if "dora_scale" not in key:
            nn.init.normal_(parameter)
    adapters.save_weights(str(HERE / f"{name}.safetensors"), torch.float32, {})
    if name == "dora":
        return {}
    inputs = {"q": torch.eye(12), "point": torch.eye(4)[:, :, None, None]}
    with torch.no_grad():  # by calls: get_diff_weight of this version multiplies by the scale twice
        updates = {of: model[of](x) - bare[of](x) for of, x in inputs.items()}
    return {f"{name}.lycoris_{of}": update.flatten(1).T for of, update in updates.items()}


if __name__ == "__main__":
    from safetensors.torch import save_file

    wanted = {}
    for case, how in CASES.items():
        wanted |= make(case, how)
    save_file(
        {key: value.contiguous() for key, value in wanted.items()}, HERE / "wanted.safetensors"
    )
