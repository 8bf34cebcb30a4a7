"""Each data set in each of its forms: the format is read exactly, damage of any kind is refused, nothing is overwritten.

What a reader makes of its sample is held fast by the golden files of the notebooks that use the set, and what it makes of the real
files, where they are, by the checksums of the values.
"""

import dataclasses
import functools
import hashlib
import io
import lzma
import pickle
import zipfile

import numpy as np
import pytest
from lab import data
from lab.data import DataError, files, formats, images, series

LAYOUTS = {
    f"{source.name}-{number}": (source, layout)
    for source in data.SOURCES.values()
    for number, layout in enumerate(source.layouts)
    if layout.files
}
FETCHED = [name for name, source in data.SOURCES.items() if source.layouts[0].files]


@functools.cache
def sample(name):
    return LAYOUTS[name][1].sample()


@functools.cache
def parsed(name):
    """What a sample holds, and the digest of it."""
    raw = LAYOUTS[name][1].read(*sample(name))
    return raw, data._digest(raw)


def small(name, how="checksum", url="http://127.0.0.1:9/none"):
    """The data set with the one layout, and with the checksums and counts of its sample in place of the real ones."""
    source, layout = LAYOUTS[name]
    raw, digest = parsed(name)
    files = [
        dataclasses.replace(
            file,
            url=url and f"{url}/{file.name.replace('/', '_')}",
            size=len(content) if how == "checksum" else None,
            sha256=hashlib.sha256(content).hexdigest() if how == "checksum" else "",
            md5=hashlib.md5(content).hexdigest() if how == "checksum" and file.md5 else "",
        )
        for file, content in zip(layout.files, sample(name))
    ]
    expect = {part: (raw.x[index].shape, None) for part, index in raw.splits.items()}
    content = "" if how == "checksum" else digest
    layout = dataclasses.replace(layout, files=tuple(files), expect=expect, content=content)
    return dataclasses.replace(source, layouts=(layout,)), raw


def put(folder, source, contents, pack=""):
    places = []
    for file, content in zip(source.layouts[0].files, contents):
        place = folder / (file.name + pack)
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(lzma.compress(content) if pack else content)
        places.append(place)
    return places


def load(monkeypatch, source):
    monkeypatch.setitem(data.SOURCES, source.name, source)
    data._load.cache_clear()
    return data.load(source.name)


def same(loaded, raw):
    assert loaded.x.dtype == raw.x.dtype and np.array_equal(loaded.x, raw.x)
    assert (loaded.y is None) == (raw.y is None)
    assert raw.y is None or np.array_equal(loaded.y, raw.y)
    assert loaded.names == raw.names and loaded.splits == raw.splits and not loaded.stand_in


# -------------------------------------------------------------------------------------------------- every form of every set
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_sample_is_read_and_what_is_known_of_the_real_set_refuses_it(folder, monkeypatch, name):
    """Sizes and class counts of the real set are checked even where every checksum has been taken out."""
    source, raw = small(name, url="")
    places = put(folder, source, sample(name))
    same(load(monkeypatch, source), raw)
    assert [place.read_bytes() for place in places] == [*sample(name)]
    source, layout = LAYOUTS[name]
    bare = tuple(dataclasses.replace(f, sha256="", md5="", size=None) for f in layout.files)
    layout = dataclasses.replace(layout, files=bare, content="")
    with pytest.raises(DataError, match="expected"):
        load(monkeypatch, dataclasses.replace(source, layouts=(layout,)))


PROOFS = [(name, "content", "") for name in LAYOUTS]
PROOFS += [  # what reads well although it was changed, and what is packed
    ("novels-1", "checksum", ""),
    ("novels-1", "checksum", ".xz"),
    ("cola-1", "content", ".xz"),
]


@pytest.mark.parametrize(("name", "how", "pack"), PROOFS)
def test_damage_to_a_file_is_refused_and_left_alone(folder, monkeypatch, server, name, how, pack):
    """Also where the publisher's site would have sent the right file: what lies in the folder is the reader's."""
    root, url = server
    source, raw = small(name, how, url)
    for file, content in zip(source.layouts[0].files, sample(name)):
        (root / file.name.replace("/", "_")).write_bytes(content)
    place = put(folder, source, sample(name), pack)[-1]
    same(load(monkeypatch, source), raw)
    good = place.read_bytes()
    middle = len(good) // 2
    rest = good[middle:]
    damages = {
        "truncated": good[:middle],
        "corrupted": good[:middle] + bytes(b ^ 0x15 for b in rest[:40]) + rest[40:],
        "wrong format": b"<!DOCTYPE html><html>404: not found</html>\n",
        "empty": b"",
    }
    if how == "checksum":
        damages["a letter"] = good[:middle] + bytes([good[middle] ^ 1]) + good[middle + 1 :]
    for damage, bad in damages.items():
        place.write_bytes(bad)
        with pytest.raises(DataError, match=place.name) as error:
            load(monkeypatch, source)
        assert "left as it is" in str(error.value) and "move it away" in str(error.value), damage
        assert place.read_bytes() == bad, damage


def test_a_missing_file_says_what_to_put_where(folder, monkeypatch):
    source, _ = small("cifar10-1")
    place = put(folder, source, sample("cifar10-1"))[-1]
    place.unlink()
    file = source.layouts[0].files[-1]
    with pytest.raises(DataError, match=r"could not be downloaded.*NDL_DATA") as error:
        load(monkeypatch, source)
    assert f"put it at {place}" in str(error.value) and file.sha256 in str(error.value)
    account = data.File("a.csv", by_hand="get it from https://example.org (an account is needed)")
    with pytest.raises(DataError, match=r"account: get it from https://ex.*put it at .*a\.csv"):
        data.fetch(account)


@pytest.mark.parametrize("name", data.SOURCES)
def test_smoke_reads_the_official_format_by_the_readers_of_every_form(monkeypatch, capsys, name):
    """Not by that of the form which is used alone: each real reader meets a small file of its true format."""
    monkeypatch.setenv("NDL_MODE", "smoke")
    monkeypatch.setenv("NDL_DATA", "/nowhere")
    source, read = data.SOURCES[name], []

    def watched(layout):
        return dataclasses.replace(
            layout, read=lambda *contents: (read.append(layout), layout.read(*contents))[1]
        )

    loaded = load(
        monkeypatch, dataclasses.replace(source, layouts=(*map(watched, source.layouts),))
    )
    fetched = bool(source.layouts[0].files)
    said = [loaded.stand_in, "stand-in" in capsys.readouterr().out, "stand-in" in loaded.note]
    assert read == list(source.layouts) and said == [fetched] * 3
    data._load.cache_clear()
    assert loaded.checksum == data.load(name).checksum == data.checksum(name), "seeded"
    assert not any(a.flags.writeable for a in (loaded.x, loaded.y) if a is not None)


def test_a_stand_in_can_be_had_in_every_mode(folder, capsys):
    loaded = data.load("lsst", stand_in=True)
    assert loaded.stand_in and loaded.x.shape[1:] == (6, 36) and len(loaded.names) == 14
    assert "smoke" not in capsys.readouterr().out
    assert not data.load("digits", stand_in=True).stand_in, "ships with scikit-learn"


def test_the_note_of_recorded_runs_is_found_by_their_checksum(monkeypatch):
    monkeypatch.setenv("NDL_DATA", "/nowhere")
    assert "20,000 of the 50,000" in data.note("cifar10", "e8b9705f227dd0fa")
    assert "not in the registry" in data.note("cifar10", "0" * 16)


@pytest.mark.parametrize("name", ["ecg5000", "novels", "sst2"])
def test_the_first_complete_form_is_used(folder, monkeypatch, name):
    """Nothing but the second form in the folder: it is read; both: the publisher's."""
    first, second = small(f"{name}-0"), small(f"{name}-1")
    both = dataclasses.replace(first[0], layouts=first[0].layouts + second[0].layouts)
    put(folder, second[0], sample(f"{name}-1"))
    same(load(monkeypatch, both), second[1])
    put(folder, first[0], sample(f"{name}-0"))
    same(load(monkeypatch, both), first[1])


def test_class_counts_of_the_archive_are_checked(folder, monkeypatch):
    source, raw = small("ecg5000-0", "content")
    wrong = {"train": (raw.x[:15].shape, (3, 3, 3, 3, 4))}
    layout = dataclasses.replace(source.layouts[0], content="", expect=wrong)
    put(folder, source, sample("ecg5000-0"))
    with pytest.raises(DataError, match=r"are \[3, 3, 3, 3, 3\], expected \[3, 3, 3, 3, 4\]"):
        load(monkeypatch, dataclasses.replace(source, layouts=(layout,)))


def test_half_of_another_form_is_named(folder, monkeypatch):
    first, second = small("cifar10-0")[0], small("cifar10-1")[0]
    put(folder, second, sample("cifar10-1"))[1].unlink()
    both = dataclasses.replace(first, layouts=first.layouts + second.layouts)
    with pytest.raises(DataError, match=r"cifar10, but lacks cifar10/cifar10_test\.npz"):
        load(monkeypatch, both)


# --------------------------------------------------------------------------- downloads whose content alone can be checked
def test_a_download_without_a_checksum_is_kept_only_if_it_holds_what_it_should(
    folder, monkeypatch, server
):
    name, (root, url) = "cardio-0", server
    source, raw = small(name, "content", url)
    file, (content,) = source.layouts[0].files[0], sample(name)
    served = root / file.name.replace("/", "_")
    for bad in (content[:-200], b"<html>moved</html>"):
        served.write_bytes(bad)
        with pytest.raises(DataError, match=served.name):
            load(monkeypatch, source)
        assert [p for p in folder.rglob("*") if p.is_file()] == [], "nothing is kept"
    served.write_bytes(content)
    same(load(monkeypatch, source), raw)
    assert (folder / file.name).read_bytes() == content
    served.unlink()
    same(load(monkeypatch, source), raw)


# ---------------------------------------------------------------------------------------------------- CIFAR, independently
def test_cifar_rows_are_red_then_green_then_blue():
    """A row of the archive is 1,024 red, 1,024 green, 1,024 blue values, each part row by row (the publisher's page)."""
    raw, (x, y) = parsed("cifar100-0")[0], images._pictures(200, 100, seed=0)
    assert np.array_equal(raw.x[:200], x) and raw.y[:200].tolist() == y.tolist()
    assert raw.splits == {"train": slice(0, 200), "test": slice(200, 300)}
    assert len(raw.names) == 100 and raw.names[3] == "class 3"


def test_the_whole_of_cifar_10_begins_with_the_pictures_of_its_smaller_form():
    """The first file is that of the smaller form, whose rows go on counting."""
    layout = LAYOUTS["cifar10whole-1"][1]
    raw, smaller = parsed("cifar10whole-1")[0], parsed("cifar10-1")[0]
    assert raw.splits == {"train": slice(0, 200), "test": slice(200, 300)}
    assert np.array_equal(raw.x[:100], smaller.x[smaller.splits["train"]])
    assert np.array_equal(raw.x[100:200], images._strips(sample("cifar10whole-1")[1])[0])
    assert layout.files[::2] == LAYOUTS["cifar10-1"][1].files


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
ARFF = """% a comment
@RELATION Tiny
@attribute target {10,9}
@DATA
'1,2,3\\n-4,5e-1,6',10
'7,8,9\\n1,1,1',9
"""


@pytest.mark.parametrize(("read", "text"), [(formats.read_ts, TS), (formats.read_arff, ARFF)])
def test_channels_of_a_case(read, text):
    x, labels = read(text.encode("latin-1"))
    assert x.dtype == np.float32 and labels == ["10", "9"]
    assert x.tolist() == [[[1, 2, 3], [-4, 0.5, 6]], [[7, 8, 9], [1, 1, 1]]]


def test_classes_are_numbered_in_the_order_of_their_labels():
    x = np.zeros((2, 1, 3), np.float32)
    numbers = formats.join((x, ["10", "9"]), (x, ["-1", "9"]))
    assert numbers.names == ("-1", "9", "10") and numbers.y.tolist() == [2, 1, 0, 1]
    words = formats.join((x, ["normal", "abnormal"]), (x, ["normal", "normal"]))
    assert words.names == ("abnormal", "normal") and words.y.tolist() == [1, 0, 1, 1]
    assert words.splits == {"train": slice(0, 2), "test": slice(2, 4)}


@pytest.mark.parametrize(
    ("read", "text", "message"),
    [
        (formats.read_ts, "1,2:1\n", "@data is missing"),
        (formats.read_ts, "@timeStamps true\n@data\n(0,1):1\n", "time stamps"),
        (formats.read_ts, "@data\n", "no cases"),
        (formats.read_ts, "@data\n1,2:3,4:a\n1,2:b\n", "different numbers of channels"),
        (formats.read_ts, "@data\n1,2:a\n1,2,3:b\n", "cut off"),
        (formats.read_ts, "@data\n1,2:a\n1,?:b\n", "not a number"),
        (formats.read_ts, "@data\n1,2:a\n1,NaN:b\n", "missing"),
        (formats.read_arff, "@data\n'1,2\\n3,4',a\n1,2,b\n", "different numbers of channels"),
        (formats.read_arff, "@data\n'1,2\\n3',a\n", "cut off"),
    ],
)
def test_irregular_series_are_refused(read, text, message):
    with pytest.raises(DataError, match=message):
        read(text.encode())


def test_an_archive_without_the_files_says_what_it_holds():
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr("LSST.txt", "about")
    with pytest.raises(DataError, match=r"neither LSST_TRAIN\.ts nor \.arff; it holds LSST\.txt"):
        series._zipped("LSST")(packed.getvalue())


def test_heartbeat_copy_is_the_training_part_alone(folder, monkeypatch):
    source, _ = small("heartbeat-2")
    put(folder, source, sample("heartbeat-2"))
    loaded = load(monkeypatch, source)
    assert [*loaded.splits] == ["train"] and "205 test cases are missing" in loaded.note
    with pytest.raises(DataError, match=r"no part 'test'; it has train\..*get Heartbeat\.zip"):
        loaded.part("test")
    with pytest.raises(data.DataError.__base__, match="official parts"):
        data.official(loaded, seed=0)
    whole = parsed("heartbeat-0")[0]
    assert np.array_equal(loaded.y, whole.y[whole.splits["train"]])
    assert np.allclose(loaded.x, whole.x[whole.splits["train"]], atol=1e-6)


@pytest.mark.parametrize("name", ["ecg5000", "racketsports", "lsst", "sleep", "food-delivery"])
def test_all_forms_of_a_set_give_the_same_cases(name):
    """The samples are the same cases in every format, and the readers agree on them."""
    raws = [parsed(f"{name}-{number}")[0] for number in range(len(data.SOURCES[name].layouts))]
    for raw in raws[1:]:
        assert np.array_equal(raw.x, raws[0].x) and np.array_equal(raw.y, raws[0].y)
        assert raw.names == raws[0].names and raw.splits == raws[0].splits


# ------------------------------------------------------------------------------------------------------- official splits
def made(x, y, splits):
    return data.Data("made", x, y, (), "", False, splits, "")


def test_official_split_keeps_the_test_part_and_scales_by_the_training_part():
    x = np.random.default_rng(0).integers([[5], [100]], [[9], [200]], (120, 2, 30), np.uint8)
    y = np.arange(120) % 3
    x.setflags(write=False)
    whole = made(x, y, {"train": slice(0, 90), "test": slice(90, 120)})
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


@pytest.mark.parametrize("bad", [{"val": 0.0}, {"val": 1.0}, {"standardise": "row"}])
def test_bad_arguments_of_the_official_split(bad):
    parts = {"train": slice(0, 8), "test": slice(8, 10)}
    whole = made(np.zeros((10, 2), np.float32), np.zeros(10, int), parts)
    with pytest.raises(data.DataError.__base__):
        data.official(whole, seed=0, **bad)


@pytest.mark.parametrize("name", FETCHED)
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
