"""Chapter 51: decoders with a dense or an NdLinear block, the printed tables, and answers chosen by log-likelihood."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..data import load
from ..data.bpe import BPE
from ..decoder import (
    Decoder,
    FeedForward,
    NdFeedForward,
    scaled_std,
    spread_kinks,
    start_as_released,
)

# ------------------------------------------------------------------------------------------------------------ the models
NARROWER = 2800 / 3072  # hidden units of the released NdLinear block over those of the dense one
TERMS = 8  # of the learned activation, as in the released OPT-Small
NAMES = {
    "dense": "dense, 4 widths",
    "dense-width": "dense, NdLinear's width",
    "released": "NdLinear, released start",
    "ndlinear": "NdLinear, spread kinks",
    "gelu": "dense, GELU",
    "switched-off": "dense, second matrix 0",
}


@dataclass(frozen=True)
class Size:
    """A decoder: number of layers, width, number of attention heads."""

    layers: int
    width: int
    heads: int

    @property
    def wide(self) -> int:
        """Hidden units of the dense block."""
        return 4 * self.width

    @property
    def narrow(self) -> int:
        """Hidden units of the NdLinear block: the released share of the dense one's."""
        return round(self.wide * NARROWER)


def block(size: Size, arm: str) -> nn.Module:
    """The feed-forward block of an arm."""
    if arm in ("released", "ndlinear"):
        return NdFeedForward(size.width, size.narrow, TERMS)
    hidden = size.narrow if arm == "dense-width" else size.wide
    return FeedForward(size.width, hidden, F.gelu if arm == "gelu" else F.relu)


def decoder(size: Size, arm: str, vocabulary: int, context: int) -> Decoder:
    """A decoder at its start; the caller seeds."""
    make = lambda: block(size, arm)  # noqa: E731
    model = Decoder(vocabulary, context, size.width, size.layers, size.heads, make)
    std = scaled_std(size.width)
    start_as_released(model, std)
    for layer in model.layers:
        if arm == "ndlinear":
            spread_kinks(layer.block, std)
        if arm == "switched-off":
            nn.init.zeros_(layer.block.fc2.weight)
    return model


def activations(model: Decoder) -> list[list[list[float]]]:
    """The learned activation of each layer as [w, c, v]; empty for a dense block."""
    blocks = [layer.block for layer in model.layers]
    found = [b.activation_parameters() for b in blocks if isinstance(b, NdFeedForward)]
    return [[[float(f"{x:.5g}") for x in part.tolist()] for part in three] for three in found]


# ------------------------------------------------------------------------------------------- answers by log-likelihood
RULES = ("sum", "mean", "all")  # of the candidate; its mean; the mean over prompt and candidate
PROMPTS = {
    "copa": "Premise: {premise}\nQuestion: What is the {question}?\nOptions:\n1. {choice1}\n2. {choice2}\n"
    "The most plausible option is ",
    "cb": "Premise: {premise}\nHypothesis: {hypothesis}\nDoes the premise entail the hypothesis? "
    "(Answer with 'Entailment', 'Contradiction', or 'Neutral'): ",
    "piqa": "Goal: {goal}\nPossible solutions:\n1. {sol1}\n2. {sol2}\nThe best solution is ",
}  # of the released script (opt/zero-shot/zero-shot-eval.py, commit 95888fc)
CANDIDATES = {
    "copa": ("{choice1}", "{choice2}"),
    "cb": ("Entailment", "Contradiction", "Neutral"),
    "piqa": ("{sol1}", "{sol2}"),
}


@dataclass(frozen=True)
class Question:
    """A prompt, the candidates that may follow it, and the place of the right one."""

    prompt: str
    candidates: tuple[str, ...]
    right: int


@functools.cache
def questions(task: str, most: int | None = None) -> list[Question]:
    """The questions of a task, or the first of them, as the released script puts them."""
    data = load(task)
    found = []
    for line, right in zip(data.x[:most], data.y[:most].tolist()):
        fields = json.loads(line)
        candidates = tuple(text.format(**fields) for text in CANDIDATES[task])
        found.append(Question(PROMPTS[task].format(**fields), candidates, right))
    return found


@torch.no_grad()
def log_probabilities(
    model: nn.Module, sequences: Sequence[Sequence[int]], batch: int = 64
) -> list[Tensor]:
    """Of each sequence the log-probability of each token but the first, given those before it.

    Shorter sequences are filled up on the right, where no token before sees it.
    """
    model.eval()
    device = next(model.parameters()).device
    order = sorted(range(len(sequences)), key=lambda i: len(sequences[i]))
    found: dict[int, Tensor] = {}
    for begin in range(0, len(order), batch):
        chosen = order[begin : begin + batch]
        rows = [torch.tensor(sequences[i]) for i in chosen]
        tokens = nn.utils.rnn.pad_sequence(rows, batch_first=True).to(device)
        logs = model(tokens[:, :-1]).log_softmax(-1).gather(-1, tokens[:, 1:, None])[..., 0]
        found |= {i: logs[row, : len(sequences[i]) - 1].cpu() for row, i in enumerate(chosen)}
    return [found[i] for i in range(len(sequences))]


def scores(logs: Tensor, answer: int) -> dict[str, float]:
    """The three scores of a sequence whose last ``answer`` tokens are the candidate."""
    candidate = logs[len(logs) - answer :]
    return {
        "sum": float(candidate.sum()),
        "mean": float(candidate.mean()),
        "all": float(logs.mean()),
    }


def zero_shot(
    model: nn.Module, encoding: BPE, asked: Iterable[Question], context: int
) -> dict[str, float]:
    """Share of right answers by each of the three scores; too long prompts lose their beginning."""
    asked = list(asked)
    sequences, answers = [], []
    for question in asked:
        prompt = encoding.encode(question.prompt).tolist()
        for text in question.candidates:
            answer = encoding.encode(text).tolist()[:context]
            sequences.append((prompt + answer)[-context - 1 :])
            answers.append(len(answer))
    found = [scores(*pair) for pair in zip(log_probabilities(model, sequences), answers)]
    right = dict.fromkeys(RULES, 0)
    at = 0
    for question in asked:
        mine = found[at : at + len(question.candidates)]
        at += len(question.candidates)
        for rule in RULES:
            right[rule] += int(np.argmax([s[rule] for s in mine])) == question.right
    return {rule: count / len(asked) for rule, count in right.items()}


def all_tasks(model: nn.Module, encoding: BPE, context: int, most: int) -> dict[str, float]:
    """`zero_shot` for each task at hand, at most so many questions of each: metric "task rule"."""
    metrics = {}
    for task in PROMPTS:
        found = zero_shot(model, encoding, questions(task, most), context)
        metrics |= {f"{task}_{rule}": share for rule, share in found.items()}
    return metrics


Answer = Callable[[Question], int]
CONSTANTS: dict[str, Answer] = {
    "first": lambda question: 0,
    "last": lambda question: len(question.candidates) - 1,
    "shortest": lambda question: int(np.argmin([len(c) for c in question.candidates])),
    "longest": lambda question: int(np.argmax([len(c) for c in question.candidates])),
}  # answers that no model is needed for


# ------------------------------------------------------------------------------------------------------ reading the runs
def best_rates(trials: pd.DataFrame) -> dict[str, float]:
    """The rate of each arm with the lowest loss on the text for tuning."""
    lowest = trials.loc[trials.groupby("arm")["tune_loss"].idxmin()]
    return dict(zip(lowest["arm"], lowest["lr"]))
