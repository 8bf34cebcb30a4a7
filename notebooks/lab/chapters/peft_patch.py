"""The patch for peft's LoKr: the patched module beside the installed one, and what both cost."""

from __future__ import annotations

import importlib.util
import pathlib
import shutil
import subprocess
import tempfile
import types

import torch
from torch import nn

from ..machine import require
from ..memory import peak_bytes
from ..modes import ROOT, LabError
from ..timing import rounds

PATCH = ROOT / "book" / "_static" / "peft-lokr-factored.patch"
PLACE = pathlib.Path("src/peft/tuners/lokr/layer.py")


def patched() -> types.ModuleType:
    """The module peft.tuners.lokr.layer with the patch in it; the installed one stays as it is.

    Raises:
        LabError: peft is not of version 0.21, or git is missing, which applies the patch.
    """
    peft = require("peft")
    if not peft.__version__.startswith("0.21.") or shutil.which("git") is None:
        raise LabError(f"the patch is for peft 0.21, not {peft.__version__}, and git applies it")
    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder) / PLACE
        file.parent.mkdir(parents=True)
        shutil.copy(pathlib.Path(peft.__file__).parent / "tuners" / "lokr" / "layer.py", file)
        subprocess.run(["git", "apply", PATCH], cwd=folder, check=True)
        spec = importlib.util.spec_from_file_location("peft.tuners.lokr.patched", file)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return module


def pair(inputs: int, outputs: int, alpha: float = 1.0, **options) -> dict[str, nn.Module]:
    """A LoKr layer of peft, as installed and patched, with the same numbers."""
    peft = require("peft")
    from peft.tuners.lokr.layer import Linear

    config = peft.LoKrConfig(alpha=alpha, init_weights=False, **options)
    made = {}
    for name, kind in (("installed", Linear), ("patched", patched().Linear)):
        torch.manual_seed(0)
        base = nn.Linear(inputs, outputs).requires_grad_(False)
        made[name] = kind(base, "default", config=config, r=config.r, alpha=alpha)
    return made


def measure(c: dict) -> dict:
    """Times in rounds and peak memory of both layers, and of the frozen map alone, for one input of ``tokens`` rows.

    In the pass "training" the input asks for its gradient, as inside of a network.
    """
    width, tokens = c["width"], c["tokens"]
    layers: dict[str, nn.Module] = pair(width, width, r=10**5)
    layers["frozen map alone"] = layers["installed"].base_layer
    x = torch.randn(tokens, width, generator=torch.Generator().manual_seed(c["seed"]))
    training = c["pass"] == "training"
    x.requires_grad_(training)

    def call(layer):
        with torch.set_grad_enabled(training):
            y = layer(x)
        return torch.autograd.grad(y, _trained(layer, x), torch.ones_like(y)) if training else y

    calls = {name: lambda layer=layer: call(layer) for name, layer in layers.items()}
    seconds = rounds(calls, c["rounds"], seed=c["seed"])
    peaks = {f"peak {name}": peak_bytes(one) for name, one in calls.items()}
    return {"metrics": peaks, "curve": seconds}


def _trained(layer: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    return [x, *(p for p in layer.parameters() if p.requires_grad)]
