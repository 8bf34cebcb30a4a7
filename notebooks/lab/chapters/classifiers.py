"""Chapter 42: classifiers of time series, their data, their scores, and models that are no networks.

The networks are those of `models.series_classifier`, at the sizes that give the printed counts. With one channel and
without positions attention needs no products of queries and keys (`Classifier.attend`), and an NdLinear block with an
axis of length one is a dense block with a learned activation (`lab.decoder.NdFeedForward`): the same functions of the
same parameters, in about half the time. tests/lab/test_classifiers.py holds them against the plain modules.
"""

from __future__ import annotations

import functools
import math

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ndlinear import NdLinear

from .. import models
from ..counts import count_macs
from ..data import load
from ..decoder import NdFeedForward
from ..machine import require
from ..modes import mode
from ..page.facts import facts

# what the page calls it: (registry of the data, row of models.UCR that gives the sizes, classes)
SETS = {
    "ECGFiveDays": ("ecgfivedays", "ECGFiveDay", 2),
    "ECG5000": ("ecg5000", "ECG5000", 5),
    "ChlorineConcentration": ("chlorineconcentration", "Chlorine Conc.", 3),
    "Heartbeat": ("heartbeat", "HeartBeat", 2),
    "LSST": ("lsst", "LSST", 14),
    "Sleep": ("sleep", "Sleep", 5),
    "Heartbeat, training part": ("heartbeat", "HeartBeat", 2),
}
FRAMES = 27  # of a case of Heartbeat's training part, as the networks get it
ARMS = ("base", "base*", "ndlinear", "learned", "folded", "time")
FOLDS = {  # width: its two modes, the hidden two
    16: ((4, 4), (8, 8)),
    32: ((8, 4), (16, 8)),
    48: ((8, 6), (16, 12)),
}


# ------------------------------------------------------------------------------ feed-forward blocks
class Spline(nn.Module):
    """A learned activation: its values at ``knots`` even places on [-4, 4], linear between and
    beyond; starts as ReLU."""

    REACH = 4.0

    def __init__(self, knots: int):
        super().__init__()
        self.values = nn.Parameter(torch.linspace(-self.REACH, self.REACH, knots).relu())

    def forward(self, t: Tensor) -> Tensor:
        values, ends = self.values, (-self.REACH, self.REACH)
        places = torch.linspace(*ends, len(values), dtype=values.dtype, device=values.device)
        slopes = values.diff() * ((len(values) - 1) / (2 * self.REACH))
        piece = torch.bucketize(t, places[1:-1])
        return slopes[piece] * t + (values[:-1] - slopes * places[:-1])[piece]


class TwoModes(nn.Module):
    """NdLinear from (D_1, D_2) to (H_1, H_2), ReLU, and back, on inputs (..., D_1, D_2) or with
    these two axes as one."""

    def __init__(self, D: tuple[int, int], H: tuple[int, int], folded: bool, layer=NdLinear):
        super().__init__()
        self.D, self.folded = D, folded
        self.body = nn.Sequential(layer(D, H), nn.ReLU(), layer(H, D))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x.unflatten(-1, self.D)).flatten(-2) if self.folded else self.body(x)


def two_axes(steps: int, width: int) -> int:
    """The largest r for which (steps, width) -> (r, width) and back has no more parameters than a
    dense block of 4 widths."""
    dense = 2 * 4 * width * width + 5 * width
    return (dense - 2 * width * (width + 1) - steps) // (2 * steps + 1)


def block(arm: str, width: int, terms: int, steps: int, layer=None) -> nn.Module:
    """The feed-forward block of an arm, (..., width) -> (..., width).

    "base" and "base*": dense, of 4 widths and of one. "ndlinear": (d, 1) -> (d, m) -> (d, 1).
    "learned": dense of one width with a `Spline` of as many parameters as NdLinear has more than
    "base*". "folded": the width as two modes, the hidden size of "base". "time": the modes are time
    and channel, and the hidden shape is the largest that the parameters of "base" allow.
    ``layer``: in place of NdLinear, mode after mode.
    """
    if arm == "folded":
        return TwoModes(*FOLDS[width], folded=True, layer=layer or NdLinear)
    if arm == "time":
        hidden = (two_axes(steps, width), width)
        return TwoModes((steps, width), hidden, folded=False, layer=layer or NdLinear)
    if arm == "learned":
        return models.feed_forward(width, width, act=functools.partial(Spline, 3 * terms + 1))
    if arm == "ndlinear":
        if layer is None:
            return NdFeedForward(width, width, terms)
        return models.feed_forward(width, width, terms, layer=layer)
    return models.feed_forward(width, {"base": 4 * width, "base*": width}[arm])


# ----------------------------------------------------------------------------------------- networks
def sines(steps: int, width: int) -> Tensor:
    """The fixed positions of a Transformer, (steps, width): sines and cosines of geometrically
    spaced periods."""
    t = torch.arange(steps)[:, None] * torch.exp(-math.log(1e4) * torch.arange(0, width, 2) / width)
    return torch.stack([t.sin(), t.cos()], -1).flatten(1)


class Classifier(models.Encoder):
    """`models.Encoder`, with fixed positions or without; of one channel without positions by its
    short form."""

    def __init__(self, channels, width, outputs, block, heads, steps, positions=False):
        super().__init__(channels, width, outputs, block, heads)
        self.short = channels == 1 and not positions
        self.register_buffer(
            "positions", sines(steps, width) if positions else None, persistent=False
        )

    def forward(self, x: Tensor) -> Tensor:
        if self.short:
            after = self.layer.norms[0](self.attend(x))
            return self.out(self.layer.norms[1](after + self.layer.block(after)).mean(1))
        x = self.embed(x)
        if self.positions is not None:
            x = x + self.positions
        return self.out(self.layer(x).mean(1))

    def attend(self, x: Tensor) -> Tensor:
        """(B, T, 1) -> (B, T, d): the embedded series plus its attention, before the first norm."""
        attention = self.layer.attention
        heads = attention.num_heads
        width = attention.embed_dim
        values = x[..., 0]
        by = self.embed.weight[:, 0]
        const = self.embed.bias
        # a token is x_t by + const; so are its query, key and value, head by head:
        # (3, heads, d / heads)
        scaled = (attention.in_proj_weight @ by).view(3, heads, -1)
        fixed = F.linear(const, attention.in_proj_weight, attention.in_proj_bias).view(3, heads, -1)
        root = math.sqrt(width // heads)
        tilt = (scaled[0] * scaled[1]).sum(-1) / root
        start = (fixed[0] * scaled[1]).sum(-1) / root
        theta = values[..., None] * tilt + start  # (B, T, heads)
        means = tilted_means(values, theta.flatten(1)).view_as(theta)
        out = attention.out_proj.weight.view(width, heads, -1)
        read = (out * scaled[2]).sum(-1)  # (d, heads)
        rest = const + attention.out_proj.bias + (out * fixed[2]).sum((1, 2))
        return F.linear(torch.cat([x, means], -1), torch.cat([by[:, None], read], 1), rest)


def tilted_means(x: Tensor, theta: Tensor) -> Tensor:
    """Means of x_1..x_T under weights proportional to exp(theta x_s): (B, T), (B, R) -> (B, R)."""
    x, theta = x[:, None, :, None], theta[:, None, :, None]
    return F.scaled_dot_product_attention(theta, x, x, scale=1.0)[:, 0, :, 0]


def build(
    dataset: str,
    arm: str,
    steps: int,
    channels: int | None = None,
    heads: int = 4,
    positions: bool = False,
    layer=None,
) -> models.Encoder:
    """The classifier of an arm for a data set: sizes of `models.UCR`, one output more than there are classes.

    ``layer``: the same from plain modules, without short cuts and positions, this layer in place of NdLinear: to compare
    with, and (`models.Cheapest`) to count.
    """
    _, row, classes = SETS[dataset]
    printed, width, _, terms = models.UCR[row]
    sizes = channels or printed, width, classes + 1, block(arm, width, terms, steps, layer), heads
    return models.Encoder(*sizes) if layer else Classifier(*sizes, steps, positions)


def macs(model: models.Encoder, steps: int) -> int:
    """Multiply-adds of one case, attention included; a learned activation's look-ups are not
    multiply-adds."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    fused = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)  # fused kernels are not counted
    try:
        with sdpa_kernel(SDPBackend.MATH):
            return count_macs(model, torch.zeros(1, steps, model.embed.in_features))
    finally:
        torch.backends.mha.set_fastpath_enabled(fused)


# -------------------------------------------------------------------------------- data and scores
@functools.lru_cache(maxsize=20)
def parts(dataset: str, seed: int) -> dict[str, tuple[Tensor, Tensor]]:
    """Parts "train" and "test": series (n, steps, channels), each channel centred and scaled by the training part, and classes
    from 0. They are the official ones, or for Heartbeat's training part a cut of its own for each seed."""
    data = load(SETS[dataset][0])
    cut = dataset == "Heartbeat, training part"
    found = heartbeat(*data.part("train"), seed) if cut else {p: data.part(p) for p in data.splits}
    x = found["train"][0]
    mean = x.mean((0, 2), keepdims=True)
    deviation = x.std((0, 2), keepdims=True)
    scale = np.where(deviation > 0, deviation, 1)
    return {
        name: (
            torch.from_numpy(((x - mean) / scale).swapaxes(1, 2).astype(np.float32)),
            torch.tensor(y),
        )
        for name, (x, y) in found.items()
    }


def heartbeat(x, y, seed: int, held: float = 0.2) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Heartbeat's training part (n, channels, time) cut in two at random, class by class; time averaged to `FRAMES`."""
    block = x.shape[2] // FRAMES
    x = x[..., : FRAMES * block].reshape(len(x), x.shape[1], FRAMES, block).mean(-1)
    rng = np.random.default_rng(seed)
    kept = np.ones(len(y), bool)
    for k in np.unique(y):
        kept[rng.permutation(np.flatnonzero(y == k))[: round(held * np.sum(y == k))]] = False
    return {"train": (x[kept], y[kept]), "test": (x[~kept], y[~kept])}


def scores(y, predicted) -> dict[str, float]:
    """Accuracy; F1 as the plain mean over the classes of ``y`` (macro), and as their mean by number
    of cases (weighted)."""
    from sklearn import metrics

    found = {"accuracy": float(metrics.accuracy_score(y, predicted))}
    for mean in ("macro", "weighted"):
        f1 = metrics.f1_score(y, predicted, labels=np.unique(y), average=mean, zero_division=0)
        found[f"{mean}_f1"] = float(f1)
    return found


# --------------------------------------------------------------------------------- without networks
def classical(
    kind: str, train: tuple[Tensor, Tensor], test: Tensor, seed: int, kernels: int = 10_000
):
    """Predictions (n,) for the test series, and the number of fitted coefficients.

    "rocket": MiniRocket's features of random convolutions and a ridge classifier whose penalty is
    cross-validated; "linear": logistic regression on the raw series; "sorted": the same on the
    sorted values of each channel, all that is left of a series when the order of time is forgotten;
    "majority": always the most frequent class.
    """
    from sklearn.linear_model import LogisticRegression, RidgeClassifierCV
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    (x, y), test = (part.numpy() for part in train), test.numpy()
    if kind == "majority":
        return np.full(len(test), np.bincount(y).argmax()), 0
    if kind == "sorted":
        x, test = np.sort(x, 1), np.sort(test, 1)
    if kind == "rocket":
        x, test = x.swapaxes(1, 2), test.swapaxes(1, 2)
        body = RidgeClassifierCV(alphas=np.logspace(-3, 3, 10))
        steps = [_minirocket()(kernels, random_state=seed), StandardScaler(with_mean=False), body]
    else:
        x, test = x.reshape(len(x), -1), test.reshape(len(test), -1)
        body = LogisticRegression(max_iter=2000)
        steps = [body]
    predicted = make_pipeline(*steps).fit(x, y).predict(test)
    return predicted, body.coef_.size + body.intercept_.size


def _minirocket():
    """aeon's MiniRocket; in smoke mode without its compiler, which takes longer than everything
    else."""
    numba = require("numba")
    before, numba.config.DISABLE_JIT = numba.config.DISABLE_JIT, mode() == "smoke"
    try:
        return require("aeon.transformations.collection.convolution_based").MiniRocket
    finally:
        numba.config.DISABLE_JIT = before


# ------------------------------------------------------------------------------------------ what is printed
READINGS = {"macro": "macro_f1", "weighted": "weighted_f1", "micro": "accuracy"}
METHODS = {"base": "Base Model", "base*": "Base Model*", "ndlinear": "NdLinear"}  # as printed


def stated(dataset: str) -> pd.Series:
    """The printed F1 of a data set, by arm."""
    rows = facts("ts_tf_classify_final_revised", metric="f1", dataset=SETS[dataset][1])
    rows = rows.set_index("method")["value"]
    return pd.Series({arm: rows[method] for arm, method in METHODS.items()})
