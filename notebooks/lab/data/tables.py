"""Tables: Cardio Disease (classification) and Food Delivery Time (regression)."""

from __future__ import annotations

import io

import numpy as np
import pandas as pd

from .files import DataError, Raw

CARDIO = (
    *("age", "gender", "height", "weight", "ap_hi", "ap_lo"),
    *("cholesterol", "gluc", "smoke", "alco", "active"),
)
FOOD_CODED = ("Type_of_order", "Type_of_vehicle", "weather_description", "Traffic_Level")
FOOD = (
    *("Delivery_person_Age", "Delivery_person_Ratings"),
    *("Restaurant_latitude", "Restaurant_longitude"),
    *("Delivery_location_latitude", "Delivery_location_longitude"),
    *("Type_of_order", "Type_of_vehicle"),
    *("temperature", "humidity", "precipitation", "weather_description"),
    *("Traffic_Level", "Distance (km)"),
)


def _columns(frame: pd.DataFrame, wanted: tuple[str, ...]) -> None:
    missing = [name for name in wanted if name not in frame.columns]
    if missing:
        raise DataError(
            f"the columns {', '.join(missing)} are missing; it has {', '.join(map(str, frame.columns))}"
        )


def read_cardio(content: bytes) -> Raw:
    """``;`` between columns; ``id`` is dropped, ``cardio`` is the class; nothing is cleaned."""
    frame = pd.read_csv(io.BytesIO(content), sep=";")
    _columns(frame, (*CARDIO, "cardio"))
    if frame.isna().any(axis=None):
        raise DataError("values are missing; there are none in the publisher's file")
    y = frame["cardio"].to_numpy(np.int64)
    return Raw(np.ascontiguousarray(frame[[*CARDIO]].to_numpy(np.float32)), y, CARDIO)


def read_food(content: bytes) -> Raw:
    """Rows with a missing value are dropped; the four text columns become numbers from 0 in alphabetical order."""
    # "#VALUE!" is an error of the spreadsheet that it came from
    frame = pd.read_csv(io.BytesIO(content), na_values=["#VALUE!"])
    _columns(frame, (*FOOD, "TARGET"))
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
