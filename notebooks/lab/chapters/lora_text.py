"""A small decoder that is moved from novels to worked solutions: its base, the problems as tokens, the loss on the answers.

A sequence is a question, a line break and its solution; only the solution's tokens are trained on and scored. The marks
that the data set puts in for a calculator, <<...>>, are taken out.
"""

from __future__ import annotations

import copy
import functools
import io
import json
import re
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..data import checksum, load, tokens
from ..data.bpe import BPE
from ..data.files import cache_folder, write
from ..decoder import Decoder, FeedForward, scaled_std, start_as_released
from ..modes import mode
from ..records.fingerprint import code_hash
from ..train import language
from ..train.loop import check_finite, seed_everything

VOCABULARY, CONTEXT = 1024, 256
LAYERS, WIDTH, HEADS = 3, 96, 3
VALIDATION = 300  # of the training problems; they choose rates and are never trained on
IGNORED = -100  # target of a token that is not trained on
MARKS = r"<<[^>]*>>"
Problem = tuple[Tensor, int]  # tokens, and how many of the last ones are the solution


# --------------------------------------------------------------------------------------------------------------- the base
def untrained() -> Decoder:
    """The base at its start: a decoder with ReLU blocks of four widths."""
    vocabulary = tokens.corpus(VOCABULARY).encoding.vocabulary
    seed_everything(0)
    model = Decoder(
        vocabulary, CONTEXT, WIDTH, LAYERS, HEADS, lambda: FeedForward(WIDTH, 4 * WIDTH)
    )
    start_as_released(model, scaled_std(WIDTH))
    return model


def trained_base(steps: int) -> Decoder:
    """The base after its steps on the novels; always the same."""
    text = tokens.corpus(VOCABULARY)
    model = untrained()
    plan = language.Plan(steps=steps, lr=4e-3, batch=8, looks=1)
    language.train(model, text.train, plan, context=CONTEXT, seed=0, held=text.tune)
    return model


@functools.cache
def _base(steps: int) -> Decoder:
    """`trained_base`, trained once: its weights are kept in the user's cache folder, under a name that knows the code."""
    if mode() == "smoke":
        return trained_base(steps)
    known = f"{steps}-{code_hash(trained_base)}-{checksum('novels')}-{torch.__version__}"
    place = cache_folder() / "decoders" / f"novels-{known}.pt"
    if not place.is_file():
        content = io.BytesIO()
        torch.save(trained_base(steps).state_dict(), content)
        write(place, content.getvalue(), replace=True)
    model = untrained()
    model.load_state_dict(torch.load(place, weights_only=True))
    return model


def base(steps: int) -> Decoder:
    """A copy of the base that all arms start from."""
    return copy.deepcopy(_base(steps))


# ----------------------------------------------------------------------------------------------------------- the problems
def worked(line: str) -> tuple[str, str]:
    """Question and solution of a line of the data set, as they follow one another in a text."""
    row = json.loads(line)
    return row["question"] + "\n", re.sub(MARKS, "", row["answer"]) + "\n\n"


def encoded(line: str, encoding: BPE, context: int) -> Problem:
    """A problem as at most ``context`` + 1 tokens: too long solutions lose their end, questions their beginning."""
    question, answer = (encoding.encode(text) for text in worked(line))
    answer = answer[:context]
    both = np.concatenate([question, answer])[-context - 1 :]
    return torch.from_numpy(both), len(answer)


@functools.cache
def problems() -> dict[str, list[Problem]]:
    """The problems to train on, those that choose rates ("val"), and the official test part."""
    encoding = tokens.corpus(VOCABULARY).encoding
    data = load("gsm8k")
    train, test = (
        [encoded(line, encoding, CONTEXT) for line in data.part(part)[0]]
        for part in ("train", "test")
    )
    order = np.random.default_rng(0).permutation(len(train)).tolist()
    held = min(VALIDATION, len(train) // 4)
    parts = {"val": order[:held], "train": order[held:]}
    return {name: [train[i] for i in chosen] for name, chosen in parts.items()} | {"test": test}


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


def fine_tune(
    model: nn.Module, data: Sequence[Problem], *, steps: int, lr: float, batch: int, seed: int
) -> list[float]:
    """Train what is trainable; the last weights stay in the model. Optimiser and schedule are those of `lora.fine_tune`.

    AdamW with torch's decay of 0.01, gradients cut to norm 1, a rate that rises over the first twentieth of the steps and
    then falls to zero. Each pass takes the problems in a new order.

    Returns:
        The loss before each step, in nats a token.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    adam = torch.optim.AdamW(trained, lr=lr, weight_decay=0.01)
    warm = max(1, steps // 20)
    rate = torch.optim.lr_scheduler.LambdaLR(
        adam, lambda now: min((now + 1) / warm, (steps - now) / steps)
    )
    order = torch.Generator().manual_seed(seed)
    waiting: list[int] = []
    losses = []
    model.train()
    for now in range(1, steps + 1):
        if len(waiting) < batch:
            waiting += torch.randperm(len(data), generator=order).tolist()
        chosen = [data[waiting.pop()] for _ in range(batch)]
        adam.zero_grad(set_to_none=True)
        total, count = summed_loss(model, chosen)
        (total / count).backward()
        nn.utils.clip_grad_norm_(trained, 1.0)
        adam.step()
        rate.step()
        losses.append(float(total.detach()) / count)
        check_finite(losses[-1], now, lr)
    return losses


@torch.no_grad()
def answer_loss(model: nn.Module, data: Sequence[Problem], batch: int = 32) -> float:
    """Mean loss on the solutions in nats a token."""
    model.eval()
    ordered = sorted(data, key=lambda problem: len(problem[0]))  # little padding
    totals = [summed_loss(model, ordered[i : i + batch]) for i in range(0, len(ordered), batch)]
    return float(sum(total for total, _ in totals)) / sum(count for _, count in totals)


@functools.cache
def base_loss(steps: int) -> float:
    """Loss of the base on the test problems, before any fine-tuning."""
    return answer_loss(base(steps), problems()["test"])
