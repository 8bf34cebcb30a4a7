"""The project as a newcomer meets it: README examples, environment, licence, one setup cell, what the tree holds."""

import doctest
import json
import os
import pathlib
import re
import subprocess
import sys

import pytest
from lab import LabError, modes
from lab.page.footer import times_line
from lab.tools import scripts, stamp, times

ROOT = modes.ROOT


def test_readme_examples_run():
    result = doctest.testfile(str(ROOT / "README.md"), module_relative=False)
    assert result.attempted >= 6 and result.failed == 0


def test_nothing_pins_what_colab_brings_and_torch_is_installed_first():
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert not re.search(r'"(torch|numpy)[^"]*==', project), "pins belong in constraints.txt"
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert makefile.index("$(INSTALL) torch") < makefile.index("$(INSTALL) -e")
    assert re.search(r"^torch==", (ROOT / "constraints.txt").read_text(), re.M)


def test_module_imports_torch_and_the_standard_library_only():
    text = (ROOT / "ndlinear.py").read_text(encoding="utf-8")
    names = {found.partition(".")[0] for found in re.findall(r"(?m)^(?:from|import) (\S+)", text)}
    assert "torch" in names and names <= sys.stdlib_module_names | {"torch"}


def test_stamp_writes_the_address_into_every_setup_cell(tmp_path, monkeypatch):
    originals, copies = modes.chapters(), []
    for path in originals:
        copies.append(tmp_path / modes.slug(path) / path.name)
        copies[-1].parent.mkdir(parents=True)
        copies[-1].write_bytes(path.read_bytes())
    monkeypatch.setattr(modes, "chapters", lambda: copies)
    address = "https://example.org/some/book.git"
    assert stamp.stamp(address) == len(copies)
    assert all(f'BOOK = \\"{address}\\"' in path.read_text(encoding="utf-8") for path in copies)
    assert stamp.stamp(address) == 0, "the second time nothing changes"
    stamp.stamp("")
    assert [p.read_bytes() for p in copies] == [p.read_bytes() for p in originals]
    with pytest.raises(LabError, match="not an https address"):
        stamp.stamp("git@example.org:book")
    copies[0].write_text("{}")
    with pytest.raises(LabError, match="0 setup cells"):
        stamp.stamp(address)


def test_times_are_recorded_and_shown(monkeypatch, tmp_path):
    monkeypatch.setattr(modes, "RESULTS", tmp_path)
    monkeypatch.setattr(modes, "chapters", lambda: [tmp_path / "99_x.ipynb"])
    monkeypatch.setattr(scripts, "run", lambda path, mode: 0)
    times.main([])
    assert re.fullmatch(r"replay \d+ s · smoke \d+ s", times_line("99_x"))


def run_setup(folder: pathlib.Path, book: str) -> subprocess.CompletedProcess:
    """The setup cell of a chapter as a script in an empty folder, with nothing of the book on the path."""
    cells = json.loads(modes.chapters()[0].read_text(encoding="utf-8"))["cells"]
    sources = ("".join(cell["source"]) for cell in cells)
    source = next(source for source in sources if source.startswith("# @title Setup"))
    (folder / "cell.py").write_text(re.sub(r'(?m)^BOOK = ".*?"', f'BOOK = "{book}"', source))
    left_out = ("PYTHONPATH", "COV_CORE_SOURCE")
    environment = {k: v for k, v in os.environ.items() if k not in left_out}
    how = {"env": environment | {"NDL_MODE": "smoke"}, "capture_output": True, "text": True}
    return subprocess.run([sys.executable, "cell.py"], cwd=folder, timeout=120, **how)


def test_setup_cell_passes_on_what_git_says(tmp_path):
    """No address, a wrong one, and the folder of an interrupted attempt: one message each, no traceback of ours."""
    none, nothing, half = (tmp_path / name for name in ("none", "nothing", "half"))
    for folder in (none, nothing, half / "ndlinear-book"):
        folder.mkdir(parents=True)
    (half / "ndlinear-book" / "README.md").write_text("the checkout stopped here")
    missing = f"file://{tmp_path}/missing.git"
    expected = {
        (none, ""): "repository '' does not exist",
        (nothing, missing): "does not appear to be a git repository",
        (half, missing): "already exists and is not an empty directory",
    }
    for (folder, book), words in expected.items():
        done = run_setup(folder, book)
        assert done.returncode != 0 and words in done.stderr, done.stderr
        assert "Set BOOK to its git repository" in done.stderr and "Traceback" not in done.stderr
    assert (half / "ndlinear-book" / "README.md").is_file(), "nothing of the reader's is removed"
