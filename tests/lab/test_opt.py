"""Chapter 51: answers by log-likelihood against scores computed by hand, questions as they are published, counts."""

import itertools
import json

import pytest
import torch
from lab.chapters import opt
from lab.data import bpe, questions
from lab.data.files import DataError
from torch import nn


class Bigram(nn.Module):
    """Logits of the next token that depend on the last token alone: scores can be computed by hand."""

    def __init__(self, vocabulary=256):
        super().__init__()
        self.logits = nn.Parameter(torch.randn(vocabulary, vocabulary))

    def forward(self, tokens):
        return self.logits[tokens]


def by_hand(model, symbols):
    logs = model.logits.log_softmax(-1)
    return [logs[a, b].item() for a, b in itertools.pairwise(symbols)]


def rule_by_hand(model, question, rule, context):
    found = []
    for text in question.candidates:
        answer = list(text.encode())[:context]
        symbols = (list(question.prompt.encode()) + answer)[-context - 1 :]
        logs = by_hand(model, symbols)
        mine = logs[len(logs) - len(answer) :]
        scores = {"sum": sum(mine), "mean": sum(mine) / len(mine), "all": sum(logs) / len(logs)}
        found.append(scores[rule])
    return found.index(max(found))


@pytest.mark.parametrize("context", [8, 60])
def test_the_share_of_right_answers_by_each_rule(context):
    model, letters = Bigram(), "abcdefgh "
    draw = lambda n: "".join(letters[i] for i in torch.randint(9, (n,)).tolist())  # noqa: E731
    asked = [opt.Question(draw(12), (draw(3), draw(11), draw(6)), i % 3) for i in range(30)]
    found = opt.zero_shot(model, bpe.learn("", 256), asked, context)
    for rule in opt.RULES:
        right = [rule_by_hand(model, each, rule, context) == each.right for each in asked]
        assert found[rule] == pytest.approx(sum(right) / 30)
    assert len(set(found.values())) > 1  # the rules differ, so that a mixed-up one would show


def lines(*rows):
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def test_the_right_answer_is_a_name_or_a_number():
    for field, given in (("label", ("no", "yes")), ("answer", (False, True)), ("label", (0, 1))):
        content = lines(*({field: answer} for answer in given))
        assert questions.choices(content, field, ["no", "yes"]).y.tolist() == [0, 1]
    two = lines({"label": 2}), ["first", "second"]
    assert questions.choices_apart(lines({}, {}), b"1\n0\n", two[1]).y.tolist() == [1, 0]
    with pytest.raises(DataError, match="2 questions"):
        questions.choices_apart(lines({}, {}), b"1\n", two[1])
    with pytest.raises(DataError, match="answers"):
        questions.choices(two[0], "label", two[1])


def test_multiply_adds_by_hand():
    assert opt.block_macs(768, 3072) == 2 * 768 * 3072
    first = 768 * 2800 + 2800 * 1 * 8
    assert opt.block_macs(768, 2800, 8) == first + 8 * 2800 * 768 + 8 * 768
    assert opt.block_macs(768, 2800, 8, cheapest=True) == first + 2800 * 8 + 2800 * 768


def test_opt_of_transformers_has_the_released_counts_and_block():
    pytest.importorskip("transformers")
    with torch.device("meta"):
        found = [opt.of_transformers("OPT-Small", arm) for arm in ("dense", "released")]
    assert [sum(p.numel() for p in m.parameters()) for m in found] == [124_059_648, 119_043_180]
