"""Data sets: where they come from, under which licence, with which checksum; and how they are split.

Each data set comes as a `Data`, whatever its files look like: inputs ``x``, targets ``y``, names, official parts, and a note
that says what is exact, partial or missing. A file is looked for in NDL_DATA (default: the user's cache folder), as it is or
packed; otherwise it is downloaded from the official address, verified, and only then moved into place. A file that is there is
never changed. Smoke mode never downloads: sets that do not ship with a dependency are seeded stand-ins of the same form, and
say so.
"""

from __future__ import annotations

import functools
import hashlib
from dataclasses import dataclass

import numpy as np

from ..modes import LabError, mode
from . import registry
from .files import (
    LEFT_ALONE,
    NOT_KEPT,
    DataError,
    File,
    Layout,
    Raw,
    Source,
    fetch,
    find,
    folder,
    keep,
)
from .splits import official, split

SOURCES: dict[str, Source] = registry.sources()


@dataclass(frozen=True)
class Data:
    """A loaded data set.

    Args:
        x: inputs, first axis = case: uint8 (n, 3, 32, 32) for pictures, float32 (n, channel, time) for series to classify,
            float32 (n, feature) for tables and for series to forecast (n = time), str for sentences.
        y: int64 classes from 0 or float32 targets, (n,); None where the set has none. names: of the classes, or of the columns of x.
        splits: parts that the publisher fixed, e.g. "train" and "test", as slices of the first axis.
        note: what is exact, partial or missing in the form that was read; to be printed where results stand.
        checksum: of x and y. stand_in: made up for a smoke run.
    """

    name: str
    x: np.ndarray
    y: np.ndarray | None
    names: tuple[str, ...]
    checksum: str
    stand_in: bool
    splits: dict[str, slice]
    note: str

    def part(self, name: str) -> tuple[np.ndarray, np.ndarray | None]:
        """Inputs and targets of one official part."""
        if name not in self.splits:
            has = ", ".join(self.splits) or "no official parts"
            raise DataError(f"{self.name} has no part {name!r}; it has {has}. {self.note}")
        return self.x[self.splits[name]], None if self.y is None else self.y[self.splits[name]]


def _digest(raw: Raw) -> str:
    digest = hashlib.sha256()
    for array in (raw.x, raw.y):
        if array is not None:
            digest.update("\n".join(array).encode() if array.dtype == object else array.tobytes())
            # cached and shared: a reader gets an error, not a changed data set
            array.setflags(write=False)
    return digest.hexdigest()[:16]


def _parse(layout: Layout, contents: list[bytes]) -> Raw:
    try:
        return layout.read(*contents)
    except LabError:
        raise
    except Exception as error:  # whatever a parser trips over: the file is not what it should be
        raise DataError(f"not in the expected format ({type(error).__name__}: {error})") from error


def _differ(found, expected) -> bool:
    return len(found) != len(expected) or any(e not in (None, f) for f, e in zip(found, expected))


def _compare(layout: Layout, raw: Raw) -> None:
    """Refuse data whose shapes, class counts or values are not those that are known."""
    for part, known in layout.expect.items():
        index = raw.splits.get(part, slice(None))
        found, counts = list(raw.x[index].shape), known.get("classes")
        if _differ(found, known["shape"]):
            raise DataError(f"the {part} part is {found}, expected {known['shape']}")
        if counts is None:
            continue
        if isinstance(counts, int):
            counts = [counts] * len(raw.names)
        cases = np.bincount(raw.y[index], minlength=len(raw.names)).tolist()
        if _differ(cases, counts):
            raise DataError(f"cases per class in the {part} part are {cases}, expected {counts}")
    unproved = not all(file.sha256 for file in layout.files)
    if layout.content and unproved and _digest(raw) != layout.content:
        raise DataError(f"the values have the checksum {_digest(raw)}, expected {layout.content}")


def _from_files(source: Source) -> tuple[Raw, str]:
    """The first form whose files are all in the data folder; if there is none, the publisher's."""
    complete = [each for each in source.layouts if all(map(find, each.files))]
    layout = [*complete, source.layouts[0]][0]
    contents = [fetch(file) for file in layout.files]
    try:
        raw = _parse(layout, contents)
        _compare(layout, raw)
    except DataError as error:
        if not contents:  # the set comes with a library
            raise
        where = ", ".join(str(find(file) or f"what {file.url} sent") for file in layout.files)
        advice = LEFT_ALONE if any(map(find, layout.files)) else NOT_KEPT
        raise DataError(f"{where}: {error}. {advice}, or {layout.files[0].how()}.") from error
    for file, content in zip(layout.files, contents):
        if not find(file):
            keep(file, content)
    return raw, layout.note


@functools.cache
def _load(name: str, smoke: bool) -> Data:
    """A set of the registry, or in smoke mode its stand-in, where it has one."""
    source = SOURCES[name]
    made_up = smoke and source.stand_in is not None
    if made_up:
        raw, note = source.stand_in(), "A seeded stand-in of the same form, made up for smoke runs."
    else:
        raw, note = _from_files(source)
    return Data(name, raw.x, raw.y, raw.names, _digest(raw), made_up, raw.splits, note)


def load(name: str) -> Data:
    """A data set of the registry; in smoke mode one that must be downloaded is a seeded stand-in of the same form, and says so."""
    if name not in SOURCES:
        raise DataError(f"no data set {name!r}; there are: {', '.join(SOURCES)}")
    data = _load(name, mode() == "smoke")
    if data.stand_in:
        print(f"{name}: a seeded stand-in of the same form, for smoke runs only")
    return data


def checksum(name: str) -> str:
    """Checksum of the arrays that `load` returns."""
    return _load(name, mode() == "smoke").checksum


def note(name: str, checksum: str) -> str:
    """What a reader must know about the data of recorded runs, by the checksum that their rows carry; reads no data."""
    known = {layout.content: layout.note for layout in SOURCES[name].layouts}
    strange = (
        f"A form of {name} that is not in the registry: its values have the checksum {checksum}."
    )
    return known.get(checksum, strange)
