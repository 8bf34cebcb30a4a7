"""Chapter 64: its networks, rates and training against plain ones, and its rules on made-up runs."""

import math

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
import torch
from lab import layers, modes
from lab.chapters import structured
from lab.records import store
from lab.train.loop import seed_everything
from scipy import stats as independent
from torch import nn


@pytest.mark.parametrize("arm", [*structured.ARMS, *structured.NARROW])
def test_a_network_begins_as_its_read_out(arm):
    torch.manual_seed(0)
    model = structured.network(arm, 8, 64, 3)
    x = torch.randn(5, 8)
    embedded = model.embed(x)
    assert torch.allclose(model(x), model.read_out(model.norm(embedded)), atol=1e-6)
    assert any(p.grad is None for p in model.parameters())
    loss = model(x).square().sum()
    loss.backward()
    assert all(p.grad is not None for p in model.parameters())


def test_narrow_networks_are_the_widest_that_fit():
    for arm, (count, like) in structured.NARROW.items():
        limit = count(structured.network(like, 8, 64, 1))
        width = structured.narrow(arm, 8, 64, 1)
        sizes = [count(structured.Residual("dense", 8, w, 1)) for w in (width, width + 1)]
        assert sizes[0] <= limit < sizes[1]


def test_the_number_of_draws_does_not_depend_on_what_was_searched_before():
    structured.narrow.cache_clear()
    torch.manual_seed(1)
    first = structured.network("dense-params", 8, 64, 1).read_out.weight
    torch.manual_seed(1)
    second = structured.network("dense-params", 8, 64, 1).read_out.weight
    assert torch.equal(first, second)


def test_counts_of_a_network():
    model = structured.network("monarch", 8, 64, 1)
    layer = 2 * 8**3
    assert structured.multiply_adds(model) == 8 * 64 + 6 * layer + 64
    biases, norms = 64 + 6 * 64 + 1, 4 * 2 * 64
    assert structured.size(model) == structured.multiply_adds(model) + biases + norms


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
    shares = [structured.schedule(step, 100) for step in range(100)]
    assert shares[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert shares[5:60] == [1.0] * 55 and shares[60] == 1.0
    assert shares[80] == pytest.approx(0.5) and shares[99] == pytest.approx(1 / 40)
    assert structured.schedule(0, 1) == 1.0


def plain(make, data, seed, rate, loss, steps, batch):
    """One model, trained by a loop of its own."""
    seed_everything(seed)
    model = make()
    each = rate(model)
    groups = [{"params": [p], "lr": each[n], "base": each[n]} for n, p in model.named_parameters()]
    adam = torch.optim.Adam(groups)
    order, (x, y) = torch.Generator().manual_seed(seed), data["train"]
    index = torch.empty(0, dtype=torch.long)
    for step in range(steps):
        if len(index) < batch:
            index = torch.randperm(len(x), generator=order)
        now, index = index[:batch], index[batch:]
        for group in adam.param_groups:
            group["lr"] = group["base"] * structured.schedule(step, steps)
        adam.zero_grad()
        loss(model(x[now]), y[now]).backward()
        adam.step()
    return model


@pytest.mark.parametrize("arm", ["monarch", "ndlinear", "dense"])
def test_members_train_as_they_would_alone(arm):
    torch.manual_seed(0)
    data = [
        {p: (torch.randn(n, 8), torch.randn(n)) for p, n in (("train", 50), ("test", 20))}
        for _ in "ab"
    ]
    stacked = {p: tuple(torch.stack([d[p][i] for d in data]) for i in (0, 1)) for p in data[0]}

    def make():
        return structured.network(arm, 8, 64, 1)

    def rate(model):
        return structured.rates(model, 3e-3, "rule")

    options = {"rate": rate, "loss": structured.squared_error, "steps": 7, "batch": 16}
    found = structured.fit(make, stacked, seeds=(3, 4), scores={}, **options)
    for seed, own, member in zip((3, 4), data, found):
        model = plain(make, own, seed, **options)
        wanted = structured.squared_error(model(own["test"][0]), own["test"][1]).item()
        assert member["test_loss"] == pytest.approx(wanted, rel=2e-4)
        assert member["diverged"] == 0 and "val_loss" not in member


def test_the_weights_of_the_lowest_validation_loss_are_tested():
    class Drift(nn.Module):
        def __init__(self):
            super().__init__()
            self.at = nn.Parameter(torch.zeros(1))

        def forward(self, x):
            return self.at + 0 * x

    x = torch.zeros(1, 10, 1)
    parts = {"train": (x, x + 100.0), "val": (x, x + 1.0), "test": (x, x + 0.0)}
    found = structured.fit(
        Drift, parts, seeds=(0,), rate=lambda m: {"at": 1.0}, loss=lambda o, t: (o - t).square().mean(),
        scores={}, steps=10, batch=10, checks=10,
    )  # fmt: skip
    # the first step is warm-up at the full rate: Adam goes from 0 to 1, where the validation loss is lowest
    assert found[0]["val_loss"] == pytest.approx(0, abs=1e-6)
    assert found[0]["test_loss"] == pytest.approx(1, abs=1e-5)


def test_a_member_that_diverges_is_recorded_as_such():
    data = {p: (torch.randn(1, 40, 8), torch.randn(1, 40)) for p in ("train", "test")}
    found = structured.fit(
        lambda: structured.network("dense", 8, 64, 1), data, seeds=(0,),
        rate=lambda m: structured.rates(m, 1e30, "rule"), loss=structured.squared_error, scores={}, steps=4, batch=8,
    )  # fmt: skip
    assert found[0]["diverged"] == 1 and found[0]["test_loss"] == structured.WORST


def test_every_sample_is_used_once_before_one_is_used_again():
    orders = [torch.Generator().manual_seed(seed) for seed in (0, 1)]
    seen = torch.cat(list(structured._batches(10, 5, 4, orders)), dim=1)
    for member in seen:
        assert sorted(member[:10].tolist()) == sorted(member[10:].tolist()) == list(range(10))
    assert not torch.equal(seen[0], seen[1])
    few = list(structured._batches(3, 64, 2, [torch.Generator().manual_seed(0)]))
    assert [batch.shape for batch in few] == [(1, 3), (1, 3)]


def test_a_teacher_is_a_network_of_its_seed():
    first, again, other = (structured.teacher(seed, 600) for seed in (0, 0, 1))
    assert first is again and not torch.equal(first["train"][1], other["train"][1])
    y = torch.cat([first["train"][1], first["test"][1]])
    assert y.mean().abs() < 1e-5 and y.std() == pytest.approx(1) and len(first["test"][0]) == 600
    parts = structured.teacher_parts((0, 1), 600)
    assert parts["train"][0].shape == (2, 600, 8) and torch.equal(
        parts["test"][1][1], other["test"][1]
    )


def test_a_budget_of_operations_gives_steps():
    macs = 8 * 64 + 6 * 2 * 8**3 + 64
    assert structured.steps_for(1e9, "monarch", 64) == round(1e9 / (6 * macs * 128))
    assert structured.steps_for(1.0, "dense", 64) == 1


def test_shares_of_a_data_set():
    whole, few = structured.share("digits", 3, 1.0), structured.share("digits", 3, 1 / 16)
    sizes = [len(part[0]) for part in (whole.train, whole.val, few.train, few.val)]
    assert sizes[0] == pytest.approx(0.6 * 1797, abs=5) and sizes[2] == pytest.approx(67, abs=5)
    assert sizes[1] == pytest.approx(180, abs=5) and sizes[3] == pytest.approx(180, abs=5)
    assert whole.train[0].shape[1] == 64
    assert whole.train[0].mean().abs() < 1e-4 and whole.train[0].std() == pytest.approx(1, abs=1e-3)


def test_a_series_is_lengthened_by_its_ends(monkeypatch):
    class Data:
        x = np.arange(20 * 140, dtype=np.float32).reshape(20, 1, 140)
        y = np.arange(20) % 2

    monkeypatch.setattr(structured, "load", lambda name: Data)
    monkeypatch.setattr(structured, "split", lambda x, y, **options: (x, options))
    x, options = structured.share("a", 0, 0.5)
    assert (
        x.shape == (20, 144) and (x[:, :2] == x[:, 2:3]).all() and (x[:, -2:] == x[:, -3:-2]).all()
    )
    assert options["parts"] == (0.3, 0.1, pytest.approx(0.6))


def test_whole_runs_of_both_tasks():
    config = {"arm": "ndlinear-3", "width": 64, "how": "rule", "lr": 0.01, "steps": 2, "pool": 600}
    found = structured.train_teacher([config | {"seed": s} for s in (0, 1)])
    assert len(found) == 2 and found[0]["macs"] == 8 * 64 + 6 * 3 * 4**4 + 64
    config = {"data": "digits", "arm": "blocks", "part": 1 / 4, "steps": 3, "lr": 0.01}
    found = structured.train_share([config | {"seed": s} for s in (0, 1)])
    assert set(found[0]["metrics"]) == {"test_loss", "test_accuracy", "val_loss", "diverged"}
    assert 0 <= found[1]["metrics"]["test_accuracy"] <= 1


# ----------------------------------------------------------------------------------------------------- rules
def runs(**means) -> pd.DataFrame:
    draw = np.random.default_rng(0)
    own = draw.normal(0, 0.3, 8)  # what a seed does to all arms
    rows = [
        {"arm": arm, "seed": s, "test_loss": math.exp(mean + own[s] + draw.normal(0, 0.05))}
        for arm, mean in means.items()
        for s in range(8)
    ]
    return pd.DataFrame(rows)


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
    made = [
        {"arm": a, "seed": s, "test_loss": math.exp(v)}
        for a, x in logs.items()
        for s, v in enumerate(x)
    ]
    found = structured.winner(pd.DataFrame(made), ["a", "b", "c"])
    assert (found["best"], found["near"], found["next"]) == ("a", ["b"], "b")
    assert structured.answer(found) == "not told apart: a, b"
    alone = structured.winner(runs(monarch=0.0, dense=1.0), ["monarch", "dense"])
    assert structured.answer(alone) == "Monarch" and alone["interval"][2] < 0


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


def test_monotone_needs_every_step():
    assert structured.monotone([(-1, -2, -0.5), (-1, -2, -0.5)])
    assert not structured.monotone([(-1, -2, -0.5), (-1, -2, 0.5)])


def test_an_arm_stands_at_its_better_width():
    both = pd.concat([runs(a=0.0, b=1.0).assign(width=64), runs(a=0.5, b=0.5).assign(width=256)])
    found = structured.better_width(both).groupby("arm")["width"].unique()
    assert found["a"] == [64] and found["b"] == [256]


def test_scenarios_of_the_teacher():
    arms = [*structured.EQUAL_MACS, *structured.EQUAL_PARAMETERS]
    means = {arm: float(i) for i, arm in enumerate(arms)} | {"monarch": -1.0}
    parts = [
        runs(**{a.replace("-", "_"): m + shift for a, m in means.items()}).assign(
            budget=budget, width=width, parameters=1234
        )
        for budget in (1e9, 1e10)
        for width, shift in ((64, 0.0), (256, 1.0))
    ]
    made = pd.concat(parts)
    made["arm"] = made["arm"].str.replace("_", "-")
    found = structured.teacher_scenarios(made)
    assert [s.budget for s in found[:2]] == ["1e09 operations", "1e10 operations"]
    assert [s.budget for s in found[2:]] == [f"1,234 parameters, width {w}" for w in (64, 256)]
    assert set(found[0].runs["width"]) == {64} and len(found[3].arms) == 4
    shown = structured.answers(found)
    assert shown["answer"].tolist()[:2] == ["Monarch"] * 2 and shown["first agrees"].all()
    assert shown["first"].tolist() == ["Monarch", "Monarch", "NdLinear", "NdLinear"]
    assert shown["advised"].tolist() == ["√d blocks", "√d blocks", "NdLinear", "NdLinear"]
    assert shown["agrees"].tolist() == [False, False, True, True]
    assert len(structured.teacher_scenarios(made[made["arm"] != "dense-params"])) == 2


def test_scenarios_of_few_samples():
    counts = {
        "dense": (900, 900),
        "monarch": (300, 100),
        "ndlinear": (50, 100),
        "low_rank_1": (50, 20),
    }
    means = {"dense": 0.0, "monarch": 1.0, "ndlinear": 2.0, "low_rank_1": 3.0}
    made = pd.concat([runs(**means).assign(part=part) for part in (0.1, 1.0)])
    for i, column in enumerate(("parameters", "macs")):
        made[column] = made["arm"].map(lambda arm, i=i: counts[arm][i])
    made["arm"] = made["arm"].str.replace("_", "-")
    found = structured.share_scenarios("digits", made, 1000, axes=True)
    assert [s.name for s in found] == ["digits, 100 samples"] * 3 + ["digits, 1,000 samples"] * 3
    admitted = [set(s.arms) for s in found[:3]]
    small = {"ndlinear", "low-rank-1"}
    assert admitted == [small | {"monarch"}, small, small | {"monarch", "dense"}]
    shown = structured.answers(found)
    assert shown["answer"].tolist() == ["Monarch", "NdLinear", "dense"] * 2
    first = ["NdLinear", "NdLinear", "NdLinear", "Monarch", "NdLinear", "dense"]
    assert shown["first"].tolist() == first
    assert shown["first agrees"].tolist() == [False, True, False, True, True, True]
    assert shown["advised"].tolist() == ["√d blocks", "NdLinear", "dense"] * 2
    assert shown["agrees"].tolist() == [False, True, True] * 2
    low = float(shown["best minus next, %"][0].split("[")[1].split(",")[0])
    assert low == pytest.approx(
        structured.percent(structured.log_ratio(found[0].runs, "monarch", "ndlinear")[1]), abs=0.06
    )
    assert structured.percent(math.log(1.2)) == pytest.approx(20)


def test_rates_that_serve():
    grid = [1e-3, 3e-3, 1e-2, 3e-2, 1e-1]
    wells = {("dense", 64): 1e-2, ("dense", 256): 1e-2, ("a", 64): 3e-2, ("a", 256): 1e-1}
    rows = [
        {"arm": arm, "width": width, "lr": lr, "seed": s, "test_loss": 1 + math.log(lr / best) ** 2}
        for (arm, width), best in wells.items()
        for lr in grid
        for s in (0, 1)
    ]
    best = structured.best_rates(pd.DataFrame(rows), ["arm", "width"], "test_loss")
    assert best["lr"].to_dict() == wells and best["edge"].to_dict()["a", 256]
    assert structured.served(best, grid).to_dict() == {("a", 64): True, ("a", 256): False}
    single = structured.best_rates(pd.DataFrame(rows), ["arm"], "test_loss")
    assert single["lr"]["dense"] == 1e-2


def test_gaps_are_percent_of_the_other_loss():
    made = runs(a=0.5, b=0.0)
    found = structured.gaps({"x": made, "y": made[made["arm"] == "a"]}, ["a", "c"], "b")
    mean, low, high = structured.log_ratio(made, "a", "b")
    assert found[["group", "arm"]].to_numpy().tolist() == [["x", "a"]]
    wanted = [100 * (math.exp(v) - 1) for v in (mean, low, high)]
    assert found[["mean", "low", "high"]].iloc[0].tolist() == pytest.approx(wanted)


def test_figures_show_what_they_are_given():
    _, axis = plt.subplots()
    made = runs(ndlinear=0.5, dense=0.1, monarch=0.0)
    found = structured.gaps({"few": made, "many": made}, ["ndlinear", "dense"], "monarch")
    structured.draw_gaps(axis, found)
    assert [t.get_text() for t in axis.get_yticklabels()] == ["few", "many"]
    assert [t.get_text() for t in axis.legend().get_texts()] == ["NdLinear", "dense"]
    shown = axis.containers[0].lines[0].get_xdata()
    assert list(shown) == pytest.approx(found.loc[found["arm"] == "ndlinear", "mean"].tolist())
    tuning = pd.concat([made.assign(lr=lr, width=w) for lr in (0.1, 0.2) for w in (64, 256)])
    tuning.loc[tuning["lr"] == 0.1, "test_loss"] /= 2
    _, axes = plt.subplots(1, 2)
    structured.draw_rates(axes, tuning, ["ndlinear", "monarch"])
    marks = [line.get_xdata().tolist() for line in axes[1].lines if line.get_marker() != "None"]
    assert marks == [[0.1], [0.1]]
    plt.close("all")


def test_names():
    assert structured.name("monarch") == "Monarch" and structured.name("ndlinear") == "NdLinear"


# ----------------------------------------------------------------------------------------------------- times
@pytest.mark.parametrize("what", ["forward", "training"])
def test_times_of_all_layers(what):
    config = {"width": 64, "batch": 3, "pass": what, "rounds": 1, "seed": 0}
    found = structured.time_layers(config)
    assert set(found["metrics"]) == set(structured.TIMED) and min(found["metrics"].values()) > 0


@pytest.mark.parametrize("arm", structured.TIMED)
def test_timed_layers_are_those_of_the_networks(arm):
    ours, theirs = structured.timed_layer(arm, 256), structured.ARMS[arm](256)
    assert type(ours) is type(theirs)
    assert layers.count_weights(ours) == layers.count_weights(theirs)


def test_times_are_taken_by_the_bench_alone(monkeypatch, tmp_path, capsys):
    grid = [{"seed": 0, "width": 64}, {"seed": 1, "width": 64}]
    monkeypatch.delenv("NDL_BENCH", raising=False)
    monkeypatch.setattr(modes, "RESULTS", tmp_path)
    for mode in ("replay", "full"):
        monkeypatch.setenv("NDL_MODE", mode)
        assert not structured.may_time("made-up", grid)
    assert "2 of 2 rows" in capsys.readouterr().out
    for config in grid:
        store.append(tmp_path / "made-up.jsonl", {"status": "ok", "config": config})
    assert structured.may_time("made-up", grid)
    monkeypatch.setenv("NDL_BENCH", "1")
    assert structured.may_time("other", grid)
