"""`make pdf`: the main line of the built book as one PDF with outlines and links, printed by a browser that is on this machine.

python -m lab pdf FOLDER_OF_THE_BUILT_BOOK FILE.pdf

The articles of all pages become one page, so that a link between chapters is a link inside the file.
"""

from __future__ import annotations

import os
import pathlib
import re
import tempfile
import urllib.parse

import yaml
from bs4 import BeautifulSoup, Tag

from ..modes import ROOT, LabError
from .report import paths, print_to

BEFORE = ["book/index", "book/notation"]
AFTER = ["book/recipes", "book/adapters", "book/theorems", "book/glossary", "book/bibliography"]
LEFT_OUT = ".headerlink, details.hide, script, button, form, .ndl-take, .ndl-filter, .ndl-more, .ndl-status"
QUICK = """<script>Object.assign(window.MathJax?.options ?? {},
{enableMenu: false, enableEnrichment: false, enableSpeech: false, enableBraille: false, enableExplorer: false})</script>"""
OFFERED = "<!-- the chapters as one PDF -->"
PAGE = """<!doctype html><html lang="en" data-theme="light"><head><meta charset="utf-8"><title>The NdLinear book</title>
{head}<style>
@page {{ size: A4; margin: 18mm 16mm; @bottom-center {{ content: counter(page); font: 9pt sans-serif; }} }}
html {{ font-size: 11.5px; background: white; }}
article + article {{ break-before: page; }}
figure, table, .cell_input, .ndl-footer, .ndl-verdict {{ break-inside: avoid; }}
.bd-main .bd-content .bd-article h1:first-of-type {{ display: block; }}
h1, h2, h3, h4 {{ break-after: avoid; white-space: break-spaces; }}  /* else the outlines join the words of two lines */
.bd-article pre {{ white-space: pre-wrap; }}
.bd-article :is(pre, div) {{ overflow: visible !important; }}
</style></head><body><main class="bd-main"><div class="bd-content"><div class="bd-article-container">
{articles}
</div></div></main></body></html>
"""


def main_line() -> list[str]:
    """The pages in the order of the book: the front page, the chapters, and the pages that chapters point to."""
    toc = yaml.safe_load((ROOT / "_toc.yml").read_text(encoding="utf8"))
    files = [entry["file"] for part in toc["parts"] for entry in part["chapters"]]
    chapters = [name for name in files if re.fullmatch(r"notebooks/\d\d_\w+", name)]
    return [*BEFORE, *chapters, *AFTER]


def place(page: str, anchor: str = "") -> str:
    """The id that a place of a page has in the one page of all."""
    return f"{page.replace('/', '-')}--{anchor}" if anchor else page.replace("/", "-")


def target(address: str, page: str, pages: list[str]) -> str | None:
    """A link of a page in the one page of all; None if it leads to a page that is not in it."""
    whole, _, anchor = urllib.parse.urljoin(f"{page}.html", address).partition("#")
    if urllib.parse.urlsplit(whole).scheme:
        return address
    other = whole.partition("?")[0].removesuffix(".html")
    return f"#{place(other, anchor)}" if other in pages else None


def article(html: pathlib.Path, page: str, pages: list[str]) -> Tag:
    """The text of a page, with ids and links of the one page of all; what is folded stands open, hidden code is left out."""
    soup = BeautifulSoup((html / f"{page}.html").read_text(encoding="utf8"), "html.parser")
    found = soup.select_one("article")
    for element in found.select(LEFT_OUT):
        element.decompose()
    for element in found.select("details"):
        element["open"] = ""
    for element in found.select("[id]"):
        element["id"] = place(page, element["id"])
    for link in found.select("a[href]"):
        where = target(link["href"], page, pages)
        if where is None:
            link.unwrap()
        else:
            link["href"] = where
    for image in found.select("img[loading]"):
        del image["loading"]  # else it is not printed
    found["id"] = place(page)
    return found


def head(html: pathlib.Path, page: str) -> str:
    """The styles of a page and its MathJax, which sets equations and does not prepare them for a screen reader."""
    found = BeautifulSoup((html / f"{page}.html").read_text(encoding="utf8"), "html.parser").head
    scripts = [script for script in found.select("script") if "mathjax" in str(script).lower()]
    return "".join(map(str, [*found.select("link[rel=stylesheet]"), *scripts])) + QUICK


def joined(html: pathlib.Path, pages: list[str]) -> str:
    """All pages as one, which stands beside the first: all lie as deep, so that it finds their styles and images."""
    articles = "\n".join(str(article(html, page, pages)) for page in pages)
    return PAGE.format(head=head(html, pages[0]), articles=articles)


def once(pdf: bytes) -> bytes:
    """Outlines without a title's second copy, which Chromium writes where it moves a heading to the next page; all bytes stay
    in their places."""

    def half(match: re.Match) -> bytes:
        kept = match[1] + match[2] + match[4]
        return kept + b" " * (len(match[0]) - len(kept))

    literal = rb"(/Title \()([^()\\]{2,})(\2)(\))"
    wide = rb"(/Title <FEFF)((?:[0-9A-F]{4})+?)(\2)(>)"
    return re.sub(wide, half, re.sub(literal, half, pdf))


def print_book(html: pathlib.Path, target: pathlib.Path, pages: list[str] | None = None) -> None:
    """Join pages, by default the main line, and print them; the browser waits until the equations are set."""
    pages = pages or main_line()
    first = html / f"{pages[0]}.html"
    if not first.is_file():
        raise LabError(f"there is no {first}: run make book")
    with tempfile.NamedTemporaryFile(
        "w", suffix=".html", dir=first.parent, encoding="utf8"
    ) as page:
        page.write(joined(html, pages))
        page.flush()
        options = ["--generate-pdf-document-outline", "--virtual-time-budget=600000"]
        print_to(target, pathlib.Path(page.name), *options, timeout=900)
    target.write_bytes(once(target.read_bytes()))


def offer(html: pathlib.Path, target: pathlib.Path) -> None:
    """A link to the file on the front page of the built book, at the place that is kept for it."""
    page = html / "book" / "index.html"
    address = pathlib.Path(os.path.relpath(target, page.parent)).as_posix()
    link = f'<a download href="{address}">The chapters as one PDF.</a>'
    page.write_text(page.read_text(encoding="utf8").replace(OFFERED, link), encoding="utf8")


def main(arguments: list[str]) -> None:
    html, target = paths(arguments, __doc__)
    print_book(html, target)
    offer(html, target)
    print(f"The main line: {target}")
