"""ndlinear_lokr.py: files of LyCORIS, ai-toolkit and PEFT, made here, and plain LoRA, both ways."""

import copy

import pytest
import torch
from torch import nn

import ndlinear_lokr as lokr
from ndlinear_lora import NdLinearLoRA, apply_ndlinear_lora


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.to_q, self.to_out = nn.Linear(24, 30), nn.ModuleList([nn.Linear(30, 24)])

    def forward(self, x):
        return self.to_out[0](torch.tanh(self.to_q(x)))


@pytest.fixture
def model():
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block()).double()


@pytest.fixture
def x():
    return torch.randn(5, 24, generator=torch.Generator().manual_seed(1)).double()


SIZES = {"to_q": ((5, 6), (4, 6)), "to_out.0": ((4, 6), (3, 10))}  # (H_1, H_2), (D_1, D_2)


def lokr_file(start, joint, rank=None, alpha=1.0):
    """A file as the other libraries write it, with a second factor of low rank if one is given.

    start: before the names, joint: between their parts.
    """
    torch.manual_seed(2)
    tensors = {}
    for block in ("0", "1"):
        for name, (hidden, dims) in SIZES.items():
            key = start + f"{block}.{name}".replace(".", joint)
            tensors[f"{key}.lokr_w1"] = torch.randn(hidden[0], dims[0]).double()
            if rank is None:
                tensors[f"{key}.lokr_w2"] = torch.randn(hidden[1], dims[1]).double()
            else:
                tensors[f"{key}.lokr_w2_a"] = torch.randn(hidden[1], rank).double()
                tensors[f"{key}.lokr_w2_b"] = torch.randn(rank, dims[1]).double()
            if alpha is not None:
                tensors[f"{key}.alpha"] = torch.tensor(alpha)
    return tensors


def second_of(tensors, key):
    if f"{key}.lokr_w2" in tensors:
        return tensors[f"{key}.lokr_w2"]
    return tensors[f"{key}.lokr_w2_a"] @ tensors[f"{key}.lokr_w2_b"]


def merged(model, tensors, start, joint, scale):
    """The model with its weights changed by hand."""
    other = copy.deepcopy(model)
    for block in ("0", "1"):
        for name in SIZES:
            key = start + f"{block}.{name}".replace(".", joint)
            update = torch.kron(tensors[f"{key}.lokr_w1"], second_of(tensors, key))
            other.get_submodule(f"{block}.{name}").weight.data += scale * update
    return other


FILES = {  # start, joint, rank, alpha -> scale
    "LyCORIS, second factor of rank 2": (("lycoris_", "_", 2, 3.0), 1.5),
    "LyCORIS, full factors": (("lora_unet_", "_", None, 8.0), 1.0),
    "ai-toolkit, full factors": (("diffusion_model.", ".", None, 1e10), 1.0),
    "without alpha": (("", ".", 2, None), 1.0),
}


@pytest.mark.parametrize("kind", FILES)
def test_a_file_gives_the_function_of_its_library(kind, model, x):
    how, scale = FILES[kind]
    tensors = lokr_file(*how)
    wanted = merged(model, tensors, how[0], how[1], scale)(x)
    loaded = lokr.load_lokr(model, tensors)
    torch.testing.assert_close(loaded(x), wanted)
    adapters = [m for m in loaded.modules() if isinstance(m, NdLinearLoRA)]
    assert len(adapters) == 4 and {layer.alpha for layer in adapters} == {scale}


def test_a_scale_that_is_given_holds_for_full_factors_too(model, x):
    tensors = lokr_file("base_model.model.", ".", alpha=None)
    wanted = merged(model, tensors, "base_model.model.", ".", 0.25)(x)
    torch.testing.assert_close(lokr.load_lokr(model, tensors, scale=0.25)(x), wanted)


def test_a_prefix_chooses_the_layers_of_one_of_two_models(model, x):
    tensors = lokr_file("lora_unet_", "_")
    other = torch.ones(1, 1)
    both = tensors | {"lora_te_q.lokr_w1": other, "lora_te_q.lokr_w2": other}
    with pytest.raises(ValueError, match="give the prefix of those to read"):
        lokr.load_lokr(model, both)
    assert not any(isinstance(m, NdLinearLoRA) for m in model.modules())
    wanted = merged(model, tensors, "lora_unet_", "_", 1.0)(x)
    torch.testing.assert_close(lokr.load_lokr(model, both, prefix="lora_unet_")(x), wanted)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"0.to_q.lokr_w2_b": None}, "0.to_q lacks lokr_w2, and lokr_w2_a with lokr_w2_b"),
        ({"0.to_q.dora_scale": torch.ones(30, 1)}, "DoRA .* cannot be converted"),
        ({"0.to_q.lokr_t2": torch.ones(2, 2, 3, 3)}, "convolutions"),
        ({"0.to_q.lokr_w2": torch.ones(6, 6, 1, 1)}, "0.to_q adapts a convolution"),
        ({"0.to_q.lokr_w1": torch.ones(5, 3)}, r"update of 0.to_q is \(30, 18\).*\(30, 24\)"),
        ({"0.norm.lokr_w1": torch.ones(1, 1), "0.norm.lokr_w2": torch.ones(1, 1)}, "no prefix"),
    ],
)
def test_other_files_are_refused_and_change_nothing(change, words, model):
    tensors = lokr_file("", ".", 2) | change
    tensors = {key: value for key, value in tensors.items() if value is not None}
    with pytest.raises(ValueError, match=words):
        lokr.load_lokr(model, tensors)
    assert not any(isinstance(m, NdLinearLoRA) for m in model.modules())
    assert all(p.requires_grad for p in model.parameters())
    with pytest.raises(ValueError, match="no LoKr adapter"):
        lokr.read_lokr({})


def named(names, start="lycoris_"):
    """A file with an update for each name."""
    ones = torch.ones(2, 2)
    return {f"{start}{name}.lokr_{part}": ones for name in names for part in ("w1", "w2")}


def tree(*names):
    """A model with a layer under each dotted name."""
    model = nn.Module()
    for name in names:
        parent, _, last = name.rpartition(".")
        if parent:
            model.add_module(parent, nn.Module())
        model.get_submodule(parent).add_module(last, nn.Linear(4, 4))
    return model


@pytest.mark.parametrize(
    ("layers", "names", "found"),
    [
        (("q", "to_q"), ["to_q"], ["to_q"]),
        (("a_b", "a.b"), ["a_b"], ["a_b"]),
        (("a_b", "a.b"), ["a.b"], ["a.b"]),
    ],
)
def test_an_update_goes_to_the_layer_of_its_name(layers, names, found):
    loaded = lokr.load_lokr(tree(*layers), named(names))
    assert [name for name, m in loaded.named_modules() if isinstance(m, NdLinearLoRA)] == found


@pytest.mark.parametrize(
    ("layers", "names", "options", "error", "words"),
    [
        (("q",), ["blk_seq"], {}, ValueError, "no prefix"),
        (("a_b.c", "a.b_c"), ["a_b_c"], {}, ValueError, r"several layers: .*a_b\.c.*rename"),
        (("a.b",), ["a_b", "a.b"], {}, ValueError, "one layer of this model"),
        (("q",), ["q"], {"alpha": 2.0}, TypeError, r"leave out \['alpha'\].*scale="),
    ],
)
def test_an_update_goes_to_no_layer_by_guessing(layers, names, options, error, words):
    model = tree(*layers)
    with pytest.raises(error, match=words):
        lokr.load_lokr(model, named(names), **options)
    assert not any(isinstance(m, NdLinearLoRA) for m in model.modules())


@pytest.mark.parametrize("name", ["a", "b"])
def test_a_shared_layer_is_adapted_under_all_its_names(name):
    shared = nn.Linear(4, 4)
    loaded = lokr.load_lokr(nn.ModuleDict({"a": shared, "b": shared}), named([name]))
    assert isinstance(loaded["a"], NdLinearLoRA) and loaded["a"] is loaded["b"]


def test_adapters_go_back_into_a_file_that_holds_their_scale(model, x):
    tensors = lokr_file("", ".", 2, 3.0)
    bare = copy.deepcopy(model)
    loaded = lokr.load_lokr(model, tensors)
    for prefix in ("lycoris_", "base_model.model."):
        written = lokr.lokr_tensors(loaded, prefix)
        assert all(value.is_contiguous() for value in written.values())
        assert ("lycoris_0_to_q.lokr_w1" in written) == (prefix == "lycoris_")
        again = lokr.load_lokr(copy.deepcopy(bare), written)
        torch.testing.assert_close(again(x), loaded(x))


def test_what_is_no_lokr_is_not_written(model):
    with pytest.raises(ValueError, match="no NdLinearLoRA"):
        lokr.lokr_tensors(model)
    biased = apply_ndlinear_lora(copy.deepcopy(model), "to_q", bias=True)
    with pytest.raises(ValueError, match=r"0\.to_q is no LoKr, which has two modes and no biases"):
        lokr.lokr_tensors(biased)
    three = apply_ndlinear_lora(model, "to_q", input_dims=(2, 3, 4), hidden_size=(2, 3, 5))
    with pytest.raises(ValueError, match="two modes"):
        lokr.lokr_tensors(three)


@pytest.mark.parametrize("rank", [1, 4, 7, 40])
@pytest.mark.parametrize("scale", [None, -2.0])
def test_the_nearest_lora_is_that_of_the_dense_update(rank, scale):
    tensors = lokr_file("", ".", 2, 3.0)
    found, errors = lokr.lokr_to_lora(tensors, rank, scale=scale)
    for name, error in errors.items():
        down, up = found[f"{name}.lora_A.weight"], found[f"{name}.lora_B.weight"]
        assert (len(down), up.shape[1]) == (rank, rank)
        factor = 1.5 if scale is None else scale
        update = factor * torch.kron(tensors[f"{name}.lokr_w1"], second_of(tensors, name))
        u, s, v = torch.linalg.svd(update, full_matrices=False)
        best = u[:, :rank] * s[:rank] @ v[:rank]
        torch.testing.assert_close(up @ down, best)
        assert error == pytest.approx((s[rank:].norm() / s.norm()).item(), abs=1e-12)
    with pytest.raises(ValueError, match="at least 1"):
        lokr.lokr_to_lora(tensors, 0)


def test_a_lora_of_an_update_of_zero_is_zero():
    tensors = {"q.lokr_w1": torch.ones(2, 2), "q.lokr_w2": torch.zeros(3, 3)}
    found, errors = lokr.lokr_to_lora(tensors, 2, names=lokr.LORA[1])
    assert set(found) == {"q.lora_down.weight", "q.lora_up.weight"} and errors == {"q": 0.0}
    assert not (found["q.lora_up.weight"] @ found["q.lora_down.weight"]).any()


@pytest.mark.parametrize("ends", lokr.LORA)
def test_a_lora_becomes_the_nearest_kronecker_product(ends):
    torch.manual_seed(3)
    down, up = torch.randn(2, 24).double(), torch.randn(30, 2).double()
    tensors = {f"q.{ends[0]}": down, f"q.{ends[1]}": up, "q.alpha": torch.tensor(6.0)}
    found, errors = lokr.lora_to_lokr(tensors)
    update = 3.0 * up @ down
    kept = torch.kron(found["q.lokr_w1"], found["q.lokr_w2"])
    assert found["q.lokr_w1"].shape == (5, 4) and found["q.lokr_w2"].shape == (6, 6)
    assert errors["q"] == pytest.approx(((update - kept).norm() / update.norm()).item())
    s = torch.linalg.svdvals(update.reshape(5, 6, 4, 6).transpose(1, 2).reshape(20, 36))
    assert errors["q"] == pytest.approx((s[1:].norm() / s.norm()).item())
    half = lokr.lora_to_lokr(tensors, scale=1.5)[0]
    torch.testing.assert_close(2 * torch.kron(half["q.lokr_w1"], half["q.lokr_w2"]), kept)
    with pytest.raises(ValueError, match="not the two matrices"):
        lokr.lora_to_lokr({f"q.{ends[0]}": down})


def test_peft_reads_and_writes_the_same_numbers(model, x):
    peft = pytest.importorskip("peft")
    targets = r".*\.(to_q|to_out\.0)"
    config = peft.LoKrConfig(r=10**5, alpha=10**5, target_modules=targets)
    ours = apply_ndlinear_lora(copy.deepcopy(model), "all-linear", alpha=0.5)
    for layer in ours.modules():
        if isinstance(layer, NdLinearLoRA):
            layer.adapter.reset_parameters()
    theirs = peft.get_peft_model(copy.deepcopy(model), config)
    written = lokr.lokr_tensors(ours, "base_model.model.")
    peft.set_peft_model_state_dict(theirs, written)
    torch.testing.assert_close(theirs(x), ours(x))
    how = {"r": 2, "alpha": 8, "decompose_both": True, "decompose_factor": 6}
    config = peft.LoKrConfig(target_modules=targets, init_weights=False, **how)
    theirs = peft.get_peft_model(copy.deepcopy(model), config)
    tensors = peft.get_peft_model_state_dict(theirs)
    assert any(key.endswith("lokr_w2_a") for key in tensors)
    torch.testing.assert_close(lokr.load_lokr(model, tensors, scale=4.0)(x), theirs(x))
