"""Printing a page of the book: a refusal that says why; that the report is one sheet is in test_built_book.py."""

import sys

import pytest
from lab import LabError
from lab.tools import report


def pdf(*sizes: tuple[float, float]) -> bytes:
    """As much of a PDF as is read."""
    box = b"<</Type /Page\n/MediaBox [0 0 %.2f %.2f]>>\n"
    return b"%PDF-1.4\n<</Type /Pages>>\n" + b"".join(box % size for size in sizes)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (pdf((595, 842), (595, 842)), "not one sheet of A4 but 2"),
        (pdf((612, 792)), r"\(612, 792\)"),
        (b"%PDF <</Type /Page>>", "cannot read this PDF"),
    ],
)
def test_anything_but_one_sheet_is_refused(monkeypatch, tmp_path, content, message):
    page = tmp_path / "page.html"
    page.write_text("<p>")
    monkeypatch.setattr(report, "print_to", lambda target, page: target.write_bytes(content))
    with pytest.raises(LabError, match=message):
        report.print_page(page, tmp_path / "out.pdf")


def test_what_keeps_it_from_printing_is_said(monkeypatch, tmp_path):
    with pytest.raises(LabError, match="run make book"):
        report.print_page(tmp_path / "none.html", tmp_path / "out.pdf")
    with pytest.raises(SystemExit, match="make report"):
        report.main(["one"])
    program = tmp_path / "browser"
    program.write_text(f"#!{sys.executable}\nraise SystemExit('no display')\n")
    program.chmod(0o755)
    monkeypatch.setenv("NDL_CHROMIUM", str(program))
    with pytest.raises(LabError, match="did not print: no display"):
        report.print_to(tmp_path / "out.pdf", program)
    monkeypatch.setenv("NDL_CHROMIUM", "")
    monkeypatch.setenv("PATH", "")
    with pytest.raises(LabError, match="apt-get install chromium"):
        report.browser()
