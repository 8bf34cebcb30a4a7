"""What outlives a version: what a layer prints, and torch without its private names."""

import gc
import importlib.util
import inspect
import re
import sys
import weakref
from functools import partial

import pytest
import torch
from ndlinear_cases import expected, randomise
from torch import nn
from torch.nn.utils import prune

import ndlinear as nd

EXECUTIONS = ["planned", "recompute", "sequential"]
close = {"atol": 1e-10, "rtol": 1e-10}
CALLS = [
    "NdLinear((4, 5), (3, 2), transform_outer=True, bias=True, init='linear')",
    "NdLinear((4, 5), (3, 2), transform_outer=False, bias=False, init='unit')",
    "FlatNdLinear((4,), (3,), transform_outer=True, bias=True, init='paper', execution='sequential')",
    "NdLinearSum((4, 5), (3, 2), rank=3, bias=False, init='paper')",
]


@pytest.mark.parametrize("call", CALLS)
def test_repr_gives_the_call_back(call):
    layer = eval(call, vars(nd))
    assert repr(layer) == call and call in repr(nn.Sequential(layer))
    given = [name for name in ("transform_outer", "execution", "rank", "init") if name in call]
    assert all(f"{name}={getattr(layer, name)!r}" in call for name in given)


def test_repr_shows_wrapped_modes_and_still_gives_the_call_back():
    layer = nd.NdLinear((4, 6), (3, 5))
    layer.align_layers[1] = nn.Sequential(layer.align_layers[1])
    lines = repr(layer).splitlines()
    assert lines[0] == "NdLinear((4, 6), (3, 5), transform_outer=True, bias=True, init='linear')"
    assert lines[1] == "#   align_layers.1: Sequential(" and "Linear(in_features=6" in lines[2]
    assert repr(eval(repr(layer), vars(nd))) == lines[0]
    torch.nn.utils.parametrizations.weight_norm(layer.align_layers[0])
    assert "align_layers.0: ParametrizedLinear(" in repr(layer)


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


def test_weights_die_with_their_layer():
    gc.disable()  # which would find a cycle
    layer = nd.NdLinearSum((4, 5), (3, 2), 2)
    weight = weakref.ref(layer.terms[0].weights[0])
    del layer
    gc.enable()
    assert weight() is None


@pytest.mark.parametrize("make, modes", [(nd.NdLinear, 3), (partial(nd.NdLinearSum, rank=2), 2)])
@torch.no_grad()
def test_products_of_weights_do_not_leave_the_range_of_float16(make, modes):
    layer = make((2,) * modes, (2,) * modes, bias=False, dtype=torch.float16)
    for weight in layer.parameters():
        nn.init.constant_(weight, 1e-4)
    assert (layer(torch.full((64, *layer.input_dims), 6e4).half()) > 0).all()


def test_a_pruned_weight_is_the_one_that_the_next_call_makes():
    layer = randomise(nd.NdLinear((4, 5), (3, 2), dtype=torch.float64))
    nn.init.ones_(prune.l1_unstructured(layer.align_layers[0], "weight", 0.5).weight_orig)
    x = torch.randn(7, 4, 5, dtype=torch.float64)
    torch.testing.assert_close(nd.to_linear(layer)(x.flatten(1)), layer(x).flatten(1))
