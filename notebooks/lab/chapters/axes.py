"""Chapter 34: when do axes matter? Tables of many kinds, one small network, its axes in place or lost, and what tells it before.

A case is a table of two or three axes. All cases of a set get the same treatment: entries standardised one by one, then laid
out "in place", "permuted" (one permutation of all entries, drawn for each seed) or "refolded" (read in another order).
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence

import numpy as np
import pandas as pd
import scipy.integrate
import scipy.optimize
import scipy.signal
import torch
from scipy.special import stdtrit
from torch import Tensor, nn
from torch.nn import functional as F

from ndlinear import NdLinear, NdLinearSum, kronecker_weight
from ndlinear_guide import layers

from ..data.with_axes import (  # noqa: F401  (the notebooks call some of them by this module)
    CLIP,
    Table,
    clipped,
    letters,
    pictures,
    scaling,
    tables,
    teacher,
    tensor,
    tokens,
    turned,
)
from ..page import figures
from ..stats import Pooled, at_best_rates, over_cuts, pooled
from ..train import Split, many

MOST = 2000  # training cases of the largest sample
BATCH = 64
HIDDEN = {2: (16, 16), 3: (4, 8, 8)}  # axes of a case -> axes of both hidden layers
SIZES = ("small", "middle", "large")
RANK = 16  # of the low-rank layers


OPENED = {  # name -> (what it is, data set)
    "digits": ("digits, 8×8 pixels", "digits"),
    "cifar10 grey": ("CIFAR-10, 16×16 pixels", "cifar10"),
    "cifar10 colour": ("CIFAR-10, 3 colours×8×8", "cifar10"),
    "cifar10 patches": ("CIFAR-10, 16 patches×48", "cifar10"),
    "cifar100 grey": ("CIFAR-100, 16×16 pixels", "cifar100"),
    "racketsports": ("RacketSports, 30 times×6 sensors", "racketsports"),
    "heartbeat": ("Heartbeat, 27 times×61 frequencies", "heartbeat"),
    "ecg5000 spectra": ("ECG5000, 19 times×17 frequencies", "ecg5000"),
    "chlorineconcentration spectra": ("Chlorine, 23 times×17 frequencies", "chlorineconcentration"),
    "ettm1": ("ETTm1, 24 times×7 sensors", "ettm1"),
    "sst2": ("SST-2, 16 tokens×32 features", "sst2"),
    "letters": ("novels, 27×27 letter pairs", "novels"),
    "breast-cancer": ("breast cancer, 3 statistics×10", "breast-cancer"),
}
FRESH = {
    "japanesevowels": ("JapaneseVowels, 25 times×12", "japanesevowels"),
    "cifar100 colour": ("CIFAR-100, 3 colours×8×8", "cifar100"),
    "ecgfivedays spectra": ("ECGFiveDays, 18 times×17 frequencies", "ecgfivedays"),
    "osuleaf spectra": ("OSULeaf, 25 times×17 frequencies", "osuleaf"),
    "etth2": ("ETTh2, 24 times×7 sensors", "etth2"),
    "ettm2": ("ETTm2, 24 times×7 sensors", "ettm2"),
    "cola": ("CoLA, 16 tokens×32 features", "cola"),
}
TEACHERS = {f"teacher {terms}": terms for terms in (1, 2, 4, 8, 0)}


# ------------------------------------------------------------------------------------------------------- samples and orders
def parts_of(count: int, size: str) -> tuple[int, int, int]:
    """Training, validation and test cases of a sample drawn from ``count`` cases.

    The large sample has 60 % of them, at most 2,000; the others are a quarter and a sixteenth of 2,000, or where there are
    fewer, a half and a quarter.
    """
    large = min(MOST, int(0.6 * count))
    smaller = {"large": 1, "middle": 4, "small": 16}
    if large < MOST:
        smaller = {"large": 1, "middle": 2, "small": 4}
    return large // smaller[size], min(500, count // 5), min(1000, count // 5)


def refold(shape: Sequence[int]) -> np.ndarray:
    """Where each entry comes from when a table is read in another order and laid out in its old shape: flat indices.

    Column-major order; a square n x n, whose axes that would only exchange, is read block by block.
    """
    index = np.arange(math.prod(shape)).reshape(shape)
    if len(shape) == 2 and shape[0] == shape[1]:
        n = shape[0]
        high = next((k for k in range(math.isqrt(n), 1, -1) if n % k == 0), 1)
        if high == 1:
            return index.T.flatten()
        return index.reshape(n // high, high, high, n // high).transpose(0, 2, 1, 3).flatten()
    return index.transpose(*reversed(range(len(shape)))).flatten()


def places(shape: Sequence[int], order: str, seed: int) -> np.ndarray:
    """Flat indices of where each entry of a case comes from, in one of three orders."""
    size = math.prod(shape)
    if order == "permuted":
        return np.random.default_rng(34_000 + seed).permutation(size)
    return refold(shape) if order == "refolded" else np.arange(size)


def sample(table: Table, size: str, order: str, seed: int) -> Split:
    """A random sample, flat: entries standardised by its training part, cut off at 5, and moved as the order says.

    Real targets are standardised likewise. The same seed draws the same cases in every order.
    """
    counts = parts_of(len(table.x), size)
    drawn = np.random.default_rng(seed).permutation(len(table.x))[: sum(counts)]
    chosen = np.split(drawn, np.cumsum(counts)[:-1])
    x = table.x.reshape(len(table.x), -1)[:, places(table.x.shape[1:], order, seed)]
    scale, y = scaling(x[chosen[0]]), table.y
    if y.ndim == 2:
        rescale = scaling(y[chosen[0]])
        return Split(*[(clipped(scale(x[i])), tensor(rescale(y[i]))) for i in chosen])
    y = np.unique(y, return_inverse=True)[1]
    return Split(*[(clipped(scale(x[i])), torch.from_numpy(y[i]).long()) for i in chosen])


# --------------------------------------------------------------------------------------------------------------- networks
def layer(arm: str, shape: Sequence[int], hidden: Sequence[int]) -> nn.Module:
    """A layer on flat cases: "ndlinear", "monarch" (first axis, the rest), "low-rank" of rank 16, "dense"."""
    if arm == "ndlinear":
        kept = NdLinear(tuple(shape), tuple(hidden), init="unit")
        return nn.Sequential(nn.Unflatten(-1, tuple(shape)), kept, nn.Flatten(-len(hidden)))
    inputs, outputs = math.prod(shape), math.prod(hidden)
    if arm == "monarch":
        folds = [(sizes[0], math.prod(sizes[1:])) for sizes in (shape, hidden)]
        return layers.BlockTensorTrain(*folds)
    return (
        layers.LowRank(inputs, outputs, RANK)
        if arm == "low-rank"
        else layers.Dense(inputs, outputs)
    )


def network(arm: str, shape: Sequence[int], outputs: int) -> nn.Sequential:
    """Two hidden layers of one kind with ReLU, 256 hidden numbers each, and a dense read-out.

    "dense-params": dense and as wide as NdLinear's number of parameters allows.
    """
    hidden = HIDDEN[len(shape)]
    if arm == "dense-params":
        hidden, arm = (narrow(tuple(shape), outputs),), "dense"
    width = math.prod(hidden)
    body = [layer(arm, shape, hidden), nn.ReLU(), layer(arm, hidden, hidden), nn.ReLU()]
    return nn.Sequential(*body, layers.Dense(width, outputs))


def size_of(model: nn.Module) -> int:
    """Numbers that are trained."""
    return sum(p.numel() for p in model.parameters())


@functools.cache
def narrow(shape: tuple[int, ...], outputs: int) -> int:
    """The width of a dense network with at most as many parameters as the NdLinear network; at least one."""
    with torch.random.fork_rng():
        most = size_of(network("ndlinear", shape, outputs))
    return max(1, layers.narrow(math.prod(shape), outputs, most, hidden=2))


def train(configs: list[dict], table: Table) -> list[dict]:
    """All seeds of a configuration at once: data, size, order, arm, lr, steps. The epoch is chosen on the validation part."""
    c, seeds = configs[0], [config["seed"] for config in configs]
    splits = [sample(table, c["size"], c["order"], seed) for seed in seeds]
    samples = len(splits[0].train[0])
    each_epoch = math.ceil(samples / BATCH)
    epochs = max(1, round(c["steps"] / each_epoch))
    real = table.y.ndim == 2
    outputs = table.y.shape[1] if real else len(np.unique(table.y))
    loss = F.mse_loss if real else F.cross_entropy
    make = functools.partial(network, c["arm"], table.x.shape[1:], outputs)
    every = each_epoch * max(1, epochs // 12)
    looks = tuple(range(every, epochs * each_epoch, every))
    plan = many.Plan(epochs=epochs, batch=BATCH, lr=c["lr"], looks=looks)
    parts = many.parts_of(splits)
    fitted = many.fit(make, parts, plan, seeds=seeds, loss=loss)
    watched = fitted.score(parts["val"], {"val_loss": loss})
    tested = fitted.score(parts["test"], {"test_loss": loss})
    facts = {"samples": samples, "tested": len(splits[0].test[0]), "pool": len(table.x)}
    cost = {"parameters": size_of(make())}
    return [{"metrics": w | t | facts, **cost} for w, t in zip(watched, tested)]


# -------------------------------------------------------------------------------------------------------- what is judged
def at_best_rate(found: pd.DataFrame) -> pd.DataFrame:
    """Of each set, size, order and kind of layer the runs at the rate of the lowest mean log validation loss over all seeds."""
    return at_best_rates(found, ["data", "size", "order", "arm"], "val_loss", logs=True)


def log_ratios(own: pd.DataFrame, by: str, one: str, other: str) -> pd.DataFrame:
    """ln(test loss of one / of the other) of what stands in the column ``by``: a row for each set, size and seed."""
    keys = ["data", "size", "seed", "samples", "tested", "pool"]
    wide = np.log(own.pivot(index=keys, columns=by, values="test_loss"))
    return (wide[one] - wide[other]).rename("gain").reset_index()


def gains(chosen: pd.DataFrame, order: str = "permuted") -> pd.DataFrame:
    """`log_ratios` of NdLinear in another order over in place."""
    return log_ratios(chosen[chosen["arm"] == "ndlinear"], "order", order, "in place")


def ratios(chosen: pd.DataFrame, arm: str) -> pd.DataFrame:
    """`log_ratios` of another kind of layer over NdLinear, both in place."""
    return log_ratios(chosen[chosen["order"] == "in place"], "arm", arm, "ndlinear")


def effects(found: pd.DataFrame) -> pd.DataFrame:
    """Per set the mean gain over its sizes, with the interval for random cuts of the same cases and its standard error."""
    rows = []
    for data, own in found.groupby("data", sort=False):
        each = own.groupby("seed")["gain"].mean()
        tested, pool = own["tested"].iloc[0], own["pool"].iloc[0]
        mean, low, high = over_cuts(each, trained_on=pool - tested, tested_on=tested)
        error = (high - mean) / float(stdtrit(len(each) - 1, 0.975))
        rows.append({"data": data, "gain": mean, "low": low, "high": high, "error": error})
    return pd.DataFrame(rows)


def over_all(found: pd.DataFrame) -> Pooled:
    """The pooled mean of what `gains` or `ratios` hold."""
    each = effects(found)
    return pooled(each["gain"], each["error"])


PREDICTORS = ["axis gain in place", "label gain in place", "share_gain", "kernel_gain"]


def ranked(looks: pd.DataFrame, measured: pd.DataFrame) -> pd.DataFrame:
    """Each predictor's rank correlation with the measured `effects`, one-sided p beside; highest first."""
    means = looks.groupby("data")[PREDICTORS].mean().loc[measured["data"]]
    rows = [(name, *rank_correlation(means[name], measured["gain"])) for name in PREDICTORS]
    table = pd.DataFrame(rows, columns=["predictor", "correlation", "p"])
    return table.sort_values("correlation", ascending=False, ignore_index=True)


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


def left_out_error(kernel: Tensor, y: Tensor) -> float:
    """Mean squared error of kernel ridge regression on each case left out, at the best of eleven ridges: targets (n, q)."""
    values, basis = torch.linalg.eigh(kernel)
    rotated = basis.T @ y
    scale = values.clamp_min(0).mean()
    found = []
    for ridge in torch.logspace(-5, 5, 11, dtype=kernel.dtype):
        shrink = 1 / (values.clamp_min(0) + ridge * scale)
        residual = (basis @ (shrink[:, None] * rotated)) / (basis.square() @ shrink)[:, None]
        found.append(residual.square().mean().item())
    return min(found)


def targets(y: Tensor) -> Tensor:
    """Centred real targets (n, q), of classes their indicators."""
    real = y.double() if y.is_floating_point() else F.one_hot(y).double()
    return real - real.mean(0)


def kernel_gain(x: Tensor, moved: Tensor, y: Tensor, draws: int = 64) -> float:
    """ln(error of kernel regression on moved entries / in place), each with its own ridge, by leaving cases out."""
    errors = [left_out_error(axis_kernel(part, part, draws), y) for part in (moved, x)]
    return math.log(errors[0] / errors[1])


def share_gain(x: Tensor, moved: Tensor, y: Tensor) -> float:
    """ln of how much larger the first Kronecker term's share of the covariance of inputs and targets is in place than moved.

    For each target the covariance is a table over the axes; its first term is that of the largest singular value (the first
    axis against the others).
    """
    shares = []
    for part in (x, moved):
        seen = torch.tensordot(y.T, part.double(), 1).flatten(2)  # (q, D_1, rest)
        shares.append(torch.linalg.matrix_norm(seen, 2).square().sum() / seen.square().sum())
    return math.log(shares[0] / shares[1])


def seen_before(table: Table, seed: int, most: int = 400) -> tuple[Tensor, Tensor, Tensor]:
    """What the predictors may look at: at most 400 cases of the large training sample in place, the same moved, and targets."""
    shape = table.x.shape[1:]
    x, y = sample(table, "large", "in place", seed).train
    moved = sample(table, "large", "permuted", seed).train[0]
    x, moved = [part[:most].double().unflatten(1, shape) for part in (x, moved)]
    return x, moved, targets(y[:most])


def rank_correlation(a, b) -> tuple[float, float]:
    """Spearman's correlation and its one-sided p-value over all orders of at most eight pairs (else 100,000 random ones)."""
    a, b = [pd.Series(list(v)).rank().to_numpy() for v in (a, b)]
    a, b = [(v - v.mean()) / np.sqrt(np.square(v - v.mean()).sum()) for v in (a, b)]
    seen = float(a @ b)
    if len(a) <= 8:
        orders = np.array(list(itertools.permutations(range(len(a)))))
    else:
        draw = np.random.default_rng(0)
        orders = np.stack([draw.permutation(len(a)) for _ in range(100_000)])
    return seen, float((b[orders] @ a >= seen - 1e-12).mean())


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


def fit_outer(target: Tensor, starts: int, steps: int = 2000, rate: float = 0.02) -> Tensor:
    """Relative errors of outer products trained with Adam on a tensor, one for each random start."""
    scale = target.norm()
    factors = [
        (0.3 * torch.randn(starts, d, dtype=target.dtype)).requires_grad_() for d in target.shape
    ]
    adam = torch.optim.Adam(factors, lr=rate)
    goal = target / scale
    for step in range(steps):
        adam.param_groups[0]["lr"] = rate * (1 - step / steps)
        adam.zero_grad()
        made = factors[0]
        for factor in factors[1:]:
            made = made.unsqueeze(-1) * factor.reshape(starts, *[1] * (made.ndim - 1), -1)
        losses = (made - goal).flatten(1).square().sum(1)
        losses.sum().backward()
        adam.step()
    return losses.detach().sqrt()


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


# --------------------------------------------------------------------------------------------------------------- figures
def draw_controls(axis, found: pd.DataFrame) -> None:
    """Test loss permuted over in place for the teachers: a mark with its interval for each number of training cases."""
    names = ["teacher 1", "teacher 2", "teacher 4", "teacher 8", "turned"]
    for shift, (samples, own) in zip((-0.2, 0, 0.2), found.groupby("samples")):
        marks = effects(own).set_index("data").loc[names]
        ratio = np.exp(marks[["gain", "low", "high"]])
        look = {"fmt": "os^"[round(5 * shift) + 1], "color": None, "label": f"{samples:,} cases"}
        at = np.arange(len(marks)) + shift
        figures.intervals(axis, at, ratio, "ndlinear", upright=True, **look)
    axis.axhline(1, color="0.5", linewidth=1)
    axis.set(yscale="log", ylabel="error with entries permuted / in place")
    axis.set_xticks(range(len(names)), [name.removeprefix("teacher ") for name in names])
    axis.set_yticks([1, 2, 5, 10, 20], ["1", "2", "5", "10", "20"])
    axis.set_xlabel("Kronecker products in the teacher")


def draw_gains(axis, found: pd.DataFrame) -> None:
    """Gains of the large samples, a row for each set, and below all sets together for each size; percent of the loss."""
    each = effects(found[found["size"] == "large"]).sort_values("gain")
    names = [OPENED[data][0] for data in each["data"]]
    rows = [f"all sets, {size} samples" for size in reversed(SIZES)]
    together = [over_all(found[found["size"] == size])[:3] for size in reversed(SIZES)]
    at = np.arange(len(each)) + len(rows) + 0.5
    gains = 100 * np.expm1(each[["gain", "low", "high"]])
    figures.intervals(axis, at, gains, "dense", ms=4)
    figures.intervals(axis, range(len(rows)), 100 * np.expm1(together), "ndlinear")
    axis.set_yticks([*range(len(rows)), *at], rows + names)
    axis.axvline(0, color="0.5", linewidth=1)
    axis.set_xlim(-15, 40)
    axis.set_xlabel("rise of the test loss with entries permuted, %")
