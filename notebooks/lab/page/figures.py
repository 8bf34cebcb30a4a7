"""One look for all figures: readable on light and dark ground, one colour, marker and name per method."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.lines import Line2D

from ..stats import interval
from .show import jupyter

# name: (colour, marker, what a reader calls it). Colours of seaborn's "colorblind" palette that stand out on white and on black.
METHODS = {
    "dense": ("#0173b2", "o", "dense"),
    "dense-params": ("#56b4e9", "s", "dense, equal parameters"),
    "dense-width": ("#5a7fd6", "P", "dense, equal width"),
    "ndlinear": ("#de8f05", "D", "NdLinear"),
    "ndlinear-sum": ("#ca5c10", "X", "sum of Kronecker terms"),
    "ndlinear-modes": ("#b3541e", "h", "NdLinear, two modes"),
    "released": ("#b07a3f", "d", "NdLinear as released"),
    "low-rank": ("#029e73", "^", "low rank, equal parameters"),
    "tcl": ("#cc78bc", "v", "TCL"),
    "trl": ("#a55aa8", "<", "TRL"),
    "tt": ("#d55e5e", ">", "tensor train"),
    "monarch": ("#7b6bb5", "s", "Monarch"),
    "blocks": ("#949494", "8", "block-diagonal"),
    "lora": ("#029e73", "^", "LoRA"),
    "lokr": ("#cc78bc", "v", "LoKr"),
    "linear": ("#8a8a8a", "p", "linear model"),
    "boosting": ("#7f9a2e", "8", "gradient boosting"),
    "constant": ("#8a8a8a", "_", "constant"),
    "paper": ("#d55e00", "*", "paper, as printed"),
}


def style() -> None:
    """Use the book's figure style from here on; in Jupyter, figures are SVG, which stays sharp at any size."""
    plt.style.use(pathlib.Path(__file__).with_name("ndl.mplstyle"))
    if shell := jupyter():
        from matplotlib_inline.config import InlineBackend

        inline = InlineBackend.instance(parent=shell)
        # no date in the file: the same figure is the same file; dpi is that of images inside
        inline.print_figure_kwargs = {
            "bbox_inches": "tight",
            "dpi": 160,
            "metadata": {"Date": None},
        }
        inline.figure_formats = {"svg"}


def _method(name: str) -> tuple[str, str, str]:
    return METHODS.get(name, ("#8a8a8a", "h", name))


def colour(name: str) -> str:
    """The method's colour."""
    return _method(name)[0]


def marker(name: str) -> str:
    """The method's marker."""
    return _method(name)[1]


def label(name: str) -> str:
    """The method's name in figures and tables."""
    return _method(name)[2]


def key(name: str) -> dict:
    """The method's marker and colour, as an entry of a `legend`."""
    return {"marker": marker(name), "color": colour(name)}


def legend(figure, keys: Mapping[str, Mapping], ncols: int = 3) -> None:
    """A legend above all axes of a figure with constrained layout.

    Args:
        keys: options of matplotlib's Line2D under the text of their entry; the name of a method becomes its label.
    """
    plain = {"ls": "none", "color": "#8a8a8a"}
    handles = [
        Line2D([], [], label=label(text), **(plain | dict(look))) for text, look in keys.items()
    ]
    figure.legend(handles=handles, loc="outside upper center", ncols=ncols, fontsize=9)


def intervals(axis, at, found, name: str, **look) -> None:
    """Means with their intervals, at heights of an axis.

    Args:
        at: the heights.
        found: for each place (mean, low, high), as `lab.interval` gives it. name: the method whose marker and colour they have.
        look: other options of matplotlib's errorbar.
    """
    mean, low, high = np.reshape(found, (-1, 3)).T
    ends = np.maximum([mean - low, high - mean], 0)  # not below zero by rounding
    look = {"fmt": marker(name), "color": colour(name), "ms": 6, "elinewidth": 1.5} | look
    axis.errorbar(mean, np.atleast_1d(at), xerr=ends, **look)


def rows(axis, names, line: float = 0.0) -> None:
    """The names of the rows of an axis, the first on top, and a line where nothing differs."""
    axis.axvline(line, color="#8a8a8a", lw=1)
    axis.set_yticks(range(len(names)), list(names))
    axis.set_ylim(len(names) - 0.5, -0.5)


def gains(axis, found, line: float = 0.0) -> None:
    """What is gained, a row for each name: every seed a point, mean and 95 % interval below, the printed gain a star.

    found: by name the gains seed by seed, or (mean, low, high); whose colour and marker they have; the printed gain or None.
    """
    for place, (values, look, printed) in enumerate(found.values()):
        shown = key(look) | {"ls": "none"}
        if isinstance(values, tuple):
            intervals(axis, place, values, look)
        else:
            faint = 0.45 if len(values) <= 20 else 0.12
            axis.plot(values, [place] * len(values), alpha=faint, ms=4, **shown)
            intervals(axis, place + 0.2, interval(values), look)
        if printed is not None:
            axis.plot(printed, place, ms=10, ls="none", **key("paper"))
    rows(axis, found, line)
