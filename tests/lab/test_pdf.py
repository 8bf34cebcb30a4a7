"""The chapters as one PDF: ids and links of the one page of all, and what a browser makes of it."""

import re

import pytest
from lab.tools import pdf, report

HEAD = """<html><head><link rel="stylesheet" href="../_static/a.css"><script src="../_static/mathjax/tex.js"></script>
<script src="../_static/other.js"></script></head><body><nav><a href="b.html">side bar</a></nav>"""
ONE = """<article><h1 id="top">One<a class="headerlink" href="#top">#</a></h1><p><a href="b.html#place">there</a>
<a href="b.html">all of it</a> <a href="../book/claims.html">not printed</a>
<a href="#top">up</a> <a href="https://example.org">out</a> <img src="../_images/x.svg" loading="lazy"></p>
<details class="hide"><pre>hidden</pre></details><details><summary>Proof</summary><p>shown</p></details></article>"""
TWO = """<article><h1 id="top">Two</h1><h2 id="place">A place</h2><p>text</p></article>"""
PAGES = ["notebooks/a", "notebooks/b"]


@pytest.fixture
def html(tmp_path):
    (tmp_path / "notebooks").mkdir()
    for name, text in zip(PAGES, (ONE, TWO)):
        (tmp_path / f"{name}.html").write_text(f"{HEAD}{text}</body></html>", encoding="utf8")
    return tmp_path


def test_pages_become_one_with_its_own_links_and_without_what_is_hidden(html):
    text = pdf.joined(html, PAGES)
    links = re.findall(r'<a href="([^"]*)">([^<]*)', text)
    assert links == [
        ("#notebooks-b--place", "there"),
        ("#notebooks-b", "all of it"),
        ("#notebooks-a--top", "up"),
        ("https://example.org", "out"),
    ]
    ids = re.findall(r' id="([^"]*)"', text)
    assert len(ids) == len(set(ids)) and {link[1:] for link, _ in links[:3]} <= set(ids)
    assert "not printed" in text and "side bar" not in text
    assert '<details open="">' in text and "hidden" not in text and "#</a>" not in text
    assert 'src="../_images/x.svg"' in text and "lazy" not in text
    assert 'href="../_static/a.css"' in text and "mathjax" in text and "other.js" not in text


def test_a_title_that_was_written_twice_stands_once_and_no_byte_moves():
    twice, wide = b"/Title (Where to goWhere to go)\n", b"/Title <FEFF00410042" + b"00410042>\n"
    assert pdf.once(twice) == b"/Title (Where to go)" + b" " * 11 + b"\n"
    assert pdf.once(wide) == b"/Title <FEFF00410042>        \n"
    assert pdf.once(b"/Title (Limits) /Title <FEFF0041>") == b"/Title (Limits) /Title <FEFF0041>"


def test_the_pdf_has_outlines_and_links(browser, html, tmp_path):
    pdf.print_book(html, tmp_path / "book.pdf", PAGES)
    written = (tmp_path / "book.pdf").read_bytes()
    assert len(report.sheets(written)) == 2
    assert {b"One", b"Two", b"A place"} <= set(re.findall(rb"/Title \(([^)]*)\)", written))
    assert written.count(b"/Subtype /Link") >= 4 and b"/Outlines" in written


def test_the_front_page_offers_the_file(tmp_path):
    (tmp_path / "book").mkdir()
    page = tmp_path / "book" / "index.html"
    kept = (pdf.ROOT / "book" / "index.md").read_text(encoding="utf8")
    page.write_text(kept[kept.index("`make pdf`") :], encoding="utf8")
    pdf.offer(tmp_path, tmp_path / "all.pdf")
    assert '<a download href="../all.pdf">' in page.read_text(encoding="utf8")
