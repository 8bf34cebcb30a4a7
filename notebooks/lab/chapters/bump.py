"""Radius Bump: ten uniform coordinates, a target that depends on their length alone, and networks of two kinds.

The target is exp(-(|x| - 0.8)^2 / (2 sigma^2)) for x uniform on [-1, 1]^10. Lengths concentrate near 1.8, so the smaller
sigma, the rarer are inputs whose target is not close to zero.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn

from ndlinear import NdLinear, cheapest_order, count_macs, count_parameters

from ..modes import LabError
from ..page.facts import facts
from ..page.figures import label
from ..stats import interval, summary

INPUTS, DIMS, RADIUS = 10, (2, 5), 0.8
SIGMAS = (0.1, 0.2, 0.3)  # the difficulties of the paper
POOL, TEST_SEED = (
    2000,
    1_000_000,
)  # samples that a seed may draw from; the seed of the test set that all runs share


def inputs(count: int, seed: int) -> Tensor:
    """(count, 10) coordinates, uniform on [-1, 1]."""
    return 2 * torch.rand(count, INPUTS, generator=torch.Generator().manual_seed(seed)) - 1


def target(x: Tensor, sigma: float) -> Tensor:
    """(..., 10) -> (...): the bump around the sphere of radius 0.8."""
    return torch.exp(-((x.norm(dim=-1) - RADIUS) ** 2) / (2 * sigma**2))


def draw(seed: int, train: int, test: int) -> tuple[Tensor, Tensor]:
    """The training and the small test inputs of a seed. A smaller training set is the beginning of a larger one."""
    if train + test > POOL:
        raise LabError(f"{train} + {test} samples; a seed has {POOL}")
    x = inputs(POOL, seed)
    return x[:train], x[POOL - test :]


def network(arm: str, size: int | tuple[int, ...], depth: int, bias: bool = True) -> nn.Sequential:
    """(n, 10) -> (n,): ``depth`` layers with ReLU between. Dense: ``size`` units a layer; NdLinear: the hidden shape ``size``,
    for inputs arranged as (2, 5)."""
    if arm == "dense":
        sizes, layer = [INPUTS, *[size] * (depth - 1), 1], nn.Linear
        start: list[nn.Module] = []
    elif arm == "ndlinear":
        sizes, layer = [DIMS, *[tuple(size)] * (depth - 1), (1,) * len(size)], NdLinear
        start = [nn.Unflatten(1, DIMS)]
    else:
        raise LabError(f"arm {arm!r}: 'dense' or 'ndlinear'")
    layers = [layer(a, b, bias=bias) for a, b in itertools.pairwise(sizes)]
    body = [part for one in layers for part in (one, nn.ReLU())][:-1]
    return nn.Sequential(*start, *body, nn.Flatten(0))


def lengths(cells: int = 1 << 14) -> tuple[np.ndarray, np.ndarray]:
    """Distribution of |x|: values and their probabilities, by convolving that of one squared coordinate with itself."""
    edge = np.linspace(0, 1, cells + 1)
    one = np.diff(np.sqrt(edge))  # P(x^2 in a cell)
    size = 1 << math.ceil(math.log2(INPUTS * cells))
    total = np.fft.irfft(np.fft.rfft(one, size) ** INPUTS, size)[: INPUTS * (cells - 1) + 1].clip(0)
    centre = (np.arange(cells) + 0.5) / cells
    shift = 1 / 3 - one @ centre  # the mean of x^2 is a third: corrects for the cells' centres
    squares = (np.arange(len(total)) + INPUTS / 2) / cells + INPUTS * shift
    return np.sqrt(squares), total / total.sum()


def constant_errors(sigma: float) -> dict[str, float]:
    """Population mean squared error of the answers "always zero" and "always the mean", and the mean itself."""
    r, p = lengths()
    y = np.exp(-((r - RADIUS) ** 2) / (2 * sigma**2))
    mean, square = float(p @ y), float(p @ y**2)
    return {"zero": square, "mean": square - mean**2, "mean of the target": mean}


def costs(arm: str, size: int | tuple[int, ...], depth: int) -> dict[str, int]:
    """Parameters and multiply-adds per sample (1 = 2 FLOPs) of `network`.

    ``forward``: modes in the defined order 1..N; ``cheapest``: each layer in its cheapest order;
    ``training``: forward and backward in that order; every product costs two more backwards, the first one alone, as
    nobody asks for the gradient of the inputs.
    """
    if arm == "dense":
        sizes = [INPUTS, *[size] * (depth - 1), 1]
        layers = [((a,), (b,)) for a, b in itertools.pairwise(sizes)]
    else:
        layers = list(itertools.pairwise([DIMS, *[tuple(size)] * (depth - 1), (1,) * len(size)]))
    orders = [cheapest_order(d, h) for d, h in layers]
    cheapest = sum(count_macs(d, h, order) for (d, h), order in zip(layers, orders))
    first = orders[0][0]
    return {
        "parameters": sum(count_parameters(d, h) for d, h in layers),
        "forward": sum(count_macs(d, h) for d, h in layers),
        "cheapest": cheapest,
        "training": 3 * cheapest - math.prod(layers[0][0]) * layers[0][1][first],
    }


def equal_dense(width: int, depth: int) -> dict[str, int]:
    """Dense widths to compare NdLinear with hidden shape (width/4, width/4) with, by what they have in common.

    "label": the printed pair; "parameters", "multiply-adds" (cheapest order, which favours NdLinear): the width with the
    nearest count; "units": as many hidden units. 256 stands in where the nearest width is 257.
    """
    modewise = costs("ndlinear", (width // 4,) * 2, depth)
    found = {"label": width}
    for name, key in (("parameters", "parameters"), ("multiply-adds", "cheapest")):
        counts = {w: costs("dense", w, depth)[key] for w in range(1, 400)}
        best = min(counts, key=lambda w: abs(counts[w] - modewise[key]))
        found[name] = 256 if best == 257 else best
    return found | {"units": (width // 4) ** 2}


def spread_of_zero(sigma: float, samples: int) -> float:
    """Standard deviation of the error of "always zero" over test sets of a size: what the draw of the test set alone does."""
    r, p = lengths()
    squares = np.exp(-((r - RADIUS) ** 2) / sigma**2)
    return float(np.sqrt((p @ squares**2 - (p @ squares) ** 2) / samples))


def constants() -> pd.DataFrame:
    """By difficulty: how rare a target above one tenth is, the errors of the two constant answers, and how much the error of
    "always zero" varies between test sets of 200."""
    r, p = lengths()
    rows = {}
    for sigma in SIGMAS:
        y, errors = np.exp(-((r - RADIUS) ** 2) / (2 * sigma**2)), constant_errors(sigma)
        rows[sigma] = (p[y > 0.1].sum(), errors["zero"], errors["mean"], spread_of_zero(sigma, 200))
    columns = ["P(y > 0.1)", "always zero", "always the mean", "sd of zero, 200 samples"]
    return pd.DataFrame(rows, index=columns).T.rename_axis("sigma")


def grid(cells: Iterable[tuple[str, int, int]], seeds: int, **fixed) -> list[dict]:
    """Configurations of (arm, width, depth) cells for all difficulties and seeds, narrow ones first."""
    return [
        {"sigma": sigma, "arm": arm, "width": width, "depth": depth, "seed": seed} | fixed
        for (arm, width, depth), sigma in itertools.product(
            sorted(cells, key=lambda cell: (*cell[1:], cell[0])), SIGMAS
        )
        for seed in range(seeds)
    ]


# ------------------------------------------------------------------------------------------- reading the records
GROUP = ["sigma", "arm", "width", "depth"]


def printed(metric: str) -> pd.DataFrame:
    """A column of the paper's three tables: ``value`` and ``std`` by difficulty, width, depth and arm."""
    tables = [facts(f"radius_0{s}", metric=metric) for s in (10, 20, 30)]
    found = pd.concat(tables).astype({"width": int, "depth": int, "sigma": float})
    found["arm"] = found["method"].map({"dense": "dense", "NdLinear": "ndlinear"})
    return found.set_index(["sigma", "width", "depth", "arm"])[["value", "std"]].sort_index()


def pairs(runs: pd.DataFrame, metric: str, level: float = 0.95) -> pd.DataFrame:
    """NdLinear minus dense of the same label, paired by seed: ``difference``, ``low``, ``high`` and the ``dense`` mean, one row
    for each difficulty, width and depth."""
    rows = {}
    for key, group in runs.groupby(["sigma", "width", "depth"]):
        wide = group.pivot(index="seed", columns="arm", values=metric)
        rows[key] = (*interval(wide["ndlinear"] - wide["dense"], level=level), wide["dense"].mean())
    frame = pd.DataFrame(rows, index=["difference", "low", "high", "dense"]).T
    return frame.rename_axis(["sigma", "width", "depth"])


def against(
    runs: pd.DataFrame, sigma: float, width: int, depth: int, opponent: int
) -> tuple[float, float, float] | None:
    """Test error of NdLinear minus that of the dense network of width ``opponent``: percent of the latter's mean, with interval.

    Paired by the seeds that both have; None where there are fewer than two.
    """
    some = runs[(runs["sigma"] == sigma) & (runs["depth"] == depth)]
    arms = {"ndlinear": width, "dense": opponent}
    wide = pd.DataFrame(
        {
            a: some[(some["arm"] == a) & (some["width"] == w)].set_index("seed")["end_test"]
            for a, w in arms.items()
        }
    )
    wide = wide.dropna()
    if len(wide) < 2:
        return None
    return tuple(100 * v / wide["dense"].mean() for v in interval(wide["ndlinear"] - wide["dense"]))


def percent(frame: pd.DataFrame) -> list[str]:
    """Rows of `pairs` as text: the difference in percent of the dense mean, with its interval."""
    parts = [100 * frame[k] / frame["dense"] for k in ("difference", "low", "high")]
    return [f"{a:+.0f} [{b:+.0f}, {c:+.0f}]" for a, b, c in zip(*parts)]


def pair_names(index: pd.MultiIndex) -> pd.DataFrame:
    """The first columns of a table of pairs: ``sigma``, and label and depth in one column, "64, 3"."""
    frame = index.to_frame(index=False)
    names = [f"{w}, {d}" for w, d in zip(frame["width"], frame["depth"])]
    return pd.DataFrame({"sigma": frame["sigma"], "label, depth": names})


def rank_correlation(runs: pd.DataFrame, x: str, y: str) -> tuple[float, float, float]:
    """Spearman's correlation over the seeds of a group, averaged over the groups that have all seeds: (mean, low, high).

    The interval is the wider of two: t over the groups, and a jackknife over the seeds, which the groups share. A group in
    which one of the two does not vary counts as 0.
    """
    seeds = runs["seed"].unique()
    full = runs.groupby(GROUP).filter(lambda group: len(group) == len(seeds))

    def over_groups(frame: pd.DataFrame) -> np.ndarray:
        ranks = frame.groupby(GROUP)[[x, y]].rank().join(frame[GROUP])
        found = [
            group[x].corr(group[y]) if group[[x, y]].nunique().gt(1).all() else 0.0
            for _, group in ranks.groupby(GROUP)
        ]
        return np.array(found)

    each, n = over_groups(full), len(seeds)
    left = [over_groups(full[full["seed"] != seed]).mean() for seed in seeds]
    found = interval(each), interval([n * each.mean() - (n - 1) * v for v in left])
    widest = max(high - low for _, low, high in found) / 2
    return float(each.mean()), float(each.mean() - widest), float(each.mean() + widest)


def table(
    runs: pd.DataFrame, sigma: float, printed: pd.DataFrame, constants: dict[str, float]
) -> pd.DataFrame:
    """Rows of a paper's table as text: train and test error, the small test set, what is printed; the constants last.

    Test errors are in thousandths. printed: ``value`` and ``std`` by difficulty, width, depth and arm.
    """
    some, keys = runs[runs["sigma"] == sigma], ["arm", "width", "depth"]
    found = summary(some, [*keys, "parameters"], ["end_train", "end_test"]).sort_values(
        ["depth", "width", "arm"]
    )
    at = list(map(tuple, found[keys].to_numpy()))
    small = some.groupby(keys)["end_small"].agg(["mean", "std"]).loc[at]
    beside = printed.loc[sigma].reorder_levels(keys).loc[at]
    names = [f"{label(arm)} {width}" for arm, width in zip(found["arm"], found["width"])]
    out = pd.DataFrame({"network": names, "depth": found["depth"].astype(str)})
    out["parameters"] = [f"{v:,}" for v in found["parameters"]]
    out["train"] = [f"{v:.1e}" for v in found["end_train"]]
    test = 1e3 * found[["end_test", "end_test_low", "end_test_high"]].to_numpy()
    out["test"] = [f"{a:.2f} [{b:.2f}, {c:.2f}]" for a, b, c in test]
    for name, columns in (("small test", small), ("printed", beside)):
        out[name] = [f"{a:.2f} ± {b:.2f}" for a, b in 1e3 * columns.to_numpy()]
    lines = [{"network": name, "test": f"{1e3 * value:.2f}"} for name, value in constants.items()]
    return pd.concat([out, pd.DataFrame(lines)], ignore_index=True).fillna("")


def normalised(runs: pd.DataFrame, when: str, samples: int) -> pd.DataFrame:
    """Entropy of the last hidden representation under every normaliser of `lab.entropy`, and without centring, with unit rows.

    when: "init", "stop" or "end"; samples: how many inputs the entropy was taken on. Last column: AveEntropy.
    """
    units = np.where(runs["arm"] == "dense", runs["width"], (runs["width"] // 4) ** 2)
    sizes = {
        "nats": np.e,
        "log-width": units,
        "log-samples": samples,
        "log-min": np.minimum(units, samples),
    }
    sizes["log-rank"] = runs[f"{when}_rank"].clip(lower=2)
    values = {name: runs[f"{when}_entropy"] / np.log(size) for name, size in sizes.items()}
    values |= {
        "not centred": runs[f"{when}_entropy_raw"],
        "unit rows": runs[f"{when}_entropy_rows"],
    }
    return pd.DataFrame(values | {"AveEntropy": runs[f"{when}_ave_entropy"]})


def entropies(runs: pd.DataFrame, samples: int) -> pd.DataFrame:
    """`normalised` entropies before and after training, "0.78 → 0.75", means over difficulties and seeds: one row per network."""
    keys, means = ["arm", "width", "depth"], []
    for when in ("init", "end"):
        values = normalised(runs, when, samples).join(runs[["sigma", *keys]])
        means.append(
            values.groupby(["sigma", *keys], sort=False).mean().groupby(keys, sort=False).mean()
        )
    text = means[0].map("{:.2f}".format) + " → " + means[1].map("{:.2f}".format)
    text.insert(
        0, "network, depth", [f"{label(arm)} {width}, {depth}" for arm, width, depth in text.index]
    )
    return text


def opponents(
    runs: pd.DataFrame, fair: dict[tuple[int, int], dict[str, int]]
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """`against` for all difficulties and the dense networks of ``fair``: a table of text, and in how many cells NdLinear has
    the lower or the higher error, or neither is certain."""
    rows, tally = (
        [],
        {name: {"lower": 0, "higher": 0, "open": 0} for name in next(iter(fair.values()))},
    )
    for sigma in sorted(runs["sigma"].unique()):
        for (width, depth), widths in fair.items():
            row = {"sigma": sigma, "NdLinear, depth": f"{width // 4} × {width // 4}, {depth}"}
            for name, opponent in widths.items():
                found = against(runs, sigma, width, depth, opponent)
                row[f"equal {name}"] = (
                    f"{found[0]:+.0f} [{found[1]:+.0f}, {found[2]:+.0f}]" if found else "not run"
                )
                if found:
                    tally[name][
                        "lower" if found[2] < 0 else "higher" if found[1] > 0 else "open"
                    ] += 1
            rows.append(row)
    return pd.DataFrame(rows), pd.DataFrame(tally).T


def cuts(runs: pd.DataFrame, samples: int) -> pd.DataFrame:
    """How far NdLinear lies below dense of the same label, in percent, under each normaliser, before and after training."""
    rows = []
    for when, name in (("init", "untrained"), ("end", "trained")):
        values = normalised(runs, when, samples)
        means = values.groupby([runs[k] for k in GROUP]).mean().unstack("arm")
        for normaliser in values:
            wide = means[normaliser]
            cut = 100 * (1 - wide["ndlinear"] / wide["dense"])
            lower = f"{(cut > 0).sum()} of {len(cut)}"
            rows.append((name, normaliser, cut.mean(), cut.min(), cut.max(), lower))
    return pd.DataFrame(
        rows, columns=["network", "normaliser", "mean", "least", "most", "lower in"]
    )


def stopping(runs: pd.DataFrame) -> pd.DataFrame:
    """By difficulty, arm and depth: the share of runs that the stopping rule ends, and how the test error there differs from
    that of the last epoch, in percent, for those runs."""
    rows = []
    for (sigma, arm, depth), group in runs.groupby(["sigma", "arm", "depth"]):
        ended = group[group["stopped"] == 1]
        change = 100 * (ended["stop_test"] / ended["end_test"] - 1)
        rows.append(
            (sigma, label(arm), depth, len(ended) / len(group), change.mean(), change.std())
        )
    return pd.DataFrame(rows, columns=["sigma", "network", "depth", "stopped", "change, %", "sd"])
