"""The ledger as a story: claims as a table, as lists with links, and what the open ones would take."""

from __future__ import annotations

import html
from collections.abc import Callable, Iterable

import pandas as pd
from matplotlib import patches

from .. import records
from ..page import ledger
from ..page.show import put

# One colour for each outcome, paler where it says less of the paper; sign and lists say the same without colour.
COLOURS = {
    "holds": "#1a9862",
    "holds-if": "#94a63a",
    "refuted": "#b8371f",
    "not reproduced": "#d97a66",
    "not reproduced at small scale": "#edb5a8",
    "slip": "#f0d3cb",
    "undecided": "#dfa52c",
    "untestable": "#8a8a96",
    "open": "#ffffff00",
}
SETTLED = ("holds", "holds-if", "fails", "undecided")  # judged by a cell


def frame() -> pd.DataFrame:
    """One row per claim: id, area, kind, verdict, outcome, notebook, what it needs and its records."""
    rows = []
    for claim in ledger.claims():
        notebook = ledger.chapter_of(claim)
        rows.append(
            {
                "id": claim["id"],
                "area": ledger.area(claim),
                "kind": claim["kind"],
                "verdict": claim["verdict"],
                "outcome": ledger.outcome(claim),
                "notebook": notebook,
                "needs": needs(claim),
                "records": claim.get("records") or [],
            }
        )
    return pd.DataFrame(rows)


def by_outcome(claims: pd.DataFrame, column: str) -> pd.DataFrame:
    """How many claims of each value of a column have which outcome, in the order of `ledger.OUTCOMES`."""
    table = pd.crosstab(claims[column], claims["outcome"])
    return table[[name for name in ledger.OUTCOMES if name in table]]


def needs(claim: dict) -> str:
    """What a test of a claim takes, in words, without the names of data sets and weights."""
    words = {"gpu": "GPU", "cpu": "processor", "data": "data", "weights": "weights"}
    kinds = {need.partition(":")[0] for need in claim["needs"]}
    return (
        ", ".join(word for kind, word in words.items() if kind in kinds)
        or "the runs of other claims"
    )


def evidence(claims: list[dict]) -> pd.DataFrame:
    """The recorded runs that settled claims rest on: one row per experiment."""
    used: dict[str, list[str]] = {}
    for claim in claims:
        for name in claim.get("records") or []:
            used.setdefault(name, []).append(claim["id"])
    rows = []
    for name, ids in sorted(used.items()):
        runs = [r for r in records.read(name) if r["status"] == "ok"]
        rows.append((name, len(ids), len(runs), len({r["seed"] for r in runs})))
    return pd.DataFrame(rows, columns=["experiment", "claims", "runs", "seeds"])


def right(claim: dict) -> tuple[str, str]:
    """What may be said of a claim today: a heading and a sentence, both from the ledger."""
    verdict = claim["verdict"]
    if verdict == "fails":
        return "Right statement", claim["correction"]
    if verdict == "holds-if":
        return "Holds if", claim["condition"]
    if verdict == "undecided":
        return "What would decide it", claim["would_take"]
    if verdict == "untestable":
        return "Missing", claim["reason"]
    if verdict == "open":
        return "A test takes", needs(claim)
    return ("Scope", claim["scope"])


def address(claim: dict) -> str:
    """Where the claim's cell stands in the book; an open or untestable claim leads to its row on the page of claims."""
    if claim["verdict"] in SETTLED:
        return f"{claim['notebook']}.html#claim-{claim['id']}"
    return f"../book/claims.html#{claim['id']}"


def _entry(id: str, question: str = "") -> tuple[str, str]:
    """A claim as text and as an entry of a definition list."""
    claim = ledger.claim(id)
    head, text = right(claim)
    sign = ledger.label(claim)
    mark = f'<span class="{ledger.classes(claim)}">{sign}</span>'
    name = f'{mark} <a href="{html.escape(address(claim))}">{html.escape(id)}</a>'
    parts = [
        f"<div><b>Paper:</b> {html.escape(claim['statement'])} {name if question else ''}</div>",
        f"<div><b>{html.escape(head)}:</b> {html.escape(text)}</div>",
    ]
    title = html.escape(question) if question else name
    return (
        f"{question or id} ({sign} · {id})\n    Paper: {claim['statement']}\n    {head}: {text}",
        f"<dt>{title}</dt><dd>{''.join(parts)}</dd>",
    )


def tell(questions: dict[str, str]) -> None:
    """Show claims, each under the question that it answers, if there is one. Verdict and answer come from the ledger."""
    entries = [_entry(id, question) for id, question in questions.items()]
    put("\n".join(text for text, _ in entries), html=_list(entry for _, entry in entries))


def fold(ids: Iterable[str], by: Callable[[dict], str] = ledger.area) -> None:
    """Show claims with statement and what may be said, folded by area or by another property of a claim."""
    groups: dict[str, list[str]] = {}
    for id in ids:
        groups.setdefault(by(ledger.claim(id)), []).append(id)
    lines, folded = [], []
    for name, members in groups.items():
        entries = [_entry(id) for id in members]
        lines += [f"{name} ({len(members)})", *(text for text, _ in entries)]
        body = _list(entry for _, entry in entries)
        folded.append(
            f"<details><summary>{html.escape(name)} ({len(members)})</summary>{body}</details>"
        )
    put("\n".join(lines) or "None.", html="".join(folded) or "None.")


def _list(entries: Iterable[str]) -> str:
    return f'<dl class="ndl-corrections mathjax_ignore tex2jax_ignore">{"".join(entries)}</dl>'


def draw_claims(axis, claims: pd.DataFrame) -> None:
    """One square for each claim, one row for each area, most settled first; colour and sign are the outcome."""
    rank = {outcome: i for i, outcome in enumerate(ledger.OUTCOMES)}
    ordered = claims.sort_values("outcome", key=lambda v: v.map(rank))
    rows = ordered.groupby("area")["outcome"].agg(list)
    rows = rows.loc[rows.map(lambda v: (v.count("open") / len(v), -len(v))).sort_values().index]
    for y, outcomes in enumerate(rows):
        for x, outcome in enumerate(outcomes):
            _square(axis, x, y, outcome)
    axis.set(xlim=(-0.6, rows.map(len).max() - 0.4), ylim=(len(rows) - 0.4, -0.6), xticks=[])
    axis.set_yticks(range(len(rows)), rows.index)
    axis.tick_params(length=0)
    axis.grid(False)
    axis.spines[:].set_visible(False)


def _square(axis, x: int, y: int, outcome: str) -> None:
    """The square of a claim; an open one is empty."""
    edge = "#8a8a8a" if outcome == "open" else "none"
    box = {"width": 0.9, "height": 0.84, "facecolor": COLOURS[outcome], "edgecolor": edge}
    axis.add_patch(patches.Rectangle((x - 0.45, y - 0.42), **box))
    if outcome != "open":
        ink = "w" if outcome in ("holds", "refuted", "untestable") else "k"
        axis.text(x, y, ledger.SIGNS[outcome], color=ink, size=7, ha="center", va="center")
