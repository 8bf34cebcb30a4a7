"""Chunked training: hand-written sums against autograd."""

import lab
import pytest
import torch
from lab.chapters import bump
from lab.train import chunked, loop
from torch import nn
from torch.nn import functional as F

from ndlinear import NdLinear

CASES = {
    "dense": (lambda: bump.network("dense", 7, 2), None),
    "small modes": (lambda: bump.network("ndlinear", (4, 4), 3), None),
    "large modes, no bias": (lambda: bump.network("ndlinear", (9, 8), 3, bias=False), 12),
    "three modes": (
        lambda: nn.Sequential(
            nn.Unflatten(1, (2, 5, 1)),
            NdLinear((2, 5, 1), (4, 5, 6)),
            nn.ReLU(),
            NdLinear((4, 5, 6), (6, 4, 5)),
            nn.ReLU(),
            NdLinear((6, 4, 5), (1, 1, 1)),
            nn.Flatten(0),
        ),
        12,
    ),
}
DENSE, SMALL, LARGE = [make for make, _ in CASES.values()][:3]


def parts(seed, count=60):
    x = bump.inputs(count, seed)
    return x, bump.target(3 * x, 1.0) + x[:, 2] * x[:, 7]


@pytest.mark.parametrize(("make", "chunk"), CASES.values(), ids=CASES)
def test_every_member_trains_as_autograd_trains_it_alone(monkeypatch, make, chunk):
    if chunk:
        monkeypatch.setattr(chunked, "chunk_of", lambda count, per_sample: chunk)
    seeds, how = [2, 5], {"epochs": 25, "lr": 0.01}
    stack = chunked.fit(make, [parts(s) for s in seeds], seeds=seeds, **how)
    x = bump.inputs(50, 77)
    for i, seed in enumerate(seeds):
        lab.seed_everything(seed)
        alone, part = make(), parts(seed)
        curve = loop.train_epochs(alone, part, loss=F.mse_loss, batch_size=60, seed=seed, **how)
        losses = [point["train_loss"] for point in curve]
        assert [point["train_loss"] for point in stack.curves[i]] == pytest.approx(losses, rel=1e-4)
        with torch.no_grad():
            torch.testing.assert_close(stack.model(i, "end")(x), alone(x), rtol=1e-3, atol=1e-4)


def test_parameters_may_have_rates_of_their_own():
    def rates(model):
        return {name: 0.1 / p.numel() for name, p in model.named_parameters()}

    part = parts(2)
    stack = chunked.fit(SMALL, [part], seeds=[2], epochs=25, lr=rates)
    lab.seed_everything(2)
    model = SMALL()
    steps = torch.optim.Adam([{"params": [p], "lr": 0.1 / p.numel()} for p in model.parameters()])
    losses = [loop.step(model, *part, F.mse_loss, steps).item() for _ in range(25)]
    assert [p["train_loss"] for p in stack.curves[0]] == pytest.approx(losses, rel=1e-4)


def test_large_modes_are_not_made_dense():
    assert [m.dense for m in chunked.maps_of(LARGE(), 1)] == [True, False, True]
    assert all(m.dense for m in chunked.maps_of(SMALL(), 1))


def test_members_stop_by_themselves_and_training_goes_on():
    seeds, make = [0, 1, 2, 3], DENSE
    data = [parts(s) for s in seeds]
    free = chunked.fit(make, data, seeds=seeds, epochs=60, lr=0.01)
    losses = torch.tensor([[p["train_loss"] for p in curve] for curve in free.curves])
    below = losses.min(1).values.median().item() + 1e-9  # some get there, some do not
    stack = chunked.fit(make, data, seeds=seeds, epochs=60, lr=0.01, below=below)
    assert stack.curves == free.curves and any(stack.stopped) and not all(stack.stopped)
    for i, stopped in enumerate(stack.stopped):
        first = int((losses[i] < below).nonzero()[0]) + 1 if stopped else 60
        assert stack.when["stop"][i] == first and stack.when["end"][i] == 60
        short = chunked.fit(make, [data[i]], seeds=[seeds[i]], epochs=first, lr=0.01)
        x = data[i][0]
        with torch.no_grad():
            torch.testing.assert_close(
                stack.model(i, "stop")(x), short.model(0, "end")(x), rtol=1e-3, atol=1e-5
            )


LINEAR, (X, Y) = nn.Linear(10, 3), parts(0)


@pytest.mark.parametrize(
    ("layers", "y", "message"),
    [
        ([LINEAR, nn.Tanh(), nn.Linear(3, 1)], Y, "ReLU between"),
        ([LINEAR, nn.ReLU()], Y, "ReLU between"),
        ([nn.Linear(10, 2)], Y, "one number"),
        ([nn.Linear(10, 1)], Y * torch.inf, "not finite"),
    ],
)
def test_what_cannot_be_trained_is_refused(layers, y, message):
    with pytest.raises(lab.LabError, match=message):
        chunked.fit(lambda: nn.Sequential(*layers), [(X, y)], seeds=[0], epochs=2, lr=0.01)


def test_chunks_are_equal_shares_that_fit():
    assert chunked.chunk_of(1000, 16) == 1000
    assert chunked.chunk_of(1000, 1000) == 250  # 250,000 numbers
    assert chunked.chunk_of(1000, 5 * 1024) == 125  # more than the cache holds, few are slow
    prime = [chunked.chunk_of(1009, width) for width in (1, 1024)]  # it has no other share
    assert prime == [1009, 1]
