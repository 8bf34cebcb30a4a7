"""Time series to classify: sets of the UCR and UEA archives, as the archives have them or as an npz copy."""

from __future__ import annotations

import io
import pathlib
import tempfile
import zipfile
from collections.abc import Callable

import numpy as np

from ..machine import require
from . import files
from .files import DataError, File, Layout, Raw, Source, known

Cases = tuple[np.ndarray, list[str]]  # (case, channel, time) and a label per case
SITE = "https://www.timeseriesclassification.com"


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
    y = np.array([names.index(name) for name in [*train[1], *test[1]]], np.int64)
    parts = {"train": slice(0, len(train[0])), "test": slice(len(train[0]), len(y))}
    return Raw(np.concatenate([train[0], test[0]]), y, names, parts)


def _zipped(name: str) -> Callable[[bytes], Raw]:
    """A reader of the archive's zip; of a member that unpacks to more than `files.LARGEST` bytes nothing is unpacked."""

    def part(archive: zipfile.ZipFile, which: str, folder: str) -> Cases:
        wanted = f"{name}_{which}.ts"
        found = [m for m in archive.infolist() if m.filename.rsplit("/", 1)[-1] == wanted]
        if not found:
            has = ", ".join(archive.namelist())
            raise DataError(f"the archive does not hold {wanted}; it holds {has}")
        if found[0].file_size > files.LARGEST:
            size = f"{found[0].file_size:,} bytes, more than {files.LARGEST:,}"
            raise DataError(f"{found[0].filename} unpacks to {size}")
        return read_ts(pathlib.Path(archive.extract(found[0], folder)))

    def read(content: bytes) -> Raw:
        with zipfile.ZipFile(io.BytesIO(content)) as archive, tempfile.TemporaryDirectory() as at:
            return join(part(archive, "TRAIN", at), part(archive, "TEST", at))

    return read


def _read_npz(content: bytes) -> Raw:
    """Arrays X_train, y_train, X_test, y_test; labels from 1, or numbers of the names in ``classes``."""
    with np.load(io.BytesIO(content)) as file:
        parts = []
        for part in ("train", "test"):
            labels = file[f"y_{part}"].tolist()
            if "classes" in file:
                labels = [file["classes"][i] for i in labels]
            parts.append((file[f"X_{part}"], list(map(str, labels))))
    return join(*parts)


def _read_micro(content: bytes) -> Raw:
    """Heartbeat's training part: integers of a millionth; y is 1 for abnormal, which comes first in the alphabet."""
    with np.load(io.BytesIO(content)) as file:
        x, y = (file["X_micro"] * 1e-6).astype(np.float32), 1 - file["y"].astype(np.int64)
    return Raw(x, y, ("abnormal", "normal"), {"train": slice(0, len(y))})


def _waves(channels: int, length: int, names: tuple[str, ...], seed: int) -> Cases:
    """Three cases per class: noisy waves whose frequency is that of the class."""
    rng, y = np.random.default_rng(seed), np.arange(3 * len(names)) % len(names)
    time, phase = np.arange(length) / length, rng.uniform(0, 1, (len(y), channels, 1))
    noise = 0.2 * rng.standard_normal((len(y), channels, length))
    x = np.sin(2 * np.pi * ((1 + y)[:, None, None] * time + phase)) + noise
    return x.round(4).astype(np.float32), [names[i] for i in y]


# ---------------------------------------------------------------------------------------------------------- the registry
def _archive(
    name: str,
    about: str,
    shape: tuple[int, int],
    names: tuple[str, ...],
    cases: dict[str, tuple[int, ...] | int | None],
    copy: Layout | None = None,
) -> Source:
    """A set of the archive: its zip, which has no published checksum, and a copy as arrays if there is one.

    Args:
        shape: channels and points of a case. cases: how many of each class a part has, or how many in all, or unknown.
    """
    expect = {}
    for part, count in cases.items():
        of_each = count if isinstance(count, tuple) else (None,) * len(names)
        total = sum(count) if isinstance(count, tuple) else count
        expect[part] = ((total, *shape), of_each)
    page = f"{SITE}/description.php?Dataset={name}"
    by_hand = f"get {name}.zip from {page}"
    file = File(f"ucr/{name}.zip", f"{SITE}/aeon-toolkit/{name}.zip", by_hand=by_hand)
    note = "The archive's own file. The archive publishes no checksum: shapes and class counts are checked."
    layouts = [Layout((file,), _zipped(name), expect, note)]
    if copy:
        parts = ("train",) if copy.read is _read_micro else tuple(expect)
        copy.expect.update({part: expect[part] for part in parts})
        layouts.append(copy)

    def stand_in() -> Raw:
        channels, length = shape
        return join(*(_waves(channels, min(length, 48), names, seed) for seed in (0, 1)))

    return Source(name.lower(), about, page, "not stated", tuple(layouts), stand_in)


def _copy(name: str, content: str, note: str, read: Callable = _read_npz) -> Layout:
    return Layout((known(f"ucr/{name}.npz"),), read, note=note, content=content)


SOURCES = (
    _archive(
        "ECGFiveDays",
        "UCR: electrocardiograms of two days, 1 channel, 136 points, 2 classes",
        (1, 136),
        ("1", "2"),
        {"train": (14, 9), "test": (428, 433)},
        _copy(
            "ECGFiveDays",
            "7393ef5ef09918e3",
            "The official 23 training and 861 test cases at single precision.",
        ),
    ),
    _archive(
        "ECG5000",
        "UCR: heartbeats of one patient, 1 channel, 140 points, 5 classes",
        (1, 140),
        ("1", "2", "3", "4", "5"),
        {"train": (292, 177, 10, 19, 2), "test": (2627, 1590, 86, 175, 22)},
        _copy(
            "ECG5000",
            "60d18f54a627e650",
            "The official 500 training and 4,500 test cases at single precision; the first test case is rounded to 4 decimals.",
        ),
    ),
    _archive(
        "ChlorineConcentration",
        "UCR: chlorine in a simulated water network, 1 channel, 166 points, 3 classes",
        (1, 166),
        ("1", "2", "3"),
        {"train": (114, 91, 262), "test": (886, 909, 2045)},
        _copy(
            "ChlorineConcentration",
            "c0e04e2340879a90",
            "The official 467 training cases at single precision and 3,840 test cases; the test part is rounded to 4 decimals.",
        ),
    ),
    _archive(
        "Heartbeat",
        "UEA: spectrograms of heart sounds, 61 channels, 405 points, 2 classes",
        (61, 405),
        ("abnormal", "normal"),
        {"train": (147, 57), "test": 205},
        _copy(
            "Heartbeat_train_only",
            "068a03d9b787b2ca",
            "The 204 official training cases alone, exact; the 205 test cases are missing, so no score here is one on the "
            f"official test part. For both parts get Heartbeat.zip from {SITE}/description.php?Dataset=Heartbeat and put it "
            "into the folder ucr of the data folder.",
            _read_micro,
        ),
    ),
    _archive(
        "RacketSports",
        "UEA: wrist movements in badminton and squash, 6 channels, 30 points, 4 classes; not a set of the paper",
        (6, 30),
        ("Badminton_Clear", "Badminton_Smash", "Squash_BackhandBoast", "Squash_ForehandBoast"),
        {"train": (43, 39, 34, 35), "test": (43, 40, 34, 35)},
        _copy(
            "RacketSports",
            "8e0cbf90a8316153",
            "The official 151 training and 152 test cases at single precision. Not a set of the paper: it has the channels of "
            "LSST, and stands under its own name.",
        ),
    ),
    _archive(
        "LSST",
        "UEA: simulated light curves of the sky (PLAsTiCC), 6 channels, 36 points, 14 classes",
        (6, 36),
        ("6", "15", "16", "42", "52", "53", "62", "64", "65", "67", "88", "90", "92", "95"),
        {"train": 2459, "test": 2466},
    ),
    _archive(
        "Sleep",
        "UCR/UEA: one channel of an electroencephalogram, 5 stages of sleep; the paper's 'Sleep' as its counts identify it",
        (1, 178),
        ("0", "1", "2", "3", "4"),
        {"train": None, "test": None},
    ),
)
