"""Chapter 42: the short cuts are the plain modules, multiply-adds by formula."""

import numpy as np
import pytest
import torch
from lab import models
from lab.chapters import classifiers
from torch.nn import functional as F

from ndlinear import NdLinear


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
