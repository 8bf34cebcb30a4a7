"""Adapters: the words of the rule."""

import pytest
from lab.chapters import lora


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
