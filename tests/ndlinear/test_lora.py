"""NdLinearLoRA: zero at start, exact to merge and to take back, small to save, hard to lose."""

import copy
import importlib.util
import json
import pathlib
import re
import sys

import pytest
import torch
import torch.distributed.fsdp
from ndlinear_cases import randomise
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import ndlinear as nd
from ndlinear_lora import (
    NdLinearLoRA,
    apply_ndlinear_lora,
    load_lora,
    lora_state_dict,
    merge_lora,
    save_lora,
)

OPTIONS = [
    {},
    {"alpha": 2.5},
    {"bias": True, "alpha": 0.5},
    {"bias": True, "transform_outer": False},
    {"input_dims": (2, 3, 4), "hidden_size": (5, 3, 2), "bias": True},
    {"input_dims": (24, 1), "hidden_size": (3, 10), "init": "unit"},
    {"input_dims": (24,), "hidden_size": (30,)},
]
options = pytest.mark.parametrize("options", OPTIONS, ids=str)
base_bias = pytest.mark.parametrize("base_bias", [True, False], ids=["with bias", "without bias"])


def trained(base, **options):
    """An adapter that does something: all its parameters drawn anew."""
    layer = NdLinearLoRA(base, **options)
    randomise(layer.adapter)
    return layer


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q_proj, self.v_proj = nn.Linear(16, 16), nn.Linear(16, 16, bias=False)
        self.norm = nn.LayerNorm(16)

    def forward(self, x):
        return self.norm(self.q_proj(x) * self.v_proj(x))


def network():
    torch.manual_seed(0)
    body = nn.Sequential(
        Attention(), Attention(), nn.ModuleDict({"proj": nn.Linear(16, 4)})["proj"]
    )
    return nn.ModuleDict({"body": body, "head": nn.Linear(4, 3)})


def run(model, x):
    return model["head"](model["body"](x))


# ------------------------------------------------------------------------------------------------------------ one layer
@options
@base_bias
def test_the_formula(options, base_bias):
    base = nn.Linear(24, 30, base_bias, dtype=torch.float64)
    layer = trained(base, **options)
    a, x = layer.adapter, torch.randn(2, 7, 24, dtype=torch.float64)
    update = a(x.reshape(2, 7, *a.input_dims)).reshape(2, 7, 30)
    torch.testing.assert_close(
        layer(x), base(x) + options.get("alpha", 1.0) * update, atol=1e-10, rtol=1e-10
    )
    assert layer(x[0, 0]).shape == (30,) and layer(x[:0]).shape == (0, 7, 30)


@options
def test_zero_at_start_and_the_first_step_moves_the_last_mode(options):
    base = nn.Linear(24, 30)
    layer = NdLinearLoRA(base, **options)
    x = torch.randn(5, 24)
    assert torch.equal(layer(x), base(x)), "not even a rounding error"
    assert all(n.startswith("adapter.") == p.requires_grad for n, p in layer.named_parameters())
    (layer(x) - torch.randn(5, 30)).square().sum().backward()
    last = layer.adapter.align_layers[layer.adapter.order[-1]]
    for mode in layer.adapter.align_layers:
        for p in mode.parameters():
            assert (p.grad.abs().sum() > 0) == (mode is last)
            assert mode is last or p.abs().sum() > 0
    torch.optim.SGD(layer.adapter.parameters(), 0.01).step()
    layer.zero_grad()
    (layer(x) - torch.randn(5, 30)).square().sum().backward()
    assert all(p.grad.abs().sum() > 0 for p in layer.adapter.parameters()), (
        "from the second step on all of them"
    )


@options
@base_bias
def test_merge_and_unmerge(options, base_bias):
    torch.manual_seed(0)
    layer = trained(nn.Linear(24, 30, base_bias), **options)
    with torch.no_grad():
        for p in layer.adapter.parameters():
            p.mul_(0.5)
    x = torch.randn(50, 24)
    y, state = layer(x), copy.deepcopy(layer.state_dict())
    assert not layer.merged
    layer.merge()
    layer.merge()
    assert layer.merged
    scale = max(1.0, y.abs().max().item())
    assert (layer(x) - y).abs().max() < 1e-6 * scale
    assert (nd.to_linear(layer)(x) - y).abs().max() < 1e-6 * scale
    assert list(layer.state_dict()) == list(state), "merging leaves no trace in a checkpoint"
    assert all(torch.equal(v, state[k]) for k, v in layer.state_dict().items())
    assert torch.equal(copy.deepcopy(layer)(x), layer(x))
    assert copy.deepcopy(layer).to(torch.float64)(x.double()).dtype == torch.float64
    layer.unmerge()
    layer.unmerge()
    assert not layer.merged and torch.equal(layer(x), y), "bit by bit"


def test_train_and_eval_do_not_change_what_is_merged():
    layer = trained(nn.Linear(6, 4), dropout=0.5)
    x = torch.randn(20, 6)
    layer.train()
    assert not torch.equal(layer(x), layer(x)), "dropout acts on the update"
    layer.dropout.p = 1.0
    assert torch.equal(layer(x), layer.base_layer(x)), "and leaves the base alone"
    layer.eval()
    y = layer(x)
    layer.merge()
    for mode in (True, False):
        layer.train(mode)
        assert layer.merged
        torch.testing.assert_close(layer(x), y, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_base_with_a_float32_adapter(dtype, tmp_path):
    base = nn.Linear(6, 4).to(dtype)
    assert NdLinearLoRA(copy.deepcopy(base)).adapter.weights[0].dtype == dtype
    layer = trained(base, dtype=torch.float32, alpha=0.1)
    x = torch.randn(5, 6, dtype=dtype)
    y = layer(x)
    y.float().sum().backward()
    assert y.dtype == dtype
    assert layer.weight.dtype == dtype
    assert layer.adapter.weights[0].grad.dtype == torch.float32
    layer.merge()
    assert (layer(x) - y).abs().max() < 0.05
    save_lora(nn.Sequential(layer), tmp_path / "a")
    (again,) = load_lora(nn.Sequential(copy.deepcopy(base)), tmp_path / "a")
    assert again.adapter.weights[0].dtype == torch.float32
    assert torch.equal(again.adapter.weights[0], layer.adapter.weights[0])


# --------------------------------------------------------------------------------- code that reads weights, does not call
def test_encoder_fast_path_and_attention_see_the_update():
    """In eval mode torch's encoder layer takes the weights of its layers, attention that of out_proj, and none is called."""
    torch.manual_seed(0)
    encoder = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    x = torch.randn(3, 5, 16)
    before = encoder(x)
    names = ["linear1", "linear2", "self_attn.out_proj"]
    apply_ndlinear_lora(encoder, names, alpha=2.0)
    torch.testing.assert_close(encoder(x), before)
    dense = copy.deepcopy(encoder)
    for name in names:
        randomise(encoder.get_submodule(name).adapter)
        dense.set_submodule(name, nd.to_linear(encoder.get_submodule(name)))
    slow = encoder.train()(x)
    slow.sum().backward()
    assert encoder.self_attn.out_proj.adapter.weights[0].grad.abs().sum() > 0
    with torch.no_grad():
        fast = encoder.eval()(x)
    for other in (fast, dense(x)):
        torch.testing.assert_close(other, slow, atol=1e-4, rtol=1e-4)


# --------------------------------------------------------------------------------------------------------- whole models
@pytest.mark.parametrize(
    "patterns, found",
    [
        ("q_proj", ["body.0.q_proj", "body.1.q_proj"]),
        (
            ["q_proj", "v_proj"],
            ["body.0.q_proj", "body.0.v_proj", "body.1.q_proj", "body.1.v_proj"],
        ),
        ("body.0.*", ["body.0.q_proj", "body.0.v_proj"]),
        ("1.q_proj", ["body.1.q_proj"]),
        ("*[02]*", ["body.0.q_proj", "body.0.v_proj", "body.2"]),
        (("head", "body.2"), ["body.2", "head"]),
        (re.compile(r"body\.\d\.q_proj"), ["body.0.q_proj", "body.1.q_proj"]),
    ],
)
def test_patterns(patterns, found):
    model = apply_ndlinear_lora(network(), patterns)
    assert adapted_names(model) == found


def test_apply_returns_the_model_freezes_the_rest_and_passes_options():
    model, x = network(), torch.randn(2, 5, 16)
    y = run(model, x)
    options = {"alpha": 3, "bias": True, "hidden_size": (2, 8)}
    assert apply_ndlinear_lora(model, "q_proj", **options) is model
    assert torch.equal(run(model, x), y)
    adapter = model["body"][0].q_proj
    assert adapter.alpha == 3
    assert adapter.adapter.hidden_size == (2, 8)
    assert adapter.adapter.biases[0] is not None
    assert trainable(model) == set(lora_state_dict(model)) and len(trainable(model)) == 8
    model = apply_ndlinear_lora(network(), "q_proj", freeze=False)
    frozen = {name for name, _ in model.named_parameters()} - trainable(model)
    assert frozen == {f"body.{i}.q_proj.base_layer.{k}" for i in (0, 1) for k in ("weight", "bias")}


def test_apply_twice_adds_and_keeps():
    model = apply_ndlinear_lora(network(), "q_proj")
    first = model["body"][0].q_proj
    apply_ndlinear_lora(model, ["q_proj", "v_proj"])  # what is adapted already is left alone
    assert model["body"][0].q_proj is first and isinstance(first.base_layer, nn.Linear)
    assert all(p.requires_grad for p in first.adapter.parameters())
    assert len(lora_state_dict(model)) == 8


def test_modes_of_an_ndlinear_are_not_adapted():
    model = nn.Sequential(nd.NdLinear((4, 4), (4, 4)), nn.Flatten(), nn.Linear(16, 2))
    apply_ndlinear_lora(model, "*")
    assert type(model[0].align_layers[0]) is nn.Linear
    assert isinstance(model[2], NdLinearLoRA)


def test_a_shared_layer_stays_shared(tmp_path):
    def build():
        torch.manual_seed(0)
        shared = nn.Linear(6, 6)
        return nn.ModuleDict({"a": shared, "b": nn.Sequential(shared, nn.Linear(6, 6))})

    model = apply_ndlinear_lora(build(), "b.0")
    assert isinstance(model["a"], NdLinearLoRA) and model["a"] is model["b"][0]
    randomise(model["a"].adapter)
    save_lora(model, tmp_path / "a.safetensors")
    other = load_lora(build(), tmp_path / "a.safetensors")
    x = torch.randn(3, 6)
    assert other["a"] is other["b"][0] and torch.equal(other["b"](x), model["b"](x))


# ---------------------------------------------------------------------------------------------------------- adapter files
def stirred(model):
    """The model with adapters that do something."""
    for name in adapted_names(model):
        randomise(model.get_submodule(name).adapter)
    return model


def adapted(**options):
    return stirred(apply_ndlinear_lora(network(), ["q_proj", "head"], **options))


def adapted_names(model):
    kind = NdLinearLoRA
    return [name for name, module in model.named_modules() if isinstance(module, kind)]


SAVED = [
    {},
    {"alpha": 2.0, "bias": True, "transform_outer": False},
    {"dropout": 0.25, "init": "unit", "execution": "recompute"},
]


@pytest.mark.parametrize("options", SAVED, ids=str)
def test_save_and_load(options, tmp_path):
    """Into the bare model, and into an adapted one, whose parameters stay those of the optimiser."""
    model, x, file = adapted(**options).eval(), torch.randn(2, 5, 16), tmp_path / "a.safetensors"
    save_lora(model, file)
    assert set(load_file(file)) == set(lora_state_dict(model))
    bare = network()
    assert load_lora(bare, file) is bare
    config = model["head"].config
    assert bare["head"].config == config == config | options
    own = options if "dropout" not in options else {}  # what does not change the map may differ
    other = apply_ndlinear_lora(network(), ["q_proj", "head"], **own)
    before = [id(p) for p in other.parameters()]
    other["head"].merge()
    load_lora(other, file)
    assert [id(p) for p in other.parameters()] == before
    for loaded in (bare, other):
        assert torch.equal(run(loaded.eval(), x), run(model, x))


def trainable(model):
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


def test_what_is_trained_after_loading_is_what_is_saved(tmp_path):
    def stored(model):
        save_lora(model, tmp_path / "a.safetensors")
        return load_lora(network(), tmp_path / "a.safetensors")

    options = {"modules_to_save": "head"}
    model = stored(apply_ndlinear_lora(network(), "q_proj", **options))
    assert trainable(model) == set(lora_state_dict(model))
    x, optimiser = torch.randn(2, 5, 16), torch.optim.SGD(model.parameters(), 0.1)
    run(model, x).square().sum().backward()
    optimiser.step()
    assert torch.equal(run(stored(model), x), run(model, x))
    loose = load_lora(network(), tmp_path / "a.safetensors", freeze=False)
    assert "body.0.norm.weight" in trainable(loose)
    more = apply_ndlinear_lora(model, "v_proj")
    assert {"head.weight", "head.bias"} < trainable(more), "a second call keeps what was chosen"


def wrapped_inside(model):
    """Compiled and recomputed parts, which put words into the names of what is in them."""
    model["body"][0] = torch.compile(model["body"][0], backend="eager")
    model["body"][1] = checkpoint_wrapper(model["body"][1])
    return model


WRAPPERS = [lambda m: torch.compile(m, backend="eager"), nn.DataParallel, wrapped_inside]


@pytest.mark.parametrize("wrap", WRAPPERS, ids=["compile", "data", "parts"])
def test_what_stands_around_a_model_or_its_parts_is_not_in_its_file(wrap, tmp_path):
    def own(model):
        return model if isinstance(model, nn.ModuleDict) else next(model.children())

    model, x, file = wrap(network()), torch.randn(2, 5, 16), tmp_path / "a.safetensors"
    assert apply_ndlinear_lora(model, ["q_proj", "head"]) is model
    save_lora(stirred(model), file)
    names = {name.partition(".adapter")[0] for name in load_file(file)}
    assert names == {"body.0.q_proj", "body.1.q_proj", "head"}
    for other in (network(), wrap(network())):
        assert load_lora(other, file) is other
        torch.testing.assert_close(run(own(other), x), run(own(model), x))


def test_a_lone_adapter_can_be_saved_too(tmp_path):
    layer = trained(nn.Linear(6, 4))
    save_lora(layer, tmp_path / "adapter.safetensors")
    other = NdLinearLoRA(copy.deepcopy(layer.base_layer))
    load_lora(other, tmp_path / "adapter.safetensors")
    assert torch.equal(other(torch.ones(6)), layer(torch.ones(6)))
    with pytest.raises(ValueError, match="does not fit"):
        load_lora(nn.Linear(6, 4), tmp_path / "adapter.safetensors")


def test_load_refuses_another_alpha_fold_model_or_file(tmp_path):
    save_lora(adapted(alpha=2.0), tmp_path / "adapter.safetensors")
    for options in (
        {"alpha": 1.0},
        {"alpha": 2.0, "bias": True},
        {"alpha": 2.0, "transform_outer": False},
    ):
        model = apply_ndlinear_lora(network(), ["q_proj", "head"], **options)
        with pytest.raises(ValueError, match=r"adapter.safetensors.*'alpha': 2.0.*body.0.q_proj"):
            load_lora(model, tmp_path / "adapter.safetensors")
    smaller = nn.ModuleDict({"head": nn.Linear(4, 3)})
    with pytest.raises(ValueError, match=r"does not fit in \['body.0.q_proj', 'body.1.q_proj'\]"):
        load_lora(smaller, tmp_path / "adapter.safetensors")
    assert type(smaller["head"]) is nn.Linear, "nothing was changed"
    save_file({"head.adapter.align_layers.0.weight": torch.zeros(2, 2)}, tmp_path / "other")
    with pytest.raises(ValueError, match=r"other adapts \{\}"):
        load_lora(network(), tmp_path / "other")


def write_changed(edit, path):
    """A file of adapters whose tensors were changed by somebody."""
    save_lora(adapted(), path)
    with safe_open(path, "pt") as file:
        about, tensors = file.metadata(), {n: file.get_tensor(n) for n in file.keys()}  # noqa: SIM118
    save_file(edit(tensors), path, about)


FIRST = "head.adapter.align_layers.0.weight"
CHANGES = [
    (
        lambda t: t | {"head.base_layer.weight": torch.zeros(3, 4)},
        r"foreign \['head.base_layer.wei",
    ),
    (lambda t: t | {"body.0.norm.bias": torch.zeros(16)}, r"foreign \['body.0.norm.bias'\]"),
    (lambda t: {n: v for n, v in t.items() if n != FIRST}, rf"missing \['{FIRST}'\]"),
    (lambda t: {}, r"missing \['body.0.q_proj.adapter.align_layers.0.weight'"),
    (
        lambda t: t | {FIRST: torch.zeros(2, 2)},
        rf"of other sizes \['{FIRST} \(2, 2\), not \(1, 2\)'\]",
    ),
    (lambda t: {n: v.to(torch.complex64) for n, v in t.items()}, "complex"),
    (lambda t: t | {FIRST: torch.full((1, 2), float("nan"))}, rf"{FIRST} .* not finite"),
    (lambda t: t | {FIRST: torch.full((1, 2), -float("inf"))}, rf"{FIRST} .* not finite"),
]


@pytest.mark.parametrize("make", [adapted, network])
@pytest.mark.parametrize(("edit", "words"), CHANGES, ids=range(len(CHANGES)))
def test_load_refuses_a_file_that_holds_anything_but_its_adapters(edit, words, make, tmp_path):
    write_changed(edit, tmp_path / "a.safetensors")
    model = make()
    before, trained = copy.deepcopy(model.state_dict()), trainable(model)
    with pytest.raises(ValueError, match=words):
        load_lora(model, tmp_path / "a.safetensors")
    assert trainable(model) == trained and list(model.state_dict()) == list(before)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


# ------------------------------------------------------------------------------------- what people of other libraries type
class TinyLM(nn.Module):
    """What transformers' models have: an output layer that may share the weight of the embedding."""

    def __init__(self, tied):
        super().__init__()
        self.embed = nn.Embedding(10, 16)
        self.body = Attention()
        self.lm_head = nn.Linear(16, 10, bias=False)
        if tied:
            self.tie_weights()

    def get_output_embeddings(self):
        return self.lm_head

    def tie_weights(self):
        self.lm_head.weight = self.embed.weight


def test_all_linear_leaves_the_output_layer_alone_unless_it_is_named():
    model = apply_ndlinear_lora(TinyLM(tied=True), "all-linear")
    assert adapted_names(model) == ["body.q_proj", "body.v_proj"]
    for targets, more in (
        (["all-linear", "lm_head"], ["body.q_proj", "body.v_proj"]),
        ("lm_head", []),
    ):
        model = apply_ndlinear_lora(TinyLM(tied=False), targets)
        assert adapted_names(model) == [*more, "lm_head"]
    assert len(adapted_names(apply_ndlinear_lora(network(), "all-linear"))) == 6
    model = apply_ndlinear_lora(network(), "all-linear", modules_to_save="head")
    assert len(adapted_names(model)) == 5 and {"head.weight", "head.bias"} < trainable(model)


def test_tied_modules_to_save_are_written_and_read(tmp_path):
    def build():
        names = ["embed", "lm_head"]
        return apply_ndlinear_lora(TinyLM(True), "q_proj", modules_to_save=names)

    model = build()
    save_lora(model, tmp_path / "a.safetensors")
    other = load_lora(TinyLM(tied=True), tmp_path / "a.safetensors")
    assert other.lm_head.weight is other.embed.weight
    assert torch.equal(other.embed.weight, model.embed.weight)


NONE = r"target_modules .* match none .*'body.0.q_proj', 'body.0.v_proj'.*'head'"
WRONG = [
    *(
        (network, pattern, {}, NONE)
        for pattern in ("proj", "Q_PROJ", "norm", r"body\.\d\.q_proj", [])
    ),
    (network, ["q_proj", "v_prj"], {}, r"\['v_prj'\] match none"),
    (adapted, ["q_proj", "head"], {}, "are adapted already"),
    (network, "head", {"modules_to_save": "head"}, "modules_to_save"),
    (network, "q_proj", {"modules_to_save": "nothing"}, "'nothing' matches no module"),
    (network, "q_proj", {"dtype": "bf16"}, "no dtype 'bf16': give one such as 'bfloat16'"),
    (network, "q_proj", {"r": 8}, "has no r: leave it out"),
    (network, "q_proj", {"lora_alpha": 8}, "has no lora_alpha: alpha="),
    (network, "q_proj", {"lora_dropout": 0.1}, "has no lora_dropout: dropout="),
    (network, ["q_proj", "head"], {"input_dims": (4, 4), "hidden_size": (4, 4)}, "do not multiply"),
    (network, ["q_proj", "head"], {"dropout": 2.0}, "dropout"),
    (network, "q_proj", {"dropout": float("nan")}, "must be finite numbers"),
    (network, "q_proj", {"alpha": -float("inf")}, "must be finite numbers"),
    (network, ["q_proj", "head"], {"init": "none"}, "init must be"),
    (network, ["q_proj", "head"], {"colour": "red"}, "colour"),
    (lambda: TinyLM(True), "lm_head", {}, r"\['embed', 'lm_head'\] share one weight"),
]


@pytest.mark.parametrize(("make", "targets", "options", "words"), WRONG, ids=range(len(WRONG)))
def test_what_cannot_be_adapted_is_said_and_nothing_is_changed(make, targets, options, words):
    model = make()
    kinds, before, state = list(map(type, model.modules())), trainable(model), torch.get_rng_state()
    with pytest.raises((ValueError, TypeError), match=words):
        apply_ndlinear_lora(model, targets, **options)
    assert list(map(type, model.modules())) == kinds
    assert trainable(model) == before, "not even frozen"
    assert torch.equal(torch.get_rng_state(), state), "nor drawn"


# --------------------------------------------------------------------------------------------------- bases that hold no floats
class Integers(nn.Linear):
    """A linear layer that keeps its weight in whole numbers, as quantised ones do."""

    def __init__(self, inputs, outputs):
        super().__init__(inputs, outputs)
        whole = (self.weight.detach() * 127).round().to(torch.int8).view(torch.uint8)
        self.weight = nn.Parameter(whole, requires_grad=False)

    def forward(self, x):
        return nn.functional.linear(x, self.weight.view(torch.int8).to(x.dtype) / 127, self.bias)


class Packed(torch.Tensor):
    """What a layer of torchao holds: a weight that says float32 and is none."""


Packed.__module__ = "torchao.quantization"


class Torchao(nn.Linear):
    """A linear layer whose weight says that it is torchao's."""

    def __init__(self, inputs, outputs):
        super().__init__(inputs, outputs)
        weight = self.weight.detach().as_subclass(Packed)
        self.weight = nn.Parameter(weight, requires_grad=False)


@pytest.mark.parametrize("kind", [Integers, Torchao])
def test_an_adapter_on_a_quantised_base_trains_and_refuses_to_merge(kind):
    model = nn.Sequential(kind(24, 30))
    x = torch.randn(5, 24)
    before = model(x)
    layer = apply_ndlinear_lora(model, "0")[0]
    assert layer.adapter.weights[0].dtype == torch.float32 and torch.equal(model(x), before)
    randomise(layer.adapter)
    model(x).square().sum().backward()
    assert all(p.grad.abs().sum() > 0 for p in layer.adapter.parameters())
    for refused in (layer.merge, lambda: layer.weight, lambda: nd.to_linear(layer)):
        with pytest.raises(
            TypeError, match=r"holds a torch.*cannot be merged into quantised weights"
        ):
            refused()
    assert not layer.merged


def test_a_file_without_dtype_is_read(tmp_path):
    """Files that were written before the dtype stood in them."""
    model = adapted()
    nd_configs = {n: m.config for n, m in model.named_modules() if hasattr(m, "merged_weight")}
    for config in nd_configs.values():
        del config["dtype"]
    about = {"ndlinear_lora": json.dumps(nd_configs)}
    save_file(lora_state_dict(model), tmp_path / "old.safetensors", about)
    x = torch.randn(2, 5, 16)
    for target in (network(), adapted()):
        read = load_lora(target, tmp_path / "old.safetensors")
        assert torch.equal(run(read, x), run(model, x))


def test_load_fills_a_model_on_the_meta_device(tmp_path):
    model = adapted()
    save_lora(model, tmp_path / "a.safetensors")
    with torch.device("meta"):
        empty = network()
    loaded = load_lora(empty, tmp_path / "a.safetensors")
    assert loaded["head"].base_layer.weight.is_meta
    for name, value in lora_state_dict(loaded).items():
        assert torch.equal(value, model.state_dict()[name])
    assert all(p.requires_grad for p in loaded["head"].adapter.parameters())


# -------------------------------------------------------------------------------- hostile files, and what must not be lost
GOOD = {"input_dims": [2, 2], "hidden_size": [1, 3]}


@pytest.mark.parametrize(
    ("about", "words"),
    [
        ({"ndlinear_lora": "{"}, "is no JSON"),
        ({"ndlinear_lora": "[" * 100_000}, "is no JSON"),
        ({"ndlinear_lora": "[1]"}, "describes no adapters"),
        ({"ndlinear_lora": '{"head": 3}'}, "describes no adapters"),
        ({"ndlinear_lora": "{}", "modules_to_save": "3"}, "describes no adapters"),
        (GOOD | {"input_dims": [4] + [1] * 10**5}, "100001 modes are more than the 63"),
        (GOOD | {"input_dims": [10**30, 2]}, "does not fit layer head"),
        (GOOD | {"input_dims": "ab"}, "does not fit layer head"),
        (GOOD | {"alpha": float("inf")}, "does not fit layer head: alpha=inf"),
        (GOOD | {"alpha": [1]}, "does not fit layer head"),
        (GOOD | {"dtype": "int8"}, "does not fit layer head: an adapter of torch.int8"),
        (GOOD | {"dtype": "save"}, "does not fit layer head: torch has no dtype 'save'"),
        (GOOD | {"device": "cuda:9"}, r"does not fit layer head: there is no \['device'\]"),
    ],
)
def test_hostile_descriptions_are_refused_in_words(about, words, tmp_path):
    if "ndlinear_lora" not in about:
        about = {"ndlinear_lora": json.dumps({"head": about})}
    save_file({"x": torch.zeros(1)}, tmp_path / "odd.safetensors", about)
    model = network()
    with pytest.raises(ValueError, match=words):
        load_lora(model, tmp_path / "odd.safetensors")
    assert type(model["head"]) is nn.Linear and model["head"].weight.requires_grad


def test_complex_numbers_do_not_lose_a_part():
    torch.manual_seed(0)
    layer, x = trained(nn.Linear(6, 4).to(torch.complex64)), torch.randn(3, 6).to(torch.complex64)
    wanted = layer.base_layer(x) + x @ torch.kron(*layer.adapter.weights).T
    torch.testing.assert_close(layer(x), wanted)
    with pytest.raises(
        ValueError, match=r"float32 cannot compute beside .* dtype=torch\.complex64"
    ):
        NdLinearLoRA(nn.Linear(6, 4).to(torch.complex64), dtype=torch.float32)


def test_what_cannot_be_read_or_written_is_said(monkeypatch, tmp_path):
    file = tmp_path / "a"
    file.write_bytes(b"no safetensors")
    with pytest.raises(ValueError, match="cannot be read as a safetensors file"):
        load_lora(network(), file)
    with pytest.raises(FileNotFoundError):
        load_lora(network(), tmp_path / "b")
    for write in (lora_state_dict, lambda model: save_lora(model, file)):
        with pytest.raises(ValueError, match="call apply_ndlinear_lora"):
            write(network())
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    for call in (lambda: save_lora(adapted(), file), lambda: load_lora(network(), file)):
        with pytest.raises(ImportError, match="pip install safetensors"):
            call()


def test_a_write_that_fails_leaves_the_older_file(monkeypatch, tmp_path):
    import safetensors.torch

    path = tmp_path / "a.safetensors"
    save_lora(adapted(), path)
    before = path.read_bytes()

    def torn(tensors, where, about):
        with open(where, "wb") as file:
            file.write(b"half")
        raise OSError("No space left on device")

    monkeypatch.setattr(safetensors.torch, "save_file", torn)
    with pytest.raises(OSError, match="No space"):
        save_lora(adapted(), path)
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]


# --------------------------------------------------------------------------------------- wrappers and several processes
def test_sharded_models_are_adapted_first_and_saved_whole(one_process, tmp_path):
    """One process; with two, the same file and the same refusals."""
    fully_shard = getattr(torch.distributed.fsdp, "fully_shard", None)
    if fully_shard is None:
        pytest.skip("this torch has no fully_shard")
    mesh = torch.distributed.init_device_mesh("cpu", (1,))

    def two():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 4))

    model, x = stirred(apply_ndlinear_lora(two(), "*")), torch.randn(2, 6)
    wanted = model(x)
    fully_shard(model, mesh=mesh)
    save_lora(model, tmp_path / "a.safetensors")
    torch.testing.assert_close(load_lora(two(), tmp_path / "a.safetensors")(x), wanted)
    again = fully_shard(apply_ndlinear_lora(two(), "*"), mesh=mesh)
    torch.testing.assert_close(load_lora(again, tmp_path / "a.safetensors")(x), wanted)
    bare = fully_shard(two(), mesh=mesh)
    for call in (
        lambda: apply_ndlinear_lora(bare, "0"),
        lambda: load_lora(bare, tmp_path / "a.safetensors"),
        lambda: NdLinearLoRA(bare[0]),
    ):
        with pytest.raises(ValueError, match="put the adapters on first, then call fully_shard"):
            call()
    assert not adapted_names(bare) and bare[0].weight.requires_grad


def test_adapters_come_before_distributed_data_parallel(one_process, tmp_path):
    save_lora(adapted(), tmp_path / "a.safetensors")
    model = nn.parallel.DistributedDataParallel(network())
    for call in (
        lambda: apply_ndlinear_lora(model, "q_proj"),
        lambda: load_lora(model, tmp_path / "a.safetensors"),
    ):
        with pytest.raises(
            ValueError, match=r"DistributedDataParallel .* put the adapters on first"
        ):
            call()
    assert not adapted_names(model)


def test_weights_that_are_taken_apart_are_not_saved(tmp_path):
    model = adapted()
    mode = model["head"].adapter.align_layers[0]
    mode.weight = nn.Parameter(torch.zeros(0))
    with pytest.raises(ValueError, match=r"weights of head apart: .*summon_full_params"):
        save_lora(model, tmp_path / "a.safetensors")
    assert not list(tmp_path.iterdir())


# ------------------------------------------------------------------------------------------- other layers, and for good
class Conv1D(nn.Module):
    """As transformers has it in GPT-2: a linear map whose weight is (inputs, outputs)."""

    def __init__(self, nf, nx):
        super().__init__()
        self.nf = nf
        self.weight, self.bias = nn.Parameter(torch.randn(nx, nf)), nn.Parameter(torch.randn(nf))

    def forward(self, x):
        return x @ self.weight + self.bias


OTHERS = [
    (nn.Conv2d(24, 30, 1, stride=2), (2, 24, 5, 7)),
    (nn.Conv1d(24, 30, 1, bias=False), (24, 5)),
    (nn.Conv3d(24, 30, 1, stride=(1, 2, 3)), (2, 24, 4, 5, 6)),
    (nn.Conv2d(24, 30, 1).to(memory_format=torch.channels_last), (2, 24, 3, 3)),
    (Conv1D(30, 24), (5, 24)),
]


@pytest.mark.parametrize(("base", "shape"), OTHERS, ids=lambda part: str(part)[:40])
def test_a_convolution_of_kernel_1_and_a_conv1d_of_transformers(base, shape, tmp_path):
    torch.manual_seed(0)
    wanted, x = copy.deepcopy(base).double(), torch.randn(shape, dtype=torch.float64)
    bare = nn.Sequential(copy.deepcopy(wanted))
    model = copy.deepcopy(bare)
    model[0] = NdLinearLoRA(model[0], alpha=2.0, bias=True)
    assert torch.equal(model(x), bare(x)) and not model[0].base_layer.weight.requires_grad
    randomise(model[0].adapter)
    with torch.no_grad():
        update = 2 * torch.kron(*model[0].adapter.weights)
        update = update.T if isinstance(base, Conv1D) else update
        wanted.weight.add_(update.reshape(wanted.weight.shape))
        extra = 2 * nd.total_bias(model[0].adapter).flatten()
        wanted.bias = nn.Parameter(extra if wanted.bias is None else wanted.bias + extra)
    torch.testing.assert_close(model(x), wanted(x))
    if isinstance(base, Conv1D):
        assert adapted_names(apply_ndlinear_lora(copy.deepcopy(bare), "all-linear")) == ["0"]
        torch.testing.assert_close(nd.to_linear(model[0])(x), wanted(x))
    save_lora(model, tmp_path / "a.safetensors")
    torch.testing.assert_close(load_lora(bare, tmp_path / "a.safetensors")(x), wanted(x))
    model[0].merge()
    torch.testing.assert_close(model(x), wanted(x))
    merge_lora(model)
    assert type(model[0]) is type(base) and not model[0].weight.requires_grad
    torch.testing.assert_close(model(x), wanted(x))


@pytest.mark.parametrize(
    "layer", [nn.Conv2d(4, 4, 3), nn.Conv2d(4, 4, 1, groups=2), nn.Conv2d(4, 4, 1, padding=1)]
)
def test_other_convolutions_are_refused_and_left_alone(layer):
    with pytest.raises(TypeError, match="or a convolution of kernel 1, not torch"):
        NdLinearLoRA(layer)
    model = nn.ModuleDict({"a": nn.Conv2d(4, 4, 1), "b": nn.Linear(4, 4)})
    assert adapted_names(apply_ndlinear_lora(model, "*")) == ["b"], "only what was always adapted"


def test_merge_lora_adds_the_updates_for_good():
    model, x = adapted(bias=True, alpha=2.0), torch.randn(2, 5, 16)
    y = run(model, x)
    assert merge_lora(model) is model and not adapted_names(model)
    torch.testing.assert_close(run(model, x), y, atol=1e-4, rtol=1e-4)
    assert not any(p.requires_grad for p in model.parameters())
    with pytest.raises(ValueError, match="to_linear"):
        merge_lora(NdLinearLoRA(nn.Linear(6, 4)))
    mixed = nn.Sequential(NdLinearLoRA(nn.Linear(24, 30)), NdLinearLoRA(Integers(30, 24)))
    before = mixed[0].base_layer.weight.clone()
    with pytest.raises(TypeError, match="quantised"):
        merge_lora(mixed)
    assert len(adapted_names(mixed)) == 2 and torch.equal(mixed[0].base_layer.weight, before)


# ------------------------------------------------------------------------------------------------- files that belong together
@pytest.mark.parametrize(
    ("name", "beside"),
    [
        ("ndlinear_lora", "ndlinear"),
        ("ndlinear_lokr", "ndlinear_lora"),
        ("ndlinear_peft", "ndlinear_lora"),
    ],
)
@pytest.mark.parametrize("version", ["9.9.9", None])
def test_a_file_of_another_version_is_refused(name, beside, version, monkeypatch):
    if name == "ndlinear_peft":
        pytest.importorskip("peft")
    file = pathlib.Path(__file__).parents[2] / f"{name}.py"
    own, other = nd.__version__, importlib.import_module(beside)
    monkeypatch.delattr(other, "__version__")
    if version:
        monkeypatch.setattr(other, "__version__", version, raising=False)
    words = rf"{name}\.py is of version {own}, .*{beside}\.py of version {version or 'unknown'}"
    with pytest.raises(ImportError, match=f"{words}: copy both from one release"):
        spec = importlib.util.spec_from_file_location("copied", file)
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
