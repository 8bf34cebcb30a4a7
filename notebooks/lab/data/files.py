"""Files of data sets: looked for in the data folder, else downloaded; verified; never changed once they are there."""

from __future__ import annotations

import bz2
import csv
import functools
import hashlib
import http.client
import importlib.util
import lzma
import os
import pathlib
import tempfile
import urllib.request
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from ..modes import LabError, mode

UNPACK = {".xz": lzma.open, ".bz2": bz2.open}
LEFT_ALONE = "It was left as it is; move it away and run again"
NOT_KEPT = "Nothing of it was kept. Run again"


class DataError(LabError):
    """A data file is missing, damaged, of another format, or cannot be downloaded; the message says what to do."""


@dataclass(frozen=True)
class File:
    """One file as its publisher offers it. Without a checksum, what it holds is counted instead (``Layout.expect``)."""

    name: str  # path below the data folder
    url: str = ""  # empty: no address that answers without an account
    sha256: str = ""
    by_hand: str = ""  # how to get it without `url`

    def how(self) -> str:
        """How to get the file by hand, as the end of an error message."""
        again = f"get {self.url} by hand" if self.url else "get the file again from where it came"
        told = f" (sha256 {self.sha256})" if self.sha256 else ""
        return (
            f"{self.by_hand or again}{told} and put it at {folder() / self.name}, "
            f"or set NDL_DATA to the folder that holds {self.name}"
        )


@functools.cache
def known() -> dict[str, File]:
    """The files of files.csv by their names."""
    text = pathlib.Path(__file__).with_name("files.csv").read_text(encoding="utf-8")
    return {row["name"]: File(**row) for row in csv.DictReader(text.splitlines())}


@dataclass(frozen=True)
class Raw:
    """What a reader makes of the files of a data set: arrays, and the parts that the publisher fixed."""

    x: np.ndarray
    y: np.ndarray | None
    names: tuple[str, ...]
    splits: dict[str, slice] = field(default_factory=dict)

    @classmethod
    def of_parts(cls, parts: Mapping[str, tuple], names: Iterable[str] = ()) -> Raw:
        """Parts one after the other: name -> (inputs, classes). Inputs are an array or a list of texts; no classes: None."""
        ends = np.cumsum([0, *(len(x) for x, _ in parts.values())]).tolist()
        splits = {part: slice(i, j) for part, i, j in zip(parts, ends, ends[1:])}
        x = [np.array(x, object) if isinstance(x, list) else x for x, _ in parts.values()]
        y = [np.array(y, np.int64) for _, y in parts.values() if y is not None]
        return cls(np.concatenate(x), np.concatenate(y) if y else None, tuple(names), splits)


@dataclass(frozen=True)
class Layout:
    """One way in which a data set lies on disk: its files, how to read them, and what they must then hold.

    Args:
        read: contents of the files, in order -> `Raw`.
        expect: part of the data -> its ``shape`` and, where it has classes, ``classes``: the cases of each in the order of the
            labels, or one number where every class has as many. None in place of a number: any number.
        content: checksum of the arrays, where the values are known; it is checked where the files have no published checksum,
            and names the form in which recorded runs had the data.
        note: what a reader must know about this form of the data (what is exact, partial or missing).
    """

    files: tuple[File, ...]
    read: Callable[..., Raw]
    expect: dict[str, dict] = field(default_factory=dict)
    note: str = ""
    content: str = ""


@dataclass(frozen=True)
class Source:
    """A data set of the registry. The first layout is the publisher's own and is the one that is downloaded.

    ``stand_in`` makes a small set of the same form, seeded, for smoke runs; None where the set comes with a library.
    """

    name: str
    about: str
    origin: str
    licence: str
    layouts: tuple[Layout, ...]
    stand_in: Callable[[], Raw] | None = None


# ----------------------------------------------------------------------------------------------------- in the data folder
def folder() -> pathlib.Path:
    """The data folder: NDL_DATA, or ``ndlinear-book`` in the user's cache folder."""
    if named := os.environ.get("NDL_DATA", "").strip():
        return pathlib.Path(named).expanduser()
    cache = os.environ.get("XDG_CACHE_HOME") or os.environ.get("LOCALAPPDATA") or "~/.cache"
    return pathlib.Path(cache).expanduser() / "ndlinear-book"


def find(file: File) -> pathlib.Path | None:
    """Where the file lies in the data folder, as it is or packed (.xz, .bz2); None if it does not."""
    place = folder() / file.name
    places = [place, *(place.with_name(place.name + ending) for ending in UNPACK)]
    return next((place for place in places if place.is_file()), None)


def verified(content: bytes, file: File, place: str, advice: str = LEFT_ALONE) -> bytes:
    """The content, if it is that of the file, as far as its checksum is known; else a `DataError`."""
    found = hashlib.sha256(content).hexdigest()
    if file.sha256 not in ("", found):
        raise DataError(
            f"{place} is not the expected file: it has {len(content):,} bytes and sha256 {found}. {advice}, or {file.how()}."
        )
    return content


def packaged(package: str, place: str, file: File) -> bytes | None:
    """A file at a place inside of an installed package, which is looked up and not imported; None where it is not installed."""
    found = importlib.util.find_spec(package)
    for folder in (found and found.submodule_search_locations) or ():
        path = pathlib.Path(folder) / place
        return verified(path.read_bytes(), file, str(path)) if path.is_file() else None
    return None


def _read(place: pathlib.Path) -> bytes:
    try:
        with UNPACK.get(place.suffix, open)(place, "rb") as file:
            return file.read()
    except (lzma.LZMAError, EOFError, ValueError, OSError) as error:
        raise DataError(f"{place} cannot be read ({error}). {LEFT_ALONE}.") from error


# ------------------------------------------------------------------------------------------------------------- download
def _download(file: File) -> bytes:
    if mode() == "smoke":
        raise DataError(f"{file.name} is not in {folder()}, and smoke mode does not download")
    if not file.url:
        raise DataError(
            f"{file.name} is not in {folder()} and cannot be downloaded without an account: {file.how()}."
        )
    try:
        with urllib.request.urlopen(file.url, timeout=60) as answer:
            content = answer.read()
    except (http.client.HTTPException, OSError) as error:
        raise DataError(
            f"{file.name} is not in {folder()}, and {file.url} could not be downloaded "
            f"({type(error).__name__}: {error}): {file.how()}."
        ) from error
    return verified(content, file, f"what {file.url} sent", NOT_KEPT)


def _write_beside(place: pathlib.Path, content: bytes) -> None:
    """Write beside the target, then move into place in one step; a file that is there by now stays."""
    place.parent.mkdir(parents=True, exist_ok=True)
    handle, part = tempfile.mkstemp(dir=place.parent, prefix=place.name)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        if not os.path.lexists(place):
            os.replace(part, place)
    finally:
        pathlib.Path(part).unlink(missing_ok=True)


def keep(file: File, content: bytes) -> None:
    """Put a download into the data folder."""
    place = folder() / file.name
    try:
        _write_beside(place, content)
    except OSError as error:
        raise DataError(
            f"{place} cannot be written ({error}); set NDL_DATA to a folder that can be written"
        ) from error


def fetch(file: File) -> bytes:
    """The verified content of a file: from the data folder, else from its official address. A download with a checksum is kept.

    Raises:
        DataError: wrong content in the folder (left untouched), or no way to download; the message says what to put where.
    """
    place = find(file)
    if place is not None:
        return verified(_read(place), file, str(place))
    content = _download(file)
    if file.sha256:
        keep(file, content)
    return content
