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


def test_heartbeat_is_cut_class_by_class_and_each_case_is_in_one_part():
    x, y = np.arange(50)[:, None, None] + np.zeros((1, 2, 54)), (np.arange(50) % 5 == 0).astype(int)
    parts = classifiers.heartbeat(x, y, seed=3)
    sizes = {name: np.bincount(classes).tolist() for name, (_, classes) in parts.items()}
    assert sizes == {"train": [32, 8], "test": [8, 2]}
    assert sorted(np.concatenate([x[:, 0, 0] for x, _ in parts.values()])) == list(range(50))
    assert all((y[x[:, 0, 0].astype(int)] == classes).all() for x, classes in parts.values())
