"""Chapter 64: its networks, rates and training against plain ones, and its rules on made-up runs."""

import math
from functools import partial
from unittest import mock

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
import torch
from lab.chapters import structured
from scipy import stats as independent
from torch import nn

from ndlinear_guide import layers, schedule


@pytest.mark.parametrize("arm", [*structured.ARMS, *structured.NARROW])
def test_a_network_begins_as_its_read_out(arm):
    structured.narrow.cache_clear()
    models = []
    for _ in range(2):  # what was searched before changes no draw
        torch.manual_seed(0)
        models.append(structured.network(arm, 8, 64, 3))
    model, again = models
    assert torch.equal(model.read_out.weight, again.read_out.weight)
    x = torch.randn(5, 8)
    assert torch.allclose(model(x), model.read_out(model.norm(model.embed(x))), atol=1e-6)
    model(x).square().sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_narrow_networks_are_the_widest_that_fit():
    for arm, (count, like) in structured.NARROW.items():
        limit = count(structured.network(like, 8, 64, 1))
        width = structured.narrow(arm, 8, 64, 1)
        sizes = [count(structured.Residual("dense", 8, w, 1)) for w in (width, width + 1)]
        assert sizes[0] <= limit < sizes[1]


def test_rates_follow_the_sizes_of_the_matrices():
    model = structured.network("monarch", 8, 256, 1)
    rule = structured.rates(model, 0.01, "rule")
    one = structured.rates(model, 0.01, "one rate")
    # Monarch at 256: each step reads 16 numbers and is one of two
    assert rule["blocks.0.first.first"] == pytest.approx(0.01 * 64 / (16 * 2))
    assert rule["blocks.2.second.second"] == pytest.approx(0.01 * 64 / (16 * 2))
    assert one["blocks.0.first.first"] == pytest.approx(0.01 * 64 / 256)
    for found in (rule, one):
        assert found["embed.weight"] == found["blocks.1.norm.weight"] == 0.01
        assert found["blocks.0.first.bias"] == 0.01
        assert found["read_out.weight"] == pytest.approx(0.01 * 64 / 256)
    summed = structured.rates(structured.network("ndlinear-sum", 8, 64, 1), 1.0, "rule")
    assert summed["blocks.0.first.map.terms.1.align_layers.0.weight"] == 64 / (8 * 2)
    assert summed["blocks.0.first.map.terms.1.align_layers.1.weight"] == 64 / (16 * 2)
    assert set(summed) == set(dict(structured.network("ndlinear-sum", 8, 64, 1).named_parameters()))


def test_the_schedule_warms_up_and_decays():
    shares = [schedule(step, 100) for step in range(100)]
    assert shares[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert shares[5:60] == [1.0] * 55 and shares[60] == 1.0
    assert shares[80] == pytest.approx(0.5) and shares[99] == pytest.approx(1 / 40)
    assert schedule(0, 1) == 1.0


def test_a_run_says_whether_its_loss_left_the_numbers():
    data = {part: (torch.randn(40, 8), torch.randn(40)) for part in ("train", "val", "test")}
    make = partial(structured.network, "dense", 8, 64, 1)
    options = {"loss": structured.squared_error, "scores": {}, "steps": 4, "batch": 8}
    for lr, checks, diverged in ((1e30, 0, 1), (1e-3, 2, 0)):
        rate = partial(structured.rates, lr=lr, how="rule")
        (found,) = structured.fit(make, data, seeds=(0,), rate=rate, checks=checks, **options)
        assert found["diverged"] == diverged and ("val_loss" in found) == bool(checks)
        assert (found["test_loss"] == structured.WORST) == bool(diverged)


# ----------------------------------------------------------------------------------------------------- rules
def runs(**means) -> pd.DataFrame:
    draw = np.random.default_rng(0)
    own = draw.normal(0, 0.3, 8)  # what a seed does to all arms
    rows = [
        (arm.replace("_", "-"), s, math.exp(mean + own[s] + draw.normal(0, 0.05)))
        for arm, mean in means.items()
        for s in range(8)
    ]
    return pd.DataFrame(rows, columns=["arm", "seed", "test_loss"])


def test_differences_are_paired_by_seed():
    found = runs(a=0.0, b=0.4)
    logs = np.log(found.pivot(index="seed", columns="arm", values="test_loss"))
    low, high = independent.ttest_rel(logs["a"], logs["b"]).confidence_interval()
    got = structured.log_ratio(found, "a", "b")
    assert got == pytest.approx(((logs["a"] - logs["b"]).mean(), low, high))
    assert structured.word(got) == "better" and structured.word((0.2, 0.1, 0.3)) == "worse"
    assert structured.word((0.2, -0.1, 0.5)) == "not told apart"


def test_the_winner_and_those_not_told_apart():
    logs = {"a": [0.0] * 4, "b": [0.2, -0.1, 0.2, -0.1], "c": [1.0] * 4, "d": [-5.0] * 4}
    rows = [(arm, seed, math.exp(v)) for arm, x in logs.items() for seed, v in enumerate(x)]
    made = pd.DataFrame(rows, columns=["arm", "seed", "test_loss"])
    found = structured.winner(made, ["a", "b", "c"])
    assert (found["best"], found["near"], found["next"]) == ("a", ["b"], "b")
    assert structured.answer(found) == "not told apart: a, b"


@pytest.mark.parametrize(
    ("first", "last", "wanted"),
    [
        ((-2, -3, -1), (2, 1, 3), True),
        ((-2, -3, -1), (-2, -3, -1), False),
        ((-2, -3, 1), (2, 1, 3), None),
        ((2, 1, 3), (0, -1, 1), None),
    ],
)
def test_a_reversal_needs_two_sure_signs(first, last, wanted):
    assert structured.reversal(first, last) is wanted


def test_an_arm_stands_at_its_better_width():
    both = pd.concat([runs(a=0.0, b=1.0).assign(width=64), runs(a=0.5, b=0.5).assign(width=256)])
    found = structured.better_width(both).groupby("arm")["width"].unique()
    assert found["a"] == [64] and found["b"] == [256]


def test_scenarios_of_few_samples():
    made = runs(dense=0.0, monarch=1.0, ndlinear=2.0, low_rank_1=3.0)
    parameters = {"dense": 900, "monarch": 300, "ndlinear": 50, "low-rank-1": 50}
    macs = {"dense": 900, "monarch": 100, "ndlinear": 100, "low-rank-1": 20}
    made = made.assign(parameters=made["arm"].map(parameters), macs=made["arm"].map(macs))
    both = pd.concat([made.assign(part=part) for part in (0.1, 1.0)])
    found = structured.share_scenarios("digits", both, 1000)
    assert [s.name for s in found] == ["digits, 100 samples"] * 3 + ["digits, 1,000 samples"] * 3
    small = {"ndlinear", "low-rank-1"}
    admitted = [small | {"monarch"}, small, small | {"monarch", "dense"}]
    assert [set(s.arms) for s in found[:3]] == admitted
    shown = structured.answers(found)
    assert shown["answer"].tolist() == ["Monarch", "NdLinear", "dense"] * 2
    assert shown["advised"].tolist() == ["√d blocks", "NdLinear", "dense"] * 2
    assert shown["agrees"].tolist() == [False, True, True] * 2
    low = float(shown["best minus next, %"][0].split("[")[1].split(",")[0])
    wanted = structured.log_ratio(found[0].runs, "monarch", "ndlinear")[1]
    assert low == pytest.approx(100 * math.expm1(wanted), abs=0.06)


def test_gaps_are_percent_of_the_other_loss():
    made = runs(a=0.5, b=0.0)
    found = structured.gaps({"x": made, "y": made[made["arm"] == "a"]}, ["a", "c"], "b")
    mean, low, high = structured.log_ratio(made, "a", "b")
    assert found[["group", "arm"]].to_numpy().tolist() == [["x", "a"]]
    wanted = [100 * (math.exp(v) - 1) for v in (mean, low, high)]
    assert found[["mean", "low", "high"]].iloc[0].tolist() == pytest.approx(wanted)


# ----------------------------------------------------------------------------------------------------- times
@pytest.mark.parametrize("arm", structured.TIMED)
def test_timed_layers_are_those_of_the_networks(arm):
    ours, theirs = structured.timed_layer(arm, 256), structured.ARMS[arm](256)
    assert type(ours) is type(theirs)
    assert layers.count_weights(ours) == layers.count_weights(theirs)


# --------------------------------------------------------------------------------------------- tasks B and D
PICTURES = mock.Mock(  # 40 to train on and 10 to test, every pixel another number
    x=np.random.default_rng(0).integers(0, 256, (50, 3, 32, 32)).astype(np.uint8),
    y=np.arange(50) % 10,
    splits={"train": slice(0, 40), "test": slice(40, 50)},
)


@pytest.fixture
def few_pictures(monkeypatch):
    monkeypatch.setattr(structured, "load", {"cifar10": PICTURES}.get)
    structured.grey.cache_clear()
    yield
    structured.grey.cache_clear()


def test_grey_pictures_are_means_of_twelve_numbers(few_pictures):
    found, labels = structured.grey()["test"]
    assert found.shape == (10, 256) and (labels == PICTURES.y[40:]).all()
    patch = PICTURES.x[43, :, 6:8, 10:12].astype(float)
    assert found[3, 3 * 16 + 5] == pytest.approx(patch.mean(), rel=1e-6)


def test_shuffled_pictures_are_the_same_ones_with_their_pixels_moved(few_pictures):
    first, moved = (structured.pictures(5, 0.5, order) for order in ("in place", "shuffled"))
    assert [len(first[part][0]) for part in ("train", "val", "test")] == [18, 4, 10]
    columns = {tuple(column): i for i, column in enumerate(first["train"][0].T.tolist())}
    pixels = [columns[tuple(column)] for column in moved["train"][0].T.tolist()]
    assert sorted(pixels) == list(range(256)) != pixels
    for part, (x, y) in first.items():  # one permutation for all parts
        assert torch.equal(moved[part][0], x[:, pixels]) and torch.equal(moved[part][1], y)
    x = first["train"][0]
    assert x.mean().abs() < 1e-5 and x.std(correction=0) == pytest.approx(1, abs=1e-4)
    again = structured.pictures(6, 0.5, "shuffled")["test"][0]
    assert not torch.equal(again.argsort(dim=1), moved["test"][0].argsort(dim=1))


def test_a_smaller_part_is_contained_in_a_larger_one(few_pictures):
    small, large = (structured.pictures(1, part, "in place") for part in (0.5, 1.0))
    assert len(large["train"][0]) == 36
    assert torch.equal(small["train"][1], large["train"][1][:18])
    assert torch.equal(small["val"][1], large["val"][1])


TEXTS = mock.Mock(
    x=np.array(["ab ab é", "", "abc"] * 40, dtype=object),
    splits={"train": slice(0, 60), "valid": slice(60, 90), "test": slice(90, 120)},
)


@pytest.fixture
def few_characters(monkeypatch):
    monkeypatch.setattr(structured, "load", {"wikitext2": TEXTS}.get)
    monkeypatch.setattr(structured, "VOCABULARY", 5)
    structured.characters.cache_clear()
    yield
    structured.characters.cache_clear()


def test_characters_are_numbered_by_how_common_they_are(few_characters):
    found = structured.characters()
    text = "\n".join(TEXTS.x[TEXTS.splits["train"]])
    order = sorted(set(text), key=lambda c: (-text.count(c), text.index(c)))
    numbers = [min(order.index(c), 4) for c in text]
    first, later = found["train"]
    assert first.shape == later.shape == ((len(text) - 1) // 64, 64)
    assert first.flatten().tolist() == numbers[: first.numel()]
    assert later.flatten().tolist() == numbers[1 : first.numel() + 1]
    assert set(found) == {"train", "val", "test"}


def test_windows_are_evenly_spaced():
    first, later = structured._windows(torch.arange(64 * 10 + 1), 4)
    assert first[:, 0].tolist() == [0, 3 * 64, 6 * 64, 9 * 64]
    assert torch.equal(later, first + 1)


@pytest.mark.parametrize("arm", [*structured.WIDER, *structured.NARROW])
def test_a_decoder_begins_without_its_blocks(arm):
    torch.manual_seed(0)
    model = structured.decoder(arm)
    x = torch.randint(0, structured.VOCABULARY, (2, 9))
    before = model(x)
    for layer in model.layers:
        assert isinstance(layer.block, structured.FeedForward)
        nn.init.zeros_(layer.block.first.bias)
        for weight, _, _ in layer.block.first.matrices():
            nn.init.zeros_(weight)
    assert torch.equal(model(x), before) and before.shape == (2, 9, structured.VOCABULARY)


def test_counts_of_the_blocks():
    sizes = {arm: structured.feed_forward(arm) for arm in (*structured.WIDER, *structured.NARROW)}
    macs = {arm: structured.multiply_adds(block) for arm, block in sizes.items()}
    weights = {arm: structured.size(block) for arm, block in sizes.items()}
    # up: 8x8 to 16x16 by rows, then by columns; down: the same backwards
    assert macs["ndlinear"] == macs["monarch"] == 2 * (8 * 8 * 16 + 8 * 16 * 16)
    assert weights["ndlinear"] == 4 * 8 * 16 + 256 + 64 == weights["blocks-64"]
    assert weights["monarch"] == macs["monarch"] + 320
    for arm in ("low-rank", "blocks", "tied-4", "dense-macs", "ndlinear-3"):
        assert macs[arm] <= macs["monarch"]
    for arm, count in (("dense-params", structured.size), ("dense-macs", structured.multiply_adds)):
        like = sizes[structured.NARROW[arm][1]]
        hidden = structured.narrow_block(arm)
        assert count(structured.dense_block(hidden)) <= count(like)
        assert count(structured.dense_block(hidden + 1)) > count(like)


def test_the_gain_from_pixels_in_place():
    draw, orders = np.random.default_rng(2), ("in place", "shuffled")
    logs = {(arm, order): draw.normal(size=6) for arm in "ab" for order in orders}
    rows = [(*cell, s, math.exp(v)) for cell, each in logs.items() for s, v in enumerate(each)]
    runs = pd.DataFrame(rows, columns=["arm", "order", "seed", "test_loss"])
    wanted = [logs[arm, "shuffled"] - logs[arm, "in place"] for arm in "ab"]
    low, high = independent.ttest_rel(*wanted).confidence_interval()
    found = structured.gain_in_place(runs, "a", "b")
    assert found == pytest.approx(((wanted[0] - wanted[1]).mean(), low, high))


def test_seconds_of_a_run_are_those_of_its_six_layers():
    each = dict.fromkeys(structured.TIMED, 50.0) | {"dense": 100.0, "monarch": 10.0}
    right = {"width": 64, "batch": structured.TEACHER_BATCH, "pass": "training"}
    rows = [right | {arm: v * f for arm, v in each.items()} for f in (0.5, 1.0, 4.0)]
    for wrong in ({"pass": "forward"}, {"batch": 2048}):
        rows.append(right | wrong | dict.fromkeys(structured.TIMED, 1e9))
    times = pd.DataFrame(rows)
    counts = {"dense": 100, "monarch": 1000, "blocks": 300, "tied-4": 1}
    made = pd.concat([runs(**{arm: 0.0}).assign(steps=n) for arm, n in counts.items()])
    found = structured.in_seconds(made.assign(width=64, budget=1e9), times).set_index("arm")
    seconds = {"dense": 0.06, "monarch": 0.06, "blocks": 0.09}  # four groups were not timed
    assert found["seconds"].to_dict() == pytest.approx(seconds)
    logs = np.log(made.query("arm == 'dense'")["test_loss"])
    assert found["loss"]["dense"] == pytest.approx(math.exp(logs.mean()))
    _, axis = plt.subplots()
    structured.draw_seconds(axis, found.assign(beaten=[True, False, False]).reset_index())
    assert len(axis.collections[0].get_offsets()) == 2
