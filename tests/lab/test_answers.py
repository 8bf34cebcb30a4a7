"""Training on answers: what a problem becomes, and the loss written out."""

import json

import pytest
import torch
from lab import LabError
from lab.decoder import Decoder, FeedForward
from lab.train import answers


def model():
    torch.manual_seed(0)
    return Decoder(9, 12, 16, 1, 2, lambda: FeedForward(16, 32))


@pytest.fixture
def problems():
    """Of 6 to 12 tokens, the last 2 to 4 of them the answer."""
    draw = torch.Generator().manual_seed(0)
    return [(torch.randint(9, (6 + i % 7,), generator=draw), 2 + i % 3) for i in range(20)]


def test_a_problem_is_its_question_and_its_solution_without_the_calculators_marks():
    answer = "2+3 = <<2+3=5>>5.\nSo $<<5*1=5>>5.\n#### 5"
    asked = json.dumps({"question": "How many?", "answer": answer})
    assert answers.worked(asked) == ("How many?\n", "2+3 = 5.\nSo $5.\n#### 5\n\n")
    row, length = answers.encoded(asked, str.encode, 100)
    assert bytes(row.tolist()) == b"How many?\n2+3 = 5.\nSo $5.\n#### 5\n\n" and length == 24


@pytest.mark.parametrize(
    ("context", "kept"), [(10, b"o?\nabcdefgh"), (8, b"\nabcdefgh"), (5, b"\nabcde")]
)
def test_too_long_questions_lose_their_beginning_and_solutions_their_end(
    monkeypatch, context, kept
):
    monkeypatch.setattr(answers, "worked", lambda _: ("Who, so?\n", "abcdefgh"))
    row, answer = answers.encoded("", str.encode, context)
    assert bytes(row.tolist()) == kept and answer == min(8, context)


def test_the_loss_is_the_mean_over_the_solutions_tokens(problems):
    net, total = model().requires_grad_(False), 0.0
    for row, answer in problems:  # alone, without padding
        logs = net(row[None, :-1])[0].log_softmax(-1)
        places = range(len(row) - 1 - answer, len(row) - 1)
        total -= sum(float(logs[i, row[i + 1]]) for i in places)
    wanted = total / sum(answer for _, answer in problems)
    for batch in (2, 32):
        assert answers.answer_loss(net, problems, batch) == pytest.approx(wanted, rel=1e-5)


def test_a_training_that_diverges_raises(problems):
    with pytest.raises(LabError, match="lower lr"):
        answers.fine_tune(model(), problems, steps=9, lr=1e20, batch=2, seed=0)
