"""A recorded experiment can be run again, a mean that moved is seen, and rows of earlier code are adopted only after that."""

import shutil

import pytest
from lab import LabError, modes, records
from lab.records import canary, store
from lab.tools import reproduce


def rows(shift=0.0, seeds=5, code="a", **more):
    made = []
    for seed in range(seeds):
        config = {"x": 1, "seed": seed} | more
        row = {"key": store.canonical(config), "config": config, "seed": seed, "status": "ok"}
        made.append(row | {"code": code, "metrics": {"y": seed + shift}})
    return made


@pytest.fixture
def own_results(tmp_path, monkeypatch):
    """A folder of records with that of the template alone."""
    folder = tmp_path / "results"
    folder.mkdir()
    shutil.copy(modes.RESULTS / "template-example.jsonl", folder)
    monkeypatch.setattr(modes, "RESULTS", folder)
    return folder


def test_a_mean_inside_the_recorded_interval_passes_and_one_outside_does_not():
    same, near, far = (reproduce.against("e", rows(), rows(shift)) for shift in (0.0, 1.0, 3.0))
    assert same["equal"].all() and same["inside"].all()
    assert not near["equal"].any() and near["inside"].all()
    assert not far["inside"].any()


def with_metrics(**metrics):
    return [r | {"metrics": metrics} for r in rows()]


def test_equal_values_allow_rounding_and_words_and_few_seeds_do_not():
    old = with_metrics(y=2.0, outcome="right")
    for value, word, inside in (
        (2.0, "right", [True, True]),
        (2.000001, "wrong", [True, False]),
        (2.001, "right", [False, True]),
    ):
        again = with_metrics(y=value, outcome=word)
        assert reproduce.against("e", old, again)["inside"].tolist() == inside
    assert reproduce.against("e", rows(seeds=2), rows(seeds=2))["inside"].all()
    assert not reproduce.against("e", rows(seeds=2), rows(1e-3, seeds=2))["inside"].any()


def test_recorded_seeds_beyond_the_grid_are_left_aside_and_others_are_not_compared():
    table = reproduce.against("e", rows(seeds=9), rows())
    assert table["recorded"].tolist() == [2.0] and table["equal"].all()
    with pytest.raises(LabError, match="is not recorded"):
        reproduce.against("e", rows(), rows(seeds=6))


def test_rows_of_earlier_code_are_compared_and_adopted(own_results):
    """The earlier rows held a revision by hand in their configuration, the later ones do not."""
    earlier, later = rows(code="a", method=1), rows(code="b")
    assert reproduce.against("made-up", earlier, later)["equal"].all()
    assert store.current("made-up", earlier[0])[0] == "a"
    reproduce.adopt("made-up", earlier, later, "all rows: 1 of 1 means inside")
    assert store.current("made-up", earlier[0]) == ("b", later[0]["key"])
    reproduce.adopt("made-up", earlier, rows(code="c"), "and again")
    assert store.current("made-up", earlier[0])[0] == "c"
    entries = {entry["code"]: entry["by"] for entry in canary.kept("made-up")["earlier"]}
    assert entries == {"a": "all rows: 1 of 1 means inside", "b": "and again"}


def test_a_part_that_does_not_execute_what_changed_is_not_adopted(own_results):
    earlier, later = rows(code="a"), rows(code="b", seeds=3)
    more = [r | {"config": r["config"] | {"x": 2}} for r in earlier]
    problem = reproduce.untried("made-up", earlier + more, later, [])
    assert "1 configurations did not run again" in problem
    assert reproduce.untried("made-up", earlier, later, []) == ""
    canary.write("made-up", {"code": "a", "dark": [["11", "12", "y = 1"]]})
    assert reproduce.untried("made-up", earlier + more, later, [["11", "12", "y = 1"]]) == ""
    changed = reproduce.untried("made-up", earlier, later, [["21", "22", "y = 2"]])
    assert "what ran again did not execute 1 statements that are new: y = 2" in changed


def test_a_part_of_a_record_runs_again(capsys):
    assert reproduce.main(["template-example", "model=linear"]) == 0
    said = capsys.readouterr().out
    recorded = len(records.read("template-example"))
    assert f"5 of {recorded} rows are run again" in said and recorded > 5
    assert "5 runs, " in said and "0 outside" in said


def test_what_cannot_be_run_again_is_said(tmp_path, monkeypatch):
    with pytest.raises(LabError, match=r"no recorded row of .* has \{'model': 'cubic'\}.*'model'"):
        reproduce.rerun("template-example", tmp_path, {"model": "cubic"})
    with pytest.raises(LabError, match="make bench"):
        reproduce.main(["speed-latency"])
    with pytest.raises(LabError, match="template-example"):
        reproduce.main(["no-such-thing"])
    for arguments in ([], ["template-example", "linear"]):
        with pytest.raises(SystemExit, match=r"python -m lab\.tools\.reproduce"):
            reproduce.main(arguments)
    # a notebook that is asked for rows beyond its grid runs none; its own part of that is in test_scale.py
    monkeypatch.setattr(reproduce, "_run_notebook", lambda *asked: None)
    with pytest.raises(LabError, match="names none of these rows"):
        reproduce.rerun("template-example", tmp_path)


def test_a_notebook_that_records_by_whole_grids_alone_is_found():
    assert reproduce.owner("race-choices").stem == "65_race"
