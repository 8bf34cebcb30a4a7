"""Entries that are moved, against index arithmetic; data and networks of chapter 31's real sets."""

import lab
import numpy as np
import pandas as pd
import pytest
import torch
from lab.chapters import real_axes
from lab.train.loop import Split

STEPS, CHANNELS = 5, 4
HOME = torch.arange(STEPS * CHANNELS).view(STEPS, CHANNELS)


def rows_and_columns(order):
    index = real_axes.places(STEPS, CHANNELS, order, seed=2)
    assert index.shape == HOME.shape and torch.equal(index.flatten().sort().values, HOME.flatten())
    return index // CHANNELS, index % CHANNELS


def test_one_lost_axis_leaves_the_other():
    rows, columns = rows_and_columns("steps lost")
    assert torch.equal(columns, HOME % CHANNELS)  # a channel's numbers stay in the channel
    assert len({tuple(column) for column in rows.T.tolist()}) > 1  # each in an order of its own
    rows, columns = rows_and_columns("channels lost")
    assert torch.equal(rows, HOME // CHANNELS)
    assert len({tuple(row) for row in columns.tolist()}) > 1


def test_permuted_axes_are_axes_and_both_lost_are_none():
    rows, columns = rows_and_columns("axes permuted")
    assert all(len(set(row)) == 1 for row in rows.tolist())
    assert all(len(set(column)) == 1 for column in columns.T.tolist())
    rows, columns = rows_and_columns("both lost")
    assert any(len(set(row)) > 1 for row in rows.tolist())
    assert any(len(set(column)) > 1 for column in columns.T.tolist())


def test_in_place_is_in_place_and_other_orders_are_refused():
    assert torch.equal(real_axes.places(STEPS, CHANNELS, "in place", 0), HOME)
    with pytest.raises(lab.LabError, match="sideways"):
        real_axes.places(STEPS, CHANNELS, "sideways", 0)


def small_split():
    parts = [(torch.randn(n, STEPS, CHANNELS) * 3 + 2, torch.arange(n) % 2) for n in (8, 4, 6)]
    return Split(*parts)


def test_all_cases_and_parts_are_moved_alike():
    data = small_split()
    moved = real_axes.move(data, "both lost", seed=7)
    index = real_axes.places(STEPS, CHANNELS, "both lost", seed=7)
    for (x, y), (x_moved, y_moved) in zip(
        (data.train, data.val, data.test), (moved.train, moved.val, moved.test)
    ):
        assert torch.equal(y, y_moved)
        for case, case_moved in zip(x, x_moved):
            assert torch.equal(case_moved, case.flatten()[index.flatten()].view(STEPS, CHANNELS))


def test_entries_are_standardised_by_the_training_part():
    data = small_split()
    data.train[0][:, 0, 0] = 5.0
    x = real_axes.standardised(data).train[0]
    spread = x.std(0, correction=0)
    assert torch.allclose(x.mean(0), torch.zeros(STEPS, CHANNELS), atol=1e-6)
    assert spread[0, 0] == 0 and torch.allclose(spread.flatten()[1:], torch.ones(19), atol=1e-5)
    x, before = real_axes.standardised(data).test[0][2, 3, 1], data.test[0][2, 3, 1]
    train = data.train[0][:, 3, 1].double().numpy()
    assert x.item() == pytest.approx((before.item() - train.mean()) / train.std(), abs=1e-5)


@pytest.mark.parametrize(("name", "channels"), [("heartbeat", 61), ("racketsports", 6)])
def test_series_are_steps_by_channels(name, channels, monkeypatch):
    monkeypatch.setenv("NDL_MODE", "smoke")
    data = real_axes.series(name, seed=0)
    whole = lab.data.load(name)
    assert data.train[0].shape[1:] == (whole.x.shape[2] // real_axes.SETS[name], channels)
    assert sum(len(part[0]) for part in (data.train, data.val, data.test)) == len(whole.x)


def test_both_networks_have_256_hidden_numbers():
    for arm, first in (("ndlinear", 16 * 9 + 16 + 16 * 7 + 16), ("dense", 63 * 256 + 256)):
        net = real_axes.network(arm, 9, 7, 3)
        assert sum(p.numel() for p in net.parameters()) == first + 256 * 3 + 3
    with pytest.raises(lab.LabError, match="no arm 'deep'"):
        real_axes.network("deep", 9, 7, 3)


def test_what_axes_are_worth_is_a_difference_of_logarithms():
    losses = {("ndlinear", "in place"): 1.0, ("ndlinear", "both lost"): 4.0}
    losses |= {("dense", "in place"): 3.0, ("dense", "both lost"): 3.0}
    columns = ["data", "arm", "order", "seed", "test_loss"]
    rows = [("a", *key, seed, x * (1 + 0.1 * seed)) for key, x in losses.items() for seed in (0, 1)]
    runs = pd.DataFrame(rows, columns=columns)
    assert np.allclose(real_axes.gains(runs, "a", "ndlinear", "both lost"), np.log(4))
    assert np.allclose(real_axes.gains(runs, "a", "dense", "both lost"), 0)
    assert np.allclose(real_axes.behind(runs, "a", "in place"), np.log(1 / 3))
    assert real_axes.percent([np.log(2), np.log(2)]) == pytest.approx((100, 100, 100))
