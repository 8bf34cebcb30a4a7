"""Byte-pair encoding against the definition carried out on the whole text; the corpus of tokens."""

import collections
import itertools

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from lab.data import bpe, novels

TEXT = "the theatre; the thaw, the bathe—then 1901 19 1901!\n\nThey bathe there.\t the  end_of it"


def by_definition(text, merges):
    """The symbols after so many merges of the most frequent neighbours, counted anew each time over all words of the text."""
    words = [[bytes([b]) for b in word.encode()] for word in bpe.words(text)]
    number = {bytes([b]): b for b in range(256)}
    for k in range(merges):
        counts = collections.Counter(pair for word in words for pair in itertools.pairwise(word))
        a, b = min(counts, key=lambda p: (-counts[p], number[p[0]], number[p[1]]))
        number.setdefault(a + b, 256 + k)
        for word in words:
            for i in range(len(word)):
                if tuple(word[i : i + 2]) == (a, b):
                    word[i : i + 2] = [a + b]
    return [number[symbol] for word in words for symbol in word]


def test_the_symbols_are_those_of_the_definition():
    encoding = bpe.learn(TEXT * 3, 281)
    assert encoding.vocabulary == 281
    assert encoding.encode(TEXT * 3).tolist() == by_definition(TEXT * 3, 25)


ENCODING = bpe.learn(TEXT, 270)


@settings(max_examples=60, deadline=None)
@given(st.text(st.characters(codec="utf-8"), max_size=60))
def test_words_and_symbols_give_the_text_back(text):
    """The library spells the bytes of a symbol as characters."""
    spelt = map(ENCODING.tokenizer.id_to_token, ENCODING.encode(text).tolist())
    assert "".join(bpe.words(text)) == "".join(spelt).encode("latin-1").decode() == text


# --------------------------------------------------------------------------------------------------------------- novels
def test_novels_are_read_alike_from_one_file_each_and_joined_whatever_the_line_ends():
    each = [f"One {i}.\n\nTwo." for i in range(38)]
    parts = each[:35], each[35:]
    joined = novels.read_novels(*("\n\f".join(part).encode() for part in parts), train=35)
    contents = [text.encode() for text in each]
    contents[3] = b"\xef\xbb\xbf" + contents[3].replace(b"\n", b"\r\n") + b"\r\n"
    apart = novels.read_novels(*contents, train=35)
    assert np.array_equal(apart.x, joined.x) and apart.splits == joined.splits
