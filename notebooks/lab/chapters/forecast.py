"""Forecasting the oil temperature of an electricity transformer: windows, two protocols, models.

A window holds `STEPS` rows of the inputs and, as targets, the `HORIZON` oil temperatures that
follow. The inputs are the six load columns, as in the released script; with ``history`` the oil
temperature's own past comes with them. Data and errors are scaled so that each column runs from 0
to 1 on the rows that the scaler has seen.
"""

from __future__ import annotations

import functools
import math

import numpy as np
import pandas as pd
import torch
from scipy.special import stdtrit
from torch import Tensor, nn
from torch.nn import functional as F

from ndlinear import NdLinear

from .. import models
from ..data import load
from ..modes import LabError
from ..stats import all_of, at_least, differences, interval, p_below, summary
from ..train.loop import Split, seed_everything

STEPS = 24
HORIZON = 12
CHANNELS = 6  # the loads, without the oil temperature
PENALTIES = (1e-6, 1e-4, 1e-2, 1.0, 100.0)
MANY_SEEDS = 1000


# ---------------------------------------------------------------------------- windows and protocols
@functools.cache
def readings(name: str) -> np.ndarray:
    """(time, 7): six loads and the oil temperature of "ETTh1", "ETTh2", "ETTm1" or "ETTm2"."""
    return load(name.lower()).x


def scale(table: np.ndarray, seen: slice) -> np.ndarray:
    """(time, columns) as float64, each column shifted and scaled to run from 0 to 1 on the rows
    ``seen``."""
    table = np.asarray(table, np.float64)
    low, high = table[seen].min(0), table[seen].max(0)
    return (table - low) / np.where(high > low, high - low, 1)


def windows(table: np.ndarray, every: int = 1, history: bool = False) -> tuple[Tensor, Tensor]:
    """Windows that lie inside a scaled (time, columns) table: inputs (n, 24, columns or one fewer),
    targets (n, 12).

    ``every``: rows between the starts of two windows. The last column is the target's; with
    ``history`` it is an input too.
    """
    if len(table) < STEPS + HORIZON:
        raise LabError(f"{len(table)} rows hold no window of {STEPS} + {HORIZON}")
    cut = np.lib.stride_tricks.sliding_window_view(table, STEPS + HORIZON, axis=0)
    cut = cut[::every].transpose(0, 2, 1)
    inputs = cut[:, :STEPS] if history else cut[:, :STEPS, :-1]
    return tuple(torch.tensor(part, dtype=torch.float32) for part in (inputs, cut[:, STEPS:, -1]))


def chronological(table: np.ndarray, every: int = 1, history: bool = False) -> Split:
    """The leak-free protocol: first 60 % of the rows, next 20, last 20; scaled by the first; no
    window crosses a border.

    Training and validation windows start at every ``every``-th row, test windows four times as
    often, at most at each row.
    """
    a, b = int(0.6 * len(table)), int(0.8 * len(table))
    table = scale(table, slice(0, a))
    parts = ((table[:a], every), (table[a:b], every), (table[b:], max(every // 4, 1)))
    return Split(*[windows(rows, step, history) for rows, step in parts])


def shuffled(table: np.ndarray, seed: int, every: int = 1, history: bool = False) -> Split:
    """The released protocol: scaled by all rows; a random half of the overlapping windows trains,
    the other half is used both to choose the epoch and to report (it is the validation and the test
    part)."""
    table = scale(table, slice(None))[:-1]  # the script leaves out the last window
    x, y = windows(table, every, history)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    train, rest = order[: len(x) // 2], order[len(x) // 2 :]
    half = (x[rest], y[rest])
    return Split((x[train], y[train]), half, half)


def split(protocol: str, table: np.ndarray, seed: int, every: int, history: bool = False) -> Split:
    """The data of one run: "chronological", the same for all seeds, or "shuffled"."""
    if protocol not in ("chronological", "shuffled"):
        raise LabError(f"no protocol {protocol!r}; there are chronological and shuffled")
    if protocol == "chronological":
        return chronological(table, every, history)
    return shuffled(table, seed, every, history)


def shared(train: Tensor, held: Tensor, length: int = 36) -> Tensor:
    """For each held-out window, how many training windows overlap it; both by their first rows."""
    train, ends = train.sort().values, (held + length, held - length + 1)
    after, before = (torch.searchsorted(train, end) for end in ends)
    return after - before


# ----------------------------------------------------------------------------------------- networks
class Attention(models.EncoderLayer):
    """The encoder layer of `lab.models` with dropout, read at its last position.

    One layer whose last position alone is read needs its queries and its block there only.
    ``everywhere`` computes all positions nevertheless: the same function for a block that acts on
    each position by itself, and needed for one that mixes them. The attention is written out, so
    that `lab.train.many` can map it over members.
    """

    def __init__(
        self, width: int, heads: int, block: nn.Module, dropout: float, everywhere: bool = False
    ):
        super().__init__(width, heads, block)
        self.drop = nn.Dropout(dropout)
        self.everywhere = everywhere

    def forward(self, x: Tensor) -> Tensor:
        """(B, steps, width) -> (B, width)."""
        asks = x if self.everywhere else x[:, -1:]
        x = self.norms[0](asks + self.drop(self.attend(asks, x)))
        return self.norms[1](x + self.drop(self.block(x)))[:, -1]

    def attend(self, asks: Tensor, x: Tensor) -> Tensor:
        """What `self.attention` computes: (B, queries, width) and (B, steps, width) -> (B, queries,
        width)."""
        own = self.attention
        width = x.shape[-1]
        (w_q, w_kv), (b_q, b_kv) = (
            p.split((width, 2 * width)) for p in (own.in_proj_weight, own.in_proj_bias)
        )
        keys, values = F.linear(x, w_kv, b_kv).chunk(2, -1)
        q, k, v = (
            t.unflatten(-1, (own.num_heads, -1)).transpose(1, 2)
            for t in (F.linear(asks, w_q, b_q), keys, values)
        )
        weights = self.drop((q @ k.mT / own.head_dim**0.5).softmax(-1))
        return own.out_proj((weights @ v).transpose(1, 2).flatten(2))


class Transformer(nn.Module):
    """(B, steps, channels) -> (B, horizon): a linear embedding, one encoder layer, a linear map of
    the last position."""

    def __init__(self, channels: int, layer: Attention, horizon: int = HORIZON):
        super().__init__()
        width = layer.norms[0].normalized_shape[0]
        self.embed = nn.Linear(channels, width)
        self.layer = layer
        self.out = nn.Linear(width, horizon)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.layer(self.embed(x)))


def between(first: nn.Module, act: nn.Module, dropout: float, last: nn.Module) -> nn.Sequential:
    """A block with dropout after its activation."""
    return nn.Sequential(first, act, nn.Dropout(dropout), last)


def column(width: int, hidden: int) -> tuple[nn.Module, nn.Module]:
    """NdLinear (width, 1) -> (hidden, 1), and back, as maps of the last axis."""
    return tuple(
        nn.Sequential(nn.Unflatten(-1, (a, 1)), NdLinear((a, 1), (b, 1)), nn.Flatten(-2))
        for a, b in ((width, hidden), (hidden, width))
    )


def transformer(arm: str, everywhere: bool = False) -> Transformer:
    """The Transformer of each arm; width 32, two heads, GELU, dropout 0.1.

    "dense" has a block of 2,048 units, "dense-width" of 32; "ndlinear" is (32, 1) -> (32, 1)
    twice; "ndlinear-modes" is (24, 32) -> (24, 32) twice, over time and channels.
    """
    width, dropout = 32, 0.1
    dense = {"dense": 2048, "dense-width": width}
    if arm in dense:
        first, last = nn.Linear(width, dense[arm]), nn.Linear(dense[arm], width)
    elif arm == "ndlinear-modes":
        first, last = (NdLinear((STEPS, width), (STEPS, width)) for _ in range(2))
    elif arm == "ndlinear":
        first, last = column(width, width)
    else:
        raise LabError(f"no Transformer of the arm {arm!r}")
    block = between(first, nn.GELU(), dropout, last)
    everywhere = everywhere or arm == "ndlinear-modes"
    return Transformer(CHANNELS, Attention(width, 2, block, dropout, everywhere))


class Recurrent(models.Recurrent):
    """(B, steps, channels) -> (B, horizon): `lab.models.Recurrent` with the recurrence written out,
    so that `lab.train.many` can map it over members. ``every``: the head gets the states of all steps,
    (B, steps, hidden), not the last one."""

    def __init__(self, channels: int, hidden: int, head: nn.Module, every: bool = False):
        super().__init__(channels, hidden, head)
        self.every = every

    def forward(self, x: Tensor) -> Tensor:
        own = self.rnn
        steps = F.linear(x, own.weight_ih_l0, own.bias_ih_l0 + own.bias_hh_l0).unbind(1)
        states = [steps[0].tanh()]
        for step in steps[1:]:
            states.append((step + F.linear(states[-1], own.weight_hh_l0)).tanh())
        return self.head(torch.stack(states, 1) if self.every else states[-1])


def recurrent(arm: str) -> nn.Module:
    """The RNN of each arm; one layer, ReLU and dropout 0.3 in the head.

    "dense" has 96 units, "dense-width" and "ndlinear" 64, the width whose NdLinear count is the
    printed one; the last state is read; "ndlinear-paper" is "ndlinear" initialised as the paper's
    text says. "ndlinear-modes" reads the 24 states of 64 units: (24, 64) -> (12, 24) -> (12, 1).
    """
    if arm in ("dense", "dense-width", "ndlinear", "ndlinear-paper"):
        hidden = 96 if arm == "dense" else 64
        method = "NdLinear" if arm.startswith("nd") else "Linear"
        layer = functools.partial(NdLinear, init="paper" if arm == "ndlinear-paper" else "linear")
        head = models.recurrent(method, CHANNELS, hidden, layer=layer).head
        return Recurrent(CHANNELS, hidden, head)
    if arm == "ndlinear-modes":
        first, last = NdLinear((STEPS, 64), (HORIZON, 24)), NdLinear((HORIZON, 24), (HORIZON, 1))
        head = nn.Sequential(between(first, nn.ReLU(), 0.3, last), nn.Flatten())
        return Recurrent(CHANNELS, 64, head, every=True)
    raise LabError(f"no RNN of the arm {arm!r}")


@torch.no_grad()
def starts_dead(arm: str, seed: int, x: Tensor) -> bool:
    """Whether no unit behind the ReLU of an RNN's head is on for any of the inputs, before
    training."""
    seed_everything(seed)
    net = recurrent(arm).eval()
    relu = next(i for i, module in enumerate(net.head) if isinstance(module, nn.ReLU))
    return not net.head[: relu + 1](net.rnn(x)[0][:, -1]).any()


# -------------------------------------------------------------------------------- without a network
class Constant(nn.Module):
    """The mean of the training targets, for each of the steps ahead: (B, ...) -> (B, 12)."""

    def __init__(self, data: Split):
        super().__init__()
        self.mean = nn.Parameter(data.train[1].mean(0), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.mean.expand(len(x), -1)


class LastValue(nn.Module):
    """The last known oil temperature, for all steps ahead: (B, 24, 7) -> (B, 12). It needs
    ``history``."""

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[-1] != 7:
            raise LabError(
                "the last value needs the target's past, the 7th column; "
                f"the inputs have {x.shape[-1]}"
            )
        return x[:, -1:, -1].expand(-1, HORIZON)


def without_network(name: str, data: Split) -> nn.Module:
    """ "mean", "linear" (ridge regression on the window), or "last value", which needs ``history``."""
    if name == "last value":
        return LastValue()
    makers = {"mean": Constant, "linear": ridge}
    if name not in makers:
        raise LabError(f"{name!r} is not one of {', '.join(makers)}, last value")
    return makers[name](data)


def ridge(data: Split, penalties=PENALTIES) -> nn.Sequential:
    """One affine map of the whole window, fitted in closed form: the sum of squares plus a penalty
    times that of the weights, the intercept not counted; the penalty with the lowest validation
    error."""
    x, y = (part.flatten(1).double() for part in data.train)
    centre, middle = x.mean(0), y.mean(0)
    gram, cross = (x - centre).T @ (x - centre), (x - centre).T @ (y - middle)
    found = {}
    for penalty in penalties:
        weight = torch.linalg.solve(gram + penalty * torch.eye(len(gram), dtype=gram.dtype), cross)
        forecast = (data.val[0].flatten(1) - centre) @ weight + middle
        found[F.mse_loss(forecast, data.val[1].double()).item()] = weight
    best = found[min(found)]
    linear = nn.Linear(*best.shape)
    linear.weight.data = best.T.float()
    linear.bias.data = (middle - centre @ best).float()
    return nn.Sequential(nn.Flatten(), linear)


# ----------------------------------------------------------------------------------- what is judged
def ratios(
    runs: pd.DataFrame, metric: str, arm: str = "ndlinear", than: str = "dense"
) -> pd.Series:
    """An arm's error over another's, seed by seed; ``runs`` holds one family and one set."""
    logs = runs.assign(log=np.log(runs[metric]))
    return np.exp(differences(logs, "log", arm, than, by="model"))


def reduction(
    runs: pd.DataFrame, metric: str, arm: str = "ndlinear", than: str = "dense", level: float = 0.95
) -> tuple[float, float, float]:
    """By which share an arm's error is below another's, paired by seed, with its t interval:
    (share, low, high).

    The mean is taken of the logarithms of the ratios, so that an error halved and one doubled
    cancel.
    """
    mean, low, high = interval(np.log(ratios(runs, metric, arm, than)), level=level)
    return 1 - np.exp(mean), 1 - np.exp(high), 1 - np.exp(low)


def reductions(
    runs: pd.DataFrame, protocol: str, arm="ndlinear", than="dense", level=0.95
) -> dict[tuple, tuple]:
    """`reduction` for every family and set of a protocol, RNN first: (family, set, metric) ->
    (share, low, high)."""
    part = runs[runs["protocol"] == protocol].set_index(["family", "dataset"]).sort_index()
    keys = [(*cell, metric) for cell in dict.fromkeys(part.index) for metric in ("mse", "mae")]
    return {(f, d, m): reduction(part.loc[(f, d)], m, arm, than, level) for f, d, m in keys}


def p_value(runs: pd.DataFrame, metric: str, arms: list[str], least: float = 0.0) -> float:
    """p-value of the two-sided t test that puts the reduction by an arm below ``least``; the largest of those of ``arms``.

    ``arms`` are ways to carry out what the paper leaves open: what is below in one of them alone has the p-value 1.
    """
    found = [-np.log(ratios(runs, metric, arm)) for arm in arms]
    return max(p_below(values, -np.log1p(-least)) for values in found)


def seeds_needed(
    runs: pd.DataFrame, metric: str, arm: str, least: float, level: float = 0.95
) -> int | None:
    """How many seeds it would take until the interval of the reduction by an arm ended at ``least``.

    Mean and spread over seeds are taken to stay what they are; None if `MANY_SEEDS` would not be enough.
    """
    logs = -np.log(ratios(runs, metric, arm))
    distance = abs(logs.mean() + np.log1p(-least))
    for seeds in range(2, MANY_SEEDS + 1):
        if stdtrit(seeds - 1, 0.5 + level / 2) * logs.std(ddof=1) / math.sqrt(seeds) <= distance:
            return seeds
    return None


def reduces(found: dict[str, tuple[float, float, float]], printed: dict[str, float]) -> bool | None:
    """Whether every reduction is at least half the printed one: True if all intervals are, False if one is wholly below."""
    return all_of(*[at_least(value, printed[metric] / 2) for metric, value in found.items()])


# --------------------------------------------------------------------------------------------------- tables and figures
def share(reduction: tuple[float, float, float]) -> str:
    """A reduction with its interval in percent: "27% [1%, 46%]"."""
    return "{:.0%} [{:.0%}, {:.0%}]".format(*reduction).replace("-", "−")


def beside(runs: pd.DataFrame, printed: pd.DataFrame, protocol: str, metric: str) -> pd.DataFrame:
    """The paper's table, row by row, with the mean and interval of the recorded errors beside each
    printed one.

    Args:
        printed: columns "Linear" and "NdLinear", indexed by model, set and metric.
    """
    ours = runs[(runs["protocol"] == protocol) & runs["model"].isin(["dense", "ndlinear"])]
    by = ["family", "dataset", "model"]
    ours = summary(ours, by, metric).set_index(by)
    rows = []
    for family, dataset in sorted({(f, d) for f, d, _ in ours.index}):
        row = {"model": family, "set": dataset}
        for method, arm in (("Linear", "dense"), ("NdLinear", "ndlinear")):
            row[f"printed {method}"] = printed[method][(family, dataset, metric)]
            for end in ("", "_low", "_high"):
                row[f"ours {method}{end}"] = ours.loc[(family, dataset, arm), f"{metric}{end}"]
        rows.append(row)
    return pd.DataFrame(rows)


def reduction_table(found: dict[str, dict], printed: pd.DataFrame) -> pd.DataFrame:
    """The reductions of every family, set and metric: as printed, then one column for each protocol of ``found``."""
    rows = [
        {"model": family, "set": dataset, "metric": metric.upper()}
        | {"printed": f"{printed['reduction'][family, dataset, metric]:.1%}"}
        | {protocol: share(values[family, dataset, metric]) for protocol, values in found.items()}
        for family, dataset, metric in next(iter(found.values()))
    ]
    return pd.DataFrame(rows)


def last_look(*looks: pd.DataFrame) -> pd.DataFrame:
    """Of several runs, in the order in which they were made, the rows of the last one that has a protocol, family and set."""
    cell = ["protocol", "family", "dataset"]
    rows = pd.concat([look.assign(look=at) for at, look in enumerate(looks)], ignore_index=True)
    return rows[rows["look"] == rows.groupby(cell)["look"].transform("max")].drop(columns="look")
