"""Training on a text: windows, rates and losses against their definitions; and a text that can be learned is learned."""

import math

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
    plan = Plan(steps=100, lr=2.0, batch=1, warmup=0.1)
    rates = [plan.rate(step) for step in range(100)]
    assert rates[:10] == pytest.approx([0.2 * (i + 1) for i in range(10)])
    assert rates[10:] == pytest.approx([2.0 * (100 - i) / 90 for i in range(10, 100)])
    assert max(rates) == 2.0


@pytest.mark.parametrize("most", [None, 3])
def test_the_held_out_loss_is_the_mean_over_its_tokens(most):
    net, text = model(), torch.randint(7, (60,))
    starts = range(0, 56, 8) if most is None else range(0, 6 * 8, 16)  # 7 windows; every second
    logs = [net(text[None, s : s + 8]).log_softmax(-1)[0] for s in starts]
    picked = [log[i, text[s + i + 1]] for s, log in zip(starts, logs) for i in range(8)]
    expected = -torch.stack(picked).mean().item()
    assert language.held_out_loss(net, text, 8, most, batch=2) == pytest.approx(expected, rel=1e-5)


def test_a_periodic_text_is_learned_and_the_curve_says_so():
    text = torch.arange(7).repeat(60)
    net = model()
    plan = Plan(steps=120, lr=1e-2, batch=8, looks=4)
    curve = language.train(net, text, plan, context=8, seed=0, held=text[:100])
    assert [point["step"] for point in curve] == [30, 60, 90, 120]
    assert curve[0]["train_loss"] > 4 * curve[-1]["train_loss"]
    assert curve[-1]["held_loss"] < 0.1 < math.log(7) < curve[0]["train_loss"] * 2
    assert curve[-1]["held_loss"] == language.held_out_loss(net, text[:100], 8)


def test_one_step_is_adamw_on_clipped_gradients():
    text, plan = torch.randint(7, (50,)), Plan(steps=1, lr=1e-2, batch=4, clip=0.05)
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
        language.held_out_loss(net, short, 4)
    nn.init.constant_(net.tokens.weight, torch.nan)
    text = torch.randint(7, (50,))
    with pytest.raises(language.Diverged, match="at step 1"):
        language.train(net, text, Plan(1, 1e-3, 2), context=8, seed=0, held=text)


def test_a_step_in_parts_is_the_step_and_the_loss_is_the_mean_since_the_look_before():
    text, each = torch.randint(7, (100,)), []
    for parts, looks in ((1, 3), (3, 1)):
        net = model()
        plan = Plan(steps=3, lr=1e-3, batch=7, looks=looks, parts=parts)
        curve = language.train(net, text, plan, context=8, seed=3, held=text)
        mean = sum(point["train_loss"] for point in curve) / looks
        each.append((mean, torch.cat([p.flatten() for p in net.parameters()])))
    assert each[0][0] == pytest.approx(each[1][0], rel=1e-5)
    torch.testing.assert_close(each[0][1], each[1][1], atol=2e-4, rtol=1e-3)
