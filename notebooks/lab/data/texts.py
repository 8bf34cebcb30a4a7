"""Sentences and text: SST-2, CoLA, WikiText-2."""

from __future__ import annotations

import csv
import io
import zipfile
from collections.abc import Iterable

import numpy as np
import pandas as pd

from .files import DataError, File, Layout, Raw, Source, known, unzip

COLA = ("source", "label", "mark", "sentence")


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


def _members(content: bytes, names: Iterable[str]) -> list[bytes]:
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        return [unzip(archive, name) for name in names]


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


# ----------------------------------------------------------------------------------------------------------------- SST-2
SST2_NAMES = ("negative", "positive")


def _sst2_part(content: bytes) -> tuple[list[str], list]:
    """Columns in either order, the sentence under either name; the test part of GLUE has no labels."""
    frame = _tsv(content)
    text = next((name for name in ("sentence", "content") if name in frame), None)
    if text is None or not {"label", "index"} & set(frame.columns):
        raise DataError(
            f"expected the columns sentence and label, found {', '.join(frame.columns)}"
        )
    return frame[text].tolist(), frame["label"].tolist() if "label" in frame else [-1] * len(frame)


def read_sst2(train: bytes, dev: bytes, test: bytes) -> Raw:
    return _raw(
        {"train": _sst2_part(train), "dev": _sst2_part(dev), "test": _sst2_part(test)}, SST2_NAMES
    )


def read_sst2_zip(content: bytes) -> Raw:
    return read_sst2(*_members(content, [f"SST-2/{part}.tsv" for part in ("train", "dev", "test")]))


def _sentences(n: int, seed: int) -> tuple[list[str], list[int]]:
    """Made-up sentences whose last word tells the class; one of them is a word that tables often take for missing."""
    rng, y = np.random.default_rng(seed), (np.arange(n) % 2).tolist()
    subjects, ends = (
        ["the film", 'a "quiet" story', "its cast", "null"],
        (["is dull", "fails"], ["is fine", "shines"]),
    )
    return [f"{rng.choice(subjects)} {rng.choice(ends[label])} ." for label in y], y


def _zip(members: dict[str, str | bytes]) -> bytes:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in members.items():
            archive.writestr(name, text)
    return packed.getvalue()


def _sst2_texts(glue: bool) -> list[str]:
    texts = []
    for seed, n in enumerate((40, 20, 20)):
        rows = list(zip(*_sentences(n, seed)))
        if glue and seed == 2:
            texts.append(
                "index\tsentence\n" + "".join(f"{i}\t{s}\n" for i, (s, _) in enumerate(rows))
            )
        elif glue:
            texts.append("sentence\tlabel\n" + "".join(f"{s} \t{label}\n" for s, label in rows))
        else:
            texts.append("label\tcontent\n" + "".join(f"{label}\t{s}\n" for s, label in rows))
    return texts


def sst2_zip_sample() -> tuple[bytes]:
    names = [f"SST-2/{part}.tsv" for part in ("train", "dev", "test")]
    return (_zip(dict(zip(names, _sst2_texts(glue=True)))),)


def sst2_sample() -> tuple[bytes, ...]:
    return tuple(text.encode() for text in _sst2_texts(glue=False))


# ------------------------------------------------------------------------------------------------------------------ CoLA
COLA_NAMES = ("unacceptable", "acceptable")
COLA_PARTS = {"train": "in_domain_train", "dev_in": "in_domain_dev", "dev_out": "out_of_domain_dev"}


def read_cola(*contents: bytes) -> Raw:
    """Training part, and the development parts of the same and of other sources; ``dev`` is both, as in GLUE."""
    frames = [_tsv(content, header=None) for content in contents]
    if any(frame.shape[1] != len(COLA) for frame in frames):
        raise DataError(f"expected four columns without a header: {', '.join(COLA)}")
    raw = _raw(
        {part: (frame[3].tolist(), frame[1].tolist()) for part, frame in zip(COLA_PARTS, frames)},
        COLA_NAMES,
    )
    raw.splits["dev"] = slice(raw.splits["dev_in"].start, raw.splits["dev_out"].stop)
    return raw


def read_cola_zip(content: bytes) -> Raw:
    return read_cola(
        *_members(content, [f"cola_public/raw/{name}.tsv" for name in COLA_PARTS.values()])
    )


def cola_sample() -> tuple[bytes, ...]:
    parts = [_sentences(n, seed) for seed, n in enumerate((40, 20, 20))]
    rows = [
        [f"gj04\t{label}\t{'' if label else '*'}\t{text}\n" for text, label in zip(*part)]
        for part in parts
    ]
    return tuple("".join(part).encode() for part in rows)


def cola_zip_sample() -> tuple[bytes]:
    names = [f"cola_public/raw/{name}.tsv" for name in COLA_PARTS.values()]
    return (_zip(dict(zip(names, cola_sample()))),)


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


def read_wikitext_zip(content: bytes) -> Raw:
    return read_wikitext(
        *_members(content, [f"wikitext-2/wiki.{part}.tokens" for part in WIKI_PARTS])
    )


def wikitext_sample() -> tuple[bytes, ...]:
    parts = [_sentences(n, seed)[0] for seed, n in enumerate((40, 20, 20))]
    return tuple(("".join(f" {s} <unk> \n \n" for s in part)).encode() for part in parts)


def wikitext_zip_sample() -> tuple[bytes]:
    names = [f"wikitext-2/wiki.{part}.tokens" for part in WIKI_PARTS]
    return (_zip(dict(zip(names, wikitext_sample()))),)


# ---------------------------------------------------------------------------------------------------------- the registry
def _plain(folder: str, ending: str, *names: str) -> tuple[File, ...]:
    return tuple(known(f"text/{folder}/{name}.{ending}") for name in names)


_SST2 = {"train": ((67_349,), (29_780, 37_569)), "dev": ((872,), (428, 444))}
_COLA = {
    "train": ((8551,), (None, None)),
    "dev_in": ((527,), (None, None)),
    "dev_out": ((516,), (None, None)),
}
_WIKI = {"train": ((36_718,), None), "valid": ((3760,), None), "test": ((4358,), None)}

SOURCES = (
    Source(
        "sst2",
        "SST-2: sentences of film reviews, negative or positive",
        "https://nlp.stanford.edu/sentiment/ (as in GLUE, https://gluebenchmark.com)",
        "not stated",
        (
            Layout(
                (known("text/SST-2.zip", "https://dl.fbaipublicfiles.com/glue/data/SST-2.zip"),),
                read_sst2_zip,
                sst2_zip_sample,
                _SST2 | {"test": ((1821,), None)},
                "GLUE's file: the labels of its test part are not public (-1 here), so scores are those on the dev part.",
            ),
            Layout(
                _plain("SST-2", "tsv", "train", "dev", "test"),
                read_sst2,
                sst2_sample,
                _SST2 | {"test": ((1821,), (912, 909))},
                "A public copy of the same three parts in another order; its test labels are those of the original treebank.",
                "cfaa936d17298217",
            ),
        ),
    ),
    Source(
        "cola",
        "CoLA: sentences from linguistics books, grammatically acceptable or not",
        "https://nyu-mll.github.io/CoLA/",
        "excerpts of published works under fair use, as the authors state",
        (
            Layout(
                (
                    known(
                        "text/cola_public_1.1.zip",
                        "https://nyu-mll.github.io/CoLA/cola_public_1.1.zip",
                    ),
                ),
                read_cola_zip,
                cola_zip_sample,
                _COLA,
                "The publisher's file; the labels of the test part are not public, so scores are those on the dev part.",
            ),
            Layout(
                _plain("CoLA", "tsv", *COLA_PARTS.values()),
                read_cola,
                cola_sample,
                _COLA,
                "The authors' files; the labels of the test part are not public, so scores are those on the dev part.",
                "852f4a5666c32fa9",
            ),
        ),
    ),
    Source(
        "wikitext2",
        "WikiText-2, version 1: Wikipedia articles as tokens, rare words as <unk>",
        "https://arxiv.org/abs/1609.07843",
        "CC BY-SA (Wikipedia)",
        (
            Layout(
                (
                    known(
                        "text/wikitext-2-v1.zip",
                        "https://s3.amazonaws.com/research.metamind.io/wikitext/wikitext-2-v1.zip",
                        "the publisher's address may be gone; get wikitext-2-v1.zip from a mirror",
                    ),
                ),
                read_wikitext_zip,
                wikitext_zip_sample,
                _WIKI,
                "The publisher's file.",
            ),
            Layout(
                _plain("wikitext-2", "txt", *WIKI_PARTS),
                read_wikitext,
                wikitext_sample,
                _WIKI,
                "Public copies of the publisher's three files.",
                "a9563626ec7280d7",
            ),
        ),
    ),
)
