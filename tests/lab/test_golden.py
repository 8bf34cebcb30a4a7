"""Golden files: a smoke run must give their numbers, rows count by their version, and rows themselves are run again."""

import json

import lab
import pytest
from lab import modes
from lab.records import RecordError, golden, store
from lab.tools import again
from lab.tools import golden as taken

GRID = [{"width": w, "steps": 200, "seed": s} for w in (3, 5) for s in range(3)]


def trained(step=lambda total: total / 2, late=1.0, count=1):
    """A training function with a number for each way to change it; ``late`` acts after a hundred steps."""

    def run(config):
        total = 1.0 + config["seed"]
        for now in range(config["steps"]):
            total = step(total) + config["width"] * (late if now > 100 else 1.0)
        return {"metrics": {"value": total}, "parameters": count * config["width"]}

    return run


@pytest.fixture
def record(tmp_path, monkeypatch):
    """Runs or reads the rows of a made-up experiment in a mode."""
    monkeypatch.setattr(modes, "RESULTS", tmp_path)

    def called(mode, run, **options):
        monkeypatch.setenv("NDL_MODE", mode)
        return lab.record("made-up", GRID, run, smoke={"steps": 3}, **options)

    return called


@pytest.fixture
def taken_down(record, monkeypatch, tmp_path):
    """The experiment with rows and a golden file of version 1."""
    record("full", trained())
    (small := tmp_path / "small").mkdir()
    monkeypatch.setenv("NDL_GOLDEN_TO", str(small))
    record("smoke", trained())
    monkeypatch.delenv("NDL_GOLDEN_TO")
    found = golden.values(store.parse(small / "made-up.jsonl"))
    assert [json.loads(own) for own in found] == [c | {"steps": 3} for c in GRID if c["seed"] < 2]
    golden.write("made-up", golden.kept("made-up") | {"values": found})


CHANGES = {
    "the same": (trained(), True),
    "rounding": (trained(step=lambda total: total / 2 * (1 + 1e-7)), True),
    "a step": (trained(step=lambda total: total / 3), False),
    "a little": (trained(step=lambda total: total / 2 * 1.001), False),
    "a count": (trained(count=2), False),
    "no number": (trained(step=lambda total: float("inf")), False),
}


@pytest.mark.parametrize(("run", "harmless"), CHANGES.values(), ids=CHANGES)
def test_what_changes_a_number_is_refused_with_the_cure_and_nothing_else_is(
    record, taken_down, run, harmless
):
    if harmless:
        record("smoke", run)
    else:
        with pytest.raises(RecordError, match=r"was .* and is .*make golden|failed"):
            record("smoke", run)
    assert len(record("replay", run)) == len(GRID)


def test_with_a_new_version_old_rows_count_no_more_and_stay(record, taken_down):
    golden.write("made-up", golden.kept("made-up") | {"counts": ["2"]})
    with pytest.raises(RecordError, match=r"lacks 6 of 6 rows.*version 2 counts, and theirs are 1"):
        record("replay", trained())
    record("full", trained())
    assert [row["code"] for row in golden.read("made-up")] == ["1"] * 6 + ["2"] * 6
    golden.write(
        "made-up", golden.kept("made-up") | {"counts": ["3", "1"]}
    )  # numbers are those of version 1
    assert len(record("replay", trained())) == 6


@pytest.mark.parametrize(
    ("change", "apart"), [({"late": 1.1}, True), ({"late": 1.0}, False), ({"count": 2}, True)]
)
def test_rows_that_run_again_show_what_acts_late(
    record, taken_down, monkeypatch, tmp_path, change, apart
):
    record("smoke", trained(late=1.1))  # a golden file does not see it
    listed = tmp_path / "again" / "asked.json"
    listed.parent.mkdir()
    listed.write_text(json.dumps({"made-up": [store.canonical(GRID[0])]}))
    monkeypatch.setenv("NDL_AGAIN", str(listed))
    with pytest.raises(SystemExit):  # no further experiment is asked for
        record("replay", trained(**change))
    rows = store.parse(listed.parent / "made-up.jsonl")
    assert [row["config"] for row in rows] == GRID[:1]
    assert bool(again.judge("made-up", rows)) == apart


STANDS = {  # is the experiment chaotic, values of its three seeds, those of new rows, and whether these stand
    "a tenth of the deviation more": (False, [1, 2, 3], [1.09], True),
    "a tenth less": (False, [1, 2, 3], [0.91], True),
    "more than a tenth": (False, [1, 2, 3], [1.11], False),
    "chaotic, where others lie": (True, [1, 2, 3], [2.5], True),
    "chaotic, far away": (True, [1, 2, 3], [1e6], False),
    "fewer than half leave a cap": (True, [400] * 3, [238, 400, 400], True),
    "more than half leave it": (True, [400] * 3, [238, 238, 400], False),
    "one leaves it, not chaotic": (False, [400] * 3, [238, 400, 400], False),
}


@pytest.mark.parametrize(("chaotic", "recorded", "new", "stands"), STANDS.values(), ids=STANDS)
def test_how_far_new_rows_may_lie(taken_down, monkeypatch, chaotic, recorded, new, stands):
    golden.write("made-up", golden.kept("made-up") | {"chaotic": chaotic})
    pairs = zip(golden.read("made-up"), recorded)
    rows = [row | {"metrics": {"value": value}} for row, value in pairs]
    monkeypatch.setattr(golden, "current", lambda name, read: {row["key"]: row for row in rows})
    fresh = [row | {"metrics": {"value": value}} for row, value in zip(rows, new)]
    assert bool(again.judge("made-up", fresh)) != stands


def test_a_group_of_three_seeds_is_drawn_of_each_experiment(record, taken_down, monkeypatch):
    monkeypatch.setattr(again, "owner", lambda name: modes.NOTEBOOKS)
    (found,) = again.drawn(1, seed=0).values()
    assert len(found) == 1 and again.drawn(1, seed=0) == {"made-up": found}
    assert len(again.named("made-up", ["width=3|9", "seed=1"])) == 1
    monkeypatch.setattr(again, "SEEDS", 4)  # the grid has three
    assert not again.drawn(1, seed=0)
    monkeypatch.setattr(again, "SEEDS", 3)
    golden.write("made-up", golden.kept("made-up") | {"values": {}})  # as those of times are
    assert not again.drawn(1, seed=0)


def test_notebooks_that_a_change_touches_come_first(record, taken_down, tmp_path, monkeypatch):
    (tmp_path / "other.jsonl").write_bytes((tmp_path / "made-up.jsonl").read_bytes())
    golden.write("other", golden.kept("made-up"))
    here, there = tmp_path / "here.ipynb", tmp_path / "there.ipynb"
    here.write_text("from lab.chapters import bump"), there.write_text("bumpy")
    monkeypatch.setattr(again, "owner", lambda name: here if name == "other" else there)
    for first, name in ((here, "other"), (there, "made-up")):
        assert all(set(again.drawn(1, seed, {first})) == {name} for seed in range(6))
    texts = {path: path.read_text() for path in (here, there)}
    monkeypatch.setattr(again, "_texts", lambda: texts)
    said = {"merge-base": "base", "diff": "notebooks/lab/chapters/bump.py"}
    monkeypatch.setattr(again, "git", lambda command, *more: said[command])
    assert again.touched() == {here}
    said["merge-base"] = ""
    assert again.touched() == set()


def test_rows_whose_data_are_not_here_are_not_drawn(record, taken_down, monkeypatch):
    row = golden.read("made-up")[0]
    digits = again.data.checksum("digits")
    assert again.at_hand([row]) and again.at_hand([row | {"data": {"digits": digits}}])
    assert not again.at_hand([row | {"data": {"digits": "another form"}}])
    monkeypatch.setattr(again.data, "find", lambda file: None)
    assert not again.at_hand([row | {"data": {"cifar10": "0"}}])


def test_the_tolerance_is_measured():
    base = {"{}": {"same": 1.0, "rounds": 1.0, "time": 1.0}}
    other = {"{}": {"same": 1.0, "rounds": 1.0001, "time": 1.5}}
    found = taken.tolerance(base, [other])
    assert found == {"rounds": pytest.approx(1e-3, rel=0.1), "time": None}
    known = {"values": base, "tolerance": found}
    assert golden.moved(known, other) == []
    assert golden.moved(known, {"{}": {"same": 1.1, "rounds": 1.0, "time": 9.0}})


def test_tolerances_cover_another_processor_and_numbers_stay(record, taken_down):
    known = golden.kept("made-up")
    here = {c: n | {"value": n["value"] * 1.001} for c, n in known["values"].items()}
    assert golden.moved(known, here)
    taken.widen("made-up", [here])
    wide = golden.kept("made-up")
    assert wide["values"] == known["values"] and not golden.moved(wide, here)
    assert wide["tolerance"] == {"value": pytest.approx(0.01, rel=0.1)}
    golden.write("made-up", known | {"tolerance": {"value": None}})
    taken.widen("made-up", [here])
    assert golden.kept("made-up")["tolerance"] == {"value": None}


def test_what_is_taken_anew_says_what_becomes_of_the_rows(record, taken_down):
    """Moved numbers begin a version that no row ever had; with a reason they keep the old one."""
    known = golden.kept("made-up") | {"counts": ["2"]}
    assert taken.renewed("made-up", known, [], "")["counts"] == ["2"]
    assert taken.renewed("made-up", known, ["y was 1"], "")["counts"] == ["3"]
    assert taken.renewed("made-up", known | {"counts": ["0a"]}, ["y"], "")["counts"] == ["2"]
    same = taken.renewed("made-up", known, ["y was 1"], "longer")
    assert same["counts"] == ["2"] and same["same"] == [{"moved": "y was 1", "why": "longer"}]
    assert taken.renewed("made-up", known | {"values": {}}, ["y"], "")["counts"] == ["2"]


def test_a_configuration_that_the_golden_file_does_not_know_is_refused(record, taken_down):
    known = golden.kept("made-up")
    known["values"].popitem()
    golden.write("made-up", known)
    with pytest.raises(RecordError, match=r"is new.*make golden"):
        record("smoke", trained())
