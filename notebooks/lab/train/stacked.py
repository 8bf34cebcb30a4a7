"""What `chunked.fit` returns: the weights of all members of a training, stacked along a new first axis."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from ..modes import LabError


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
