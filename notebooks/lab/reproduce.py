"""Run a recorded experiment again, from nothing: ``python -m lab.reproduce EXPERIMENT [KEY=VALUE ...]`` (in notebooks/).

The notebook that owns the experiment runs in full mode in a temporary copy of the tree that lacks this one record, or those of
its rows whose configuration has the values named: ``radius-bump width=16 depth=2``. Then, for each configuration and metric,
the mean over seeds of the new runs must lie in the 95 % interval of the recorded ones.
"""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

import pandas as pd

from .modes import NOTEBOOKS, RESULTS, ROOT, LabError
from .records import _parse, canonical
from .stats import interval

ROUNDING = 1e-6  # relative: what the interval of equal values allows


def owner(experiment: str) -> pathlib.Path:
    """The notebook that records an experiment."""
    for path in sorted(NOTEBOOKS.glob("[0-9][0-9]_*.ipynb")):
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        code = "\n".join("".join(c["source"]) for c in cells if c["cell_type"] == "code")
        if "lab.record(" in code and f'"{experiment}"' in code:
            return path
    raise LabError(
        f"no notebook records {experiment!r}; recorded are {', '.join(p.stem for p in RESULTS.glob('*.jsonl'))}"
    )


def chosen(config: dict, only: dict[str, str]) -> bool:
    """Whether a configuration has these values, written as text."""
    return all(str(config.get(key)) == value for key, value in only.items())


def rerun(experiment: str, folder: pathlib.Path, only: dict[str, str] | None = None) -> list[dict]:
    """The rows of a full run made in ``folder``, a copy of the tree without this record or without the rows that are `chosen`."""
    notebook, record = owner(experiment), f"{experiment}.jsonl"
    (folder / "book").mkdir(parents=True, exist_ok=True)
    recorded = _parse(RESULTS / record)[0]
    kept = [row for row in recorded if not chosen(row["config"], only or {})]
    if len(kept) == len(recorded):
        raise LabError(
            f"no recorded row of {experiment!r} has {only}; the first one is {recorded[0]['config']}"
        )
    print(
        f"{experiment}: {len(recorded) - len(kept)} of {len(recorded)} rows left out, {notebook.name} runs in full mode"
    )
    shutil.copy(ROOT / "ndlinear.py", folder)
    shutil.copytree(ROOT / "book" / "paper", folder / "book" / "paper")
    shutil.copy(ROOT / "book" / "references.bib", folder / "book")
    shutil.copytree(
        NOTEBOOKS,
        folder / "notebooks",
        ignore=shutil.ignore_patterns(f"{experiment}.jsonl*", "*.lock"),
    )
    command = [
        sys.executable,
        "-m",
        "jupyter",
        "nbconvert",
        "--log-level=ERROR",
        "--to",
        "script",
        notebook.name,
    ]
    subprocess.run(command, cwd=folder / "notebooks", check=True)
    (folder / "notebooks" / "results" / record).write_text(
        "".join(canonical(row) + "\n" for row in kept), encoding="utf-8"
    )
    environment = os.environ | {"NDL_MODE": "full", "MPLBACKEND": "Agg", "PYTHONPATH": ""}
    subprocess.run(
        [sys.executable, f"{notebook.stem}.py"],
        cwd=folder / "notebooks",
        env=environment,
        check=True,
    )
    again = _parse(folder / "notebooks" / "results" / record)[0][len(kept) :]
    if not again:
        raise LabError(
            f"{notebook.name} names none of the rows that were left out: they are recorded beyond its grid"
        )
    return again


def against(recorded: list[dict], again: list[dict]) -> pd.DataFrame:
    """One row per configuration and metric: the recorded mean and interval, the new mean, and whether it lies inside.

    Recorded runs that the notebook's grid does not name, such as seeds beyond its own, are left aside.

    Raises:
        LabError: a configuration was run again that is not recorded for the same training function, or with other seeds.
    """
    table, keys = [], {row["key"] for row in again}
    recorded = [row for row in recorded if row["key"] in keys]
    for kind, new in _by_kind(again, again[-1]["code"]).items():
        old = _by_kind(recorded, again[-1]["code"]).get(kind, [])
        if sorted(r["seed"] for r in old) != sorted(r["seed"] for r in new):
            raise LabError(
                f"{kind}: seeds run again and recorded seeds differ, or the record was made by other code"
            )
        for metric in new[0]["metrics"]:
            mean, low, high = interval([r["metrics"][metric] for r in old])
            now, slack = interval([r["metrics"][metric] for r in new])[0], ROUNDING * abs(mean)
            inside = low - slack <= now <= high + slack
            table.append((kind, metric, mean, low, high, now, now == mean, inside))
    return pd.DataFrame(
        table,
        columns=["configuration", "metric", "recorded", "low", "high", "again", "equal", "inside"],
    )


def _by_kind(rows: list[dict], code: str) -> dict[str, list[dict]]:
    """Newest finished rows of one training function, by configuration without seed."""
    newest = {r["key"]: r for r in rows if r["status"] == "ok" and r["code"] == code}
    kinds: dict[str, list[dict]] = {}
    for row in newest.values():
        kinds.setdefault(
            canonical({k: v for k, v in row["config"].items() if k != "seed"}), []
        ).append(row)
    return kinds


def main(arguments: list[str]) -> int:
    """Exit status 0 when every mean lies inside its interval."""
    if not arguments or not all("=" in a for a in arguments[1:]):
        raise SystemExit(__doc__)
    experiment, only = arguments[0], dict(a.split("=", 1) for a in arguments[1:])
    with tempfile.TemporaryDirectory() as folder:
        again = rerun(experiment, pathlib.Path(folder) / "ndlinear-book", only)
    recorded = [
        row for row in _parse(RESULTS / f"{experiment}.jsonl")[0] if chosen(row["config"], only)
    ]
    table = against(recorded, again)
    outside = table[~table["inside"]]
    print(
        f"{experiment}: {len(again)} runs, {len(table)} means; {table['equal'].sum()} equal to the last digit, ",
        end="",
    )
    print(f"{table['inside'].sum()} inside the recorded 95 % interval, {len(outside)} outside")
    if len(outside):
        print(outside.to_string(index=False))
    return int(len(outside) > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
