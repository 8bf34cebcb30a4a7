"""Evidence 51: answers by log-likelihood against scores computed by hand, the counts of the library's model."""

import itertools

import pytest
import torch
from lab.chapters import opt
from torch import nn


class Bigram(nn.Module):
    """Logits of the next token that depend on the last token alone: scores can be computed by hand."""

    def __init__(self, vocabulary=256):
        super().__init__()
        self.logits = nn.Parameter(torch.randn(vocabulary, vocabulary))

    def forward(self, tokens):
        return self.logits[tokens]


def rule_by_hand(model, question, rule, context):
    found, by_last = [], model.logits.log_softmax(-1)
    for text in question.candidates:
        answer = list(text.encode())[:context]
        symbols = (list(question.prompt.encode()) + answer)[-context - 1 :]
        logs = [by_last[a, b].item() for a, b in itertools.pairwise(symbols)]
        mine = logs[len(logs) - len(answer) :]
        scores = {"sum": sum(mine), "mean": sum(mine) / len(mine), "all": sum(logs) / len(logs)}
        found.append(scores[rule])
    return found.index(max(found))


@pytest.mark.parametrize("context", [8, 60])
def test_the_share_of_right_answers_by_each_rule(context):
    model, letters = Bigram(), "abcdefgh "
    draw = lambda n: "".join(letters[i] for i in torch.randint(9, (n,)).tolist())  # noqa: E731
    asked = [opt.Question(draw(12), (draw(3), draw(11), draw(6)), i % 3) for i in range(30)]
    found = opt.zero_shot(model, lambda text: list(text.encode()), asked, context)
    for rule in opt.RULES:
        right = [rule_by_hand(model, each, rule, context) == each.right for each in asked]
        assert found[rule] == pytest.approx(sum(right) / 30)
    assert len(set(found.values())) > 1  # the rules differ, so that a mixed-up one would show


def test_opt_of_transformers_has_the_released_counts_and_block():
    pytest.importorskip("transformers")
    with torch.device("meta"):
        found = [opt.of_transformers("OPT-Small", arm) for arm in ("dense", "released")]
    assert [sum(p.numel() for p in m.parameters()) for m in found] == [124_059_648, 119_043_180]
