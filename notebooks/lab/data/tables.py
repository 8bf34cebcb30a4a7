"""Tables: Cardio Disease, Food Delivery Time, electricity transformer temperature (ETT, rows are hours), and those of scikit-learn."""

from __future__ import annotations

import io

import numpy as np
import pandas as pd

from ..machine import require
from .files import Raw

CARDIO = (
    *("age", "gender", "height", "weight", "ap_hi", "ap_lo"),
    *("cholesterol", "gluc", "smoke", "alco", "active"),
)
ETT = ("HUFL", "HULL", "MUFL", "MULL", "LUFL", "LULL", "OT")
FOOD_CODED = ("Type_of_order", "Type_of_vehicle", "weather_description", "Traffic_Level")
FOOD = (
    *("Delivery_person_Age", "Delivery_person_Ratings"),
    *("Restaurant_latitude", "Restaurant_longitude"),
    *("Delivery_location_latitude", "Delivery_location_longitude"),
    *("Type_of_order", "Type_of_vehicle"),
    *("temperature", "humidity", "precipitation", "weather_description"),
    *("Traffic_Level", "Distance (km)"),
)


def read_cardio(content: bytes) -> Raw:
    """``;`` between columns; ``id`` is dropped, ``cardio`` is the class; nothing is cleaned."""
    frame = pd.read_csv(io.BytesIO(content), sep=";")
    y = frame["cardio"].to_numpy(np.int64)
    return Raw(np.ascontiguousarray(frame[[*CARDIO]].to_numpy(np.float32)), y, CARDIO)


def read_food(content: bytes) -> Raw:
    """Rows with a missing value are dropped; the four text columns become numbers from 0 in alphabetical order."""
    # "#VALUE!" is an error of the spreadsheet that it came from
    frame = pd.read_csv(io.BytesIO(content), na_values=["#VALUE!"])
    frame = frame[[*FOOD, "TARGET"]].dropna().copy()
    for column in FOOD_CODED:
        if not pd.api.types.is_numeric_dtype(frame[column]):
            frame[column] = frame[column].str.strip().astype("category").cat.codes
    y = frame.pop("TARGET").round(5)  # copies of the file differ after the sixth decimal
    x = frame.astype(float).round(6).to_numpy(np.float32)
    return Raw(np.ascontiguousarray(x), y.to_numpy(np.float32), FOOD)


def cardio_stand_in() -> Raw:
    rng, n = np.random.default_rng(0), 200
    frame = pd.DataFrame({name: rng.integers(1, 4, n) for name in CARDIO})
    frame["age"], frame["weight"] = rng.integers(14_000, 23_000, n), rng.normal(74, 14, n).round(1)
    frame["cardio"] = (frame["age"] + 4000 * rng.standard_normal(n) > 18_500).astype(int)
    frame.insert(0, "id", np.arange(n))
    return read_cardio(frame.to_csv(index=False, sep=";").encode())


def food_stand_in() -> Raw:
    """Like the publisher's file: identifiers, a column without a name, text with blanks at its end, missing values."""
    rng, n = np.random.default_rng(0), 200
    frame = pd.DataFrame({name: rng.uniform(10, 40, n).round(3) for name in FOOD})
    for name in FOOD_CODED:
        frame[name] = rng.choice(["High ", "Low ", "Very Low "], n)
    frame["TARGET"] = (2 * frame["Distance (km)"] + rng.normal(0, 2, n)).round(8)
    frame.loc[:9, "Distance (km)"], frame.loc[10:14, "TARGET"] = np.nan, np.nan
    frame["TARGET"] = frame["TARGET"].astype(object).where(frame.index != 15, "#VALUE!")
    frame.insert(0, "ID", [f"{i:04X}" for i in range(n)])
    frame.insert(14, "", np.nan)
    return read_food(frame.to_csv(index=False, na_rep="N/A").encode())


def read_ett(content: bytes) -> Raw:
    """(time, 7) from a file of the publisher."""
    frame = pd.read_csv(io.BytesIO(content))
    return Raw(frame[[*ETT]].to_numpy(np.float32), None, ETT)


def ett_stand_in() -> Raw:
    hours, rng = np.arange(600)[:, None], np.random.default_rng(0)
    waves = np.sin(2 * np.pi * hours / 24 + np.arange(7)) + 0.1 * rng.standard_normal((600, 7))
    return read_ett(pd.DataFrame(waves, columns=list(ETT)).round(4).to_csv().encode())


def sklearn(name: str) -> Raw:
    """A set of scikit-learn: features or pictures, and classes or real targets."""
    bunch = getattr(require("sklearn.datasets"), f"load_{name}")()
    x = np.asarray(bunch.images if "images" in bunch else bunch.data, np.float32)
    names = bunch.get("target_names", bunch.get("feature_names"))
    return Raw(x, np.asarray(bunch.target), tuple(map(str, names)))
