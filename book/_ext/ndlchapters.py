"""Chapter numbers in front of every title, and links wherever a page names a chapter, a theorem or a term of the glossary.

The number is that of the notebook's file name, so a chapter that is added, renamed or given another title needs no other change.
"""

import html
import pathlib
import re

from docutils import nodes
from lab import modes
from lab.page import ledger
from sphinx.transforms import SphinxTransform

# "chapter 12", "chapters 10, 30 and 32", "chapters 30 to 33", "Theorem 11.2"
CHAPTER = re.compile(
    r"\bchapter\s+(\d\d)\b|\bchapters\s+\d\d\b(?:(?:,?\s+(?:and|or|to)\s+|,\s+|–)\d\d\b)*",
    re.IGNORECASE,
)
THEOREM = re.compile(r"\bTheorem\s+(\d\d)\.(\d+)\b")
# markup, and elements in which there can be no link or none is wanted, from their start to their end
MARKUP = r"""(<!--.*?-->
    |<(?P<tag>a|button|code|h[1-6]|option|pre|script|style|svg|textarea|title{more})\b.*?</(?P=tag)>
    |<(?:[^<>"']|"[^"]*"|'[^']*')*>)"""
FLAGS = re.DOTALL | re.IGNORECASE | re.VERBOSE
AROUND = re.compile(MARKUP.format(more=""), FLAGS)
AROUND_PROSE = re.compile(MARKUP.format(more="|table|figcaption|summary|dt"), FLAGS)
# words of the glossary that everyday language and this book use in other senses too
EVERYDAY = {"axis", "claim", "full", "mode", "record", "smoke"}
FORWARD = """<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Moved</title>
<link rel="canonical" href="{target}"><meta http-equiv="refresh" content="0; url={target}"></head>
<body><p>This page is part of <a href="{target}">another one</a> now.</p></body></html>
"""


def number(docname: str) -> str:
    """The number of a chapter, '12' for notebooks/12_cost_and_order; '' for any other page."""
    match = re.fullmatch(r"notebooks/(\d\d)_\w+", docname)
    return match[1] if match else ""


def shown_number(docname: str) -> str:
    """What stands before a title: '12', or 'E12' for the evidence of that chapter; '' for any other page."""
    match = re.fullmatch(r"notebooks/(evidence/)?(\d\d)_\w+", docname)
    return ("E" if match[1] else "") + match[2] if match else ""


def by_number(docnames) -> dict[str, str]:
    """Number of a chapter -> its page; that of a chapter that became part of another one -> the other one."""
    found = {number(name): name for name in sorted(docnames) if number(name)}
    merged = {name: f"notebooks/{modes.lecture(name)}" for name in modes.MERGED}
    return {name[:2]: page for name, page in merged.items() if page in docnames} | found


def forward(book: pathlib.Path) -> None:
    """Pages at the addresses of those that became part of another one; they lead there."""
    moved = {name: modes.lecture(name) for name in modes.MERGED}
    pages = {f"notebooks/{old}": f"{new}.html" for old, new in moved.items() if new != old}
    pages |= {"book/deviations": "claims.html", "book/status": "report.html"}
    pages |= {"notebooks/evidence/13_memory": "12_cost_and_order.html"}
    pages |= {"notebooks/evidence/62_scaling": "61_overhead.html"}
    pages |= {"notebooks/evidence/65_race": "64_benchmark.html"}
    pages |= {"notebooks/evidence/72_should_you_use_it": "../72_should_you_use_it.html"}
    ids = [claim["id"] for claim in ledger.claims()]  # each had a page of its own
    pages |= {f"claims/{id}": f"../book/claims.html#{id}" for id in ids}
    for name, target in pages.items():
        page = book / f"{name}.html"
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text(FORWARD.format(target=target), encoding="utf-8")


class NumberedTitle(SphinxTransform):
    """Writes the number before the title, for side bar, cards and browser tab alike; anchors stay as they are."""

    default_priority = 830  # after MyST has named the anchors, before Sphinx collects the titles

    def apply(self, **kwargs) -> None:
        found = shown_number(self.env.docname)
        title = next(self.document.findall(nodes.title), None)
        if found and title is not None:
            title.insert(0, nodes.Text(f"{found} · "))


def between(markup: re.Pattern, body: str, change) -> str:
    """HTML whose text, outside of what the pattern finds, is changed by a function."""
    parts, end = [], 0
    for found in markup.finditer(body):
        parts += [change(body[end : found.start()]), found[0]]
        end = found.end()
    return "".join([*parts, change(body[end:])])


def link(body: str, address: dict[str, str]) -> str:
    """HTML in which chapters and theorems that the text names are links. address: "12" or "thm-11-2" -> address."""

    def anchor(found: str, text: str) -> str:
        return f'<a href="{html.escape(address[found])}">{text}</a>' if found in address else text

    def chapter(match: re.Match) -> str:
        if match[1]:
            return anchor(match[1], match[0])
        return re.sub(r"\d\d", lambda one: anchor(one[0], one[0]), match[0])

    def change(text: str) -> str:
        text = THEOREM.sub(lambda match: anchor(f"thm-{match[1]}-{match[2]}", match[0]), text)
        return CHAPTER.sub(chapter, text)

    return between(AROUND, body, change)


def link_terms(body: str, address: dict[str, str]) -> str:
    """HTML in which the first mention of each term of the glossary, in prose, is a link. address: term -> address."""
    terms = {term.lower(): term for term in address if term not in EVERYDAY}
    if not terms:
        return body
    words = "|".join(re.escape(term) for term in sorted(terms, key=len, reverse=True))
    pattern = re.compile(rf"(?<![\w-])({words})(?=s?(?![\w-]))", re.IGNORECASE)
    used: set[str] = set()

    def mention(match: re.Match) -> str:
        term = terms[match[1].lower()]
        # a name such as TCL keeps its capitals, any other term may begin a sentence
        same = match[1] == term or (term.islower() and match[1][1:] == term[1:])
        if not same or term in used:
            return match[0]
        used.add(term)
        return f'<a class="ndl-term" href="{html.escape(address[term])}">{match[0]}</a>'

    return between(AROUND_PROSE, body, lambda text: pattern.sub(mention, text))
