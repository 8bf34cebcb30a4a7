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
import venv
import zipfile

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
    """What setuptools builds of a source tree: "sdist", "wheel" or "editable"."""
    target.mkdir(exist_ok=True)
    code = f"from setuptools import build_meta; build_meta.build_{kind}({str(target)!r})"
    run(source, sys.executable, "-c", code)
    (found,) = target.iterdir()
    return found


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """What the build reads, and a room of the lab that it must leave out."""
    folder = tmp_path_factory.mktemp("package") / "ndlinear-book"  # does not count in the coverage
    folder.mkdir()
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE", *ROOT.glob("ndlinear*.py")):
        shutil.copy(ROOT / name, folder)
    for name in ("ndlinear_guide", "notebooks/lab"):
        left_out = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, folder / name, ignore=left_out)
    return folder


@pytest.fixture(scope="module")
def installed(checkout):
    """The folder into which pip installed the wheel of the unpacked source distribution."""
    around = checkout.parent
    with tarfile.open(made(checkout, "sdist", around / "sdist")) as packed:
        packed.extractall(around / "unpacked", filter="data")
    (source,) = (around / "unpacked").iterdir()
    assert {path.name for path in source.iterdir() if path.is_dir()} == {
        "ndlinear_guide",
        "ndlinear_book.egg-info",
    }
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


PROJECT = """
from ndlinear import count_parameters
from ndlinear_guide.layers import divisors, spread
from ndlinear_lora import load_lora

reveal_type(count_parameters((4, 6), (3, 5)))
reveal_type(spread(24, 3))
load_lora(1, 2, 3, 4, 5)
divisors("wide")
"""
RULES = "[mypy]\nstrict = True\n[mypy-torch.*,numpy.*,scipy.*,pandas.*]\nignore_missing_imports = True\n"


def test_installed_modules_have_types(installed, tmp_path):
    """For someone's code in an environment of its own, where a library without types is an error; torch is left out, it takes a minute."""
    pytest.importorskip("mypy")
    venv.create(tmp_path / "own", symlinks=os.name != "nt")
    (packages,) = (tmp_path / "own").glob("[Ll]ib/**/site-packages")
    (packages / "installed.pth").write_text(f"{installed}\n")
    (tmp_path / "code.py").write_text(PROJECT)
    (tmp_path / "mypy.ini").write_text(RULES)
    python = next((tmp_path / "own").glob("[bS]*/python*"))
    check = [sys.executable, "-m", "mypy", "--python-executable", python, "code.py"]
    with pytest.raises(AssertionError) as said:
        run(tmp_path, *check)
    for words in (
        '6: note: Revealed type is "int"',
        '7: note: Revealed type is "tuple[int, ...]"',
        '8: error: Too many arguments for "load_lora"',
        '9: error: Argument 1 to "divisors" has incompatible type "str"; expected "int"',
    ):
        assert f"code.py:{words}" in str(said.value)


def test_an_editable_install_maps_the_lab_as_well(checkout):
    """In a checkout notebooks, make and the builder of the book say `import lab`."""
    wheel = made(checkout, "editable", checkout.parent / "editable")
    with zipfile.ZipFile(wheel) as packed:
        (finder,) = (name for name in packed.namelist() if name.endswith("_finder.py"))
        text = packed.read(finder).decode()
    for name in MODULES:
        assert f"{name!r}: {str(checkout / name)!r}" in text
    assert f"'lab': {str(checkout / 'notebooks' / 'lab')!r}" in text
