"""CIFAR-10 and CIFAR-100: the publisher's archive of pickles, or lossless WebP strips in an npz file."""

from __future__ import annotations

import io
import itertools
import pickle
import tarfile
from collections.abc import Callable

import numpy as np

from .files import DataError, Layout, Raw, Source, known

ORIGIN = "https://www.cs.toronto.edu/~kriz/cifar.html"
LICENCE = "not stated; the authors ask to cite Krizhevsky (2009), Learning Multiple Layers of Features from Tiny Images"
TRAIN, TEST = 50_000, 10_000


# ------------------------------------------------------------------------------------------------- the publisher's form
class _ArraysOnly(pickle.Unpickler):
    """Opens pickles that hold plain containers and NumPy arrays; a pickle can name nothing else, so it can do no harm."""

    def find_class(self, module, name):
        allowed = {
            "_reconstruct": np.empty(0).__reduce__()[0],
            "ndarray": np.ndarray,
            "dtype": np.dtype,
        }
        if module.startswith("numpy") and name in allowed:
            return allowed[name]
        if (module, name) == ("_codecs", "encode"):
            return __import__("codecs").encode
        raise pickle.UnpicklingError(f"it names {module}.{name}, which a file of CIFAR does not")


def _archive(train: tuple[str, ...], test: str, meta: str, labels: bytes, classes: bytes):
    """A reader of the publisher's archive, given the names of its members and the keys of their dictionaries."""

    def read(content: bytes) -> Raw:
        with tarfile.open(fileobj=io.BytesIO(content), mode="r:gz") as archive:

            def member(name):
                return _ArraysOnly(archive.extractfile(name), encoding="bytes").load()

            parts = [member(name) for name in (*train, test)]
            names = tuple(name.decode() for name in member(meta)[classes])
        y = np.concatenate([np.asarray(part[labels], np.int64) for part in parts])
        x = np.concatenate(
            [np.asarray(part[b"data"], np.uint8).reshape(-1, 3, 32, 32) for part in parts]
        )
        start = len(y) - len(parts[-1][labels])
        return Raw(x, y, names, {"train": slice(0, start), "test": slice(start, len(y))})

    return read


def _pictures(count: int, classes: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Noisy pictures of one colour per class, for smoke runs: (count, 3, 32, 32) and labels, the classes in turn."""
    rng, y = np.random.default_rng(seed), np.arange(count) % classes
    colour = np.random.default_rng(0).integers(40, 215, (classes, 3, 1, 1))
    return (colour[y] + rng.integers(-40, 41, (count, 3, 32, 32))).astype(np.uint8), y


def _stand_in(classes: int, files: int) -> Callable[[], Raw]:
    """200 pictures to train on, drawn file by file of the archive, and 100 to test."""

    def make() -> Raw:
        parts = [_pictures(200 // files, classes, seed) for seed in range(files)]
        x, y = (np.concatenate(part) for part in zip(*parts, _pictures(100, classes, files)))
        names = tuple(f"class {i}" for i in range(classes))
        return Raw(x, y, names, {"train": slice(0, 200), "test": slice(200, 300)})

    return make


# ----------------------------------------------------------------------------------------------------------- WebP strips
def _strips(content: bytes) -> tuple[np.ndarray, np.ndarray, tuple[str, ...]]:
    """Pictures, labels and class names of one npz file; about one second for 10,000 pictures."""
    from PIL import Image, features

    if not features.check("webp"):
        raise DataError(
            "these pictures are WebP, which this Pillow cannot read: pip install --upgrade pillow"
        )
    with np.load(io.BytesIO(content)) as file:
        webp, offsets, step = file["webp"].tobytes(), file["offsets"], int(file["step"])
        y, names = file["labels"].astype(np.int64), tuple(map(str, file["classes"]))
    strips = [
        Image.open(io.BytesIO(webp[i:j])).convert("RGB") for i, j in itertools.pairwise(offsets)
    ]
    x = np.concatenate([np.asarray(strip).reshape(-1, 32, 32, 3) for strip in strips])
    x = (
        x if step == 1 else x * np.uint8(step) + np.uint8(step // 2)
    )  # the middle of the values that were merged
    return np.ascontiguousarray(x.transpose(0, 3, 1, 2)), y, names


def _read_strips(*contents: bytes) -> Raw:
    """Training files in order, the test file last; the second training file is the one with fewer bits."""
    parts = [_strips(content) for content in contents]
    ends = np.cumsum([0, *(len(y) for _, y, _ in parts)]).tolist()
    splits = {"train": slice(0, ends[-2]), "test": slice(ends[-2], ends[-1])}
    if len(parts) == 3:
        splits |= {"train_exact": slice(0, ends[1]), "train_6bit": slice(ends[1], ends[2])}
    return Raw(
        np.concatenate([x for x, _, _ in parts]),
        np.concatenate([y for _, y, _ in parts]),
        parts[0][2],
        splits,
    )


def _read_exact_strips(*contents: bytes) -> Raw:
    """Training files in order, all exact, together the whole training part; the test file last."""
    raw = _read_strips(*contents)
    return Raw(raw.x, raw.y, raw.names, {part: raw.splits[part] for part in ("train", "test")})


# ---------------------------------------------------------------------------------------------------------- the registry
TEN, HUNDRED = "cifar-10-batches-py/", "cifar-100-python/"
MEMBERS = {  # of the publisher's archives: training parts, test part, names; keys of classes and of their names
    "cifar-10": (
        tuple(f"{TEN}data_batch_{i}" for i in range(1, 6)),
        f"{TEN}test_batch",
        f"{TEN}batches.meta",
        b"labels",
        b"label_names",
    ),
    "cifar-100": (
        (f"{HUNDRED}train",),
        f"{HUNDRED}test",
        f"{HUNDRED}meta",
        b"fine_labels",
        b"fine_label_names",
    ),
}


def _expect(classes: int, train: int, **more: int) -> dict:
    parts = {"train": train, "test": TEST, **more}
    return {part: ((n, 3, 32, 32), (n // classes,) * classes) for part, n in parts.items()}


def _cifar(name: str, archive: str, classes: int, about: str, strips: Layout) -> Source:
    # its checksums as Keras, torchvision and the publisher's page state them
    file = f"{archive}-python.tar.gz"
    official = Layout(
        (known(file, f"https://www.cs.toronto.edu/~kriz/{file}"),),
        _archive(*MEMBERS[archive]),
        _expect(classes, TRAIN),
        "The publisher's archive: all 50,000 training and 10,000 test pictures, exact.",
    )
    made_up = _stand_in(classes, len(MEMBERS[archive][0]))
    return Source(name, about, ORIGIN, LICENCE, (official, strips), made_up)


def _npz(archive: str, *parts: str) -> tuple:
    return tuple(known(f"{archive}/{archive}_{part}.npz") for part in parts)


PART_OF_TEN = Layout(
    _npz("cifar10", "train_a_exact", "test"),
    _read_strips,
    _expect(10, 20_000),
    "Training part: 20,000 of the 50,000 training pictures (2,000 per class), exact. Test part: all 10,000, exact.",
    "e8b9705f227dd0fa",
)
WHOLE_TEN = Layout(
    _npz("cifar10", "train_a_exact", "train_b_exact", "test"),
    _read_exact_strips,
    _expect(10, TRAIN),
    "Training part: all 50,000 pictures, exact, in two files. Test part: all 10,000, exact.",
    "62381094c19fb1e3",
)
WHOLE_HUNDRED = Layout(
    _npz("cifar100", "train_a_exact", "train_b_6bit", "test"),
    _read_strips,
    _expect(100, 50_000, train_exact=20_000, train_6bit=30_000),
    "Training part: 20,000 pictures exact (train_exact) and the other 30,000 at 6 bits a channel (train_6bit: each "
    "value within 2 of the original, of 255). Test part: all 10,000, exact. Fine labels.",
    "118b477facd5014e",
)
PICTURES = "32×32 colour pictures"
SOURCES = (
    _cifar("cifar10", "cifar-10", 10, f"CIFAR-10: {PICTURES}, 10 classes", PART_OF_TEN),
    # by itself, because recorded rows hold the checksum of the 20,000 pictures above
    _cifar(
        "cifar10whole",
        "cifar-10",
        10,
        f"CIFAR-10 with all training pictures: {PICTURES}, 10 classes",
        WHOLE_TEN,
    ),
    _cifar("cifar100", "cifar-100", 100, f"CIFAR-100: {PICTURES}, 100 fine classes", WHOLE_HUNDRED),
)
