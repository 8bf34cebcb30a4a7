"""What the ablations share: pictures, parts of networks and of tables against the same written out."""

import lab
import numpy as np
import pandas as pd
import pytest
import torch
from lab.chapters import ablations
from lab.data import Data
from lab.train import Split, scores, stacked


@pytest.fixture(autouse=True)
def stand_in(monkeypatch):
    monkeypatch.setenv("NDL_MODE", "smoke")


def test_accuracies_against_counting_by_hand():
    logits, classes = torch.randn(40, 7), torch.arange(40) % 7
    order = logits.argsort(1, descending=True).tolist()
    first, five = (np.mean([c in row[:k] for row, c in zip(order, classes)]) for k in (1, 5))
    assert scores.accuracy(logits, classes).item() == pytest.approx(first)
    assert scores.top_five(logits, classes).item() == pytest.approx(five) and five > first


def test_pictures_are_the_first_of_each_class_scaled_by_the_training_part_and_kept_apart():
    data = lab.load("cifar100")
    x, y = data.part("train_exact" if "train_exact" in data.splits else "train")
    of = {c: x[np.flatnonzero(y == c)[:2]].astype(np.float64) for c in range(100)}
    split = ablations.pictures(200)
    for images, classes in (split.train, split.val):
        assert sorted(classes.tolist()) == list(range(100))
        for image, c in zip(images.numpy(), classes.tolist()):  # channels are shifted and scaled
            likeness = [
                min(np.corrcoef(a.ravel(), b.ravel())[0, 1] for a, b in zip(image, other))
                for other in of[c]
            ]
            assert max(likeness) > 1 - 1e-6
    assert split.test[1].tolist() == data.part("test")[1].tolist()
    x = split.train[0]
    assert x.mean((0, 2, 3)).abs().max() < 1e-4 and (x.std((0, 2, 3)) - 1).abs().max() < 1e-2
    assert not any(torch.equal(a, b) for a, b in zip(x, split.val[0]))


def test_a_tenth_is_held_out_where_there_are_enough(monkeypatch):
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 256, (70, 3, 4, 4)).astype(np.uint8), np.arange(70) % 3
    splits = {"train": slice(0, 60), "test": slice(60, 70)}
    data = Data("cifar100", x, y, ("a", "b", "c"), "", False, splits, "")
    monkeypatch.setattr(ablations, "load", lambda name: data)
    split = ablations.pictures(60)
    assert [len(part[1]) for part in (split.train, split.val, split.test)] == [54, 6, 10]
    assert len(ablations.pictures(24).val[1]) == 12  # eight of each class, half of them


def test_fold_brings_the_named_axis_to_the_named_place():
    x = torch.arange(2 * 24.0).reshape(2, 24)
    fold = ablations.Fold((2, 3, 4), (3, 1, 2))
    y = fold(x)
    assert fold.sizes == (4, 2, 3) and y.shape == (2, 4, 2, 3)
    assert y[1, 3, 0, 2] == x[1].reshape(2, 3, 4)[0, 2, 3]


def test_each_arm_is_taken_at_the_rate_that_validation_prefers():
    found = {("a", 1): (0.5, 0.9), ("a", 2): (0.8, 0.8), ("b", 1): (0.9, 0.9), ("b", 2): (0.1, 1.0)}
    rows = [(*at, seed, v) for at, values in found.items() for seed, v in enumerate(values)]
    runs = pd.DataFrame(rows, columns=["arm", "lr", "seed", "val_accuracy"])
    chosen = ablations.tuned(runs, ["arm"])[["arm", "lr", "seed"]]
    assert list(chosen.itertuples(index=False, name=None)) == [
        ("a", 2, 0), ("a", 2, 1), ("b", 1, 0), ("b", 1, 1)
    ]  # fmt: skip


def test_results_of_a_stack_carry_each_members_metrics_and_the_counts():
    x, y = torch.randn(12, 3), torch.randn(12, 1)
    data = Split((x, y), (x, y), (x, y))
    make, loss = (lambda: torch.nn.Linear(3, 1)), scores.squared_error
    stack = stacked.fit(make, data, seeds=[0, 1], loss=loss, epochs=3, lr=0.1)
    rows = ablations.results(stack, [{"m": 1.0}, {"m": 2.0}], x[:1])
    assert [row["metrics"]["m"] for row in rows] == [1.0, 2.0]
    assert {(row["parameters"], row["macs"]) for row in rows} == {(4, 3)}
    assert rows[0]["curve"] != rows[1]["curve"] and rows[0]["curve"][-1]["epoch"] == 3
    found = stack.evaluate((x, y), {"m": loss})[1]["m"]
    assert found == pytest.approx(((stack.model(1)(x) - y) ** 2).mean().item(), rel=1e-5)


def test_span_shows_one_count_or_a_range():
    assert ablations.span(pd.Series([1200, 1200])) == "1,200"
    assert ablations.span(pd.Series([4304, 1168, 4304])) == "1,168 to 4,304"
