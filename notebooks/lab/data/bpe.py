"""Byte-pair encoding: text to numbers below a vocabulary size, learned from the text itself.

A word is a run of letters, of digits, or of other marks, with the blank before it; each word is UTF-8 bytes at first, and
the most frequent pair of neighbours inside words is merged again and again. Ties go to the pair that comes first in the
order of its two numbers, so that the same text gives the same encoding everywhere.
"""

from __future__ import annotations

import collections
import functools
import itertools
import re
from collections.abc import Iterable, Sequence

import numpy as np

from ..modes import LabError

WORDS = r" ?[^\W\d_]+| ?\d+| ?(?:[^\w\s]|_)+|\s+(?!\S)|\s"
BYTES = 256
Pair = tuple[int, int]


def words(text: str) -> list[str]:
    """The text cut into words; joined they are the text."""
    return re.findall(WORDS, text)


def merge(symbols: Sequence[int], pair: Pair, new: int) -> list[int]:
    """The symbols with each occurrence of the pair, from the left, replaced by the new symbol."""
    out = []
    at = 0
    while at < len(symbols):
        if at + 1 < len(symbols) and (symbols[at], symbols[at + 1]) == pair:
            out.append(new)
            at += 2
        else:
            out.append(symbols[at])
            at += 1
    return out


class BPE:
    """An encoding: the pairs that are merged, in their order. Symbols 0 to 255 are the bytes."""

    def __init__(self, merges: Sequence[Pair]):
        self.merges = list(merges)
        self.rank = {pair: k for k, pair in enumerate(self.merges)}
        self.bytes = [bytes([b]) for b in range(BYTES)]
        for a, b in self.merges:
            self.bytes.append(self.bytes[a] + self.bytes[b])
        self.word = functools.cache(self._word)

    @property
    def vocabulary(self) -> int:
        """Number of different symbols."""
        return len(self.bytes)

    def _word(self, word: str) -> tuple[int, ...]:
        symbols = list(word.encode())
        while len(symbols) > 1:
            pairs = itertools.pairwise(symbols)
            best = min(pairs, key=lambda pair: self.rank.get(pair, len(self.merges)))
            if best not in self.rank:
                break
            symbols = merge(symbols, best, BYTES + self.rank[best])
        return tuple(symbols)

    def encode(self, text: str) -> np.ndarray:
        """The symbols of a text, as int64."""
        symbols = [symbol for word in words(text) for symbol in self.word(word)]
        return np.array(symbols, np.int64)

    def decode(self, symbols: Iterable[int]) -> str:
        """The text of symbols; bytes that are no UTF-8 by themselves become the replacement character."""
        return b"".join(self.bytes[s] for s in symbols).decode(errors="replace")


class _Counts:
    """How often each pair of neighbours occurs inside the words of a text, kept while pairs are merged."""

    def __init__(self, text: str):
        found = collections.Counter(words(text))
        self.times = list(found.values())
        self.symbols = [list(word.encode()) for word in found]
        self.pairs: collections.Counter[Pair] = collections.Counter()
        self.where: dict[Pair, set[int]] = collections.defaultdict(set)
        for i in range(len(self.symbols)):
            self._count(i, self.times[i])

    def _count(self, i: int, times: int) -> None:
        """Add the pairs of one word; a negative number of times takes them away."""
        for pair in itertools.pairwise(self.symbols[i]):
            self.pairs[pair] += times
            self.where[pair].add(i)

    def most_frequent(self) -> Pair | None:
        """The pair with the largest count, of equal ones the first in order; None where no pair is left."""
        most = max(self.pairs.values(), default=0)
        return min(p for p, n in self.pairs.items() if n == most) if most > 0 else None

    def merge(self, pair: Pair, new: int) -> None:
        """Replace the pair by a new symbol in all words."""
        for i in self.where.pop(pair):
            self._count(i, -self.times[i])
            self.symbols[i] = merge(self.symbols[i], pair, new)
            self._count(i, self.times[i])
        self.pairs.pop(pair)


def learn(text: str, vocabulary: int) -> BPE:
    """The encoding of a vocabulary of this size, or of the largest that the text allows.

    Raises:
        LabError: the vocabulary is smaller than the 256 bytes.
    """
    if vocabulary < BYTES:
        raise LabError(f"a vocabulary of {vocabulary} does not hold the {BYTES} bytes")
    counts = _Counts(text)
    merges: list[Pair] = []
    while BYTES + len(merges) < vocabulary:
        pair = counts.most_frequent()
        if pair is None:
            break
        counts.merge(pair, BYTES + len(merges))
        merges.append(pair)
    return BPE(merges)
