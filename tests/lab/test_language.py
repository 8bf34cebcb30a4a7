"""Training on a text: windows, rates, losses and one step against their definitions."""

import pytest
import torch
from lab.decoder import Decoder, FeedForward
from lab.modes import LabError
from lab.train import language
from lab.train.language import Plan
from torch import nn


def model(vocabulary=7, context=8):
    torch.manual_seed(0)
    return Decoder(vocabulary, context, 16, 1, 2, lambda: FeedForward(16, 32))


def test_windows_are_runs_of_the_text_and_reach_its_last_token():
    text = torch.arange(20)
    seen = language.windows(text, 4, 3000, torch.Generator().manual_seed(0))
    assert seen.shape == (3000, 5)
    assert torch.equal(seen - seen[:, :1], torch.arange(5).expand(3000, 5))
    assert set(seen[:, 0].tolist()) == set(range(16))


def test_the_rate_rises_and_falls_linearly():
    plan = Plan(steps=100, lr=2.0, batch=1)
    rates = [plan.rate(step) for step in range(100)]
    assert rates[:4] == pytest.approx([0.5 * (i + 1) for i in range(4)])
    assert rates[4:] == pytest.approx([2.0 * (100 - i) / 96 for i in range(4, 100)])
    assert max(rates) == 2.0


@pytest.mark.parametrize("most", [100, 3])
def test_the_held_out_loss_is_the_mean_over_its_tokens(most):
    net, text = model(), torch.randint(7, (60,))
    starts = range(0, 56, 8) if most == 100 else range(0, 6 * 8, 16)  # 7 windows; every second
    logs = [net(text[None, s : s + 8]).log_softmax(-1)[0] for s in starts]
    picked = [log[i, text[s + i + 1]] for s, log in zip(starts, logs) for i in range(8)]
    expected = -torch.stack(picked).mean().item()
    assert language.held_out_loss(net, text, 8, most) == pytest.approx(expected, rel=1e-5)


def test_one_step_is_adamw_on_clipped_gradients(monkeypatch):
    monkeypatch.setattr(language, "CLIP", 0.05)
    text, plan = torch.randint(7, (50,)), Plan(steps=1, lr=1e-2, batch=4)
    net, twin = model(), model()
    language.train(net, text, plan, context=8, seed=1, held=text)
    seen = language.windows(text, 8, 4, torch.Generator().manual_seed(1))
    logits = twin(seen[:, :-1])
    nn.functional.cross_entropy(logits.reshape(-1, 7), seen[:, 1:].reshape(-1)).backward()
    norm = torch.cat([p.grad.flatten() for p in twin.parameters()]).norm()
    with torch.no_grad():
        for name, p in twin.named_parameters():
            g = p.grad * min(1, 0.05 / norm)
            decay = 0.0 if name.endswith("bias") else 0.1
            p.mul_(1 - 1e-2 * decay).sub_(1e-2 * g / (g.abs() + 1e-8))  # Adam's first step
    for a, b in zip(net.parameters(), twin.parameters()):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-3)


def test_a_loss_that_is_no_number_and_a_short_text_are_refused():
    short, net = torch.arange(4), model()
    with pytest.raises(LabError, match="no window of 4"):
        language.windows(short, 4, 1, torch.Generator())
    with pytest.raises(LabError, match="no window of 4"):
        language.held_out_loss(net, short, 4, 1)
    nn.init.constant_(net.tokens.weight, torch.nan)
    text = torch.randint(7, (50,))
    with pytest.raises(language.Diverged, match="at step 1"):
        language.train(net, text, Plan(1, 1e-3, 2), context=8, seed=0, held=text)
