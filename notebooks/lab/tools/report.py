"""`make report`: a page of the built book printed to PDF by a browser that is on this machine.

python -m lab report PAGE.html FILE.pdf
"""

from __future__ import annotations

import os
import pathlib
import re
import shutil
import subprocess

from ..modes import LabError

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
A4 = (595, 842)  # in points, rounded


def browser() -> str:
    """A Chromium: the one that NDL_CHROMIUM names, else one on the path."""
    names = [os.environ.get("NDL_CHROMIUM", ""), *BROWSERS]
    found = next((path for name in names if name and (path := shutil.which(name))), None)
    if found is None:
        raise LabError(
            "no Chromium on the path: install it (Debian: apt-get install chromium) or set NDL_CHROMIUM"
        )
    return found


def sheets(pdf: bytes) -> list[tuple[int, int]]:
    """Width and height of every page of a PDF that Chromium wrote, in points."""
    boxes = re.findall(rb"/MediaBox\s*\[\s*0\s+0\s+([\d.]+)\s+([\d.]+)\s*\]", pdf)
    count = len(re.findall(rb"/Type\s*/Page\b", pdf))
    if count != len(boxes):
        raise LabError(f"cannot read this PDF: {count} pages, {len(boxes)} sizes")
    return [(round(float(width)), round(float(height))) for width, height in boxes]


def print_to(target: pathlib.Path, page: pathlib.Path, *options: str, timeout: int = 120) -> None:
    """Let the browser print a page without header and footer; LabError if it does not."""
    fixed = ["--headless", "--no-sandbox", "--disable-gpu", "--no-pdf-header-footer", *options]
    command = [browser(), *fixed, f"--print-to-pdf={target.resolve()}", page.resolve().as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout)
    if done.returncode or not target.is_file():
        raise LabError(f"the browser did not print: {done.stderr.strip()[-500:]}")


def print_page(page: pathlib.Path, target: pathlib.Path) -> None:
    """Print a page of the book, without header and footer; LabError if it is not one sheet of A4."""
    if not page.is_file():
        raise LabError(f"there is no {page}: run make book")
    print_to(target, page)
    found = sheets(target.read_bytes())
    if found != [A4]:
        raise LabError(f"{target} is not one sheet of A4 but {len(found)} of {set(found)}")


def paths(arguments: list[str], usage: str) -> list[pathlib.Path]:
    """The path to read and the path to write that a command line names."""
    if len(arguments) != 2:
        raise SystemExit(usage)
    return [pathlib.Path(argument) for argument in arguments]


def main(arguments: list[str]) -> None:
    print_page(*paths(arguments, __doc__))
    print(f"The report: {arguments[1]}")
