"""The data files that the plan needs, in one folder of limited size, for machines without a network.

The rule of the cut: go through the plan in its order of worth and through the data sets of each experiment in the order that the
notebook names them. A data set is taken as a whole, or left out if it does not fit into what is left; a later, smaller one may
still fit. Nothing is packed anew or reduced. What a folder named by --have holds is not packed again, so that several parcels
bring what one cannot.
"""

from __future__ import annotations

import pathlib
import shutil
import subprocess

import pandas as pd

from .. import data
from ..data import files
from ..modes import ROOT, LabError
from ..released import release_folder
from . import cells, plan

LIMIT = 64 * 2**20  # bytes of a parcel and the tree together


def tree_bytes() -> int:
    """Bytes of the files of this checkout that are under version control."""
    listed = subprocess.run(["git", "-C", ROOT, "ls-files", "-z"], capture_output=True, check=True)
    found = [ROOT / name for name in listed.stdout.decode().split("\0") if name]
    return sum(file.stat().st_size for file in found if file.is_file())


def wanted(names=()) -> list[tuple[str, str]]:
    """(data set, experiment that needs it first), in the plan's order."""
    sets: dict[str, str] = {}
    surveys: dict[pathlib.Path, dict] = {}
    for item in plan.chosen(list(names)):
        for experiment in item.names():
            if item.path not in surveys:
                surveys[item.path] = cells.survey(item.path, plan.constants_of(item.path))
            for name in surveys[item.path].get(experiment, {"data": []})["data"]:
                sets.setdefault(name, experiment)
    return list(sets.items())


def form(name: str) -> list[pathlib.Path] | None:
    """The files of a data set as they lie in the data folder, smallest form first; None where none is complete."""
    complete = []
    for layout in data.SOURCES[name].layouts:
        found = [files.find(file) for file in layout.files]
        if all(found):
            complete.append(found)
    return min(complete, key=size, default=None)


def size(found: list[pathlib.Path]) -> int:
    return sum(file.stat().st_size for file in found)


def holds(parcel: pathlib.Path, found: list[pathlib.Path]) -> bool:
    """Whether an earlier parcel has all these files of the data folder."""
    return all((parcel / file.relative_to(files.folder())).is_file() for file in found)


def bundled(name: str) -> bool:
    """Whether a data set comes with a library, so that nothing has to travel."""
    return not any(layout.files for layout in data.SOURCES[name].layouts)


def choose(sets: list[tuple[str, str]], limit: int, have: list[pathlib.Path]) -> pd.DataFrame:
    """One row per data set: its size, whether it travels, and why not."""
    rows, left = [], limit
    for name, experiment in sets:
        if bundled(name):
            continue
        found = form(name)
        bytes_ = size(found) if found else 0
        if found is None:
            what = "left out: not in the data folder"
        elif any(holds(place, found) for place in have):
            what = "in an earlier parcel"
        elif bytes_ > left:
            what = f"left out: {left / 2**20:.1f} MiB are left"
        else:
            what, left = "packed", left - bytes_
        rows.append((name, experiment, bytes_ / 2**20, what))
    return pd.DataFrame(rows, columns=["data set", "needed first by", "MiB", "what becomes of it"])


def pack(folder: pathlib.Path, limit: float | None = None, have=(), names=()) -> pd.DataFrame:
    """Copy the data files of the plan, and the released package, into a folder that NDL_DATA can name.

    Args:
        limit: MiB; by default what the tree leaves of `LIMIT`. have: earlier parcels. names: as for `run`.
    """
    if folder.exists() and any(folder.iterdir()):
        raise LabError(f"{folder} is not empty: name a new folder for a parcel")
    room = int(limit * 2**20) if limit is not None else LIMIT - tree_bytes()
    package = release_folder()
    if package.is_dir() and not have:
        shutil.copytree(
            package, folder / package.name, ignore=shutil.ignore_patterns("__pycache__")
        )
        room -= size([file for file in (folder / package.name).rglob("*") if file.is_file()])
    table = choose(wanted(names), room, list(have))
    for name in table.loc[table["what becomes of it"] == "packed", "data set"]:
        for file in form(name):
            target = folder / file.relative_to(files.folder())
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, target)
    print(table.to_string(index=False, float_format="{:.2f}".format))
    packed = table.loc[table["what becomes of it"] == "packed", "MiB"].sum()
    print(f"{packed:.1f} MiB of data in {folder}; use it with NDL_DATA={folder}")
    return table
