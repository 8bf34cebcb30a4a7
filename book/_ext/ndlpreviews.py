"""What a link shows before it is followed: the start of a chapter, a theorem, a term of the glossary, a claim and its verdict.

The pages are read as they were written, and the previews go into one script beside them, so that they also work for a book that is
opened as a file.
"""

import json
import pathlib

from bs4 import BeautifulSoup, Tag
from ndlchapters import number
from ndltables import claim_badge, escape, place


def write(app, claims: list[dict]) -> None:
    """Write _static/previews.js: address of a page or of a place on it -> HTML."""
    out = pathlib.Path(app.outdir)
    found = {f"claim-{claim['id']}": claim_preview(claim) for claim in claims}
    for name in sorted(app.env.found_docs):
        page = out / f"{name}.html"
        if number(name) and page.is_file():
            found[name] = chapter_preview(parse(page))
    for name, previews in (("book/theorems", theorems), ("book/glossary", terms)):
        if (page := out / f"{name}.html").is_file():
            found |= {f"{name}#{anchor}": text for anchor, text in previews(parse(page)).items()}
    text = json.dumps(found, ensure_ascii=False, indent=0)
    (out / "_static" / "previews.js").write_text(f"window.ndlPreviews = {text};\n", "utf8")


def parse(page: pathlib.Path) -> Tag:
    return BeautifulSoup(page.read_text(encoding="utf8"), "html.parser").article


def claim_preview(claim: dict) -> str:
    """Verdict, statement and place of a claim."""
    where = f'<span class="ndl-meaning">({escape(place(claim.get("where")))})</span>'
    return f"<p>{claim_badge(claim)} {escape(claim['statement'])} {where}</p>"


def chapter_preview(article: Tag) -> str:
    """Title and first paragraph of a chapter: its answer."""
    title = article.h1
    first = title.find_next("p")
    claimed = first.get_text().startswith("Claimed (")  # so a report begins
    return heading(title) + plain(first.find_next("p") if claimed else first)


def theorems(article: Tag) -> dict[str, str]:
    """Anchor of a theorem -> its statement, without the idea of the proof."""
    found = {}
    for target in article.select(
        '[id^="thm-"]'
    ):  # from Sphinx 8 on the section, before that a span
        text = ""
        for element in target.find_next("h3").find_next_siblings():
            if element.name == "section" or element.text.startswith("Idea."):
                break
            text += plain(element)
        found[target["id"]] = heading(target.find_next("h3")) + text
    return found


def terms(article: Tag) -> dict[str, str]:
    """Anchor of a term -> the term and its meaning."""
    return {
        term["id"]: heading(term)
        + "".join(plain(part) for part in term.find_next("dd").select("p"))
        for term in article.select("dl.glossary dt[id]")
    }


def heading(element: Tag) -> str:
    return f"<p><b>{escape(element.get_text().rstrip('#'))}</b></p>"


def plain(element: Tag) -> str:
    """An element as HTML without its links and anchors: a preview leads nowhere."""
    copy = BeautifulSoup(str(element), "html.parser")
    for link in copy.select("a"):
        link.unwrap()
    for tag in copy.select("[id]"):
        del tag["id"]
    return str(copy)
