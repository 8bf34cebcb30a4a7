"""Tables with real axes: cases (n, D_1, D_2[, D_3]) whose axes mean something, and teachers whose answer about axes is known.

`SETS` says of each what it is, where it is from and along how many of its axes neighbours are alike. Chapter 34 and the benchmark
of layers train on them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import scipy.signal
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..models import cnn_features
from . import load, registry

CLIP = 5.0  # standardised entries are cut off here


class Table(NamedTuple):
    """Cases (n, D_1, D_2[, D_3]) and their classes (n,) or real targets (n, q)."""

    x: np.ndarray
    y: np.ndarray


def folded(name: str, axes: Sequence[int]) -> Table:
    """The cases of a data set as tables of these axes."""
    data = load(name)
    return Table(data.x.reshape(-1, *axes), data.y)


def spectra(name: str, hop: int) -> Table:
    """Log magnitudes of short Fourier transforms of a set of one channel, windows of 32 points: (n, times, 17 frequencies)."""
    data, how = load(name), {"nperseg": 32, "noverlap": 32 - hop, "boundary": None, "padded": False}
    found = np.abs(scipy.signal.stft(data.x[:, 0], **how)[2])
    return Table(np.log1p(found).transpose(0, 2, 1), data.y)


def pictures(name: str, form: str, count: int = 6000) -> Table:
    """Pictures as "grey" (16, 16), as "colour" (3, 8, 8), or as "patches" (16 patches, 48 numbers of 4 x 4 places in colour)."""
    data = load(name)
    x, y = data.part("train")
    chosen = np.flatnonzero(y < 10)[:count]  # of CIFAR-100 the first ten classes
    x, y = x[chosen] / np.float32(255), y[chosen]
    if form == "colour":
        return Table(x.reshape(-1, 3, 8, 4, 8, 4).mean((3, 5)), y)
    x = x.reshape(-1, 3, 16, 2, 16, 2).mean((3, 5))
    if form == "grey":
        return Table(x.mean(1), y)
    patches = x.reshape(-1, 3, 4, 4, 4, 4).transpose(0, 2, 4, 1, 3, 5)
    return Table(patches.reshape(len(x), 16, 48), y)


def windows(name: str, length: int = 24) -> Table:
    """Readings of 7 sensors at 24 times, windows side by side; the target is the mean of each sensor over the next window."""
    x = load(name).x
    count = len(x) // length
    tables = x[: count * length].reshape(count, length, -1)
    return Table(tables[:-1], tables[1:].mean(1))


def sensors(name: str, every: int) -> Table:
    """Cases (times, channels) of an archive's set, ``every`` points averaged to one; its parts are put together."""
    data = load(name)
    x = data.x.transpose(0, 2, 1)
    steps = x.shape[1] // every
    return Table(x[:, : steps * every].reshape(len(x), steps, every, -1).mean(2), data.y)


def letters(name: str, novels: int = 10, length: int = 1000, most: int = 400) -> Table:
    """Pieces of novels of a thousand letters: how often which letter follows which, log(1 + count), (27, 27); which novel."""
    data = load(name)
    text = "\n\n".join(data.part("train")[0]).split("\f")[:novels]
    x, y = [], []
    for novel, whole in enumerate(text):
        codes = np.frombuffer(whole.lower().encode("ascii", "replace"), np.uint8)
        number = np.where((codes >= 97) & (codes <= 122), codes - 96, 0)
        pieces = min(most, len(number) // length)
        for piece in number[: pieces * length].reshape(pieces, length):
            pairs = np.bincount(27 * piece[:-1].astype(int) + piece[1:], minlength=27 * 27)
            x.append(np.log1p(pairs).reshape(27, 27))
            y.append(novel)
    return Table(np.stack(x), np.array(y))


def teacher(terms: int, count: int = 5000) -> Table:
    """Gaussian cases (8, 8) and the answers of a teacher: 16 ReLU units whose matrix is a sum of ``terms`` Kronecker products
    (4, 4) x (8, 8), or without any structure (0); a fixed draw for each number of terms."""
    draw = np.random.default_rng(3400 + terms)
    x = draw.standard_normal((count, 8, 8))
    if terms:
        factors = draw.standard_normal((2, terms, 4, 8))
        weight = np.einsum("rai,rbj->abij", *factors)
    else:
        weight = draw.standard_normal((4, 4, 8, 8))
    answer = np.maximum(np.tensordot(x, weight, ((1, 2), (2, 3))), 0)
    y = np.tensordot(answer, draw.standard_normal((4, 4)), 2)
    return Table(x.astype(np.float32), ((y - y.mean()) / y.std())[:, None])


def turned(table: Table, seed: int) -> Table:
    """A table whose cases are multiplied by a random orthogonal matrix over all entries; answers stay as they are.

    On Gaussian cases that is the same teacher with turned weights. A turned matrix permuted is as likely as one that is not,
    so for it the gain of axes is zero in expectation, whatever the teacher.
    """
    flat = table.x.reshape(len(table.x), -1)
    draw = np.random.default_rng(34_500 + seed)
    turn = np.linalg.qr(draw.standard_normal((flat.shape[1],) * 2))
    signs = np.sign(np.diag(turn.R))
    return Table((flat @ (turn.Q * signs)).reshape(table.x.shape).astype(np.float32), table.y)


def features(name: str, count: int = 6000, pictures: int = 12000) -> Table:
    """The features (64, 8, 8) that the paper's network has before its head, averaged over two by two places to (64, 4, 4), of pictures
    that its body was not trained on.

    The body is trained for three epochs with a linear head: of CIFAR-10 on the pictures after the first ``count``; of CIFAR-100
    on the other ninety classes, so that it has seen none of the ten.
    """
    data = load(name)
    x, y = data.part("train")
    chosen = np.flatnonzero(y < 10)[:count]
    other = np.flatnonzero(y >= 10) if y.max() >= 10 else np.arange(len(y))[count:]
    with torch.random.fork_rng(devices=[]):
        body = _trained_body(x[other[:pictures]], y[other[:pictures]])
    made = [body(_coloured(x[part])) for part in np.array_split(chosen, max(1, len(chosen) // 500))]
    x = torch.cat(made).unflatten(2, (4, 2)).unflatten(4, (4, 2)).mean((3, 5))
    return Table(x.numpy(), y[chosen])


def _coloured(x: np.ndarray) -> Tensor:
    return torch.from_numpy(x).float() / 127.5 - 1


def _trained_body(x: np.ndarray, y: np.ndarray, epochs: int = 3, batch: int = 100) -> Callable:
    torch.manual_seed(3400)
    body, head = cnn_features(), nn.Linear(4096, int(y.max()) + 1)
    adam = torch.optim.Adam([*body.parameters(), *head.parameters()], lr=1e-3)
    for _ in range(epochs):
        for index in torch.randperm(len(x)).split(batch):
            loss = F.cross_entropy(
                head(body(_coloured(x[index])).flatten(1)), torch.from_numpy(y[index]).long()
            )
            adam.zero_grad()
            loss.backward()
            adam.step()
    return torch.no_grad()(body.eval())


def tables(name: str) -> Table:
    """A table by its name, but for sentences, which need an encoder."""
    kind, _, terms = name.partition(" ")
    if kind == "teacher":
        return teacher(int(terms))
    return registry.function(SETS[name].made)(SETS[name].data)


# ------------------------------------------------------------------------------------------------------- all of them, by name
class Set(NamedTuple):
    """A set of tables: what a case is, of which kind, the data set that it is made of, its axes and outputs, along how many axes
    neighbours are alike (1: the first one, 2: the last two, 0: none), and the function that makes it of the data set."""

    about: str
    kind: str
    data: str
    axes: tuple[int, ...]
    outputs: int
    neighbours: int = 0
    made: str | dict = ""


def _declared(group: str) -> dict[str, Set]:
    found = registry.declared()[group]
    return {name: Set(**told | {"axes": tuple(told["axes"])}) for name, told in found.items()}


SETS = _declared("tables")
CONTROLS = _declared("controls")  # the answer about their axes is known
SENTENCES = ("sst2", "cola")  # they need an encoder


# --------------------------------------------------------------------------------------------------------------- entries
def scaling(x: np.ndarray) -> Callable[[np.ndarray], np.ndarray]:
    """How entries get mean 0 and deviation 1 over the cases of ``x``, each by itself; constant ones become 0."""
    mean, deviation = x.mean(0), x.std(0)
    return lambda part: (part - mean) / np.where(deviation > 1e-9, deviation, 1)


def clipped(x: np.ndarray) -> Tensor:
    """As float32, cut off at 5 on both sides."""
    return torch.from_numpy(np.asarray(x, np.float32)).clamp(-CLIP, CLIP)
