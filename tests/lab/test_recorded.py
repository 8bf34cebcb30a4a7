"""Runs for the figure at the head of a page: the last of each configuration, by the newest code."""

import pytest
from lab import LabError, modes, recorded
from lab.records import store


def row(code, seed, value, status="ok"):
    config, metrics = {"model": "a", "seed": seed}, {"error": value}
    return {"status": status, "code": code, "config": config, "metrics": metrics}


def test_only_the_newest_code_and_the_last_row_of_a_configuration(tmp_path, monkeypatch):
    monkeypatch.setattr(modes, "RESULTS", tmp_path)
    rows = [row("old", 0, 1.0), row("old", 1, 2.0), row("new", 0, 3.0), row("new", 0, 4.0)]
    for one in [*rows, row("new", 1, 5.0), row("new", 2, 6.0, status="failed")]:
        store.append(tmp_path / "made.jsonl", one)
    store.append(tmp_path / "other.jsonl", row("x", 7, 7.0))
    found = recorded("made", "other")
    assert found[["seed", "error"]].to_numpy().tolist() == [[0, 4.0], [1, 5.0], [7, 7.0]]


def test_nothing_recorded(tmp_path, monkeypatch):
    monkeypatch.setattr(modes, "RESULTS", tmp_path)
    with pytest.raises(LabError, match="holds no runs"):
        recorded("absent")
