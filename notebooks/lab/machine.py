"""What a run took place on: device, versions, memory, the layer file, optional libraries."""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import importlib.util
import os
import pathlib
import platform
import subprocess
import sys
from collections.abc import Iterable

import numpy
import torch

import ndlinear

from .modes import LabError


def progress(items, label: str, shown: bool = True, total: int | None = None):
    """The items, with a progress bar where tqdm is installed, if there are more than one; ``total`` of an iterator."""
    installed = importlib.util.find_spec("tqdm") is not None
    bar = importlib.import_module("tqdm.auto").tqdm if installed and shown else None
    total = len(items) if total is None else total
    return bar(items, desc=label, total=total) if bar and total > 1 else items


def machine(device: str = "cpu") -> str:
    """The device as a row's key: GPU name, or processor model and threads in use."""
    return torch.cuda.get_device_name() if torch.device(device).type == "cuda" else processor()


def device() -> str:
    """The device of a run as a reader should know it: the GPU where there is one, else the processor."""
    return machine("cuda" if torch.cuda.is_available() else "cpu")


def accelerator() -> str:
    """Where experiments that measure a GPU run: "cuda" where there is one, "" where there is none; NDL_DEVICE names another place."""
    return os.environ.get("NDL_DEVICE", "").strip() or ("cuda" if torch.cuda.is_available() else "")


def processor() -> str:
    """Processor model and the threads in use."""
    model = platform.processor() or platform.machine()
    with contextlib.suppress(OSError, StopIteration):
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
        model = next(
            line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")
        )
    return f"{model}, {torch.get_num_threads()} threads"


def peak_memory_mb() -> tuple[float, str]:
    """Peak memory so far in MiB, and what it is the peak of."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**20, "cuda allocator"
    try:
        import resource
    except ModuleNotFoundError:  # Windows
        return 0.0, "not measured"
    unit = 2**20 if sys.platform == "darwin" else 2**10  # bytes there, KiB elsewhere
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit, "process"


def versions() -> dict[str, str]:
    """Versions of what computes: Python, torch, numpy and the layer."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "ndlinear": getattr(ndlinear, "__version__", "?"),
    }


def module_digest() -> str:
    """First eight digits of the sha256 of ndlinear.py: goes into a row, so that it says which file it timed."""
    return hashlib.sha256(pathlib.Path(ndlinear.__file__).read_bytes()).hexdigest()[:8]


def module_version() -> str:
    """Version and first eight digits of the sha256 of the ndlinear.py in use."""
    return f"{getattr(ndlinear, '__version__', '?')} ({module_digest()})"


# What pip installs for an optional library where that is not the library's own name alone: tensorly-torch does not ask for
# tensorly, and a chapter that writes ONNX files also runs them.
PACKAGES = {
    "distributed": ("dask[distributed]",),
    "numba": ("aeon",),
    "onnxscript": ("onnx", "onnxscript", "onnxruntime"),
    "sklearn": ("scikit-learn",),
    "tltorch": ("tensorly", "tensorly-torch"),
}


def require(*modules: str):
    """Import optional libraries; on Colab install what is missing, beside the torch and numpy that are there.

    Args:
        modules: names as in an import statement; name all that a chapter needs together, so that one line installs them.
    Returns:
        The module, or a tuple of several.
    Raises:
        LabError: a library is missing; the message names the line that installs it.
    """
    missing = _missing(modules)
    if missing and "COLAB_RELEASE_TAG" in os.environ:
        subprocess.run([sys.executable, "-m", *install_line(missing).split()], check=False)
        importlib.invalidate_caches()
        missing = _missing(modules)
    if missing:
        problems = "; ".join(str(error) for error in missing.values())
        raise LabError(f"{problems}. Install it and run this cell again: {install_line(missing)}")
    found = [importlib.import_module(module) for module in modules]
    return found[0] if len(found) == 1 else tuple(found)


def _missing(modules: tuple[str, ...]) -> dict[str, ModuleNotFoundError]:
    """The modules that cannot be imported because something is not installed, each with the error that says what."""
    missing = {}
    for module in modules:
        try:
            importlib.import_module(module)
        except ModuleNotFoundError as error:
            missing[module] = error
    return missing


def install_line(modules: Iterable[str]) -> str:
    """The pip command for optional libraries. It names the torch and numpy in use, so that pip leaves them or refuses."""
    packages = []
    for module in modules:
        library = module.partition(".")[0]
        packages += PACKAGES.get(library, (library,))
    pins = [f"torch=={torch.__version__.partition('+')[0]}", f"numpy=={numpy.__version__}"]
    return " ".join(["pip", "install", *dict.fromkeys(packages), *pins])
