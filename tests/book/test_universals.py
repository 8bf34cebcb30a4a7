"""Sentences about every case or none: each is checked by a cell of its chapter, or says why it need not be.

Looked at are the answer of each chapter, captions and alt texts of its figures, and the right statements that the ledger
gives for its claims. universals.yml beside this file holds what has been acknowledged.
"""

import copy
import json
import pathlib
import re

import pytest
import yaml
from lab import modes
from lab.page import ledger

HERE = pathlib.Path(__file__).parent
CHAPTERS = {path.stem: path for path in sorted(modes.NOTEBOOKS.glob("*.ipynb"))}
WORDS = re.compile(
    r"\b(every|everywhere|all|always|none|no|never|neither|nobody|nothing)\b(?!-)", re.I
)
DRAWN = re.compile(
    r"\b(every|each) (seed|run|split|point) (is )?a (point|seed|short stroke)\b", re.I
)
CHECKS = re.compile(r"\bassert\b|lab\.(finding|verdict)\(")


def normal(text: str) -> str:
    """A text with single spaces, so that a quotation may run over the end of a line, and without the targets of links."""
    return " ".join(re.sub(r"\]\([^)]*\)", "]", text).split())


def texts(chapter: str, notebook: dict, claims: list[dict]) -> list[str]:
    """What a chapter says where readers look first."""
    answer = "".join(notebook["cells"][0]["source"]).partition("\n")[2].strip().split("\n\n")[0]
    found = [answer]
    for cell in notebook["cells"]:
        shown = cell["metadata"].get("mystnb", {})
        found += [shown.get("figure", {}).get("caption", ""), shown.get("image", {}).get("alt", "")]
    found += [c.get("correction") or "" for c in claims if c.get("notebook") == chapter]
    return [normal(text) for text in found if text]


def universals(text: str) -> list[tuple[int, int]]:
    """Where a text speaks of every case, of all or of none; "every seed a point" is how a figure is drawn."""
    idle = [match.span() for match in DRAWN.finditer(text)]
    found = [match.span() for match in WORDS.finditer(text)]
    return [(a, b) for a, b in found if not any(x <= a and b <= y for x, y in idle)]


def covered(text: str, place: tuple[int, int], quotations: list[str]) -> bool:
    """Whether a quotation that stands in the text holds the word at a place."""
    for quotation in quotations:
        start = text.find(quotation)
        while start >= 0:
            if start <= place[0] and place[1] <= start + len(quotation):
                return True
            start = text.find(quotation, start + 1)
    return False


def complaints(chapter: str, notebook: dict, claims: list[dict], entries: list[dict]) -> list[str]:
    """What an author still has to acknowledge, and entries that no longer fit."""
    said = texts(chapter, notebook, claims)
    quotations = [normal(entry["says"]) for entry in entries]
    found = []
    for text in said:
        for start, end in universals(text):
            if not covered(text, (start, end), quotations):
                around = text[max(0, start - 40) : end + 40]
                found.append(
                    f"{text[start:end]!r} in “…{around}…”: add an assertion and name its cell in "
                    "tests/book/universals.yml, give a reason there, or say it without"
                )
    cells = {c["id"]: "".join(c["source"]) for c in notebook["cells"] if c["cell_type"] == "code"}
    for entry, quotation in zip(entries, quotations):
        if not any(quotation in text for text in said):
            found.append(f"{quotation!r} is acknowledged but no longer said: remove the entry")
        if not universals(quotation):
            found.append(f"{quotation!r} speaks of no case in particular: remove the entry")
        if set(entry) == {"says", "cell"}:
            if not CHECKS.search(cells.get(entry["cell"], "")):
                found.append(f"{quotation!r}: the cell {entry['cell']!r} checks nothing or is gone")
        elif set(entry) != {"says", "reason"} or len(str(entry.get("reason"))) < 15:
            found.append(f"{quotation!r}: give the id of a cell, or a reason")
    return found


def acknowledged() -> dict[str, list[dict]]:
    return yaml.safe_load((HERE / "universals.yml").read_text(encoding="utf8"))


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_what_is_said_of_every_case_is_checked(chapter):
    notebook = json.loads(CHAPTERS[chapter].read_text(encoding="utf8"))
    found = complaints(chapter, notebook, ledger.claims(), acknowledged().get(chapter, []))
    assert not found, f"notebooks/{chapter}.ipynb:\n  " + "\n  ".join(found)


# --- the rule can fail -------------------------------------------------------------------------------------------

CAPTION = {"mystnb": {"figure": {"caption": "Every seed a point."}, "image": {"alt": "No gap."}}}
NOTEBOOK = {
    "cells": [
        {
            "id": "a",
            "cell_type": "markdown",
            "metadata": {},
            "source": "# T\n\nIt is\nnever worse.",
        },
        {"id": "b", "cell_type": "code", "metadata": CAPTION, "source": "assert gap == 0"},
        {"id": "c", "cell_type": "code", "metadata": {}, "source": "gap = 0"},
    ]
}
CLAIMS = [{"id": "x", "notebook": "11_t", "correction": "All of them."}]
ENTRIES = [
    {"says": "is never worse", "cell": "b"},
    {"says": "No gap", "cell": "b"},
    {"says": "All of them", "reason": "the size of the family"},
]


def test_an_acknowledged_chapter_passes():
    assert complaints("11_t", NOTEBOOK, CLAIMS, ENTRIES) == []


@pytest.mark.parametrize(
    ("number", "change", "words"),
    [
        (0, None, "'never' in"),
        (1, None, "'No' in"),
        (2, None, "'All' in"),
        (0, {"says": "is never better", "cell": "b"}, "no longer said"),
        (0, {"says": "is never worse", "cell": "c"}, "checks nothing"),
        (0, {"says": "is never worse", "cell": "z"}, "checks nothing or is gone"),
        (2, {"says": "All of them", "reason": "so"}, "give the id of a cell, or a reason"),
        (2, {"says": "All of them"}, "give the id of a cell, or a reason"),
        (0, {"says": "worse", "cell": "b"}, "no case in particular"),
    ],
)
def test_what_is_not_acknowledged_is_found(number, change, words):
    entries = copy.deepcopy(ENTRIES)
    entries[number : number + 1] = [change] if change else []
    found = complaints("11_t", NOTEBOOK, CLAIMS, entries)
    assert any(words in complaint for complaint in found), found


def test_each_use_of_a_word_has_to_be_acknowledged():
    text = "All rise, and all fall."
    assert len(universals(text)) == 2 and covered(text, universals(text)[0], ["All rise"])
    assert not covered(text, universals(text)[1], ["All rise"])


@pytest.mark.parametrize(
    "text", ["Every seed a point", "every split a point", "Every point is a seed"]
)
def test_how_a_figure_is_drawn_is_no_statement(text):
    assert universals(text) == []
