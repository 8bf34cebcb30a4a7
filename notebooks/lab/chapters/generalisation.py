"""Chapter 24: what the axes of a data set can buy before anything is trained, and solvers for the two balls."""

from __future__ import annotations

import itertools
import math

import numpy as np
import torch

from ..data import load


# ------------------------------------------------------------------------------------------------------------ two norms
def frobenius(matrices: np.ndarray) -> np.ndarray:
    """(n, D_1, D_2) -> (n,): the square root of the sum of squares, the supremum over the dense unit ball."""
    return np.linalg.norm(matrices, axis=(1, 2))


def spectral(matrices: np.ndarray) -> np.ndarray:
    """(n, D_1, D_2) -> (n,): the largest singular value, the supremum over outer products of unit vectors."""
    return np.linalg.norm(matrices, 2, axis=(1, 2))


# ------------------------------------------------------------------------------------- numbers to look at before training
def weighted_sums(x: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """x (m, D_1, D_2), weights (draws, m) -> (draws, D_1, D_2): sum_i weights[i] x_i."""
    return np.tensordot(weights, x, axes=1)


def centred(x: np.ndarray) -> np.ndarray:
    """Inputs (m, ...) in float64, less their mean."""
    return np.asarray(x, float) - np.mean(x, axis=0, dtype=float)


def axis_gain(x: np.ndarray, draws: int = 200, seed: int = 0) -> float:
    """How many times smaller the complexity of a linear class on inputs (m, D_1, D_2) is if its weights are outer products.

    It is E|S|_Frobenius / E|S|_spectral for S = sum_i s_i (x_i - mean) with random signs s_i, ``draws`` times.
    """
    signs = np.random.default_rng(seed).choice([-1.0, 1.0], (draws, len(x)))
    sums = weighted_sums(centred(x), signs)
    return float(frobenius(sums).mean() / spectral(sums).mean())


def ceiling(x: np.ndarray) -> float:
    """For centred matrices x (m, D_1, D_2): 1/sqrt(share of the energy in the leading direction of the worse axis).

    By Theorem 24.3 it bounds the quotient of root mean squares. The gain, a quotient of means, can exceed it by a factor of at most
    sqrt(2).
    """
    shares = [np.linalg.eigvalsh(c)[-1] / np.trace(c) for c in covariances(x)]
    return 1 / math.sqrt(max(shares))


def covariances(x: np.ndarray) -> list[np.ndarray]:
    """The covariances (D_1, D_1) and (D_2, D_2) along the axes of centred inputs (m, D_1, D_2)."""
    return [np.einsum(axes, x, x) / len(x) for axes in ("nij,nkj->ik", "nij,nik->jk")]


def whiten(x: np.ndarray, floor: float = 0.02) -> np.ndarray:
    """Centred inputs, each axis multiplied by the inverse square root of its covariance (plus ``floor`` times its mean eigenvalue).

    This is a mode-wise map, so outer products stay outer products: it changes the ruler, not the family.
    """
    roots = []
    for covariance in covariances(x):
        values, basis = np.linalg.eigh(covariance)
        scale = 1 / np.sqrt(np.maximum(values, 0) + floor * values.mean())
        roots.append((basis * scale) @ basis.T)
    return roots[0] @ x @ roots[1]


def label_gain(x: np.ndarray, y: np.ndarray, draws: int = 200, seed: int = 0) -> float:
    """Do labels (m,) of inputs (m, D_1, D_2) speak through the axes? Above one: more than shuffled labels do.

    S_y = sum_i (y_i - mean) x_i on whitened axes: its spectral norm over that for shuffled labels, over the same for the Frobenius
    norm.
    """
    x, y = whiten(centred(x)), centred(y)
    rng = np.random.default_rng(seed)
    shuffled = weighted_sums(x, np.stack([rng.permutation(y) for _ in range(draws)]))
    signal = weighted_sums(x, y[None])
    chance = frobenius(shuffled).mean() / spectral(shuffled).mean()
    return float(spectral(signal)[0] / frobenius(signal)[0] * chance)


# ------------------------------------------------------------------------------------------------------ tasks of the chapter
FLAG = 1.1  # from this label gain on, the number says that the axes help


def real_inputs(case: str) -> tuple[np.ndarray, np.ndarray]:
    """Inputs (n, D_1, D_2) and two-valued labels of a named task on real data."""
    name, _, form = case.partition(" ")
    if name == "digits,":
        data = load("digits")
        return data.x, data.y % 2 == 0 if form == "even" else data.y == int(form)
    if name == "heartbeat":
        data = load("ecg5000")
        columns = int(form.strip("()").split(", ")[1])
        series = data.x.reshape(len(data.x), -1)
        whole = series.shape[1] // columns * columns
        return series[:, :whole].reshape(len(series), -1, columns), data.y == 0
    data = load("cifar10")
    x, y = data.x[:6000] / 255.0, data.y[:6000]
    animal = (y >= 2) & (y <= 7)
    if form == "(16, 16)":
        return x.mean(1).reshape(-1, 16, 2, 16, 2).mean((2, 4)), animal
    if form == "patch (8, 8)":
        return x.mean(1)[:, 12:20, 12:20], animal
    return x.reshape(-1, 3, 16, 2, 16, 2).mean((3, 5)).reshape(-1, 3, 256), animal


def made_up_inputs(case: str, count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Gaussian inputs (count, 16, 16), white or smooth, labelled by the sign of a target of some terms, with noise."""
    _, texture, terms = case.split(", ")
    rng = np.random.default_rng(seed)
    x, number = rng.standard_normal((count, 16, 16)), int(terms.split()[0])
    if texture == "smooth":
        fall = np.arange(1.0, 17.0) ** -0.7
        x = x * fall[:, None] * fall
    target = np.einsum("ri,rj->ij", *rng.standard_normal((2, number, 16)))
    score = np.einsum("nij,ij->n", x, target)
    return x, score / score.std() + 0.5 * rng.standard_normal(count) > 0


def task(case: str, order: str, samples: int, seed: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Training, validation and test part (x, y) of a task: x centred and scaled by the training part, y is -1 or 1.

    order: "own" or "shuffled", all entries of all samples permuted alike. The test part has 1,000 samples or what is left.
    """
    if case.startswith("made up"):
        x, label = made_up_inputs(case, 2 * samples + 1000, seed)
    else:
        x, label = real_inputs(case)
    rng, samples = np.random.default_rng(seed), min(samples, len(x) // 3)
    chosen, flat = rng.permutation(len(x)), np.asarray(x, float).reshape(len(x), -1)
    if order == "shuffled":
        flat = flat[:, rng.permutation(flat.shape[1])]
    x, y = flat.reshape(x.shape), np.where(label, 1.0, -1.0)
    mean = x[chosen[:samples]].mean(0)
    scale = math.sqrt(np.square(x[chosen[:samples]] - mean).sum((1, 2)).mean())
    cuts = (0, samples, 2 * samples, 2 * samples + 1000)
    return [
        ((x[i] - mean) / scale, y[i]) for i in (chosen[a:b] for a, b in itertools.pairwise(cuts))
    ]


# ------------------------------------------------------------------------------------------------------ solvers of the chapter
def ridge_path(x: np.ndarray, y: np.ndarray, penalties) -> list[np.ndarray]:
    """argmin |y - <K, x>|^2 / 2m + penalty |K|_F^2 / 2 for each penalty; x (m, D_1, D_2)."""
    flat = x.reshape(len(x), -1)
    values, basis = np.linalg.eigh(flat.T @ flat / len(x))
    target, kept = basis.T @ (flat.T @ y / len(x)), np.maximum(values, 0)
    return [(basis @ (target / (kept + p))).reshape(x.shape[1:]) for p in penalties]


def shrink(K: np.ndarray, by: float) -> np.ndarray:
    """The matrix with its singular values lowered by ``by``, at least zero."""
    U, s, V = np.linalg.svd(K, full_matrices=False)
    return (U * np.maximum(s - by, 0)) @ V


def accelerated(K: np.ndarray, step, steps: int) -> np.ndarray:
    """Iterates K <- step(point ahead of K) with momentum that restarts when it overshoots (FISTA)."""
    ahead, momentum = K, 1.0
    for _ in range(steps):
        new = step(ahead)
        if ((new - K) * (ahead - new)).sum() > 0:
            momentum = 1.0
        faster = (1 + math.sqrt(1 + 4 * momentum**2)) / 2
        ahead, K, momentum = new + (momentum - 1) / faster * (new - K), new, faster
    return K


def nuclear_path(x: np.ndarray, y: np.ndarray, penalties, steps: int = 300) -> list[np.ndarray]:
    """argmin |y - <K, x>|^2 / 2m + penalty |K|_* for each penalty in falling order, each started from the one before."""
    flat = x.reshape(len(x), -1)
    gram, target = flat.T @ flat / len(x), flat.T @ y / len(x)
    rate, K, path = 1 / np.linalg.eigvalsh(gram)[-1], np.zeros(x.shape[1:]), []
    for penalty in penalties:

        def step(ahead, penalty=penalty):
            slope = (gram @ ahead.ravel() - target).reshape(ahead.shape)
            return shrink(ahead - rate * slope, rate * penalty)

        K = accelerated(K, step, steps)
        path.append(K)
    return path


def nuclear_softmax(x: np.ndarray, y: np.ndarray, penalty: float, steps: int):
    """argmin cross-entropy + penalty |R(weight)|_* for inputs (m, D_1, D_2): the rearranged weight (classes D_1, D_2) and bias."""
    classes, (m, rows, columns) = int(y.max()) + 1, x.shape
    flat, hot = np.hstack([x.reshape(m, -1), np.ones((m, 1))]), np.eye(classes)[y]
    rate = 2 / np.linalg.eigvalsh(flat.T @ flat / m)[-1]  # the softmax has curvature at most 1/2

    def parts(state):
        return state[:, :-1].reshape(classes * rows, columns), state[:, -1:]

    def step(ahead):
        scores = flat @ ahead.T
        odds = np.exp(scores - scores.max(1, keepdims=True))
        off = (odds / odds.sum(1, keepdims=True) - hot) / m
        K, bias = parts(ahead - rate * (off.T @ flat))
        return np.hstack([shrink(K, rate * penalty).reshape(classes, -1), bias])

    K, bias = parts(accelerated(np.zeros((classes, rows * columns + 1)), step, steps))
    return K, bias[:, 0]


def descend(parameters, objective, *, optimiser=torch.optim.Adam, steps: int, lr=0.03, **options):
    """Full-batch descent on ``objective()`` with a rate that falls to zero as a cosine."""
    rule = optimiser(parameters, lr=lr, **options)
    fade = torch.optim.lr_scheduler.CosineAnnealingLR(rule, steps)
    for _ in range(steps):
        rule.zero_grad()
        objective().backward()
        rule.step()
        fade.step()
