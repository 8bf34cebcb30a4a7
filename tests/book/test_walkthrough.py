"""The walk-through of contributing.md, as a new contributor follows it: in a copy of the checkout, block by block.

A block of Markdown or Python is a cell: those before the first command stand above the heading *Judgement*, the others below it.
Commands run in bash, and the first one that fails ends the test with what it said.
"""

import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import textwrap

import nbformat
import pytest
from lab import modes

PAGE = modes.ROOT / "book" / "contributing.md"
HEADING = "## An experiment in twenty minutes"
NOTEBOOK = "notebooks/evidence/14_initialisation.ipynb"
RECORD = "notebooks/results/zero-start.jsonl"
GOLDEN = "notebooks/results/golden/zero-start.json"
LEFT_OUT = (".git", ".venv", "_build", "__pycache__", ".*_cache", ".coverage*", "*.lock", "shared")  # fmt: skip


def blocks(page: str) -> list[tuple[str, str]]:
    """(language, content) of each block of the section, in order."""
    section = page.partition(f"\n{HEADING}\n")[2].partition("\n## ")[0]
    found = re.findall(r"(?ms)^   ```(\w+)\n(.*?)^   ```$", section)
    return [(language, textwrap.dedent(content)) for language, content in found]


@pytest.fixture
def checkout(tmp_path):
    """A copy of the checkout in a folder with a space, with an environment that is this one."""
    folder = tmp_path / "my book"
    shutil.copytree(modes.ROOT, folder, ignore=shutil.ignore_patterns(*LEFT_OUT))
    tools = folder / ".venv" / "bin"
    tools.mkdir(parents=True)
    for name in ("python", "jupyter", "nbstripout", "pytest", "ruff"):
        module = "" if name == "python" else f"-m {name}"
        (tools / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" {module} "$@"\n')
        (tools / name).chmod(0o755)
    for stamp in ("torch.installed", "book.installed"):
        (folder / ".venv" / stamp).touch()
    one_variant(folder / "notebooks" / "lab" / "tools" / "golden.py")
    without_experiments(folder / NOTEBOOK)
    git(folder, "init", "-q")
    git(folder, "add", "-A")
    return folder


def without_experiments(path: pathlib.Path) -> None:
    """A notebook with its setup, imports, footer and text alone: the page runs it four times, each time with all that it holds."""
    notebook = nbformat.read(path, 4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    notebook.cells = [cell for cell in notebook.cells if cell not in code[2:-1]]
    nbformat.write(notebook, path)


def one_variant(path: pathlib.Path) -> None:
    """Golden numbers whose tolerance comes from no further small run, to save half a minute."""
    head, function, tail = path.read_text(encoding="utf-8").partition("\n\ndef small(")
    path.write_text(f"{head}VARIANTS = VARIANTS[:1]\n{function}{tail}", encoding="utf-8")


def changed(folder: pathlib.Path) -> set[str]:
    """The files that are others than those that git knows."""
    lines = git(folder, "status", "--porcelain", "-uall").splitlines()
    return {line[3:] for line in lines if line[1] != " "}


def git(folder: pathlib.Path, *arguments: str) -> str:
    command = ["git", "-C", str(folder), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def insert(path: pathlib.Path, language: str, source: str, above: bool) -> None:
    """A new cell above the heading *Judgement*, or below it."""
    notebook = nbformat.read(path, 4)
    make = nbformat.v4.new_markdown_cell if language == "markdown" else nbformat.v4.new_code_cell
    at = next(i for i, c in enumerate(notebook.cells) if c.source.startswith("## Judgement"))
    notebook.cells.insert(at if above else at + 1, make(source.strip()))
    nbformat.write(notebook, path)


def follow(folder: pathlib.Path, steps: list[tuple[str, str]]) -> str:
    """Do what the blocks say; returns all that the commands said."""
    others = ("COV", "PYTEST", "NDL_", "MAKE")
    kept = {k: v for k, v in os.environ.items() if not k.startswith(others)}
    own = {"PYTHONPATH": f"{folder}:{folder / 'notebooks'}", "OMP_NUM_THREADS": "1"}
    said = ""
    for language, content in steps:
        if language != "bash":
            insert(folder / NOTEBOOK, language, content, above=not said)
            continue
        command = ["bash", "-euxo", "pipefail", "-c", content]
        done = subprocess.run(command, cwd=folder, env=kept | own, capture_output=True, text=True)
        said += done.stdout + done.stderr
        assert done.returncode == 0, said
    return said


def test_a_new_contributor_gets_through_the_page(checkout):
    said = follow(checkout, blocks(PAGE.read_text(encoding="utf-8")))
    assert changed(checkout) == {NOTEBOOK, RECORD, GOLDEN}
    assert len((checkout / RECORD).read_text().splitlines()) == 10
    assert len(json.loads((checkout / GOLDEN).read_text())["values"]) == 4
    assert "zero-start: version 1 counts, 4 small runs" in said


def test_a_command_that_fails_is_noticed(tmp_path):
    with pytest.raises(AssertionError, match="No rule to make target"):
        follow(tmp_path, [("bash", "make no-such-thing\ntrue\n")])
