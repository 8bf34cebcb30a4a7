"""ndlinear_peft.py: NdLinear adapters inside PEFT, and no silent way to lose them."""

import copy
import dataclasses
import random

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

peft = pytest.importorskip("peft")
import ndlinear_lora  # noqa: E402
from ndlinear_peft import NdLinearConfig, NdLinearLora, load  # noqa: E402


def base(dtype=torch.float32):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(64, 48), nn.GELU(), nn.Linear(48, 32), nn.Linear(32, 3))
    return model.to(dtype)


def adapted(model=None, seed=0, **options):
    """A PeftModel whose adapters do something."""
    options = {"target_modules": ["0", "2"], "lora_alpha": 2.0} | options
    model = peft.get_peft_model(model or base(), NdLinearConfig(**options))
    return stirred(model, "default", seed)


def stirred(model, name, seed):
    torch.manual_seed(seed)
    for layer in model.modules():
        if isinstance(layer, NdLinearLora):
            for weight in layer.layers[name].weights:
                nn.init.normal_(weight, std=0.3)
    return model


def alike(a, b):
    """Equal up to rounding: a model whose adapters are frozen may take another plan for the same map."""
    return torch.allclose(a, b, rtol=1e-5, atol=1e-5)


@pytest.fixture
def x():
    return torch.randn(3, 5, 64, generator=torch.Generator().manual_seed(0))


def test_zero_at_start_then_the_function_of_ndlinear_lora(x):
    config = NdLinearConfig(target_modules=["0", "2"], lora_alpha=2.0)
    model, plain = peft.get_peft_model(base(), config), base()
    assert torch.equal(model(x), plain(x))
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert len(trained) == 4 and all(".lora_" in name for name in trained)
    model(x).square().mean().backward()
    assert all(p.grad.any() == ("lora_second" in name) for name, p in trained.items())
    stirred(model, "default", 0)
    ours = ndlinear_lora.apply_ndlinear_lora(base(), ["0", "2"], alpha=2.0)
    for name in ("0", "2"):
        state = model.get_submodule(f"base_model.model.{name}").layers["default"].state_dict()
        ours.get_submodule(f"{name}.adapter").load_state_dict(state)
    assert alike(model(x), ours(x)) and not torch.allclose(model(x), plain(x), atol=1e-3)
    with model.disable_adapter():
        assert torch.equal(model(x), plain(x))


@pytest.mark.parametrize("low", [False, True])
def test_save_and_load(low, x, tmp_path):
    model = adapted(modules_to_save=["3"])
    with torch.no_grad():
        for parameter in model.base_model.model[3].modules_to_save.parameters():
            parameter.add_(1.0)
    model.save_pretrained(tmp_path)
    names = load_file(tmp_path / "adapter_model.safetensors")
    assert "base_model.model.0.lora_first.weight" in names, "without the adapter's name"
    again = load(base(), tmp_path, low_cpu_mem_usage=low)
    assert alike(again(x), model(x)) and not any(p.requires_grad for p in again.parameters())
    more = load(base(), tmp_path, is_trainable=True)
    assert sum(p.requires_grad for p in more.parameters()) == 6


@pytest.mark.parametrize("low", [False, True])
def test_plain_peft_refuses_the_file_in_words(low, tmp_path):
    adapted().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"load it with ndlinear_peft\.load"):
        peft.PeftModel.from_pretrained(base(), tmp_path, low_cpu_mem_usage=low)
    beside = peft.get_peft_model(base(), peft.LoraConfig(target_modules=["0", "2"]))
    with pytest.raises(ValueError, match=r"load it with ndlinear_peft\.load"):
        beside.load_adapter(tmp_path, "second")
    ours = adapted()
    with pytest.raises(TypeError, match=r"ndlinear_peft\.load"):
        ours.load_adapter(tmp_path, "second")
    with pytest.raises(ValueError, match="cannot stand on a layer that has a LoRA already"):
        beside.add_adapter("third", NdLinearConfig(target_modules=["0"]))
    beside.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="holds no NdLinear adapter"):
        load(base(), tmp_path)


def test_a_half_precision_base_has_adapters_of_float32_or_of_its_dtype(x, tmp_path):
    model = adapted(base(torch.bfloat16))
    dtypes = {p.dtype for n, p in model.named_parameters() if "lora_" in n}
    assert dtypes == {torch.float32} and model(x.bfloat16()).dtype == torch.bfloat16
    model.save_pretrained(tmp_path)
    assert torch.equal(load(base(torch.bfloat16), tmp_path)(x.bfloat16()), model(x.bfloat16()))
    for autocast, dtype in ((True, torch.float32), (False, torch.bfloat16)):
        config, how = NdLinearConfig(target_modules=["0"]), {"autocast_adapter_dtype": autocast}
        made = peft.get_peft_model(base(torch.bfloat16), config, **how)
        load(made, tmp_path, "second", **how)
        for adapter in made.base_model.model[0].layers.values():
            assert adapter.weights[0].dtype == dtype


@pytest.mark.parametrize(
    "options, words",
    [
        ({"r": 8}, "has no rank: leave r=8 out"),
        ({"use_dora": True}, "has no use_dora: leave it out"),
        ({"init_lora_weights": "gaussian"}, "starts at zero"),
        ({"eva_config": peft.EvaConfig()}, "has no eva_config"),
        ({"rank_pattern": {"0": 2}}, "has no rank_pattern"),
        ({"lora_alpha": float("nan")}, "lora_alpha of adapter default is nan"),
        ({"alpha_pattern": {"2": 1e400}}, "lora_alpha of adapter default is inf"),
        ({"target_modules": ["4"]}, r"needs a torch.nn.Linear, not torch.*\.Conv1d: leave it out"),
    ],
)
def test_what_low_rank_alone_has_and_other_layers_are_refused(options, words):
    model = base().append(nn.Conv1d(4, 4, 1))
    with pytest.raises((ValueError, TypeError), match=words):
        peft.get_peft_model(model, NdLinearConfig(**{"target_modules": ["0", "2"]} | options))


def test_patterns_dropout_and_a_copy(x):
    """Adapters come in the mode of their layers."""
    options = {"lora_dropout": 0.5, "alpha_pattern": {"2": 8.0}}
    model = adapted(base().eval(), **options)
    layers = model.base_model.model
    assert layers[0].scaling["default"] == 2.0 and layers[2].scaling["default"] == 8.0
    model.add_adapter("second", NdLinearConfig(target_modules=["0", "2"], **options))
    stirred(model, "second", 0)
    for name in ("second", "default"):
        model.set_adapter(name)
        assert torch.equal(model(x), model(x))
    assert torch.equal(copy.deepcopy(model)(x), model(x))
    assert not torch.equal(model.train()(x), model(x))
    assert "lora_second" in repr(layers[0])


def test_a_conv1d_of_transformers(x):
    from transformers.pytorch_utils import Conv1D

    torch.manual_seed(0)
    plain = nn.Sequential(Conv1D(48, 64))
    model = adapted(copy.deepcopy(plain), target_modules=["0"])
    first, second = model.base_model.model[0].layers["default"].weights
    wanted = plain(x) + 2.0 * x @ torch.kron(first, second).T
    torch.testing.assert_close(model(x), wanted, atol=1e-4, rtol=1e-4)
    layer = model.base_model.model[0]
    torch.testing.assert_close(x @ layer.weight + layer.bias, wanted, atol=1e-4, rtol=1e-4)
    model.merge_adapter()
    torch.testing.assert_close(model(x), wanted, atol=1e-4, rtol=1e-4)
    model.unmerge_adapter()
    with model.disable_adapter():
        torch.testing.assert_close(model(x), plain(x), atol=1e-4, rtol=1e-4)


# ------------------------------------------------------------------------------------------ merged in part, and rescaled
def layers_of(model):
    return (model.base_model.model[0], model.base_model.model[2])


def halve(layer):
    """As peft.helpers.rescale_adapter_scale."""
    layer.scaling = {name: scale / 2 for name, scale in layer.scaling.items()}


SCALES = {  # what changes the function, and the scales after it
    "new scales": (halve, lambda a, b: (a / 2, b / 2)),
    "scale_layer": (lambda layer: layer.scale_layer(2.0), lambda a, b: (2 * a, 2 * b)),
    "unscale_layer": (lambda layer: layer.unscale_layer(4.0), lambda a, b: (a / 4, b / 4)),
    "set_scale": (lambda layer: layer.set_scale("default", 3.0), lambda a, b: (6.0, b)),
    "back": (lambda layer: layer.unscale_layer(), lambda a, b: (2.0, 0.5)),
}
MERGES = {  # what does not
    "one": lambda model: model.merge_adapter(adapter_names=["default"]),
    "other": lambda model: model.merge_adapter(adapter_names=["second"]),
    "all": lambda model: model.merge_adapter(),
    "none": lambda model: model.unmerge_adapter(),
}


@pytest.mark.filterwarnings("ignore:Already")
@pytest.mark.parametrize("seed", range(8))
def test_scales_changed_while_adapters_are_merged_in_part_act_and_unmerge(seed, x, tmp_path):
    """Six steps drawn at random, beside a twin that is never merged; at the end all is taken out, or added for good."""
    model, scales = adapted(), (2.0, 0.5)
    adapted(seed=1, lora_alpha=0.5).save_pretrained(tmp_path)
    load(model, tmp_path, "second")
    model.base_model.set_adapter(["default", "second"])
    twin, draw = copy.deepcopy(model), random.Random(seed)
    for name in [draw.choice([*SCALES, *MERGES]) for _ in range(6)] + ["scale_layer", "one"]:
        if name in MERGES:
            MERGES[name](model)
        else:
            change, after = SCALES[name]
            scales = after(*scales)
            for layer in (*layers_of(model), *layers_of(twin)):
                change(layer)
                assert tuple(layer.scaling.values()) == scales
        torch.testing.assert_close(model(x), twin(x), atol=1e-3, rtol=1e-3)
    unloaded = copy.deepcopy(model).merge_and_unload(safe_merge=True)
    torch.testing.assert_close(unloaded(x), twin(x), atol=1e-3, rtol=1e-3)
    assert type(unloaded[0]) is nn.Linear
    model.merge_adapter()
    stirred(model, "default", 5)  # what is taken out is what was merged
    if seed % 2:
        model.unmerge_adapter()
    with model.disable_adapter():
        torch.testing.assert_close(model(x), base()(x), atol=1e-3, rtol=1e-3)


def test_whole_numbers_and_a_weight_that_is_not_held_are_not_merged_into():
    model, plain = adapted(), base()
    whole = torch.zeros(48, 64, dtype=torch.uint8)
    model.base_model.model[0].base_layer.weight = nn.Parameter(whole, requires_grad=False)
    nn.utils.parametrizations.weight_norm(plain[2])
    other = adapted(plain, target_modules=["2"])
    for one, words in ((model, "into quantised weights"), (other, "remove_parametrizations")):
        with pytest.raises(TypeError, match=words):
            one.merge_adapter()


# --------------------------------------------------------------------------------------------- what PEFT's users do, too
@pytest.mark.parametrize("targets", [["linear1", "linear2"], ["out_proj"]])
def test_code_that_reads_weights_and_does_not_call_sees_the_update(targets):
    """As torch's encoder does in evaluation, and its attention always."""
    torch.manual_seed(0)
    plain = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    model, x = adapted(copy.deepcopy(plain), target_modules=targets), torch.randn(2, 3, 16)
    dense = copy.deepcopy(model)
    dense.merge_adapter()
    wanted = dense.train()(x)
    assert not alike(wanted, plain(x))
    y = model.train()(x)
    y.sum().backward()
    assert all(p.grad.any() for p in model.parameters() if p.requires_grad)
    with torch.no_grad():
        for other in (y, model.eval()(x), dense.eval()(x)):
            torch.testing.assert_close(other, wanted, atol=1e-4, rtol=1e-4)
        with model.disable_adapter():
            torch.testing.assert_close(model(x), plain.eval()(x), atol=1e-4, rtol=1e-4)


def test_a_scale_of_zero_still_has_gradients(x):
    model = adapted(lora_alpha=0.0)
    model(x).sum().backward()
    assert alike(model(x), base()(x))
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)


def test_an_adapter_in_a_subfolder_is_read_with_its_own_configuration(x, tmp_path):
    model = adapted(target_modules=["0"])
    model.add_adapter("other", NdLinearConfig(target_modules=["0", "2"], lora_alpha=3.0))
    stirred(model, "other", 1).set_adapter("other")
    model.save_pretrained(tmp_path)
    again = load(base(), tmp_path, subfolder="other")
    assert alike(again(x), model(x))
    load(again, tmp_path, "third", subfolder="other")
    again.set_adapter("third")
    assert alike(again(x), model(x))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: adapted(lora_alpha=5.0), r"\(5\.0, \{\}\), the one in the folder \(2\.0, \{\}\)"),
        (lambda: adapted(alpha_pattern={"0": 1.0}), "lora_alpha and alpha_pattern"),
        (lambda: adapted(target_modules=["0"]), r"'base_model.model.2.lora_first.* were not read"),
        (lambda: merged(adapted()), r"is merged: call unmerge_adapter\(\) first"),
    ],
)
def test_an_adapter_is_not_read_into_another_one(make, words, tmp_path):
    adapted().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=words):
        load(make(), tmp_path)


def merged(model):
    model.merge_adapter()
    return model


def test_several_adapters_one_after_the_other_and_mixed_in_a_batch(x, tmp_path):
    model, other = adapted(), adapted(seed=1, lora_alpha=0.5)
    wanted = {"default": model(x), "second": other(x), "__base__": base()(x)}
    other.save_pretrained(tmp_path)
    load(model, tmp_path, "second")
    assert alike(model(x), wanted["default"]), "the one that was active still is"
    for kind in ("linear", "svd", "cat"):
        with pytest.raises(ValueError, match=r"no add_weighted_adapter; make several active"):
            model.add_weighted_adapter(["default", "second"], [0.5, 0.5], "mix", kind)
    model.set_adapter("second")
    assert alike(model(x), wanted["second"])
    with pytest.raises(ValueError, match="non-existing adapter"):
        model.eval()(x, adapter_names=["third", "default", "default"])
    names = ["second", "__base__", "default"]
    for row, (name, mixed) in enumerate(zip(names, model(x, adapter_names=names))):
        torch.testing.assert_close(mixed, wanted[name][row], atol=1e-5, rtol=1e-5)
    less = copy.deepcopy(model)
    less.delete_adapter("second")
    less.set_adapter("default")
    assert alike(less(x), wanted["default"])
    assert all(list(layer.layers) == ["default"] for layer in layers_of(less))
    model.merge_adapter()
    with pytest.raises(ValueError, match="merged adapters"):
        model(x, adapter_names=names)


@pytest.mark.parametrize(
    "copied",
    [
        lambda c: dataclasses.replace(c, lora_alpha=3.0),
        lambda c: NdLinearConfig(**{**c.to_dict(), "lora_alpha": 3.0}),
        lambda c: dataclasses.replace(copy.deepcopy(c), lora_alpha=3.0),
    ],
)
def test_a_configuration_can_be_copied(copied, x):
    first = NdLinearConfig(target_modules=["0"], lora_alpha=2.0, lora_dropout=0.25)
    config = copied(first)
    assert (config.lora_alpha, config.lora_dropout, config.target_modules) == (3.0, 0.25, {"0"})
    model = peft.get_peft_model(base(), config)
    assert model.base_model.model[0].scaling == {"default": 3.0}
    with pytest.raises(ValueError, match="has no use_dora"):
        dataclasses.replace(first, use_dora=True)


def test_sharded_layers_are_refused(fully_shard):
    with pytest.raises(ValueError, match="put the adapters on first"):
        peft.get_peft_model(fully_shard(base()), NdLinearConfig(target_modules=["0"]))
