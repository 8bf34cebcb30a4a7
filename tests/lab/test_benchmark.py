"""The benchmark: sizes by formula, samples, rates that grow, and its answers against code of its own on rows made up here."""

import itertools
import math

import lab
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
import scipy.stats
import torch
from lab.benchmark import models, pages, protocol, reading, seconds
from lab.benchmark.models import NONE, QUARTER, SMALL, Shape
from lab.data.with_axes import CONTROLS, SETS, Table
from lab.modes import LabError

from ndlinear import NdLinearSum
from ndlinear_guide.rates import rates

SHAPES = [protocol.shape_of(name) for name in ("digits", "cifar10 colour", "heartbeat", "etth1")]
BUILT = [(k, b) for b, kinds in models.LAYERS.items() for k in kinds if k != "constant"]


# --------------------------------------------------------------------------------------------------------------- models
def numbers(kind, shape, net):
    """The parameters of a network by formulas of its own, from the sizes that its layers show."""
    D, C = shape.inputs, shape.outputs
    if kind == "linear":
        return D * C + C
    if kind == "convolution":
        w, channels = net.first.weight.shape[:2]
        kernel = 3**shape.neighbours
        places = 8 if shape.neighbours == 1 else 16
        return kernel * channels * w + w + kernel * w * w + w + places * w * C + C
    total = 256 * C + C
    if kind == "ndlinear":
        for axes in (shape.axes, models.HIDDEN[len(shape.axes)]):
            hidden = models.HIDDEN[len(shape.axes)]
            total += sum(d * h + h for d, h in zip(axes, hidden))
        return total
    if kind in ("narrow", "dense"):
        w = net[0].out_features
        return (D + 1) * w + (w + 1) * w + (w + 1) * C
    for layer, inputs in ((net[0], D), (net[2], 256)):
        layer = getattr(layer, "layer", layer)
        if kind in ("low-rank", "bottleneck"):
            weights = len(layer.down) * (inputs + 256)
        elif kind == "blocks":
            weights = layer.in_features * 256 // len(layer.weight)
        elif kind == "blast":
            weights = layer.scales.shape[2] * (layer.in_features + 256 + 16)
        elif kind == "monarch":
            (m, n), (a, c) = layer.input_dims, layer.hidden_size
            weights = m * a * n + a * m * c
        else:
            (terms, a, d), (_, b, e) = layer.left.shape, layer.right.shape
            weights = terms * (a * d + b * e)
        total += weights + (256 if layer.bias is not None else 0)
    return total


@pytest.mark.parametrize(("kind", "budget"), BUILT)
def test_networks_have_the_parameters_of_their_formulas_and_keep_to_their_budget(kind, budget):
    found = 0
    for shape in SHAPES:
        net = models.network(kind, shape, budget)
        if net is None:
            continue
        found += 1
        assert models.size_of(net) == numbers(kind, shape, net)
        assert budget == NONE or models.size_of(net) <= models.allowed(shape, budget)
        assert net(torch.randn(3, shape.inputs)).shape == (3, shape.outputs)
    assert found or (kind, budget) == ("monarch", SMALL)


def test_budgets_are_those_of_ndlinear_and_of_a_quarter_of_dense():
    shape = Shape((16, 48), 10)
    ndlinear = 16 * 16 + 16 + 48 * 16 + 16 + 2 * (16 * 16 + 16) + 2570
    dense = 768 * 256 + 256 + 256 * 256 + 256 + 2570
    assert models.allowed(shape, SMALL) == int(1.05 * ndlinear)
    assert models.allowed(shape, QUARTER) == dense // 4
    assert models.layer_budgets(shape, QUARTER) == (769 * 256 // 4, 257 * 256 // 4)


@pytest.mark.parametrize(
    ("kind", "budget"), [b for b in BUILT if b[1] != NONE and b[0] != "ndlinear"]
)
def test_no_larger_one_of_the_kind_fits(kind, budget):
    """One step more of a layer's size, at the bias that was chosen, would break the budget."""
    shape = SHAPES[0]
    net, most = models.network(kind, shape, budget), models.allowed(shape, budget)
    if net is None:
        assert kind == "monarch" and budget == SMALL
        return
    if kind in ("narrow", "convolution"):
        steps = {"narrow": lambda w: 65 * w + (w + 1) * w + (w + 1) * 10}
        steps["convolution"] = lambda w: 9 * w + w + 9 * w * w + w + 160 * w + 10
        width = net[0].out_features if kind == "narrow" else len(net.first.weight)
        assert steps[kind](width + 1) > most
        return
    hidden = models.HIDDEN[2]
    left = most - models.size_of(net)
    for part, axes in ((net[0], shape.axes), (net[2], hidden)):
        own = sum(w.numel() for w, *_ in getattr(part, "layer", part).matrices())
        larger = [s.weights for s in models.sizes(kind, axes, hidden) if s.weights > own]
        assert not larger or larger[0] - own > left


def test_the_sum_is_that_of_ndlinear_terms():
    own = models.KroneckerSum((3, 5), (4, 2), 6)
    other = NdLinearSum((3, 5), (4, 2), 6, bias=False)
    with torch.no_grad():
        for term, left, right in zip(other.terms, own.left, own.right):
            term.weights[0].copy_(left)
            term.weights[1].copy_(right)
        own.bias.zero_()
    x = torch.randn(7, 15)
    assert torch.allclose(own(x), other(x.view(7, 3, 5)).flatten(1), atol=1e-5)
    factors = rates(torch.nn.Sequential(own), 1.0)
    assert factors == {"0.left": 15 / (3 * 2), "0.right": 15 / (5 * 6 * 2), "0.bias": 1.0}


def test_zeros_behind_the_inputs_change_nothing_but_the_size():
    layer = models.sizes("blocks", (5, 7), (16, 16))[-1].make(True)
    inner = layer.layer
    assert isinstance(layer, models.Padded) and inner.in_features == 36
    x = torch.randn(4, 35)
    assert torch.equal(layer(x), inner(torch.cat([x, torch.zeros(4, 1)], 1)))


def test_a_convolution_goes_along_the_times_at_every_second_one():
    net = models.Convolution(Shape((24, 7), 3, 1), 4)
    x = torch.randn(1, 24, 7)
    by_hand = torch.nn.functional.conv1d(x.mT, net.first.weight, net.first.bias, 2, 1)
    assert torch.allclose(net.first(x.mT), by_hand)
    assert net(x.flatten(1)).shape == (1, 3)


def test_the_layer_of_someone_else_is_refused_where_it_is_too_large_or_answers_in_another_shape():
    shape = SHAPES[0]

    def dense(axes, hidden, most):
        return torch.nn.Sequential(
            torch.nn.Flatten(), torch.nn.Linear(math.prod(axes), math.prod(hidden))
        )

    assert models.network(dense, shape, SMALL) is None
    assert models.network(dense, shape, NONE)(torch.randn(2, 64)).shape == (2, 10)
    assert models.network(lambda *_: None, shape, NONE) is None
    with pytest.raises(LabError, match="in place of 256"):
        models.network(lambda axes, *_: torch.nn.Flatten(), shape, SMALL)


# ------------------------------------------------------------------------------------------------------------- protocol
TABLE = Table(np.random.default_rng(0).standard_normal((400, 8, 8)), np.arange(400) % 10)


def test_cuts_draw_the_same_test_cases_for_both_sizes_and_orders_and_none_twice():
    parts = {s: protocol.parts_of(400, s) for s in protocol.SIZES}
    assert parts == {"small": (60, 30, 80), "large": (240, 80, 80)}
    assert protocol.parts_of(6000, "small") == (125, 62, 1000)
    large, small, moved = (
        protocol.sample(TABLE, size, order, 3)
        for size, order in (("large", "in place"), ("small", "in place"), ("large", "permuted"))
    )
    assert torch.equal(large.test[1], small.test[1]) and torch.equal(large.test[1], moved.test[1])
    assert not torch.equal(large.test[0], moved.test[0])
    assert torch.equal(large.test[0].sort(1).values, moved.test[0].sort(1).values)
    x = torch.cat([part[0] for part in (large.train, large.val, large.test)])
    assert len(torch.unique(x, dim=0)) == 400
    mean, deviation = large.train[0].mean(0), large.train[0].std(0, correction=0)
    assert mean.abs().max() < 1e-5 and (deviation - 1).abs().max() < 1e-5
    other = protocol.sample(TABLE, "large", "in place", 4)
    assert not torch.equal(other.test[1], large.test[1])


def test_a_constant_answers_the_shares_of_the_classes():
    split = protocol.sample(TABLE, "large", "in place", 0)
    shares = (np.bincount(split.train[1], minlength=10) + 1) / 250
    wanted = -np.log(shares[split.test[1]]).mean()
    assert protocol.constant(split)["test_loss"] == pytest.approx(wanted, rel=1e-5)


def record_of(best):
    """A stand-in for the record: trials whose validation loss is lowest at the rate ``best``."""

    def record(grid):
        rows = []
        for config in grid:
            losses = [1 + abs(math.log(lr / best)) for lr in config["rates"]]
            named = {f"val_loss_{i + 1}": loss for i, loss in enumerate(losses)}
            curve = [{"step": 500} | named]
            rows.append(config | named | {"curve": curve, "parameters": 1})
        return pd.DataFrame(rows)

    return record


@pytest.mark.parametrize(
    ("best", "extra"), [(1e-3, []), (1e-2, [0.03]), (0.1, [0.03, 0.1, 0.3]), (3e-5, [3e-5, 1e-5])]
)
def test_rates_grow_at_the_end_where_the_best_one_lies_and_no_further(best, extra):
    cell = dict(zip(protocol.CELL, ("digits", "small", "narrow", SMALL, "in place")))
    found = protocol.tried(record_of(best), [cell])
    assert sorted(found["lr"].unique()) == sorted([*protocol.RATES, *extra])
    grid = protocol.tested([cell], found)
    assert [c["lr"] for c in grid] == [best] * 10 and [c["seed"] for c in grid] == list(range(10))


def test_incomplete_trials_give_no_grid():
    cell = dict(zip(protocol.CELL, ("digits", "small", "narrow", SMALL, "in place")))
    assert protocol.tried(lambda grid: None, [cell]) is None


def test_trials_and_runs_train_what_they_say():
    """The run of a cut at a rate is a plain training of one network, and its test is that of the look with the lowest loss."""
    trainer = protocol.Trainer(lambda name, cut=0: TABLE)
    cell = dict(zip(protocol.CELL, ("digits", "large", "narrow", SMALL, "in place")))
    config = cell | {"lr": 3e-3, "steps": 20, "seed": 2}
    found = trainer.runs([config | {"seed": 1}, config])[1]
    split = protocol.sample(TABLE, "large", "in place", 2)
    lab.seed_everything(2)
    net = trainer.make(config)
    adam = torch.optim.Adam(net.parameters(), 3e-3)
    order, losses, now = torch.Generator().manual_seed(2), {}, 0
    while now < 20:
        for index in torch.randperm(240, generator=order).split(32):
            if len(index) == 32 and now < 20:
                adam.zero_grad()
                torch.nn.functional.cross_entropy(
                    net(split.train[0][index]), split.train[1][index]
                ).backward()
                adam.step()
                now += 1
                with torch.no_grad():
                    each = [
                        torch.nn.functional.cross_entropy(net(x), y).item()
                        for x, y in (split.val, split.test)
                    ]
                losses[now] = each
    looks = [n for n in protocol.LOOKS if n < 20] + [20]
    at = min(looks, key=lambda n: losses[n][0])
    metrics = found["metrics"]
    assert metrics["best_step"] == at
    assert [metrics["val_loss"], metrics["test_loss"]] == pytest.approx(losses[at], rel=1e-3)
    tries = trainer.trials([cell | {"rates": [1e-3, 3e-3], "steps": 20, "seed": 2}])[0]
    assert not any("test" in name for name in tries["metrics"] if name != "tested")
    assert [p["step"] for p in tries["curve"]] == looks
    lowest = min(p["val_loss_2"] for p in tries["curve"])
    assert tries["metrics"]["val_loss_2"] == pytest.approx(lowest, rel=1e-3)


def test_the_grid_holds_every_layer_on_every_set_that_it_fits():
    grid = protocol.cells(protocol.EVERY, "small")
    assert {c["data"] for c in grid} == {*SETS, *CONTROLS} and len(SETS) == 24
    there = {(c["data"], c["layer"], c["budget"], c["order"]) for c in grid}
    assert len(there) == len(grid)
    for name, (budget, kinds) in itertools.product(protocol.EVERY, models.LAYERS.items()):
        for kind in kinds:
            fits = (name, kind, budget, "in place") in there
            assert fits == protocol.fits(kind, name, budget)
            if kind == models.OURS.get(budget):
                assert (name, kind, budget, "permuted") in there
    convolved = {c["data"] for c in grid if c["layer"] == "convolution"}
    assert convolved == {name for name, each in SETS.items() if each.neighbours}


# ---------------------------------------------------------------------------------------------------------------- times
def test_a_step_of_every_model_is_timed_on_the_middle_set_of_each_kind():
    chosen = seconds.middle()
    assert [SETS[name].kind for name in chosen] == list(
        dict.fromkeys(s.kind for s in SETS.values())
    )
    for name in chosen:
        sizes = sorted(math.prod(s.axes) for s in SETS.values() if s.kind == SETS[name].kind)
        assert math.prod(SETS[name].axes) == sizes[(len(sizes) - 1) // 2]
    found = seconds.time_steps({"data": "breast-cancer", "rounds": 2, "seed": 0})
    fits = {c["layer"] + ", " + c["budget"] for c in protocol.cells(["breast-cancer"], "small")}
    assert set(found["curve"]) == fits - {"constant, none"}
    assert all(len(own) == 2 and min(own) > 0 for own in found["curve"].values())


def test_a_timed_step_trains():
    net = torch.nn.Linear(3, 2)
    x, y = torch.randn(8, 3), torch.arange(8) % 2
    step = seconds.step_of(net, x, y, torch.nn.functional.cross_entropy)
    before = torch.nn.functional.cross_entropy(net(x), y).item()
    for _ in range(20):
        step()
    assert torch.nn.functional.cross_entropy(net(x), y).item() < before


# -------------------------------------------------------------------------------------------------------------- reading
@pytest.fixture(scope="module")
def made():
    """Rows of the whole grid with losses drawn here, by set and layer; and trials of one budget that belong to them."""
    draw = np.random.default_rng(5)
    grid = [c for size in protocol.SIZES for c in protocol.cells(protocol.EVERY, size)]
    levels = draw.normal(0, 0.3, (len(grid), 1, 1))
    losses = np.exp(levels + draw.normal(0, 0.1, (len(grid), 10, 2)))
    about = {"parameters": 100, "pool": 1000, "tested": 200, "validated": 100, "samples": 600}
    ran = pd.DataFrame([c | about for c in grid for _ in protocol.CUTS])
    ran["seed"] = [*protocol.CUTS] * len(grid)
    ran["val_loss"], ran["test_loss"] = losses.reshape(-1, 2).T
    tried = []
    for cell, level in zip(grid, levels.flatten()):
        for cut, lr in itertools.product(protocol.TRIAL_CUTS, reading.RACED):
            if cell["budget"] == QUARTER:
                noise = draw.normal(0, 0.1, len(protocol.LOOKS))
                values = math.exp(level) + 5 / np.array(protocol.LOOKS) + noise
                curve = list(zip(protocol.LOOKS, values))
                tried.append(cell | {"seed": cut, "lr": lr, "curve": curve})
    return pd.DataFrame(tried), ran


def values_of(ran, name, size, layer, budget, order="in place"):
    own = ran[
        (ran["data"] == name)
        & (ran["size"] == size)
        & (ran["layer"] == layer)
        & (ran["budget"] == budget)
        & (ran["order"] == order)
    ]
    return np.log(own.sort_values("seed")["test_loss"].to_numpy())


def by_hand(d):
    """Nadeau and Bengio's interval of ten differences, 200 of 1,000 cases tested and 100 validated."""
    half = scipy.stats.t.ppf(0.975, 9) * d.std(ddof=1) * math.sqrt(1 / 10 + 200 / 700)
    return d.mean(), d.mean() - half, d.mean() + half


@pytest.mark.parametrize("budget", [SMALL, QUARTER])
def test_better_worse_and_open_are_counted_over_all_sets_and_sizes(made, budget):
    tried, ran = made
    rows = reading.Rows(tried, ran)
    found = {"better": 0, "worse": 0, "not told apart": 0}
    for name, size in itertools.product(SETS, protocol.SIZES):
        most = models.allowed(protocol.shape_of(name), budget)
        own = ran[(ran["data"] == name) & (ran["size"] == size) & (ran["order"] == "in place")]
        own = own[own["budget"].isin([budget, NONE]) & (own["parameters"] <= most)]
        own = own[own["layer"] != models.OURS[budget]]
        means = np.log(own["val_loss"]).groupby([own["layer"], own["budget"]]).mean()
        d = values_of(ran, name, size, models.OURS[budget], budget) - values_of(
            ran, name, size, *means.idxmin()
        )
        _, low, high = by_hand(d)
        found["better" if high < 0 else "worse" if low > 0 else "not told apart"] += 1
    compared = reading.against_best(rows, budget)
    assert reading.counts(compared) == found and sum(found.values()) == 48
    assert min(found.values()) > 0, "rows that show nothing: make others"
    assert sum(reading.of_count(compared)) == reading.of_count(compared).cells == 48
    kinds = reading.by_kind(compared)
    assert kinds[list(found)].sum().to_dict() == found and len(kinds) >= 6


def test_a_set_a_cut_or_a_layer_cannot_be_left_out(made):
    tried, ran = made
    for gone in (ran["data"] == "japanesevowels", ran["seed"] == 9, ran["layer"] == "blocks"):
        with pytest.raises(LabError, match=r"missing e\.g\."):
            reading.Rows(tried, ran[~gone])
    with pytest.raises(LabError, match="1 that do not belong"):
        reading.Rows(tried, pd.concat([ran, ran[:1]]))
    with pytest.raises(LabError, match="that do not belong"):
        reading.Rows(tried, pd.concat([ran, ran[:1].assign(data="a set of my own")]))


def likelihood(values, errors, between):
    """Restricted likelihood of the variance between sets, from the density of their contrasts."""
    n = len(values)
    contrasts = np.linalg.qr(np.column_stack([np.ones(n), np.eye(n)[:, 1:]]))[0][:, 1:].T
    cover = contrasts @ np.diag(np.square(errors) + between) @ contrasts.T
    return scipy.stats.multivariate_normal.logpdf(contrasts @ values, np.zeros(n - 1), cover)


def test_the_pooled_ratio_is_that_of_random_effects(made):
    rows = reading.Rows(*made)
    compared = reading.against(rows, QUARTER, "narrow")
    own = compared[compared["size"] == "both"]
    values, errors = own["mean"].to_numpy(), own["error"].to_numpy()
    d = [
        (
            values_of(made[1], "sst2", s, "ndlinear-sum", QUARTER)
            - values_of(made[1], "sst2", s, "narrow", QUARTER)
        )
        for s in protocol.SIZES
    ]
    mean, low, high = by_hand(np.mean(d, 0))
    row = own.set_index("data").loc["sst2"]
    assert row[["mean", "low", "high"]].tolist() == pytest.approx([mean, low, high])
    assert row["error"] == pytest.approx((high - mean) / scipy.stats.t.ppf(0.975, 9))
    tried = np.linspace(0, 1, 2001)
    between = tried[np.argmax([likelihood(values, errors, t) for t in tried])]
    weight = 1 / (errors**2 + between)
    middle = weight @ values / weight.sum()
    error = math.sqrt(weight @ (values - middle) ** 2 / 23 / weight.sum())
    half = scipy.stats.t.ppf(0.975, 23) * error
    answer = reading.answer(compared)
    assert [math.log(answer[k]) for k in ("ratio", "low", "high")] == pytest.approx(
        [middle, middle - half, middle + half], abs=2e-3
    )
    assert answer["sets"] == 24 and 0 <= answer["outside"] <= 1
    rest = own[~own["data"].str.startswith("cifar")]
    assert len(rest) == 16 and answer["without CIFAR ratio"] != answer["ratio"]


def test_the_gain_of_axes_and_its_growth(made):
    rows = reading.Rows(*made)
    found = reading.by_axes(rows, SMALL).set_index(["data", "size"])["mean"]
    each = [
        (
            values_of(made[1], "letters", s, "ndlinear", SMALL, "permuted")
            - values_of(made[1], "letters", s, "ndlinear", SMALL)
        ).mean()
        for s in protocol.SIZES
    ]
    assert found["letters"][["small", "large"]].tolist() == pytest.approx(each)
    assert found["letters", "growth"] == pytest.approx(each[1] - each[0])


def controlled(ran, name, size, change):
    """Rows whose permuted control has so much more loss than the one in place."""
    where = (ran["data"] == name) & (ran["size"] == size) & (ran["layer"] == "ndlinear")
    base = ran[where & (ran["order"] == "in place")].set_index("seed")["test_loss"]
    moved = where & (ran["order"] == "permuted")
    ran = ran.copy()
    noise = 1 + 0.01 * (-1.0) ** ran.loc[moved, "seed"]
    ran.loc[moved, "test_loss"] = ran.loc[moved, "seed"].map(base) * math.exp(change) * noise
    return ran


def test_controls_agree_only_if_a_product_is_seen_and_turned_teachers_are_not(made):
    tried, ran = made
    for size in protocol.SIZES:
        ran = controlled(ran, "turned", size, 0.0)
    right = controlled(ran, "teacher 1", "large", 0.5)
    assert reading.controls_agree(reading.Rows(tried, right))
    assert not reading.controls_agree(
        reading.Rows(tried, controlled(ran, "teacher 1", "large", 0.0))
    )
    assert not reading.controls_agree(
        reading.Rows(tried, controlled(right, "turned", "small", 0.5))
    )


def test_a_race_looks_up_what_shorter_trainings_would_have_shown():
    curves = {
        ("a", 1e-3): [3, 3, 1],
        ("a", 3e-3): [4, 4, 4],
        ("b", 1e-3): [2, 2, 2],
        ("b", 3e-3): [5, 5, 5],
    }
    steps = (10, 40, 500)
    rows = pd.DataFrame(
        {"layer": k, "lr": lr, "curve": list(zip(steps, losses))}
        for (k, lr), losses in curves.items()
    )
    # four contestants, then two, then one: with one training the rounds take 42, 83 and 167 steps, with nine 375, 500 and 500
    assert reading.race(rows, 1) == "b"
    assert reading.race(rows, 9) == "a"


def test_a_race_is_compared_with_always_narrowing_in_the_same_cuts(made):
    tried, ran = made
    rows = reading.Rows(tried, ran)
    raced = reading.races(rows, QUARTER, 3).set_index(["data", "size"])
    kinds = list(models.LAYERS[QUARTER])
    own = tried[
        (tried["data"] == "cola") & (tried["size"] == "large") & (tried["budget"] == QUARTER)
    ]
    own = own[
        (own["order"] == "in place") & own["layer"].isin(kinds) & own["lr"].isin([3e-4, 1e-3, 3e-3])
    ]
    d = []
    for cut in range(5):
        kind = reading.race(own[own["seed"] == cut], 3)
        both = [values_of(ran, "cola", "large", k, QUARTER)[cut] for k in (kind, "narrow")]
        d.append(both[0] - both[1])
    assert raced.loc[("cola", "large"), "mean"] == pytest.approx(np.mean(d))
    means = raced.xs("both", level="size")["mean"]
    mean, low, high = reading.pays(raced.reset_index())
    half = scipy.stats.t.ppf(0.975, len(means) - 1) * means.std(ddof=1) / math.sqrt(len(means))
    assert [mean, low, high] == pytest.approx(
        np.exp([means.mean(), means.mean() - half, means.mean() + half])
    )


def test_leaders_are_the_lowest_and_those_not_told_worse(made):
    rows = reading.Rows(*made)
    found = reading.leaders(rows, SMALL).set_index("layer")
    assert found["best"].sum() == pytest.approx(1.0)  # one in each cell
    assert (found["near"] >= found["best"]).all() and (found["best_low"] <= found["best"]).all()
    first = 0
    for name, size in itertools.product(SETS, protocol.SIZES):
        keys = [
            reading.Key(name, size, "ndlinear", SMALL),
            *reading.rivals(rows, name, size, SMALL),
        ]
        means = {k.layer: values_of(made[1], *k[:4]).mean() for k in keys}
        first += min(means, key=means.get) == "ndlinear"
    assert found.loc["ndlinear", "best"] == pytest.approx(first / 48)


# ---------------------------------------------------------------------------------------------------------------- pages
@pytest.fixture
def axis():
    figure, axis = plt.subplots()
    yield axis
    plt.close(figure)


def difference(ran, name, one, other):
    """The mean logarithm of one model's test loss over another's, both sizes; models as (layer, budget[, order])."""
    each = [values_of(ran, name, s, *one) - values_of(ran, name, s, *other) for s in protocol.SIZES]
    return np.mean(each)


def row_of(axis, label):
    """The height at which a row of a figure has its name."""
    names = [text.get_text() for text in axis.get_yticklabels()]
    return axis.get_yticks()[names.index(label)]


def test_the_forest_shows_every_set_in_both_samples_with_worse_permuted_losses_to_the_right(
    made, axis, monkeypatch
):
    monkeypatch.setattr(pages, "AXES_END", 1e6)
    rows = reading.Rows(*made)
    pages.draw_axes(axis, rows)
    marks = [line for line in axis.lines if len(line.get_xdata()) == len(SETS)]
    assert len(marks) == 2 and "right" in axis.get_xlabel()
    for marked, size in zip(marks, protocol.SIZES):
        at = dict(zip(np.round(marked.get_ydata(), 6), marked.get_xdata()))
        for name in SETS:
            near = min(at, key=lambda height, name=name: abs(height - row_of(axis, name)))
            moved = values_of(made[1], name, size, "ndlinear", SMALL, "permuted")
            wanted = np.exp((moved - values_of(made[1], name, size, "ndlinear", SMALL)).mean())
            assert abs(near - row_of(axis, name)) < 0.3 and at[near] == pytest.approx(wanted)
    means = [line.get_xdata()[0] for line in axis.lines if line.get_markersize() == 8]
    found = reading.by_axes(rows, SMALL)
    wanted = [reading.answer(found, size)["ratio"] for size in protocol.SIZES]
    assert means == pytest.approx(wanted)
    assert {text.get_text() for text in axis.texts} == {each.kind for each in SETS.values()}


def test_a_ratio_beyond_the_axis_is_an_arrow_at_its_edge(axis):
    ratios = pd.Series([0.1, 0.9, 1.5, 7.0])
    beyond = pages._arrows(axis, ratios, [0, 1, 2, 3], 2.0, "grey")
    assert list(beyond) == [True, False, False, True]
    found = {line.get_marker(): [*line.get_xdata(), *line.get_ydata()] for line in axis.lines}
    assert found == {"<": [0.5, 0], ">": [2.0, 3]}


def test_controls_stand_apart_from_the_sets(made, axis):
    pages.draw_controls(axis, reading.Rows(*made))
    assert [text.get_text() for text in axis.get_yticklabels()] == [
        each.about for each in CONTROLS.values()
    ]
    assert not set(CONTROLS) & {name for names in pages.of_kinds().values() for name in names}


@pytest.mark.parametrize("budget", [SMALL, QUARTER])
def test_layers_whose_loss_is_higher_than_ours_lie_to_the_right(made, axis, budget):
    rows = reading.Rows(*made)
    pages.draw_layers(axis, rows, budget)
    ours = (models.OURS[budget], budget)
    for layer in ("narrow", "low-rank", "monarch"):
        sets = [n for n in SETS if protocol.fits(layer, n, budget)]
        if len(sets) < 4:
            continue
        wanted = [math.exp(difference(made[1], n, (layer, budget), ours)) for n in sets]
        some = "" if len(sets) == len(SETS) else f" ({len(sets)} sets)"
        height = row_of(axis, models.NAMES[layer] + some)
        points = [line for line in axis.lines if line.get_marker() == "."]
        drawn = next(line for line in points if line.get_ydata()[0] == height + 0.25)
        assert drawn.get_xdata() == pytest.approx(wanted)
        large = [line for line in axis.lines if line.get_markersize() == 8]
        mean = next(line.get_xdata()[0] for line in large if line.get_ydata()[0] == height)
        answer = reading.answer(reading.against(rows, budget, layer))
        assert mean == pytest.approx(1 / answer["ratio"])
    assert axis.get_xlabel().endswith(" is better)") and "right" in axis.get_xlabel()


def test_every_layer_beside_the_narrowed_dense_one(made):
    found = pages.beside_narrow(reading.Rows(*made), QUARTER).set_index("layer")
    assert set(found.index) == {models.NAMES[k] for k in models.LAYERS[QUARTER]} - {
        models.NAMES["narrow"]
    }
    answer = reading.answer(reading.against(reading.Rows(*made), QUARTER, "narrow"))
    row = found.loc[models.NAMES["ndlinear-sum"]]
    assert row[["ratio", "ratio_low", "ratio_high"]].tolist() == [
        answer[end] for end in ("ratio", "low", "high")
    ]
    assert found["ratio"].is_monotonic_increasing
    assert (found[["better", "worse", "not told apart"]].sum(axis=1) == 2 * found["sets"]).all()


@pytest.mark.parametrize("budget", [SMALL, QUARTER])
def test_kinds_of_data_hold_all_cells_and_name_the_layer_of_the_lowest_mean_loss(made, budget):
    found = pages.kinds(reading.Rows(*made), budget)
    assert found["kind"].tolist() == list(dict.fromkeys(each.kind for each in SETS.values()))
    assert found["sets"].sum() == 24
    assert found[["better", "worse", "not told apart"]].to_numpy().sum() == 48
    own = made[1].assign(log=np.log(made[1]["test_loss"]))
    own = own[(own["order"] == "in place") & own["budget"].isin([budget, NONE])]
    most = own["data"].map(lambda n: models.allowed(protocol.shape_of(n), budget))
    means = own[own["parameters"] <= most].groupby(["layer", "data", "size"])["log"].mean()
    for row in found.itertuples():
        sets = [name for name, each in SETS.items() if each.kind == row.kind]
        part = means.unstack(["data", "size"])[sets].dropna()
        assert row.lowest == part.mean(axis=1).idxmin()
    compared = reading.against_best(reading.Rows(*made), budget)
    own = compared[(compared["size"] == "both") & compared["data"].str.startswith("ett")]["mean"]
    assert found.set_index("kind").loc["forecasts", "ratio"] == pytest.approx(math.exp(own.mean()))


def test_the_bars_of_a_kind_are_its_cells_with_better_to_the_right(made, axis):
    pages.draw_kinds(axis, reading.Rows(*made), SMALL)
    found = pages.kinds(reading.Rows(*made), SMALL).set_index("kind")
    for bars in axis.containers:
        word, widths = bars.get_label(), [bar.get_width() for bar in bars]
        assert widths == found[word].tolist()
        if word == "better":
            middle = found["not told apart"] / 2
            assert [bar.get_x() for bar in bars] == middle.tolist()
    assert axis.get_xlabel() == "NdLinear\n(right: better)"


def test_the_table_of_kinds_has_four_columns_and_both_budgets(made, monkeypatch):
    shown = []
    monkeypatch.setattr(pages, "put", lambda text, html: shown.append((text, html)))
    rows = reading.Rows(*made)
    pages.show_kinds(rows)
    text, html = shown[0]
    assert html.count("<th ") == 4 and html.count("<tr>") == 1 + 9
    for budget in models.OURS:
        row = pages.kinds(rows, budget).set_index("kind").loc["pictures"]
        for part in (f"{row.better} · {row.worse} · {row['not told apart']}", f"{row.ratio:.2f}"):
            assert part in html and part in text


def test_the_share_of_parameters_is_that_of_networks_of_equal_width(made):
    ran = made[1].copy()
    dense, ours = ran["layer"] == "dense", (ran["layer"] == "ndlinear") & (ran["data"] == "cola")
    ran.loc[dense, "parameters"], ran.loc[ours, "parameters"] = 400, 40
    shares = pages.share_of_dense(reading.Rows(made[0], ran), SMALL)
    assert shares["cola"] == 0.1 and shares["digits"] == 0.25 and len(shares) == 24
    assert pages.samples(reading.Rows(*made)) == {"small": 600, "large": 600}
