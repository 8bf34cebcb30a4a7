"""Chapter 24: what the axes of a data set can buy before anything is trained, and a bound for networks that keep axes.

    from lab.chapters import generalisation
    generalisation.axis_gain(x)        # x (m, D_1, ..., D_N): how many times smaller the complexity of the rank-one class is
    generalisation.label_gain(x, y)    # do the labels speak through the axes more than shuffled labels do?
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from ndlinear import NdLinear


# ------------------------------------------------------------------------------------------------------------ two norms
def frobenius(tensors: np.ndarray) -> np.ndarray:
    """(n, D_1, ..., D_N) -> (n,): the square root of the sum of squares, the supremum over the dense unit ball."""
    return np.sqrt(np.square(tensors).reshape(len(tensors), -1).sum(1))


def spectral(tensors: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(n, D_1, ..., D_N) -> (lower, upper), each (n,): bounds of the largest <w_1 o ... o w_N, T> over unit vectors w_k.

    N = 1: the Euclidean norm. N = 2: the largest singular value; the two bounds are equal. N > 2, where the value is NP-hard in
    general: alternating maximisation from the leading singular vectors, and the smallest spectral norm of an unfolding.
    """
    if tensors.ndim == 2:
        return (frobenius(tensors),) * 2
    if tensors.ndim == 3:
        return (np.linalg.svd(tensors, compute_uv=False)[:, 0],) * 2
    unfolded = [_unfold(tensors, k) for k in range(tensors.ndim - 1)]
    grams = [u @ u.transpose(0, 2, 1) for u in unfolded]
    upper = np.min([np.sqrt(np.linalg.eigvalsh(g)[:, -1]) for g in grams], axis=0)
    vectors = [np.linalg.eigh(g)[1][:, :, -1] for g in grams]
    return np.minimum(_alternating(tensors, vectors), upper), upper


def _unfold(tensors: np.ndarray, k: int) -> np.ndarray:
    """(n, D_1, ..., D_N) -> (n, D_k, product of the other sizes)."""
    moved = np.moveaxis(tensors, k + 1, 1)
    return moved.reshape(*moved.shape[:2], -1)


def _alternating(tensors: np.ndarray, vectors: list[np.ndarray], sweeps: int = 30) -> np.ndarray:
    """The value reached by setting one vector after the other to the best one given the rest."""
    for _ in range(sweeps):
        for k in range(len(vectors)):
            best = _contract(tensors, vectors, k)
            norms = np.linalg.norm(best, axis=1)
            vectors[k] = best / np.maximum(norms, 1e-300)[:, None]
    return norms


def _contract(tensors: np.ndarray, vectors: list[np.ndarray], skip: int) -> np.ndarray:
    """(n, D_skip): the tensors contracted with all vectors but one."""
    for k in reversed(range(len(vectors))):
        if k != skip:
            moved = np.moveaxis(tensors, k + 1, -1)
            tensors = np.einsum("n...d,nd->n...", moved, vectors[k])
    return tensors


# ------------------------------------------------------------------------------------- numbers to look at before training
class Gain(NamedTuple):
    """A ratio, its 95 % interval over the draws, and what it cannot exceed (nan where no bound is known)."""

    gain: float
    low: float
    high: float
    ceiling: float


def weighted_sums(x: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """x (m, D_1, ..., D_N), weights (draws, m) -> (draws, D_1, ..., D_N): sum_i weights[i] x_i."""
    return np.tensordot(weights, x, axes=1)


def ratio(above: np.ndarray, below: np.ndarray) -> tuple[float, float, float]:
    """mean(above) / mean(below) for paired draws, with its 95 % interval by linearisation."""
    value = above.mean() / below.mean()
    error = (above - value * below) / below.mean()
    half = 1.96 * error.std(ddof=1) / math.sqrt(len(error))
    return float(value), float(value - half), float(value + half)


def axis_gain(x: np.ndarray, draws: int = 200, seed: int = 0) -> Gain:
    """How many times smaller the complexity of a linear class is on these inputs if its weights are outer products over the axes.

    It is E|S|_Frobenius / E|S|_spectral for S = sum_i s_i (x_i - mean) with random signs s_i: the empirical Rademacher
    complexity of all weights of norm at most B over that of the outer products w_1 o ... o w_N of norm at most B, for every B.
    One means that the axes buy nothing. No labels are used: a class that is n times simpler helps only if it also fits.

    Args:
        x: inputs (m, D_1, ..., D_N), any real dtype; they are centred first.
        draws: sign patterns; the interval is over them. seed: of the signs.

    Returns:
        gain, low, high, and the ceiling that Theorem 24.3 reads off the covariances along the two axes. For N > 2 the gain comes
        from a lower bound of the norm, so it may be too high; low comes from an upper bound, and there is no such ceiling.
    """
    x = np.asarray(x, float) - np.mean(x, axis=0, dtype=float)
    signs = np.random.default_rng(seed).choice([-1.0, 1.0], (draws, len(x)))
    sums = weighted_sums(x, signs)
    lower, upper = spectral(sums)
    value, low, high = ratio(frobenius(sums), lower)
    if x.ndim > 3:
        low = ratio(frobenius(sums), upper)[1]
    return Gain(value, low, high, ceiling(x) if x.ndim == 3 else math.nan)


def ceiling(x: np.ndarray) -> float:
    """For centred matrices x (m, D_1, D_2): 1/sqrt(share of the energy in the leading direction of the worse axis)."""
    shares = [np.linalg.eigvalsh(c)[-1] / np.trace(c) for c in covariances(x)]
    return 1 / math.sqrt(max(shares))


def covariances(x: np.ndarray) -> list[np.ndarray]:
    """The covariance along each axis of centred inputs (m, D_1, ..., D_N): N matrices (D_k, D_k), averaged over the rest."""
    unfolded = [_unfold(x, k) for k in range(x.ndim - 1)]
    return [np.einsum("nij,nkj->ik", u, u) / len(x) for u in unfolded]


def whiten(x: np.ndarray, floor: float = 0.02) -> np.ndarray:
    """Centred inputs, each axis multiplied by the inverse square root of its covariance (plus ``floor`` times its mean eigenvalue).

    This is a mode-wise map, so outer products stay outer products: it changes the ruler, not the family.
    """
    for k, covariance in enumerate(covariances(x)):
        values, basis = np.linalg.eigh(covariance)
        scale = 1 / np.sqrt(np.maximum(values, 0) + floor * values.mean())
        x = np.moveaxis(np.moveaxis(x, k + 1, -1) @ ((basis * scale) @ basis.T), -1, k + 1)
    return x


def label_gain(x: np.ndarray, y: np.ndarray, draws: int = 200, seed: int = 0) -> Gain:
    """Do the labels of these inputs speak through the axes? Above one: more than shuffled labels do.

    S_y = sum_i (y_i - mean) x_i on axes that were whitened one by one. The signal of the labels over that of shuffled labels, for the
    rank-one class (spectral norm) over the same for the dense class (Frobenius norm); no ball radius enters.

    Args:
        x: inputs (m, D_1, ..., D_N). y: real or two-valued labels (m,).
        draws: shuffles of the labels; the interval is over them. seed: of the shuffles.
    """
    x = whiten(np.asarray(x, float) - np.mean(x, axis=0, dtype=float))
    y = np.asarray(y, float) - np.mean(y, dtype=float)
    rng = np.random.default_rng(seed)
    shuffled = weighted_sums(x, np.stack([rng.permutation(y) for _ in range(draws)]))
    signal = weighted_sums(x, y[None])
    here = spectral(signal)[0][0] / frobenius(signal)[0]
    value, low, high = ratio(frobenius(shuffled), spectral(shuffled)[0])
    return Gain(float(here * value), float(here * low), float(here * high), math.nan)


# ------------------------------------------------------------------------------------------------------ a bound for networks
class Step(NamedTuple):
    """One matrix of a network: its spectral norm, the norm of its bias as it is added (all places counted), its numbers."""

    weight: float
    bias: float
    numbers: int


def network_steps(model: nn.Sequential) -> list[Step]:
    """The steps of a chain of NdLinear, nn.Linear and parts without parameters, in the order in which they are executed."""
    steps: list[Step] = []
    for part in model:
        if isinstance(part, NdLinear):
            sizes = list(part.input_dims)
            for k in part.order:
                sizes[k] = part.hidden_size[k]
                places = math.prod(sizes) // sizes[k]
                steps.append(_step(part.align_layers[k], places))
        elif isinstance(part, nn.Linear):
            steps.append(_step(part, 1))
        elif next(part.parameters(), None) is not None:
            raise TypeError(f"network_steps knows NdLinear and nn.Linear, not {type(part).__name__}")
    return steps


def _step(layer: nn.Linear, places: int) -> Step:
    weight = torch.linalg.matrix_norm(layer.weight.detach().double(), 2).item()
    bias = 0.0 if layer.bias is None else layer.bias.detach().double().norm().item()
    return Step(weight, math.sqrt(places) * bias, sum(p.numel() for p in layer.parameters()))


def output_radius(steps: list[Step], radius: float) -> float:
    """Lambda: what the output norm cannot exceed for inputs of norm at most ``radius`` (r_j = a_j r_(j-1) + beta_j)."""
    for step in steps:
        radius = step.weight * radius + step.bias
    return radius


def power_of_two(value: float) -> tuple[float, float]:
    """The least power of two that is at least ``value``, and log(4 (i^2 + 1)) for its exponent i: what a free choice costs."""
    exponent = math.ceil(math.log2(value))
    return 2.0**exponent, math.log(4 * (exponent**2 + 1))


def covering_bound(
    steps: list[Step], radius: float, samples: int, lipschitz: float, confidence: float = 0.95
) -> dict[str, float]:
    """Theorem 24.4: how far the mean of a loss in [0, 1] on the training samples can lie below its expectation.

    Args:
        steps: of the trained network; every norm is rounded up to a power of two, and that choice is paid for.
        radius: of the ball of inputs. samples: m. lipschitz: of the loss in the output (Euclidean norm); rounded and paid likewise.

    Returns:
        bound; nats, the logarithm that each parameter costs; least, the bound of a network of this size with lipschitz times
        output radius one, the smallest with which any network can be more than nearly constant.
    """
    rounded, price = [], power_of_two(lipschitz)[1] + math.log(1 / (1 - confidence))
    for step in steps:
        weight, cost = power_of_two(step.weight)
        bias, extra = power_of_two(step.bias) if step.bias else (0.0, 0.0)
        rounded.append(Step(weight, bias, step.numbers))
        price += cost + extra
    reach = output_radius(rounded, radius) * power_of_two(lipschitz)[0]
    numbers = sum(step.numbers for step in steps)
    nats = parameter_nats(len(steps), samples, reach)
    return {
        "bound": 2 / math.sqrt(samples) + math.sqrt((numbers * nats + price) / (2 * samples)),
        "nats": nats,
        "least": least_bound(numbers, len(steps), samples),
    }


def parameter_nats(steps: int, samples: int, reach: float = 1.0) -> float:
    """log(3 M Lambda l sqrt(m)): what one parameter costs at the covering radius 1 / (l sqrt(m))."""
    return math.log(max(3 * steps * reach * math.sqrt(samples), 3))


def least_bound(numbers: int, steps: int, samples: int) -> float:
    """The covering bound of a network of ``numbers`` parameters in ``steps`` matrices with every favour: reach one, no price."""
    return math.sqrt(numbers * parameter_nats(steps, samples) / (2 * samples))


# ---------------------------------------------------------------------------------------------------------- Kronecker terms
def term_values(left: Tensor, right: Tensor) -> Tensor:
    """Singular values of the rearranged weight sum_r left[r] kron right[r]; left (R, ...), right (R, ...)."""
    return torch.linalg.svdvals(left.flatten(1).T @ right.flatten(1))
