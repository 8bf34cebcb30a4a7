"""``python -m lab``: what it lists, how it passes on what it is asked, and how notebooks run as scripts."""

import importlib
import json
import re

import pytest
from lab import LabError, __main__, modes
from lab.tools import run, scripts


def test_every_command_is_listed_and_has_its_module():
    with pytest.raises(SystemExit) as said:
        __main__.main([])
    listed = re.findall(r"(?m)^  (\w+) ", str(said.value))
    assert listed == list(__main__.COMMANDS)
    for name in listed:
        assert callable(importlib.import_module(f"lab.tools.{name}").main)


def test_what_a_reader_can_put_right_ends_in_one_line(tmp_path):
    with pytest.raises(SystemExit, match=r"^no notebook of the book begins with 'nothing'$"):
        __main__.main(["golden", "nothing"])
    with pytest.raises(SystemExit, match=r"holds no .jsonl file"):
        __main__.main(["merge", str(tmp_path)])


def test_notebooks_are_named_by_their_beginning_or_their_path():
    (one,) = scripts.chosen(["notebooks/evidence/33_ablations.ipynb"])
    assert modes.slug(one) == "evidence/33_ablations"
    assert scripts.chosen(["evidence/33", "evidence/33_a"]) == [one]
    assert [p.stem for p in scripts.chosen(["33"])] == ["33_ablations"]


@pytest.fixture
def notebook(tmp_path):
    """Makes a notebook of one cell."""

    def make(source):
        path = tmp_path / "99_mini.ipynb"
        path.write_text(json.dumps({"cells": [{"cell_type": "code", "source": [source]}]}))
        return path

    return make


def test_a_script_runs_in_its_mode_with_the_lab_and_ends_in_time(notebook, tmp_path):
    words = "import os, pathlib, lab\npathlib.Path(os.environ['SAID']).write_text(lab.mode())"
    said = tmp_path / "said"
    assert scripts.run(notebook(words), "smoke", SAID=str(said)) == 0
    assert said.read_text() == "smoke"
    assert scripts.run(notebook("raise SystemExit(3)"), "full") == 3
    assert scripts.run(notebook("import time\ntime.sleep(3600)"), "full", limit=0.5) == -9


def test_full_runs_share_a_budget_and_write_to_a_folder(monkeypatch, tmp_path, capsys):
    asked, clock = [], iter([0.0, 0.0, 40.0, 99.0])
    monkeypatch.setattr(run.time, "monotonic", lambda: next(clock))

    def began(path, mode, *, limit, quiet, **settings):
        asked.append((path.stem, mode, limit, settings))
        return 0 if len(asked) == 1 else -9

    monkeypatch.setattr(scripts, "run", began)
    monkeypatch.setattr(scripts, "chosen", lambda names: [tmp_path / f"{n}_x" for n in names])
    assert run.main(["1", "2", "3", "--budget", "60", "--out", str(tmp_path / "rows")]) == 0
    out = {"NDL_RESULTS": str(tmp_path / "rows")}
    assert asked[0] == ("1_x", "full", 60.0, out | {"NDL_BUDGET_S": "60.0"})
    assert asked[1] == ("2_x", "full", 20.0, out | {"NDL_BUDGET_S": "20.0"})
    said = capsys.readouterr().out
    assert "2_x: ended, the time is up" in said and "3_x: not begun, the time is up" in said


def test_a_full_run_that_fails_says_so(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(scripts, "run", lambda *a, **k: 1)
    monkeypatch.setattr(scripts, "chosen", lambda names: [tmp_path / "1_x"])
    assert run.main(["1"]) == 1 and "failed with status 1" in capsys.readouterr().out
    with pytest.raises(LabError, match="no notebook"):
        monkeypatch.undo()
        run.main(["nothing"])
