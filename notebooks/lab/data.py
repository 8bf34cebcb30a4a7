"""Data sets: where they come from, under which licence, with which checksum; and how they are split.

A file is looked for in NDL_DATA (default: the user's cache folder), as it is or xz-compressed; otherwise it is downloaded
from the official address, verified, and only then moved into place. A file that is there is never changed. Smoke mode never
downloads: sets that do not ship with a dependency are replaced by seeded stand-ins of the same shape, and say so.
"""

from __future__ import annotations

import functools
import hashlib
import io
import lzma
import os
import pathlib
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch

from .modes import LabError, mode
from .training import Split


class DataError(LabError):
    """A data file is missing, damaged or cannot be downloaded."""


@dataclass(frozen=True)
class File:
    """One file as its publisher offers it."""

    name: str  # path below the data folder
    url: str
    sha256: str
    size: int  # bytes


@dataclass(frozen=True)
class Source:
    """A data set of the registry."""

    name: str
    about: str
    origin: str
    licence: str
    build: Callable[
        ..., tuple[np.ndarray, np.ndarray | None, tuple[str, ...]]
    ]  # (file contents...) -> inputs, targets, names
    files: tuple[File, ...] = ()
    stand_in: Callable[[], tuple[np.ndarray, np.ndarray | None, tuple[str, ...]]] | None = None


@dataclass(frozen=True)
class Data:
    """A loaded data set: inputs ``x``, targets ``y`` (None where the set has none), names of classes or columns."""

    name: str
    x: np.ndarray
    y: np.ndarray | None
    names: tuple[str, ...]
    checksum: str
    stand_in: bool


# ------------------------------------------------------------------------------------------------------------ files
def folder() -> pathlib.Path:
    """The data folder: NDL_DATA, or ``ndlinear-book`` in the user's cache folder."""
    named = os.environ.get("NDL_DATA", "").strip()
    if named:
        return pathlib.Path(named).expanduser()
    cache = os.environ.get("XDG_CACHE_HOME") or os.environ.get("LOCALAPPDATA") or "~/.cache"
    return pathlib.Path(cache).expanduser() / "ndlinear-book"


def _verified(content: bytes, file: File, place: str) -> bytes:
    if len(content) != file.size or hashlib.sha256(content).hexdigest() != file.sha256:
        raise DataError(
            f"{place} is not the expected file: {len(content):,} bytes with sha256 {hashlib.sha256(content).hexdigest()}, "
            f"expected {file.size:,} bytes with sha256 {file.sha256}. It was left as it is; move it away, then fetch {file.url} again."
        )
    return content


def _download(file: File, place: pathlib.Path) -> bytes:
    """Fetch into a temporary file beside the target, verify, and move into place in one step."""
    if mode() == "smoke":
        raise DataError(f"{file.name} is not in {folder()}, and smoke mode does not download")
    place.parent.mkdir(parents=True, exist_ok=True)
    try:
        with urllib.request.urlopen(file.url, timeout=60) as answer:
            content = answer.read(file.size + 1)
    except (urllib.error.URLError, OSError) as error:
        raise DataError(
            f"{file.url} could not be downloaded ({error}). Get the file by hand ({file.size:,} bytes, sha256 {file.sha256}) and put it "
            f"at {place}, or set NDL_DATA to the folder that holds {file.name}."
        ) from error
    _verified(content, file, f"what {file.url} sent")
    with tempfile.NamedTemporaryFile(dir=place.parent, prefix=place.name, delete=False) as part:
        part.write(content)
        part.flush()
        os.fsync(part.fileno())
    os.replace(part.name, place)
    return content


def fetch(file: File) -> bytes:
    """The verified content of a file: from the data folder, else from its official address.

    Raises:
        DataError: wrong content in the folder (left untouched), or no way to download; the message says what to put where.
    """
    place = folder() / file.name
    if place.is_file():
        return _verified(place.read_bytes(), file, str(place))
    packed = place.with_name(place.name + ".xz")
    if packed.is_file():
        try:
            content = lzma.decompress(packed.read_bytes())
        except (lzma.LZMAError, EOFError) as error:
            raise DataError(
                f"{packed} cannot be unpacked ({error}). It was left as it is; move it away and run again."
            ) from error
        return _verified(content, file, f"{packed}, unpacked,")
    return _download(file, place)


# --------------------------------------------------------------------------------------------------------- the registry
def _from_sklearn(loader: str) -> Callable:
    def build():
        try:
            from sklearn import datasets
        except ModuleNotFoundError as error:
            raise DataError(f"{loader} ships with scikit-learn: pip install scikit-learn") from error
        bunch = getattr(datasets, loader)()
        x = bunch.images if "images" in bunch else bunch.data
        return (
            np.asarray(x, np.float32),
            np.asarray(bunch.target),
            tuple(map(str, bunch.get("target_names", bunch.get("feature_names")))),
        )

    return build


def _ett(content: bytes):
    frame = pd.read_csv(io.BytesIO(content))
    columns = ["date", "HUFL", "HULL", "MUFL", "MULL", "LUFL", "LULL", "OT"]
    if list(frame.columns) != columns:
        raise DataError(f"expected the columns {columns}, found {list(frame.columns)}")
    return frame[columns[1:]].to_numpy(np.float32), None, tuple(columns[1:])


def _ett_stand_in():
    hours, rng = np.arange(600)[:, None], np.random.default_rng(0)
    waves = np.sin(2 * np.pi * hours / 24 + np.arange(7)) + 0.1 * rng.standard_normal((600, 7))
    return waves.astype(np.float32), None, ("HUFL", "HULL", "MUFL", "MULL", "LUFL", "LULL", "OT")


def _ett_source(name: str, sha256: str, size: int) -> Source:
    address = f"https://raw.githubusercontent.com/zhouhaoyi/ETDataset/main/ETT-small/{name}.csv"
    return Source(
        name.lower(),
        f"Electricity transformer temperature, {name}: 6 loads and the oil temperature",
        "https://github.com/zhouhaoyi/ETDataset",
        "CC BY-ND 4.0",
        _ett,
        (File(f"ett/{name}.csv", address, sha256, size),),
        _ett_stand_in,
    )


SOURCES = {
    source.name: source
    for source in (
        Source(
            "digits",
            "1,797 handwritten digits, 8×8 grey values 0 to 16, 10 classes",
            "scikit-learn (UCI 80)",
            "CC BY 4.0",
            _from_sklearn("load_digits"),
        ),
        Source(
            "breast-cancer",
            "569 cases, 30 features, 2 classes",
            "scikit-learn (UCI 17)",
            "CC BY 4.0",
            _from_sklearn("load_breast_cancer"),
        ),
        Source(
            "diabetes",
            "442 patients, 10 features, disease progression",
            "scikit-learn",
            "not stated",
            _from_sklearn("load_diabetes"),
        ),
        _ett_source("ETTh1", "f18de3ad269cef59bb07b5438d79bb3042d3be49bdeecf01c1cd6d29695ee066", 2_589_657),
        _ett_source("ETTh2", "a3dc2c597b9218c7ce1cd55eb77b283fd459a1d09d753063f944967dd6b9218b", 2_417_960),
        _ett_source("ETTm1", "6ce1759b1a18e3328421d5d75fadcb316c449fcd7cec32820c8dafda71986c9e", 10_360_719),
        _ett_source("ETTm2", "db973ca252c6410a30d0469b13d696cf919648d0f3fd588c60f03fdbdbadd1fd", 9_677_236),
    )
}


@functools.cache
def _load(name: str, stand_in: bool) -> Data:
    source = SOURCES[name]
    x, y, names = source.stand_in() if stand_in else source.build(*[fetch(f) for f in source.files])
    content = x.tobytes() + (b"" if y is None else y.tobytes())
    for array in (x, y):
        if array is not None:
            array.setflags(write=False)  # cached and shared: a reader gets an error, not a changed data set
    return Data(name, x, y, names, hashlib.sha256(content).hexdigest()[:16], stand_in)


def load(name: str) -> Data:
    """A data set of the registry; in smoke mode one that must be downloaded is a seeded stand-in of the same form (``stand_in``)."""
    if name not in SOURCES:
        raise DataError(f"no data set {name!r}; there are: {', '.join(SOURCES)}")
    data = _load(name, mode() == "smoke" and SOURCES[name].stand_in is not None)
    if data.stand_in:
        print(f"{name}: a seeded stand-in of the same form, for smoke runs only")
    return data


def checksum(name: str) -> str:
    """Checksum of the arrays that `load` returns."""
    return _load(name, mode() == "smoke" and SOURCES[name].stand_in is not None).checksum


def split(x, y, *, seed: int, parts: tuple[float, float, float] = (0.6, 0.2, 0.2), standardise: str = "entry") -> Split:
    """Random training, validation and test part; classes keep their shares; inputs are scaled by the training part alone.

    Args:
        x: (n, ...) inputs. y: (n,) integer classes, split class by class, or (n, ...) real targets.
        parts: shares that sum to 1.
        standardise: after subtracting the mean of each input entry, divide by the deviation of that entry ("entry", for features;
            constant entries stay zero) or of all entries together ("all", for images), or leave the inputs alone ("none").
    """
    if standardise not in ("entry", "all", "none"):
        raise LabError(f"standardise={standardise!r} is not one of 'entry', 'all', 'none'")
    if abs(sum(parts) - 1) > 1e-9 or min(parts) <= 0:
        raise LabError(f"parts={parts} must be three positive shares that sum to 1")
    x, y, rng = np.asarray(x, np.float32), np.asarray(y), np.random.default_rng(seed)
    if y.ndim == 1 and np.issubdtype(y.dtype, np.integer):
        groups, y = [np.flatnonzero(y == c) for c in np.unique(y)], y.astype(np.int64)
    else:
        groups, y = [np.arange(len(x))], y.astype(np.float32)
    cuts = [np.split(rng.permutation(g), np.rint(np.cumsum(parts[:2]) * len(g)).astype(int)) for g in groups]
    index = [rng.permutation(np.concatenate(c)) for c in zip(*cuts)]
    if standardise != "none":
        x = x - x[index[0]].mean(axis=0)
        deviation = x[index[0]].std(axis=0 if standardise == "entry" else None)
        x = x / np.where(deviation > 0, deviation, 1)
    return Split(*[(torch.from_numpy(x[i]), torch.from_numpy(y[i])) for i in index])
