"""Stacked training: every member trains as it would alone."""

import lab
import pytest
import torch
from lab.train import stacked
from torch import nn
from torch.nn import functional as F

from ndlinear import NdLinear


def parts(seed, count=48, width=6):
    g = torch.Generator().manual_seed(seed)
    x = torch.rand(3 * count, width, generator=g)
    y = (x**2).sum(1, keepdim=True)
    return lab.Split(*[(x[i : i + count], y[i : i + count]) for i in (0, count, 2 * count)])


def dense():
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 1))


def modewise():
    return nn.Sequential(
        nn.Unflatten(1, (2, 3)), NdLinear((2, 3), (3, 2)), nn.ReLU(), nn.Flatten(), nn.Linear(6, 1)
    )


DECAYED = {"batch_size": 20, "weight_decay": 0.01, "optimiser": "adamw"}


@pytest.mark.parametrize(
    ("make", "options", "own_data"),
    [(dense, DECAYED, False), (modewise, DECAYED, True), (modewise, {"batch_size": 0}, True)],
)
def test_every_member_trains_as_it_would_alone(make, options, own_data):
    seeds = [3, 5, 8]
    data = [parts(s) for s in seeds] if own_data else parts(1)
    stack = stacked.fit(make, data, seeds=seeds, loss=F.mse_loss, epochs=12, lr=0.01, **options)
    for i, seed in enumerate(seeds):
        lab.seed_everything(seed)
        split = data[i] if own_data else data
        alone = lab.fit(make(), split, loss=F.mse_loss, epochs=12, lr=0.01, seed=seed, **options)
        for here, there in zip(stack.curves[i], alone.curve):
            assert here == pytest.approx(there, rel=1e-4)
        assert stack.epoch["best"][i] == alone.best_epoch
        for a, b in zip(stack.model(i).parameters(), alone.model.parameters()):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
    tests = stack.evaluate([s.test for s in data] if own_data else data.test, {"mse": F.mse_loss})
    alone_loss = F.mse_loss(alone.model(split.test[0]), split.test[1])
    assert tests[-1]["mse"] == pytest.approx(alone_loss.item(), rel=1e-4)


def test_members_stop_by_themselves_and_the_rest_goes_on():
    seeds, rule = [0, 1, 2, 3], {"metric": "train_loss", "below": 0.2}
    arguments = {"seeds": seeds, "loss": F.mse_loss, "epochs": 150, "lr": 0.02, "stop": rule}
    stack = stacked.fit(dense, parts(1), **arguments, run_on=True)
    stops = stack.epoch["stop"]
    assert all(stack.stopped) and len(set(stops)) > 1 and stack.epoch["end"] == [150] * 4
    for i, at in enumerate(stops):
        *before, last = [point["train_loss"] for point in stack.curves[i][:at]]
        assert last < 0.2 <= min(before)
        assert stack.epoch["best"][i] <= at
        short = stacked.fit(dense, parts(1), seeds=[seeds[i]], loss=F.mse_loss, epochs=at, lr=0.02)
        for a, b in zip(stack.model(i, "stop").parameters(), short.model(0, "end").parameters()):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
    assert stacked.fit(dense, parts(1), **arguments).epoch["end"] == [max(stops)] * 4


def test_validation_is_looked_at_as_often_as_asked():
    options = {"seeds": [0, 1], "loss": F.mse_loss, "epochs": 11, "lr": 0.02, "check_every": 4}
    stack = stacked.fit(dense, parts(1), **options)
    assert [p["epoch"] for p in stack.curves[0]] == [4, 8, 11]
    assert [p["epoch"] for p in stack.thin(1, points=2)] == [4, 11]
    assert stack.epoch["stop"] == [11, 11] and stack.stopped == [False, False]
    assert stacked.fit(dense, [parts(1)], **options).curves == stack.curves, "one split for all"


REFUSED = [
    ({"make": lambda: nn.Sequential(nn.Linear(6, 1), nn.BatchNorm1d(1))}, "cannot be stacked"),
    ({"make": lambda: nn.Sequential(nn.Linear(6, 1), nn.Dropout(0.1))}, "cannot be stacked"),
    ({"data": [parts(0), parts(1, 40)]}, "different shapes"),
    ({"data": [parts(0)] * 3}, "3 splits for 2 seeds"),
    ({"epochs": 0}, "epochs=0"),
    ({"seeds": []}, "0 seeds"),
    ({"optimiser": "lbfgs"}, "lbfgs"),
    ({"lr": 1e20}, "not finite"),
]


@pytest.mark.parametrize("change, message", REFUSED)
def test_what_cannot_be_stacked_is_refused(change, message):
    options = {"seeds": [0, 1], "epochs": 5, "lr": 0.01, "loss": F.mse_loss}
    with pytest.raises(lab.LabError, match=message):
        stacked.fit(**{"make": dense, "data": parts(0)} | options | change)
