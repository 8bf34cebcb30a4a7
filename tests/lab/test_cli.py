"""``python -m lab``: what it lists, how it passes on what it is asked, and how notebooks run as scripts."""

import importlib
import json
import re

import pytest
from lab import __main__, modes
from lab.tools import golden, run, scripts


def test_every_command_is_listed_and_has_its_module():
    with pytest.raises(SystemExit) as said:
        __main__.main([])
    listed = re.findall(r"(?m)^  (\w+) ", str(said.value))
    assert listed == list(__main__.COMMANDS)
    for name in listed:
        assert callable(importlib.import_module(f"lab.tools.{name}").main)


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ("golden nothing", "^no notebook of the book begins with 'nothing'$"),
        ("golden evidence/33 --only typo", "no small run of these notebooks records typo"),
        ("merge .", "holds no .jsonl file"),
        ("again typo", "no row that counts is of typo"),
        ("again ablation-digits arm", "no row that counts is of ablation-digits arm"),
    ],
)
def test_what_a_reader_can_put_right_ends_in_one_line(asked, words, monkeypatch):
    monkeypatch.setattr(golden, "small", lambda *_: {})
    with pytest.raises(SystemExit) as said:
        __main__.main(asked.split())
    assert re.search(words, str(said.value))


def test_notebooks_are_named_by_their_beginning_or_their_path():
    (one,) = scripts.chosen(["notebooks/evidence/33_ablations.ipynb"])
    assert modes.slug(one) == "evidence/33_ablations"
    assert scripts.chosen(["evidence/33", "evidence/33_a"]) == [one]
    assert [p.stem for p in scripts.chosen(["33"])] == ["33_ablations"]


def test_a_script_runs_in_its_mode_with_the_lab_and_ends_in_time(tmp_path):
    def ran(source, mode="full", **options):
        notebook = tmp_path / "99_mini.ipynb"
        notebook.write_text(json.dumps({"cells": [{"cell_type": "code", "source": [source]}]}))
        return scripts.run(notebook, mode, **options)

    words = (
        "import importlib.util, os, pathlib\nassert importlib.util.find_spec('lab')\n"
        "pathlib.Path(os.environ['SAID']).write_text(os.environ['NDL_MODE'])"
    )
    assert ran(words, "smoke", SAID=str(tmp_path / "said")) == 0
    assert (tmp_path / "said").read_text() == "smoke"
    assert ran("raise SystemExit(3)") == 3
    assert ran("import time\ntime.sleep(3600)", limit=0.5) is None


def test_full_runs_share_a_budget_and_write_to_a_folder(monkeypatch, tmp_path, capsys):
    asked, clock = [], iter([0.0, 0.0, 40.0, 50.0, 99.0])
    monkeypatch.setattr(run.time, "monotonic", lambda: next(clock))

    def began(path, mode, *, limit, quiet, **settings):
        asked.append((path.stem, mode, limit, settings))
        return {"1_x": 0, "2_x": None, "3_x": -9}[path.stem]

    monkeypatch.setattr(scripts, "run", began)
    monkeypatch.setattr(scripts, "chosen", lambda names: [tmp_path / f"{n}_x" for n in names])
    assert run.main(["1", "2", "3", "4", "--budget", "60", "--out", str(tmp_path / "rows")]) == 1
    out = {"NDL_RESULTS": str(tmp_path / "rows")}
    assert asked[0] == ("1_x", "full", 60.0, out | {"NDL_BUDGET_S": "60.0"})
    assert asked[1] == ("2_x", "full", 20.0, out | {"NDL_BUDGET_S": "20.0"})
    said = capsys.readouterr().out
    for words in ("1_x: done", "2_x: ended", "3_x: failed with status -9", "4_x: not begun"):
        assert words in said
