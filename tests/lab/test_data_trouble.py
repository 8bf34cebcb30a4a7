"""What goes wrong with data files on a reader's machine: broken transfers, full disks, links, home folders, packed bombs."""

import bz2
import errno
import hashlib
import http.client
import io
import lzma
import os
import zipfile

import pytest
from lab import data
from lab.data import DataError, File, Layout, Source, files

CONTENT = b"some numbers\n" * 100
SUM = hashlib.sha256(CONTENT).hexdigest()


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
    with pytest.raises(DataError, match=r"unpacks to more than 1,300 bytes.*left as it is"):
        data.fetch(file)
    monkeypatch.setattr(files, "LARGEST", 10**6)
    with pytest.raises(DataError, match=r"unpacks to more than 1,000,000 bytes"):
        data.fetch(File("a.csv", md5="0" * 32))


def test_a_zip_member_has_a_limit_too(monkeypatch):
    """The limit lies above the archive and below its largest member."""
    layout = data.SOURCES["lsst"].layouts[0]
    (content,) = layout.sample()
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        monkeypatch.setattr(files, "LARGEST", max(m.file_size for m in archive.infolist()) - 1)
    with pytest.raises(DataError, match=r"unpacks to [\d,]+ bytes, more than"):
        layout.read(content)


def test_each_bad_file_is_named_by_where_it_came_from(folder, server, monkeypatch):
    """One file lies in the folder, the other one is sent: the message names the path of one and the address of the other."""
    root, url = server
    (root / "b.csv").write_bytes(b"sent")
    (folder / "a.csv").write_bytes(b"mine")

    def read(a, b):
        raise DataError("these two do not belong together")

    pair = (File("a.csv", f"{url}/a.csv"), File("b.csv", f"{url}/b.csv"))
    layout = Layout(pair, read, lambda: (b"", b""))
    monkeypatch.setitem(data.SOURCES, "pair", Source("pair", "", "", "", (layout,)))
    with pytest.raises(DataError, match=r"do not belong together") as error:
        data.load("pair")
    assert f"{folder / 'a.csv'}, what {url}/b.csv sent" in str(error.value)
    assert [p.name for p in folder.iterdir()] == ["a.csv"]
