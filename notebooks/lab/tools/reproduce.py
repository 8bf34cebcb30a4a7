"""Run a recorded experiment again: ``python -m lab.tools.reproduce EXPERIMENT [KEY=VALUE ...] [--adopt]`` (in notebooks/).

The notebook that owns the experiment runs up to its record, and there only the configurations that have the values named, such
as ``radius-bump width=16 "seed=0|1|2"``, are run, into a folder of their own. For each configuration and metric the mean over seeds
of the new runs must then lie in the 95 % interval of the recorded ones. Times are not judged: ``make bench`` measures those.

With ``--adopt``, rows recorded by earlier code count as rows of the present code if all means agree and what ran again executes
every changed statement; the file of its canary says what was run again. Records are never changed.
"""

from __future__ import annotations

import ast
import json
import pathlib
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator

import pandas as pd

from .. import modes
from ..modes import NOTEBOOKS, LabError
from ..records import canary, store
from ..records.budget import DARK, NOTE, Only
from ..records.store import canonical, parse
from ..stats import interval
from . import cells

ROUNDING = 1e-6  # relative: what the interval of equal values allows
FEWEST_SEEDS = 3  # from which on an interval is asked, not equality
TIMES = re.compile(  # their numbers are times
    r"speed(?!-memory).*|overhead-(time|peers)|cnn-latency|scaling-steps|structured-time"
)


def owner(experiment: str) -> pathlib.Path:
    """The notebook that records an experiment."""
    for path in modes.chapters():
        code = cells.script(path)
        if re.search(r"lab\.(record|whole)\(", code) and any(
            re.fullmatch(name, experiment) for name in _names(ast.parse(code))
        ):
            return path
    raise LabError(
        f"no notebook records {experiment!r}; recorded are {', '.join(p.stem for p in modes.RESULTS.glob('*.jsonl'))}"
    )


def _names(tree: ast.AST) -> Iterator[str]:
    """Every text in a script that can name an experiment, as a pattern: f"ucr-{name}" is any name that begins so."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield re.escape(node.value)
        elif isinstance(node, ast.JoinedStr) and isinstance(node.values[0], ast.Constant):
            parts = [
                re.escape(part.value) if isinstance(part, ast.Constant) else "[a-z0-9-]+"
                for part in node.values
            ]
            if re.fullmatch(r"[a-z0-9]+-", node.values[0].value):
                yield "".join(parts)


def rerun(experiment: str, folder: pathlib.Path, only: dict[str, str] | None = None) -> list[dict]:
    """The rows of the chosen configurations, run again into ``folder``."""
    notebook = owner(experiment)
    recorded = parse(modes.RESULTS / f"{experiment}.jsonl")[0]
    wanted = Only(experiment, only or {}, folder)
    chosen = [row for row in recorded if wanted.chosen(row["config"])]
    if not chosen:
        raise LabError(
            f"no recorded row of {experiment!r} has {only}; the first one is {recorded[0]['config']}"
        )
    print(f"{experiment}: {len(chosen)} of {len(recorded)} rows are run again by {notebook.name}")
    _run_notebook(experiment, only or {}, folder)
    again = parse(folder / f"{experiment}.jsonl")[0]
    if not again:
        raise LabError(
            f"{notebook.name} names none of these rows: they are recorded beyond its grid"
        )
    return again


def _run_notebook(
    experiment: str, values: dict[str, str], folder: pathlib.Path, stdout: int | None = None
) -> None:
    """Run the notebook of an experiment up to its record, and there the configurations with these values, into ``folder``."""
    notebook = owner(experiment)
    file = folder / f"{notebook.stem}.py"
    file.write_text(cells.script(notebook), encoding="utf-8")
    environment = cells.up_to(experiment, values, folder)
    command = [sys.executable, str(file)]
    subprocess.run(command, cwd=NOTEBOOKS, env=environment, check=True, stdout=stdout)


def present_code(experiment: str) -> str:
    """The fingerprint that rows of an experiment would carry today; runs nothing of it."""
    with tempfile.TemporaryDirectory() as folder:
        _run_notebook(experiment, {"seed": "none"}, pathlib.Path(folder), subprocess.DEVNULL)
        note = pathlib.Path(folder, f"{experiment}{NOTE}")
        if not note.is_file():
            raise LabError(f"{owner(experiment).name} does not ask for {experiment} here")
        return json.loads(note.read_text(encoding="utf-8"))["code"]


def against(experiment: str, recorded: list[dict], again: list[dict]) -> pd.DataFrame:
    """One row per configuration and metric: the recorded mean and interval, the new mean, and whether it lies inside.

    Recorded runs that were not run again, such as seeds beyond the notebook's own, are left aside. Of several rows with one
    configuration the newest counts.

    Raises:
        LabError: a configuration was run again that is not recorded, or with other seeds.
    """
    without = _fields_of_old_rows(recorded, again)
    old_rows = {_key(row, without): row for row in recorded if row["status"] == "ok"}
    failed = [row for row in again if row["status"] != "ok"]
    if failed:
        raise LabError(f"{failed[0]['key']}: this run failed with {failed[0]['error']!r}")
    missing = [row["key"] for row in again if row["key"] not in old_rows]
    if missing:
        raise LabError(f"{missing[0]} is not recorded, so there is nothing to compare it with")
    table = []
    for kind, new in _by_kind(again).items():
        old = [old_rows[row["key"]] for row in new]
        for metric in new[0]["metrics"]:
            values = [[row["metrics"][metric] for row in rows] for rows in (old, new)]
            table.append((kind, metric, *_compared(*values)))
    columns = ["configuration", "metric", "recorded", "low", "high", "again", "equal", "inside"]
    return pd.DataFrame(table, columns=columns)


def _compared(old: list, new: list) -> tuple:
    """Recorded mean, its interval, the new mean, whether they are equal, and whether the new one lies inside.

    Words, and numbers of fewer than three seeds, whose interval says little, must be equal.
    """
    if not all(isinstance(value, (int, float)) for value in old + new):
        return old[0], old[0], old[0], new[0], old == new, old == new
    mean, low, high = interval(old)
    if len(old) < FEWEST_SEEDS:
        low = high = mean
    now = interval(new)[0]
    slack = ROUNDING * abs(mean)
    return mean, low, high, now, now == mean, low - slack <= now <= high + slack


def _fields_of_old_rows(recorded: list[dict], again: list[dict]) -> list[str]:
    """Fields that recorded configurations hold and new ones do not: revisions that were once raised by hand."""
    fields = set(again[0]["config"])
    return sorted({name for row in recorded for name in row["config"]} - fields)


def _key(row: dict, without: list[str]) -> str:
    return canonical({k: v for k, v in row["config"].items() if k not in without})


def _by_kind(rows: list[dict], without: tuple | list = ()) -> dict[str, list[dict]]:
    """Rows by configuration without seed and without some other fields."""
    kinds: dict[str, list[dict]] = {}
    for row in rows:
        kind = _key(row, ["seed", *without])
        kinds.setdefault(kind, []).append(row)
    return kinds


def untried(experiment: str, recorded: list[dict], again: list[dict], dark: list) -> str:
    """What speaks against adopting rows after a part of them ran again: code that the part does not execute, in words."""
    known = canary.kept(experiment)
    if "dark" in known:
        problems = canary.unseen(known["dark"], dark)
        return (
            problems[0].replace("its smoke run does not", "what ran again did not")
            if problems
            else ""
        )
    without = _fields_of_old_rows(recorded, again)
    missing = _by_kind(recorded, without).keys() - _by_kind(again).keys()
    return f"{len(missing)} configurations did not run again: {min(missing)}" if missing else ""


def adopt(experiment: str, recorded: list[dict], again: list[dict], shown: str) -> None:
    """Enter into the file of its canary that rows of earlier code count as rows of the present code.

    Only the newest earlier code is adopted: what was stale before stays stale.
    """
    without = _fields_of_old_rows(recorded, again)
    enter(experiment, recorded, again[-1]["code"], shown, without)


def enter(experiment: str, recorded: list[dict], new: str, shown: str, without: list[str]) -> None:
    """From now on the newest recorded code, and what counted as it, counts as the present one."""
    if store.current(experiment, recorded[-1])[0] == new:
        print(f"{experiment}: its rows are current, nothing to adopt")
        return
    canary.supersede(experiment, new, recorded[-1]["code"], shown, without)


def main(arguments: list[str]) -> int:
    """Exit status 0 when every mean lies inside its interval."""
    adopting = "--adopt" in arguments
    arguments = [a for a in arguments if a != "--adopt"]
    if not arguments or not all("=" in a for a in arguments[1:]):
        raise SystemExit(__doc__)
    experiment, only = arguments[0], dict(a.split("=", 1) for a in arguments[1:])
    if TIMES.fullmatch(experiment):
        raise LabError(f"{experiment} holds times, which no second run repeats: use `make bench`")
    with tempfile.TemporaryDirectory() as folder:
        again = rerun(experiment, pathlib.Path(folder), only)
        dark = json.loads(pathlib.Path(folder, f"{experiment}{DARK}").read_text(encoding="utf-8"))
    recorded = parse(modes.RESULTS / f"{experiment}.jsonl")[0]
    table = against(experiment, recorded, again)
    outside = table[~table["inside"]]
    found = (
        f"{len(again)} runs, {len(table)} means; {table['equal'].sum()} equal to the last digit, "
        f"{table['inside'].sum()} inside the recorded 95 % interval, {len(outside)} outside"
    )
    print(f"{experiment}: {found}")
    if len(outside):
        print(outside.to_string(index=False))
    elif adopting and untried(experiment, recorded, again, dark):
        print(f"not adopted: {untried(experiment, recorded, again, dark)}; run more of it")
        return 1
    elif adopting:
        adopt(experiment, recorded, again, f"{' '.join(arguments[1:]) or 'all rows'}: {found}")
    return int(len(outside) > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
