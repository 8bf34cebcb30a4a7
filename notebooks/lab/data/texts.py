"""Sentences and text: SST-2, CoLA, WikiText-2."""

from __future__ import annotations

import csv
import io

import numpy as np
import pandas as pd

from .files import DataError, Layout, Raw, Source, known


def _tsv(content: bytes, **how) -> pd.DataFrame:
    """A table with tabs between the columns; quotes and words such as NA or null are text like any other."""
    return pd.read_csv(
        io.BytesIO(content),
        sep="\t",
        quoting=csv.QUOTE_NONE,
        keep_default_na=False,
        dtype=str,
        **how,
    )


def _raw(parts: dict[str, tuple[list[str], list]], names: tuple[str, ...]) -> Raw:
    """One array of sentences from all parts, in order; labels that are not public are -1."""
    ends = np.cumsum([0, *(len(sentences) for sentences, _ in parts.values())]).tolist()
    x = np.array(
        [sentence.strip() for sentences, _ in parts.values() for sentence in sentences], object
    )
    y = np.array([int(label) for _, labels in parts.values() for label in labels], np.int64)
    if not set(y.tolist()) <= {-1, 0, 1} or len(x) != len(y):
        raise DataError("labels must be 0 or 1")
    return Raw(x, y, names, {part: slice(i, j) for part, i, j in zip(parts, ends, ends[1:])})


def _sentences(n: int, seed: int) -> tuple[list[str], list[int]]:
    """Made-up sentences whose last word tells the class; one of them is a word that tables often take for missing."""
    rng, y = np.random.default_rng(seed), (np.arange(n) % 2).tolist()
    subjects, ends = (
        ["the film", 'a "quiet" story', "its cast", "null"],
        (["is dull", "fails"], ["is fine", "shines"]),
    )
    return [f"{rng.choice(subjects)} {rng.choice(ends[label])} ." for label in y], y


def _made_up() -> list[tuple[list[str], list[int]]]:
    """Three parts of made-up sentences."""
    return [_sentences(n, seed) for seed, n in enumerate((40, 20, 20))]


# ----------------------------------------------------------------------------------------------------------------- SST-2
SST2_NAMES = ("negative", "positive")
SST2_PARTS = ("train", "dev", "test")


def _sst2_part(content: bytes) -> tuple[list[str], list[str]]:
    frame = _tsv(content)
    text = next((name for name in ("sentence", "content") if name in frame), None)
    if text is None or "label" not in frame:
        raise DataError(
            f"expected the columns label and sentence, found {', '.join(frame.columns)}"
        )
    return frame[text].tolist(), frame["label"].tolist()


def read_sst2(*contents: bytes) -> Raw:
    """Columns in either order, the sentence under either name."""
    return _raw(dict(zip(SST2_PARTS, map(_sst2_part, contents))), SST2_NAMES)


def sst2_stand_in() -> Raw:
    """As in GLUE, without the labels of the test part."""
    train, dev, (sentences, _) = _made_up()
    return _raw({"train": train, "dev": dev, "test": (sentences, [-1] * 20)}, SST2_NAMES)


# ------------------------------------------------------------------------------------------------------------------ CoLA
COLA = ("source", "label", "mark", "sentence")
COLA_NAMES = ("unacceptable", "acceptable")
COLA_PARTS = {"train": "in_domain_train", "dev_in": "in_domain_dev", "dev_out": "out_of_domain_dev"}


def read_cola(*contents: bytes) -> Raw:
    """Training part, and the development parts of the same and of other sources; ``dev`` is both, as in GLUE."""
    frames = [_tsv(content, header=None) for content in contents]
    if any(frame.shape[1] != len(COLA) for frame in frames):
        raise DataError(f"expected four columns without a header: {', '.join(COLA)}")
    return _cola([(frame[3].tolist(), frame[1].tolist()) for frame in frames])


def _cola(parts: list[tuple[list[str], list]]) -> Raw:
    raw = _raw(dict(zip(COLA_PARTS, parts)), COLA_NAMES)
    raw.splits["dev"] = slice(raw.splits["dev_in"].start, raw.splits["dev_out"].stop)
    return raw


# ------------------------------------------------------------------------------------------------------------ WikiText-2
WIKI_PARTS = ("train", "valid", "test")


def read_wikitext(*contents: bytes) -> Raw:
    """One line of the text per case, its tokens separated by blanks; rare words are <unk>."""
    lines = [content.decode("utf-8").split("\n") for content in contents]
    lines = [part[:-1] if part[-1] == "" else part for part in lines]
    if not any("<unk>" in line for line in lines[0]):
        raise DataError("there is no <unk> in it: this is not the tokenised version 1")
    ends = np.cumsum([0, *map(len, lines)]).tolist()
    x = np.array([line.strip() for part in lines for line in part], object)
    return Raw(x, None, (), {part: slice(i, j) for part, i, j in zip(WIKI_PARTS, ends, ends[1:])})


def wikitext_stand_in() -> Raw:
    texts = ["".join(f" {s} <unk> \n \n" for s in sentences) for sentences, _ in _made_up()]
    return read_wikitext(*(text.encode() for text in texts))


# ---------------------------------------------------------------------------------------------------------- the registry
_COPIES = "https://raw.githubusercontent.com"
_SST2 = f"{_COPIES}/awake020/pytorch_Bert_sst2/ce2ab1719d32182e6233b24b2de246bd32814fde/SST-2"
_COLA = (
    f"{_COPIES}/nyu-mll/CoLA-baselines/dd095d3646ed05a315280aaa8ed4ec84ba435b3e"
    "/acceptability_corpus/cola_public/raw"
)
_WIKI = (
    f"{_COPIES}/pytorch/examples/77f55b912142e11fcfdf5b530231fb9c52f181e8"
    "/word_language_model/data/wikitext-2"
)

SOURCES = (
    Source(
        "sst2",
        "SST-2: sentences of film reviews, negative or positive",
        "https://nlp.stanford.edu/sentiment/ (as in GLUE, https://gluebenchmark.com)",
        "not stated",
        (
            Layout(
                tuple(known(f"text/SST-2/{p}.tsv", f"{_SST2}/{p}.tsv") for p in SST2_PARTS),
                read_sst2,
                {
                    "train": ((67_349,), (29_780, 37_569)),
                    "dev": ((872,), (428, 444)),
                    "test": ((1821,), (912, 909)),
                },
                "A public copy of the same three parts in another order; its test labels are those of the original treebank.",
                "cfaa936d17298217",
            ),
        ),
        sst2_stand_in,
    ),
    Source(
        "cola",
        "CoLA: sentences from linguistics books, grammatically acceptable or not",
        "https://nyu-mll.github.io/CoLA/",
        "excerpts of published works under fair use, as the authors state",
        (
            Layout(
                tuple(known(f"text/CoLA/{p}.tsv", f"{_COLA}/{p}.tsv") for p in COLA_PARTS.values()),
                read_cola,
                {
                    "train": ((8551,), (None, None)),
                    "dev_in": ((527,), (None, None)),
                    "dev_out": ((516,), (None, None)),
                },
                "The authors' files; the labels of the test part are not public, so scores are those on the dev part.",
                "852f4a5666c32fa9",
            ),
        ),
        lambda: _cola(_made_up()),
    ),
    Source(
        "wikitext2",
        "WikiText-2, version 1: Wikipedia articles as tokens, rare words as <unk>",
        "https://arxiv.org/abs/1609.07843",
        "CC BY-SA (Wikipedia)",
        (
            Layout(
                tuple(known(f"text/wikitext-2/{p}.txt", f"{_WIKI}/{p}.txt") for p in WIKI_PARTS),
                read_wikitext,
                {"train": ((36_718,), None), "valid": ((3760,), None), "test": ((4358,), None)},
                "Public copies of the publisher's three files.",
                "a9563626ec7280d7",
            ),
        ),
        wikitext_stand_in,
    ),
)
