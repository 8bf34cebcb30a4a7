"""Which numbers in prose are tied to what computes them: in a notebook by `lab.quote`, elsewhere by a phrase here with its values.

Numbers that are definitions are exempt, by the rules of `DEFINITIONS` and not by a list.
"""

import ast
import functools
import json
import re
from collections.abc import Iterator

import test_pages
from lab import modes, timing
from lab.benchmark import models, reading
from lab.chapters import capacity
from lab.data.with_axes import SETS
from lab.page import facts, ledger, quote
from lab.page.scale import recorded
from lab.tools import scripts

from ndlinear import count_parameters

DEFINITIONS = {
    "a log of past states, from its date to the end of the section": r"(?ims)\b(?:made|measured)\s+on \d+ [a-z]+ 20\d\d.*?(?=^## |\Z)",
    "code": r"(?s)```.*?```|`[^`]*`",
    "mathematics": r"(?s)\$\$.*?\$\$|\$[^$\n]*\$",
    "addresses, comments and tags": r"(?s)\]\([^)]*\)|https?://\S+|arXiv:[\d.]+|<!--.*?-->|<[^>]*>",
    "sources": r"(?s)\n## References\n.*",
    "numbers of chapters, and of what the paper or the book counts": r"(?im)\[E?\d\d ·|^#+ \d\d ·|\b(?:chapters?|evidence|sections?|"
    r"theorems?|corollary|lemma|proposition|figures?|tables?|equations?|exercises?|parts?|appendix|algorithm|steps?|modes?|rows?|"
    r"columns?|lines?|version|depths?)\s[\d.]+(?:\([a-z]\))?(?:(?:,| and| or| to|–)\s?[\d.]+)*",
    "numbers of a list": r"(?m)^\s*\d+\.\s",
    "dates": r"\b\d{1,2} (?:January|February|March|April|May|June|July|August|September|October|November|December)\b|\b(?:19|20)\d\d\b",
    "versions": r"\b\d+\.\d+\.\d+\b|\b(?:Python|torch|PEFT|peft|License|Apache)\s\(?\d+(?:\.\d+)+",
    "formulas without mathematics": r"(?<!\S)(?=\S*[A-Za-z(])(?=\S*\d)(?=\S*[\^/+])[^\s|]+",
    "values of a letter": r"\b[^\W\d_]\w? = [\d.]+\d?",
    "shapes": r"\d+(?:\s?×\s?\d+)+|\(\d+(?:, ?\d+)*,?\)",
    "names that end or begin with a number": r"(?<![\w.])\d+[A-Za-z-][\w-]*|[A-Za-z][\w-]*[-@_]?\d[\w.-]*",
    "the level of an interval": r"\b9[05789](?:\.\d)?\s%(?=[^.]{0,20}(?:interval|confidence))|intervals? (?:at|of) 9[05789](?:\.\d)?\s%",
    "types": r"\b\d+ bits\b",
}


# --- what is a number, and what covers it ------------------------------------------------------------------------


def undefined(text: str) -> str:
    """Prose in which what is a definition is blank."""
    for pattern in DEFINITIONS.values():
        text = re.sub(pattern, lambda found: " " * len(found[0]), text)
    return text


def numbers(text: str) -> list[tuple[int, int]]:
    """Where the numbers of a text begin and end."""
    found = re.finditer(r"\d+(?:,\d{3})*(?:\.\d+)?", undefined(text))
    return [one.span() for one in found]


def untied(text: str, phrases: list[str]) -> list[str]:
    """The numbers of a text that no quoted phrase covers, with the words around them, and phrases said with two sets of values."""
    text = quote.bare(text)
    found = {phrase: quote.places(text, phrase) for phrase in phrases}
    tied = {
        place
        for matches in found.values()
        for match in matches
        for group in range(1, len(match.groups()) + 1)
        for place in range(*match.span(group))
    }
    loose = [(a, b) for a, b in numbers(text) if a not in tied]
    twice = [phrase for phrase, matches in found.items() if len({m.groups() for m in matches}) > 1]
    return [" ".join(text[max(a - 40, 0) : b + 40].split()) for a, b in loose] + twice


# --- notebooks ---------------------------------------------------------------------------------------------------

NOTEBOOKS = tuple(modes.slug(path) for path in modes.chapters() if path.parent == modes.NOTEBOOKS)


def calls(slug: str, name: str) -> list[ast.Call]:
    """The calls of a function in the code of a notebook."""
    nodes = ast.walk(ast.parse(scripts.source(modes.NOTEBOOKS / f"{slug}.ipynb")))
    return [node for node in nodes if isinstance(node, ast.Call) and ast.unparse(node.func) == name]


def quotes(slug: str) -> list[str]:
    """The phrases that a notebook quotes from itself."""
    found = (call for call in calls(slug, "lab.quote") if not call.keywords)
    return [ast.literal_eval(call.args[0]) for call in found]


# --- other pages -------------------------------------------------------------------------------------------------

Phrases = Iterator[tuple]  # a phrase with a field of `str.format` for each value, and the values


def front_page() -> Phrases:
    cube = (32,) * 3
    yield "{:,} weights in place of {:,}", count_parameters(cube, cube, bias=False), 32**6
    alone = timing.ratios(recorded("speed-latency"), "dense").query("peer == 'ndlinear'")
    faster, slower = (alone["ratio_low"] > 1).sum(), (alone["ratio_high"] < 1).sum()
    assert faster + slower == len(alone)
    yield "of the same input and output in {} of {} cases", faster, len(alone)
    yield "On {} sets of tables with real axes", len(SETS)
    yield from reading.told()


def headline() -> Phrases:
    sentence = ledger.headline(ledger.claims())
    yield re.sub(r"\d+", "{}", sentence), *re.findall(r"\d+", sentence)


def recipes() -> Phrases:
    trained = recorded("cnn-printed-cifar10-relu").query("arm == 'relu'")["epochs"]
    yield "Trained for the paper's {} epochs", *set(trained)
    linear = reading.against(reading.rows_on_disk(), models.SMALL, "linear", models.NONE)
    kinds = linear["data"].map(lambda name: SETS[name].kind)
    better, cells, worse = reading.said(linear[kinds.isin(["sensors", "spectra", "forecasts"])])
    phrase = "it is better than NdLinear in {} of {} cells and worse in {}"
    yield phrase, worse, cells, better
    code = (modes.ROOT / "book" / "recipes.md").read_text(encoding="utf-8")
    yield "draws every `nn.Linear` with a deviation of {}", *set(re.findall(r"std=([\d.]+)", code))


def adapters() -> Phrases:
    ranks = [arm[5:] for arm in ("lora-1", "lora-8") if arm in set(recorded("llm-adapters")["arm"])]
    yield "LoRA of its own size, which is rank {}.", ranks[0]
    yield "are not told apart, and rank {} ends lower", ranks[1]


def shattered() -> Phrases:
    cube, square = (len(capacity.certificate(shape)[0]) for shape in ((2, 2, 2), (3, 3)))
    yield "(b) gives {} points for $2^6$", 2 * cube - 1
    yield "$2^6$, {} for $2^", 4 * cube - 3
    yield "$ and {} for $3^4$", 2 * square - 1


def sorted_claims() -> Phrases:
    yield "within a factor of {} of the right one", ledger.SLIP_FACTOR


def lengths() -> Phrases:
    yield "report of at most {} words", test_pages.REPORT


LOGS = ("changelog", "corrections")  # dated logs of past states: nothing computes these today
PARTS = {
    "README.md": (front_page, headline),
    "book/index.md": (front_page,),
    "book/recipes.md": (recipes,),
    "book/adapters.md": (adapters,),
    "book/claims.md": (sorted_claims,),
    "book/contributing.md": (lengths,),
    "book/theorems.md": (shattered,),
}
WRITTEN = sorted(path for path in (modes.ROOT / "book").glob("*.md") if path.stem not in LOGS)
PAGES = ("README.md", *(f"book/{path.name}" for path in WRITTEN))


@functools.cache
def phrases(page: str) -> list[tuple]:
    return [phrase for part in PARTS.get(page, ()) for phrase in part()]


def faults(page: str, text: str) -> list[str]:
    """What is wrong with the numbers of a page: phrases that it does not say, and numbers that none covers."""
    told = phrases(page)
    unsaid = [
        phrase.format(*values) for phrase, *values in told if not quote.says(text, phrase, *values)
    ]
    return unsaid + untied(text, [phrase for phrase, *_ in told])


# --- the ledger --------------------------------------------------------------------------------------------------


def values(text: str) -> set[float]:
    """All numbers of a text, also those of definitions; thousands and millions written out."""
    found = re.findall(r"(\d+(?:,\d{3})*(?:\.\d+)?)([kM]?)(?![\w])", text)
    factor = {"": 1, "k": 1e3, "M": 1e6}
    return {float(number.replace(",", "")) * factor[unit] for number, unit in found}


def printed(claim: dict) -> set[float]:
    """What the fact tables and the printed numbers of a claim say."""
    said = values(json.dumps(claim.get("numbers", {})))
    for cell in claim.get("cells", []):
        rows = facts.facts(cell["table"], **cell.get("where", {})).astype(str)
        columns = rows.drop(columns=["row", "col", "ulp"], errors="ignore")
        said |= values(" ".join(map(str, columns.to_numpy().ravel())))
    return said


def strangers(claim: dict) -> list[str]:
    """The numbers of a claim's statement that are not the paper's."""
    text, paper = claim["statement"], printed(claim)
    said = [re.match(r"[\d.,]*\d[kM]?", text[a:])[0] for a, b in numbers(text)]
    return [number for number in said if not values(number) & paper]
