"""Sentences and text: SST-2, CoLA, WikiText-2."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence

import numpy as np
import pandas as pd

from .files import Raw


def _tsv(content: bytes, **how) -> pd.DataFrame:
    """A table with tabs between the columns; quotes and words such as NA or null are text like any other."""
    how |= {"quoting": csv.QUOTE_NONE, "keep_default_na": False, "dtype": str}
    return pd.read_csv(io.BytesIO(content), sep="\t", **how)


def _raw(parts: dict[str, tuple[list[str], list]], names: Sequence[str] = ()) -> Raw:
    """Sentences, without blanks at their ends, and labels; those that are not public are -1."""
    cleaned = {part: ([text.strip() for text in own], y) for part, (own, y) in parts.items()}
    return Raw.of_parts(cleaned, names)


def _sentences(n: int, seed: int) -> tuple[list[str], list[int]]:
    """Made-up sentences whose last word tells the class; one of them is a word that tables often take for missing."""
    rng, y = np.random.default_rng(seed), (np.arange(n) % 2).tolist()
    subjects = ["the film", 'a "quiet" story', "its cast", "null"]
    ends = ["is dull", "fails"], ["is fine", "shines"]
    return [f"{rng.choice(subjects)} {rng.choice(ends[label])} ." for label in y], y


def _made_up() -> list[tuple[list[str], list[int]]]:
    """Three parts of made-up sentences."""
    return [_sentences(n, seed) for seed, n in enumerate((40, 20, 20))]


# ----------------------------------------------------------------------------------------------------------------- SST-2
def read_sst2(*contents: bytes) -> Raw:
    """Columns in either order, the sentence under either name."""
    frames = [_tsv(content).rename(columns={"content": "sentence"}) for content in contents]
    return _sst2([(frame["sentence"].tolist(), frame["label"].tolist()) for frame in frames])


def _sst2(parts: list[tuple[list[str], list]]) -> Raw:
    return _raw(dict(zip(("train", "dev", "test"), parts)), ("negative", "positive"))


def sst2_stand_in() -> Raw:
    """As in GLUE, without the labels of the test part."""
    train, dev, (sentences, _) = _made_up()
    return _sst2([train, dev, (sentences, [-1] * 20)])


# ------------------------------------------------------------------------------------------------------------------ CoLA
def read_cola(*contents: bytes) -> Raw:
    """Training part, and the development parts of the same and of other sources; ``dev`` is both, as in GLUE."""
    frames = [_tsv(content, header=None) for content in contents]  # source, label, mark, sentence
    return _cola([(frame[3].tolist(), frame[1].tolist()) for frame in frames])


def _cola(parts: list[tuple[list[str], list]]) -> Raw:
    raw = _raw(dict(zip(("train", "dev_in", "dev_out"), parts)), ("unacceptable", "acceptable"))
    raw.splits["dev"] = slice(raw.splits["dev_in"].start, raw.splits["dev_out"].stop)
    return raw


def cola_stand_in() -> Raw:
    return _cola(_made_up())


# ------------------------------------------------------------------------------------------------------------ WikiText-2
def read_wikitext(*contents: bytes) -> Raw:
    """One line of the text per case, its tokens separated by blanks; rare words are <unk>."""
    lines = [content.decode("utf-8").removesuffix("\n").split("\n") for content in contents]
    return _raw({part: (own, None) for part, own in zip(("train", "valid", "test"), lines)})


def wikitext_stand_in() -> Raw:
    texts = ["".join(f" {s} <unk> \n \n" for s in sentences) for sentences, _ in _made_up()]
    return read_wikitext(*(text.encode() for text in texts))
