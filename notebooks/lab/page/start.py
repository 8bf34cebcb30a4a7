"""How every notebook begins."""

from __future__ import annotations

import gc
import os

import torch

from ..machine import module_version
from ..modes import NOTEBOOKS, mode
from ..train.loop import seed_everything
from .figures import style


def start(asked: str = "") -> None:
    """Go to the folder of the notebooks, set the mode if one is asked for, seeds and figure style, and print the line that a bug
    report should quote."""
    os.chdir(NOTEBOOKS)
    if asked:
        os.environ["NDL_MODE"] = asked
    seed_everything(0)
    style()
    gc.freeze()  # what was imported stays: a collection of garbage that walks through it takes 0.2 s
    device = f"cuda ({torch.cuda.get_device_name()})" if torch.cuda.is_available() else "cpu"
    print(f"{mode()} · {device} · torch {torch.__version__} · ndlinear.py {module_version()}")
