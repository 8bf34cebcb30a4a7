"""Run a recorded experiment again, from nothing: ``python -m lab.reproduce EXPERIMENT`` (in notebooks/).

The notebook that owns the experiment runs in full mode in a temporary copy of the tree that lacks this one record. Then, for
each configuration and metric, the mean over seeds of the new runs must lie in the 95 % interval of the recorded ones.
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


def rerun(experiment: str, folder: pathlib.Path) -> list[dict]:
    """The rows of a full run made in ``folder``, a copy of the tree without this record."""
    notebook = owner(experiment)
    shutil.copy(ROOT / "ndlinear.py", folder)
    shutil.copytree(ROOT / "book" / "paper", folder / "book" / "paper")
    shutil.copy(ROOT / "book" / "references.bib", folder / "book")
    shutil.copytree(NOTEBOOKS, folder / "notebooks", ignore=shutil.ignore_patterns(f"{experiment}.jsonl*", "*.lock"))
    command = [sys.executable, "-m", "jupyter", "nbconvert", "--log-level=ERROR", "--to", "script", notebook.name]
    subprocess.run(command, cwd=folder / "notebooks", check=True)
    environment = os.environ | {"NDL_MODE": "full", "MPLBACKEND": "Agg", "PYTHONPATH": ""}
    subprocess.run([sys.executable, f"{notebook.stem}.py"], cwd=folder / "notebooks", env=environment, check=True)
    return _parse(folder / "notebooks" / "results" / f"{experiment}.jsonl")[0]


def against(recorded: list[dict], again: list[dict]) -> pd.DataFrame:
    """One row per configuration and metric: the recorded mean and interval, the new mean, and whether it lies inside.

    Raises:
        LabError: a configuration was run again that is not recorded for the same training function, or with other seeds.
    """
    table = []
    for kind, new in _by_kind(again, again[-1]["code"]).items():
        old = _by_kind(recorded, again[-1]["code"]).get(kind, [])
        if sorted(r["seed"] for r in old) != sorted(r["seed"] for r in new):
            raise LabError(f"{kind}: seeds run again and recorded seeds differ, or the record was made by other code")
        for metric in new[0]["metrics"]:
            mean, low, high = interval([r["metrics"][metric] for r in old])
            now, slack = interval([r["metrics"][metric] for r in new])[0], ROUNDING * abs(mean)
            inside = low - slack <= now <= high + slack
            table.append((kind, metric, mean, low, high, now, now == mean, inside))
    return pd.DataFrame(
        table, columns=["configuration", "metric", "recorded", "low", "high", "again", "equal", "inside"]
    )


def _by_kind(rows: list[dict], code: str) -> dict[str, list[dict]]:
    """Newest finished rows of one training function, by configuration without seed."""
    newest = {r["key"]: r for r in rows if r["status"] == "ok" and r["code"] == code}
    kinds: dict[str, list[dict]] = {}
    for row in newest.values():
        kinds.setdefault(canonical({k: v for k, v in row["config"].items() if k != "seed"}), []).append(row)
    return kinds


def main(arguments: list[str]) -> int:
    """Exit status 0 when every mean lies inside its interval."""
    if len(arguments) != 1:
        raise SystemExit(__doc__)
    with tempfile.TemporaryDirectory() as folder:
        again = rerun(arguments[0], pathlib.Path(folder))
    table = against(_parse(RESULTS / f"{arguments[0]}.jsonl")[0], again)
    outside = table[~table["inside"]]
    print(
        f"{arguments[0]}: {len(again)} runs, {len(table)} means; {table['equal'].sum()} equal to the last digit, ",
        end="",
    )
    print(f"{table['inside'].sum()} inside the recorded 95 % interval, {len(outside)} outside")
    if len(outside):
        print(outside.to_string(index=False))
    return int(len(outside) > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
