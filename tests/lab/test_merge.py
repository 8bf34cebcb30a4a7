"""Rows brought home: all are checked before one is appended, and what is not a row of ours never becomes a path."""

import json
import threading

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
    records.record("double", grid(0, 1), double)
    return tmp_path / "results"


@pytest.fixture
def elsewhere(results, tmp_path, monkeypatch):
    """Two further rows in a folder."""
    with monkeypatch.context() as there:
        there.setenv("NDL_RESULTS", str(tmp_path / "rows"))
        records.record("double", grid(0, 1, 2, 3), double)
    return tmp_path / "rows"


def state(folder):
    return {p.name: p.read_bytes() for p in folder.rglob("*.json*")}


def rewrite(folder, change):
    """Rows with changed fields and checksums made anew."""
    rows = store.parse(folder / "double.jsonl")[0]
    rows = [change(dict(row)) or row for row in rows]
    (folder / "double.jsonl").unlink()
    store.append(folder / "double.jsonl", *rows)


def test_rows_come_home_once_and_a_second_time_nothing_happens(results, elsewhere, monkeypatch):
    assert merge.merge(elsewhere) == {"double": 2}
    after = state(results)
    assert merge.merge(elsewhere) == {"double": 0} and state(results) == after
    monkeypatch.setenv("NDL_MODE", "replay")
    assert records.record("double", grid(0, 1, 2, 3), double)["y"].tolist() == [0, 2, 4, 6]


def test_a_merge_that_was_killed_is_called_again(results, elsewhere):
    """After the rows of a record and before its seal; after part of the rows."""
    before = golden.place("double").read_bytes()
    merge.merge(elsewhere)
    after = state(results)
    golden.place("double").write_bytes(before)
    assert merge.merge(elsewhere) == {"double": 0} and state(results) == after
    whole = (results / "double.jsonl").read_bytes()
    golden.place("double").write_bytes(before)
    (results / "double.jsonl").write_bytes(b"".join(whole.splitlines(True)[:3]))
    assert merge.merge(elsewhere) == {"double": 1} and state(results) == after


def changed(**fields):
    return lambda row: row | fields


def within(name, **fields):
    return lambda row: row | {name: row[name] | fields}


def at(**config):
    return changed(config=config, key=store.canonical(config))


WRONG = {
    "another version": (changed(code="2"), "made under version 2, now 1"),
    "another experiment": (changed(experiment="../../x"), "is of the experiment"),
    "no metrics": (lambda row: {k: v for k, v in row.items() if k != "metrics"}, "lacks.*metrics"),
    "versions of another kind": (changed(versions="1"), "lacks.*versions"),
    "empty metrics": (changed(metrics={}), "its metrics are"),
    "other metrics": (within("metrics", z=1.0), "its metrics are"),
    "another field": (at(x=2, seed=0, z=1), "has these fields"),
    "a key of its own": (changed(key="x"), "key or seed"),
    "an unknown status": (changed(status="fine"), "unknown status"),
    "another series of the layer": (within("versions", ndlinear="9.9.9"), "layer's version"),
    "unknown data": (changed(data={"digits": "0123"}), "is not known here"),
    "another kind of device": (changed(device="NVIDIA H200"), "GPUs and of processors"),
    "recorded already": (at(x=0, seed=0), "recorded already"),
}  # fmt: skip


@pytest.mark.parametrize(("change", "words"), WRONG.values(), ids=WRONG)
def test_what_is_wrong_is_refused_and_nothing_changes(results, elsewhere, change, words):
    before = state(results)
    rewrite(elsewhere, change)
    with pytest.raises(LabError, match=f"(?s)is not merged.*{words}"):
        merge.merge(elsewhere)
    assert state(results) == before


def test_no_path_is_formed_of_a_foreign_name(results, elsewhere, tmp_path):
    (elsewhere / "double.jsonl").rename(elsewhere / "..x.jsonl")
    with pytest.raises(LabError, match="lower-case"):
        merge.merge(elsewhere)
    (elsewhere / "..x.jsonl").rename(elsewhere / "unheard-of.jsonl")
    with pytest.raises(LabError, match="no experiment of this checkout"):
        merge.merge(elsewhere)
    (elsewhere / "unheard-of.jsonl").write_text('{"digest": ' + "[" * 100_000)
    with pytest.raises(LabError, match="torn line"):
        merge.merge(elsewhere)
    with pytest.raises(LabError, match="holds no"):
        merge.merge(tmp_path)


def test_two_merges_at_once_lose_nothing(results, elsewhere, tmp_path, monkeypatch):
    """The second one comes while the first one has checked and not yet appended."""
    other = tmp_path / "other"
    with monkeypatch.context() as there:
        there.setenv("NDL_RESULTS", str(other))
        records.record("double", grid(0, 1, 9), double)
    said, append = [], store.append

    def second_merge():
        try:
            merge.merge(other)
        except LabError as error:
            said.append(str(error))

    def slowly(path, *rows):
        monkeypatch.setattr(store, "append", append)
        thread = threading.Thread(target=second_merge)
        thread.start()
        thread.join()
        append(path, *rows)

    monkeypatch.setattr(store, "append", slowly)
    assert merge.merge(elsewhere) == {"double": 2}
    assert "being written by another run" in said[0]
    assert merge.merge(other) == {"double": 1}
    rows = [json.loads(line) for line in (results / "double.jsonl").read_text().splitlines()]
    assert [row["config"]["x"] for row in rows] == [0, 1, 2, 3, 9]
