"""What the book makes for readers beside its pages: recipes that run, downloads, a citation, a figure and a report from the data."""

import doctest
import hashlib
import json
import subprocess
import sys

import ndlfront
import ndlreport
import ndltake
import pandas as pd
import pytest
import yaml
from bs4 import BeautifulSoup
from lab import modes, stats
from lab.chapters import guide
from lab.page import facts, ledger
from lab.page.recorded import recorded

import ndlinear

ROOT = modes.ROOT
NOTEBOOKS = modes.chapters()


def soup(html: str) -> BeautifulSoup:
    return BeautifulSoup(html, "html.parser")


# --- recipes -----------------------------------------------------------------------------------------------------


def test_recipes_run(tmp_path, monkeypatch):
    """Every example of the page, with the counts that it prints, in the page's own order."""
    monkeypatch.chdir(tmp_path)  # one of them writes a file
    monkeypatch.syspath_prepend(tmp_path)  # what a reader has after the downloads
    ndltake.copy(ROOT, tmp_path)
    page = ROOT / "book" / "recipes.md"
    result = doctest.testfile(str(page), module_relative=False, encoding="utf8")
    text = page.read_text("utf8")
    assert text.count("```python\n") == text.count("```python\n>>> "), "a block is no example"
    assert result.failed == 0 and result.attempted > 50
    assert (tmp_path / "adapter.safetensors").is_file()


def test_the_recipes_say_what_the_records_say():
    sets = {"cifar10": "test_accuracy", "cifar100": "test_top_five"}
    for data, metric in sets.items():
        names = [f"cnn-printed-{data}{more}" for more in ("", "-relu")]
        gain = stats.paired(pd.concat(map(recorded, names)), metric, "relu", "ndlinear")
        assert gain[1] > 0 and round(100 * gain[0]) == 3
    text = " ".join((ROOT / "book" / "recipes.md").read_text("utf8").split())
    assert "with the paper's 50 epochs it is worth three points" in text
    series = guide.measured().query("kind == @guide.SERIES")
    worse = series.query("opponent == 'linear' and better == 'no'")
    told = f"on {len(worse)} of {len(series)} sets it is ahead of NdLinear with time as an axis"
    assert told in text
    wanted = "data == 'cifar10' and arm == 'ndlinear' and lr == 0.001"
    by_rule, at_one = (
        recorded(name).query(wanted).set_index("seed")["test_accuracy"]
        for name in ("step-cifar", "cnn-longer")
    )
    assert stats.interval(by_rule - at_one)[2] < 0
    assert "in [chapter 15](../notebooks/15_step_size.ipynb) it harms the head after a CNN" in text


def test_the_figure_of_the_readme_is_that_of_the_front_page():
    kept = (ROOT / "book" / "_static" / "results.svg").read_text("utf8")
    drawn = ndlfront.standalone(guide.measured())
    assert kept == drawn, "write book/_static/results.svg again from ndlfront.standalone"


# --- downloads ---------------------------------------------------------------------------------------------------


def test_a_download_is_the_file_with_its_version_and_checksum(tmp_path):
    ndltake.copy(ROOT, tmp_path)
    page = soup(ndltake.link(ROOT, "ndlinear", "../"))
    assert page.a["href"] == "../ndlinear.py" and page.a.has_attr("download")
    assert f"version {ndlinear.__version__}," in page.text
    digest = hashlib.sha256((tmp_path / "ndlinear.py").read_bytes()).hexdigest()
    assert page.code.text == digest
    assert (tmp_path / "ndlinear.py").read_bytes() == (ROOT / "ndlinear.py").read_bytes()
    short = soup(ndltake.line(ROOT, "../"))
    assert digest[:12] in short.text and digest in short.span["title"]


def test_the_file_of_rates_runs_by_itself(tmp_path):
    """Without lab and without ndlinear on the path."""
    ndltake.copy(ROOT, tmp_path)
    code = (
        "import sys, torch, lr_groups\n"
        "assert 'lab' not in sys.modules and 'ndlinear' not in sys.modules\n"
        "groups = lr_groups.lr_groups(torch.nn.Linear(3, 2), 0.5)\n"
        "assert {group['lr'] for group in groups} == {0.5}\n"
    )
    how = {"cwd": tmp_path, "env": {"PATH": ""}, "capture_output": True, "text": True}
    done = subprocess.run([sys.executable, "-c", code], **how)
    assert done.returncode == 0, done.stderr


def test_chapters_that_use_the_layer_are_found():
    read = {modes.slug(path): json.loads(path.read_text("utf8")) for path in NOTEBOOKS}
    using = {slug for slug, notebook in read.items() if ndltake.uses_the_layer(notebook)}
    assert {"10_one_layer", "22_approximation", "72_should_you_use_it"} <= using
    assert "71_all_claims" not in using
    body = '<h1>T</h1><div class="ndl-footer"><p>x</p></div>'
    assert ndltake.with_line(body, "<i>") == body.replace("<p>", "<i><p>")


# --- citing ------------------------------------------------------------------------------------------------------


def test_the_citation_says_what_the_file_says():
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf8"))
    text = ndltake.bibtex(ROOT, "https://example.org/book", "2026")
    book, paper = text.split("\n\n")
    assert book.startswith("@software{") and paper.startswith("@article{")
    for value in (cited["title"], cited["version"], "https://example.org/book", "2026"):
        assert f"{{{value}}}" in book
    assert all(a["family-names"] in paper for a in cited["references"][0]["authors"])
    assert cited["references"][0]["doi"] in paper
    assert text.count("{") == text.count("}")
    assert "url" not in ndltake.bibtex(ROOT)


# --- the figure of the front page --------------------------------------------------------------------------------


def situations(*ends: tuple[float, float]) -> pd.DataFrame:
    """Made-up rows of chapter 72; the same interval against both opponents."""
    names = ["Head after a CNN", "Tables", "Tables"]
    rows = []
    for name, (low, high) in zip(names, ends):
        row = {"situation": name, "kind": name, "decides": True, "counts": True}
        for column in ("dense", "fair"):
            row |= {column: (low + high) / 2, f"{column}_low": low, f"{column}_high": high}
        rows.append(row)
    return pd.DataFrame(rows)


@pytest.mark.parametrize(
    ("value", "share"),
    [(-100, 0), (-10, 1 / 6), (-1, 2 / 6), (0, 0.5), (0.5, 3.5 / 6), (10, 5 / 6)],
)
def test_a_difference_has_its_place(value, share):
    width = ndlfront.RIGHT - ndlfront.LEFT
    assert ndlfront.place(value) == pytest.approx(ndlfront.LEFT + share * width)
    assert ndlfront.place(1e6) == ndlfront.place(100) == ndlfront.RIGHT


def test_the_figure_counts_where_intervals_lie_and_draws_what_decides_at_own_rates():
    rows = situations((1, 2), (-3, -1), (-1, 1))
    assert ndlfront.tally(rows, "fair") == "ahead in 1, behind in 1, undecided in 1"
    page = soup(ndlfront.figure(rows, "x.html"))
    assert "NdLinear in 3 situations" in page.figcaption.text
    assert page.figcaption.a["href"] == "x.html"
    drawn = page.find("svg", role="img")
    places = [float(circle["cx"]) for circle in drawn.find_all("circle")]
    assert places == pytest.approx([ndlfront.place(v) for v in (1.5, -2, 0)], abs=0.06)
    assert "Head after a CNN: ahead in 1, behind in 0" in drawn["aria-label"]
    assert "Tables: ahead in 0, behind in 1, undecided in 1" in drawn["aria-label"]
    assert not drawn.find_all(["a", "style", "image"])
    rows["decides"], rows["counts"] = [True, False, True], [True, True, False]
    page = soup(ndlfront.figure(rows, "x.html"))
    assert "NdLinear in 1 situations" in page.figcaption.text
    assert len(page.find("svg", role="img").find_all("circle")) == 1


# --- the report --------------------------------------------------------------------------------------------------

RUNS = {"one": [{"status": "ok", "seconds": 3600.0, "device": "a", "time": "2026-01-02T03"}]}


def report(claims: list[dict]) -> BeautifulSoup:
    uses = ("ahead in 1, behind in 0, undecided in 1", 2)
    return soup(ndlreport.report(claims, RUNS, facts.protocols(), 7, uses))


def test_the_report_has_the_counts_of_the_ledger():
    page = report(ledger.claims())
    rows = [[cell.text for cell in row.find_all("td")] for row in page.select("tbody tr")]
    counted = {row[0].split(" ", 1)[1]: int(row[-1]) for row in rows[:-1]}
    assert counted == {k: n for k, n in ledger.tally(ledger.claims()).items() if n}
    assert sum(map(int, rows[-1][1:-1])) == int(rows[-1][-1]) == len(ledger.claims())
    assert "1 runs of 1 experiments are recorded, 1 hours in all" in page.text
    assert "7 times a verdict" in page.text and "In 2 situations with real axes" in page.text
    assert "No run is recorded." in ndlreport.method({})


def test_the_report_follows_the_ledger():
    """A verdict that changes, changes the table and the sentences."""
    claims = [dict(claim) for claim in ledger.claims()]
    gpu = [claim for claim in claims if "gpu" in claim["needs"]]
    for claim in gpu:
        claim.update(verdict="holds", ground=None)
    assert "takes a graphics card, none is untestable here" in report(claims).text
    assert "open" not in report(claims).select_one("tbody").text
    gpu[0]["verdict"] = "untestable"
    gpu[1]["verdict"] = "open"
    text = report(claims).text
    assert "takes a graphics card, 1 is untestable here" in text and "○ open" in text


def test_every_kind_of_claim_is_in_the_report():
    kinds = {kind for group in ndlreport.GROUPS.values() for kind in group}
    assert {claim["kind"] for claim in ledger.claims()} <= kinds
