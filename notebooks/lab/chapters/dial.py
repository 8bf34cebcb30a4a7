"""Dial-a-bias: targets between a separable and an entangled part of a square input, training, crossing points, decisions.

All components have mean 0 and variance 1 over the inputs and are uncorrelated, so the error of the best constant is known.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..models import size
from ..page.figures import colour, marker
from ..stats import interval
from ..train import loop
from ..train.loop import Split, predict

SIDE = 32
LINEAR = (("row means", "column means"), ("checkerboard",))
ALL = (("row means", "column means", "row variances", "column variances"), ("checkerboard", "xor"))
# reading: (separable components, entangled components), where the entangled masks lie
READINGS = {
    "text": (ALL, "aligned"),
    "text-scrambled": (ALL, "scrambled"),
    "text-local": (ALL, "local"),
    "linear": (LINEAR, "aligned"),
    "linear-scrambled": (LINEAR, "scrambled"),
}


# ----------------------------------------------------------------------------------- the components
def inputs(count: int, seed: int, side: int = SIDE) -> Tensor:
    """(count, side, side) of independent numbers, uniform on [0, 1]."""
    return torch.rand(count, side, side, generator=torch.Generator().manual_seed(seed))


def wave(side: int = SIDE) -> Tensor:
    """One period of a cosine: how much each row, or column, counts."""
    return torch.cos(math.tau * torch.arange(side) / side)


def variance_of_variance(count: int) -> float:
    """Variance of the (biased) variance of ``count`` uniform numbers on [0, 1]."""
    return (count - 1) ** 2 / count**3 / 80 - (count - 1) * (count - 3) / count**3 / 144


def masks(where: str = "aligned", side: int = SIDE) -> dict[str, Tensor]:
    """The (side, side) weights of the linear functions inside the components.

    ``where="scrambled"`` moves the places of the three entangled masks by one fixed permutation;
    for independent inputs that changes nothing but how the masks lie with respect to the axes.
    """
    place = torch.arange(side)
    one, c, sign = torch.ones(side), wave(side), (-1.0) ** place
    h = torch.where(place < side // 2, 1.0, -1.0)
    entangled = {
        "checkerboard": torch.outer(sign, sign),
        "rows": torch.outer(h, one),
        "columns": torch.outer(one, h),
    }
    if where == "scrambled":
        order = torch.randperm(side * side, generator=torch.Generator().manual_seed(0))
        entangled = {
            name: mask.flatten()[order].reshape(side, side) for name, mask in entangled.items()
        }
    return {"row means": torch.outer(c, one), "column means": torch.outer(one, c)} | entangled


def components(x: Tensor, where: str = "aligned") -> dict[str, Tensor]:
    """The six components of inputs (count, side, side): name -> (count,), each with mean 0 and variance 1.

    Row and column means and variances are weighted by `wave` over the rows or columns.
    Checkerboard: the sum of the entries with alternating signs. XOR: +1 if exactly one of two bits
    is set, else -1; "aligned": whether the upper half weighs more than the lower, and the left more
    than the right; "scrambled": the checkerboard and both bits with their places permuted; "local":
    the XOR of the bits [x > 1/2] of diagonal neighbours, summed over all of them, wrapping round.
    """
    side, centred = x.shape[1], x - 0.5
    mask = masks("scrambled" if where == "scrambled" else "aligned", side)
    out = {
        name: (centred * m).sum((1, 2)) / math.sqrt((m**2).sum() / 12) for name, m in mask.items()
    }
    scale = math.sqrt(variance_of_variance(side) * side / 2)
    for name, axis in (("row variances", 2), ("column variances", 1)):
        out[name] = x.var(axis, correction=0) @ wave(side) / scale
    if where == "local":
        sign = centred.sign()
        out["xor"] = -(sign * sign.roll((1, 1), (1, 2))).sum((1, 2)) / side
    else:
        out["xor"] = -out["rows"].sign() * out["columns"].sign()
    return {name: out[name] for part in ALL for name in part}


def weights(reading: str, alpha: float, scale: float = 1.0) -> dict[str, float]:
    """Component -> its factor in (1 - alpha) f_separable + alpha scale f_entangled; each f has variance 1."""
    parts = READINGS[reading][0]
    both = zip((1 - alpha, alpha * scale), parts)
    return {n: f / math.sqrt(len(part)) for f, part in both for n in part if f}


def target(x: Tensor, reading: str, alpha: float, scale: float = 1.0) -> Tensor:
    """The dialled target of inputs (count, side, side): (count, 1); ``scale`` is that of the entangled part."""
    parts, factors = components(x, READINGS[reading][1]), weights(reading, alpha, scale)
    return sum(factor * parts[name] for name, factor in factors.items())[:, None]


def spread(alpha: float) -> float:
    """Variance of the target: the error of the best constant, for every reading."""
    return (1 - alpha) ** 2 + alpha**2


def scaled(x: Tensor) -> Tensor:
    """Inputs as all models get them: mean 0, variance 1."""
    return (x - 0.5) * math.sqrt(12)


def draw(
    reading: str, alpha: float, samples: int, seed: int, tests: int = 10_000, scale: float = 1.0
) -> Split:
    """``samples`` fresh samples, four fifths for training and one for validation; ``tests`` further ones for testing."""
    x = inputs(samples, seed)
    x_test = inputs(tests, seed + 1_000_000)
    y, y_test = (target(part, reading, alpha, scale) for part in (x, x_test))
    at = samples * 4 // 5
    x = scaled(x)
    return Split((x[:at], y[:at]), (x[at:], y[at:]), (scaled(x_test), y_test))


# ----------------------------------------------------------------------------------------- training
def error(model: nn.Module, part: tuple[Tensor, Tensor]) -> float:
    """Mean squared error on a part of the data."""
    return F.mse_loss(predict(model, part[0]), part[1]).item()


def endless(count: int, batch_size: int, seed: int) -> Iterator[Tensor]:
    """Indices of batch after batch, each epoch in a new order; its last, smaller batch comes first."""
    order = torch.Generator().manual_seed(seed)
    while True:
        yield from reversed(loop.batches(count, batch_size, order))


def fit(
    model: nn.Module,
    data: Split,
    *,
    lr: float,
    schedule: str,
    steps: int,
    seed: int,
    batch_size: int = 128,
    checks: int = 25,
) -> tuple[list[dict[str, float]], int]:
    """Train in place by a number of Adam steps, and keep the weights of the look with the lowest validation error.

    Unlike `lab.fit` it counts steps, so that data sets of different sizes get the same work, and lets the rate fall.

    Args:
        schedule: "constant", or "cosine": the rate falls to zero along half a cosine.
        seed: order of the batches; the caller seeds the weights.
        checks: number of looks at the validation part, evenly spaced, the last one after the last step.

    Returns:
        The looks (step, train_mse of the batches since the last look, val_mse), and the step of the best one.
    """
    adam = torch.optim.Adam(model.parameters(), fused=True)
    x, y = data.train
    looks = {round((i + 1) * steps / checks) for i in range(checks)}
    best = loop.Best()
    curve, total, count = [], 0.0, 0
    for now, index in zip(range(1, steps + 1), endless(len(x), batch_size, seed)):
        share = {"constant": 1.0, "cosine": (1 + math.cos(math.pi * (now - 1) / steps)) / 2}
        adam.param_groups[0]["lr"] = lr * share[schedule]
        value = loop.step(model.train(), x[index], y[index], F.mse_loss, adam)
        total += float(value) * len(index)
        count += len(index)
        if now in looks:
            val = error(model, data.val)
            curve.append({"step": now, "train_mse": total / count, "val_mse": val})
            best.offer(val, now, model)
            total, count = 0.0, 0
    best.restore(model)
    return curve, best.when


def ridge(
    data: Split, penalties: Sequence[float] = (1e-6, 1e-3, 1e-2, 1e-1, 1.0, 10.0)
) -> nn.Module:
    """The linear model of least squares with the penalty (times the number of samples) that validates best."""
    from sklearn.linear_model import Ridge

    x, y = (part.flatten(1).double().numpy() for part in data.train)

    def solution(penalty: float) -> nn.Module:
        fit, layer = Ridge(len(x) * penalty).fit(x, y), nn.Linear(x.shape[1], 1)
        layer.weight.data = torch.tensor(fit.coef_).view(1, -1).float()
        layer.bias.data = torch.tensor(fit.intercept_).view(1).float()
        return nn.Sequential(nn.Flatten(), layer)

    return min(map(solution, penalties), key=lambda model: error(model, data.val))


def dense(width: int, rank: int | None = None) -> nn.Sequential:
    """1024 -> width -> width -> one number; with a rank, the two hidden maps are products."""

    def hidden(d: int) -> list[nn.Module]:
        if rank is None:
            return [nn.Linear(d, width), nn.ReLU()]
        return [nn.Linear(d, rank, bias=False), nn.Linear(rank, width), nn.ReLU()]

    return nn.Sequential(nn.Flatten(), *hidden(SIDE**2), *hidden(width), nn.Linear(width, 1))


def chosen(tuning: pd.DataFrame) -> dict[str, tuple[float, str]]:
    """Model -> the rate and the schedule with the lowest geometric mean of its validation errors."""
    how = [tuning[name] for name in ("model", "lr", "schedule")]
    means = np.log(tuning["val_mse"]).groupby(how).mean()
    return {model: means[model].idxmin() for model in means.index.unique("model")}


def trained(build: Callable[[str], nn.Module], c: dict) -> tuple[nn.Module, Split, dict]:
    """Train the model of a configuration on fresh samples: the model, its data, and the row of its record.

    Args:
        build: name of a network -> an untrained one; the name "linear" is `ridge`.
        c: "model", and what `draw` and `fit` take. Of several "starts", on the same data and batches, the one with the lowest
            validation error counts.
    """
    data = draw(c["reading"], c["alpha"], c["samples"], c["seed"], c["tests"], c.get("scale", 1.0))
    how = {key: c[key] for key in ("lr", "schedule", "steps", "batch_size", "seed")}
    tried = []
    for start in range(c.get("starts", 1)):
        loop.seed_everything(1000 * start + c["seed"])
        linear = c["model"] == "linear"
        model = ridge(data) if linear else build(c["model"])
        curve, step = ([], 0) if linear else fit(model, data, **how)
        tried.append((error(model, data.val), step, model, curve))
    val, step, model, curve = min(tried, key=lambda found: found[0])
    metrics = {"val_mse": val, "test_mse": error(model, data.test), "best_step": step}
    return model, data, {"metrics": metrics, "curve": curve, "parameters": size(model)}


def learnt(
    model: nn.Module, x: Tensor, reading: str, alpha: float, scale: float = 1.0
) -> dict[str, float]:
    """Slope of a model's output along each component of the target: 1 if it has all of it, 0 if nothing. ``x`` is `scaled`."""
    parts = components(x / math.sqrt(12) + 0.5, READINGS[reading][1])
    out = predict(model, x)[:, 0]
    out = out - out.mean()
    return {
        name: ((out * parts[name]).mean() / parts[name].square().mean() / factor).item()
        for name, factor in weights(reading, alpha, scale).items()
    }


# ---------------------------------------------------------------------------------- crossing points
def resampled(values: np.ndarray) -> np.ndarray:
    """Bootstrap over seeds: 2,000 means over rows drawn with replacement; (seeds, points) -> (2000, points)."""
    values = np.asarray(values, float)
    rows = np.random.default_rng(0).integers(len(values), size=(2000, len(values)))
    return values[rows].mean(axis=1)


def passes(at: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Where values change their sign, by straight lines."""
    i = np.flatnonzero((values[:-1] < 0) != (values[1:] < 0))
    return at[i] + (at[i + 1] - at[i]) * values[i] / (values[i] - values[i + 1])


def crossing(gaps: pd.DataFrame) -> dict[str, float]:
    """Where the mean of curves, a row per seed and a column per place, passes from below zero to above, by straight lines, with a
    95 % bootstrap interval.

    ``alpha``, ``low`` and ``high`` are nan where the mean, or more than 2.5 % of the resamples, do not cross exactly once, upwards;
    ``once`` is the share of the resamples that do.
    """
    at, curves = gaps.columns.to_numpy(float), gaps.to_numpy(float)

    def upwards(curve) -> float:
        places = passes(at, curve)
        return float(places[0]) if len(places) == 1 and curve[0] < 0 else math.nan

    found = np.array([upwards(curve) for curve in resampled(curves)])
    once = float(np.isfinite(found).mean())
    low, high = np.nanquantile(found, (0.025, 0.975)) if once >= 0.975 else (math.nan, math.nan)
    mean = upwards(curves.mean(axis=0))
    return {"alpha": mean, "low": float(low), "high": float(high), "once": once}


def scale_of_crossing(gaps: pd.Series) -> float:
    """The scale at which log ratios, by rising scale, first pass zero, by straight lines over its logarithm, to two digits; the one
    nearest to zero where they do not."""
    places = passes(np.log(gaps.index.to_numpy(float)), gaps.to_numpy(float))
    return float(f"{math.exp(places[0]):.2g}") if len(places) else float(gaps.abs().idxmin())


def reach(sizes: Sequence[int], errors: Sequence[float], goal: float) -> float:
    """Number of samples from which on the error stays at or below the goal, by straight lines between log size and log error.

    The first size if every error is below the goal, infinity if the last one is above.
    """
    gap = np.log(np.asarray(errors, float) / goal)
    if gap[-1] > 0:
        return math.inf
    places = passes(np.log(sizes), -gap)
    return float(np.exp(places[-1])) if len(places) else float(sizes[0])


def arrivals(errors: pd.DataFrame, goal: float) -> np.ndarray:
    """`reach` of the geometric mean of errors (seeds, sizes), and after it of each bootstrap sample of the seeds."""
    logs = np.log(errors.to_numpy())
    curves = [logs.mean(axis=0), *resampled(logs)]
    return np.array([reach(list(errors.columns), np.exp(curve), goal) for curve in curves])


# ------------------------------------------------------------------------------- runs of evidence 31
# reading: another one with the same target at alpha 0
SHARED = {"linear": "linear-scrambled", "text-scrambled": "text", "text-local": "text"}
PANELS = {  # what a figure calls a reading
    "text": "as the text names the parts",
    "linear": "linear parts alone",
    "linear-scrambled": "linear parts, permuted, rescaled",
}


def of(runs: pd.DataFrame, reading: str) -> pd.DataFrame:
    """The runs of a reading; at alpha 0, where the entangled part is absent, some readings share theirs."""
    shared = (runs["reading"] == SHARED.get(reading, reading)) & (runs["alpha"] == 0)
    return runs[(runs["reading"] == reading) | shared]


def log_ratios(runs: pd.DataFrame, reading: str) -> pd.DataFrame:
    """Logarithm of NdLinear's test error over the dense network's on the same data: one row per seed, one column per alpha."""
    wide = of(runs, reading).pivot(index=["seed", "alpha"], columns="model", values="test_mse")
    return np.log(wide["ndlinear"] / wide["dense"]).dropna().unstack()


def ends(runs: pd.DataFrame) -> pd.DataFrame:
    """Both ends of the dial in each reading that has runs: geometric mean errors, and their ratio with its t interval."""
    rows = []
    for reading in [r for r in READINGS if len(of(runs, r))]:
        logs, found = log_ratios(runs, reading), of(runs, reading)
        for alpha in [a for a in (0, 1) if a in logs and not (a == 0 and reading in SHARED)]:
            at = found[found["alpha"] == alpha]
            errors = np.exp(np.log(at["test_mse"]).groupby(at["model"]).mean())
            two = errors[["ndlinear", "dense"]]
            rows.append((reading, alpha, *two, *np.exp(interval(logs[alpha]))))
    names = ["reading", "alpha", "ndlinear", "dense", "ratio", "ratio_low", "ratio_high"]
    return pd.DataFrame(rows, columns=names)


def along(runs: pd.DataFrame, reading: str) -> pd.DataFrame:
    """Error of NdLinear over that of the dense network at each alpha: geometric mean and 95 % t interval over seeds."""
    gaps = log_ratios(runs, reading)
    spans = np.exp([interval(gaps[alpha]) for alpha in gaps])
    return pd.DataFrame(spans, index=gaps.columns, columns=["ratio", "low", "high"])


def band(axis, runs: pd.DataFrame, reading: str, ends: tuple[float, float], printed: float) -> None:
    """Error of NdLinear over that of the dense network along the dial: every seed, the geometric mean, a band of 95 % t intervals,
    and what the paper prints, a ratio at either end and the place of the crossing."""
    gaps, spans = log_ratios(runs, reading), along(runs, reading)
    at, hue = gaps.columns, {"color": colour("ndlinear")}
    if np.isfinite(spans.to_numpy()).all():
        axis.fill_between(at, spans["low"], spans["high"], alpha=0.3, lw=0, **hue)
    axis.plot(at, spans["ratio"], lw=1.2, **hue)
    axis.plot(at, np.exp(gaps).T, marker("ndlinear"), ms=3, alpha=0.5, **hue)
    axis.plot([0, 1], ends, marker("paper"), color=colour("paper"), markersize=8, linestyle="none")
    axis.axvline(printed, linestyle=":", color=colour("paper"))
    axis.axhline(1, color=colour("constant"), alpha=0.6)
    axis.set(yscale="log", xlabel=f"alpha\n{PANELS[reading]}")


# ------------------------------------------------------------------------------- the number of samples
def by_size(runs: pd.DataFrame, model: str, alpha: float) -> pd.DataFrame:
    """Error over variance: one row per seed, one column per number of samples."""
    found = runs[(runs["model"] == model) & (runs["alpha"] == alpha)]
    return found.pivot(index="seed", columns="samples", values="relative")


def factors(
    runs: pd.DataFrame, more: str, than: str, alpha: float, goals: Sequence[float]
) -> dict[float, dict]:
    """For each goal how many times more samples one model needs than another, with a 95 % bootstrap interval over paired seeds.

    The largest size stands in for a model that does not arrive: if that is the first model, the ratio is a ``bound``, if the second,
    it is at ``most`` that. Where neither arrives it is nan.
    """
    errors, found = [by_size(runs, model, alpha) for model in (than, more)], {}
    last = errors[0].columns.max()
    for goal in goals:
        few, many = (arrivals(own, goal) for own in errors)
        ratios = np.minimum(many, last) / np.minimum(few, last)
        ratios[np.isinf(few) & np.isinf(many)] = math.nan
        known = np.isfinite(ratios[1:]).mean() >= 0.975
        low, high = np.nanquantile(ratios[1:], (0.025, 0.975)) if known else (math.nan, math.nan)
        ends = {"low": float(low), "high": float(high)}
        missed = {"bound": math.isinf(many[0]), "most": math.isinf(few[0])}
        found[goal] = {"ratio": float(ratios[0]), **ends, **missed}
    return found
