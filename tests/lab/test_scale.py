"""Which rows decide and which are shown: a grid only as a whole, devices apart from each other."""

import json

import lab
import pytest
from lab import LabError, machine, modes, records
from lab.records import golden, store


def double(config):
    return {"metrics": {"y": 2.0 * config["x"]}}


def grid(n=3, **more):
    return [{"x": x, "seed": 0} | more for x in range(n)]


@pytest.fixture
def results(tmp_path, monkeypatch):
    monkeypatch.setattr(modes, "RESULTS", tmp_path)
    for name in ("NDL_DEVICE", "NDL_RESULTS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(machine.torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("NDL_MODE", "full")
    return tmp_path


def decides(n=3):
    """Whether a grid of the record gives its rows in replay."""
    return lab.whole("large", grid(n), double) is not None


def relabel(path, at, **changes):
    """Write the rows again as if one had been made elsewhere."""
    rows = store.parse(path)
    rows[at] |= changes
    rows[at]["digest"] = store.digest(rows[at])
    path.write_text("".join(store.canonical(row) + "\n" for row in rows))
    golden.sign(path.stem, rows)


def test_a_grid_decides_as_a_whole_and_on_one_kind_of_device_or_not_at_all(
    results, monkeypatch, capsys
):
    assert list(lab.whole("large", grid(), double)["y"]) == [0, 2, 4]
    monkeypatch.setenv("NDL_MODE", "replay")
    assert decides() and not decides(4)
    assert "3 of 4 runs of `large` are recorded" in capsys.readouterr().out
    path = results / "large.jsonl"
    relabel(path, 1, device="NVIDIA H200")
    assert not decides()
    for at in (0, 2):
        relabel(path, at, device="Tesla T4")
    assert decides(), "all of them are GPUs"
    for worse in ({"tf32": True}, {"code": "old"}, {"status": "failed"}):
        relabel(path, 1, **worse)
        assert not decides(), worse
        relabel(path, 1, tf32=None, code="1", status="ok")
        assert decides()


def test_rows_of_a_whole_grid_run_again_too(results, monkeypatch, tmp_path_factory):
    records.record("large", grid(3), double)
    listed = tmp_path_factory.mktemp("again") / "asked.json"
    monkeypatch.setenv("NDL_MODE", "replay")
    monkeypatch.setenv("NDL_AGAIN", str(listed))
    one, two, _ = map(store.canonical, grid(3))
    listed.write_text(json.dumps({"large": [two], "other": [one]}))
    assert decides(), "another experiment is still to come"
    (row,) = store.parse(listed.with_name("large.jsonl"))
    assert row["key"] == two and row["metrics"] == {"y": 2.0}


def places_grid(there, device):
    return grid(2, machine=there, device=device)


def test_devices_stand_apart_and_what_is_open_is_said(results, monkeypatch, capsys):
    assert lab.on_devices("there", places_grid, double) == {}
    assert "**Open:** no row of `there` comes from a GPU yet" in capsys.readouterr().out
    monkeypatch.setenv("NDL_DEVICE", "cpu")
    for name in ("NVIDIA H200", "Tesla T4"):
        monkeypatch.setattr(machine, "machine", lambda device, name=name: name)
        (found,) = lab.on_devices("there", places_grid, double).items()
        assert found[0] == name and len(found[1]) == 2
    monkeypatch.setenv("NDL_MODE", "replay")
    relabel(results / "there.jsonl", 3, code="old")
    found = lab.on_devices("there", places_grid, double)
    assert {name: len(rows) for name, rows in found.items()} == {"NVIDIA H200": 2, "Tesla T4": 1}
    assert "Tesla T4: 1 of 2 rows of `there` are recorded" in capsys.readouterr().out


def test_a_figure_shows_the_rows_that_count(results):
    with pytest.raises(LabError, match="holds no runs"):
        lab.recorded("large")
    records.record("large", grid(), double)
    relabel(results / "large.jsonl", 1, code="old")
    relabel(results / "large.jsonl", 2, status="failed")
    assert lab.recorded("large")[["x", "y"]].to_numpy().tolist() == [[0, 0.0]]
