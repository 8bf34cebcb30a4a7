"""Chapter 42's classifiers: the short cuts are the plain modules, the arms have the sizes they claim, the scores are scikit-learn's."""

import math

import numpy as np
import pytest
import torch
from lab import LabError, models
from lab.chapters import classifiers
from sklearn.metrics import accuracy_score, f1_score
from torch import nn
from torch.nn import functional as F

from ndlinear import NdLinear


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch):
    monkeypatch.setenv("NDL_MODE", "smoke")
    classifiers.series.cache_clear()
    classifiers.heartbeat.cache_clear()
    torch.manual_seed(0)


def gradients(out, *inputs):
    return torch.autograd.grad(out.square().sum(), inputs)


@pytest.mark.parametrize("chunk", [1, 40, 10**6])
def test_tilted_mean_is_a_softmax_average(chunk, monkeypatch):
    monkeypatch.setattr(classifiers.TiltedMean, "CHUNK", chunk)
    x, theta = torch.randn(5, 11).double() * 3, (torch.randn(5, 8).double() * 40).requires_grad_()
    expected = (torch.softmax(theta[..., None] * x[:, None], -1) * x[:, None]).sum(-1)
    found = classifiers.TiltedMean.apply(x, theta)
    assert torch.allclose(found, expected, atol=1e-12)
    assert torch.allclose(*gradients(found, theta), *gradients(expected, theta), atol=1e-10)


def test_hinges_are_the_sum_of_relus_with_its_gradients():
    t = torch.randn(6, 7).double().requires_grad_()
    w, c, v = (torch.randn(9).double() for _ in range(3))
    w[:2], w[2:4], c[0], c[1] = 0, -w[2:4].abs(), 1.0, -1.0  # constant, on and off; falling
    w, c, v = (p.requires_grad_() for p in (w, c, v))
    expected = ((t[..., None] * w + c).relu() * v).sum(-1)
    found = classifiers.hinges(t, w, c, v)
    assert torch.allclose(found, expected, atol=1e-12)
    for ours, theirs in zip(gradients(found, t, w, c, v), gradients(expected, t, w, c, v)):
        assert torch.allclose(ours, theirs, atol=1e-10)


def test_spline_starts_as_relu_and_interpolates():
    spline = classifiers.Spline(25).double()
    t = torch.linspace(-9, 9, 300).double()
    assert torch.allclose(spline(t), t.relu(), atol=1e-6)
    with torch.no_grad():
        spline.values.copy_(torch.randn(25))
    places, values = np.linspace(-4, 4, 25), spline.values.detach().numpy()
    inside = t[t.abs() < 4]
    assert np.allclose(spline(inside).detach(), np.interp(inside, places, values), atol=1e-6)
    slope = (values[-1] - values[-2]) * 3
    assert spline(torch.tensor(6.0).double()).item() == pytest.approx(
        values[-1] + 2 * slope, abs=1e-5
    )
    assert torch.autograd.gradcheck(
        lambda v: torch.func.functional_call(spline, {"values": v}, (inside[::9].contiguous(),)),
        (spline.values,),
    )


@pytest.mark.parametrize("dataset", ["ECGFiveDays", "ChlorineConcentration", "RacketSports"])
@pytest.mark.parametrize("arm", classifiers.ARMS)
def test_the_fast_classifier_is_the_plain_one(dataset, arm):
    channels = models.UCR[classifiers.SETS[dataset][1]][0]
    fast, plain = (
        make(dataset, arm, 13).double() for make in (classifiers.build, classifiers.plain)
    )
    plain.load_state_dict(dict(zip(plain.state_dict(), fast.state_dict().values())))
    x, y = torch.randn(4, 13, channels).double(), torch.tensor([0, 1, 1, 0])
    losses = [F.cross_entropy(net(x), y) for net in (fast, plain)]
    assert losses[0].item() == pytest.approx(losses[1].item(), abs=1e-10)
    ours, theirs = (
        torch.autograd.grad(a, list(net.parameters())) for a, net in zip(losses, (fast, plain))
    )
    assert all(torch.allclose(a, b, atol=1e-9) for a, b in zip(ours, theirs))


@pytest.mark.parametrize(
    "dataset", [name for name in classifiers.SETS if "part" not in name and name != "RacketSports"]
)
def test_sizes_of_the_arms(dataset):
    row = classifiers.SETS[dataset][1]
    size = {arm: models.size(classifiers.build(dataset, arm, 140)) for arm in classifiers.ARMS}
    for arm, method in (("base", "Base Model"), ("base*", "Base Model*"), ("ndlinear", "NdLinear")):
        assert size[arm] == models.size(models.series_classifier(row, method))
    assert size["learned"] == size["ndlinear"]
    assert size["folded"] < size["base*"] and size["time"] <= size["base"]
    width = models.UCR[row][1]
    more = (
        NdLinear((140, width), (classifiers.two_axes(140, width) + 1, width)),
        NdLinear((classifiers.two_axes(140, width) + 1, width), (140, width)),
    )
    assert sum(map(models.size, more)) > models.size(classifiers.block("base", width, 8, 140)), (
        "r is the largest"
    )


def test_what_sees_the_order_of_time():
    x = torch.randn(3, 20, 1).double()
    for arm in classifiers.ARMS:
        net = classifiers.build("ECG5000", arm, 20).double()
        assert torch.allclose(net(x), net(x.flip(1))) == (arm != "time")
        placed = classifiers.build("ECG5000", arm, 20, positions=True).double()
        assert not torch.allclose(placed(x), placed(x.flip(1)))
        assert models.size(placed) == models.size(net)


def test_positions_are_sines_and_cosines():
    table = classifiers.sines(50, 8)
    assert table.shape == (50, 8)
    assert table[7, 2].item() == pytest.approx(math.sin(7 / 1e4 ** (2 / 8)), abs=1e-5)
    assert table[7, 3].item() == pytest.approx(math.cos(7 / 1e4 ** (2 / 8)), abs=1e-5)


def test_multiply_adds_are_those_of_the_formula():
    steps, d = 30, 32
    net = classifiers.plain("ECG5000", "base", steps)
    expected = steps * (d + 4 * d * d + 8 * d * d) + 2 * steps * steps * d + d * 6
    assert classifiers.macs(net, steps) == expected
    assert torch.backends.mha.get_fastpath_enabled()
    short = classifiers.plain("ECG5000", "ndlinear", steps, layer=models.Cheapest)
    block = steps * (2 * d * d + 2 * d * 32)
    assert classifiers.macs(short, steps) == expected - steps * 8 * d * d + block
    d, steps, r = 16, 136, classifiers.two_axes(136, 16)
    around = steps * (d + 4 * d * d) + 2 * steps * steps * d + d * 3
    assert classifiers.cost("ECGFiveDays", "time") == around + 2 * (steps * r * d + r * d * d)
    assert classifiers.cost("ECGFiveDays", "folded") == around + 2 * steps * (4 * 4 * 8 + 8 * 4 * 8)


def test_series_are_scaled_by_the_training_part():
    parts = classifiers.parts("RacketSports", 0)
    (x, y), (x_test, _) = parts["train"], parts["test"]
    assert x.shape[2] == 6 and x.dtype == torch.float32 and y.min() == 0
    assert (
        x.mean((0, 1)).abs().max() < 1e-5 and (x.std((0, 1), correction=0) - 1).abs().max() < 1e-4
    )
    assert x_test.mean((0, 1)).abs().max() > 1e-4, "not scaled by itself"


def test_the_stand_in_for_heartbeat_keeps_classes_and_cases():
    cuts = [classifiers.parts("Heartbeat, training part", seed) for seed in (0, 1)]
    for cut in cuts:
        (x, y), (x_test, y_test) = cut["train"], cut["test"]
        assert x.shape[1:] == x_test.shape[1:] == (27, 61)
        assert len(y) + len(y_test) == 6 and set(y.tolist()) == set(y_test.tolist()) == {0, 1}
        assert not any(torch.equal(a, b) for a in x for b in x_test)
    assert not torch.equal(cuts[0]["test"][0], cuts[1]["test"][0])


def test_training_is_seeded_and_learns():
    x, y = classifiers.parts("ECG5000", 0)["train"]

    def run(seed, epochs=30, **options):
        torch.manual_seed(seed)
        net = classifiers.build("ECG5000", "base*", x.shape[1], **options)
        curve = classifiers.train(net, x, y, epochs=epochs, lr=0.01, batch_size=4, seed=seed)
        return net, curve

    (net, first), (_, second), (_, other) = run(3), run(3), run(4)
    assert first == second != other
    assert first[-1]["train_loss"] < first[0]["train_loss"] and len(first) == 30
    assert classifiers.predict(net, x).shape == y.shape
    with pytest.raises(LabError, match="lower lr"):
        classifiers.train(
            nn.Sequential(nn.Flatten(), nn.Linear(48, 6)),
            x * 1e30,
            y,
            epochs=9,
            lr=1e30,
            batch_size=4,
            seed=0,
        )


def test_scores_are_those_of_scikit_learn():
    rng = np.random.default_rng(0)
    y, predicted = (
        rng.integers(0, 4, 200),
        rng.integers(0, 5, 200),
    )  # a fifth output that is never right
    found = classifiers.scores(y, predicted)
    assert found["accuracy"] == pytest.approx(accuracy_score(y, predicted))
    for mean in ("macro", "weighted"):
        assert found[f"{mean}_f1"] == pytest.approx(
            f1_score(y, predicted, labels=range(4), average=mean)
        )


@pytest.mark.parametrize("kind", ["majority", "linear", "sorted", "rocket"])
def test_models_that_are_no_networks(kind):
    parts = classifiers.parts("ECGFiveDays", 0)
    predicted, size = classifiers.classical(kind, parts["train"], parts["test"][0], 0, kernels=84)
    assert predicted.shape == parts["test"][1].shape and set(predicted) <= {0, 1}
    steps = parts["train"][0].shape[1]
    assert size == {"majority": 0, "linear": steps + 1, "sorted": steps + 1, "rocket": 85}[kind]
    mixed = parts["train"][0].flip(1), parts["train"][1]
    again, _ = classifiers.classical(kind, mixed, parts["test"][0], 0, kernels=84)
    assert kind in ("rocket", "linear") or (again == predicted).all(), "blind to the order of time"
    if kind == "rocket":
        assert classifiers.scores(parts["test"][1], predicted)["accuracy"] > 0.5
