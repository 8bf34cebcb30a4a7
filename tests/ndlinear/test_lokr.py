"""ndlinear_lokr.py: files of LyCORIS, ai-toolkit and PEFT, made here, and plain LoRA, both ways."""

import copy
import json
import math
import pathlib
import runpy
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ndlinear_cases import QUICK, Conv1D, Log, randomise, refused
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import ndlinear as nd
import ndlinear_lokr as lokr
from ndlinear_lora import NdLinearLoRA, apply_ndlinear_lora, merge_lora

NAMES = ("0.q", "0.out.0", "1.q", "1.out.0")
LAYERS = {  # inputs, outputs -> a layer
    "linear": nn.Linear,
    "convolution": lambda inputs, outputs: nn.Conv2d(inputs, outputs, 1),
    "Conv1D": lambda inputs, outputs: Conv1D(outputs, inputs),
}
WRAPPERS = {
    "nothing": lambda m: m,
    "compile": lambda m: torch.compile(m, backend="eager"),
    "of a part": lambda m: nn.Sequential(torch.compile(m[0], backend="eager"), m[1]),
    "data": nn.DataParallel,
    "the meta device": lambda m: m.to("meta"),
}
STARTS = ("", "lycoris_", "lora_te2_", "diffusion_model.", "base_model.model.")
OTHERS = {"bundle_emb.x": torch.ones(3), "lora_unet_a.lora_down.weight": torch.ones(1, 4)}


def stored(key, outputs, inputs, rank):
    """A factor as files hold it, whole or as a product, and the whole one."""
    if rank is None:
        whole = torch.randn(outputs, inputs).double()
        return {key: whole}, whole
    a, b = torch.randn(outputs, rank).double(), torch.randn(rank, inputs).double()
    return {f"{key}_a": a, f"{key}_b": b}, a @ b


@QUICK
@given(
    *map(st.sampled_from, (STARTS, tuple(LAYERS), tuple(WRAPPERS), (None, 2), (None, 3))),
    st.sampled_from([None, 6.0, 1e10]),
    st.sampled_from([None, 0.25, "of each layer"]),
    st.booleans(),
)
def test_a_file_comes_onto_a_model_and_back(
    start, kind, around, rank_1, rank_2, alpha, told, among_others
):
    """Each layer gets scale * (W_1 kron W_2), the scale as LyCORIS has it or as given."""

    def block():
        return nn.ModuleDict({"q": LAYERS[kind](12, 6), "out": nn.Sequential(LAYERS[kind](6, 12))})

    if start == "base_model.model." and alpha is None:
        told = told or 2.0
    bare = nn.Sequential(block(), block()).double()
    empty, model = copy.deepcopy(bare), WRAPPERS[around](bare)
    tensors, wanted, scales = dict(OTHERS) if among_others and start else {}, {}, {}
    options = {"prefix": start} if tensors else {}
    rank = rank_2 or rank_1
    for i, name in enumerate(NAMES):
        key = start + (name.replace(".", "_") if start.endswith("_") else name)
        sizes = ((2, 3), (3, 4)) if name.endswith("q") else ((3, 2), (4, 3))
        parts, first = stored("lokr_w1", *sizes[0], rank_1)
        more, second = stored("lokr_w2", *sizes[1], rank_2)
        parts |= more if alpha is None else more | {"alpha": torch.tensor(alpha)}
        tensors |= {f"{key}.{part}": value for part, value in parts.items()}
        own = alpha / rank if alpha and rank else 1.0
        scales[key] = 1.0 + i if told == "of each layer" else told or own
        wanted[name] = scales[key] * torch.kron(first, second)
    if told:
        options["scale"] = scales if told == "of each layer" else told
    assert lokr.load_lokr(model, tensors, **options) is model
    assert [layer.alpha for layer in adapters(bare).values()] == list(scales.values())
    written = lokr.lokr_tensors(model, start)
    assert {key.rpartition(".")[0] for key in written} == scales.keys()
    assert all(value.is_contiguous() for value in written.values())
    axes = {value.ndim for key, value in written.items() if key.endswith("w2")}
    assert axes == {4 if kind == "convolution" else 2}
    lokr.load_lokr(empty, written)
    for found in (bare, empty):
        for name, layer in adapters(found).items():
            made = layer.alpha * torch.kron(*layer.adapter.weights)
            torch.testing.assert_close(made, wanted.pop(name) if found is empty else wanted[name])
    assert not wanted


def adapters(model):
    return {name: m for name, m in model.named_modules() if isinstance(m, NdLinearLoRA)}


def named(*names):
    """A file with an update for each name."""
    keys = (f"lycoris_{name}.lokr_{part}" for name in names for part in ("w1", "w2"))
    return {key: torch.ones(2, 2) for key in keys}


def tree(*names, sizes=(4, 4)):
    """A model with a layer under each dotted name."""
    model = nn.Sequential()
    for name in names:
        parent, _, last = name.rpartition(".")
        if parent and not hasattr(model, parent):
            model.add_module(parent, nn.Sequential())
        model.get_submodule(parent).add_module(last, nn.Linear(*sizes))
    return model


@pytest.mark.parametrize(("name", "other"), [("to_q", "q"), ("a_b", "a.b"), ("a.b", "a_b")])
def test_an_update_goes_to_the_layer_of_its_name(name, other):
    assert list(adapters(lokr.load_lokr(tree(other, name), named(name)))) == [name]


@pytest.mark.parametrize("name", ["a", "b"])
def test_a_shared_layer_is_adapted_under_all_its_names(name):
    shared = nn.Linear(4, 4)
    loaded = lokr.load_lokr(nn.ModuleDict({"a": shared, "b": shared}), named(name))
    assert isinstance(loaded["a"], NdLinearLoRA) and loaded["a"] is loaded["b"]


THREE = {"input_dims": (2, 2, 1), "hidden_size": (2, 1, 2)}
NO_LOKR = [
    (tree("a"), "no NdLinearLoRA"),
    (NdLinearLoRA(nn.Linear(4, 4)), "put the NdLinearLoRA into a model"),
    (apply_ndlinear_lora(tree("a"), "a", bias=True), "a is no LoKr, .* two modes and no biases"),
    (apply_ndlinear_lora(tree("a"), "a", **THREE), "a is no LoKr"),
]


def test_what_is_no_lokr_is_not_written():
    for model, words in NO_LOKR:
        with pytest.raises(ValueError, match=words):
            lokr.lokr_tensors(model)
    alike = apply_ndlinear_lora(tree("a_b.c", "a.b_c"), "*")
    with pytest.raises(ValueError, match=r"the name lycoris_a_b_c, the second is a\.b_c: give a"):
        lokr.lokr_tensors(alike, "lycoris_")
    assert len(lokr.lokr_tensors(alike)) == 6


def test_peft_reads_what_is_written():
    peft = pytest.importorskip("peft")
    bare, x = tree("0", "1"), torch.randn(5, 4)
    theirs = peft.get_peft_model(
        copy.deepcopy(bare), peft.LoKrConfig(r=10**5, alpha=10**5, target_modules=["0", "1"])
    )
    ours = apply_ndlinear_lora(bare, "*", alpha=0.5)
    for layer in adapters(ours).values():
        randomise(layer.adapter)
    peft.set_peft_model_state_dict(theirs, lokr.lokr_tensors(ours, "base_model.model."))
    for name, layer in adapters(ours).items():
        theirs_too = theirs.base_model.model.get_submodule(name)
        torch.testing.assert_close(theirs_too(x), layer(x))


# ------------------------------------------------------------------------------------------ files that LyCORIS itself wrote
LYCORIS = pathlib.Path(__file__).parent / "lycoris"  # make.py there says how


def lycoris_network():
    torch.manual_seed(3)
    layers = {"q": nn.Linear(12, 18), "point": nn.Conv2d(4, 6, 1), "square": nn.Conv2d(4, 6, 3)}
    return nn.ModuleDict(layers)


@pytest.mark.parametrize("case", ["rank", "full", "both", "rs-lora", "scalar", "tucker"])
def test_a_file_of_lycoris_gives_its_updates(case):
    wanted, file = load_file(LYCORIS / "wanted.safetensors"), LYCORIS / f"{case}.safetensors"
    model, left_out = lycoris_network(), {}
    with refused(model, r"1 of 3 layers.*\n  lycoris_square: "):
        lokr.load_lokr(model, file, prefix="lycoris_")
    bare = copy.deepcopy(model)
    lokr.load_lokr(model, file, prefix="lycoris_", left_out=left_out)
    assert list(left_out) == ["lycoris_square"] and "convolution" in left_out["lycoris_square"]
    for name, x in (("q", torch.randn(3, 12)), ("point", torch.randn(2, 4, 5, 7))):
        with torch.no_grad():
            weight = bare[name].weight
            weight.add_(wanted[f"{case}.lycoris_{name}"].reshape(weight.shape))
        torch.testing.assert_close(model[name](x), bare[name](x), atol=1e-4, rtol=1e-4)


def test_the_program_makes_a_lora_and_a_lokr(tmp_path, monkeypatch, capsys):
    """Of what is converted it takes the way of naming, not of what is left out, here a LoRA with dots."""
    source, lora, again = (str(tmp_path / name) for name in ("source", "lora", "lokr"))
    other = {"a.b.lora_down.weight": torch.ones(1, 4)}
    save_file(load_file(LYCORIS / "tucker.safetensors") | other, source)
    command = [lokr.__file__, source, lora, "--to", "lora", "--rank", "12", "--skip"]
    monkeypatch.setattr(sys, "argv", command)
    runpy.run_path(lokr.__file__, run_name="__main__")
    said = capsys.readouterr().out
    assert "2 layers" in said and "lora_alpha = r = 12" in said
    assert "Left out: lycoris_square: it has lycoris_square.lokr_t2" in said
    wanted, made = load_file(LYCORIS / "wanted.safetensors"), load_file(lora)
    for name in ("q", "point"):
        down, up = (made[f"lycoris_{name}.lora_{part}.weight"] for part in ("down", "up"))
        update = wanted[f"tucker.lycoris_{name}"].flatten(1)
        torch.testing.assert_close(up.flatten(1) @ down.flatten(1), update, atol=1e-5, rtol=1e-5)
    assert made["lycoris_point.lora_down.weight"].shape == (12, 4, 1, 1)
    lokr.main([lora, again, "--to", "lokr"])
    assert set(lokr.read_lokr(again)) == {"lycoris_q", "lycoris_point"}


DORA = str(LYCORIS / "dora.safetensors")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--to", "lora", "--rank", "2"], "DoRA, which cannot be converted"),
        (["--to", "lora"], "needs --rank"),
        (["--to", "lokr", "--rank", "2"], "has none"),
        (["--to", "lora", "--rank", "0"], "at least 1"),
        (["--to", "lora", "--rank", "2", "--prefix", "nothing_"], "no name begins with 'nothing_'"),
        ([DORA, "--to", "lora", "--rank", "2"], "the target is the source"),
        (["--to", "neither"], "--to {lora,lokr}"),
    ],
)
def test_the_command_says_what_is_wrong_and_writes_nothing(arguments, words, tmp_path, capsys):
    target, before = tmp_path / "out.safetensors", pathlib.Path(DORA).read_bytes()
    given = arguments if arguments[0] == DORA else [str(target), *arguments]
    with pytest.raises(SystemExit) as stopped:
        lokr.main([DORA, *given])
    assert stopped.value.code not in (0, None)
    assert words in f"{stopped.value.code}{capsys.readouterr().err}" and not target.exists()
    assert pathlib.Path(DORA).read_bytes() == before


# -------------------------------------------------------------------------------------------------------- scales by layer
def test_the_scales_of_peft_stand_beside_its_file(tmp_path):
    peft = pytest.importorskip("peft")
    how = {"r": 2, "alpha": 8, "decompose_both": True, "decompose_factor": 6}
    how |= {"alpha_pattern": {"q": 16}, "rank_pattern": {r"1\.k": 3}}
    config = peft.LoKrConfig(target_modules=["q", "k"], init_weights=False, **how)
    model = tree("0.q", "0.k", "1.q", "1.k", sizes=(24, 30))
    theirs = peft.get_peft_model(copy.deepcopy(model), config)
    theirs.save_pretrained(tmp_path)
    file = tmp_path / "adapter_model.safetensors"
    tensors = load_file(file)
    with pytest.raises(ValueError, match=r"0\.q: .*adapter_config\.json"):
        lokr.read_lokr(tensors)
    written, x = json.loads((tmp_path / "adapter_config.json").read_text()), torch.randn(5, 24)
    scales = {"0.q": 8, "0.k": 4, "1.q": 8, "1.k": 8 / 3}
    for place, options in ((tmp_path, {}), (file, {}), (tensors, {"scale": written})):
        ours = adapters(lokr.load_lokr(copy.deepcopy(model), place, **options))
        assert {name: layer.alpha for name, layer in ours.items()} == scales
        for name, layer in ours.items():
            wanted = theirs.base_model.model.get_submodule(name)(x)
            torch.testing.assert_close(layer(x), wanted, atol=1e-4, rtol=1e-4)


def test_the_scales_of_a_lora_of_peft_too(tmp_path):
    peft = pytest.importorskip("peft")
    how = {"r": 4, "lora_alpha": 6, "alpha_pattern": {"1": 10}, "use_rslora": True}
    config = peft.LoraConfig(target_modules=["0", "1"], init_lora_weights=False, **how)
    model = peft.get_peft_model(nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)), config)
    model.save_pretrained(tmp_path)
    new, errors = lokr.lora_to_lokr(tmp_path)
    for name, layer in (("0", model.base_model.model[0]), ("1", model.base_model.model[1])):
        update, key = layer.get_delta_weight("default"), f"base_model.model.{name}"
        kept = torch.kron(new[f"{key}.lokr_w1"], new[f"{key}.lokr_w2"])
        assert errors[key] == pytest.approx(((update - kept).norm() / update.norm()).item(), 1e-4)


def test_an_alpha_that_two_full_factors_contradict_is_doubted_aloud(tmp_path, recwarn):
    """A program that multiplied them by alpha / rank all the same wrote a file that is 32 times too strong here."""
    path, model = tmp_path / "full.safetensors", tree("a", "b")
    full = named("te_a", "te_b", "unet_a")
    full |= {f"lycoris_te_{name}.alpha": torch.tensor(1.0) for name in "ab"}
    for rank in ("1", "None"):
        save_file(full, path, {"ss_network_dim": rank})
        lokr.read_lokr(path)
    save_file(full, path, {"ss_network_dim": "32"})
    lokr.read_lokr(path, scale=1 / 32)
    lokr.load_lokr(copy.deepcopy(model), path, prefix="lycoris_unet_")
    assert not recwarn
    prefix = "lycoris_te_"
    for read in (lokr.read_lokr, lambda file: lokr.load_lokr(model, file, prefix=prefix)):
        with pytest.warns(match=r"te_a, the first of 2 .* alpha 1 .* scale=1 / 32") as seen:
            read(path)
        assert seen[0].filename == __file__


# --------------------------------------------------------------------------------------------------- types and odd numbers
def half_file(dtype=torch.float16):
    """Its second factor is 360,000, more than float16 holds, its update 36."""
    return {
        "0.lokr_w1": torch.full((2, 3), 1e-4).to(dtype),
        "0.lokr_w2_a": torch.full((8, 4), 300.0).to(dtype),
        "0.lokr_w2_b": torch.full((4, 8), 300.0).to(dtype),
    }


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float8_e5m2])
def test_products_are_made_in_float32_and_fit_into_the_model(dtype):
    file = half_file(dtype)
    parts = [file[f"0.{key}"].double() for key in ("lokr_w1", "lokr_w2_a", "lokr_w2_b")]
    wanted = torch.kron(parts[0], parts[1] @ parts[2])
    first, second, scale = lokr.read_lokr(file)["0"]
    assert first.dtype == second.dtype == torch.float32 and scale == 1.0
    torch.testing.assert_close(torch.kron(first, second).double(), wanted)
    model = lokr.load_lokr(nn.Sequential(nn.Linear(24, 16)).half(), file)
    made = [weight.double() for weight in model[0].adapter.weights]
    torch.testing.assert_close(torch.kron(*made), wanted, atol=0, rtol=2e-3)
    lora, _ = lokr.lokr_to_lora(file, 1)
    kept = lora["0.lora_B.weight"].double() @ lora["0.lora_A.weight"].double()
    torch.testing.assert_close(kept, wanted, atol=0, rtol=2e-2)
    written = lokr.lokr_tensors(model)
    made = torch.kron(written["0.lokr_w1"].double(), written["0.lokr_w2"].double())
    torch.testing.assert_close(made, wanted, atol=0, rtol=2e-3)
    large = {"0.lokr_w1": torch.full((2, 3), 1e3), "0.lokr_w2": torch.full((8, 8), 1e3)}
    model = nn.Sequential(nn.Linear(24, 16)).half()
    with refused(model, r"0: .*too large for torch\.float16.*dtype=torch\.float32"):
        lokr.load_lokr(model, large)
    assert lokr.load_lokr(model, large, dtype=torch.float32)[0].adapter.weights[0].max() == 1e3


def test_a_small_file_that_asks_for_much_memory_is_refused_before_anything_is_multiplied(
    monkeypatch,
):
    file = {"0.lokr_w1": torch.ones(1, 1), "0.lokr_w2_a": torch.ones(10**5, 1)}
    file["0.lokr_w2_b"] = torch.ones(1, 10**5)
    monkeypatch.setattr(Tensor, "__matmul__", lambda *_: pytest.fail("multiplied"))
    with pytest.raises(ValueError, match="10,000,000,001 numbers: is it damaged"):
        lokr.read_lokr(file)
    with pytest.raises(ValueError, match=r"the update is \(100000, 100000\), its layer \(2, 2\)"):
        lokr.load_lokr(nn.Sequential(nn.Linear(2, 2)), file)


# ------------------------------------------------------------------------------------------------------- what is refused
def changed(**change):
    """A file with an update for each of two layers, in one of which something is changed or left out."""
    good = {"lokr_w1": torch.ones(2, 3), "alpha": torch.tensor(2.0)}
    good |= {"lokr_w2_a": torch.ones(4, 2), "lokr_w2_b": torch.ones(2, 2)}
    file = {f"blk.q.{key}": v for key, v in (good | change).items() if v is not None}
    return file | {f"blk.v.{key}": value for key, value in good.items()}


NAN, TWO = float("nan"), torch.full((2, 2), 3e38)
ODD = [
    (changed(lokr_w2_b=None), "it lacks lokr_w2, and lokr_w2_a with lokr_w2_b"),
    (changed(dora_scale=torch.ones(8, 1)), "it has blk.q.dora_scale, DoRA, which cannot be conv"),
    (changed(lokr_t2=torch.ones(2, 2, 3, 3)), "a convolution in Tucker's form"),
    (changed(**{"lora_up.weight": torch.ones(3, 1)}), "LoRA, which lora_to_lokr reads"),
    (changed(alpha=torch.tensor(NAN)), "alpha is nan"),
    (changed(alpha=torch.tensor(0.0)), "alpha is 0, which LyCORIS reads as the rank"),
    (changed(alpha=torch.ones(2)), "alpha is 2 numbers"),
    (changed(alpha=torch.tensor(1j)), "not a number"),
    (changed(lokr_w1=torch.full((2, 3), NAN)), "lokr_w1 holds numbers that are not"),
    (changed(lokr_w2_b=torch.full((2, 2), -float("inf"))), "lokr_w2_b holds numbers"),
    (changed(lokr_w1=torch.ones(2, 3, dtype=torch.int8)), "int8, not real"),
    (changed(lokr_w1=torch.ones(2, 3, device="meta")), "make it an ordinary tensor"),
    (changed(lokr_w1=torch.ones(2, 3).to_sparse()), "make it an ordinary tensor"),
    (changed(lokr_w1=3), "not a tensor: read the file with safetensors"),
    (changed(lokr_w2_a=torch.ones(3, 2), lokr_w2_b=torch.ones(1, 4)), "be multiplied"),
    (changed(lokr_w1=torch.ones(6)), "not made of matrices"),
    (changed(lokr_w2_a=torch.ones(4, 0), lokr_w2_b=torch.ones(0, 2)), "and empty"),
    (changed(lokr_w2_a=torch.full((4, 2), 3e38), lokr_w2_b=TWO), "too large"),
]


@pytest.mark.parametrize(("file", "words"), ODD, ids=[words[:30] for _, words in ODD])
def test_odd_layers_are_refused_by_their_name_or_left_out(file, words):
    model = nn.ModuleDict({"blk": nn.ModuleDict({n: nn.Linear(6, 8) for n in ("q", "v")})})
    loads = (lokr.read_lokr, lambda f: lokr.lokr_to_lora(f, 2), lambda f: lokr.load_lokr(model, f))
    for read in loads:
        with refused(model, rf"1 of 2 layers.*\n  blk\.q: .*{words}"):
            read(file)
    left_out = {}
    assert list(lokr.read_lokr(file, left_out=left_out)) == ["blk.v"]
    assert list(left_out) == ["blk.q"]


def peft_scale(**config):
    return {"scale": {"peft_type": "LOKR", "alpha": 8, "r": 2} | config}


LORA_FILE = {"q.lora_A.weight": torch.ones(2, 3)}
SQUARE = {"lycoris_q.lokr_w2": torch.ones(2, 2, 3, 3)}
REFUSED = [  # a model's layers, a file, options, in which words
    ("q", {}, {}, "no adapter here that can be read"),
    ("q", 5, {}, "give a path, or a dict of tensors"),
    ("q", {3: torch.ones(1)}, {}, "names of tensors are text"),
    ("q", "nowhere.safetensors", {}, "nowhere"),
    ("q", __file__, {}, "cannot be read as a safetensors file"),
    ("q", LORA_FILE, {}, "LoRA, which lora_to_lokr reads"),
    ("q", {"lokr_w1": torch.ones(1, 1)}, {}, "\n  lokr_w1: no name of a layer before lokr_w1"),
    ("q", named("q") | SQUARE, {}, "a convolution of kernel"),
    ("q", named("q") | {"lycoris_q.lokr_w1": torch.ones(2, 3)}, {}, r"is \(4, 6\).*\(4, 4\)"),
    ("q", named("q", "norm"), {}, "no prefix"),
    ("q", named("blk_seq"), {}, "no prefix"),
    ("to_q to_v", named("qkv"), {}, "fused layers, such as qkv, are not split"),
    ("a_b.c a.b_c", named("a_b_c"), {}, r"several layers: .*a_b\.c.*rename"),
    ("a.b", named("a_b", "a.b"), {}, "one layer of this model"),
    ("q", named("q"), {"alpha": 2.0}, r"leave out \['alpha'\].*scale="),
    ("q", named("q"), {"bias": True}, r"leave out \['bias'\]"),
    ("q", named("q"), {"r": 8}, "has no r: leave it out"),
    ("q", named("q"), {"scale": float("inf")}, "the scale is inf"),
    ("q", named("q"), {"scale": {"v": 1.0}}, r"no number for \['lycoris_q'\]"),
    ("q", named("q"), peft_scale(peft_type="IA3"), "of IA3, not of LOKR"),
    ("q", named("q"), peft_scale(init_lora_weights="pissa_niter_4"), "changed the base weights"),
    ("q", named("q"), peft_scale(r=None), "r in adapter_config.json is None"),
    ("q", named("q"), peft_scale(r=0), r"r in adapter_config.json is 0\.0"),
    ("q", named("q"), peft_scale(alpha_pattern={"(": 1}), "alpha_pattern in"),
    ("q", named("q"), peft_scale(rank_pattern=[1]), "rank_pattern in"),
    ("q", named("te1_q", "te2_q"), {}, "give the prefix of those to read"),
    ("q", named("q"), {"prefix": "lycoris"}, "go on with '_', .*: give prefix='lycoris_'"),
    ("q", named("q"), {"prefix": "lyco"}, "no prefix makes"),
    ("q", named("q"), {"prefix": "lx_"}, r"no name begins with 'lx_'; there are \['lycoris_q'\]"),
]


@pytest.mark.parametrize(("layers", "file", "options", "words"), REFUSED, ids=range(len(REFUSED)))
def test_what_cannot_be_loaded_is_said_and_nothing_is_changed(layers, file, options, words):
    model = tree(*layers.split())
    with refused(model, words, (ValueError, TypeError, FileNotFoundError)):
        lokr.load_lokr(model, file, **options)


def test_what_is_left_out_is_listed():
    file = named("q", "k", "v") | {"lycoris_v.dora_scale": torch.ones(1)}
    with pytest.raises(ValueError, match=r"(?s)2 of 3 layers cannot.*left_out.*_k: this model"):
        lokr.load_lokr(tree("q", "v"), file, prefix="lycoris_")
    model, left_out = tree("q", "v"), {}
    lokr.load_lokr(model, file, prefix="lycoris_", left_out=left_out)
    assert set(left_out) == {"lycoris_k", "lycoris_v"} and list(adapters(model)) == ["q"]


def test_a_second_lokr_is_refused_until_the_first_is_folded_in():
    model = lokr.load_lokr(tree("q"), named("q"))
    with pytest.raises(ValueError, match=r"q: .*has an adapter already.*merge_lora\(model\)"):
        lokr.load_lokr(model, named("q"))
    assert list(adapters(lokr.load_lokr(merge_lora(model), named("q")))) == ["q"]


# -------------------------------------------------------------------------------------------------------------- conversion
@pytest.mark.parametrize("rank", [1, 4, 40])
@pytest.mark.parametrize(
    ("kernel", "scale"), [(None, None), (None, -2.0), ((1, 1), None), ((3, 3), 0.5), ((5,), None)]
)
def test_the_nearest_lora_is_that_of_the_dense_update(kernel, scale, rank):
    torch.manual_seed(2)
    w1, kernel = torch.randn(5, 4).double(), kernel or ()
    file = {"q.lokr_w1": w1, "q.alpha": torch.tensor(3.0)}
    if kernel:
        w2, own = torch.randn(6, 6, *kernel).double(), 1.0
        file["q.lokr_w2"] = w2
    else:
        a, b = torch.randn(6, 2).double(), torch.randn(2, 6).double()
        w2, own = a @ b, 1.5
        file |= {"q.lokr_w2_a": a, "q.lokr_w2_b": b}
    found, errors = lokr.lokr_to_lora(file, rank, scale=scale)
    down, up = found["q.lora_A.weight"], found["q.lora_B.weight"]
    assert down.shape == (rank, 24, *kernel) and up.shape == (30, rank, *(1 for _ in kernel))
    update = (own if scale is None else scale) * torch.kron(w1, w2.flatten(1))
    u, s, v = torch.linalg.svd(update, full_matrices=False)
    best = u[:, :rank] * s[:rank] @ v[:rank]
    torch.testing.assert_close(up.flatten(1) @ down.flatten(1), best)
    assert errors["q"] == pytest.approx((s[rank:].norm() / s.norm()).item(), abs=1e-12)


DOWN, UP = torch.randn(16, 48).double(), torch.randn(30, 16).double()
PRODUCT = torch.kron(torch.randn(5, 6), torch.randn(6, 1) @ torch.randn(1, 8)).double()
EXACT = torch.linalg.svd(PRODUCT, full_matrices=False)
LORAS = {
    "rank 1": (DOWN[:1], UP[:, :1]),
    "rank 3": (DOWN[:3], UP[:, :3]),
    "rank 16": (DOWN, UP),
    "equal singular values": (DOWN[:1].expand(2, 48), UP[:, :1].expand(30, 2)),
    "one exact product": (EXACT[2][:5], EXACT[0][:, :5] * EXACT[1][:5]),
    "zero": (DOWN[:2], 0 * UP[:, :2]),
    "a convolution": (torch.randn(4, 48, 3, 3).double(), UP[:, :4, None, None]),
}


@pytest.mark.parametrize("kind", LORAS)
def test_the_lokr_of_a_lora_is_that_of_the_dense_method(kind):
    down, up = LORAS[kind]
    kernel, update = down.shape[2:], up.flatten(1) @ down.flatten(1)
    sizes = (6, 8 * kernel.numel()), (5, 6)
    for ends in lokr.LORA:
        tensors = {f"q.{ends[0]}": down, f"q.{ends[1]}": up, "q.alpha": torch.tensor(6.0)}
        for scale, told in ((6 / len(down), None), (1.5, 1.5)):
            found, errors = lokr.lora_to_lokr(tensors, scale=told)
            ((first, second),), error = nd.nearest_kronecker(scale * update, *sizes)
            assert errors["q"] == pytest.approx(error, abs=1e-7)
            kept = torch.kron(found["q.lokr_w1"], found["q.lokr_w2"].flatten(1))
            torch.testing.assert_close(kept, torch.kron(first, second), atol=1e-4, rtol=1e-4)
            assert found["q.lokr_w2"].shape[2:] == kernel


def test_a_conversion_says_what_it_cannot_do():
    zero = {"q.lokr_w1": torch.ones(2, 2), "q.lokr_w2": torch.zeros(3, 3)}
    lora, errors = lokr.lokr_to_lora(zero, 2, names=lokr.LORA[1])
    assert set(lora) == {"q.lora_down.weight", "q.lora_up.weight"} and errors == {"q": 0.0}
    for wrong, error in ((0, ValueError), (2.5, TypeError), ("3", TypeError)):
        with pytest.raises(error):
            lokr.lokr_to_lora(zero, wrong)
    with pytest.raises(ValueError, match=r"q: it has .*not the two matrices"):
        lokr.lora_to_lokr(LORA_FILE)


def largest(log):
    return max(math.prod(shape) for _, shape, _ in log.operations)


def test_conversions_form_no_dense_matrix():
    """Counted by dispatch: the largest tensor that is made, and the operations on 3072 x 3072 at rank 16.

    The dense method decomposes a matrix of 9.4 million entries, in 18 seconds.
    """
    lora = {"q.lora_A.weight": torch.randn(16, 3072), "q.lora_B.weight": torch.randn(3072, 16)}
    with Log() as log, FlopCounterMode(display=False) as counter:
        lokr.lora_to_lokr(lora)
    assert 0 < largest(log) <= 3072**2 / 30 and counter.get_total_flops() <= 3e9
    rank = {"q.lokr_w1": torch.randn(1, 1), "q.lokr_w2_a": torch.randn(512, 4)}
    with Log() as log:
        lokr.lokr_to_lora(rank | {"q.lokr_w2_b": torch.randn(4, 768)}, 4)
    assert 0 < largest(log) <= 512 * 768 / 2
