"""What do other layers cost in your model? `compare` trains it as it is, and with each of them in place: a row for each.

    def train(net, rate):                         # yours: trains net at this learning rate, returns its validation loss
        ...

    table = compare(model, train, [("fc1", "fc2")], share=0.25)
    net = swap(model, [("fc1", "fc2")], "monarch", share=0.25)    # a copy of the model with layers of the row you want

No layer is chosen for you: in chapter 64 of the book, choosing by short trainings is not told apart from narrowing the dense layer.
"""

from __future__ import annotations

import copy
import functools
import math
import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import pandas as pd
import torch
from scipy.special import stdtrit
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from .convert import exchange, replaceable
from .layers import KINDS as LAYERS
from .layers import Dense, build, spread
from .report import bar, lengths, linear_layers

Names = Sequence[str | tuple[str, str]]
Axes = Mapping[str, Sequence[int]]
Train = Callable[[nn.Module, float], float]
AS_IT_IS = "as it is"  # the model without any exchange
NARROW = "narrow"  # of a pair of layers: both dense, with fewer numbers between them
KINDS = (NARROW, *LAYERS)
COMPARED = (NARROW, "low-rank", "blocks", "monarch", "ndlinear", "ndlinear-sum")


# ------------------------------------------------------------------------------------------------ a model with other layers
def swap(
    model: nn.Module, layers: Names, kind: str, *, share: float = 0.25, axes: Axes | None = None
) -> nn.Module | None:
    """A copy of a model with new layers of one kind, freshly drawn and trainable, in place of some linear ones; None where they do not fit.

    Args:
        model: is not changed. layers: names of its nn.Linear or Conv1D; a pair (first, second) is two layers with something
            between them that acts on each number alone, so that "narrow" may have fewer numbers there.
        kind: one of `KINDS`; "narrow" needs pairs alone.
        share: of a dense layer's weights that the new one may have, at most; biases are kept.
        axes: name of a layer -> lengths of the axes that its inputs had before they were flattened, such as
            {"fc1": (3, 32, 32)}: there NdLinear has a mode for each axis, elsewhere two.

    Raises:
        TypeError, ValueError: as `convert`, or an unknown kind, a name given twice, two layers of a pair whose sizes do not
            meet, or axes that are not those of a layer named.
    """
    if kind not in KINDS:
        raise ValueError(f"kind must be one of {', '.join(map(repr, KINDS))}, got {kind!r}")
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
    axes = lengths(axes or {}, old)
    if kind == NARROW:
        only_pairs = len(flat) == 2 * len(pairs)
        new = [_narrowed(old[a], old[b], share) for a, b in pairs] if only_pairs else [None]
        new = [layer for pair in new for layer in pair or [None]]
    else:
        new = [_like(layer, kind, share, axes.get(name)) for name, layer in old.items()]
    return None if None in new else exchange(copy.deepcopy(model), dict(zip(flat, new)))


def _narrowed(first: nn.Linear, second: nn.Linear, share: float) -> list[nn.Module] | None:
    """Two dense layers with as many numbers between them as the share of both allows."""
    width = int(share * first.out_features)
    if width < 1:
        return None
    return [
        Dense(first.in_features, width, first.bias is not None),
        Dense(width, second.out_features, second.bias is not None),
    ]


def _like(layer: nn.Linear, kind: str, share: float, dims: tuple | None) -> nn.Module | None:
    """The largest layer of a kind in place of a dense one; on axes that cannot be kept there is none."""
    inputs, outputs, bias = layer.in_features, layer.out_features, layer.bias is not None
    hidden = spread(outputs, len(dims)) if dims else ()
    if 1 in hidden:
        return None
    most = int(share * inputs * outputs) + bias * outputs
    return build(kind, inputs, outputs, most, bias=bias, folding=(dims, hidden) if dims else None)


# ----------------------------------------------------------------------------------------------------------- the comparison
def compare(
    model: nn.Module,
    train: Train,
    layers: Names,
    *,
    kinds: Sequence[str] = COMPARED,
    share: float = 0.25,
    axes: Axes | None = None,
    rates: Sequence[float] = (3e-4, 1e-3, 3e-3),
    seeds: Sequence[int] = (0, 1, 2),
) -> pd.DataFrame:
    """Train a model as it is, and with each kind of layer in place of some of its linear layers: what does the exchange cost?

    It takes kinds + 1 times rates + seeds trainings: every row has a rate of its own, the one with the lowest loss at a seed
    that does not count, and is trained at this rate with all seeds. With one rate it takes kinds + 1 times seeds.

    Args:
        model: is not changed. New layers are drawn anew, everything else starts from its present weights.
        train: (net, rate) -> validation loss, a number. It trains ``net`` itself in whatever way is yours. Torch's generators
            are set to the seed before; others are left to you. `lr_groups` gives each layer its rate by the book's rule.
        layers, kinds, share, axes: see `swap`. rates: learning rates. seeds: from two on there are intervals.

    Returns:
        A data frame with a row for the model as it is, then one for each kind: ``layer``; ``parameters`` of the model and
        ``multiply-adds`` of its linear layers for one row of their inputs (1 = 2 FLOPs); ``ms a step``, of the first optimiser that
        steps, with all that happens in between; ``rate``; mean validation ``loss`` with its 95 % interval of Student's t, ``low`` to
        ``high``; ``difference`` to the model as it is, paired by seed, with ``difference low`` and ``difference high``. Infinite
        losses come from diverged trainings. A kind of which no layer fits into the share has an empty row.

    Raises:
        TypeError, ValueError: as `swap`; no rate or seed, no kind that fits, or a ``train`` that returns no number.
    """
    rates, seeds = list(rates), list(seeds)
    _check(kinds, rates, seeds)
    make = {AS_IT_IS: functools.partial(copy.deepcopy, model)}
    for kind in kinds:
        make[kind] = functools.partial(swap, model, layers, kind, share=share, axes=axes)
    with torch.random.fork_rng(devices=[]):
        sizes = {kind: _size(one()) for kind, one in make.items()}
    if all(sizes[kind] is None for kind in kinds):
        raise ValueError(f"no kind of layer fits into {share:g} of the weights: give more")
    rows: list[dict] = []
    own = None
    for kind, size in bar(list(sizes.items()), "compare"):
        row = {"layer": kind}
        if size is not None:
            rate, losses, seconds = _trained(make[kind], train, rates, seeds)
            own = losses if own is None else own  # those of the model as it is, which comes first
            row |= size | {"ms a step": 1e3 * seconds, "rate": rate}
            row |= dict(zip(("loss", "low", "high"), _interval(losses)))
            if kind != AS_IT_IS:
                ends = "difference", "difference low", "difference high"
                with np.errstate(invalid="ignore"):  # infinity less infinity is no number
                    row |= dict(zip(ends, _interval(losses - own)))
        rows.append(row)
    return pd.DataFrame(rows).astype(dict.fromkeys(("parameters", "multiply-adds"), "Int64"))


def _check(kinds, rates, seeds) -> None:
    if isinstance(kinds, str):
        raise ValueError(f"kinds is a list of names: give [{kinds!r}]")
    if not kinds or not rates or not seeds:
        raise ValueError("give at least one kind, one rate and one seed")
    if len({*kinds}) < len(kinds) or len({*rates}) < len(rates) or len({*seeds}) < len(seeds):
        raise ValueError("kinds, rates or seeds name one more than once")


def _trained(make, train: Train, rates, seeds) -> tuple[float, np.ndarray, float]:
    """The best rate at a seed behind the others, the losses of all seeds at this rate, and the median seconds of a step."""
    best = rates[0]
    if len(rates) > 1:
        tried = [_training(make, train, rate, max(seeds) + 1)[0] for rate in rates]
        best = rates[int(np.argmin(tried))]
    losses, seconds = np.array([_training(make, train, best, seed) for seed in seeds]).T
    return best, losses, float(np.median(seconds))


def _training(make, train: Train, rate: float, seed: int) -> tuple[float, float]:
    """Validation loss, infinite where it is no number, and the median seconds from one step of the optimiser to the next."""
    steps: list[tuple[object, float]] = []

    def note(optimiser, *_):
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        steps.append((optimiser, time.perf_counter()))

    hook = register_optimizer_step_post_hook(note)
    try:
        with torch.random.fork_rng(range(torch.cuda.device_count())):
            torch.manual_seed(seed)
            loss = train(make(), rate)
    finally:
        hook.remove()
    loss = loss.item() if isinstance(loss, (torch.Tensor, np.ndarray)) else loss
    if not isinstance(loss, (int, float, np.number)):
        raise TypeError(f"train must return the validation loss, a number, got {loss!r}")
    ends = [end for optimiser, end in steps if optimiser is steps[0][0]]
    seconds = float(np.median(np.diff(ends))) if ends[1:] else math.nan
    return math.inf if math.isnan(loss) else float(loss), seconds


def _interval(values: np.ndarray) -> tuple[float, float, float]:
    """Mean of some seeds with the 95 % interval of Student's t, which one seed does not have, nor an infinite loss."""
    count = len(values)
    if count < 2 or not np.isfinite(values).all():
        return float(values.mean()), math.nan, math.nan
    half = stdtrit(count - 1, 0.975) * values.std(ddof=1) / math.sqrt(count)
    return float(values.mean()), float(values.mean() - half), float(values.mean() + half)


def _size(net: nn.Module | None) -> dict[str, int] | None:
    """Parameters, and multiply-adds of the linear layers for one row of their inputs."""
    if net is None:
        return None
    structured = [m for m in net.modules() if hasattr(m, "multiply_adds")]
    macs = sum(m.multiply_adds() for m in structured)
    macs += sum(seen.layer.weight.numel() for seen in linear_layers(net))
    return {"parameters": sum(p.numel() for p in net.parameters()), "multiply-adds": macs}
