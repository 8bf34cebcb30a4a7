"""The novels as numbers: an encoding learned on the training part, and the tokens of each part."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from . import bpe, load
from .novels import BREAK, text_of


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
def corpus(vocabulary: int) -> Corpus:
    """The novels, encoded with a vocabulary of this size (smaller where the text allows no more); a quarter of a minute."""
    data = load("novels")
    train, test = (text_of(data.part(part)[0]) for part in ("train", "valid"))
    train, _, tune = train.rpartition(BREAK)
    encoding = bpe.learn(train, vocabulary)
    parts = (torch.from_numpy(encoding.encode(text)) for text in (train, tune, test))
    return Corpus(encoding, *parts)
