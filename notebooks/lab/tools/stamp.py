"""The repository's address into the setup cell of every notebook: ``python -m lab stamp URL``."""

from __future__ import annotations

import re

from .. import modes
from ..modes import LabError


def stamp(url: str) -> int:
    """Write the address into every setup cell; returns how many notebooks changed."""
    if url and not re.fullmatch(r"https://[\w.-]+/[\w./-]+", url):
        raise LabError(f"{url!r} is not an https address of a git repository")
    changed = 0
    for path in modes.chapters():
        text = path.read_text(encoding="utf-8")
        new, found = re.subn(r'(?<="BOOK = \\")[^"\\]*(?=\\")', url, text)
        if found != 1:
            raise LabError(
                f"{path.name} has {found} setup cells; copy the one of 00_template.ipynb"
            )
        if new != text:
            path.write_text(new, encoding="utf-8")
            changed += 1
    return changed


def main(arguments: list[str]) -> None:
    if len(arguments) != 1:
        raise SystemExit(__doc__)
    print(f"{stamp(arguments[0])} notebooks changed")
