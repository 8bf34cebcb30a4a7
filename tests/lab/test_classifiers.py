"""Chapter 42: the short cuts are the plain modules, multiply-adds by formula."""

import numpy as np
import pytest
import torch
from lab import models
from lab.chapters import classifiers
from lab.data import Data
from torch.nn import functional as F

from ndlinear import NdLinear


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch):
    monkeypatch.setenv("NDL_MODE", "smoke")
    classifiers.parts.cache_clear()
    torch.manual_seed(0)


def test_spline_starts_as_relu_and_interpolates():
    spline = classifiers.Spline(25).double()
    t = torch.linspace(-9, 9, 300).double()
    assert torch.allclose(spline(t), t.relu(), atol=1e-6)
    with torch.no_grad():
        spline.values.copy_(torch.randn(25))
    places, values = np.linspace(-4, 4, 25), spline.values.detach().numpy()
    inside = t[t.abs() < 4]
    assert np.allclose(spline(inside).detach(), np.interp(inside, places, values), atol=1e-6)
    beyond = values[-1] + 2 * (values[-1] - values[-2]) * 3
    assert spline(torch.tensor(6.0).double()).item() == pytest.approx(beyond, abs=1e-5)


@pytest.mark.parametrize("dataset", ["ECGFiveDays", "ChlorineConcentration", "LSST"])
@pytest.mark.parametrize("arm", classifiers.ARMS)
def test_the_fast_classifier_is_the_plain_one(dataset, arm):
    channels = models.UCR[classifiers.SETS[dataset][1]][0]
    fast = classifiers.build(dataset, arm, 13).double()
    plain = classifiers.build(dataset, arm, 13, layer=NdLinear).double()
    plain.load_state_dict(dict(zip(plain.state_dict(), fast.state_dict().values())))
    x, y = torch.randn(4, 13, channels).double(), torch.tensor([0, 1, 1, 0])
    for net in (fast, plain):
        F.cross_entropy(net(x), y).backward()
    assert torch.allclose(fast(x), plain(x), atol=1e-9)
    for ours, theirs in zip(fast.parameters(), plain.parameters()):
        assert torch.allclose(ours.grad, theirs.grad, atol=1e-9)


def test_multiply_adds_are_those_of_the_formula():
    steps, d = 30, 32
    net = classifiers.build("ECG5000", "base", steps, layer=models.Cheapest)
    expected = steps * (d + 4 * d * d + 8 * d * d) + 2 * steps * steps * d + d * 6
    assert classifiers.macs(net, steps) == expected
    assert torch.backends.mha.get_fastpath_enabled()
    short = classifiers.build("ECG5000", "ndlinear", steps, layer=models.Cheapest)
    block = steps * (2 * d * d + 2 * d * 32)
    assert classifiers.macs(short, steps) == expected - steps * 8 * d * d + block
    d, steps, r = 16, 136, classifiers.two_axes(136, 16)
    around = steps * (d + 4 * d * d) + 2 * steps * steps * d + d * 3
    both = {"time": steps * r * d + r * d * d, "folded": steps * (4 * 4 * 8 + 8 * 4 * 8)}
    for arm, one_layer in both.items():
        net = classifiers.build("ECGFiveDays", arm, steps, layer=models.Cheapest)
        assert classifiers.macs(net, steps) == around + 2 * one_layer


def test_the_stand_in_for_heartbeat_holds_out_a_fifth_and_averages_over_time(monkeypatch):
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(50, 2, 54)), (np.arange(50) % 5 == 0).astype(int)
    data = Data("heartbeat", x, y, ("a", "b"), "", False, {"train": slice(0, 50)}, "")
    monkeypatch.setattr(classifiers, "load", lambda name: data)
    parts, others = (classifiers.parts("Heartbeat, training part", seed) for seed in (3, 4))
    sizes = {name: np.bincount(part[1]).tolist() for name, part in parts.items()}
    assert sizes == {"train": [32, 8], "test": [8, 2]}
    assert not torch.equal(parts["test"][0], others["test"][0])
    pairs = (x[..., ::2] + x[..., 1::2]) / 2
    (found, classes), (held, held_classes) = parts["train"], parts["test"]
    assert found.mean((0, 1)).abs().max() < 1e-5
    origins = []
    for series, label in zip(torch.cat([found, held]), torch.cat([classes, held_classes])):
        fits = [np.corrcoef(series[:, 0], pairs[i, 0])[0, 1] for i in range(50)]
        origins.append(int(np.argmax(fits)))
        assert max(fits) > 1 - 1e-6 and y[origins[-1]] == int(label)
    assert sorted(origins) == list(range(50)), "each case is in one part"
