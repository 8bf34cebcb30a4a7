"""Numbers in prose: each is tied to a cell that computes it, by `lab.quote`, or is a definition by one of a few rules."""

import ast
import functools
import json
import re

import lab
import pytest
from lab import LabError, modes
from lab.page import quote

# Pages whose numbers are all tied; the others follow as they are rewritten.
TIED = (
    "10_one_layer",
    "11_kronecker",
    "12_cost_and_order",
    "15_step_size",
    "20_capacity",
    "21_separability",
    "22_approximation",
    "24_generalisation",
    *modes.REPORTS,
    "71_all_claims",
)
FIELD = re.compile(r"\{[^{}]*\}")
VALUE = r"([\w.,+-]+)"
DEFINITIONS = {
    "code": r"(?s)```.*?```|`[^`]*`",
    "mathematics": r"(?s)\$\$.*?\$\$|\$[^$\n]*\$",
    "addresses, comments and tags": r"(?s)\]\([^)]*\)|https?://\S+|<!--.*?-->|<[^>]*>",
    "sources": r"(?s)\n## References\n.*",
    "numbers of chapters, and of what the paper or the book counts": r"(?i)\[E?\d\d ·|\b(?:chapters?|sections?|theorems?|corollary|"
    r"lemma|proposition|figures?|tables?|equations?|exercises?|parts?|appendix|algorithm|steps?|modes?|rows?|columns?|lines?|version)\s[\d.]+(?:\([a-z]\))?"
    r"(?:(?:,| and| or| to|–)\s?[\d.]+)*",
    "numbers of a list": r"(?m)^\s*\d+\.\s",
    "dates": r"\b\d{1,2} (?:January|February|March|April|May|June|July|August|September|October|November|December)\b|\b(?:19|20)\d\d\b",
    "versions": r"\b\d+\.\d+\.\d+\b",
    "shapes": r"\d+(?:\s?×\s?\d+)+|\(\d+(?:, ?\d+)*,?\)",
    "names that end or begin with a number": r"(?<![\w.])\d+[A-Za-z-][\w-]*|[A-Za-z][\w-]*[-@_]?\d[\w.-]*",
    "the level of an interval": r"\b9[05789](?:\.\d)? %(?=[^.]{0,20}interval)",
}


def undefined(text: str) -> str:
    """Prose in which what is a definition is blank."""
    for pattern in DEFINITIONS.values():
        text = re.sub(pattern, lambda found: " " * len(found[0]), text)
    return text


def numbers(text: str) -> list[tuple[int, int]]:
    """Where the numbers of a text begin and end."""
    return [found.span() for found in re.finditer(r"\d[\d,]*(?:\.\d+)?", undefined(text))]


def quotes(slug: str, page: str = "") -> list[str]:
    """The phrases that a notebook quotes from itself or, with ``page``, from that file."""
    cells = modes.NOTEBOOKS / f"{slug}.ipynb"
    found = []
    for source in lab_code(cells):
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "lab.quote":
                named = {k.arg: ast.literal_eval(k.value) for k in node.keywords}
                if named.get("page", "") == page:
                    found.append(ast.literal_eval(node.args[0]))
    return found


def lab_code(path) -> list[str]:
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return ["".join(c["source"]) for c in cells if c["cell_type"] == "code"]


def covered(text: str, phrases: list[str]) -> set[int]:
    """The places of a text that stand where a quoted phrase has a value."""
    places: set[int] = set()
    for phrase in phrases:
        fixed = [
            re.escape(quote.plain(part)).replace(r"\ ", r"\s+") for part in FIELD.split(phrase)
        ]
        for found in re.finditer(VALUE.join(fixed), text.replace("**", "  ")):
            for group in range(1, len(found.groups()) + 1):
                places |= set(range(*found.span(group)))
    return places


def untied(text: str, phrases: list[str]) -> list[str]:
    """The numbers of a text that no quoted phrase covers, with the words around them."""
    text = text.replace("\N{MINUS SIGN}", "-")
    tied = covered(text, phrases)
    loose = [(a, b) for a, b in numbers(text) if a not in tied]
    return [" ".join(text[max(a - 40, 0) : b + 40].split()) for a, b in loose]


@functools.cache
def of_page(slug: str) -> list[str]:
    return untied(quote.prose(slug), quotes(slug))


@pytest.mark.parametrize("slug", TIED)
def test_every_number_of_a_page_is_tied(slug):
    assert not of_page(slug), "\n".join(of_page(slug))


def test_definitions_are_no_numbers_to_tie():
    text = """1. In chapter 12, on 23 November 2026, CIFAR-10 with 32×32×32 entries, `x = 3`, $N = 2$, float32,
    Theorem 20.8, [11 · Kronecker](11_kronecker.ipynb), a 95 % t interval.\n\n## References\n\n- (1999) 10.1000/3"""
    assert not numbers(text)


def test_a_number_that_nothing_covers_is_found():
    text = "It is 24 times as large, **3,072 weights** and −0.5 points."
    assert len(untied(text, [])) == 3
    phrases = ["{} times as large", "{:,} weights", "{:+.1f} points"]
    assert not untied(text, phrases)
    assert len(untied(text, ["24 times as large"])) == 3, "a typed number ties nothing"


@pytest.fixture
def page(tmp_path, monkeypatch):
    monkeypatch.setattr(modes, "ROOT", tmp_path)
    monkeypatch.setenv("NDL_MODE", "replay")
    (tmp_path / "p.md").write_text("It is **24 times\nas large**, −0.5 points.", encoding="utf-8")
    return "p.md"


def test_a_quote_fails_where_the_page_says_another_number(page, monkeypatch):
    lab.quote("{:.0f} times as large", 24.2, page=page)
    lab.quote("{:.1f} points", -0.5, page=page)
    with pytest.raises(LabError, match=r"p\.md does not say '25 times as large'.*correct"):
        lab.quote("{:.0f} times as large", 25, page=page)
    monkeypatch.setenv("NDL_MODE", "smoke")
    lab.quote("{:.0f} times as large", 25, page=page)


def test_the_footer_looks_up_what_its_notebook_quotes(monkeypatch, capsys):
    monkeypatch.setenv("NDL_MODE", "replay")
    lab.quote("{:,} weights", 3_073)
    with pytest.raises(LabError, match="does not say '3,073 weights'"):
        lab.footer("10_one_layer")
    lab.footer("10_one_layer")  # nothing is left
