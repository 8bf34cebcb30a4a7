"""The built book: every link leads somewhere, nothing is fetched from outside, and every page reads in a browser.

A book whose sources have not changed since its last clean build is used as it is, else it is built first.
"""

import contextlib
import functools
import inspect
import json
import pathlib
import re
import subprocess
import sys
import urllib.parse

import filelock
import ndlbuild
import ndlcorrections
import pytest
import torch
from bs4 import BeautifulSoup
from lab import modes
from lab.page import ledger
from lab.tools import report

import ndlinear
import ndlinear_lora

ROOT = pathlib.Path(__file__).resolve().parents[2]
HTML = ROOT / "book" / "_build" / "html"


TOC = (ROOT / "_toc.yml").read_text(encoding="utf8")
PAGES = [f"{name}.html" for name in re.findall(r"(?:root|file): *(\S+)", TOC)]
MAIN = [page for page in PAGES if not page.startswith("notebooks/evidence/")]
CHAPTERS = [page for page in MAIN if page.startswith("notebooks/")]
CODE_PAGE = CHAPTERS[0]  # where the colours of code are checked
# the lectures that show a training
TAUGHT = ("10", "11", "12", "15", "20", "21", "22", "23", "24", "34", "52", "60", "64")
LECTURES = [page for page in CHAPTERS if page.split("/")[1].startswith(TAUGHT)]
PICTURE_FIRST = [*LECTURES, *(f"notebooks/{name}.html" for name in modes.REPORTS)]


# --- the book and its pages --------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def build() -> str:
    """What is wrong with the book, which is built now if its sources changed since the last clean build; '' if nothing is."""
    state = HTML.parent / "state"
    here = f"VENV={sys.prefix}"  # as it is: what is installed here is installed
    command = ["make", "-o", f"{sys.prefix}/book.installed", here, "book"]
    HTML.parent.mkdir(parents=True, exist_ok=True)
    with filelock.FileLock(HTML.parent / "state.lock"):  # two workers never build at once
        if state.is_file() and state.read_text() == ndlbuild.book_state(ROOT):
            return ""
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    said = (done.stdout + done.stderr)[-6000:]
    return "" if done.returncode == 0 else f"the book does not build:\n{said}"


@pytest.fixture(scope="session")
def html(build) -> pathlib.Path:
    """The folder of the built book."""
    if build:
        last = build.strip().splitlines()[-1][:200]
        pytest.fail(f"no book, its build ended with: {last}", pytrace=False)
    return HTML


def test_the_book_builds_without_a_warning(build):
    assert not build, build


@functools.cache
def soup(path: pathlib.Path) -> BeautifulSoup:
    return BeautifulSoup(path.read_text(encoding="utf8"), "html.parser")


def built_pages(html: pathlib.Path) -> list[pathlib.Path]:
    """The pages of the table of contents and those beside them (start, search, index), without leftovers of older builds."""
    return [
        *(html / name for name in PAGES if (html / name).is_file()),
        *sorted(html.glob("*.html")),
    ]


# --- without a browser -------------------------------------------------------------------------------------------


def external(address: str) -> bool:
    return bool(re.match(r"(https?:)?//", address.strip()))


def fetched(page: BeautifulSoup) -> list[str]:
    """Every address that a browser fetches when it shows the page."""
    found, styles = [], []
    for tag in page.find_all(True):
        found += [tag[key] for key in ("src", "data", "poster") if key in tag.attrs]
        found += [part.split()[0] for part in tag.get("srcset", "").split(",") if part.strip()]
        if tag.name == "link" and "canonical" not in tag.get("rel", []):
            found.append(tag["href"])
        styles.append(tag.text if tag.name == "style" else tag.get("style", ""))
    named = r"(?:url\(\s*['\"]?|@import\s+['\"])([^'\")]+)"
    return found + re.findall(named, " ".join(styles))


def test_pages_fetch_files_of_the_book_and_nothing_from_outside(html):
    for path in built_pages(html):
        page = soup(path)
        addresses = fetched(page)
        outside = [address for address in addresses if external(address)]
        assert not outside, f"{path.relative_to(html)} fetches {outside}"
        scripts = page.select("script:not([src]):not([type='application/ld+json'])")
        text = " ".join(script.text for script in scripts)
        hosts = set(re.findall(r"https?://[\w.-]+", text)) - {"http://www.w3.org"}
        assert not hosts, f"{path.relative_to(html)}: an inline script names {hosts}"
        for address in addresses:
            if not address.startswith(("data:", "#")):
                target = path.parent / urllib.parse.unquote(re.split(r"[?#]", address)[0])
                assert target.is_file(), (
                    f"{path.relative_to(html)} wants {address}, not in the book"
                )


def dead_links(html: pathlib.Path, pages: list[pathlib.Path] | None = None) -> list[str]:
    """Links inside the book, or on some of its pages, whose page or anchor does not exist."""
    dead, anchors = [], {}
    for path in pages or built_pages(html):
        for tag in soup(path).find_all("a", href=True):
            address = tag["href"]
            if external(address) or re.match(r"[a-z]+:", address) or address in ("", "#"):
                continue
            name, _, anchor = address.partition("#")
            name = urllib.parse.unquote(name.partition("?")[0])
            target = (path.parent / name).resolve() if name else path
            if not target.is_file():
                dead.append(f"{path.relative_to(html)} → {address}: no such page")
            elif anchor and target.suffix == ".html":
                if target not in anchors:
                    anchors[target] = {tag.get("id") for tag in soup(target).find_all(True)}
                    anchors[target] |= {tag.get("name") for tag in soup(target).find_all("a")}
                if urllib.parse.unquote(anchor) not in anchors[target]:
                    dead.append(f"{path.relative_to(html)} → {address}: no such place on that page")
    return dead


def test_every_link_inside_the_book_leads_somewhere(html):
    assert not dead_links(html), "\n".join(dead_links(html))


SAID = ("statement", "condition", "correction", "would_take", "reason", "direction_only")


def test_every_claim_stands_in_the_table_on_its_page_and_in_the_file_for_programs(html):
    """In the words of the ledger, and each settled one with a link to its cell."""
    claims = ledger.claims()
    pages = [html / "claims" / f"{claim['id']}.html" for claim in claims]
    assert sorted((html / "claims").iterdir()) == sorted(pages) and not dead_links(html, pages)
    table = soup(html / "book" / "claims.html")
    told = json.loads((html / "claims.json").read_text(encoding="utf8"))["claims"]
    for path, claim, record in zip(pages, claims, told, strict=True):
        row = table.find(id=claim["id"])
        words = [claim[key] for key in SAID if claim.get(key)]
        for part in (soup(path).main, row):
            assert all(word in part.text for word in [ledger.label(claim), *words]), claim["id"]
        assert not fetched(soup(path)) and len(path.read_bytes()) < 10_000
        assert row["data-verdict"] == ledger.outcome(claim)
        assert ("data-only" in row.attrs) == bool(claim.get("direction_only"))
        link = row.td.find("a")
        settled = claim["verdict"] in ledger.SETTLED
        assert bool(link) == settled, f"{claim['id']}: is its chapter in _toc.yml?"
        cell = f"notebooks/{claim['notebook']}.html#claim-{claim['id']}" if settled else ""
        assert not settled or link["href"] == f"../{record['url']}" == f"../{cell}"
        assert all(record[key] == claim.get(key) for key in ("id", "verdict", *SAID))


def test_the_front_page_counts_every_outcome(html):
    entries = soup(html / "book" / "index.html").select(".ndl-counts li > a")
    shown = {a["href"].partition("=")[2].replace("+", " "): int(a.b.text) for a in entries}
    counts = {name: n for name, n in ledger.tally(ledger.claims()).items() if n}
    assert {name: n for name, n in shown.items() if name in counts} == counts


def test_the_log_of_corrections_is_whole_and_newest_first(html):
    """And the looks at a claim whose verdict changed are counted above it."""
    page, entries = soup(html / "book" / "corrections.html"), ndlcorrections.load(ROOT)
    turned = {row.td.text: row.find_all("td")[2].text for row in page.select("details tbody tr")}
    assert turned == {id: str(len(path)) for id, path in ndlcorrections.turned(entries).items()}
    for row, entry in zip(page.select(".ndl-log tbody tr"), reversed(entries), strict=True):
        assert row.time["datetime"] == str(entry["date"])
        assert str(entry["why"]) in row.text and row.select_one("a.ndl-id").text == entry["claim"]


def test_the_page_of_a_claim_reads_in_a_browser(visit):
    page = visit("claims/entropy-flops.html", PHONE)
    assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
    complaints = axe(page)
    page.emulate_media(color_scheme="dark")
    assert not complaints + axe(page)


def test_a_dead_link_would_be_found(tmp_path):
    links = '<a href="b.html">b</a> <a href="#y">y</a> <a href="#x">x</a>'
    (tmp_path / "a.html").write_text(f'<p id="x">{links}</p>')
    found = [line.split(": ")[1] for line in dead_links(tmp_path)]
    assert found == ["no such page", "no such place on that page"]


def test_ids_are_unique_on_each_page(html):
    for name in PAGES:
        ids = [tag["id"] for tag in soup(html / name).select("article [id]")]
        assert sorted(ids) == sorted(set(ids)), f"{name}: an id stands twice"


def test_the_report_prints_as_one_sheet(visit):
    page = visit("book/report.html")
    assert report.sheets(page.pdf(prefer_css_page_size=True)) == [report.A4]


def test_the_report_has_the_counts_of_the_ledger(html):
    page = soup(html / "book" / "report.html")
    rows = [[cell.text for cell in row.find_all("td")] for row in page.select("tbody tr")]
    counted = {row[0].split(" ", 1)[1]: int(row[-1]) for row in rows[:-1]}
    assert counted == {k: n for k, n in ledger.tally(ledger.claims()).items() if n}
    assert sum(map(int, rows[-1][1:-1])) == int(rows[-1][-1]) == len(ledger.claims())


def test_files_to_take_along_are_there(html):
    """From the front page, from the recipes, and from every chapter."""
    for name in ("book/index.html", "book/recipes.html", *CHAPTERS):
        (link,) = soup(html / name).select("a[href$='/ndlinear.py'][download]")
        target = (html / name).parent / link["href"]
        assert target.read_bytes() == (ROOT / "ndlinear.py").read_bytes()
    assert soup(html / "book" / "recipes.html").select(".ndl-take a[href$='/lr_groups.py']")


def typeset(text: str) -> str:
    """Text without what printing changes: spaces, quotation marks, and flags of examples."""
    return re.sub(r"[\s`'\"“”‘’]|# doctest: \+\w+", "", text.replace("...", "…"))


def test_every_public_name_is_documented_without_the_loss_of_a_character(html):
    page = soup(html / "book" / "api.html")
    for module, name in ((m, name) for m in (ndlinear, ndlinear_lora) for name in m.__all__):
        entry = page.find(id=f"{module.__name__}.{name}").find_next("dd")
        for part in inspect.getdoc(getattr(module, name)).split("\n\n"):
            listed = part.startswith(("Args:", "Raises:"))
            assert listed or typeset(part) in typeset(entry.text), f"{name}: {part}"


@pytest.mark.parametrize("name", [page for page in PAGES if page.startswith("notebooks/")])
def test_notebooks_carry_their_outputs(html, name):
    page = soup(html / name)
    assert page.select(".cell_output") and page.select(".ndl-footer"), "was it executed?"
    for image in page.select(".cell_output img"):
        assert len(image.get("alt", "")) > 40 and "/" not in image["alt"][:12], "no alt text"
        file = (html / name).parent / image["src"]
        assert file.suffix == ".svg", f"{file.name} is painted, not drawn"
        assert file.stat().st_size < 1_000_000, f"rasterise what makes {file.name} large"
        assert "<dc:date>" not in file.read_text("utf-8"), "the same figure is another file later"
    for figure in page.select("article figure"):
        assert figure.figcaption and figure.figcaption.text.strip(), "a figure without caption"
    for moving in page.select(".ndl-interactive"):
        assert len(moving.text.split()) > 8, "it says nothing where scripts are off"


@pytest.mark.parametrize("name", LECTURES)
def test_a_lecture_trains_a_network_and_its_loss_falls(html, name):
    shown = soup(html / name).select("div.cell:has(.cell_input)")
    training = [cell for cell in shown if ".backward()" in cell.select_one(".cell_input").text]
    assert training, "no cell that a reader sees trains"
    outputs = [[*map(float, re.findall(r"loss\W+(\d+\.\d+)", cell.text))] for cell in shown]
    falls = [found for found in outputs if len(found) > 2 and found[-1] < 0.8 * found[0]]
    assert falls, "no visible output shows a loss that falls"
    assert all(len(cell.select(".output.stream")) < 2 for cell in shown), "prints in several blocks"


def test_previews_name_places_that_exist(html):
    text = (html / "_static" / "previews.js").read_text(encoding="utf8")
    previews = json.loads(text.removeprefix("window.ndlPreviews = ").removesuffix(";\n"))
    assert sum(name.startswith("claim-") for name in previews) == len(ledger.claims())
    theorems = soup(html / "book" / "theorems.html").select("[id^=thm-]")
    named = {f"book/theorems#{theorem['id']}" for theorem in theorems}
    assert {name for name in previews if "#thm-" in name} == named
    assert all(name.removesuffix(".html") in previews for name in CHAPTERS)
    assert all(BeautifulSoup(html_, "html.parser").text.strip() for html_ in previews.values())


def test_no_address_is_made_up(html):
    url = ndlbuild.repository_url(ROOT)
    for path in built_pages(html):
        for tag in soup(path).select("a[href*='github.com'], a[href*='colab.research']"):
            own = url and url.removeprefix("https://github.com/") in tag["href"]
            assert own or tag.find_parent("article"), f"{path.relative_to(html)}: {tag['href']}"
        assert "executablebooks/jupyter-book" not in path.read_text(encoding="utf8")


# --- with a browser ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def site(html, serving):
    """The book over http on this machine."""
    with serving(html) as address:
        yield f"{address}/"


DESKTOP = {"width": 1280, "height": 900}
PHONE = {"width": 390, "height": 844}


class Visits:
    """Opens pages in the browser, which reaches this machine only, and keeps everything that goes wrong on one of them."""

    def __init__(self, site, new_page):
        self.site, self.new_page, self.wrong = site, new_page, []

    def __call__(self, name: str, size: dict = DESKTOP, theme: str = "light", **options):
        page = self.new_page(**options)
        page.set_viewport_size(size)
        page.emulate_media(color_scheme=theme)
        page.on("request", self.asked)
        page.on("console", self.said)
        page.on("pageerror", lambda error: self.wrong.append(f"script: {error}"))
        if options.get("java_script_enabled", True):  # else its scripts fail, as they should
            page.on("requestfailed", lambda r: self.wrong.append(f"request: {r.url} {r.failure}"))
        page.goto(self.site + name)
        if name.startswith("search.html"):
            page.wait_for_selector("#search-results li a", timeout=20_000)
        if options.get("java_script_enabled", True):
            page.evaluate(
                "async () => { if (window.MathJax && MathJax.startup) await MathJax.startup.promise; }"
            )
        return page

    def said(self, message):
        if message.type == "error" and "favicon.ico" not in message.location["url"]:
            self.wrong.append(f"console: {message.text} {message.location}")

    def asked(self, request):
        if not request.url.startswith((self.site, "data:", "blob:")):
            self.wrong.append(f"outside: {request.url}")


@pytest.fixture(scope="session")
def shared(browser):
    """Where pages open that ask for nothing special: scripts and fonts of the book are fetched once."""
    with browser.new_context(viewport=DESKTOP) as context:
        yield context


@pytest.fixture
def visit(browser, shared, site):
    """Opens a page of the book; a test fails where a script fails or something is fetched from outside."""
    with contextlib.ExitStack() as opened:

        def new_page(**options):
            context = shared
            if options:
                context = opened.enter_context(browser.new_context(viewport=DESKTOP, **options))
            page = context.new_page()
            opened.callback(page.close)
            return page

        visits = Visits(site, new_page)
        yield visits
    assert not visits.wrong, "\n".join(visits.wrong)


UNSET = """() => Array.from(document.querySelectorAll('article .math'))
    .filter(e => !e.querySelector('mjx-container')).map(e => e.textContent.slice(0, 60))"""
RAW = """() => { const copy = document.querySelector('article').cloneNode(true);
    copy.querySelectorAll('pre, code, script, mjx-container').forEach(e => e.remove());
    return (copy.textContent.match(/.{0,30}(\\$\\$|\\\\\\(|\\\\\\[|\\\\begin\\{).{0,30}/g) || []); }"""
WIDE = """() => { const limit = document.documentElement.clientWidth;
    const inner = e => { for (let p = e.parentElement; p; p = p.parentElement)
        if (['auto', 'scroll', 'hidden', 'clip'].includes(getComputedStyle(p).overflowX)) return true; return false; };
    return Array.from(document.querySelectorAll('main *')).filter(e => e.getBoundingClientRect().right > limit + 1 &&
        e.getBoundingClientRect().width > 0 && !inner(e)).slice(0, 5).map(e => e.outerHTML.slice(0, 120)); }"""
LONG = """() => Array.from(document.querySelectorAll('article div.math')).filter(e => {
    const own = e.querySelector('mjx-container'); return own && own.scrollWidth > 1.3 * e.clientWidth; })
    .map(e => e.textContent.slice(0, 60))"""
LOCKED = """() => Array.from(document.querySelectorAll('main *')).filter(e => e.tabIndex < 0 &&
    ['auto', 'scroll'].includes(getComputedStyle(e).overflowX) && e.scrollWidth > e.clientWidth + 1 &&
    !e.querySelector('a, button, input, [tabindex="0"]')).map(e => e.outerHTML.slice(0, 120))"""
STRIP = """code => { document.querySelectorAll('mjx-container').forEach(e => e.remove());
    if (!code) document.querySelectorAll('pre').forEach(e => { e.textContent = e.textContent; });
    const kind = e => e.tagName + e.getAttribute('class') + e.getAttribute('style');
    document.querySelectorAll('tbody').forEach(body => { const seen = {};
        Array.from(body.rows).forEach(row => {
            const own = [row, ...row.querySelectorAll('*')].map(kind).join();
            seen[own] = (seen[own] || 0) + 1;
            if (seen[own] > 2) row.remove(); }); }); }"""
FIRST_PICTURE = """() => { const top = e => e.getBoundingClientRect().top + window.scrollY;
    const picture = document.querySelector('article :is(figure, .ndl-interactive)');
    return [top(document.querySelector('article h1')), picture ? top(picture) : Infinity]; }"""
BROKEN = """() => Array.from(document.images).filter(i => i.loading !== 'lazy' && i.complete && !i.naturalWidth && i.src)
    .map(i => i.src)"""


@pytest.mark.parametrize("name", [*MAIN, "search.html?q=Kronecker"])
def test_page_reads_in_a_browser(visit, name):
    """On a phone in the dark, then on a desktop in the light; one page in all four combinations."""
    page = visit(name, PHONE, "dark")
    if name in PAGES:
        unset, raw = page.evaluate(UNSET), page.evaluate(RAW)
        assert not unset, f"mathematics that was not typeset: {unset}"
        assert not raw, f"raw TeX in the text: {raw}"
        assert not page.locator("mjx-merror, [data-mjx-error]").count(), "an equation has an error"
        assert not page.evaluate(LONG), f"break these equations for phones: {page.evaluate(LONG)}"
    assert not page.evaluate(BROKEN), "an image does not load"
    width = page.evaluate("document.documentElement.scrollWidth")
    assert width <= 390, f"the page is {width} pixels wide on a phone of 390: {page.evaluate(WIDE)}"
    assert not page.evaluate(LOCKED), f"a keyboard cannot scroll these: {page.evaluate(LOCKED)}"
    if name in PICTURE_FIRST:
        picture = page.evaluate(FIRST_PICTURE)[1]
        assert picture <= 1.2 * PHONE["height"], f"the first picture begins at {picture} px"
    whole = name == CODE_PAGE
    complaints = axe(page, whole)
    for theme, size in [("light", PHONE), ("dark", DESKTOP)] if whole else []:
        turn(page, theme, size)
        complaints += axe(page, whole)
    turn(page, "light", DESKTOP)
    if name in PICTURE_FIRST:
        title, picture = page.evaluate(FIRST_PICTURE)
        assert picture - title <= 420, f"the first picture begins {picture - title} px below"
    complaints += axe(page, whole, None if whole else "main")
    assert not complaints, "\n".join(dict.fromkeys(complaints))


def turn(page, theme: str, size: dict) -> None:
    """What a reader sees whose system turns light or dark, or whose window changes, while the page is open."""
    page.emulate_media(color_scheme=theme)
    page.set_viewport_size(size)
    page.wait_for_function(f"document.documentElement.dataset.theme === '{theme}'")
    page.wait_for_timeout(500)  # colours fade
    # the theme decides anew which code cells scroll
    page.wait_for_function(f"({LOCKED})().length === 0")


def axe(page, code: bool = False, part: str | None = None) -> list[str]:
    """Serious and critical violations found by axe-core on a page, or on a part of it.

    Equations are left out, the colours of code outside one page, and of the rows of a table those after the second that
    are made of the same elements: thousands, all of one kind. Bars around the text are alike on all pages.
    """
    from axe_playwright_python.sync_playwright import Axe

    page.evaluate(STRIP, code)
    out = []
    options = {"resultTypes": ["violations"], "preload": False}
    for violation in Axe().run(page, part, options).response["violations"]:
        if violation["impact"] in ("serious", "critical"):
            rule = f"{violation['id']} ({violation['help']})"
            out += [f"{rule}: {n['target']}\n    {n['html'][:160]}" for n in violation["nodes"]]
    return out


def test_a_pale_word_and_an_outside_request_would_be_found(visit):
    page = visit("book/how-to-run.html")
    page.evaluate("document.querySelector('article').innerHTML += '<p class=\"pale\">pale</p>'")
    page.add_style_tag(content="[data-theme=dark] .pale { color: #444; background: #222 }")
    assert not axe(page)
    turn(page, "dark", DESKTOP)
    assert any("color-contrast" in complaint for complaint in axe(page, part="main"))
    page.evaluate("new Image().src = 'https://example.org/x.png'")
    page.wait_for_timeout(200)
    assert "outside: https://example.org/x.png" in visit.wrong
    page.close()
    visit.wrong.clear()


FIRST = {
    "VC dimension": "20",
    "learning rate": "15",
    "bias": "10",
    "should I use it": "72",
    "which structured layer": "64",
}


def test_search_finds_the_chapter_about_the_words_first(visit):
    for words, chapter in FIRST.items():
        page = visit(f"search.html?q={urllib.parse.quote(words)}")
        found = "/found \\d+ page/.test(document.querySelector('.search-summary').textContent)"
        page.wait_for_function(found)
        results = page.locator("#search-results li > a")
        links = results.evaluate_all("all => all.map(one => one.getAttribute('href'))")
        assert links[0].startswith(f"notebooks/{chapter}_"), links[:3]
    page.wait_for_function("document.querySelectorAll('#search-results p.context').length > 3")
    excerpts = page.locator("#search-results p.context").all_inner_texts()
    assert not [text for text in excerpts if re.search(r"\\[(a-zA-Z]|\.ipynb \.pdf|SHA-256", text)]


GRIDS = """() => Object.fromEntries(Array.from(document.querySelectorAll('.ndl-steps table'), table =>
    [table.caption.textContent, Array.from(table.rows, row => Array.from(row.cells, cell => cell.textContent))]))"""


def test_the_example_of_chapter_10_step_by_step(visit):
    page = visit("notebooks/10_one_layer.html")
    figure = page.locator(".ndl-steps")
    values = json.loads(figure.get_attribute("data-values"))
    layer = ndlinear.NdLinear((2, 3), (2, 2)).double()
    with torch.no_grad():
        for mode, W, b in zip(layer.align_layers, values["weights"], values["biases"]):
            mode.weight.copy_(torch.tensor(W).T)
            mode.bias.copy_(torch.tensor(b))
    X = torch.tensor(values["input"], dtype=torch.float64)

    def shown(name: str) -> list[list[float]]:
        return [[float(cell) for cell in row] for row in page.evaluate(GRIDS)[name]]

    figure.focus()
    page.keyboard.press("Home")
    half = page.evaluate(GRIDS)["after mode 1"]
    assert [float(row[0]) for row in half] == layer.align_layers[0](X[:, 0]).tolist()
    assert {row[1] for row in half} == {"·"}
    sentences = set()
    for _ in range(12):
        sentences.add(page.locator(".ndl-steps-say").inner_text())
        page.keyboard.press("ArrowRight")
    assert len(sentences) == 10
    (weight,) = [name for name in page.evaluate(GRIDS) if "⊗" in name]
    assert shown(weight) == ndlinear.kronecker_weight(layer).tolist()
    assert shown("total bias") == ndlinear.total_bias(layer).reshape(-1, 1).tolist()
    assert shown("vec Y") == layer(X[None]).reshape(-1, 1).tolist()
    page.get_by_role("button", name="Mode 2: rows").click()
    page.get_by_role("button", name="Next").click()
    assert shown("Y") == layer(X[None])[0].tolist()


def test_the_sums_of_terms_of_chapter_22(visit):
    """Errors and numbers stored, for every picture and R, by keyboard."""
    page = visit("notebooks/22_approximation.html")
    figure = page.locator(".ndl-terms")
    slider = figure.get_by_role("slider", name="Terms, or rank, R")
    for name, example in json.loads(figure.get_attribute("data-values")).items():
        picture = torch.tensor(example["picture"], dtype=torch.float64)
        s = torch.linalg.svdvals(picture)
        figure.get_by_role("button", name=name).click()
        slider.focus()
        page.keyboard.press("Home")
        for R in range(1, 9):
            said = figure.get_by_role("status").inner_text()
            nearest = ndlinear.nearest_kronecker(picture, (4, 4), (4, 4), R)[1]
            found = [float(number) for number in re.findall(r"\d\.\d\d", said)]
            errors = [nearest, (s[R:].norm() / s.norm()).item()]
            assert found == pytest.approx(errors, abs=0.006), (name, said)
            assert f"stores {R * 32} numbers; the picture has {picture.numel()}" in said
            page.keyboard.press("ArrowRight")


def check_one_order(figure, D, H, order) -> None:
    """The figure of chapter 12 shows this order of the modes, with the cost of every step and of all."""
    macs, best = (ndlinear.count_macs(D, H, one) for one in (order, ndlinear.cheapest_order(D, H)))
    rows = figure.locator("tbody tr").all_inner_texts()
    assert [int(row.split()[1]) - 1 for row in rows] == list(order)
    assert sum(int(row.split("\t")[3].replace(",", "")) for row in rows) == macs
    ending = "the fewest of all orders" if macs == best else f"{macs / best:.2f} times the fewest"
    assert f"{macs:,} multiply-adds, {ending}." in figure.get_by_role("status").inner_text()


def test_the_order_of_modes_of_chapter_12(visit):
    """Orders that the keyboard, a button and dragging make, for every layer."""
    page = visit("notebooks/12_cost_and_order.html")
    figure = page.locator(".ndl-order")
    rows = figure.locator("tbody tr")
    for name, layer in json.loads(figure.get_attribute("data-values")).items():
        D, H = layer["D"], layer["H"]
        figure.get_by_role("button", name=name).click()
        order = list(range(len(D)))
        check_one_order(figure, D, H, order)
        figure.get_by_role("button", name="mode 1 later").focus()
        page.keyboard.press("Enter")
        check_one_order(figure, D, H, [1, 0, *order[2:]])
        rows.nth(1).drag_to(rows.first)
        check_one_order(figure, D, H, order)
        figure.get_by_role("button", name="Cheapest order").click()
        check_one_order(figure, D, H, ndlinear.cheapest_order(D, H))


def test_the_pixels_of_chapter_34_are_shuffled_with_the_keyboard(visit):
    page = visit("notebooks/34_when_do_axes_matter.html")
    figure = page.locator("[data-script=shuffle]")
    values = json.loads(figure.get_attribute("data-values"))
    slider, said = figure.get_by_role("slider"), figure.get_by_role("status")
    slider.focus()
    pictures = []
    for k, moved in enumerate(values["moved"]):
        assert said.inner_text().startswith(f"{moved} of 64 pixels moved")
        left = [f"{layer['left'][k]:.0f} %" for layer in values["layers"]]
        assert re.findall(r"\d+ %", said.inner_text()) == left
        rects = figure.locator("rect")
        pictures.append(rects.evaluate_all("all => all.map(one => one.getAttribute('fill'))"))
        page.keyboard.press("ArrowRight")
    assert len(set(map(tuple, pictures))) == len(pictures) == 17
    assert len({tuple(sorted(picture)) for picture in pictures}) == 1, "a pixel is lost"
    figure.get_by_role("button", name="Put back").click()
    assert said.inner_text().startswith("0 of 64")


def test_a_figure_can_be_enlarged(visit):
    page = visit("notebooks/23_entropy.html", PHONE, has_touch=True)
    image, dialog = page.locator(".ndl-figure img").first, page.locator(".ndl-dialog")
    before = image.bounding_box()["width"]
    image.tap()
    assert dialog.locator("img").bounding_box()["width"] > 1.5 * before
    page.keyboard.press("Escape")
    assert not dialog.is_visible()
    page.get_by_role("button", name="Enlarge the figure").first.focus()
    page.keyboard.press("Enter")
    assert dialog.is_visible()


def test_links_show_what_they_lead_to(visit):
    """With the pointer a theorem, with the keyboard the verdict of a claim."""
    page = visit("notebooks/11_kronecker.html")
    preview = page.locator(".ndl-preview")
    page.locator("article a[href$='#thm-11-3']").first.hover()
    preview.wait_for()
    said = preview.inner_text()
    assert "Theorem 11.3: three ranks" in said and "\\(" not in said
    page.keyboard.press("Escape")
    assert not preview.is_visible()
    page = visit("book/corrections.html")
    preview = page.locator(".ndl-preview")
    target = page.locator(".ndl-log a.ndl-id").first
    target.focus()
    page.keyboard.press("Shift+Tab")
    page.keyboard.press("Tab")
    preview.wait_for()
    assert ledger.outcome(ledger.claim(target.inner_text().strip())) in preview.inner_text()
    assert target.get_attribute("aria-describedby") == "ndl-preview"


def rows_shown(page) -> list[str]:
    shown = "rows => rows.filter(row => !row.hidden).map(row => row.id)"
    return page.eval_on_selector_all(".ndl-ledger tbody tr", shown)


def test_claims_table_filters_and_sorts_and_shows_25_rows_at_a_time(visit):
    page = visit("book/claims.html")
    claims = ledger.claims()
    ids = [claim["id"] for claim in claims]
    assert rows_shown(page) == ids
    rows = page.locator(".ndl-ledger tbody tr:visible")
    assert rows.count() == 25
    page.get_by_role("button", name="Show 25 more").click()
    assert rows.count() == 50
    assert page.evaluate("document.activeElement.textContent") == ids[25]
    header = page.locator(".ndl-ledger th").nth(1)
    header.locator("button").focus()
    for key, direction in (("Enter", "ascending"), ("Space", "descending")):
        page.keyboard.press(key)
        assert header.get_attribute("aria-sort") == direction
        assert rows_shown(page) == sorted(ids, reverse=key == "Space")
    page.click("button[type=reset]")
    page.select_option("select[name=verdict]", "refuted")
    page.select_option("select[name=kind]", "theorem")
    both = [c["id"] for c in claims if c.get("ground") == "refuted" and c["kind"] == "theorem"]
    assert sorted(rows_shown(page)) == sorted(both) and "verdict=refuted" in page.url
    assert f"{len(both)} of 177" in page.inner_text(".ndl-status")
    page.click("button[type=reset]")
    page.fill("input[name=text]", "LORA qwen")
    page.wait_for_function("!document.querySelector('.ndl-status').textContent.startsWith('177')")
    shown = rows_shown(page)
    assert shown and all("qwen" in page.inner_text(f"[id='{row}']").lower() for row in shown)
    page.emulate_media(media="print")
    page.goto(page.url.partition("?")[0])
    assert rows.count() == 177, "paper has no button"


def test_claims_table_without_scripts(visit):
    page = visit("book/claims.html", java_script_enabled=False)
    assert page.locator(".ndl-ledger tbody tr:visible").count() == 177
    assert not page.locator(".ndl-filter").is_visible()


def test_the_address_of_the_claims_table_chooses_what_is_shown(visit):
    for ending in ("#%E0%A4%A", "?verdict=nonsense#no"):
        page = visit(f"book/claims.html{ending}")
        assert page.inner_text(".ndl-status") == "177 claims"
    chosen = [claim["id"] for claim in ledger.claims() if claim.get("direction_only")]
    assert rows_shown(visit("book/claims.html?verdict=direction+only#%")) == chosen
    refuted = next(c["id"] for c in reversed(ledger.claims()) if c.get("ground") == "refuted")
    page = visit(f"book/claims.html?verdict=holds#{refuted}")  # hidden by the filter, and late
    page.wait_for_function("document.querySelector('.ndl-status').textContent === '177 claims'")
    assert page.locator(f"[id='{refuted}']").is_visible()
