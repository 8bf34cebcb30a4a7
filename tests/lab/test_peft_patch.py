"""The patch for peft: LoKr on linear maps without the Kronecker product, checked against the installed peft."""

import importlib.util
import pathlib
import shutil
import subprocess

import pytest
import torch
from lab import modes
from torch import nn

peft = pytest.importorskip("peft")
PATCH = modes.ROOT / "book" / "_static" / "peft-lokr-factored.patch"
OPTIONS = [
    {"r": 100},
    {"r": 2},
    {"r": 2, "decompose_both": True},
    {"r": 4, "decompose_factor": 4},
    {"r": 100, "rank_dropout": 0.5},
    {"r": 100, "rank_dropout": 0.5, "rank_dropout_scale": True},
]


@pytest.fixture(scope="module")
def patched(tmp_path_factory):
    """The module peft.tuners.lokr.layer with the patch in it; the installed one stays as it is."""
    if not peft.__version__.startswith("0.21.") or shutil.which("git") is None:
        pytest.skip("the patch is for peft 0.21, and git applies it")
    place = pathlib.Path("src/peft/tuners/lokr/layer.py")
    folder = tmp_path_factory.mktemp("peft")
    (folder / place).parent.mkdir(parents=True)
    installed = pathlib.Path(peft.__file__).parent / "tuners" / "lokr" / "layer.py"
    shutil.copy(installed, folder / place)
    subprocess.run(["git", "apply", PATCH], cwd=folder, check=True)
    spec = importlib.util.spec_from_file_location("peft.tuners.lokr.patched", folder / place)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def layers(patched, options):
    """A LoKr layer of the installed peft and one of the patched module, with the same numbers."""
    from peft.tuners.lokr.layer import Linear

    config = peft.LoKrConfig(alpha=3.0, init_weights=False, **options)
    made = []
    for kind in (Linear, patched.Linear):
        torch.manual_seed(0)
        base = nn.Linear(64, 96).double()
        made.append(kind(base, "default", config=config, r=options["r"], alpha=3.0).double())
    return made


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_the_same_outputs_and_gradients(patched, options):
    x = torch.randn(3, 5, 64, dtype=torch.float64)
    outputs, gradients = [], []
    for layer in layers(patched, options):
        torch.manual_seed(1)  # of the dropout
        outputs.append(layer.train()(x))
        outputs[-1].square().sum().backward()
        gradients.append([p.grad for n, p in layer.named_parameters() if "lokr" in n])
    torch.testing.assert_close(*outputs, atol=1e-10, rtol=1e-10)
    torch.testing.assert_close(*gradients, atol=1e-9, rtol=1e-9)


def test_no_product_is_formed(patched, monkeypatch):
    old, new = layers(patched, {"r": 100})
    formed = []
    product = torch.kron
    monkeypatch.setattr(
        torch, "kron", lambda a, b: formed.append(a.numel() * b.numel()) or product(a, b)
    )
    x = torch.randn(2, 64, dtype=torch.float64)
    new(x)
    assert formed == []
    old(x)
    assert formed == [64 * 96]
