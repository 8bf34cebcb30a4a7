"""Trainings side by side: on a processor they are those of `lab.fit`, to the last digit."""

from unittest import mock

import pytest
import torch
from lab import LabError
from lab.decoder import Decoder, FeedForward, NdFeedForward
from lab.train import graphed, language, loop, scores
from torch import nn
from torch.nn import functional as F

SEEDS = (3, 4, 5)
SCORES = {"accuracy": scores.accuracy}
HOW = {"loss": F.cross_entropy, "epochs": 6, "lr": 0.02, "batch_size": 8}


def make() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


@pytest.fixture
def split():
    torch.manual_seed(0)
    x, y = torch.randn(60, 4), torch.randint(3, (60,))
    return loop.Split((x[:35], y[:35]), (x[35:45], y[35:45]), (x[45:], y[45:]))


def alone(split, seed, **more):
    loop.seed_everything(seed)
    how = HOW | more
    return loop.fit(make(), split, scores=SCORES, seed=seed, **how)


def together(split, seeds=SEEDS, **more):
    how = HOW | more
    return graphed.fit(make, split, scores=SCORES, seeds=seeds, **how)


@pytest.mark.parametrize("batch_size", [8, 35])  # with and without samples left over
def test_each_member_is_trained_as_it_would_be_alone(split, batch_size):
    for seed, fit in zip(SEEDS, together(split, batch_size=batch_size)):
        one = alone(split, seed, batch_size=batch_size)
        assert fit.metrics == pytest.approx(one.metrics, rel=1e-6)
        assert fit.best_epoch == one.best_epoch and len(fit.curve) == len(one.curve) == 6
        assert all(
            torch.equal(a, b)
            for a, b in zip(fit.model.state_dict().values(), one.model.state_dict().values())
        )


def test_decoders_read_as_they_would_alone():
    tokens = torch.randint(50, (4000,), generator=torch.Generator().manual_seed(0))
    plan = language.Plan(steps=12, lr=1e-2, batch=4, looks=3)

    def decoders():
        torch.manual_seed(0)
        make = lambda: NdFeedForward(16, 32, 4)  # noqa: E731
        return [Decoder(50, 16, 16, 2, 2, make) for _ in range(2)]

    how = {"context": 16, "held": tokens[:500]}
    together = graphed.pretrain(decoders(), tokens, plan, seeds=(1, 2), **how)
    for model, seed, curve in zip(decoders(), (1, 2), together):
        alone = language.train(model, tokens, plan, seed=seed, **how)
        assert [p["step"] for p in curve] == [p["step"] for p in alone] == [4, 8, 12]
        for name in ("train_loss", "held_loss"):
            expected = [point[name] for point in alone]
            assert [point[name] for point in curve] == pytest.approx(expected, rel=1e-5)


def test_what_diverges_is_named(split):
    with pytest.raises(LabError, match="the training loss is"):
        together(split, lr=1e30)
    model, tokens = Decoder(9, 4, 8, 1, 1, lambda: FeedForward(8, 8)), torch.arange(100) % 9
    nn.init.constant_(model.norm.weight, float("nan"))
    plan = language.Plan(2, 1e-2, 2)
    with pytest.raises(language.Diverged, match="lower lr"):
        graphed.pretrain([model], tokens, plan, context=4, seeds=[0], held=tokens)


def test_on_a_gpu_every_step_runs_three_times_and_is_replayed_from_then_on(monkeypatch):
    gpu, ran = mock.MagicMock(), []
    for name in ("Stream", "synchronize", "current_stream", "stream", "graph", "CUDAGraph"):
        monkeypatch.setattr(torch.cuda, name, getattr(gpu, name))
    steps = [lambda: ran.append("a"), lambda: ran.append("b")]
    call = graphed.SideBySide(steps, torch.device("cuda"))
    for _ in range(10):
        call()
    assert gpu.graph.call_count == 1 and gpu.CUDAGraph().replay.call_count == 7
    assert ran == ["a", "b"] * (graphed.WARM + 1)  # the capture goes through them once more
