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

CONTENT = b"".join(b"%d.5;%d\n" % (i, i % 2) for i in range(100))
SUM = hashlib.sha256(CONTENT).hexdigest()


def read(content):
    """A toy format: a line "x;y" for each case."""
    rows = np.array([line.split(";") for line in content.decode().splitlines()], np.float32)
    return files.Raw(rows[:, :1], rows[:, 1].astype(int), ("a", "b"), {"train": slice(0, 100)})


def toy(file, **known):
    """A set in the toy format, of which the shape, the classes and the values are known."""
    known = {
        "expect": {"train": {"shape": [100, 1], "classes": 50}},
        "content": data._digest(read(CONTENT)),
    } | known
    return Source("toy", "", "", "", (Layout((file,), read, **known),))


def load(monkeypatch, source):
    monkeypatch.setitem(data.SOURCES, source.name, source)
    data._load.cache_clear()
    return data.load(source.name)


def inside(folder):
    return [p for p in folder.rglob("*") if p.is_file()]


# ------------------------------------------------------------------------------------------------------------- downloads
DAMAGES = {
    "truncated": lambda content: content[: len(content) // 2],
    "a letter": lambda content: content[:100] + bytes([content[100] ^ 1]) + content[101:],
    "wrong format": lambda content: b"<!DOCTYPE html><html>404: not found</html>\n",
    "empty": lambda content: b"",
}
PROOFS = pytest.mark.parametrize("known", [SUM, ""], ids=["checksum", "values"])


@PROOFS
def test_a_download_is_kept_only_if_it_is_what_it_should_be(folder, monkeypatch, server, known):
    root, url = server
    source = toy(File("sub/toy.csv", f"{url}/toy.csv", known))
    for damage in DAMAGES.values():
        (root / "toy.csv").write_bytes(damage(CONTENT))
        with pytest.raises(
            DataError, match=r"what .*toy\.csv sent.*Nothing of it was kept.*by hand"
        ):
            load(monkeypatch, source)
        assert inside(folder) == []
    (root / "toy.csv").write_bytes(CONTENT)
    load(monkeypatch, source)
    assert inside(folder) == [folder / "sub" / "toy.csv"], "no partial file is left"
    (root / "toy.csv").unlink()
    load(monkeypatch, source)  # now it is read from the folder


def test_what_cannot_be_downloaded_says_what_to_put_where(folder, monkeypatch):
    class CutOff(io.BytesIO):
        def read(self, *_):
            raise http.client.IncompleteRead(CONTENT[:10])

    monkeypatch.setattr(files.urllib.request, "urlopen", lambda *_, **__: CutOff())
    with pytest.raises(
        DataError, match=r"could not be downloaded \(IncompleteRead.*put it at"
    ) as e:
        data.fetch(File("ett/tiny.csv", "http://127.0.0.1:9/none.csv", SUM))
    assert f"{folder}/ett/tiny.csv" in str(e.value) and SUM in str(e.value)
    account = File("a.csv", by_hand="get it from https://example.org (an account is needed)")
    with pytest.raises(DataError, match=r"account: get it from https://ex.*put it at .*a\.csv"):
        data.fetch(account)
    assert inside(folder) == []


def test_smoke_never_downloads_and_the_default_folder_is_the_users_cache(folder, monkeypatch):
    monkeypatch.setenv("NDL_MODE", "smoke")
    with pytest.raises(DataError, match="does not download"):
        data.fetch(File("a.csv"))
    monkeypatch.delenv("NDL_DATA")
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert str(data.folder()) == "/somewhere/ndlinear-book"


# ---------------------------------------------------------------------------------------------- files in the data folder
PACKED = {"": bytes, ".xz": lzma.compress, ".bz2": bz2.compress}


@pytest.mark.parametrize("ending", PACKED)
@PROOFS
def test_damage_to_a_file_is_refused_and_left_alone(folder, monkeypatch, server, known, ending):
    """Also where the publisher's site would have sent the right file: what lies in the folder is the reader's."""
    root, url = server
    (root / "toy.csv").write_bytes(CONTENT)
    source, place = toy(File("toy.csv", f"{url}/toy.csv", known)), folder / f"toy.csv{ending}"
    good = PACKED[ending](CONTENT)
    place.write_bytes(good)
    assert load(monkeypatch, source).x[:, 0].tolist() == [i + 0.5 for i in range(100)]
    for name, damage in DAMAGES.items():
        place.write_bytes(bad := damage(good))
        with pytest.raises(DataError, match=r"toy\.csv.*left as it is; move it away"):
            load(monkeypatch, source)
        assert place.read_bytes() == bad, name


@pytest.mark.parametrize(
    ("expect", "words"),
    [
        ({"shape": [99, 1]}, r"the train part is \[100, 1\], expected \[99, 1\]"),
        ({"shape": [None, 1], "classes": [49, 51]}, r"are \[50, 50\], expected \[49, 51\]"),
        ({"shape": [None, 1], "classes": 49}, r"are \[50, 50\], expected \[49, 49\]"),
    ],
)
def test_what_is_known_of_the_real_set_is_checked_without_any_checksum(
    folder, monkeypatch, expect, words
):
    (folder / "toy.csv").write_bytes(CONTENT)
    with pytest.raises(DataError, match=words):
        load(monkeypatch, toy(File("toy.csv"), expect={"train": expect}, content=""))


def test_the_first_complete_form_is_used(folder, monkeypatch):
    """Nothing but the second form in the folder: it is read; both: the publisher's."""
    first, a, b = (File(name, "", SUM) for name in ("first.csv", "a.csv", "b.csv"))
    forms = [Layout((first,), read, note="one"), Layout((a, b), lambda a, b: read(b), note="two")]
    source = Source("toy", "", "", "", tuple(forms))
    for name in ("a.csv", "b.csv"):
        (folder / name).write_bytes(CONTENT)
    assert load(monkeypatch, source).note == "two"
    (folder / "first.csv").write_bytes(CONTENT)
    assert load(monkeypatch, source).note == "one"


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_a_full_disk_leaves_no_partial_file(folder, monkeypatch, step):
    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, step, full)
    with pytest.raises(DataError, match=r"cannot be written.*No space left.*NDL_DATA"):
        files.keep(File("sub/a.csv"), CONTENT)
    assert inside(folder) == []


def test_a_file_or_link_that_appears_during_the_download_stays(folder):
    (folder / "a.csv").write_bytes(b"first")
    (folder / "b.csv").symlink_to("/nowhere/b.csv")
    for name in ("a.csv", "b.csv"):
        files.keep(File(name), CONTENT)
    assert (folder / "a.csv").read_bytes() == b"first"
    assert os.readlink(folder / "b.csv") == "/nowhere/b.csv" and len([*folder.iterdir()]) == 2


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


@pytest.mark.parametrize(
    ("n", "parts", "words"),
    [(8, (0.5, 0.5, 0.5), "to 1"), (8, (1.2, 0, -0.2), "to 1"), (5, (0.5, 0.3, 0.2), "5 targets")],
)
def test_what_no_split_can_be_made_of_is_refused(n, parts, words):
    with pytest.raises(LabError, match=words):
        data.split(np.zeros((8, 1)), np.zeros(n), seed=0, parts=parts)
