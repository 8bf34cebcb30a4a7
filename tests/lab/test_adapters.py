"""DoRA, VeRA and LoKr of low rank against peft, where it is installed; sums of products against written-out matrices."""

import copy
import functools

import pytest
import torch
from lab import LabError, models
from lab.chapters import lora
from torch import nn

ARMS = ("lora-2", "dora-3", "vera-5", "lokr-4-2", "ndlinear")


@pytest.fixture
def base():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(24, 48), nn.Tanh(), nn.Linear(48, 24, bias=False)).double()


def maps(model):
    return {name: model.get_submodule(name) for name in ("0", "2")}


def attached(base, arm):
    """A copy of the base with an arm on both maps, away from its start."""
    model = copy.deepcopy(base)
    lora.attach(model, maps(model), arm)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data += 0.3 * torch.randn_like(parameter)
    return model


X = torch.linspace(-1, 1, 5 * 24).reshape(5, 24).double().cos()


@pytest.mark.parametrize("arm", ARMS)
def test_nothing_changes_at_the_start_and_only_the_adapters_are_trained(base, arm):
    model = copy.deepcopy(base)
    lora.attach(model, maps(model), arm)
    assert torch.allclose(model(X), base(X), atol=1e-12)
    frozen = {name: p.clone() for name, p in model.named_parameters() if not p.requires_grad}
    assert {name.split("base_layer.")[-1] for name in frozen} == {"weight", "bias"}
    model(X).square().sum().backward()
    assert all((p.grad is not None) == p.requires_grad for p in model.parameters())


def test_vera_shares_its_frozen_matrices(base):
    one, two = attached(base, "vera-5")[::2]
    assert torch.equal(one.A, two.A[:, :24]) and torch.equal(two.B, one.B[:24])
    assert (one.A.shape, two.A.shape, one.B.shape) == ((5, 24), (5, 48), (48, 5))


def test_all_weights_and_unknown_arms(base):
    model = nn.Sequential(nn.Embedding(7, 24), nn.Linear(24, 6))
    assert models.size(lora.attach(model, {"1": model[1]}, "full")) == 24 * 6 + 6
    with pytest.raises(LabError, match="no arm 'loha-3'"):
        lora.attach(base, maps(base), "loha-3")


def configured(peft, arm):
    """What peft calls an arm."""
    kind, *sizes = arm.split("-")
    sizes = [int(size) for size in sizes]
    shared = {"target_modules": ["0", "2"], "r": sizes[-1]}
    if kind == "vera":
        return peft.VeraConfig(**shared, vera_dropout=0.0, projection_prng_key=1)
    if kind == "lokr":
        return peft.LoKrConfig(**shared, alpha=sizes[-1], decompose_factor=sizes[0])
    return peft.LoraConfig(**shared, lora_alpha=sizes[-1], use_dora=kind == "dora")


NAMES = {
    "dora": {"A": "lora_A.default.weight", "B": "lora_B.default.weight", "m": "lora_magnitude_vector.default.weight"},
    "vera": {"d": "vera_lambda_d.default", "b": "vera_lambda_b.default"},
    "lokr": {"first": "lokr_w1.default", "U": "lokr_w2_a.default", "V": "lokr_w2_b.default"},
}  # fmt: skip


@pytest.mark.parametrize("arm", ["dora-3", "vera-5", "lokr-4-2"])
def test_outputs_gradients_and_starts_are_those_of_peft(base, arm):
    peft = pytest.importorskip("peft")
    theirs = peft.get_peft_model(copy.deepcopy(base), configured(peft, arm)).base_model.model
    theirs.double()
    ours, names = attached(base, arm), NAMES[arm.partition("-")[0]]
    for place in (0, 2):
        if arm.startswith("vera"):
            one, two = theirs[place].vera_A["default"], theirs[place].vera_B["default"]
            ours[place].A.copy_(one[:, : ours[place].A.shape[1]])
            ours[place].B.copy_(two[: len(ours[place].B)])
        for mine, name in names.items():
            theirs[place].get_parameter(name).data.copy_(getattr(ours[place], mine))
    assert torch.allclose(theirs(X), ours(X), atol=1e-12)
    theirs(X).square().sum().backward()
    ours(X).square().sum().backward()
    for place in (0, 2):
        for mine, name in names.items():
            wanted = theirs[place].get_parameter(name).grad
            assert torch.allclose(getattr(ours[place], mine).grad, wanted, atol=1e-10)


@pytest.mark.parametrize("arm", ["dora-3", "vera-5", "lokr-4-2"])
def test_starts_are_drawn_as_in_peft(arm):
    """The same parts are zero or constant, the others are as large."""
    peft = pytest.importorskip("peft")
    wide = nn.Sequential(nn.Linear(240, 480), nn.Tanh(), nn.Linear(480, 240))
    theirs = peft.get_peft_model(copy.deepcopy(wide), configured(peft, arm)).base_model.model[0]
    ours = lora.attach(wide, maps(wide), arm)[0]
    pairs = [(getattr(ours, k), theirs.get_parameter(v)) for k, v in NAMES[arm[:4]].items()]
    if arm.startswith("vera"):
        pairs += [(ours.A, theirs.vera_A["default"]), (ours.B, theirs.vera_B["default"])]
    for mine, wanted in pairs:
        assert mine.std().item() == pytest.approx(wanted.std().item(), rel=0.15, abs=1e-7)
        assert mine.abs().max().item() == pytest.approx(wanted.abs().max().item(), rel=0.05)


@pytest.mark.parametrize("fold", [lora.square, functools.partial(lora.crossed, k=4)])
def test_a_sum_of_products_is_the_sum_of_their_matrices_and_starts_at_zero(base, fold):
    model = lora.attach_terms(copy.deepcopy(base), maps(base), 3, fold)
    assert torch.allclose(model(X), base(X), atol=1e-12)
    layer = model[2]
    assert models.size(layer) == 3 * sum(d * h for d, h in zip(*fold(48, 24)))
    products = []
    for term in layer.update.terms:
        nn.init.normal_(term.weights[1])
        products.append(torch.kron(*term.weights))
    x = torch.randn(5, 48).double()
    assert torch.allclose(layer(x), x @ (layer.base_layer.weight + sum(products)).T)
    with torch.autocast("cpu", torch.bfloat16):
        update = layer(x).double() - layer.base_layer(x).double()
    assert torch.allclose(update, x @ sum(products).T, atol=0.05)
