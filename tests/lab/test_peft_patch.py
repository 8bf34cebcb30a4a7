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
if not peft.__version__.startswith("0.21.") or shutil.which("git") is None:
    pytest.skip("the patch is for peft 0.21, and git applies it", allow_module_level=True)

PATCH = modes.ROOT / "book" / "_static" / "peft-lokr-factored.patch"
INSTALLED = pathlib.Path(peft.__file__).parent / "tuners" / "lokr" / "layer.py"
OPTIONS = [
    {"r": 100},
    {"r": 2, "decompose_both": True},
    {"r": 4, "decompose_factor": 4},
    {"r": 100, "rank_dropout": 0.5, "rank_dropout_scale": True},
]


@pytest.fixture(scope="module")
def patched(tmp_path_factory):
    """The module peft.tuners.lokr.layer with the patch in it; the installed one stays as it is."""
    folder = tmp_path_factory.mktemp("peft")
    file = folder / "src/peft/tuners/lokr/layer.py"
    file.parent.mkdir(parents=True)
    shutil.copy(INSTALLED, file)
    subprocess.run(["git", "apply", PATCH], cwd=folder, check=True)
    spec = importlib.util.spec_from_file_location("peft.tuners.lokr.patched", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def pair(patched, **options):
    """A LoKr layer of peft, as installed and patched, with the same numbers."""
    from peft.tuners.lokr.layer import Linear

    config = peft.LoKrConfig(alpha=3.0, init_weights=False, **options)
    for kind in (Linear, patched.Linear):
        torch.manual_seed(0)
        base = nn.Linear(64, 96).requires_grad_(False)
        yield kind(base, "default", config=config, r=config.r, alpha=config.alpha)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_the_same_outputs_and_gradients(patched, options):
    x = torch.randn(3, 5, 64, dtype=torch.float64)
    outputs, gradients = [], []
    for layer in pair(patched, **options):
        torch.manual_seed(1)  # of the dropout
        outputs.append(layer.double().train()(x))
        outputs[-1].square().sum().backward()
        gradients.append([p.grad for n, p in layer.named_parameters() if "lokr" in n])
    torch.testing.assert_close(*outputs, atol=1e-10, rtol=1e-10)
    torch.testing.assert_close(*gradients, atol=1e-9, rtol=1e-9)


def test_no_product_is_formed(patched, monkeypatch):
    installed, factored = pair(patched, r=100)
    formed, product = [], torch.kron
    monkeypatch.setattr(
        torch, "kron", lambda a, b: formed.append(a.numel() * b.numel()) or product(a, b)
    )
    factored(torch.randn(2, 64))
    assert formed == []
    installed(torch.randn(2, 64))
    assert formed == [64 * 96]
