"""Multiple-choice questions on which language models are tested without training: one question a case, as a line of JSON.

``x`` holds the lines as they are published, ``y`` the place of the right answer among the answers.
"""

from __future__ import annotations

import json
from collections.abc import Callable

import numpy as np

from .files import DataError, Layout, Raw, Source, known

CB = ("entailment", "contradiction", "neutral")  # in the order of the released script
NO_YES = ("no", "yes")
FIRST_SECOND = ("first", "second")


def _lines(content: bytes) -> list[str]:
    return [line for line in content.decode().splitlines() if line.strip()]


def _raw(lines: list[str], right: list[int], names: tuple[str, ...]) -> Raw:
    y = np.array(right, np.int64)
    if len(y) != len(lines) or not set(right) <= set(range(len(names))):
        raise DataError(f"{len(lines)} questions with answers {sorted(set(right))}")
    return Raw(np.array(lines, object), y, names, {"validation": slice(0, len(lines))})


def _read(content: bytes, right: Callable[[dict], int], names: tuple[str, ...]) -> Raw:
    lines = _lines(content)
    return _raw(lines, [right(json.loads(line)) for line in lines], names)


def read_copa(content: bytes) -> Raw:
    return _read(content, lambda question: question["label"], FIRST_SECOND)


def read_cb(content: bytes) -> Raw:
    return _read(content, lambda question: CB.index(question["label"]), CB)


def read_wic(content: bytes) -> Raw:
    return _read(content, lambda question: int(str(question["label"]).lower() == "true"), NO_YES)


def read_boolq(content: bytes) -> Raw:
    names = {"false": 0, "true": 1}
    answer = "answer" if b'"answer"' in content else "label"
    return _read(content, lambda question: names[str(question[answer]).lower()], NO_YES)


def read_piqa(content: bytes, right: bytes) -> Raw:
    return _raw(_lines(content), [int(line) for line in _lines(right)], FIRST_SECOND)


def _sample(**fields) -> Callable[[], tuple[bytes, ...]]:
    """Twelve made-up questions; a field with several values takes them in turn."""

    def make() -> tuple[bytes, ...]:
        rows = [
            {name: value[i % len(value)] for name, value in fields.items()} | {"idx": i}
            for i in range(12)
        ]
        return ("".join(json.dumps(row) + "\n" for row in rows).encode(),)

    return make


def piqa_sample() -> tuple[bytes, ...]:
    questions = _sample(goal=["Open a tin"], sol1=["use a key", "ask it"], sol2=["sing", "pull it"])
    return (*questions(), b"0\n1\n" * 6)


_SHORT = {"premise": ["It rained.", "She slept."]}
_SETS = {
    "copa": ("COPA: cause or effect of a sentence, one of two", read_copa, (100,), (55, 45),
             _sample(**_SHORT, question=["effect"], choice1=["It was wet."], choice2=["It sang."], label=[0, 1])),
    "cb": ("CommitmentBank: does one text entail a sentence, contradict it, or neither", read_cb, (56,), (23, 28, 5),
           _sample(**_SHORT, hypothesis=["it was wet"], label=list(CB))),
    "wic": ("WiC: has a word the same meaning in two sentences", read_wic, (638,), (319, 319),
            _sample(word=["class"], sentence1=["A class."], sentence2=["Real class."], label=["false", "true"])),
    "boolq": ("BoolQ: yes-or-no questions about a paragraph", read_boolq, (3270,), (1237, 2033),
              _sample(question=["is it wet"], passage=["Rain is wet."], answer=[True, False, True])),
}  # fmt: skip
_FILES = {
    "copa": ("zeroshot/copa_val.jsonl", "eb410e47833c79e5"),
    "cb": ("zeroshot/cb_val.jsonl", "b51cd976b9dc3621"),
    "wic": ("zeroshot/wic_val.jsonl", "ce915cfca00004e1"),
    "boolq": ("reasoning/boolq_val.jsonl", "42aa54017da64370"),
}
SUPERGLUE = "https://dl.fbaipublicfiles.com/glue/superglue/data/v2"
ZIPS = {"copa": "COPA", "cb": "CB", "wic": "WiC", "boolq": "BoolQ"}
_PIQA = "https://storage.googleapis.com/ai2-mosaic/public/physicaliqa/physicaliqa-train-dev.zip"
_NOTE = "A public copy of the validation part."


def _superglue(name: str) -> Source:
    about, read, shape, counts, sample = _SETS[name]
    path, content = _FILES[name]
    archive = f"{SUPERGLUE}/{ZIPS[name]}.zip"
    file = known(path, by_hand=f"unpack val.jsonl of {archive}")
    layout = Layout((file,), read, sample, {"validation": (shape, counts)}, _NOTE, content)
    return Source(name, about, f"{archive} (SuperGLUE)", "not stated", (layout,))


SOURCES = (
    *(_superglue(name) for name in _SETS),
    Source(
        "piqa",
        "PIQA: which of two ways leads to a goal",
        _PIQA,
        "MIT, of the repository that holds the copy",
        (
            Layout(
                (
                    known("zeroshot/piqa_dev.jsonl", by_hand=f"unpack dev.jsonl of {_PIQA}"),
                    known(
                        "zeroshot/piqa_dev_labels.txt", by_hand=f"unpack dev-labels.lst of {_PIQA}"
                    ),
                ),
                read_piqa,
                piqa_sample,
                {"validation": ((1838,), (910, 928))},
                _NOTE,
                "5eb449083e52680c",
            ),
        ),
    ),
)
