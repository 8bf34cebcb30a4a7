"""Adapters of linear maps: LoRA beside NdLinear-LoRA, short fine-tunings of an encoder, and the paper's table of adapters.

An arm is a way to fine-tune the linear maps in the blocks of a frozen model: see `attach`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping

import pandas as pd
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ndlinear import near_square
from ndlinear_lora import apply_ndlinear_lora

from ..adapters import DoRA, KroneckerTerms
from ..models import LoRA
from ..modes import LabError
from ..page.facts import facts
from ..stats import paired, summary
from ..train import loop

POOL = 20  # batches whose samples are sorted by length together


# ------------------------------------------------------------------------------------------------------------- adapters
def maps(model: nn.Module) -> dict[str, nn.Linear]:
    """The linear maps in the blocks of an encoder, by their names: six in each block."""
    found = model.encoder.named_modules()
    return {f"encoder.{name}": m for name, m in found if isinstance(m, nn.Linear)}


def _replace(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, last = name.rpartition(".")
    setattr(model.get_submodule(parent), last, module)


def attach(model: nn.Module, targets: Mapping[str, nn.Linear], arm: str) -> nn.Module:
    """Freeze a model and make some of its linear maps trainable in the way of an arm, in place.

    Args:
        targets: the maps by their names in the model. arm: "lora-<rank>", "dora-<rank>", "ndlinear" (an update of zero at the start),
            "ndlinear-released" (biases, order and start of the released adapter), "full" (the maps themselves) or "head" (none of
            them).

    Returns:
        The model.
    """
    model.requires_grad_(False)
    if arm.startswith("ndlinear"):
        released = {"bias": True, "transform_outer": False} if arm != "ndlinear" else {}
        apply_ndlinear_lora(model, list(targets), **released)
        for name in targets if released else ():
            model.get_submodule(name).adapter.reset_parameters()
        return model
    kind, _, rank = arm.partition("-")
    layers = {"lora": LoRA, "dora": DoRA}
    if kind not in (*layers, "full", "head"):
        raise LabError(f"no arm {arm!r}; there are: {', '.join(layers)}, ndlinear, full, head")
    for name, module in targets.items():
        if kind in layers:
            _replace(model, name, layers[kind](module, int(rank)))
        else:
            module.requires_grad_(kind == "full")
    return model


def attach_terms(
    model: nn.Module, targets: Mapping[str, nn.Linear], count: int, fold: Callable
) -> nn.Module:
    """As `attach`, with a sum of Kronecker products on each map.

    Args:
        count: of the products. fold: (inputs, outputs) of a map -> how both are folded, such as `square`.
    """
    model.requires_grad_(False)
    for name, module in targets.items():
        folded = fold(module.in_features, module.out_features)
        _replace(model, name, KroneckerTerms(module, *folded, count))
    return model


def released_rms(input_dims: tuple[int, int]) -> float:
    """Root mean square of the released adapter's update at its start and scale one, for input of unit variance and no correlation.

    The mode that runs first is the last one. Its weights, uniform on ±1/√D_2, give entries of variance 1/3 from the input and
    its biases 1/(3 D_2); the other mode keeps a third of both and adds 1/(3 D_1).
    """
    first, last = input_dims
    return math.sqrt(1 / 9 + 1 / (9 * last) + 1 / (3 * first))


# ------------------------------------------------------------------------------------------- a classifier of sentences
def trim(x: Tensor) -> Tensor:
    """Token numbers and mask (n, 2, T) without the columns in which everything is padding."""
    return x[..., : int(lengths(x).max())]


def mean_vectors(bert: nn.Module, x: Tensor) -> Tensor:
    """(n, 2, T) tokens and mask -> (n, width): the mean of each sentence's token vectors."""
    ids, mask = trim(x).unbind(1)
    hidden = bert(ids, mask).last_hidden_state
    return (hidden * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)


class Sentences(nn.Module):
    """An encoder with a linear head for two classes, which starts at zero: (n, 2, T) -> logits (n, 2)."""

    def __init__(self, bert: nn.Module):
        super().__init__()
        self.bert = bert
        self.head = nn.Linear(bert.config.hidden_size, 2)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(mean_vectors(self.bert, x))


# -------------------------------------------------------------------------------------------------------- short trainings
def lengths(x: Tensor) -> Tensor:
    """Number of tokens of each sample (n, 2, T)."""
    return x[:, 1].sum(1)


def passes(sizes: Tensor, batch: int, order: torch.Generator) -> Iterator[Tensor]:
    """Indices of batches without end: pass after pass in random order, samples of like length together."""
    while True:
        for pool in torch.randperm(len(sizes), generator=order).split(batch * POOL):
            parts = pool[sizes[pool].argsort(stable=True)].split(batch)
            for place in torch.randperm(len(parts), generator=order).tolist():
                yield parts[place]


def fine_tune(
    model: nn.Module,
    data: tuple[Tensor, Tensor],
    *,
    steps: int,
    lr: float,
    head_lr: float,
    batch: int,
    seed: int,
) -> list[float]:
    """`loop.fine_tune` on samples and their classes; the head has a rate of its own, the same in all arms."""
    x, y = data
    device = next(model.parameters()).device
    batches = passes(lengths(x), batch, torch.Generator().manual_seed(seed))

    def loss(index):
        return F.cross_entropy(model(x[index].to(device)), y[index].to(device))

    return loop.fine_tune(model, batches, loss, steps=steps, lr=lr, head_lr=head_lr)


@torch.inference_mode()
def score(model: nn.Module, data: tuple[Tensor, Tensor], batch: int = 64) -> dict[str, float]:
    """Mean cross entropy and accuracy on a part of the data."""
    model.eval()
    x, y = data
    device = next(model.parameters()).device
    loss = right = 0.0
    for index in lengths(x).argsort(stable=True).split(batch):  # little padding
        logits, wanted = model(x[index].to(device)).float(), y[index].to(device)
        loss += F.cross_entropy(logits, wanted, reduction="sum").item()
        right += (logits.argmax(1) == wanted).sum().item()
    return {"loss": loss / len(x), "accuracy": right / len(x)}


# ---------------------------------------------------------------------------------------------------------------- folds
def crossed(inputs: int, outputs: int, k: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """The fold ((D/k, k), (k, H/k)): for every k its two factors have D + H numbers, and k = 1 is an outer product."""
    return (inputs // k, k), (k, outputs // k)


def square(inputs: int, outputs: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The near-square fold, that of the paper's parameter counts and of peft's LoKr."""
    return near_square(inputs), near_square(outputs)


# -------------------------------------------------------------------------------------------------- tables of the trainings
NAMES = {
    "head": "head only",
    "ndlinear": "NdLinear-LoRA",
    "ndlinear-released": "NdLinear-LoRA, released start",
    "lora-1": "LoRA, rank 1",
    "lora-8": "LoRA, rank 8",
    "dora-1": "DoRA, rank 1",
    "sum-8": "sum of 8 Kronecker products",
    "fold-8": "Kronecker product, k = 8",
    "sum-fold-8": "sum of 8 of these, k = 8",
    "factor-8": "LoKr, factor 8",
    "base": "no adapter",
    "full": "all maps",
}


def overview(runs: pd.DataFrame) -> pd.DataFrame:
    """Of each arm the parameters, the rate, and accuracy, if any, and loss on the test part with the ends of their intervals."""
    metrics = [metric for metric in ("accuracy", "loss") if metric in runs]
    named = runs.assign(arm=runs["arm"].map(NAMES))
    if "accuracy" in runs:
        named["accuracy"] *= 100
    found = summary(named, ["arm", "parameters", "lr"], metrics)
    return found.rename(columns={"parameters": "trained", "lr": "rate", "n": "seeds"})


def word(found: tuple[float, float, float], margin: float = 1.0) -> str:
    """A difference in points by the chapter's rule: not inferior, worse, both, or undecided."""
    _, low, high = found
    words = ["not inferior"] if low > -margin else []
    if high < 0:
        words.append("worse")
    return ", ".join(words) or "undecided"


def loss_word(found: tuple[float, float, float], margin: float = 0.0) -> str:
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


def against(runs: pd.DataFrame) -> pd.DataFrame:
    """Accuracy and loss of NdLinear-LoRA minus those of each other arm, seed by seed, and what the rule says."""
    rows = []
    for other in dict.fromkeys(runs["arm"]):
        if other == "ndlinear":
            continue
        points = tuple(100 * end for end in paired(runs, "accuracy", "ndlinear", other))
        nats = paired(runs, "loss", "ndlinear", other)
        row = {
            "against": NAMES[other],
            "points": "{:+.1f} [{:+.1f}, {:+.1f}]".format(*points),
            "by accuracy": word(points),
            "loss": "{:+.3f} [{:+.3f}, {:+.3f}]".format(*nats),
            "by loss": loss_word(nats),
        }
        rows.append(row)
    return pd.DataFrame(rows)


# ------------------------------------------------------------------------------------------------ the paper's printed table
QUESTIONS = {  # how many questions each test set has; MultiArith: the test part of the copy that the released script loads
    "GSM8K": 1319,
    "MultiArith": 180,
    "CSQA": 1221,
    "ARC-Easy": 2376,
    "ARC-Challenge": 1172,
    "BoolQ": 3270,
}


def standard_error(percent: float, questions: int) -> float:
    """Standard error, in points, of an accuracy in percent on so many questions."""
    return math.sqrt(percent * (100 - percent) / questions)


def printed_differences() -> pd.DataFrame:
    """The 24 differences of NdLinear-LoRA to the LoRA rows of its model, in points, with their standard errors.

    The error is that of two independent proportions. Both rows answer the same questions, so their difference varies less over
    draws of questions; over draws of the training it varies more, by an amount that one run does not show.
    """
    table = facts("ndlinear_lora", metric="accuracy")
    ours = table[table["method"] == "NdLinear-LoRA"].set_index(["model", "dataset"])["value"]
    rows = []
    for row in table[table["method"] == "LoRA"].itertuples():
        mine, n = ours[row.model, row.dataset], QUESTIONS[row.dataset]
        error = math.hypot(standard_error(mine, n), standard_error(row.value, n))
        rows.append(
            (row.model, row.dataset, int(row.rank), mine, row.value, mine - row.value, error)
        )
    columns = ["model", "dataset", "rank", "NdLinear-LoRA", "LoRA", "difference", "error"]
    found = pd.DataFrame(rows, columns=columns)
    return found.assign(errors=found["difference"] / found["error"])
