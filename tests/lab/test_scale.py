"""Which rows decide and which are shown: a larger scale only as a whole, devices apart from each other."""

import json

import lab
import pandas as pd
import pytest
from lab import LabError, machine, modes, records
from lab.records import budget, golden, store


def double(config):
    return {"metrics": {"y": 2.0 * config["x"]}}


def grid(n=3, **more):
    return [{"x": x, "seed": 0} | more for x in range(n)]


@pytest.fixture
def results(tmp_path, monkeypatch):
    monkeypatch.setattr(modes, "RESULTS", tmp_path)
    for name in ("NDL_SCALE", "NDL_DEVICE", "NDL_RESULTS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(machine.torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("NDL_MODE", "full")
    return tmp_path


SMALL = pd.DataFrame({"x": [-1], "device": ["AMD EPYC, 2 threads"]})


def decides(n=3):
    return lab.at_scale("large", grid(n), double, otherwise=SMALL)


def relabel(path, at, **changes):
    """Write the rows again as if one had been made elsewhere."""
    rows = store.parse(path)[0]
    rows[at] |= changes
    rows[at]["digest"] = store.digest(rows[at])
    path.write_text("".join(store.canonical(row) + "\n" for row in rows))
    golden.sign(path.stem, rows)


@pytest.mark.parametrize("mode", ["replay", "full"])
def test_a_larger_scale_decides_as_a_whole_or_not_at_all(results, monkeypatch, capsys, mode):
    records.record("large", grid(2), double)
    monkeypatch.setenv("NDL_MODE", mode)
    larger, rows = decides()
    assert not larger and rows is SMALL
    assert "2 of 3 rows are recorded: the smaller one decides" in capsys.readouterr().out
    assert len(store.parse(results / "large.jsonl")[0]) == 2, "nothing was run"
    monkeypatch.setenv("NDL_MODE", "full")
    records.record("large", grid(3), double)
    monkeypatch.setenv("NDL_MODE", mode)
    larger, rows = decides()
    assert larger and list(rows["y"]) == [0, 2, 4]


def test_rows_of_two_kinds_of_device_and_stale_and_failed_ones_decide_nothing(results):
    records.record("large", grid(), double)
    path = results / "large.jsonl"
    relabel(path, 1, device="NVIDIA H200")
    assert not decides()[0]
    for at in (0, 2):
        relabel(path, at, device="Tesla T4")
    assert decides()[0], "all of them are GPUs"
    for worse in ({"tf32": True}, {"code": "old"}, {"status": "failed"}):
        relabel(path, 1, **worse)
        assert not decides()[0], worse
        relabel(path, 1, tf32=None, code="1", status="ok")
        assert decides()[0]


def test_rows_of_a_larger_scale_run_again_too(results, monkeypatch, tmp_path_factory):
    records.record("large", grid(3), double)
    target = tmp_path_factory.mktemp("again") / "rows"
    monkeypatch.setenv("NDL_MODE", "replay")
    monkeypatch.setenv("NDL_AGAIN_TO", str(target))
    monkeypatch.setenv("NDL_AGAIN", json.dumps({"large": grid(3)[1:2], "other": grid(1)}))
    assert decides()[0], "another experiment is still to come"
    pair = json.loads(target.read_text())
    assert pair["recorded"]["config"] == grid(3)[1] and pair["again"]["metrics"] == {"y": 2.0}
    monkeypatch.setenv("NDL_AGAIN", json.dumps({"large": grid(3)[1:2]}))
    with pytest.raises(SystemExit):
        decides()


def test_the_larger_scale_runs_small_where_it_says_how(results, monkeypatch):
    monkeypatch.setenv("NDL_MODE", "smoke")
    ran = []
    run = lambda config: ran.append(config) or double(config)  # noqa: E731
    small = {"smoke": {"x": 7}, "smoke_seeds": 1}
    assert lab.at_scale("large", grid(3), run, otherwise=SMALL, **small) == (False, SMALL)
    assert ran == [{"x": 7, "seed": 0}]


def test_the_larger_scale_is_run_only_when_asked_for(results, monkeypatch):
    monkeypatch.setenv("NDL_MODE", "smoke")
    assert decides()[1] is SMALL and not list(results.iterdir())
    monkeypatch.setenv("NDL_MODE", "full")
    monkeypatch.setenv("NDL_SCALE", "largest")
    assert decides()[0]
    monkeypatch.setenv("NDL_MODE", "smoke")
    assert decides()[1] is SMALL, "though the larger one is complete"


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


def test_smoke_runs_the_grid_of_the_processor(results, monkeypatch):
    monkeypatch.setenv("NDL_MODE", "smoke")
    (found,) = lab.on_devices("there", places_grid, double, smoke={"x": 5}).values()
    assert list(found["x"]) == [5] and found["device"].str.contains("threads").all()
    frame = pd.DataFrame({"device": ["NVIDIA H200"] * 2 + ["AMD EPYC, 2 threads"]})
    assert lab.places(frame) == "NVIDIA H200 (2 runs), AMD EPYC, 2 threads (1 runs)"
    assert not list(results.iterdir())


def test_a_figure_shows_the_rows_that_count(results):
    with pytest.raises(LabError, match="holds no runs"):
        lab.recorded("large")
    for code, x, y in [("old", 0, 1.0), ("1", 0, 3.0), ("1", 1, 5.0), ("1", 2, None)]:
        row = {"code": code, "status": "ok" if y else "failed", "metrics": {"y": y}}
        store.append(results / "large.jsonl", row | {"config": {"x": x}})
    golden.sign("large", store.parse(results / "large.jsonl")[0])
    assert lab.recorded("large")[["x", "y"]].to_numpy().tolist() == [[0, 3.0], [1, 5.0]]


def test_earlier_rows_tell_whether_the_first_run_would_finish(results, monkeypatch):
    records.record("large", grid(2), double)
    rows = store.parse(results / "large.jsonl")[0]
    monkeypatch.setattr(budget, "LEFT_OUT", [])
    monkeypatch.setattr(budget, "seconds_left", lambda: 5.0)
    assert list(budget.within(["a"], [row | {"seconds": 60.0} for row in rows])) == []
    assert budget.LEFT_OUT == ["1 of 1 groups"]
    assert list(budget.within(["a"], [row | {"seconds": 1.0} for row in rows])) == ["a"]
