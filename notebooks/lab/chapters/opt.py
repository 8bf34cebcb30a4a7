"""Evidence 51: decoders with a dense or an NdLinear block, the printed tables, and answers chosen by log-likelihood."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn

from ndlinear import cheapest_order, count_macs

from .. import models
from ..data import load
from ..decoder import (
    RELEASED_STD,
    Decoder,
    FeedForward,
    NdFeedForward,
    scaled_std,
    spread_kinks,
    start_as_released,
)
from ..machine import require
from ..page.facts import facts

# ------------------------------------------------------------------------------------------------------------ the models
NARROWER = 2800 / 3072  # hidden units of the released NdLinear block over those of the dense one
TERMS = 8  # of the learned activation, as in the released OPT-Small
NAMES = {
    "dense": "dense, 4 widths",
    "dense-width": "dense, NdLinear's width",
    "released": "NdLinear, released start",
    "ndlinear": "NdLinear, spread kinks",
}


def block(width: int, arm: str) -> nn.Module:
    """The feed-forward block of an arm of `NAMES`."""
    narrow = round(4 * width * NARROWER)
    if arm in ("released", "ndlinear"):
        return NdFeedForward(width, narrow, TERMS)
    return FeedForward(width, narrow if arm == "dense-width" else 4 * width)


def decoder(
    layers: int, width: int, heads: int, arm: str, vocabulary: int, context: int
) -> Decoder:
    """A decoder at its start; the caller seeds."""
    model = Decoder(vocabulary, context, width, layers, heads, lambda: block(width, arm))
    std = scaled_std(width)
    start_as_released(model, std)
    for layer in model.layers:
        if arm == "ndlinear":
            spread_kinks(layer.block, std)
    return model


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
def scores(model: nn.Module, prompt: list[int], candidate: list[int], context: int) -> list[float]:
    """The three scores of a candidate after a prompt, in the order of `RULES`; too long prompts lose their beginning."""
    candidate = candidate[:context]
    device = next(model.parameters()).device
    symbols = torch.tensor((prompt + candidate)[-context - 1 :], device=device)
    logs = model(symbols[None, :-1])[0].log_softmax(-1).gather(-1, symbols[1:, None])
    answer = logs[len(logs) - len(candidate) :]
    return [answer.sum().item(), answer.mean().item(), logs.mean().item()]


def zero_shot(
    model: nn.Module,
    encode: Callable[[str], list[int]],
    asked: Sequence[Question],
    context: int,
) -> dict[str, float]:
    """Share of right answers by each of the three scores."""
    model.eval()
    right = np.zeros(len(RULES))
    for question in asked:
        texts = (question.prompt, *question.candidates)
        prompt, *candidates = map(encode, texts)
        found = [scores(model, prompt, candidate, context) for candidate in candidates]
        right += np.argmax(found, axis=0) == question.right
    return dict(zip(RULES, right / len(asked)))


# ---------------------------------------------------------------------------------------------------- the printed tables
TASKS = {
    "CB": (56, 3),
    "Winogrande": (1267, 2),
    "COPA": (100, 2),
    "HellaSwag": (10_042, 4),
    "WiC": (638, 2),
    "ARC-Easy": (570, 4),
    "ARC-Challenge": (299, 4),
    "OpenBookQA": (500, 4),
    "BoolQ": (3270, 2),
    "PIQA": (1838, 2),
}  # questions of the validation part, and answers of a question


def printed_accuracies(model: str) -> pd.DataFrame:
    """The printed accuracies of both blocks by task, their ``difference`` and its standard ``error``, and ``errors``, how many it is.

    The error is that of two models that err independently on the task's ``questions``.
    """
    table = facts("opt_pretrain", model=model, metric="zero_shot_accuracy")
    found = table.pivot(index="dataset", columns="method", values="value")[["Linear", "NdLinear"]]
    found.insert(0, "questions", [TASKS[task][0] for task in found.index])
    found["difference"] = found["NdLinear"] - found["Linear"]
    variance = sum(found[method] * (1 - found[method]) for method in ("Linear", "NdLinear"))
    found["error"] = np.sqrt(variance / found["questions"])
    found["errors"] = found["difference"] / found["error"]
    return found.loc[list(TASKS)].rename_axis(index="task", columns=None).reset_index()


# ------------------------------------------------------------------------------------------------------ the printed size
def block_macs(width: int, hidden: int, terms: int | None = None, cheapest: bool = False) -> int:
    """Multiply-adds a token of a dense block, or of an NdLinear block as defined or in the cheapest order."""
    if terms is None:
        return 2 * width * hidden
    ways = (((width, 1), (hidden, terms)), ((hidden, terms), (width, 1)))
    return sum(count_macs(*way, cheapest_order(*way) if cheapest else (0, 1)) for way in ways)


class Logits(nn.Module):
    """A language model of transformers that answers with its logits."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        with torch.autocast("cuda", torch.bfloat16, enabled=tokens.is_cuda):
            return self.model(tokens).logits


def of_transformers(name: str, arm: str, std: float = RELEASED_STD, **smaller) -> Logits:
    """OPT of the transformers library in a released configuration, with an NdLinear block in the arms that have one.

    Args:
        std: deviation of the weights at the start. smaller: settings of its configuration in place of the released ones.
    """
    transformers = require("transformers")
    shape = models.OPT[name]
    settings = {
        "hidden_size": shape["width"],
        "ffn_dim": shape["hidden"],
        "num_hidden_layers": shape["layers"],
        "num_attention_heads": shape["width"] // 64,
        "max_position_embeddings": shape["positions"],
        "vocab_size": shape["vocabulary"],
        "word_embed_proj_dim": shape["embed"],
    }
    config = transformers.OPTConfig(**settings | smaller)
    model = transformers.OPTForCausalLM(config)
    hidden, terms = models.OPT_INSIDE[name]
    share = hidden / shape["hidden"]
    for layer in model.model.decoder.layers if arm != "dense" else []:
        layer.fc1 = NdFeedForward(config.hidden_size, round(config.ffn_dim * share), terms)
        layer.activation_fn = nn.Identity()
        layer.fc2 = nn.Identity()
    start_as_released(model, std)
    for layer in model.model.decoder.layers if arm == "ndlinear" else []:
        spread_kinks(layer.fc1, std)
    return Logits(model)
