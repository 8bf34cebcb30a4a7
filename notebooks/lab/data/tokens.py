"""The novels as numbers: an encoding learned on the training part, and the tokens of each part.

Learning the encoding takes a quarter of a minute, so what was computed once is kept in the user's cache folder, under a
name that holds the checksums of the texts and of the code that encodes them.
"""

from __future__ import annotations

import functools
import hashlib
import io
import pathlib
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..modes import mode
from . import bpe, load
from .files import cache_folder, write
from .novels import BREAK, text_of

PARTS = ("train", "tune", "test")


@dataclass(frozen=True)
class Corpus:
    """Tokens of a text in three parts, and their encoding.

    Args:
        train: to train on. tune: the last training novel, to choose settings by. test: held-out novels.
    """

    encoding: bpe.BPE
    train: Tensor
    tune: Tensor
    test: Tensor


@functools.cache
def corpus(vocabulary: int, name: str = "novels") -> Corpus:
    """A text of the registry, encoded with a vocabulary of this size (smaller where the text allows no more)."""
    place = None if mode() == "smoke" else _place(vocabulary, name)
    if place is not None and place.is_file():
        return _read(place)
    found = encode(vocabulary, name)
    if place is not None:
        write(place, _packed(found), replace=True)
    return found


def encode(vocabulary: int, name: str) -> Corpus:
    """Learn the encoding and encode all parts."""
    data = load(name)
    train, valid = (text_of(data.part(part)[0]) for part in ("train", "valid"))
    most, _, last = train.rpartition(BREAK)
    texts = (most, last, valid)
    encoding = bpe.learn(texts[0], vocabulary)
    return Corpus(encoding, *(torch.from_numpy(encoding.encode(text)) for text in texts))


def _place(vocabulary: int, name: str) -> pathlib.Path:
    code = hashlib.sha256()
    for module in (bpe.__file__, __file__):
        code.update(pathlib.Path(module).read_bytes())
    known = f"{load(name).checksum}-{code.hexdigest()[:16]}"
    return cache_folder() / "tokens" / f"{name}-{vocabulary}-{known}.npz"


def _packed(found: Corpus) -> bytes:
    arrays = {part: getattr(found, part).numpy().astype(np.uint16) for part in PARTS}
    content = io.BytesIO()
    np.savez(content, merges=np.array(found.encoding.merges, np.uint16).reshape(-1, 2), **arrays)
    return content.getvalue()


def _read(place: pathlib.Path) -> Corpus:
    with np.load(place) as packed:
        merges = [tuple(pair) for pair in packed["merges"].tolist()]
        parts = [torch.from_numpy(packed[part].astype(np.int64)) for part in PARTS]
    return Corpus(bpe.BPE(merges), *parts)
