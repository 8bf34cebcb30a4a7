"""`ndlinear_guide`: on three kinds of models that are not this book's, against counts and norms from formulas of their own."""

import copy
import functools
import json
import math
import sys

import pytest
import torch
from ndlinear_cases import Conv1D
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import prune

import ndlinear_guide as guide
from ndlinear import NdLinear, nearest_kronecker
from ndlinear_guide import layers

reporting = sys.modules["ndlinear_guide.report"]  # the function of this name hides it


def cnn() -> nn.Module:
    body = [nn.Conv2d(3, 16, 3, 2, 1), nn.BatchNorm2d(16), nn.ReLU()]
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
    maps = [nn.Linear(13, 35), nn.Linear(35, 27), nn.Linear(27, 1)]
    return nn.Sequential(maps[0], nn.Tanh(), maps[1], nn.Tanh(), maps[2])


TOKENS = torch.arange(14).view(2, 7)
MODELS = {
    "cnn": (cnn, torch.randn(5, 3, 16, 16)),
    "gpt": (GPT, {"tokens": TOKENS, "scale": 0.5}),
    "odd": (odd, (torch.randn(9, 13),)),
}


def rows(name: str, **options):
    make, inputs = MODELS[name]
    torch.manual_seed(0)
    found = guide.report(make(), inputs, **options)
    return found.set_index("layer")


@pytest.mark.parametrize("name", MODELS)
def test_a_model_comes_back_bit_for_bit(name):
    make, inputs = MODELS[name]
    model = make().train()
    list(model.modules())[-1].eval()
    modes = [module.training for module in model.modules()]
    state = copy.deepcopy(model.state_dict())
    drawn = torch.random.get_rng_state()
    guide.report(model, inputs)
    assert torch.equal(torch.random.get_rng_state(), drawn)
    assert [module.training for module in model.modules()] == modes
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    hooks = [m._forward_hooks or m._forward_pre_hooks for m in model.modules()]
    assert not any(hooks) and all(p.grad is None for p in model.parameters())
    assert torch.backends.mha.get_fastpath_enabled()


def test_a_cnn_whose_head_reads_a_flattened_map():
    found = rows("cnn")
    head = found.loc["4"]
    assert list(found.index) == ["4", "7"]
    assert (head["inputs"], head["outputs"], head["calls"], head["rows"]) == (1024, 32, 1, 5)
    assert head["axes"] == "16×8×8" and head["dense parameters"] == 1025 * 32
    # the map's axes are the modes; 32 = 2 x 4 x 4; weights and biases
    assert head["folding"] == ((16, 8, 8), (2, 4, 4))
    assert head["ndlinear parameters"] == 32 + 32 + 32 + 2 + 4 + 4
    # the first axis shrinks most and goes first
    assert head["ndlinear macs"] == 2 * 16 * 64 + 4 * 2 * 64 + 4 * 2 * 4 * 8
    assert found.loc["7", "axes"] == "" and found.loc["7", "folding"] == ((4, 8), (5, 2))
    assert [("axes" in a, a.startswith("do not convert")) for a in found["advice"]] == [(1, 1)] * 2
    assert "can use its axes" in head["advice"] and "no axes are known" in found.loc["7", "advice"]


def test_a_gpt_block_with_shared_and_unused_layers():
    found = rows("gpt")
    assert list(found.index) == ["attention.out_proj", "up = again", "down", "spare", "head"]
    assert found["calls"].tolist() == [1, 2, 1, 0, 1]
    assert set(found["rows"]) == {14, 0}
    assert found.loc["spare", "advice"] == "keep it: nothing calls it on these inputs"
    assert found.loc["head", "advice"] == "keep it: weight shared with embed.weight"
    assert found["advice"].drop(["head", "spare"]).str.startswith("do not convert it").all()
    assert found.loc["up = again", "dense parameters"] == 24 * 96 + 96


def test_prime_sizes_keep_their_layer():
    found = rows("odd")
    assert ["no product of 2" in advice for advice in found["advice"]] == [True, False, True]
    assert found["folding"].tolist()[1] == ((5, 7), (9, 3))


def test_separability_is_the_error_of_the_nearest_kronecker_product():
    """Of more modes than two it is bounded by two of them."""
    weight = torch.randn(24, 96)
    dims, hidden = layers.folding(96, 24)
    _, error = nearest_kronecker(weight, dims, hidden)
    assert guide.first_term(weight, dims, hidden) == pytest.approx(1 - error**2, abs=1e-9)
    assert abs(guide.by_chance(weight, dims, hidden) - (1 - error**2)) < 0.05
    dims, hidden = (2, 3, 4), (3, 2, 2)
    _, error = nearest_kronecker(weight := torch.randn(12, 24), dims, hidden, restarts=5)
    cuts = (((2, 12), (3, 4)), ((6, 4), (6, 2)))
    least = min(guide.first_term(weight, *cut) for cut in cuts)
    assert 1 - error**2 <= guide.first_term(weight, dims, hidden) == least
    product = torch.kron(torch.kron(torch.randn(3, 2), torch.randn(2, 3)), torch.randn(2, 4))
    assert guide.first_term(product, dims, hidden) == pytest.approx(1)


def test_a_large_weight_is_iterated_to_the_same_share(monkeypatch):
    """Entries without structure have no gap behind their largest singular value, where an iteration is slowest."""
    weights = [torch.randn(240, 384), torch.zeros(240, 384)]
    exact = [guide.first_term(w, (16, 24), (16, 15)) for w in weights]
    monkeypatch.setattr(reporting, "EXACT", 4)
    found = [guide.first_term(w, (16, 24), (16, 15)) for w in weights]
    assert found[0] == pytest.approx(exact[0], rel=reporting.TOLERANCE)
    assert found[1] == exact[1] == 0


def test_a_separable_weight_is_found_and_a_random_one_is_not():
    model = nn.Sequential(nn.Linear(16, 64), nn.Linear(64, 16))
    model[0].weight.data = torch.kron(torch.randn(8, 4), torch.randn(8, 4))
    found = guide.report(model, torch.randn(3, 16))
    assert [advice.startswith("convert it") for advice in found["advice"]] == [True, False]
    assert found["separable"][0] == pytest.approx(1) and found["by chance"][0] < 0.6


def filled(number: float, dtype: torch.dtype) -> nn.Module:
    model = odd()
    model[0].weight = nn.Parameter(torch.full((35, 13), number, dtype=dtype), False)
    return model


def quantised() -> nn.Module:
    module = type("Linear", (nn.Module,), {"__module__": "torch.ao.nn.quantized.modules.linear"})()
    module.in_features = 3
    return nn.Sequential(nn.Linear(3, 3), module)


@pytest.mark.parametrize(
    ("model", "inputs", "words"),
    [
        ("odd", None, "torch.nn.Module, got str"),
        (nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()), None, "Conv2d, ReLU"),
        (
            nn.Sequential(NdLinear((2, 3), (2, 3))),
            None,
            r"left to exchange: .* NdLinear already \(0\)",
        ),
        (odd(), torch.randn(4, 12), "does not run on these inputs"),
        (odd().to("meta"), None, "meta device"),
        (nn.Sequential(nn.LazyLinear(3)), None, "run the model once"),
        (filled(1, torch.uint8), None, "torch.uint8"),
        (filled(math.nan, torch.float32), None, "0 has weights that are not finite"),
        (quantised(), None, "before its quantisation"),
    ],
)
def test_what_cannot_be_reported_is_refused_in_plain_words(model, inputs, words):
    with pytest.raises(TypeError if model == "odd" else ValueError, match=words):
        guide.report(model, inputs)


def test_a_model_that_changes_itself_is_noticed_and_buffers_are_put_back():
    class Restless(nn.Linear):
        def forward(self, x):
            self.count = self.count.add_(1) + 1
            self.last = x
            if self.writes:
                self.weight.mul_(1)
            return super().forward(x)

    model = nn.Sequential(Restless(4, 4))
    model[0].register_buffer("count", torch.zeros(()))
    model[0].register_buffer("last", None)
    model[0].writes = False
    guide.report(model, torch.randn(2, 4))
    assert model[0].count == 0 and model[0].last is None
    model[0].writes = True
    with pytest.raises(RuntimeError, match=r"0\.weight"):
        guide.report(model, torch.randn(2, 4))


@pytest.mark.parametrize("kind", ["ndlinear", "low-rank"])
def test_a_converted_copy_computes_what_its_table_says_and_is_read_back(kind, tmp_path):
    """From its state and plain data; the model stays."""
    model = cnn().eval().requires_grad_(False)
    before = copy.deepcopy(model.state_dict())
    smaller, fits = guide.convert(model, ["4", "7"], share=0.4, kind=kind)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert type(model[4]) is nn.Linear and smaller[1].weight is not model[1].weight
    row = fits.iloc[0]
    assert row["layer"] == "4" and row["dense parameters"] == 1025 * 32
    size = sum(p.numel() for p in smaller[4].parameters() if p.requires_grad)
    assert row["parameters"] == size <= 0.4 * 1025 * 32
    if kind == "ndlinear":  # two modes, in the cheaper order of each
        (a, b), (c, d) = smaller[4][1].input_dims, smaller[4][1].hidden_size
        one = min(a * b * c + b * c * d, a * b * d + a * c * d)
        assert row["macs"] == smaller[4][1].rank * one
    else:  # nothing of this rank is nearer
        s = torch.linalg.svdvals(model[4].weight)[smaller[4][0].out_features :]
        assert row["error"] == pytest.approx((s.norm() / model[4].weight.norm()).item(), rel=1e-4)
    made = {type(module).__module__.partition(".")[0] for module in smaller.modules()}
    assert made <= {"torch", "ndlinear"}, "a saved copy is read where there is no guide"
    bias = smaller[4](torch.zeros(1, 1024))
    assert torch.allclose(bias, model[4].bias, atol=1e-6)
    gap = (smaller[4](torch.eye(1024)) - bias).T - model[4].weight
    assert (gap.norm() / model[4].weight.norm()).item() == pytest.approx(row["error"], rel=1e-4)
    torch.save(smaller.state_dict(), tmp_path / "state.pt")
    plan = json.loads(json.dumps(dict(zip(fits["layer"], fits["built"]))))
    again = guide.rebuild(cnn().eval(), plan)
    again.load_state_dict(torch.load(tmp_path / "state.pt"))
    x = torch.randn(2, 3, 16, 16)
    assert torch.equal(again(x), smaller(x)) and not again[4].training


def test_a_plan_of_other_sizes_is_refused_and_a_model_may_be_one_layer():
    made = functools.partial(nn.Linear, 24, 36, bias=False)
    for kind in ("ndlinear", "low-rank"):
        layer, fits = guide.convert(made(), ["(the model)"], share=0.5, kind=kind)
        again = guide.rebuild(made(), {"(the model)": fits["built"][0]})
        again.load_state_dict(layer.state_dict())
        assert not again(torch.zeros(1, 24)).any()
    wrong = {"4": {"input_dims": [32, 32], "hidden_size": [4, 9], "rank": 1}}
    with pytest.raises(ValueError, match="other sizes than 1024 -> 32"):
        guide.rebuild(cnn(), wrong)
    for plan in ({}, {"rank": 0}, {"rank": 1, "input_dims": [32, 32]}):
        with pytest.raises(ValueError, match="is no plan: give a rank of at least 1, and both"):
            guide.rebuild(cnn(), {"4": plan})


@pytest.mark.parametrize(
    ("made", "names", "options", "words"),
    [
        (cnn, ["0"], {}, "not a linear layer"),
        (cnn, ["4"], {"kind": "monarch"}, "kind must be 'ndlinear' or"),
        (lambda: NdLinear((2, 3), (2, 3)), ["align_layers.0"], {}, "left to exchange"),
        (cnn, ["4"], {"share": 1e-4}, "of its parameters"),
        (cnn, ["4"], {"share": 5.0}, "at most one"),
        (
            lambda: nn.Sequential(prune.random_unstructured(nn.Linear(4, 4), "weight", 0.5)),
            ["0"],
            {},
            "a hook",
        ),
        (cnn, ["4"], {"share": 1e-4, "kind": "low-rank"}, "of its parameters"),
        (GPT, ["up"], {}, "shares its weight"),
        (GPT, ["head"], {}, "shares its weight"),
        (GPT, ["attention.out_proj"], {}, "nn.MultiheadAttention"),
    ],
)
def test_what_cannot_be_converted_is_refused_in_plain_words(made, names, options, words):
    with pytest.raises(ValueError, match=words):
        guide.convert(made(), names, **options)


def test_conv1d_of_gpt2_is_counted_and_converted():
    model, x = nn.Sequential(Conv1D(96, 24), nn.GELU(), Conv1D(24, 96)), torch.randn(5, 24)
    found = guide.report(model, x)
    assert found[["layer", "inputs", "outputs"]].to_numpy().tolist() == [
        ["0", 24, 96],
        ["2", 96, 24],
    ]
    smaller, fits = guide.convert(model, ["0"], share=0.5, kind="low-rank")
    lost = (smaller[0](x) - model[0](x)).norm() / (model[0](x) - model[0].bias).norm()
    assert 0 < lost.item() == pytest.approx(fits["error"][0], rel=0.3)
    assert guide.swap(model, [("0", "2")], "narrow")(x).shape == (5, 24)


class Named(nn.Sequential):
    def forward(self, x):
        return functools.reduce(lambda y, layer: layer(input=y), self, x)


def test_modes_of_an_ndlinear_are_no_linear_layers_and_a_later_flatten_has_the_axes_it_joins():
    """Where layers are called by keyword, and a bias is pruned."""
    model = nn.Sequential(NdLinear((4, 6), (4, 6)), Named(nn.Flatten(2), nn.Linear(24, 8)))
    prune.l1_unstructured(model[1][1], "bias", 0.5)
    found = guide.report(model, torch.randn(3, 5, 4, 6))
    columns = ["layer", "axes", "dense parameters"]
    assert found[columns].to_numpy().tolist() == [["1.1", "4×6", 25 * 8]]


def test_named_axes_count_and_a_conversion_takes_the_folding_of_the_report():
    found = rows("odd", axes={"2": (5, 1, 7)})
    folding = found.loc["2", "folding"]
    assert found.loc["2", "axes"] == "5×7" and folding == ((5, 7), (3, 9))
    assert "can use its axes" in found.loc["2", "advice"]
    for axes, words in (({"2": (5, 6)}, "layer reads 35"), ({"nine": (5, 7)}, "linear layers are")):
        with pytest.raises(ValueError, match=words):
            rows("odd", axes=axes)
    smaller, fits = guide.convert(odd(), {"2": folding}, share=0.5)
    assert (smaller[2][1].input_dims, smaller[2][1].hidden_size) == folding
    assert fits["macs"][0] <= fits["dense macs"][0]
    with pytest.raises(ValueError, match="prod"):
        guide.convert(odd(), {"2": ((3, 5), (2, 2))})
