"""Chapter 51: arms, answers by log-likelihood against scores computed by hand, printed tables."""

import itertools
import json
import math

import lab
import pandas as pd
import pytest
import torch
from lab.chapters import opt
from lab.data import choices
from lab.data.bpe import BPE
from lab.data.files import DataError
from lab.decoder import FeedForward, NdFeedForward
from torch import nn

SIZE = opt.Size(layers=2, width=48, heads=2)


# ---------------------------------------------------------------------------------------------------------------- arms
def test_the_blocks_have_the_released_shares():
    released = opt.Size(12, 768, 12)
    assert (released.wide, released.narrow) == (3072, 2800)
    with torch.device("meta"):
        found = {arm: opt.block(released, arm) for arm in opt.NAMES}
    count = {arm: sum(p.numel() for p in block.parameters()) for arm, block in found.items()}
    assert count["dense"] == count["gelu"] == count["switched-off"] == 4_722_432
    assert count["released"] == count["ndlinear"] == count["dense-width"] + 25 == 4_304_393


def test_the_arms_start_as_their_names_say():
    def start(arm):
        torch.manual_seed(0)
        return opt.decoder(SIZE, arm, 300, 16)

    assert not any(layer.block.fc2.weight.any() for layer in start("switched-off").layers)
    assert all(layer.block.fc2.weight.any() for layer in start("dense").layers)
    assert start("gelu").layers[0].block.activation is nn.functional.gelu
    for arm, kind in (
        ("dense", FeedForward),
        ("released", NdFeedForward),
        ("ndlinear", NdFeedForward),
    ):
        assert all(isinstance(layer.block, kind) for layer in start(arm).layers)
    x = torch.randn(64, 48)
    size = {a: start(a).layers[0].block(x).std().item() for a in ("dense", "released", "ndlinear")}
    assert size["released"] < size["dense"] / 1000
    assert 0.5 < size["ndlinear"] / size["dense"] < 2


def test_activations_are_noted_for_each_layer():
    model = opt.decoder(SIZE, "ndlinear", 300, 16)
    noted = opt.activations(model)
    assert [len(part) for layer in noted for part in layer] == [8] * 6
    assert noted[1][2] == pytest.approx(
        model.layers[1].block.activation_parameters()[2].tolist(), rel=1e-4
    )
    assert opt.activations(opt.decoder(SIZE, "dense", 300, 16)) == []


def test_the_best_rate_of_each_arm():
    trials = pd.DataFrame({
        "arm": ["a", "a", "b", "b"], "lr": [1, 2, 1, 2], "tune_loss": [3.0, 2.0, 1.0, 4.0],
    })  # fmt: skip
    assert opt.best_rates(trials) == {"a": 2, "b": 1}


# ------------------------------------------------------------------------------------------- answers by log-likelihood
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


def test_log_probabilities_of_sequences_of_any_lengths_and_in_their_order():
    model = Bigram()
    sequences = [torch.randint(256, (n,)).tolist() for n in (9, 2, 5, 9, 3)]
    for batch in (1, 2, 64):
        found = opt.log_probabilities(model, sequences, batch)
        for sequence, logs in zip(sequences, found):
            assert logs.tolist() == pytest.approx(by_hand(model, sequence), rel=1e-4)


def test_the_three_scores_of_a_candidate():
    logs = torch.tensor([-1.0, -2.0, -4.0, -5.0])
    assert opt.scores(logs, 2) == {"sum": -9.0, "mean": -4.5, "all": -3.0}


def rule_by_hand(model, question, rule, context):
    found = []
    for text in question.candidates:
        answer = list(text.encode())[:context]
        symbols = (list(question.prompt.encode()) + answer)[-context - 1 :]
        logs = by_hand(model, symbols)
        mine = logs[len(logs) - len(answer) :]
        found.append(
            {"sum": sum(mine), "mean": sum(mine) / len(mine), "all": sum(logs) / len(logs)}[rule]
        )
    return max(range(len(found)), key=found.__getitem__)


@pytest.mark.parametrize("context", [8, 60])
def test_the_share_of_right_answers_by_each_rule(context):
    model, letters = Bigram(), "abcdefgh "
    draw = lambda n: "".join(letters[i] for i in torch.randint(9, (n,)).tolist())  # noqa: E731
    asked = [opt.Question(draw(12), (draw(3), draw(11), draw(6)), i % 3) for i in range(30)]
    found = opt.zero_shot(model, BPE([]), asked, context)
    for rule in opt.RULES:
        right = [
            rule_by_hand(model, question, rule, context) == question.right for question in asked
        ]
        assert found[rule] == pytest.approx(sum(right) / 30)
    assert len(set(found.values())) > 1  # the rules differ, so that a mixed-up one would show


def test_the_rules_can_disagree():
    """One token of probability 0.3 against two of 0.5: the sum takes the first, the mean the second."""
    model = Bigram()
    with torch.no_grad():
        model.logits.fill_(-30.0)
        a, b, c, other = b"abcz"
        for before, after, p in ((a, b, 0.3), (a, c, 0.5), (c, c, 0.5)):
            model.logits[before, after] = math.log(p)
        for before in (a, c):
            rest = 1 - sum(math.exp(x) for x in model.logits[before].tolist())
            model.logits[before, other] = math.log(rest)
    asked = [opt.Question("a", ("b", "cc"), 0)]
    assert opt.zero_shot(model, BPE([]), asked, 9) == {"sum": 1.0, "mean": 0.0, "all": 0.0}


def test_questions_are_put_as_the_released_script_puts_them(monkeypatch):
    monkeypatch.setenv("NDL_MODE", "smoke")
    opt.questions.cache_clear()
    copa = opt.questions("copa", 2)
    assert len(copa) == 2 and [q.right for q in copa] == [0, 1]
    assert copa[0].prompt.startswith(
        "Premise: It rained.\nQuestion: What is the effect?\nOptions:\n1. It"
    )
    assert copa[0].prompt.endswith("is ") and copa[0].candidates == ("It was wet.", "It sang.")
    assert opt.questions("cb")[1].candidates[1] == "Contradiction"
    assert [q.right for q in opt.questions("cb", 3)] == [0, 1, 2]
    metrics = opt.all_tasks(Bigram(), BPE([]), 20, 4)
    assert set(metrics) == {f"{t}_{r}" for t in ("copa", "cb", "piqa") for r in opt.RULES}
    opt.questions.cache_clear()


# ----------------------------------------------------------------------------------------------------------- questions
def lines(*rows):
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def test_answers_in_both_spellings():
    assert choices.read_wic(lines({"label": "true"}, {"label": False})).y.tolist() == [1, 0]
    assert choices.read_boolq(lines({"answer": True}, {"answer": False})).y.tolist() == [1, 0]
    assert choices.read_boolq(lines({"label": "false"}, {"label": "true"})).y.tolist() == [0, 1]
    assert choices.read_piqa(lines({}, {}), b"1\n0\n").y.tolist() == [1, 0]


def test_answers_that_do_not_fit_are_refused():
    with pytest.raises(DataError, match="2 questions"):
        choices.read_piqa(lines({}, {}), b"1\n")
    with pytest.raises(DataError, match="answers"):
        choices.read_copa(lines({"label": 2}))


def test_the_lines_stay_as_they_are_published():
    data = lab.data.load("copa", stand_in=True)
    assert json.loads(data.x[0])["choice1"] == "It was wet." and data.names == ("first", "second")
