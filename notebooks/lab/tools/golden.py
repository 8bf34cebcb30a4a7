"""Golden files anew: ``python -m lab.tools.golden NOTEBOOK [EXPERIMENT ...]`` (`make golden`), for numbers that changed on purpose.

The notebook is run small; the numbers of these experiments (of all that have none, if none is named) become the golden ones. If
they moved, a new version begins, and a full run trains what no longer counts. What other threads and other instructions change
is the tolerance: the notebook is run small once more for each of `VARIANTS`.
"""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
import tempfile

from .. import modes
from ..modes import NOTEBOOKS
from ..records import golden

MARGIN = 10  # times the largest difference that was measured
ROUGH = 0.05  # a relative difference from which on a number is taken for a time or for noise, and not compared
VARIANTS = (
    {"OMP_NUM_THREADS": "1"},
    {"OMP_NUM_THREADS": "2"},
    {"OMP_NUM_THREADS": "1", "ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"},
)


def small(notebook: pathlib.Path, variant: dict[str, str], folder: pathlib.Path) -> dict[str, list]:
    """Experiment -> what it gives in a smoke run of its notebook."""
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    script = folder / f"{notebook.stem}.py"
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    script.write_text("\n\n".join(code), encoding="utf-8")
    (folder / "found").mkdir()
    where = {"PYTHONPATH": os.pathsep.join([str(modes.ROOT), str(NOTEBOOKS)]), "MPLBACKEND": "Agg"}
    where |= {"NDL_MODE": "smoke", "NDL_GOLDEN_TO": str(folder / "found")}
    command = [sys.executable, str(script)]
    environment = os.environ | where | variant
    subprocess.run(command, cwd=NOTEBOOKS, env=environment, check=True, stdout=subprocess.DEVNULL)
    return {p.stem: json.loads(p.read_text()) for p in (folder / "found").glob("*.json")}


def tolerance(found: list[list], others: list[list[list]]) -> dict[str, float | None]:
    """For each metric `MARGIN` times the largest difference to the other runs; None where there is nothing to compare."""
    spread: dict[str, float] = {}
    for other in others:
        for (_, before), (_, after) in zip(found, other):
            for metric, value in before.items():
                size = golden.difference(value, after.get(metric), 1e-9)
                spread[metric] = max(size, spread.get(metric, 0.0))
    return {
        metric: None if size > ROUGH else float(f"{MARGIN * size:.1e}")
        for metric, size in sorted(spread.items())
        if MARGIN * size > golden.LEAST
    }


def main(name: str, *wanted: str) -> None:
    notebook = next(path for path in modes.chapters() if name in modes.slug(path))
    runs = []
    for variant in VARIANTS:
        with tempfile.TemporaryDirectory() as folder:
            runs.append(small(notebook, variant, pathlib.Path(folder)))
    for experiment, found in runs[0].items():
        known = golden.kept(experiment)
        if experiment in wanted or not (wanted or known["values"]):
            moved = golden.moved(known, found)
            counts = (
                [str(len(known["counts"]) + 1)] if moved and known["values"] else known["counts"]
            )
            fresh = {
                "counts": counts,
                "tolerance": tolerance(found, [r[experiment] for r in runs[1:]]),
            }
            golden.write(experiment, known | fresh | {"values": found})
            print(f"{experiment}: version {counts[0]}", *moved[:1], sep=", ")


if __name__ == "__main__":
    main(*sys.argv[1:])
