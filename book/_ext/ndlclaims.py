"""claims.json, all claims for programs, made from the ledger when the book is built."""

import json
import pathlib

from ndltables import cell_link, place

FIELDS = ("verdict", "ground", "direction_only", "scope", "condition", "correction", "would_take")
FIELDS += ("reason", "another_reading")


def write(app, claims: list[dict]) -> None:
    """Write the file into the folder of the built book."""
    records = {"claims": [record(claim, set(app.env.found_docs)) for claim in claims]}
    text = json.dumps(records, ensure_ascii=False, indent=1) + "\n"
    (pathlib.Path(app.outdir) / "claims.json").write_text(text, encoding="utf8")


def record(claim: dict, docs: set[str]) -> dict:
    """One claim as plain data; what it does not have is null."""
    head = {"id": claim["id"], "statement": claim["statement"], "place": place(claim.get("where"))}
    return head | {key: claim.get(key) for key in FIELDS} | {"url": claim_url(claim, docs)}


def claim_url(claim: dict, docs: set[str]) -> str:
    """The cell that judges the claim, as far as the book has its page, else its row of the claims table."""
    link = cell_link(claim, "notebooks/")
    if link and f"notebooks/{claim['notebook']}" in docs:
        return link
    return f"book/claims.html#{claim['id']}"
