"""What people do to a layer that exists, and feed it: it computes the right thing or complains."""

import copy
import importlib.util
import inspect
import pathlib
import pickle
import re
import sys

import pytest
import torch
from ndlinear_cases import expected, randomise
from torch import nn

import ndlinear as nd

EXECUTIONS = ["planned", "recompute", "sequential"]
executions = pytest.mark.parametrize("execution", EXECUTIONS)
close = {"atol": 1e-10, "rtol": 1e-10}


# ---------------------------------------------------------------------------------- sizes and order
@pytest.mark.parametrize(
    "name, value",
    [
        ("order", (1, 0)),
        ("execution_order", (1, 0)),
        ("transform_outer", False),
        ("input_dims", (6, 4)),
        ("hidden_size", (5, 3)),
    ],
)
def test_what_the_plan_rests_on_cannot_be_set(name, value):
    layer = nd.NdLinear((4, 6), (3, 5))
    before = getattr(layer, name)
    with pytest.raises(AttributeError, match=f"{name} of an NdLinear is fixed.*build a new layer"):
        setattr(layer, name, value)
    assert getattr(layer, name) == before


@executions
@pytest.mark.parametrize("batch", [9, 40, 3000])
@pytest.mark.parametrize("grad", [True, False])
def test_modes_swapped_for_other_sizes_with_the_same_product_are_refused(execution, batch, grad):
    layer = nd.NdLinear((4, 6), (4, 6), execution=execution)
    layer.align_layers[0] = nn.Linear(4, 6)
    layer.align_layers[1] = nn.Linear(6, 4)
    wanted = r"mode 1 of \(4, 6\) -> \(4, 6\) needs a weight \(4, 4\), got \(6, 4\); build a new"
    with torch.set_grad_enabled(grad), pytest.raises(ValueError, match=wanted):
        layer(torch.randn(batch, 4, 6))
    layer = nd.NdLinear((4, 6), (6, 4), execution=execution)
    layer.align_layers[1].weight.data = torch.zeros(6, 6)
    with pytest.raises(ValueError, match=r"mode 2 .* \(4, 6\), got \(6, 6\)"):
        layer(torch.randn(batch, 4, 6))


@executions
@pytest.mark.parametrize("broken", [0, 1])
def test_one_mode_in_another_dtype(execution, broken):
    layer = nd.NdLinear((4, 6), (3, 5), execution=execution)
    layer.align_layers[broken].double()
    x = torch.randn(9, 4, 6)
    with pytest.raises(TypeError, match=r"torch.float32 .* weight .* torch.float64 .* do not mix"):
        layer(x)
    layer.align_layers[broken].bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(x).shape == (9, 3, 5), "autocast makes them equal"


# ---------------------------------------------------------------------------------- unusable inputs
def rows(layout):
    return torch.nested.nested_tensor([torch.zeros(2, 4, 5), torch.zeros(3, 4, 5)], layout=layout)


UNUSABLE = {
    "sparse": (lambda: torch.zeros(7, 4, 5).to_sparse(), r"sparse_coo .* x.to_dense\(\)"),
    "compressed": (lambda: torch.zeros(4, 5).to_sparse_csr(), r"sparse_csr .* x.to_dense\(\)"),
    "onednn": (lambda: torch.zeros(7, 4, 5).to_mkldnn(), r"_mkldnn .* x.to_dense\(\)"),
    "nested": (lambda: rows(torch.strided), r"nested .*to_padded_tensor"),
    "jagged": (lambda: rows(torch.jagged), r"nested .* values\(\)"),
}


@executions
@pytest.mark.parametrize("kind", UNUSABLE)
@pytest.mark.filterwarnings("ignore")
def test_unusable_inputs(kind, execution):
    make, message = UNUSABLE[kind]
    with pytest.raises(TypeError, match=message):
        nd.NdLinear((4, 5), (3, 2), execution=execution)(make())
    with pytest.raises(TypeError, match=message):
        nd.ndlinear(make(), [torch.zeros(3, 4), torch.zeros(2, 5)])


def test_the_cure_for_a_jagged_tensor():
    layer, parts = nd.NdLinear((4, 5), (3, 2)), torch.randn(5, 4, 5)
    jagged = torch.nested.nested_tensor([parts[:2], parts[2:]], layout=torch.jagged)
    torch.testing.assert_close(layer(jagged.values()), layer(parts))


@executions
def test_eight_bit_floats(execution):
    layer = nd.NdLinear((4, 5), (3, 2), execution=execution).to(torch.float8_e4m3fn)
    with pytest.raises(TypeError, match=r"cannot multiply torch.float8_e4m3fn: .*bfloat16"):
        layer(torch.zeros(7, 4, 5).to(torch.float8_e4m3fn))


# ----------------------------------------------------------------------------- hooks on all modules
@executions
@pytest.mark.parametrize("kind", ["forward_pre_hook", "forward_hook", "full_backward_hook"])
def test_hooks_on_all_modules_see_the_modes(kind, execution):
    seen = []
    layer = nd.NdLinear((4, 6), (3, 5), execution=execution)
    x = torch.randn(9, 4, 6, requires_grad=True)
    want = layer(x)
    register = getattr(torch.nn.modules.module, f"register_module_{kind}")
    handle = register(lambda module, *arguments: seen.append(module))
    try:
        y = layer(x)
        y.sum().backward()
    finally:
        handle.remove()
    torch.testing.assert_close(y, want)
    for mode in layer.align_layers:
        assert any(module is mode for module in seen)
    seen.clear()
    layer(x)
    assert not seen


# -------------------------------------------------------------------------------- what a repr shows
def test_repr_shows_wrapped_modes_and_still_gives_the_call_back():
    layer = nd.NdLinear((4, 6), (3, 5))
    layer.align_layers[1] = nn.Sequential(layer.align_layers[1])
    lines = repr(layer).splitlines()
    assert lines[0] == "NdLinear((4, 6), (3, 5), transform_outer=True, bias=True, init='linear')"
    assert lines[1] == "#   align_layers.1: Sequential(" and "Linear(in_features=6" in lines[2]
    assert repr(eval(repr(layer), vars(nd))) == lines[0]
    torch.nn.utils.parametrizations.weight_norm(layer.align_layers[0])
    assert "align_layers.0: ParametrizedLinear(" in repr(layer)


def test_total_bias_where_one_mode_has_none():
    layer = randomise(nd.NdLinear((4, 6), (3, 5), dtype=torch.float64))
    for k in (0, 1):
        other = copy.deepcopy(layer)
        other.align_layers[k].bias = None
        zero = torch.zeros(4, 6, dtype=torch.float64)
        torch.testing.assert_close(nd.total_bias(other), other(zero), **close)
        x = torch.randn(7, 4, 6, dtype=torch.float64)
        torch.testing.assert_close(nd.to_linear(other)(x.flatten(1)), other(x).flatten(1), **close)
        assert nd.to_linear(other).bias is not None and "bias=True" in repr(other)


# ---------------------------------------------------------------------------------- files of before
def test_a_layer_pickled_by_an_earlier_file_loads():
    """By `NdLinear.from_linear` of version 0.1.0 as of 21 November 2026."""
    layer = pickle.loads(pathlib.Path(__file__).with_name("earlier.pickle").read_bytes())
    assert repr(layer) == "NdLinear((2, 2), (2, 2), transform_outer=True, bias=True, init='linear')"
    assert layer.approximation is None, "it had another name then"
    x = torch.arange(4.0).reshape(2, 2)
    torch.testing.assert_close(layer(x), expected(layer, x))
    want = torch.tensor([[-1.5134, 1.5759], [0.0466, -0.1030]])
    torch.testing.assert_close(layer(x), want, atol=1e-4, rtol=0)
    assert repr(pickle.loads(pickle.dumps(layer))) == repr(layer)
    assert b"Plan" not in pickle.dumps(layer)


# ---------------------------------------------------------------------- torch without private names
PRIVATE = [
    (torch._C, "_are_functorch_transforms_active"),
    (torch._C, "_get_tracing_state"),
    (torch._C, "_is_any_autocast_enabled"),
    (torch._C, "_len_torch_dispatch_stack"),
    (torch.autograd.forward_ad, "_current_level"),
    (torch.nn.modules.module, "_global_forward_hooks"),
    (torch.nn.modules.module, "_global_forward_pre_hooks"),
    (torch.nn.modules.module, "_global_backward_hooks"),
    (torch.nn.modules.module, "_global_backward_pre_hooks"),
    (type(torch.ops.mkldnn), "__getattr__"),  # where torch.ops.mkldnn._linear_pointwise comes from
]


def without(names):
    """The module as imported where torch lacks these names; torch gets them back at once."""
    torch.ops.mkldnn.__dict__.pop("_linear_pointwise", None)
    spec = importlib.util.spec_from_file_location("ndlinear_without", nd.__file__)
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "ndlinear_without", module)
        for owner, name in names:
            patch.delattr(owner, name)
        spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("names", [PRIVATE, *([one] for one in PRIVATE)], ids=lambda n: n[-1][1])
def test_without_private_names_of_torch(names):
    module = without(names)
    if len(names) == len(PRIVATE):
        assert not module._is_ordinary(torch.zeros(2)) and module._onednn_linear is None
    for execution in EXECUTIONS:
        for batch in (1, 3000):
            layer = module.NdLinear((6, 5), (7, 4), execution=execution, dtype=torch.float64)
            randomise(layer)
            x = torch.randn(batch, 6, 5, dtype=torch.float64, requires_grad=True)
            inputs = [x, *layer.parameters()]
            ours, theirs = layer(x), expected(layer, x)
            torch.testing.assert_close(ours, theirs, **close)
            pairs = (torch.autograd.grad(y.square().mean(), inputs) for y in (ours, theirs))
            for a, b in zip(*pairs):
                torch.testing.assert_close(a, b, **close)
            with torch.no_grad():
                torch.testing.assert_close(layer(x), theirs, **close)


def test_every_private_name_of_torch_is_in_the_list():
    """What the file reads from torch's internals at import; a new one must join the list above."""
    source = inspect.getsource(nd)
    listed = {name for _, name in PRIVATE} | {"_linear_pointwise"}
    found = set(re.findall(r"torch(?:\.\w+)*\.(_[a-z]\w*)", source))
    found |= set(re.findall(r'getattr\([\w.]+, f?"(_[a-z]\w*)"', source))
    assert found - {"_C"} <= listed
