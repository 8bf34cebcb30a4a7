"""Which rows a page shows and judges by: those of a whole grid, those of this or that device."""

from __future__ import annotations

import re
from collections.abc import Callable

import pandas as pd

from .. import machine
from ..modes import LabError, mode
from ..records import golden, runs
from ..records.runs import record
from .show import say

RUNS_ON_A_PROCESSOR = re.compile(r", \d+ threads$")  # how `machine.processor` ends


def recorded(*names: str) -> pd.DataFrame:
    """The runs that the records of some experiments hold: of each configuration the last one made by the newest code.

    For a figure that stands under a chapter's answer, before the code that made its runs. Nothing is checked here: the cell
    with `lab.record` refuses stale rows, and the cells with `lab.verdict` judge.
    """
    frames = []
    for name in names:
        found = list(golden.current(name, golden.read(name)).values())
        if not found:
            raise LabError(f"results/{name}.jsonl holds no runs; run the chapter in full mode")
        frames.append(runs.frame(found))
    return pd.concat(frames, ignore_index=True)


def on_gpu(device: str) -> bool:
    """Whether the device of a row, as `lab.machine.device` names it, is a GPU."""
    return not RUNS_ON_A_PROCESSOR.search(device)


def on_devices(
    name: str, grid_of: Callable[[str, str], list[dict]], run: Callable, **options
) -> dict[str, pd.DataFrame]:
    """What is recorded of an experiment that measures GPUs: device -> its runs. A sentence says what is open.

    In full mode on a machine with a GPU (or where NDL_DEVICE names a device) the missing rows of that device are run.

    Args:
        grid_of: (the device's name, device of torch) -> grid; both belong into each configuration, as ``machine`` and ``device``.
        run, options: as for `lab.record`.
    """
    place = "cpu" if mode() == "smoke" else machine.accelerator()
    if mode() == "smoke" or (mode() == "full" and place):
        here = machine.machine(place) if mode() == "full" else "some machine"
        return {here: record(name, grid_of(here, place), run, **options)}
    found = {}
    configs = [row["config"] for row in golden.read(name)]
    for there, device in dict.fromkeys((c["machine"], c["device"]) for c in configs):
        grid = grid_of(there, device)
        rows = runs.recorded_part(name, grid, run, **options)
        if len(rows) < len(grid):
            say(f"{there}: {len(rows)} of {len(grid)} rows of `{name}` are recorded.")
        if rows:
            found[there] = runs.frame(rows)
    if not found:
        say(
            f"**Open:** no row of `{name}` comes from a GPU yet. Where there is one, a full run adds them."
        )
    return found


def places(frame: pd.DataFrame) -> str:
    """Where runs took place, as text to stand beside their numbers: "NVIDIA H200 (40 runs), AMD EPYC, 1 threads (10 runs)"."""
    counts = frame["device"].value_counts(sort=False)
    return ", ".join(f"{device} ({n} runs)" for device, n in counts.items())


def whole(name: str, grid: list[dict], run: Callable, **options) -> pd.DataFrame | None:
    """The rows of a grid as by `lab.record`; in replay None and a sentence as long as the grid is not complete, or not from one
    kind of device (GPU or processor) with one rounding of matrix products: a part of it judges nothing."""
    if mode() != "replay":
        return record(name, grid, run, **options)
    rows = runs.recorded_part(name, grid, run, **options)
    kinds = {(on_gpu(row["device"]), row.get("tf32")) for row in rows}
    if len(rows) == len(grid) and len(kinds) == 1:
        return runs.frame(rows)
    say(
        f"**Open:** {len(rows)} of {len(grid)} runs of `{name}` are recorded; a part judges nothing."
    )
    return None
