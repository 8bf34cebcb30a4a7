"""Do axes matter on data that have them? The same numbers with their axes kept, with one axis lost, with both lost (evidence 31).

A case is a table of (steps, channels). All entries of a part are standardised one by one, so moving them is a permutation of the
inputs and nothing else: the numbers, the targets and the number of weights stay what they are.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
import scipy.signal
import torch
from torch import Tensor, nn

from ndlinear import NdLinear

from ..data import load
from ..data.splits import split
from ..modes import LabError
from ..stats import differences, interval
from ..train.loop import Split

ORDERS = ("in place", "axes permuted", "steps lost", "channels lost", "both lost")
SETS = {
    "heartbeat": 15,
    "racketsports": 1,
}  # name -> how many steps of the file are averaged to one
HIDDEN = (16, 16)


def places(steps: int, channels: int, order: str, seed: int) -> Tensor:
    """Where each entry of a (steps, channels) table comes from: flat indices, (steps, channels).

    "axes permuted": one permutation of the steps and one of the channels. "steps lost": every channel has a permutation of the
    steps of its own; "channels lost": every step one of the channels; "both lost": one permutation of all entries.
    """
    if order not in ORDERS:
        raise LabError(f"no order {order!r}; there are {', '.join(ORDERS)}")
    index = torch.arange(steps * channels).view(steps, channels)
    draw = torch.Generator().manual_seed(seed)
    if order == "axes permuted":
        rows, columns = (torch.randperm(n, generator=draw) for n in (steps, channels))
        return index[rows][:, columns]
    if order == "both lost":
        return index.flatten()[torch.randperm(index.numel(), generator=draw)].view(steps, channels)
    if order == "in place":
        return index
    lost = 0 if order == "steps lost" else 1
    return index.gather(lost, torch.rand(steps, channels, generator=draw).argsort(lost))


def move(data: Split, order: str, seed: int) -> Split:
    """The same split with the entries of every case moved in one and the same way; inputs are (n, steps, channels)."""
    index = places(*data.train[0].shape[1:], order, seed)
    parts = (data.train, data.val, data.test)
    return Split(*[(x.flatten(1)[:, index], y) for x, y in parts])


def series(name: str, seed: int) -> Split:
    """Random parts of 60, 20 and 20 % of a set of `SETS`, (steps, channels) each; the archive's parts are put together.

    "heartbeat": 27 times, 61 frequencies. "racketsports": 30 times, 6 sensors. "ecg5000": the spectrograms of its series, 19
    times, 17 frequencies.
    """
    data = load(name)
    if name == "ecg5000":
        return split(spectrogram(data.x[:, 0]), data.y, seed=seed)
    x = data.x.transpose(0, 2, 1)
    steps = x.shape[1] // SETS[name]
    x = x[:, : steps * SETS[name]].reshape(len(x), steps, SETS[name], -1).mean(2)
    return split(x, data.y, seed=seed)


def spectrogram(x: np.ndarray) -> np.ndarray:
    """Log magnitudes of short Fourier transforms, Hann windows of 32 values, 6 apart: (n, length) -> (n, times, frequencies)."""
    *_, found = scipy.signal.stft(x, nperseg=32, noverlap=26, boundary=None, padded=False)
    return np.log1p(np.abs(found)).transpose(0, 2, 1)


def constant_loss(data: Split, loss) -> float:
    """Test loss of the best answer that looks at nothing: the shares of the classes, or the mean, of the training part."""
    y, y_test = data.train[1], data.test[1]
    if y.is_floating_point():
        answer = y.mean(0)
    else:
        answer = (torch.bincount(y) / len(y)).log()
    return loss(answer.expand(len(y_test), -1), y_test).item()


def standardised(data: Split) -> Split:
    """A split whose input entries have mean 0 and deviation 1 over the training part; constant ones stay 0."""
    x = data.train[0]
    mean, deviation = x.mean(0), x.std(0, correction=0)
    deviation = torch.where(deviation > 0, deviation, 1)
    parts = (data.train, data.val, data.test)
    return Split(*[((x - mean) / deviation, y) for x, y in parts])


def network(arm: str, steps: int, channels: int, outputs: int) -> nn.Sequential:
    """(n, steps, channels) -> (n, outputs): a layer of 256 hidden numbers, ReLU, a dense read-out.

    "ndlinear": (steps, channels) -> (16, 16). "dense": all entries to 256.
    """
    hidden = HIDDEN[0] * HIDDEN[1]
    if arm == "ndlinear":
        first = nn.Sequential(NdLinear((steps, channels), HIDDEN), nn.Flatten())
    elif arm == "dense":
        first = nn.Sequential(nn.Flatten(), nn.Linear(steps * channels, hidden))
    else:
        raise LabError(f"no arm {arm!r}; there are ndlinear and dense")
    return nn.Sequential(first, nn.ReLU(), nn.Linear(hidden, outputs))


# ------------------------------------------------------------------------------------------------------- what is judged
def gains(runs: pd.DataFrame, data: str, arm: str, order: str) -> pd.Series:
    """By how much the logarithm of the test loss is higher in an order than with all in place, seed by seed."""
    part = runs[(runs["data"] == data) & (runs["arm"] == arm)]
    logs = part.assign(log=np.log(part["test_loss"]))
    return differences(logs, "log", order, "in place", by="order")


def behind(runs: pd.DataFrame, data: str, order: str) -> pd.Series:
    """By how much the logarithm of NdLinear's test loss is above that of the dense network, seed by seed."""
    part = runs[(runs["data"] == data) & (runs["order"] == order)]
    return differences(part.assign(log=np.log(part["test_loss"])), "log", "ndlinear", "dense")


def percent(logs, level: float = 0.95) -> tuple[float, float, float]:
    """Mean and interval of differences of logarithms, as changes in percent."""
    return tuple(100 * np.expm1(value) for value in interval(logs, level=level))
