"""Run a recorded experiment again: ``python -m lab.tools.reproduce EXPERIMENT [KEY=VALUE ...] [--adopt]`` (in notebooks/).

The notebook that owns the experiment runs up to its record, and there only the configurations that have the values named, such
as ``radius-bump width=16 depth=2``, are run, into a folder of their own. For each configuration and metric the mean over seeds
of the new runs must then lie in the 95 % interval of the recorded ones. Times are not judged: ``make bench`` measures those.

With ``--adopt``, rows recorded by earlier code count as rows of the present code if all means agree: the table of migrations gets
an entry that says what was run again. Records are never changed.
"""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
import tempfile

import pandas as pd

from .. import modes
from ..modes import NOTEBOOKS, ROOT, LabError
from ..records import store
from ..records.budget import Only
from ..records.store import canonical, parse
from ..stats import interval

ROUNDING = 1e-6  # relative: what the interval of equal values allows
TIMES = ("speed", "overhead-time", "cnn-latency")  # experiments whose numbers are times


def owner(experiment: str) -> pathlib.Path:
    """The notebook that records an experiment."""
    for path in sorted(NOTEBOOKS.glob("[0-9][0-9]_*.ipynb")):
        code = script(path)
        if "lab.record(" in code and f'"{experiment}"' in code:
            return path
    raise LabError(
        f"no notebook records {experiment!r}; recorded are {', '.join(p.stem for p in modes.RESULTS.glob('*.jsonl'))}"
    )


def script(notebook: pathlib.Path) -> str:
    """The code cells of a notebook as one script; pages use no magics."""
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    return "\n\n".join("".join(c["source"]) for c in cells if c["cell_type"] == "code") + "\n"


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
    file = folder / f"{notebook.stem}.py"
    file.write_text(script(notebook), encoding="utf-8")
    asked = {"experiment": experiment, "values": only or {}, "folder": str(folder)}
    environment = os.environ | {
        "NDL_MODE": "full",
        "NDL_ONLY": json.dumps(asked),
        "MPLBACKEND": "Agg",
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(NOTEBOOKS)]),
    }
    subprocess.run([sys.executable, str(file)], cwd=NOTEBOOKS, env=environment, check=True)
    again = parse(folder / f"{experiment}.jsonl")[0]
    if not again:
        raise LabError(
            f"{notebook.name} names none of these rows: they are recorded beyond its grid"
        )
    return again


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
            mean, low, high = interval([row["metrics"][metric] for row in old])
            now = interval([row["metrics"][metric] for row in new])[0]
            slack = ROUNDING * abs(mean)
            inside = low - slack <= now <= high + slack
            table.append((kind, metric, mean, low, high, now, now == mean, inside))
    columns = ["configuration", "metric", "recorded", "low", "high", "again", "equal", "inside"]
    return pd.DataFrame(table, columns=columns)


def _fields_of_old_rows(recorded: list[dict], again: list[dict]) -> list[str]:
    """Fields that recorded configurations hold and new ones do not: revisions that were once raised by hand."""
    fields = set(again[0]["config"])
    return sorted({name for row in recorded for name in row["config"]} - fields)


def _key(row: dict, without: list[str]) -> str:
    return canonical({k: v for k, v in row["config"].items() if k not in without})


def _by_kind(rows: list[dict]) -> dict[str, list[dict]]:
    """Rows by configuration without seed."""
    kinds: dict[str, list[dict]] = {}
    for row in rows:
        kind = canonical({k: v for k, v in row["config"].items() if k != "seed"})
        kinds.setdefault(kind, []).append(row)
    return kinds


def adopt(experiment: str, recorded: list[dict], again: list[dict], shown: str) -> None:
    """Enter into the table of migrations that rows of earlier code count as rows of the present code.

    Only the newest earlier code is adopted: what was stale before stays stale.
    """
    new = again[-1]["code"]
    old = store.current(experiment, recorded[-1])[0]
    if old == new:
        print(f"{experiment}: its rows are current, nothing to adopt")
        return
    path = modes.RESULTS / store.MIGRATIONS
    table = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    entry = {"old": old, "new": new, "shown by": shown}
    without = _fields_of_old_rows(recorded, again)
    if without:
        entry["without"] = without
    table.setdefault(experiment, []).append(entry)
    text = json.dumps(dict(sorted(table.items())), indent=1, ensure_ascii=False) + "\n"
    fresh = path.with_suffix(".tmp")
    fresh.write_text(text, encoding="utf-8")
    fresh.replace(path)


def main(arguments: list[str]) -> int:
    """Exit status 0 when every mean lies inside its interval."""
    adopting = "--adopt" in arguments
    arguments = [a for a in arguments if a != "--adopt"]
    if not arguments or not all("=" in a for a in arguments[1:]):
        raise SystemExit(__doc__)
    experiment, only = arguments[0], dict(a.split("=", 1) for a in arguments[1:])
    if experiment.startswith(TIMES):
        raise LabError(f"{experiment} holds times, which no second run repeats: use `make bench`")
    with tempfile.TemporaryDirectory() as folder:
        again = rerun(experiment, pathlib.Path(folder), only)
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
    elif adopting:
        adopt(experiment, recorded, again, f"{' '.join(arguments[1:]) or 'all rows'}: {found}")
    return int(len(outside) > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
