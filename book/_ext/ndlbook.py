"""The Sphinx extension of the book.

It lets the notebooks find their code, keeps the execution cache honest, ships MathJax inside the book, sets repository
links only where an address is known, and provides the directives of book/*.md:

    {claims-table}  {claims-counts}  {deviations} boxes | corrections  {run-status} runs | chapters  {build-status}
"""

import hashlib
import importlib.metadata
import importlib.util
import os
import pathlib
import platform
import re
import shutil
import subprocess
import sys

from docutils import nodes
from docutils.statemachine import StringList
from sphinx.errors import ConfigError
from sphinx.util.docutils import SphinxDirective

sys.path[:0] = [
    str(pathlib.Path(__file__).resolve().parent),
    str(pathlib.Path(__file__).resolve().parents[2] / "notebooks"),
]
import ndltables  # noqa: E402
from lab import ledger, records  # noqa: E402

MODE = "replay"  # the book shows recorded runs and never trains
PACKAGES = (
    "torch",
    "numpy",
    "scipy",
    "pandas",
    "matplotlib",
    "seaborn",
    "scikit-learn",
    "tensorly",
    "tensorly-torch",
    "peft",
    "transformers",
    "safetensors",
    "ipykernel",
    "myst-nb",
)
SOURCES = ("ndlinear.py", "notebooks/lab", "notebooks/results", "book/paper")
MATHJAX = (
    "tex-chtml.js",
    "output/chtml/fonts/woff-v2",
    "input/tex/extensions",
    "a11y",
    "sre/mathmaps/base.json",
    "sre/mathmaps/en.json",
)
KEEP_CACHES = 4
TIMES = "notebook-times"  # the record of `python -m lab.upkeep times`


# --- what the notebooks see --------------------------------------------------------------------------------------


def version(package: str) -> str:
    """Installed version of a package, or 'absent'."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "absent"


def source_files(root: pathlib.Path) -> list[pathlib.Path]:
    """Every file whose change may change what a notebook prints."""
    files: list[pathlib.Path] = []
    for name in SOURCES:
        path = root / name
        files += [path] if path.is_file() else [p for p in path.rglob("*") if p.is_file()]
    return sorted(p for p in files if "__pycache__" not in p.parts and p.suffix not in (".pyc", ".lock"))


def cache_key(root: pathlib.Path) -> str:
    """Hash of sources, records, facts, versions and mode: same key, same outputs."""
    digest = hashlib.sha256()
    for text in (MODE, platform.python_version(), *(f"{p}=={version(p)}" for p in PACKAGES)):
        digest.update(text.encode() + b"\0")
    for path in source_files(root):
        digest.update(str(path.relative_to(root)).encode() + b"\0")
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:12]


def book_state(root: pathlib.Path) -> str:
    """Hash of everything the built book depends on; the tests compare it with the state of the last clean build."""
    digest = hashlib.sha256(f"{cache_key(root)} {repository_url(root)}".encode())
    pages = [p for p in (root / "book").rglob("*") if "_build" not in p.parts and "__pycache__" not in p.parts]
    for path in sorted([root / "_config.yml", root / "_toc.yml", *pages, *(root / "notebooks").glob("*.ipynb")]):
        if path.is_file():
            digest.update(str(path.relative_to(root)).encode() + hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def kernel_environment(root: pathlib.Path, environ: dict) -> None:
    """Kernels inherit the environment: import path and mode go there."""
    paths = [str(root), str(root / "notebooks"), *filter(None, environ.get("PYTHONPATH", "").split(os.pathsep))]
    environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))
    environ["NDL_MODE"] = MODE


def prune_caches(folder: pathlib.Path, keep: int = KEEP_CACHES) -> None:
    """Keep the newest execution caches, so that switching between two states stays fast."""
    if folder.is_dir():
        for old in sorted(folder.iterdir(), key=lambda p: p.stat().st_mtime, reverse=True)[keep:]:
            shutil.rmtree(old, ignore_errors=True)


# --- where the repository is -------------------------------------------------------------------------------------


def github_address(text: str) -> str:
    """https://github.com/OWNER/NAME of any spelling of a GitHub remote, without user or password; else ''."""
    match = re.fullmatch(
        r"(?:https?://(?:[^@/\s]+@)?|ssh://git@|git@)github\.com[:/]([\w.-]+)/([\w.-]+?)(?:\.git)?/?", text.strip()
    )
    return f"https://github.com/{match[1]}/{match[2]}" if match else ""


def repository_url(root: pathlib.Path, environ=os.environ) -> str:
    """Address from NDL_BOOK_URL, else from git's origin when that is on GitHub, else ''."""
    if asked := environ.get("NDL_BOOK_URL", "").strip():
        if not (url := github_address(asked)):
            raise ConfigError(
                f"NDL_BOOK_URL={asked!r} is not the address of a GitHub repository; "
                "write https://github.com/OWNER/NAME or leave it unset"
            )
        return url
    if not (root / ".git").exists():
        return ""
    try:
        answer = subprocess.run(
            ["git", "-C", str(root), "remote", "get-url", "origin"],
            capture_output=True,
            text=True,
            timeout=10,
            check=False,
        )
    except OSError:
        return ""
    return github_address(answer.stdout) if answer.returncode == 0 else ""


def link_repository(options: dict, url: str) -> None:
    """Repository, issue and Colab buttons with an address; none of them without."""
    options["repository_url"] = url
    options["use_repository_button"] = options["use_issues_button"] = bool(url)
    options["launch_buttons"] = {"colab_url": "https://colab.research.google.com"} if url else {}


# --- events ------------------------------------------------------------------------------------------------------


def on_config(app, config) -> None:
    root = pathlib.Path(app.srcdir)
    caches = pathlib.Path(app.outdir).parent / ".jupyter_cache"
    prune_caches(caches)
    app.ndl_state = book_state(root)  # taken now, so that a change during the build makes the book stale
    config.nb_execution_cache_path = str(caches / cache_key(root))
    config.mathjax_path = "mathjax/tex-chtml.js"
    link_repository(config.html_theme_options, repository_url(root))
    for listeners in app.events.listeners.values():  # thebe would add a script of another host to every page
        for listener in [li for li in listeners if li.handler.__module__.startswith("sphinx_thebe")]:
            app.disconnect(listener.id)
    app.registry.css_files[:] = [file for file in app.registry.css_files if "thebe" not in file[0]]


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
    # docutils calls this a list, but its entries are bibliography entries, which a list must not hold
    context["body"] = body.replace('<div role="list" class="citation-list">', '<div class="citation-list">')


def on_finish(app, exception) -> None:
    state = pathlib.Path(app.outdir).parent / "state"
    state.unlink(missing_ok=True)
    if exception or app.builder.format != "html":
        return
    copy_mathjax(pathlib.Path(app.outdir) / "_static" / "mathjax")
    if app._warncount == 0:
        state.write_text(app.ndl_state)


def copy_mathjax(target: pathlib.Path) -> None:
    """Copy what the book uses of MathJax out of the package that ships it."""
    spec = importlib.util.find_spec("sphinx-mathjax-offline")
    if spec is None:
        raise ConfigError("the package sphinx-mathjax-offline is missing: pip install sphinx-mathjax-offline")
    source = pathlib.Path(spec.submodule_search_locations[0]) / "static" / "mathjax"
    for name in MATHJAX:
        if (source / name).is_dir():
            shutil.copytree(source / name, target / name, dirs_exist_ok=True)
        else:
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source / name, target / name)


# --- directives --------------------------------------------------------------------------------------------------


class BookDirective(SphinxDirective):
    """Base: finds the book's files; its page is read again at every build."""

    optional_arguments = 1

    def run(self) -> list[nodes.Node]:
        self.env.note_reread()
        self.root = pathlib.Path(self.env.srcdir)
        self.known = {name.split("/", 1)[1] for name in self.env.found_docs if name.startswith("notebooks/")}
        result = self.content_html()
        return result if isinstance(result, list) else [nodes.raw("", result, format="html")]

    def uri(self, page: str) -> str:
        """Relative address of a page (without .html) or of a folder (with a final slash)."""
        return os.path.relpath(page, os.path.dirname(self.env.docname)) + ("/" if page.endswith("/") else ".html")

    def content_html(self) -> str | list[nodes.Node]:
        raise NotImplementedError


class ClaimsTable(BookDirective):
    def content_html(self):
        return ndltables.claims_table(ledger.claims(), self.uri("notebooks/"), self.known)


class ClaimsCounts(BookDirective):
    def content_html(self):
        return ndltables.claims_counts(ledger.claims(), self.uri("book/claims"))


class RunStatus(BookDirective):
    """Argument `runs` (default): the experiments. Argument `chapters`: how long the notebooks take."""

    def content_html(self):
        names = sorted(path.stem for path in (self.root / "notebooks" / "results").glob("*.jsonl"))
        runs = {name: records.read(name) for name in names}
        times = runs.pop(TIMES, [])
        if (self.arguments or ["runs"])[0] == "chapters":
            return ndltables.chapter_times(times)
        return ndltables.run_status(runs)


class BuildStatus(BookDirective):
    def content_html(self):
        items = [
            ("Python", platform.python_version()),
            ("mode", MODE),
            ("state of the sources", cache_key(self.root)),
            *((name, version(name)) for name in PACKAGES if version(name) != "absent"),
        ]
        entries = "".join(f"<div><dt>{ndltables.escape(k)}</dt><dd>{ndltables.escape(v)}</dd></div>" for k, v in items)
        return f'<dl class="ndl-versions">{entries}</dl>'


class Deviations(BookDirective):
    """Argument `corrections`: from the ledger. Argument `boxes` (default): from the notebooks."""

    def content_html(self):
        if (self.arguments or ["boxes"])[0] == "corrections":
            return ndltables.corrections(ledger.claims(), self.uri("notebooks/"), self.known)
        found = [
            (name, box)
            for name in sorted(self.known)
            for box in ndltables.boxes(self.root / "notebooks" / f"{name}.ipynb")
        ]
        return [node for name, box in found for node in self.box(name, *box)] or "<p>None so far.</p>"

    def box(self, name: str, heading: str, anchor: str, markdown: str) -> list[nodes.Node]:
        folder = self.uri("notebooks/")
        link = (
            f'<p class="ndl-from">From <a href="{folder}{ndltables.escape(name)}.html#{anchor}">'
            f"{ndltables.escape(name)}: {ndltables.escape(re.sub(r'[$*`]', '', heading))}</a></p>"
        )
        holder = nodes.container(classes=["ndl-box"])
        text = ndltables.rebase_links(markdown, folder)
        self.state.nested_parse(StringList(text.splitlines(), source=f"notebooks/{name}.ipynb"), 0, holder)
        return [nodes.raw("", link, format="html"), holder]


def explicit_targets(app, doctree) -> None:
    """Let a link page.md#name reach the target (name)= of that page, as it reaches a heading."""
    slugs = app.env.metadata[app.env.docname].setdefault("myst_slugs", {})
    for name, explicit in doctree.nametypes.items():
        if explicit and doctree.nameids.get(name) == name:
            slugs.setdefault(name, (0, name, name))


def setup(app) -> dict:
    kernel_environment(pathlib.Path(app.srcdir), os.environ)
    app.connect("config-inited", on_config, priority=900)
    app.connect("doctree-read", on_doctree)
    app.connect("doctree-read", explicit_targets)
    app.connect("html-page-context", on_page)
    app.connect("build-finished", on_finish)
    app.add_directive("claims-table", ClaimsTable)
    app.add_directive("claims-counts", ClaimsCounts)
    app.add_directive("deviations", Deviations)
    app.add_directive("run-status", RunStatus)
    app.add_directive("build-status", BuildStatus)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
