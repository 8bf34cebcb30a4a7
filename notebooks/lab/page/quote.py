"""Numbers in sentences: a cell formats a number with the phrase around it, and the page must say so."""

from __future__ import annotations

import json
import re

from .. import modes
from ..modes import LabError, mode

FIELD = re.compile(r"\{[^{}]*\}")
VALUE = r"([\w.,+-]+)"
# phrases of the running notebook with their values, which its footer looks up
_PENDING: list[tuple] = []


def quote(phrase: str, *values: object) -> None:
    """Fail unless this notebook says a phrase with these values in it: a number in prose is tied to what it says.

    Its footer looks the phrases up. A smoke run has other numbers and looks up none.

    Args:
        phrase: with a field of `str.format` for each value, such as ``"{:.0f} times as fast forward"``.
    """
    if mode() != "smoke":
        _PENDING.append((phrase, *values))


def look_up(slug: str) -> None:
    """Fail unless a notebook says each phrase that it has quoted so far."""
    phrases, _PENDING[:] = list(_PENDING), []
    said = prose(slug) if phrases else ""
    for phrase, *values in phrases:
        if not says(said, phrase, *values):
            raise LabError(
                f"notebooks/{slug}.ipynb does not say {phrase.format(*values)!r}: correct the sentence, or the cell that quotes it"
            )


def says(text: str, phrase: str, *values: object) -> bool:
    """Whether a text says a phrase with these values, where it says the phrase."""
    fields = zip(FIELD.findall(phrase), values, strict=True)
    told = tuple(field.format(value) for field, value in fields)
    found = (match.groups() for match in places(bare(text), phrase))
    return told in {tuple(value.strip(".,") for value in values) for values in found}


def places(text: str, phrase: str) -> list[re.Match]:
    """Where a bare text says a phrase: its words as they are, whatever values in their places, with its commas or without."""
    return list(re.finditer(r"\s+".join(map(_pattern, bare(phrase).split())), text))


def _pattern(word: str) -> str:
    """A word of a phrase as a pattern: a group for each value, and a comma behind it or none."""
    return VALUE.join(map(re.escape, FIELD.split(word.rstrip(",")))) + ",?"


def prose(slug: str) -> str:
    """The captions of a notebook's figures and its Markdown, which ends with the sources."""
    cells = json.loads((modes.NOTEBOOKS / f"{slug}.ipynb").read_text(encoding="utf-8"))["cells"]
    parts = ["".join(c["source"]) for c in cells if c["cell_type"] == "markdown"]
    figures = [c["metadata"].get("mystnb", {}).get("figure", {}) for c in cells]
    return "\n\n".join([*(figure.get("caption", "") for figure in figures), *parts])


def bare(text: str) -> str:
    """Text without emphasis and with one kind of minus sign."""
    return text.replace("\N{MINUS SIGN}", "-").replace("**", "")
