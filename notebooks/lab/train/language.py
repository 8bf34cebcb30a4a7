"""Training a decoder on a text: random windows, warm-up and linear decay, the loss in nats a token."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..modes import LabError

# as in the released script
BETAS = (0.9, 0.95)  # of Adam
WARMUP = 0.04  # share of the steps in which the rate rises
DECAY = 0.1  # of weights; biases have none
CLIP = 1.0  # largest norm of the gradient
# ours
LOOKS = 10  # moments, evenly spaced, the end among them, at which the curve is noted
LOOK = 100  # windows that a look at the held-out part takes at most
Curve = list[dict[str, float]]


class Diverged(LabError):
    """The training loss is not a number."""


@dataclass(frozen=True)
class Plan:
    """How a decoder is trained: ``steps`` on ``batch`` windows each; the rate rises to ``lr``, then falls linearly to zero."""

    steps: int
    lr: float
    batch: int

    def rate(self, step: int) -> float:
        """The learning rate of a step, counted from 0."""
        rising = max(round(WARMUP * self.steps), 1)
        return self.lr * min((step + 1) / rising, (self.steps - step) / max(self.steps - rising, 1))


def windows(tokens: Tensor, context: int, count: int, order: torch.Generator) -> Tensor:
    """Windows of context + 1 tokens at random places, (count, context + 1)."""
    if len(tokens) <= context:
        raise LabError(f"{len(tokens)} tokens hold no window of {context} and the one after it")
    begins = torch.randint(len(tokens) - context, (count, 1), generator=order)
    return tokens[begins + torch.arange(context + 1)]


def next_token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy in nats a token."""
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten())


@torch.no_grad()
def held_out_loss(model: nn.Module, tokens: Tensor, context: int, most: int) -> float:
    """Mean loss in nats a token over at most so many of the windows that lie end to end, evenly spaced."""
    model.eval()
    device = next(model.parameters()).device
    count = (len(tokens) - 1) // context
    if not count:
        raise LabError(f"{len(tokens)} tokens hold no window of {context} and the one after it")
    every = max(count // most, 1)
    x = tokens[: count * context].view(-1, context)[::every][:most]
    y = tokens[1 : count * context + 1].view(-1, context)[::every][:most]
    total = 0.0
    for part, target in zip(x.split(32), y.split(32)):
        total += float(next_token_loss(model(part.to(device)), target.to(device))) * target.numel()
    return total / y.numel()


def groups(model: nn.Module) -> list[dict]:
    """The parameters with weight decay, and the biases without."""
    named = list(model.named_parameters())
    return [
        {"params": [p for n, p in named if not n.endswith("bias")], "weight_decay": DECAY},
        {"params": [p for n, p in named if n.endswith("bias")], "weight_decay": 0.0},
    ]


def train(
    model: nn.Module, tokens: Tensor, plan: Plan, *, context: int, seed: int, held: Tensor
) -> Curve:
    """Train a decoder with AdamW; the last weights stay in the model.

    Args:
        seed: of the windows. held: tokens whose loss is noted at each look.

    Returns:
        For each look the step, the mean training loss since the look before, and the loss on ``held``.
    """
    device = next(model.parameters()).device
    adam = torch.optim.AdamW(groups(model), lr=plan.lr, betas=BETAS, fused=True)
    order = torch.Generator().manual_seed(seed)
    looks = {round(plan.steps * (i + 1) / LOOKS) for i in range(LOOKS)}
    curve: Curve = []
    since: list[Tensor] = []
    for step in range(plan.steps):
        model.train()
        for group in adam.param_groups:
            group["lr"] = plan.rate(step)
        seen = windows(tokens, context, plan.batch, order).to(device)
        adam.zero_grad(set_to_none=True)
        loss = next_token_loss(model(seen[:, :-1]), seen[:, 1:])
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        adam.step()
        since.append(loss.detach())
        if step + 1 in looks:
            mean = float(torch.stack(since).mean())
            if mean != mean:
                raise Diverged(
                    f"the training loss is {mean} at step {step + 1}: lower lr={plan.lr}"
                )
            held_loss = held_out_loss(model, held, context, LOOK)
            curve.append({"step": step + 1, "train_loss": mean, "held_loss": held_loss})
            since = []
    return curve
