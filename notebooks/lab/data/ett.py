"""Electricity transformer temperature: time series to forecast."""

from __future__ import annotations

import io

import numpy as np
import pandas as pd

from .files import DataError, Layout, Raw, Source, known

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


def _source(name: str, about: str, rows: int, content: str) -> Source:
    address = f"https://raw.githubusercontent.com/zhouhaoyi/ETDataset/main/ETT-small/{name}.csv"
    file, expect = known(f"ett/{name}.csv", address), {"whole": ((rows, 7), None)}
    about = f"Electricity transformer temperature, {name}, {about}: 6 loads and the oil temperature"
    layout = Layout((file,), read, expect, "The publisher's file, byte for byte.", content)
    origin = "https://github.com/zhouhaoyi/ETDataset"
    return Source(name.lower(), about, origin, "CC BY-ND 4.0", (layout,), stand_in)


SOURCES = (
    _source("ETTh1", "hourly", 17_420, "8fec12c3e12d3842"),
    _source("ETTh2", "hourly", 17_420, "0c3b296810a8a7f6"),
    _source("ETTm1", "15 minutes", 69_680, "f967e71ba1c94762"),
    _source("ETTm2", "15 minutes", 69_680, "9353c9658fa58736"),
)
