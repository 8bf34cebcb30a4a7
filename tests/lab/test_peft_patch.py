"""The patch for peft: LoKr on linear maps without the Kronecker product, checked against the installed peft."""

import pathlib
import re
import shutil
import subprocess

import pytest
import torch
from lab.chapters import peft_patch
from lab.modes import LabError

peft = pytest.importorskip("peft")
if not peft.__version__.startswith("0.21.") or shutil.which("git") is None:
    pytest.skip("the patch is for peft 0.21, and git applies it", allow_module_level=True)

OPTIONS = [
    {"r": 100},
    {"r": 2, "decompose_both": True},
    {"r": 4, "decompose_factor": 4},
    {"r": 100, "rank_dropout": 0.5, "rank_dropout_scale": True},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_the_same_outputs_and_gradients(options):
    x = torch.randn(3, 5, 64, dtype=torch.float64)
    outputs, gradients = [], []
    for layer in peft_patch.pair(64, 96, alpha=3.0, **options).values():
        torch.manual_seed(1)  # of the dropout
        outputs.append(layer.double().train()(x))
        outputs[-1].square().sum().backward()
        gradients.append([p.grad for n, p in layer.named_parameters() if "lokr" in n])
    torch.testing.assert_close(*outputs, atol=1e-10, rtol=1e-10)
    torch.testing.assert_close(*gradients, atol=1e-9, rtol=1e-9)


def test_no_product_is_formed(monkeypatch):
    layers = peft_patch.pair(64, 96, r=100)
    formed = []
    product = torch.kron
    monkeypatch.setattr(
        torch, "kron", lambda a, b: formed.append(a.numel() * b.numel()) or product(a, b)
    )
    layers["patched"](torch.randn(2, 64))
    assert formed == []
    layers["installed"](torch.randn(2, 64))
    assert formed == [64 * 96]


@pytest.mark.parametrize("what", ["forward", "training"])
def test_times_and_peaks_of_both(what):
    found = peft_patch.measure({"width": 256, "tokens": 4, "pass": what, "rounds": 2, "seed": 0})
    assert {len(times) for times in found["curve"].values()} == {2}
    peaks = found["metrics"]
    assert peaks["peak installed"] > 4 * 256**2 > peaks["peak patched"]
    assert peaks["peak patched"] > peaks["peak frozen map alone"] > 0


def test_the_patch_is_made_from_the_newest_version_that_it_is_for():
    """git names the file that a patch starts from by its hash."""
    if peft.__version__ != "0.21.2":
        pytest.skip("made from peft 0.21.2")
    file = pathlib.Path(peft.__file__).parent / "tuners" / "lokr" / "layer.py"
    made = subprocess.run(["git", "hash-object", file], capture_output=True, text=True, check=True)
    index = re.search(r"^index (\w+)\.\.", peft_patch.PATCH.read_text(), re.M)[1]
    assert made.stdout.startswith(index)


def test_another_version_is_refused(monkeypatch):
    monkeypatch.setattr(peft, "__version__", "0.22.0")
    with pytest.raises(LabError, match=r"for peft 0\.21, not 0\.22\.0"):
        peft_patch.patched()
