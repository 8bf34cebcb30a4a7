"""The log of corrections, book/paper/corrections.yml: which verdict or wording changed, when and why.

The file lists the changes in the order of their dates. Plain functions without Sphinx, as in `ndltables.py`.
"""

import collections
import datetime
import itertools
import pathlib

from lab.page.facts import read_yaml
from lab.page.ledger import VERDICTS, chapter_of
from lab.page.show import cells, grid
from ndltables import badge, cell_link, escape

FIELDS = {"date", "claim", "was", "now", "why"}


def load(root: pathlib.Path) -> list[dict]:
    """The entries of the log, oldest first."""
    return read_yaml(root / "book" / "paper" / "corrections.yml")["corrections"]


def problems(entries: list[dict], claims: list[dict]) -> list[str]:
    """Everything that is wrong with the log: each entry by itself, the order, and what it says of a claim."""
    verdicts = {claim["id"]: claim["verdict"] for claim in claims}
    own = [
        f"entry {number}, {entry.get('claim')}: {problem}"
        for number, entry in enumerate(entries, start=1)
        for problem in entry_problems(entry, verdicts)
    ]
    return own or [*order_problems(entries), *chain_problems(entries, verdicts)]


def entry_problems(entry: dict, verdicts: dict[str, str]) -> list[str]:
    """What is wrong with one entry by itself."""
    if set(entry) != FIELDS:
        return [f"its fields are {sorted(entry)}, not {sorted(FIELDS)}"]
    found = []
    if type(entry["date"]) is not datetime.date:
        found.append(f"{entry['date']!r} is not a date such as 2026-11-22")
    if entry["claim"] not in verdicts:
        found.append("no such claim in claims.yml")
    for key in ("was", "now"):
        if entry[key] not in VERDICTS:
            found.append(f"{key!r} is {entry[key]!r}, which is not a verdict")
    if not isinstance(entry["why"], str) or not entry["why"].strip():
        found.append("it does not say why")
    return found


def order_problems(entries: list[dict]) -> list[str]:
    """Entries that stand after one of a later date."""
    return [
        f"{after['claim']}: {after['date']} stands after {before['date']}"
        for before, after in itertools.pairwise(entries)
        if after["date"] < before["date"]
    ]


def chain_problems(entries: list[dict], verdicts: dict[str, str]) -> list[str]:
    """A claim's entries must follow from each other, and the newest must end at the ledger's verdict."""
    found, newest = [], {}
    for entry in entries:
        claim = entry["claim"]
        if claim in newest and entry["was"] != newest[claim]:
            found.append(
                f"{claim}: was {entry['was']!r}, but the entry before says {newest[claim]!r}"
            )
        newest[claim] = entry["now"]
    return found + [
        f"{claim}: the newest entry says {now!r}, claims.yml says {verdicts[claim]!r}"
        for claim, now in newest.items()
        if now != verdicts[claim]
    ]


def looks(entries: list[dict], claims: list[dict], table: str) -> str:
    """For each claim whose verdict changed: its verdicts in their order, how many were given, and the experiments behind it."""
    paths: dict[str, list[str]] = {}
    for entry in entries:
        if entry["was"] != entry["now"]:
            paths.setdefault(entry["claim"], [entry["was"]]).append(entry["now"])
    by_id = {claim["id"]: claim for claim in claims}
    rows = []
    for id, path in sorted(paths.items(), key=lambda item: -len(item[1])):
        name = f'<a class="ndl-id" href="{escape(table)}#{escape(id)}">{escape(id)}</a>'
        experiments = len(by_id[id].get("records") or [])
        rows.append(cells([name, " → ".join(path), len(path), experiments]))
    sizes = collections.Counter(map(len, paths.values()))
    most = ", ".join(f"{number} with {size} verdicts" for size, number in sorted(sizes.items()))
    heads = ("Claim", "Verdicts", "Looks", "Experiments")
    changed = sum(entry["was"] != entry["now"] for entry in entries)
    return (
        f"<p>{changed} changes of a verdict, and {len(entries) - changed} statements put right while the verdict stayed.</p>"
        f"<details><summary>Looks at each of the {len(paths)} claims whose verdict changed: {most}</summary>"
        "<p>A look is a time that a verdict was given; a look that confirmed a verdict is in no entry, so that a claim that "
        f"rests on several experiments may have had more.</p>{grid('Looks', heads, rows)}</details>"
    )


def log(
    entries: list[dict], claims: list[dict], table: str, notebooks: str, known: set[str]
) -> str:
    """The log as a table, newest first.

    `table` is the address of the claims table, `notebooks` leads to the notebooks, `known` are those of the book.
    """
    by_id = {claim["id"]: claim for claim in claims}
    rows = []
    for entry in reversed(entries):
        claim = by_id[entry["claim"]]
        row = (
            f'<time datetime="{entry["date"]}">{entry["date"]}</time>',
            f'<a class="ndl-id" href="{escape(table)}#{escape(claim["id"])}">{escape(claim["id"])}</a>',
            change(entry),
            escape(entry["why"]),
            chapter_link(claim, notebooks, known),
        )
        rows.append(cells(row))
    heads = ("Date", "Claim", "Verdict", "Why", "Where")
    return grid("Corrections", heads, rows, "ndl-log mathjax_ignore tex2jax_ignore")


def change(entry: dict) -> str:
    """Old and new verdict, or that the verdict stayed and its wording changed."""
    if entry["was"] == entry["now"]:
        return f'{badge(entry["now"])} <span class="ndl-meaning">stays, reworded</span>'
    return f"{badge(entry['was'])} → {badge(entry['now'])}"


def chapter_link(claim: dict, notebooks: str, known: set[str]) -> str:
    """A link to the cell that judges the claim, or a dash where the book has none."""
    link = cell_link(claim, notebooks) if claim.get("notebook") in known else None
    if not link:
        return "–"
    return f'<a href="{escape(link)}">chapter {escape(chapter_of(claim)[:2])}</a>'
