"""Printing a page of the book: one sheet of A4 or a refusal that says why."""

import stat
import sys

import pytest
from lab import LabError
from lab.tools import report


def pdf(*sizes: tuple[float, float]) -> bytes:
    """As much of a PDF as is read."""
    pages = b"".join(
        b"<</Type /Page\n/MediaBox [0 0 %.2f %.2f]>>\n" % (width, height) for width, height in sizes
    )
    return b"%PDF-1.4\n<</Type /Pages>>\n" + pages


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    """A browser that writes what it is told to: `prints(...)` sets the PDF, or the words with which it fails."""
    program = tmp_path / "browser"
    monkeypatch.setenv("NDL_CHROMIUM", str(program))

    def prints(content: bytes | None, words: str = ""):
        (tmp_path / "content").write_bytes(content or b"")
        program.write_text(
            f"#!{sys.executable}\n"
            "import pathlib, sys\n"
            f"if {content is None}:\n    sys.exit({words!r})\n"
            "name = next(a for a in sys.argv if a.startswith('--print-to-pdf='))[15:]\n"
            f"pathlib.Path(name).write_bytes(pathlib.Path({str(tmp_path / 'content')!r}).read_bytes())\n"
        )
        program.chmod(program.stat().st_mode | stat.S_IXUSR)

    return prints


def test_one_sheet_is_printed(stand_in, tmp_path, capsys):
    stand_in(pdf((594.96, 841.92)))
    (tmp_path / "page.html").write_text("<p>")
    report.main([str(tmp_path / "page.html"), str(tmp_path / "out.pdf")])
    assert "out.pdf" in capsys.readouterr().out and (tmp_path / "out.pdf").is_file()


@pytest.mark.parametrize(
    ("content", "words", "message"),
    [
        (pdf((595, 842), (595, 842)), "", "not one sheet of A4 but 2"),
        (pdf((612, 792)), "", r"\(612, 792\)"),
        (None, "no display", "did not print: no display"),
        (b"%PDF <</Type /Page>>", "", "cannot read this PDF"),
    ],
)
def test_anything_else_is_refused(stand_in, tmp_path, content, words, message):
    stand_in(content, words)
    (tmp_path / "page.html").write_text("<p>")
    with pytest.raises(SystemExit, match=message):
        report.main([str(tmp_path / "page.html"), str(tmp_path / "out.pdf")])


def test_a_page_that_is_not_there_and_a_wrong_call(stand_in, tmp_path):
    stand_in(pdf())
    with pytest.raises(LabError, match="run make book"):
        report.print_page(tmp_path / "none.html", tmp_path / "out.pdf")
    with pytest.raises(SystemExit, match=r"make report"):
        report.main(["one"])


def test_without_a_browser_it_says_what_to_install(monkeypatch):
    monkeypatch.setenv("NDL_CHROMIUM", "")
    monkeypatch.setenv("PATH", "")
    with pytest.raises(LabError, match="apt-get install chromium"):
        report.browser()


def test_a_real_browser_tells_one_sheet_from_several(browser, tmp_path):
    page = tmp_path / "page.html"
    page.write_text("<!doctype html><style>@page { size: A4 }</style><p>One.</p>")
    report.print_page(page, tmp_path / "out.pdf")
    page.write_text(page.read_text() + "<p>More.</p>" * 200)
    with pytest.raises(LabError, match="not one sheet"):
        report.print_page(page, tmp_path / "out.pdf")
