"""Numbers changed at random in prose and in the ledger, one at a time, and how many of the changes are refused.

``python tests/book/mutants.py [SEED]`` changes 60 numbers (bar: 58 refused) and makes 20 edits of words (bar: none refused), in pages
whose numbers are tied and in the ledger. Of a notebook it runs the code once, to have the phrases that it quotes; that takes a few
minutes. It ends with 1 where the bar of numbers is missed. Edits of words are listed only: a word inside a quoted phrase is part of the
tie, and about one edit of ten meets one.
"""

import contextlib
import copy
import io
import json
import os
import random
import re
import sys

os.environ.update(NDL_MODE="replay", MPLBACKEND="Agg")

import lab
import ties
from lab import modes
from lab.page import ledger, quote
from lab.tools import scripts, seals

GUARDS = dict.fromkeys(("its fact cells", "its computed phrases", "its seal"), 0)
FIELDS = (
    "statement",
    "rule",
    "scope",
    "condition",
    "correction",
    "would_take",
    "reason",
    "direction_only",
)
NUMBERS, WORDS = 60, 20
HARMLESS = (
    (r"\bbut\b", "yet"),
    (r", and\b", " and"),
    (r"\bshows\b", "tells"),
    (r"\bis\b", "was"),
    (r"\bwith\b", "having"),
)


def phrases(slug: str) -> list[str]:
    """What a notebook quotes from itself: its code is run, and the footer keeps the phrases."""
    os.chdir(modes.NOTEBOOKS)
    found: list[str] = []
    footer, lab.footer = lab.footer, lambda slug: found.extend(quote._PENDING)
    code = scripts.source(modes.NOTEBOOKS / f"{slug}.ipynb")
    with contextlib.redirect_stdout(io.StringIO()):
        exec(compile(code, slug, "exec"), {"__name__": "__main__"})
    quote._PENDING.clear()
    lab.footer = footer
    return found


class Prose:
    """A page that a mutant changes; its faults are those of the tests, and of the build for a notebook."""

    def __init__(self, page: str):
        self.page = page
        self.notebook = page in ties.NOTEBOOKS
        self.told = phrases(page) if self.notebook else []
        text = quote.prose(page) if self.notebook else (modes.ROOT / page).read_text("utf-8")
        self.texts = {"": text}

    def refused(self, field: str, text: str) -> bool:
        if not self.notebook:
            return bool(ties.faults(self.page, text))
        unsaid = [phrase for phrase in self.told if not quote.says(text, phrase)]
        return bool(unsaid or ties.untied(text, ties.quotes(self.page)))


class Claim:
    """A claim that a mutant changes; `GUARDS` counts which guard sees it."""

    def __init__(self, claim: dict):
        self.claim, self.page = claim, f"claim {claim['id']}"
        self.texts = {field: claim[field] for field in FIELDS if claim.get(field)}
        self.seal = seals.seal(claim)

    def refused(self, field: str, text: str) -> bool:
        changed = copy.deepcopy(self.claim) | {field: text}
        reasons = {
            "its fact cells": bool(ties.strangers(changed)),
            "its computed phrases": bool(ties.unsaid(changed)),
            "its seal": seals.seal(changed) != self.seal,
        }
        for reason, found in reasons.items():
            GUARDS[reason] += found
        return any(reasons.values())


def another(number: str, chance: random.Random) -> str:
    """The number with one digit changed or, once in four times, one more in front."""
    if chance.random() < 0.25:
        return chance.choice("123456789") + number
    place = chance.choice([i for i, sign in enumerate(number) if sign.isdigit()])
    digit = chance.choice([d for d in "0123456789" if d != number[place]])
    return number[:place] + digit + number[place + 1 :]


def with_other_words(text: str, chance: random.Random) -> str | None:
    """One harmless edit outside code, links and headings; None where none fits."""
    plain = re.sub(r"(?ms)^```.*?^```|^#.*?$|\]\([^)]*\)|`[^`]*`", lambda m: "#" * len(m[0]), text)
    spots = [(m.span(), new) for old, new in HARMLESS for m in re.finditer(old, plain)]
    if not spots:
        return None
    (a, b), new = chance.choice(spots)
    return text[:a] + new + text[b:]


def spots(some: list) -> list[tuple]:
    """Every number of some pages or claims that is no definition."""
    return [
        (one, field, a, b)
        for one in some
        for field, text in one.texts.items()
        for a, b in ties.numbers(text)
    ]


def worded(one, chance: random.Random) -> list[tuple]:
    """An edit of words for each text but rules, in which each word counts."""
    texts = {field: text for field, text in one.texts.items() if field != "rule"}
    edits = [(one, field, with_other_words(text, chance)) for field, text in texts.items()]
    return [edit for edit in edits if edit[2]]


def share() -> str:
    """How many numbers of all prose stand in pages that are tied."""
    every = {modes.slug(p): quote.prose(modes.slug(p)) for p in modes.chapters()}
    files = [modes.ROOT / "README.md", *(modes.ROOT / "book").glob("*.md")]
    every |= {str(p.relative_to(modes.ROOT)): p.read_text("utf-8") for p in files}
    main = {
        page: len(ties.numbers(text)) for page, text in every.items() if "evidence/" not in page
    }
    tied = sum(count for page, count in main.items() if page in {*ties.NOTEBOOKS, *ties.PAGES})
    return f"{tied} of {sum(main.values())} numbers outside the evidence and the ledger stand in tied pages"


def main(seed: int) -> int:
    chance = random.Random(seed)
    pages = [Prose(page) for page in (*ties.NOTEBOOKS, *ties.PAGES)]
    claims = list(map(Claim, ledger.claims()))
    missed = []
    for some in (pages, claims):
        drawn = {(one.texts[field], a): (one, field, a, b) for one, field, a, b in spots(some)}
        for one, field, a, b in chance.sample(list(drawn.values()), NUMBERS // 2):
            text = one.texts[field]
            changed = text[:a] + another(text[a:b], chance) + text[b:]
            if not one.refused(field, changed):
                missed.append(f"{one.page} {field}: {changed[max(a - 40, 0) : b + 20]!r}")
    edits = [edit for one in [*pages, *claims] for edit in worded(one, chance)]
    alarms = [
        f"{one.page} {field}"
        for one, field, text in chance.sample(edits, WORDS)
        if one.refused(field, text)
    ]
    print(
        *(f"not refused: {one}" for one in missed),
        *(f"false alarm: {one}" for one in alarms),
        sep="\n",
    )
    print(
        f"seed {seed}: {NUMBERS - len(missed)} of {NUMBERS} numbers refused; {len(alarms)} of {WORDS} edits of words refused"
    )
    print(f"in the ledger by guard, all that see a change: {json.dumps(GUARDS)}; {share()}")
    return int(len(missed) > 2)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if sys.argv[1:] else 0))
