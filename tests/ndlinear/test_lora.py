"""NdLinearLoRA: zero at start, exact to merge and to take back, small to save, hard to lose."""

import copy
import functools
import importlib.util
import json
import pathlib
import re
import sys
import unittest.mock

import pytest
import torch
from ndlinear_cases import Conv1D, bias_by_formula, randomise, refused
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.utils import parametrizations, prune

import ndlinear as nd
from ndlinear_lora import (
    NdLinearLoRA,
    apply_ndlinear_lora,
    load_lora,
    lora_state_dict,
    merge_lora,
    save_lora,
)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q_proj, self.v_proj = nn.Linear(16, 16), nn.Linear(16, 16, bias=False)
        self.norm = nn.LayerNorm(16)

    def forward(self, x):
        return self.norm(self.q_proj(x) * self.v_proj(x))


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(Attention(), Attention(), nn.Linear(16, 4))
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.body(x))


def language_model(tied=True):
    """As transformers' models: it names its output layer, which may share the weight of the embedding."""
    model = Network()
    model.get_output_embeddings = lambda: model.head
    model.embed = nn.Embedding(3, 4)
    if tied:
        model.embed.weight = model.head.weight
        model.tie_weights = None
    return model


def shared():
    """One layer stands in two places."""
    model = Network()
    model.body[1].q_proj = model.body[0].q_proj
    return model


def adapted_names(model):
    return [name for name, part in model.named_modules() if isinstance(part, NdLinearLoRA)]


def trainable(model):
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


def stirred(model):
    """The model with adapters that do something."""
    for name in adapted_names(model):
        randomise(model.get_submodule(name).adapter)
    return model


def adapted(**options):
    return stirred(apply_ndlinear_lora(Network(), ["q_proj", "head"], **options))


# ------------------------------------------------------------------------------------------------------------ one layer
BASES = [
    (nn.Linear(24, 30), (2, 7, 24)),
    (nn.Linear(24, 30, bias=False), (24,)),
    (nn.Conv2d(24, 30, 1, stride=2), (2, 24, 5, 7)),
    (nn.Conv1d(24, 30, 1, bias=False), (24, 5)),
    (nn.Conv3d(24, 30, 1, stride=(1, 2, 3)), (2, 24, 4, 5, 6)),
    (nn.Conv2d(24, 30, 1).to(memory_format=torch.channels_last), (2, 24, 3, 3)),
    (Conv1D(30, 24), (5, 24)),
]
OPTIONS = [
    {},
    {"alpha": 2.5},
    {"bias": True, "alpha": 0.5},
    {"bias": True, "transform_outer": False},
    {"input_dims": (2, 3, 4), "hidden_size": (5, 3, 2), "bias": True},
    {"input_dims": (24, 1), "hidden_size": (3, 10), "init": "unit"},
    {"input_dims": (24,), "hidden_size": (30,)},
]


def updated(base, layer):
    """The base layer with the dense update of an adapter in its weight and bias, by their formulas."""
    update, biases = functools.reduce(torch.kron, layer.adapter.weights), layer.adapter.biases
    update = update.T if isinstance(base, Conv1D) else update
    made = copy.deepcopy(base)
    with torch.no_grad():
        made.weight.add_(layer.alpha * update.reshape(made.weight.shape))
        if biases[0] is not None:
            order = layer.adapter.order
            added = layer.alpha * bias_by_formula(layer.adapter.weights, biases, order).flatten()
            made.bias = nn.Parameter(added if made.bias is None else made.bias + added)
    return made


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize(("base", "shape"), BASES, ids=lambda part: str(part)[:40])
def test_an_adapter_beside_its_base_saved_merged_and_taken_back(base, shape, options, tmp_path):
    torch.manual_seed(0)
    base, x = copy.deepcopy(base).double(), torch.randn(shape, dtype=torch.float64)
    model, file = nn.Sequential(NdLinearLoRA(copy.deepcopy(base), **options)), tmp_path / "a"
    (layer,) = model
    assert torch.equal(layer(x), base(x)), "zero at start, not even a rounding error"
    assert trainable(layer) == {f"adapter.{name}" for name, _ in layer.adapter.named_parameters()}
    layer(x).square().sum().backward()
    last = layer.adapter.align_layers[layer.adapter.order[-1]]
    moved = {id(p) for p in layer.adapter.parameters() if p.grad.any()}
    assert moved == set(map(id, last.parameters())), "the first step moves the last mode"
    assert all(w.any() for w in layer.adapter.weights if w is not last.weight), "others are drawn"
    randomise(layer.adapter)
    y, wanted = layer(x), updated(base, layer)(x)
    torch.testing.assert_close(y, wanted)
    y.square().sum().backward()
    assert all(p.grad.any() for p in layer.adapter.parameters())
    save_lora(model, file)
    assert torch.equal(load_lora(nn.Sequential(copy.deepcopy(base)), file)(x), y)
    state = copy.deepcopy(layer.state_dict())
    for _ in range(2):
        layer.merge()
    assert layer.merged and list(layer.state_dict()) == list(state), "no trace in a checkpoint"
    assert all(torch.equal(value, state[name]) for name, value in layer.state_dict().items())
    torch.testing.assert_close(layer(x).view(-1), wanted.flatten())  # in one piece, too
    assert copy.deepcopy(layer).float()(x.float()).dtype == torch.float32
    again = copy.deepcopy(layer)
    randomise(again.adapter)
    assert torch.equal(again(x), layer(x)) and not layer(x).requires_grad, "a copy, not trained"
    again.reset_parameters()
    assert torch.equal(again(x), base(x)), "a reset starts at zero, merged or not"
    *drawn, last = (again.adapter.weights[k] for k in again.adapter.order)
    assert all(weight.any() for weight in drawn) and not last.any()
    for _ in range(2):
        layer.unmerge()
    assert not layer.merged and torch.equal(layer(x), y), "bit by bit"
    if isinstance(base, (nn.Linear, Conv1D)):
        torch.testing.assert_close(nd.to_linear(layer)(x), wanted)
    assert merge_lora(model) is model and type(model[0]) is type(base) and not trainable(model)
    torch.testing.assert_close(model(x), wanted)


def test_train_and_eval_do_not_change_what_is_merged():
    layer, x = NdLinearLoRA(nn.Linear(6, 4), dropout=0.5), torch.randn(20, 6)
    randomise(layer.adapter)
    assert not torch.equal(layer(x), layer(x)), "dropout acts on the update"
    layer.dropout.p = 1.0
    assert torch.equal(layer(x), layer.base_layer(x)), "and leaves the base alone"
    y = layer.eval()(x)
    layer.merge()
    for mode in (True, False):
        assert layer.train(mode).merged
        torch.testing.assert_close(layer(x), y, atol=1e-5, rtol=1e-5)
    model = apply_ndlinear_lora(Network().eval(), "q_proj", dropout=0.5)
    assert not any(part.training for part in model.modules()), "it comes in the mode of its model"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_base_with_a_float32_adapter(dtype):
    base, x = nn.Linear(6, 4).to(dtype), torch.randn(5, 6, dtype=dtype)
    assert NdLinearLoRA(copy.deepcopy(base)).adapter.weights[0].dtype == dtype
    layer = NdLinearLoRA(base, dtype=torch.float32, alpha=0.1)
    randomise(layer.adapter)
    y = layer(x)
    y.float().sum().backward()
    assert y.dtype == layer.weight.dtype == dtype
    assert layer.adapter.weights[0].grad.dtype == torch.float32
    layer.merge()
    assert (layer(x) - y).abs().max() < 0.05


def test_complex_numbers_do_not_lose_a_part():
    torch.manual_seed(0)
    base, x = nn.Linear(6, 4).to(torch.complex64), torch.randn(3, 6).to(torch.complex64)
    layer = NdLinearLoRA(copy.deepcopy(base))
    randomise(layer.adapter)
    torch.testing.assert_close(layer(x), updated(base, layer)(x))
    with pytest.raises(ValueError, match=r"float32 cannot compute beside .* dtype=torch.complex64"):
        NdLinearLoRA(base, dtype=torch.float32)
    assert base.weight.requires_grad, "what fails leaves the base layer as it was"


# ------------------------------------------------------------------------------------------------------- which layers
Q, V = ["body.0.q_proj", "body.1.q_proj"], ["body.0.v_proj", "body.1.v_proj"]
PATTERNS = [
    (Network, "q_proj", Q),
    (Network, ["q_proj", "v_proj"], sorted(Q + V)),
    (Network, "body.0.*", [Q[0], V[0]]),
    (Network, "1.q_proj", [Q[1]]),
    (Network, "*[02]*", [Q[0], V[0], "body.2"]),
    (Network, ("head", "body.2"), ["body.2", "head"]),
    (Network, re.compile(r"body\.\d\.q_proj"), Q),
    (Network, "all-linear", [*sorted(Q + V), "body.2", "head"]),
    (language_model, "all-linear", [*sorted(Q + V), "body.2"]),
    (lambda: language_model(False), ["all-linear", "head"], [*sorted(Q + V), "body.2", "head"]),
    (lambda: nn.Sequential(nd.NdLinear((4, 4), (4, 4)), nn.Linear(16, 2)), "*", ["1"]),
    (lambda: nn.Sequential(nn.Conv2d(4, 4, 1), nn.Linear(4, 4)), "*", ["1"]),
    (lambda: nn.Sequential(Conv1D(4, 4), nn.Linear(4, 4)), "all-linear", ["0", "1"]),
]


@pytest.mark.parametrize(("make", "patterns", "found"), PATTERNS, ids=range(len(PATTERNS)))
def test_patterns(make, patterns, found):
    assert adapted_names(apply_ndlinear_lora(make(), patterns)) == found


def test_apply_returns_the_model_freezes_the_rest_and_passes_options():
    model = Network()
    options = {"alpha": 3, "bias": True, "hidden_size": (2, 8)}
    assert apply_ndlinear_lora(model, "q_proj", **options) is model
    layer = model.body[0].q_proj
    assert (layer.alpha, layer.adapter.hidden_size, layer.has_bias) == (3, (2, 8), True)
    assert trainable(model) == set(lora_state_dict(model)) and len(trainable(model)) == 8
    apply_ndlinear_lora(model, ["q_proj", "v_proj"])  # what is adapted already is left alone
    assert model.body[0].q_proj is layer and trainable(model) == set(lora_state_dict(model))
    assert adapted_names(model) == sorted(Q + V)
    model = apply_ndlinear_lora(Network(), "q_proj", freeze=False)
    frozen = {name for name, _ in model.named_parameters()} - trainable(model)
    assert frozen == {f"{name}.base_layer.{part}" for name in Q for part in ("weight", "bias")}
    model = apply_ndlinear_lora(Network(), ["body.2", "head"], modules_to_save="head")
    apply_ndlinear_lora(model, "q_proj")
    assert adapted_names(model) == [Q[0], Q[1], "body.2"]
    assert {"head.weight", "head.bias"} < trainable(model), "a second call keeps what was chosen"


def saved_head():
    return apply_ndlinear_lora(Network(), "q_proj", modules_to_save="head")


def with_head(kind):
    return lambda: nn.ModuleDict({"q_proj": nn.Linear(4, 4), "head": kind(4, 4)})


def offloaded():
    """As accelerate leaves a model whose weights are elsewhere between two calls."""
    model = nn.Sequential(nn.Linear(4, 4, device="meta"))
    model[0]._hf_hook = None
    return model


class Integers(nn.Linear):
    """A linear layer that keeps its weight in whole numbers, as quantised ones do."""

    def __init__(self, inputs, outputs):
        super().__init__(inputs, outputs)
        whole = (self.weight.detach() * 127).round().to(torch.int8).view(torch.uint8)
        self.weight = nn.Parameter(whole, requires_grad=False)

    def forward(self, x):
        return nn.functional.linear(x, self.weight.view(torch.int8).to(x.dtype) / 127, self.bias)


class Extra(nn.Linear):
    def get_extra_state(self):
        return {"step": 1}


NONE = r"target_modules .* match none .*'body.0.q_proj', 'body.0.v_proj'.*'head'"
HAS = "names a layer that has an adapter: merge_lora"
BOTH = ["q_proj", "head"]
WRONG = [
    *((Network, pattern, {}, NONE) for pattern in ("proj", "Q_PROJ", "norm", r"body\.\d\..*", [])),
    (Network, ["q_proj", "v_prj"], {}, r"\['v_prj'\] match none"),
    (adapted, BOTH, {}, "are adapted already"),
    (Network, "head", {"modules_to_save": "head"}, "modules_to_save"),
    (Network, "q_proj", {"modules_to_save": "nothing"}, "'nothing' matches no module"),
    (Network, "q_proj", {"dtype": "bf16"}, "no dtype 'bf16': give one such as 'bfloat16'"),
    (Network, "q_proj", {"r": 8}, "has no r: leave it out"),
    (Network, "q_proj", {"lora_alpha": 8}, "has no lora_alpha: alpha="),
    (Network, "q_proj", {"lora_dropout": 0.1}, "has no lora_dropout: dropout="),
    (Network, BOTH, {"input_dims": (4, 4), "hidden_size": (4, 4)}, "do not multiply"),
    (Network, BOTH, {"dropout": 2.0}, "dropout"),
    (Network, "q_proj", {"dropout": float("nan")}, "must be finite numbers"),
    (Network, "q_proj", {"alpha": -float("inf")}, "must be finite numbers"),
    (Network, BOTH, {"init": "none"}, "init must be"),
    (Network, BOTH, {"colour": "red"}, "colour"),
    (Network, "q_proj", {"bias": "none"}, "'none', not True or False"),
    (Network, "q_proj", {"alpha_pattern": {}}, "once for each alpha"),
    (Network, "q_proj", {"dtype": torch.complex64}, "cannot compute beside a layer of torch.float"),
    (adapted, "v_proj", {"modules_to_save": "head"}, HAS),
    (adapted, "v_proj", {"modules_to_save": "head.*"}, HAS),
    (saved_head, "head", {}, "stand in modules_to_save"),
    (with_head(Extra), "q_proj", {"modules_to_save": "head"}, "no extra state"),
    (with_head(Integers), "q_proj", {"modules_to_save": "head"}, "holds whole numbers"),
    (offloaded, "0", {}, "is offloaded: put the adapters on first"),
    (lambda: nn.Sequential(nn.LazyLinear(4)), "0", {}, "run one batch through the model first"),
    (language_model, "head", {}, r"\['embed', 'head'\] share one weight"),
]


@pytest.mark.parametrize(("make", "targets", "options", "words"), WRONG, ids=range(len(WRONG)))
def test_what_cannot_be_adapted_is_said_and_nothing_is_changed(make, targets, options, words):
    model = make()
    with refused(model, words):
        apply_ndlinear_lora(model, targets, **options)


# ---------------------------------------------------------------------------------------------------------- adapter files
def wrapped_inside(model):
    """Compiled and recomputed parts, which put words into the names of what is in them."""
    model.body[0] = torch.compile(model.body[0], backend="eager")
    model.body[1] = checkpoint_wrapper(model.body[1])
    return model


def itself(model):
    return model


def inner(model):
    return getattr(model, "_orig_mod", model)


WITHOUT_VALUE = {"dropout": 0.25, "init": "unit", "execution": "recompute"}  # these may differ
TRIPS = {  # a model, its adapted layers, their options, what stands around the model or its parts
    "plain": (Network, BOTH, {}, itself),
    "biases": (Network, BOTH, {"alpha": 2.0, "bias": True, "transform_outer": False}, itself),
    "no values": (Network, BOTH, WITHOUT_VALUE | {"dtype": "float64"}, itself),
    "a new head": (Network, "q_proj", {"modules_to_save": "head"}, itself),
    "tied": (language_model, "q_proj", {"modules_to_save": ["embed", "head"]}, itself),
    "shared": (shared, "1.q_proj", {"alpha": 0.1}, itself),  # by its second name
    "compile": (Network, BOTH, {}, lambda m: torch.compile(m, backend="eager")),
    "data": (Network, BOTH, {}, nn.DataParallel),
    "parts": (Network, BOTH, {}, wrapped_inside),
}


@pytest.mark.parametrize("kind", TRIPS)
def test_what_was_trained_comes_back(kind, tmp_path):
    """Into the bare model, one on the meta device, and an adapted one, whose parameters stay those of the optimiser."""
    make, targets, options, wrap = TRIPS[kind]
    model, x, file = wrap(make()), torch.randn(2, 5, 16), tmp_path / "a.safetensors"
    assert apply_ndlinear_lora(model, targets, **options) is model
    if "modules_to_save" in options:
        model(x).square().sum().backward()
        torch.optim.SGD(filter(lambda p: p.requires_grad, model.parameters()), 0.1).step()
    y = inner(stirred(model)).eval()(x)
    save_lora(model, file)
    state = lora_state_dict(model)
    assert set(load_file(file)) == set(state) and not any("_orig" in name for name in state)
    with torch.device("meta"):
        empty = make()
    value = {name: option for name, option in options.items() if name not in WITHOUT_VALUE}
    other = apply_ndlinear_lora(make(), targets, **value)
    before = [id(parameter) for parameter in other.parameters()]
    for name in adapted_names(other):
        other.get_submodule(name).merge()
    for target in (make(), wrap(make()), other, empty):
        assert load_lora(target, file) is target
        found = lora_state_dict(target)
        assert all(torch.equal(found[name].to(own.dtype), own) for name, own in state.items())
        if target is not empty:
            assert len(trainable(target)) == len(trainable(model))
            torch.testing.assert_close(inner(target).eval()(x), y)
            assert kind != "tied" or target.head.weight is target.embed.weight
            assert kind != "shared" or target.body[0].q_proj is target.body[1].q_proj
            continue
        assert all(p.requires_grad for p in target.parameters() if not p.is_meta)
        if kind == "no values":
            config = empty.head.config
            assert config == model.head.config == config | options
    assert [id(parameter) for parameter in other.parameters()] == before


def test_a_lone_adapter_is_read_and_the_rest_need_not_be_frozen(tmp_path):
    layer = NdLinearLoRA(nn.Linear(6, 4))
    randomise(layer.adapter)
    save_lora(layer, tmp_path / "a")
    other = load_lora(NdLinearLoRA(copy.deepcopy(layer.base_layer)), tmp_path / "a")
    assert torch.equal(other(torch.ones(6)), layer(torch.ones(6)))
    with pytest.raises(ValueError, match="does not fit"):
        load_lora(nn.Linear(6, 4), tmp_path / "a")
    save_lora(adapted(), tmp_path / "b")
    loose = load_lora(Network(), tmp_path / "b", freeze=False)
    assert "body.0.norm.weight" in trainable(loose)


FIRST = "head.adapter.align_layers.0.weight"


def put(name, value):
    """The file with another tensor."""
    return lambda tensors, about: (tensors | {name: value}, about)


def described(text, **more):
    """The file with other metadata."""
    return lambda tensors, about: (tensors, {"ndlinear_lora": text} | more)


def head(**change):
    """A file whose metadata describe one adapter in this way."""
    config = {"input_dims": [2, 2], "hidden_size": [1, 3]} | change
    return described(json.dumps({"head": config}))


def smaller():
    return nn.ModuleDict({"head": nn.Linear(4, 3)})


ANY = (Network, adapted)
LOST = r"a.safetensors.*'alpha': 1.0.*in \['body.0.q_proj"
REFUSED = [  # what was done to a file, models that refuse it, in which words
    (put("head.base_layer.weight", torch.zeros(3, 4)), ANY, r"foreign \['head.base_layer.wei"),
    (put("body.0.norm.bias", torch.zeros(16)), ANY, r"foreign \['body.0.norm.bias'\]"),
    (lambda t, a: ({n: v for n, v in t.items() if n != FIRST}, a), ANY, rf"missing \['{FIRST}'\]"),
    (lambda t, a: ({}, a), ANY, r"missing \['body.0.q_proj.adapter.align_layers.0.weight'"),
    (put(FIRST, torch.zeros(2, 2)), ANY, rf"sizes \['{FIRST} \(2, 2\), not \(1, 2\)'\]"),
    (lambda t, a: ({n: v.to(torch.complex64) for n, v in t.items()}, a), ANY, "complex"),
    (put(FIRST, torch.full((1, 2), float("nan"))), ANY, rf"{FIRST} .* not finite"),
    (put(FIRST, torch.full((1, 2), -float("inf"))), ANY, rf"{FIRST} .* not finite"),
    (put(FIRST, torch.full((1, 2), 1e6)), [lambda: adapted(dtype="float16")], "too large for this"),
    (lambda t, a: (t, a), [shared], "body.0.q_proj and others for body.1.q_proj, which are one"),
    (lambda t, a: (t, a), [saved_head], "stands in modules_to_save already"),
    (lambda t, a: (t, {}), ANY, "a.safetensors describes no adapters; write it with save_lora"),
    (lambda t, a: (t, a), [lambda: adapted(alpha=2.0)], LOST),
    (lambda t, a: (t, a), [lambda: adapted(bias=True)], LOST),
    (lambda t, a: (t, a), [lambda: adapted(transform_outer=False)], LOST),
    (lambda t, a: (t, a), [smaller], r"does not fit in \['body.0.q_proj', 'body.1.q_proj'\]"),
    (described("{"), ANY, "is no JSON"),
    (described("[" * 100_000), ANY, "is no JSON"),
    (described("[1]"), ANY, "describes no adapters"),
    (described('{"head": 3}'), ANY, "describes no adapters"),
    (described('{"head": {}}', modules_to_save="3"), ANY, "describes no adapters"),
    (head(input_dims=[4] + [1] * 10**5), [Network], "100001 modes are more than the 63"),
    (head(input_dims=[10**30, 2]), [Network], "does not fit layer head"),
    (head(input_dims="ab"), [Network], "does not fit layer head"),
    (head(alpha=float("inf")), [Network], "does not fit layer head: alpha=inf"),
    (head(dtype="int8"), [Network], "does not fit layer head: an adapter of torch.int8"),
    (head(dtype="save"), [Network], "does not fit layer head: torch has no dtype 'save'"),
    (head(device="cuda:9"), [Network], r"does not fit layer head: there is no \['device'\]"),
]


@pytest.mark.parametrize(("edit", "makes", "words"), REFUSED, ids=range(len(REFUSED)))
def test_another_file_is_refused_in_words_and_changes_nothing(edit, makes, words, tmp_path):
    path = tmp_path / "a.safetensors"
    save_lora(adapted(), path)
    with safe_open(path, "pt") as file:
        about, tensors = file.metadata(), {n: file.get_tensor(n) for n in file.keys()}  # noqa: SIM118
    tensors, about = edit(tensors, about)
    save_file(tensors, path, about)
    for make in makes:
        model = make()
        with refused(model, words, ValueError):
            load_lora(model, path)


def test_what_cannot_be_read_or_written_is_said(monkeypatch, tmp_path):
    file = tmp_path / "a"
    file.write_bytes(b"no safetensors")
    with pytest.raises(ValueError, match="cannot be read as a safetensors file"):
        load_lora(Network(), file)
    with pytest.raises(FileNotFoundError):
        load_lora(Network(), tmp_path / "b")
    with pytest.raises(FileNotFoundError, match=r"nowhere'$"):
        save_lora(adapted(), tmp_path / "nowhere" / "b")
    for write in (lora_state_dict, lambda model: save_lora(model, file)):
        with pytest.raises(ValueError, match="call apply_ndlinear_lora"):
            write(Network())
    model = adapted()
    model.head.adapter.align_layers[0].weight = nn.Parameter(torch.zeros(0))
    with pytest.raises(ValueError, match=r"weights of head apart: .*summon_full_params"):
        save_lora(model, tmp_path / "c")
    assert list(tmp_path.iterdir()) == [file]
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    for call in (lambda: save_lora(adapted(), file), lambda: load_lora(Network(), file)):
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


# --------------------------------------------------------------------------------------------------- bases that hold no floats
class Packed(torch.Tensor):
    """What a layer of torchao holds: a weight that says float32 and is none."""


Packed.__module__ = "torchao.quantization"


def torchao(inputs, outputs):
    layer = nn.Linear(inputs, outputs).requires_grad_(False)
    layer.weight = nn.Parameter(layer.weight.as_subclass(Packed), requires_grad=False)
    return layer


@pytest.mark.parametrize("kind", [Integers, torchao])
def test_an_adapter_on_a_quantised_base_trains_and_refuses_to_merge(kind):
    model, x = nn.Sequential(NdLinearLoRA(nn.Linear(20, 24)), kind(24, 30)), torch.randn(5, 20)
    before = model(x)
    layer = apply_ndlinear_lora(model, "1")[1]
    assert layer.adapter.weights[0].dtype == torch.float32 and torch.equal(model(x), before)
    stirred(model)(x).square().sum().backward()
    assert all(p.grad.any() for p in layer.adapter.parameters())
    calls = (layer.merge, lambda: layer.weight, lambda: nd.to_linear(layer))
    for call in (*calls, lambda: merge_lora(model)):
        with refused(model, r"holds a torch.*be merged into quantised weights", TypeError):
            call()
    assert not layer.merged


# --------------------------------------------------------------------------------------- several processes, and for good
def test_sharded_models_are_adapted_first_and_saved_whole(fully_shard, tmp_path):
    """One process; with two, the same file and the same refusals."""

    def two():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 4))

    model, x, file = stirred(apply_ndlinear_lora(two(), "*")), torch.randn(2, 6), tmp_path / "a"
    wanted = model(x)
    save_lora(fully_shard(model), file)
    torch.testing.assert_close(load_lora(two(), file)(x), wanted)
    again = fully_shard(apply_ndlinear_lora(two(), "*"))
    torch.testing.assert_close(load_lora(again, file)(x), wanted)
    sharded, parallel = fully_shard(two()), nn.parallel.DistributedDataParallel(two())
    for bare, words in ((sharded, "then call fully_shard"), (parallel, "DistributedDataParallel")):
        for call in (lambda m: apply_ndlinear_lora(m, "0"), lambda m: load_lora(m, file)):
            with pytest.raises(ValueError, match="put the adapters on first") as said:
                call(bare)
            assert words in str(said.value)
        assert not adapted_names(bare) and all(p.requires_grad for p in bare.parameters())
    with pytest.raises(ValueError, match="put the adapters on first, then call fully_shard"):
        NdLinearLoRA(sharded[0])


def hooked():
    layer = nn.Linear(24, 30)
    layer.register_forward_hook(lambda layer, inputs, y: 2 * y)
    return layer


class Tripled(nn.Linear):
    def forward(self, x):
        return 3 * super().forward(x)


def broken():
    layer = nn.Linear(24, 30)
    nn.init.constant_(layer.weight, torch.nan)
    return layer


UNMERGED = [
    (hooked, "computes something else than its weight and bias say"),
    (lambda: Tripled(24, 30), r"test_lora.Tripled computes something else"),
    (lambda: parametrizations.weight_norm(nn.Linear(24, 30)), "remove_parametrizations"),
    (lambda: prune.random_unstructured(nn.Linear(24, 30), "weight", 0.5), "prune.remove"),
    (lambda: nn.Linear(24, 30, device="meta"), "on the meta device"),
    (broken, "^1 would hold numbers that are not finite"),
]


@pytest.mark.parametrize(("make", "words"), UNMERGED, ids=range(len(UNMERGED)))
def test_an_update_that_merging_would_lose_or_bend_is_not_merged(make, words):
    model = stirred(nn.Sequential(NdLinearLoRA(nn.Linear(20, 24)), NdLinearLoRA(make())))
    with refused(model, words):
        merge_lora(model)
    if words.endswith(("say", "else")):
        with refused(model, words, TypeError):
            model[1].merge()


@pytest.mark.parametrize("targets", ["*", "1"])
def test_a_merged_weight_that_others_hold_stays_theirs(targets):
    model, x = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)), torch.randn(3, 6)
    model[1].weight = model[0].weight
    y = stirred(apply_ndlinear_lora(model, targets))(x)
    torch.testing.assert_close(merge_lora(model)(x), y, atol=1e-4, rtol=1e-4)


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
    for part in ("", ".tuners", ".tuners.lora", ".tuners.lora.layer", ".tuners.tuners_utils"):
        monkeypatch.setitem(sys.modules, f"peft{part}", unittest.mock.MagicMock())  # a slow import
    file = pathlib.Path(__file__).parents[2] / f"{name}.py"
    own, other = nd.__version__, importlib.import_module(beside)
    monkeypatch.delattr(other, "__version__")
    if version:
        monkeypatch.setattr(other, "__version__", version, raising=False)
    words = rf"{name}\.py is of version {own}, .*{beside}\.py of version {version or 'unknown'}"
    with pytest.raises(ImportError, match=f"{words}: copy both from one release"):
        spec = importlib.util.spec_from_file_location("copied", file)
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
