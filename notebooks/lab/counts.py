"""What layers and models cost without a clock: parameters, multiply-adds, entries kept for the backward pass."""

from __future__ import annotations

import math
import re

import torch
from torch import Tensor, nn


def sizes(text: str) -> tuple[int, ...]:
    """The sizes, or modes, that a configuration or a table writes as text: "64x8x8", "64,8,8" or "64 8 8"."""
    return tuple(int(number) for number in re.split("[x, ]+", text))


def saved_entries(input_dims, hidden_size, order=None) -> int:
    """Entries per sample that autograd keeps when every mode is trained: the inputs of all steps, in the given order."""
    now = list(input_dims)
    total = 0
    for k in range(len(now)) if order is None else order:
        total += math.prod(now)
        now[k] = hidden_size[k]
    return total


def leanest_order(input_dims, hidden_size) -> tuple[int, ...]:
    """The order that keeps the fewest entries for the backward pass: ascending H_k / D_k; ties keep their place."""
    unit = math.lcm(*input_dims)  # exact integers, as in `ndlinear.cheapest_order`
    growth = [unit // d * h for d, h in zip(input_dims, hidden_size)]
    return tuple(sorted(range(len(growth)), key=growth.__getitem__))


def operations(model: nn.Module, sample: Tensor) -> int:
    """Multiply-adds of a forward pass plus five operations for each number that enters a batch norm.

    That is what the counter of the package fvcore books for a network in training mode, one for a multiply-add.
    """
    entered = []
    norms = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    hooks = [
        m.register_forward_hook(lambda _, inputs, __: entered.append(inputs[0].numel()))
        for m in norms
    ]
    macs = count_macs(model, sample)
    for hook in hooks:
        hook.remove()
    return macs + 5 * sum(entered)


@torch.no_grad()
def count_macs(model: nn.Module, sample: Tensor) -> int:
    """Multiply-adds of one forward pass over ``sample`` (a batch of one), counted on the operations that run; 1 = 2 FLOPs. The model is in
    evaluation mode afterwards."""
    from torch.utils.flop_counter import FlopCounterMode

    device = next(model.parameters()).device
    with FlopCounterMode(display=False) as counter:
        model.eval()(sample.to(device))
    return counter.get_total_flops() // 2
