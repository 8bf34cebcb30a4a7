"""Adapters: the printed table, and the words of the rule."""

import math

import pytest
from lab import facts
from lab.chapters import lora


# ------------------------------------------------------------------------------------------------------------ the table
def test_errors_of_proportions():
    assert lora.standard_error(50, 100) == pytest.approx(5)
    found = lora.printed_differences()
    assert len(found) == 24 and set(found["rank"]) == {4, 8}
    row = found.query("model == 'LLaMA3-8B' and dataset == 'GSM8K' and rank == 8").iloc[0]
    printed = facts("ndlinear_lora", model="LLaMA3-8B", dataset="GSM8K")
    value = {str(r.rank): r.value for r in printed.itertuples()}
    assert row["difference"] == pytest.approx(value[""] - value["8"])
    variance = sum(p * (100 - p) / 1319 for p in (value[""], value["8"]))
    assert row["error"] == pytest.approx(math.sqrt(variance))
    assert row["errors"] == pytest.approx(row["difference"] / row["error"])


# --------------------------------------------------------------------------------------------------------------- tables
@pytest.mark.parametrize(
    ("low", "high", "words"),
    [
        (0.001, 0.004, "higher, equivalent"),
        (0.001, 0.04, "higher"),
        (-0.01, 0.01, "equivalent"),
        (-0.03, 0.01, "not inferior"),
        (-0.03, 0.02, "undecided"),
        (-0.01, -0.005, "lower, equivalent"),
        (-0.03, -0.005, "lower"),
    ],
)
def test_words_for_a_loss(low, high, words):
    assert lora.loss_word((0.0, low, high), 0.02) == words
