"""How much a reader has to read, and how long the sentences are.

The bounds are what the book has reached; lower them when it gets shorter, never raise them.
"""

import json
import re

import pytest
from lab import modes

WORDS = 23_500  # of the running text of the main line
CHAPTER = 1_800  # of one chapter: about a quarter of an hour with its code
REPORT = 600  # of a report on one of the paper's experiments
LONG_SENTENCES = 0.006  # share above 35 words
PARAGRAPH = 120  # words of a paragraph or an entry of a list


def prose(notebook: dict) -> str:
    """The running text: no headings, tables, quotations, code, equations, folded parts or references."""
    text = "\n\n".join(
        "".join(c["source"]) for c in notebook["cells"] if c["cell_type"] == "markdown"
    )
    text = text.partition("\n## References")[0]
    text = re.sub(r"(?s)<details.*?</details>|```.*?```|\$\$.*?\$\$|<!--.*?-->", " ", text)
    text = re.sub(r"(?m)^\s*(#.*|\|.*|>.*)$", "", text)
    return re.sub(r"\]\([^)]*\)", "]", text)


def sentences(text: str) -> list[list[str]]:
    """The words of each sentence; a list's entry ends one too."""
    entries = re.sub(r"(?m)^\s*([-*]|\d+\.)\s", "\n\n", text)
    parts = re.split(r"(?<=[.!?])\s+(?=[A-Z*\[$`])|\n\s*\n", entries)
    return [words for part in parts if len(words := part.split()) > 1]


def paragraphs(text: str) -> list[int]:
    """The words of each paragraph and of each entry of a list."""
    return [len(part.split()) for part in re.split(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.)\s)", text)]


def measured() -> list[int]:
    """The words of every sentence of the main line."""
    main = [path for path in modes.chapters() if path.parent == modes.NOTEBOOKS]
    texts = [prose(json.loads(path.read_text(encoding="utf8"))) for path in main]
    return [len(words) for text in texts for words in sentences(text)]


def test_a_sentence_ends_at_its_point_and_at_a_list_entry():
    found = sentences("It is so. Then not.\n\n- One two three\n- Four five")
    assert [len(words) for words in found] == [3, 2, 3, 2]


def test_the_main_line_gets_no_longer():
    lengths = measured()
    assert sum(lengths) <= WORDS, f"{sum(lengths):,} words; move rules to the evidence"
    long = sum(length > 35 for length in lengths) / len(lengths)
    assert long <= LONG_SENTENCES, f"{long:.1%} of the sentences have more than 35 words"


MAIN = [path for path in modes.chapters() if path.parent == modes.NOTEBOOKS and path.stem[0] != "0"]


@pytest.mark.parametrize("path", MAIN, ids=lambda path: path.stem)
def test_a_chapter_is_short(path):
    notebook = json.loads(path.read_text(encoding="utf8"))
    text = prose(notebook)
    bound = REPORT if path.stem in modes.REPORTS else CHAPTER
    assert sum(map(len, sentences(text))) <= bound
    assert max(paragraphs(text)) <= PARAGRAPH
