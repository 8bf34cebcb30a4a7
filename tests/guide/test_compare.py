"""`ndlinear_guide.compare`: layers within their budget, a table of what it was told, and errors."""

import math

import numpy as np
import pytest
import scipy.stats
import torch
from torch import nn

import ndlinear_guide as guide
from ndlinear_guide import layers


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(16, 24)
        self.fc2 = nn.Linear(24, 16, bias=False)
        self.out = nn.Linear(16, 3)

    def forward(self, x):
        return self.out(x + self.fc2(self.fc1(x).relu()))


PAIR = [("fc1", "fc2")]


# ------------------------------------------------------------------------------------------------------------- the layers
def test_narrow_shrinks_what_lies_between_a_pair():
    net = guide.swap(Net(), PAIR, "narrow", share=0.25)
    assert (net.fc1.out_features, net.fc2.in_features, net.fc2.bias) == (6, 6, None)
    assert net(torch.randn(2, 16)).shape == (2, 3)
    for names, share in ((["fc1", "fc2"], 0.25), ([*PAIR, "out"], 0.25), (PAIR, 0.01)):
        assert guide.swap(Net(), names, "narrow", share=share) is None


def test_a_swap_leaves_the_model_and_the_other_layers_alone(tmp_path):
    """What is trained in the copy is read back into another swap."""
    model = Net()
    before = {name: p.clone() for name, p in model.named_parameters()}
    net = guide.swap(model, ["fc1"], "low-rank", share=0.5)
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    assert torch.equal(net.fc2.weight, model.fc2.weight) and isinstance(net.fc1, layers.LowRank)
    torch.save(net.state_dict(), tmp_path / "state.pt")
    again = guide.swap(model, ["fc1"], "low-rank", share=0.5)
    again.load_state_dict(torch.load(tmp_path / "state.pt"))
    assert torch.equal(again(x := torch.randn(2, 16)), net(x))
    one = guide.swap(nn.Linear(16, 16), ["(the model)"], "blocks", share=0.5)
    assert isinstance(one, layers.BlockDiagonal)


def test_axes_are_those_of_the_data():
    """Those of length one are no modes; where outputs have no such factors, nothing fits."""
    made = guide.swap(Net(), PAIR, "ndlinear", axes={"fc1": (2, 1, 8)})
    assert (made.fc1.map.input_dims, made.fc1.map.hidden_size) == ((2, 8), (4, 6))
    assert (made.fc2.map.input_dims, made.fc2.map.hidden_size) == ((4, 6), (4, 4))
    assert guide.swap(Net(), ["out"], "ndlinear", axes={"out": (2, 8)}) is None
    for wrong in ({"fc1": (3, 5)}, {"out": (4, 4)}):
        with pytest.raises(ValueError, match="axes"):
            guide.swap(Net(), PAIR, "ndlinear", axes=wrong)


# -------------------------------------------------------------------------------------------------------------- the table
def test_the_table_says_what_the_trainings_said():
    """Losses by rule: all rates at a seed that does not count, then all seeds at the best one; differences are paired by seed."""
    model, asked, state = Net(), [], torch.get_rng_state()

    def noise(seed):
        return torch.rand((), generator=torch.Generator().manual_seed(seed)).item()

    def train(net, rate):
        size = sum(p.numel() for p in net.parameters())
        asked.append((size, rate, torch.initial_seed()))
        optimiser = torch.optim.SGD(net.parameters(), rate)
        optimiser.step()
        optimiser.step()
        best = 1e-2 if size < 800 else 1e-3
        return size / 1000 + abs(math.log10(rate / best)) + noise(torch.initial_seed())

    options = {"rates": np.array([1e-3, 1e-2]), "seeds": np.arange(3, 6)}
    found = guide.compare(model, train, PAIR, kinds=("narrow", "dense", "blocks"), **options)
    assert torch.equal(torch.get_rng_state(), state)
    assert found["layer"].tolist() == ["as it is", "narrow", "dense", "blocks"]
    assert found.loc[2].drop("layer").isna().all(), "a dense layer does not fit into a quarter"
    sizes = [size + 17 * 3 for size in (17 * 24 + 24 * 16, 17 * 6 + 6 * 16, 2 * 16 * 6 + 24)]
    ran = found.drop(index=2)
    assert ran["parameters"].tolist() == sizes and ran["rate"].tolist() == [1e-3, 1e-2, 1e-2]
    assert ran["multiply-adds"].tolist() == [2 * 16 * 24 + 48, 2 * 16 * 6 + 48, 2 * 16 * 6 + 48]
    assert (ran["ms a step"] > 0).all()
    wanted = [
        (size, rate, seed)
        for size, best in zip(sizes, (1e-3, 1e-2, 1e-2))
        for rate, seed in ((1e-3, 6), (1e-2, 6), (best, 3), (best, 4), (best, 5))
    ]
    assert asked == wanted
    losses = sizes[0] / 1000 + np.array([noise(seed) for seed in (3, 4, 5)])
    half = scipy.stats.t.interval(0.95, 2, losses.mean(), losses.std(ddof=1) / 3**0.5)
    assert found.loc[0, ["loss", "low", "high"]].tolist() == pytest.approx([losses.mean(), *half])
    ends = ["difference", "difference low", "difference high"]
    less = (sizes[1] - sizes[0]) / 1000  # for every seed
    assert found.loc[1, ends].tolist() == pytest.approx([less] * 3, abs=1e-6)
    assert found.loc[0, ends].isna().all()


def test_a_training_that_diverges_has_an_infinite_loss():
    losses = iter([1.0, math.nan, math.inf, math.nan])
    options = {"kinds": ("blocks",), "rates": (1.0,), "seeds": (0, 1)}
    found = guide.compare(Net(), lambda *_: next(losses), ["fc1"], **options)
    assert found["loss"].tolist() == [math.inf, math.inf] and found["high"].isna().all()


WRONG = [
    ({"layers": []}, "layers is empty"),
    ({"layers": ["fc3"]}, "not a linear layer"),
    ({"layers": [("fc1", "out")]}, "are no pair"),
    ({"layers": [("fc1", "fc2"), ("fc2", "fc1")]}, "more than once"),
    ({"layers": [("fc1", "fc2", "out")]}, "two names"),
    ({"kinds": ("tucker",)}, "kind must be one of 'narrow'"),
    ({"kinds": "ndlinear"}, r"give \['ndlinear'\]"),
    ({"kinds": ("dense",)}, "fits into 0.25 of the weights"),
    ({"seeds": ()}, "at least one kind"),
    ({"rates": (1e-3, 1e-3)}, "more than once"),
    ({"share": 1.5}, "at most 1"),
    ({"train": lambda *_: None}, "must return the validation loss, a number, got None"),
]


@pytest.mark.parametrize(("change", "words"), WRONG)
def test_errors_say_what_to_do(change, words):
    good = {"model": Net(), "train": lambda *_: 1.0, "layers": PAIR}
    with pytest.raises(TypeError if "train" in change else ValueError, match=words):
        guide.compare(**good | change)
