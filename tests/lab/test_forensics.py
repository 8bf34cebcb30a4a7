"""Printed numbers against computed ones: the rule; evidence 70 judges them all."""

from hypothesis import given
from hypothesis import strategies as st
from lab.chapters.forensics import classify


@given(st.integers(1, 10**9), st.integers(0, 6))
def test_a_number_is_met_by_itself_rounded_or_cut_and_by_nothing_else(value, digits):
    ulp = 10**digits
    down = value // ulp * ulp
    assert classify(value, down, ulp) in ("exact", "rounded", "truncated")
    assert classify(value, down + ulp, ulp) in ("rounded", "differs")
    assert classify(value, down + 2 * ulp, ulp) == classify(value, down - ulp, ulp) == "differs"
