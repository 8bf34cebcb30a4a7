"""The numbers that pages take from the benchmark, derived again from its record with code of its own; no set can be left out."""

import functools
import json

import numpy as np
import pytest
import scipy.stats
from lab import modes
from lab.benchmark import pages, reading
from lab.data.with_axes import SETS

OURS = {"as NdLinear": "ndlinear", "a quarter": "ndlinear-sum"}


@functools.cache
def recorded() -> dict[tuple, dict[int, dict]]:
    """(set, size, layer, budget, order) -> cut -> the row."""
    path, found = modes.RESULTS / "benchmark.jsonl", {}
    for row in map(json.loads, path.read_text(encoding="utf8").splitlines()):
        cell = tuple(row["config"][name] for name in ("data", "size", "layer", "budget", "order"))
        found.setdefault(cell, {})[row["seed"]] = row
    return found


def losses(cell: tuple, part: str) -> np.ndarray:
    return np.log([recorded()[cell][cut]["metrics"][f"{part}_loss"] for cut in range(10)])


def size(cell: tuple) -> int:
    return recorded()[cell][0]["parameters"]


def difference(name: str, sample: str, budget: str) -> np.ndarray:
    """Logarithms of our test loss over that of the model that validation chooses among all that are no larger."""
    ours = (name, sample, OURS[budget], budget, "in place")
    dense = (name, sample, "dense", "none", "in place")
    most = 1.05 * size(ours) if budget == "as NdLinear" else size(dense) / 4
    others = [
        cell
        for cell in recorded()
        if cell[:2] == (name, sample) and cell[3] in (budget, "none") and cell[4] == "in place"
        if cell[2] != OURS[budget] and size(cell) <= most
    ]
    best = min(others, key=lambda cell: losses(cell, "val").mean())
    return losses(ours, "test") - losses(best, "test")


def word(name: str, sample: str, budget: str) -> str:
    """Better, worse or not told apart: Nadeau and Bengio's interval of ten cuts."""
    d = difference(name, sample, budget)
    parts = recorded()[name, sample, OURS[budget], budget, "in place"][0]["metrics"]
    left = parts["pool"] - parts["tested"] - parts["validated"]
    spread = d.std(ddof=1) * np.sqrt(1 / 10 + parts["tested"] / left)
    half = scipy.stats.t.ppf(0.975, 9) * spread
    return "better" if d.mean() + half < 0 else "worse" if d.mean() - half > 0 else "not told apart"


@functools.cache
def words(budget: str) -> dict[tuple[str, str], str]:
    return {(n, s): word(n, s, budget) for n in SETS for s in ("small", "large")}


@pytest.mark.parametrize("budget", OURS)
def test_counts_and_the_table_of_kinds_are_those_of_the_record(budget):
    """That the pages print these counts is in test_quotes.py, and what their own footers look up."""
    found = list(words(budget).values())
    counts = found.count("better"), 2 * len(SETS), found.count("worse")
    assert reading.printed()[budget] == counts
    for row in pages.kinds(reading.rows_on_disk(), budget).itertuples():
        sets = [name for name, each in SETS.items() if each.kind == row.kind]
        own = [words(budget)[name, s] for name in sets for s in ("small", "large")]
        assert (row.better, row.worse) == (own.count("better"), own.count("worse"))
        both = [[difference(n, s, budget) for s in ("small", "large")] for n in sets]
        assert row.ratio == pytest.approx(np.exp(np.mean(both)))
