"""Time series to classify: sets of the UCR and UEA archives, as the archives have them or as an npz copy."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Callable

import numpy as np

from .files import DataError, File, Layout, Raw, Source, known, unzip
from .formats import Cases, join, read_ts


def _zipped(name: str) -> Callable[[bytes], Raw]:
    def part(archive: zipfile.ZipFile, which: str) -> Cases:
        for member in archive.namelist():
            if member.rsplit("/", 1)[-1] == f"{name}_{which}.ts":
                return read_ts(unzip(archive, member))
        has = ", ".join(archive.namelist())
        raise DataError(f"the archive does not hold {name}_{which}.ts; it holds {has}")

    def read(content: bytes) -> Raw:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            return join(part(archive, "TRAIN"), part(archive, "TEST"))

    return read


# ----------------------------------------------------------------------------------------------------------- npz copies
def _read_npz(content: bytes) -> Raw:
    """Arrays X_train, y_train, X_test, y_test; labels from 1, or numbers of the names in ``classes``."""
    with np.load(io.BytesIO(content)) as file:
        labels = {part: file[f"y_{part}"].tolist() for part in ("train", "test")}
        if "classes" in file:
            labels = {
                part: [str(file["classes"][i]) for i in values] for part, values in labels.items()
            }
        train, test = [
            (file[f"X_{part}"], [str(name) for name in labels[part]]) for part in ("train", "test")
        ]
    return join(train, test)


def _read_micro(content: bytes) -> Raw:
    """Heartbeat's training part: integers of a millionth; y is 1 for abnormal, which comes first in the alphabet."""
    with np.load(io.BytesIO(content)) as file:
        x, y = (file["X_micro"] * 1e-6).astype(np.float32), 1 - file["y"].astype(np.int64)
    return Raw(x, y, ("abnormal", "normal"), {"train": slice(0, len(y))})


def _waves(channels: int, length: int, names: tuple[str, ...], seed: int) -> Cases:
    """Three cases per class: noisy waves whose frequency is that of the class."""
    rng, y = np.random.default_rng(seed), np.arange(3 * len(names)) % len(names)
    time, phase = np.arange(length) / length, rng.uniform(0, 1, (len(y), channels, 1))
    x = np.sin(2 * np.pi * ((1 + y)[:, None, None] * time + phase)) + 0.2 * rng.standard_normal(
        (len(y), channels, length)
    )
    return x.round(4).astype(np.float32), [names[i] for i in y]


# ---------------------------------------------------------------------------------------------------------- the registry
SITE = "https://www.timeseriesclassification.com"
NO_SUM = "The archive's own file. The archive publishes no checksum: shapes and class counts are checked."


def _archive(
    name: str,
    about: str,
    shape: tuple[int, int],
    counts: dict[str, tuple[int | None, ...]],
    names: tuple[str, ...],
    copy: tuple[File, str, str] | None = None,
    cases: dict[str, int | None] | None = None,
) -> Source:
    """A set of the archive: its zip, and a copy as arrays if there is one."""
    cases = cases or {part: sum(numbers) for part, numbers in counts.items()}
    expect = {
        part: ((n, *shape), counts.get(part, (None,) * len(names))) for part, n in cases.items()
    }
    page = f"{SITE}/description.php?Dataset={name}"
    file = File(
        f"ucr/{name}.zip", f"{SITE}/aeon-toolkit/{name}.zip", by_hand=f"get {name}.zip from {page}"
    )
    layouts = [Layout((file,), _zipped(name), expect, NO_SUM)]
    if copy and "_train_only" in copy[0].name:
        layouts.append(Layout((copy[0],), _read_micro, {"train": expect["train"]}, *copy[1:]))
    elif copy:
        layouts.append(Layout((copy[0],), _read_npz, expect, *copy[1:]))

    def stand_in() -> Raw:
        channels, length = shape
        return join(*(_waves(channels, min(length, 48), names, seed) for seed in (0, 1)))

    return Source(name.lower(), about, page, "not stated", tuple(layouts), stand_in)


SOURCES = (
    _archive(
        "ECGFiveDays",
        "UCR: electrocardiograms of two days, 1 channel, 136 points, 2 classes",
        (1, 136),
        {"train": (14, 9), "test": (428, 433)},
        ("1", "2"),
        (
            known("ucr/ECGFiveDays.npz"),
            "The official 23 training and 861 test cases at single precision.",
            "7393ef5ef09918e3",
        ),
    ),
    _archive(
        "ECG5000",
        "UCR: heartbeats of one patient, 1 channel, 140 points, 5 classes",
        (1, 140),
        {"train": (292, 177, 10, 19, 2), "test": (2627, 1590, 86, 175, 22)},
        ("1", "2", "3", "4", "5"),
        (
            known("ucr/ECG5000.npz"),
            "The official 500 training and 4,500 test cases at single precision; the first test case is rounded to 4 decimals.",
            "60d18f54a627e650",
        ),
    ),
    _archive(
        "ChlorineConcentration",
        "UCR: chlorine in a simulated water network, 1 channel, 166 points, 3 classes",
        (1, 166),
        {"train": (114, 91, 262), "test": (886, 909, 2045)},
        ("1", "2", "3"),
        (
            known("ucr/ChlorineConcentration.npz"),
            "The official 467 training cases at single precision and 3,840 test cases; the test part is rounded to 4 decimals.",
            "c0e04e2340879a90",
        ),
    ),
    _archive(
        "Heartbeat",
        "UEA: spectrograms of heart sounds, 61 channels, 405 points, 2 classes",
        (61, 405),
        {"train": (147, 57)},
        ("abnormal", "normal"),
        (
            known("ucr/Heartbeat_train_only.npz"),
            "The 204 official training cases alone, exact; the 205 test cases are missing, so no score here is one on the "
            f"official test part. For both parts get Heartbeat.zip from {SITE}/description.php?Dataset=Heartbeat and put it "
            "into the folder ucr of the data folder.",
            "068a03d9b787b2ca",
        ),
        cases={"train": 204, "test": 205},
    ),
    _archive(
        "RacketSports",
        "UEA: wrist movements in badminton and squash, 6 channels, 30 points, 4 classes; not a set of the paper",
        (6, 30),
        {"train": (43, 39, 34, 35), "test": (43, 40, 34, 35)},
        ("Badminton_Clear", "Badminton_Smash", "Squash_BackhandBoast", "Squash_ForehandBoast"),
        (
            known("ucr/RacketSports.npz"),
            "The official 151 training and 152 test cases at single precision. Not a set of the paper: it has the channels of "
            "LSST, and stands under its own name.",
            "8e0cbf90a8316153",
        ),
    ),
    _archive(
        "LSST",
        "UEA: simulated light curves of the sky (PLAsTiCC), 6 channels, 36 points, 14 classes",
        (6, 36),
        {},
        ("6", "15", "16", "42", "52", "53", "62", "64", "65", "67", "88", "90", "92", "95"),
        cases={"train": 2459, "test": 2466},
    ),
    _archive(
        "Sleep",
        "UCR/UEA: one channel of an electroencephalogram, 5 stages of sleep; the paper's 'Sleep' as its counts identify it",
        (1, 178),
        {},
        ("0", "1", "2", "3", "4"),
        cases={"train": None, "test": None},
    ),
)
