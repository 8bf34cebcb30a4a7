"""Radius Bump: target, networks, constant answers."""

import itertools
import math

import lab
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
import torch
from lab import entropy
from lab.chapters import bump
from scipy import stats
from torch.utils.flop_counter import FlopCounterMode

from ndlinear import NdLinear, cheapest_order


def test_target_depends_on_the_length_alone():
    x = bump.inputs(50, 0)
    turned = x @ torch.linalg.qr(torch.randn(10, 10)).Q
    torch.testing.assert_close(bump.target(x, 0.2), bump.target(turned, 0.2), rtol=1e-3, atol=1e-7)
    at = torch.zeros(3, 10)
    at[:, 4] = torch.tensor([0.8, 1.0, 0.5])
    expected = [1.0, math.exp(-0.5), math.exp(-0.09 / 0.08)]
    assert bump.target(at, 0.2).tolist() == pytest.approx(expected, rel=1e-5)


def test_inputs_fill_the_cube_and_repeat():
    x = bump.inputs(20_000, 3)
    assert x.min() < -0.999 and x.max() > 0.999 and x.mean().abs() < 0.01
    assert torch.equal(x, bump.inputs(20_000, 3)) and not torch.equal(x, bump.inputs(20_000, 4))
    (small, test), (large, more) = bump.draw(3, 1000, 200), bump.draw(3, 1200, 500)
    assert torch.equal(small, large[:1000]) and torch.equal(test, more[-200:])
    assert not (more[:, None] == large[None]).all(-1).any()
    with pytest.raises(lab.LabError, match="2000"):
        bump.draw(0, 1900, 200)


@pytest.mark.parametrize("depth", [2, 3])
@pytest.mark.parametrize("width", [16, 32, 64, 128])
def test_networks_have_the_printed_parameter_counts(width, depth):
    for arm, method, size in (
        ("dense", "dense", width),
        ("ndlinear", "NdLinear", (width // 4,) * 2),
    ):
        model = bump.network(arm, size, depth)
        printed = lab.fact("radius_010", metric="params", method=method, width=width, depth=depth)
        assert sum(p.numel() for p in model.parameters()) == printed
        assert model(torch.rand(7, 10)).shape == (7,)


def test_unknown_arm():
    with pytest.raises(lab.LabError, match="sparse"):
        bump.network("sparse", 3, 2)


def test_bias_free_networks_have_no_biases():
    model = bump.network("ndlinear", (4, 4), 2, bias=False)
    assert sum(p.numel() for p in model.parameters()) == 36 and not model(torch.zeros(2, 10)).any()


@pytest.mark.parametrize("sigma", [0.1, 0.2, 0.3])
def test_constant_errors_agree_with_a_sample(sigma):
    x = bump.inputs(1_000_000, 1)
    y = bump.target(x, sigma).double().numpy()
    found, error = bump.constant_errors(sigma), 4 / np.sqrt(len(y))
    assert found["zero"] == pytest.approx((y**2).mean(), abs=error * (y**2).std())
    assert found["mean of the target"] == pytest.approx(y.mean(), abs=error * y.std())
    assert found["mean"] == pytest.approx(found["zero"] - found["mean of the target"] ** 2)


def test_lengths_have_the_known_moments():
    r, p = bump.lengths()
    assert p.sum() == pytest.approx(1)
    assert p @ r**2 == pytest.approx(10 / 3, rel=1e-6)
    assert p @ r**4 - (p @ r**2) ** 2 == pytest.approx(10 * (1 / 5 - 1 / 9), rel=1e-3)


def mode_by_mode(model, x, cheapest):
    """The network as plain matrix products, one for each mode, in the defined or the cheapest order."""
    for layer in model:
        if isinstance(layer, NdLinear):
            for k in cheapest_order(layer.input_dims, layer.hidden_size) if cheapest else range(2):
                x = (x.movedim(k + 1, -1).flatten(0, -2) @ layer.weights[k].T).unflatten(
                    0, x.movedim(k + 1, -1).shape[:-1]
                )
                x = x.movedim(-1, k + 1)
        else:
            x = layer(x)
    return x


@pytest.mark.parametrize(
    "arm, size", [("dense", 9), ("ndlinear", (3, 5)), ("ndlinear", (8, 8)), ("ndlinear", (1, 2))]
)
@pytest.mark.parametrize("depth", [2, 3])
def test_costs_are_those_that_torch_counts(arm, size, depth):
    model, x = bump.network(arm, size, depth, bias=False), torch.rand(1, 10)
    costs = bump.costs(arm, size, depth)
    assert costs["parameters"] == sum(
        p.numel() for p in bump.network(arm, size, depth).parameters()
    )
    torch.testing.assert_close(mode_by_mode(model, x, True), model(x))
    for key, cheapest in (("forward", False), ("cheapest", True)):
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            mode_by_mode(model, x, cheapest)
        assert costs[key] == counter.get_total_flops() // 2
    with FlopCounterMode(display=False) as counter:
        mode_by_mode(model, x, True).square().sum().backward()
    assert costs["training"] == counter.get_total_flops() // 2


def test_defined_order_costs_what_the_formula_of_the_paper_says():
    forward = [bump.costs("ndlinear", (h, h), d)["forward"] for d in (2, 3) for h in (4, 8, 16, 32)]
    assert forward == [140, 472, 1712, 6496, 268, 1496, 9904, 72032]
    assert bump.costs("dense", 128, 3)["forward"] == 10 * 128 + 128 * 128 + 128


def test_equal_dense_networks_have_the_nearest_counts():
    for width, depth in ((16, 2), (64, 3), (128, 2), (128, 3)):
        modewise, equal = (
            bump.costs("ndlinear", (width // 4,) * 2, depth),
            bump.equal_dense(width, depth),
        )
        for name, key in (("parameters", "parameters"), ("multiply-adds", "cheapest")):
            off = {
                w: abs(bump.costs("dense", w, depth)[key] - modewise[key]) for w in range(1, 400)
            }
            assert off[equal[name]] == min(off.values()) or (
                equal[name] == 256 and off[256] < 0.02 * modewise[key]
            )
        hidden = bump.network("ndlinear", (width // 4,) * 2, depth)[1](torch.rand(1, 2, 5))
        assert equal["units"] == hidden.numel() and equal["label"] == width


def test_spread_of_the_zero_answer_is_that_of_drawn_test_sets():
    y = bump.target(bump.inputs(400_000, 5), 0.3).double().reshape(-1, 200)
    assert bump.spread_of_zero(0.3, 200) == pytest.approx(y.square().mean(1).std().item(), rel=0.05)


def made_up_runs(seeds=6):
    """Errors and entropies with known relations, for two arms, a fair opponent and an incomplete group."""
    rows, random = [], np.random.default_rng(0)
    for sigma, (arm, width), depth, seed in itertools.product(
        (0.1, 0.3), (("dense", 16), ("ndlinear", 16), ("dense", 4)), (2, 3), range(seeds)
    ):
        if width == 4 and seed == 5:
            continue
        disorder = random.random()
        base = {"dense": 2.0, "ndlinear": 1.5}[arm] * (2 if width == 4 else 1)
        rows.append(
            {"sigma": sigma, "arm": arm, "width": width, "depth": depth, "seed": seed}
            | {
                "end_test": base + 0.01 * disorder,
                "end_entropy": disorder,
                "noise": random.random(),
            }
        )
    return pd.DataFrame(rows)


def test_pairs_are_differences_by_seed():
    runs = made_up_runs()
    found = bump.by_pair(runs[runs["width"] == 16], "end_test")
    assert list(found.index) == [(s, 16, d) for s in (0.1, 0.3) for d in (2, 3)]
    assert bump.pair_names(found.index).to_numpy().tolist() == [
        [s, f"16, {d}"] for s in (0.1, 0.3) for d in (2, 3)
    ]
    one = runs[(runs["sigma"] == 0.3) & (runs["depth"] == 2) & (runs["width"] == 16)]
    values = {arm: one[one["arm"] == arm]["end_test"].to_numpy() for arm in ("ndlinear", "dense")}
    mean, low, high = lab.interval(values["ndlinear"] - values["dense"])
    row = found.loc[0.3, 16, 2]
    assert row.tolist() == pytest.approx([mean, low, high, values["dense"].mean()])
    wider = bump.by_pair(runs[runs["width"] == 16], "end_test", level=0.999).loc[0.3, 16, 2]
    assert wider["low"] < row["low"] and wider["high"] > row["high"]
    assert bump.percent(found)[2].startswith(f"{100 * mean / values['dense'].mean():+.0f} [")


def test_against_uses_the_seeds_that_both_have():
    runs = made_up_runs()
    mean, low, high = bump.against(runs, 0.1, 16, 2, 4)
    assert low < mean < high and mean == pytest.approx(-62.5, abs=0.5)
    assert bump.against(runs, 0.1, 16, 2, 77) is None


def test_rank_correlation_sees_a_relation_and_noise():
    runs = made_up_runs()
    assert bump.rank_correlation(runs, "end_entropy", "end_test") == pytest.approx((1, 1, 1))
    mean, low, high = bump.rank_correlation(runs, "noise", "end_test")
    assert low < 0.3 and high > -0.3 and high - low > 0.1 and low < mean < high
    by_scipy = [
        stats.spearmanr(group["noise"], group["end_test"]).statistic
        for _, group in runs[runs["width"] == 16].groupby(bump.GROUP)
    ]
    assert mean == pytest.approx(np.mean(by_scipy))
    assert bump.rank_correlation(runs.assign(noise=1.0), "noise", "end_test") == (0, 0, 0)
    assert (
        abs(bump.rank_correlation(runs[runs["seed"] < 2], "noise", "end_test")[0]) <= 1
    )  # two seeds: smoke runs


def test_tables_say_what_the_runs_say():
    runs = made_up_runs()
    runs = runs.assign(end_train=1e-4, end_small=runs["end_test"] + 0.1, parameters=1193)
    index = pd.MultiIndex.from_frame(runs[["sigma", "width", "depth", "arm"]].drop_duplicates())
    printed = pd.DataFrame({"value": 0.5, "std": 0.25}, index=index).sort_index()
    found = bump.table(runs, 0.1, printed, {"always zero": 0.125})
    names = ["dense 4", "dense 16", "NdLinear 16"]
    assert list(found["network"]) == names * 2 + ["always zero"]
    assert found.iloc[-1]["test"] == "125.00"
    assert found.iloc[-1]["train"] == ""
    assert found["parameters"][0] == "1,193"
    one = runs[(runs["sigma"] == 0.1) & (runs["depth"] == 3) & (runs["arm"] == "ndlinear")][
        "end_test"
    ]
    mean, low, high = lab.interval(one)
    assert found.iloc[5][["test", "train", "printed"]].tolist() == [
        f"{1e3 * mean:.2f} [{1e3 * low:.2f}, {1e3 * high:.2f}]",
        "1.0e-04",
        "500.00 ± 250.00",
    ]
    assert found.iloc[5]["small test"] == f"{1e3 * (one.mean() + 0.1):.2f} ± {1e3 * one.std():.2f}"


@pytest.mark.parametrize("arm, width, units", [("dense", 12, 12), ("ndlinear", 128, 1024)])
def test_normalisers_are_those_of_the_entropy(arm, width, units):
    samples = 40
    z = torch.randn(samples, 6, generator=torch.Generator().manual_seed(1)) @ torch.randn(6, units)
    row = {
        "arm": arm,
        "width": width,
        "end_entropy": entropy.entropy(z),
        "end_rank": 6,
        "end_ave_entropy": 0.3,
    }
    row |= {"end_entropy_raw": 1.0, "end_entropy_rows": entropy.entropy(z, unit_rows=True)}
    found = bump.normalised(pd.DataFrame([row]), "end", samples).iloc[0]
    for name in ("log-width", "log-samples", "log-min", "log-rank"):
        assert found[name] == pytest.approx(entropy.entropy(z, normaliser=name)), name
    assert found["nats"] == entropy.entropy(z) and found["AveEntropy"] == 0.3


def test_opponents_are_counted():
    runs = made_up_runs()
    fair = {(16, 2): {"label": 16, "parameters": 4, "units": 99}}
    text, tally = bump.opponents(runs, fair), bump.tally(runs, fair)
    assert list(text["sigma"]) == [0.1, 0.3] and set(text["equal units"]) == {"not run"}
    assert text["equal label"][0].startswith("-25 [") and tally.loc["label"].tolist() == [2, 0, 0]
    assert tally.loc["units"].tolist() == [0, 0, 0]
    certain = 1 - 1e-12  # so wide that nothing is told apart
    assert bump.tally(runs, fair, certain).loc["label"].tolist() == [0, 0, 2]


def test_tables_of_pairs_show_sign_and_both_gaps():
    runs = made_up_runs()
    pairs = bump.by_pair(runs[runs["width"] == 16], "end_test")
    printed = bump.printed("test_mse")["value"]
    answers = pd.DataFrame({"error": [True, False, None, True]}, index=pairs.index, dtype=object)
    shown = bump.pair_table(answers, error=(pairs, printed))
    gap = 100 * (printed[0.3, 16, 2, "ndlinear"] / printed[0.3, 16, 2, "dense"] - 1)
    assert [text[-1] for text in shown["error"]] == ["✓", "✗", "≈", "✓"]
    assert shown["error, printed"][2] == f"{gap:+.0f}"
    both = bump.two_settings(pairs, pairs, printed.xs("dense", level="arm"))
    assert (both["dense, 1,000"] == 1e3 * pairs["dense"].to_numpy()).all()
    assert both["dense, printed"][2] == pytest.approx(1e3 * printed[0.3, 16, 2, "dense"])


def test_the_figure_has_a_point_for_every_run_and_a_line_for_zero():
    runs = pd.DataFrame(
        [
            {"sigma": s, "arm": arm, "width": 16, "depth": d, "seed": seed, "end_test": 0.01 + seed}
            | {"parameters": bump.costs(arm, 16 if arm == "dense" else (4, 4), d)["parameters"]}
            for s in bump.SIGMAS
            for arm in ("dense", "ndlinear")
            for d in (2, 3)
            for seed in range(3)
        ]
    )
    _, axes = plt.subplots(2, 3)
    bump.draw_errors(axes, runs)
    for axis, sigma in zip(axes[0], bump.SIGMAS):
        points = [len(line.get_ydata()) for line in axis.lines if line.get_alpha() == 0.4]
        assert points == [3] * 4
        assert axis.lines[-1].get_ydata()[0] == bump.constant_errors(sigma)["zero"]


def test_printed_columns_are_indexed_by_cell():
    found = bump.printed("test_mse")
    assert len(found) == 48 and found.loc[0.3, 64, 3, "ndlinear"]["value"] == lab.fact(
        "radius_030", metric="test_mse", method="NdLinear", width=64, depth=3
    )


def test_constants_and_grid():
    found = bump.constants()
    assert list(found.index) == [0.1, 0.2, 0.3]
    assert found["always zero"][0.2] == bump.constant_errors(0.2)["zero"]
    y = bump.target(bump.inputs(200_000, 2), 0.3)
    assert found["P(y > 0.1)"][0.3] == pytest.approx((y > 0.1).float().mean().item(), rel=0.03)
    grid = bump.grid([("ndlinear", 32, 2), ("dense", 16, 3)], 2, epochs=7)
    assert len(grid) == 3 * (2 + 2) and grid[0] == {
        "sigma": 0.1,
        "arm": "dense",
        "width": 16,
        "depth": 3,
        "seed": 0,
        "epochs": 7,
    }


def test_cuts_and_stopping():
    runs = made_up_runs()
    runs = runs[runs["width"] == 16]
    entropies = {
        "entropy": np.where(runs["arm"] == "dense", 2.0, 1.5),
        "rank": 4,
        "entropy_raw": 1.0,
    }
    entropies |= {"entropy_rows": 1.0, "ave_entropy": np.where(runs["arm"] == "dense", 0.4, 0.5)}
    for when in ("init", "end"):
        runs = runs.assign(**{f"{when}_{name}": values for name, values in entropies.items()})
    text = bump.entropies(runs, 500)
    assert text["network, depth"].tolist() == [
        "dense 16, 2",
        "dense 16, 3",
        "NdLinear 16, 2",
        "NdLinear 16, 3",
    ]
    assert text["nats"].tolist() == ["2.00 → 2.00"] * 2 + ["1.50 → 1.50"] * 2
    assert text["log-width"].tolist()[0] == f"{2 / np.log(16):.2f} → {2 / np.log(16):.2f}"
    found = bump.cuts(runs, 500).set_index(["network", "normaliser"])
    assert found.loc[("trained", "nats"), "mean"] == pytest.approx(25)
    assert found.loc[("trained", "nats"), "lower in"] == "4 of 4"
    assert found.loc[("untrained", "AveEntropy"), "most"] == pytest.approx(-25)
    stopped = bump.stopping(runs.assign(stopped=runs["seed"] % 2, stop_test=1.5 * runs["end_test"]))
    assert stopped["stopped"].tolist() == [0.5] * 8
    assert stopped["change, %"].tolist() == pytest.approx([50] * 8)
