"""Random and official splits, scaled by the training part alone."""

from __future__ import annotations

import dataclasses

import numpy as np
import torch

from ..modes import LabError
from ..train.loop import Split


def _scaler(x: np.ndarray, standardise: str):
    """A function that scales inputs by the statistics of the training inputs ``x``."""
    if standardise == "none":
        return lambda part: part
    every = {"entry": 0, "channel": tuple(i for i in range(x.ndim) if i != 1), "all": None}
    if standardise not in every:
        raise LabError(f"standardise={standardise!r}: it is one of none, {', '.join(every)}")
    axes = every[standardise]
    mean = x.mean(axis=0 if standardise == "all" else axes, keepdims=True)
    deviation = (x - mean).std(axis=axes, keepdims=True)
    return lambda part: (part - mean) / np.where(deviation > 0, deviation, 1)


def _scaled(parts: list[tuple[np.ndarray, np.ndarray]], standardise: str) -> Split:
    """Training, validation and test part as tensors with memory of their own, scaled by the first."""
    parts = [(np.array(x, np.float32), y) for x, y in parts]
    scale = _scaler(parts[0][0], standardise)
    return Split(*[(torch.from_numpy(scale(x)), torch.from_numpy(y)) for x, y in parts])


def _targets(y) -> tuple[np.ndarray, list[np.ndarray]]:
    """Targets as int64 classes or float32, and the groups of cases that keep their shares in every part."""
    y = np.asarray(y)
    if y.ndim == 1 and np.issubdtype(y.dtype, np.integer):
        return y.astype(np.int64), [np.flatnonzero(y == c) for c in np.unique(y)]
    return y.astype(np.float32), [np.arange(len(y))]


def _cut(groups: list[np.ndarray], shares, rng) -> list[np.ndarray]:
    """Indices of the parts: each group is cut by the cumulated shares, the pieces are joined and shuffled."""
    cuts = [
        np.split(rng.permutation(g), np.rint(np.cumsum(shares) * len(g)).astype(int))
        for g in groups
    ]
    return [rng.permutation(np.concatenate(c)) for c in zip(*cuts)]


def split(
    x,
    y,
    *,
    seed: int,
    parts: tuple[float, float, float] = (0.6, 0.2, 0.2),
    standardise: str = "entry",
) -> Split:
    """Random training, validation and test part; classes keep their shares; inputs are scaled by the training part alone.

    Args:
        x: (n, ...) inputs. y: (n,) integer classes, split class by class, or (n, ...) real targets.
        parts: shares that sum to 1.
        standardise: after subtracting the mean of each input entry, divide by the deviation of that entry ("entry", for
            features; constant entries stay zero) or of all entries together ("all", for images); or centre and scale each
            channel, axis 1, as a whole ("channel", for colour images and series); or leave the inputs alone ("none").
    """
    if abs(sum(parts) - 1) > 1e-9 or min(parts) <= 0:
        raise LabError(f"parts={parts} must be three positive shares that sum to 1")
    x, (y, groups) = np.asarray(x, np.float32), _targets(y)
    if len(x) != len(y):
        raise LabError(f"{len(x)} inputs and {len(y)} targets: each input needs its target")
    index = _cut(groups, parts[:2], np.random.default_rng(seed))
    return _scaled([(x[i], y[i]) for i in index], standardise)


def official(data, *, seed: int, val: float = 0.2, standardise: str = "entry") -> Split:
    """The publisher's test part; the publisher's training part, less a random share ``val`` of each class for validation.

    Args:
        data: a `Data` with the parts "train" and "test". standardise: as in `split`.
    """
    (x, y), (x_test, y_test) = data.part("train"), data.part("test")
    y, groups = _targets(y)
    train, held = _cut(groups, [1 - val], np.random.default_rng(seed))
    parts = [(x[train], y[train]), (x[held], y[held]), (x_test, _targets(y_test)[0])]
    return _scaled(parts, standardise)


EXACT = 20_000  # pictures in the part "train_exact" of a data set that has one


def some_of_each(data, images: int, seed: int | None = None) -> tuple[np.ndarray, np.ndarray]:
    """``images`` training pictures and their classes, equally many of each class, in the order of the data set.

    Pictures kept exactly are taken, where the data set names them (part "train_exact") and has enough.

    Args:
        data: a `Data` with classes as targets. seed: which ones are drawn; None: the first of each class.
    """
    exact = images <= EXACT and "train_exact" in data.splits
    x, y = data.part("train_exact" if exact else "train")
    each = max(images // len(data.names), 1)
    of = [np.flatnonzero(y == c) for c in range(len(data.names))]
    if min(map(len, of)) < each:
        raise LabError(
            f"{data.name} has {len(y):,} training pictures here, too few for {images:,}, "
            "equally many of each class"
        )
    if seed is not None:
        draw = np.random.default_rng(seed)
        of = [draw.permutation(found) for found in of]
    chosen = np.sort(np.concatenate([found[:each] for found in of]))
    return x[chosen], y[chosen]


def few_of_each(data, images: int) -> Split:
    """The pictures of `some_of_each`, a tenth of each class held out for validation, and the official test part; each channel
    centred and scaled. Where a class has no more than ten pictures, half of them are held out."""
    x, y = some_of_each(data, images)
    x_test, y_test = data.part("test")
    parts = {"train": slice(0, len(y)), "test": slice(len(y), len(y) + len(y_test))}
    joined = {"x": np.concatenate([x, x_test]), "y": np.concatenate([y, y_test])}
    few = len(y) <= 10 * len(data.names)
    small = dataclasses.replace(data, **joined, splits=parts)
    return official(small, seed=0, val=0.5 if few else 0.1, standardise="channel")
