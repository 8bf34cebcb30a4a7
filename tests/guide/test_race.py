"""`ndlinear_guide.race`: layers within their budget, rounds of the cost asked for, a choice that is plain, and errors."""

import copy
import functools
import math
import sys

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ndlinear_guide as guide
from ndlinear import NdLinear
from ndlinear_guide import layers

module = sys.modules["ndlinear_guide.race"]  # the function of this name hides it


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(16, 24)
        self.fc2 = nn.Linear(24, 16, bias=False)
        self.out = nn.Linear(16, 3)

    def forward(self, x):
        return self.out(x + self.fc2(self.fc1(x).relu()))


PAIR = [("fc1", "fc2")]


def data(count=200, seed=0):
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 16, generator=draw)
    return x, x[:, :3].argmax(1)


QUICK = {"steps": 12, "batch_size": 16, "progress": False}


@pytest.fixture
def task():
    """What a race is given first."""
    return Net(), data(), data(60, 1), PAIR


# ------------------------------------------------------------------------------------------------------------- the layers
def test_narrow_shrinks_what_lies_between_a_pair():
    net = guide.swap(Net(), PAIR, "narrow", share=0.25)
    assert (net.fc1.out_features, net.fc2.in_features, net.fc2.bias) == (6, 6, None)
    assert guide.swap(Net(), ["fc1", "fc2"], "narrow") is None
    assert net(torch.randn(2, 16)).shape == (2, 3)


def test_a_swap_leaves_the_model_and_the_other_layers_alone():
    model = Net()
    before = {name: p.clone() for name, p in model.named_parameters()}
    net = guide.swap(model, ["fc1"], "low-rank", share=0.5)
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    assert torch.equal(net.fc2.weight, model.fc2.weight) and isinstance(net.fc1, layers.LowRank)
    one = guide.swap(nn.Linear(16, 16), ["(the model)"], "blocks", share=0.5)
    assert isinstance(one, layers.BlockDiagonal)


def test_rates_follow_the_rule():
    net = guide.swap(Net(), ["fc1"], "low-rank", share=0.5)
    found = guide.rates.rates(net, 0.01)
    rank = len(net.fc1.down)
    assert found["fc1.down"] == pytest.approx(0.01 / 2)
    assert found["fc1.up"] == pytest.approx(0.01 * 16 / (2 * rank))
    assert found["fc2.weight"] == found["fc1.bias"] == 0.01
    assert sum(len(group["params"]) for group in guide.lr_groups(net, 0.01)) == len(found)


def test_an_ndlinear_of_the_user_gets_the_rates_of_one_that_was_raced():
    raced = guide.rates.rates(layers.Kronecker((4, 6), (3, 5)), 0.01)
    found = guide.rates.rates(nn.Sequential(nn.Linear(6, 24), NdLinear((4, 6), (3, 5))), 0.01)
    for mode in (0, 1):
        name = f"align_layers.{mode}.weight"
        assert found[f"1.{name}"] == raced[f"map.{name}"] != 0.01
    assert found["0.weight"] == 0.01 and found["1.align_layers.0.bias"] == 0.01 / 2


# --------------------------------------------------------------------------------------------------------------- the rounds
@pytest.mark.parametrize("budget", [1.0, 3.0])
@pytest.mark.parametrize("seeds", [1, 2])
def test_rounds_cost_what_the_race_may_take(budget, seeds):
    contestants = [guide.Contestant(kind, rate) for kind in "abcdefghij" for rate in (1, 2, 3)]
    spent = []

    def train(one, steps):
        spent.append(seeds * steps)
        return [ord(one.kind) + one.rate / 10] * seeds

    rounds = guide.halving(contestants, train, steps=3600, budget=budget, seeds=seeds)
    assert [len(each.losses) for each in rounds] == [30, 10, 4]
    assert rounds[1].steps == 3 * rounds[0].steps
    assert sum(spent) == pytest.approx(3600 * budget, rel=0.02)
    assert guide.winner(rounds[-1]) == ("a", 1)
    second = [one.kind for one in rounds[1].losses]
    assert max(second.count(kind) for kind in second) == 2
    assert len({one.kind for one in rounds[2].losses}) == 4


def test_who_diverges_leaves_and_a_race_without_losses_says_so():
    contestants = [guide.Contestant("a", 1.0), guide.Contestant("b", 1.0)]
    options = {"steps": 10, "budget": 3.0}
    rounds = guide.halving(
        contestants, lambda one, _: [math.inf if one.kind == "a" else 1.0], **options
    )
    assert [list(each.losses) for each in rounds[1:]] == [contestants[1:]] * 2
    with pytest.raises(ValueError, match="give lower rates"):
        guide.halving(contestants, lambda *_: [math.nan], **options)


# ----------------------------------------------------------------------------------------------------------------- the race
def test_a_race_finds_the_layer_that_the_task_needs():
    """Targets are what blocks of four make of the inputs, orthogonal: a matrix of low rank gives no good answer."""
    torch.manual_seed(0)
    x = torch.randn(600, 64)
    y = torch.block_diag(*[torch.linalg.qr(torch.randn(4, 4)).Q for _ in range(16)])
    y = (x @ y).view(-1, 16, 4).transpose(1, 2).flatten(1)
    train, validation = (x[:500], y[:500]), (x[500:], y[500:])
    options = {"share": 1 / 16, "steps": 100, "batch_size": 50, "rates": (0.03,)}
    options |= {"kinds": ("low-rank", "blocks", "ndlinear"), "progress": False}
    found = guide.race(nn.Linear(64, 64), train, validation, ["(the model)"], **options)
    assert found.choice.kind == "blocks" and found.table["result"][0] == "chosen"
    assert isinstance(found.build(), layers.BlockDiagonal)
    losses = found.table["loss"].tolist()[:-1]
    assert losses == sorted(losses)


def test_the_table_names_costs_intervals_and_who_left(task):
    found = guide.race(*task, seeds=(0, 1, 2), rates=(1e-3,), budget=9, **QUICK)
    table = found.table
    others = {"worse", "no clear difference", "left after round 1", "left after round 2"}
    assert table["result"][0] == "chosen" and set(table["result"][1:-1]) <= others
    assert (table["low"] <= table["loss"]).all() and (table["ms a step"] > 0).all()
    assert table["parameters"][0] == sum(p.numel() for p in found.build().parameters())
    single = guide.race(*task, rates=(1e-3, 1e-2), **QUICK).table
    assert "low" not in single and "one seed: no interval" in set(single["result"])
    assert "ndlinear-axes" not in set(single["kind"])  # only with the axes of the data


def test_the_last_row_is_the_model_as_it_is(task):
    """Trained from its own weights, as long as those of the last round, at the best of the same rates."""
    model, train, validation, pair = task
    rates, kinds = (1e-3, 1e-2), ("low-rank", "narrow", "blocks")
    found = guide.race(model, train, validation, pair, rates=rates, kinds=kinds, **QUICK)
    row = found.table.iloc[-1]
    assert (row["kind"], row["round"], row["steps"]) == ("as it is", 3, found.rounds[-1].steps)
    make = functools.partial(copy.deepcopy, model)
    length = found.rounds[-1].steps
    own = [guide.training(make, r, train, validation, length, 0, batch_size=16).loss for r in rates]
    assert row["loss"] == min(own) and row["rate"] == rates[own.index(min(own))]
    assert row["parameters"] == sum(p.numel() for p in model.parameters())
    assert row["multiply-adds"] == 16 * 24 + 24 * 16 + 16 * 3
    assert row["result"].startswith("no exchange") and row["ms a step"] > 0
    assert found.choice.kind in kinds and "as it is" not in dict(found.rounds[-1].losses)
    assert (found.table["kind"] == "as it is").sum() == 1


def test_an_exchange_that_costs_is_seen_by_its_interval():
    """The model as it is knows the answer already; a layer drawn anew does not within a step."""
    torch.manual_seed(0)
    x = torch.randn(300, 8)
    model = nn.Linear(8, 8)
    y = model(x).detach()
    options = {"kinds": ("low-rank",), "rates": (1e-5,), "seeds": (0, 1, 2)}
    found = guide.race(model, (x, y), (x, y), ["(the model)"], share=0.5, **options, **QUICK)
    assert found.table["result"].tolist() == ["chosen", "no exchange; better"]


def test_other_numbers_are_another_race(task):
    """Nothing is remembered: cases behind the first thousand count, and so do the weights of the model."""
    model, _, validation, pair = task
    x, y = data(1600)
    flipped = torch.cat([y[:1100], 2 - y[1100:]])
    options = QUICK | {"kinds": ("blocks",), "rates": (1e-2,), "steps": 300}
    same = [guide.race(model, (x, y), validation, pair, **options).rounds for _ in "ab"]
    assert same[0] == same[1]
    assert guide.race(model, (x, flipped), validation, pair, **options).rounds != same[0]
    other = copy.deepcopy(model)
    other.out.weight.data.zero_()
    assert guide.race(other, (x, y), validation, pair, **options).rounds != same[0]


def test_batches_of_any_form():
    x, y = data()

    def loss(net, batch):
        return nn.functional.cross_entropy(net(batch["x"]), batch["y"])

    loader = DataLoader(TensorDataset(x, y), 32)
    for train, more in ((loader, {}), ([{"name": "all", "x": x, "y": y}], {"loss": loss})):
        found = guide.race(Net(), train, train, PAIR, kinds=("blocks",), **more, **QUICK)
        assert math.isfinite(found.table["loss"][0])


def test_the_generator_of_the_caller_is_left_alone(task):
    before = torch.get_rng_state()
    guide.race(*task, kinds=("low-rank",), **QUICK)
    assert torch.equal(torch.get_rng_state(), before)


WRONG = [
    ({"layers": []}, "layers is empty"),
    ({"layers": ["fc3"]}, "not a linear layer"),
    ({"layers": [("fc1", "out")]}, "are no pair"),
    ({"layers": [("fc1", "fc2"), ("fc2", "fc1")]}, "more than once"),
    ({"layers": [("fc1", "fc2", "out")]}, "two names"),
    ({"kinds": ("tucker",)}, "kinds names"),
    ({"kinds": "ndlinear"}, r"give \['ndlinear'\]"),
    ({"kinds": ("dense",)}, "larger share"),
    ({"rates": (0.0,)}, "positive and finite"),
    ({"rates": (float("inf"),)}, "positive and finite"),
    ({"seeds": ()}, "at least one seed"),
    ({"budget": 0}, "must be positive"),
    ({"share": 1.5}, "at most 1"),
    ({"limit": "time"}, "limit must be"),
    ({"train": iter([])}, "train gave no batch"),
    ({"validation": []}, "validation gave no batch"),
    ({"train": (torch.full((20, 16), math.nan), torch.zeros(20, dtype=torch.long))}, "lower rates"),
]


@pytest.mark.parametrize(("change", "words"), WRONG)
def test_errors_say_what_to_do(change, words):
    options = {"model": Net(), "train": data(), "validation": data(60, 1), "layers": PAIR} | QUICK
    with pytest.raises(ValueError, match=words):
        guide.race(**options | change)


# --------------------------------------------------------------------------------------------------------- axes of the data
def test_axes_are_those_of_the_data(task):
    """With (2, 8) inputs the layer multiplies two axes of these lengths; without axes the kind stays away."""
    net = guide.swap(Net(), ["fc1"], "ndlinear-axes", axes={"fc1": (2, 1, 8)})
    assert net.fc1.map.input_dims == (2, 8) and net.fc1.map.hidden_size == (4, 6)
    assert guide.swap(Net(), ["fc1"], "ndlinear-axes") is None
    both = guide.swap(Net(), PAIR, "ndlinear-axes", axes={"fc1": (2, 2, 4)})
    assert both.fc1.map.input_dims == (2, 2, 4) and both.fc2.map.input_dims == (4, 6)
    kinds = ("ndlinear-axes", "blocks")
    found = guide.race(*task, axes={"fc1": (2, 8)}, kinds=kinds, **QUICK)
    assert "ndlinear-axes" in set(found.table["kind"])
    for wrong in ({"fc1": (3, 5)}, {"out": (4, 4)}):
        with pytest.raises(ValueError, match="axes"):
            guide.swap(Net(), PAIR, "ndlinear-axes", axes=wrong)


def test_the_test_loss_belongs_to_the_lowest_validation_loss():
    """With the validation part as test part both are one number; another part does not change the training."""
    make = lambda: guide.swap(Net(), PAIR, "low-rank")  # noqa: E731
    args = (make, 3e-3, data(), data(60, 1), 40, 0)
    same = guide.training(*args, test=data(60, 1))
    other = guide.training(*args, test=data(60, 2))
    assert same.loss == same.test == other.loss != other.test
    assert guide.training(*args).test is None


def test_feed_forward_blocks_are_found():
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 40), 2)
    found = guide.feed_forward(model)
    assert found == [(f"layers.{i}.linear1", f"layers.{i}.linear2") for i in range(2)]
    with pytest.raises(ValueError, match="name layers yourself"):
        guide.feed_forward(nn.Linear(3, 4))


class Gated(nn.Module):
    """The feed-forward block of Llama."""

    def __init__(self):
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(12, 32), nn.Linear(12, 32), nn.Linear(32, 12)

    def forward(self, x):
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))


def test_a_block_with_a_gate_is_no_pair():
    """Its gate has as many numbers as the layer beside it, so that "narrow" cannot shrink that one alone."""
    found = guide.feed_forward(Gated())
    assert found == ["gate", "up", "down"] and guide.swap(Gated(), found, "narrow") is None
    assert guide.swap(Gated(), found, "low-rank")(torch.randn(6, 12)).shape == (6, 12)


def test_multiply_adds_are_those_of_the_layers_and_not_of_their_modes():
    net = nn.Sequential(layers.Kronecker((4, 6), (3, 5)), nn.Linear(15, 2))
    assert module._macs(net) == min(3 * 24 + 5 * 18, 5 * 24 + 3 * 20) + 30
