"""Data sets that ship with scikit-learn."""

from __future__ import annotations

import numpy as np

from .files import DataError, Layout, Raw, Source


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
)
