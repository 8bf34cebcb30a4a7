"""Numbers in sentences: a cell formats a number with the phrase around it, and the page must say so."""

from __future__ import annotations

import json
import re

from .. import modes
from ..modes import LabError, mode

_PENDING: list[str] = []  # phrases of the running notebook, which its footer looks up


def quote(phrase: str, *values: object, page: str = "") -> None:
    """Fail unless a page says a phrase with these values in it: a number in prose is tied to what it says.

    Args:
        phrase: with a field of `str.format` for each value, such as ``"{:.0f} times as fast forward"``.
        page: address of a text file below the book's root, such as ``"README.md"``; without one it is the notebook itself.

    Raises:
        LabError: the page does not contain the phrase. A notebook's own phrases are looked up by its footer. A smoke run has
            other numbers and looks up none.
    """
    if mode() == "smoke":
        return
    said = plain(phrase.format(*values))
    if not page:
        _PENDING.append(said)
    elif not says((modes.ROOT / page).read_text(encoding="utf-8"), said):
        raise LabError(_message(page, said))


def look_up(slug: str) -> None:
    """Fail unless a notebook says each phrase that it has quoted so far."""
    phrases, _PENDING[:] = list(_PENDING), []
    if not phrases:
        return
    said = prose(slug)
    for phrase in phrases:
        if not says(said, phrase):
            raise LabError(_message(f"notebooks/{slug}.ipynb", phrase))


def says(text: str, phrase: str) -> bool:
    """Whether a text has a phrase, and no longer number or other sign where the phrase begins or ends with a number."""
    phrase = plain(phrase)
    before = r"(?<![\d+-])(?<!\d[.,])" if phrase[:1].isdigit() else ""
    behind = r"(?!\d)(?![.,]\d)" if phrase[-1:].isdigit() else ""
    return bool(re.search(before + re.escape(phrase) + behind, plain(text)))


def prose(slug: str) -> str:
    """The captions of a notebook's figures and its Markdown, which ends with the sources."""
    cells = json.loads((modes.NOTEBOOKS / f"{slug}.ipynb").read_text(encoding="utf-8"))["cells"]
    parts = ["".join(c["source"]) for c in cells if c["cell_type"] == "markdown"]
    figures = [c["metadata"].get("mystnb", {}).get("figure", {}) for c in cells]
    return "\n\n".join([*(figure.get("caption", "") for figure in figures), *parts])


def plain(text: str) -> str:
    """Text in one line, without emphasis, with one kind of minus sign and of space."""
    text = text.replace("\N{MINUS SIGN}", "-").replace("**", "")
    return re.sub(r"\s+", " ", text)


def _message(page: str, phrase: str) -> str:
    return f"{page} does not say {phrase!r}: correct the sentence, or the cell that quotes it"
