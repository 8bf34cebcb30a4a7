"""Bad input: the type of the error, and a message that names what was given, what is wanted and what to do."""

from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

import ndlinear as nd
import ndlinear_lora

PAIRS = [
    ((4, 5), (3,), ValueError, ["(4, 5)", "(3,)", "equally many", "size 1"]),
    ((0, 5), (3, 2), ValueError, ["(0, 5)", "(3, 2)", "positive"]),
    ((4, 5), (3, -2), ValueError, ["(4, 5)", "(3, -2)", "positive"]),
    ((), (), ValueError, ["input_dims=()", "hidden_size=()", "positive"]),
    ((4, 5.0), (3, 2), TypeError, ["(4, 5.0)", "(3, 2)", "integers", "(8, 8)"]),
    ("45", (3, 2), TypeError, ["'45'", "(3, 2)", "integers"]),
    ((4, 5), 6, TypeError, ["(4, 5)", "6", "sequences"]),
    (None, (3, 2), TypeError, ["None", "(3, 2)"]),
]
TAKES_SHAPES = [
    nd.NdLinear,
    nd.NdLinearSum,
    nd.cheapest_order,
    nd.count_macs,
    nd.count_parameters,
    lambda d, h: nd.rearrange(torch.zeros(6, 20), d, h),
    lambda d, h: nd.nearest_kronecker(torch.zeros(6, 20), d, h),
    lambda d, h: nd.NdLinear.from_linear(nn.Linear(20, 6), d, h),
    lambda d, h: nd.NdLinearSum.from_linear(nn.Linear(20, 6), d, h),
    lambda d, h: ndlinear_lora.NdLinearLoRA(nn.Linear(20, 6), "None" if d is None else d, h),
]


def check(error, call, parts):
    with pytest.raises((ValueError, TypeError, AttributeError)) as caught:
        call()
    assert caught.type is error
    for part in parts:
        assert part in str(caught.value), (part, str(caught.value))


@pytest.mark.parametrize("dims, hidden, error, parts", PAIRS)
@pytest.mark.parametrize("make", TAKES_SHAPES, ids=range(len(TAKES_SHAPES)))
def test_shapes(make, dims, hidden, error, parts):
    check(error, lambda: make(dims, hidden), parts)


def test_numpy_integers_sizes_and_iterators_are_fine():
    layer = nd.NdLinear(np.array([4, 5]), torch.Size([3, 2]))
    assert layer.input_dims == (4, 5)
    assert all(type(d) is int for d in layer.input_dims + layer.hidden_size)
    assert nd.NdLinearSum((4, 5), (3, 2), dtype=torch.float16).bias.dtype == torch.float16
    assert nd.ndlinear(X, W, order=reversed((0, 1))).shape == (7, 3, 2)
    assert nd.count_macs((4, 5), (3, 2), reversed((0, 1))) == nd.count_macs((4, 5), (3, 2), (1, 0))
    jagged = torch.nested.nested_tensor([X[:2], X[2:]], layout=torch.jagged)
    assert layer(jagged.values()).shape == (7, 3, 2), "the cure that an error names"


@pytest.mark.parametrize("rank, error", [(0, ValueError), (1.5, TypeError), ("2", TypeError)])
def test_ranks(rank, error):
    parts = ["(4, 5)", "(3, 2)", f"rank={rank!r}"]
    for call in (
        lambda: nd.NdLinearSum((4, 5), (3, 2), rank),
        lambda: nd.count_parameters((4, 5), (3, 2), rank=rank),
        lambda: nd.nearest_kronecker(torch.zeros(6, 20), (4, 5), (3, 2), rank),
        lambda: nd.NdLinear.from_linear(nn.Linear(20, 6), (4, 5), (3, 2), rank),
    ):
        check(error, call, parts)


# --------------------------------------------------------------------------------------------------------------- inputs
X, W = torch.zeros(7, 4, 5), [torch.zeros(3, 4), torch.zeros(2, 5)]
CALLS = {
    "layer": lambda x: nd.NdLinear((4, 5), (3, 2))(x),
    "reordered layer": lambda x: nd.NdLinear((4, 5), (8, 2))(x),
    "sum": lambda x: nd.NdLinearSum((4, 5), (3, 2), 2)(x),
    "function": lambda x: nd.ndlinear(x, W),
}
calls = pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
NOT_CAST = (torch.int64, torch.bool, torch.double, torch.cfloat)
OTHER = [torch.zeros(7, 4, 5, dtype=dtype) for dtype in NOT_CAST]
META = torch.zeros(7, 4, 5, device="meta")


def rows(layout):
    return torch.nested.nested_tensor([torch.zeros(2, 4, 5), torch.zeros(3, 4, 5)], layout=layout)


ANYWHERE = [  # also under autocast
    *((x, ["(7, 4, 5)", str(x.dtype), "torch.float32", "convert one with .to()"]) for x in OTHER),
    (META, ["(7, 4, 5)", "on meta", "on cpu", ".to()"]),
]
TYPED = [
    *ANYWHERE,
    (torch.zeros(7, 4, 5).half(), ["(7, 4, 5)", "torch.float16", "torch.float32", "autocast"]),
    (np.zeros((7, 4, 5)), ["(..., 4, 5)", "ndarray"]),
    (torch.zeros(7, 4, 5).to_sparse(), ["sparse_coo", "x.to_dense()"]),
    (torch.zeros(4, 5).to_sparse_csr(), ["sparse_csr", "x.to_dense()"]),
    (torch.zeros(7, 4, 5).to_mkldnn(), ["_mkldnn", "x.to_dense()"]),
    (rows(torch.strided), ["nested", "to_padded_tensor"]),
    (rows(torch.jagged), ["nested", "values()"]),
    (X.to(torch.float8_e4m3fn), ["cannot multiply torch.float8_e4m3fn", "bfloat16"]),
]


@calls
@pytest.mark.parametrize("shape", [(7, 4, 6), (7, 5, 4), (7, 20), (), (4, 5, 7)])
def test_input_shapes(call, shape):
    parts = ["(..., 4, 5)", f"got {shape}", "ends in (4, 5)", "unflatten"]
    check(ValueError, lambda: call(torch.zeros(shape)), parts)


@calls
@pytest.mark.filterwarnings("ignore")
def test_input_types_and_devices(call):
    for x, parts in TYPED:
        check(TypeError, lambda x=x: call(x), parts)
    with torch.autocast("cpu", torch.bfloat16):
        for x, parts in ANYWHERE:
            check(TypeError, lambda x=x: call(x), parts)


# --------------------------------------------------------------------------------------------------- anything else, once
def lora(*arguments, **options):
    return ndlinear_lora.NdLinearLoRA(*arguments, **options)


def of_modes(dims, hidden, *modes):
    """A call of a layer whose modes were exchanged."""
    layer = nd.NdLinear(dims, hidden)
    layer.align_layers = nn.ModuleList(modes)
    return lambda: layer(torch.zeros(7, *dims))


SWAPPED = ["mode 1 of (4, 6) -> (4, 6) needs a weight (4, 4), got (6, 4)", "build a new"]
MIXED = ["torch.float32", "weight", "torch.float64", "do not mix"]
FIXED = ["of an NdLinear is fixed", "build a new layer"]
ON_META = nd.NdLinear((4, 5), (3, 2), device="meta")
WRAPPED = nd.NdLinear((4, 5), (3, 2))
WRAPPED.align_layers[0] = nn.Sequential(WRAPPED.align_layers[0])
INITS = ["xavier", '"linear", "paper" or "unit"']
EXECUTIONS = ["squential", '"planned", "recompute" or "sequential"']
FOLDS = ["(6, 20)", "(3, 2)", "(4, 4)", "(outputs, inputs)"]
OTHER_FOLDS = ["(4, 4)", "(3, 2)", "(20, 6)", "(4, 5) and (2, 3)"]
FOLDED = [((20,), (6,)), ((4, 5), (3, 2)), ((2, 2, 5), (3, 2, 1))]
NAN = torch.full((6, 20), torch.nan)
BAD_BIAS = ["(7, 4, 5)", "weight (3, 4)", "bias (4,)"]
VALUES = [
    (lambda: nd.NdLinear((4,), (3,), init="xavier"), INITS),
    (lambda: nd.NdLinearSum((4,), (3,), init="xavier"), INITS),
    (lambda: setattr(nd.NdLinear((4,), (3,)), "init", "xavier"), INITS),
    (lambda: setattr(nd.NdLinear((4,), (3,)), "execution", "squential"), EXECUTIONS),
    (lambda: WRAPPED(torch.zeros(5, 4)), ["(..., 4, 5)", "(5, 4)"]),
    (lambda: nd.ndlinear(X, []), ["0 weights"]),
    (lambda: nd.ndlinear(X, W, [None]), ["2 weights and 1 biases", "one bias per mode"]),
    (lambda: nd.ndlinear(X, [W[0], torch.zeros(5)]), ["weight (H, D)"]),
    (lambda: nd.ndlinear(X, W, [torch.zeros(4), None]), BAD_BIAS),
    (lambda: nd.mode_product(X, W[0], -1), ["axis -1", "(7, 4, 5)", "(3, 4)", "(H, "]),
    (lambda: nd.mode_product(X, W[0], 3), ["axis 3", "(7, 4, 5)"]),
    (lambda: nd.mode_product(X, W[0], -4), ["axis -4", "(7, 4, 5)"]),
    (lambda: nd.mode_product(X, torch.zeros(4), 1), ["axis 1", "weight (4,)"]),
    (lambda: nd.mode_product(X, W[0], 1, torch.zeros(4)), ["weight (3, 4)", "bias (4,)"]),
    (lambda: nd.rearrange(torch.zeros(6, 20), (4, 4), (3, 2)), FOLDS),
    (lambda: nd.rearrange(torch.zeros(120), (4, 5), (3, 2)), ["(120,)"]),
    *((partial(nd.nearest_kronecker, NAN, *fold), ["not finite"]) for fold in FOLDED),
    (lambda: nd.NdLinear.from_linear(nn.Linear(20, 6, device="meta"), *FOLDED[1]), ["on meta"]),
    (lambda: lora(nn.Linear(20, 6), (4, 4), (3, 2)), OTHER_FOLDS),
    (lambda: lora(nn.Linear(20, 6), (4, 5), (3, 3)), ["(4, 5)", "(3, 3)", "(20, 6)"]),
    (lambda: lora(nn.Linear(20, 6), hidden_size=(6,)), ["(4, 5)", "(6,)"]),
    (lambda: lora(nn.Linear(0, 6, device="meta")), ["input_dims=(1, 0)"]),
    (lambda: ndlinear_lora.apply_ndlinear_lora(nn.Linear(4, 4), "*"), ["itself"]),
    (lambda: ndlinear_lora.merge_lora(lora(nn.Linear(4, 4))), ["itself", "to_linear"]),
    (lambda: nd.FlatNdLinear((4, 5), (3, 2))(torch.zeros(7, 21)), ["(..., 20), got (7, 21)"]),
    (of_modes((4, 6), (4, 6), nn.Linear(4, 6), nn.Linear(6, 4)), SWAPPED),
    (of_modes((4, 6), (6, 4), nn.Linear(4, 6), nn.Linear(6, 6)), ["mode 2", "(4, 6), got (6, 6)"]),
]
CONVS = (nn.Conv1d(4, 4, 3), nn.Conv2d(4, 4, 1, groups=2), nn.Conv2d(4, 4, 1, padding=1))
TYPES = [
    (lambda: ON_META(torch.zeros(4, 5, device="meta").double()), ["float64", "float32", "meta"]),
    (lambda: nd.FlatNdLinear((4, 5), (3, 2))([1.0] * 20), ["(..., 20), got list"]),
    (lambda: nd.FlatNdLinear((4, 5), (3, 2))(np.zeros(20)), ["(..., 20), got ndarray"]),
    (lambda: nd.nearest_kronecker(X[0].int(), (5,), (4,)), ["int32", "double()"]),
    (lambda: nd.NdLinear.from_linear(X[0], (5,), (4,)), ["nn.Linear", "Tensor"]),
    *(
        (partial(lora, layer), ["nn.Linear or a convolution of kernel 1", "Conv"])
        for layer in CONVS
    ),
    (lambda: lora(nd.NdLinear((4,), (4,))), ["nn.Linear", "NdLinear"]),
    (of_modes((4, 6), (3, 5), nn.Linear(4, 3).double(), nn.Linear(6, 5)), MIXED),
    (of_modes((4, 6), (3, 5), nn.Linear(4, 3), nn.Linear(6, 5).double()), MIXED),
]
FIXED_NAMES = ("order", "execution_order", "transform_outer", "input_dims", "hidden_size")
SET = [(partial(setattr, nd.NdLinear((4,), (3,)), n, (1,)), [n, *FIXED]) for n in FIXED_NAMES]


def test_each_message_names_what_was_given_and_what_to_do():
    for error, cases in ((ValueError, VALUES), (TypeError, TYPES), (AttributeError, SET)):
        for call, parts in cases:
            check(error, call, parts)


@pytest.mark.parametrize("order", [(0,), (0, 0), (1, 2), (0, 1, 2), (0, 1, 0), (-1, 0)])
def test_orders(order):
    parts = [str(order), "(0, 1)", "once"]
    check(ValueError, lambda: nd.ndlinear(X, W, order=order), parts)
    check(ValueError, lambda: nd.count_macs((4, 5), (3, 2), order), parts)
