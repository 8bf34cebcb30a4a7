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


@pytest.mark.parametrize(
    ("content", "words", "message"),
    [
        (pdf((595, 842), (595, 842)), "", "not one sheet of A4 but 2"),
        (pdf((612, 792)), "", r"\(612, 792\)"),
        (None, "no display", "did not print: no display"),
        (b"%PDF <</Type /Page>>", "", "cannot read this PDF"),
    ],
)
def test_anything_but_one_sheet_is_refused(stand_in, tmp_path, content, words, message, capsys):
    page, target = tmp_path / "page.html", tmp_path / "out.pdf"
    page.write_text("<p>")
    stand_in(content, words)
    with pytest.raises(SystemExit, match=message):
        report.main([str(page), str(target)])
    stand_in(pdf((594.96, 841.92)))
    report.main([str(page), str(target)])
    assert "out.pdf" in capsys.readouterr().out and target.is_file()
    with pytest.raises(LabError, match="run make book"):
        report.print_page(tmp_path / "none.html", target)
    with pytest.raises(SystemExit, match=r"make report"):
        report.main(["one"])


def test_without_a_browser_it_says_what_to_install(monkeypatch):
    monkeypatch.setenv("NDL_CHROMIUM", "")
    monkeypatch.setenv("PATH", "")
    with pytest.raises(LabError, match="apt-get install chromium"):
        report.browser()


def test_a_real_browsers_sheet_is_read(browser, tmp_path):
    """That several are read as well is in test_pdf.py."""
    page = tmp_path / "page.html"
    page.write_text("<!doctype html><style>@page { size: A4 }</style><p>One.</p>")
    report.print_page(page, tmp_path / "out.pdf")
