"""How much a full run may do: NDL_BUDGET_S ends it before a limit of time, NDL_SHARE leaves a part of it to other processes,
and `make reproduce` and `make gpu` run one experiment or a part of it."""

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
NOTE = ".note.json"  # how the names of the files end that `Only.note` writes
DARK = ".dark.json"  # and of those that `Only.leave` writes
EVERY = "*"  # in place of an experiment: note all of a notebook, run none


class Done(SystemExit):
    """The chosen part of an experiment has run; the notebook stops here with status 0."""

    def __init__(self, rows: int):
        super().__init__(0)
        self.rows = rows


def _seconds(name: str, default: float) -> float:
    text = os.environ.get(name, "").strip()
    try:
        return float(text) if text else default
    except ValueError:
        raise LabError(f"{name}={text!r} is not a number of seconds") from None


def seconds_left() -> float:
    """What is left of NDL_BUDGET_S, counted from the start of the process; infinite where it is not set.

    NDL_UNTIL, seconds since 1970, is a limit by the clock: for processes that were started by one whose time is limited.
    """
    left = _seconds("NDL_BUDGET_S", float("inf")) - (time.monotonic() - BEGAN)
    return min(left, _seconds("NDL_UNTIL", float("inf")) - time.time())


def share() -> tuple[int, int]:
    """Which groups of runs are this process's: NDL_SHARE="2/6" is every sixth one, from the third on; all of them if not set."""
    text = os.environ.get("NDL_SHARE", "").strip() or "0/1"
    number, _, of = text.partition("/")
    if not (number.isdigit() and of.isdigit() and int(number) < int(of)):
        raise LabError(f'NDL_SHARE={text!r} is not a share such as "0/4"')
    return int(number), int(of)


def within(groups: list) -> Iterator:
    """The groups of runs that the budget allows: none is begun that would not finish.

    The estimate is the longest group of this experiment so far. Before the first one it is NDL_LONGEST_S, which `make gpu`
    takes from earlier rows; where that is not set, the first one is begun if any time is left.
    """
    longest = _seconds("NDL_LONGEST_S", 0.0)
    for at, group in enumerate(groups):
        if seconds_left() <= longest:
            LEFT_OUT.append(f"{len(groups) - at} of {len(groups)} groups")
            return
        began = time.monotonic()
        yield group
        longest = max(longest, time.monotonic() - began)


class Ended(SystemExit):
    """The budget of time is spent, or this process's share is done; what is left is said, and the notebook stops with status 0."""

    def __init__(self, name: str, missing: int):
        super().__init__(0)
        if LEFT_OUT:
            print(
                f"{name}: NDL_BUDGET_S is spent; {missing} runs are left for the next time "
                f"({LEFT_OUT[-1]}). What has finished is on disk."
            )
        else:
            print(f"{name}: this share is done; {missing} runs are those of other processes.")


@dataclass(frozen=True)
class Only:
    """The part of one experiment that `make reproduce` or `make gpu` asks for."""

    experiment: str
    values: dict[str, str]
    folder: pathlib.Path

    def chosen(self, config: dict) -> bool:
        """Whether a configuration has these values, written as text; "0|1|2" means any of them."""
        return all(str(config.get(key)) in value.split("|") for key, value in self.values.items())

    def asks_for(self, experiment: str) -> bool:
        """Whether this experiment is meant: the one that is named, or every one that the notebook has."""
        return self.experiment in (experiment, EVERY)

    def note(
        self, experiment: str, keys: list[str], data: tuple[str, ...], closure: dict[str, object]
    ) -> None:
        """Write down what an experiment is now, for the tool that asked: its code, its configurations, its data."""
        place = self.folder / f"{experiment}{NOTE}"
        if place.is_file():  # a notebook may record it in parts
            keys = [*json.loads(place.read_text(encoding="utf-8"))["keys"], *keys]
        content = {"experiment": experiment, "keys": keys, "data": list(data), **closure}
        place.write_text(json.dumps(content), encoding="utf-8")

    def leave(self, experiment: str, dark: list[list[str]]) -> None:
        """Write down what of an experiment's code was not executed."""
        place = self.folder / f"{experiment}{DARK}"
        place.write_text(json.dumps(dark), encoding="utf-8")


def only_experiment() -> Only | None:
    """What NDL_ONLY asks for, as the tools write it."""
    text = os.environ.get("NDL_ONLY", "")
    if not text:
        return None
    asked = json.loads(text)
    return Only(asked["experiment"], asked["values"], pathlib.Path(asked["folder"]))
