"""A recorded experiment can be run again from nothing, and a mean that moved is seen."""

import pytest
from lab import LabError, records, reproduce


def rows(shift=0.0, seeds=5, code="a"):
    return [
        {
            "key": f"{s}",
            "config": {"x": 1, "seed": s},
            "seed": s,
            "status": "ok",
            "code": code,
            "metrics": {"y": s + shift},
        }
        for s in range(seeds)
    ]


def test_a_mean_inside_the_recorded_interval_passes_and_one_outside_does_not():
    same, near, far = (reproduce.against(rows(), rows(shift)) for shift in (0.0, 1.0, 3.0))
    assert same["equal"].all() and same["inside"].all()
    assert not near["equal"].any() and near["inside"].all()
    assert not far["inside"].any()


def test_equal_values_allow_rounding_and_no_more():
    old = [r | {"metrics": {"y": 2.0}} for r in rows()]
    for value, inside in ((2.0, True), (2.000001, True), (2.001, False)):
        again = [r | {"metrics": {"y": value}} for r in rows()]
        assert reproduce.against(old, again)["inside"].tolist() == [inside]


def test_recorded_seeds_beyond_the_grid_are_left_aside():
    table = reproduce.against(rows(seeds=9), rows())
    assert table["recorded"].tolist() == [2.0] and table["equal"].all()


@pytest.mark.parametrize("again", [rows(seeds=6), rows(code="b")])
def test_other_seeds_or_other_code_are_not_compared(again):
    with pytest.raises(LabError, match="seeds run again and recorded seeds differ"):
        reproduce.against(rows(), again)


def test_the_example_of_the_template_runs_again_from_nothing(capsys):
    assert reproduce.main(["template-example"]) == 0
    assert "0 outside" in capsys.readouterr().out


def test_a_part_of_a_record_runs_again_beside_the_rows_that_stay(capsys):
    assert reproduce.main(["template-example", "model=linear"]) == 0
    said = capsys.readouterr().out
    recorded = len(reproduce._parse(reproduce.RESULTS / "template-example.jsonl")[0])
    assert f"5 of {recorded} rows left out" in said and "5 runs, " in said and recorded > 5


def test_values_that_no_row_has_are_named(tmp_path):
    with pytest.raises(
        LabError, match=r"no recorded row of 'template-example' has \{'model': 'cubic'\}.*'model'"
    ):
        reproduce.rerun("template-example", tmp_path, {"model": "cubic"})
    assert reproduce.chosen({"width": 16, "depth": 2}, {"width": "16"})
    assert not reproduce.chosen({"width": 16, "depth": 2}, {"width": "16", "depth": "3"})


def test_rows_beyond_the_notebooks_grid_are_not_passed_over(tmp_path, monkeypatch):
    row = reproduce._parse(reproduce.RESULTS / "template-example.jsonl")[0][0]
    path = tmp_path / "template-example.jsonl"
    path.write_bytes((reproduce.RESULTS / path.name).read_bytes())
    beyond = row | {"config": row["config"] | {"seed": 99}}
    beyond |= {"key": reproduce.canonical(beyond["config"]), "seed": 99}
    records._append(path, {k: v for k, v in beyond.items() if k != "digest"})
    monkeypatch.setattr(reproduce, "RESULTS", tmp_path)
    with pytest.raises(LabError, match="names none of the rows"):
        reproduce.rerun("template-example", tmp_path / "ndlinear-book", {"seed": "99"})


def test_an_unknown_experiment_and_missing_argument_say_what_is_there():
    with pytest.raises(LabError, match="template-example"):
        reproduce.main(["no-such-thing"])
    with pytest.raises(SystemExit, match=r"python -m lab\.reproduce"):
        reproduce.main([])
    with pytest.raises(SystemExit, match=r"KEY=VALUE"):
        reproduce.main(["template-example", "linear"])
