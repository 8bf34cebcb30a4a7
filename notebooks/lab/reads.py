"""What a chapter reads while it runs: files of the project, and entries of the ledger one by one.

With NDL_READS=<file> each is written there, a line each, so that the builder of the book can tell which chapters a changed
file or claim concerns. Without it nothing is recorded.
"""

from __future__ import annotations

import importlib.util
import os
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
LEDGER = "book/paper/claims.yml"  # noted entry by entry, not as a file
SUFFIXES = (".py", ".csv", ".yml", ".json", ".jsonl", ".bib", ".mplstyle")

_seen: set[str] = set()


def note(kind: str, name: str) -> None:
    """Write down that something was read: kind "file", "claim", "claims of" or "claims"."""
    target = os.environ.get("NDL_READS", "")
    line = f"{kind}\t{name}\n"
    if target and line not in _seen:
        _seen.add(line)
        with open(target, "a", encoding="utf-8") as file:
            file.write(line)


def _on_event(event: str, arguments: tuple) -> None:
    if event != "open" or not isinstance(arguments[0], (str, bytes, os.PathLike)):
        return
    name = os.fsdecode(arguments[0])
    if name.endswith(".pyc"):
        try:
            name = importlib.util.source_from_cache(name)
        except ValueError:
            return
    if name.startswith(str(ROOT)) and name.endswith(SUFFIXES):
        relative = pathlib.Path(name).relative_to(ROOT).as_posix()
        if relative != LEDGER and not relative.startswith((".", "book/_build")):
            note("file", relative)


if os.environ.get("NDL_READS"):
    for early in ("__init__.py", "reads.py"):
        note("file", f"notebooks/lab/{early}")
    sys.addaudithook(_on_event)
