"""The text formats of the UCR and UEA archives of time series: .ts, .arff and .tsv; readers, and writers for small samples."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .files import DataError, Raw

Cases = tuple[np.ndarray, list[str]]  # (case, channel, time) and a label per case


def _numbers(rows: list[str], channels: int, separator: str = ",", label: int = -1) -> Cases:
    """Cases from rows of equal length: values, and a label at the end or (0) at the start."""
    x, labels = [], []
    for number, row in enumerate(rows, 1):
        fields = row.split(separator)
        labels.append(_label(fields.pop(label)))
        if len(fields) % channels or (x and len(fields) != len(x[0])):
            raise DataError(
                f"case {number} has {len(fields)} values in {channels} channels, the first {len(x[0] if x else fields)}; is it cut off?"
            )
        try:
            x.append(np.array(fields, np.float32))
        except ValueError as error:
            raise DataError(
                f"case {number} holds something that is not a number ({error})"
            ) from error
    if not rows or np.isnan(values := np.stack(x)).any():
        raise DataError("values are missing" if rows else "it holds no cases")
    return values.reshape(len(values), channels, -1), labels


def _label(text: str) -> str:
    """1, 1.0, '1' and '1.0' are the same label."""
    text = text.strip().strip("'\"")
    try:
        return str(int(float(text))) if float(text).is_integer() else text
    except ValueError:
        return text


def _body(content: bytes, comment: str) -> list[str]:
    lines = [line.strip() for line in content.decode("utf-8-sig", errors="replace").splitlines()]
    lower = [line.lower() for line in lines]
    if "@data" not in lower:
        raise DataError("the line @data is missing")
    if "@timestamps true" in lower:
        raise DataError("series with time stamps are not read here")
    return [
        line for line in lines[lower.index("@data") + 1 :] if line and not line.startswith(comment)
    ]


def read_ts(content: bytes) -> Cases:
    """The archive's .ts format: after @data one case a row, channels separated by ``:``, the label last."""
    rows = _body(content, "#")
    colons = {row.count(":") for row in rows}
    if len(colons) > 1:
        raise DataError(f"cases have different numbers of channels: {sorted(colons)}")
    return _numbers([row.replace(":", ",") for row in rows], max(colons, default=1))


def read_arff(content: bytes) -> Cases:
    r"""Weka's .arff format: one case a row; several channels stand quoted, separated by a written-out ``\n``; the label last."""
    rows = _body(content, "%")
    breaks = {row.count("\\n") for row in rows}
    if len(breaks) > 1:
        raise DataError(
            f"cases have different numbers of channels: {sorted(b + 1 for b in breaks)}"
        )
    rows = [row.replace("\\n", ",").replace('"', "").replace("'", "") for row in rows]
    return _numbers(rows, 1 + max(breaks, default=0))


def read_tsv(content: bytes) -> Cases:
    """The UCR format: one case of one channel a row, tabs between, the label first."""
    return _numbers(
        [row for row in content.decode("utf-8-sig", errors="replace").splitlines() if row.strip()],
        1,
        "\t",
        label=0,
    )


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


FORMATS: dict[str, Callable[[bytes], Cases]] = {
    ".ts": read_ts,
    ".arff": read_arff,
    ".tsv": read_tsv,
}


def write_ts(cases: Cases, name: str = "Sample") -> bytes:
    x, labels = cases
    head = f"#{name}\n@problemName {name}\n@timeStamps false\n@univariate {x.shape[1] == 1}\n@equalLength true\n"
    head += f"@seriesLength {x.shape[2]}\n@classLabel true {' '.join(sorted(set(labels)))}\n@data\n"
    rows = [
        ":".join(",".join(map(str, channel)) for channel in case) + f":{label}"
        for case, label in zip(x, labels)
    ]
    return (head + "\n".join(rows) + "\n").encode()


def write_arff(cases: Cases, name: str = "Sample") -> bytes:
    x, labels = cases
    points = "".join(f"@attribute att{i} numeric\n" for i in range(x.shape[2]))
    head = f"% {name}\n@relation {name}\n"
    head += points if x.shape[1] == 1 else f"@attribute series relational\n{points}@end series\n"
    head += f"@attribute target {{{','.join(sorted(set(labels)))}}}\n\n@data\n"
    rows = ["\\n".join(",".join(map(str, channel)) for channel in case) for case in x]
    rows = [
        f"{row},{label}" if x.shape[1] == 1 else f"'{row}',{label}"
        for row, label in zip(rows, labels)
    ]
    return (head + "\n".join(rows) + "\n").encode()


def write_tsv(cases: Cases) -> bytes:
    rows = ["\t".join([label, *map(str, case[0])]) for case, label in zip(*cases)]
    return ("\n".join(rows) + "\n").encode()
