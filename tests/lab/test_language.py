"""Training on a text: the held-out loss against its definition, and what is refused."""

import pytest
import torch
from lab.decoder import Decoder, FeedForward
from lab.train import language
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
