"""`pip install`: a wheel made from the source distribution, in a folder of its own.

Nothing is fetched: setuptools and pip are those of the environment, and dependencies are left out. That the files run with what they
ask for and without the rest is in test_generated.py.
"""

import email
import os
import pathlib
import shutil
import subprocess
import sys
import tarfile

import pytest

import ndlinear as nd

pytest.importorskip("setuptools", "77", reason="setuptools from 77 on builds the project")
ROOT = pathlib.Path(nd.__file__).parent
MODULES = {"ndlinear", "ndlinear_lora", "ndlinear_lokr", "ndlinear_peft"}


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


def installed(around):
    """The folder into which pip installs the wheel of the unpacked source distribution; the lab is left out."""
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


def test_the_wheel_holds_the_modules_and_the_guide_and_asks_for_torch_alone(tmp_path):
    folder = installed(tmp_path)
    found = {path.name for path in folder.iterdir()} - {"bin"}
    (about,) = (name for name in found if name.endswith(".dist-info"))
    assert found - {about} == MODULES | {"ndlinear_guide"}
    assert all((folder / name / "py.typed").is_file() for name in found - {about})
    for name in MODULES:
        code = (folder / name / "__init__.py").read_bytes()
        assert code == (ROOT / f"{name}.py").read_bytes()
    for path in (ROOT / "ndlinear_guide").glob("*.py"):
        assert (folder / "ndlinear_guide" / path.name).read_bytes() == path.read_bytes()
    metadata = email.message_from_string((folder / about / "METADATA").read_text("utf-8"))
    needs = metadata.get_all("Requires-Dist")
    assert [need for need in needs if "extra ==" not in need] == ["torch>=2.4"]
    guide = {need.split(";")[0] for need in needs if 'extra == "guide"' in need}
    assert {need.split(">=")[0] for need in guide} == {"scipy", "pandas"}
