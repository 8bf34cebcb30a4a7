"""The ledger as a story: claims as a table, as a list with links, and what the open ones would take."""

from __future__ import annotations

import html
from collections.abc import Iterable

import pandas as pd
from matplotlib import patches

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
    """One row per claim: id, area, kind, verdict and outcome."""
    rows = [
        (c["id"], ledger.area(c), c["kind"], c["verdict"], ledger.outcome(c))
        for c in ledger.claims()
    ]
    return pd.DataFrame(rows, columns=["id", "area", "kind", "verdict", "outcome"])


def needs(claim: dict) -> str:
    """What a test of a claim takes, in words, without the names of data sets and weights."""
    words = {"gpu": "GPU", "cpu": "processor", "data": "data", "weights": "weights"}
    kinds = {need.partition(":")[0] for need in claim["needs"]}
    return (
        ", ".join(word for kind, word in words.items() if kind in kinds)
        or "the runs of other claims"
    )


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


def _entry(id: str) -> tuple[str, str]:
    """A claim as text and as an entry of a definition list."""
    claim = ledger.claim(id)
    head, text = right(claim)
    sign = ledger.label(claim)
    mark = f'<span class="{ledger.classes(claim)}">{sign}</span>'
    name = f'{mark} <a href="{html.escape(address(claim))}">{html.escape(id)}</a>'
    parts = [
        f"<div><b>Paper:</b> {html.escape(claim['statement'])}</div>",
        f"<div><b>{html.escape(head)}:</b> {html.escape(text)}</div>",
    ]
    return (
        f"{id} ({sign})\n    Paper: {claim['statement']}\n    {head}: {text}",
        f"<dt>{name}</dt><dd>{''.join(parts)}</dd>",
    )


def tell(ids: Iterable[str]) -> None:
    """Show claims with statement and what may be said. Verdict and answer come from the ledger."""
    entries = [_entry(id) for id in ids]
    put("\n".join(text for text, _ in entries), html=_list(entry for _, entry in entries))


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
