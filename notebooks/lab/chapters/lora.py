"""Adapters of linear maps: LoRA beside NdLinear-LoRA, short fine-tunings of an encoder, and the paper's table of adapters.

An arm is a way to fine-tune the linear maps in the blocks of a frozen encoder: "ndlinear" (NdLinearLoRA, an update of zero at
the start), "ndlinear-released" (the start and the biases of the released adapter), "lora-1", "lora-4", "lora-8", "full" (the
maps themselves) and "head" (nothing but the classifier on top).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ndlinear import (
    NdLinearLoRA,
    apply_ndlinear_lora,
    near_square,
    rearrange,
)

from ..modes import LabError
from ..train.loop import check_finite

ARMS = ("ndlinear", "ndlinear-released", "lora-1", "lora-4", "lora-8", "full", "head")
POOL = 20  # batches whose samples are sorted by length together


# ------------------------------------------------------------------------------------------------------------- adapters
class LowRank(nn.Module):
    """LoRA (Hu et al., 2022): y = base(x) + scale B A x, with B zero at the start and A as torch.nn.Linear draws it.

    Args:
        base: the frozen linear map. rank: of the update. scale: alpha / r in the words of PEFT. dropout: on the adapter's input.
    """

    def __init__(self, base: nn.Linear, rank: int, scale: float = 1.0, dropout: float = 0.0):
        super().__init__()
        self.base_layer = base.requires_grad_(False)
        self.A = nn.Parameter(base.weight.new_empty(rank, base.in_features))
        self.B = nn.Parameter(base.weight.new_zeros(base.out_features, rank))
        nn.init.kaiming_uniform_(self.A, a=math.sqrt(5))
        self.scale = scale
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + self.scale * F.linear(F.linear(self.dropout(x), self.A), self.B)


def maps(model: nn.Module) -> dict[str, nn.Linear]:
    """The linear maps in the blocks of an encoder, by their names: six in each block."""
    found = model.encoder.named_modules()
    return {f"encoder.{name}": m for name, m in found if isinstance(m, nn.Linear)}


def _replace(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, last = name.rpartition(".")
    setattr(model.get_submodule(parent), last, module)


def adapt(model: nn.Module, arm: str, scale: float = 1.0, dropout: float = 0.0) -> nn.Module:
    """Freeze an encoder and make it trainable in the way of an arm, in place.

    Args:
        scale: of the update: alpha for NdLinear-LoRA, alpha / r for LoRA. dropout: on the input of the adapters.

    Returns:
        The model.
    """
    if arm not in ARMS:
        raise LabError(f"no arm {arm!r}; there are: {', '.join(ARMS)}")
    model.requires_grad_(False)
    if arm == "full":
        for module in maps(model).values():
            module.requires_grad_(True)
    elif arm.startswith("lora-"):
        rank = int(arm.removeprefix("lora-"))
        for name, module in maps(model).items():
            _replace(model, name, LowRank(module, rank, scale, dropout))
    elif arm == "ndlinear":
        apply_ndlinear_lora(model, list(maps(model)), alpha=scale, dropout=dropout)
    elif arm == "ndlinear-released":
        options = {"bias": True, "transform_outer": False}
        apply_ndlinear_lora(model, list(maps(model)), alpha=scale, dropout=dropout, **options)
        for module in model.modules():
            if isinstance(module, NdLinearLoRA):
                module.adapter.reset_parameters()
    return model


def trainable(model: nn.Module) -> int:
    """How many numbers are trained."""
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


def released_rms(input_dims: tuple[int, int], alpha: float = 1.0) -> float:
    """Root mean square of the released adapter's update at its start, for input of unit variance and no correlation.

    The mode that runs first is the last one. Its weights, uniform on ±1/√D_2, give entries of variance 1/3 from the input and
    its biases 1/(3 D_2); the other mode keeps a third of both and adds 1/(3 D_1).
    """
    first, last = input_dims
    return alpha * math.sqrt(1 / 9 + 1 / (9 * last) + 1 / (3 * first))


# ---------------------------------------------------------------------------------------------------- models of two tasks
def trim(x: Tensor) -> Tensor:
    """Token numbers and mask (..., 2, T) without the columns in which everything is padding."""
    longest = int(x[..., 1, :].sum(-1).max())
    return x[..., :longest]


def mean_vectors(bert: nn.Module, x: Tensor) -> Tensor:
    """(n, 2, T) tokens and mask -> (n, width): the mean of each sentence's token vectors."""
    ids, mask = trim(x).unbind(1)
    return (bert(ids, mask) * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)


class Sentences(nn.Module):
    """An encoder with a linear head for two classes, which starts at zero: (n, 2, T) -> logits (n, 2)."""

    def __init__(self, bert: nn.Module, width: int):
        super().__init__()
        self.bert = bert
        self.head = nn.Linear(width, 2)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(mean_vectors(self.bert, x))


class Choices(nn.Module):
    """An encoder that answers by likeness: question and choices (n, 1 + choices, 2, T) -> logits (n, choices).

    A logit is 20 times the cosine between the vector of the question and that of the choice. Nothing but the encoder is
    trained, so this answers before any training, too.
    """

    def __init__(self, bert: nn.Module):
        super().__init__()
        self.bert = bert

    def forward(self, x: Tensor) -> Tensor:
        question = mean_vectors(self.bert, x[:, 0])
        choices = mean_vectors(self.bert, x[:, 1:].flatten(0, 1)).unflatten(0, (len(x), -1))
        return 20 * F.cosine_similarity(question[:, None], choices, dim=-1)


# -------------------------------------------------------------------------------------------------------- short trainings
def lengths(x: Tensor) -> Tensor:
    """Number of tokens of each sample, (n, 2, T) or (n, parts, 2, T)."""
    return x[..., 1, :].flatten(1).sum(1)


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
    """Train what is trainable for a fixed number of steps; the last weights stay in the model.

    AdamW with torch's decay of 0.01, gradients cut to norm 1, a rate that rises over the first twentieth of the steps and then
    falls to zero. The head has a rate of its own, the same in all arms.

    Returns:
        The loss before each step.
    """
    x, y = data
    device = next(model.parameters()).device
    groups = {"head": [], "rest": []}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            groups["head" if name.startswith("head.") else "rest"].append(parameter)
    rates = {"head": head_lr, "rest": lr}
    kept = [{"params": group, "lr": rates[name]} for name, group in groups.items() if group]
    adam = torch.optim.AdamW(kept, weight_decay=0.01)
    warm = max(1, steps // 20)
    rate = torch.optim.lr_scheduler.LambdaLR(
        adam, lambda now: min((now + 1) / warm, (steps - now) / steps)
    )
    batches = passes(lengths(x), batch, torch.Generator().manual_seed(seed))
    trained = [parameter for group in kept for parameter in group["params"]]
    losses = []
    model.train()
    for now, index in zip(range(1, steps + 1), batches):
        adam.zero_grad(set_to_none=True)
        loss = F.cross_entropy(model(x[index].to(device)), y[index].to(device))
        loss.backward()
        nn.utils.clip_grad_norm_(trained, 1.0)
        adam.step()
        rate.step()
        losses.append(float(loss.detach()))
        check_finite(losses[-1], now, lr)
    return losses


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


# ------------------------------------------------------------------------------------- what an update is made of (exact)
def crossed(inputs: int, outputs: int, k: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """The fold ((D/k, k), (k, H/k)): for every k its two factors have D + H numbers, and k = 1 is an outer product."""
    return (inputs // k, k), (k, outputs // k)


def square(inputs: int, outputs: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The near-square fold, that of the paper's parameter counts and of peft's LoKr."""
    return near_square(inputs), near_square(outputs)


def shares(matrix: Tensor, fold: tuple, most: int = 8) -> np.ndarray:
    """Share of a matrix's energy that the best sum of 1, 2, ..., ``most`` Kronecker terms of a fold keeps.

    The squares of the singular values of the rearranged matrix over their sum (Van Loan and Pitsianis, 1993). With the fold
    ((D, 1), (1, H)) the terms are outer products: LoRA of rank 1, 2, ...
    """
    values = torch.linalg.svdvals(rearrange(matrix, *fold)).square()
    return (values.cumsum(0) / values.sum())[:most].cpu().numpy()


CROSSED = (1, 2, 4, 8, 16)


def update_shares(before: Mapping[str, Tensor], model: nn.Module) -> dict[str, float]:
    """What the best terms keep of the updates of an encoder's maps: means over the maps.

    Args:
        before: weights by name as they were. model: the encoder after training.

    Returns:
        ``crossed_k`` and ``square``: one term of these folds; ``outer_8`` and ``square_8``: eight outer products and eight terms of
        the near-square fold; ``ahead``: share of the maps in which one outer product keeps more than one near-square term;
        ``relative``: norm of the update over that of the weight.
    """
    rows = []
    for name, module in maps(model).items():
        update = module.weight.detach() - before[name]
        outputs, inputs = update.shape
        row = {f"crossed_{k}": shares(update, crossed(inputs, outputs, k)) for k in CROSSED}
        near = shares(update, square(inputs, outputs))
        found = {key: float(value[0]) for key, value in row.items()}
        found |= {"square": float(near[0]), "square_8": float(near[-1])}
        found["outer_8"] = float(row["crossed_1"][-1])
        found["ahead"] = float(found["crossed_1"] > found["square"])
        found["relative"] = float(update.norm() / before[name].norm())
        rows.append(found)
    return pd.DataFrame(rows).mean().to_dict()


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """Copies of the weights of an encoder's maps, by name."""
    return {name: module.weight.detach().clone() for name, module in maps(model).items()}


# -------------------------------------------------------------------------------------------------- tables of the trainings
def best_rates(tuned: pd.DataFrame) -> dict[str, float]:
    """The rate of each arm with the lowest mean validation loss."""
    losses = tuned.groupby(["arm", "lr"], sort=False)["val_loss"].mean().reset_index()
    best = losses.loc[losses.groupby("arm", sort=False)["val_loss"].idxmin()]
    return dict(zip(best["arm"], best["lr"]))
