"""The second Sphinx extension of the book: what is made for readers from the sources, beside the pages that they wrote.

    {take-with-you} ndlinear | lr_groups | …   a link to a file, with version and checksum; "clone": the lines in it, with the address
    {cite-this}                            BibTeX, from CITATION.cff
    {reproducibility-report}               one page, from ledger and records

Files are copied beside the pages.
"""

import json
import pathlib

import ndlbuild
import ndlcorrections
import ndlreport
import ndltake
from docutils import nodes
from lab.benchmark import reading
from lab.page import facts, ledger
from ndlbook import TIMES, BookDirective, add_directives


def take_with_you(page: BookDirective) -> str | list[nodes.Node]:
    """Its content is what is shown where nobody renders it, on GitHub."""
    key = (page.arguments or ["ndlinear"])[0]
    if key == "clone":
        text = ndltake.commands("\n".join(page.content), ndlbuild.repository_url(page.root))
        return [nodes.literal_block(text, text, language="bash")]
    return ndltake.link(page.root, key, page.uri("./"))


def cite_this(page: BookDirective) -> list[nodes.Node]:
    url = ndlbuild.repository_url(page.root)
    text = ndltake.bibtex(page.root, url, page.config.copyright)
    return [nodes.literal_block(text, text, language="bibtex", classes=["ndl-cite"])]


def rows(file: pathlib.Path) -> list[dict]:
    """The rows of a record."""
    return [json.loads(line) for line in file.read_text(encoding="utf8").splitlines()]


def reproducibility_report(page: BookDirective) -> str:
    files = sorted((page.root / "notebooks" / "results").glob("*.jsonl"))
    runs = {file.stem: rows(file) for file in files if file.stem != TIMES}
    changed = len(ndlcorrections.load(page.root))
    told = reading.told()
    return ndlreport.report(ledger.claims(), runs, facts.protocols(), changed, told)


def on_finish(app, exception) -> None:
    if exception is None and app.builder.format == "html":
        ndltake.copy(pathlib.Path(app.srcdir), pathlib.Path(app.outdir))


def setup(app) -> dict:
    app.connect("build-finished", on_finish)
    add_directives(app, take_with_you, cite_this, reproducibility_report)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
