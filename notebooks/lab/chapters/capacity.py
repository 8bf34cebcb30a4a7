"""VC dimensions of rank-one tensor classifiers: bounds and certificates.

The class: X of shape (D_1, ..., D_N) is labelled by the sign of <w_1 o ... o w_N, X>, an NdLinear layer with one output.
"""

from __future__ import annotations

import itertools
import json
import math
import pathlib
from collections.abc import Callable, Sequence

FOLDER = pathlib.Path(__file__).with_name("certificates")


# ---------------------------------------------------------------------------------------------------------------- bounds
def effective(shape: Sequence[int]) -> int:
    """P = sum D_k - N + 1: parameters that remain when w_2, ..., w_N are scaled to one entry 1."""
    return sum(shape) - len(shape) + 1


def lower(shape: Sequence[int]) -> int:
    """Matching bound: P plus the floor(n/2) largest sizes, each minus one, where n axes are longer than one."""
    long = sorted((d for d in shape if d > 1), reverse=True)
    return effective(shape) + sum(d - 1 for d in long[: len(long) // 2])


def largest(bits: Callable[[int], float], start: int) -> int:
    """The largest m with m <= bits(m), for a concave function with start <= bits(start)."""
    low, high = start, 2 * start
    while high <= bits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if middle <= bits(middle) else (low, middle)
    return low


def warren_bits(m: int, variables: int, degree: int) -> float:
    """log2 of Warren's bound (4 e degree m / variables)^variables on the sign vectors of m >= variables polynomials."""
    return variables * math.log2(4 * math.e * degree * m / variables)


def subset_bits(m: int, size: int) -> float:
    """An upper bound on log2 of the number of subsets of at most ``size`` of m things: m times the binary entropy of size / m."""
    if size == 0 or 2 * size >= m:
        return m if size else 0
    p = size / m
    return -m * (p * math.log2(p) + (1 - p) * math.log2(1 - p))


def long_axis(d: int, others: int, degree: int) -> int:
    """Largest m with 2^m <= (subsets of at most d of m) * (Warren for m polynomials of degree 2 d degree in ``others`` variables).

    The functions are <x(u), v> with v free in R^d and x a polynomial of this degree in ``others`` variables u.
    """
    return largest(
        lambda m: subset_bits(m, d) + warren_bits(m, others, 2 * d * degree), max(d, others)
    )


def warren(shape: Sequence[int]) -> int:
    """Largest m with 2^m <= (4 e N m / P)^P."""
    return largest(lambda m: warren_bits(m, effective(shape), len(shape)), effective(shape))


def upper(shape: Sequence[int]) -> int:
    """The smallest of the three upper bounds: all entries, Warren, and the one that treats one axis as linear."""
    p, n = effective(shape), len(shape)
    axes = [long_axis(d, p - d, n - 1) for d in set(shape) if p > d]
    return min([math.prod(shape), warren(shape), *axes])


# ----------------------------------------------------------------------------------------------------------- certificates
def certificate(shape: Sequence[int]) -> tuple[list[list[int]], list[list[list[int]]]]:
    """Points (flattened, integer) and, for the label pattern number j < 2^(m-1), integer weights.

    Bit i of j says that point i is positive; the last point is negative in all of them, and -w_1 gives the other half.
    """
    found = json.loads((FOLDER / f"{'x'.join(map(str, shape))}.json").read_text(encoding="utf-8"))
    return found["points"], found["weights"]


# --------------------------------------------------------------------------------------- the rectangles of Theorem 20.8
def rectangles(t: int) -> list[tuple[str, str]]:
    """The t 2^(t-1) rectangles of a 2^t x 2^t grid, each as the words (u, v) of its columns and of its rows."""
    words = [["".join(digits) for digits in itertools.product("01", repeat=n)] for n in range(t)]
    return [(u, v) for i in range(t) for u in words[i] for v in words[t - 1 - i]]


def place(chosen: Sequence[tuple[str, str]], t: int, u: str = "") -> dict[str, str]:
    """Row word -> column word of the points below u that hit the chosen rectangles and no others."""
    if len(u) == t:
        return {"": u}
    left, right = place(chosen, t, u + "0"), place(chosen, t, u + "1")
    points = {}
    for v in left:
        low, high = (left[v], right[v]) if (u, v) in chosen else (right[v], left[v])
        points |= {v + "0": low, v + "1": high}
    return points


def ends(word: str, t: int) -> tuple[int, int]:
    """First and last of the 2^t places whose word begins so."""
    return int(word.ljust(t, "0"), 2), int(word.ljust(t, "1"), 2)
