"""`python -m lab bench FILE.py:LAYER`: the example of the page trains, its rows stay, a second call adds nothing; errors."""

import re
import types

import numpy as np
import pandas as pd
import pytest
from lab import modes
from lab.benchmark import protocol, reading
from lab.benchmark.models import QUARTER, SMALL
from lab.modes import LabError
from lab.records import store
from lab.tools import bench

PAGE = (modes.ROOT / "book" / "add-a-layer.md").read_text(encoding="utf8")
THIN = re.search(r"(?s)```python\n(.*?)```", PAGE)[1]  # the example of the page


@pytest.fixture
def thin(tmp_path, monkeypatch):
    path = tmp_path / "my_layer.py"
    path.write_text(THIN)
    monkeypatch.setenv("NDL_RESULTS", str(tmp_path / "rows"))
    monkeypatch.setenv("NDL_MODE", "full")
    monkeypatch.setattr(protocol, "STEPS", 3)
    monkeypatch.setattr(protocol, "RATES", (1e-3, 3e-3, 1e-2))
    monkeypatch.setattr(protocol, "LADDER", list(protocol.RATES))
    about = {"data": "breast-cancer", "size": "small", "order": "in place", "budget": QUARTER}
    rows = [
        about | {"layer": "narrow", "seed": cut, "parameters": 9, "test_loss": 1.0}
        for cut in range(10)
    ]
    recorded = types.SimpleNamespace(ran=pd.DataFrame(rows))
    monkeypatch.setattr(reading, "rows_on_disk", lambda: recorded)
    return path


def test_the_layer_of_the_page_trains_once_and_its_rows_stay(thin, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(protocol, "CUTS", range(2))
    monkeypatch.setattr(protocol, "TRIAL_CUTS", range(1))
    monkeypatch.setattr(protocol, "SIZES", ("small",))
    asked = [f"{thin}:Thin", "--sets", "breast-cancer"]
    bench.main(asked)
    said = capsys.readouterr().out
    assert "a quarter, small samples: fits 1 of 1 sets" in said and "test loss" in said
    assert re.search(r"(?s)Budget a quarter.*\n *narrow +1 +1.000", said)
    files = {n: tmp_path / "rows" / f"benchmark-{n}.jsonl" for n in ("thin", "thin-rates")}
    rows = store.parse(files["thin"])
    assert {r["config"]["seed"] for r in rows} == {0, 1} and all(r["status"] == "ok" for r in rows)
    assert {r["config"]["budget"] for r in rows} <= {SMALL, QUARTER}
    assert all("source" in r["config"] and r["data"] for r in rows)
    before = {n: path.read_bytes() for n, path in files.items()}
    bench.main(asked)
    assert {n: path.read_bytes() for n, path in files.items()} == before
    thin.write_text(THIN + "# another layer\n")
    bench.main(asked)
    assert len(store.parse(files["thin"])) == 2 * len(rows)


def test_a_quick_look_keeps_nothing(thin, tmp_path, capsys):
    bench.main([f"{thin}:Thin", "--quick", "--sets", "breast-cancer"])
    assert "fits 1 of 1 sets" in capsys.readouterr().out and not (tmp_path / "rows").exists()


def test_what_is_no_layer_is_said(thin):
    for text in (f"{thin}", f"{thin}:not a name", "nowhere.py:Thin"):
        with pytest.raises(LabError, match="name a file and what is in it"):
            bench.layer_of(text)
    with pytest.raises(LabError, match="has no class or function Other"):
        bench.layer_of(f"{thin}:Other")((8, 8), (16, 16), 1000)
    with pytest.raises(LabError, match="give yours another one"):
        bench.layer_of(f"{thin}:NdLinear")


def test_standings_are_ratios_to_the_narrowed_dense_layer():
    losses = {"narrow": [1.0, 4.0], "mine": [0.5, 8.0], "other": [2.0, np.nan]}
    rows = [
        {"data": data, "size": "small", "seed": 0, "layer": layer, "budget": SMALL}
        | {"order": "in place", "parameters": 7, "test_loss": loss}
        for layer, each in losses.items()
        for data, loss in zip("ab", each)
        if loss == loss
    ]
    found = reading.standings(pd.DataFrame(rows), SMALL).set_index("layer")
    assert found["ratio"].to_dict() == pytest.approx({"narrow": 1, "mine": 1, "other": 2})
    assert found["sets"].to_dict() == {"narrow": 2, "mine": 2, "other": 1}
