"""lab.chapters.capacity against closed forms and independent counts; chapter 20 checks certificates and weights."""

import itertools
import math

import pytest
from lab.chapters import capacity


def test_entropy_bounds_the_number_of_subsets():
    for m in (5, 20, 61):
        for size in range(m + 1):
            exact = math.log2(sum(math.comb(m, k) for k in range(size + 1)))
            assert exact <= capacity.subset_bits(m, size) + 1e-9 <= m + 1e-9


def matched(sizes):
    """The largest sum of max(pair) - 1 over disjoint pairs, by trying all."""
    if len(sizes) < 2:
        return 0
    first, *others = sizes
    with_first = [
        max(first, d) - 1 + matched(others[:k] + others[k + 1 :]) for k, d in enumerate(others)
    ]
    return max([matched(others), *with_first])


@pytest.mark.parametrize("axes", [1, 2, 3, 4])
def test_the_lower_bound_is_the_best_matching(axes):
    for shape in itertools.product(range(1, 5), repeat=axes):
        pairs = matched([d for d in shape if d > 1])
        assert capacity.lower(shape) == sum(shape) - axes + 1 + pairs, shape
        assert capacity.lower(shape) <= capacity.upper(shape) <= math.prod(shape), shape
