"""Chunked training: hand-written sums against autograd."""

import lab
import pytest
import torch
from lab.chapters import bump
from lab.train import chunked
from torch import nn
from torch.nn import functional as F

from ndlinear import NdLinear

CASES = {
    "dense, depth 2": lambda: bump.network("dense", 7, 2),
    "dense, depth 3": lambda: bump.network("dense", 6, 3),
    "small modes": lambda: bump.network("ndlinear", (4, 4), 3),
    "large modes": lambda: bump.network("ndlinear", (9, 8), 3),
    "large modes, no bias": lambda: bump.network("ndlinear", (9, 8), 3, bias=False),
    "dense, no bias": lambda: bump.network("dense", 6, 2, bias=False),
    "three modes": lambda: nn.Sequential(
        nn.Unflatten(1, (2, 5, 1)),
        NdLinear((2, 5, 1), (4, 5, 6)),
        nn.ReLU(),
        NdLinear((4, 5, 6), (6, 4, 5)),
        nn.ReLU(),
        NdLinear((6, 4, 5), (1, 1, 1)),
        nn.Flatten(0),
    ),
}


def parts(seed, count=60):
    x = bump.inputs(count, seed)
    return x, bump.target(3 * x, 1.0) + x[:, 2] * x[:, 7]


@pytest.mark.parametrize("make", CASES.values(), ids=CASES)
@pytest.mark.parametrize("chunk", [None, 12])
def test_every_member_trains_as_autograd_trains_it_alone(make, chunk):
    seeds = [2, 5, 9]
    stack = chunked.fit(
        make, [parts(s) for s in seeds], seeds=seeds, epochs=25, lr=0.01, chunk=chunk
    )
    for i, seed in enumerate(seeds):
        lab.seed_everything(seed)
        model, part = make(), parts(seed)
        alone = lab.fit(
            model,
            lab.Split(part, part, part),
            loss=F.mse_loss,
            epochs=25,
            lr=0.01,
            batch_size=0,
            seed=seed,
        )
        losses = [point["train_loss"] for point in alone.curve]
        assert [point["train_loss"] for point in stack.curves[i]] == pytest.approx(losses, rel=1e-4)
        assert losses[-1] < 0.9 * losses[0]
        x = bump.inputs(50, 77)
        lab.seed_everything(seed)
        by_hand = make()
        adam = torch.optim.Adam(by_hand.parameters(), lr=0.01)
        for _ in range(25):
            adam.zero_grad()
            F.mse_loss(by_hand(part[0]), part[1]).backward()
            adam.step()
        with torch.no_grad():
            torch.testing.assert_close(stack.model(i, "end")(x), by_hand(x), rtol=1e-3, atol=1e-4)


def test_large_modes_are_not_made_dense():
    assert [m.dense for m in chunked.maps_of(CASES["large modes"](), 1)] == [True, False, True]
    assert all(m.dense for m in chunked.maps_of(CASES["small modes"](), 1))


def test_members_stop_by_themselves_and_training_goes_on():
    seeds, make = [0, 1, 2, 3], CASES["dense, depth 2"]
    data = [parts(s) for s in seeds]
    free = chunked.fit(make, data, seeds=seeds, epochs=60, lr=0.01)
    losses = torch.tensor([[p["train_loss"] for p in curve] for curve in free.curves])
    below = losses.min(1).values.median().item() + 1e-9  # some get there, some do not
    stack = chunked.fit(make, data, seeds=seeds, epochs=60, lr=0.01, below=below)
    assert stack.curves == free.curves and any(stack.stopped) and not all(stack.stopped)
    for i, stopped in enumerate(stack.stopped):
        first = int((losses[i] < below).nonzero()[0]) + 1 if stopped else 60
        assert stack.epoch["stop"][i] == first and stack.epoch["end"][i] == 60
        short = chunked.fit(make, [data[i]], seeds=[seeds[i]], epochs=first, lr=0.01)
        x = data[i][0]
        with torch.no_grad():
            torch.testing.assert_close(
                stack.model(i, "stop")(x), short.model(0, "end")(x), rtol=1e-3, atol=1e-5
            )


def test_what_cannot_be_trained_is_refused():
    arguments = {"data": [parts(0)], "seeds": [0], "epochs": 2, "lr": 0.01}
    for layers in (
        [nn.Linear(10, 3), nn.Tanh(), nn.Linear(3, 1)],
        [nn.Linear(10, 3), nn.Linear(3, 1)],
        [nn.Linear(10, 3), nn.ReLU()],
    ):
        with pytest.raises(lab.LabError, match="ReLU between"):
            chunked.fit(lambda layers=layers: nn.Sequential(*layers), **arguments)
    with pytest.raises(lab.LabError, match="one number"):
        chunked.fit(lambda: nn.Sequential(nn.Linear(10, 2)), **arguments)
    with pytest.raises(lab.LabError, match="divide"):
        chunked.fit(CASES["dense, depth 2"], **arguments, chunk=7)
    with pytest.raises(lab.LabError, match="not finite"):
        chunked.fit(
            CASES["dense, depth 2"],
            [(parts(0)[0], parts(0)[1] * torch.inf)],
            seeds=[0],
            epochs=2,
            lr=0.01,
        )


def test_chunks_are_equal_shares_that_fit():
    assert chunked.chunk_of(1000, 16) == 1000
    assert chunked.chunk_of(1000, 1000) == 250  # 250,000 numbers
    assert (
        chunked.chunk_of(1000, 5 * 1024) == 125
    )  # too many for the cache, but few samples are slow
    assert (
        chunked.chunk_of(1009, 1) == 1009 and chunked.chunk_of(1009, 1024) == 1
    )  # a prime has no other share
