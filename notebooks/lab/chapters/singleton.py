"""Chapter 50: NdLinear where an axis has length one, in three kinds of models."""

from __future__ import annotations

from collections.abc import Mapping

import pandas as pd

from ..page import figures
from ..stats import interval


def draw_differences(axes, panels: Mapping[str, Mapping[str, pd.Series]]) -> None:
    """Paired differences, a panel for each unit, a row for each comparison: every seed a point, mean and 95 % interval."""
    look = figures.colour("ndlinear")
    for axis, (unit, rows) in zip(axes, panels.items()):
        for place, found in enumerate(rows.values()):
            faint = 0.45 if len(found) <= 10 else 0.12
            axis.plot(found, [place + 0.15] * len(found), "o", color=look, alpha=faint, ms=4)
            figures.intervals(axis, place - 0.1, interval(found), "ndlinear")
        figures.rows(axis, [f"{name}, {len(x)} seeds" for name, x in rows.items()])
        axis.set_xlabel(unit)
