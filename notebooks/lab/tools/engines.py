"""Two states of ndlinear.py side by side: ``python -m lab.tools.engines OLD.py [--adopt]`` (``make engines OLD=<commit>``).

Both are timed in the same rounds on the cases of chapter 60, forward and training, each built from the same weights. With
``--adopt``, recorded times count as times of the present file if it is as fast: the interval of the geometric mean lies within
`MARGIN` of one in both passes. The file of its canary then says what was measured.
"""

from __future__ import annotations

import importlib.util
import pathlib
import sys

import numpy as np
import torch

from .. import modes, stats, timing
from ..chapters import speed
from ..records import store
from . import reproduce

MARGIN = 0.03  # how far the geometric mean may lie from one
ROUNDS = 8
REPEATS = 15  # five left an interval as wide as the margin
BY_HAND = ("engine", "method")  # revisions that configurations of timings once held


def load(path: pathlib.Path):
    """The module in a file, under a name of its own."""
    spec = importlib.util.spec_from_file_location("earlier_ndlinear", path)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def quotients(earlier, case: speed.Case, what: str, seed: int, rounds: int) -> float:
    """Median over the rounds of (seconds of the earlier file) / (seconds of the present one)."""
    p = speed.Problem(case.dims, case.hidden, case.batch, case.outer, seed=seed)
    old = p.with_weights_of_layer(earlier.NdLinear(p.dims, p.hidden, p.outer))
    new = p.peer(p.layer)
    for made in (old, new):
        with torch.no_grad():
            made.gradient = torch.randn_like(made.forward())
    calls = {"old": speed.step(old, what), "new": speed.step(new, what)}
    with torch.set_grad_enabled(what == "training"):
        seconds = timing.rounds(calls, rounds, seed=seed)
    return float(np.median(np.divide(seconds["old"], seconds["new"])))


def compare(earlier, rounds: int = ROUNDS, repeats: int = REPEATS, cases=None) -> dict[str, tuple]:
    """For each pass: geometric mean over the cases with its interval over the repeats, and the worst case's median."""
    cases = (
        [c for n, c in speed.CASES.items() if not n.endswith("_rev")] if cases is None else cases
    )
    found = {}
    for what in ("forward", "training"):
        logs = np.log(
            [[quotients(earlier, c, what, s, rounds) for c in cases] for s in range(repeats)]
        )
        mean = np.exp(stats.interval(logs.mean(axis=1)))
        each = np.exp(np.median(logs, axis=0))
        worst = int(each.argmin())
        found[what] = (*map(float, mean), cases[worst].name, float(each[worst]))
    return found


def words(found: dict[str, tuple]) -> str:
    """The result in one line."""
    return "; ".join(
        f"{what}: {mean:.3f} [{low:.3f}, {high:.3f}] times as fast, slowest case {name} {worst:.3f}"
        for what, (mean, low, high, name, worst) in found.items()
    )


def main(arguments: list[str]) -> int:
    """Exit status 0 when both passes are as fast as before."""
    adopting = "--adopt" in arguments
    paths = [a for a in arguments if a != "--adopt"]
    if len(paths) != 1 or not pathlib.Path(paths[0]).is_file():
        raise SystemExit(__doc__)
    found = compare(load(pathlib.Path(paths[0])))
    said = f"{words(found)}; {ROUNDS} rounds, {REPEATS} repeats, {torch.get_num_threads()} threads"
    print(said)
    alike = stats.all_of(
        *[stats.inside(row[1:3], 1 - MARGIN, 1 + MARGIN) for row in found.values()]
    )
    if alike is not True:
        print(f"not within {MARGIN:.0%} of one: recorded times stay stale; run `make bench`")
        return 1
    if adopting:
        timed = sorted(p.stem for p in modes.RESULTS.glob("*.jsonl"))
        for experiment in filter(reproduce.TIMES.fullmatch, timed):
            recorded = store.read(experiment)
            without = sorted(set(recorded[-1]["config"]) & set(BY_HAND))
            try:
                code = reproduce.present_code(experiment)
            except modes.LabError as error:
                print(error)
                continue
            reproduce.enter(
                experiment, recorded, code, f"old and new ndlinear.py side by side: {said}", without
            )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
