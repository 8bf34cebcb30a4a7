"""The book's Sphinx extension: its tables, its cache key, its repository links, and that a failing cell fails the build."""

import datetime
import itertools
import os
import pathlib
import re
import shutil
import subprocess
import sys

import nbformat
import ndlbuild
import ndlcache
import ndlchapters
import ndlcorrections
import ndltables
import pytest
import yaml
from bs4 import BeautifulSoup
from lab import modes
from lab.page import ledger
from sphinx.errors import ConfigError

ROOT = pathlib.Path(__file__).resolve().parents[2]


def soup(html: str) -> BeautifulSoup:
    return BeautifulSoup(html, "html.parser")


# --- tables ------------------------------------------------------------------------------------------------------


def test_every_place_of_the_ledger_has_a_readable_name():
    claims = ledger.claims()
    labels = {label for claim in claims for label in claim["where"]}
    assert labels <= set(ndltables.places()), "add these labels to book/_ext/places.yml"
    areas = {claim["id"].split("-")[0] for claim in claims}
    assert areas <= set(ledger.AREAS), "add these areas to AREAS in notebooks/lab/ledger.py"


# --- numbers and links -------------------------------------------------------------------------------------------

CHAPTERS = {"10": "ten.html", "12": "twelve.html", "thm-11-2": "theorems.html#thm-11-2"}


@pytest.mark.parametrize(
    ("text", "links"),
    [
        ("as chapter 12 says", ["chapter 12"]),
        ("Chapter 10's own rows, in chapter\n12", ["Chapter 10", "chapter\n12"]),
        ("chapters 10, 11 and 12 of 12", ["10", "12"]),
        ("chapter 10, 12 seeds", ["chapter 10"]),
        ("chapter 123, chapter 99, subchapter 10", []),
        ("By Theorem 11.2, not by Theorem 11.20", ["Theorem 11.2"]),
        ('<a href="x">chapter 12</a> <article>chapter 12</article>', ["chapter 12"]),
        (
            "<pre>chapter 12</pre><script>if (a<b) 'chapter 12'</script><b>chapter 12</b>",
            ["chapter 12"],
        ),
    ],
)
def test_chapters_and_theorems_become_links(text, links):
    linked = ndlchapters.link(text, CHAPTERS)
    assert re.sub(r'<a href="t[^"]+">(.*?)</a>', r"\1", linked, flags=re.DOTALL) == text
    assert [a.text for a in soup(linked).select('a[href^="t"]')] == links


def test_the_first_mention_of_a_term_is_a_link():
    terms = {"Kronecker product": "k", "TCL": "t", "fibre": "f", "mode": "m"}
    body = (
        "<h2>A fibre</h2><table><tr><td>fibre</td></tr></table><p>Kronecker products, tcl, TCL-like, "
        "a mode. <b>Fibres</b> and fibres of a Kronecker product, TCL.</p>"
    )
    linked = soup(ndlchapters.link_terms(body, terms)).select("a.ndl-term")
    found = [(a["href"], a.text) for a in linked]
    assert found == [("k", "Kronecker product"), ("f", "Fibre"), ("t", "TCL")]
    assert ndlchapters.link_terms(body, {}) == body


# --- corrections -------------------------------------------------------------------------------------------------

CHANGED = {"date": datetime.date(2026, 1, 2), "claim": "layer-y", "was": "holds", "now": "fails"}
CHANGED |= {"why": "a < b"}
CLAIMS = [{"id": "layer-y", "verdict": "fails"}]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"claim": "layer-nothing"}, "no such claim"),
        ({"now": "undecided"}, "claims.yml says 'fails'"),
        ({"was": "true"}, "not a verdict"),
        ({"date": datetime.datetime(2026, 1, 2, 3)}, "not a date"),
        ({"why": " "}, "does not say why"),
        ({"place": "chapter 1"}, "its fields are"),
    ],
)
def test_a_broken_entry_of_the_log_is_found(change, message):
    assert ndlcorrections.problems([CHANGED], CLAIMS) == []
    found = ndlcorrections.problems([CHANGED | change], CLAIMS)
    assert len(found) == 1 and message in found[0]


def test_the_entries_of_a_claim_follow_from_each_other():
    earlier = CHANGED | {"date": datetime.date(2026, 1, 1), "was": "undecided", "now": "holds"}
    assert ndlcorrections.problems([earlier, CHANGED], CLAIMS) == []
    assert "stands after" in ndlcorrections.problems([CHANGED, earlier], CLAIMS)[0]
    gap = ndlcorrections.problems([earlier | {"now": "undecided"}, CHANGED], CLAIMS)
    assert len(gap) == 1 and "the entry before says 'undecided'" in gap[0]


# --- cache -------------------------------------------------------------------------------------------------------


def test_state_of_the_book_follows_every_source_name_and_version(tmp_path, monkeypatch):
    names = ["ndlinear.py", "notebooks/lab/a.py", "notebooks/results/x.jsonl"]
    names += ["book/paper/claims.yml", "notebooks/evidence/10_x.ipynb"]
    states = []
    for text, name in itertools.product(("one", "two"), names):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
        states.append(ndlbuild.book_state(tmp_path))
    (tmp_path / "notebooks/results/x.jsonl.lock").write_text("")
    assert ndlbuild.book_state(tmp_path) == states[-1]
    (tmp_path / "notebooks/lab/a.py").rename(tmp_path / "notebooks/lab/b.py")
    states.append(ndlbuild.book_state(tmp_path))
    monkeypatch.setattr(ndlbuild, "version", lambda package: "0")
    assert len({*states, ndlbuild.book_state(tmp_path)}) == 2 * len(names) + 2


def write(path: pathlib.Path, *cells) -> None:
    """A notebook that a kernel can run."""
    made = nbformat.v4.new_notebook(cells=list(cells))
    made.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3"}
    path.parent.mkdir(exist_ok=True)
    nbformat.write(made, path)


def noting_notebook(path: pathlib.Path, *reads: tuple[str, str], code: str = "pass") -> None:
    """A notebook that says it read these things."""
    lines = "".join(f"{kind}\t{name}\n" for kind, name in reads)
    source = f"import os\nopen(os.environ['NDL_READS'], 'a').write({lines!r})\n{code}"
    write(path, nbformat.v4.new_code_cell(source))


def test_only_chapters_that_read_a_changed_thing_run_again(tmp_path):
    ledger = tmp_path / "book" / "paper" / "claims.yml"
    ledger.parent.mkdir(parents=True)
    text = "claims:\n- {id: a, notebook: 10_one, verdict: holds}\n- {id: b, notebook: 11_two, verdict: fails}\n"
    ledger.write_text(text)
    (tmp_path / "lab.py").write_text("x = 1")
    one, two = tmp_path / "notebooks" / "10_one.ipynb", tmp_path / "notebooks" / "11_two.ipynb"
    noting_notebook(one, ("claim", "a"), ("file", "lab.py"))
    noting_notebook(two, ("claims of", "11_two"))
    names = ["notebooks/10_one", "notebooks/11_two"]

    def ran(versions="v"):
        return ndlcache.prepare(tmp_path, tmp_path / "cache", names, versions, 60)

    assert ran() == names and ran() == []
    ledger.write_text(text.replace("verdict: fails", "verdict: undecided"))
    assert ran() == ["notebooks/11_two"] and ran() == []
    (tmp_path / "lab.py").write_text("x = 2")
    assert ran() == ["notebooks/10_one"]
    noting_notebook(one, code="assert False")
    assert ran(versions="other") == names
    assert ran(versions="other") == ["notebooks/10_one"], "what fails is not kept"


def test_the_lab_writes_down_what_is_read(tmp_path):
    code = (
        "import lab\nlab.claim('bias-crossover')\nlab.facts('radius_010')\n"
        "lab.ledger.of_chapter('30_radius_bump')\nlab.read('template-example')"
    )
    environ = os.environ | {"NDL_READS": str(tmp_path / "reads.txt")}
    environ["PYTHONPATH"] = f"{ROOT}{os.pathsep}{ROOT / 'notebooks'}"
    subprocess.run([sys.executable, "-c", code], check=True, env=environ)
    found = set((tmp_path / "reads.txt").read_text().splitlines())
    files = ("book/paper/tables/radius_010.csv", "notebooks/results/template-example.jsonl")
    files += ("notebooks/lab/stats.py", "ndlinear.py")
    assert {f"file\t{name}" for name in files} <= found
    assert {"claim\tbias-crossover", "claims of\t30_radius_bump"} <= found
    assert "file\tbook/paper/claims.yml" not in found
    assert not any("chapters/" in line for line in found), "no chapter's module was imported"


def test_a_lab_of_another_checkout_is_refused(tmp_path):
    ndlbuild.refuse_other_checkout(modes.ROOT)
    with pytest.raises(ConfigError, match=r"lab comes from .*make book.*PYTHONPATH="):
        ndlbuild.refuse_other_checkout(tmp_path)


# --- repository --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("https://user:secret@github.com/owner/na.me.git/", "https://github.com/owner/na.me"),
        ("git@github.com:owner/name.git", "https://github.com/owner/name"),
        ("https://notgithub.com/owner/name", ""),
        ("/srv/repositories/name", ""),
    ],
)
def test_repository_url_of_a_remote_or_of_the_environment(text, url, tmp_path):
    git = ["git", "-C", str(tmp_path)]
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run([*git, "remote", "add", "origin", text], check=True)
    assert ndlbuild.repository_url(tmp_path, {}) == url
    if not url:
        with pytest.raises(ConfigError, match=r"https://github.com/OWNER/NAME"):
            ndlbuild.repository_url(tmp_path, {"NDL_BOOK_URL": text})


# --- a miniature book, built for real ----------------------------------------------------------------------------

PAGES = {  # of a book with an address: Markdown and code
    "10_sound": (
        "# Ten\n\nGo, with chapter 11.",
        "import os, lab\nprint(os.environ['NDL_MODE'], lab.mode())",
    ),
    "11_failing": ("# Eleven", "assert 1 + 1 == 3, 'the identity is broken'"),
    "12_crooked": ("# Twelve\n\n[Nowhere](99_none.ipynb)\n\n#### Deep", "1"),
}


def miniature(folder: pathlib.Path) -> None:
    """A book of these pages, with the real configuration and extension."""
    unseen = shutil.ignore_patterns("_build", "*.md", "paper", "__pycache__")
    shutil.copytree(ROOT / "book", folder / "book", ignore=unseen)
    (folder / "notebooks").mkdir()
    for file in ROOT.glob("ndlinear*"):  # the four files, and the guide
        if file.suffix in ("", ".py"):
            (folder / file.name).symlink_to(file)
    for name in ("notebooks/lab", "book/paper"):
        (folder / name).symlink_to(ROOT / name, target_is_directory=True)
    shutil.copy(ROOT / "_config.yml", folder)
    shutil.copy(ROOT / "book" / "bibliography.md", folder / "book")
    names = [*(f"notebooks/{name}" for name in PAGES), "book/bibliography"]
    toc = {"format": "jb-book", "root": "book/index", "chapters": [{"file": n} for n in names]}
    (folder / "_toc.yml").write_text(yaml.safe_dump(toc))
    (folder / "book" / "index.md").write_text("# Mini\n\nSome $x$. More.\n")
    for name, (text, code) in PAGES.items():
        cells = nbformat.v4.new_markdown_cell(text), nbformat.v4.new_code_cell(code)
        write(folder / "notebooks" / f"{name}.ipynb", *cells)


def test_a_failing_cell_and_a_crooked_page_fail_the_build_which_says_where(tmp_path, monkeypatch):
    """The command of the Makefile, which never trains; the page beside them is as it should be."""
    miniature(tmp_path)
    monkeypatch.setenv("NDL_MODE", "full")
    monkeypatch.setenv("NDL_BOOK_URL", "https://github.com/owner/name")
    command = str(pathlib.Path(sys.executable).with_name("jupyter-book"))
    options = ["--path-output", "book", "-W", "--keep-going", "--all"]
    how = {"cwd": tmp_path, "capture_output": True, "text": True}
    done = subprocess.run([command, "build", ".", *options], **how)
    said = done.stdout + done.stderr
    assert done.returncode != 0 and not (tmp_path / "book" / "_build" / "state").exists()
    assert "the identity is broken" in said
    warnings = [line for line in said.splitlines() if "WARNING: " in line]
    for page, words in (
        ("11_failing", "Executing notebook failed"),
        ("12_crooked", "99_none.ipynb"),
        ("12_crooked", "header level"),
    ):
        assert any(page in line and words in line for line in warnings), said
    assert not any("10_sound" in line for line in warnings), said
    html = tmp_path / "book" / "_build" / "html"
    page = soup((html / "notebooks" / "10_sound.html").read_text(encoding="utf8"))
    assert "replay replay" in page.text and page.select_one('a[href="11_failing.html"]')
    links = [a["href"] for a in page.select("a[href]") if "owner/name" in a["href"]]
    blob = "owner/name/blob/main/notebooks/10_sound.ipynb"
    assert f"https://colab.research.google.com/github/{blob}" in links
    lines = (html / "llms.txt").read_text(encoding="utf8").splitlines()
    assert "- [Mini](book/index.html): Some $x$." in lines
    assert "- [10 · Ten](notebooks/10_sound.html): Go, with chapter 11." in lines
