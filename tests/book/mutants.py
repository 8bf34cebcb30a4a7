"""Numbers changed at random in prose and in the ledger, one at a time, and how many of the changes are refused.

``python tests/book/mutants.py [SEED...]`` changes for each seed 60 numbers (bar: 58 refused) and makes 20 edits of words (bar: none
refused), in pages whose numbers are tied and in the ledger. Of a notebook it runs the code once, to have the phrases that it quotes; that
takes a few minutes. It ends with 1 where a bar is missed.
"""

import contextlib
import functools
import io
import os
import random
import re
import sys
from collections.abc import Callable
from typing import NamedTuple

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
    (r"\bis\b", "was"),
    (r"\bthe ", ""),
    (r"\babout\b", "roughly"),
    (r"\beach\b", "every single"),
)


class Text(NamedTuple):
    """A page, or a field of a claim."""

    where: str
    text: str
    refuses: Callable[
        [str], object
    ]  # whether a test, or the build, refuses another text in its place


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


def notebook_refuses(slug: str, told: list[tuple], text: str) -> bool:
    said = all(quote.says(text, *phrase) for phrase in told)
    return not said or bool(ties.untied(text, ties.quotes(slug)))


def claim_refuses(claim: dict, field: str, text: str) -> bool:
    changed = claim | {field: text}
    sealed = seals.seal(changed) == seals.seal(claim)
    return not sealed or bool(ties.strangers(changed) or ties.unsaid(changed))


def pages() -> list[Text]:
    notebooks = [
        Text(slug, quote.prose(slug), functools.partial(notebook_refuses, slug, phrases(slug)))
        for slug in ties.NOTEBOOKS
    ]
    texts = {page: (modes.ROOT / page).read_text("utf-8") for page in ties.PAGES}
    others = [Text(page, texts[page], functools.partial(ties.faults, page)) for page in texts]
    return notebooks + others


def fields() -> list[Text]:
    return [
        Text(f"{claim['id']} {field}", text, functools.partial(claim_refuses, claim, field))
        for claim in ledger.claims()
        for field, text in claim.items()
        if isinstance(text, str) and " " in text
    ]


def with_another_number(text: str, chance: random.Random) -> str:
    """One digit of a number changed or, once in four times, one more in front."""
    a, b = chance.choice(ties.numbers(text))
    if chance.random() < 0.25:
        return text[:a] + chance.choice("123456789") + text[a:]
    place = chance.choice([i for i in range(a, b) if text[i].isdigit()])
    digit = chance.choice([d for d in "0123456789" if d != text[place]])
    return text[:place] + digit + text[place + 1 :]


def with_another_word(text: str, chance: random.Random) -> str:
    """One harmless edit outside code, links and headings; the text itself where none fits."""
    plain = re.sub(r"(?ms)^```.*?^```|^#.*?$|\]\([^)]*\)|`[^`]*`", lambda m: "#" * len(m[0]), text)
    spots = [(m.span(), new) for old, new in HARMLESS for m in re.finditer(old, plain)]
    (a, b), new = chance.choice(spots or [((0, 0), "")])
    return text[:a] + new + text[b:]


def changed_part(old: str, new: str) -> str:
    """Where an edit changed a text, with some words around it."""
    at = next((i for i, (a, b) in enumerate(zip(old, new)) if a != b), 0)
    return new[max(at - 40, 0) : at + 40]


def measured(seed: int, groups: list[list[Text]]) -> bool:
    """Make the edits of a seed, say what came of them, and whether a bar is missed."""
    chance, missed, alarms = random.Random(seed), 0, 0
    for group in groups:
        weights = [len(ties.numbers(one.text)) for one in group]
        for one in chance.choices(group, weights, k=NUMBERS // 2):
            changed = with_another_number(one.text, chance)
            if not one.refuses(changed):
                missed += 1
                print(f"not refused: {one.where}: {changed_part(one.text, changed)!r}")
        worded = [one for one in group if not one.where.endswith(" rule")]  # there each word counts
        for one in chance.sample(worded, WORDS // 2):
            changed = with_another_word(one.text, chance)
            if one.refuses(changed):
                alarms += 1
                print(f"false alarm: {one.where}: {changed_part(one.text, changed)!r}")
    print(f"seed {seed}: {missed} of {NUMBERS} numbers pass; {alarms} of {WORDS} words refused")
    return missed > 2 or alarms > 0


if __name__ == "__main__":
    texts = [pages(), fields()]
    sys.exit(max(measured(int(seed), texts) for seed in sys.argv[1:] or [0]))
