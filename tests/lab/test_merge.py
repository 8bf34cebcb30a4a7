"""Rows brought home: all are checked before one is appended, and what is not a row of ours never becomes a path."""

import pytest
from lab import LabError, modes, records
from lab.records import golden, store
from lab.tools import merge


def double(config):
    return {"metrics": {"y": 2.0 * config["x"]}, "parameters": 3}


def grid(*xs):
    return [{"x": x, "seed": 0} for x in xs]


@pytest.fixture
def results(tmp_path, monkeypatch):
    """A record of two rows."""
    (tmp_path / "results").mkdir()
    monkeypatch.setattr(modes, "RESULTS", tmp_path / "results")
    monkeypatch.setenv("NDL_MODE", "full")
    records.record("double", grid(0, 1), double, data=("digits",))
    return tmp_path / "results"


@pytest.fixture
def elsewhere(results, tmp_path, monkeypatch):
    """Two further rows in a folder."""
    with monkeypatch.context() as there:
        there.setenv("NDL_RESULTS", str(tmp_path / "rows"))
        records.record("double", grid(0, 1, 2, 3), double, data=("digits",))
    return tmp_path / "rows"


def state(folder):
    return {p.name: p.read_bytes() for p in folder.rglob("*.json*")}


def test_rows_come_home_once_and_a_merge_that_was_killed_is_called_again(
    results, elsewhere, monkeypatch
):
    """After the rows of a record and before its seal; after part of the rows."""
    before = golden.place("double").read_bytes()
    assert merge.merge(elsewhere) == {"double": 2}
    after = state(results)
    for seal in (golden.place("double").read_bytes(), before):
        golden.place("double").write_bytes(seal)
        assert merge.merge(elsewhere) == {"double": 0} and state(results) == after
    whole = (results / "double.jsonl").read_bytes()
    golden.place("double").write_bytes(before)
    (results / "double.jsonl").write_bytes(b"".join(whole.splitlines(True)[:3]))
    assert merge.merge(elsewhere) == {"double": 1} and state(results) == after


WRONG = {
    "another version": ({"code": "2"}, "made under version 2, now 1"),
    "another experiment": ({"experiment": "../../x"}, "rows of ../../x stand in its file"),
    "another series of the layer": (
        {"versions": {"ndlinear": "9.9.9"}},
        "made with ndlinear 9.9.9",
    ),
    "another form of data": ({"data": {"digits": "0123"}}, "different forms of digits"),
    "another kind of device": ({"device": "NVIDIA H200"}, "GPUs and of processors"),
    "recorded already": ({"config": {"x": 0, "seed": 0}, "key": '{"seed":0,"x":0}'}, "two runs of"),
    "another key": ({"key": "x"}, "no run writes line 1, see key"),
}
FIELDS = ("experiment", "key", "config", "seed", "metrics", "code", "status", "seconds", "data")
FIELDS += ("device", "versions", "time")
WRONG |= {f"no {name}": ({name: None}, f"line 1, see {name}") for name in FIELDS}


@pytest.mark.parametrize(("change", "words"), WRONG.values(), ids=WRONG)
def test_what_is_wrong_is_refused_and_nothing_changes(results, elsewhere, change, words):
    before = state(results)
    rows = store.parse(elsewhere / "double.jsonl")
    (elsewhere / "double.jsonl").unlink()
    store.append(elsewhere / "double.jsonl", *(row | change for row in rows))
    with pytest.raises(LabError, match=f"(?s)is not merged.*{words}"):
        merge.merge(elsewhere)
    assert state(results) == before


def test_files_that_are_no_record_of_ours_are_refused(results, elsewhere, tmp_path):
    for name in ("..x", "unheard-of"):
        (elsewhere / "double.jsonl").rename(elsewhere / f"{name}.jsonl")
        with pytest.raises(LabError, match="no experiment of this checkout"):
            merge.merge(elsewhere)
        (elsewhere / f"{name}.jsonl").rename(elsewhere / "double.jsonl")
    with pytest.raises(LabError, match="holds no"):
        merge.merge(tmp_path)


def test_torn_lines_are_passed_over_and_set_aside(results, elsewhere):
    for folder in (results, elsewhere):
        with (folder / "double.jsonl").open("a") as file:
            file.write('{"digest": ' + "[" * 100_000)
    assert merge.merge(elsewhere) == {"double": 2}
    assert len(records.read("double")) == 4 and (results / "double.jsonl.torn").is_file()


def test_no_other_writer_gets_in_between_check_and_append(results, elsewhere, monkeypatch):
    append = store.append

    def while_another_tries(path, *rows):
        with pytest.raises(LabError, match="being written by another run"):
            merge.merge(elsewhere)
        append(path, *rows)

    monkeypatch.setattr(store, "append", while_another_tries)
    assert merge.merge(elsewhere) == {"double": 2}
