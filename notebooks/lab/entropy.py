"""Von Neumann entropy of a representation, with every choice that changes its value as an argument.

A representation is a matrix: one row per sample, one column per unit (further axes are flattened). Its covariance, divided by
its trace, has eigenvalues p that sum to one; the entropy is that of p. It tells how many directions carry the variance:
exp(entropy) is between 1 and the rank.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn


def shares(z: Tensor, *, centre: bool = True, unit_rows: bool = False) -> Tensor:
    """Eigenvalues of the covariance of the rows of ``z`` over their sum, largest first, in float64.

    Args:
        z: (samples, ...) representation; all axes but the first are flattened.
        centre: subtract the mean of every unit first.
        unit_rows: then divide each row by its length, so that every sample weighs the same. Rows of length 0 stay 0.

    Returns:
        min(samples, width) shares; all zero where ``z`` does not vary.
    """
    z = z.detach().reshape(len(z), -1).double()
    if centre:
        z = z - z.mean(0)
    if unit_rows:
        lengths = z.norm(dim=1, keepdim=True)
        z = z / torch.where(lengths > 0, lengths, 1.0)
    # both have the same non-zero eigenvalues; the smaller one
    gram = z @ z.T if len(z) < z.shape[1] else z.T @ z
    power = torch.linalg.eigvalsh(gram).clamp_min(0).flip(0)
    return power / power.sum() if power.sum() > 0 else power


def entropy(
    z: Tensor,
    *,
    centre: bool = True,
    unit_rows: bool = False,
    normaliser: str = "none",
    base: float = math.e,
) -> float:
    """Von Neumann entropy of a representation (samples, ...).

    Args:
        centre, unit_rows: as in `shares`.
        normaliser: "none", or divide by the logarithm of the width ("log-width"), or of the smaller of samples and width
            ("log-min"). With a logarithm of 1 the entropy is 0 and stays 0.
        base: of the logarithm; it cancels when a normaliser is used.
    """
    p = shares(z, centre=centre, unit_rows=unit_rows)
    value = float(torch.special.entr(p).sum()) / math.log(base)  # 0 log 0 = 0
    if normaliser == "none":
        return value
    width = z[0].numel()
    size = {"log-width": width, "log-min": min(len(z), width)}[normaliser]
    return value / math.log(size, base) if size > 1 else 0.0


@torch.no_grad()
def layer_entropies(
    model: nn.Module, x: Tensor, kinds: tuple[type, ...], **options
) -> dict[str, float]:
    """Entropy of the output of every module of the given kinds for the batch ``x``, by module name in the order of the calls.

    Modules inside one of these modules are left out (an NdLinear holds nn.Linear modules of its own).
    """
    found: dict[str, float] = {}
    names = {module: name for name, module in model.named_modules() if isinstance(module, kinds)}
    inside = {part for module in names for part in module.modules() if part is not module}

    def note(module, _, out):
        found[names[module]] = entropy(out, **options)

    hooks = [module.register_forward_hook(note) for module in names if module not in inside]
    try:
        model.eval()(x)
    finally:
        for hook in hooks:
            hook.remove()
    return found
