"""Rates by rule: known values, decays that were carried out, and trainings against plain loops; chapter 15 asserts the rule itself."""

import itertools
import math

import lab
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
import torch
from lab.chapters import step_size
from torch import nn

from ndlinear import NdLinear, NdLinearSum, kronecker_weight
from ndlinear_guide.rates import factor_rates, layer_shapes, lr_groups
from ndlinear_lora import NdLinearLoRA

RATE = 1e-3


def rates(model, lr=RATE, **options):
    """Rate of each trainable parameter by name; fails unless each stands in exactly one group."""
    names = {id(p): name for name, p in model.named_parameters()}
    pairs = [(names[id(p)], g["lr"]) for g in lr_groups(model, lr, **options) for p in g["params"]]
    assert len(pairs) == len(dict(pairs))
    assert set(dict(pairs)) == {n for n, p in model.named_parameters() if p.requires_grad}
    return dict(pairs)


def weights(found):
    return [rate for name, rate in found.items() if name.endswith("weight")]


# ---------------------------------------------------------------------------------------------------------- known values
@pytest.mark.parametrize(
    ("optimiser", "dims", "hidden", "factors", "biases"),
    [
        ("adam", (8, 8), (8, 8), [4, 4], [1 / 2, 1 / 2]),
        ("adam", (32, 32), (32, 32), [16, 16], [1 / 2, 1 / 2]),
        ("adam", (16, 8, 8), (16, 8, 8), [64 / 3, 128 / 3, 128 / 3], [1 / 3] * 3),
        ("adam", (9,), (9,), [1], [1]),
        ("sgd", (8, 8), (8, 8), [1 / 2, 1 / 2], [1 / 16, 1 / 16]),
        ("muon", (8, 8), (8, 8), [1 / 2, 1 / 2], [1 / 2, 1 / 2]),
        # sizes that change: dense 24 -> 24
        ("adam", (6, 4), (3, 8), [24 / 12, 24 / 8], [1 / 2, 1 / 2]),
        ("sgd", (6, 4), (3, 8), [1 / 4, 1], [1 / 16, 1 / 6]),
        ("muon", (6, 4), (3, 8), [math.sqrt(1 / 2) / 2, 1 / 2], [1 / 2, 1 / 2]),
    ],
)
def test_rates_of_a_layer(optimiser, dims, hidden, factors, biases):
    found = rates(NdLinear(dims, hidden), optimiser=optimiser)
    assert weights(found) == pytest.approx([RATE * f for f in factors])
    others = [rate for name, rate in found.items() if name.endswith("bias")]
    assert others == pytest.approx([RATE * f for f in biases])


# ----------------------------------------------------------------------------------------------------------- any model
def test_other_layers_keep_the_rate():
    layers = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), NdLinear((4, 6, 6), (2, 3, 3)), nn.Flatten()
    found = rates(nn.Sequential(*layers, nn.Linear(18, 2)))
    assert {r for n, r in found.items() if n[0] != "2"} == {RATE}
    assert RATE not in weights({n: r for n, r in found.items() if n[0] == "2"})
    assert {RATE} == set(rates(nn.LSTM(3, 4)).values())


def test_a_sum_counts_all_its_factors_and_its_bias_is_a_dense_one():
    found = rates(NdLinearSum((8, 8), (8, 8), rank=3))
    assert weights(found) == pytest.approx([RATE * 64 / 8 / 6] * 6)
    assert found["bias"] == RATE
    assert factor_rates(1.0, (1024, 1024), [(1024, 32), (32, 1024)]) == [0.5, 16]  # low rank
    assert factor_rates(1.0, (5, 7), [(5, 7)]) == [1.0]


def test_an_adapter_trains_its_factors_alone():
    adapter = NdLinearLoRA(nn.Linear(64, 36))
    found = rates(adapter)
    assert set(found) == {f"adapter.align_layers.{k}.weight" for k in (0, 1)}
    assert weights(found) == pytest.approx([RATE * 64 / 8 / 2] * 2)


def test_frozen_parameters_are_left_out():
    model = nn.Sequential(NdLinear((4, 4), (4, 4)), nn.Flatten(), nn.Linear(16, 2))
    model[0].align_layers[0].requires_grad_(False)
    assert not any(name.startswith("0.align_layers.0") for name in rates(model))
    with pytest.raises(ValueError, match="nothing to train"):
        lr_groups(model.requires_grad_(False), RATE)


def test_a_shared_layer_counts_once_and_a_shared_matrix_gets_the_smaller_rate():
    layer = NdLinear((8, 8), (8, 8))
    assert weights(rates(nn.Sequential(layer, nn.ReLU(), layer))) == [RATE * 4] * 2
    tied = nn.Sequential(NdLinear((8, 8), (8, 8)), NdLinear((8, 2), (8, 2)))
    tied[1].align_layers[0].weight = tied[0].align_layers[0].weight  # 4 there, 1 here
    assert rates(tied)["0.align_layers.0.weight"] == RATE
    read_out = nn.Sequential(NdLinear((8, 8), (8, 8)), nn.Linear(8, 8))
    read_out[1].weight = read_out[0].align_layers[0].weight
    assert rates(read_out)["0.align_layers.0.weight"] == RATE


def test_the_released_layer_is_known_by_its_parts():
    released = nn.Module()
    released.align_layers = nn.ModuleList([nn.Linear(4, 2), nn.Linear(5, 3)])
    assert weights(rates(released)) == pytest.approx([RATE * 20 / 8, RATE * 20 / 10])


def test_muon_can_be_given_the_matrices_alone():
    model = nn.Sequential(NdLinear((4, 4), (4, 4)), nn.Flatten(), nn.Linear(16, 1))
    for group in lr_groups(model, RATE, optimiser="muon"):
        assert len({p.ndim == 2 for p in group["params"]}) == 1
    matrices = [g for g in lr_groups(model, RATE, optimiser="muon") if g["params"][0].ndim == 2]
    assert sum(len(g["params"]) for g in matrices) == 3


# --------------------------------------------------------------------------------------------- other widths, weight decay
def test_with_the_shapes_of_a_small_model_rates_no_longer_depend_on_the_width():
    def net(side):
        layers = NdLinear((4, 4), (side, side)), nn.ReLU(), NdLinear((side, side), (side, side))
        return nn.Sequential(*layers, nn.Flatten(), nn.Linear(side**2, 3))

    small = layer_shapes(net(4))
    assert small == {"0": (16, 16), "2": (16, 16), "4": (16, 3)}
    assert rates(net(4)) == rates(net(4), tuned_at=small)
    wide = rates(net(32), tuned_at=small)
    assert wide["4.weight"] == pytest.approx(RATE * 16 / 1024)
    assert wide["2.align_layers.0.weight"] == pytest.approx(RATE * 16 / (2 * 32))
    assert wide["0.align_layers.0.weight"] == pytest.approx(RATE * 16 / (2 * 4))
    assert wide["2.align_layers.0.bias"] == pytest.approx(RATE / 2)
    assert wide["4.bias"] == pytest.approx(RATE)


def test_a_convolution_can_be_named_too():
    model = nn.Sequential(nn.Conv1d(8, 6, 5))
    assert layer_shapes(model) == {"0": (40, 6)}
    assert rates(model, tuned_at={"0": (20, 6)})["0.weight"] == pytest.approx(RATE / 2)


@pytest.mark.parametrize("optimiser", ["adam", "sgd"])
def test_decay_shrinks_the_kronecker_matrix_as_lr_and_decay_shrink_a_dense_one(optimiser):
    sums = NdLinearSum((4, 6), (3, 5), rank=3, dtype=torch.float64)
    for layer in (NdLinear((4, 6, 2), (3, 5, 2), dtype=torch.float64), sums):
        before, decay = kronecker_weight(layer).detach(), 0.1
        groups = lr_groups(layer, RATE, optimiser=optimiser, weight_decay=decay)
        steps = (torch.optim.AdamW if optimiser == "adam" else torch.optim.SGD)(groups)
        for p in layer.parameters():
            p.grad = torch.zeros_like(p)
        steps.step()
        shrunk = (kronecker_weight(layer).detach() / before).flatten()
        assert torch.allclose(shrunk, torch.full_like(shrunk, 1 - RATE * decay), atol=1e-8)


def test_without_weight_decay_the_groups_leave_it_to_the_optimiser():
    assert all(set(g) == {"params", "lr"} for g in lr_groups(NdLinear((2, 2), (2, 2)), RATE))


# --------------------------------------------------------------------------------------------------------------- errors
@pytest.mark.parametrize(
    ("error", "words", "arguments"),
    [
        (TypeError, "torch.nn.Module", {"model": [torch.zeros(2)]}),
        (TypeError, "must be a number", {"lr": "1e-3"}),
        (TypeError, "must be a number", {"lr": True}),
        (ValueError, "positive and finite", {"lr": 0.0}),
        (ValueError, "positive and finite", {"lr": math.inf}),
        (ValueError, "positive and finite", {"lr": math.nan}),
        (ValueError, "'adam', 'sgd', 'muon'", {"optimiser": "adagrad"}),
        (ValueError, "layers of this model", {"tuned_at": {"1": (4, 4)}}),
        (ValueError, "two positive integers", {"tuned_at": {"0": (4, 0)}}),
        (ValueError, "two positive integers", {"tuned_at": {"0": (4,)}}),
    ],
)
def test_bad_arguments_are_named(error, words, arguments):
    good = {"model": nn.Sequential(NdLinear((2, 2), (2, 2))), "lr": RATE}
    with pytest.raises(error, match=words):
        lr_groups(**(good | arguments))


# --------------------------------------------------------------------------------------------- training with such groups
def regression(seed, count=40):
    g = torch.Generator().manual_seed(seed)
    x = torch.rand(3 * count, 4, 3, generator=g)
    y = x.square().sum((1, 2))
    return lab.Split(*[(x[i : i + count], y[i : i + count]) for i in (0, count, 2 * count)])


def squared_error(out, target):
    return (out.flatten() - target).square().mean()


def small():
    layers = NdLinear((4, 3), (4, 2)), nn.ReLU(), NdLinear((4, 2), (1, 1)), nn.Flatten(0)
    return nn.Sequential(*layers)


def alone(split, seed, epochs, batch, rate=RATE):
    """The plain loop, one model."""
    lab.seed_everything(seed)
    model = small()
    steps = torch.optim.Adam(lr_groups(model, rate))
    order, (x, y) = torch.Generator().manual_seed(seed), split.train
    for _ in range(epochs):
        for index in torch.randperm(len(x), generator=order).split(batch):
            steps.zero_grad()
            squared_error(model(x[index]), y[index]).backward()
            steps.step()
    return model


def options(**others):
    each = {"groups": lambda m: lr_groups(m, RATE), "loss": squared_error, "epochs": 3}
    return each | {"batch_size": 16, "scores": {"test_loss": squared_error}} | others


def test_every_member_trains_as_it_would_alone():
    seeds, splits = [3, 4], [regression(3), regression(4)]
    weights, found = step_size.fit(small, splits, seeds=seeds, **options())
    how = {"seeds": seeds, "epochs": 5, "groups": lambda m: lr_groups(m, RATE)}
    whole = step_size.fit_whole(small, [s.train for s in splits], **how)
    for i, seed in enumerate(seeds):
        for name, value in alone(splits[i], seed, 3, 16).state_dict().items():
            assert torch.allclose(weights[name][i], value, atol=1e-6), name
        for name, value in alone(splits[i], seed, 5, len(splits[i].train[0])).state_dict().items():
            assert torch.allclose(whole[i].state_dict()[name], value, atol=1e-5), name
        assert found[i]["diverged"] == 0
    row = step_size.outcomes(small, splits[:1], seeds=[3], **options())[0]
    assert row["parameters"] == 4 * 4 + 2 * 3 + 4 + 2 + 4 + 2 + 2 and row["macs"] > 0
    assert row["metrics"] == pytest.approx(found[0], rel=1e-5)


def test_the_epoch_of_lowest_validation_loss_is_tested():
    split, by_epoch = regression(3), []
    split = lab.Split(split.train, (split.val[0], split.val[1] * 0), split.test)  # worse and worse
    for epochs in range(1, 5):
        model = alone(split, 3, epochs, 16, 0.02)
        with torch.no_grad():
            by_epoch.append([squared_error(model(x), y).item() for x, y in (split.val, split.test)])
    chosen = options(epochs=4, groups=lambda m: lr_groups(m, 0.02))
    (found,) = step_size.fit(small, [split], seeds=[3], **chosen)[1]
    best = min(range(4), key=lambda e: by_epoch[e][0])
    assert best < 3 and found["best_epoch"] == best + 1
    assert [found["val_loss"], found["test_loss"]] == pytest.approx(by_epoch[best], rel=1e-3)


def test_a_member_that_diverges_is_reported_and_harms_no_other():
    good, bad = regression(3), regression(4)
    bad = lab.Split((bad.train[0] * 1e30, bad.train[1]), bad.val, bad.test)
    _, found = step_size.fit(small, [good, bad], seeds=[3, 4], **options())
    _, single = step_size.fit(small, [good], seeds=[3], **options())
    assert found[1]["diverged"] == 1 and found[1]["train_loss"] == step_size.WORST
    assert found[0]["val_loss"] == pytest.approx(single[0]["val_loss"], rel=1e-5)


# -------------------------------------------------------------------------------------------------- reading what was run
def test_windows_do_not_reach_into_the_next_part():
    table = np.arange(100, dtype=float)[:, None].repeat(2, 1)
    split = step_size.forecasts(table, steps=4, horizon=3, every=2)
    mean, deviation = np.arange(60).mean(), np.arange(60).std()
    ends = (0, 60), (60, 80), (80, 100)
    for part, (first, last) in zip((split.train, split.val, split.test), ends):
        x, y = [t.numpy() * deviation + mean for t in part]
        assert x[0, 0, 0] == pytest.approx(first, abs=1e-4) and y.max() <= last - 1 + 1e-4
        assert np.allclose(y[:, 0], x[:, -1, -1] + 1, atol=1e-4) and x.shape[1:] == (4, 2)


def test_percent_is_of_the_geometric_mean_and_paired():
    a = pd.DataFrame({"seed": [0, 1, 2], "loss": [1.1, 2.2, 4.4]})
    b = pd.DataFrame({"seed": [2, 1, 0], "loss": [4.0, 2.0, 1.0]})
    assert step_size.percent(a, b, "loss") == pytest.approx((10, 10, 10))


# -------------------------------------------------------------------------------------- training of chapter 40 with groups
def made_up(**scores):
    """Runs of two seeds: "arm rates lr" -> (training loss, accuracies of the two seeds)."""
    rows = []
    for key, (loss, *values) in scores.items():
        arm, rates, lr = key.replace("one_", "one rate_").split("_")
        for seed, value in enumerate(values):
            rows.append(("A", arm, arm, rates, float(lr), seed, loss, value))
    names = ["data", "arm", "model", "rates", "lr", "seed", "train_loss", "test_accuracy"]
    return pd.DataFrame(rows, columns=names)


def test_base_answers_pair_by_seed_at_each_base_rate_and_at_the_best_of_each():
    runs = made_up(
        dense_one_1=(5.0, 0.50, 0.40),
        dense_one_3=(4.0, 0.60, 0.50),
        ndlinear_rule_1=(2.0, 0.70, 0.61),
        ndlinear_rule_3=(9.0, 0.55, 0.47),
        ndlinear_one_1=(9.0, 0.40, 0.50),
    )
    found = step_size.base_answers(runs, {"A": "test_accuracy"}, (1.0, 3.0))
    found = found.set_index(["rates", "base"])
    rule = itertools.product(["rule"], [1.0, 3.0, "best"])
    assert set(found.index) == {*rule, ("one rate", 1.0)}  # one base rate has no best
    at = found["mean"]
    assert at["rule", 1.0] == pytest.approx(20.5) and at["rule", 3.0] == pytest.approx(-4.0)
    assert at["rule", "best"] == pytest.approx(10.5)  # 1 by the rule against 3
    half = 0.5 * 12.7062  # half the difference of two values, times the t quantile of one degree
    assert found["high"]["rule", 1.0] == pytest.approx(20.5 + half, rel=1e-4)
    words = found["answer"]
    assert words["rule", 1.0] == "higher" and words["one rate", 1.0] == "open"


def test_rates_are_drawn_with_a_line_of_means_and_every_seed():
    runs = made_up(dense_one_1=(1.0, 0.5, 0.3), dense_one_3=(1.0, 0.6, 0.2))
    axis = plt.figure().add_subplot()
    step_size.draw_rates(axis, runs, "test_accuracy", {("dense", "one rate"): "-"})
    line, dots = axis.get_lines()
    assert line.get_ydata() == pytest.approx([0.4, 0.4])
    assert sorted(dots.get_ydata()) == [0.2, 0.3, 0.5, 0.6]
