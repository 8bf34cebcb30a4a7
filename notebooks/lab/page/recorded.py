"""Recorded runs for the figure at the head of a page."""

from __future__ import annotations

import pandas as pd

from ..modes import LabError
from ..records import golden, runs


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
