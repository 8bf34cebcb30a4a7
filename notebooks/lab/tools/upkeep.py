"""Upkeep of the book: ``python -m lab environment | stamp URL | times``."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time

from ..machine import device, versions
from ..modes import NOTEBOOKS, ROOT, LabError, chapters, slug
from ..page.footer import times_file
from ..records.store import append

CHAPTERS = chapters()
HEAD = "# Generated from pyproject.toml by `make environment`; a test says whether it is current.\n"


def environment() -> str:
    """environment.yml from the dependencies and extras of pyproject.toml: python and pip from conda, the rest from PyPI."""
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    needed = [
        need for name in ("notebooks", "book", "experiments", "test") for need in extras[name]
    ]
    lines = [
        "name: ndlinear-book",
        "channels: [conda-forge]",
        "dependencies:",
        f"  - python{project['requires-python']}",
        "  - pip",
        "  - pip:",
        "      - -c constraints.txt",
        *[f'      - "{need}"' for need in needed],
    ]
    return HEAD + "\n".join(lines) + "\n"


def stamp(url: str) -> int:
    """Write the repository's address into the setup cell of every notebook; returns how many changed."""
    if url and not re.fullmatch(r"https://[\w.-]+/[\w./-]+", url):
        raise LabError(f"{url!r} is not an https address of a git repository")
    changed = 0
    for path in CHAPTERS:
        text = path.read_text(encoding="utf-8")
        new, found = re.subn(r'(?<="BOOK = \\")[^"\\]*(?=\\")', url, text)
        if found != 1:
            raise LabError(
                f"{path.name} has {found} setup cells; copy the one of 00_template.ipynb"
            )
        if new != text:
            path.write_text(new, encoding="utf-8")
            changed += 1
    return changed


def folded_solutions(notebook: dict) -> list[str]:
    """The Python code in the folded parts of a notebook's text: solutions of exercises, which tests run after its cells."""
    texts = ["".join(c["source"]) for c in notebook["cells"] if c["cell_type"] == "markdown"]
    folded = [part for text in texts for part in re.findall(r"(?s)<details.*?</details>", text)]
    return [code for part in folded for code in re.findall(r"(?s)```python\n(.*?)```", part)]


def times() -> None:
    """Run every chapter once in replay and in smoke and record its seconds."""
    for path in CHAPTERS:
        for mode in ("replay", "smoke"):
            began = time.perf_counter()
            options = ["-q", "--nbmake", "-p", "no:cacheprovider"]
            command = [sys.executable, "-m", "pytest", *options, f"{slug(path)}.ipynb"]
            subprocess.run(
                command,
                cwd=NOTEBOOKS,
                env=os.environ | {"NDL_MODE": mode},
                check=True,
                stdout=subprocess.DEVNULL,
            )
            row = {
                "experiment": "notebook-times",
                "notebook": slug(path),
                "mode": mode,
                "seconds": round(time.perf_counter() - began, 1),
                "device": device(),
                "versions": versions(),
                "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            }
            append(times_file(), row)
            print(f"{slug(path)}: {mode} {row['seconds']} s")


def main(arguments: list[str]) -> None:
    """Command line: environment | stamp URL | times."""
    match arguments:
        case ["environment"]:
            (ROOT / "environment.yml").write_text(environment(), encoding="utf-8")
        case ["stamp", url]:
            print(f"{stamp(url)} notebooks changed")
        case ["times"]:
            times()
        case _:
            raise SystemExit(__doc__)
