"""NDL_BUDGET_S ends a full run before a limit of time."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

from ..modes import LabError

BEGAN = time.monotonic()  # of this process, as near as a module can tell


def seconds_left() -> float:
    """What is left of NDL_BUDGET_S, counted from the start of the process; infinite where it is not set."""
    text = os.environ.get("NDL_BUDGET_S", "").strip() or "inf"
    try:
        return float(text) - (time.monotonic() - BEGAN)
    except ValueError:
        raise LabError(f"NDL_BUDGET_S={text!r} is not a number of seconds") from None


def within(groups: list, recorded: list[dict]) -> Iterator:
    """The groups of runs that the budget allows: none is begun that would not finish.

    The estimate is the longest group of this experiment so far, here or by its recorded rows; before any is known, the first one
    is begun if any time is left.
    """
    longest = max(
        (row.get("seconds", 0.0) * row.get("together", 1) for row in recorded), default=0.0
    )
    for group in groups:
        if seconds_left() <= longest:
            return
        began = time.monotonic()
        yield group
        longest = max(longest, time.monotonic() - began)
