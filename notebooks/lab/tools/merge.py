"""Rows brought home: ``python -m lab merge DIR`` appends the rows of a folder that NDL_RESULTS or `lab run --out` named.

All of them are checked before the first one is appended, and the records are locked from before the first check to after the last
row. A merge that is cut off in between is called again: rows that are there already are passed over.
"""

from __future__ import annotations

import argparse
import contextlib
import pathlib
from collections import Counter

from .. import data, modes
from ..modes import LabError
from ..page.scale import on_gpu
from ..records import golden, runs, store

SHOWN = 10  # problems that a refusal lists
FIELDS = dict.fromkeys(("experiment", "code", "key", "status", "device", "time"), str)
FIELDS |= dict.fromkeys(("config", "metrics", "data", "versions"), dict)
FIELDS |= {"seed": int, "seconds": (int, float)}


def gathered(folder: pathlib.Path) -> dict[str, list[dict]]:
    """Experiment -> the rows in a folder; a name or a file that is not one of ours is refused before any path is formed."""
    files = sorted(folder.glob("*.jsonl"))
    if not files:
        raise LabError(f"{folder} holds no .jsonl file: name the folder of a full run")
    found = {}
    for file in files:
        runs.check_name(file.stem)
        found[file.stem], torn = store.parse(file)
        if torn:
            raise LabError(f"{file} ends in a torn line: let the run go on, which sets it aside")
    return found


def faults(experiment: str, row: dict) -> list[str]:
    """What is wrong with a row by itself."""
    wrong = [n for n, kind in FIELDS.items() if not isinstance(row.get(n), kind)]
    if wrong:
        return [f"lacks, or has of another kind: {', '.join(wrong)}"]
    found = []
    if row["experiment"] != experiment:
        found.append(f"is of the experiment {row['experiment']!r}")
    if row["key"] != store.canonical(row["config"]) or row["seed"] != row["config"].get("seed"):
        found.append("its key or seed is not that of its configuration")
    if row["status"] not in ("ok", "failed"):
        found.append(f"has the unknown status {row['status']!r}")
    if row["code"] != golden.version(experiment):
        found.append(f"was made under version {row['code']}, now {golden.version(experiment)}")
    if row["config"].get("machine", row["device"]) != row["device"]:
        found.append(f"was timed for {row['config']['machine']} and ran on {row['device']}")
    return found


def beside(experiment: str, recorded: list[dict], fresh: list[dict]) -> list[str]:
    """What speaks against rows beside those that are recorded."""
    current, found = golden.current(experiment, recorded), []
    known = [(r["config"], set(r["metrics"])) for r in current.values()]
    known += [(config, set(numbers)) for config, numbers in golden.kept(experiment)["values"]]
    fields = {frozenset(config) for config, _ in known}
    metrics = {name for _, names in known for name in names}
    for row in fresh:
        key = golden.key(experiment, row)
        if key in current:
            found.append(f"{key} is recorded already, from {current[key]['device']}")
        if known and frozenset(row["config"]) not in fields:
            found.append(f"{key}: no recorded configuration has these fields")
        if not row["metrics"] or (known and not set(row["metrics"]) <= metrics):
            found.append(f"{key}: its metrics are {sorted(row['metrics'])}")
        current[key] = row
    kinds = {on_gpu(row["device"]) for row in current.values() if "machine" not in row["config"]}
    if len(kinds) > 1:
        found.append("rows of GPUs and of processors would stand in one grid")
    with contextlib.suppress(store.RecordError):
        runs.check_origin(experiment, list(current.values()))
        return found + foreign(fresh)
    return [*found, "their data or the layer's version differ from those of the recorded rows"]


def foreign(rows: list[dict]) -> list[str]:
    """Data in a form that neither the registry nor any record knows."""
    found = []
    for name, form in sorted({pair for row in rows for pair in row["data"].items()}):
        source = data.SOURCES.get(name)
        known = {layout.content for layout in source.layouts} if source else set()
        text = f'"{name}":"{form}"'
        if form not in known and not any(
            text in p.read_text() for p in modes.RESULTS.glob("*.jsonl")
        ):
            found.append(f"{name} in the form {form} is not known here")
    return found


def merge(folder: pathlib.Path) -> dict[str, int]:
    """Append the rows of a folder to the records, or refuse and change nothing; experiment -> rows appended."""
    found, fresh, recorded, problems = gathered(folder), {}, {}, []
    with contextlib.ExitStack() as locks:
        for name, rows in found.items():
            if not golden.place(name).is_file():
                problems.append(f"{name}: no experiment of this checkout has that name")
                continue
            path = modes.RESULTS / f"{name}.jsonl"
            locks.enter_context(store.only_writer(path))
            if store.parse(path)[1]:
                raise LabError(f"{path.name} ends in a torn line: a full run sets it aside")
            recorded[name] = golden.read(name, unsealed=True)
            there = {row["digest"] for row in recorded[name]}
            new = {row["digest"]: row for row in rows if row["digest"] not in there}.values()
            wrong = [f"a row {text}" for row in new for text in faults(name, row)]
            fresh[name] = [row for row in new if row.get("status") == "ok"]
            wrong = wrong or beside(name, recorded[name], fresh[name])
            problems += [f"{name}: {text}" for text in wrong]
        if problems:
            raise LabError(_refusal(folder, problems))
        for name, rows in fresh.items():
            store.append(modes.RESULTS / f"{name}.jsonl", *rows)
            golden.sign(name, recorded[name] + rows)
    return {name: len(rows) for name, rows in fresh.items()}


def _refusal(folder: pathlib.Path, problems: list[str]) -> str:
    lines = [f"{folder} is not merged, the records are as they were:", *problems[:SHOWN]]
    return "\n  ".join([*lines, *([f"and {len(problems) - SHOWN} more"] * (len(problems) > SHOWN))])


def main(arguments: list[str]) -> None:
    asked = argparse.ArgumentParser(prog="lab merge", description=__doc__)
    asked.add_argument("folder", type=pathlib.Path)
    counts = Counter(merge(asked.parse_args(arguments).folder))
    for name, count in counts.items():
        print(f"{name}: {count} rows appended")
