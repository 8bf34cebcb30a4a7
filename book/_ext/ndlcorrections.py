"""The log of corrections, book/paper/corrections.yml: which verdict or wording changed, when and why.

The file lists the changes in the order of their dates. Plain functions without Sphinx, as in `ndltables.py`.
"""

import collections
import datetime
import pathlib

from lab.modes import read_yaml
from lab.page.ledger import VERDICTS, chapter_of
from lab.page.show import cells, grid
from ndltables import badge, cell_link, escape

FIELDS = {"date", "claim", "was", "now", "why"}


def load(root: pathlib.Path) -> list[dict]:
    """The entries of the log, oldest first."""
    return read_yaml(root / "book" / "paper" / "corrections.yml")["corrections"]


def problems(entries: list[dict], claims: list[dict]) -> list[str]:
    """Everything that is wrong with the log: each entry by itself, then the order, and what it says of a claim."""
    verdicts = {claim["id"]: claim["verdict"] for claim in claims}
    own = [
        f"entry {number}, {entry.get('claim')}: {problem}"
        for number, entry in enumerate(entries, start=1)
        for problem in entry_problems(entry, verdicts)
    ]
    return own or order_problems(entries, verdicts)


def entry_problems(entry: dict, verdicts: dict[str, str]) -> list[str]:
    """What is wrong with one entry by itself."""
    if set(entry) != FIELDS:
        return [f"its fields are {sorted(entry)}, not {sorted(FIELDS)}"]
    checks = {
        f"{entry['date']!r} is not a date such as 2026-11-22": type(entry["date"]) is datetime.date,
        "no such claim in claims.yml": entry["claim"] in verdicts,
        f"{entry['was']!r} is not a verdict": entry["was"] in VERDICTS,
        f"{entry['now']!r} is not a verdict": entry["now"] in VERDICTS,
        "it does not say why": str(entry["why"] or "").strip(),
    }
    return [problem for problem, fine in checks.items() if not fine]


def order_problems(entries: list[dict], verdicts: dict[str, str]) -> list[str]:
    """Dates must ascend, a claim's entries follow from each other, and the newest end at the ledger's verdict."""
    found, newest, last = [], {}, datetime.date.min
    for entry in entries:
        claim, was, date = entry["claim"], entry["was"], entry["date"]
        if date < last:
            found.append(f"{claim}: {date} stands after {last}")
        if newest.get(claim, was) != was:
            found.append(f"{claim}: was {was!r}, but the entry before says {newest[claim]!r}")
        newest[claim], last = entry["now"], date
    return found + [
        f"{claim}: the newest entry says {now!r}, claims.yml says {verdicts[claim]!r}"
        for claim, now in newest.items()
        if now != verdicts[claim]
    ]


def turned(entries: list[dict]) -> dict[str, list[str]]:
    """Each claim whose verdict changed, with its verdicts in their order."""
    paths: dict[str, list[str]] = {}
    for entry in entries:
        if entry["was"] != entry["now"]:
            paths.setdefault(entry["claim"], [entry["was"]]).append(entry["now"])
    return paths


def looks(entries: list[dict], claims: list[dict], table: str) -> str:
    """For each claim whose verdict changed: its verdicts in their order, how many were given, and the experiments behind it."""
    paths = turned(entries)
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
        id, now = escape(claim["id"]), badge(entry["now"])
        stays = f'{now} <span class="ndl-meaning">stays, reworded</span>'
        link = cell_link(claim, notebooks) if claim.get("notebook") in known else None
        where = f'<a href="{escape(link)}">chapter {escape(chapter_of(claim)[:2])}</a>'
        row = (
            f'<time datetime="{entry["date"]}">{entry["date"]}</time>',
            f'<a class="ndl-id" href="{escape(table)}#{id}">{id}</a>',
            stays if entry["was"] == entry["now"] else f"{badge(entry['was'])} → {now}",
            escape(entry["why"]),
            where if link else "–",
        )
        rows.append(cells(row))
    heads = ("Date", "Claim", "Verdict", "Why", "Where")
    return grid("Corrections", heads, rows, "ndl-log mathjax_ignore tex2jax_ignore")
