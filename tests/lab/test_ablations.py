"""Scores, folded axes and what a row keeps of a run, each against the same written out."""

import numpy as np
import pytest
import torch
from lab.chapters import ablations
from lab.train import many, scores


def test_accuracies_against_counting_by_hand():
    logits, classes = torch.randn(40, 7), torch.arange(40) % 7
    order = logits.argsort(1, descending=True).tolist()
    first, five = (np.mean([c in row[:k] for row, c in zip(order, classes)]) for k in (1, 5))
    assert scores.accuracy(logits, classes).item() == pytest.approx(first)
    assert scores.top_five(logits, classes).item() == pytest.approx(five) and five > first


def test_fold_brings_the_named_axis_to_the_named_place():
    x = torch.arange(2 * 24.0).reshape(2, 24)
    fold = ablations.Fold((2, 3, 4), (3, 1, 2))
    y = fold(x)
    assert fold.sizes == (4, 2, 3) and y.shape == (2, 4, 2, 3)
    assert y[1, 3, 0, 2] == x[1].reshape(2, 3, 4)[0, 2, 3]


def test_results_of_a_training_carry_each_members_metrics_and_the_counts():
    x, y = torch.randn(12, 3), torch.randn(12, 1)
    make, loss = (lambda: torch.nn.Linear(3, 1)), scores.squared_error
    data, plan = {"train": (x, y), "val": (x, y)}, many.Plan(epochs=3, lr=0.1)
    fitted = many.fit(make, data, plan, seeds=[0, 1], loss=loss)
    rows = ablations.results(fitted, [{"m": 1.0}, {"m": 2.0}], x[:1])
    assert [row["metrics"]["m"] for row in rows] == [1.0, 2.0]
    assert {(row["parameters"], row["macs"]) for row in rows} == {(4, 3)}
    assert rows[0]["curve"] != rows[1]["curve"] and rows[0]["curve"][-1]["epoch"] == 3
    found = fitted.score((x, y), {"m": loss})[1]["m"]
    assert found == pytest.approx(((fitted.model(1)(x) - y) ** 2).mean().item(), rel=1e-5)
