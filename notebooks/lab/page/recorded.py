"""Recorded runs for the figure at the head of a page."""

from __future__ import annotations

import pandas as pd

from ..modes import LabError
from ..records import runs, store


def recorded(*names: str) -> pd.DataFrame:
    """The runs that the records of some experiments hold, made by their newest code, as `lab.record` would give them.

    For a figure that stands under a chapter's answer, before the code that made its runs. Nothing is checked here: the cell
    with `lab.record` refuses stale rows, and the cells with `lab.verdict` judge.
    """
    frames = []
    for name in names:
        found = [row for row in store.read(name) if row["status"] == "ok"]
        if not found:
            raise LabError(f"results/{name}.jsonl holds no runs; run the chapter in full mode")
        codes = [store.current(name, row)[0] for row in found]
        newest = [row for row, code in zip(found, codes) if code == codes[-1]]
        frames.append(runs.frame(newest))
    return pd.concat(frames, ignore_index=True)
