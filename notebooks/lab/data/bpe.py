"""Byte-pair encoding: text to numbers below a vocabulary size, learned from the text itself by the library tokenizers; the novels so.

A word is a run of letters, of digits, or of other marks, with the blank before it; each word is UTF-8 bytes at first, and
the most frequent pair of neighbours inside words is merged again and again. Ties go to the pair that comes first in the
order of its two numbers, so that the same text gives the same encoding everywhere.
"""

from __future__ import annotations

import functools
import re
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..machine import require
from . import load
from .novels import BREAK, text_of

WORDS = r" ?[^\W\d_]+| ?\d+| ?(?:[^\w\s]|_)+|\s+(?!\S)|\s"
BYTES = 256


def words(text: str) -> list[str]:
    """The text cut into words; joined they are the text."""
    return re.findall(WORDS, text)


def _spelled(word: str) -> str:
    """A word as the library is to see it: a character for each byte, in the order of the bytes."""
    return word.encode().decode("latin-1")


class BPE:
    """An encoding of the library; symbols 0 to 255 are the bytes."""

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer

    @property
    def vocabulary(self) -> int:
        """Number of different symbols."""
        return self.tokenizer.get_vocab_size()

    def encode(self, text: str) -> np.ndarray:
        """The symbols of a text, as int64."""
        found = words(text)
        symbols = {word: self.tokenizer.encode(_spelled(word)).ids for word in set(found)}
        return np.array([symbol for word in found for symbol in symbols[word]], np.int64)


def learn(text: str, vocabulary: int) -> BPE:
    """The encoding of a vocabulary of this size, at least the 256 bytes, or of the largest that the text allows."""
    library = require("tokenizers")
    tokenizer = library.Tokenizer(library.models.BPE())
    alphabet = [chr(byte) for byte in range(BYTES)]
    trainer = library.trainers.BpeTrainer(
        vocab_size=vocabulary, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(map(_spelled, words(text)), trainer)
    return BPE(tokenizer)


class Corpus(NamedTuple):
    """An encoding, and the tokens of the novels to train on, of the last training novel, to choose settings by, and of those held out."""

    encoding: BPE
    train: Tensor
    tune: Tensor
    test: Tensor


@functools.cache
def corpus(vocabulary: int) -> Corpus:
    """The novels, encoded with a vocabulary of this size (smaller where the text allows no more); half a minute."""
    data = load("novels")
    train, test = (text_of(data.part(part)[0]) for part in ("train", "valid"))
    train, _, tune = train.rpartition(BREAK)
    encoding = learn(train, vocabulary)
    return Corpus(
        encoding, *(torch.from_numpy(encoding.encode(text)) for text in (train, tune, test))
    )
