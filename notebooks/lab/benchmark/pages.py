"""What the pages take from the benchmark: the figures of chapters 34, 64 and 72 and the table of 72, by the answers of `reading`.

In every figure better lies to the right, and its axis says for whom.
"""

from __future__ import annotations

import html
import math
from collections.abc import Mapping

import numpy as np
import pandas as pd

from ..data.with_axes import CONTROLS, SETS
from ..page import figures
from ..page.show import cells, grid, put
from . import models, reading
from .models import NONE, OURS
from .protocol import SIZES
from .reading import BETTER, OPEN, WORSE, Key, Rows

ENDS = ["mean", "low", "high"]
FAR = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100)  # ticks of ratios
NEAR = (0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1, 1.1, 1.2, 1.4, 1.6, 2, 2.5, 3)
EDGES = {models.SMALL: 10.0, models.QUARTER: 4.0}  # ratios beyond are drawn as arrows
AXES_END = 1.8  # likewise in chapter 34
SIDES = {WORSE: "dense", OPEN: "constant", BETTER: "ndlinear"}  # answers, left to right: a colour


def of_kinds() -> dict[str, list[str]]:
    """The sets of each kind of data."""
    found: dict[str, list[str]] = {}
    for name, each in SETS.items():
        found.setdefault(each.kind, []).append(name)
    return found


# ---------------------------------------------------------------------------------------------------- chapter 34: axes
def _heights(groups: Mapping[str, list[str]]) -> dict[str, float]:
    """A height for each name, one group after the other with half a row between them."""
    names = [(at, name) for at, group in enumerate(groups.values()) for name in group]
    return {name: row + 0.5 * at for row, (at, name) in enumerate(names)}


def _beside(axis, at: Mapping[str, float], edge: float | None = None) -> None:
    """Names of rows at their heights, the first on top, and a line where nothing differs; the axis ends at an edge and its inverse."""
    figures.rows(axis, at, line=1.0)
    axis.set_yticks(list(at.values()), list(at))
    axis.set_ylim(max(at.values()) + 0.7, -0.7)
    axis.set_xscale("log")
    if edge:
        axis.set_xlim(0.97 / edge, 1.03 * edge)
    low, high = axis.get_xlim()
    ticks = [tick for tick in (FAR if high / low > 8 else NEAR) if low < tick < high]
    axis.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axis.minorticks_off()


def _arrows(axis, points: pd.Series, height, edge: float, colour: str) -> pd.Series:
    """An arrow at the edge for each ratio that lies beyond it or its inverse; returns which do."""
    heights = pd.Series(height, index=points.index)
    for mark, part, at in (("<", points < 1 / edge, 1 / edge), (">", points > edge, edge)):
        look = {"color": colour, "alpha": 0.6, "ls": "none"}
        axis.plot([at] * sum(part), heights[part], mark, **look)
    return (points < 1 / edge) | (points > edge)


def _pooled(axis, at: float, answer: Mapping, **look) -> None:
    """A pooled ratio: its interval, and as a thin line the one for a new set."""
    if "ratio" in answer:
        axis.plot([answer["new low"], answer["new high"]], [at, at], color="#8a8a8a", lw=1)
        ends = [answer[end] for end in ("ratio", "low", "high")]
        figures.intervals(axis, at, ends, "ndlinear", ms=8, elinewidth=3, **look)


def _sized(axis, found: pd.DataFrame, at: Mapping[str, float], edge: float = math.inf) -> None:
    """The ratio of each set in both samples, the small one hollow; above one where axes help; an arrow beyond an edge."""
    for size, shift in zip(SIZES, (-0.18, 0.18)):
        own = found[(found["size"] == size) & found["data"].isin(at)]
        look = {"label": f"{size} sample"} | ({"mfc": "none"} if size == "small" else {})
        heights = own["data"].map(at) + shift
        beyond = _arrows(axis, np.exp(own["mean"]), heights, edge, figures.colour("ndlinear"))
        ends = np.exp(own.loc[~beyond, ENDS])
        figures.intervals(axis, heights[~beyond], ends, "ndlinear", ms=4, lw=1, **look)


def draw_axes(axis, rows: Rows) -> None:
    """The test loss of NdLinear with all entries permuted over that in place: a row for each set, by kind, and all sets together."""
    found = reading.by_axes(rows, models.SMALL)
    at = _heights(of_kinds() | {"all": ["all sets together"]})
    _sized(axis, found, at, AXES_END)
    for size, shift in zip(SIZES, (-0.18, 0.18)):
        look = {"mfc": "none"} if size == "small" else {}
        _pooled(axis, at["all sets together"] + shift, reading.answer(found, size), **look)
    _beside(axis, at, AXES_END)
    for kind, names in of_kinds().items():
        middle = np.mean([at[name] for name in names])
        place = axis.get_yaxis_transform()
        axis.text(1.02, middle, kind, transform=place, va="center", style="italic")
    axis.set_xlabel("test loss, entries permuted / in place (right: axes help)")


def draw_controls(axis, rows: Rows) -> None:
    """The same for the two controls, whose answer is known."""
    at = _heights({"controls": list(CONTROLS)})
    _sized(axis, reading.by_axes(rows, models.SMALL, list(CONTROLS)), at)
    _beside(axis, at)
    axis.set_yticks(list(at.values()), [each.about for each in CONTROLS.values()])


# -------------------------------------------------------------------------------------------------- chapter 64: layers
def draw_layers(axis, rows: Rows, budget: str) -> None:
    """The loss of each other layer of a budget over that of NdLinear, or of the sum: a point or an arrow for each set, and all together."""
    names = []
    for layer in (kind for kind in models.LAYERS[budget] if kind != OURS[budget]):
        found = reading.against(rows, budget, layer)
        if found.empty:
            continue
        at, own = len(names), found[found["size"] == "both"]
        points = np.exp(-own["mean"])
        beyond = _arrows(axis, points, at + 0.25, EDGES[budget], "#8a8a8a")
        height = [at + 0.25] * sum(~beyond)
        axis.plot(points[~beyond], height, ".", color="#8a8a8a", alpha=0.6)
        turned = found.assign(mean=-found["mean"])
        _pooled(axis, at, reading.answer(turned))
        fewer = f" ({len(own)} sets)" if len(own) < len(SETS) else ""
        names.append(models.NAMES[layer] + fewer)
    _beside(axis, dict(zip(names, range(len(names)))))
    ours = "NdLinear" if budget == models.SMALL else "the sum"
    axis.set_xlabel(f"test loss / that of {ours} (right: {ours} is better)")


def share_of_dense(rows: Rows, budget: str) -> pd.Series:
    """The parameters of NdLinear's network, or of the sum's, over those of dense layers of equal width, by set."""
    pair = reading.model(OURS[budget], budget), reading.model("dense", NONE)
    sizes = {n: [rows.parameters[key(n, SIZES[-1])] for key in pair] for n in SETS}
    return pd.Series({name: ours / dense for name, (ours, dense) in sizes.items()})


# --------------------------------------------------------------------------------------------------- chapter 72: kinds
def lowest(rows: Rows, names: list[str], budget: str) -> str:
    """Of the models that fit a budget on all of these sets, the one with the lowest mean logarithm of the test loss."""
    means: dict[str, list[float]] = {}
    for name in names:
        for size in SIZES:
            ours = Key(name, size, OURS[budget], budget)
            for key in (ours, *reading.rivals(rows, name, size, budget)):
                means.setdefault(key.layer, []).append(rows.tested[key].mean())
    whole = {layer: np.mean(v) for layer, v in means.items() if len(v) == len(SIZES) * len(names)}
    return min(whole, key=whole.get)


def kinds(rows: Rows, budget: str) -> pd.DataFrame:
    """For each kind of data NdLinear, or the sum, against the best other model of its size.

    Returns:
        Columns kind, sets, better, worse, not told apart (cells), ratio (of the losses, geometric mean over the sets), lowest (the
        layer with the lowest mean loss).
    """
    compared = reading.against_best(rows, budget)
    found = []
    for kind, names in of_kinds().items():
        own = compared[compared["data"].isin(names)]
        ratio = np.exp(own.loc[own["size"] == "both", "mean"].mean())
        row = {"kind": kind, "sets": len(names)} | reading.counts(own)
        found.append(row | {"ratio": ratio, "lowest": lowest(rows, names, budget)})
    return pd.DataFrame(found)


def show_kinds(rows: Rows) -> None:
    """The table of chapter 72, four columns, so that it fits a phone: a line in each cell for either budget."""
    both = [kinds(rows, budget).set_index("kind") for budget in OURS]
    body, text = [], []
    for kind in both[0].index:
        own = [found.loc[kind] for found in both]
        counted = [f"{row[BETTER]} · {row[WORSE]} · {row[OPEN]}" for row in own]
        ratio = [f"{row['ratio']:.2f}" for row in own]
        first = [models.NAMES[row["lowest"]] for row in own]
        head = f"{kind} ({own[0]['sets']})"
        lines = ["<br>".join(map(html.escape, part)) for part in (counted, ratio, first)]
        body.append(cells([html.escape(head), *lines]))
        text.append([head, *(" | ".join(part) for part in (counted, ratio, first))])
    heads = ["data (sets)", "better · worse · open", "loss ratio", "lowest loss"]
    plain = pd.DataFrame(text, columns=heads).to_string(index=False)
    put(plain, html=grid("Answers by kind of data", heads, body))


def draw_kinds(axis, rows: Rows, budget: str) -> None:
    """In how many cells of each kind of data NdLinear, or the sum, is worse, not told apart and better: bars around the middle."""
    found = kinds(rows, budget)
    left = -found[WORSE] - found[OPEN] / 2
    for word, look in SIDES.items():
        axis.barh(found["kind"], found[word], left=left, color=figures.colour(look), label=word)
        for at, (start, count) in enumerate(zip(left, found[word])):
            if count:
                axis.text(start + count / 2, at, count, ha="center", va="center", color="white")
        left = left + found[word]
    axis.axvline(0, color="#8a8a8a", lw=1)
    axis.set_ylim(len(found) - 0.5, -0.5)
    axis.set_xticks([])
    axis.set_xlabel(f"{models.NAMES[OURS[budget]]}\n(right: better)")
