"""ndlinear_peft.py: NdLinear adapters inside PEFT, and no silent way to lose them."""

import copy

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

peft = pytest.importorskip("peft")
import ndlinear_lora  # noqa: E402
import ndlinear_peft  # noqa: E402
from ndlinear_peft import NdLinearConfig, NdLinearLora, load  # noqa: E402


def base(dtype=torch.float32):
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(64, 48), nn.GELU(), nn.Linear(48, 32), nn.Linear(32, 3)).to(
        dtype
    )


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


@pytest.fixture
def x():
    return torch.randn(3, 5, 64, generator=torch.Generator().manual_seed(0))


def test_zero_at_start_and_training_moves_the_adapters_alone(x):
    torch.manual_seed(0)
    config = NdLinearConfig(target_modules=["0", "2"], lora_alpha=2.0)
    model, plain = peft.get_peft_model(base(), config), base()
    assert torch.equal(model(x), plain(x))
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    assert len(trained) == 4 and all(".lora_" in name for name in trained)
    optimiser = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], 1e-2)
    for _ in range(3):
        optimiser.zero_grad()
        model(x).square().mean().backward()
        optimiser.step()
    assert not torch.allclose(model(x), plain(x), atol=1e-3)
    with model.disable_adapter():
        assert torch.equal(model(x), plain(x))


def test_the_same_function_as_ndlinear_lora(x):
    model = adapted()
    ours = ndlinear_lora.apply_ndlinear_lora(base(), ["0", "2"], alpha=2.0)
    for name in ("0", "2"):
        state = model.get_submodule(f"base_model.model.{name}").layers["default"].state_dict()
        ours.get_submodule(f"{name}.adapter").load_state_dict(state)
    torch.testing.assert_close(model(x), ours(x), atol=1e-5, rtol=1e-5)


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
    assert torch.equal(again(x), model(x)) and not any(p.requires_grad for p in again.parameters())
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


def test_load_refuses_an_ordinary_file_in_words(tmp_path):
    peft.get_peft_model(base(), peft.LoraConfig(target_modules=["0"])).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="holds no NdLinear adapter"):
        load(base(), tmp_path)


def test_several_adapters(x, tmp_path):
    first = adapted(seed=0)
    adapted(seed=1, lora_alpha=0.5).save_pretrained(tmp_path)
    y_first, y_second = first(x), load(base(), tmp_path)(x)
    load(first, tmp_path, "second")
    assert torch.equal(first(x), y_first)
    first.set_adapter("second")
    assert torch.equal(first(x), y_second) and not torch.allclose(y_first, y_second, atol=1e-3)
    first.delete_adapter("second")
    first.set_adapter("default")
    assert torch.equal(first(x), y_first)


@pytest.mark.parametrize("kind", ["linear", "svd", "cat"])
def test_adapters_are_not_added_up_to_one(kind, x, tmp_path):
    model = adapted()
    model.save_pretrained(tmp_path)
    load(model, tmp_path, "second")
    y = model(x)
    with pytest.raises(ValueError, match=r"no add_weighted_adapter; make several active"):
        model.add_weighted_adapter(["default", "second"], [0.5, 0.5], "mix", kind)
    assert list(model.peft_config) == ["default", "second"] and torch.equal(model(x), y)


def test_merge_and_unmerge(x):
    model, plain = adapted(), base()
    y = model(x)
    model.merge_adapter()
    assert (model(x) - y).abs().max() < 1e-5
    with model.disable_adapter():
        assert (model(x) - plain(x)).abs().max() < 1e-5
    model.unmerge_adapter()
    assert (model(x) - y).abs().max() < 1e-5
    merged = model.merge_and_unload(safe_merge=True)
    assert type(merged[0]) is nn.Linear and (merged(x) - y).abs().max() < 1e-5


def test_a_half_precision_base_has_float32_adapters_that_keep_their_dtype(x, tmp_path):
    model = adapted(base(torch.bfloat16))
    dtypes = {p.dtype for n, p in model.named_parameters() if "lora_" in n}
    assert dtypes == {torch.float32} and model(x.bfloat16()).dtype == torch.bfloat16
    model.save_pretrained(tmp_path)
    assert torch.equal(load(base(torch.bfloat16), tmp_path)(x.bfloat16()), model(x.bfloat16()))
    half = peft.get_peft_model(
        base(torch.bfloat16), NdLinearConfig(target_modules=["0"]), autocast_adapter_dtype=False
    )
    assert half.base_model.model[0].layers["default"].weights[0].dtype == torch.bfloat16


def test_merge_into_whole_numbers_is_refused():
    model = adapted()
    whole = torch.zeros(48, 64, dtype=torch.uint8)
    model.base_model.model[0].base_layer.weight = nn.Parameter(whole, requires_grad=False)
    with pytest.raises(TypeError, match="cannot be merged into quantised weights"):
        model.merge_adapter()


def test_scales(x):
    model = adapted()
    layer, y = model.base_model.model[0], model(x)
    layer.scale_layer(3.0)
    assert layer.scaling["default"] == 6.0 and not torch.equal(model(x), y)
    layer.unscale_layer(3.0)
    layer.set_scale("default", 2.0)
    assert layer.scaling["default"] == 4.0
    layer.unscale_layer()
    assert torch.equal(model(x), y)


@pytest.mark.parametrize(
    "options, words",
    [
        ({"r": 8}, "has no rank: leave r=8 out"),
        ({"use_dora": True}, "has no use_dora"),
        ({"use_rslora": True}, "has no use_rslora"),
        ({"init_lora_weights": "gaussian"}, "starts at zero"),
        ({"use_qalora": True}, "has no use_qalora: leave it out"),
        ({"alora_invocation_tokens": [1]}, "has no alora_invocation_tokens"),
        ({"eva_config": peft.EvaConfig()}, "has no eva_config"),
        ({"rank_pattern": {"0": 2}}, "has no rank_pattern"),
    ],
)
def test_what_low_rank_alone_has_is_refused(options, words):
    with pytest.raises(ValueError, match=words):
        NdLinearConfig(target_modules=["0"], **options)


def test_other_layers_are_refused():
    with pytest.raises(TypeError, match=r"not torch.*\.Conv1d: leave it out"):
        peft.get_peft_model(nn.Sequential(nn.Conv1d(4, 4, 1)), NdLinearConfig(target_modules=["0"]))


def test_patterns_dropout_and_a_copy(x):
    pattern = {"2": 8.0}
    model = adapted(lora_dropout=0.5, alpha_pattern=pattern)
    layers = model.base_model.model
    assert layers[0].scaling["default"] == 2.0 and layers[2].scaling["default"] == 8.0
    model.train()
    assert not torch.equal(model(x), model(x))
    model.eval()
    assert torch.equal(copy.deepcopy(model)(x), model(x))
    assert "lora_second" in repr(layers[0])


def test_the_start_is_one_that_peft_does_not_know():
    with pytest.raises(ValueError, match="Unknown initialization"):
        plain = peft.LoraConfig(target_modules=["0"], init_lora_weights=ndlinear_peft.START)
        peft.get_peft_model(base(), plain)


def test_a_conv1d_of_transformers(x):
    from transformers.pytorch_utils import Conv1D

    torch.manual_seed(0)
    plain = nn.Sequential(Conv1D(48, 64))
    model = adapted(copy.deepcopy(plain), target_modules=["0"])
    first, second = model.base_model.model[0].layers["default"].weights
    wanted = plain(x) + 2.0 * x @ torch.kron(first, second).T
    torch.testing.assert_close(model(x), wanted, atol=1e-4, rtol=1e-4)
    model.merge_adapter()
    torch.testing.assert_close(model(x), wanted, atol=1e-4, rtol=1e-4)
    model.unmerge_adapter()
    with model.disable_adapter():
        torch.testing.assert_close(model(x), plain(x), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("autocast", [False, True])
def test_an_adapter_loaded_beside_another_has_the_dtype_that_was_asked_for(autocast, tmp_path):
    adapted().save_pretrained(tmp_path)
    model = adapted(base(torch.bfloat16))
    load(model, tmp_path, "second", autocast_adapter_dtype=autocast)
    wanted = torch.float32 if autocast else torch.bfloat16
    second = model.base_model.model[0].layers["second"].weights
    assert {weight.dtype for weight in second} == {wanted}
