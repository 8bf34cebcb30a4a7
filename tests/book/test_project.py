"""The project as a newcomer meets it: README examples, environment, licence, one setup cell, what the tree holds."""

import doctest
import re
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
