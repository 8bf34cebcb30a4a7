"""What programs read of the book: claims.json, the ledger in one file, and llms.txt, a list of the pages.

Both are written into the built book from the ledger and from the pages themselves; their addresses are relative to it.
"""

import json
import pathlib
import re

from docutils import nodes
from lab.page import ledger
from ndltables import cell_link, place

FIELDS = (
    "verdict",
    "ground",
    "direction_only",
    "scope",
    "condition",
    "correction",
    "would_take",
    "reason",
    "another_reading",
)


def write(app) -> None:
    """Write both files into the folder of the built book."""
    docs = set(app.env.found_docs)
    found = [claim_record(claim, docs) for claim in ledger.claims()]
    text = json.dumps({"claims": found}, ensure_ascii=False, indent=1) + "\n"
    (pathlib.Path(app.outdir) / "claims.json").write_text(text, encoding="utf8")
    (pathlib.Path(app.outdir) / "llms.txt").write_text(overview(app), encoding="utf8")


def claim_record(claim: dict, docs: set[str]) -> dict:
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


def overview(app) -> str:
    """Title, the first paragraph of the front page, and every page with its first sentence."""
    pages = list(app.env.collect_relations())
    summary = opening(app.env.get_doctree(app.config.root_doc))
    lines = [f"# {app.config.html_title or app.config.project}\n", f"> {summary}\n", "## Pages\n"]
    for name in pages:
        sentence = first_sentence(opening(app.env.get_doctree(name)))
        entry = f"- [{app.env.titles[name].astext()}]({name}.html)"
        lines.append(f"{entry}: {sentence}" if sentence else entry)
    lines.append("\n## Data\n")
    lines.append("- [All claims](claims.json): every claim of the paper with its verdict.")
    return "\n".join(lines) + "\n"


def opening(doctree: nodes.document) -> str:
    """The first paragraph of a page that stands directly in a section, in one line; mathematics between dollars."""
    for paragraph in doctree.findall(nodes.paragraph):
        if isinstance(paragraph.parent, nodes.section):
            return " ".join(plain(paragraph).split())
    return ""


def plain(node: nodes.Node) -> str:
    """The text of a node."""
    if isinstance(node, nodes.math):
        return f"${node.astext()}$"
    if isinstance(node, nodes.Text):
        return node.astext()
    return "".join(plain(child) for child in node.children)


def first_sentence(text: str) -> str:
    """A text up to its first full stop, question mark or exclamation mark before a space."""
    return re.split(r"(?<=[.!?])\s", text, maxsplit=1)[0]
