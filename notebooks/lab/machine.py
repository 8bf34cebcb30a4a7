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

import numpy
import torch

import ndlinear

from .modes import ROOT, LabError


def machine(device: str = "cpu") -> str:
    """The device as a row's key: GPU name, or processor model and threads in use."""
    return torch.cuda.get_device_name() if torch.device(device).type == "cuda" else processor()


def device() -> str:
    """The device of a run as a reader should know it: the GPU where there is one, else the processor."""
    return machine("cuda" if torch.cuda.is_available() else "cpu")


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
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10, "process"


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


def require(module: str, package: str | None = None):
    """Import an optional library; on Colab install it first, without touching the torch and numpy that are there.

    Raises:
        LabError: the library is missing; the message names the command that installs it.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module.partition(".")[0]:
            raise
    package = package or module
    if "COLAB_RELEASE_TAG" in os.environ:
        pins = [f"torch=={torch.__version__.partition('+')[0]}", f"numpy=={numpy.__version__}"]
        subprocess.run([sys.executable, "-m", "pip", "install", "-q", package, *pins], check=True)
        return importlib.import_module(module)
    raise LabError(f"this cell uses {package}: pip install {package} -c {ROOT / 'constraints.txt'}")
