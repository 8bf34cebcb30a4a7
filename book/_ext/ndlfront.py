"""The figure of results on the front page: the situations of chapter 72 that count, one row for each kind of task.

The figure is drawn into the page itself, so that its text has the colour of the page, light or dark, and its size on a phone.
"""

import html
import math
from typing import NamedTuple

import pandas as pd
from lab.page import figures

WIDTH, LEFT, RIGHT = 360, 14, 346  # in units of which a phone shows one per pixel
ROW, TOP = 54, 34
TICKS = (-100, -10, -1, 0, 1, 10, 100)


class Mark(NamedTuple):
    """One way to compare: the column of the rows, the method whose look it has, its height in a row, its words."""

    column: str
    method: str
    height: int
    words: str


MARKS = (
    Mark("dense", "dense", 30, "minus the dense network that it would replace"),
    Mark("fair", "ndlinear", 42, "minus the best recorded model of its size"),
)


def place(value: float) -> float:
    """Horizontal place of a difference: even steps from 0 to 1, to 10, to 100 points; beyond that the edge."""
    size = min(abs(value), 100.0)
    step = size if size <= 1 else 1 + math.log10(size)
    return LEFT + (3 + math.copysign(step, value)) / 6 * (RIGHT - LEFT)


def outcome(low: float, high: float) -> str:
    """Where an interval lies."""
    if low > 0:
        return "ahead"
    return "behind" if high < 0 else "undecided"


def tally(rows: pd.DataFrame, column: str) -> str:
    """How many intervals lie where, in words: "ahead in 3, behind in 6, undecided in 9"."""
    found = [outcome(*pair) for pair in zip(rows[f"{column}_low"], rows[f"{column}_high"])]
    words = ("ahead", "behind", "undecided")
    return ", ".join(f"{word} in {found.count(word)}" for word in words)


def figure(rows: pd.DataFrame, link: str) -> str:
    """The figure with legend and caption; `link` is the address of chapter 72."""
    rows = rows[rows["decides"] & rows["counts"]]
    drawn = drawing(rows)
    legend = "".join(
        f'<span style="white-space: nowrap">{symbol(mark)}</span> {mark.words}<br>'
        for mark in MARKS
    )
    caption = (
        f"NdLinear in {len(rows)} situations in which each model had a learning rate of its own: difference in percentage "
        f"points with 95 % interval. Minus the dense network it is {tally(rows, 'dense')}; minus the best recorded model of "
        f"its size {tally(rows, 'fair')}. Losses of language models: percent. "
        f'<a href="{html.escape(link)}">72 · Should you use it?</a> names each of them, its evidence all others too.'
    )
    return (
        f'<figure class="ndl-front" style="max-width: 30rem; margin: 1rem 0"><p class="ndl-caption">{legend}</p>'
        f'{drawn}<figcaption style="text-align: left">{caption}</figcaption></figure>'
    )


def alternative(rows: pd.DataFrame) -> str:
    """What is seen, row by row."""
    parts = [f"{name}: {tally(part, 'fair')}" for name, part in rows.groupby("kind", sort=False)]
    return (
        "Dots with intervals on both sides of a line at zero, in one row for each kind of task. Minus the best model of its "
        "size NdLinear is, " + "; ".join(parts) + "."
    )


def drawing(rows: pd.DataFrame) -> str:
    """The figure itself as SVG."""
    names = list(dict.fromkeys(rows["kind"]))
    height = TOP + ROW * len(names) + 4
    parts = [axis(height)]
    for number, name in enumerate(names):
        top = TOP + ROW * number
        parts.append(
            f'<path d="M{LEFT} {top}H{RIGHT}" stroke="currentColor" stroke-opacity="0.2"/>'
        )
        parts.append(
            f'<text x="{LEFT}" y="{top + 17}" font-weight="600">{html.escape(name)}</text>'
        )
        some = rows[rows["kind"] == name]
        parts += [marks(some, mark, top) for mark in MARKS]
    label = html.escape(alternative(rows))
    return (
        f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{label}" width="100%" '
        'style="font: 12px sans-serif" fill="currentColor">' + "".join(parts) + "</svg>"
    )


def standalone(rows: pd.DataFrame) -> str:
    """The figure as a file: on white, for a page that gives it no colour."""
    inside = drawing(rows[rows["decides"] & rows["counts"]])
    start, rest = inside.split(">", 1)
    white = '<rect width="100%" height="100%" fill="white"/>'
    return f'{start.replace("currentColor", "black")} xmlns="http://www.w3.org/2000/svg" color="black">{white}{rest}\n'


def axis(height: int) -> str:
    """Ticks on top, faint lines down, a strong one at zero, and which side is which."""
    parts = []
    for tick in TICKS:
        x, strong = place(tick), tick == 0
        text = f"{tick:+d}".replace("-", "\N{MINUS SIGN}") if tick else "0"
        parts.append(f'<text x="{x:.1f}" y="28" text-anchor="middle" font-size="11">{text}</text>')
        parts.append(
            f'<path d="M{x:.1f} {TOP}V{height}" stroke="currentColor" '
            f'stroke-opacity="{0.8 if strong else 0.2}"/>'
        )
    parts.append(f'<text x="{LEFT}" y="11" font-size="11">← NdLinear behind</text>')
    parts.append(
        f'<text x="{RIGHT}" y="11" font-size="11" text-anchor="end">NdLinear ahead →</text>'
    )
    return "".join(parts)


def marks(rows: pd.DataFrame, mark: Mark, top: int) -> str:
    """The marks of one comparison in one row, with their intervals."""
    y, colour, parts = top + mark.height, figures.colour(mark.method), []
    for mean, low, high in zip(*(rows[mark.column + end] for end in ("", "_low", "_high"))):
        parts.append(
            f'<path d="M{place(low):.1f} {y}H{place(high):.1f}" stroke="{colour}" stroke-width="2" '
            'stroke-opacity="0.6"/>' + point(mark, place(mean), y)
        )
    return "".join(parts)


def point(mark: Mark, x: float, y: float) -> str:
    """A circle for dense, a diamond for the layer, as in all figures of the book."""
    colour = figures.colour(mark.method)
    if figures.marker(mark.method) == "D":
        return f'<path d="M{x:.1f} {y - 5}l5 5l-5 5l-5-5z" fill="{colour}"/>'
    return f'<circle cx="{x:.1f}" cy="{y}" r="4" fill="{colour}"/>'


def symbol(mark: Mark) -> str:
    """A mark by itself, for the legend."""
    return f'<svg width="12" height="12" viewBox="0 0 12 12" aria-hidden="true">{point(mark, 6, 6)}</svg>'
