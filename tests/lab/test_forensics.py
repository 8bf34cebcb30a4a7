"""Printed numbers against computed ones: the rule; evidence 70 judges them all."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from lab import counts
from lab.chapters.forensics import classify
from torch import nn


@given(st.integers(1, 10**9), st.integers(0, 6))
def test_a_number_is_met_by_itself_rounded_or_cut_and_by_nothing_else(value, digits):
    ulp = 10**digits
    down = value // ulp * ulp
    assert classify(value, down, ulp) in ("exact", "rounded", "truncated")
    assert classify(value, down + ulp, ulp) in ("rounded", "differs")
    assert classify(value, down + 2 * ulp, ulp) == classify(value, down - ulp, ulp) == "differs"


def test_operations_are_multiply_adds_and_five_for_each_number_in_a_batch_norm():
    net = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4 * 25, 7)
    )
    each = 25 * 4 * 27 + 5 * 4 * 25 + 100 * 7
    assert counts.operations(net, torch.zeros(2, 3, 5, 5)) == 2 * each
    assert not net[1]._forward_hooks
