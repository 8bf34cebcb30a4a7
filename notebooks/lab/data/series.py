"""Time series to classify: sets of the UCR and UEA archives, as the archives or aeon have them, or as an npz copy."""

from __future__ import annotations

import io
import pathlib
import tempfile
import zipfile

import numpy as np

from ..machine import require
from .files import DataError, Raw

Cases = tuple[np.ndarray, list[str]]  # (case, channel, time) and a label per case


def read_ts(path: pathlib.Path) -> Cases:
    """The cases of a .ts file, by aeon's reader; all channels of equal length, none of their values missing."""
    x, labels = require("aeon.datasets").load_from_ts_file(str(path))
    if len({series.shape for series in x}) > 1:
        raise DataError(f"{path.name} has series of different lengths")
    if np.isnan(x).any():
        raise DataError(f"values are missing in {path.name}")
    return x.astype(np.float32), list(map(str, labels))


def join(train: Cases, test: Cases) -> Raw:
    """Classes are numbered from 0 in the order of their labels: as numbers where all are numbers, else alphabetically."""
    labels = set(train[1]) | set(test[1])
    numbers = all(name.lstrip("-").isdigit() for name in labels)
    names = tuple(sorted(labels, key=(lambda name: (int(name), name)) if numbers else None))
    parts = {"train": train, "test": test}
    classes = {part: (x, [names.index(label) for label in own]) for part, (x, own) in parts.items()}
    return Raw.of_parts(classes, names)


def read_zip(content: bytes, name: str) -> Raw:
    """The archive's zip of the set of this name."""
    parts = [f"{name}_TRAIN.ts", f"{name}_TEST.ts"]
    with zipfile.ZipFile(io.BytesIO(content)) as archive, tempfile.TemporaryDirectory() as at:
        held = {member.rpartition("/")[2]: member for member in archive.namelist()}
        if missing := set(parts) - held.keys():
            raise DataError(f"the archive lacks {', '.join(sorted(missing))}; it holds {[*held]}")
        return join(*(read_ts(pathlib.Path(archive.extract(held[part], at))) for part in parts))


def aeon(name: str) -> Raw:
    """A set that aeon carries; "_eq" at the end of a name: stretched to equal length."""
    data = pathlib.Path(require("aeon.datasets").__file__).parent / "data"
    folder = data / name.removesuffix("_eq")
    return join(*[read_ts(folder / f"{name}_{part}.ts") for part in ("TRAIN", "TEST")])


def read_npz(content: bytes) -> Raw:
    """Arrays X_train, y_train, X_test, y_test; labels from 1, or numbers of the names in ``classes``."""
    with np.load(io.BytesIO(content)) as file:
        parts = []
        for part in ("train", "test"):
            labels = file[f"y_{part}"].tolist()
            if "classes" in file:
                labels = [file["classes"][i] for i in labels]
            parts.append((file[f"X_{part}"], list(map(str, labels))))
    return join(*parts)


def read_micro(content: bytes) -> Raw:
    """Heartbeat's training part: integers of a millionth; y is 1 for abnormal, which comes first in the alphabet."""
    with np.load(io.BytesIO(content)) as file:
        x, y = (file["X_micro"] * 1e-6).astype(np.float32), 1 - file["y"].astype(np.int64)
    return Raw(x, y, ("abnormal", "normal"), {"train": slice(0, len(y))})


def _waves(channels: int, length: int, names: list[str], seed: int) -> Cases:
    """Three cases per class: noisy waves whose frequency is that of the class."""
    rng, y = np.random.default_rng(seed), np.arange(3 * len(names)) % len(names)
    time, phase = np.arange(length) / length, rng.uniform(0, 1, (len(y), channels, 1))
    noise = 0.2 * rng.standard_normal((len(y), channels, length))
    x = np.sin(2 * np.pi * ((1 + y)[:, None, None] * time + phase)) + noise
    return x.round(4).astype(np.float32), [names[i] for i in y]


def stand_in(channels: int, length: int, names: list[str]) -> Raw:
    """Noisy waves of at most 48 points, three cases per class in each part."""
    return join(*(_waves(channels, min(length, 48), names, seed) for seed in (0, 1)))
