"""The training loop: seeded, best epoch by validation, stopping rules as data, test looked at once."""

import pytest
import torch
from lab import Fit, LabError, Split, fit, seed_everything
from lab.train import loop as training
from torch import nn

mse = nn.functional.mse_loss


def problem(n=120, seed=0):
    rng = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 3, generator=rng)
    y = x @ torch.tensor([[1.0], [-2.0], [0.5]]) + 0.1 * torch.randn(n, 1, generator=rng)
    cut = [n // 2, 3 * n // 4]
    return Split(*[(x[a:b], y[a:b]) for a, b in zip([0, *cut], [*cut, n])])


def train(seed=0, **over) -> Fit:
    seed_everything(seed)
    return fit(
        nn.Linear(3, 1),
        problem(),
        **({"loss": mse, "epochs": 20, "lr": 0.05, "batch_size": 16, "seed": seed} | over),
    )


def test_same_seed_same_numbers_other_seed_other_numbers():
    assert train().metrics == train().metrics
    assert train().metrics != train(seed=1).metrics


def test_numbers_of_this_revision():
    """If this fails because `fit` was changed on purpose, raise training.REVISION: older records are then refused."""
    assert training.REVISION == 1
    assert train().metrics["test_loss"] == pytest.approx(0.0275430, rel=1e-3)


def test_it_learns_what_least_squares_finds():
    data = problem()
    best = torch.linalg.lstsq(
        torch.cat([data.train[0], torch.ones(60, 1)], 1), data.train[1]
    ).solution
    residual = mse(torch.cat([data.train[0], torch.ones(60, 1)], 1) @ best, data.train[1]).item()
    assert train(epochs=200, lr=0.02).curve[-1]["train_loss"] == pytest.approx(residual, rel=0.05)


def test_best_epoch_is_chosen_on_validation_and_its_weights_are_restored():
    result = train(epochs=15, lr=0.5)
    losses = [point["val_loss"] for point in result.curve]
    assert result.best_epoch == losses.index(min(losses)) + 1
    again = training.evaluate(result.model, problem().val, mse, {})["loss"]
    assert again == pytest.approx(min(losses), rel=1e-5)
    assert result.metrics["val_loss"] == min(losses)


def test_test_part_is_never_used_to_choose():
    data = problem()
    flipped = Split(data.train, data.val, (data.test[0], -data.test[1]))
    arguments = {"loss": mse, "epochs": 10, "lr": 0.1, "batch_size": 16, "seed": 0}
    runs = []
    for d in (data, flipped):
        seed_everything(0)
        runs.append(fit(nn.Linear(3, 1), d, **arguments))
    assert runs[0].best_epoch == runs[1].best_epoch
    assert all(
        torch.equal(a, b) for a, b in zip(runs[0].model.parameters(), runs[1].model.parameters())
    )
    assert runs[0].metrics["test_loss"] != runs[1].metrics["test_loss"]


def test_stopping_rules():
    assert train(epochs=300, stop={"metric": "train_loss", "below": 0.5}).epochs < 300
    patient = train(epochs=300, lr=0.3, stop={"patience": 5})
    assert patient.epochs < 300 and patient.epochs - patient.best_epoch >= 5
    assert train(epochs=300, lr=0.3, stop={"patience": 5, "min_delta": 10.0}).epochs == 6
    assert train(epochs=12).epochs == 12


def test_scores_are_means_over_samples_whatever_the_batch():
    result = train(scores={"mae": nn.functional.l1_loss})
    x, y = problem().test
    assert result.metrics["test_mae"] == pytest.approx(
        (result.model(x) - y).abs().mean().item(), rel=1e-5
    )
    uneven = training.evaluate(result.model, (x, y), mse, {}, batch=7)["loss"]
    assert uneven == pytest.approx(result.metrics["test_loss"], rel=1e-5)


def test_thin_keeps_ends_and_bounds_length():
    curve = train(epochs=100, batch_size=0).thin(10)
    assert len(curve) == 10 and curve[0]["epoch"] == 1 and curve[-1]["epoch"] == 100


@pytest.mark.parametrize(
    "bad",
    [
        {"optimiser": "lion"},
        {"epochs": 0},
        {"batch_size": -1},
        {"stop": {"patince": 3}},
        {"stop": {"metric": "val_loss"}},
    ],
)
def test_bad_arguments(bad):
    with pytest.raises(LabError):
        train(**bad)


def test_divergence_is_an_error_that_names_the_rate():
    with pytest.raises(LabError, match="lower lr=1e"):
        train(optimiser="sgd", lr=1e20, epochs=20)


def test_unequal_parts_are_refused():
    data = problem()
    with pytest.raises(LabError, match="60 inputs and 30 targets"):
        Split((data.train[0], data.val[1]), data.val, data.test)
