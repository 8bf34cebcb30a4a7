"""Bring the rows of a run elsewhere home: all of them are checked before the first one is appended."""

from __future__ import annotations

import os
import pathlib
from collections import Counter

from .. import data, modes
from ..modes import LabError
from ..page.scale import on_gpu
from ..records import store
from . import cells, plan

SHOWN = 10  # problems that a refusal lists


def merge(
    folder: pathlib.Path, names=(), without_torn: bool = False, device: str = "", forms=()
) -> None:
    """Append the rows in a folder that `lab.tools.gpu run` wrote to the project's records, or refuse and change nothing.

    Args:
        names: beginnings of experiments; none: all. without_torn: leave a line aside that was cut off while it was written.
        device: "cpu" takes rows that were made on a processor. forms: further "SET=CHECKSUM" of data that is known to be right,
            such as the publisher's own archive, which the loader verifies before it reads it.
    """
    rows = gathered(folder, without_torn)
    rows = [row for row in rows if not names or row["experiment"].startswith(tuple(names))]
    experiments = list(dict.fromkeys(row["experiment"] for row in rows))
    notes = noted(experiments, rows)
    fresh, problems = {}, []
    for experiment in experiments:
        own = [row for row in rows if row["experiment"] == experiment]
        fresh[experiment], found = checked(experiment, own, notes.get(experiment), device)
        problems += found + foreign(experiment, fresh[experiment], set(forms))
    if problems:
        raise LabError(refusal(folder, problems))
    append({experiment: own for experiment, own in fresh.items() if own})
    for experiment, own in fresh.items():
        print(report(experiment, [r for r in rows if r["experiment"] == experiment], own))


def gathered(folder: pathlib.Path, without_torn: bool) -> list[dict]:
    """The rows of a run; an identical row that stands twice counts once."""
    files = sorted(folder.glob("rows-*.jsonl"))
    if not files:
        raise LabError(f"{folder} holds no rows-*.jsonl: name the folder that `gpu run` wrote to")
    rows = {}
    for file in files:
        found, torn = store.parse(file)
        if torn and not without_torn:
            raise LabError(
                f"{file} ends in a torn line of {len(torn)} bytes, so the run was cut off while writing: let it go on into the "
                f"same folder, or merge the {len(found)} whole rows with --without-torn"
            )
        rows |= {row["digest"]: row for row in found}
    return list(rows.values())


def noted(experiments: list[str], rows: list[dict]) -> dict[str, dict]:
    """What each experiment is now, from the notebooks that record them, to which the new rows are known."""
    owners = {path: cells.words(path) & set(experiments) for path in modes.chapters()}
    notes: dict[str, dict] = {}
    for path, owned in owners.items():
        if owned:
            notes |= cells.survey(path, plan.constants_of(path), rows)
    return notes


def checked(
    experiment: str, rows: list[dict], note: dict | None, device: str
) -> tuple[list[dict], list[str]]:
    """The rows of one experiment that are to be appended, and what speaks against appending any."""
    if note is None:
        return [], [f"{experiment}: no notebook of this checkout reaches a record of that name"]
    recorded, torn = store.parse(modes.RESULTS / f"{experiment}.jsonl")
    if torn:
        return [], [f"{experiment}: its record ends in a torn line; a full run sets it aside"]
    there = {row["digest"] for row in recorded}
    ok = [row for row in rows if row["status"] == "ok" and row["digest"] not in there]
    problems = []
    for row in ok:
        problems += [f"{experiment}, {row['key']}: {text}" for text in faults(row, note, device)]
    problems += doubles(experiment, recorded, ok, note["code"])
    other = plan.elsewhere(experiment, ok[0].get("device", ""), note["keys"]) if ok else ""
    if other:
        problems.append(f"{experiment}: {other}; a grid stays on one kind of device")
    strange = {row["status"] for row in rows} - {"ok", "failed"}
    problems += [f"{experiment}: rows have the unknown status {status!r}" for status in strange]
    return ok, problems


def faults(row: dict, note: dict, device: str) -> list[str]:
    """What is wrong with a row by itself."""
    found = []
    code, key = store.current(row["experiment"], row)
    where = row.get("device", "")
    if code != note["code"]:
        found.append(f"made by other code ({code}, now {note['code']}); run it again")
    if not where:
        found.append("it names no device")
    elif not on_gpu(where) and device != "cpu":
        found.append(f"made on a processor ({where}); --device cpu takes such rows")
    if "machine" in row["config"]:
        if row["config"]["machine"] != where:
            found.append(f"it was timed for {row['config']['machine']} and ran on {where}")
    elif key not in note["keys"]:
        found.append("the notebook's grid has no such configuration")
    if set(row["data"]) != set(note["data"]):
        found.append(f"it names the data {sorted(row['data'])}, the notebook {note['data']}")
    return found


def doubles(experiment: str, recorded: list[dict], rows: list[dict], code: str) -> list[str]:
    """Configurations that are recorded already, or come twice with different results."""
    there = store.by_key(experiment, recorded, code)
    found = []
    for row in rows:
        key = store.current(experiment, row)[1]
        if key in there:
            other = there[key].get("device")
            found.append(f"{experiment}, {key}: another run of it is there already, from {other}")
        there[key] = row
    return found


def foreign(experiment: str, rows: list[dict], accepted: set[str]) -> list[str]:
    """Data sets in a form that nobody here knows, or in two forms within one experiment."""
    found, recorded = [], store.read(experiment)
    for name in sorted({name for row in rows for name in row["data"]}):
        forms = {row["data"][name] for row in rows if name in row["data"]}
        own = {row["data"][name] for row in recorded if name in row["data"]}
        strange = {f for f in forms if f"{name}={f}" not in accepted} - known_forms(name)
        if strange:
            found.append(
                f"{experiment}: made with a form of {name} that is not known here, {', '.join(sorted(strange))}; "
                "if it is the publisher's, name it with --data"
            )
        elif len(forms | own) > 1:
            found.append(
                f"{experiment}: rows with different forms of {name} would stand together, {', '.join(sorted(forms | own))}"
            )
    return found


def known_forms(name: str) -> set[str]:
    """Checksums under which a data set is known: in the registry, in the records, in the data folder."""
    source = data.SOURCES.get(name)
    known = {layout.content for layout in source.layouts if layout.content} if source else set()
    for path in modes.RESULTS.glob("*.jsonl"):
        if f'"{name}":"' in path.read_text(encoding="utf-8"):
            known |= {row["data"][name] for row in store.read(path.stem) if name in row["data"]}
    if source and not known:
        known.add(data.checksum(name))
    return known


def refusal(folder: pathlib.Path, problems: list[str]) -> str:
    more = len(problems) - SHOWN
    lines = [f"{folder} is not merged, the records are as they were:", *problems[:SHOWN]]
    return "\n  ".join(lines + ([f"and {more} more"] if more > 0 else []))


def append(rows: dict[str, list[dict]]) -> None:
    """Append rows to several records. Each file changes in one step, after all new files are on disk.

    A merge that is cut off in between is simply called again: rows that are there already are passed over.
    """
    ready = {}
    for experiment, own in rows.items():
        path = modes.RESULTS / f"{experiment}.jsonl"
        with store.only_writer(path):
            before = path.read_bytes() if path.is_file() else b""
            fresh = path.with_suffix(".merging")
            with open(fresh, "wb") as file:
                file.write(before + (b"\n" if before and not before.endswith(b"\n") else b""))
                file.writelines((store.canonical(row) + "\n").encode() for row in own)
                file.flush()
                os.fsync(file.fileno())
        ready[path] = (fresh, before)
    for path, (fresh, before) in ready.items():
        with store.only_writer(path):
            if (path.read_bytes() if path.is_file() else b"") != before:
                raise LabError(f"{path.name} was changed meanwhile: call the merge again")
            os.replace(fresh, path)


def report(experiment: str, rows: list[dict], fresh: list[dict]) -> str:
    """What came of one experiment, in a line."""
    places = ", ".join(f"{n} from {d}" for d, n in Counter(r["device"] for r in fresh).items())
    failed = sum(row["status"] == "failed" for row in rows)
    there = len(rows) - failed - len(fresh)
    text = f"{experiment}: {len(fresh)} rows appended" + (f" ({places})" if places else "")
    text += f"; {there} were there already" if there else ""
    return text + (f"; {failed} failed runs left out" if failed else "")
