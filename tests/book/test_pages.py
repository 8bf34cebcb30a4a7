"""The page contract: what every notebook of the book must look like.

Each rule is a small function from a notebook to a list of complaints; a complaint says what to do. Every rule is shown
here to accept a sound miniature notebook and to refuse a broken one.
"""

import ast
import collections
import dataclasses
import itertools
import json
import os
import pathlib
import re
import subprocess
import sys

import pytest
from lab import modes
from lab.tools.scripts import folded_solutions

ROOT = pathlib.Path(__file__).resolve().parents[2]
NOTEBOOKS = modes.chapters()
TEMPLATE = ROOT / "notebooks" / "00_template.ipynb"
SECTIONS = ("Limits", "Exercises", "What next", "References")
LECTURE = ("What to take away", "Exercises", "What next", "References")
REPORT = ("Why", "The fair baseline", "Evidence")
EVIDENCE = ("Rules", "Runs", "Judgement", "Limits")
BOX = ("**Paper.**", "**Released code.**", "**Here.**")
HTML = {"details", "summary", "a", "br", "sub", "sup"}
PRAISE = r"clearly|obviously|of course|trivially|dramatic\w*|remarkabl\w*|impressive\w*|amazing\w*|groundbreaking"
NUMBERED = (
    r"section|sect\.|§|appendix|theorem|lemma|proposition|corollary|python|torch|numpy|version|v"
)
FACT = "<!-- fact:"


# --- reading a notebook ------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Page:
    """A notebook, with the standard setup cell and the known DOIs that it is held against."""

    slug: str
    notebook: dict
    setup: str
    dois: frozenset = frozenset()
    neighbours: frozenset = frozenset()
    has_evidence: bool = False

    @property
    def is_evidence(self) -> bool:
        return self.slug.startswith("evidence/")

    @property
    def is_report(self) -> bool:
        return self.slug in modes.REPORTS

    def sources(self, kind: str) -> list[str]:
        return ["".join(c["source"]) for c in self.notebook["cells"] if c["cell_type"] == kind]

    @property
    def code(self) -> list[str]:
        """Code cells without the setup cell, which every notebook shares."""
        return [source for source in self.sources("code") if source != self.setup]

    @property
    def prose(self) -> str:
        """All Markdown without fenced code."""
        return re.sub(r"(?ms)^```.*?^```", "", "\n\n".join(self.sources("markdown")))

    @property
    def plain(self) -> str:
        """Prose without code spans."""
        return re.sub(r"`[^`]*`", "", self.prose)


def known_dois() -> frozenset:
    text = (ROOT / "book" / "references.bib").read_text(encoding="utf8")
    return frozenset(doi.lower() for doi in re.findall(r"doi\s*=\s*\{([^}]+)\}", text))


def standard_setup() -> str:
    cells = json.loads(TEMPLATE.read_text(encoding="utf8"))["cells"]
    return next("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")


def read_page(path: pathlib.Path) -> Page:
    targets = [*NOTEBOOKS, *(ROOT / "book").glob("*.md")]
    pages = {pathlib.Path(os.path.relpath(p, path.parent)).as_posix() for p in targets}
    notebook = json.loads(path.read_text(encoding="utf8"))
    slug = modes.slug(path)
    beside = bool(modes.evidence(slug))
    return Page(slug, notebook, standard_setup(), known_dois(), frozenset(pages), beside)


def headings(page: Page) -> list[tuple[int, str]]:
    found = re.findall(r"(?m)^(#{1,6})\s+(.+?)\s*$", page.prose)
    return [(len(marks), text) for marks, text in found]


# --- the rules ---------------------------------------------------------------------------------------------------


def file_name(page):
    if not re.fullmatch(r"(evidence/)?\d\d_[a-z0-9]+(_[a-z0-9]+){0,3}", page.slug):
        yield "name the file NN_slug.ipynb: two digits, then lower-case words joined by underscores"


def kernel(page):
    if page.notebook["metadata"].get("kernelspec", {}).get("name") != "python3":
        yield "set metadata.kernelspec.name to python3, the kernel that every machine has"


def cell_ids(page):
    ids = [cell.get("id") for cell in page.notebook["cells"]]
    if None in ids or len(set(ids)) < len(ids):
        yield "give every cell its own id (nbformat 4.5); two cells share one or a cell has none"


def answer_first(page):
    first = page.notebook["cells"][0]
    text = "".join(first["source"]).strip()
    if first["cell_type"] != "markdown" or not text.startswith("# "):
        yield "start with a Markdown cell whose first line is '# ' and the title"
        return
    _, _, rest = text.partition("\n")
    paragraph = rest.strip().split("\n\n")[1 if page.is_report else 0]
    sentences = len(re.findall(r"[.!?](?=\W*(\s|$))", paragraph))
    if sentences == 1 and len(paragraph.split()) > 30:
        yield f"an answer of one sentence has at most 30 words; this one has {len(paragraph.split())}"
    if not 1 <= sentences <= 4 or (page.has_evidence and sentences != 1):
        yield f"put the answer below the title, in one sentence; the first paragraph has {sentences}"
    if len(re.findall(r"(?m)^[-*] ", rest)) > 3:
        yield "at most three bullets go with the answer, one number each"


def lecture(page):
    """A chapter whose rules and runs stand in an evidence notebook judges nothing itself."""
    if not page.has_evidence or page.is_report:
        return
    for name in ("record", "whole", "verdict", "finding"):
        if any(f"lab.{name}(" in source for source in page.code):
            yield f"lab.{name} belongs into the evidence, notebooks/evidence"


def report(page):
    """A report says first what was claimed, and where; it proves and judges nothing itself."""
    if not page.is_report:
        return
    head = "".join(page.notebook["cells"][0]["source"])
    if not re.match(r"# .+\n\n\*Claimed\* \([A-Z].+\n\n\*\*[^*]+\*\*\n\n", head):
        yield "below the title write '*Claimed* (place): ...', then the answer in bold"
    for source in page.code:
        if found := re.search(r"(?m)^\s*assert |lab\.(record|whole|verdict|finding)\(", source):
            yield f"{found[0].strip()!r} belongs into the evidence, notebooks/evidence"


def setup_cell(page):
    second = [(c["cell_type"], "".join(c["source"])) for c in page.notebook["cells"][1:2]]
    if second != [("code", page.setup)]:
        yield "make the second cell the setup cell of 00_template.ipynb, byte for byte"


def footer_cell(page):
    source = "".join(page.notebook["cells"][-1]["source"])
    found = re.fullmatch(r"""lab\.footer\(["']([\w/]+)["']\)""", source)
    if not found:
        yield f'make the last cell lab.footer("{page.slug}")'
    elif found[1] != page.slug:
        yield f"lab.footer names {found[1]!r}, the file is {page.slug!r}: use the file's name"


def picture_first(page):
    """The page of a lecture begins with the answer and its picture: what makes the picture is not shown there."""
    pictures = [
        "figure" in c["metadata"].get("mystnb", {}) or "lab.interactive(" in "".join(c["source"])
        for c in page.notebook["cells"]
    ]
    if page.slug == "00_template" or True not in pictures:
        return
    for before in page.notebook["cells"][1 : pictures.index(True)]:
        hidden = {"remove-cell", "remove-input"} & set(before["metadata"].get("tags", ()))
        if before["cell_type"] == "markdown" or not hidden:
            yield f"nothing is shown between the answer and the first picture: cell {before['id']}"


def cell_lengths(page):
    """The one hard limit; what is typical (five to ten lines, one idea a cell) is for the reader of a change to judge."""
    for source in page.code:
        length = sum(bool(line.strip()) for line in source.splitlines())
        if length > 30:
            yield f"split the cell that starts {source.splitlines()[0]!r}: {length} lines, at most 30"


def plain_python(page):
    for source in page.sources("code"):
        try:
            tree = ast.parse(source)
        except SyntaxError as error:
            yield f"no magics and no shell lines, so that the script runs: {error.text or error.msg!s}".strip()
            continue
        for node in ast.walk(tree):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            if any(name.split(".")[0] in ("IPython", "google", "myst_nb") for name in names):
                yield f"do not import {', '.join(names)}: use lab.say, lab.table and plt.show()"


def something_is_checked(page):
    if not (page.has_evidence or page.is_report) and not re.search(
        r"(?m)^\s*assert |lab\.(verdict|finding)\(", "\n".join(page.code)
    ):
        yield "check something: an assertion or a verdict after each derived equation"


def colab_markdown(page):
    everything = "\n\n".join(page.sources("markdown"))
    for pattern, what in (
        (r"(?m)^\s*(```+|~~~+)\s*\{", "a MyST directive"),
        (r"(?m)^\s*:::", "a colon fence"),
        (r"\{[\w:-]+\}`", "a MyST role"),
        (r"(?m)^\([\w-]+\)=\s*$", "a MyST label"),
        (r"\[\^[^\]]+\]", "a footnote"),
        (r"(?m)^\+\+\+", "a MyST block break"),
        (r"\\\(|\\\[", r"\( or \[ as math delimiter (use $ and $$)"),
        (r"!\[", "an image (draw figures with code)"),
    ):
        if found := re.search(pattern, everything):
            yield f"{found[0].strip()!r} is {what}, which Colab or GitHub shows as raw text: use plain Markdown"
    without_math = re.sub(r"(?s)\$\$.*?\$\$|\$[^$\n]*\$", "", page.plain)
    for tag in re.findall(r"</?([a-zA-Z][a-zA-Z0-9]*)[\s/>]", without_math):
        if tag.lower() not in HTML:
            yield f"<{tag}>: of HTML only <details>, <summary> and <a id> render everywhere"


def heading_levels(page):
    levels = headings(page)
    if [level for level, _ in levels].count(1) != 1:
        yield "use exactly one '# ' heading, the title"
    for (before, _), (level, text) in itertools.pairwise(levels):
        if level > before + 1:
            yield f"heading {text!r} jumps from level {before} to {level}: headings grow by one level"


def sections_present(page):
    titles = [text for level, text in headings(page) if level == 2]
    form = REPORT if page.is_report else LECTURE if page.has_evidence else SECTIONS
    wanted = EVIDENCE if page.is_evidence else form
    places = [titles.index(name) if name in titles else -1 for name in wanted]
    for name, place in zip(wanted, places):
        if place < 0:
            yield f"add the section '## {name}'"
    if -1 not in places and places != sorted(places):
        yield f"put these sections in this order: {', '.join(wanted)}"


def section(page, name: str) -> str:
    found = re.search(rf"(?ms)^## {re.escape(name)}\s*$(.*?)(?=^## |\Z)", page.prose)
    return found[1] if found else ""


def exercises(page):
    text = section(page, "Exercises")
    folded = len(re.findall("<details", text))
    few = 1 if page.slug == "00_template" else 2
    if page.is_evidence:
        return
    if "Exercises" in [title for _, title in headings(page)] and not few <= folded <= 3:
        yield f"give two or three exercises with a solution in <details>; there are {folded}"
    if folded != len(re.findall("</details>", text)):
        yield "close every <details>"
    if re.search(r"<summary>[^\n]*</summary>\n(?!\n)", text):
        yield "leave an empty line after </summary>, else Markdown inside <details> is not rendered"


def references(page):
    named = "References" in [title for _, title in headings(page)]
    if named and "https://doi.org/" not in section(page, "References"):
        yield "give each reference as a DOI link, https://doi.org/..."
    for doi in re.findall(r"https://doi\.org/([^\s<>\"]+)", page.prose):
        doi = doi.rstrip(".,;*]")
        while doi.endswith(")") and doi.count(")") > doi.count("("):
            doi = doi[:-1].rstrip(".,;*]")
        if doi.lower() not in page.dois:
            yield f"add the DOI {doi} to book/references.bib, or correct it"


def links(page):
    for target in re.findall(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)", page.plain):
        name, _, _ = target.partition("#")
        if name and not re.match(r"https?://|mailto:", name) and name not in page.neighbours:
            yield f"the link to {target!r} leads nowhere: link to a notebook beside this one or to ../book/*.md"


def figures(page):
    for cell in page.notebook["cells"]:
        source, meta = "".join(cell["source"]), cell["metadata"].get("mystnb", {})
        draws = re.search(r"plt\.(show|subplots|figure|subplot_mosaic)\(", source)
        if not (draws and cell["cell_type"] == "code") and not meta.get("figure"):
            continue
        where = f"cell {cell.get('id')}"
        ends = source.rstrip().splitlines()[-1].strip() == "plt.show()"
        if source.count("plt.show(") != 1 or not ends:
            yield f"{where}: end a figure cell with one plt.show(), one figure per cell"
        figure, alt = meta.get("figure", {}), meta.get("image", {}).get("alt", "")
        caption = figure.get("caption", "")
        if len(caption) < 15:
            yield f"{where}: add a caption of a few words as metadata mystnb.figure.caption"
        if not re.fullmatch(r"fig-[a-z0-9]+(-[a-z0-9]+)*", figure.get("name", "")):
            yield f"{where}: add a name such as fig-counts as metadata mystnb.figure.name"
        if len(alt) < 60 or alt == caption:
            yield f"{where}: say in at least 60 characters what is seen, as metadata mystnb.image.alt"


def no_typed_results(page):
    for block in re.split(r"\n\s*\n", re.sub(r"(?s)\$\$.*?\$\$", "", page.plain)):
        text = re.sub(r"\]\([^)]*\)|https?://\S+|\d+(\.\d+){2,}|10\.\d{4,}/\S+", "", block)
        text = re.sub(rf"(?i)\b({NUMBERED})\s?\d+\.\d+", "", text)
        if (found := re.search(r"\d+[.]\d+", text)) and FACT not in block:
            yield (
                f"print {found[0]} from code instead of typing it; if it is a definition or a fact of the paper, "
                f"add {FACT} table or section --> to its paragraph: {block.strip()[:60]!r}"
            )


def boxes(page):
    for block in re.findall(r"(?m)(?:^>.*\n?)+", page.prose):
        marks = [mark for mark in BOX if mark in block]
        if marks and tuple(re.findall(r"(?m)^> (\*\*[^*]+\*\*)", block)) != BOX:
            yield f"write the box as '> {BOX[0]} ...', '>', '> {BOX[1]} ...', '>', '> {BOX[2]} ...'; it has {marks}"
        elif marks and block.count("\n>\n") < 2:
            yield "put an empty '>' line between the parts of the box, else they run together"


def plain_words(page):
    for word in re.findall(rf"(?i)\b({PRAISE})\b", page.plain):
        yield f"leave out {word!r}: state the number and let it speak"


RULES = (
    file_name, kernel, cell_ids, answer_first, lecture, report, setup_cell, footer_cell, picture_first, cell_lengths, plain_python,
    something_is_checked, colab_markdown, heading_levels, sections_present, exercises, references, links, figures,
    no_typed_results, boxes, plain_words,
)  # fmt: skip


MAIN_LINE = (answer_first, lecture, report, picture_first)

# --- the notebooks of the book -----------------------------------------------------------------------------------


@pytest.mark.parametrize("path", NOTEBOOKS, ids=modes.slug)
def test_a_notebook_keeps_every_rule(path):
    page = read_page(path)
    rules = [rule for rule in RULES if not (page.is_evidence and rule in MAIN_LINE)]
    complaints = [f"{rule.__name__}: {said}" for rule in rules for said in rule(page)]
    assert not complaints, f"notebooks/{page.slug}.ipynb:\n  " + "\n  ".join(complaints)


def test_figure_names_are_unique_in_the_book():
    names = [
        name
        for path in NOTEBOOKS
        for cell in json.loads(path.read_text(encoding="utf8"))["cells"]
        if (name := cell["metadata"].get("mystnb", {}).get("figure", {}).get("name"))
    ]
    twice = [name for name, count in collections.Counter(names).items() if count > 1]
    assert not twice, f"figure names stand twice in the book: {twice}"


def test_every_chapter_is_in_the_table_of_contents():
    toc = (ROOT / "_toc.yml").read_text(encoding="utf8")
    listed = {"00_template", *re.findall(r"file:\s*notebooks/([\w/]+)", toc)}
    written = {modes.slug(path) for path in NOTEBOOKS}
    assert listed == written, f"_toc.yml and notebooks/ differ in {sorted(listed ^ written)}"


def test_book_pages_use_plain_words():
    for path in sorted((ROOT / "book").glob("*.md")):
        found = re.findall(rf"(?i)\b({PRAISE})\b", path.read_text(encoding="utf8"))
        assert not found, f"book/{path.name}: leave out {found}"


def as_script(notebook: dict) -> str:
    """All code of a notebook, then the code of folded solutions, as one script."""
    code = ["".join(c["source"]) for c in notebook["cells"] if c["cell_type"] == "code"]
    return "\n\n".join(code + folded_solutions(notebook))


def run(*command: str, folder: pathlib.Path, **values: str) -> subprocess.CompletedProcess:
    """A program of Python in a folder, with values in its environment."""
    environ = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{TEMPLATE.parent}"} | values
    command = [sys.executable, *command]
    return subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True)


def test_the_template_and_its_solutions_run_as_a_script(tmp_path):
    """In replay, as the chapters run for the book; nbmake runs it small, as it does the chapters."""
    script = tmp_path / "script.py"
    script.write_text(as_script(json.loads(TEMPLATE.read_text(encoding="utf8"))), encoding="utf8")
    values = {"NDL_MODE": "replay", "MPLBACKEND": "Agg", "OMP_NUM_THREADS": "1"}
    done = run(str(script), folder=TEMPLATE.parent, **values)
    assert done.returncode == 0, f"the template fails as a script:\n{done.stderr[-3000:]}"


def test_nbmake_runs_the_solutions_of_exercises(tmp_path):
    """A wrong solution makes `pytest --nbmake` fail."""
    notebook = sound_notebook()
    notebook["cells"] = [notebook["cells"][4], notebook["cells"][20]]
    replaced(1, "assert True", "assert 1 == 2, 'the solution is wrong'")(notebook)
    (tmp_path / "wrong.ipynb").write_text(json.dumps(notebook))
    (tmp_path / "conftest.py").write_bytes((TEMPLATE.parent / "conftest.py").read_bytes())
    command = ["-m", "pytest", "--nbmake", "-q", "-p", "no:cacheprovider", "wrong.ipynb"]
    done = run(*command, folder=tmp_path)
    assert done.returncode == 1 and "the solution is wrong" in done.stdout


# --- the rules can fail ------------------------------------------------------------------------------------------

SETUP = "import lab\n\nlab.start()"


def cell(kind: str, source: str, **metadata) -> dict:
    extra = {"outputs": [], "execution_count": None} if kind == "code" else {}
    return {"cell_type": kind, "source": source, "metadata": metadata, **extra}


def sound_notebook() -> dict:
    """A miniature that keeps every rule."""
    figure = {"name": "fig-one", "caption": "One line, as an example."}
    drawn = {"figure": figure, "image": {"alt": "A line. " * 9}}
    box = "> **Paper.** Says this.\n>\n> **Released code.** Does that.\n>\n> **Here.** Both."
    step = f"## A step\n\nA sentence with 95 % and $N = 2$.\n\n$$\na = b + c\n$$\n\n{box}"
    exercise = "1. Why?\n\n<details><summary>Solution</summary>\n\nSo, see $x$.\n\n```python\nassert True\n```\n\n</details>\n"
    reference = "## References\n\n- [A](https://doi.org/10.1000/(a)b)"
    cells = [
        cell("markdown", "# What does it do?\n\nIt adds. It does so exactly."),
        cell("code", SETUP, tags=["remove-cell"]),
        cell("code", "import matplotlib.pyplot as plt\nplt.subplots()\nplt.show()", mystnb=drawn),
        cell("markdown", step),
        *[cell("code", f"x = {i}\nassert x == {i}") for i in range(16)],
        cell("markdown", "## Limits\n\nOne.\n\n## Exercises\n\n" + exercise * 2),
        cell("markdown", f"## What next\n\n[Next](12_next.ipynb)\n\n{reference}"),
        cell("code", 'lab.footer("11_sound")', tags=["remove-input"]),
    ]
    for number, entry in enumerate(cells):
        entry["id"] = f"c{number}"
    metadata = {"kernelspec": {"name": "python3"}}
    return {"cells": cells, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}


def page_of(notebook: dict, slug: str = "11_sound", has_evidence: bool = False) -> Page:
    dois, beside = frozenset({"10.1000/(a)b"}), frozenset({"12_next.ipynb"})
    return Page(slug, notebook, SETUP, dois, beside, has_evidence)


def with_cell(number: int, **values):
    return lambda notebook: notebook["cells"][number].update(values)


def replaced(number: int, old: str, new: str):
    def change(notebook):
        assert old in notebook["cells"][number]["source"]
        notebook["cells"][number]["source"] = notebook["cells"][number]["source"].replace(old, new)

    return change


def text_added(text: str):
    return replaced(3, "A sentence", f"{text}\n\nA sentence")


BREAKS = {  # for each rule one notebook that breaks it, and a word of the complaint
    kernel: (lambda nb: nb["metadata"]["kernelspec"].update(name="conda-env"), "python3"),
    cell_ids: (with_cell(4, id="c5"), "own id"),
    answer_first: (replaced(0, "It adds. It does so exactly.", "so " * 31 + "is it."), "30 words"),
    setup_cell: (replaced(1, "lab.start()", "lab.start(1)"), "byte for byte"),
    footer_cell: (replaced(22, "11_sound", "10_other"), "file's name"),
    picture_first: (lambda nb: nb["cells"].insert(2, nb["cells"].pop(3)), "nothing is shown"),
    cell_lengths: (with_cell(4, source="x = 1\n" * 31), "at most 30"),
    plain_python: (with_cell(4, source="from IPython.display import Markdown"), "lab.say"),
    something_is_checked: (
        lambda nb: [c.update(source="x") for c in nb["cells"][4:20]],
        "an assertion",
    ),
    colab_markdown: (text_added("see {numref}`fig-one`"), "role"),
    heading_levels: (text_added("#### Deep"), "one level"),
    sections_present: (lambda nb: nb["cells"].insert(21, nb["cells"].pop(20)), "order"),
    exercises: (replaced(20, "</summary>\n\n", "</summary>\n"), "empty line"),
    references: (replaced(21, "10.1000/(a)b", "10.1000/(a)c"), "references.bib"),
    links: (replaced(21, "12_next.ipynb", "13_absent.ipynb"), "leads nowhere"),
    figures: (lambda nb: nb["cells"][2]["metadata"]["mystnb"].pop("image"), "image.alt"),
    no_typed_results: (text_added("It takes $2.6$ times as long."), "2.6"),
    boxes: (replaced(3, "> **Released code.**", "> **Code.**"), "write the box"),
    plain_words: (text_added("This is Clearly better."), "Clearly"),
}


def test_a_sound_notebook_passes_every_rule():
    page = page_of(sound_notebook())
    complaints = {rule.__name__: list(rule(page)) for rule in RULES}
    assert not any(complaints.values()), complaints


@pytest.mark.parametrize("rule", BREAKS, ids=lambda rule: rule.__name__)
def test_each_rule_refuses_a_broken_notebook(rule):
    change, words = BREAKS[rule]
    notebook = sound_notebook()
    change(notebook)
    complaints = list(rule(page_of(notebook)))
    assert any(words in complaint for complaint in complaints), complaints


def test_every_rule_is_shown_to_fail():
    assert {*BREAKS, file_name, lecture, report} == set(RULES)
    assert list(file_name(page_of(sound_notebook(), "Eleven")))


def test_a_lecture_and_a_report_leave_judging_to_their_evidence(monkeypatch):
    notebook = sound_notebook()
    assert not list(lecture(page_of(notebook, has_evidence=True)))
    notebook["cells"][0]["source"] = (
        "# What?\n\n*Claimed* (Table 1): it adds.\n\n**It does.**\n\n- So."
    )
    notebook["cells"][4:20] = [notebook["cells"][4] | {"source": "lab.verdict('a', holds=True)"}]
    (said,) = lecture(page_of(notebook, has_evidence=True))
    assert "belongs into the evidence" in said
    monkeypatch.setattr(modes, "REPORTS", ("11_sound",))
    (said,) = report(page_of(notebook, has_evidence=True))
    assert "belongs into the evidence" in said
    notebook["cells"][4]["source"] = ""
    assert not list(report(page_of(notebook, has_evidence=True)))
    replaced(0, " (Table 1)", "")(notebook)
    (said,) = report(page_of(notebook, has_evidence=True))
    assert "'*Claimed* (place)" in said
