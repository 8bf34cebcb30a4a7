"""The paper's printed numbers, read from book/paper/tables."""

from __future__ import annotations

import functools

import pandas as pd

from ..modes import PAPER, LabError, read_yaml


@functools.cache
def _table(name: str) -> pd.DataFrame:
    path = PAPER / "tables" / f"{name}.csv"
    if not path.is_file():
        known = ", ".join(sorted(p.stem for p in path.parent.glob("*.csv")))
        raise LabError(f"no table {name!r} of the paper; there are: {known}")
    return pd.read_csv(path, dtype=str, keep_default_na=False)


def facts(table: str, **where) -> pd.DataFrame:
    """Rows of a table of facts, ``value`` and ``std`` as numbers where it has them; ``where`` selects by column (a list means any of)."""
    frame = _table(table)
    for column, wanted in where.items():
        if column not in frame:
            raise LabError(
                f"table {table!r} has no column {column!r}; it has: {', '.join(frame.columns)}"
            )
        values = wanted if isinstance(wanted, (list, tuple, set)) else [wanted]
        frame = frame[frame[column].isin([str(v) for v in values])]
    numbers = {
        column: pd.to_numeric(frame[column]) for column in ("value", "std") if column in frame
    }
    return frame.assign(**numbers).reset_index(drop=True)


def fact(table: str, **where) -> float:
    """The one printed number that ``where`` selects."""
    found = facts(table, **where)
    if len(found) != 1:
        raise LabError(
            f"{table} {where} selects {len(found)} cells, not one: {'check' if found.empty else 'add'} columns"
        )
    return float(found["value"].iloc[0])


@functools.cache
def protocols() -> dict[str, dict]:
    """The printed protocol of every experiment: settings with their places, and what the text does not state."""
    return read_yaml(PAPER / "protocols.yml")["experiments"]


def setting(experiment: str, name: str):
    """The printed value of one setting of an experiment."""
    found = protocols().get(experiment, {}).get("settings", {})
    if name not in found:
        raise LabError(
            f"no setting {name!r} is printed for {experiment!r}; there are: {', '.join(found) or 'none'}"
        )
    return found[name]["value"]
