"""Chapter 15: training many seeds at once when parameters have rates of their own, and reading which rate is best."""

from __future__ import annotations

import copy
import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from ndlinear import NdLinear
from ndlinear_guide.rates import factor_rates, layer_shapes, lr_groups

from .. import models
from ..counts import count_macs
from ..data import load, split
from ..page import figures
from ..page.recorded import recorded
from ..stats import above, best_rates, interval
from ..train import Split, chunked, loop

Groups = Callable[[nn.Module], list[dict]]
Weights = dict[str, Tensor]  # of all members, stacked, by name

WORST = 1e6  # what is recorded in place of a loss that is larger or not a number


# ------------------------------------------------------------------------------------------------------------- one step
Case = tuple[
    NdLinear, Tensor, Tensor
]  # a layer, an input, the gradient of the loss with respect to the output


def aligned(D: Sequence[int], H: Sequence[int]) -> Case:
    """The largest step: matrices whose rows copy entries of the input, an input and a gradient of ones, biases zero."""
    layer = NdLinear(D, H)
    for mode, d, h in zip(layer.align_layers, D, H):
        places = torch.cat([torch.randperm(d) for _ in range(h // d + 1)])[:h]
        mode.weight.data = torch.eye(d)[places]
        mode.bias.data.zero_()
    return layer, torch.ones(1, *D), torch.ones(1, *H)


def scattered(D: Sequence[int], H: Sequence[int]) -> Case:
    """For no mode that shrinks: matrices whose gain is one for every input; random input and gradient, biases zero."""
    layer = NdLinear(D, H)
    for mode, d, h in zip(layer.align_layers, D, H):
        nn.init.orthogonal_(mode.weight, gain=math.sqrt(h / d))
        mode.bias.data.zero_()
    return layer, torch.randn(1, *D), torch.randn(1, *H)


def largest_dense_step(x: Tensor, slope: Tensor, optimiser: str) -> float:
    """Most that one step of rate 1 changes the output (rms) of a dense layer with bias, for one input and gradient of these rms."""
    rms, slope_rms = [t.square().mean().sqrt().item() for t in (x, slope)]
    inputs, outputs = x.numel(), slope.numel()
    return {
        "adam": inputs * rms + 1,
        "sgd": (inputs * rms**2 + 1) * slope_rms,
        "muon": rms * math.sqrt(max(1, inputs / outputs)) + 1,
    }[optimiser]


def against_dense(case: Callable[..., Case], D, H, optimiser: str, lr: float = 1e-7) -> float:
    """Change of the output (rms) by one step by rule, over the most that the dense layer's step can change it."""
    layer, x, slope = case(D, H)
    groups = lr_groups(layer, lr, optimiser=optimiser)
    most = largest_dense_step(x, slope, optimiser)
    return change(layer, x, slope, groups, optimiser) / (lr * most)


@torch.no_grad()
def _muon(groups: Sequence[Mapping]) -> None:
    """One step of exact Muon without momentum: the nearest orthogonal matrix, scaled as torch.optim.Muon does.

    A bias is a matrix with one input.
    """
    for p, lr in ((p, group["lr"]) for group in groups for p in group["params"]):
        u, s, v = torch.linalg.svd(p.grad.view(len(p), -1), full_matrices=False)
        scale = math.sqrt(max(1, len(p) ** 2 / p.numel()))
        p -= lr * scale * ((u * (s > 1e-9 * s.max())) @ v).view_as(p)


def change(layer: nn.Module, x: Tensor, slope: Tensor, groups, optimiser: str) -> float:
    """Root mean square change of a layer's output after one step on the loss <slope, output>."""
    before = layer(x).detach()
    (layer(x) * slope).sum().backward()
    if optimiser == "muon":
        _muon(groups)
    elif optimiser == "adam":
        torch.optim.Adam(groups, eps=0).step()
    else:
        torch.optim.SGD(groups).step()
    return (layer(x) - before).square().mean().sqrt().item()


# ------------------------------------------------------------------------------------------------------------- training
def named_options(model: nn.Module, groups: Sequence[Mapping]) -> dict[str, dict[str, float]]:
    """What parameter groups say about each parameter of a model (its rate, its decay), by name."""
    said = {id(p): group for group in groups for p in group["params"]}
    return {
        name: {k: v for k, v in said[id(p)].items() if k != "params"}
        for name, p in model.named_parameters()
    }


def _regrouped(
    weights: Mapping[str, Tensor], options: Mapping[str, Mapping[str, float]]
) -> list[dict]:
    """Stacked weights in the groups of the parameters that they stack."""
    groups: dict[tuple, dict] = {}
    for name, value in weights.items():
        key = tuple(sorted(options[name].items()))
        groups.setdefault(key, {"params": []} | dict(key))["params"].append(value)
    return list(groups.values())


def _members(make: Callable[[], nn.Module], seeds: Sequence[int]) -> tuple[nn.Module, Weights]:
    """A module without weights of its own, and the weights of one model for each seed, stacked."""
    models = []
    for seed in seeds:
        torch.manual_seed(seed)
        models.append(make())
    weights = {
        name: torch.stack([dict(m.named_parameters())[name].detach() for m in models])
        for name, _ in models[0].named_parameters()
    }
    skeleton = copy.deepcopy(models[0]).to("meta")
    return skeleton, {name: value.requires_grad_() for name, value in weights.items()}


def _forward(skeleton: nn.Module, weights: Weights, x: Tensor) -> Tensor:
    return vmap(lambda own, inputs: functional_call(skeleton, own, (inputs,)))(weights, x)


def _epoch(skeleton, weights: Weights, data, loss, steps, orders, batch_size: int) -> Tensor:
    """One pass over the training parts, each member in its own order; the mean loss of each."""
    x, y = data
    each, total = torch.arange(len(x))[:, None], torch.zeros(len(x))
    order = torch.stack([torch.randperm(x.shape[1], generator=g) for g in orders])
    for index in order.split(batch_size, dim=1):
        steps.zero_grad(set_to_none=True)
        values = vmap(loss)(_forward(skeleton, weights, x[each, index]), y[each, index])
        values.sum().backward()
        steps.step()
        total += values.detach() * index.shape[1]
    return total / x.shape[1]


@torch.no_grad()
def _mean(skeleton, weights: Weights, data, function, rows: int = 2048) -> Tensor:
    """Mean over the samples of a function (output, target) -> mean of the batch, for each member."""
    x, y = data
    total = torch.zeros(len(x))
    for inputs, targets in zip(x.split(rows, 1), y.split(rows, 1)):
        outputs = _forward(skeleton, weights, inputs)
        total += vmap(function)(outputs, targets) * targets.shape[1]
    return total / x.shape[1]


def _numbers(values: Tensor) -> list[float]:
    """Losses as numbers that JSON knows."""
    return values.nan_to_num(WORST, WORST).clamp_max(WORST).tolist()


def number(value: float) -> float:
    """A metric as a number that JSON knows: `WORST` where it is none, or larger."""
    return _numbers(torch.tensor([value], dtype=torch.float64))[0]


def fit(
    make: Callable[[], nn.Module],
    splits: Sequence[Split],
    *,
    seeds: Sequence[int],
    groups: Groups,
    loss: Callable,
    epochs: int,
    batch_size: int,
    scores: Mapping[str, Callable],
    optimiser=torch.optim.Adam,
) -> tuple[Weights, list[dict[str, float]]]:
    """Train one model for each seed, all at once, with the parameter groups that ``groups(model)`` gives; test once.

    Each member starts, and takes its batches, as `lab.fit` would with its seed. A member whose loss leaves the numbers goes
    on and is reported as diverged; the others do not notice.

    Returns:
        The weights of the last epoch, and for each member: training loss in the last epoch, lowest validation loss, its
        epoch, whether it diverged, and the scores on the test part with the weights of that epoch.
    """
    skeleton, weights = _members(make, seeds)
    train, val, test = [
        [torch.stack(tensors) for tensors in zip(*[getattr(s, part) for s in splits])]
        for part in ("train", "val", "test")
    ]
    model = make()
    steps = optimiser(_regrouped(weights, named_options(model, groups(model))))
    orders = [torch.Generator().manual_seed(seed) for seed in seeds]
    kept = {name: value.detach().clone() for name, value in weights.items()}
    lowest, best = torch.full((len(seeds),), math.inf), torch.zeros(len(seeds))
    for now in range(1, epochs + 1):
        train_loss = _epoch(skeleton, weights, train, loss, steps, orders, batch_size)
        val_loss = _mean(skeleton, weights, val, loss)
        better = val_loss < lowest
        lowest, best[better] = torch.where(better, val_loss, lowest), now
        for name, value in weights.items():
            kept[name][better] = value.detach()[better]
    found = {"train_loss": train_loss, "val_loss": lowest, "best_epoch": best}
    found["diverged"] = 1 - (train_loss.isfinite() & val_loss.isfinite()).float()
    found |= {name: _mean(skeleton, kept, test, score) for name, score in scores.items()}
    columns = {name: _numbers(values) for name, values in found.items()}
    return weights, [{name: columns[name][i] for name in columns} for i in range(len(seeds))]


def fit_whole(
    make: Callable[[], nn.Sequential],
    data: Sequence[tuple[Tensor, Tensor]],
    *,
    seeds: Sequence[int],
    epochs: int,
    groups: Groups,
) -> list[nn.Module]:
    """Full batches and Adam on the mean squared error, as `lab.chunked.fit`, with parameter groups: the trained models."""
    models = []
    for seed in seeds:
        torch.manual_seed(seed)
        models.append(make())
    maps, count = chunked.maps_of(models[0], len(seeds)), len(data[0][1])
    weights = {
        name: torch.stack([model.state_dict()[name] for model in models]).requires_grad_()
        for name in models[0].state_dict()
    }
    x = torch.stack([x.reshape(count, -1).T for x, _ in data])  # members, inputs, samples
    y = torch.stack([y for _, y in data])
    widest = len(seeds) * max(p * h * q for layer in maps for p, _, h, q in layer.modes)
    chunk = chunked.chunk_of(count, widest)
    for layer in maps:
        layer.allocate(chunk)
    free = [torch.empty(widest * chunk) for _ in range(2)]
    parts = [
        (a.contiguous(), b.contiguous())
        for a, b in zip(x.split(chunk, dim=2), y.split(chunk, dim=1))
    ]
    options = named_options(models[0], groups(models[0]))
    adam = torch.optim.Adam(_regrouped(weights, options), fused=True)
    for _ in range(epochs):
        for layer in maps:
            layer.prepare(weights)
        with torch.no_grad():
            for part in parts:
                chunked.gradients(maps, *part, free, count)
        adam.zero_grad(set_to_none=True)
        torch.autograd.backward(*zip(*[pair for layer in maps for pair in layer.hand_back()]))
        adam.step()
    for i, model in enumerate(models):
        model.load_state_dict({name: value.detach()[i] for name, value in weights.items()})
    return models


def train_epochs(
    model: nn.Module,
    data: tuple[Tensor, Tensor],
    *,
    groups: Sequence[Mapping],
    forward: Callable,
    epochs: int,
    batch_size: int,
    seed: int,
) -> list[dict[str, float]]:
    """`loop.train_epochs` on the cross-entropy, with parameter groups: the training loss of every epoch, `WORST` for one that
    is no number."""
    device = next(model.parameters()).device
    x, y = (part.to(device) for part in data)
    adam = torch.optim.Adam(groups)
    order = torch.Generator().manual_seed(seed)
    model.train()
    curve = []
    for now in range(1, epochs + 1):
        total = torch.zeros(())
        steps = loop.epoch(forward, (x, y), nn.functional.cross_entropy, adam, order, batch_size)
        for value, size in steps:
            total = total + value.cpu() * size
        curve.append({"epoch": now, "train_loss": _numbers(total[None] / len(x))[0]})
    return curve


def outcomes(make: Callable[[], nn.Module], splits: Sequence[Split], **options) -> list[dict]:
    """What the records keep of each member of a `fit`, whose options these are."""
    _, found = fit(make, splits, **options)
    model = make()
    counts = {
        "parameters": sum(p.numel() for p in model.parameters()),
        "macs": count_macs(model, splits[0].test[0][:1]),
    }
    return [{"metrics": metrics, **counts} for metrics in found]


# --------------------------------------------------------------------------------------------------- groups of the arms
def one_rate(lr: float, **options) -> Groups:
    """All parameters at one rate; ``options`` go into the group."""
    return lambda model: [{"params": list(model.parameters()), "lr": lr, **options}]


def by_rule(lr: float, like: nn.Module | None = None, **options) -> Groups:
    """`lr_groups`; the layers of ``like`` are those for which lr was tuned, in the same order."""

    def groups(model: nn.Module) -> list[dict]:
        tuned = like and dict(zip(layer_shapes(model), layer_shapes(like).values(), strict=True))
        return lr_groups(model, lr, tuned_at=tuned, **options)

    return groups


def by_rule_low_rank(lr: float) -> Groups:
    """The rule for the one low-rank layer of a sequence: a linear layer without bias and the next one."""

    def groups(model: nn.Sequential) -> list[dict]:
        layers = list(model)
        at = next(i for i, m in enumerate(layers) if isinstance(m, nn.Linear) and m.bias is None)
        pair = layers[at : at + 2]
        shapes = [(m.in_features, m.out_features) for m in pair]
        rates = factor_rates(lr, (shapes[0][0], shapes[1][1]), shapes)
        ours = {id(m.weight) for m in pair}
        rest = [p for p in model.parameters() if id(p) not in ours]
        factors = [{"params": [m.weight], "lr": rate} for m, rate in zip(pair, rates)]
        return [*factors, {"params": rest, "lr": lr}]

    return groups


def train_table(configs: list[dict]) -> list[dict]:
    """Chapter 43's NdLinear in its deciding protocol, by the rule: what a record keeps of each seed."""
    c, seeds = configs[0], [config["seed"] for config in configs]
    classes = c["dataset"] == "Cardio Disease"
    data = load("cardio" if classes else "food-delivery")
    parts = [split(data.x, data.y, seed=seed, parts=(0.7, 0.1, 0.2)) for seed in seeds]
    scaled = [(part, 1.0) if classes else standardised(part) for part in parts]
    make = functools.partial(models.tabular, c["dataset"], "NdLinear")
    dense = models.tabular(c["dataset"], "Linear")
    results = outcomes(
        make,
        [part for part, _ in scaled],
        scores={"score": accuracy if classes else squared_error},
        seeds=seeds,
        groups=by_rule(c["lr"], like=dense, weight_decay=0.01),
        loss=nn.functional.cross_entropy if classes else squared_error,
        epochs=c["epochs"],
        batch_size=32,
        optimiser=functools.partial(torch.optim.AdamW, fused=True),
    )
    for result, (_, unit) in zip(results, scaled):
        result["metrics"]["score"] *= unit
    return results


def squared_error(out: Tensor, target: Tensor) -> Tensor:
    """Mean squared error of outputs that have the target's shape or one axis of length one more."""
    return (out.reshape(target.shape) - target).square().mean()


def accuracy(logits: Tensor, classes: Tensor) -> Tensor:
    """Share of rows whose class has the largest logit."""
    return (logits.argmax(-1) == classes).float().mean()


# ----------------------------------------------------------------------------------------------------------------- data
def teacher(seed: int) -> Split:
    """2,048 Gaussian inputs of 64 numbers to train, 512 to validate and to test; the answers of one random ReLU network."""
    fixed, own = torch.Generator().manual_seed(1000), torch.Generator().manual_seed(seed)
    shapes = (128, 64), (128, 128), (1, 128)
    first, second, last = [torch.randn(*s, generator=fixed) * math.sqrt(2 / s[1]) for s in shapes]
    x = [torch.randn(n, 64, generator=own) for n in (2048, 512, 512)]
    y = [(((part @ first.T).relu() @ second.T).relu() @ last.T)[:, 0] for part in x]
    mean, deviation = y[0].mean(), y[0].std()
    return Split(*[(a, (b - mean) / deviation) for a, b in zip(x, y)])


def standardised(part: Split) -> tuple[Split, float]:
    """Real targets in units of the training part's deviation, and the factor from its squared errors to the target's."""
    mean, deviation = part.train[1].mean(), part.train[1].std()
    pairs = [(x, (y - mean) / deviation) for x, y in (part.train, part.val, part.test)]
    return Split(*pairs), float(deviation) ** 2


def task(name: str, seed: int) -> Split:
    """The data of a run: "teacher", "digits", "food-delivery" or "etth1" (the same windows for all seeds)."""
    if name == "teacher":
        return teacher(seed)
    data = load(name)
    if name == "etth1":  # the 20 months that are mostly used
        return forecasts(data.x[:14_400], steps=24, horizon=12, every=4)
    if name == "digits":
        return split(data.x, data.y, seed=seed, standardise="all")
    return standardised(split(data.x, data.y, seed=seed))[0]


def forecasts(table: np.ndarray, steps: int, horizon: int, every: int) -> Split:
    """Windows of a multivariate series and the last channel's next values, 60 / 20 / 20 % in the order of time.

    Scaled by the first part. Parts share no reading.
    """
    cuts = [0, *(round(share * len(table)) for share in (0.6, 0.8, 1.0))]
    seen = table[: cuts[1]]
    table = (table - seen.mean(0)) / seen.std(0)
    parts = []
    for first, last in itertools.pairwise(cuts):
        starts = range(first, last - steps - horizon + 1, every)
        x = np.stack([table[i : i + steps] for i in starts]).astype(np.float32)
        y = np.stack([table[i + steps : i + steps + horizon, -1] for i in starts])
        parts.append((torch.from_numpy(x), torch.from_numpy(y.astype(np.float32))))
    return Split(*parts)


# ------------------------------------------------------------------------------------------------------ reading records
def percent(a: pd.DataFrame, b: pd.DataFrame, metric: str) -> tuple[float, float, float]:
    """How much higher a metric is in ``a`` than in ``b``, in percent of the geometric mean, paired by seed, with 95 % interval."""
    logs = np.log(a.set_index("seed")[metric]) - np.log(b.set_index("seed")[metric])
    return tuple(100 * (np.exp(v) - 1) for v in interval(logs.dropna()))


def base_answers(
    runs: pd.DataFrame, metrics: Mapping[str, str], bases: Sequence[float]
) -> pd.DataFrame:
    """NdLinear minus the dense network at one rate, in points of a share with 95 % interval, paired by seed: at each common
    base rate, and, where both were run at all ``bases``, each at that with the lowest training loss (base "best").

    Args:
        runs: columns data, arm ("ndlinear", "dense"), rates, lr, seed, train_loss and the metrics.
        metrics: of each data set.
    """
    best = best_rates(runs, ["data", "arm", "rates"], "train_loss")["lr"]
    found = []
    ndlinear = runs[runs["arm"] == "ndlinear"]
    for (data, rates), ours in ndlinear.groupby(["data", "rates"], sort=False):
        dense = runs[(runs["data"] == data) & (runs["arm"] == "dense")]
        pairs = {lr: (lr, lr) for lr in ours["lr"].unique() if lr in set(dense["lr"])}
        if set(bases) <= set(pairs):
            pairs["best"] = best[data, "ndlinear", rates], best[data, "dense", "one rate"]
        for base, (a, b) in pairs.items():
            scores = [
                some[some["lr"] == lr].set_index("seed")[metrics[data]]
                for some, lr in ((ours, a), (dense, b))
            ]
            value = interval(100 * (scores[0] - scores[1]).dropna())
            found.append((data, rates, base, *value, WORDS[above(value)]))
    return pd.DataFrame(found, columns=["data", "rates", "base", "mean", "low", "high", "answer"])


# ------------------------------------------------------------------------------------------------- tables and figures
def served(runs: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Whether a rate that is best in one cell of chapter 15's first experiment is best in another, up to one grid step.

    Returns:
        cells: one row per comparison, "width" (small against large, for each task and network) and "modes" (NdLinear
            against dense, for each task, width and network), with both best rates and ``served``.
        price: for each task and NdLinear network the loss, large, at the rate that is best for the small dense network,
            over its lowest loss.
    """
    grid, keys = sorted(runs["lr"].unique()), ["rates", "task", "network", "width"]
    best = best_rates(runs, keys, "train_loss")
    pairs = []
    for rates, task_, network, width in best.index:
        here = (rates, task_, network, width)
        if width == "large":
            pairs.append(("width", here, (rates, task_, network, "small")))
        if network != "dense":
            pairs.append(("modes", here, (rates, task_, "dense", width)))
    rows_ = []
    for kind, here, there in pairs:
        (a, b), edge = best["lr"][[here, there]], best["edge"][[here, there]].any()
        near = abs(grid.index(a) - grid.index(b)) <= 1 and not edge
        rows_.append((kind, *here, there[2], there[3], a, b, bool(near)))
    columns = ["kind", *keys, "from network", "from width", "best", "best there", "served"]
    means = runs.groupby([*keys, "lr"])["train_loss"].mean()
    price = []
    for rates, task_, network, width in best.index:
        if width == "large" and network != "dense":
            carried = best["lr"][rates, task_, "dense", "small"]
            lowest = best["train_loss"][rates, task_, network, width]
            loss = means[rates, task_, network, width, carried]
            price.append((rates, task_, network, loss / lowest))
    return pd.DataFrame(rows_, columns=columns), pd.DataFrame(
        price, columns=["rates", "task", "network", "ratio"]
    )


def choices(runs: pd.DataFrame, chosen: pd.DataFrame, default: float = 1e-3) -> pd.DataFrame:
    """Mean test loss of each arm at the default base rate and at its tuned one, with the counts."""
    rows_ = []
    for (name, model, rates), group in runs.groupby(["task", "model", "rates"], sort=False):
        means, tuned = group.groupby("lr")["test_loss"].mean(), chosen["lr"][name, model, rates]
        counts = group[["parameters", "macs"]].iloc[0]
        rows_.append((name, model, *counts, rates, means[default], tuned, means[tuned]))
    columns = ["task", "layer", "parameters", "multiply-adds", "rates", "default", "base rate"]
    return pd.DataFrame(rows_, columns=[*columns, "tuned"])


WORDS = {True: "higher", False: "lower", None: "open"}


def bump_answers(there: pd.DataFrame, here: pd.DataFrame) -> pd.DataFrame:
    """NdLinear minus dense for each difficulty, label and depth: with the rows of evidence 30, and with NdLinear by the rule."""
    keys, rows_ = ["sigma", "width", "depth"], []
    for pair, ours in here.groupby(keys):
        cell = there[(there[keys] == list(pair)).all(axis=1) & there["seed"].isin(ours["seed"])]
        dense = cell[cell["arm"] == "dense"]
        row = dict(zip(("sigma", "label", "depth"), pair))
        for name, runs in (("one rate", cell[cell["arm"] == "ndlinear"]), ("rule", ours)):
            found = percent(runs, dense, "end_test")
            row[name] = "{:+.0f} [{:+.0f}, {:+.0f}]".format(*found)
            row[f"{name}: answer"] = WORDS[above(found)]
        rows_.append(row)
    return pd.DataFrame(rows_)


def table_gains(here: pd.DataFrame) -> pd.DataFrame:
    """Score of NdLinear minus dense on the tables of chapter 43: with its own rows, and with NdLinear by the rule."""
    networks = recorded("tabular-networks").query("scaling == 'standardised'")
    rows_ = []
    for dataset, ours in here.groupby("dataset", sort=False):
        there = networks[networks["dataset"] == dataset].set_index(["arm", "seed"])["score"]
        ruled = ours.set_index("seed")["score"]
        for name, scores in (("one rate", there["NdLinear"][ruled.index]), ("rule", ruled)):
            found = interval((scores - there["dense"]).dropna())
            text = "{:+.3g} [{:+.3g}, {:+.3g}]".format(*found)
            rows_.append((dataset, name, text, WORDS[above(found)]))
    return pd.DataFrame(rows_, columns=["dataset", "rates", "difference", "answer"])


def draw_rates(axis, runs: pd.DataFrame, metric: str, styles: Mapping[tuple, str]) -> None:
    """A metric against the base rate, a line of means and a dot for each seed; ``styles``: line of each (model, rates), with
    open markers where it is dashed."""
    for (model, rates), line in styles.items():
        some = runs[(runs["model"] == model) & (runs["rates"] == rates)]
        means = some.groupby("lr")[metric].mean()
        look = {"color": figures.colour(model), "marker": figures.marker(model)}
        name = figures.label(model)
        label = f"{name}, {rates}" if model == "ndlinear" else name
        fill = "none" if line == "--" else look["color"]
        axis.plot(means.index, means, line, label=label, mfc=fill, **look)
        axis.plot(some["lr"], some[metric], ".", color=figures.colour(model), alpha=0.25, ms=3)
    axis.set(xscale="log")


def landscape(runs: pd.DataFrame):
    """Training loss against the base rate for chapter 15's first experiment: one row of panels for each way to set rates."""
    import matplotlib.pyplot as plt

    networks = ["dense", "N = 2", "N = 3", "N = 4"]
    figure, axes = plt.subplots(2, 4, figsize=(9, 4.6), sharex=True, sharey=True)
    means = runs.groupby(["rates", "network", "task", "width", "lr"])["train_loss"].mean()
    for (i, rates), (j, name) in itertools.product(
        enumerate(("one rate", "rule")), enumerate(networks)
    ):
        axis, look = axes[i, j], "dense" if name == "dense" else "ndlinear"
        for task_, width in itertools.product(("digits", "teacher"), ("small", "large")):
            curve = means.xs((rates, name, task_, width))
            line = "-" if width == "large" else "--"
            alpha = 1.0 if task_ == "digits" else 0.55
            axis.plot(curve.index, curve, line, color=figures.colour(look), alpha=alpha, lw=1.5)
            best = curve.idxmin()
            axis.plot(best, curve[best], figures.marker(look), color=figures.colour(look), ms=7)
        axis.set(xscale="log", yscale="log", ylim=(1.5e-3, 4))  # beyond: about to diverge
        if i == 0:
            title = name if name == "dense" else f"NdLinear, {name}"
            axis.annotate(title, (0.5, 1.02), xycoords="axes fraction", ha="center")
        else:
            axis.set(xlabel="base rate")
    for axis, rates in zip(axes[:, 0], ("one rate", "rule")):
        axis.set(ylabel=f"{rates}:\ntraining loss")
    return figure
