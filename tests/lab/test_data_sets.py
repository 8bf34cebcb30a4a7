"""Data sets: every set has its stand-in, and each format is read exactly; how files come is in test_data.py.

What readers make of the real files is held fast by the checksums of the values, where this machine has the files; CI has most of them.
Formats of which it has none are read from small files made here.
"""

import io
import pickle
import tarfile
import zipfile

import numpy as np
import pytest
from lab import data
from lab.data import DataError, files, images, series


# ------------------------------------------------------------------------------------------------------------- every set
def test_something_proves_the_content_of_every_file():
    """A form without files comes with a library, and needs no stand-in."""
    for source in data.SOURCES.values():
        for layout in source.layouts:
            assert bool(layout.files) == bool(source.stand_in)
            assert layout.expect or all(file.sha256 for file in layout.files)
    with pytest.raises(DataError, match="no data set 'mnist'; there are: digits"):
        data.load("mnist")


@pytest.mark.parametrize("name", data.SOURCES)
def test_smoke_reads_no_file_and_says_so(monkeypatch, capsys, name):
    monkeypatch.setenv("NDL_MODE", "smoke")
    monkeypatch.setenv("NDL_DATA", "/nowhere")
    data._load.cache_clear()
    loaded = data.load(name)
    said = [loaded.stand_in, "stand-in" in capsys.readouterr().out, "stand-in" in loaded.note]
    assert said == [data.SOURCES[name].stand_in is not None] * 3
    data._load.cache_clear()
    assert loaded.checksum == data.load(name).checksum == data.checksum(name), "seeded"
    assert not any(a.flags.writeable for a in (loaded.x, loaded.y) if a is not None)
    for part, known in data.SOURCES[name].layouts[0].expect.items():
        assert loaded.x[loaded.splits.get(part, slice(None))].ndim == len(known["shape"])


def test_the_note_of_recorded_runs_is_found_by_their_checksum(monkeypatch):
    monkeypatch.setenv("NDL_DATA", "/nowhere")
    assert "20,000 of the 50,000" in data.note("cifar10", "e8b9705f227dd0fa")
    assert "not in the registry" in data.note("cifar10", "0" * 16)


@pytest.mark.parametrize("name", [n for n, source in data.SOURCES.items() if source.stand_in])
def test_the_real_files_are_read_where_this_machine_has_them(name, monkeypatch):
    """Shapes, classes and values of every set that lies in NDL_DATA (or in the user's cache folder) are those expected."""
    source = data.SOURCES[name]
    if not any(all(map(files.find, layout.files)) for layout in source.layouts):
        pytest.skip(f"{name} is not in {data.folder()}")
    monkeypatch.setenv("NDL_MODE", "replay")
    data._load.cache_clear()
    read = data.load(name)
    data._load.cache_clear()
    assert not read.stand_in
    assert data.note(name, read.checksum) in {layout.note for layout in source.layouts}


# ---------------------------------------------------------------------------------------------------- CIFAR, independently
def cifar():
    """The publisher's archive: five batches of 40 pictures and one of 100, as pickles of the format of Python 2."""
    folder, packed = "cifar-10-batches-py/", io.BytesIO()
    members = {"batches.meta": {b"label_names": [f"class {i}".encode() for i in range(10)]}}
    for seed, name in enumerate((*(f"data_batch_{i}" for i in range(1, 6)), "test_batch")):
        x, y = images._pictures(100 if seed == 5 else 40, 10, seed)
        members[name] = {b"data": x.reshape(len(x), -1), b"labels": y.tolist()}
    with tarfile.open(fileobj=packed, mode="w:gz") as file:
        for name, member in members.items():
            content = pickle.dumps(member, protocol=2)
            info = tarfile.TarInfo(folder + name)
            info.size = len(content)
            file.addfile(info, io.BytesIO(content))
    return packed.getvalue()


def test_cifar_rows_are_red_then_green_then_blue():
    """A row of the archive is 1,024 red, 1,024 green, 1,024 blue values, each part row by row (the publisher's page)."""
    read = data.SOURCES["cifar10"].layouts[0].read
    raw, (x, y) = read(cifar()), images._pictures(40, 10, seed=1)
    assert np.array_equal(raw.x[40:80], x) and raw.y[40:80].tolist() == y.tolist()
    assert raw.splits == {"train": slice(0, 200), "test": slice(200, 300)}
    assert len(raw.names) == 10 and raw.names[3] == "class 3"


def test_a_batch_as_python_2_wrote_it():
    """The publisher's pickles have byte strings where newer ones have text; opcodes written out by hand."""
    values = bytes(range(256)) * 24
    array = b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(I0\ntU\x01bt(I1\n(I2\nI3072\ntcnumpy\ndtype\n(U\x02u1I0\nI1\nt"
    array = (
        array.replace(b"t(I1\n(I2", b"tR(I1\n(I2")
        + b"R(I3\nU\x01|NNNI-1\nI-1\nI0\ntbI00\nT"
        + len(values).to_bytes(4, "little")
    )
    batch = b"(dU\x04data" + array + values + b"tbsU\x06labels(lI7\naI2\nas."
    loaded = images._ArraysOnly(io.BytesIO(batch), encoding="bytes").load()
    assert loaded[b"labels"] == [7, 2] and loaded[b"data"].dtype == np.uint8
    assert loaded[b"data"].tobytes() == values and loaded[b"data"].shape == (2, 3072)


def test_a_pickle_that_names_anything_else_is_not_opened():
    with pytest.raises(pickle.UnpicklingError, match=r"os\.system"):
        images._ArraysOnly(io.BytesIO(b"cos\nsystem\n(S'true'\ntR."), encoding="bytes").load()


# ------------------------------------------------------------------------------------------ formats of the UCR/UEA archives
TS = """#Hervé, in another encoding
@problemName Tiny
@timeStamps false
@univariate false
@classLabel true 10 9
@data
1,2,3:-4,5e-1,6:10.0
7,8,9:1,1,1:9
"""


def archive(name, content=TS):
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as file:
        for part in ("TRAIN", "TEST"):
            file.writestr(f"{name}/{name}_{part}.ts", content)
    return packed.getvalue()


def test_series_are_read_with_their_channels_and_labels():
    raw = series.read_zip(archive("Tiny"), "Tiny")
    assert raw.x.tolist() == [[[1, 2, 3], [-4, 0.5, 6]], [[7, 8, 9], [1, 1, 1]]] * 2
    assert raw.names == ("10.0", "9") and raw.y.tolist() == [0, 1, 0, 1]
    assert raw.splits == {"train": slice(0, 2), "test": slice(2, 4)}


def test_classes_are_numbered_in_the_order_of_their_labels():
    x = np.zeros((2, 1, 3), np.float32)
    numbers = series.join((x, ["10", "9"]), (x, ["-1", "9"]))
    assert numbers.names == ("-1", "9", "10") and numbers.y.tolist() == [2, 1, 0, 1]
    words = series.join((x, ["normal", "abnormal"]), (x, ["normal", "normal"]))
    assert words.names == ("abnormal", "normal") and words.y.tolist() == [1, 0, 1, 1]
    assert words.splits == {"train": slice(0, 2), "test": slice(2, 4)}


HEAD = TS.partition("1,2,3")[0].replace("@data", "@equalLength false\n@data")


@pytest.mark.parametrize(
    ("train", "words"),
    [
        (("Other", TS), r"lacks LSST_TEST\.ts, LSST_TRAIN\.ts; it holds .*Other_TRAIN\.ts"),
        (("LSST", HEAD + "1,2:1\n1,2,3:9"), "different lengths"),
        (("LSST", HEAD + "1,2:1\n1,?:9"), "values are missing"),
    ],
)
def test_an_archive_that_is_not_as_it_should_be_is_refused(train, words):
    """It lacks the files, or the series are irregular."""
    with pytest.raises(DataError, match=words):
        series.read_zip(archive(*train), "LSST")


def test_a_part_that_a_copy_lacks_is_named_with_the_cure():
    note = data.SOURCES["heartbeat"].layouts[1].note
    copy = data.Data("heartbeat", np.zeros(2), None, (), "", False, {"train": slice(0, 2)}, note)
    with pytest.raises(DataError, match=r"no part 'test'; it has train\..*get Heartbeat\.zip"):
        copy.part("test")
