"""Forecasting the oil temperature of an electricity transformer: windows, two protocols, models.

A window holds `STEPS` rows of the inputs and, as targets, the `HORIZON` oil temperatures that
follow. The inputs are the six load columns, as in the released script; with ``history`` the oil
temperature's own past comes with them. Data and errors are scaled so that each column runs from 0
to 1 on the rows that the scaler has seen.
"""

from __future__ import annotations

import functools

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ndlinear import NdLinear

from .. import models
from ..data import load
from ..modes import LabError
from ..stats import differences, interval, p_below
from ..train.loop import Split, seed_everything

STEPS = 24
HORIZON = 12
CHANNELS = 6  # the loads, without the oil temperature
PENALTIES = (1e-6, 1e-4, 1e-2, 1.0, 100.0)


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

    One layer whose last position alone is read needs its queries, and a block that acts on each
    position by itself, there only. The attention is written out, so that `lab.train.many` can map
    it over members.
    """

    def __init__(self, width: int, heads: int, block: nn.Module, dropout: float):
        super().__init__(width, heads, block)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """(B, steps, width) -> (B, width)."""
        asks = x[:, -1:]
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


def column(width: int, hidden: int) -> tuple[nn.Module, nn.Module]:
    """NdLinear (width, 1) -> (hidden, 1), and back, as maps of the last axis."""
    return tuple(
        nn.Sequential(nn.Unflatten(-1, (a, 1)), NdLinear((a, 1), (b, 1)), nn.Flatten(-2))
        for a, b in ((width, hidden), (hidden, width))
    )


def transformer(arm: str) -> Transformer:
    """The Transformer of each arm; width 32, two heads, GELU, dropout 0.1.

    "dense" has a block of 2,048 units, "dense-width" of 32; "ndlinear" is (32, 1) -> (32, 1) twice.
    """
    width, dropout = 32, 0.1
    units = {"dense": 2048, "dense-width": width}
    if arm in units:
        first, last = nn.Linear(width, units[arm]), nn.Linear(units[arm], width)
    elif arm == "ndlinear":
        first, last = column(width, width)
    else:
        raise LabError(f"no Transformer of the arm {arm!r}")
    block = nn.Sequential(first, nn.GELU(), nn.Dropout(dropout), last)
    return Transformer(CHANNELS, Attention(width, 2, block, dropout))


class Recurrent(models.Recurrent):
    """(B, steps, channels) -> (B, horizon): `lab.models.Recurrent` with the recurrence written out,
    so that `lab.train.many` can map it over members."""

    def forward(self, x: Tensor) -> Tensor:
        own = self.rnn
        steps = F.linear(x, own.weight_ih_l0, own.bias_ih_l0 + own.bias_hh_l0).unbind(1)
        state = steps[0].tanh()
        for step in steps[1:]:
            state = (step + F.linear(state, own.weight_hh_l0)).tanh()
        return self.head(state)


def recurrent(arm: str) -> nn.Module:
    """The RNN of each arm; one layer, whose last state is read, ReLU and dropout 0.3 in the head.

    "dense" has 96 units, "dense-width" and "ndlinear" 64, the width whose NdLinear count is the
    printed one; "ndlinear-paper" is "ndlinear" initialised as the paper's text says; "linear-head"
    has 96 units and one linear layer behind them.
    """
    if arm == "linear-head":
        return Recurrent(CHANNELS, 96, nn.Linear(96, HORIZON))
    if arm not in ("dense", "dense-width", "ndlinear", "ndlinear-paper"):
        raise LabError(f"no RNN of the arm {arm!r}")
    hidden = 96 if arm == "dense" else 64
    method = "NdLinear" if arm.startswith("nd") else "Linear"
    layer = functools.partial(NdLinear, init="paper" if arm == "ndlinear-paper" else "linear")
    head = models.recurrent(method, CHANNELS, hidden, layer=layer).head
    return Recurrent(CHANNELS, hidden, head)


@torch.no_grad()
def starts_dead(arm: str, seed: int, x: Tensor) -> bool:
    """Whether no unit behind the ReLU of an RNN's head is on for any of the inputs, before
    training."""
    seed_everything(seed)
    net = recurrent(arm).eval()
    relu = next(i for i, module in enumerate(net.head) if isinstance(module, nn.ReLU))
    return not net.head[: relu + 1](net.rnn(x)[0][:, -1]).any()


# -------------------------------------------------------------------------------- without a network
def without_network(name: str, data: Split) -> Tensor:
    """Forecasts (n, 12) of the test windows, whose inputs hold the target's own past (``history``).

    "mean": the mean of the training targets. "last value": the last known oil temperature, for all
    steps ahead. "linear": `ridge` on the whole window.
    """
    x = data.test[0]
    if name == "mean":
        return data.train[1].mean(0).expand(len(x), -1)
    if name == "last value":
        return x[:, -1:, -1].expand(-1, HORIZON)
    if name == "linear":
        return ridge(data)
    raise LabError(f"{name!r} is not one of mean, last value, linear")


def ridge(data: Split, penalties=PENALTIES) -> Tensor:
    """Forecasts (n, 12) of the test windows by scikit-learn's `Ridge`, the penalty with the lowest validation error."""
    from sklearn.linear_model import Ridge

    x, y, x_val, y_val = (part.flatten(1).double().numpy() for part in (*data.train, *data.val))
    fits = [Ridge(penalty).fit(x, y) for penalty in penalties]
    best = min(fits, key=lambda fit: np.square(fit.predict(x_val) - y_val).mean())
    return torch.tensor(best.predict(data.test[0].flatten(1).double().numpy())).float()


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


def reductions(runs: pd.DataFrame, protocol: str, level: float = 0.95) -> dict[tuple, tuple]:
    """`reduction` for every family and set of a protocol, RNN first: (family, set, metric) ->
    (share, low, high)."""
    part = runs[runs["protocol"] == protocol].set_index(["family", "dataset"]).sort_index()
    keys = [(*cell, metric) for cell in dict.fromkeys(part.index) for metric in ("mse", "mae")]
    return {(f, d, m): reduction(part.loc[(f, d)], m, level=level) for f, d, m in keys}


def p_value(runs: pd.DataFrame, metric: str, arms: list[str], least: float = 0.0) -> float:
    """p-value of the two-sided t test that puts the reduction by an arm below ``least``; the largest of those of ``arms``.

    ``arms`` are ways to carry out what the paper leaves open: what is below in one of them alone has the p-value 1.
    """
    found = [-np.log(ratios(runs, metric, arm)) for arm in arms]
    return max(p_below(values, -np.log1p(-least)) for values in found)
