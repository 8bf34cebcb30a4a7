"""Rows brought home: ``python -m lab merge DIR`` appends the rows of a folder that NDL_RESULTS or `lab run --out` named.

All of them are checked before the first one is appended, and the records are locked from before the first check to after the last
row. A merge that is cut off in between is called again: rows that are there already are passed over.
"""

from __future__ import annotations

import argparse
import contextlib
import pathlib

from .. import modes
from ..modes import LabError
from ..page.scale import on_gpu
from ..records import golden, runs, store

FORM = dict.fromkeys(("experiment", "key", "code", "status", "device", "time"), str)
FORM |= dict.fromkeys(("config", "metrics", "data", "versions"), dict)
FORM |= {"seed": int, "seconds": (int, float)}  # what every run writes


def gathered(folder: pathlib.Path) -> dict[str, list[dict]]:
    """Experiment -> the rows in a folder, by the names of its files; what is no experiment of ours, and no row of a run, is refused."""
    files = sorted(folder.glob("*.jsonl"))
    if not files:
        raise LabError(f"{folder} holds no .jsonl file: name the folder of a full run")
    found = {}
    for file in files:
        if not golden.place(file.stem).is_file():
            raise LabError(f"{file.stem}: no experiment of this checkout has that name")
        found[file.stem] = store.parse(file)
        for number, row in enumerate(found[file.stem], 1):
            odd = [name for name, kind in FORM.items() if not isinstance(row.get(name), kind)]
            if odd or row["key"] != store.key(row["config"]):
                wrong = ", ".join(odd) or "key"
                raise LabError(f"{file} is not merged: no run writes line {number}, see {wrong}")
    return found


def faults(experiment: str, recorded: list[dict], fresh: list[dict]) -> list[str]:
    """What speaks against rows, by themselves and beside those that are recorded."""
    counts = golden.version(experiment)
    if old := [row for row in fresh if row["code"] != counts]:
        return [f"{r['key']} was made under version {r['code']}, now {counts}" for r in old]
    try:
        rows = list(golden.current(experiment, recorded + fresh).values())
        runs.check_origin(experiment, rows)
    except store.RecordError as error:
        return [str(error)]
    kinds = {on_gpu(row["device"]) for row in rows if "machine" not in row["config"]}
    return ["rows of GPUs and of processors would stand in one grid"] if len(kinds) > 1 else []


def merge(folder: pathlib.Path) -> dict[str, int]:
    """Append the rows of a folder to the records, or refuse and change nothing; experiment -> rows appended."""
    fresh, recorded, problems = {}, {}, []
    with contextlib.ExitStack() as locks:
        for name, rows in gathered(folder).items():
            locks.enter_context(store.only_writer(modes.RESULTS / f"{name}.jsonl"))
            recorded[name] = golden.read(name, unsealed=True)
            there = {row["digest"] for row in recorded[name]}
            new = {row["digest"]: row for row in rows if row["digest"] not in there}.values()
            fresh[name] = [row for row in new if row["status"] == "ok"]
            problems += [f"{name}: {text}" for text in faults(name, recorded[name], fresh[name])]
        if problems:
            first = f"{folder} is not merged, the records are as they were; {len(problems)} faults:"
            raise LabError("\n  ".join([first, *problems[:10]]))
        for name, rows in fresh.items():
            store.append(modes.RESULTS / f"{name}.jsonl", *rows)
            golden.sign(name, recorded[name] + rows)
    return {name: len(rows) for name, rows in fresh.items()}


def main(arguments: list[str]) -> None:
    asked = argparse.ArgumentParser(prog="lab merge", description=__doc__)
    asked.add_argument("folder", type=pathlib.Path)
    for name, count in merge(asked.parse_args(arguments).folder).items():
        print(f"{name}: {count} rows appended")
