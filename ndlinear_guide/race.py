"""Which kind of layer should stand in your model? A race on your own data: short trainings of many, longer ones of the best.

    found = race(model, (x, y), (x_val, y_val), [("fc1", "fc2")], share=0.25)
    found.table                                   # loss, parameters, multiply-adds and time of a step, the chosen kind first
    net = found.build()                           # a fresh copy of the model with the chosen layers
    torch.optim.Adam(lr_groups(net, found.choice.rate))

Successive halving (Jamieson & Talwalkar 2016, arXiv:1502.07943) by thirds: each round takes as long as the one before, and a
third of the contestants goes on to trainings three times as long. Every training starts afresh and has a schedule of its own length, so
that its end can be compared. Nothing is kept between two calls: other data or other weights are another race.
"""

from __future__ import annotations

import copy
import functools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from scipy.special import stdtrit
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from .convert import exchange, replaceable
from .layers import KINDS as LAYERS
from .layers import Dense, build, spread
from .rates import lr_groups, schedule
from .report import bar, linear_layers

Names = Sequence[str | tuple[str, str]]
Axes = Mapping[str, Sequence[int]]
Loss = Callable[[nn.Module, Any], Tensor]
RATES = (3e-4, 1e-3, 3e-3)  # on the digits the middle one is the best or the second
ROUNDS = 3
FEWER = 3  # a round has so many times fewer contestants than the one before, and so many times more steps
TERMS = 16  # of a sum, at most
LOOKS = 5  # at the validation part during a training; the lowest loss counts


# ------------------------------------------------------------------------------------------------ a model with other layers
AS_IT_IS = "as it is"  # the model without any exchange
NARROW = "narrow"  # of a pair of layers: both dense, with fewer numbers between them
AXES = "ndlinear-axes"  # NdLinear on the axes that the inputs have
KINDS = (*LAYERS, AXES, NARROW)


def swap(
    model: nn.Module,
    layers: Names,
    kind: str,
    *,
    share: float = 0.25,
    limit: str = "parameters",
    axes: Axes | None = None,
) -> nn.Module | None:
    """A copy of a model with new layers of one kind, freshly drawn, in place of some linear ones; None where they do not fit.

    Args:
        model: is not changed. layers: names of its nn.Linear or Conv1D; a pair (first, second) is two layers with something
            between them that acts on each number alone, so that "narrow" may have fewer numbers there.
        kind: one of `KINDS`; "narrow" needs pairs alone, "ndlinear-axes" needs ``axes``.
        axes: name of a layer -> lengths of the axes that its inputs had before they were flattened, such as
            {"fc1": (3, 32, 32)}. Layers without an entry get the two modes of "ndlinear".

    Raises:
        TypeError, ValueError: as `convert`, or a name given twice, or two layers of a
            pair whose sizes do not meet, or axes that are not those of a layer named.
    """
    if not 0 < share <= 1:
        raise ValueError(f"share must lie above 0 and be at most 1, got {share}")
    if not layers:
        raise ValueError("layers is empty: name at least one nn.Linear of the model")
    pairs = [tuple(names) for names in layers if not isinstance(names, str)]
    if any(len(pair) != 2 for pair in pairs):
        raise ValueError(f"a pair has two names, got {[p for p in pairs if len(p) != 2]}")
    flat = [name for names in layers for name in ([names] if isinstance(names, str) else names)]
    if twice := sorted({name for name in flat if flat.count(name) > 1}):
        raise ValueError(f"layers names {twice} more than once")
    old = {name: seen.layer for name, seen in replaceable(model, flat).items()}
    for first, second in pairs:
        if old[first].out_features != old[second].in_features:
            raise ValueError(
                f"{first} writes {old[first].out_features} numbers and {second} reads "
                f"{old[second].in_features}: they are no pair"
            )
    axes = _lengths(axes or {}, old)
    if kind == NARROW:
        new = []
        if len(flat) == 2 * len(pairs):
            new = _narrow([(old[a], old[b]) for a, b in pairs], share)
    elif kind == AXES:
        new = [_on_axes(old[name], axes.get(name), share, limit) for name in flat] if axes else []
    else:
        new = [_like(layer, kind, share, limit) for layer in old.values()]
    if not new or None in new:
        return None
    return exchange(copy.deepcopy(model), dict(zip(old, new)))


def _like(layer: nn.Linear, kind: str, share: float, limit: str, **more) -> nn.Module | None:
    """A layer of a kind in place of a dense one, whose bias counts on both sides."""
    inputs, outputs, bias = layer.in_features, layer.out_features, layer.bias is not None
    most = int(share * inputs * outputs) + outputs * (bias and limit == "parameters")
    return build(kind, inputs, outputs, most, limit=limit, bias=bias, terms=TERMS, **more)


def _on_axes(layer: nn.Linear, dims: tuple | None, share: float, limit: str) -> nn.Module | None:
    """NdLinear on the axes of the inputs, of which there is none for a layer that reads no table."""
    hidden = spread(layer.out_features, len(dims)) if dims else ()
    if 1 in hidden:
        return None
    return _like(layer, "ndlinear", share, limit, folding=(dims, hidden) if dims else None)


def _lengths(axes: Axes, layers: Mapping[str, nn.Linear]) -> dict[str, tuple[int, ...]]:
    """The axes of each layer without those of length one."""
    found = {}
    for name, lengths in axes.items():
        if name not in layers:
            raise ValueError(f"axes names {name!r}; layers names {sorted(layers)}")
        if math.prod(lengths) != layers[name].in_features:
            raise ValueError(
                f"axes of {name}: {tuple(lengths)} has {math.prod(lengths)} numbers, the layer reads "
                f"{layers[name].in_features}"
            )
        found[name] = tuple(length for length in lengths if length > 1)
    return found


def _narrow(pairs: Sequence[tuple[nn.Linear, nn.Linear]], share: float) -> list[nn.Module]:
    """Dense layers with as many numbers between the two of a pair as the budget of both allows."""
    found = []
    for first, second in pairs:
        inputs, outputs = first.in_features, second.out_features
        width = int(share * first.out_features)
        if width < 1:
            return []
        found.append(Dense(inputs, width, first.bias is not None))
        found.append(Dense(width, outputs, second.bias is not None))
    return found


def feed_forward(model: nn.Module) -> list[str | tuple[str, str]]:
    """The feed-forward blocks of a Transformer, for ``layers`` of `race`: two linear layers in a row of which the first widens and
    the second takes it back. A block with a gate, as in Llama, is three names in place of a pair: "narrow" stays away.

    Raises:
        ValueError: there is none.
    """
    linear = [(seen.names[0], seen.layer) for seen in linear_layers(model)]
    sizes = [("", ()), *((name, (one.in_features, one.out_features)) for name, one in linear)]
    found: list[str | tuple[str, str]] = []
    for before, (name, size), (after, back) in zip(sizes, sizes[1:], sizes[2:]):
        if size[0] < size[1] and back == size[::-1]:
            gated = before[1] == size
            found += [before[0], name, after] if gated else [(name, after)]
    if not found:
        raise ValueError(
            f"no two of the {len(linear)} nn.Linear of this model are a feed-forward block: name layers yourself"
        )
    return found


# ----------------------------------------------------------------------------------------------------------------- the race
class Contestant(NamedTuple):
    """A kind of layer with a rate."""

    kind: str
    rate: float


class Round(NamedTuple):
    """Trainings of equal length: the losses of each contestant, one for each seed; infinite where a training diverged."""

    steps: int
    losses: dict[Contestant, list[float]]


def halving(
    contestants: Sequence[Contestant],
    train: Callable[[Contestant, int], list[float]],
    *,
    steps: int,
    budget: float,
    seeds: int = 1,
    progress: bool = False,
) -> list[Round]:
    """The rounds of a race; its winner is the contestant with the lowest mean loss in the last one.

    Args:
        train: (contestant, steps) -> its validation losses, one for each seed.
        steps: of a full training. budget: what the race may take, in full trainings; a third for each round.
    """
    rounds = []
    left = list(dict.fromkeys(contestants))
    for number in range(ROUNDS):
        length = budget * steps / (ROUNDS * len(left) * seeds)
        length = max(1, min(steps, round(length)))
        losses = {each: train(each, length) for each in bar(left, f"round {number + 1}", progress)}
        rounds.append(Round(length, losses))
        if not any(math.isfinite(_mean(found)) for found in losses.values()):
            raise ValueError(
                f"no loss is finite after {length} steps: check the data and the loss, or give lower rates"
            )
        count = math.ceil(len(left) / FEWER)
        left = _best(losses, count, 2 if number == 0 else 1)
    return rounds


def _mean(losses: Sequence[float]) -> float:
    return float(np.mean(losses))


def _best(losses: dict[Contestant, list[float]], count: int, each: int) -> list[Contestant]:
    """The ``count`` contestants with the lowest loss, of one kind at most ``each``."""
    found: list[Contestant] = []
    for one in sorted(losses, key=lambda one: _mean(losses[one])):
        same = sum(other.kind == one.kind for other in found)
        if same < each and len(found) < count and math.isfinite(_mean(losses[one])):
            found.append(one)
    return found


def winner(last: Round) -> Contestant:
    """The contestant with the lowest mean loss."""
    return min(last.losses, key=lambda one: _mean(last.losses[one]))


@dataclass
class Race:
    """A finished race.

    ``table``: a row for each kind, the chosen one first, and at the end one for the model as it is. ``choice``: kind and rate.
    ``rounds``: all losses.
    """

    table: pd.DataFrame
    choice: Contestant
    rounds: list[Round]
    build: Callable[[], nn.Module] = field(repr=False)


def race(
    model: nn.Module,
    train: Any,
    validation: Any,
    layers: Names,
    *,
    kinds: Sequence[str] = KINDS,
    share: float = 0.25,
    limit: str = "parameters",
    axes: Axes | None = None,
    rates: Sequence[float] = RATES,
    steps: int = 1000,
    batch_size: int = 64,
    budget: float = 3.0,
    seeds: Sequence[int] = (0,),
    loss: Loss | None = None,
    progress: bool = True,
) -> Race:
    """Race kinds of layers on your own model and data, each at several rates, and say which one to train in full.

    Args:
        model: is not changed. Its nn.Linear named in ``layers`` (see `swap`) are replaced and drawn anew, everything else starts
            from its present weights. The model as it is, with all its weights, is trained as long as those of the last round and
            at the same rates, so that the table shows what the exchange costs.
        train, validation: a tuple of tensors (inputs, targets), a torch Dataset, or anything that gives batches each time it
            is iterated, such as a DataLoader.
        kinds: those that do not fit the layers at this ``share`` of ``limit`` stay away. axes: see `swap`; without
            them "ndlinear-axes" stays away.
        rates: of Adam for dense layers; matrices of structured layers get theirs by `lr_groups`.
        steps, batch_size: of a full training. budget: what the race may take, in full trainings; the model as it is comes on top.
        seeds: several give intervals, at the price of shorter trainings.
        loss: (model, batch) -> mean loss. Without it a batch is (inputs, targets), and the loss is cross-entropy where targets are
            integers, the mean squared error where they are not.

    Raises:
        TypeError, ValueError: a layer that cannot be replaced, an empty budget, no batch, no kind that fits, or no loss that is
            finite.
    """
    _check_race(rates, steps, budget, seeds, kinds)
    limits = {"share": share, "limit": limit, "axes": axes}
    with torch.random.fork_rng(devices=[]):
        built = {kind: swap(model, layers, kind, **limits) for kind in dict.fromkeys(kinds)}
    nets = {kind: net for kind, net in built.items() if net is not None}
    if not nets:
        raise ValueError(
            f"no kind of layer fits into {share:g} of the {limit}: give a larger share"
        )
    contestants = [Contestant(kind, float(rate)) for kind in nets for rate in rates]
    make = {kind: functools.partial(swap, model, layers, kind, **limits) for kind in nets}
    make[AS_IT_IS], nets[AS_IT_IS] = functools.partial(copy.deepcopy, model), model
    taken: dict[str, list[float]] = {kind: [] for kind in nets}

    def run(one: Contestant, length: int) -> list[float]:
        data = train, validation, length
        more = {"batch_size": batch_size, "loss": loss}
        ended = [training(make[one.kind], one.rate, *data, seed, **more) for seed in seeds]
        taken[one.kind] += [each.seconds for each in ended]
        return [each.loss for each in ended]

    rounds = halving(
        contestants, run, steps=steps, budget=budget, seeds=len(seeds), progress=progress
    )
    last = rounds[-1].steps
    own = {each: run(each, last) for each in [Contestant(AS_IT_IS, float(r)) for r in rates]}
    choice = winner(rounds[-1])
    table = _table([*rounds, Round(last, own)], nets, taken)
    return Race(table, choice, rounds, make[choice.kind])


def _check_race(rates, steps, budget, seeds, kinds) -> None:
    if isinstance(kinds, str):
        raise ValueError(f"kinds is a list of names: give [{kinds!r}]")
    if not seeds or not rates or not kinds:
        raise ValueError("give at least one seed, one rate and one kind")
    if unknown := sorted(set(kinds) - set(KINDS)):
        raise ValueError(f"kinds names {unknown}; there are {', '.join(KINDS)}")
    if any(not 0 < rate < math.inf for rate in rates):
        raise ValueError(f"rates must be positive and finite, got {list(rates)}")
    if steps < 1 or budget <= 0:
        raise ValueError(f"steps={steps}, budget={budget}: both must be positive")


# -------------------------------------------------------------------------------------------------------------- one training
class Training(NamedTuple):
    """How a training ended: lowest validation loss, infinite if it diverged; seconds of a step, a median; test loss at the lowest
    validation loss, where there was a test part."""

    loss: float
    seconds: float
    test: float | None = None


def training(
    make: Callable[[], nn.Module],
    rate: float,
    train: Any,
    validation: Any,
    steps: int,
    seed: int,
    *,
    batch_size: int = 64,
    loss: Loss | None = None,
    test: Any = None,
) -> Training:
    """Train what ``make`` gives for so many steps, as the race does: Adam at the rates of `lr_groups`, the schedule of `schedule`, and
    `LOOKS` looks at the validation part, evenly spaced."""
    devices = range(torch.cuda.device_count()) if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices=devices):  # its random numbers are its own
        torch.manual_seed(seed)
        net = make().train()
        device = next(net.parameters()).device
        score = loss or _loss
        # the plain loop of Adam takes as long as the layers where these are small
        adam = torch.optim.Adam(lr_groups(net, rate), fused=device.type in ("cpu", "cuda"))
        base = [group["lr"] for group in adam.param_groups]
        looks = {round(steps * (i + 1) / LOOKS) for i in range(LOOKS)}
        taken, found, tested = [], math.inf, None
        for step, batch in zip(range(steps), _endless(train, batch_size, seed)):
            began = time.perf_counter()
            for group, own in zip(adam.param_groups, base):
                group["lr"] = own * schedule(step, steps)
            adam.zero_grad(set_to_none=True)
            score(net, _moved(batch, device)).backward()
            adam.step()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            taken.append(time.perf_counter() - began)
            if step + 1 in looks:
                seen = _validate(net, validation, score, device)
                if seen < found:
                    found = seen
                    tested = None if test is None else _validate(net, test, score, device)
        return Training(found, float(np.median(taken)), tested)


def _loss(model: nn.Module, batch: Any) -> Tensor:
    """Cross-entropy for integer targets, else the mean squared error."""
    inputs, targets = batch
    outputs = model(inputs)
    if targets.is_floating_point():
        return F.mse_loss(outputs, targets)
    return F.cross_entropy(outputs, targets)


@torch.no_grad()
def _validate(net: nn.Module, data: Any, loss: Loss, device) -> float:
    """Mean loss over the validation part, infinite if it is not a number."""
    total = count = 0
    net.eval()
    for batch in _batches(data, 1024, None):
        size = len(next(_tensors(batch)))
        total += float(loss(net, _moved(batch, device))) * size
        count += size
    net.train()
    if not count:
        raise ValueError(
            "validation gave no batch; an iterator is spent after one pass: give a DataLoader, a Dataset or tensors"
        )
    return total / count if math.isfinite(total) else math.inf


def _tensors(batch: Any) -> Iterator[Tensor]:
    """All tensors of a batch, whatever holds them."""
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, Mapping):
        yield from _tensors(list(batch.values()))
    elif isinstance(batch, (tuple, list)):
        for part in batch:
            yield from _tensors(part)


def _moved(batch: Any, device) -> Any:
    """The batch with its tensors on a device; what is no tensor stays as it is."""
    if isinstance(batch, Tensor):
        return batch.to(device)
    if isinstance(batch, Mapping):
        return {name: _moved(value, device) for name, value in batch.items()}
    if isinstance(batch, (tuple, list)):
        return tuple(_moved(value, device) for value in batch)
    return batch


def _batches(data: Any, batch_size: int, seed: int | None) -> Iterable:
    """Batches of data of any kind; in an order of its own for each seed, in their own order without one."""
    if isinstance(data, (tuple, list)) and data and all(isinstance(part, Tensor) for part in data):
        data = TensorDataset(*data)
    if isinstance(data, Dataset) and not isinstance(data, IterableDataset):
        order = None if seed is None else torch.Generator().manual_seed(seed)
        drop = seed is not None and len(data) >= batch_size
        return DataLoader(
            data, batch_size, shuffle=seed is not None, generator=order, drop_last=drop
        )
    return data


def _endless(data: Any, batch_size: int, seed: int) -> Iterator:
    batches = _batches(data, batch_size, seed)
    while True:
        given = False
        for batch in batches:
            given = True
            yield batch
        if not given:
            raise ValueError(
                "train gave no batch; an iterator is spent after one pass: give a DataLoader, a Dataset or tensors"
            )


# ---------------------------------------------------------------------------------------------------------------- the table
def _table(
    rounds: list[Round], nets: dict[str, nn.Module], taken: dict[str, list[float]]
) -> pd.DataFrame:
    """One row for each kind: how far its best contestant came and with which loss; those that came farther first, the model as it
    is, which is the last of the rounds, at the end."""
    last = {}
    for number, each in enumerate(rounds, 1):
        for kind in {one.kind for one in each.losses}:
            own = {one: losses for one, losses in each.losses.items() if one.kind == kind}
            best = winner(Round(each.steps, own))
            last[kind] = (number, each.steps, best.rate, own[best])
    chosen = rounds[ROUNDS - 1].losses[winner(rounds[ROUNDS - 1])]
    rows = []
    for kind, (number, steps, rate, losses) in last.items():
        row = {"kind": kind, "round": number, "steps": steps, "rate": rate, "loss": _mean(losses)}
        if len(losses) > 1 and math.isfinite(_mean(losses)):
            row["low"], row["high"] = _interval(losses)
        row["parameters"] = sum(p.numel() for p in nets[kind].parameters())
        row["multiply-adds"] = _macs(nets[kind])
        row["ms a step"] = 1e3 * float(np.median(taken[kind]))
        row["result"] = _result(number, losses, chosen)
        rows.append(row)
    rows.sort(key=lambda row: (row["kind"] == AS_IT_IS, -row["round"], row["loss"]))
    return pd.DataFrame(rows).replace({"round": {ROUNDS + 1: ROUNDS}})


def _result(number: int, losses: list[float], chosen: list[float]) -> str:
    if losses is chosen:
        return "chosen"
    if number < ROUNDS:
        return f"left after round {number}"
    own = "no exchange; " if number > ROUNDS else ""
    if len(losses) < 2:
        return own + "one seed: no interval"
    low, high = _interval(np.subtract(losses, chosen))
    return own + ("worse" if low > 0 else "better" if high < 0 else "no clear difference")


def _interval(values: Sequence[float]) -> tuple[float, float]:
    """Mean of some seeds less and plus half the 95 % interval of Student's t."""
    values = np.asarray(values, dtype=float)
    half = stdtrit(len(values) - 1, 0.975) * values.std(ddof=1) / math.sqrt(len(values))
    return float(values.mean() - half), float(values.mean() + half)


def _macs(net: nn.Module) -> int:
    """Multiply-adds of the linear layers for one row of their inputs."""
    structured = [m for m in net.modules() if hasattr(m, "multiply_adds")]
    dense = [seen.layer for seen in linear_layers(net)]
    return sum(m.multiply_adds() for m in structured) + sum(m.weight.numel() for m in dense)
