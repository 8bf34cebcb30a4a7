"""The model of an all-reduce."""

import math

import pytest
from lab.chapters.scaling import Link, all_reduce_seconds


@pytest.mark.parametrize("workers", [2, 8, 64])
def test_short_messages_are_doubled_and_long_ones_take_the_fewest_bytes(workers):
    link = Link(1e-5, 1e9)
    rounds = math.log2(workers)  # of recursive doubling: in each, all send all terms to another one
    assert all_reduce_seconds(1000, workers, link) == pytest.approx(rounds * (1e-5 + 1e-6))
    least = 2 * (workers - 1) / workers  # seconds for as many gigabytes
    assert all_reduce_seconds(1e9, workers, link) == pytest.approx(least, rel=1e-3)
