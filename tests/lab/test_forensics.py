"""Printed numbers against computed ones: the rule and the sheet; evidence 70 judges them all."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lab import LabError, counts
from lab.chapters.forensics import Sheet, classify
from torch import nn


@given(st.integers(1, 10**9), st.integers(0, 6))
def test_a_number_is_met_by_itself_rounded_or_cut_and_by_nothing_else(value, digits):
    ulp = 10**digits
    down = value // ulp * ulp
    assert classify(value, down, ulp) in ("exact", "rounded", "truncated")
    assert classify(value, down + ulp, ulp) in ("rounded", "differs")
    assert classify(value, down + 2 * ulp, ulp) == classify(value, down - ulp, ulp) == "differs"


@pytest.fixture
def sheet():
    made, linear = Sheet(), {"method": "Linear"}
    made.add("text_classify", 222, "right", "a", method="NdLinear")
    made.add("text_classify", 1538, "wrong", "b", dataset="CoLA", **linear)
    made.add("text_classify", 1544, "forced", "c", departs="two units", dataset="SST-2", **linear)
    return made


def test_sheet_classifies_counts_and_judges(sheet):
    assert list(sheet.frame["match"]) == ["exact", "exact", "differs", "exact"]
    assert [sheet.judge(claim) for claim in "ab"] == [{"holds": True}, {"holds": False}]
    assert sheet.judge("c") == {"holds": False, "under": True}
    assert sheet.missing(["text_classify"]) == []
    assert len(sheet.missing(["cnn_image_classify"])) == 4
    sheet.add("cnn_image_classify", None, "nothing", "c", dataset="CIFAR-10", method="NdLinear")
    assert sheet.judge("c") == {"holds": False}
    assert sheet.frame["match"].iloc[-1] == "no configuration"
    sheet.add("trl_tcl", 0.8431e9, "in the unit of the table", "f", "flops", method="NdLinear")
    last = sheet.frame.iloc[-1]
    assert last["match"] == "rounded" and math.isclose(last["ratio"], 0.8431 / 0.843)


def test_sheet_refuses_what_cannot_be_right(sheet):
    with pytest.raises(LabError, match="has its count already"):
        sheet.add("text_classify", 222, "again", "a", method="NdLinear")
    with pytest.raises(LabError, match="no such cell"):
        sheet.add("text_classify", 222, "none", "a", method="Conv")
    with pytest.raises(LabError, match="no count was entered"):
        sheet.judge("unknown")


def test_operations_are_multiply_adds_and_five_for_each_number_in_a_batch_norm():
    net = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4 * 25, 7)
    )
    each = 25 * 4 * 27 + 5 * 4 * 25 + 100 * 7
    assert counts.operations(net, torch.zeros(2, 3, 5, 5)) == 2 * each
    assert not net[1]._forward_hooks
