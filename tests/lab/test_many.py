"""The one training loop: every member trains as it would alone, by epochs or steps, and stops and is tested as its plan says."""

import pytest
import torch
from lab.modes import LabError
from lab.train.loop import seed_everything
from lab.train.many import Plan, fit
from torch import nn
from torch.nn import functional as F


def made():
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def parts(n=50):
    x = torch.randn(2, n, 4)
    return [(x[i], x[i, :, :2].sin()) for i in range(2)]


def plain(plan, data, val, seed):
    """One network, trained by a loop of its own: weights after each epoch, or at the end."""
    seed_everything(seed)
    net, (x, y), kept = made(), data, []
    said = plan.lr(net) if callable(plan.lr) else {n: plan.lr for n, _ in net.named_parameters()}
    options = {n: o if isinstance(o, dict) else {"lr": o} for n, o in said.items()}
    groups = [{"params": [p], **options[n]} for n, p in net.named_parameters()]
    optimiser, order = plan.optimiser(groups), torch.Generator().manual_seed(seed)
    size, now = plan.batch or len(x), 0
    total = plan.steps or plan.epochs * -(-len(x) // size)
    while now < total:
        index = torch.randperm(len(x), generator=order)
        for batch in (index if plan.batch else torch.arange(len(x))).split(size):
            if now == total or (plan.steps and len(batch) < size):
                break
            optimiser.zero_grad()
            F.mse_loss(net(x[batch]), y[batch]).backward()
            optimiser.step()
            now += 1
        kept.append(F.mse_loss(net(val[0]), val[1]).item())
    return kept


PLANS = {
    "epochs": Plan(epochs=4, batch=16, lr=0.01),
    "all samples at once": Plan(epochs=4, lr=0.01),
    "steps": Plan(steps=11, batch=16, lr=0.01, looks=1),
    "rates and decays by name": Plan(
        epochs=3,
        batch=16,
        lr=lambda net: {
            n: 0.1 / p.numel() if p.dim() > 1 else {"lr": 0.05, "weight_decay": 0.3}
            for n, p in net.named_parameters()
        },
        optimiser=torch.optim.AdamW,
    ),
}


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_members_train_as_they_would_alone(plan):
    train, val, test = parts(), parts(20), parts(30)
    found = fit(made, {"train": train, "val": val}, plan, seeds=(3, 4), loss=F.mse_loss)
    end = found.score(test, {"loss": F.mse_loss}, "end")
    for i, seed in enumerate((3, 4)):
        wanted = plain(plan, train[i], val[i], seed)
        losses = [point["val_loss"] for point in found.curves[i]]
        assert losses == pytest.approx(wanted if plan.epochs else wanted[-1:], rel=1e-4)
        assert found.lowest[i] == pytest.approx(min(losses))
        assert (
            found.when["best"][i]
            == found.curves[i][losses.index(min(losses))]["epoch" if plan.epochs else "step"]
        )
        tested = plain(plan, train[i], test[i], seed)[-1]
        assert end[i]["loss"] == pytest.approx(tested, rel=1e-4)


def test_a_member_stops_after_its_patience_and_keeps_its_best_weights():
    class Drift(nn.Module):
        def __init__(self):
            super().__init__()
            self.at = nn.Parameter(torch.zeros(1))

        def forward(self, x):
            return self.at + 0 * x

    x = torch.zeros(10, 1)
    data = {"train": (x, x + 100), "val": (x, x + 2), "test": (x, x)}
    plan = Plan(epochs=30, lr=1.0, patience=3)
    found = fit(Drift, data, plan, seeds=(0, 1), loss=F.mse_loss)
    # Adam goes 1, 2, 3, ... and the validation loss is lowest at 2
    assert found.when == {"best": [2, 2], "stop": [5, 5]} and len(found.curves[0]) == 5
    assert found.score(data["test"], {"loss": F.mse_loss})[0]["loss"] == pytest.approx(4, rel=1e-3)
    assert found.score(data["test"], {"loss": F.mse_loss}, "stop")[1]["loss"] > 20
    # from 0, 1, 2 and 3 the training loss is 10,000, 9,801, 9,604 and 9,409: the fourth step is that of "stop"
    plan = Plan(epochs=30, lr=1.0, below=9500.0)
    found = fit(Drift, {"train": data["train"]}, plan, seeds=(0, 1), loss=F.mse_loss)
    assert found.when["stop"] == [4, 4] and found.stopped == [True, True]
    stop, end = (found.score(data["test"], {"loss": F.mse_loss}, m)[0] for m in ("stop", "end"))
    assert stop["loss"] == pytest.approx(16, rel=0.01) and end["loss"] > 25**2


def test_what_cannot_be_trained_is_refused():
    data = {"train": parts(), "val": parts(20)}
    how = {"epochs": 3, "batch": 16, "lr": 1e30}
    with pytest.raises(LabError, match=r"training loss is .*lower the rate"):
        fit(made, data, Plan(**how), seeds=(0, 1), loss=F.mse_loss)
    found = fit(made, data, Plan(**how, finite=False), seeds=(0, 1), loss=F.mse_loss)
    assert not torch.isfinite(torch.tensor(found.curves[0][-1]["train_loss"]))
    with pytest.raises(LabError, match="buffers"):
        fit(lambda: nn.BatchNorm1d(4), {"train": parts()[0]}, Plan(1), seeds=(0,), loss=F.mse_loss)
