"""A page for each claim, claims/ID.html, for links from elsewhere, and claims.json, all of them for programs.

Both are made from the ledger when the book is built. The pages stand outside its side bar and its search, and need no script.
"""

import json
import pathlib
import shutil

from lab.page.ledger import outcome
from ndltables import MEANING, cell_link, claim_badge, escape, place, remarks

FIELDS = ("verdict", "ground", "direction_only", "scope", "condition", "correction", "would_take")
FIELDS += ("reason", "another_reading")

PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<meta name="description" content="{statement}"><title>{id} · {book}</title>
<style>{style}</style></head>
<body><nav><a href="../{front}.html">{book}</a></nav>
<main><h1>{id}</h1>
<p>{badge} <span class="quiet">{meaning}</span></p>
<h2>What the paper says</h2>
<p>{statement}</p>
<p class="quiet">In our words. {place}.{scope}</p>
{remarks}
{links}</main></body></html>
"""
STYLE = """
:root { color-scheme: light dark; --quiet: #565d66; --line: #c8cdd2; --link: #0a58ca; --ground: #fff; --ink: #1f2328;
  --holds: #0b5031; --if: #44520a; --fails: #86200f; --undecided: #684700; }
@media (prefers-color-scheme: dark) { :root { --quiet: #b3bac2; --line: #565d66; --link: #8ab4f8; --ground: #121212; --ink: #e8eaed;
  --holds: #a5e8c6; --if: #d9e79f; --fails: #ffc3b8; --undecided: #ffdd94; } }
html { background: var(--ground); color: var(--ink); }
body { max-width: 42rem; margin: 0 auto; padding: 1rem; font: 1rem/1.5 system-ui, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.4rem; } h2 { font-size: 1rem; margin-bottom: 0; } h2 + p { margin-top: 0; }
a { color: var(--link); } .quiet { color: var(--quiet); }
.ndl-remark { margin: 0.7rem 0; padding-left: 0.7rem; border-left: 3px solid var(--line); }
.ndl-badge { padding: 0 0.5em; border: 1px solid; border-radius: 0.3em; font-weight: 600; }
.ndl-mild { border-style: dashed; } .ndl-holds { color: var(--holds); } .ndl-holds-if { color: var(--if); }
.ndl-fails { color: var(--fails); } .ndl-undecided { color: var(--undecided); }
"""


def write(app, claims: list[dict]) -> None:
    """Write pages and file into the built book, in the place of those of an earlier build."""
    folder = pathlib.Path(app.outdir) / "claims"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    docs, front = set(app.env.found_docs), app.config.root_doc
    records = {"claims": [record(claim, docs) for claim in claims]}
    text = json.dumps(records, ensure_ascii=False, indent=1) + "\n"
    folder.with_name("claims.json").write_text(text, encoding="utf8")
    book = app.config.html_title or app.config.project
    for claim in claims:
        text = page(claim, docs, book, front)
        (folder / f"{claim['id']}.html").write_text(text, encoding="utf8")


def record(claim: dict, docs: set[str]) -> dict:
    """One claim as plain data; what it does not have is null."""
    head = {"id": claim["id"], "statement": claim["statement"], "place": place(claim.get("where"))}
    places = {"url": claim_url(claim, docs), "page": f"claims/{claim['id']}.html"}
    return head | {key: claim.get(key) for key in FIELDS} | places


def claim_url(claim: dict, docs: set[str]) -> str | None:
    """The cell that judges the claim, else its row of the claims table, as far as the book has them."""
    link = cell_link(claim, "notebooks/")
    if link and f"notebooks/{claim['notebook']}" in docs:
        return link
    return f"book/claims.html#{claim['id']}" if "book/claims" in docs else None


def page(claim: dict, docs: set[str], book: str, front: str) -> str:
    """The page of one claim; `docs` are the pages that the book has, `front` is the first of them."""
    scope = claim.get("scope")
    return PAGE.format(
        id=escape(claim["id"]),
        book=escape(book),
        front=front,
        style=STYLE,
        badge=claim_badge(claim),
        meaning=escape(MEANING[outcome(claim)]),
        statement=escape(claim["statement"]),
        place=escape(place(claim.get("where"))),
        scope=f" Tested: {escape(scope)}." if scope else "",
        remarks=remarks(claim),
        links=links(claim, docs),
    )


def links(claim: dict, docs: set[str]) -> str:
    """To the cell that judges the claim, and to its row among all claims."""
    table = f"book/claims.html#{claim['id']}" if "book/claims" in docs else None
    found = {claim_url(claim, docs): "The cell that judges it"} | {
        table: "Its row among all claims"
    }
    items = [f'<a href="../{escape(url)}">{name}</a>' for url, name in found.items() if url]
    return f"<p>{' · '.join(items)}</p>" if items else ""
