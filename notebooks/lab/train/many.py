"""One training loop: a network for each seed, all at once, by epochs or by steps, as a `Plan` says.

Members share the architecture and nothing else: `torch.func` stacks their parameters along a new first axis, and the gradient
of the sum of their losses holds each one's own, so each trains as it would alone, up to the rounding of a batched product.
Members may have rates of their own, so that all trials of a rate are one training, and those with the same data share them.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state, vmap

from ..counts import count_macs
from ..models import size
from ..modes import LabError
from .loop import Split, seed_everything, thin

Part = tuple[Tensor, Tensor]  # inputs and targets, (members, n, ...) each
Weights = dict[str, Tensor]  # (members, ...) each, by name


@dataclass(frozen=True)
class Plan:
    """How a network is trained, as data.

    Args:
        epochs, steps: how long; one of the two. Only epochs end with a batch that may be smaller.
        batch: samples of a step; 0, or no less than there are: all of them, in their own order.
        lr: of all parameters, or network -> rate of each by name, or its options where it has a decay of its own.
        optimiser: of torch, one that treats each number by itself; options: its own.
        each: with an optimiser that takes them, such as `Adam` here, a factor on the rate for each member.
        looks: how often the validation part is looked at, evenly spaced, the end included; 0: never; None: after each epoch; or
            the steps themselves.
        patience: so many looks without a lower validation loss stop a member; 0: none does.
        below: a member also stops at the first look whose training loss is below it; then all train on to the end.
        finite: a training loss that is no number raises; else the member goes on; without a finite look its best weights are the first.
    """

    epochs: int = 0
    steps: int = 0
    batch: int = 0
    lr: float | Callable[[nn.Module], dict[str, float]] = 1e-3
    optimiser: type = torch.optim.Adam
    options: dict = field(default_factory=dict)
    each: tuple[float, ...] = ()
    looks: int | tuple[int, ...] | None = None
    patience: int = 0
    below: float | None = None
    finite: bool = True


class Adam(torch.optim.Optimizer):
    """Adam as in torch, for stacked parameters, with a factor on the rate for each member."""

    def __init__(self, groups, each: Sequence[float], betas=(0.9, 0.999), eps: float = 1e-8):
        super().__init__(groups, {"lr": 1e-3})
        self.each = torch.tensor(each, dtype=torch.float32)
        self.betas, self.eps, self.now = betas, eps, 0

    @torch.no_grad()
    def step(self, closure=None) -> None:
        self.now += 1
        mean_bias, square_bias = (1 - beta**self.now for beta in self.betas)
        for group in self.param_groups:
            for weight in group["params"]:
                grad, state = weight.grad, self.state[weight]
                if not state:
                    state["mean"] = torch.zeros_like(weight)
                    state["square"] = torch.zeros_like(weight)
                state["mean"].lerp_(grad, 1 - self.betas[0])
                state["square"].mul_(self.betas[1])
                state["square"].addcmul_(grad, grad, value=1 - self.betas[1])
                below = state["square"].sqrt().div_(math.sqrt(square_bias)).add_(self.eps)
                rate = self.each * group["lr"] / mean_bias
                rate = rate.view(-1, *[1] * (weight.ndim - 1))
                weight.sub_(state["mean"].div(below).mul_(rate))


def groups(weights: Weights, model: nn.Module, lr) -> list[dict]:
    """What the optimiser gets: the stacked weights of each rate, or of equal options, of a `Plan`'s ``lr`` for this network."""
    said = lr(model) if callable(lr) else dict.fromkeys(weights, lr)
    found = {}
    for name, weight in weights.items():
        options = said[name] if isinstance(said[name], dict) else {"lr": said[name]}
        group = found.setdefault(tuple(sorted(options.items())), {"params": [], **options})
        group["params"].append(weight)
    return list(found.values())


class Members:
    """The networks of some seeds, each made right after seeding; called on inputs (members, n, ...)."""

    def __init__(self, make: Callable[[], nn.Module], seeds: Sequence[int]):
        made = [seed_everything(seed) or make() for seed in seeds]
        if next(made[0].buffers(), None) is not None:
            raise LabError("a network with buffers, as of batch normalisation, cannot be stacked")
        stacked = stack_module_state(made)[0]
        self.weights = {n: w.detach().requires_grad_() for n, w in stacked.items()}
        self.first = made[0]
        self.empty = copy.deepcopy(made[0]).to("meta")

    def __call__(self, x: Tensor, weights: Weights | None = None) -> Tensor:
        def one(own, inputs):
            return functional_call(self.empty, own, (inputs,))

        return vmap(one, randomness="different")(weights or self.weights, x)

    @torch.no_grad()
    def score(self, part: Shared, functions, weights=None, rows: int = 256) -> dict[str, Tensor]:
        """Functions (output, target) -> mean of a batch, as means over a part: a number for each member."""
        self.empty.eval()
        totals = dict.fromkeys(functions, 0.0)
        for index in torch.arange(part.count).split(rows):
            x, y = part.take(index[None])
            out = self(x, weights)
            for name, function in functions.items():
                totals[name] = totals[name] + vmap(function)(out, y) * y.shape[1]
        return {name: total / part.count for name, total in totals.items()}


@dataclass
class Fitted:
    """A finished training: members, curves, and the weights at the moments "best" (lowest validation loss), "stop" and "end"."""

    members: Members
    weights: dict[str, Weights]
    when: dict[str, list[int]]  # epoch, or step, of the first two
    stopped: list[bool]  # whether the rule said stop
    lowest: list[float]  # validation losses
    curves: list[list[dict[str, float]]]

    def score(self, part: Part, functions, moment: str = "best") -> list[dict[str, float]]:
        """`Members.score` at a moment: a dictionary for each member."""
        found = self.members.score(shared(part, len(self.curves)), functions, self.weights[moment])
        return [dict(zip(found, map(float, each))) for each in zip(*found.values())]

    def model(self, i: int, moment: str = "best") -> nn.Module:
        """A member as an ordinary network, with its weights at a moment."""
        own = {name: weight[i].clone() for name, weight in self.weights[moment].items()}
        network = copy.deepcopy(self.members.empty)
        network.load_state_dict(own, assign=True)
        return network

    def rows(
        self, metrics: list[dict], sample: Tensor | None = None, points: int = 15
    ) -> list[dict]:
        """What a record keeps of each member: its metrics, at most so many points of its curve, parameters, multiply-adds of a sample."""
        counts = {"parameters": size(self.members.first)}
        if sample is not None:
            counts["macs"] = count_macs(self.members.first, sample)
        curves = [thin(curve, points) for curve in self.curves]
        return [{"metrics": own, "curve": curve} | counts for own, curve in zip(metrics, curves)]


class Shared(NamedTuple):
    """Samples of all members, each different part kept once: (parts, n, ...) twice, and which part is whose, (members, 1)."""

    x: Tensor
    y: Tensor
    whose: Tensor

    @property
    def count(self) -> int:
        return self.y.shape[1]

    def take(self, index: Tensor) -> Part:
        """Inputs and targets of samples (members, batch), or of the same ones (1, batch) for all."""
        return self.x[self.whose, index], self.y[self.whose, index]


def shared(part, members: int) -> Shared:
    """One part (x, y) for all members, or a list with one for each, equal ones named by the same object."""
    each = [part] * members if isinstance(part, tuple) else list(part)
    if len(each) != members:
        raise LabError(
            f"{len(each)} parts for {members} members: give one for all, or one for each"
        )
    unlike = list({id(own): own for own in each}.values())
    if len({own[0].shape for own in unlike}) > 1:
        raise LabError("the members' data have different shapes; train members of equal size only")
    at = {id(own): i for i, own in enumerate(unlike)}
    stacked = [torch.stack([own[i] for own in unlike]) for i in (0, 1)]
    whose = torch.tensor([at[id(own)] for own in each])[:, None]
    return Shared(*stacked, whose)


def parts_of(splits: Sequence[Split]) -> dict[str, list[Part]]:
    """What `fit` takes, of a split for each member."""
    return {name: [getattr(split, name) for split in splits] for name in ("train", "val", "test")}


def draws(count: int, plan: Plan, orders: Sequence[torch.Generator]) -> Iterator[Tensor]:
    """The samples (members, batch) of each step: a member goes through all of them in its own order, again and again."""
    size = min(plan.batch or count, count)
    passes = plan.epochs or math.ceil(plan.steps / (count // size))
    left = plan.steps or math.inf
    for _ in range(passes):
        order = torch.stack([torch.randperm(count, generator=own) for own in orders])
        for index in (order if size < count else order.sort().values).split(size, 1):
            if left > 0 and (plan.epochs or index.shape[1] == size):
                yield index
                left -= 1


def fit(make, parts, plan: Plan, *, seeds, loss, scores=None) -> Fitted:
    """Train a network for each seed; the part "test" is not looked at: call `Fitted.score`.

    Args:
        make: builds a network. parts: "train" and "val", what `shared` takes; without "val" a look is at the training loss.
        loss, scores: (outputs, targets) of a member -> mean, in operations that `torch.func.vmap` maps.
    """
    used = [name for name in parts if name != "test"]
    parts = {name: shared(parts[name], len(seeds)) for name in used}
    members, train = Members(make, seeds), parts["train"]
    each = {"each": plan.each} if plan.each else {}
    optimiser = plan.optimiser(
        groups(members.weights, members.first, plan.lr), **plan.options, **each
    )
    each_epoch = math.ceil(train.count / (plan.batch or train.count))
    steps = plan.steps or plan.epochs * each_epoch
    look_at = _looks(plan, steps)
    kept, curves, total, seen = _Kept(members.weights, plan), [[] for _ in seeds], 0.0, 0
    orders = [torch.Generator().manual_seed(seed) for seed in seeds]
    for now, index in enumerate(draws(train.count, plan, orders), 1):
        optimiser.zero_grad(set_to_none=True)
        members.empty.train()
        x, y = train.take(index)
        values = vmap(loss)(members(x), y)
        values.sum().backward()
        optimiser.step()
        total, seen = total + values.detach() * index.shape[1], seen + index.shape[1]
        if now in look_at:
            if plan.finite and not torch.isfinite(total).all():
                raise LabError(f"a training loss is {total / seen} at step {now}: lower the rate")
            scored = {"loss": loss, **(scores or {})}
            found = members.score(parts["val"], scored) if "val" in parts else {}
            at = {"epoch": now // each_epoch} if plan.epochs else {"step": now}
            for i, curve in enumerate(curves):
                point = at | {"train_loss": float(total[i]) / seen}
                curve.append(point | {f"val_{name}": float(v[i]) for name, v in found.items()})
            mean = total / seen
            kept.offer(found.get("loss", mean), mean, members.weights, *at.values(), now == steps)
            total, seen = 0.0, 0
            if not (kept.running.any() or plan.below):
                break
    end = {name: weight.detach() for name, weight in members.weights.items()}
    moments = kept.weights if look_at else {"best": end, "stop": end}
    stopped = (~kept.running).tolist()
    return Fitted(members, moments | {"end": end}, kept.when, stopped, kept.lowest.tolist(), curves)


def _looks(plan: Plan, steps: int) -> set[int]:
    """The steps after which the validation part is looked at."""
    if isinstance(plan.looks, tuple):
        return {at for at in plan.looks if at < steps} | {steps}
    looks = plan.epochs if plan.looks is None else plan.looks
    return {round(steps * (i + 1) / looks) for i in range(looks)}


class _Kept:
    """The weights of each member at its best look so far, and at the look at which it stopped."""

    def __init__(self, weights: Weights, plan: Plan):
        members = len(next(iter(weights.values())))
        self.patience, self.below = plan.patience or math.inf, plan.below or 0.0
        self.lowest = torch.full((members,), math.inf)
        self.since = torch.zeros(members)  # looks since then
        self.running = torch.ones(members, dtype=torch.bool)
        self.when = {moment: [0] * members for moment in ("best", "stop")}
        self.weights = {m: {n: w.detach().clone() for n, w in weights.items()} for m in self.when}

    def offer(self, losses: Tensor, train: Tensor, weights: Weights, now: int, last: bool) -> None:
        better = self.running & (losses < self.lowest)
        self.lowest = torch.where(better, losses, self.lowest)
        self.since = torch.where(better, 0, self.since + 1)
        tired = (self.since >= self.patience) | (train < self.below)
        for moment, which in (("best", better), ("stop", self.running & (tired | last))):
            for i in which.nonzero().flatten().tolist():
                self.when[moment][i] = now
                for name, value in weights.items():
                    self.weights[moment][name][i] = value.detach()[i]
        self.running &= ~tired
