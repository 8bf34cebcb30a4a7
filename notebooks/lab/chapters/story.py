"""The ledger as a story: claims as a table, as a list with links, and as squares."""

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
SAID = {  # what may be said of a claim today: a heading and the field of the ledger
    "holds": ("Scope", "scope"),
    "holds-if": ("Holds if", "condition"),
    "fails": ("Right statement", "correction"),
    "undecided": ("What would decide it", "would_take"),
    "untestable": ("Missing", "reason"),
    "open": ("To be decided by", "rule"),
}


def frame() -> pd.DataFrame:
    """One row per claim: id, area, kind, verdict and outcome."""
    rows = [
        (c["id"], ledger.area(c), c["kind"], c["verdict"], ledger.outcome(c))
        for c in ledger.claims()
    ]
    return pd.DataFrame(rows, columns=["id", "area", "kind", "verdict", "outcome"])


def address(claim: dict) -> str:
    """Where the claim's cell stands in the book; an open or untestable claim leads to its row on the page of claims."""
    if claim["verdict"] in ledger.SETTLED:
        return f"{claim['notebook']}.html#claim-{claim['id']}"
    return f"../book/claims.html#{claim['id']}"


def tell(ids: Iterable[str]) -> None:
    """Show claims with statement and what may be said. Verdict and answer come from the ledger."""
    texts, entries = [], []
    for claim in map(ledger.claim, ids):
        head, field = SAID[claim["verdict"]]
        text, sign = claim.get(field, ""), ledger.label(claim)
        texts.append(f"{claim['id']} ({sign})\n    Paper: {claim['statement']}\n    {head}: {text}")
        entries.append(
            f'<dt><span class="{ledger.classes(claim)}">{sign}</span> '
            f'<a href="{html.escape(address(claim))}">{html.escape(claim["id"])}</a></dt>'
            f"<dd><div><b>Paper:</b> {html.escape(claim['statement'])}</div>"
            f"<div><b>{head}:</b> {html.escape(text)}</div></dd>"
        )
    classes = "ndl-corrections mathjax_ignore tex2jax_ignore"
    put("\n".join(texts), html=f'<dl class="{classes}">{"".join(entries)}</dl>')


def draw_claims(axis, claims: pd.DataFrame) -> None:
    """One square for each claim, one row for each area, most settled first; colour and sign are the outcome."""
    rank = {outcome: i for i, outcome in enumerate(ledger.OUTCOMES)}
    ordered = claims.sort_values("outcome", key=lambda v: v.map(rank))
    rows = ordered.groupby("area")["outcome"].agg(list)
    rows = rows.loc[rows.map(lambda v: (v.count("open") / len(v), -len(v))).sort_values().index]
    for y, outcomes in enumerate(rows):
        for x, outcome in enumerate(outcomes):
            box = patches.Rectangle((x - 0.45, y - 0.42), 0.9, 0.84, facecolor=COLOURS[outcome])
            box.set_edgecolor("#8a8a8a" if outcome == "open" else "none")
            axis.add_patch(box)
            ink = "w" if outcome in ("holds", "refuted", "untestable") else "k"
            axis.text(x, y, ledger.SIGNS[outcome], color=ink, size=7, ha="center", va="center")
    axis.set(xlim=(-0.6, rows.map(len).max() - 0.4), ylim=(len(rows) - 0.4, -0.6), xticks=[])
    axis.set_yticks(range(len(rows)), rows.index)
    axis.tick_params(length=0)
    axis.grid(False)
    axis.spines[:].set_visible(False)
