"""Chapter 42's classifiers: the short cuts are the plain modules, the arms have the sizes they claim, the scores are scikit-learn's."""

import math

import lab
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
import torch
from lab import LabError, models
from lab.chapters import classifiers
from lab.data import Data
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
    assert x.mean((0, 1)).abs().max() < 1e-5
    assert (x.std((0, 1), correction=0) - 1).abs().max() < 1e-4
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


def test_training_is_the_loop_written_out_with_torchs_adam():
    x, y = torch.randn(20, 9, 1), torch.arange(20) % 5
    torch.manual_seed(1)
    plain = classifiers.build("ECG5000", "base*", 9)
    torch.manual_seed(1)
    net = classifiers.build("ECG5000", "base*", 9)
    adam = torch.optim.Adam(plain.parameters(), lr=0.01, weight_decay=0)
    draw, losses = torch.Generator().manual_seed(5), []
    for _ in range(2):
        order, total = torch.randperm(20, generator=draw), 0.0
        for rows in (order[:8], order[8:16], order[16:]):
            loss = -plain(x[rows]).log_softmax(1)[range(len(rows)), y[rows]].mean()
            adam.zero_grad()
            loss.backward()
            adam.step()
            total += loss.item() * len(rows)
        losses.append(total / 20)
    curve = classifiers.train(net, x, y, epochs=2, lr=0.01, batch_size=8, seed=5)
    assert [p["train_loss"] for p in curve] == pytest.approx(losses, rel=1e-5)
    for found, expected in zip(net.cpu().parameters(), plain.parameters()):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
    with torch.no_grad():
        assert classifiers.predict(net, x).tolist() == net(x).argmax(1).tolist()


def plain_classifier(channels, width, outputs, block):
    """The parts of a classifier in torch's own layers, made in the order in which they are drawn."""
    embed = nn.Linear(channels, width)
    inner = block()
    attention = nn.MultiheadAttention(width, 4, batch_first=True)
    norms = nn.LayerNorm(width), nn.LayerNorm(width)
    out = nn.Linear(width, outputs)

    def forward(x):
        x = embed(x)
        x = norms[0](x + attention(x, x, x)[0])
        return out(norms[1](x + inner(x)).mean(1))

    return forward, nn.ModuleList([embed, attention, *norms, inner, out])


@pytest.mark.parametrize("arm", ["base", "base*"])
def test_dense_classifiers_start_and_answer_as_torchs_layers(arm):
    width, hidden = 32, {"base": 128, "base*": 32}[arm]
    torch.manual_seed(2)
    inner = nn.Sequential(nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, width))
    forward, _ = plain_classifier(1, width, 6, lambda: inner)
    torch.manual_seed(2)
    net = classifiers.build("ECG5000", arm, 11)
    x = torch.randn(3, 11, 1)
    torch.testing.assert_close(net(x), forward(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("arm", ["ndlinear", "folded", "time"])
def test_blocks_of_ndlinear_start_as_its_own_layers(arm):
    width, terms, steps = 32, 32, 11
    r = classifiers.two_axes(steps, width)
    D, H = {
        "ndlinear": ((width, 1), (width, terms)),
        "folded": ((8, 4), (16, 8)),
        "time": ((steps, width), (r, width)),
    }[arm]
    torch.manual_seed(2)
    first, second = NdLinear(D, H), NdLinear(H, D)
    torch.manual_seed(2)
    block = classifiers.block(arm, width, terms, steps)
    x = torch.randn(3, steps, width)
    if arm == "time":
        expected = second(first(x).relu())
    else:
        expected = second(first(x.reshape(3, steps, *D)).relu()).reshape(3, steps, width)
    torch.testing.assert_close(block(x), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("arm", [arm for arm in classifiers.ARMS if arm != "learned"])
def test_classifiers_start_as_torchs_layers(arm, starts_as_torch_does):
    starts_as_torch_does(classifiers.build("ECG5000", arm, 20))


def test_sizes_and_classes_are_those_of_the_data():
    for dataset in ("ECG5000", "RacketSports", "ECGFiveDays", "ChlorineConcentration"):
        x, y = lab.load(classifiers.SETS[dataset][0]).part("train")
        assert set(np.unique(y)) <= set(range(classifiers.SETS[dataset][2]))
        assert x.shape[1] == models.UCR[classifiers.SETS[dataset][1]][0]


def test_series_are_the_published_ones_centred_and_scaled_by_channel():
    data = lab.load("racketsports")
    parts = classifiers.parts("RacketSports", 0)
    x = data.part("train")[0]
    for name in ("train", "test"):
        raw, classes = data.part(name)
        centred = raw.astype(np.float64) - x.mean((0, 2), keepdims=True)
        expected = centred / x.std((0, 2), keepdims=True)
        found, found_classes = parts[name]
        assert np.allclose(found.numpy().swapaxes(1, 2), expected, rtol=1e-4, atol=1e-5)
        assert found_classes.tolist() == classes.tolist()


def test_the_stand_in_for_heartbeat_holds_out_a_fifth_and_averages_over_time(monkeypatch):
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(50, 2, 54)), (np.arange(50) % 5 == 0).astype(int)
    data = Data("heartbeat", x, y, ("a", "b"), "", False, {"train": slice(0, 50)}, "")
    monkeypatch.setattr(classifiers, "load", lambda name: data)
    parts = classifiers.heartbeat(3)
    sizes = {name: np.bincount(part[1]).tolist() for name, part in parts.items()}
    assert sizes == {"train": [32, 8], "test": [8, 2]}
    pairs = (x[..., ::2] + x[..., 1::2]) / 2
    (found, classes), (held, held_classes) = parts["train"], parts["test"]
    assert found.mean((0, 1)).abs().max() < 1e-5
    for series, label in zip(torch.cat([found, held]), torch.cat([classes, held_classes])):
        fits = [np.corrcoef(series[:, 0], pairs[i, 0])[0, 1] for i in range(50)]
        assert max(fits) > 1 - 1e-6 and y[int(np.argmax(fits))] == int(label)


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


def made_runs(datasets=("ECGFiveDays", "ECG5000")) -> pd.DataFrame:
    """Every network, MiniRocket and the models that are none on two sets, four seeds."""
    draw, rows = np.random.default_rng(0), []
    for dataset in datasets:
        for arm in classifiers.NAMES:
            for seed in range(4):
                scores = dict(zip(classifiers.READINGS.values(), draw.uniform(0.4, 0.9, 3)))
                rows.append({"data": dataset, "arm": arm, "seed": seed, "parameters": 10} | scores)
    return pd.DataFrame(rows)


def test_printed_scores_stand_beside_the_means_of_ours():
    runs = made_runs()
    table = classifiers.beside(runs, ["ECG5000"])
    wanted = lab.facts(classifiers.TABLE, metric="f1", dataset="ECG5000").set_index("method")
    assert table["method"].tolist() == [*classifiers.METHODS.values()]
    assert table["printed F1"].tolist() == [wanted["value"][m] for m in table["method"]]
    ours = runs.query("data == 'ECG5000' and arm == 'base*'")["accuracy"].mean()
    assert table["micro"].iloc[1].startswith(f"{ours:.3f} [")
    one = classifiers.beside(runs[runs["seed"] == 0], ["ECG5000"])
    assert "[" not in one["micro"].iloc[0]  # one run has no interval


def test_the_table_of_a_set_counts_only_networks():
    table = classifiers.overview(made_runs(["ECG5000"])).set_index("arm")
    cost = table["multiply-adds"]
    assert cost["Base"] == classifiers.cost("ECG5000", "base") and np.isnan(cost["MiniRocket"])
    assert classifiers.spread([]) == ""
    with pytest.raises(ValueError, match="too many values"):
        classifiers.overview(made_runs())  # two sets have no table together


def test_scores_are_drawn_against_the_linear_model():
    runs = made_runs()
    runs = runs[(runs["seed"] == 0) | ~runs["arm"].isin(["linear", "sorted"])]
    _, axes = plt.subplots(1, 2)
    classifiers.draw_behind(axes, runs, ["ECGFiveDays", "ECG5000"])
    at = runs.query("data == 'ECG5000'").groupby("arm")["weighted_f1"].apply(list)
    drawn = next(line for line in axes[1].lines if len(line.get_ydata()) == 4)
    wanted = [100 * (value - at["linear"][0]) for value in at["base"]]
    assert drawn.get_ydata() == pytest.approx(wanted)
    stars = [line for line in axes[1].lines if line.get_marker() == "*"]
    assert [round(line.get_xdata()[0]) for line in stars] == [0, 1, 2]


def test_the_figure_of_scores_has_three_stars_a_panel():
    _, axes = plt.subplots(2, 2)
    classifiers.draw_f1(axes, made_runs(), ["ECGFiveDays", "ECG5000"])
    for axis in axes.flat:
        stars = [line for line in axis.lines if line.get_marker() == "*"]
        assert [round(line.get_xdata()[0]) for line in stars] == [0, 1, 2]
