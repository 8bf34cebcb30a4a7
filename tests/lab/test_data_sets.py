"""Data sets: each format is read exactly, damage is refused, and every set has its stand-in; how files come is in test_data.py.

What a reader makes of the real files, where they are, is held fast by the checksums of the values.
"""

import io
import pickle
import tarfile
import zipfile

import numpy as np
import pytest
from lab import data
from lab.data import DataError, files, images, series, tables, texts
from PIL import Image


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
def npz(**arrays):
    file = io.BytesIO()
    np.savez(file, **arrays)
    return file.getvalue()


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


def strips(seed, step=1):
    """A hundred pictures as lossless WebP, forty to a strip, of values that are multiples of the step."""
    x, y = images._pictures(100, 10, seed)
    packed = [io.BytesIO() for _ in range(3)]
    for i, file in enumerate(packed):
        strip = x[40 * i : 40 * i + 40].transpose(0, 2, 3, 1).reshape(-1, 32, 3) // step
        Image.fromarray(strip).save(file, "WEBP", lossless=True, method=0)
    contents = [file.getvalue() for file in packed]
    offsets, webp = np.cumsum([0, *map(len, contents)]), np.frombuffer(b"".join(contents), np.uint8)
    names = np.array([f"class {i}" for i in range(10)])
    return npz(webp=webp, offsets=offsets, labels=y, step=np.uint8(step), classes=names)


def test_cifar_rows_are_red_then_green_then_blue():
    """A row of the archive is 1,024 red, 1,024 green, 1,024 blue values, each part row by row (the publisher's page)."""
    read = data.SOURCES["cifar10"].layouts[0].read
    raw, (x, y) = read(cifar()), images._pictures(40, 10, seed=1)
    assert np.array_equal(raw.x[40:80], x) and raw.y[40:80].tolist() == y.tolist()
    assert raw.splits == {"train": slice(0, 200), "test": slice(200, 300)}
    assert len(raw.names) == 10 and raw.names[3] == "class 3"


def test_strips_are_their_pictures_and_fewer_bits_are_the_middle_of_their_values():
    three = (strips(0), strips(1, step=4), strips(2))
    raw = images.read_strips(*three, named=["train_exact", "train_6bit"])
    for seed, part in enumerate(("train_exact", "train_6bit", "test")):
        x, y = images._pictures(100, 10, seed)
        wanted = x // 4 * 4 + 2 if part == "train_6bit" else x
        assert np.array_equal(raw.x[raw.splits[part]], wanted)
        assert raw.y[raw.splits[part]].tolist() == y.tolist()
    assert raw.splits["train"] == slice(0, 200)
    assert [*images.read_strips(*three).splits] == ["train", "test"]


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


SERIES = np.arange(24, dtype=np.float32).reshape(4, 1, 6)


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


def test_heartbeat_copy_is_the_training_part_alone():
    raw = series.read_micro(npz(X_micro=(SERIES * 1e6).astype(np.int32), y=[1, 0, 0, 1]))
    assert raw.names == ("abnormal", "normal") and raw.y.tolist() == [0, 1, 1, 0]
    assert np.allclose(raw.x, SERIES, atol=1e-6) and [*raw.splits] == ["train"]
    note = data.SOURCES["heartbeat"].layouts[1].note
    loaded = data.Data("heartbeat", raw.x, raw.y, raw.names, "", False, raw.splits, note)
    with pytest.raises(DataError, match=r"no part 'test'; it has train\..*get Heartbeat\.zip"):
        loaded.part("test")


def test_labels_of_a_copy_are_numbers_of_its_names_where_it_has_names():
    made = {"X_train": SERIES, "y_train": [1, 0, 1, 0], "X_test": SERIES[:1], "y_test": [0]}
    raw = series.read_npz(npz(**made, classes=np.array(["squash", "badminton"])))
    assert raw.names == ("badminton", "squash") and raw.y.tolist() == [0, 1, 0, 1, 1]


# ------------------------------------------------------------------------------------------------- tables, texts, questions
CARDIO = ";".join(("id", *tables.CARDIO, "cardio\n")).encode()


def test_a_table_loses_rows_with_a_missing_value_and_its_text_becomes_numbers():
    rows = [
        ("Low ", "1", "3.25"),
        ("High ", "1", "#VALUE!"),
        ("Very Low ", "N/A", "2"),
        ("High ", "2", "1.5"),
    ]
    names = [name for name in tables.FOOD if name not in ("Traffic_Level", "humidity")]
    head = ",".join(("ID", "Traffic_Level", "humidity", "TARGET", *names))
    content = "\n".join([head, *(f"0A,{','.join(row)}{',7' * 12}" for row in rows)])
    raw = tables.read_food(content.encode())
    at = [tables.FOOD.index(name) for name in ("Traffic_Level", "humidity")]
    assert raw.x[:, at].tolist() == [[1, 1], [0, 2]] and raw.y.tolist() == [3.25, 1.5]
    assert raw.x.sum() == 4 + 2 * 12 * 7 and raw.names == tables.FOOD
    raw = tables.read_cardio(CARDIO + b"7;" + b"1;" * 11 + b"0\n8;" + b"2.5;" * 11 + b"1\n")
    assert raw.x.tolist() == [[1] * 11, [2.5] * 11] and raw.y.tolist() == [0, 1]


def test_quotes_and_words_for_missing_are_text_like_any_other():
    parts = [b'label\tsentence\n1\ta "fine" film \n', b"content\tlabel\nnull\t0\n"]
    raw = texts.read_sst2(*parts, parts[1])
    assert raw.x.tolist() == ['a "fine" film', "null", "null"] and raw.y.tolist() == [1, 0, 0]
    raw = texts.read_cola(*[b"gj04\t0\t*\tNA.\n"] * 3)
    assert raw.x.tolist() == ["NA."] * 3 and raw.splits["dev"] == slice(1, 3)
