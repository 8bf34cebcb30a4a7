"""The leanest order and exact memory, each against an independent count."""

import itertools
import random

import torch
from lab.counts import leanest_order, saved_entries
from lab.memory import allocations, peak_bytes, saved_bytes

from ndlinear import ndlinear


def test_leanest_order_keeps_least():
    draw = random.Random(0)
    for _ in range(200):
        n = draw.randint(1, 4)
        dims, hidden = ([draw.randint(1, 9) for _ in range(n)] for _ in range(2))
        every = [saved_entries(dims, hidden, order) for order in itertools.permutations(range(n))]
        assert saved_entries(dims, hidden, leanest_order(dims, hidden)) == min(every)


def test_saved_bytes_counts_each_storage_once():
    x = torch.randn(6, 28, 5)
    weights = [torch.randn(shape, requires_grad=True) for shape in ((1, 28), (9, 5))]
    saved = 4 * 6 * saved_entries((28, 5), (1, 9))
    assert saved_bytes(lambda: ndlinear(x, weights), weights) == saved
    assert saved_bytes(lambda: x.detach() + 1) == 0
    x.requires_grad_()
    assert saved_bytes(lambda: torch.relu(x) + torch.exp(x)) == 2 * x.nbytes  # the two results


def test_allocations_are_exact():
    def work():
        a = torch.zeros(1000)
        b = a.double()
        del a
        return b

    assert allocations(work) == [4000, 12000, 8000] and peak_bytes(work) == 12000
    assert peak_bytes(lambda: None) == 0
