"""Files of data sets: verified, atomic, never overwritten, clear when offline, whatever goes wrong on a reader's machine; splits."""

import bz2
import dataclasses
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

CONTENT = b"".join(b"%d.5;%d\n" % (i, i % 2) for i in range(100))
SUM = hashlib.sha256(CONTENT).hexdigest()


def make_file(url="http://127.0.0.1:9/none.csv", name="ett/tiny.csv"):
    return File(name, url, len(CONTENT), SUM)


def read(content):
    """A toy format: a line "x;y" for each case."""
    rows = np.array([line.split(";") for line in content.decode().splitlines()], np.float32)
    return files.Raw(rows[:, :1], rows[:, 1].astype(int), ("a", "b"), {"train": slice(0, 100)})


def toy(file, **known):
    """A set in the toy format, of which the shape, the classes and the values are known."""
    known = {"expect": {"train": ((100, 1), 50)}, "content": data._digest(read(CONTENT))} | known
    return Source("toy", "", "", "", (Layout((file,), read, **known),))


def load(monkeypatch, source):
    monkeypatch.setitem(data.SOURCES, source.name, source)
    data._load.cache_clear()
    return data.load(source.name)


def inside(folder):
    return [p for p in folder.rglob("*") if p.is_file()]


# ------------------------------------------------------------------------------------------------------------- downloads
def test_download_is_verified_and_moved_into_place(folder, server):
    root, url = server
    (root / "tiny.csv").write_bytes(CONTENT)
    assert data.fetch(make_file(f"{url}/tiny.csv")) == CONTENT
    assert inside(folder) == [folder / "ett" / "tiny.csv"], "no partial file is left"
    (root / "tiny.csv").unlink()
    assert data.fetch(make_file(f"{url}/tiny.csv")) == CONTENT, "now it is read from the folder"


@pytest.mark.parametrize("sent", [CONTENT[:-5], CONTENT.replace(b"30.5", b"30.6"), CONTENT + b"x"])
def test_wrong_download_is_refused_and_nothing_is_kept(folder, server, sent):
    root, url = server
    (root / "tiny.csv").write_bytes(sent)
    with pytest.raises(DataError, match=r"not the expected file.*Nothing of it was kept.*by hand"):
        data.fetch(make_file(f"{url}/tiny.csv"))
    assert inside(folder) == []


def test_a_download_without_a_checksum_is_kept_only_if_it_holds_what_it_should(
    folder, monkeypatch, server
):
    root, url = server
    source = toy(File("toy.csv", f"{url}/toy.csv"))
    for bad in (CONTENT[:-10], b"<html>moved</html>"):
        (root / "toy.csv").write_bytes(bad)
        with pytest.raises(DataError, match=r"what .*toy\.csv sent.*Nothing of it was kept"):
            load(monkeypatch, source)
        assert inside(folder) == []
    (root / "toy.csv").write_bytes(CONTENT)
    load(monkeypatch, source)
    assert (folder / "toy.csv").read_bytes() == CONTENT
    monkeypatch.setattr(files, "LARGEST", 50)
    with pytest.raises(DataError, match=r"sent more than 50 bytes.*Nothing of it was kept"):
        data.fetch(File("other.csv", f"{url}/toy.csv", sha256=SUM))
    assert inside(folder) == [folder / "toy.csv"]


def test_what_cannot_be_downloaded_says_what_to_put_where(folder, monkeypatch):
    class CutOff(io.BytesIO):
        def read(self, *_):
            raise http.client.IncompleteRead(CONTENT[:10])

    monkeypatch.setattr(files.urllib.request, "urlopen", lambda *_, **__: CutOff())
    with pytest.raises(
        DataError, match=r"could not be downloaded \(IncompleteRead.*put it at"
    ) as e:
        data.fetch(make_file())
    assert f"{folder}/ett/tiny.csv" in str(e.value) and SUM in str(e.value)
    account = File("a.csv", by_hand="get it from https://example.org (an account is needed)")
    with pytest.raises(DataError, match=r"account: get it from https://ex.*put it at .*a\.csv"):
        data.fetch(account)
    assert inside(folder) == []


def test_smoke_never_downloads_and_the_default_folder_is_the_users_cache(folder, monkeypatch):
    monkeypatch.setenv("NDL_MODE", "smoke")
    with pytest.raises(DataError, match="does not download"):
        data.fetch(make_file())
    monkeypatch.delenv("NDL_DATA")
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert str(data.folder()) == "/somewhere/ndlinear-book"


@pytest.mark.parametrize("variable", ["NDL_DATA", "XDG_CACHE_HOME"])
def test_a_home_folder_that_does_not_exist_is_named(monkeypatch, variable):
    monkeypatch.delenv("NDL_DATA", raising=False)
    monkeypatch.setenv(variable, "~nosuchuser/data")
    with pytest.raises(DataError, match=r"~nosuchuser/data is not known.*set NDL_DATA"):
        data.folder()


# ---------------------------------------------------------------------------------------------- files in the data folder
@pytest.mark.parametrize("pack", ["", ".xz"])
@pytest.mark.parametrize("proof", ["checksum", "values"])
def test_damage_to_a_file_is_refused_and_left_alone(folder, monkeypatch, server, proof, pack):
    """Also where the publisher's site would have sent the right file: what lies in the folder is the reader's."""
    root, url = server
    (root / "toy.csv").write_bytes(CONTENT)
    sums = {"size": len(CONTENT), "sha256": SUM} if proof == "checksum" else {}
    source, place = toy(File("toy.csv", f"{url}/toy.csv", **sums)), folder / f"toy.csv{pack}"
    good = lzma.compress(CONTENT) if pack else CONTENT
    place.write_bytes(good)
    assert load(monkeypatch, source).x[:, 0].tolist() == [i + 0.5 for i in range(100)]
    middle = len(good) // 2
    damages = {
        "truncated": good[:middle],
        "a letter": good[:middle] + bytes([good[middle] ^ 1]) + good[middle + 1 :],
        "wrong format": b"<!DOCTYPE html><html>404: not found</html>\n",
        "empty": b"",
    }
    for damage, bad in damages.items():
        place.write_bytes(bad)
        with pytest.raises(DataError, match=r"toy\.csv.*left as it is; move it away"):
            load(monkeypatch, source)
        assert place.read_bytes() == bad, damage


@pytest.mark.parametrize(
    ("expect", "words"),
    [
        ({"train": ((99, 1), None)}, r"the train part is \(100, 1\), expected \(99, 1\)"),
        ({"train": ((None, 1), (49, 51))}, r"are \[50, 50\], expected \[49, 51\]"),
        ({"train": ((None, 1), 49)}, r"are \[50, 50\], expected \[49, 49\]"),
    ],
)
def test_what_is_known_of_the_real_set_is_checked_without_any_checksum(
    folder, monkeypatch, expect, words
):
    (folder / "toy.csv").write_bytes(CONTENT)
    with pytest.raises(DataError, match=words):
        load(monkeypatch, toy(File("toy.csv"), expect=expect, content=""))


def test_the_first_complete_form_is_used_and_half_of_another_is_named(folder, monkeypatch):
    """Nothing but the second form in the folder: it is read; both: the publisher's."""
    first, a, b = (make_file(name=name) for name in ("first.csv", "a.csv", "b.csv"))
    forms = [Layout((first,), read, note="one"), Layout((a, b), lambda a, b: read(b), note="two")]
    source = Source("toy", "", "", "", tuple(forms))
    for name in ("a.csv", "b.csv"):
        (folder / name).write_bytes(CONTENT)
    assert load(monkeypatch, source).note == "two"
    (folder / "b.csv").unlink()
    with pytest.raises(DataError, match=r"another form of toy, but lacks b\.csv"):
        load(monkeypatch, source)
    (folder / "first.csv").write_bytes(CONTENT)
    assert load(monkeypatch, source).note == "one"


def test_each_bad_file_is_named_by_where_it_came_from(folder, server, monkeypatch):
    """One file lies in the folder, the other one is sent: the message names the path of one and the address of the other."""
    root, url = server
    (root / "b.csv").write_bytes(b"sent")
    (folder / "a.csv").write_bytes(b"mine")

    def refuses(a, b):
        raise DataError("these two do not belong together")

    pair = (File("a.csv", f"{url}/a.csv"), File("b.csv", f"{url}/b.csv"))
    source = Source("pair", "", "", "", (Layout(pair, refuses),))
    with pytest.raises(DataError, match=r"do not belong together") as error:
        load(monkeypatch, source)
    assert f"{folder / 'a.csv'}, what {url}/b.csv sent" in str(error.value)
    assert inside(folder) == [folder / "a.csv"]


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_a_full_disk_leaves_no_partial_file(folder, monkeypatch, step):
    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, step, full)
    with pytest.raises(DataError, match=r"cannot be written.*No space left.*NDL_DATA"):
        files.keep(File("sub/a.csv"), CONTENT)
    assert inside(folder) == []


@pytest.mark.parametrize("ending", ["", ".xz"])
def test_a_link_that_leads_nowhere_is_neither_followed_nor_replaced(folder, server, ending):
    root, url = server
    (root / "a.csv").write_bytes(CONTENT)
    link = folder / f"a.csv{ending}"
    link.symlink_to("/nowhere/a.csv")
    with pytest.raises(DataError, match=rf"a.csv{ending} is a link to /nowhere/a.csv"):
        data.fetch(make_file(f"{url}/a.csv", "a.csv"))
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
    (folder / "elsewhere").write_bytes(pack(CONTENT[:400]) + pack(CONTENT[400:]))
    place = folder / f"a.csv{ending}"
    place.symlink_to("elsewhere")  # a link to a file is followed
    assert data.fetch(make_file(name="a.csv")) == CONTENT
    place.write_bytes(pack(bytes(10**7)))
    with pytest.raises(DataError, match=rf"more than {len(CONTENT)} bytes.*left as it is"):
        data.fetch(make_file(name="a.csv"))
    monkeypatch.setattr(files, "LARGEST", 10**6)
    with pytest.raises(DataError, match=r"unpacks to more than 1,000,000 bytes"):
        data.fetch(File("a.csv", md5="0" * 32))


# ------------------------------------------------------------------------------------------------------------------ splits
def test_split_keeps_class_shares_and_uses_every_sample_once():
    y = np.repeat([0, 1, 2], [100, 50, 10])
    x = np.arange(160, dtype=np.float32)[:, None]
    parts, again, other = (data.split(x, y, seed=s, standardise="none") for s in (3, 3, 4))
    found = torch.cat([parts.train[0], parts.val[0], parts.test[0]]).flatten().sort().values
    assert torch.equal(found, torch.arange(160.0))
    assert torch.bincount(parts.train[1]).tolist() == [60, 30, 6]
    assert torch.bincount(parts.test[1]).tolist() == [20, 10, 2]
    assert torch.equal(parts.train[0], again.train[0])
    assert not torch.equal(parts.train[0], other.train[0])


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


def test_official_split_keeps_the_test_part_and_scales_by_the_training_part():
    x = np.random.default_rng(0).integers([[5], [100]], [[9], [200]], (120, 2, 30), np.uint8)
    y = np.arange(120) % 3
    x.setflags(write=False)
    ends = {"train": slice(0, 90), "test": slice(90, 120)}
    whole = data.Data("made", x, y, (), "", False, ends, "")
    parts = data.official(whole, seed=1, standardise="channel")
    assert [len(p[0]) for p in (parts.train, parts.val, parts.test)] == [72, 18, 30]
    assert np.bincount(parts.val[1]).tolist() == [6, 6, 6]
    assert parts.test[1].tolist() == y[90:].tolist()
    train = parts.train[0]
    assert [str(t.dtype) for t in parts.train] == ["torch.float32", "torch.int64"]
    assert train.mean((0, 2)).abs().max() < 1e-5
    assert (train.std((0, 2), unbiased=False) - 1).abs().max() < 1e-4
    assert parts.test[0].mean((0, 2)).abs().max() > 1e-4, "the test part is not centred on itself"
    again = data.official(whole, seed=2, standardise="none")
    assert np.array_equal(again.test[0], x[90:]) and not np.array_equal(again.val[0], x[72:90])
    for bad in ({"val": 0.0}, {"val": 1.0}, {"standardise": "row"}):
        with pytest.raises(LabError):
            data.official(whole, seed=0, **bad)
    with pytest.raises(LabError, match="official parts"):
        data.official(dataclasses.replace(whole, splits={"train": slice(0, 90)}), seed=0)


@pytest.mark.parametrize(
    "bad", [{"parts": (0.5, 0.5, 0.5)}, {"parts": (1.0, 0.0, 0.0)}, {"standardise": "column"}]
)
def test_bad_split_arguments(bad):
    with pytest.raises(LabError):
        data.split(np.zeros((10, 1)), np.zeros(10), seed=0, **bad)
