"""`lab.guide`: on three kinds of models that are not this book's, against counts and norms from formulas of their own."""

import copy

import pytest
import torch
from lab import guide
from lab.guide import reporting
from torch import nn
from torch.nn import functional as F

from ndlinear import nearest_kronecker


class Residual(nn.Module):
    """A block as in the networks of torchvision."""

    def __init__(self, channels: int):
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(channels)

    def forward(self, x):
        return F.relu(x + self.norm(self.conv(x)))


def cnn() -> nn.Module:
    body = [nn.Conv2d(3, 16, 3, 2, 1), nn.BatchNorm2d(16), nn.ReLU(), Residual(16)]
    head = [nn.Flatten(), nn.Linear(16 * 8 * 8, 32), nn.ReLU(), nn.Dropout(0.5), nn.Linear(32, 10)]
    return nn.Sequential(*body, *head)


class GPT(nn.Module):
    """One decoder block with tied embeddings, a shared feed-forward layer and a layer that nothing calls."""

    def __init__(self, words: int = 60, width: int = 24):
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.attention = nn.MultiheadAttention(width, 4, batch_first=True)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.again = self.up
        self.spare = nn.Linear(width, width)
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens, scale=1.0):
        x = self.embed(tokens) * scale
        x = x + self.attention(x, x, x, need_weights=False)[0]
        x = x + self.down(F.gelu(self.up(x)) + F.gelu(self.again(x)))
        return self.head(x)


def odd() -> nn.Module:
    return nn.Sequential(
        nn.Linear(13, 35), nn.Tanh(), nn.Linear(35, 27), nn.Tanh(), nn.Linear(27, 1)
    )


TOKENS = torch.arange(14).view(2, 7)
MODELS = {
    "cnn": (cnn, torch.randn(5, 3, 16, 16)),
    "gpt": (GPT, {"tokens": TOKENS, "scale": 0.5}),
    "odd": (odd, (torch.randn(9, 13),)),
}


def rows(name: str, **options):
    make, inputs = MODELS[name]
    torch.manual_seed(0)
    found = guide.report(make(), inputs, **{"rounds": 0} | options)
    return found.set_index("layer")


@pytest.mark.parametrize("name", MODELS)
def test_a_model_comes_back_bit_for_bit(name):
    make, inputs = MODELS[name]
    model = make().train()
    next(iter(model.modules())).training = True
    list(model.modules())[-1].eval()
    modes = [module.training for module in model.modules()]
    state = copy.deepcopy(model.state_dict())
    drawn = torch.random.get_rng_state()
    guide.report(model, inputs, rounds=1)
    assert torch.equal(torch.random.get_rng_state(), drawn)
    assert [module.training for module in model.modules()] == modes
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    hooks = [m._forward_hooks or m._forward_pre_hooks for m in model.modules()]
    assert not any(hooks) and all(p.grad is None for p in model.parameters())
    assert torch.backends.mha.get_fastpath_enabled()


def test_a_cnn_whose_head_reads_a_flattened_map():
    found = rows("cnn")
    head = found.loc["5"]
    assert list(found.index) == ["5", "8"]
    assert (head["inputs"], head["outputs"], head["calls"], head["rows"]) == (1024, 32, 1, 5)
    assert head["axes"] == "16×8×8" and head["dense parameters"] == 1025 * 32
    # 1024 = 32 x 32 and 32 = 4 x 8, paired crosswise: 32 x 8 + 32 x 4 weights and 8 + 4 biases
    assert head["folding"] == "32×32 → 8×4" and head["ndlinear parameters"] == 384 + 12
    assert head["ndlinear macs"] == min(1024 * 4 + 32 * 4 * 8, 1024 * 8 + 8 * 32 * 4)
    assert head["monarch macs"] == head["monarch parameters"] - 32 == 32 * 32 * 8 + 8 * 32 * 4
    assert found.loc["8", "axes"] == ""


def test_a_gpt_block_with_shared_and_unused_layers():
    found = rows("gpt")
    assert list(found.index) == ["attention.out_proj", "up = again", "down", "spare", "head"]
    assert found["calls"].tolist() == [1, 2, 1, 0, 1]
    assert set(found["rows"]) == {14, 0}
    assert found.loc["spare", "notes"] == "these inputs do not reach it"
    assert found.loc["head", "notes"] == "weight shared with embed.weight"
    assert (found["notes"].drop(["head", "spare"]) == "").all()
    assert found.loc["up = again", "dense parameters"] == 24 * 96 + 96


def test_prime_sizes_keep_their_layer():
    found = rows("odd")
    assert ["axis of length one" in note for note in found["notes"]] == [True, False, True]
    assert found["folding"].tolist()[1] == "5×7 → 9×3"


def test_times_are_measured_for_layers_that_are_used():
    found = rows("gpt", rounds=2)
    names = [f"{name} µs" for name in ("dense", "low-rank", "monarch", "ndlinear")]
    assert (found.loc["up = again", names] > 0).all() and found.loc["spare", names].isna().all()


def test_separability_is_the_error_of_the_nearest_kronecker_product():
    torch.manual_seed(1)
    weight = torch.randn(24, 96)
    dims, hidden = guide.folding(96, 24)
    _, error = nearest_kronecker(weight, dims, hidden)
    assert guide.first_term(weight, dims, hidden) == pytest.approx(1 - error**2, abs=1e-9)
    chance = guide.by_chance(weight, dims, hidden)
    assert abs(chance - (1 - error**2)) < 0.05


def test_a_large_weight_is_iterated_to_the_same_share(monkeypatch):
    weight = torch.randn(36, 64)
    exact = guide.first_term(weight, (8, 8), (6, 6))
    monkeypatch.setattr(reporting, "EXACT", 4)
    assert guide.first_term(weight, (8, 8), (6, 6)) == pytest.approx(exact, rel=1e-3)


def test_a_separable_weight_is_found_and_a_random_one_is_not():
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(16, 64), nn.Linear(64, 16))
    model[0].weight.data = torch.kron(torch.randn(8, 4), torch.randn(8, 4))
    found = guide.report(model, torch.randn(3, 16), rounds=0)
    assert ["try from_linear" in note for note in found["notes"]] == [True, False]
    assert found["separable"][0] == pytest.approx(1) and found["by chance"][0] < 0.6


@pytest.mark.parametrize(("dense", "limit"), [((768, 3072), 20_000), ((12, 18), 0.5)])
def test_foldings_are_all_that_fit_the_budget(dense, limit):
    found = guide.foldings(*dense, parameters=limit)
    most = limit if limit > 1 else limit * (dense[0] + 1) * dense[1]
    wanted = {}
    for a in range(2, dense[0]):
        for c in range(2, dense[1]):
            if dense[0] % a or dense[1] % c:
                continue
            b, d = dense[0] // a, dense[1] // c
            size = a * c + b * d + c + d
            if size <= most:
                wanted[(a, b), (c, d)] = size, min(a * b * c + b * c * d, a * b * d + a * c * d)
    shown = zip(found["input_dims"], found["hidden_size"], found["parameters"], found["macs"])
    assert {(x, y): (p, m) for x, y, p, m in shown} == wanted and wanted
    assert found["parameters"].is_monotonic_increasing


def test_a_budget_of_operations_chooses_the_folding():
    full, cheap = rows("gpt"), rows("gpt", macs=0.2)
    name = "up = again"
    assert cheap.loc[name, "ndlinear macs"] <= 0.2 * 24 * 96 < full.loc[name, "ndlinear macs"]
    none = rows("gpt", macs=1)
    assert none.loc[name, "notes"] == "no folding within the budget" and "folding" not in none
    assert guide.foldings(7, 12).empty


def test_named_axes_count_and_wrong_ones_are_refused():
    found = rows("odd", axes={"2": (5, 7)})
    assert found.loc["2", "axes"] == "5×7"
    with pytest.raises(ValueError, match="the layer reads 35"):
        rows("odd", axes={"2": (5, 6)})
    with pytest.raises(ValueError, match="linear layers are"):
        rows("odd", axes={"nine": (5, 7)})


def broken(change):
    model = odd()
    change(model)
    return model


@pytest.mark.parametrize(
    ("model", "inputs", "error", "words"),
    [
        ("odd", None, TypeError, "torch.nn.Module, got str"),
        (nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()), None, ValueError, "Conv2d, ReLU"),
        (odd(), torch.randn(4, 12), ValueError, "does not run on these inputs"),
        (odd().to("meta"), None, ValueError, "meta device"),
        (nn.Sequential(nn.LazyLinear(3)), None, ValueError, "run the model once"),
        (
            broken(lambda m: setattr(m[0], "weight", nn.Parameter(torch.ones(35, 13).to(torch.uint8), False))),
            None, ValueError, "torch.uint8",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_reported_is_refused_in_plain_words(model, inputs, error, words):
    with pytest.raises(error, match=words):
        guide.report(model, inputs, rounds=0)


def test_a_quantised_model_is_refused():
    module = type("Linear", (nn.Module,), {"__module__": "torch.ao.nn.quantized.modules.linear"})()
    module.in_features = 3
    with pytest.raises(ValueError, match="before its quantisation"):
        guide.report(nn.Sequential(nn.Linear(3, 3), module), torch.randn(1, 3))


def test_a_model_that_changes_itself_is_noticed_and_buffers_are_put_back():
    class Restless(nn.Module):
        def __init__(self, parameter: bool):
            super().__init__()
            self.map = nn.Linear(4, 4)
            self.register_buffer("count", torch.zeros(()))
            self.parameter = parameter

        def forward(self, x):
            self.count += 1
            if self.parameter:
                self.map.weight.data += 1
                self.map.weight.mul_(1)
            return self.map(x)

    quiet = Restless(False)
    guide.report(quiet, torch.randn(2, 4), rounds=0)
    assert quiet.count == 0
    with pytest.raises(RuntimeError, match=r"map\.weight"):
        guide.report(Restless(True), torch.randn(2, 4), rounds=0)


@pytest.mark.parametrize("kind", ["ndlinear", "low-rank"])
def test_a_converted_copy_computes_what_its_table_says_and_the_model_stays(kind):
    torch.manual_seed(0)
    model = cnn().eval()
    before = copy.deepcopy(model.state_dict())
    smaller, fits = guide.convert(model, ["5"], share=0.3, kind=kind)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert type(model[5]) is nn.Linear and type(smaller[5]) is not nn.Linear
    assert fits["layer"].tolist() == ["5"] and smaller[8].weight is not model[8].weight
    row = fits.iloc[0]
    assert row["parameters"] == sum(p.numel() for p in smaller[5].parameters())
    assert row["dense parameters"] == 1025 * 32 and row["parameters"] <= 0.3 * 1025 * 32
    x = torch.randn(6, 1024)
    wanted = model[5](x) - model[5].bias
    lost = (smaller[5](x) - model[5](x)).norm() / wanted.norm()
    assert lost.item() == pytest.approx(row["error"], rel=0.2)  # random inputs see all directions
    assert not smaller[5].training and smaller(torch.randn(2, 3, 16, 16)).shape == (2, 10)


def test_a_bare_layer_can_be_converted_and_trained():
    layer, fits = guide.convert(nn.Linear(24, 36), ["(the model)"], share=0.5)
    layer(torch.randn(3, 24)).square().sum().backward()
    assert all(p.grad is not None for p in layer.parameters())
    assert "term" in fits["built"][0]


@pytest.mark.parametrize(
    ("made", "names", "options", "words"),
    [
        (cnn, ["0"], {}, "not a linear layer"),
        (cnn, ["5"], {"kind": "monarch"}, "kind must be one of"),
        (cnn, ["5"], {"share": 1e-4}, "of its parameters"),
        (GPT, ["up"], {}, "shares its weight"),
        (GPT, ["head"], {}, "shares its weight"),
        (GPT, ["attention.out_proj"], {}, "nn.MultiheadAttention"),
    ],
)
def test_what_cannot_be_converted_is_refused_in_plain_words(made, names, options, words):
    with pytest.raises(ValueError, match=words):
        guide.convert(made(), names, **options)
