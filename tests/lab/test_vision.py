"""Small image classifiers: heads against the formulas that they stand for, pictures, training and memory against counts."""

import itertools
import math

import lab
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
import torch
from lab import models
from lab.chapters import vision
from lab.data import Data, splits
from torch import nn
from torch.nn import functional as F

from ndlinear import NdLinear


@pytest.fixture
def small(monkeypatch):
    """A data set of three classes, twelve training pictures (eight of them exact) and six test pictures."""
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 256, (18, 3, 32, 32)).astype(np.uint8), np.arange(18) % 3
    splits = {"train": slice(0, 12), "train_exact": slice(0, 9), "test": slice(12, 18)}
    made = Data("small", x, y, ("a", "b", "c"), "", False, splits, "")
    monkeypatch.setattr(vision, "load", lambda name: made)
    vision.pictures.cache_clear()
    yield made
    vision.pictures.cache_clear()


def test_pictures_are_drawn_by_the_seed_in_equal_numbers_and_scaled_by_themselves(small):
    (x, y), (x_test, y_test) = vision.pictures("small", 6, 0)
    assert x.shape == (6, 3, 32, 32) and y.bincount().tolist() == [2, 2, 2] and len(x_test) == 6
    assert torch.allclose(x.mean((0, 2, 3)), torch.zeros(3), atol=1e-5)
    assert torch.allclose(x.std((0, 2, 3), unbiased=False), torch.ones(3), atol=1e-5)
    raw = torch.from_numpy(small.part("test")[0].astype(np.float32))
    ratio = (raw - raw.mean((0, 2, 3), keepdim=True)) / (
        x_test - x_test.mean((0, 2, 3), keepdim=True)
    )
    assert torch.allclose(
        ratio, ratio[:1, :, :1, :1].expand_as(ratio), rtol=1e-2
    )  # one scale per channel
    assert y_test.tolist() == [0, 1, 2, 0, 1, 2]
    others = [vision.pictures("small", 6, seed)[0][0] for seed in range(1, 5)]
    assert any(not torch.equal(x, other) for other in others)
    assert torch.equal(x, vision.pictures("small", 6, 0)[0][0])


def test_pictures_say_when_there_are_too_few(small):
    with pytest.raises(lab.modes.LabError, match="too few for 15"):
        vision.pictures("small", 15, 0)


def test_pictures_leave_the_exact_part_when_more_are_asked_for(small, monkeypatch):
    monkeypatch.setattr(splits, "EXACT", 9)
    assert len(vision.pictures("small", 9, 0)[0][0]) == 9  # all of the exact part
    assert len(vision.pictures("small", 12, 0)[0][0]) == 12


@pytest.mark.parametrize(
    "dims, hidden, rank", [((4, 3, 2), (5, 2, 3), 4), ((3, 4), (2, 5), 2), ((6,), (4,), 3)]
)
def test_a_tensor_train_core_by_core_is_the_map_multiplied_out(dims, hidden, rank):
    slow, fast = (kind(dims, hidden, rank).double() for kind in (models.TTLinear, vision.TTCores))
    fast.load_state_dict(slow.state_dict())
    nn.init.normal_(fast.bias), slow.bias.data.copy_(fast.bias)
    x = torch.randn(7, math.prod(dims)).double()
    assert torch.allclose(slow(x), fast(x), atol=1e-12)
    for a, b in zip(
        *(torch.autograd.grad(m(x).square().sum(), list(m.parameters())) for m in (slow, fast))
    ):
        assert torch.allclose(a, b, atol=1e-10)


def test_a_cp_map_factor_by_factor_is_the_map_multiplied_out_and_cheaper():
    slow, fast = models.CPLinear(20, 30, 4).double(), vision.CPFactors(20, 30, 4).double()
    nn.init.normal_(slow.weights), nn.init.normal_(slow.bias)
    fast.load_state_dict(slow.state_dict())
    x = torch.randn(7, 20).double()
    assert torch.allclose(slow(x), fast(x), atol=1e-12)
    assert (
        lab.count_macs(fast, x[:1])
        == 4 * (20 + 30)
        < lab.count_macs(slow, x[:1])
        == 20 * 30 * 4 + 20 * 30
    )


def test_spread_keeps_the_variance_of_the_input():
    torch.manual_seed(0)
    layer = vision.spread(models.TTLinear((8, 8), (8, 8), 16), 2)
    torch.manual_seed(0)
    untouched = models.TTLinear((8, 8), (8, 8), 16)
    for k, (core, before) in enumerate(zip(layer.cores, untouched.cores)):
        torch.testing.assert_close(core, before * (8**0.5 if k < 2 else 1))
    draws = [vision.spread(models.TTLinear((8, 8), (8, 8), 16), 2) for _ in range(20)]
    with torch.no_grad():
        squares = [each(torch.randn(200, 64)).square().mean().item() for each in draws]
    assert 0.8 < np.mean(squares) < 1.25


@pytest.mark.parametrize(
    "made",
    [
        lambda: NdLinear((4, 3), (4, 3), bias=False),
        lambda: nn.Sequential(nn.Flatten(), models.CPLinear(12, 12, 5)),
        lambda: nn.Sequential(nn.Flatten(), models.TTLinear((4, 3), (4, 3), 6)),
    ],
)
def test_a_scaled_start_is_the_map_times_the_factor(made):
    torch.manual_seed(0)
    layer = made()
    head = nn.Sequential(*layer) if isinstance(layer, nn.Sequential) else nn.Sequential(layer)
    x = torch.randn(7, 4, 3)
    before = head(x).detach()
    torch.testing.assert_close(vision.scaled(head, 4.0)(x), 4 * before)


def test_a_kept_map_is_the_map_and_holds_its_matrix():
    layer = models.TTLinear((4, 3), (2, 5), 2)
    nn.init.normal_(layer.bias)
    kept, x = vision.Kept(layer, 12), torch.randn(6, 12)
    assert torch.allclose(kept(x), layer(x), atol=1e-5)
    assert kept.matrix.shape == (10, 12) and models.size(kept) == models.size(layer)


def test_tcl_is_ndlinear_without_biases():
    pytest.importorskip("tltorch")
    from ndlinear import ndlinear

    layer, x = vision.tcl().double(), torch.randn(3, 64, 8, 8).double()
    assert torch.allclose(layer(x), ndlinear(x, list(layer.factors)), atol=1e-10)
    assert models.size(layer) == 64 * 64 + 8 * 8 + 8 * 8


def test_trl_is_a_tucker_weight_and_starts_small():
    pytest.importorskip("tltorch")
    torch.manual_seed(0)
    layer, x = vision.trl(10).double(), torch.randn(3, 64, 8, 8).double()
    core, factors = layer.weight.core, list(layer.weight.factors)
    weight = torch.einsum("abcd,ia,jb,kc,nd->ijkn", core, *factors)
    nn.init.normal_(layer.bias)
    assert torch.allclose(
        layer(x), torch.einsum("bijk,ijkn->bn", x, weight) + layer.bias, atol=1e-8
    )
    assert core.shape == (32, 4, 4, 10)
    squares = [vision.trl(10).weight.to_tensor().square().mean().item() for _ in range(10)]
    assert 0.7 < math.sqrt(3 * 4096 * np.mean(squares)) < 1.4


@pytest.mark.parametrize("classes, bias", [*itertools.product((10, 100), (False, True))])
def test_width_of_equal_size_is_the_largest(classes, bias):
    most = models.size(models.cnn_head("ndlinear", classes))

    def parameters(w):
        return models.size(nn.Sequential(nn.Linear(4096, w, bias=bias), nn.Linear(w, classes)))

    width = vision.width_of_equal_size(classes, most, bias)
    assert parameters(width) <= most < parameters(width + 1)


def toy(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)
    )


def data(n=24):
    draw = torch.Generator().manual_seed(0)
    y = torch.arange(n) % 3
    return torch.randn(n, 3, 8, 8, generator=draw) * 0.1 + y[:, None, None, None], y


def test_training_learns_and_repeats_itself():
    settings = {"epochs": 12, "lr": 0.05, "batch_size": 8, "device": "cpu"}
    model, again, other = toy(), toy(), toy()
    curve = vision.train(model, data(), seed=1, **settings)
    assert [point["epoch"] for point in curve] == list(range(1, 13))
    assert curve[-1]["train_loss"] < 0.7 * curve[0]["train_loss"]
    assert vision.train(again, data(), seed=1, **settings) == curve
    assert vision.train(other, data(), seed=2, **settings) != curve
    assert not torch.equal(model[0].weight, other[0].weight)


def test_training_is_the_loop_written_out_in_bfloat16_with_torchs_adam():
    (x, y), model, plain = data(20), toy(4), toy(4)
    curve = vision.train(model, (x, y), epochs=2, lr=0.01, batch_size=8, seed=3, device="cpu")
    plain = plain.to(memory_format=torch.channels_last).train()
    adam = torch.optim.Adam(plain.parameters(), lr=0.01, weight_decay=0)
    draw, losses = torch.Generator().manual_seed(3), []
    for _ in range(2):
        order, total = torch.randperm(20, generator=draw), 0.0
        for rows in (order[:8], order[8:16], order[16:]):
            with torch.autocast("cpu", torch.bfloat16):
                out = plain(x[rows].contiguous(memory_format=torch.channels_last))
            assert out.dtype == torch.bfloat16
            loss = -out.float().log_softmax(1)[range(len(rows)), y[rows]].mean()
            adam.zero_grad()
            loss.backward()
            adam.step()
            total += loss.item() * len(rows)
        losses.append(total / 20)
    assert [p["train_loss"] for p in curve] == pytest.approx(losses, rel=1e-5)
    for found, expected in zip(model.parameters(), plain.parameters()):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_pictures_keep_their_classes_and_are_scaled_by_the_drawn_ones(small):
    (x, y), (x_test, y_test) = vision.pictures("small", 6, 2)
    raw, classes = small.part("train_exact")
    draw = np.random.default_rng(2)
    places = sorted(i for c in range(3) for i in draw.permutation(np.flatnonzero(classes == c))[:2])
    chosen = torch.from_numpy(raw[places].astype(np.float64))
    mean, deviation = chosen.mean((0, 2, 3)), chosen.std((0, 2, 3), correction=0)
    assert y.tolist() == classes[places].tolist()
    scaled = (chosen - mean[:, None, None]) / deviation[:, None, None]
    torch.testing.assert_close(x.double(), scaled, rtol=1e-4, atol=1e-4)
    raw_test = torch.from_numpy(small.part("test")[0].astype(np.float64))
    scaled = (raw_test - mean[:, None, None]) / deviation[:, None, None]
    torch.testing.assert_close(x_test.double(), scaled, rtol=1e-4, atol=1e-4)
    assert y_test.tolist() == small.part("test")[1].tolist()


def test_training_stops_at_a_loss_that_is_not_finite():
    x, y = data()
    with pytest.raises(lab.modes.LabError, match="training loss is nan in epoch 1"):
        vision.train(toy(), (x * math.nan, y), epochs=1, lr=0.1, batch_size=8, seed=0, device="cpu")


def test_evaluation_is_that_of_all_samples_at_once():
    torch.manual_seed(0)
    model, (x, y) = nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(192, 7)), data(23)
    found = vision.evaluate(model, (x, y), batch=10)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        out = model.eval()(x).float()
    assert found["accuracy"] == pytest.approx((out.argmax(1) == y).float().mean().item(), abs=1e-6)
    assert found["loss"] == pytest.approx(F.cross_entropy(out, y).item(), rel=1e-4)
    among = (out.topk(5).indices == y[:, None]).any(1)
    assert found["top_five"] == pytest.approx(among.float().mean().item(), abs=1e-6)
    assert found["top_five"] < 1


def test_bytes_at_the_peak_are_those_of_the_first_convolution_and_its_norm():
    net = vision.network(models.cnn_head("ndlinear", 100))
    pictures, maps = 8 * 3 * 1024 * 4, 2 * 8 * 32 * 1024 * 4
    buffers = sum(b.nbytes for b in net.buffers())
    beside = vision.tensor_bytes(net, 8) - (pictures + maps + 4 * 433_588 + buffers)
    assert 0 <= beside <= 512  # a few numbers for each channel


def test_counts_of_the_dense_network():
    net = vision.network(models.cnn_head("dense", 100))
    found, convolutions = vision.counts(net, 4), 32 * 27 * 1024 + 64 * 288 * 256
    macs = convolutions + 4096 * 256 + 256 * 100
    assert found["parameters"] == 1_094_116 and found["macs"] == macs
    assert found["G macs, batch"] == pytest.approx(4 * macs / 1e9)
    norms = 4 * (32 * 1024 + 64 * 256)
    assert found["with batch norm"] == pytest.approx((4 * macs + 5 * norms) / 1e9)
    assert next(net.parameters()).device.type == "cpu"


def test_times_are_medians_of_ratios_within_rounds():
    rows = [
        {
            "what": what,
            "batch": 1,
            "curve": {"a": [1.0 * k] * 4, "b": [2.0 * k, 3.0 * k, 2.0 * k, 2.0 * k]},
        }
        for what, k in (("network", 1), ("network", 5), ("head", 7))
    ]
    found = vision.times(pd.DataFrame(rows), "a", "network", 1)
    assert found.loc["b"].tolist() == [2.0, 2.0, 3.0] and found.loc["a", "times"] == 1


@pytest.mark.parametrize(
    "out, piece, expected",
    [
        (True, True, {"holds": True}),
        (True, None, {"holds": None}),
        (True, False, {"holds": False, "under": True}),
        (False, True, {"holds": False}),
        (None, True, {"holds": None}),
    ],
)
def test_a_claim_against_maps_applied_in_two_ways(out, piece, expected):
    assert vision.both_ways(out, piece) == expected


def both_ways(epochs: int = 2, arm: str = "dense", dtype: torch.dtype = torch.float32):
    """The same head trained by `train` and by `train_quickly`: models and curves."""
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(48, 3, 32, 32, generator=generator).to(torch.bfloat16).float()
    data = images, torch.arange(48) % 10
    how = {"epochs": epochs, "lr": 1e-3, "batch_size": 16, "seed": 3}
    found = []
    for network, prepared, train in (
        (vision.network, data, vision.train),
        (vision.quick_network, vision.in_memory(data, "cpu"), vision.train_quickly),
    ):
        torch.manual_seed(0)
        model = network(nn.Sequential(*models.cnn_head(arm, 10))).to(dtype)
        place = {"device": "cpu"} if train is vision.train else {}
        found.append((model, train(model, prepared, **how, **place)))
    return found


@pytest.mark.parametrize("arm", ["dense", "ndlinear"])
def test_the_quick_loop_takes_the_steps_of_the_other_one(monkeypatch, arm):
    """In float64, dropout and batch norm included: every weight, statistic and loss.

    In float32 the biases in front of a batch norm, whose gradient is zero but for rounding, would
    go their own ways: Adam divides a gradient by its size.
    """
    monkeypatch.setattr(vision, "forward", lambda model, images: model(images.double()))
    (model, curve), (quick, quick_curve) = both_ways(arm=arm, dtype=torch.float64)
    assert [p["epoch"] for p in curve] == [p["epoch"] for p in quick_curve] == [1, 2]
    for point, other in zip(curve, quick_curve):
        assert other["train_loss"] == pytest.approx(point["train_loss"], rel=1e-7)
    other = quick.state_dict()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(other[name], value, rtol=1e-6, atol=1e-7, msg=name)


def test_the_quick_loop_in_bfloat16_is_near_the_other_one():
    (_, curve), (_, quick_curve) = both_ways(epochs=3)
    for point, other in zip(curve, quick_curve):
        assert other["train_loss"] == pytest.approx(point["train_loss"], rel=0.03)


def test_a_quick_network_is_the_same_function():
    torch.manual_seed(0)
    slow = vision.network(nn.Sequential(*models.cnn_head("ndlinear", 10))).double().eval()
    quick = vision.quick_network(nn.Sequential(*models.cnn_head("ndlinear", 10))).double().eval()
    for norm in (slow[0][1], slow[0][6]):
        nn.init.normal_(norm.weight)  # of both signs
        nn.init.normal_(norm.bias)
    quick.load_state_dict(slow.state_dict())
    x = torch.randn(3, 3, 32, 32).double()
    assert torch.allclose(slow(x), quick(x), atol=1e-12)
    kinds = [type(layer).__name__ for layer in quick[0]]
    assert kinds == ["Conv2d", "BatchNorm2d", "MaxPool2d", "ReLU", "Dropout2d"] * 2


def test_pictures_in_memory_are_rounded_and_have_their_channels_last():
    images = torch.randn(4, 3, 32, 32)
    kept, classes = vision.in_memory((images, torch.arange(4)), "cpu")
    assert (
        kept.shape == (4, 32, 32, 3) and kept.is_contiguous() and classes.tolist() == [0, 1, 2, 3]
    )
    assert torch.equal(kept[2, 5, 7], images[2, :, 5, 7].bfloat16())
    batch = kept[torch.tensor([3, 1])].permute(0, 3, 1, 2)
    assert batch.is_contiguous(memory_format=torch.channels_last)


def test_the_quick_loop_stops_at_a_loss_that_is_not_finite():
    data = torch.full((8, 32, 32, 3), math.inf, dtype=torch.bfloat16), torch.arange(8) % 3
    with pytest.raises(lab.modes.LabError, match="training loss is nan"):
        vision.train_quickly(toy(), data, epochs=1, lr=1e-3, batch_size=4, seed=0)


def test_a_quick_run_repeats_itself_and_is_tested_on_the_other_pictures():
    images = torch.randn(20, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    part, test = (images[:12], torch.arange(12) % 6), (images[12:], torch.arange(8) % 6)

    def make_head():
        return nn.Sequential(nn.Flatten(), nn.Linear(4096, 6))

    how = {"epochs": 2, "lr": 1e-3, "batch_size": 4, "seed": 7}
    row, again = (vision.run_quickly(make_head, part, test, **how) for _ in range(2))
    assert row == again
    assert row != vision.run_quickly(make_head, part, test, **how | {"seed": 8})
    assert [point["epoch"] for point in row["curve"]] == [1, 2]
    assert row["metrics"]["train_loss"] == row["curve"][-1]["train_loss"]
    changed = vision.run_quickly(make_head, part, (test[0], (test[1] + 1) % 6), **how)
    assert changed["curve"] == row["curve"] and changed["metrics"] != row["metrics"]
    assert row["parameters"] == models.size(vision.quick_network(make_head())) and row["macs"] > 0


def test_a_network_from_memory_answers_as_on_the_pictures_themselves():
    images, classes = torch.randn(6, 3, 32, 32), torch.arange(6) % 3
    net = vision.quick_network(nn.Sequential(nn.Flatten(), nn.Linear(4096, 3))).eval()
    direct = vision.forward(net, images.to(torch.bfloat16))
    in_memory, _ = vision.in_memory((images, classes), "cpu")
    assert torch.equal(vision.FromMemory(net)(in_memory), direct)


def test_baselines_have_a_row_where_the_dense_head_was_trained():
    runs = made_runs("cifar10")
    one = runs[runs["seed"] == 0]
    budgets = {"a": runs, "b": one, "c": runs.iloc[:0]}
    table = vision.baselines(budgets, {"a": "why a", "b": "why b", "c": "why c"})
    dense = 100 * runs[runs["arm"] == "dense"]["test_accuracy"]
    assert table["budget"].tolist() == ["a", "b"] and table["seeds"].tolist() == [len(dense), 1]
    assert table["set"].unique().tolist() == ["CIFAR-10"]
    assert table["printed"].tolist() == pytest.approx([74.26, 74.26])
    half = 4.302653 * dense.std() / math.sqrt(3)
    ends = dense.mean(), dense.mean() - half, dense.mean() + half
    assert table["ours"].tolist() == [
        "{:.1f} [{:.1f}, {:.1f}]".format(*ends),
        f"{dense.iloc[0]:.1f}",
    ]
    assert table["why not equal"].tolist() == ["why a", "why b"]


@pytest.mark.parametrize(
    "found, answer",
    [
        ((2.0, 0.1, 3.9), True),
        ((0.5, 0.1, 0.9), True),  # for the direction
        ((1.0, -0.1, 1.29), False),
        ((-1.0, -2.0, -0.1), False),
        ((1.0, -0.1, 1.31), None),
        ((0.0, 0.0, 2.0), None),
    ],
)
def test_a_printed_gain_holds_above_zero_and_fails_where_half_of_it_is_ruled_out(found, answer):
    assert vision.by_printed_gain(found, 2.6) is answer


def made_runs(data: str = "cifar10") -> pd.DataFrame:
    """Three seeds of two heads and one seed of a third."""
    rows = []
    for arm, seeds, gain in (("dense", 3, 0.0), ("ndlinear", 3, 0.02), ("cp", 1, 0.0)):
        for seed in range(seeds):
            score = 0.5 + 0.01 * seed + gain * (1 + seed)
            row = {"data": data, "arm": arm, "seed": seed, "parameters": 5, "train_loss": 1.0}
            rows.append(row | {f"test_{vision.METRIC[data]}": score})
    return pd.DataFrame(rows)


def test_the_table_of_heads():
    table = vision.accuracies(made_runs(), "cifar10").set_index("head")
    half = 4.303 / math.sqrt(3)  # t, two degrees of freedom; the deviation is one point
    dense, nd, cp = (vision.NAMES[arm] for arm in ("dense", "ndlinear", "cp"))
    assert table.loc[dense, "percent"] == f"51.0 [{51 - half:.1f}, {51 + half:.1f}]"
    assert table.loc[cp, "percent"] == "50.0"  # one seed has no interval
    assert table["seeds"].tolist() == [3, 3, 1]
    assert table.loc[nd, "minus dense"] == f"+4.0 [{4 - 2 * half:+.1f}, {4 + 2 * half:+.1f}]"
    assert table.loc[[dense, cp], "minus dense"].tolist() == ["", ""]  # cp has other seeds


def test_printed_accuracies_are_in_percent_or_absent():
    assert vision.stated("cifar10", "dense") == pytest.approx(74.26)
    assert vision.stated("cifar100", "cp") == pytest.approx(69.35)
    assert vision.stated("cifar10", "cp") is None and vision.stated("cifar100", "relu") is None


def test_memory_is_met_within_the_margin():
    ways = ("", ", multiplied out", ", matrix kept")
    memory = pd.Series({f"{arm}{way}": 10.0 for arm in ("cp", "tt") for way in ways})
    memory["ndlinear"], memory["tt, matrix kept"] = 5.0, 20.01
    printed = pd.Series({"NdLinear": 5.03, "TRL/TCL": 10.0, "TT": 20.0})
    table = vision.memory_table(memory, printed, 0.02)
    assert table["met"].tolist() == [False, True, True, True, False, False, True]
    assert table["applied"].tolist()[:2] == ["", "piece by piece"]


def test_gains_are_drawn_with_every_seed_their_mean_and_the_printed_value():
    axis = plt.figure().subplots()
    values = pd.Series([1.0, 3.0, 2.0])
    vision.draw_gains(axis, {"first": (values, "dense", 5.0), "second": (values, "linear", None)})
    seeds, mean, star, *_, zero = (list(line.get_xdata()) for line in axis.lines)
    assert seeds == [1, 3, 2] and mean == [2] and star == [5] and zero == [0, 0]
    assert len(axis.lines) == 6 and len(axis.collections) == 2
    assert [label.get_text() for label in axis.get_yticklabels()] == ["first", "second"]


def test_held_out_pictures_are_equally_many_of_each_class_and_no_others():
    y = torch.arange(40) % 4
    x = torch.arange(40.0)[:, None]
    (kept, kept_y), (held, held_y) = vision.held_out((x, y), 8)
    assert kept_y.bincount().tolist() == [8] * 4
    assert held_y.bincount().tolist() == [2] * 4
    assert sorted(torch.cat([kept, held]).flatten().tolist()) == x.flatten().tolist()
    for wrong in (0, 3, 40):
        with pytest.raises(lab.modes.LabError, match="cannot be held out"):
            vision.held_out((x, y), wrong)
