"""Golden files anew: ``python -m lab golden NOTEBOOK ... [--only EXPERIMENT ...] [--same WHY | --wider]``, for numbers that changed
on purpose.

Each notebook is run small, and the numbers of its experiments become the golden ones (those named by --only, else those that have
none yet or whose numbers moved). If they moved, a new version begins, and a full run trains what no longer counts; --same keeps
the rows, and the golden file says for what reason. What other threads and other instructions change is the tolerance: the
notebook is run small once more for each of `VARIANTS`.

With --wider all golden numbers stay, and their tolerances also cover what this processor gives. That is for code whose small runs
gave these numbers on another processor: of code that has changed since it would excuse the change.
"""

from __future__ import annotations

import argparse
import pathlib
import tempfile

from ..modes import LabError, slug
from ..records import golden, store
from . import scripts

MARGIN = 10  # times the largest difference that was measured
ROUGH = 0.05  # a relative difference from which on a number is taken for a time or for noise, and not compared
VARIANTS = (
    {"OMP_NUM_THREADS": "1"},
    {"OMP_NUM_THREADS": "2"},
    {"OMP_NUM_THREADS": "1", "ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"},
)


def small(notebook: pathlib.Path, variant: dict[str, str]) -> dict[str, dict]:
    """Experiment -> what it gives in a smoke run of its notebook."""
    with tempfile.TemporaryDirectory() as folder:
        if scripts.run(notebook, "smoke", NDL_GOLDEN_TO=folder, **variant):
            raise LabError(f"{slug(notebook)} fails in smoke mode, see above; nothing is kept")
        files = pathlib.Path(folder).glob("*.jsonl")
        return {file.stem: golden.values(store.parse(file)) for file in files}


def tolerance(found: dict, others: list[dict]) -> dict[str, float | None]:
    """For each metric `MARGIN` times the largest difference to the other runs; None where there is nothing to compare."""
    spread: dict[str, float] = {}
    for other in others:
        for own in found.keys() & other.keys():
            for metric, value in found[own].items():
                size = golden.difference(value, other[own].get(metric), 1e-9)
                spread[metric] = max(size, spread.get(metric, 0.0))
    return {
        metric: None if size > ROUGH else float(f"{MARGIN * size:.1e}")
        for metric, size in sorted(spread.items())
        if MARGIN * size > golden.LEAST
    }


def renewed(name: str, known: dict, moved: list[str], same: str) -> dict:
    """The head of a golden file with other numbers: a new version, or the old one with the reason why rows still count."""
    if not (moved and known["values"]):
        return known
    if same:
        return known | {"same": [*known.get("same", ()), {"moved": moved[0], "why": same}]}
    used = {*known["counts"], *(row["code"] for row in golden.read(name))}
    newest = max((int(code) for code in used if len(code) < 6 and code.isdigit()), default=0)
    return known | {"counts": [str(newest + 1)]}


def keep(name: str, runs: list[dict], same: str) -> None:
    """Take the numbers of an experiment anew, as its first small run gives them; the others say how much they may move."""
    found, known = runs[0], golden.kept(name)
    head = renewed(name, known, golden.moved(known, found), same)
    fresh = {"tolerance": tolerance(found, runs[1:]), "values": found}
    golden.write(name, head | fresh)
    print(f"{name}: version {head['counts'][0]} counts, {len(found)} small runs")


def widen(name: str, runs: list[dict]) -> None:
    """Let the tolerances of an experiment cover what this processor gives."""
    known = golden.kept(name)
    sizes = dict(known["tolerance"])
    for metric, size in tolerance(known["values"], runs).items():
        before = sizes.get(metric, 0)
        sizes[metric] = None if None in (size, before) else max(size, before)
    if sizes != known["tolerance"]:
        golden.write(name, known | {"tolerance": dict(sorted(sizes.items()))})
        print(f"{name}: wider")


def main(arguments: list[str]) -> None:
    asked = argparse.ArgumentParser(prog="lab golden", description=__doc__)
    asked.add_argument("notebooks", nargs="+")
    asked.add_argument("--only", nargs="+", default=[], metavar="EXPERIMENT")
    asked.add_argument("--same", default="", metavar="WHY")
    asked.add_argument("--wider", action="store_true", help="only tolerances, for this processor")
    asked = asked.parse_args(arguments)
    left = set(asked.only)
    for notebook in scripts.chosen(asked.notebooks):
        each = [small(notebook, variant) for variant in VARIANTS]
        left -= each[0].keys()
        for name in sorted(set(each[0]) & set(asked.only or each[0])):
            runs = [run[name] for run in each]
            known = golden.kept(name)
            other = golden.moved(known, runs[0]) or golden.unknown(known, runs[0])
            if asked.wider:
                widen(name, runs)
            elif asked.only or other or not known["values"]:
                keep(name, runs, asked.same)
    if left:
        raise LabError(f"no small run of these notebooks records {', '.join(sorted(left))}")
