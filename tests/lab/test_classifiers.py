"""Chapter 42: the short cuts are the plain modules, multiply-adds by formula."""

import numpy as np
import pytest
import torch
from lab import models
from lab.chapters import classifiers
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


def test_cuts_of_heartbeat_hold_out_a_fifth_of_each_class_and_average_over_time():
    x = np.arange(50.0)[:, None, None] + np.tile([-0.5, 0.5], (1, 2, 27))  # case by case
    y = (np.arange(50) % 5 == 0).astype(int)
    parts, others = (classifiers.heartbeat(x, y, seed) for seed in (3, 4))
    sizes = {name: np.bincount(part[1]).tolist() for name, part in parts.items()}
    assert sizes == {"train": [32, 8], "test": [8, 2]}
    cases = {name: part[0][:, 0, 0].astype(int) for name, part in parts.items()}
    for name, (found, classes) in parts.items():
        assert found.shape[1:] == (2, 27) and (found == cases[name][:, None, None]).all()
        assert (classes == y[cases[name]]).all()
    assert sorted(np.concatenate([*cases.values()])) == list(range(50)), "each case is in one part"
    assert not np.array_equal(parts["test"][0], others["test"][0])
