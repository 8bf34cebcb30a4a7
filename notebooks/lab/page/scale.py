"""Which rows a page shows and judges by: those of the printed scale or of a smaller one, those of this or that device."""

from __future__ import annotations

import os
from collections.abc import Callable

import pandas as pd

from .. import machine
from ..modes import mode
from ..records import budget, runs, store
from ..records.profiles import RUNS_ON_A_PROCESSOR
from ..records.runs import Experiment, record
from .show import say


def deciding(scales: dict[str, list[dict]], run: Callable, **options) -> tuple[str, pd.DataFrame]:
    """The experiment that decides and its rows: the largest scale that is recorded as a whole.

    A scale counts as soon as every row of its grid is recorded by the present code, all of them on one kind of device (GPU or
    processor) and with one rounding of matrix products; half a grid is never looked at. The last scale is the one that the book
    was written with: it is refused when rows are missing, and it alone is run in smoke and full mode. NDL_SCALE=printed runs the
    first one in full mode, and so does ``make gpu``.

    Args:
        scales: experiment -> grid, from the printed scale down. run, options: as for `lab.record`.
    """
    names = list(scales)
    only = budget.only_experiment()
    for name in scales:
        if only and only.asks_for(name):
            record(name, scales[name], run, **options)  # ends here where this one alone is run
    if mode() == "smoke":
        return names[-1], record(names[-1], scales[names[-1]], run, **options)
    if mode() == "full" and os.environ.get("NDL_SCALE", "").strip() == "printed":
        record(names[0], scales[names[0]], run, **options)
    for name in names[:-1]:
        rows = _current(name, scales[name], run, options)
        if len(rows) == len(scales[name]) and _alike(rows):
            return name, runs.frame(rows)
        say(
            f"*{name}*, a larger scale: {len(rows)} of {len(scales[name])} rows are recorded; not used."
        )
    return names[-1], record(names[-1], scales[names[-1]], run, **options)


def _current(name: str, grid: list[dict], run: Callable, options: dict) -> list[dict]:
    known = {key: options[key] for key in ("data", "together", "timed") if key in options}
    return runs.recorded_part(Experiment(name, run, **known), grid)


def on_gpu(device: str) -> bool:
    """Whether the device of a row, as `lab.machine.device` names it, is a GPU."""
    return not RUNS_ON_A_PROCESSOR.search(device)


def _alike(rows: list[dict]) -> bool:
    """Whether rows were made on one kind of device and with one rounding of matrix products."""
    return len({(on_gpu(row["device"]), row.get("tf32")) for row in rows}) == 1


def on_devices(
    name: str, grid_of: Callable[[str, str], list[dict]], run: Callable, **options
) -> pd.DataFrame:
    """What is recorded of an experiment that measures GPUs, from all of them, and a sentence that says what is open.

    In full mode on a machine with a GPU (or where NDL_DEVICE names a device) the missing rows of that device are run.

    Args:
        grid_of: (the device's name, device of torch) -> grid; both belong into each configuration, as ``machine`` and ``device``.
    Returns:
        One line per run, as from `lab.record`; an empty table where nothing is recorded yet.
    """
    place = "cpu" if mode() == "smoke" else machine.accelerator()
    only = budget.only_experiment()
    asked = only is not None and only.asks_for(name)
    if asked or mode() == "smoke" or (mode() == "full" and place and only is None):
        place = place or "cpu"
        return record(name, grid_of(machine.machine(place), place), run, **options)
    found = []
    for there, device in _devices(name):
        grid = grid_of(there, device)
        rows = _current(name, grid, run, options)
        say(f"{there}: {len(rows)} of {len(grid)} rows of `{name}` are recorded.")
        found += rows
    if not found:
        say(
            f"**Open:** no row of `{name}` comes from a GPU yet. Where there is one, `make gpu` or a full run adds them "
            "([how to run it](../book/how-to-run.md))."
        )
    return runs.frame(found)


def _devices(name: str) -> list[tuple[str, str]]:
    """The GPUs that rows of an experiment name, in the order of the rows."""
    configs = [row["config"] for row in store.read(name)]
    return list(dict.fromkeys((config["machine"], config["device"]) for config in configs))


def places(frame: pd.DataFrame) -> str:
    """Where runs took place, as text to stand beside their numbers: "NVIDIA H200 (40 runs), AMD EPYC, 1 threads (10 runs)"."""
    counts = frame["device"].value_counts(sort=False)
    return ", ".join(f"{device} ({n} runs)" for device, n in counts.items())
