"""The training loop: the plainest loop written out, the epoch that validation chooses, patience, errors."""

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
    options = {"loss": mse, "epochs": 20, "lr": 0.05, "batch_size": 16, "seed": seed} | over
    return fit(nn.Linear(3, 1), problem(), **options)


def by_hand(model, data, update, batch_size, seed, epochs):
    """Weights and training losses after each epoch of the plainest loop; ``update``: from torch.optim, on the model."""
    x, y = data
    draw = torch.Generator().manual_seed(seed)
    losses, states = [], []
    for _ in range(epochs):
        order = torch.randperm(len(x), generator=draw).tolist()
        size = batch_size or len(x)
        total = 0.0
        for start in range(0, len(x), size):
            rows = order[start : start + size]
            error = ((model(x[rows]) - y[rows]) ** 2).mean()
            model.zero_grad()
            error.backward()
            update.step()
            total += error.item() * len(rows)
        losses.append(total / len(x))
        states.append({k: v.clone() for k, v in model.state_dict().items()})
    return losses, states


@pytest.mark.parametrize(
    ("kind", "batch_size"), [(torch.optim.Adam, 0), (torch.optim.AdamW, 16), (torch.optim.SGD, 16)]
)
def test_fit_is_the_loop_written_out_and_keeps_the_epoch_that_validation_chooses(kind, batch_size):
    seed_everything(5)
    plain = nn.Linear(3, 1)
    update = kind(plain.parameters(), lr=0.4)
    losses, states = by_hand(plain, problem().train, update, batch_size, 5, 12)
    scores = {"mae": nn.functional.l1_loss}
    how = {"epochs": 12, "lr": 0.4, "batch_size": batch_size, "optimiser": kind, "device": "cpu"}
    found = train(5, scores=scores, **how)
    assert [p["train_loss"] for p in found.curve] == pytest.approx(losses, rel=1e-5)
    held = [point["val_loss"] for point in found.curve]
    assert found.best_epoch == held.index(min(held)) + 1
    expected = states[found.best_epoch - 1]
    for name, value in found.model.state_dict().items():
        torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-6)
    for part, (x, y) in {"val": problem().val, "test": problem().test}.items():
        error = (found.model(x) - y).abs().mean().item()
        assert found.metrics[f"{part}_mae"] == pytest.approx(error, rel=1e-5)
        uneven = training.evaluate(found.model, (x, y), mse, {}, batch=7)["loss"]
        assert found.metrics[f"{part}_loss"] == pytest.approx(uneven, rel=1e-5)


def test_patience_ends_a_training_some_epochs_after_the_best_one():
    patient = train(epochs=300, lr=0.3, patience=5)
    assert patient.epochs == patient.best_epoch + 5 < 300
    losses = [point["val_loss"] for point in train(epochs=patient.epochs, lr=0.3).curve]
    since = [k - losses[: k + 1].index(min(losses[: k + 1])) for k in range(len(losses))]
    assert max(since[:-1]) < since[-1] == 5, "it would have ended sooner"
    assert train(epochs=12).epochs == 12


@pytest.mark.parametrize("bad", [{"epochs": 0}, {"batch_size": -1}])
def test_bad_arguments(bad):
    with pytest.raises(LabError, match="must be at least"):
        train(**bad)


def test_divergence_and_unequal_parts_are_refused():
    with pytest.raises(LabError, match="lower lr=1e"):
        train(optimiser=torch.optim.SGD, lr=1e20, epochs=20)
    data = problem()
    with pytest.raises(LabError, match="60 inputs and 30 targets"):
        Split((data.train[0], data.val[1]), data.val, data.test)
