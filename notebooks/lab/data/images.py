"""CIFAR-10 and CIFAR-100: the publisher's archive of pickles, or lossless WebP strips in an npz file."""

from __future__ import annotations

import io
import itertools
import pickle
import tarfile
from collections.abc import Sequence

import numpy as np

from .files import DataError, Raw


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


def read_archive(
    content: bytes, folder: str, train: list[str], test: str, meta: str, labels: str, classes: str
) -> Raw:
    """The publisher's archive, given its folder, the names of its members, and the keys of classes and of their names."""
    with tarfile.open(fileobj=io.BytesIO(content), mode="r:gz") as archive:

        def member(name):
            return _ArraysOnly(archive.extractfile(f"{folder}/{name}"), encoding="bytes").load()

        parts = [member(name) for name in (*train, test)]
        names = tuple(name.decode() for name in member(meta)[classes.encode()])
    found = [(part[b"data"].reshape(-1, 3, 32, 32), part[labels.encode()]) for part in parts]
    return Raw.of_parts({"train": _joined(found[:-1]), "test": found[-1]}, names)


def _joined(files: list[tuple]) -> tuple[np.ndarray, np.ndarray]:
    """The pictures and classes of several files as those of one."""
    x, y = zip(*files)
    return np.concatenate(x), np.concatenate(y)


def _pictures(count: int, classes: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Noisy pictures of one colour per class, for smoke runs: (count, 3, 32, 32) and labels, the classes in turn."""
    rng, y = np.random.default_rng(seed), np.arange(count) % classes
    colour = np.random.default_rng(0).integers(40, 215, (classes, 3, 1, 1))
    return (colour[y] + rng.integers(-40, 41, (count, 3, 32, 32))).astype(np.uint8), y


def stand_in(classes: int, files: int) -> Raw:
    """200 pictures to train on, drawn file by file of the archive, and 100 to test."""
    train = _joined([_pictures(200 // files, classes, seed) for seed in range(files)])
    names = [f"class {i}" for i in range(classes)]
    return Raw.of_parts({"train": train, "test": _pictures(100, classes, files)}, names)


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
    if step > 1:  # the middle of the values that were merged
        x = x * np.uint8(step) + np.uint8(step // 2)
    return np.ascontiguousarray(x.transpose(0, 3, 1, 2)), y, names


def read_strips(*contents: bytes, named: Sequence[str] = ()) -> Raw:
    """Training files in order, the test file last; ``named``: each training file is a part of its own, too."""
    *train, (x, y, names) = map(_strips, contents)
    raw = Raw.of_parts({"train": _joined([part[:2] for part in train]), "test": (x, y)}, names)
    ends = np.cumsum([0, *(len(part[1]) for part in train)]).tolist()
    raw.splits.update({part: slice(*ends[i : i + 2]) for i, part in enumerate(named)})
    return raw
