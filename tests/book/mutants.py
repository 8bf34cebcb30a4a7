"""Numbers changed at random in prose and in the ledger, one at a time, and how many of the changes are refused.

``python tests/book/mutants.py [SEED...]`` changes for each seed 60 numbers (bar: 58 refused) and makes 20 edits of words (bar: none
refused), in pages whose numbers are tied and in the ledger. Of a notebook it runs the code once, to have the phrases that it quotes; that
takes a few minutes. It ends with 1 where a bar is missed.
"""

import contextlib
import copy
import io
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

NUMBERS, WORDS = 60, 20
HARMLESS = (
    (r"\bbut\b", "yet"),
    (r", and\b", " and"),
    (r"\bshows\b", "tells"),
    (r"\bis\b", "was"),
    (r"\bwith\b", "having"),
    (r"\bthe ", ""),
    (r"\bthat\b", "which"),
    (r"\babout\b", "roughly"),
    (r"\beach\b", "every single"),
    (r"\bneeds\b", "requires"),
)


def phrases(slug: str) -> list[tuple]:
    """What a notebook quotes from itself: its code is run, and the footer keeps the phrases."""
    os.chdir(modes.NOTEBOOKS)
    found: list[tuple] = []
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
        unsaid = not all(quote.says(text, *phrase) for phrase in self.told)
        return unsaid or bool(ties.untied(text, ties.quotes(self.page)))


class Claim:
    """A claim that a mutant changes."""

    def __init__(self, claim: dict):
        self.claim, self.page = claim, f"claim {claim['id']}"
        texts = {field: text for field, text in claim.items() if isinstance(text, str)}
        self.texts = {field: text for field, text in texts.items() if " " in text}
        self.seal = seals.seal(claim)

    def refused(self, field: str, text: str) -> bool:
        changed = copy.deepcopy(self.claim) | {field: text}
        sealed = seals.seal(changed) == self.seal
        return not sealed or bool(ties.strangers(changed) or ties.unsaid(changed))


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


def changed_part(old: str, new: str) -> str:
    """Where an edit changed a text, with some words around it."""
    at = next(i for i, (a, b) in enumerate(zip(old, new)) if a != b)
    return new[max(at - 40, 0) : at + 40]


def measured(seed: int, pages: list[Prose], claims: list[Claim]) -> bool:
    """Make the edits of a seed, say what came of them, and whether a bar is missed."""
    chance, missed = random.Random(seed), []
    for some in (pages, claims):
        drawn = {(one.texts[field], a): (one, field, a, b) for one, field, a, b in spots(some)}
        for one, field, a, b in chance.sample(list(drawn.values()), NUMBERS // 2):
            text = one.texts[field]
            changed = text[:a] + another(text[a:b], chance) + text[b:]
            if not one.refused(field, changed):
                missed.append(f"{one.page} {field}: {changed[max(a - 40, 0) : b + 20]!r}")
    edits = [edit for one in [*pages, *claims] for edit in worded(one, chance)]
    alarms = [
        f"{one.page} {field}: {changed_part(one.texts[field], text)!r}"
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
    return len(missed) > 2 or bool(alarms)


def main(seeds: list[int]) -> int:
    pages = [Prose(page) for page in (*ties.NOTEBOOKS, *ties.PAGES)]
    claims = list(map(Claim, ledger.claims()))
    return int(max(measured(seed, pages, claims) for seed in seeds))


if __name__ == "__main__":
    sys.exit(main([int(seed) for seed in sys.argv[1:]] or [0]))
