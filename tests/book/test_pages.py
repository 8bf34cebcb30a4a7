"""The page contract: what every notebook of the book must look like.

A rule is a function from a page to complaints, each of which says what to do, or a pattern that stands nowhere on it. Each is shown to
refuse a notebook of the book in which one line is another. That links lead somewhere and headings grow by one level, the build says,
and the tests of the built book that every figure has a caption and an alternative text.
"""

import dataclasses
import functools
import json
import pathlib
import re

import nbformat
import nbmake.nb_run
import pytest
from lab import modes

ROOT = modes.ROOT
NOTEBOOKS = modes.chapters()
FACT = "<!-- fact:"
NUMBERED = (
    r"section|sect\.|§|appendix|theorem|lemma|proposition|corollary|python|torch|numpy|version|v"
)
SECTIONS = {
    "lecture": ("What to take away", "Exercises", "What next", "References"),
    "report": ("Why", "The fair baseline", "Evidence"),
    "evidence": ("Rules", "Runs", "Judgement", "Limits"),
    "other": ("Limits", "Exercises", "What next", "References"),
}
KINDS = tuple(SECTIONS)
MAIN = ("lecture", "report", "other")
# What the book has reached: lower these bounds when it gets shorter, never raise them.
WORDS = 23_500  # of the running text of the main line
LONG_SENTENCES = 0.006  # share above 35 words
CHAPTER = 1_800  # words of one chapter: about a quarter of an hour with its code
REPORT = 600  # of a report on one of the paper's experiments
PARAGRAPH = 120  # of a paragraph or an entry of a list
SHOWN_BY = {  # a page of each kind
    "lecture": "10_one_layer",
    "report": "40_cnn",
    "evidence": "evidence/10_one_layer",
    "other": "00_template",
}


# --- reading a notebook ------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Page:
    slug: str
    notebook: dict

    @property
    def kind(self) -> str:
        """A lecture leaves its rules and runs to a notebook in evidence/, and so does a report; others hold their own."""
        if self.slug.startswith("evidence/"):
            return "evidence"
        if self.slug in modes.REPORTS:
            return "report"
        return "lecture" if modes.evidence(self.slug) else "other"

    def sources(self, kind: str) -> list[str]:
        return ["".join(c["source"]) for c in self.notebook["cells"] if c["cell_type"] == kind]

    @property
    def code(self) -> str:
        """All code but that of the setup cell, which every notebook shares."""
        return "\n\n".join(s for s in self.sources("code") if s != standard_setup())

    @property
    def markdown(self) -> str:
        return "\n\n".join(self.sources("markdown"))

    @property
    def plain(self) -> str:
        """Markdown without code."""
        return re.sub(r"(?ms)^```.*?^```|`[^`]*`", "", self.markdown)

    @property
    def words(self) -> str:
        """Markdown without code and mathematics."""
        return re.sub(r"(?s)\$\$.*?\$\$|\$[^$\n]*\$", "", self.plain)

    @property
    def running(self) -> str:
        """The text without headings, tables, quotations, code, equations, folded parts and references."""
        text = self.markdown.partition("\n## References")[0]
        text = re.sub(r"(?s)<details.*?</details>|```.*?```|\$\$.*?\$\$|<!--.*?-->", " ", text)
        text = re.sub(r"(?m)^\s*(#.*|\|.*|>.*)$", "", text)
        return re.sub(r"\]\([^)]*\)", "]", text)


def read_page(path: pathlib.Path) -> Page:
    return Page(modes.slug(path), json.loads(path.read_text(encoding="utf8")))


@functools.cache
def standard_setup() -> str:
    template = json.loads((modes.NOTEBOOKS / "00_template.ipynb").read_text(encoding="utf8"))
    return "".join(template["cells"][1]["source"])


# --- what stands nowhere -----------------------------------------------------------------------------------------

RAW = "is shown as raw text on Colab or GitHub: use plain Markdown"
HTML = "of HTML only <details>, <summary> and <a id> render everywhere"
FOLDED = "leave an empty line after it, else Markdown inside <details> is not rendered"
APART = "put an empty '>' line before it, else the parts of the box run together"
SHOWN = "use lab.say, lab.table and plt.show()"
ELSEWHERE = "belongs into the evidence, notebooks/evidence"
PRAISED = "leave it out: state the number and let it speak"
PRAISE = (
    r"(?i)\b(clearly|obviously|of course|trivially|dramatic\w*|remarkabl\w*|impressive\w*|amazing\w*"
    r"|groundbreaking)\b"
)
TOGETHER = r"(?m)^> \S.*\n> \*\*(Released code|Here)\."
TAG = r"(?i)</?(?!(?:details|summary|a|br|sub|sup)\b)[a-z]+[\s/>]"
IMPORT = r"(?m)^\s*(from|import) (IPython|google|myst_nb)\b"
JUDGING = r"lab\.(record|whole|verdict|finding)\("
FORBIDDEN = (  # on which pages, in which part of them, what, an example, and what to do
    (KINDS, "markdown", r"(?m)^\s*(```+|~~~+)\s*\{|^\s*:::", "```{note}", RAW),
    (KINDS, "markdown", r"\{[\w:-]+\}`", "see {numref}`fig-one`", RAW),
    (KINDS, "markdown", r"(?m)^\([\w-]+\)=\s*$|^\+\+\+", "(a-label)=", RAW),
    (KINDS, "markdown", r"\[\^[^\]]+\]", "so it is[^1]", RAW),
    (KINDS, "markdown", r"\\\(|\\\[", r"\(x\)", "is no delimiter there: use $ and $$"),
    (KINDS, "markdown", r"!\[", "![a cat](cat.png)", "is an image: draw figures with code"),
    (KINDS, "words", TAG, "<div>", HTML),
    (MAIN, "markdown", r"</summary>\n(?!\n)", "<summary>Solution</summary>\nSo.", FOLDED),
    (KINDS, "plain", TOGETHER, "> **Paper.** So.\n> **Here.** Thus.", APART),
    (KINDS, "plain", PRAISE, "This is Clearly better.", PRAISED),
    (KINDS, "code", r"(?m)^\s*[%!]\w+", "!ls", "no magics and no shell lines in a script"),
    (KINDS, "code", IMPORT, "import IPython", SHOWN),
    (("lecture", "report"), "code", JUDGING, "lab.verdict('a', holds=True)", ELSEWHERE),
    (("report",), "code", r"(?m)^\s*assert ", "assert True", ELSEWHERE),
)


def stands(page: Page, part: str, pattern: str, advice: str):
    if found := re.search(pattern, getattr(page, part)):
        yield f"{found[0].strip()!r}: {advice}"


# --- the rules ---------------------------------------------------------------------------------------------------

RULES = []  # the kinds of pages that each rule is about, and the rule


def rule(*kinds: str):
    return lambda function: RULES.append((kinds, function)) or function


@rule(*MAIN)
def answer_first(page):
    first = page.notebook["cells"][0]
    text = "".join(first["source"]).strip()
    if first["cell_type"] != "markdown" or not text.startswith("# "):
        yield "start with a Markdown cell whose first line is '# ' and the title"
        return
    _, _, rest = text.partition("\n")
    paragraph = rest.strip().split("\n\n")[1 if page.kind == "report" else 0]
    sentences = len(re.findall(r"[.!?](?=\W*(\s|$))", paragraph))
    if sentences == 1 and len(paragraph.split()) > 30:
        yield f"an answer of one sentence has at most 30 words; this one has {len(paragraph.split())}"
    if sentences > (4 if page.kind == "other" else 1):
        yield f"put the answer below the title, in one sentence; the first paragraph has {sentences}"
    if len(re.findall(r"(?m)^[-*] ", rest)) > 3:
        yield "at most three bullets go with the answer, one number each"


@rule("report")
def claimed_first(page):
    head = "".join(page.notebook["cells"][0]["source"])
    if not re.match(r"# .+\n\n\*Claimed\* \([A-Z].+\n\n\*\*[^*]+\*\*\n\n", head):
        yield "below the title write '*Claimed* (place): ...', then the answer in bold"


@rule(*KINDS)
def frame(page):
    second, *_, last = page.notebook["cells"][1:]
    if "".join(second["source"]) != standard_setup():
        yield "make the second cell the setup cell of 00_template.ipynb, byte for byte"
    if "".join(last["source"]) != f'lab.footer("{page.slug}")':
        yield f'make the last cell lab.footer("{page.slug}")'


@rule(*KINDS)
def cell_lengths(page):
    """The one hard limit; what is typical (five to ten lines, one idea a cell) is for the reader of a change to judge."""
    for source in page.sources("code"):
        length = sum(bool(line.strip()) for line in source.splitlines())
        if length > 30 and source != standard_setup():
            yield f"split the cell that starts {source.splitlines()[0]!r}: {length} lines, at most 30"


@rule(*KINDS)
def sections(page):
    titles = re.findall(r"(?m)^## +(.+?)\s*$", page.plain)
    wanted = SECTIONS[page.kind]
    if missing := set(wanted) - set(titles):
        yield f"add the sections {', '.join(f'## {name}' for name in missing)}"
    elif [title for title in titles if title in wanted] != list(wanted):
        yield f"put these sections in this order: {', '.join(wanted)}"


@rule(*KINDS)
def typed_results(page):
    for block in re.split(r"\n\s*\n", re.sub(r"(?s)\$\$.*?\$\$", "", page.plain)):
        text = re.sub(r"\]\([^)]*\)|https?://\S+|\d+(\.\d+){2,}|10\.\d{4,}/\S+", "", block)
        text = re.sub(rf"(?i)\b({NUMBERED})\s?\d+\.\d+", "", text)
        if (found := re.search(r"\d+[.]\d+", text)) and FACT not in block:
            yield (
                f"print {found[0]} from code instead of typing it; if it is a definition or a fact of the paper, "
                f"add {FACT} table or section --> to its paragraph: {block.strip()[:60]!r}"
            )


def sentences(text: str) -> list[int]:
    """How many words each sentence has; a list's entry ends one too."""
    entries = re.sub(r"(?m)^\s*([-*]|\d+\.)\s", "\n\n", text)
    parts = re.split(r"(?<=[.!?])\s+(?=[A-Z*\[$`])|\n\s*\n", entries)
    return [words for part in parts if (words := len(part.split())) > 1]


@rule(*MAIN)
def brief(page):
    words, bound = sum(sentences(page.running)), REPORT if page.kind == "report" else CHAPTER
    if words > bound:
        yield f"it has {words} words, at most {bound}: move rules to the evidence"
    for part in re.split(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.)\s)", page.running):
        if len(part.split()) > PARAGRAPH:
            yield f"split the paragraph {part[:40]!r}: {len(part.split())} words, at most {PARAGRAPH}"


# --- the notebooks of the book -----------------------------------------------------------------------------------


def complaints(page: Page) -> list[str]:
    found = [said for kinds, one in RULES if page.kind in kinds for said in one(page)]
    for kinds, part, pattern, _, advice in FORBIDDEN:
        found += stands(page, part, pattern, advice) if page.kind in kinds else ()
    return found


@pytest.mark.parametrize("path", NOTEBOOKS, ids=modes.slug)
def test_a_notebook_keeps_every_rule(path):
    found = complaints(read_page(path))
    assert not found, f"{path.relative_to(ROOT)}:\n  " + "\n  ".join(found)


def test_every_chapter_is_in_the_table_of_contents():
    toc = (ROOT / "_toc.yml").read_text(encoding="utf8")
    listed = {"00_template", *re.findall(r"file:\s*notebooks/([\w/]+)", toc)}
    written = {modes.slug(path) for path in NOTEBOOKS}
    assert listed == written, f"_toc.yml and notebooks/ differ in {sorted(listed ^ written)}"


def test_the_main_line_gets_no_longer():
    assert sentences("It is so. Then not.\n\n- One two three\n- Four five") == [3, 2, 3, 2]
    pages = [read_page(path) for path in NOTEBOOKS if path.parent == modes.NOTEBOOKS]
    lengths = [words for page in pages for words in sentences(page.running)]
    assert sum(lengths) <= WORDS, f"{sum(lengths):,} words; move rules to the evidence"
    long = sum(length > 35 for length in lengths) / len(lengths)
    assert long <= LONG_SENTENCES, f"{long:.1%} of the sentences have more than 35 words"


def test_book_pages_use_plain_words():
    for path in sorted((ROOT / "book").glob("*.md")):
        found = re.findall(PRAISE, path.read_text(encoding="utf8"))
        assert not found, f"book/{path.name}: leave out {found}"


def test_nbmake_runs_the_solutions_of_exercises(tmp_path, monkeypatch):
    """As notebooks/conftest.py tells it to; a wrong solution fails."""
    monkeypatch.setattr(nbmake.nb_run, "nbformat", nbformat)
    for name in ("NDL_MODE", "PYTHONPATH"):  # put back afterwards
        monkeypatch.setenv(name, "")
    told = modes.NOTEBOOKS / "conftest.py"
    exec(told.read_text(encoding="utf8"), {"__file__": str(told), "__name__": "conftest"})
    text = "<details>\n\n```python\nassert 1 == 2, 'the solution is wrong'\n```\n\n</details>"
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_markdown_cell(text)])
    nbformat.write(notebook, tmp_path / "wrong.ipynb")
    found = nbmake.nb_run.NotebookRun(tmp_path / "wrong.ipynb", 60).execute()
    assert "the solution is wrong" in found.error.summary


# --- the rules can fail ------------------------------------------------------------------------------------------

BREAKS = (  # a rule, a notebook of the book, what stands in it, what would stand there, and words of the complaint
    ("answer_first", "10_one_layer", '"# ', '"', "start with"),
    ("answer_first", "40_cnn", "**Yes at", f"**Yes{30 * ' so'} at", "30 words"),
    ("claimed_first", "40_cnn", "*Claimed* (", "*Claimed*: (", "'*Claimed* (place)"),
    ("frame", "10_one_layer", "sys.path[:0]", "sys.path[:1]", "byte for byte"),
    ("frame", "10_one_layer", "lab.footer(", "lab.footer(10, ", "lab.footer("),
    ("cell_lengths", "00_template", '"import torch\\n",', '"import torch\\n",' * 31, "at most 30"),
    ("sections", "00_template", "## Limits", "## Bounds", "add the sections"),
    ("sections", "00_template", "## A claim of the paper", "## Exercises", "in this order"),
    ("typed_results", "00_template", "Say what", "It takes $2.6$ times. Say what", "2.6"),
    ("brief", "40_cnn", "## Why", f"## Why\\n\\n{121 * 'so '}", "at most 120"),
)


def changed(slug: str, old: str, new: str) -> Page:
    text = (modes.NOTEBOOKS / f"{slug}.ipynb").read_text(encoding="utf8")
    assert old in text
    return Page(slug, json.loads(text.replace(old, new, 1)))


@pytest.mark.parametrize(("name", "slug", "old", "new", "words"), BREAKS)
def test_each_rule_refuses_a_broken_notebook(name, slug, old, new, words):
    (broken,) = [function for _, function in RULES if function.__name__ == name]
    assert words in " ".join(broken(changed(slug, old, new)))


def test_every_rule_is_shown_to_fail():
    assert {name for name, *_ in BREAKS} == {function.__name__ for _, function in RULES}


@pytest.mark.parametrize(
    ("kinds", "part", "pattern", "example", "advice"), FORBIDDEN, ids=[row[3] for row in FORBIDDEN]
)
def test_what_must_not_stand_on_a_page_is_found(kinds, part, pattern, example, advice):
    for kind in kinds:
        page = read_page(modes.NOTEBOOKS / f"{SHOWN_BY[kind]}.ipynb")
        assert page.kind == kind
        cell = {"cell_type": "code" if part == "code" else "markdown", "source": example}
        page.notebook["cells"].insert(2, cell | {"id": "new", "metadata": {}})
        assert any(advice in said for said in complaints(page))
