"""Data sets that ship with scikit-learn and with aeon."""

from __future__ import annotations

import pathlib

import numpy as np

from ..machine import require
from .files import Layout, Raw, Source
from .series import join, read_ts


def _sklearn(name: str, about: str, licence: str) -> Source:
    def read() -> Raw:
        bunch = getattr(require("sklearn.datasets"), f"load_{name.replace('-', '_')}")()
        x = np.asarray(bunch.images if "images" in bunch else bunch.data, np.float32)
        names = bunch.get("target_names", bunch.get("feature_names"))
        return Raw(x, np.asarray(bunch.target), tuple(map(str, names)))

    layout = Layout((), read, note="As it ships with scikit-learn.")
    return Source(name, about, "scikit-learn", licence, (layout,))


def _aeon(name: str, form: str, about: str, shape: tuple[int, int], cases: dict) -> Source:
    """A set of the UCR and UEA archives that aeon carries."""

    def read() -> Raw:
        folder = pathlib.Path(require("aeon.datasets").__file__).parent / "data" / name
        return join(*[read_ts(folder / f"{name}{form}_{part}.ts") for part in ("TRAIN", "TEST")])

    expect = {part: ((count, *shape), None) for part, count in cases.items()}
    layout = Layout((), read, expect, note="As it ships with aeon.")
    origin = f"aeon; https://www.timeseriesclassification.com/description.php?Dataset={name}"
    return Source(name.lower(), about, origin, "not stated", (layout,))


SOURCES = (
    _sklearn(
        "digits", "1,797 handwritten digits, 8×8 grey values 0 to 16, 10 classes", "CC BY 4.0"
    ),
    _sklearn("breast-cancer", "569 cases, 30 features, 2 classes", "CC BY 4.0"),
    _sklearn("diabetes", "442 patients, 10 features, disease progression", "not stated"),
    _aeon(
        "JapaneseVowels",
        "_eq",
        "UEA: two vowels of nine speakers, 12 coefficients, stretched to 25 points, 9 classes",
        (12, 25),
        {"train": 270, "test": 370},
    ),
    _aeon(
        "OSULeaf",
        "",
        "UCR: outlines of leaves, 1 channel, 427 points, 6 classes",
        (1, 427),
        {"train": 200, "test": 242},
    ),
)
