"""What layers and models cost without a clock: parameters, multiply-adds, entries kept for the backward pass."""

from __future__ import annotations

import itertools
import math
import re

import pandas as pd
import torch
from torch import Tensor, nn

import ndlinear
from ndlinear import cheapest_order, count_parameters

ALL_ORDERS_UP_TO = 4  # modes: 24 orders


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


def costs(input_dims, hidden_size, bias: bool = True) -> pd.DataFrame:
    """Costs per sample of the dense layer and of NdLinear in every order of its modes (N <= 4), else in the notable ones.

    Args:
        input_dims: (D_1, ..., D_N); hidden_size: (H_1, ..., H_N); bias: count the biases among the parameters.

    Returns:
        One row for the dense layer, then the orders by their cost, with the columns ``map``; ``order``, modes counted from 1;
        ``remark``, which names the order as defined, the cheapest and the one that keeps the least; ``parameters``; ``macs``,
        multiply-adds (1 = 2 FLOPs); ``of_dense``, their ratio to the dense layer's; ``saved``, entries kept for the backward pass.
    """
    parameters = count_parameters(input_dims, hidden_size, bias)  # raises on bad shapes
    shapes = tuple(input_dims), tuple(hidden_size)
    inputs, outputs = map(math.prod, shapes)

    def macs(order):
        return ndlinear.count_macs(*shapes, order)

    def saved(order):
        return saved_entries(*shapes, order)

    defined = tuple(range(len(shapes[0])))
    cheapest, leanest = cheapest_order(*shapes), leanest_order(*shapes)
    if macs(cheapest) == macs(defined):
        cheapest = defined  # the layer leaves its order alone when nothing is won
    if saved(leanest) == saved(cheapest):
        leanest = cheapest
    names = {"as defined": defined, "cheapest": cheapest, "keeps least": leanest}
    every = len(defined) <= ALL_ORDERS_UP_TO
    orders = itertools.permutations(defined) if every else dict.fromkeys(names.values())
    dense = inputs * outputs
    rows = [("dense", "", "", dense + bias * outputs, dense, inputs)]
    for order in sorted(orders, key=lambda order: (macs(order), order)):
        text = ", ".join(str(k + 1) for k in order)
        remark = ", ".join(name for name, own in names.items() if own == order)
        rows.append(("NdLinear", text, remark, parameters, macs(order), saved(order)))
    table = pd.DataFrame(rows, columns=["map", "order", "remark", "parameters", "macs", "saved"])
    table.insert(5, "of_dense", table["macs"] / dense)
    return table


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
    """Multiply-adds of one forward pass over ``sample`` (a batch of one), counted on the operations that run; 1 = 2 FLOPs."""
    from torch.utils.flop_counter import FlopCounterMode

    device = next(model.parameters()).device
    with FlopCounterMode(display=False) as counter:
        model.eval()(sample.to(device))
    return counter.get_total_flops() // 2
