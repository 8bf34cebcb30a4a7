"""Training on answers: what a problem becomes, and the loss written out."""

import json

import pytest
import torch
from lab.decoder import Decoder, FeedForward
from lab.train import answers


def test_a_problem_is_its_question_and_its_solution_without_the_calculators_marks():
    """A question that is too long loses its beginning, and a solution that alone is too long its end."""
    answer = "2+3 = <<2+3=5>>5.\nSo $<<5*1=5>>5.\n#### 5"
    asked = json.dumps({"question": "How many?", "answer": answer})
    whole = b"How many?\n2+3 = 5.\nSo $5.\n#### 5\n\n"
    for context, first, last in ((100, 0, 34), (30, 3, 34), (20, 9, 30)):
        row, length = answers.encoded(asked, str.encode, context)
        assert bytes(row.tolist()) == whole[first:last] and length == min(24, context)


def test_the_loss_is_the_mean_over_the_solutions_tokens():
    problems = [(torch.randint(9, (6 + i % 7,)), 2 + i % 3) for i in range(20)]
    net = Decoder(9, 12, 16, 1, 2, lambda: FeedForward(16, 32)).requires_grad_(False)
    total = 0.0
    for row, answer in problems:  # alone, without padding
        logs = net(row[None, :-1])[0].log_softmax(-1)
        places = range(len(row) - 1 - answer, len(row) - 1)
        total -= sum(float(logs[i, row[i + 1]]) for i in places)
    wanted = total / sum(answer for _, answer in problems)
    for batch in (2, 32):
        assert answers.answer_loss(net, problems, batch) == pytest.approx(wanted, rel=1e-5)
