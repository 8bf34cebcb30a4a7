"""How much a full run may do: NDL_BUDGET_S ends it before a limit of time, `make reproduce` runs a part of one experiment."""

from __future__ import annotations

import json
import os
import pathlib
import time
from collections.abc import Iterator
from dataclasses import dataclass

from ..modes import LabError

BEGAN = time.monotonic()  # of this process, as near as a module can tell
LEFT_OUT: list[str] = []  # what the budget kept from running


class Done(SystemExit):
    """The chosen part of an experiment has run; the notebook stops here with status 0."""

    def __init__(self, rows: int):
        super().__init__(0)
        self.rows = rows


def seconds_left() -> float:
    """What is left of NDL_BUDGET_S, counted from the start of the process; infinite where it is not set."""
    text = os.environ.get("NDL_BUDGET_S", "").strip()
    if not text:
        return float("inf")
    try:
        return float(text) - (time.monotonic() - BEGAN)
    except ValueError:
        raise LabError(f"NDL_BUDGET_S={text!r} is not a number of seconds") from None


def within(groups: list) -> Iterator:
    """The groups of runs that the budget allows: none is begun that would not finish.

    The estimate is the longest group of this experiment so far; the first one is begun if any time is left.
    """
    longest = 0.0
    for at, group in enumerate(groups):
        if seconds_left() <= longest:
            LEFT_OUT.append(f"{len(groups) - at} of {len(groups)} groups")
            return
        began = time.monotonic()
        yield group
        longest = max(longest, time.monotonic() - began)


class Ended(SystemExit):
    """The budget of time is spent; what it left out is said, and the notebook stops with status 0."""

    def __init__(self, name: str, missing: int):
        super().__init__(0)
        print(
            f"{name}: NDL_BUDGET_S is spent; {missing} runs are left for the next time "
            f"({LEFT_OUT[-1]}). What has finished is on disk."
        )


@dataclass(frozen=True)
class Only:
    """The part of one experiment that `make reproduce` asks for."""

    experiment: str
    values: dict[str, str]
    folder: pathlib.Path

    def chosen(self, config: dict) -> bool:
        """Whether a configuration has these values, written as text; "0|1|2" means any of them."""
        return all(str(config.get(key)) in value.split("|") for key, value in self.values.items())

    def note_code(self, code: str) -> None:
        """Write down the fingerprint of the experiment as it is now, for the tool that asked."""
        (self.folder / "code.txt").write_text(code, encoding="utf-8")


def only_experiment() -> Only | None:
    """What NDL_ONLY asks for, as `lab.tools.reproduce` writes it."""
    text = os.environ.get("NDL_ONLY", "")
    if not text:
        return None
    asked = json.loads(text)
    return Only(asked["experiment"], asked["values"], pathlib.Path(asked["folder"]))
