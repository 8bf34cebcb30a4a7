"""The released package, under a name of its own, beside the book's layer."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import pathlib
import subprocess
import sys
import tempfile

import ndlinear

from . import data
from .modes import LabError

VERSION = "1.0.0"  # of the released package on PyPI


def release_folder() -> pathlib.Path:
    """Where the released package lies: NDL_RELEASED, or a folder beside the data sets."""
    named = os.environ.get("NDL_RELEASED", "").strip()
    return pathlib.Path(named).expanduser() if named else data.folder() / f"ndlinear-{VERSION}"


def install_release() -> None:
    """Put the released package, and nothing else, into `release_folder()`; raises LabError where that fails."""
    folder = release_folder()
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as fresh:
        pip = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check"]
        what = ["--no-deps", "--target", f"{fresh}/package", f"ndlinear=={VERSION}"]
        done = subprocess.run([*pip, *what], capture_output=True, text=True)
        if done.returncode:
            raise LabError(
                f"the released package ndlinear {VERSION} could not be installed into {folder}: "
                f"{done.stderr.strip()[-500:]}. Set NDL_RELEASED to a folder that holds it."
            )
        with contextlib.suppress(OSError):  # another process was faster
            pathlib.Path(fresh, "package").rename(folder)


def released(install: bool = False):
    """The module of the released package, under a name of its own; None where it is not installed (`install`: fetch it)."""
    if "released_ndlinear" in sys.modules:
        return sys.modules["released_ndlinear"]
    place = release_folder() / "ndlinear" / "__init__.py"
    if not place.is_file():
        if not install:
            return None
        install_release()
    spec = importlib.util.spec_from_file_location(
        "released_ndlinear", place, submodule_search_locations=[str(place.parent)]
    )
    module = sys.modules["released_ndlinear"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def layer_class(name: str) -> type:
    """The class NdLinear of "ours" or "released"; LabError where the latter is not installed."""
    module = ndlinear if name == "ours" else released()
    if module is None:
        raise LabError(
            f"no released package in {release_folder()}: a full run fetches it, or set NDL_RELEASED"
        )
    return module.NdLinear
