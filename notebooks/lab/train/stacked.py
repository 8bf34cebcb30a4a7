"""Many seeds in one training: the members of a stack share the architecture and nothing else.

`torch.func` stacks their parameters along a new first axis and maps the forward pass over it. The
sum of the members' losses has as gradient each member's own gradient, and the optimisers offered
act on each number by itself, so every member trains exactly as it would alone, up to the rounding
of a batched product; tests/lab/test_stacked.py compares it with `lab.fit`.
"""

from __future__ import annotations

import copy
import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state, vmap

from ..modes import LabError
from .loop import (
    OPTIMISERS,
    Split,
    check_stop,
    default_device,
    seed_everything,
    should_stop,
    step,
)

NOT_STACKED = (nn.modules.batchnorm._BatchNorm,)
RANDOM = (nn.modules.dropout._DropoutNd,)
ELEMENTWISE = ("adam", "adamw", "sgd")


@dataclass
class Stack:
    """A finished stacked training: the weights of every member at three moments, and its curve.

    Moments: "best", the epoch of the lowest validation loss up to the member's stop; "stop", the
    epoch at which its stopping rule said stop, or the last one; "end", the last epoch that was run.
    ``epoch[moment][i]`` counts from 1.
    """

    seeds: list[int]
    skeleton: nn.Module = field(repr=False)
    weights: dict[str, dict[str, Tensor]] = field(repr=False)
    epoch: dict[str, list[int]]
    stopped: list[bool]
    seconds: float
    curves: list[list[dict[str, float]]] = field(repr=False)

    def model(self, i: int, moment: str = "best") -> nn.Module:
        """Member ``i`` as an ordinary module, with its weights at a moment."""
        module = copy.deepcopy(self.skeleton)
        module.load_state_dict(
            {k: v[i].detach().clone() for k, v in self.weights[moment].items()}, assign=True
        )
        return module

    def thin(self, i: int, points: int = 30) -> list[dict[str, float]]:
        """At most ``points`` epochs of a member's curve, evenly spaced, the last included."""
        curve = self.curves[i]
        at = sorted({round(k) for k in np.linspace(0, len(curve) - 1, min(points, len(curve)))})
        return [{k: float(f"{v:.5g}") for k, v in curve[j].items()} for j in at]

    def evaluate(
        self, part, functions: dict[str, Callable], moment: str = "best"
    ) -> list[dict[str, float]]:
        """Functions (output, target) -> mean over samples, for every member.

        ``part``: one (x, y) for all, or one for each member.
        """
        x, y = stack_parts([part] * len(self.seeds) if isinstance(part[0], Tensor) else part)
        with torch.no_grad():
            return _means(self.skeleton.eval(), self.weights[moment], x, y, functions)


def stack_parts(parts: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """(members, samples, ...) tensors; parts that are one and the same are expanded, not copied."""
    if all(part is parts[0] for part in parts):
        return tuple(t.expand(len(parts), *t.shape) for t in parts[0])
    if len({part[0].shape for part in parts}) > 1:
        raise LabError("the members' data have different shapes; stack members of equal size only")
    return tuple(torch.stack([part[i] for part in parts]) for i in (0, 1))


def forward(skeleton: nn.Module, weights: dict[str, Tensor], x: Tensor) -> Tensor:
    """Outputs of all members; where there is dropout, each member has its own."""
    return vmap(lambda w, inputs: functional_call(skeleton, w, (inputs,)), randomness="different")(
        weights, x
    )


def _means(skeleton, weights, x, y, functions, batch: int = 2048) -> list[dict[str, float]]:
    """Mean over samples of each function, in batches: one dictionary for each member."""
    totals = dict.fromkeys(functions, 0.0)
    for i in range(0, x.shape[1], batch):
        out, target = forward(skeleton, weights, x[:, i : i + batch]), y[:, i : i + batch]
        for name, function in functions.items():
            totals[name] = totals[name] + vmap(function)(out, target) * target.shape[1]
    columns = {name: (total / x.shape[1]).tolist() for name, total in totals.items()}
    return [{name: columns[name][i] for name in functions} for i in range(len(x))]


def fit(
    make: Callable[[], nn.Module],
    data: Split | Sequence[Split],
    *,
    seeds: Sequence[int],
    loss: Callable,
    scores: dict[str, Callable] | None = None,
    epochs: int,
    lr: float,
    batch_size: int = 0,
    optimiser: str = "adam",
    weight_decay: float = 0.0,
    stop: dict | None = None,
    run_on: bool = False,
    check_every: int = 1,
    dropout: bool = False,
    device: str | torch.device | None = None,
) -> Stack:
    """Train one model for each seed, all at once. The test part is not looked at: call
    `Stack.evaluate`.

    Args:
        make: builds a model; called once for each seed, right after seeding, so a member starts as
            it would alone.
        data: one split for all members, or one for each seed, of equal sizes.
        seeds: also the order of each member's batches, as in `lab.fit`. ``batch_size=0``: full
            batch.
        loss, scores: (output, target) -> mean over the samples of one member, in operations that
            `torch.func.vmap` maps.
        stop: a rule as in `lab.fit`, applied to each member by itself. A stopped member's best and
            stopping weights are kept; training ends when all have stopped, or with ``run_on=True``
            after ``epochs``.
        check_every: epochs between two looks at the validation part; the last epoch is always
            looked at. The stopping rule is applied at those epochs, and the best epoch is one of
            them.
        dropout: allow it. Each member drops its own numbers, but all are drawn from one generator,
            so a member's training is a fair draw of what it would do alone, and not the same draw.

    Raises:
        LabError: a model with batch normalisation or dropout, data of unequal sizes, or a loss that
            is not finite.
    """
    if optimiser not in ELEMENTWISE or epochs < 1 or batch_size < 0 or check_every < 1 or not seeds:
        raise LabError(
            f"stacked.fit: optimiser={optimiser!r} (one of {', '.join(ELEMENTWISE)}), "
            f"epochs={epochs}, batch_size={batch_size}, check_every={check_every}, {len(seeds)} seeds: "
            "one of these is out of range"
        )
    device = default_device(device)
    skeleton, weights = members_of(make, seeds, device, dropout)
    ahead = functools.partial(forward, skeleton, weights)
    train_part, val_part = parts_of(data, len(seeds), device)
    rule = check_stop(stop)
    functions = {"loss": loss, **(scores or {})}
    updates = OPTIMISERS[optimiser](weights.values(), lr=lr, weight_decay=weight_decay)
    orders = [torch.Generator().manual_seed(seed) for seed in seeds]
    curves = [[] for _ in seeds]
    best = torch.full((len(seeds),), torch.inf)
    running = torch.ones(len(seeds), dtype=torch.bool)
    kept = {
        moment: {k: v.detach().clone() for k, v in weights.items()} for moment in ("best", "stop")
    }
    epoch = {moment: [0] * len(seeds) for moment in ("best", "stop", "end")}
    began = time.perf_counter()
    for now in range(1, epochs + 1):
        skeleton.train()
        train = one_epoch(ahead, train_part, vmap(loss), updates, orders, batch_size)
        if now % check_every and now != epochs:
            continue
        if not torch.isfinite(train).all():
            raise LabError(
                f"a training loss is not finite in epoch {now}: {train}; "
                f"lower lr={lr} or check the data"
            )
        with torch.no_grad():
            val = _means(skeleton.eval(), weights, *val_part, functions)
        for curve, loss_now, point in zip(curves, train.tolist(), val):
            curve.append(
                {"epoch": now, "train_loss": loss_now} | {f"val_{k}": v for k, v in point.items()}
            )
        losses = torch.tensor([point["loss"] for point in val])
        better = running & (losses < best)
        best = torch.where(better, losses, best)
        keep(kept["best"], weights, better, epoch["best"], now)
        halted = running & torch.tensor([should_stop(rule, curve) for curve in curves])
        keep(kept["stop"], weights, halted, epoch["stop"], now)
        running &= ~halted
        epoch["end"] = [now] * len(seeds)
        if not running.any() and not run_on:
            break
    keep(kept["stop"], weights, running, epoch["stop"], now)
    kept["end"] = {k: v.detach() for k, v in weights.items()}
    return Stack(
        list(seeds), skeleton, kept, epoch, (~running).tolist(), time.perf_counter() - began, curves
    )


def members_of(
    make: Callable[[], nn.Module], seeds: Sequence[int], device, dropout: bool = False
) -> tuple[nn.Module, dict[str, Tensor]]:
    """A module without weights, and the weights of all members, stacked."""
    models = []
    for seed in seeds:
        seed_everything(seed)
        models.append(make())
    if (
        any(isinstance(m, NOT_STACKED) for m in models[0].modules())
        or next(models[0].buffers(), None) is not None
    ):
        raise LabError(
            "batch normalisation and other models with buffers cannot be stacked: use lab.fit"
        )
    if not dropout and any(isinstance(m, RANDOM) for m in models[0].modules()):
        raise LabError(
            "dropout cannot be stacked unasked, since each member draws its own: "
            "give dropout=True, or use lab.fit"
        )
    weights = {
        k: v.detach().to(device).requires_grad_() for k, v in stack_module_state(models)[0].items()
    }
    return copy.deepcopy(models[0]).to("meta"), weights


def parts_of(data: Split | Sequence[Split], members: int, device):
    """Training and validation part of all members, each a pair of stacked tensors."""
    splits = [data.to(device)] if isinstance(data, Split) else [split.to(device) for split in data]
    if len(splits) not in (1, members):
        raise LabError(
            f"{len(splits)} splits for {members} seeds: give one for all, or one for each"
        )
    splits = splits * members if len(splits) == 1 else splits
    return stack_parts([s.train for s in splits]), stack_parts([s.val for s in splits])


def one_epoch(forward, data, loss, optimiser, orders, batch_size: int) -> Tensor:
    """One pass over the training data, each member in its own order; the mean training loss of each
    member.

    Args:
        forward: (members, B, ...) -> (members, B, ...). loss: such outputs and targets ->
            (members,).
        data: inputs and targets, each (members, samples, ...).
        orders: a generator for each member. With one batch for all samples nothing is drawn.
    """
    x, y = data
    members, count = x.shape[:2]
    total = torch.zeros(members, device=x.device)
    if not 0 < batch_size < count:
        return (total + step(forward, x, y, loss, optimiser) * count) / count
    each = torch.arange(members, device=x.device)[:, None]
    drawn = torch.stack([torch.randperm(count, generator=order) for order in orders])
    for index in drawn.to(x.device).split(batch_size, dim=1):
        values = step(forward, x[each, index], y[each, index], loss, optimiser)
        total += values * index.shape[1]
    return total / count


def keep(
    kept: dict[str, Tensor], weights: dict[str, Tensor], which: Tensor, epochs: list[int], now: int
) -> None:
    """Copy the weights of some members, and note the epoch."""
    rows = which.nonzero().flatten().tolist()
    for i in rows:
        epochs[i] = now
    if rows:
        for name, value in weights.items():
            kept[name][rows] = value.detach()[rows]
