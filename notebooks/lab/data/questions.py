"""Questions as lines of JSON: tests of language models by choices, CommonsenseQA, and questions with solutions (GSM8K, ARC).

Of a test by choices ``x`` holds the lines as they are published, ``y`` the place of the right answer among the answers.
"""

from __future__ import annotations

import json
import re

import numpy as np

from .files import Raw

LETTERS = ("A", "B", "C", "D", "E")


def _lines(content: bytes) -> list[str]:
    return [line for line in content.decode("utf-8").splitlines() if line.strip()]


def _written(rows: list[dict]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


# ------------------------------------------------------------------------------------------------- tests by choices
def choices(
    questions: bytes, right: bytes | None = None, *, names: list[str], field: str = ""
) -> Raw:
    """Questions, and which answer is right: by its name, or its number among them. A field of the question says it, or a line of a
    file of its own."""
    lines = _lines(questions)
    told = [json.loads(line)[field] for line in lines] if right is None else _lines(right)
    numbers = [names.index(answer) if answer in names else int(answer) for answer in told]
    return Raw.of_parts({"validation": (lines, numbers)}, names)


def made_up(fields: dict[str, list], names: list[str], field: str = "") -> Raw:
    """Twelve questions; a field with several values takes them in turn. Without a ``field`` that says it the right answers alternate."""
    rows = [{k: v[i % len(v)] for k, v in fields.items()} | {"idx": i} for i in range(12)]
    return choices(_written(rows), None if field else b"0\n1\n" * 6, names=names, field=field)


# -------------------------------------------------------------------------------------------------- CommonsenseQA
def parts_of(entry: str) -> list[str]:
    """The question and its choices, in order, of one entry of CommonsenseQA."""
    return entry.split("\t")


def _entry(row: dict) -> str:
    """The question and its choices with tabs between, in the order of their letters; blanks and breaks become one blank."""
    texts = [row["question"]["stem"], *(each["text"] for each in row["question"]["choices"])]
    return "\t".join(" ".join(text.split()) for text in texts)


def read_commonsenseqa(train: bytes, valid: bytes) -> Raw:
    """The answer is the number of the right choice."""
    parts = {}
    for part, content in (("train", train), ("valid", valid)):
        rows = [json.loads(line) for line in _lines(content)]
        right = [LETTERS.index(row["answerKey"]) for row in rows]
        parts[part] = [_entry(row) for row in rows], right
    return Raw.of_parts(parts, LETTERS)


def _places(n: int, seed: int) -> bytes:
    """Questions whose right choice repeats their last word."""
    rng = np.random.default_rng(seed)
    words = ["river", "market", "school", "forest", "kitchen", "harbour"]
    rows = []
    for number in range(n):
        chosen = rng.permutation(words)[: len(LETTERS)].tolist()
        answer = int(rng.integers(len(LETTERS)))
        choices = [{"label": a, "text": word} for a, word in zip(LETTERS, chosen)]
        question = {"stem": f"Where do people  meet at a {chosen[answer]}?", "choices": choices}
        rows.append({"id": str(number), "answerKey": LETTERS[answer], "question": question})
    return _written(rows)


def commonsenseqa_stand_in() -> Raw:
    return read_commonsenseqa(_places(40, 0), _places(20, 1))


# ---------------------------------------------------------------------------------------------------------- GSM8K
def read_gsm8k(train: bytes, test: bytes) -> Raw:
    """A problem a case, as its line of JSON with "question" and "answer"; the answer ends with "#### " and a number."""
    return Raw.of_parts({"train": (_lines(train), None), "test": (_lines(test), None)})


def _sums(n: int, seed: int) -> bytes:
    """Sums of two numbers in words, with the calculator's marks of the real set."""
    rows = []
    for a, b in np.random.default_rng(seed).integers(2, 90, (n, 2)).tolist():
        question = f"Ann has {a} eggs and buys {b} more. How many eggs does she have?"
        answer = f"She has {a}+{b} = <<{a}+{b}={a + b}>>{a + b} eggs.\n#### {a + b}"
        rows.append({"question": question, "answer": answer})
    return _written(rows)


def gsm8k_stand_in() -> Raw:
    return read_gsm8k(_sums(40, 0), _sums(12, 1))


# ------------------------------------------------------------------------------------------------------------ ARC
ASKED = re.compile(
    r"Please choose the correct answer to the question: (.*?)\n\n(Answer1: .*)\n\n.*", re.S
)


def read_arc(train: bytes, test: bytes) -> Raw:
    """A question a case, in the form of GSM8K: "answer" is the text of the right choice, and the others are left out."""
    parts = {
        "train": [_instructed(row) for row in json.loads(train)],
        "test": [_right(json.loads(line)) for line in _lines(test)],
    }
    written = {part: list(map(json.dumps, rows)) for part, rows in parts.items()}
    return Raw.of_parts({part: (lines, None) for part, lines in written.items()})


def _instructed(row: dict) -> dict[str, str]:
    """A question whose choices stand in the text of an instruction."""
    question, listed = ASKED.fullmatch(row["instruction"]).groups()
    choices = re.split(r" ?Answer\d: ", listed)
    return {"question": question, "answer": choices[int(row["answer"].removeprefix("answer"))]}


def _right(row: dict) -> dict[str, str]:
    choices = {choice["label"]: choice["text"] for choice in row["question"]["choices"]}
    return {"question": row["question"]["stem"], "answer": choices[row["answerKey"]]}


def arc_stand_in() -> Raw:
    """Which of two numbers is even?"""
    question = "Which of the two is even?"
    rows = [json.dumps({"question": question, "answer": f"{n + n % 2}"}) for n in range(62)]
    return Raw.of_parts({"train": (rows[:40], None), "test": (rows[50:], None)})
