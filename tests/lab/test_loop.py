"""The training loop of one network against that of many, which test_many.py holds against the plainest one; what is refused."""

import functools

import pytest
import torch
from lab import LabError, Split, fit, seed_everything
from lab.train import loop, many
from torch import nn

LOSS = {"loss": nn.functional.mse_loss}
SCORES = {"mae": nn.functional.l1_loss}
MAKE = functools.partial(nn.Linear, 3, 1)


def problem(n=120):
    x = torch.randn(n, 3)
    y = x @ torch.tensor([[1.0], [-2.0], [0.5]]) + 0.1 * torch.randn(n, 1)
    return Split(*zip(x.split([n // 2, n // 4, n // 4]), y.split([n // 2, n // 4, n // 4])))


@pytest.mark.parametrize(
    ("optimiser", "batch", "patience"),
    [
        (torch.optim.Adam, 0, 0),
        (torch.optim.AdamW, 16, 0),
        (torch.optim.SGD, 16, 0),
        (torch.optim.Adam, 16, 5),
    ],
)
def test_fit_is_the_training_of_a_single_member(optimiser, batch, patience):
    data, how = problem(), {"optimiser": optimiser, "patience": patience, "lr": 0.3, "epochs": 40}
    parts, plan = {"train": data.train, "val": data.val}, many.Plan(batch=batch, **how)
    wanted = many.fit(MAKE, parts, plan, seeds=(5,), **LOSS, scores=SCORES)
    seed_everything(5)
    how |= {"batch_size": batch, "seed": 5, "device": "cpu"}
    found = fit(MAKE(), data, **LOSS, scores=SCORES, **how)
    assert (found.epochs < 40) == bool(patience), "it would have ended by itself"
    assert [found.best_epoch, found.epochs] == [wanted.when[m][0] for m in ("best", "stop")]
    for point, other in zip(found.curve, wanted.curves[0], strict=True):
        assert point == pytest.approx(other, rel=1e-4)
    best = {k: v for k, v in found.curve[found.best_epoch - 1].items() if k != "epoch"}
    tested = wanted.score(data.test, LOSS | SCORES)[0].items()
    assert found.metrics == pytest.approx(best | {f"test_{k}": v for k, v in tested}, rel=1e-4)
    uneven = loop.evaluate(found.model, data.test, *LOSS.values(), SCORES, batch=7)
    assert uneven == pytest.approx(dict(tested), rel=1e-4)


def test_divergence_and_unequal_parts_are_refused():
    how = {"optimiser": torch.optim.SGD, "lr": 1e20, "epochs": 20, "batch_size": 16, "seed": 0}
    with pytest.raises(LabError, match="lower lr=1e"):
        fit(MAKE(), problem(), **LOSS, **how)
    data = problem()
    with pytest.raises(LabError, match="60 inputs and 30 targets"):
        Split((data.train[0], data.val[1]), data.val, data.test)
