"""`pip install`: a wheel made from the source distribution, in a folder of its own, read by a Python that sees torch beside it only.

Nothing is fetched: setuptools and pip are those of the environment, and dependencies are left out.
"""

import email
import os
import pathlib
import shutil
import subprocess
import sys
import sysconfig
import tarfile

import pytest
import torch
from torch import nn

import ndlinear as nd
from ndlinear_guide import convert

pytest.importorskip("setuptools", "77", reason="setuptools from 77 on builds the project")
ROOT = pathlib.Path(nd.__file__).parent
MODULES = {"ndlinear", "ndlinear_lora", "ndlinear_lokr", "ndlinear_peft"}
LIBRARIES = sysconfig.get_path("purelib")


def run(folder, *command):
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "COV"))}
    how = {"cwd": folder, "env": environment, "capture_output": True, "text": True}
    done = subprocess.run(list(map(str, command)), timeout=300, **how)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def made(source: pathlib.Path, kind: str, target: pathlib.Path) -> pathlib.Path:
    """What setuptools builds of a source tree: "sdist" or "wheel"."""
    target.mkdir(exist_ok=True)
    code = f"from setuptools import build_meta; build_meta.build_{kind}({str(target)!r})"
    run(source, sys.executable, "-c", code)
    (found,) = target.iterdir()
    return found


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """The folder into which pip installed the wheel of the unpacked source distribution; the lab is left out."""
    around = tmp_path_factory.mktemp("package")
    checkout = around / "ndlinear-book"  # does not count in the coverage
    checkout.mkdir()
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE", *ROOT.glob("ndlinear*.py")):
        shutil.copy(ROOT / name, checkout)
    for name in ("ndlinear_guide", "notebooks/lab"):
        left_out = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, checkout / name, ignore=left_out)
    with tarfile.open(made(checkout, "sdist", around / "sdist")) as packed:
        packed.extractall(around / "unpacked", filter="data")
    (source,) = (around / "unpacked").iterdir()
    folders = {path.name for path in source.iterdir() if path.is_dir()}
    assert folders == {"ndlinear_guide", "ndlinear_book.egg-info"}
    wheel = made(source, "wheel", around / "wheel")
    offline = ["--no-deps", "--no-index", "--quiet", "--target", around / "site"]
    run(around, sys.executable, "-m", "pip", "install", *offline, wheel)
    return around / "site"


def test_the_wheel_holds_the_modules_and_the_guide_and_asks_for_torch_alone(installed):
    found = {path.name for path in installed.iterdir()} - {"bin"}
    (about,) = (name for name in found if name.endswith(".dist-info"))
    assert found - {about} == MODULES | {"ndlinear_guide"}
    assert all((installed / name / "py.typed").is_file() for name in found - {about})
    for name in MODULES:
        code = (installed / name / "__init__.py").read_bytes()
        assert code == (ROOT / f"{name}.py").read_bytes()
    metadata = email.message_from_string((installed / about / "METADATA").read_text("utf-8"))
    needs = metadata.get_all("Requires-Dist")
    assert [need for need in needs if "extra ==" not in need] == ["torch>=2.4"]
    guide = {need.split(";")[0] for need in needs if 'extra == "guide"' in need}
    assert {need.split(">=")[0] for need in guide} == {"scipy", "pandas"}


def test_installed_modules_run_with_torch_alone_and_the_guide_with_scipy_and_pandas(installed):
    """Without the site module no other install is seen, libraries that may be absent are; warnings are errors."""
    torch.manual_seed(0)
    dense = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 3))
    converted, _ = convert(dense, {"0": ((8, 8), (8, 8))}, share=0.5)
    x = torch.randn(2, 64)
    torch.save((converted, x, converted(x).detach()), installed.parent / "converted.pt")
    code = f"""
import sys
sys.path[:0] = [{str(installed)!r}, {LIBRARIES!r}]
absent = dict.fromkeys(["scipy", "pandas", "safetensors", "peft", "matplotlib", "tqdm"])
absent |= dict.fromkeys(["filelock", "yaml"])
sys.modules.update(absent)
import torch
from torch import nn
import ndlinear, ndlinear_lokr
from ndlinear_lora import apply_ndlinear_lora
print(ndlinear.__file__.startswith({str(installed)!r}))
model, x, y = torch.load({str(installed.parent / "converted.pt")!r}, weights_only=False)
torch.testing.assert_close(model(x), y)
layer = model[0][1]
print(layer, "ndlinear_guide" in sys.modules)
model = apply_ndlinear_lora(nn.Sequential(ndlinear.to_linear(layer)), "0", alpha=2.0)
print(*model(x).shape)
for name in ("scipy", "pandas"):
    del sys.modules[name]
import ndlinear_guide
print(ndlinear_guide.report(nn.Linear(6, 4), torch.randn(2, 6))["folding"][0])
try:
    import lab
except ModuleNotFoundError:
    print("no lab")
"""
    said = run(installed, sys.executable, "-S", "-W", "error", "-c", code).splitlines()
    assert said[1].startswith("NdLinearSum((8, 8), (8, 8)") and said[1].endswith(" False")
    assert [said[0], *said[2:]] == ["True", "2 64", "((2, 3), (2, 2))", "no lab"]
