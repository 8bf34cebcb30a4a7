"""Files of data sets: verified, atomic, never overwritten, clear when offline, whatever goes wrong on a reader's machine; splits."""

import bz2
import errno
import hashlib
import http.client
import io
import lzma
import os

import numpy as np
import pytest
import torch
from lab import LabError, data
from lab.data import DataError, File, Layout, Source, files

CONTENT = b"some numbers: 30.5\n" * 100
SUM = hashlib.sha256(CONTENT).hexdigest()


def make_file(url="http://127.0.0.1:9/none.csv"):
    return File("ett/tiny.csv", url, len(CONTENT), SUM)


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


def test_something_proves_the_content_of_every_file():
    """A form without files comes with a library, and needs no stand-in."""
    for source in data.SOURCES.values():
        for layout in source.layouts:
            assert bool(layout.files) == bool(source.stand_in)
            assert layout.expect or all(file.sums for file in layout.files)
    with pytest.raises(DataError, match="no data set 'mnist'; there are: digits"):
        data.load("mnist")


# --------------------------------------------------------------------------------------------------- on a reader's machine
def test_a_transfer_that_breaks_off_says_how_to_get_the_file(folder, monkeypatch):
    class CutOff(io.BytesIO):
        def read(self, *_):
            raise http.client.IncompleteRead(CONTENT[:10])

    monkeypatch.setattr(files.urllib.request, "urlopen", lambda *_, **__: CutOff())
    file = File("a.csv", "https://example.org/a.csv", len(CONTENT), SUM)
    with pytest.raises(DataError, match=r"could not be downloaded \(IncompleteRead.*put it at"):
        data.fetch(file)
    assert list(folder.iterdir()) == []


def test_a_download_of_unknown_size_has_a_limit(folder, server, monkeypatch):
    root, url = server
    (root / "a.csv").write_bytes(CONTENT)
    monkeypatch.setattr(files, "LARGEST", 50)
    with pytest.raises(DataError, match=r"sent more than 50 bytes.*Nothing of it was kept"):
        data.fetch(File("a.csv", f"{url}/a.csv", sha256=SUM))
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_a_full_disk_leaves_no_partial_file(folder, monkeypatch, step):
    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, step, full)
    with pytest.raises(DataError, match=r"cannot be written.*No space left.*NDL_DATA"):
        files.keep(File("sub/a.csv"), CONTENT)
    assert list((folder / "sub").iterdir()) == []


@pytest.mark.parametrize("variable", ["NDL_DATA", "XDG_CACHE_HOME"])
def test_a_home_folder_that_does_not_exist_is_named(monkeypatch, variable):
    monkeypatch.delenv("NDL_DATA", raising=False)
    monkeypatch.setenv(variable, "~nosuchuser/data")
    with pytest.raises(DataError, match=r"~nosuchuser/data is not known.*set NDL_DATA"):
        data.folder()


@pytest.mark.parametrize("ending", ["", ".xz"])
def test_a_link_that_leads_nowhere_is_neither_followed_nor_replaced(folder, server, ending):
    root, url = server
    (root / "a.csv").write_bytes(CONTENT)
    link = folder / f"a.csv{ending}"
    link.symlink_to("/nowhere/a.csv")
    file = File("a.csv", f"{url}/a.csv", len(CONTENT), SUM)
    with pytest.raises(DataError, match=rf"a.csv{ending} is a link to /nowhere/a.csv"):
        data.fetch(file)
    assert os.readlink(link) == "/nowhere/a.csv" and [*folder.iterdir()] == [link]


def test_a_file_or_link_that_appears_during_the_download_stays(folder):
    (folder / "a.csv").write_bytes(b"first")
    (folder / "b.csv").symlink_to("/nowhere/b.csv")
    for name in ("a.csv", "b.csv"):
        files.keep(File(name), CONTENT)
    assert (folder / "a.csv").read_bytes() == b"first"
    assert os.readlink(folder / "b.csv") == "/nowhere/b.csv" and len([*folder.iterdir()]) == 2


@pytest.mark.parametrize(("ending", "pack"), [(".xz", lzma.compress), (".bz2", bz2.compress)])
def test_packed_files_are_read_and_unpacking_stops_at_the_size_that_is_known(
    folder, monkeypatch, ending, pack
):
    (folder / "elsewhere").write_bytes(pack(CONTENT[:700]) + pack(CONTENT[700:]))
    place = folder / f"a.csv{ending}"
    place.symlink_to("elsewhere")  # a link to a file is followed
    file = File("a.csv", size=len(CONTENT), sha256=SUM)
    assert data.fetch(file) == CONTENT
    place.write_bytes(pack(bytes(10**7)))
    with pytest.raises(DataError, match=r"unpacks to more than 1,900 bytes.*left as it is"):
        data.fetch(file)
    monkeypatch.setattr(files, "LARGEST", 10**6)
    with pytest.raises(DataError, match=r"unpacks to more than 1,000,000 bytes"):
        data.fetch(File("a.csv", md5="0" * 32))


def test_each_bad_file_is_named_by_where_it_came_from(folder, server, monkeypatch):
    """One file lies in the folder, the other one is sent: the message names the path of one and the address of the other."""
    root, url = server
    (root / "b.csv").write_bytes(b"sent")
    (folder / "a.csv").write_bytes(b"mine")

    def read(a, b):
        raise DataError("these two do not belong together")

    pair = (File("a.csv", f"{url}/a.csv"), File("b.csv", f"{url}/b.csv"))
    layout = Layout(pair, read)
    monkeypatch.setitem(data.SOURCES, "pair", Source("pair", "", "", "", (layout,)))
    with pytest.raises(DataError, match=r"do not belong together") as error:
        data.load("pair")
    assert f"{folder / 'a.csv'}, what {url}/b.csv sent" in str(error.value)
    assert [p.name for p in folder.iterdir()] == ["a.csv"]


# ------------------------------------------------------------------------------------------------------------------ splits
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
