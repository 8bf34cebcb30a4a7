"""Training on a text and on answers: losses against their definitions, what a problem becomes, what is refused."""

import json

import pytest
import torch
from lab.decoder import Decoder, FeedForward
from lab.train import answers, language
from lab.train.language import Plan
from torch import nn


def model(vocabulary=7, context=8):
    torch.manual_seed(0)
    return Decoder(vocabulary, context, 16, 1, 2, lambda: FeedForward(16, 32))


@pytest.mark.parametrize("most", [100, 3])
def test_the_held_out_loss_is_the_mean_over_its_tokens(most):
    net, text = model(), torch.randint(7, (60,))
    starts = range(0, 56, 8) if most == 100 else range(0, 6 * 8, 16)  # 7 windows; every second
    logs = [net(text[None, s : s + 8]).log_softmax(-1)[0] for s in starts]
    picked = [log[i, text[s + i + 1]] for s, log in zip(starts, logs) for i in range(8)]
    expected = -torch.stack(picked).mean().item()
    assert language.held_out_loss(net, text, 8, most) == pytest.approx(expected, rel=1e-5)


def test_a_loss_that_is_no_number_is_refused():
    net = model()
    nn.init.constant_(net.tokens.weight, torch.nan)
    text = torch.randint(7, (50,))
    with pytest.raises(language.Diverged, match="at step 1"):
        language.train(net, text, Plan(1, 1e-3, 2), context=8, seed=0, held=text)


# -------------------------------------------------------------------------------------------------------------- answers
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
    net = model(9, 12).requires_grad_(False)
    total = 0.0
    for row, answer in problems:  # alone, without padding
        logs = net(row[None, :-1])[0].log_softmax(-1)
        places = range(len(row) - 1 - answer, len(row) - 1)
        total -= sum(float(logs[i, row[i + 1]]) for i in places)
    wanted = total / sum(answer for _, answer in problems)
    for batch in (2, 32):
        assert answers.answer_loss(net, problems, batch) == pytest.approx(wanted, rel=1e-5)
