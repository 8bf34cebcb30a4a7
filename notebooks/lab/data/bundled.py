"""Data sets that ship with scikit-learn and with aeon."""

from __future__ import annotations

import pathlib

import numpy as np

from ..machine import require
from .files import Raw
from .series import join, read_ts


def sklearn(name: str) -> Raw:
    """A set of scikit-learn: features or pictures, and classes or real targets."""
    bunch = getattr(require("sklearn.datasets"), f"load_{name}")()
    x = np.asarray(bunch.images if "images" in bunch else bunch.data, np.float32)
    names = bunch.get("target_names", bunch.get("feature_names"))
    return Raw(x, np.asarray(bunch.target), tuple(map(str, names)))


def aeon(name: str) -> Raw:
    """A set of the UCR and UEA archives that aeon carries; "_eq" at the end of a name: stretched to equal length."""
    data = pathlib.Path(require("aeon.datasets").__file__).parent / "data"
    folder = data / name.removesuffix("_eq")
    return join(*[read_ts(folder / f"{name}_{part}.ts") for part in ("TRAIN", "TEST")])
