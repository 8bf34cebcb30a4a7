"""Data sets that ship with scikit-learn and with aeon."""

from __future__ import annotations

import importlib.util
import pathlib

import numpy as np

from .files import DataError, Layout, Raw, Source
from .formats import join, read_ts


def _sklearn(loader: str) -> Layout:
    def read() -> Raw:
        try:
            from sklearn import datasets
        except ModuleNotFoundError as error:
            raise DataError(
                f"{loader} ships with scikit-learn: pip install scikit-learn"
            ) from error
        bunch = getattr(datasets, loader)()
        x = np.asarray(bunch.images if "images" in bunch else bunch.data, np.float32)
        names = bunch.get("target_names", bunch.get("feature_names"))
        return Raw(x, np.asarray(bunch.target), tuple(map(str, names)))

    return Layout((), read, note="As it ships with scikit-learn.")


def _aeon(name: str, form: str, expect: dict) -> Layout:
    """A set of the UCR and UEA archives that aeon carries; aeon itself is not imported."""

    def read() -> Raw:
        found = importlib.util.find_spec("aeon")
        if found is None:
            raise DataError(f"{name} ships with aeon: pip install aeon")
        folder = pathlib.Path(found.submodule_search_locations[0]) / "datasets" / "data" / name
        parts = [(folder / f"{name}{form}_{part}.ts").read_bytes() for part in ("TRAIN", "TEST")]
        return join(*map(read_ts, parts))

    return Layout((), read, expect=expect, note="As it ships with aeon.")


SOURCES = (
    Source(
        "digits",
        "1,797 handwritten digits, 8×8 grey values 0 to 16, 10 classes",
        "scikit-learn (UCI 80)",
        "CC BY 4.0",
        (_sklearn("load_digits"),),
    ),
    Source(
        "breast-cancer",
        "569 cases, 30 features, 2 classes",
        "scikit-learn (UCI 17)",
        "CC BY 4.0",
        (_sklearn("load_breast_cancer"),),
    ),
    Source(
        "diabetes",
        "442 patients, 10 features, disease progression",
        "scikit-learn",
        "not stated",
        (_sklearn("load_diabetes"),),
    ),
    Source(
        "japanesevowels",
        "UEA: two vowels of nine speakers, 12 coefficients, stretched to 25 points, 9 classes",
        "aeon; https://www.timeseriesclassification.com/description.php?Dataset=JapaneseVowels",
        "not stated",
        (
            _aeon(
                "JapaneseVowels",
                "_eq",
                {"train": ((270, 12, 25), None), "test": ((370, 12, 25), None)},
            ),
        ),
    ),
    Source(
        "osuleaf",
        "UCR: outlines of leaves, 1 channel, 427 points, 6 classes",
        "aeon; https://www.timeseriesclassification.com/description.php?Dataset=OSULeaf",
        "not stated",
        (_aeon("OSULeaf", "", {"train": ((200, 1, 427), None), "test": ((242, 1, 427), None)}),),
    ),
)
