"""English novels in the public domain: a small stand-in for the books that large language models are trained on."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from .files import DataError, File, Layout, Raw, Source, known

COMMIT = "143e601875d70e195f2cc5ebd8b034609271194d"
ADDRESS = f"https://raw.githubusercontent.com/computationalstylistics/100_english_novels/{COMMIT}"
TRAIN = """
Anon_Clara_1864 Barclay_Ladies_1917 Bennet_Babylon_1902 Blackmore_Erema_1877 Braddon_Audley_1862
Burnett_Garden_1911 Cbronte_Jane_1847 Chesterton_Innocence_1911 Conrad_Almayer_1895
Corelli_Innocent_1914 Dickens_Bleak_1853 Doyle_Hound_1902 Eliot_Adam_1859 Ford_Girl_1907
Forster_Angels_1905 Galsworthy_Man_1906 Gaskell_Lovers_1863 Gissing_Unclassed_1884
Haggard_Mines_1885 Hardy_Jude_1895 James_Ambassadors_1903 Kipling_Captains_1896
Lawrence_Peacock_1911 Lee_Albany_1884 Lytton_Kenelm_1873 Meredith_Feverel_1859 Morris_Roots_1890
Schreiner_Farm_1883 Thackeray_Esmond_1852 Trollope_Angel_1881 Ward_Ashe_1905 Wcollins_Basil_1852
Woolf_Lighthouse_1927 Barclay_Postern_1911 Bennet_Helen_1910
""".split()  # noqa: SIM905
VALID = ["Stevenson_Arrow_1888", "Gaskell_Ruth_1855", "Chesterton_Thursday_1908"]
BREAK = "\f"  # begins a novel
BLANK = "\n\n"  # between paragraphs


def _paragraphs(novels: list[str]) -> list[str]:
    """The paragraphs of all novels; the first one of each novel but the first begins with `BREAK`."""
    whole = [text.strip() for text in novels]
    if not all(whole):
        raise DataError("a novel is empty")
    return BLANK.join([whole[0], *(BREAK + text for text in whole[1:])]).split(BLANK)


def text_of(paragraphs: Iterable[str]) -> str:
    """The text whose paragraphs these are."""
    return BLANK.join(paragraphs)


def _raw(train: list[str], valid: list[str]) -> Raw:
    """One paragraph a case."""
    parts = [_paragraphs(novels) for novels in (train, valid)]
    n = len(parts[0])
    x = np.array([*parts[0], *parts[1]], object)
    return Raw(x, None, (), {"train": slice(0, n), "valid": slice(n, len(x))})


def _text(content: bytes) -> str:
    """A file as text: without a byte-order mark, lines ending in one character."""
    return content.decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")


def read_novels(*contents: bytes) -> Raw:
    """A file for each novel, in the order of `TRAIN` and `VALID`."""
    found = [_text(content) for content in contents]
    return _raw(found[: len(TRAIN)], found[len(TRAIN) :])


def read_joined(train: bytes, valid: bytes) -> Raw:
    """Two files, novels divided by form feeds."""
    return _raw(*(_text(content).split(BREAK) for content in (train, valid)))


def _made_up(seed: int, sentences: int) -> str:
    """Sentences of a few words, with capitals, marks and lines."""
    rng = np.random.default_rng(seed)
    subjects = ["The old man", "A girl", "My sister", "Nobody", "The sea", "He"]
    verbs = ["looked at", "remembered", "had seen", "would not leave", "loved", "feared"]
    objects = ["the house", "her hand", "the long road", "a letter", "it all", "the night"]
    lines = []
    for _ in range(sentences):
        chosen = [part[rng.integers(len(part))] for part in (subjects, verbs, objects)]
        lines.append(" ".join(chosen) + rng.choice([".", "!", "; and so it was.", "?"]))
    return "\n\n".join(lines)


def stand_in() -> Raw:
    return read_novels(*(_made_up(i, 40).encode() for i in range(len(TRAIN) + len(VALID))))


_EXPECT = {"train": ((48_502,), None), "valid": ((5_949,), None)}
_NOTE = "35 novels to train on and three held out, chosen by title; a paragraph a case."

SOURCES = (
    Source(
        "novels",
        "38 English novels, 1847 to 1928, as plain text",
        "https://github.com/computationalstylistics/100_english_novels",
        "not stated; the works are in the public domain",
        (
            Layout(
                tuple(
                    File(f"text/novels/{title}.txt", f"{ADDRESS}/corpus/{title}.txt")
                    for title in (*TRAIN, *VALID)
                ),
                read_novels,
                _EXPECT,
                _NOTE,
                "7bf0ca96b5cd9c7f",
            ),
            Layout(
                tuple(known(f"text/novels/novels_{part}.txt") for part in ("train", "valid")),
                read_joined,
                _EXPECT,
                _NOTE + " The same texts, joined to two files.",
                "7bf0ca96b5cd9c7f",
            ),
        ),
        stand_in,
    ),
)
