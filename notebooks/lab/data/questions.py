"""Questions with choices: CommonsenseQA; word problems with worked solutions: GSM8K."""

from __future__ import annotations

import json

import numpy as np

from .files import DataError, File, Layout, Raw, Source, known

LETTERS = ("A", "B", "C", "D", "E")
PARTS = ("train", "valid")


def parts_of(entry: str) -> list[str]:
    """The question and its choices, in order, of one entry of the data set."""
    return entry.split("\t")


def _entry(row: dict) -> str:
    """The question and its choices with tabs between, in the order of their letters; blanks and breaks become one blank."""
    choices = {choice["label"]: choice["text"] for choice in row["question"]["choices"]}
    if tuple(choices) != LETTERS:
        raise DataError(
            f"a question has the choices {', '.join(choices)}, not {', '.join(LETTERS)}"
        )
    texts = [row["question"]["stem"], *choices.values()]
    return "\t".join(" ".join(text.split()) for text in texts)


def read_commonsenseqa(*contents: bytes) -> Raw:
    """One question a line, as JSON; the answer is the number of the right choice."""
    rows = [[json.loads(line) for line in part.decode("utf-8").splitlines()] for part in contents]
    flat = [row for part in rows for row in part]
    x = np.array([_entry(row) for row in flat], object)
    y = np.array([LETTERS.index(row["answerKey"]) for row in flat], np.int64)
    first = len(rows[0])
    return Raw(x, y, LETTERS, {"train": slice(0, first), "valid": slice(first, len(flat))})


def _made_up(n: int, seed: int) -> bytes:
    """Questions whose right choice repeats their last word."""
    rng = np.random.default_rng(seed)
    words = ["river", "market", "school", "forest", "kitchen", "harbour"]
    lines = []
    for number in range(n):
        chosen = rng.permutation(words)[: len(LETTERS)].tolist()
        answer = int(rng.integers(len(LETTERS)))
        choices = [{"label": a, "text": word} for a, word in zip(LETTERS, chosen)]
        question = {"stem": f"Where do people  meet at a {chosen[answer]}?", "choices": choices}
        row = {"id": str(number), "answerKey": LETTERS[answer], "question": question}
        lines.append(json.dumps(row) + "\n")
    return "".join(lines).encode()


def commonsenseqa_sample() -> tuple[bytes, ...]:
    return _made_up(40, 0), _made_up(20, 1)


def read_gsm8k(*contents: bytes) -> Raw:
    """A problem a case, as its line of JSON with "question" and "answer"; the answer ends with "#### " and a number."""
    parts = [[line for line in part.decode("utf-8").splitlines() if line] for part in contents]
    lines = [line for part in parts for line in part]
    for line in lines:
        row = json.loads(line)
        if not row["question"] or "#### " not in row["answer"]:
            raise DataError(f"a problem lacks its question or its final number: {line[:60]}")
    n = len(parts[0])
    splits = {"train": slice(0, n), "test": slice(n, len(lines))}
    return Raw(np.array(lines, object), None, (), splits)


def _made_up_sums(n: int, seed: int) -> bytes:
    """Sums of two numbers in words, with the calculator's marks of the real set."""
    rng = np.random.default_rng(seed)
    lines = []
    for a, b in rng.integers(2, 90, (n, 2)).tolist():
        question = f"Ann has {a} eggs and buys {b} more. How many eggs does she have?"
        answer = f"She has {a}+{b} = <<{a}+{b}={a + b}>>{a + b} eggs.\n#### {a + b}"
        lines.append(json.dumps({"question": question, "answer": answer}) + "\n")
    return "".join(lines).encode()


def gsm8k_sample() -> tuple[bytes, ...]:
    return _made_up_sums(40, 0), _made_up_sums(12, 1)


_GSM8K = "https://raw.githubusercontent.com/openai/grade-school-math/3101c7d5072418e28b9008a6636bde82a006892c"
_ADDRESS = "https://s3.amazonaws.com/commonsensqa"
_EXPECT = {
    "train": ((9741,), (1909, 1973, 1946, 1985, 1928)),
    "valid": ((1221,), (239, 255, 241, 251, 235)),
}
_NOTE = "The random split; the answers of its test part are not public, so scores are those on its validation part."

SOURCES = (
    Source(
        "commonsenseqa",
        "CommonsenseQA: questions of everyday knowledge with five choices",
        "https://www.tau-nlp.sites.tau.ac.il/commonsenseqa",
        "MIT",
        (
            Layout(
                tuple(
                    File(
                        f"reasoning/{part}_rand_split.jsonl", f"{_ADDRESS}/{name}_rand_split.jsonl"
                    )
                    for part, name in zip(PARTS, ("train", "dev"))
                ),
                read_commonsenseqa,
                commonsenseqa_sample,
                _EXPECT,
                _NOTE,
            ),
            Layout(
                tuple(known(f"reasoning/commonsenseqa_{part}.jsonl") for part in PARTS),
                read_commonsenseqa,
                commonsenseqa_sample,
                _EXPECT,
                _NOTE + " A public copy of the two files.",
                "a36c667d5d6a5e35",
            ),
        ),
    ),
    Source(
        "gsm8k",
        "GSM8K: word problems of school mathematics with worked solutions",
        "https://github.com/openai/grade-school-math",
        "MIT",
        (
            Layout(
                tuple(
                    known(
                        f"reasoning/gsm8k_{part}.jsonl",
                        f"{_GSM8K}/grade_school_math/data/{part}.jsonl",
                    )
                    for part in ("train", "test")
                ),
                read_gsm8k,
                gsm8k_sample,
                {"train": ((7473,), None), "test": ((1319,), None)},
                "Both official parts as published, with the calculator's marks in the solutions.",
                "e1c783e708888cdc",
            ),
        ),
    ),
)
