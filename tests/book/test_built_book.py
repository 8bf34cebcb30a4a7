"""The built book: every link leads somewhere, nothing is fetched from outside, and every page reads in a browser.

A book whose sources have not changed since its last clean build is used as it is, else it is built first.
"""

import collections
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


# --- without a browser -------------------------------------------------------------------------------------------


@functools.cache
def places(path: pathlib.Path) -> list[str]:
    """The ids of a page, to which links lead."""
    return [tag["id"] for tag in soup(path).select("[id]")]


def wrong_addresses(path: pathlib.Path) -> list[str]:
    """What a page fetches from outside, and what it fetches or leads to that the book does not have."""
    found = []
    for tag in soup(path).select("[href], [src]"):
        address = tag.get("src") or tag["href"]
        name, _, anchor = map(urllib.parse.unquote, address.partition("#"))
        target = (path.parent / name.partition("?")[0]).resolve() if name else path
        if re.match("(https?:)?//", address):
            found += [] if tag.name == "a" else [f"{address} is fetched from outside"]
        elif re.match("[a-z]+:|#?$", address):
            continue
        elif not target.is_file():
            found.append(f"{address} leads to no file")
        elif anchor and target.suffix == ".html" and anchor not in places(target):
            found.append(f"{address} leads to no place on that page")
    return found


def test_every_address_of_a_page_leads_somewhere_and_none_is_fetched_from_outside(html):
    """On the pages of the table of contents and those beside them: start, search, index, and old addresses, which forward."""
    beside = [path for part in ("*.html", "book/*.html", "claims/*") for path in html.glob(part)]
    for path in {*(html / name for name in PAGES), *beside}:
        assert not wrong_addresses(path), path
        assert len(set(places(path))) == len(places(path)), f"{path}: an id stands twice"


def test_a_dead_link_and_an_outside_picture_would_be_found(tmp_path):
    page = tmp_path / "a.html"
    links = (
        '<a href="b.html">b</a> <a href="#y">y</a> <a href="#x">x</a> <a href="https://x.y">z</a>'
    )
    page.write_text(f'<p id="x">{links}<img src="//x.y/z.png">')
    found = [" ".join(said.split(" ")[1:4]) for said in wrong_addresses(page)]
    assert found == ["leads to no", "leads to no", "is fetched from"]


SAID = ("statement", "condition", "correction", "would_take", "reason", "direction_only")


def test_every_claim_stands_in_the_table_and_in_the_file_for_programs(html):
    """In the words of the ledger, also where scripts are off, and each settled one with a link to its cell."""
    table, claims = soup(html / "book" / "claims.html"), ledger.claims()
    told = json.loads((html / "claims.json").read_text(encoding="utf8"))["claims"]
    assert not table.select("tbody tr[hidden]") and table.select(".ndl-filter[hidden]")
    for claim, record in zip(claims, told, strict=True):
        row = table.find(id=claim["id"])
        words = [claim[key] for key in SAID if claim.get(key)]
        assert all(word in row.text for word in [ledger.label(claim), *words]), claim["id"]
        assert row["data-verdict"] == ledger.outcome(claim)
        assert ("data-only" in row.attrs) == bool(claim.get("direction_only"))
        link = row.td.find("a")
        settled = claim["verdict"] in ledger.SETTLED
        assert bool(link) == settled, f"{claim['id']}: is its chapter in _toc.yml?"
        cell = f"notebooks/{claim['notebook']}.html#claim-{claim['id']}" if settled else ""
        assert record["url"] == (cell or f"book/claims.html#{claim['id']}")
        assert not settled or link["href"] == f"../{cell}"
        assert all(record[key] == claim.get(key) for key in ("id", "verdict", *SAID))


def counted(rows) -> dict[str, int]:
    """Outcome -> number, of pairs of a text that ends with the outcome and a number."""
    return {text.split(" ", 1)[1]: int(number) for text, number in rows}


def test_the_front_page_and_the_report_count_every_outcome(html):
    counts = {name: n for name, n in ledger.tally(ledger.claims()).items() if n}
    entries = soup(html / "book" / "index.html").select(".ndl-counts li > a")
    assert counted((a.span.text, a.b.text) for a in entries) == counts
    judged = ledger.tally([c for c in ledger.claims() if c["verdict"] in ledger.SETTLED])
    given = collections.Counter()
    for mark in soup(html / "book" / "index.html").select(".ndl-chapters .ndl-badge"):
        _, number, outcome = mark.text.split(" ", 2)
        given[outcome] += int(number)
    assert given == {name: n for name, n in judged.items() if n}
    rows = [row.find_all("td") for row in soup(html / "book" / "report.html").select("tbody tr")]
    *outcomes, all_ = [[cell.text for cell in row] for row in rows]
    assert counted((row[0], row[-1]) for row in outcomes) == counts
    assert sum(map(int, all_[1:-1])) == int(all_[-1]) == len(ledger.claims())


def test_the_log_of_corrections_is_whole_and_newest_first(html):
    """And the looks at a claim whose verdict changed are counted above it."""
    page, entries = soup(html / "book" / "corrections.html"), ndlcorrections.load(ROOT)
    turned = {row.td.text: row.find_all("td")[2].text for row in page.select("details tbody tr")}
    assert turned == {id: str(len(path)) for id, path in ndlcorrections.turned(entries).items()}
    for row, entry in zip(page.select(".ndl-log tbody tr"), reversed(entries), strict=True):
        assert row.time["datetime"] == str(entry["date"])
        assert str(entry["why"]) in row.text and row.select_one("a.ndl-id").text == entry["claim"]


def test_files_to_take_along_are_there(html):
    """From the front page, from the recipes, and from every chapter."""
    for name in ("book/index.html", "book/recipes.html", *CHAPTERS):
        (link,) = soup(html / name).select("a[href$='/ndlinear.py'][download]")
        target = (html / name).parent / link["href"]
        assert target.read_bytes() == (ROOT / "ndlinear.py").read_bytes()


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
        caption = image.find_parent("figure") and image.find_parent("figure").figcaption
        assert caption and caption.text.strip(), "a figure without caption"
        file = (html / name).parent / image["src"]
        assert file.suffix == ".svg", f"{file.name} is painted, not drawn"
        assert file.stat().st_size < 1_000_000, f"rasterise what makes {file.name} large"
        assert "<dc:date>" not in file.read_text("utf-8"), "the same figure is another file later"
    for moving in page.select(".ndl-interactive"):
        assert len(moving.text.split()) > 8, "it says nothing where scripts are off"


@pytest.mark.parametrize("name", LECTURES)
def test_a_lecture_trains_a_network_and_its_loss_falls(html, name):
    shown = soup(html / name).select("div.cell:has(.cell_input)")
    assert any(".backward()" in cell.select_one(".cell_input").text for cell in shown)
    losses = [[*map(float, re.findall(r"loss\W+(\d+\.\d+)", cell.text))] for cell in shown]
    assert any(len(found) > 2 and found[-1] < 0.8 * found[0] for found in losses)


def test_previews_name_places_that_exist(html):
    text = (html / "_static" / "previews.js").read_text(encoding="utf8")
    previews = json.loads(text.removeprefix("window.ndlPreviews = ").removesuffix(";\n"))
    theorems = soup(html / "book" / "theorems.html").select("[id^=thm-]")
    wanted = {f"book/theorems#{theorem['id']}" for theorem in theorems}
    wanted |= {f"claim-{claim['id']}" for claim in ledger.claims()}
    wanted |= {name.removesuffix(".html") for name in CHAPTERS}
    terms = {name for name in previews if name.startswith("book/glossary#")}
    assert theorems and terms and previews.keys() - terms == wanted
    assert all(BeautifulSoup(shown, "html.parser").text.strip() for shown in previews.values())


# --- with a browser ----------------------------------------------------------------------------------------------


DESKTOP = {"width": 1280, "height": 900}
PHONE = {"width": 390, "height": 844}


@pytest.fixture(scope="session")
def site(html, serving):
    """The book over http on this machine."""
    with serving(html) as address:
        yield f"{address}/"


@pytest.fixture(scope="session")
def context(browser, site):
    """Where pages open, so that scripts and fonts are fetched once, and a list of all that goes wrong on them."""
    wrong = []

    def said(message):
        if message.type == "error" and "favicon.ico" not in message.location["url"]:
            wrong.append(f"console: {message.text} {message.location}")

    def asked(request):
        if not request.url.startswith((site, "data:", "blob:")):
            wrong.append(f"outside: {request.url}")

    with browser.new_context() as context:
        context.on("request", asked)
        context.on("requestfailed", lambda r: wrong.append(f"request: {r.url} {r.failure}"))
        context.on("console", said)
        context.on("weberror", lambda error: wrong.append(f"script: {error.error}"))
        yield context, wrong


@pytest.fixture
def visit(context, site):
    """Opens a page of the book; a test fails where a script fails or something is fetched from outside."""
    context, wrong = context
    wrong.clear()

    def opened(name: str, size: dict = DESKTOP, theme: str = "light"):
        page = context.new_page()
        page.set_viewport_size(size)
        page.emulate_media(color_scheme=theme)
        page.goto(site + name)
        if name.startswith("search.html"):
            page.wait_for_selector("#search-results li a", timeout=20_000)
        page.evaluate(
            "async () => { if (window.MathJax && MathJax.startup) await MathJax.startup.promise; }"
        )
        return page

    opened.wrong = wrong
    yield opened
    found = list(wrong)  # before what closing breaks off
    for page in context.pages:
        page.close()
    assert not found, "\n".join(found)


# What is wrong with a page as it stands in the browser, each with the place; `picture`: one must be seen at once.
FAULTS = r"""picture => {
    const all = selector => Array.from(document.querySelectorAll(selector));
    const top = e => e ? e.getBoundingClientRect().top + window.scrollY : Infinity;
    const text = document.querySelector('main').cloneNode(true);
    text.querySelectorAll('pre, code, script, mjx-container').forEach(e => e.remove());
    const phone = innerWidth < 500, title = document.querySelector('article h1');
    const first = top(document.querySelector('article :is(figure, .ndl-interactive)'));
    const found = {
        'is not typeset': all('main .math').filter(e => !e.querySelector('mjx-container')),
        'has an error in an equation': all('mjx-merror, [data-mjx-error]'),
        'is raw TeX': text.textContent.match(/.{0,30}(\$\$|\\\(|\\\[|\\begin\{).{0,30}/g) || [],
        'is an equation to break for phones': all('article div.math').filter(e =>
            (e.querySelector('mjx-container') || e).scrollWidth > 1.3 * e.clientWidth),
        'is wider than the screen': [document.documentElement].filter(e => e.scrollWidth > innerWidth),
        'is far above the first picture': [title].filter(e =>
            picture && first > (phone ? 1.2 * innerHeight : top(e) + 420)),
    };
    return Object.entries(found).flatMap(([fault, where]) =>
        where.map(e => (e.textContent || e).trim().slice(0, 60) + ' ' + fault)); }"""
# Leaves out of a page what takes axe long: equations, the colours of code unless asked for, and of the rows of a table those
# after the second that are made of the same elements: thousands, all of one kind.
STRIP = """code => { document.querySelectorAll('.math').forEach(e => e.remove());
    if (!code) document.querySelectorAll('pre').forEach(e => { e.textContent = e.textContent; });
    const kind = e => e.tagName + e.getAttribute('class') + e.getAttribute('style');
    document.querySelectorAll('tbody').forEach(body => { const seen = {};
        Array.from(body.rows).forEach(row => {
            const own = [row, ...row.querySelectorAll('*')].map(kind).join();
            seen[own] = (seen[own] || 0) + 1;
            if (seen[own] > 2) row.remove(); }); }); }"""


@pytest.mark.parametrize("name", [*MAIN, "search.html?q=Kronecker"])
def test_page_reads_in_a_browser(visit, name):
    """On a phone in the dark, then on a desktop in the light; one page in all four combinations, with the colours of its code."""
    page, picture, whole = visit(name, PHONE, "dark"), name in PICTURE_FIRST, name == CODE_PAGE
    found = page.evaluate(FAULTS, picture)
    page.evaluate(STRIP, whole)
    found += axe(page)
    looks = [("light", PHONE), ("dark", DESKTOP), ("light", DESKTOP)]
    for theme, size in looks if whole else looks[-1:]:
        turn(page, theme, size)
        found += page.evaluate(FAULTS, picture)
        found += axe(page, "html" if whole else "main", "color-contrast")
    assert not found, "\n".join(dict.fromkeys(found))


def turn(page, theme: str, size: dict) -> None:
    """What a reader sees whose system turns light or dark, or whose window changes, while the page is open."""
    page.emulate_media(color_scheme=theme)
    page.set_viewport_size(size)
    page.wait_for_function(f"document.documentElement.dataset.theme === '{theme}'")
    page.wait_for_timeout(500)  # colours fade


def axe(page, part: str | None = None, *rules: str) -> list[str]:
    """Serious and critical violations found by axe-core on a page, or on a part of it, by all or some of its rules."""
    from axe_playwright_python.sync_playwright import Axe

    out = []
    options = {"resultTypes": ["violations"], "preload": False} | (
        {"runOnly": rules} if rules else {}
    )
    for violation in Axe().run(page, part, options).response["violations"]:
        if violation["impact"] in ("serious", "critical"):
            rule = f"{violation['id']} ({violation['help']})"
            out += [f"{rule}: {n['target']}\n    {n['html'][:160]}" for n in violation["nodes"]]
    return out


def test_the_report_prints_as_one_sheet(html, browser, tmp_path):
    report.print_page(html / "book" / "report.html", tmp_path / "report.pdf")


WRONG = r'<p class="pale">\(x\)</p><p style="width: 3000px; position: absolute">wide</p>'


def test_a_pale_word_and_an_outside_request_would_be_found(visit):
    """And raw TeX, a page that is too wide, and one without a picture."""
    page = visit("book/how-to-run.html")
    page.evaluate("html => document.querySelector('article').innerHTML += html", WRONG)
    found = " ".join(page.evaluate(FAULTS, True))
    assert all(words in found for words in ("raw TeX", "wider than the screen", "first picture"))
    page.add_style_tag(content="[data-theme=dark] .pale { color: #444; background: #222 }")
    page.evaluate(STRIP, False)
    assert not axe(page)
    turn(page, "dark", DESKTOP)
    assert any("color-contrast" in complaint for complaint in axe(page, "main"))
    page.evaluate("new Image().src = 'https://example.org/x.png'")
    page.wait_for_timeout(200)
    assert "outside: https://example.org/x.png" in visit.wrong
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
    page = visit("notebooks/23_entropy.html", PHONE)
    image, dialog = page.locator(".ndl-figure img").first, page.locator(".ndl-dialog")
    before = image.bounding_box()["width"]
    image.click()
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
