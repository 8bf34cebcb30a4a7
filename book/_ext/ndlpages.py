"""The second Sphinx extension of the book: what is made for readers from the sources, beside the pages that they wrote.

    {take-with-you} ndlinear | lr_groups | …   a link to a file, with version and checksum; "clone": the lines in it, with the address
    {cite-this}                            BibTeX, from CITATION.cff
    {reproducibility-report}               one page, from ledger and records

Chapters that use the layer get a link to its file at their end. Files are copied beside the pages.
"""

import json
import pathlib

import ndlbuild
import ndlcorrections
import ndlreport
import ndltake
from docutils import nodes
from lab.page import facts, ledger
from ndlbook import TIMES, BookDirective


class TakeWithYou(BookDirective):
    has_content = True  # what is shown where nobody renders it, on GitHub

    def content_html(self):
        key = (self.arguments or ["ndlinear"])[0]
        if key == "clone":
            text = ndltake.commands("\n".join(self.content), ndlbuild.repository_url(self.root))
            return [nodes.literal_block(text, text, language="bash")]
        return ndltake.link(self.root, key, self.uri("./"))


class CiteThis(BookDirective):
    def content_html(self):
        url = ndlbuild.repository_url(self.root)
        text = ndltake.bibtex(self.root, url, self.config.copyright)
        block = nodes.literal_block(text, text, language="bibtex", classes=["ndl-cite"])
        return [block]


def rows(file: pathlib.Path) -> list[dict]:
    """The rows of a record."""
    return [json.loads(line) for line in file.read_text(encoding="utf8").splitlines()]


class ReproducibilityReport(BookDirective):
    def content_html(self):
        files = sorted((self.root / "notebooks" / "results").glob("*.jsonl"))
        runs = {file.stem: rows(file) for file in files if file.stem != TIMES}
        changed = len(ndlcorrections.load(self.root))
        return ndlreport.report(ledger.claims(), runs, facts.protocols(), changed)


def on_page(app, pagename, templatename, context, doctree) -> None:
    """A link to the layer's file in the footer of every chapter that uses it."""
    notebook = pathlib.Path(app.srcdir) / f"{pagename}.ipynb"
    if "body" not in context or not notebook.is_file():
        return
    if ndltake.uses_the_layer(json.loads(notebook.read_text(encoding="utf8"))):
        line = ndltake.line(pathlib.Path(app.srcdir), "../" * pagename.count("/"))
        context["body"] = ndltake.with_line(context["body"], line)


def on_finish(app, exception) -> None:
    if exception is None and app.builder.format == "html":
        ndltake.copy(pathlib.Path(app.srcdir), pathlib.Path(app.outdir))


def setup(app) -> dict:
    app.connect("html-page-context", on_page)
    app.connect("build-finished", on_finish)
    app.add_directive("take-with-you", TakeWithYou)
    app.add_directive("cite-this", CiteThis)
    app.add_directive("reproducibility-report", ReproducibilityReport)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
