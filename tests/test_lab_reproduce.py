"""A recorded experiment can be run again from nothing, and a mean that moved is seen."""

import pytest
from lab import LabError, reproduce


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


@pytest.mark.parametrize("again", [rows(seeds=4), rows(code="b")])
def test_other_seeds_or_other_code_are_not_compared(again):
    with pytest.raises(LabError, match="seeds run again and recorded seeds differ"):
        reproduce.against(rows(), again)


def test_the_example_of_the_template_runs_again_from_nothing(capsys):
    assert reproduce.main(["template-example"]) == 0
    assert "0 outside" in capsys.readouterr().out


def test_an_unknown_experiment_and_missing_argument_say_what_is_there():
    with pytest.raises(LabError, match="template-example"):
        reproduce.main(["no-such-thing"])
    with pytest.raises(SystemExit, match=r"python -m lab\.reproduce"):
        reproduce.main([])
