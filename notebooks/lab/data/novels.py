"""English novels in the public domain: a small stand-in for the books that large language models are trained on."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from .files import Raw

BREAK = "\f"  # begins a novel
BLANK = "\n\n"  # between paragraphs


def _paragraphs(novels: list[str]) -> list[str]:
    """The paragraphs of all novels; the first one of each novel but the first begins with `BREAK`."""
    whole = [text.strip() for text in novels]
    return BLANK.join([whole[0], *(BREAK + text for text in whole[1:])]).split(BLANK)


def text_of(paragraphs: Iterable[str]) -> str:
    """The text whose paragraphs these are."""
    return BLANK.join(paragraphs)


def _text(content: bytes) -> str:
    """A file as text: without a byte-order mark, lines ending in one character."""
    return content.decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")


def read_novels(*contents: bytes, train: int) -> Raw:
    """Files of one novel each, or of several divided by form feeds; the first ``train`` novels are the training part. A paragraph a
    case."""
    found = [novel for content in contents for novel in _text(content).split(BREAK)]
    parts = {"train": _paragraphs(found[:train]), "valid": _paragraphs(found[train:])}
    return Raw.of_parts({part: (paragraphs, None) for part, paragraphs in parts.items()})


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


def stand_in(train: int, valid: int) -> Raw:
    made = [_made_up(i, 40).encode() for i in range(train + valid)]
    return read_novels(*made, train=train)
