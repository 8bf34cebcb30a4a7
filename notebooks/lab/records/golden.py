"""Which recorded rows count: those of the version that the golden file of their experiment names.

results/golden/<experiment>.json holds what the experiment gives at its smallest size, with the tolerance that other threads and
kernels need, and the versions under which rows count; the first one is today's, and new rows carry it. Every smoke run must
give these numbers. Who changes them on purpose takes them anew (`make golden`); if they moved, a new version begins, and a full
run trains what is missing, or the file says for what reason the rows are the same. What a small run cannot show, rows themselves
do: `again` runs some of them once more.

The file also seals the record: how many rows it has, and a digest over them all. Runs and merges write it, after the row itself,
so that a process killed in between leaves rows that are not sealed yet. Replay refuses those, the next full run checks and seals
them; what is not as it was sealed (a row edited, struck, doubled, put elsewhere) both refuse.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import os
import pathlib
import statistics

from .. import modes
from .store import RecordError, canonical, key, parse, writing

LEAST = 1e-4  # relative tolerance where none is noted
PLANNED = {"macs"}  # what a layer does with one sample: its plan, which may change as seconds do


def place(name: str) -> pathlib.Path:
    return modes.RESULTS / "golden" / f"{name}.json"


@functools.lru_cache(maxsize=4)
def _rows(path: pathlib.Path, changed: int, size: int) -> tuple[dict, ...]:
    return tuple(parse(path))


@functools.lru_cache(maxsize=256)
def _parsed(path: pathlib.Path, changed: int) -> dict:
    found = json.loads(path.read_text(encoding="utf-8"))
    return found | {"values": {canonical(c): numbers for c, numbers in found["values"]}}


def kept(name: str) -> dict:
    """The golden file of an experiment; of a new one: version 1, no numbers. ``values``: configuration, as text, -> its numbers."""
    path = place(name)
    if path.is_file():
        return dict(_parsed(path, path.stat().st_mtime_ns))
    return {"counts": ["1"], "tolerance": {}, "record": seal([]), "values": {}}


def version(name: str) -> str:
    """What new rows carry in their field ``code``."""
    return kept(name)["counts"][0]


def write(name: str, content: dict) -> None:
    """Keep a golden file: a configuration a line, so that a change shows what moved."""
    lines = ",\n  ".join(f"[{own},{canonical(v)}]" for own, v in content["values"].items())
    head = "".join(f' "{k}": {canonical(v)},\n' for k, v in content.items() if k != "values")
    fresh = place(name).with_suffix(".tmp")
    with writing(place(name)):
        fresh.parent.mkdir(parents=True, exist_ok=True)
        fresh.write_text(f'{{\n{head} "values": [\n  {lines}\n ]\n}}\n', encoding="utf-8")
        os.replace(fresh, place(name))
    _parsed.cache_clear()


# -------------------------------------------------------------------------------------------------------------- the record
def seal(rows: list[dict]) -> list:
    """Number of rows and a digest over all of them, in their order."""
    whole = "".join(row["digest"] for row in rows)
    return [len(rows), hashlib.sha256(whole.encode()).hexdigest()[:32]]


def sign(name: str, rows: list[dict]) -> None:
    """Seal the rows of a record, those that are there already and these behind them."""
    if seal(rows) != kept(name)["record"] or not place(name).is_file():
        write(name, kept(name) | {"record": seal(rows)})


def read(name: str, *, unsealed: bool = False) -> list[dict]:
    """All rows of a record as runs and merges left them (a torn last line is left out).

    Args:
        unsealed: also rows behind the sealed ones, by a run that was killed before it sealed them.

    Raises:
        RecordError: it is not the record that was sealed.
    """
    path, known = modes.RESULTS / f"{name}.jsonl", kept(name)["record"]
    about = path.stat() if path.is_file() else None
    rows = list(_rows(path, about.st_mtime_ns, about.st_size)) if about else []
    if seal(rows[: known[0]]) != known:
        raise RecordError(
            f"results/{name}.jsonl is not the record that its last run left: of its first {known[0]} rows one was edited, struck, "
            "doubled or moved. Records are written by runs only: restore the file, and its golden file, from version control."
        )
    if len(rows) > known[0] and not unsealed:
        raise RecordError(
            f"results/{name}.jsonl: {len(rows) - known[0]} rows behind the first {known[0]} are not sealed: a run was killed, or "
            "they were put there by hand. If they are those of a run, NDL_MODE=full checks and seals them."
        )
    return rows


def current(name: str, rows: list[dict]) -> dict[str, dict]:
    """The runs that succeeded and count today: configuration without fields that the experiment once had -> the newest one."""
    known, found = kept(name), {}
    for row in rows:
        if row["status"] != "ok" or row["code"] not in known["counts"]:
            continue
        before = found.get(own := key(row["config"], known.get("without", ())), row)
        alike = all(before[field] == row[field] for field in ("code", "config"))
        if alike and before["digest"] != row["digest"]:
            raise RecordError(f"{name}: two runs of {own} stand under version {row['code']}")
        found[own] = row
    return found


# ----------------------------------------------------------------------------------------------------------- small runs
def values(rows: list[dict]) -> dict[str, dict]:
    """Configuration -> numbers that came out: metrics, parameters, mean and end of each column of the curve."""
    found = {}
    for row in rows:
        numbers = row["metrics"] | {n: row[n] for n in ("parameters",) if n in row}
        curve = row.get("curve") or []
        for column in sorted({n for point in curve if isinstance(point, dict) for n in point}):
            points = [p[column] for p in curve if isinstance(p.get(column), (int, float))]
            if points:
                numbers[f"{column} (mean)"] = statistics.fmean(points)
                numbers[f"{column} (end)"] = points[-1]
        short = {n: float(f"{v:.8g}") if isinstance(v, float) else v for n, v in numbers.items()}
        found[canonical(row["config"])] = dict(sorted(short.items()))
    return found


def moved(known: dict, found: dict[str, dict]) -> list[str]:
    """In words what is another number now, the worst first; values near zero are measured by the median of their metric."""
    before = known["values"]
    if before and not before.keys() & found.keys():
        return ["none of its configurations is one of the golden file"]
    sizes: dict[str, list[float]] = {}
    for numbers in before.values():
        for metric, value in numbers.items():
            sizes.setdefault(metric, []).append(abs(value) if isinstance(value, float) else 0.0)
    worst = []
    for own in before.keys() & found.keys():
        old, new = before[own], found[own]
        for metric in (old.keys() | new.keys()) - PLANNED:
            a, b = old.get(metric, "absent"), new.get(metric, "absent")
            allowed = known["tolerance"].get(metric, LEAST)
            size = difference(a, b, statistics.median(sizes.get(metric, [0.0])) / 100)
            if allowed is not None and size > allowed:
                worst.append((size, f"{metric} was {a} and is {b} at {own}"))
    return [words for _, words in sorted(worst, reverse=True)]


def unknown(known: dict, found: dict[str, dict]) -> list[str]:
    """In words which configurations of a small run a golden file with numbers does not know."""
    before = known["values"]
    return [f"{own} is new" for own in found if before and own not in before]


def difference(a, b, least: float = 0.0) -> float:
    """Relative difference of two numbers; infinite where one is none."""
    if a == b:
        return 0.0
    if not all(isinstance(v, (int, float)) and not isinstance(v, bool) for v in (a, b)):
        return math.inf
    return abs(a - b) / max(abs(a), abs(b), least)


def check(name: str, rows: list[dict]) -> None:
    """In a smoke run: the numbers must be the golden ones."""
    known, found = kept(name), values(rows)
    if problems := moved(known, found) or unknown(known, found):
        raise RecordError(
            f"{name}: its smoke run gives other numbers than its golden file: {problems[0]}; {len(problems) - 1} more. "
            f"If that is meant, `make golden` takes them anew, and rows of version {version(name)} count no more."
        )
