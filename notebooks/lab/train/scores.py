"""Scores of a batch, each a mean over its samples."""

from __future__ import annotations

from torch import Tensor


def squared_error(out: Tensor, target: Tensor) -> Tensor:
    """Mean squared error of one member's answers."""
    return (out - target).square().mean()


def accuracy(logits: Tensor, classes: Tensor) -> Tensor:
    """Share of samples whose class has the largest logit; with a first axis more, that of each
    member."""
    return (logits.argmax(-1) == classes).float().mean(-1)


def top_five(logits: Tensor, classes: Tensor) -> Tensor:
    """Share of samples whose class is among the five largest logits: the paper's Acc@5."""
    return (logits.topk(5, dim=-1).indices == classes[..., None]).any(-1).float().mean()
