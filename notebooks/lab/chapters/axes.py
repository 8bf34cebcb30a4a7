"""Chapter 34: the kernel of a very wide layer, which term one layer learns, and whether the terms of a sum are real."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np
import scipy.integrate
import scipy.optimize
import torch
from torch import Tensor
from torch.nn import functional as F

from ndlinear import NdLinearSum, kronecker_weight


# --------------------------------------------------------------------------------------------- the kernel of the wide limit
def relu_kernel(a: Tensor, b: Tensor) -> Tensor:
    """E_v[relu(<v, a>) relu(<v, b>)] for Gaussian v: (..., n, d), (..., m, d) -> (..., n, m) (Cho and Saul 2009)."""
    norms = a.norm(dim=-1)[..., :, None] * b.norm(dim=-1)[..., None, :]
    cosine = (a @ b.mT / norms.clamp_min(1e-30)).clamp(-1, 1)
    angle = cosine.arccos()
    return (
        norms * (cosine.square().neg().add(1).sqrt() + (math.pi - angle) * cosine) / (2 * math.pi)
    )


def axis_kernel(x: Tensor, z: Tensor, draws: int = 64, seed: int = 0) -> Tensor:
    """The kernel of one wide NdLinear layer with ReLU: cases (n, D_1, ..., D_N), (m, D_1, ..., D_N) -> (n, m).

    k(X, Z) = E_u[ E_v relu(u X v) relu(u Z v) ]: Gaussian vectors u along all axes but the last are drawn (``draws`` of them),
    the last axis is integrated exactly.
    """
    made = torch.Generator().manual_seed(seed)
    total = torch.zeros(len(x), len(z), dtype=x.dtype)
    for _ in range(draws):
        a, b = x, z
        for size in x.shape[1:-1]:
            u = torch.randn(size, generator=made, dtype=x.dtype)
            a, b = [torch.tensordot(part, u, ([1], [0])) for part in (a, b)]
        total += relu_kernel(a, b)
    return total / draws


# ------------------------------------------------------------------------------------------- which term one layer learns
def outer_loss(sigma: Tensor, weights: Tensor) -> Tensor:
    """Half the squared distance of w_1 o ... o w_N, weights (starts, N, terms), to sum_i sigma_i e_i o ... o e_i: (starts,)."""
    norms = weights.square().sum(2).prod(1)
    return (norms + sigma.square().sum()) / 2 - (sigma * weights.prod(1)).sum(1)


def descend(
    sigma: Tensor, start: Tensor, rate: float, steps: int, adam: bool = False
) -> tuple[Tensor, Tensor]:
    """The term that each start has learned after gradient descent, or Adam, on `outer_loss`, and the loss there."""
    weights = start.clone().requires_grad_()
    rule = (
        torch.optim.Adam([weights], rate, eps=1e-12) if adam else torch.optim.SGD([weights], rate)
    )
    for _ in range(steps):
        rule.zero_grad()
        outer_loss(sigma, weights).sum().backward()
        rule.step()
    weights = weights.detach()
    return (sigma * weights.prod(1)).argmax(1), outer_loss(sigma, weights)


def blow_up(sigma: float, start: Sequence[float]) -> float:
    """When the flow x_k' = sigma * product of the other x explodes (Theorem 34.2)."""
    sizes = np.sort(np.square(np.asarray(start, float)))
    others = sizes[1:] - sizes[0]
    at = math.sqrt(sizes[0])

    def time_from(v):
        return scipy.integrate.quad(
            lambda t: 1 / np.sqrt(np.prod(others + t * t)), v, np.inf, limit=200
        )[0]

    first = time_from(at)
    return (first if np.prod(start) > 0 else 2 * time_from(0.0) - first) / sigma


def first_to_explode(sigma: Tensor, start: Tensor) -> Tensor:
    """The term whose flow explodes first, for each start (starts, N, terms) -> (starts,)."""
    times = [[blow_up(float(s), own[:, i].tolist()) for i, s in enumerate(sigma)] for own in start]
    return torch.tensor(times).argmin(1)


# --------------------------------------------------------------------------------------------- are the terms of a sum real?
def train_sum(target: NdLinearSum, seed: int) -> tuple[NdLinearSum, float]:
    """A sum of as many terms trained to do what ``target`` does, and its relative error on the inputs."""
    torch.manual_seed(seed)
    shape, how = (target.input_dims, target.hidden_size, target.rank), {"dtype": torch.float64}
    model = NdLinearSum(*shape, bias=False, init="unit", **how)
    x = torch.randn(400, *target.input_dims, **how)
    y = target(x).detach()
    limits = {"max_iter": 3000, "tolerance_grad": 1e-13, "tolerance_change": 1e-16}
    rule = torch.optim.LBFGS(model.parameters(), line_search_fn="strong_wolfe", **limits)

    def closure():
        rule.zero_grad()
        loss = (model(x) - y).square().mean() / y.square().mean()
        loss.backward()
        return loss

    rule.step(closure)
    return model, math.sqrt(closure().item())


def matched(one: NdLinearSum, other: NdLinearSum) -> float:
    """The smallest cosine between the terms of two sums, each as a full matrix, in the best order."""
    flat = []
    for model in (one, other):
        found = torch.stack([kronecker_weight(term).detach().flatten() for term in model.terms])
        flat.append(F.normalize(found, dim=1))
    cosines = (flat[0] @ flat[1].T).numpy()
    rows, columns = scipy.optimize.linear_sum_assignment(-cosines)
    return float(cosines[rows, columns].min())


def k_rank(columns: Tensor) -> int:
    """Kruskal's rank of a matrix (n, R): the largest k such that any k of its columns are independent."""
    for k in range(columns.shape[1], 0, -1):
        chosen = itertools.combinations(columns.unbind(1), k)
        if all(torch.linalg.matrix_rank(torch.stack(part), rtol=1e-9) == k for part in chosen):
            return k
    return 0


def kruskal(model: NdLinearSum) -> tuple[int, int]:
    """Both sides of Kruskal's condition for a sum of R terms over N axes: the sum of the k-ranks, and 2R + N - 1."""
    factors = zip(*[[weight.detach().flatten() for weight in term.weights] for term in model.terms])
    ranks = [k_rank(torch.stack(axis, 1)) for axis in factors]
    return sum(ranks), 2 * model.rank + len(ranks) - 1
