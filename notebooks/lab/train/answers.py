"""Training a language model on answers.

A sequence is a question, a line break and its solution; only the solution's tokens are trained on and scored. The marks
that GSM8K puts in for a calculator, <<...>>, are taken out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..modes import LabError
from . import loop

IGNORED = -100  # target of a token that is not trained on
MARKS = r"<<[^>]*>>"
Problem = tuple[Tensor, int]  # tokens, and how many of the last ones are the solution


def worked(line: str) -> tuple[str, str]:
    """Question and solution of a line of the data set, as they follow one another in a text."""
    row = json.loads(line)
    return row["question"] + "\n", re.sub(MARKS, "", row["answer"]) + "\n\n"


def encoded(line: str, encode: Callable[[str], Sequence[int]], context: int) -> Problem:
    """A problem as at most ``context`` + 1 tokens: too long solutions lose their end, questions their beginning."""
    question, answer = map(encode, worked(line))
    answer = answer[:context]
    return torch.tensor([*question, *answer][-context - 1 :]), len(answer)


def padded(chosen: Sequence[Problem]) -> tuple[Tensor, Tensor]:
    """Tokens and targets (n, T) of problems; the targets of questions and padding are `IGNORED`."""
    rows = nn.utils.rnn.pad_sequence([row for row, _ in chosen], batch_first=True)
    targets = torch.full_like(rows, IGNORED)
    for target, (row, answer) in zip(targets, chosen):
        target[len(row) - answer : len(row)] = row[len(row) - answer :]
    return rows[:, :-1], targets[:, 1:]


# ------------------------------------------------------------------------------------------------- training, the loss
def summed_loss(model: nn.Module, chosen: Sequence[Problem]) -> tuple[Tensor, int]:
    """Cross entropy summed over the solutions' tokens, and their number."""
    device = next(model.parameters()).device
    x, targets = (part.to(device) for part in padded(chosen))
    asked = targets != IGNORED
    logits = F.linear(model.hidden(x)[asked], model.tokens.weight)
    return F.cross_entropy(logits, targets[asked], reduction="sum"), int(asked.sum())


def drawn(data: Sequence[Problem], batch: int, seed: int) -> Iterator[list[Problem]]:
    """Batches without end; each pass takes the problems in a new order."""
    if not data:
        raise LabError("there are no problems to draw from")
    order = torch.Generator().manual_seed(seed)
    waiting: list[int] = []
    while True:
        while len(waiting) < batch:
            waiting += torch.randperm(len(data), generator=order).tolist()
        yield [data[waiting.pop()] for _ in range(batch)]


def fine_tune(
    model: nn.Module, data: Sequence[Problem], *, steps: int, lr: float, batch: int, seed: int
) -> list[float]:
    """`loop.fine_tune` on problems; the loss before each step, in nats a token."""

    def loss(chosen):
        total, count = summed_loss(model, chosen)
        return total / count

    return loop.fine_tune(model, drawn(data, batch, seed), loss, steps=steps, lr=lr)


@torch.no_grad()
def answer_loss(model: nn.Module, data: Sequence[Problem], batch: int = 32) -> float:
    """Mean loss on the solutions in nats a token."""
    model.eval()
    ordered = sorted(data, key=lambda problem: len(problem[0]))  # little padding
    totals = [summed_loss(model, ordered[i : i + batch]) for i in range(0, len(ordered), batch)]
    return float(sum(total for total, _ in totals)) / sum(count for _, count in totals)
