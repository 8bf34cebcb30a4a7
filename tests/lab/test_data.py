"""Data sets: verified, atomic, never overwritten, clear when offline; splits keep shares and scale by the training part."""

import hashlib
import sys

import numpy as np
import pytest
import torch
from lab import LabError, data
from lab.data import DataError, File

CONTENT = b"date,HUFL,HULL,MUFL,MULL,LUFL,LULL,OT\n2016-07-01 00:00:00,5.8,2,1.6,0.5,4.2,1.3,30.5\n"


def make_file(url="http://127.0.0.1:9/none.csv"):
    return File("ett/tiny.csv", url, len(CONTENT), hashlib.sha256(CONTENT).hexdigest())


def test_download_is_verified_and_moved_into_place(folder, server):
    root, url = server
    (root / "tiny.csv").write_bytes(CONTENT)
    assert data.fetch(make_file(f"{url}/tiny.csv")) == CONTENT
    assert [p.name for p in (folder / "ett").iterdir()] == ["tiny.csv"], "no partial file is left"
    (root / "tiny.csv").unlink()
    assert data.fetch(make_file(f"{url}/tiny.csv")) == CONTENT, "now it is read from the folder"


@pytest.mark.parametrize("sent", [CONTENT[:-5], CONTENT.replace(b"30.5", b"30.6"), CONTENT + b"x"])
def test_wrong_download_is_refused_and_nothing_is_kept(folder, server, sent):
    root, url = server
    (root / "tiny.csv").write_bytes(sent)
    with pytest.raises(DataError, match=r"not the expected file.*Nothing of it was kept.*by hand"):
        data.fetch(make_file(f"{url}/tiny.csv"))
    assert [p for p in folder.rglob("*") if p.is_file()] == []


def test_smoke_never_downloads_and_the_default_folder_is_the_users_cache(folder, monkeypatch):
    monkeypatch.setenv("NDL_MODE", "smoke")
    with pytest.raises(DataError, match="does not download"):
        data.fetch(make_file())
    monkeypatch.delenv("NDL_DATA")
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert str(data.folder()) == "/somewhere/ndlinear-book"


def test_without_scikit_learn_its_sets_say_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(DataError, match="pip install scikit-learn"):
        data.SOURCES["digits"].layouts[0].read()


def test_every_source_names_origin_licence_and_proof():
    for source in data.SOURCES.values():
        assert source.origin and source.licence and source.about
        for layout in source.layouts:
            assert layout.note and bool(layout.files) == bool(layout.sample)
            for file in layout.files:
                assert file.sha256 or file.md5 or layout.expect, "nothing proves its content"
                assert len(file.sha256) in (0, 64) and len(file.md5) in (0, 32)
                assert file.url == "" or file.url.startswith("https://")
    with pytest.raises(DataError, match="digits"):
        data.load("mnist")


def test_split_keeps_class_shares_and_uses_every_sample_once():
    y = np.repeat([0, 1, 2], [100, 50, 10])
    x = np.arange(160, dtype=np.float32)[:, None]
    parts = data.split(x, y, seed=3, standardise="none")
    found = torch.cat([parts.train[0], parts.val[0], parts.test[0]]).flatten().sort().values
    assert torch.equal(found, torch.arange(160.0))
    assert torch.bincount(parts.train[1]).tolist() == [60, 30, 6]
    assert torch.bincount(parts.test[1]).tolist() == [20, 10, 2]
    again = data.split(x, y, seed=3, standardise="none")
    assert torch.equal(parts.train[0], again.train[0])
    assert not torch.equal(parts.train[0], data.split(x, y, seed=4, standardise="none").train[0])


def test_split_scales_by_the_training_part_alone():
    x = np.random.default_rng(0).normal(5, [1, 100, 0], (300, 3)).astype(np.float32)
    parts = data.split(x, np.random.default_rng(1).normal(size=300), seed=0)
    train = parts.train[0]
    assert torch.allclose(train.mean(0), torch.zeros(3), atol=1e-4)
    assert torch.allclose(train.std(0, unbiased=False), torch.tensor([1.0, 1.0, 0.0]), atol=1e-4)
    assert parts.val[0].mean(0)[:2].abs().max() > 1e-3, "a part is not centred on itself"
    whole = data.split(x, np.zeros(300, int), seed=0, standardise="all").train[0]
    assert whole.std(unbiased=False).item() == pytest.approx(1, abs=1e-4)
    assert whole[:, 1].std() > 10 * whole[:, 0].std()


@pytest.mark.parametrize(
    "bad", [{"parts": (0.5, 0.5, 0.5)}, {"parts": (1.0, 0.0, 0.0)}, {"standardise": "column"}]
)
def test_bad_split_arguments(bad):
    with pytest.raises(LabError):
        data.split(np.zeros((10, 1)), np.zeros(10), seed=0, **bad)
