"""One switch, NDL_MODE, and the places of the book."""

from __future__ import annotations

import os
import pathlib
import sys

NOTEBOOKS = pathlib.Path(__file__).resolve().parent.parent
ROOT = NOTEBOOKS.parent
PAPER = ROOT / "book" / "paper"
RESULTS = NOTEBOOKS / "results"
MODES = ("replay", "smoke", "full")

if str(ROOT) not in sys.path:
    sys.path.insert(
        0, str(ROOT)
    )  # the book's ndlinear.py, also where a package of that name is installed


def chapters() -> list[pathlib.Path]:
    """Every notebook of the book: the main line, then the evidence."""
    found = [*NOTEBOOKS.glob("[0-9][0-9]_*.ipynb"), *NOTEBOOKS.glob("evidence/[0-9][0-9]_*.ipynb")]
    return sorted(found, key=lambda path: (path.parent != NOTEBOOKS, path.name))


def slug(path: pathlib.Path) -> str:
    """How the ledger and the cards name a notebook: "40_cnn", or "evidence/40_cnn"."""
    return f"evidence/{path.stem}" if path.parent.name == "evidence" else path.stem


class LabError(RuntimeError):
    """Something a reader can put right; the message says how."""


def mode() -> str:
    """How this process runs: ``replay`` (read records), ``smoke`` (tiny, offline, for tests) or ``full`` (train what is missing)."""
    name = os.environ.get("NDL_MODE", "").strip() or "replay"
    if name not in MODES:
        raise LabError(f"NDL_MODE={name!r} is not a mode; use one of {', '.join(MODES)}")
    return name


def pick(*, full, smoke, replay=None):
    """The value for the current mode; ``replay`` defaults to that of ``full``, so that a grid names the recorded rows."""
    return {"full": full, "smoke": smoke, "replay": full if replay is None else replay}[mode()]


def new_rows_folder() -> pathlib.Path:
    """Where full runs write new rows: NDL_RESULTS, or the project's own folder of records."""
    named = os.environ.get("NDL_RESULTS", "").strip()
    return pathlib.Path(named).expanduser().resolve() if named else RESULTS
