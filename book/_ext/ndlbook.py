"""The Sphinx extension of the book.

It sets the mode of the notebooks, keeps the execution cache honest, ships MathJax inside the book, sets repository
links only where an address is known, and provides the directives of book/*.md, one for each function at the end of this file.

It also numbers the chapters, links every mention of one, and writes claims.json, previews.js and the files to take along beside
the pages.
"""

import itertools
import json
import os
import pathlib
import re

import ndlapi
import ndlbuild
import ndlcache
import ndlchapters
import ndlclaims
import ndlcorrections
import ndloverview
import ndlpreviews
import ndlreport
import ndltables
import ndltake
from docutils import nodes
from docutils.statemachine import StringList
from lab.benchmark import reading
from lab.page import facts, ledger
from sphinx.errors import ExtensionError
from sphinx.util.docutils import SphinxDirective

TIMES = "notebook-times"  # the record of `python -m lab times`


# --- events ------------------------------------------------------------------------------------------------------


def on_config(app, config) -> None:
    root = pathlib.Path(app.srcdir)
    # taken now, so that a change during the build makes the book stale
    app.ndl_state = ndlbuild.book_state(root)
    config.nb_execution_cache_path = str(pathlib.Path(app.outdir).parent / ".jupyter_cache")
    config.mathjax_path = "mathjax/tex-chtml.js"
    ndlbuild.link_repository(config.html_theme_options, ndlbuild.repository_url(root))
    # thebe would add a script of another host to every page
    listeners = itertools.chain.from_iterable(app.events.listeners.values())
    for thebe in [li for li in listeners if li.handler.__module__.startswith("sphinx_thebe")]:
        app.disconnect(thebe.id)
    app.registry.css_files[:] = [file for file in app.registry.css_files if "thebe" not in file[0]]


def on_read(app, env, docnames) -> None:
    """Run the notebooks of which something has changed, before the pages are read one by one."""
    folder = pathlib.Path(app.config.nb_execution_cache_path)
    names = sorted(name for name in env.found_docs if name.startswith("notebooks/"))
    versions, timeout = ndlbuild.versions_key(), app.config.nb_execution_timeout
    ndlcache.prepare(pathlib.Path(app.srcdir), folder, names, versions, timeout)


def on_doctree(app, doctree) -> None:
    """Let notebooks link to a page's explicit targets: MyST resolves page.md#name for headings only, and warns otherwise."""
    slugs = app.env.metadata[app.env.docname].setdefault("myst_slugs", {})
    for name, explicit in doctree.nametypes.items():
        if explicit and doctree.nameids.get(name):
            slugs.setdefault(name, (None, doctree.nameids[name], ""))


def on_page(app, pagename, templatename, context, doctree) -> None:
    body = context.get("body", "")
    if "ndl-claims" in body:
        app.add_js_file("claims.js", loading_method="defer")
    for script in set(re.findall(r'<div class="ndl-interactive" data-script="(\w+)"', body)):
        app.add_js_file(f"{script}.js", loading_method="defer")
    if pagename == "search":
        app.add_js_file("search.js", loading_method="defer")
    # docutils calls this a list, but its entries are bibliography entries, which a list must not hold
    body = body.replace('<div role="list" class="citation-list">', '<div class="citation-list">')
    context["body"] = with_links(app, pagename, body)


def name_toggles(app, pagename, templatename, context, doctree) -> None:
    """Gives the arrow beside an entry of the side bar that can be opened a name, which the theme leaves out."""
    made = context.get("generate_toctree_html")

    def named(*args, **options):
        tree = made(*args, **options)
        for summary in tree.select("summary") if hasattr(tree, "select") else ():
            summary["aria-label"] = "Show or hide the pages below"
        return tree

    if made is not None:
        context["generate_toctree_html"] = named


def with_links(app, pagename: str, body: str) -> str:
    """The page with a link at every chapter and theorem that it names, and in chapters at the first mention of a term."""

    def uri(page: str, anchor: str = "") -> str:
        return app.builder.get_relative_uri(pagename, page) + (anchor and f"#{anchor}")

    pages = ndlchapters.by_number(app.env.found_docs)
    standard = app.env.get_domain("std")
    address = {number: uri(page) for number, page in pages.items() if page != pagename}
    address |= {
        name: uri(page, anchor)
        for name, (page, anchor) in standard.anonlabels.items()
        if name.startswith("thm-")
    }
    body = ndlchapters.link(body, address)
    if not ndlchapters.number(pagename):
        return body
    terms = {
        name: uri(page, anchor)
        for name, _, kind, page, anchor, _ in standard.get_objects()
        if kind == "term"
    }
    return ndlchapters.link_terms(body, terms)


def on_finish(app, exception) -> None:
    state = pathlib.Path(app.outdir).parent / "state"
    state.unlink(missing_ok=True)
    if exception or app.builder.format != "html":
        return
    ndlbuild.copy_mathjax(pathlib.Path(app.outdir) / "_static" / "mathjax")
    ndlbuild.copy_toggle(pathlib.Path(app.outdir) / "_static")
    ndlclaims.write(app, ledger.claims())
    ndloverview.write(app)
    ndlpreviews.write(app, ledger.claims())
    ndlchapters.forward(pathlib.Path(app.outdir))
    ndltake.copy(pathlib.Path(app.srcdir), pathlib.Path(app.outdir))
    if app._warncount == 0:
        state.write_text(app.ndl_state)


# --- directives --------------------------------------------------------------------------------------------------


class BookDirective(SphinxDirective):
    """Base: finds the book's files; its page is read again at every build."""

    optional_arguments = 1
    has_content = True

    def run(self) -> list[nodes.Node]:
        self.env.note_reread()
        self.root = pathlib.Path(self.env.srcdir)
        self.known = {
            name.split("/", 1)[1] for name in self.env.found_docs if name.startswith("notebooks/")
        }
        result = self.make(self)
        return result if isinstance(result, list) else [nodes.raw("", result, format="html")]

    def uri(self, page: str) -> str:
        """Relative address of a page (without .html) or of a folder (with a final slash)."""
        return os.path.relpath(page, os.path.dirname(self.env.docname)) + (
            "/" if page.endswith("/") else ".html"
        )

    def markdown(self, text: str, source: str, style: str) -> list[nodes.Node]:
        """Markdown as it would stand on the page, in a container of its own style."""
        holder = nodes.container(classes=[style])
        self.state.nested_parse(StringList(text.splitlines(), source=source), 0, holder)
        return [holder]


def claims_table(page: BookDirective) -> str:
    return ndltables.claims_table(ledger.claims(), page.uri("notebooks/"), page.known)


def claims_counts(page: BookDirective) -> str:
    changed = len(ndlcorrections.turned(ndlcorrections.load(page.root)))
    addresses = page.uri("book/claims"), changed, page.uri("book/corrections")
    return ndltables.claims_counts(ledger.claims(), *addresses)


def verdict_meanings(page: BookDirective) -> str:
    return ndltables.meanings()


def corrections_log(page: BookDirective) -> str:
    """Every verdict and statement of ours that changed; a log that contradicts the ledger stops the build."""
    entries, claims = ndlcorrections.load(page.root), ledger.claims()
    if problems := ndlcorrections.problems(entries, claims):
        raise ExtensionError("book/paper/corrections.yml: " + "; ".join(problems))
    table, notebooks = page.uri("book/claims"), page.uri("notebooks/")
    looks = ndlcorrections.looks(entries, claims, table)
    return looks + ndlcorrections.log(entries, claims, table, notebooks, page.known)


def chapters(page: BookDirective) -> list[nodes.Node]:
    """Every chapter with the first sentence of its answer and how many claims it settles."""
    folder, uri, claims = page.root / "notebooks", page.uri("notebooks/"), ledger.claims()
    names = sorted(name for name in page.known if "/" not in name)
    lines = [ndltables.chapter(folder / f"{name}.ipynb", uri, claims) for name in names]
    return page.markdown("\n".join(lines), "notebooks", "ndl-chapters")


def take_with_you(page: BookDirective) -> str | list[nodes.Node]:
    """A link to a file, with version and checksum; "clone": the lines in it, which GitHub shows as they are, with the address."""
    (name,) = page.arguments
    if name == "clone":
        address = ndlbuild.repository_url(page.root) or "ADDRESS"
        text = "\n".join(page.content).replace("ADDRESS", address)
        return [nodes.literal_block(text, text, language="bash")]
    return ndltake.link(page.root, name, page.uri("./"))


def cite_this(page: BookDirective) -> list[nodes.Node]:
    """BibTeX, from CITATION.cff."""
    text = ndltake.bibtex(page.root, ndlbuild.repository_url(page.root), page.config.copyright)
    return [nodes.literal_block(text, text, language="bibtex", classes=["ndl-cite"])]


def reproducibility_report(page: BookDirective) -> str:
    """One page, from ledger and records."""
    files = sorted((page.root / "notebooks" / "results").glob("*.jsonl"))
    texts = {file.stem: file.read_text(encoding="utf8") for file in files if file.stem != TIMES}
    runs = {name: [json.loads(row) for row in text.splitlines()] for name, text in texts.items()}
    changed = len(ndlcorrections.load(page.root))
    return ndlreport.report(ledger.claims(), runs, facts.protocols(), changed, reading.told())


DIRECTIVES = (
    *(claims_table, claims_counts, verdict_meanings, chapters, corrections_log),
    *(take_with_you, cite_this, reproducibility_report),
)


def setup(app) -> dict:
    ndlbuild.refuse_other_checkout(pathlib.Path(app.srcdir))
    os.environ["NDL_MODE"] = ndlbuild.MODE  # kernels inherit it
    app.connect("config-inited", on_config, priority=900)
    app.connect("env-before-read-docs", on_read)
    app.connect("autodoc-process-docstring", ndlapi.on_docstring)
    app.connect("doctree-read", on_doctree)
    app.connect("html-page-context", on_page)
    app.connect("html-page-context", name_toggles, priority=900)  # after the theme's own
    app.add_transform(ndlchapters.NumberedTitle)
    app.connect("build-finished", on_finish)
    for script in ("figures.js", "hover.js"):  # on every page
        app.add_js_file(script, loading_method="defer")
    for make in (
        DIRECTIVES
    ):  # the directive of a function has its name: it makes HTML, or nodes, for the page
        kind = type(make.__name__, (BookDirective,), {"make": staticmethod(make)})
        app.add_directive(make.__name__.replace("_", "-"), kind)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
