"""Adapters of linear maps: LoRA beside NdLinear-LoRA, and the paper's table of adapters."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import pandas as pd
from torch import nn

from ndlinear import near_square

from ..adapters import KroneckerTerms
from ..page.facts import facts
from ..stats import summary


# ------------------------------------------------------------------------------------------------------------- adapters
def attach(
    model: nn.Module, targets: Mapping[str, nn.Linear], adapter: Callable[[nn.Linear], nn.Module]
) -> nn.Module:
    """Freeze a model and put an adapter in place of some of its linear maps, given by their names; returns the model."""
    model.requires_grad_(False)
    for name, module in targets.items():
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, adapter(module))
    return model


def terms(count: int, fold: Callable) -> Callable[[nn.Linear], nn.Module]:
    """An adapter for `attach`: a sum of so many Kronecker products.

    Args:
        fold: (inputs, outputs) of a map -> how both are folded, such as `square`.
    """
    return lambda m: KroneckerTerms(m, *fold(m.in_features, m.out_features), count)


def released_rms(input_dims: tuple[int, int]) -> float:
    """Root mean square of the released adapter's update at its start and scale one, for input of unit variance and no correlation.

    The mode that runs first is the last one. Its weights, uniform on ±1/√D_2, give entries of variance 1/3 from the input and
    its biases 1/(3 D_2); the other mode keeps a third of both and adds 1/(3 D_1).
    """
    first, last = input_dims
    return math.sqrt(1 / 9 + 1 / (9 * last) + 1 / (3 * first))


# ---------------------------------------------------------------------------------------------------------------- folds
def crossed(inputs: int, outputs: int, k: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """The fold ((D/k, k), (k, H/k)): for every k its two factors have D + H numbers, and k = 1 is an outer product."""
    return (inputs // k, k), (k, outputs // k)


def square(inputs: int, outputs: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The near-square fold, that of the paper's parameter counts and of peft's LoKr."""
    return near_square(inputs), near_square(outputs)


# -------------------------------------------------------------------------------------------------- tables of the trainings
NAMES = {
    "ndlinear": "NdLinear-LoRA",
    "lora-1": "LoRA, rank 1",
    "lora-8": "LoRA, rank 8",
    "dora-1": "DoRA, rank 1",
    "sum-8": "sum of 8 Kronecker products",
    "fold-8": "Kronecker product, k = 8",
    "sum-fold-8": "sum of 8 of these, k = 8",
    "factor-8": "LoKr, factor 8",
}


def overview(runs: pd.DataFrame) -> pd.DataFrame:
    """Of each arm the parameters, the rate, and accuracy, if any, and loss on the test part with the ends of their intervals."""
    metrics = [metric for metric in ("accuracy", "loss") if metric in runs]
    named = runs.assign(arm=runs["arm"].map(NAMES))
    if "accuracy" in runs:
        named["accuracy"] *= 100
    found = summary(named, ["arm", "parameters", "lr"], metrics)
    return found.rename(columns={"parameters": "trained", "lr": "rate", "n": "seeds"})


def loss_word(found: tuple[float, float, float], margin: float) -> str:
    """A difference in loss by the chapter's rule: higher, lower, within the margin on both sides, on one, or undecided."""
    _, low, high = found
    words = []
    if low > 0:
        words.append("higher")
    if high < 0:
        words.append("lower")
    if -margin < low and high < margin:
        words.append("equivalent")
    elif high < margin and "lower" not in words:
        words.append("not inferior")
    return ", ".join(words) or "undecided"


# ------------------------------------------------------------------------------------------------ the paper's printed table
QUESTIONS = {  # how many questions each test set has; MultiArith: the test part of the copy that the released script loads
    "GSM8K": 1319,
    "MultiArith": 180,
    "CSQA": 1221,
    "ARC-Easy": 2376,
    "ARC-Challenge": 1172,
    "BoolQ": 3270,
}


def printed_differences() -> pd.DataFrame:
    """The 24 differences of NdLinear-LoRA to the LoRA rows of its model, in points, with their standard errors.

    The error is that of two independent proportions. Both rows answer the same questions, so their difference varies less over
    draws of questions; over draws of the training it varies more, by an amount that one run does not show.
    """
    rows = ["model", "dataset", "rank", "value"]
    table = facts("ndlinear_lora", metric="accuracy")
    ours, other = (table[table["method"] == name][rows] for name in ("NdLinear-LoRA", "LoRA"))
    found = other.merge(ours.drop(columns="rank"), on=["model", "dataset"], suffixes=("_lora", ""))
    found = found.rename(columns={"value": "NdLinear-LoRA", "value_lora": "LoRA"})
    variance = sum(found[name] * (100 - found[name]) for name in ("NdLinear-LoRA", "LoRA"))
    found["difference"] = found["NdLinear-LoRA"] - found["LoRA"]
    found["error"] = (variance / found["dataset"].map(QUESTIONS)) ** 0.5
    found["errors"] = found["difference"] / found["error"]
    return found.astype({"rank": int})
