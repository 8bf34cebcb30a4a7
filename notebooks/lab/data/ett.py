"""Electricity transformer temperature: time series to forecast."""

from __future__ import annotations

import io

import numpy as np
import pandas as pd

from .files import DataError, Raw

COLUMNS = ("HUFL", "HULL", "MUFL", "MULL", "LUFL", "LULL", "OT")


def read(content: bytes) -> Raw:
    """(time, 7) from a file of the publisher."""
    frame = pd.read_csv(io.BytesIO(content))
    if tuple(frame.columns) != ("date", *COLUMNS):
        raise DataError(
            f"expected the columns date, {', '.join(COLUMNS)}, found {', '.join(frame.columns)}"
        )
    return Raw(frame[[*COLUMNS]].to_numpy(np.float32), None, COLUMNS)


def stand_in() -> Raw:
    hours, rng = np.arange(600)[:, None], np.random.default_rng(0)
    waves = np.sin(2 * np.pi * hours / 24 + np.arange(7)) + 0.1 * rng.standard_normal((600, 7))
    frame = pd.DataFrame(waves, columns=list(COLUMNS)).round(4)
    frame.insert(0, "date", pd.date_range("2016-07-01", periods=600, freq="h"))
    return read(frame.to_csv(index=False).encode())
