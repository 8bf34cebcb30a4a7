"""Two states of ndlinear.py side by side: a slower one is seen, and only one as fast hands recorded times on."""

import pathlib
import shutil

import pytest
from lab import modes
from lab.chapters import speed
from lab.records import canary, store
from lab.tools import engines, reproduce

import ndlinear

SMALL = speed.Case("small", (8, 8), (8, 8), 64, "test")


@pytest.fixture
def results(tmp_path, monkeypatch):
    folder = tmp_path / "results"
    folder.mkdir()
    shutil.copy(modes.RESULTS / "cnn-latency.jsonl", folder)
    monkeypatch.setattr(modes, "RESULTS", folder)
    monkeypatch.setattr(reproduce, "present_code", lambda experiment: "f" * 16)
    return folder


def test_a_slower_file_is_seen(tmp_path):
    source = pathlib.Path(ndlinear.__file__).read_text(encoding="utf-8")
    begin = "        compiling = torch.compiler.is_compiling()\n"
    assert source.count(begin) == 1
    slow = tmp_path / "slow.py"
    slow.write_text(source.replace(begin, f"        __import__('time').sleep(0.02)\n{begin}"))
    found = engines.compare(engines.load(slow), rounds=2, repeats=2, cases=[SMALL])
    assert found["forward"][0] > 3 and found["training"][0] > 2, "the present file is faster"
    assert "slowest case small" in engines.words(found)


@pytest.mark.parametrize(("mean", "status"), [(1.0, 0), (1.2, 1), (0.9, 1)])
def test_times_are_handed_on_only_by_a_file_as_fast(results, monkeypatch, mean, status):
    row = (mean, mean - 0.01, mean + 0.01, "small", mean)
    monkeypatch.setattr(engines, "compare", lambda earlier: {"forward": row, "training": row})
    assert engines.main([ndlinear.__file__, "--adopt"]) == status
    known = canary.kept("cnn-latency")
    if status == 0:
        assert known["code"] == "f" * 16 and "side by side" in known["earlier"][0]["by"]
        row = store.read("cnn-latency")[-1]
        code, key = store.current("cnn-latency", row)
        assert code == "f" * 16 and '"method"' not in key
    else:
        assert not known


def test_a_missing_file_says_how_to_call():
    with pytest.raises(SystemExit, match="make engines"):
        engines.main(["no-such-file.py"])
