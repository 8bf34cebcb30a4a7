"""A small decoder that is moved from novels to worked solutions: its base and the problems."""

from __future__ import annotations

import copy
import functools
import io

import numpy as np
import torch

from ..data import checksum, load, tokens
from ..data.files import cache_folder, write
from ..decoder import Decoder, FeedForward, scaled_std, start_as_released
from ..modes import mode
from ..records import golden
from ..train import language
from ..train.answers import Problem, answer_loss, encoded
from ..train.loop import seed_everything

VOCABULARY, CONTEXT = 1024, 256
LAYERS, WIDTH, HEADS = 3, 96, 3
VALIDATION = 300  # of the training problems; they choose rates and are never trained on


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
    known = f"{steps}-{golden.version('lora-text')}-{checksum('novels')}-{torch.__version__}"
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


@functools.cache
def base_loss(steps: int) -> float:
    """Loss of the base on the test problems, before any fine-tuning."""
    return answer_loss(base(steps), problems()["test"])
