"""The .ts format of the UCR and UEA archives of time series."""

from __future__ import annotations

import numpy as np

from .files import DataError, Raw

Cases = tuple[np.ndarray, list[str]]  # (case, channel, time) and a label per case


def _label(text: str) -> str:
    """1 and 1.0 are the same label."""
    text = text.strip()
    try:
        return str(int(float(text))) if float(text).is_integer() else text
    except ValueError:
        return text


def _rows(content: bytes) -> list[str]:
    lines = [line.strip() for line in content.decode("utf-8-sig", errors="replace").splitlines()]
    lower = [line.lower() for line in lines]
    if "@data" not in lower:
        raise DataError("the line @data is missing")
    if "@timestamps true" in lower:
        raise DataError("series with time stamps are not read here")
    return [line for line in lines[lower.index("@data") + 1 :] if line and not line.startswith("#")]


def read_ts(content: bytes) -> Cases:
    """After @data one case a row, channels separated by ``:``, the label last; all channels of equal length."""
    rows = _rows(content)
    if not rows:
        raise DataError("it holds no cases")
    colons = {row.count(":") for row in rows}
    if len(colons) > 1:
        raise DataError(f"cases have different numbers of channels: {sorted(colons)}")
    x, labels = [], []
    for number, row in enumerate(rows, 1):
        *channels, label = row.split(":")
        try:
            values = [np.array(channel.split(","), np.float32) for channel in channels]
        except ValueError as error:
            raise DataError(
                f"case {number} holds something that is not a number ({error})"
            ) from error
        lengths = {len(channel) for channel in [*values, *(x[0] if x else [])]}
        if len(lengths) > 1:
            raise DataError(
                f"case {number} has channels of {sorted(lengths)} values: is it cut off?"
            )
        x.append(values)
        labels.append(_label(label))
    cases = np.array(x)
    if np.isnan(cases).any():
        raise DataError("values are missing")
    return cases, labels


def join(train: Cases, test: Cases) -> Raw:
    """Classes are numbered from 0 in the order of their labels: as numbers where all are numbers, else alphabetically."""
    labels = set(train[1]) | set(test[1])
    numbers = all(name.lstrip("-").isdigit() for name in labels)
    names = tuple(sorted(labels, key=(lambda name: (int(name), name)) if numbers else None))
    y = np.array([names.index(name) for name in [*train[1], *test[1]]], np.int64)
    n = len(train[0])
    return Raw(
        np.concatenate([train[0], test[0]]),
        y,
        names,
        {"train": slice(0, n), "test": slice(n, len(y))},
    )
